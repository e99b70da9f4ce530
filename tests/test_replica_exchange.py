"""Replica exchange: distributions of all rungs, swaps, ladders, and diagnoses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from compiling import AS_USERS
from jax import random
from numpyro.infer import MCMC

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    RELD,
    RENHD,
    SGHMC,
    SGNHT,
    MinibatchMH,
    ReplicaExchange,
    Target,
    accept,
    batch,
    diagnose,
    ladder,
    to_inference_data,
)
from numpyro_minibatch.accept import AcceptanceTest
from numpyro_minibatch.dynamics import Thermostat
from numpyro_minibatch.estimate import Estimate

slow = pytest.mark.slow

N, M = 200, 20
CENTERS, WEIGHTS, SD = np.array([-4.0, 0.0, 3.0]), np.array([0.2, 0.3, 0.5]), 0.5
CHAINS, DRAWS = 8, 4000

_rng = np.random.default_rng(0)
_linear = _rng.normal(size=N)
_linear -= _linear.mean()
# the gradient of a batch has noise of variance 0.25
_linear *= 0.5 / np.sqrt(N**2 * np.var(_linear, ddof=1) / M * (1 - M / N))
LINEAR = jnp.asarray(_linear, jnp.float32)


def log_mixture(z: Any) -> Any:
    parts = jnp.log(WEIGHTS) - 0.5 * jnp.square((z - CENTERS) / SD)
    return jax.scipy.special.logsumexp(parts)


def rows(z: Any, i: Any) -> Any:
    """Shares of three modes, with linear terms that sum to zero."""
    return log_mixture(z) / N + LINEAR[i] * z


def log_prior(z: Any) -> Any:
    return -0.5 * (z / 5.0) ** 2


TARGET = Target(log_prior, rows, N)

GRID = np.linspace(-25.0, 25.0, 20_001)
_likelihood = np.asarray(jax.vmap(log_mixture)(jnp.asarray(GRID)))


def distribution(temperature: float, temper_prior: bool) -> np.ndarray:
    """Probabilities of the points of the grid at a temperature."""
    prior = -0.5 * (GRID / 5.0) ** 2
    log_p = _likelihood / temperature
    log_p = log_p + prior / (temperature if temper_prior else 1.0)
    p = np.exp(log_p - log_p.max())
    return p / p.sum()


def features(z: np.ndarray) -> np.ndarray:
    """The compared quantities: shares of the modes, and their squared widths."""
    low, high = z < -2, z > 1.5
    return np.stack([low, high, np.minimum(np.abs(z), 8.0), np.cos(z)], -1)


def assert_distribution(z: np.ndarray, temperature: float, temper_prior: bool) -> None:
    """Within five standard errors, from the scatter of chains; ``(chains, draws)``."""
    means = features(z).mean(1)
    expected = distribution(temperature, temper_prior) @ features(GRID)
    error = means.std(0, ddof=1) / np.sqrt(len(means))
    # of eight chains: Student's distribution has 7 degrees of freedom
    worst = np.abs((means.mean(0) - expected) / error).max()
    assert worst < 9.0, (worst, means.mean(0), expected, error)


def run(kernel: Any, seed: int = 0, **settings: Any) -> MCMC:
    mcmc = MCMC(
        kernel,
        **{
            "num_warmup": 500,
            "num_samples": DRAWS,
            "num_chains": CHAINS,
            "chain_method": "vectorized",
            "progress_bar": False,
            **settings,
        },
    )
    fields = ("replicas.z",)
    mcmc.run(random.key(seed), init_params=jnp.zeros(CHAINS), extra_fields=fields)
    return mcmc


def of_rungs(mcmc: MCMC) -> np.ndarray:
    """Shape ``(rungs, chains, draws)``."""
    z = mcmc.get_extra_fields(group_by_chain=True)["replicas.z"]
    return np.moveaxis(np.asarray(z), -1, 0)


def inner(**settings: Any) -> SGHMC:
    return SGHMC(
        **{
            "target": TARGET,
            "batch_size": M,
            "step_size": 0.1,
            "friction": 3.0,
            "num_steps": 5,
            **settings,
        }
    )


# distributions ------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("swap", "temper_prior"),
    [
        ("penalty", False),
        pytest.param("penalty", True, marks=slow),
        pytest.param("barker", False, marks=slow),
        pytest.param("exact", True, marks=slow),
    ],
)
def test_every_rung_has_its_distribution(swap: str, temper_prior: bool) -> None:
    temperatures = [1.0, 2.0, 4.0, 8.0]
    kernel = ReplicaExchange(
        MinibatchMH(target=TARGET, estimate="exact", temper_prior=temper_prior),
        temperatures=temperatures,
        swap=swap,
        swap_batch=None if swap == "exact" else batch.without_replacement(2 * M),
    )
    mcmc = run(kernel)
    z = of_rungs(mcmc)
    for rung, temperature in enumerate(temperatures):
        assert_distribution(z[rung], temperature, temper_prior)
    np.testing.assert_array_equal(z[0], mcmc.get_samples(group_by_chain=True))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert fields["swap_reliable"].mean() > 0.9
    variance = fields["swap_log_ratio_variance"]
    assert np.isnan(variance).mean() == pytest.approx(0.5, abs=0.01)
    assert (np.nanmax(variance) == 0) == (swap == "exact")


@slow
@pytest.mark.parametrize("kind", [SGHMC, SGNHT])
def test_swaps_keep_the_temperature(kind: Any) -> None:
    """One gradient per draw, and a swap at nearly every draw, so momenta are often
    new."""
    normal = Target(
        lambda z: -0.5 * jnp.sum(z**2) / 1e4,
        lambda z, i: -0.5 * jnp.sum(z**2) / N + 0.0 * i,
        N,
    )
    kernel = ReplicaExchange(
        kind(
            target=normal, batch=batch.full(), step_size=0.2, friction=1.0, num_steps=1
        ),
        temperatures=[1.0, 1.2, 1.44],
        swap="exact",
    )
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=3000,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), init_params=jnp.zeros((CHAINS, 4)))
    squares = np.square(mcmc.get_samples(group_by_chain=True)).mean((1, 2))
    error = squares.std(ddof=1) / np.sqrt(CHAINS)
    assert abs(squares.mean() - 1.0) < 7 * error + 0.02, (squares.mean(), error)
    assert error < 0.03


@slow
@pytest.mark.parametrize("kind", [SGHMC, SGNHT])
def test_a_force_is_that_of_its_rung(kind: Any) -> None:
    """One gradient per draw, and a prior whose influence differs between rungs.

    With the force of the rung that a position came from, the variance was 0.39 instead
    of 0.5.
    """
    even = Target(
        lambda z: -0.5 * z @ z, lambda z, i: -0.125 * (1 - z[0]) ** 2 + 0 * i, 4
    )
    inner = kind(
        target=even, batch=batch.full(), step_size=0.2, friction=1.0, num_steps=1
    )
    kernel = ReplicaExchange(inner, temperatures=[1.0, 8.0], swap="exact")
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=8000,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), init_params=jnp.zeros((CHAINS, 1)))
    z = np.asarray(mcmc.get_samples(group_by_chain=True), float)[..., 0]
    for values, expected in ((z, 0.5), (np.square(z - 0.5), 0.5)):
        means = values.mean(1)
        error = means.std(ddof=1) / np.sqrt(CHAINS)
        assert abs(means.mean() - expected) < 7 * error + 0.01, (means.mean(), error)
        assert error < 0.01


@dataclass(frozen=True)
class Inverted(AcceptanceTest):
    """The sign of the energy difference as printed in the paper's equation 7."""

    max_variance = 1.0

    def probability(self, log_ratio: Estimate) -> Any:
        return accept.penalty().probability(-1.0 * log_ratio)


