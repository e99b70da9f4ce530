"""Trajectories on the surrogate that are short and long enough for its tails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch.control_variate._bent import fit_scales, straight
from numpyro_minibatch.control_variate._expand import Expansion
from numpyro_minibatch.control_variate._matched import (
    MOST_MATCHED,
    Positions,
    fit_gradients,
)
from numpyro_minibatch.control_variate._posterior import POOL, SurrogatePosterior
from numpyro_minibatch.control_variate._problem import Problem
from numpyro_minibatch.control_variate._surrogate import log_density
from numpyro_minibatch.proposal import (
    HEAVY_DF,
    JITTER,
    LONGER,
    MOST_FOR_MANY_DRAWS,
    TRAJECTORY_LENGTH,
    Bent,
    ProposalContext,
    follow,
    log_metropolis_ratio,
)

__all__ = ["Trajectories", "compile_trajectories", "trajectories", "with_draws"]

# Likelihoods of rows that all draws evaluate at a step, above which half as many draws
# are followed, or a quarter.
_COSTLY, _FEW_DRAWS = 5_000_000, POOL // 4
_SEARCH = 10  # likelihoods that the search for the mode of an integral evaluates
# numbers of steps of a trajectory to try; the last ones where NUTS needs as many
_NUM_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# More are tried from few draws only. If none suits, this number is preferred unless
# chains stick at more than so many times as many draws.
_MANY_STEPS, _HARDLY_MORE = 64, 2.0
# A step that measures a gradient. Where the scale of effects was 0.007, a step of 0.01
# ended in places with gradients ten times as large.
_SHORT = 1e-6
_BLOCK = 100  # draws from which trajectories are followed at once
# share of a block at which chains stick, however short their steps, above which no
# further draws are looked at
_HOPELESS = 0.75
# With more coordinates, trajectories are judged at draws that the covariance was not
# computed from: the ends of trajectories of so many steps.
_FEW_COORDINATES, _FRESH = 40, 8
_HELD = 0.1  # acceptance probability below which a chain sticks at a draw
_STUCK = 0.001  # largest share of draws at which it may stick
# largest mean probability of a rejection, with draws weighted by their share in the
# variance of the squares
_LOST = 0.1
# Correlation of the squares at both ends of a trajectory above which there is a wide
# tail: as estimates of their mean, they are then about half as efficient as independent
# ones. Where unconstrained squares are below `_SCREEN`, sites are not looked at.
_KEPT = 0.3
_SCREEN = 0.11
# Correlation of ranks, of a site or of its square, above which coordinates are fitted
# to gradients, and by how much they must reduce it.
_CURVED, _LESS = 0.2, 0.1
# A number of steps up to which no other coordinates are looked for.
_FEW_STEPS = 16
# Largest share of positions farther out than the draws from which less than half of the
# trajectories are accepted. If it is larger, steps are shorter.
_REJECTED_FARTHER = 0.02
# If none are short enough, this multiple of the smallest share is as good as it.
_AS_GOOD = 1.25
# Acceptance rate of independent draws above which half of the moves are such draws. It
# is 0.83 and 0.87 for a mixture and a prior in conflict with the data, whose squares
# then have more effective draws. At 0.77 and 0.79, for Cauchy rows and the degrees of
# freedom of a Student-t distribution, chains stay in the tails. With half of the moves,
# 11% and 2.5% of right runs had advice; with 35%, 1.5% and none.
_ACCEPTED, _SOME_DRAWS = 0.8, 4


class Trajectories(NamedTuple):
    """The trajectories that suit a surrogate.

    :param num_steps: the number of steps for a quarter of a period of its dynamics; 0
        if it is normal.
    :param long: whether trajectories should be longer than that.
    :param stuck: the share of its draws from which trajectories are rarely accepted.
    :param bent: coordinates in which scales vary less; ``None`` for linear ones.
    :param kept: the largest correlation between both ends of a trajectory of a quarter
        of a period, of ranks, of a site or of its square.
    :param draws_fit: whether independent draws are accepted often enough to replace
        half of the trajectories; only with few parameters.
    """

    num_steps: int
    long: bool
    stuck: float
    bent: Bent | None = None
    kept: float = 0.0
    draws_fit: bool = False

    @property
    def cost(self) -> int:
        """Evaluations of the surrogate's gradient."""
        return self.num_steps * (LONGER if self.long else 1)

    @property
    def cost_of_effective(self) -> float:
        """Evaluations for each effective draw, if correlations fall geometrically."""
        return self.cost * (1.0 + self.kept) / max(1.0 - self.kept, 1e-3)


