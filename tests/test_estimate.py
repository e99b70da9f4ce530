"""Estimates are unbiased and have the variance that they report."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_minibatch import Estimate, Target, batch, estimate
from numpyro_minibatch.batch import Scheme
from numpyro_minibatch.estimate import Moments, Reader, Weights, penalty_correction

pytestmark = pytest.mark.x64  # in double precision, too

N, K = 1003, 211
_rng = np.random.default_rng(1)
ROWS = jnp.asarray(_rng.gamma(2.0, size=N) * 0.01, jnp.float32)
OTHERS = jnp.asarray(_rng.normal(1.0, 0.02, size=K), jnp.float32)
PLATES = {"a": N, "b": K}


def reader(scheme: Scheme, plates=("a",)) -> Reader:
    sizes = {p: PLATES[p] for p in plates}
    widths = {"a": 50, "b": 20}
    bound = scheme.bound({p: widths[p] for p in plates}, sizes)
    return Reader(None, sizes, bound, Weights())


def rows_of(indices):
    values = {"a": ROWS, "b": OTHERS}
    return jnp.float32(7.0), {
        p: jnp.stack([values[p][i], values[p][i] ** 2]) for p, i in indices.items()
    }


@partial(jax.jit, static_argnums=(0, 1, 2))
def many(scheme, plates, max_variance, keys):
    read = reader(scheme, plates).read
    return jax.vmap(lambda key: read(key, rows_of, max_variance))(keys)


def truth(plates):
    values = {"a": ROWS, "b": OTHERS}
    return sum(np.asarray(values[p], np.float64).sum() for p in plates)


@pytest.mark.parametrize("plates", [("a",), ("a", "b")], ids=["one", "two plates"])
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(batch.without_replacement(), id="without replacement"),
        pytest.param(batch.with_replacement(), id="with replacement"),
        pytest.param(batch.pilot(), id="pilot", marks=pytest.mark.slow),
    ],
)
def test_unbiased_with_the_variance_it_reports(scheme, plates):
    """The mean is the sum over all rows; the mean variance is the scatter."""
    keys = random.split(random.key(2), 20_000)
    extra, sums, num_rows = many(scheme, plates, 0.5, keys)
    assert (extra == 7.0).all()
    value, variance = np.asarray(sums.value[:, 0]), np.asarray(sums.variance[:, 0])
    se = value.std(ddof=1) / np.sqrt(len(keys))
    assert abs(value.mean() - truth(plates)) < 4.5 * se
    # the scatter's own error: sd of (x - mean)^2 over sqrt(n)
    squares = np.square(value - value.mean())
    se = np.hypot(squares.std(), variance.std()) / np.sqrt(len(keys))
    assert abs(variance.mean() - squares.mean()) < 4.5 * se
    assert (num_rows > 0).all()


def test_growing_stops_at_small_variances():
    """The variance of the paper's rule is biased downwards, which is why pilot
    exists."""
    keys = random.split(random.key(3), 20_000)
    _, sums, _ = many(batch.growing(10), ("a",), 0.5, keys)
    value, variance = np.asarray(sums.value[:, 0]), np.asarray(sums.variance[:, 0])
    assert (variance <= 0.5).all()
    squares = np.square(value - value.mean())
    se = np.hypot(squares.std(), variance.std()) / np.sqrt(len(keys))
    assert squares.mean() - variance.mean() > 4.5 * se


def test_wrong_correction_is_noticed():
    """The variance check fails without the finite-population correction."""

    class Forgetful(Scheme):
        def fpc(self, count, size):
            return 1.0

    keys = random.split(random.key(4), 20_000)
    scheme = Forgetful((("a", 500),))
    read = Reader(None, {"a": N}, scheme, Weights()).read
    _, sums, _ = jax.jit(jax.vmap(lambda k: read(k, rows_of, 1.0)))(keys)
    squares = np.square(sums.value[:, 0] - sums.value[:, 0].mean())
    se = np.asarray(squares).std() / np.sqrt(len(keys))
    assert sums.variance[:, 0].mean() - squares.mean() > 20 * se


@pytest.mark.parametrize("chunk", [None, 100, 1003, 999])
def test_full_batch_is_exact(chunk):
    scheme = batch.full(chunk)
    _, sums, num_rows = many(scheme, ("a", "b"), 1.0, random.split(random.key(0), 2))
    np.testing.assert_allclose(sums.value[:, 0], truth(("a", "b")), rtol=1e-6)
    assert (sums.variance == 0.0).all()
    assert (num_rows == N + K).all()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [batch.pilot(), batch.growing()])
def test_adaptive_batches_meet_the_variance_or_read_everything(scheme):
    keys = random.split(random.key(5), 500)
    for limit in (0.3, 0.01, 0.0):
        _, sums, num_rows = many(scheme, ("a", "b"), limit, keys)
        assert (sums.variance[:, 0] <= limit).all()
        assert (num_rows <= 2 * (N + K)).all()
    assert (sums.variance[:, 0] == 0).all()  # limit 0: all rows, no noise
    np.testing.assert_allclose(sums.value[:, 0], truth(("a", "b")), rtol=1e-6)


def test_rows_are_reproducible_and_fresh():
    one = many(batch.without_replacement(), ("a",), 1.0, random.split(random.key(6), 3))
    two = many(batch.without_replacement(), ("a",), 1.0, random.split(random.key(6), 3))
    np.testing.assert_array_equal(one[1].value, two[1].value)
    assert len(set(np.asarray(one[1].value[:, 0]).tolist())) == 3


def test_moments_merge():
    x = _rng.normal(100.0, 1.0, size=(2, 90)).astype(np.float32)
    parts = [
        Moments.of(jnp.asarray(x[:, i : i + 40]), jnp.int32(30)) for i in (0, 30, 50)
    ]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    kept = np.concatenate([x[:, 0:30], x[:, 30:60], x[:, 50:80]], axis=1)
    np.testing.assert_allclose(merged.mean, kept.mean(1), rtol=1e-6)
    np.testing.assert_allclose(merged.m2, kept.var(1) * 90, rtol=1e-4)
    total = merged.total(N)
    np.testing.assert_allclose(total.variance, N**2 * kept.var(1, ddof=1) / 90, 1e-4)


def test_float32_difference_survives_large_sums():
    """Rows of size 1e3 differ by 1e-3: the sum of differences is right to 1e-4."""
    size = 200_003
    base = jnp.asarray(_rng.normal(-1e3, 1.0, size=size), jnp.float32)
    step = jnp.asarray(_rng.normal(1e-4, 1e-3, size=size), jnp.float32)
    target = Target(
        lambda z: jnp.zeros(()), lambda z, i: base[i] + z[0] * step[i], size
    )
    scheme = batch.full().bound({"data": size}, {"data": size})
    r = Reader(target.terms, {"data": size}, scheme, Weights())
    z, z_new = jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)
    seen = estimate.shared().compare(r, random.key(0), z, z_new, (), 1.0)
    rounded = (np.asarray(base + step) - np.asarray(base)).astype(np.float64)
    np.testing.assert_allclose(seen.log_ratio.value, rounded.sum(), atol=1e-2)
    naive = (base + step).sum() - base.sum()
    assert abs(float(naive) - rounded.sum()) > 1.0  # the error that this design avoids


def test_shared_and_augmented_agree_on_the_full_batch():
    target = Target(
        lambda z: -0.5 * (z**2).sum(), lambda z, i: ROWS[i] * z[0] - z[1] ** 2, N
    )
    scheme = batch.full().bound({"data": N}, {"data": N})
    weights = Weights(prior=0.5, likelihood=0.01)
    r = Reader(target.terms, {"data": N}, scheme, weights)
    z, z_new = jnp.array([0.3, -1.0]), jnp.array([0.1, 0.2])
    expected = (
        0.5 * (target.log_prior(z_new) - target.log_prior(z))
        + 0.01
        * (
            target.log_likelihood(z_new, jnp.arange(N))
            - target.log_likelihood(z, jnp.arange(N))
        ).sum()
    )
    for kind in (estimate.shared(), estimate.augmented()):
        memory = kind.init(r, random.key(0), z)
        seen = kind.compare(r, random.key(1), z, z_new, memory, 1.0)
        np.testing.assert_allclose(seen.log_ratio.value, expected, rtol=1e-4)
        assert float(seen.noise) == 0.0
        np.testing.assert_allclose(
            seen.log_density[1] - seen.log_density[0], expected, rtol=1e-3
        )


@pytest.mark.parametrize("scheme", [batch.without_replacement(), batch.full(100)])
def test_gradient_is_unbiased(scheme):
    target = Target(
        lambda z: -0.5 * (z**2).sum(), lambda z, i: ROWS[i] * jnp.sin(z[0]) * z[1], N
    )
    z = jnp.array([0.4, 1.5])
    weights = Weights(prior=0.5, likelihood=0.1)

    def log_density(z):
        rows = target.log_likelihood(z, jnp.arange(N))
        return 0.5 * target.log_prior(z) + 0.1 * rows.sum()

    bound = scheme.bound({"data": 50}, {"data": N})
    r = Reader(target.terms, {"data": N}, bound, weights)
    keys = random.split(random.key(7), 5000)
    grads = jax.jit(jax.vmap(r.gradient, (0, None)))(keys, z)
    grads = np.asarray(grads, np.float64)
    se = grads.std(0, ddof=1) / np.sqrt(len(keys))
    error = grads.mean(0) - np.asarray(jax.grad(log_density)(z))
    assert (np.abs(error) < 4.5 * se + 1e-5).all()


def test_algebra():
    a, b = Estimate(1.0, 0.5, 9.0), Estimate(2.0, 1.5, 99.0)
    total = -2.0 * a + b + 1.0
    assert float(total.value) == 1.0
    assert float(total.variance) == 3.5
    # Welch-Satterthwaite: between the smaller count and the sum of both
    assert 9.0 < float(total.dof) < 108.0
    np.testing.assert_allclose(total.dof, 3.5**2 / (4.0 / 9.0 + 2.25 / 99.0))
    exact = Estimate(1.0) + Estimate(2.0)
    assert float(exact.variance) == 0.0
    assert np.isinf(exact.dof)


def test_penalty_correction_needs_the_degrees_of_freedom():
    """E exp(-u) = exp(-variance / 2) over the distribution of an estimated variance."""
    dof, variance = 19.0, 1.0
    quantiles = (np.arange(200_000) + 0.5) / 200_000
    estimated = variance * stats.chi2(dof).ppf(quantiles) / dof
    exact = np.exp(-variance / 2)
    u = penalty_correction(Estimate(0.0, jnp.asarray(estimated), dof))
    assert abs(np.exp(-np.asarray(u, np.float64)).mean() / exact - 1) < 3e-4
    assert abs(np.exp(-estimated / 2).mean() / exact - 1) > 3e-3
