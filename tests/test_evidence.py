"""Ladders that end at the prior: NumPyro's kernels as rungs, and the evidence."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
import xarray as xr
from compiling import quick_flags
from jax import random
from numpyro import handlers
from numpyro.infer import HMC, MCMC, NUTS, BarkerMH

from numpyro_minibatch import (
    AMAGOLD,
    SGHMC,
    MinibatchMH,
    ReplicaExchange,
    Target,
    batch,
    log_evidence,
    to_inference_data,
)
from numpyro_minibatch.inference_data import as_inference_data

slow = pytest.mark.slow

# a linear regression, whose tempered posteriors and evidence are known
N, SD = 60, 1.5
_rng = np.random.default_rng(3)
X = _rng.normal(size=(N, 2))
Y = X @ np.array([1.0, -0.5]) + SD * _rng.normal(size=N)
LADDER = [1.0, 3.0, 10.0, 40.0, math.inf]
CHAINS = 4


def model(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(x @ b, SD), obs=y)


def subsampled(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", N, subsample_size=20) as i:
        numpyro.sample("obs", dist.Normal(x[i] @ b, SD), obs=y[i])


def posterior(temperature: float, temper_prior: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance at a temperature."""
    prior = 1.0 / temperature if temper_prior else 1.0
    covariance = np.linalg.inv(X.T @ X / SD**2 / temperature + prior * np.eye(2))
    return covariance @ X.T @ Y / SD**2 / temperature, covariance


def mean_energy(temperature: float) -> float:
    """The mean log likelihood at a temperature."""
    mean, covariance = posterior(temperature, False)
    residual = Y - X @ mean
    squares = residual @ residual + np.trace(X @ covariance @ X.T)
    return -0.5 * N * math.log(2 * math.pi * SD**2) - 0.5 * squares / SD**2


EVIDENCE = float(
    scipy.stats.multivariate_normal.logpdf(Y, np.zeros(N), X @ X.T + SD**2 * np.eye(N))
)


def run(kernel: Any, seed: int = 0, **settings: Any) -> Any:
    mcmc = MCMC(
        kernel,
        **{
            "num_warmup": 300,
            "num_samples": 2000,
            "num_chains": CHAINS,
            "chain_method": "vectorized",
            "progress_bar": False,
            **settings,
        },
    )
    mcmc.run(random.key(seed), X.astype(np.float32), Y.astype(np.float32))
    return to_inference_data(mcmc)


def standard_errors(values: Any, expected: Any) -> np.ndarray:
    """The errors of the means of ``(chain, draw, ...)``, in standard errors."""
    # batches of draws, long compared with the autocorrelation
    values = np.asarray(values, float)
    batches = values.reshape(-1, 250, *values.shape[2:]).mean(1)
    error = batches.std(0, ddof=1) / math.sqrt(len(batches))
    return np.abs(batches.mean(0) - expected) / error


def assert_distributions(idata: Any, temper_prior: bool) -> None:
    draws = idata["rungs"]["b"].transpose("chain", "draw", "ladder", ...).values
    temperatures = idata["sample_stats"]["temperatures"].values[0, -1]
    for rung, temperature in enumerate(temperatures):
        mean, covariance = posterior(float(temperature), temper_prior)
        b = draws[:, :, rung].astype(float)
        assert standard_errors(b, mean).max() < 5.5, (rung, b.mean((0, 1)), mean)
        squares = np.square(b - mean)
        worst = standard_errors(squares, np.diag(covariance)).max()
        assert worst < 5.5, (rung, squares.mean((0, 1)), covariance)


# NumPyro's kernels -------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("inner", "temper_prior"),
    [
        (HMC(model, num_steps=4, trajectory_length=None), False),
        pytest.param(NUTS(model, dense_mass=True), False, marks=slow),
        pytest.param(BarkerMH(subsampled), False, marks=slow),
        pytest.param(
            HMC(subsampled, num_steps=4, trajectory_length=None), True, marks=slow
        ),
    ],
    ids=["HMC", "NUTS", "BarkerMH", "tempered prior"],
)
def test_kernels_of_numpyro_as_rungs(inner: Any, temper_prior: bool) -> None:
    kernel = ReplicaExchange(
        inner,
        temperatures=LADDER[:-1] if temper_prior else LADDER,
        temper_prior=temper_prior,
        collect_rungs=True,
    )
    idata = run(kernel)
    assert_distributions(idata, temper_prior)
    with pytest.raises(AssertionError):
        assert_distributions(idata, not temper_prior)
    np.testing.assert_array_equal(
        idata["rungs"]["b"].values[:, :, 0], idata["posterior"]["b"].values
    )
    assert idata["rungs"]["b"].dims[:3] == ("chain", "draw", "ladder")
    stats = idata["sample_stats"]
    assert not stats["diverging"].values.any()
    steps = 1 if isinstance(inner, BarkerMH) else 4
    rungs = stats["rung_n_steps"].values[..., : len(LADDER) - 1]
    rows = N * (rungs.sum(-1) + rungs.shape[-1])
    swaps = stats["num_rows"].values - rows
    assert (swaps >= 0).all() and (swaps <= 4 * N).all()
    if not isinstance(inner, NUTS):
        assert (rungs == steps).all()
    if not temper_prior:
        found = log_evidence(idata)
        assert found.method == "stepping-stone"
        assert abs(found.value - EVIDENCE) < 5 * found.error + 1e-3, found


