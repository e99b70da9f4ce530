"""The same rows in several batches: proven to agree, or their largest difference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.util import find_stack_level

from numpyro_minibatch._internal.precision import double, full_precision, is_double
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch._model.rowwise import trace_rows
from numpyro_minibatch._model.rowwise_rules import PLAIN, SAME, Fact, rows_of_plate
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.target import (
    ModelTarget,
    Target,
    flatten_arguments,
    without_integrals,
)

__all__ = [
    "DIFFERS",
    "Batches",
    "Comparison",
    "Difference",
    "draw_batches",
    "draw_positions",
    "unusual_rows",
]

_POOL = 24  # rows of each plate that are compared, besides unusual ones
_MOST_UNUSUAL = 24  # rows of each plate that are compared for their unusual data
_MOST_READ = 10_000_000  # numbers of the data in which unusual rows are sought
# Rows of a batch. Large and small ones differ in all that is a function of their rows
# or of their number, and nothing is closer to a row alone than a pair: a single row
# would do, were there no models that drop an axis of length one.
_LARGE, _SMALL = 16, 2
_SMALL_OF_PROOF = 5  # rows of the smaller batch of a proof: not a factor of the larger
_MANY_OPERATIONS = 5_000  # of a model; such a program compiles for half a minute
_RADII = (2.0, 0.5, 0.05)  # positions are uniform within these, as NumPyro's starts
# relative differences between batches: rounding stays below the first, or below the
# second in double precision
_TOLERANCE, _WIDE_TOLERANCE = 5e-5, 1e-6
# the program runs once, on few rows
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
_MOST_CAST = 10_000_000  # numbers of the data that are copied in double precision
_MOST_FULL = 1_000_000  # rows, of which a full evaluation is compared with the batches


class Batches(NamedTuple):
    """Batches of one size, for each plate.

    Batches ``2 k`` and ``2 k + 1`` are the same rows in two orders.

    :param indices: by plate, shape ``(batches, rows)``.
    """

    indices: dict[str, np.ndarray]


def draw_batches(
    plates: Mapping[str, int],
    rng: Any,
    unusual: Mapping[str, np.ndarray] | None = None,
) -> tuple[Batches, Batches]:
    """Random batches of two sizes, the first rows of some of them neighbours.

    :param plates: the numbers of rows.
    :param rng: draws the batches.
    :param unusual: by plate, rows that must be among them.
    """
    both: list[dict[str, np.ndarray]] = [{}, {}]
    sizes = {name: _POOL + len(rows) for name, rows in (unusual or {}).items()}
    pool_size = max(sizes.values(), default=_POOL)
    # Sets of rows of either size, each of them in two orders. All plates have as many.
    # Every row is in two of them, so that other rows can be told from another number.
    sets_of_each = [1 + 2 * -(-pool_size // width) for width in (_LARGE, _SMALL)]
    for name, size in plates.items():
        large = min(_LARGE, size)
        small = max(1, min(_SMALL, large - 1))
        start = int(rng.integers(size - large + 1))
        run = np.arange(start, start + large)
        others = rng.choice(size, min(4 * _POOL, size), replace=False)
        first = np.concatenate([run, (unusual or {}).get(name, run[:0])])
        pool = np.concatenate([first, rng.permutation(np.setdiff1d(others, first))])
        pool = _distinct(pool)[:pool_size]
        for found, width, count in zip(both, (large, small), sets_of_each, strict=True):
            sets = [run[:width], *_random_sets(pool, width, count - 1, rng)]
            orders = [x for rows in sets for x in (rows, _reordered(rows, rng))]
            found[name] = np.stack(orders).astype(np.int32)
    return Batches(both[0]), Batches(both[1])


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Rows without repetitions, each where it comes first."""
    return rows[np.sort(np.unique(rows, return_index=True)[1])]


