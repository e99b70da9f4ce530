"""Proposals for a surrogate with several modes: within a mode, and between modes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_minibatch._internal.keys import normal
from numpyro_minibatch.proposal._contract import (
    Proposal,
    ProposalContext,
    Proposed,
    check_number,
)
from numpyro_minibatch.proposal._normals import Modes
from numpyro_minibatch.proposal._on_surrogate import (
    OVERRELAXATION_COSINE,
    STUDENT_DF,
    accept_on_surrogate,
    follow,
    surrogate_hmc,
)

__all__ = ["across_modes"]

# moves within a mode; other moves draw from all modes
_WITHIN: Any = surrogate_hmc(independent=0.0)
_ONE_MODE: Any = surrogate_hmc()


@dataclass(frozen=True)
class _AcrossModes(Proposal):
    uses_surrogate = True
    follows_surrogate = True
    moves_between_modes = True
    adapts_step_size = False

    between: float = 2 / 3

    def __post_init__(self) -> None:
        between = check_number(
            "across_modes(between=...)",
            self.between,
            lambda x: 0 < x < 1,
            "a number above 0 and below 1",
        )
        object.__setattr__(self, "between", between)

    def evaluations(self, context: ProposalContext) -> int:
        if context.modes is None:
            return _ONE_MODE.evaluations(context)
        return _WITHIN.evaluations(context) + 2

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        modes = context.modes
        if modes is None:
            return _ONE_MODE.propose(key, z, step_size, context)
        assert context.log_surrogate is not None  # the kernel has checked
        keys = jax.random.split(key, 6)
        key_kind, key_within, key_drawn, key_noise, key_other, key_accept = keys
        density = jax.vmap(modes.log_densities)
        at_z = modes.log_densities(z)
        mode = jnp.argmax(at_z).astype(jnp.int32)
        white = modes.whitened(z)[mode]
        stayed, lost = self._within(key_within, z, mode, white, context)
        # an independent draw from the mixture
        chosen = jax.random.categorical(key_drawn, modes.log_weight)
        # Representative rows show that a mode is skewed. From its tail, draws from
        # normals would be rejected.
        skewed = context.num_rows > 0
        noise = _heavy(key_noise, z) if skewed else normal(key_noise, z.size, z.dtype)
        drawn = modes.placed(chosen, noise)
        # the same whitened position in another mode; if no mode is chosen, the step is
        # a move within the mode
        choice = jnp.log(_choice(modes.log_weight, mode))
        other = jax.random.categorical(key_other, choice).astype(jnp.int32)
        mapped = modes.placed(other, white)

        proposed = jnp.stack([stayed, drawn, mapped])
        at_new = density(proposed)
        mode_new = jnp.argmax(at_new, -1).astype(jnp.int32)
        log_q_ratio = jnp.stack(
            [
                lost,
                _log_mixture(modes, z, at_z, skewed)
                - _log_mixture(modes, drawn, at_new[1], skewed),
                modes.log_scale[other]
                - modes.log_scale[mode]
                + modes.log_weight[mode]
                - modes.log_weight[other],
            ]
        )
        # if the reverse move would differ, there is no move
        possible = jnp.stack(
            [mode_new[0] == mode, jnp.array(True), mode_new[2] == other]
        )
        uniform = jax.random.uniform(key_kind, (), z.dtype)
        maps = (uniform < self.between) & (other != mode)
        kind = jnp.where(uniform < 0.5 * self.between, 1, jnp.where(maps, 2, 0))
        z_new = proposed[kind]
        logs = jax.vmap(context.log_surrogate)(jnp.stack([z, z_new]))
        log_ratio = logs[1] - logs[0] + log_q_ratio[kind]
        log_ratio = jnp.where(possible[kind], log_ratio, -jnp.inf)
        found = accept_on_surrogate(
            z, z_new, logs, log_ratio, normal(key_accept, 2, z.dtype)
        )
        return found._replace(jump=mode_new[kind] != mode)

    def _within(
        self, key: Array, z: Array, mode: Array, white: Array, context: ProposalContext
    ) -> tuple[Array, Array]:
        """A move about the centre of a mode, and the log ratio of its directions."""
        modes = context.modes
        assert modes is not None and context.log_surrogate_in is not None
        num_steps, length = _WITHIN.trajectory(context)
        noise = normal(key, z.size + 1, z.dtype)
        momentum, for_step = noise[:-1], noise[-1]
        if num_steps == 0:
            cos = OVERRELAXATION_COSINE if context.over_relaxed else 0.0
            rotated = cos * white + math.sqrt(1.0 - cos**2) * momentum
            lost = 0.5 * (jnp.square(rotated) - jnp.square(white)).sum()
            return modes.placed(mode, rotated), lost
        jitter = 0.1 * jax.scipy.special.erf(for_step * math.sqrt(0.5))
        here = context._replace(
            whitening=modes.whitening(mode),
            center=modes.location[mode],
            log_surrogate=context.log_surrogate_in(mode),
        )
        step = length * (1.0 + jitter)
        z_new, after, _, _ = follow(z, momentum, step, num_steps, here)
        return z_new, 0.5 * (jnp.square(momentum) - jnp.square(after)).sum()


def _heavy(key: Array, z: Array) -> Array:
    """Whitened noise of a multivariate Student-t distribution, ``(D,)``."""
    df = int(STUDENT_DF)
    noise = normal(key, z.size + df, z.dtype)
    return noise[df:] * jnp.sqrt(df / jnp.square(noise[:df]).sum())


def _log_mixture(modes: Modes, z: Array, densities: Array, skewed: bool) -> Array:
    """Log density of independent draws, up to a constant.

    :param densities: those of the normal components at ``z``, ``(K,)``.
    """
    if skewed:
        densities = modes.log_heavy_densities(z, STUDENT_DF)
    return jax.scipy.special.logsumexp(densities)


def _choice(log_weight: Array, mode: Array) -> Array:
    """Probabilities of the modes that a map from one mode chooses, ``(K,)``.

    They are in balance with the weights, ``w_k P(j | k) = w_j P(k | j)``, and as large
    as that allows. The remaining probability is that of the mode itself.

    :param log_weight: log weights of all modes, ``(K,)``.
    :param mode: the mode that the map starts from.
    """
    weight = jnp.exp(log_weight)
    itself = jnp.arange(len(weight)) == mode
    others = weight / jnp.maximum(1.0 - weight[mode], 1.0 - weight)
    others = jnp.where(itself, 0.0, others)
    return jnp.where(itself, jnp.maximum(1.0 - others.sum(), 0.0), others)


def across_modes(between: float = 2 / 3) -> Proposal:
    """Moves within the modes of a surrogate, and between them.

    The default with a control variate that expands about several modes,
    ``control_variate.taylor2(modes=8)``. A step is one of three moves:

    - within the mode that the position belongs to, as :func:`surrogate_hmc`;
    - an independent draw from the mixture of the modes' normal approximations, or of
      Student-t distributions if a mode has representative rows because it is skewed;
    - the same whitened position in another mode. Modes are chosen in balance with
      their weights; a step that chooses none moves within the mode.

    Each move is accepted or rejected on the surrogate first, without data. The
    minibatch then decides by the surrogate's error: delayed acceptance [1]. Moves to
    another mode change the relative frequencies of the modes, which are those of the
    posterior whatever the weights of the mixture are. If the set-up finds only one
    mode, the proposal is :func:`surrogate_hmc`.

    :param between: the share of the steps that try a move of the second or third kind,
        half of them each; above 0 and below 1. By default each kind has a third.
    :raises TypeError: if ``between`` is not a number.
    :raises ValueError: if ``between`` is out of range.

    **References:**

    1. J. Andres Christen, Colin Fox (2005), *Markov chain Monte Carlo using an
       approximation*, Journal of Computational and Graphical Statistics 14(4).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.across_modes(between=0.5).between
        0.5
    """
    return _AcrossModes(between)
