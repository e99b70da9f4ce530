"""Every kernel on a marginalized model: runs, and comparisons with a dense grid."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    MINTEE,
    RELD,
    RENHD,
    SGHMC,
    SGLD,
    SGMCMC,
    SGNHT,
    AusterityMH,
    ConfidenceMH,
    Cyclical,
    CyclicalMINT,
    CyclicalSGHMC,
    CyclicalSGLD,
    MHMinibatch,
    MinibatchMH,
    ReplicaExchange,
    dynamics,
    marginalize,
    recover_marginals,
    to_inference_data,
)
from numpyro_minibatch import kernels as kernels_of_the_package
from numpyro_minibatch._internal.precision import double

GROUPS, WITHIN = 300, 4


def intercepts(X: Any, y: Any) -> None:
    """A logistic regression with a random intercept."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, tau))
        with numpyro.plate("within", WITHIN):
            logits = a + (X[idx] @ beta).T
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx].T)


rng = np.random.default_rng(0)
X = rng.normal(size=(GROUPS, WITHIN, 2)).astype(np.float32)
_LOGITS = 1.2 * rng.normal(size=(GROUPS, 1)) + X @ np.array([0.8, -0.5])
Y = (rng.uniform(size=_LOGITS.shape) < 1 / (1 + np.exp(-_LOGITS))).astype(np.float32)
MODEL = marginalize(intercepts)


def bound(z: Any, z_new: Any) -> Any:
    """A bound on the differences of log ratios of rows, for the confidence test.

    The log likelihood of an observation changes by at most as much as its logit. The
    mean size of a standardised intercept, given its row, is below two.
    """
    columns = jnp.abs(X).sum(1).max(0)
    changed = jnp.abs(z_new["beta"] - z["beta"]) @ columns
    return changed + 2 * WITHIN * jnp.abs(jnp.exp(z_new["tau"]) - jnp.exp(z["tau"]))


# high temperatures where a batch without a control variate decides
KERNELS: dict[str, Callable[[], MCMCKernel]] = {
    "MINT": lambda: MINT(MODEL, batch_size=100, temperature=5.0),
    "MinibatchMH": lambda: MinibatchMH(MODEL, batch_size=30, control_variate="taylor2"),
    "MHMinibatch": lambda: MHMinibatch(MODEL, batch_size=100, temperature=5.0),
    "AusterityMH": lambda: AusterityMH(
        MODEL, batch_size=100, temperature=5.0, epsilon=0.1
    ),
    "ConfidenceMH": lambda: ConfidenceMH(
        MODEL, batch_size=100, temperature=5.0, bound=bound
    ),
    "AMAGOLD": lambda: AMAGOLD(MODEL, batch_size=100, num_steps=3, step_size=0.05),
    "SGLD": lambda: SGLD(MODEL, batch_size=100, step_size=1e-3),
    "SGHMC": lambda: SGHMC(MODEL, batch_size=100, step_size=0.02, friction=5.0),
    "SGNHT": lambda: SGNHT(MODEL, batch_size=100, step_size=0.02, friction=5.0),
    "SGMCMC": lambda: SGMCMC(
        MODEL, batch_size=100, dynamics=dynamics.sghmc(5.0), step_size=0.02
    ),
    "RELD": lambda: RELD(
        MODEL, batch_size=100, temperatures=[1.0, 3.0], step_size=1e-3
    ),
    "RENHD": lambda: RENHD(
        MODEL, batch_size=100, temperatures=[1.0, 3.0], step_size=0.02, friction=5.0
    ),
    "ReplicaExchange": lambda: ReplicaExchange(
        MINT(MODEL, batch_size=100, temperature=1.0), temperatures=[1.0, 4.0]
    ),
    "MINTEE": lambda: MINTEE(
        MODEL,
        batch_size=100,
        batch_ratio=1.4,
        num_replicas=3,
        temperatures=[5.0, 15.0, 45.0],
        ring_capacity=20,
    ),
    "Cyclical": lambda: Cyclical(
        SGHMC(MODEL, batch_size=100, step_size=0.02, friction=5.0),
        cycle_length=20,
        samples_per_cycle=4,
    ),
    "CyclicalSGLD": lambda: CyclicalSGLD(
        MODEL, batch_size=100, step_size=1e-3, cycle_length=20, samples_per_cycle=4
    ),
    "CyclicalSGHMC": lambda: CyclicalSGHMC(
        MODEL,
        batch_size=100,
        step_size=0.02,
        friction=5.0,
        cycle_length=20,
        samples_per_cycle=4,
    ),
    "CyclicalMINT": lambda: CyclicalMINT(
        MODEL, batch_size=100, temperature=5.0, cycle_length=20, samples_per_cycle=4
    ),
}


