"""A hierarchical Poisson model
============================

Counts of an event in the houses of many counties: a county has a rate of its own, rates
of counties are alike, and a house has a basement or not. Houses are the data plate, so
that batches are batches of houses; counties are a plate of parameters, which is not
subsampled. That is the shape of the radon example, with counts, and with as many houses
as make minibatches worth their while.

The data are simulated, so that the truth is there to compare with.
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
# The county effects are written in their centred form. The data fix them, for a county
# has a thousand houses or more, and given the effects ``mu`` and ``tau`` are easy to
# sample. The form ``theta = mu + tau * eta`` is right for counties with few houses.
# Here its posterior would be a narrow ridge, for ``eta`` has to follow each move of
# ``mu`` and ``tau``.


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
# Nothing is tuned. Before the run all houses are read a few times: to find the centre
# of the expansion, and for a pilot that says which houses matter and how noisy a
# decision on a batch is. A standard deviation above 1 would be too much for the test.

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
print(f"left over by the expansion: sd {kernel.pilot['residual_sd']:.2g}")

# %%
# Diagnostics first
# -----------------
# Look at *unreliable*, which should be 0%, at *exact checks*, whose errors should be
# about as large as their noise says (1.0 of it), and at how many rows an effective
# sample took beside the number of houses.

idata = to_inference_data(mcmc, dims={"theta": ["county"]}, constant_data=False)
print(diagnose(idata))
print(az.summary(idata, var_names=["mu", "tau", "slope"]))

# %%
# County by county
# ----------------
# Intervals that hold 95% of the draws, over the truth: of the counties about one in
# twenty should be missed.

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
    label="median and 95% of the draws",
)
axis.plot(place, theta[order], "x", color="#D55E00", label="truth")
axis.set(
    xlabel="county, by its true rate",
    ylabel="log rate of a house without basement",
    title=f"{houses:,} houses: {missed} of {counties} counties outside their interval",
)
axis.xaxis.get_major_locator().set_params(integer=True)
axis.legend()
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "hierarchical_poisson.png", dpi=80)

# %%
# Does the model fit?
# -------------------
# A posterior predictive check needs no minibatches: rates of the draws, counts from
# them, and the share of houses with each count.

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
    label="replicated, two sd",
)
axis.set(
    xlabel="count of a house",
    ylabel="share of houses",
    title="Counts, observed and replicated",
)
axis.legend()
figure.savefig(args.out / "hierarchical_poisson_check.png", dpi=80)

# %%
# **What to look at.** ``diagnose`` for the decisions, R-hat of ``tau`` for the
# hierarchy, and the interval of ``tau``: its posterior does not get narrower with more
# houses, only with more counties, which no minibatch changes.
