"""The normal distributions that stand for the modes of a surrogate."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from numpyro_minibatch.preconditioner import Whitening

__all__ = ["Modes", "PriorAtModes"]


class PriorAtModes(NamedTuple):
    """Quadratic approximations of the log prior, one for each mode of a posterior.

    They are in coordinates in which both the covariance of the mode and the curvature
    of the prior are diagonal, ``z = m_k + A_k.T @ x``. The components of the mixture
    are then known at any temperature without another factorisation.

    :param log_density: the log prior at the means, ``(K,)``.
    :param slope: its gradients at the means, in these coordinates, ``(K, D)``.
    :param curvature: minus its second derivatives, non-negative, ``(K, D)``.
    :param root: the matrices ``A_k``, with ``A_k.T @ A_k`` the covariance of the mode,
        ``(K, D, D)``.
    :param inverse: their inverses, ``(K, D, D)``.
    """

    log_density: Array
    slope: Array
    curvature: Array
    root: Array
    inverse: Array

    @classmethod
    def of(
        cls,
        modes: Modes,
        log_density: np.ndarray,
        gradient: np.ndarray,
        hessian: np.ndarray,
    ) -> PriorAtModes:
        """Build from NumPy derivatives of the log prior at the means of the modes.

        A prior that is convex in some direction, as in the tail of a Student-t, has no
        normal approximation there, and is taken to be flat.

        :param modes: the normal approximations of the posterior.
        :param log_density: shape ``(K,)``.
        :param gradient: shape ``(K, D)``.
        :param hessian: shape ``(K, D, D)``.
        """
        root = np.asarray(modes.root, np.float64)
        white = -root @ hessian @ np.swapaxes(root, 1, 2)
        curvature, vectors = np.linalg.eigh(white)
        root = np.swapaxes(vectors, 1, 2) @ root
        return cls(
            np.asarray(log_density),  # type: ignore[arg-type]
            np.einsum("kij,kj->ki", root, gradient),  # type: ignore[arg-type]
            np.maximum(curvature, 0.0),
            root,  # type: ignore[arg-type]
            np.linalg.inv(root),  # type: ignore[arg-type]
        )


class Modes(NamedTuple):
    """A mixture of normal distributions, one for each mode of a surrogate.

    :param location: their means, ``(K, D)``.
    :param root: transposes of roots of their covariances, upper triangular,
        ``(K, D, D)``.
    :param log_weight: logarithms of their weights, whose sum is one, ``(K,)``.
    :param inverse: the inverses of ``root``, ``(K, D, D)``; without them, triangular
        systems are solved.
    :param log_determinant: logarithms of the determinants of roots that are not
        triangular, ``(K,)``.
    """

    location: Array
    root: Array
    log_weight: Array
    inverse: Array | None = None
    log_determinant: Array | None = None

    @property
    def log_scale(self) -> Array:
        """Logarithms of the determinants of the roots, ``(K,)``."""
        if self.log_determinant is not None:
            return self.log_determinant
        diagonals = jnp.diagonal(self.root, axis1=-2, axis2=-1)
        return jnp.log(jnp.abs(diagonals)).sum(-1)

    def tempered(
        self, prior: PriorAtModes, power: ArrayLike, surplus: ArrayLike
    ) -> Modes:
        """The mixture for ``posterior ** power * prior ** surplus``.

        Each component is raised to ``power`` separately from the others and multiplied
        by the normal approximation of the prior to the power ``surplus``; see
        ``docs/several-modes.md``.

        :param prior: the log prior at the modes.
        :param power: power of the posterior, the inverse of a temperature.
        :param surplus: power of the prior: zero if the prior is tempered as well,
            otherwise ``1 - power``.
        """
        # precisions are diagonal in the coordinates of `prior`
        scale = 1.0 / jnp.sqrt(power + surplus * prior.curvature)
        moved = surplus * scale * prior.slope  # in units of the new scale
        location = self.location + jnp.einsum("kij,ki->kj", prior.root, scale * moved)
        log_determinant = self.log_scale + jnp.log(scale).sum(-1)
        height = power * (self.log_weight - self.log_scale)
        height = height + surplus * prior.log_density + 0.5 * jnp.square(moved).sum(-1)
        return Modes(
            location,
            scale[..., None] * prior.root,
            jax.nn.log_softmax(height + log_determinant),
            prior.inverse / scale[:, None, :],
            log_determinant,
        )

    def whitening(self, mode: Array) -> Whitening:
        """The coordinates in which the covariance of one mode is the identity."""
        inverse = None if self.inverse is None else self.inverse[mode]
        return Whitening(self.root[mode], inverse)

    def whitened(self, z: Array) -> Array:
        """A position in the whitened coordinates of each mode, ``(K, D)``."""
        if self.inverse is not None:
            return jnp.einsum("kij,ki->kj", self.inverse, z - self.location)

        def one(location: Array, root: Array) -> Array:
            return solve_triangular(root, z - location, trans=1)

        return jax.vmap(one)(self.location, self.root)

    def log_densities(self, z: Array) -> Array:
        """Weighted log densities of the components, up to one constant, ``(K,)``."""
        square = jnp.square(self.whitened(z)).sum(-1)
        return self.log_weight - self.log_scale - 0.5 * square

    def log_heavy_densities(self, z: Array, df: float) -> Array:
        """The same of components that are multivariate Student-t, ``(K,)``.

        :param z: a position.
        :param df: degrees of freedom.
        """
        logs = jnp.log1p(jnp.square(self.whitened(z)).sum(-1) / df)
        return self.log_weight - self.log_scale - 0.5 * (df + z.size) * logs

    def of(self, z: Array) -> Array:
        """The mode that a position belongs to: that of the largest weighted density."""
        return jnp.argmax(self.log_densities(z)).astype(jnp.int32)

    def placed(self, mode: Array, white: Array) -> Array:
        """The position with these whitened coordinates in a mode."""
        return self.location[mode] + self.root[mode].T @ white
