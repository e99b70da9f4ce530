"""What NUTS runs of a model as it is written: numbers that NumPy computes of the data,
arguments of partial functions, and data in ``handlers.condition``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpy import unique
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy
from scipy.stats import norm

from numpyro_minibatch import AMAGOLD, MinibatchMH, marginalize, recover_marginals
from numpyro_minibatch._model import batch_comparison
from numpyro_minibatch._model.values import line_of, lines_with_numbers_of_rows
from numpyro_minibatch.inference_data import as_inference_data, get_group
from numpyro_minibatch.kernels import MinibatchKernel

N, GROUPS = 40, 4
RNG = np.random.default_rng(0)
GROUP = RNG.permutation(np.arange(N) % GROUPS)
X, Y = RNG.gamma(2.0, size=N), RNG.normal(size=N)
MEANS = RNG.normal(size=GROUPS)
ROWS = jnp.array([7, 0, 39, 11])
Args = tuple[Any, ...]


def set_up(model: Callable, *args: Any) -> MinibatchKernel:
    """A kernel that has found the layout of the model."""
    kernel = AMAGOLD(model, step_size=1e-2, batch_size=8)
    kernel._setup(args, {})
    return kernel


def rows_of(kernel: MinibatchKernel, args: Args, z: Any) -> np.ndarray:
    """The log likelihood of some rows."""

    @jax.jit
    def compute(args: Args, rows: Any) -> Any:
        indices = dict.fromkeys(kernel.plates, rows)
        return kernel.make_target(args, {}).terms(z, indices).rows

    (found,) = compute(args, ROWS).values()
    return np.asarray(found)


def counted(group: Any, y: Any) -> None:
    number = len(np.unique(group))
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([number]).to_event(1))
    numpyro.sample("y", dist.Normal(means[group], 1.0), obs=y)


def in_a_plate_with_indices(group: Any, y: Any) -> None:
    with numpyro.plate("groups", int(np.max(group)) + 1):
        means = numpyro.sample("means", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.Normal(means[group[idx]], 1.0), obs=y[idx])


def how_many(x: Any) -> int:
    return len(unique(x))


def by_a_helper(group: Any, y: Any) -> None:
    with numpyro.plate("groups", how_many(group)):
        means = numpyro.sample("means", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(means[np.asarray(group)], 1.0), obs=y)


@handlers.reparam(config={"means": LocScaleReparam(1.0)})
def in_a_handler(scale: float, group: Any, y: Any) -> None:
    counted(group, y)


MODELS: dict[str, Any] = {
    "no plate": counted,
    "a plate with indices": in_a_plate_with_indices,
    "a helper": by_a_helper,
    "a handler and a partial function": partial(in_a_handler, 1.0),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_numbers_are_those_of_all_rows(model: Any) -> None:
    args = GROUP, jnp.asarray(Y)
    kernel = set_up(model, *args)
    (shape,) = kernel.layout.shapes
    assert shape == (GROUPS,)
    name = kernel.layout.latents[0]
    found = rows_of(kernel, args, {name: jnp.asarray(MEANS)})
    expected = norm.logpdf(Y[ROWS], MEANS[GROUP[ROWS]])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("model", [counted, in_a_plate_with_indices])
def test_arguments_of_a_partial_function_have_rows(model: Any) -> None:
    for bound, args in (
        (partial(model, GROUP, Y), ()),
        (partial(model, y=jnp.asarray(Y)), (GROUP,)),
    ):
        kernel = set_up(bound, *args)
        found = rows_of(kernel, args, {"means": jnp.asarray(MEANS)})
        expected = norm.logpdf(Y[ROWS], MEANS[GROUP[ROWS]])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def line(x: Any, y: Any) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def unobserved(group: Any, size: int) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([GROUPS]).to_event(1))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Normal(means[group], 1.0))


def test_conditioned_data_have_rows() -> None:
    kernel = set_up(handlers.condition(unobserved, {"y": Y}), GROUP, N)
    found = rows_of(kernel, (GROUP, N), {"means": jnp.asarray(MEANS)})
    expected = norm.logpdf(Y[ROWS], MEANS[GROUP[ROWS]])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def effects(x: Any, y: Any = None) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        a = numpyro.sample("a", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.Normal(slope * x + a, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (marginalize(partial(effects, X, Y)), ()),
        (partial(marginalize(effects), X, Y), ()),
        (marginalize(handlers.condition(effects, {"y": Y})), (X,)),
        (handlers.condition(marginalize(effects), {"y": Y}), (X,)),
        (marginalize(partial(handlers.condition(effects, {"y": Y}), X)), ()),
    ],
)
def test_data_inside_and_around_a_marginalized_model_have_rows(
    model: Any, args: Any
) -> None:
    kernel = set_up(model, *args)
    found = rows_of(kernel, args, {"slope": jnp.array(0.5)})
    expected = norm.logpdf(Y - 0.5 * X, scale=np.sqrt(5.0))[ROWS]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    draws = xr.Dataset({"slope": (("chain", "draw"), np.full((1, 500), 0.5))})
    idata = as_inference_data({"posterior": draws}, {})
    drawn = recover_marginals(model, idata, *args, rows=[3])
    a = get_group(drawn, "posterior")["a"].to_numpy()
    z = (a - 0.8 * (Y[3] - 0.5 * X[3])) / np.sqrt(0.8)
    assert abs(z.mean()) < 5 / np.sqrt(500)


@pytest.mark.parametrize("marginal", [False, True])
def test_arguments_may_be_classes_of_distributions(marginal: bool) -> None:
    def model(prior: Any, y: Any) -> None:
        slope = numpyro.sample("slope", prior(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Bernoulli(0.5)) if marginal else 0.0
            numpyro.sample("y", dist.Normal(slope + 0.0 * a, 1.0), obs=y)

    bound = partial(model, dist.Normal, Y)
    kernel = set_up(marginalize(bound) if marginal else bound)
    found = rows_of(kernel, (), {"slope": jnp.array(0.5)})
    np.testing.assert_allclose(found, norm.logpdf(Y - 0.5)[ROWS], rtol=1e-5)


def test_marginalized_models_can_be_conditioned_on_parameters() -> None:
    def model(x: Any, y: Any) -> None:
        other = numpyro.sample("other", dist.Normal(0.0, 1.0))
        effects(x + other, y)

    for held in (
        handlers.condition(marginalize(model), {"slope": 0.5}),
        marginalize(handlers.condition(model, {"slope": 0.5})),
    ):
        kernel = set_up(held, X, Y)
        assert kernel.layout.latents == ("other",)
        found = rows_of(kernel, (X, Y), {"other": jnp.array(0.0)})
        expected = norm.logpdf(Y - 0.5 * X, scale=np.sqrt(5.0))[ROWS]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_partial_function_is_kept_as_it_is() -> None:
    model = partial(line, X)
    kernel = AMAGOLD(model, step_size=1e-2, batch_size=8, rows={"x": 0, "y": 0})
    kernel.init(jax.random.key(0), 0, None, (Y,), {})
    assert kernel.model is model
    found = rows_of(kernel, (Y,), {"slope": jnp.array(0.5)})
    np.testing.assert_allclose(found, norm.logpdf(Y - 0.5 * X)[ROWS], rtol=1e-5)


def standardized(x: Any, y: Any) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    log = np.log(x)
    numpyro.sample(
        "y", dist.Normal(slope * (log - np.mean(log)) / np.std(log), 1.0), obs=y
    )


def test_numpy_standardizes_by_all_rows_and_acts_entry_by_entry() -> None:
    kernel = set_up(standardized, X, Y)
    for x in (X, X + 1.0):  # the second run is on other data of the same shape
        kernel.init(jax.random.key(0), 0, None, (x, Y), {})
        log = np.log(x)
        mean = 0.7 * (log - log.mean()) / log.std()
        found = rows_of(kernel, (x, Y), {"slope": jnp.array(0.7)})
        np.testing.assert_allclose(found, norm.logpdf(Y, mean)[ROWS], rtol=1e-4)


def binned(x: Any, y: Any) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([GROUPS]).to_event(1))
    bins = np.digitize(x * 2.0, [1.0, 2.0, 4.0])
    sign = np.where(bins > 1, 1.0, -1.0)
    scale = np.clip(np.std(x), 0.5, 2.0)  # of all rows
    numpyro.sample("y", dist.Normal(sign * means[bins], scale), obs=y)


def test_numpy_may_act_entry_by_entry_on_what_jax_computes() -> None:
    kernel = set_up(binned, X, Y)
    bins = np.digitize(X * 2.0, [1.0, 2.0, 4.0])
    mean = np.where(bins > 1, 1.0, -1.0) * MEANS[bins]
    expected = norm.logpdf(Y, mean, np.clip(np.std(X), 0.5, 2.0))[ROWS]
    found = rows_of(kernel, (X, Y), {"means": jnp.asarray(MEANS)})
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def asserting(x: Any, y: Any) -> None:
    assert len(x) == N
    line(x, y)


def raising(x: Any, y: Any) -> None:
    if len(x) != N:
        raise ValueError(f"{N} rows expected")
    line(x, y)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (asserting, r"`assert len\(x\) == N`"),
        (raising, r"`raise ValueError\(.*\(40 rows expected\)"),
    ],
)
def test_a_check_of_all_rows_in_the_model_is_named(model: Any, reason: str) -> None:
    message = (
        rf"some of the rows of its arguments, and then raises in line \d+, {reason}"
    )
    with pytest.raises(ValueError, match=message):
        set_up(model, X, Y)


def centred_by_numpy(x: Any, y: Any) -> None:
    # without an error, NumPy's mean would call the method of the rows of a batch
    mean, bound = np.mean(x), np.max(np.abs(y))
    slope = numpyro.sample("slope", dist.Uniform(-bound, bound))
    numpyro.sample("y", dist.Normal(slope * (x - mean), 1.0), obs=y)


def sums_of_rows(x: Any, y: Any) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope * np.sum(x, axis=1), 1.0), obs=y)


def test_numpy_reduces_all_rows_even_if_those_of_a_batch_can_be_reduced() -> None:
    kernel = set_up(centred_by_numpy, X, Y)
    kernel.init(jax.random.key(0), 0, None, (X, Y), {})
    found = rows_of(kernel, (X, Y), {"slope": jnp.array(0.0)})
    np.testing.assert_allclose(found, norm.logpdf(Y)[ROWS], rtol=1e-4)
    value = {"slope": jnp.array(0.3)}
    mean = np.abs(Y).max() * (2 / (1 + np.exp(-0.3)) - 1) * (X - X.mean())
    found = rows_of(kernel, (X, Y), value)
    np.testing.assert_allclose(found, norm.logpdf(Y, mean)[ROWS], rtol=1e-4)


def test_numpy_may_reduce_each_row() -> None:
    x = np.stack([X, Y], 1)
    kernel = set_up(sums_of_rows, x, Y)
    kernel.init(jax.random.key(0), 0, None, (x, Y), {})
    found = rows_of(kernel, (x, Y), {"slope": jnp.array(0.5)})
    np.testing.assert_allclose(found, norm.logpdf(Y, 0.5 * (X + Y))[ROWS], rtol=1e-4)


def test_kernels_on_data_with_other_values_are_not_equal() -> None:
    kernels = [AMAGOLD(standardized, step_size=1e-2, batch_size=8) for _ in range(3)]
    for kernel, x in zip(kernels, (X, X.copy(), X + 1.0), strict=True):
        kernel._setup((x, Y), {})
    assert kernels[0] == kernels[1] != kernels[2]
    assert pickle.loads(pickle.dumps(kernels[0])) == kernels[0]


def test_a_program_for_other_values_is_not_used_again() -> None:
    kernel = AMAGOLD(standardized, step_size=1e-2, batch_size=8)
    args = jnp.asarray(X), jnp.asarray(Y)
    state = kernel.init(jax.random.key(0), 0, None, args, {})
    # as MCMC(..., jit_model_args=True) does
    jax.eval_shape(lambda state, args: kernel.sample(state, args, {}), state, args)
    kernel.init(jax.random.key(1), 0, None, args, {})
    with pytest.raises(ValueError, match="jit_model_args=True"):
        kernel.init(jax.random.key(0), 0, None, (args[0] + 1.0, args[1]), {})


def test_outside_of_a_kernel_the_model_is_as_written() -> None:
    kernel = set_up(counted, GROUP, Y)
    assert kernel.model is not None
    few = handlers.trace(handlers.seed(kernel.model, 0)).get_trace(GROUP[:2], Y[:2])
    assert few["means"]["value"].shape == (len(np.unique(GROUP[:2])),)


def votes(position: Any, answer: Any) -> None:
    people = int(np.max(position)) + 1
    with numpyro.plate("people", people):
        right = numpyro.sample("right", dist.Beta(2.0, 2.0))
    with numpyro.plate("items", answer.shape[0], dim=-2):
        truth = numpyro.sample("truth", dist.Bernoulli(0.5))
        with numpyro.plate("answers", answer.shape[1]):
            p = right[position]
            p = jnp.where(truth == 1, p, 1.0 - p)
            numpyro.sample("answer", dist.Bernoulli(p), obs=answer)


@pytest.mark.parametrize("change", [lambda model: model, marginalize])
def test_values_and_discrete_sites(change: Any) -> None:
    position = RNG.integers(0, 5, (N, 3))
    position[0, 0] = 4
    answer = RNG.integers(0, 2, (N, 3))
    kernel = set_up(change(votes), position, answer)
    z = RNG.normal(size=5)
    p = (1.0 / (1.0 + np.exp(-z)))[position[ROWS]]
    hit, miss = (np.prod(np.where(answer[ROWS] == k, p, 1.0 - p), 1) for k in (1, 0))
    found = rows_of(kernel, (position, answer), {"right": jnp.asarray(z)})
    np.testing.assert_allclose(found, np.log(0.5 * hit + 0.5 * miss), rtol=1e-5)


def not_row_by_row(group: Any, y: Any) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([GROUPS]))
    codes = np.unique(group, return_inverse=True)[1]
    numpyro.sample("y", dist.Normal(means[codes], 1.0), obs=y)


def by_jax(group: Any, y: Any) -> None:
    number = int(jnp.max(group)) + 1
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([number]))
    numpyro.sample("y", dist.Normal(means[group], 1.0), obs=y)


@pytest.mark.parametrize("model", [not_row_by_row, by_jax])
def test_what_has_no_meaning_for_a_batch_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="needs the values of the data"):
        set_up(model, GROUP, Y)


def test_a_model_that_uses_numpy_is_marginalized_inside_of_jit() -> None:
    def model(group: Any, y: Any) -> None:
        number = int(np.max(group)) + 1
        means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([number]))
        with numpyro.plate("data", len(y)):
            kind = numpyro.sample("kind", dist.Bernoulli(0.25))
            mean = means[group] + 2.0 * kind
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    summed = marginalize(model)

    @jax.jit  # as NUTS evaluates it
    def density(means: Any) -> Any:
        return -potential_energy(summed, (GROUP, Y), {}, {"means": means})

    each = [norm.pdf(Y, MEANS[GROUP] + 2 * kind) for kind in (0, 1)]
    expected = np.log(0.75 * each[0] + 0.25 * each[1]).sum()
    expected += norm.logpdf(MEANS).sum()
    np.testing.assert_allclose(density(MEANS), expected, rtol=1e-5)


def test_other_kernels_run_on_the_same_numpy_data_afterwards() -> None:
    """JAX keeps constants by the identity of NumPy arrays, of either precision."""
    X, y = np.random.default_rng(1).normal(size=(2, 100))

    def model(X: Any, y: Any) -> None:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(slope * X, 1.0), obs=y)

    kernel = MinibatchMH(partial(model, X, y), control_variate="taylor2", batch_size=10)
    kernel.init(jax.random.key(0), 5)
    residuals = jax.value_and_grad(lambda mean: jnp.sum(y - mean))
    found, _ = residuals(jnp.ones(100))
    np.testing.assert_allclose(found, (y - 1.0).sum(), rtol=1e-4)


def column_times_vector(y: Any, in_plate: bool, turned: bool) -> None:
    mean = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([1, 1]).to_event(2))
    fn = dist.Normal(jnp.ones((N, 1)) @ mean, 1.0)
    data = y
    if turned:
        fn, data = dist.Normal(jnp.ones(N) * mean[0, 0], 1.0), y[:, None]
    if in_plate:
        with numpyro.plate("data", N):
            numpyro.sample("y", fn, obs=data)
    else:
        numpyro.sample("y", fn, obs=data)


@pytest.mark.parametrize("in_plate", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_by_rows_are_refused(in_plate: bool, turned: bool) -> None:
    """Which NUTS samples: each observation then counts once for each row."""
    with pytest.raises(
        ValueError, match=r"has shape \(40, 40\): it has the rows twice"
    ):
        set_up(column_times_vector, Y, in_plate, turned)


def test_data_repeated_for_another_reason_run() -> None:
    def soft_constraint(y: Any) -> None:
        mean = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
            numpyro.sample("none", dist.Normal(mean, 10.0), obs=0.0)

    def square(y: Any) -> None:  # as many columns as rows
        mean = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([N]).to_event(1))
        with numpyro.plate("data", N, dim=-2):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    set_up(soft_constraint, Y)
    set_up(square, np.outer(Y, np.arange(N)))


def test_rows_by_rows_are_refused_whichever_plate_could_be_taken_instead() -> None:
    def in_two_plates(y: Any) -> None:
        mean = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("times", 20, dim=-2), numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(mean * jnp.ones((N, 1, 1)), 1.0), obs=y)

    with pytest.raises(ValueError, match="it has the rows twice"):
        set_up(in_two_plates, jnp.ones((20, N)))


def test_the_line_that_uses_a_number_of_rows_is_named() -> None:
    def model(x: Any, y: Any) -> None:
        rows = len(y)
        tau = 1 / (3 * np.sqrt(rows))
        b = numpyro.sample("b", dist.Normal(0.0, tau))
        with numpyro.plate("rows", rows):
            numpyro.sample("y", dist.Normal(b * x, 1.0), obs=y)

    line = r"It is computed with a number of rows in line \d+, `tau = 1 / "
    kernel = AMAGOLD(model, step_size=1e-2, batch_size=8)
    with pytest.raises(ValueError, match=line) as error:
        kernel.init(jax.random.key(0), 5, None, (X, Y), {})
    assert str(error.value).count("`") == 2  # neither the plate nor `rows = len(y)`


def test_numbers_of_rows_are_told_from_numbers_of_columns() -> None:
    def first(x: Any, y: Any) -> None:
        n, p = x.shape
        b = numpyro.sample("b", dist.Normal(0.0, 1.0 / n).expand([p]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ b, 1.0 / np.sqrt(p)), obs=y)

    def second(x: Any, y: Any) -> None:
        n = float(x.shape[0])
        p = x.shape[1]
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([p]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ b, jnp.eye(p)[0, 0] * n), obs=y)

    def third(d: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, len(d["y"])))
        numpyro.sample("y", dist.Normal(b * d["x"], 1.0), obs=d["y"])

    for model, names, line in (
        (first, ["x", "y"], "1.0 / n).expand([p])"),
        (second, ["x", "y"], "jnp.eye(p)[0, 0] * n"),
        (third, ["d"], 'len(d["y"])'),
    ):
        (found,) = lines_with_numbers_of_rows(model, names)
        assert line in found


def test_of_several_statements_on_a_line_one_is_meant() -> None:
    def model(g: Any, y: Any) -> None:
        both, codes = np.unique(g, return_inverse=True); k = len(both)  # fmt: skip # noqa: E702
        means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([k]))
        numpyro.sample("y", dist.Normal(means[codes], 1.0), obs=y)

    with pytest.raises(TypeError) as error:
        set_up(model, GROUP, Y)
    remedy = "Compute np.unique(g, return_inverse=True) beforehand, from all rows"
    assert remedy in str(error.value)


def refusal_of(run: Callable[[Any], Any]) -> tuple[str, str]:
    """The line that an error of JAX names, and what is computed there."""
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        jax.jit(run)(jnp.arange(3))
    return line_of(run, error.value)


def test_the_statement_that_runs_is_found() -> None:
    """On a line with others, over several lines, and as the head of a block."""

    def beside(g: Any) -> Any:
        k = 0; k = int(jnp.max(g))  # fmt: skip # noqa: E702
        return k

    def on_one_line(g: Any) -> Any:
        if jnp.max(g) > 3: return jnp.exp(g)  # fmt: skip # noqa: E701
        return g

    def over_lines(g: Any) -> Any:
        return jnp.arange(
            3,
            int(jnp.max(g)),
        )

    def over_groups(g: Any) -> Any:
        for j in range(int(jnp.max(g))):
            g = g + jnp.exp(jnp.where(g == j, jnp.log1p(jnp.abs(g)), 0.0))
        return g

    def by_case(g: Any) -> Any:
        match int(jnp.max(g)):
            case 0:
                return jnp.where(jnp.exp(g) > 1, jnp.log1p(jnp.abs(g)), 0.0)
        return g

    for run, text, called in (
        (beside, "k = 0; k = int", "int(jnp.max(g))"),
        (on_one_line, "if jnp.max(g) > 3", "jnp.max(g)"),
        (over_lines, "int(jnp.max(g)),", "jnp.arange(3, int(jnp.max(g)))"),
        (over_groups, "for j in range(", "range(int(jnp.max(g)))"),
        (by_case, "match int(", "int(jnp.max(g))"),
    ):
        line, computed = refusal_of(run)
        assert text in line and computed == called


def test_numpy_calls_that_do_not_compile_are_named() -> None:
    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        rank = np.argsort(x)
        numpyro.sample("y", dist.Normal(b * rank, 1.0), obs=y)

    kernel = AMAGOLD(model, step_size=1e-2, batch_size=8)
    said = r"of its rows \(NumPy is called in line \d+, `rank = np.argsort\(x\)`\)"
    with pytest.raises(ValueError, match=said):
        kernel.init(jax.random.key(0), 5, None, (X, Y), {})


@pytest.mark.parametrize("loops", ["over the rows", "over a grid"])
def test_a_program_that_compiles_for_minutes_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, loops: str
) -> None:
    monkeypatch.setattr(batch_comparison, "_MANY_OPERATIONS", 30)

    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        if loops == "over the rows":
            squares = jnp.array([value**2 for value in x])
        else:
            squares = sum(x**2 / k for k in range(1, 21))
        numpyro.sample("y", dist.Normal(b * squares, 1.0), obs=y)

    reason = "Its Python code loops over rows" if "rows" in loops else "jax.lax.scan"
    kernel = AMAGOLD(model, step_size=1e-2, batch_size=8)
    with pytest.warns(UserWarning, match=rf"a program of \d+ operations.* {reason}"):
        kernel.init(jax.random.key(0), 5, None, (X, Y), {})
