"""Where to: proposals, in the coordinates that the adapted mass matrix whitens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["Proposal", "Proposed", "Whitening", "langevin", "random_walk"]


class Whitening(NamedTuple):
    """A square root of the inverse mass matrix: ``z = C @ w`` with white ``w``.

    :param root: ``C``'s transpose, shape ``(D, D)``, or its diagonal, ``(D,)``.
    """

    root: Array

    def color(self, w: Array) -> Array:
        """``C @ w``: a displacement in the coordinates of the position."""
        return self.root.T @ w if self.root.ndim == 2 else self.root * w

    def whiten_gradient(self, gradient: Array) -> Array:
        """``C.T @ gradient``: the gradient with respect to ``w``."""
        return self.root @ gradient if self.root.ndim == 2 else self.root * gradient


class Proposed(NamedTuple):
    """A proposed position.

    :param z: the position, shape ``(D,)``.
    :param log_q_ratio: ``log q(z | z') - log q(z' | z)``.
    """

    z: Array
    log_q_ratio: Array


@dataclass(frozen=True)
class Proposal(ABC):
    """A way to propose a position; the base of the ``proposal.*`` choices."""

    #: acceptance rate that a Metropolis test should aim at
    target_accept_prob = 0.3
    #: whether :meth:`propose` calls its ``gradient``
    uses_gradient = False

    @abstractmethod
    def propose(
        self,
        key: Array,
        z: Array,
        step_size: Array,
        whitening: Whitening,
        gradient: Callable[[Array], Array],
    ) -> Proposed:
        """Propose a position.

        :param key: PRNG key.
        :param z: the current position, shape ``(D,)``.
        :param step_size: step size in the whitened coordinates.
        :param whitening: the whitened coordinates.
        :param gradient: the gradient of the target's log density at a position,
            estimated from one batch that is independent of the batch which decides.
        """


@dataclass(frozen=True)
class _RandomWalk(Proposal):
    def propose(self, key, z, step_size, whitening, gradient):  # type: ignore[no-untyped-def]
        noise = jax.random.normal(key, z.shape, z.dtype)
        return Proposed(z + step_size * whitening.color(noise), jnp.zeros((), z.dtype))


@dataclass(frozen=True)
class _Langevin(Proposal):
    target_accept_prob = 0.57
    uses_gradient = True

    def propose(self, key, z, step_size, whitening, gradient):  # type: ignore[no-untyped-def]
        noise = jax.random.normal(key, z.shape, z.dtype)

        # The reverse move needs the gradient of the same batch at z': for each batch
        # q is then a proposal of its own, and the chain a mixture of valid ones. The
        # loop keeps the model at one place of the compiled program.
        def half_step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            position, drift = carry
            new = whitening.whiten_gradient(gradient(position))
            moved = z + step_size * whitening.color(0.5 * step_size * new + noise)
            return jnp.where(i == 0, moved, position), jnp.where(
                i == 0, new, drift + new
            )

        z_new, drifts = jax.lax.fori_loop(0, 2, half_step, (z, jnp.zeros_like(z)))
        # w = w' + eps^2/2 g' + eps xi'  gives  xi' = -(xi + eps/2 (g + g'))
        reverse = noise + 0.5 * step_size * drifts
        return Proposed(z_new, 0.5 * (jnp.square(noise) - jnp.square(reverse)).sum())


def random_walk() -> Proposal:
    """Gaussian steps of the step size in the whitened coordinates.

    Without mass matrix adaptation the coordinates are those of the unconstrained
    parameters.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.random_walk().target_accept_prob
        0.3
    """
    return _RandomWalk()


def langevin() -> Proposal:
    """Langevin steps (MALA) on a minibatch gradient, with their ``q`` ratio.

    The gradient comes from a batch of its own: on the batch that decides, a move that
    follows the batch's own gradient would look better than it is.

    The paper of MINT [1] proposes with such steps for neural networks.

    **References:**

    .. [1] Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 4.3.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.langevin().uses_gradient
        True
    """
    return _Langevin()
