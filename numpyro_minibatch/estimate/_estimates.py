"""How noisy: numbers that know their own noise, and how rows are turned into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import erfc
from jax.typing import ArrayLike

from numpyro_minibatch._internal import passes
from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch._internal.passes import Chunks
from numpyro_minibatch.batch import Batch, FullBatch, Scheme, full
from numpyro_minibatch.target import Terms

__all__ = [
    "Augmented",
    "Estimate",
    "Exact",
    "Shared",
    "Weights",
    "augmented",
    "exact",
    "penalty_correction",
    "shared",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Estimate:
    """An unbiased, approximately normal estimate of a number, with its variance.

    Estimates obey the algebra of independent random variables: scaling by ``c``
    scales the variance by ``c ** 2``, the variances of a sum add, and adding a
    known number changes no variance.

    :param value: the estimate, any shape.
    :param variance: the estimated variance of ``value``; ``0`` (the default)
        says that ``value`` is exact.
    :param dof: degrees of freedom behind ``variance`` (``m - 1`` for a batch of
        ``m`` rows); infinite (the default) for a variance that is known. A sum of
        estimates has the Welch-Satterthwaite degrees of freedom.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import Estimate
        >>> a = Estimate(1.0, variance=0.5, dof=99.0)
        >>> b = 2.0 * a + 3.0
        >>> float(b.value), float(b.variance), float(b.dof)
        (5.0, 2.0, 99.0)
        >>> total = a + Estimate(-1.0, variance=0.5, dof=99.0)
        >>> float(total.value), float(total.variance), float(total.dof)
        (0.0, 1.0, 198.0)
    """

    value: ArrayLike
    variance: ArrayLike = 0.0
    dof: ArrayLike = float("inf")

    def __add__(self, other: Estimate | ArrayLike) -> Estimate:
        if not isinstance(other, Estimate):
            return Estimate(self.value + other, self.variance, self.dof)
        variance = self.variance + other.variance
        # Welch-Satterthwaite: 1 / dof is the mean of 1 / dof_k with weights
        # variance_k ** 2 / variance ** 2; an exact sum keeps infinitely many.
        share = jnp.square(self.variance) / self.dof
        share += jnp.square(other.variance) / other.dof
        dof = jnp.where(
            share > 0,
            jnp.square(variance) / jnp.where(share > 0, share, 1.0),
            jnp.inf,
        )
        return Estimate(self.value + other.value, variance, dof)

    __radd__ = __add__

    def __mul__(self, factor: ArrayLike) -> Estimate:
        return Estimate(self.value * factor, self.variance * factor**2, self.dof)

    __rmul__ = __mul__


def penalty_correction(log_ratio: Estimate) -> Array:
    """What to subtract from a noisy log ratio so that its exponential is unbiased.

    With ``c`` the variance estimated from ``n = dof + 1`` normal rows, the exact
    correction for ``n`` rows is ``-log 0F1(; (n - 1) / 2; -c * (n - 1) / 4)``: its
    ``E exp(-u)`` over the scaled chi-squared law of ``c`` is ``exp(-variance / 2)``.
    Like the reference this takes the first three terms of its power series,
    ``c / 2 + c ** 2 / (4 (n + 1)) + c ** 3 / (3 (n + 1) (n + 3))``; the whole series
    diverges a little above ``c = n / 4``, where 0F1 is zero. Truncation makes
    ``E exp(-u)`` too large, relatively, by 6e-7 (100 rows), 5e-6 (50) or 7e-4 (10) at
    variance 1 and by 1.5e-4, 1.2e-3 or 0.09 at variance 4.

    :param log_ratio: estimate with its variance and degrees of freedom; infinitely
        many give half the variance.
    :return: the correction, in the units of the log ratio.
    """
    c = jnp.asarray(log_ratio.variance)
    n = log_ratio.dof + 1.0
    # Nested, so that large variances overflow late, in float32 too.
    return c * (0.5 + c / (n + 1.0) * (0.25 + c / (3.0 * (n + 3.0))))


class Weights(NamedTuple):
    """The powers to which a target raises the prior and the likelihood.

    :param prior: power of the prior, ``1`` unless the prior is tempered too.
    :param likelihood: power of the likelihood, ``1 / temperature``.
    :param volume: factor on the log determinants of the maps to the unconstrained
        coordinates: not 1 only for a multiple of the log density.
    """

    prior: ArrayLike = 1.0
    likelihood: ArrayLike = 1.0
    volume: ArrayLike = 1.0

    def known(self, terms: Terms) -> Array:
        """The weighted log density of all but the rows, a scalar."""

        def total(weight: ArrayLike, part: Any) -> Array:
            sums = (jnp.sum(x) for x in jax.tree.leaves(part))
            return jnp.asarray(weight) * sum(sums, jnp.zeros(()))

        return (
            total(self.prior, terms.prior)
            + total(self.likelihood, terms.likelihood)
            + total(self.volume, terms.volume)
        )


class Moments(NamedTuple):
    """Running mean and sum of squared deviations of ``k`` numbers per row.

    Merged by Chan's rule, so that no two large sums are ever subtracted. An infinite
    row makes the mean infinite, once and for all and without any doubt: such a mean
    has no variance.
    """

    seen: Array
    mean: Array
    m2: Array

    @classmethod
    def of(cls, rows: Array, count: Array | None = None) -> Moments:
        """The moments of the first ``count`` columns of ``rows``, shape ``(k, b)``."""
        if count is None:
            mean = rows.mean(-1)
            m2 = jnp.square(rows - mean[:, None]).sum(-1)
            count = jnp.int32(rows.shape[-1])
        else:
            inside = jnp.arange(rows.shape[-1]) < count
            divisor = jnp.maximum(count, 1).astype(rows.dtype)
            mean = jnp.where(inside, rows, 0.0).sum(-1) / divisor
            m2 = jnp.where(inside, jnp.square(rows - mean[:, None]), 0.0).sum(-1)
        return cls(count, mean, jnp.where(jnp.isinf(mean), 0.0, m2))

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of rows together."""
        seen = self.seen + other.seen
        share = other.seen / jnp.maximum(seen, 1).astype(self.mean.dtype)
        delta = other.mean - self.mean
        mean = self.mean + delta * share
        m2 = self.m2 + other.m2 + jnp.square(delta) * self.seen * share
        for part in (other, self):
            infinite = jnp.isinf(part.mean)
            mean = jnp.where(infinite, part.mean, mean)
            m2 = jnp.where(infinite, 0.0, m2)
        return Moments(seen, mean, m2)

    def total(self, size: int, fpc: ArrayLike = 1.0) -> Estimate:
        """The sum over all ``size`` rows, from a scheme with the correction ``fpc``.

        The sample variance of ``m`` of ``N`` normal rows scatters by the factor
        ``1 - m / N`` less than that of independent ones, hence its degrees of freedom.
        """
        count = self.seen.astype(self.mean.dtype)
        free = jnp.maximum(count - 1.0, 1.0)
        variance = float(size) ** 2 * self.m2 / (free * count)
        return Estimate(size * self.mean, variance * fpc, free / jnp.asarray(fpc))


