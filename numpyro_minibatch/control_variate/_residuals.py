"""Passes over the residuals of all rows at some draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from numpyro_minibatch._internal.passes import Chunks, chunk_of
from numpyro_minibatch.batch import Design, Weighted, stratum_of
from numpyro_minibatch.control_variate._expand import (
    ExactRows,
    Expansion,
    Expansions,
    expand,
)
from numpyro_minibatch.control_variate._problem import Problem, Program, double
from numpyro_minibatch.control_variate._taylor import Form
from numpyro_minibatch.proposal import Modes

__all__ = [
    "ResidualScan",
    "Rows",
    "residuals",
    "sums_in_double",
    "sums_in_double_ahead",
]

_WIDTH = 2**13  # rows per chunk, for up to as many draws as the pilot uses
_DRAWS = 32
_MOST_KEPT = 2**25  # largest number of residuals (rows times draws) kept in memory
_KEPT = 2  # sets of draws: one scores the rows, the other judges the design


class Evaluated(NamedTuple):
    """The residuals of all rows at some draws, computed by one program.

    Passes over these values do not contain the model. So the likelihood of a row is
    compiled once for all passes, and it is evaluated once at each draw.

    :param rows: the residuals by plate, before exact rows are removed, ``(N, K)``.
    """

    rows: Mapping[str, Array]


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


def sums_in_double(
    problem: Problem,
    order: int,
    expansion: Expansion | Expansions,
    draws: np.ndarray,
) -> np.ndarray:
    """The sums of all residuals at some draws in double precision, ``(K,)``.

    The sum of all polynomials is known. So only the rows themselves are evaluated at
    the draws, and no derivative is compiled.

    :param order: the order of the polynomials.
    :param expansion: without exact rows.
    :param draws: flat positions, ``(K, D)``.
    """
    with double():
        program, args = _in_double(problem, order, expansion, draws)
        return np.asarray(program(*args))


def sums_in_double_ahead(
    problem: Problem,
    order: int,
    expansion: Expansion | Expansions,
    draws: np.ndarray,
) -> None:
    """Compile the program of :func:`sums_in_double` on another thread."""
    with double():
        program, args = _in_double(problem, order, expansion, draws)
        program.ahead(*args)


def _in_double(
    problem: Problem,
    order: int,
    expansion: Expansion | Expansions,
    draws: np.ndarray,
) -> tuple[Program, tuple[Any, ...]]:
    program = problem.over_rows(_beyond_polynomial, order)
    if isinstance(expansion, Expansion):
        expansion = expansion._replace(rows={})
    at = jax.device_put(np.asarray(draws, np.float64))
    return program, (expansion.cast(jnp.float64), at)


def _parts(draws: Array, num_rows: int) -> list[Array]:
    """The draws in parts, which are smaller if there are many rows."""
    few = max(1, _WIDTH * _DRAWS // max(num_rows, 1))
    return [draws[k : k + few] for k in range(0, len(draws), few)]


class ResidualScan:
    """Passes over the residuals of all rows at some draws.

    Each pass is compiled once. :meth:`keeping` and other data of the same shape use the
    same program. If exact rows represent others, the pass is compiled once more.
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
        self.expansion = expansion.cast(self.dtype)
        none = np.zeros(0, int)
        self.exact = {n: ExactRows.alone(none, N) for n, N in problem.plates.items()}
        self.representatives: dict[str, np.ndarray] = {}
        self.surplus: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._known: dict[bytes, Evaluated] = {}

    def about(self, expansion: Expansion) -> ResidualScan:
        """The same passes for an expansion about another centre."""
        scan = copy.copy(self)
        scan.expansion = expansion.cast(self.dtype)._replace(exact={})
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

    def _pass_at(
        self, draws: np.ndarray
    ) -> tuple[Expansion | Expansions | Evaluated, Any, Array]:
        """The same, with stored residuals instead of the expansion if there are any."""
        expansion, kept, flat = self._at(draws)
        found = self._evaluated(draws)
        return expansion if found is None else found, kept, flat

    def _keeps(self, num_draws: int) -> bool:
        """Whether the residuals of all rows at so many draws are stored."""
        return num_draws * sum(self.problem.plates.values()) <= _MOST_KEPT

    def _evaluated(self, draws: np.ndarray) -> Evaluated | None:
        """The residuals of all rows at some draws."""
        draws = np.asarray(draws, self.dtype)
        # padded to a multiple of a fixed number of draws, so that one program suffices
        count = -(-len(draws) // _DRAWS) * _DRAWS
        if not self._keeps(count):
            return None
        key = draws.tobytes()
        found = self._known.get(key)
        if found is None:
            padded = draws[np.minimum(np.arange(count), len(draws) - 1)]
            rows = self._over_rows(_every)(self.expansion, jax.device_put(padded))
            found = Evaluated(rows)
            if len(self._known) < _KEPT:
                self._known[key] = found
        return found

    def ahead(self, num_draws: int, dim: int) -> None:
        """Compile the pass that evaluates the model on another thread.

        :param num_draws: the number of draws that :meth:`sums` will receive.
        :param dim: the dimension of a position.
        """
        draws = np.zeros((num_draws, dim), self.dtype)
        if self._keeps(num_draws):
            self._over_rows(_every).ahead(self.expansion, jax.device_put(draws))
        else:
            self._over_rows(_total).ahead(*self._at(draws))

    def _over_rows(self, fn: Callable, *static: Hashable) -> Program:
        """A pass over all rows, compiled once for all scans like this one."""
        return self.problem.over_rows(fn, self.order, self.form, *static)

    def _of_rows(
        self, draws: np.ndarray | Array, name: str, rows: ArrayLike, left: bool = False
    ) -> Array:
        """The residuals of a few rows of a plate, ``(K, number of rows)``."""
        rows = np.asarray(rows)
        # in the order of the plate, so that a model need not handle other orders
        order = np.argsort(rows, kind="stable")
        indices = self.problem.one_row | {name: np.asarray(rows[order], np.int32)}
        masks = {n: np.ones(len(i), bool) for n, i in indices.items()}
        found = []
        of_some = self.problem.compiled(residuals, self.order, self.form)
        for part in _parts(jax.device_put(np.asarray(draws, self.dtype)), len(rows)):
            kept = self._at(part)[1] if left else {}
            args = self.expansion, kept, part, indices, masks
            found.append(of_some(*args)[name])
        return jnp.concatenate(found)[:, np.argsort(order)]

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

        over_rows = self._over_rows(_represented, tuple(chance.items()))
        args = self.expansion, found, jax.device_put(np.asarray(draws, self.dtype))
        representative, coefficient = over_rows(*args)
        return {
            n: (np.array(representative[n]), np.array(coefficient[n]))
            for n in representatives
        }

    def scores(
        self, draws: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """How much each row matters, and its loading on the leading direction."""
        args = self._pass_at(draws)
        grams = jax.tree.map(np.asarray, self._over_rows(_gram)(*args))
        leading = {
            n: np.linalg.eigh(np.nan_to_num(g))[1][:, -1].astype(self.dtype)
            for n, g in grams.items()
        }
        return jax.tree.map(np.asarray, self._over_rows(_score)(*args, leading))

    def sums(self, draws: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Sums of all residuals at each draw, and the variance of a row's difference.

        :return: the sums, ``(K,)``, and for each plate the variance over its rows of
            the difference between the draws of each pair, ``(K // 2,)``.
        """
        found = self._over_rows(_total)(*self._pass_at(draws))
        sums = np.zeros(len(draws))
        variances: dict[str, np.ndarray] = {}
        for name, (whole, square) in found.items():
            size = self.problem.plates[name]
            whole = np.asarray(whole, np.float64)
            with np.errstate(invalid="ignore"):  # infinite sums are refused later
                sums += whole
                mean = (whole[1::2] - whole[::2]) / size
                variances[name] = np.asarray(square, np.float64) / size - mean**2
        return sums - self.of_surplus(draws), variances

    def of_surplus(self, draws: np.ndarray) -> np.ndarray:
        """What representative rows explain of the sums at some draws, ``(K,)``."""
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
        at = jax.device_put(np.asarray(draws, self.dtype))
        mode_of = self.problem.compiled(_mode_of)
        return np.asarray(mode_of(self.expansion.modes, at))

    def variances(
        self, draws: np.ndarray, designs: Mapping[str, Design], scheme: Weighted
    ) -> np.ndarray:
        """The exact variance of a batch's estimate, for each pair of draws."""
        tables, strata, num_draws = {}, {}, {}
        for name, design in designs.items():
            size = self.problem.plates[name]
            stratum, probability = stratum_of(design, size)
            count = design.num_strata
            tables[name] = (
                np.where(stratum < 0, count, stratum).astype(np.int32),
                np.asarray(probability, self.dtype),
            )
            strata[name] = count + 1
            num_draws[name] = scheme.draws_of(name)

        total = self._over_rows(_of_strata, tuple(strata.items()))
        found = total(*self._pass_at(draws), tables)
        variance = np.zeros(len(draws) // 2)
        for name, parts in found.items():
            whole, square = (np.asarray(p, np.float64)[:-1] for p in parts)
            variance += np.maximum(square - whole**2, 0).sum(0) / num_draws[name]
        return variance


# the programs -------------------------------------------------------------------------


def _mode_of(problem: Problem, arrays: list[Any], modes: Modes, draws: Array) -> Array:
    """The mode that each draw belongs to, ``(K,)``."""
    return jax.vmap(modes.of)(draws)


def _chunks(
    problem: Problem,
    arrays: list[Any],
    expansion: Expansion | Expansions | Evaluated,
    draws: Array,
    counts: Mapping[str, int] | None = None,
) -> Chunks:
    """The chunks of rows for the program that is being traced."""
    counts = problem.plates if counts is None else counts
    width = _WIDTH * _DRAWS // max(len(draws), _DRAWS)
    if not isinstance(expansion, Evaluated):
        width = chunk_of(width, problem.target_of(arrays).row_size)
    return Chunks.of(counts, dict.fromkeys(counts, width))


def residuals(
    problem: Problem,
    order: int,
    form: Form,
    arrays: list[Any],
    expansion: Expansion | Evaluated,
    kept: Mapping[str, Any],
    draws: Array,
    indices: Mapping[str, Array],
    masks: Mapping[str, Array],
) -> dict[str, Array]:
    """The remaining residuals of some rows, ``(K, width)``; zero where masked."""
    if isinstance(expansion, Evaluated):
        rows = {n: r[indices[n]].T[: len(draws)] for n, r in expansion.rows.items()}
    else:
        evaluate = expand(
            problem.target_of(arrays),
            problem.coordinates,
            order,
            form,
            expansion,
            problem.unravel,
        )
        rows = jax.vmap(lambda flat: evaluate(flat, indices).rows)(draws)

    def left(rows: Any, of_exact: Mapping[str, Array | None]) -> dict[str, Array]:
        return {
            n: kept[n][0].unexplained(r, indices[n], of_exact[n]) if kept else r
            for n, r in rows.items()
        }

    rows = jax.vmap(left)(rows, {n: pair[1] for n, pair in kept.items()})
    return {n: jnp.where(masks[n], r, 0.0) for n, r in rows.items()}


def _beyond_polynomial(
    problem: Problem,
    order: int,
    arrays: list[Any],
    expansion: Expansion | Expansions,
    draws: Array,
) -> Array:
    """The log likelihood minus the summed polynomial, ``(K,)``."""
    target = problem.target_of(arrays)
    chunks = _chunks(problem, arrays, expansion, draws)

    def of_chunk(i: Array) -> Array:
        indices, masks = chunks.at(i)

        def at(flat: Array) -> Array:
            rows = target.rows(problem.unravel(flat), indices)
            parts = [jnp.where(masks[n], r, 0.0).sum() for n, r in rows.items()]
            return jnp.stack(parts).sum()

        return jax.vmap(at)(draws)

    def polynomial(flat: Array) -> Array:
        phi, _ = ravel_pytree(problem.coordinates.of(target, problem.unravel(flat)))
        near = expansion.at(flat)
        return near.value + near.polynomial(phi - near.center, order)

    whole = chunks.sum(of_chunk, jnp.zeros(len(draws), draws.dtype))
    return whole - jax.vmap(polynomial)(draws)


def _every(
    problem: Problem,
    order: int,
    form: Form,
    arrays: list[Any],
    expansion: Expansion,
    draws: Array,
) -> dict[str, Array]:
    """The residuals of all rows, ``(N, K)`` by plate."""
    chunks = _chunks(problem, arrays, expansion, draws)

    def of_chunk(i: Array) -> Any:
        read = chunks.at(i)
        rows = residuals(problem, order, form, arrays, expansion, {}, draws, *read)
        return {n: r.T for n, r in rows.items()}

    return {
        n: part.reshape(-1, len(draws))[: problem.plates[n]]
        for n, part in chunks.map(of_chunk).items()
    }


def _represented(
    problem: Problem,
    order: int,
    form: Form,
    chance: tuple[tuple[str, float], ...],
    arrays: list[Any],
    expansion: Expansion,
    of_exact: Any,
    draws: Array,
) -> Any:
    """The representative of each row, and its coefficient."""
    chunks = _chunks(problem, arrays, expansion, draws)
    unit = {n: r - r.mean(0) for n, r in of_exact.items()}
    norms = {n: jnp.linalg.norm(r, axis=0) for n, r in unit.items()}
    norms = {n: jnp.where(r > 0, r, 1.0) for n, r in norms.items()}

    def of_chunk(i: Array) -> Any:
        read = chunks.at(i)
        rows = residuals(problem, order, form, arrays, expansion, {}, draws, *read)
        representative, coefficient = {}, {}
        for n, least_square in chance:
            centred = rows[n] - rows[n].mean(0)
            along = (unit[n] / norms[n]).T @ centred
            representative[n] = jnp.argmax(along, 0).astype(jnp.int32)
            highest = jnp.take_along_axis(along, representative[n][None], 0)[0]
            least = jnp.sqrt(least_square * jnp.square(centred).sum(0))
            multiple = highest / norms[n][representative[n]]
            coefficient[n] = jnp.where(highest > least, multiple, 0.0)
        return representative, coefficient

    return _joined(chunks, of_chunk)


def _joined(chunks: Chunks, of_chunk: Callable[[Array], Any]) -> Any:
    """Values of all rows, by plate, from the values of chunks."""
    return tuple(
        {n: chunks.joined(n, part) for n, part in found.items()}
        for found in chunks.map(of_chunk)
    )


def _gram(
    problem: Problem,
    order: int,
    form: Form,
    arrays: list[Any],
    expansion: Expansion | Evaluated,
    kept: Any,
    draws: Array,
) -> Any:
    """Inner products over rows of the residuals at each pair of draws."""
    plates = problem.plates
    # the data in pieces that do not depend on the number of devices
    strides = {n: -(-size // _WIDTH) // 16 for n, size in plates.items()}
    counts = {n: min(size, 16 * _WIDTH) for n, size in plates.items()}
    chunks = _chunks(problem, arrays, expansion, draws, counts)

    def of_chunk(i: Array) -> Any:
        indices, masks = chunks.at(i)
        for name, row in indices.items():
            skipped = (max(strides[name], 1) - 1) * (row // _WIDTH)
            indices[name] = row + skipped * _WIDTH
        read = indices, masks
        rows = residuals(problem, order, form, arrays, expansion, kept, draws, *read)
        centred = {n: r - r.mean(0) for n, r in rows.items()}
        return {n: r @ r.T for n, r in centred.items()}

    zeros = jnp.zeros((len(draws),) * 2, draws.dtype)
    return chunks.sum(of_chunk, dict.fromkeys(plates, zeros))


def _score(
    problem: Problem,
    order: int,
    form: Form,
    arrays: list[Any],
    expansion: Expansion | Evaluated,
    kept: Any,
    draws: Array,
    leading: Any,
) -> Any:
    """The scatter of each row's residual, and its projection onto a direction."""
    chunks = _chunks(problem, arrays, expansion, draws)

    def of_chunk(i: Array) -> Any:
        read = chunks.at(i)
        rows = residuals(problem, order, form, arrays, expansion, kept, draws, *read)
        centred = {n: r - r.mean(0) for n, r in rows.items()}
        rms = {
            n: jnp.sqrt(jnp.square(r).sum(0) / (len(draws) - 1))
            for n, r in centred.items()
        }
        return rms, {n: leading[n] @ r for n, r in centred.items()}

    return _joined(chunks, of_chunk)


def _total(
    problem: Problem,
    order: int,
    form: Form,
    arrays: list[Any],
    expansion: Expansion | Evaluated,
    kept: Any,
    draws: Array,
) -> Any:
    """Sums over rows of the residuals, and of the squares of their differences."""
    chunks = _chunks(problem, arrays, expansion, draws)

    def of_chunk(i: Array) -> Any:
        read = chunks.at(i)
        rows = residuals(problem, order, form, arrays, expansion, kept, draws, *read)
        return {
            name: (r.sum(1), jnp.square(r[1::2] - r[::2]).sum(1))
            for name, r in rows.items()
        }

    zeros = jnp.zeros(len(draws), draws.dtype)
    first = {n: (zeros, zeros[::2]) for n in problem.plates}
    return chunks.sum(of_chunk, first)


def _of_strata(
    problem: Problem,
    order: int,
    form: Form,
    strata: tuple[tuple[str, int], ...],
    arrays: list[Any],
    expansion: Expansion | Evaluated,
    kept: Any,
    draws: Array,
    tables: Any,
) -> Any:
    """Sums over each stratum of the differences between pairs, and of their squares."""
    chunks = _chunks(problem, arrays, expansion, draws)

    def of_chunk(i: Array) -> Any:
        indices, masks = read = chunks.at(i)
        rows = residuals(problem, order, form, arrays, expansion, kept, draws, *read)
        sums = {}
        for name, count in strata:
            # padding counts for the last stratum, which holds the rows that are always
            # drawn
            stratum, probability = (t[indices[name]] for t in tables[name])
            stratum = jnp.where(masks[name], stratum, count - 1)
            pairs = (rows[name][1::2] - rows[name][::2]).T
            parts = (pairs, jnp.square(pairs) / probability[:, None])
            sums[name] = tuple(jax.ops.segment_sum(p, stratum, count) for p in parts)
        return sums

    first = {
        n: (jnp.zeros((count, len(draws) // 2), draws.dtype),) * 2
        for n, count in strata
    }
    return chunks.sum(of_chunk, first)