def unusual_rows(
    arrays: list[Any], plates: Mapping[str, int], rng: Any
) -> dict[str, np.ndarray]:
    """Rows in which some column of the data is smallest, largest or missing.

    A model that subtracts the mean of a column, or replaces its missing values by it,
    gives the same numbers in all batches in which the column is constant. A column that
    is nonzero in a few rows is so in most batches.

    :param arrays: the data, without those whose values are not known.
    :param plates: the numbers of rows.
    :param rng: chooses columns if there are many.
    """
    found = {}
    for name, size in plates.items():
        sizes = [x.size for x in arrays if size in np.shape(x) and size > 1]
        # of more data than can be looked through quickly, some rows
        read = max(1, int(size * min(1.0, _MOST_READ / max(sum(sizes), 1))))
        # with repetitions, which need no permutation of all numbers
        some = slice(None) if read == size else np.sort(rng.integers(size, size=read))
        rows = [
            _extremes(np.moveaxis(np.asarray(x), x.shape.index(size), 0)[some])
            for x in arrays
            if size in np.shape(x) and size > 1
        ]
        numbers = np.concatenate(rows) if rows else np.zeros(0, int)
        numbers = numbers if read == size else np.asarray(some)[numbers]
        found[name] = rng.permutation(np.unique(numbers))[:_MOST_UNUSUAL]
    return found


def _extremes(x: np.ndarray) -> np.ndarray:
    """For every column, the rows of its extremes and a row in which it is missing."""
    columns = x.reshape(len(x), -1)
    if x.dtype.kind == "f":
        missing = np.isnan(columns)
        low, high = (np.where(missing, fill, columns) for fill in (np.inf, -np.inf))
        ends = [low.argmin(0), high.argmax(0), missing.argmax(0)[missing.any(0)]]
    elif x.dtype.kind in "biu":
        ends = [columns.argmin(0), columns.argmax(0)]
    else:
        return np.zeros(0, int)
    return np.concatenate(ends)


def _random_sets(
    pool: np.ndarray, width: int, count: int, rng: Any
) -> list[np.ndarray]:
    """Sets of distinct rows: every row is in one of them before any is in two."""
    sets: list[np.ndarray] = []
    while len(sets) < count:
        shuffled = rng.permutation(pool)
        # the last set is filled with rows of the first one
        filled = np.concatenate([shuffled, shuffled[: -len(pool) % width]])
        sets += list(filled.reshape(-1, width))
    return sets[:count]


def _reordered(rows: np.ndarray, rng: Any) -> np.ndarray:
    """The same rows in another order."""
    return np.roll(rng.permutation(rows), 1) if len(rows) > 2 else rows[::-1]


def draw_positions(layout: Layout, init: Any, rng: Any) -> Any:
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
    """The value; zeros for a traced one, of which only the shape is known."""
    if isinstance(x, jax.core.Tracer):
        return np.zeros(x.shape)
    return np.asarray(x, np.float64)


class Difference(NamedTuple):
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


def _warn_of_size(whole: int, batch: int) -> None:
    """Warn of a model whose compilation takes minutes.

    :param whole: how many operations it has with all rows.
    :param batch: how many with a batch.
    """
    if whole < _MANY_OPERATIONS:
        return
    reason = (
        "Its Python code loops over rows: compute with whole arrays in place of the "
        "loop (x**2, not np.array([v**2 for v in x])), or before the model."
        if whole > 2 * batch
        else "Write loops with jax.lax.scan or as operations on arrays."
    )
    warnings.warn(
        f"the model is a program of {whole:,} operations, which takes minutes to "
        f"compile. {reason}",
        UserWarning,
        stacklevel=find_stack_level(),
    )


