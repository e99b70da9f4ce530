"""The kernels' distributions against closed forms and quadrature, minibatch noise on.

Many independent chains start from exact draws of the target, so that there is no
burn-in to argue about: the distribution must not change, and the scatter between chains
gives the Monte Carlo standard error.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_minibatch import (
    MINT,
    MHMinibatch,
    MinibatchMH,
    accept,
    batch,
    proposal,
)
from numpyro_minibatch.batch import Scheme

pytestmark = pytest.mark.x64  # in double precision, too

slow = pytest.mark.slow

N, D, M, SIGMA = 1003, 3, 100, 1.5
_rng = np.random.default_rng(5)
X = _rng.normal(size=(N, D)) @ np.array([[1.0, 0.6, 0.0], [0, 1, 0.3], [0, 0, 0.5]])
Y = X @ np.array([1.0, -0.5, 2.0]) + SIGMA * _rng.normal(size=N)
DATA = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
PRIOR_SD = 2.0


def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, PRIOR_SD).expand([D]).to_event(1))
    with numpyro.plate("data", N, subsample_size=M) as idx:
        numpyro.sample("obs", dist.Normal(x[idx] @ beta, SIGMA), obs=y[idx])


def split_model(x, y):
    """The same likelihood, its rows in two plates and an observed site outside."""
    beta = numpyro.sample("beta", dist.Normal(0, PRIOR_SD).expand([D]).to_event(1))
    with numpyro.plate("first", 600, subsample_size=70) as i:
        numpyro.sample("a", dist.Normal(x[i] @ beta, SIGMA), obs=y[i])
    with numpyro.plate("second", 400, subsample_size=41) as j:
        numpyro.sample("b", dist.Normal(x[600 + j] @ beta, SIGMA), obs=y[600 + j])
    numpyro.sample("c", dist.Normal(x[1000:] @ beta, SIGMA).to_event(1), obs=y[1000:])


def posterior(temperature, temper_prior=False):
    """Mean and covariance of the tempered posterior of the linear model."""
    weight = np.full(N, 1.0 / temperature)
    prior = 1.0 / (temperature if temper_prior else 1.0)
    precision = (X.T * weight) @ X / SIGMA**2 + prior * np.eye(D) / PRIOR_SD**2
    cov = np.linalg.inv(precision)
    return cov @ (X.T @ (weight * Y)) / SIGMA**2, cov


def run(kernel, mean, cov, *, num_chains=256, num_samples=600, data=DATA, name="beta"):
    """Draws, chains x draws x D, of chains that start in the target."""
    start = np.random.default_rng(11).multivariate_normal(mean, cov, num_chains)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    init = {name: jnp.asarray(start, jnp.result_type(float))}
    mcmc.run(random.key(12), *data, init_params=init)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)[name], np.float64)
    return draws, extra


def z_scores(draws, mean, cov):
    """Standardised errors of the means, variances and covariances."""
    root = np.linalg.inv(np.linalg.cholesky(cov))
    white = (draws - mean) @ root.T
    i, j = np.triu_indices(mean.size)
    second = white[..., i] * white[..., j] - (i == j)
    moments = np.concatenate([white, second], axis=-1).mean(1)
    return moments.mean(0) / (moments.std(0, ddof=1) / np.sqrt(len(moments)))


def check(draws, mean, cov):
    """Nine moments; a false alarm once in 2e5 runs."""
    z = z_scores(draws, mean, cov)
    assert np.abs(z).max() < 5.0, z


# no kernel adapts anything here: its distribution is the same from the first draw on
FIXED = dict(adapt_step_size=False, adapt_mass_matrix=False)
KERNELS = {
    "shared batch": MINT(model, temperature=50.0, step_size=0.25, **FIXED),
    "shared batch, T=1": MINT(model, temperature=1.0, step_size=0.006, **FIXED),
    "with replacement": MINT(
        model,
        batch=batch.with_replacement(M),
        temperature=50.0,
        step_size=0.25,
        **FIXED,
    ),
    "large share of the rows": MINT(
        model, batch_size=700, temperature=8.0, step_size=0.15, **FIXED
    ),
    "inner steps": MINT(model, temperature=50.0, step_size=0.25, num_steps=4, **FIXED),
    "langevin": MINT(
        model,
        temperature=50.0,
        step_size=0.25,
        proposal=proposal.langevin(),
        **FIXED,
    ),
    "pilot": MHMinibatch(model, temperature=10.0, step_size=0.15, **FIXED),
    "pilot, small increments": MHMinibatch(
        model, batch_size=50, temperature=10.0, step_size=0.1, **FIXED
    ),
    "growing, metropolis": MinibatchMH(
        model,
        batch=batch.growing(200),
        acceptance=accept.penalty(max_variance=0.5),
        temperature=10.0,
        step_size=0.1,
        **FIXED,
    ),
    "exact": MinibatchMH(
        model, estimate="exact", temperature=5.0, step_size=0.2, **FIXED
    ),
    "exact in chunks, langevin": MinibatchMH(
        model,
        batch=batch.full(100),
        temperature=5.0,
        step_size=0.2,
        proposal=proposal.langevin(),
        **FIXED,
    ),
    "exact barker": MinibatchMH(
        model,
        estimate="exact",
        acceptance=accept.barker(),
        temperature=5.0,
        step_size=0.2,
        **FIXED,
    ),
}


MARKS = dict.fromkeys(KERNELS, slow) | {
    "shared batch": pytest.mark.slow,
    "exact barker": (),
    "pilot": pytest.mark.slow,
    "langevin": pytest.mark.slow,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()]
)
def test_conjugate(name):
    kernel = KERNELS[name]
    mean, cov = posterior(kernel.temperature)
    slow = "exact" in name or "growing" in name or "pilot" in name
    draws, extra = run(kernel, mean, cov, num_samples=300 if slow else 600)
    check(draws, mean, cov)
    assert not extra["diverging"].any()
    assert extra["reliable"].mean() > 0.7
    if "exact" not in name:
        assert (extra["log_ratio_variance"] > 0).mean() > 0.9  # the noise was on


@pytest.mark.slow
def test_augmented():
    """The augmented chain is exact too, at temperatures that keep it moving."""
    # T >= N sd / sqrt(m): the rows' log likelihoods have sd about 0.7
    temperature = 120.0
    kernel = MINT(
        model, estimate="augmented", temperature=temperature, step_size=0.3, **FIXED
    )
    mean, cov = posterior(temperature)
    draws, extra = run(kernel, mean, cov, num_samples=1200)
    # the first kept estimate is not stationary, so a burn-in is left out
    check(draws[:, 300:], mean, cov)


@slow
def test_tempered_prior():
    kernel = MINT(model, temperature=50.0, temper_prior=True, step_size=0.3, **FIXED)
    mean, cov = posterior(50.0, temper_prior=True)
    draws, _ = run(kernel, mean, cov)
    check(draws, mean, cov)
    other_mean, other_cov = posterior(50.0)
    assert np.abs(z_scores(draws, other_mean, other_cov)).max() > 8


@pytest.mark.slow
def test_several_plates_and_a_site_outside():
    """Estimates and variances of two plates add; observed sites share a temperature."""
    kernel = MINT(split_model, temperature=20.0, step_size=0.15, **FIXED)
    mean, cov = posterior(20.0)
    draws, extra = run(kernel, mean, cov)
    check(draws, mean, cov)
    assert (extra["num_rows"] == 111).all()


@slow
@pytest.mark.parametrize("sizes", [{"first": 70}, {"second": 41}])
def test_the_distribution_does_not_depend_on_which_plates_are_subsampled(sizes):
    """A plate that is read in full has the same temperature."""

    def full_plates(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, PRIOR_SD).expand([D]).to_event(1))
        with numpyro.plate("first", 600) as i:
            numpyro.sample("a", dist.Normal(x[i] @ beta, SIGMA), obs=y[i])
        with numpyro.plate("second", 403) as j:
            rows = 600 + j
            numpyro.sample("b", dist.Normal(x[rows] @ beta, SIGMA), obs=y[rows])

    kernel = MINT(
        full_plates, batch_size=sizes, temperature=30.0, step_size=0.2, **FIXED
    )
    mean, cov = posterior(30.0)
    draws, _ = run(kernel, mean, cov)
    check(draws, mean, cov)


@pytest.mark.slow
@pytest.mark.parametrize("temper_prior", [False, True])
def test_jacobians_are_not_tempered(temper_prior):
    """A scale's tempered distribution by quadrature, in its own coordinates."""
    size, temperature = 200, 50.0
    y = 1.7 * np.random.default_rng(2).normal(size=size)

    def scale_model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("data", size, subsample_size=50) as i:
            numpyro.sample("y", dist.Normal(0.0, s), obs=y[i])

    grid = np.linspace(1e-3, 12.0, 200_001)
    power = 1.0 / temperature if temper_prior else 1.0
    log_density = -0.5 * power * grid**2
    log_density += (-size * np.log(grid) - 0.5 * (y @ y) / grid**2) / temperature
    density = np.exp(log_density - log_density.max())
    density /= density.sum()

    kernel = MINT(
        scale_model,
        temperature=temperature,
        temper_prior=temper_prior,
        step_size=0.4,
        **FIXED,
    )
    start = np.random.default_rng(3).choice(grid, 256, p=density)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=800,
        num_chains=256,
        chain_method="vectorized",
        progress_bar=False,
    )
    init = {"s": jnp.asarray(np.log(start), jnp.result_type(float))}
    mcmc.run(random.key(1), jnp.asarray(y, jnp.float32), init_params=init)
    s = np.asarray(mcmc.get_samples(group_by_chain=True)["s"], np.float64)
    for statistic in (np.log, lambda v: v):
        truth = (statistic(grid) * density).sum()
        per_chain = statistic(s).mean(1)
        se = per_chain.std(ddof=1) / np.sqrt(len(per_chain))
        assert abs(per_chain.mean() - truth) < 5 * se