@slow
def test_a_rung_is_the_kernel_of_numpyro() -> None:
    """One step from the same state, also after a swap of positions."""
    x, y = X.astype(np.float32), Y.astype(np.float32)
    inner = HMC(model, num_steps=3, trajectory_length=None, step_size=0.2)
    kernel = ReplicaExchange(inner, temperatures=[1.0, 4.0])
    state = kernel.init(random.key(0), 10, None, (x, y), {})
    rung = kernel.inner
    target = rung.make_target((x, y), {})
    here = jax.tree.map(lambda value: value[0], state.replicas)
    there = jax.tree.map(lambda value: value[1], state.replicas)
    arrived = rung.arrive(target, here, there, random.key(1))
    moved = rung.transition(target, arrived)
    plain = HMC(model, num_steps=3, trajectory_length=None, step_size=0.2)
    plain.init(random.key(0), 10, None, (x, y), {})
    expected = plain.sample(
        plain.refresh(here.inner._replace(z=there.z), (x, y), {})
        if hasattr(plain, "refresh")
        else arrived.inner,
        (x, y),
        {},
    )
    np.testing.assert_allclose(moved.z["b"], expected.z["b"], rtol=1e-5)
    assert not np.allclose(moved.z["b"], there.z["b"])
    # each rung begins with the energy of its own temperature
    hot = rung.with_temperature(4.0)._potential(
        rung.with_temperature(4.0).reader(target, lambda z: {"b": z})
    )
    np.testing.assert_allclose(there.inner.potential_energy, hot(there.z), rtol=1e-5)


# the prior ---------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("kind", [AMAGOLD, SGHMC])
def test_the_hottest_rung_draws_from_the_prior(kind: Any) -> None:
    settings = {"batch": batch.full()}
    if kind is SGHMC:
        settings |= {"step_size": 0.05, "friction": 3.0}
    kernel = ReplicaExchange(
        kind(subsampled, **settings), temperatures=LADDER, collect_rungs=True
    )
    idata = run(kernel)
    assert_distributions(idata, False)
    top = idata["rungs"]["b"].values[:, :, -1, 0]
    top = top - top.mean()
    correlation = (top[:, 1:] * top[:, :-1]).mean() / top.var()
    assert abs(correlation) < 5 / math.sqrt(top.size)
    found = log_evidence(idata)
    assert abs(found.value - EVIDENCE) < 5 * found.error + 0.05, found


@pytest.fixture(scope="module")
def noisy() -> Any:
    """Swaps that read 30 of 60 rows."""
    kernel = ReplicaExchange(
        MinibatchMH(subsampled, estimate="exact", num_steps=2),
        temperatures=[1.0, 1.7, 3.0, 6.0, 15.0, 50.0, 200.0, math.inf],
        swap_batch=batch.without_replacement(30),
    )
    return run(kernel)


@pytest.mark.slow
def test_energies_of_noisy_swaps_are_unbiased(noisy: Any) -> None:
    stats = noisy["sample_stats"]
    assert np.nanmax(stats["swap_log_ratio_variance"]) > 0.3
    energies = stats["log_likelihood"].values
    expected = [mean_energy(t) for t in stats["temperatures"].values[0, -1]]
    off = standard_errors(energies, expected)
    assert off.max() < 5.5, (energies.mean((0, 1)), expected)


def test_thermodynamic_integration_of_noisy_energies(noisy: Any) -> None:
    found = log_evidence(noisy)
    assert found.method == "thermodynamic" and len(found.steps) == 7
    assert sum(found.steps) == pytest.approx(found.value, rel=1e-6)
    assert abs(found.value - EVIDENCE) < 5 * found.error + found.discretisation
    assert found.error < 0.5 and found.discretisation < 2.0
    assert f"{found.error:.2g}" in str(found)
    with pytest.raises(ValueError, match="whose noise biases the average"):
        log_evidence(noisy, "stepping-stone")


