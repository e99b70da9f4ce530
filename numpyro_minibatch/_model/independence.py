"""Row independence: a row's log likelihood must not depend on the rest of its batch.

Minibatches estimate a sum over rows. They are right only if each term of the sum is a
function of the parameters and of its own row, and if everything else is the same for
every batch. A model can violate this without any error: with a lag inside of the batch,
with standardised batches, or with an event dimension over the rows. The functions here
try to read a proof off the model's jaxpr. Where there is none, they evaluate the same
rows in several batches and compare.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.distribution import ExpandedDistribution, Independent

from numpyro_minibatch._internal.static import Static, surroundings
from numpyro_minibatch._model.content import known_content
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch._model.row_axes import suggestion
from numpyro_minibatch._model.rowwise import (
    PLAIN,
    SAME,
    Fact,
    rows_of_plate,
    trace_rows,
)
from numpyro_minibatch._model.values import function_of
from numpyro_minibatch.target import (
    ModelTarget,
    Slices,
    Target,
    data_frames,
    flatten_arguments,
    without_integrals,
)

__all__ = ["check_rows"]

_POOL = 24  # rows of each plate that are compared
# Rows of a batch. Large and small ones differ in all that is a function of their rows
# or of their number, and nothing is closer to a row alone than a pair: a single row
# would do, were there no models that drop an axis of length one.
_LARGE, _SMALL = 16, 2
_SETS = 4, _POOL // 2  # sets of rows of either size, each of them in two orders
_SMALL_OF_PROOF = 5  # rows of the smaller batch of a proof: not a factor of the larger
_RADII = (2.0, 0.5, 0.05)  # positions are uniform within these, as NumPyro's starts
# relative differences between batches: rounding stays below the first, or below the
# second in double precision
_TOLERANCE, _WIDE_TOLERANCE = 5e-5, 1e-6
# the program runs once, on few rows
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
_MOST_CAST = 10_000_000  # numbers of the data that are copied in double precision


def _double() -> AbstractContextManager[Any]:
    """Double precision inside, whatever the setting outside."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # type: ignore[attr-defined]

    return enable_x64()


def _is_double() -> bool:
    return jnp.result_type(float) == jnp.float64


# models whose rows were compared before, with what was known of them; it holds no data
_CHECKED: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
_MOST_CHECKED = 64  # of each model


def check_rows(
    who: str,
    make_target: Callable[[tuple, dict[str, Any]], Target],
    model: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    layout: Layout,
    init: Any = None,
) -> None:
    """Raise unless rows are independent of their batch, and all else is, too.

    Most models are proven to be right by how they compute, without any arithmetic. For
    the others, at three positions, the rows of random batches of two sizes are compared
    with the same rows in other batches. One small program compiles, in double precision
    if the model can be computed in it, so that no rounding error is taken for a
    difference. Data that are being traced have no values, and are not compared.

    :param who: the kernel's name, for the messages.
    :param make_target: from a model's arguments to its target.
    :param model: what the verdict is remembered for, with arguments of these shapes:
        the model, or a target written by hand.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param layout: what is known of the model.
    :param init: a position, used as one of the three if given.
    :raises ValueError: a row depends on its batch, or something else does. The message
        names the site, what differs, and what to write.
    """
    static, arrays = Static.split(args, kwargs)
    if not any(size > 2 for _, size in layout.plates):
        return  # a batch of two rows is all of them
    key = _known_by(model, static, arrays, layout)
    try:
        checked = _CHECKED.setdefault(model, set())
    except TypeError:  # it cannot be referred to weakly
        checked = set()
    if key in checked:
        return
    rng = np.random.default_rng(0)
    comparison = _Comparison(
        lambda arrays: make_target(*static.join(arrays)),
        arrays,
        _batches(dict(layout.plates), rng),
        _positions(layout, init, rng),
    )
    if not comparison.is_proven():
        leaves = [*arrays, *jax.tree.leaves(init)]
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        found = _untraced(comparison.difference)
        if found is not None:
            message = _untraced(partial(_message, who, comparison, found))
            raise ValueError(message)
    if len(checked) >= _MOST_CHECKED:
        checked.clear()
    checked.add(key)


def _untraced(fn: Callable[[], Any]) -> Any:
    """Call a function of concrete values for real, even where JAX is tracing."""
    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        return fn()
    # what is being traced is known to a thread; another one computes
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