def total(batch: Batch, rows: Array, size: int) -> Estimate:
    """The sums over all rows of ``k`` numbers per row, from the rows of one batch.

    Of weighted rows, every draw from a stratum estimates the stratum's total, and the
    scatter of these few tells the noise. The degrees of freedom are those of Welch and
    Satterthwaite, with unbiased estimates of the strata's squared variances above and
    below the line: with normal strata ``E s ** 4`` is ``1 + 2 / f`` times
    ``sigma ** 4``, where ``f`` are the degrees of freedom of one stratum [1].

    :param batch: the batch.
    :param rows: the numbers, shape ``(k, m)``.
    :param size: the number of rows ``N`` of the plate.
    :return: estimates of shape ``(k,)``. A row that is not finite makes the value not
        finite; an infinite value has no variance.

    **References:**

    .. [1] F. E. Satterthwaite (1946), *An approximate distribution of estimates of
       variance components*, Biometrics Bulletin 2, 110-114.
    """
    if batch.weights is None:
        return Moments.of(rows).total(size, batch.fpc)
    parts = rows * batch.weights
    drawn = parts[:, batch.num_sure :].reshape(len(rows), -1, batch.num_draws)
    value = parts[:, : batch.num_sure].sum(-1) + drawn.sum((-2, -1))
    if not drawn.shape[1]:
        return Estimate(value, jnp.zeros_like(value), jnp.full_like(value, jnp.inf))
    free = batch.num_draws - 1
    spread = jnp.square(drawn - drawn.mean(-1, keepdims=True)).sum(-1)
    variances = spread * (batch.num_draws / free)
    variance = variances.sum(-1)
    # shares, because float32 does not hold the square of a large variance
    shares = variances / jnp.where(variance > 0.0, variance, 1.0)[:, None]
    concentration = jnp.maximum(jnp.square(shares).sum(-1), 1.0 / drawn.shape[1])
    most = drawn.shape[1] * free
    dof = jnp.clip((free + 2.0) / concentration - 2.0, free, most)
    dof = jnp.where(jnp.isnan(dof), most, dof)  # where a row is not finite
    is_infinite = jnp.isinf(value)
    return Estimate(value, jnp.where(is_infinite, 0.0, variance), dof)


