"""Two periods that explain the same measurements
==============================================

A weak wave is measured at nearly the same hour of six nights. A wave of 0.3 cycles a
day and one of 0.7 go through the same values at whole days: only the spread of the
hours of a night tells them apart, and the posterior has a mode at both. With
``control_variate.taylor2(modes=...)`` the likelihood is expanded at each mode, and the
chains move between them. A draw reads a few dozen of the 100,000 rows.

The data are simulated, and the masses of both modes are known by quadrature.
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

from numpyro_minibatch import MinibatchMH, control_variate, diagnose, to_inference_data

parser = argparse.ArgumentParser(
    description="Two periods that explain the same measurements"
)
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="10,000 rows, few draws")
sizes.add_argument("--full", action="store_true", help="a million rows")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

size = 10_000 if args.small else 1_000_000 if args.full else 100_000
draws = 500 if args.small else 2000
nights, truth, prior_sd = 6, 0.3, 0.5

# %%
# Measurements
# ------------
# The noise has variance one, and the wave is far smaller: it is seen in the means of
# the nights.

rng = np.random.default_rng(0)
night = rng.integers(nights, size=size) - (nights - 1) // 2
t = night + 0.01 * rng.normal(size=size)
amplitude = 2 * np.sqrt(200 / size)
y = amplitude * np.sin(2 * np.pi * truth * t + 0.5) + rng.normal(size=size)


def model(t, y):
    frequency = numpyro.sample("frequency", dist.Uniform(0, 0.8))
    sine = numpyro.sample("sine", dist.Normal(0, prior_sd))
    cosine = numpyro.sample("cosine", dist.Normal(0, prior_sd))
    with numpyro.plate("data", len(y)) as i:
        phase = 2 * jnp.pi * frequency * t[i]
        wave = sine * jnp.sin(phase) + cosine * jnp.cos(phase)
        numpyro.sample("y", dist.Normal(wave, 1.0), obs=y[i])


# %%
# Sampling
# --------

mcmc = MCMC(
    MinibatchMH(model, control_variate=control_variate.taylor2(modes=4)),
    num_warmup=100,
    num_samples=draws,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), jnp.asarray(t, jnp.float32), jnp.asarray(y, jnp.float32))
idata = to_inference_data(mcmc, constant_data=False)
diagnosis = diagnose(idata)
print(diagnosis)
print(az.summary(idata))

# %%
# Masses, compared with quadrature
# --------------------------------
# The two coefficients can be integrated out in closed form, which leaves an integral
# over the frequency. It needs all rows at each point of a grid.


def conditional(frequency):
    """Log evidence of a frequency; mean and covariance of its coefficients."""
    phase = 2 * np.pi * frequency * t
    waves = np.stack([np.sin(phase), np.cos(phase)])
    covariance = np.linalg.inv(waves @ waves.T + np.eye(2) / prior_sd**2)
    mean = covariance @ (waves @ y)
    log = 0.5 * mean @ np.linalg.solve(covariance, mean)
    return log + 0.5 * np.linalg.slogdet(covariance)[1], mean, covariance


width = 8 * np.sqrt(3 / 200) / (2 * np.pi * nights)
grids = [centre + np.linspace(-width, width, 65) for centre in (truth, 1 - truth)]
found = [[conditional(f) for f in grid] for grid in grids]
logs = np.array([[one[0] for one in each] for each in found])
weights = np.exp(logs - logs.max())
masses = weights.sum(1) / weights.sum()

posterior = idata["posterior"]
frequency = posterior["frequency"].values.ravel()
sine = posterior["sine"].values.ravel()
which = (frequency > 0.5).astype(int)
for k, grid in enumerate(grids):
    share = (which == k).mean()
    print(
        f"near {grid[32]:.1f} cycles a day: {share:.3f} of the draws (standard error "
        f"{diagnosis.mode_mass_error:.3f}), by quadrature {masses[k]:.3f}"
    )

# %%
# Draws on the posterior
# ----------------------
# Left: the means of the nights, and the waves of some draws from each mode, which meet
# at whole days. Middle and right: the draws near both frequencies, on contours of the
# exact density that contain 50%, 90% and 99% of each mode.

colours = ("#0072B2", "#D55E00")
figure, axes = plt.subplots(
    1, 3, figsize=(11, 3.6), layout="constrained", width_ratios=[1.5, 1, 1]
)
days = np.unique(night)
means = [y[night == day].mean() for day in days]
errors = [1 / np.sqrt((night == day).sum()) for day in days]
fine = np.linspace(days[0] - 0.4, days[-1] + 0.4, 500)
for k, colour in enumerate(colours):
    for f, s, c in zip(
        *(posterior[n].values.ravel()[which == k][:10] for n in ("frequency", "sine")),
        posterior["cosine"].values.ravel()[which == k][:10],
        strict=True,
    ):
        wave = s * np.sin(2 * np.pi * f * fine) + c * np.cos(2 * np.pi * f * fine)
        axes[0].plot(fine, wave, color=colour, lw=0.6, alpha=0.5)
axes[0].errorbar(days, means, yerr=errors, fmt="ko", ms=4, zorder=3)
axes[0].set(xlabel="day", ylabel="measurement", title="Means of the nights, and waves")

for k, (axis, grid) in enumerate(zip(axes[1:], grids, strict=True)):
    # density of the frequency and the sine: a normal distribution for each frequency
    mean = np.array([one[1][0] for one in found[k]])
    sd = np.sqrt([one[2][0, 0] for one in found[k]])
    height = np.linspace((mean - 5 * sd).min(), (mean + 5 * sd).max(), 200)
    white = (height[:, None] - mean) / sd
    density = weights[k] * np.exp(-0.5 * white**2) / sd
    levels = np.sort(density.ravel())
    cumulated = np.cumsum(levels) / levels.sum()
    levels = levels[np.searchsorted(cumulated, [0.01, 0.1, 0.5])]
    axis.contour(grid, height, density, levels, colors="k", linewidths=0.8)
    inside = which == k
    axis.plot(frequency[inside], sine[inside], ".", ms=2, color=colours[k], zorder=0)
    # the same widths in both panels
    middle = weights[k] @ np.stack([grid, mean], 1) / weights[k].sum()
    axis.set_xlim(middle[0] - 0.6 * width, middle[0] + 0.6 * width)
    axis.set_ylim(middle[1] - 5 * sd.max(), middle[1] + 5 * sd.max())
    axis.locator_params(nbins=5)
    axis.set(
        xlabel="frequency (cycles a day)",
        ylabel="coefficient of the sine",
        title=f"mass {inside.mean():.3f} (exact: {masses[k]:.3f})",
    )
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "several_modes.png", dpi=80)

# %%
# **What to look at.** The line *modes* of ``diagnose``: the masses with their Monte
# Carlo error, and the share of the moves between modes that were accepted. R-hat and
# effective sample sizes of the summary show that all chains visit both modes.
# :doc:`/several-modes` has the derivation, other posteriors and the limits.
