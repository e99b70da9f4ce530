"""Decisions on minibatches: how often moves are accepted, and with how much noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.special import erfcx, expit
from scipy.stats import norm

from numpyro_minibatch.diagnostics._run import (
    Family,
    Numbers,
    Rule,
    Run,
    round_up,
    show,
)
from numpyro_minibatch.diagnostics._setup import Setup

__all__ = ["FAMILY", "Acceptance", "is_frozen", "is_quiet", "larger_batch"]

_RELIABLE = 0.9  # the least share of decisions inside the test's domain
_NORMAL_ROWS = 50  # with fewer rows neither a mean nor its variance can be trusted

# nodes and weights for means over a standard normal variable
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True, kw_only=True)
class Acceptance(Numbers):
    """Acceptance rates, and the noise of the log ratios.

    :param acceptance_rate: the mean acceptance rate.
    :param unreliable: the share of the decisions whose noise was outside the domain of
        the acceptance test.
    :param diverging: the share of the draws where the log density is not finite.
    :param mean_log_ratio: the mean of the log ratios, which is minus half the mean
        square that they would have without noise.
    :param noise_sd_median: the median standard deviation of the log ratios.
    :param noise_sd_95: their 95% quantile.
    """

    acceptance_rate: float
    unreliable: float
    diverging: float
    mean_log_ratio: float
    noise_sd_median: float
    noise_sd_95: float

    @classmethod
    def measure(cls, run: Run) -> Self:
        noise = run.finite("log_ratio_variance")
        if run.flag("uses_surrogate", bool(run.pilot)) and (noise > 0).any():
            noise = noise[noise > 0]  # a proposal that stays needs no decision
        median, high = np.quantile(np.sqrt(noise), [0.5, 0.95])
        return cls(
            acceptance_rate=run.mean("acceptance_rate"),
            unreliable=1.0 - run.mean("reliable"),
            diverging=run.mean("diverging"),
            mean_log_ratio=float(run.finite("log_ratio").mean()),
            noise_sd_median=float(median),
            noise_sd_95=float(high),
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "acceptance rate", show("{:.2f}", self.acceptance_rate)
        yield "unreliable", show("{:.1%} of the decisions", self.unreliable)
        yield "diverging", show("{:.1%} of the draws", self.diverging)
        yield (
            "noise sd",
            show("median {:.2g}, 95% {:.2g}", self.noise_sd_median, self.noise_sd_95),
        )


def is_frozen(run: Run) -> bool:
    """Whether kept estimates are too noisy for the chain to move."""
    d = run.measured(Acceptance)
    kept = run.flag("keeps_estimate")
    return kept and d.acceptance_rate < 0.1 and d.noise_sd_median > 1


# noise ------------------------------------------------------------------------------


def _advise_noise(run: Run) -> Iterator[str]:
    d, limit = run.measured(Acceptance), run.number("max_variance")
    if not (limit > 0 and d.unreliable > 1 - _RELIABLE) or is_frozen(run):
        return
    if d.acceptance_rate == 0 and run.flag("start_given"):
        return  # the noise is due to a start far outside of the posterior
    high = d.noise_sd_95**2 / (2 if run.flag("keeps_estimate") else 1)
    seen = f"{d.unreliable:.0%} of the decisions were unreliable: "
    if not high > limit:
        yield (
            f"{seen}their noise is small enough, but log ratios were NaN or infinite. "
            "Look for parameters at which the model overflows."
        )
        return
    if run.flag("gradient_steps"):
        ways = ['correction="exact"', "correction=batch.growing(500)"]
        ways += _less_noise(run, high / limit, math.sqrt(high))
        yield (
            f"{seen}the 95% quantile of their noise's standard deviation is "
            f"{math.sqrt(high):.2g}, and the test tolerates {math.sqrt(limit):.2g}. "
            f"Write {', or '.join(ways)}."
        )
        return
    ways = list(_ways_to_less_noise(run, high))
    other = "a larger batch_size" if _on_ladder(run) else "a higher temperature"
    yield (
        f"{seen}the 95% quantile of their noise's standard deviation is "
        f"{math.sqrt(high):.2g}, and the test tolerates {math.sqrt(limit):.2g}. The "
        "variance is proportional to step_size**2 / (rows * temperature**2), and step "
        f"sizes adapt. Write {', or '.join(ways) or other}."
    )


def _ways_to_less_noise(run: Run, high: float) -> Iterator[str]:
    """Changes that bring the noise variance's 95% quantile ``high`` into the domain."""
    d, limit = run.measured(Acceptance), run.number("max_variance")
    highest, aim = run.number("highest_accept_prob"), run.number("target_accept_prob")
    if run.flag("keeps_estimate"):
        # the noise of a log density, which does not depend on the step size
        factor = high / limit
        yield "estimate='shared'"
        yield from _less_noise(run, factor, math.sqrt(factor))
        return
    # With many parameters a log ratio without noise is normal with mean -jump / 2 and
    # variance jump, which is proportional to step_size**2; the noise adds ratio * jump
    # to the variance. The penalty test accepts with probability 2 * Phi(-sqrt(v) / 2),
    # where v is the total variance. When the noise falls, a step size that adapts to an
    # acceptance rate therefore grows until jump * (1 + ratio) is what it was.
    typical = d.noise_sd_median**2
    jump = max(-2 * d.mean_log_ratio, 1e-3 * typical)
    ratio = typical / jump
    paid = 1.0 if highest == 1 else 0.0  # Barker's test does not pay for the noise
    domain = limit * typical / high
    slower = domain * (1 / ratio + paid)
    if paid:
        rate = 2 * norm.cdf(-math.sqrt(slower) / 2)
    else:
        rate = _WEIGHTS @ expit(math.sqrt(slower) * _NODES - slower / 2)
    if rate > aim and run.flag("has_step_size", True):
        rate = min(rate, 0.9 * highest)
        yield f"target_accept_prob={rate:.2f} instead of {aim:g} (smaller steps)"
    if not run.flag("sizes_itself"):
        yield "MHMinibatch, whose batches grow to the size that each decision needs"
    if d.mean_log_ratio < 0:
        factor = ratio * (jump * (1 + paid * ratio) / domain - paid)
        yield from _less_noise(run, factor, factor)


