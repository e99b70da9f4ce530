"""AMAGOLD's distribution is the target's, whatever the noise of its gradients.

Chains start from exact draws of the target, so that there is no burn-in to argue about:
the distribution must not change, and the scatter between chains gives the Monte Carlo
standard error. The noise of the gradients comes from rows with linear terms that sum to
zero.
"""

from __future__ import annotations

import gradient_problems as problems
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gradient_problems import (
    DATA,
    Energy,
    Plane,
    double_well,
    double_well_line,
    draws_of,
    noisy_target,
    normal_model,
    run,
    scheme,
    second_moments,
    shape_errors,
)
from jax import random
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC

from numpyro_minibatch import (
    AMAGOLD,
    SGHMC,
    Target,
    accept,
    batch,
    dynamics,
    estimate,
    to_inference_data,
)
from numpyro_minibatch.estimate import Reader, Weights

pytestmark = pytest.mark.x64

slow = pytest.mark.slow

FIXED = dict(adapt_step_size=False, adapt_mass_matrix=False)
WELL = noisy_target(double_well, dim=1)


def check(z, limit=5.0):
    """Several standardised errors; a false alarm once in 1e5 runs."""
    assert np.abs(z).max() < limit, z


# the double well of the paper's figure 1 ---


def well_draws(kernel, num_samples=120, chains=1000):
    start = double_well_line().draws(chains)[:, None]
    mcmc = run(kernel, start, num_samples=num_samples)
    return draws_of(mcmc)[:, 20:, 0], mcmc


@slow
@pytest.mark.long_runs
def test_double_well():
    """A hundred thousand draws, on bins of equal probability, against SGHMC's.

    As many independent draws have 8.5e-4.
    """
    step_size = 0.25  # the benchmark has a grid of step sizes
    line = double_well_line()
    assert abs(line.symmetric_kl(line.draws(100_000)) - 8.5e-4) < 5e-4
    settings = dict(target=WELL, batch_size=7, step_size=step_size)
    draws, mcmc = well_draws(AMAGOLD(**settings, **FIXED))
    found = line.symmetric_kl(draws)
    assert found < 0.01
    check(shape_errors(line.uniform(draws)))
    # the noise of the gradients was on, of variance 1
    ratio = np.asarray(mcmc.get_extra_fields()["noise_ratio"])
    assert abs((1 / ratio).mean() / step_size - 1.0) < 0.2

    others = (
        SGHMC(**settings, friction=0.5, integrator="euler"),
        AMAGOLD(**settings, correction=None),
    )
    for other in others:
        draws, _ = well_draws(other)
        assert line.symmetric_kl(draws) > 5 * found
        assert np.abs(shape_errors(line.uniform(draws))).max() > 5


class NoFlip(AMAGOLD):
    """Keeps the momentum of a rejected draw instead of reversing it."""

    def transition(self, target, state):
        new = super().transition(target, state)
        rejected = jnp.all(new.z == state.z)
        momentum = jnp.where(rejected, -new.momentum, new.momentum)
        return new._replace(momentum=momentum)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("flip", marks=pytest.mark.slow),
        pytest.param("thick", marks=slow),
        pytest.param("thick, goes on", marks=slow),
        pytest.param("no friction", marks=slow),
        pytest.param("hot", marks=slow),
    ],
)
def test_invariance(name):
    """Any friction, step size and momentum, where other samplers have conditions."""
    temperature = 1.0
    settings = {
        "flip": dict(step_size=0.7, num_steps=1, friction=0.1, resample_momentum=False),
        # step_size * friction / 2 is 1.2: momenta change their sign
        "thick": dict(step_size=0.3, friction=8.0),
        "thick, goes on": dict(step_size=0.3, friction=8.0, resample_momentum=False),
        "no friction": dict(step_size=0.3, friction=0.0),
        "hot": dict(step_size=0.3, temperature=4.0, resample_momentum=False),
    }[name]
    settings = dict(target=WELL, batch_size=7, **FIXED) | settings
    temperature = settings.get("temperature", 1.0)
    line = problems.Line(lambda z: double_well(z) / temperature, -9.0, 9.0)

    def errors(kernel):
        start = line.draws(500)[:, None]
        mcmc = run(kernel, start, num_samples=150)
        rate = float(mcmc.get_extra_fields()["accept_prob"].mean())
        return shape_errors(line.uniform(draws_of(mcmc)[..., 0])), rate

    z, rate = errors(AMAGOLD(**settings))
    check(z)
    assert 0.4 < rate < 0.95
    if name == "flip":
        # the first bug that this test must detect
        assert np.abs(errors(NoFlip(**settings))[0]).max() > 10


