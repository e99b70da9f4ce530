"""Keys as bits, for vectorised loops and branches.

JAX's check for reused keys counts a key as used if a vectorised loop runs through it,
or a vectorised branch closes over it. Bits are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax import Array

__all__ = ["unwrapped"]


def unwrapped(key: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The bits of keys, and a function that makes keys of such bits.

    :param key: one key or several.
    """
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key))
    return jax.random.key_data(key), wrap
