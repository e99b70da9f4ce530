"""A hierarchical Poisson model
============================

Counts of an event in the houses of many counties. Each county has its own rate, drawn
from a common distribution, and each house may have a basement. Houses are the data
plate, so batches are batches of houses; counties are a plate of parameters, which is
not subsampled. The model is that of the radon example, with counts, and with enough
houses for minibatches to be worthwhile.

The data are simulated, so the true parameters are known.
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

from numpyro_minibatch import MinibatchMH, diagnose, to_inference_data

parser = argparse.ArgumentParser(description="A hierarchical Poisson model")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="20,000 houses")
sizes.add_argument("--full", action="store_true", help="a million houses")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

houses = 20_000 if args.small else 1_000_000 if args.full else 200_000
counties = 20 if args.small else 60
draws = 1500 if args.small else 2000

# %%
# The model
# ---------
# The county effects have the centred parametrisation. A county has a thousand houses or
# more, so its data determine its effect, and given the effects ``mu`` and ``tau`` are
# easy to sample. The non-centred parametrisation ``theta = mu + tau * eta`` suits
# counties with few houses. Here its posterior would be a narrow ridge, because ``eta``
# would have to follow each change of ``mu`` and ``tau``.


def model(county, basement, counts):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.LogNormal(-1, 0.5))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("counties", counties):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("houses", len(counts)) as i:
        log_rate = theta[county[i]] + slope * basement[i]
        numpyro.sample("counts", dist.Poisson(jnp.exp(log_rate)), obs=counts[i])


rng = np.random.default_rng(0)
truth = {"mu": 0.5, "tau": 0.4, "slope": -0.7}
theta = truth["mu"] + truth["tau"] * rng.normal(size=counties)
county = rng.integers(counties, size=houses)
basement = rng.integers(2, size=houses)
counts = rng.poisson(np.exp(theta[county] + truth["slope"] * basement))
data = jnp.asarray(county), jnp.asarray(basement), jnp.asarray(counts)

# %%
# Sampling
# --------
# No setting needs tuning. Before the run, a few passes over all houses find the centre
# of the expansion, and measure which houses matter and how noisy an accept/reject step
# on a batch is. A standard deviation above 1 would be too much for the test.

kernel = MinibatchMH(model, control_variate="taylor2")
mcmc = MCMC(
    kernel,
    num_warmup=200,
    num_samples=draws,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), *data)
print(f"noise of a log ratio: sd {kernel.pilot['batch_sd']:.2g}")
print(f"residual of the expansion: sd {kernel.pilot['residual_sd']:.2g}")

# %%
# Diagnostics
# -----------
# Look at *unreliable*, which should be 0%; at *exact checks*, whose errors should be
# about as large as their predicted noise (a ratio of 1.0); and at the number of rows
# read per effective draw, compared with the number of houses.

idata = to_inference_data(mcmc, dims={"theta": ["county"]}, constant_data=False)
print(diagnose(idata))
print(az.summary(idata, var_names=["mu", "tau", "slope"]))

# %%
# Intervals of the counties
# -------------------------
# Intervals that contain 95% of the draws, with the truth. About one in twenty counties
# should be outside its interval.

posterior = idata["posterior"]["theta"].stack(sample=("chain", "draw"))
low, middle, high = np.quantile(posterior.values, [0.025, 0.5, 0.975], axis=1)
missed = int(((theta < low) | (theta > high)).sum())
order = np.argsort(theta)

figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
place = np.arange(counties)
axis.errorbar(
    place,
    middle[order],
    yerr=np.abs(np.stack([low, high]) - middle)[:, order],
    fmt="o",
    ms=3,
    color="#0072B2",
    label="posterior median and 95% interval",
)
axis.plot(place, theta[order], "x", color="#D55E00", label="truth")
axis.set(
    xlabel="county, ordered by true rate",
    ylabel="log rate without basement",
    title=f"{houses:,} houses: {missed} of {counties} counties outside their interval",
)
axis.xaxis.get_major_locator().set_params(integer=True)
axis.legend()
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "hierarchical_poisson.png", dpi=80)

# %%
# Posterior predictive check
# --------------------------
# A posterior predictive check needs no minibatches: it computes rates from the draws,
# simulates counts, and compares the fraction of houses with each count.

some = rng.choice(posterior.sizes["sample"], 100, replace=False)
slopes = idata["posterior"]["slope"].values.ravel()[some]
rate = np.exp(posterior.values[:, some][county] + slopes * basement[:, None])
made = rng.poisson(rate)
numbers = np.arange(counts.max() + 1)
seen = np.bincount(counts, minlength=len(numbers)) / houses
shares = np.stack([(made == k).mean(0) for k in numbers])

figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
axis.bar(numbers, seen, color="0.8", label="observed")
axis.errorbar(
    numbers,
    shares.mean(1),
    yerr=2 * shares.std(1),
    fmt=".",
    color="#0072B2",
    label="replicated, ± 2 sd",
)
axis.set(
    xlabel="count per house",
    ylabel="fraction of houses",
    title="Observed and replicated counts",
)
axis.legend()
figure.savefig(args.out / "hierarchical_poisson_check.png", dpi=80)

# %%
# **What to look at.** ``diagnose`` for the accept/reject steps, R-hat of ``tau`` for
# the hierarchy, and the interval of ``tau``: its posterior becomes narrower with more
# counties, not with more houses, with or without minibatches.
