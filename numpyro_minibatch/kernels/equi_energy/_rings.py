"""Energy rings: past states of hotter chains by energy, in buffers of fixed size."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

__all__ = ["Rings", "ring_of"]


class Rings(NamedTuple):
    """States of chains ``1 .. K - 1``, each in ``K`` rings of ``C`` places.

    A full ring drops its oldest state. A random sample of all past states would stop
    changing after some time, and keep the error of its ``C`` states.

    - **z** - positions, ``(K - 1, K, C, D)``.
    - **bits** - bits of the keys of their batches, ``(K - 1, K, C, ...)``.
    - **number** - number of states that each ring has received, ``(K - 1, K)``.
    """

    z: Array
    bits: Array
    number: Array

    @classmethod
    def empty(cls, number: int, capacity: int, z: Array, bits: Array) -> Rings:
        """Rings of a ladder of ``number`` chains.

        :param number: the number of chains ``K``.
        :param capacity: places of a ring ``C``.
        :param z: a position, for its shape.
        :param bits: the bits of a key, for their shape.
        """
        shape = (number - 1, number)
        return cls(
            jnp.zeros((*shape, capacity, *z.shape), z.dtype),
            jnp.zeros((*shape, capacity, *bits.shape), bits.dtype),
            jnp.zeros(shape, jnp.int32),
        )

    def pick(self, ring: Array, uniform: Array) -> tuple[Array, Array, Array]:
        """A member of one ring of each chain, and whether the ring has any.

        :param ring: which ring, ``(K - 1,)``.
        :param uniform: numbers in ``[0, 1)``, ``(K - 1,)``.
        """
        chains = jnp.arange(len(ring))
        capacity = self.z.shape[2]
        filled = jnp.minimum(self.number[chains, ring], capacity)
        place = (uniform * filled).astype(jnp.int32)
        place = jnp.minimum(place, jnp.maximum(filled - 1, 0))  # rounding
        at = chains, ring, place
        return self.z[at], self.bits[at], filled > 0

    def put(self, ring: Array, z: Array, bits: Array, keep: Array) -> Rings:
        """The rings with one more state of each chain for which ``keep`` is true.

        :param ring: the rings that the states belong to, ``(K - 1,)``.
        :param z: their positions.
        :param bits: the bits of their keys.
        :param keep: whether to store each of them, ``(K - 1,)``.
        """
        chains = jnp.arange(len(ring))
        capacity = self.z.shape[2]
        place = jnp.where(keep, self.number[chains, ring] % capacity, capacity)
        at = chains, ring, place
        # a place beyond the last is dropped
        return Rings(
            self.z.at[at].set(z, mode="drop"),
            self.bits.at[at].set(bits, mode="drop"),
            self.number.at[chains, ring].add(keep.astype(jnp.int32)),
        )


def ring_of(energy: Array, floors: Array) -> Array:
    """The ring ``[H_j, H_{j + 1})`` of an energy.

    :param energy: energies, any shape.
    :param floors: ``H_0 .. H_{K - 1}``, ascending, the first minus infinity.
    """
    return (energy[..., None] >= floors[1:]).sum(-1, dtype=jnp.int32)
