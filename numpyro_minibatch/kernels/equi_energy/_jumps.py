"""One step of a ladder of energies: a local move or a jump of each chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_minibatch import accept
from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch.estimate import Estimate, Reader, Weights
from numpyro_minibatch.kernels.equi_energy._nested import (
    Energies,
    Nested,
    Reference,
    truncated,
)
from numpyro_minibatch.kernels.equi_energy._rings import Rings, ring_of
from numpyro_minibatch.proposal import Proposal, ProposalContext, Whitening

__all__ = ["Moves", "Rungs", "Step", "log_density", "log_jump_ratio"]

_MAX_NOISE = 1.0  # the largest variance of a log weight with an accurate penalty


class Rungs(NamedTuple):
    """A state of each chain of the ladder.

    - **z** - flat positions, ``(K, D)``.
    - **bits** - bits of the keys of their batches.
    - **energies** - the energies that these batches give.
    """

    z: Array
    bits: Array
    energies: Energies


class Step(NamedTuple):
    """The results of a step for each chain; shape ``(K,)``.

    - **accept_prob** - probability with which the move was accepted.
    - **jumped** - whether it was a jump.
    - **log_ratio** - the log ratio of the decision.
    - **variance** - estimated variance of that.
    - **reliable** - whether its noise was in the domain of the penalty.
    """

    accept_prob: Array
    jumped: Array
    log_ratio: Array
    variance: Array
    reliable: Array


def log_density(energies: Energies, reference: Reference) -> Array:
    """The log density of each chain's state, relative to the reference."""
    weight = truncated(energies.own, reference.floors, reference.temperatures)
    return weight + energies.log_prior


def log_jump_ratio(new: Energies, old: Energies, reference: Reference) -> Array:
    """The log of ``pi_k(s') pi_{k+1}(s) / (pi_k(s) pi_{k+1}(s'))`` for each chain.

    A member of a ring is drawn with density ``pi_{k+1}`` restricted to the ring, and
    the reverse jump starts in the same ring, so that the rings' masses cancel. The part
    that is not tempered cancels, too. The paper's D.1 prints ``pi_{k+2}(s')`` instead
    of ``pi_{k+1}(s')`` and ``pi_{k+1}(s)`` instead of ``pi_k(s)``; line 19 of its
    algorithm 2 agrees with this function.

    :param new: the energies of the proposed states ``s'``.
    :param old: those of the current states ``s``.
    :param reference: temperatures and floors. For the hottest chain, which does not
        jump, the ratio is one.
    """
    temperatures, floors = reference.temperatures, reference.floors
    hotter = jnp.concatenate([temperatures[1:], temperatures[-1:]])
    higher = jnp.concatenate([floors[1:], floors[-1:]])

    def log_weights(energies: Energies) -> Array:
        own = truncated(energies.own, floors, temperatures)
        return own - truncated(energies.above, higher, hotter)

    return log_weights(new) - log_weights(old)


