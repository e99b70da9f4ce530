"""The input of the diagnoses: draws, statistics, and facts about the kernel."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import xarray as xr

__all__ = [
    "Family",
    "Numbers",
    "Rule",
    "Run",
    "by_place",
    "rising",
    "round_up",
    "show",
]


_REPARAMETRISE = (
    "In a hierarchical model change how group effects are parametrised: non-centred "
    'where groups have few rows, numpyro.deterministic("theta", mu + tau * eta), and '
    'centred where they have many, numpyro.sample("theta", dist.Normal(mu, tau)). If '
    "an intercept trades off against the effects of groups with many rows, let these "
    "sum to zero, dist.ZeroSumNormal(tau, (number,)). Or give scales a prior that "
    "keeps them away from zero. For other models, such as neural networks, write "
    "AMAGOLD(model)."
)
_TRANSFORM = (
    "Change parameters so that the posterior is closer to a normal distribution: "
    "sample the logarithm of a ratio, subtract means from columns of data, or give "
    "parameters that the data hardly determine priors with lighter tails."
)
_ROUNDING = 0.3  # of a log density, above which chains sample the errors
_READ_ALL = 2048  # rows up to which a surrogate evaluates all of them, if all are read


@dataclass(frozen=True, kw_only=True)
class Numbers(ABC):
    """The numbers of one family of diagnoses; its fields are those of a Diagnosis."""

    @classmethod
    @abstractmethod
    def measure(cls, run: Run) -> Self:
        """The numbers of a run; NaN or empty where it has none.

        :param run: the run.
        """

    def lines(self) -> Iterator[tuple[str, str]]:
        """The printed lines: a name and a text, which is empty without numbers."""
        return iter(())


N = TypeVar("N", bound=Numbers)


class Rule(NamedTuple):
    """A problem that a run can have.

    :param begins: how the advice begins, for the table in the documentation.
    :param means: what the problem is.
    :param helps: what to change.
    :param find: yields the advice on a run; nothing if nothing is wrong.
    """

    begins: str
    means: str
    helps: str
    find: Any  # Callable[[Run], Iterator[str]]


class Family(NamedTuple):
    """A family of diagnoses; one file holds its numbers, rules and texts.

    :param numbers: what is measured.
    :param rules: what can be wrong.
    :param notes: functions from a run to remarks.
    """

    numbers: type[Numbers]
    rules: tuple[Rule, ...] = ()
    notes: tuple[Any, ...] = ()


class Run:
    """The draws and statistics of a run, and what its kernel recorded.

    :param posterior: the draws that are analysed.
    :param stats: the statistics of the draws; empty if there are none.
    """

    def __init__(self, posterior: xr.Dataset, stats: xr.Dataset) -> None:
        self.posterior = posterior
        self.stats = stats
        self.attrs = posterior.attrs
        self._measured: dict[type[Numbers], Numbers] = {}

    def measured(self, family: type[N]) -> N:
        """The numbers of a family, which are computed once.

        :param family: the class of its numbers.
        """
        if family not in self._measured:
            self._measured[family] = family.measure(self)
        found = self._measured[family]
        assert isinstance(found, family)
        return found

    # what the kernel recorded ---------------------------------------------------------

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Numbers, booleans and names that the kernel and its parts recorded."""
        return json.loads(self.attrs.get("facts", "{}"))

    def flag(self, name: str, default: bool = False) -> bool:
        """A recorded fact that holds or does not.

        :param name: its name.
        :param default: where it is not recorded.
        """
        return bool(self.facts.get(name, default))

    def number(self, name: str, default: float = math.nan) -> float:
        """A recorded number.

        :param name: its name.
        :param default: where it is not recorded.
        """
        return float(self.facts.get(name, default))

    @property
    def pilot(self) -> Mapping[str, Any]:
        """The measurements of the control variate's set-up; empty without one."""
        return self.facts.get("pilot", {})

    @property
    def remedy(self) -> str:
        """What to write where moves on the surrogate hardly reach a part of the target.

        Without a hierarchy, group effects are not named.
        """
        if self.pilot.get("hierarchical", True):
            return _REPARAMETRISE
        rows = sum(json.loads(self.attrs.get("plates", "{}")).values())
        batches = self.decides_on_batches and rows <= _READ_ALL
        if batches and self.pilot.get("exact_rows", rows) < rows:
            return (
                f"Write batch=batch.full(), which evaluates all {rows} rows exactly. "
                f"{_TRANSFORM}"
            )
        return f"{_TRANSFORM} For a neural network, write AMAGOLD(model)."

    @property
    def quadrature(self) -> Mapping[str, Any]:
        """The error of the quadrature of a marginalized model, wherever measured."""
        return self.facts.get("quadrature", self.pilot)

    @property
    def rounding(self) -> Mapping[str, Any]:
        """The rounding error of the log density, if it explains that chains stay."""
        found = self.facts.get("rounding", {})
        return found if found.get("error", 0.0) > _ROUNDING else {}

    @property
    def decides_on_batches(self) -> bool:
        """Whether there are accept/reject steps that do not read all rows."""
        return self.flag("decides") and not self.flag("exact_decisions")

    # statistics -----------------------------------------------------------------------

    @property
    def thinning(self) -> int:
        """The number of draws made for each one that was kept."""
        return int(self.attrs.get("thinning", 1))

    def mean(self, name: str) -> float:
        """The mean of a statistic over all draws; NaN without it."""
        found = self.stats.get(name)
        return math.nan if found is None else float(found.astype(float).mean())

    def finite(self, name: str) -> np.ndarray:
        """The finite values of a statistic; one NaN if there are none."""
        found = self.stats.get(name)
        values = np.empty(0) if found is None else found.values.astype(float)
        kept = values[np.isfinite(values)]
        return kept if kept.size else np.array([math.nan])

    def last(self, name: str, draws: int = 1) -> np.ndarray:
        """The last values of a statistic in each chain; empty without it.

        :param name: the statistic.
        :param draws: of how many draws.
        """
        found = self.stats.get(name)
        if found is None:
            return np.empty(0)
        return found.isel(draw=slice(-draws, None)).values.astype(float)

    # parameters -----------------------------------------------------------------------

    @cached_property
    def parameters(self) -> tuple[np.ndarray, list[str]]:
        """All scalars, shape ``(chain, draw, parameter)``, and their names."""
        columns, names = [], []
        for name, values in self.posterior.data_vars.items():
            values = values.transpose("chain", "draw", ...)
            columns.append(values.values.reshape(*values.shape[:2], -1).astype(float))
            labels = [values[dim].values for dim in values.dims[2:]]
            for place in np.ndindex(*values.shape[2:]):
                which = ", ".join(
                    str(label[i]) for label, i in zip(labels, place, strict=True)
                )
                names.append(f"{name}[{which}]" if which else str(name))
        return np.concatenate(columns, axis=-1), names


def by_place(stats: xr.Dataset, name: str) -> np.ndarray | None:
    """A statistic of each rung or pair, the draws of all chains in one axis."""
    if name not in stats or not stats[name].size:
        return None  # a ladder of one rung has no pairs
    return stats[name].values.reshape(-1, stats[name].shape[-1])


# text -------------------------------------------------------------------------------


def show(text: str, *numbers: float) -> str:
    """The text with its numbers, or nothing if one of them is NaN."""
    return "" if any(map(math.isnan, numbers)) else text.format(*numbers)


def round_up(value: float) -> int:
    """Up to two significant digits."""
    unit = 10 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return math.ceil(value / unit) * unit


def rising(values: Iterable[float]) -> list[int]:
    """Rounded up, each above the ones before: the setting of a ladder."""
    found: list[int] = []
    for value in values:
        number = round_up(value)
        if found and number <= found[-1]:
            number = round_up(found[-1] + 1)
        found.append(number)
    return found