@dataclass
class Comparison:
    """The same rows at the same positions in several batches.

    :param target_of: from the arrays among the model's arguments to the target.
    :param arrays: these arrays.
    :param batches: the batches of either size.
    :param positions: the positions, along a first axis.
    """

    target_of: Callable[[list[Any]], Target]
    arrays: list[Any]
    batches: tuple[Batches, Batches]
    positions: Any

    def is_proven(self) -> bool:
        """Whether the target's computations prove that its rows are independent."""
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
        # given all rows, the model runs as it was written
        whole = {
            name: jax.ShapeDtypeStruct((size,), jnp.int32)
            for name, size in self.target_of(self.arrays).plates.items()
        }
        batches = [whole, self.batch(1)]
        try:
            one, other = (trace(i, self.position, self.arrays) for i in batches)
        except (TypeError, ValueError):
            return False  # not for any number of rows, which the comparison says better
        _warn_of_size(len(one.jaxpr.eqns), len(other.jaxpr.eqns))
        if names[0] != names[1]:
            return False
        rows, fixed, plates_of = names[0]
        facts: list[Fact] = [(rows_of_plate(name),) for name in sorted(whole)]
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

    def data(self) -> list[Any]:
        """The arrays of the data whose values are known, also those of a partial."""
        target = self.target_of(self.arrays)
        arguments: Any = self.arrays
        if isinstance(target, ModelTarget):
            arguments = target.args, dict(target.kwargs)
        return [
            x
            for x in flatten_arguments(arguments)[0]
            if isinstance(x, np.ndarray | jax.Array)
            and not isinstance(x, jax.core.Tracer)
            and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        ]

    @property
    def position(self) -> Any:
        """The shapes and types of a position, for JAX."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.result_type(float)),
            self.positions,
        )

    def batch(self, size: int) -> dict[str, Any]:
        """The shapes and types of a larger batch, or of the one of a proof."""
        rows = {name: i.shape[1] for name, i in self.batches[0].indices.items()}
        if size:
            rows = {n: max(1, min(_SMALL_OF_PROOF, r - 1)) for n, r in rows.items()}
        return {n: jax.ShapeDtypeStruct((r,), jnp.int32) for n, r in rows.items()}

    def compared(self, integrals: bool = True) -> dict[str, np.ndarray]:
        """By plate, the rows of a full evaluation that are in one of the batches.

        :return: empty if rows are too many, or not on the device.
        """
        target = self.target_of(self.arrays)
        count = sum(target.plates.values()) * (target.row_size if integrals else 1)
        if count > _MOST_FULL or find_rows((tuple(self.arrays), {})):
            return {}
        both = self.batches
        return {
            name: np.unique(np.concatenate([b.indices[name].ravel() for b in both]))
            for name in target.plates
        }

    @full_precision
    def evaluate(
        self, integrals: bool = True
    ) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, str]]]:
        """Log densities of the batches of either size, and of all rows.

        :param integrals: whether to integrate the latent variables of rows out.
        :return: by site the rows, shape ``(positions, batches, rows)``; the log density
            of all else as sum and sum of absolute values, both of shape ``(positions,
            batches)``; and the plate of each site with rows.
        """
        plates: list[dict[str, str]] = []
        kept = self.compared(integrals)

        def run(arrays: list[Any], positions: Any, indices: list[Any]) -> Any:
            target = self.target_of(arrays)
            plates.clear()

            def at(z: Any, indices: Any, kept: Any = None) -> Any:
                with nullcontext() if integrals else without_integrals():
                    parts = target.by_site(z, indices)
                plates.append(parts.plates)
                fixed = {
                    name: (jnp.sum(x), jnp.sum(jnp.abs(x)))
                    for name, x in parts.fixed.items()
                }
                if kept is None:
                    return parts.rows, fixed
                # as the only batch of its size
                rows = {
                    name: row[kept[parts.plates[name]]]
                    for name, row in parts.rows.items()
                }
                return jax.tree.map(lambda x: x[None], (rows, fixed))

            # in loops and not vectorised: what a model may contain is not always both
            of_batches = [
                jax.lax.map(
                    lambda z, i=i: jax.lax.map(lambda i: at(z, i), i), positions
                )
                for i in indices
            ]
            if not kept:
                return of_batches
            every = {name: jnp.arange(size) for name, size in target.plates.items()}
            of_all = jax.lax.map(lambda z: at(z, every, kept), positions)
            return [*of_batches, of_all]

        dtype = jnp.result_type(float)
        found = jax.jit(run, compiler_options=_QUICKLY)(
            _cast(self.arrays, dtype) if is_double() else self.arrays,
            jax.tree.map(lambda x: np.asarray(x, dtype), self.positions),
            [batches.indices for batches in self.batches],
        )
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
        return [(*two, plates[k]) for k, two in enumerate(found)]

    def difference(self) -> Difference | None:
        """The largest difference that is more than rounding.

        Double precision comes first, because its verdict needs no other one.
        """
        if is_double():
            return self.worst()
        try:
            with double(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a precision that is not the user's
                # parts of the model may have a precision of their own
                return self.worst(_TOLERANCE)
        except (TypeError, ValueError):  # the model has not been written for it
            return self.worst()

    def worst(self, tolerance: float | None = None) -> Difference | None:
        """The largest difference above the tolerance.

        :param tolerance: relative to the values; by default that of the precision.
        """
        if tolerance is None:
            tolerance = _WIDE_TOLERANCE if is_double() else _TOLERANCE
        found: list[Difference] = []
        # An integral gives the rows of a batch the same latent values, and so does not
        # show that the density of a row depends on those of another one.
        kinds = (True, False) if _marginalizes(self.target_of(self.arrays)) else (True,)
        for integrals in kinds:
            parts = self.evaluate(integrals)
            kept = self.compared(integrals)
            for site, plate in parts[0][2].items():
                indices = [batches.indices[plate] for batches in self.batches]
                indices += [kept[plate][None]] if kept else []
                rows = [rows[site] for rows, _, _ in parts]
                found += _compared_rows(site, plate, rows, indices)
            in_all = set.intersection(*(set(fixed) for _, fixed, _ in parts))
            for site in sorted(in_all):
                found += _compared_others(site, [fixed[site] for _, fixed, _ in parts])
        found = [one for one in found if one.size > tolerance]
        # what is no row comes first: rows may differ because it does
        return max(found, key=lambda d: (d.plate is None, d.size), default=None)


def _cast(arrays: list[Any], dtype: Any) -> list[Any]:
    """Arrays with their numbers in one precision, as in a model that computes in it.

    They are other arrays: JAX knows one that was a constant of another program by its
    identity, and would pass on the numbers of that program's precision.
    """
    few = sum(x.size for x in arrays) <= _MOST_CAST

    def other(x: Any) -> Any:
        if few and jnp.issubdtype(x.dtype, np.floating):
            return np.array(x, dtype)
        return x.view() if isinstance(x, np.ndarray) else x

    return [other(x) if isinstance(x, np.ndarray | jax.Array) else x for x in arrays]


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
    values: list[np.ndarray],
    indices: list[np.ndarray],
) -> list[Difference]:
    """The largest difference of a row at each position."""
    found = []
    flat_rows = np.concatenate([i.ravel() for i in indices])
    for here in zip(*values, strict=True):
        flat = np.concatenate([x.ravel() for x in here])
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
                 for i, v in zip(indices, here, strict=True)],
                [(i == row).any(1) for i in indices],
                own,
                scale,
            )
            for row, (own, scale) in distances.items()
            if own >= 0.1 * size
        }  # fmt: skip
        between = next(kind for kind in DIFFERS if kind in kinds)
        values_of_worst = _furthest(flat[flat_rows == worst])
        found.append(Difference(site, plate, worst, values_of_worst, between, size))
    return found


def _compared_others(site: str, values: Any) -> list[Difference]:
    """The largest difference at each position of terms that are not rows."""
    found = []
    for k in range(len(values[0][0])):
        each = [sums[k] for sums, _ in values]
        mine = np.concatenate(each)
        sizes = np.concatenate([absolute[k] for _, absolute in values])
        scale = float(sizes[np.isfinite(sizes)].max(initial=0.0))
        size = _distance(mine, scale)
        if size > 0.0:
            present = [np.ones(len(x), bool) for x in each]
            between = _between(each, present, size, scale)
            found.append(Difference(site, None, None, _furthest(mine), between, size))
    return found


def _between(
    values: list[np.ndarray], present: list[np.ndarray], size: float, scale: float
) -> str:
    """The smallest change of a batch that explains a large part of a difference."""
    enough = 0.01 * size if np.isfinite(size) else _TOLERANCE
    for one, here in zip(values, present, strict=True):
        for k in range(0, len(one) - 1, 2):
            if here[k] and here[k + 1] and _distance(one[k : k + 2], scale) > enough:
                return "order"
    for one, here in zip(values, present, strict=True):
        if here.any() and _distance(one[here], scale) > enough:
            return "rows"
    return "size"


# what is said ------------------------------------------------------------------------

DIFFERS = {
    "order": "of the same rows in another order",
    "rows": "of other rows",
    "size": "of another number of rows",
}