@slow
def test_a_wrong_sign_is_found() -> None:
    kernel = ReplicaExchange(
        MinibatchMH(target=TARGET, estimate="exact"),
        temperatures=[1.0, 2.0, 4.0, 8.0],
        swap=Inverted(),
    )
    z = of_rungs(run(kernel))
    with pytest.raises(AssertionError):
        assert_distribution(z[0], 1.0, False)


@cache
def with_gradients(kind: Any) -> MCMC:
    settings = {"target": TARGET, "batch_size": M, "num_steps": 5}
    settings |= {"num_replicas": 5, "temperature_ratio": 1.8}
    if kind is not AMAGOLD:
        return run(kind(step_size=0.1, friction=3.0, **settings))
    del settings["num_replicas"], settings["temperature_ratio"]
    inner = AMAGOLD(**settings)
    return run(ReplicaExchange(inner, num_replicas=5, temperature_ratio=1.8))


@slow
@pytest.mark.parametrize("kind", [RELD, RENHD, AMAGOLD])
def test_gradients_on_batches(kind: Any) -> None:
    """The modes are reached and have the right width."""
    mcmc = with_gradients(kind)
    assert_distribution(of_rungs(mcmc)[0], 1.0, False)
    assert not mcmc.get_extra_fields()["diverging"].any()


