"""A random intercept and slope for each of many groups
====================================================

Clinics differ in how their patients fare, and in what a treatment does for them. Each
clinic has two latent numbers, an intercept and an effect of the treatment, which are
correlated. With 100,000 clinics NUTS carries 200,000 latent numbers. ``marginalize``
integrates the two of each clinic by quadrature at 9 x 9 nodes, which leaves five
parameters, and ``recover_marginals`` draws those of some clinics afterwards.

The data are simulated, so that the truth is known.
"""

import argparse
import time
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_minibatch import (
    MinibatchMH,
    diagnose,
    marginalize,
    recover_marginals,
    to_inference_data,
)

parser = argparse.ArgumentParser(description="A random intercept and slope")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="2,000 clinics")
sizes.add_argument("--nuts", action="store_true", help="1,000 clinics, and NUTS")
sizes.add_argument("--full", action="store_true", help="a million clinics")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

clinics = 1_000_000 if args.full else 100_000
clinics = 2_000 if args.small else 1_000 if args.nuts else clinics
draws = 400 if args.small else 1_000

# %%
# The data
# --------
# Half of the patients of each clinic are treated.


def effects(z, means, scales, correlation):
    """Intercepts and slopes from standardised numbers, in the last axis."""
    rest = (1.0 - correlation**2) ** 0.5
    intercept = means[..., 0] + scales[..., 0] * z[..., 0]
    slope = correlation * z[..., 0] + rest * z[..., 1]
    return intercept, means[..., 1] + scales[..., 1] * slope


def simulate(clinics, patients=8, seed=0):
    """Who is treated and who recovers, and the intercepts and slopes of clinics."""
    rng = np.random.default_rng(seed)
    means, scales = np.array([-0.5, 0.8]), np.array([1.0, 0.7])
    both = effects(rng.normal(size=(clinics, 2)), means, scales, -0.4)
    treated = np.tile(np.arange(patients) % 2, (clinics, 1)).astype(np.float32)
    logits = both[0][:, None] + both[1][:, None] * treated
    recovered = rng.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))
    return treated, recovered.astype(np.float32), *both


treated, recovered, intercept, slope = simulate(clinics)
data = treated, recovered
print(f"{recovered.size:,} patients of {clinics:,} clinics")

# %%
# The model
# ---------
# The latent numbers of a clinic are standard normal, which suits NUTS as well. Written
# number by number, the arithmetic of a row stays small: it is done at 81 nodes.


def model(treated, recovered):
    means = numpyro.sample("means", dist.Normal(0, 2).expand([2]).to_event(1))
    scales = numpyro.sample("scales", dist.HalfNormal(2).expand([2]).to_event(1))
    correlation = numpyro.sample("correlation", dist.Uniform(-1, 1))
    with numpyro.plate("clinics", len(recovered)) as i:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        intercept, slope = effects(z, means, scales, correlation)
        with numpyro.plate("patients", recovered.shape[1]):
            logits = intercept + slope * treated[i].T
            obs = recovered[i].T
            numpyro.sample("recovered", dist.Bernoulli(logits=logits), obs=obs)


marginal = marginalize(model)

# %%
# Sampling
# --------


def run(kernel, num_samples, seed=0):
    """A run of four chains, and its seconds."""
    start = time.perf_counter()
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *map(jnp.asarray, data))
    jax.block_until_ready(mcmc.get_samples())
    return to_inference_data(mcmc, constant_data=False), time.perf_counter() - start


idata, seconds = run(MinibatchMH(marginal, control_variate="taylor2"), draws)
print(f"{seconds:.0f} s")
print(diagnose(idata))
print(az.summary(idata))

# %%
# The clinics
# -----------
# Each draw of the parameters gets a draw of the two numbers of a clinic.

some = np.arange(60)


def of_clinics(posterior):
    """Draws of the intercepts and slopes of some clinics."""
    drawn = [posterior[name].values for name in ("z", "means", "scales", "correlation")]
    z, means, scales, correlation = drawn
    one = [x[:, :, None] for x in (means, scales, correlation)]
    return effects(z[:, :, some], *one)


thin = idata.sel(draw=slice(None, None, 2))
full = recover_marginals(marginal, thin, *data, rows=some, key=jax.random.key(1))
found = of_clinics(full["posterior"])

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for axis, name, values, truth in zip(
    axes, ("intercept", "slope"), found, (intercept, slope), strict=True
):
    flat = values.reshape(-1, len(some))
    low, middle, high = np.quantile(flat, [0.025, 0.5, 0.975], axis=0)
    missed = int(((truth[some] < low) | (truth[some] > high)).sum())
    order = np.argsort(truth[some])
    axis.errorbar(
        some,
        middle[order],
        yerr=np.abs(np.stack([low, high]) - middle)[:, order],
        fmt="o",
        ms=3,
        color="#0072B2",
        label="median and 95% of the draws",
    )
    axis.plot(some, truth[some][order], "x", color="#D55E00", label="truth")
    axis.set(
        xlabel=f"clinic, by its true {name}",
        ylabel=name,
        title=f"{missed} of {len(some)} outside their interval",
    )
axes[0].legend()
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "random_slopes.png", dpi=80)

# %%
# Compared with NUTS
# ------------------
# NUTS samples the model with all latent numbers, 2,005 of them for 1,000 clinics, which
# ``--nuts`` does. Parameters and the numbers of single clinics are compared.

if args.nuts:
    exact, seconds = run(NUTS(model), draws, seed=1)
    print(f"NUTS: {seconds:.0f} s")
    print(az.summary(exact, var_names=["means", "scales", "correlation"]))
    names = ("means", "scales", "correlation")
    pairs = {n: [x["posterior"][n].values for x in (idata, exact)] for n in names}
    others = of_clinics(exact["posterior"])
    pairs |= {
        name: list(pair)
        for name, *pair in zip(("intercept", "slope"), found, others, strict=True)
    }
    for name, (one, other) in pairs.items():
        off = abs(one.mean((0, 1)) - other.mean((0, 1))) / other.std((0, 1))
        ratio = abs(one.std((0, 1)) / other.std((0, 1)) - 1)
        print(
            f"{name}: means differ by at most {off.max():.3f} sd, "
            f"sds by at most {ratio.max():.1%}"
        )

# %%
# **What to look at.** ``diagnose`` for the decisions, and the share of clinics outside
# their interval: one in twenty.
