"""Which rows: schemes that draw the rows of a minibatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch.batch import _strata
from numpyro_minibatch.batch._permutation import permute

__all__ = [
    "Batch",
    "Scheme",
    "Weighted",
    "full",
    "growing",
    "importance",
    "pilot",
    "stratified",
    "take_all",
    "with_replacement",
    "without_replacement",
]

_CHUNK = 16_384  # rows of the full batch that are in memory at once

BatchSize = int | Mapping[str, int]
Designs = Mapping[str, _strata.Design] | None


class Batch(NamedTuple):
    """Rows of one data plate and how much the scheme that drew them narrows a mean.

    :param indices: the rows, int32, shape ``(m,)``.
    :param fpc: finite-population correction: the factor on ``s ** 2 / m`` that
        makes it the variance of the mean of the rows; ``1 - m / N`` without
        replacement (``0`` for all rows), ``1`` with replacement. Here ``s ** 2`` is
        the sample variance with divisor ``m - 1``, so that the product is
        unbiased; with the population variance of divisor ``N`` the same factor
        reads ``(N - m) / (N - 1)``.
    :param weights: weights with which values of the rows sum to an unbiased estimate
        of the total of all rows, float32, shape ``(m,)``; ``None`` (the default)
        where every row counts ``N / m``.
    :param num_draws: of weighted rows, how many side by side are independent draws
        from one stratum.
    :param num_sure: of weighted rows, how many at the front are always read.
    """

    indices: Array
    fpc: ArrayLike
    weights: Array | None = None
    num_draws: int = 1
    num_sure: int = 0


def _check_count(name: str, value: object, minimum: int) -> int:
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
    """How the rows of a minibatch are drawn; the base of the ``batch.*`` choices.

    :param size: rows of one draw: an integer, a dict ``{plate: rows}``, or ``None``
        for the model's own ``subsample_size``. Kept as a sorted tuple of pairs so
        that schemes have value equality and a hash.
    """

    size: int | tuple[tuple[str, int], ...] | None = None

    def __post_init__(self) -> None:
        size = self.size
        # a tuple of pairs is what `replace` hands back
        is_pairs = isinstance(size, tuple) and all(isinstance(x, tuple) for x in size)
        if isinstance(size, Mapping) or is_pairs:
            counts = {
                plate: _check_count(f"batch_size[{plate!r}]", count, 2)
                for plate, count in dict(size).items()  # type: ignore[arg-type]
            }
            object.__setattr__(self, "size", tuple(sorted(counts.items())))
        elif size is not None:
            object.__setattr__(self, "size", _check_count("batch_size", size, 2))

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
        """The scheme with a size of its own, where it has one, for a model's plates.

        :param widths: rows of one draw of each plate where the scheme says nothing.
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

    def first(self, plates: Mapping[str, int]) -> dict[str, Array]:
        """The rows of each plate that a decision reads at first."""
        return {name: jnp.int32(width) for name, width in self.widths.items()}

    def extend(
        self,
        counts: Mapping[str, Array],
        variances: Mapping[str, Array],
        plates: Mapping[str, int],
        reached: ArrayLike,
        max_variance: ArrayLike,
    ) -> tuple[dict[str, Array], ArrayLike]:
        """What to read next when the rows asked for have been read.

        :param counts: rows read so far of each plate.
        :param variances: each plate's part of the estimate's variance, without the
            finite-population correction.
        :param plates: the number of rows of each plate.
        :param reached: how often the rows asked for have been read before.
        :param max_variance: the variance that the acceptance test can take.
        :return: the rows asked for from now on, and whether to start over with
            fresh ones.
        """
        return dict(counts), False

    # the rows -----------------------------------------------------------------------

    def indices(self, key: Array, positions: Array, size: int) -> Array:
        """The rows at ``positions`` of the stream that ``key`` names."""
        return permute(key, positions, size)

    def fpc(self, count: ArrayLike, size: int) -> ArrayLike:
        """The finite-population correction after ``count`` of ``size`` rows."""
        return (size - count) / size  # exactly zero when all rows were read

    def num_rows(self, plates: Mapping[str, int], designs: Designs = None) -> int:
        """How many rows one draw reads; of the full batch, all of them.

        :param plates: the number of rows of each plate.
        :param designs: of a :class:`Weighted` scheme, the design of each plate.
        """
        return sum(self.widths.values())

    def draw(
        self, key: Array, plates: Mapping[str, int], designs: Designs = None
    ) -> dict[str, Batch]:
        """One draw: a :class:`Batch` for each plate.

        :param key: PRNG key of the step.
        :param plates: the number of rows of each plate.
        :param designs: of a :class:`Weighted` scheme, the design of each plate.
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
class _WithReplacement(Scheme):
    def indices(self, key: Array, positions: Array, size: int) -> Array:
        return jax.random.randint(key, positions.shape, 0, size, jnp.int32)

    def fpc(self, count: ArrayLike, size: int) -> ArrayLike:
        return 1.0


@dataclass(frozen=True)
class FullBatch(Scheme):
    """All rows in chunks; see :func:`full`."""

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


@dataclass(frozen=True)
class Weighted(Scheme):
    """Rows by how much they matter; see :func:`stratified`.

    How much that is, a control variate tells at set-up: :meth:`build` makes a design
    of it, which :meth:`draw` needs.

    :param size: rows drawn at random; those that are always read come on top.
    :param uniform: share of the probability that is spread evenly over rows.
    :param num_draws: rows of one stratum; ``None`` for one stratum of all draws.
    :param num_sure: number of rows that are always read; ``None`` for those that
        would be drawn about once a batch anyway.
    """

    uniform: float = 0.1
    num_draws: int | None = 2
    num_sure: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        uniform = self.uniform
        if not isinstance(uniform, Real) or isinstance(uniform, bool):
            raise TypeError(
                f"uniform must be a number, got {uniform!r} ({type(uniform).__name__})."
                " Write for example batch.stratified(100, uniform=0.1)."
            )
        if not 0.0 < uniform <= 1.0:
            raise ValueError(
                f"uniform={uniform!r} is the share of the probability that is spread "
                "evenly over all rows, and must be in (0, 1]: without it, a row that "
                "looked unimportant at set-up would never be read. 0.1 is the default."
            )
        object.__setattr__(self, "uniform", float(uniform))
        if self.num_sure is not None:
            count = _check_count("num_sure", self.num_sure, 0)
            object.__setattr__(self, "num_sure", count)

    def build(
        self, scores: ArrayLike, order_by: ArrayLike | None, plate_name: str
    ) -> _strata.Design:
        """The design for one plate, once the scheme is bound. Runs on the host.

        :param scores: how much each row of the plate matters, at least 0; best the
            root mean square of its values over likely positions, shape ``(N,)``.
        :param order_by: a number that is alike for rows that act alike, shape ``(N,)``.
        :param plate_name: the plate.
        :raises ValueError: a score is negative or not finite.
        """
        return _strata.build(
            scores,
            order_by,
            self.widths[plate_name],
            num_draws=self.draws_of(plate_name),
            uniform=self.uniform,
            num_sure=self.num_sure,
        )

    def draws_of(self, plate_name: str) -> int:
        """Rows of one draw that come from one stratum."""
        return self.widths[plate_name] if self.num_draws is None else self.num_draws

    def num_rows(self, plates: Mapping[str, int], designs: Designs = None) -> int:
        """How many rows one draw reads; without designs, how many at random.

        :param plates: the number of rows of each plate.
        :param designs: the design of each plate.
        """
        if designs is None:
            return super().num_rows(plates)
        return sum(
            designs[name].num_sure + designs[name].num_strata * self.draws_of(name)
            for name in plates
        )

    def draw(
        self, key: Array, plates: Mapping[str, int], designs: Designs = None
    ) -> dict[str, Batch]:
        """One draw: a :class:`Batch` for each plate.

        :param key: PRNG key of the step.
        :param plates: the number of rows of each plate.
        :param designs: the design of each plate.
        :raises ValueError: there are no designs.
        """
        if designs is None:
            raise ValueError(
                f"{self!r} draws rows by how much they matter, which only a control "
                "variate can tell. Give the kernel one, or use "
                "batch.without_replacement."
            )
        batches = {}
        for name, plate_key in self.plate_keys(key).items():
            draws = self.draws_of(name)
            rows, weights = _strata.draw(designs[name], plate_key, draws)
            batches[name] = Batch(rows, 1.0, weights, draws, designs[name].num_sure)
        return batches


@dataclass(frozen=True)
class _Growing(Scheme):
    @property
    def single_round(self) -> bool:
        return False

    @property
    def sequential(self) -> bool:
        return True

    def grown(self, name: str, count: Array, size: int) -> Array:
        """How many rows follow on ``count`` rows that were not enough."""
        return count + self.widths[name]

    def extend(self, counts, variances, plates, reached, max_variance):  # type: ignore[no-untyped-def]
        variance = sum(
            variances[name] * self.fpc(counts[name], size)
            for name, size in plates.items()
        )
        grow = variance > max_variance
        needed = {
            name: jnp.where(
                grow,
                jnp.minimum(self.grown(name, counts[name], size), size),
                counts[name],
            )
            for name, size in plates.items()
        }
        return needed, False


@dataclass(frozen=True)
class _Geometric(_Growing):
    factor: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.factor
        if not isinstance(factor, Real) or isinstance(factor, bool):
            raise TypeError(
                f"batch.growing(factor=...) must be a number, got {factor!r} "
                f"({type(factor).__name__}). Write for example factor=2.0."
            )
        if not 1.0 < factor < float("inf"):
            raise ValueError(
                f"batch.growing(factor={factor!r}): a batch grows to factor times its "
                "rows, so it must be above 1 and finite. Write for example factor=2.0, "
                "or leave it out for slices of one size."
            )
        object.__setattr__(self, "factor", float(factor))

    def grown(self, name: str, count: Array, size: int) -> Array:
        rows = jnp.minimum(jnp.ceil(self.factor * count), size).astype(jnp.int32)
        return jnp.maximum(rows, count + 1)


@dataclass(frozen=True)
class _Pilot(_Growing):
    margin: float = 1.25

    @property
    def sequential(self) -> bool:
        return False  # what it reads first is not part of the batch that decides

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.margin >= 1.0:
            raise ValueError(
                f"batch.pilot(margin={self.margin!r}): the fresh batch is margin times "
                "the size that the pilot predicts, so it must be at least 1; "
                "1.25 is the default."
            )

    def extend(self, counts, variances, plates, reached, max_variance):  # type: ignore[no-untyped-def]
        # rows are needed in proportion to the variance; 1 / (1/b + 1/N) is b rows
        # after the finite-population correction, and N where the test takes no noise
        total = sum(variances.values())
        factor = self.margin * total / max_variance
        predicted = {
            name: jnp.ceil(1.0 / (1.0 / (factor * counts[name]) + 1.0 / size))
            for name, size in plates.items()
        }
        fresh = {}
        for name, size in plates.items():
            # an undefined variance is a rejection, which needs no rows; the upper
            # bound in integers, because float32 does not hold all of them
            rows = jnp.nan_to_num(predicted[name], nan=0.0, posinf=size)
            rows = jnp.maximum(rows, self.widths[name]).astype(jnp.int32)
            fresh[name] = jnp.minimum(rows, size)
        # a fresh batch that is still too noisy grows
        grown, _ = super().extend(counts, variances, plates, reached, max_variance)
        is_pilot = reached == 0
        needed = {
            name: jnp.where(is_pilot, fresh[name], grown[name]) for name in plates
        }
        return needed, is_pilot


def without_replacement(size: BatchSize | None = None) -> Scheme:
    """Distinct rows, drawn afresh at every step in time that does not depend on N.

    A keyed permutation of the rows is evaluated only at the positions asked for.

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
    """Independent uniform rows: a row can be in a batch twice.

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


def growing(size: BatchSize | None = None, factor: float | None = None) -> Scheme:
    """Disjoint slices of one permutation until the test has enough of them.

    For most tests that is when the variance is inside the test: the sequential rule
    of Seita et al. [1], Algorithm 1. A sequential test has a rule of its own. Slices
    never repeat a row, and after N rows the batch is the full data, whose variance is
    zero.

    Stopping at the first small sample variance favours batches whose variance is
    under-estimated, so small slices bias the chain: on the paper's mixture at
    temperature 1e4 the posterior sd fell by 8% with slices of 10 rows and by 2% with
    100. :func:`pilot` does not have this bias.

    :param size: rows of a slice (at least 2), or ``{plate: rows}``.
    :param factor: a batch that is not enough grows to this many times its rows
        (above 1), in slices of ``size``; by default it grows by one slice.
    :raises TypeError: ``size`` is not an integer, or ``factor`` not a number.
    :raises ValueError: ``size`` is below 2, or ``factor`` not above 1.

    **References:**

    1. Daniel Seita, Xinlei Pan, Haoyu Chen, John Canny (2017), *An Efficient
       Minibatch Acceptance Test for Metropolis-Hastings*.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import MinibatchMH, accept, batch
        >>> def model(): ...
        >>> kernel = MinibatchMH(
        ...     model, batch=batch.growing(100), acceptance=accept.penalty()
        ... )
    """
    if factor is not None:
        return _Geometric(size, factor)  # type: ignore[arg-type]
    return _Growing(size)  # type: ignore[arg-type]


def pilot(size: BatchSize | None = None, margin: float = 1.25) -> Scheme:
    """A pilot batch that predicts how many rows are needed, then a fresh batch.

    The pilot's rows are not used for the decision, so the size of the fresh batch is
    independent of its rows. A fresh batch that is too noisy all the same grows, which
    leaves a little of the bias of :func:`growing`: with normal rows that happens in 9%
    of the decisions after a pilot of 100 rows, and changes an acceptance probability
    by less than 2e-4; in 17% and 4e-4 with 50 rows, in 35% and 2e-3 with 10.

    :param size: rows of the pilot (at least 2), or ``{plate: rows}``; also the least
        number of rows of the fresh batch.
    :param margin: the fresh batch is this many times the predicted size (at least
        1); where its variance is too large all the same, it grows by ``size`` rows.
    :raises TypeError: ``size`` is not an integer.
    :raises ValueError: ``size`` is below 2, or ``margin`` below 1.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import batch
        >>> batch.pilot(100).margin
        1.25
    """
    return _Pilot(size, margin)  # type: ignore[arg-type]


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


def stratified(size: BatchSize | None = None, uniform: float = 0.1) -> Scheme:
    """Rows by how much they matter, two of each stratum; what a control variate needs.

    What a control variate leaves of the rows is heavy-tailed: a few rows can carry
    nearly all of it, and a uniform batch that misses them reports next to no noise
    and leaves them out of the posterior without a sign. Here a pilot at set-up scores
    each row. Rows of the very highest scores are always read; the others are drawn
    with probability proportional to score, two of each of ``size / 2`` strata of rows
    that act alike [1], so that the difference of the two tells the noise.

    :param size: rows drawn at random (at least 2; a last odd one is not drawn), or
        ``{plate: rows}``; by default each plate's own ``subsample_size``. The rows
        that are always read, at most as many, come on top.
    :param uniform: share of the probability that is spread evenly over all rows, in
        ``(0, 1]``: what protects against a wrong score.
    :raises TypeError: ``size`` is not an integer, or ``uniform`` not a number.
    :raises ValueError: ``size`` is below 2, or ``uniform`` not in ``(0, 1]``.

    **References:**

    1. W. G. Cochran (1977), *Sampling Techniques*, third edition, chapters
       5A and 9A.

    **Example**

    .. doctest::

        >>> import jax
        >>> import numpy as np
        >>> from numpyro_minibatch import batch
        >>> scheme = batch.stratified({"data": 20})
        >>> scores = np.r_[500.0, np.ones(999)]
        >>> designs = {"data": scheme.build(scores, None, "data")}
        >>> drawn = scheme.draw(jax.random.key(0), {"data": 1000}, designs)["data"]
        >>> drawn.indices.shape, drawn.num_sure, int(drawn.indices[0])
        ((21,), 1, 0)
    """
    return Weighted(size, uniform)  # type: ignore[arg-type]


def importance(size: BatchSize | None = None, uniform: float = 0.1) -> Scheme:
    """Rows by how much they matter, without strata: plain importance sampling.

    As :func:`stratified`, with all random draws from one stratum.

    :param size: rows drawn at random (at least 2), or ``{plate: rows}``; by default
        each plate's own ``subsample_size``. Rows that are always read come on top.
    :param uniform: share of the probability that is spread evenly over all rows, in
        ``(0, 1]``.
    :raises TypeError: ``size`` is not an integer, or ``uniform`` not a number.
    :raises ValueError: ``size`` is below 2, or ``uniform`` not in ``(0, 1]``.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch import batch
        >>> scheme = batch.importance({"data": 20})
        >>> design = scheme.build(np.linspace(1.0, 2.0, 1000), None, "data")
        >>> design.num_strata, scheme.num_rows({"data": 1000}, {"data": design})
        (1, 20)
    """
    return Weighted(size, uniform, num_draws=None)  # type: ignore[arg-type]


def take_all(size: BatchSize | None = None, num_sure: int = 1000) -> Scheme:
    """The rows that matter most always, and uniform ones of the rest.

    The simple fallback of :func:`stratified`, for scores that say which rows matter
    but not how much.

    :param size: rows drawn at random (at least 2), with replacement, or
        ``{plate: rows}``; by default each plate's own ``subsample_size``.
    :param num_sure: rows of each plate that are always read on top.
    :raises TypeError: ``size`` or ``num_sure`` is not an integer.
    :raises ValueError: ``size`` is below 2, or ``num_sure`` below 0.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch import batch
        >>> scheme = batch.take_all({"data": 20}, num_sure=3)
        >>> scheme.build(np.arange(1000.0), None, "data").sure.tolist()
        [997, 998, 999]
    """
    return Weighted(size, 1.0, num_draws=None, num_sure=num_sure)  # type: ignore[arg-type]
