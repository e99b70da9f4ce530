"""MNIST's ones against its sevens: normality of batches, and speed of convergence.

    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.papers.mnist_pair normality
    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.papers.mnist_pair passes
    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.papers.mnist_pair rows

The first two are figure 2, left and right, of Dangna Li, Wing H. Wong (2017),
Mini-batch Tempered MCMC; the third is figure 1, left, of Daniel Seita, Xinlei Pan,
Haoyu Chen, John Canny (2017), An Efficient Minibatch Acceptance Test for
Metropolis-Hastings. All use a logistic regression of 13,007 images under a flat prior,
sampled by random walks from zero, and tested on 2,163 other images.

normality: 5000 batches of 100 images, as in the paper, which does not give its fixed
position. Here three positions are used: a draw of a tempered chain soon after its start
at zero, where all images have one log likelihood; its last draw; and that of a chain at
temperature 1. In addition to the paper's mean of log likelihoods, the mean of their
differences between two positions of the chain is shown, which determines acceptance.

passes: MINT at the paper's temperature, ``N ** (1 - 0.99 tau)``, with batches of 100,
compared with Metropolis on all images at that temperature and at 1. Steps have the mean
lengths that the paper reports, 1.71, 1.50 and 0.05, times ``--longer``. All chains make
the same number of steps, so that their ends can be compared. The mean log likelihood of
the training images shows which distribution a chain reached, which accuracy does not.

rows: all samplers at temperature 100, with steps of standard deviation 0.05, as in
``benchmarks/batch_sizes.py``, which measures the batch sizes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC
from scipy.stats import norm, skew

from numpyro_minibatch import (
    MINT,
    AusterityMH,
    ConfidenceMH,
    MHMinibatch,
    MinibatchMH,
)
from numpyro_minibatch.accept import metropolis
from numpyro_minibatch.diagnostics import log_ratio_rows, normality

from .record import COLOURS, DOCS, RESULTS, load, save

BATCH = 100
ALPHA = 0.99  # lambda / tau
LENGTHS = {"MINT": 1.71, "tempered MCMC": 1.50, "MCMC": 0.05}
REACHED = 0.97  # accuracies on test images whose times are reported
EARLY = 20  # a draw of the tempered chain, not far from zero
ROWS_ERROR = 0.005  # error per test of AusterityMH
FIGURES = {
    "mnist_pair_normality": DOCS / "_static" / "mint_normality.png",
    "mnist_pair_passes": DOCS / "_static" / "mint_passes.png",
    "mnist_pair_rows": DOCS / "_static" / "mhminibatch_accuracy.png",
}


class Images(NamedTuple):
    """The training and the test images; labels are 0 and 1."""

    model: Callable[..., None]
    data: tuple[Array, Array]
    test: tuple[Array, Array]


def images() -> Images:
    """Ones and sevens of MNIST."""
    # imported here, because the module looks for the data set and the examples
    from benchmarks.batch_size_problems import flat, logistic, ones_and_sevens

    data, test = ones_and_sevens()
    return Images(partial(logistic, flat(data[0].shape[1])), data, test)


def walk(step: float, temperature: float) -> dict[str, Any]:
    """A random walk that does not adapt."""
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
    return {"step_size": step, "temperature": temperature, **fixed}


class Drawn(NamedTuple):
    """The draws of chains, ``beta (chains, draws, D)``, and rows read per step."""

    beta: np.ndarray
    num_rows: np.ndarray

    def moved(self) -> float:
        """Fraction of draws that differ from the previous one."""
        return float((np.diff(self.beta, axis=1) != 0).any(-1).mean())


def sample(
    kernel: Any, problem: Images, chains: int, draws: int, side_by_side: bool = False
) -> Drawn:
    """Chains from zero."""
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized" if side_by_side else "sequential",
        progress_bar=False,
    )
    zero = jnp.zeros((chains, problem.data[0].shape[1]))
    mcmc.run(
        random.key(3),
        *problem.data,
        init_params={"beta": zero if chains > 1 else zero[0]},
    )
    rows = mcmc.get_extra_fields(group_by_chain=True)["num_rows"]
    beta = mcmc.get_samples(group_by_chain=True)["beta"]
    return Drawn(np.asarray(beta), np.asarray(rows, float))


@jax.jit
def right(beta: Array, x: Array, y: Array) -> Array:
    """Accuracy at each of many positions."""
    return (((beta @ x.T) > 0) == y).mean(-1)


@jax.jit
def mean_log_likelihood(beta: Array, x: Array, y: Array) -> Array:
    """Mean log likelihood of an image, at each of many positions."""
    logits = beta @ x.T
    return (y * logits - jax.nn.softplus(logits)).mean(-1)


def temperature(size: int) -> float:
    """The paper's, ``N ** (1 - lambda)`` with ``m = N ** tau``."""
    return size ** (1 - ALPHA * math.log(BATCH) / math.log(size))