def _known_by(model: Any, static: Static, arrays: list[Any], layout: Layout) -> Any:
    """What a verdict holds for: the model's code and the shapes of its arguments."""
    shapes = tuple((x.shape, str(x.dtype)) for x in arrays)
    content: Hashable = known_content()
    function = function_of(model)
    if content is None and isinstance(function, FunctionType):
        # flags and numbers that the model reads from its surroundings
        content = tuple((name, id(value)) for name, value in surroundings(function))
    return static, shapes, layout.plates, layout.slices, content, _is_double()


class _Batches(NamedTuple):
    """Batches of one size, for each plate.

    Batches ``2 k`` and ``2 k + 1`` are the same rows in two orders.

    :param indices: by plate, shape ``(batches, rows)``.
    """

    indices: dict[str, np.ndarray]


def _batches(plates: Mapping[str, int], rng: Any) -> tuple[_Batches, _Batches]:
    """Random batches of two sizes, the first rows of some of them neighbours."""
    both: list[dict[str, np.ndarray]] = [{}, {}]
    for name, size in plates.items():
        large = min(_LARGE, size)
        small = max(1, min(_SMALL, large - 1))
        start = int(rng.integers(size - large + 1))
        run = np.arange(start, start + large)
        others = rng.choice(size, min(4 * _POOL, size), replace=False)
        pool = np.concatenate([run, np.setdiff1d(others, run)])[:_POOL]
        for found, width, count in zip(both, (large, small), _SETS, strict=True):
            sets = [run[:width], *_random_sets(pool, width, count - 1, rng)]
            orders = [x for rows in sets for x in (rows, _reordered(rows, rng))]
            found[name] = np.stack(orders).astype(np.int32)
    return _Batches(both[0]), _Batches(both[1])


