"""Coordinates whose gradients are those of a normal distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks.coverage.families import FAMILIES, truth
from numpyro_minibatch import MinibatchMH
from numpyro_minibatch.control_variate import _bent, _driven, _matched, _trajectories
from numpyro_minibatch.proposal import Bent


def fit_gradients(
    draws: np.ndarray, log_density: Callable, dtype: Any = np.float64
) -> Bent | None:
    """Coordinates fitted to gradients at draws that count as much as each other."""
    fits = fits_of(draws, log_density, dtype=dtype)
    return fits and fits.of_both


def fits_of(
    draws: np.ndarray,
    log_density: Callable,
    weights: np.ndarray | None = None,
    dtype: Any = np.float64,
) -> _matched.Fits | None:
    """The same, with those that suit the draws only."""
    weights = np.ones(len(draws)) if weights is None else weights
    at = _matched.Positions(draws, gradients(log_density, draws), weights)
    return _matched.fit_gradients(at, partial(gradients, log_density), dtype)


# what is fitted -----------------------------------------------------------------------

MEANS = np.array([0.4, -1.1, 2.0, 0.9])  # of the rows of each group
EACH = 8


def log_hierarchy(z: jax.Array) -> jax.Array:
    """Of effects of four groups, of their mean, and of the logarithm of their scale."""
    effects, mean, tau = z[:4], z[4], jnp.exp(z[5])
    prior = -0.5 * jnp.sum(effects**2) - mean**2 / 50 - tau**2 / 18 + z[5]
    return prior - 0.5 * EACH * jnp.sum(jnp.square(MEANS - mean - tau * effects))


def hierarchy(log_tau: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Exact draws of all others for some scales."""
    tau = np.exp(log_tau)[:, None]
    variance = tau**2 + 1 / EACH
    precision = 4 / variance + 1 / 25
    mean = MEANS.sum() / variance / precision
    mean = mean + rng.normal(size=mean.shape) / np.sqrt(precision)
    left = 1 / (1 + EACH * tau**2)
    effects = EACH * tau * left * (MEANS - mean)
    effects = effects + np.sqrt(left) * rng.normal(size=effects.shape)
    return np.column_stack([effects, mean, log_tau])


def log_scales(rng: np.random.Generator, number: int) -> np.ndarray:
    """Draws of the logarithm of the scale, the others integrated out."""
    u = np.linspace(-9.0, 3.5, 4001)
    variance = np.exp(2 * u) + 1 / EACH
    precision = 4 / variance + 1 / 25
    logs = u - np.exp(2 * u) / 18 - 2 * np.log(variance) - 0.5 * np.log(precision)
    logs += 0.5 * np.square(MEANS.sum() / variance) / precision
    logs -= 0.5 * np.square(MEANS).sum() / variance
    mass = np.exp(logs - logs.max())
    return rng.choice(u, number, p=mass / mass.sum())


@cache
def _program(log_density: Callable) -> Callable:
    return jax.jit(jax.vmap(jax.grad(log_density)))


def gradients(log_density: Callable, draws: np.ndarray) -> np.ndarray:
    """Those of a log density at draws."""
    with jax.enable_x64(True):
        return np.asarray(_program(log_density)(jnp.asarray(draws)))


