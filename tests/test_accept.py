"""Acceptance tests against quadrature: the probabilities of acceptance are right."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from math import inf, nan

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, hyp0f1, log_ndtr, ndtr, roots_genlaguerre

from numpyro_minibatch import accept
from numpyro_minibatch.accept import AcceptanceTest, penalty_correction
from numpyro_minibatch.accept._correction import correction_table, series_polynomial
from numpyro_minibatch.estimate import Estimate

pytestmark = pytest.mark.x64  # in double precision, too

X64 = jax.config.jax_enable_x64
DTYPES = [np.float32, np.float64] if X64 else [np.float32]
DELTAS = np.array([-9.0, -4.0, -1.5, -0.6, -0.1, 0.0, 0.25, 1.0, 2.5, 6.0])
TESTS = {
    "metropolis": accept.metropolis(),
    "penalty": accept.penalty(),
    "penalty_large_sample": accept.penalty(small_sample=False),
    "barker": accept.barker(),
    "compensated": accept.compensated_barker(),
    "compensated_small": accept.compensated_barker(variance=np.float64(0.2)),
    "compensated_series": accept.compensated_barker(variance=0.5, table="series"),
}
every_test = pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)


def expected(
    test: AcceptanceTest, deltas: np.ndarray, variance: float, breaks: np.ndarray
) -> np.ndarray:
    """Mean probability of acceptance over ``value ~ N(delta, variance)``.

    Gauss-Legendre quadrature on panels that end where the probability, as a function
    of the value, may have a kink or a jump (``breaks``).
    """
    if variance == 0.0:
        log_ratio = Estimate(jnp.asarray(deltas), 0.0)
        return np.asarray(jax.jit(test.probability)(log_ratio), float)
    edges = np.union1d(np.linspace(-35.0, 35.0, 281), breaks)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    half = np.diff(edges)[:, None] / 2
    value = ((edges[:-1] + edges[1:])[:, None] / 2 + half * nodes).ravel()
    log_ratio = Estimate(jnp.asarray(value), jnp.asarray(variance))
    probability = np.asarray(jax.jit(test.probability)(log_ratio), float)
    z = (value - deltas[:, None]) / np.sqrt(variance)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi * variance)
    return density @ (probability * (half * weights).ravel())


def curve_error(
    test: AcceptanceTest, variance: float, breaks: np.ndarray = DELTAS
) -> float:
    """Largest distance of the mean probability from the logistic curve."""
    deltas = np.linspace(-12.0, 12.0, 97)
    curve = expected(test, deltas, variance, breaks)
    return float(np.abs(curve - expit(deltas)).max())


def imbalance(test: AcceptanceTest, variance: float) -> np.ndarray:
    """``log A(delta) - log A(-delta) - delta``, zero under detailed balance."""
    deltas = np.array([0.1, 0.5, 1.0, 3.0, 6.0])
    kinks = np.array([0.0, variance / 2, -variance / 2])
    there = expected(test, deltas, variance, kinks)
    back = expected(test, -deltas, variance, kinks)
    return np.log(there) - np.log(back) - deltas


def apparent_temperature(test: AcceptanceTest, variance: float) -> float:
    """One over the slope at zero of ``log A(delta) - log A(-delta)``."""
    deltas = np.array([-1e-2, 1e-2])
    back, there = expected(test, deltas, variance, np.zeros(1))
    return float(1e-2 / np.log(there / back))


# Metropolis, with and without noise


def test_metropolis_without_noise_is_balanced_and_with_noise_is_not():
    assert np.abs(imbalance(accept.metropolis(), 0.0)).max() < 1e-5
    for variance in (0.1, 1.0, 4.0):
        assert np.abs(imbalance(accept.metropolis(), variance)).max() > 0.02
    assert apparent_temperature(accept.metropolis(), 1.0) == pytest.approx(1.46, 5e-3)


# Penalty


@pytest.mark.parametrize("variance", [0.1, 1.0, 4.0])
def test_penalty_is_balanced_for_noise_of_known_variance(variance):
    tolerance = 1e-10 if X64 else 2e-5
    for test in (accept.penalty(), accept.penalty(small_sample=False)):
        assert np.abs(imbalance(test, variance)).max() < tolerance


@dataclass(frozen=True)
class WrongPenalty(AcceptanceTest):
    """Subtracts a multiple of the variance that is not a half."""

    factor: float
    max_variance = 1.0

    def probability(self, log_ratio):
        value = log_ratio.value - self.factor * log_ratio.variance
        return jnp.exp(jnp.minimum(value, 0.0))


@pytest.mark.parametrize("factor", [-0.5, 0.45, 0.55, 1.0])
def test_the_balance_check_rejects_a_wrong_penalty(factor):
    assert np.abs(imbalance(WrongPenalty(factor), 1.0)).max() > 5e-3


def test_acceptance_that_the_penalty_costs():
    for scale in (0.5, 1.0, 2.0):
        kinks = np.array([scale**2 / 2])
        mean = expected(accept.penalty(), np.zeros(1), scale**2, kinks)
        np.testing.assert_allclose(mean, 2 * ndtr(-scale / 2), rtol=1e-5)


def estimated_variances(dof: float, variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the distribution of a variance estimated from rows."""
    nodes, weights = roots_genlaguerre(80, dof / 2 - 1)
    return variance * nodes / (dof / 2), weights / weights.sum()