def _random_sets(
    pool: np.ndarray, width: int, count: int, rng: Any
) -> list[np.ndarray]:
    """Sets of distinct rows: every row is in one of them before any is in two."""
    each = len(pool) // width
    shuffled = (rng.permutation(pool) for _ in range(-(-count // each)))
    sets = [x[k * width : (k + 1) * width] for x in shuffled for k in range(each)]
    return sets[:count]


def _reordered(rows: np.ndarray, rng: Any) -> np.ndarray:
    """The same rows in another order."""
    return np.roll(rng.permutation(rows), 1) if len(rows) > 2 else rows[::-1]


def _positions(layout: Layout, init: Any, rng: Any) -> Any:
    """Positions along a first axis."""
    given = jax.tree.map(_value, init)
    if not layout.latents:  # a target written by hand
        moved = [
            jax.tree.map(lambda x, r=r: x + r * rng.uniform(-1, 1, x.shape), given)
            for r in (0.0, 0.01, 0.1)
        ]
        return jax.tree.map(lambda *x: np.stack(x), *moved)
    shapes = dict(zip(layout.latents, layout.shapes, strict=True))
    positions = [
        {name: rng.uniform(-r, r, shape) for name, shape in shapes.items()}
        for r in _RADII
    ]
    if given is not None:
        positions[-1] = given
    return jax.tree.map(lambda *x: np.stack(x), *positions)


def _value(x: Any) -> np.ndarray:
    """The number; zeros for what is being traced, of which only the shape is known."""
    if isinstance(x, jax.core.Tracer):
        return np.zeros(x.shape)
    return np.asarray(x, np.float64)


class _Difference(NamedTuple):
    """The largest difference that was found.

    :param site: where; the plate, of a target written by hand.
    :param plate: of the row; ``None`` for what is no row.
    :param row: the number of the row; ``None`` for what is no row.
    :param values: two values that should be equal.
    :param between: what their batches differ in: ``"order"``, ``"rows"`` or
        ``"size"``.
    :param size: relative to the values.
    """

    site: str
    plate: str | None
    row: int | None
    values: tuple[float, float]
    between: str
    size: float


@dataclass
class _Comparison:
    """The same rows at the same positions in several batches.

    :param target_of: from the arrays among the model's arguments to the target.
    :param arrays: these arrays.
    :param batches: the batches of either size.
    :param positions: the positions, along a first axis.
    """

    target_of: Callable[[list[Any]], Target]
    arrays: list[Any]
    batches: tuple[_Batches, _Batches]
    positions: Any

    def is_proven(self) -> bool:
        """Whether how the target computes shows that its rows are independent."""
        if any(x.shape[0] < 2 for x in self.batch(1).values()):
            return False  # an axis of length one could be any
        names: list[Any] = []

        def parts(indices: Any, z: Any, arrays: list[Any]) -> Any:
            # the integrals of rows depend on what the integrands depend on
            with without_integrals():
                found = self.target_of(arrays).by_site(z, indices)
            names.append((list(found.rows), list(found.fixed), found.plates))
            return list(found.rows.values()), list(found.fixed.values())

        trace = jax.make_jaxpr(parts)
        batches = [self.batch(0), self.batch(1)]
        target = self.target_of(self.arrays)
        if isinstance(target, ModelTarget) and target.slices is not None:
            # given all rows, the model runs as it was written
            batches[0] = {
                name: jax.ShapeDtypeStruct((size,), jnp.int32)
                for name, size in target.plates.items()
            }
        one, other = (trace(i, self.position, self.arrays) for i in batches)
        if names[0] != names[1]:
            return False
        rows, fixed, plates_of = names[0]
        facts: list[Fact] = [(rows_of_plate(name),) for name in sorted(self.batch(0))]
        for var in one.jaxpr.invars[len(facts) :]:
            facts.append((PLAIN,) * len(var.aval.shape))
        found = trace_rows(one, other, facts)
        for name, fact in zip(rows, found, strict=False):
            if fact not in [(rows_of_plate(plates_of[name]),), (SAME,)]:
                return False
        outputs = zip(one.jaxpr.outvars, other.jaxpr.outvars, found, strict=True)
        return all(
            fact is not None
            and set(fact) <= {SAME, PLAIN}
            and a.aval.shape == b.aval.shape
            for a, b, fact in list(outputs)[len(rows) :]
        )

    @property
    def position(self) -> Any:
        """What JAX has to know of a position."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.result_type(float)),
            self.positions,
        )

    def batch(self, size: int) -> dict[str, Any]:
        """What JAX has to know of a batch, the larger or the smaller one of a proof."""
        rows = {name: i.shape[1] for name, i in self.batches[0].indices.items()}
        if size:
            rows = {n: max(1, min(_SMALL_OF_PROOF, r - 1)) for n, r in rows.items()}
        return {n: jax.ShapeDtypeStruct((r,), jnp.int32) for n, r in rows.items()}

    def evaluate(
        self, integrals: bool = True
    ) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, str]]]:
        """Log densities of the batches of either size.

        :param integrals: whether to integrate the latent variables of rows out.
        :return: by site the rows, shape ``(positions, batches, rows)``; the log density
            of all else as sum and sum of absolute values, both of shape ``(positions,
            batches)``; and the plate of each site with rows.
        """
        plates: list[dict[str, str]] = []

        def run(arrays: list[Any], positions: Any, indices: list[Any]) -> Any:
            target = self.target_of(arrays)
            plates.clear()

            def at(z: Any, indices: Any) -> Any:
                with nullcontext() if integrals else without_integrals():
                    parts = target.by_site(z, indices)
                plates.append(parts.plates)
                fixed = {
                    name: (jnp.sum(x), jnp.sum(jnp.abs(x)))
                    for name, x in parts.fixed.items()
                }
                return parts.rows, fixed

            # in loops and not vectorised: what a model may contain is not always both
            return [
                jax.lax.map(
                    lambda z, i=i: jax.lax.map(lambda i: at(z, i), i), positions
                )
                for i in indices
            ]

        dtype = jnp.result_type(float)
        found = jax.jit(run, compiler_options=_QUICKLY)(
            _cast(self.arrays, dtype) if _is_double() else self.arrays,
            jax.tree.map(lambda x: np.asarray(x, dtype), self.positions),
            [batches.indices for batches in self.batches],
        )
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
        return [(*two, plates[k]) for k, two in enumerate(found)]

    def difference(self) -> _Difference | None:
        """The largest difference that is more than rounding.

        Double precision comes first, because its verdict needs no other one.
        """
        if _is_double():
            return self.worst()
        try:
            with _double(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a precision that is not the user's
                # parts of the model may have a precision of their own
                return self.worst(_TOLERANCE)
        except (TypeError, ValueError):  # the model has not been written for it
            return self.worst()

    def worst(self, tolerance: float | None = None) -> _Difference | None:
        """The largest difference above the tolerance.

        :param tolerance: relative to the values; by default that of the precision.
        """
        if tolerance is None:
            tolerance = _WIDE_TOLERANCE if _is_double() else _TOLERANCE
        found: list[_Difference] = []
        # An integral gives the rows of a batch the same latent values, and so does not
        # show that the density of a row depends on those of another one.
        kinds = (True, False) if _marginalizes(self.target_of(self.arrays)) else (True,)
        for integrals in kinds:
            (rows, fixed, plates), few = self.evaluate(integrals)
            few_rows, few_fixed, _ = few
            for site, plate in plates.items():
                indices = [batches.indices[plate] for batches in self.batches]
                found += _compared_rows(
                    site, plate, (rows[site], few_rows[site]), indices
                )
            for site in fixed.keys() & few_fixed.keys():
                found += _compared_others(site, (fixed[site], few_fixed[site]))
        found = [one for one in found if one.size > tolerance]
        # what is no row comes first: rows may differ because it does
        return max(found, key=lambda d: (d.plate is None, d.size), default=None)


def _cast(arrays: list[Any], dtype: Any) -> list[Any]:
    """Arrays with their numbers in one precision, as in a model that computes in it."""
    if sum(x.size for x in arrays) > _MOST_CAST:
        return arrays
    return [
        np.asarray(x, dtype)
        if isinstance(x, np.ndarray | jax.Array)
        and jnp.issubdtype(x.dtype, np.floating)
        else x
        for x in arrays
    ]


def _marginalizes(target: Target) -> bool:
    """Whether latent variables are integrated out of the rows of a model."""
    model = getattr(target, "model", None)
    while model is not None:
        if getattr(model, "marginalizes", False):
            return True
        model = getattr(model, "fn", getattr(model, "func", None))
    return False


def _distance(values: np.ndarray, scale: Any) -> float:
    """How far apart some values are; those that are not finite must be the same."""
    finite = np.isfinite(values)
    if finite.all():
        return float(np.ptp(values) / max(scale, 1e-30))
    same = np.isnan(values).all() or bool((values == values[0]).all())
    return 0.0 if same else np.inf


def _furthest(values: np.ndarray) -> tuple[float, float]:
    """Two values that show how far apart some are."""
    finite = np.isfinite(values)
    if finite.all() or not finite.any():
        return float(values.min()), float(values.max())
    return float(values[finite][0]), float(values[~finite][0])


def _compared_rows(
    site: str,
    plate: str,
    values: tuple[np.ndarray, np.ndarray],
    indices: list[np.ndarray],
) -> list[_Difference]:
    """The largest difference of a row at each position."""
    found = []
    flat_rows = np.concatenate([i.ravel() for i in indices])
    for at_large, at_small in zip(*values, strict=True):
        flat = np.concatenate([at_large.ravel(), at_small.ravel()])
        finite = np.abs(flat[np.isfinite(flat)])
        middle = float(np.median(finite)) if len(finite) else 0.0
        distances: dict[int, tuple[float, float]] = {}
        for row in np.unique(flat_rows):
            mine = flat[flat_rows == row]
            scale = max(middle, float(np.abs(mine[np.isfinite(mine)]).max(initial=0)))
            distances[int(row)] = _distance(mine, scale), scale
        worst = max(distances, key=lambda row: distances[row][0])
        size = distances[worst][0]
        if size == 0.0:
            continue
        # a row may be in one batch of either size only, and another tells more
        kinds = {
            _between(
                [np.where(i == row, v, 0.0).sum(1)
                 for i, v in zip(indices, (at_large, at_small), strict=True)],
                [(i == row).any(1) for i in indices],
                own,
                scale,
            )
            for row, (own, scale) in distances.items()
            if own >= 0.1 * size
        }  # fmt: skip
        between = next(kind for kind in _DIFFERS if kind in kinds)
        values_of_worst = _furthest(flat[flat_rows == worst])
        found.append(_Difference(site, plate, worst, values_of_worst, between, size))
    return found


def _compared_others(site: str, values: Any) -> list[_Difference]:
    """The largest difference of what is no row at each position."""
    found = []
    (large, large_abs), (small, small_abs) = values
    for k in range(len(large)):
        mine = np.concatenate([large[k], small[k]])
        sizes = np.concatenate([large_abs[k], small_abs[k]])
        scale = float(sizes[np.isfinite(sizes)].max(initial=0.0))
        size = _distance(mine, scale)
        if size > 0.0:
            present = [np.ones(len(x), bool) for x in (large[k], small[k])]
            between = _between([large[k], small[k]], present, size, scale)
            found.append(_Difference(site, None, None, _furthest(mine), between, size))
    return found


def _between(
    values: list[np.ndarray], present: list[np.ndarray], size: float, scale: float
) -> str:
    """What batches differ in whose values differ; the least that has a large part."""
    enough = 0.01 * size if np.isfinite(size) else _TOLERANCE
    for one, here in zip(values, present, strict=True):
        for k in range(0, len(one), 2):
            if here[k] and here[k + 1] and _distance(one[k : k + 2], scale) > enough:
                return "order"
    for one, here in zip(values, present, strict=True):
        if here.any() and _distance(one[here], scale) > enough:
            return "rows"
    return "size"


# what is said ------------------------------------------------------------------------

_DIFFERS = {
    "order": "of the same rows in another order",
    "rows": "of other rows",
    "size": "of another number of rows",
}


def _message(who: str, comparison: _Comparison, found: _Difference) -> str:
    one, other = (f"{x:.4g}" for x in found.values)
    if one == other:
        one, other = (f"{x:.8g}" for x in found.values)
    differs = f"{one} in one batch and {other} in another {_DIFFERS[found.between]}"
    target = comparison.target_of(comparison.arrays)
    plates = target.plates
    if not isinstance(target, ModelTarget):
        return (
            f"{who}: log_likelihood(z, indices) of the target does not give rows that "
            f"are independent of each other: row {found.row} of plate {found.plate!r} "
            f"has {differs}. Compute the entry of each index from the row of that "
            "index alone."
        )
    if target.slices is not None:
        return _message_of_slices(who, comparison, target, found, differs)
    if found.plate is None:
        return _message_of_other(who, found, differs, list(plates))
    advice = _advice(comparison, target, found, plates[found.plate])
    return (
        f"{who}: the rows of plate {found.plate!r} are not independent of each other. "
        f"At the same parameters, the log likelihood of row {found.row} at site "
        f"{found.site!r} is {differs}. {advice}"
    )


def _message_of_other(
    who: str, found: _Difference, differs: str, plates: list[str]
) -> str:
    names = ", ".join(map(repr, plates))
    where = f"plate{'s' if len(plates) > 1 else ''} {names}"
    site = found.site
    if site.startswith("_") and site.endswith("_log_det"):
        site = site.removeprefix("_").removesuffix("_log_det")
    what = (
        "It uses the number of rows of the batch: use the number of all rows, len(y) "
        "and not len(y[idx])."
        if found.between == "size"
        else "It reads rows of the batch: compute it from all of the data before they "
        "are taken by the indices, y.mean() and not y[idx].mean(). If it is a "
        "likelihood of rows, put it inside of the plate."
    )
    return (
        f"{who}: site {site!r} is outside of {where}, and yet depends on the batch: "
        f"at the same parameters its log density is {differs}. {what}"
    )


def _message_of_slices(
    who: str,
    comparison: _Comparison,
    target: ModelTarget,
    found: _Difference,
    differs: str,
) -> str:
    """Of a model that takes no data by indices, and is given rows of its arguments."""
    assert target.slices is not None
    arguments = target.args, dict(target.kwargs)
    given = ", ".join(map(repr, target.slices.names(target.model, arguments)))
    example = suggestion(target.model, arguments, target.slices.leaves)
    what = (
        f"site {found.site!r} depends on which rows of {given} it is given"
        if found.between != "size"
        else f"site {found.site!r} depends on how many rows of {given} it is given"
    )
    value = "its log density" if found.plate is None else f"of row {found.row} it"
    cause = ""
    if found.plate is None and _is_event_of_rows(comparison, target, found.site):
        return (
            f"{who}: observed site {found.site!r} is in no plate and has its entries "
            "as one event, although they are rows of the data: leave out "
            ".to_event(...), or move it into the plate of the data. If its entries "
            "depend on each other, use NUTS."
        )
    if found.plate is not None:
        site = _describe(comparison, found)
        if site.event:
            cause = f"{_advice(comparison, target, found, 0)} "
    known = {number for number, _, _ in target.slices.leaves}
    left = tuple(
        (number, "", 0)
        for number, leaf in enumerate(flatten_arguments(arguments)[0])
        if number not in known
        and hasattr(leaf, "shape")
        and set(leaf.shape) & set(target.plates.values())
    )
    if left:
        whole = ", ".join(map(repr, Slices(left).names(target.model, arguments)))
        cause += (
            f"All entries of {whole} are passed at every step: if those are rows, "
            "name them in rows=, too. "
        )
    return (
        f"{who}: the model takes no data by the indices of a plate, so it is run on "
        f"rows of its arguments, and {what}: at the same parameters {value} is "
        f"{differs}. {cause}Compute what needs all rows (means, numbers of rows, "
        "lags) before the model and pass it as an argument. If an argument has as many "
        "entries by chance, and no rows, name those that have rows, and their axes: "
        f"this is {example}, from which to leave it out. If rows depend on each other "
        "in the model itself, use NUTS."
    )


class _Described(NamedTuple):
    """What an error says of a site.

    :param kind: the class of its distribution.
    :param factor: whether it is a factor.
    :param event: whether the rows have no axis of their own in its log density.
    :param independent: whether they are an event by ``to_event``.
    """

    kind: str
    factor: bool
    event: bool
    independent: bool


def _layers(fn: Any) -> list[Any]:
    """A distribution and those that it wraps."""
    found = [fn]
    while isinstance(found[-1], ExpandedDistribution | Independent):
        found.append(found[-1].base_dist)
    return found


def _own_batch(fn: Any) -> tuple[int, ...]:
    """The batch shape of a distribution before plates expanded it."""
    if isinstance(fn, ExpandedDistribution):
        return _own_batch(fn.base_dist)
    if isinstance(fn, Independent):
        inner = _own_batch(fn.base_dist)
        return inner[: max(0, len(inner) - fn.reinterpreted_batch_ndims)]
    return tuple(fn.batch_shape)


def _describe(comparison: _Comparison, found: _Difference) -> _Described:
    described: list[_Described] = []

    def run(arrays: list[Any], z: Any, indices: Any) -> None:
        target = comparison.target_of(arrays)
        assert isinstance(target, ModelTarget)
        site = target.sites_at(z, indices)[found.site]
        (frame,) = data_frames(site, target.sizes)
        fn = site["fn"]
        value = jnp.shape(site["value"])
        shapes = _own_batch(fn), value[: len(value) - fn.event_dim]
        has_axis = any(len(s) >= -frame.dim and s[frame.dim] > 1 for s in shapes)
        factor = bool(site["infer"].get("is_auxiliary", False))
        kinds = [type(part) for part in _layers(fn)]
        independent = Independent in kinds
        name = kinds[-1].__name__
        described.append(_Described(name, factor, not has_axis, independent))

    jax.eval_shape(run, comparison.arrays, comparison.position, comparison.batch(0))
    return described[-1]


def _is_event_of_rows(comparison: _Comparison, target: Any, name: str) -> bool:
    """Whether an observed site has the rows of a batch as an event."""
    lengths: list[int] = []

    def run(arrays: list[Any], z: Any, indices: Any) -> None:
        site = comparison.target_of(arrays).sites_at(z, indices).get(name)  # type: ignore[attr-defined]
        if site is None or not site["is_observed"]:
            return
        event = site["fn"].event_dim
        shape = jnp.shape(site["value"])
        lengths.append(max(shape[len(shape) - event :], default=0) if event else 0)

    for size in (0, 1):
        batch = comparison.batch(size)
        jax.eval_shape(run, comparison.arrays, comparison.position, batch)
    return len(set(lengths)) > 1


def _advice(
    comparison: _Comparison, target: ModelTarget, found: _Difference, size: int
) -> str:
    """What to write instead."""
    site = _describe(comparison, found)
    if site.event and site.factor:
        return (
            f"numpyro.factor({found.site!r}, ...) got one number for the whole batch: "
            "give it one number for each row, and do not sum over the rows."
        )
    if site.event and site.independent:
        return (
            "Its distribution has the rows as an event, one log likelihood for the "
            f"whole batch: leave out the .to_event(...) over the rows, as in "
            f'numpyro.sample("{found.site}", dist.{site.kind}(...), obs=...).'
        )
    if site.event:
        return (
            f"Its {site.kind} has the rows as an event, one log likelihood for the "
            "whole batch. A distribution over all rows together has no minibatches: "
            "use NUTS, or a likelihood that is a product over the rows."
        )
    use_nuts = (
        "If the model's rows do depend on each other, as in a time series, use NUTS."
    )
    if found.between == "order":
        return (
            "It reads neighbours inside of the batch. Take them from all of the data "
            "by their indices, for example y[idx - 1], or shift the data before the "
            f"plate and take them by idx. {use_nuts}"
        )
    if found.between == "rows":
        return (
            "It computes on the batch as a whole, a mean or a sum over its rows. "
            "Compute that from all of the data before the plate and take the result "
            f"by the indices, ((x - x.mean()) / x.std())[idx]. {use_nuts}"
        )
    return (
        "It uses the number of rows of the batch. Use the number of all rows, "
        f"{size}, and leave the scaling of minibatches to the plate."
    )