@slow
def test_noise_without_penalty_is_noticed():
    """The paper's uncorrected test flattens the target, and the check detects it."""
    settings = dict(temperature=50.0, step_size=0.25, **FIXED)
    mean, cov = posterior(50.0)
    draws, extra = run(MINT(model, penalty=False, **settings), mean, cov)
    z = z_scores(draws, mean, cov)
    assert z.max() > 8
    assert extra["reliable"].mean() < 0.05


@slow
def test_forgotten_finite_population_is_noticed():
    """A variance without the finite-population factor cools the chain."""

    class Forgetful(Scheme):
        def fpc(self, count, size):
            return 1.0

    mean, cov = posterior(8.0)
    kernel = MINT(model, batch=Forgetful(700), temperature=8.0, step_size=0.3, **FIXED)
    draws, _ = run(kernel, mean, cov)
    assert z_scores(draws, mean, cov).min() < -8


@slow
def test_forgotten_q_ratio_is_noticed(monkeypatch):
    """Langevin steps without their proposal ratio fail the check."""
    kernel = MinibatchMH(
        model,
        batch=batch.full(),
        temperature=5.0,
        step_size=0.13,
        proposal=proposal.langevin(),
        **FIXED,
    )
    mean, cov = posterior(5.0)
    propose = type(kernel._proposal).propose

    def forgetful(self, *args):
        proposed = propose(self, *args)
        return proposed._replace(log_q_ratio=jnp.zeros_like(proposed.log_q_ratio))

    monkeypatch.setattr(type(kernel._proposal), "propose", forgetful)
    draws, _ = run(kernel, mean, cov, num_samples=300)
    assert np.abs(z_scores(draws, mean, cov)).max() > 8


