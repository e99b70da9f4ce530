"""One kernel at many step sizes at once: averages of its draws for each chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Dial:
    """A schedule whose value is set from outside.

    With a traced value, one compiled program serves all step sizes.
    """

    def __init__(self, value: float) -> None:
        self.value: Any = value

    def __call__(self, count: Any) -> Any:
        return self.value


def averages(
    make: Callable[[Dial], Any],
    step_sizes: Sequence[float],
    starts: Any,
    observe: Callable[[Any], Any],
    *,
    blocks: int,
    length: int,
    args: tuple = (),
    seed: int = 0,
) -> Any:
    """Means of observed quantities over blocks of draws.

    :param make: the kernel for a schedule; AMAGOLD's step size is set in its state.
    :param step_sizes: the grid of ``S`` step sizes.
    :param starts: a pytree of first positions, with a leading axis of ``C`` chains.
    :param observe: the quantities to average, a function of a state.
    :param blocks: number of blocks.
    :param length: draws per block.
    :param args: the model's arguments.
    :param seed: seed of all keys.
    :return: the observed quantities, with leading axes ``(S, C, blocks)``.
    """
    dial = Dial(float(step_sizes[0]))
    kernel = make(dial)
    chains = len(jax.tree.leaves(starts)[0])

    def one(key: Array, step_size: Array, start: Any, args: tuple) -> Any:
        dial.value = step_size
        state = kernel.init(key, 0, start, model_args=args)
        if hasattr(state, "adapt_state"):
            adapted = state.adapt_state._replace(step_size=step_size)
            state = state._replace(adapt_state=adapted)

        def draw(carry: Any, _: None) -> Any:
            state, sums = carry
            state = kernel.sample(state, args, {})
            return (state, jax.tree.map(jnp.add, sums, observe(state))), None

        def block(state: Any, _: None) -> Any:
            shapes = jax.eval_shape(observe, state)
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (state, sums), _ = jax.lax.scan(draw, (state, zero), None, length=length)
            return state, jax.tree.map(lambda x: x / length, sums)

        return jax.lax.scan(block, state, None, length=blocks)[1]

    every = jax.vmap(one, (0, None, 0, None))  # chains
    every = jax.jit(jax.vmap(every, (0, 0, None, None)))  # step sizes
    keys = jax.random.split(jax.random.key(seed), (len(step_sizes), chains))
    found = every(keys, jnp.asarray(step_sizes), starts, args)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)
