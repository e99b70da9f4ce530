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
_GAIN, _ENOUGH = 0.1, 0.01
# Candidates for a driver, of which the first rounds of a fit are made, and those of
# them of which more are made: a regression does not order them reliably. It must remove
# this share of the divergence. (That of the mean of few groups was 0.07 to 0.1, and the
# fit then removed three quarters.)
_CANDIDATES, _FINALISTS, _PROMISING = 8, 2, 0.02
# A coordinate that couples all others, such as the mean of groups, is preferred unless
# another driver leaves so many times less. It is found by moving draws so far.
_OF_HUB, _NEARBY = 2.0, 0.02
# Rounds of damped least squares, and of the first of them on one of three draws.
_ROUNDS, _FIRST, _NEXT, _SCREENED = 20, 5, 10, 3
_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 0.01, 1e-6, 1e4
_CONVERGED = 0.01  # share of the divergence that a round must remove
_PENALTY = 1e-3  # of squares of slopes, for those that draws do not determine
# Of squares of slopes of locations that vary while the scale vanishes. From far out, a
# centred hierarchy needs this to be exact. With so large a penalty from the beginning,
# effects of groups were drivers instead of their mean.
_WANDERING, _STILL = 100.0, 1e4
# The drivers of positions farther out than the draws are so many times as large, in
# fits one after the other. Positions are left out where the divergence is so many times
# that of a constant density.
_STRETCHES = ((1.5,), _WANDERING), ((2.0,), _WANDERING), ((1.5, 2.0, 3.0), _STILL)
_FARTHEST, _HOPELESS = 3.0, 100.0
# The largest bend of a driver's own curve, whose slopes far to both sides are one more
# and one less than it, and the growth with which a fit begins.
_MOST_BENT, _GROWTH = 0.9, 0.03
_DIFFERENCE, _AT_ONCE = 1e-6, 8  # of a number, for a derivative; and how many


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
    :param farther: positions of which the drivers are farther out, ``(K, D)``.
    """

    of_draws: Bent
    of_both: Bent
    farther: np.ndarray


Gradients = Callable[[np.ndarray], np.ndarray]


def fit_gradients(draws: Positions, gradients: Gradients, dtype: Any) -> Fits | None:
    """Coordinates with drivers, fitted to the gradients of a log density.

    A run has more draws than a set-up. So once coordinates suit the draws, the fit goes
    on with positions whose drivers are farther out, in the coordinates found so far.

    :param draws: those of a surrogate's posterior.
    :param gradients: those of its log density at some positions, ``(K, D)``.
    :param dtype: of the result.
    :return: ``None`` if no driver removes much of the divergence.
    """
    mean, sd = draws.z.mean(0), draws.z.std(0)
    if not (1 < len(sd) <= MOST_MATCHED and (sd > 0).all()):
        return None

    def gradients_at(x: np.ndarray) -> np.ndarray:
        return gradients(mean + sd * x) * sd

    some = draws.spread(_DRAWS)
    x, g = (draws.z[some] - mean) / sd, draws.gradients[some] * sd
    if not np.isfinite(g).all():
        return None
    try:
        with np.errstate(all="ignore"):  # where steps are too long
            every = (draws.z - mean) / sd
            linear = _Coordinates.linear(np.linalg.cholesky(np.cov(every.T)))
            found = _fit(linear, x, g, _couplings(x, g, gradients_at))
            if not found.drivers:
                return None
            of_draws = found.bent(mean, sd, dtype)
            for stretches, wandering in _STRETCHES:
                both = found.with_stretched(x, g, stretches, gradients_at)
                found, _ = _least_squares(found, *both, wandering=wandering)
            farther = mean + sd * found.stretched(x, g, _FARTHEST)
            fits = Fits(of_draws, found.bent(mean, sd, dtype), farther)
    except np.linalg.LinAlgError:  # nearly all of the weight is that of a few draws
        return None
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fits[:2]))
    return fits if finite else None


def _h(
    d: np.ndarray, knees: np.ndarray, widths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The smooth absolute value of drivers, zero at zero, and its derivative."""
    squares, off = np.square(widths), d - knees
    distance = np.sqrt(squares + np.square(off))
    return distance - np.sqrt(squares + np.square(knees)), off / distance


