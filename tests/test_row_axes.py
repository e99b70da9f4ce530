"""`rows=` names the arguments of a model that have the rows of its data."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    MINTEE,
    SGHMC,
    AusterityMH,
    ConfidenceMH,
    Cyclical,
    HostRows,
    MHMinibatch,
    MinibatchMH,
    ReplicaExchange,
    Target,
)
from numpyro_minibatch._model.independence import check_rows
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch._model.row_axes import RowAxes
from numpyro_minibatch.kernels import MinibatchKernel
from numpyro_minibatch.target import ModelTarget

N = 12
RNG = np.random.default_rng(0)
SQUARE = RNG.normal(size=(N, N)).astype(np.float32)
Y = RNG.normal(size=N).astype(np.float32)
WHICH = RNG.integers(0, N, N)


def weights(size: int) -> Any:
    return numpyro.sample("b", dist.Normal(0.0, 1.0).expand([size]).to_event(1))


def columns(X: Any, y: Any) -> None:
    """The rows of a square matrix are along its second axis."""
    numpyro.sample("obs", dist.Normal(weights(N) @ X, 1.0), obs=y)


def two_tables(one: Any, other: Any, which: Any, y: Any) -> None:
    """Two tables have as many entries as there are rows, by chance."""
    b = weights(2)
    mean = b[0] * one[which] + b[1] * other[which]
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y)


class Data(NamedTuple):
    X: Any
    table: Any
    which: Any


def trees(data: Any, *, more: Any) -> None:
    b = weights(N)
    scale = jnp.exp(0.1 * data.table[data.which])
    mean = b @ data.X + more["offset"] + more["table"].sum()
    with numpyro.plate("rows", N):
        numpyro.sample("obs", dist.Normal(mean, scale), obs=more["y"])


def anything(*arrays: Any) -> None:
    numpyro.sample("obs", dist.Normal(weights(N) @ arrays[0], 1.0), obs=arrays[1])


def target_of(
    model: Callable, rows: Any, args: tuple, kwargs: dict[str, Any] | None = None
) -> ModelTarget:
    kwargs = kwargs or {}
    named = RowAxes.of("MINT", rows)
    layout, frozen = inspect_model("MINT", model, args, kwargs, 2, rows=named)

    def make(args: tuple, kwargs: dict[str, Any]) -> ModelTarget:
        return ModelTarget(
            model=model,
            args=args,
            kwargs=kwargs,
            sizes=dict(layout.plates),
            frozen=frozen,
            slices=layout.slices,
            by_row=layout.by_row,
        )

    check_rows("MINT", make, model, args, kwargs, layout)
    return make(args, kwargs)


TREES = ((Data(SQUARE, Y, WHICH),), {"more": {"y": Y, "offset": Y, "table": SQUARE}})
TREE_AXES = {"data": Data(1, None, 0), "more": {"y": 0, "offset": -1}}
NAMED = [
    (columns, {"X": 1, "y": 0}, ((SQUARE, Y), {})),
    (columns, {"X": -1, "y": -1}, ((SQUARE,), {"y": Y})),
    (two_tables, {"which": 0, "y": 0}, ((Y, Y[::-1].copy(), WHICH, Y), {})),
    (trees, TREE_AXES, TREES),
    (trees, {**TREE_AXES, "data": {"X": 1, "which": 0}}, TREES),
    (anything, {"args[0]": 1, "args[1]": 0}, ((SQUARE, Y), {})),
    (handlers.scale(columns, scale=1.0), {"X": 1, "y": 0}, ((SQUARE, Y), {})),
]


@pytest.mark.parametrize(("model", "rows", "arguments"), NAMED)
def test_named_rows_are_those_of_the_model_on_all_data(
    model: Callable, rows: Any, arguments: Any
) -> None:
    args, kwargs = arguments
    target = target_of(model, rows, args, kwargs)
    (plate,) = target.plates
    size = 2 if model is two_tables else N
    z = {"b": jnp.asarray(RNG.uniform(-1, 1, size), jnp.float32)}
    some = np.array([7, 0, 11, 7])

    @jax.jit
    def compare(z: Any) -> Any:
        whole = target.terms(z, {plate: jnp.arange(N)})
        part = target.terms(z, {plate: jnp.asarray(some)})
        theirs = -potential_energy(model, args, kwargs, z)
        return whole.rows[plate], whole.known, part.rows[plate], theirs

    rows, known, some_rows, theirs = compare(z)
    np.testing.assert_allclose(known + rows.sum(), theirs, rtol=2e-4)
    np.testing.assert_allclose(some_rows, rows[some], rtol=2e-4, atol=2e-4)


def test_without_names_these_models_are_refused_with_the_names_to_write() -> None:
    with pytest.raises(ValueError, match=r"as in rows=\{'X': 0, 'y': 0\}"):
        target_of(columns, None, (SQUARE, Y))
    with pytest.raises(ValueError, match=r"rows=\{'one': 0, 'other': 0, 'which': 0, "):
        target_of(two_tables, None, (Y, Y[::-1].copy(), WHICH, Y))


def test_verdicts_are_those_of_the_names() -> None:
    """The same model and arguments, with right names first and wrong ones after."""
    args = (Y, Y[::-1].copy(), WHICH, Y)
    target_of(two_tables, {"which": 0, "y": 0}, args)
    with pytest.raises(ValueError, match="'obs' depends on which rows of 'one', 'wh"):
        target_of(two_tables, {"one": 0, "which": 0, "y": 0}, args)


def subsampled(X: Any, y: Any) -> None:
    b = weights(N)
    with numpyro.plate("rows", N, subsample_size=3) as idx:
        numpyro.sample("obs", dist.Normal(X[idx] @ b, 1.0), obs=y[idx])


FIVE = (Y[:5], Y, WHICH % 5, Y)


def equal_plates(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("one", N) as idx:
        numpyro.sample("x", dist.Normal(b, 1.0), obs=x[idx])
    with numpyro.plate("two", N) as idx:
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y[idx])


def test_plates_of_the_same_size_may_have_named_rows() -> None:
    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("one", N):
            numpyro.sample("x", dist.Normal(b, 1.0), obs=x)
        with numpyro.plate("two", N):
            numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

    named = RowAxes.of("MINT", {"x": 0, "y": 0})
    layout, _ = inspect_model("MINT", model, (Y, Y), {}, {"two": 2}, rows=named)
    assert layout.plates == (("one", N),) and layout.widths == (("one", 2),)


@pytest.mark.parametrize(
    ("model", "rows", "args", "says"),
    [
        (columns, {"Z": 0}, (SQUARE, Y), "names 'Z'.*got: 'X', 'y'"),
        (columns, {"X": 2, "y": 0}, (SQUARE, Y), r"X has shape \(12, 12\), and no axi"),
        (
            two_tables,
            {"one": 0, "y": 0},
            FIVE,
            r"one has 5 entries.*'data' \(12 rows\)",
        ),
        (columns, {"X": 1}, (SQUARE, Y), r"Other arguments.*: y\..*\{'X': 1, 'y': 0\}"),
        (columns, {"X": {"a": 0}}, (SQUARE, Y), "X has no 'a'; it has no names"),
        (columns, {"X": (0, 1)}, (SQUARE, Y), "2 axes.*X, which has no entries"),
        (columns, {"X": None}, (SQUARE, Y), "gives no axis to any array"),
        (
            columns,
            {"X": 0, "y": 0},
            (SQUARE, 3.0),
            "y is of type float and not an array",
        ),
        (columns, {"X": 1, "y": 0}, (HostRows(SQUARE), Y), "X is HostRows.*axis 0"),
        (trees, {"data": {"x": 0}}, TREES, "data has no 'x'; it has 'X', 'table', 'wh"),
        (subsampled, {"X": 0, "y": 0}, (SQUARE, Y), "plate 'rows' has a subsample_siz"),
        (equal_plates, {"x": 0, "y": 0}, (Y, Y), "rows of plate 'one' or of 'two'"),
    ],
)
def test_names_that_contradict_the_model_are_refused(
    model: Callable, rows: Any, args: Any, says: str
) -> None:
    args, kwargs = args if model is trees else (args, {})
    if model is equal_plates:
        with pytest.raises(ValueError, match=says):
            named = RowAxes.of("MINT", rows)
            inspect_model("MINT", model, args, kwargs, {"one": 2, "two": 2}, rows=named)
        return
    with pytest.raises(ValueError, match=says):
        target_of(model, rows, args, kwargs)


PANEL = np.random.default_rng(3).normal(size=(6, 15))


def panel_of_units(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([x.shape[0]]))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a[:, None] + b * x, 1.0), obs=y)


def panel_of_times(x: Any, y: Any) -> None:
    with numpyro.plate("time", x.shape[1], dim=-1):
        d = numpyro.sample("d", dist.Normal(0.0, 1.0))
    with (
        numpyro.plate("unit", x.shape[0], dim=-2),
        numpyro.plate("time2", x.shape[1], dim=-1),
    ):
        numpyro.sample("y", dist.Normal(d + x, 1.0), obs=y)


def test_the_other_axis_of_a_panel_is_advised_and_runs() -> None:
    with pytest.raises(
        ValueError, match="15 entries along axis 1.*the model runs"
    ) as e:
        inspect_model("MINT", panel_of_units, (PANEL, PANEL), {}, 2)
    assert "write rows={'x': 1, 'y': 1}. Or: put both" in str(e.value)
    target = target_of(panel_of_units, {"x": 1, "y": 1}, (PANEL, PANEL))
    assert target.sizes == {"data": 15}
    with pytest.raises(ValueError) as e:  # effects of both: no axis has rows
        inspect_model("MINT", panel_of_both, (PANEL, PANEL), {}, 2)
    assert "rows={" not in str(e.value)


def panel_of_both(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([x.shape[0]]))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0).expand([x.shape[1]]))
    numpyro.sample("y", dist.Normal(a[:, None] + d + x, 1.0), obs=y)


@pytest.mark.parametrize("named", [None, {"x": 0, "y": 0}])
def test_the_smaller_plate_of_a_panel_has_the_rows(named: Any) -> None:
    """Each of the times has an effect of its own, so that they are no rows."""
    rows = RowAxes.of("MINT", named)
    args = PANEL, PANEL
    layout, _ = inspect_model("MINT", panel_of_times, args, {}, 2, rows=rows)
    assert layout.plates == (("unit", 6),)
    with pytest.raises(ValueError, match="latent site 'd'"):  # it was asked for
        inspect_model("MINT", panel_of_times, args, {}, {"time2": 2})


@pytest.mark.parametrize("by_index", [False, True])
def test_of_nested_plates_of_one_size_the_first_has_the_rows(by_index: bool) -> None:
    def square(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        outer, inner = numpyro.plate("r", N, dim=-2), numpyro.plate("k", N, dim=-1)
        with outer as i, inner as k:
            data = y[i[:, None], k] if by_index else y
            numpyro.sample("y", dist.Normal(1.0, scale), obs=data)

    target = target_of(square, None, (SQUARE,))
    assert target.sizes == {"r": N}
    z = {"scale": jnp.asarray(0.3)}
    some = np.array([7, 0, 11])
    found = target.terms(z, {"r": jnp.asarray(some)}).rows["r"]
    expected = dist.Normal(1.0, jnp.exp(0.3)).log_prob(SQUARE[some]).sum(1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    if by_index:  # otherwise the second axis must be named
        layout, _ = inspect_model("MINT", square, (SQUARE,), {}, {"k": 2})
        assert layout.plates == (("k", N),)


def by_indices(X: Any, y: Any) -> None:
    b = weights(N)
    with numpyro.plate("rows", N) as idx:
        numpyro.sample("obs", dist.Normal(X[idx] @ b, 1.0), obs=y[idx])


def test_an_indexed_array_that_is_not_named_is_never_read_at_wrong_rows() -> None:
    """The indices of the plate refer to the rows that the model receives."""
    with pytest.raises(ValueError, match="All entries of 'y' are passed.*name them in"):
        target_of(by_indices, {"X": 0}, (SQUARE, Y))
    target_of(by_indices, {"X": 0, "y": 0}, (SQUARE, Y))


@pytest.mark.parametrize("rows", [0, {}, ["X"], {0: 0}, {"X": True}, {"X": "first"}])
def test_names_of_the_wrong_form_are_refused(rows: Any) -> None:
    with pytest.raises(TypeError, match=r"MINT\(rows=\.\.\.\).*rows=\{\"X\": 0, \"y\""):
        MINT(columns, temperature=1.0, rows=rows)


def test_a_target_written_by_hand_has_no_arguments_to_name() -> None:
    target = Target(lambda z: -z * z, lambda z, i: -z * Y[i], N)
    with pytest.raises(ValueError, match="target written by hand.*Leave rows out"):
        MINT(target=target, temperature=1.0, rows={"X": 0})


ROWS = {"X": 1, "y": 0}
KERNELS: list[Callable[[], Any]] = [
    lambda: MINT(columns, batch_size=4, temperature=5.0, rows=ROWS),
    lambda: MinibatchMH(columns, batch_size=4, temperature=5.0, rows=ROWS),
    lambda: MHMinibatch(columns, batch_size=4, temperature=5.0, rows=ROWS),
    lambda: AusterityMH(columns, batch_size=4, temperature=5.0, rows=ROWS),
    lambda: ConfidenceMH(
        columns, batch_size=4, bound=lambda z, new: jnp.ones(()), rows=ROWS
    ),
    lambda: AMAGOLD(columns, batch_size=4, rows=ROWS),
    lambda: SGHMC(columns, batch_size=4, step_size=1e-3, rows=ROWS),
    lambda: MINTEE(columns, batch_size=4, num_replicas=2, rows=ROWS),
    lambda: Cyclical(
        SGHMC(columns, batch_size=4, step_size=1e-3, rows=ROWS), cycle_length=50
    ),
    lambda: ReplicaExchange(
        MinibatchMH(columns, batch_size=4, rows=ROWS), temperatures=[1.0, 2.0]
    ),
]


@pytest.mark.parametrize("make", KERNELS)
def test_every_kernel_takes_names(make: Callable[[], Any]) -> None:
    kernel = make()
    inner = getattr(kernel, "inner", kernel)
    assert isinstance(inner, MinibatchKernel)
    inner._setup((SQUARE, Y), {})
    assert inner.slices is not None
    assert inner.slices.leaves == ((0, "data", 1), (1, "data", 0))
    assert "rows={'X': 1, 'y': 0}" in repr(inner)
    if kernel is inner:
        assert pickle.loads(pickle.dumps(kernel._rows)) == kernel._rows


def test_names_are_a_setting() -> None:
    one = MINT(columns, temperature=1.0, rows={"X": 1, "y": 0})
    same = MINT(columns, temperature=1.0, rows={"y": 0, "X": 1})
    other = MINT(columns, temperature=1.0, rows={"X": 0, "y": 0})
    assert one == same != other != MINT(columns, temperature=1.0)
    assert hash(one) == hash(same)
    assert one.settings["rows"] == "{'X': 1, 'y': 0}"
    given = {"X": 1, "y": 0}
    kernel = MINT(columns, temperature=1.0, rows=given)
    given["X"] = 0  # later changes do not affect the kernel
    assert kernel == one


def test_a_run_with_names() -> None:
    mcmc = MCMC(
        MINT(columns, batch_size=4, temperature=5.0, rows=ROWS),
        num_warmup=2,
        num_samples=3,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), SQUARE, Y)
    assert mcmc.get_samples()["b"].shape == (3, N)
    assert mcmc.sampler.plates == {"data": N}