class Look(NamedTuple):
    """What a sequential test sees when it is asked whether the rows read are enough.

    :param log_ratio: the estimated log ratio of the target's densities so far.
    :param rows: for each plate the number, the mean and the sum of squared deviations
        of the rows' differences in log likelihood, at temperature 1.
    :param sizes: the number of rows of each plate.
    :param weight: the power of the likelihood, ``1 / temperature``.
    :param number: how many looks this is, from 1.
    """

    log_ratio: Estimate
    rows: Mapping[str, Moments]
    sizes: Mapping[str, int]
    weight: ArrayLike
    number: Array


Rule = Callable[[Look], Array]  # whether the rows read are enough


class Reader(NamedTuple):
    """A target's rows, read through a scheme: what every estimate is made from.

    :param evaluate: ``evaluate(z, indices)``, the target's
        :class:`~numpyro_minibatch.target.Terms` at a flat position.
    :param plates: the number of rows of each data plate.
    :param scheme: how the rows are drawn, bound to these plates.
    :param weights: the powers of the prior and of the likelihood.
    :param designs: of a scheme that weighs rows, the design of each plate.
    :param active: whether a scheme that reads in rounds reads anything; a condition
        that several chains can have each their own of, where a branch would be taken
        for all.
    """

    evaluate: Callable[[Array, Mapping[str, Array]], Terms]
    plates: Mapping[str, int]
    scheme: Scheme
    weights: Weights
    designs: Any = None
    active: ArrayLike = True
    known_rows: int = 0

    def read(
        self,
        key: Array,
        rows_of: Callable[[Mapping[str, Array]], tuple[Any, dict[str, Array]]],
        max_variance: ArrayLike,
    ) -> tuple[Any, Estimate, Array]:
        """Estimate the sums over all rows of numbers that each row has.

        :param key: PRNG key of this decision's rows.
        :param rows_of: ``rows_of(indices)`` gives something to hand back and for
            each plate ``k`` numbers per row, shape ``(k, b)``. It is called at one
            place of the compiled program.
        :param max_variance: the variance of the first of the ``k`` sums, times the
            likelihood's weight squared, at which schemes stop asking for rows.
        :return: what ``rows_of`` handed back, the estimates of shape ``(k,)``, and
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
        """The same, as far as a rule of its own asks for, from a sequential scheme.

        :param key: PRNG key of this decision's rows.
        :param rows_of: as for :meth:`read`.
        :param enough: ``enough(extra, sums, moments, number)`` says, whenever the
            rows asked for have been read, whether they are enough.
        :return: what :meth:`read` returns, and whether the rows were enough, as all
            rows always are.
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
        # only passes over all rows are worth the company of other devices
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
            # cloned: every round reads the next rows of one permutation, on purpose
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
                # the rule, in the words of a scheme: any variance will do, or none
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

    def everything(self, active: Array) -> Reader:
        """The same target, all of its rows read where ``active`` says so."""
        widths = dict.fromkeys(self.plates, 0)
        return self._replace(scheme=full().bound(widths, self.plates), active=active)

    @property
    def gradient_rows(self) -> int:
        """Rows that one :meth:`gradient` reads."""
        return self.scheme.num_rows(self.plates, self.designs)

    def gradient(self, key: Array, z: Array) -> Array:
        """An unbiased estimate of the gradient of the weighted log density.

        One draw of the scheme; for the full batch all its chunks.

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
        :param number: from how many gradients, each of rows of its own.
        :param z: a flat position, shape ``(D,)``.
        :param mapping: a linear map that the gradients go through first.
        """
        bits, wrap = unwrapped(jax.random.split(key, number))
        # one after the other, to keep memory small
        found = jax.lax.map(lambda bits: mapping(self.gradient(wrap(bits), z)), bits)
        return found.var(0, ddof=1)