class _Tails(NamedTuple):
    """Curves of drivers by themselves, as unconstrained numbers.

    They are those of :class:`~numpyro_minibatch.preconditioner.Scales`: with ``q = r *
    sqrt(1 + growth * r**2)``, ``y = q + bend * h(q)``.

    :param growths: logarithms of the growths, from ``_GROWTH``, ``(k,)``.
    :param bends: their inverse hyperbolic tangents, ``(k,)``.
    :param knees: where slopes change, ``(k,)``.
    :param log_widths: logarithms of distances over which they change, ``(k,)``.
    """

    growths: np.ndarray
    bends: np.ndarray
    knees: np.ndarray
    log_widths: np.ndarray

    def numbers(self) -> np.ndarray:
        """Growths, bends, knees and widths, ``(4, k)`` or with further axes."""
        growths, widths = _GROWTH * np.exp(self.growths), np.exp(self.log_widths)
        return np.stack([growths, _MOST_BENT * np.tanh(self.bends), self.knees, widths])

    def apply(self, r: np.ndarray) -> np.ndarray:
        """``y``, of ``r``, ``(K, k)``."""
        growths, bends, knees, widths = self.numbers()[..., None, :]
        q = r * np.sqrt(1.0 + growths * np.square(r))
        return np.asarray(q + bends * _h(q, knees, widths)[0])

    def undo(self, y: np.ndarray) -> tuple[np.ndarray, ...]:
        """``r``, the derivative of ``y``, and that of its logarithm, ``(K, k)``."""
        growths, bends, knees, widths = self.numbers()[..., None, :]
        free, squares = 1.0 - np.square(bends), np.square(widths)
        off = y - knees + bends * np.sqrt(squares + np.square(knees))
        from_knee = (off - bends * np.sqrt(np.square(off) + free * squares)) / free
        distance = np.sqrt(squares + np.square(from_knee))
        slope = 1.0 + bends * from_knee / distance
        q = knees + from_knee
        r = q * np.sqrt(2.0 / (1.0 + np.sqrt(1.0 + 4.0 * growths * np.square(q))))
        part = growths * np.square(r)
        grows = (1.0 + 2.0 * part) / np.sqrt(1.0 + part)
        of_volume = bends * squares / distance**3 / slope * grows
        of_volume += growths * r * (4.0 / (1.0 + 2.0 * part) - 1.0 / (1.0 + part))
        return r, slope * grows, of_volume


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
    :param tails: curves of drivers by themselves.
    """

    drivers: list[int]
    center: np.ndarray
    lower: np.ndarray
    curves: np.ndarray
    knees: np.ndarray
    log_widths: np.ndarray
    tails: _Tails

    @staticmethod
    def linear(lower: np.ndarray) -> _Coordinates:
        """Without drivers."""
        dim, none = len(lower), np.zeros(0)
        curves, tails = np.zeros((5, dim, 0)), _Tails(none, none, none, none)
        return _Coordinates([], np.zeros(dim), lower, curves, none, none, tails)

    def bent(self, mean: np.ndarray, sd: np.ndarray, dtype: Any) -> Bent:
        """The same of draws that are not standardised.

        :param mean: what was subtracted from them.
        :param sd: what they were then divided by.
        :param dtype: of all arrays.
        """
        slopes, shifts, bows, curves, bends = self.curves
        each = np.array([[slopes, bows], [0 * bends, bends], [shifts, curves]])
        widths = np.exp(self.log_widths)
        curves, tails = each.swapaxes(1, 2), self.tails.numbers()
        scales = scales_by(self.drivers, sd, curves, self.knees, widths, tails)
        return bent_by(mean + sd * self.center, self.lower.T * sd, scales, dtype)

    def with_driver(self, driver: int) -> _Coordinates:
        """The same with one more driver, on which nothing depends yet."""
        return replace(
            self,
            drivers=[*self.drivers, driver],
            curves=np.pad(self.curves, ((0, 0), (0, 0), (0, 1))),
            knees=np.append(self.knees, 0.0),
            log_widths=np.append(self.log_widths, 0.0),
            tails=_Tails(*(np.append(each, 0.0) for each in self.tails)),
        )

    # as one vector -------------------------------------------------------------------

    def flat(self) -> np.ndarray:
        """All numbers but the root."""
        return np.concatenate(
            [self.center, self.curves.ravel(), self.knees, self.log_widths, *self.tails]
        )

    def moved(self, flat: np.ndarray, turn: np.ndarray) -> _Coordinates:
        """Other coordinates.

        :param flat: the new numbers, ``(F,)``, or those of several, ``(P, F)``.
        :param turn: the root is multiplied by one more than it, ``(D, D)``.
        """
        dim, k = len(self.center), len(self.drivers)
        center, curves, knees, log_widths, tails = np.split(
            flat, np.cumsum([dim, 5 * dim * k, k, k]), axis=-1
        )
        several = flat.shape[:-1]
        return replace(
            self,
            center=center,
            lower=self.lower @ (np.eye(dim) + turn),
            curves=curves.reshape(*several, 5, dim, k),
            knees=knees,
            log_widths=log_widths,
            tails=_Tails(*np.moveaxis(tails.reshape(*several, 4, k), -2, 0)),
        )

    def free(self) -> np.ndarray:
        """Which of the numbers may change: a driver depends on those before it."""
        dim, k = len(self.center), len(self.drivers)
        some = np.ones((dim, k), bool)
        for order, driver in enumerate(self.drivers):
            some[driver, order:] = False
        every = np.ones(dim, bool), *[some.ravel()] * 5, np.ones(6 * k, bool)
        return np.concatenate(every)

    def penalties(self, wandering: float) -> tuple[np.ndarray, np.ndarray]:
        """Numbers whose squares are kept small, ``(Q,)``, and their derivatives.

        One kind are the slopes and shifts themselves. The other kind are slopes of
        locations far from the knee, on the side on which the scale falls. Draws do not
        go far there, and a location that moves while its scale vanishes would be wrong
        by many scales where a run goes.

        :param wandering: how much the second kind counts.
        """
        flat, dim, k = self.flat(), len(self.center), len(self.drivers)
        small = np.sqrt(_PENALTY) * np.eye(len(flat))[dim:]
        slopes, shifts, bows, curves, _ = self.curves
        found, derivatives = [small @ flat], [small]
        for side in (-1, 1):
            of_scale, of_location = slopes + side * bows, shifts + side * curves
            falls = np.maximum(-side * of_scale, 0.0)
            found.append(np.sqrt(wandering) * (falls * of_location).ravel())
            of_falls = np.where(falls > 0, -side * of_location, 0.0)
            each = of_falls, falls, side * of_falls, side * falls, 0.0 * falls
            by_number = np.hstack([np.diag(x.ravel()) for x in each])
            padded = np.pad(by_number, ((0, 0), (dim, 6 * k)))
            derivatives.append(np.sqrt(wandering) * padded)
        return np.concatenate(found), np.concatenate(derivatives)

    def stretched(self, x: np.ndarray, g: np.ndarray, factor: float) -> np.ndarray:
        """Positions whose drivers are farther out, ``(K, D)``.

        :param x: draws.
        :param g: gradients there.
        :param factor: by which the drivers of draws are multiplied.
        """
        slopes, shifts, bows, curves, bends = self.curves
        r = self.undriven(x, g)[0].copy()
        d = self.tails.apply(factor * r[:, self.drivers])
        r[:, self.drivers] = d
        bend, _ = _h(d, self.knees, np.exp(self.log_widths))
        scaled = (r + bend @ bends.T) * np.exp(d @ slopes.T + bend @ bows.T)
        return np.asarray(scaled + d @ shifts.T + bend @ curves.T + self.center)

    def with_stretched(
        self,
        x: np.ndarray,
        g: np.ndarray,
        factors: tuple[float, ...],
        gradients_at: Gradients,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws and such positions, with gradients.

        :param x: draws.
        :param g: gradients there.
        :param factors: those of the drivers.
        :param gradients_at: gradients at other positions.
        """
        at, gradients = [x], [g]
        for factor in factors:
            far = self.stretched(x, g, factor)
            of_far = gradients_at(far)
            off = np.square(np.add(*self.white(far, of_far))).sum(1)
            near = off < _HOPELESS * x.shape[1]
            at.append(far[near])
            gradients.append(of_far[near])
        return np.concatenate(at), np.concatenate(gradients)

    # the divergence ------------------------------------------------------------------

    def undriven(self, x: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, ...]:
        """Draws and gradients in coordinates that linear ones make white.

        If the numbers of this object have further axes in front, so has the result.

        :return: the draws, ``(K, D)``; the gradients with drivers fixed; how each
            coordinate adds to those of the drivers, ``(K, D, k)``; and the logarithms
            of the scales.
        """
        slopes, shifts, bows, curves, bends = np.moveaxis(self.curves, -3, 0)
        across = (c.swapaxes(-1, -2) for c in (slopes, shifts, bows, curves, bends))
        to_slopes, to_shifts, to_bows, to_curves, to_bends = across
        knees, log_widths, center = (
            a[..., None, :] for a in (self.knees, self.log_widths, self.center)
        )
        widths, x = np.exp(log_widths), x - center
        d = np.zeros((*x.shape[:-1], len(self.drivers)))
        r, log_scale, bend, slope = x, np.zeros_like(x), d, d
        for k, driver in enumerate(self.drivers):
            d[..., k] = r[..., driver]
            bend, slope = _h(d, knees, widths)
            log_scale = d @ to_slopes + bend @ to_bows
            scaled = (x - d @ to_shifts - bend @ to_curves) * np.exp(-log_scale)
            r = scaled - bend @ to_bends
        direct = np.exp(log_scale) * g
        grown = direct * (r + bend @ to_bends) + 1.0
        terms = [term[..., None] for term in (grown, g, direct)]
        slopes, shifts, bows, curves, bends = (
            c[..., None, :, :] for c in (slopes, shifts, bows, curves, bends)
        )
        bent = terms[0] * bows + terms[1] * curves + terms[2] * bends
        added = terms[0] * slopes + terms[1] * shifts + slope[..., None, :] * bent
        r[..., self.drivers], grows, of_volume = self.tails.undo(d)
        direct[..., self.drivers] *= grows
        direct[..., self.drivers] += of_volume
        return r, direct, added * grows[..., None, :], log_scale

    def white(self, x: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draws and gradients in white coordinates, ``(K, D)``."""
        r, of_r, added, _ = self.undriven(x, g)
        of_r[..., self.drivers] += added.sum(-2)
        return r @ np.linalg.inv(self.lower).T, of_r @ self.lower

    def size(self, off: np.ndarray, wandering: float) -> float:
        """The divergence with the penalty.

        :param off: the sums of both, ``(K, D)``.
        :param wandering: that of locations that vary while scales vanish.
        """
        penalties, _ = self.penalties(wandering)
        return float(np.square(off).sum() / len(off) + penalties @ penalties)

    def derivatives(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Those of the sums of both, ``(K D, P)``: of free numbers, and of a turn."""
        flat, dim, k = self.flat(), len(self.center), len(self.drivers)
        w, of_w = self.white(x, g)
        off, none = w + of_w, np.zeros((dim, dim))
        found = np.zeros((len(flat), *off.shape))
        # A number of a coordinate that is no driver changes this coordinate only, and
        # what it adds to gradients of drivers: those of all coordinates at once.
        rest = np.setdiff1d(np.arange(dim), self.drivers)
        together = [first + step * rest for first, step in _rows(dim, k)]
        alone = self.free()
        alone[np.concatenate(together)] = False
        all_numbers = [*together, *np.flatnonzero(alone)[:, None]]
        inverse, now = np.linalg.inv(self.lower), self.undriven(x, g)
        for begin in range(0, len(all_numbers), _AT_ONCE):
            numbers = all_numbers[begin : begin + _AT_ONCE]
            there = np.tile(flat, (len(numbers), 1))
            for row, which in zip(there, numbers, strict=True):
                row[which] += _DIFFERENCE
            changed = self.moved(there, none).undriven(x, g)
            changes = [
                (b - a) / _DIFFERENCE for a, b in zip(now[:3], changed[:3], strict=True)
            ]
            for number, which in enumerate(numbers):
                r, of_r, added = (change[number] for change in changes)
                if begin + number < len(together):
                    r, of_r, added = (
                        part[:, rest].swapaxes(0, 1) for part in (r, of_r, added)
                    )
                    found[which] = r[..., None] * inverse[:, rest].T[:, None]
                    found[which] += of_r[..., None] * self.lower[rest][:, None]
                    found[which] += added @ self.lower[self.drivers]
                else:
                    of_r[:, self.drivers] += added.sum(1)
                    found[which] = r @ inverse.T + of_r @ self.lower
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


def _couplings(x: np.ndarray, g: np.ndarray, gradients_at: Gradients) -> np.ndarray:
    """How strongly the density couples each pair of coordinates, ``(D, D)``.

    :param x: draws.
    :param g: gradients there.
    :param gradients_at: gradients at other positions.
    """
    number, dim = x.shape
    moved = x.copy()
    moved[np.arange(number), np.arange(number) % dim] += _NEARBY  # one coordinate each
    changes = gradients_at(moved) - g
    rows = [np.median(np.abs(changes[j::dim]), axis=0) for j in range(dim)]
    size = np.stack(rows)
    size = np.maximum(size, size.T) / np.sqrt(np.outer(np.diag(size), np.diag(size)))
    np.fill_diagonal(size, 0.0)
    return np.square(np.minimum(np.nan_to_num(size), 1.0))


def _fit(
    start: _Coordinates, x: np.ndarray, g: np.ndarray, couplings: np.ndarray
) -> _Coordinates:
    """The coordinates, whose further drivers are found one after the other.

    :param start: those without drivers.
    :param x: draws.
    :param g: gradients there.
    :param couplings: the result of :func:`_couplings`. Where the coordinates that are
        not drivers would be independent given these, the driver that couples many of
        them is the cause of the others' dependence.
    """
    dim = x.shape[1]
    found, size = _least_squares(start, x, g)
    linear = found
    while len(found.drivers) < min(DRIVERS, dim - 1) and size > _ENOUGH * dim:
        candidates = _candidates(found, x, g)
        if not candidates:
            break
        others = [found.with_driver(j) for j in candidates]
        some = x[::_SCREENED], g[::_SCREENED]
        fits = [_least_squares(other, *some, _FIRST) for other in others]
        fits.sort(key=lambda fit: fit[1])
        others = [other for other, _ in fits[:_FINALISTS]]
        rest = np.setdiff1d(range(dim), found.drivers)
        hub = int(rest[couplings[np.ix_(rest, rest)].sum(1).argmax()])
        if all(hub not in other.drivers for other in others):
            others.append(found.with_driver(hub))
        # what fewer drivers made of the draws can be a place that no step leaves
        others += [_with_drivers(linear, other.drivers) for other in others]
        fits = [_least_squares(other, x, g, _NEXT) for other in others]
        best, _ = min(
            fits, key=lambda f: f[1] / (_OF_HUB if f[0].drivers[-1] == hub else 1.0)
        )
        best, size_of_best = _least_squares(best, x, g)
        if not size_of_best < (1 - _GAIN) * size:
            break
        found, size = best, size_of_best
    return found


def _with_drivers(linear: _Coordinates, drivers: list[int]) -> _Coordinates:
    """Coordinates with some drivers, on which nothing depends yet."""
    for driver in drivers:
        linear = linear.with_driver(driver)
    return linear


def _least_squares(
    found: _Coordinates,
    x: np.ndarray,
    g: np.ndarray,
    rounds: int = _ROUNDS,
    wandering: float = _WANDERING,
) -> tuple[_Coordinates, float]:
    """Minimise the divergence by the method of Levenberg and Marquardt.

    :param found: where to start.
    :param x: draws.
    :param g: gradients there.
    :param rounds: the largest number of steps.
    :param wandering: a penalty, see :meth:`_Coordinates.penalties`.
    :return: the coordinates, and their divergence with the penalty.
    """
    dim = len(found.center)
    free = np.flatnonzero(found.free())
    below = np.tril_indices(dim)
    off = np.add(*found.white(x, g))
    now, damping = found.size(off, wandering), _DAMPING
    for _ in range(rounds):
        slope = found.derivatives(x, g)
        flat = found.flat()
        penalties, of_penalties = found.penalties(wandering)
        of_penalties = np.pad(of_penalties[:, free], ((0, 0), (0, len(below[0]))))
        matrix = slope.T @ slope / len(x) + of_penalties.T @ of_penalties
        down = slope.T @ off.ravel() / len(x) + of_penalties.T @ penalties
        before = now
        while damping < _MOST_DAMPING:
            step = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), down)
            there, turn = flat.copy(), np.zeros((dim, dim))
            there[free] += step[: len(free)]
            turn[below] = step[len(free) :]
            other = found.moved(there, turn)
            off_there = np.add(*other.white(x, g))
            size_there = other.size(off_there, wandering)
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
