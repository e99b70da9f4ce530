"""Numbers and advice: what a run on minibatches was worth, and what to change."""

from numpyro_minibatch.diagnostics._diagnose import (
    Diagnosis,
    Normality,
    diagnose,
    log_ratio_rows,
    normal_error_bound,
    normality,
    ring_occupancy,
)
from numpyro_minibatch.diagnostics._diagnose import (
    effective_sample_size as effective_sample_size,
)
from numpyro_minibatch.diagnostics._diagnose import mean_rates as mean_rates

__all__ = [
    "Diagnosis",
    "Normality",
    "diagnose",
    "log_ratio_rows",
    "normal_error_bound",
    "normality",
    "ring_occupancy",
]
