"""The result of a recommendation, and its text."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

__all__ = ["Cost", "Recommendation"]

_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The estimated cost of a run with one sampler, on this machine.

    :param sampler: ``"MinibatchMH"``, the name of another kernel, or ``"NUTS"``.
    :param setup: seconds of the set-up, measured. An equal kernel on the same data
        finds its result, and need not spend them again; they are few if there was such
        a kernel before. 0 for NUTS.
    :param compilation: seconds of compilation in the run.
    :param warmup: seconds of the warmup.
    :param sampling: seconds of the draws after it.
    :param num_chains: chains, which are vectorised.
    :param num_warmup: warmup draws of each chain.
    :param num_samples: draws of each chain after the warmup.
    :param ess_per_draw: effective draws per draw of a chain.
    :param rows_per_draw: rows that a draw of a chain reads.
    """

    sampler: str
    setup: float
    compilation: float
    warmup: float
    sampling: float
    num_chains: int
    num_warmup: int
    num_samples: int
    ess_per_draw: float
    rows_per_draw: float

    @property
    def total(self) -> float:
        """All seconds, from the start of the set-up to the last draw."""
        return self.setup + self.compilation + self.warmup + self.sampling

    @property
    def remaining(self) -> float:
        """The seconds of a run after the recommendation, which made the set-up."""
        return self.total - self.setup

    def __str__(self) -> str:
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        parts = {
            "set-up": self.setup,
            "compilation": self.compilation,
            "warmup": self.warmup,
            "draws": self.sampling,
        }
        told = ", ".join(f"{name} {_short(x)}" for name, x in parts.items() if x > 0)
        return (
            f"{_short(self.total)} s ({told}): {chains} of {self.num_warmup:,} + "
            f"{self.num_samples:,} draws"
        )


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A sampler for a model and its data, with the reason.

    :param sampler: the recommended sampler, the name of one of the costs below.
    :param reason: why, one sentence.
    :param code: the code to write.
    :param draws: the effective draws that the costs are for.
    :param minibatch: the cost of the minibatch kernel, or ``None`` if it cannot sample
        the model.
    :param nuts: the cost of NUTS, or ``None`` if it is not known.
    :param gradient: seconds of one gradient of the log density on all rows, measured;
        NaN if it could not be measured.
    :param refusal: why the minibatch kernel cannot sample the model, if it cannot.
    :param notes: warnings of the set-up, and what the estimates leave out.
    """

    sampler: str
    reason: str
    code: str
    draws: int
    minibatch: Cost | None
    nuts: Cost | None
    gradient: float = math.nan
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.sampler} is recommended: {self.reason}",
            *(f"  {line}" for line in self.code.splitlines()),
            f"Estimated seconds to {self.draws:,} effective draws on this machine:",
        ]
        name = "MinibatchMH" if self.minibatch is None else self.minibatch.sampler
        for sampler, cost in ((name, self.minibatch), ("NUTS", self.nuts)):
            unknown = "not known"
            if sampler == "NUTS" and math.isfinite(self.gradient):
                unknown = (
                    f"not known; a gradient takes {_short(self.gradient)} s, and a "
                    "draw 1 to 1,023 gradients"
                )
            elif cost is None and self.refusal:
                unknown = "cannot sample the model"
            lines.append(f"  {sampler}: {unknown if cost is None else cost}")
        if self.refusal:
            lines.append(self.refusal)
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(_wrapped(line) for line in lines)

    __repr__ = __str__


def _wrapped(line: str) -> str:
    """A line of at most 80 characters, continued with an indentation."""
    indent = line[: len(line) - len(line.lstrip())] + "    "
    return textwrap.fill(
        line,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _short(seconds: float) -> str:
    """A number of seconds with two digits."""
    if seconds >= 10:
        return f"{float(f'{seconds:.2g}'):,.0f}"
    return f"{seconds:.1f}" if seconds >= 0.1 else f"{seconds:.1g}"