def trajectories(
    problem: Problem, posterior: SurrogatePosterior, bend: bool = True
) -> Trajectories:
    """Steps short enough for the tails, and trajectories long enough for them.

    In a tail, steps that are too long are rejected. The chain is reversible, so it also
    rarely enters such a tail during a run. An acceptance rate of 0.82 can go together
    with a variance that is a tenth too small. So draws count by their weight in the
    error of each parameter's variance.

    A quarter of a period forgets the start where the surrogate is normal. Where scales
    vary, a trajectory crosses a wide tail in several quarters of the average period.
    Such tails are those of the sites that a user reads. A wide tail of a logarithm
    towards minus infinity is no tail of the scale itself.

    Where scales depend on other coordinates, trajectories follow the surrogate in
    coordinates in which they do not.

    :param problem: the target and its coordinates.
    :param posterior: that of the surrogate.
    :param bend: whether such coordinates may be used.
    """
    if posterior.gaussian:
        return Trajectories(0, False, 0.0)
    linear = straight(posterior.location, posterior.root, problem.dtype)
    if not bend:
        return _in_coordinates(problem, posterior, linear)
    bent = fit_scales(posterior.draws, problem.dtype)
    found = _in_coordinates(problem, posterior, bent or linear)
    if bent is not None:
        other = found
        if found.stuck > _STUCK:
            other = _in_coordinates(problem, posterior, linear)
        found = other if other.stuck < found.stuck else found._replace(bent=bent)
    few = posterior.draws.shape[1] <= MOST_MATCHED
    if few and found.kept > _CURVED:
        return _matched(problem, posterior, found) or found
    return found


def _matched(
    problem: Problem, posterior: SurrogatePosterior, found: Trajectories
) -> Trajectories | None:
    """Trajectories in coordinates that are fitted to gradients, if they go farther.

    If they take many steps, those with other weights are compared with them.
    """
    sites = _at_draws(problem, posterior.draws)
    best: Trajectories | None = None
    for bent, farther, reaches in _by_gradients(problem, posterior, sites):
        if best is not None and not reaches:
            break
        matched = _in_coordinates(problem, posterior, bent, sites, farther, found.cost)
        # long trajectories forget more than a quarter of a period keeps
        wanted = found.kept - _LESS if found.long == matched.long else _CURVED
        helps = matched.kept < wanted and matched.cost <= found.cost
        if helps and matched.stuck <= max(found.stuck, _STUCK):
            if best is None or matched.cost_of_effective < best.cost_of_effective:
                best = matched._replace(bent=bent)
            if matched.cost <= _FEW_STEPS:
                break
    return best


def _by_gradients(
    problem: Problem, posterior: SurrogatePosterior, sites: np.ndarray
) -> Iterator[tuple[Bent, np.ndarray, bool]]:
    """Coordinates that are fitted to gradients, those to be preferred first.

    Trajectories from the draws do not show how coordinates suit places farther out. So
    those that were fitted there, too, come first. With equal weights, a fit finds the
    structure of a hierarchy; tails alone can lead it to other drivers.

    :param sites: the values of the sites at the draws, ``(K, d)``.
    :return: with each, positions farther out, ``(K, D)``, and whether the fit reached
        them.
    """
    gradients = partial(_gradients, problem, posterior)
    at_draws = gradients(posterior.draws)
    of_draws = []
    of_tails = _weights_of_tails(sites, sites)
    for weights in (np.ones(len(sites)), of_tails + of_tails.mean()):
        draws = Positions(posterior.draws, at_draws, weights)
        found = fit_gradients(draws, gradients, problem.dtype)
        if found is not None:
            yield found.of_both, found.farther, True
            of_draws.append((found.of_draws, found.farther, False))
    yield from of_draws