def _less_noise(run: Run, batch: float, temperature: float) -> Iterator[str]:
    """Larger batches and a higher temperature, by these factors."""
    larger = larger_batch(run, batch)
    if larger:
        yield f"about {larger}"
    if _on_ladder(run):
        return
    hotter = run.measured(Setup).temperature * temperature
    yield f"about temperature={round_up(hotter)}"


def _on_ladder(run: Run) -> bool:
    """Whether the temperature is that of a rung, and so no setting of the kernel."""
    return "temperatures" in run.facts


def larger_batch(run: Run, factor: float) -> str:
    """The batch sizes that bring the variance down by a factor, as a setting."""
    d = run.measured(Setup)
    if not d.batch_sizes or run.flag("sizes_itself") or run.flag("reads_all_rows"):
        return ""
    sizes = {}
    for name, rows in d.batch_sizes.items():
        size = d.plates[name]
        wanted = rows * factor
        if not run.flag("with_replacement"):
            # the variance of rows drawn without replacement goes like 1 / m - 1 / N
            wanted = 1 / ((1 / rows - 1 / size) / factor + 1 / size)
        sizes[name] = min(round_up(wanted), size)
    new, old = sizes, dict(d.batch_sizes)
    return (
        f"batch_size={new} instead of {old}"
        if len(sizes) > 1
        else f"batch_size={[*new.values()][0]} instead of {[*old.values()][0]}"
    )


def _advise_ignored_noise(run: Run) -> Iterator[str]:
    d = run.measured(Acceptance)
    if not (run.number("max_variance") == 0 and d.unreliable > 1 - _RELIABLE):
        return
    sd = d.noise_sd_median
    if run.number("highest_accept_prob") < 1:
        test, better = "barker", "accept.compensated_barker()"
        temperature = barker_temperature(sd)
    else:
        test, better = "metropolis", "accept.penalty()"
        temperature = metropolis_temperature(sd)
    yield (
        f"accept.{test}() treats log ratios as exact, but these had noise of standard "
        f"deviation {sd:.2g} (median). For small moves this acts like "
        f"{temperature:.3g} times the temperature, so the draws are overdispersed. "
        f"Write acceptance={better}"
        f"{', or penalty=True for MINT' if test == 'metropolis' else ''}."
    )


def metropolis_temperature(sd: float) -> float:
    """The temperature that small moves have under a Metropolis test with noise.

    Detailed balance requires the slope at 0 of log(A(delta) / A(-delta)) to be 1, where
    A is the acceptance probability averaged over normal noise.
    """
    r = 0.5 * erfcx(sd / math.sqrt(2))  # exp(sd ** 2 / 2) * Phi(-sd)
    return float((0.5 + r) / (2 * r))


def barker_temperature(sd: float) -> float:
    """The same for Barker's test, whose slope is four times a mean."""
    p = expit(sd * _NODES)
    return float(1 / (4 * (_WEIGHTS @ (p * (1 - p)))))


def _advise_frozen(run: Run) -> Iterator[str]:
    if not is_frozen(run):
        return
    d = run.measured(Acceptance)
    each = d.noise_sd_median / math.sqrt(2)  # the log ratio has the noise of two
    most = 2 * norm.cdf(-each / math.sqrt(2))
    ways = ["estimate='shared'", *_less_noise(run, each**2, each)]
    yield (
        "the chain is stuck at overestimated log densities: with estimate='augmented' "
        f"each log density has noise of standard deviation {each:.2g}, which alone "
        f"limits the acceptance rate to {most:.2g} (it was {d.acceptance_rate:.2g}). "
        f"Write {', or '.join(ways)}."
    )