def white(bent: Bent, log_density: Callable, draws: np.ndarray) -> tuple[Any, Any]:
    """White coordinates and gradients, as trajectories see them."""
    whitening = bent.whitening

    def of_one(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = whitening.whiten(z - bent.center)
        return w, whitening.whiten_gradient(jax.grad(log_density)(z), w)

    with jax.enable_x64(True):
        w, of_w = jax.vmap(of_one)(jnp.asarray(draws))
    return np.asarray(w), np.asarray(of_w)


def drivers(bent: Bent) -> list[int]:
    """The coordinates that others depend on, in their order."""
    assert bent.whitening.scales is not None
    return [int(j) for j in np.nonzero(np.asarray(bent.whitening.scales.drivers))[1]]


def test_a_hierarchy_of_few_groups_is_driven_by_its_scale_and_then_its_mean() -> None:
    """Also where few draws of the fit are."""
    rng = np.random.default_rng(2)
    draws = hierarchy(log_scales(rng, 2000), rng)
    sites = np.column_stack([draws[:, :5], np.exp(draws[:, 5])])
    weights = _trajectories._weights_of_tails(sites, sites)
    fits = fits_of(draws, log_hierarchy, weights)
    assert fits is not None
    found = fits.of_both
    assert drivers(found) == drivers(fits.of_draws) == [5, 4]
    far = hierarchy(np.full(500, np.quantile(draws[:, 5], 0.999)), rng)
    w, of_w = white(found, log_hierarchy, far)
    # but for the logarithm of the scale, whose distribution is not normal
    others = np.square(w + of_w)[:, :5].mean()
    assert others < 0.5
    # linear coordinates are not only a little worse
    linear = np.linalg.cholesky(np.cov(draws.T))
    r = np.linalg.solve(linear, (far - draws.mean(0)).T).T
    off = r + gradients(log_hierarchy, far) @ linear
    assert np.square(off)[:, :5].mean() > 50 * others


def test_coordinates_suit_positions_farther_out_than_the_draws() -> None:
    """Draws lack a tenth of the posterior, and a run goes where one of 10,000 is."""
    rng = np.random.default_rng(6)
    scales = log_scales(rng, 3000)
    draws = hierarchy(scales[scales <= np.quantile(scales, 0.9)][:300], rng)
    far = hierarchy(np.full(500, np.quantile(log_scales(rng, 50_000), 0.9999)), rng)
    assert far[0, -1] > draws[:, -1].max() + 1
    found = fits_of(draws, log_hierarchy)
    assert found is not None
    off = [np.add(*white(bent, log_hierarchy, far))[:, :5] for bent in found[:2]]
    of_draws, of_both = (np.square(x).mean() for x in off)
    assert of_both < 0.5 * of_draws


SIZES = np.array([15.0, 10.0, 16.0, 11.0])  # standard errors of each group


def log_centred(z: jax.Array) -> jax.Array:
    """Of the mean of four groups, the logarithm of its scale, and the effects."""
    mean, tau, effects = z[0], jnp.exp(z[1]), z[2:]
    prior = -(mean**2) / 50 - jnp.log1p(tau**2 / 25) + z[1] - 4 * z[1]
    prior = prior - 0.5 * jnp.sum(jnp.square((effects - mean) / tau))
    return prior - 0.5 * jnp.sum(jnp.square((10 * MEANS - effects) / SIZES))


def centred(log_tau: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Exact draws of all others for some scales."""
    squares = np.square(SIZES) + np.exp(2 * log_tau)[:, None]
    precision = (1 / squares).sum(1) + 1 / 25
    mean = (10 * MEANS / squares).sum(1) / precision
    mean = mean + rng.normal(size=mean.shape) / np.sqrt(precision)
    share = np.exp(2 * log_tau)[:, None] / squares
    effects = mean[:, None] + share * (10 * MEANS - mean[:, None])
    sd = SIZES * np.sqrt(share)
    effects = effects + sd * rng.normal(size=effects.shape)
    return np.column_stack([mean, log_tau, effects])


def log_scales_of_centred(rng: np.random.Generator, number: int) -> np.ndarray:
    """Draws of the logarithm of the scale, the others integrated out."""
    u = np.linspace(-12.0, 6.0, 4001)
    squares = np.square(SIZES) + np.exp(2 * u)[:, None]
    precision = (1 / squares).sum(1) + 1 / 25
    logs = u - np.log1p(np.exp(2 * u) / 25) - 0.5 * np.log(squares).sum(1)
    logs += 0.5 * np.square((10 * MEANS / squares).sum(1)) / precision
    logs -= 0.5 * np.log(precision) + 0.5 * (np.square(10 * MEANS) / squares).sum(1)
    mass = np.exp(logs - logs.max())
    return rng.choice(u, number, p=mass / mass.sum())


def off_in_neck(bent: Bent, scale: float) -> float:
    """The mean square of what is left of gradients where effects have some scale."""
    far = centred(np.full(500, np.log(scale)), np.random.default_rng(1))
    others = [0, 2, 3, 4, 5]  # the logarithm of the scale is not normal
    return float(np.square(np.add(*white(bent, log_centred, far))[:, others]).mean())


def test_coordinates_reach_into_the_neck_of_a_centred_hierarchy() -> None:
    """Draws end where the scale of the effects is 0.4, and it can be 0.003."""
    rng = np.random.default_rng(8)
    draws = centred(np.log(rng.uniform(0.4, 12.0, 2000)), rng)
    found = fits_of(draws, log_centred)
    assert found is not None
    assert drivers(found.of_both) == [1, 0]  # the scale, and then the mean
    for scale in (0.03, 0.003):
        off = off_in_neck(found.of_both, scale)
        assert off < 1.0
        assert off_in_neck(found.of_draws, scale) > 100 * off


@pytest.mark.parametrize("weighted", [False, True])
def test_draws_in_the_neck_do_not_lead_a_fit_astray(weighted: bool) -> None:
    """Of the mean square of differences, they are nearly all."""
    rng = np.random.default_rng(3)
    draws = centred(log_scales_of_centred(rng, 2000), rng)
    assert np.exp(draws[:, 1].min()) < 0.02
    sites = np.column_stack([draws[:, 0], np.exp(draws[:, 1]), draws[:, 2:]])
    weights = _trajectories._weights_of_tails(sites, sites)
    weights = weights + weights.mean() if weighted else np.ones(len(draws))
    found = fits_of(draws, log_centred, weights)
    assert found is not None
    assert drivers(found.of_both) == [1, 0]
    assert off_in_neck(found.of_both, 0.03) < 1.0


def test_a_fit_begins_near_the_coordinates_of_a_hierarchy() -> None:
    rng = np.random.default_rng(3)
    draws = centred(np.log(rng.uniform(0.01, 2.0, 2000)), rng)  # below the errors
    x, sd = (draws - draws.mean(0)) / draws.std(0), draws.std(0)

    def gradients_at(x: np.ndarray) -> np.ndarray:
        return gradients(log_centred, draws.mean(0) + sd * x) * sd

    g = gradients_at(x)
    changes = _matched._changes(x, g, gradients_at)
    # one coordinate's at each draw, here the mean's at the first and at the seventh
    for row in (0, 6):
        with jax.enable_x64(True):
            known = np.asarray(jax.hessian(log_centred)(jnp.asarray(draws[row])))
        others = [0, 2, 3, 4, 5]  # that of the scale varies within the step
        expected = (known[0] * sd * sd[0])[others]
        np.testing.assert_allclose(changes[row, others], expected, rtol=0.02)
    linear = _driven.Coordinates.linear(np.eye(6))
    start = _matched._with_drivers(linear, [1, 0], x, g, changes)
    slopes, shifts, *others = start.curves
    assert not np.any(others)
    # the scale is that of the effects, and their mean is the one of all
    np.testing.assert_allclose(slopes[2:, 0], sd[1], rtol=0.05)
    np.testing.assert_allclose(slopes[2:, 1], 0.0, atol=0.05)
    np.testing.assert_allclose(shifts[2:, 1], sd[0] / sd[2:], rtol=0.05)
    assert not slopes[:2].any() and not shifts[:2].any()
    # where the driver is zero
    known = np.exp(draws[:, 1].mean()) / sd[2:]
    np.testing.assert_allclose(np.diag(start.lower)[2:], known, rtol=0.15)


def test_the_loss_is_one_of_squares_nearby_and_hardly_grows_far_away() -> None:
    off = (
        np.random.default_rng(0).normal(size=(50, 4)) * np.logspace(-3, 3, 50)[:, None]
    )
    squares = np.square(off).sum(1)
    of_each, weights = _driven.loss(off)
    np.testing.assert_allclose(of_each[:10], squares[:10], rtol=0.01)
    assert (of_each[-5:] < 20 * 4 * 3).all() and (np.diff(weights[::5]) < 0).all()
    # a weight is the derivative with respect to the squares
    more, _ = _driven.loss(off * np.sqrt(1 + 1e-6))
    np.testing.assert_allclose((more - of_each) / (1e-6 * squares), weights, rtol=1e-3)
    half = np.full((1, 4), np.sqrt(_driven._HALF))
    assert _driven.loss(half)[1] == pytest.approx(0.5)


def test_no_driver_is_stretched_beyond_a_limit() -> None:
    """But for draws that are there already."""
    rng = np.random.default_rng(4)
    draws = centred(np.log(rng.uniform(0.4, 12.0, 400)), rng)
    x = (draws - draws.mean(0)) / draws.std(0)
    found = _driven.Coordinates.linear(np.diag([1, 2.0, 1, 1, 1, 1])).with_driver(1)
    curves = found.curves.copy()
    curves[0, 2:] = 1.0
    found, none = replace(found, curves=curves), np.zeros_like(x)
    r = found.undriven(x, none)[0]
    for factor, most in ((1.0, 5.0), (3.0, 5.0), (3.0, 0.6), (20.0, 5.0)):
        far = found.undriven(found.stretched(x, none, factor, most), none)[0]
        limit = np.maximum(np.abs(r[:, 1]), 2.0 * most)
        expected = np.clip(factor * r[:, 1], -limit, limit)
        np.testing.assert_allclose(far[:, 1], expected, rtol=1e-6)
        np.testing.assert_allclose(far[:, 2:], r[:, 2:], rtol=1e-6)  # others stay


def test_matrices_of_a_fit_are_those_of_one_thread() -> None:
    """Threads that wait for each other made a fit ten times as slow."""
    threads: list[int] = []

    def of_blas() -> list[int]:
        found = threadpool_info()
        return [pool["num_threads"] for pool in found if pool["user_api"] == "blas"]

    def spied(at: np.ndarray) -> np.ndarray:
        threads.extend(of_blas())
        return gradients(log_banana, at)

    draws = banana(np.random.default_rng(5), 2000)
    at = _matched.Positions(draws, gradients(log_banana, draws), np.ones(2000))
    with threadpool_limits(2, "blas"):
        assert _matched.fit_gradients(at, spied, np.float64) is not None
        assert set(threads) == {1}
        assert set(of_blas()) == {2}


def test_a_coordinate_that_couples_all_others_is_found() -> None:
    rng = np.random.default_rng(8)
    draws = centred(np.log(rng.uniform(0.4, 12.0, 300)), rng)
    of_density = partial(gradients, log_centred)
    changes = _matched._changes(draws, of_density(draws), of_density)
    found = _matched._couplings(changes)
    np.testing.assert_allclose(found, found.T)
    effects = found[2:, 2:]
    assert effects.max() < 1e-3  # they are independent, given the others
    assert found[0, 2:].min() > 0.1 and found[1, 2:].min() > 0.003


def test_a_driver_may_have_a_wide_tail_itself() -> None:
    """An extreme value distribution, as of the logarithm of an exponential variable."""
    rng = np.random.default_rng(8)
    scale = np.log(rng.exponential(size=2000))
    draws = np.column_stack([scale, np.exp(scale) * rng.normal(size=2000)])

    def log_density(z: jax.Array) -> jax.Array:
        return z[0] - jnp.exp(z[0]) - 0.5 * jnp.square(z[1] * jnp.exp(-z[0])) - z[0]

    found = fit_gradients(draws, log_density)
    assert found is not None and drivers(found) == [0]
    # the tail far to the left is exponential
    far = np.column_stack([np.linspace(-9.0, -6.0, 200), np.zeros(200)])
    far[:, 1] = np.exp(far[:, 0]) * rng.normal(size=200)
    off = np.add(*white(found, log_density, far))
    linear = (far[:, 0] - scale.mean()) / scale.std() + scale.std()
    assert np.square(off).mean() < 0.15 * np.square(linear).mean()


def log_banana(z: jax.Array) -> jax.Array:
    """A location that is a curve in another parameter, and one apart from them."""
    along = (z[0] + 2) / 3
    curve = 0.5 * along + jnp.logaddexp(along, -along) - jnp.log(2.0)
    return -0.5 * (along**2 + ((z[1] - curve) / 0.2) ** 2 + z[2] ** 2)


def banana(rng: np.random.Generator, number: int) -> np.ndarray:
    """Its draws."""
    along, across, other = rng.normal(size=(3, number))
    curve = np.logaddexp(along, -along) - np.log(2.0)
    return np.column_stack([3 * along - 2, 0.2 * across + 0.5 * along + curve, other])


def test_a_curve_is_found_with_its_driver() -> None:
    draws = banana(np.random.default_rng(5), 2000)
    found = fit_gradients(draws, log_banana)
    assert found is not None and drivers(found) == [0]
    w, of_w = white(found, log_banana, draws)
    np.testing.assert_allclose(of_w, -w, atol=0.3)
    assert np.square(of_w + w).mean() < 1e-3
    np.testing.assert_allclose(np.cov(w.T), np.eye(3), atol=0.12)
    # chains follow the same coordinates, without the drivers that do nothing
    of_chains = _bent.used(found)
    assert of_chains is not None and of_chains.whitening.scales is not None
    assert of_chains.whitening.scales.drivers.shape == (1, 3)
    for same, other in zip((w, of_w), white(of_chains, log_banana, draws), strict=True):
        np.testing.assert_allclose(same, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2, 0.4])
def test_the_driver_of_a_curve_is_its_cause(noise: float) -> None:
    along, across = np.random.default_rng(7).normal(size=(2, 2000))
    draws = np.column_stack([along**2 + noise * across, along])

    def log_density(z: jax.Array) -> jax.Array:
        return -0.5 * (((z[0] - z[1] ** 2) / noise) ** 2 + z[1] ** 2)

    found = fit_gradients(draws, log_density)
    assert found is not None and drivers(found) == [1]


def test_coordinates_are_left_alone_where_none_are_better() -> None:
    rng = np.random.default_rng(6)
    for dim in (2, 5, _matched.MOST_MATCHED):
        draws = rng.normal(size=(2000, dim))
        assert fit_gradients(draws, lambda z: -0.5 * jnp.sum(z**2)) is None


@pytest.mark.parametrize("dim", [2, 5])
def test_independent_heavy_tails_are_described_no_worse(dim: int) -> None:
    """At draws to which the coordinates were not fitted."""

    def log_density(z: jax.Array) -> jax.Array:
        return -2.5 * jnp.log1p(jnp.square(z) / 4).sum()

    rng = np.random.default_rng(6)
    draws, fresh = (rng.standard_t(4.0, size=(n, dim)) for n in (2000, 20_000))
    root = np.linalg.cholesky(np.cov(draws.T))
    linear = _bent.straight(draws.mean(0), root.T, np.float64)
    found = fit_gradients(draws, log_density) or linear
    off = [np.add(*white(at, log_density, fresh)) for at in (found, linear)]
    of_found, of_linear = (np.square(x).mean() for x in off)
    assert of_found <= of_linear


def test_what_cannot_be_fitted_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = banana(np.random.default_rng(5), 2000)
    slopes = gradients(log_banana, draws)

    def fitted(draws: np.ndarray, slopes: np.ndarray) -> Any:
        at = _matched.Positions(draws, slopes, np.ones(len(draws)))
        return _matched.fit_gradients(at, partial(gradients, log_banana), np.float32)

    assert fitted(draws, slopes) is not None
    missing = np.where(np.arange(2000)[:, None] < 50, np.nan, slopes)
    assert fitted(draws, missing) is None
    assert fitted(draws[:, :1], slopes[:, :1]) is None
    assert fitted(np.ones((2000, 3)), slopes) is None
    # without a root of their covariance
    assert fitted(draws[:, [0, 1, 1]], slopes) is None
    monkeypatch.setattr(_matched, "MOST_MATCHED", 2)
    assert fitted(draws, slopes) is None


@pytest.mark.parametrize("limit", [12.0, 0.0])
def test_positions_whose_gradients_are_not_finite_are_left_out(limit: float) -> None:
    """Those at which a program overflows, and all that are farther out."""
    draws = banana(np.random.default_rng(5), 2000)
    calls = []

    def partly(at: np.ndarray) -> np.ndarray:
        calls.append(len(at))  # the first ones are near the draws
        finite = (len(calls) == 1) | (np.abs(at[:, [0]]) < limit)
        return np.where(finite, gradients(log_banana, at), np.nan)

    at = _matched.Positions(draws, gradients(log_banana, draws), np.ones(2000))
    found = _matched.fit_gradients(at, partly, np.float64)
    assert found is not None and drivers(found.of_both) == [0]
    assert len(calls) > 4
    w, of_w = white(found.of_both, log_banana, draws)
    assert np.square(of_w + w).mean() < 0.02


def test_derivatives_are_those_of_all_numbers_and_of_the_root() -> None:
    rng = np.random.default_rng(9)
    at = _driven.Coordinates.linear(np.eye(3))
    at = replace(at, center=rng.normal(size=3)).with_driver(1).with_driver(2)
    flat = np.where(at.free(), 0.3 * rng.normal(size=len(at.flat())), 0.0)
    at = at.moved(flat, np.tril(0.2 * rng.normal(size=(3, 3))))
    x, g = rng.normal(size=(2, 5, 3))
    slope = at.derivatives(x, g)
    step = rng.normal(size=slope.shape[1])
    small, size = np.zeros(len(flat)), at.free().sum()
    small[at.free()] = step[:size]
    turn = np.zeros((3, 3))
    turn[np.tril_indices(3)] = step[size:]
    there, back = (
        np.add(*at.moved(at.flat() + h * small, h * turn).white(x, g)).ravel()
        for h in (1e-5, -1e-5)
    )
    np.testing.assert_allclose(
        slope @ step, (there - back) / 2e-5, rtol=1e-3, atol=1e-3
    )


# what is chosen -----------------------------------------------------------------------


def test_they_are_used_where_trajectories_then_go_farther() -> None:
    """Where the posterior bends, and not where its scales vary."""
    of_banana = _trajectories.Trajectories(4, False, 0.0, None, 0.5)
    for other, used in (
        (of_banana._replace(kept=0.1), True),
        (of_banana._replace(kept=0.45), False),  # hardly less
        (of_banana._replace(kept=0.1, num_steps=8), False),
        (of_banana._replace(kept=0.1, long=True), False),
        (of_banana._replace(kept=0.1, stuck=0.001), True),
        (of_banana._replace(kept=0.1, stuck=0.002), False),
    ):
        found = trajectories_of(of_banana, other)
        assert (found.bent is not None) == used
        assert found[:3] == (other if used else of_banana)[:3]
    # a third of long trajectories says little of them
    of_long = of_banana._replace(long=True)
    for other, used in ((of_banana, False), (of_banana._replace(kept=0.1), True)):
        assert (trajectories_of(of_long, other).bent is not None) == used
    # trajectories that go far enough are left alone
    good = of_banana._replace(kept=0.15)
    assert trajectories_of(good, good._replace(kept=0.0)).bent is None
    # and so are many coordinates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_trajectories, "MOST_MATCHED", 2)
        assert trajectories_of(of_banana, good).bent is None


def test_equal_weights_come_first() -> None:
    """Those of tails led fits of hierarchies to other drivers."""
    linear = _trajectories.Trajectories(64, False, 0.0, None, 0.5)
    weights: list[np.ndarray] = []
    trajectories_of(linear, linear._replace(kept=0.1), weights=weights)
    first, second = weights
    assert np.ptp(first) == 0
    far = np.square(banana(np.random.default_rng(5), 2000)).max(1)
    assert second[far > np.quantile(far, 0.99)].mean() > 2 * second.mean()
    assert second.min() > 0.1 * second.mean()


def test_of_two_fits_the_one_that_costs_less_is_used() -> None:
    """Unless the first one takes few steps."""
    linear = _trajectories.Trajectories(64, False, 0.0, None, 0.5)
    for first, second, chosen in (
        ((32, 0.15), (32, 0.1), 1),
        ((32, 0.1), (32, 0.15), 0),
        ((64, 0.0), (32, 0.2), 1),
        ((32, 0.1), (64, 0.0), 0),
        ((32, 0.1), (8, 0.6), 0),  # which does not go far enough
        ((16, 0.15), (8, 0.0), 0),
    ):
        each = [linear._replace(num_steps=n, kept=k) for n, k in (first, second)]
        found = trajectories_of(linear, *each)
        assert found[:2] == each[chosen][:2] and found.kept == each[chosen].kept
        assert found.bent is not None


@pytest.mark.parametrize(
    ("rejected", "most", "expected"),
    [
        ([0.0], 7, 4),  # the draws' number of steps
        ([0.0], 8, 8),
        ([0.0], 64, 8),
        ([0.021, 0.021, 0.0], 64, 32),  # until farther positions suit, too
        ([0.019], 64, 8),
        ([1.0, 1.0, 1.0, 0.02], 64, 64),
        ([1.0, 1.0, 0.5], 63, 32),  # as short as allowed
        ([1.0, 1.0, 1.0, 1.0], 64, 8),  # steps are not the reason
        ([0.2, 0.06, 0.05, 0.05], 64, 16),
        ([0.2, 0.07, 0.05, 0.05], 64, 32),
    ],
)
def test_steps_are_halved_if_that_costs_no_more(
    monkeypatch: pytest.MonkeyPatch, rejected: list[float], most: int, expected: int
) -> None:
    """And until trajectories are accepted farther out than the draws."""
    tried = []

    def followed(number: int) -> Any:
        share = rejected[len(tried)]
        tried.append(number)
        return np.where(np.arange(1000) < 1000 * share, np.nan, 0.6), None

    far: Any = SimpleNamespace(followed=followed)
    made = SimpleNamespace(at_rest=lambda *_: None)
    monkeypatch.setattr(_trajectories, "_Starts", made)
    monkeypatch.setattr(_trajectories, "replace", lambda *_, **__: far)
    given: Any = None, None, None, np.zeros((3, 2))
    assert _trajectories._short_enough_farther(*given, 4, most) == expected
    assert tried == [expected if most == 7 else 8 * 2**k for k in range(len(rejected))]


@cache
def fits_of_banana() -> _matched.Fits | None:
    """The coordinates of all the cases above, in which they are not looked at."""
    return fits_of(banana(np.random.default_rng(5), 2000), log_banana)


def trajectories_of(*each: Any, weights: list[np.ndarray] | None = None) -> Any:
    """The choice between trajectories in linear and in other coordinates.

    :param each: the trajectories in linear coordinates, and in those of each fit.
    :param weights: to which the weights of each fit are added.
    """
    tried = [] if weights is None else weights

    def fit(draws: _matched.Positions, *_: Any) -> _matched.Fits | None:
        tried.append(draws.weights)
        return fits_of_banana()

    draws = banana(np.random.default_rng(5), 2000)

    def ends(expansion: Any, bent: Any, draws: Any, *_: Any) -> tuple[Any, ...]:
        ones, at = np.ones(len(draws)), np.asarray(draws, np.float64)
        momenta = _trajectories._SHORT * gradients(log_banana, at)
        return ones, draws, momenta, ones

    programs = {
        _trajectories._ends_of_trajectories: ends,
        _trajectories._site_values: np.asarray,
    }
    expansion = SimpleNamespace(cast=lambda _: expansion)
    posterior: Any = SimpleNamespace(
        gaussian=False,
        draws=draws,
        location=draws.mean(0),
        root=np.eye(3),
        expansion=expansion,
    )
    problem: Any = SimpleNamespace(dtype=np.float32, compiled=programs.__getitem__)
    answers = chain(each, repeat(each[-1]))  # with other weights, they are as good
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_trajectories, "_in_coordinates", lambda *_: next(answers))
        patch.setattr(_trajectories, "fit_gradients", fit)
        return _trajectories.trajectories(problem, posterior)


# runs ---------------------------------------------------------------------------------


def kept(values: np.ndarray) -> float:
    """The correlation of successive draws of chains, ``(chains, draws)``."""
    off = values - values.mean()
    return float((off[:, 1:] * off[:, :-1]).mean() / np.square(off).mean())


@pytest.mark.filterwarnings("ignore:.*a minibatch does not pay")
def test_a_saturating_curve_is_sampled() -> None:
    """Reaction rates: for small constants the largest rate does not depend on them."""
    rng = np.random.default_rng(2)
    x = rng.uniform(0.3, 2, 8).astype(np.float32)
    y = (2 * x / (1 + x) + 0.3 * rng.normal(size=8)).astype(np.float32)

    def rates(x: Any, y: Any) -> None:
        largest = numpyro.sample("largest", dist.HalfNormal(10.0))
        half = numpyro.sample("half", dist.HalfNormal(10.0))
        with numpyro.plate("data", len(y)) as i:
            rate = largest * x[i] / (half + x[i])
            numpyro.sample("y", dist.Normal(rate, 0.3), obs=y[i])

    kernel = MinibatchMH(rates, control_variate="taylor2")
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=500,
        num_chains=60,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), x, y)
    assert kernel.pilot["surrogate_drivers"] != ""
    draws = mcmc.get_samples(group_by_chain=True)
    # 0.32 with them and 0.55 without
    assert kept(np.log(np.asarray(draws["half"], np.float64))) < 0.35
    u, v = np.linspace(-3, 4.5, 801)[:, None], np.linspace(-14, 4.5, 1201)
    a, b = np.exp(u)[..., None], np.exp(v)[:, None]
    left = np.asarray(y, float) - a * x / (b + x)
    logs_of = u + v - (np.exp(2 * u) + np.exp(2 * v)) / 200
    density = np.exp(logs_of - np.square(left).sum(-1) / (2 * 0.3**2))
    mass = density.sum(0) / density.sum()
    for limit in (0.5, 2.0, 8.0):
        below = (np.asarray(draws["half"]) < limit).mean(1)
        known = mass[np.exp(v) < limit].sum()
        assert abs(below.mean() - known) < 4 * below.std() / np.sqrt(60) + 2e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*a minibatch does not pay")
def test_chains_leave_the_wide_tail_of_a_hierarchy() -> None:
    """The mean of few groups and their scale, far from the bulk."""
    family = FAMILIES["groups"]
    data = family.data(7)
    kernel = MinibatchMH(family.model, control_variate="taylor2")
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=600,
        num_chains=100,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), *(jnp.asarray(values) for values in data))
    assert kernel.pilot["surrogate_drivers"].startswith("tau, m")
    draws = mcmc.get_samples(group_by_chain=True)
    for name, known in truth(family, data).items():
        values = np.asarray(draws[name], np.float64)
        off = np.minimum(np.abs(values - known["mean"]) / known["sd"], 4.0)
        # 0.12 and 0.14 with them; without, and with six times as many steps, 0.38 and
        # 0.22
        assert kept(np.square(off)) < 0.2
        below = (values < known["q95"]).mean(1)
        error = below.std(ddof=1) / np.sqrt(len(below))
        assert abs(below.mean() - 0.95) < 4 * error + 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*a minibatch does not pay")
def test_the_neck_of_eight_schools_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Centred effects from the default start; NUTS of the set-up lacks the neck [1].

    [1] Donald B. Rubin (1981), *Estimation in parallel randomized experiments*, Journal
    of Educational Statistics 6(4).
    """
    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def schools(y: Any, errors: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(y)):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
        with numpyro.plate("data", len(y)) as i:
            numpyro.sample("y", dist.Normal(theta[i], errors[i]), obs=y[i])

    # the effects and their mean integrated out, in the logarithm of the scale
    u = np.linspace(-14.0, 6.0, 20_001)
    variance = np.square(errors) + np.exp(2 * u)[:, None]
    precision = (1 / variance).sum(1) + 1 / 25
    logs = u - np.log1p(np.exp(2 * u) / 25) - 0.5 * np.log(variance).sum(1)
    logs += 0.5 * np.square((y / variance).sum(1)) / precision - 0.5 * np.log(precision)
    logs -= 0.5 * (np.square(y) / variance).sum(1)
    mass = np.cumsum(np.exp(logs - logs.max()))
    level = np.array([0.01, 0.05, 0.5, 0.95])
    quantiles = np.exp(np.interp(level, mass / mass[-1], u))

    measured: list[Callable] = []

    def spied(draws: Any, gradients: Callable, dtype: Any) -> Any:
        measured.append(gradients)
        return _matched.fit_gradients(draws, gradients, dtype)

    monkeypatch.setattr(_trajectories, "fit_gradients", spied)
    kernel = MinibatchMH(schools, control_variate="taylor2")
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=1000,
        num_chains=160,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(3), jnp.asarray(y), jnp.asarray(errors))
    assert kernel.pilot["surrogate_drivers"].startswith("tau, mu")
    tau = np.asarray(mcmc.get_samples(group_by_chain=True)["tau"], np.float64)
    below = (tau[..., None] < quantiles).mean(1)
    error = below.std(0, ddof=1) / np.sqrt(len(below))
    assert (error < 0.005).all()
    assert (np.abs(below.mean(0) - level) < 4 * error + 0.1 * level).all()

    # a step of 0.01 left the neck: gradients were wrong by many times their size
    rng = np.random.default_rng(0)
    scale, mean = np.exp(-5.0), 5 + rng.normal(size=50)
    at = np.column_stack(
        [mean, np.full(50, -5.0), mean[:, None] + scale * rng.normal(size=(50, 8))]
    ).astype(np.float32)
    off = (at[:, 2:].astype(float) - at[:, :1]) / scale
    known = (y - at[:, 2:]) / np.square(errors) - off / scale
    found = measured[0](at.astype(float))[:, 2:]
    assert np.abs(found - known).max() < 1e-3 * np.abs(known).max()
