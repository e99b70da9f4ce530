"""The posterior of a surrogate with several modes, and its tails at each of them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from numpyro_minibatch.control_variate._expand import Expansions
from numpyro_minibatch.control_variate._modes import FoundMode, FoundModes
from numpyro_minibatch.control_variate._pilot import FLOAT_ERROR, IN_DOUBLE, Pilot
from numpyro_minibatch.control_variate._posterior import (
    SurrogatePosterior,
    surrogate_posterior,
)
from numpyro_minibatch.control_variate._problem import NoExpansion, Problem, Refused
from numpyro_minibatch.control_variate._surrogate import rounding_error
from numpyro_minibatch.control_variate._tails import (
    MAX_INEFFICIENCY,
    Tails,
    measure_tails,
    with_representatives,
)
from numpyro_minibatch.control_variate._trajectories import Trajectories, trajectories
from numpyro_minibatch.proposal import Modes, PriorAtModes

__all__ = ["PosteriorOfModes", "distances", "posterior_of_modes", "with_tails"]

_LEAST_INSIDE = 0.25  # share of a surrogate's draws that must belong to its mode
_DRAWS = 2000  # of all modes together


class PosteriorOfModes(NamedTuple):
    """The posteriors of the surrogates of several modes.

    :param parts: that of each mode; its draws belong to the mode.
    :param modes: their normal approximations, as NumPy arrays.
    :param prior: the log prior at their means, as NumPy arrays.
    """

    parts: tuple[SurrogatePosterior, ...]
    modes: Modes
    prior: PriorAtModes

    def mixed(self) -> tuple[SurrogatePosterior, np.ndarray]:
        """The posterior of all modes, and positions to start from.

        Its draws come from all modes in equal numbers: they score rows and measure the
        expansion, in a mode with little mass as well. The positions to start from come
        from each mode in proportion to its mass.
        """
        parts, rng = self.parts, np.random.default_rng(44)

        def drawn(which: np.ndarray) -> np.ndarray:
            draws = np.empty((len(which), parts[0].draws.shape[1]))
            for k, part in enumerate(parts):
                mine = np.flatnonzero(which == k)
                chosen = np.resize(rng.permutation(len(part.draws)), len(mine))
                draws[mine] = part.draws[chosen]
            return draws

        # every block of as many draws as there are modes has one of each
        blocks = [rng.permutation(len(parts)) for _ in range(-(-_DRAWS // len(parts)))]
        draws = drawn(np.concatenate(blocks)[:_DRAWS])
        weights = np.exp(self.modes.log_weight)
        starts = drawn(rng.choice(len(parts), _DRAWS, p=weights))
        expansions = Expansions.of(
            [part.expansion for part in parts], self.modes, self.prior
        )
        posterior = SurrogatePosterior(
            expansions,  # type: ignore[arg-type]
            starts.mean(0),
            np.linalg.cholesky(np.atleast_2d(np.cov(draws.T))).T,
            draws,
            all(part.gaussian for part in parts),
            max(part.rhat for part in parts),
        )
        return posterior, starts

    def trajectories(self, problem: Problem) -> Trajectories:
        """The trajectories that suit the surrogates of all modes."""
        each = [trajectories(problem, part, bend=False) for part in self.parts]
        return Trajectories(
            max(of_mode.num_steps for of_mode in each),
            False,  # moves within a mode have one length
            max(of_mode.stuck for of_mode in each),
        )


def posterior_of_modes(problem: Problem, found: FoundModes) -> PosteriorOfModes:
    """Sample the surrogate of each mode.

    :param problem: the target and its coordinates.
    :param found: the modes.
    :raises Refused: the surrogate of a mode cannot be sampled.
    """
    parts = [
        surrogate_posterior(
            problem,
            mode.expansion,
            np.asarray(mode.expansion.center),
            mode.known.hessian,
        )
        for mode in found.modes
    ]
    masses = np.array([mode.mass for mode in found.modes])
    root = np.stack([part.root for part in parts])
    modes = Modes(
        np.stack([part.location for part in parts]),  # type: ignore[arg-type]
        root,  # type: ignore[arg-type]
        np.log(masses / masses.sum()),  # type: ignore[arg-type]
        # products are faster than triangular systems, one for each chain and mode
        np.linalg.inv(root),  # type: ignore[arg-type]
    )
    return PosteriorOfModes(
        tuple(_within(modes, k, part) for k, part in enumerate(parts)),
        modes,
        _prior_at(modes, found.modes),
    )


def with_tails(
    problem: Problem, pilot: Pilot, posterior: PosteriorOfModes
) -> tuple[PosteriorOfModes, list[Tails]]:
    """The tails at each mode, and the posteriors with representative rows of its own.

    The representatives of a mode correct the residuals of its expansion, and they count
    only in its region. The sum of the surrogate and of what batches estimate is still
    the target.

    :param problem: the target and its coordinates.
    :param pilot: what was measured over draws from all modes.
    :param posterior: that of the surrogates without representative rows.
    :return: the same posterior if no mode needs them, or none can be helped.
    """
    parts, before, after = [], [], []
    for k, part in enumerate(posterior.parts):
        inside = partial(_inside, posterior.modes, k)
        tails = measure_tails(problem, pilot, part, inside)
        before.append(tails)
        if tails.inefficiency > MAX_INEFFICIENCY:
            changed = with_representatives(problem, pilot, part, tails, inside)
            try:
                part, tails = _within(posterior.modes, k, changed[0]), changed[1]
            except Refused:  # its draws are in the regions of other modes
                pass
        parts.append(part)
        after.append(tails)
    if all(a is b for a, b in zip(parts, posterior.parts, strict=True)):
        return posterior, before
    better = posterior._replace(parts=tuple(parts))
    mixed, _ = better.mixed()
    draws = mixed.draws[: max(IN_DOUBLE, 2 * len(parts))]  # of all modes
    if rounding_error(problem, mixed.expansion, draws) > FLOAT_ERROR:
        return posterior, before
    return better, after


def _prior_at(modes: Modes, found: tuple[FoundMode, ...]) -> PriorAtModes:
    """All that is not expanded, at the means: to second order about the centres."""
    known = [mode.known for mode in found]
    away = modes.location - np.stack([mode.expansion.center for mode in found])
    hessian = np.stack([each.hessian for each in known])
    slope = np.stack([each.gradient for each in known])
    bent = np.einsum("kij,kj->ki", hessian, away)
    value = np.stack([each.value for each in known])
    value = value + np.einsum("ki,ki->k", slope + 0.5 * bent, away)
    return PriorAtModes.of(modes, value, slope + bent, hessian)


def distances(modes: Modes, draws: np.ndarray) -> np.ndarray:
    """Distances to each mode in its standard deviations, ``(number of draws, K)``."""
    found = []
    for location, root in zip(modes.location, modes.root, strict=True):
        white = np.linalg.solve(np.asarray(root).T, (draws - np.asarray(location)).T)
        found.append(np.linalg.norm(white, axis=0))
    return np.stack(found, axis=1)


def _inside(modes: Modes, mode: int, draws: np.ndarray) -> np.ndarray:
    """Whether each of some positions belongs to a mode."""
    diagonals = np.diagonal(np.asarray(modes.root), axis1=-2, axis2=-1)
    scales = np.log(np.abs(diagonals)).sum(-1)
    weighted = np.asarray(modes.log_weight) - scales
    density = weighted - 0.5 * np.square(distances(modes, draws))
    return density.argmax(1) == mode


def _within(modes: Modes, mode: int, part: SurrogatePosterior) -> SurrogatePosterior:
    """The posterior with only those of its draws that belong to a mode.

    :raises Refused: hardly any does.
    """
    inside = _inside(modes, mode, part.draws)
    if inside.all():
        return part
    if inside.mean() < _LEAST_INSIDE:
        raise NoExpansion(
            f"mode {mode + 1} of {len(modes.location)} overlaps with the others: only "
            f"{inside.mean():.0%} of the draws of its surrogate are closer "
            "to it than to them. Write control_variate.taylor2(modes=1), or sample at "
            "a temperature."
        )
    return part._replace(draws=part.draws[inside])
