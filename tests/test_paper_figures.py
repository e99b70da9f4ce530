"""The reproduced figures of the papers: the computations behind their numbers."""

from __future__ import annotations

import math
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

from benchmarks.papers import amagold_plane, mint_network, mnist_pair
from numpyro_minibatch import MINT

CELLS = amagold_plane.CELLS


@pytest.mark.parametrize("name", amagold_plane.DENSITIES)
def test_cells_have_equal_probability_under_the_density(name):
    """Checked by quadrature of the density alone, and on independent draws."""
    log_density, uniform, draw = amagold_plane.DENSITIES[name]
    x, y = np.linspace(-9.0, 22.0, 1240), np.linspace(-9.5, 9.5, 1000)
    if name == "cross":
        x = y
    points = jnp.stack(jnp.meshgrid(jnp.array(x), jnp.array(y)), -1).reshape(-1, 2)
    weights = np.exp(np.asarray(jax.vmap(log_density)(points), float))
    place = jax.jit(jax.vmap(partial(amagold_plane.cell, uniform)))
    shares = np.bincount(np.asarray(place(points)), weights, CELLS) / weights.sum()
    # if a side crosses a grid square, its point may count for either cell
    np.testing.assert_allclose(shares * CELLS, 1.0, atol=0.05)
    n = 100_000
    z = jnp.asarray(draw(np.random.default_rng(2), n), jnp.float32)
    counts = np.bincount(np.asarray(place(z)), minlength=CELLS)
    chi_square = float(((counts - n / CELLS) ** 2).sum() * CELLS / n)
    freedom = CELLS - 1
    assert abs(chi_square - freedom) < 4.5 * math.sqrt(2 * freedom)
    assert amagold_plane.symmetric_kl(counts) == pytest.approx(chi_square / n, rel=0.1)
    # draws a tenth too wide, as from too high a temperature, are detected
    counts = np.bincount(np.asarray(place(1.1 * z)), minlength=CELLS)
    assert amagold_plane.symmetric_kl(counts) > 5 * freedom / n


def test_a_draw_that_is_not_finite_is_in_no_cell():
    place = partial(amagold_plane.cell, amagold_plane.uniform_banana)
    assert int(place(jnp.array([jnp.nan, 0.0]))) == CELLS
    assert int(place(jnp.array([jnp.inf, 0.0]))) == CELLS


def test_symmetric_divergence_by_hand():
    half = np.where(np.arange(CELLS) < CELLS // 2, 3.0, 1.0) * 1e6
    assert amagold_plane.symmetric_kl(half) == pytest.approx(0.25 * np.log(3), rel=1e-5)
    assert amagold_plane.symmetric_kl(np.full(CELLS, 7.0)) == pytest.approx(0.0)


def test_noise_of_gradients_in_the_plane_is_standard_normal():
    size, width = amagold_plane.SIZE, amagold_plane.WIDTH
    target = amagold_plane.target(amagold_plane.log_cross)
    rows = jnp.arange(size)
    z = jnp.array([0.3, -0.2])
    gradients = np.asarray(jax.jacobian(lambda z: target.log_likelihood(z, rows))(z))
    exact = np.asarray(jax.grad(amagold_plane.log_cross)(z))
    np.testing.assert_allclose(gradients.sum(0), exact, atol=1e-4)
    covariance = size**2 / width * (1 - width / size) * np.cov(gradients.T)
    np.testing.assert_allclose(covariance, np.eye(2), atol=1e-4)


@pytest.mark.slow
def test_amagold_keeps_the_cross_and_sghmc_does_not(tmp_path, monkeypatch):
    every = amagold_plane.methods
    kept = ("AMAGOLD", "SGHMC")
    monkeypatch.setattr(
        amagold_plane, "methods", lambda density: {k: every(density)[k] for k in kept}
    )
    monkeypatch.delitem(amagold_plane.DENSITIES, "banana")
    amagold_plane.main(
        ["step_sizes", "--draws", "16000", "--chains", "32"]
        + ["--step-sizes", "0.15", "0.5", "--folder", str(tmp_path)]
    )
    found = amagold_plane.load("amagold_plane_step_sizes", tmp_path)["runs"]
    error = {(run["method"], run["step_size"]): run["symmetric_kl"] for run in found}
    floor = (CELLS - 1) / 16_000
    assert error["AMAGOLD", 0.15] < 3 * floor
    assert error["SGHMC", 0.5] > 15 * floor
    accepted = {run["step_size"]: run["acceptance"] for run in found[:2]}
    assert 0.9 > accepted[0.15] > accepted[0.5] > 0.1
    assert (tmp_path / "amagold_plane.png").stat().st_size > 10_000


@pytest.mark.slow
def test_chains_come_from_the_middle_to_the_banana(tmp_path, monkeypatch):
    every = amagold_plane.methods
    monkeypatch.setattr(
        amagold_plane, "methods", lambda density: {"L2MC": every(density)["L2MC"]}
    )
    monkeypatch.setattr(amagold_plane, "slowdown", lambda _: [])
    monkeypatch.setattr(amagold_plane, "draw_iterations", lambda *_: None)
    amagold_plane.main(
        ["iterations", "--iterations", "300", "--chains", "4", "--crowd", "1500"]
        + ["--folder", str(tmp_path)]
    )
    (run,) = amagold_plane.load("amagold_plane_iterations", tmp_path)["runs"]
    crowd, floor = run["at_iteration"], (CELLS - 1) / 1500
    assert crowd[0] > 5 * floor > 5 / 1.5 * np.mean(crowd[80:])
    number, divergence, _ = run["so_far"][-1]
    # 0.43 at 281 iterations of 64 chains in the recorded results
    assert number == 300 and 0.25 < divergence < 0.6


def test_slowdown_of_a_curve_that_is_three_times_as_slow():
    n = np.geomspace(10, 1e5, 30)
    both = {"L2MC": 50 / n, "AMAGOLD": 150 / n}
    runs = [
        {"method": name, "so_far": np.column_stack([n, error, 0 * n]).tolist()}
        for name, error in both.items()
    ]
    factors = amagold_plane.slowdown(runs)
    assert len(factors) > 5
    np.testing.assert_allclose(factors, 3.0, rtol=1e-6)


@pytest.fixture(scope="module")
def pair():
    """Rows of two classes that five columns sometimes distinguish."""
    from benchmarks.batch_size_problems import logistic

    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 5))
    y = (rng.random(600) < 1 / (1 + np.exp(-3 * x[:, 0]))).astype(float)
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    prior = dist.ImproperUniform(constraints.real_vector, (), (5,))
    halves = [tuple(part[s] for part in data) for s in (slice(400), slice(400, 600))]
    return mnist_pair.Images(partial(logistic, prior), *halves)


