"""A mixture with a member for each row
====================================

Each row of the data belongs to one of three components, and which one is not seen. The
model says so as one would say it: a discrete latent site in the plate of the rows.
``marginalize`` sums over it in each row, so that a step reads a few dozen of a million
rows; ``recover_marginals`` says afterwards to which component a row belongs, and how
sure that is.

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
from numpyro.infer import MCMC, NUTS, init_to_value

from numpyro_minibatch import (
    MinibatchMH,
    diagnose,
    marginalize,
    recover_marginals,
    to_inference_data,
)

parser = argparse.ArgumentParser(description="A mixture with a member for each row")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="20,000 rows")
sizes.add_argument("--nuts", action="store_true", help="5,000 rows, and NUTS")
sizes.add_argument("--full", action="store_true", help="ten million rows")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()

size = 10_000_000 if args.full else 1_000_000
size = 20_000 if args.small else 5_000 if args.nuts else size
draws = 500 if args.small else 1000

# %%
# The model
# ---------
# The means are ordered, for a mixture does not change when its components change their
# names. The site ``member`` has a value for each row.


def model(y):
    support = dist.constraints.ordered_vector
    mean = numpyro.sample("mean", dist.ImproperUniform(support, (), (3,)))
    numpyro.factor("prior", dist.Normal(0.0, 5.0).log_prob(mean).sum())
    sd = numpyro.sample("sd", dist.LogNormal(0.0, 0.5).expand([3]).to_event(1))
    weight = numpyro.sample("weight", dist.Dirichlet(2.0 * jnp.ones(3)))
    with numpyro.plate("rows", len(y)) as i:
        member = numpyro.sample("member", dist.Categorical(weight))
        numpyro.sample("y", dist.Normal(mean[member], sd[member]), obs=y[i])


rng = np.random.default_rng(0)
mean, sd = np.array([-2.0, 0.5, 3.0]), np.array([0.8, 0.6, 1.0])
truth = rng.choice(3, size=size, p=[0.3, 0.45, 0.25])
y = (mean[truth] + sd[truth] * rng.normal(size=size)).astype(np.float32)
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
mcmc.run(jax.random.key(0), y)
idata = to_inference_data(mcmc, constant_data=False)
print(diagnose(idata))
print(az.summary(idata))

# %%
# Members
# -------
# The probabilities of the three components, given the data: means over the draws of the
# conditional probabilities. If they are right, then of all rows that are said to belong
# to a component with 70%, 70% do.

some = np.arange(2000)
thin = idata.sel(draw=slice(None, None, 10))
full = recover_marginals(marginal, thin, y, rows=some, probabilities=True)
probability = full["posterior"]["member_probability"].mean(("chain", "draw")).values
said = probability.ravel()
right = (truth[some][:, None] == np.arange(3)).ravel()
edges = np.linspace(0.0, 1.0, 9)
which = np.clip(np.digitize(said, edges) - 1, 0, 7)
there = [k for k in range(8) if (which == k).sum() > 20]
x = [said[which == k].mean() for k in there]
share = [right[which == k].mean() for k in there]
error = [2 * right[which == k].std() / np.sqrt((which == k).sum()) for k in there]

figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
axis.plot([0, 1], [0, 1], color="0.7")
axis.errorbar(x, share, yerr=error, fmt="o", color="#0072B2")
axis.set(
    xlabel="probability of a component",
    ylabel="share of rows that belong to it",
    title=f"{len(some):,} of {size:,} rows",
)
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "gaussian_mixture.png", dpi=80)

# %%
# Compared with NUTS
# ------------------
# NUTS cannot sample the members. It samples NumPyro's own mixture, which sums them out
# in ``MixtureSameFamily``, and the probabilities of members follow from its draws.
# ``--nuts`` does so for 5,000 rows.


def with_numpyros_mixture(y):
    support = dist.constraints.ordered_vector
    mean = numpyro.sample("mean", dist.ImproperUniform(support, (), (3,)))
    numpyro.factor("prior", dist.Normal(0.0, 5.0).log_prob(mean).sum())
    sd = numpyro.sample("sd", dist.LogNormal(0.0, 0.5).expand([3]).to_event(1))
    weight = numpyro.sample("weight", dist.Dirichlet(2.0 * jnp.ones(3)))
    with numpyro.plate("rows", len(y)):
        components = dist.Normal(mean, sd)
        mixture = dist.MixtureSameFamily(dist.Categorical(weight), components)
        numpyro.sample("y", mixture, obs=y)


if args.nuts:
    # from a random start, a chain of NUTS stays in a mode with an empty component
    start = {
        name: jnp.asarray(idata["posterior"][name].mean(("chain", "draw")).values)
        for name in ("mean", "sd")
    }
    strategy = init_to_value(values=start)
    nuts = MCMC(
        NUTS(with_numpyros_mixture, init_strategy=strategy),
        num_warmup=300,
        num_samples=draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(jax.random.key(1), jnp.asarray(y))
    exact = nuts.get_samples()
    for name in ("mean", "sd", "weight"):
        one = idata["posterior"][name].values.reshape(-1, 3)
        other = np.asarray(exact[name])
        off = abs(one.mean(0) - other.mean(0)) / other.std(0)
        ratio = abs(one.std(0) / other.std(0) - 1)
        print(
            f"{name}: means differ by at most {off.max():.3f} sd, "
            f"sds by at most {ratio.max():.1%}"
        )
    joint = np.log(exact["weight"])[::10, None] + dist.Normal(
        exact["mean"][::10, None], exact["sd"][::10, None]
    ).log_prob(y[some, None])
    other = np.asarray(jax.nn.softmax(joint, -1)).mean(0)
    off = abs(probability - other).max()
    print(f"probabilities of members differ by at most {off:.3f}")

# %%
# **What to look at.** ``diagnose`` for the decisions, the summary for the parameters
# compared with the truth (means -2, 0.5 and 3), and the figure: points on the diagonal.
