"""A model as a prior and rows: the same density as NumPyro's, row by row."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import flax_module, random_flax_module
from numpyro.infer import init_to_uniform
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy

from numpyro_minibatch import Target
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch.target import ModelTarget

pytestmark = pytest.mark.x64  # in double precision, too

N, M = 23, 7
_rng = np.random.default_rng(0)
X = jnp.asarray(_rng.normal(size=(N, 3)))
Y = jnp.asarray(_rng.normal(size=N))
W = jnp.asarray(_rng.normal(size=11))
GROUP = jnp.asarray(_rng.integers(0, 4, size=N))
COUNTS = jnp.asarray(_rng.integers(0, 5, size=N))
BLOCK = jnp.asarray(_rng.normal(size=(N, 5)))


def by_index(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1.0))
    with numpyro.plate("data", N, subsample_size=M) as idx:
        numpyro.sample("obs", dist.Normal(x[idx] @ beta, sigma), obs=y[idx])


def by_subsample(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("data", N, subsample_size=M):
        xs = numpyro.subsample(x, event_dim=1)
        ys = numpyro.subsample(y, event_dim=0)
        numpyro.sample("obs", dist.StudentT(3.0, xs @ beta, 0.5), obs=ys)


def full_plate(x, y):
    beta = numpyro.sample("beta", dist.Laplace(0, 1).expand([3]).to_event(1))
    with numpyro.plate("data", N) as idx:
        numpyro.sample("obs", dist.Normal(x[idx] @ beta, 1.0), obs=y[idx])


def two_plates(x, y, w):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", N, subsample_size=M) as i:
        numpyro.sample("y", dist.Normal(mu, tau), obs=y[i])
    with numpyro.plate("others", 11, subsample_size=4) as j:
        numpyro.sample("w", dist.Laplace(mu, 1.0), obs=w[j])


def extras(x, y):
    """Observed sites, factors, scales and masks inside and outside of the plate."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    numpyro.sample("calibration", dist.Normal(mu, 0.1), obs=0.3)
    numpyro.factor("outside", -0.5 * mu**4)
    with numpyro.plate("data", N, subsample_size=M) as i:
        with handlers.scale(scale=0.25), handlers.mask(mask=y[i] > 0):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])
        with handlers.scale(scale=3.0):
            numpyro.factor("inside", -jnp.cosh(mu - x[i, 0]))
    with handlers.scale(scale=2.0):
        numpyro.sample("scaled", dist.Exponential(1.0))


def nested(block):
    """The subsampled plate inside a full plate, and the reverse."""
    with numpyro.plate("columns", 5, dim=-1):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", N, subsample_size=M, dim=-2) as i:
            numpyro.sample("a", dist.Normal(mu, 1.0), obs=block[i])
    with (
        numpyro.plate("data2", N, subsample_size=M, dim=-1) as i,
        numpyro.plate("columns2", 5, dim=-2),
    ):
        numpyro.sample("b", dist.Normal(mu[:, None], 2.0), obs=block[i].T)


def hierarchy(group, counts):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 0.5))
    with numpyro.plate("groups", 4), handlers.reparam(config={"a": LocScaleReparam(0)}):
        a = numpyro.sample("a", dist.Normal(mean, spread))
    with numpyro.plate("data", N, subsample_size=M) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(a[group[i]])), obs=counts[i])


def constrained(x):
    """Simplex, Cholesky factor, ordered, circular and dynamic supports; a matrix."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    chol = numpyro.sample("chol", dist.LKJCholesky(3, 2.0))
    low = numpyro.sample("low", dist.Uniform(-2.0, 0.0))
    high = numpyro.sample("high", dist.Uniform(low, 4.0))
    loading = numpyro.sample(
        "loading", dist.MatrixNormal(jnp.zeros((3, 2)), jnp.eye(3), jnp.eye(2))
    )
    numpyro.sample(
        "flat", dist.ImproperUniform(dist.constraints.positive, (), event_shape=(2,))
    )
    loc = weights + high + loading.sum(-1)
    with numpyro.plate("data", N, subsample_size=M) as i:
        numpyro.sample(
            "x", dist.MultivariateNormal(loc, scale_tril=chol + jnp.eye(3)), obs=x[i]
        )


def chain_prior(y):
    """Latents in a scan; the data plate outside of it."""

    def step(level, _):
        level = numpyro.sample("level", dist.LogNormal(jnp.log1p(level), 0.3))
        return level, level

    _, levels = scan(step, 1.0, jnp.arange(4))
    with numpyro.plate("data", N, subsample_size=M) as i:
        numpyro.sample("y", dist.Normal(levels[i % 4], 1.0), obs=y[i])


def bayesian_net(x, y):
    net = random_flax_module(
        "net", nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(1)]), dist.Normal(0, 1),
        input_shape=(3,),
    )  # fmt: skip
    with numpyro.plate("data", N, subsample_size=M) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[..., 0], 0.5), obs=y[i])


def features_net(x, y):
    """A network whose weights are fixed parameters, below a Bayesian last layer."""
    net = flax_module("net", nn.Dense(4), input_shape=(3,))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("data", N, subsample_size=M) as i:
        numpyro.sample("y", dist.Normal(net(x[i]) @ beta, 0.5), obs=y[i])


MODELS = {
    "by index": (by_index, (X, Y), None),
    "by subsample": (by_subsample, (X, Y), None),
    "full plate": (full_plate, (X, Y), {"data": M}),
    "full plate, int": (full_plate, (X, Y), M),
    "two plates": (two_plates, (X, Y, W), None),
    "extras": (extras, (X, Y), None),
    "nested": (nested, (BLOCK,), None),
    "hierarchy": (hierarchy, (GROUP, COUNTS), None),
    "constrained": (constrained, (X,), None),
    "scan prior": (chain_prior, (Y,), None),
    "bayesian net": (bayesian_net, (X, Y), None),
    "features net": (features_net, (X, Y), None),
}


@functools.cache
def build(name):
    model, args, sizes = MODELS[name]
    layout, frozen = inspect_model("Test", model, args, {}, sizes)
    target = ModelTarget(
        model=model, args=args, kwargs={}, sizes=dict(layout.plates), frozen=frozen
    )
    everything = {n: jnp.arange(size) for n, size in layout.plates}

    @jax.jit
    def draw():
        sites = target.trace(everything, random.key(3), substitute_fn=init_to_uniform())
        return target.unconstrain(sites, layout.latents)

    return target, layout, draw()


@pytest.mark.parametrize("name", MODELS)
def test_density_is_numpyros(name):
    """Prior plus rows is NumPyro's joint density of the model on all its data."""
    target, layout, z = build(name)
    everything = {n: jnp.arange(size) for n, size in layout.plates}
    terms = jax.jit(target.terms)(z, everything)
    ours = terms.known + sum(rows.sum() for rows in terms.rows.values())

    # NumPyro's own plates, set to draw all rows in order; it warns that this is not
    # their subsample_size
    full = handlers.substitute(target.model, data={**everything, **target.frozen})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = -jax.jit(lambda z: potential_energy(full, target.args, {}, z))(z)
    tolerance = 1e-12 if jax.config.jax_enable_x64 else 2e-5
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_rows_of_the_full_data(name):
    """A batch in any order, of any length, gives these rows and the same prior."""
    target, layout, z = build(name)
    everything = {n: jnp.arange(size) for n, size in layout.plates}
    full = jax.jit(target.terms)(z, everything)
    for length in (1, 3, M):
        indices = {
            n: random.permutation(random.key(length), size)[: min(length, size - 1)]
            for n, size in layout.plates
        }
        terms = jax.jit(target.terms)(z, indices)
        np.testing.assert_allclose(terms.known, full.known, rtol=1e-5)
        for plate, rows in terms.rows.items():
            assert rows.shape == indices[plate].shape
            expected = full.rows[plate][indices[plate]]
            np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=1e-5)


