"""The precision of numbers and of products of matrices.

Models that read NumPy arrays from their surroundings are traced in both precisions.
Products of float32 matrices are as precise as their factors, which GPUs and TPUs leave
to a setting: processors have only this precision, so that the setting is tested here.
"""

import dataclasses
import enum
import functools
import types
from collections import namedtuple
from threading import Lock
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import xarray as xr
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    RENHD,
    SGHMC,
    CyclicalSGHMC,
    MinibatchMH,
    marginalize,
    recover_marginals,
    to_inference_data,
)
from numpyro_minibatch._internal.precision import double, in_this_precision
from numpyro_minibatch._model import batch_comparison
from numpyro_minibatch._model.numpy_calls import ReadsValues
from numpyro_minibatch._model.replay import Program
from numpyro_minibatch.target import ModelTarget, given_data

SCALE = np.array([1.0, 2.0, 3.0])
LISTED = {"scales": [np.array([1.0, 2.0, 3.0])]}
PRIOR = dist.Normal(np.zeros(3), np.array([1.0, 2.0, 3.0])).to_event(1)
SETTINGS = SimpleNamespace(scale=np.array([1.0, 2.0, 3.0]))
NESTED = {"prior": [SimpleNamespace(scale=np.array([1.0, 2.0, 3.0]))], 3: "unsorted"}
TABLE = xr.DataArray(np.array([1.0, 2.0, 3.0]))
MODULE = types.ModuleType("settings_of_an_author")
MODULE.scale = np.array([1.0, 2.0, 3.0])


def sampled(scale):
    numpyro.factor("y", jnp.sum(numpyro.sample("b", dist.Normal(jnp.zeros(3))) * scale))


def of_global():
    sampled(SCALE)


def of_container():
    sampled(LISTED["scales"][0])


def of_distribution():
    numpyro.factor("y", jnp.sum(numpyro.sample("b", PRIOR)))


def of_namespace():
    sampled(SETTINGS.scale)


def of_nested():
    sampled(NESTED["prior"][0].scale)


def of_table():
    sampled(jnp.asarray(TABLE))


def of_module():
    sampled(MODULE.scale)


def of_default(scale=np.array([1.0, 2.0, 3.0])):  # noqa: B008
    sampled(scale)


@jax.jit
def compiled(b):
    return b * SCALE


def of_compiled():
    sampled(compiled(jnp.ones(3)))


def enclosed():
    scale = np.array([1.0, 2.0, 3.0])

    def helper():
        sampled(scale)

    return lambda: helper()


class Model:
    def __init__(self):
        self.scale = np.array([1.0, 2.0, 3.0])

    def sampled(self):
        sampled(self.scale * compiled(jnp.ones(3)))

    def __call__(self):
        self.sampled()


