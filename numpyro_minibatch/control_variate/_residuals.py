"""Passes over the residuals of all rows at some draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.sparse import csc_array

from numpyro_minibatch._internal.passes import Chunks, chunk_of, scan_shared
from numpyro_minibatch.batch import Design, Weighted, stratum_of
from numpyro_minibatch.control_variate._expand import (
    ExactRows,
    Expansion,
    Expansions,
    expand,
)
from numpyro_minibatch.control_variate._problem import Problem, Program
from numpyro_minibatch.control_variate._row_sums import Some, modes_of
from numpyro_minibatch.control_variate._taylor import Form

__all__ = [
    "ResidualScan",
    "Rows",
    "Scores",
    "residuals",
]

_WIDTH = 2**13  # rows per chunk of the program, for as many draws as it takes
# if rows are integrals, draws are evaluated one by one, so that few at a time suffice
_DRAWS, _DRAWS_OF_INTEGRALS, _DRAWS_OF_FEW = 32, 8, 64
_FEW_ROWS = 64, 256, 2048  # numbers to which fewer rows are filled up
_MOST_KEPT = 2**25  # largest number of residuals (rows times draws) kept in memory
_KEPT = 2  # sets of draws: one scores the rows, the other judges the design
_GRAM = 16 * _WIDTH  # about as many rows show the directions of the residuals
_CHUNKS = 8  # of the program, on each device
# Of the squared chances. With one tail and no strata, a batch's variance is at most 1.4
# times the least possible one at likely positions, and 3.5 times in the tail.
_SHARE_OF_TAILS = 0.16
_FEW = 8  # a share of a chunk so small has a program of its own


class Rows(NamedTuple):
    """Rows of several plates.

    :param plate: the number of the plate of each row.
    :param row: the index of each row in its plate.
    """

    plate: np.ndarray
    row: np.ndarray

    def take(self, which: Any) -> Rows:
        """A subset of the rows."""
        return Rows(self.plate[which], self.row[which])

    def alone(self, sizes: Mapping[str, int]) -> dict[str, ExactRows]:
        """These rows, sorted, as exact rows that represent no others."""
        return {
            name: ExactRows.alone(np.sort(self.row[self.plate == k]), size)
            for k, (name, size) in enumerate(sizes.items())
        }


def _scatter(centred: np.ndarray) -> np.ndarray:
    """The standard deviation of each row's residuals, which have the mean zero."""
    square = np.einsum("nk,nk->n", centred, centred)
    return np.sqrt(square / (centred.shape[1] - 1))


