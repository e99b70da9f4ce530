"""Australian and Heart: error by step size, as in figure 4 of AMAGOLD's paper.

    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.stochastic_gradient.logistic

Bayesian logistic regression with standard normal priors on the standardised columns and
an intercept. The folder named by the variable holds the publisher's files
``australian.dat`` and ``heart.dat``, or both as ``uci_classification.npz``. Errors of
the posterior mean and of the posterior standard deviations are relative to a long NUTS
run in double precision.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import MCMC, NUTS

from numpyro_minibatch import AMAGOLD, SGHMC, batch

from .grid import averages
from .record import load as load_results
from .record import machine, save

BATCHES = {"australian": 32, "heart": 16, "simulated": 16}
STEP_SIZES = (1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.3)


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Standardised columns with an intercept, and labels 0 and 1."""
    if name == "simulated":
        rng = np.random.default_rng(0)
        X = rng.normal(size=(100, 3))
        y = rng.random(100) < 1 / (1 + np.exp(-X[:, 0]))
    else:
        folder = Path(os.environ.get("NUMPYRO_MINIBATCH_DATA", "."))
        packed = sorted(folder.rglob("uci_classification.npz"))
        plain = sorted(folder.rglob(f"{name}.dat"))
        if packed:
            with np.load(packed[0]) as arrays:
                X, y = arrays[f"{name}_X"], arrays[f"{name}_y"]
        elif plain:
            table = np.loadtxt(plain[0])
            X, y = table[:, :-1], table[:, -1]
        else:
            raise SystemExit(
                f"{name}.dat of the UCI repository was not found: set "
                "NUMPYRO_MINIBATCH_DATA to a folder that holds it."
            )
        y = y == y.max()
    X = (X - X.mean(0)) / X.std(0)
    return np.column_stack([np.ones(len(X)), X]), np.asarray(y, float)


def model(X: Array, y: Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def reference(X: np.ndarray, y: np.ndarray, draws: int) -> np.ndarray:
    """Draws of NUTS in double precision, chains x draws x D."""
    enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with enable_x64(True):
        mcmc = MCMC(
            NUTS(model),
            num_warmup=500,
            num_samples=draws,
            num_chains=4,
            chain_method="sequential",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(0), jnp.asarray(X), jnp.asarray(y))
        return np.asarray(mcmc.get_samples(group_by_chain=True)["w"])


def methods(rows: int, friction: float) -> dict[str, Callable]:
    """The kernels, each a function of a schedule."""
    fixed: dict[str, Any] = {
        "step_size": 0.1,
        "adapt_step_size": False,
        "adapt_mass_matrix": False,
        "num_steps": 10,
    }
    keeping: dict[str, Any] = {**fixed, "resample_momentum": False}
    few: dict[str, Any] = {"batch_size": rows}
    every: dict[str, Any] = {"batch": batch.full()}

    def sghmc(integrator: Any) -> Callable:
        return lambda dial: SGHMC(
            model,
            step_size=dial,
            friction=friction,
            integrator=integrator,
            num_steps=10,
            **few,
        )

    return {
        "AMAGOLD": lambda dial: AMAGOLD(model, friction=friction, **keeping, **few),
        "SGHMC, midpoint": sghmc("midpoint"),
        "SGHMC, baoab": sghmc("baoab"),
        "L2MC": lambda dial: AMAGOLD(model, friction=friction, **keeping, **every),
        "HMC": lambda dial: AMAGOLD(model, friction=0.0, **fixed, **every),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=["australian", "heart"])
    parser.add_argument("--draws", type=int, default=20_000, help="of each chain")
    parser.add_argument("--full-draws", type=int, default=5_000, help="of L2MC and HMC")
    parser.add_argument("--reference-draws", type=int, default=10_000)
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--friction", type=float, default=10.0)
    parser.add_argument("--step-sizes", type=float, nargs="+", default=STEP_SIZES)
    parser.add_argument("--resume", action="store_true", help="only missing runs")
    parser.add_argument("--out", default="logistic")
    options = parser.parse_args(argv)
    blocks, burn = 10, 2

    def observe(center: Array, state: Any) -> dict[str, Array]:
        # centred, because a variance is a difference of squares
        w = state.z["w"] - center
        accept = getattr(state, "accept_prob", jnp.ones(()))
        return {"mean": w, "square": jnp.square(w), "accept": accept}

    runs: list[dict[str, Any]] = []
    references: dict[str, Any] = {}
    if options.resume:
        before = load_results(options.out)
        runs, references = before["runs"], before["settings"]["reference"]
    done = {(run["data"], run["method"]) for run in runs}
    for name in options.data:
        X, y = load(name)
        truth = reference(X, y, options.reference_draws)
        flat = truth.reshape(-1, X.shape[1])
        mean, sd = flat.mean(0), flat.std(0)
        between = truth.mean(1).std(0, ddof=1) / 2
        references[name] = {
            "rows": len(y),
            "dim": X.shape[1],
            "mean_sd": float(sd.mean()),
            "mse_of_mean": float(np.square(between).mean()),
        }
        print(name, references[name], flush=True)
        rng = np.random.default_rng(0)
        first = flat[rng.integers(len(flat), size=options.chains)]
        args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
        for title, make in methods(BATCHES[name], options.friction).items():
            if (name, title) in done:
                continue
            full = title in ("L2MC", "HMC")
            draws = options.full_draws if full else options.draws
            length = max(1, draws // blocks)
            start = time.perf_counter()
            found = averages(
                make,
                options.step_sizes,
                {"w": jnp.asarray(first, jnp.float32)},
                partial(observe, jnp.asarray(mean, jnp.float32)),
                blocks=blocks + burn,
                length=length,
                args=args,
            )
            found = {key: x[:, :, burn:].mean(2) for key, x in found.items()}
            of_mean = np.square(found["mean"]).mean(-1)
            # rounding may make it negative if a chain is stuck
            variance = found["square"] - np.square(found["mean"])
            spread = np.sqrt(np.maximum(variance, 0.0))
            of_sd = np.square(spread - sd).mean(-1)
            # pooling all chains reduces the Monte Carlo error of the variance
            pooled = np.sqrt(found["square"].mean(1) - found["mean"].mean(1) ** 2)
            for i, step_size in enumerate(options.step_sizes):
                root = np.sqrt(options.chains)
                runs.append(
                    {
                        "data": name,
                        "method": title,
                        "step_size": step_size,
                        "draws": length * blocks,
                        "acceptance": float(found["accept"][i].mean()),
                        "mse_mean": float(of_mean[i].mean()),
                        "mse_mean_error": float(of_mean[i].std(ddof=1) / root),
                        "mse_sd": float(of_sd[i].mean()),
                        "mse_sd_error": float(of_sd[i].std(ddof=1) / root),
                        "sd_ratio": float((pooled[i] / sd).mean()),
                    }
                )
                print("  ", title, runs[-1], flush=True)
            print(f"  {title}: {time.perf_counter() - start:.0f} s", flush=True)
            settings = {
                "num_steps": 10,
                "friction": options.friction,
                "chains": options.chains,
                "reference": references,
                "batch_sizes": {key: BATCHES[key] for key in references},
            }
            content = {"machine": machine(), "settings": settings, "runs": runs}
            save(options.out, content)


if __name__ == "__main__":
    main()
