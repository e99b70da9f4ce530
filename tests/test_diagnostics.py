"""Advice appears when it should and not otherwise; the normality of batch means."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.infer import MCMC
from scipy.stats import norm

from numpyro_minibatch import (
    MINT,
    Target,
    accept,
    batch,
    diagnose,
    diagnostics,
    dynamics,
    estimate,
    proposal,
    to_inference_data,
)
from numpyro_minibatch.diagnostics import (
    _acceptance,
    _effective,
    _run,
    log_ratio_rows,
    normal_error_bound,
    normality,
)
from numpyro_minibatch.diagnostics._effective import precision
from numpyro_minibatch.inference_data import as_inference_data
from numpyro_minibatch.kernels.metropolis._step import Checks

CHAINS, DRAWS, N, M = 4, 500, 10_000, 100

# Facts that kernels record about their parts.
PENALTY = {
    **batch.without_replacement(M).facts,
    **proposal.random_walk().facts,
    **accept.penalty().facts,
    **estimate.shared().facts,
    "target_accept_prob": 0.3,
}
METROPOLIS = PENALTY | accept.metropolis().facts
BARKER = PENALTY | accept.barker().facts
COMPENSATED = PENALTY | accept.compensated_barker().facts | {"target_accept_prob": 0.2}
AUGMENTED = PENALTY | estimate.augmented().facts
LANGEVIN = batch.without_replacement(M).facts | dynamics.sgld().facts
CORRECTED = (
    PENALTY | dynamics.sghmc(0.5, "midpoint").facts | {"target_accept_prob": 0.8}
)
UNDECIDED = dict.fromkeys(
    ("acceptance_rate", "log_ratio", "log_ratio_variance", "reliable")
)


def dataset(variables: dict[str, Any], attrs: dict[str, Any]) -> xr.Dataset:
    """A group of draws."""
    named = {}
    for name, value in variables.items():
        axes = [f"{name}_dim_{k}" for k in range(np.ndim(value) - 2)]
        named[name] = (["chain", "draw", *axes], value)
    sizes = xr.Dataset(named).sizes
    return xr.Dataset(named, {dim: np.arange(n) for dim, n in sizes.items()}, attrs)


def result(
    draws: Any = None,
    facts: dict[str, Any] = PENALTY,
    plates: dict[str, int] | None = None,
    batch_sizes: dict[str, int] | None = None,
    temperature: float = 1.0,
    chains: int = CHAINS,
    **stats: Any,
) -> Any:
    """A result like a run's, with independent draws and nothing wrong by default."""
    rng = np.random.default_rng(3)
    shape = (chains, DRAWS)
    posterior = {"mu": rng.normal(size=shape), "beta": rng.normal(size=(*shape, 3))}
    attrs = {
        "kernel": "MINT",
        "target": f"prior * likelihood ** (1 / {temperature:g})",
        "temperature": temperature,
        "plates": json.dumps(plates or {"data": N}),
        "batch_sizes": json.dumps(batch_sizes or {"data": M}),
        "facts": json.dumps(facts),
        "thinning": 1,
    }
    recorded = {
        "acceptance_rate": 0.3,
        "diverging": False,
        "log_ratio": -0.5,
        "log_ratio_variance": 0.25,
        "reliable": 1.0,
        "num_rows": M,
    } | stats
    full = {n: np.broadcast_to(v, shape) for n, v in recorded.items() if v is not None}
    groups = {
        "posterior": dataset(posterior if draws is None else draws, attrs),
        "sample_stats": dataset(full, attrs),
    }
    return as_inference_data(groups, attrs)


def advice(**options: Any) -> str:
    return "\n".join(diagnose(result(**options)).advice)


# numbers ----------------------------------------------------------------------------


def test_numbers() -> None:
    variance = np.linspace(0.0, 4.0, CHAINS * DRAWS).reshape(CHAINS, DRAWS)
    reliable = np.ones((CHAINS, DRAWS))
    reliable[0, :20] = 0.0
    found = diagnose(
        result(
            log_ratio_variance=variance,
            reliable=reliable,
            diverging=reliable == 0,
            temperature=7.0,
        )
    )
    assert (found.kernel, found.temperature) == ("MINT", 7.0)
    assert (found.num_chains, found.num_draws) == (CHAINS, DRAWS)
    assert (found.plates, found.batch_sizes) == ({"data": N}, {"data": M})
    assert found.acceptance_rate == pytest.approx(0.3)
    assert found.unreliable == pytest.approx(0.01)
    assert found.diverging == pytest.approx(0.01)
    assert found.noise_sd_median == pytest.approx(math.sqrt(2.0), rel=1e-3)
    assert found.noise_sd_95 == pytest.approx(math.sqrt(3.8), rel=1e-3)
    assert found.mean_log_ratio == -0.5
    assert found.rows_per_draw == M
    assert found.total_rows == M * CHAINS * DRAWS
    assert found.rows_per_effective_sample == found.total_rows / found.min_ess_bulk
    assert 0.5 * CHAINS * DRAWS < found.min_ess_bulk < 1.5 * CHAINS * DRAWS
    assert 0.3 * CHAINS * DRAWS < found.min_ess_tail < 1.5 * CHAINS * DRAWS
    assert 0.99 < found.max_rhat < 1.01
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.advice = ()  # type: ignore[misc]


def test_thinned_away_draws_read_rows_too() -> None:
    idata = result()
    idata["posterior"].attrs["thinning"] = 5
    found = diagnose(idata)
    assert found.rows_per_draw == 5 * M
    assert found.total_rows == 5 * M * CHAINS * DRAWS


def test_the_worst_parameter_is_named() -> None:
    rng = np.random.default_rng(0)
    beta = rng.normal(size=(CHAINS, DRAWS, 2, 3))
    beta[..., 1, 2] = 0.1 * np.cumsum(beta[..., 1, 2], axis=1)  # a random walk
    found = diagnose(result({"mu": rng.normal(size=(CHAINS, DRAWS)), "beta": beta}))
    assert found.min_ess_bulk_name == "beta[1, 2]"
    assert found.min_ess_tail_name == "beta[1, 2]"
    assert found.max_rhat_name == "beta[1, 2]"
    assert found.max_rhat > 1.01
    some = diagnose(
        result({"mu": rng.normal(size=(CHAINS, DRAWS)), "beta": beta}),
        var_names=["mu"],
    )
    assert some.min_ess_bulk_name == some.max_rhat_name == "mu"


def test_constants_of_the_model_are_not_parameters() -> None:
    rng = np.random.default_rng(0)
    corr = rng.normal(size=(CHAINS, DRAWS, 2))
    corr[..., 0] = 1.0  # the diagonal of a correlation matrix
    found = diagnose(result({"corr": corr}))
    assert found.min_ess_bulk_name == found.max_rhat_name == "corr[1]"
    assert found.still_chains == 0
    assert found.advice == ()


def test_prints_what_there_is() -> None:
    text = str(diagnose(result(temperature=100.0, reliable=0.5, log_ratio_variance=4)))
    for part in (
        "MINT\n",
        "4 chains of 500 from prior * likelihood ** (1 / 100)",
        "data: 100 of 10000 rows",
        "50.0% of the decisions",
        "median 2, 95% 2",
        "100 a draw, 2e+05 in all",
        "R-hat",
        "ESS",
        "Advice\n  - 50% of the decisions",
        "Notes\n  - these are draws from prior",
    ):
        assert part in text
    assert all(len(line) < 600 for line in text.splitlines())


