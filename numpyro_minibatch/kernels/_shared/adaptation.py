"""Step size, mass matrix and trajectory length, adapted in warmup and then fixed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.hmc_util import dual_averaging, welford_covariance

from numpyro_minibatch.accept import Decision

__all__ = ["MOST_STEPS", "AdaptState", "Adaptation", "AdaptedKernel", "advanced"]

# NumPyro's defaults suit an acceptance probability that is averaged over a trajectory.
# A single accept/reject step is several times noisier, and at gamma = 0.05 it moves the
# logarithm of the step size by more than one at every draw.
_GAMMA = 0.5

# The longest trajectory, in steps, as in NUTS.
MOST_STEPS = 1000

# A trajectory of length t on a standard normal has turned back if t > pi. Lengths are
# drawn uniformly from (0, T): with T = pi the autocorrelation of the slowest direction,
# sin(T) / T, is zero. The mean sign of `displacement . momentum` is then 1 in many
# dimensions, and 1 / 2 in one; a mean of 0.55 has T between 0.9 and 1.3 times pi.
_MEAN_DIRECTION = 0.55
_FIRST_STEPS = 10
_FEWEST_SHORT = 20  # draws of the descent, if a fifth of the warmup is longer
# so much shorter is the first step: a longer one could overshoot to a remote place
_FIRST_STEP = 1e-4
_LENGTHS = 618  # seed of the lengths
_SHORT, _SHORT_SHARE = 1 / 3, 1 / 8  # steps that are shorter, and how often

# With fewer steps per trajectory, the step size would suit only the bulk. All
# trajectories would be rejected in the tail of a skewed posterior if the curvature is
# larger there. With as few steps as the acceptance rate allowed, the square of the rate
# of six exponential rows had 37 effective draws in 4,000; now it has 1,600.
_FEWEST_STEPS = 6


class AdaptState(NamedTuple):
    """The adapted settings, and the running sums that they are computed from.

    - **step_size** - step size of the next draw, in whitened coordinates.
    - **inverse_mass_matrix** - estimated covariance of the position, shape ``(D, D)``,
      or its diagonal, ``(D,)``.
    - **root** - ``C.T`` with ``C @ C.T`` the inverse mass matrix, or its diagonal.
    - **step_size_state** - state of dual averaging.
    - **covariance_state** - state of Welford's running covariance.
    - **length** - the longest trajectory, in whitened coordinates, or nothing.
    - **length_state** - state of its dual averaging.
    """

    step_size: Array
    inverse_mass_matrix: Array
    root: Array
    step_size_state: Any
    covariance_state: Any
    length: Any = ()
    length_state: Any = ()

    def with_root(self, root: Array) -> AdaptState:
        """The state with the mass matrix of a known covariance, ``root.T @ root``."""
        return self._replace(root=root, inverse_mass_matrix=root.T @ root)


class Adaptation(NamedTuple):
    """Adapt a step size to a target acceptance rate, and a mass matrix to the draws.

    The warmup has three parts, as in NumPyro's HMC: a tenth in which only the step
    size adapts, windows of doubling length each of which ends with a new mass matrix,
    and a last third for the step size alone. The last third is longer than HMC's
    because a random walk's acceptance is noisier.

    If the length of trajectories adapts, the warmup begins with a descent, of one step
    per draw, from a step size that is too small. Far from the mode a trajectory
    conserves the energy only with tiny steps, or gains so much kinetic energy that it
    ends in a remote place, where a scale is zero or infinite and no force leads back.

    :param num_warmup: number of warmup draws.
    :param target_accept_prob: target acceptance rate.
    :param adapt_step_size: whether the step size adapts.
    :param adapt_mass_matrix: whether the mass matrix adapts.
    :param dense_mass: full mass matrix rather than a diagonal one.
    :param adapt_length: whether the length of a trajectory adapts.
    """

    num_warmup: int
    target_accept_prob: float
    adapt_step_size: bool
    adapt_mass_matrix: bool
    dense_mass: bool
    adapt_length: bool = False

    def init(self, z: Array, step_size: float | Array) -> AdaptState:
        """The state before the first draw.

        :param z: flat position, shape ``(D,)``.
        :param step_size: initial step size.
        """
        step = jnp.asarray(step_size, z.dtype)
        length = _FIRST_STEPS * step
        # with few draws a step that can grow back in them
        step = step * _FIRST_STEP ** min(1.0, self._first / _FEWEST_SHORT)
        ones = jnp.ones_like(z)
        matrix = jnp.diag(ones) if self.dense_mass else ones
        init_step, _ = dual_averaging(gamma=_GAMMA)
        init_covariance, _, _ = welford_covariance(diagonal=not self.dense_mass)
        state = AdaptState(
            step, matrix, matrix, init_step(jnp.log(step)), init_covariance(z.size)
        )
        if not self.adapt_length:
            return state
        return state._replace(length=length, length_state=init_step(jnp.log(length)))

    @property
    def active(self) -> bool:
        """Whether there is anything to adapt."""
        return bool(
            self.num_warmup and (self.adapt_step_size or self.adapt_mass_matrix)
        )

    @property
    def window_ends(self) -> np.ndarray:
        """The first draw of the windows, and the last one of each."""
        start = max(self.num_warmup // 10, self._first)
        stop = self.num_warmup - self.num_warmup // 3
        ends, width = [start - 1], max(25, start)
        while stop - ends[-1] - 1 >= 3 * width:  # leave room for a longer last window
            ends.append(ends[-1] + width)
            width *= 2
        return np.array([*ends, stop - 1])

    @property
    def _first(self) -> int:
        """The number of draws with trajectories of one step."""
        if not self.adapt_length:
            return 0
        return min(max(_FEWEST_SHORT, self.num_warmup // 20), self.num_warmup // 5)

    def descends(self, t: Array, gain: Array, decision: Decision) -> Decision:
        """The decision of a draw of the first part, or else the usual one.

        The gain alone decides, as in a line search: far from the mode a step that is
        long enough to arrive there does not conserve the energy.

        :param t: the draw's number.
        :param gain: the log density after its step minus that before.
        :param decision: the usual decision.
        """
        early = t < self._first
        return decision._replace(
            accept=jnp.where(early, gain > -1.0, decision.accept),
            accept_prob=jnp.where(
                early,
                jnp.where(jnp.isnan(gain), 0.0, jnp.exp(jnp.minimum(gain, 0.0))),
                decision.accept_prob,
            ),
        )

    def step_size(self, t: Array, state: AdaptState) -> Array:
        """The step size of a draw: in one of eight draws, a third of the adapted one.

        Where the curvature is larger than in the bulk, as in a tail of a skewed
        posterior, the adapted step may be rejected again and again. A shorter one now
        and then ends such a stay, and does not depend on the position.

        :param t: the draw's number.
        :param state: the step size and the length.
        """
        if not self.adapt_length:
            return state.step_size
        return jnp.where(self._is_short(t), _SHORT, 1.0) * state.step_size

    def _is_short(self, t: Array) -> Array:
        """Whether a draw takes short steps; not in the descent."""
        key = jax.random.fold_in(jax.random.key(_LENGTHS + 1), t)
        return (t >= self._first) & jax.random.bernoulli(key, _SHORT_SHARE)

    def num_steps(self, t: Array, state: AdaptState) -> Array:
        """The steps of one trajectory, of a length between 0 and the longest.

        Random lengths that do not depend on the position, so that each trajectory is
        reversible. They are the same in all chains, because vectorised chains wait for
        the longest one. A low-discrepancy sequence would have autocorrelations from
        which effective sample sizes come out too large, by 1.3 to 1.8 for squares.

        :param t: the draw's number.
        :param state: the step size and the length.
        """
        key = jax.random.fold_in(jax.random.key(_LENGTHS), t)
        share = jax.random.uniform(key, dtype=state.length.dtype)
        number = jnp.ceil(share * state.length / self.step_size(t, state))
        number = jnp.where(t < self._first, 1, number)
        return jnp.clip(number, 1, MOST_STEPS).astype(jnp.int32)

    def update(
        self,
        t: Array,
        accept_prob: Array,
        z: Array,
        state: AdaptState,
        progress: Array | None = None,
    ) -> AdaptState:
        """Adapt to one draw.

        :param t: the draw's number in the warmup, from 0.
        :param accept_prob: its acceptance probability.
        :param z: the position after it, shape ``(D,)``.
        :param state: the state before it.
        :param progress: for a trajectory, the inner product of its displacement and its
            last momentum, which is half the growth rate of the squared displacement.
        """
        _, update_step = dual_averaging(gamma=_GAMMA)
        if self.adapt_length:
            state = jax.lax.cond(
                t < self._first,
                self._with_first_length,
                lambda s: self._with_length(t, accept_prob, progress, s),
                state,
            )
        if self.adapt_step_size:
            excess = accept_prob - self.target_accept_prob
            if self.adapt_length:
                # a short step says nothing of the adapted one
                excess = jnp.where(self._is_short(t), 0.0, excess)
            step_state = update_step(-excess, state.step_size_state)
            last = t == self.num_warmup - 1
            log_step = jnp.where(last, step_state[1], step_state[0])
            if self._first:
                # the first guess may be wrong by orders of magnitude
                early, init_step = t < self._first, dual_averaging(gamma=_GAMMA)[0]
                # as fast upwards, where the force has become smaller, as downwards
                up = self.target_accept_prob / (1.0 - self.target_accept_prob)
                change = jnp.where(excess > 0, up * excess, excess)
                searched = jnp.log(state.step_size) + change
                log_step = jnp.where(early, searched, log_step)
                step_state = jax.tree.map(
                    lambda new, old: jnp.where(early, new, old),
                    init_step(searched),
                    step_state,
                )
            finite = jnp.finfo(z.dtype)
            longest: Any = finite.max
            if self.adapt_length:
                longest = jnp.where(
                    t < self._first, longest, state.length / _FEWEST_STEPS
                )
            state = state._replace(
                step_size=jnp.clip(jnp.exp(log_step), finite.tiny, longest),
                step_size_state=step_state,
            )
        if not self.adapt_mass_matrix:
            return state
        ends = self.window_ends
        _, update_covariance, _ = welford_covariance(diagonal=not self.dense_mass)
        sampled = update_covariance(z, state.covariance_state)
        inside = (t > ends[0]) & (t <= ends[-1])
        state = state._replace(
            covariance_state=jax.tree.map(
                lambda new, old: jnp.where(inside, new, old),
                sampled,
                state.covariance_state,
            )
        )
        at_end = (t == jnp.asarray(ends[1:])).any()
        return jax.lax.cond(at_end, self._end_window, lambda s: s, state)

    def _with_first_length(self, state: AdaptState) -> AdaptState:
        """The length in proportion to the step size."""
        init_length, _ = dual_averaging(gamma=_GAMMA)
        length = _FIRST_STEPS * state.step_size
        state = state._replace(length=length)
        return state._replace(length_state=init_length(jnp.log(length)))

    def _with_length(
        self, t: Array, accept_prob: Array, progress: Any, state: AdaptState
    ) -> AdaptState:
        """Adapt the length, so that trajectories end about where they turn back."""
        _, update_length = dual_averaging(gamma=_GAMMA)
        # a rejected trajectory carries little information, a divergent one none
        known = jnp.isfinite(progress) & jnp.isfinite(accept_prob)
        weight = jnp.where(known, accept_prob, 0.0)
        excess = _MEAN_DIRECTION - jnp.where(known, jnp.sign(progress), 0.0)
        length_state = update_length(weight * excess, state.length_state)
        last = t == self.num_warmup - 1
        log_length = jnp.where(last, length_state[1], length_state[0])
        log_step = jnp.log(state.step_size)
        inside = jnp.clip(log_length, log_step, log_step + math.log(MOST_STEPS))
        return state._replace(length=jnp.exp(inside), length_state=length_state)

    def _end_window(self, state: AdaptState) -> AdaptState:
        """A new mass matrix, and a step size that keeps the steps as long as before."""
        _, m2, count = state.covariance_state
        covariance = m2 / jnp.maximum(count - 1, 1)
        variances = jnp.diag(covariance) if self.dense_mass else covariance
        # shrunk towards an isotropic matrix of a thousandth of the mean variance, as
        # in NumPyro but relative to the scale of the posterior
        typical = variances.mean()
        floor = 1e-3 * typical * (jnp.eye(variances.size) if self.dense_mass else 1.0)
        matrix = (count * covariance + 5.0 * floor) / (count + 5.0)
        root = jnp.linalg.cholesky(matrix).T if self.dense_mass else jnp.sqrt(matrix)
        # a chain that never moved in the window gives no covariance
        known = (typical > 0) & jnp.isfinite(root).all()
        matrix = jnp.where(known, matrix, state.inverse_mass_matrix)
        root = jnp.where(known, root, state.root)

        def log_scale(root: Array) -> Array:
            diagonal = jnp.diag(root) if self.dense_mass else root
            return jnp.log(diagonal).mean()

        change = log_scale(state.root) - log_scale(root)
        log_step = jnp.log(state.step_size) + change
        init_step, _ = dual_averaging(gamma=_GAMMA)
        init_covariance, _, _ = welford_covariance(diagonal=not self.dense_mass)
        if self.adapt_length:
            log_length = jnp.log(state.length) + change
            state = state._replace(
                length=jnp.exp(log_length), length_state=init_step(log_length)
            )
        return state._replace(
            step_size=jnp.exp(log_step) if self.adapt_step_size else state.step_size,
            inverse_mass_matrix=matrix,
            root=root,
            step_size_state=init_step(log_step),
            covariance_state=init_covariance(variances.size),
        )


def advanced(
    adaptation: Adaptation,
    state: Any,
    z: Array,
    accept_prob: Array,
    progress: Array | None = None,
) -> Any:
    """Adapt the settings of a kernel in warmup, and count its draw.

    :param adaptation: what adapts.
    :param state: the kernel's state after the draw, with the previous ``adapt_state``.
    :param z: the position, shape ``(D,)``.
    :param accept_prob: the acceptance probability to adapt to.
    :param progress: see :meth:`Adaptation.update`.
    """
    adapt_state = state.adapt_state
    step_size = adaptation.step_size(state.i, adapt_state)
    if adaptation.active:
        adapt_state = jax.lax.cond(
            state.i < adaptation.num_warmup,
            lambda: adaptation.update(state.i, accept_prob, z, adapt_state, progress),
            lambda: adapt_state,
        )
    i = state.i + 1
    warmup = adaptation.num_warmup
    n = jnp.where(i <= warmup, i, i - warmup)
    mean = state.mean_accept_prob
    return state._replace(
        i=i,
        adapt_state=adapt_state,
        step_size=step_size,
        mean_accept_prob=mean + (state.accept_prob - mean) / n,
    )


class AdaptedKernel:
    """A kernel with an acceptance rate, to which its step size adapts in warmup."""

    _target_accept_prob: float
    _adapt_step_size: bool
    _adapt_mass_matrix: bool
    _dense_mass: bool
    _adapt_length: bool = False

    if TYPE_CHECKING:

        @property
        def num_warmup(self) -> int: ...  # noqa: D102

        @property
        def control_variate(self) -> Any: ...  # noqa: D102

    @property
    def _adaptation(self) -> Adaptation:
        return Adaptation(
            num_warmup=self.num_warmup,
            target_accept_prob=self._target_accept_prob,
            adapt_step_size=self._adapt_step_size,
            # with a control variate, the surrogate's covariance is known in advance
            adapt_mass_matrix=self._adapt_mass_matrix and self.control_variate is None,
            dense_mass=self._dense_mass,
            adapt_length=self._adapt_length,
        )
