"""Sequences of gradient steps, each on its own rows, and the noise of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch.batch import FullBatch
from numpyro_minibatch.dynamics import Dynamics, Moved, Scalar
from numpyro_minibatch.estimate import Reader
from numpyro_minibatch.preconditioner import Whitening

__all__ = ["NoiseEstimator", "follow"]

_EVERY = 100  # draws between measurements of the gradients' noise
_GRADIENTS = 4  # gradients per measurement


def follow(
    dynamics: Dynamics,
    reader: Reader,
    whitening: Whitening,
    step_size_of: Callable[[Array], Any],
    temperature: Scalar,
    num_steps: int | Array,
    start: Array,
    keys: tuple[Array, Array],
    z: Array,
    memory: Any,
    observe: Callable[[Any, Array], Any] = lambda seen, gradient: seen,
    seen: Any = (),
) -> tuple[Moved, Any]:
    """Take ``num_steps`` steps of a dynamics.

    :param dynamics: the rule.
    :param reader: rows and weights of ``T`` times the log density.
    :param whitening: the whitened coordinates.
    :param step_size_of: from the number of a step to its step size.
    :param temperature: the temperature ``T``.
    :param num_steps: how many steps. With a traced number, the loop stops once a value
        is not finite.
    :param start: the number of steps made before.
    :param keys: the key of the noise, and ``index_key``: step ``n`` of all reads the
        rows of ``fold_in(index_key, n)``. Rows from an epoch that continues across
        draws would bias AMAGOLD.
    :param z: flat position, shape ``(D,)``.
    :param memory: the auxiliary variables of the dynamics.
    :param observe: ``observe(seen, gradient)``, which accumulates over the gradients.
    :param seen: its initial value.
    :return: the last step, with the work of all steps, and the final ``seen``.
    """
    noise_key, index_key = keys
    _, wrap = unwrapped(noise_key)

    def step(
        carry: tuple[Moved, Any], at: tuple[Array, Array, Array]
    ) -> tuple[tuple[Moved, Any], None]:
        (moved, seen), (n, noise_bits, row_bits) = carry, at
        row_key = wrap(row_bits)
        new = dynamics.step(
            wrap(noise_bits),
            moved.z,
            moved.memory,
            lambda z: reader.value_and_gradient(row_key, z),
            step_size_of(n),
            temperature,
            whitening,
        )
        work = jnp.asarray(moved.work + new.work, z.dtype)
        return (new._replace(work=work), observe(seen, new.gradient)), None

    zero = jnp.zeros((), z.dtype)
    first = (Moved(z, memory, zero, jnp.zeros_like(z), zero), seen)
    if isinstance(num_steps, int) and num_steps == 1:
        row_key = jax.random.fold_in(index_key, start)
        return step(first, (start, unwrapped(noise_key)[0], unwrapped(row_key)[0]))[0]

    if not isinstance(num_steps, int):

        def unfinished(carry: tuple[Array, tuple[Moved, Any]]) -> Array:
            n, (moved, _) = carry
            return (n < num_steps) & jnp.isfinite(moved.work)

        def next_step(
            carry: tuple[Array, tuple[Moved, Any]],
        ) -> tuple[Array, tuple[Moved, Any]]:
            n, before = carry
            bits = unwrapped(jax.random.fold_in(noise_key, n))[0]
            row_bits = unwrapped(jax.random.fold_in(index_key, start + n))[0]
            return n + 1, step(before, (start + n, bits, row_bits))[0]

        return jax.lax.while_loop(unfinished, next_step, (jnp.int32(0), first))[1]

    # all keys in one call, which costs about as much as drawing the noise of one step
    def fold(key: Array, numbers: Array) -> Array:
        fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return unwrapped(fold_in(key, numbers))[0]

    count = jnp.arange(num_steps, dtype=jnp.int32)
    at = start + count, fold(noise_key, count), fold(index_key, start + count)
    return jax.lax.scan(step, first, at)[0]


class NoiseEstimator(NamedTuple):
    """The noise of gradients, averaged over the measurements of this phase.

    - **number** - number of measurements so far.
    - **variance** - variance of a gradient in the whitened coordinates, ``(D,)``.
    """

    number: Array
    variance: Array

    @classmethod
    def init(cls, z: Array) -> NoiseEstimator:
        """The estimator without measurements."""
        return cls(jnp.zeros((), z.dtype), jnp.zeros_like(z))

    def updated(
        self,
        reader: Reader,
        key: Array,
        z: Array,
        whitening: Whitening,
        i: Array,
        num_warmup: int,
    ) -> tuple[NoiseEstimator, Array]:
        """Measure at regular intervals, and start again after warmup.

        :param reader: rows and weights of the function whose gradients are taken.
        :param key: PRNG key of the rows.
        :param z: flat position, shape ``(D,)``.
        :param whitening: the whitened coordinates.
        :param i: draws made before.
        :param num_warmup: number of warmup draws.
        :return: the new state, and the number of rows read.
        """
        none = jnp.int32(0)
        if isinstance(reader.scheme, FullBatch):
            return self, none
        in_warmup = i < num_warmup
        since = jnp.where(in_warmup, i, i - num_warmup)
        every = jnp.where(in_warmup, max(num_warmup // 10, 1), _EVERY)

        def measure() -> tuple[NoiseEstimator, Array]:
            found = reader.gradient_variance(
                key, _GRADIENTS, z, whitening.whiten_gradient
            )
            number = jnp.where(since == 0, 0.0, self.number) + 1.0
            mean = self.variance + (found - self.variance) / number
            new = NoiseEstimator(number.astype(z.dtype), mean)
            # a measurement that is not finite would stay in the mean
            fine = jnp.isfinite(found).all()
            kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), new, self)
            return kept, jnp.int32(_GRADIENTS * reader.gradient_rows)

        return jax.lax.cond(since % every == 0, measure, lambda: (self, none))

    def ratio(
        self, dynamics: Dynamics, step_size: Scalar, temperature: Scalar
    ) -> Array:
        """The variance of the injected noise, divided by that of the gradient noise.

        The result is the smallest ratio of all coordinates; infinite without gradient
        noise.
        """
        injected = dynamics.injected(step_size, temperature)
        noise = self.variance.max()
        # also if both are zero: AMAGOLD on all rows without friction
        some = jnp.where(noise == 0.0, 1.0, noise)
        ratio = jnp.where(noise == 0.0, jnp.inf, injected / some)
        return jnp.asarray(ratio, self.variance.dtype)
