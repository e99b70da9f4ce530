"""Cycles of step sizes: how many there were, and whether their draws agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from numpyro_minibatch.diagnostics._run import Family, Numbers, Rule, Run, show
from numpyro_minibatch.diagnostics._setup import Setup

__all__ = ["FAMILY", "Cycles"]


@dataclass(frozen=True, kw_only=True)
class Cycles(Numbers):
    """The cycles of a cyclical kernel.

    :param num_cycles: the number of cycles of all chains.
    :param samples_per_cycle: the draws of a whole cycle.
    :param between_cycles: the largest share of a parameter's variance that is between
        the means of cycles; if cycles agree, about one over the draws of a cycle.
    :param between_cycles_name: the parameter that has it.
    """

    num_cycles: float
    samples_per_cycle: float
    between_cycles: float
    between_cycles_name: str

    @classmethod
    def measure(cls, run: Run) -> Self:
        if "cycle" not in run.stats:
            return cls(
                num_cycles=math.nan,
                samples_per_cycle=math.nan,
                between_cycles=math.nan,
                between_cycles_name="",
            )
        numbers = run.stats["cycle"].transpose("chain", "draw").values
        share, name = _between(run, numbers)
        return cls(
            num_cycles=sum(len(np.unique(chain)) for chain in numbers),
            samples_per_cycle=run.number("samples_per_cycle"),
            between_cycles=share,
            between_cycles_name=name,
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        yield (
            "cycles",
            show("{:.0f} of {:.0f} draws", self.num_cycles, self.samples_per_cycle)
            + show(
                f", {{:.0%}} of the variance between them ({self.between_cycles_name})",
                self.between_cycles,
            ),
        )


def _between(run: Run, numbers: np.ndarray) -> tuple[float, str]:
    """The largest share of a variance that is between cycles, and its parameter."""
    columns, names = run.parameters
    groups = [
        columns[chain][numbers[chain] == cycle]
        for chain in range(len(numbers))
        for cycle in np.unique(numbers[chain])
    ]
    if len(groups) < 2 or max(map(len, groups)) < 2:
        return math.nan, ""
    total = columns.reshape(-1, columns.shape[-1])
    with np.errstate(all="ignore"):
        sizes = np.array([len(group) for group in groups])[:, None]
        means = np.stack([group.mean(0) for group in groups]) - total.mean(0)
        share = (sizes * means**2).sum(0) / sizes.sum() / total.var(0)
    share = np.where(np.isfinite(share), share, 0.0)
    worst = int(share.argmax())
    return float(share[worst]), names[worst]


def _advise_cut_short(run: Run) -> Iterator[str]:
    each = run.number("samples_per_cycle")
    if not each >= 1:
        return
    samples, draws = int(each), run.measured(Setup).num_draws
    cycles, rest = divmod(draws, samples)
    if rest and run.measured(Cycles).num_cycles >= 1:
        fewer = f"num_samples={cycles * samples} or " if cycles else ""
        yield (
            f"the last cycle was cut short: {draws} draws are {cycles} cycles of "
            f"{samples} and {rest} more draws, which get the weight of a whole cycle "
            f"in cycles.weights. Write {fewer}num_samples={(cycles + 1) * samples}."
        )


def _note_visits(run: Run) -> Iterator[str]:
    """Cycles find modes but do not weight them by their masses."""
    d = run.measured(Cycles)
    if not d.num_cycles >= 1:
        return
    number = int(d.num_cycles)
    text = (
        f"the draws come from {number} cycles. If there are several modes, the draws "
        "show how often each was visited, not how much mass it has; weight them with "
        "cycles.weights."
    )
    if d.between_cycles > 0.5:
        yield (
            f"{text} Most of the variance of {d.between_cycles_name} "
            f"({d.between_cycles:.0%}) is between cycles, so there are hardly more "
            f"than {number} effective draws of it: write more cycles, or more chains."
        )
    else:
        yield text


FAMILY = Family(
    Cycles,
    (
        Rule(
            "the last cycle was cut short",
            "`num_samples` is not a multiple of the draws per cycle",
            "the `num_samples` that the advice gives",
            _advise_cut_short,
        ),
    ),
    (_note_visits,),
)