def learned(run: Drawn, problem: Images, rows: np.ndarray) -> dict[str, Any]:
    """Accuracy and fit along chains, over the rows of data that were read.

    :param run: the chains.
    :param problem: the images.
    :param rows: rows read after each draw, ``(chains, draws)``.
    """
    draws = run.beta.shape[1]
    at = np.unique(np.geomspace(1, draws, 60).astype(int)) - 1
    beta = jnp.asarray(run.beta[:, at])
    accuracy = np.asarray(right(beta, *problem.test), float)
    fit = np.asarray(mean_log_likelihood(beta, *problem.data), float)
    second = jnp.asarray(run.beta[:, draws // 2 :: max(1, draws // 100)])
    settled = np.asarray(right(second, *problem.test), float)
    settled_fit = np.asarray(mean_log_likelihood(second, *problem.data), float)
    soon = [
        float(r[a >= REACHED][0]) if (a >= REACHED).any() else None
        for r, a in zip(rows[:, at], accuracy, strict=True)
    ]
    return {
        "draws": draws,
        "chains": len(rows),
        "moved": run.moved(),
        "rows_a_decision": float(run.num_rows.mean()),
        "rows": rows[:, at].tolist(),
        "accuracy": accuracy.tolist(),
        "log_likelihood": fit.tolist(),
        "rows_until_reached": soon,
        "second_half_accuracy": [float(settled.mean()), _error(settled.mean(1))],
        "second_half_log_likelihood": [
            float(settled_fit.mean()),
            _error(settled_fit.mean(1)),
        ],
    }


def _error(values: np.ndarray) -> float | None:
    """Standard error of a mean over chains."""
    if len(values) < 2:
        return None
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def is_normal(problem: Images, draws: int, num_batches: int) -> list[dict[str, Any]]:
    """Figure 2 left: means of batches compared with the normal distribution."""
    x, y = problem.data
    hot = temperature(len(y))
    side = math.sqrt(x.shape[1])
    runs = []
    exact = {"estimate": "exact", "acceptance": metropolis()}
    for at, length, numbers in (
        (hot, LENGTHS["tempered MCMC"], (min(EARLY, draws), draws)),
        (1.0, LENGTHS["MCMC"], (draws,)),
    ):
        kernel = MinibatchMH(problem.model, **exact, **walk(length / side, at))
        path = sample(kernel, problem, 1, draws).beta[0]
        for number in numbers:
            here = jnp.asarray(path[number - 1])
            move = random.normal(random.key(5), here.shape) * length / side
            logits = x @ here
            ends = {"beta": here}, {"beta": here + move}
            of_rows = {
                "log likelihood": np.asarray(y * logits - jax.nn.softplus(logits)),
                "log ratio": log_ratio_rows(problem.model, *ends, problem.data),
            }
            for what, rows in of_rows.items():
                where = {"temperature": at, "draw": number, "rows": what}
                runs.append({**where, **measured(rows, num_batches)})
                told = {k: v for k, v in runs[-1].items() if k != "quantiles"}
                print(told, flush=True)
    return runs


def measured(rows: np.ndarray, num_batches: int) -> dict[str, Any]:
    """Distance of batch means of these rows from the normal distribution."""
    rows = np.asarray(rows, float)
    square = np.square(rows - rows.mean())
    return {
        "batches": num_batches,
        **normality(rows, BATCH, random.key(7), num_batches)._asdict(),
        "skewness_of_rows": float(skew(rows)),
        "share_of_100_rows": float(np.sort(square)[-100:].sum() / square.sum()),
        "quantiles": np.quantile(
            standardised_means(rows, num_batches), LEVELS
        ).tolist(),
    }


LEVELS = norm.cdf(np.linspace(-3.2, 3.2, 65))


def standardised_means(rows: np.ndarray, num_batches: int) -> np.ndarray:
    """Standardised means of batches drawn without replacement."""
    rng = np.random.default_rng(11)
    size = len(rows)
    means = np.array(
        [
            rows[rng.choice(size, BATCH, replace=False)].mean()
            for _ in range(num_batches)
        ]
    )
    variance = rows.var() / BATCH * (size - BATCH) / (size - 1)
    return (means - rows.mean()) / math.sqrt(variance)


def over_passes(
    problem: Images, chains: int, draws: int, longer: float = 1.0
) -> list[dict[str, Any]]:
    """Figure 2 right: accuracy over passes over the data."""
    x, y = problem.data
    size, side = len(y), math.sqrt(x.shape[1]) / longer
    hot = temperature(size)
    exact = {"estimate": "exact", "acceptance": metropolis()}
    long = walk(LENGTHS["MINT"] / side, hot)
    tempered = walk(LENGTHS["tempered MCMC"] / side, hot)
    untempered = walk(LENGTHS["MCMC"] / side, 1.0)
    cases: dict[str, Any] = {
        "MINT": MINT(problem.model, batch_size=BATCH, penalty=False, **long),
        "MINT with penalty": MINT(problem.model, batch_size=BATCH, **long),
        "tempered MCMC": MinibatchMH(problem.model, **exact, **tempered),
        "MCMC": MinibatchMH(problem.model, **exact, **untempered),
    }
    runs = []
    for name, kernel in cases.items():
        run = sample(kernel, problem, chains, draws, side_by_side=True)
        # the images per step, as the paper counts: a batch, or all
        read = np.arange(1, draws + 1) * float(BATCH if "MINT" in name else size)
        found = learned(run, problem, np.broadcast_to(read, (chains, draws)))
        runs.append({"method": name, "temperature": float(kernel.temperature), **found})
        tell(runs[-1])
    return runs


def over_rows(problem: Images, trials: int, draws: int) -> list[dict[str, Any]]:
    """Seita et al.'s figure 1: accuracy over the rows that were read."""

    def bound(z: dict[str, Array], new: dict[str, Array]) -> Array:
        x, y = problem.data
        old, now = x @ z["beta"], x @ new["beta"]
        change = y * (now - old) - jax.nn.softplus(now) + jax.nn.softplus(old)
        return jnp.abs(change).max()

    common = {**walk(0.05, 100.0), "batch_size": BATCH}
    model = problem.model
    exact = {"estimate": "exact", "acceptance": metropolis()}
    cases: dict[str, tuple[Any, int, int]] = {
        "MHMinibatch": (MHMinibatch(model, sequential=True, **common), trials, draws),
        "MHMinibatch, pilot": (MHMinibatch(model, **common), trials, draws),
        "AusterityMH": (
            AusterityMH(model, epsilon=ROWS_ERROR, **common),
            trials,
            draws,
        ),
        "ConfidenceMH": (
            ConfidenceMH(model, bound=bound, **common),
            max(2, trials // 3),
            max(2, draws // 6),
        ),
        "Metropolis, all rows": (
            MinibatchMH(model, **exact, **walk(0.05, 100.0)),
            trials,
            draws,
        ),
    }
    runs = []
    for name, (kernel, chains, number) in cases.items():
        together = name.startswith("Metropolis")
        run = sample(kernel, problem, chains, number, side_by_side=together)
        found = learned(run, problem, np.cumsum(run.num_rows, 1))
        runs.append({"method": name, "temperature": 100.0, **found})
        tell(runs[-1])
    return runs


def tell(run: dict[str, Any]) -> None:
    known = ("method", "rows_a_decision", "moved", "rows_until_reached")
    known += ("second_half_accuracy", "second_half_log_likelihood")
    print({name: run[name] for name in known}, flush=True)


def draw_normality(content: dict[str, Any], path: Path) -> None:
    """Quantiles of batch means against those of the normal distribution."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 2, figsize=(8.4, 4), sharey=True, layout="constrained"
    )
    normal = norm.ppf(LEVELS)
    for axis, what in zip(axes, ("log likelihood", "log ratio"), strict=True):
        axis.plot(normal, normal, color="0.5", ls=":", label="normal")
        runs = [run for run in content["runs"] if run["rows"] == what]
        for run, colour, marker in zip(runs, COLOURS, "os^", strict=False):
            axis.plot(
                normal,
                run["quantiles"],
                marker,
                ms=3.5,
                color=colour,
                label=f"T = {run['temperature']:.0f}, draw {run['draw']}",
            )
        axis.set(title=f"mean {what} of {BATCH} images", xlabel="normal quantile")
    axes[0].set_ylabel("quantile of the standardised mean")
    axes[0].legend(fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(
    axis: Any, runs: list[dict[str, Any]], key: str, unit: float, sign: int = 1
) -> None:
    lines = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
    for run, colour, line in zip(runs, COLOURS, lines, strict=False):
        rows, values = np.array(run["rows"]) / unit, sign * np.array(run[key])
        # chains read different numbers of rows: use the last value before each number
        at = np.geomspace(rows[:, 0].max(), rows[:, -1].min(), 80)
        pairs = zip(rows, values, strict=True)
        seen = np.array(
            [v[np.searchsorted(r, at * (1 + 1e-9), "right") - 1] for r, v in pairs]
        )
        mean, spread = seen.mean(0), seen.std(0, ddof=1) if len(seen) > 1 else 0.0
        axis.plot(at, mean, color=colour, ls=line, lw=1.6, label=run["method"])
        axis.fill_between(
            at, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0
        )


def draw_passes(content: dict[str, Any], path: Path) -> None:
    """Accuracy, and the mean log likelihood, over passes."""
    from matplotlib import pyplot

    figure, (left, right_) = pyplot.subplots(
        1, 2, figsize=(9.4, 4), layout="constrained"
    )
    size = content["settings"]["rows"]
    for axis, key, sign in ((left, "accuracy", 1), (right_, "log_likelihood", -1)):
        _curves(axis, content["runs"], key, size, sign)
        axis.set(xscale="log", xlabel="passes over the training images")
    left.set(ylabel="test accuracy", ylim=(0.4, 1.0))
    right_.set_yscale("log")
    ticks = 0.02, 0.05, 0.1, 0.2, 0.5
    right_.set_yticks(ticks, [str(tick) for tick in ticks])
    right_.minorticks_off()
    right_.set_ylabel("negative log likelihood\nper training image (nats)")
    left.legend(fontsize=9, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_rows(content: dict[str, Any], path: Path) -> None:
    """Accuracy over the rows read."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    _curves(axis, content["runs"], "accuracy", 1.0)
    axis.set(xscale="log", xlabel="training images read, with repetitions")
    axis.set(ylabel="test accuracy", ylim=(0.4, 1.0))
    axis.legend(fontsize=9, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


DRAWN = {"normality": draw_normality, "passes": draw_passes, "rows": draw_rows}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=list(DRAWN))
    parser.add_argument("--draws", type=int, help="per chain; passes 13000, else 3000")
    parser.add_argument("--batches", type=int, default=5000, help="of normality")
    parser.add_argument(
        "--longer", type=float, default=1.0, help="factor of the step lengths of passes"
    )
    parser.add_argument("--name", help="name of the results, to keep others")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--report", action="store_true", help="the figure only")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    draws = options.draws or (13_000 if options.figure == "passes" else 3000)
    name = options.name or f"mnist_pair_{options.figure}"
    if not options.report:
        problem = images()
        settings = {"rows": len(problem.data[1]), "test": len(problem.test[1])}
        settings |= {"batch": BATCH, "draws": draws}
        if options.figure == "normality":
            runs = is_normal(problem, draws, options.batches)
        elif options.figure == "passes":
            settings["longer"] = options.longer
            sizes = options.trials, draws, options.longer
            runs = over_passes(problem, *sizes)
        else:
            runs = over_rows(problem, options.trials, draws)
        save(name, {"settings": settings, "runs": runs}, options.folder)
    if name in FIGURES:
        path = FIGURES[name]
        path = path if options.folder == RESULTS else options.folder / path.name
        DRAWN[options.figure](load(name, options.folder), path)


if __name__ == "__main__":
    main()
