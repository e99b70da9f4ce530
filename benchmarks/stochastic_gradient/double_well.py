"""The double well of AMAGOLD's paper with gradient noise N(0, 1): error by step size.

    python -m benchmarks.stochastic_gradient.double_well

The noise comes from the rows of a data plate, which have linear terms that sum to zero,
so no kernel is treated specially. The error is the symmetric Kullback-Leibler
divergence over 86 bins of equal probability; with 100,000 independent draws it would be
0.00085 on average.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch import AMAGOLD, SGHMC, Target

from .grid import averages
from .record import machine, save

BINS = 86
SIZE, WIDTH = 103, 7  # rows, and rows of a batch
FRICTION = 0.5  # twice the paper's beta of 0.25
STEP_SIZES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)


def log_density(z: Any) -> Any:
    """Minus the energy."""
    return -((z + 4) * (z + 1) * (z - 1) * (z - 3) / 14 + 0.5)


def quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Points and the distribution function at them."""
    points = np.linspace(-7.0, 7.0, 400_001)
    p = np.exp(log_density(points))
    return points, (np.cumsum(p) - 0.5 * p) / p.sum()


def target() -> Target:
    """Rows whose batches of ``WIDTH`` have gradients with noise of variance 1."""
    slopes = np.random.default_rng(0).normal(size=SIZE)
    slopes -= slopes.mean()
    slopes *= np.sqrt(WIDTH / (1 - WIDTH / SIZE)) / SIZE / slopes.std(ddof=1)
    terms = jnp.asarray(slopes, jnp.float32)

    def log_likelihood(z: Array, indices: Array) -> Array:
        return terms[indices] * z + log_density(z) / SIZE

    return Target(lambda z: jnp.zeros(()), log_likelihood, SIZE)


def methods(num_steps: int) -> dict[str, Callable]:
    """The kernels, each a function of a schedule."""
    shared: dict[str, Any] = {
        "target": target(),
        "batch_size": WIDTH,
        "friction": FRICTION,
        "num_steps": num_steps,
    }
    fixed: dict[str, Any] = {"step_size": 0.1}
    fixed |= {"adapt_step_size": False, "adapt_mass_matrix": False}

    def amagold(resample: bool) -> Callable:
        return lambda dial: AMAGOLD(**shared, **fixed, resample_momentum=resample)

    def sghmc(integrator: Any) -> Callable:
        return lambda dial: SGHMC(**shared, step_size=dial, integrator=integrator)

    return {
        "AMAGOLD, reversible": amagold(True),
        "AMAGOLD, irreversible": amagold(False),
        "SGHMC, baoab": sghmc("baoab"),
        "SGHMC, midpoint": sghmc("midpoint"),
        "SGHMC, euler": sghmc("euler"),
    }


def symmetric_kl(shares: np.ndarray, draws: int) -> float:
    """Divergence between the fractions of draws in the bins and equal fractions."""
    found = (shares * draws + 0.5) / (draws + 0.5 * BINS)
    return float(((found - 1 / BINS) * np.log(found * BINS)).sum())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--step-sizes", type=float, nargs="+", default=STEP_SIZES)
    parser.add_argument("--out", default="double_well")
    options = parser.parse_args(argv)
    points, cdf = quadrature()
    edges = jnp.asarray(np.interp(np.arange(1, BINS) / BINS, cdf, points), jnp.float32)
    uniform = (np.arange(options.chains) + 0.5) / options.chains
    starts = jnp.asarray(np.interp(uniform, cdf, points), jnp.float32)

    def observe(state: Any) -> dict[str, Array]:
        bins = jax.nn.one_hot(jnp.searchsorted(edges, state.z), BINS)
        bins = jnp.where(jnp.isfinite(state.z), bins, 0.0)
        accept = getattr(state, "accept_prob", jnp.ones(()))
        return {"bins": bins, "accept": accept, "diverging": state.diverging * 1.0}

    blocks, burn = 10, 2
    length = max(1, options.draws // (options.chains * blocks))
    runs = []
    for title, make in methods(10).items():
        start = time.perf_counter()
        found = averages(
            make,
            options.step_sizes,
            starts,
            observe,
            blocks=blocks + burn,
            length=length,
        )
        found = {name: x[:, :, burn:].mean(2) for name, x in found.items()}
        for i, step_size in enumerate(options.step_sizes):
            bins, number = found["bins"][i], length * blocks * options.chains
            alone = [
                symmetric_kl(np.delete(bins, c, 0).mean(0), number)
                for c in range(options.chains)
            ]
            spread = np.std(alone) * np.sqrt(options.chains - 1)
            runs.append(
                {
                    "method": title,
                    "step_size": step_size,
                    "symmetric_kl": symmetric_kl(bins.mean(0), number),
                    "standard_error": float(spread),
                    "acceptance": float(found["accept"][i].mean()),
                    "diverging": float(found["diverging"][i].mean()),
                }
            )
        print(title, f"{time.perf_counter() - start:.0f} s", flush=True)
        for run in runs[-len(options.step_sizes) :]:
            print("  ", {k: v for k, v in run.items() if k != "method"}, flush=True)
    settings = {
        "draws": length * blocks * options.chains,
        "chains": options.chains,
        "num_steps": 10,
        "friction": FRICTION,
    }
    save(options.out, {"machine": machine(), "settings": settings, "runs": runs})


if __name__ == "__main__":
    main()