def test_a_run_of_another_kernel_prints_only_what_it_has() -> None:
    rng = np.random.default_rng(0)
    posterior = {"finance": rng.normal(size=(1, DRAWS))}
    idata = as_inference_data(
        {"posterior": dataset(posterior, {"kernel": "NUTS"})}, {"kernel": "NUTS"}
    )
    found = diagnose(idata)
    assert math.isnan(found.acceptance_rate) and math.isnan(found.total_rows)
    text = str(found)
    assert "nan" not in text.replace("finance", "")
    assert re.search(r"bulk \d+ \(finance\)", text)
    assert "acceptance" not in text and "R-hat   " not in text
    assert found.advice == ()
    assert "num_chains=4" in found.notes[0]


@pytest.mark.parametrize(
    ("idata", "error"), [({}, TypeError), (3, TypeError), (None, TypeError)]
)
def test_what_is_not_a_result(idata: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="to_inference_data"):
        diagnose(idata)


def test_a_result_without_the_requested_variables() -> None:
    with pytest.raises(ValueError, match=r"has \['gamma'\], the posterior"):
        diagnose(result(), var_names=["gamma", "mu"])
    empty = as_inference_data({"sample_stats": dataset({}, {"a": 1})}, {})
    with pytest.raises(ValueError, match="no group posterior"):
        diagnose(empty)


# advice -----------------------------------------------------------------------------


def test_nothing_is_said_of_a_run_that_is_well() -> None:
    for facts in (PENALTY, METROPOLIS, BARKER, AUGMENTED, COMPENSATED):
        found = diagnose(result(facts=facts))
        assert found.advice == ()
        assert found.notes == ()


NOISY = {"reliable": 0.0, "log_ratio_variance": 4.0, "log_ratio": -1.0}


def test_noise_outside_the_domain() -> None:
    # without noise the log ratio has variance 2, noise adds twice that; the test takes
    # a quarter of the noise, so the two may add to 1.5 with the batch as it is
    text = advice(**NOISY)
    assert text.startswith(
        "100% of the decisions were unreliable: the 95% quantile of their noise's "
        "standard deviation is 2"
    )
    rate = 2 * norm.cdf(-math.sqrt(1.5) / 2)
    assert f"target_accept_prob={rate:.2f} instead of 0.3" in text
    assert "MHMinibatch" in text
    # with a total variance of 6 the noise may have 1: a fifth of the rest, where it
    # has twice as much now, so ten times the rows, less what drawing them without
    # replacement saves
    rows = 1 / ((1 / M - 1 / N) / 10 + 1 / N)
    assert rows == pytest.approx(917, abs=1)
    assert "batch_size=920 instead of 100" in text
    assert "temperature=10" in text
    assert "temperature=1000" in advice(**NOISY, temperature=100.0)
    replacing = PENALTY | batch.with_replacement(M).facts
    assert "batch_size=1000 instead" in advice(**NOISY, facts=replacing)


def test_noise_of_several_plates() -> None:
    text = advice(**NOISY, plates={"a": N, "b": 1000}, batch_sizes={"a": 100, "b": 500})
    assert "batch_size={'a': 920, 'b': 910} instead of {'a': 100, 'b': 500}" in text


def test_noise_that_the_barker_test_absorbs() -> None:
    text = advice(**NOISY, facts=COMPENSATED)
    # noise does not cost acceptance here: a quarter of the noise, a quarter of the jump
    z = np.random.default_rng(0).normal(size=100_000)
    rate = 1 / (1 + np.exp(0.25 + math.sqrt(0.5) * z))
    advised = float(re.findall(r"target_accept_prob=([0-9.]+)", text)[0])
    assert advised == pytest.approx(rate.mean(), abs=0.01)
    assert "instead of 0.2" in text
    rows = 1 / ((1 / M - 1 / N) / 4 + 1 / N)
    assert f"batch_size={10 * math.ceil(rows / 10)}" in text


def test_noise_without_information_from_the_steps() -> None:
    # log ratios with a positive mean do not determine the length of the steps
    text = advice(**NOISY | {"log_ratio": 0.1})
    assert "target_accept_prob" in text and "MHMinibatch" in text
    assert "batch_size" not in text and "temperature=" not in text


@pytest.mark.parametrize(
    "scheme", [batch.pilot(M), batch.growing(M), batch.growing(M, factor=2.0)]
)
def test_noise_of_batches_that_grow(scheme: batch.Scheme) -> None:
    text = advice(**NOISY, facts=COMPENSATED | scheme.facts)
    assert "target_accept_prob" in text and "temperature=4" in text
    assert "MHMinibatch" not in text and "batch_size" not in text
    small = PENALTY | scheme.facts | {"target_accept_prob": 0.95}
    text = advice(**NOISY | {"log_ratio": 0.1}, facts=small)
    assert text.endswith("Write a higher temperature.")


def test_log_ratios_that_are_not_numbers() -> None:
    variance = np.full((CHAINS, DRAWS), np.nan)
    variance[0, 0] = 0.1
    text = advice(reliable=0.5, log_ratio_variance=variance)
    assert text.startswith("50% of the decisions") and "NaN" in text


@pytest.mark.parametrize(
    ("facts", "heat", "better"),
    [(METROPOLIS, 1.46, "accept.penalty()"), (BARKER, 1.21, "compensated_barker()")],
)
def test_noise_that_the_test_ignores(
    facts: dict[str, Any], heat: float, better: str
) -> None:
    text = advice(facts=facts, reliable=0.0, log_ratio_variance=1.0)
    assert f"acts like {heat} times" in text and better in text
    assert not advice(facts=facts, reliable=0.95, log_ratio_variance=1.0)


def test_the_temperature_of_ignored_noise() -> None:
    """The slope of the log odds of acceptance, by numerical integration."""
    x = np.linspace(-12, 12, 200_001)

    def heat(test: Any, sd: float, delta: float = 1e-3) -> float:
        def rate(d: float) -> float:
            return float((test(d + sd * x) * norm.pdf(x)).sum())

        # detailed balance at temperature 1 requires this ratio to be exp(delta)
        return delta / math.log(rate(delta) / rate(-delta))

    for sd in (0.1, 1.0, 4.0):
        expected = heat(lambda v: np.exp(np.minimum(v, 0)), sd)
        assert _acceptance.metropolis_temperature(sd) == pytest.approx(
            expected, rel=1e-3
        )
        expected = heat(lambda v: 1 / (1 + np.exp(-v)), sd)
        assert _acceptance.barker_temperature(sd) == pytest.approx(expected, rel=1e-3)


def test_a_chain_stuck_at_overestimated_densities() -> None:
    held = {"log_ratio_variance": 18.0, "acceptance_rate": 0.02, "reliable": 0.0}
    found = diagnose(result(facts=AUGMENTED, **held))
    (text,) = found.advice
    # sd 3 each: acceptance at most 2 * Phi(-3 / sqrt(2))
    assert "noise of standard deviation 3" in text and "0.034" in text
    assert "estimate='shared'" in text
    assert "batch_size=840 instead of 100" in text and "temperature=3" in text
    frozen = {"mu": np.ones((CHAINS, DRAWS))}
    assert len(diagnose(result(frozen, facts=AUGMENTED, **held)).advice) == 1
    moving = advice(facts=AUGMENTED, **held | {"acceptance_rate": 0.2})
    assert moving.startswith("100% of the decisions")
    assert "estimate='shared'" in moving and "temperature=3" in moving
    assert "target_accept_prob" not in moving


@pytest.mark.parametrize(
    ("facts", "rate", "expected"),
    [
        (PENALTY, 0.04, "is 0.04, so most"),
        (PENALTY, 0.06, ""),
        (PENALTY, 0.94, ""),
        (PENALTY, 0.96, "is 0.96 of at most 1"),
        (PENALTY | {"target_accept_prob": 0.97}, 0.96, ""),
        (COMPENSATED, 0.47, ""),
        (COMPENSATED, 0.48, "is 0.48 of at most 0.5"),
        ({}, 0.99, ""),  # not a kernel of this package
    ],
)
def test_acceptance(facts: dict[str, Any], rate: float, expected: str) -> None:
    text = advice(facts=facts, acceptance_rate=rate)
    assert expected in text
    assert bool(text) == bool(expected)