# the two distributions of the paper's figure 2 ---


def banana(z):
    return -0.5 * (z[..., 0] - z[..., 1] ** 2 / 4) ** 2 - z[..., 1] ** 2 / 8


def cross(z):
    square, product = (z**2).sum(-1), z[..., 0] * z[..., 1]
    # the inverse of [[2, 1.8], [1.8, 2]], and of its mirror image
    return jnp.logaddexp(
        -(square - 1.8 * product) / 0.76, -(square + 1.8 * product) / 0.76
    )


PLANES = {
    "Dist1": (banana, [4.0, 0.0], np.diag([1.4, 1.3])),
    "Dist2": (cross, [0.0, 0.0], np.eye(2)),
}


@slow
@pytest.mark.parametrize("name, resample_momentum", [("Dist1", False), ("Dist2", True)])
def test_two_dimensions(name, resample_momentum):
    """Curved and crossed densities, with both kinds of momentum."""
    log_density, center, root = PLANES[name]
    plane = Plane(log_density, np.array(center), root, width=9.0, count=401)
    kernel = AMAGOLD(
        target=noisy_target(log_density, dim=2),
        batch_size=7,
        step_size=0.25,
        resample_momentum=resample_momentum,
        **FIXED,
    )
    start = plane.draws(500)
    check(plane.z_scores(draws_of(run(kernel, start, num_samples=100))))
    if resample_momentum:
        other = SGHMC(
            target=kernel._target,
            batch_size=7,
            step_size=0.25,
            friction=0.5,
            integrator="euler",
        )
        draws = draws_of(run(other, start, num_samples=100))
        assert np.abs(plane.z_scores(draws)).max() > 10


# limits ---


def test_full_batches_without_friction_are_hamiltonian_monte_carlo():
    """The log ratio is the difference of energies of a leapfrog written here."""
    h, steps, temperature = 0.3, 7, 4.0
    energy = Energy(temperature)
    kernel = AMAGOLD(
        normal_model,
        batch=batch.full(50),
        step_size=h,
        friction=0.0,
        num_steps=steps,
        temperature=temperature,
        **FIXED,
    )
    start = problems.start_of(energy.mean + np.array([[1.0, 0.5], [-1.0, 0.3]]))
    state = kernel.init(random.split(random.key(0), 2), 0, {"mu": start}, DATA, {})
    step = jax.jit(lambda state: kernel.sample(state, DATA, {}))

    def total(z, p):
        away = z - energy.mean
        parabola = np.einsum("ci,ij,cj->c", away, energy.curvature, away)
        return 0.5 * (parabola + (p**2).sum(-1)) / temperature

    accepted = 0
    for _ in range(8):
        new = step(state)
        moved = np.abs(np.asarray(new.z["mu"] - state.z["mu"])).max(-1) > 0
        accepted += moved.sum()
        # the reverse path, from the end of the draw with its momentum reversed
        z, p = (np.asarray(x, np.float64) for x in (new.z["mu"], -new.momentum))
        end = total(z, p)
        for _ in range(steps):
            z = z + 0.5 * h * p
            p = p - h * (z - energy.mean) @ energy.curvature
            z = z + 0.5 * h * p
        before = np.asarray(state.z["mu"], np.float64)
        np.testing.assert_allclose(z[moved], before[moved], atol=1e-3)
        found = np.asarray(new.log_ratio)
        np.testing.assert_allclose(found[moved], (total(z, p) - end)[moved], atol=2e-3)
        assert np.isinf(new.noise_ratio).all()
        assert (np.asarray(new.log_ratio_variance) == 0).all()
        state = new
    assert accepted > 8


