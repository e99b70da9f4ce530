"""Control variates: whether the surrogate and the reported noise can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from numpyro_minibatch.diagnostics._acceptance import Acceptance, is_quiet
from numpyro_minibatch.diagnostics._convergence import mixes
from numpyro_minibatch.diagnostics._run import (
    Family,
    Numbers,
    Rule,
    Run,
    show,
)
from numpyro_minibatch.diagnostics._setup import Setup

__all__ = ["FAMILY", "Checks"]

_RHAT, _HIGH_RHAT = 1.05, 1.2  # of the surrogate; the first if the run mixes badly, too
_QUADRATURE = 0.05  # largest shift of means, in posterior standard deviations
_MOST_NODES = 121  # that marginalize takes
_ELSEWHERE = 0.01  # share of a row's likelihood far from its mode
_CHANGE = 0.03  # smallest relevant change of an acceptance probability
_FEW_ROWS = 10_000  # of which every decision may read all in a short time
_NO_ERROR = 0.005  # of a log ratio, without a consequence


@dataclass(frozen=True, kw_only=True)
class Checks(Numbers):
    """Comparison of decisions on batches with the same decisions on all rows.

    :param check_rms_error: with a control variate, the root mean square error of the
        log ratios that were checked on all rows.
    :param check_rms_z: the same in units of the noise that the batches reported.
    :param check_change: how much these errors change the acceptance probability of a
        move between equally likely positions, on average.
    """

    check_rms_error: float
    check_rms_z: float
    check_change: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        def mean(name: str, power: int) -> float:
            values = run.last(name)
            known = values[values == values]
            return float((known**power).mean()) if known.size else math.nan

        return cls(
            check_rms_error=math.sqrt(mean("check_rms_error", 2)),
            check_rms_z=math.sqrt(mean("check_rms_z", 2)),
            check_change=abs(mean("check_change", 1)),
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        # of a noise of about zero, rounding is many times as much
        matters = self.check_rms_z <= 2 or self.check_rms_error > _NO_ERROR
        yield (
            "exact checks",
            show("log ratios off by {:.2g}", self.check_rms_error)
            + (show(", {:.2g} of their noise", self.check_rms_z) if matters else "")
            + show(", acceptance by {:.2g}", self.check_change),
        )


def _advise_overconfident(run: Run) -> Iterator[str]:
    """A batch without the rows that matter underestimates its noise."""
    true, sd = run.pilot.get("batch_sd", 0.0), run.measured(Acceptance).noise_sd_median
    # little noise matters little, whatever the batches report of it
    harmless = is_quiet(run) and run.measured(Checks).check_change <= _CHANGE
    if run.decides_on_batches and true > 0.02 and sd < true / 3 and not harmless:
        yield (
            "the batches underestimate their noise: they report a standard deviation "
            f"of {sd:.2g} (median), where the pilot measured {true:.2g} on all rows. "
            "They miss the few rows that matter, so the draws follow the Laplace "
            "approximation, however well they mix. Write batch=batch.stratified(), the "
            "default."
        )


def _advise_checks(run: Run) -> Iterator[str]:
    d = run.measured(Checks)
    if not (run.pilot and run.decides_on_batches):
        return
    # One decision in a tail can make the mean of a few dozen. Where batches miss rows
    # that matter, most chains show it. On a Poisson regression with six events, 1% of
    # right runs have this advice in place of 4.5%.
    values = run.last("check_change")
    known = values[values == values]  # NaN where a chain has not checked any
    usual = abs(float(np.median(known))) if known.size else 0.0
    if d.check_rms_z > 2 and min(d.check_change, usual) > _CHANGE:
        sizes = {n: 2 * rows for n, rows in run.measured(Setup).batch_sizes.items()}
        larger = sizes if len(sizes) > 1 else max(sizes.values(), default=200)
        yield (
            "decisions that were checked on all rows had errors of "
            f"{d.check_rms_error:.2g} in the log ratio, {d.check_rms_z:.2g} times the "
            "noise that their batches reported: acceptance probabilities are off by "
            f"about {d.check_change:.2g}. Write batch_size={larger}, "
            "batch=batch.stratified() where another scheme was chosen, or "
            'estimate="exact".'
        )


def _advise_expansion(run: Run) -> Iterator[str]:
    left = run.pilot.get("residual_sd", 0.0)
    rows = sum(run.measured(Setup).plates.values())
    if left > 0.5:
        yield (
            "the expansion of the likelihood is coarse: the residual of the log "
            f"density has a standard deviation of {left:.2g} over the posterior (0.5 "
            "is good), and moves are rejected because of it, most of all in the tails. "
            "Expand in other coordinates, in which the likelihood is closer to "
            "quadratic: control_variate.taylor2(sites=[...]) takes the names of latent "
            "or deterministic sites. Or transform the parameters"
            + (
                f", or read all {rows} rows in every decision: batch=batch.full()."
                if rows <= _FEW_ROWS and run.decides_on_batches
                else "."
            )
        )


def _advise_surrogate(run: Run) -> Iterator[str]:
    rhat = run.pilot.get("surrogate_rhat", 1.0)
    # its draws give scales and starts, which a run may do without
    if rhat > _HIGH_RHAT or (rhat > _RHAT and not mixes(run)):
        yield (
            "the surrogate's posterior, the exact prior times the expanded likelihood, "
            f"was itself hard to sample (R-hat {rhat:.2f}): it is shaped like a funnel "
            f"or a narrow ridge, and moves are scaled for its bulk. {run.remedy}"
        )


def _advise_stuck(run: Run) -> Iterator[str]:
    stuck = run.pilot.get("surrogate_stuck", 0.0)
    if stuck > 0.001:
        yield (
            f"trajectories on the surrogate are rejected from {stuck:.1%} of its "
            "draws, however short their steps, so the chains hardly enter the tails "
            f"and these come out too light. {run.remedy}"
        )


def _advise_quadrature(run: Run) -> Iterator[str]:
    pilot = run.quadrature
    if "quadrature_refused" in pilot:
        yield (
            "the quadrature of marginalize is not accurate at the draws: "
            f"{pilot['quadrature_refused']}"
        )
    error, nodes = pilot.get("quadrature_sd", 0.0), pilot.get("quadrature_nodes", 0)
    of_row, accuracy = (
        pilot.get(f"quadrature_{name}", 0.0) for name in ("error", "accuracy")
    )
    better = int(pilot.get("quadrature_better_nodes", 31))
    more = f"Write marginalize(model, num_nodes={better})."
    if not nodes < better <= _MOST_NODES:
        more = (
            "No number of nodes is accurate. Sample the model with its latent sites, "
            "by NumPyro's NUTS."
        )
    if error > _QUADRATURE:
        yield (
            "the quadrature of marginalize is coarse: between posterior draws its "
            f"error changes the log density by {error:.2g} (standard deviation), which "
            f"moves means by up to as many posterior standard deviations. {more}"
        )
    elif of_row > 2 * accuracy > 0:  # less is within the error of this number
        yield (
            "the quadrature of marginalize misses the accuracy of a row: with "
            f"{nodes:.0f} nodes its log likelihood is off by up to {of_row:.1g}, and "
            f"the accuracy is {accuracy:.1g}. The sum over the rows moves means by up "
            f"to {error:.1g} posterior standard deviations. Write accuracy="
            f"{of_row:.1g} if the sum is what counts. If a single row matters: {more}"
        )
    single = pilot.get("quadrature_sd_single", 0.0)
    # measured at eight draws, from which a spread may appear half as large as it is
    if single > max(_QUADRATURE / 2, 2 * error):
        yield (
            "in single precision, the marginal likelihood of marginalize misses what "
            "lies at the border of the support of a latent variable: between posterior "
            f"draws this changes the log density by {single:.2g} (standard deviation). "
            "Use double precision, numpyro.enable_x64()."
        )
    yield from _advise_elsewhere(pilot)


def _advise_elsewhere(pilot: Mapping[str, float]) -> Iterator[str]:
    wider = pilot.get("quadrature_sd_elsewhere", 0.0)
    of_row = pilot.get("quadrature_elsewhere", 0.0)
    if wider > _QUADRATURE or of_row > _ELSEWHERE:
        row = pilot.get("quadrature_row_elsewhere", 0)
        yield (
            "the quadrature of marginalize misses a part of some rows: points further "
            f"out change the log likelihood of row {row:.0f} by {of_row:.2g}, and that "
            f"of all rows by {wider:.2g} (standard deviation between posterior draws). "
            "The density of a row's latent variables has a second mode or a heavy "
            "tail. Write what tells modes apart as a discrete latent site of the row, "
            "or sample the model with its latent sites. recover_marginals draws the "
            "latent sites of such rows from one part only."
        )
    kinks = pilot.get("quadrature_kinks", 0)
    if kinks:
        yield (
            "the search of marginalize did not converge for the latent variables of "
            f"some rows ({kinks:.0f} pairs of row and draw). Their density is finite "
            "and falls on each side of where the search ended, as at a kink, which "
            "jnp.maximum(a, 0) has at a = 0. Nodes are less accurate there. Use more "
            "of them (num_nodes), write a smooth function, such as jax.nn.softplus, or "
            "sample the model with its latent sites."
        )
    lost = pilot.get("quadrature_unconverged", 0) - kinks
    if lost:
        yield (
            "the search of marginalize found no mode of the latent variables of some "
            f"rows ({lost:.0f} pairs of row and draw), where the quadrature may be "
            "wrong. The density of these rows is flat or not finite: give their latent "
            "sites proper priors, or sample the model with its latent sites."
        )


def _advise_other_mode(run: Run) -> Iterator[str]:
    away = run.pilot.get("other_mode", 0.0)
    searches = run.pilot.get("other_mode_searches", 0)
    if searches:
        yield (
            f"of {searches:.0f} searches for the mode only one ended in the highest "
            "that was found, and the next one is lower by "
            f"{run.pilot['other_mode_gap']:.2g} in the log density: there may be "
            "higher modes that no search found, and the chains explore only this one. "
            "Start from a position that is known to be good, init_strategy="
            "init_to_value(values=...), such as the best of several optimisations, "
            "or write MinibatchMH(model, control_variate=control_variate.taylor2("
            "modes=8)), which looks for more modes and moves between them."
        )
    elif away > 0:
        yield (
            "a search for the centre of the expansion ended in another mode, "
            f"{away:.2g} posterior standard deviations away. The chains explore only "
            "the mode at which the likelihood was expanded. Write MinibatchMH(model, "
            "control_variate=control_variate.taylor2(modes=8)), which expands at each "
            "mode and moves between them, or sample at a higher temperature without a "
            "control variate."
        )


FAMILY = Family(
    Checks,
    (
        Rule(
            "the batches underestimate their noise",
            "they miss the rows that matter: the draws follow the Laplace "
            "approximation",
            "`batch.stratified()`, the default",
            _advise_overconfident,
        ),
        Rule(
            "decisions that were checked on all rows had errors of",
            "the same problem, found by checks; it is reported if acceptance "
            f"probabilities change by more than {_CHANGE:g}",
            "a larger batch",
            _advise_checks,
        ),
        Rule(
            "the expansion of the likelihood is coarse",
            "moves are rejected because of the residual of the expansion, most of all "
            "in the tails",
            "other coordinates",
            _advise_expansion,
        ),
        Rule(
            "the surrogate's posterior ... was itself hard to sample",
            "it has a funnel or a ridge; the batches are not the cause",
            "group effects [non-centred instead of centred, or the reverse]"
            "(control-variates.md#coordinates-of-the-expansion)",
            _advise_surrogate,
        ),
        Rule(
            "trajectories on the surrogate are rejected from",
            "the chains hardly enter its tails, which come out too light",
            "group effects non-centred instead of centred, or the reverse",
            _advise_stuck,
        ),
        Rule(
            "the quadrature of marginalize is coarse*, *is not accurate at the draws*, "
            "*misses the accuracy of a row*, "
            "*misses a part of some rows*, *found no mode*, *in single precision",
            "means move by up to the stated number of posterior standard deviations",
            "`marginalize(model, num_nodes=...)` with more nodes, or double precision",
            _advise_quadrature,
        ),
        Rule(
            "a search for the centre ... ended in another mode*, *of 12 searches for "
            "the mode only one ended in the highest",
            "there are at least two modes, and the chains explore one; if only one "
            "search found it, there may be higher ones",
            "`control_variate.taylor2(modes=8)`, a ladder of temperatures, or one "
            "higher temperature",
            _advise_other_mode,
        ),
    ),
)
