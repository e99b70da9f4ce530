"""One accept/reject step: propose, compare on a batch, accept or reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtr
from jax.typing import ArrayLike

from numpyro_minibatch.accept import AcceptanceTest
from numpyro_minibatch.batch import FullBatch
from numpyro_minibatch.estimate import (
    Augmented,
    Comparison,
    Estimate,
    Exact,
    Reader,
    Shared,
)
from numpyro_minibatch.proposal import Proposal, ProposalContext, Proposed

__all__ = ["Carry", "Checks", "MetropolisStep", "Readers", "Step"]


class Checks(NamedTuple):
    """Sums over the decisions that were also made on all rows."""

    number: Array
    error: Array  # squared errors of the log ratio
    z: Array  # the same, relative to the variance that the decision assumed
    change: Array  # of the acceptance probability between equally likely positions

    @classmethod
    def none(cls, like: Array) -> Checks:
        """No decision.

        :param like: a number of the type of the sums.
        """
        zero = jnp.zeros_like(like)
        return cls(zero, zero, zero, zero)

    @classmethod
    def one(cls, error: Array, variance: Array) -> Checks:
        """A single decision.

        The penalty test accepts an estimate ``x`` with probability
        ``min(1, exp(x - variance / 2))``. The change is that for this error, taken with
        either sign, from the mean over normal errors, which is
        ``2 * Phi(-sqrt(variance) / 2)``. Its mean over decisions is about zero if the
        variances are right, and a single large error counts for one decision.

        :param error: of the log ratio.
        :param variance: the variance that the decision assumed.
        """
        # differences from rounding are not noise
        relative = error**2 / jnp.maximum(variance, jnp.finfo(variance.dtype).eps)
        signed = jnp.stack([error, -error]) - 0.5 * variance
        accepted = jnp.exp(jnp.minimum(signed, 0.0)).mean()
        change = accepted - 2.0 * ndtr(-0.5 * jnp.sqrt(variance))
        return cls(jnp.ones_like(error), error**2, relative, change)


class Carry(NamedTuple):
    """The values that change from one inner step to the next."""

    rng_key: Array
    z: Array
    memory: Any
    lp_estimate: Array


class Step(NamedTuple):
    """The results of an inner step."""

    accept_prob: Array
    mobility: Array  # the same, relative to the highest rate that the noise allows
    lp_estimate: Array
    log_ratio: Array
    log_ratio_variance: Array
    reliable: Array
    num_rows: Array
    checks: Checks
    jumps: tuple[Array, ...] = ()  # whether another mode was tried, and reached


class Readers(NamedTuple):
    """Ways to read the rows of a target.

    :param all: the reader that everything else uses.
    :param residual: with a surrogate, reads the residual of the target over it.
    :param plain: with a surrogate whose residuals are differences from polynomials,
        reads the log likelihoods themselves. The polynomials of all rows have a known
        sum, so that a decision on all rows needs no derivatives.
    """

    all: Reader
    residual: Reader | None
    plain: Reader | None


@dataclass(frozen=True)
class MetropolisStep:
    """The steps of a draw, each of which proposes a move and accepts or rejects it.

    :param proposal: the proposal.
    :param estimate: the estimator of the log ratio.
    :param acceptance: the test.
    :param target_accept_prob: the rate that moves count with which tune no step size.
    :param fallback: whether steps that are too noisy for the test are repeated on all
        rows.
    :param checks: whether some steps are repeated on all rows to check the noise.
    :param readers: the ways to read rows.
    :param context: the context of proposals.
    :param unravel: from a flat position to the latent sites.
    :param row_keys: from the key of a step's rows to one for each of its batches.
    :param rows_dtype: the type that counts rows.
    """

    proposal: Proposal
    estimate: Shared | Augmented | Exact
    acceptance: AcceptanceTest
    target_accept_prob: float
    fallback: bool
    checks: bool
    readers: Readers
    context: ProposalContext
    unravel: Callable[[Array], Any]
    row_keys: Callable[[Array], tuple[Array, ...]]
    rows_dtype: Any

    def __call__(
        self, carry: Carry, step_size: Array, batch_key: Array, is_check: Array
    ) -> tuple[Carry, Step]:
        """Propose, compare on a batch, accept or reject.

        :param carry: what the step before left.
        :param step_size: the step size.
        :param batch_key: the key of the step's rows.
        :param is_check: whether to repeat the step on all rows.
        """
        rng_key, z, memory, lp = carry
        rng_key, key_proposal, key_accept = jax.random.split(rng_key, 3)
        gradient_key = None
        if self.proposal.uses_gradient:
            batch_key, gradient_key = self.row_keys(batch_key)
        proposed, proposal_rows = self._propose(
            key_proposal, gradient_key, z, step_size
        )
        judge, known, log_q_ratio = self._judge(proposed)
        test, plain = self.acceptance, self.readers.plain
        move = self.unravel(z), self.unravel(proposed.z)
        rule = test.rule(key_accept, log_q_ratio, move)

        def compare(everything: Reader | None = None) -> Comparison:
            seen = self.estimate.compare(
                everything or judge,
                # cloned: all rows, or the batch that a branch did not draw
                jax.random.clone(batch_key),
                z,
                proposed.z,
                memory,
                test.max_variance,
                None if everything else rule,
            )
            if known is None:
                return seen
            return seen._replace(log_density=seen.log_density + known)

        def exact_log_ratio() -> Array:
            whole = (plain or judge).difference(z, proposed.z)
            if known is None or plain is None:
                return whole
            return whole - (known[1] - known[0])  # the surrogate has decided on that

        if judge.known_rows < sum(self.readers.all.plates.values()):
            # if not, the rows that are known are the batch
            rows = judge.known_rows * jnp.asarray(proposed.moved)
            proposal_rows = proposal_rows + rows
        if self.proposal.uses_surrogate:
            # a function of its own, which is traced once for its result and its shape
            once = jax.jit(compare)
            # a proposal that stays needs no rows
            seen = jax.lax.cond(proposed.moved, once, lambda: _stay(once, memory, lp))
        else:
            seen = compare()
        seen, checks = self._checked(
            judge, exact_log_ratio, seen, is_check, proposed.moved
        )
        seen = self._without_noise(judge, compare, seen)
        return self._accept_or_reject(
            key_accept,
            carry._replace(rng_key=rng_key),
            proposed,
            seen,
            seen.log_ratio + log_q_ratio,
            proposal_rows,
            checks,
        )

    def _propose(
        self, key: Array, gradient_key: Array | None, z: Array, step_size: Array
    ) -> tuple[Proposed, ArrayLike]:
        """A move, and the rows that it reads."""
        reader = self.readers.all
        rows: ArrayLike = self.context.num_rows * self.proposal.evaluations(
            self.context
        )
        if gradient_key is not None:
            rows = rows + reader.gradient_rows

        def gradient(position: Array) -> Array:
            assert gradient_key is not None
            # cloned deliberately: both ends of a Langevin step read one batch
            return reader.gradient(jax.random.clone(gradient_key), position)

        context = self.context._replace(gradient=gradient)
        return self.proposal.propose(key, z, step_size, context), rows

    def _judge(self, proposed: Proposed) -> tuple[Reader, Any, Array]:
        """The reader of the log ratio, its known part, and the proposal's ratio."""
        residual = self.readers.residual
        if residual is None or proposed.log_surrogate is None:
            return self.readers.all, None, proposed.log_q_ratio
        # the surrogate's part of the log ratio and the proposal's ratio cancel
        nothing = jnp.zeros_like(proposed.log_q_ratio)
        return residual, proposed.log_surrogate, nothing

    def _checked(
        self,
        judge: Reader,
        exact_log_ratio: Callable[[], Array],
        seen: Comparison,
        is_check: Array,
        moved: ArrayLike,
    ) -> tuple[Comparison, Checks]:
        """The error of the log ratio, from all rows, if the step is checked."""
        noise = jnp.asarray(seen.log_ratio.variance)
        if not self.checks:
            return seen, Checks.none(noise)

        def on_all_rows() -> Checks:
            error = seen.log_ratio.value - exact_log_ratio()
            return Checks.one(jnp.asarray(error), noise)

        # a branch, since vectorised chains check the same draws
        checks = jax.lax.cond(is_check, on_all_rows, lambda: Checks.none(noise))
        is_check = is_check & moved
        checks = jax.tree.map(lambda x: jnp.where(is_check, x, 0.0), checks)
        number = jnp.where(is_check, sum(judge.plates.values()), 0)
        return seen._replace(num_rows=seen.num_rows + number), checks

    def _without_noise(
        self, judge: Reader, compare: Callable, seen: Comparison
    ) -> Comparison:
        """The comparison on all rows, if the batch is too noisy for the test."""
        if not self.fallback or isinstance(judge.scheme, FullBatch):
            return seen
        noise = jnp.asarray(seen.log_ratio.variance)
        zero = jnp.zeros_like(noise)
        # each chain has a condition of its own: all chains run the branch, and read
        # only the rows that are active for them
        is_noisy = ~(noise <= self.acceptance.max_variance)
        exact = jax.lax.cond(
            is_noisy,
            lambda: compare(judge.everything(is_noisy)),
            lambda: _stay(compare, seen.memory, seen.log_density[0]),
        )
        return jax.tree.map(
            lambda all_rows, few: jnp.where(is_noisy, all_rows, few),
            exact._replace(log_ratio=exact.log_ratio + Estimate(zero, zero)),
            seen,
        )._replace(num_rows=seen.num_rows + exact.num_rows)

    def _accept_or_reject(
        self,
        key: Array,
        carry: Carry,
        proposed: Proposed,
        seen: Comparison,
        log_ratio: Estimate,
        proposal_rows: ArrayLike,
        checks: Checks,
    ) -> tuple[Carry, Step]:
        """The position after the step, and its results."""
        decision = self.acceptance(key, log_ratio)
        # a density that overflows would be accepted and never left again; the
        # estimate is NaN where an impossible start is left, which is fine
        fine = seen.log_density[1] != jnp.inf
        accept = decision.accept & fine
        moves = jnp.asarray(proposed.moved) & fine
        accept_prob = jnp.where(moves, decision.accept_prob, 0.0)
        mobility = accept_prob / seen.ceiling
        z, memory, lp = jax.tree.map(
            lambda new, old: jnp.where(accept, new, old),
            (proposed.z, seen.memory, seen.log_density[1]),
            (carry.z, carry.memory, seen.log_density[0]),
        )
        jumps: tuple[Array, ...] = ()
        if proposed.jump is not None:
            reached = proposed.jump & jnp.asarray(proposed.moved) & accept
            jumps = proposed.jump, reached
        return Carry(carry.rng_key, z, memory, lp), Step(
            accept_prob=accept_prob,
            mobility=jnp.where(proposed.tunes, mobility, self.target_accept_prob),
            lp_estimate=lp,
            log_ratio=jnp.asarray(log_ratio.value),
            log_ratio_variance=seen.noise,
            reliable=(decision.reliable & seen.reliable).astype(lp.dtype),
            num_rows=(seen.num_rows + proposal_rows).astype(self.rows_dtype),
            checks=checks,
            jumps=jumps,
        )


def _stay(compare: Callable[[], Comparison], memory: Any, lp: Array) -> Comparison:
    """A comparison of a position with itself."""
    shapes = jax.eval_shape(compare)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return nothing._replace(
        reliable=jnp.array(True),
        log_density=jnp.stack([lp, lp]).astype(nothing.log_density.dtype),
        memory=memory,
        ceiling=jnp.ones_like(nothing.ceiling),
    )
