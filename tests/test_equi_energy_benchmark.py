"""The experiment of the MINTEE paper, small: modes of a mixture whose labels switch."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.equi_energy import fifty_modes

# this compiles for long and runs briefly, so only on the main interpreter
pytestmark = pytest.mark.slow


def test_modes_are_distinguished():
    z = np.array([[2.1, 0.0], [0.3, 1.8], [1.9, 2.2], [0.0, 0.1]])
    np.testing.assert_array_equal(fifty_modes.mode_of(z), [0, 1, -1, -1])


def test_shares_that_are_even_and_not():
    rng = np.random.default_rng(0)
    even = fifty_modes.shares(rng.integers(10, size=(4, 2000)), 10)
    assert even["modes_visited"] == 10 and even["p_value"] > 1e-4
    # within the scatter of 27 degrees of freedom
    assert 3500 < even["effective_sample_size"] < 25_000
    uneven = rng.choice(10, size=(4, 2000), p=np.arange(1, 11) / 55)
    assert fifty_modes.shares(uneven, 10)["p_value"] < 1e-6


def test_rounded_data_have_the_same_posterior():
    x = fifty_modes.simulate(5000, 3)
    z = np.array([1.5, 0.2, -0.1], np.float32)
    sums = [
        float(target.log_likelihood(z, np.arange(target.sizes)).sum())
        for target in (fifty_modes.mixture(x, 3), fifty_modes.mixture(x, 3, 0.01))
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)


@pytest.mark.slow
def test_every_mode_is_visited_evenly(monkeypatch):
    monkeypatch.setattr(fifty_modes, "save", lambda *arguments: None)
    found = fifty_modes.main(["--small"])
    mintee, plain = found["mintee"], found["plain"]
    assert mintee["modes_visited"] == 5 and mintee["p_value"] > 1e-4
    assert max(mintee["energy_noise"]) < 1
    # each chain stays in the first mode that it reaches
    assert plain["changes_of_mode"] < mintee["changes_of_mode"] / 10
    assert plain["rows_read"] < mintee["rows_read"]
