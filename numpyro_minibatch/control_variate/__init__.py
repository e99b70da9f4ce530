"""What is known of every row without reading it: Taylor expansions of the likelihood.

A row's log likelihood is a polynomial in the distance from a centre plus a residual.
The polynomials of all rows add up to one polynomial, computed once; only the
residuals are estimated from a batch. That is a change of the target and of nothing
else: its rows become residuals and the sum of the polynomials joins what is known
exactly, so that every estimator, gradient and kernel works on it as it is.
"""

from numpyro_minibatch.control_variate._expand import (
    Coordinates,
    ExactRows,
    Expansion,
    expand,
    gauss_jacobi,
    log_surrogate,
)
from numpyro_minibatch.control_variate._taylor import Form as Form
from numpyro_minibatch.control_variate._taylor import (
    Taylor,
    named,
    taylor1,
    taylor2,
)

__all__ = [
    "Coordinates",
    "ExactRows",
    "Expansion",
    "Taylor",
    "expand",
    "gauss_jacobi",
    "log_surrogate",
    "named",
    "taylor1",
    "taylor2",
]
