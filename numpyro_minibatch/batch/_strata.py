"""Rows drawn by importance: a few are always read, the rest come from equal strata.

Uniform rows estimate a sum badly if a few rows carry most of it: a batch without those
few has the wrong mean *and* too little scatter to reveal it. Here every row has a
score, which is used in three ways: rows that would be drawn about once per batch anyway
are always read; the others are drawn with probability proportional to their score; and
they are drawn in strata of rows that are expected to be similar.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch._internal.keys import wide
from numpyro_minibatch._internal.threads import in_parallel

__all__ = ["Design", "build", "draw", "exact_variance", "stratum_of"]

# Probabilities within a stratum are integer multiples of 1 / _WHOLE: that of a row is
# the fraction of the 32-bit words that select it. Sums of integers are exact, so the
# tables of all strata are built in one pass, sum to one exactly, and state exactly the
# probabilities with which rows are drawn.
_WHOLE = 1 << 32
_FEWEST_SLOTS = 64  # of which tables have a multiple
_OF_PART = 1 << 17  # rows of which tables are made at once


class Design(NamedTuple):
    """The rows that are always read, and the tables for drawing the others.

    The others are in slots. The slots of a stratum are consecutive, and their number is
    a power of two; behind the last stratum there may be slots that belong to none. A
    draw is one random word: its upper bits select a slot of the stratum, and its lower
    bits decide whether to keep it or to take its alias.

    :param sure: rows that are always read, int32, shape ``(S,)``; ``S`` may be 0.
    :param start: first slot of each stratum, int32, shape ``(H,)``.
    :param shift: number of lower bits, from 1 to 31, uint32, shape ``(H,)``.
    :param slots: what :func:`pack` makes of the ``R`` slots, uint32, shape ``(R, 4)``.
    """

    sure: Array
    start: Array
    shift: Array
    slots: Array

    @property
    def threshold(self) -> Array:
        """The number of values of the lower bits that keep a slot, uint32, ``(R,)``."""
        return self.slots[..., 0]

    @property
    def alias(self) -> Array:
        """The slot of the same stratum that is taken otherwise, int32."""
        return self.slots[..., 1].astype(jnp.int32)

    @property
    def row(self) -> Array:
        """The row of each slot, int32; arbitrary for slots that no draw keeps."""
        return self.slots[..., 2].astype(jnp.int32)

    @property
    def inverse(self) -> Array:
        """One over the probability, within its stratum, of each slot's row."""
        return jax.lax.bitcast_convert_type(self.slots[..., 3], jnp.float32)

    @property
    def num_strata(self) -> int:
        """The number of strata ``H``."""
        return self.start.shape[-1]

    @property
    def num_sure(self) -> int:
        """The number of rows ``S`` that are always read."""
        return self.sure.shape[-1]


def pack(
    threshold: ArrayLike, alias: ArrayLike, row: ArrayLike, inverse: ArrayLike
) -> np.ndarray[Any, Any]:
    """The numbers of each slot in one row, so that a draw waits for memory once.

    :param threshold: how many values of the lower bits keep the slot, shape ``(R,)``.
    :param alias: the slot that is taken otherwise.
    :param row: the row of the slot.
    :param inverse: one over the row's probability, as float32.
    :return: uint32, shape ``(R, 4)``.
    """
    columns = [np.asarray(x).astype(np.uint32) for x in (threshold, alias, row)]
    columns.append(np.asarray(inverse, np.float32).view(np.uint32))
    return np.stack(columns, axis=-1)


