"""Rows read per accept/reject step
================================

Five acceptance tests on one problem, with the same proposals: one that reads all rows,
one whose batches grow with the noise, two that stop reading once they are certain
enough, and one with a fixed batch. This is table 1 of Seita et al., for a mixture of
two normals with tied means.

Daniel Seita, Xinlei Pan, Haoyu Chen, John Canny (2017), An Efficient Minibatch
Acceptance Test for Metropolis-Hastings, section 6.1.
"""

import argparse
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_minibatch import (
    MINT,
    AusterityMH,
    MHMinibatch,
    MinibatchMH,
    accept,
    diagnose,
    plots,
    to_inference_data,
)

parser = argparse.ArgumentParser(description="Rows read per accept/reject step")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="50,000 rows")
sizes.add_argument("--full", action="store_true", help="the paper's draws and trials")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

rows = 50_000 if args.small else 1_000_000
effective_rows = 100  # rows over temperature, as in the paper
temperature = rows / effective_rows
draws = 1500 if args.small else 3000
chains = 10 if args.full else 2
args.out.mkdir(parents=True, exist_ok=True)


def model(x):
    theta1 = numpyro.sample("theta1", dist.Normal(0, 10**0.5))
    theta2 = numpyro.sample("theta2", dist.Normal(0, 1))
    components = dist.Normal(jnp.stack([theta1, theta1 + theta2]), 2**0.5)
    mixture = dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), components)
    with numpyro.plate("data", len(x)) as i:
        numpyro.sample("x", mixture, obs=x[i])


which, noise = jax.random.split(jax.random.key(0))
x = jax.random.bernoulli(which, 0.5, (rows,)) + 2**0.5 * jax.random.normal(
    noise, (rows,)
)

# %%
# One random walk, five tests
# ---------------------------
# Steps have standard deviation 0.15 in both parameters. Chains run one after the other:
# vectorised chains would wait for the one that reads most.

walk = {
    "temperature": temperature,
    "step_size": 0.15,
    "adapt_step_size": False,
    "adapt_mass_matrix": False,
}
kernels = {
    "all rows": MinibatchMH(
        model, estimate="exact", acceptance=accept.metropolis(), **walk
    ),
    "AusterityMH": AusterityMH(model, epsilon=0.005, batch_size=50, **walk),
    "MHMinibatch": MHMinibatch(model, batch_size=100, **walk),
    "MHMinibatch, sequential": MHMinibatch(
        model, batch_size=50, sequential=True, **walk
    ),
    "MINT": MINT(model, batch_size=500, **walk),
}
start = {"theta1": jnp.full(chains, 0.5), "theta2": jnp.zeros(chains)}
runs = {}
for name, kernel in kernels.items():
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=draws,
        num_chains=chains,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), x, init_params=start)
    runs[name] = to_inference_data(mcmc, constant_data=False)

# %%
# Rows, moves and effective draws
# -------------------------------
# *moved* is the fraction of draws that differ from the previous one. A test that reads
# fewer rows may accept fewer moves, so compare the last column.

print(f"{'':<24} {'rows':>10} {'median':>8} {'moved':>6} {'rows/eff. draw':>20}")
for name, idata in runs.items():
    read = idata["sample_stats"]["num_rows"].values
    theta = idata["posterior"]["theta1"].values
    moved = (np.diff(theta, axis=1) != 0).mean()
    each = read.sum(dtype=float) / diagnose(idata).min_ess_bulk
    print(
        f"{name:<24} {read.mean():10,.0f} {np.median(read):8,.0f} {moved:6.2f} "
        f"{each:20,.0f}"
    )

# %%
# Distribution of the batch sizes
# -------------------------------
# Most moves can be accepted or rejected on few rows. A few need many, and a test that
# chooses its batch size spends its rows on them.

colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
styles = ("-", "--", "-.", ":", "-")
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, idata), *look in zip(runs.items(), styles, colours, strict=True):
    read = np.sort(idata["sample_stats"]["num_rows"].values.ravel())
    style, colour = look
    axis.step(read, np.linspace(0, 1, len(read)), style, color=colour, label=name)
axis.set(
    xscale="log",
    xlabel="rows read per accept/reject step",
    ylabel="cumulative fraction of steps",
    title=f"Batch sizes for {rows:,} rows at temperature {temperature:,.0f}",
)
axis.legend(fontsize="small", loc="lower right", bbox_to_anchor=(0.93, 0))
figure.savefig(args.out / "batch_sizes.png", dpi=80)

# %%
# Noise and the limits of the tests
# ---------------------------------
# MINT's batch size is fixed, so its noise differs from move to move; the line is the
# largest noise for which the penalty is designed. The second panel shows the deviation
# of acceptance tests from detailed balance at a noise standard deviation just below
# one: the curve of an exact test is zero.

figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
plots.decision_noise(runs["MINT"], ax=axes[0])
tests = {
    "metropolis": accept.metropolis(),
    "barker": accept.barker(),
    "penalty": accept.penalty(),
    "compensated_barker": accept.compensated_barker(),
}
plots.acceptance_curves(tests, sd=0.99, balance=True, ax=axes[1])
figure.savefig(args.out / "batch_sizes_noise.png", dpi=80)

# %%
# Rows read and effective sample size
# -----------------------------------
# The further left a line is, the fewer rows were read for the same effective sample
# size. At the small size there are only a few tens of effective draws, so the lines are
# rough.

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
plots.rows_and_samples(runs, var_name="theta1", ax=axis)
figure.savefig(args.out / "batch_sizes_samples.png", dpi=80)

# %%
# **What to look at.** The median and the mean of the rows read, and the last figure.
# All five sample the posterior at the same temperature (the sequential tests
# approximately), so their means should differ by no more than ``mcse_mean`` allows.
# R-hat above 1.01 means that these chains are too short, as at the small size. The
# paper's table at its own size is in :doc:`/reproduction`.

for name, idata in runs.items():
    print(f"\n{name}\n{az.summary(idata)}")
