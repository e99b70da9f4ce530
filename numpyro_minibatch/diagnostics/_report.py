"""A diagnosis: the numbers of all families, the advice, and the printed report."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

import xarray as xr

from numpyro_minibatch.diagnostics import (
    _acceptance,
    _control_variate,
    _convergence,
    _cycles,
    _gradients,
    _ladder,
    _modes,
    _rings,
    _setup,
    _stays,
)
from numpyro_minibatch.diagnostics._run import Family, Run

__all__ = ["FAMILIES", "Diagnosis", "advice_table", "diagnosed"]

# in the order of the printed lines and the advice
FAMILIES: tuple[Family, ...] = (
    _setup.FAMILY,
    _acceptance.FAMILY,
    _control_variate.FAMILY,
    _modes.FAMILY,
    _gradients.FAMILY,
    _ladder.FAMILY,
    _rings.FAMILY,
    _cycles.FAMILY,
    _convergence.FAMILY,
    _stays.FAMILY,
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis(
    _setup.Setup,
    _acceptance.Acceptance,
    _control_variate.Checks,
    _modes.Masses,
    _gradients.Gradients,
    _ladder.Ladder,
    _rings.Rings,
    _cycles.Cycles,
    _convergence.Convergence,
    _stays.Stays,
):
    """The result of a diagnosis; the list of the fields is assembled below."""

    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [line for family in FAMILIES for line in family.numbers.lines(self)]
        text = [self.kernel or "MCMC"]
        text += [f"  {name:<16} {value}" for name, value in lines if value]
        for title, sentences in (("Advice", self.advice), ("Notes", self.notes)):
            text += [title] * bool(sentences) + [f"  - {s}" for s in sentences]
        return "\n".join(text)


Diagnosis.__doc__ = "\n".join(
    [
        "The result of :func:`~numpyro_minibatch.diagnose`, which ``print`` shows.\n",
        "A number that was not recorded, or has no meaning for the run, is NaN.\n",
        *(
            inspect.cleandoc(family.numbers.__doc__ or "").partition("\n\n")[2]
            for family in FAMILIES
        ),
        ":param advice: what is wrong and what to write instead; empty if nothing is.",
        ":param notes: remarks that do not indicate a fault.",
    ]
)


def diagnosed(posterior: xr.Dataset, stats: xr.Dataset) -> Diagnosis:
    """The numbers of a run, and what follows from them.

    :param posterior: the draws to analyse.
    :param stats: the statistics of the draws.
    """
    run = Run(posterior, stats)
    numbers = {
        field.name: getattr(run.measured(family.numbers), field.name)
        for family in FAMILIES
        for field in fields(family.numbers)
    }
    return Diagnosis(
        **numbers,
        advice=tuple(
            text
            for family in FAMILIES
            for rule in family.rules
            for text in rule.find(run)
        ),
        notes=tuple(
            text for family in FAMILIES for note in family.notes for text in note(run)
        ),
    )


def advice_table() -> str:
    """The table of all advice, in Markdown: for the documentation."""
    rows = [
        f"| *{rule.begins}* | {rule.means} | {rule.helps} |"
        for family in FAMILIES
        for rule in family.rules
    ]
    head = ["| advice that begins with | meaning | remedy |", "|---|---|---|"]
    return "\n".join(head + rows)
