"""Tests of one estimate: Metropolis, penalty, Barker, compensated Barker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import erfc

from numpyro_minibatch.accept._contract import AcceptanceTest
from numpyro_minibatch.accept._correction import (
    Series,
    Table,
    correction_table,
    refuse_unfit,
)
from numpyro_minibatch.estimate import Estimate, penalty_correction

__all__ = ["barker", "compensated_barker", "metropolis", "penalty", "series"]


@dataclass(frozen=True)
class Metropolis(AcceptanceTest):
    """The test that :func:`metropolis` builds."""

    max_variance = 0.0

    def probability(self, log_ratio: Estimate) -> Array:
        return jnp.exp(jnp.minimum(log_ratio.value, 0.0))


@dataclass(frozen=True)
class Penalty(AcceptanceTest):
    """The test that :func:`penalty` builds."""

    max_variance: float = 1.0
    small_sample: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.max_variance, Real) or not self.max_variance > 0:
            raise ValueError(
                f"penalty(max_variance={self.max_variance!r}): the largest reliable "
                "variance must be a positive number; write 1.0 (the default), or "
                "metropolis() for log ratios without noise"
            )
        if not isinstance(self.small_sample, bool):
            raise TypeError(
                f"penalty(small_sample={self.small_sample!r}): expected True or False"
            )

    def probability(self, log_ratio: Estimate) -> Array:
        if self.small_sample:
            correction = penalty_correction(log_ratio)
        else:
            correction = 0.5 * jnp.asarray(log_ratio.variance)
        return jnp.exp(jnp.minimum(log_ratio.value - correction, 0.0))


@dataclass(frozen=True)
class Barker(AcceptanceTest):
    """The test that :func:`barker` builds."""

    max_variance = 0.0
    highest_accept_prob = 0.5

    def probability(self, log_ratio: Estimate) -> Array:
        return jax.nn.sigmoid(log_ratio.value)


@dataclass(frozen=True)
class CompensatedBarker(AcceptanceTest):
    """The test that :func:`compensated_barker` builds."""

    variance: float = 1.0
    table: Table = "nnls"
    highest_accept_prob = 0.5

    def __post_init__(self) -> None:
        refuse_unfit(self.variance, self.table)
        # A NumPy number would widen float32 log ratios.
        object.__setattr__(self, "variance", float(self.variance))

    @property
    def max_variance(self) -> float:
        return self.variance

    def probability(self, log_ratio: Estimate) -> Array:
        table = correction_table(self.variance, self.table)
        value = jnp.asarray(log_ratio.value)
        dtype = jnp.result_type(value, log_ratio.variance, float)
        atoms = table.atoms.astype(dtype)
        probabilities = table.probabilities.astype(dtype)
        # The variance of the normal draw that completes the noise of the estimate. At
        # zero the curve is a step function, here with steps 1e-6 wide.
        spare = jnp.maximum(self.variance - jnp.asarray(log_ratio.variance), 1e-12)
        # Phi(z) = erfc(-z / sqrt(2)) / 2. By symmetry the curve at -|value| is enough:
        # it stays accurate in both tails, and is 0 and 1 exactly at the infinities.
        gap = jnp.abs(value)[..., None] + atoms
        steps = erfc(gap * jax.lax.rsqrt(2.0 * spare)[..., None])
        # A sum, not a dot product, which accelerators take in reduced precision.
        below = 0.5 * jnp.sum(probabilities * steps, axis=-1)
        return jnp.where(value > 0, 1.0 - below, below)


def metropolis() -> AcceptanceTest:
    """Build the Metropolis test, for log ratios without noise.

    The move is accepted with probability ``min(1, exp(value))``. On a noisy log ratio
    this accepts too often: for small moves, noise of standard deviation 1 acts like a
    temperature of 1.46. The decision is then marked as not reliable.

    **References:**

    1. Metropolis, N., Rosenbluth, A. W., Rosenbluth, M. N., Teller, A. H. and
       Teller, E. (1953). Equation of state calculations by fast computing machines.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import Estimate
        >>> from numpyro_minibatch.accept import metropolis
        >>> round(float(metropolis().probability(Estimate(-1.0))), 3)
        0.368
    """
    return Metropolis()


def penalty(max_variance: float = 1.0, small_sample: bool = True) -> AcceptanceTest:
    """Build the penalty test: Metropolis with a correction for normal noise.

    The move is accepted with probability ``min(1, exp(value - u))``, where ``u`` is
    half the variance of the log ratio. Detailed balance then holds exactly for normal
    noise of known variance, however large. Noise that is not normal is not corrected:
    at variance 1, a skewness of the rows of 1 (2) changes the acceptance probability by
    0.03 (0.06) with 100 rows, in proportion to ``1 / sqrt(m)``. Noise lowers the
    acceptance rate: at a true log ratio of zero it is ``2 * Phi(-s / 2)``, which is
    0.62 at standard deviation ``s = 1`` and 0.32 at 2.

    With an estimated variance, ``u`` is :func:`penalty_correction`. It makes
    ``exp(value - u)`` unbiased, and therefore the balance of moves exact where ``min(1,
    .)`` does not saturate; where it does, a small error remains. The largest error of
    ``log A(delta) - log A(-delta) - delta`` at variance 1 is 1.4e-5 with 100 rows (half
    the variance alone: 2.5e-3), 6e-5 with 50 and 3e-3 with 10; at variance 4 it is
    5e-4, 3e-3 and 0.1.

    :param max_variance: largest variance that counts as reliable. Above it the test
        remains defined, but it depends more on the noise being normal far into its
        tails, and accepts less.
    :param small_sample: whether to account for the variance being an estimate;
        ``False`` subtracts half of it, whatever its degrees of freedom.
    :raises ValueError: if ``max_variance`` is not positive.

    **References:**

    1. Ceperley, D. M. and Dewing, M. (1999). The penalty method for random walks
       with uncertain energies.

    **Example**

    .. doctest::

        >>> import jax
        >>> from numpyro_minibatch import Estimate
        >>> from numpyro_minibatch.accept import penalty
        >>> test, key = penalty(), jax.random.key(0)
        >>> decision = test(key, Estimate(-1.0, variance=0.5, dof=99.0))
        >>> round(float(decision.accept_prob), 3), bool(decision.reliable)
        (0.286, True)
    """
    return Penalty(max_variance, small_sample)


def barker() -> AcceptanceTest:
    """Build Barker's test, for log ratios without noise.

    The move is accepted with probability ``1 / (1 + exp(-value))``. Used on a noisy
    log ratio (which Bardenet et al. suggest tolerating) it flattens the target: for
    small moves, noise of standard deviation 1 acts like a temperature of 1.21. The
    decision is then marked as not reliable; :func:`compensated_barker` avoids this.

    **References:**

    1. Barker, A. A. (1965). Monte Carlo calculations of the radial distribution
       functions for a proton-electron plasma.
    2. Bardenet, R., Doucet, A. and Holmes, C. (2017). On Markov chain Monte Carlo
       methods for tall data.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import Estimate
        >>> from numpyro_minibatch.accept import barker
        >>> round(float(barker().probability(Estimate(-1.0))), 3)
        0.269
    """
    return Barker()


def compensated_barker(
    variance: float = 1.0, table: Literal["nnls", "series"] | Series = "nnls"
) -> AcceptanceTest:
    r"""Build Barker's test with the noise as part of its randomness.

    The reference accepts when ``value + N(0, variance - s2) + X_corr > 0``, where
    ``s2`` is the variance of the estimate and ``X_corr`` completes normal noise of
    the full ``variance`` to a logistic variable. Here ``X_corr`` takes values
    :math:`a_k` with probabilities :math:`p_k`, and the move is accepted with
    probability :math:`\sum_k p_k \Phi((value + a_k) / \sqrt{variance - s2})`. That is
    the reference's decision with both of its draws integrated out: it has the same
    distribution, from one uniform number. At ``s2 = 0`` the probability is logistic in
    ``value``; at ``s2 = variance`` it is a step function, which the noise itself
    smooths.

    No ``X_corr`` is exact. The largest error of the acceptance probability, averaged
    over normal noise, by ``variance`` (the reference's ridge regression: 9e-4 at 1):

    =====================  ======  ======  ======  ======  ======  ======  ======
    table                  0.05    0.2     0.5     1       1.5     2       3
    =====================  ======  ======  ======  ======  ======  ======  ======
    ``nnls``               9.3e-9  5.8e-9  3.3e-9  7.4e-8  3.7e-5  7.6e-4  1.4e-2
    ``series()``           9.6e-7  4.7e-5  4.8e-4  2.2e-3  4.9e-3  8.2e-3  2.7e-2
    ``series(10.0)``       1.2e-3  1.0e-3  1.2e-3  2.7e-3  5.2e-3  8.4e-3  2.7e-2
    =====================  ======  ======  ======  ======  ======  ======  ======

    In float32 rounding adds 1e-7. ``s2`` is assumed known: estimating it from 50 rows
    adds 6e-5 at ``s2 = 0.3`` and 4e-4 at ``s2 = 0.8`` (``variance`` 1). A move of log
    ratio zero is accepted with probability 1/2, where :func:`penalty` accepts 0.62 at
    noise of variance 1.

    :param variance: the largest variance of the log ratio that can be absorbed, from
        0.01 to 3.0; a noisier log ratio is decided by the step function, and marked as
        not reliable.
    :param table: ``"nnls"``, the non-negative least squares fit to the logistic curve
        (47 atoms at variance 1); ``"series"`` or :func:`series`, the expansion of
        Luo et al. on 301 atoms. Built once per process, in less than a second.
    :raises ValueError: if the variance is out of range, the table unknown, or its
        error above 0.03.

    **References:**

    1. Seita, D., Pan, X., Chen, H. and Canny, J. (2017). An efficient minibatch
       acceptance test for Metropolis-Hastings.
    2. Luo, R., Zhang, Q., Yang, Y. and Wang, J. (2020). Replica-exchange Nose-Hoover
       dynamics for Bayesian learning on large datasets.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import Estimate
        >>> from numpyro_minibatch.accept import compensated_barker
        >>> test = compensated_barker(variance=1.0)
        >>> round(float(test.probability(Estimate(-1.0, variance=0.0))), 3)
        0.269
        >>> round(float(test.probability(Estimate(-1.0, variance=0.8))), 3)
        0.225
    """
    chosen = series() if table == "series" else table
    return CompensatedBarker(variance, chosen)


def series(bandwidth: float = math.inf, terms: int = 3) -> Series:
    """Configure the series table of :func:`compensated_barker`.

    :param bandwidth: width ``lambda`` of the low-pass filter ``exp(-w ** 4 / lambda **
        2)`` on the correction's characteristic function. The paper uses 10 at variance
        0.2. Without a filter (infinite, the default) the same three terms are 20 times
        as accurate there, because a filter of 10 reverses the sign of the third.
    :param terms: number of terms, 1 to 8. Below variance 1 more terms are better; the
        best number is six at 1.5 and four at 2.
    :raises ValueError: if either is out of range.
    """
    return Series(bandwidth, terms)
