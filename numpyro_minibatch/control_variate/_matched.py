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

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_minibatch.control_variate._bent import DRIVERS
from numpyro_minibatch.control_variate._driven import Coordinates, Gradients, loss
from numpyro_minibatch.proposal import Bent

__all__ = ["MOST_MATCHED", "Positions", "fit_gradients"]

#: the largest number of coordinates; the time grows with its cube
MOST_MATCHED = 20
_DRAWS = 300  # that coordinates are fitted to
# Share of the divergence that a driver must remove; and a divergence, relative to that
# of a constant density, below which no more are needed.
_GAIN, _ENOUGH = 0.1, 0.02
# Candidates for a driver, of which the first rounds of a fit are made, and those of
# them of which more are made: a regression does not order them reliably. It must remove
# this share of the divergence. (That of the mean of few groups was 0.07 to 0.1, and the
# fit then removed three quarters.)
_CANDIDATES, _FINALISTS, _PROMISING = 8, 2, 0.02
# A coordinate that couples all others, such as the mean of groups, is preferred unless
# another driver leaves so many times less. Its couplings, which are found by moving
# draws so far, are together so many times the median of the others'.
_OF_HUB, _NEARBY, _CLEAR = 2.0, 0.02, 1.5
# Slopes and shifts from which a fit begins are at most so large; and the least square
# of a gradient for them.
_MOST_SLOPE, _MOST_SHIFT, _LEAST_SQUARE = 3.0, 5.0, 1e-12
# Rounds of damped least squares, and of the first of them on one of three draws.
_ROUNDS, _FIRST, _NEXT, _SCREENED = 20, 5, 10, 3
_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 0.01, 1e-6, 1e4
_CONVERGED = 0.01  # share of the divergence that a round must remove
# Of squares of slopes of locations that vary while the scale vanishes. From far out, a
# centred hierarchy needs this to be exact. With so large a penalty from the beginning,
# effects of groups were drivers instead of their mean.
_WANDERING, _STILL = 100.0, 1e4
# The drivers of positions farther out than the draws are so many times as large, in
# fits one after the other; and those of positions that steps should suit.
_STRETCHES = (
    ((1.5,), _WANDERING),
    ((2.0,), _WANDERING),
    ((1.5, 2.0, 3.0), np.sqrt(_WANDERING * _STILL)),
    *[((1.5, 2.0, 3.0), _STILL)] * 7,
)
# The last fits are made only while more than this share of the positions count less
# than half.
_AT_LEAST, _FAR_OFF = 4, 0.01
_FARTHEST, _REACHED = 3.0, 4.0  # up to so many standard deviations


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


def fit_gradients(draws: Positions, gradients: Gradients, dtype: Any) -> Fits | None:
    """Coordinates with drivers, fitted to the gradients of a log density.

    A run has more draws than a set-up. So once coordinates suit the draws, the fit goes
    on with positions whose drivers are farther out, in the coordinates found so far.

    :param draws: those of a surrogate's posterior.
    :param gradients: those of its log density at some positions, ``(K, D)``.
    :param dtype: of the result.
    :return: ``None`` if no driver removes much of the divergence.
    """
    from threadpoolctl import threadpool_limits  # few models need it

    mean, sd = draws.z.mean(0), draws.z.std(0)
    if not (1 < len(sd) <= MOST_MATCHED and (sd > 0).all()):
        return None

    def gradients_at(x: np.ndarray) -> np.ndarray:
        return gradients(mean + sd * x) * sd

    every, slopes = (draws.z - mean) / sd, draws.gradients * sd
    if not np.isfinite(slopes).all():
        return None
    some = draws.spread(_DRAWS)
    x, g = every[some], slopes[some]
    at_draws = x, g, np.ones(_DRAWS)
    try:
        # Matrices are small: if another process has work, threads that wait for each
        # other make a fit ten times as slow.
        with np.errstate(all="ignore"), threadpool_limits(1, "blas"):
            linear = Coordinates.linear(np.linalg.cholesky(np.cov(every.T)))
            found = _fit(linear, x, g, _changes(x, g, gradients_at))
            if not found.drivers:
                return None
            of_draws = found.bent(mean, sd, dtype)
            for fit, (stretches, wandering) in enumerate(_STRETCHES):
                found = found.with_growing_tails()
                far = found.farther(x, g, stretches, gradients_at)
                far_off = loss(np.add(*found.white(*far[:2])))[1] < 0.5
                if fit >= _AT_LEAST and far_off.sum() < _FAR_OFF * len(far_off):
                    break
                at, slopes_of_all, weights = map(
                    np.concatenate, zip(at_draws, far, strict=True)
                )
                found, _ = _least_squares(
                    found, at, slopes_of_all, weights, wandering=wandering
                )
            farther = mean + sd * found.stretched(x, g, _FARTHEST, _REACHED)
            fits = Fits(of_draws, found.bent(mean, sd, dtype), farther)
    except np.linalg.LinAlgError:  # nearly all of the weight is that of a few draws
        return None
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fits[:2]))
    return fits if finite else None


