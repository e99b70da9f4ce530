"""Latent variables of rows are integrated out: values, derivatives, refusals."""

from __future__ import annotations

import functools
import itertools
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy
import scipy.special
import scipy.stats
from jax import Array
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import (
    MCMC,
    NUTS,
    SVI,
    Predictive,
    Trace_ELBO,
    init_to_median,
    init_to_uniform,
    init_to_value,
)
from numpyro.infer.autoguide import AutoNormal

from numpyro_minibatch import (
    MINT,
    SGHMC,
    SGLD,
    MinibatchMH,
    batch,
    marginalize,
    to_inference_data,
)
from numpyro_minibatch._internal.precision import double
from numpyro_minibatch._model import batch_comparison
from numpyro_minibatch._model.independence import check_rows
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch.marginal._kinks import _Score
from numpyro_minibatch.marginal._quadrature import find_place
from numpyro_minibatch.target import ModelTarget


def log_rows(model: Callable, values: dict[str, Any], *args: Any) -> jax.Array:
    """The log likelihood of each row of a marginalized model."""

    @jax.jit
    def run(values: dict[str, Any], args: Any) -> jax.Array:
        seeded = handlers.seed(handlers.substitute(model, data=values), 0)
        trace = handlers.trace(seeded).get_trace(*args).values()
        (site,) = (s for s in trace if s["type"] == "sample" and s["is_observed"])
        return site["fn"].log_prob(site["value"])

    return run(values, args)


def set_up_error(model: Any, draws: Any, args: tuple) -> dict[str, float]:
    """The error of the quadrature that a kernel's set-up measures at these draws."""
    return model.approximation(args, {})(draws, model)


def dense(log_joint: Callable, d: int = 1, half: float = 12.0) -> np.ndarray:
    """The log integral of a density over ``d`` numbers, by the trapezoidal rule.

    :param log_joint: from unconstrained points, shape ``(points, d)``, to ``(points,
        rows)``, in double precision.
    """
    count = {1: 8001, 2: 321, 3: 81}[d]
    grid = np.linspace(-half, half, count)
    points = np.stack(np.meshgrid(*[grid] * d, indexing="ij"), -1).reshape(-1, d)
    values = np.asarray(log_joint(points), np.float64)
    top = values.max(0)
    return np.log(np.exp(values - top).sum(0) * (grid[1] - grid[0]) ** d) + top


def mixture(y: Any = None, n: int = 0) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("data", n if y is None else len(y)) as idx:
        z = numpyro.sample("z", dist.Categorical(w), infer={"enumerate": "parallel"})
        b = numpyro.sample("b", dist.Bernoulli(jnp.array([0.2, 0.5, 0.7])[z]))
        obs = None if y is None else y[idx]
        numpyro.sample("y", dist.Normal(mu[z] + b, 1.0), obs=obs)


Y = jnp.array(np.random.default_rng(0).normal(size=7))
MIXTURE = {"mu": jnp.array([-1.0, 0.5, 2.0]), "w": jnp.array([0.2, 0.3, 0.5])}


@jax.jit
def sum_by_hand(values: dict[str, Any]) -> jax.Array:
    total: Any = 0.0
    for k in range(3):
        for b in range(2):
            p = [0.2, 0.5, 0.7][k]
            weight = values["w"][k] * (p if b else 1 - p)
            found = dist.Normal(values["mu"][k] + b, 1.0).log_prob(Y)
            total = total + weight * jnp.exp(found)
    return jnp.log(total)


def test_discrete_sites_are_summed_exactly() -> None:
    model = marginalize(mixture)
    found = log_rows(model, MIXTURE, Y)
    assert found.shape == (7,)
    np.testing.assert_allclose(found, sum_by_hand(MIXTURE), rtol=2e-6)
    derivative = jax.jacobian(lambda v: log_rows(model, v, Y))(MIXTURE)
    expected = jax.jacobian(sum_by_hand)(MIXTURE)
    for name in MIXTURE:
        np.testing.assert_allclose(derivative[name], expected[name], atol=2e-5)


def test_sites_can_be_summed_in_turn() -> None:
    model = marginalize(marginalize(mixture, ["b"]), ["z"])
    np.testing.assert_allclose(
        log_rows(model, MIXTURE, Y), sum_by_hand(MIXTURE), rtol=2e-6
    )


def test_without_observations_the_model_runs_as_written() -> None:
    draws = Predictive(marginalize(mixture), MIXTURE, batch_ndims=0)(
        jax.random.key(0), n=5
    )
    assert draws["y"].shape == draws["z"].shape == (5,)


@pytest.mark.slow
def test_results_have_the_observations_and_a_log_likelihood_of_each_row() -> None:
    y = jnp.concatenate([Y, Y + 3.0])
    model = pickle.loads(pickle.dumps(marginalize(mixture)))
    kernel = SGHMC(model, batch_size=5, step_size=1e-3)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    idata = to_inference_data(mcmc, log_likelihood=True)
    np.testing.assert_array_equal(idata["observed_data"]["y"], y)
    found = idata["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "data")
    draw = jax.tree.map(lambda x: x[-1], mcmc.get_samples())
    expected = log_rows(model, draw, y)
    np.testing.assert_allclose(found[0, -1], expected, rtol=1e-5)


def intercepts(X: Any, y: Any, mask: Any = True) -> None:
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, tau))
        seen = mask if mask is True else mask[idx].T
        with numpyro.plate("within", y.shape[1]), handlers.mask(mask=seen):
            logits = a + (X[idx] @ beta).T
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx].T)


def intercepts_given_rows(X: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", len(y), dim=-2):
        a = numpyro.sample("a", dist.Normal(0.0, tau))
        numpyro.deterministic("doubled", 2 * a)
        with numpyro.plate("within", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=a + X @ beta), obs=y)


rng = np.random.default_rng(1)
GROUPS_X = jnp.asarray(rng.normal(size=(40, 5, 2)))
GROUPS_Y = jnp.asarray(rng.integers(0, 2, size=(40, 5)), float)
MASK = jnp.asarray(np.arange(5) < rng.integers(1, 6, size=(40, 1)))
INTERCEPTS = {"beta": jnp.array([0.5, -1.0]), "tau": jnp.array(1.3)}


@jax.jit
def intercepts_by_hand(values: dict[str, Any], mask: Any = 1.0) -> jax.Array:
    """The integral over a fine grid, in a form that can be differentiated."""
    grid = jnp.linspace(-10.0, 10.0, 1001)
    linear = GROUPS_X @ values["beta"]
    rows = dist.Bernoulli(logits=grid[:, None, None] + linear).log_prob(GROUPS_Y)
    rows = (rows * mask).sum(-1)
    prior = dist.Normal(0.0, values["tau"]).log_prob(grid)[:, None]
    return jax.nn.logsumexp(rows + prior, axis=0) + np.log(0.02)


def test_a_random_intercept_has_the_value_and_derivatives_of_the_integral() -> None:
    def found(values: dict[str, Any]) -> jax.Array:
        return log_rows(marginalize(intercepts), values, GROUPS_X, GROUPS_Y)

    np.testing.assert_allclose(
        found(INTERCEPTS), intercepts_by_hand(INTERCEPTS), atol=1e-5
    )
    # derivatives up to second order, forward and in reverse
    for derivative in (
        jax.jacrev,
        lambda fn: jax.jacfwd(jax.jacrev(fn)),
        lambda fn: jax.jacfwd(jax.jacfwd(fn)),
    ):
        one = jax.jit(derivative(found))(INTERCEPTS)
        other = jax.jit(derivative(intercepts_by_hand))(INTERCEPTS)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize(("of_latent", "of_rows"), [(0.5, 0.5), (1.0, 0.3), (2.0, 1.0)])
def test_scales_of_sites_are_powers_of_their_densities(
    of_latent: float, of_rows: float
) -> None:
    y = np.array([0.3, -1.2, 5.0])

    def model() -> None:
        with numpyro.plate("rows", len(y)) as idx:
            with handlers.scale(scale=of_latent):
                a = numpyro.sample("a", dist.Normal(0.0, 2.0))
            with handlers.scale(scale=of_rows):
                numpyro.sample("y", dist.Normal(a, 1.0), obs=jnp.asarray(y)[idx])

    def log_joint(points: np.ndarray) -> np.ndarray:
        prior = -0.5 * (points / 2.0) ** 2 - np.log(2.0 * np.sqrt(2 * np.pi))
        of_y = -0.5 * (y - points) ** 2 - np.log(np.sqrt(2 * np.pi))
        return of_latent * prior + of_rows * of_y

    found = log_rows(marginalize(model), {})
    np.testing.assert_allclose(found, dense(log_joint, half=30.0), atol=1e-5)


