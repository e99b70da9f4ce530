"""The error of a marginalized model's quadrature, at the draws of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numpyro_minibatch._model.replay import Run
from numpyro_minibatch.host_rows import find_rows

__all__ = ["measured_quadrature"]

_DRAWS = 8


def measured_quadrature(run: Run, samples: Mapping[str, Any]) -> dict[str, Any]:
    """The error of the quadrature at eight draws, if no set-up measured it.

    Kernels without a control variate do not. A quadrature that is wrong in some part of
    the parameters may draw the chains there, where its error shows.

    :param run: the run.
    :param samples: its draws by site, with axes of chains and draws first.
    """
    known = "pilot" in getattr(run.kernel, "facts", {})
    if known or not run.of_package or run.target is None:
        return {}
    model: Any = getattr(run.target.model, "as_written", run.target.model)
    args, kwargs = run.target.args, dict(run.target.kwargs)
    if not hasattr(model, "approximation") or find_rows((args, kwargs)):
        return {}
    flat = {n: np.reshape(x, (-1, *np.shape(x)[2:])) for n, x in samples.items()}
    count = min((len(x) for x in flat.values()), default=0)
    if not count:
        return {}
    which = np.linspace(0, count - 1, min(_DRAWS, count)).astype(int)
    draws = {name: x[which] for name, x in flat.items()}
    try:
        return model.approximation(args, kwargs)(draws, model)
    except ValueError as refused:
        return {"quadrature_refused": str(refused)}
