"""Numbers and advice: what a run on minibatches was worth, and what to change."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from scipy.special import erfcx, expit
from scipy.stats import norm

from numpyro_minibatch._normality import (
    Normality,
    log_ratio_rows,
    normal_error_bound,
    normality,
)
from numpyro_minibatch.inference_data import get_group

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data import InferenceData

__all__ = [
    "Diagnosis",
    "Normality",
    "diagnose",
    "log_ratio_rows",
    "normal_error_bound",
    "normality",
]

_RELIABLE = 0.9  # share of decisions inside the test's domain below which to speak up
_NORMAL_ROWS = 50  # rows below which neither a mean nor its variance is to be trusted
_ESS_PER_CHAIN = 100
_MAX_RHAT = 1.01

# nodes and weights for means over a standard normal variable
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found; ``print`` it.

    A number that the run did not record, or that has no meaning for it, is NaN.

    :param kernel: the name of the kernel.
    :param target: what was sampled, such as ``prior * likelihood ** (1 / 100)``.
    :param temperature: the temperature of the likelihood.
    :param plates: the number of rows of each data plate.
    :param batch_sizes: the rows of one draw of each data plate.
    :param num_chains: the chains.
    :param num_draws: the draws of each chain.
    :param acceptance_rate: the mean acceptance rate.
    :param unreliable: the share of the decisions whose noise was outside the domain of
        the acceptance test.
    :param diverging: the share of the draws where the log density is not finite.
    :param mean_log_ratio: the mean of the log ratios; half the mean square of what they
        are without noise, with the other sign.
    :param noise_sd_median: the median standard deviation of the log ratios.
    :param noise_sd_95: their 95% quantile.
    :param check_rms_error: with a control variate, the root mean square error of the
        log ratios that were checked on all rows.
    :param check_rms_z: the same in units of the noise that the batches claimed.
    :param rows_per_draw: rows of data read for a draw, thinned-away ones included.
    :param total_rows: rows of data read for all draws, without the warmup.
    :param rows_per_effective_sample: ``total_rows`` by the smallest bulk ESS.
    :param max_rhat: the largest R-hat; NaN with one chain.
    :param max_rhat_name: the parameter that has it.
    :param still_chains: the number of chains that never moved.
    :param min_ess_bulk: the smallest bulk effective sample size of all parameters that
        vary; 0 for one that is constant in a chain or not a number.
    :param min_ess_bulk_name: the parameter that has it.
    :param min_ess_tail: the smallest tail effective sample size.
    :param min_ess_tail_name: the parameter that has it.
    :param advice: what is wrong and what to write instead; empty if nothing is.
    :param notes: what to keep in mind.
    """

    kernel: str
    target: str
    temperature: float
    plates: Mapping[str, int]
    batch_sizes: Mapping[str, int]
    num_chains: int
    num_draws: int
    acceptance_rate: float
    unreliable: float
    diverging: float
    mean_log_ratio: float
    noise_sd_median: float
    noise_sd_95: float
    check_rms_error: float
    check_rms_z: float
    rows_per_draw: float
    total_rows: float
    rows_per_effective_sample: float
    max_rhat: float
    max_rhat_name: str
    still_chains: int
    min_ess_bulk: float
    min_ess_bulk_name: str
    min_ess_tail: float
    min_ess_tail_name: str
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        batches = ", ".join(
            f"{name}: {self.batch_sizes.get(name, size)} of {size} rows"
            for name, size in self.plates.items()
        )
        plural = "s" if self.num_chains > 1 else ""
        source = f" from {self.target}" if self.target else ""
        lines = {
            "draws": f"{self.num_chains} chain{plural} of {self.num_draws}{source}",
            "batch": batches,
            "acceptance rate": _show("{:.2f}", self.acceptance_rate),
            "unreliable": _show("{:.1%} of the decisions", self.unreliable),
            "diverging": _show("{:.1%} of the draws", self.diverging),
            "noise sd": _show(
                "median {:.2g}, 95% {:.2g}", self.noise_sd_median, self.noise_sd_95
            ),
            "exact checks": _show(
                "log ratios off by {:.2g}, {:.2g} of their noise",
                self.check_rms_error,
                self.check_rms_z,
            ),
            "rows": _show(
                "{:.4g} a draw, {:.3g} in all", self.rows_per_draw, self.total_rows
            )
            + _show(", {:.3g} an effective sample", self.rows_per_effective_sample),
            "R-hat": _show(f"{{:.3f}} ({self.max_rhat_name})", self.max_rhat),
            "ESS": _show(f"bulk {{:.0f}} ({self.min_ess_bulk_name})", self.min_ess_bulk)
            + _show(f", tail {{:.0f}} ({self.min_ess_tail_name})", self.min_ess_tail),
        }
        text = [self.kernel or "MCMC"]
        text += [f"  {name:<16} {value}" for name, value in lines.items() if value]
        for title, sentences in (("Advice", self.advice), ("Notes", self.notes)):
            text += [title] * bool(sentences) + [f"  - {s}" for s in sentences]
        return "\n".join(text)


