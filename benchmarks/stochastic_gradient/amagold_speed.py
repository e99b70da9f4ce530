"""AMAGOLD, ours and that of jax-sgmc: inner steps and effective draws per second.

    python -m benchmarks.stochastic_gradient.amagold_speed --old PYTHON

where PYTHON is the interpreter of an environment made from
``benchmarks/temperature_one/envs/old.txt``, because jax-sgmc does not run on a later
JAX. Each measurement is a separate process; the two take turns. Both run the
irreversible chain with the same step size, friction, batch size and number of steps, as
one compiled ``lax.scan``. For jax-sgmc, only the solver is timed, without its driver,
which compiles anew in every run; the data are on the device and all rows are one batch
in the test.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[2]
NUM_STEPS = 10
#: rows, columns, rows of a batch, step size, friction
PROBLEMS: dict[str, tuple[int, int, int, float, float]] = {
    "small": (1_000, 15, 32, 1e-3, 10.0),
    "tall": (100_000, 20, 1_000, 5e-5, 100.0),
}


def data(num_rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a logistic regression, the same in every environment."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, dim)).astype(np.float32)
    w = np.linspace(-1, 1, dim)
    y = rng.random(num_rows) < 1 / (1 + np.exp(-X @ w))
    return X, y.astype(np.float32)


def start(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The mode, by Newton's method, so that no chain needs a warmup."""
    w = np.zeros(X.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-X @ w))
        hessian = (X * (p * (1 - p))[:, None]).T @ X + np.eye(len(w))
        w += np.linalg.solve(hessian, X.T @ (y - p) - w)
    return w.astype(np.float32)


def ours(name: str) -> tuple[Callable, Any, Any]:
    """Our kernel: a step, its state, and the data."""
    import numpyro
    import numpyro.distributions as dist

    from numpyro_minibatch import AMAGOLD

    num_rows, dim, batch, step_size, friction = PROBLEMS[name]
    X, y = data(num_rows, dim)

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))
        with numpyro.plate("data", num_rows, subsample_size=batch) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

    kernel = AMAGOLD(
        model,
        step_size=step_size,
        friction=friction,
        num_steps=NUM_STEPS,
        resample_momentum=False,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    args = jnp.asarray(X), jnp.asarray(y)
    init = {"w": jnp.asarray(start(X, y))}
    state = kernel.init(jax.random.PRNGKey(0), 0, init, model_args=args)

    def step(state: Any, args: Any) -> Any:
        state = kernel.sample(state, args, {})
        return state, (state.z["w"], state.accept_prob)

    return step, state, args


def jax_sgmc(name: str) -> tuple[Callable, Any, Any]:
    """The same for jax-sgmc."""
    from jax_sgmc import data as data_
    from jax_sgmc import integrator, potential, scheduler, solver
    from jax_sgmc.data.numpy_loader import DeviceNumpyDataLoader

    num_rows, dim, batch, step_size, friction = PROBLEMS[name]
    X, y = data(num_rows, dim)

    def log_row(sample: Any, row: Any) -> Any:
        logit = row["X"] @ sample["w"]
        return row["y"] * logit - jax.nn.softplus(logit)

    def log_prior(sample: Any) -> Any:
        return -0.5 * (sample["w"] ** 2).sum()

    loader = DeviceNumpyDataLoader(X=X, y=y)
    few = data_.random_reference_data(loader, 1, batch)
    every = data_.full_reference_data(loader, 1, num_rows)
    energy = potential.minibatch_potential(log_prior, log_row, strategy="vmap")
    total = potential.full_potential(log_prior, log_row, strategy="vmap")
    leapfrog = integrator.reversible_leapfrog(energy, few, NUM_STEPS, friction / 2)
    init, update, get = solver.amagold(leapfrog, total, every)
    state = init({"w": jnp.asarray(start(X, y))})
    schedule = scheduler.schedule(
        step_size=jnp.float32(step_size),
        temperature=jnp.float32(1.0),
        burn_in=jnp.float32(1.0),
        accept=True,
    )

    def step(state: Any, args: Any) -> Any:
        state, stats = update(state, schedule)
        return state, (get(state)["variables"]["w"], stats["acceptance_ratio"])

    return step, state, ()


def worker(name: str, method: str, draws: int) -> dict[str, Any]:
    """Measure ten runs in a row, after a first one."""
    from numpyro.diagnostics import effective_sample_size

    step, state, args = {"ours": ours, "jax_sgmc": jax_sgmc}[method](name)

    @partial(jax.jit, static_argnums=2)
    def run(state: Any, args: Any, count: int) -> Any:
        return jax.lax.scan(lambda s, _: step(s, args), state, None, length=count)

    compiled = run.lower(state, args, draws).compile()
    state, _ = jax.block_until_ready(compiled(state, args))
    times, parts = [], []
    for _ in range(10):
        begin = time.perf_counter()
        state, part = jax.block_until_ready(compiled(state, args))
        times.append(time.perf_counter() - begin)
        parts.append(part)
    # the fastest part, because other processes may use the machine
    seconds = min(times)
    w, accept = (np.concatenate(x) for x in zip(*parts, strict=True))
    ess = effective_sample_size(np.asarray(w, np.float64)[None]) / len(parts)
    return {
        "steps_per_second": draws * NUM_STEPS / seconds,
        "min_ess_per_second": float(ess.min() / seconds),
        "median_ess_per_second": float(np.median(ess) / seconds),
        "acceptance": float(np.mean(np.asarray(accept))),
        "sd": np.std(np.asarray(w), 0).mean().item(),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", help="interpreter of the environment with jax-sgmc")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--draws", type=int, nargs="+", default=[3_000, 100])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="amagold_speed")
    options = parser.parse_args(argv)
    if options.worker:
        name, method = options.worker
        print(json.dumps(worker(name, method, options.draws[0])))
        return
    from .record import machine, save

    results = {}
    pythons = {"ours": sys.executable, "jax_sgmc": options.old}
    for name, draws in zip(options.problems, options.draws, strict=False):
        found: dict[str, list[Any]] = {m: [] for m, p in pythons.items() if p}
        for _ in range(options.rounds):
            for method in found:
                command = [pythons[method], "-m", f"{__package__}.amagold_speed"]
                command += ["--worker", name, method, "--draws", str(draws)]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                found[method].append(json.loads(done.stdout.splitlines()[-1]))
        results[name] = {
            method: {
                key: statistics.median(run[key] for run in runs)
                for key in runs[0]
                if key != "jax"
            }
            | {"jax": runs[0]["jax"]}
            for method, runs in found.items()
        }
        for key in ("steps_per_second", "min_ess_per_second"):
            if len(found) == 2:
                results[name][f"ratio_of_{key}"] = statistics.median(
                    a[key] / b[key]
                    for a, b in zip(found["ours"], found["jax_sgmc"], strict=True)
                )
        results[name]["draws"] = draws
        print(name, json.dumps(results[name], indent=1), flush=True)
        save(options.out, {"machine": machine(), "problems": results})


if __name__ == "__main__":
    main()
