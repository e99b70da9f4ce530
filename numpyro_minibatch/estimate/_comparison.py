"""Estimates of the log ratio of two positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import erfc
from jax.typing import ArrayLike

from numpyro_minibatch._internal import passes
from numpyro_minibatch._internal.passes import Chunks
from numpyro_minibatch.estimate._number import (
    Estimate,
    Moments,
    penalty_correction,
)
from numpyro_minibatch.estimate._reader import Reader, SequentialEvidence, StoppingRule
from numpyro_minibatch.target import Terms

__all__ = ["Augmented", "Exact", "Shared", "augmented", "exact", "shared"]


class Comparison(NamedTuple):
    """The comparison of a proposed position with the current one.

    :param log_ratio: the log ratio of the target's densities, the proposal's ratio
        not included, with the noise that the acceptance test must take into account.
    :param noise: the variance to report.
    :param reliable: whether the estimator's own normal approximation holds, and the
        rows read were enough for the test, if it has a stopping rule.
    :param log_density: estimates of the target's log density at the current and at
        the proposed position, shape ``(2,)``.
    :param memory: what to keep with the proposed position if it is accepted.
    :param num_rows: rows of data that were read.
    :param ceiling: the acceptance rate that ever smaller steps would tend to, at
        least 0.1. Step-size adaptation compares acceptance rates with it.
    """

    log_ratio: Estimate
    noise: Array
    reliable: Array
    log_density: Array
    memory: Any
    num_rows: Array
    ceiling: Array


def _pair(first: Array, second: Array) -> Array:
    """``jnp.stack`` by ``where``: XLA computes concatenated values one by one.

    :param first: shape ``(m,)``.
    :param second: of the same shape.
    """
    return jnp.where(np.array([True, False])[:, None], first, second)


@dataclass(frozen=True)
class Shared:
    """One batch for both positions, so that only rows' differences are noisy."""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the estimator that results record."""
        return {"keeps_estimate": False, "exact_decisions": False}

    def init(self, reader: Reader, key: Array, z: Array) -> Any:
        """The memory of the first position, which is empty."""
        return ()

    def compare(
        self,
        reader: Reader,
        key: Array,
        z: Array,
        z_new: Array,
        memory: Any,
        max_variance: ArrayLike,
        rule: StoppingRule | None = None,
    ) -> Comparison:
        """Compare ``z_new`` with ``z`` on the rows that ``key`` draws.

        :param rule: the stopping rule of a sequential test.
        """

        def rows_of(indices: Mapping[str, Array]) -> tuple[Any, dict[str, Array]]:
            current, new = reader.evaluate_both(z, z_new, indices)
            # subtract per row and per term before summing, for the sake of float32
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
            return rule(
                SequentialEvidence(log_ratio, rows, reader.plates, weight, number)
            )

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
    """All rows, by the difference of each, without noise.

    The log likelihoods of the current position's rows are kept where they fit in
    memory, so that a decision evaluates only the proposed position. For larger data
    both positions are evaluated, chunk by chunk.

    :param max_rows: the largest number of rows whose log likelihoods are kept.
    """

    max_rows: int = 2**24  # 64 MB of float32

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the estimator that results record."""
        return {"keeps_estimate": False, "exact_decisions": True}

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
        """The terms at ``z``, the change of their weighted sum, and both sums."""
        weights = everything.weights
        chunks = Chunks.of(everything.plates, everything.scheme.widths)
        before = old._replace(rows={})

        def one_chunk(_: Any, chunk: Any) -> Any:
            i, kept = chunk
            indices, masks = chunks.at(i)
            terms = everything.evaluate(z, indices)
            sums = jnp.zeros(3, z.dtype)
            for name, row in terms.rows.items():
                # subtract per row before summing, for the sake of float32
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
        rule: StoppingRule | None = None,
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

    The state of the chain is then a position with its batch [1]. A comparison costs
    half of the evaluations of :class:`Shared`, and the stationary distribution is known
    exactly. But the estimate that is kept tends to be too high, so the chain freezes
    unless the noise of a log density, not only of a difference, is about one:
    ``T >= N sd / sqrt(m)``.

    :param penalty: subtract from each log weight the penalty that makes its exponential
        unbiased under normality. Without it half the variance of the estimate is added
        to the log target, as in the paper.
    :param max_variance: the largest variance of a log density that is reliable.

    **References:**

    .. [1] Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 3.2.
    """

    penalty: bool = True
    max_variance: float = 1.0

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the estimator that results record."""
        return {
            "keeps_estimate": True,
            "exact_decisions": False,
            "max_variance": self.max_variance,
        }

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
        rule: StoppingRule | None = None,
    ) -> Comparison:
        """Compare the kept weight of ``z`` with a new one of ``z_new``.

        Kept weights do not work with the ``rule`` of a sequential test: kernels refuse
        the combination.
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
            # a kept weight is biased upwards by its own variance: the rate is
            # 2 Phi(-s / sqrt 2), with s ** 2 the mean of both variances
            jnp.maximum(erfc(jnp.sqrt(noise) / (2.0 * math.sqrt(2.0))), 0.1),
        )


def shared() -> Shared:
    """Both positions on one batch; the default.

    The noise of the log ratio is that of the rows' differences, which is small for
    small moves, and no estimate is kept from one decision to the next.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import estimate
        >>> estimate.shared() == estimate.shared()
        True
    """
    return Shared()


def exact(max_rows: int = 2**24) -> Exact:
    """All rows for both positions, those of the current one from memory.

    :param max_rows: the largest number of rows whose log likelihoods are kept from one
        decision to the next, four bytes each in float32; with more rows, both positions
        are evaluated.

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
