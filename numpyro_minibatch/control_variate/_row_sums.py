"""Sums over rows of the likelihood with its derivatives, by one program.

The search for the centre, its refinement on all rows, and the check of rounding errors
need the same sums, from some rows or from all of them. One program computes all of
these: the model is traced and compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch._internal.passes import Chunks, chunk_of
from numpyro_minibatch.control_variate._expand import (
    Expansion,
    Expansions,
    coefficients,
    derivatives_of,
    num_coefficients,
)
from numpyro_minibatch.control_variate._problem import Problem, Program, double
from numpyro_minibatch.control_variate._taylor import Taylor
from numpyro_minibatch.proposal import Modes
from numpyro_minibatch.target import without_integrals

__all__ = [
    "RowSums",
    "Some",
    "Sums",
    "keeps_polynomials",
    "modes_of",
    "row_sums",
    "value_and_derivatives",
]

_SUBSAMPLE = 10_000  # rows that are some
# if rows are integrals: as many as take so many evaluations, within these limits
_EVALUATIONS, _FEWEST_INTEGRALS, _MOST_INTEGRALS = 170_000, 250, 2_000
_MOST_POLYNOMIALS = 2**24  # numbers of the polynomials of all rows that are kept
# the same if rows are no integrals: few enough for the processor's cache, and for a
# step to read those of a row as fast as it derives them
_FEW_POLYNOMIALS, _SHORT = 2**20, 128
_LARGE_DERIVATIVES = {
    *("digamma", "polygamma", "igamma_grad_a", "random_gamma_grad"),
    *("bessel_i0e", "bessel_i1e", "regularized_incomplete_beta"),
}
_KNOWN_DERIVATIVES: WeakKeyDictionary[Problem, bool] = WeakKeyDictionary()


class Some(NamedTuple):
    """Some rows of each plate, all of them if they are few.

    :param rows: their indices, ascending, by plate.
    :param plates: the number of rows of each plate.
    """

    rows: dict[str, Array]
    plates: Mapping[str, int]

    @classmethod
    def of(cls, problem: Problem) -> Some:
        """Rows chosen at random, the same ones for equal plates."""
        size = problem.target_of(problem.arrays).row_size
        most = _SUBSAMPLE
        if size > 1:
            most = min(max(_EVALUATIONS // size, _FEWEST_INTEGRALS), _MOST_INTEGRALS)
        rng = np.random.default_rng(20)
        rows = {}
        for name, size in problem.plates.items():
            few = rng.choice(size, min(size, most), replace=False, shuffle=False)
            rows[name] = _ascending(few)
        return cls(rows, problem.plates)

    def largest(self, values: Mapping[str, np.ndarray]) -> Some:
        """The same number of rows, those with the largest values.

        :param values: a number for each row, by plate.
        """
        rows = {}
        for name, few in self.rows.items():
            first = len(values[name]) - len(few)
            rows[name] = _ascending(np.argpartition(values[name], first - 1)[first:])
        return self._replace(rows=rows)

    @property
    def are_all(self) -> bool:
        """Whether they are all rows."""
        return all(len(self.rows[name]) == size for name, size in self.plates.items())

    @property
    def scales(self) -> dict[str, float]:
        """The factors from a sum over them to an estimate of the sum over all rows."""
        return {name: self.plates[name] / len(rows) for name, rows in self.rows.items()}

    @property
    def share(self) -> float:
        """The number of rows of the largest plate divided by the number used."""
        largest = max(self.plates, key=lambda name: self.plates[name])
        return self.scales[largest]


def _ascending(rows: np.ndarray) -> Array:
    return jax.device_put(np.sort(rows).astype(np.int32))


class Sums(NamedTuple):
    """The log likelihood and everything else at a point, with their derivatives.

    :param rows: value, gradient and Hessian of the summed log likelihood.
    :param known: those of the weighted log density of all else; zero where the
        coordinates of the expansion are not those that are sampled.
    :param polynomials: by plate the polynomial of each row, ``(N, P)``; empty if they
        are not kept.
    """

    rows: tuple[Any, ...]
    known: tuple[Any, ...]
    polynomials: dict[str, Any]


@dataclass(frozen=True)
class RowSums:
    """The sums of a problem, in double precision.

    :param problem: the target and its coordinates.
    :param program: value, gradient and Hessian.
    :param slopes: the same without the Hessian.
    :param some: the rows that are some.
    :param last: what was found of all rows at the last point.
    """

    problem: Problem
    program: Program
    slopes: Program
    some: Some
    last: dict[bytes, Sums] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, taylor: Taylor, dim: int) -> RowSums:
        """The sums that a control variate needs.

        :param dim: the number of coordinates of the expansion.
        """
        keeps = (
            taylor.modes == 1
            and taylor.form != "remainder"
            and keeps_polynomials(problem, dim)
        )
        return cls(
            problem,
            problem.over_rows(_derivatives, 3, keeps),
            problem.over_rows(_derivatives, 2, False),
            Some.of(problem),
        )

    def ahead(self, dim: int, slopes: bool) -> None:
        """Compile the programs on other threads.

        :param dim: the number of coordinates.
        :param slopes: whether that without the Hessian is needed.
        """
        programs = (self.slopes, self.program) if slopes else (self.program,)
        for program in programs:
            with double():
                program.ahead(*self._arguments(np.zeros(dim), self.some))

    def _arguments(self, phi: np.ndarray, some: Some | None) -> tuple[Any, ...]:
        at = jax.device_put(np.asarray(phi, np.float64))
        table = self.some if some is None else some
        return at, jax.device_put(np.bool_(some is not None)), table.rows

    def at(self, phi: np.ndarray, some: Some | None, slopes: bool = False) -> Sums:
        """The sums at a point.

        :param phi: the point, ``(d,)``.
        :param some: the rows to read, whose sums are scaled up; ``None`` for all.
        :param slopes: whether to leave out the Hessians.
        """
        if some is not None and some.are_all:
            some = None
        program = self.slopes if slopes else self.program
        known = self.last if some is None and not slopes else {}
        key = np.asarray(phi, np.float64).tobytes()
        if key not in known:
            with double():
                found = program(*self._arguments(phi, some))
                found = jax.tree.map(np.asarray, found)
            known.clear()
            known[key] = Sums(*found)
        return known[key]

    def residuals(
        self,
        order: int,
        expansion: Expansion | Expansions,
        draws: np.ndarray,
        some: Some | None = None,
        slopes: bool = False,
    ) -> np.ndarray:
        """The sums of the residuals at some positions, ``(K,)``.

        :param order: the order of the polynomials.
        :param expansion: without exact rows.
        :param draws: flat positions, ``(K, D)``.
        :param some: the rows to read, whose sums are scaled up; ``None`` for all.
        :param slopes: whether to use the program without Hessians at the positions, if
            it is compiled anyway.
        """
        points = self.problem.in_coordinates(draws)
        modes = modes_of(self.problem, expansion, draws)
        found = np.zeros(len(draws))
        for mode in np.unique(modes):
            near = expansion if isinstance(expansion, Expansion) else expansion.each
            centers = np.asarray(near.center, np.float64).reshape(-1, points.shape[1])
            value, gradient, hessian = self.at(centers[mode], some).rows
            for k in np.flatnonzero(modes == mode):
                away = points[k] - centers[mode]
                slope = gradient + 0.5 * hessian @ away if order > 1 else gradient
                here = self.at(points[k], some, slopes).rows[0]
                found[k] = here - value - slope @ away
        return found


def modes_of(
    problem: Problem, expansion: Expansion | Expansions, draws: np.ndarray
) -> np.ndarray:
    """The mode that each draw belongs to, ``(K,)``; 0 if there is one expansion."""
    if isinstance(expansion, Expansion):
        return np.zeros(len(draws), int)
    modes = expansion.cast(problem.dtype).modes
    at = jax.device_put(np.asarray(draws, problem.dtype))
    return np.asarray(problem.compiled(_mode_of)(modes, at))


def row_sums(problem: Problem) -> Callable[[Array, bool], tuple[Array, ...]]:
    """The summed log likelihood and its gradient, in the precision of a point.

    :param problem: the target and its coordinates.
    :return: a function of a point and of whether to read only some rows.
    """
    program, some = problem.over_rows(_sums, 2), Some.of(problem)

    def at(phi: Array, few: bool) -> tuple[Array, ...]:
        few = few and not some.are_all
        return program(phi, jax.device_put(np.bool_(few)), some.rows)

    return at


def keeps_polynomials(problem: Problem, dim: int) -> bool:
    """Whether the polynomial of each row is computed once and stored.

    If a row is an integral, every program with its derivatives contains the quadrature
    several times. For other rows, too, derivatives can compile to large programs: those
    of the gamma function do. Many rows or parameters need more memory than this is
    worth.

    :param problem: the target and its coordinates.
    :param dim: the number of coordinates of the expansion.
    """
    numbers = sum(problem.plates.values()) * num_coefficients(dim)
    is_integral = problem.target_of(problem.arrays).row_size > 1
    if is_integral:
        return numbers <= _MOST_POLYNOMIALS
    short = num_coefficients(dim) <= _SHORT and numbers <= _FEW_POLYNOMIALS
    return short and _has_large_derivatives(problem)


def _has_large_derivatives(problem: Problem) -> bool:
    """Whether derivatives of the rows contain functions of which JAX has no short form.

    The derivatives are looked at and not the rows themselves, because a factorial of
    the data has none.
    """
    if problem not in _KNOWN_DERIVATIVES:
        rows_at, phi = _rows_in_coordinates(problem, problem.arrays, problem.dtype)

        def rows(phi: Array) -> Any:
            return rows_at(phi, problem.one_row)

        with without_integrals():
            found = jax.make_jaxpr(partial(jax.jvp, rows))((phi,), (phi,))
        names = {eqn.primitive.name for eqn in _equations(found.jaxpr)}
        _KNOWN_DERIVATIVES[problem] = bool(names & _LARGE_DERIVATIVES)
    return _KNOWN_DERIVATIVES[problem]


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, with those inside of others."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _equations(getattr(inner, "jaxpr", inner))


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


# the programs -------------------------------------------------------------------------


def _rows_in_coordinates(
    problem: Problem, arrays: list[Any], dtype: Any
) -> tuple[Callable[[Array, Mapping[str, Array]], Any], Array]:
    """Log likelihoods by plate, of a point and of indices, and a point."""
    target = problem.target_of(arrays)
    z = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), dtype), problem.example)
    shapes = jax.eval_shape(lambda z: problem.coordinates.of(target, z), z)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    flat, unravel_phi = ravel_pytree(nothing)

    def rows_at(phi: Array, indices: Mapping[str, Array]) -> Any:
        return problem.coordinates.rows(target, unravel_phi(phi), z, indices)

    return rows_at, flat


class _Reading(NamedTuple):
    """The way in which a program reads all rows, or some.

    :param rows_at: log likelihoods by plate, of a point and of indices.
    :param chunks: of all rows.
    :param some: whether to read some of them.
    :param table: the indices of these, by plate.
    """

    rows_at: Callable[[Array, Mapping[str, Array]], Any]
    chunks: Chunks
    some: Array
    table: Mapping[str, Array]

    @classmethod
    def of(
        cls,
        problem: Problem,
        arrays: list[Any],
        phi: Array,
        some: Array,
        table: Mapping[str, Array],
    ) -> _Reading:
        target = problem.target_of(arrays)
        # about 2 ** 22 numbers at once, whatever the dimension
        most = max(256, min(2**14, 2**22 // (phi.size + 1)))
        most = chunk_of(most, target.row_size)
        widths = {}
        for name, few in table.items():  # in which some rows fill whole chunks
            widths[name] = -(-few.size // -(-few.size // most))
        rows_at, _ = _rows_in_coordinates(problem, arrays, phi.dtype)
        return cls(rows_at, Chunks.of(problem.plates, widths), some, table)

    @property
    def until(self) -> Array:
        """The number of chunks to read."""
        few = max(-(-t.size // self.chunks.widths[n]) for n, t in self.table.items())
        return jnp.where(self.some, jnp.int32(few), jnp.int32(self.chunks.number))

    def at(self, i: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """The rows of a chunk, and their weights in the sum; zero for padding."""
        indices, masks = self.chunks.at(i)
        weights = {}
        for name, positions in indices.items():
            table, size = self.table[name], self.chunks.plates[name]
            place = i * self.chunks.widths[name] + jnp.arange(
                self.chunks.widths[name], dtype=jnp.int32
            )
            chosen = table[jnp.minimum(place, table.size - 1)]
            indices[name] = jnp.where(self.some, chosen, positions)
            scaled = jnp.where(place < table.size, size / table.size, 0.0)
            weights[name] = jnp.where(self.some, scaled, jnp.where(masks[name], 1.0, 0))
        return indices, weights


def _sums(
    problem: Problem,
    derivatives: int,
    arrays: list[Any],
    phi: Array,
    some: Array,
    table: Mapping[str, Array],
) -> tuple[Array, ...]:
    """Value and derivatives of the summed log likelihood."""
    reading = _Reading.of(problem, arrays, phi, some, table)

    def of_chunk(phi: Array, i: Array) -> Array:
        indices, weights = reading.at(i)
        parts = [
            # not a product: padding repeats a row that may have no finite value
            jnp.where(weights[n] > 0, weights[n] * r, 0.0).sum()
            for n, r in reading.rows_at(phi, indices).items()
        ]
        return reduce(add, parts)

    def sums_of(i: Array) -> tuple[Array, ...]:
        return value_and_derivatives(lambda phi: of_chunk(phi, i), phi, derivatives)

    zeros = [jnp.zeros((phi.size,) * k, phi.dtype) for k in range(derivatives)]
    return reading.chunks.sum(sums_of, tuple(zeros), reading.until)


def _polynomials(
    problem: Problem,
    arrays: list[Any],
    phi: Array,
    some: Array,
    table: Mapping[str, Array],
) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """The same with the Hessian, and the polynomial of each row.

    Polynomials are in working precision, ``(N, P)`` by plate, and arbitrary where some
    rows are read.
    """
    reading = _Reading.of(problem, arrays, phi, some, table)
    is_integral = problem.target_of(arrays).row_size > 1

    def of_row(name: str, index: Array) -> Array:
        one = dict.fromkeys(problem.plates, jnp.zeros(1, jnp.int32))

        def value(phi: Array) -> Array:
            return reading.rows_at(phi, one | {name: index[None]})[name][0]

        return coefficients(*value_and_derivatives(value, phi))

    def of_rows(indices: Mapping[str, Array]) -> dict[str, Array]:
        if is_integral:
            return {n: jax.vmap(partial(of_row, n))(at) for n, at in indices.items()}

        # all rows at once, and forwards: what they share is derived once for them all
        def values(phi: Array) -> tuple[Any, Any]:
            rows = reading.rows_at(phi, indices)
            return rows, rows

        def slopes(phi: Array) -> tuple[Any, Any]:
            slope, value = jax.jacfwd(values, has_aux=True)(phi)
            return slope, (value, slope)

        hessian, (value, slope) = jax.jacfwd(slopes, has_aux=True)(phi)
        return jax.tree.map(jax.vmap(coefficients), value, slope, hessian)

    def of_chunk(i: Array) -> tuple[Array, dict[str, Array]]:
        indices, weights = reading.at(i)
        found = of_rows(indices)
        sums = [
            jnp.where(weights[n][:, None] > 0, weights[n][:, None] * p, 0.0).sum(0)
            for n, p in found.items()
        ]
        return reduce(add, sums), {n: p.astype(problem.dtype) for n, p in found.items()}

    sums, kept = reading.chunks.map(of_chunk, reading.until)
    whole = {
        n: p.reshape(-1, p.shape[-1])[: problem.plates[n]] for n, p in kept.items()
    }
    return derivatives_of(sums.sum(0), phi.size), whole


def _derivatives(
    problem: Problem,
    derivatives: int,
    keeps: bool,
    arrays: list[Any],
    phi: Array,
    some: Array,
    table: Mapping[str, Array],
) -> tuple[tuple[Array, ...], tuple[Array, ...], dict[str, Array]]:
    """The program of :class:`Sums`."""
    polynomials: dict[str, Array] = {}
    if keeps:
        rows, polynomials = _polynomials(problem, arrays, phi, some, table)
    else:
        rows = _sums(problem, derivatives, arrays, phi, some, table)
    if not problem.in_own_coordinates:
        return rows, tuple(jnp.zeros_like(x) for x in rows), polynomials
    known = partial(problem.known, arrays)
    return rows, value_and_derivatives(known, phi, derivatives), polynomials


def _mode_of(problem: Problem, arrays: list[Any], modes: Modes, draws: Array) -> Array:
    return jax.vmap(modes.of)(draws)


def value_and_derivatives(
    fn: Callable[[Array], Array], x: Array, derivatives: int = 3
) -> tuple[Array, ...]:
    """A function's value, gradient and Hessian, with one copy of it in the program.

    :param fn: a function of a flat position.
    :param x: the position, shape ``(D,)``.
    :param derivatives: 2 without the Hessian, otherwise 3.
    """
    both = jax.value_and_grad(fn)
    if derivatives == 2:
        return both(x)
    (value, gradient), along = jax.linearize(both, x)
    _, hessian = jax.vmap(along, out_axes=(0, -1))(jnp.eye(x.size, dtype=x.dtype))
    return value, gradient, hessian
