"""The benchmarks of the cyclical kernels run, at sizes too small for results."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cyclical import gaussians, networks, uci
from benchmarks.stochastic_gradient.record import load

# these compile for long and run briefly, so only on the main interpreter
pytestmark = pytest.mark.slow


def test_gaussians(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--steps", "95", "--cycles", "3", "--runs", "2"]
    gaussians.main([*arguments, "--out", str(tmp_path)])
    rows = {row["sampler"]: row for row in load("gaussians", tmp_path)["samplers"]}
    # cycles of 32 steps, 26 of them before collection, the last one cut short by one
    assert rows["cSGLD"]["draws"] == 6 + 6 + 5
    assert rows["SGLD"]["draws"] == 95
    assert (tmp_path / "gaussians.png").exists()


def test_modes_are_counted_as_in_the_paper() -> None:
    """More than 100 draws within 0.25 of a centre."""
    near = gaussians.CENTERS[[3]] + [[0.2, 0.1]]
    far = gaussians.CENTERS[[5]] + [[0.2, 0.2]]
    draws = np.concatenate([near.repeat(101, 0), far.repeat(500, 0)])
    assert gaussians.modes_found(draws) == 1
    assert gaussians.modes_found(draws[1:]) == 0
    assert gaussians.within(near) == pytest.approx(0.025)
    assert gaussians.balance(gaussians.CENTERS) == pytest.approx(0)
    assert gaussians.balance(near) == pytest.approx(0.96)


@pytest.mark.slow
def test_uci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3)).astype(np.float32)
    y = (X[:, 0] + rng.normal(size=120) > 0).astype(np.float32)
    monkeypatch.setattr(uci, "load", lambda name: (X, y))
    monkeypatch.setattr(
        uci, "reference", lambda X, y, draws: rng.normal(size=(draws, 3))
    )
    monkeypatch.setattr(uci, "DESIGNS", {"few": uci.Design(20, 2, (0.05,))})
    arguments = ["--data", "heart", "--designs", "few", "--draws", "50"]
    arguments += ["--burn-in", "50", "--chains", "2", "--reference", "10"]
    uci.main([*arguments, "--out", str(tmp_path)])
    found = load("uci", tmp_path)
    assert [run["sampler"] for run in found["runs"]] == list(uci.PAPER)
    assert all(0 < run["ess"] < 500 for run in found["runs"])


def test_what_steps_make_of_a_normal_posterior() -> None:
    """The stated variance and effective size, against sums of autocovariances."""
    curvatures, n = np.array([1.0, 0.25]), 5000
    found = uci.expected(np.diag(curvatures), 1.9, n)
    ess, ratio = [], []
    for curvature in curvatures:
        keep = 1 - 1.9 * curvature
        variance = 2 * 1.9 / (1 - keep**2)
        lags = keep ** np.arange(1, 2000)
        ess.append(n / (1 + 2 * lags.sum()))
        ratio.append((variance * curvature) ** 0.5)
    assert found["ess"] == pytest.approx(np.median(ess), rel=1e-6)
    assert found["sd_ratio"] == pytest.approx(np.median(ratio), rel=1e-6)


@pytest.mark.slow
def test_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network on noise, with the same number of steps for each method."""
    rng = np.random.default_rng(0)
    size = networks.Size(80, 20, 10, 10, (4,), 0.01, 0.01, 0.5, 0.6)
    X = jnp.asarray(rng.normal(size=(100, 6)), jnp.float32)
    y = jnp.asarray(rng.integers(10, size=100))
    task = networks.Task(
        networks.example.Network((4,)), X[:80], y[:80], X[80:], y[80:], X[80:]
    )
    monkeypatch.setattr(networks, "SIZES", {"mnist": size})
    monkeypatch.setattr(networks, "task", lambda name, size: task)
    some = ["SGD", "Snapshot", "cSGHMC"]
    seeds = ["--seeds", "0", "1"]
    networks.main(["mnist", "--out", str(tmp_path), *seeds, "--methods", *some])
    methods = load("mnist", tmp_path)["methods"]
    members = {name: found["members"] for name, found in methods.items()}
    assert members == dict.fromkeys(methods, 12) | {"SGD": 1, "Snapshot": 4}
    assert methods["cSGHMC"]["gradient_steps"] == 80
    assert methods["cSGHMC"]["standard_errors"]["nll"] > 0
    assert (tmp_path / "mnist.png").exists()


def test_filter_responses_have_no_state() -> None:
    net = networks.Residual((4, 8))
    x = np.random.default_rng(0).normal(size=(3, 8, 8, 3)).astype(np.float32)
    variables = jax.jit(net.init)(jax.random.key(0), x)
    assert set(variables) == {"params"}
    # an image's output does not depend on the others of its batch
    apply = jax.jit(net.apply)
    alone = np.asarray(apply(variables, x[:1]))
    np.testing.assert_allclose(apply(variables, x)[:1], alone, rtol=2e-4, atol=1e-5)
