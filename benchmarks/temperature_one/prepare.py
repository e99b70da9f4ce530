"""Data, centre, scales and reference of a problem, shared by all methods.

    python -m benchmarks.temperature_one.prepare --data covertype

Kept in a cache folder, never in the repository.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .problems import PROBLEMS


class Prepared(NamedTuple):
    """A prepared problem.

    :param args: the model's arguments.
    :param center: unconstrained mode, or posterior mean if there is no suitable mode.
    :param root: whitening: draws look like ``center + root @ standard_normal``.
    :param mean: reference means of the reported quantities.
    :param sd: reference standard deviations.
    :param mcse: Monte Carlo standard errors of the means.
    :param info: how the reference was made, with its effective sample size.
    """

    args: tuple[np.ndarray, ...]
    center: np.ndarray
    root: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    mcse: np.ndarray
    info: dict[str, Any]


def default_cache() -> Path:
    """The user's cache folder, or a folder in the home directory."""
    try:
        import platformdirs
    except ImportError:
        return Path.home() / ".cache" / "numpyro_minibatch" / "temperature_one"
    cache = platformdirs.user_cache_dir("numpyro_minibatch", appauthor=False)
    return Path(cache) / "temperature_one"


def load(name: str, cache: Path) -> Prepared:
    """Read the results of :func:`prepare`."""
    folder = cache / name
    args = tuple(np.load(path) for path in sorted(folder.glob("arg_*.npy")))
    with np.load(folder / "prepared.npz") as arrays:
        fields = dict(arrays)
    return Prepared(args, info=json.loads((folder / "info.json").read_text()), **fields)


def prepare(name: str, cache: Path, num_draws: int, seconds: float) -> None:
    """Compute and store everything that the methods of problem ``name`` share."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from . import reference
    from .flat import Flat
    from .laplace import laplace

    start, problem, folder = time.perf_counter(), PROBLEMS[name], cache / name
    args = problem.data()
    flat = Flat(problem.model, args)
    few = tuple(arg[:2] for arg in args)

    def report(z: jax.Array) -> jax.Array:
        return flat.reported(z, problem.report, few)

    if problem.near_normal:
        center, root = laplace(flat, args)
        print(f"mode found after {time.perf_counter() - start:.0f} s", flush=True)
        shared = (flat, args, center, root, report)
        found = reference.importance(*shared, num_draws)
        found = found or reference.hmc(*shared, seconds)
        fn = jax.jit(jax.vmap(report))
        w = np.random.default_rng(2).standard_normal((100_000, flat.size))
        approximation = np.asarray(fn(center + w @ root.T)).mean(0)
        off = float(np.abs((approximation - found.mean) / found.sd).max())
    else:
        source = problem.parent or name
        kept = cache / source / "sites.npz"
        if kept.is_file():
            with np.load(kept) as stored:
                sites = dict(stored)
        else:
            sites = reference.nuts(PROBLEMS[source].model, args)
            kept.parent.mkdir(parents=True, exist_ok=True)
            entries: dict[str, Any] = {**sites}  # savez's own options are not arrays
            np.savez(kept, **entries)
        flatten = {k: v.reshape(-1, *v.shape[2:]) for k, v in sites.items()}
        z = np.asarray(jax.jit(jax.vmap(flat.ravel))(flatten))
        center, root = z.mean(0), np.linalg.cholesky(np.cov(z.T))
        found, off = reference.from_draws(sites, problem.report), None
    folder.mkdir(parents=True, exist_ok=True)
    for i, arg in enumerate(args):
        np.save(folder / f"arg_{i}.npy", arg)
    arrays: dict[str, Any] = {"mean": found.mean, "sd": found.sd, "mcse": found.mcse}
    np.savez(folder / "prepared.npz", center=center, root=root, **arrays)
    info = {
        "how": found.how,
        "ess": found.ess,
        "errors": found.errors(),
        "seconds": time.perf_counter() - start,
        "laplace_bias": off,
    }
    (folder / "info.json").write_text(json.dumps(info))
    print(name, info, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=PROBLEMS, nargs="+", required=True)
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=150.0)
    args = parser.parse_args()
    for name in args.data:
        prepare(name, args.cache, args.draws, args.seconds)


if __name__ == "__main__":
    main()
