"""Figures: what they show, not how they look."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from numpyro_minibatch import plots
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
