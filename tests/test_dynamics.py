"""Dynamics and the kernels made of them, compared with their theoretical bias.

On a quadratic potential every scheme except the thermostat is linear. Its stationary
second moments solve a discrete Lyapunov equation, whatever the distribution of the
gradient noise. The tests check the exact bias, and that its leading order is the known
one.
"""

from __future__ import annotations

import gradient_problems as problems
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradient_problems import (
    DATA,
    Energy,
    draws_of,
    normal_model,
    run,
    scheme,
    second_moments,
    settled,
    standardised,
)
from jax import random
from scipy.integrate import quad

from numpyro_minibatch import (
    SGHMC,
    SGLD,
    SGNHT,
    Target,
    batch,
    dynamics,
    preconditioner,
    schedule,
)
from numpyro_minibatch.dynamics import (
    _SGHMC,
    Kicked,
    Thermostat,
    _NoseHoover,
    _thermal,
)
from numpyro_minibatch.kernels import langevin
from numpyro_minibatch.kernels._shared import gradient_steps as path
from numpyro_minibatch.preconditioner import Whitening

pytestmark = pytest.mark.x64

slow = pytest.mark.slow

CURVATURE = np.array([[1.3, 0.4, 0.0], [0.4, 0.8, -0.2], [0.0, -0.2, 0.5]])
ROOT = np.array([[1.2, 0.3, -0.1], [0.0, 0.7, 0.2], [0.0, 0.0, 0.9]])


def made(name, friction):
    return dynamics.sgld() if name == "sgld" else dynamics.sghmc(friction, name)


def stepped(rule, h, temperature, root, curvature=CURVATURE):
    """One step in white coordinates: ``(key, (w, p), gradient noise) -> (w, p)``."""
    whitening = Whitening(jnp.asarray(root))
    has_momentum = not isinstance(rule, type(dynamics.sgld()))
    is_kicked = getattr(rule, "integrator", "") == "baoab"
    dim = len(curvature)

    def step(key, state, noise):
        def force(z):
            return -0.5 * z @ curvature @ z, -curvature @ z + noise

        w, p = state[:dim], state[dim:]
        memory = p if has_momentum else ()
        if is_kicked:  # the whole kick is at the end of a step, none at its start
            memory = Kicked(p, jnp.zeros_like(p))
        moved = rule.step(
            key, whitening.color(w), memory, force, h, temperature, whitening
        )
        after = moved.memory
        if is_kicked:
            after = after.momentum + 0.5 * h * moved.gradient
        return jnp.concatenate([whitening.whiten(moved.z), *([after] * has_momentum)])

    return step, dim * (1 + has_momentum)


def errors_of_one_step(rule, name, friction, temperature, root, h=0.35, keys=40_000):
    """Relative errors of the maps, and standard errors of the injected covariance."""
    matrix = root if root.ndim == 2 else np.diag(root)
    white = matrix @ CURVATURE @ matrix.T
    no_noise = np.zeros((3, 3))
    move, inject, kick = scheme(name, white, friction, h, temperature, no_noise)
    step, size = stepped(rule, h, temperature, root)
    key, still, silent = random.key(0), jnp.zeros(size), jnp.zeros(3)
    map_error = jax.jacfwd(step, 1)(key, still, silent) - move
    kick_error = jax.jacfwd(step, 2)(key, still, silent) - kick @ matrix
    found = jax.jit(jax.vmap(lambda key: step(key, still, silent)))(
        random.split(random.key(1), keys)
    )
    found = np.asarray(found, np.float64)
    products = found[:, :, None] * found[:, None, :]
    spread = np.sqrt(np.outer(np.diag(inject), np.diag(inject)) + inject**2)
    useful = spread > 1e-12
    noise_error = (products.mean(0) - inject)[useful] / spread[useful] * np.sqrt(keys)
    assert np.abs(found).max(0)[np.diag(inject) == 0].sum() == 0
    return np.abs(map_error).max(), np.abs(kick_error).max(), np.abs(noise_error).max()


