"""Coordinates in which a surrogate has the gradients of a normal distribution.

In white coordinates ``w``, the gradient of a normal log density is ``-w``. The mean
square of the difference, the Fisher divergence [1]_, is minimised over coordinates with
drivers [2]_, whose locations and logarithms of scales are curves in other ones. Unlike
likelihoods, gradients at draws have no sampling error: where such coordinates exist, a
few hundred draws determine them, and tails as well as the bulk. So they describe a
hierarchy of few groups, in which the effects follow the mean of the groups, and all of
them the logarithm of their scale, by curves. They also describe a banana.

References:
    1. Hyvarinen, A. (2005). *Estimation of non-normalized statistical models by score
       matching.* Journal of Machine Learning Research 6.
    2. Papaspiliopoulos, O., Roberts, G. O. and Skold, M. (2007). *A general framework
       for the parametrization of hierarchical models.* Statistical Science 22(1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_minibatch.control_variate._bent import DRIVERS, bent_by, scales_by
from numpyro_minibatch.proposal import Bent

__all__ = ["MOST_MATCHED", "Positions", "fit_gradients"]

#: the largest number of coordinates; the time grows with its cube
MOST_MATCHED = 20
_DRAWS = 300  # that coordinates are fitted to
# Share of the divergence that a driver must remove; and a divergence, relative to that
# of a constant density, below which no more are needed.
_GAIN, _ENOUGH = 0.1, 0.005
# Candidates for a driver, of which the first rounds of a fit are made, and those of
# them of which more are made: a regression does not order them reliably. It must remove
# this share of the divergence. (That of the mean of few groups was 0.07 to 0.1, and the
# fit then removed three quarters.)
_CANDIDATES, _FINALISTS, _PROMISING = 8, 3, 0.02
_ROUNDS, _FIRST, _NEXT = 20, 3, 10  # of damped least squares
_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 0.01, 1e-6, 1e4
_CONVERGED = 0.01  # share of the divergence that a round must remove
_PENALTY = 1e-3  # of squares of slopes, for those that draws do not determine
_DIFFERENCE = 1e-6  # of a number, for a derivative


class Positions(NamedTuple):
    """Where a log density and its gradient are compared with those of a normal one.

    :param z: the positions, ``(K, D)``.
    :param gradients: of the log density, ``(K, D)``.
    :param weights: how much each counts, ``(K,)``.
    """

    z: np.ndarray
    gradients: np.ndarray
    weights: np.ndarray

    def spread(self, number: int) -> np.ndarray:
        """Indices of so many of them, each as often as its weight asks for."""
        shares = np.cumsum(self.weights) / self.weights.sum()
        return np.searchsorted(shares, (np.arange(number) + 0.5) / number)


class Fits(NamedTuple):
    """Coordinates with drivers.

    :param of_draws: those that suit the draws.
    :param of_both: those that also suit positions farther out.
    """

    of_draws: Bent
    of_both: Bent


def fit_gradients(
    draws: Positions, farther: Callable[[Bent], Positions], dtype: Any
) -> Fits | None:
    """Coordinates with drivers, fitted to the gradients of a log density.

    :param draws: those of a surrogate's posterior.
    :param farther: positions farther out than the draws, by coordinates that are fitted
        to these. The fit goes on with both.
    :param dtype: of the result.
    :return: ``None`` if no driver removes much of the divergence.
    """
    mean, sd = draws.z.mean(0), draws.z.std(0)
    if not (1 < len(sd) <= MOST_MATCHED and (sd > 0).all()):
        return None

    def fitted(start: _Coordinates, to: Positions) -> _Coordinates:
        some = to.spread(_DRAWS)
        x, g = (to.z[some] - mean) / sd, to.gradients[some] * sd
        return _fit(start, x, g) if np.isfinite(g).all() else start

    try:
        with np.errstate(all="ignore"):  # where steps are too long
            x = (draws.z - mean) / sd
            found = fitted(_Coordinates.linear(np.linalg.cholesky(np.cov(x.T))), draws)
            if not found.drivers:
                return None
            of_draws = found.bent(mean, sd, dtype)
            more = farther(of_draws)
            both = Positions(*map(np.concatenate, zip(draws, more, strict=True)))
            fits = Fits(of_draws, fitted(found, both).bent(mean, sd, dtype))
    except np.linalg.LinAlgError:  # nearly all of the weight is that of a few draws
        return None
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fits))
    return fits if finite else None


@dataclass(frozen=True)
class _Coordinates:
    """White coordinates of standardised draws, by ``k`` drivers.

    They are those of :class:`~numpyro_minibatch.preconditioner.Scales`, of many draws
    at once and without a compiled program.

    :param drivers: the coordinates that others depend on.
    :param center: the centre, ``(D,)``.
    :param lower: a root of the covariance of what is left, ``(D, D)``.
    :param curves: slopes, shifts, bows, curves and bends, ``(5, D, k)``.
    :param knees: where slopes change, ``(k,)``.
    :param log_widths: logarithms of distances over which they change, ``(k,)``.
    """

    drivers: list[int]
    center: np.ndarray
    lower: np.ndarray
    curves: np.ndarray
    knees: np.ndarray
    log_widths: np.ndarray

    @staticmethod
    def linear(lower: np.ndarray) -> _Coordinates:
        """Without drivers."""
        dim, none = len(lower), np.zeros(0)
        return _Coordinates([], np.zeros(dim), lower, np.zeros((5, dim, 0)), none, none)

    def bent(self, mean: np.ndarray, sd: np.ndarray, dtype: Any) -> Bent:
        """The same of draws that are not standardised.

        :param mean: what was subtracted from them.
        :param sd: what they were then divided by.
        :param dtype: of all arrays.
        """
        slopes, shifts, bows, curves, bends = self.curves
        each = np.array([[slopes, bows], [0 * bends, bends], [shifts, curves]])
        widths = np.exp(self.log_widths)
        scales = scales_by(self.drivers, sd, each.swapaxes(1, 2), self.knees, widths)
        return bent_by(mean + sd * self.center, self.lower.T * sd, scales, dtype)

    def with_driver(self, driver: int) -> _Coordinates:
        """The same with one more driver, on which nothing depends yet."""
        return replace(
            self,
            drivers=[*self.drivers, driver],
            curves=np.pad(self.curves, ((0, 0), (0, 0), (0, 1))),
            knees=np.append(self.knees, 0.0),
            log_widths=np.append(self.log_widths, 0.0),
        )

    # as one vector -------------------------------------------------------------------

    def flat(self) -> np.ndarray:
        """All numbers but the root."""
        return np.concatenate(
            [self.center, self.curves.ravel(), self.knees, self.log_widths]
        )

    def moved(self, flat: np.ndarray, turn: np.ndarray) -> _Coordinates:
        """Other coordinates.

        :param flat: the new numbers.
        :param turn: the root is multiplied by one more than it, ``(D, D)``.
        """
        dim, k = len(self.center), len(self.drivers)
        center, curves, knees, log_widths = np.split(
            flat, np.cumsum([dim, 5 * dim * k, k])
        )
        return replace(
            self,
            center=center,
            lower=self.lower @ (np.eye(dim) + turn),
            curves=curves.reshape(5, dim, k),
            knees=knees,
            log_widths=log_widths,
        )

    def free(self) -> np.ndarray:
        """Which of the numbers may change: a driver depends on those before it."""
        dim, k = len(self.center), len(self.drivers)
        some = np.ones((dim, k), bool)
        for order, driver in enumerate(self.drivers):
            some[driver, order:] = False
        every = np.ones(dim, bool), *[some.ravel()] * 5, np.ones(2 * k, bool)
        return np.concatenate(every)

    def penalised(self) -> np.ndarray:
        """Which of the numbers are kept small."""
        return np.arange(len(self.flat())) >= len(self.center)

    # the divergence ------------------------------------------------------------------

    def undriven(self, x: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, ...]:
        """Draws and gradients in coordinates that linear ones make white.

        :return: the draws, ``(K, D)``; the gradients with drivers fixed; how each
            coordinate adds to those of the drivers, ``(K, D, k)``; and the logarithms
            of the scales.
        """
        slopes, shifts, bows, curves, bends = self.curves
        knees, widths = self.knees, np.exp(self.log_widths)
        x = x - self.center
        d = np.zeros((len(x), len(knees)))
        r, log_scale, bend = x, np.zeros_like(x), d
        for k, driver in enumerate(self.drivers):
            d[:, k] = r[:, driver]
            bend = np.hypot(widths, d - knees) - np.hypot(widths, knees)
            log_scale = d @ slopes.T + bend @ bows.T
            scaled = (x - d @ shifts.T - bend @ curves.T) * np.exp(-log_scale)
            r = scaled - bend @ bends.T
        direct = np.exp(log_scale) * g
        grown = direct * (r + bend @ bends.T) + 1.0
        terms = grown[..., None], g[..., None], direct[..., None]
        slope = (d - knees) / np.hypot(widths, d - knees)
        added = terms[0] * slopes + terms[1] * shifts
        bent = terms[0] * bows + terms[1] * curves + terms[2] * bends
        return r, direct, added + slope[:, None] * bent, log_scale

    def white(self, x: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draws and gradients in white coordinates, ``(K, D)``."""
        r, of_r, added, _ = self.undriven(x, g)
        of_r[:, self.drivers] += added.sum(1)
        return np.linalg.solve(self.lower, r.T).T, of_r @ self.lower

    def size(self, off: np.ndarray) -> float:
        """The divergence with the penalty.

        :param off: the sums of both, ``(K, D)``.
        """
        varies = self.flat()[self.penalised()]
        return float(np.square(off).sum() / len(off) + _PENALTY * varies @ varies)

    def derivatives(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Those of the sums of both, ``(K D, P)``: of free numbers, and of a turn."""
        flat, dim, k = self.flat(), len(self.center), len(self.drivers)
        w, of_w = self.white(x, g)
        off, none = w + of_w, np.zeros((dim, dim))
        found = np.zeros((len(flat), *off.shape))
        # A number of a coordinate that is no driver changes this coordinate only, and
        # what it adds to gradients of drivers: those of all coordinates at once.
        rest = np.setdiff1d(np.arange(dim), self.drivers)
        inverse, now = np.linalg.inv(self.lower), self.undriven(x, g)
        numbers = [first + step * rest for first, step in _rows(dim, k)]
        for which in numbers:
            there = flat.copy()
            there[which] += _DIFFERENCE
            changed = self.moved(there, none).undriven(x, g)
            r, direct, added = (
                (b - a)[:, rest].swapaxes(0, 1) / _DIFFERENCE
                for a, b in zip(now[:3], changed[:3], strict=True)
            )
            found[which] = r[..., None] * inverse[:, rest].T[:, None]
            found[which] += direct[..., None] * self.lower[rest][:, None]
            found[which] += added @ self.lower[self.drivers]
        single = self.free()
        single[np.concatenate(numbers)] = False
        for one in np.flatnonzero(single):
            there = flat.copy()
            there[one] += _DIFFERENCE
            off_there = np.add(*self.moved(there, none).white(x, g))
            found[one] = (off_there - off) / _DIFFERENCE
        # to first order, the inverse of one more than a turn is one less than it
        below = list(zip(*np.tril_indices(dim), strict=True))
        turned = np.zeros((len(below), *off.shape))
        for change, (i, j) in zip(turned, below, strict=True):
            change[:, i] -= w[:, j]
            change[:, j] += of_w[:, i]
        each = np.concatenate([found[self.free()], turned])
        return each.reshape(len(each), -1).T


def _rows(dim: int, k: int) -> list[tuple[int, int]]:
    """Where numbers of all coordinates begin in a flat vector, and how far apart."""
    kinds = [
        (dim + kind * dim * k + driver, k) for kind in range(5) for driver in range(k)
    ]
    return [(0, 1), *kinds]


def _fit(start: _Coordinates, x: np.ndarray, g: np.ndarray) -> _Coordinates:
    """The coordinates, whose further drivers are found one after the other."""
    dim = x.shape[1]
    found, size = _least_squares(start, x, g)
    while len(found.drivers) < min(DRIVERS, dim - 1) and size > _ENOUGH * dim:
        candidates = _candidates(found, x, g)
        if not candidates:
            break
        others = [found.with_driver(j) for j in candidates]
        for number, rounds in ((_FINALISTS, _FIRST), (1, _NEXT)):
            fits = [_least_squares(other, x, g, rounds) for other in others]
            fits.sort(key=lambda fit: fit[1])
            others = [other for other, _ in fits[:number]]
        best, size_of_best = _least_squares(others[0], x, g)
        if not size_of_best < (1 - _GAIN) * size:
            break
        found, size = best, size_of_best
    return found


def _least_squares(
    found: _Coordinates, x: np.ndarray, g: np.ndarray, rounds: int = _ROUNDS
) -> tuple[_Coordinates, float]:
    """Minimise the divergence by the method of Levenberg and Marquardt.

    :return: the coordinates, and their divergence with the penalty.
    """
    dim = len(found.center)
    free = np.flatnonzero(found.free())
    small = np.append(found.penalised()[free], np.zeros(dim * (dim + 1) // 2))
    below = np.tril_indices(dim)
    off = np.add(*found.white(x, g))
    now, damping = found.size(off), _DAMPING
    for _ in range(rounds):
        slope = found.derivatives(x, g)
        flat = found.flat()
        matrix = slope.T @ slope / len(x) + _PENALTY * np.diag(small)
        down = slope.T @ off.ravel() / len(x)
        down[: len(free)] += _PENALTY * small[: len(free)] * flat[free]
        before = now
        while damping < _MOST_DAMPING:
            step = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), down)
            there, turn = flat.copy(), np.zeros((dim, dim))
            there[free] += step[: len(free)]
            turn[below] = step[len(free) :]
            other = found.moved(there, turn)
            off_there = np.add(*other.white(x, g))
            size_there = other.size(off_there)
            if size_there < now:
                found, off, now = other, off_there, size_there
                damping = max(damping / 5, _LEAST_DAMPING)
                break
            damping *= 4
        if not now < (1 - _CONVERGED) * before:
            break
    return found, now


def _candidates(found: _Coordinates, x: np.ndarray, g: np.ndarray) -> list[int]:
    """The coordinates on which locations and scales of the others depend most.

    For each other coordinate, the difference of the gradients is regressed on changes
    of its location and of the logarithm of its scale by curves in the candidate.

    :return: the best ones first; none if no dependence is clear.
    """
    r, gradient, added, log_scale = found.undriven(x, g)
    gradient[:, found.drivers] += added.sum(1)
    precision = np.linalg.inv(found.lower @ found.lower.T)
    unit = np.sqrt(np.diag(precision))
    normal = r @ precision / unit
    off = gradient / unit + normal
    moved = np.exp(-log_scale)  # how far, relative to where the drivers are zero
    rest = [j for j in range(x.shape[1]) if j not in found.drivers]
    gains = []
    for j in rest:
        terms = np.column_stack([r[:, j], np.hypot(1.0, r[:, j])])
        gain = 0.0
        for i in (i for i in rest if i != j):
            base = np.column_stack([np.ones(len(x)), r[:, j], normal[:, i]])
            more = [base, terms * moved[:, [i]], terms * normal[:, [i]]]
            gain += _left(base, off[:, i]) - _left(np.column_stack(more), off[:, i])
        gains.append(gain)
    if max(gains) < _PROMISING * np.square(off).sum():
        return []
    return [rest[k] for k in np.argsort(gains)[: -_CANDIDATES - 1 : -1]]


def _left(terms: np.ndarray, y: np.ndarray) -> float:
    """What a regression leaves of a sum of squares."""
    return float(np.square(y - terms @ np.linalg.lstsq(terms, y, rcond=None)[0]).sum())
