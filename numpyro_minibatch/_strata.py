"""Rows by how much they matter: a few always read, the rest drawn in equal strata.

A sum over all rows, most of it in a few of them, is badly served by uniform rows: a
batch without those few has the wrong mean *and* no scatter that would say so. Here
every row has a score, and three devices act one after the other: rows that would be
drawn about once a batch anyway are always read; the others are drawn in proportion to
their score; and they are drawn in strata of rows that are expected to be alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

__all__ = ["Design", "build", "draw", "exact_variance", "stratum_of"]

# Probabilities are whole multiples of 1 / (count * _UNIT) within a stratum, the
# resolution of the 32 random bits that a slot's threshold is compared with. Sums of
# integers are exact, so the tables of all strata come from one pass and fit exactly.
_UNIT = 1 << 32


class Design(NamedTuple):
    """Which rows are always read, and the tables from which the others are drawn.

    The rows that are not always read stand in ``R`` slots, those of a stratum side
    by side. A draw picks a slot of its stratum, and keeps it or takes its alias.

    :param sure: rows that are always read, int32, shape ``(S,)``; ``S`` may be 0.
    :param start: first slot of each stratum, int32, shape ``(H,)``.
    :param count: number of slots of each stratum, at least 1, int32, shape ``(H,)``.
    :param threshold: probability that a slot is kept, float32, shape ``(R,)``.
    :param alias: the slot of the same stratum that is taken otherwise, int32,
        shape ``(R,)``.
    :param row: the row of each slot, int32, shape ``(R,)``.
    :param inverse: one over the probability, within its stratum, of each slot's row,
        float32, shape ``(R,)``.
    """

    sure: Array
    start: Array
    count: Array  # type: ignore[assignment]  # not the method of a tuple
    threshold: Array
    alias: Array
    row: Array
    inverse: Array

    @property
    def num_strata(self) -> int:
        """The number of strata ``H``."""
        return self.start.shape[-1]

    @property
    def num_sure(self) -> int:
        """The number of rows ``S`` that are always read."""
        return self.sure.shape[-1]


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

    A row's probability is its share of all scores, mixed with ``uniform`` parts of
    equal probability, so that no row is left out however wrong its score. A row that
    ``size`` such draws would find at least once on average is read always instead, and
    the rest share the probability anew until no such row is left [1]; but no more
    than ``size`` rows, so that a batch has at most twice that many. The others are
    sorted by ``order_by`` over probability, which is what each would say of the total,
    and cut into strata of nearly equal probability; ``num_draws`` independent rows of
    each stratum tell the scatter within it [2, 3]. One stratum with ``num_draws=size``
    is plain importance sampling. Runs on the host, in float64, without a loop over
    rows.

    A table of ``size`` rows or few more is read whole: then no stratum is left.

    :param scores: how much each row matters, at least 0, shape ``(N,)``.
    :param order_by: values that are alike for rows that act alike, such as their
        loadings on the leading direction of a pilot, shape ``(N,)``; by default the
        order of the rows.
    :param size: rows drawn at random, of which strata take ``num_draws`` each; a rest
        is not drawn.
    :param num_draws: rows of a stratum, at least 2.
    :param uniform: share of the probability that is spread evenly, in ``(0, 1]``.
    :param num_sure: read exactly so many rows of highest score always, instead of
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
        >>> from numpyro_minibatch._strata import build
        >>> scores = np.r_[500.0, np.linspace(1.0, 2.0, 999)]
        >>> design = build(scores, None, 20)
        >>> design.sure.tolist(), design.num_strata, design.count.tolist()[::3]
        ([0], 10, [135, 104, 89, 78])
    """
    values = _checked_rows("scores", scores)
    num_rows = len(values)
    if (values < 0).any():
        bad = int(np.argmax(values < 0))
        raise ValueError(
            f"scores[{bad}] is {values[bad]:.4g}, but a score says how large a row's "
            "value is and cannot be negative: pass for example its root mean square."
        )
    order = None if order_by is None else _checked_rows("order_by", order_by)
    if order is not None and len(order) != num_rows:
        raise ValueError(
            f"order_by has {len(order)} values and scores {num_rows}; pass one of each "
            "per row of the data."
        )
    if not 2 <= num_draws <= size:
        raise ValueError(
            f"num_draws={num_draws} of size={size}: a stratum needs at least 2 draws "
            "to tell its scatter and at most all of them. Write for example size=100, "
            "num_draws=2."
        )
    if not 0.0 < uniform <= 1.0:
        raise ValueError(
            f"uniform={uniform!r} must be in (0, 1]: without an even share, a row "
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
        with np.errstate(over="ignore"):  # an infinite quotient is in its place, too
            # over the mixed probability rather than the bare score: it is what a
            # row's value is divided by, and never zero
            by = np.argsort(order[row] / probability, kind="stable")
        row, probability = row[by], probability[by]
    start = _cut(probability, num_strata)
    count = np.diff(np.append(start, len(row)))
    weight = _whole(probability, start, count)
    threshold, alias = _alias_tables(weight)
    whole = np.repeat(count * float(_UNIT), count)
    return Design(
        sure=jnp.asarray(np.sort(sure), jnp.int32),
        start=jnp.asarray(start, jnp.int32),
        count=jnp.asarray(count, jnp.int32),
        threshold=jnp.asarray(threshold, jnp.float32),
        alias=jnp.asarray(alias, jnp.int32),
        row=jnp.asarray(row, jnp.int32),
        inverse=jnp.asarray((whole / weight).astype(np.float32), jnp.float32),
    )


def _checked_rows(name: str, values: ArrayLike) -> np.ndarray[Any, Any]:
    """The ``values`` in float64, or what is wrong with them."""
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
            "the draws of the pilot cannot be weighed. Check the model's log "
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
    # Row k joins if size draws from it and all rows below find it once. Removing rows
    # one at a time or all that qualify at once ends at the same row, because the
    # others' probabilities only rise.
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

    A row belongs where the middle of its probability lies. A row that is wider than
    a whole part leaves parts without a row, which are dropped.
    """
    if not len(probability):
        return np.zeros(0, np.intp)
    end = np.cumsum(probability)
    edges = end[-1] * np.arange(1, num_strata) / num_strata
    start = np.unique(np.append(0, np.searchsorted(end - 0.5 * probability, edges)))
    return start[start < len(probability)]


def _whole(probability: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Each slot's share of its stratum in units, ``count * _UNIT`` for all of it."""
    if not len(start):
        return np.zeros(0, np.int64)
    scale = count * float(_UNIT) / np.add.reduceat(probability, start)
    weight = np.rint(probability * np.repeat(scale, count)).astype(np.int64)
    np.maximum(weight, 1, out=weight)  # no row is left out
    # Thresholds are the weights of light slots, so these get the 24 bits of a float32
    # first. Rounded up or down in turn, by multiples of the golden ratio: equal weights
    # that were all rounded the same way would take from the heavy ones in sum.
    light = np.flatnonzero(weight < _UNIT)
    bits = np.frexp(weight[light].astype(np.float64))[1].astype(np.int64)
    grain = np.left_shift(1, np.maximum(bits - 24, 0))
    turn = light * 2_654_435_769 % _UNIT * grain >> 32
    weight[light] = (weight[light] + turn) // grain * grain
    # what rounding gained or lost is the heaviest's, which has the most to spare
    heaviest = np.repeat(np.maximum.reduceat(weight, start), count)
    candidates = np.flatnonzero(weight == heaviest)
    heavy = candidates[np.searchsorted(candidates, start)]
    weight[heavy] += count * _UNIT - np.add.reduceat(weight, start)
    return weight


def _alias_tables(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds and aliases of all strata at once, from their weights in units.

    A sweep along the light and the heavy slots gives each light one's deficit to the
    heavy one whose turn it is; a heavy slot that gave more than its surplus leaves the
    difference to the next. Whose turn it is, prefix sums of both sides tell. Deficits
    and surpluses of a stratum have the same sum exactly, so that none crosses over.
    """
    light = np.flatnonzero(weight < _UNIT)
    heavy = np.flatnonzero(weight > _UNIT)
    deficit = np.cumsum(_UNIT - weight[light])
    surplus = np.cumsum(weight[heavy] - _UNIT)
    threshold = np.minimum(weight, _UNIT)
    alias = np.arange(len(weight))
    before = deficit - (_UNIT - weight[light])
    alias[light] = heavy[np.searchsorted(surplus, before, side="right")]
    # the light slot with which a heavy one's surplus is used up
    last = np.searchsorted(deficit, surplus, side="left")
    excess = deficit[last] - surplus
    threshold[heavy] = _UNIT - excess
    gives = np.flatnonzero(excess)
    alias[heavy[gives]] = heavy[gives + 1]
    return (threshold / float(_UNIT)).astype(np.float32), alias


def draw(design: Design, key: Array, num_draws: int) -> tuple[Array, Array]:
    """One batch: the rows that are always read, then ``num_draws`` of each stratum.

    The work is proportional to the batch, whatever the number of rows.

    :param design: the tables of :func:`build`.
    :param key: a JAX random key.
    :param num_draws: rows of each stratum, a Python integer.
    :return: the rows, int32, shape ``(S + H * num_draws,)``, those of a stratum side
        by side, and their weights, float32, with which the values of the rows sum to
        an unbiased estimate of the total of all rows.

    **Example**

    .. doctest::

        >>> import jax
        >>> import numpy as np
        >>> from numpyro_minibatch._strata import build, draw
        >>> design = build(np.r_[500.0, np.ones(999)], None, 20)
        >>> rows, weights = draw(design, jax.random.key(0), 2)
        >>> rows.shape, int(rows[0]), float(weights[0])
        ((21,), 0, 1.0)
    """
    design = Design(*map(jnp.asarray, design))
    bits = jax.random.bits(key, (2, design.num_strata, num_draws), jnp.uint32)
    offset, rest = _split(bits[0], bits[1], design.count[:, None])
    slot = design.start[:, None] + offset.astype(jnp.int32)
    # float32 holds 32 bits to a relative 2 ** -24, the precision of the threshold
    is_kept = rest.astype(jnp.float32) * np.float32(2.0**-32) < design.threshold[slot]
    slot = jnp.where(is_kept, slot, design.alias[slot]).ravel()
    rows = jnp.concatenate([design.sure, design.row[slot]])
    weights = jnp.concatenate(
        [
            jnp.ones(design.num_sure, jnp.float32),
            design.inverse[slot] / np.float32(num_draws),
        ]
    )
    return rows, weights


def _split(high: Array, low: Array, count: Array) -> tuple[Array, Array]:
    """Whole part and fraction, in 32 bits, of a 64-bit random fraction of ``count``.

    One word is too coarse: at ten million slots it makes some 0.2% likelier than
    others. Of two words, the whole part is even to ``count / 2 ** 64``, and the
    fraction is as good as a fresh word.
    """
    count = count.astype(jnp.uint32)
    whole = _high_word(high, count)
    fraction = high * count + _high_word(low, count)
    carry = fraction < high * count
    return whole + carry.astype(jnp.uint32), fraction


def _high_word(a: Array, b: Array) -> Array:
    """The upper 32 bits of the product of two 32-bit words, in 32-bit arithmetic."""
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    a1, a0, b1, b0 = a >> half, a & mask, b >> half, b & mask
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> half) + (other >> half)


def stratum_of(
    design: Design, num_rows: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The stratum of each row, and how likely a draw from the stratum finds it.

    :param design: the tables of :func:`build`.
    :param num_rows: the number of rows ``N`` of the data.
    :return: strata, int32, ``-1`` for rows that are always read, and probabilities,
        float64, ``1`` for those; both of shape ``(N,)``, on the host.
    """
    stratum = np.full(num_rows, -1, np.int32)
    probability = np.ones(num_rows)
    count, row = np.asarray(design.count), np.asarray(design.row)
    stratum[row] = np.repeat(np.arange(len(count), dtype=np.int32), count)
    probability[row] = 1.0 / np.asarray(design.inverse, np.float64)
    return stratum, probability


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
        >>> from numpyro_minibatch._strata import build, exact_variance
        >>> values = np.exp(np.arange(1000) * 379 % 1000 / 100.0)
        >>> good, bad = build(values, values, 20), build(np.ones(1000), None, 20)
        >>> [int(exact_variance(d, values, 2) ** 0.5) for d in (good, bad)]
        [48054, 980079]
    """
    start, count = np.asarray(design.start), np.asarray(design.count)
    values = np.asarray(values, np.float64)[..., np.asarray(design.row)]
    if not len(start):
        return np.zeros(values.shape[:-1])
    inverse = np.asarray(design.inverse, np.float64)
    # around the total of each stratum, so that no two large sums are subtracted
    total = np.repeat(np.add.reduceat(values, start, axis=-1), count, axis=-1)
    square = np.square(values * inverse - total) / inverse
    return square.sum(-1) / num_draws