def is_quiet(run: Run) -> bool:
    """Whether the pilot measured little noise on all rows."""
    return run.pilot.get("batch_sd_95", math.inf) <= run.pilot.get("quiet_sd", 0.25)


def _advise_small_batch(run: Run) -> Iterator[str]:
    # with little noise, no variance has to be estimated
    if is_quiet(run) or not run.decides_on_batches:
        return
    d = run.measured(Setup)
    for name, rows in d.batch_sizes.items():
        if rows < min(_NORMAL_ROWS, d.plates.get(name, rows)):
            yield (
                f"a batch of {rows} rows of plate {name!r} is too small to rely on a "
                "normal mean and an accurate variance. Write "
                f"batch_size={_NORMAL_ROWS} or more, or check the rows with "
                "diagnostics.normality."
            )


# acceptance -------------------------------------------------------------------------


def _advise_acceptance(run: Run) -> Iterator[str]:
    d = run.measured(Acceptance)
    rate = d.acceptance_rate
    if not run.flag("decides") or math.isnan(rate) or is_frozen(run):
        return
    if not run.flag("has_step_size", True):
        return  # there is no setting to change, and a higher rate is better
    highest, wanted = (
        run.number("highest_accept_prob"),
        run.number("target_accept_prob"),
    )
    aim = f"or a longer num_warmup with adapt_step_size=True, which aims at {wanted:g}"
    if rate < 0.05:
        yield (
            f"the acceptance rate is {rate:.2g}, so most draws repeat the "
            f"previous one. Write a smaller step_size, {aim}."
        )
    # trajectories of adapted length have a smallest number of steps, whatever the rate
    free = not run.flag("adapts_length")
    if free and rate > max(0.95 * highest, wanted + 0.05):
        yield (
            f"the acceptance rate is {rate:.2g} of at most {highest:g}: "
            f"the steps are so small that the chain hardly moves. Write a larger "
            f"step_size, {aim}."
        )


def _advise_diverging(run: Run) -> Iterator[str]:
    d, setup = run.measured(Acceptance), run.measured(Setup)
    if not d.diverging > 0:
        return
    count = round(d.diverging * setup.num_chains * setup.num_draws)
    if "facts" not in run.attrs:  # NumPyro's own kernels mean something else by it
        yield (
            f"{count} trajectories ({d.diverging:.2g} of them) diverged: their energy "
            "changed by more than 1,000, or was not finite. The draws may miss a "
            "region in which the posterior is narrow, such as the neck of a funnel. "
            "Write a larger target_accept_prob, such as 0.95, or, in a hierarchical "
            "model, group effects that are non-centred: "
            'numpyro.deterministic("theta", mu + tau * eta).'
        )
    else:
        yield (
            f"the log density was not finite at {count} draws ({d.diverging:.2g} of "
            "them). Look for parameters at which the model overflows, and write "
            "tighter priors, a smaller step_size or "
            "init_strategy=init_to_value(values=...)."
        )


FAMILY = Family(
    Acceptance,
    (
        Rule(
            "N % of the decisions were unreliable",
            "their noise was outside the domain of the test, so detailed balance holds "
            "only approximately",
            "larger batches, a higher temperature, shorter steps; "
            "[control variates](control-variates.md)",
            _advise_noise,
        ),
        Rule(
            "accept.metropolis() treats log ratios as exact",
            "a test without a penalty was used on noisy estimates: the draws are "
            "overdispersed, as if the temperature were multiplied by the factor given",
            "`accept.penalty()`",
            _advise_ignored_noise,
        ),
        Rule(
            "the chain is stuck at overestimated log densities",
            '`estimate="augmented"` keeps an estimate that was too high, and rejects '
            "almost every proposal",
            '`estimate="shared"`, the default',
            _advise_frozen,
        ),
        Rule(
            "the acceptance rate is",
            "the step size did not settle in warmup, or was set by hand",
            "a longer warmup",
            _advise_acceptance,
        ),
        Rule(
            "the log density was not finite at*, or with NUTS *trajectories ... "
            "diverged",
            "divergences: the model overflows somewhere; with NUTS also that its steps "
            "are too long for a narrow region",
            "tighter priors, `init_strategy`; a larger `target_accept_prob` of NUTS",
            _advise_diverging,
        ),
        Rule(
            "a batch of m rows ... is too small",
            "with fewer than 50 rows neither the normal approximation nor the "
            "variance can be trusted, unless the pilot measured noise of at most 0.25",
            "a larger batch",
            _advise_small_batch,
        ),
    ),
)
