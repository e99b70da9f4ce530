"""The normality of minibatch means, which every noisy decision assumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.stats import kurtosis, norm, skew

from numpyro_minibatch._model.replay import (
    CHUNK,
    compute_rows,
    data_sites,
    inspect_sites,
    log_likelihoods,
    subsampled_plates,
)
from numpyro_minibatch.batch import without_replacement
from numpyro_minibatch.target import ModelTarget, Target

__all__ = ["Normality", "log_ratio_rows", "normal_error_bound", "normality"]


class Normality(NamedTuple):
    """The distance of batch means from normality; see :func:`normality`.

    :param distance: the largest difference between the distribution functions of the
        standardised means and of the standard normal distribution.
    :param resolution: the 95% quantile of ``distance`` if the means are normal. It
        is above 0 because the distance is measured on finitely many batches.
    :param skewness: skewness of the means.
    :param excess_kurtosis: excess kurtosis of the means.
    """

    distance: float
    resolution: float
    skewness: float
    excess_kurtosis: float


def _standardised(name: str, rows: Any) -> np.ndarray:
    """Rows with mean 0 and mean square 1."""
    values = np.asarray(rows, float)
    if values.ndim != 1 or values.size < 2:
        raise ValueError(
            f"{name}(rows) takes one number for each of at least 2 rows, got shape "
            f"{values.shape}."
        )
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ValueError(
            f"{name}(rows): {bad} of {values.size} numbers are not finite."
        )
    values = values - values.mean()
    sd = math.sqrt(np.square(values).mean())
    if sd == 0:
        raise ValueError(
            f"{name}(rows): all {values.size} numbers are equal: their mean is exact."
        )
    return values / sd


def normal_error_bound(rows: Any, batch_size: int | None = None) -> float:
    r"""Bound how far the mean of a batch can be from normal [1, 2].

    With ``X`` a row, standardised, and ``m`` the batch size, the distribution function
    of the mean over its own standard error is within

    .. math:: (6.4 \, E|X|^3 + 2 \, E|X|) / \sqrt m

    of the normal one. Both papers print this without standardising ``X``, which cannot
    be intended: their left side does not change with the scale of the rows, but the
    right side does, and for small numbers it is below the true distance.

    The bound is a guarantee for independent rows, not an estimate. For normal rows and
    ``m = 100`` it is 1.18, which is no restriction, while the distance is 0.0016. It
    falls below 0.05 at 56,000 rows. :func:`normality` measures the distance.

    :param rows: a number for each row, for example from :func:`log_ratio_rows`, or for
        each row of a batch.
    :param batch_size: the batch size ``m``; by default the number of ``rows``.
    :return: the bound, which can exceed 1.
    :raises ValueError: a number is not finite, all are equal, or ``batch_size`` is not
        positive.

    **References:**

    1. Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, Lemma 1.
    2. Daniel Seita, Xinlei Pan, Haoyu Chen, John Canny (2017), *An Efficient
       Minibatch Acceptance Test for Metropolis-Hastings*, Lemma 2.

    **Example**

    .. doctest::

        >>> import jax
        >>> from numpyro_minibatch.diagnostics import normal_error_bound
        >>> rows = jax.random.normal(jax.random.key(0), (100_000,))
        >>> round(normal_error_bound(rows, batch_size=100), 1)
        1.2
    """
    size = np.abs(_standardised("normal_error_bound", rows))
    m = size.size if batch_size is None else batch_size
    if isinstance(m, bool) or not isinstance(m, int | np.integer) or m < 1:
        raise ValueError(
            f"normal_error_bound(batch_size={batch_size!r}): expected a positive "
            "number of rows, such as 100."
        )
    return float((6.4 * (size**3).mean() + 2 * size.mean()) / math.sqrt(m))


def normality(
    rows: Any, batch_size: int, key: Array, num_batches: int = 5000
) -> Normality:
    """Measure how far the means of batches of these rows are from normal.

    Batches are drawn as the kernels draw them, without replacement, and their means
    standardised by the true mean and standard deviation. If a few rows carry most of
    the variance, most batches miss them, and the distance is large.

    :param rows: a number for each row of the data, for example from
        :func:`log_ratio_rows`.
    :param batch_size: the number of rows of a batch, fewer than all rows.
    :param key: a JAX random key.
    :param num_batches: the number of batches to draw.
    :return: the distance from the normal distribution, its resolution, and moments.
    :raises TypeError: ``batch_size`` is not an integer.
    :raises ValueError: a number is not finite, all are equal, or ``batch_size`` is not
        below their number.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_minibatch.diagnostics import normality
        >>> rows = jax.random.normal(jax.random.key(0), (10_000,))
        >>> normality(rows, 100, jax.random.key(1)).distance < 0.03
        True
        >>> one_row_matters = jnp.zeros(10_000).at[0].set(1.0)
        >>> normality(one_row_matters, 100, jax.random.key(1)).distance > 0.3
        True
    """
    values = _standardised("normality", rows)
    size = values.size
    scheme = without_replacement(batch_size)
    if batch_size >= size:
        raise ValueError(
            f"normality(batch_size={batch_size}): a batch of all {size} rows has no "
            "noise. Pass fewer."
        )
    if isinstance(num_batches, bool) or not isinstance(num_batches, int):
        raise TypeError(f"normality(num_batches={num_batches!r}): expected an integer.")
    if num_batches < 100:
        raise ValueError(
            f"normality(num_batches={num_batches}): at least 100 batches are needed "
            "to measure a distance."
        )
    plates = {"data": size}
    scheme = scheme.bound({"data": batch_size}, plates)
    array = jnp.asarray(values, jnp.result_type(float))

    def mean_of(array: Array, key: Array) -> Array:
        return array[scheme.draw(key, plates)["data"].indices].mean()

    @jax.jit
    def means_of(array: Array, keys: Array) -> Array:
        block = max(1, min(num_batches, 2**20 // batch_size))
        return jax.lax.map(lambda key: mean_of(array, key), keys, batch_size=block)

    means = np.asarray(means_of(array, jax.random.split(key, num_batches)), float)
    # the rows have mean square 1 with divisor N: hence N - 1 here
    z = np.sort(means / math.sqrt((size - batch_size) / (size - 1) / batch_size))
    below, steps = norm.cdf(z), np.arange(num_batches + 1) / num_batches
    return Normality(
        float(max((steps[1:] - below).max(), (below - steps[:-1]).max())),
        1.358 / math.sqrt(num_batches),  # the 95% point of Kolmogorov's distribution
        float(skew(z)),
        float(kurtosis(z)),
    )


def log_ratio_rows(
    model_or_target: Callable | Target,
    z: Any,
    z_new: Any,
    model_args: tuple = (),
    model_kwargs: Mapping[str, Any] | None = None,
    plate: str | None = None,
    chunk_size: int = CHUNK,
) -> np.ndarray:
    """The difference in log likelihood of each row between two positions.

    These are the numbers whose mean over a batch decides a move; pass them to
    :func:`normality` and :func:`normal_error_bound`.

    :param model_or_target: a NumPyro model or a :class:`~numpyro_minibatch.Target`.
    :param z: the current position: for a model, constrained values by site, such as one
        draw of ``mcmc.get_samples()``; for a target, the argument of its functions.
    :param z_new: the proposed position.
    :param model_args: positional arguments of the model.
    :param model_kwargs: keyword arguments of the model.
    :param plate: the data plate, if there is more than one.
    :param chunk_size: the number of log likelihoods to compute at a time.
    :return: ``log likelihood(z_new) - log likelihood(z)`` of each row, at temperature
        1, shape ``(N,)``.
    :raises ValueError: there is no such plate or more than one, or a position lacks a
        site.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_minibatch.diagnostics import log_ratio_rows

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=2) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = jnp.array([0.0, 1.0, 2.0])
        >>> log_ratio_rows(model, {"mu": 0.0}, {"mu": 1.0}, (y,)).round(3).tolist()
        [-0.5, 0.5, 1.5]
    """
    if isinstance(model_or_target, Target):
        target = model_or_target
        name = _choose_plate(plate, list(target.plates))
        pair = jax.tree.map(lambda a, b: jnp.stack([a, b]), z, z_new)

        def rows_of(target: Target, draw: Any, rows: Any) -> dict[str, Array]:
            return {"rows": target.terms(draw, rows).rows[name]}

        old, new = compute_rows(target, name, rows_of, pair, chunk_size)["rows"]
        return new - old
    model = ModelTarget(
        model=model_or_target, args=tuple(model_args), kwargs=dict(model_kwargs or {})
    )
    sites, own = inspect_sites(model), subsampled_plates(model)
    observed = [site for site in sites.values() if site.observed]
    sizes = {name: size for site in observed for name, _, size in site.frames} | own
    plate = _choose_plate(plate, [*own] or [*sizes])
    model = replace(model, sizes=own | {plate: sizes[plate]})
    sites = inspect_sites(model)
    latents = [name for name, site in sites.items() if site.latent]
    for position in (z, z_new):
        missing = [name for name in latents if name not in position]
        if missing:
            raise ValueError(
                f"log_ratio_rows: a position has no value for {missing}; it has "
                f"{list(position)}. Pass constrained values of all latent sites, such "
                "as one draw of mcmc.get_samples()."
            )
    pair = {n: jnp.stack([jnp.asarray(z[n]), jnp.asarray(z_new[n])]) for n in latents}
    values = log_likelihoods(model, sites, pair, chunk_size)
    inside = [n for n, where in data_sites(sites, model).items() if where == plate]
    return sum((values[n][1] - values[n][0] for n in inside), np.zeros(sizes[plate]))


def _choose_plate(plate: str | None, plates: list[str]) -> str:
    if plate is None and len(plates) == 1:
        return plates[0]
    if plate is None or plate not in plates:
        found = ", ".join(map(repr, plates)) or "none"
        raise ValueError(
            f"log_ratio_rows(plate={plate!r}): pass one of the data plates: {found}."
        )
    return plate
