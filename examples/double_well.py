"""The double well with noisy gradients
====================================

A particle in two wells moves along gradients with noise of variance one. SGHMC ignores
that noise, so its draws have too high a temperature, the more so the longer its steps.
AMAGOLD makes the same steps and accepts or rejects after every ten of them.

Ruqi Zhang, A. Feder Cooper, Christopher De Sa (2020), AMAGOLD: amortized Metropolis
adjustment for efficient stochastic gradient MCMC, section 6.1.
"""

import argparse
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC

from numpyro_minibatch import AMAGOLD, SGHMC, Target, diagnose, to_inference_data

parser = argparse.ArgumentParser(description="The double well with noisy gradients")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="32,000 draws of each")
sizes.add_argument("--full", action="store_true", help="a million")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()
chains = 16
draws = 2000 if args.small else 62_500 if args.full else 6250  # per chain

# %%
# A target written by hand
# ------------------------
# The energy is a polynomial of one variable. Its noise comes from rows: each has a
# linear term, and the terms sum to zero. The gradient on a batch of 7 of the 103 rows
# then has noise of variance one.


def energy(x):
    return (x + 4) * (x + 1) * (x - 1) * (x - 3) / 14 + 0.5


size, width = 103, 7
slopes = np.random.default_rng(0).normal(size=size)
slopes -= slopes.mean()
slopes *= np.sqrt(width / (1 - width / size)) / size / slopes.std(ddof=1)
terms = jnp.asarray(slopes, jnp.float32)
target = Target(
    log_prior=lambda z: jnp.zeros(()),
    log_likelihood=lambda z, rows: terms[rows] * z - energy(z) / size,
    sizes=size,
)

grid = np.linspace(-6.5, 5.0, 2001)
truth = np.exp(-energy(grid))
truth /= np.trapezoid(truth, grid)

# %%
# The same steps with and without acceptance
# ------------------------------------------
# A draw consists of ten gradient steps; friction, step size and batches are the same in
# both samplers. The chains start at quantiles of the exact distribution.

step_sizes = (0.1, 0.25) if args.small else (0.05, 0.15, 0.25, 0.4)
cdf = np.cumsum(truth) / truth.sum()
starts = jnp.asarray(np.interp((np.arange(chains) + 0.5) / chains, cdf, grid))


def sample(kernel):
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), init_params=starts.astype(jnp.float32))
    return to_inference_data(mcmc)


common = {"target": target, "batch_size": width, "num_steps": 10, "friction": 0.5}
runs = {}
for step_size in step_sizes:
    runs["AMAGOLD", step_size] = sample(
        AMAGOLD(
            **common,
            step_size=step_size,
            adapt_step_size=False,
            adapt_mass_matrix=False,
        )
    )
    runs["SGHMC", step_size] = sample(SGHMC(**common, step_size=step_size))

# %%
# Draws and the exact density
# ---------------------------

colours = {"AMAGOLD": "#0072B2", "SGHMC": "#D55E00"}
edges = np.linspace(-6.5, 5.0, 47)
figure, axes = plt.subplots(
    1, len(step_sizes), figsize=(4 * len(step_sizes), 3.4), sharey=True
)
for axis, step_size in zip(axes, step_sizes, strict=True):
    axis.fill_between(grid, truth, color="0.85", label="exact")
    for name, colour in colours.items():
        values = runs[name, step_size]["posterior"]["z"].values.ravel()
        style = {"color": colour, "linestyle": "--" if name == "SGHMC" else "-"}
        axis.hist(values, edges, density=True, histtype="step", label=name, **style)
    axis.set(xlabel="position", title=f"step size {step_size}")
axes[0].set_ylabel("density")
axes[0].legend(fontsize=8)
figure.tight_layout()
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "double_well.png", dpi=80)

# %%
# Error near the barrier
# ----------------------
# The fraction of draws near the barrier between the wells, where there should be few,
# compared with the exact probability. Its standard error comes from the differences
# between chains.

inside = (grid > -1.0) & (grid < 1.5)
expected = np.trapezoid(np.where(inside, truth, 0), grid)
print(f"{'':<9} {'step':>5} {'P(near the barrier)':>24} {'accepted':>9}")
print(f"{'exact':<9} {'':>5} {expected:16.4f}")
for (name, step_size), idata in runs.items():
    z = idata["posterior"]["z"].values
    near = ((z > -1.0) & (z < 1.5)).mean(1)
    error = near.std(ddof=1) / chains**0.5
    stats = idata["sample_stats"]
    rate = float(stats["acceptance_rate"].mean()) if "acceptance_rate" in stats else 1
    print(f"{name:<9} {step_size:5} {near.mean():16.4f} ({error:.4f}) {rate:9.2f}")

# %%
# Diagnostics
# -----------
# AMAGOLD's acceptance rate shows the cost of its correction at this step size. SGHMC
# has no accept/reject step: ``noise_ratio`` shows that the temperature of its draws is
# too high, and by how much, and ``diagnose`` derives advice from it.

for name in colours:
    idata = runs[name, step_sizes[-1]]
    print(f"\n{diagnose(idata)}")
print(az.summary(runs["AMAGOLD", step_sizes[-1]]))

# %%
# **What to look at.** The histograms between the wells: as steps get longer, draws of
# SGHMC fill the barrier, draws of AMAGOLD do not. ``--full`` uses the paper's run
# lengths. The errors for ten step sizes, with 100,000 draws each, are in
# :doc:`/benchmarks-stochastic-gradient`.
