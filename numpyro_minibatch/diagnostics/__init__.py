"""Diagnostics of a run on minibatches: numbers, and advice on what to change."""

from numpyro_minibatch.diagnostics._diagnose import diagnose
from numpyro_minibatch.diagnostics._effective import (
    effective_sample_size as effective_sample_size,
)
from numpyro_minibatch.diagnostics._effective import precision
from numpyro_minibatch.diagnostics._ladder import mean_rates as mean_rates
from numpyro_minibatch.diagnostics._normality import (
    Normality,
    log_ratio_rows,
    normal_error_bound,
    normality,
)
from numpyro_minibatch.diagnostics._report import Diagnosis
from numpyro_minibatch.diagnostics._report import advice_table as advice_table
from numpyro_minibatch.diagnostics._rings import ring_occupancy

__all__ = [
    "Diagnosis",
    "Normality",
    "diagnose",
    "log_ratio_rows",
    "normal_error_bound",
    "normality",
    "precision",
    "ring_occupancy",
]
