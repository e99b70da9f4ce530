"""The benchmark of several modes: its masses and the numbers on its page are right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.several_modes import limit, problems, report
from benchmarks.several_modes.record import PAGE, load
from benchmarks.several_modes.worker import measured

slow = pytest.mark.slow


def log_likelihood_of_tied(x, first, second):
    parts = [-0.25 * (x - m) ** 2 for m in (first, first + second)]
    return np.logaddexp(*parts).sum()


def test_masses_of_the_tied_means_do_not_depend_on_the_grid():
    """A finer grid gives the same, and so does a sum over a box that knows no modes."""
    (x,) = problems.tied_data(2000)
    found = problems.tied_truth(x)
    finer = problems.tied_truth(x, spacing=0.5)
    assert found.masses == pytest.approx(finer.masses, abs=1e-6)
    first, second = np.linspace(-1, 2, 121), np.linspace(-2.5, 2.5, 161)
    logs = np.array(
        [
            log_likelihood_of_tied(x.astype(float), a, b) - a**2 / 20 - b**2 / 2
            for a, b in itertools.product(first, second)
        ]
    ).reshape(len(first), -1)
    weights = np.exp(logs - logs.max())
    box = weights[:, second > 0].sum() / weights.sum()
    assert found.masses[0] == pytest.approx(box, abs=2e-3)


def test_masses_of_periods_agree_with_a_sum_over_all_three_parameters():
    """The two coefficients are integrated out in closed form."""
    nights = problems.Nights(nights=4, spread=0.02, highest=0.8, gain=20.0)
    t, y = nights.data(300)
    grid, weights = nights.density(t, y, points=161)
    axis = np.linspace(-2, 2, 161)
    phase = 2 * np.pi * grid[:, None] * t.astype(float)
    sine, cosine = np.sin(phase), np.cos(phase)
    # the likelihood is quadratic in both coefficients
    a, b = axis[:, None], axis[None]
    logs = [
        a * (s @ y)
        + b * (c @ y)
        - 0.5 * (a**2 * (s @ s) + b**2 * (c @ c) + 2 * a * b * (s @ c))
        - 0.5 * (a**2 + b**2) / nights.prior_sd**2
        for s, c in zip(sine, cosine, strict=True)
    ]
    sums = np.exp(np.array(logs) - np.max(logs)).sum((1, 2))
    np.testing.assert_allclose(sums / sums.sum(), weights, atol=1e-6)
    assert nights.aliases == pytest.approx([0.3, 0.7])
    near = nights.label({"frequency": np.array([0.1, 0.31, 0.69, 0.79])})
    assert near.tolist() == [0, 0, 1, 1]


def test_labels_of_mixtures_are_distinguished():
    draws = {"mean": np.array([list(order) for order in problems.ORDERS], float)}
    which = problems.order_of(draws)
    assert sorted(which) == list(range(6))
    weight = np.arange(18.0).reshape(6, 3)
    sorted_ = problems.in_order(draws | {"sd": weight, "weight": weight})
    assert (sorted_["mean[0]"] == 0).all() and (sorted_["mean[2]"] == 2).all()
    first = weight[np.arange(6), draws["mean"].argmin(1)]
    assert (sorted_["weight[0]"] == first).all()


def test_the_hidden_mode_has_the_mass_that_is_claimed():
    hidden = limit.Hidden()
    found = hidden.truth()
    assert found["masses"] == pytest.approx(hidden.truth(200)["masses"], abs=1e-6)
    assert abs(found["masses"][1] - limit.MASS) < 0.05
    ratio = found["moments"][0][1] / found["moments"][1][1]
    assert ratio > 200  # of the widths


def test_the_page_has_the_numbers_that_were_recorded():
    page = PAGE.read_text()
    assert report.written(page) == page
    for text in report.tables().values():
        assert text in page


def test_what_was_recorded_is_what_the_page_claims():
    for name, case in load("cases").items():
        found = report.masses_of(case)
        assert found["away"].max() < 0.01, name
        assert found["z"].max() < 3.0, name
        assert case["several"][0]["acceptance"] > 0.3, name
    results = load("limit")
    missed = [1 not in found["found"] for found in results["searches"]]
    assert len(missed) == 20 and sum(missed) == 18
    for method, run in results["runs"].items():
        away = abs(run["masses"][1] - results["truth"]["masses"][1])
        assert (away < 3 * run["errors"][1]) == (method != limit.SETTING)


@slow
def test_the_narrow_mode_is_missed():
    """The search reports that nothing is missing."""
    found = limit.searched(limit.Hidden())
    assert found["found"] == [0] and found["mode_missed"] == 0.0


@slow
def test_two_periods_have_their_masses():
    """Case c at a smaller size."""
    rows = 10_000
    case = problems.CASES["periods"]
    found = measured("periods", 4, rows, draws=500)
    truth = case.truth(*case.data(rows))
    assert found["pilot"]["num_modes"] == 2
    assert 0 < found["errors"][0] < 0.03
    assert abs(found["masses"][0] - truth.masses[0]) < 4 * found["errors"][0]
    assert found["acceptance"] > 0.8
    mean, error, sd, sd_error = found["known"]["|f - alias|"]
    exact = truth.moments["|f - alias|"]
    assert abs(mean - exact[0]) < 4 * error
    assert abs(sd - exact[1]) < 4 * sd_error
