"""Ladders of temperatures: swaps of neighbouring rungs, and round trips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import xarray as xr

from numpyro_minibatch.diagnostics._run import (
    Family,
    Numbers,
    Rule,
    Run,
    by_place,
    show,
)
from numpyro_minibatch.diagnostics._setup import Setup

__all__ = ["FAMILY", "Ladder", "mean_rates"]

_RELIABLE = 0.9  # the least share of swaps inside the test's domain


@dataclass(frozen=True, kw_only=True)
class Ladder(Numbers):
    """The swaps of a ladder of temperatures.

    :param swap_rates: the mean acceptance rate of swaps for each pair of neighbouring
        rungs, from the coldest.
    :param unreliable_swaps: the share of the draws' swaps whose noise was outside the
        domain of the test.
    :param round_trips: how often replicas went from the coldest rung to the hottest
        and back, over all chains.
    """

    swap_rates: tuple[float, ...]
    unreliable_swaps: float
    round_trips: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        trips = run.last("round_trips")
        return cls(
            swap_rates=mean_rates(run.stats, "swap_acceptance_rate"),
            unreliable_swaps=1.0 - run.mean("swap_reliable"),
            round_trips=float(trips.sum()) if trips.size else math.nan,
        )

    @property
    def barrier(self) -> float:
        """The communication barrier of a ladder: the sum of its rejection rates."""
        return sum(1.0 - rate for rate in self.swap_rates if rate == rate)

    def lines(self) -> Iterator[tuple[str, str]]:
        # only pairs with a recorded try
        tried = [rate for rate in self.swap_rates if rate == rate] or [math.nan]
        yield (
            "swaps",
            show(
                "accepted {:.2f} at least, {:.2f} on average",
                min(tried),
                sum(tried) / len(tried),
            )
            + show(", {:.1%} unreliable", self.unreliable_swaps),
        )
        yield (
            "ladder",
            show(
                f"{len(self.swap_rates) + 1} rungs, barrier {self.barrier:.2f}, "
                "{:.0f} round trips",
                self.round_trips if self.swap_rates else math.nan,
            ),
        )


def mean_rates(stats: xr.Dataset, name: str) -> tuple[float, ...]:
    """The mean acceptance rate of each pair; NaN if no try is recorded."""
    rates = by_place(stats, name)
    if rates is None:
        return ()
    with np.errstate(invalid="ignore"):
        return tuple((np.nansum(rates, 0) / (rates == rates).sum(0)).tolist())


def _worst_pair(rates: tuple[float, ...]) -> int:
    # a pair has no rate if thinning kept no draw in which it was tried
    tried = [pair for pair, rate in enumerate(rates) if rate == rate]
    return min(tried, key=lambda pair: rates[pair], default=0)


def _num_replicas(run: Run) -> int:
    """The number of rungs that the swap rates suggest."""
    return max(2, math.ceil(2 * run.measured(Ladder).barrier) + 1)


def _has_gap(run: Run) -> bool:
    rates = run.measured(Ladder).swap_rates
    return bool(rates) and rates[_worst_pair(rates)] < 0.15


def _advise_swaps(run: Run) -> Iterator[str]:
    if not _has_gap(run):
        return
    rates = run.measured(Ladder).swap_rates
    worst = _worst_pair(rates)
    yield (
        f"rungs {worst} and {worst + 1} of the ladder accept only "
        f"{rates[worst]:.2g} of their swaps, so what the hot rungs find hardly reaches "
        "the coldest one. Write adapt_ladder=True, or about "
        f"num_replicas={_num_replicas(run)} for the same range of temperatures."
    )


def _advise_round_trips(run: Run) -> Iterator[str]:
    d = run.measured(Ladder)
    if not d.swap_rates or _has_gap(run) or d.round_trips != 0:
        return
    yield (
        "no replica went up the ladder and down again in "
        f"{run.measured(Setup).num_draws} draws. Write a larger num_samples, or more "
        "gradient steps per draw (num_steps); about "
        f"num_replicas={_num_replicas(run)} suits the acceptance rates of the swaps."
    )


def _advise_noisy_swaps(run: Run) -> Iterator[str]:
    d = run.measured(Ladder)
    if d.swap_rates and d.unreliable_swaps > 1 - _RELIABLE:
        yield (
            f"{d.unreliable_swaps:.0%} of the swaps had more noise than their test "
            "tolerates. Write swap_batch=batch.growing(500), which grows as far as "
            'each swap needs, or swap="exact", or choose rungs closer together.'
        )


FAMILY = Family(
    Ladder,
    (
        Rule(
            "rungs j and k of the ladder accept only",
            "positions hardly cross this gap in the ladder",
            "`adapt_ladder=True`, more rungs",
            _advise_swaps,
        ),
        Rule(
            "no replica went up the ladder and down again",
            "what the hot rungs found has not reached the coldest one",
            "a longer run",
            _advise_round_trips,
        ),
        Rule(
            "n % of the swaps had more noise",
            "the noise is more than their test tolerates, so they are only approximate",
            "larger batches for swaps, rungs closer together",
            _advise_noisy_swaps,
        ),
    ),
)
