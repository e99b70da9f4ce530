"""Gradient steps per second of ours and of blackjax, the same step in one process.

    python -m benchmarks.stochastic_gradient.step_speed

needs one environment with NumPyro and blackjax 1.7. Every method is one compiled
``lax.scan`` with the same number of gradient steps, each on a fresh batch of 100 rows
that is drawn inside, with the data as arguments of the compiled function. Methods take
turns. Reported are medians over the rounds, of the time and of the ratio to blackjax
within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_minibatch import SGHMC, SGLD, SGNHT, batch
from numpyro_minibatch.datasets import simulate_logistic

from .record import machine, save

STEP_SIZE = 1e-4
FRICTION = 10.0
Run = Callable[[], Any]


class Problem(NamedTuple):
    """A model for both packages, and its data."""

    model: Callable
    args: tuple[Array, ...]
    log_prior: Callable
    log_row: Callable
    position: Any


def logistic(num_rows: int, dim: int) -> Problem:
    """Logistic regression with a standard normal prior."""
    X, y, _ = simulate_logistic(0, num_rows=num_rows, dim=dim)
    args = jnp.asarray(X), jnp.asarray(y, jnp.float32)

    def model(X: Array, y: Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("data", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

    def log_prior(w: dict[str, Array]) -> Array:
        return jax.scipy.stats.norm.logpdf(w["w"]).sum()

    def log_row(w: dict[str, Array], row: tuple[Array, Array]) -> Array:
        x, y = row
        logit = x @ w["w"]
        return y * logit - jax.nn.softplus(logit)

    return Problem(model, args, log_prior, log_row, {"w": jnp.zeros(dim)})


def normal(num_rows: int, dim: int) -> Problem:
    """The mean of normal rows."""
    y = 1.0 + jax.random.normal(jax.random.key(0), (num_rows, dim))

    def model(y: Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 10).expand([y.shape[1]]).to_event(1))
        with numpyro.plate("data", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])

    def log_prior(z: dict[str, Array]) -> Array:
        return jax.scipy.stats.norm.logpdf(z["mu"], scale=10.0).sum()

    def log_row(z: dict[str, Array], row: tuple[Array]) -> Array:
        return jax.scipy.stats.norm.logpdf(row[0], z["mu"]).sum()

    return Problem(model, (y,), log_prior, log_row, {"mu": jnp.zeros(dim)})


def ours(name: str, problem: Problem, steps: int, num_steps: int, scheme: Any) -> Run:
    """One of our kernels; draws of ``num_steps`` gradient steps each."""
    settings: dict[str, Any] = {"step_size": STEP_SIZE, "num_steps": num_steps}
    if scheme is not None:
        settings["batch"] = scheme
    if name == "sgld":
        kernel: Any = SGLD(problem.model, **{**settings, "step_size": STEP_SIZE**2})
    elif name == "sghmc":
        kernel = SGHMC(problem.model, friction=FRICTION, integrator="euler", **settings)
    else:
        kernel = SGNHT(
            problem.model,
            friction=FRICTION,
            integrator="euler",
            **settings,
        )
    state = kernel.init(jax.random.key(1), 0, problem.position, model_args=problem.args)

    @partial(jax.jit, static_argnums=2)
    def run(state: Any, args: Any, count: int) -> Any:
        def draw(state: Any, _: None) -> Any:
            state = kernel.sample(state, args, {})
            return state, state.z

        return jax.lax.scan(draw, state, None, length=count)

    return partial(run, state, problem.args, steps // num_steps)


def theirs(name: str, problem: Problem, steps: int, num_steps: int, scheme: Any) -> Run:
    """One of blackjax's, with a fresh batch for each gradient, as its users draw it."""
    import blackjax
    from blackjax.sgmcmc import diffusions

    num_rows = len(problem.args[0])
    gradient = blackjax.sgmcmc.gradients.grad_estimator(
        problem.log_prior, problem.log_row, num_rows
    )

    def rows(key: Array, args: Any) -> Any:
        indices = jax.random.randint(key, (100,), 0, num_rows)
        return jax.tree.map(lambda x: x[indices], args)

    key = jax.random.key(1)
    start: Any = problem.position
    if name == "sgld":
        algorithm = blackjax.sgld(gradient)

        def step(key: Array, state: Any, args: Any) -> Any:
            return algorithm.step(key, state, args, STEP_SIZE**2)

        def position(state: Any) -> Any:
            return state

    elif name == "sghmc":
        # its kernel reads one batch in all of its integration steps and draws a new
        # momentum at each call; for a fresh batch per gradient, its integrator is
        # called with the momentum carried over
        integrate = diffusions.sghmc(alpha=FRICTION)
        start = problem.position, jax.tree.map(jnp.zeros_like, problem.position)

        def step(key: Array, state: Any, args: Any) -> Any:
            force = gradient(state[0], args)
            return integrate(key, *state, force, STEP_SIZE)

        def position(state: Any) -> Any:
            return state[0]

    else:
        thermostat = blackjax.sgnht(gradient, alpha=FRICTION)
        start = thermostat.init(problem.position, key)
        start = start._replace(xi=jnp.asarray(start.xi))

        def step(key: Array, state: Any, args: Any) -> Any:
            return thermostat.step(key, state, args, STEP_SIZE)

        def position(state: Any) -> Any:
            return state.position

    def one(args: Any, carry: Any, _: Any = None) -> Any:
        state, key = carry
        key, row_key, step_key = jax.random.split(key, 3)
        state = step(step_key, state, rows(row_key, args))
        return (state, key), None

    @partial(jax.jit, static_argnums=2)
    def run(state: Any, args: Any, count: int) -> Any:
        def draw(carry: Any, _: None) -> Any:
            if num_steps == 1:
                carry, _ = one(args, carry)
            else:
                carry, _ = jax.lax.scan(partial(one, args), carry, length=num_steps)
            return carry, position(carry[0])

        return jax.lax.scan(draw, state, None, length=count)

    return partial(run, (start, key), problem.args, steps // num_steps)


def paired(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, in turns; the first round compiles and is omitted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(
    problem: Problem, name: str, num_steps: int, steps: int, rounds: int
) -> dict[str, Any]:
    """One sampler: ours with both schemes of drawing rows, and blackjax's."""
    runs = {
        "blackjax": theirs(name, problem, steps, num_steps, None),
        "ours": ours(name, problem, steps, num_steps, None),
        "ours_with_replacement": ours(
            name, problem, steps, num_steps, batch.with_replacement(100)
        ),
    }
    seconds = paired(runs, rounds)
    other = seconds["blackjax"]
    return {
        way: {
            "steps_per_second": steps / statistics.median(mine),
            "speed_over_blackjax": statistics.median(
                b / a for a, b in zip(mine, other, strict=True)
            ),
        }
        for way, mine in seconds.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="*", default=["sgld", "sghmc", "sgnht"])
    parser.add_argument("--out", default="step_speed")
    options = parser.parse_args(argv)
    problems = {
        "logistic regression, D = 20": logistic(options.num_rows, 20),
        "normal mean, D = 2": normal(options.num_rows, 2),
    }
    results = []
    for title, problem in problems.items():
        for name in options.only:
            for num_steps in (1, 10):
                found = measure(problem, name, num_steps, options.steps, options.rounds)
                results.append(
                    {"problem": title, "sampler": name, "num_steps": num_steps}
                    | {"methods": found}
                )
                print(
                    f"{title}  {name}  {num_steps:2d}  ",
                    "  ".join(
                        f"{way} {r['steps_per_second']:8.0f}/s"
                        f" ({r['speed_over_blackjax']:.2f})"
                        for way, r in found.items()
                    ),
                    flush=True,
                )
    save(options.out, {"machine": machine(), "steps": options.steps, "runs": results})


if __name__ == "__main__":
    main()