def _gradients(
    problem: Problem, posterior: SurrogatePosterior, positions: np.ndarray
) -> np.ndarray:
    """Those of the log surrogate at some positions, ``(K, D)``."""
    linear = straight(posterior.location, posterior.root, problem.dtype)
    return _Starts.at_rest(problem, posterior, linear, positions).gradients()


def _weights_of_tails(sites: np.ndarray, of_draws: np.ndarray) -> np.ndarray:
    """What positions contribute to the variance of the squares of some site, ``(K,)``.

    Weighted by it, the tails of sites matter as much as their bulk. They may be far
    from a bend that equal weights follow: the small rate constants of a saturating
    curve.

    :param sites: the values of the sites at the positions, ``(K, d)``.
    :param of_draws: those at the draws.
    """
    rms = np.sqrt(np.square(_squares(of_draws, of_draws)).mean(0))
    return np.asarray(np.abs(_squares(of_draws, sites) / rms).max(1))


def with_draws(
    problem: Problem, posterior: SurrogatePosterior, found: Trajectories
) -> Trajectories:
    """The same trajectories, knowing whether independent draws fit the surrogate."""
    if posterior.gaussian or posterior.draws.shape[1] > MOST_FOR_MANY_DRAWS:
        return found
    linear = straight(posterior.location, posterior.root, problem.dtype)
    accepted = _accepted_draws(problem, posterior, found.bent or linear)
    return found._replace(draws_fit=accepted > _ACCEPTED)


def _accepted_draws(
    problem: Problem, posterior: SurrogatePosterior, bent: Bent
) -> float:
    """The acceptance rate of independent draws on the surrogate, in equilibrium.

    With the density ``p`` of the surrogate and ``q`` of the draws, it is the mean of
    the smaller one of ``q / p`` at two draws from ``p``, where ``q / p`` has mean one.
    Draws from ``q`` that are farther out than all draws from ``p`` do not count. They
    are many in more coordinates: with five of a normal surrogate the result is 0.77 for
    a rate of 0.67.
    """
    draws = posterior.draws[::_SOME_DRAWS]
    logs = _Starts.at_rest(problem, posterior, bent, draws).log_ratios()
    number, ratio = len(draws), np.sort(np.exp(logs - logs.max()))
    # the k-th smallest number is the smaller one of all pairs with larger ones
    smaller = ratio * (2 * np.arange(number, 0, -1) - 1)
    return float(smaller.sum() / (number * ratio.sum()))


def _in_coordinates(
    problem: Problem,
    posterior: SurrogatePosterior,
    bent: Bent,
    sites: np.ndarray | None = None,
    farther: np.ndarray | None = None,
    most: int = 0,
) -> Trajectories:
    """The trajectories that suit some coordinates.

    :param sites: the values of the sites at the draws, ``(K, d)``, if steps should also
        be short enough for the tails of sites.
    :param farther: positions that a run reaches although they are farther out than the
        draws, ``(K, D)``. Steps should also be short enough there.
    :param most: the largest number of steps to which this may lead.
    """
    starts = _starts(problem, posterior, bent)
    num_steps, suits, stuck = _short_enough(starts, sites)
    if not suits:
        return Trajectories(num_steps, False, stuck, kept=1.0)
    num_steps = _short_enough_farther(
        problem, posterior, bent, farther, num_steps, most
    )
    starts = starts.for_steps(num_steps)
    ends = starts.followed(num_steps)
    of_values, of_squares = _kept(starts, *ends)
    kept = max(of_values, of_squares)
    if of_squares > _KEPT:
        # Steps that hardly suit a quarter of a period may not suit three of them. The
        # next shorter ones do then, which the search chooses if they are a little worse
        # than that: the answer would depend on rounding errors.
        for shorter in (n for n in (num_steps, 2 * num_steps) if n <= _NUM_STEPS[-1]):
            suits, stuck_of_long = _suit(starts, LONGER * shorter, LONGER)
            if suits:
                stuck = max(stuck, stuck_of_long)
                return Trajectories(shorter, True, stuck, kept=kept)
    return Trajectories(num_steps, False, stuck, kept=kept)


