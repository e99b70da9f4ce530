"""The set-up of a run: the kernel, its target, its data, the number of draws."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from numpyro_minibatch.diagnostics._run import Family, Numbers, Run

__all__ = ["FAMILY", "Setup"]


@dataclass(frozen=True, kw_only=True)
class Setup(Numbers):
    """The kernel, its target, its data, and the number of draws.

    :param kernel: the name of the kernel.
    :param target: what was sampled, such as ``prior * likelihood ** (1 / 100)``.
    :param temperature: the temperature of the likelihood.
    :param plates: the number of rows of each data plate.
    :param batch_sizes: the rows of one draw of each data plate.
    :param num_chains: the number of chains.
    :param num_draws: the number of draws of each chain.
    :param moved_starts: the number of chains that started far outside of the
        surrogate's posterior and therefore began their warmup at a draw from it.
    :param start_distance: how far away the farthest of them was, in standard deviations
        of that posterior; NaN if none was.
    """

    kernel: str
    target: str
    temperature: float
    plates: Mapping[str, int]
    batch_sizes: Mapping[str, int]
    num_chains: int
    num_draws: int
    moved_starts: int
    start_distance: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        attrs = run.attrs
        plates = json.loads(attrs.get("plates", "{}"))
        everything = run.flag("reads_all_rows")
        return cls(
            kernel=attrs.get("kernel", ""),
            target=attrs.get("target", ""),
            temperature=float(attrs.get("temperature", math.nan)),
            plates=plates,
            batch_sizes=(
                plates if everything else json.loads(attrs.get("batch_sizes", "{}"))
            ),
            num_chains=run.posterior.sizes["chain"],
            num_draws=run.posterior.sizes["draw"],
            moved_starts=int(run.pilot.get("moved_starts", 0)),
            start_distance=float(run.pilot.get("start_distance", math.nan)),
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        plural = "s" if self.num_chains > 1 else ""
        source = f" from {self.target}" if self.target else ""
        yield "draws", f"{self.num_chains} chain{plural} of {self.num_draws}{source}"
        yield (
            "batch",
            ", ".join(
                f"{name}: {self.batch_sizes.get(name, size)} of {size} rows"
                for name, size in self.plates.items()
            ),
        )
        if self.moved_starts:
            yield (
                "starts",
                f"{self.moved_starts} of {self.num_chains} up to "
                f"{self.start_distance:.3g} sd away, moved to draws from the surrogate "
                "before the first step",
            )


def _note_temperature(run: Run) -> Iterator[str]:
    d = run.measured(Setup)
    if d.temperature == d.temperature and d.temperature != 1:
        yield (
            f"these are draws from {d.target}, not from the posterior: where the data "
            f"dominate, their standard deviations are {math.sqrt(d.temperature):.3g} "
            "times the posterior's."
        )


def _note_single_chain(run: Run) -> Iterator[str]:
    if run.measured(Setup).num_chains == 1:
        yield "R-hat compares chains: write num_chains=4, chain_method='vectorized'."


def _note_all_rows(run: Run) -> Iterator[str]:
    d = run.measured(Setup)
    rows = sum(d.plates.values())
    everything = run.flag("reads_all_rows") or d.batch_sizes == d.plates
    if rows and everything and run.flag("decides"):
        yield (
            f"every step read all {rows} rows at least once, so its accept/reject "
            "decision is exact."
            + (
                " NumPyro's NUTS may be faster: recommend(model, ...) compares them "
                "before a run."
                if d.temperature == 1
                else ""
            )
        )


FAMILY = Family(Setup, notes=(_note_temperature, _note_single_chain, _note_all_rows))
