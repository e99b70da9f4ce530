"""Fifty modes and an equi-energy sampler
======================================

Data from a mixture of normals, of which one has mean 2 and all others mean 0. The means
are the parameters, and any of the components may be the one at 2, so there are as many
modes as components, in as many dimensions. MINTEE finds them by jumps between positions
of equal energy; a chain without jumps stays in its mode.

Dangna Li, Wing H. Wong (2017), Mini-batch Tempered MCMC, section 5.
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
    MINTEE,
    MinibatchMH,
    Target,
    batch,
    diagnose,
    proposal,
    to_inference_data,
)

parser = argparse.ArgumentParser(description="Fifty modes and an equi-energy sampler")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="eight modes, short chains")
sizes.add_argument("--full", action="store_true", help="down to temperature 1: hours")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

modes = 8 if args.small else 50
number = 4000 if args.small else 100_000
warmup, draws, width = 2000, 6000, 0.02
ladder, settings = [5.0, 7.0, 9.8, 13.7, 19.2, 26.9, 37.6], {"jump_prob": 0.3}
if args.small:
    warmup, draws, ladder = 400, 800, [2.0, 3.5, 6.0, 10.0]
if args.full:
    warmup, draws, width = 10_000, 70_000, 0.05
    ladder = [1.65**k for k in range(7)]
    settings = {"jump_prob": 0.5, "ring_width": 0.01}
chains = 4

# %%
# The posterior of the means
# --------------------------
# The data are rounded and counted, so that one row represents all data of one value.
# The posterior is the same except for the rounding, and needs only a few hundred
# evaluations instead of one per datum. A proper prior keeps unused components from
# diverging: a uniform prior makes the posterior improper.

rng = np.random.default_rng(0)
data = 2.0 * (rng.integers(modes, size=number) == 0) + rng.normal(size=number)
values, counts = np.unique(np.round(data / width), return_counts=True)
values = jnp.asarray(values * width, jnp.float32)
counts = jnp.asarray(counts, jnp.float32)


def log_likelihood(z, rows):
    parts = -0.5 * jnp.square(values[rows][:, None] - z)
    return counts[rows] * (jax.nn.logsumexp(parts, axis=1) - np.log(modes))


target = Target(
    log_prior=lambda z: -0.02 * jnp.square(z).sum(),
    log_likelihood=log_likelihood,
    sizes=len(values),
)
print(f"{number:,} data as {len(values)} rows, {modes} modes")

# %%
# A ladder of energies, and chains without jumps
# ----------------------------------------------
# Each sampler runs four chains, which start with all means at 0.

common = {
    "target": target,
    "batch": batch.full(),
    "num_steps": 5,
    "proposal": proposal.langevin(),
    "step_size": 0.03,
}
kernels = {
    "MINTEE": MINTEE(temperatures=ladder, **settings, **common),
    "no jumps": MinibatchMH(temperature=ladder[0], adapt_mass_matrix=False, **common),
}
runs = {}
for name, kernel in kernels.items():
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), init_params=jnp.zeros((chains, modes)))
    runs[name] = to_inference_data(mcmc)

diagnosis = diagnose(runs["MINTEE"])
print(diagnosis)

# %%
# Mode of each draw
# -----------------
# The mode of a draw is the component near 2; draws in between are not shown. Only jumps
# change the mode.


def mode_of(z):
    near = np.abs(z - 2.0) < 0.6
    return np.where(near.sum(-1) == 1, near.argmax(-1), -1)


found = {name: mode_of(idata["posterior"]["z"].values) for name, idata in runs.items()}
figure, axes = plt.subplots(2, 1, figsize=(8, 5), layout="constrained", sharex=True)
for axis, (name, labels) in zip(axes, found.items(), strict=True):
    seen = [np.unique(chain[chain >= 0]) for chain in labels]
    for k, (mark, colour) in enumerate((("o", "#0072B2"), ("x", "#D55E00"))):
        place = np.flatnonzero(labels[k] >= 0)
        height = labels[k][place] + 0.2 * k  # side by side in the figure
        axis.plot(place, height, mark, ms=2, color=colour, label=f"chain {k}")
    union = len(np.unique(np.concatenate(seen)))
    axis.set(
        ylabel="component near 2",
        ylim=(-1, modes),
        title=f"{name}: {union} of {modes} modes in {chains} chains, "
        f"{', '.join(str(len(s)) for s in seen)} per chain",
    )
axes[-1].set_xlabel("draw (two of the chains)")
shown = axes[0].get_legend_handles_labels()
figure.legend(*shown, loc="outside right upper", markerscale=3)
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "fifty_modes.png", dpi=80)

# %%
# Masses of the modes and rings of the ladder
# -------------------------------------------
# All modes have the same mass. The right panel corresponds to the paper's table 3: the
# fraction of draws that each chain of the ladder has in each ring of energies.
# Neighbouring chains must overlap in some rings, because a jump stays in its ring.

labels = found["MINTEE"]
shares = np.stack([(labels == k).mean(1) for k in range(modes)])
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
error = shares.std(1, ddof=1) / chains**0.5
axes[0].bar(range(modes), shares.mean(1), yerr=error, color="#56B4E9")
axes[0].axhline(1 / modes, color="#D55E00", ls="--", label="equal masses")
axes[0].set(
    xlabel="mode",
    ylabel="fraction of draws",
    title="Fractions of draws, ± standard error across chains",
)
axes[0].set_ylim(0, 1.25 * (shares.mean(1) + error).max())  # room for the legend
axes[0].legend()
occupancy = np.array(diagnosis.ring_occupancy)
image = axes[1].imshow(occupancy, cmap="cividis", vmin=0, vmax=1, aspect="auto")
axes[1].set(
    xlabel="ring (0: lowest energies)",
    ylabel="chain",
    title="Fraction of each chain's draws in each ring",
    xticks=range(occupancy.shape[1]),
    yticks=range(len(ladder)),
)
axes[1].set_yticklabels([f"{k}: T = {t:g}" for k, t in enumerate(ladder)])
figure.colorbar(image, ax=axes[1], label="fraction of draws")
figure.savefig(args.out / "fifty_modes_rings.png", dpi=80)

# %%
# **What to look at.** The number of modes visited by *each* chain, compared with that
# of all chains together. Rings store past positions, so the draws of one chain visit
# the same modes again and again. R-hat shows this too: it is not small. For the paper's
# size and settings see :doc:`/kernels/mintee`.

print(az.summary(runs["MINTEE"]).head(8))
