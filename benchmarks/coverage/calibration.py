"""Simulation-based calibration: python -m benchmarks.coverage.calibration [--sets 20]

A parameter is drawn from the prior, data are drawn given it, and a kernel draws from
the posterior. The parameter's rank among these draws is then uniform, for any model,
if the kernel is exact [1]. A model here has twelve independent copies of one small
problem, so that a run gives twelve ranks.

A tempered kernel at temperature ``T`` is calibrated with a likelihood whose power
``1 / T`` is the likelihood of other data, up to a constant: a normal distribution of
``sqrt(T)`` times the standard deviation, a Laplace distribution of ``T`` times the
scale.

1. Sean Talts, Michael Betancourt, Daniel Simpson, Aki Vehtari, Andrew Gelman (2018),
   *Validating Bayesian inference algorithms with simulation-based calibration*,
   arXiv:1804.06788.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy.stats import chisquare

from benchmarks.stochastic_gradient.record import machine
from numpyro_minibatch import AMAGOLD, MINT, MHMinibatch, MinibatchMH

from .record import load, save

COPIES, BINS, TEMPERATURE = 12, 10, 50.0

Data = tuple[np.ndarray, ...]


class Problem(NamedTuple):
    """A model and its simulation.

    :param words: its description.
    :param model: the model of :data:`COPIES` independent copies.
    :param simulate: draws the parameters and, given them, the data.
    :param parameters: those whose ranks are taken, each of shape ``(COPIES,)``.
    """

    words: str
    model: Callable
    simulate: Callable[[np.random.Generator, int], tuple[dict[str, np.ndarray], Data]]
    parameters: tuple[str, ...]


def _copies(distribution: Any) -> Any:
    return distribution.expand([COPIES]).to_event(1)


def _counts(y: Any, shape: float = 2.0) -> None:
    rate = numpyro.sample("rate", _copies(dist.Gamma(shape, 1.0)))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Poisson(8 * rate / len(y)).to_event(1), obs=y[i])


def _simulate_counts(rng: np.random.Generator, size: int) -> Any:
    rate = rng.gamma(2.0, 1.0, COPIES)
    return {"rate": rate}, (rng.poisson(8 * rate / size, (size, COPIES)),)


def _logits(y: Any) -> None:
    b = numpyro.sample("b", _copies(dist.Normal(0, 1)))
    shift = jnp.log(len(y) / 8.0)
    with numpyro.plate("data", len(y)) as i:
        ones = dist.Bernoulli(logits=b - shift).to_event(1)
        numpyro.sample("obs", ones, obs=y[i])


def _simulate_logits(rng: np.random.Generator, size: int) -> Any:
    b = rng.normal(size=COPIES)
    probability = 1 / (1 + np.exp(np.log(size / 8) - b))
    return {"b": b}, (rng.random((size, COPIES)) < probability,)


def _normal(y: Any) -> None:
    mean = numpyro.sample("mean", _copies(dist.Normal(0, 1)))
    sd = numpyro.sample("sd", _copies(dist.Gamma(2.0, 2.0)))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(mean, sd).to_event(1), obs=y[i])


def _simulate_normal(rng: np.random.Generator, size: int) -> Any:
    mean, sd = rng.normal(size=COPIES), rng.gamma(2.0, 0.5, COPIES)
    return {"mean": mean, "sd": sd}, (rng.normal(mean, sd, (size, COPIES)),)


def _mean(y: Any) -> None:
    mean = numpyro.sample("mean", _copies(dist.Normal(0, 1)))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(mean, 1).to_event(1), obs=y[i])


def _simulate_mean(rng: np.random.Generator, size: int) -> Any:
    mean = rng.normal(size=COPIES)
    y = rng.normal(mean, np.sqrt(TEMPERATURE), (size, COPIES))
    return {"mean": mean}, (y,)


def _line(x: Any, y: Any) -> None:
    a = numpyro.sample("a", _copies(dist.Normal(0, 1)))
    b = numpyro.sample("b", _copies(dist.Normal(0, 1)))
    with numpyro.plate("data", len(y)) as i:
        line = dist.Normal(a + b * x[i, None], 1).to_event(1)
        numpyro.sample("obs", line, obs=y[i])


def _simulate_line(rng: np.random.Generator, size: int) -> Any:
    a, b = rng.normal(size=(2, COPIES))
    x = 1 + rng.normal(size=size)
    y = rng.normal(a + b * x[:, None], np.sqrt(TEMPERATURE))
    return {"a": a, "b": b}, (x, y)


def _laplace(y: Any) -> None:
    center = numpyro.sample("center", _copies(dist.Normal(0, 1)))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Laplace(center, 0.5).to_event(1), obs=y[i])


def _simulate_laplace(rng: np.random.Generator, size: int) -> Any:
    center = rng.normal(size=COPIES)
    y = rng.laplace(center, 0.5 * TEMPERATURE, (size, COPIES))
    return {"center": center}, (y,)


PROBLEMS = {
    "counts": Problem(
        "Poisson rates of about 16 events", _counts, _simulate_counts, ("rate",)
    ),
    "logits": Problem("logits of about 8 ones", _logits, _simulate_logits, ("b",)),
    "normal": Problem(
        "normal means and standard deviations",
        _normal,
        _simulate_normal,
        ("mean", "sd"),
    ),
    "mean": Problem("normal means, tempered", _mean, _simulate_mean, ("mean",)),
    "line": Problem("lines, tempered", _line, _simulate_line, ("a", "b")),
    "laplace": Problem(
        "Laplace locations, tempered", _laplace, _simulate_laplace, ("center",)
    ),
}


class Setting(NamedTuple):
    """A kernel, the rows of its data, and the length of its chains."""

    kernel: Callable[[Callable], Any]
    rows: int
    draws: int
    thinning: int = 1


SETTINGS: dict[str, dict[str, Setting]] = {
    "MinibatchMH": {
        name: Setting(
            lambda model: MinibatchMH(model, control_variate="taylor2"), rows, 2000
        )
        for name, rows in {"counts": 8000, "logits": 8000, "normal": 4000}.items()
    },
    "AMAGOLD": {
        name: Setting(AMAGOLD, rows, 1000, 3)
        for name, rows in {"counts": 40, "logits": 40, "normal": 20}.items()
    },
    "MINT": {
        name: Setting(
            lambda model: MINT(model, temperature=TEMPERATURE, batch_size=100),
            2000,
            1000,
            200,
        )
        for name in ("mean", "line", "laplace")
    },
    "MHMinibatch": {
        name: Setting(
            lambda model: MHMinibatch(model, temperature=TEMPERATURE, batch_size=100),
            2000,
            1000,
            200,
        )
        for name in ("mean", "line", "laplace")
    },
}


def ranks(
    problem: Problem, setting: Setting, sets: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """The rank of every parameter as a share of the draws, one of each copy and run.

    :param problem: the problem.
    :param setting: the kernel.
    :param sets: simulated data sets.
    :param seed: of the parameters, the data and the chains.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list] = {name: [] for name in problem.parameters}
    for run in range(sets):
        true, data = problem.simulate(rng, setting.rows)
        mcmc = MCMC(
            setting.kernel(problem.model),
            num_warmup=1000 * setting.thinning // 2,
            num_samples=setting.draws * setting.thinning,
            thinning=setting.thinning,
            progress_bar=False,
        )
        arrays = (jnp.asarray(values, jnp.float32) for values in data)
        mcmc.run(jax.random.key(run), *arrays)
        draws = mcmc.get_samples()
        for name in found:
            found[name].append((np.asarray(draws[name]) < true[name]).mean(0))
    return {name: np.concatenate(values) for name, values in found.items()}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", nargs="+", default=list(SETTINGS))
    chosen = parser.parse_args(arguments)
    for kernel in chosen.kernels:
        for name, setting in SETTINGS[kernel].items():
            found = ranks(PROBLEMS[name], setting, chosen.sets, chosen.seed)
            jax.clear_caches()  # a process cannot hold the programs of all problems
            every = load("calibration")
            every["machine"] = machine()
            results = every.setdefault("kernels", {}).setdefault(kernel, {})
            for parameter, values in found.items():
                counts, _ = np.histogram(values, np.linspace(0, 1, BINS + 1))
                results[f"{name}, {parameter}"] = {
                    "words": PROBLEMS[name].words,
                    "counts": [int(count) for count in counts],
                    "probability": float(chisquare(counts).pvalue),
                }
                print(
                    kernel,
                    name,
                    parameter,
                    counts,
                    chisquare(counts).pvalue,
                    flush=True,
                )
            save("calibration", every)


if __name__ == "__main__":
    main()
