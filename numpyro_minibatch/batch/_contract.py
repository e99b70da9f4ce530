"""The contract of a scheme, which draws the row indices of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch.batch import _strata
from numpyro_minibatch.batch._permutation import permute

__all__ = ["Batch", "Scheme", "full"]

_CHUNK = 16_384  # rows of the full batch that are in memory at once
BatchSize = int | Mapping[str, int]
Designs = Mapping[str, _strata.Design] | None


class Batch(NamedTuple):
    """Rows of one data plate, with what is needed to estimate a total from them.

    :param indices: the rows, int32, shape ``(m,)``.
    :param fpc: finite-population correction: the factor on ``s ** 2 / m`` that
        makes it the variance of the mean of the rows; ``1 - m / N`` without
        replacement (``0`` for all rows), ``1`` with replacement. Here ``s ** 2`` is
        the sample variance with divisor ``m - 1``, so that the product is
        unbiased; with the population variance of divisor ``N`` the same factor
        is ``(N - m) / (N - 1)``.
    :param weights: weights with which values of the rows sum to an unbiased estimate
        of the total of all rows, float32, shape ``(m,)``; ``None`` (the default)
        if every row has weight ``N / m``.
    :param num_draws: for weighted rows, how many consecutive rows are independent draws
        from one stratum.
    :param num_sure: for weighted rows, how many at the front are always read.
    """

    indices: Array
    fpc: ArrayLike
    weights: Array | None = None
    num_draws: int = 1
    num_sure: int = 0


def check_rows(name: str, value: object, minimum: int) -> int:
    """Raise unless a value is a number of rows of at least ``minimum``.

    :param name: the argument's name, for the messages.
    :param value: the argument that the user gave.
    :param minimum: the smallest number allowed.
    :return: the value as an ``int``.
    :raises TypeError: the value is not an integer.
    :raises ValueError: it is too small.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        shape = getattr(value, "shape", ())
        got = f"an array of shape {shape}" if shape else repr(value)
        example = (
            'batch_size=100, or batch_size={"data": 100} for a model with several '
            "data plates"
            if minimum == 2
            else f"{name}=1000"
        )
        raise TypeError(
            f"{name} must be an integer number of rows, got {got} "
            f"({type(value).__name__}). Write for example {example}."
        )
    if value < minimum:
        why = " (one row has no variance)" if minimum == 2 and value == 1 else ""
        example = "batch_size=100" if minimum == 2 else f"{name}=1000"
        raise ValueError(
            f"{name} must be at least {minimum}, got {value}{why}. Write for example "
            f"{example}."
        )
    return int(value)