def test_temperature_of_the_paper():
    """N ** (1 - lambda): 13,007 / 100 ** 0.99."""
    assert mnist_pair.temperature(13_007) == pytest.approx(13_007 / 100**0.99)
    kernel = MINT(lambda: None, batch_size=100, alpha=mnist_pair.ALPHA)
    assert kernel._exponent == ("alpha", 0.99)


def test_means_of_batches_are_standardised():
    rng = np.random.default_rng(0)
    z = mnist_pair.standardised_means(rng.normal(3.0, 2.0, size=1000), 2000)
    assert abs(z.mean()) < 4.5 / math.sqrt(2000)
    assert abs(z.var() - 1.0) < 4.5 * math.sqrt(2 / 2000)
    # if one row carries everything, nine of ten batches miss it
    z = mnist_pair.standardised_means(np.eye(1, 1000)[0], 2000)
    assert np.mean(z < 0) > 0.85


def test_what_a_path_learned_is_read_off_at_the_right_place(pair):
    """At zero only class 0 is predicted correctly; one direction is correct for most
    rows."""
    x, y = pair.test
    good = np.array([3.0, 0.0, 0.0, 0.0, 0.0])
    beta = np.stack([np.where(np.arange(40)[:, None] < k, 0.0, good) for k in (10, 20)])
    num_rows = np.stack([np.full(40, 100.0), np.full(40, 50.0)])
    run = mnist_pair.Drawn(beta, num_rows)
    found = mnist_pair.learned(run, pair, np.cumsum(num_rows, 1))
    share = float(((np.asarray(x) @ good > 0) == np.asarray(y)).mean())
    accuracy = np.array(found["accuracy"])
    np.testing.assert_allclose(accuracy[:, -1], share, rtol=1e-6)
    np.testing.assert_allclose(accuracy[:, 0], np.mean(np.asarray(y) == 0), rtol=1e-6)
    np.testing.assert_allclose(
        np.array(found["log_likelihood"])[:, 0], -math.log(2), rtol=1e-5
    )
    assert found["moved"] == pytest.approx(2 / 78)
    assert [rows[-1] for rows in found["rows"]] == [4000.0, 2000.0]


