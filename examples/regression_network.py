"""Calibration of a regression network
===================================

A network with one hidden layer and unknown noise for a standard regression data set,
sampled by SGHMC with cycles on minibatches. This example checks whether the network's
intervals are calibrated: 80% of the test rows should lie in 80% intervals.

The power-plant data of the UCI repository (with ``--full`` the protein data), each with
a published split, are read from the folder named by ``NUMPYRO_MINIBATCH_DATA``. Without
it, rows are simulated.
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
from scipy.stats import norm

from numpyro_minibatch import CyclicalSGHMC, diagnose, plots, to_inference_data

parser = argparse.ArgumentParser(description="Calibration of a regression network")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="few rows and short cycles")
sizes.add_argument("--full", action="store_true", help="protein, 41,157 rows")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()
hidden = 20 if args.small else 100 if args.full else 50
cycles = 4 if args.small else 8
cycle_length = 2000 if args.small else 50_000 if args.full else 20_000
args.out.mkdir(parents=True, exist_ok=True)


def load():
    """Training and test rows, and their source."""
    folder = Path(os.environ.get("NUMPYRO_MINIBATCH_DATA", "")) / "uci_regression"
    which = "protein-tertiary-structure" if args.full else "power-plant"
    folder = folder / which / "data"
    if folder.exists():
        table = np.loadtxt(folder / "data.txt")
        columns, target = (
            np.loadtxt(folder / f"index_{name}.txt", dtype=int)
            for name in ("features", "target")
        )
        train, test = (
            np.loadtxt(folder / f"index_{name}_0.txt", dtype=int)
            for name in ("train", "test")
        )
        X, y, name = table[:, columns], table[:, target].ravel(), which
    else:
        print("SIMULATED rows: the UCI data were not found")
        rng = np.random.default_rng(0)
        X = rng.uniform(-2, 2, size=(6000, 4))
        y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.normal(size=6000)
        train, test, name = np.arange(5000), np.arange(5000, 6000), "simulated"
    if args.small:
        train = train[:3000]
    center, scale = X[train].mean(0), X[train].std(0)
    X = (X - center) / scale
    y = (y - y[train].mean()) / y[train].std()
    parts = X[train], y[train], X[test], y[test]
    return [jnp.asarray(part, jnp.float32) for part in parts], name


(X, y, X_test, y_test), name = load()
print(f"{name}: {len(y)} training rows, {len(y_test)} test rows")

# %%
# The network as a NumPyro model
# ------------------------------
# The prior widths of the weights keep the size of the signal constant from layer to
# layer. The noise of the response is a parameter too.


def network(x):
    width = x.shape[-1]
    first = numpyro.sample(
        "first", dist.Normal(0, width**-0.5).expand([width, hidden]).to_event(2)
    )
    shift = numpyro.sample("shift", dist.Normal(0, 1).expand([hidden]).to_event(1))
    last = numpyro.sample(
        "last", dist.Normal(0, hidden**-0.5).expand([hidden]).to_event(1)
    )
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    return lambda rows: jnp.tanh(rows @ first + shift) @ last + mean


def model(X, y):
    f = network(X)
    sd = numpyro.sample("sd", dist.LogNormal(-1, 1))
    with numpyro.plate("rows", len(y), subsample_size=200) as i:
        numpyro.sample("y", dist.Normal(f(X[i]), sd), obs=y[i])


# %%
# Cycles of SGHMC
# ---------------
# ``h`` is a learning rate for the mean loss (``scale_by_n``), and momentum is
# multiplied by ``(1 - b) / (1 + b)`` in each step. Two chains start at different draws
# from the prior.

kernel = CyclicalSGHMC(
    model,
    h=0.005,
    b=0.1,
    scale_by_n=True,
    cycle_length=cycle_length,
    samples_per_cycle=10,
    num_steps=cycle_length // 50,
)
mcmc = MCMC(
    kernel,
    num_warmup=0,
    num_samples=cycles * 10,
    num_chains=2,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), X, y)
idata = to_inference_data(mcmc, constant_data=False)
print(diagnose(idata, var_names=["sd"]))

figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
plots.cycles(idata, ax=axis)
figure.savefig(args.out / "regression_network_cycles.png", dpi=80)

# %%
# Predictions
# -----------
# Each draw predicts a normal distribution for each test row, and all draws together
# predict the mixture. The cumulative distribution function of the mixture at the
# observed value is the probability integral transform of the row. It is uniform over
# the rows if intervals are right.

draws = {k: v.reshape(-1, *v.shape[2:]) for k, v in mcmc.get_samples(True).items()}


@jax.jit
def predict(draw):
    hidden_layer = jnp.tanh(X_test @ draw["first"] + draw["shift"])
    return hidden_layer @ draw["last"] + draw["mean"]


means = np.asarray(jax.lax.map(predict, draws))
sds = np.asarray(draws["sd"])[:, None]
truth = np.asarray(y_test)
log_each = norm.logpdf(truth, means, sds)
predictors = {
    "all draws": np.arange(len(means)),
    "one draw": np.array([len(means) - 1]),
}
below, score = {}, {}
for title, members in predictors.items():
    below[title] = norm.cdf(truth, means[members], sds[members]).mean(0)
    density = np.exp(log_each[members]).mean(0)
    error = np.sqrt(np.mean((means[members].mean(0) - truth) ** 2))
    score[title] = f"RMSE {error:.3f}, log score {np.log(density).mean():+.3f}"
    print(f"{title}: {score[title]}")

# %%
# Calibration
# -----------
# The left panel shows the fraction of test rows in the central interval of each nominal
# mass. The grey band contains the curve of a calibrated predictor for 95 of 100 data
# sets of this size. The right panel shows the predictions.

figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
nominal = np.linspace(0.02, 0.98, 49)
band = 1.96 * np.sqrt(nominal * (1 - nominal) / len(truth))
grey = {"color": "0.85", "label": "calibrated, 95%"}
axes[0].fill_between(nominal, nominal - band, nominal + band, **grey)
colours = {"all draws": "#0072B2", "one draw": "#D55E00"}
for title, values in below.items():
    inside = [(np.abs(values - 0.5) < mass / 2).mean() for mass in nominal]
    style = "--" if title == "one draw" else "-"
    axes[0].plot(nominal, inside, style, color=colours[title], label=title)
axes[0].axline((0, 0), slope=1, color="0.4", lw=1)
axes[0].set(
    xlabel="nominal mass of the interval",
    ylabel="fraction of test rows inside",
    title=f"Coverage for {len(truth)} test rows",
)
axes[0].legend()
shown = slice(0, 300)
spread = np.sqrt(means.var(0) + (sds**2).mean())
axes[1].errorbar(
    means.mean(0)[shown],
    truth[shown],
    xerr=spread[shown],
    fmt=".",
    ms=3,
    lw=0.6,
    color="#0072B2",
)
axes[1].axline((0, 0), slope=1, color="0.4", lw=1)
axes[1].set(
    xlabel="predicted (± 1 sd)",
    ylabel="observed (standardised)",
    title=f"{name}, all draws\n{score['all draws']}",
)
figure.savefig(args.out / "regression_network.png", dpi=80)

# %%
# **What to look at.** Coverage: a line below the diagonal means that intervals are too
# narrow. In ``diagnose``: the gradient noise, which raises the temperature of the
# draws, and the fraction of the variance between cycles. Weights have symmetries, so
# their R-hat is not informative; read that of ``sd``, below, and of predictions. At the
# small size it is far above 1.01: four short cycles of two chains do not explore the
# posterior, however well they predict.

print(az.summary(idata, var_names=["sd"]))