MODELS = {
    "global": of_global,
    "container": of_container,
    "distribution": of_distribution,
    "namespace": of_namespace,
    "nested": of_nested,
    "table": of_table,
    "module": of_module,
    "default": of_default,
    "compiled": of_compiled,
    "closure": enclosed(),
    "object": Model(),
    "method": Model().sampled,
    "partial": functools.partial(sampled, np.array([1.0, 2.0, 3.0])),
    "handler": numpyro.handlers.scale(of_global, 1.0),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_traced_in_double_precision_after_single(name):
    def density(b):
        model = in_this_precision(MODELS[name])
        return log_density(model, (), {}, {"b": b})[0]

    # kept, as a driver keeps its programs
    program = jax.jit(density)
    single = program(jnp.ones(3, jnp.float32))
    with double():
        wide = jax.jit(density)(jnp.ones(3, jnp.float64))
        assert wide.dtype == jnp.float64
    again = jax.jit(density)(jnp.ones(3, jnp.float32))
    np.testing.assert_allclose(wide, single, rtol=1e-5)
    np.testing.assert_array_equal(again, single)
    del program


@dataclasses.dataclass
class Prior:
    scale: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    scale: np.ndarray


Pair = namedtuple("Pair", "name prior")


class Choice(enum.Enum):
    ONE = 1

    def scale(self):
        return SCALE


# from an array to an argument that JAX does not take apart, and back
ARGUMENTS = {
    "dataclass": (Prior, lambda p: p.scale),
    "slots": (Slotted, lambda p: p.scale),
    "namespace": (
        lambda x: SimpleNamespace(a={"b": Prior(x)}),
        lambda p: p.a["b"].scale,
    ),
    "named tuple": (lambda x: Pair("b", Prior(x)), lambda p: p.prior.scale),
    "function": (lambda x: lambda: x, lambda p: p()),
    "method": (lambda x: Prior(x).__getattribute__, lambda p: p("scale")),
    "distribution": (dist.Normal(0.0).__class__, lambda p: p.loc),
    "DataArray": (xr.DataArray, jnp.asarray),
    "Dataset": (lambda x: xr.Dataset({"s": ("k", x)}), lambda p: p["s"].values),
    "Series": (lambda x: pd.Series(x, copy=False), lambda p: p.to_numpy()),
    "DataFrame": (
        lambda x: pd.DataFrame({"s": x}, copy=False),
        lambda p: p["s"].values,
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_no_constants_in_double_precision(name):
    scale = np.array([1.0, 2.0, 3.0])
    make, array_of = ARGUMENTS[name]

    def density(b, given):
        model = in_this_precision(lambda given: sampled(array_of(given)))
        return log_density(model, (given,), {}, {"b": b})[0]

    given = make(scale)
    with double():
        # kept, as a set-up keeps its programs
        program = jax.jit(lambda b: density(b, given))
        wide = program(jnp.ones(3, jnp.float64))
        assert wide.dtype == jnp.float64
    assert jnp.asarray(scale).dtype == jnp.result_type(float)
    assert jnp.asarray(array_of(given)).dtype == jnp.result_type(float)
    single = jax.jit(lambda b: density(b, given))(jnp.ones(3, jnp.float32))
    np.testing.assert_allclose(wide, single, rtol=1e-5)
    del program


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="one precision only")
def test_copies_share_the_memory_of_their_arrays_and_all_else():
    class Unpicklable:
        def __init__(self, scale):
            self.scale, self.open, self.choice = scale, Lock(), Choice.ONE

    scale, opened = np.ones(3), Lock()
    table = xr.DataArray(scale, attrs={"of": sampled})
    words, numbers = np.array(["a", "b"]), jnp.ones(2)

    given = (table, words, numbers, opened, Unpicklable(scale))
    received = []
    with double():
        in_this_precision(lambda *args: received.extend(args))(*given)
    other, *same, own = received
    assert other is not table and other.values is not scale
    assert np.shares_memory(other.values, scale)
    assert other.attrs["of"] is sampled
    assert own.scale is other.values
    assert own.open is given[4].open and own.choice is Choice.ONE
    assert all(x is y for x, y in zip(same, given[1:4], strict=True))


def regression_with(prior_scale, of=lambda rows: rows):
    def model(x, y, prior):
        b = numpyro.sample("b", dist.Normal(0.0, prior_scale(prior)).to_event(1))
        numpyro.sample("y", dist.Normal(b[0] + b[1] * of(x), 1.0), obs=of(y))

    return model


def simulated():
    rng = np.random.default_rng(3)
    x = rng.normal(size=1200)
    return x, x + rng.normal(size=1200)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dataclass", "slots", "Series"])
def test_a_run_leaves_the_arrays_of_its_arguments_to_others(name):
    x, y = simulated()
    scale = np.array([1.0, 2.0])
    make, array_of = ARGUMENTS[name]
    prior, model = make(scale), regression_with(array_of)
    kernel = MinibatchMH(model, control_variate="taylor2")
    draws_of(kernel, x, y, prior, draws=5)
    assert jnp.asarray(scale).dtype == jnp.result_type(float)
    before = draws_of(NUTS(model), x, y, make(scale.copy()), draws=5)
    np.testing.assert_array_equal(draws_of(NUTS(model), x, y, prior, draws=5), before)


def test_a_run_leaves_the_rows_of_its_arguments_to_others():
    x, y = simulated()
    model = regression_with(lambda prior: jnp.array([1.0, 2.0]), jnp.asarray)
    kernel = MinibatchMH(model, control_variate="taylor2")
    draws_of(kernel, xr.DataArray(x), xr.DataArray(y), None, draws=5)
    assert kernel.plates == {"data": 1200}
    for array in (x, y):
        assert (jnp.float32(2) * array).dtype == jnp.result_type(float)
        assert jnp.asarray(array).dtype == jnp.result_type(float)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["namespace", "object", "DataArray"])
def test_an_argument_that_changed_is_read_again(name):
    x, y = simulated()
    kinds = {"namespace": SimpleNamespace, "object": type("Prior", (), {})}
    prior = kinds.get(name, lambda: xr.DataArray(0.0))()

    def scale(prior):
        return jnp.ones(2) * (prior.item() if name == "DataArray" else prior.scale)

    def change(scale):
        if name == "DataArray":
            prior[()] = scale
        else:
            prior.scale = scale

    model = regression_with(scale)
    means = []
    for factor in (1.0, 1e-3):
        change(factor)
        kernel = MinibatchMH(model, control_variate="taylor2")
        means.append(draws_of(kernel, x, y, prior, draws=50)[:, 1].mean())
    assert means[0] > 0.8 and means[1] < 0.01


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="one precision only")
@pytest.mark.skipif(
    jax.__version_info__ < (0, 9, 2), reason="JAX does not yet cache constants"
)
def test_without_copies_it_fails():
    scale = np.array([1.0, 2.0, 3.0])
    program = jax.jit(lambda x: x * scale)
    program(jnp.ones(3, jnp.float32))
    with pytest.raises((TypeError, ValueError)), double():
        jax.jit(lambda x: x * scale)(jnp.ones(3, jnp.float64))
    del program


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="one precision only")
def test_data_that_were_constants_of_a_program_have_the_present_precision():
    """NUTS on another model of the same arrays makes them constants."""
    x = np.array([1.0, 2.0, 3.0])

    def model(x):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(b, 1.0), obs=x)

    kept = jax.jit(lambda b: b * x)
    kept(jnp.ones(3, jnp.float32))
    with double():
        target = ModelTarget(model=model, args=(x,), sizes={"rows": 3})
        found = Program(target, lambda target, b: target.args[0] * b)(jnp.float64(2.0))
    assert found.dtype == jnp.float64
    np.testing.assert_array_equal(found, 2.0 * x)
    del kept


