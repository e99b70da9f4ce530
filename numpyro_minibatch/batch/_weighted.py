"""Batches of rows drawn by importance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch.batch import _strata
from numpyro_minibatch.batch._contract import (
    Batch,
    BatchSize,
    Designs,
    Scheme,
    check_rows,
)

__all__ = ["Weighted", "importance", "stratified", "take_all"]


@dataclass(frozen=True)
class Weighted(Scheme):
    """Rows drawn by importance; see :func:`stratified`.

    A control variate measures the importance of rows at set-up. :meth:`build` turns
    these scores into a design, which :meth:`draw` needs.

    :param size: rows drawn at random, in addition to those that are always read.
    :param uniform: fraction of the probability that is spread evenly over rows.
    :param num_draws: rows of one stratum; ``None`` for one stratum of all draws.
    :param num_sure: number of rows that are always read; ``None`` for those that
        would be drawn about once per batch anyway.
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
                f"uniform={uniform!r} is the fraction of the probability that is "
                "spread evenly over all rows, and must be in (0, 1]: without it, a row "
                "that looked unimportant at set-up would never be read. 0.1 is the "
                "default."
            )
        object.__setattr__(self, "uniform", float(uniform))
        if self.num_sure is not None:
            count = check_rows("num_sure", self.num_sure, 0)
            object.__setattr__(self, "num_sure", count)

    def build(
        self, scores: ArrayLike, order_by: ArrayLike | None, plate_name: str
    ) -> _strata.Design:
        """The design for one plate, once the scheme is bound. Runs on the host.

        :param scores: the importance of each row of the plate, at least 0; ideally the
            root mean square of its values over likely positions, shape ``(N,)``.
        :param order_by: a number that is similar for rows that vary together, shape
            ``(N,)``.
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
        """The number of rows that one draw reads; without designs, of random ones.

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
                f"{self!r} draws rows by importance, which only a control variate "
                "measures. Give the kernel one, or use batch.without_replacement."
            )
        batches = {}
        for name, plate_key in self.plate_keys(key).items():
            draws = self.draws_of(name)
            rows, weights = _strata.draw(designs[name], plate_key, draws)
            batches[name] = Batch(rows, 1.0, weights, draws, designs[name].num_sure)
        return batches


def stratified(size: BatchSize | None = None, uniform: float = 0.1) -> Scheme:
    """Rows drawn by importance, two from each stratum; what a control variate needs.

    The residuals of a control variate are heavy-tailed: a few rows can carry nearly all
    of their sum. A uniform batch that misses these rows reports almost no noise, and
    leaves them out of the posterior without any warning. Here a pilot at set-up scores
    each row. Rows with the very highest scores are always read. The others are drawn
    with probability proportional to score, two from each of ``size / 2`` strata of rows
    that vary together [1], so that the difference of the two estimates the noise.

    :param size: rows drawn at random (at least 2; a last odd one is not drawn), or
        ``{plate: rows}``; by default each plate's own ``subsample_size``. The rows
        that are always read, at most as many, are additional.
    :param uniform: fraction of the probability that is spread evenly over all rows, in
        ``(0, 1]``, which protects against wrong scores.
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
    """Rows drawn by importance without strata: plain importance sampling.

    As :func:`stratified`, with all random draws from one stratum.

    :param size: rows drawn at random (at least 2), or ``{plate: rows}``; by default
        each plate's own ``subsample_size``. Rows that are always read are additional.
    :param uniform: fraction of the probability that is spread evenly over all rows, in
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
    """The most important rows in every batch, with uniform draws from the rest.

    A simple alternative to :func:`stratified`, for scores that rank rows but do not
    measure how important they are.

    :param size: rows drawn at random (at least 2), with replacement, or
        ``{plate: rows}``; by default each plate's own ``subsample_size``.
    :param num_sure: rows of each plate that are always read, in addition to ``size``.
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
