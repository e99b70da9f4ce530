"""Robust regression with outliers
===============================

A linear regression whose errors have heavy tails. With a normal likelihood, a few
outliers influence all parameters; with Student's t they hardly influence the posterior.
For a minibatch they are difficult with both: uniform batches usually miss the few rows
that differ from all others.

The power-plant data of the UCI repository are read from the folder named by
``NUMPYRO_MINIBATCH_DATA``. Without it, and with ``--small``, rows are simulated.
"""

import argparse
import os
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy.stats import gaussian_kde

from numpyro_minibatch import MinibatchMH, diagnose, to_inference_data

parser = argparse.ArgumentParser(description="Robust regression with outliers")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="simulated rows, few draws")
sizes.add_argument("--full", action="store_true", help="20,000 draws of each chain")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()
draws = 500 if args.small else 20_000 if args.full else 2000


def load():
    """Standardised covariates and response, and their source."""
    folder = Path(os.environ.get("NUMPYRO_MINIBATCH_DATA", "")) / "uci_regression"
    path = folder / "power-plant" / "data" / "data.txt"
    if path.exists() and not args.small:
        table = np.loadtxt(path)
        X, y = table[:, :-1], table[:, -1]
        name = "power plant, UCI"
    else:
        print("SIMULATED rows: one in fifty is an outlier")
        rng = np.random.default_rng(0)
        X = rng.normal(size=(20_000, 4))
        wrong = rng.random(len(X)) < 0.02
        noise = rng.normal(size=len(X)) * np.where(wrong, 12.0, 0.5) + 4 * wrong
        y = X @ [1.0, -0.5, 0.25, 0.0] + noise
        name = "simulated"
    X = (X - X.mean(0)) / X.std(0)
    y = (y - np.median(y)) / np.subtract(*np.quantile(y, [0.75, 0.25]))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32), name


X, y, name = load()
columns = [f"column {i}" for i in range(X.shape[1])]
print(f"{name}: {len(y):,} rows")

# %%
# Two models
# ----------
# They differ in the distribution of the errors. Its scale is a parameter, and in the
# second model its degrees of freedom as well.


def normal(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand(X.shape[1:]).to_event(1))
    sd = numpyro.sample("sd", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(intercept + X[i] @ slopes, sd), obs=y[i])


def robust(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand(X.shape[1:]).to_event(1))
    sd = numpyro.sample("sd", dist.LogNormal(0, 1))
    df = numpyro.sample("df", dist.LogNormal(1, 1))
    with numpyro.plate("rows", len(y)) as i:
        mean = intercept + X[i] @ slopes
        numpyro.sample("y", dist.StudentT(df, mean, sd), obs=y[i])


results, kernels = {}, {}
for title, model in {"normal": normal, "Student's t": robust}.items():
    kernels[title] = MinibatchMH(model, control_variate="taylor2")
    mcmc = MCMC(
        kernels[title],
        num_warmup=200,
        num_samples=draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, y)
    results[title] = to_inference_data(
        mcmc, dims={"slopes": ["column"]}, coords={"column": columns}
    )
    print(f"\n== {title}\n{diagnose(results[title])}")

# %%
# Rows needed by an accept/reject step
# ------------------------------------
# The pilot scores each row by the variation over the posterior of its residual, the
# difference between its log likelihood and the Taylor polynomial. ``batch_sd`` is the
# noise of an accept/reject step on a batch drawn with these scores, ``uniform_sd`` that
# of a uniform batch of the same size, and ``effective_rows`` the effective number of
# rows that contribute to the variance of the residuals.

for title, kernel in kernels.items():
    found = {k: kernel.pilot[k] for k in ("batch_sd", "uniform_sd", "effective_rows")}
    print(title, {k: float(f"{v:.2g}") for k, v in found.items()})

# %%
# Effect of the outliers
# ----------------------
# Posterior densities of the slopes. On the simulated rows, those of the normal model
# are several times as wide and centred elsewhere.

width = 2.4 * len(columns)
figure, axes = plt.subplots(1, len(columns), figsize=(width, 3.4), layout="constrained")
colours = {"normal": "#D55E00", "Student's t": "#0072B2"}
for axis, column in zip(axes, columns, strict=True):
    for title, idata in results.items():
        values = idata["posterior"]["slopes"].sel(column=column).values.ravel()
        grid = np.linspace(values.min(), values.max(), 200)
        style = "--" if title == "normal" else "-"
        density = gaussian_kde(values)(grid)
        axis.plot(grid, density, style, color=colours[title], label=title)
    axis.set(xlabel=column, yticks=[])
    axis.locator_params("x", nbins=3)
axes[0].set_ylabel("posterior density")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
figure.suptitle(f"Slopes of a regression on {len(y):,} rows ({name})")
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "robust_regression.png", dpi=80)

# %%
# Fit of the tails
# ----------------
# Quantiles of the residuals at the posterior means, against those of the two error
# distributions. For a model that fits, they lie on the diagonal. On the simulated rows
# Student's t fits the middle. The outliers are further out, with more of them above
# than below, and fit neither distribution.

levels = np.linspace(0.005, 0.995, 199)
figure, axis = plt.subplots(figsize=(5, 5), layout="constrained")
for title, idata in results.items():
    mean = {k: v.values.mean((0, 1)) for k, v in idata["posterior"].data_vars.items()}
    left = np.asarray(y) - mean["intercept"] - np.asarray(X) @ mean["slopes"]
    rng = np.random.default_rng(1)
    errors = (
        rng.standard_t(mean["df"], 200_000)
        if "df" in mean
        else rng.normal(size=200_000)
    )
    axis.plot(
        np.quantile(errors * mean["sd"], levels),
        np.quantile(left, levels),
        "x" if title == "normal" else ".",
        ms=5,
        color=colours[title],
        label=title,
    )
axis.axline((0, 0), slope=1, color="0.6", lw=1, label="equal")
axis.set(
    xlabel="quantile of the error distribution",
    ylabel="quantile of the residuals",
    title="Quantiles from 0.5% to 99.5%",
)
axis.legend()
figure.savefig(args.out / "robust_regression_tails.png", dpi=80)

# %%
# **What to look at.** R-hat and effective sample sizes in the summary below, and
# ``df``: if it is small, the normal model has the wrong intervals however well it was
# sampled.

print(az.summary(results["Student's t"]))