def _changes(x: np.ndarray, g: np.ndarray, gradients_at: Gradients) -> np.ndarray:
    """Second derivatives, one coordinate's at each draw, ``(K, D)``.

    :param x: draws.
    :param g: gradients there.
    :param gradients_at: gradients at other positions.
    """
    number, dim = x.shape
    moved = x.copy()
    moved[np.arange(number), np.arange(number) % dim] += _NEARBY
    return (gradients_at(moved) - g) / _NEARBY


def _couplings(changes: np.ndarray) -> np.ndarray:
    """How strongly the density couples each pair of coordinates, ``(D, D)``.

    :param changes: the result of :func:`_changes`.
    """
    dim = changes.shape[1]
    rows = [np.median(np.abs(changes[j::dim]), axis=0) for j in range(dim)]
    size = np.stack(rows)
    size = np.maximum(size, size.T) / np.sqrt(np.outer(np.diag(size), np.diag(size)))
    np.fill_diagonal(size, 0.0)
    return np.square(np.minimum(np.nan_to_num(size), 1.0))


def _hub(couplings: np.ndarray, rest: np.ndarray) -> int | None:
    """The coordinate that couples the others; of two, each couples the other.

    :param couplings: the result of :func:`_couplings`.
    :param rest: the coordinates that are not drivers.
    """
    together = couplings[np.ix_(rest, rest)].sum(1)
    clear = together.max() > _CLEAR * np.median(together)
    return int(rest[together.argmax()]) if clear else None


def _fit(
    start: Coordinates, x: np.ndarray, g: np.ndarray, changes: np.ndarray
) -> Coordinates:
    """The coordinates, whose further drivers are found one after the other.

    :param start: those without drivers.
    :param x: draws.
    :param g: gradients there.
    :param changes: the result of :func:`_changes`. Where the coordinates that are not
        drivers would be independent given these, the driver that couples many of them
        is the cause of the others' dependence.
    """
    dim, couplings = x.shape[1], _couplings(changes)
    found, size = _least_squares(start, x, g)
    while len(found.drivers) < min(DRIVERS, dim - 1) and size > _ENOUGH * dim:
        candidates = _candidates(found, x, g)
        if not candidates:
            break
        others = [found.with_driver(j) for j in candidates]
        some = x[::_SCREENED], g[::_SCREENED]
        fits = [_least_squares(other, *some, rounds=_FIRST) for other in others]
        fits.sort(key=lambda fit: fit[1])
        others = [other for other, _ in fits[:_FINALISTS]]
        hub = _hub(couplings, np.setdiff1d(range(dim), found.drivers))
        if hub is not None and all(hub not in other.drivers for other in others):
            others.append(found.with_driver(hub))
        # what fewer drivers made of the draws can be a place that no step leaves
        others += [_with_drivers(start, o.drivers, x, g, changes) for o in others]
        fits = [_least_squares(other, x, g, rounds=_NEXT) for other in others]
        best, _ = min(
            fits, key=lambda f: f[1] / (_OF_HUB if f[0].drivers[-1] == hub else 1.0)
        )
        best, size_of_best = _least_squares(best, x, g)
        if not size_of_best < (1 - _GAIN) * size:
            break
        found, size = best, size_of_best
    return found