def test_diverging() -> None:
    diverging = np.zeros((CHAINS, DRAWS), bool)
    assert not advice(diverging=diverging)
    diverging[0, :3] = True
    assert "not finite at 3 draws" in advice(diverging=diverging)
    of_numpyro = result(diverging=diverging)
    del of_numpyro.posterior.attrs["facts"]
    (said,) = diagnose(of_numpyro).advice
    assert said.startswith("3 trajectories") and "energy" in said


def test_chains_that_disagree() -> None:
    rng = np.random.default_rng(0)
    draws = {"mu": rng.normal(size=(CHAINS, DRAWS))}
    assert not advice(draws=draws)
    draws["mu"][0] += 3.0
    assert re.search(r"R-hat is 1\.\d+ for mu", advice(draws=draws))


def test_too_few_effective_draws() -> None:
    rng = np.random.default_rng(0)
    walk = np.zeros((CHAINS, DRAWS))
    for t in range(1, DRAWS):
        walk[:, t] = 0.95 * walk[:, t - 1] + rng.normal(size=CHAINS)
    found = diagnose(result({"mu": walk}, PENALTY | {"num_steps": 10}))
    ess = found.min_ess_bulk
    assert ess < 100 * CHAINS
    (text,) = (a for a in found.advice if "effective sample size" in a)
    wanted = int(re.findall(r"num_samples=(\d+)", text)[0])
    assert wanted == pytest.approx(DRAWS * 100 * CHAINS / ess, rel=0.1)
    more = int(re.findall(r"about (\d+) more draws", text)[0])
    assert more == pytest.approx(wanted - DRAWS, rel=0.1)
    # this many times the current steps per draw; not mentioned if a draw has no steps
    assert f"num_steps={math.ceil(10 * 100 * CHAINS / ess)}" in text
    assert "num_steps" not in str(diagnose(result({"mu": walk})))


def test_chains_that_never_moved() -> None:
    rng = np.random.default_rng(0)
    draws = {"mu": rng.normal(size=(CHAINS, DRAWS))}
    draws["mu"][1] = draws["mu"][1, 0]
    found = diagnose(result(draws))
    assert found.still_chains == 1
    assert found.advice[0].startswith("1 of 4 chains never moved")
    assert math.isinf(found.max_rhat) and found.min_ess_bulk == 0
    everything = diagnose(result({"mu": np.ones((2, DRAWS))}, chains=2))
    assert everything.still_chains == 2
    # one of two parameters
    draws["tau"] = rng.normal(size=(CHAINS, DRAWS))
    found = diagnose(result(draws))
    assert found.still_chains == 0
    assert found.advice[0].startswith("mu has one value in all draws of a chain")


def test_draws_that_are_not_numbers() -> None:
    rng = np.random.default_rng(0)
    draws = {"mu": rng.normal(size=(CHAINS, DRAWS)), "s": np.ones((CHAINS, DRAWS))}
    draws["s"][2, 10] = np.nan
    draws["s"][2, 11] = np.inf
    found = diagnose(result(draws))
    assert found.min_ess_bulk_name == "s" and found.min_ess_bulk == 0
    assert "or a NaN" in found.advice[0]


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [(49, N, True), (50, N, False), (30, 30, False), (30, 31, True)],
)
def test_small_batches(rows: int, size: int, expected: bool) -> None:
    text = advice(batch_sizes={"data": rows}, plates={"data": size})
    assert (f"a batch of {rows} rows" in text) == expected


def test_notes() -> None:
    (note,) = diagnose(result(temperature=100.0)).notes
    assert "prior * likelihood ** (1 / 100)" in note and "10 times" in note
    (note,) = diagnose(result(chains=1)).notes
    assert "num_chains=4" in note
    (note,) = diagnose(result(batch_sizes={"data": N})).notes
    assert f"all {N} rows" in note
    everything = PENALTY | batch.full().facts
    found = diagnose(result(batch_sizes={"data": 20}, facts=everything))
    assert found.batch_sizes == {"data": N}
    assert len(found.notes) == 1 and not found.advice


# facts ------------------------------------------------------------------------------


class Doubtful(accept.AcceptanceTest):
    """A user's test: accepts half of all moves and tolerates no noise."""

    max_variance = 0.0
    highest_accept_prob = 0.5

    def probability(self, log_ratio: Any) -> Any:
        return jnp.full_like(log_ratio.value, 0.5)


class Doubling(batch.Scheme):
    """A user's scheme, whose batches grow."""

    single_round = False  # type: ignore[assignment]


def test_parts_of_a_user_are_diagnosed_by_what_they_do() -> None:
    given = MINT(lambda: None, temperature=2.0, batch=Doubling(M)).facts
    text = advice(**NOISY, facts=given)
    assert "MHMinibatch" not in text and "batch_size" not in text
    facts = PENALTY | Doubtful().facts
    text = advice(facts=facts, reliable=0.0, log_ratio_variance=1.0)
    assert "compensated_barker()" in text
    assert "is 0.48 of at most 0.5" in advice(facts=facts, acceptance_rate=0.48)


def test_facts_are_found_in_a_file(tmp_path: Any) -> None:
    idata = result(**NOISY, facts=PENALTY | {"pilot": MEASURED})
    where = tmp_path / "run.nc"
    idata.to_netcdf(where)
    if isinstance(idata, xr.DataTree):
        found = xr.open_datatree(where)
    else:
        import arviz as az

        found = az.from_netcdf(where)
    again, before = diagnose(found), diagnose(idata)
    assert again.advice == before.advice != ()
    assert str(again) == str(before)


@pytest.mark.parametrize("facts", [PENALTY, {}], ids=["facts", "no facts"])
def test_printed_settings_are_not_read(facts: dict[str, Any]) -> None:
    idata = result(**NOISY, facts=facts)
    expected = diagnose(idata)
    printed = {"acceptance": repr(accept.barker()), "batch": repr(batch.full())}
    for group in ("posterior", "sample_stats"):
        idata[group].attrs["settings"] = json.dumps(printed)
    assert str(diagnose(idata)) == str(expected)


# stays and tails --------------------------------------------------------------------