DIAGONAL = np.array([0.6, 1.0, 1.4])
SETTINGS = [
    ("sgld", 1.0, 4.0, ROOT),
    *((name, 0.1, 4.0, ROOT) for name in ("baoab", "midpoint", "euler")),
    *((name, 10.0, 1.0, DIAGONAL) for name in ("baoab", "midpoint", "euler")),
]


@pytest.mark.parametrize("name, friction, temperature, root", SETTINGS)
def test_one_step(name, friction, temperature, root):
    """The map of a step, the effect of gradient noise, and the injected noise."""
    rule = made(name, friction)
    move, kick, noise = errors_of_one_step(rule, name, friction, temperature, root)
    assert max(move, kick) < (1e-12 if jax.config.jax_enable_x64 else 2e-5)
    assert noise < 5


MOMENTA = [
    (dynamics.sghmc(0.7), False),
    (dynamics.sghmc(0.7, "midpoint"), False),
    (dynamics.nose_hoover(0.7), False),
    # momentum and position are half a step apart
    (dynamics.sghmc(0.7, "euler"), True),
]


@pytest.mark.parametrize("rule, is_biased", MOMENTA)
def test_momenta_may_be_drawn_anew_after_every_step(rule, is_biased):
    """Each step begins with a new momentum, as after swaps of positions.

    If the momentum is half a step from its position, this is wrong at any step size.
    """
    h, k, temperature, chains, steps = 0.2, 1.3, 4.0, 2000, 400
    whitening = Whitening(jnp.ones(1))
    first = problems.start_of(
        np.sqrt(temperature / k) * np.random.default_rng(0).normal(size=(chains, 1))
    )

    def force(z):
        return -0.5 * k * (z @ z), -k * z

    def chain(key, z):
        def body(carry, key):
            z, memory = carry
            ours, theirs = random.split(key)
            memory = rule.refresh(ours, z, memory, memory, temperature)
            moved = rule.step(theirs, z, memory, force, h, temperature, whitening)
            return (moved.z, moved.memory), jnp.square(moved.z[0])

        start = (z, rule.init(key, z, temperature))
        return jax.lax.scan(body, start, random.split(key, steps))[1][100:].mean()

    squares = jax.jit(jax.vmap(chain))(random.split(random.key(1), chains), first)
    squares = np.asarray(squares, np.float64) * k / temperature
    error = squares.std(ddof=1) / np.sqrt(chains)
    # the error of the splitting is of order h ** 2
    is_right = abs(squares.mean() - 1.0) < 5 * error + h**2 * k
    assert is_right != is_biased, (squares.mean(), error)


def test_two_half_kicks_are_one():
    """The second step begins with the force that the first one ended with."""
    h, temperature = 0.35, 4.0
    step, size = stepped(made("baoab", 0.7), h, temperature, ROOT)
    keys, silent = random.split(random.key(0)), jnp.zeros(3)
    white = jnp.asarray(np.random.default_rng(0).normal(size=size))
    expected = step(keys[1], step(keys[0], white, silent), silent)
    whitening = Whitening(jnp.asarray(ROOT))

    def force(z):
        return -0.5 * z @ CURVATURE @ z, -CURVATURE @ z

    z, memory = whitening.color(white[:3]), Kicked(white[3:], jnp.zeros(3))
    for key in keys:
        moved = made("baoab", 0.7).step(
            key, z, memory, force, h, temperature, whitening
        )
        z, memory = moved.z, moved.memory
    np.testing.assert_allclose(whitening.whiten(z), expected[:3], rtol=1e-4)
    np.testing.assert_allclose(
        memory.momentum + 0.5 * h * moved.gradient, expected[3:], rtol=1e-4
    )


class Squared(_SGHMC):
    """Noise of ``friction * sqrt(2 h)`` in place of ``sqrt(2 friction h)``."""

    def step(self, key, z, memory, force, step_size, temperature, whitening):
        # correct at a friction of one, so that value cannot reveal the bug
        heat = self.friction * temperature
        return super().step(key, z, memory, force, step_size, heat, whitening)


