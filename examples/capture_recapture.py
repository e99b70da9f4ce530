"""Survival from capture and recapture
===================================

Animals are marked when they are first caught, and seen again or not on later occasions.
One that is not seen again may be dead, or only missed. The model of Cormack, Jolly and
Seber has a binary state for each animal and occasion, alive or dead, and each state
depends on the one before. The occasions are the steps of NumPyro's ``scan``.
``marginalize`` sums their states out by the forward recursion, so that a step of the
sampler reads a few of 50,000 animals. ``recover_marginals`` returns the probability
that an animal is still alive.

The data are simulated, so that the truth is known.
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
from jax.nn import sigmoid
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_minibatch import (
    MinibatchMH,
    diagnose,
    marginalize,
    recover_marginals,
    to_inference_data,
)

parser = argparse.ArgumentParser(description="Survival from capture and recapture")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="5,000 animals")
sizes.add_argument("--nuts", action="store_true", help="2,000 animals, and NUTS")
sizes.add_argument("--full", action="store_true", help="500,000 animals")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

animals = 500_000 if args.full else 50_000
animals = 5_000 if args.small else 2_000 if args.nuts else animals
occasions = 5 if args.small or args.nuts else 7
draws = 400 if args.small else 1000

# %%
# The data
# --------
# Survival depends on the mass of an animal, the chance of being caught on the occasion.


def simulate(animals, occasions, seed=0):
    """Masses, first captures, histories and lives of animals, and the parameters."""
    rng = np.random.default_rng(seed)
    survival, capture = np.array([1.0, 0.5]), np.linspace(-1.0, 0.5, occasions - 1)
    mass = rng.normal(size=animals).astype(np.float32)
    first = rng.integers(occasions - 1, size=animals)  # not the last one
    stays = 1 / (1 + np.exp(-(survival[0] + survival[1] * mass)))
    alive = np.ones((animals, occasions), bool)
    seen = np.zeros((animals, occasions), np.float32)
    seen[np.arange(animals), first] = 1
    for t in range(1, occasions):
        after = first < t
        survives = rng.uniform(size=animals) < stays
        alive[:, t] = alive[:, t - 1] & (survives | ~after)
        caught = rng.uniform(size=animals) < 1 / (1 + np.exp(-capture[t - 1]))
        seen[after, t] = (alive[:, t] & caught)[after]
    return mass, first, seen, alive, survival, capture


mass, first, seen, alive, survival, capture = simulate(animals, occasions)
again = (seen.sum(1) > 1).mean()
print(f"{animals:,} animals, {occasions} occasions, {again:.0%} seen again")

# %%
# The model
# ---------
# The history of an animal begins with its first capture: before, and on this occasion,
# nothing is uncertain. The dead stay dead and are not seen, so that both probabilities
# are zero without ``alive``. The plate of the animals is inside of the step.


def model(mass, first, seen):
    survival = numpyro.sample("survival", dist.Normal(0, 1.5).expand([2]).to_event(1))
    prior = dist.Normal(0, 1.5).expand([seen.shape[1] - 1]).to_event(1)
    capture = numpyro.sample("capture", prior)
    stays = sigmoid(survival[0] + survival[1] * mass)

    def occasion(alive, of_occasion):
        t, seen, logit = of_occasion
        after = first < t
        with numpyro.plate("animals", len(mass)):
            chance = jnp.where(after, stays * alive, 1.0)
            alive = numpyro.sample("alive", dist.Bernoulli(chance))
            with numpyro.handlers.mask(mask=after):
                caught = dist.Bernoulli(sigmoid(logit) * alive)
                numpyro.sample("seen", caught, obs=seen)
        return alive, None

    times = jnp.arange(1, seen.shape[1])
    scan(occasion, jnp.ones(len(mass), int), (times, seen[:, 1:].T, capture))


marginal = marginalize(model)

# %%
# Sampling
# --------

data = mass, first, seen
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
# The recursion by hand
# ---------------------
# What the forward recursion computes, written by hand: the probabilities of what was
# seen so far, with the animal alive and with it dead, follow from those of the occasion
# before. NUTS samples this model below.


def recursion(mass, first, seen):
    occasions = seen.shape[1]
    survival = numpyro.sample("survival", dist.Normal(0, 1.5).expand([2]).to_event(1))
    prior = dist.Normal(0, 1.5).expand([occasions - 1]).to_event(1)
    caught = sigmoid(numpyro.sample("capture", prior))
    with numpyro.plate("animals", len(seen)) as i:
        stays = sigmoid(survival[0] + survival[1] * mass[i])
        alive, dead = jnp.ones(len(stays)), jnp.zeros(len(stays))
        for t in range(1, occasions):
            now = seen[i, t] == 1
            lives = alive * stays * jnp.where(now, caught[t - 1], 1 - caught[t - 1])
            dies = jnp.where(now, 0.0, dead + alive * (1 - stays))
            alive = jnp.where(first[i] < t, lives, alive)
            dead = jnp.where(first[i] < t, dies, dead)
        numpyro.factor("seen", jnp.log(alive + dead))


values = {"survival": survival, "capture": capture}
device = tuple(map(jnp.asarray, data))
both = [log_density(m, device, {}, values)[0] for m in (marginal, recursion)]
print("log density of the model {:.2f}, by hand {:.2f}".format(*both))

# %%
# Who is alive
# ------------
# The probability that an animal is alive on the last occasion, which is certain only
# for those that were seen then.

some = np.arange(2000)
thin = idata.sel(draw=slice(None, None, 10))
full = recover_marginals(marginal, thin, *data, rows=some, probabilities=True)
of_states = full["posterior"]["alive_probability"].mean(("chain", "draw"))
chance = of_states.values[:, -1, 1]
missed = seen[some, -1] == 0
said, lives = chance[missed], alive[some, -1][missed]
which = np.digitize(said, np.linspace(0.0, 1.0, 11)[1:-1])
there = [k for k in range(10) if (which == k).sum() > 20]
x = np.array([said[which == k].mean() for k in there])
share = np.array([lives[which == k].mean() for k in there])
error = 2 * np.sqrt(x * (1 - x) / [(which == k).sum() for k in there])

posterior = idata["posterior"]["survival"].values.reshape(-1, 2)
grid = np.linspace(-2.5, 2.5, 60)
curves = 1 / (1 + np.exp(-(posterior[:, :1] + posterior[:, 1:] * grid)))
bounds = np.quantile(curves, [0.025, 0.975], axis=0)
actual = 1 / (1 + np.exp(-(survival[0] + survival[1] * grid)))

figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
axes[0].fill_between(grid, *bounds, color="#0072B2", alpha=0.5, label="95% of draws")
axes[0].plot(grid, actual, color="#D55E00", label="truth")
axes[0].set(
    xlabel="mass (standardised)",
    ylabel="chance to survive to the next occasion",
    title=f"{animals:,} animals",
)
axes[0].legend()
axes[1].axline((0, 0), slope=1, color="0.7")
axes[1].errorbar(x, share, yerr=error, fmt="o", color="#0072B2")
axes[1].set(
    xlabel="probability of being alive",
    ylabel="share of animals that are",
    title=f"{missed.sum():,} animals not seen on the last occasion",
)
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "capture_recapture.png", dpi=80)

# %%
# Compared with NUTS
# ------------------
# NUTS cannot sample the states. It samples the recursion, from all animals in each
# gradient, which ``--nuts`` does for 2,000 animals.

if args.nuts:
    nuts = MCMC(
        NUTS(recursion),
        num_warmup=200,
        num_samples=500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(jax.random.key(1), *device)
    exact = to_inference_data(nuts, constant_data=False)
    for name in values:
        one, other = (x["posterior"][name].values for x in (idata, exact))
        off = abs(one.mean((0, 1)) - other.mean((0, 1))) / other.std((0, 1))
        ratio = abs(one.std((0, 1)) / other.std((0, 1)) - 1)
        print(
            f"{name}: means differ by at most {off.max():.3f} sd, "
            f"sds by at most {ratio.max():.1%}"
        )

# %%
# **What to look at.** ``diagnose`` for the decisions, the two log densities, which are
# the same number, and the probabilities of being alive, which lie on the diagonal.
#
# At the default size, 50,000 animals and seven occasions, a draw read 16 animals. The
# smallest effective sample size was 4,000 of 4,000 draws, after 38 s of processor time
# in all, on two cores that other jobs shared. A run of NUTS on the recursion, for
# 2,000 animals, agrees: means within 0.05 posterior standard deviations, and standard
# deviations within 3.6%, with Monte Carlo errors of about 0.025 and 2%.
