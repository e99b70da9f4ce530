"""AMAGOLD and SGHMC without any setting, beside NUTS, on seven posteriors.

Four vectorised chains of 1,000 + 1,000 draws from the default start. Means and standard
deviations are compared with a long run of NUTS with a dense mass matrix, or on
Covertype with weighted draws, whose own Monte Carlo errors are shown.

    python benchmarks/untuned.py --out benchmarks/results/untuned.md

With ``--only``, the other lines of an existing file are kept.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from importance import importance_sample
from marginal_references import Compared, Moment, moments, weighted_moments
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_uniform
from tables import fill

from numpyro_minibatch import AMAGOLD, SGHMC

Problem = tuple[Callable, tuple, tuple[str, ...]]


def regression(rows: int, scales: Any, rng: Any, correlated: bool = False) -> Any:
    """Columns of some scales, the first one constant."""
    x = rng.normal(size=(rows, len(scales)))
    if correlated:  # each column like the one before
        for j in range(1, len(scales)):
            x[:, j] = 0.7 * x[:, j - 1] + np.sqrt(1 - 0.7**2) * x[:, j]
    return np.column_stack([np.ones(rows), x * np.asarray(scales)])


def linear() -> Problem:
    """Linear regression with columns of scale 0.1, 1 and 10."""
    rng = np.random.default_rng(1)
    x = regression(5_000, [0.1, 1.0, 10.0], rng)
    y = x @ np.array([1.0, 2.0, -0.5, 0.1]) + rng.normal(size=len(x))

    def model(x: Any, y: Any) -> None:
        prior = dist.Normal(0, 10).expand([x.shape[1]]).to_event(1)
        b = numpyro.sample("b", prior)
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(x[i] @ b, sigma), obs=y[i])

    return model, (x, y), ("b", "sigma")


def logistic() -> Problem:
    """Logistic regression with correlated columns of scale 0.1 to 10."""
    rng = np.random.default_rng(2)
    scales = np.logspace(-1, 1, 10)
    x = regression(4_000, scales, rng, correlated=True)
    logits = x @ np.r_[0.3, rng.normal(size=10) / scales / 3]
    y = rng.uniform(size=len(x)) < 1 / (1 + np.exp(-logits))

    def model(x: Any, y: Any) -> None:
        prior = dist.Normal(0, 10).expand([x.shape[1]]).to_event(1)
        b = numpyro.sample("b", prior)
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])

    return model, (x, y.astype(float)), ("b",)


def poisson() -> Problem:
    """Poisson regression with columns of scale 0.1 to 2."""
    rng = np.random.default_rng(3)
    scales = np.geomspace(0.1, 2.0, 5)
    x = regression(3_000, scales, rng)
    y = rng.poisson(np.exp(x @ np.r_[0.5, 0.2 / scales]))

    def model(x: Any, y: Any) -> None:
        prior = dist.Normal(0, 5).expand([x.shape[1]]).to_event(1)
        b = numpyro.sample("b", prior)
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(x[i] @ b)), obs=y[i])

    return model, (x, y), ("b",)


def robust() -> Problem:
    """Student-t regression with unknown degrees of freedom."""
    rng = np.random.default_rng(4)
    x = regression(2_000, np.ones(4), rng)
    y = x @ np.array([0.5, 1.0, -1.0, 0.5, 0.0]) + rng.standard_t(4, size=len(x))

    def model(x: Any, y: Any) -> None:
        prior = dist.Normal(0, 5).expand([x.shape[1]]).to_event(1)
        b = numpyro.sample("b", prior)
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        df = numpyro.sample("df", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.StudentT(df, x[i] @ b, sigma), obs=y[i])

    return model, (x, y), ("b", "sigma", "df")


def counties(centered: bool) -> Problem:
    """919 houses in 85 counties, as in the radon data."""
    rng = np.random.default_rng(5)
    share = np.exp(rng.normal(0, 1.1, 85))
    others = rng.choice(85, 919 - 85, p=share / share.sum())
    county = np.r_[np.arange(85), others]
    floor = (rng.uniform(size=919) < 0.17).astype(float)
    level = rng.normal(1.45, 0.35, 85)[county]
    y = level - 0.66 * floor + 0.75 * rng.normal(size=919)

    def model(county: Any, floor: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        slope = numpyro.sample("slope", dist.Normal(0, 10))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(5))
        with numpyro.plate("counties", 85):
            prior = dist.Normal(mu, tau) if centered else dist.Normal(0, 1)
            effect = numpyro.sample("effect", prior)
        alpha = effect if centered else mu + tau * effect
        with numpyro.plate("rows", len(y)) as i:
            mean = alpha[county[i]] + slope * floor[i]
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])

    data = county.astype(np.int32), floor, y
    return model, data, ("mu", "slope", "tau", "sigma", "effect")


def covertype() -> Problem:
    """Logistic regression of Covertype's classes 2 and 3."""
    from numpyro_minibatch.datasets import load_covertype

    x, y = load_covertype()

    def model(x: Any, y: Any) -> None:
        prior = dist.Normal(0, 10).expand([x.shape[1]]).to_event(1)
        b = numpyro.sample("b", prior)
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])

    return model, (x, y), ("b",)


