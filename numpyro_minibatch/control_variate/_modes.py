"""The search for the modes of a posterior, from many starts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.control_variate._center import (
    Density,
    Known,
    newton,
)
from numpyro_minibatch.control_variate._expand import Expansion, Expansions
from numpyro_minibatch.control_variate._posterior import (
    SurrogatePosterior,
    surrogate_posterior,
)
from numpyro_minibatch.control_variate._problem import Problem, Refused, double
from numpyro_minibatch.control_variate._search import Optimum, quasi_newton
from numpyro_minibatch.control_variate._taylor import Taylor
from numpyro_minibatch.proposal import Modes, PriorAtModes
from numpyro_minibatch.target import ModelTarget

__all__ = [
    "FoundMode",
    "FoundModes",
    "distances",
    "find_modes",
    "posterior_of_modes",
]

_RANDOM_STARTS = 32  # half from the prior, half from the box of NumPyro's starts
_COPIES = 16  # searches from transformed copies of each mode
_JITTERED = 2  # of them from the neighbourhood of a mode
_FEW_SITES = 12  # coordinates up to which the sign of each is changed alone
_SAME = 2.0  # standard deviations within which two ends are one mode
_LEAST = 1e-4  # mass of a mode below which it is left out
_LEAST_INSIDE = 0.25  # share of a surrogate's draws that must belong to its mode
_MOST = 64  # different ends on some rows that are looked at
_NEGLIGIBLE = 20.0  # nats below the heaviest mode at which no mode matters


class FoundMode(NamedTuple):
    """A mode, by all rows.

    :param expansion: the sum of the rows' polynomials about it, in double precision.
    :param known: the log density of all that is not expanded, there.
    :param mass: by the Laplace approximation, relative to all that were found.
    :param found: how many of the random starts led to it.
    """

    expansion: Expansion
    known: Known
    mass: float
    found: int


class FoundModes(NamedTuple):
    """What a search for modes found.

    :param modes: those that are kept, the heaviest first.
    :param about: the expansion about a point, by a pass that is compiled.
    :param num_searches: searches from random starts that ended.
    :param left_out: masses of the modes that are not kept.
    :param once: how many modes would not have been found without a single one of the
        random starts, among those whose mass is not negligible.
    :param never: how many of these would not have been found from the random starts.
    """

    modes: tuple[FoundMode, ...]
    about: Callable[[np.ndarray], Expansion]
    num_searches: int
    left_out: tuple[float, ...]
    once: int
    never: int

    @property
    def missed(self) -> float:
        """The probability that another search ends in a mode not found: Good-Turing.

        A search also finds what copies of its mode lead to. A mode that copies of
        another one lead to thus does not depend on one search.
        """
        return self.once / max(self.num_searches, 1)

    @property
    def report(self) -> dict[str, Any]:
        """What is told of the search."""
        return {
            "num_modes": len(self.modes),
            "mode_masses": [mode.mass for mode in self.modes],
            "mode_found": [mode.found for mode in self.modes],
            "mode_searches": self.num_searches,
            "mode_once": self.once,
            "mode_never": self.never,
            "mode_missed": self.missed,
            "mode_left_out": list(self.left_out),
        }


class _End(NamedTuple):
    """A mode by some rows."""

    position: np.ndarray
    value: float
    hessian: np.ndarray
    found: int

    def distance(self, other: np.ndarray) -> float:
        """To another position, in standard deviations."""
        away = other - self.position
        return float(np.sqrt(max(away @ self.hessian @ away, 0.0)))


class _Refined(NamedTuple):
    """A mode by all rows, and what its expansion is made of."""

    end: _End
    expansion: Expansion
    known: Known

    @property
    def score(self) -> float:
        """Minus the logarithm of its mass, up to a constant."""
        return self.end.value + _half_log_det(self.end.hessian)


def _half_log_det(matrix: np.ndarray) -> float:
    return 0.5 * float(np.linalg.slogdet(matrix)[1])


def find_modes(problem: Problem, starts: np.ndarray, taylor: Taylor) -> FoundModes:
    """Find the modes of a posterior that is expanded in its own coordinates.

    :param problem: the target and its coordinates.
    :param starts: where to start as well as at random positions, shape ``(k, d)``.
    :param taylor: the control variate, whose ``modes`` are kept at most.
    :raises Refused: no search ends in a mode.
    """
    density = Density.of(problem, taylor, starts.shape[1])
    density.ahead(starts.shape[1])
    stage("modes of some rows")
    ends, ended = _Ends(density), 0
    for start in _random_starts(problem, starts.shape[1]):
        optimum = ends.search(start)
        number = ends.add(optimum, random=True)
        ended += number is not None or (optimum.ended and ends.too_low(optimum.fun))
    for start in starts:
        ends.given.add(ends.add(ends.search(start), random=False))
    stage("copies of these modes")
    while (number := ends.next()) is not None:  # also copies of copies
        for start in _copies(problem, density, ends, number):
            ends.leads(number, ends.add(ends.search(start), random=False))
    if not ends.found:
        raise Refused(
            "none of the searches for modes ended at a maximum of the log density. "
            "Give the parameters proper priors, standardise the data, or pass a "
            "centre: control_variate.taylor2(center={site: unconstrained value})."
        )
    stage("modes of all rows")
    return _of_all_rows(problem, density, ends, ended, taylor.modes)


def _refine(
    density: Density, end: _End, refined: list[_Refined], copies: list[np.ndarray]
) -> tuple[_Refined, int | None]:
    """The mode of all rows that an end on some rows leads to.

    :param refined: the modes that are known.
    :param copies: their transformed copies. One that is near may be the mode already,
        or may lead to another one: then Newton steps start at the end itself.
    :return: the mode, and its number among those that are known, if it is one.
    :raises Refused: the steps do not end at a mode that matters.
    """
    best = min((one.score for one in refined), default=np.inf)
    largest = best + _NEGLIGIBLE - _half_log_det(end.hessian)
    # the mode of all rows is a few standard deviations of some rows away
    reach = (2.0 + np.sqrt(len(end.position))) * density.spread
    near = [x for x in copies if end.distance(x) < reach]
    if near:
        try:
            start = min(near, key=end.distance)
            found = _newton_to(density, end, start, reach, largest)
        except Refused:
            pass
        else:
            if (same := _number_of(found, refined)) is None:
                return found, same
    found = _newton_to(density, end, end.position, reach, largest)
    return found, _number_of(found, refined)


def _newton_to(
    density: Density, end: _End, start: np.ndarray, reach: float, largest: float
) -> _Refined:
    """The mode that Newton steps on all rows end at."""
    position, hessian = newton(density.of_all, start, end.hessian, reach, largest)
    value = float(density.of_all(position)[0])
    return _Refined(
        end._replace(position=position, value=value, hessian=hessian),
        density.about(position),
        density.known_at(position),
    )


def _number_of(new: _Refined, refined: list[_Refined]) -> int | None:
    """The number of a mode among those that are known, if it is one."""
    for k, old in enumerate(refined):
        apart = (
            old.end.distance(new.end.position),
            new.end.distance(old.end.position),
        )
        if min(apart) < _SAME:
            return k
    return None


def _of_all_rows(
    problem: Problem, density: Density, ends: _Ends, ended: int, most: int
) -> FoundModes:
    """The modes by all rows, with their masses.

    :raises Refused: the best of them has no Laplace approximation.
    """
    refined: list[_Refined] = []
    copies: list[np.ndarray] = []  # of those, which other modes may be
    members: list[set[int]] = []  # the ends on some rows that each comes from
    for number, end in sorted(enumerate(ends.found), key=lambda pair: pair[1].value):
        if ends.too_low(end.value):
            continue
        try:
            new, same = _refine(density, end, refined, copies)
        except Refused:
            if not refined:  # the best one is not left out without a word
                raise
            continue
        if same is None:
            refined.append(new)
            members.append({number})
            copies += _transformed(problem, new.end.position)
        else:
            old = refined[same]
            better = min(old, new, key=lambda one: one.end.value)
            found = old.end.found + new.end.found
            refined[same] = better._replace(end=better.end._replace(found=found))
            members[same].add(number)
    logs = -np.array([one.score for one in refined])
    masses = np.exp(logs - logs.max())
    masses /= masses.sum()
    order = np.argsort(-masses, kind="stable")
    kept = [k for k in order[:most] if masses[k] >= _LEAST]
    modes = [
        FoundMode(
            refined[k].expansion,
            refined[k].known,
            float(masses[k]),
            refined[k].end.found,
        )
        for k in kept
    ]
    left_out = tuple(float(masses[k]) for k in order[len(kept) :])
    heavy = [k for k in order if masses[k] >= _LEAST]
    once = sum(
        refined[k].end.found == 1 and not ends.known_without(members[k]) & members[k]
        for k in heavy
    )
    by_random = ends.known_without(set(), given=False)
    never = sum(not by_random & members[k] for k in heavy)
    return FoundModes(tuple(modes), density.about, ended, left_out, once, never)


def posterior_of_modes(
    problem: Problem, found: FoundModes
) -> tuple[SurrogatePosterior, np.ndarray]:
    """The posterior of the surrogate with several modes, and positions to start from.

    Its draws come from all modes in equal numbers: they score rows and measure the
    expansion, in a mode with little mass as well. The positions to start from come from
    each mode in proportion to its mass.

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
    modes = Modes(
        np.stack([part.location for part in parts]),  # type: ignore[arg-type]
        np.stack([part.root for part in parts]),  # type: ignore[arg-type]
        np.log(masses / masses.sum()),  # type: ignore[arg-type]
    )
    pools = [_inside(modes, k, part.draws) for k, part in enumerate(parts)]
    rng = np.random.default_rng(44)

    def drawn(which: np.ndarray) -> np.ndarray:
        draws = np.empty((len(which), pools[0].shape[1]))
        for k, pool in enumerate(pools):
            mine = np.flatnonzero(which == k)
            draws[mine] = pool[np.resize(rng.permutation(len(pool)), len(mine))]
        return draws

    number = len(parts[0].draws)
    # every block of as many draws as there are modes has one of each
    blocks = [rng.permutation(len(parts)) for _ in range(-(-number // len(parts)))]
    draws = drawn(np.concatenate(blocks)[:number])
    starts = drawn(rng.choice(len(parts), number, p=np.exp(modes.log_weight)))
    prior = _prior_at(modes, found.modes)
    expansions = Expansions.of([mode.expansion for mode in found.modes], modes, prior)
    posterior = SurrogatePosterior(
        expansions,  # type: ignore[arg-type]
        starts.mean(0),
        np.linalg.cholesky(np.atleast_2d(np.cov(draws.T))).T,
        draws,
        all(part.gaussian for part in parts),
        max(part.rhat for part in parts),
        max(part.num_steps for part in parts),
        max(part.stuck for part in parts),
    )
    return posterior, starts


def _prior_at(modes: Modes, found: tuple[FoundMode, ...]) -> PriorAtModes:
    """What is not expanded, at the means: to second order about the centres."""
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
    """Those draws that belong to a mode.

    :raises Refused: hardly any does.
    """
    diagonals = np.diagonal(np.asarray(modes.root), axis1=-2, axis2=-1)
    scales = np.log(np.abs(diagonals)).sum(-1)
    weighted = np.asarray(modes.log_weight) - scales
    density = weighted - 0.5 * np.square(distances(modes, draws))
    inside = draws[density.argmax(1) == mode]
    if len(inside) < _LEAST_INSIDE * len(draws):
        raise Refused(
            f"mode {mode + 1} of {len(modes.location)} overlaps with the others: only "
            f"{len(inside) / len(draws):.0%} of the draws of its surrogate are closer "
            "to it than to them. Write control_variate.taylor2(modes=1), or sample at "
            "a temperature."
        )
    return inside


class _Ends:
    """Different ends of searches on some rows, and how often each was found."""

    def __init__(self, density: Density) -> None:
        self.density = density
        self.found: list[_End] = []
        # those that starts which are not random found
        self.given: set[int | None] = set()
        self.copied: set[int] = set()  # whose copies searches started from
        self.led: list[set[int]] = []  # to which others copies of each lead

    def search(self, start: np.ndarray) -> Optimum:
        """A search on some rows, which ends early where it comes to a known end."""
        return quasi_newton(self.density.of_some, start, self._arrives)

    def too_low(self, value: float) -> bool:
        """Whether an end cannot matter, given that some rows say so with noise."""
        best = min((end.value for end in self.found), default=np.inf)
        return value > best + _NEGLIGIBLE * (1.0 + self.density.spread**2)

    def next(self) -> int | None:
        """The best of those ends of which no copies were tried, if one is left."""
        left = [
            k
            for k, end in enumerate(self.found)
            if k not in self.copied and not self.too_low(end.value)
        ]
        if not left or len(self.found) > _MOST:
            return None
        number = min(left, key=lambda k: self.found[k].value)
        self.copied.add(number)
        return number

    def add(self, optimum: Optimum, random: bool) -> int | None:
        """Count an end of a search; its number, if it is a mode that matters.

        :param optimum: where the search ended.
        :param random: whether the search started at a random position.
        """
        position, value = optimum.x, optimum.fun
        if not np.isfinite(value) or self.too_low(value):
            return None
        k = self._counted(position, value, random)
        if k is not None or len(self.found) > _MOST:
            return k
        try:
            position, hessian = newton(self.density.curved, position)
        except Refused:
            return None
        value = float(self.density.curved(position)[0])
        k = self._counted(position, value, random)
        if k is None:
            k = len(self.found)
            self.found.append(_End(position, value, hessian, int(random)))
            self.led.append(set())
        return k

    def leads(self, one: int, other: int | None) -> None:
        """Note that a copy of an end leads to another, if that is a mode."""
        if other is not None:
            self.led[one].add(other)

    def known_without(self, some: set[int], given: bool = True) -> set[int]:
        """Ends that are found without the searches from a start that ended in some.

        :param some: the ends whose searches are left out.
        :param given: whether starts that are not random count.
        """
        todo = [
            k
            for k, end in enumerate(self.found)
            if k not in some and (end.found or (given and k in self.given))
        ]
        known: set[int] = set()
        while todo:
            k = todo.pop()
            if k not in known:
                known.add(k)
                todo += self.led[k]
        return known

    def at(self, position: np.ndarray, value: float) -> int | None:
        """The number of the end that a position is at, if it is at one."""
        for k, end in enumerate(self.found):
            # a search may stop early, and another mode is not far below
            if end.distance(position) < _SAME and value > end.value - 1.0:
                return k
        return None

    def _arrives(self, position: np.ndarray, value: float) -> bool:
        """Whether a search has come to an end that is known."""
        k = self.at(position, value)
        return k is not None and value < self.found[k].value + 3.0

    def _counted(self, position: np.ndarray, value: float, random: bool) -> int | None:
        k = self.at(position, value)
        if k is not None:
            end = self.found[k]
            self.found[k] = end._replace(found=end.found + random)
        return k


def _random_starts(problem: Problem, size: int) -> np.ndarray:
    """Draws from the prior and from a box, ``(K, d)``."""
    rng = np.random.default_rng(41)
    box = rng.uniform(-2, 2, size=(_RANDOM_STARTS, size))
    try:
        with double():
            key = jax.random.key(42)
            drawn = np.asarray(problem.compiled(_prior_draws, _RANDOM_STARTS // 2)(key))
    except (NotImplementedError, AttributeError):  # an improper prior, or none known
        return box
    drawn = drawn[np.isfinite(drawn).all(1)]
    return np.vstack([drawn, box[: _RANDOM_STARTS - len(drawn)]])


def _prior_draws(problem: Problem, count: int, arrays: list[Any], key: Array) -> Array:
    target = problem.target_of(arrays)

    def one(key: Array) -> Array:
        return ravel_pytree(target.draw_prior(key))[0]  # type: ignore[attr-defined]

    return jax.vmap(one)(jax.random.split(key, count))


def _copies(problem: Problem, density: Density, ends: _Ends, number: int) -> np.ndarray:
    """Transformed copies of a mode, the most probable first, ``(K, d)``.

    Those that are at a mode that has been found need no search, and lead to it.
    """
    mode = ends.found[number]
    position = mode.position
    rng = np.random.default_rng(43)
    found = _transformed(problem, position)
    values = [float(density.of_some(x)[0]) for x in found]
    at = [ends.at(x, value) for x, value in zip(found, values, strict=True)]
    for other in at:
        ends.leads(number, other)
    far = [k for k, other in enumerate(at) if other is None]
    order = sorted(far, key=lambda k: values[k] if np.isfinite(values[k]) else np.inf)
    kept = [found[k] for k in order if np.isfinite(values[k])]
    # wide jumps along the directions that the data determine least
    root = np.linalg.cholesky(np.linalg.inv(mode.hessian))
    scale = 10.0 * density.spread
    jitter = rng.normal(size=(_JITTERED, len(position))) @ root.T * scale
    return np.vstack([*kept[: _COPIES - _JITTERED], *(position + jitter)])


def _transformed(problem: Problem, position: np.ndarray) -> list[np.ndarray]:
    """The position with other signs, or with exchangeable components permuted."""
    found = [-position]
    example = jax.tree.leaves(problem.example)
    cuts = np.cumsum([0, *[np.size(x) for x in example]])
    pieces = [slice(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    if len(position) <= _FEW_SITES:
        pieces += [slice(k, k + 1) for k in range(len(position))]
    for piece in pieces:
        flipped = position.copy()
        flipped[piece] *= -1
        found.append(flipped)
    return found + _permuted(problem, position)


def _permuted(problem: Problem, position: np.ndarray) -> list[np.ndarray]:
    """The position with exchangeable components in other orders.

    Sites whose values have a first axis of the same length are permuted together, and
    so are those whose last axis has it, such as the rows of a simplex.
    """
    shapes = [np.shape(x) for x in jax.tree.leaves(problem.example)]
    target = problem.target_of(problem.arrays)
    found: list[np.ndarray] = []
    if not isinstance(target, ModelTarget) or not any(shapes):
        return found  # numbers cannot be permuted
    with double():
        flat = jax.device_put(np.asarray(position, np.float64))
        values = jax.tree.map(np.asarray, problem.compiled(_constrained)(flat))
        sizes = {v.shape[0] for v in values.values() if v.ndim}
        for size in sorted(sizes):
            if not 2 <= size <= 12:
                continue
            for order in _orders(size):
                moved = {
                    n: v[list(order)] if v.ndim and v.shape[0] == size else v
                    for n, v in values.items()
                }
                back = np.asarray(problem.compiled(_unconstrained)(moved))
                if np.isfinite(back).all():
                    found.append(back)
    return found


def _constrained(problem: Problem, arrays: list[Any], flat: Array) -> Any:
    target, z = problem.target_of(arrays), problem.unravel(flat)
    values = target.constrain(z)  # type: ignore[attr-defined]
    return {name: value for name, value in values.items() if name in z}


def _orders(size: int) -> list[tuple[int, ...]]:
    """Orders of some components but the first: all of few, else exchanges of two."""
    if size <= 4:
        return list(permutations(range(size)))[1:]
    exchanged = []
    for a in range(size):
        for b in range(a):
            order = list(range(size))
            order[a], order[b] = b, a
            exchanged.append(tuple(order))
    return exchanged


def _unconstrained(problem: Problem, arrays: list[Any], values: Any) -> Array:
    target = problem.target_of(arrays)
    sites = target.trace(problem.one_row, data=values)  # type: ignore[attr-defined]
    return ravel_pytree(target.unconstrain(sites, list(values)))[0]  # type: ignore[attr-defined]