@slow
def test_one_rung_alone_hardly_changes_the_mode() -> None:
    def changes(mcmc: MCMC) -> float:
        z = np.asarray(mcmc.get_samples(group_by_chain=True))
        return float(np.abs(np.diff(z < -2.0, axis=1)).mean())

    alone = MCMC(
        inner(),
        num_warmup=0,
        num_samples=1500,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    alone.run(random.key(0), init_params=jnp.zeros(CHAINS))
    assert changes(with_gradients(RELD)) > 10 * changes(alone)


# limits ------------------------------------------------------------------------------


def test_one_rung_is_the_inner_kernel() -> None:
    settings = {
        "num_warmup": 20,
        "num_samples": 50,
        "num_chains": 1,
        "progress_bar": False,
    }
    alone, ladder_of_one = (
        MCMC(kernel, **settings)
        for kernel in (inner(), ReplicaExchange(inner(), temperatures=[1.0]))
    )
    for mcmc in (alone, ladder_of_one):
        mcmc.run(random.key(3), init_params=jnp.zeros(()))
    np.testing.assert_array_equal(alone.get_samples(), ladder_of_one.get_samples())
    found = diagnose(to_inference_data(ladder_of_one))
    assert found.swap_rates == () and "rungs" not in str(found)


def test_a_thermostat_stays_with_its_rung() -> None:
    kernel = SGNHT(target=TARGET, batch_size=M, step_size=0.1)
    here, there = (
        kernel.init(random.key(k), 0, jnp.array(float(k)), (), {}) for k in (1, 2)
    )
    here = here._replace(
        memory=Thermostat(here.memory.momentum, jnp.array(7.0), jnp.array([1.0]))
    )
    there = there._replace(memory=there.memory._replace(force=jnp.array([2.0])))
    arrived = kernel.with_temperature(4.0).arrive(TARGET, here, there, random.key(3))
    assert arrived.memory.friction == 7.0 and arrived.z == there.z
    # the force of the position at this temperature; the swapped one is from another
    assert arrived.memory.force not in (1.0, 2.0)
    assert arrived.memory.momentum not in (here.memory.momentum, there.memory.momentum)
    momenta = jax.vmap(
        lambda key: (
            kernel.with_temperature(4.0)
            .arrive(TARGET, here, there, key)
            .memory.momentum
        )
    )(random.split(random.key(4), 20_000))
    # of variance T
    assert np.var(momenta) == pytest.approx(4.0, abs=5 * 4.0 * np.sqrt(2 / 20_000))


# swaps -------------------------------------------------------------------------------


def passes(kernel: ReplicaExchange) -> Any:
    """A function of positions: a pass of swaps, compiled once."""
    state = kernel.init(random.key(0), 0, jnp.zeros(()), (), {})

    @jax.jit
    def one_pass(z: Any, i: Any = 0, seed: Any = 0) -> Any:
        replicas = state.replicas._replace(z=jnp.asarray(z, jnp.float32))
        now = state._replace(replicas=replicas, i=jnp.int32(i))
        names = ("parity", "accept")
        keys = dict(zip(names, random.split(random.key(seed)), strict=True))
        return kernel._swap_pass(TARGET, now, keys)

    return one_pass


@pytest.mark.parametrize("swap", ["penalty", "barker", "exact"])
def test_the_better_position_goes_to_the_colder_rung(swap: str) -> None:
    kernel = ReplicaExchange(
        MinibatchMH(target=TARGET, batch_size=M), temperatures=[1.0, 4.0], swap=swap
    )
    one_pass = passes(kernel)
    up = one_pass([15.0, 0.0])
    assert up.accept_prob[0] > 0.999 and up.source.tolist() == [1, 0]
    down = one_pass([0.0, 15.0])
    assert down.accept_prob[0] < 1e-6 and down.source.tolist() == [0, 1]
    # of the positions before the swap
    assert up.log_likelihood[1] > up.log_likelihood[0] + 100
    # a pass of odd pairs has none to try
    odd = one_pass([15.0, 0.0], 1)
    assert np.isnan(odd.accept_prob[0]) and odd.source.tolist() == [0, 1]
    assert odd.num_rows == 0


@slow
def test_even_and_odd_pairs() -> None:
    kernel = ReplicaExchange(
        MinibatchMH(target=TARGET, batch_size=M), num_replicas=5, temperature_ratio=3.0
    )
    worse, one_pass = [20.0, 15.0, 10.0, 7.0, 0.0], passes(kernel)
    assert one_pass(worse, 0).source.tolist() == [1, 0, 3, 2, 4]
    assert one_pass(worse, 1).source.tolist() == [0, 2, 1, 4, 3]
    random_pairs = ReplicaExchange(
        MinibatchMH(target=TARGET, batch_size=M),
        num_replicas=5,
        temperature_ratio=3.0,
        pairing="random",
    )
    one_pass = passes(random_pairs)
    assert {one_pass(worse, 0, seed).source[0].item() for seed in range(9)} == {0, 1}


def test_the_variance_of_a_swap_is_its_estimate() -> None:
    kernel = ReplicaExchange(
        MinibatchMH(target=TARGET, batch_size=M), temperatures=[1.0, 4.0]
    )
    state = kernel.init(random.key(0), 0, jnp.zeros(()), (), {})
    z = jnp.array([1.0, 3.0], jnp.float32)
    state = state._replace(replicas=state.replicas._replace(z=z))
    keys = dict.fromkeys(("parity", "accept", "momentum"), random.key(1))

    def swap(key: Any) -> tuple[Any, Any]:
        seen = kernel._swap_pass(TARGET, state._replace(index_key=key), keys)
        gap = 0.75 * (seen.log_likelihood.max() - seen.log_likelihood.min())
        return gap, seen.variance[0]

    found = jax.jit(jax.vmap(swap))(random.split(random.key(2), 4000))
    gaps, variances = (np.asarray(x, np.float64) for x in found)
    exact = 0.75 * float(log_mixture(3.0) - log_mixture(1.0))
    spread = np.var(gaps, ddof=1)
    assert np.mean(gaps) == pytest.approx(exact, abs=5 * np.sqrt(spread / 4000))
    assert spread == pytest.approx(np.mean(variances), rel=5 * np.sqrt(2 / 4000))


@slow
def test_replicas_are_followed() -> None:
    kernel = ReplicaExchange(
        MinibatchMH(target=TARGET, estimate="exact"),
        num_replicas=4,
        temperature_ratio=2.0,
    )
    mcmc = run(kernel, num_samples=1000)
    fields = mcmc.get_extra_fields(group_by_chain=True)
    rung = np.asarray(fields["rung"])
    assert (np.sort(rung, -1) == np.arange(4)).all()
    assert np.abs(np.diff(rung, axis=1)).max() == 1  # neighbours only
    trips = 0
    for path in rung[0].T:
        ends = path[(path == 0) | (path == 3)]
        turns = ends[np.flatnonzero(np.diff(ends, prepend=-1))]
        trips += ((turns[1:] == 0) & (turns[:-1] == 3)).sum()
    counted = int(fields["round_trips"][0, -1])
    assert counted > 20
    # only the kernel counts trips that began in the warmup
    assert trips - 4 <= counted <= trips + 4


# ladders -----------------------------------------------------------------------------


@slow
def test_a_ladder_adapts_to_equal_rates() -> None:
    wide = Target(
        lambda z: -0.5 * jnp.sum(jnp.square(z)) / 1e4,
        lambda z, i: -0.5 * jnp.sum(jnp.square(z)) / N + 0.0 * i,
        N,
    )
    poor = [1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 20.0]
    kernel = ReplicaExchange(
        MinibatchMH(target=wide, estimate="exact"),
        temperatures=poor,
        adapt_ladder=True,
    )
    mcmc = MCMC(
        kernel, num_warmup=4000, num_samples=4000, num_chains=1, progress_bar=False
    )
    mcmc.run(random.key(0), init_params=jnp.zeros(10))
    fields = mcmc.get_extra_fields()
    rates = np.nanmean(fields["swap_acceptance_rate"], 0)
    assert rates.min() > 0.3 and np.ptp(rates) < 0.2, rates
    found = np.asarray(fields["temperatures"][-1])
    assert found[0] == 1.0 and found[-1] == 20.0 and (np.diff(found) > 0).all()
    assert len(np.unique(fields["temperatures"], axis=0)) == 1  # frozen
    as_it_was = ReplicaExchange(
        MinibatchMH(target=wide, estimate="exact"), temperatures=poor
    )
    mcmc = MCMC(
        as_it_was, num_warmup=200, num_samples=600, num_chains=1, progress_bar=False
    )
    mcmc.run(random.key(0), init_params=jnp.zeros(10))
    rates = np.nanmean(mcmc.get_extra_fields()["swap_acceptance_rate"], 0)
    assert np.ptp(rates) > 0.5


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({}, ValueError, "needs a ladder"),
        ({"temperatures": [1.0, 4.0, 2.0]}, ValueError, "got 4 and then 2"),
        ({"temperatures": [1.0, 2.0, 2.0]}, ValueError, "got 2 and then 2"),
        ({"temperatures": [1.5, 2.0]}, ValueError, "begin with 1.0.*got 1.5"),
        ({"temperatures": [0.5, 1.0]}, ValueError, "got 0.5"),
        ({"temperatures": []}, ValueError, "begin with 1.0"),
        ({"temperatures": 2.0}, TypeError, "sequence of numbers"),
        ({"num_replicas": 3}, ValueError, "needs a ladder"),
        ({"num_replicas": 3, "temperature_ratio": 0.5}, ValueError, "above 1"),
        (
            {"temperatures": [1.0], "num_replicas": 3, "temperature_ratio": 2.0},
            ValueError,
            "got both",
        ),
        ({"temperatures": [1.0, 2.0], "swap": "always"}, TypeError, "'always'"),
        ({"temperatures": [1.0, 2.0], "pairing": "all"}, ValueError, "'all'"),
        (
            {"temperatures": [1.0, 2.0], "swap_batch": 100},
            TypeError,
            r"batch.growing\(500\)",
        ),
        (
            {
                "temperatures": [1.0, 2.0],
                "swap": "exact",
                "swap_batch": batch.growing(50),
            },
            ValueError,
            "reads all rows",
        ),
    ],
)
def test_what_is_no_ladder(settings: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        ReplicaExchange(inner(), **settings)


def test_kernels_that_cannot_be_rungs() -> None:
    two = [1.0, 2.0]
    with pytest.raises(ValueError, match="which must be 1, got lam=0.5"):
        ReplicaExchange(MINT(target=TARGET, lam=0.5), temperatures=two)
    with pytest.raises(ValueError, match="swaps read rows by importance"):
        ReplicaExchange(
            MinibatchMH(target=TARGET, control_variate="taylor2"),
            temperatures=two,
            swap_batch=batch.growing(50),
        )
    with pytest.raises(TypeError, match="kernel of numpyro_minibatch.*or NumPyro's"):
        ReplicaExchange(lambda y: None, temperatures=two)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which must be 1, got 20"):
        ReplicaExchange(MINT(target=TARGET, temperature=20.0), temperatures=two)
    with pytest.raises(ValueError, match='estimate="augmented"'):
        ReplicaExchange(
            MINT(target=TARGET, temperature=1.0, estimate="augmented"),
            temperatures=two,
        )


def test_geometric_ladders_begin_at_one() -> None:
    assert ladder.geometric(3, 1.5) == (1.0, 1.5, 2.25)
    assert RENHD(target=TARGET, step_size=0.1).settings["temperatures"][0] == 1.0


# results -----------------------------------------------------------------------------


def model(y: Any) -> None:
    """The likelihood depends neither on the sign of mu nor on that of the log scale."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", len(y), subsample_size=25) as idx:
        numpyro.sample("obs", dist.Normal(jnp.abs(mu), 4.0), obs=y[idx])


Y = np.asarray(2 + 4 * np.random.default_rng(1).normal(size=100), np.float32)


def test_results_of_a_model() -> None:
    kernel = ReplicaExchange(
        MinibatchMH(model, estimate="exact"), temperatures=[1.0, 3.0, 9.0, 27.0]
    )
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=2000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), Y)
    idata = to_inference_data(mcmc)
    stats = idata["sample_stats"]
    assert stats["rung"].dims == ("chain", "draw", "replica")
    assert stats["temperatures"].dims == ("chain", "draw", "ladder")
    assert stats["swap_acceptance_rate"].dims == ("chain", "draw", "pair")
    assert stats["rung_acceptance_rate"].dims == ("chain", "draw", "ladder")
    mu = idata["posterior"]["mu"].values
    assert 0.3 < (mu > 0).mean() < 0.7
    found = diagnose(idata)
    assert len(found.swap_rates) == 3 and found.round_trips > 10
    # the statistics of the coldest rung, under their usual names
    np.testing.assert_array_equal(
        stats["acceptance_rate"], stats["rung_acceptance_rate"][..., 0]
    )
    assert found.unreliable == 0 and 0.1 < found.acceptance_rate < 0.9
    assert f"4 rungs, barrier {found.barrier:.2f}" in str(found)
    assert not any("rungs" in text for text in found.advice)
    assert idata["posterior"].attrs["target"] == "prior * likelihood"


def test_advice_on_a_ladder_with_a_gap() -> None:
    kernel = ReplicaExchange(
        MinibatchMH(model, estimate="exact"), temperatures=[1.0, 1.1, 1e6]
    )
    mcmc = MCMC(kernel, num_warmup=200, num_samples=400, progress_bar=False)
    mcmc.run(random.key(0), Y)
    idata = to_inference_data(mcmc)
    stats = idata["sample_stats"]
    stats["swap_acceptance_rate"] = stats["swap_acceptance_rate"] * [1.0, 0.05]
    advice = " ".join(diagnose(idata).advice)
    assert "rungs 1 and 2 of the ladder accept only" in advice
    assert "adapt_ladder=True" in advice


# control variates --------------------------------------------------------------------


@slow
def test_hot_rungs_move_on_the_surrogate_of_the_cold_one() -> None:
    """The tempered posterior is wider than the set-up's, so its normal draws would
    stick."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(2000, 10)).astype(np.float32)
    y = (x @ np.linspace(-1, 1, 10) + rng.normal(size=2000)).astype(np.float32)

    def linear(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 10).expand([10]).to_event(1))
        with numpyro.plate("data", len(x)) as i:
            numpyro.sample("obs", dist.Normal(x[i] @ b, 1.0), obs=y[i])

    temperatures = [1.0, 16.0]
    kernel = ReplicaExchange(
        MinibatchMH(linear, control_variate="taylor2"),
        temperatures=temperatures,
        collect_rungs=True,
    )
    chains = 32
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=500,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x, y)
    draws = to_inference_data(mcmc)["rungs"]["b"].values.astype(float)
    for rung, temperature in enumerate(temperatures):
        precision = x.T.astype(float) @ x / temperature + np.eye(10) / 100
        mean = np.linalg.solve(precision, x.T.astype(float) @ y / temperature)
        root = np.linalg.cholesky(precision)
        # the squares of white draws, all coordinates of a chain together
        square = np.square((draws[:, :, rung] - mean) @ root).mean((1, 2))
        z = (square.mean() - 1) / (square.std(ddof=1) / np.sqrt(chains))
        assert abs(z) < 5, (rung, square.mean())
        assert square.mean() == pytest.approx(1, abs=0.1)