@pytest.mark.slow
@pytest.mark.parametrize("resample_momentum", [True, False])
def test_without_correction_it_is_sghmc(resample_momentum):
    """The distribution of the midpoint scheme, whose momentum may be drawn anew."""
    width, h, friction, temperature, steps = 20, 0.3, 1.0, 4.0, 5
    energy = Energy(temperature)
    noise = energy.noise(width)
    move, total, _ = scheme(
        "midpoint", energy.curvature, friction, h, temperature, noise
    )
    cov = np.diag([1.0, 1.0, temperature, temperature])
    for _ in range(500):
        for _ in range(steps):
            cov = move @ cov @ move.T + total
        if resample_momentum:
            fresh = np.diag([0.0, 0.0, temperature, temperature])
            cov = np.block([[cov[:2, :2], np.zeros((2, 2))], [fresh[2:]]])
    cov = cov[:2, :2]
    kernel = AMAGOLD(
        normal_model,
        batch_size=width,
        step_size=h,
        friction=friction,
        temperature=temperature,
        num_steps=steps,
        correction=None,
        resample_momentum=resample_momentum,
        adapt_mass_matrix=False,
    )
    start = np.random.default_rng(1).multivariate_normal(energy.mean, cov, 256)
    draws = draws_of(run(kernel, {"mu": start}, *DATA, num_samples=120), "mu")
    check(second_moments(draws[:, 20:], energy.mean, cov))
    assert second_moments(draws[:, 20:], energy.mean, energy.cov).max() > 10


def test_both_parametrisations():
    """The same chains from step size and friction, from h and b, from any variance."""
    common = dict(target=WELL, batch_size=7, num_steps=3, **FIXED)
    h, b, variance = 0.04, 0.05, 9.0
    step_size = np.sqrt(h)
    kernels = [
        AMAGOLD(step_size=step_size, friction=2 * b / step_size, **common),
        AMAGOLD(h=h, b=b, **common),
        AMAGOLD(
            step_size=3 * step_size,
            friction=2 * b / step_size / 3,
            momentum_variance=variance,
            **common,
        ),
    ]
    start = double_well_line().draws(4)[:, None]
    one, *others = (draws_of(run(k, start, num_samples=10)) for k in kernels)
    for other in others:
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


# temperatures ---


@pytest.mark.slow
@pytest.mark.parametrize("temper_prior", [False, pytest.param(True, marks=slow)])
def test_temperature_of_the_prior(temper_prior):
    """A conjugate model at temperature 4, noise on, all rows in the decision."""
    kernel = AMAGOLD(
        normal_model,
        batch_size=20,
        step_size=0.4,
        friction=1.0,
        num_steps=4,
        temperature=4.0,
        temper_prior=temper_prior,
        **FIXED,
    )
    energy, other = Energy(4.0, temper_prior), Energy(4.0, not temper_prior)
    start = np.random.default_rng(1).multivariate_normal(energy.mean, energy.cov, 400)
    mcmc = run(kernel, {"mu": start}, *DATA, num_samples=150)
    draws = draws_of(mcmc, "mu")
    check(second_moments(draws, energy.mean, energy.cov))
    assert np.abs(second_moments(draws, other.mean, other.cov)).max() > 8
    # four gradients of 20 rows, and sometimes four more to measure their noise
    rows = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["num_rows"])
    assert set(np.unique(rows)) == {203 + 80, 203 + 160}


@slow
@pytest.mark.parametrize("temper_prior", [False, True])
def test_jacobians_are_not_tempered(temper_prior):
    """A scale's tempered distribution by quadrature, in its own coordinates."""
    line, start = problems.tempered_scale(4.0, temper_prior)
    kernel = AMAGOLD(
        problems.scale_model,
        batch_size=13,
        step_size=0.15,
        num_steps=4,
        temperature=4.0,
        temper_prior=temper_prior,
        **FIXED,
    )
    mcmc = run(kernel, {"s": np.log(start)}, *problems.SCALE_DATA, num_samples=150)
    check(shape_errors(line.uniform(draws_of(mcmc, "s"))))


# corrections on a minibatch ---

CORRECTIONS = {
    "control variate": dict(control_variate="taylor2", batch_size=60),
    "control variate, barker": dict(
        control_variate="taylor2",
        batch_size=60,
        acceptance=accept.compensated_barker(),
        resample_momentum=False,
    ),
    # few rows are successes: with 200 of 603 their skewness shows in third moments
    "tempered": dict(
        correction="minibatch", batch_size=400, temperature=30.0, step_size=0.15
    ),
    "growing": dict(
        correction=batch.growing(400), batch_size=50, temperature=50.0, step_size=0.2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "control variate",
        pytest.param("control variate, barker", marks=slow),
        pytest.param("tempered", marks=slow),
        # few rows are successes, and batches of them are skewed: the third moment is
        # off by 15 standard errors from 100 rows at T = 10, by 5 from 400 at T = 20
        pytest.param("growing", marks=slow),
    ],
)
def test_minibatch_correction(name):
    """A skewed posterior by quadrature, with noise in the decision too."""
    settings = dict(num_steps=4, **FIXED) | CORRECTIONS[name]
    kernel = AMAGOLD(problems.logistic_model, **settings)
    plane = problems.logistic_plane(kernel.temperature)
    mcmc = run(
        kernel, {"beta": plane.draws(300)}, *problems.LOGISTIC_DATA, num_samples=120
    )
    check(plane.z_scores(draws_of(mcmc, "beta")))
    extra = mcmc.get_extra_fields()
    assert (extra["log_ratio_variance"] > 0).mean() > 0.9
    assert extra["reliable"].mean() > 0.7