def made_up(**changes: Any) -> Any:
    """Exact energies of independent draws, each rung from its distribution."""
    rng = np.random.default_rng(0)
    rungs = []
    for temperature in LADDER:
        mean, covariance = posterior(temperature, False)
        b = rng.multivariate_normal(mean, covariance, size=(CHAINS, 1000))
        squares = np.square(Y - b @ X.T).sum(-1)
        rungs.append(-0.5 * N * math.log(2 * math.pi * SD**2) - 0.5 * squares / SD**2)
    energies = np.stack(rungs, -1)
    parts = {
        "log_likelihood": energies,
        "temperatures": np.broadcast_to(LADDER, energies.shape),
        "swap_log_ratio_variance": np.zeros((CHAINS, 1000, len(LADDER) - 1)),
        **changes,
    }
    settings = {"temper_prior": changes.pop("temper_prior", False)}
    parts.pop("temper_prior", None)
    stats = xr.Dataset(
        {n: (("chain", "draw", f"{n}_dim"), v) for n, v in parts.items()},
        attrs={"settings": json.dumps(settings)},
    )
    return as_inference_data({"sample_stats": stats}, {})


def test_both_methods_on_independent_draws() -> None:
    for method in ("stepping-stone", "thermodynamic"):
        found = log_evidence(made_up(), method)  # type: ignore[arg-type]
        allowed = 5 * found.error + found.discretisation
        assert abs(found.value - EVIDENCE) < allowed, found
        assert found.error < 0.2
    # the check can fail: draws from the posterior at every rung
    energies = made_up()["sample_stats"]["log_likelihood"].values[..., [0] * 5]
    wrong = log_evidence(made_up(log_likelihood=energies))
    assert abs(wrong.value - EVIDENCE) > 50 * wrong.error


def wide_ladder(dim: int, top: float, number: int) -> tuple[Any, float]:
    """Exact energies of a regression of 1,000 rows, and its log evidence.

    :param top: the last temperature before the prior.
    :param number: the number of rungs, the prior included.
    """
    rng = np.random.default_rng(dim)
    rows = 1000
    x = rng.normal(size=(rows, dim))
    y = x @ rng.normal(size=dim) + rng.normal(size=rows)
    gram, moment, ladder = x.T @ x, x.T @ y, [*np.geomspace(1, top, number - 1), np.inf]
    rungs = []
    for temperature in ladder:
        covariance = np.linalg.inv(np.eye(dim) + gram / temperature)
        mean = covariance @ moment / temperature
        b = rng.multivariate_normal(mean, covariance, size=(CHAINS, 1000))
        squares = y @ y - 2 * b @ moment + np.einsum("...i,ij,...j", b, gram, b)
        rungs.append(-0.5 * rows * math.log(2 * math.pi) - 0.5 * squares)
    energies = np.stack(rungs, -1)
    _, log_det = np.linalg.slogdet(np.eye(dim) + gram)
    explained = moment @ np.linalg.solve(np.eye(dim) + gram, moment)
    known = -0.5 * (rows * math.log(2 * math.pi) + log_det + y @ y - explained)
    idata = made_up(
        log_likelihood=energies,
        temperatures=np.broadcast_to(ladder, energies.shape),
        swap_log_ratio_variance=np.zeros((CHAINS, 1000, number - 1)),
    )
    return idata, float(known)


@pytest.mark.parametrize(
    ("dim", "top", "number", "method", "warns"),
    [
        (1, 100.0, 6, "thermodynamic", True),
        (1, 100.0, 10, "thermodynamic", True),
        (1, 100.0, 20, "thermodynamic", True),
        (1, 3000.0, 10, "thermodynamic", False),
        (10, 100.0, 10, "stepping-stone", True),
        (10, 30_000.0, 20, "stepping-stone", False),
        (10, 30_000.0, 20, "thermodynamic", False),
        (1, 100.0, 10, "stepping-stone", False),
    ],
)
def test_a_gap_next_to_the_prior_is_seen(
    dim: int, top: float, number: int, method: Any, warns: bool
) -> None:
    idata, known = wide_ladder(dim, top, number)
    if warns:
        with pytest.warns(UserWarning, match=r"100 and the prior.* before math\.inf"):
            found = log_evidence(idata, method)
    else:
        found = log_evidence(idata, method)
        assert abs(found.value - known) < 5 * found.error + found.discretisation
    if method == "thermodynamic":
        assert abs(found.value - known) < 5 * found.error + found.discretisation
    assert found.lower < known < found.upper
    assert found.lower < found.value < found.upper


