"""The equi-energy sampler: energies, rings, jumps, distributions, and diagnoses."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC
from scipy import stats

from numpyro_minibatch import (
    MINTEE,
    MinibatchMH,
    ReplicaExchange,
    Target,
    batch,
    diagnose,
    diagnostics,
    proposal,
    to_inference_data,
)
from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch.kernels.equi_energy import _jumps
from numpyro_minibatch.kernels.equi_energy._jumps import log_jump_ratio
from numpyro_minibatch.kernels.equi_energy._nested import (
    Energies,
    Nested,
    Reference,
    truncated,
)
from numpyro_minibatch.kernels.equi_energy._rings import Rings, ring_of

slow = pytest.mark.slow

N = 200
CENTERS, WEIGHTS, SD = np.array([-3.0, 0.0, 3.0]), np.array([0.3, 0.2, 0.5]), 0.5
CHAINS, DRAWS = 16, 4000

_rng = np.random.default_rng(0)
_linear = _rng.normal(size=N)
_linear -= _linear.mean()
# of a batch of 50 rows at temperature 2 the log weight has noise of sd 0.15 |z - z_0|
_linear *= 0.3 / np.sqrt(N**2 * np.var(_linear, ddof=1) / 50 * (1 - 50 / N))
LINEAR = jnp.asarray(_linear, jnp.float32)


def log_mixture(z: Any) -> Any:
    parts = jnp.log(WEIGHTS) - 0.5 * jnp.square((z - CENTERS) / SD)
    return jax.scipy.special.logsumexp(parts)


def rows(z: Any, i: Any) -> Any:
    """Shares of three modes, with linear terms that sum to zero."""
    return log_mixture(z) / N + LINEAR[i] * z


TARGET = Target(lambda z: -0.5 * (z / 5.0) ** 2, rows, N)

GRID = np.linspace(-25.0, 25.0, 20_001)
ENERGY = -np.asarray(jax.vmap(log_mixture)(jnp.asarray(GRID)), np.float64)


def distribution(
    temperature: float, floor: float = -np.inf, temper_prior: bool = False
) -> Any:
    """Probabilities of the points of the grid."""
    prior = -0.5 * (GRID / 5.0) ** 2
    energy = ENERGY - temper_prior * prior
    log_p = (not temper_prior) * prior - np.maximum(energy, floor) / temperature
    p = np.exp(log_p - log_p.max())
    return p / p.sum()


def features(z: np.ndarray) -> np.ndarray:
    """The compared quantities: shares of the modes, and energies."""
    energy = np.minimum(np.interp(z, GRID, ENERGY), 10.0)
    return np.stack([z < -1.5, z > 1.5, np.minimum(np.abs(z), 8.0), energy], -1)


def worst(z: np.ndarray, probabilities: np.ndarray) -> float:
    """The largest error in standard errors, which the scatter between chains gives."""
    means = features(z).mean(1)
    expected = probabilities @ features(GRID)
    error = means.std(0, ddof=1) / np.sqrt(len(means))
    return float(np.abs((means.mean(0) - expected) / error).max())


LIMIT = 6.2  # of Student's distribution with 15 degrees of freedom: 5 standard errors

FULL = {"batch": batch.full(), "temperatures": [1.0, 3.0, 9.0]}
NESTED = {"batch_size": [100, 50, 25], "temperatures": [2.0, 4.0, 8.0]}


def kernel(**settings: Any) -> MINTEE:
    return MINTEE(target=TARGET, **{"jump_prob": 0.3, **settings})


def run(kernel: MINTEE, seed: int = 0, **settings: Any) -> MCMC:
    mcmc = MCMC(
        kernel,
        **{
            "num_warmup": 600,
            "num_samples": DRAWS,
            "num_chains": CHAINS,
            "chain_method": "vectorized",
            "progress_bar": False,
            **settings,
        },
    )
    start = jnp.zeros(mcmc.num_chains) if mcmc.num_chains > 1 else jnp.zeros(())
    mcmc.run(random.key(seed), init_params=start, extra_fields=("rungs.z",))
    return mcmc


def of_rungs(mcmc: MCMC) -> np.ndarray:
    """Shape ``(K, chains, draws)``."""
    z = mcmc.get_extra_fields(group_by_chain=True)["rungs.z"]
    return np.moveaxis(np.asarray(z, np.float64)[..., 0], -1, 0)


# energies of nested batches ----------------------------------------------------------


def reference_at(z: float, temperatures: Any, floors: Any) -> Reference:
    terms = TARGET.terms(jnp.asarray(z), {"data": jnp.arange(N)})
    real = jnp.result_type(float)
    return Reference(
        rows=terms.rows["data"],
        known=terms._replace(rows={}),
        energy=jnp.zeros((), real),
        log_prior=jnp.zeros((), real),
        temperatures=jnp.asarray(temperatures, real),
        floors=jnp.asarray(floors, real),
    )


def energies_of(
    nested: Nested, reference: Reference, z: Any, keys: Any
) -> tuple[Energies, Any]:
    """The energies of the same state in each chain, for each key."""
    built = kernel(**FULL)
    built.init(random.key(0), 0, jnp.zeros(()), (), {})
    _, unravel = ravel_pytree(jnp.zeros(()))
    reader = built.reader(TARGET, unravel)
    number = len(nested.sizes)

    def one(key: Any) -> Energies:
        positions = jnp.broadcast_to(jnp.asarray(z, jnp.result_type(float)), (number,))
        bits, wrap = unwrapped(key)
        bits = jnp.broadcast_to(bits, (number, 2))
        return nested.energies(reader, reference, positions[:, None], bits, wrap)

    return jax.jit(jax.vmap(one))(keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "temper_prior"),
    [((200, 200, 200), False), ((200, 37, 5), True), ((101, 100, 30), False)],
)
def test_energies(sizes: Any, temper_prior: bool) -> None:
    """Exact with all rows; otherwise the means over batches of energies and weights."""
    temperatures = [2.0, 3.0, 20.0]
    reference = reference_at(-3.0, temperatures, [-np.inf, 1.0, 2.0])
    nested = Nested("data", N, sizes, temper_prior, penalty=True)
    found = energies_of(nested, reference, 1.0, random.split(random.key(1), 4000))

    def log_density(z: float) -> tuple[float, float]:
        return float(log_mixture(z)), -0.5 * (z / 5.0) ** 2

    (here, prior), (there, prior_there) = log_density(1.0), log_density(-3.0)
    exact = there - here + temper_prior * (prior_there - prior)
    np.testing.assert_allclose(
        found.log_prior, (not temper_prior) * (prior - prior_there), atol=1e-5
    )
    for k, (size, heat) in enumerate(zip(sizes, temperatures, strict=True)):
        own, noise = np.asarray(found.own[:, k]), np.asarray(found.noise[:, k])
        if size == N:
            np.testing.assert_allclose(own, exact, rtol=1e-4)
            assert not noise.any()
            continue
        weights = np.exp(-(own - exact) / heat)
        error = weights.std() / np.sqrt(len(weights))
        assert abs(weights.mean() - 1.0) < 5 * error
        assert noise.mean() == pytest.approx((own / heat).var(), rel=0.15)
        if k + 1 < len(sizes):
            # the hotter chain computes the energy of the state from a part of its batch
            np.testing.assert_allclose(
                found.above[:, k], found.own[:, k + 1], rtol=1e-4
            )


def test_without_a_penalty_weights_are_too_large() -> None:
    reference = reference_at(-3.0, [1.0, 4.0], [-np.inf, 1.0])
    nested = Nested("data", N, (50, 20), False, penalty=False)
    found = energies_of(nested, reference, 1.0, random.split(random.key(1), 4000))
    weights = np.exp(-np.asarray(found.own[:, 0]))
    weights *= np.exp(float(log_mixture(-3.0) - log_mixture(1.0)))
    error = weights.std() / np.sqrt(len(weights))
    assert weights.mean() - 1.0 > 10 * error


def test_blocks_have_every_row_once() -> None:
    for sizes in ((1000, 333, 100), (90_000, 5000, 5000, 128), (7, 5)):
        nested = Nested("data", 100_000, sizes, False, True)
        width, blocks = nested.blocks
        assert width * blocks.shape[1] <= max(2**14, width)
        flat = blocks.reshape(-1, 4)
        for chain, (size, inner) in enumerate(zip(sizes, nested.shared, strict=True)):
            for part, (low, high) in enumerate([(0, inner), (inner, size)]):
                mine = flat[(flat[:, 0] == chain) & (flat[:, 1] == part)]
                seen = [np.arange(s, s + count) for _, _, s, count in mine]
                np.testing.assert_array_equal(
                    np.sort(np.concatenate([*seen, []])), np.arange(low, high)
                )
        assert flat[:, 3].sum() == sum(sizes)


# rings -------------------------------------------------------------------------------


def test_rings_keep_the_last_states() -> None:
    z, bits = jnp.zeros(2), jnp.zeros(2, jnp.uint32)
    rings = Rings.empty(3, 4, z, bits)
    assert not rings.pick(jnp.array([0, 1]), jnp.array([0.5, 0.5]))[2].any()
    for n in range(1, 7):
        state = jnp.full((2, 2), n, z.dtype)
        # the second chain keeps every other state
        keep = jnp.array([True, n % 2 == 0])
        rings = rings.put(jnp.array([1, 2]), state, state.astype(jnp.uint32), keep)
    np.testing.assert_array_equal(rings.number, [[0, 6, 0], [0, 0, 3]])
    np.testing.assert_array_equal(np.sort(rings.z[0, 1, :, 0]), [3, 4, 5, 6])
    members, keys, there = jax.vmap(lambda u: rings.pick(jnp.array([1, 2]), u))(
        jnp.linspace(0.0, 0.999, 24)[:, None].repeat(2, 1)
    )
    assert there.all()
    for chain, expected in enumerate([[3, 4, 5, 6], [2, 4, 6]]):
        values, counts = np.unique(members[:, chain, 0], return_counts=True)
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(counts, 24 // len(expected))
        np.testing.assert_array_equal(members[:, chain, 0], keys[:, chain, 0])


def test_ring_of() -> None:
    floors = jnp.array([-jnp.inf, 1.0, 2.0])
    found = ring_of(jnp.array([-5.0, 0.999, 1.0, 1.5, 2.0, jnp.inf]), floors)
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 2, 2])


# jumps -------------------------------------------------------------------------------


def printed_ratio(new: Energies, old: Energies, reference: Reference) -> Any:
    """With the indices of the paper's D.1: pi_k(s') pi_k+1(s) / pi_k+1(s) pi_k+2(s').

    Where there is a chain k + 2.
    """
    heat, floors = reference.temperatures, reference.floors
    right = log_jump_ratio(new, old, reference)
    wrong = truncated(new.own, floors, heat)[:-2] - truncated(
        new.own[:-2], floors[2:], heat[2:]
    )
    return right.at[:-2].set(wrong)


@pytest.mark.parametrize("k", [0, 1])
def test_a_jump_preserves_the_distribution(k: int) -> None:
    """Jumps from draws of a chain to independent draws of the hotter one in their
    rings."""
    heat, floors = np.array([1.0, 3.0, 9.0]), np.array([-np.inf, 4.0, 20.0])
    reference = reference_at(0.0, heat, floors)
    rng, count = np.random.default_rng(1), 100_000
    distributions = [
        distribution(t, floor) for t, floor in zip(heat, floors, strict=True)
    ]
    rings = np.asarray(ring_of(jnp.asarray(ENERGY), jnp.asarray(floors)))
    here = rng.choice(len(GRID), count, p=distributions[k])
    there = np.zeros_like(here)
    for ring in range(3):
        inside = rings[here] == ring
        p = distributions[k + 1] * (rings == ring)
        there[inside] = rng.choice(len(GRID), inside.sum(), p=p / p.sum())

    def worst_after(log_ratio: Any) -> float:
        def energies(place: np.ndarray) -> Energies:
            e = jnp.broadcast_to(jnp.asarray(ENERGY)[place][:, None], (count, 3))
            return Energies(e, e, e, e)

        found = jax.vmap(log_ratio, (0, 0, None))(
            energies(there), energies(here), reference
        )
        accepted = np.log(rng.random(count)) < np.asarray(found)[:, k]
        after = GRID[np.where(accepted, there, here)]
        return worst(after.reshape(100, -1), distributions[k])

    assert worst_after(log_jump_ratio) < 5.5
    assert k == 1 or worst_after(printed_ratio) > 10


# distributions ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("temper_prior", [False, pytest.param(True, marks=slow)])
def test_every_chain_has_its_distribution(temper_prior: bool) -> None:
    """All rows, energy floors included."""
    built = kernel(temper_prior=temper_prior, **FULL)
    mcmc = run(built)
    z = of_rungs(mcmc)
    floors = np.array([-np.inf, *built.pilot["energies"]])
    heat = FULL["temperatures"]
    for k, (temperature, floor) in enumerate(zip(heat, floors, strict=True)):
        assert worst(z[k], distribution(temperature, floor, temper_prior)) < LIMIT, k
    np.testing.assert_array_equal(z[0], mcmc.get_samples(group_by_chain=True))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert (fields["reliable"] == 1).all() and not fields["energy_noise"].any()
    tried = ~np.isnan(fields["jump_acceptance_rate"])
    assert tried.mean((0, 1)) == pytest.approx(0.3, abs=0.02)
    energies = -np.asarray(jax.vmap(log_mixture)(jnp.asarray(z[1].ravel())))
    if not temper_prior:
        np.testing.assert_allclose(
            fields["energy"][..., 1].ravel(), energies, rtol=1e-3, atol=1e-3
        )
    rings = (fields["energy"][..., None] >= floors[1:]).sum(-1)
    assert (fields["ring"] == rings).mean() > 0.999  # except for rounding


@pytest.mark.slow
def test_the_printed_ratio_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jumps, "log_jump_ratio", printed_ratio)
    z = of_rungs(run(kernel(energies=[4.0, 20.0], **FULL)))[0]
    assert worst(z, distribution(1.0)) > 2 * LIMIT


@slow
@pytest.mark.parametrize(
    "moves",
    ["random_walk", pytest.param("langevin", marks=slow)],
)
def test_nested_batches(moves: str) -> None:
    """The distribution of the coldest chain, with noise in all energies."""
    built = kernel(proposal=getattr(proposal, moves)(), **NESTED)
    mcmc = run(built, num_samples=2 * DRAWS)
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert 0.2 < np.median(fields["energy_noise"][..., 0])
    assert fields["reliable"].mean() > 0.8
    assert worst(of_rungs(mcmc)[0], distribution(2.0)) < LIMIT
    each = [100, 50, 25]
    if moves == "langevin":
        each = [m + 25 for m in each]
    assert (fields["rung_num_rows"] == np.array(each)).all()
    assert (fields["num_rows"] == sum(each)).all()
    rate = np.nanmean(fields["rung_acceptance_rate"], (0, 1))
    assert ((rate > 0.2) & (rate < 0.5)).all()


@pytest.fixture(scope="module")
def of_all_rows_below() -> tuple[MINTEE, MCMC]:
    """Temperature 1 with all rows, from chains with noise in their energies."""
    built = kernel(batch_size=[N, 100, 50], temperatures=[1.0, 3.0, 8.0])
    return built, run(built, num_samples=2 * DRAWS)


@slow
def test_temperature_one_from_noisy_chains(of_all_rows_below: Any) -> None:
    _, mcmc = of_all_rows_below
    fields = mcmc.get_extra_fields(group_by_chain=True)
    noise = np.median(fields["energy_noise"], (0, 1))
    assert noise[0] == 0 and (noise[1:] > 0.05).all()
    z = of_rungs(mcmc)[0]
    assert worst(z, distribution(1.0)) < LIMIT
    assert worst(z, distribution(1.2)) > 2 * LIMIT


@slow
def test_masses_of_modes(of_all_rows_below: Any) -> None:
    """All quantities at once, with the covariance between chains: Hotelling's T."""
    z = of_rungs(of_all_rows_below[1])[0]
    edges = np.array([-1.5, 1.5])

    def p_value(truth: np.ndarray, draws: np.ndarray) -> float:
        places = np.searchsorted(edges, draws)
        shares = np.stack([(places == k).mean(1) for k in (0, 1)], -1)
        error = shares.mean(0) - truth[:2]
        n, d = shares.shape
        square = n * error @ np.linalg.solve(np.cov(shares.T), error)
        return float(stats.f.sf(square * (n - d) / (d * (n - 1)), d, n - d))

    truth = np.bincount(np.searchsorted(edges, GRID), distribution(1.0), minlength=3)
    assert p_value(truth, z) > 1e-5
    # one mode is off by an eighth
    assert p_value(truth + np.array([-0.04, 0.04, 0.0]), z) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("full", [pytest.param(True, marks=slow), False])
def test_rows_are_counted_as_elsewhere(full: bool) -> None:
    """The batch of a state, and that of a gradient, which both ends of a move read."""
    width = N if full else 64
    moves = {"proposal": proposal.langevin(), "adapt_step_size": False}
    if full:
        ladder, given = FULL, {"batch": batch.full()}
    else:
        ladder = {"batch_size": [64, 64], "temperatures": [4.0, 8.0]}
        given = {"batch_size": 64, "temperature": 4.0, "estimate": "augmented"}
    alone = MinibatchMH(target=TARGET, **given, **moves)
    found = []
    for built in (kernel(**ladder, **moves), alone):
        state = built.init(random.key(0), 0, jnp.zeros(()), (), {})
        found.append(jax.jit(lambda s, b=built: b.sample(s, (), {}))(state))
    chains = len(ladder["temperatures"])
    assert found[1].num_rows == 2 * width
    np.testing.assert_array_equal(found[0].rung_num_rows, [2 * width] * chains)
    assert found[0].num_rows == chains * found[1].num_rows


@slow
def test_noise_that_is_not_paid_for_is_found() -> None:
    """Without the penalty, a log density gains half the variance of its log weight."""
    built = kernel(penalty=False, **{**NESTED, "batch_size": [50, 25, 25]})
    mcmc = run(built, num_samples=2 * DRAWS)
    z = of_rungs(mcmc)[0]
    assert worst(z, distribution(2.0)) > 2 * LIMIT
    start = float(built.pilot["reference_energy"])
    origin = GRID[np.argmin(np.abs(ENERGY - start) + 9 * (np.abs(GRID - 3) > 1))]
    tilt = 0.5 * (0.15 * (GRID - origin)) ** 2
    wrong = distribution(2.0) * np.exp(tilt)
    assert worst(z, wrong / wrong.sum()) < worst(z, distribution(2.0)) / 3


@slow
def test_five_modes_by_their_weights() -> None:
    """The equi-energy sampler: shares of five distant modes, from several runs."""
    centers = np.array([[0, 0], [4, 1], [-1, 4], [-4, -1], [1, -4]], np.float32)
    weights, sd = np.array([0.1, 0.15, 0.2, 0.25, 0.3]), 0.4

    def log_density(z: Any) -> Any:
        square = jnp.square(z - centers).sum(-1)
        return jax.scipy.special.logsumexp(jnp.log(weights) - 0.5 * square / sd**2)

    target = Target(
        lambda z: -0.005 * jnp.sum(z**2), lambda z, i: log_density(z) / 8 + 0.0 * i, 8
    )
    truth = weights * np.exp(-0.5 * (centers**2).sum(-1) / (100 + sd**2))
    truth /= truth.sum()
    runs, each = 3, 8

    def shares(num_samples: int, **settings: Any) -> np.ndarray:
        built = MINTEE(
            target=target,
            batch=batch.full(),
            temperatures=[1.0, 2.5, 6.0, 15.0],
            **{"jump_prob": 0.3, **settings},
        )
        mcmc = MCMC(
            built,
            num_warmup=4000,
            num_samples=num_samples,
            num_chains=runs * each,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0), init_params=jnp.zeros((runs * each, 2)))
        z = np.asarray(mcmc.get_samples())[:, None]
        near = np.square(z - centers).sum(-1).argmin(-1).reshape(runs, -1)
        return np.stack([(near == k).mean(1) for k in range(5)], -1)

    distance = 0.5 * np.abs(shares(80_000) - truth).sum(-1)
    assert (distance < 0.03).all(), distance
    # without jumps, chains rarely leave the first mode that they reach
    alone = 0.5 * np.abs(shares(10_000, jump_prob=0.0) - truth).sum(-1)
    assert alone.min() > 2 * distance.max() and alone.mean() > 0.1, alone


