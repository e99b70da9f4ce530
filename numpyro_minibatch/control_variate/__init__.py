"""Control variates: Taylor expansions of the log likelihood of every row.

A row's log likelihood is a polynomial in the distance from a centre plus a residual.
The polynomials of all rows sum to one polynomial, which is computed once, and a batch
estimates only the sum of the residuals. Only the target changes: its rows become
residuals, and the sum of the polynomials is part of the terms that are known exactly.
Every estimator, gradient and kernel works on this target without change.
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