def build(
    scores: ArrayLike,
    order_by: ArrayLike | None,
    size: int,
    *,
    num_draws: int = 2,
    uniform: float = 0.1,
    num_sure: int | None = None,
) -> Design:
    """Design how to draw rows whose values are about as large as their scores.

    A row's probability is its score over the sum of scores, mixed with an equal
    probability of weight ``uniform``, so that no row is left out however wrong its
    score. A row that ``size`` such draws would find at least once on average is always
    read instead, and the probability is shared anew among the rest until no such row is
    left [1]. At most ``size`` rows are always read, so that a batch has at most twice
    that many. The others are sorted by ``order_by`` over probability, which is
    proportional to the estimate of the total that each row alone would give, and cut
    into strata of nearly equal probability. The scatter within a stratum is estimated
    from ``num_draws`` independent rows of it [2, 3]. One stratum with
    ``num_draws=size`` is plain importance sampling. Runs on the host, in float64,
    without a loop over rows.

    Data of ``size`` rows, or slightly more, are read completely, without strata.

    :param scores: the importance of each row, at least 0, shape ``(N,)``.
    :param order_by: values that are similar for rows that vary together, such as their
        loadings on the leading direction of a pilot, shape ``(N,)``; by default the
        order of the rows.
    :param size: rows drawn at random, ``num_draws`` of each stratum; a remainder is not
        drawn.
    :param num_draws: rows of a stratum, at least 2.
    :param uniform: fraction of the probability that is spread evenly, in ``(0, 1]``.
    :param num_sure: always read exactly this many rows of highest score, instead of
        those that the rule above finds.
    :return: the tables, as JAX arrays.
    :raises ValueError: a score is negative, or it or ``order_by`` is not finite; the
        shapes differ; a setting is out of range.

    **References:**

    1. C.-E. Sarndal, B. Swensson and J. Wretman (1992), "Model Assisted Survey
       Sampling", section 3.6.
    2. A. J. Walker (1977), "An efficient method for generating discrete random
       variables with general distributions", ACM TOMS 3, 253-256.
    3. L. Huebschle-Schneider and P. Sanders (2022), "Parallel weighted random
       sampling", ACM TOMS 48(3).

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch.batch._strata import build
        >>> scores = np.r_[500.0, np.linspace(1.0, 2.0, 999)]
        >>> design = build(scores, None, 20)
        >>> design.sure.tolist(), design.num_strata, design.start.tolist()[::3]
        ([0], 10, [0, 512, 896, 1280])
    """
    values = _checked_rows("scores", scores)
    num_rows = len(values)
    if (values < 0).any():
        bad = int(np.argmax(values < 0))
        raise ValueError(
            f"scores[{bad}] is {values[bad]:.4g}, but a score measures the size of a "
            "row's value and cannot be negative: pass for example its root mean square."
        )
    order = None if order_by is None else _checked_rows("order_by", order_by)
    if order is not None and len(order) != num_rows:
        raise ValueError(
            f"order_by has {len(order)} values and scores has {num_rows}; pass one of "
            "each per row of the data."
        )
    if not 2 <= num_draws <= size:
        raise ValueError(
            f"num_draws={num_draws} of size={size}: a stratum needs at least 2 draws "
            "to estimate its scatter, and has at most all of them. Write for example "
            "size=100, num_draws=2."
        )
    if not 0.0 < uniform <= 1.0:
        raise ValueError(
            f"uniform={uniform!r} must be in (0, 1]: without a uniform part, a row "
            "whose score is zero would never be read. The default is 0.1."
        )
    if num_sure is not None and num_sure < 0:
        raise ValueError(
            f"num_sure={num_sure} must be at least 0: it is the number of rows that "
            "are always read."
        )

    largest = values.max()
    values = values / largest if largest > 0.0 else values  # so that sums are finite
    num_strata = size // num_draws
    sure = _take_all(values, size, uniform, num_sure)
    if len(sure) + num_strata * num_draws >= num_rows:
        # in order, because numpyro.subsample ignores the order of N indices
        sure = np.arange(num_rows)
    is_left = np.ones(num_rows, bool)
    is_left[sure] = False
    row = np.flatnonzero(is_left).astype(np.int32)
    probability = _mixed(values[row], uniform)
    if order is not None and num_strata > 1:
        with np.errstate(over="ignore"):  # an infinite quotient sorts correctly, too
            # divide by the mixed probability rather than the score alone: a row's value
            # is divided by it, and it is never zero
            by = _sorted(order[row] / probability)
        row, probability = row[by], probability[by]
    first = _cut(probability, num_strata)
    count = np.diff(np.append(first, len(row)))
    # one slot for each row, and empty slots up to a power of two, at least 2
    bits = np.maximum(np.frexp(count - 0.5)[1], 1).astype(np.int64)
    start = np.append(0, np.cumsum(1 << bits))
    # pad to a multiple of about a quarter of the rows, so that other data of the same
    # shape mostly have tables of the same shape and can use the same program
    grain = max(1 << len(row).bit_length() >> 2, _FEWEST_SLOTS)
    slots = np.zeros((start[-1] + -start[-1] % grain, 4), np.uint32)
    slots[:, 3] = np.ones((), np.float32).view(np.uint32)

    def fill(strata: slice) -> None:
        """Write the tables of some strata."""
        starts, counts, sizes = start[strata], count[strata], 1 << bits[strata]
        begin, filled = first[strata][0], counts.sum()
        here = slice(begin, begin + filled)
        # the slot of each row: those of a stratum are at its beginning
        away = np.repeat(starts - starts[0] - (first[strata] - begin), counts)
        slot = np.arange(filled) + away
        weight = np.zeros(sizes.sum(), np.int64)
        own = _weights(probability[here], first[strata] - begin, counts)
        weight[slot] = own
        threshold, alias = _alias_tables(weight, np.repeat(_WHOLE // sizes, sizes))
        row_of, inverse = np.zeros(len(weight), np.int32), np.ones(len(weight))
        row_of[slot], inverse[slot] = row[here], _WHOLE / own
        mine = slots[starts[0] : starts[0] + len(weight)]
        mine[:] = pack(threshold, alias + starts[0], row_of, inverse)

    in_parallel(fill, _parts(count))
    return Design(
        # NumPy converts, because JAX would compile a program for each conversion
        sure=jax.device_put(np.sort(sure).astype(np.int32)),
        start=jax.device_put(np.asarray(start[:-1], np.int32)),
        shift=jax.device_put(np.asarray(32 - bits, np.uint32)),
        slots=jax.device_put(slots),
    )


def _sorted(values: np.ndarray) -> np.ndarray:
    """The places of values in ascending order, equal ones in the order of the rows.

    Values that agree in 20 bits after the first count as equal: the other half of a
    word is the place, and words are sorted several times faster than places.
    """
    bits = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    negative = bits >> np.uint64(63) == 1
    word = np.where(negative, ~bits, bits | np.uint64(1 << 63))
    word &= np.uint64(0xFFFFFFFF << 32)
    word |= np.arange(len(values), dtype=np.uint64)
    word.sort()
    return (word & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _parts(count: np.ndarray) -> list[slice]:
    """Strata next to each other whose rows fit in a processor's cache together."""
    place = (np.cumsum(count) - count) // _OF_PART
    edges = [*np.flatnonzero(np.diff(place, prepend=-1)), len(count)]
    return [slice(*ends) for ends in pairwise(edges)]


def _checked_rows(name: str, values: ArrayLike) -> np.ndarray[Any, Any]:
    """The ``values`` in float64; raises if they are not finite numbers per row."""
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"{name} has shape {array.shape}, but must hold one number per row of the "
            "data: pass an array of shape (N,)."
        )
    bad = ~np.isfinite(array)
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(
            f"{name}[{first}] is {array[first]}, and {int(bad.sum()):,} of "
            f"{len(array):,} values are not finite: a row without a finite value at "
            "the draws of the pilot cannot be weighted. Check the model's log "
            "likelihood there, or scale its inputs."
        )
    return array


def _take_all(
    scores: np.ndarray, size: int, uniform: float, num_sure: int | None
) -> np.ndarray:
    """The rows that are always read, highest score first."""
    num_rows = len(scores)
    most = min(size if num_sure is None else num_sure, num_rows)
    if not most:
        return np.zeros(0, np.intp)
    top = np.sort(np.argpartition(scores, num_rows - most)[num_rows - most :])
    top = top[np.argsort(-scores[top], kind="stable")]
    if num_sure is not None:
        return top
    # Row k joins if size draws from it and all rows below find it once on average.
    # Removing rows one at a time, or all that qualify at once, stops at the same row,
    # because the others' probabilities only rise.
    below = np.ones(num_rows, bool)
    below[top] = False
    mine = scores[top]
    remaining = scores[below].sum() + np.cumsum(mine[::-1])[::-1]
    even = 1.0 / (num_rows - np.arange(most))
    share = np.divide(mine, remaining, out=even.copy(), where=remaining > 0.0)
    probability = (1.0 - uniform) * share + uniform * even
    stays = size * probability < 1.0
    return top[: np.argmax(stays)] if stays.any() else top


def _mixed(scores: np.ndarray, uniform: float) -> np.ndarray:
    """Each row's probability; its sum is one."""
    even = 1.0 / max(len(scores), 1)
    total = scores.sum()
    if not total > 0.0:
        return np.full(len(scores), even)
    return (1.0 - uniform) * (scores / total) + uniform * even


def _cut(probability: np.ndarray, num_strata: int) -> np.ndarray:
    """The first slot of each of ``num_strata`` nearly equal parts, or of fewer.

    A row belongs to the part that contains the middle of its probability. A row that is
    wider than a whole part leaves parts without a row, which are dropped.
    """
    if not len(probability):
        return np.zeros(0, np.intp)
    end = np.cumsum(probability)
    edges = end[-1] * np.arange(1, num_strata) / num_strata
    start = np.unique(np.append(0, np.searchsorted(end - 0.5 * probability, edges)))
    return start[start < len(probability)]


def _weights(
    probability: np.ndarray, start: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Each row's share of its stratum, in units of which the stratum has ``_WHOLE``.

    Every row gets one unit, so that none is left out. The rest is distributed by the
    rounded running sum, which is exact at the end and never off by more than one.
    """
    if not len(start):
        return np.zeros(0, np.int64)
    total = np.repeat(np.add.reduceat(probability, start), count)
    rest = np.repeat(_WHOLE - count, count)
    running = np.cumsum(probability / total * rest)
    # each stratum starts and ends at an integer, however the sum was rounded
    end = np.cumsum(_WHOLE - count)
    ends = np.repeat(end, count)
    running = np.clip(np.rint(running).astype(np.int64), ends - rest, ends)
    running[np.append(start[1:], len(running)) - 1] = end
    return 1 + np.diff(running, prepend=0)


def _alias_tables(
    weight: np.ndarray, unit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds and aliases of all strata at once, from the weights of their slots.

    A sweep along the light and the heavy slots assigns each light slot's deficit to the
    current heavy slot; a heavy slot that gave more than its surplus passes the
    difference on to the next. Prefix sums of both sides give the current slot. Deficits
    and surpluses of a stratum have exactly the same sum, so that none crosses over.

    :param unit: the mean weight of the slots of the same stratum.
    """
    light = np.flatnonzero(weight < unit)
    heavy = np.flatnonzero(weight > unit)
    deficit = np.cumsum(unit[light] - weight[light])
    surplus = np.cumsum(weight[heavy] - unit[heavy])
    threshold = np.minimum(weight, unit)
    alias = np.arange(len(weight))
    before = deficit - (unit[light] - weight[light])
    alias[light] = heavy[np.searchsorted(surplus, before, side="right")]
    # the light slot with which a heavy one's surplus is used up
    last = np.searchsorted(deficit, surplus, side="left")
    excess = deficit[last] - surplus
    threshold[heavy] = unit[heavy] - excess
    gives = np.flatnonzero(excess)
    alias[heavy[gives]] = heavy[gives + 1]
    return threshold, alias


def draw(design: Design, key: Array, num_draws: int) -> tuple[Array, Array]:
    """One batch: the rows that are always read, then ``num_draws`` of each stratum.

    The work is proportional to the batch, whatever the number of rows.

    :param design: the tables of :func:`build`.
    :param key: a JAX random key.
    :param num_draws: rows of each stratum, a Python integer.
    :return: the rows, int32, shape ``(S + H * num_draws,)``, with those of a stratum
        next to each other, and their weights, float32, with which the values of the
        rows sum to an unbiased estimate of the total of all rows.

    **Example**

    .. doctest::

        >>> import jax
        >>> import numpy as np
        >>> from numpyro_minibatch.batch._strata import build, draw
        >>> design = build(np.r_[500.0, np.ones(999)], None, 20)
        >>> rows, weights = draw(design, jax.random.key(0), 2)
        >>> rows.shape, int(rows[0]), float(weights[0])
        ((21,), 0, 1.0)
    """
    design = Design(*map(jnp.asarray, design))
    shape = design.num_strata, num_draws
    word = wide(partial(jax.random.bits, key, dtype=jnp.uint32), shape)
    shift = design.shift[:, None]
    slot = design.start[:, None] + (word >> shift).astype(jnp.int32)
    rest = word & ((jnp.uint32(1) << shift) - 1)
    found = design.slots[slot]
    slot = jnp.where(rest < found[..., 0], slot, found[..., 1].astype(jnp.int32))
    found = design.slots[slot.ravel()]
    rows = jnp.concatenate([design.sure, found[:, 2].astype(jnp.int32)])
    inverse = jax.lax.bitcast_convert_type(found[:, 3], jnp.float32)
    weights = jnp.concatenate(
        [jnp.ones(design.num_sure, jnp.float32), inverse / np.float32(num_draws)]
    )
    return rows, weights


def stratum_of(
    design: Design, num_rows: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The stratum of each row, and its probability in a draw from the stratum.

    :param design: the tables of :func:`build`.
    :param num_rows: the number of rows ``N`` of the data.
    :return: strata, int32, ``-1`` for rows that are always read, and probabilities,
        float64, ``1`` for those; both of shape ``(N,)``, on the host.
    """
    stratum = np.full(num_rows, -1, np.int32)
    probability = np.ones(num_rows)
    slots, start = np.asarray(design.slots), np.asarray(design.start)
    sizes = 1 << (32 - np.asarray(design.shift, np.int64))

    def fill(strata: slice) -> None:
        """Write those of the rows of some strata."""
        own, first = sizes[strata], start[strata][0]
        mine = slots[first : first + own.sum()]
        filled = np.flatnonzero(mine[:, 0])
        numbers = np.arange(strata.start, strata.stop, dtype=np.int32)
        row = mine[filled, 2].astype(np.intp)
        stratum[row] = np.repeat(numbers, own)[filled]
        inverse = np.ascontiguousarray(mine[filled, 3]).view(np.float32)
        probability[row] = 1.0 / inverse.astype(np.float64)

    in_parallel(fill, _parts(sizes))
    return stratum, probability


def _drawn(design: Design) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The slots that are not empty, and the strata that they are in."""
    bits = 32 - np.asarray(design.shift, np.int64)
    stratum = np.repeat(np.arange(len(bits), dtype=np.int32), 1 << bits)
    slot = np.flatnonzero(np.asarray(design.slots)[..., 0])
    return slot, stratum[slot]


def exact_variance(
    design: Design, values: ArrayLike, num_draws: int
) -> np.ndarray[Any, Any]:
    """The true variance of the estimated total of known values of all rows.

    :param design: the tables of :func:`build`.
    :param values: one value per row, shape ``(..., N)``.
    :param num_draws: rows of each stratum.
    :return: the variance, float64, without the last axis of ``values``, on the host.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch.batch._strata import build, exact_variance
        >>> values = np.exp(np.arange(1000) * 379 % 1000 / 100.0)
        >>> good, bad = build(values, values, 20), build(np.ones(1000), None, 20)
        >>> [int(exact_variance(d, values, 2) ** 0.5) for d in (good, bad)]
        [48054, 980079]
    """
    slot, stratum = _drawn(design)
    values = np.asarray(values, np.float64)[..., np.asarray(design.row)[slot]]
    if not len(slot):
        return np.zeros(values.shape[:-1])
    start = np.searchsorted(stratum, np.arange(design.num_strata))
    inverse = np.asarray(design.inverse, np.float64)[slot]
    # around the total of each stratum, so that no two large sums are subtracted
    total = np.add.reduceat(values, start, axis=-1)[..., stratum]
    square = np.square(values * inverse - total) / inverse
    return square.sum(-1) / num_draws