PROBLEMS: dict[str, tuple[str, Callable[[], Problem]]] = {
    "linear": ("linear regression, columns of scale 0.1, 1 and 10", linear),
    "logistic": ("logistic, correlated columns of scale 0.1 to 10", logistic),
    "poisson": ("Poisson regression, columns of scale 0.1 to 2", poisson),
    "robust": ("Student-t regression, degrees of freedom unknown", robust),
    "counties": ("85 counties, non-centred", partial(counties, False)),
    "centered": ("85 counties, centred", partial(counties, True)),
    "covertype": ("Covertype 2 v 3, logistic", covertype),
}
KERNELS: dict[str, Callable] = {"AMAGOLD": AMAGOLD, "SGHMC": SGHMC, "NUTS": NUTS}


class Run(NamedTuple):
    """One kernel's draws.

    :param draws: of all numbers, shape ``(chains, draws, numbers)``.
    :param steps: gradients of a draw.
    :param seconds: processor seconds, compilation included.
    """

    draws: np.ndarray
    steps: float
    seconds: float


def run(kernel: Any, problem: Problem, seed: int, draws: int = 1_000) -> Run:
    """Four vectorised chains."""
    _, args, names = problem
    begin = time.process_time()
    mcmc = MCMC(
        kernel,
        num_warmup=1_000,
        num_samples=draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = () if isinstance(kernel, SGHMC) else ("num_steps",)
    mcmc.run(jax.random.key(seed), *args, extra_fields=fields)
    found = mcmc.get_samples(group_by_chain=True)
    each = [np.asarray(found[n]).reshape(4, draws, -1) for n in names]
    found = mcmc.get_extra_fields()
    steps = float(np.mean(found.get("num_steps", getattr(kernel, "num_steps", 0))))
    return Run(np.concatenate(each, -1), steps, time.process_time() - begin)


def reference(name: str, problem: Problem, draws: int) -> Moment:
    """The moments of a long run or of weighted draws."""
    model, args, names = problem
    if name == "covertype":
        found = importance_sample(model, args, {}, names, init_to_uniform, 20_000)
        return weighted_moments(found)
    return moments(run(NUTS(model, dense_mass=True), problem, 9, draws).draws)


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """The lines of one problem."""
    about, made = PROBLEMS[name]
    model, args, names = made()
    args = tuple(jnp.asarray(x, jnp.result_type(float)) if x.dtype.kind == "f" else x
                 for x in map(np.asarray, args))  # fmt: skip
    problem = model, tuple(map(jnp.asarray, args)), names
    against = reference(name, problem, options.reference_draws)
    lines = []
    for kernel in options.kernels:
        found = run(KERNELS[kernel](model), problem, options.seed)
        mine = moments(found.draws)
        off = Compared.of(mine, against)
        error = against.mean_error / np.exp(against.log_sd)
        cells = [
            name,
            about,
            f"{len(args[-1]):,}",
            str(len(mine.mean)),
            kernel,
            f"{max(gelman_rubin(found.draws[..., j]) for j in range(len(error))):.3f}",
            f"{mine.ess.min():,.0f}",
            f"{np.abs(off.mean).max():.3f}",
            f"{np.sqrt((off.mean**2).mean()):.3f} "
            f"({np.sqrt((off.mean_error**2).mean()):.3f})",
            f"{error.max():.3f}",
            f"{np.sqrt((off.sd**2).mean()):.1%} "
            f"({np.sqrt((off.sd_error**2).mean()):.1%})",
            f"{found.steps:.1f}",
            f"{found.seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


HEADER = """# AMAGOLD and SGHMC without settings, beside NUTS

`python benchmarks/untuned.py`; jax {jax}, Python {python}. Four vectorised chains of
1,000 + 1,000 draws from the default start; `AMAGOLD(model)`, `SGHMC(model)` and
`NUTS(model)`. SGHMC has the bias of its steps and of noisy gradients; its
gradients read a batch, the others all rows. Means are compared with a long run of NUTS
with a dense mass matrix (four chains), or on
Covertype with 20,000 weighted draws: largest difference over all parameters in
posterior standard deviations, root mean square, and in brackets that of the Monte Carlo
errors of both. The largest error of the reference is beside. Standard deviations are
relative. ESS is the smaller one of values and squares. Processor seconds include
compilation; other jobs shared the machine's two cores.

"""
COLUMNS = (
    *("problem", "posterior", "rows", "parameters", "kernel", "R-hat", "ESS"),
    *("largest error of means", "root mean square", "of the reference"),
    *("sds, root mean square", "gradients a draw", "CPU s"),
)


def main() -> None:
    """Measure the problems and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--reference-draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    header = HEADER.format(jax=jax.__version__, python=platform.python_version())
    measured = partial(measure, options=options)
    fill(options.out, header, COLUMNS, PROBLEMS, options.only, measured)


if __name__ == "__main__":
    main()
