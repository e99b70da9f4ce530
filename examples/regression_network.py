"""A regression network, and whether to believe its intervals
==========================================================

A network with one hidden layer and an unknown noise on a standard regression set, by
SGHMC with cycles from minibatches. A network that fits is the easy part: this example
asks whether 80% of the test rows are in the intervals that are said to hold 80%.

The power-plant set of the UCI repository, with ``--full`` the protein set, each with a
published split, is read from the folder that ``NUMPYRO_MINIBATCH_DATA`` names; without
it rows are simulated.
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

parser = argparse.ArgumentParser(
    description="A regression network, and whether to believe its intervals"
)
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
    """Training and test rows, and where they are from."""
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
        print("SIMULATED rows: the UCI sets were not found")
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
# Weights have priors as wide as keeps the signal as large from layer to layer; the
# noise of the response is a parameter like the others.


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
# ``h`` is a learning rate of the mean loss (``scale_by_n``), momentum is multiplied by
# ``(1 - b) / (1 + b)`` in each step. Two chains from their own draws of the prior.

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
# Each draw predicts a normal law for each test row, and all draws their mixture. What
# the mixture says of a row that was observed is a number between 0 and 1, its
# probability integral transform, which is uniform over the rows if intervals are right.

draws = {k: v.reshape(-1, *v.shape[2:]) for k, v in mcmc.get_samples(True).items()}


@jax.jit
def predict(draw):
    hidden_layer = jnp.tanh(X_test @ draw["first"] + draw["shift"])
    return hidden_layer @ draw["last"] + draw["mean"]


means = np.asarray(jax.lax.map(predict, draws))
sds = np.asarray(draws["sd"])[:, None]
truth = np.asarray(y_test)
log_each = norm.logpdf(truth, means, sds)
laws = {
    "all draws": np.arange(len(means)),
    "one draw": np.array([len(means) - 1]),
}
below, score = {}, {}
for title, members in laws.items():
    below[title] = norm.cdf(truth, means[members], sds[members]).mean(0)
    density = np.exp(log_each[members]).mean(0)
    error = np.sqrt(np.mean((means[members].mean(0) - truth) ** 2))
    score[title] = f"RMSE {error:.3f}, log score {np.log(density).mean():+.3f}"
    print(f"{title}: {score[title]}")

# %%
# Calibration
# -----------
# Left, how many of the test rows are in the central interval of each nominal mass; the
# grey band is where a right law would be in 95 of 100 sets of so many rows. Right, the
# predictions.

figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
nominal = np.linspace(0.02, 0.98, 49)
band = 1.96 * np.sqrt(nominal * (1 - nominal) / len(truth))
grey = {"color": "0.85", "label": "95 of 100 sets"}
axes[0].fill_between(nominal, nominal - band, nominal + band, **grey)
colours = {"all draws": "#0072B2", "one draw": "#D55E00"}
for title, values in below.items():
    inside = [(np.abs(values - 0.5) < mass / 2).mean() for mass in nominal]
    style = "--" if title == "one draw" else "-"
    axes[0].plot(nominal, inside, style, color=colours[title], label=title)
axes[0].axline((0, 0), slope=1, color="0.4", lw=1)
axes[0].set(
    xlabel="nominal mass of the interval",
    ylabel="share of the test rows inside",
    title=f"Coverage, {len(truth)} test rows",
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
    xlabel="predicted, with one sd",
    ylabel="observed (standardised)",
    title=f"{name}, all draws\n{score['all draws']}",
)
figure.savefig(args.out / "regression_network.png", dpi=80)

# %%
# **What to look at.** Coverage: a line below the diagonal has intervals that are too
# narrow. In ``diagnose`` the gradient noise, which heats the draws, and the share of
# the variance between cycles. Weights have symmetries, so that their R-hat says little;
# that of ``sd``, below, and of predictions is worth reading. At the small size it is
# far above 1.01: four short cycles of two chains know little of a posterior, however
# well they predict.

print(az.summary(idata, var_names=["sd"]))
