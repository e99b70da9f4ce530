"""Row indices computed in advance, for data that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_minibatch.batch import Scheme, Weighted

__all__ = ["RowsAhead"]


class RowsAhead:
    """Rows of future draws, for kernels whose rows do not depend on the state.

    Such a kernel draws rows once per step, by ``fold_in(index_key, step)``, and sets
    ``draws_once_a_step``. Data that stay on the host can then be fetched in advance.
    """

    num_steps: int = 1
    draws_once_a_step = False

    if TYPE_CHECKING:

        @property
        def batch(self) -> Scheme: ...  # noqa: D102

        @property
        def bound_scheme(self) -> Scheme: ...  # noqa: D102

        @property
        def plates(self) -> dict[str, int]: ...  # noqa: D102

    def row_keys(self, key: Array) -> tuple[Array, ...]:
        """The keys with which a step draws rows.

        :param key: the key of the step's rows.
        """
        return (key,)

    @property
    def knows_rows(self) -> bool:
        """Whether :meth:`rows_ahead` can compute the rows of future steps."""
        return self.draws_once_a_step and self.batch.single_round

    @property
    def rows_per_draw(self) -> int:
        """The number of rows of one draw in :meth:`rows_ahead`."""
        scheme = self.bound_scheme
        most = scheme.num_rows(self.plates)
        if isinstance(scheme, Weighted):
            most *= 2  # at most as many additional rows are always read
        return most * self.num_steps * len(self.row_keys(jax.random.key(0)))

    def rows_ahead(
        self, index_keys: Array, designs: Any, start: Array, number: int
    ) -> dict[str, Array]:
        """The rows of future draws, which do not depend on the chain's state.

        :param index_keys: the ``index_key`` of each chain's state.
        :param designs: for a scheme that weights rows, the design of each plate.
        :param start: draws made before.
        :param number: for how many draws.
        :return: for each plate shape ``(chains, number, rows of a draw)``.
        """
        plates = tuple(sorted(self.plates.items()))
        streams = index_keys, designs, start
        return _rows_ahead(
            self.bound_scheme, plates, self.num_steps, number, self.row_keys, streams
        )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _rows_ahead(
    scheme: Scheme,
    plates: tuple[tuple[str, int], ...],
    num_steps: int,
    number: int,
    row_keys: Callable,
    streams: tuple[Array, Any, Array],
) -> dict[str, Array]:
    index_keys, designs, start = streams
    steps = start * num_steps + jnp.arange(number * num_steps, dtype=jnp.int32)

    def of_step(key: Array, step: Array) -> dict[str, Array]:
        keys = row_keys(jax.random.fold_in(key, step))
        # only the indices of batches, so that nothing else is computed
        draws = [scheme.draw(key, dict(plates), designs) for key in keys]
        return {
            name: jnp.concatenate([drawn[name].indices for drawn in draws])
            for name, _ in plates
        }

    found = jax.vmap(jax.vmap(of_step, (None, 0)), (0, None))(index_keys, steps)
    return {
        name: rows.reshape(len(index_keys), number, -1) for name, rows in found.items()
    }
