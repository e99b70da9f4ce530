"""Logistic regression on 319,055 rows, compared with NUTS
=======================================================

Bayesian logistic regression on 319,055 rows, with minibatch kernels and with NUTS.

Covertype has ten measurements of each patch of forest; the model predicts which of two
kinds of pine grows there. MinibatchMH with a control variate samples the posterior.
MINT and MHMinibatch have no control variate and sample the posterior at a higher
temperature. For comparison, NUTS samples both of these distributions from all rows. Run
the script without arguments, with ``--small`` for 20,000 rows, as on the page of the
gallery, or with ``--full`` for chains about ten times as long.

What to look at: the densities as lines over the grey area; *unreliable* and *exact
checks* in the output of ``diagnose``; and in the tables at the end the rows read per
effective draw and the differences of means from those of NUTS, in standard errors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

if "--no-progress" in sys.argv:  # tqdm reads this once; the set-up has a bar too
    os.environ["TQDM_DISABLE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.handlers import scale
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_minibatch import (
    MINT,
    MHMinibatch,
    MinibatchMH,
    datasets,
    diagnose,
    to_inference_data,
)

warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
import arviz as az  # noqa: E402 (ArviZ 0.23 announces ArviZ 1 when it is imported)

# The tempered posterior is about as wide as the posterior of this many rows. At the
# best step size the variance of a log ratio is at most about 5.6 * EFFECTIVE_ROWS /
# batch_size; both tests can correct for a variance up to 1.
EFFECTIVE_ROWS = 320
# warmup and draws of each chain
SIZES = {
    "full": {"rows": None, "tempered": (1000, 10_000), "posterior": (500, 20_000)},
    "default": {"rows": None, "tempered": (400, 800), "posterior": (200, 2000)},
    "small": {"rows": 20_000, "tempered": (200, 200), "posterior": (100, 300)},
}
NUTS_DRAWS = {
    "full": {"tempered": 2000, "posterior": 2000},
    "default": {"tempered": 200, "posterior": 150},
    "small": {"tempered": 100, "posterior": 100},
}
STYLES = {
    "MinibatchMH": ("-", "#009E73"),
    "MINT": ("-", "#0072B2"),
    "MHMinibatch": ("--", "#D55E00"),
}


def model(X, y, power=1.0):
    """Logistic regression; the likelihood is raised to `power`."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand(X.shape[1:]).to_event(1))
    with numpyro.plate("rows", len(y)), scale(scale=power):
        x_batch = numpyro.subsample(X, event_dim=1)
        y_batch = numpyro.subsample(y, event_dim=0)
        logits = intercept + x_batch @ slopes
        numpyro.sample("class", dist.Bernoulli(logits=logits), obs=y_batch)


def main(args):
    which = "small" if args.small else "full" if args.full else "default"
    size, nuts_draws = SIZES[which], NUTS_DRAWS[which]
    keys = random.split(random.key(args.seed), 5)
    args.out.mkdir(parents=True, exist_ok=True)

    X, y, names = load(size["rows"], args.seed)
    temperature = len(y) / EFFECTIVE_ROWS
    say(f"{len(y)} rows, {X.shape[1]} columns")
    sample = partial(run, names=names, progress_bar=not args.no_progress)

    def length(name):
        warmup, draws = size[name]
        return dict(num_chains=4, num_warmup=warmup, num_samples=draws)

    say("The posterior, at temperature 1")
    kernel = MinibatchMH(model, control_variate="taylor2")
    posterior = {"MinibatchMH": sample(kernel, keys[0], (X, y), **length("posterior"))}
    noise, even = kernel.pilot["batch_sd"], kernel.pilot["uniform_sd"]
    say(f"noise of a log ratio: {noise:.2g}; with uniformly drawn rows: {even:.2g}")
    carriers = kernel.pilot["effective_rows"]
    say(f"effective number of rows in the residual variance: {carriers:,.0f}")
    posterior["NUTS"] = run_nuts(sample, keys[1], (X, y), nuts_draws["posterior"])

    say(f"The posterior at temperature {temperature:.4g}")
    settings = dict(temperature=temperature, dense_mass=True, num_steps=10)
    kernels = [
        MINT(model, batch_size=3000, **settings),
        MHMinibatch(model, batch_size=500, **settings),
    ]
    tempered = {
        type(kernel).__name__: sample(kernel, key, (X, y), **length("tempered"))
        for kernel, key in zip(kernels, keys[2:4], strict=True)
    }
    data = (X, y, 1 / temperature)
    tempered["NUTS"] = run_nuts(sample, keys[4], data, nuts_draws["tempered"])

    targets = {"temperature 1": posterior, f"temperature {temperature:.4g}": tempered}
    written = []
    for target, results in targets.items():
        for name, result in results.items():
            tail = "_tempered" if name == "NUTS" and results is tempered else ""
            written.append(f"{name.lower()}{tail}.nc")
            result["idata"].to_netcdf(str(args.out / written[-1]))
            table = az.summary(result["idata"]).rename(index=shorten)
            print(f"\n== {name}, {target}\n{table.to_string()}\n")
            print(result["diagnosis"])
    for target, results in targets.items():
        print(f"\n== Cost, {target}\n{cost(results, len(y))}")
    print(FOOTNOTE)
    for target, results in targets.items():
        print(f"\n== Means and standard deviations against NUTS, {target}")
        print(compare(results))
    plot(targets, len(y), args.out / "covertype.png")
    print()
    say(f"wrote {', '.join(written)} and covertype.png to {args.out}/")