def test_noise_that_grows_with_the_friction_is_noticed():
    """A known bug: invisible at a friction of one, not at others."""

    def noise_error(friction):
        rule = Squared(friction, "euler")
        return errors_of_one_step(rule, "euler", friction, 4.0, ROOT)[2]

    assert noise_error(1.0) < 5
    assert noise_error(0.1) > 100


def test_stationary_covariances_of_linear_schemes():
    """The bias in closed form, exact or to leading order."""
    temperature, k, noise = 4.0, 1.7, 3.0

    def variance(name, friction, h, noise=noise):
        args = np.array([[k]]), friction, h, temperature, np.array([[noise]])
        return settled(name, *args)[0, 0]

    for h in (0.1, 0.6):
        exact = (temperature + h * noise / 2) / k / (1 - h * k / 2)
        np.testing.assert_allclose(variance("sgld", 1.0, h), exact)
        for friction in (0.1, 1.0, 10.0):
            exact = variance("baoab", friction, h, noise=0.0)
            np.testing.assert_allclose(exact, temperature / k)
    for name in ("baoab", "midpoint", "euler"):
        for friction in (0.1, 1.0, 10.0):

            def excess(h, name=name, friction=friction):
                return variance(name, friction, h) * k - temperature

            h = 1e-3 / max(friction, 1.0)
            leading = h * noise / (2 * friction)
            # euler has one of the same order without noise, of T k h / (2 friction)
            discretisation = variance(name, friction, h, noise=0.0) * k - temperature
            assert abs(excess(h) - discretisation - leading) < 0.02 * leading


@pytest.mark.parametrize("name", ["sgld", "baoab", "midpoint", "euler"])
def test_injected_noise_and_the_temperature_that_gradients_add(name):
    """``injected`` gives the relative error of the temperature to leading order."""
    friction, h, temperature, k, noise = 0.7, 1e-3, 4.0, 1.7, 30.0
    rule = made(name, friction)
    args = np.array([[k]]), friction, h, temperature
    noisy = settled(name, *args, np.array([[noise]]))[0, 0]
    quiet = settled(name, *args, np.zeros((1, 1)))[0, 0]
    ratio = float(rule.injected(h, temperature)) / noise
    assert abs((noisy / quiet - 1) * ratio - 1) < 0.01


@pytest.mark.parametrize("name", ["sgld", "baoab", "midpoint", "euler"])
def test_zero_temperature_is_gradient_ascent(name):
    """Without noise, friction reduces the momentum."""
    friction, h = 2.0, 0.1
    rule = made(name, friction)
    step, size = stepped(rule, h, 0.0, np.eye(3), np.eye(3))
    state = jnp.arange(1.0, size + 1)
    one, other = (step(random.key(i), state, jnp.zeros(3)) for i in range(2))
    np.testing.assert_array_equal(one, other)
    if name == "sgld":
        np.testing.assert_allclose(one, (1 - h) * state, rtol=1e-5)
    elif name == "euler":
        z, p = np.split(np.asarray(state), 2)
        p = (1 - friction * h) * p - h * z
        np.testing.assert_allclose(one, np.concatenate([z + h * p, p]), rtol=1e-5)
    move = jax.jit(lambda s: step(random.key(0), s, jnp.zeros(3)))
    for _ in range(300):
        state = move(state)
    assert np.abs(state).max() < 1e-5
    if name != "sgld":
        np.testing.assert_array_equal(rule.init(random.key(0), jnp.ones(3), 0.0), 0.0)


# the thermostat ---


