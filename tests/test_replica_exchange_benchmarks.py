"""The benchmarks of replica exchange run, and their checks can fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.stats import multivariate_normal

from benchmarks.replica_exchange import (
    five_modes,
    mixture,
    modes,
    record,
    report,
    rival_ours,
    rivals,
)
from numpyro_minibatch import RENHD, accept
from numpyro_minibatch.accept import AcceptanceTest
from numpyro_minibatch.estimate import Estimate

# these compile for long and run briefly, so only on the main interpreter
pytestmark = pytest.mark.slow

CHAINS = 32


def independent(chains: int, number: int, weights: Any, sd: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    mode = rng.choice(len(weights), (chains, number), p=weights)
    return modes.CENTERS[mode] + sd * rng.normal(size=(chains, number, 2))


def standardised(found: dict[str, Any]) -> np.ndarray:
    """Errors of the shares and of the width, in Monte Carlo standard errors."""
    shares, variance = mixture.truth()
    errors = (np.array(found["shares"]) - shares) / np.array(found["shares_error"])
    width = (found["variance_ratio"] - 1.0) / found["variance_ratio_error"]
    return np.append(errors, width)


def test_the_truth_is_that_of_the_mixture() -> None:
    z = np.random.default_rng(1).normal(size=(50, 2), scale=4.0)
    parts = [multivariate_normal(c, modes.SD**2).pdf(z) for c in modes.CENTERS]
    expected = np.log(modes.WEIGHTS @ np.array(parts))
    found = np.asarray(modes.log_density(z))
    np.testing.assert_allclose(found - found[0], expected - expected[0], rtol=1e-4)
    shares, variance = mixture.truth()
    np.testing.assert_allclose(shares, modes.WEIGHTS, atol=1e-5)
    np.testing.assert_allclose(variance, modes.SD**2, rtol=1e-4)


def test_rows_have_the_noise_that_they_are_said_to_have() -> None:
    c = mixture.slopes(25.0)
    np.testing.assert_allclose(c.sum(0), 0.0, atol=1e-9)
    fpc = 1 - mixture.WIDTH / mixture.SIZE
    noise = mixture.SIZE**2 * np.cov(c.T) / mixture.WIDTH * fpc
    np.testing.assert_allclose(noise, 25.0 * np.eye(2), atol=1e-9)


def test_independent_draws_are_found_to_be_right_and_others_wrong() -> None:
    found = mixture.held_against(independent(CHAINS, 500, modes.WEIGHTS, modes.SD))
    assert np.abs(standardised(found)).max() < 5.5
    assert found["total_variation"] < 3 * found["total_variation_expected"]
    for key in ("ess_alone", "ess_arviz", "ess_modes"):
        assert 0.8e5 < found[key] < 1.25e5
    wide = mixture.held_against(independent(CHAINS, 500, modes.WEIGHTS, 1.1 * modes.SD))
    assert standardised(wide)[-1] > 10
    even = mixture.held_against(independent(CHAINS, 500, np.full(5, 0.2), modes.SD))
    assert np.abs(standardised(even)[:5]).max() > 10


def test_round_trips_by_hand() -> None:
    path = np.array([1, 2, 0, 0, 1, 2, 1, 2, 1, 0, 1, 2, 0])  # up to the top twice
    still = np.ones_like(path)
    assert modes.round_trips(np.stack([path, still], -1)) == 2
    assert modes.round_trips(np.stack([path[:9], still[:9]], -1)) == 0
    both = np.stack([np.stack([path, still], -1)] * 3)
    assert modes.round_trips(both) == 6


@pytest.fixture(scope="module")
def paper() -> Any:
    """RENHD at the paper's noise, a hundredth of its draws."""
    kernel = five_modes.methods(five_modes.PAPER_NOISE)["RENHD"]()
    return five_modes.sample(kernel, CHAINS, 150, 60)


@pytest.mark.slow
def test_five_modes(paper: Any) -> None:
    found, draws, rung = five_modes.measured(paper)
    assert np.abs(standardised(found)).max() < 5.5, found
    assert found["modes_a_chain"] > 4 and found["diverging"] == 0
    assert rung is not None and rung.shape == (CHAINS, 150, 7)
    # one rule for all methods, the kernel's own; trips that began in the warmup do not
    # show in the draws
    trips = modes.round_trips(rung)
    assert 0 <= found["round_trips"] - trips <= 7 * CHAINS
    assert trips > 0
    assert draws.shape == (CHAINS, 150, 2)


@dataclass(frozen=True)
class Inverted(AcceptanceTest):
    """The sign of the energy difference as printed in the paper's equation 7."""

    max_variance = 1.0

    def probability(self, log_ratio: Estimate) -> Any:
        return accept.penalty().probability(-1.0 * log_ratio)


@pytest.mark.slow
def test_a_swap_with_the_wrong_sign_is_found() -> None:
    kernel = RENHD(
        target=mixture.target(five_modes.PAPER_NOISE),
        batch_size=mixture.WIDTH,
        step_size=five_modes.STEP_SIZE,
        num_steps=five_modes.NUM_STEPS,
        swap=Inverted(),
    )
    found, _, _ = five_modes.measured(five_modes.sample(kernel, CHAINS, 150, 60))
    assert np.abs(standardised(found)).max() > 10


def test_the_command_writes_results(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, Any] = {}
    monkeypatch.setattr(
        five_modes, "save", lambda name, content, text: written.update({name: text})
    )
    five_modes.main(
        ["--draws", "160", "--chains", "4", "--warmup", "5", "--noise", "0.25"]
        + ["--methods", "SGNHT alone"]
    )
    assert "|SGNHT alone|" in written["five_modes"]
    assert "modes that a chain sees" in written["five_modes"]


def test_the_figure(tmp_path: Any) -> None:
    z = independent(2, 60, modes.WEIGHTS, modes.SD)
    rung = np.tile(np.arange(7), (2, 60, 1))
    kept = {"RENHD": (mixture.held_against(z), z, rung)}
    five_modes.draw(kept, 0.25, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_ten_lines_of_parallel_tempering() -> None:
    keys = random.split(random.key(0), CHAINS)
    run = jax.jit(
        jax.vmap(lambda k, z: rival_ours.plain(k, z, 400, 100, 0.27, 3)),
    )
    z, rung, accepted = run(keys, jnp.zeros((CHAINS, 2)))
    z, rung = np.asarray(z, np.float64), np.asarray(rung)
    found = mixture.held_against(z)
    assert np.abs(standardised(found)).max() < 5.5, found
    assert accepted.mean() > 0.8
    assert (np.sort(rung, -1) == np.arange(7)).all()
    scores = rivals.scores(z, rung, {"gradients": 28})
    total = scores["thousands_of_gradients"] * CHAINS
    assert scores["round_trips"] * total == modes.round_trips(rung) > 0
    # two estimates of the effective sample size agree within the error of 32 chains
    assert 0.3 < scores["modes_ess"] / scores["indicator_ess"] < 3.5


@pytest.mark.slow
def test_a_rival_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}
    monkeypatch.setattr(
        rivals, "save", lambda name, content, text: written.update({name: text})
    )
    name = "ReplicaExchange(AMAGOLD), full batch, no friction"
    rivals.main(["--methods", name, "--chains", "4", "--draws", "20", "--warmup", "10"])
    assert f"|{name}|21|" in written["rivals"]  # seven rungs of three gradients


def test_tables_of_the_recorded_results() -> None:
    for name, made in report.TABLES.items():
        if (record.RESULTS / f"{name}.json").exists():
            assert "|---" in made(record.load(name, record.RESULTS))