@slow
def test_swaps_read_residuals_of_a_control_variate() -> None:
    """The control variate reduces the noise of a swap, and no rung changes its mode."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3000, 2)).astype(np.float32)
    y = (rng.random(3000) < 1 / (1 + np.exp(-x @ [1.0, -0.5]))).astype(np.float32)

    def logistic(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=100) as i:
            numpyro.sample("obs", dist.Bernoulli(logits=x[i] @ b), obs=y[i])

    temperatures = [1.0, 2.5]
    noise = {}
    for control_variate in ("taylor2", None):
        inner = MinibatchMH(logistic, control_variate=control_variate, batch_size=100)
        kernel = ReplicaExchange(inner, temperatures=temperatures, collect_rungs=True)
        mcmc = MCMC(
            kernel,
            num_warmup=300,
            num_samples=2000 if control_variate else 50,
            num_chains=CHAINS,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0), x, y)
        idata = to_inference_data(mcmc)
        stats = idata["sample_stats"]
        noise[control_variate] = np.nanmedian(stats["swap_log_ratio_variance"])
        if control_variate:
            draws = idata["rungs"]["b"].values
            assert 0.3 < np.nanmean(stats["swap_acceptance_rate"]) < 0.95
    assert noise["taylor2"] < 1e-3 * noise[None], noise

    side = np.linspace(-0.45, 0.45, 121)
    grid = np.stack(np.meshgrid(1.0 + side, -0.5 + side), -1).reshape(-1, 2)
    logits = grid @ x.T.astype(float)
    likelihood = (logits * y - np.logaddexp(0, logits)).sum(-1)
    for rung, temperature in enumerate(temperatures):
        log_p = likelihood / temperature - 0.125 * np.square(grid).sum(-1)
        p = np.exp(log_p - log_p.max())
        p /= p.sum()
        mean = p @ grid
        square = p @ np.square(grid - mean)
        z = draws[:, :, rung].astype(float)
        for values, expected in ((z, mean), (np.square(z - mean), square)):
            means = values.mean(1)
            error = means.std(0, ddof=1) / np.sqrt(CHAINS)
            worst = np.abs((means.mean(0) - expected) / error).max()
            assert worst < 9.0, (rung, worst, means.mean(0), expected)


@slow
def test_a_ladder_of_many_chains_compiles() -> None:
    """XLA of jax 0.12 took minutes to compile if rows were read in another order."""
    slopes = jnp.asarray(_rng.normal(size=(N, 2)) / N, jnp.float32)
    target = Target(
        lambda z: -0.5 * jnp.square(z).sum(),
        lambda z, i: slopes[i] @ z + log_mixture(z.sum()) / N,
        N,
    )
    kernel = RENHD(target=target, batch_size=M, step_size=0.1, num_replicas=7)
    start = jnp.zeros((4, 2))
    state = kernel.init(random.split(random.key(0), 4), 1, start, (), {})
    draw = jax.jit(
        lambda state: kernel.sample(state, (), {}), compiler_options=AS_USERS
    )
    assert jnp.isfinite(draw(state).z).all()
