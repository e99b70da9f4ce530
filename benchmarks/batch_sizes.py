"""Rows read per accept/reject step: the batch-size tables of Seita et al.

The mixture of a million rows at temperature 1e4, and MNIST's ones against its sevens at
temperature 100. Steps have standard deviations of 0.15 and 0.05. The paper prints these
numbers as variances, which does not agree with its batch sizes.

    python benchmarks/batch_sizes.py --out benchmarks/results/batch_sizes.md

With ``--variances`` the printed numbers are used as variances, for MHMinibatch only.
``--epsilons 0.02 0.05`` measures only AusterityMH, with these errors per test.

Daniel Seita, Xinlei Pan, Haoyu Chen, John Canny (2017), An Efficient Minibatch
Acceptance Test for Metropolis-Hastings, tables 1 and 2.
"""

from __future__ import annotations

import argparse
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from batch_size_problems import (
    Position,
    Problem,
    flat,
    logistic,
    mixture,
    mnist,
    normal,
    plus_minus,
    principal,
)
from jax import Array, random
from numpyro.infer import MCMC

from numpyro_minibatch import AusterityMH, ConfidenceMH, MHMinibatch, MinibatchMH
from numpyro_minibatch.accept import average_epsilon, metropolis

ERROR = 0.005  # of one look (conservative), of a decision (non-conservative)
PILOT = "batch_sd", "batch_sd_95", "uniform_sd", "residual_sd", "effective_rows"
PROBLEMS = {"mixture": mixture, "mnist": mnist}


class Run(NamedTuple):
    """The results of one kernel's chains; arrays have shape ``(trials, draws)``."""

    draws: dict[str, np.ndarray]
    num_rows: np.ndarray
    moved: np.ndarray
    seconds: float


def sample(
    problem: Problem, kernel: Any, trials: int, draws: int, start: Position
) -> Run:
    """Chains run one after the other: vectorised chains would wait for each other."""
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=draws,
        num_chains=trials,
        chain_method="sequential",
        progress_bar=False,
    )
    begin = time.perf_counter()
    mcmc.run(random.key(3), *problem.data, init_params=start)
    num_rows = mcmc.get_extra_fields(group_by_chain=True)["num_rows"]
    samples = mcmc.get_samples(group_by_chain=True)
    arrays = {k: np.asarray(v) for k, v in samples.items()}
    # the outcome of the test, not the probability computed from an estimate
    steps = [np.diff(v, axis=1) != 0 for v in arrays.values()]
    moved = np.any([s.reshape(*s.shape[:2], -1).any(-1) for s in steps], 0)
    seconds = time.perf_counter() - begin
    return Run(arrays, np.asarray(num_rows, float), moved, seconds)


def non_conservative(problem: Problem, draws: Position) -> float:
    """The epsilon for which a fraction ERROR of a chain's decisions is wrong."""
    size = problem.data[0].shape[0]

    def move(key: Array, z: Position) -> tuple[Array, Array]:
        keys = dict(zip(z, random.split(key, len(z)), strict=True))
        new = {
            k: v + problem.step * random.normal(keys[k], v.shape) for k, v in z.items()
        }
        change = (problem.rows(new) - problem.rows(z)) * (size / problem.temperature)
        prior = problem.log_prior(new) - problem.log_prior(z)
        return change.mean() + prior, change.std()

    number = len(next(iter(draws.values())))
    moves = jax.lax.map(
        lambda pair: move(*pair), (random.split(random.key(2), number), draws)
    )
    ratios, sds = (np.asarray(v, float) for v in moves)
    return average_epsilon(ERROR, ratios, sds, size=size, batch_size=problem.slice)