@slow
def test_sequential_growth_is_biased_as_documented():
    """Stopping at a small sample variance under-estimates the noise."""
    settings = dict(batch_size=10, temperature=50.0, step_size=0.35, **FIXED)
    mean, cov = posterior(50.0)
    size = dict(num_chains=64, num_samples=2000)
    draws, _ = run(MHMinibatch(model, sequential=True, **settings), mean, cov, **size)
    assert np.abs(z_scores(draws, mean, cov)).max() > 5


# two modes: the tied means of the MINT paper ---------------------------------------

TIED_N, TIED_T = 5_003, 125.0


@cache
def tied_means_data():
    rng = np.random.default_rng(3)
    shift = rng.integers(0, 2, TIED_N)
    return jnp.asarray(shift + np.sqrt(2.0) * rng.normal(size=TIED_N), jnp.float32)


def tied_means(x):
    theta1 = numpyro.sample("theta1", dist.Normal(0, np.sqrt(10.0)))
    theta2 = numpyro.sample("theta2", dist.Normal(0, 1))
    with numpyro.plate("data", TIED_N, subsample_size=200) as i:
        numpyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(probs=jnp.array([0.5, 0.5])),
                dist.Normal(jnp.stack([theta1, theta1 + theta2]), np.sqrt(2.0)),
            ),
            obs=x[i],
        )