@pytest.mark.parametrize("rate", [-3.0, -0.4, -1e-5, 0.0, 1e-5, 1e-3, 0.4, 3.0, 200.0])
def test_a_momentum_under_friction_of_either_sign(rate):
    """The exact solution of its equation, by quadrature of the noise's variance."""
    h, injected, temperature = 0.3, 0.6, 4.0
    one = jnp.ones(())
    args = jnp.asarray(rate, float), injected, h, temperature
    kept = float(_thermal(one, 0.0 * one, *args))
    scale = float(_thermal(0.0 * one, one, *args))
    density = lambda s: 2 * injected * temperature * np.exp(-2 * rate * s)  # noqa: E731
    # quadrature would miss the remaining integral of a large rate below h
    variance, _ = quad(density, 0.0, h, points=[min(h / 2, 1e-2)])
    np.testing.assert_allclose(kept, np.exp(-rate * h), rtol=1e-5)
    np.testing.assert_allclose(scale, np.sqrt(variance), rtol=1e-5)


def thermostat_moments(rule, h, temperature, noise, steps=1500, chains=512):
    """A thermostat's moments, from its own stationary draws: errors, standard errors.

    Under gradient noise of variance ``V`` in each coordinate, to leading order in the
    step, the friction is normal with mean ``A + h V / (2 T)`` and variance ``T / (mu
    D)``, independent of a position and a momentum of temperature ``T``.
    """
    dim = 3
    mean = rule.friction + h * noise / (2 * temperature)
    variance = temperature / (rule.thermal_mass * dim)
    cov = temperature * np.linalg.inv(ROOT @ CURVATURE @ ROOT.T)
    whitening = Whitening(jnp.asarray(ROOT))
    rng = np.random.default_rng(0)
    w = rng.multivariate_normal(np.zeros(dim), cov, chains)
    z = problems.start_of(w @ ROOT)
    p = problems.start_of(np.sqrt(temperature) * rng.normal(size=(chains, dim)))
    xi = problems.start_of(mean + np.sqrt(variance) * rng.normal(size=chains))
    # gradient noise that is isotropic in the coordinates of the dynamics
    spread = jnp.asarray(np.sqrt(noise) * np.linalg.inv(ROOT))

    def chain(key, z, p, xi):
        def body(carry, key):
            z, memory, total = carry
            ours, theirs = random.split(key)
            eta = spread @ random.normal(theirs, (dim,), z.dtype)

            def force(z):
                return jnp.zeros((), z.dtype), -CURVATURE @ z + eta

            moved = rule.step(ours, z, memory, force, h, temperature, whitening)
            xi = moved.memory.friction
            w = whitening.whiten(moved.z)
            values = [xi, (xi - mean) ** 2, w @ np.linalg.inv(cov) @ w / dim]
            return (moved.z, moved.memory, total + jnp.stack(values)), None

        first = (z, Thermostat(p, xi, -CURVATURE @ z), jnp.zeros(3, z.dtype))
        (_, _, total), _ = jax.lax.scan(body, first, random.split(key, steps))
        return total / steps

    found = jax.jit(jax.vmap(chain))(random.split(random.key(2), chains), z, p, xi)
    found = np.asarray(found, np.float64)
    truth = np.array([mean, variance, 1.0])
    error = found.std(0, ddof=1) / np.sqrt(chains)
    return (found.mean(0) - truth) / truth, error / truth


# the gradient noise doubles the friction; it would double SGHMC's temperature
THERMOSTATS = [("symmetric", 0.1, 0.01), ("euler", 0.03, 0.03)]


@pytest.mark.slow
@pytest.mark.parametrize("integrator, h, bias", THERMOSTATS)
def test_thermostat(integrator, h, bias):
    """The friction absorbs isotropic gradient noise."""
    rule, temperature = dynamics.nose_hoover(0.7, 2.0, integrator), 4.0
    noise = 2 * temperature * rule.friction / h
    error, standard = thermostat_moments(rule, h, temperature, noise)
    assert (np.abs(error) < bias + 5 * standard).all(), (error, standard)


class Linear(_NoseHoover):
    """A thermostat with the mean of ``|p|`` in place of that of ``p ** 2``."""

    def step(self, key, z, memory, force, step_size, temperature, whitening):
        moved = super().step(key, z, memory, force, step_size, temperature, whitening)
        # the same step, except for the update of the friction
        p = moved.memory.momentum
        heat = step_size / self.thermal_mass * (jnp.abs(p).mean() - temperature)
        friction = memory.friction + heat
        return moved._replace(memory=moved.memory._replace(friction=friction))


