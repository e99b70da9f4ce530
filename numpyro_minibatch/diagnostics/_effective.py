"""Effective sample sizes and Monte Carlo errors of many parameters at once."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr
from scipy.special import betaincinv, ndtr

__all__ = ["effective_sample_size", "precision"]

_BLOCK = 2**22  # numbers that are transformed at once
_TAILS = (0.05, 0.95)
_SMALLEST_TAIL = 20  # draws to which a tail is fitted
_LARGEST_SHAPE = 0.48
_NO_ERROR = 0.85  # shape from which on squares have no error
_OF_UNSEEN = 1.5  # error, in units of what draws beyond the largest would contribute
_AT_ONCE = 64  # parameters whose tails are fitted at once
_WIDEST = 3.0  # standard errors, of the interval that shows the error of a quantile


def effective_sample_size(series: np.ndarray) -> np.ndarray:
    """The effective sample size of means of ``(chain, draw, ...)`` numbers.

    Geyer's initial monotone sequence on halves of chains, with the variance between
    them, as in [1]. The result is at most the number of draws: where neighbouring draws
    are negatively correlated, a larger one rests on a sum of correlations that cancel,
    which is poorly determined. On over-relaxed chains of four times 1,000 draws, it was
    3,870, 3,780 and 3,720 without that limit, where the variance of means between 100
    such runs gives 3,540, 2,010 and 3,050.

    :param series: the numbers, shape ``(chain, draw, ...)``.
    :return: shape ``(...)``; NaN where a number is not finite or all are equal.

    **References:**

    1. Aki Vehtari, Andrew Gelman, Daniel Simpson, Bob Carpenter, Paul-Christian
       Bürkner (2021), *Rank-normalization, folding, and localization*, Bayesian
       Analysis 16(2), section 3.
    """
    shape = series.shape[2:]
    flat = series.reshape(*series.shape[:2], -1).astype(float)
    chains, draws, number = flat.shape
    if draws < 4:
        return np.full(shape, np.nan)
    each = max(1, _BLOCK // (chains * draws))
    blocks = [_of_block(flat[..., k : k + each]) for k in range(0, number, each)]
    return (np.concatenate(blocks) if blocks else np.empty(0)).reshape(shape)


def _of_block(x: np.ndarray) -> np.ndarray:
    half = x.shape[1] // 2
    halves = np.concatenate([x[:, :half], x[:, -half:]])
    chains, draws, _ = halves.shape
    total = chains * draws
    with np.errstate(all="ignore"):
        covariance = _autocovariance(halves).mean(0) * draws / (draws - 1)
        within = covariance[0]
        pooled = within * (draws - 1) / draws + halves.mean(1).var(0, ddof=1)
        rho = 1.0 - (within - covariance) / pooled
    rho[0] = 1.0
    pairs = rho[: draws // 2 * 2].reshape(draws // 2, 2, -1).sum(1)
    positive = np.logical_and.accumulate(pairs > 0, axis=0)
    kept = np.where(positive, np.minimum.accumulate(pairs, axis=0), 0.0)
    # add the first correlation after the cut, where it is positive
    after = np.minimum(positive.sum(0), len(pairs) - 1)
    odd = np.take_along_axis(rho[::2], after[None], 0)[0]
    tau = 2 * kept.sum(0) - 1 + np.maximum(np.where(positive.all(0), 0.0, odd), 0.0)
    found = total / np.maximum(tau, 1.0)
    return np.where(np.isfinite(pooled) & (pooled > 0), found, np.nan)


def _autocovariance(x: np.ndarray) -> np.ndarray:
    """The autocovariances of each chain, with the number of draws as divisor."""
    draws = x.shape[1]
    size = 2 ** math.ceil(math.log2(2 * draws))
    spectrum = np.fft.rfft(x - x.mean(1, keepdims=True), size, axis=1)
    power = spectrum.real**2 + spectrum.imag**2
    return np.fft.irfft(power, size, axis=1)[:, :draws] / draws


def precision(columns: np.ndarray, names: list[str]) -> xr.Dataset:
    """Estimates for each parameter, with their Monte Carlo errors.

    The error of a quantile is that of its probability [1], divided by the density that
    order statistics to either side show. The error of a standard deviation needs the
    fourth moment of the draws, and that of a mean the second one. A heavy tail
    contributes much to them by few draws: a run that happened to visit the tail too
    little underestimates both the moment and the error. So the largest squares, and the
    largest distances from the mean, count as those of a generalised Pareto distribution
    that is fitted to them [2]. If its shape is above one half, the error includes what
    draws beyond the largest one would contribute. If it is at least 0.85, the error is
    infinite: the draws do not show that there is a standard deviation, or a mean, at
    all (from a shape of 1 on there is none), and quantiles are what they determine.

    :param columns: the draws, shape ``(chain, draw, parameter)``.
    :param names: of the parameters.
    :return: estimates (``mean``, ``sd``, ``q5``, ``q95``), their effective sample sizes
        (``ess_mean``; ``ess_sd``, that of squares about the mean; ``ess_q5``,
        ``ess_q95``) and Monte Carlo standard errors (``mcse_mean`` and so on).

    **References:**

    1. Aki Vehtari et al. (2021), as in :func:`effective_sample_size`, section 4.4.
    2. Aki Vehtari, Daniel Simpson, Andrew Gelman, Yuling Yao, Jonah Gabry (2024),
       *Pareto smoothed importance sampling*, Journal of Machine Learning Research
       25(72).
    """
    flat = columns.reshape(-1, columns.shape[-1])
    with np.errstate(all="ignore"):
        mean, sd = flat.mean(0), flat.std(0)
        distances = np.abs(columns - mean)
        squares = distances**2
        ess = {
            "mean": effective_sample_size(columns),
            "sd": effective_sample_size(squares),
        }
        errors = {
            "mean": np.sqrt(_smoothed_moments(distances)[1] / ess["mean"]),
            # to first order, as an sd is the root of a mean of squares
            "sd": np.sqrt(_smoothed_variance(squares) / ess["sd"]) / (2 * sd),
        }
        ordered = np.sort(flat, axis=0)
        values = {"mean": mean, "sd": sd}
        for name, share in zip(("q5", "q95"), _TAILS, strict=True):
            values[name] = np.quantile(flat, share, axis=0)
            below = (columns <= values[name]).astype(float)
            ess[name] = effective_sample_size(below)
            errors[name] = _error_of_quantile(ordered, share, ess[name])
    return xr.Dataset(
        {
            **{key: ("parameter", v) for key, v in values.items()},
            **{f"ess_{key}": ("parameter", v) for key, v in ess.items()},
            **{f"mcse_{key}": ("parameter", v) for key, v in errors.items()},
        },
        {"parameter": names},
    )


def _smoothed_variance(values: np.ndarray) -> np.ndarray:
    """The variance of non-negative numbers with a smoothed upper tail.

    In 1,500 samples of 1,000 independent draws, 95% intervals of a standard deviation
    missed by the plain variance and by this one: 6% and 5% for a normal posterior, 7%
    and 3% for an exponential one, 12 to 13% and 2% for the scale of five normal rows,
    and 17% and 4% for a log-normal one. With a largest shape of 0.45, the last two
    missed by 4 to 8% and 12%.

    Of 600 samples of 4,000 draws of a censored Weibull scale, whose kurtosis is 55,000,
    48% missed. In 99% of them the shape is above 0.85, as in 95% of those of a
    log-normal variable with a kurtosis of 10,000, of which 30% missed. In 30 runs of
    each of 12 other posteriors, it was in 27% for the median of six log-normal rows, in
    7% for a hierarchy of five groups, and in none for the others.

    Between these shapes the second moment of the squares is infinite, and their mean is
    too low in most runs: draws beyond the largest one would contribute to it. Of 400
    samples of 1,000, 4,000 and 20,000 draws of an inverse gamma variable with shape
    2.5, the variance of six normal rows, 21 to 27% missed, and 3 to 8% with that
    contribution, times 1.5, as a part of the error. Of 300 runs of another censored
    scale, 24% and 8%. Intervals for 11 lighter tails change by little.

    :param values: shape ``(chain, draw, parameter)``.
    :return: at least the variance of the numbers, shape ``(parameter,)``; infinite if
        the tail is too heavy for any.
    """
    mean, second = _smoothed_moments(values)
    # NaN where many draws are equal, as of a discrete parameter
    return np.fmax(second - mean**2, values.var((0, 1)))


def _smoothed_moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and second moments of non-negative numbers with a smoothed upper tail.

    Of distances from the mean, the second moment gives the error of the mean. In 600
    samples of 4,000 independent draws, 95% intervals of the mean missed by the plain
    moment and by this one: 6% and 6% for normal and exponential variables, 11% and 2%
    for a log-normal one with scale 2, and 22% and 5% for an inverse gamma one with
    shape 1.5. With shape 1.2, 53% and 18%.

    :param values: shape ``(chain, draw, parameter)``.
    :return: two arrays of shape ``(parameter,)``. The second one is at least that of
        the numbers, and infinite if the tail is too heavy for any.
    """
    flat = values.reshape(-1, values.shape[-1])
    number, parameters = flat.shape
    plain = np.square(flat).mean(0)
    size = int(min(0.2 * number, 3 * np.sqrt(number)))
    if size < _SMALLEST_TAIL:
        return flat.mean(0), plain
    found = np.empty((2, parameters))
    for first in range(0, parameters, _AT_ONCE):
        block = np.sort(flat[:, first : first + _AT_ONCE], axis=0)
        below, cut = block[:-size], block[-size - 1]
        whole, scale = _pareto(block[-size:] - cut)
        too_heavy = whole >= _NO_ERROR
        # above one half the second moment is infinite
        shape = np.minimum(whole, _LARGEST_SHAPE)
        excess = scale / (1 - shape)
        square = 2 * scale**2 / ((1 - shape) * (1 - 2 * shape))
        mean = (below.sum(0) + size * (cut + excess)) / number
        tail = cut**2 + 2 * cut * excess + square
        second = (np.square(below).sum(0) + size * tail) / number
        heavier = np.clip(whole, _LARGEST_SHAPE, _NO_ERROR)
        unseen = _beyond(size, heavier, scale) - _beyond(size, _LARGEST_SHAPE, scale)
        missed = _OF_UNSEEN * unseen / number  # an error of the mean, not of a draw
        second = np.where(too_heavy, np.inf, second + number * missed**2)
        found[:, first : first + _AT_ONCE] = mean, second
    # NaN where many draws are equal, as of a discrete parameter
    return found[0], np.fmax(found[1], plain)