@pytest.mark.slow
def test_batches_are_found_normal_or_not(pair, monkeypatch):
    monkeypatch.setattr(mnist_pair, "LENGTHS", {"tempered MCMC": 0.5, "MCMC": 0.2})
    runs = mnist_pair.is_normal(pair, 200, 4000)
    assert [run["rows"] for run in runs] == ["log likelihood", "log ratio"] * 3
    for run in runs:
        # a mean of 100 rows has a tenth of their skewness, up to the share that is read
        expected = run["skewness_of_rows"] / 10 * (1 - 2 * 0.25) / math.sqrt(0.75)
        assert abs(run["skewness"] - expected) < 4.5 * math.sqrt(6 / 4000)
        assert run["distance"] < 0.15
        middle = run["quantiles"][len(run["quantiles"]) // 2]
        assert abs(middle) < 0.3


@pytest.mark.slow
def test_tempered_chains_fit_worse_than_one_at_temperature_one(pair, monkeypatch):
    lengths = {"MINT": 1.0, "tempered MCMC": 1.0, "MCMC": 0.3}
    monkeypatch.setattr(mnist_pair, "LENGTHS", lengths)
    runs = {run["method"]: run for run in mnist_pair.over_passes(pair, 2, 2000)}
    assert list(runs) == ["MINT", "MINT with penalty", "tempered MCMC", "MCMC"]
    fit = {name: run["second_half_log_likelihood"][0] for name, run in runs.items()}
    assert fit["MCMC"] > fit["tempered MCMC"] + 0.008
    assert all(run["rows"][0][0] == 100 for run in list(runs.values())[:2])
    assert runs["MCMC"]["rows"][0][:2] == [400, 800]


@pytest.mark.slow
def test_accuracy_over_rows(pair):
    runs = {run["method"]: run for run in mnist_pair.over_rows(pair, 2, 30)}
    assert len(runs) == 5
    assert runs["Metropolis, all rows"]["rows_a_decision"] == 400
    assert 100 <= runs["MHMinibatch"]["rows_a_decision"] <= 400
    for run in runs.values():
        rows = np.array(run["rows"])
        assert (np.diff(rows, axis=1) > 0).all()


@pytest.mark.slow
def test_figures_of_the_recorded_results(tmp_path):
    from benchmarks.papers.record import RESULTS, load

    drawn = {
        "amagold_plane_step_sizes": amagold_plane.draw_step_sizes,
        "amagold_plane_iterations": amagold_plane.draw_iterations,
        "mnist_pair_normality": mnist_pair.draw_normality,
        "mnist_pair_passes": mnist_pair.draw_passes,
        "mnist_pair_rows": mnist_pair.draw_rows,
        "mint_network": mint_network.draw,
    }
    for name, draw in drawn.items():
        if (RESULTS / f"{name}.json").exists():
            draw(load(name, RESULTS), tmp_path / f"{name}.png")
            assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def three_classes():
    """A linear classifier of points around the corners of a triangle."""
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=500)
    X = np.eye(3)[y] * 2 + rng.normal(size=(500, 3))
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y)

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 3]).to_event(2))
        with numpyro.plate("images", len(X)) as i:
            numpyro.sample("y", dist.Categorical(logits=X[i] @ w), obs=y[i])

    images = types.SimpleNamespace(X=X[:300], y=y[:300], X_test=X[300:], y_test=y[300:])
    return model, lambda draw, rows: rows @ draw["w"], images


def test_error_and_fit_of_draws_by_hand(three_classes):
    """Accuracy for correct weights, zero weights and reversed weights."""
    _, logits, images = three_classes
    w = jnp.stack([-jnp.eye(3), jnp.zeros((3, 3)), 2 * jnp.eye(3)])
    found = mint_network.judged(logits, {"draws": {"w": w}, "passes": [1]}, images)
    y, highest = np.asarray(images.y_test), np.asarray(images.X_test).argmax(-1)
    wrong = 100 * float((highest != y).mean())
    assert found["error_percent"][2] == pytest.approx(wrong)
    assert found["error_percent"][0] > 80 > 40 > wrong
    assert found["nll"][1] == pytest.approx(math.log(3), rel=1e-5)
    assert "draws" not in found and found["members"] == 3


def test_descent_gets_there(three_classes):
    _, logits, images = three_classes
    found = mint_network.descend(logits, images, {"w": jnp.zeros((3, 3))}, 4, 20)
    nll = mint_network.judged(logits, found, images)["nll"]
    assert len(nll) == 4 and nll[-1] < 0.7 * math.log(3)


@pytest.mark.slow
def test_mint_on_a_network_and_its_cycles(three_classes):
    model, logits, images = three_classes
    start = {"w": jnp.zeros((3, 3))}
    hot = mint_network.temperature(300, 20)
    assert hot == pytest.approx(300 ** (1 - 0.99 * math.log(20) / math.log(300)))
    kernel, adapts = mint_network.kernels(model, 300, 20, start)["MINT"]
    assert adapts and kernel.temperature == pytest.approx(hot)
    found = mint_network.sample(kernel, images, 160, True)
    assert 0.1 < found["acceptance"] < 0.97
    assert len(found["passes"]) == len(found["draws"]["w"]) == 160
    nll = mint_network.judged(logits, found, images)["nll"]
    assert np.mean(nll[80:]) < math.log(3)
    ends = mint_network.cyclical(model, images, start, found["step_size"], 40, 20)
    assert ends["draws"]["w"].shape == (mint_network.CYCLES, 3, 3)
    assert ends["passes"][-1] == pytest.approx(40, rel=0.05)