def _centred(residual: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Residuals at the first draws and at others, about the mean at the first."""
    away = residual - residual[:, :number].mean(1, keepdims=True)
    outside = away[:, number:]
    return away[:, :number], np.where(np.isfinite(outside), outside, 0.0)


class Scores(NamedTuple):
    """How much each row matters, by plate.

    :param scatter: the standard deviation of its residual over likely positions.
    :param chance: the same with a share for its residuals far out, to which the chance
        that a batch contains it should be proportional. A row without a residual at
        likely positions can carry the sum in a tail. A batch would miss it there and
        would not notice.
    :param loading: its loading on the leading direction of the residuals.
    """

    scatter: dict[str, np.ndarray]
    chance: dict[str, np.ndarray]
    loading: dict[str, np.ndarray]


class ResidualScan:
    """Passes over the residuals of all rows at some draws.

    One program evaluates the residuals, and NumPy computes the rest from them, so that
    nothing else is compiled. Other data of the same shape use the same program.
    """

    def __init__(
        self,
        problem: Problem,
        order: int,
        form: Form,
        expansion: Expansion | Expansions,
    ) -> None:
        self.problem, self.order, self.form = problem, order, form
        self.dtype = problem.dtype
        self.expansion = expansion.of_rows(self.dtype)
        none = np.zeros(0, int)
        self.exact = {n: ExactRows.alone(none, N) for n, N in problem.plates.items()}
        self.representatives: dict[str, np.ndarray] = {}
        self.surplus: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._known: dict[bytes, dict[str, _Parts]] = {}

    def about(self, expansion: Expansion) -> ResidualScan:
        """The same passes for an expansion about another centre."""
        scan = copy.copy(self)
        scan.expansion = expansion.of_rows(self.dtype)._replace(exact={})
        scan._known = {}
        return scan

    def keeping(self, exact: Mapping[str, ExactRows]) -> ResidualScan:
        """The same passes over the residuals that remain with these exact rows."""
        scan = copy.copy(self)
        scan.exact = {
            # fields that the passes do not read are left out
            name: none
            if name not in exact or exact[name].others is None
            else exact[name]._replace(
                rows=none.rows, weights=none.weights, at_center=none.at_center
            )
            for name, none in self.exact.items()
        }
        fitted = {n: kept for n, kept in exact.items() if kept.coefficient is not None}
        scan.representatives = {n: np.asarray(kept.rows) for n, kept in fitted.items()}
        scan.surplus = {
            n: (np.asarray(kept.rows), np.asarray(kept.surplus, np.float64))
            for n, kept in exact.items()
            if kept.surplus is not None
        }
        return scan

    def _at(
        self, draws: np.ndarray | Array
    ) -> tuple[Expansion | Expansions, Any, Array]:
        """The arguments of a pass, except for the data."""
        kept = {
            name: (exact, self._of_rows(draws, name, self.representatives[name]))
            if name in self.representatives
            else (exact, None)
            for name, exact in self.exact.items()
        }
        return self.expansion, kept, jax.device_put(np.asarray(draws, self.dtype))

    def ahead(self, dim: int) -> None:
        """Compile the program that evaluates the model on another thread.

        :param dim: the dimension of a position.
        """
        read = self._read(self._blocks(_DRAWS)[0][: self._at_once])
        draws = np.zeros((self._draws, dim))
        self._program.ahead(*self._arguments(draws, *read))

    @property
    def _program(self) -> Program:
        return self.problem.over_rows(_every, self.order, self.form)

    @property
    def _devices(self) -> int:
        mesh = self.problem.mesh
        return 1 if mesh is None else mesh.size

    @cached_property
    def _chunks(self) -> Chunks:
        return _chunks(self.problem, self.problem.arrays, self._devices)

    def _blocks(self, num_draws: int) -> list[np.ndarray]:
        """The numbers of the chunks that are evaluated together, a block at a time.

        All blocks have the same number of chunks; the last ones may not exist.
        """
        number, widths = self._chunks.number, self._chunks.widths
        of_chunk = max(num_draws, _DRAWS) * sum(widths.values())
        each = min(number, max(1, _MOST_KEPT // of_chunk))
        return [np.arange(k, k + each, dtype=np.int32) for k in range(0, number, each)]

    @property
    def _draws(self) -> int:
        """The number of draws that a call of the program evaluates."""
        return _DRAWS_OF_INTEGRALS if self.integrals else _DRAWS

    @property
    def _at_once(self) -> int:
        """The number of chunks that a call of the program evaluates."""
        return min(self._chunks.number, _CHUNKS * self._devices)

    def _arguments(
        self,
        draws: np.ndarray,
        rows: Mapping[str, np.ndarray],
        masks: Mapping[str, np.ndarray],
    ) -> tuple[Any, ...]:
        at = jax.device_put(np.asarray(draws, self.dtype))
        return self.expansion, at, jax.device_put(dict(rows)), jax.device_put(masks)

    def _read(
        self, numbers: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The rows of some chunks, ``(n, width)`` by plate, and which of them exist."""
        rows, masks = {}, {}
        for name, width in self._chunks.widths.items():
            place = numbers[:, None] * width + np.arange(width)
            size = self.problem.plates[name]
            rows[name] = np.minimum(place, size - 1).astype(np.int32)
            masks[name] = place < size
        return rows, masks

    def _of_chunks(
        self,
        draws: np.ndarray,
        rows: Mapping[str, np.ndarray],
        masks: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """The residuals of chunks of rows, ``(n * width, K)`` by plate.

        :param draws: flat positions, ``(K, D)``, in working precision.
        :param rows: the rows, ``(n, width)`` by plate.
        :param masks: which of them are read; others are zero.
        """
        return {n: x.whole() for n, x in self._sent(draws, rows, masks)().items()}

    def _sent(
        self,
        draws: np.ndarray,
        rows: Mapping[str, np.ndarray],
        masks: Mapping[str, np.ndarray],
    ) -> Callable[[], dict[str, _Parts]]:
        """Start the evaluation, and return a function that waits for its result.

        The program takes a fixed number of draws and of chunks. Those that are missing
        repeat others; chunks without a row are not evaluated.
        """
        number, each = len(next(iter(rows.values()))), self._at_once
        by_draws: list[tuple[int, list[Any]]] = []
        for first in range(0, len(draws), self._draws):
            some = draws[first : first + self._draws]
            padded = some[np.minimum(np.arange(self._draws), len(some) - 1)]
            parts = []
            for left in range(0, number, each):
                place = np.arange(left, left + each)
                own = np.minimum(place, number - 1)
                exist = (place < number)[:, None]
                read = {n: r[own] for n, r in rows.items()}
                kept = {n: m[own] & exist for n, m in masks.items()}
                parts.append(self._program(*self._arguments(padded, read, kept)))
            by_draws.append((len(some), parts))

        def result() -> dict[str, _Parts]:
            return {
                n: _Parts(
                    [
                        [np.asarray(x[n])[:, :count] for x in parts]
                        for count, parts in by_draws
                    ],
                    number * len(r[0]),
                )
                for n, r in rows.items()
            }

        return result

    def _key(self, draws: np.ndarray) -> bytes:
        return np.asarray(draws, self.dtype).tobytes()

    def _evaluated(
        self, draws: np.ndarray, blocks: Iterable[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, dict[str, _Parts]]]:
        """The residuals of blocks of chunks, before exact rows are removed, ``(n, K)``.

        While the caller uses one block, JAX computes the next. If a block has all rows,
        they are kept: the model is evaluated once at each draw.

        :return: the numbers of the chunks, and the residuals by plate.
        """
        draws, key = np.asarray(draws, self.dtype), self._key(draws)
        waiting: list[tuple[np.ndarray, Callable[[], dict[str, _Parts]]]] = []
        for numbers in blocks:
            if key in self._known:
                yield numbers, self._known[key]
                continue
            waiting.append((numbers, self._sent(draws, *self._read(numbers))))
            if len(waiting) > 1:
                before, result = waiting.pop(0)
                yield before, result()
        for numbers, result in waiting:
            rows = result()
            if len(numbers) == self._chunks.number and len(self._known) < _KEPT:
                self._known[key] = rows
            yield numbers, rows

    def _pieces(
        self, draws: np.ndarray, enough: int | None = None
    ) -> Iterator[tuple[str, slice, np.ndarray]]:
        """The residuals of all rows that remain with the exact rows, chunk by chunk.

        :param draws: flat positions, ``(K, D)``.
        :param enough: how many rows of a plate suffice, of chunks all over the data;
            ``None`` for all rows.
        :return: the plate, the rows, and their residuals, ``(n, K)``.
        """
        of_exact = {
            name: np.asarray(self._of_rows(draws, name, rows))
            for name, rows in self.representatives.items()
        }
        blocks, total = self._blocks(len(draws)), self._chunks.number
        if enough is not None and len(blocks) > 1:
            each = len(blocks[0])
            blocks = [(np.arange(each) * total // each).astype(np.int32)]
        for numbers, found in self._evaluated(draws, blocks):
            for name, width in self._chunks.widths.items():
                size = self.problem.plates[name]
                stride = 1
                if enough is not None:
                    stride = max(1, min(size, len(numbers) * width) // enough)
                for place in range(0, len(numbers), stride):
                    start = int(numbers[place]) * width
                    rows = slice(start, min(start + width, size))
                    if start < size:
                        here = place * width
                        residual = found[name].some(here, here + rows.stop - start)
                        yield name, rows, self._left(name, rows, residual, of_exact)

    def _left(
        self,
        name: str,
        rows: slice,
        residual: np.ndarray,
        of_exact: Mapping[str, np.ndarray],
    ) -> np.ndarray:
        """The remainder of some residuals with the exact rows."""
        kept = self.exact[name]
        if name in of_exact:
            multiple = np.asarray(kept.coefficient)[rows, None]
            explained = of_exact[name][:, np.asarray(kept.representative)[rows]].T
            residual = residual - multiple * explained
        others = np.asarray(kept.others)[rows, None]
        return residual if others.all() else np.where(others, residual, 0.0)

    def _of_rows(
        self, draws: np.ndarray | Array, name: str, rows: ArrayLike, left: bool = False
    ) -> Array:
        """The residuals of a few rows of a plate, ``(K, number of rows)``."""
        rows = np.asarray(rows)
        # in the order of the plate, so that a model need not handle other orders
        order = np.argsort(rows, kind="stable")
        back = np.argsort(order)
        if not left and self._by_chunks(name, len(rows)):
            of_chunks = self._of_chunks(
                np.asarray(draws, self.dtype), *self._table(name, rows[order])
            )
            return jax.device_put(of_chunks[name][back].T)
        number, rows = len(rows), rows[order]
        if number and not self.integrals:  # other numbers would compile again
            size = next((n for n in _FEW_ROWS if number <= n), number)
            rows = rows[np.minimum(np.arange(size), number - 1)]
        indices = self.problem.one_row | {name: np.asarray(rows, np.int32)}
        masks = {n: np.ones(len(i), bool) for n, i in indices.items()}
        found = []
        of_some = self.problem.compiled(residuals, self.order, self.form)
        draws = np.asarray(draws, self.dtype)
        for part in self._parts(draws, len(rows)):
            kept = self._at(part)[1] if left else {}
            args = self.expansion, kept, jax.device_put(part), indices, masks
            found.append(np.asarray(of_some(*args)[name]))
        return jax.device_put(np.concatenate(found)[: len(draws), :number][:, back])

    def _parts(self, draws: np.ndarray, num_rows: int) -> list[np.ndarray]:
        """The draws in parts, which are smaller if there are many rows.

        All parts have one size, so that one program is compiled, and the last one
        repeats a draw. Rows that are integrals compile slowly; there, as for few rows,
        other draws have parts of this size too.
        """
        few = max(1, _WIDTH * _DRAWS // max(num_rows, 1))
        if self.integrals:
            few = min(few, self._draws)
        elif num_rows in _FEW_ROWS:
            few = _DRAWS_OF_FEW
        else:
            few = -(-len(draws) // -(-len(draws) // few))
        place = np.arange(-(-len(draws) // few) * few)
        draws = draws[np.minimum(place, len(draws) - 1)]
        return [draws[k : k + few] for k in range(0, len(draws), few)]

    @cached_property
    def row_size(self) -> int:
        """The number of likelihood evaluations per row."""
        return self.problem.row_size

    @property
    def integrals(self) -> bool:
        """Whether rows are integrals."""
        return self.row_size > 1

    def _by_chunks(self, name: str, num_rows: int) -> bool:
        """Whether some rows of a plate are read by the program for all rows.

        If rows are integrals, a second program takes longer to compile than the first
        one takes to evaluate the remainder of a chunk.
        """
        return self.integrals and _FEW * num_rows >= self._chunks.widths[name]

    def _table(
        self, name: str, rows: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Some rows of a plate as chunks, and which entries are these rows."""
        width = self._chunks.widths[name]
        number = -(-len(rows) // width)
        table = {
            n: np.zeros((number, w), np.int32) for n, w in self._chunks.widths.items()
        }
        masks = {n: np.zeros(x.shape, bool) for n, x in table.items()}
        place = np.arange(number * width).reshape(number, width)
        table[name][:] = rows[np.minimum(place, len(rows) - 1)]
        masks[name][:] = place < len(rows)
        return table, masks

    def of_rows(self, draws: np.ndarray, rows: Rows, left: bool = False) -> np.ndarray:
        """The residuals of a few rows, ``(K, number of rows)``.

        :param left: whether to subtract what the exact rows explain.
        """
        left = left and any(
            kept.others is not None and not kept.others.all()
            for kept in self.exact.values()
        )
        found = np.zeros((len(draws), len(rows.row)))
        for k, name in enumerate(self.problem.plates):
            mine = np.flatnonzero(rows.plate == k)
            if len(mine):
                found[:, mine] = self._of_rows(draws, name, rows.row[mine], left)
        return found

    def represented(
        self, draws: np.ndarray, exact: Mapping[str, ExactRows]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The exact row that represents each row of its plate best, and coefficients.

        Coefficients are not negative, because a negative weight would turn a decreasing
        log likelihood into an increasing one. A coefficient is zero if the correlation
        may be due to chance.
        """
        representatives = {n: kept.rows for n, kept in exact.items() if len(kept.rows)}
        found = {
            n: self._of_rows(draws, n, rows) for n, rows in representatives.items()
        }
        # about the largest square of so many correlations if all are due to chance
        chance = {
            n: 2 * np.log(2 * len(r)) / len(draws) for n, r in representatives.items()
        }

        unit = {n: np.asarray(r) - np.asarray(r).mean(0) for n, r in found.items()}
        norms = {n: np.linalg.norm(r, axis=0) for n, r in unit.items()}
        norms = {n: np.where(r > 0, r, 1.0) for n, r in norms.items()}
        plates = self.problem.plates
        representative = {n: np.zeros(plates[n], np.int32) for n in found}
        coefficient = {n: np.zeros(plates[n], self.dtype) for n in found}
        for name, rows, residual in self.keeping({})._pieces(draws):
            if name not in found:
                continue
            centred = residual - residual.mean(1, keepdims=True)
            along = centred @ (unit[name] / norms[name])
            best = along.argmax(1)
            highest = np.take_along_axis(along, best[:, None], 1)[:, 0]
            least = np.sqrt(chance[name] * np.square(centred).sum(1))
            representative[name][rows] = best
            multiple = highest / norms[name][best]
            coefficient[name][rows] = np.where(highest > least, multiple, 0.0)
        return {n: (representative[n], coefficient[n]) for n in found}

    # infinite residuals are refused
    @np.errstate(divide="ignore", over="ignore", invalid="ignore")
    def scores(self, draws: np.ndarray, far: np.ndarray | None = None) -> Scores:
        """How much each row matters at some draws, and far out.

        :param draws: draws of the surrogate's posterior, ``(K, D)``.
        :param far: positions in its tails, ``(T, D)``.
        """
        number = len(draws)
        if far is not None:
            draws = np.concatenate([draws, far])
        plates = self.problem.plates
        grams = {n: np.zeros((number,) * 2) for n in plates}
        likely, tails = 0.0, np.zeros(len(draws) - number)
        for name, _, residual in self._pieces(draws, _GRAM):
            centred, outside = _centred(residual, number)
            grams[name] += centred.T @ centred
            likely += _scatter(centred).sum()
            tails += np.abs(outside).sum(0)
        # far out, the noise of a batch counts relative to the whole there
        scales = np.nan_to_num(likely / tails, posinf=0.0).astype(self.dtype)
        share = _SHARE_OF_TAILS / max(int(np.count_nonzero(scales)), 1)
        leading = {
            n: np.linalg.eigh(np.nan_to_num(g))[1][:, -1].astype(self.dtype)
            for n, g in grams.items()
        }
        found = Scores(self._of_each_row(), self._of_each_row(), self._of_each_row())
        for name, rows, residual in self._pieces(draws):
            centred, outside = _centred(residual, number)
            scatter = _scatter(centred)
            found.scatter[name][rows] = scatter
            found.loading[name][rows] = centred @ leading[name]
            scaled = np.square(outside * scales).sum(1)
            found.chance[name][rows] = np.sqrt(scatter**2 + share * scaled)
        return found

    def sums(self, draws: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Sums of all residuals at each draw, and the variance of a row's difference.

        :return: the sums, ``(K,)``, and for each plate the variance over its rows of
            the difference between the draws of each pair, ``(K // 2,)``.
        """
        return self._sums(draws)

    def measured(
        self, draws: np.ndarray, designs: Mapping[str, Design], scheme: Weighted
    ) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """The same and the variances of :meth:`variances` in one pass.

        :return: the sums, ``(K,)``; the variance over the rows of each plate and that
            of a batch's estimate, of each pair of draws.
        """
        strata = _Strata(designs, self.problem.plates, len(draws) // 2)
        return *self._sums(draws, strata), strata.variances(scheme)

    def _sums(
        self, draws: np.ndarray, strata: _Strata | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        sums = np.zeros(len(draws))
        parts = {
            n: (np.zeros(len(draws) // 2), np.zeros(len(draws) // 2))
            for n in self.problem.plates
        }
        with np.errstate(invalid="ignore", over="ignore"):  # infinite sums are refused
            for name, rows, residual in self._pieces(draws):
                wide = residual.astype(np.float64)
                sums += wide.sum(0)
                pairs = wide[:, 1::2] - wide[:, :-1:2]
                whole, square = parts[name]
                whole += pairs.sum(0)
                square += np.einsum("nk,nk->k", pairs, pairs)
                if strata is not None:
                    strata.add(name, rows, pairs)
            variances = {
                n: square / size - (whole / size) ** 2
                for (n, (whole, square)), size in zip(
                    parts.items(), self.problem.plates.values(), strict=True
                )
            }
        return sums - self.of_surplus(draws), variances

    def _of_each_row(self) -> dict[str, np.ndarray]:
        """A number for each row, by plate."""
        return {n: np.zeros(N, self.dtype) for n, N in self.problem.plates.items()}

    def sums_of_some(self, draws: np.ndarray, some: Some) -> np.ndarray:
        """Estimates of the sums of all residuals from some rows, ``(K,)``.

        These rows are evaluated by the program for all rows, whose rounding errors they
        have.

        :param some: the rows, none of them exact.
        """
        found, known = np.zeros(len(draws)), self._known.get(self._key(draws))
        for name, chosen in some.rows.items():
            rows = np.asarray(chosen)
            if known is not None:
                mine = known[name].whole()[rows]
            else:
                read = self._table(name, rows)
                mine = self._of_chunks(np.asarray(draws, self.dtype), *read)[name]
                mine = mine[: len(rows)]
            found += some.scales[name] * mine.astype(np.float64).sum(0)
        return found

    def of_surplus(self, draws: np.ndarray) -> np.ndarray:
        """The part of the sums that representative rows explain, per draw, ``(K,)``."""
        explained = np.zeros(len(draws))
        for name, (rows, weights) in self.surplus.items():
            residuals = np.asarray(self._of_rows(draws, name, rows.ravel()), np.float64)
            if rows.ndim == 1:
                explained += residuals @ weights
                continue
            # each mode has its own, of which a draw has those of its mode
            mode = self.mode_of(draws)
            mine = residuals.reshape(-1, *rows.shape)[np.arange(len(draws)), mode]
            explained += (mine * weights[mode]).sum(1)
        return explained

    def mode_of(self, draws: np.ndarray) -> np.ndarray:
        """The mode that each draw belongs to, if there are several, ``(K,)``."""
        assert isinstance(self.expansion, Expansions)
        return modes_of(self.problem, self.expansion, draws)

    def variances(
        self, draws: np.ndarray, designs: Mapping[str, Design], scheme: Weighted
    ) -> np.ndarray:
        """The exact variance of a batch's estimate, for each pair of draws."""
        strata = _Strata(designs, self.problem.plates, len(draws) // 2)
        for name, rows, residual in self._pieces(draws):
            pairs = residual[:, 1::2].astype(np.float64) - residual[:, :-1:2]
            strata.add(name, rows, pairs)
        return strata.variances(scheme)


class _Strata:
    """Differences of residuals between the draws of pairs, added up by stratum.

    :param designs: how the rows of a batch are drawn, by plate.
    :param plates: numbers of rows.
    :param number: of pairs.
    """

    def __init__(
        self, designs: Mapping[str, Design], plates: Mapping[str, int], number: int
    ) -> None:
        self._tables, self._parts = {}, {}
        for name, design in designs.items():
            stratum, probability = stratum_of(design, plates[name])
            count = design.num_strata
            # the last stratum holds the rows that are always drawn
            stratum = np.where(stratum < 0, count, stratum).astype(np.int32)
            self._tables[name] = stratum, probability
            self._parts[name] = np.zeros((2, count + 1, number))

    def add(self, name: str, rows: slice, pairs: np.ndarray) -> None:
        """Add some rows.

        :param name: their plate.
        :param rows: which of its rows.
        :param pairs: their differences, ``(n, K // 2)``, which are overwritten.
        """
        stratum, probability = (table[rows] for table in self._tables[name])
        whole, square = self._parts[name]
        # a matrix with a one for each row adds them up by stratum
        number = len(stratum)
        ones = np.ones(number), stratum, np.arange(number + 1, dtype=np.int32)
        by_stratum = csc_array(ones, shape=(len(whole), number))
        whole += by_stratum @ pairs
        np.square(pairs, out=pairs)
        pairs /= probability[:, None]
        square += by_stratum @ pairs

    def variances(self, scheme: Weighted) -> np.ndarray:
        """The variance of a batch's estimate, for each pair of draws."""
        found = [
            np.maximum(square - whole**2, 0)[:-1].sum(0) / scheme.draws_of(name)
            for name, (whole, square) in self._parts.items()
        ]
        return np.asarray(sum(found))


class _Parts:
    """The residuals of chunks of rows at some draws, as the program returned them.

    They may have gigabytes, so they are joined only where they are read.

    :param by_draws: for each group of draws the arrays of some chunks, ``(n, K)``, all
        but the last with the same number of rows.
    :param number: the number of rows; the last array may have more.
    """

    def __init__(self, by_draws: list[list[np.ndarray]], number: int) -> None:
        self._by_draws, self._number = by_draws, number

    def some(self, start: int, stop: int) -> np.ndarray:
        """The residuals of some rows of one chunk, ``(stop - start, K)``."""
        which, first = divmod(start, len(self._by_draws[0][0]))
        rows = slice(first, first + stop - start)
        found = [parts[which][rows] for parts in self._by_draws]
        return found[0] if len(found) == 1 else np.concatenate(found, 1)

    def whole(self) -> np.ndarray:
        """The residuals of all rows, ``(number, K)``."""
        found = [np.concatenate(parts) for parts in self._by_draws]
        return np.concatenate(found, 1)[: self._number]


# the programs -------------------------------------------------------------------------


def _chunks(problem: Problem, arrays: list[Any], devices: int | None = None) -> Chunks:
    """The chunks of all rows, for the program that is being traced if not said."""
    width = chunk_of(_WIDTH, problem.target_of(arrays).row_size)
    return Chunks.of(problem.plates, dict.fromkeys(problem.plates, width), devices)


def residuals(
    problem: Problem,
    order: int,
    form: Form,
    arrays: list[Any],
    expansion: Expansion | Expansions,
    kept: Mapping[str, Any],
    draws: Array,
    indices: Mapping[str, Array],
    masks: Mapping[str, Array],
) -> dict[str, Array]:
    """The remaining residuals of some rows, ``(K, width)``; zero where masked."""
    evaluate = expand(
        problem.target_of(arrays),
        problem.coordinates,
        order,
        form,
        expansion,
        problem.unravel,
    )

    def of_draw(flat: Array) -> Any:
        return evaluate(flat, indices).rows

    if problem.target_of(arrays).row_size > 1:
        # one by one, so that the nodes of all rows stay in the processor's cache
        rows = jax.lax.map(of_draw, draws)
    else:
        rows = jax.vmap(of_draw)(draws)

    def left(rows: Any, of_exact: Mapping[str, Array | None]) -> dict[str, Array]:
        return {
            n: kept[n][0].unexplained(r, indices[n], of_exact[n]) if kept else r
            for n, r in rows.items()
        }

    rows = jax.vmap(left)(rows, {n: pair[1] for n, pair in kept.items()})
    return {n: jnp.where(masks[n], r, 0.0) for n, r in rows.items()}


def _every(
    problem: Problem,
    order: int,
    form: Form,
    arrays: list[Any],
    expansion: Expansion | Expansions,
    draws: Array,
    rows: Mapping[str, Array],
    masks: Mapping[str, Array],
) -> dict[str, Array]:
    """The residuals of chunks of rows, ``(n * width, K)`` by plate."""

    @partial(jax.jit, inline=True)  # one trace for the shapes and for the loop
    def evaluated(read: Any) -> dict[str, Array]:
        found = residuals(problem, order, form, arrays, expansion, {}, draws, *read)
        return {n: r.T for n, r in found.items()}

    def nothing(read: Any) -> dict[str, Array]:
        shapes = jax.eval_shape(evaluated, read)
        return {n: jnp.zeros(x.shape, x.dtype) for n, x in shapes.items()}

    def of_chunk(_: None, read: Any) -> tuple[None, dict[str, Array]]:
        some = jnp.any(jnp.stack([jnp.any(m) for m in read[1].values()]))
        return None, jax.lax.cond(some, evaluated, nothing, read)

    _, found = scan_shared(of_chunk, None, (dict(rows), dict(masks)))
    return {n: part.reshape(-1, len(draws)) for n, part in found.items()}