def test_constrain_inverts_unconstrain():
    target, layout, z = build("constrained")
    values = target.constrain(z)
    assert set(values) == set(layout.latents)
    np.testing.assert_allclose(values["weights"].sum(), 1.0, rtol=1e-5)
    assert values["loading"].shape == (3, 2)
    assert values["low"] < values["high"]


def test_deterministic_sites_inside_the_plate_are_left_out():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.deterministic("square", mu**2)
        with numpyro.plate("data", N, subsample_size=M) as i:
            numpyro.deterministic("residual", y[i] - mu)
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])

    target = ModelTarget(model=model, args=(Y,), sizes={"data": N})
    assert set(target.constrain({"mu": jnp.array(2.0)})) == {"mu", "square"}


def test_frozen_parameters_are_shared():
    """A network's fixed weights are drawn once, not at each run of the model."""
    target, _, z = build("features net")
    twice = [
        target.trace({"data": jnp.arange(2)}, random.key(seed), data=z)["net$params"]
        for seed in (0, 1)
    ]
    first, second = (jax.tree.leaves(site["value"]) for site in twice)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_plates_found():
    assert build("two plates")[1].plates == (("others", 11), ("rows", N))
    assert build("two plates")[1].widths == (("others", 4), ("rows", M))
    assert build("hierarchy")[1].plates == (("data", N),)


def test_hand_written_target():
    target = Target(
        log_prior=lambda z: -0.5 * z @ z,
        log_likelihood=lambda z, i: {"a": Y[i["a"]] * z[0], "b": W[i["b"]] * z[1]},
        sizes={"a": N, "b": 11},
    )
    z = jnp.array([1.0, 2.0])
    terms = target.terms(z, {"a": jnp.array([3, 4]), "b": jnp.array([5])})
    np.testing.assert_allclose(terms.known, -2.5)
    np.testing.assert_allclose(terms.rows["a"], Y[3:5])
    np.testing.assert_allclose(terms.rows["b"], 2 * W[5:6])


def test_subsample_takes_rows_along_any_axis() -> None:
    """An inner plate next to a full plate, with vectors as observations."""
    x = np.random.default_rng(3).normal(size=(3, 40, 2))

    def model(x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("groups", 3, dim=-2), numpyro.plate("data", 40, dim=-1):
            rows = numpyro.subsample(x, event_dim=1)
            numpyro.sample("x", dist.Normal(mu, 1).expand([2]).to_event(1), obs=rows)

    target = ModelTarget(model=model, args=(jnp.asarray(x),), sizes={"data": 40})
    chosen = np.array([7, 0, 39, 7])
    found = target.rows({"mu": jnp.asarray(0.5)}, {"data": jnp.asarray(chosen)})
    logs = -0.5 * np.square(x - 0.5) - 0.5 * np.log(2 * np.pi)
    expected = logs.sum((0, 2))[chosen]
    np.testing.assert_allclose(found["data"], expected, rtol=1e-5)


def test_all_rows_in_another_order_are_read_in_that_order() -> None:
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", len(y), subsample_size=2):
            numpyro.sample("obs", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))

    y = jnp.arange(5.0)
    target = ModelTarget(model=model, args=(y,), sizes={"data": 5})
    order = jnp.array([3, 0, 4, 1, 2])
    rows = target.terms({"mu": jnp.array(0.0)}, {"data": order}).rows["data"]
    assert jnp.allclose(rows, dist.Normal(0, 1).log_prob(y[order]))