def independence_chains(
    events: float, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Chains of an independence sampler whose weights grow in the left tail.

    The target is the logarithm of a gamma variable of shape ``events``, as of a rate
    with so many events, and the proposal its normal approximation at the mode.
    """
    s = 1 / math.sqrt(events)
    z, out = rng.normal(size=CHAINS), np.empty((CHAINS, draws))

    def log_weight(z: np.ndarray) -> np.ndarray:
        return events * (z * s - np.expm1(z * s)) + 0.5 * z**2

    for t in range(-200, draws):
        new = rng.normal(size=CHAINS)
        accepted = np.log(rng.uniform(size=CHAINS)) < log_weight(new) - log_weight(z)
        z = np.where(accepted, new, z)
        if t >= 0:
            out[:, t] = z
    return out


def of_draws(draws: np.ndarray) -> diagnostics.Diagnosis:
    """The diagnosis of draws without any other information."""
    return diagnose(as_inference_data({"posterior": dataset({"x": draws}, {})}, {}))


def test_independent_draws_know_what_they_know() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(2.0, 3.0, size=(CHAINS, 5000))
    known = of_draws(draws).precision.isel(parameter=0)
    number = draws.size
    # each within the error of the estimated autocorrelations, about 2 / sqrt(number)
    for name in ("mean", "sd", "q5", "q95"):
        assert float(known[f"ess_{name}"]) == pytest.approx(number, rel=0.1)
    assert float(known["mcse_mean"]) == pytest.approx(3 / math.sqrt(number), rel=0.06)
    assert float(known["mcse_sd"]) == pytest.approx(3 / math.sqrt(2 * number), rel=0.08)
    density = norm.pdf(norm.ppf(0.05)) / 3
    expected = math.sqrt(0.05 * 0.95 / number) / density
    for name in ("q5", "q95"):
        # a difference of order statistics some 180 ranks apart
        assert float(known[f"mcse_{name}"]) == pytest.approx(expected, rel=0.25)


def test_errors_of_quantiles_vary_little() -> None:
    """Of independent draws of exponential tails, by 12% in place of the usual 19%."""
    rng = np.random.default_rng(5)
    draws = rng.exponential(size=(400, CHAINS, 4000 // CHAINS))
    found = precision(np.moveaxis(draws, 0, -1), [str(k) for k in range(400)])
    for name, share in (("q5", 0.05), ("q95", 0.95)):
        error = found[f"mcse_{name}"].values
        expected = math.sqrt(0.05 * 0.95 / 4000) / (1 - share)
        assert error.mean() == pytest.approx(expected, rel=0.05)
        assert error.std() < 0.15 * expected
        missed = np.abs(found[name].values + math.log1p(-share)) > 1.96 * error
        assert missed.mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize("rho", [0.7, -0.7])
def test_effective_sample_sizes_of_an_autoregression(rho: float) -> None:
    """Closed forms for means and squares, and never more than the number of draws."""
    rng = np.random.default_rng(1)
    draws = 4000
    x = rng.normal(size=(CHAINS, draws))
    for t in range(1, draws):
        x[:, t] = rho * x[:, t - 1] + math.sqrt(1 - rho**2) * x[:, t]
    found = of_draws(x)
    number = CHAINS * draws
    mean = min(number * (1 - rho) / (1 + rho), number)
    assert float(found.precision["ess_mean"][0]) == pytest.approx(mean, rel=0.15)
    squares = number * (1 - rho**2) / (1 + rho**2)
    assert found.min_ess_sd == pytest.approx(squares, rel=0.15)
    assert found.min_ess_bulk <= number
    # a chain that moves at each draw has no stays
    assert found.staying == 0 and math.isnan(found.tail_stay)


def test_the_error_of_a_standard_deviation_counts_a_heavy_tail() -> None:
    scale = 0.8
    log_draws = scale * np.random.default_rng(0).normal(size=(4, 500, 1200))
    draws = np.exp(log_draws)
    names = [str(k) for k in range(draws.shape[-1])]
    found = precision(draws, names)
    truth = np.sqrt(np.expm1(scale**2) * np.exp(scale**2))
    away = np.abs(found["sd"] - truth).values
    # 5% with an error of 0.006; 0.09 by the plain fourth moment
    assert np.mean(away > 1.96 * found["mcse_sd"].values) < 0.06
    squares = np.square(draws - draws.mean((0, 1)))
    plain = squares.std((0, 1)) / np.sqrt(found["ess_sd"]) / (2 * found["sd"])
    assert np.mean(away > 1.96 * plain.values) > 0.07
    # of a light tail it stays what it is
    light = precision(log_draws, names)
    squares = np.square(log_draws - log_draws.mean((0, 1)))
    plain = squares.std((0, 1)) / np.sqrt(light["ess_sd"]) / (2 * light["sd"])
    assert 1.0 <= float((light["mcse_sd"] / plain).median()) < 1.1


def test_a_standard_deviation_without_an_error_is_noted() -> None:
    """By its kurtosis, 4,000 draws of exp(2 z) do not determine one; exp(z / 2) has."""
    normal = np.random.default_rng(2).normal(size=(4, 1000, 100))
    names = [str(k) for k in range(100)]
    heavy, light = precision(np.exp(2 * normal), names), np.exp(0.5 * normal)
    assert np.isinf(heavy["mcse_sd"]).mean() > 0.95
    assert np.isfinite(precision(light, names)["mcse_sd"]).all()
    # everything else is known, and nearly always the error of the mean
    assert np.isfinite(heavy["mcse_mean"]).mean() > 0.9
    others = heavy.drop_vars(["mcse_sd", "mcse_mean"])
    assert all(np.isfinite(values).all() for values in others.values())
    found = of_draws(np.exp(2 * normal[..., :2]))
    assert found.advice == () and math.isinf(found.mcse_sd)
    (note,) = found.notes
    assert note.startswith("the posterior of x[0], x[1] has so heavy a tail")
    assert "sd inf of itself" in str(found)
    assert of_draws(light[..., :2]).notes == ()


def test_errors_of_means_allow_for_a_heavy_tail() -> None:
    """The plain variance misses 22% of the means of an inverse gamma variable."""
    rng, runs, shape = np.random.default_rng(3), 300, 1.5
    draws = 1 / rng.gamma(shape, size=(4, 1000, runs))
    names = [str(k) for k in range(runs)]
    found = precision(draws, names)
    away = np.abs(found["mean"].values - 1 / (shape - 1))
    few = np.sqrt(found["ess_mean"].values / 4000)  # independent draws
    assert np.isfinite(found["mcse_mean"]).mean() > 0.85
    assert np.mean(away > 1.96 * found["mcse_mean"].values * few) < 0.1
    assert np.mean(away > 1.96 * found["sd"].values / math.sqrt(4000)) > 0.15
    # of a light tail it stays what it is
    light = precision(np.log(draws), names)
    plain = light["sd"] / np.sqrt(light["ess_mean"])
    assert 1.0 <= float((light["mcse_mean"] / plain).median()) < 1.02


def test_a_mean_without_an_error_is_noted() -> None:
    draws = np.exp(4 * np.random.default_rng(4).normal(size=(4, 1000, 2)))
    found = of_draws(draws)
    assert found.advice == () and math.isinf(found.mcse_mean)
    (note,) = found.notes
    assert "determine neither a mean nor a standard deviation" in note
    assert "mean inf sd" in str(found)


def test_the_variance_of_equal_or_discrete_squares_is_that_of_the_draws() -> None:
    draws = np.random.default_rng(1).integers(0, 2, size=(4, 500, 1)).astype(float)
    both = np.concatenate([draws, np.ones_like(draws)], axis=-1)
    found = precision(both, ["coin", "constant"])
    assert 0 <= float(found["mcse_sd"][0]) < 0.01
    assert np.isnan(found["mcse_sd"][1])


def test_stays_of_a_chain_with_known_weights() -> None:
    """With 5 events nearly all runs get advice, with 100 hardly any."""
    rng = np.random.default_rng(2)
    told = {5: 0, 100: 0}
    for events in told:
        for _ in range(20):
            found = of_draws(independence_chains(events, 1000, rng))
            told[events] += any("the tails are known" in a for a in found.advice)
    # of 200 such runs 0.93 and 0.00; the first bound has a probability of 2e-3
    assert told[5] >= 15 and told[100] <= 1


def test_stays_of_a_random_walk_are_no_fault() -> None:
    rng = np.random.default_rng(3)
    z, draws = rng.normal(size=CHAINS), np.empty((CHAINS, 1000))
    for t in range(1000):
        new = z + 2.4 * rng.normal(size=CHAINS)
        accepted = np.log(rng.uniform(size=CHAINS)) < 0.5 * (z**2 - new**2)
        draws[:, t] = z = np.where(accepted, new, z)
    found = of_draws(draws)
    assert found.staying > 0.4 and found.tail_stay < 1.05
    assert found.longest_stay < found.usual_stay
    assert not any("the tails" in a for a in found.advice)


def test_log_ratios_show_weights_that_grow_in_the_tails() -> None:
    """The log weight at 2.5 sd, less that at the mean, from the recorded ratios."""
    rng = np.random.default_rng(4)
    z = rng.normal(size=(CHAINS, DRAWS))
    facts = PENALTY | {"uses_surrogate": True, "num_steps": 1, "pilot": MEASURED}
    # a linear part alone is no tail
    for linear, cubic in ((0.0, 0.0), (0.0, 0.05), (0.4, 0.0), (0.2, 0.05)):
        log_weight = linear * z + cubic * z**3
        ratio = np.zeros_like(z)
        ratio[:, 1:] = rng.normal(0, 0.2, (CHAINS, DRAWS - 1)) - log_weight[:, :-1]
        found = diagnose(result({"x": z}, facts, log_ratio=ratio))
        # the sd of the fit there is about 0.02
        expected = math.exp((linear * 2.5 + cubic * 2.5**3) * (cubic > 0))
        assert found.tail_weight == pytest.approx(expected, rel=0.15)
        # the last weight is above the limit of 2.25
        assert any("the tails" in a for a in found.advice) == (linear * cubic > 0)


TWO_MODES = {"num_modes": 2, "mode_masses": [0.5, 0.5]}


def test_tails_are_compared_within_modes() -> None:
    """One of two modes is skewed; neither is far from the mean of its own draws."""
    rng = np.random.default_rng(5)
    mode = np.repeat([[0, 1]], DRAWS // 2, axis=1) * np.ones((CHAINS, 1), int)
    facts = PENALTY | {"uses_surrogate": True, "num_steps": 1}
    facts |= {"pilot": MEASURED | TWO_MODES}
    named = 0
    for _ in range(10):
        skewed = independence_chains(5, DRAWS // 2, rng)
        normal = rng.normal(size=skewed.shape)
        # the second is a tenth as wide, and a hundred standard deviations away
        draws = np.concatenate([normal, 10 + 0.1 * skewed], axis=1)
        found = diagnose(result({"x": draws}, facts, mode=mode))
        named += found.tail_stay_name == "x in mode 1"
        # about the mean of both there are no tails
        alone = diagnose(result({"x": draws}, PENALTY | {"pilot": MEASURED}))
        assert alone.tail_stay < 1.12
        assert found.tail_stay > alone.tail_stay
    assert named == 10


def test_rejections_on_the_surrogate_are_no_stays_in_the_tail_of_a_mode() -> None:
    """Moves between modes that fail in a tail do not keep a chain there."""
    rng = np.random.default_rng(6)
    shape = CHAINS, DRAWS
    mode = rng.integers(0, 2, shape)
    draws, ratio = rng.normal(size=shape), rng.normal(0, 0.1, shape)
    for t in range(1, DRAWS):  # half of the moves from the tail of a mode are none
        stays = (draws[:, t - 1] > 1.2) & (rng.uniform(size=CHAINS) < 0.5)
        for values in (draws, mode):
            values[:, t] = np.where(stays, values[:, t - 1], values[:, t])
        ratio[:, t] = np.where(stays, 0.0, ratio[:, t])
    facts = PENALTY | {"uses_surrogate": True, "num_steps": 1}
    facts |= {"pilot": MEASURED | TWO_MODES}
    found = diagnose(
        result({"x": 30.0 * mode + draws}, facts, mode=mode, log_ratio=ratio)
    )
    assert math.isnan(found.tail_stay) and found.staying > 0.03
    # the same with decisions on data: the tail is left too rarely
    ratio = np.where(ratio == 0, -3.0, ratio)
    found = diagnose(
        result({"x": 30.0 * mode + draws}, facts, mode=mode, log_ratio=ratio)
    )
    assert found.tail_stay > 1.2


def test_log_ratios_show_the_weights_of_each_mode() -> None:
    rng = np.random.default_rng(7)
    shape = CHAINS, DRAWS
    mode, z = rng.integers(0, 2, shape), rng.normal(size=shape)
    log_weight = np.where(mode == 1, 0.05 * z**3, 0.0)
    ratio = np.zeros(shape)
    ratio[:, 1:] = rng.normal(0, 0.1, (CHAINS, DRAWS - 1)) - log_weight[:, :-1]
    facts = PENALTY | {"uses_surrogate": True, "num_steps": 1}
    facts |= {"pilot": MEASURED | TWO_MODES}
    draws = np.where(mode == 1, 40 - 0.3 * z, z)
    found = diagnose(result({"x": draws}, facts, mode=mode, log_ratio=ratio))
    assert found.tail_weight_name == "x in mode 1"
    assert found.tail_weight == pytest.approx(math.exp(0.05 * 2.5**3), rel=0.2)


# the content of advice --------------------------------------------------------------


def test_checks_that_are_off_by_little_do_not_advise() -> None:
    pilot = PENALTY | {"pilot": MEASURED}
    usual = {"log_ratio_variance": 0.01}
    little = {"check_rms_error": 0.061, "check_rms_z": 3.5, "check_change": 0.02}
    found = diagnose(result(facts=pilot, **usual, **little))
    assert not found.advice
    assert found.check_change == pytest.approx(0.02)
    more = diagnose(result(facts=pilot, **usual, **little | {"check_change": -0.04}))
    assert "acceptance probabilities are off by about 0.04" in str(more)
    # one decision in a tail, and none of the others
    one = np.zeros((CHAINS, 1))
    one[0] = -0.04 * CHAINS
    found = diagnose(result(facts=pilot, **usual, **little | {"check_change": one}))
    assert found.check_change == pytest.approx(0.04) and not found.advice
    none = dict.fromkeys(little, math.nan)
    assert not diagnose(result(facts=pilot, **usual, **none)).advice


def test_the_change_of_acceptance_is_a_mean_over_decisions() -> None:
    """About zero if the variances are right, and a single large error counts once."""
    rng = np.random.default_rng(0)
    variance = jnp.asarray(rng.uniform(0.0, 0.5, 100_000), jnp.float32)
    noise = jnp.asarray(rng.normal(size=100_000)) * jnp.sqrt(variance)
    one = jax.vmap(Checks.one)
    right = one(noise, variance)
    assert abs(right.change.mean()) < 4 * right.change.std() / math.sqrt(100_000)
    # the acceptance of a move between equally likely positions, simulated
    honest = jnp.exp(jnp.minimum(noise - variance / 2, 0)).mean()
    larger = jnp.exp(jnp.minimum(4 * noise - variance / 2, 0)).mean()
    change = float(one(4 * noise, variance).change.mean())
    assert change == pytest.approx(float(larger - honest), abs=3e-3)
    assert change < -0.1
    rare = noise.at[0].set(1000.0)
    assert abs(one(rare, variance).change.mean() - right.change.mean()) < 1e-5


def test_a_start_that_was_given_is_named() -> None:
    still = {"x": np.ones((CHAINS, DRAWS)), "y": np.zeros((CHAINS, DRAWS))}
    facts = PENALTY | {"pilot": MEASURED | {"gaussian": False}, "start_given": True}
    text = advice(draws=still, facts=facts, acceptance_rate=0.0)
    assert "init_params" in text and "funnel" not in text


def test_remedies_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group effects are only named where there may be some."""
    stuck = MEASURED | {"gaussian": False, "surrogate_stuck": 0.02, "exact_rows": 5}

    def told(**pilot: Any) -> str:
        return advice(facts=PENALTY | {"pilot": stuck | pilot}, log_ratio_variance=0.01)

    assert "group effects" in told() and "group effects" in told(hierarchical=True)
    plain = told(hierarchical=False)
    assert "group effects" not in plain and "closer to a normal" in plain
    assert "batch.full" not in plain, "the surrogate would not evaluate as many rows"
    monkeypatch.setattr(_run, "_READ_ALL", N)
    plain = told(hierarchical=False)
    assert f"batch=batch.full(), which evaluates all {N} rows" in plain
    assert "batch.full" not in told(hierarchical=False, exact_rows=N)


def test_a_coarse_quadrature_is_named_with_what_suffices() -> None:
    coarse = MEASURED | {"quadrature_sd": 0.21, "quadrature_better_nodes": 15}
    text = advice(facts=PENALTY | {"pilot": coarse}, log_ratio_variance=0.01)
    assert "by 0.21" in text and "num_nodes=15" in text
    missed = MEASURED | {"quadrature_sd": 0.01, "quadrature_sd_elsewhere": 0.3}
    text = advice(facts=PENALTY | {"pilot": missed}, log_ratio_variance=0.01)
    assert "second mode" in text and "by 0.3 " in text
    of_row = {"quadrature_error": 3e-3, "quadrature_accuracy": 1e-4}
    of_row = MEASURED | of_row | {"quadrature_better_nodes": 45}
    text = advice(facts=PENALTY | {"pilot": of_row}, log_ratio_variance=0.01)
    assert "off by up to 0.003" in text and "num_nodes=45" in text
    far = MEASURED | {"quadrature_elsewhere": 0.2, "quadrature_row_elsewhere": 7}
    text = advice(facts=PENALTY | {"pilot": far}, log_ratio_variance=0.01)
    assert "row 7 by 0.2" in text and "heavy tail" in text
    single = MEASURED | {"quadrature_sd": 0.01, "quadrature_sd_single": 0.4}
    text = advice(facts=PENALTY | {"pilot": single}, log_ratio_variance=0.01)
    assert "by 0.4 " in text and "enable_x64" in text and "num_nodes" not in text
    lost = MEASURED | {"quadrature_unconverged": 3}
    text = advice(facts=PENALTY | {"pilot": lost}, log_ratio_variance=0.01)
    assert "3 pairs of row and draw" in text and "proper priors" in text
    lost |= {"quadrature_kinks": 2}
    text = advice(facts=PENALTY | {"pilot": lost}, log_ratio_variance=0.01)
    assert "(2 pairs of row and draw)" in text and "kink" in text
    assert "(1 pairs of row and draw)" in text and "proper priors" in text
    lost |= {"quadrature_kinks": 3}
    text = advice(facts=PENALTY | {"pilot": lost}, log_ratio_variance=0.01)
    assert "kink" in text and "proper priors" not in text
    fine = MEASURED | {"quadrature_sd": 0.01, "quadrature_sd_elsewhere": 0.02}
    fine |= {"quadrature_error": 9e-5, "quadrature_accuracy": 1e-4}
    fine |= {"quadrature_sd_single": 0.02}
    assert not advice(facts=PENALTY | {"pilot": fine}, log_ratio_variance=0.01)


def test_starts_that_were_moved_are_named() -> None:
    assert "starts" not in str(diagnose(result(facts=PENALTY | {"pilot": MEASURED})))
    moved = MEASURED | {"moved_starts": 2, "start_distance": 35.21}
    found = diagnose(result(facts=PENALTY | {"pilot": moved}))
    assert f"2 of {CHAINS} up to 35.2 sd away" in str(found)
    assert found.moved_starts == 2 and found.start_distance == 35.21


def test_no_advice_says_that_the_draws_are_right() -> None:
    coarse = PENALTY | {"pilot": MEASURED | {"residual_sd": 1.5}}
    assert "are right" not in advice(facts=coarse, log_ratio_variance=0.01)


def test_the_table_of_the_documentation_has_all_advice() -> None:
    """It is built from the rules, so that a new one needs no edit of the page."""
    rows = diagnostics.advice_table().splitlines()[2:]
    assert len(rows) > 20 and len(set(rows)) == len(rows)
    assert all(row.count(" | ") == 2 and row.startswith("| *") for row in rows)
    docs = Path(__file__).resolve().parent.parent / "docs"
    mark = "<!-- the table of all advice -->"
    assert mark in (docs / "troubleshooting.md").read_text()
    assert mark in (docs / "conf.py").read_text()


# a real run -------------------------------------------------------------------------


@pytest.mark.slow
def test_advice_on_the_noise_helps() -> None:
    key_x, key_y, key_run = jax.random.split(jax.random.PRNGKey(0), 3)
    X = jax.random.normal(key_x, (N, 10))
    y = jax.random.bernoulli(key_y, jax.nn.sigmoid(X @ jnp.linspace(-1, 1, 10)))

    def model(X: Any, y: Any) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 3).expand([10]).to_event(1))
        with numpyro.plate("data", N, subsample_size=M) as idx:
            logits = X[idx] @ beta
            numpyro.sample("obs", dist.BernoulliLogits(logits), obs=y[idx])

    def run(**settings: Any) -> diagnostics.Diagnosis:
        mcmc = MCMC(
            MINT(model, temperature=100.0, **settings),
            num_warmup=1000,
            num_samples=1000,
            progress_bar=False,
        )
        mcmc.run(key_run, X, y.astype(int))
        return diagnose(to_inference_data(mcmc))

    first = run()
    assert first.unreliable > 0.5
    assert first.rows_per_draw == M
    rate = float(re.findall(r"target_accept_prob=([0-9.]+)", first.advice[0])[0])
    second = run(target_accept_prob=rate)
    # five keys gave 0.00 to 0.14, from 0.88 to 0.99
    assert second.unreliable < 0.5 * first.unreliable
    assert second.noise_sd_median < first.noise_sd_median