def _beyond(size: int, shape: float | np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The sum that excesses above the largest of ``size`` contribute on average.

    One of ``size`` excesses of a generalised Pareto distribution is above its quantile
    of ``1 - 1 / size``, and by this much on average.
    """
    quantile = scale * (size**shape - 1) / shape
    return quantile + (scale + shape * quantile) / (1 - shape)


def _pareto(excesses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shape and scale of generalised Pareto distributions.

    The estimates of [1], with the prior of [2] in :func:`precision` for the shape: ten
    further observations with a shape of one half.

    :param excesses: those over a threshold, in ascending order, shape ``(n, k)``.
    :return: two arrays of shape ``(k,)``.

    **References:**

    1. Jin Zhang, Michael Stephens (2009), *A new and efficient estimation method for
       the generalized Pareto distribution*, Technometrics 51(3).
    """
    number = len(excesses)
    points = 30 + int(np.sqrt(number))
    grid = 1 - np.sqrt(points / (np.arange(1, points + 1) - 0.5))
    quartile, largest = excesses[int(number / 4 + 0.5) - 1], excesses[-1]
    with np.errstate(all="ignore"):
        # candidates for minus the ratio of shape and scale
        ratio = grid[:, None] / (3 * quartile) + 1 / largest
        shapes = np.log1p(-ratio[:, None] * excesses).mean(1)
        profile = number * (np.log(-ratio / shapes) - shapes - 1)
        weight = np.exp(profile - profile.max(0))
        best = (weight * ratio).sum(0) / weight.sum(0)
        shape = np.log1p(-best * excesses).mean(0)
        return (number * shape + 10 * 0.5) / (number + 10), -shape / best


def _error_of_quantile(
    ordered: np.ndarray, share: float, ess: np.ndarray
) -> np.ndarray:
    """The errors of quantiles of sorted draws, shape ``(parameter,)``.

    Order statistics at one standard error to either side are so few draws apart, 28 of
    4,000 for a quantile of 5%, that their distance varies by a fifth. Of 3,000 samples
    of 4,000 independent draws from five distributions, 95% intervals missed in 5.5 to
    6.9%. Those of three standard errors, divided by three, missed in 4.6 to 5.7%. In
    between the density should be nearly constant, so they are at most a third of the
    tail's probability away.
    """
    known = np.nan_to_num(ess, nan=1.0)
    number = len(ordered)
    tail = min(share, 1 - share)
    standard = np.sqrt(share * (1 - share) / known)
    width = np.clip(tail / (3 * standard), 1.0, _WIDEST)
    levels = (
        betaincinv(known * share + 1, known * (1 - share) + 1, ndtr(sign * width))
        for sign in (-1, 1)
    )
    low, high = (np.clip(level * number, 0, number - 1) for level in levels)
    lower = np.take_along_axis(ordered, np.floor(low).astype(int)[None], 0)[0]
    upper = np.take_along_axis(ordered, np.ceil(high).astype(int)[None], 0)[0]
    return np.where(np.isnan(ess), np.nan, 0.5 * (upper - lower) / width)