@pytest.mark.slow
def test_chains_begin_one_after_the_other() -> None:
    mcmc = MCMC(
        kernel(**FULL),
        num_warmup=300,
        num_samples=1,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(random.key(1), init_params=jnp.zeros(4), collect_warmup=True)
    begins = np.array([250, 150, 50]), np.array([200, 100, 0])
    np.testing.assert_array_equal(mcmc.sampler._settings.stages(300), begins)
    rates = mcmc.get_extra_fields(group_by_chain=True)["jump_acceptance_rate"]
    tried = ~np.isnan(rates)
    assert not tried[:, :200, 0].any() and not tried[:, :100, 1].any()
    assert tried[:, 200:, 0].mean() > 0.2 and tried[:, 120:, 1].mean() > 0.2
    # a chain fills its rings from the middle of its steps on
    count = np.asarray(mcmc.last_state.rings.number)
    np.testing.assert_array_equal(count.sum(-1), [[150, 250]] * 4)


@pytest.mark.slow
def test_temperatures_of_batches() -> None:
    """The paper's batch sizes, which correspond to 0.995, and those that the noise
    needs."""
    many = Target(lambda z: 0.0, lambda z, i: -0.5 * (z - i % 7) ** 2, 100_000)

    def ladder(**settings: Any) -> tuple[MINTEE, Any]:
        built = MINTEE(target=many, **settings)
        built.init(random.key(0), 10, jnp.zeros(()), (), {})
        return built, built.pilot

    sizes = [100_000, 5378, 3841, 2744, 1960, 1400, 1000]
    built, pilot = ladder(batch_size=sizes, alpha=0.995)
    printed = [1.0, 19.41, 27.13, 37.93, 53.02, 74.06, 103.51]
    # the paper's batch sizes are not integers
    np.testing.assert_allclose(built.temperatures, printed, rtol=1e-3)
    assert built.batch_sizes == {"data": 100_000}
    rise = np.diff([pilot["reference_energy"], *pilot["energies"]])
    np.testing.assert_allclose(rise, np.sqrt(2.0) * np.array(printed[:-1]), rtol=5e-3)

    built, pilot = ladder(batch_size=1000, batch_ratio=2.0, num_replicas=3)
    assert built.rung_batch_sizes == (4000, 2000, 1000)
    rows = -0.5 * (3.0 - np.arange(100_000) % 7) ** 2  # the mean is 3
    np.testing.assert_allclose(pilot["row_sd"], rows.std(), rtol=1e-3)
    m = np.array([4000, 2000, 1000])
    noise = 1e5 * rows.std() * np.sqrt((1 - m / 1e5) / m)
    np.testing.assert_allclose(built.temperatures, noise, rtol=1e-3)

    built, pilot = ladder(batch_size=[9000, 800], lam=[0.5, 0.4], energies=[1e6])
    np.testing.assert_allclose(built.temperatures, [1e5**0.5, 1e5**0.6])
    np.testing.assert_allclose(pilot["energies"], [1e6])


def test_the_reference_is_the_lowest_of_several_modes() -> None:
    built = kernel(**FULL)
    built.init(random.key(0), 10, jnp.asarray(-3.0), (), {})
    lowest = ENERGY[np.abs(GRID - 3.0) < 0.5].min()
    np.testing.assert_allclose(built.pilot["reference_energy"], lowest, atol=0.05)


def test_a_ladder_is_no_rung() -> None:
    with pytest.raises(ValueError, match="is a ladder itself"):
        ReplicaExchange(kernel(**FULL), temperatures=[1.0, 2.0])


def model(y: Any) -> None:
    """The sign of mu is not determined."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", len(y), subsample_size=200) as idx:
        numpyro.sample("obs", dist.Normal(jnp.abs(mu), 4.0), obs=y[idx])


Y = np.asarray(2 + 4 * np.random.default_rng(1).normal(size=1000), np.float32)


def results_of(built: MINTEE, **settings: Any) -> Any:
    mcmc = MCMC(
        built,
        **{"num_warmup": 600, "num_samples": 1500, "progress_bar": False, **settings},
    )
    mcmc.run(random.key(0), Y)
    return to_inference_data(mcmc)


def test_results_of_a_model() -> None:
    built = MINTEE(
        model, temperatures=[5.0, 15.0, 45.0], batch_size=[600, 400, 200], num_steps=2
    )
    idata = results_of(built, num_chains=2, chain_method="vectorized")
    stats, attrs = idata["sample_stats"], idata["posterior"].attrs
    for name in ("energy", "ring", "energy_noise", "rung_num_rows"):
        assert stats[name].dims == ("chain", "draw", "ladder")
    assert stats["jump_acceptance_rate"].dims == ("chain", "draw", "pair")
    assert attrs["temperature"] == 5.0
    assert attrs["target"] == "prior * likelihood ** (1 / 5)"
    assert (stats["num_rows"] == 2 * 1200).all()
    assert 0.3 < (idata["posterior"]["mu"].values > 0).mean() < 0.7
    found = diagnose(idata)
    assert len(found.jump_rates) == 2 and min(found.jump_rates) > 0.1
    occupancy = np.array(found.ring_occupancy)
    table = diagnostics.ring_occupancy(idata)
    np.testing.assert_array_equal(table, occupancy)
    assert table["temperature"].values.tolist() == [5.0, 15.0, 45.0]
    assert table["rows"].values.tolist() == [600, 400, 200]
    np.testing.assert_allclose(table["energy"][1:], built.pilot["energies"])
    np.testing.assert_allclose(occupancy.sum(1), 1.0)
    assert occupancy[0, 0] > occupancy[1, 0] > occupancy[2, 0] > 0
    assert f"{occupancy[0, 0]:.0%} of the coldest chain's draws" in str(found)
    assert max(found.energy_noise) < 1 and not any("noise" in s for s in found.advice)
    assert 0.1 < found.acceptance_rate < 0.6


@pytest.mark.slow
def test_advice_on_a_ladder_of_noise_or_with_gaps() -> None:
    built = MINTEE(
        model, batch_size=[100, 80, 60, 50], temperatures=[1.0, 2.0, 3.0, 4.0]
    )
    idata = results_of(built, num_samples=300)
    found = diagnose(idata)
    assert max(found.energy_noise) > 1 and found.unreliable > 0.5
    text = " ".join(found.advice)
    assert "stuck at underestimated energies" in text
    assert "temperatures=[" in text and "batch_size=[" in text

    stats = idata["sample_stats"]
    # noise that the same number of rows would reduce to one temperature
    known = stats["energy_noise"]
    equal = [1.0, 1.3, 1.7, 2.01]
    stats["energy_noise"] = known.copy(data=np.broadcast_to(equal, known.shape))
    (text,) = (s for s in diagnose(idata).advice if "underestimated" in s)
    hotter, larger, kept = (json.loads(s) for s in re.findall(r"=(\[.*?\])", text))
    assert (np.diff(hotter) > 0).all() and (np.diff(larger) < 0).all()
    assert kept == [1.0, 2.0, 3.0, 4.0]
    for settings in (
        {"temperatures": hotter, "batch_size": [100, 80, 60, 50]},
        {"temperatures": kept, "batch_size": larger},
        {"batch_size": larger},  # temperatures that follow from the batches ascend
    ):
        results_of(MINTEE(model, **settings), num_warmup=10, num_samples=10)
    stats["energy_noise"] = known
    stats["energy_noise"] = 0.1 * stats["energy_noise"]
    rates = np.full(stats["jump_acceptance_rate"].shape, 0.5)
    rates[..., 1] = 0.01  # refused
    rates[:, 5:, 2] = np.nan  # hardly tried
    known = stats["jump_acceptance_rate"]
    stats["jump_acceptance_rate"] = known.copy(data=rates)
    text = " ".join(diagnose(idata).advice)
    assert "underestimated energies" not in text and "chain 0 tried" not in text
    assert "the jumps of chain 1 are accepted at a rate of 0.01" in text
    assert "chain 3 has hardly visited its energies" in text
    assert "num_replicas=6" in text

    assert "again and again" not in text
    # a ring that chain 0 visits often and chain 1 rarely
    rings = np.ones(stats["ring"].shape, int)
    rings[:, ::4, 0] = 0
    rings[:, :1, 1] = 0
    stats["ring"] = stats["ring"].copy(data=rings)
    text = " ".join(diagnose(idata).advice)
    assert "chain 0 has 25% of its draws in ring 0" in text
    assert "about 1:" in text and "ring_width=0.01" in text
