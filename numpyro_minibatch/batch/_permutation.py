"""A keyed permutation of rows, evaluated only at the positions that are needed.

Rows drawn without replacement are the images of distinct positions under a random
permutation, so a batch needs neither a shuffle of the data nor memory of its size.
"""

from __future__ import annotations

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

__all__ = ["permute"]

# With ideal round functions on an a x b grid, two positions of one column keep
# their distance with probability b ** (1 - rounds / 2); such a pair mixes slowest (see
# ``_feistel``). On the smallest grid, 10 x 13, a million keys distinguish seven rounds
# from uniform, ten million distinguish eight, and neither number nine or ten. Twelve
# leave a margin; the last four cost about 0.3 microseconds for a hundred rows.
_ROUNDS = 12

# Up to this size the permutation is drawn exactly: the network mixes worst on small
# grids, and comparing all pairs of words takes only a few microseconds.
_TINY = 128


def permute(key: Array, positions: ArrayLike, size: int) -> Array:
    """Evaluate a pseudo-random permutation of ``range(size)`` at ``positions``.

    Distinct positions have distinct values, and all positions together have every
    value once. The work is proportional to the number of positions, whatever the
    size; one call to ``jax.random`` consumes the key. Above 128 the permutation is
    a generalized Feistel network [1, 2] over a grid of about ``size`` cells, whose
    few surplus cells are skipped by cycle walking [1]; up to 128 it is uniform over all
    permutations. All arithmetic is on 32-bit words, so x64 mode changes no value.

    :param key: a JAX random key, typed or raw, that decides the permutation.
    :param positions: integers in ``[0, size)``, any shape. A position outside that
        range has the value of position ``size - 1``: valid, but not distinct.
    :param size: the number of values, a Python integer in ``[1, 2 ** 31)``.
    :return: int32 values in ``[0, size)`` with the shape of ``positions``.
    :raises ValueError: if ``size`` is not a Python integer in that range.
    :raises TypeError: if ``positions`` are not integers.

    **References:**

    1. J. Black and P. Rogaway (2002), "Ciphers with arbitrary finite domains",
       CT-RSA, 114-130.
    2. B. Morris, P. Rogaway and T. Stegers (2009), "How to encipher messages on a
       small domain", CRYPTO, 286-302.

    **Example**

    .. doctest::

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch.batch._permutation import permute
        >>> rows = permute(jax.random.key(0), jnp.arange(1_000), 1_000)
        >>> bool((jnp.sort(rows) == jnp.arange(1_000)).all())
        True
        >>> batch = permute(jax.random.key(1), jnp.arange(5), 1_000_000_000)
        >>> len(set(batch.tolist()))
        5
    """
    size = _check_size(size)
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"positions have dtype {positions.dtype}, but a position is a whole "
            "number: pass an integer array such as jnp.arange(batch_size)"
        )
    # As an unsigned word a negative position is large, so one bound is enough.
    places = lax.min(positions.astype(jnp.uint32), np.uint32(size - 1))
    if size <= _TINY:
        values = _rank(jax.random.bits(key, (size,), jnp.uint32), places)
    else:
        values = _feistel(jax.random.bits(key, (_ROUNDS,), jnp.uint32), places, size)
    return values.astype(jnp.int32)


def _check_size(size: int) -> int:
    """Return ``size`` as an ``int``, or raise with what is wrong."""
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if not 1 <= number < 2**31 or isinstance(size, bool):
        raise ValueError(
            f"size is {size!r}, but a permutation needs a Python integer from 1 to "
            "2 ** 31 - 1 that is known when the program is traced: pass the number "
            "of rows, such as data.shape[0]"
        )
    return number


def _rank(words: Array, places: Array) -> Array:
    """Return how many of the random ``words`` are below the one at each place."""
    # The index in the low bits makes equal words impossible. With 25 or more random
    # bits above it, the order of a pair differs from a fair coin by at most 2 ** -26.
    index = np.arange(words.size, dtype=np.uint32)
    low = np.uint32((1 << (words.size - 1).bit_length()) - 1)
    words = words & ~low | index
    mine = words.at[places].get(mode="promise_in_bounds")
    return jnp.sum(words < mine[..., None], axis=-1, dtype=jnp.uint32)


def _feistel(words: Array, places: Array, size: int) -> Array:
    """Permute ``range(size)`` with one network round for each of the ``words``.

    A place is a cell ``(row, column)`` of the grid, and the rounds alternately shift
    each column and each row by its own random amount. Two cells of a column keep their
    distance until they leave it, and move apart unless they land in the same column
    again; hence the probability in the comment on ``_ROUNDS``.
    """
    num_rows, num_columns = _grid(size)

    def network(cells: Array) -> Array:
        row, column = cells // np.uint32(num_columns), cells % np.uint32(num_columns)
        for i in range(words.size):
            if i % 2 == 0:
                row = _shift(row, _mix(column + words[i]), num_rows)
            else:
                column = _shift(column, _mix(row + words[i]), num_columns)
        return row * np.uint32(num_columns) + column

    # The rounds must not be fused with the code that reads the rows. If that code
    # traverses them in another order, XLA of jax 0.12 doubles the code in each round.
    cells = lax.optimization_barrier(network(places))
    if num_rows * num_columns == size:
        return cells
    # Follow the cycle of a surplus cell until it comes back into range. It always does,
    # because the cycle contains the place where it started.
    return lax.while_loop(
        lambda cells: jnp.any(cells >= np.uint32(size)),
        lambda cells: jnp.where(cells >= np.uint32(size), network(cells), cells),
        cells,
    )


def _grid(size: int) -> tuple[int, int]:
    """Return the sides ``a <= b`` of a grid with few cells more than ``size``."""
    # Sides within a factor of two (and so below 2 ** 17): a narrow grid mixes worse,
    # while the walk that a better fit would save is rare. Of equal fits, the first is
    # closest to a square.
    sides = range(math.isqrt(size), math.isqrt(size // 2) - 1, -1)
    num_rows = min(sides, key=lambda side: -size % side)
    return num_rows, -(-size // num_rows)


def _shift(half: Array, amount: Array, side: int) -> Array:
    """Add ``amount`` to ``half`` around a circle of ``side`` cells."""
    # The top bit is dropped so that the sum cannot wrap at 2 ** 32, which would shift
    # some of a circle's cells by a different amount than the rest.
    return (half + (amount >> np.uint32(1))) % np.uint32(side)


def _mix(word: Array) -> Array:
    """Return a well mixed word: a bijection with two multiplications."""
    # The multipliers and shifts are C. Wellons's published "lowbias32".
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))