@pytest.mark.parametrize(("largest", "whole"), [(10_000_000, int), (10, float)])
def test_rows_are_compared_after_another_program_had_them_as_constants(
    monkeypatch: pytest.MonkeyPatch, largest: int, whole: type
) -> None:
    """As after NUTS on the same NumPy arrays, which are constants of its program."""
    x, y = np.random.default_rng(0).normal(size=(2, 300))
    y = (10.0 * y).astype(whole)
    kept = jax.jit(lambda b: (b * x * y).sum())
    kept(1.0)

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        order = jnp.argsort(jnp.asarray(x))  # there is no proof for a permutation
        mean = jnp.zeros(len(x)).at[order].set(b * jnp.asarray(x)[order])
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    monkeypatch.setattr(batch_comparison, "_MOST_CAST", largest)
    kernel = MinibatchMH(model, control_variate="taylor2", batch_size=50)
    kernel.init(jax.random.key(0), 10, None, (x, y), {})
    assert kernel.plates == {"data": 300}
    del kept


def test_what_contains_no_array_is_not_copied():
    calls = []

    def counts():
        calls.append("called")

    with double():
        in_this_precision(counts)()
    assert calls == ["called"]


def rows_with_latents(y):
    with numpyro.plate("rows", len(y)) as i:
        a = numpyro.sample("a", dist.Normal(jnp.zeros(3), SCALE).to_event(1))
        numpyro.sample("y", dist.Normal(a.sum(-1), 1.0), obs=y[i])


def rows_by_value(y):
    b = numpyro.sample("b", dist.Normal(jnp.zeros(3), SCALE).to_event(1))
    groups = len(np.unique(np.round(y)))  # NumPy gets the values of all rows
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal((b * SCALE).sum() / groups, 1.0), obs=y[i])