@cache
def tied_means_grid():
    """The tempered posterior on a grid: points, weights."""
    x = np.asarray(tied_means_data(), np.float64)
    counts, edges = np.histogram(x, bins=4000)
    middle = 0.5 * (edges[1:] + edges[:-1])
    a, b = np.meshgrid(np.linspace(-3, 4, 281), np.linspace(-5, 5, 321), indexing="ij")
    log_density = -0.5 * (a**2 / 10 + b**2)
    for m, c in zip(middle[counts > 0], counts[counts > 0], strict=True):
        rows = np.logaddexp(-0.25 * (m - a) ** 2, -0.25 * (m - a - b) ** 2)
        log_density += c * rows / TIED_T
    weights = np.exp(log_density - log_density.max())
    return a, b, weights / weights.sum()


@slow
@pytest.mark.parametrize(
    "kernel",
    [
        MINT(tied_means, temperature=TIED_T, step_size=0.5, num_steps=5, **FIXED),
        MHMinibatch(
            tied_means, temperature=TIED_T, step_size=0.5, num_steps=5, **FIXED
        ),
    ],
    ids=["MINT", "MHMinibatch"],
)
def test_tied_means_mixture(kernel):
    """Mode weights and moments of a bimodal target against quadrature."""
    a, b, weights = tied_means_grid()
    rng = np.random.default_rng(4)
    picked = rng.choice(weights.size, 64, p=weights.ravel())
    start = {
        "theta1": jnp.asarray(a.ravel()[picked], jnp.float32),
        "theta2": jnp.asarray(b.ravel()[picked], jnp.float32),
    }
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=500,
        num_chains=64,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(6), tied_means_data(), init_params=start)
    draws = mcmc.get_samples(group_by_chain=True)
    t1, t2 = (np.asarray(draws[n], np.float64) for n in ("theta1", "theta2"))
    for statistic in (
        lambda u, v: u,
        lambda u, v: v,
        lambda u, v: u * u,
        lambda u, v: v * v,
        lambda u, v: u * v,
        lambda u, v: (v > 0) * 1.0,
    ):
        truth = (statistic(a, b) * weights).sum()
        per_chain = statistic(t1, t2).mean(1)
        se = per_chain.std(ddof=1) / np.sqrt(len(per_chain))
        assert abs(per_chain.mean() - truth) < 5 * se
    assert mcmc.get_extra_fields()["reliable"].mean() > 0.6


# distant and impossible positions -------------------------------------------------


@slow
def test_impossible_proposals_are_rejections():
    """With a likelihood of NaN or zero beyond a bound, no draw is there."""

    def bounded(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", 40, subsample_size=10) as i:
            log_density = jnp.where(mu > 0.5, jnp.nan, -0.5 * (y[i] - mu) ** 2)
            numpyro.factor("y", jnp.where(mu < -0.5, -jnp.inf, log_density))

    for kernel in (
        MINT(bounded, temperature=40.0, step_size=1.0, **FIXED),
        MHMinibatch(bounded, temperature=40.0, step_size=1.0, **FIXED),
        MinibatchMH(bounded, estimate="exact", step_size=1.0, **FIXED),
    ):
        start = jnp.linspace(-0.4, 0.4, 50)
        draws, extra = run_bounded(kernel, start)
        assert np.abs(draws).max() <= 0.5
        assert not extra["diverging"].any()
        assert len(np.unique(draws)) > 100


@slow
def test_chains_escape_an_impossible_start():
    """If no row is possible at the start, the first possible move is certain."""

    def bounded(y, which=slice(None)):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", 40, subsample_size=20) as i:
            log_density = -0.5 * (y[i] - mu) ** 2
            impossible = jnp.zeros(40, bool).at[which].set(mu < 0)[i]
            numpyro.factor("y", jnp.where(impossible, -jnp.inf, log_density))

    y = jnp.zeros(40)
    for kernel in (
        MINT(bounded, temperature=40.0, step_size=1.0, **FIXED),
        MHMinibatch(bounded, temperature=40.0, step_size=1.0, **FIXED),
        MinibatchMH(bounded, estimate="exact", step_size=1.0, **FIXED),
    ):
        start = kernel.init(random.key(0), 0, {"mu": jnp.array(0.5)}, (y,), {})
        # the exact kernel remembers the log likelihood of its position
        memory = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), start.memory)
        start = start._replace(z={"mu": jnp.array(-0.5)}, memory=memory)

        def chain(key, kernel=kernel, start=start):
            def step(state, _):
                state = kernel.sample(state, (y,), {})
                return state, state.z["mu"]

            state = start._replace(rng_key=key)
            return jax.lax.scan(step, state, None, length=200)[1]

        draws = jax.jit(jax.vmap(chain))(random.split(random.key(0), 50))
        possible = np.asarray(draws) > 0
        assert possible.any(axis=1).all()
        assert (np.diff(possible.astype(int), axis=1) >= 0).all()
        with pytest.raises(ValueError, match=r"rows \[7\]"):
            kernel.init(random.key(0), 0, {"mu": jnp.array(-0.5)}, (y, 7), {})