def test_the_error_of_the_evidence_is_its_spread() -> None:
    rng = np.random.default_rng(1)
    whole = made_up()["sample_stats"]["log_likelihood"].values
    for method in ("stepping-stone", "thermodynamic"):
        found = [
            log_evidence(
                made_up(log_likelihood=whole[:, rng.integers(0, 1000, 1000)]),
                method,  # type: ignore[arg-type]
            )
            for _ in range(60)
        ]
        spread = np.std([each.value for each in found], ddof=1)
        # the tolerance covers a spread from 60 runs and the bootstrap's own error
        assert 0.6 < found[0].error / spread < 1.6


def test_chains_that_disagree_are_an_error() -> None:
    energies = made_up()["sample_stats"]["log_likelihood"].values
    apart = energies + 3.0 * np.arange(CHAINS)[:, None, None]
    assert log_evidence(made_up(log_likelihood=apart), "stepping-stone").error > 0.5
    # adapted ladders, one for each chain
    ladders = np.broadcast_to(LADDER, energies.shape).copy()
    ladders[1, :, 1] *= 1.01
    found = log_evidence(made_up(log_likelihood=apart, temperatures=ladders))
    assert found.error > 0.5
    same = log_evidence(made_up(temperatures=ladders))
    assert abs(same.value - EVIDENCE) < 5 * same.error + 0.05


def test_impossible_draws_count() -> None:
    """Half of the draws from the prior are impossible, so the evidence is halved."""
    energies = made_up()["sample_stats"]["log_likelihood"].values.copy()
    energies[:, 1::2, -1] = -np.inf
    found = log_evidence(made_up(log_likelihood=energies))
    wanted = EVIDENCE - math.log(2.0)
    assert abs(found.value - wanted) < 5 * found.error, (found, wanted)
    energies[:, :3] = np.nan  # not known before the first swap
    cut = log_evidence(made_up(log_likelihood=energies))
    assert abs(cut.value - wanted) < 5 * cut.error


def test_noise_that_thinning_left_out_is_not_exactness() -> None:
    unknown = np.full((CHAINS, 1000, len(LADDER) - 1), np.nan)
    found = log_evidence(made_up(swap_log_ratio_variance=unknown))
    assert found.method == "thermodynamic"


@slow
def test_rungs_that_moved_have_energies_of_where_they_are() -> None:
    x, y = X.astype(np.float32), Y.astype(np.float32)
    kernel = ReplicaExchange(
        HMC(model, num_steps=2, trajectory_length=None, step_size=1e-6),
        temperatures=[1.0, 2.0, 400.0],
        adapt_ladder=True,
    )
    state = kernel.init(random.key(0), 64, None, (x, y), {})
    step = jax.jit(lambda state: kernel.sample(state, (x, y), {}))
    before = state.temperatures
    while (state.temperatures == before).all():
        state = step(state)
    assert state.i in kernel._ladder_ends
    heat = state.temperatures  # for the next draw
    state = step(state)
    rung = kernel.inner
    for place in range(3):
        at = rung.with_temperature(heat[place])
        target = rung.make_target((x, y), {})
        potential = at._potential(at.reader(target, lambda z: {"b": z}))
        here = jax.tree.map(lambda value, k=place: value[k], state.replicas)
        np.testing.assert_allclose(
            here.inner.potential_energy, potential(here.z), rtol=1e-4
        )


def with_a_loop(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    doubled = jax.lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, 2 * c[1]), (0, b)
    )
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(x @ doubled[1], SD), obs=y)


def test_forward_mode_reaches_rungs() -> None:
    inner = NUTS(with_a_loop, forward_mode_differentiation=True, max_tree_depth=2)
    kernel = ReplicaExchange(inner, temperatures=[1.0, 4.0])
    x, y = X.astype(np.float32), Y.astype(np.float32)
    state = kernel.init(random.key(0), 5, None, (x, y), {})
    moved = jax.jit(lambda state: kernel.sample(state, (x, y), {}))(state)
    assert np.isfinite(moved.replicas.inner.potential_energy).all()


# refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "method", "says"),
    [
        ({}, "harmonic", "got 'harmonic'"),
        ({"temper_prior": True}, "auto", "tempers the prior"),
        (
            {"temperatures": np.broadcast_to([1.0, 2, 3, 4, 5], (CHAINS, 1000, 5))},
            "auto",
            "ends at the temperature 5",
        ),
        ({"log_likelihood": np.full((CHAINS, 1000, 5), np.nan)}, "auto", "more draws"),
        (
            {"log_likelihood": np.full((CHAINS, 1000, 5), -np.inf)},
            "thermodynamic",
            "likelihood of zero",
        ),
    ],
)
def test_no_evidence(changes: Any, method: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        log_evidence(made_up(**changes), method)


def test_no_evidence_without_a_ladder() -> None:
    nothing = as_inference_data({"sample_stats": xr.Dataset()}, {})
    with pytest.raises(ValueError, match="after a run of ReplicaExchange"):
        log_evidence(nothing)


def improper(x: Any, y: Any) -> None:
    numpyro.sample("c", dist.ImproperUniform(dist.constraints.real, (), ()))
    model(x, y)


def with_factor(x: Any, y: Any) -> None:
    numpyro.factor("more", -1.0)
    model(x, y)


def with_scale(x: Any, y: Any) -> None:
    with handlers.scale(scale=0.5):
        numpyro.sample("c", dist.Normal(0, 1))
    model(x, y)


@pytest.mark.parametrize(
    ("prior", "says"),
    [
        (improper, "ImproperUniform"),
        (with_factor, "factor 'more'"),
        (with_scale, "'c' has a scale"),
    ],
)
def test_priors_that_cannot_be_drawn_from(prior: Any, says: str) -> None:
    kernel = ReplicaExchange(NUTS(prior), temperatures=LADDER)
    with pytest.raises(ValueError, match=says):
        kernel.init(random.key(0), 0, None, (X, Y), {})


def only_a_factor(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.factor("likelihood", -0.5 * ((y - x @ b) ** 2).sum())


def test_a_ladder_has_something_to_temper() -> None:
    kernel = ReplicaExchange(NUTS(only_a_factor), temperatures=LADDER)
    with pytest.raises(ValueError, match="no observed site"):
        kernel.init(random.key(0), 0, None, (X, Y), {})
    tempered = ReplicaExchange(
        HMC(only_a_factor), temperatures=[1.0, 2.0], temper_prior=True
    )
    tempered.init(random.key(0), 0, None, (X, Y), {})


def test_rungs_that_cannot_be() -> None:
    by_hand = Target(lambda z: -0.5 * z**2, lambda z, i: -0.5 * z**2 + 0.0 * i, 10)
    with pytest.raises(ValueError, match="written by hand has no function that does"):
        ReplicaExchange(MinibatchMH(target=by_hand, batch_size=5), temperatures=LADDER)
    with pytest.raises(ValueError, match="has no weight there"):
        ReplicaExchange(NUTS(model), temperatures=LADDER, temper_prior=True)
    with pytest.raises(ValueError, match="positive and finite, got inf"):
        ReplicaExchange(NUTS(model), temperatures=[1.0, math.inf, math.inf])
    with pytest.raises(ValueError, match="NUTS with a potential_fn"):
        ReplicaExchange(NUTS(potential_fn=lambda z: z**2), temperatures=[1.0, 2.0])
    with pytest.raises(ValueError, match="inner kernel with temper_prior=False"):
        ReplicaExchange(
            MinibatchMH(subsampled), temperatures=[1.0, 2.0], temper_prior=True
        )
    with pytest.raises(TypeError, match="Mesh with one axis"):
        ReplicaExchange(NUTS(model), temperatures=[1.0, 2.0], mesh=2)  # type: ignore


# devices -----------------------------------------------------------------------------

ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from numpyro.infer import MCMC
from numpyro_minibatch import RENHD, Target
import pytest

assert jax.device_count() == 2
mesh = Mesh(np.array(jax.devices()), ("rungs",))
target = Target(
    lambda z: -0.5 * jnp.sum(z**2), lambda z, i: jnp.sin(i) * z[0] / 50, 50
)
settings = dict(target=target, batch_size=7, step_size=0.2, temperature_ratio=1.5)
draws = []
for where in (None, mesh):
    kernel = RENHD(num_replicas=4, mesh=where, **settings)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=40, progress_bar=False)
    fields = ("replicas.z", "rung")
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(3), extra_fields=fields)
    draws.append(jax.tree.map(np.asarray, mcmc.get_extra_fields()))
for name in draws[0]:
    np.testing.assert_array_equal(draws[0][name], draws[1][name])
assert (np.diff(draws[0]["rung"], axis=0) != 0).any()
placed = mcmc.last_state.replicas.z.sharding
assert len(placed.device_set) == 2, placed
with pytest.raises(ValueError, match="multiple of 2"):
    RENHD(num_replicas=3, mesh=mesh, **settings)
print("equal")
"""


@slow
def test_rungs_on_two_devices_are_those_on_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        env={**os.environ, "XLA_FLAGS": quick_flags(2)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-2000:]