def test_groups_can_be_ragged_by_a_mask() -> None:
    found = log_rows(marginalize(intercepts), INTERCEPTS, GROUPS_X, GROUPS_Y, MASK)
    expected = intercepts_by_hand(INTERCEPTS, MASK)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_nan_under_a_mask_of_a_group_is_no_reason_to_warn() -> None:
    X, y = jnp.asarray(rng.normal(size=(6, 4, 2))), np.ones((6, 4))
    mask = np.arange(4) < np.array([4, 2, 3, 1, 4, 4])[:, None]
    padded = jnp.asarray(np.where(mask, y, np.nan))
    kernel = MinibatchMH(marginalize(intercepts), batch_size=3, temperature=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.init(jax.random.key(0), 1, None, (X, padded, jnp.asarray(mask)), {})


def test_few_nodes_are_seen_to_be_wrong() -> None:
    model = marginalize(intercepts, num_nodes=3)
    found = log_rows(model, INTERCEPTS, GROUPS_X, GROUPS_Y)
    assert jnp.max(jnp.abs(found - intercepts_by_hand(INTERCEPTS))) > 1e-4


@pytest.mark.parametrize(
    "model",
    [intercepts_given_rows, pytest.param(intercepts, marks=pytest.mark.slow)],
)
def test_rows_are_read_a_few_at_a_time(model: Callable) -> None:
    marginal, args = marginalize(model), (GROUPS_X, GROUPS_Y)
    layout, _ = inspect_model("MINT", marginal, args, {}, 4)
    assert layout.plates == (("groups", 40),)
    assert set(layout.latents) == {"beta", "tau"}

    def target(args: tuple, kwargs: dict[str, Any]) -> ModelTarget:
        return ModelTarget(
            model=marginal,
            args=args,
            kwargs=kwargs,
            sizes=dict(layout.plates),
            slices=layout.slices,
            by_row=layout.by_row,
        )

    z = {"beta": INTERCEPTS["beta"], "tau": jnp.log(INTERCEPTS["tau"])}
    rows = jnp.array([3, 17, 5])
    found = target(args, {}).terms(z, {"groups": rows}).rows["groups"]
    np.testing.assert_allclose(found, intercepts_by_hand(INTERCEPTS)[rows], atol=1e-5)
    check_rows("MINT", target, marginal, args, {}, layout)


def positive(y: Any) -> None:
    """Sites of three supports, and a state that decides how many observations count."""
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("data", len(y)) as idx:
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        rate = numpyro.sample("rate", dist.Gamma(shape + z, 2.0))
        p = numpyro.sample("p", dist.Beta(2.0, 3.0))
        n = numpyro.sample("n", dist.Normal(0.0, 0.5))
        mean = rate * (0.5 + p) * jnp.exp(n)
        numpyro.sample("y", dist.Poisson(mean), obs=y[idx])


@pytest.mark.slow
def test_three_numbers_and_a_state_of_a_row() -> None:
    y = jnp.array([0.0, 1.0, 7.0])
    values = {"shape": jnp.array(1.5)}

    def joint(z: int) -> Callable:
        def at(points: np.ndarray) -> Any:
            log_rate, logit, n = points.T.astype(np.float32)
            p = jax.nn.sigmoid(logit)
            found = dist.Gamma(1.5 + z, 2.0).log_prob(jnp.exp(log_rate)) + log_rate
            found += dist.Beta(2.0, 3.0).log_prob(p) + jnp.log(p * (1 - p))
            found += dist.Normal(0.0, 0.5).log_prob(n)
            mean = jnp.exp(log_rate) * (0.5 + p) * jnp.exp(n)
            found = found[:, None] + dist.Poisson(mean[:, None]).log_prob(y)
            return found + dist.Bernoulli(0.3).log_prob(z)

        return at

    expected = np.logaddexp(dense(joint(0), 3), dense(joint(1), 3))
    found = log_rows(marginalize(positive), values, y)
    # the logarithm of a gamma variable is skewed: seven nodes are few
    np.testing.assert_allclose(found, expected, atol=1e-2)
    finer = log_rows(marginalize(positive, num_nodes=15), values, y)
    np.testing.assert_allclose(finer, expected, atol=2e-4)


@pytest.mark.slow
def test_three_numbers_of_a_row_have_the_stated_accuracy() -> None:
    y = np.array([0.0, 0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0])
    shapes = np.linspace(1.2, 1.8, 8)
    model = marginalize(positive)
    report = set_up_error(model, {"shape": shapes}, (jnp.asarray(y),))
    refined = model.refined(report)
    assert refined is not None and refined.num_nodes == 15

    def joint(shape: float, z: int) -> Callable:
        def at(points: np.ndarray) -> Any:
            log_rate, logit, n = points.T
            p = scipy.special.expit(logit)
            found = scipy.stats.gamma(shape + z, scale=0.5).logpdf(np.exp(log_rate))
            found += scipy.stats.beta(2.0, 3.0).logpdf(p) + np.log(p * (1 - p))
            found += scipy.stats.norm(0.0, 0.5).logpdf(n) + log_rate
            mean = np.exp(log_rate + n) * (0.5 + p)
            of_y = scipy.stats.poisson(mean[:, None]).logpmf(y)
            return found[:, None] + of_y + np.log(0.3 if z else 0.7)

        return at

    largest = dict.fromkeys((7, 15), 0.0)
    for shape in shapes[[0, -1]]:
        # to where the tail of the log rate is negligible, 81 points in each direction
        states = [dense(joint(shape, z), 3, half=13.0) for z in (0, 1)]
        for n in largest:
            with double():
                finer = marginalize(positive, num_nodes=n)
                found = log_rows(finer, {"shape": jnp.asarray(shape)}, jnp.asarray(y))
            off = np.abs(np.asarray(found) - np.logaddexp(*states)).max()
            largest[n] = max(largest[n], off)
    assert largest[15] < model.accuracy < 1e-3 < largest[7]


@pytest.mark.slow
def test_three_skewed_numbers_of_a_row_get_still_more_nodes() -> None:
    """Logits of beta variables have exponential tails."""

    def betas(y: Any) -> None:
        shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("data", len(y)) as idx:
            p = numpyro.sample("p", dist.Beta(shape, 1.0))
            q = numpyro.sample("q", dist.Beta(1.0, 1.0))
            r = numpyro.sample("r", dist.Beta(1.0, 4.0))
            of_row = dist.Binomial(10, p * q + (1 - p) * r)
            numpyro.sample("y", of_row, obs=y[idx])

    y, draws = jnp.array([0.0, 2.0, 10.0]), {"shape": np.array([1.2, 1.8])}
    model = marginalize(betas)
    refined = model.refined(set_up_error(model, draws, (y,)))
    assert refined is not None and refined.num_nodes == 19
    report = set_up_error(refined, draws, (y,))
    assert report["quadrature_error"] < model.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("shape", [0.15, 0.5])
def test_an_exponential_tail_is_integrated_with_few_nodes(shape: float) -> None:
    """The logarithm of a gamma variable, whose 61 Gauss-Hermite nodes leave 2e-3."""

    def model(y: Any) -> None:
        r = numpyro.sample("r", dist.HalfNormal(1.0))
        with numpyro.plate("data", len(y)) as idx:
            rate = numpyro.sample("rate", dist.Gamma(r, r))
            numpyro.sample("y", dist.Poisson(rate), obs=y[idx])

    counts = jnp.array([0.0, 1.0, 7.0])

    def by_hand(r: Any) -> Any:
        return dist.NegativeBinomial2(1.0, r).log_prob(counts).sum()

    def by_nodes(n: int) -> Callable:
        return lambda r: log_rows(marginalize(model, num_nodes=n), {"r": r}, counts)

    def by_default(r: Any) -> Any:  # NUTS has no set-up that chooses the nodes
        return log_rows(marginalize(model), {"r": r}, counts)

    with double():  # derivatives of a sum of logarithms cancel in single precision
        at = jnp.asarray(shape)
        assert abs(by_default(at).sum() - by_hand(at)) < 3e-4
        assert abs(by_nodes(31)(at).sum() - by_hand(at)) < 3e-5
        assert abs(by_nodes(11)(at).sum() - by_hand(at)) > 1e-2
        for derive in (jax.grad, lambda f: jax.grad(jax.grad(f))):
            found = derive(lambda r: by_nodes(31)(r).sum())(at)
            np.testing.assert_allclose(found, derive(by_hand)(at), rtol=1e-3)
    # single precision rounds small rates to zero, where nodes would have no derivative
    for derive in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        found = derive(lambda r: by_nodes(31)(r).sum())(jnp.float32(shape))
        assert np.isfinite(found)


def of_kinked(make: Callable) -> Callable:
    """A model of three observations a group, with a latent number ``make(m, s)``."""

    def model(y: Any) -> None:
        m = numpyro.sample("m", dist.Normal(0.0, 2.0))
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("groups", len(y), dim=-2):
            a = numpyro.sample("a", make(m, s))
            with numpyro.plate("within", y.shape[1], dim=-1):
                numpyro.sample("y", dist.Normal(a, 1.5), obs=y)

    return model


KINKED = {
    "laplace": lambda m, s: dist.Laplace(m, s),
    "asymmetric": lambda m, s: dist.AsymmetricLaplace(m, s, 0.7 + s / 2),
    "of a quantile": lambda m, s: dist.AsymmetricLaplaceQuantile(m, s, 0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", KINKED.values(), ids=KINKED)
def test_a_density_with_a_kink_is_integrated_on_both_sides(make: Callable) -> None:
    """As accurately, and with derivatives, as one without a kink."""
    y = jnp.array([[0.1, -0.5, 0.2], [3.0, 4.5, 5.5], [-1.0, -2.0, -7.0]])

    def dense_rows(m: Any, s: Any) -> Any:  # the kink is a point of the grid
        a = (m + jnp.linspace(-15.0, 15.0, 6001))[:, None]
        log_p = make(m, s).log_prob(a)
        log_p += dist.Normal(a[..., None], 1.5).log_prob(y).sum(-1)
        return jax.scipy.special.logsumexp(log_p, axis=0) + jnp.log(30.0 / 6000)

    def found(m: Any, s: Any, num_nodes: int = 21) -> Any:
        model = marginalize(of_kinked(make), sites=["a"], num_nodes=num_nodes)
        return log_rows(model, {"m": m, "s": s}, y)

    with double():
        for m, s in [(0.3, 0.7), (-2.0, 2.5)]:
            at = jnp.asarray(m), jnp.asarray(s)
            np.testing.assert_allclose(found(*at, 11), dense_rows(*at), atol=6e-3)
            np.testing.assert_allclose(found(*at), dense_rows(*at), atol=5e-5)
            for derive in (jax.grad, jax.hessian):
                both = [
                    derive(lambda x, f=f: f(*x).sum())(jnp.stack(at))
                    for f in (found, dense_rows)
                ]
                np.testing.assert_allclose(*both, rtol=1e-3, atol=1e-3)


def test_the_score_of_a_distance_has_its_density_and_is_nearly_normal() -> None:
    score, grid = _Score(), np.linspace(-10.0, 10.0, 20_001)
    with double():
        density = np.exp(np.asarray(score.log_prob(jnp.asarray(grid))))
        draws = np.asarray(score.sample(jax.random.key(0), (20_000,)))
    below = np.cumsum(density) * (grid[1] - grid[0])
    assert abs(below[-1] - 1.0) < 1e-6
    assert np.abs(below - scipy.stats.norm.cdf(grid)).max() < 5e-4
    uniform = np.interp(draws, grid, below)
    assert scipy.stats.kstest(uniform, "uniform").pvalue > 1e-4


def test_a_number_with_a_kink_may_be_that_of_a_chain_of_states() -> None:
    y = jnp.array([[0.3, 1.5, -2.0], [2.0, 2.5, 3.5]])
    stay = np.array([[0.8, 0.2], [0.3, 0.7]])

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(y)):
            a = numpyro.sample("a", dist.Laplace(0.5, s))

        def step(state: Any, now: Any) -> Any:
            with numpyro.plate("rows", len(y)):
                probs = jnp.asarray(stay)[state]
                state = numpyro.sample("state", dist.Categorical(probs))
                numpyro.sample("y", dist.Normal(a + 2.0 * state, 1.0), obs=now)
            return state, None

        scan(step, jnp.zeros(len(y), jnp.int32), y.T)

    grid = 0.5 + np.linspace(-12.0, 12.0, 4001)[:, None]
    total: Any = 0.0
    for path in itertools.product(range(2), repeat=3):
        steps = zip((0, *path), path, strict=False)
        chance = np.prod([stay[before, now] for before, now in steps])
        log_p = scipy.stats.laplace.logpdf(grid, 0.5, 0.8)
        for t, state in enumerate(path):
            mean = grid + 2.0 * state
            log_p = log_p + scipy.stats.norm.logpdf(np.asarray(y)[:, t], mean, 1.0)
        total = total + chance * np.exp(log_p).sum(0) * (grid[1] - grid[0])
    for sites in (None, ["a", "state"]):
        found = log_rows(marginalize(model, sites, num_nodes=31), {"s": 0.8}, y)
        np.testing.assert_allclose(found, np.log(total), atol=1e-4)


def test_a_site_in_two_parts_keeps_its_name() -> None:
    y = jnp.zeros((3, 2))
    plain = of_kinked(KINKED["laplace"])
    (level,) = marginalize(plain, sites=["a"]).levels((y,), {})
    assert level.written == ("a",)
    assert set(level.names) == {"a_side", "a_score"}
    given = handlers.condition(marginalize(plain), data={"a": jnp.zeros((3, 1))})
    with pytest.raises(ValueError, match="no effect on 'a', which is integrated"):
        log_rows(given, {"m": 0.0, "s": 1.0}, y)


def test_nearly_collinear_numbers_are_integrated() -> None:
    """Two effects of which the observation determines the sum, to 0.003."""

    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, scale))
            c = numpyro.sample("c", dist.Normal(0.0, scale))
            numpyro.sample("y", dist.Normal(a + c, 0.003), obs=y[idx])

    y = jnp.array([1.0, -0.3])
    with double():
        found = log_rows(marginalize(model), {"scale": jnp.asarray(1.0)}, y)
    exact = scipy.stats.norm(0.0, np.sqrt(2.0 + 0.003**2)).logpdf(y)
    np.testing.assert_allclose(found, exact, atol=1e-6)