def rows_without_data(y=None):
    b = numpyro.sample("b", dist.Normal(jnp.zeros(3), SCALE).to_event(1))
    with numpyro.plate("rows", 4):
        numpyro.sample("y", dist.Normal((b * SCALE).sum(), 1.0))


@pytest.mark.parametrize("kind", ["marginalized", "reads values", "condition"])
def test_our_wrappers_of_a_model_read_copies_too(kind):
    y = np.array([0.3, -1.2, 5.0, 0.1])
    if kind == "marginalized":
        model, sizes, z = marginalize(rows_with_latents), {"rows": 4}, {}
    elif kind == "condition":
        inside = numpyro.handlers.condition(rows_without_data, {"y": y})
        model, sizes, z = given_data(inside), {"rows": 4}, {"b": np.ones(3)}
    else:
        model = ReadsValues.of(rows_by_value, (jnp.asarray(y),), {})
        sizes, z = {"rows": 4}, {"b": np.ones(3)}
        assert model is not None

    def rows(y, z):
        target = ModelTarget(model=model, args=(y,), sizes=sizes)
        return target.rows(z, {"rows": jnp.arange(4)})

    program = jax.jit(rows)
    single = program(jnp.asarray(y), jax.tree.map(jnp.asarray, z))
    with double():
        wide = jax.jit(rows)(jnp.asarray(y), jax.tree.map(jnp.asarray, z))
    for name, of_rows in single.items():
        np.testing.assert_allclose(of_rows, wide[name], rtol=1e-5)
    del program


POINTS = np.linspace(0.0, 1.0, 3)
TRACED = []


def with_points(y):
    TRACED.append((jnp.result_type(float) == jnp.float64, POINTS))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(y)) as i:
        t = numpyro.sample("t", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(POINTS - t[:, None], 1.0).to_event(1), obs=y[i])


@pytest.mark.skipif(jnp.result_type(float) == jnp.float64, reason="no copies are made")
def test_a_marginalized_model_is_never_in_double_precision_with_its_own_arrays():
    """They would be constants of that precision in all later programs."""
    TRACED.clear()
    target = ModelTarget(
        model=marginalize(with_points), args=(jnp.zeros((4, 3)),), sizes={"rows": 4}
    )
    z = {"s": np.zeros(())}
    with double():
        jax.eval_shape(lambda z: target.rows(z, {"rows": jnp.arange(4)}), z)
        jax.eval_shape(lambda z: target.terms(z, {"rows": jnp.arange(4)}), z)
    assert TRACED and all(wide and x is not POINTS for wide, x in TRACED)


def draws_of(kernel, *data, draws):
    mcmc = MCMC(kernel, num_warmup=200, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(0), *data)
    return np.asarray(mcmc.get_samples()["b"])


@pytest.mark.slow
def test_nuts_and_the_surrogate_sample_it_in_turn():
    # of one process: each has programs with the arrays of its precision
    rng = np.random.default_rng(3)
    X = jnp.asarray(rng.normal(size=(3000, 2)), jnp.float32)
    center, scale = np.array([0.5, -0.5]), np.array([1.0, 2.0])

    def model(X, y):
        b = numpyro.sample("b", dist.Normal(center, scale).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(X @ (b * scale), 1.0), obs=y)

    y = X @ jnp.array([0.3, 0.6]) + jnp.asarray(rng.normal(size=3000), jnp.float32)
    kernel = MinibatchMH(model, control_variate="taylor2")
    means = [
        draws_of(k, X, y, draws=500).mean(0) for k in (NUTS(model), kernel, NUTS(model))
    ]
    np.testing.assert_allclose(means[1], means[0], atol=0.02)
    np.testing.assert_array_equal(means[2], means[0])


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="one precision only")
def test_a_precision_of_the_models_own_is_named():
    def model(y):
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("rows", len(y)):
            start = jnp.zeros((), jnp.float32)
            total, _ = jax.lax.scan(lambda c, x: (c + x * b, None), start, jnp.ones(3))
            numpyro.sample("y", dist.Normal(total, 1.0), obs=y)

    kernel = MinibatchMH(model, control_variate="taylor2")
    with pytest.raises(
        TypeError, match="(?s)double precision also.*float32.*Leave out"
    ):
        draws_of(kernel, jnp.ones(3000), draws=1)


