"""Gradient steps: the effect of gradient noise on the draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from numpyro_minibatch.diagnostics._acceptance import larger_batch
from numpyro_minibatch.diagnostics._run import Family, Numbers, Rule, Run, show

__all__ = ["FAMILY", "Gradients"]


@dataclass(frozen=True, kw_only=True)
class Gradients(Numbers):
    """The noise of minibatch gradients.

    :param noise_ratio: the variance of the noise that gradient steps inject, divided by
        the variance of their gradient noise, at its smallest. The inverse is
        approximately the relative error of the temperature, which nothing corrects.
    """

    noise_ratio: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        # where step sizes change in cycles, use a whole cycle: its last steps are too
        # short to be informative
        each = run.number("samples_per_cycle")
        values = run.last("noise_ratio", int(each) if each >= 1 else 1)
        values = values[np.isfinite(values)]
        return cls(noise_ratio=float(values.min()) if values.size else math.nan)

    def lines(self) -> Iterator[tuple[str, str]]:
        yield (
            "gradient noise",
            show("its variance is 1 / {:.3g} of what steps inject", self.noise_ratio),
        )


def _advise_gradient_noise(run: Run) -> Iterator[str]:
    """Uncorrected gradient noise raises the temperature of the draws."""
    ratio = run.measured(Gradients).noise_ratio
    uncorrected = run.flag("gradient_steps") and not run.flag("decides")
    if not uncorrected or not ratio < 10:
        return
    excess = 1.0 / ratio
    wider = 100 * (math.sqrt(1 + excess) - 1)
    factor = 0.1 * ratio
    larger = larger_batch(run, 1 / factor)
    or_larger = f", {larger}" if larger else ""
    if run.flag("is_thermostat"):
        yield (
            f"the gradient noise has {excess:.2g} times the variance of the noise that "
            "the thermostat's steps inject. The thermostat compensates only for noise "
            "that is the same in all coordinates. Compare with a run at a step_size "
            f"{factor:.2g} times as large{or_larger}."
        )
        return
    friction = ", a larger friction" if run.flag("has_friction") else ""
    yield (
        f"the gradient noise has {excess:.2g} times the variance of the noise that the "
        "steps inject, and raises the temperature of the draws by that fraction: where "
        f"it is largest, standard deviations are about {wider:.0f}% too large. Write a "
        f"step_size {factor:.2g} times as large{friction}{or_larger}, "
        'control_variate="taylor2" for a single narrow mode, or AMAGOLD(model), which '
        "corrects for it."
    )


FAMILY = Family(
    Gradients,
    (
        Rule(
            "the gradient noise has x times the variance of the noise that",
            "the temperature of SGLD's or SGHMC's draws is too high by that fraction",
            "smaller steps, more friction, a control variate, AMAGOLD",
            _advise_gradient_noise,
        ),
    ),
)
