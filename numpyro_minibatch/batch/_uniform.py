"""Batches of equally likely rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch.batch._contract import BatchSize, Scheme

__all__ = ["with_replacement", "without_replacement"]


@dataclass(frozen=True)
class _WithReplacement(Scheme):
    def indices(self, key: Array, positions: Array, size: int) -> Array:
        return jax.random.randint(key, positions.shape, 0, size, jnp.int32)

    def fpc(self, count: ArrayLike, size: int) -> ArrayLike:
        return 1.0


def without_replacement(size: BatchSize | None = None) -> Scheme:
    """Distinct rows, drawn anew at every step in time that does not depend on N.

    A keyed permutation of the rows is evaluated only at the positions that are needed.

    :param size: rows of a batch (at least 2), or ``{plate: rows}``; by default each
        plate's own ``subsample_size``. A batch of all rows is the full batch.
    :raises TypeError: ``size`` is not an integer.
    :raises ValueError: ``size`` is below 2.

    **Example**

    .. doctest::

        >>> import jax
        >>> from numpyro_minibatch import batch
        >>> scheme = batch.without_replacement({"data": 4})
        >>> drawn = scheme.draw(jax.random.key(0), {"data": 10})["data"]
        >>> len(set(drawn.indices.tolist())), drawn.fpc
        (4, 0.6)
    """
    return Scheme(size)  # type: ignore[arg-type]


def with_replacement(size: BatchSize | None = None) -> Scheme:
    """Independent uniform rows; a row can occur in a batch more than once.

    :param size: rows of a batch (at least 2), or ``{plate: rows}``; by default each
        plate's own ``subsample_size``. It must be smaller than the plate.
    :raises TypeError: ``size`` is not an integer.
    :raises ValueError: ``size`` is below 2.

    **Example**

    .. doctest::

        >>> import jax
        >>> from numpyro_minibatch import batch
        >>> scheme = batch.with_replacement({"data": 4})
        >>> drawn = scheme.draw(jax.random.key(0), {"data": 10})["data"]
        >>> drawn.indices.shape, drawn.fpc
        ((4,), 1.0)
    """
    return _WithReplacement(size)  # type: ignore[arg-type]