@slow
def test_augmented_adaptation_does_not_collapse():
    """If the noise limits the acceptance rate, the step size does not go to zero."""
    kernel = MINT(model, estimate="augmented", temperature=60.0)
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=500,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(3), *DATA)
    extra = mcmc.get_extra_fields()
    assert (
        extra["log_ratio_variance"].mean() > 2 * 1.46**2
    )  # the target rate is out of reach
    assert (extra["step_size"] > 0.05).all()
    assert extra["reliable"].mean() < 0.2


def test_hand_written_targets_with_several_plates():
    """A Target with a dict of sizes runs under the driver and has a hash."""
    from numpyro_minibatch import Target

    x = jnp.asarray(np.random.default_rng(0).normal(size=300), jnp.float32)

    def make():
        return Target(log_prior, log_likelihood, {"a": 200, "b": 100})

    def log_prior(z):
        return -0.5 * z**2

    def log_likelihood(z, i):
        return {
            "a": -0.5 * (x[i["a"]] - z) ** 2,
            "b": -0.5 * (x[200 + i["b"]] - z) ** 2,
        }

    kernel = MINT(
        target=make(), batch_size=40, temperature=30.0, step_size=0.3, **FIXED
    )
    assert hash(make()) == hash(make())
    assert make() == make()
    precision = 1 + 300 / 30.0
    truth = float(x.sum()) / 30.0 / precision
    rng = np.random.default_rng(1)
    start = truth + rng.normal(size=128) / np.sqrt(precision)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=800,
        num_chains=128,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), init_params=jnp.asarray(start, jnp.result_type(float)))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), np.float64)[..., None]
    check(draws, np.array([truth]), np.array([[1 / precision]]))


def run_bounded(kernel, start):
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=50,
        num_chains=len(start),
        chain_method="vectorized",
        progress_bar=False,
    )
    y = jnp.asarray(np.random.default_rng(0).normal(size=40), jnp.float32)
    mcmc.run(random.key(0), y, init_params={"mu": start})
    return np.asarray(mcmc.get_samples()["mu"]), mcmc.get_extra_fields()


def test_adaptation_reaches_its_target():
    """Warmup finds the step size for the requested acceptance rate."""
    kernel = MINT(model, temperature=200.0, target_accept_prob=0.4, dense_mass=True)
    mcmc = MCMC(
        kernel,
        num_warmup=1500,
        num_samples=2000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(3), *DATA)
    rate = mcmc.get_extra_fields()["accept_prob"].mean()
    assert abs(float(rate) - 0.4) < 0.08
    _, cov = posterior(200.0)
    adapted = np.asarray(mcmc.last_state.adapt_state.inverse_mass_matrix).mean(0)
    assert np.abs(adapted / cov - 1)[np.diag_indices(D)].max() < 0.5


def test_vectorized_iteration_count_is_shared():
    """Chains share one counter, so adaptation is a branch that most draws skip."""
    kernel = MINT(model, temperature=50.0)
    state = kernel.init(random.split(random.key(0), 3), 10, None, DATA, {})
    moved = jax.jit(lambda s: kernel.sample(s, DATA, {}))(state)
    np.testing.assert_array_equal(moved.i, [1, 1, 1])
    assert moved.num_rows.shape == (3,)


def test_large_data_as_constants_are_warned_of(monkeypatch):
    """NumPyro's driver compiles data into the program unless told otherwise."""
    monkeypatch.setattr("numpyro_minibatch.kernels._shared.driver._LARGE", 1000)

    def run_with(**options):
        kernel = MINT(model, temperature=50.0, **FIXED)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False, **options)
        mcmc.run(random.key(0), *DATA)

    run_with(jit_model_args=True)
    with pytest.warns(UserWarning, match="jit_model_args=True"):
        run_with()
