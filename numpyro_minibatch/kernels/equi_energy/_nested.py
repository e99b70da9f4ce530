"""Energies of a whole ladder from nested batches, in one pass of bounded memory.

A state of the ladder is a position and a key, and the key determines a permutation of
all rows. The batch of a chain that reads ``m`` rows is the first ``m`` of them. The
batch of a hotter chain is therefore part of that of a colder one, and the energies of a
state at all temperatures are functions of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal import passes
from numpyro_minibatch.batch import permute
from numpyro_minibatch.estimate import (
    Estimate,
    Moments,
    Reader,
    Weights,
    penalty_correction,
)
from numpyro_minibatch.target import Terms

__all__ = ["Energies", "Nested", "Reference", "truncated"]

_CHUNK = 2**14  # rows that are evaluated at once, of all chains together
_OVERHEAD = 32  # the fixed cost of a block, in rows


class Reference(NamedTuple):
    """The reference of the energies, and the ladder that was derived from it.

    - **rows** - log likelihood of each row at the reference, ``(N,)``.
    - **known** - the terms of the log density there that are not rows.
    - **energy** - the energy there.
    - **log_prior** - the log density there of the part that is not tempered.
    - **temperatures** - of the chains, the coldest first, ``(K,)``.
    - **floors** - energies ``H_k`` below which chain ``k`` is flat, relative to the
      reference, ``(K,)``; the first is minus infinity.
    """

    rows: Array
    known: Terms
    energy: Array
    log_prior: Array
    temperatures: Array
    floors: Array


class Energies(NamedTuple):
    """Estimated energies of one state of each chain; all of shape ``(K,)``.

    - **own** - energy from the chain's own batch, relative to the reference and with
      the penalty for its noise.
    - **above** - the same state's energy for the next hotter chain, from that chain's
      part of the batch; for the hottest chain the same as ``own``.
    - **noise** - estimated variance of ``own``, in units of the temperature squared.
    - **log_prior** - log density of the part that is not tempered, relative to the
      reference.
    """

    own: Array
    above: Array
    noise: Array
    log_prior: Array


def truncated(energy: Array, floor: Array, temperature: Array) -> Array:
    """The log weight ``-max(energy, floor) / temperature`` of a chain."""
    return -jnp.maximum(energy, floor) / temperature


@dataclass(frozen=True)
class Nested:
    """The division of a ladder's batches into blocks of one width; all static.

    Each chain's batch has two parts: the rows of the next hotter chain's batch, and the
    rest. A block belongs to one part of one chain, so that the model can be vectorised
    over blocks of all chains, whatever the sizes of their batches.

    :param plate: the data plate.
    :param size: its number of rows.
    :param sizes: the rows of each chain's batch, the coldest first, not ascending.
    :param temper_prior: whether the prior is part of the energy.
    :param penalty: whether energies are corrected for their noise.
    """

    plate: str
    size: int
    sizes: tuple[int, ...]
    temper_prior: bool
    penalty: bool

    @property
    def shared(self) -> np.ndarray:
        """Rows of each batch that the next hotter chain reads as well."""
        return np.array([*self.sizes[1:], self.sizes[-1]])

    @property
    def blocks(self) -> tuple[int, np.ndarray]:
        """The width of blocks, and each block's chain, part, start and number of rows.

        The array has shape ``(G, B, 4)``. Blocks without rows pad it to full groups,
        and there are enough groups for all devices of a pass.
        """
        parts = [(0, s) for s in self.shared.tolist()]
        parts += [
            (s, m - s) for s, m in zip(self.shared.tolist(), self.sizes, strict=True)
        ]
        lengths = np.array([length for _, length in parts if length])
        tried = np.unique([-(-lengths // j) for j in range(1, 33)])
        fitting = tried[tried <= _CHUNK]
        tried = fitting if fitting.size else np.array([_CHUNK])
        costs = [(-(-lengths // w)).sum() * (w + _OVERHEAD) for w in tried]
        width = int(tried[int(np.argmin(costs))])
        found = []
        for number, (first, length) in enumerate(parts):
            part, chain = divmod(number, len(self.sizes))
            for start in range(0, length, width):
                rows = min(width, length - start)
                found.append((chain, part, first + start, rows))
        share = -(-len(found) // passes.num_devices())
        group = min(share, max(1, _CHUNK // width))
        padding = -len(found) % group
        found += [(0, 0, 0, 0)] * padding
        return width, np.array(found, np.int32).reshape(-1, group, 4)

    def energies(
        self,
        reader: Reader,
        reference: Reference,
        z: Array,
        bits: Array,
        wrap: Callable[[Array], Array],
    ) -> Energies:
        """The energies of one state of each chain.

        :param reader: the target.
        :param reference: the reference of the energies, and the temperatures.
        :param z: positions, ``(K, D)``.
        :param bits: the bits of keys, ``(K, ...)``.
        :param wrap: a function that makes keys of such bits.
        """
        width, blocks = self.blocks
        everything = min(self.sizes) == self.size
        tempered = Weights(float(self.temper_prior), 1.0, 0.0)
        rest = Weights(float(not self.temper_prior), 0.0, 1.0)

        def of_block(block: Array) -> Any:
            chain, _, start, count = block
            positions = start + jnp.arange(width, dtype=jnp.int32)
            positions = jnp.minimum(positions, self.size - 1)
            # if all rows are read, their order does not matter
            indices = (
                positions
                if everything
                else permute(wrap(bits[chain]), positions, self.size)
            )
            terms = reader.evaluate(z[chain], {self.plate: indices})
            # subtract rows and terms before summing, for the sake of float32
            rows = terms.rows[self.plate] - reference.rows[indices]
            change = jax.tree.map(
                jnp.subtract, terms._replace(rows={}), reference.known
            )
            moments = Moments.of(rows[None], count)
            known = tempered.known(change), rest.known(change)
            return moments.mean[0], moments.m2[0], *known

        if len(blocks) == 1:
            found = jax.vmap(of_block)(jnp.asarray(blocks[0]))
        else:
            _, found = passes.scan_shared(
                lambda _, group: (None, jax.vmap(of_block)(group)),
                None,
                jnp.asarray(blocks),
            )
            found = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), found)
        flat = blocks.reshape(-1, 4)
        mean, m2, known, log_prior = found
        inner, outer = (self._gathered(flat, part, mean, m2) for part in (0, 1))
        # the terms that are not rows are the same in every block of a chain
        first = np.argmax(flat[:, 0] == np.arange(len(self.sizes))[:, None], axis=1)
        temperatures = reference.temperatures
        hotter = jnp.concatenate([temperatures[1:], temperatures[-1:]])
        own, noise = self._energy(
            inner.merge(outer), np.array(self.sizes), known[first], temperatures
        )
        above, _ = self._energy(inner, self.shared, known[first], hotter)
        return Energies(own, above, noise, log_prior[first])

    def _gathered(self, blocks: np.ndarray, part: int, mean: Array, m2: Array) -> Any:
        """The moments of one part of each chain's batch, from those of its blocks."""
        chains = np.arange(len(self.sizes))[:, None]
        is_part = (blocks[:, 0] == chains) & (blocks[:, 1] == part)
        counts = np.where(is_part, blocks[:, 3], 0)
        seen = counts.sum(1)
        counts = counts.astype(mean.dtype)
        # jnp.where, because a mean may be infinite
        sums = jnp.where(is_part & (counts > 0), counts * mean, 0.0).sum(1)
        whole = sums / np.maximum(seen, 1).astype(mean.dtype)
        spread = m2 + counts * jnp.square(mean - whole[:, None])
        spread = jnp.where(is_part & (counts > 0), spread, 0.0).sum(1)
        return Moments(jnp.asarray(seen, jnp.int32), whole, spread)

    def _energy(
        self, moments: Moments, sizes: np.ndarray, known: Array, temperatures: Array
    ) -> tuple[Array, Array]:
        """The energy that a batch estimates, and its variance in temperatures squared.

        The penalty is that of a log weight: the mean of ``exp(-energy / T)`` over
        batches is then that of the true energy, if the noise is normal.
        """
        fpc = ((self.size - sizes) / self.size).astype(moments.mean.dtype)
        total = moments.total(self.size, jnp.asarray(fpc))
        log_weight = (1.0 / temperatures) * Estimate(
            total.value + known, total.variance, total.dof
        )
        energy = -temperatures * log_weight.value
        if self.penalty:
            energy = energy + temperatures * penalty_correction(log_weight)
        return energy, jnp.asarray(log_weight.variance)