# the normality of batch means -------------------------------------------------------


def test_bound_is_that_of_standardised_rows() -> None:
    rows = np.random.default_rng(0).exponential(size=1_000_000)
    # E |X - 1| ** 3 = 12 / e - 2 and E |X - 1| = 2 / e, standard deviation 1
    expected = 6.4 * (12 / math.e - 2) + 2 * 2 / math.e
    assert normal_error_bound(rows, 100) == pytest.approx(expected / 10, rel=0.02)
    for scale, shift in ((1e-6, 0.0), (1e6, -3.0), (-1.0, 1e3)):
        moved = normal_error_bound(scale * rows + shift, 100)
        assert moved == pytest.approx(normal_error_bound(rows, 100), rel=1e-6)
    assert normal_error_bound(rows[:400]) == normal_error_bound(rows[:400], 400)
    ratio = normal_error_bound(rows, 100) / normal_error_bound(rows, 10_000)
    assert ratio == pytest.approx(10.0)


def test_bound_of_normal_rows_is_the_documented_one() -> None:
    rows = norm.ppf((np.arange(1_000_000) + 0.5) / 1_000_000)
    assert normal_error_bound(rows, 100) == pytest.approx(1.18, abs=0.005)
    assert normal_error_bound(rows, 56_000) < 0.05 < normal_error_bound(rows, 55_000)


