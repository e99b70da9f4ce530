"""Errors of a model's log density, measured at the draws of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from numpyro_minibatch._model.replay import Run
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.inference_data._rounding import are_suspicious, measured_rounding

__all__ = ["errors_of_kernel", "measured_errors", "with_errors"]

_DRAWS = 8


def measured_quadrature(run: Run, samples: Mapping[str, Any]) -> dict[str, Any]:
    """The error of the quadrature at eight draws, if no set-up measured it.

    Kernels without a control variate do not. A quadrature that is wrong in some part of
    the parameters may draw the chains there, where its error shows.

    :param run: the run.
    :param samples: its draws by site, with axes of chains and draws first. One draw of
        each chain, which may be its start, is not measured.
    """
    known = "pilot" in getattr(run.kernel, "facts", {})
    if known or not run.of_package or run.target is None:
        return {}
    model: Any = getattr(run.target.model, "as_written", run.target.model)
    args, kwargs = run.target.args, dict(run.target.kwargs)
    if not hasattr(model, "approximation") or find_rows((args, kwargs)):
        return {}
    shape = np.shape(next(iter(samples.values()), ()))[:2]
    if len(shape) < 2 or shape[1] < 2:
        return {}
    count = shape[0] * shape[1]
    which = np.linspace(0, count - 1, min(_DRAWS, count)).astype(int)
    places = np.unravel_index(which, shape)
    draws = {name: np.asarray(x[places]) for name, x in samples.items()}
    try:
        return model.approximation(args, kwargs)(draws, model)
    except ValueError as refused:
        return {"quadrature_refused": str(refused)}


def measured_errors(run: Run, samples: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of the log density that show at the draws of a run.

    :param run: the run.
    :param samples: its draws by site, with axes of chains and draws first.
    :return: the facts ``quadrature`` and ``rounding``, where they were measured.
    """
    found = {
        "quadrature": measured_quadrature(run, samples),
        "rounding": measured_rounding(run, samples),
    }
    return {name: error for name, error in found.items() if error}


def errors_of_kernel(
    kernel: Any, args: tuple, kwargs: Mapping[str, Any], samples: Mapping[str, Any]
) -> dict[str, Any]:
    """The same, from the kernel of a run; it is replayed only where it may be wrong.

    :param kernel: the kernel.
    :param args: positional arguments of its model.
    :param kwargs: keyword arguments of its model.
    :param samples: its draws by site, with axes of chains and draws first.
    """
    marginalizes = getattr(getattr(kernel, "model", None), "marginalizes", False)
    if not (marginalizes or are_suspicious(samples)):
        return {}
    return measured_errors(Run.of_kernel(kernel, args, kwargs), samples)


def with_errors(attrs: Mapping[str, Any], errors: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a run with errors among its facts.

    :param attrs: the attributes.
    :param errors: what :func:`measured_errors` returned.
    """
    if not errors or "facts" not in attrs:
        return dict(attrs)
    return {**attrs, "facts": json.dumps(json.loads(attrs["facts"]) | dict(errors))}
