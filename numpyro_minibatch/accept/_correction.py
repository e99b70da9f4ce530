"""The correction table of the compensated Barker test: a Gaussian deconvolution.

If ``X_corr + N(0, variance)`` were logistic, adding ``X_corr`` to a log ratio with
that much Gaussian noise and accepting above zero would be Barker's test. No such
variable exists: its characteristic function would be ``pi w / sinh(pi w) *
exp(variance * w ** 2 / 2)``, which is unbounded. A table is therefore an approximation,
and :class:`CorrectionTable` stores it with its error. Everything here runs once, on the
host, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.polynomial import Polynomial
from numpy.polynomial.hermite import hermval
from scipy.special import expit, ndtr

__all__ = [
    "CorrectionTable",
    "Series",
    "Table",
    "correction_table",
    "refuse_unfit",
    "series_polynomial",
]

# Atoms at 0, +-0.12, ..., +-18. Beyond 18 the logistic has a mass of 1.5e-8, which
# is the floor of every table's error; the spacing suits variances down to 0.01,
# where the atoms are still close together on the scale of the noise.
SPACING = 0.12
NUM_HALF = 151
# The points where the curve is fitted, and those where its error is measured.
FIT_GRID = np.linspace(0.0, 24.0, 201)
ERROR_GRID = np.linspace(0.0, 30.0, 3001)
# The total mass is one more equation of the least squares. At this weight it holds
# to 5e-4 or better, so that the renormalisation that makes it exact costs nothing
# (without the equation it doubles the error at variance 1).
TOTAL_WEIGHT = 10.0
# The expansion in the derivatives of the logistic is asymptotic: at variance 1.5 the
# error is least with six terms and has grown thirtyfold with eight.
MAX_TERMS = 8
# The variances and errors of a usable table. At 3.29, the variance of the logistic,
# nothing is left to correct; below 0.01 the atoms are too far apart for the noise to
# join them, and there is hardly any noise to compensate.
MIN_VARIANCE, MAX_VARIANCE, MAX_ERROR = 0.01, 3.0, 0.03


@dataclass(frozen=True)
class Series:
    """Settings of the series table; see :func:`numpyro_minibatch.accept.series`."""

    bandwidth: float = math.inf
    terms: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.bandwidth, Real) or not self.bandwidth > 0:
            raise ValueError(
                f"series(bandwidth={self.bandwidth!r}): the bandwidth must be a "
                "positive number; write series() for an infinite one (the most "
                "accurate), or bandwidth=10.0 for that of Luo et al."
            )
        integral = isinstance(self.terms, Integral) and not isinstance(self.terms, bool)
        if not integral or not 1 <= self.terms <= MAX_TERMS:
            raise ValueError(
                f"series(terms={self.terms!r}): the number of terms must be an integer "
                f"from 1 to {MAX_TERMS} (the series is asymptotic: more terms "
                "do not help); write terms=3 for the series of Luo et al."
            )


Table: TypeAlias = Literal["nnls"] | Series


class CorrectionTable(NamedTuple):
    """A symmetric discrete variable that approximates ``X_corr``.

    :param atoms: its values, increasing and symmetric about zero.
    :param probabilities: their probabilities, positive, with sum one.
    :param error: the largest distance over ``x`` between the distribution function
        of ``atoms + N(0, variance)`` and the logistic one.
    """

    atoms: np.ndarray
    probabilities: np.ndarray
    error: float


def refuse_unfit(variance: float, table: Table) -> None:
    """Raise, with what to write instead, unless there is a usable table.

    :raises ValueError: if the table is unknown, the variance out of range, or the
        acceptance probability would be wrong by more than 0.03.
    """
    call = f"compensated_barker(variance={variance!r}, table={table!r})"
    if table != "nnls" and not isinstance(table, Series):
        raise ValueError(
            f"{call}: there is no such table; write 'nnls', 'series' or "
            "series(bandwidth=..., terms=...)"
        )
    if not isinstance(variance, Real) or not MIN_VARIANCE <= variance < math.inf:
        raise ValueError(
            f"{call}: the variance must be a number from {MIN_VARIANCE} to "
            f"{MAX_VARIANCE}; write 1.0 (the default), or barker() for log ratios "
            "without noise"
        )
    error = correction_table(float(variance), table).error
    if variance > MAX_VARIANCE or error > MAX_ERROR:
        raise ValueError(
            f"{call}: the acceptance probability would be wrong by up to {error:.1e}; "
            "write variance=1.0, table='nnls' (wrong by 7.4e-08) and keep the noise "
            "below it with larger batches or smaller moves"
        )


@lru_cache(maxsize=64)
def correction_table(variance: float, table: Table) -> CorrectionTable:
    """Build the table for one variance (2 to 60 ms, then remembered).

    :param variance: variance of the Gaussian noise that the table completes.
    :param table: ``"nnls"`` or a :class:`Series`.
    """
    half = SPACING * np.arange(NUM_HALF)
    if isinstance(table, Series):
        weights = _series_weights(half, variance, table)
    else:
        weights = _nnls_weights(half, variance)
    half, weights = half[weights > 0], weights[weights > 0]
    weights = weights / weights.sum()
    error = np.abs(_tail(ERROR_GRID, half, variance) @ weights - expit(-ERROR_GRID))
    # Half of each pair's mass goes to either side; an atom at zero is its own pair.
    atoms = np.concatenate([-half[::-1], half])
    probabilities = np.concatenate([weights[::-1], weights]) / 2
    if half[0] == 0.0:
        middle = len(half)
        atoms = np.delete(atoms, middle)
        probabilities[middle - 1] *= 2
        probabilities = np.delete(probabilities, middle)
    atoms.flags.writeable = probabilities.flags.writeable = False
    return CorrectionTable(atoms, probabilities, float(error.max()))


def series_polynomial(variance: float, bandwidth: float, terms: int) -> np.ndarray:
    """Density of the series, as the coefficients of the powers of the logistic.

    The smoothed ratio of the two characteristic functions, ``exp(variance * w ** 2 /
    2 - w ** 4 / bandwidth ** 2)``, generates Hermite polynomials, and ``w ** (2 n)``
    turns the logistic density ``g'`` into ``(-1) ** n`` times its ``2 n``-th derivative
    (Luo et al., equation 9). With ``g' = g - g ** 2`` each derivative of ``g`` is a
    polynomial in ``g``.

    :param variance: variance of the Gaussian noise.
    :param bandwidth: ``lambda`` in the paper; may be infinite.
    :param terms: number of terms of the series.
    :return: ``2 * terms + 1`` coefficients, that of ``g ** 0`` first.
    """
    slope = Polynomial([0.0, 1.0, -1.0])
    derivative = slope  # of g, of order 2 n + 1
    density = Polynomial([0.0])
    for n in range(terms):
        density = density + _series_coefficient(n, variance, bandwidth) * derivative
        for _ in range(2):
            derivative = derivative.deriv() * slope
    return np.asarray(density.coef)


def _series_coefficient(n: int, variance: float, bandwidth: float) -> float:
    if math.isinf(bandwidth):
        # Only the leading power of the Hermite polynomial remains.
        return (-variance / 2) ** n / math.factorial(n)
    hermite = hermval(bandwidth * variance / 4, [0.0] * n + [1.0])
    return float((-1) ** n * hermite / (bandwidth**n * math.factorial(n)))


def _series_weights(half: np.ndarray, variance: float, table: Series) -> np.ndarray:
    density = Polynomial(series_polynomial(variance, table.bandwidth, table.terms))
    # The density is even; at minus |x| the powers of g are small and do not cancel.
    # It is sampled, not integrated over cells: under Gaussian noise of this width
    # equispaced samples of an analytic density are exact to rounding. Where the
    # series is negative (from variance 2 upwards) it is not a density: cut off.
    weights = np.maximum(density(expit(-half)), 0.0)
    weights[1:] *= 2
    return np.asarray(weights)


def _nnls_weights(half: np.ndarray, variance: float) -> np.ndarray:
    from scipy.optimize import nnls  # here because it takes long to import

    rows = _tail(FIT_GRID, half, variance)
    total = np.full((1, len(half)), TOTAL_WEIGHT)
    right = np.append(expit(-FIT_GRID), TOTAL_WEIGHT)
    # Below variance 0.1 the columns are nearly dependent and the active set settles
    # late: after up to 5000 rounds (40 ms), where SciPy would give up at 453.
    weights, _ = nnls(np.vstack([rows, total]), right, maxiter=20_000)
    return np.asarray(weights)


def _tail(x: np.ndarray, half: np.ndarray, variance: float) -> np.ndarray:
    """``P(N(0, variance) +- half > x)``, the sign a fair coin, as (x, half)."""
    scale = math.sqrt(variance)
    x = x[:, None]
    return np.asarray(ndtr((half - x) / scale) + ndtr((-half - x) / scale)) / 2
