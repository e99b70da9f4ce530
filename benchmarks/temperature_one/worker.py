"""One method on one problem, in a separate process; started by the command line.

Writes the draws and the times. It needs only NumPyro and the method's own package, so
that every package can have an environment of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .drive import drive
from .methods import MODULES
from .prepare import load
from .problems import PROBLEMS

PACKAGES = ("jax", "numpyro", "numpyro-minibatch", "blackjax", "jax-sgmc", "sgmcmcjax")


def versions() -> dict[str, str]:
    """The versions of the installed packages."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-draws", type=int, default=400_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--chains", type=int, default=1)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.x64)
    load_before = os.getloadavg()[0]
    problem = PROBLEMS[options.data]
    prepared = load(options.data, options.cache)
    module = importlib.import_module(f".{MODULES[options.method].module}", __package__)
    build = module.METHODS[options.method]
    if hasattr(module, "run"):  # a package with a driver of its own
        run = module.run(build, problem, prepared, options.seconds)
    else:
        args: Any = tuple(jnp.asarray(arg) for arg in prepared.args)
        many = {} if options.chains == 1 else {"chains": options.chains}
        run = drive(
            lambda: build(problem, prepared, **many),
            args,
            options.seconds,
            options.max_draws,
        )
    np.save(options.out.with_suffix(".npy"), run.draws)
    report = {
        "seconds": run.times,
        "chains": options.chains,
        "steps": run.steps,
        "rows": run.rows,
        "accept": run.accept,
        "settings": run.settings,
        "load_average": [load_before, os.getloadavg()[0]],
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "dtype": "float64" if options.x64 else "float32",
        "versions": versions(),
    }
    options.out.with_suffix(".json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