class _Rounds(NamedTuple):
    stream: Array  # which of the two key streams: the pilot's or the fresh one
    reached: Array  # how often all the rows asked for had been read
    moments: dict[str, Moments]
    needed: dict[str, Array]
    num_rows: Array
    extra: Any
    is_enough: Array  # whether a rule of its own stopped the reading


def _all_read(counts: Mapping[str, Array], needed: Mapping[str, Any]) -> Array:
    return jnp.all(jnp.stack([counts[name] >= needed[name] for name in needed]))


def _add_up(parts: list[Estimate]) -> Estimate:
    return reduce(add, parts)


class Comparison(NamedTuple):
    """What an estimator says of a proposed position against the current one.

    :param log_ratio: the log ratio of the target's densities, the proposal's ratio
        not included, with the noise that the acceptance test must take into account.
    :param noise: the variance to report.
    :param reliable: whether the estimator's own normal approximation holds, and the
        rows read were enough for the test, if it has a rule for that.
    :param log_density: estimates of the target's log density at the current and at
        the proposed position, shape ``(2,)``.
    :param memory: what to keep with the proposed position if it is accepted.
    :param num_rows: rows of data that were read.
    :param ceiling: the acceptance rate that ever smaller steps would tend to, at
        least 0.1; what step-size adaptation measures acceptance by.
    """

    log_ratio: Estimate
    noise: Array
    reliable: Array
    log_density: Array
    memory: Any
    num_rows: Array
    ceiling: Array


def _pair(first: Array, second: Array) -> Array:
    """``jnp.stack``, as a choice: XLA computes what it concatenates number by number.

    :param first: shape ``(m,)``.
    :param second: of the same shape.
    """
    return jnp.where(np.array([True, False])[:, None], first, second)


@dataclass(frozen=True)
class Shared:
    """One batch for both positions: the noise is that of the rows' differences."""

    def init(self, reader: Reader, key: Array, z: Array) -> Any:
        """What is kept with the first position: nothing."""
        return ()

    def compare(
        self,
        reader: Reader,
        key: Array,
        z: Array,
        z_new: Array,
        memory: Any,
        max_variance: ArrayLike,
        rule: Rule | None = None,
    ) -> Comparison:
        """Compare ``z_new`` with ``z`` on the rows that ``key`` draws.

        :param rule: of a sequential test, which rows are enough.
        """

        def rows_of(indices: Mapping[str, Array]) -> tuple[Any, dict[str, Array]]:
            # one by one: of rows that are mapped over both, XLA swaps the operands in
            # the product of many rows and two directions, which is slow
            current, new = (reader.evaluate(x, indices) for x in (z, z_new))
            # float32: per-row and per-term differences first, sums afterwards
            change = jax.tree.map(jnp.subtract, new, current)
            known = [reader.weights.known(part) for part in (change, current)]
            rows = {n: _pair(r, current.rows[n]) for n, r in change.rows.items()}
            return jnp.stack(known), rows

        def ratio(known: Array, sums: Estimate) -> Any:
            density = reader.weights.likelihood * sums + known
            first = jax.tree.map(lambda x: x[0] if jnp.ndim(x) else x, density)
            return density, first

        def enough(known: Array, sums: Estimate, moments: Any, number: Array) -> Array:
            assert rule is not None
            rows = {n: Moments(m.seen, m.mean[0], m.m2[0]) for n, m in moments.items()}
            weight = reader.weights.likelihood
            _, log_ratio = ratio(known, sums)
            return rule(Look(log_ratio, rows, reader.plates, weight, number))

        if rule is None:
            known, sums, num_rows = reader.read(key, rows_of, max_variance)
            is_enough = jnp.array(True)
        else:
            known, sums, num_rows, is_enough = reader.read_until(key, rows_of, enough)
        density, log_ratio = ratio(known, sums)
        log_density = density.value[1] + jnp.stack(
            [jnp.zeros_like(z[0]), log_ratio.value]
        )
        return Comparison(
            log_ratio,
            log_ratio.variance,
            is_enough,
            log_density,
            memory,
            num_rows,
            jnp.ones_like(z[0]),
        )


