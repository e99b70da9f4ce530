"""Figures: their contents, not their appearance."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from numpyro.infer import MCMC
from scipy.stats import norm

from numpyro_minibatch import (
    CyclicalSGHMC,
    Target,
    accept,
    plots,
    to_inference_data,
)
from numpyro_minibatch.inference_data import as_inference_data

mpl.use("Agg")

RUNG = np.array([[[0, 1, 2], [1, 0, 2], [2, 0, 1], [2, 1, 0]]] * 2)
RATES = np.array([[[0.5, np.nan], [np.nan, 0.25], [0.7, np.nan], [np.nan, 0.35]]] * 2)
HEAT = np.broadcast_to([1.0, 3.0, np.inf], RUNG.shape)


def ladder_run() -> object:
    stats = xr.Dataset(
        {
            "rung": (("chain", "draw", "replica"), RUNG),
            "swap_acceptance_rate": (("chain", "draw", "pair"), RATES),
            "temperatures": (("chain", "draw", "ladder"), HEAT),
        },
        coords={"draw": np.arange(4) * 5},
    )
    return as_inference_data({"sample_stats": stats}, {})


@pytest.fixture(autouse=True)
def _closed() -> object:
    yield
    plt.close("all")


def test_replica_paths() -> None:
    ax = plots.replica_paths(ladder_run(), chain=1)
    # drawn from the last to the first, which lies on top
    for line, path in zip(ax.lines, RUNG[1].T[::-1], strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [0, 5, 10, 15])
        np.testing.assert_array_equal(line.get_ydata(), path)
    colors = {line.get_color() for line in ax.lines[:-1]}
    assert ax.lines[-1].get_color() not in colors
    assert ax.get_xlabel() == "draw" and "rung" in ax.get_ylabel()
    assert "3 replicas, chain 1" in ax.get_title()


def test_swap_rates() -> None:
    _, given = plt.subplots()
    ax = plots.swap_rates(ladder_run(), ax=given)
    assert ax is given
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], [0.6, 0.3])
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1\n3", "3\ninf"]
    assert "barrier 1.10" in ax.get_title()
    assert ax.get_xlabel() and ax.get_ylabel()


def test_nothing_to_draw() -> None:
    empty = as_inference_data({"sample_stats": xr.Dataset()}, {})
    with pytest.raises(ValueError, match="no 'rung'"):
        plots.replica_paths(empty)
    with pytest.raises(ValueError, match="no 'swap_acceptance_rate'"):
        plots.swap_rates(empty)
    with pytest.raises(ValueError, match="chains 0 to 1"):
        plots.replica_paths(ladder_run(), chain=2)


def told_of(settings: dict) -> xr.Dataset:
    values = {"z": (("chain", "draw"), np.zeros((1, 1)))}
    return xr.Dataset(values, attrs={"settings": json.dumps(settings)})


def cycles_run(schedule: str = "", **settings: float) -> object:
    told = {"cycle_length": 20, "explore": 0.25, "collect_from": 0.8}
    told |= {"schedule": schedule, **settings}
    # two draws of two steps each in a cycle: after the steps 18 and 20
    steps = np.array([17, 19]) / 20
    size = 0.5 * 0.1 * (np.cos(np.pi * steps) + 1)
    stats = xr.Dataset(
        {
            "cycle": (("chain", "draw"), np.array([[0, 0, 1, 1]] * 2)),
            "step_size": (("chain", "draw"), np.tile(size, (2, 2))),
        }
    )
    posterior = told_of(told)
    return as_inference_data({"posterior": posterior, "sample_stats": stats}, {})


def test_cycles() -> None:
    cosine = "_CosineRestarts(step_size=1.0, cycle_length=20, power=1.0)"
    ax = plots.cycles(cycles_run(cosine), chain=1)
    first, second, *curves = ax.lines
    np.testing.assert_allclose(first.get_xdata(), [18, 20])
    np.testing.assert_allclose(second.get_xdata(), [38, 40])
    assert first.get_color() != second.get_color()
    assert first.get_marker() != second.get_marker()
    # the draws are on the curve, whose highest point is the longest step
    assert len(curves) == 2
    assert max(curves[0].get_ydata()) == pytest.approx(0.1)
    on = np.interp(18, curves[0].get_xdata(), curves[0].get_ydata())
    assert on == pytest.approx(first.get_ydata()[0], rel=0.02)
    assert [p.get_width() for p in ax.patches] == [5, 5]  # exploration
    assert ax.get_xlabel() and ax.get_ylabel() and "2 cycles" in ax.get_title()


def test_cycles_of_another_schedule_have_no_curve() -> None:
    assert len(plots.cycles(cycles_run("_Sawtooth()")).lines) == 2


def test_cycles_of_a_run_are_on_their_curve() -> None:
    def flat(z: object, rows: object) -> object:
        return 0.0 * rows * z

    target = Target(lambda z: -0.5 * z**2, flat, 4)
    kernel = CyclicalSGHMC(
        target=target, batch_size=2, h=0.01, b=0.1, cycle_length=40, num_steps=2
    )
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=2 * kernel.samples_per_cycle,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(()))
    first, second, curve, _ = plots.cycles(to_inference_data(mcmc)).lines
    assert first.get_xdata()[-1] == 40 and second.get_xdata()[-1] == 80
    assert max(curve.get_ydata()) == pytest.approx(0.1, rel=1e-3)  # sqrt(h)
    on = np.interp(first.get_xdata(), curve.get_xdata(), curve.get_ydata())
    np.testing.assert_allclose(on[:-1], first.get_ydata()[:-1], rtol=0.1)


def noise_run(variance: list[float], **settings: float) -> object:
    stats = xr.Dataset({"log_ratio_variance": (("chain", "draw"), [variance])})
    posterior = told_of(settings)
    return as_inference_data({"posterior": posterior, "sample_stats": stats}, {})


def test_decision_noise() -> None:
    # no row was read for the first, and the second is NaN
    run = noise_run([0.0, np.nan, 0.01, 0.04, 0.09, 4.0], max_variance=1.0)
    ax = plots.decision_noise(run)
    assert sum(bar.get_height() for bar in ax.patches) == 4
    assert ax.lines[0].get_xdata()[0] == 1.0
    assert "25% outside" in ax.get_title()
    assert "nats" in ax.get_xlabel() and ax.get_ylabel()
    wider = plots.decision_noise(run, max_variance=9.0)
    assert wider.lines[0].get_xdata()[0] == 3.0 and "0% outside" in wider.get_title()
    with pytest.raises(ValueError, match="no decision of this run had noise"):
        plots.decision_noise(noise_run([0.0, 0.0]))


def sampled(**stats: object) -> object:
    draws = np.random.default_rng(0).normal(size=(4, 400, 2))
    draws[..., 1] = np.repeat(draws[:, ::20, 1], 20, axis=1)  # a slow one
    groups = {
        "posterior": xr.Dataset({"z": (("chain", "draw", "axis"), draws)}),
        "sample_stats": xr.Dataset(
            {
                name: (("chain", "draw"), np.full((4, 400), value))
                for name, value in stats.items()
            }
        ),
        "observed_data": xr.Dataset({"y": (("row",), np.zeros(1000))}),
    }
    return as_inference_data(groups, {})


def test_rows_and_samples() -> None:
    runs = {"ours": sampled(num_rows=100), "NUTS": sampled(n_steps=7)}
    ax = plots.rows_and_samples(runs)
    ours, nuts = ax.lines
    assert ours.get_xdata()[-1] == 4 * 400 * 100
    assert nuts.get_xdata()[-1] == 4 * 400 * 7 * 1000
    np.testing.assert_allclose(ours.get_ydata(), nuts.get_ydata())
    assert 40 < ours.get_ydata()[-1] < 160  # 80 blocks: the slow entry
    assert ours.get_color() != nuts.get_color()
    assert ours.get_linestyle() != nuts.get_linestyle()
    with pytest.raises(ValueError, match="number of rows that run 'x' read"):
        plots.rows_and_samples({"x": sampled()})


def test_acceptance_curves() -> None:
    tests = {"ignores": accept.metropolis(), "pays": accept.penalty()}
    curves = plots.acceptance_curves(tests, sd=1.0)
    delta, ignored = curves.lines[0].get_xdata(), curves.lines[0].get_ydata()
    # by quadrature: E min(1, exp(delta + noise))
    exact = norm.cdf(delta) + np.exp(delta + 0.5) * norm.cdf(-delta - 1)
    np.testing.assert_allclose(ignored, exact, atol=1e-3)
    at_zero = np.interp(0, delta, curves.lines[1].get_ydata())
    assert at_zero == pytest.approx(2 * norm.cdf(-0.5), abs=1e-3)
    balance = plots.acceptance_curves(tests, sd=1.0, balance=True)
    wrong, right = (line.get_ydata() for line in balance.lines[:2])
    assert wrong[-1] < -0.4 and abs(right).max() < 5e-3
    assert {curves.get_xlabel(), balance.get_xlabel()} == {
        "true log ratio, delta (nats)"
    }
    with pytest.raises(ValueError, match="sd=-1"):
        plots.acceptance_curves(tests, sd=-1)


def test_mode_masses() -> None:
    """Shares of all draws, bands of two errors, and the Laplace approximation."""
    mode = (np.random.default_rng(0).uniform(size=(4, 1000)) < 0.3).astype(int)
    facts = {"pilot": {"mode_masses": [0.6, 0.4]}}
    run = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset(attrs={"facts": json.dumps(facts)}),
            "sample_stats": xr.Dataset({"mode": (("chain", "draw"), mode)}),
        }
    )
    ax = plots.mode_masses(run)
    share = mode.mean()
    bold = [line for line in ax.lines if line.get_label().startswith("mode")]
    ends = [line.get_ydata()[-1] for line in bold]
    assert ends == pytest.approx([1 - share, share])
    for number, line in enumerate(bold):
        end = line.get_xdata()[100 // 2]
        assert line.get_ydata()[100 // 2] == pytest.approx(
            (mode[:, : int(end)] == number).mean()
        )
    band = ax.collections[1].get_paths()[0].vertices
    width = np.ptp(band[band[:, 0] == 1000][:, 1])
    assert width == pytest.approx(4 * np.sqrt(0.21 / 4000), rel=0.25)
    dashed = {line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"}
    assert dashed == {0.6, 0.4}
    assert "Laplace" in ax.get_title()
    with pytest.raises(ValueError, match="MinibatchMH with control_variate.taylor2"):
        plots.mode_masses(ladder_run())


def test_mode_map() -> None:
    centers = np.array([[0.0, 0.0], [4.0, 4.0], [9.0, 9.0]])
    z = centers[np.random.default_rng(0).permutation(np.repeat([0, 1], [300, 100]))]
    posterior = xr.Dataset(
        {
            "z": (("chain", "draw", "axis"), z.reshape(2, 200, 2)),
            "w": (("chain", "draw"), z[:, 0].reshape(2, 200)),
        }
    )
    run = as_inference_data({"posterior": posterior}, {})
    ax = plots.mode_map(run, "z", centers=centers, masses=[0.5, 0.3, 0.2])
    shares = [text.get_text() for text in ax.texts]
    assert shares == ["75.0%\n(50.0%)", "25.0%\n(30.0%)", "0.0%\n(20.0%)"]
    assert "2 of 3 modes, total variation 0.250" in ax.get_title()
    assert ax.collections[0].get_array().sum() == 400  # every draw is shown
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("z[0]", "z[1]")
    assert plots.mode_map(run, ("w", "w")).get_ylabel() == "w"
    with pytest.raises(ValueError, match="1 numbers per draw"):
        plots.mode_map(run, "w")
    with pytest.raises(ValueError, match="1 numbers for 3 centers"):
        plots.mode_map(run, "z", centers=centers, masses=[1.0])
