"""Advice: what the numbers of a run say about it, and what to write instead."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.special import erfcx, expit
from scipy.stats import norm

from numpyro_minibatch.control_variate._pilot import QUIET
from numpyro_minibatch.diagnostics._numbers import Diagnosis

__all__ = ["Settings", "advise", "remarks"]

_RELIABLE = 0.9  # share of decisions inside the test's domain below which to speak up
_NORMAL_ROWS = 50  # rows below which neither a mean nor its variance is to be trusted
_ESS_PER_CHAIN = 100
_MAX_RHAT = 1.01

_OTHER_FORM = (  # of a hierarchy
    "Write effects the other way: with few rows a group in their non-centred form, "
    'numpyro.deterministic("theta", mu + tau * eta), with many in the centred one, '
    'numpyro.sample("theta", dist.Normal(mu, tau)); or give scales a prior that keeps '
    "them from zero."
)

# nodes and weights for means over a standard normal variable
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def advise(diagnosis: Diagnosis, settings: Settings) -> tuple[str, ...]:
    """What is wrong and what to write instead."""
    return tuple(s for rule in _RULES for s in rule(diagnosis, settings))


def remarks(diagnosis: Diagnosis, settings: Settings) -> tuple[str, ...]:
    """What to keep in mind."""
    return tuple(_notes(diagnosis, settings))


class Settings(NamedTuple):
    """What the advice has to know of the kernel's settings."""

    estimate: str
    acceptance: str
    batch: str
    max_variance: float
    target_accept_prob: float
    num_steps: int  # 0 for a kernel that has no such setting
    adapt_step_size: bool
    pilot: Mapping[str, Any]  # of a control variate; empty without one
    dynamics: str  # of a kernel that moves by gradients
    correction: str  # of one that corrects them
    temperatures: tuple[float, ...]  # of a ladder
    rung_batch_sizes: tuple[int, ...]  # of a ladder with a batch for each rung
    jump_prob: float  # of one with energy rings
    samples_per_cycle: float  # of one that has cycles

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Settings:
        given = json.loads(attrs.get("settings", "{}"))
        return cls(
            given.get("estimate", ""),
            given.get("acceptance", ""),
            given.get("batch", ""),
            given.get("max_variance", math.nan),
            given.get("target_accept_prob", math.nan),
            given.get("num_steps", 0),
            given.get("adapt_step_size", True),
            given.get("pilot", {}),
            given.get("dynamics", ""),
            given.get("correction", "None"),
            tuple(given.get("temperatures", ())),
            tuple(given.get("rung_batch_sizes", ())),
            given.get("jump_prob", math.nan),
            given.get("samples_per_cycle", math.nan),
        )

    @property
    def ceiling(self) -> float:
        """The highest acceptance rate that the test has."""
        return 0.5 if "Barker" in self.acceptance else 1.0

    @property
    def augmented(self) -> bool:
        return self.estimate.startswith("Augmented")

    @property
    def decides_on_batches(self) -> bool:
        """Whether there are decisions, and rows that they do not read."""
        return bool(self.acceptance) and not self.estimate.startswith("Exact")

    @property
    def sizes_itself(self) -> bool:
        """Whether a decision reads as many rows as its noise needs."""
        return self.batch.startswith(("_Pilot", "_Growing", "FullBatch"))


def _frozen(d: Diagnosis, s: Settings) -> bool:
    """Whether kept estimates are too noisy for the chain to move."""
    return s.augmented and d.acceptance_rate < 0.1 and d.noise_sd_median > 1


