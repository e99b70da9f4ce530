"""Control variates: whether the surrogate and the batches are what they claim to be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from scipy.stats import norm

from numpyro_minibatch.diagnostics._acceptance import Acceptance
from numpyro_minibatch.diagnostics._run import Family, Numbers, Rule, Run, show
from numpyro_minibatch.diagnostics._setup import Setup

__all__ = ["FAMILY", "OTHER_FORM", "Checks"]

OTHER_FORM = (  # of a hierarchy
    "In a hierarchical model write effects the other way: with few rows a group in "
    "their non-centred form, "
    'numpyro.deterministic("theta", mu + tau * eta), with many in the centred one, '
    'numpyro.sample("theta", dist.Normal(mu, tau)); or give scales a prior that keeps '
    "them from zero."
)
_CHANGE = 0.03  # of an acceptance probability, from which on it matters


@dataclass(frozen=True, kw_only=True)
class Checks(Numbers):
    """What decisions were found to be when they were made on all rows, too.

    :param check_rms_error: with a control variate, the root mean square error of the
        log ratios that were checked on all rows.
    :param check_rms_z: the same in units of the noise that the batches claimed.
    :param check_change: by how much that changes the probability with which a move
        between equally likely positions is accepted.
    """

    check_rms_error: float
    check_rms_z: float
    check_change: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        def mean_square(name: str) -> float:
            values = run.last(name)
            known = values[values == values]
            return math.sqrt((known**2).mean()) if known.size else math.nan

        error, z = mean_square("check_rms_error"), mean_square("check_rms_z")
        return cls(
            check_rms_error=error,
            check_rms_z=z,
            check_change=_change(error, error / z) if z > 0 else math.nan,
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        yield (
            "exact checks",
            show(
                "log ratios off by {:.2g}, {:.2g} of their noise",
                self.check_rms_error,
                self.check_rms_z,
            )
            + show(", acceptance by {:.2g}", self.check_change),
        )


def _change(error: float, claimed: float) -> float:
    """How much acceptance changes where the noise has another sd than was claimed.

    The penalty test accepts min(1, exp(x - claimed ** 2 / 2)) of an estimate x, which
    is normal with the sd ``error`` about 0, the log ratio of equally likely positions.
    """

    def accepted(sd: float) -> float:
        mean = -0.5 * claimed**2
        above = norm.cdf(mean / sd)
        return above + math.exp(mean + 0.5 * sd**2) * norm.cdf(-sd - mean / sd)

    if not (error > 0 and claimed > 0):
        return 0.0
    error, claimed = min(error, 8.0), min(claimed, 8.0)  # a probability of zero
    return float(abs(accepted(error) - accepted(claimed)))


def _advise_overconfident(run: Run) -> Iterator[str]:
    """A batch without the rows that matter has too little scatter to show it."""
    true, sd = run.pilot.get("batch_sd", 0.0), run.measured(Acceptance).noise_sd_median
    if run.decides_on_batches and true > 0.02 and sd < true / 3:
        yield (
            f"the batches take themselves for too good: their noise had sd "
            f"{sd:.2g} (median), where the pilot found {true:.2g} on "
            "all rows. They miss the few rows that matter, and the draws are those of "
            "the Laplace approximation however well they mix. Write "
            "batch=batch.stratified(), the default."
        )


def _advise_checks(run: Run) -> Iterator[str]:
    d = run.measured(Checks)
    if not (run.pilot and run.decides_on_batches):
        return
    if d.check_rms_z > 2 and d.check_change > _CHANGE:
        sizes = {n: 2 * rows for n, rows in run.measured(Setup).batch_sizes.items()}
        larger = sizes if len(sizes) > 1 else max(sizes.values(), default=200)
        yield (
            "decisions that were checked on all rows were off by "
            f"{d.check_rms_error:.2g} in the log ratio, {d.check_rms_z:.2g} times the "
            "noise that their batches claimed: their acceptance is off by about "
            f"{d.check_change:.2g}. Write batch_size={larger}, "
            "batch=batch.stratified() where another scheme was chosen, or "
            'estimate="exact".'
        )


def _advise_expansion(run: Run) -> Iterator[str]:
    left = run.pilot.get("residual_sd", 0.0)
    if left > 0.5:
        yield (
            f"the expansion of the likelihood is coarse: what it leaves over of the "
            f"log density has sd {left:.2g} over the posterior (0.5 is good), so "
            "moves are rejected for it, most of all in the tails. Expand in "
            "other coordinates, in which the likelihood is closer to a parabola: "
            "control_variate.taylor2(sites=[...]) takes the names of sites, latent or "
            "deterministic; or transform the parameters."
        )


def _advise_surrogate(run: Run) -> Iterator[str]:
    rhat = run.pilot.get("surrogate_rhat", 1.0)
    if rhat > 1.05:
        yield (
            "the posterior of the surrogate, which has the exact prior and costs no "
            f"data, was hard to sample in itself (R-hat {rhat:.2f}): its geometry is "
            "that of a funnel or a narrow ridge, and moves are scaled for its bulk. "
            f"{OTHER_FORM}"
        )


def _advise_stuck(run: Run) -> Iterator[str]:
    stuck = run.pilot.get("surrogate_stuck", 0.0)
    if stuck > 0.001:
        yield (
            f"trajectories on the surrogate are rejected from {stuck:.1%} of its draws "
            "however short their steps, so that the tails are hardly entered and come "
            f"out too thin. {OTHER_FORM}"
        )


def _advise_other_mode(run: Run) -> Iterator[str]:
    away = run.pilot.get("other_mode", 0.0)
    if away > 0:
        yield (
            "a search for the centre of the expansion ended in another mode, "
            f"{away:.2g} posterior standard deviations away. The chains know only the "
            "one they were expanded at: look at both with control_variate.taylor2("
            "center=...), or sample at a temperature without a control variate."
        )


FAMILY = Family(
    Checks,
    (
        Rule(
            "the batches take themselves for too good",
            "the rows that matter are missed: the draws are those of the Laplace "
            "approximation",
            "`batch.stratified()`, the default",
            _advise_overconfident,
        ),
        Rule(
            "decisions that were checked on all rows were off",
            "the same, found by checks, where acceptance probabilities change by more "
            f"than {_CHANGE:g}",
            "a larger batch",
            _advise_checks,
        ),
        Rule(
            "the expansion of the likelihood is coarse",
            "moves are rejected for what the expansion leaves, most of all in the "
            "tails",
            "other coordinates",
            _advise_expansion,
        ),
        Rule(
            "the posterior of the surrogate ... was hard to sample",
            "a funnel or ridge, which has nothing to do with batches",
            "effects in the other form: "
            "[centred or not](control-variates.md#coordinates-of-the-expansion)",
            _advise_surrogate,
        ),
        Rule(
            "trajectories on the surrogate are rejected from",
            "its tails are entered by no step, and come out too thin",
            "effects in the other form",
            _advise_stuck,
        ),
        Rule(
            "a search for the centre ... ended in another mode",
            "there are two modes at least, and the chains know one",
            "a ladder, or a temperature",
            _advise_other_mode,
        ),
    ),
)
