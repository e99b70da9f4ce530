"""Ends of searches for modes on some rows, and the starting points of searches."""

from __future__ import annotations

from itertools import permutations
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch.control_variate._center import Density, newton
from numpyro_minibatch.control_variate._problem import Problem, Refused, double
from numpyro_minibatch.control_variate._search import Optimum
from numpyro_minibatch.target import ModelTarget

__all__ = [
    "NEGLIGIBLE",
    "SAME",
    "End",
    "Ends",
    "copies_of",
    "random_starts",
    "transformed",
]

SAME = 2.0  # standard deviations within which two ends are one mode
NEGLIGIBLE = 20.0  # nats below the heaviest mode at which no mode matters
_RANDOM_STARTS = 32  # half from the prior, half from the box of NumPyro's starts
_COPIES = 16  # searches from transformed copies of each mode
_JITTERED = 2  # of them from the neighbourhood of a mode
_FEW_SITES = 12  # coordinates up to which the sign of each is changed alone
_MOST = 64  # different ends on some rows that are looked at


class End(NamedTuple):
    """A mode of the posterior of some rows."""

    position: np.ndarray
    value: float
    hessian: np.ndarray
    found: int

    def distance(self, other: np.ndarray, density: Density) -> float:
        """The distance to another position, in standard deviations."""
        away = density.away(other, self.position)
        return float(np.sqrt(max(away @ self.hessian @ away, 0.0)))


class Ends:
    """Different ends of searches on some rows, and how often each was found."""

    def __init__(self, density: Density) -> None:
        self.density = density
        self.found: list[End] = []
        # those that starts which are not random found
        self.given: set[int | None] = set()
        self.copied: set[int] = set()  # whose copies searches started from
        self.led: list[set[int]] = []  # to which others copies of each lead

    def search(self, start: np.ndarray) -> Optimum:
        """A search on some rows, which ends early when it reaches a known end."""
        return self.density.descended(start, self._arrives)

    def too_low(self, value: float) -> bool:
        """Whether an end cannot matter, allowing for the noise of using some rows."""
        best = min((end.value for end in self.found), default=np.inf)
        return value > best + NEGLIGIBLE * (1.0 + self.density.spread**2)

    def next(self) -> int | None:
        """The best end of which no copies were tried, if there is one."""
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
            self.found.append(End(position, value, hessian, int(random)))
            self.led.append(set())
        return k

    def leads(self, one: int, other: int | None) -> None:
        """Note that a copy of an end leads to another, if that is a mode."""
        if other is not None:
            self.led[one].add(other)

    def known_without(self, some: set[int], given: bool = True) -> set[int]:
        """The ends that are found if searches that ended in some of them are left out.

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
        """The number of the end at which a position is, if there is one."""
        for k, end in enumerate(self.found):
            # a search may stop early, and another mode is not far below
            near = end.distance(position, self.density) < SAME
            if near and value > end.value - 1.0:
                return k
        return None

    def _arrives(self, position: np.ndarray, value: float) -> bool:
        """Whether a search has reached a known end."""
        k = self.at(position, value)
        return k is not None and value < self.found[k].value + 3.0

    def _counted(self, position: np.ndarray, value: float, random: bool) -> int | None:
        k = self.at(position, value)
        if k is not None:
            end = self.found[k]
            self.found[k] = end._replace(found=end.found + random)
        return k


def random_starts(problem: Problem, size: int) -> np.ndarray:
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


def copies_of(
    problem: Problem, density: Density, ends: Ends, number: int
) -> np.ndarray:
    """Transformed copies of a mode, the most probable first, ``(K, d)``.

    Those that are at a mode that has been found need no search, and lead to it.
    """
    mode = ends.found[number]
    position = mode.position
    rng = np.random.default_rng(43)
    found = transformed(problem, position)
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


def transformed(problem: Problem, position: np.ndarray) -> list[np.ndarray]:
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