def correction(estimates: np.ndarray, dof: float) -> np.ndarray:
    return np.asarray(penalty_correction(Estimate(0.0, jnp.asarray(estimates), dof)))


@pytest.mark.parametrize(
    ("dof", "variance", "excess"),
    [
        (99, 1.0, 6.3e-7),
        (49, 1.0, 5.2e-6),
        (9, 1.0, 7.3e-4),
        (99, 4.0, 1.5e-4),
        (49, 4.0, 1.2e-3),
        (9, 4.0, 9.4e-2),
    ],
)
def test_small_sample_correction_is_unbiased_to_its_truncation(dof, variance, excess):
    """``E exp(-u) = exp(-variance / 2)`` but for the documented truncation."""
    estimates, weights = estimated_variances(dof, variance)
    mean = weights @ np.exp(-correction(estimates, dof).astype(float))
    measured = mean * np.exp(variance / 2) - 1
    assert measured == pytest.approx(excess, rel=0.05, abs=0 if X64 else 5e-7)
    without = weights @ np.exp(-estimates / 2) * np.exp(variance / 2) - 1
    assert without > 4 * measured


def test_small_sample_correction_is_the_head_of_a_bessel_function():
    c = np.array([0.1, 0.3, 1.0])
    for n in (20, 50, 200):
        exact = -np.log(hyp0f1((n - 1) / 2, -c * (n - 1) / 4))
        error = np.abs(correction(c, n - 1.0) - exact)
        assert (error < c**4 / n**3 + (0 if X64 else 2e-7)).all()
        # The same bound rejects a series with one term fewer.
        two_terms = c / 2 + c**2 / (4 * (n + 1))
        assert (np.abs(two_terms - exact) > c**4 / n**3).all()


def test_correction_for_a_known_variance_is_half_of_it_however_large():
    for variance in (0.0, 1e-3, 1.0, 1e30):
        half = correction(np.array(variance), inf)
        np.testing.assert_allclose(half, variance / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("dof", "variance", "residual"),
    [
        (99, 1.0, 1.4e-5),
        (49, 1.0, 6.2e-5),
        (9, 1.0, 2.6e-3),
        (99, 4.0, 5e-4),
        (49, 4.0, 2.6e-3),
        (9, 4.0, 0.13),
    ],
)
def test_balance_with_an_estimated_variance_is_as_documented(dof, variance, residual):
    estimates, weights = estimated_variances(dof, variance)
    u, s = correction(estimates, dof).astype(float), np.sqrt(variance)

    def mean(delta: float) -> float:  # closed form over the value, sum over variances
        m = delta - u
        return weights @ (ndtr(m / s) + np.exp(m + s**2 / 2 + log_ndtr(-m / s - s)))

    deltas = np.linspace(0.25, 6.0, 24)
    errors = [abs(np.log(mean(d) / mean(-d)) - d) for d in deltas]
    assert max(errors) == pytest.approx(residual, rel=0.15, abs=0 if X64 else 1e-6)


# Barker, with and without compensation


def test_barker_without_noise_is_logistic_and_with_noise_too_hot():
    assert curve_error(accept.barker(), 0.0) < 1e-6
    assert curve_error(accept.barker(), 1.0) > 0.02
    assert apparent_temperature(accept.barker(), 1.0) == pytest.approx(1.21, 5e-3)


DOCUMENTED = {
    "nnls": {0.05: 9.3e-9, 0.2: 5.8e-9, 0.5: 3.3e-9, 1.0: 7.4e-8, 1.5: 3.7e-5}
    | {2.0: 7.6e-4, 3.0: 1.4e-2},
    "series": {0.05: 9.6e-7, 0.2: 4.7e-5, 0.5: 4.8e-4, 1.0: 2.2e-3, 1.5: 4.9e-3}
    | {2.0: 8.2e-3, 3.0: 2.7e-2},
    accept.series(10.0): {0.05: 1.2e-3, 0.2: 1.0e-3, 0.5: 1.2e-3, 1.0: 2.7e-3}
    | {1.5: 5.2e-3, 2.0: 8.4e-3, 3.0: 2.7e-2},
}