def test_thermostat_of_absolute_values_is_noticed():
    """A known bug, which loses the temperature."""
    rule, temperature, h = Linear(0.7, 2.0, "euler"), 4.0, 0.03
    noise = 2 * temperature * rule.friction / h
    error, standard = thermostat_moments(rule, h, temperature, noise, 300)
    assert not (np.abs(error) < 0.2 + 8 * standard).all()


# through the kernels ---


def check_settled(kernel, energy, cov, chains=256, num_samples=100):
    """Draws against the covariance of the kernel's own linear scheme; their errors."""
    rng = np.random.default_rng(11)
    start = rng.multivariate_normal(energy.mean, cov, chains)
    mcmc = run(kernel, {"mu": start}, *DATA, num_samples=num_samples)
    draws = draws_of(mcmc, "mu")[:, num_samples // 5 :]
    assert not mcmc.get_extra_fields()["diverging"].any()
    return second_moments(draws, energy.mean, cov)


# rows of a batch, step size, friction, temperature: 141 of 203 rows have a
# finite-population factor of 0.3
BIASES = {
    "sgld-141": ("sgld", 141, 0.5, 1.0, 4.0),
    "baoab-20-thick": ("baoab", 20, 0.3, 10.0, 1.0),
    "baoab-141": ("baoab", 141, 0.4, 0.2, 1.0),
    "midpoint-20": ("midpoint", 20, 0.3, 1.0, 4.0),
    "midpoint-141-thick": ("midpoint", 141, 0.6, 10.0, 1.0),
    "euler-20": ("euler", 20, 0.1, 1.0, 4.0),
    "euler-141-thin": ("euler", 141, 0.1, 0.1, 1.0),
}
QUICK = ("sgld-141", "baoab-20-thick", "midpoint-20")


def kernel_of(name, width, h, friction, temperature, **settings):
    settings = (
        dict(batch_size=width, step_size=h, temperature=temperature, num_steps=5)
        | settings
    )
    if name == "sgld":
        return SGLD(normal_model, **settings)
    return SGHMC(normal_model, friction=friction, integrator=name, **settings)


def settled_model(name, width, h, friction, temperature, fpc=True):
    """The energy of the conjugate model, and a scheme's stationary distribution on
    it."""
    energy = Energy(temperature)
    noise = energy.noise(width, fpc)
    cov = settled(name, energy.curvature, friction, h, temperature, noise)[:2, :2]
    return energy, cov


@pytest.mark.parametrize(
    "row", [r if r in QUICK else pytest.param(r, marks=slow) for r in BIASES]
)
def test_bias_table(row):
    """Step size, batch, friction and temperature: the kernels' draws, bias included."""
    settings = BIASES[row]
    energy, cov = settled_model(*settings)
    z = check_settled(kernel_of(*settings), energy, cov)
    assert np.abs(z).max() < 5, z
    if "thick" not in row:
        # the bias is large enough to be visible
        assert not np.allclose(np.diag(cov), np.diag(energy.cov), rtol=0.1)


@pytest.mark.slow
def test_known_bugs_fail_the_bias_table(monkeypatch):
    """Bugs: one batch for all steps of a draw; a likelihood divided by N once more."""
    settings = BIASES["midpoint-20"]
    energy, cov = settled_model(*settings)

    class Twice(SGHMC):
        def energy(self, reader):
            reader = super().energy(reader)
            weights = reader.weights._replace(likelihood=1.0 / problems.N)
            return reader._replace(weights=weights)

    name, width, h, friction, temperature = settings
    twice = Twice(
        normal_model,
        friction=friction,
        integrator=name,
        batch_size=width,
        step_size=h,
        temperature=temperature,
        num_steps=5,
    )
    assert np.abs(check_settled(twice, energy, cov)).max() > 20

    monkeypatch.setattr(langevin, "follow", one_batch_for_all)
    z = check_settled(kernel_of(*settings), energy, cov)
    assert np.abs(z).max() > 8


def one_batch_for_all(rule, reader, *args):
    """:func:`follow` with the rows of a draw's first step in all of them."""
    start, (_, index_key) = args[4], args[5]
    key = random.fold_in(index_key, start)

    class Stuck:
        @staticmethod
        def value_and_gradient(_, z):
            return reader.value_and_gradient(key, z)

    return path.follow(rule, Stuck, *args)


@pytest.mark.slow
def test_no_finite_population_is_noticed():
    """The same table with the variance of a batch with replacement."""
    settings = BIASES["sgld-141"]
    energy, cov = settled_model(*settings, fpc=False)
    z = check_settled(kernel_of(*settings), energy, cov)
    assert z.min() < -8


ROWS, BATCH, STEPS = 23, 6, 4


def rows_read(state, moved, h):
    """How often each row was read, from its contribution to the momentum."""
    return np.asarray(moved.memory - state.memory) / (h * ROWS / BATCH)


def test_each_step_reads_rows_of_its_own(monkeypatch):
    """Row ``i`` pushes coordinate ``i`` alone; with little friction the pushes add
    up."""
    target = Target(lambda z: 0.0, lambda z, i: z[i], ROWS)
    h = 0.25

    def moves():
        kernel = SGHMC(
            target=target,
            batch_size=BATCH,
            friction=1e-8,
            integrator="midpoint",
            step_size=h,
            num_steps=STEPS,
        )
        keys = random.split(random.key(3), 2)
        state = kernel.init(keys, 0, jnp.zeros((2, ROWS)), (), {})
        step = jax.jit(lambda state: kernel.sample(state, (), {}))
        first = step(state)
        return [(state, first), (first, step(first))]

    scheme = batch.without_replacement().bound({"data": BATCH}, {"data": ROWS})
    seen = []
    for before, after in moves():
        for chain in range(2):
            one, two = (
                jax.tree.map(lambda x, c=chain: x[c], s) for s in (before, after)
            )
            expected = np.zeros(ROWS)
            for n in range(STEPS):
                key = random.fold_in(one.index_key, int(one.i) * STEPS + n)
                expected[scheme.draw(key, {"data": ROWS})["data"].indices] += 1
            np.testing.assert_allclose(rows_read(one, two, h), expected, atol=0.01)
            seen.append(tuple(expected))
            assert len(set(expected)) > 2
    assert len(set(seen)) == 4

    monkeypatch.setattr(langevin, "follow", one_batch_for_all)
    (before, after), _ = moves()
    found = rows_read(*(jax.tree.map(lambda x: x[0], s) for s in (before, after)), h)
    assert set(found.round(1)) == {0.0, STEPS}


@pytest.mark.slow
def test_thermostat_kernel():
    """SGNHT absorbs minibatch noise that is equal in all coordinates."""
    precision = np.array([[1.3, 0.4], [0.4, 0.8]])
    h, friction, temperature = 0.1, 0.7, 4.0
    noise = 2 * temperature * friction / h
    target = problems.noisy_target(
        lambda z: -0.5 * (z @ precision) @ z, dim=2, variance=noise
    )
    cov = temperature * np.linalg.inv(precision)
    start = np.random.default_rng(0).multivariate_normal(np.zeros(2), cov, 512)

    def moments(kernel):
        fields = ("memory.friction",) if isinstance(kernel, SGNHT) else ()
        mcmc = run(kernel, start, num_samples=250, fields=fields)
        draws = draws_of(mcmc)[:, 50:]
        return second_moments(draws, np.zeros(2), cov), mcmc

    settings = dict(
        target=target, batch_size=7, step_size=h, friction=friction, temperature=4.0
    )
    z, mcmc = moments(SGNHT(**settings, num_steps=5))
    assert np.abs(z).max() < 6, z  # there is a bias of second order
    extra = mcmc.get_extra_fields(group_by_chain=True)
    xi = np.asarray(extra["memory.friction"], np.float64)[:, 50:, None]
    assert abs(xi.mean() / (2 * friction) - 1) < 0.02
    assert np.abs(standardised((xi - xi.mean()) ** 2, temperature / 2)).max() < 6
    # as measured from four gradients each, the noise doubles the temperature
    ratio = np.asarray(extra["noise_ratio"])[:, -1]
    assert abs((1 / ratio).mean() / 1.3 - 1) < 0.15
    z, _ = moments(SGHMC(**settings, num_steps=5))
    assert z.max() > 20


# temperatures ---


@pytest.mark.slow
@pytest.mark.parametrize("temper_prior", [False, True])
def test_temperature_of_the_prior(temper_prior):
    """The stationary distribution differs if the prior is tempered too."""
    name, width, h, friction = "baoab", 141, 0.4, 1.0
    kernel = kernel_of(name, width, h, friction, 4.0, temper_prior=temper_prior)

    def z_scores(temper_prior):
        energy = Energy(4.0, temper_prior)
        noise = energy.noise(width)
        cov = settled(name, energy.curvature, friction, h, 4.0, noise)[:2, :2]
        return check_settled(kernel, energy, cov)

    assert np.abs(z_scores(temper_prior)).max() < 5
    assert np.abs(z_scores(not temper_prior)).max() > 8


@pytest.mark.slow
def test_jacobians_are_not_tempered():
    """A scale's tempered distribution by quadrature, in its own coordinates."""
    line, start = problems.tempered_scale(4.0)
    kernel = SGHMC(
        problems.scale_model,
        batch_size=39,  # little noise, because another test covers its bias
        step_size=0.05,
        friction=3.0,
        temperature=4.0,
    )
    mcmc = run(kernel, {"s": np.log(start)}, *problems.SCALE_DATA, num_samples=80)
    uniform = line.uniform(draws_of(mcmc, "s"))
    assert np.abs(problems.shape_errors(uniform)).max() < 5
    other, _ = problems.tempered_scale(4.0, jacobian=0.25)
    uniform = other.uniform(draws_of(mcmc, "s"))
    assert np.abs(problems.shape_errors(uniform)).max() > 8


# beyond a bound, schedules, preconditioners ---


@pytest.mark.parametrize(
    "kernel",
    [
        lambda t: SGLD(target=t, step_size=0.3, batch_size=5),
        lambda t: SGHMC(target=t, step_size=0.5, batch_size=5, num_steps=3),
    ],
    ids=["SGLD", "SGHMC"],
)
def test_where_the_gradient_is_nan(kernel):
    """Such a draw is reported as diverging and never returned, and the chain
    continues."""

    def log_likelihood(z, i):
        inside = -0.5 * z**2 / 41 + 0.02 * (i - 20.0) * z
        return jnp.where(z > 0.8, jnp.nan, inside)

    target = Target(lambda z: 0.0, log_likelihood, 41)
    mcmc = run(kernel(target), jnp.zeros(16), num_samples=300)
    draws = draws_of(mcmc)
    diverging = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["diverging"])
    assert np.isfinite(draws).all()
    assert 0.02 < diverging.mean() < 0.6
    # SGLD reads the gradient of a draw a step later: some lie beyond, but not two
    assert (draws[:, :-1][diverging[:, 1:] & ~diverging[:, :-1]] > 0.3).any()
    assert (draws[diverging] < 0.8).all()
    # no chain is stuck in the second half
    assert (np.abs(np.diff(draws[:, 150:], axis=1)) > 0).mean(1).min() > 0.3
    assert (draws[:, 150:].min(1) < -1).all()


