"""A target read through a batch scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch._internal import passes
from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch._internal.passes import Chunks, chunk_of
from numpyro_minibatch.batch import FullBatch, Scheme, full
from numpyro_minibatch.estimate._number import Estimate, Moments, Weights, total
from numpyro_minibatch.target import Terms


class SequentialEvidence(NamedTuple):
    """The data on which a sequential test decides whether to stop reading.

    :param log_ratio: the estimated log ratio of the target's densities so far.
    :param rows: for each plate the number, the mean and the sum of squared deviations
        of the rows' differences in log likelihood, at temperature 1.
    :param sizes: the number of rows of each plate.
    :param weight: the power of the likelihood, ``1 / temperature``.
    :param number: the number of this look, from 1.
    """

    log_ratio: Estimate
    rows: Mapping[str, Moments]
    sizes: Mapping[str, int]
    weight: ArrayLike
    number: Array


_CHUNK = 2**14  # rows of one likelihood each
_LARGE = 1000  # operations of a model and its expansion that are not compiled twice

StoppingRule = Callable[[SequentialEvidence], Array]  # whether the rows read are enough


class Reader(NamedTuple):
    """A target's rows, read through a scheme; every estimate is made from one.

    :param evaluate: ``evaluate(z, indices)``, the target's
        :class:`~numpyro_minibatch.target.Terms` at a flat position.
    :param plates: the number of rows of each data plate.
    :param scheme: how the rows are drawn, bound to these plates.
    :param weights: the powers of the prior and of the likelihood.
    :param designs: for a scheme that weights rows, the design of each plate.
    :param active: whether a scheme that reads in rounds reads anything. It may differ
        between vectorised chains, for which a branch would run in all.
    :param known_rows: rows that each evaluation includes in addition to the requested
        ones.
    :param row_size: likelihood evaluations that one row takes.
    """

    evaluate: Callable[[Array, Mapping[str, Array]], Terms]
    plates: Mapping[str, int]
    scheme: Scheme
    weights: Weights
    designs: Any = None
    active: ArrayLike = True
    known_rows: int = 0
    row_size: int = 1

    def read(
        self,
        key: Array,
        rows_of: Callable[[Mapping[str, Array]], tuple[Any, dict[str, Array]]],
        max_variance: ArrayLike,
    ) -> tuple[Any, Estimate, Array]:
        """Estimate the sums over all rows of ``k`` numbers per row.

        :param key: PRNG key of this decision's rows.
        :param rows_of: ``rows_of(indices)`` returns an extra value and, for each plate,
            ``k`` numbers per row, shape ``(k, b)``. It is called at one place of the
            compiled program.
        :param max_variance: the variance of the first of the ``k`` sums, times the
            likelihood's weight squared, at which schemes stop asking for rows.
        :return: the extra value of ``rows_of``, the estimates of shape ``(k,)``, and
            the number of rows read.
        """
        scheme = self.scheme
        if not self.plates:  # everything is known
            nothing = jnp.zeros(())
            return rows_of({})[0], Estimate(nothing, nothing), jnp.int32(0)
        if scheme.single_round:
            batches = scheme.draw(key, self.plates, self.designs)
            extra, rows = rows_of({name: b.indices for name, b in batches.items()})
            parts = [
                total(batch, rows[name], self.plates[name])
                for name, batch in batches.items()
            ]
            num_rows = scheme.num_rows(self.plates, self.designs)
            return extra, _add_up(parts), jnp.asarray(num_rows, jnp.int32)
        return self._read_rounds(key, rows_of, max_variance)[:3]

    def read_until(
        self,
        key: Array,
        rows_of: Callable[[Mapping[str, Array]], tuple[Any, dict[str, Array]]],
        enough: Callable[[Any, Estimate, Mapping[str, Moments], Array], Array],
    ) -> tuple[Any, Estimate, Array, Array]:
        """The same from a sequential scheme, until a stopping rule holds.

        :param key: PRNG key of this decision's rows.
        :param rows_of: as for :meth:`read`.
        :param enough: ``enough(extra, sums, moments, number)`` is called whenever the
            requested rows have been read, and returns whether they are enough.
        :return: what :meth:`read` returns, and whether the rows were enough; all rows
            always are.
        """
        return self._read_rounds(key, rows_of, math.inf, enough)

    def _read_rounds(
        self,
        key: Array,
        rows_of: Callable,
        max_variance: ArrayLike,
        enough: Callable | None = None,
    ) -> tuple[Any, Estimate, Array, Array]:
        scheme, plates = self.scheme, self.plates
        # only passes over all rows are worth dividing among devices
        full = isinstance(scheme, FullBatch)
        widths = Chunks.of(plates, scheme.widths).widths if full else scheme.widths
        devices = passes.num_devices() if full else 1
        limit = max_variance / self.weights.likelihood**2
        streams = jax.random.split(key)

        def estimate(moments: Mapping[str, Moments]) -> Estimate:
            return _add_up(
                [
                    moments[name].total(size, scheme.fpc(moments[name].seen, size))
                    for name, size in plates.items()
                ]
            )

        def one_round(state: _Rounds) -> _Rounds:
            stream = jax.tree.map(lambda k: k[state.stream], streams)
            # cloned deliberately, because every round reads the next rows of one
            # permutation
            keys = scheme.plate_keys(jax.random.clone(stream))
            indices, fresh = {}, {}
            for name, width in widths.items():
                start = state.moments[name].seen
                if devices > 1:
                    start += passes.which_device() * width
                positions = start + jnp.arange(width, dtype=jnp.int32)
                indices[name] = scheme.rows_at(keys[name], positions, plates[name])
                fresh[name] = jnp.clip(state.needed[name] - start, 0, width)
            extra, rows = rows_of(indices)
            found = {name: Moments.of(rows[name], fresh[name]) for name in plates}
            moments = dict(state.moments)
            if devices > 1:
                found = passes.gathered(found)
                parts = [
                    jax.tree.map(lambda x, k=k: x[k], found) for k in range(devices)
                ]
            else:
                parts = [found]
            for part in parts:
                moments = {n: moments[n].merge(part[n]) for n in plates}
            counts = {name: m.seen for name, m in moments.items()}
            new = [counts[name] - state.moments[name].seen for name in plates]
            num_rows = state.num_rows + sum(new)
            variances = {
                n: jnp.asarray(m.total(plates[n]).variance)[0]
                for n, m in moments.items()
            }
            done = _all_read(counts, state.needed)
            most: ArrayLike = limit
            is_enough = state.is_enough
            if enough is not None:
                is_enough = done & (
                    enough(extra, estimate(moments), moments, state.reached + 1)
                    | _all_read(counts, plates)
                )
                # the rule as a limit for the scheme: any variance is enough, or none
                most = jnp.where(is_enough, jnp.inf, -1.0)
            needed, restart = scheme.extend(
                counts, variances, plates, state.reached, most
            )
            restart = done & restart
            return _Rounds(
                stream=jnp.where(restart, 1, state.stream),
                reached=state.reached + done,
                moments=jax.tree.map(lambda m: jnp.where(restart, 0, m), moments),
                needed=jax.tree.map(
                    lambda new, old: jnp.where(done, new, old), needed, state.needed
                ),
                num_rows=num_rows,
                extra=extra,
                is_enough=is_enough,
            )

        def unfinished(state: _Rounds) -> Array:
            counts = {name: m.seen for name, m in state.moments.items()}
            return ~_all_read(counts, state.needed)

        def first_round(key: Array) -> tuple[Any, dict[str, Array]]:
            drawn = scheme.draw(key, plates)
            return rows_of({name: batch.indices for name, batch in drawn.items()})

        extra, rows = jax.eval_shape(first_round, key)
        zero = jnp.int32(0)
        start = _Rounds(
            stream=zero,
            reached=zero,
            moments={
                name: Moments(zero, *[jnp.zeros(r.shape[:1], r.dtype)] * 2)
                for name, r in rows.items()
            },
            needed=jax.tree.map(
                lambda rows: jnp.where(self.active, rows, 0), scheme.first(plates)
            ),
            num_rows=zero,
            extra=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), extra),
            is_enough=jnp.array(False),
        )
        end = jax.lax.while_loop(unfinished, one_round, start)
        return end.extra, estimate(end.moments), end.num_rows, end.is_enough

    def evaluate_both(
        self, z: Array, z_new: Array, indices: Mapping[str, Array]
    ) -> tuple[Terms, Terms]:
        """The target's terms at two positions, on the same rows.

        Not mapped over both: XLA then swaps the operands in the product of many rows
        and two directions, which is slow.

        :param z: a flat position, shape ``(D,)``.
        :param z_new: another.
        :param indices: the rows of each data plate.
        """
        # a separate function, which is traced and lowered once for both
        evaluate = jax.jit(lambda x: self.evaluate(x, indices))
        loop = isinstance(self.scheme, FullBatch)
        if not loop and _size(jax.make_jaxpr(evaluate)(z).jaxpr) <= _LARGE:
            return evaluate(z), evaluate(z_new)
        # for a few rows a loop is slower, but XLA compiles its body only once
        both = jax.lax.map(evaluate, jnp.stack([z, z_new]))
        first, second = (jax.tree.map(lambda x, k=k: x[k], both) for k in (0, 1))
        return first, second

    def difference(self, z: Array, z_new: Array) -> Array:
        """The log ratio of two positions' densities from all rows, which has no noise.

        Its loop is the same for vectorised chains, so that they share what they read.

        :param z: a flat position, shape ``(D,)``.
        :param z_new: another.
        """
        scheme = self._all_rows
        reader, chunks = (
            self._replace(scheme=scheme),
            Chunks.of(self.plates, scheme.widths),
        )

        def of_chunk(i: Array) -> Array:
            indices, masks = chunks.at(i)
            current, new = reader.evaluate_both(z, z_new, indices)
            # subtract per row and per term before summing, for the sake of float32
            change = jax.tree.map(jnp.subtract, new, current)
            parts = [
                jnp.where(masks[name], row, 0.0).sum()
                for name, row in change.rows.items()
            ]
            known = jnp.where(i == 0, self.weights.known(change), 0.0)
            return known + self.weights.likelihood * reduce(add, parts)

        return chunks.sum(of_chunk, jnp.zeros((), z.dtype))

    def everything(self, active: Array) -> Reader:
        """The same target with all of its rows read, where ``active`` is true."""
        return self._replace(scheme=self._all_rows, active=active)

    @property
    def _all_rows(self) -> Scheme:
        """The scheme that reads all rows, in chunks that suit their size."""
        scheme = full(chunk_of(_CHUNK, self.row_size))
        return scheme.bound(dict.fromkeys(self.plates, 0), self.plates)

    @property
    def gradient_rows(self) -> int:
        """Rows that one :meth:`gradient` reads."""
        return self.scheme.num_rows(self.plates, self.designs)

    def gradient(self, key: Array, z: Array) -> Array:
        """An unbiased estimate of the gradient of the weighted log density.

        It takes one draw of the scheme, or all chunks of the full batch.

        :param key: PRNG key of the rows.
        :param z: a flat position, shape ``(D,)``.
        """
        return self.value_and_gradient(key, z)[1]

    def value_and_gradient(self, key: Array, z: Array) -> tuple[Array, Array]:
        """The weighted log density and its gradient, both from the same rows.

        :param key: PRNG key of the rows.
        :param z: a flat position, shape ``(D,)``.
        """

        def log_density(z: Array, indices: Mapping[str, Array], masks: Any) -> Array:
            terms = self.evaluate(z, indices)
            likelihood = jnp.zeros(())
            for name, rows in terms.rows.items():
                if masks is None:
                    weights = batches[name].weights
                    mean = self.plates[name] * rows.mean()
                    likelihood += mean if weights is None else weights @ rows
                else:
                    likelihood += jnp.where(masks[name], rows, 0.0).sum()
            share = 1.0 if masks is None else masks["known"]
            known = share * self.weights.known(terms)
            return known + self.weights.likelihood * likelihood

        scheme, batches = self.scheme, {}
        if not isinstance(scheme, FullBatch):
            batches = scheme.draw(key, self.plates, self.designs)
            indices = {name: b.indices for name, b in batches.items()}
            return jax.value_and_grad(log_density)(z, indices, None)

        chunks = Chunks.of(self.plates, scheme.widths)

        def of_chunk(i: Array) -> tuple[Array, Array]:
            indices, masks = chunks.at(i)
            known = {"known": (i == 0).astype(z.dtype)}
            return jax.value_and_grad(log_density)(z, indices, masks | known)

        return chunks.sum(of_chunk, (jnp.zeros((), z.dtype), jnp.zeros_like(z)))

    def gradient_variance(
        self, key: Array, number: int, z: Array, mapping: Callable[[Array], Array]
    ) -> Array:
        """The variance of what :meth:`gradient` returns, per coordinate.

        :param key: PRNG key of the rows.
        :param number: the number of gradients, each from a separate batch.
        :param z: a flat position, shape ``(D,)``.
        :param mapping: a linear map that is applied to the gradients first.
        """
        bits, wrap = unwrapped(jax.random.split(key, number))
        # one after the other, to keep memory small
        found = jax.lax.map(lambda bits: mapping(self.gradient(wrap(bits), z)), bits)
        return found.var(0, ddof=1)


def _size(jaxpr: Any) -> int:
    """The number of operations of a program."""
    params = [x for eqn in jaxpr.eqns for x in eqn.params.values()]
    several = [x if isinstance(x, list | tuple) else [x] for x in params]
    inner = (getattr(x, "jaxpr", x) for xs in several for x in xs)
    return len(jaxpr.eqns) + sum(_size(x) for x in inner if hasattr(x, "eqns"))


class _Rounds(NamedTuple):
    stream: Array  # which of the two key streams: the pilot's or the fresh one
    reached: Array  # how often all requested rows were read
    moments: dict[str, Moments]
    needed: dict[str, Array]
    num_rows: Array
    extra: Any
    is_enough: Array  # whether the stopping rule ended the reading


def _all_read(counts: Mapping[str, Array], needed: Mapping[str, Any]) -> Array:
    return jnp.all(jnp.stack([counts[name] >= needed[name] for name in needed]))


def _add_up(parts: list[Estimate]) -> Estimate:
    return reduce(add, parts)
