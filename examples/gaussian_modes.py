"""Isolated modes with a ladder and with cycles
============================================

Five and twenty-five isolated modes in the plane, which a single chain does not find.
Two methods find them. In a ladder of temperatures, replicas swap between rungs (RENHD);
the ladder estimates the masses of the modes correctly. In cyclical SGLD, one chain
alternates between long and short steps, which is cheaper but does not estimate masses.

Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), Replica-exchange Nosé-Hoover
dynamics for Bayesian learning on large datasets, section 4.1. Ruqi Zhang, Chunyuan Li,
Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson (2020), Cyclical stochastic gradient
MCMC for Bayesian deep learning, section 5.1.
"""

import argparse
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC

from numpyro_minibatch import (
    RENHD,
    SGLD,
    CyclicalSGLD,
    Target,
    diagnose,
    plots,
    to_inference_data,
)

parser = argparse.ArgumentParser(
    description="Isolated modes with a ladder and with cycles"
)
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="few draws")
sizes.add_argument("--full", action="store_true", help="the papers' numbers of draws")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()
ladder_draws = 400 if args.small else 12_500 if args.full else 3000
cycle_steps = 12_000 if args.small else 50_000
args.out.mkdir(parents=True, exist_ok=True)

# %%
# Five modes of different masses
# ------------------------------
# The paper shows its five modes without numbers. Here one is in the middle and one at
# each corner, with masses from 0.30 to 0.10, and the barrier between two of them is 16
# nats. Rows have linear terms that sum to zero, so that the gradient on a batch of 20
# of 200 rows has noise of the paper's variance, 0.25 in each coordinate.

corners = np.array([[0, 0], [4, 4], [-4, 4], [-4, -4], [4, -4]], float)
masses = np.array([0.30, 0.25, 0.20, 0.15, 0.10])


def five(z):
    square = jnp.square((z - corners) / 0.5).sum(-1)
    return jax.scipy.special.logsumexp(jnp.log(masses) - 0.5 * square)


size, width = 200, 20
slopes = np.random.default_rng(0).normal(size=(size, 2))
slopes -= slopes.mean(0)
slopes *= np.sqrt(0.25 * width / (1 - width / size)) / size / slopes.std(0, ddof=1)
terms = jnp.asarray(slopes, jnp.float32)
target = Target(
    log_prior=lambda z: jnp.zeros(()),
    log_likelihood=lambda z, rows: terms[rows] @ z + five(z) / size,
    sizes=size,
)

# %%
# There are seven rungs, each 1.5 times as hot as the one before, and eight chains that
# all start in the middle mode.

kernel = RENHD(
    target=target,
    batch_size=width,
    step_size=0.1,
    friction=1.0,
    num_steps=20,
    num_replicas=7,
    temperature_ratio=1.5,
)
mcmc = MCMC(
    kernel,
    num_warmup=100,
    num_samples=ladder_draws,
    num_chains=8,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), init_params=jnp.zeros((8, 2)))
ladder = to_inference_data(mcmc)
print(diagnose(ladder))

# %%
# Paths of the replicas
# ---------------------
# A ladder works if replicas cross it from end to end. Each line is the rung of one
# replica during the first 150 draws. The bars are the swap rates of neighbouring rungs,
# which should be roughly equal.

figure, axes = plt.subplots(
    1, 2, figsize=(11, 3.6), layout="constrained", width_ratios=(2, 1)
)
plots.replica_paths(ladder, ax=axes[0]).set_xlim(0, 150)
plots.swap_rates(ladder, ax=axes[1])
figure.savefig(args.out / "five_modes_ladder.png", dpi=80)

# %%
# Modes and their masses
# ----------------------
# Each mode is labelled with the fraction of draws in it, with the exact mass in
# parentheses.

figure, axis = plt.subplots(figsize=(6, 5), layout="constrained")
plots.mode_map(ladder, "z", centers=corners, masses=masses, ax=axis)
figure.savefig(args.out / "five_modes.png", dpi=80)
print(az.summary(ladder))

# %%
# Twenty-five modes with cycles
# -----------------------------
# The modes form a grid and have equal masses and variance 0.03. SGLD with the paper's
# decreasing step size stays in the mode in which it started. In cyclical SGLD, the long
# steps at the start of each cycle leave the mode (they are longer than the stable step
# size for it), and draws are taken from the last fifth of the cycle.

grid = np.array([(x, y) for x in range(-4, 5, 2) for y in range(-4, 5, 2)], float)


def many(z):
    return jax.nn.logsumexp(-0.5 * jnp.square(z - grid).sum(-1) / 0.03)


# the whole density is the prior, and the rows are constant
flat = Target(many, lambda z, rows: 0.0 * rows * z[0], 4)
start = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)), jnp.float32)


def run(kernel, draws, thinning=1):
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=draws,
        num_chains=4,
        thinning=thinning,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), init_params=start)
    return to_inference_data(mcmc)


steady = run(
    SGLD(
        target=flat,
        batch_size=2,
        step_size=lambda step: 0.05 * (1.0 + step) ** -0.55,
    ),
    cycle_steps,
    thinning=5,
)
length = 1500
kernel = CyclicalSGLD(target=flat, batch_size=2, step_size=0.09, cycle_length=length)
cyclical = run(kernel, cycle_steps // length * kernel.samples_per_cycle)
print(diagnose(cyclical))

# %%
# Modes found by four chains
# --------------------------
# Each mode is labelled with the fraction of draws in it; equal fractions would be 4.0%.

figure, axes = plt.subplots(2, 1, figsize=(7, 11), layout="constrained")
for axis, (name, idata) in zip(
    axes, {"SGLD": steady, "cyclical SGLD": cyclical}.items(), strict=True
):
    plots.mode_map(idata, "z", centers=grid, ax=axis)
    axis.set(xlim=(-5.5, 5.5), ylim=(-5.5, 5.5))
    axis.set_title(f"{name}: {axis.get_title()}")
figure.savefig(args.out / "twenty_five_modes.png", dpi=80)

# %%
# Positions of the draws in their cycles
# --------------------------------------
# Step sizes follow a cosine, and draws are taken from the short steps at its end.

figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
plots.cycles(cyclical, ax=axis)
figure.savefig(args.out / "cycles.png", dpi=80)

# %%
# **What to look at.** For the ladder: round trips, and the total variation in the title
# of the map. For cycles: how many modes were visited, and that their fractions are
# *not* 1/25 each. A cycle ends in a mode for reasons unrelated to its mass; only the
# number of visits contains information about masses. ``cycles.weights`` can weight the
# cycles. Measurements at the papers' sizes are in :doc:`/benchmarks-replica-exchange`
# and :doc:`/kernels/cyclical`.

print(az.summary(cyclical))