# all rows ---

PLATES = {"short": 57, "long": 1330}


def two_plates(z, rows):
    """A prior and rows with a site that makes some of them impossible."""
    from numpyro_minibatch.target import Terms

    return Terms(
        -0.5 * (z @ z),
        {
            "short": -0.5 * (rows["short"] / 57.0 - z[0]) ** 2,
            "long": jnp.where(
                (rows["long"] == 1329) & (z[1] < 0),
                -jnp.inf,
                jnp.sin(z[1] * rows["long"]),
            ),
        },
    )


@pytest.mark.parametrize("chunks", [{"short": 10, "long": 9}, None])
def test_all_rows_from_memory_and_not(chunks, monkeypatch):
    """With and without a cache: the same numbers, those of a sum written here."""
    if chunks:
        whole = batch.full(chunks)
        monkeypatch.setattr(
            Reader,
            "everything",
            lambda self, active: self._replace(
                scheme=whole.bound(chunks, PLATES), active=active
            ),
        )
    scheme = batch.without_replacement().bound({"short": 7, "long": 30}, PLATES)
    reader = Reader(two_plates, PLATES, scheme, Weights(0.5, 0.25))
    rule = estimate.exact(), estimate.exact(0)

    def density(z):
        short = -0.5 * (np.arange(57) / 57 - z[0]) ** 2
        with np.errstate(all="ignore"):
            long = np.sin(z[1] * np.arange(1330.0)).sum()
            long = long if z[1] >= 0 else -np.inf
        return -0.25 * (z @ z) + 0.25 * (short.sum() + long)

    path = [np.array(z) for z in ([0.1, 0.4], [0.3, 0.2], [0.2, -0.1], [-0.4, 0.3])]
    key = random.key(0)
    z = problems.start_of(path[0])
    kept, none = (r.init(reader, key, z) for r in rule)
    for before, after in zip(path, path[1:], strict=False):
        ends = problems.start_of(before), problems.start_of(after)
        one = rule[0].compare(reader, key, *ends, kept, 1.0)
        two = rule[1].compare(reader, key, *ends, none, 1.0)
        kept = one.memory
        truth = density(after) - density(before)
        for found in (one, two):
            np.testing.assert_allclose(found.log_ratio.value, truth, rtol=1e-3)
            assert found.noise == 0 and found.num_rows == sum(PLATES.values())
            log_densities = [density(before), density(after)]
            if np.isfinite(density(before)):
                np.testing.assert_allclose(found.log_density, log_densities, rtol=1e-3)


def test_a_million_rows_in_single_precision():
    """Rows are subtracted before they are summed, so no two large sums are."""
    size, move = 1_000_000, 1e-3
    y = np.random.default_rng(0).normal(3.0, 1.0, size).astype(np.float32)
    rows = jnp.asarray(y)
    target = Target(lambda z: -0.5 * z**2, lambda z, i: -0.5 * (rows[i] - z) ** 2, size)
    scheme = batch.without_replacement().bound({"data": 100}, {"data": size})
    reader = Reader(
        lambda z, rows: target.terms(z[0], rows), {"data": size}, scheme, Weights()
    )
    z, z_new = np.float32(3.001), np.float32(3.001 + move)
    start, end = jnp.asarray([z]), jnp.asarray([z_new])
    exact = np.float64(y).sum() * (np.float64(z_new) - z)
    exact -= 0.5 * (size + 1) * (np.float64(z_new) ** 2 - np.float64(z) ** 2)
    for rule in (estimate.exact(), estimate.exact(0)):

        def ratio(z, z_new, rule=rule):
            memory = rule.init(reader, random.key(0), z)
            seen = rule.compare(reader, random.key(0), z, z_new, memory, 1.0)
            return seen.log_ratio.value

        found = jax.jit(ratio)(start, end)
        assert abs(float(found) - exact) < 1e-3
    whole = jnp.sum(target.log_likelihood(z_new, jnp.arange(size)))
    whole -= jnp.sum(target.log_likelihood(z, jnp.arange(size)))
    assert abs(float(whole) - 0.5 * (z**2 - z_new**2) - exact) > 1e-3