def _advise_frozen(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not _frozen(d, s):
        return
    each = d.noise_sd_median / math.sqrt(2)  # the log ratio has the noise of two
    most = 2 * norm.cdf(-each / math.sqrt(2))
    ways = ["estimate='shared'", *_less_noise(d, s, each**2, each)]
    yield (
        "the chain is held by lucky estimates: with estimate='augmented' each log "
        f"density has noise of sd {each:.2g}, which alone limits acceptance to "
        f"{most:.2g} (it was {d.acceptance_rate:.2g}). Write {', or '.join(ways)}."
    )


def _advise_ignored_noise(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not (s.max_variance == 0 and d.unreliable > 1 - _RELIABLE):
        return
    sd = d.noise_sd_median
    if s.ceiling < 1:
        test, better, heat = "barker", "accept.compensated_barker()", _barker_heat(sd)
    else:
        test, better, heat = "metropolis", "accept.penalty()", _metropolis_heat(sd)
    yield (
        f"accept.{test}() takes log ratios for exact, and these had noise of sd "
        f"{sd:.2g} (median): to small moves that looks like {heat:.3g} times the "
        f"temperature, so the draws spread too far. Write acceptance={better}"
        f"{', or penalty=True for MINT' if test == 'metropolis' else ''}."
    )


def _advise_noise(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not (s.max_variance > 0 and d.unreliable > 1 - _RELIABLE) or _frozen(d, s):
        return
    high = d.noise_sd_95**2 / (2 if s.augmented else 1)
    seen = f"{d.unreliable:.0%} of the decisions were unreliable: "
    if not high > s.max_variance:
        yield (
            f"{seen}not because their noise is large, but because log ratios were not "
            "numbers. Look for parameters at which the model overflows."
        )
        return
    if s.dynamics:
        ways = ['correction="exact"', "correction=batch.growing(500)"]
        ways += _less_noise(d, s, high / s.max_variance, math.sqrt(high))
        yield (
            f"{seen}their noise has sd {math.sqrt(high):.2g} at 95%, and the test "
            f"takes {math.sqrt(s.max_variance):.2g}. Write {', or '.join(ways)}."
        )
        return
    ways = list(_ways_to_less_noise(d, s, high))
    yield (
        f"{seen}their noise has sd {math.sqrt(high):.2g} at 95%, and the test takes "
        f"{math.sqrt(s.max_variance):.2g}. Its variance goes like step_size**2 / "
        f"(rows * temperature**2), and step sizes adapt. Write "
        f"{', or '.join(ways) or 'a higher temperature'}."
    )


def _ways_to_less_noise(d: Diagnosis, s: Settings, high: float) -> Iterator[str]:
    """What brings the 95% quantile of the noise variance, ``high``, into the domain."""
    if s.augmented:
        # the noise of a log density, which does not depend on the step size
        factor = high / s.max_variance
        yield "estimate='shared'"
        yield from _less_noise(d, s, factor, math.sqrt(factor))
        return
    # With many parameters a log ratio without noise has a normal law with mean
    # -jump / 2 and variance jump, which is proportional to step_size**2; the noise adds
    # ratio * jump to the variance. The penalty test accepts 2 * Phi(-sqrt(all) / 2), so
    # when the noise falls, a step size that adapts to a rate of acceptance grows until
    # jump * (1 + ratio) is what it was.
    typical = d.noise_sd_median**2
    jump = max(-2 * d.mean_log_ratio, 1e-3 * typical)
    ratio = typical / jump
    paid = 1.0 if s.ceiling == 1 else 0.0  # Barker's test does not pay for the noise
    domain = s.max_variance * typical / high
    slower = domain * (1 / ratio + paid)
    if paid:
        rate = 2 * norm.cdf(-math.sqrt(slower) / 2)
    else:
        rate = _WEIGHTS @ expit(math.sqrt(slower) * _NODES - slower / 2)
    if rate > s.target_accept_prob:
        rate = min(rate, 0.9 * s.ceiling)
        yield (
            f"target_accept_prob={rate:.2f} instead of {s.target_accept_prob:g} "
            "(smaller steps)"
        )
    if not s.sizes_itself:
        yield "MHMinibatch, whose batches have the size that each decision needs"
    if d.mean_log_ratio < 0:
        factor = ratio * (jump * (1 + paid * ratio) / domain - paid)
        yield from _less_noise(d, s, factor, factor)


def _less_noise(d: Diagnosis, s: Settings, batch: float, heat: float) -> Iterator[str]:
    """Larger batches and a higher temperature, by these factors."""
    larger = _larger_batch(d, s, batch)
    if larger:
        yield f"about {larger}"
    yield f"about temperature={_round_up(d.temperature * heat)}"


def _advise_acceptance(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not s.acceptance or math.isnan(d.acceptance_rate) or _frozen(d, s):
        return
    aim = (
        f"or a longer num_warmup with adapt_step_size=True, which aims at "
        f"{s.target_accept_prob:g}"
    )
    if d.acceptance_rate < 0.05:
        yield (
            f"the acceptance rate is {d.acceptance_rate:.2g}, so most draws repeat the "
            f"one before. Write a smaller step_size, {aim}."
        )
    if s.pilot and not s.adapt_step_size:
        return  # a proposal without a step size, the better the more it is accepted
    if d.acceptance_rate > max(0.95 * s.ceiling, s.target_accept_prob + 0.05):
        yield (
            f"the acceptance rate is {d.acceptance_rate:.2g} of at most {s.ceiling:g}: "
            f"the steps are so small that the chain hardly moves. Write a larger "
            f"step_size, {aim}."
        )


def _advise_diverging(d: Diagnosis, s: Settings) -> Iterator[str]:
    if d.diverging > 0:
        count = round(d.diverging * d.num_chains * d.num_draws)
        yield (
            f"the log density was not finite at {count} draws ({d.diverging:.2g} of "
            "them). Look for parameters that overflow the model, and write tighter "
            "priors, a smaller step_size or "
            "init_strategy=init_to_value(values=...)."
        )


def _advise_mixing(d: Diagnosis, s: Settings) -> Iterator[str]:
    if d.still_chains and _frozen(d, s):
        return  # the advice on the noise says it
    if d.still_chains:
        never = f"{d.still_chains} of {d.num_chains} chains never moved"
        if s.pilot:
            yield (
                f"{never}: moves have the scale of the bulk of the surrogate's "
                "posterior, and are refused where it is much narrower, as in the neck "
                f"of a funnel or on a ridge. {_OTHER_FORM}"
            )
        else:
            yield (
                f"{never}. Write a smaller step_size, or start elsewhere with "
                "init_strategy."
            )
        return
    if d.min_ess_bulk == 0:
        yield (
            f"{d.min_ess_bulk_name} has one value in all draws of a chain, or a value "
            "that is not a number; R-hat and ESS mean nothing for it."
        )
        return
    if d.max_rhat > _MAX_RHAT:
        # an expansion knows one mode, and a normal surrogate no funnel
        if s.pilot and not s.pilot["gaussian"]:
            reason = f"the geometry is that of a funnel or a ridge. {_OTHER_FORM}"
        else:
            reason = "they are in different modes."
        yield (
            f"R-hat is {d.max_rhat:.3f} for {d.max_rhat_name}, above {_MAX_RHAT}: the "
            "chains disagree. Write a larger num_warmup and num_samples; if R-hat "
            f"stays, {reason}"
        )
    wanted = _ESS_PER_CHAIN * d.num_chains
    if d.min_ess_bulk < wanted:
        times = wanted / d.min_ess_bulk
        longer = (
            f", or num_steps={math.ceil(times * s.num_steps)} to have as many draws "
            "with that many steps in each"
            if s.num_steps
            else ""
        )
        yield (
            f"the bulk effective sample size of {d.min_ess_bulk_name} is "
            f"{d.min_ess_bulk:.0f}, below {_ESS_PER_CHAIN} a chain: about "
            f"{_round_up(d.num_draws * (times - 1))} more draws a chain are needed. "
            f"Write num_samples={_round_up(d.num_draws * times)}{longer}."
        )


def _advise_gradient_noise(d: Diagnosis, s: Settings) -> Iterator[str]:
    """What no correction makes good: the noise of the gradients heats the draws."""
    if not s.dynamics or s.correction != "None" or not d.noise_ratio < 10:
        return
    excess = 1.0 / d.noise_ratio
    wider = 100 * (math.sqrt(1 + excess) - 1)
    factor = 0.1 * d.noise_ratio
    if "NoseHoover" in s.dynamics:
        yield (
            f"the noise of the gradients has {excess:.2g} times the variance of what "
            "the thermostat's steps inject. It makes up for noise that is alike in all "
            f"coordinates, and for no other. Compare with step_size {factor:.2g} times "
            f"as large{_or_larger_batch(d, s, 1 / factor)}."
        )
        return
    friction = ", a larger friction" if "SGHMC" in s.dynamics else ""
    yield (
        f"the noise of the gradients has {excess:.2g} times the variance of what steps "
        "inject, and heats the draws by as much: where it is largest their standard "
        f"deviations are about {wider:.0f}% too large. Write a step_size {factor:.2g} "
        f"times as large{friction}{_or_larger_batch(d, s, 1 / factor)}, "
        'control_variate="taylor2" for one tall mode, or AMAGOLD(model), which '
        "corrects for it."
    )


def _advise_ladder(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not d.swap_rates:
        return
    wanted = max(2, math.ceil(2 * d.barrier) + 1)
    # where thinning kept no draw that tried a pair, nothing is known of it
    tried = [pair for pair, rate in enumerate(d.swap_rates) if rate == rate]
    worst = min(tried, key=lambda pair: d.swap_rates[pair], default=0)
    if d.swap_rates[worst] < 0.15:
        yield (
            f"rungs {worst} and {worst + 1} of the ladder swap in only "
            f"{d.swap_rates[worst]:.2g} of the tries, so what hot rungs find hardly "
            f"comes down. Write adapt_ladder=True, or about num_replicas={wanted} for "
            "the same range of temperatures."
        )
    elif d.round_trips == 0:
        yield (
            f"no replica went up the ladder and down again in {d.num_draws} draws. "
            "Write a larger num_samples, or more gradient steps a draw (num_steps); "
            f"about num_replicas={wanted} suits the rates of its swaps."
        )
    if d.unreliable_swaps > 1 - _RELIABLE:
        yield (
            f"{d.unreliable_swaps:.0%} of the swaps had more noise than their test "
            "takes. Write swap_batch=batch.growing(500), whose size each swap chooses, "
            'swap="exact", or rungs that are closer together.'
        )


def _advise_energies(d: Diagnosis, s: Settings) -> Iterator[str]:
    """Chains that keep the batch of their state are held by lucky energies."""
    noisy = [chain for chain, sd in enumerate(d.energy_noise) if sd > 1]
    if not noisy:
        return
    worst = max(noisy, key=lambda chain: d.energy_noise[chain])
    heat = [
        t * max(1.0, sd) for t, sd in zip(s.temperatures, d.energy_noise, strict=True)
    ]
    (size,) = d.plates.values()
    sizes = [
        m if sd <= 1 else math.ceil(1 / ((1 / m - 1 / size) / sd**2 + 1 / size))
        for m, sd in zip(s.rung_batch_sizes, d.energy_noise, strict=True)
    ]
    hotter = np.maximum.accumulate(heat)
    larger = np.maximum.accumulate(sizes[::-1])[::-1]
    yield (
        f"the energies of {len(noisy)} of {len(d.energy_noise)} chains have noise of "
        f"more than one temperature, those of chain {worst} of "
        f"{d.energy_noise[worst]:.2g}: such a chain is held by lucky energies, and its "
        "rings are rings of noise. Write about temperatures="
        f"{[_round_up(t) for t in hotter]}, or about batch_size="
        f"{[min(_round_up(m), size) for m in larger]}."
    )


def _advise_jumps(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not s.jump_prob > 0:
        return
    expected = 1 - (1 - s.jump_prob) ** max(s.num_steps, 1)
    more = f"num_replicas={len(d.jump_rates) + 3} for the same range of temperatures"
    for chain, (rate, tries) in enumerate(zip(d.jump_rates, d.jump_tries, strict=True)):
        if tries < 0.5 * expected:
            yield (
                f"chain {chain} tried jumps in {tries:.2g} of its draws instead of "
                f"{expected:.2g}: chain {chain + 1} has hardly been at its energies. "
                f"Write a longer num_warmup, or {more}."
            )
        elif rate < 0.1 and not any(sd > 1 for sd in d.energy_noise):
            yield (
                f"the jumps of chain {chain} are accepted at a rate of {rate:.2g}: "
                "the energies of a ring differ too much for its temperature. Write "
                f"{more}, or a smaller ring_width."
            )


def _advise_rings(d: Diagnosis, s: Settings) -> Iterator[str]:
    """Jumps to the same few states, however often they are accepted."""
    stale = [
        (seldom / often, chain, ring, often, seldom)
        for chain, (colder, hotter) in enumerate(pairwise(d.ring_occupancy))
        for ring, (often, seldom) in enumerate(zip(colder, hotter, strict=True))
        if often > 0.1 and seldom < 0.05 * often
    ]
    if not (s.jump_prob > 0 and stale):
        return
    _, chain, ring, often, seldom = min(stale)
    yield (
        f"chain {chain} has {often:.0%} of its draws in ring {ring}, where chain "
        f"{chain + 1} has {seldom:.2g} of its own, about {seldom * d.num_draws:.0f}: "
        "it jumps to these again and again, and modes that were found first keep "
        "their share. Write ring_width=0.01, which makes one ring of all energies, or "
        f"num_replicas={len(d.ring_occupancy) + 3} for the same range of temperatures."
    )


def _advise_cycles(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not s.samples_per_cycle >= 1:
        return
    samples = int(s.samples_per_cycle)
    cycles, rest = divmod(d.num_draws, samples)
    if rest and d.num_cycles >= 1:
        fewer = f"num_samples={cycles * samples} or " if cycles else ""
        yield (
            f"the last cycle was cut short: {d.num_draws} draws are {cycles} cycles of "
            f"{samples} and {rest} draws more, which have a cycle's whole weight in "
            f"cycles.weights. Write {fewer}num_samples={(cycles + 1) * samples}."
        )


def _or_larger_batch(d: Diagnosis, s: Settings, factor: float) -> str:
    larger = _larger_batch(d, s, factor)
    return f", {larger}" if larger else ""


def _advise_small_batch(d: Diagnosis, s: Settings) -> Iterator[str]:
    # of little noise, which the pilot has measured on all rows, nothing need be known
    quiet = s.pilot.get("batch_sd_95", math.inf) <= QUIET
    if quiet or not s.decides_on_batches:
        return
    for name, rows in d.batch_sizes.items():
        if rows < min(_NORMAL_ROWS, d.plates.get(name, rows)):
            yield (
                f"a batch of {rows} rows of plate {name!r} is small for its mean to be "
                f"normal and its variance to be known. Write batch_size={_NORMAL_ROWS} "
                "or more, or check the rows with diagnostics.normality."
            )


def _advise_overconfident(d: Diagnosis, s: Settings) -> Iterator[str]:
    """A batch without the rows that matter has too little scatter to show it."""
    if not s.pilot or not s.decides_on_batches:
        return
    true = s.pilot["batch_sd"]
    if true > 0.02 and d.noise_sd_median < true / 3:
        yield (
            f"the batches take themselves for too good: their noise had sd "
            f"{d.noise_sd_median:.2g} (median), where the pilot found {true:.2g} on "
            "all rows. They miss the few rows that matter, and the draws are those of "
            "the Laplace approximation however well they mix. Write "
            "batch=batch.stratified(), the default."
        )
    if d.check_rms_z > 2 and d.check_rms_error > 0.05:
        yield (
            "decisions that were checked on all rows were off by "
            f"{d.check_rms_error:.2g} in the log ratio, {d.check_rms_z:.2g} times the "
            "noise that their batches claimed: their acceptance is not what it should "
            f"be. Write {_doubled(d)}, batch=batch.stratified() where another scheme "
            'was chosen, or estimate="exact".'
        )


def _doubled(d: Diagnosis) -> str:
    sizes = {name: 2 * rows for name, rows in d.batch_sizes.items()}
    return f"batch_size={sizes if len(sizes) > 1 else max(sizes.values(), default=200)}"


def _advise_expansion(d: Diagnosis, s: Settings) -> Iterator[str]:
    if not s.pilot:
        return
    left = s.pilot["residual_sd"]
    if left > 0.5:
        yield (
            f"the expansion of the likelihood is coarse: what it leaves over of the "
            f"log density has sd {left:.2g} over the posterior (0.5 is good), so "
            "moves are rejected for it. The draws are right and cost more. Expand in "
            "other coordinates, in which the likelihood is closer to a parabola: "
            "control_variate.taylor2(sites=[...]) takes the names of sites, latent or "
            "deterministic; or transform the parameters."
        )
    rhat = s.pilot["surrogate_rhat"]
    if rhat > 1.05:
        yield (
            "the posterior of the surrogate, which has the exact prior and costs no "
            f"data, was hard to sample in itself (R-hat {rhat:.2f}): its geometry is "
            "that of a funnel or a narrow ridge, and moves are scaled for its bulk. "
            f"{_OTHER_FORM}"
        )
    stuck = s.pilot["surrogate_stuck"]
    if stuck > 0.001:
        yield (
            f"trajectories on the surrogate are rejected from {stuck:.1%} of its draws "
            "however short their steps, so that the tails are hardly entered and come "
            f"out too thin. {_OTHER_FORM}"
        )
    away = s.pilot["other_mode"]
    if away > 0:
        yield (
            "a search for the centre of the expansion ended in another mode, "
            f"{away:.2g} posterior standard deviations away. The chains know only the "
            "one they were expanded at: look at both with control_variate.taylor2("
            "center=...), or sample at a temperature without a control variate."
        )


_RULES: tuple[Callable[[Diagnosis, Settings], Iterator[str]], ...] = (
    _advise_noise,
    _advise_ignored_noise,
    _advise_frozen,
    _advise_overconfident,
    _advise_expansion,
    _advise_gradient_noise,
    _advise_ladder,
    _advise_energies,
    _advise_jumps,
    _advise_rings,
    _advise_cycles,
    _advise_acceptance,
    _advise_diverging,
    _advise_mixing,
    _advise_small_batch,
)


def _notes(d: Diagnosis, s: Settings) -> Iterator[str]:
    if d.temperature == d.temperature and d.temperature != 1:
        wider = math.sqrt(d.temperature)
        yield (
            f"these are draws from {d.target}, not from the posterior: where the data "
            f"dominate, their standard deviations are {wider:.3g} times the "
            "posterior's."
        )
    if d.num_cycles >= 1:
        yield _remark_on_cycles(d)
    if d.num_chains == 1:
        yield "R-hat compares chains: write num_chains=4, chain_method='vectorized'."
    rows = sum(d.plates.values())
    everything = s.batch.startswith("FullBatch") or d.batch_sizes == d.plates
    if rows and everything and s.acceptance:
        yield (
            f"every step read all {rows} rows, so its decision is exact and costs "
            f"{rows} rows; a batch_size makes it cheaper."
        )


def _remark_on_cycles(d: Diagnosis) -> str:
    """Cycles are visits: they find modes, and do not weigh them."""
    number = int(d.num_cycles)
    text = (
        f"the draws come from {number} cycles, and what they say of several modes is "
        "how often each was visited, not how much mass it has. Weigh them with "
        "cycles.weights"
    )
    if d.between_cycles > 0.5:
        return (
            f"{text}. Most of the variance of {d.between_cycles_name} "
            f"({d.between_cycles:.0%}) is between cycles, so that for it there are "
            f"hardly more than {number} draws: write more cycles, or more chains."
        )
    return f"{text}, if there are several."


def _larger_batch(d: Diagnosis, s: Settings, factor: float) -> str:
    """The batch sizes that bring the variance down by a factor, as a setting."""
    if not d.batch_sizes or s.sizes_itself:
        return ""
    sizes = {}
    for name, rows in d.batch_sizes.items():
        size = d.plates[name]
        wanted = rows * factor
        if not s.batch.startswith("_WithReplacement"):
            # the variance of rows drawn without replacement goes like 1 / m - 1 / N
            wanted = 1 / ((1 / rows - 1 / size) / factor + 1 / size)
        sizes[name] = min(_round_up(wanted), size)
    new, old = sizes, dict(d.batch_sizes)
    return (
        f"batch_size={new} instead of {old}"
        if len(sizes) > 1
        else f"batch_size={[*new.values()][0]} instead of {[*old.values()][0]}"
    )


def _round_up(value: float) -> int:
    """Up to two significant digits."""
    unit = 10 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return math.ceil(value / unit) * unit


def _metropolis_heat(sd: float) -> float:
    """What small moves take the temperature for, under a Metropolis test with noise.

    The slope at 0 of the log of A(delta) / A(-delta), A being the probability of
    acceptance averaged over normal noise, is what detailed balance wants to be 1.
    """
    r = 0.5 * erfcx(sd / math.sqrt(2))  # exp(sd ** 2 / 2) * Phi(-sd)
    return float((0.5 + r) / (2 * r))


def _barker_heat(sd: float) -> float:
    """The same for Barker's test, where the slope is four times a mean."""
    p = expit(sd * _NODES)
    return float(1 / (4 * (_WEIGHTS @ (p * (1 - p)))))
