"""Several modes: the masses that the draws give them, and moves between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from numpyro_minibatch.diagnostics._effective import effective_sample_size
from numpyro_minibatch.diagnostics._run import Family, Numbers, Rule, Run, show

__all__ = ["FAMILY", "Masses"]

_FEW_MOVES = 20  # number of moves below which masses are poorly known
_NOTABLE = 0.01  # Laplace mass from which moves should reach a mode
_LEFT_OUT = 0.001  # largest mass of omitted modes without advice
_LOW = 0.05  # smallest acceptance rate of moves between modes
_MAX_ERROR = 0.03  # of a mass
_EXPECTED = 100  # expected draws in a mode, from which having none is an error
_INEFFICIENT = 2.0  # autocorrelation time of squares above which tails are advised on


@dataclass(frozen=True, kw_only=True)
class Masses(Numbers):
    """The masses of modes, with a control variate that has several.

    :param mode_masses: the share of the draws in each mode, in the order of
        ``kernel.pilot["mode_masses"]``; empty without several modes.
    :param mode_mass_error: the largest Monte Carlo standard error of these masses.
    :param mode_moves: the number of moves from one mode to another, in all chains; in a
        ladder, the moves of the coldest rung, including those by swaps.
    :param mode_acceptance: the acceptance rate of the attempted moves to another mode,
        without swaps.
    """

    mode_masses: tuple[float, ...]
    mode_mass_error: float
    mode_moves: float
    mode_acceptance: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        number = int(run.pilot.get("num_modes", 1))
        found = run.stats.get("mode")
        if number < 2 or found is None:
            return cls(
                mode_masses=(),
                mode_mass_error=math.nan,
                mode_moves=math.nan,
                mode_acceptance=math.nan,
            )
        mode = found.transpose("chain", "draw").values
        inside = (mode[..., None] == np.arange(number)).astype(float)
        masses = inside.mean((0, 1))
        errors = np.sqrt(masses * (1 - masses) / effective_sample_size(inside))
        known = errors[np.isfinite(errors)]
        tried = float(run.finite("mode_moves_tried").sum())
        made = float(run.finite("mode_moves_made").sum())
        moves = made
        if "rung_mode" in run.stats:  # a swap of a ladder is not recorded as a move
            moves = max(made, float((np.diff(mode, axis=1) != 0).sum()))
        return cls(
            mode_masses=tuple(float(mass) for mass in masses),
            mode_mass_error=float(known.max()) if known.size else math.nan,
            mode_moves=moves,
            mode_acceptance=made / tried if tried > 0 else math.nan,
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        masses = ", ".join(f"{mass:.3f}" for mass in self.mode_masses)
        yield (
            "modes",
            masses
            and masses
            + show(" (MC error at most {:.2g})", self.mode_mass_error)
            + show(", {:.0f} moves between them", self.mode_moves)
            + show(", {:.0%} of those tried", self.mode_acceptance),
        )


def _advise_few_moves(run: Run) -> Iterator[str]:
    d = run.measured(Masses)
    laplace = sorted(run.pilot.get("mode_masses", ()))[:-1]
    if not d.mode_masses or not laplace or laplace[-1] < _NOTABLE:
        return
    if d.mode_moves < _FEW_MOVES:
        yield (
            f"the chains moved only {d.mode_moves:.0f} times between "
            f"{len(d.mode_masses)} modes, so that their masses are hardly known. "
            "Sample longer, or compare with ReplicaExchange without a control variate."
        )
    elif d.mode_mass_error > _MAX_ERROR:
        error = d.mode_mass_error
        yield (
            "the masses of the modes have a Monte Carlo standard error of up to "
            f"{error:.2g}. Sample {math.ceil((error / 0.01) ** 2)} times as many draws "
            "for an error of 0.01."
        )


def _advise_unvisited(run: Run) -> Iterator[str]:
    d = run.measured(Masses)
    laplace = run.pilot.get("mode_masses", ())
    if not d.mode_masses or d.mode_moves < _FEW_MOVES:
        return
    draws = run.stats["mode"].size
    missing = [
        mass
        for mass, share in zip(laplace, d.mode_masses, strict=False)
        if share == 0 and mass * draws > _EXPECTED
    ]
    if missing:
        yield (
            f"no draw is in {len(missing)} of {len(laplace)} modes, with a mass of "
            f"{sum(missing):.2g} by the Laplace approximation: this approximation is "
            "far from the posterior there, or moves to these modes are rejected. "
            "Compare with ReplicaExchange without a control variate."
        )


def _advise_low_acceptance(run: Run) -> Iterator[str]:
    d = run.measured(Masses)
    if d.mode_acceptance < _LOW and d.mode_moves >= _FEW_MOVES:
        yield (
            f"moves between modes are accepted in {d.mode_acceptance:.1%} of the "
            "cases: the posterior is not near normal in some mode, or the masses by "
            "the Laplace approximation are far from those of the posterior. The draws "
            "are right, but masses need many of them. Transform the parameters so that "
            "the modes are closer to normal."
        )


def _advise_found_once(run: Run) -> Iterator[str]:
    pilot = run.pilot
    searches, once = pilot.get("mode_searches"), pilot.get("mode_once", 0)
    if once:
        yield (
            f"{once} {'mode' if once == 1 else 'modes'} would not have been found "
            f"without one of {searches} random searches. The probability that another "
            "search ends in a mode that none has found is about "
            f"{pilot.get('mode_missed', 0.0):.2g}, so that there may be more modes. "
            "Start another run at positions of your own (init_params=...), where a "
            "search begins as well, or compare with ReplicaExchange without a control "
            "variate."
        )
    never = pilot.get("mode_never", 0)
    if never:
        yield (
            f"{never} {'mode was' if never == 1 else 'modes were'} found by none of "
            f"{searches} random searches, but from the start that you gave, or from "
            "zero. Random searches miss such modes, so that there may be more. Start "
            "other runs at other positions (init_params=...), or compare with "
            "ReplicaExchange without a control variate."
        )


def _advise_left_out(run: Run) -> Iterator[str]:
    masses = [m for m in run.pilot.get("mode_left_out", ()) if m > _LEFT_OUT]
    if masses:
        number = int(run.pilot.get("num_modes", 1)) + len(masses)
        yield (
            f"modes with a mass of {sum(masses):.2g} in all, by the Laplace "
            "approximation, were left out because there are more than modes="
            f"{run.pilot.get('num_modes', 1)}. Write "
            f"control_variate.taylor2(modes={number})."
        )


def _advise_tails(run: Run) -> Iterator[str]:
    pilot = run.pilot
    inefficiency = pilot.get("tail_inefficiency", 1.0)
    if pilot.get("num_modes", 1) < 2 or not inefficiency > _INEFFICIENT:
        return
    yield (
        f"the tails of mode {pilot.get('tail_mode', 0)} are heavier than those of its "
        f"surrogate, most of all for {pilot.get('tail_parameter')}: squares of "
        "independent proposals would have an autocorrelation time of "
        f"{inefficiency:.2g} there, and no representative rows lower it enough. "
        "Excursions into the tails are few and long. Transform the parameters to make "
        "the mode less skewed, or sample longer."
    )


FAMILY = Family(
    Masses,
    (
        Rule(
            "the tails of mode ... are heavier than those of its surrogate",
            "the sampler proposes too rarely in the tails of a mode",
            "a transformation, a longer run",
            _advise_tails,
        ),
        Rule(
            "the chains moved only ... times between ... modes*, *the masses of the "
            "modes have a Monte Carlo standard error",
            "the relative masses of the modes are not known well enough",
            "more draws, or a ladder of temperatures for comparison",
            _advise_few_moves,
        ),
        Rule(
            "no draw is in ... of ... modes",
            "the masses of these modes are not known",
            "a ladder of temperatures for comparison",
            _advise_unvisited,
        ),
        Rule(
            "moves between modes are accepted in ...",
            "moves between modes are rare, and masses need many draws",
            "parameters in which the modes are closer to normal",
            _advise_low_acceptance,
        ),
        Rule(
            "... modes would not have been found without one of ... random searches*, *"
            "... modes were found by none of ... random searches",
            "other modes may have been missed",
            "starts of your own, or a ladder of temperatures for comparison",
            _advise_found_once,
        ),
        Rule(
            "modes with a mass of ... in all ... were left out",
            "the draws lack these modes",
            "a larger `control_variate.taylor2(modes=...)`",
            _advise_left_out,
        ),
    ),
)