@dataclass(frozen=True)
class Moves:
    """The moves of the chains of a ladder.

    :param nested: the batches of the chains.
    :param reader: the target.
    :param reference: the reference of the energies, and the ladder.
    :param proposal: of the local moves.
    :param whitening: roots of the mass matrices and step sizes, one of each chain.
    :param jump_prob: probability of trying a jump.
    """

    nested: Nested
    reader: Reader
    reference: Reference
    proposal: Proposal
    whitening: tuple[Array, Array]
    jump_prob: float

    def step(
        self, key: Array, rows_key: Array, rungs: Rungs, rings: Rings, may_jump: Array
    ) -> tuple[Array, Rungs, Step]:
        """Propose a local move or a jump of each chain, and accept or reject it.

        :param key: key of the proposals and of the decision.
        :param rows_key: key of the rows.
        :param rungs: the states of the chains.
        :param rings: past states of the hotter chains.
        :param may_jump: whether each chain has begun to jump.
        :return: the next step's key, the new states, and the results of the step.
        """
        names = ("rng", "propose", "jump", "pick", "accept")
        keys = dict(zip(names, jax.random.split(key, 5), strict=True))
        rows_key, gradient_key = jax.random.split(rows_key)
        bits, wrap = unwrapped(jax.random.split(rows_key, len(rungs.z)))
        moved, log_q_ratio = self._local(keys["propose"], gradient_key, rungs.z)
        jumps, members = self._members(keys["jump"], keys["pick"], rungs, rings)
        jumps = jnp.append(jumps & may_jump[:-1], False)
        new = Rungs(
            _either(jumps, members[0], moved),
            _either(jumps, members[1], bits),
            rungs.energies,
        )
        energies = self.nested.energies(
            self.reader, self.reference, new.z, new.bits, wrap
        )
        new = new._replace(energies=energies)
        after, step = self._decide(keys["accept"], jumps, log_q_ratio, new, rungs)
        return keys["rng"], after, step

    def _local(self, key: Array, gradient_key: Array, z: Array) -> tuple[Array, Array]:
        """A local move of each chain, and its log proposal ratio."""
        bits, wrap = unwrapped(jax.random.split(gradient_key, len(z)))
        temper_prior = self.nested.temper_prior

        def propose(
            key: Array, bits: Array, z: Array, t: Array, root: Array, size: Array
        ) -> tuple[Array, Array]:
            weights = Weights(1.0 / t if temper_prior else 1.0, 1.0 / t)

            def gradient(position: Array) -> Array:
                tempered = self.reader._replace(weights=weights)
                return tempered.gradient(wrap(bits), position)

            context = ProposalContext(gradient, Whitening(root))
            proposed = self.proposal.propose(key, z, size, context)
            return proposed.z, proposed.log_q_ratio

        keys = jax.random.split(key, len(z))
        return jax.vmap(propose)(
            keys, bits, z, self.reference.temperatures, *self.whitening
        )

    def _members(
        self, jump_key: Array, pick_key: Array, rungs: Rungs, rings: Rings
    ) -> tuple[Array, tuple[Array, Array]]:
        """Which chains jump (never the hottest), and to which members of the rings."""
        real, shape = rungs.z.dtype, (len(rungs.z) - 1,)
        # the ring is defined by the energy of the state for the hotter chain, so that
        # the jump and its reverse use the same ring
        ring = ring_of(rungs.energies.above, self.reference.floors)[:-1]
        z, bits, there = rings.pick(ring, jax.random.uniform(pick_key, shape, real))
        wanted = jax.random.uniform(jump_key, shape, real) < self.jump_prob
        return wanted & there, (z, bits)

    def _decide(
        self, key: Array, jumps: Array, log_q_ratio: Array, new: Rungs, old: Rungs
    ) -> tuple[Rungs, Step]:
        """Accept or reject; weights are functions of states and include the penalty."""
        reference = self.reference
        log_ratio = jnp.where(
            jumps,
            log_jump_ratio(new.energies, old.energies, reference),
            log_density(new.energies, reference)
            - log_density(old.energies, reference)
            + log_q_ratio,
        )
        decision = accept.metropolis()(key, Estimate(log_ratio))
        noise = jnp.stack([new.energies.noise, old.energies.noise])
        step = Step(
            accept_prob=decision.accept_prob,
            jumped=jumps,
            log_ratio=log_ratio,
            variance=noise.sum(0),
            reliable=(noise <= _MAX_NOISE).all(0) & jnp.isfinite(log_ratio),
        )
        return jax.tree.map(_chosen_by(decision.accept), new, old), step


def _either(jumps: Array, member: Array, local: Array) -> Array:
    """Members of rings for the chains that jump; the hottest never does."""
    among = jumps[:-1].reshape(-1, *[1] * (local.ndim - 1))
    return local.at[:-1].set(jnp.where(among, member, local[:-1]))


def _chosen_by(accepted: Array) -> Callable[[Array, Array], Array]:
    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(accepted.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return chosen
