"""What tests of marginalized models share."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from numpyro_minibatch.inference_data import (
    as_inference_data,
)


def run_at(count: int, **values: Any) -> Any:
    """A run in which every draw has the same values."""
    variables = {}
    for name, value in values.items():
        shape = (2, count // 2, *np.shape(value))
        dims = ["chain", "draw", *(f"{name}_{k}" for k in range(np.ndim(value)))]
        variables[name] = dims, np.broadcast_to(np.asarray(value, "f"), shape)
    return as_inference_data({"posterior": xr.Dataset(variables)}, {"kernel": "test"})


def set_up_error(model: Any, draws: Any, args: tuple) -> dict[str, float]:
    """The error of the quadrature that a kernel's set-up measures at these draws."""
    return model.approximation(args, {})(draws, model)