@dataclass(frozen=True)
class Exact:
    """All rows, by the differences of each: no noise.

    Where they fit in memory the log likelihoods of the current position's rows are
    kept, so that a decision evaluates only the proposed position. For large data both
    positions are evaluated, chunk by chunk.

    :param max_rows: most rows whose log likelihoods are kept.
    """

    max_rows: int = 2**24  # 64 MB of float32

    def init(self, reader: Reader, key: Array, z: Array) -> Terms | tuple[()]:
        """The terms of the first position, of all rows of each plate."""
        if sum(reader.plates.values()) > self.max_rows:
            return ()
        everything = reader.everything(jnp.array(True))
        one_row = {name: jnp.zeros(1, jnp.int32) for name in reader.plates}
        shape = jax.eval_shape(reader.evaluate, z, one_row)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        rows = {
            name: jnp.zeros(reader.plates[name], row.dtype)
            for name, row in shape.rows.items()
        }
        return self._renewed(everything, z, nothing._replace(rows=rows))[0]

    def _renewed(
        self, everything: Reader, z: Array, old: Terms
    ) -> tuple[Terms, Array, Array]:
        """The terms at ``z``, by how much their weighted sum grew, and both sums."""
        weights = everything.weights
        chunks = Chunks.of(everything.plates, everything.scheme.widths)
        before = old._replace(rows={})

        def one_chunk(_: Any, chunk: Any) -> Any:
            i, kept = chunk
            indices, masks = chunks.at(i)
            terms = everything.evaluate(z, indices)
            sums = jnp.zeros(3, z.dtype)
            for name, row in terms.rows.items():
                # float32: differences of rows first, sums afterwards
                three = jnp.stack([row - kept[name], kept[name], row])
                sums += jnp.where(masks[name], three, 0.0).sum(-1)
            return terms._replace(rows={}), (terms.rows, sums)

        count = jnp.arange(chunks.number, dtype=jnp.int32)
        kept = {name: chunks.cut(name, row) for name, row in old.rows.items()}
        new, (rows, sums) = passes.scan_shared(one_chunk, before, (count, kept))
        rows = {name: chunks.joined(name, row) for name, row in rows.items()}
        change = jax.tree.map(jnp.subtract, new, before)
        known = jnp.stack([weights.known(part) for part in (change, before, new)])
        total = known + weights.likelihood * sums.sum(0)
        return new._replace(rows=rows), total[0], total[1:]

    def compare(
        self,
        reader: Reader,
        key: Array,
        z: Array,
        z_new: Array,
        memory: Terms | tuple[()],
        max_variance: ArrayLike,
        rule: Rule | None = None,
    ) -> Comparison:
        """Compare ``z_new`` with ``z`` on all rows."""
        everything = reader.everything(jnp.array(True))
        if not isinstance(memory, Terms):
            return Shared().compare(everything, key, z, z_new, (), max_variance)
        new, change, both = self._renewed(everything, z_new, memory)
        zero = jnp.zeros_like(change)
        return Comparison(
            Estimate(change, zero),
            zero,
            jnp.array(True),
            both,
            new,
            jnp.int32(sum(reader.plates.values())),
            jnp.ones_like(change),
        )