def _show(text: str, *numbers: float) -> str:
    """The text with its numbers, or nothing if one of them is not there."""
    return "" if any(map(math.isnan, numbers)) else text.format(*numbers)


def diagnose(
    idata: InferenceData, *, var_names: Sequence[str] | None = None
) -> Diagnosis:
    """Summarise a run in numbers, and say what to change.

    :param idata: what :func:`~numpyro_minibatch.to_inference_data` returned, also read
        back from a file.
    :param var_names: the parameters whose R-hat and effective sample size are computed,
        by default all; some are enough for a large network.
    :return: the numbers and the advice.
    :raises TypeError: ``idata`` is not an InferenceData or DataTree.
    :raises ValueError: it has no ``posterior``, or not the variables ``var_names``.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import MINT, diagnose, to_inference_data

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> mcmc = MCMC(MINT(model, temperature=20.0), num_warmup=500,
        ...             num_samples=1000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> diagnosis = diagnose(to_inference_data(mcmc))
        >>> diagnosis.rows_per_draw
        100.0
        >>> "of the decisions were unreliable" in diagnosis.advice[0]
        True
    """
    is_idata = isinstance(idata, xr.DataTree) or hasattr(idata, "groups")
    if not is_idata:
        raise TypeError(
            "diagnose(idata) takes what to_inference_data(mcmc) returned, got "
            f"{type(idata).__name__}."
        )
    posterior = get_group(idata, "posterior")
    if posterior is None:
        raise ValueError("diagnose(idata): there is no group posterior in it.")
    if var_names is not None:
        missing = [name for name in var_names if name not in posterior]
        if missing:
            raise ValueError(
                f"diagnose(var_names=...) has {missing}, the posterior has "
                f"{list(posterior)}."
            )
    attrs = posterior.attrs
    stats = get_group(idata, "sample_stats")
    settings = _Settings.of(attrs)
    diagnosis = _numbers(
        posterior if var_names is None else posterior[list(var_names)],
        xr.Dataset() if stats is None else stats,
        settings,
    )
    return replace(
        diagnosis,
        advice=tuple(s for rule in _RULES for s in rule(diagnosis, settings)),
        notes=tuple(_notes(diagnosis, settings)),
    )


def _numbers(posterior: xr.Dataset, stats: xr.Dataset, s: _Settings) -> Diagnosis:
    attrs = posterior.attrs
    thinning = int(attrs.get("thinning", 1))

    def mean(name: str) -> float:
        return float(stats[name].astype(float).mean()) if name in stats else math.nan

    def finite(name: str) -> np.ndarray:
        values = stats[name].values.astype(float) if name in stats else np.empty(0)
        kept = values[np.isfinite(values)]
        return kept if kept.size else np.array([math.nan])

    noise = finite("log_ratio_variance")
    if s.pilot and (noise > 0).any():
        noise = noise[noise > 0]  # a proposal that stays is no decision
    median, high = np.quantile(np.sqrt(noise), [0.5, 0.95])

    def last(name: str) -> float:
        if name not in stats:
            return math.nan
        values = stats[name].isel(draw=-1).values.astype(float)
        return (
            math.sqrt(np.nanmean(values**2)) if (values == values).any() else math.nan
        )

    rows = float(finite("num_rows").sum()) * thinning
    mixing = _mixing(posterior)
    ess = mixing["min_ess_bulk"]
    plates = json.loads(attrs.get("plates", "{}"))
    batch_sizes = json.loads(attrs.get("batch_sizes", "{}"))
    return Diagnosis(
        kernel=attrs.get("kernel", ""),
        target=attrs.get("target", ""),
        temperature=float(attrs.get("temperature", math.nan)),
        plates=plates,
        batch_sizes=plates if s.batch.startswith("FullBatch") else batch_sizes,
        num_chains=posterior.sizes["chain"],
        num_draws=posterior.sizes["draw"],
        acceptance_rate=mean("acceptance_rate"),
        unreliable=1.0 - mean("reliable"),
        diverging=mean("diverging"),
        mean_log_ratio=float(finite("log_ratio").mean()),
        noise_sd_median=float(median),
        noise_sd_95=float(high),
        check_rms_error=last("check_rms_error"),
        check_rms_z=last("check_rms_z"),
        rows_per_draw=mean("num_rows") * thinning,
        total_rows=rows,
        rows_per_effective_sample=rows / ess if ess > 0 else math.nan,
        **mixing,
    )