def test_a_tail_along_no_axis_is_within_reach() -> None:
    """A group's mean and its scale: where the scale is large, the mean is shrunk."""
    y = np.array([[3.66, 3.58, 3.34], [-1.56, -1.9, -2.53], [1.0, 1.1, 0.4]])

    def model(y: Any) -> None:
        ts = numpyro.sample("ts", dist.HalfNormal(1.0))
        with numpyro.plate("groups", len(y)) as idx:
            mean = numpyro.sample("mean", dist.Normal(1.0, 0.76))
            scale = numpyro.sample("scale", dist.LogNormal(-0.54, ts))
            of_row = dist.Normal(mean[:, None], scale[:, None]).to_event(1)
            numpyro.sample("y", of_row, obs=y[idx])

    # the means integrated by hand: y is normal with covariance v^2 I + 0.76^2
    log_v = np.linspace(-12.0, 6.0, 4001)[:, None]
    v2, centred = np.exp(2 * log_v), y - y.mean(1, keepdims=True)
    of_mean = v2 / 3 + 0.76**2
    log_f = -np.log(2 * np.pi * v2) - np.square(centred).sum(1) / (2 * v2)
    log_f = log_f - 0.5 * np.log(3 * 2 * np.pi * of_mean)
    log_f = log_f - np.square(y.mean(1) - 1.0) / (2 * of_mean)
    log_f = log_f + scipy.stats.norm(-0.54, 0.7).logpdf(log_v)
    expected = scipy.special.logsumexp(log_f, axis=0) + np.log(18.0 / 4000)

    values = {"ts": jnp.array(0.7)}
    found = log_rows(marginalize(model, num_nodes=25), values, jnp.asarray(y))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    coarse = log_rows(marginalize(model), values, jnp.asarray(y))
    assert np.abs(coarse - expected).max() > 0.05


@pytest.mark.slow
def test_correlated_normal_variables_are_exact() -> None:
    # the model is normal: three nodes of each dimension would do
    design = jnp.asarray(rng.normal(size=(9, 4, 2)))
    y = jnp.asarray(rng.normal(size=(9, 4)))
    covariance = jnp.array([[2.0, 0.8], [0.8, 1.0]])

    def model(design: Any, y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("groups", len(y)) as idx:
            prior = dist.MultivariateNormal(jnp.array([50.0, -3.0]), covariance)
            b = numpyro.sample("b", prior)
            mean = jnp.einsum("gki,gi->gk", design[idx], b)
            numpyro.sample("y", dist.Normal(mean, s).to_event(1), obs=y[idx])

    found = log_rows(marginalize(model), {"s": jnp.array(0.7)}, design, y)
    mean = design @ jnp.array([50.0, -3.0])
    total = design @ covariance @ design.mT + 0.49 * jnp.eye(4)
    expected = dist.MultivariateNormal(mean, total).log_prob(y)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_events_of_discrete_numbers_are_summed_over_their_joint_values() -> None:
    design = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1], [1, 1, 1]])
    y = np.random.default_rng(3).integers(0, 2, (40, 5))

    def model(y: Any) -> None:
        skill = numpyro.sample("skill", dist.Beta(1.0, 1.0).expand([3]).to_event(1))
        slip = numpyro.sample("slip", dist.Beta(1.0, 4.0))
        with numpyro.plate("pupils", len(y)):
            has = numpyro.sample("has", dist.Bernoulli(skill).to_event(1))
            able = jnp.all(has[:, None, :] >= design, -1)
            p = jnp.where(able, 1.0 - slip, slip)
            numpyro.sample("y", dist.Bernoulli(p).to_event(1), obs=y)

    skill, slip = np.array([0.3, 0.6, 0.8]), 0.15
    total = np.zeros(len(y))
    for has in itertools.product((0, 1), repeat=3):
        p = np.where((np.array(has) >= design).all(-1), 1.0 - slip, slip)
        weight = np.where(has, skill, 1.0 - skill).prod()
        total += weight * np.where(y, p, 1.0 - p).prod(-1)
    values = {"skill": jnp.array(skill), "slip": jnp.array(slip)}
    found = log_rows(marginalize(model), values, y)
    np.testing.assert_allclose(found, np.log(total), rtol=1e-5)
    kernel = MinibatchMH(model, control_variate="taylor2")
    kernel._setup((y,), {})
    assert kernel.settings["marginalized"] == ["has"]