class Remembered(NamedTuple):
    """The log weight of a position in the augmented space of the MINT proof."""

    log_weight: Array
    log_density: Array
    variance: Array


@dataclass(frozen=True)
class Augmented:
    """A fresh batch for the proposed position; the current one keeps its estimate.

    The chain then lives on pairs of a position and its batch [1]: one half of the
    evaluations of :class:`Shared`, and its law is known exactly. But the estimate
    that is kept is one of the lucky ones, so the chain freezes unless the noise of a
    log density, not only of a difference, is about one: ``T >= N sd / sqrt(m)``.

    :param penalty: subtract from each log weight the penalty that makes the mean of
        its exponential right under normality; without it the target gains half the
        variance of its own estimate, as in the paper.
    :param max_variance: the largest variance of a log density that is reliable.

    **References:**

    .. [1] Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 3.2.
    """

    penalty: bool = True
    max_variance: float = 1.0

    def init(self, reader: Reader, key: Array, z: Array) -> Remembered:
        """The first position's log weight, from one batch."""
        return self._weigh(reader, key, z)[0]

    def _weigh(self, reader: Reader, key: Array, z: Array) -> tuple[Remembered, Array]:
        def rows_of(indices: Mapping[str, Array]) -> tuple[Any, dict[str, Array]]:
            terms = reader.evaluate(z, indices)
            rows = {name: row[None] for name, row in terms.rows.items()}
            return reader.weights.known(terms), rows

        known, sums, num_rows = reader.read(key, rows_of, self.max_variance)
        first = jax.tree.map(lambda x: x[0] if jnp.ndim(x) else x, sums)
        density = reader.weights.likelihood * first + known
        weight = density.value
        if self.penalty:
            weight = weight - penalty_correction(density)
        return Remembered(weight, density.value, density.variance), num_rows

    def compare(
        self,
        reader: Reader,
        key: Array,
        z: Array,
        z_new: Array,
        memory: Remembered,
        max_variance: ArrayLike,
        rule: Rule | None = None,
    ) -> Comparison:
        """Compare the kept weight of ``z`` with a new one of ``z_new``.

        A sequential test's ``rule`` is not for kept weights: kernels refuse both.
        """
        new, num_rows = self._weigh(reader, key, z_new)
        noise = new.variance + memory.variance
        return Comparison(
            # exact in the augmented space: nothing is left for the test to correct
            Estimate(new.log_weight - memory.log_weight),
            noise,
            jnp.maximum(new.variance, memory.variance) <= self.max_variance,
            jnp.stack([memory.log_density, new.log_density]),
            new,
            num_rows,
            # a kept weight is tilted upwards by its own variance: 2 Phi(-s / sqrt 2)
            # with s ** 2 the mean of both variances
            jnp.maximum(erfc(jnp.sqrt(noise) / (2.0 * math.sqrt(2.0))), 0.1),
        )


def shared() -> Shared:
    """Both positions on one batch; the default.

    The noise of the log ratio is that of the rows' differences, small for small
    moves, and the current position never keeps a lucky estimate.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import estimate
        >>> estimate.shared() == estimate.shared()
        True
    """
    return Shared()


def exact(max_rows: int = 2**24) -> Exact:
    """All rows for both positions, those of the current one from memory.

    :param max_rows: most rows whose log likelihoods are kept from one decision to the
        next, four bytes each in float32; of larger data both positions are evaluated.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import estimate
        >>> estimate.exact() == estimate.exact()
        True
    """
    return Exact(max_rows)


def augmented(penalty: bool = True, max_variance: float = 1.0) -> Augmented:
    """Keep the current position's estimate, draw a fresh batch for the proposal.

    :param penalty: correct each estimate for its noise, see :class:`Augmented`.
    :param max_variance: the largest variance of a log density that is reliable.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import estimate
        >>> estimate.augmented(penalty=False).penalty
        False
    """
    return Augmented(penalty, max_variance)
