"""Minibatch MCMC for NumPyro models."""

from numpyro_minibatch import (
    accept,
    batch,
    control_variate,
    cycles,
    diagnostics,
    dynamics,
    ensemble,
    estimate,
    ladder,
    plots,
    preconditioner,
    proposal,
    schedule,
)
from numpyro_minibatch._version import __version__
from numpyro_minibatch.accept import Decision
from numpyro_minibatch.batch import Batch
from numpyro_minibatch.diagnostics import diagnose
from numpyro_minibatch.estimate import Estimate
from numpyro_minibatch.evidence import log_evidence
from numpyro_minibatch.host_rows import HostRows
from numpyro_minibatch.inference_data import to_inference_data
from numpyro_minibatch.kernels import (
    AMAGOLD,
    MINT,
    MINTEE,
    RELD,
    RENHD,
    SGHMC,
    SGLD,
    SGMCMC,
    SGNHT,
    AusterityMH,
    ConfidenceMH,
    Cyclical,
    CyclicalMINT,
    CyclicalSGHMC,
    CyclicalSGLD,
    MHMinibatch,
    MinibatchMH,
    ReplicaExchange,
)
from numpyro_minibatch.sampling import export_run, open_run, sample
from numpyro_minibatch.target import Target

__all__ = [
    "__version__",
    "AMAGOLD",
    "MINT",
    "MINTEE",
    "RELD",
    "RENHD",
    "SGHMC",
    "SGLD",
    "SGMCMC",
    "SGNHT",
    "AusterityMH",
    "Batch",
    "ConfidenceMH",
    "Cyclical",
    "CyclicalMINT",
    "CyclicalSGHMC",
    "CyclicalSGLD",
    "Decision",
    "Estimate",
    "HostRows",
    "MHMinibatch",
    "MinibatchMH",
    "ReplicaExchange",
    "Target",
    "accept",
    "batch",
    "control_variate",
    "cycles",
    "diagnose",
    "diagnostics",
    "dynamics",
    "ensemble",
    "estimate",
    "export_run",
    "ladder",
    "log_evidence",
    "open_run",
    "plots",
    "preconditioner",
    "proposal",
    "sample",
    "schedule",
    "to_inference_data",
]