def _mixing(posterior: xr.Dataset) -> dict[str, Any]:
    """R-hat and effective sample sizes, the worst of all parameters."""
    columns, names = _parameters(posterior)
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
    for key, method in (("min_ess_bulk", "bulk"), ("min_ess_tail", "tail")):
        values = _arviz("ess", columns, method=method) if draws >= 4 else None
        if values is not None:
            # ArviZ gives a constant all its draws, and NaN nothing at all
            values = np.where(stuck | np.isnan(values), 0.0, values)
        result |= _worst(key, values, names, np.argmin)
    rhat = _arviz("rhat", columns) if chains > 1 and draws >= 4 else None
    if rhat is not None:
        rhat = np.where(stuck | np.isnan(rhat), np.inf, rhat)
    return result | _worst("max_rhat", rhat, names, np.argmax)


def _worst(
    key: str, values: np.ndarray | None, names: Sequence[str], pick: Callable
) -> dict[str, Any]:
    if values is None or not values.size:
        return {key: math.nan, f"{key}_name": ""}
    place = int(pick(values))
    return {key: float(values[place]), f"{key}_name": names[place]}


def _parameters(posterior: xr.Dataset) -> tuple[np.ndarray, list[str]]:
    """All scalars of a posterior, shape ``(chain, draw, parameter)``, and names."""
    columns, names = [], []
    for name, values in posterior.data_vars.items():
        values = values.transpose("chain", "draw", ...)
        columns.append(values.values.reshape(*values.shape[:2], -1).astype(float))
        labels = [values[dim].values for dim in values.dims[2:]]
        for place in np.ndindex(*values.shape[2:]):
            which = ", ".join(
                str(label[i]) for label, i in zip(labels, place, strict=True)
            )
            names.append(f"{name}[{which}]" if which else str(name))
    return np.concatenate(columns, axis=-1), names


def _arviz(function: str, columns: np.ndarray, **options: Any) -> np.ndarray:
    import arviz as az  # here because it takes long and announces ArviZ 1

    data = xr.Dataset({"x": (("chain", "draw", "parameter"), columns)})
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of constants and NaN, which are dealt with
        return getattr(az, function)(data, **options)["x"].values


# advice -----------------------------------------------------------------------------


class _Settings(NamedTuple):
    """What the advice has to know of the kernel's settings."""

    estimate: str
    acceptance: str
    batch: str
    max_variance: float
    target_accept_prob: float
    num_steps: int  # 0 for a kernel that has no such setting
    adapt_step_size: bool
    pilot: Mapping[str, Any]  # of a control variate; empty without one

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> _Settings:
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
        )

    @property
    def ceiling(self) -> float:
        """The highest acceptance rate that the test has."""
        return 0.5 if "Barker" in self.acceptance else 1.0

    @property
    def augmented(self) -> bool:
        return self.estimate.startswith("Augmented")

    @property
    def sizes_itself(self) -> bool:
        """Whether a decision reads as many rows as its noise needs."""
        return self.batch.startswith(("_Pilot", "_Growing", "FullBatch"))


def _frozen(d: Diagnosis, s: _Settings) -> bool:
    """Whether kept estimates are too noisy for the chain to move."""
    return s.augmented and d.acceptance_rate < 0.1 and d.noise_sd_median > 1


def _advise_frozen(d: Diagnosis, s: _Settings) -> Iterator[str]:
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


def _advise_ignored_noise(d: Diagnosis, s: _Settings) -> Iterator[str]:
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


def _advise_noise(d: Diagnosis, s: _Settings) -> Iterator[str]:
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
    ways = list(_ways_to_less_noise(d, s, high))
    yield (
        f"{seen}their noise has sd {math.sqrt(high):.2g} at 95%, and the test takes "
        f"{math.sqrt(s.max_variance):.2g}. Its variance goes like step_size**2 / "
        f"(rows * temperature**2), and step sizes adapt. Write "
        f"{', or '.join(ways) or 'a higher temperature'}."
    )


def _ways_to_less_noise(d: Diagnosis, s: _Settings, high: float) -> Iterator[str]:
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


def _less_noise(d: Diagnosis, s: _Settings, batch: float, heat: float) -> Iterator[str]:
    """Larger batches and a higher temperature, by these factors."""
    larger = _larger_batch(d, s, batch)
    if larger:
        yield f"about {larger}"
    yield f"about temperature={_round_up(d.temperature * heat)}"