class _Ends(NamedTuple):
    """Where trajectories end.

    :param accepted: their acceptance probabilities, ``(K,)``.
    :param positions: the ends, ``(K, D)``.
    :param momenta: the momenta there, ``(K, D)``.
    :param log_ratios: at the starts, the log density of independent draws less that of
        the surrogate, up to a constant, ``(K,)``.
    """

    accepted: Any
    positions: Any
    momenta: Any
    log_ratios: Any


@dataclass(frozen=True)
class _Starts:
    """Draws of a surrogate's posterior from which trajectories are followed.

    :param problem: the target and its coordinates.
    :param expansion: that of the surrogate, in working precision.
    :param bent: the coordinates of the trajectories.
    :param draws: the draws, ``(K, D)``.
    :param momenta: a momentum for each, ``(K, D)``.
    :param stretch: factors of the step size, of which each draw has its own, ``(K,)``.
    """

    problem: Problem
    expansion: Expansion
    bent: Bent
    draws: np.ndarray
    momenta: np.ndarray
    stretch: np.ndarray

    @staticmethod
    def at_rest(
        problem: Problem, posterior: SurrogatePosterior, bent: Bent, draws: np.ndarray
    ) -> _Starts:
        """Some draws, without momenta."""
        expansion = posterior.expansion.cast(problem.dtype)
        none, ones = np.zeros_like(draws), np.ones(len(draws))
        return _Starts(problem, expansion, bent, draws, none, ones)

    def for_steps(self, num_steps: int) -> _Starts:
        """The first of them if trajectories have many steps, and otherwise all.

        :param num_steps: the number of steps.
        """
        number = _FEW_DRAWS if num_steps > _MANY_STEPS else len(self.draws)
        return replace(
            self,
            draws=self.draws[:number],
            momenta=self.momenta[:number],
            stretch=self.stretch[:number],
        )

    def blocks(
        self, num_steps: int, quarters: int, stretch: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Acceptance probabilities and ends of trajectories, block by block.

        :param num_steps: the number of steps.
        :param quarters: their length together, in quarters of a period.
        :param stretch: factors of the step size.
        """
        steps = quarters * TRAJECTORY_LENGTH / num_steps * stretch
        for ends in self._ends(steps, num_steps):
            yield ends.accepted, ends.positions

    def gradients(self) -> np.ndarray:
        """Those of the log surrogate at the draws, ``(K, D)``.

        After one short step from rest, the momentum is the gradient of the white
        coordinates times the step. No other program is compiled.
        """
        short = np.full(len(self.draws), _SHORT)
        found = np.concatenate([ends.momenta for ends in self._ends(short, 1)])
        root = np.asarray(self.bent.whitening.root, np.float64)
        return np.asarray(np.linalg.solve(root, found.T / _SHORT).T)

    def log_ratios(self) -> np.ndarray:
        """Log densities of independent draws less those of the surrogate, ``(K,)``."""
        short = np.full(len(self.draws), _SHORT)
        return np.concatenate([ends.log_ratios for ends in self._ends(short, 1)])

    def _ends(self, steps: np.ndarray, num_steps: int) -> Iterator[_Ends]:
        """Trajectories from the draws, block by block.

        :param steps: a step size for each.
        :param num_steps: the number of steps.
        """
        program = self.problem.compiled(_ends_of_trajectories)
        for begin in range(0, len(steps), _BLOCK):
            some = slice(begin, begin + _BLOCK)
            at = self.draws[some], self.momenta[some], steps[some]
            given = _followed(self.problem, self.expansion, self.bent, at, num_steps)
            yield _Ends(*(np.asarray(x, np.float64) for x in program(*given)))

    def followed(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Acceptance probabilities and ends of all, after a quarter of a period.

        :param num_steps: the number of steps.
        """
        accepted, z = zip(*self.blocks(num_steps, 1, self.stretch), strict=True)
        return np.concatenate(accepted), np.concatenate(z)


def _starts(problem: Problem, posterior: SurrogatePosterior, bent: Bent) -> _Starts:
    """As many draws as can be followed in a short time."""
    expansion = posterior.expansion.cast(problem.dtype)
    draws = posterior.draws[:: POOL // _number_followed(problem, expansion)]
    rng = np.random.default_rng(33)
    momenta = rng.normal(size=draws.shape)
    stretch = 1.0 + JITTER * rng.uniform(-1.0, 1.0, size=len(draws))
    starts = _Starts(problem, expansion, bent, draws, momenta, stretch)
    if draws.shape[1] <= _FEW_COORDINATES:
        return starts
    # The covariance has been fitted to these draws: with 100 coordinates, 96% of the
    # moves from them were accepted, and 77% of those of a chain.
    accepted, z = starts.followed(_FRESH)
    taken = rng.uniform(size=(len(draws), 1)) < accepted[:, None]
    draws, momenta = np.where(taken, z, draws), rng.normal(size=draws.shape)
    return replace(starts, draws=draws, momenta=momenta)


def _short_enough(
    starts: _Starts, sites: np.ndarray | None = None
) -> tuple[int, bool, float]:
    """The smallest number of steps that suits the tails.

    :param sites: the values of the sites at the draws, ``(K, d)``, or ``None`` if only
        the tails of parameters count.
    :return: the number, whether it suits, and the share of the draws from which
        trajectories are rarely accepted.
    """
    squares = _squares(starts.draws, starts.draws)
    if sites is not None:
        some = sites[:: len(sites) // len(starts.draws)]
        squares = np.column_stack([squares, _squares(some, some)])
    weights, most = np.square(squares), _NUM_STEPS[-1]
    for num_steps in _NUM_STEPS:
        first = starts.for_steps(num_steps)
        suits, stuck = _suit(first, num_steps, 1, weights, last=num_steps == most)
        if suits:
            return num_steps, True, stuck
    if most > _MANY_STEPS:
        _, stuck_of_few = _suit(starts, _MANY_STEPS, 1, weights, last=True)
        if stuck_of_few <= _HARDLY_MORE * stuck:
            return _MANY_STEPS, False, stuck_of_few
    return most, False, stuck


def _short_enough_farther(
    problem: Problem,
    posterior: SurrogatePosterior,
    bent: Bent,
    farther: np.ndarray | None,
    num_steps: int,
    most: int,
) -> int:
    """A number of steps that also suits positions farther out than the draws.

    It is at least twice the one that suits the draws, if that is not above ``most``:
    with those, chains stayed far in the tail of a hierarchy for twenty moves. If no
    number suits the positions, it is the smallest one that is about as good as others:
    the steps are not the reason for what is then rejected.

    :param farther: the positions, ``(K, D)``.
    :param num_steps: the number that suits the draws.
    :param most: the largest number to try.
    """
    num_steps *= 2 if 2 * num_steps <= most else 1
    if farther is None:
        return num_steps
    starts = _Starts.at_rest(problem, posterior, bent, farther)
    momenta = np.random.default_rng(42).normal(size=farther.shape)
    starts = replace(starts, momenta=momenta)

    def rejected(number: int) -> float:
        accepted, _ = starts.followed(number)
        return float((~(accepted >= 0.5)).mean())

    shares: dict[int, float] = {}
    while num_steps <= most or not shares:
        shares[num_steps] = rejected(num_steps)
        if shares[num_steps] <= _REJECTED_FARTHER:
            break
        num_steps *= 2
    least = max(_REJECTED_FARTHER, _AS_GOOD * min(shares.values()))
    return next(number for number, share in shares.items() if share <= least)


def _kept(starts: _Starts, accepted: np.ndarray, z: np.ndarray) -> tuple[float, float]:
    """The largest correlations after a quarter of a period: of values and of squares.

    They are those of the sites, which are not looked at if no correlation of the
    parameters is large. Those of ranks, on which the effective sample size of the bulk
    depends, are the same for both.
    """
    draws = starts.draws
    of_ranks, _ = _correlations(_ranks(draws, draws), _ranks(draws, z), accepted)
    _, of_squares = _correlations(draws, z, accepted)
    if of_ranks <= _CURVED and of_squares <= _SCREEN:
        return of_ranks, of_squares
    begin, end = (_at_draws(starts.problem, x) for x in (draws, z))
    of_values, of_squares = _correlations(begin, end, accepted)
    return max(of_ranks, of_values), of_squares


def _ranks(draws: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The ranks of values among draws, ``(K, d)``."""
    found = []
    for ordered, x in zip(np.sort(draws, axis=0).T, values.T, strict=True):
        below, up_to = (np.searchsorted(ordered, x, side) for side in ("left", "right"))
        found.append(below + up_to)
    return np.column_stack(found)


def _at_draws(problem: Problem, positions: np.ndarray) -> np.ndarray:
    """The constrained values of the latent sites at some positions, ``(K, d)``."""
    values = problem.compiled(_site_values)
    blocks = [positions[k : k + _BLOCK] for k in range(0, len(positions), _BLOCK)]
    found = [values(jnp.asarray(block, problem.dtype)) for block in blocks]
    return np.concatenate([np.asarray(x, np.float64) for x in found])


def _suit(
    starts: _Starts,
    num_steps: int,
    quarters: int,
    squares: np.ndarray | None = None,
    last: bool = False,
) -> tuple[bool, float]:
    """Whether trajectories are accepted from nearly all draws, and where they stick.

    No block is looked at after the one that decides.

    :param starts: the draws. Lengths are those of a run only if there are no weights.
    :param num_steps: the number of steps of a trajectory.
    :param quarters: its length, in quarters of a period.
    :param squares: the weights of the draws in the error of each parameter's variance,
        ``(K, D)``; without them, only draws count at which chains stick.
    :param last: whether there are no shorter steps, so that the share counts.
    :return: the answer, and the share of the draws looked at from which trajectories
        are rarely accepted.
    """
    number = len(starts.draws)
    stretch = starts.stretch if squares is None else np.ones(number)
    weights = np.zeros((number, 1)) if squares is None else squares[:number]
    total = np.maximum(weights.sum(0), np.finfo(float).tiny)
    done = stuck = 0
    lost = np.zeros(weights.shape[1])
    for accepted, _ in starts.blocks(num_steps, quarters, stretch):
        lost += (1 - accepted) @ weights[done : done + len(accepted)] / total
        done += len(accepted)
        stuck += int((accepted < _HELD).sum())
        suits = stuck <= _STUCK * number and lost.max() <= _LOST
        if stuck > _HOPELESS * done if last else not suits:
            break
    return bool(suits), stuck / done


def _number_followed(problem: Problem, expansion: Expansion) -> int:
    """The number of draws from which trajectories start."""
    number = POOL
    search = _SEARCH if problem.row_size > 1 else 0
    cost_of_one = expansion.num_exact * (problem.row_size + search)
    while number > _FEW_DRAWS and number * cost_of_one > _COSTLY:
        number //= 2
    return number


def _followed(
    problem: Problem,
    expansion: Expansion,
    bent: Bent,
    at: tuple[np.ndarray, ...],
    num_steps: int,
) -> tuple[Any, ...]:
    """The arguments of :func:`_ends_of_trajectories`.

    :param at: the draws, and a momentum and a step size for each.
    """
    arrays = [jnp.asarray(x, problem.dtype) for x in at]
    return expansion, bent, *arrays, np.int32(num_steps)


def _correlations(
    starts: np.ndarray, ends: np.ndarray, accepted: np.ndarray
) -> tuple[float, float]:
    """The largest correlations between both ends of trajectories.

    :param starts: values at the starts, which are draws, ``(K, d)``.
    :param ends: values at the ends.
    :param accepted: the acceptance probabilities, ``(K,)``.
    :return: those of a value and of a square.
    """
    found = []
    for power in (1, 2):
        before, after = (_standardised(starts, x) ** power for x in (starts, ends))
        before, after = before - (power - 1), after - (power - 1)
        taken = accepted[:, None]
        with np.errstate(invalid="ignore"):  # of ends that are never accepted
            after = np.where(taken > 0, taken * after, 0.0) + (1 - taken) * before
        kept = (before * after).mean(0) / np.square(before).mean(0)
        found.append(float(kept.max(initial=-1.0)))
    return found[0], found[1]


def _standardised(draws: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values in standard deviations of draws, ``(K, d)``, where draws vary."""
    mean, sd = draws.mean(0), draws.std(0)
    varies = sd > 1e-6 * np.abs(mean)  # unlike the first row of a Cholesky factor
    return np.asarray((values[:, varies] - mean[varies]) / sd[varies])


def _squares(draws: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Squares of values in standard deviations of draws less one, ``(K, d)``."""
    return np.square(_standardised(draws, values)) - 1


def _site_values(problem: Problem, arrays: list[Any], positions: Array) -> Array:
    """The constrained values of the latent sites at some positions, ``(K, d)``."""
    target = problem.target_of(arrays)

    def one(flat: Array) -> Array:
        z = problem.unravel(flat)
        values = target.constrain(z)
        if isinstance(z, dict):  # without deterministic sites, which may be large
            values = {name: values[name] for name in z}
        return ravel_pytree(values)[0]

    return jax.vmap(one)(positions)


def _ends_of_trajectories(
    problem: Problem,
    arrays: list[Any],
    expansion: Expansion,
    bent: Bent,
    draws: Array,
    momenta: Array,
    steps: Array,
    num_steps: Array,
) -> _Ends:
    """The ends of trajectories from some draws."""

    def unread(_: Array) -> Array:
        raise AssertionError("the surrogate has its own gradient")

    context = ProposalContext(
        unread,
        bent.whitening,
        bent.center,
        log_surrogate=partial(log_density, problem, arrays, expansion),
    )

    def one(z: Array, momentum: Array, step: Array) -> _Ends:
        z_new, after, logs, grown = follow(z, momentum, step, num_steps, context)
        lost = log_metropolis_ratio(momentum, after, logs, grown)
        lost = jnp.minimum(jnp.nan_to_num(lost, nan=-jnp.inf), 0.0)
        white = bent.whitening.whiten(z - bent.center)
        tail = jnp.log1p(jnp.square(white).sum() / HEAVY_DF)
        log_draws = -0.5 * (HEAVY_DF + z.size) * tail - bent.whitening.log_volume(white)
        return _Ends(jnp.exp(lost), z_new, after, log_draws - logs[0])

    return jax.vmap(one)(draws, momenta, steps)


def compile_trajectories(
    problem: Problem, expansion: Expansion, start: np.ndarray
) -> None:
    """Compile what :func:`trajectories` needs on another thread.

    :param problem: the target and its coordinates.
    :param expansion: the expansion of the surrogate, in working precision.
    :param start: a flat position.
    """
    dim = len(start)
    zeros = np.zeros((_BLOCK, dim))
    bent = straight(zeros[0], np.zeros((dim, dim)), problem.dtype)
    at = zeros, zeros, zeros[:, 0]
    problem.compiled(_ends_of_trajectories).ahead(
        *_followed(problem, expansion, bent, at, 1)
    )
