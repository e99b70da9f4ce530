"""Convergence: R-hat, effective sample sizes, and Monte Carlo errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import xarray as xr

from numpyro_minibatch.diagnostics._acceptance import is_frozen
from numpyro_minibatch.diagnostics._effective import precision
from numpyro_minibatch.diagnostics._run import (
    Family,
    Numbers,
    Rule,
    Run,
    round_up,
    show,
)
from numpyro_minibatch.diagnostics._setup import Setup

__all__ = ["FAMILY", "Convergence", "mixes"]

_ESS_PER_CHAIN = 100
_MAX_RHAT = 1.01
_MOST_NAMES = 3
_PARTS = {  # parts of a distribution, and the effective sample size of each
    "bulk": "the bulk effective sample size",
    "sd": "the effective sample size of squares about the mean",
    "tail": "the tail effective sample size",
}


@dataclass(frozen=True, kw_only=True)
class Convergence(Numbers):
    """Convergence of the chains, and the precision of estimates.

    :param rows_per_draw: rows of data read per draw that was kept by thinning.
    :param total_rows: rows of data read for all draws, without the warmup.
    :param rows_per_effective_sample: ``total_rows`` divided by the smallest bulk ESS.
    :param max_rhat: the largest R-hat; NaN with one chain.
    :param max_rhat_name: the parameter that has it.
    :param still_chains: the number of chains that never moved.
    :param min_ess_bulk: the smallest bulk effective sample size of all parameters that
        vary; 0 for one that is constant in a chain or has a NaN. No effective sample
        size here is above the number of draws.
    :param min_ess_bulk_name: the parameter that has it.
    :param min_ess_sd: the smallest effective sample size of squares about the mean,
        which is what standard deviations are computed from.
    :param min_ess_sd_name: the parameter that has it.
    :param min_ess_tail: the smallest effective sample size of the 5% and 95% tails.
    :param min_ess_tail_name: the parameter that has it.
    :param mcse_mean: the largest Monte Carlo standard error of a mean, in standard
        deviations of its parameter; infinite if a tail is too heavy for one.
    :param mcse_sd: the largest error of a standard deviation, relative to it; infinite
        if a tail is too heavy for one.
    :param mcse_quantile: the largest error of a 5% or 95% quantile, in standard
        deviations.
    :param precision: an ``xarray.Dataset`` with all of these for each parameter: see
        :func:`~numpyro_minibatch.diagnostics.precision`.
    """

    rows_per_draw: float
    total_rows: float
    rows_per_effective_sample: float
    max_rhat: float
    max_rhat_name: str
    still_chains: int
    min_ess_bulk: float
    min_ess_bulk_name: str
    min_ess_sd: float
    min_ess_sd_name: str
    min_ess_tail: float
    min_ess_tail_name: str
    mcse_mean: float
    mcse_sd: float
    mcse_quantile: float
    precision: xr.Dataset = field(compare=False, repr=False)

    @classmethod
    def measure(cls, run: Run) -> Self:
        found = _mixing(run)
        rows = float(run.finite("num_rows").sum()) * run.thinning
        ess = found["min_ess_bulk"]
        return cls(
            rows_per_draw=run.mean("num_rows") * run.thinning,
            total_rows=rows,
            rows_per_effective_sample=rows / ess if ess > 0 else math.nan,
            **found,
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        yield (
            "rows",
            show("{:.4g} a draw, {:.3g} in all", self.rows_per_draw, self.total_rows)
            + show(", {:.3g} an effective sample", self.rows_per_effective_sample),
        )
        yield "R-hat", show(f"{{:.3f}} ({self.max_rhat_name})", self.max_rhat)
        yield (
            "ESS",
            show(f"bulk {{:.0f}} ({self.min_ess_bulk_name})", self.min_ess_bulk)
            + show(f", squares {{:.0f}} ({self.min_ess_sd_name})", self.min_ess_sd)
            + show(f", tail {{:.0f}} ({self.min_ess_tail_name})", self.min_ess_tail),
        )
        yield (
            "MC error",
            show(
                "mean {:.2g} sd, sd {:.2g} of itself, 5% and 95% quantiles {:.2g} sd",
                self.mcse_mean,
                self.mcse_sd,
                self.mcse_quantile,
            ),
        )


def _mixing(run: Run) -> dict[str, Any]:
    """R-hat, effective sample sizes and errors, the worst of all parameters."""
    columns, names = run.parameters
    chains, draws = columns.shape[:2]
    with np.errstate(invalid="ignore"):
        span = np.ptp(columns, axis=1)
        varies = ~(np.ptp(columns, axis=(0, 1)) == 0)  # NaN does
    if not varies.any():
        varies = ~varies
    still = (span == 0)[:, varies]
    columns, stuck = columns[:, :, varies], still.any(0)
    names = [name for name, yes in zip(names, varies, strict=True) if yes]
    result: dict[str, Any] = {"still_chains": int(still.all(1).sum())}
    known = precision(columns, names)
    for key in ("bulk", "tail"):
        values = _arviz("ess", columns, method=key) if draws >= 4 else None
        if values is not None:
            # for a constant ArviZ returns the number of draws, and for NaN it returns
            # NaN
            values = np.where(stuck | np.isnan(values), 0.0, values)
            values = np.minimum(values, chains * draws)
            known[f"ess_{key}"] = ("parameter", values)
        result |= _worst(f"min_ess_{key}", values, names, np.argmin)
    values = known["ess_sd"].values if draws >= 4 else None
    if values is not None:
        values = np.where(stuck | np.isnan(values), 0.0, values)
    result |= _worst("min_ess_sd", values, names, np.argmin)
    rhat = _arviz("rhat", columns) if chains > 1 and draws >= 4 else None
    if rhat is not None:
        rhat = np.where(stuck | np.isnan(rhat), np.inf, rhat)
        known["rhat"] = ("parameter", rhat)
    result |= _worst("max_rhat", rhat, names, np.argmax)
    with np.errstate(all="ignore"):
        relative = {key: known[f"mcse_{key}"] / known["sd"] for key in _ERRORS}
    quantile = np.maximum(relative.pop("q5"), relative.pop("q95"))
    return result | {
        "mcse_mean": float(relative["mean"].max()),
        "mcse_sd": float(relative["sd"].max()),
        "mcse_quantile": float(quantile.max()),
        "precision": known,
    }


_ERRORS = ("mean", "sd", "q5", "q95")


def _worst(
    key: str, values: np.ndarray | None, names: Sequence[str], pick: Callable
) -> dict[str, Any]:
    if values is None or not values.size:
        return {key: math.nan, f"{key}_name": ""}
    place = int(pick(values))
    return {key: float(values[place]), f"{key}_name": names[place]}


def _arviz(function: str, columns: np.ndarray, **options: Any) -> np.ndarray:
    import arviz as az  # a slow import, which also prints an announcement of ArviZ 1

    data = xr.Dataset({"x": (("chain", "draw", "parameter"), columns)})
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # about constants and NaN, which are handled
        return getattr(az, function)(data, **options)["x"].values


# rules ------------------------------------------------------------------------------


def mixes(run: Run) -> bool:
    """Whether the chains agree, and have enough effective draws.

    :param run: the run.
    """
    d, chains = run.measured(Convergence), run.measured(Setup).num_chains
    least = min(d.min_ess_bulk, d.min_ess_sd, d.min_ess_tail)
    return least >= _ESS_PER_CHAIN * chains and not d.max_rhat > _MAX_RHAT


def _advise_rounding(run: Run) -> Iterator[str]:
    found = run.rounding
    if not found:
        return
    precision, remedy = "double", "Give"
    if not found["double"]:
        precision = "single"
        remedy = (
            "Use double precision, numpyro.enable_x64(). If that is too little, give"
        )
    yield (
        f"rounding errors change the log density by {found['error']:.2g} at draws such "
        f"as {found['name']} = {found['value']:.2g}, in {precision} precision. The "
        f"chains follow these errors. {remedy} parameters that the data hardly "
        "determine priors with lighter tails, or write the likelihood without "
        "differences of large numbers."
    )


def _advise_still(run: Run) -> Iterator[str]:
    d, setup = run.measured(Convergence), run.measured(Setup)
    if not d.still_chains or is_frozen(run) or run.rounding:
        return  # the advice on the noise, or on rounding errors, covers it
    never = f"{d.still_chains} of {setup.num_chains} chains never moved"
    if run.pilot and run.flag("start_given"):
        yield (
            f"{never}. They started where init_params or init_strategy put them, but "
            "moves are scaled to the surrogate's posterior and are rejected far "
            "outside of it. Run a warmup, which begins at a draw from the surrogate's "
            "posterior where a start is far away, or leave both arguments out."
        )
    elif run.pilot:
        yield (
            f"{never}: moves have the scale of the bulk of the surrogate's "
            "posterior, and are rejected where it is much narrower, as in the neck "
            f"of a funnel or on a ridge. {run.remedy}"
        )
    else:
        yield (
            f"{never}. Write a smaller step_size, or start elsewhere with "
            "init_strategy."
        )


def _advise_constant(run: Run) -> Iterator[str]:
    d = run.measured(Convergence)
    if d.min_ess_bulk == 0 and not d.still_chains:
        yield (
            f"{d.min_ess_bulk_name} has one value in all draws of a chain, or a NaN: "
            "its R-hat and ESS are meaningless."
        )


def _is_measurable(run: Run) -> bool:
    d = run.measured(Convergence)
    return not (d.still_chains or run.rounding) and d.min_ess_bulk != 0


def _advise_rhat(run: Run) -> Iterator[str]:
    d = run.measured(Convergence)
    if not _is_measurable(run) or not d.max_rhat > _MAX_RHAT:
        return
    # an expansion has one mode, and a normal surrogate has no funnel
    if not run.pilot.get("gaussian", True):
        reason = (
            "the posterior has a tail, a funnel or a ridge that moves on the surrogate "
            "hardly enter."
        )
        if "quadrature_nodes" not in run.pilot:  # effects that are not integrated out
            reason += f" {run.remedy}"
    elif run.pilot:
        reason = "they are in different modes."
    else:
        reason = (
            "they are in different modes, or started far from the posterior: start "
            "them nearer, for example with init_strategy=numpyro.infer.init_to_median."
        )
    yield (
        f"R-hat is {d.max_rhat:.3f} for {d.max_rhat_name}, above {_MAX_RHAT}: the "
        "chains disagree. Write a larger num_warmup and num_samples; if R-hat stays "
        f"high, {reason}"
    )


def _advise_more_draws(run: Run) -> Iterator[str]:
    d, setup = run.measured(Convergence), run.measured(Setup)
    if not _is_measurable(run):
        return
    wanted = _ESS_PER_CHAIN * setup.num_chains
    sizes = {key: getattr(d, f"min_ess_{key}") for key in _PARTS}
    part = min(sizes, key=lambda key: sizes[key])
    # the advice names the mean if it is about as bad as the worst
    part = "bulk" if sizes["bulk"] < 1.25 * sizes[part] else part
    ess = sizes[part]
    if not 0 < ess < wanted:
        return
    times = wanted / ess
    num_steps = int(run.number("num_steps", 0))
    longer = (
        f", or num_steps={math.ceil(times * num_steps)} to take more steps for "
        "each of as many draws"
        if num_steps
        else ""
    )
    yield (
        f"{_PARTS[part]} of {getattr(d, f'min_ess_{part}_name')} is "
        f"{ess:.0f}, below {_ESS_PER_CHAIN} per chain: about "
        f"{round_up(setup.num_draws * (times - 1))} more draws per chain are needed. "
        f"Write num_samples={round_up(setup.num_draws * times)}{longer}."
    )


def _note_heavy_tails(run: Run) -> Iterator[str]:
    known = run.measured(Convergence).precision
    of_mean, of_sd = (
        np.isposinf(known[f"mcse_{key}"].values) for key in ("mean", "sd")
    )
    for heavy, what in (
        (
            of_mean,
            "neither a mean nor a standard deviation: their Monte Carlo errors are",
        ),
        (of_sd & ~of_mean, "no standard deviation: its Monte Carlo error is"),
    ):
        if not heavy.any():
            continue
        names = known["parameter"].values[heavy]
        some = ", ".join(names[:_MOST_NAMES]) + (", ..." * (len(names) > _MOST_NAMES))
        yield (
            f"the posterior of {some} has so heavy a tail that the draws determine "
            f"{what} infinite. Report quantiles, or the mean and standard deviation of "
            "the logarithm."
        )


FAMILY = Family(
    Convergence,
    (
        Rule(
            "rounding errors change the log density by",
            "digits are lost there, such as by log-gamma functions of very large "
            "numbers, and chains stay where the error is positive",
            "double precision, priors with lighter tails",
            _advise_rounding,
        ),
        Rule(
            "n of N chains never moved",
            "these chains stayed at one position",
            "another start; with a control variate, no start of your own, or group "
            "effects parametrised otherwise, as above",
            _advise_still,
        ),
        Rule(
            "x has one value in all draws",
            "a parameter never moves, or is NaN",
            "inspection of the site with that name in the model",
            _advise_constant,
        ),
        Rule(
            "R-hat is ..., above 1.01",
            "the chains disagree: they are too short, or in different modes",
            "a longer run; if R-hat stays high, a kernel for several modes or, with a "
            "control variate, group effects parametrised otherwise",
            _advise_rhat,
        ),
        Rule(
            "the bulk effective sample size of*, *the effective sample size of "
            "squares*, *the tail effective sample size of",
            "the draws are too few for quantiles and standard errors",
            "`num_samples`, or `num_steps`",
            _advise_more_draws,
        ),
    ),
    notes=(_note_heavy_tails,),
)
