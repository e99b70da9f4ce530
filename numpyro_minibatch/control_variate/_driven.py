"""White coordinates by drivers, of many positions at once and without a program.

They are those of :class:`~numpyro_minibatch.preconditioner.Scales`, for the fit of
:mod:`~numpyro_minibatch.control_variate._matched`: how far the gradients at some
positions are from those of a normal distribution, and how that depends on each number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from numpyro_minibatch.control_variate._bent import bent_by, scales_by
from numpyro_minibatch.proposal import Bent

__all__ = ["Coordinates", "Gradients", "Tails", "loss"]

#: gradients of a log density at positions, ``(K, D)``
Gradients = Callable[[np.ndarray], np.ndarray]

_PENALTY = 1e-3  # of squares of slopes, for those that draws do not determine
# No run goes so many standard deviations away, or farther. Where coordinates stretch
# tails, multiples of draws could be absurd positions.
_FAR = 5.0
# Their weights. With more, coordinates suited the draws of a hierarchy less.
_OF_FARTHER = 1 / 15
# A position counts half where its divergence is so many times that of a constant
# density.
_HALF = 3.0
# The largest bend of a driver's own curve, whose slopes far to both sides are one more
# and one less than it, and the root of the growth with which a fit begins.
_MOST_BENT, _GROWTH = 0.9, 0.15
_DIFFERENCE, _AT_ONCE = 1e-6, 8  # of a number, for a derivative; and how many


def _h(
    d: np.ndarray, knees: np.ndarray, widths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The smooth absolute value of drivers, zero at zero, and its derivative."""
    from_knee, at_zero = (d - knees) / widths, knees / widths
    h = np.logaddexp(from_knee, -from_knee) - np.logaddexp(at_zero, -at_zero)
    return widths * h, np.tanh(from_knee)


def loss(off: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The Cauchy loss of the divergence at each position, and its derivative, ``(K,)``.

    :param off: the sums of white coordinates and gradients, ``(K, D)``.
    """
    half = _HALF * off.shape[1]
    far = np.square(off).sum(1) / half
    return half * np.log1p(far), 1 / (1 + far)


class Tails(NamedTuple):
    """Curves of drivers by themselves, as unconstrained numbers.

    They are those of :class:`~numpyro_minibatch.preconditioner.Scales`: with ``q = r *
    sqrt(1 + growth * r**2)``, ``y = q + bend * g(q)``.

    :param growths: roots of the growths, ``(k,)``. A fit does not leave zero.
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
        growths, widths = np.square(self.growths), np.exp(self.log_widths)
        return np.stack([growths, _MOST_BENT * np.tanh(self.bends), self.knees, widths])

    def apply(self, r: np.ndarray) -> np.ndarray:
        """``y``, of ``r``, ``(K, k)``."""
        growths, bends, knees, widths = self.numbers()[..., None, :]
        q = r * np.sqrt(1.0 + growths * np.square(r))
        g = np.hypot(widths, q - knees) - np.hypot(widths, knees)
        return np.asarray(q + bends * g)

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
class Coordinates:
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
    tails: Tails

    @staticmethod
    def linear(lower: np.ndarray) -> Coordinates:
        """Without drivers."""
        dim, none = len(lower), np.zeros(0)
        curves, tails = np.zeros((5, dim, 0)), Tails(none, none, none, none)
        return Coordinates([], np.zeros(dim), lower, curves, none, none, tails)

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

    def with_driver(self, driver: int) -> Coordinates:
        """The same with one more driver, on which nothing depends yet."""
        return replace(
            self,
            drivers=[*self.drivers, driver],
            curves=np.pad(self.curves, ((0, 0), (0, 0), (0, 1))),
            knees=np.append(self.knees, 0.0),
            log_widths=np.append(self.log_widths, 0.0),
            tails=Tails(*map(np.append, self.tails, (_GROWTH, 0.0, 0.0, 0.0))),
        )

    def with_growing_tails(self) -> Coordinates:
        """The same with the growths with which a fit begins, or larger ones.

        Few draws are in tails. A fit to draws may remove growths that positions farther
        out need, and does not leave zero.
        """
        growths = np.maximum(np.abs(self.tails.growths), _GROWTH)
        return replace(self, tails=self.tails._replace(growths=growths))

    # as one vector -------------------------------------------------------------------

    def flat(self) -> np.ndarray:
        """All numbers but the root."""
        return np.concatenate(
            [self.center, self.curves.ravel(), self.knees, self.log_widths, *self.tails]
        )

    def moved(self, flat: np.ndarray, turn: np.ndarray) -> Coordinates:
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
            tails=Tails(*np.moveaxis(tails.reshape(*several, 4, k), -2, 0)),
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

    def stretched(
        self, x: np.ndarray, g: np.ndarray, factor: float, most: float = _FAR
    ) -> np.ndarray:
        """Positions whose drivers are farther out, ``(K, D)``.

        :param x: draws.
        :param g: gradients there.
        :param factor: by which the drivers of draws are multiplied.
        :param most: the size up to which they are, in standard deviations.
        """
        slopes, shifts, bows, curves, bends = self.curves
        r = self.undriven(x, g)[0]
        of_drivers = r[:, self.drivers]
        sd = np.sqrt(np.square(self.lower[self.drivers]).sum(1))
        limit = np.maximum(np.abs(of_drivers), most * sd)
        d = self.tails.apply(np.clip(factor * of_drivers, -limit, limit))
        r[:, self.drivers] = d
        bend, _ = _h(d, self.knees, np.exp(self.log_widths))
        scaled = (r + bend @ bends.T) * np.exp(d @ slopes.T + bend @ bows.T)
        return np.asarray(scaled + d @ shifts.T + bend @ curves.T + self.center)

    def farther(
        self,
        x: np.ndarray,
        g: np.ndarray,
        factors: tuple[float, ...],
        gradients_at: Gradients,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Such positions, with gradients and weights, where these are finite.

        :param x: draws.
        :param g: gradients there.
        :param factors: those of the drivers.
        :param gradients_at: gradients at other positions.
        """
        far = np.concatenate([self.stretched(x, g, factor) for factor in factors])
        of_far = gradients_at(far)
        finite = np.isfinite(np.square(np.add(*self.white(far, of_far))).sum(1))
        return far[finite], of_far[finite], np.full(finite.sum(), _OF_FARTHER)

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

    def size(self, off: np.ndarray, weights: np.ndarray, wandering: float) -> float:
        """The robust divergence with the penalty.

        :param off: the sums of both, ``(K, D)``.
        :param weights: how much each position counts, ``(K,)``.
        :param wandering: that of locations that vary while scales vanish.
        """
        penalties, _ = self.penalties(wandering)
        divergence = weights @ loss(off)[0] / weights.sum()
        return float(divergence + penalties @ penalties)

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
