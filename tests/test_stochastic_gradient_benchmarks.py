"""The benchmarks of the stochastic-gradient kernels run, at sizes too small for
results."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.stochastic_gradient import (
    amagold_speed,
    bias,
    double_well,
    logistic,
    record,
    report,
    step_speed,
)

# these compile for long and run briefly, so only on the main interpreter
pytestmark = pytest.mark.slow


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The results of a script, in a folder of the test."""
    found = {}
    for script in (bias, double_well, logistic, step_speed):
        monkeypatch.setattr(
            script, "save", lambda name, content: found.update({name: content})
        )
    return found


def test_double_well(written, monkeypatch):
    every = double_well.methods
    names = ("AMAGOLD, irreversible",)
    monkeypatch.setattr(
        double_well, "methods", lambda n: {name: every(n)[name] for name in names}
    )
    double_well.main(["--draws", "40", "--chains", "2", "--step-sizes", "0.1", "0.2"])
    runs = written["double_well"]["runs"]
    assert [(run["method"], run["step_size"]) for run in runs] == [
        (name, h) for name in names for h in (0.1, 0.2)
    ]
    assert all(0 < run["acceptance"] <= 1 for run in runs)


def test_symmetric_kl_is_zero_for_the_truth_only():
    equal = np.full(double_well.BINS, 1 / double_well.BINS)
    assert abs(double_well.symmetric_kl(equal, 100_000)) < 1e-12
    uneven = equal * np.linspace(0.5, 1.5, double_well.BINS)
    assert double_well.symmetric_kl(uneven / uneven.sum(), 100_000) > 0.05


def test_noise_of_the_double_well_has_variance_one():
    target = double_well.target()
    rows = np.arange(double_well.SIZE)
    slopes = np.asarray(target.log_likelihood(1.0, rows)) - np.asarray(
        target.log_likelihood(0.0, rows)
    )
    slopes -= slopes.mean()
    fpc = 1 - double_well.WIDTH / double_well.SIZE
    variance = double_well.SIZE**2 * slopes.var(ddof=1) / double_well.WIDTH * fpc
    np.testing.assert_allclose(variance, 1.0, rtol=1e-3)


def test_leading_order_of_the_bias():
    """By hand: curvature 1.06, noise 40,000 / 50 * 0.75 / 196 = 3.061."""
    known = bias.theory("SGHMC", 0.1, 50, 10.0, 1.0)
    np.testing.assert_allclose(known["gradient_noise"], 3.0612, rtol=1e-4)
    np.testing.assert_allclose(known["predicted_ratio"], 1 + 0.015306, rtol=1e-4)
    assert bias.theory("SGNHT", 0.1, 50, 10.0, 1.0)["predicted_ratio"] == 1.0


def test_bias(written, monkeypatch):
    every = bias.makers
    monkeypatch.setattr(bias, "makers", lambda *a: {"SGNHT": every(*a)["SGNHT"]})
    bias.main(
        ["--draws", "20", "--chains", "2", "--batch-sizes", "50"]
        + ["--temperatures", "4", "--frictions", "1"]
    )
    runs = written["bias"]["runs"]
    assert [run["step_size"] for run in runs] == list(bias.STEP_SIZES["SGNHT"])
    assert all(np.isfinite(run["measured_ratio"]) for run in runs)


def test_logistic(written, monkeypatch):
    every = logistic.methods
    monkeypatch.setattr(
        logistic, "methods", lambda *a: {n: every(*a)[n] for n in ("AMAGOLD",)}
    )
    logistic.main(
        ["--data", "simulated", "--draws", "20", "--full-draws", "20", "--chains", "2"]
        + ["--reference-draws", "20", "--step-sizes", "0.01"]
    )
    runs = written["logistic"]["runs"]
    assert [run["method"] for run in runs] == ["AMAGOLD"]
    assert all(run["mse_sd"] >= 0 for run in runs)


def test_steps_of_ours_are_measured():
    problem = step_speed.normal(500, 2)
    runs = {"ours": step_speed.ours("sgnht", problem, 20, 10, None)}
    seconds = step_speed.paired(runs, 2)
    assert len(seconds["ours"]) == 2 and min(seconds["ours"]) > 0


def test_amagold_is_measured(monkeypatch):
    monkeypatch.setitem(amagold_speed.PROBLEMS, "tiny", (200, 3, 20, 1e-2, 1.0))
    found = amagold_speed.worker("tiny", "ours", 10)
    assert found["steps_per_second"] > 0 and 0 < found["acceptance"] <= 1


def test_tables_of_the_recorded_results():
    for name, table in report.TABLES.items():
        if (record.RESULTS / f"{name}.json").exists():
            assert "|---" in table(record.load(name))