def test_schedules():
    """Schedules count gradient steps, warmup included, whoever wrote them."""
    for power, offset in [(0.55, 1000.0), (1.0, 10.0)]:
        found = schedule.polynomial(0.2, power, offset)(jnp.array([0, 10, 3000]))
        exact = 0.2 * (1 + np.array([0, 10, 3000]) / offset) ** -power
        np.testing.assert_allclose(found, exact, rtol=1e-5)

    chosen = optax.piecewise_constant_schedule(0.2, {7: 0.5, 31: 0.1})
    steps = [chosen, schedule.polynomial(0.2, 0.5, 4.0)]
    target = Target(lambda z: 0.0, lambda z, i: -0.5 * z**2 + 0.0 * i, 11)
    for step_size in steps:
        kernel = SGHMC(target=target, step_size=step_size, batch_size=3, num_steps=4)
        mcmc = run(kernel, jnp.zeros(2), num_samples=6, num_warmup=5)
        found = mcmc.get_extra_fields(group_by_chain=True)["step_size"][0]
        last = 4 * (5 + np.arange(6)) + 3
        np.testing.assert_allclose(found, [step_size(n) for n in last], rtol=1e-5)


def test_the_schedule_is_what_moves():
    """Each gradient step has the scheduled length, as seen without noise."""
    target = Target(lambda z: 0.0, lambda z, i: jnp.broadcast_to(z, i.shape), 11)

    def step_size(count):
        return 1.0 / (1.0 + count)

    kernel = SGLD(
        target=target, step_size=step_size, batch_size=3, num_steps=3, temperature=1e-9
    )
    state = kernel.init(random.key(0), 0, jnp.zeros(()), (), {})
    for i in range(2):
        state = kernel.sample(state, (), {})
        # the gradient is 11
        exact = 11 * (1 / np.arange(1, 3 * i + 4)).sum()
        np.testing.assert_allclose(state.z, exact, rtol=1e-3)


