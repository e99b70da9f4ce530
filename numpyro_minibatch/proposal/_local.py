"""Proposals around the current position."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_minibatch.proposal._contract import Proposal, ProposalContext, Proposed

__all__ = ["langevin", "random_walk"]


@dataclass(frozen=True)
class _RandomWalk(Proposal):
    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        noise = jax.random.normal(key, z.shape, z.dtype)
        step = step_size * context.whitening.color(noise)
        return Proposed(z + step, jnp.zeros((), z.dtype))


@dataclass(frozen=True)
class _Langevin(Proposal):
    target_accept_prob = 0.57
    uses_gradient = True

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        noise = jax.random.normal(key, z.shape, z.dtype)
        whitening = context.whitening

        # The reverse move needs the gradient of the same batch at z'. Each batch then
        # defines its own proposal q, and the chain is a mixture of valid kernels. The
        # loop keeps the model at one place of the compiled program.
        def half_step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            position, drift = carry
            new = whitening.whiten_gradient(context.gradient(position))
            moved = z + step_size * whitening.color(0.5 * step_size * new + noise)
            return jnp.where(i == 0, moved, position), jnp.where(
                i == 0, new, drift + new
            )

        z_new, drifts = jax.lax.fori_loop(0, 2, half_step, (z, jnp.zeros_like(z)))
        # w = w' + eps^2/2 g' + eps xi'  gives  xi' = -(xi + eps/2 (g + g'))
        reverse = noise + 0.5 * step_size * drifts
        return Proposed(z_new, 0.5 * (jnp.square(noise) - jnp.square(reverse)).sum())


# what users write --------------------------------------------------------------------


def random_walk() -> Proposal:
    """Gaussian steps in the whitened coordinates, scaled by the step size.

    Without mass matrix adaptation the coordinates are the unconstrained parameters.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.random_walk().target_accept_prob
        0.3
    """
    return _RandomWalk()


def langevin() -> Proposal:
    """Langevin steps (MALA) on a minibatch gradient, with their ``q`` ratio.

    The gradient comes from a separate batch. If the same batch were used for the
    accept/reject step, a move along its gradient would look better than it is.

    The paper of MINT [1] uses such proposals for neural networks.

    **References:**

    1. Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 4.3.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.langevin().uses_gradient
        True
    """
    return _Langevin()