def test_bound_holds_for_a_skewed_distribution() -> None:
    m, repeats = 400, 20_000
    rng = np.random.default_rng(1)
    rows = rng.exponential(size=(repeats, m)) - 1.0
    t = np.sort(math.sqrt(m) * rows.mean(1) / rows.std(1))
    grid = np.arange(repeats + 1) / repeats
    below = norm.cdf(t)
    distance = max((grid[1:] - below).max(), (below - grid[:-1]).max())
    resolution = 1.95 / math.sqrt(repeats)  # Kolmogorov's 99.9% point
    assert resolution < distance < normal_error_bound(rows.ravel(), m) < 1
    # as printed in the papers, without standardising, it is no bound for small rows
    small = 1e-3 * np.abs(rows)
    printed = (6.4 * (small**3).mean() + 2 * small.mean()) / math.sqrt(m)
    assert printed < distance - resolution


def test_normality_of_normal_rows() -> None:
    rows = np.random.default_rng(0).normal(3.0, 1e-3, size=10_000)
    found = normality(rows, 100, jax.random.PRNGKey(0), num_batches=4000)
    assert found.resolution == pytest.approx(1.358 / math.sqrt(4000))
    assert found.distance < 1.95 / math.sqrt(4000)  # Kolmogorov's 99.9% point
    # moments of the 4000 means, in standard errors
    assert abs(found.skewness) < 4.5 * math.sqrt(6 / 4000)
    assert abs(found.excess_kurtosis) < 4.5 * math.sqrt(24 / 4000)


