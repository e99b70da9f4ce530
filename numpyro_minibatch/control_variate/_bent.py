"""Coordinates in which the scales of a surrogate's posterior vary less.

In a funnel the scale of some parameters depends on another one: that of the effects of
groups on their standard deviation, or that of a mean of few rows on the scale of the
rows. No linear change of coordinates removes this, and a trajectory whose steps suit
the bulk crosses the wide part slowly. Dividing each parameter by a scale that is
log-linear in a few *drivers* does. This is the non-centred parametrisation [1]_, found
from draws.

References:
    1. Papaspiliopoulos, O., Roberts, G. O. and Skold, M. (2007). *A general framework
       for the parametrization of hierarchical models.* Statistical Science 22(1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_minibatch.proposal import Bent, Scales, Whitening

__all__ = [
    "DRIVERS",
    "MOST_COORDINATES",
    "bent_by",
    "fit_scales",
    "scales_by",
    "straight",
    "used",
]

#: the number of drivers; those that are not used have slopes of zero
DRIVERS = 3
# above it, the covariance of draws alone is too far from the true one
MOST_COORDINATES = 40
# Gain of a driver in the expected log density of a draw, above which it is used, and
# the number of its standard errors that the gain of a coordinate must exceed.
_GAIN, _CLEAR = 0.05, 4.0
_OUTLIER = 16.0  # squares of standardised residuals count at most as much
_ROUNDS = 12  # of weighted least squares
_LARGEST_STEP = 0.5  # of a slope in a round
_SHRINKAGE = 0.02  # of correlations, as of the covariance in linear coordinates


def straight(location: np.ndarray, root: np.ndarray, dtype: Any) -> Bent:
    """Linear coordinates as bent ones, with slopes of zero.

    :param location: their centre, ``(D,)``.
    :param root: transpose of a root of a covariance, ``(D, D)``.
    :param dtype: of all arrays.
    """
    return bent_by(location, root, _no_scales(len(location)), dtype)


def _no_scales(dim: int) -> Scales:
    """Scales and locations that do not vary, of so many coordinates."""
    none = np.zeros(0)
    return scales_by([], np.ones(dim), np.zeros((3, dim, 2, 0)), none, none)


def scales_by(
    drivers: list[int],
    sd: np.ndarray,
    curves: np.ndarray,
    knees: np.ndarray,
    widths: np.ndarray,
    tails: np.ndarray | None = None,
) -> Scales:
    """Scales and locations that vary, with as many drivers as programs expect.

    :param drivers: the coordinates that others depend on.
    :param sd: standard deviations of the coordinates, ``(D,)``, in which drivers and
        locations are measured.
    :param curves: those of :class:`~numpyro_minibatch.preconditioner.Scales`.
    :param knees: where they bend.
    :param widths: over which distances.
    :param tails: growths, bends, knees and widths of the drivers' own curves,
        ``(4, k)``.
    """
    number = len(drivers)
    select = np.zeros((DRIVERS, len(sd)))
    select[np.arange(number), drivers] = 1.0 / sd[drivers]
    every = np.zeros((3, len(sd), 2, DRIVERS))
    every[..., :number] = curves
    every[1:] *= sd[:, None, None]
    where = np.zeros(DRIVERS), np.ones(DRIVERS)
    for padded, given in zip(where, (knees, widths), strict=True):
        padded[:number] = given
    of_tails = np.outer([0.0, 0.0, 0.0, 1.0], sd)
    if tails is not None:
        of_tails[:, drivers] = tails * np.stack([sd**-2.0, sd**0.0, sd, sd])[:, drivers]
    return Scales(select, every, *where, of_tails)  # type: ignore[arg-type]


def bent_by(center: np.ndarray, root: np.ndarray, scales: Scales, dtype: Any) -> Bent:
    """Coordinates with drivers.

    :param center: where all of them are zero, ``(D,)``.
    :param root: transpose of a root of the covariance of what is left, ``(D, D)``.
    :param scales: the locations and scales that vary.
    :param dtype: of all arrays.
    """
    arrays = (np.asarray(x, dtype) for x in scales)
    whitening = Whitening(np.asarray(root, dtype), scales=Scales(*arrays))  # type: ignore[arg-type]
    return Bent(np.asarray(center, dtype), whitening)  # type: ignore[arg-type]


def used(bent: Bent | None) -> Bent | None:
    """Coordinates without drivers that do nothing: chains compile less code for them.

    :param bent: coordinates with as many drivers as the set-up's programs have.
    """
    if bent is None or bent.whitening.scales is None:
        return bent
    scales = bent.whitening.scales
    number = int(np.asarray(scales.drivers).any(1).sum())
    fewer = Scales(
        scales.drivers[:number],
        scales.curves[..., :number],
        scales.knees[:number],
        scales.widths[:number],
        scales.tails,
    )
    return bent._replace(whitening=bent.whitening._replace(scales=fewer))


def fit_scales(draws: np.ndarray, dtype: Any) -> Bent | None:
    """Coordinates with drivers, fitted to draws by maximum likelihood.

    :param draws: of a surrogate's posterior, ``(K, D)``.
    :param dtype: of the result.
    :return: ``None`` if no scale depends on another coordinate by enough to matter, or
        if the draws are too few to tell.
    """
    try:
        found = _fit(draws, dtype)
    except np.linalg.LinAlgError:  # nearly all of the weight is that of a few draws
        return None
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    return found if finite else None


def _fit(draws: np.ndarray, dtype: Any) -> Bent | None:
    dim = draws.shape[1]
    if not 1 < dim <= MOST_COORDINATES:
        return None
    number = len(np.unique(draws[:, 0]))  # draws that were resampled are equal
    mean, sd = draws.mean(0), draws.std(0)
    if not (np.isfinite(sd).all() and (sd > 0).all()):
        return None
    x = (draws - mean) / sd
    drivers: list[int] = []
    fitted = None
    residuals = x
    while len(drivers) < min(DRIVERS, dim - 1):
        best = _best_driver(residuals, drivers, number)
        if best is None:
            break
        drivers.append(best)
        fitted = _fitted(x, drivers)
        residuals = fitted.residuals(x, drivers)
    if fitted is None:
        return None
    covariance = residuals.T @ residuals / len(x)
    diagonal = np.diag(np.diag(covariance))
    covariance = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * diagonal
    number = len(drivers)
    curves = np.zeros((3, dim, 2, number))
    curves[0, :, 0], curves[2, :, 0] = fitted.slopes, fitted.shifts
    scales = scales_by(drivers, sd, curves, np.zeros(number), np.ones(number))
    root = np.linalg.cholesky(covariance).T * sd
    center = mean + sd * fitted.center
    return bent_by(center, root, scales, dtype)


class _Fitted(NamedTuple):
    """Normal distributions whose location and scale depend on drivers.

    :param center: locations where the drivers are zero, ``(D,)``.
    :param shifts: derivatives of the locations, ``(D, k)``.
    :param slopes: derivatives of the logarithms of the scales, ``(D, k)``.
    """

    center: np.ndarray
    shifts: np.ndarray
    slopes: np.ndarray

    def residuals(self, x: np.ndarray, drivers: list[int]) -> np.ndarray:
        """What is left of standardised draws, in scales that are constant."""
        d = x[:, drivers]
        left = x - self.center - d @ self.shifts.T
        return np.asarray(left * np.exp(-d @ self.slopes.T))


def _best_driver(residuals: np.ndarray, drivers: list[int], number: int) -> int | None:
    """The coordinate on which the scales of the others depend most.

    The gain is that of a score test, a quarter of the squared covariance between the
    coordinate and the square of what it does not linearly explain of another one.

    :param residuals: in the coordinates that drivers have already changed.
    :param drivers: those that were already chosen.
    :param number: of different draws.
    :return: ``None`` if the gain is too small.
    """
    scale = np.sqrt(np.square(residuals).mean(0))
    x = residuals / scale
    correlation = x.T @ x / len(x)
    gains = np.zeros(x.shape[1])
    for j in range(x.shape[1]):
        if j in drivers:
            continue
        rho = correlation[j]
        left = 1 - np.square(rho)
        left[[j, *drivers]] = np.inf
        others = (x - x[:, [j]] * rho) / np.sqrt(np.maximum(left, 1e-6))
        terms = x[:, [j]] * (np.minimum(np.square(others), _OUTLIER) - 1)
        gain = 0.25 * np.square(terms.mean(0))
        gain[[j, *drivers]] = 0.0
        # with heavy tails a score has several times the noise of normal draws
        clear = np.square(terms.mean(0)) > _CLEAR**2 * terms.var(0) / number
        gains[j] = gain[clear].sum()
    best = int(np.argmax(gains))
    return best if gains[best] > _GAIN else None


def _fitted(x: np.ndarray, drivers: list[int]) -> _Fitted:
    """Maximum likelihood by weighted least squares and Fisher scoring in turn."""
    number, dim = x.shape
    design = np.column_stack([np.ones(number), x[:, drivers]])
    mean = np.linalg.lstsq(design, x, rcond=None)[0].T  # (D, 1 + k)
    log_scale = np.zeros_like(mean)
    left = np.square(x - design @ mean.T).mean(0)
    log_scale[:, 0] = 0.5 * np.log(left + 1e-12)
    information = 2 * design.T @ design / number
    for _ in range(_ROUNDS):
        weight = np.exp(-2 * design @ log_scale.T)
        squares = np.minimum(np.square(x - design @ mean.T) * weight, _OUTLIER)
        score = design.T @ (squares - 1) / number
        step = np.linalg.solve(information, score).T
        log_scale += np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)
        weight = np.exp(-2 * design @ log_scale.T)
        normal = np.einsum("na,ni,nb->iab", design, weight, design, optimize=True)
        moment = np.einsum("na,ni->ia", design, weight * x)
        mean = np.linalg.solve(normal, moment[..., None])[..., 0]
    mean[drivers], log_scale[drivers] = 0.0, 0.0
    return _Fitted(mean[:, 0], mean[:, 1:], log_scale[:, 1:])
