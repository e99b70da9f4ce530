"""Keys as bits, for vectorised loops and branches, and normals that compile fast.

JAX's check for reused keys counts a key as used if a vectorised loop runs through it,
or a vectorised branch closes over it. Bits are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array

__all__ = ["normal", "unwrapped", "wide"]

_LANES = 16  # a multiple of what any processor computes at once


def wide(draw: Callable[[tuple[int, ...]], Array], shape: tuple[int, ...]) -> Array:
    """Random numbers of a shape, drawn flat and a few more.

    XLA unrolls the loops of the generator over short axes: those of 12 numbers take
    almost twice as long to compile as those of 16. Each number depends on the key and
    its place alone, so that those that are kept are those that JAX draws of the shape
    itself, while ``jax_threefry_partitionable`` has its default.

    :param draw: the numbers of a flat shape.
    :param shape: what to return.
    """
    count = math.prod(shape)
    return draw((-(-count // _LANES) * _LANES,))[:count].reshape(shape)


def normal(key: Array, size: int, dtype: Any) -> Array:
    """Standard normal numbers, as ``jax.random.normal`` draws them.

    :param key: PRNG key.
    :param size: how many.
    :param dtype: their type.
    """
    return wide(lambda shape: jax.random.normal(key, shape, dtype), (size,))


def unwrapped(key: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The bits of keys, and a function that makes keys of such bits.

    JAX's check for keys that are used twice takes a key for used when a vectorised loop
    goes through it, or a vectorised branch closes over it. Bits are not watched.

    :param key: one key or several.
    """
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key))
    return jax.random.key_data(key), wrap
