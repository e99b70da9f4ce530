"""A problem's densities in whitened coordinates, as other packages need them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, random

from .flat import Flat
from .laplace import summed
from .prepare import Prepared
from .problems import Problem


class Whitened:
    """Densities over ``w``, where unconstrained positions are ``center + root @ w``.

    The posterior is close to a standard normal here, the best that a preconditioner
    could do for a sampler.
    """

    def __init__(self, problem: Problem, prepared: Prepared) -> None:
        self.flat = Flat(problem.model, prepared.args)
        self.size = self.flat.size
        self.num_rows = len(prepared.args[0])
        self.args = tuple(jnp.asarray(arg) for arg in prepared.args)
        self.few = tuple(arg[:1] for arg in prepared.args)
        self.center = jnp.asarray(prepared.center, jnp.result_type(float))
        self.root = jnp.asarray(prepared.root, jnp.result_type(float))

    def position(self, w: Array) -> Array:
        """The unconstrained position at ``w``."""
        return self.center + self.root @ w

    def log_prior(self, w: Array) -> Array:
        """The log density of the prior."""
        return self.flat.terms(self.position(w), *self.few)[0]

    def log_rows(self, w: Array, *rows: Array) -> Array:
        """The log likelihood of each of ``rows``."""
        return self.flat.terms(self.position(w), *rows)[1]

    def log_row(self, w: Array, *row: Array) -> Array:
        """The log likelihood of one row, with arguments that have no axis of rows."""
        return self.log_rows(w, *(part[None] for part in row))[0]

    def noise_variance(
        self, batch: int, control: bool, num_positions: int = 16
    ) -> float:
        """The largest variance over coordinates of a minibatch gradient.

        The variance is over all rows, since a few rare ones can dominate it, and
        averaged over positions from a standard normal, where most of the chain will be.

        :param batch: rows per batch, drawn with replacement.
        :param control: whether it is the difference to the gradient at the mode.
        :param num_positions: number of positions.
        """
        slope = jax.vmap(
            jax.grad(self.log_row), in_axes=(None,) + (0,) * len(self.args)
        )

        @jax.jit
        def moments(positions: Array, *rows: Array) -> tuple[Array, Array]:
            def at(w: Array) -> tuple[Array, Array]:
                each = slope(w, *rows)
                if control:
                    each = each - slope(jnp.zeros_like(w), *rows)
                return each.sum(0), (each**2).sum(0)

            return jax.lax.map(at, positions)

        positions = random.normal(random.PRNGKey(7), (num_positions, self.size))
        total, square = summed(lambda *rows: moments(positions, *rows), self.args)
        variance = (self.num_rows * square - total**2) / batch
        return float(variance.mean(0).max())
