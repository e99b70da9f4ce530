"""Attributes of the groups: what was sampled, from which kernel."""

from __future__ import annotations

import datetime
import json
from importlib.metadata import version
from typing import Any

from numpyro_minibatch._model.replay import Run
from numpyro_minibatch._version import __version__
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.inference_data._labels import Labels

__all__ = ["attributes_of", "created"]


def created(run: Run) -> dict[str, Any]:
    """The attributes that ArviZ stores in every group, and versions."""
    library = "numpyro_minibatch" if run.of_package else "numpyro"
    return {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "arviz_version": version("arviz"),
        "numpyro_version": version("numpyro"),
        "jax_version": version("jax"),
        "inference_library": library,
        "inference_library_version": (
            __version__ if run.of_package else version("numpyro")
        ),
    }


def attributes_of(mcmc: Any, run: Run, labels: Labels) -> dict[str, Any]:
    """The attributes of a run, as strings and numbers, which netCDF can store."""
    kernel = run.kernel
    attrs = {
        **created(run),
        "kernel": type(kernel).__name__,
        "thinning": mcmc.thinning,
    }
    on_host = find_rows((mcmc._args, dict(mcmc._kwargs)))
    if on_host:
        modes = {place: rows.mode for place, rows in on_host.items()}
        attrs["host_rows"] = json.dumps(modes)
    if labels.renamed:
        attrs["renamed_sites"] = json.dumps(labels.renamed)
    if not run.of_package:
        return attrs
    settings = dict(getattr(kernel, "settings", {}))
    attrs["settings"] = json.dumps(settings, default=repr)
    # a user's own part may state NumPy numbers
    attrs["facts"] = json.dumps(
        getattr(kernel, "facts", {}),
        default=lambda value: value.item() if hasattr(value, "item") else repr(value),
    )
    attrs["plates"] = json.dumps(kernel.plates)
    attrs["batch_sizes"] = json.dumps(kernel.batch_sizes)
    temperature = getattr(kernel, "temperature", None)
    if temperature is not None:
        attrs["temperature"] = float(temperature)
        attrs["target"] = _target_sentence(
            temperature, settings.get("temper_prior", False)
        )
    return attrs


def _target_sentence(temperature: float, temper_prior: bool) -> str:
    if temperature == 1:
        return "prior * likelihood"
    if temper_prior:
        return f"(prior * likelihood) ** (1 / {temperature:.6g})"
    return f"prior * likelihood ** (1 / {temperature:.6g})"