def test_normality_knows_the_variance_of_large_batches() -> None:
    # without the finite-population correction the sd would be off by sqrt(5)
    rows = np.random.default_rng(0).normal(size=500)
    found = normality(rows, 400, jax.random.PRNGKey(0), num_batches=4000)
    assert found.distance < 1.95 / math.sqrt(4000)


def test_normality_finds_heavy_tails() -> None:
    rng = np.random.default_rng(0)
    heavy = rng.standard_t(1.5, size=10_000)
    found = normality(heavy, 100, jax.random.PRNGKey(0), num_batches=2000)
    assert found.distance > 2 * found.resolution  # under normality once in 1e6 times
    assert found.excess_kurtosis > 4.5 * math.sqrt(24 / 2000)
    # ten rows that most batches miss; batches without them appear to have little noise
    rare = np.zeros(10_000)
    rare[:10] = 100.0
    rare += rng.normal(size=10_000)
    assert normality(rare, 50, jax.random.PRNGKey(1), 2000).distance > 0.2
    skewed = rng.exponential(size=10_000)
    found = normality(skewed, 10, jax.random.PRNGKey(2), 4000)
    # the mean of ten has the skewness of one over the root of ten; its standard error
    # is a little above that of a normal sample
    assert found.skewness == pytest.approx(2 / math.sqrt(10), abs=0.3)
    assert found.skewness > 4.5 * math.sqrt(6 / 4000)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda k: normal_error_bound([1.0, np.nan, 2.0]),
            ValueError,
            "1 of 3 numbers",
        ),
        (
            lambda k: normal_error_bound([1.0, 1.0]),
            ValueError,
            "all 2 numbers are equal",
        ),
        (lambda k: normal_error_bound(np.ones((3, 2))), ValueError, r"shape \(3, 2\)"),
        (lambda k: normal_error_bound([1.0, 2.0], 0), ValueError, "positive number"),
        (lambda k: normal_error_bound([1.0, 2.0], 1.5), ValueError, "positive number"),
        (lambda k: normality([1.0, 2.0, 3.0], 3, k), ValueError, "all 3 rows"),
        (lambda k: normality([1.0, 2.0, 3.0], 1, k), ValueError, "at least 2"),
        (lambda k: normality([1.0, 2.0, 3.0], 2.0, k), TypeError, "integer"),
        (lambda k: normality([1.0, 2.0, 3.0], 2, k, 9), ValueError, "at least 100"),
        (lambda k: normality([1.0, 2.0, 3.0], 2, k, 1e3), TypeError, "an integer"),
    ],
)
def test_mistakes(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(jax.random.PRNGKey(0))


# log likelihood ratios by row -------------------------------------------------------


def two_plates(x: Any, y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.deterministic("double", 2 * scale)
    with numpyro.plate("left", len(x)) as idx:
        numpyro.sample("x", dist.Normal(mu[0], scale), obs=x[idx])
    with numpyro.plate("right", len(y)) as idx:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[idx])


def test_rows_of_a_model() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=23), rng.normal(size=(31, 2))
    # as two draws of get_samples(): deterministic values do no harm
    old = {"mu": np.array([0.1, -0.2]), "scale": 0.7, "double": 1.4}
    new = {"mu": jnp.array([0.3, 0.2]), "scale": jnp.array(0.9), "double": 1.8}
    left = norm.logpdf(x, 0.3, 0.9) - norm.logpdf(x, 0.1, 0.7)
    right = (norm.logpdf(y, new["mu"]) - norm.logpdf(y, old["mu"])).sum(1)
    for chunk_size in (262_144, 5):
        for plate, expected in (("left", left), ("right", right)):
            found = log_ratio_rows(
                two_plates,
                old,
                new,
                (x,),
                {"y": y},
                plate=plate,
                chunk_size=chunk_size,
            )
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match="one of the data plates: 'left', 'right'"):
        log_ratio_rows(two_plates, old, new, (x, y))
    with pytest.raises(ValueError, match="plate='top'"):
        log_ratio_rows(two_plates, old, new, (x, y), plate="top")
    with pytest.raises(ValueError, match=r"no value for \['scale'\]"):
        log_ratio_rows(two_plates, old, {"mu": old["mu"]}, (x, y), plate="left")


def test_rows_of_a_target() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=23))
    target = Target(
        log_prior=lambda z: -(z["a"] ** 2),
        log_likelihood=lambda z, i: z["a"] * x[i],
        sizes=23,
    )
    rows = log_ratio_rows(target, {"a": 1.0}, {"a": 3.0}, chunk_size=10)
    np.testing.assert_allclose(rows, 2 * np.asarray(x), rtol=1e-5)
    pair = Target(
        log_prior=lambda z: -(z**2),
        log_likelihood=lambda z, i: {n: z * i[n] for n in i},
        sizes={"a": 5, "b": 3},
    )
    rows = log_ratio_rows(pair, jnp.array(0.0), jnp.array(1.0), plate="b")
    assert rows.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="'a', 'b'"):
        log_ratio_rows(pair, jnp.array(0.0), jnp.array(1.0))


# gradients ------------------------------------------------------------------------


def test_gradient_noise_that_nothing_corrects() -> None:
    found = diagnose(result(facts=LANGEVIN, noise_ratio=100.0, **UNDECIDED))
    assert not found.advice and found.noise_ratio == 100.0
    assert "its variance is 1 / 100 of what steps inject" in str(found)
    # T (1 + 1 / 2): standard deviations sqrt(1.5) times as large
    text = advice(facts=LANGEVIN, noise_ratio=2.0, **UNDECIDED)
    assert "about 22% too large" in text
    assert "a step_size 0.2 times as large" in text
    assert "batch_size=" in text and "AMAGOLD(model)" in text
    assert "friction" not in text
    with_friction = LANGEVIN | dynamics.sghmc().facts
    assert "friction" in advice(facts=with_friction, noise_ratio=2.0, **UNDECIDED)
    thermostat = LANGEVIN | dynamics.nose_hoover().facts
    text = advice(facts=thermostat, noise_ratio=2.0, **UNDECIDED)
    assert "the same in all coordinates" in text and "too large" not in text
    # the full batch has no gradient noise, and AMAGOLD corrects for it
    exact = diagnose(result(facts=LANGEVIN, noise_ratio=np.inf, **UNDECIDED))
    assert np.isnan(exact.noise_ratio) and not exact.advice
    assert not advice(facts=CORRECTED, noise_ratio=2.0, acceptance_rate=0.8)


def test_the_gradient_noise_of_the_worst_chain() -> None:
    last = np.array([50.0, 4.0, 60.0, 70.0])
    ratio = np.full((CHAINS, DRAWS), 1e-3)  # as before the first chains had converged
    ratio[:, -1] = last
    found = diagnose(result(facts=LANGEVIN, noise_ratio=ratio, **UNDECIDED))
    assert found.noise_ratio == 4.0


