"""Bias of SGLD, SGHMC and SGNHT on a conjugate model, and its leading order.

    python -m benchmarks.stochastic_gradient.bias

Rows are normal with a known variance, so the posterior of their mean is normal with
curvature near one, and the gradient of a batch has noise of the same variance ``V``
everywhere. To leading order the noise raises the temperature ``T``: by ``h V / 2`` for
SGLD, by ``h V / (2 friction)`` for SGHMC, and not at all for SGNHT, whose friction
adapts. SGLD's own discretisation error divides the variance by ``1 - h k / 2``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_minibatch import SGHMC, SGLD, SGNHT

from .grid import averages
from .record import load, machine, save

N, DIM = 200, 10
SD, PRIOR_SD = 14.0, 5.0
STEP_SIZES = {
    "SGLD": (0.01, 0.03, 0.1, 0.3),
    "SGHMC": (0.01, 0.03, 0.1, 0.3),
    "SGNHT": (0.01, 0.03, 0.1, 0.3),
}
FRICTIONS = (0.1, 1.0, 10.0)
KEYS = ("sampler", "batch_size", "temperature", "friction")


def data() -> np.ndarray:
    """Rows whose coordinates all have the same variance, exactly, and no correlation.

    The noise of gradients is then the same in all coordinates, and one number describes
    it.
    """
    x = np.random.default_rng(0).normal(size=(N, DIM))
    x -= x.mean(0)
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T
    return (SD * x).astype(np.float32)


def model(y: Array) -> None:
    """Rows with an unknown mean."""
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD).expand([DIM]).to_event(1))
    with numpyro.plate("data", N) as i:
        numpyro.sample("y", dist.Normal(mu, SD).to_event(1), obs=y[i])


def theory(
    name: str, step_size: float, batch: int, friction: float, temperature: float
) -> dict[str, float]:
    """The exact variance, the noise of a gradient, and the leading order.

    Forces are gradients of ``T`` times the log posterior: the curvature of the prior is
    multiplied by ``T``, that of the likelihood is unchanged.
    """
    curvature = N / SD**2 + temperature / PRIOR_SD**2
    noise = N**2 / batch * (1 - batch / N) / SD**2
    warm, shape = temperature, 1.0
    if name == "SGLD":
        warm += 0.5 * step_size * noise
        shape = 1 / (1 - 0.5 * step_size * curvature)
    elif name == "SGHMC":
        warm += 0.5 * step_size * noise / friction
    return {
        "exact": temperature / curvature,
        "gradient_noise": noise,
        "predicted_ratio": warm / temperature * shape,
    }


def makers(batch: int, temperature: float, friction: float) -> dict[str, Callable]:
    """The kernels, each a function of a schedule."""
    shared: dict[str, Any] = {
        "batch_size": batch,
        "temperature": temperature,
        "num_steps": 10,
    }
    return {
        "SGLD": lambda dial: SGLD(model, step_size=dial, **shared),
        "SGHMC": lambda dial: SGHMC(model, step_size=dial, friction=friction, **shared),
        "SGNHT": lambda dial: SGNHT(model, step_size=dial, friction=friction, **shared),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=3000, help="of 10 steps, a chain")
    parser.add_argument("--chains", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--frictions", type=float, nargs="+", default=FRICTIONS)
    parser.add_argument("--resume", action="store_true", help="only missing runs")
    parser.add_argument("--out", default="bias")
    options = parser.parse_args(argv)
    y = jnp.asarray(data())
    blocks, burn = 10, 3
    length = max(1, options.draws // blocks)
    rng = np.random.default_rng(1)

    def observe(state: Any) -> dict[str, Array]:
        z = state.z["mu"]  # the posterior mean is zero, like that of the data
        found = {"square": jnp.square(z).mean(), "mean": z.mean()}
        if hasattr(state.memory, "friction"):
            found["friction"] = state.memory.friction
        return found

    settings = {"chains": options.chains, "num_steps": 10}
    runs: list[dict[str, Any]] = []
    if options.resume:
        runs = load(options.out)["runs"]
    known_runs = {tuple(run[key] for key in KEYS) for run in runs}
    for batch in options.batch_sizes:
        for temperature in options.temperatures:
            for friction in options.frictions:
                for name, make in makers(batch, temperature, friction).items():
                    if name == "SGLD" and friction != options.frictions[0]:
                        continue
                    setting: tuple[Any, ...] = (name, batch, temperature)
                    setting += (None if name == "SGLD" else friction,)
                    if setting in known_runs:
                        continue
                    grid = STEP_SIZES[name]
                    start = theory(name, grid[0], batch, friction, temperature)
                    first = rng.normal(size=(options.chains, DIM))
                    first *= np.sqrt(start["exact"])
                    found = averages(
                        make,
                        grid,
                        {"mu": jnp.asarray(first, jnp.float32)},
                        observe,
                        blocks=blocks + burn,
                        length=length,
                        args=(y,),
                    )
                    square = found["square"][:, :, burn:].mean(2)
                    for i, step_size in enumerate(grid):
                        known = theory(name, step_size, batch, friction, temperature)
                        ratio = square[i] / known["exact"]
                        run = {
                            "sampler": name,
                            "step_size": step_size,
                            "batch_size": batch,
                            "temperature": temperature,
                            "friction": setting[-1],
                            "draws": length * blocks,
                            "measured_ratio": float(ratio.mean()),
                            "standard_error": float(
                                ratio.std(ddof=1) / np.sqrt(len(ratio))
                            ),
                            **known,
                        }
                        runs.append(run)
                        print(
                            f"{name} m={batch} T={temperature} friction={friction} "
                            f"h={step_size}: {run['measured_ratio']:.3f} "
                            f"+- {run['standard_error']:.3f}, leading order "
                            f"{run['predicted_ratio']:.3f}",
                            flush=True,
                        )
                    content = {"machine": machine(), "settings": settings}
                    save(options.out, {**content, "runs": runs})


if __name__ == "__main__":
    main()