@pytest.mark.parametrize("correction", ["exact", pytest.param("minibatch", marks=slow)])
def test_never_where_the_density_is_nan(correction):
    """A move to such a place is a rejection, whatever the noise of the gradients."""

    def log_likelihood(z, i):
        inside = -0.5 * z**2 / 41 + 0.02 * (i - 20.0) * z
        return jnp.where(z > 0.8, jnp.nan, jnp.where(z < -1.5, -jnp.inf, inside))

    kernel = AMAGOLD(
        target=Target(lambda z: 0.0, log_likelihood, 41),
        batch_size=20,
        step_size=0.4,
        num_steps=3,
        correction=correction,
        resample_momentum=False,
        **FIXED,
    )
    line = problems.Line(lambda z: -0.5 * z[..., 0] ** 2, -1.5, 0.8)
    mcmc = run(kernel, line.draws(400), num_samples=150)
    draws, extra = draws_of(mcmc), mcmc.get_extra_fields()
    assert np.isfinite(draws).all() and -1.5 <= draws.min() and draws.max() <= 0.8
    assert not extra["diverging"].any()
    assert np.isfinite(extra["lp_estimate"]).all()
    if correction == "exact":
        check(shape_errors(line.uniform(draws)))


def test_h_and_b_have_the_momentum_variance_in_them():
    """If they are given, the step is not rescaled."""
    one, other = (
        AMAGOLD(problems.logistic_model, h=0.01, b=0.1, momentum_variance=variance)
        for variance in (1.0, 4.0)
    )
    assert one._step_size == other._step_size == 0.1
    assert one._dynamics == other._dynamics == dynamics.sghmc(2.0, "midpoint")
    adaptation = one._adaptation
    assert not adaptation.adapt_step_size and not adaptation.adapt_mass_matrix


def test_a_design_is_not_replaced_by_even_rows():
    with pytest.raises(ValueError, match="share one design of the rows"):
        AMAGOLD(
            problems.logistic_model,
            control_variate="taylor2",
            correction=batch.growing(100),
        )


# warmup at default settings, from the default start ---


def columns_of_all_scales(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([4]).to_event(1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(x[i] @ beta, 1.0), obs=y[i])


def all_scales(size=1000):
    """Data of columns of scale 0.1 to 10, and mean and covariance of the posterior."""
    rng = np.random.default_rng(3)
    x = np.column_stack([np.ones(size), rng.normal(size=(size, 3)) * [0.1, 1.0, 10.0]])
    y = x @ [1.0, -2.0, 0.5, 0.3] + rng.normal(size=size)
    precision = x.T @ x + np.eye(4) / 100.0
    mean = np.linalg.solve(precision, x.T @ y)
    return (jnp.asarray(x), jnp.asarray(y)), mean, np.linalg.inv(precision)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="all rows"),
        pytest.param(
            {"batch_size": 200, "dense_mass": True},
            id="batches",
            marks=(slow, pytest.mark.long_runs),
        ),
    ],
)
def test_default_settings_need_no_tuning(settings):
    """Chains from the default start find the posterior and explore it."""
    data, mean, cov = all_scales()
    kernel = AMAGOLD(columns_of_all_scales, **settings)
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data, extra_fields=("num_steps", "num_rows"))
    white = (draws_of(mcmc, "beta") - mean) @ np.linalg.inv(np.linalg.cholesky(cov)).T
    assert gelman_rubin(white).max() < 1.01
    size = effective_sample_size(white)
    assert size.min() > 400
    assert np.abs(white.mean((0, 1)) * np.sqrt(size)).max() < 4.5
    error = 1.0 / np.sqrt(2.0 * effective_sample_size(white**2))
    assert (np.abs(white.std((0, 1)) - 1.0) < 4.5 * error).all()
    steps = np.asarray(mcmc.get_extra_fields()["num_steps"])
    if not settings:
        # a trajectory is a few steps long, and its length varies
        assert 1.0 < steps.mean() < 6.0 and len(np.unique(steps)) > 1
        rows = np.asarray(mcmc.get_extra_fields()["num_rows"])
        assert (rows >= 1000 * steps).all()