def _advise_acceptance(d: Diagnosis, s: _Settings) -> Iterator[str]:
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


def _advise_diverging(d: Diagnosis, s: _Settings) -> Iterator[str]:
    if d.diverging > 0:
        count = round(d.diverging * d.num_chains * d.num_draws)
        yield (
            f"the log density was not finite at {count} draws ({d.diverging:.2g} of "
            "them). Look for parameters that overflow the model, and write tighter "
            "priors, a smaller step_size or "
            "init_strategy=init_to_value(values=...)."
        )


def _advise_mixing(d: Diagnosis, s: _Settings) -> Iterator[str]:
    if d.still_chains and _frozen(d, s):
        return  # the advice on the noise says it
    if d.still_chains:
        never = f"{d.still_chains} of {d.num_chains} chains never moved"
        if s.pilot:
            yield (
                f"{never}: moves have the scale of the bulk of the surrogate's "
                "posterior, and are refused where it is much narrower, as in the neck "
                "of a funnel. Sample effects in their non-centred form, "
                'numpyro.deterministic("theta", mu + tau * eta), or give scales a '
                "prior that keeps them from zero."
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
        yield (
            f"R-hat is {d.max_rhat:.3f} for {d.max_rhat_name}, above {_MAX_RHAT}: the "
            "chains disagree. Write a larger num_warmup and num_samples; if R-hat "
            "stays, they are in different modes."
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


def _advise_small_batch(d: Diagnosis, s: _Settings) -> Iterator[str]:
    for name, rows in d.batch_sizes.items():
        if rows < min(_NORMAL_ROWS, d.plates.get(name, rows)):
            yield (
                f"a batch of {rows} rows of plate {name!r} is small for its mean to be "
                f"normal and its variance to be known. Write batch_size={_NORMAL_ROWS} "
                "or more, or check the rows with diagnostics.normality."
            )


def _advise_overconfident(d: Diagnosis, s: _Settings) -> Iterator[str]:
    """A batch without the rows that matter has too little scatter to show it."""
    if not s.pilot:
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


def _advise_expansion(d: Diagnosis, s: _Settings) -> Iterator[str]:
    if not s.pilot:
        return
    left = s.pilot["residual_sd"]
    if left > 0.5:
        yield (
            f"the expansion of the likelihood is coarse: what it leaves over of the "
            f"log density has sd {left:.2g} over the posterior (0.5 is good), so "
            "moves are rejected for it. Expand in coordinates in which the "
            "likelihood is closer to a parabola, "
            'control_variate.taylor2(sites=["theta"]), or transform the parameters.'
        )
    rhat = s.pilot["surrogate_rhat"]
    if rhat > 1.05:
        yield (
            "the posterior of the surrogate, which has the exact prior and costs no "
            f"data, was hard to sample in itself (R-hat {rhat:.2f}): its geometry is "
            "that of a funnel or a narrow ridge, and moves are scaled for its bulk. "
            "Sample effects in their non-centred form, "
            'numpyro.deterministic("theta", mu + tau * eta), or give scales a prior '
            "that keeps them from zero."
        )
    away = s.pilot["other_mode"]
    if away > 0:
        yield (
            "a search for the centre of the expansion ended in another mode, "
            f"{away:.2g} posterior standard deviations away. The chains know only the "
            "one they were expanded at: look at both with control_variate.taylor2("
            "center=...), or sample at a temperature without a control variate."
        )


_RULES: tuple[Callable[[Diagnosis, _Settings], Iterator[str]], ...] = (
    _advise_noise,
    _advise_ignored_noise,
    _advise_frozen,
    _advise_overconfident,
    _advise_expansion,
    _advise_acceptance,
    _advise_diverging,
    _advise_mixing,
    _advise_small_batch,
)


def _notes(d: Diagnosis, s: _Settings) -> Iterator[str]:
    if d.temperature == d.temperature and d.temperature != 1:
        wider = math.sqrt(d.temperature)
        yield (
            f"these are draws from {d.target}, not from the posterior: where the data "
            f"dominate, their standard deviations are {wider:.3g} times the "
            "posterior's."
        )
    if d.num_chains == 1:
        yield "R-hat compares chains: write num_chains=4, chain_method='vectorized'."
    rows = sum(d.plates.values())
    if rows and (s.batch.startswith("FullBatch") or d.batch_sizes == d.plates):
        yield (
            f"every step read all {rows} rows, so its decision is exact and costs "
            f"{rows} rows; a batch_size makes it cheaper."
        )


def _larger_batch(d: Diagnosis, s: _Settings, factor: float) -> str:
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


# is the mean of a batch normal? -----------------------------------------------------
