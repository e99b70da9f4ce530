"""Facts about a kernel for results from versions that did not record facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["facts_of_settings"]

_NUMBERS = (
    "max_variance",
    "target_accept_prob",
    "num_steps",
    "pilot",
    "temperatures",
    "rung_batch_sizes",
    "jump_prob",
    "samples_per_cycle",
)


def facts_of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Facts from the printed form of the package's own parts, their only source.

    :param settings: the recorded settings, in which parts are printed.
    """
    facts = {name: settings[name] for name in _NUMBERS if name in settings}
    batch = settings.get("batch", "")
    estimate = settings.get("estimate", "")
    acceptance = settings.get("acceptance", "")
    dynamics = settings.get("dynamics", "")
    if batch:
        facts |= {
            "sizes_itself": batch.startswith(
                ("_Pilot", "_Growing", "_Geometric", "FullBatch")
            ),
            "reads_all_rows": batch.startswith("FullBatch"),
            "with_replacement": batch.startswith("_WithReplacement"),
        }
    if acceptance:
        facts |= {
            "decides": True,
            "highest_accept_prob": 0.5 if "Barker" in acceptance else 1.0,
            "keeps_estimate": estimate.startswith("Augmented"),
            "exact_decisions": estimate.startswith("Exact"),
            # a proposal on a surrogate has no step size; every other one adapts it
            "has_step_size": settings.get("adapt_step_size", True)
            or "pilot" not in settings,
        }
    if dynamics:
        facts |= {
            "gradient_steps": True,
            "is_thermostat": "NoseHoover" in dynamics,
            "has_friction": "SGHMC" in dynamics,
        }
    return facts