def test_too_many_joint_values_of_an_event_are_counted() -> None:
    def model(y: Any) -> None:
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        with numpyro.plate("rows", len(y)):
            on = dist.Bernoulli(p).expand([len(y), 40]).to_event(1)
            numpyro.sample("y", dist.Normal(numpyro.sample("on", on).sum(-1)), obs=y)

    with pytest.raises(ValueError, match="1099511627776 joint states"):
        log_rows(marginalize(model), {"p": jnp.array(0.5)}, np.zeros(3))


def test_bounds_of_a_latent_variable_may_be_parameters() -> None:
    k = np.arange(11)

    def model(k: Any) -> None:
        low = numpyro.sample("low", dist.Uniform(0.0, 0.5))
        high = numpyro.sample("high", dist.Uniform(0.5, 1.0))
        with numpyro.plate("rows", len(k)):
            p = numpyro.sample("p", dist.Uniform(low, high))
            numpyro.sample("k", dist.Binomial(10, p), obs=k)

    grid = np.linspace(0.2, 0.9, 20_001)
    grid = (grid[1:] + grid[:-1]) / 2
    exact = scipy.stats.binom.logpmf(k[:, None], 10, grid)
    values = {"low": jnp.array(0.2), "high": jnp.array(0.9)}
    found = log_rows(marginalize(model, num_nodes=45), values, k)
    np.testing.assert_allclose(found, np.log(np.exp(exact).mean(1)), atol=1e-3)


def test_far_modes_are_found() -> None:
    # a first Newton step would overflow the rate
    y = jnp.array([0.0, 1.0, 1000.0, 1e6])

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[idx])

    def joint(points: np.ndarray) -> Any:
        a = points
        found = -0.5 * (a / 3.0) ** 2 - np.log(3.0) - 0.5 * np.log(2 * np.pi)
        from scipy.special import gammaln

        return found + np.asarray(y) * a - np.exp(a) - gammaln(np.asarray(y) + 1.0)

    # of a count of zero the density is one-sided: eleven nodes are 3e-3 off
    found = log_rows(marginalize(model, num_nodes=31), {"s": jnp.array(3.0)}, y)
    expected = dense(joint, half=20.0)
    assert np.all(np.isfinite(found))
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-5, atol=2e-4)


def test_sites_of_inner_plates_are_integrated_first() -> None:
    y = jnp.asarray(rng.normal(size=(6, 3)))

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("groups", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            with numpyro.plate("within", 3):
                z = numpyro.sample("z", dist.Bernoulli(0.2))
                mean = a + jnp.where(z == 1, 2.0, 0.0)
                numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx].T)

    def joint(points: np.ndarray) -> Any:
        def density(x: Any) -> Any:
            return np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)

        off = np.asarray(y) - points[:, :, None]
        rows = np.log(0.8 * density(off) + 0.2 * density(off - 2.0)).sum(-1)
        return rows + np.log(density(points / 1.5) / 1.5)

    found = log_rows(marginalize(model), {"s": jnp.array(1.5)}, y)
    np.testing.assert_allclose(found, dense(joint), atol=1e-4)


# refusals -----------------------------------------------------------------------------


def shared(y: Any, group: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0.0, s))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.Normal(a[group[idx]], 1.0), obs=y[idx])


def infinite(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        n = numpyro.sample("n", dist.Poisson(s))
        numpyro.sample("y", dist.Normal(n, 1.0), obs=y[idx])


def four(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(a.sum(-1), 1.0), obs=y[idx])


def leaking(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y[idx])
    numpyro.sample("total", dist.Normal(a.sum(), 1.0), obs=0.0)


def dependent(y: Any) -> None:
    with numpyro.plate("data", len(y)) as idx:
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        a = numpyro.sample("a", dist.Normal(z, 1.0))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y[idx])


def sign(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(jnp.where(a > 0, 1.0, 0.0), 1.0), obs=y[idx])


def intervals(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s))
        which = jnp.searchsorted(jnp.array([-1.0, 1.0]), jnp.exp(a))
        numpyro.sample("y", dist.Normal(which, 1.0), obs=y[idx])


