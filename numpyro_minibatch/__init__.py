"""Minibatch MCMC for NumPyro models."""

import importlib
from typing import TYPE_CHECKING

from numpyro_minibatch import (
    accept,
    batch,
    control_variate,
    dynamics,
    estimate,
    ladder,
    preconditioner,
    proposal,
    schedule,
)
from numpyro_minibatch._internal.xla import avoid_wrong_sums as _avoid_wrong_sums
from numpyro_minibatch._version import __version__
from numpyro_minibatch.accept import Decision
from numpyro_minibatch.batch import Batch
from numpyro_minibatch.estimate import Estimate
from numpyro_minibatch.host_rows import HostRows
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
from numpyro_minibatch.target import Target

_avoid_wrong_sums()

# What prepares data and what analyses results is imported at its first use: it needs
# xarray, pandas and scipy.stats, which take longer to import than all of the above.
# Type checkers read the imports below, Python the table.
if TYPE_CHECKING:
    from numpyro_minibatch import (
        cycles,
        datasets,
        diagnostics,
        ensemble,
        evidence,
        inference_data,
        marginal,
        plots,
        recommendation,
        sampling,
    )
    from numpyro_minibatch.diagnostics import diagnose
    from numpyro_minibatch.evidence import log_evidence
    from numpyro_minibatch.inference_data import to_inference_data
    from numpyro_minibatch.marginal import by_group, marginalize, recover_marginals
    from numpyro_minibatch.recommendation import recommend
    from numpyro_minibatch.sampling import export_run, open_run, sample

_LAZY_MODULES = frozenset(
    {
        "cycles",
        "datasets",
        "diagnostics",
        "ensemble",
        "evidence",
        "inference_data",
        "marginal",
        "plots",
        "recommendation",
        "sampling",
    }
)
_LAZY_FUNCTIONS = {
    "by_group": "marginal",
    "diagnose": "diagnostics",
    "export_run": "sampling",
    "log_evidence": "evidence",
    "marginalize": "marginal",
    "open_run": "sampling",
    "recommend": "recommendation",
    "recover_marginals": "marginal",
    "sample": "sampling",
    "to_inference_data": "inference_data",
}

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
    "by_group",
    "control_variate",
    "cycles",
    "datasets",
    "diagnose",
    "diagnostics",
    "dynamics",
    "ensemble",
    "estimate",
    "evidence",
    "export_run",
    "inference_data",
    "ladder",
    "log_evidence",
    "marginal",
    "marginalize",
    "open_run",
    "plots",
    "preconditioner",
    "proposal",
    "recommend",
    "recommendation",
    "recover_marginals",
    "sample",
    "sampling",
    "schedule",
    "to_inference_data",
]

if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> object:
        """Import what is imported at its first use, and remember it."""
        module = _LAZY_FUNCTIONS.get(name, name)
        if module not in _LAZY_MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = importlib.import_module(f"{__name__}.{module}")
        if name != module:
            found = globals()[name] = getattr(found, name)
        return found

    def __dir__() -> list[str]:
        """List what is imported at its first use as well."""
        return sorted({*globals(), *_LAZY_MODULES, *_LAZY_FUNCTIONS})