def run_nuts(sample, key, data, draws):
    """NUTS started at the mode, with the curvature there, by Newton's method."""
    X, y, *power = data
    mode, covariance = laplace(X, y, *power or [1.0])
    nuts = NUTS(
        model,
        inverse_mass_matrix=covariance,
        dense_mass=True,
        adapt_mass_matrix=False,
        target_accept_prob=0.7,
    )
    key, start_key = random.split(key)
    start = random.multivariate_normal(start_key, mode, covariance, (2,))
    return sample(
        *(nuts, key, data),
        init_params={"intercept": start[:, 0], "slopes": start[:, 1:]},
        extra_fields=("num_steps",),
        num_chains=2,
        num_warmup=40,
        # fewer draws of larger data
        num_samples=draws * 320_000 // max(len(y), 320_000),
    )


def load(rows, seed):
    """Covertype's classes 2 and 3 or, if not available, simulated rows."""
    try:
        X, y = datasets.load_covertype()
        names = [name.replace("_", " ") for name in datasets.COVERTYPE_COLUMNS]
        names = [name.replace("Horizontal Distance", "Distance") for name in names]
        say("Covertype; y is 0 for class 2, lodgepole pine, 1 for class 3, ponderosa")
    except FileNotFoundError as error:
        X, y, truth = datasets.simulate_logistic(seed, rows or 1_000_000)
        names = [f"column {i}" for i in range(X.shape[1])]
        slopes = [round(float(slope), 2) for slope in truth.coefficients]
        say(f"{error}")
        say(f"SIMULATED rows instead: intercept {truth.intercept}, slopes {slopes}")
    return jnp.asarray(X[:rows]), jnp.asarray(y[:rows]), names


def run(kernel, key, data, *, names, init_params=None, extra_fields=(), **driver):
    """Sample, convert for ArviZ, and diagnose."""
    chains, warmup, draws = (
        driver[f"num_{x}"] for x in ("chains", "warmup", "samples")
    )
    say(f"{type(kernel).__name__}: {chains} chains, {warmup} + {draws} draws each")
    begin = time.perf_counter()
    mcmc = MCMC(kernel, chain_method="vectorized", **driver)
    mcmc.run(key, *data, init_params=init_params, extra_fields=extra_fields)
    jax.block_until_ready(mcmc.last_state)
    seconds = time.perf_counter() - begin
    idata = to_inference_data(
        mcmc,
        dims={"slopes": ["column"]},
        coords={"column": names},
        constant_data=False,  # the file need not contain the data
    )
    samples = mcmc.get_samples(group_by_chain=True)
    parameters = [samples["intercept"][..., None], samples["slopes"]]
    return {
        "seconds": seconds,
        "samples": np.concatenate(parameters, -1).astype(np.float64),
        "names": ["intercept", *names],
        "statistics": mcmc.get_extra_fields(),
        "idata": idata,
        "diagnosis": diagnose(idata),
    }


@jax.jit
def newton_step(z, X, y, power):
    """Newton's step for the log density, and its negative Hessian."""

    def potential(z):
        position = {"intercept": z[0], "slopes": z[1:]}
        return -log_density(model, (X, y, power), {}, position)[0]

    hessian = jax.hessian(potential)(z)
    return z - jnp.linalg.solve(hessian, jax.grad(potential)(z)), hessian


def laplace(X, y, power):
    """The mode and the inverse curvature of the tempered posterior."""
    z = jnp.zeros(X.shape[1] + 1)
    for _ in range(8):
        z, hessian = newton_step(z, X, y, power)
    return z, jnp.linalg.inv(hessian)


def cost(results, num_rows):
    """A table of rows read per draw and per effective draw, and of seconds."""
    header = f"{'':<12} {'ESS':>6} {'rows/draw':>12} {'rows/eff. draw':>18}"
    lines = [header + f" {'reliable':>9} {'seconds':>8}"]
    for name, result in results.items():
        ess, stats = result["diagnosis"].min_ess_bulk, result["statistics"]
        # a leapfrog step reads all rows, an accept/reject step those of its batch
        is_nuts = name == "NUTS"
        rows = num_rows * stats["num_steps"] if is_nuts else stats["num_rows"]
        rows = np.asarray(rows, float)
        reliable = "exact" if is_nuts else f"{stats['reliable'].mean():.1%}"
        lines.append(
            f"{name:<12} {ess:6.0f} {rows.mean():12,.0f} {rows.sum() / ess:18,.0f} "
            f"{reliable:>9} {result['seconds']:8.1f}"
        )
    return "\n".join(lines)


