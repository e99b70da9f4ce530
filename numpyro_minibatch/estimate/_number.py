"""An estimate with its variance, and how it is computed from rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch.batch import Batch
from numpyro_minibatch.target import Terms

__all__ = ["Estimate", "Weights", "penalty_correction"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Estimate:
    """An unbiased, approximately normal estimate of a number, with its variance.

    Estimates obey the algebra of independent random variables: scaling by ``c``
    scales the variance by ``c ** 2``, the variances of a sum add, and adding a
    known number changes no variance.

    :param value: the estimate, any shape.
    :param variance: the estimated variance of ``value``; ``0`` (the default)
        means that ``value`` is exact.
    :param dof: degrees of freedom behind ``variance`` (``m - 1`` for a batch of
        ``m`` rows); infinite (the default) for a variance that is known. A sum of
        estimates has the Welch-Satterthwaite degrees of freedom.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import Estimate
        >>> a = Estimate(1.0, variance=0.5, dof=99.0)
        >>> b = 2.0 * a + 3.0
        >>> float(b.value), float(b.variance), float(b.dof)
        (5.0, 2.0, 99.0)
        >>> total = a + Estimate(-1.0, variance=0.5, dof=99.0)
        >>> float(total.value), float(total.variance), float(total.dof)
        (0.0, 1.0, 198.0)
    """

    value: ArrayLike
    variance: ArrayLike = 0.0
    dof: ArrayLike = float("inf")

    def __add__(self, other: Estimate | ArrayLike) -> Estimate:
        if not isinstance(other, Estimate):
            return Estimate(self.value + other, self.variance, self.dof)
        variance = self.variance + other.variance
        # Welch-Satterthwaite: 1 / dof is the mean of 1 / dof_k with weights
        # variance_k ** 2 / variance ** 2; an exact sum has infinitely many.
        share = jnp.square(self.variance) / self.dof
        share += jnp.square(other.variance) / other.dof
        dof = jnp.where(
            share > 0,
            jnp.square(variance) / jnp.where(share > 0, share, 1.0),
            jnp.inf,
        )
        return Estimate(self.value + other.value, variance, dof)

    __radd__ = __add__

    def __mul__(self, factor: ArrayLike) -> Estimate:
        return Estimate(self.value * factor, self.variance * factor**2, self.dof)

    __rmul__ = __mul__


def penalty_correction(log_ratio: Estimate) -> Array:
    """The correction that makes the exponential of a noisy log ratio unbiased.

    With ``c`` the variance estimated from ``n = dof + 1`` normal rows, the exact
    correction for ``n`` rows is ``-log 0F1(; (n - 1) / 2; -c * (n - 1) / 4)``: its
    ``E exp(-u)`` over the scaled chi-squared distribution of ``c`` is ``exp(-variance /
    2)``. Like the reference, this function takes the first three terms of the power
    series, ``c / 2 + c ** 2 / (4 (n + 1)) + c ** 3 / (3 (n + 1) (n + 3))``; the whole
    series diverges slightly above ``c = n / 4``, where 0F1 is zero. Truncation makes
    ``E exp(-u)`` too large, by a relative 6e-7 (100 rows), 5e-6 (50) or 7e-4 (10) at
    variance 1 and by 1.5e-4, 1.2e-3 or 0.09 at variance 4.

    :param log_ratio: estimate with its variance and degrees of freedom; infinitely
        many give half the variance.
    :return: the correction, in the units of the log ratio.
    """
    c = jnp.asarray(log_ratio.variance)
    n = log_ratio.dof + 1.0
    # Nested, so that large variances overflow late, also in float32.
    return c * (0.5 + c / (n + 1.0) * (0.25 + c / (3.0 * (n + 3.0))))


class Weights(NamedTuple):
    """The powers to which a target raises the prior and the likelihood.

    :param prior: power of the prior, ``1`` unless the prior is tempered too.
    :param likelihood: power of the likelihood, ``1 / temperature``.
    :param volume: factor on the log determinants of the maps to the unconstrained
        coordinates; 1 except for a multiple of the log density.
    """

    prior: ArrayLike = 1.0
    likelihood: ArrayLike = 1.0
    volume: ArrayLike = 1.0

    def known(self, terms: Terms) -> Array:
        """The weighted log density of all but the rows, a scalar."""

        def total(weight: ArrayLike, part: Any) -> Array:
            sums = (jnp.sum(x) for x in jax.tree.leaves(part))
            return jnp.asarray(weight) * sum(sums, jnp.zeros(()))

        return (
            total(self.prior, terms.prior)
            + total(self.likelihood, terms.likelihood)
            + total(self.volume, terms.volume)
        )


class Moments(NamedTuple):
    """Running mean and sum of squared deviations of ``k`` numbers per row.

    Merged by Chan's rule, so that no two large sums are ever subtracted. An infinite
    row makes the mean infinite for good; such a mean has variance 0.
    """

    seen: Array
    mean: Array
    m2: Array

    @classmethod
    def of(cls, rows: Array, count: Array | None = None) -> Moments:
        """The moments of the first ``count`` columns of ``rows``, shape ``(k, b)``."""
        if count is None:
            mean = rows.mean(-1)
            m2 = jnp.square(rows - mean[:, None]).sum(-1)
            count = jnp.int32(rows.shape[-1])
        else:
            inside = jnp.arange(rows.shape[-1]) < count
            divisor = jnp.maximum(count, 1).astype(rows.dtype)
            mean = jnp.where(inside, rows, 0.0).sum(-1) / divisor
            m2 = jnp.where(inside, jnp.square(rows - mean[:, None]), 0.0).sum(-1)
        return cls(count, mean, jnp.where(jnp.isinf(mean), 0.0, m2))

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of rows together."""
        seen = self.seen + other.seen
        share = other.seen / jnp.maximum(seen, 1).astype(self.mean.dtype)
        delta = other.mean - self.mean
        mean = self.mean + delta * share
        m2 = self.m2 + other.m2 + jnp.square(delta) * self.seen * share
        for part in (other, self):
            infinite = jnp.isinf(part.mean)
            mean = jnp.where(infinite, part.mean, mean)
            m2 = jnp.where(infinite, 0.0, m2)
        return Moments(seen, mean, m2)

    def total(self, size: int, fpc: ArrayLike = 1.0) -> Estimate:
        """The sum over all ``size`` rows, from a scheme with the correction ``fpc``.

        The sample variance of ``m`` of ``N`` normal rows is less variable than that of
        independent rows by the factor ``1 - m / N``, hence its degrees of freedom.
        """
        count = self.seen.astype(self.mean.dtype)
        free = jnp.maximum(count - 1.0, 1.0)
        variance = float(size) ** 2 * self.m2 / (free * count)
        return Estimate(size * self.mean, variance * fpc, free / jnp.asarray(fpc))