@slow
def test_preconditioner():
    """Frozen after warmup, of geometric mean one, right, and quicker."""
    precision = np.array([1e4, 1.0])
    target = problems.noisy_target(
        lambda z: -0.5 * (precision * z * z).sum(-1), dim=2, variance=1.0
    )
    sd = 1 / np.sqrt(precision)
    start = np.random.default_rng(0).normal(size=(128, 2)) * sd

    def moments(preconditioner, h, fields=()):
        kernel = SGLD(
            target=target,
            batch_size=7,
            step_size=h,
            num_steps=4,
            preconditioner=preconditioner,
        )
        size = dict(num_samples=200, num_warmup=200)
        mcmc = run(kernel, start, **size, fields=fields)
        return draws_of(mcmc) / sd, mcmc.get_extra_fields(group_by_chain=True)

    name = "scale_state.root"
    draws, extra = moments("rmsprop", 1e-3, (name,))
    roots = np.asarray(extra[name], np.float64)
    assert (roots == roots[:, :1]).all()
    np.testing.assert_allclose(np.log(roots).mean(-1), 0.0, atol=1e-5)
    assert len(np.unique(roots[:, 0, 0])) == len(roots)
    # in its own coordinates, every chain has the bias that theory gives for its step
    # size
    steps = 1e-3 * roots[:, 0] ** 2
    noise = 1 + steps / 2
    variances = noise / (1 - steps * precision / 2)
    assert (variances < 3).all()
    scaled = (draws**2).mean(1) / variances
    error = scaled.std(0, ddof=1) / np.sqrt(len(scaled))
    assert (np.abs(scaled.mean(0) - 1) < 5 * error).all()
    # without it the small scale limits the step size, and the large one mixes slowly
    plain, _ = moments(None, 1e-4)

    def scatter(draws):
        return draws.mean(1).var(0)[1]

    assert scatter(draws) < 0.2 * scatter(plain)


def test_preconditioner_survives_a_bad_gradient():
    """Adaptation ignores a NaN gradient and uses the ones after it."""
    rule, learning = preconditioner.rmsprop(decay=0.9), jnp.array(True)
    state = rule.init(jnp.ones(2), None)
    for gradient in ([1.0, 1.0], [jnp.nan, 1.0], *[[10.0, 0.1]] * 300):
        state = rule.observe(state, jnp.array(gradient) * state.root, learning)
    ratio = 10.0 / 0.1
    np.testing.assert_allclose((state.root[1] / state.root[0]) ** 2, ratio, rtol=0.6)