@dataclass(frozen=True)
class Scheme:
    """A way to draw the rows of a minibatch; the base of the ``batch.*`` choices.

    :param size: rows of one draw: an integer, a dict ``{plate: rows}``, or ``None``
        for the model's own ``subsample_size``. Stored as a sorted tuple of pairs, so
        that schemes have value equality and a hash.
    """

    size: int | tuple[tuple[str, int], ...] | None = None

    #: whether a decision reads every row, so that its estimate has no variance
    reads_all_rows = False

    def __post_init__(self) -> None:
        size = self.size
        # `replace` passes a tuple of pairs
        is_pairs = isinstance(size, tuple) and all(isinstance(x, tuple) for x in size)
        if isinstance(size, Mapping) or is_pairs:
            counts = {
                plate: check_rows(f"batch_size[{plate!r}]", count, 2)
                for plate, count in dict(size).items()  # type: ignore[arg-type]
            }
            object.__setattr__(self, "size", tuple(sorted(counts.items())))
        elif size is not None:
            object.__setattr__(self, "size", check_rows("batch_size", size, 2))

    @property
    def widths(self) -> dict[str, int]:
        """Rows of one draw for each plate, once they are known."""
        assert isinstance(self.size, tuple)
        return dict(self.size)

    def bound(self, widths: Mapping[str, int], plates: Mapping[str, int]) -> Scheme:
        """The scheme for a model's plates; a draw of all rows is the full batch.

        :param widths: rows of one draw for each plate.
        :param plates: the number of rows of each plate.
        """
        if all(widths[name] == size for name, size in plates.items()):
            return full().bound(widths, plates)
        return replace(self, size=tuple(sorted(widths.items())))

    def fitted(self, widths: Mapping[str, int], plates: Mapping[str, int]) -> Scheme:
        """The scheme for a model's plates, with its own size where it has one.

        :param widths: rows of one draw of each plate for which the scheme has no size.
        :param plates: the number of rows of each plate.
        """
        own = dict(widths)
        if isinstance(self.size, tuple):
            own |= dict(self.size)
        elif self.size is not None:
            own = dict.fromkeys(widths, self.size)
        within = {name: min(own[name], size) for name, size in plates.items()}
        return self.bound(within, plates)

    # how many rounds of `size` rows a decision reads --------------------------------

    @property
    def single_round(self) -> bool:
        """Whether every decision reads exactly one draw."""
        return True

    @property
    def sequential(self) -> bool:
        """Whether a test may stop the reading after each slice of distinct rows."""
        return False

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that results record, for :func:`~numpyro_minibatch.diagnose`.

        They follow from the scheme's methods, so that a subclass need not state them.
        """
        return {
            "sizes_itself": not self.single_round,
            "reads_all_rows": self.reads_all_rows,
            # the variance of a mean of m rows is then that of one row over m, whatever
            # the number of rows of the plate
            "with_replacement": bool(self.fpc(1, 2) == 1.0),
        }

    def first(self, plates: Mapping[str, int]) -> dict[str, Array]:
        """The number of rows of each plate that a decision reads first."""
        return {name: jnp.int32(width) for name, width in self.widths.items()}

    def extend(
        self,
        counts: Mapping[str, Array],
        variances: Mapping[str, Array],
        plates: Mapping[str, int],
        reached: ArrayLike,
        max_variance: ArrayLike,
    ) -> tuple[dict[str, Array], ArrayLike]:
        """The rows to read next, once the requested ones have been read.

        :param counts: rows read so far of each plate.
        :param variances: each plate's part of the estimate's variance, without the
            finite-population correction.
        :param plates: the number of rows of each plate.
        :param reached: how often all requested rows had been read before.
        :param max_variance: the largest variance that the acceptance test tolerates.
        :return: the rows requested from now on, and whether to start over with fresh
            ones.
        """
        return dict(counts), False

    # the rows -----------------------------------------------------------------------

    def indices(self, key: Array, positions: Array, size: int) -> Array:
        """The rows at ``positions`` of the stream of ``key``."""
        return permute(key, positions, size)

    def fpc(self, count: ArrayLike, size: int) -> ArrayLike:
        """The finite-population correction after ``count`` of ``size`` rows."""
        return (size - count) / size  # exactly zero when all rows were read

    def num_rows(self, plates: Mapping[str, int], designs: Designs = None) -> int:
        """The number of rows that one draw reads; for the full batch, all rows.

        :param plates: the number of rows of each plate.
        :param designs: for a :class:`Weighted` scheme, the design of each plate.
        """
        return sum(self.widths.values())

    def draw(
        self, key: Array, plates: Mapping[str, int], designs: Designs = None
    ) -> dict[str, Batch]:
        """One draw: a :class:`Batch` for each plate.

        :param key: PRNG key of the step.
        :param plates: the number of rows of each plate.
        :param designs: for a :class:`Weighted` scheme, the design of each plate.
        """
        batches = {}
        for name, plate_key in self.plate_keys(key).items():
            width, size = self.widths[name], plates[name]
            rows = self.rows_at(plate_key, jnp.arange(width, dtype=jnp.int32), size)
            batches[name] = Batch(rows, 0.0 if width == size else self.fpc(width, size))
        return batches

    def rows_at(self, key: Array, positions: Array, size: int) -> Array:
        """The rows at ``positions``, which may run beyond the last one."""
        positions = jnp.minimum(positions, size - 1)
        if len(positions) >= size:
            # all rows, in order: numpyro.subsample ignores the order of N indices
            return positions
        return self.indices(key, positions, size)

    def plate_keys(self, key: Array) -> dict[str, Array]:
        """A key for the rows of each plate."""
        names = list(self.widths)
        if len(names) == 1:
            return {names[0]: key}
        return dict(zip(names, jax.random.split(key, len(names)), strict=True))


@dataclass(frozen=True)
class FullBatch(Scheme):
    """All rows in chunks; see :func:`full`."""

    reads_all_rows = True

    @property
    def single_round(self) -> bool:
        return False

    @property
    def sequential(self) -> bool:
        return True

    def bound(self, widths: Mapping[str, int], plates: Mapping[str, int]) -> Scheme:
        chunks = dict(self.size) if isinstance(self.size, tuple) else {}
        default = self.size if isinstance(self.size, int) else _CHUNK
        sizes = {n: min(chunks.get(n, default), size) for n, size in plates.items()}
        return replace(self, size=tuple(sorted(sizes.items())))

    def first(self, plates: Mapping[str, int]) -> dict[str, Array]:
        return {name: jnp.int32(size) for name, size in plates.items()}

    def indices(self, key: Array, positions: Array, size: int) -> Array:
        return positions

    def num_rows(self, plates: Mapping[str, int], designs: Designs = None) -> int:
        return sum(plates.values())


def full(chunk_size: BatchSize | None = None) -> Scheme:
    """All rows, read in chunks of bounded memory; the estimate has no variance.

    :param chunk_size: rows of a chunk, or ``{plate: rows}``; by default at most
        16384.
    :raises TypeError: ``chunk_size`` is not an integer.
    :raises ValueError: ``chunk_size`` is below 2.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import batch
        >>> batch.full(1000) == batch.full(1000)
        True
    """
    return FullBatch(chunk_size)  # type: ignore[arg-type]