def masked(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)), handlers.mask(mask=y > 0):
        a = numpyro.sample("a", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


def no_latent(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.Normal(s, 1.0), obs=y[idx])


def expanded(y: Any) -> None:
    a = numpyro.sample("a", dist.Gamma(2.0).expand([7]))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


def in_two_plates(y: Any) -> None:
    with numpyro.plate("latent", len(y)):
        a = numpyro.sample("a", dist.Gamma(2.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


def bounds_of_rows(y: Any) -> None:
    with numpyro.plate("data", len(y)):
        a = numpyro.sample("a", dist.DiscreteUniform(0, jnp.arange(7)))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


ONE_PLATE = (
    r'plate\("data", 7\):\n +a = numpyro.sample\("a", dist.Gamma\(\.\.\.\)\)\n +'
    r'numpyro.sample\("y", dist.Normal\(a, \.\.\.\), obs=y\)'
)


@pytest.mark.parametrize(
    ("model", "sites", "message"),
    [
        (expanded, None, rf"without .expand\(\[7\]\):.*{ONE_PLATE}"),
        (in_two_plates, None, rf"has 7 elements, too.*use one plate.*{ONE_PLATE}"),
        (bounds_of_rows, None, r"differs between rows.*dist.Categorical\(within /"),
        (shared, None, "plate 'groups' holds no observation.*by_group"),
        (shared, ["a"], "plate 'groups' holds no observation.*by_group"),
        (shared, ["s"], "'s', which is in no plate: all rows share it"),
        (infinite, None, "'n': Poisson has no finite support.*NegativeBinomial2"),
        (four, None, r"at most 3 continuous.* has 4: 'a' \(4\)"),
        (leaking, None, "'a' out of each row of plate 'data': site 'total' depends"),
        (dependent, ["z"], "'z' out of each row of plate 'data': site 'a' depends"),
        (sign, None, r"'a' by quadrature: the observations.*Normal\(m, s\).*ndtr"),
        (intervals, None, "'a' by quadrature: the observations depend.*steps"),
        (masked, None, "'a', which is inside of numpyro.handlers.mask.*observed sites"),
        (no_latent, None, "no latent site in a plate with observations.*are: 's'"),
        (no_latent, ["y"], "'y', which is observed"),
        (no_latent, ["x"], "'x', which is not in the model.*: 's'"),
    ],
)
def test_models_without_a_marginal_likelihood_per_row_are_refused(
    model: Callable, sites: Any, message: str
) -> None:
    args = (Y, jnp.zeros(7, int)) if model is shared else (Y,)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        log_rows(marginalize(model, sites), {}, *args)


GROUP = jnp.array([0, 0, 1, 2, 2, 2, 3])


def by_index(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        b = numpyro.sample("b", dist.Normal(0.0, s))
        a = numpyro.sample("a", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(b + a[GROUP], 1.0), obs=y)


def by_neighbour(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        a = numpyro.sample("a", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(a + jnp.roll(a, 1), 1.0), obs=y)


def by_mean(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        a = numpyro.sample("a", dist.Normal(0.0, s))
        with numpyro.plate("within", 2):
            numpyro.sample("y", dist.Normal(a - a.mean(), 1.0), obs=jnp.stack([y, y]))


def by_state(y: Any) -> None:
    with numpyro.plate("data", len(y)):
        a = numpyro.sample("a", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(a[GROUP], 1.0), obs=y)


def by_chain(y: Any) -> None:
    def step(a: Any, x: Any) -> Any:
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Bernoulli(jnp.where(a == 1, 0.8, 0.3)))
            numpyro.sample("y", dist.Normal(a[GROUP], 1.0), obs=x)
        return a, None

    scan(step, jnp.zeros(len(y), jnp.int32), jnp.stack([y, -y, y]))


@pytest.mark.parametrize("model", [by_index, by_neighbour, by_mean, by_state, by_chain])
def test_latent_values_that_rows_share_are_refused(model: Callable) -> None:
    """The integral of each row by itself exists, and is wrong."""
    message = "cannot integrate 'a' out of each row of plate 'data': the log density of"
    with pytest.raises(ValueError, match=f"{message}.*by_group"):
        handlers.seed(marginalize(model), 0)(Y)
    # who traces the model first does not hide it from those who have the data
    mcmc = MCMC(NUTS(marginalize(model)), num_warmup=1, num_samples=1)
    jax.eval_shape(lambda y: log_rows(marginalize(model), {}, y), Y)
    with pytest.raises(ValueError, match=message):
        mcmc.run(jax.random.key(0), Y)


def test_an_index_of_latent_values_is_right_or_wrong_by_the_data() -> None:
    def model(y: Any, group: Any) -> None:
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Normal(0.0, 2.0))
            numpyro.sample("y", dist.Normal(a[group], 1.0), obs=y)

    seeded = handlers.seed(marginalize(model), 0)
    trace = handlers.trace(seeded).get_trace(Y, jnp.arange(7))
    found = trace["y"]["fn"].log_prob(Y)
    by_hand = dist.Normal(0.0, jnp.sqrt(5.0)).log_prob(Y)
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)
    with pytest.raises(ValueError, match="'a' in other rows"):
        seeded(Y, GROUP)


def test_numpy_data_are_compared_with_latent_states() -> None:
    def counts(y: Any, p: Any) -> None:
        with numpyro.plate("data", len(y)):
            n = numpyro.sample("n", dist.Categorical(p))
            numpyro.sample("y", dist.Binomial(n, 0.3), obs=y)

    y, p = np.array([0, 1, 2, 0]), np.array([0.1, 0.2, 0.3, 0.4])
    found = log_rows_of_numpy(marginalize(counts), y, p)
    pmf = scipy.stats.binom.pmf(y[:, None], np.arange(4), 0.3)
    np.testing.assert_allclose(found, np.log(pmf @ p).sum(), rtol=1e-5)


def log_rows_of_numpy(model: Callable, *args: Any) -> float:
    """The log density of a model with NumPy arrays, which are not traced."""
    return float(numpyro.infer.util.log_density(model, args, {}, {})[0])


def test_uniform_states_with_bounds_of_rows_are_written_as_the_refusal_says() -> None:
    n = jnp.array([0, 1, 2, 3, 8, 8, 5])

    def model(y: Any) -> None:
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            within = jnp.arange(9) <= n[:, None]
            fn = dist.Categorical(within / within.sum(1, keepdims=True))
            numpyro.sample("y", dist.Normal(numpyro.sample("a", fn) + shift), obs=y)

    found = log_rows(marginalize(model), {"shift": 0.5}, Y)
    pdf = scipy.stats.norm.pdf(Y[:, None], np.arange(9) + 0.5)
    means = [p[: k + 1].mean() for p, k in zip(pdf, n, strict=True)]
    np.testing.assert_allclose(found, np.log(means), rtol=1e-4)


def excess(cens: Any, y: Any, prior: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        e = numpyro.sample("e", prior)
        obs = jnp.where(cens, y + e, y)
        numpyro.sample("latent", dist.Normal(m, 1.0), obs=obs)


@pytest.mark.slow
def test_rows_with_an_infinite_integral_are_refused_at_once() -> None:
    improper = dist.ImproperUniform(dist.constraints.positive, (), ())
    cens = jnp.array([True, True, False, True, False, True, True])

    def start(model: Any, *args: Any) -> None:
        kernel = MINT(marginalize(model), batch_size=2, temperature=10.0)
        kernel.init(jax.random.key(0), 0, None, args, {})

    with pytest.raises(ValueError, match="'e': .*of row 2 of plate 'data'.*improper"):
        start(lambda cens, y: excess(cens, y, improper), cens, Y)
    # integrals over all values are finite if each row depends on it, or is bounded
    start(lambda cens, y: excess(cens, y, improper), jnp.ones(7, bool), Y)
    bounded = dist.ImproperUniform(dist.constraints.unit_interval, (), ())
    start(lambda cens, y: excess(cens, y, bounded), cens, Y)
    start(lambda cens, y: excess(cens, y, dist.HalfNormal(2.0)), cens, Y)

    def log_rates(y: Any, flat: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("groups", len(y)):
            a = numpyro.sample("a", flat)
            rates = jnp.exp(a[:, None] + b * jnp.arange(2.0))
            numpyro.sample("y", dist.Poisson(rates).to_event(1), obs=y)

    # counts of zero bound the logarithm of a rate on one side only
    flat = dist.ImproperUniform(dist.constraints.real, (), ())
    counts = jnp.array([[1, 2], [0, 0], [3, 0]])
    with pytest.raises(ValueError, match="'a': .*of row 1 of plate 'groups' do not"):
        start(lambda y: log_rates(y, flat), counts)
    start(lambda y: log_rates(y, flat), counts[::2])
    start(lambda y: log_rates(y, dist.Normal(0.0, 2.0)), counts)


@pytest.mark.slow
def test_padding_of_missing_values_contributes_nothing() -> None:
    def model(x: Any, k: Any, y: Any, valid: Any, of_y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            with handlers.mask(mask=valid):
                x = numpyro.sample("x", dist.Normal(), obs=x, obs_mask=x != 9)
                fn = dist.Categorical(jnp.array([0.3, 0.7]))
                k = numpyro.sample("k", fn, obs=k, obs_mask=k != 9)
            with handlers.mask(mask=of_y):
                numpyro.sample("y", dist.Normal(b * x + k, 0.5), obs=y)

    x, k = jnp.array([9, 0.3, 9, 0.5, 9, 9, 0.7]), jnp.array([0, 1, 1, 9, 9, 9, 1])
    valid = jnp.array([True, True, True, True, True, False, False])
    found = log_rows(marginalize(model), {"b": 2.0}, x, k, Y, valid, valid)
    joint = np.log([0.3, 0.7]) * np.ones((7, 2))
    mean = np.where(x == 9, 0.0, 2.0 * x)[:, None] + np.arange(2)
    scale = np.where(x == 9, np.hypot(2.0, 0.5), 0.5)[:, None]
    joint = joint + scipy.stats.norm.logpdf(Y[:, None], mean, scale)
    joint += np.where(x == 9, 0.0, scipy.stats.norm.logpdf(x))[:, None]
    known = joint[np.arange(7), np.where(k == 9, 0, k)]
    expected = np.where(k == 9, scipy.special.logsumexp(joint, 1), known)
    np.testing.assert_allclose(found, np.where(valid, expected, 0.0), atol=1e-5)
    kernel = MINT(marginalize(model), batch_size=2, temperature=10.0)
    with pytest.raises(ValueError, match="row 5 of .* depend on it, .*around site 'x'"):
        everywhere = jnp.ones(7, bool)
        kernel.init(jax.random.key(0), 0, None, (x, k, Y, valid, everywhere), {})


MISSING = np.array([True, False, False, True, False, False, True])


@pytest.mark.parametrize("filler", [0.0, np.nan])
def test_missing_covariates_are_integrated_out(filler: float) -> None:
    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            prior = dist.Normal(1.0, 2.0)
            value = numpyro.sample("x", prior, obs=x, obs_mask=~MISSING)
            numpyro.sample("y", dist.Normal(b * value, 0.5), obs=y)

    x = np.where(MISSING, filler, np.linspace(-2.0, 2.0, 7))
    found = log_rows(marginalize(model), {"b": 1.5}, x, Y)
    known = scipy.stats.norm.logpdf(x, 1.0, 2.0)
    known += scipy.stats.norm.logpdf(Y, 1.5 * x, 0.5)
    missing = scipy.stats.norm.logpdf(Y, 1.5, np.hypot(1.5 * 2.0, 0.5))
    np.testing.assert_allclose(found, np.where(MISSING, missing, known), rtol=1e-5)


def test_rows_without_missing_values_have_no_error_of_a_quadrature() -> None:
    def model(x: Any, y: Any, missing: Any) -> None:
        shape = numpyro.sample("shape", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            x = numpyro.sample("x", dist.Gamma(shape), obs=x, obs_mask=~missing)
            numpyro.sample("y", dist.Normal(jnp.log(x), 1.0), obs=y)

    x, none = jnp.linspace(0.1, 3.0, 7), jnp.zeros(7, bool)
    for shape in (0.15, 2.0):  # with 11 nodes, that of 0.15 is off by 0.09
        found = log_rows(marginalize(model), {"shape": shape}, x, Y, none)
        known = scipy.stats.gamma.logpdf(x, shape)
        known += scipy.stats.norm.logpdf(Y, np.log(x))
        np.testing.assert_allclose(found, known, atol=5e-6)


def test_missing_classes_are_summed() -> None:
    p, means = np.array([0.2, 0.3, 0.5]), np.array([-1.0, 0.0, 2.0])

    def model(k: Any, y: Any, missing: Any) -> None:
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            k = numpyro.sample("k", dist.Categorical(p), obs=k, obs_mask=~missing)
            mean = shift + jnp.asarray(means)[k]
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    k = np.array([0, 1, 2, 0, 1, 2, 0])
    found = log_rows(marginalize(model), {"shift": 0.5}, k, Y, MISSING)
    joint = np.log(p) + scipy.stats.norm.logpdf(Y[:, None], 0.5 + means)
    known = joint[np.arange(7), k]
    missing = scipy.special.logsumexp(joint, 1)
    np.testing.assert_allclose(found, np.where(MISSING, missing, known), rtol=1e-5)
    # kernels do it by themselves, as for other discrete sites
    kernel = MINT(model, batch_size=2, temperature=10.0)
    kernel.init(jax.random.key(0), 0, None, (k, Y, MISSING), {})
    assert kernel.settings["marginalized"] == ["k_unobserved"]


def test_a_refusal_names_the_distribution_that_the_user_wrote() -> None:
    def all_rows() -> None:  # arrays from a closure keep all of their rows
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(Y)):
            a = numpyro.sample("a", dist.Normal(0.0, s))
            numpyro.sample("y", dist.Laplace(a, 1.0), obs=Y)

    kernel = MINT(marginalize(all_rows), batch_size=2, temperature=10.0)
    with pytest.raises(ValueError, match=r'sample\("y", dist.Laplace\('):
        kernel.init(jax.random.key(0), 0, None, (), {})


EXCLUDED: dict[str, Any] = {
    "Poisson": lambda present, rate: dist.Poisson(present * rate),
    "where": lambda present, rate: dist.Poisson(jnp.where(present == 1, rate, 0.0)),
    "Binomial": lambda present, rate: dist.Binomial(9, present * rate / (1 + rate)),
}


@pytest.mark.slow
@pytest.mark.parametrize("of", EXCLUDED.values(), ids=EXCLUDED)
def test_states_that_the_observations_exclude_have_derivatives(of: Callable) -> None:
    """A count above zero where nothing is present."""
    counts = jnp.array([0.0, 3.0, 1.0, 0.0, 2.0])

    def model(y: Any) -> None:
        rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            present = numpyro.sample("present", dist.Bernoulli(0.4))
            with numpyro.plate("visits", 60):  # many zeros exclude nothing
                numpyro.sample("y", of(present, rate), obs=y[idx])

    def found(rate: Any) -> Any:
        return log_rows(marginalize(model), {"rate": rate}, counts).sum()

    def by_hand(rate: Any) -> Any:
        there = jnp.log(0.4) + 60 * of(1.0, rate).log_prob(counts)
        absent = jnp.where(counts == 0, jnp.log(0.6), -jnp.inf)
        return jnp.logaddexp(there, absent).sum()

    for derive in (lambda f: f, jax.grad, jax.hessian):
        at = jnp.array(0.7)
        np.testing.assert_allclose(derive(found)(at), derive(by_hand)(at), rtol=1e-4)


@pytest.mark.parametrize("given", [None, object()])
def test_a_distribution_of_the_users_own_needs_no_support(given: Any) -> None:
    class Own(dist.Distribution):
        support = given

        def __init__(self, loc: Any) -> None:
            self.loc = loc
            super().__init__(batch_shape=jnp.shape(loc))

        def log_prob(self, value: Any) -> Any:
            return -0.5 * (value - self.loc) ** 2 - 0.5 * jnp.log(2 * jnp.pi)

    def model(y: Any) -> None:
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, 2.0))
            numpyro.sample("y", Own(a), obs=y[idx])

    exact = dist.Normal(0.0, np.sqrt(5.0)).log_prob(Y)
    np.testing.assert_allclose(log_rows(marginalize(model), {}, Y), exact, atol=1e-4)


@pytest.mark.parametrize(
    "of, refused",
    [
        (lambda u: dist.Uniform(0.0, u), True),
        (lambda u: dist.Pareto(u, 2.0), True),
        (lambda u: dist.Uniform(0.0, u).mask(True), True),
        (lambda u: dist.TruncatedNormal(u, 1.0, low=0.0), False),
        (lambda u: dist.TruncatedNormal(0.0, u, high=5.0), False),
    ],
)
def test_numbers_that_bound_an_observation_are_refused(of: Any, refused: bool) -> None:
    """With 31 nodes the likelihood of some rows was zero, and more were recommended."""

    def model(y: Any) -> None:
        with numpyro.plate("data", len(y)) as idx:
            u = numpyro.sample("u", dist.Gamma(2.0, 1.0))
            numpyro.sample("y", of(u), obs=y[idx])

    y = np.array([0.3, 1.2])
    if not refused:
        assert np.all(np.isfinite(log_rows(marginalize(model), {}, y)))
        return
    with pytest.raises(ValueError, match="a bound of the values of 'y' depends on it"):
        log_rows(marginalize(model), {}, y)


def test_numbers_that_are_cut_off_have_a_density_without_steps() -> None:
    def model(y: Any) -> None:
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
            mean = jnp.where(a > 0, a, 0.0)
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx])

    assert np.all(np.isfinite(log_rows(marginalize(model), {}, Y)))


def shifted(shift: Any, y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + shift[idx])), obs=y[idx])