def total(batch: Batch, rows: Array, size: int) -> Estimate:
    """The sums over all rows of ``k`` numbers per row, from the rows of one batch.

    With weighted rows, every draw from a stratum estimates the stratum's total, and the
    scatter of these few draws estimates the noise. The degrees of freedom are those of
    Welch and Satterthwaite, with unbiased estimates of the strata's squared variances
    in numerator and denominator: with normal strata ``E s ** 4`` is ``1 + 2 / f`` times
    ``sigma ** 4``, where ``f`` are the degrees of freedom of one stratum [1].

    :param batch: the batch.
    :param rows: the numbers, shape ``(k, m)``.
    :param size: the number of rows ``N`` of the plate.
    :return: estimates of shape ``(k,)``. A row that is not finite makes the value not
        finite; an infinite value has variance 0.

    **References:**

    .. [1] F. E. Satterthwaite (1946), *An approximate distribution of estimates of
       variance components*, Biometrics Bulletin 2, 110-114.
    """
    if batch.weights is None:
        return Moments.of(rows).total(size, batch.fpc)
    parts = rows * batch.weights
    drawn = parts[:, batch.num_sure :].reshape(len(rows), -1, batch.num_draws)
    value = parts[:, : batch.num_sure].sum(-1) + drawn.sum((-2, -1))
    if not drawn.shape[1]:
        return Estimate(value, jnp.zeros_like(value), jnp.full_like(value, jnp.inf))
    free = batch.num_draws - 1
    spread = jnp.square(drawn - drawn.mean(-1, keepdims=True)).sum(-1)
    variances = spread * (batch.num_draws / free)
    variance = variances.sum(-1)
    # shares, because float32 does not hold the square of a large variance
    shares = variances / jnp.where(variance > 0.0, variance, 1.0)[:, None]
    concentration = jnp.maximum(jnp.square(shares).sum(-1), 1.0 / drawn.shape[1])
    most = drawn.shape[1] * free
    dof = jnp.clip((free + 2.0) / concentration - 2.0, free, most)
    dof = jnp.where(jnp.isnan(dof), most, dof)  # where a row is not finite
    is_infinite = jnp.isinf(value)
    return Estimate(value, jnp.where(is_infinite, 0.0, variance), dof)