@pytest.mark.parametrize(
    ("table", "variance", "error"),
    [(t, v, e) for t, errors in DOCUMENTED.items() for v, e in errors.items()],
    ids=str,
)
def test_compensated_curve_is_logistic_under_every_noise_it_admits(
    table, variance, error
):
    test = accept.compensated_barker(variance, table)
    knots = correction_table(variance, test.table).atoms
    tolerance = 1.05 * error + (1e-9 if X64 else 4e-7)
    noises = {0.0, min(0.3, variance), variance}
    errors = [curve_error(test, noise, knots) for noise in noises]
    assert max(errors) < tolerance
    # The figures in the documentation are not larger than necessary.
    assert correction_table(variance, test.table).error > 0.9 * error


@pytest.mark.parametrize(("variance", "error"), [(0.3, 6e-5), (0.8, 4e-4)])
def test_a_variance_from_fifty_rows_costs_the_curve_what_is_documented(variance, error):
    """The compensated test assumes a known variance; here it is estimated."""
    estimates, weights = estimated_variances(49, variance)
    noise = np.linspace(-8.0, 8.0, 2001)
    density = np.exp(-0.5 * noise**2)
    deltas = np.linspace(-3.0, 3.0, 13)
    values = deltas[:, None] + variance**0.5 * noise
    test = accept.compensated_barker()
    curve = sum(
        weight * np.asarray(test.probability(Estimate(jnp.asarray(values), estimate)))
        for estimate, weight in zip(estimates, weights, strict=True)
        if weight > 1e-9
    )
    found = np.abs(curve @ density / density.sum() - expit(deltas)).max()
    assert found == pytest.approx(error, rel=0.12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_curve_at_variance_one_is_within_1e6_of_the_logistic(dtype):
    value = np.linspace(-40.0, 40.0, 8001).astype(dtype)
    curve = accept.compensated_barker().probability(Estimate(value, dtype(0.0)))
    assert curve.dtype == dtype
    error = np.abs(np.asarray(curve, float) - expit(value.astype(float))).max()
    assert error < 2.5e-7


@dataclass(frozen=True)
class NoTopUp(AcceptanceTest):
    """Compensates for the largest noise, whatever the actual noise."""

    max_variance = 1.0

    def probability(self, log_ratio):
        noisy = Estimate(log_ratio.value, 1.0)
        return accept.compensated_barker().probability(noisy)


@dataclass(frozen=True)
class NoDeduction(AcceptanceTest):
    """Smooths as if the estimate had no noise of its own."""

    max_variance = 1.0

    def probability(self, log_ratio):
        exact = Estimate(log_ratio.value, 0.0)
        return accept.compensated_barker().probability(exact)


@pytest.mark.parametrize("broken", [NoTopUp(), NoDeduction()])
def test_the_curve_check_rejects_a_broken_compensation(broken):
    knots = correction_table(1.0, "nnls").atoms
    assert curve_error(broken, 0.3, knots) > 5e-3


@pytest.mark.parametrize("variance", [0.2, 1.0])
def test_probability_is_the_distribution_of_the_two_draws_of_the_paper(variance):
    """Acceptance if value + N(0, variance - s2) + X_corr is positive."""
    rng = np.random.default_rng(20)
    atoms, probabilities, _ = correction_table(variance, "nnls")
    num = 400_000
    x = rng.choice(atoms, num, p=probabilities)
    for s2 in (0.0, 0.5 * variance, variance):
        noise = np.sqrt(variance - s2) * rng.standard_normal(num)
        for value in (-2.0, 0.3, 1.0):
            frequency = (value + noise + x > 0).mean()
            test = accept.compensated_barker(variance)
            p = float(test.probability(Estimate(value, s2)))
            assert abs(frequency - p) < 5 * np.sqrt(p * (1 - p) / num)


# The correction tables


def test_series_polynomial_reproduces_equation_18():
    golden = [0.0, 0.895, -0.145, -2.1, 2.55, -1.8, 0.6]
    np.testing.assert_allclose(series_polynomial(0.2, 10.0, 3), golden, atol=1e-13)
    without_filter = series_polynomial(0.2, inf, 3)
    assert np.abs(without_filter - golden).max() > 0.01
    np.testing.assert_allclose(series_polynomial(0.2, 1e7, 3), without_filter, 1e-9)


def test_series_polynomial_is_the_derivatives_of_the_logistic_density():
    z = np.linspace(-4.0, 4.0, 9)
    step = 1e-2

    def density(z):
        return expit(z) * expit(-z)

    second = density(z - step) - 2 * density(z) + density(z + step)
    series = np.polynomial.Polynomial(series_polynomial(0.3, inf, 2))(expit(z))
    np.testing.assert_allclose(series, density(z) - 0.15 * second / step**2, atol=1e-5)


@pytest.mark.parametrize("variance", [0.01, 0.023, 0.0497, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("table", ["nnls", accept.series(), accept.series(terms=8)])
def test_tables_are_symmetric_distributions(variance, table):
    atoms, probabilities, error = correction_table(variance, table)
    assert (np.diff(atoms) > 0).all() and (probabilities > 0).all()
    np.testing.assert_array_equal(atoms, -atoms[::-1])
    np.testing.assert_array_equal(probabilities, probabilities[::-1])
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-14)
    assert len(atoms) <= 301 and 0 < error < 0.05
    if error < 1e-3:  # with the noise it makes up the variance of the logistic
        spread = probabilities @ atoms**2
        assert spread == pytest.approx(np.pi**2 / 3 - variance, abs=20 * error + 1e-4)


# Decisions


@every_test
def test_extreme_log_ratios_are_decided_the_right_way(test):
    value = jnp.array([200.0, inf, -200.0, -inf])
    taken = np.array([True, True, False, False])
    variance = jnp.array([[0.0], [0.15], [1.0]])
    keys = jax.random.split(jax.random.key(1), 200)
    decision = jax.jit(jax.vmap(test, (0, None)))(keys, Estimate(value, variance, 99.0))
    assert (np.asarray(decision.accept) == taken).all()
    np.testing.assert_allclose(decision.accept_prob - taken, 0.0, atol=1e-80)
    inside = np.asarray(variance) <= test.max_variance
    assert (np.asarray(decision.reliable) == inside).all()


@every_test
def test_undefined_log_ratios_are_rejected_and_not_reliable(test):
    value = jnp.array([nan, 50.0, nan, inf, -inf])
    variance = jnp.array([0.0, nan, nan, nan, nan])
    keys = jax.random.split(jax.random.key(2), 20)
    decision = jax.jit(jax.vmap(test, (0, None)))(keys, Estimate(value, variance))
    assert not decision.accept.any() and not decision.reliable.any()
    np.testing.assert_array_equal(decision.accept_prob, 0.0)


@every_test
def test_infinite_variance_is_never_reliable_and_never_nan(test):
    value = jnp.array([-1.0, 0.0, 3.0, inf])
    decision = jax.jit(test)(jax.random.key(0), Estimate(value, inf, 9.0))
    assert not decision.reliable.any()
    assert np.isfinite(decision.accept_prob).all()


@every_test
def test_probability_increases_with_the_log_ratio(test):
    value = jnp.linspace(-20.0, 20.0, 2001)
    for variance in (0.0, 0.1, 0.2):
        p = np.asarray(test.probability(Estimate(value, variance)))
        assert (np.diff(p) >= -3e-7).all() and (p >= 0).all() and (p <= 1).all()
        assert p[-1] - p[0] > 0.999


@every_test
@pytest.mark.parametrize("variance", [0.0, 0.15])
def test_moves_are_accepted_as_often_as_stated(test, variance):
    num = 20_000
    value = jnp.array([-3.0, -1.0, -0.2, 0.4])
    keys = jax.random.split(jax.random.key(5), num)
    decide = jax.jit(jax.vmap(test, (0, None)))
    decision = decide(keys, Estimate(value, variance, 49.0))
    p = np.asarray(decision.accept_prob[0], float)
    frequency = np.asarray(decision.accept, float).mean(0)
    bound = 5 * np.sqrt(p * (1 - p) / num) + 1e-9
    assert (np.abs(frequency - p) < bound).all()
    # The check can fail: it detects a probability that is off by 0.03.
    assert (np.abs(frequency - (p - 0.03)) > bound)[:3].all()


def test_the_end_points_of_the_uniform_draw_decide_rightly(monkeypatch):
    """Zero is drawn once in 2 ** 23 in float32; even then a hopeless move is
    rejected."""

    def draw(number):
        def uniform(key, shape, dtype):
            return jnp.full(shape, number, dtype)

        monkeypatch.setattr(jax.random, "uniform", uniform)
        value = jnp.array([-60.0, 0.0, 60.0])
        return accept.metropolis()(None, Estimate(value)).accept

    np.testing.assert_array_equal(draw(0.0), [False, True, True])
    np.testing.assert_array_equal(draw(1 - 2**-23), [False, True, True])


# Contract


@every_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_shapes_and_types_are_those_of_the_log_ratio(test, dtype, shape):
    value = jnp.zeros(shape, dtype)
    for variance in (0.0, jnp.zeros((), dtype), jnp.zeros(shape, dtype)):
        log_ratio = Estimate(value, variance)
        decision = jax.eval_shape(test, jax.random.key(3), log_ratio)
        assert [x.shape for x in decision] == [shape] * 3
        assert [x.dtype for x in decision] == [bool, dtype, bool]


@every_test
def test_compiled_and_eager_decisions_agree(test):
    key = jax.random.key(3)
    log_ratio = Estimate(jnp.linspace(-1.0, 1.0, 50), jnp.linspace(0.0, 0.4, 50), 30.0)
    eager, compiled = test(key, log_ratio), jax.jit(test)(key, log_ratio)
    np.testing.assert_array_equal(compiled.reliable, eager.reliable)
    np.testing.assert_array_equal(compiled.accept, eager.accept)
    np.testing.assert_allclose(compiled.accept_prob, eager.accept_prob, atol=1e-6)


@every_test
def test_python_numbers_and_batches_of_estimates_are_accepted(test):
    key = jax.random.key(0)
    alone = test(key, Estimate(-0.3, 0.1, 20.0))
    assert 0 < float(alone.accept_prob) < 1
    values, variances = jnp.full(4, -0.3), jnp.full(4, 0.1)
    keys = jax.random.split(key, 4)
    many = jax.vmap(lambda k, v, s: test(k, Estimate(v, s, 20.0)))(
        keys, values, variances
    )
    np.testing.assert_allclose(many.accept_prob, alone.accept_prob, rtol=1e-5)


def test_tests_are_equal_hash_and_pickle_by_value():
    rebuilt = [
        accept.metropolis(),
        accept.penalty(1.0, True),
        accept.penalty(small_sample=False),
        accept.barker(),
        accept.compensated_barker(np.float64(1.0), "nnls"),
        accept.compensated_barker(0.2),
        accept.compensated_barker(0.5, accept.series()),
    ]
    assert list(TESTS.values()) == rebuilt
    assert [hash(test) for test in TESTS.values()] == [hash(test) for test in rebuilt]
    assert len({*TESTS.values(), *rebuilt}) == len(TESTS)
    assert pickle.loads(pickle.dumps(rebuilt)) == rebuilt


def test_a_rebuilt_test_finds_the_compiled_step_again():
    traces = []

    def step(test, value):
        traces.append(test)
        return test.probability(Estimate(value, 0.1))

    compiled = jax.jit(step, static_argnums=0)
    for _ in range(3):
        compiled(accept.compensated_barker(1.0), 0.5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: accept.penalty(0.0), ValueError, "max_variance=0.0.*metropolis"),
        (lambda: accept.penalty(nan), ValueError, "max_variance=nan"),
        (lambda: accept.penalty("1"), ValueError, "max_variance='1'"),
        (lambda: accept.penalty(1.0, 1), TypeError, "small_sample=1.*True or False"),
        (lambda: accept.compensated_barker(0.0), ValueError, "variance=0.0.*barker"),
        (lambda: accept.compensated_barker(nan), ValueError, "variance=nan"),
        (lambda: accept.compensated_barker(inf), ValueError, "variance=inf"),
        (lambda: accept.compensated_barker("1"), ValueError, "variance='1'"),
        (lambda: accept.compensated_barker(0.005), ValueError, "from 0.01 to 3.0"),
        (lambda: accept.compensated_barker(3.01), ValueError, r"up to 1.4e-02"),
        (lambda: accept.compensated_barker(4.0), ValueError, r"up to 4.4e-02"),
        (lambda: accept.compensated_barker(1.0, "gibbs"), ValueError, "no such table"),
        (
            lambda: accept.compensated_barker(0.2, accept.series(1.0)),
            ValueError,
            "up to 9.9e-02",
        ),
        (lambda: accept.series(0.0), ValueError, "bandwidth=0.0"),
        (lambda: accept.series(nan), ValueError, "bandwidth=nan"),
        (lambda: accept.series(terms=0), ValueError, "terms=0.*1 to 8"),
        (lambda: accept.series(terms=9), ValueError, "terms=9"),
        (lambda: accept.series(terms=2.0), ValueError, "terms=2.0"),
    ],
)
def test_mistakes_are_refused_with_what_to_write_instead(build, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        build()
