"""The models: each has one data plate, and arguments with one row per observation.

Without ``subsample_size`` the plate holds all rows. `numpyro.subsample` selects the
rows of a smaller batch and costs nothing without one, which matters for NUTS.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array


def logistic(
    x: Array, y: Array, subsample_size: int | None = None, scale: float = 10.0
) -> None:
    """Logistic regression; an intercept is a column of ``x``."""
    prior = dist.Normal(0.0, scale).expand([x.shape[1]]).to_event(1)
    beta = numpyro.sample("beta", prior)
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        rows = numpyro.subsample(x, event_dim=1)
        labels = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=rows @ beta), obs=labels)


def poisson(x: Array, y: Array, subsample_size: int | None = None) -> None:
    """Poisson regression with a log link."""
    prior = dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1)
    beta = numpyro.sample("beta", prior)
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        rows = numpyro.subsample(x, event_dim=1)
        counts = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Poisson(jnp.exp(rows @ beta)), obs=counts)


def student_t(x: Array, y: Array, subsample_size: int | None = None) -> None:
    """Regression with Student-t noise of 4 degrees of freedom and unknown scale."""
    prior = dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1)
    beta = numpyro.sample("beta", prior)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        rows = numpyro.subsample(x, event_dim=1)
        response = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.StudentT(4.0, rows @ beta, sigma), obs=response)


def hierarchy(
    x: Array,
    group: Array,
    y: Array,
    subsample_size: int | None = None,
    num_groups: int = 50,
    centred: bool = False,
) -> None:
    """Logistic regression with a random intercept ``theta`` for each group."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    prior = dist.Normal(0.0, 2.0).expand([x.shape[1]]).to_event(1)
    beta = numpyro.sample("beta", prior)
    if centred:
        effects = dist.Normal(mu, tau).expand([num_groups]).to_event(1)
        theta = numpyro.sample("theta", effects)
    else:
        standard = dist.Normal(0.0, 1.0).expand([num_groups]).to_event(1)
        eta = numpyro.sample("eta", standard)
        theta = numpyro.deterministic("theta", mu + tau * eta)
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        rows = numpyro.subsample(x, event_dim=1)
        of = numpyro.subsample(group, event_dim=0)
        labels = numpyro.subsample(y, event_dim=0)
        logits = theta[of] + rows @ beta
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=labels)
