"""Minibatch MCMC for NumPyro models."""

from numpyro_minibatch import (
    accept,
    batch,
    control_variate,
    diagnostics,
    estimate,
    proposal,
)
from numpyro_minibatch._version import __version__
from numpyro_minibatch.accept import Decision
from numpyro_minibatch.batch import Batch
from numpyro_minibatch.diagnostics import diagnose
from numpyro_minibatch.estimate import Estimate
from numpyro_minibatch.inference_data import to_inference_data
from numpyro_minibatch.kernels import (
    MINT,
    AusterityMH,
    ConfidenceMH,
    MHMinibatch,
    MinibatchMH,
)
from numpyro_minibatch.target import Target

__all__ = [
    "__version__",
    "MINT",
    "AusterityMH",
    "Batch",
    "ConfidenceMH",
    "Decision",
    "Estimate",
    "MHMinibatch",
    "MinibatchMH",
    "Target",
    "accept",
    "batch",
    "control_variate",
    "diagnose",
    "diagnostics",
    "estimate",
    "proposal",
    "to_inference_data",
]