def test_rows_whose_density_is_nowhere_finite_are_named() -> None:
    shift = np.zeros(40, np.float32)
    shift[[9, 30]] = np.nan
    kernel = MinibatchMH(
        marginalize(shifted), control_variate="taylor2", batch=batch.full()
    )
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match=r"rows \[9, 30\]\) is not finite") as raised:
        mcmc.run(jax.random.key(0), shift, np.ones(40, np.float32))
    assert "num_nodes" not in str(raised.value)  # they are not to blame


def excluded(y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s))
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        # a state that excludes many rows, and a factor that excludes others
        numpyro.factor("none", jnp.where((z == 1) & (y[idx] > 0), -jnp.inf, 0.0))
        numpyro.factor("never", jnp.where(y[idx] > 2, -jnp.inf, 0.0))
        numpyro.sample("y", dist.Normal(a + z, 1.0), obs=y[idx])


@pytest.mark.parametrize(
    "kernel",
    [
        partial(MinibatchMH, control_variate="taylor2"),
        partial(SGLD, step_size=1e-3, batch_size=4),
    ],
    ids=["MinibatchMH", "SGLD"],
)
def test_rows_that_the_model_excludes_are_named_before_a_set_up(
    kernel: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the set-up or the start of the chain")

    base = "numpyro_minibatch.kernels._shared.base"
    monkeypatch.setattr(f"{base}.survey", compiled)
    monkeypatch.setattr(f"{base}.MinibatchKernel._start_fn", compiled)
    y = jnp.linspace(-2.0, 2.0, 40).at[jnp.array([9, 30])].set(3.0)
    model = marginalize(excluded)
    mcmc = MCMC(kernel(model), num_warmup=1, num_samples=1, progress_bar=False)
    message = r"rows \[9, 30\]\) is zero or NaN.*values of 'a', 'z'"
    with pytest.raises(ValueError, match=message):
        mcmc.run(jax.random.key(0), y)


@pytest.mark.slow
def test_rows_that_one_start_allows_are_accepted() -> None:
    def model(y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 10.0))
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(b, 1.0))
            numpyro.factor("high", jnp.where(b > 8.0, 0.0, -jnp.inf) + 0.0 * y[idx])
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y[idx])

    def run(**settings: Any) -> None:
        kernel = SGLD(marginalize(model), step_size=1e-6, batch_size=4, **settings)
        mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
        mcmc.run(jax.random.key(0), 9.0 + Y)

    with pytest.raises(ValueError, match="zero or NaN"):
        run()
    run(init_strategy=init_to_value(values={"b": 9.0}))