@pytest.mark.slow
def test_lengths_make_the_slowest_direction_independent():
    """On a normal of scales 1 and 30 that no mass matrix evens out.

    Four chains have 1,130 effective draws of 4,000 with a standard deviation of 240
    between runs, because each chain adapts its lengths. So there are 32.
    """
    scales = jnp.array([1.0, 30.0])
    target = noisy_target(lambda z: -0.5 * ((z / scales) ** 2).sum(-1), dim=2)
    start = np.random.default_rng(0).normal(size=(32, 2)) * [1.0, 30.0]

    def effective_share(**settings):
        kernel = AMAGOLD(
            target=target, batch=batch.full(), adapt_mass_matrix=False, **settings
        )
        draws = draws_of(run(kernel, start, num_warmup=500, num_samples=1000))
        return effective_sample_size(draws[..., 1:])[0] / draws[..., 0].size

    # 0.26 to 0.31 in four runs, two in each precision; 0.28 is the mean of their groups
    # of four chains, and 0.02 the standard error of one run
    assert effective_share() > 0.2
    assert effective_share(num_steps=10, friction=0.5) < 0.05  # the control


@pytest.mark.parametrize("temperature, rows", [(1.0, 10_000), (1e4, 100), (10.0, 3000)])
def test_the_temperature_chooses_the_batch(temperature, rows):
    x, y = jnp.ones((10_000, 4)), jnp.zeros(10_000)
    kernel = AMAGOLD(columns_of_all_scales, temperature=temperature)
    kernel._setup((x, y), {})
    assert kernel.batch_sizes == {"data": rows}
    assert kernel.bound_scheme.reads_all_rows == (rows == 10_000)


@slow
def test_chains_start_far_from_a_plateau():
    """From the default start, long trajectories would fly to a scale of zero.

    There the likelihood of the intercepts does not depend on the scale, and no force
    leads back. One long trajectory gains thousands of units of kinetic energy here.
    """
    rng = np.random.default_rng(0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    log_w = jnp.log(jnp.asarray(weights / weights.sum()))
    x = rng.normal(size=(600, 4))
    logits = 0.5 + 0.7 * x + 0.8 * rng.normal(size=(600, 1))
    y = jnp.asarray(rng.uniform(size=x.shape) < 1 / (1 + np.exp(-logits)), float)

    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", len(y)) as i:
            at = (mu + b * x[i])[..., None] + tau * jnp.asarray(nodes)
            each = y[i][..., None] * at - jax.nn.softplus(at)
            numpyro.factor("y", jax.nn.logsumexp(each.sum(1) + log_w, -1))

    mcmc = MCMC(
        AMAGOLD(model),
        num_warmup=100,
        num_samples=1,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(jax.random.key(1), jnp.asarray(x), y, collect_warmup=True)
    tau = np.asarray(mcmc.get_samples(group_by_chain=True)["tau"])
    # chains that fly are below 0.01 there, and return much later if at all
    assert tau[:, 40:].min() > 0.05, tau[:, 40]


@pytest.mark.slow
def test_short_steps_end_stays_where_the_adapted_step_is_too_long(monkeypatch):
    """Five standard deviations a step are unstable, and a third of that is not."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 10))
        with numpyro.plate("data", len(y)) as idx:
            numpyro.sample("obs", dist.Normal(mean, 1), obs=y[idx])

    y = jnp.asarray(np.random.default_rng(3).normal(size=100))

    def moves():
        kernel = AMAGOLD(model, step_size=0.5)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=300, progress_bar=False)
        start = {"mean": y.mean() + 0.1}
        mcmc.run(jax.random.key(0), y, init_params=start)
        mean = np.asarray(mcmc.get_samples()["mean"])
        steps = to_inference_data(mcmc).sample_stats["step_size"].to_numpy().ravel()
        return np.diff(mean) != 0, steps[1:]

    moved, steps = moves()
    short = steps < 0.4
    np.testing.assert_allclose(np.unique(steps), [0.5 / 3, 0.5], rtol=1e-6)
    assert abs(short.mean() - 1 / 8) < 4 * np.sqrt(7 / 64 / len(short))
    assert moved[short].mean() > 0.3
    assert moved[~short].mean() < 0.02
    monkeypatch.setattr(
        "numpyro_minibatch.kernels._shared.adaptation._SHORT_SHARE", 0.0
    )
    assert moves()[0].mean() < 0.02