def _with_drivers(
    linear: Coordinates,
    drivers: list[int],
    x: np.ndarray,
    g: np.ndarray,
    changes: np.ndarray,
) -> Coordinates:
    """Coordinates with some drivers from which a fit can begin.

    Given the drivers, the variance of a gradient is the inverse square of a conditional
    scale. So the logarithm of its square, whose outliers are small, is regressed on the
    drivers. Second derivatives tell how the location follows them. From slopes of zero,
    fits of hierarchies ended in places that no step leaves.

    :param linear: coordinates without drivers.
    :param drivers: those that others depend on.
    :param x: draws.
    :param g: gradients there.
    :param changes: the result of :func:`_changes`.
    """
    dim = x.shape[1]
    for driver in drivers:
        linear = linear.with_driver(driver)
    rest = np.setdiff1d(range(dim), drivers)
    terms = np.column_stack([np.ones(len(x)), x[:, drivers]])
    logs = np.log(np.maximum(np.square(g), _LEAST_SQUARE))
    slopes, shifts, *_ = curves = np.zeros_like(linear.curves)
    of_logs = np.linalg.lstsq(terms, logs[:, rest], rcond=None)[0][1:].T
    slopes[rest] = np.clip(-of_logs / 2, -_MOST_SLOPE, _MOST_SLOPE)
    scales = np.exp(x[:, drivers] @ slopes.T)
    scaled = changes * np.square(scales)  # as if the scales were one
    for i in rest:
        curvature = -np.median(scaled[i::dim, i])
        if curvature > 0:
            follows = [np.median(scaled[j::dim, i]) / curvature for j in drivers]
            shifts[i] = np.clip(follows, -_MOST_SHIFT, _MOST_SHIFT)
    sizes = 1 / np.maximum(np.sqrt(np.square(scales * g).mean(0)), 1e-6)
    sizes[drivers] = 1.0
    return replace(linear, curves=curves, lower=np.diag(sizes))


def _least_squares(
    found: Coordinates,
    x: np.ndarray,
    g: np.ndarray,
    weights: np.ndarray | None = None,
    rounds: int = _ROUNDS,
    wandering: float = _WANDERING,
) -> tuple[Coordinates, float]:
    """Minimise a robust divergence by the method of Levenberg and Marquardt.

    Each position has a Cauchy loss, and a weight that makes it one of squares nearby.
    Squares would be those of few positions far out: a fit that began with draws in the
    neck of a hierarchy did not find its scale.

    :param found: where to start.
    :param x: draws.
    :param g: gradients there.
    :param weights: how much each draw counts, by default equally, ``(K,)``.
    :param rounds: the largest number of steps.
    :param wandering: a penalty, see :meth:`Coordinates.penalties`.
    :return: the coordinates, and their divergence with the penalty.
    """
    dim = len(found.center)
    free = np.flatnonzero(found.free())
    below = np.tril_indices(dim)
    off = np.add(*found.white(x, g))
    weights = np.ones(len(x)) if weights is None else weights
    now, damping = found.size(off, weights, wandering), _DAMPING
    for _ in range(rounds):
        slope = found.derivatives(x, g)
        flat = found.flat()
        penalties, of_penalties = found.penalties(wandering)
        of_penalties = np.pad(of_penalties[:, free], ((0, 0), (0, len(below[0]))))
        of_each = weights / weights.sum() * loss(off)[1]
        weighted = slope.T * np.repeat(of_each, dim)
        matrix = weighted @ slope + of_penalties.T @ of_penalties
        down = weighted @ off.ravel() + of_penalties.T @ penalties
        before = now
        while damping < _MOST_DAMPING:
            step = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), down)
            there, turn = flat.copy(), np.zeros((dim, dim))
            there[free] += step[: len(free)]
            turn[below] = step[len(free) :]
            other = found.moved(there, turn)
            off_there = np.add(*other.white(x, g))
            size_there = other.size(off_there, weights, wandering)
            if size_there < now:
                found, off, now = other, off_there, size_there
                damping = max(damping / 5, _LEAST_DAMPING)
                break
            damping *= 4
        if not now < (1 - _CONVERGED) * before:
            break
    return found, now


def _candidates(found: Coordinates, x: np.ndarray, g: np.ndarray) -> list[int]:
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
