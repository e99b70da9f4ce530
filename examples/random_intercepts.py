"""A random intercept for each of many groups
==========================================

Patients of many clinics, five of each, who recover or not. A clinic has an intercept of
its own, which no minibatch can carry: with 100,000 clinics there are 100,000 of them.
``marginalize`` integrates the intercept out of each clinic by quadrature. What is left
has a few parameters and one row for each clinic, and a step reads a few dozen of them.
Afterwards ``recover_marginals`` draws the intercepts of the clinics that matter.

The data are simulated, so that the truth is there to compare with.
"""

import argparse
from pathlib import Path

import arviz as az
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_minibatch import (
    MinibatchMH,
    by_group,
    diagnose,
    marginalize,
    recover_marginals,
    to_inference_data,
)
from numpyro_minibatch.marginal import quadrature_error

parser = argparse.ArgumentParser(description="A random intercept for each group")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="2,000 clinics")
sizes.add_argument("--nuts", action="store_true", help="1,000 clinics, and NUTS")
sizes.add_argument("--full", action="store_true", help="a million clinics")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

clinics = 1_000_000 if args.full else 100_000
clinics = 2_000 if args.small else 1_000 if args.nuts else clinics
draws = 500 if args.small else 1000

# %%
# The data
# --------
# Data come long, with a column that says of which clinic a patient is. ``by_group``
# makes one padded row of each clinic, and a mask that says what is padded.

rng = np.random.default_rng(0)
slopes, tau = np.array([0.5, -1.0, 0.25]), 1.2
intercepts = tau * rng.normal(size=clinics)
clinic = np.repeat(np.arange(clinics), rng.integers(3, 8, size=clinics))
covariates = rng.normal(size=(len(clinic), 3)).astype(np.float32)
chance = 1 / (1 + np.exp(-(intercepts[clinic] + covariates @ slopes)))
recovered = (rng.uniform(size=len(clinic)) < chance).astype(np.float32)

groups = by_group(clinic, covariates, recovered)
data = *groups.arrays, groups.mask
print(f"{len(clinic):,} patients of {clinics:,} clinics: rows {groups.mask.shape}")

# %%
# The model
# ---------
# It is written as one writes it for NUTS: a plate of clinics, with the intercept, and
# within it the plate of the patients. ``marginalize`` takes the intercept out.


def model(covariates, recovered, mask):
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([3]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("clinics", len(recovered)) as i:
        intercept = numpyro.sample("intercept", dist.Normal(0, tau))
        with (
            numpyro.plate("patients", recovered.shape[1]),
            numpyro.handlers.mask(mask=mask[i].T),
        ):
            logits = intercept + (covariates[i] @ slopes).T
            obs = recovered[i].T
            numpyro.sample("recovered", dist.Bernoulli(logits=logits), obs=obs)


marginal = marginalize(model)

# %%
# Sampling
# --------

mcmc = MCMC(
    MinibatchMH(marginal, control_variate="taylor2"),
    num_warmup=200,
    num_samples=draws,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(0), *data)
idata = to_inference_data(mcmc, constant_data=False)
print(diagnose(idata))
print(az.summary(idata))

# %%
# The quadrature
# --------------
# Its error is measured at draws of the run, against many more nodes. What counts is the
# spread: how much the summed error of all rows differs between draws.

print(quadrature_error(marginal, idata, *data, rows=np.arange(1000)))

# %%
# The intercepts of some clinics
# ------------------------------
# Each draw of the parameters gets a draw of the intercept from its exact conditional
# distribution, so that the draws are those of the joint posterior.

some = np.arange(60)
full = recover_marginals(marginal, idata, *data, rows=some, key=jax.random.key(1))
posterior = full["posterior"]["intercept"].stack(sample=("chain", "draw"))
low, middle, high = np.quantile(posterior.values, [0.025, 0.5, 0.975], axis=1)
truth = intercepts[some]
missed = int(((truth < low) | (truth > high)).sum())
order = np.argsort(truth)

figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
axis.errorbar(
    some,
    middle[order],
    yerr=np.abs(np.stack([low, high]) - middle)[:, order],
    fmt="o",
    ms=3,
    color="#0072B2",
    label="median and 95% of the draws",
)
axis.plot(some, truth[order], "x", color="#D55E00", label="truth")
axis.set(
    xlabel="clinic, by its true intercept",
    ylabel="intercept",
    title=f"{missed} of {len(some)} clinics outside their interval",
)
axis.legend()
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "random_intercepts.png", dpi=80)

# %%
# Compared with NUTS
# ------------------
# NUTS samples the model as it is written, with an intercept for each clinic, which
# ``--nuts`` does for 1,000 clinics. Parameters and the intercepts of some clinics are
# compared.

if args.nuts:
    nuts = MCMC(
        NUTS(model),
        num_warmup=200,
        num_samples=draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(jax.random.key(2), *data)
    exact = to_inference_data(nuts, constant_data=False)["posterior"]
    for name in ("slopes", "tau", "intercept"):
        one, other = full["posterior"][name].values, exact[name].values
        if name == "intercept":
            other = other[..., some]
        off = abs(one.mean((0, 1)) - other.mean((0, 1))) / other.std((0, 1))
        ratio = abs(one.std((0, 1)) / other.std((0, 1)) - 1)
        print(
            f"{name}: means differ by {off.mean():.3f} sd on average, {off.max():.3f} "
            f"at most; sds by {ratio.mean():.1%} and {ratio.max():.1%}"
        )

# %%
# **What to look at.** ``diagnose`` for the decisions, the spread of the quadrature's
# error (far below one), and the share of clinics outside their interval: one in twenty.
