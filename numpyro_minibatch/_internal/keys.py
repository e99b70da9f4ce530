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
    """Random numbers of a shape, drawn as a flat array that is slightly longer.

    XLA unrolls the generator's loops over short axes: 12 numbers take almost twice as
    long to compile as 16. Each number depends only on the key and its place. So with
    the default of ``jax_threefry_partitionable``, the numbers that are kept equal those
    that JAX draws for the shape itself.

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

    JAX's check for reused keys counts a key as used if a vectorised loop runs through
    it, or a vectorised branch closes over it. Bits are not checked.

    :param key: one key or several.
    """
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key))
    return jax.random.key_data(key), wrap
