"""Models that do not index their data run on the rows of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import xarray as xr
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy

from numpyro_minibatch import MINT, HostRows, MinibatchMH, batch, to_inference_data
from numpyro_minibatch._model.independence import check_rows
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch._model.row_axes import RowAxes
from numpyro_minibatch.target import ModelTarget

pytestmark = pytest.mark.x64

N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = RNG.normal(size=N).astype(np.float32)
PAIRS = RNG.normal(size=(N, 2)).astype(np.float32)
GROUP = RNG.integers(0, 4, N)
COUNTS = RNG.poisson(2.0, N)
LABELS = RNG.integers(0, 3, N)


def weights(size: int = 3) -> Any:
    return numpyro.sample("b", dist.Normal(0.0, 1.0).expand([size]).to_event(1))


def in_a_plate(X: Any, y: Any) -> None:
    b = weights()
    with numpyro.plate("rows", len(y)):
        numpyro.sample("obs", dist.Normal(X @ b, 1.0), obs=y)


def in_a_plate_of_known_size(X: Any, y: Any = None) -> None:
    b = weights()
    with numpyro.plate("rows", N):
        numpyro.sample("obs", dist.Normal(X @ b, 1.0), obs=y)


def partly_indexed(X: Any, y: Any) -> None:
    b = weights()
    with numpyro.plate("rows", N) as idx:
        numpyro.sample("obs", dist.Normal(X[idx] @ b, 1.0), obs=y)


def in_no_plate(X: Any, y: Any) -> None:
    mean = numpyro.deterministic("mean", X @ weights())
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("obs", dist.StudentT(4.0, mean, scale), obs=y)


def hierarchy(group: Any, y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(mean, 0.5))
    numpyro.sample("obs", dist.Poisson(jnp.exp(a[group])), obs=y)


def outputs(X: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    with numpyro.plate("outputs", 2):
        numpyro.sample("obs", dist.Normal(X @ b, 1.0), obs=y)


def nested_plates(X: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    with numpyro.plate("outputs", 2, dim=-1), numpyro.plate("rows", N, dim=-2):
        numpyro.sample("obs", dist.Normal(X @ b, 1.0), obs=y)


def events(X: Any, y: Any) -> None:
    loc = weights(2)
    numpyro.sample("obs", dist.MultivariateNormal(loc, jnp.eye(2)), obs=y)


def softmax(X: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3, 3]).to_event(2))
    numpyro.sample("obs", dist.Categorical(logits=X @ b), obs=y)


def columns(X: Any, y: Any) -> None:
    numpyro.sample("obs", dist.Normal(weights() @ X, 1.0), obs=y)


def a_dict(data: Any, *, weight: Any) -> None:
    b = weights()
    numpyro.sample("calibration", dist.Normal(b[0], 0.5), obs=0.3)
    with handlers.mask(mask=data["mask"]), handlers.scale(scale=weight):
        numpyro.sample("obs", dist.Normal(data["x"] @ b, 1.0), obs=data["y"])


def factors(X: Any, y: Any) -> None:
    numpyro.factor("obs", dist.Normal(X @ weights(), 1.0).log_prob(y))


def zero_inflated(X: Any, y: Any) -> None:
    rate = jnp.exp(X @ weights())
    gate = numpyro.sample("gate", dist.Beta(1.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.ZeroInflatedPoisson(gate, rate), obs=y)


def ordinal(X: Any, y: Any) -> None:
    prior = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand([2]), dist.transforms.OrderedTransform()
    )
    cuts = numpyro.sample("cuts", prior)
    numpyro.sample("obs", dist.OrderedLogistic(X @ weights(), cuts), obs=y)


def mixture(X: Any, y: Any) -> None:
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(2)))
    loc = weights(2)
    parts = dist.Normal(loc, 1.0)
    numpyro.sample("obs", dist.MixtureSameFamily(dist.Categorical(share), parts), obs=y)


def network(X: Any, y: Any) -> None:
    first = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))
    hidden = jnp.tanh(X @ first) @ weights(4)
    numpyro.sample("obs", dist.Normal(hidden, 0.5), obs=y)


def two_plates(X: Any, y: Any, z: Any) -> None:
    b = weights()
    with numpyro.plate("first", len(y)):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)
    with numpyro.plate("second", len(z)):
        numpyro.sample("z", dist.Poisson(jnp.exp(X @ b)), obs=z)


def two_plates_with_plates_inside(X: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    with numpyro.plate("first", N):
        numpyro.sample("sum", dist.Normal((X @ b).sum(1), 1.0), obs=y.sum(1))
    with numpyro.plate("outputs", 2, dim=-1), numpyro.plate("second", N, dim=-2):
        numpyro.sample("obs", dist.Normal(X @ b, 1.0), obs=y)


class Case(NamedTuple):
    """A model, its arguments, the plate of its rows, and the sites that have rows."""

    model: Callable
    args: tuple
    plate: str = "data"
    kwargs: dict[str, Any] = {}


CASES = [
    Case(in_a_plate, (X, Y), "rows"),
    Case(in_a_plate_of_known_size, (X, Y), "rows"),
    Case(partly_indexed, (jnp.asarray(X), jnp.asarray(Y)), "rows"),
    Case(in_no_plate, (X, Y)),
    Case(hierarchy, (GROUP, COUNTS)),
    Case(outputs, (X, PAIRS)),
    Case(nested_plates, (X, PAIRS), "rows"),
    Case(events, (X, PAIRS)),
    Case(softmax, (X, LABELS)),
    Case(columns, (X.T.copy(), Y)),
    Case(a_dict, ({"x": X, "y": Y, "mask": Y > 0},), kwargs={"weight": np.abs(Y)}),
    Case(factors, (X, Y)),
    Case(zero_inflated, (X, COUNTS)),
    Case(ordinal, (X, LABELS)),
    Case(mixture, (X, Y)),
    Case(network, (X, Y)),
    Case(two_plates, (X, Y, COUNTS), "first"),
    Case(two_plates_with_plates_inside, (X, PAIRS), "first"),
]


def target_of(case: Case) -> tuple[ModelTarget, Any]:
    layout, frozen = inspect_model("MINT", case.model, case.args, case.kwargs, 2)

    def make(args: tuple, kwargs: dict[str, Any]) -> ModelTarget:
        return ModelTarget(
            model=case.model,
            args=args,
            kwargs=kwargs,
            sizes=dict(layout.plates),
            frozen=frozen,
            slices=layout.slices,
            by_row=layout.by_row,
        )

    check_rows("MINT", make, case.model, case.args, case.kwargs, layout)
    return make(case.args, case.kwargs), layout


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model.__name__)
def test_rows_are_those_of_the_model_on_all_data(case: Case) -> None:
    target, layout = target_of(case)
    assert dict(layout.plates) == {case.plate: N}
    shapes = zip(layout.latents, layout.shapes, strict=True)
    z = {name: RNG.uniform(-1, 1, shape) for name, shape in shapes}
    z = jax.tree.map(lambda x: jnp.asarray(x, float), z)
    some = np.array([7, 0, N - 1, 7, 31])

    @jax.jit
    def compare(z: Any) -> Any:
        whole = target.terms(z, {case.plate: jnp.arange(N)})
        part = target.terms(z, {case.plate: jnp.asarray(some)})
        theirs = -potential_energy(case.model, case.args, case.kwargs, z)
        return (
            whole.rows[case.plate],
            whole.known,
            part.rows[case.plate],
            part.known,
            theirs,
        )

    rows, known, some_rows, same, theirs = compare(z)
    tolerance = 1e-9 if jax.config.jax_enable_x64 else 2e-4
    np.testing.assert_allclose(known + rows.sum(), theirs, rtol=tolerance)
    np.testing.assert_allclose(some_rows, rows[some], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(same, known, rtol=tolerance)


def test_plates_of_the_same_size_that_are_not_subsampled_stay_apart() -> None:
    third = jnp.asarray(COUNTS[:40])

    def model(X: Any, y: Any, z: Any) -> None:
        two_plates(X, y, z)
        rate = numpyro.sample("rate", dist.Exponential(1.0))
        with numpyro.plate("third", len(third)) as idx:
            numpyro.sample("third_counts", dist.Poisson(rate), obs=third[idx])

    layout, _ = inspect_model("MINT", model, (X, Y, COUNTS), {}, {"third": 5})
    assert layout.plates == (("third", 40),) and layout.slices is None


def test_rows_may_be_along_another_axis_of_an_observed_site() -> None:
    wide = np.stack([Y, 2 * Y, -Y])

    def model(y: Any) -> None:
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("obs", dist.Normal(loc[:, None], 1.0), obs=y)

    with pytest.raises(ValueError, match=r"shape \(3, 60\).*rows=\{'y': 1\}"):
        inspect_model("MINT", model, (wide,), {}, 2)
    named = RowAxes.of("MINT", {"y": 1})
    layout, _ = inspect_model("MINT", model, (wide,), {}, 2, rows=named)
    assert layout.plates == (("data", N),)
    target = ModelTarget(
        model=model, args=(wide,), sizes={"data": N}, slices=layout.slices
    )
    z = {"loc": jnp.array([0.3, -0.2, 0.1])}
    rows = target.terms(z, {"data": jnp.array([5, 59])}).rows["data"]
    expected = dist.Normal(z["loc"], 1.0).log_prob(wide.T[[5, 59]]).sum(-1)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)


def test_few_rows_and_keyword_data() -> None:
    target_of(Case(in_a_plate, (X[:3], Y[:3])))
    target_of(Case(in_a_plate, (), kwargs={"y": Y, "X": X}))


def test_a_run_gives_what_arviz_expects() -> None:
    mcmc = MCMC(
        MINT(in_no_plate, batch_size=20, temperature=5.0),
        num_warmup=5,
        num_samples=5,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, y=Y)
    assert mcmc.sampler.plates == {"data": N}
    assert set(mcmc.get_samples()) == {"b", "scale"}  # "mean" has a value per row
    idata = to_inference_data(mcmc, log_likelihood=True)
    assert idata["observed_data"]["obs"].sizes == {"data": N}
    values = idata["log_likelihood"]["obs"].sel(chain=0, draw=4).to_numpy()
    draw = {name: x[4] for name, x in mcmc.get_samples().items()}
    mean = X @ np.asarray(draw["b"])
    expected = dist.StudentT(4.0, mean, draw["scale"]).log_prob(Y)
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [30, {"second": 30}, {"first": 40, "second": 30}])
def test_plates_of_the_same_size_share_a_batch(size: Any) -> None:
    mcmc = MCMC(
        MinibatchMH(two_plates, control_variate="taylor2", batch_size=size),
        num_warmup=2,
        num_samples=2,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, Y, COUNTS)
    assert mcmc.sampler.plates == {"first": N}
    assert mcmc.sampler.batch_sizes == {"first": 30}
    idata = to_inference_data(mcmc, log_likelihood=True)
    assert idata["observed_data"]["y"].sizes == {"first": N}
    assert idata["observed_data"]["z"].sizes == {"first": N}
    draw = mcmc.get_samples()["b"][1]
    expected = dist.Poisson(jnp.exp(X @ np.asarray(draw))).log_prob(COUNTS)
    found = idata["log_likelihood"]["z"].sel(chain=0, draw=1).to_numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_posterior_is_right() -> None:
    """A conjugate regression, with the control variate and batches of rows."""
    mcmc = MCMC(
        MinibatchMH(in_a_plate, control_variate="taylor2", batch_size=20),
        num_warmup=200,
        num_samples=2_000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), X, Y)
    precision = X.T @ X + np.eye(3)
    mean, cov = np.linalg.solve(precision, X.T @ Y), np.linalg.inv(precision)
    draws = mcmc.get_samples(group_by_chain=True)["b"]
    ess = numpyro.diagnostics.effective_sample_size(np.asarray(draws))
    error = (np.asarray(draws).mean((0, 1)) - mean) / np.sqrt(np.diag(cov))
    assert (np.abs(error) < 4.5 / np.sqrt(ess)).all()


def test_rows_on_the_host_are_read_where_they_are() -> None:
    mcmc = MCMC(
        MINT(in_a_plate_of_known_size, batch_size=20, temperature=5.0),
        num_warmup=5,
        num_samples=5,
        progress_bar=False,
    )
    draws = []
    for data in (X, HostRows(X)):
        mcmc.run(jax.random.key(0), data, Y)
        draws.append(mcmc.get_samples()["b"])
    np.testing.assert_array_equal(*draws)


# refused ------------------------------------------------------------------------------


def closes_over_data(y: Any) -> None:
    numpyro.sample("obs", dist.Normal(jnp.asarray(X) @ weights(), 1.0), obs=y)


def effect_of_each_row(X: Any, y: Any) -> None:
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([len(y)]))
    numpyro.sample("obs", dist.Normal(effect, 1.0), obs=y)


def empirical_prior(X: Any, y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(y.mean(), 1.0))
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y)


def prior_of_the_size(X: Any, y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, len(y) ** -0.5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y)


def standardised(X: Any, y: Any) -> None:
    X = (X - X.mean(0)) / X.std(0)
    numpyro.sample("obs", dist.Normal(X @ weights(), 1.0), obs=y)


def table_of_as_many_entries(table: Any, which: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("obs", dist.Normal(b * table[which], 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "args", "says"),
    [
        (closes_over_data, (Y,), ("'obs' has 60 rows", "as arguments of the model")),
        (effect_of_each_row, (X, Y), ("'effect' has a value for each of the 60 rows",)),
        (empirical_prior, (X, Y), ("'mean' depends on which rows of 'X', 'y'",)),
        (prior_of_the_size, (X, Y), ("'mean' depends on how many rows",)),
        (standardised, (X, Y), ("'obs' depends on which rows", "before the model")),
        (
            table_of_as_many_entries,
            (Y, np.arange(N)[::-1].copy(), Y),
            ("'table', 'which', 'y'", "by chance"),
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_no_function_of_rows_is_refused(
    model: Callable, args: tuple, says: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:
        target_of(Case(model, args))
    message = str(caught.value)
    assert [words for words in says if words not in message] == [], message


def test_an_event_of_the_rows_outside_of_their_plate_is_named() -> None:
    def model(x: Any, treated: Any = None, y: Any = None) -> None:
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        prior = dist.Bernoulli(rate).expand([len(x)]).to_event(1)
        treated = numpyro.sample("treated", prior, obs=treated)
        with numpyro.plate("people", len(x)):
            numpyro.sample("score", dist.Normal(rate * x + treated, 1.0), obs=y)

    kernel = MINT(model, batch_size=10, temperature=1.0)
    with pytest.raises(ValueError, match="'treated' is in no plate.*leave out .to_eve"):
        kernel.init(
            jax.random.key(0),
            1,
            model_args=(X[:, 0],),
            model_kwargs={"treated": (X[:, 1] > 0) * 1.0, "y": Y},
        )


def of_a_frame(df: Any) -> None:
    mean = weights().sum() * df["x"].values
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=df["y"].values)


def of_columns(df: Any) -> None:
    mean = weights().sum() * df.x.to_numpy()
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=df.y.to_numpy())


def of_values(x: Any, y: Any) -> None:
    mean = weights().sum() * jnp.asarray(x)
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y.values)


def of_numbers(x: Any, y: Any) -> None:
    y = y.to_numpy()
    numpyro.sample("obs", dist.Normal(weights().sum() * jnp.asarray(x), 1.0), obs=y)


def of_arrays(x: Any, y: Any) -> None:
    mean = weights().sum() * jnp.asarray(x)
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=jnp.asarray(y))


def of_products(x: Any, y: Any) -> None:
    numpyro.sample("obs", dist.Normal(weights().sum() * x, 1.0), obs=y)


def of_a_dict(data: Any) -> None:
    numpyro.sample("obs", dist.Normal(weights()[0], 1.0), obs=data["y"].values)


def of_an_index(x: Any, y: Any) -> None:
    mean = weights().sum() * x[y.index]
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=jnp.asarray(y))


def of_groups(x: Any, y: Any) -> None:
    mean = weights().sum() * len(x.unique())
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y)


FRAME = pd.DataFrame({"x": X[:, 0], "y": Y})
WITH_TEXT = FRAME.assign(name="a")
DATASET = xr.Dataset({"x": ("rows", X[:, 0]), "y": ("rows", Y)})
SERIES, ARRAYS = (FRAME["x"], FRAME["y"]), (DATASET["x"], DATASET["y"])
PASS_FRAME = r"df is a pandas DataFrame: pass {k: df\[k\].to_numpy\(\) for k in df"
PASS_DATASET = r"df is an xarray Dataset: pass {k: df\[k\].values for k in df}"
LEAVE_OUT = r"leave out \.values and \.to_numpy\(\)"

TABLES = {
    "frame": (of_a_frame, (FRAME,), rf"{PASS_FRAME}.columns}}.*df\[...\].*{LEAVE_OUT}"),
    "with text": (
        of_a_frame,
        (WITH_TEXT,),
        PASS_FRAME + r".select_dtypes\(.* \| {'name': df\['name'\].astype\('category'\)"
        r".cat.codes.to_numpy\(\)}.*write len\(df\['x'\]\) in place of len\(df\)",
    ),
    "text": (
        of_arrays,
        (WITH_TEXT["name"], Y),
        r"x is a pandas Series: compute names, codes = numpy.unique\(x, return_inverse",
    ),
    "columns": (
        of_columns,
        (FRAME,),
        rf"reads .[xy] of.*none.*{PASS_FRAME}",
    ),
    "dataset": (of_a_frame, (DATASET,), rf"{PASS_DATASET}.*{LEAVE_OUT}"),
    "columns of a dataset": (of_columns, (DATASET,), PASS_DATASET),
    "series": (
        of_values,
        SERIES,
        r"obs=y.values\)`.*y is a pandas Series: pass y.t",
    ),
    "array": (
        of_values,
        ARRAYS,
        r"y in place of y.values.*DataArray: pass y.values",
    ),
    "directly": (of_products, SERIES, r"x is a pandas Series: pass x.to_numpy\(\) in"),
    "dict": (
        of_a_dict,
        ({"y": FRAME["y"]},),
        r"data\['y'\] is a pandas Series: pass ",
    ),
    "many": (of_a_dict, (dict.fromkeys("yuvw", FRAME["y"]),), "and so on for 1 more"),
    "advice followed": (
        of_a_frame,
        ({"x": X[:, 0], "y": Y},),
        r"line \d+, `mean .*reads .values of.*Write df\['x'\] in place of df\['x'\].",
    ),
    "to_numpy": (of_numbers, (X[:, 0], Y), r"Write y in place of y.to_numpy\(\)\.$"),
    "index": (
        of_an_index,
        (X[:, 0], Y),
        r"jnp.arange\(len\(y\)\) in place of y.index",
    ),
    "unique": (of_groups, (X[:, 0], Y), "reads .unique of.*compute it before the run"),
}


@pytest.mark.parametrize("name", TABLES)
def test_of_a_table_the_arrays_to_pass_are_shown(name: str) -> None:
    model, args, match = TABLES[name]
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}") as caught:
        inspect_model("MINT", model, args, {}, 10)
    assert type(caught.value) in (ValueError, TypeError)


def test_data_arrays_in_products_have_rows_or_are_refused() -> None:
    """Whether JAX multiplies them depends on its version."""
    try:
        layout, _ = inspect_model("MINT", of_products, ARRAYS, {}, 10)
    except (TypeError, ValueError) as error:
        assert "x is an xarray DataArray: pass x.values" in str(error)
    else:
        assert layout.widths == ((layout.plates[0][0], 10),)
        assert layout.plates[0][1] == len(Y)


@pytest.mark.parametrize("args", [SERIES, ARRAYS], ids=["pandas", "xarray"])
def test_tables_that_a_model_makes_arrays_of_have_rows(args: tuple) -> None:
    layout, _ = inspect_model("MINT", of_arrays, args, {}, 10)
    assert dict(layout.plates) == {"data": N}


@pytest.mark.parametrize("library", ["pandas", "xarray"])
@pytest.mark.parametrize("rows", [None, {"x": 0, "y": 0}])
def test_tables_that_pair_rows_by_labels_are_refused(library: str, rows: Any) -> None:
    if library == "pandas":
        x, y = SERIES[0], SERIES[1].sort_values()
    else:
        x = ARRAYS[0].assign_coords(rows=range(N))
        y = ARRAYS[1].assign_coords(rows=range(N)[::-1])
    axes = RowAxes.of("MINT", rows)
    with pytest.raises(ValueError, match=r"different labels.*pass y\."):
        inspect_model("MINT", of_arrays, (x, y), {}, 10, rows=axes)
    inspect_model("MINT", of_arrays, (X[:, 0], y), {}, 10, rows=axes)


def test_a_table_that_has_no_rows_is_not_the_reason() -> None:
    def model(x: Any, y: Any, prior: Any) -> None:
        numpyro.sample("scale", dist.HalfNormal(prior["scale"].to_numpy()[0]))
        of_arrays(x, y)

    inspect_model("MINT", model, (X[:, 0], Y, pd.DataFrame({"scale": [1.0]})), {}, 10)
    with pytest.raises(ValueError, match="which fails") as caught:
        inspect_model(
            "MINT",
            lambda x, y, prior: of_arrays(X[:, 0], y),
            (X[:, 0], Y, pd.DataFrame({"scale": [1.0]})),
            {},
            10,
        )
    assert "DataFrame" not in str(caught.value)


def test_an_attribute_error_of_the_models_own_is_left() -> None:
    def model(x: Any, y: Any) -> None:
        raise AttributeError("mine") if x.shape else KeyError()

    with pytest.raises(AttributeError, match="mine"):
        inspect_model("MINT", model, SERIES, {}, 10)


def test_text_that_a_model_does_not_read_is_no_obstacle() -> None:
    def model(data: Any) -> None:
        of_arrays(data["x"], data["y"])

    data = {k: WITH_TEXT[k].to_numpy() for k in WITH_TEXT}
    data["other"] = np.array(["a"] * N)
    kernel = MinibatchMH(model, batch=batch.full())
    kernel.init(jax.random.key(0), 1, model_args=(data,))
    assert kernel.plates == {"data": N}


def test_a_masked_array_is_refused() -> None:
    masked = np.ma.masked_array(Y, mask=Y > 0)
    with pytest.raises(ValueError, match=r"y is a NumPy masked.*y.filled\(0.0\)"):
        inspect_model("MINT", in_no_plate, (X, masked), {}, 10)
