"""A small regression, and the folder of the results."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_minibatch import MINT

RESULTS = Path(__file__).parent / "results"
ROWS, DIM = 10_000, 20

_rng = np.random.default_rng(0)
X = _rng.normal(size=(ROWS, DIM)).astype(np.float32)
Y = (X @ np.ones(DIM) + _rng.normal(size=ROWS)).astype(np.float32)


def model(x: Any, y: Any) -> None:
    """A linear regression."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=100) as i:
        numpyro.sample("obs", dist.Normal(x[i] @ b, 1.0), obs=y[i])


KERNEL = MINT(model, temperature=100.0)


def save(name: str, found: dict[str, Any]) -> None:
    """Write the measurements with a description of the machine.

    :param name: name of the file.
    :param found: the numbers.
    """
    RESULTS.mkdir(exist_ok=True)
    about = {
        "command": "python -m benchmarks.long_runs."
        + name
        + " ".join(["", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "numpyro", "numpy")},
    }
    text = json.dumps({"about": about, **found}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