def test_numpyro_too_names_rows_that_the_model_excludes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def integrated(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the rows were integrated")

    model = marginalize(excluded)
    y = jnp.linspace(-2.0, 2.0, 40).at[jnp.array([9, 30])].set(3.0)
    message = r"'data', rows \[9, 30\]\) is zero or NaN.*values of 'a', 'z'"
    with monkeypatch.context() as patch:
        patch.setattr("numpyro_minibatch.marginal._model.log_integral", integrated)
        nuts = MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
        with pytest.raises(ValueError, match=message):
            nuts.run(jax.random.key(0), y)
        guide = AutoNormal(model)
        svi = SVI(model, guide, optax.sgd(0.1), Trace_ELBO())
        with pytest.raises(ValueError, match=message):
            svi.init(jax.random.key(0), y)
    # the same model accepts other data, and no data
    assert np.isfinite(log_rows(model, {"s": 1.0}, jnp.minimum(y, 2.0))).all()


def test_excluded_rows_of_inner_and_outer_plates_are_named() -> None:
    def nested(y: Any) -> None:
        with numpyro.plate("group", len(y), dim=-2):
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
            with numpyro.plate("row", y.shape[1], dim=-1):
                b = numpyro.sample("b", dist.Normal(a, 1.0))
                numpyro.factor("never", jnp.where(y > 2, -jnp.inf, 0.0))
                numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

    y = jnp.zeros((6, 4)).at[3, 1].set(3.0)
    with pytest.raises(ValueError, match=r"'group', rows \[3\]\).* of 'b', 'a'"):
        handlers.seed(marginalize(nested), 0)(y)


B = dist.Normal(99.0, 0.1)


def test_values_of_handlers_count_where_rows_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A condition, a start, and data that were seen before."""

    def model(y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 10.0))
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Normal(b, 1.0))
            numpyro.factor("high", jnp.where(b > 8.0, 0.0, -jnp.inf) + 0.0 * y)
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    marginal = marginalize(model)
    uniform = init_to_uniform()
    with pytest.raises(ValueError, match="zero or NaN"):
        handlers.substitute(handlers.seed(marginal, 0), substitute_fn=uniform)(Y)
    handlers.condition(handlers.seed(marginal, 0), {"b": jnp.array(9.0)})(Y)
    other = Y + 1.0
    init = init_to_value(values={"b": 9.0})
    handlers.substitute(handlers.seed(marginal, 0), substitute_fn=init)(other)

    def looked(*args: Any) -> None:
        raise AssertionError("twice")

    monkeypatch.setattr("numpyro_minibatch.marginal._finite._check", looked)
    handlers.seed(marginal, 0)(Y)
    handlers.seed(marginal, 0)(other)


@pytest.mark.parametrize("how", ["prior", "median", "replay", "uniform"])
def test_rows_that_have_a_density_where_the_run_is_are_accepted(how: str) -> None:
    def model(y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(100.0, 1.0))
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Normal(b, 1.0))
            numpyro.factor("high", jnp.where(b > 50.0, 0.0, -jnp.inf) + 0.0 * y)
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    run = handlers.seed(marginalize(model), 0)
    if how == "median":
        run = handlers.substitute(run, substitute_fn=init_to_median())
    elif how == "replay":
        guide = handlers.trace(handlers.seed(lambda: numpyro.sample("b", B), 0))
        run = handlers.replay(run, guide.get_trace())
    elif how == "uniform":
        run = handlers.substitute(run, substitute_fn=init_to_uniform())
        with pytest.raises(ValueError, match="zero or NaN"):
            run(Y)
        return
    run(Y)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"sites": "a"}, TypeError),
        ({"sites": []}, ValueError),
        ({"num_nodes": 4}, ValueError),
        ({"num_nodes": 5.0}, ValueError),
        ({"num_nodes": 1}, ValueError),
        ({"accuracy": 0.0}, ValueError),
        ({"accuracy": "fine"}, TypeError),
    ],
)
def test_bad_settings_are_refused(settings: Any, error: type) -> None:
    with pytest.raises(error, match="marginalize"):
        marginalize(mixture, **settings)


def test_equal_models_are_equal() -> None:
    one, other = marginalize(mixture, ["z"]), marginalize(mixture, ("z",))
    assert one == other
    assert hash(one) == hash(other)
    assert one != marginalize(mixture)


def primitives(jaxpr: Any, inside: str | None = None) -> list[str]:
    """Names of the operations of a jaxpr, or of those inside of one of them."""
    found: list[str] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        found += [name] * (inside is None)
        inner = [getattr(x, "jaxpr", x) for x in eqn.params.values()]
        for part in (x for x in inner if hasattr(x, "eqns")):
            found += primitives(part, None if name == inside else inside)
    return found


def outputs(jaxpr: Any, name: str) -> list[Any]:
    """The abstract results of all operations of a name, also inside of others."""
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found += [x.aval for x in eqn.outvars]
        inner = [getattr(x, "jaxpr", x) for x in eqn.params.values()]
        for part in (x for x in inner if hasattr(x, "eqns")):
            found += outputs(part, name)
    return found


def regression(X: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s))
        rate = jnp.exp(a + X[idx] @ b)
        numpyro.sample("y", dist.Poisson(rate), obs=y[idx])


REGRESSION = jnp.ones((7, 2)), jnp.arange(7.0)


def test_what_does_not_depend_on_the_latent_variable_is_computed_once() -> None:
    model = marginalize(regression)
    values = {"b": jnp.zeros(2), "s": jnp.ones(())}
    closed = jax.make_jaxpr(lambda v: log_rows(model, v, *REGRESSION))(values)
    # the products of the covariates, and the normalising constants of the counts
    once = {"dot_general", "lgamma", "gather"}
    assert once <= set(primitives(closed.jaxpr))
    in_search = set(primitives(closed.jaxpr, inside="while"))
    assert "exp" in in_search
    assert not once & in_search


def of_states(use: Callable) -> Callable:
    """A model whose observations have the mean ``use(z, group, means)``."""

    def model(group: Any, y: Any) -> None:
        means = numpyro.sample("mu", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("data", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            b = numpyro.sample("b", dist.Categorical(jnp.array([[0.2, 0.8]] * 2)[z]))
            mean = use(z, group, means) + b
            numpyro.sample("y", dist.Normal(mean, 1.0 + b), obs=y)

    return model


STATES = {  # and whether the rows can share one value of a state
    "an index": (lambda z, group, means: means[z], True),
    "beside a column": (lambda z, group, means: group * means[z], True),
    "one hot": (lambda z, group, means: jax.nn.one_hot(z, 2) @ means, True),
    "a column": (lambda z, group, means: means[z.reshape(-1, 1)][:, 0], True),
    "for each row": (lambda z, group, means: jax.vmap(lambda i: means[i])(z), True),
    "beside another": (
        lambda z, group, means: jax.vmap(lambda i, g: g * means[i])(z, group),
        False,
    ),
    "of known length": (lambda z, group, means: means[z.reshape(len(group))], False),
    "at its place": (lambda z, group, means: means[z[jnp.arange(len(group))]], False),
    "taken": (
        lambda z, group, means: jnp.take(means[z], jnp.arange(len(group))),
        False,
    ),
    "written": (
        lambda z, group, means: (
            jnp.zeros(z.shape).at[jnp.arange(len(group))].set(means[z])
        ),
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("use", "shared"), STATES.values(), ids=STATES)
def test_rows_share_the_value_of_a_state_if_the_model_allows_it(
    use: Callable, shared: bool
) -> None:
    group, y = jnp.array([1.0, 2.0, 0.5]), jnp.array([0.3, -2.0, 4.0])
    model = marginalize(of_states(use))
    means = jnp.array([-1.0, 2.0])
    (level,) = model.levels((group, y), {})
    assert level.broadcasts == shared
    expected = []
    for g, x in zip(np.asarray(group), np.asarray(y), strict=True):
        by_state = [
            np.log([0.7, 0.3][z] * [0.2, 0.8][b])
            + scipy.stats.norm.logpdf(
                x, float(use(jnp.array([z]), jnp.array([g]), means)[0]) + b, 1.0 + b
            )
            for z, b in itertools.product(range(2), repeat=2)
        ]
        expected.append(scipy.special.logsumexp(by_state))
    found = log_rows(model, {"mu": means}, group, y)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_what_depends_on_the_state_alone_is_computed_for_each_state() -> None:
    def model(y: Any) -> None:
        scale = numpyro.sample("s", dist.HalfNormal(1.0).expand([4]).to_event(1))
        with numpyro.plate("data", len(y)):
            z = numpyro.sample("z", dist.Categorical(jnp.full(4, 0.25)))
            numpyro.sample("y", dist.Gamma(2.0 * scale[z], 1.0), obs=y)

    y = jnp.arange(1.0, 8.0)
    values = {"s": jnp.arange(1.0, 5.0)}
    closed = jax.make_jaxpr(lambda v: log_rows(marginalize(model), v, y))(values)
    sizes = [x.size for x in outputs(closed.jaxpr, "lgamma")]
    assert sizes and max(sizes) == 4  # and not 4 * 7


def test_parts_that_use_no_rows_do_not_integrate_them() -> None:
    target = ModelTarget(
        model=marginalize(regression), args=REGRESSION, sizes={"data": 7}
    )
    z = {"b": jnp.zeros(2), "s": jnp.zeros(())}
    one_row = {"data": jnp.zeros(1, jnp.int32)}
    integrated = jax.make_jaxpr(lambda z: target.terms(z, one_row).rows)(z)
    assert "while" in primitives(integrated.jaxpr)
    assert "while" not in primitives(jax.make_jaxpr(target.constrain)(z).jaxpr)
    assert target.row_size == 11
    np.testing.assert_allclose(target.constrain(z)["s"], 1.0)


@pytest.mark.parametrize(
    ("fn", "bounded"),
    [
        (dist.Normal(0.0, 1.0), False),
        (dist.Normal(0.0, 1.0).expand([2]).to_event(1), False),
        (dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)), False),
        (dist.Beta(2.0, 2.0), True),
        (dist.Beta(2.0, 2.0).expand([2]).to_event(1), True),
    ],
)
def test_events_of_unbounded_numbers_are_not_bounded(fn: Any, bounded: bool) -> None:
    """Only bounded ones are evaluated once more, in double precision."""

    def model(y: Any) -> None:
        with numpyro.plate("data", len(y)):
            u = numpyro.sample("u", fn)
            numpyro.sample("y", dist.Normal(u.reshape(len(y), -1)[:, 0], 1.0), obs=y)

    (level,) = marginalize(model).levels((jnp.zeros(3),), {})
    assert level.sites[0].bounded == bounded


def test_the_size_of_a_row_counts_all_nodes_and_states() -> None:
    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("data", len(y)) as idx:
            k = numpyro.sample("k", dist.Bernoulli(0.3))
            u = numpyro.sample("u", dist.Normal(0.0, s).expand([3]).to_event(1))
            numpyro.sample("y", dist.Normal(k + u.sum(-1), 1.0), obs=y[idx])

    def size(num_nodes: int | None) -> int:
        of = marginalize(model, num_nodes=num_nodes)
        return ModelTarget(model=of, args=(np.ones(7),), sizes={"data": 7}).row_size

    assert size(None) == 2 * 7**3
    assert size(9) == 2 * 9**3


def check(model: Callable, *args: Any) -> None:
    """Check that the rows of a model are independent of their batch."""
    layout, _ = inspect_model("MINT", model, args, {}, 4)
    sizes = dict(layout.plates)

    def target(args: tuple, kwargs: Any) -> ModelTarget:
        return ModelTarget(model=model, args=args, kwargs=kwargs, sizes=sizes)

    check_rows("MINT", target, model, args, {}, layout)


def test_rows_of_an_integrand_prove_those_of_the_integral(monkeypatch: Any) -> None:
    """No program is compiled to compare batches, unless the proof fails."""

    def compare(self: Any, integrals: bool = True) -> None:
        raise AssertionError("rows were compared")

    monkeypatch.setattr(batch_comparison.Comparison, "evaluate", compare)
    check(marginalize(regression), *REGRESSION)

    def dependent(X: Any, y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            of_rows = X[idx, 0] - X[idx, 0].mean()
            numpyro.sample("y", dist.Poisson(jnp.exp(a + of_rows)), obs=y[idx])

    with pytest.raises(AssertionError, match="rows were compared"):
        check(marginalize(dependent), *REGRESSION)


def test_a_start_of_numpy_arrays_may_be_indexed_by_the_data() -> None:
    """As confusion matrices are, which the annotator of a label picks."""
    group, y = jnp.array([0, 1, 1, 0]), jnp.array([2.0, -1.0, 0.0, 3.0])

    def model(group: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y)) as idx:
            numpyro.sample("y", dist.Normal(a[group[idx]], 1.0), obs=y[idx])

    start = np.array([3.0, -1.0])
    strategy = init_to_value(values={"a": start})
    kernel = MINT(model, batch_size=2, temperature=2.0, init_strategy=strategy)
    state = kernel.init(jax.random.key(0), 0, None, (group, y), {})
    np.testing.assert_array_equal(state.z["a"], start)


def test_a_partial_function_inside_may_hold_numpy_data() -> None:
    y = np.random.default_rng(0).normal(size=(8, 3))

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        with numpyro.plate("groups", len(y)) as i:
            a = numpyro.sample("a", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(a[:, None], 1.0).to_event(1), obs=y[i])

    at = {"mu": 0.2}
    expected, _ = numpyro.infer.util.log_density(marginalize(model), (y,), {}, at)
    found, _ = numpyro.infer.util.log_density(
        marginalize(functools.partial(model, y)), (), {}, at
    )
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_values_of_a_site_that_is_integrated_out_are_refused() -> None:
    model = marginalize(intercepts)
    given = numpyro.handlers.condition(model, {"a": jnp.zeros(len(GROUPS_Y))})
    with pytest.raises(ValueError, match="has no effect on 'a', which is integrated"):
        numpyro.infer.util.log_density(
            given, (GROUPS_X, GROUPS_Y, MASK), {}, INTERCEPTS
        )
    name = next(iter(INTERCEPTS))
    other = numpyro.handlers.condition(model, {name: jnp.asarray(INTERCEPTS[name])})
    rest = {n: x for n, x in INTERCEPTS.items() if n != name}
    value, _ = numpyro.infer.util.log_density(
        other, (GROUPS_X, GROUPS_Y, MASK), {}, rest
    )
    whole, _ = numpyro.infer.util.log_density(
        model, (GROUPS_X, GROUPS_Y, MASK), {}, INTERCEPTS
    )
    assert float(value) == pytest.approx(float(whole), rel=1e-5)


def test_the_search_converges_for_counts_of_thousands() -> None:
    """In single precision, values near the mode are rounded by more than steps gain."""
    rng = np.random.default_rng(6)
    total = rng.integers(5, 3_000, 400)
    y, a, b = rng.binomial(total, rng.beta(0.8, 3.0, 400)), 0.8, 3.0

    def log_density(u: Array) -> Array:
        p = jax.nn.sigmoid(u[..., 0])
        prior = dist.Beta(a, b).log_prob(p) + jnp.log(p * (1 - p))
        return dist.Binomial(total, p).log_prob(y) + prior

    place = find_place(log_density, jnp.zeros((400, 1), jnp.float32))
    assert place.converged.all()
    mode = np.log((y + a) / (total - y + b))
    sd = np.sqrt(1 / (y + a) + 1 / (total - y + b))
    np.testing.assert_allclose(place.mode[:, 0], mode, atol=1e-3 * sd.min())


def test_two_rows_that_are_not_indexed_are_rows() -> None:
    """Two rows are all of them: to find out which arrays have rows takes one."""
    kernel = MinibatchMH(marginalize(intercepts_of_few), batch=batch.full())
    kernel._setup((np.ones((2, 3)),), {})
    assert kernel.slices is not None
    target = kernel.make_target((np.ones((2, 3)),), {})
    assert target.constrain({"mu": jnp.zeros(())}).keys() == {"mu"}


def intercepts_of_few(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", len(y)):
        u = numpyro.sample("u", dist.Normal(mu, 1.0))
        with numpyro.plate("within", y.shape[1]):
            numpyro.sample("y", dist.Normal(u, 1.0), obs=y.T)


def spun(y: Any) -> None:
    k = numpyro.sample("k", dist.Gamma(2.0, 1.0))
    with numpyro.plate("groups", len(y)):
        a = numpyro.sample("a", dist.VonMises(0.0, 0.1))
        with numpyro.plate("within", y.shape[1]):
            numpyro.sample("y", dist.VonMises(a, k), obs=y.T)


def test_an_angle_of_a_row_is_summed_as_the_warning_says() -> None:
    y = np.array([[3.1, -3.0, 2.8], [0.1, 0.4, -0.3]])
    kernel = MinibatchMH(marginalize(spun), batch=batch.full())
    with pytest.warns(UserWarning, match="marginalize integrates 'a'") as caught:
        kernel._setup((y,), {})
    (message,) = {str(w.message) for w in caught}
    grid, value = re.findall(r"grid = (.*) and a = (.*)\.$", message)[0]

    def model(y: Any) -> None:
        k = numpyro.sample("k", dist.Gamma(2.0, 1.0))
        known = {**globals(), "mean": 0.0, "concentration": 0.1}
        known["grid"] = eval(grid, known)
        with numpyro.plate("groups", len(y)):
            a = eval(value, known)
            with numpyro.plate("within", y.shape[1]):
                numpyro.sample("y", dist.VonMises(a, k), obs=y.T)

    summed = marginalize(model)
    found = numpyro.infer.util.log_density(summed, (y,), {}, {"k": 3.0})[1]["y"]
    angles = np.linspace(-np.pi, np.pi, 2001)[:-1]
    prior = scipy.stats.vonmises.pdf(angles, 0.1)
    each = scipy.stats.vonmises.logpdf(y[:, :, None], 3.0, angles).sum(1)
    exact = np.log((np.exp(each) * prior).mean(-1) * 2 * np.pi)
    rows = found["fn"].log_prob(found["value"])
    np.testing.assert_allclose(rows, exact, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("event", [False, True])
def test_a_site_without_a_density_is_refused(event: bool) -> None:
    def model(y: Any, width: float) -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        fixed = dist.Delta(mu * jnp.ones(2)).to_event(1) if event else dist.Delta(mu)
        with numpyro.plate("groups", len(y)):
            # a uniform density is constant, and has an integral
            b = numpyro.sample("b", dist.Uniform(0.0, width))
            a = numpyro.sample("a", fixed)
            mean = b + (a.sum(-1) if event else a)
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    summed = marginalize(model)
    with pytest.raises(ValueError, match="'a': Delta has no density.*deterministic"):
        summed.levels((np.ones(3), 1.0), {})
    if jax.__version_info__ >= (0, 10):  # others evaluate nothing within a trace
        kernel = MinibatchMH(summed, batch=batch.full())
        with pytest.raises(ValueError, match="'a': Delta has no density"):
            kernel._setup((np.ones(3), 1.0), {})
    marginalize(model, sites=["b"]).levels((np.ones(3), 1.0), {})