def table(problem: Problem, trials: int, draws: int) -> list[str]:
    """The lines of the table of one problem."""
    size = problem.data[0].shape[0]
    walk: dict[str, Any] = {
        "temperature": problem.temperature,
        "step_size": problem.step,
        "adapt_step_size": False,
        "adapt_mass_matrix": False,
    }
    exact = MinibatchMH(
        problem.model, estimate="exact", acceptance=metropolis(), **walk
    )
    few = max(2, trials // 3)
    start = problem.start(trials)
    # the chain on all rows comes first: its moves determine the error of a t-test
    runs = {
        "Metropolis, all rows": sample(
            problem,
            exact,
            few,
            min(draws, problem.full_draws),
            {k: v[:few] for k, v in start.items()},
        )
    }
    spaced = {
        k: jnp.concatenate(v[:, :: max(1, v.shape[1] // 50)])
        for k, v in runs["Metropolis, all rows"].draws.items()
    }
    epsilon = non_conservative(problem, spaced)
    b = problem.slice
    kernels = {
        "MHMinibatch, sequential": MHMinibatch(
            problem.model, sequential=True, batch_size=b, **walk
        ),
        "MHMinibatch, pilot": MHMinibatch(problem.model, batch_size=100, **walk),
        "AusterityMH, non-conservative": AusterityMH(
            problem.model, epsilon=epsilon, batch_size=b, **walk
        ),
        "AusterityMH, conservative": AusterityMH(
            problem.model, epsilon=ERROR, batch_size=b, **walk
        ),
        "ConfidenceMH": ConfidenceMH(
            problem.model,
            bound=problem.bound,
            batch_size=problem.first_batch,
            **walk,
        ),
    }
    for name, kernel in kernels.items():
        number = few if name == "ConfidenceMH" else trials  # it is slow
        begun = {k: v[:number] for k, v in start.items()}
        runs[name] = sample(problem, kernel, number, draws, begun)
        say(f"{name}: {runs[name].seconds:.0f} s")
    columns = ["", "rows per step", "paper", "median", "all rows read"]
    columns += ["accepted", *problem.judged]
    lines = [
        f"## {problem.title}",
        "",
        f"{trials} trials of {draws} draws; {few} with ConfidenceMH and, of "
        f"{min(draws, problem.full_draws)} draws, on all rows. Slices, increments and "
        f"first batches of {b} rows (pilot: 100, ConfidenceMH: {problem.first_batch}); "
        f"epsilon {ERROR:g} (conservative) and {epsilon:.2g} (non-conservative: "
        f"{ERROR:.1%} of the decisions are wrong); delta 0.01, gamma 2, p 2.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for name, run in runs.items():
        cells = [
            name,
            plus_minus(run.num_rows.mean(1), ",.1f"),
            problem.paper.get(name, ""),
            f"{np.median(run.num_rows):,.0f}",
            f"{(run.num_rows >= size).mean():.1%}",
            f"{run.moved.mean():.2f}",
            *problem.judge(run.draws),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def other_settings(
    problem: Problem, variances: bool, epsilons: list[float], trials: int, draws: int
) -> list[str]:
    """Rows read with another step size, or with other errors per test."""
    common = {
        "batch_size": problem.slice,
        "temperature": problem.temperature,
        "adapt_step_size": False,
        "adapt_mass_matrix": False,
    }
    kernels: dict[str, Any] = {}
    if variances:
        kernels[f"MHMinibatch, sequential, steps of *variance* {problem.step:g}"] = (
            MHMinibatch(
                problem.model, sequential=True, step_size=problem.step**0.5, **common
            )
        )
    for epsilon in epsilons:
        kernels[f"AusterityMH, epsilon {epsilon:g}"] = AusterityMH(
            problem.model, epsilon=epsilon, step_size=problem.step, **common
        )
    lines = [f"{problem.title}; {trials} trials of {draws} draws:", ""]
    for name, kernel in kernels.items():
        run = sample(problem, kernel, trials, draws, problem.start(trials))
        rows = plus_minus(run.num_rows.mean(1), ",.1f")
        lines.append(f"- {name}: {rows} rows per step")
    return [*lines, ""]


def temperature_one(data: tuple[Array, ...], quick: bool) -> list[str]:
    """The pilot of a control variate for the logistic regression."""
    x, y = data
    lines = ['## MNIST at temperature 1, `control_variate="taylor2"`', ""]
    cases = [
        ("flat prior", flat(x.shape[1]), x),
        ("prior N(0, 1)", normal(x.shape[1]), x),
        ("the same, 20 principal components", normal(20), principal(x, 20)),
    ]
    for text, prior, covariates in cases[-1:] if quick else cases:
        kernel = MinibatchMH(partial(logistic, prior), control_variate="taylor2")
        mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, progress_bar=False)
        begin = time.perf_counter()
        try:
            mcmc.run(random.key(4), covariates, y)
        except ValueError as error:
            said = f"refused: {error}"
        else:
            fields = mcmc.get_extra_fields()
            beta = np.asarray(mcmc.get_samples()["beta"])
            pilot = {k: f"{kernel.pilot[k]:.2g}" for k in PILOT}
            said = (
                f"accepted, {pilot}. {np.mean(fields['num_rows']):,.1f} rows per "
                f"step, {(np.diff(beta, axis=0) != 0).any(-1).mean():.2f} of the "
                f"moves accepted, {np.mean(fields['reliable']):.1%} reliable, rms z of "
                f"the exact checks {fields['check_rms_z'][-1]:.2f}."
            )
        say(f"{text}: {time.perf_counter() - begin:.0f} s")
        lines += [f"- {text}: {said}"]
    return [*lines, ""]


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=[*PROBLEMS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="2 trials of 200 draws")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--variances", action="store_true", help="of steps; see above")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trials, draws = (2, 200) if args.quick else (args.trials, 3000)
    chosen = f"--data {args.data}" + " --quick" * args.quick
    chosen += " --variances" * args.variances
    if args.epsilons:
        chosen += " --epsilons " + " ".join(f"{e:g}" for e in args.epsilons)
    lines = [
        "# Rows read per accept/reject step",
        "",
        f"`python benchmarks/batch_sizes.py {chosen} --trials {trials}`, "
        f"jax {jax.__version__}, Python {platform.python_version()}, cpu.",
        "",
    ]
    for name, build in PROBLEMS.items():
        if args.data in (name, "all"):
            problem = build()
            say(problem.title)
            if args.variances or args.epsilons:
                others = args.variances, args.epsilons, trials, draws
                lines += other_settings(problem, *others)
                continue
            lines += table(problem, trials, draws)
            if name == "mnist":
                lines += temperature_one(problem.data, args.quick)
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    BEGIN = time.perf_counter()
    main()
