"""Bayesian logistic regression on 319,055 rows, from minibatches and with NUTS.

Which of two pines grows here? Covertype has ten measurements of each patch of forest.
MINT and MHMinibatch sample the posterior at a temperature, which is what batches of
some thousand rows can do reliably, and NUTS samples the same law from all the rows.
Run it as it is, with `--small` for a few thousand rows, or copy what you need.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from pathlib import Path

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

from numpyro_minibatch import MINT, MHMinibatch, datasets, diagnose, to_inference_data

warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
import arviz as az  # noqa: E402 (ArviZ 0.23 announces ArviZ 1 when it is imported)

# The tempered posterior is about as wide as the posterior of so many rows. At the best
# step size the variance of a log ratio is near 5.6 * EFFECTIVE_ROWS / batch_size or
# below; both tests can take a variance up to 1.
EFFECTIVE_ROWS = 320
SIZES = {
    "full": {"rows": None, "warmup": 500, "draws": 1200, "steps": 10, "nuts": 400},
    "small": {"rows": 20_000, "warmup": 200, "draws": 200, "steps": 10, "nuts": 100},
}
COLOURS = {"NUTS": "0.75", "MINT": "#0072B2", "MHMinibatch": "#D55E00"}


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
    size = SIZES["small" if args.small else "full"]
    keys = random.split(random.key(args.seed), 4)
    args.out.mkdir(parents=True, exist_ok=True)

    X, y, names = load(size["rows"], args.seed)
    temperature = len(y) / EFFECTIVE_ROWS
    say(f"{len(y)} rows, {X.shape[1]} columns, temperature {temperature:.4g}")
    sample = partial(run, names=names, progress_bar=not args.no_progress)

    settings = dict(temperature=temperature, dense_mass=True, num_steps=size["steps"])
    length = dict(num_chains=4, num_warmup=size["warmup"], num_samples=size["draws"])
    kernels = [
        MINT(model, batch_size=3000, **settings),
        MHMinibatch(model, batch_size=500, **settings),
    ]
    results = {
        type(kernel).__name__: sample(kernel, key, (X, y), **length)
        for kernel, key in zip(kernels, keys[:2], strict=True)
    }

    say("NUTS gets a head start: the mode and the curvature there, by Newton's method")
    data = (X, y, 1 / temperature)
    mode, covariance = laplace(*data)
    nuts = NUTS(
        model,
        inverse_mass_matrix=covariance,
        dense_mass=True,
        adapt_mass_matrix=False,
        target_accept_prob=0.7,
    )
    start = random.multivariate_normal(keys[2], mode, covariance, (2,))
    results["NUTS"] = sample(
        *(nuts, keys[3], data),
        init_params={"intercept": start[:, 0], "slopes": start[:, 1:]},
        extra_fields=("num_steps",),
        num_chains=2,
        num_warmup=40,
        # as many as there is time for
        num_samples=size["nuts"] * 320_000 // max(len(y), 320_000),
    )

    for name, result in results.items():
        result["idata"].to_netcdf(str(args.out / f"{name.lower()}.nc"))
        print(f"\n== {name}\n{az.summary(result['idata']).to_string()}\n")
        print(result["diagnosis"])
    print(f"\n== What it took\n{cost(results, len(y))}")
    print(f"\n== Means and standard deviations, against NUTS\n{compare(results)}\n")
    plot(results, temperature, len(y), args.out / "covertype.png")
    say(f"wrote mint.nc, mhminibatch.nc, nuts.nc and covertype.png to {args.out}/")


def load(rows, seed):
    """Covertype's classes 2 and 3 or, failing that, rows from a stated truth."""
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
        constant_data=False,  # the data need not be in the file once more
    )
    samples = mcmc.get_samples(group_by_chain=True)
    parameters = [samples["intercept"][..., None], samples["slopes"]]
    return {
        "seconds": seconds,
        "samples": np.concatenate(parameters, -1),
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
    """A table of rows read and of seconds, per effective draw."""
    header = f"{'':<12} {'ESS':>6} {'rows a draw':>12} {'rows an eff. draw':>18}"
    lines = [header + f" {'reliable':>9} {'seconds':>8}"]
    for name, result in results.items():
        ess, stats = result["diagnosis"].min_ess_bulk, result["statistics"]
        # a leapfrog step reads all rows, a decision those of its batch
        is_nuts = name == "NUTS"
        rows = num_rows * stats["num_steps"] if is_nuts else stats["num_rows"]
        rows = np.asarray(rows, float)
        reliable = "exact" if is_nuts else f"{stats['reliable'].mean():.1%}"
        lines.append(
            f"{name:<12} {ess:6.0f} {rows.mean():12,.0f} {rows.sum() / ess:18,.0f} "
            f"{reliable:>9} {result['seconds']:8.1f}"
        )
    return "\n".join(
        [
            *lines,
            "ESS: the smallest bulk effective sample size. Rows: without the warmup.",
            "Reliable: decisions whose noise the test can take. Seconds: with warmup",
            "and compilation.",
        ]
    )


def moments(samples):
    """Means and standard deviations, each with its Monte Carlo standard error."""
    mean, sd = samples.mean((0, 1)), samples.std((0, 1))
    mean_error = sd / np.sqrt(effective_sample_size(samples))
    squares = (samples - mean) ** 2
    square_error = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares))
    return mean, sd, mean_error, square_error / (2 * sd)