FOOTNOTE = """\
ESS: the smallest bulk effective sample size. Rows: without set-up and warmup.
Reliable: accept/reject steps whose noise the test can correct for. Seconds: with
set-up, warmup and compilation."""


def counted(samples):
    """The effective sample size, at most the number of draws.

    Of a hundred draws, estimates above that number are mostly chance: NUTS once had
    thousands of 96 for one column, which made a right mean wrong by 4 standard errors.
    """
    return np.minimum(effective_sample_size(samples), np.prod(samples.shape[:2]))


def moments(samples):
    """Means and standard deviations, each with its Monte Carlo standard error."""
    mean, sd = samples.mean((0, 1)), samples.std((0, 1))
    mean_error = sd / np.sqrt(counted(samples))
    squares = (samples - mean) ** 2
    square_error = squares.std((0, 1)) / np.sqrt(counted(squares))
    return mean, sd, mean_error, square_error / (2 * sd)


def shorten(name):
    """The name of a column, without the site, to keep lines short."""
    return name.removeprefix("slopes[").removesuffix("]")


def compare(results):
    """A table of differences of means and ratios of sds to those of NUTS."""
    mean, sd, mean_error, sd_error = moments(results["NUTS"]["samples"])
    others = [name for name in results if name != "NUTS"]
    names = results["NUTS"]["names"]
    table = [f"{n:<30} {mean[i]:7.3f} {sd[i]:6.3f}" for i, n in enumerate(names)]
    header, largest = f"{'':<30} {'NUTS':>7} {'sd':>6}", []
    for other in others:
        header += f"  {other + ' - NUTS':>18} {'ratio of sds':>12}"
        m, s, m_error, s_error = moments(results[other]["samples"])
        shift, shift_error = (m - mean) / sd, np.hypot(m_error, mean_error) / sd
        ratio_error = s / sd * np.hypot(s_error / s, sd_error / sd)
        largest.append(f"{other} {np.abs(shift / shift_error).max():.1f}")
        for i in range(len(table)):
            table[i] += f"  {shift[i]:+11.2f} ({shift_error[i]:.2f})"
            table[i] += f" {s[i] / sd[i]:5.2f} ({ratio_error[i]:.2f})"
    return "\n".join(
        [
            *(header, *table),
            "Differences of means are in units of NUTS's sd; Monte Carlo standard",
            "errors are in parentheses. The largest differences, in standard",
            f"errors: {', '.join(largest)}.",
        ]
    )


def plot(targets, num_rows, path):
    """The marginal densities of the kernels over those of NUTS, by temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 8.8), layout="constrained")
    panels = figure.subfigures(len(targets), 1, hspace=0.04)
    for panel, (target, results) in zip(panels, targets.items(), strict=True):
        axes = panel.subplots(3, 4).flat
        for i, parameter in enumerate(results["NUTS"]["names"]):
            draw_densities(
                axes[i], {k: r["samples"][..., i].ravel() for k, r in results.items()}
            )
            axes[i].set_title(parameter, fontsize=11)
        handles, labels = axes[0].get_legend_handles_labels()
        for axis in axes[len(results["NUTS"]["names"]) :]:
            axis.axis("off")
        axes[-1].legend(handles, labels, loc="center", frameon=False, fontsize=12)
        panel.suptitle(f"Logistic regression, {num_rows:,} rows, {target}", fontsize=13)
        panel.supxlabel("change of the log odds per standard deviation of the column")
        panel.supylabel("marginal posterior density")
    figure.savefig(path, dpi=110)


def draw_densities(axis, draws):
    """Densities of one parameter: that of NUTS filled, the others as lines."""
    from scipy.stats import gaussian_kde

    grid = np.linspace(*np.quantile(np.concatenate([*draws.values()]), [0, 1]), 200)
    density = gaussian_kde(draws["NUTS"])(grid)
    axis.fill_between(grid, density, color="0.75", lw=0, label="NUTS")
    for name, (style, colour) in STYLES.items():
        if name in draws:
            density = gaussian_kde(draws[name])(grid)
            axis.plot(grid, density, style, color=colour, label=name)
    axis.set_yticks([])
    axis.set_ylim(0)
    axis.locator_params("x", nbins=4)
    axis.spines[["left", "top", "right"]].set_visible(False)


def say(text):
    """A line of progress with the seconds since the start."""
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    BEGIN = time.perf_counter()
    parser = argparse.ArgumentParser(
        description="Logistic regression on 319,055 rows, compared with NUTS"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--small", action="store_true", help="20,000 rows, few draws")
    length.add_argument("--full", action="store_true", help="longer chains")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    main(parser.parse_args())
