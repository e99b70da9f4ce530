"""Stays: positions where a chain stands still longer than its acceptance rate implies.

Consider a chain whose proposals hardly depend on its position, such as one that moves
by a surrogate of the posterior. It stays at a position for a number of draws that is
about the position's weight w, the density of the target over that of the proposals.
Where weights grow towards the tails, excursions into the tails are few and long [1]. A
run then contains too few of them to estimate standard deviations, and if it contains
none, its diagnostics look excellent. But the weights already grow in the bulk, where
there are enough draws to measure them.

**References:**

1. Kerrie L. Mengersen, Richard L. Tweedie (1996), *Rates of convergence of the Hastings
   and Metropolis algorithms*, Annals of Statistics 24(1), theorem 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np

from numpyro_minibatch.diagnostics._convergence import Convergence
from numpyro_minibatch.diagnostics._effective import effective_sample_size
from numpyro_minibatch.diagnostics._run import Family, Numbers, Rule, Run, show
from numpyro_minibatch.diagnostics._setup import Setup

__all__ = ["FAMILY", "Stays"]

# sds from the mean beyond which stays count as tails: a quarter of a normal
_OUTER = 1.2
_FAR = 2.5  # sds from the mean at which the weight is estimated
_NEAR = 4.0  # sds at which positions are clipped for that estimate
# Growth that a linear function of the parameter leaves, above which weights count. A
# linear log weight is that of a posterior beside the surrogate, without a tail of its
# own, as for the scale of a regression on 25 columns. Of a cubic one it leaves half. At
# 0.1 to 0.2, all of 30 runs with 20 or 28 ones of 5,000 had this advice, as without the
# limit, and 1 to 4 of 15 regressions in place of 13. At 0.38, only 19 of 30 with 28.
_BENT = 0.15
_FEWEST = 100  # draws in a mode from which its tails can be judged
# These limits separate good runs from bad ones. They were found on logistic regressions
# with few ones among 5,000 to 40,000 zeros, in 60 to 100 runs of 4 x 1,000 draws each.
# With 40 or more ones, the 95% intervals of the sds miss in 2 to 8% of the runs; with 5
# to 20, in 8 to 38%.
_MAX_TAIL_STAY = 1.12
_MAX_TAIL_WEIGHT = 2.25
_MAX_SHARE = 0.05
# Times the usual stay: acceptance is not quite constant in good runs either. At 1, 5 to
# 8% of the runs on ten inverse Gaussian rows had this advice, and 0 to 1% at 1.25. Of
# bad runs, with 5 to 28 ones of 5,000, 98 to 47% had it from the draws alone, in place
# of 98 to 50% at 1.
_MIN_LONGEST = 1.25


# With several modes, a draw is compared with the mean and the standard deviation of
# the draws in its mode. Steps that the surrogate rejects do not count there. In the
# tail of a skewed mode these are most moves between modes, but moves within the mode
# still lead out of the tail.
@dataclass(frozen=True, kw_only=True)
class Stays(Numbers):
    """The lengths of stays, and the regions in which chains stand still.

    :param staying: the share of the draws that repeat the draw before.
    :param longest_stay: the largest number of draws that a chain stood still for.
    :param usual_stay: a bound that the longest stay exceeds in 1 of 100 runs if moves
        are accepted with the same probability everywhere.
    :param long_stays: the share of the draws in stays longer than that.
    :param tail_stay: the mean length of stays farther than 1.2 standard deviations from
        the mean of a parameter, relative to the average; the largest of all parameters.
    :param tail_stay_name: the parameter, and the mode if there are several.
    :param tail_weight: for a kernel that moves by a surrogate, the ratio of posterior
        to surrogate 2.5 standard deviations from the mean of a parameter, relative to
        the ratio at the mean; the largest of all parameters in which the logarithm of
        the ratio is not linear.
    :param tail_weight_name: the parameter, and the mode if there are several.
    :param stay_share: the largest share of a single stay in the variance of an
        estimated variance, according to its effective sample size.
    """

    staying: float
    longest_stay: float
    usual_stay: float
    long_stays: float
    tail_stay: float
    tail_stay_name: str
    tail_weight: float
    tail_weight_name: str
    stay_share: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        columns, names = run.parameters
        with np.errstate(invalid="ignore"):
            sd = columns.std((0, 1))
        used = np.flatnonzero(np.isfinite(sd) & (sd > 0))
        found: dict[str, Any] = dict.fromkeys(
            (field.name for field in fields(cls)), math.nan
        )
        found |= {"tail_stay_name": "", "tail_weight_name": ""}
        if not used.size or columns.shape[1] < 4:
            return cls(**found)
        names = [names[k] for k in used]
        columns, mode = columns[..., used], _modes_of(run, columns.shape[:2])
        z = _standardised(columns, mode)
        weight, name = _tail_weight(run, z, mode, names)
        if not math.isnan(weight):
            found |= {"tail_weight": weight, "tail_weight_name": name}
        stays = _stays(columns, z, mode, _rejected_on_surrogate(run, mode))
        lengths = stays.lengths
        total = int(lengths.sum())
        rate = len(lengths) / total  # at which the chain moves
        if mode.any():
            ess = effective_sample_size(np.square(z))
        else:
            precision = run.measured(Convergence).precision
            ess = precision["ess_sd"].reindex(parameter=names).values
        found |= {
            "staying": 1.0 - len(lengths) / mode.size,
            "stay_share": _largest_share(stays, z, ess),
        }
        if rate == 1.0:
            return cls(**found)
        usual = 1 + math.log(len(lengths) / 0.01) / -math.log1p(-rate)
        tail, name = _tail_stay(stays, names)
        return cls(
            **found
            | {
                "longest_stay": int(lengths.max()),
                "usual_stay": usual,
                "long_stays": float(lengths[lengths > usual].sum() / total),
                "tail_stay": tail,
                "tail_stay_name": name,
            }
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        yield (
            "stays",
            show("{:.0%} of the draws", self.staying if self.staying > 0 else math.nan)
            + show(", {:.0f} at most", self.longest_stay)
            + show(
                f", {{:.2f}} times longer in the tails ({self.tail_stay_name})",
                self.tail_stay,
            ),
        )
        yield (
            "tail weight",
            show(f"{{:.2f}} ({self.tail_weight_name})", self.tail_weight),
        )


def _modes_of(run: Run, shape: tuple[int, ...]) -> np.ndarray:
    """The mode of each draw, ``(chain, draw)``; zeros with one mode."""
    found = run.stats.get("mode")
    if run.pilot.get("num_modes", 1) < 2 or found is None:
        return np.zeros(shape, int)
    return np.asarray(found.transpose("chain", "draw").values, int)


def _standardised(columns: np.ndarray, mode: np.ndarray) -> np.ndarray:
    """Draws relative to the mean and the standard deviation in their mode.

    Draws in a mode that has too few of them, or in which they are all equal, are zero.
    """
    z = np.zeros_like(columns)
    for k in np.unique(mode):
        inside = mode == k
        if not mode.any() or inside.sum() >= _FEWEST:
            values = columns[inside]
            sd = values.std(0)
            z[inside] = (values - values.mean(0)) / np.where(sd > 0, sd, np.inf)
    return z


def _named(name: str, mode: int, mode_of: np.ndarray) -> str:
    """The name of a parameter, in a mode if there are several."""
    return f"{name} in mode {mode}" if mode_of.any() else name


class _Stays(NamedTuple):
    """The stays of all chains: positions, how many draws they last, and modes."""

    positions: np.ndarray
    lengths: np.ndarray
    modes: np.ndarray


def _rejected_on_surrogate(run: Run, mode: np.ndarray) -> np.ndarray:
    """Whether the step to each draw ended with the surrogate, with several modes."""
    if not (mode.any() and _has_log_ratios(run)):
        return np.zeros(mode.shape, bool)
    # a proposal that stays has no log ratio
    return run.stats["log_ratio"].transpose("chain", "draw").values == 0


def _has_log_ratios(run: Run) -> bool:
    """Whether the draws have the log ratio of each move that follows a surrogate."""
    single = run.number("num_steps") == 1 and run.thinning == 1
    return single and run.flag("uses_surrogate") and "log_ratio" in run.stats


def _stays(
    columns: np.ndarray, z: np.ndarray, mode: np.ndarray, rejected: np.ndarray
) -> _Stays:
    moved = np.ones(z.shape[:2], bool)
    moved[:, 1:] = (columns[:, 1:] != columns[:, :-1]).any(-1)
    starts = np.flatnonzero(moved)  # each chain begins with a stay
    lengths = np.add.reduceat((moved | ~rejected).ravel().astype(int), starts)
    return _Stays(z.reshape(-1, z.shape[-1])[starts], lengths, mode.ravel()[starts])


def _tail_stay(stays: _Stays, names: list[str]) -> tuple[float, str]:
    """The length of stays far from the mean, relative to the average of their mode."""
    worst, place = 0.0, names[0]
    for k in np.unique(stays.modes):
        inside = stays.modes == k
        lengths = stays.lengths[inside]
        outer = np.abs(stays.positions[inside]) > _OUTER
        number = outer.sum(0)
        with np.errstate(all="ignore"):
            longer = lengths @ outer / number / lengths.mean()
        longer = np.where(number > 10, longer, 0.0)
        which = int(longer.argmax())
        if longer[which] > worst:
            worst = float(longer[which])
            place = _named(names[which], int(k), stays.modes)
    return worst, place


def _tail_weight(
    run: Run, z: np.ndarray, mode: np.ndarray, names: list[str]
) -> tuple[float, str]:
    """The weight far from the mean, relative to that at the mean.

    The log ratio of a move from z to a proposal y is log w(y) - log w(z), so the mean
    of its negative, given z, is log w(z) up to a constant. A cubic polynomial in each
    parameter estimates it from bulk and tails together.
    """
    if not _has_log_ratios(run):
        return math.nan, ""
    ratio = run.stats["log_ratio"].transpose("chain", "draw").values[:, 1:]
    # a proposal that stays has no log ratio
    used = np.isfinite(ratio) & (ratio != 0)
    worst, place = math.nan, ""
    for k in np.unique(mode):
        inside = used & (mode[:, :-1] == k)
        if inside.sum() < _FEWEST:
            continue
        log_weight = -ratio[inside].astype(float)
        growth, which = _largest_growth(z[:, :-1][inside], log_weight)
        if not growth <= worst:
            worst, place = growth, _named(names[which], int(k), mode)
    return math.exp(min(worst, 100.0)), place


def _largest_growth(z: np.ndarray, log_weight: np.ndarray) -> tuple[float, int]:
    """The largest growth of the log weight from the mean to the tails that bends.

    :return: the growth, 0 if none is certain, and the parameter that has it.
    """
    worst, place = 0.0, 0
    far = np.array([_FAR, -_FAR])
    for k in range(z.shape[-1]):
        x = np.clip(z[:, k], -_NEAR, _NEAR)
        design = np.stack([np.ones_like(x), x, x**2, x**3], axis=1)
        gram = design.T @ design
        if np.linalg.cond(gram) > 1e10:
            continue
        beta = np.linalg.solve(gram, design.T @ log_weight)
        noise = np.mean((log_weight - design @ beta) ** 2)
        direction = np.stack([0 * far, far, far**2, far**3], axis=1)
        covariance = noise * direction @ np.linalg.solve(gram, direction.T)
        growth = direction @ beta
        centred = x - x.mean()
        bent = growth - far * (centred @ design @ beta) / (centred @ centred)
        certain = growth > 4 * np.sqrt(np.diag(covariance))
        growth = growth[certain & (bent > _BENT)]
        if growth.size and growth.max() > worst:
            worst, place = float(growth.max()), k
    return worst, place


def _largest_share(stays: _Stays, z: np.ndarray, ess: np.ndarray) -> float:
    """The largest share of one stay in the variance of an estimated variance."""
    squares = z.reshape(-1, z.shape[-1]) ** 2
    of_stays = stays.lengths[:, None] * (stays.positions**2 - 1.0)
    with np.errstate(all="ignore"):
        variance = squares.var(0) * len(squares) ** 2 / ess
        share = (of_stays**2).max(0) / variance
    return float(np.nanmax(share)) if np.isfinite(share).any() else math.nan


def _advise_stays(run: Run) -> Iterator[str]:
    d = run.measured(Stays)
    explained = run.measured(Convergence).still_chains or run.rounding
    if explained or not d.stay_share > _MAX_SHARE:
        return
    seen = []
    much_longer = d.longest_stay > _MIN_LONGEST * d.usual_stay
    if d.tail_stay > _MAX_TAIL_STAY and much_longer:
        seen.append(
            f"the chains stay {d.tail_stay:.2f} times longer than average where "
            f"{d.tail_stay_name} is far from its mean, for up to {d.longest_stay:.0f} "
            "draws, where a constant acceptance rate would give at most "
            f"{d.usual_stay:.0f}"
        )
    if d.tail_weight > _MAX_TAIL_WEIGHT:
        seen.append(
            f"the ratio of posterior to surrogate is {d.tail_weight:.2g} times as high "
            f"{_FAR} standard deviations from the mean of {d.tail_weight_name} as at "
            "the mean"
        )
    if not seen:
        return
    draws = run.measured(Setup).num_draws
    yield (
        "the tails are known less accurately than the effective sample sizes suggest: "
        f"{'; '.join(seen)}. Excursions into the tails are few and long; a run that "
        "misses them underestimates standard deviations and the distance of 5% and 95% "
        "quantiles from the mean. Expand in other coordinates or transform the "
        "parameters to make the posterior less skewed; or write "
        f"num_samples={20 * draws}, and treat the Monte Carlo errors of the tails with "
        "caution."
    )


FAMILY = Family(
    Stays,
    (
        Rule(
            "the tails are known less accurately",
            "the sampler proposes too rarely in the tails of a skewed posterior: "
            "visits are few and long, and the diagnostics of a run without one look "
            "excellent",
            "other coordinates, a transformation, a much longer run",
            _advise_stays,
        ),
    ),
)