def products_of(jaxpr):
    """The precision of every product of matrices in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.params["precision"]
        for param in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from products_of(inner)


KERNELS = {
    "MinibatchMH": lambda model: MinibatchMH(model, control_variate="taylor2"),
    "MINT": lambda model: MINT(model, temperature=20.0, batch_size=50),
    "AMAGOLD": lambda model: AMAGOLD(model, batch_size=50),
    "SGHMC": lambda model: SGHMC(model, batch_size=50, step_size=1e-3),
    "RENHD": lambda model: RENHD(
        model, temperatures=[1.0, 2.0], batch_size=50, step_size=1e-3
    ),
    "SGHMC, untuned": lambda model: SGHMC(model, batch_size=50),
    "CyclicalSGHMC": lambda model: CyclicalSGHMC(
        model, batch_size=50, step_size=1e-3, cycle_length=10, num_steps=2
    ),
}


FULL = (jax.lax.Precision.HIGHEST,) * 2
EXPECTED = {"SGHMC": {None}, "CyclicalSGHMC": {None}, "RENHD": {None, FULL}}


@pytest.fixture
def regression():
    """A regression that notes the setting each time it is traced."""
    seen = []

    def model(X, y):
        seen.append(jax.config.jax_default_matmul_precision)
        b = numpyro.sample("b", dist.Normal(jnp.zeros(3)).to_event(1))
        with numpyro.plate("rows", len(y)) as idx:
            numpyro.sample("y", dist.Normal(X[idx] @ b), obs=y[idx])

    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 3)).astype(np.float32)
    y = X.sum(1) + rng.normal(size=2000).astype(np.float32)
    return model, (jnp.asarray(X), jnp.asarray(y)), seen


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_products_are_as_precise_as_their_factors(name, regression):
    model, data, seen = regression
    kernel = KERNELS[name](model)
    keys = jax.random.split(jax.random.key(0), 2)
    state = kernel.init(keys, 10, None, data, {})
    program = jax.make_jaxpr(lambda s, d: kernel.sample(s, d, {}))(state, data)
    found = set(products_of(program.jaxpr))
    # swaps compare, and so do gradients with a control variate; others are as JAX's
    assert found == EXPECTED.get(name, {FULL})
    assert jax.config.jax_default_matmul_precision is None


def test_the_set_up_has_full_precision(regression):
    model, data, seen = regression
    KERNELS["MinibatchMH"](model).init(jax.random.key(0), 10, None, data, {})
    assert set(seen) == {"highest"}


def test_a_precision_that_the_user_chose_is_left(regression):
    model, data, seen = regression
    kernel = KERNELS["MinibatchMH"](model)
    with jax.default_matmul_precision("tensorfloat32"):
        kernel.init(jax.random.key(0), 10, None, data, {})
    assert set(seen) == {"tensorfloat32"}


@pytest.mark.slow
def test_analyses_and_marginalized_models_have_it_too():
    seen = []

    def model(X, y):
        seen.append(jax.config.jax_default_matmul_precision)
        b = numpyro.sample("b", dist.Normal(jnp.zeros(3)).to_event(1))
        with numpyro.plate("rows", len(y)) as idx:
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            numpyro.sample("y", dist.Normal(X[idx] @ b + 2 * z), obs=y[idx])

    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 3)).astype(np.float32)
    y = (X.sum(1) + rng.normal(size=2000)).astype(np.float32)
    marginal = marginalize(model)
    kernel = MinibatchMH(marginal, control_variate="taylor2")
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y)
    idata = to_inference_data(mcmc, log_likelihood=True)
    recover_marginals(marginal, idata, X, y, rows=[0, 1], key=jax.random.key(1))
    log_density(marginal, (X, y), {}, {"b": jnp.zeros(3)})  # as NUTS calls it
    assert set(seen) == {"highest"}