def test_every_kernel_is_in_the_table() -> None:
    exported = {
        name
        for name in kernels_of_the_package.__all__
        if inspect.isclass(kind := getattr(kernels_of_the_package, name))
        and issubclass(kind, MCMCKernel)
        and not inspect.isabstract(kind)
    }
    assert set(KERNELS) == exported


QUICK = {"SGLD"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in KERNELS],
)
def test_a_kernel_samples_a_marginalized_model(name: str) -> None:
    mcmc = MCMC(KERNELS[name](), num_warmup=40, num_samples=40, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    samples = mcmc.get_samples()
    assert set(samples) == {"beta", "tau"}
    assert samples["beta"].shape == (40, 2)
    for x in samples.values():
        assert np.all(np.isfinite(x))
        assert np.all(np.std(x, axis=0) > 0)
    idata = to_inference_data(mcmc)
    assert idata["observed_data"]["y"].shape == (GROUPS, WITHIN)
    full = recover_marginals(MODEL, idata, X, Y, rows=[0, 7])
    found = full["posterior"]["a"]
    assert found.sizes == {"chain": 1, "draw": 40, "groups": 2}
    assert np.all(np.isfinite(found))


# posteriors ---------------------------------------------------------------------------


@cache
def reference(temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of ``beta`` and ``tau``, by sums over grids.

    The intercepts are summed over 73 points 0.25 standard deviations apart, and the
    parameters over a grid whose points are 0.7 posterior standard deviations apart. For
    a normal density, both sums are exact to rounding. The grid extends far to small
    values of ``tau``, where the tempered posterior of its logarithm has a long tail.
    """
    x = np.linspace(-9.0, 9.0, 73)
    log_w = -0.5 * x**2
    log_w -= np.log(np.exp(log_w).sum())

    def log_density(z: jax.Array) -> jax.Array:
        tau = jnp.exp(z[2])
        logits = (X.astype(float) @ z[:2])[..., None] + tau * x
        rows = (Y[..., None] * logits - jax.nn.softplus(logits)).sum(1)
        likelihood = jax.nn.logsumexp(rows + log_w, -1).sum()
        return likelihood / temperature - 0.5 * (z[:2] @ z[:2] + tau**2) + z[2]

    with double():
        gradient = jax.jit(jax.grad(log_density))
        hessian = jax.jit(jax.hessian(log_density))
        z = np.array([0.5, -0.3, 0.0])
        for _ in range(20):
            z = z - np.linalg.solve(hessian(z), gradient(z))
        spread = np.linalg.cholesky(np.linalg.inv(-np.asarray(hessian(z))))
        line = 0.7 * np.arange(-8, 9)
        low = 0.7 * np.arange(-24, 9)
        points = np.stack(np.meshgrid(line, line, low), -1).reshape(-1, 3)
        points = z + points @ spread.T
        log_p = np.asarray(jax.jit(lambda z: jax.lax.map(log_density, z))(points))
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    points[:, 2] = np.exp(points[:, 2])
    mean = p @ points
    return mean, np.sqrt(p @ (points - mean) ** 2)


# kernels without an approximation, with their temperatures and numbers of draws
EXACT: dict[str, tuple[Callable[[], MCMCKernel], float, int]] = {
    "MinibatchMH": (KERNELS["MinibatchMH"], 1.0, 1000),
    "AMAGOLD": (lambda: AMAGOLD(MODEL, batch_size=100), 1.0, 1000),
    "MINT": (KERNELS["MINT"], 5.0, 4000),
    "MHMinibatch": (KERNELS["MHMinibatch"], 5.0, 4000),
    "ReplicaExchange": (KERNELS["ReplicaExchange"], 1.0, 4000),
    "MINTEE": (KERNELS["MINTEE"], 5.0, 4000),
    "CyclicalMINT": (KERNELS["CyclicalMINT"], 5.0, 2000),
}


@pytest.mark.slow
@pytest.mark.long_runs
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_kernel_samples_the_posterior(name: str) -> None:
    kernel, temperature, num_samples = EXACT[name]
    mcmc = MCMC(
        kernel(),
        num_warmup=1000,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), X, Y)
    found = mcmc.get_samples(group_by_chain=True)
    draws = np.concatenate([found["beta"], found["tau"][..., None]], -1)
    mean, sd = reference(temperature)
    draws = (draws.astype(float) - mean) / sd
    # draws that are standardised by the reference have mean zero and mean square one
    for expected, x in ((0.0, draws), (1.0, draws**2)):
        count = effective_sample_size(x)
        assert np.all(count > 200)
        error = x.std((0, 1)) / np.sqrt(count)
        off = (x.mean((0, 1)) - expected) / error
        assert np.all(np.abs(off) < 4)
