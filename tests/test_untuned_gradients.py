"""SGLD, SGHMC and SGNHT without a step size: scales from a control variate."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC

from numpyro_minibatch import SGHMC, SGLD, SGNHT, CyclicalSGHMC


def counts(x, y):
    rate = numpyro.sample("rate", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.Poisson(jnp.exp(rate + slope * x[idx])), obs=y[idx])


def many_counts():
    rng = np.random.default_rng(0)
    x = 10.0 * rng.normal(size=2_500)  # a column of another scale
    return jnp.asarray(x), jnp.asarray(rng.poisson(np.exp(0.5 + 0.03 * x)), float)


def by_quadrature(log_density, axes):
    """Means and standard deviations of a density on a grid."""
    grids = np.meshgrid(*axes, indexing="ij")
    logs = log_density(*grids)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    means = [np.sum(weights * g) for g in grids]
    sds = [
        np.sqrt(np.sum(weights * (g - m) ** 2))
        for g, m in zip(grids, means, strict=True)
    ]
    return np.array(means), np.array(sds)


def compared(draws, mean, sd):
    """Errors of means and of log standard deviations, and their standard errors."""
    ess = effective_sample_size(draws)
    squares = effective_sample_size((draws - mean) ** 2)
    off = (draws.mean() - mean) / sd, np.log(draws.std() / sd)
    return off, (1 / np.sqrt(ess), 0.8 / np.sqrt(squares))


# the bias of a step of Langevin dynamics, 1 / sqrt(1 - h / 2) with h = 0.1, and the
# noise that the batches add
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "bias"), [(SGHMC, 0.02), (SGNHT, 0.03), (SGLD, 0.05)]
)
def test_draws_without_a_step_size(kernel, bias):
    x, y = many_counts()
    mcmc = MCMC(
        kernel(counts),
        num_warmup=500,
        num_samples=1_000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), x, y)
    assert sum(mcmc.sampler.batch_sizes.values()) < len(y) / 5
    found = mcmc.get_samples(group_by_chain=True)
    sufficient = np.asarray(y.sum()), np.asarray((x * y).sum())

    def log_density(rate, slope):
        curve = np.exp(rate[..., None] + slope[..., None] * np.asarray(x))
        linear = rate * sufficient[0] + slope * sufficient[1]
        return linear - curve.sum(-1) - (rate**2 + slope**2) / 8

    def axis(name):
        draws = np.asarray(found[name])
        return np.linspace(-6, 6, 61) * draws.std() + draws.mean()

    means, sds = by_quadrature(log_density, [axis("rate"), axis("slope")])
    for name, mean, sd in zip(("rate", "slope"), means, sds, strict=True):
        off, error = compared(np.asarray(found[name]), mean, sd)
        assert abs(off[0]) < 4 * error[0]
        assert abs(off[1]) < 4 * error[1] + bias
        assert gelman_rubin(np.asarray(found[name])) < 1.02


def scales(y):
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.Normal(0, sigma), obs=y[idx])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SGHMC. with 6 rows")
def test_few_rows_on_which_no_expansion_holds():
    y = jnp.asarray([0.1, -0.3, 0.2, 0.6, -0.1, 3.0])
    kernel = SGHMC(scales)
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=2_000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), y)
    assert kernel.pilot["exact_rows"] == len(y)

    def log_density(z):  # of log(sigma)
        squares = float((y**2).sum())
        likelihood = -len(y) * z - squares * np.exp(-2 * z) / 2
        return likelihood + z - np.log1p(np.exp(2 * z))

    (mean,), (sd,) = by_quadrature(log_density, [np.linspace(-4, 5, 2_001)])
    draws = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["sigma"]))
    off, error = compared(draws, mean, sd)
    assert abs(off[0]) < 4 * error[0] + 0.02
    assert abs(off[1]) < 4 * error[1] + 0.03


@pytest.mark.slow
def test_an_expansion_that_does_not_hold_is_refused_with_what_to_write():
    def product(y):  # its level sets are hyperbolas
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 10))
        with numpyro.plate("data", len(y), subsample_size=50) as idx:
            numpyro.sample("y", dist.Normal(a * b, 1), obs=y[idx])

    y = 3 + jax.random.normal(jax.random.key(1), (3_000,))
    mcmc = MCMC(SGHMC(product), num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.raises(ValueError, match=r"SGHMC.* AMAGOLD\(model\)") as error:
        mcmc.run(jax.random.key(0), y)
    assert "No prior has heavy tails, so the likelihood itself" in str(error.value)


def test_a_step_size_needs_no_control_variate():
    assert SGHMC(counts, step_size=1e-3).control_variate is None
    assert SGHMC(counts, h=1e-6, b=0.1).control_variate is None
    assert SGHMC(counts).control_variate is not None
    # a cycle is about finding several modes, of which the expansion has one
    with pytest.raises(ValueError, match="CyclicalSGHMC needs a step_size"):
        CyclicalSGHMC(counts, cycle_length=100)
