"""The normal distributions that stand for the modes of a surrogate."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

__all__ = ["Modes"]


class Modes(NamedTuple):
    """A mixture of normal distributions, one for each mode of a surrogate.

    :param location: their means, ``(K, D)``.
    :param root: transposes of roots of their covariances, upper triangular,
        ``(K, D, D)``.
    :param log_weight: logarithms of their weights, whose sum is one, ``(K,)``.
    """

    location: Array
    root: Array
    log_weight: Array

    @property
    def log_scale(self) -> Array:
        """Logarithms of the determinants of the roots, ``(K,)``."""
        diagonals = jnp.diagonal(self.root, axis1=-2, axis2=-1)
        return jnp.log(jnp.abs(diagonals)).sum(-1)

    def whitened(self, z: Array) -> Array:
        """A position in the whitened coordinates of each mode, ``(K, D)``."""

        def one(location: Array, root: Array) -> Array:
            return solve_triangular(root, z - location, trans=1)

        return jax.vmap(one)(self.location, self.root)

    def log_densities(self, z: Array) -> Array:
        """Weighted log densities of the components, up to one constant, ``(K,)``."""
        square = jnp.square(self.whitened(z)).sum(-1)
        return self.log_weight - self.log_scale - 0.5 * square

    def of(self, z: Array) -> Array:
        """The mode that a position belongs to: that of the largest weighted density."""
        return jnp.argmax(self.log_densities(z)).astype(jnp.int32)

    def placed(self, mode: Array, white: Array) -> Array:
        """The position with these whitened coordinates in a mode."""
        return self.location[mode] + self.root[mode].T @ white
