"""Quasi-Newton searches for a maximum, on the host.

SciPy's searches solve systems of ten equations with a library that starts threads for
them. On a machine with busy cores this takes longer than the log density of 10,000
rows. They also offer no way to end a search between two evaluations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Optimum", "quasi_newton"]

_MEMORY = 10  # pairs of steps and changes of the gradient that are kept
_DECREASE = 1e-4  # share of the decrease by the slope that a step must make
_FLATTER = 0.9  # of the slope that may be left
_FARTHER = 4.0  # times a step that is too short, at most
_TRIALS = 30  # of the length of a step
_RELATIVE = 2e-9  # change of the value at which a search ends
_FLAT = 1e-5  # largest derivative at which it ends
_MAX_EVALUATIONS = 3000


class Optimum(NamedTuple):
    """The end of a search.

    :param x: the position.
    :param fun: the value there.
    :param ended: whether the value hardly changed any more.
    """

    x: np.ndarray
    fun: float
    ended: bool


class _Point(NamedTuple):
    x: np.ndarray
    value: float
    gradient: np.ndarray

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.value) and np.isfinite(self.gradient).all())


def quasi_newton(
    objective: Callable[[np.ndarray], Any],
    start: np.ndarray,
    arrived: Callable[[np.ndarray, float], bool] = lambda x, value: False,
) -> Optimum:
    """Minimise a function by L-BFGS steps (Nocedal and Wright 2006, algorithm 7.4).

    :param objective: the value and the gradient at a position, shape ``(d,)``.
    :param start: where to start.
    :param arrived: whether to end at a position of this value.
    """
    evaluations = 0

    def at(x: np.ndarray) -> _Point:
        nonlocal evaluations
        evaluations += 1
        value, gradient = objective(x)
        return _Point(x, float(value), np.asarray(gradient, float))

    point = at(np.asarray(start, float))
    pairs: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=_MEMORY)
    while point.finite and evaluations < _MAX_EVALUATIONS:
        if arrived(point.x, point.value) or np.abs(point.gradient).max() <= _FLAT:
            return Optimum(point.x, point.value, True)
        step = -_times_inverse_hessian(pairs, point.gradient)
        new = _lower(at, point, step, 1.0 if pairs else _first(point.gradient))
        if new is None:
            if not pairs:  # not even down the gradient, as far as rounding allows
                break
            pairs.clear()
            continue
        change = point.value - new.value
        size = max(abs(point.value), abs(new.value), 1.0)
        moved, bent = new.x - point.x, new.gradient - point.gradient
        if moved @ bent > 1e-12 * (bent @ bent):
            pairs.append((moved, bent))
        point = new
        if change <= _RELATIVE * size:
            return Optimum(point.x, point.value, True)
    return Optimum(point.x, point.value, False)


def _first(gradient: np.ndarray) -> float:
    """The length of the first step down a gradient whose scale is not known."""
    return min(1.0, 1.0 / max(float(np.linalg.norm(gradient)), 1e-300))


def _times_inverse_hessian(
    pairs: deque[tuple[np.ndarray, np.ndarray]], gradient: np.ndarray
) -> np.ndarray:
    """The product by the two loops over the pairs."""
    if not pairs:
        return gradient
    q, shares = gradient.copy(), []
    for moved, bent in reversed(pairs):
        shares.append((moved @ q) / (moved @ bent))
        q -= shares[-1] * bent
    moved, bent = pairs[-1]
    q *= (moved @ bent) / (bent @ bent)
    for (moved, bent), share in zip(pairs, reversed(shares), strict=True):
        q += (share - (bent @ q) / (moved @ bent)) * moved
    return q


def _lower(
    at: Callable[[np.ndarray], _Point], here: _Point, step: np.ndarray, length: float
) -> _Point | None:
    """A point along a step that satisfies the Wolfe conditions, or ``None``.

    A step that makes the value too large or not finite bounds the length from above,
    one that leaves the slope too steep bounds it from below.
    """
    slope = float(here.gradient @ step)
    if not slope < 0:
        return None
    low, high = 0.0, np.inf
    best, best_slope = here, slope  # at the lower bound
    for _ in range(_TRIALS):
        new = at(here.x + length * step)
        down = float(new.gradient @ step) if new.finite else np.nan
        if not new.finite or new.value > here.value + _DECREASE * length * slope:
            high, width = length, length - low
            length = low + 0.5 * width
            if new.finite:  # the minimum of the parabola through what is known
                bend = new.value - best.value - best_slope * width
                share = -0.5 * best_slope * width / bend if bend > 0 else 0.5
                length = low + width * min(max(share, 0.1), 0.5)
            continue
        if down >= _FLATTER * slope:
            return new
        # where the slope would be zero if it went on to change as from the bound
        change = (down - best_slope) / (length - low)
        wanted = length - down / change if change > 0 else np.inf
        low, best, best_slope = length, new, down
        if np.isfinite(high):
            width = high - low
            length = min(max(wanted, low + 0.1 * width), low + 0.5 * width)
        else:
            length = min(max(wanted, 1.5 * low), _FARTHER * low)
    return best if best is not here else None
