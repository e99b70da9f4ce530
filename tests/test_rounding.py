"""Rounding errors of a log density are found where chains stay, and named as the cause.

The log density of beta-binomial rows is a difference of log-gamma functions of the
concentration. It loses as many digits as the concentration has.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_minibatch import MINT, diagnose, to_inference_data
from numpyro_minibatch._model.replay import Run, log_densities
from numpyro_minibatch.inference_data import _errors, _rounding

pytestmark = pytest.mark.x64  # in double precision, too

DOUBLE = bool(jax.config.jax_enable_x64)
TRIALS = np.array([20.0, 31.0, 14.0, 38.0, 25.0, 17.0, 22.0])
COUNTS = np.array([6.0, 10.0, 3.0, 12.0, 8.0, 4.0, 7.0])


def beta_binomial(n: Any, y: Any) -> None:
    m = numpyro.sample("m", dist.Uniform(0, 1))
    c = numpyro.sample("c", dist.HalfCauchy(10.0))
    with numpyro.plate("data", len(y), subsample_size=5) as i:
        numpyro.sample("y", dist.BetaBinomial(m * c, (1 - m) * c, n[i]), obs=y[i])


@pytest.fixture(scope="module")
def mcmc() -> MCMC:
    """A run of a few draws, whose model is replayed at other ones."""
    kernel = MINT(beta_binomial, temperature=5.0)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, num_chains=1, progress_bar=False)
    mcmc.run(random.key(0), jnp.asarray(TRIALS), jnp.asarray(COUNTS))
    return mcmc


def draws(place: float, length: int) -> dict[str, np.ndarray]:
    """Two chains, of which the second stays at a concentration for some time."""
    rng = np.random.default_rng(1)
    m = rng.uniform(0.25, 0.35, (2, 400))
    c = rng.lognormal(3.0, 0.5, (2, 400))
    m[1, 100 : 100 + length], c[1, 100 : 100 + length] = 0.3, place
    return {
        "m": m.astype(jnp.result_type(float)),
        "c": c.astype(jnp.result_type(float)),
    }


def exact(m: float, c: float) -> float:
    """The log density in extended precision: products in place of log-gamma."""
    m, c = np.longdouble(m), np.longdouble(c)
    total = -np.log1p((c / 10) ** 2)
    for n, y in zip(TRIALS, COUNTS, strict=True):
        total += np.log(m * c + np.arange(y)).sum()
        total += np.log((1 - m) * c + np.arange(n - y)).sum()
        total -= np.log(c + np.arange(n)).sum()
    return float(total)


# digits are lost, and all of them; up to 1e10 in double precision none
@pytest.mark.parametrize("place", [1e8, 1e15] if DOUBLE else [1e6, 1e8, 1e10])
@pytest.mark.parametrize("length", [1, 60])
def test_the_error_is_measured(mcmc: MCMC, place: float, length: int) -> None:
    """Where a chain stays, and where it goes very far away."""
    run, samples = Run.of(mcmc), draws(place, length)
    found = _rounding.measured_rounding(run, samples)
    if length == 1 and place < 1e7:
        assert found == {}  # not so far away
        return
    assert (found["name"], found["double"]) == ("c", DOUBLE)
    assert found["value"] == pytest.approx(place)

    def computed(m: Any, c: Any) -> float:
        draw = {"m": jnp.asarray([m]), "c": jnp.asarray([c])}
        assert run.target is not None
        return float(sum(log_densities(run.target, draw))[0])

    at = samples["m"][1, 100], samples["c"][1, 100]
    middle = samples["m"][0, 0], samples["c"][0, 0]
    off = computed(*at) - exact(*at) - computed(*middle) + exact(*middle)
    if place == 1e8 and DOUBLE:
        assert max(abs(off), found["error"]) < 1e-4
    else:
        assert abs(off) > 0.3
        assert abs(off) / 4 < found["error"] < 4 * abs(off)


@pytest.mark.parametrize("place", [30.0, 1e3])
def test_a_smooth_density_has_none(mcmc: MCMC, place: float) -> None:
    """Also where a chain that never moved is far outside of the posterior."""
    run = Run.of(mcmc)
    assert _rounding.measured_rounding(run, draws(place, 60))["error"] < 0.01
    samples = draws(place, 60)
    samples["m"][1, 100:160] = 0.999
    assert _rounding.measured_rounding(run, samples)["error"] < 0.01


def test_runs_without_long_stays_are_not_replayed(
    mcmc: MCMC, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the model was replayed")

    assert _rounding.measured_rounding(Run.of(mcmc), draws(1e3, 49)) == {}
    monkeypatch.setattr(Run, "of_kernel", refuse)
    args = mcmc.sampler, (), {}
    assert _errors.errors_of_kernel(*args, draws(1e3, 49)) == {}
    with pytest.raises(AssertionError, match="replayed"):
        _errors.errors_of_kernel(*args, draws(1e3, 50))


def test_stays_are_found_in_their_chains() -> None:
    x = np.arange(600.0).reshape(2, 300)
    x[0, 200:] = x[0, 200]  # a stay ends with its chain
    x[1, :70] = x[0, 200]
    found = _rounding._suspects({"x": x[..., None], "y": x * 0})
    assert found.chain.tolist() == [0, 1]
    assert found.draw.tolist() == [200, 0]
    assert not _rounding.are_suspicious({"x": np.arange(60.0)[None]})
    assert not _rounding.are_suspicious({})


def test_advice_names_the_cause(mcmc: MCMC, monkeypatch: pytest.MonkeyPatch) -> None:
    place = 1e15 if DOUBLE else 1e8
    samples = draws(place, 400)
    samples["c"][1] = place
    samples["m"][1] = 0.3
    monkeypatch.setattr(
        "numpyro_minibatch.inference_data._convert.collected_groups",
        lambda _: {"samples": samples, "stats": {}, "rungs": {}},
    )
    found = diagnose(to_inference_data(mcmc)).advice
    (advice,) = [text for text in found if "rounding errors" in text]
    precision = "double" if DOUBLE else "single"
    assert f"such as c = {place:.2g}, in {precision} precision" in advice
    assert ("enable_x64()" in advice) is not DOUBLE
    # these would name another cause
    assert not any("never moved" in text or "R-hat" in text for text in found)
    smooth = draws(30.0, 400)
    samples |= {"m": smooth["m"], "c": smooth["c"]}
    samples["c"][1], samples["m"][1] = 30.0, 0.3
    found = diagnose(to_inference_data(mcmc)).advice
    assert any("never moved" in text for text in found)
    assert not any("rounding errors" in text for text in found)