def test_a_correction_that_is_too_noisy() -> None:
    stats = {"log_ratio_variance": 9.0, "reliable": 0.2, "acceptance_rate": 0.7}
    text = advice(facts=CORRECTED, **stats)
    assert 'correction="exact"' in text and "correction=batch.growing(500)" in text
    assert "MHMinibatch" not in text


def test_small_batches_are_fine_for_gradients() -> None:
    few = {"data": 16}
    assert not advice(facts=LANGEVIN, batch_sizes=few, noise_ratio=100.0, **UNDECIDED)
    exact = CORRECTED | estimate.exact().facts
    assert not advice(facts=exact, batch_sizes=few, acceptance_rate=0.8)
    assert "16 rows" in advice(facts=CORRECTED, batch_sizes=few, acceptance_rate=0.8)


MEASURED = {  # by the pilot of a control variate
    "batch_sd": 0.1,
    "batch_sd_95": 0.2,
    "gaussian": True,
    "residual_sd": 0.1,
    "surrogate_rhat": 1.0,
    "surrogate_stuck": 0.0,
    "other_mode": 0.0,
}


def test_small_batches_are_fine_where_the_pilot_found_little_noise() -> None:
    few = {"batch_sizes": {"data": 16}, "log_ratio_variance": 0.01}
    assert not advice(facts=PENALTY | {"pilot": MEASURED}, **few)
    noisy = MEASURED | {"batch_sd_95": 0.3}
    assert "16 rows" in advice(facts=PENALTY | {"pilot": noisy}, **few)


def test_trajectories_that_hold_the_tails() -> None:
    held = PENALTY | {"pilot": MEASURED | {"surrogate_stuck": 0.004}}
    text = advice(facts=held, log_ratio_variance=0.01)
    assert "rejected from 0.4% of its draws" in text and "non-centred" in text


@pytest.mark.parametrize(
    ("measured", "stats", "message"),
    [
        ({"residual_sd": 0.8}, {}, "the expansion of the likelihood is coarse"),
        ({"surrogate_rhat": 1.3}, {}, "itself hard to sample (R-hat 1.30)"),
        ({"other_mode": 7.0}, {}, "in another mode, 7 posterior standard deviations"),
        (
            {"other_mode": 7.0, "other_mode_searches": 12, "other_mode_gap": 28.3},
            {},
            "of 12 searches for the mode only one ended in the highest that was "
            "found, and the next one is lower by 28 in the log density",
        ),
        (
            {},
            {"check_rms_error": 0.2, "check_rms_z": 3.0, "check_change": -0.05},
            "checked on all rows had errors of 0.2 in the log ratio, 3 times the noise",
        ),
        (
            {"batch_sd": 0.6, "batch_sd_95": 1.0},
            {},
            "the batches underestimate their noise",
        ),
    ],
)
def test_what_the_pilot_and_the_checks_saw(
    measured: dict[str, float], stats: dict[str, float], message: str
) -> None:
    usual = {"check_rms_error": 0.01, "check_rms_z": 1.0, "log_ratio_variance": 0.01}
    assert not advice(facts=PENALTY | {"pilot": MEASURED}, **usual)
    text = advice(facts=PENALTY | {"pilot": MEASURED | measured}, **usual | stats)
    assert message in text


def test_little_noise_may_be_underestimated() -> None:
    """Where checks on all rows show that it changes no decision."""
    facts = PENALTY | {"pilot": MEASURED}
    low = {"log_ratio_variance": 1e-4}
    assert not advice(facts=facts, check_change=0.004, **low)
    for other in ({}, {"check_change": 0.05}):
        assert "underestimate their noise" in advice(facts=facts, **low, **other)
    noisy = PENALTY | {"pilot": MEASURED | {"batch_sd_95": 0.3}}
    assert "underestimate their noise" in advice(facts=noisy, check_change=0.004, **low)


def test_chains_that_mix_need_no_better_surrogate() -> None:
    """Short chains of NUTS on it disagree sooner than the run that they set up."""
    facts = PENALTY | {"pilot": MEASURED | {"surrogate_rhat": 1.15}}
    assert "hard to sample" not in advice(facts=facts, log_ratio_variance=0.01)
    rng = np.random.default_rng(0)
    slow = {"mu": np.cumsum(rng.normal(size=(CHAINS, DRAWS)), 1)}
    text = advice(draws=slow, facts=facts, log_ratio_variance=0.01)
    assert "itself hard to sample (R-hat 1.15)" in text
    assert "an intercept trades off" in text and "AMAGOLD(model)" in text


def test_no_decisions_no_advice_on_them() -> None:
    """AMAGOLD without a correction, and exact decisions with a control variate."""
    undecided = LANGEVIN | dynamics.sghmc(0.5, "midpoint").facts
    certain = {"acceptance_rate": 1.0, "log_ratio_variance": 0.0}
    few = {"data": 16}
    assert not advice(facts=undecided, noise_ratio=100.0, batch_sizes=few, **certain)
    pilot = {"pilot": MEASURED | {"batch_sd": 0.3, "batch_sd_95": 0.4}}
    exact = CORRECTED | estimate.exact().facts | pilot
    assert not advice(facts=exact, acceptance_rate=0.8, log_ratio_variance=0.0)
    everything = LANGEVIN | batch.full().facts
    found = diagnose(result(facts=everything, noise_ratio=np.inf, **UNDECIDED))
    assert not any("decision is exact" in note for note in found.notes)


def test_a_rung_that_ignores_its_noise() -> None:
    """Advice for a kernel also applies to it as the coldest rung of a ladder."""
    stats = {"reliable": 0.0, "log_ratio_variance": 4.0, "swap_reliable": 1.0}
    text = advice(facts=METROPOLIS | {"temperatures": [1.0, 2.0]}, **stats)
    assert "treats log ratios as exact" in text


def test_the_temperature_of_a_rung_is_no_setting() -> None:
    noisy = {"reliable": 0.0, "log_ratio_variance": 4.0}
    for facts in (PENALTY, AUGMENTED, CORRECTED):
        assert "temperature=" in advice(facts=facts, **noisy)
        text = advice(facts=facts | {"temperatures": [1.0, 2.0]}, **noisy)
        assert "temperature=" not in text and "batch_size=" in text


def test_errors_of_standard_deviations_allow_for_a_heavy_tail() -> None:
    """The plain fourth moment of 1,000 log-normal draws misses 17%."""
    rng, runs = np.random.default_rng(5), 600
    draws = np.exp(rng.normal(size=(4, 250, runs)))
    found = precision(draws, [f"x{k}" for k in range(runs)])
    true = math.sqrt((math.e - 1) * math.e)
    # independent draws: the errors at their true effective sample size
    error = found.mcse_sd * np.sqrt(found.ess_sd / 1000)
    missed = float((abs(found.sd - true) > 1.96 * error).mean())
    assert missed < 0.07  # 12% with a largest shape of 0.45 of the fitted tail


def test_errors_of_standard_deviations_allow_for_draws_that_were_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variance of six normal rows, whose squares have an infinite variance."""
    rng, runs, shape = np.random.default_rng(11), 500, 2.5
    draws = 1 / rng.gamma(shape, size=(4, 500, runs))
    true = math.sqrt(1 / ((shape - 1) ** 2 * (shape - 2)))

    def missed() -> float:
        found = precision(draws, [str(k) for k in range(runs)])
        error = found.mcse_sd * np.sqrt(found.ess_sd / 2000)
        assert 0.2 < np.isfinite(error).mean() < 0.5  # the others cannot miss
        return float((abs(found.sd - true) > 1.96 * error).mean())

    monkeypatch.setattr(_effective, "_OF_UNSEEN", 0.0)
    assert missed() > 0.15
    monkeypatch.undo()
    assert missed() < 0.1