def compare(results):
    """A table of how far the means and sds are from those of NUTS."""
    mean, sd, mean_error, sd_error = moments(results["NUTS"]["samples"])
    others = [name for name in results if name != "NUTS"]
    names = results["NUTS"]["names"]
    table = [f"{n:<30} {mean[i]:7.3f} {sd[i]:6.3f}" for i, n in enumerate(names)]
    header, largest = f"{'':<30} {'NUTS':>7} {'sd':>6}", []
    for other in others:
        header += f"  {other + ' - NUTS':>19} {'ratio of sds':>13}"
        m, s, m_error, s_error = moments(results[other]["samples"])
        shift, shift_error = (m - mean) / sd, np.hypot(m_error, mean_error) / sd
        ratio_error = s / sd * np.hypot(s_error / s, sd_error / sd)
        largest.append(f"{other} {np.abs(shift / shift_error).max():.1f}")
        for i in range(len(table)):
            table[i] += f"  {shift[i]:+12.2f} ({shift_error[i]:.2f})"
            table[i] += f" {s[i] / sd[i]:6.2f} ({ratio_error[i]:.2f})"
    return "\n".join(
        [
            *(header, *table),
            "Differences of the means are in units of NUTS's sd; in brackets, Monte",
            "Carlo standard errors. The largest of these differences, in standard",
            f"errors: {', '.join(largest)}.",
        ]
    )


def plot(results, temperature, num_rows, path):
    """The marginal posteriors of both kernels over those of NUTS."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    figure, axes = plt.subplots(3, 4, figsize=(11, 7.2), layout="constrained")
    names = results["NUTS"]["names"]
    for i, (axis, parameter) in enumerate(zip(axes.flat, names, strict=False)):
        pooled = {k: r["samples"][..., i].ravel() for k, r in results.items()}
        grid = np.linspace(
            *np.quantile(np.concatenate([*pooled.values()]), [0, 1]), 200
        )
        for name in ("NUTS", "MINT", "MHMinibatch"):
            density = gaussian_kde(pooled[name])(grid)
            if name == "NUTS":
                axis.fill_between(grid, density, color=COLOURS[name], lw=0, label=name)
            else:
                style = "-" if name == "MINT" else "--"
                axis.plot(grid, density, style, color=COLOURS[name], label=name)
        axis.set_title(parameter, fontsize=10)
        axis.set_yticks([])
        axis.set_ylim(0)
        axis.spines[["left", "top", "right"]].set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    axes.flat[-1].legend(handles, labels, loc="center", frameon=False, fontsize=12)
    figure.suptitle(
        f"Logistic regression, {num_rows:,} rows, likelihood at temperature "
        f"{temperature:.4g}: marginal densities"
    )
    figure.supxlabel("change of the log odds per standard deviation of the column")
    figure.savefig(path, dpi=80)


def say(text):
    """A line of progress with the seconds since the start."""
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    BEGIN = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="20,000 rows, few draws")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    main(parser.parse_args())
