"""Proposals: the reported ratio of densities is that of the moves."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_minibatch import proposal
from numpyro_minibatch.proposal import (
    Bent,
    Proposal,
    ProposalContext,
    Proposed,
    Scales,
    Whitening,
    _on_surrogate,
    follow,
)

pytestmark = pytest.mark.x64  # in double precision, too

X64 = jax.config.jax_enable_x64
NUM_CHAINS = 20_000

# A skewed target in three dimensions that can be drawn from exactly ----------------


def log_target(z: jax.Array) -> jax.Array:
    x, y, u = z
    scale = jnp.exp(0.3 * x)
    return (
        2 * x
        - jnp.exp(x)
        - jnp.log(scale)
        - 0.5 * ((y - 0.6 * x) / scale) ** 2
        - 0.5 * ((u - jnp.sin(y)) / 0.8) ** 2
    )


def exact_draws(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.log(rng.gamma(2.0, size=n))
    y = 0.6 * x + np.exp(0.3 * x) * rng.normal(size=n)
    u = np.sin(y) + 0.8 * rng.normal(size=n)
    return np.stack([x, y, u], -1)


# A surrogate that is far from it: other centre, other scales, light tails ----------

CENTER = jnp.array([0.7, 0.1, -0.3])
ROOT = jnp.array([[0.8, 0.4, -0.2], [0.0, 1.3, 0.3], [0.0, 0.0, 0.9]])  # C, transposed
ROOTS = {"dense": ROOT, "diagonal": jnp.array([0.7, 1.4, 0.9])}


def log_surrogate(z: jax.Array) -> jax.Array:
    w = (z - CENTER) / jnp.array([1.2, 0.9, 1.3])
    return -0.5 * jnp.square(w).sum() - 0.3 * w[0] * w[1] - 0.05 * (w**4).sum()


def wrong_gradient(z: jax.Array) -> jax.Array:
    """An approximate gradient of the target, as from a minibatch."""
    return jax.grad(log_target)(1.1 * z) + jnp.array([0.3, -0.2, 0.1])


def context(root: str = "dense") -> ProposalContext:
    return ProposalContext(
        wrong_gradient, Whitening(ROOTS[root]), CENTER, log_surrogate
    )


@dataclass(frozen=True)
class WithSetUp(Proposal):
    """The move of ``surrogate_hmc`` after a set-up with these results."""

    results: tuple[tuple[str, Any], ...]
    uses_surrogate = True
    adapts_step_size = False

    def propose(self, key: Any, z: Any, step_size: Any, context: Any) -> Proposed:
        at = context._replace(**dict(self.results))
        return proposal.surrogate_hmc().propose(key, z, step_size, at)


# The first coordinate drives both others, and the second one the third one.
LOG_SCALE_OF_THIRD = [[0.3, 0.2], [0.2, -0.2]]
BEND_OF_THIRD = [[0.0, -0.2], [-0.1, 0.3]]
LOCATION_OF_THIRD = [[-0.2, 0.4], [0.4, -0.3]]
SCALES = Scales(
    drivers=jnp.array([[0.8, 0.0, 0.0], [0.0, 1.1, 0.0]]),
    curves=jnp.array(
        [
            [[[0.0, 0.0], [0.0, 0.0]], [[0.4, 0.0], [-0.1, 0.0]], LOG_SCALE_OF_THIRD],
            [[[0.0, 0.0], [0.0, 0.0]], [[0.1, 0.0], [0.2, 0.0]], BEND_OF_THIRD],
            [[[0.0, 0.0], [0.0, 0.0]], [[0.5, 0.0], [-0.7, 0.0]], LOCATION_OF_THIRD],
        ]
    ),
    knees=jnp.array([0.3, -0.2]),
    widths=jnp.array([0.7, 1.2]),
    tails=jnp.array(
        [[0.05, 0.1, 0.0], [0.5, -0.4, 0.0], [-0.4, 0.3, 0.0], [0.5, 0.8, 1.0]]
    ),
)


@dataclass(frozen=True)
class Bends(Proposal):
    """The move of ``surrogate_hmc`` in coordinates whose scales vary."""

    independent: float
    by_set_up: bool = False  # one of eight trajectories then takes shorter steps
    uses_surrogate = True
    adapts_step_size = False

    def propose(self, key: Any, z: Any, step_size: Any, context: Any) -> Proposed:
        bent = Bent(CENTER - 0.2, Whitening(ROOT, scales=SCALES))
        bent = jax.tree.map(lambda x: x.astype(z.dtype), bent)
        chosen = (None, None) if self.by_set_up else (3, 0.7)
        move = proposal.surrogate_hmc(*chosen, independent=self.independent)
        at = context._replace(bent=bent, num_steps=2)
        return move.propose(key, z, step_size, at)


ONE_TURN = WithSetUp((("num_steps", 0), ("over_relaxed", True)))
LONGER = WithSetUp((("num_steps", 2), ("long", True)))
PROPOSALS = {
    "random_walk": (proposal.random_walk(), 0.8),
    "langevin": (proposal.langevin(), 0.7),
    # steps so long that the first stage rejects many moves
    "surrogate_hmc": (proposal.surrogate_hmc(3, 0.9, jitter=0.3), 123.0),
    "surrogate_hmc, one step": (proposal.surrogate_hmc(1, 1.1, 0.0, 0.0), 123.0),
    "surrogate_hmc, half of them draws": (
        proposal.surrogate_hmc(3, 0.9, independent=0.5),
        123.0,
    ),
    "surrogate_hmc, longer": (LONGER, 123.0),
    "surrogate_hmc, bent": (Bends(0.0), 123.0),
    "surrogate_hmc, bent, half of them draws": (Bends(0.5), 123.0),
    "surrogate_hmc, bent, with shorter steps": (Bends(0.0, by_set_up=True), 123.0),
    "delayed_random_walk": (proposal.delayed_random_walk(), 0.8),
    "independence": (proposal.independence(), 123.0),
    "student_t": (proposal.student_t(), 123.0),
    "student_t, fractional": (proposal.student_t(2.5), 123.0),
    "pcn": (proposal.preconditioned_crank_nicolson(), 0.6),
    "pcn, fixed": (proposal.preconditioned_crank_nicolson(0.7), 123.0),
    "pcn, long": (proposal.preconditioned_crank_nicolson(), 1.7),
    "one turn": (ONE_TURN, 123.0),
    "mixture": (
        proposal.mixture(
            {
                proposal.delayed_random_walk(): 1.0,
                proposal.independence(): 2.0,
                proposal.langevin(): 1.0,
                proposal.surrogate_hmc(3, 0.9): 1.0,
            }
        ),
        0.8,
    ),
}
every_proposal = pytest.mark.parametrize("name", PROPOSALS)


def many(
    choice: Proposal,
    seed: int,
    z: Any,
    step_size: float = 1.0,
    at: ProposalContext | None = None,
) -> Proposed:
    """A proposal from each row of ``z``."""
    at = context() if at is None else at
    one = jax.vmap(lambda k, z: choice.propose(k, z, jnp.asarray(step_size), at))
    return jax.jit(one)(jax.random.split(jax.random.key(seed), len(z)), jnp.asarray(z))


# Detailed balance ------------------------------------------------------------------


def step(
    choice: Proposal, step_size: float, root: str, key: jax.Array, z: jax.Array
) -> jax.Array:
    """Propose, and decide on the target itself."""
    key_proposal, key_accept = jax.random.split(key)
    made = choice.propose(key_proposal, z, jnp.asarray(step_size), context(root))
    log_ratio = log_target(made.z) - log_target(z) + made.log_q_ratio
    threshold = -jax.random.exponential(key_accept)
    return jnp.where(log_ratio >= threshold, made.z, z)


def features(z: Any) -> np.ndarray:
    x, y, u = np.moveaxis(np.asarray(z, float), -1, 0)
    return np.stack([x, y, u, x * x, y * y, u * u, x * y, y * u], -1)


@cache
def expected_features() -> np.ndarray:
    """Means of the features by quadrature."""
    axes = [np.arange(-9, 3.2, 0.2), np.arange(-8, 10, 0.15), np.arange(-5, 5, 0.4)]
    x, y, u = np.meshgrid(*axes, indexing="ij")
    scale = np.exp(0.3 * x)
    log_density = 2 * x - np.exp(x) - np.log(scale)
    log_density -= ((y - 0.6 * x) / scale) ** 2 / 2 + ((u - np.sin(y)) / 0.8) ** 2 / 2
    density = np.exp(log_density)
    density /= density.sum()
    values = [x, y, u, x * x, y * y, u * u, x * y, y * u]
    return np.array([(density * value).sum() for value in values])


def z_scores(samples: Any) -> np.ndarray:
    samples = np.asarray(samples, float)
    return samples.mean(0) / (samples.std(0) / len(samples) ** 0.5)


def imbalance(choice: Proposal, step_size: float, root: str = "dense") -> float:
    """Largest standard score among means that are zero under detailed balance.

    For a reversible step from the target the two ends can be exchanged, so
    ``f(z) g(z') - f(z') g(z)`` has mean zero for all functions ``f`` and ``g``; with
    ``g = 1`` that is invariance. After three more steps the means are compared with
    those of quadrature.
    """
    keys = jax.random.split(jax.random.key(len(repr(choice))), 4)
    one = jax.jit(jax.vmap(lambda k, z: step(choice, step_size, root, k, z)))
    start = jnp.asarray(exact_draws(1, NUM_CHAINS))
    end = one(jax.random.split(keys[0], NUM_CHAINS), start)
    ends = []
    center, scale = features(start).mean(0), features(start).std(0)
    for z in (start, end):
        f = (features(z) - center) / scale
        ends.append(np.concatenate([np.ones((NUM_CHAINS, 1)), f], 1))
    first, second = np.triu_indices(9, 1)
    there = ends[0][:, first] * ends[1][:, second]
    back = ends[1][:, first] * ends[0][:, second]
    for key in keys[1:]:
        end = one(jax.random.split(key, NUM_CHAINS), end)
    moments = features(end) - expected_features()
    scores = [z_scores(there - back), z_scores(moments)]
    return float(np.abs(np.concatenate(scores)).max())


def test_exact_draws_have_the_moments_of_quadrature() -> None:
    draws = features(exact_draws(0, 400_000))
    assert np.abs(z_scores(draws - expected_features())).max() < 5


@every_proposal
def test_detailed_balance(name: str) -> None:
    assert imbalance(*PROPOSALS[name]) < 5


@pytest.mark.parametrize("name", ["langevin", "surrogate_hmc", "pcn"])
def test_detailed_balance_with_a_diagonal_whitening(name: str) -> None:
    assert imbalance(*PROPOSALS[name], root="diagonal") < 5


@dataclass(frozen=True)
class Altered(Proposal):
    """Modifies the result of another proposal."""

    choice: Proposal
    change: Callable[[Proposed], Proposed]

    def propose(self, key: Any, z: Any, step_size: Any, context: Any) -> Proposed:
        return self.change(self.choice.propose(key, z, step_size, context))


@pytest.mark.parametrize(
    "name",
    ["langevin", "surrogate_hmc", "delayed_random_walk", "independence", "student_t"]
    + ["pcn", "one turn", "mixture"],
)
def test_a_forgotten_ratio_is_noticed(name: str) -> None:
    def forget(made: Proposed) -> Proposed:
        return made._replace(log_q_ratio=0.0 * made.log_q_ratio)

    choice, step_size = PROPOSALS[name]
    assert imbalance(Altered(choice, forget), step_size) > 8


@pytest.mark.parametrize("independent", [0.0, 1.0 - 1e-6])
def test_a_forgotten_volume_is_noticed(
    independent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coordinates whose scales vary change the volume along the way."""
    monkeypatch.setattr(Whitening, "log_volume", lambda self, w: 0.0)
    assert imbalance(Bends(independent), 123.0) > 8


def test_a_reversed_ratio_is_noticed() -> None:
    def reverse(made: Proposed) -> Proposed:
        return made._replace(log_q_ratio=-made.log_q_ratio)

    choice, step_size = PROPOSALS["pcn"]
    assert imbalance(Altered(choice, reverse), step_size) > 8


@pytest.mark.parametrize("name", ["surrogate_hmc", "delayed_random_walk"])
def test_a_first_stage_that_never_rejects_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(z: Any, z_new: Any, logs: Any, log_ratio: Any, noise: Any) -> Proposed:
        return Proposed(z_new, logs[0] - logs[1])

    monkeypatch.setattr(_on_surrogate, "accept_on_surrogate", careless)
    assert imbalance(*PROPOSALS[name]) > 8


def test_a_walk_with_a_drift_is_noticed() -> None:
    def drift(made: Proposed) -> Proposed:
        return made._replace(z=made.z + 0.1)

    choice, step_size = PROPOSALS["random_walk"]
    assert imbalance(Altered(choice, drift), step_size) > 8


# The ratio, number by number -------------------------------------------------------


def proposals_made(
    name: str, root: str, n: int = 200
) -> tuple[jax.Array, Proposed, float]:
    choice, step_size = PROPOSALS[name]
    z = CENTER + np.random.default_rng(0).normal(size=(n, 3))
    made = many(choice, 1, z, step_size, context(root))
    return z, made, step_size


def log_q(name: str, root: str, step_size: float) -> Callable[[Any, Any], jax.Array]:
    """``log q(to | start)`` from the densities of NumPyro."""
    tril = ROOTS[root].T if root == "dense" else jnp.diag(ROOTS[root])

    def normal(mean: Any, scale: float = 1.0) -> dist.Distribution:
        return dist.MultivariateNormal(mean, scale_tril=scale * tril)

    def density(to: Any, start: Any) -> jax.Array:
        if name == "langevin":
            drift = 0.5 * step_size**2 * tril @ tril.T @ wrong_gradient(start)
            return normal(start + drift, step_size).log_prob(to)
        if name == "independence":
            return normal(CENTER).log_prob(to)
        if name.startswith("student_t"):
            df = {"student_t": 5.0, "student_t, fractional": 2.5}[name]
            return dist.MultivariateStudentT(df, CENTER, tril).log_prob(to)
        cos = {"pcn": 0.8, "pcn, fixed": 0.51**0.5, "one turn": -0.3}[name]
        mean = CENTER + cos * (start - CENTER)
        return normal(mean, (1 - cos**2) ** 0.5).log_prob(to)

    return density


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("langevin", "dense"),
        ("langevin", "diagonal"),
        ("independence", "dense"),
        ("independence", "diagonal"),
        ("student_t", "dense"),
        ("student_t, fractional", "dense"),
        ("pcn", "dense"),
        ("pcn, fixed", "diagonal"),
        ("one turn", "dense"),
    ],
)
def test_the_ratio_is_that_of_the_densities(name: str, root: str) -> None:
    z, made, step_size = proposals_made(name, root)
    density = jax.jit(jax.vmap(log_q(name, root, step_size)))
    expected = density(z, made.z) - density(made.z, z)
    tolerance = 1e-9 if X64 else 2e-3
    np.testing.assert_allclose(made.log_q_ratio, expected, tolerance, tolerance)
    assert np.abs(expected).max() > 1
    assert np.all(made.moved) and np.all(made.tunes)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("name", ["surrogate_hmc", "delayed_random_walk"])
def test_a_first_stage_answers_with_the_surrogate_or_stays(
    name: str, root: str
) -> None:
    z, made, _ = proposals_made(name, root)
    moved = np.asarray(made.moved)
    assert 0.1 < moved.mean() < 0.9
    logs = jax.jit(jax.vmap(log_surrogate))
    expected = np.asarray(logs(z) - logs(made.z))
    np.testing.assert_allclose(
        np.asarray(made.log_q_ratio)[moved], expected[moved], 1e-4, 1e-5
    )
    assert not np.any(np.asarray(made.log_q_ratio)[~moved])
    same = np.asarray(made.z) == np.asarray(z)
    assert same[~moved].all() and not same[moved].all(-1).any()


def test_independence_is_the_longest_crank_nicolson_step() -> None:
    z = jnp.array([1.0, -2.0, 0.5])
    key = jax.random.key(3)
    for step_size in (1.0, 40.0, np.inf):
        long = proposal.preconditioned_crank_nicolson().propose(
            key, z, jnp.asarray(step_size), context()
        )
        independent = proposal.independence().propose(key, z, 1.0, context())
        np.testing.assert_allclose(long.z, independent.z, 1e-6)
        np.testing.assert_allclose(long.log_q_ratio, independent.log_q_ratio, 1e-5)


@pytest.mark.parametrize("df", [3.0, 2.5, None])
def test_the_distribution_of_independent_draws(df: float | None) -> None:
    choice = proposal.independence() if df is None else proposal.student_t(df)
    n = 20_000
    made = many(choice, 2, np.zeros((n, 3)))
    w = np.linalg.solve(np.asarray(ROOT.T), np.asarray(made.z - CENTER).T)
    distribution = stats.chi2(3) if df is None else stats.f(3, df)
    squares = (w**2).sum(0) / (1 if df is None else 3)
    assert stats.kstest(squares, distribution.cdf).pvalue > 1e-6
    # directions are uniform, and in three dimensions so is every coordinate of one
    assert stats.kstest(w[1] / (w**2).sum(0) ** 0.5, stats.uniform(-1, 2).cdf)[1] > 1e-6
    other = stats.chi2(3.3) if df is None else stats.f(3, 0.2 * df)
    assert stats.kstest(squares, other.cdf).pvalue < 1e-6


# Trajectories ----------------------------------------------------------------------


START = jnp.array([0.2, 1.5, -1.0]), jnp.array([-0.4, 0.8, 1.2])


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_trajectory_goes_back_the_way_it_came(num_steps: int, root: str) -> None:
    at = context(root)
    z, momentum, logs, _ = follow(*START, jnp.asarray(0.4), num_steps, at)
    assert np.abs(z - START[0]).max() > 0.1
    np.testing.assert_allclose(logs, [log_surrogate(START[0]), log_surrogate(z)], 1e-6)
    back, momentum, *_ = follow(z, -momentum, jnp.asarray(0.4), num_steps, at)
    tolerance = 1e-12 if X64 else 1e-5
    np.testing.assert_allclose(back, START[0], tolerance, tolerance)
    np.testing.assert_allclose(-momentum, START[1], tolerance, tolerance)


def test_a_trajectory_preserves_volume() -> None:
    def flow(state: jax.Array) -> jax.Array:
        z, momentum, *_ = follow(state[:3], state[3:], jnp.asarray(0.4), 4, context())
        return jnp.concatenate([z, momentum])

    jacobian = jax.jacfwd(flow)(jnp.concatenate(START))
    assert np.linalg.det(jacobian) == pytest.approx(1.0, rel=1e-10 if X64 else 1e-4)


def test_a_trajectory_is_of_second_order() -> None:
    def error(num_steps: int) -> float:
        z, momentum, logs, _ = follow(
            *START, jnp.asarray(1.6 / num_steps), num_steps, context()
        )
        kinetic = 0.5 * (jnp.square(momentum) - jnp.square(START[1])).sum()
        return abs(float(logs[1] - logs[0] - kinetic))

    assert 3.0 < error(8) / error(16) < 5.0  # of first order: 2
    assert error(16) < 0.05


@pytest.mark.parametrize("step", [0.4, 1.3])
def test_a_trajectory_is_exact_on_a_normal_surrogate(step: float) -> None:
    """The trajectory is exact for any length of its steps."""
    normal = dist.MultivariateNormal(CENTER, scale_tril=ROOT.T).log_prob
    at = context()._replace(log_surrogate=normal)
    z, momentum, logs, grown = follow(*START, jnp.asarray(step), 3, at)
    lost = proposal.log_metropolis_ratio(START[1], momentum, logs, grown)
    assert abs(float(lost)) < (1e-12 if X64 else 1e-5)
    white = np.linalg.solve(np.asarray(ROOT).T, np.asarray(START[0] - CENTER))
    there = np.cos(3 * step) * white + np.sin(3 * step) * np.asarray(START[1])
    expected = np.asarray(CENTER) + np.asarray(ROOT).T @ there
    np.testing.assert_allclose(z, expected, rtol=1e-4, atol=1e-4)


def test_a_rotation_on_a_normal_surrogate() -> None:
    """The move preserves the distribution, and its correlation is -0.3."""
    at = context()._replace(num_steps=0, over_relaxed=True)
    n = 40_000
    z = CENTER + np.random.default_rng(7).normal(size=(n, 3)) @ ROOT
    made = many(proposal.surrogate_hmc(), 5, z, at=at)
    there = np.linalg.solve(np.asarray(ROOT.T), np.asarray(made.z - CENTER).T)
    for one in there:
        assert stats.kstest(one, stats.norm.cdf).pvalue > 1e-6
    here = np.linalg.solve(np.asarray(ROOT.T), np.asarray(z - CENTER).T)
    both = np.cov(here, there)
    expected = np.kron([[1, -0.3], [-0.3, 1]], np.eye(3))
    np.testing.assert_allclose(both, expected, atol=5 * (2 / n) ** 0.5)
    ratio = 0.5 * (there**2 - here**2).sum(0)
    np.testing.assert_allclose(made.log_q_ratio, ratio, 1e-3, 1e-3)
    assert np.abs(ratio).max() > 1
    assert not proposal.surrogate_hmc().evaluations(at)
    further = at._replace(over_relaxed=False)
    choices = proposal.surrogate_hmc(), proposal.independence()
    pair = [many(choice, 6, z[:9], at=further) for choice in choices]
    np.testing.assert_array_equal(pair[0].z, pair[1].z)
    np.testing.assert_array_equal(pair[0].log_q_ratio, pair[1].log_q_ratio)
    assert proposal.surrogate_hmc(3).evaluations(at) == 4
    assert proposal.delayed_random_walk().evaluations(at) == 2
    mixed = proposal.mixture(
        [(1, proposal.independence()), (2, proposal.surrogate_hmc(3))]
    )
    assert mixed.evaluations(at) == 4 and mixed.follows_surrogate


def test_the_precision_of_draws_by_one_rotation() -> None:
    """The numbers of the docstring: independent draws that one draw is worth."""
    lags = _on_surrogate.OVERRELAXATION_COSINE ** np.arange(1, 40)

    def worth(autocorrelations: Any) -> float:
        return 1 / (1 + 2 * np.sum(autocorrelations))

    def indicator(probability: float) -> list[float]:
        at = np.full(2, stats.norm.ppf(probability))
        both = [
            stats.multivariate_normal.cdf(at, cov=[[1, lag], [lag, 1]]) for lag in lags
        ]
        return (np.array(both) - probability**2) / (probability * (1 - probability))

    assert worth(lags) == pytest.approx(1.9, abs=0.05)
    assert worth(lags**2) == pytest.approx(0.8, abs=0.05)  # for squares
    assert worth(indicator(0.5)) == pytest.approx(1.4, abs=0.05)
    assert worth(indicator(0.05)) == pytest.approx(1.05, abs=0.01)


def test_a_quarter_of_a_period_forgets_the_start() -> None:
    """A normal surrogate whose scales equal those of the whitening."""
    normal = ProposalContext(
        wrong_gradient,
        Whitening(ROOT),
        CENTER,
        dist.MultivariateNormal(CENTER, scale_tril=ROOT.T).log_prob,
    )
    n = 4_000
    z = CENTER + np.random.default_rng(4).normal(size=(n, 3)) @ ROOT
    made = many(proposal.surrogate_hmc(independent=0.0), 5, z, at=normal)
    assert np.asarray(made.moved).mean() > 0.95
    both = np.corrcoef(np.asarray(z).T, np.asarray(made.z).T)
    assert np.abs(both[:3, 3:]).max() < 0.1


@pytest.mark.parametrize(
    "settings, here, expected",
    [
        ({}, 4, (4, 0.39)),
        ({}, 16, (16, 0.0975)),  # the number of steps from the set-up
        ({"num_steps": 6}, 16, (6, 0.26)),  # a quarter of a period either way
        ({"step_size": 0.2}, 16, (8, 0.2)),
        ({"step_size": 5.0}, 16, (1, 5.0)),
        ({"num_steps": 3, "step_size": 0.9}, 16, (3, 0.9)),
    ],
)
def test_the_length_of_a_trajectory(
    settings: dict[str, Any], here: int, expected: tuple[int, float]
) -> None:
    choice: Any = proposal.surrogate_hmc(**settings)
    at = context()._replace(num_steps=here, long=True)
    found = choice.trajectory(at)
    # longer, if the set-up chooses their length
    times = 1 if settings else 3
    assert choice.evaluations(at) == times * expected[0] + 1
    assert choice.evaluations(at._replace(long=False)) == expected[0] + 1
    assert found == pytest.approx(expected)


def test_the_step_sizes_of_trajectories_are_uniform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(z: Any, momentum: Any, step: Any, *rest: Any) -> Any:
        return jnp.full_like(z, step), momentum, jnp.zeros(2), 0.0

    monkeypatch.setattr(_on_surrogate, "follow", record)
    choice = proposal.surrogate_hmc(step_size=0.5, jitter=0.2, independent=0.0)
    made = many(choice, 6, np.zeros((20_000, 3)))
    steps = np.asarray(made.z)[:, 0]
    assert 0.4 <= steps.min() and steps.max() <= 0.6 + 1e-6
    assert stats.kstest(steps, stats.uniform(0.4, 0.2).cdf).pvalue > 1e-6


@pytest.mark.parametrize(
    ("size", "share", "fit", "expected"),
    [
        (1, None, False, 0.35),
        (2, None, True, 0.5),
        (3, None, True, 0.2),
        (16, None, False, 0.2),
        (17, None, False, 0.0),
        (17, 0.7, False, 0.7),
        (3, 0.0, False, 0.0),
    ],
)
def test_the_share_of_independent_draws(
    size: int, share: float | None, fit: bool, expected: float
) -> None:
    def flat(z: jax.Array) -> jax.Array:  # accepts all trajectories of tiny steps
        return -0.5 * jnp.square(z).sum()

    at = ProposalContext(flat, Whitening(jnp.ones(size)), jnp.zeros(size), flat)
    at = at._replace(draws_fit=fit)
    choice = proposal.surrogate_hmc(1, 1e-3, independent=share)
    z = np.full((20_000, size), 2.0)  # draws are accepted from this tail
    made = many(choice, 8, z, at=at)
    far = np.linalg.norm(np.asarray(made.z) - z, axis=1) > 0.1
    assert 0.8 * expected <= far.mean() <= expected + 0.012


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ["surrogate_hmc", "delayed_random_walk"])
def test_where_the_surrogate_is_not_finite_is_never_entered(
    name: str, value: float
) -> None:
    def cut(z: jax.Array) -> jax.Array:
        return jnp.where(z[0] > 0.9, value, log_surrogate(z))

    choice, step_size = PROPOSALS[name]
    at = context()._replace(log_surrogate=cut)
    made = many(choice, 7, np.tile(CENTER, (500, 1)), step_size, at)
    assert np.isfinite(made.z).all() and np.isfinite(made.log_q_ratio).all()
    assert (np.asarray(made.z)[:, 0] <= 0.9).all()
    assert 0.1 < np.asarray(made.moved).mean() < 0.9


def test_a_trajectory_that_blows_up_is_a_stay() -> None:
    at = context()._replace(log_surrogate=lambda z: (z**4).sum())
    z = 10.0 * jnp.ones(3)
    made = proposal.surrogate_hmc(16, 0.39).propose(
        jax.random.key(8), z, jnp.asarray(1.0), at
    )
    assert not made.moved and made.log_q_ratio == 0
    assert (np.asarray(made.z) == 10).all()


# Mixtures --------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift(Proposal):
    """A move by a recognisable amount."""

    by: float = 0.0

    def propose(self, key: Any, z: Any, step_size: Any, context: Any) -> Proposed:
        return Proposed(z + self.by, jnp.asarray(self.by, z.dtype))


def test_mixtures_choose_by_weight() -> None:
    parts = [(2.0, Shift(1.0)), (5, Shift(2.0)), (np.float32(1.0), Shift(3.0))]
    choice = proposal.mixture([*parts, (2.0, proposal.mixture({Shift(4.0): 1.0}))])
    n = 20_000
    made = many(choice, 9, np.zeros((n, 3)))
    shifts = np.asarray(made.z)[:, 0]
    np.testing.assert_array_equal(shifts, made.log_q_ratio)
    counts = np.bincount(shifts.astype(int), minlength=5)[1:]
    assert stats.chisquare(counts, n * np.array([0.2, 0.5, 0.1, 0.2])).pvalue > 1e-6
    assert stats.chisquare(counts, n * np.array([0.2, 0.4, 0.2, 0.2])).pvalue < 1e-6


def test_mixtures_need_what_their_components_need() -> None:
    walk, langevin = proposal.random_walk(), proposal.langevin()
    fixed = proposal.preconditioned_crank_nicolson(0.5)
    both = proposal.mixture([(1, walk), (3, langevin)])
    assert (both.uses_gradient, both.uses_surrogate) == (True, False)
    assert both.adapts_step_size
    assert both.target_accept_prob == pytest.approx(0.25 * 0.3 + 0.75 * 0.57)
    assert both.default_step_size == 1.0
    surrogate = proposal.mixture([(1, proposal.surrogate_hmc()), (9, fixed)])
    assert (surrogate.uses_gradient, surrogate.uses_surrogate) == (False, True)
    assert not surrogate.adapts_step_size
    some = proposal.mixture([(9, proposal.surrogate_hmc()), (1, walk)])
    assert some.adapts_step_size and some.uses_surrogate
    assert some.target_accept_prob == 0.3


def test_only_components_with_a_step_size_tune_it() -> None:
    fixed = proposal.preconditioned_crank_nicolson(0.5)
    inner = proposal.mixture([(1, fixed), (1, Shift(100.0))])
    choice = proposal.mixture([(1, proposal.independence()), (2, inner)])
    made = many(choice, 10, np.tile(CENTER, (500, 1)))
    tuned = np.asarray(made.z)[:, 0] > 50
    np.testing.assert_array_equal(made.tunes, tuned)
    assert 0.2 < tuned.mean() < 0.5


# Values, keys, types ---------------------------------------------------------------


@every_proposal
def test_proposals_are_values(name: str) -> None:
    choice, _ = PROPOSALS[name]
    copy = pickle.loads(pickle.dumps(choice))
    assert copy == choice and hash(copy) == hash(choice)
    flags = ["target_accept_prob", "uses_gradient", "uses_surrogate"]
    for flag in [*flags, "adapts_step_size", "default_step_size"]:
        assert getattr(copy, flag) == getattr(choice, flag)
    assert sum(choice == other for other, _ in PROPOSALS.values()) <= 2


@every_proposal
def test_no_key_is_used_twice(name: str) -> None:
    choice, step_size = PROPOSALS[name]
    with jax.debug_key_reuse(True):
        jax.jit(
            lambda key, z: choice.propose(key, z, jnp.asarray(step_size), context())
        ).lower(jax.random.key(0), CENTER)


@every_proposal
def test_types_are_those_of_the_position(name: str) -> None:
    choice, step_size = PROPOSALS[name]
    z = CENTER.astype(jnp.float32)
    at = jax.tree.map(lambda x: x.astype(jnp.float32), context()[1:3])
    smooth = ProposalContext(lambda z: -z, *at, lambda z: -0.5 * (z**2).sum())
    made = jax.eval_shape(
        lambda key: choice.propose(key, z, jnp.float32(step_size), smooth),
        jax.random.key(0),
    )
    assert made.z.dtype == made.log_q_ratio.dtype == jnp.float32
    assert made.z.shape == (3,) and made.log_q_ratio.shape == ()
    assert made.moved.dtype == made.tunes.dtype == bool


@every_proposal
def test_only_what_was_announced_is_used(name: str) -> None:
    choice, _ = PROPOSALS[name]

    def refuse(z: jax.Array) -> jax.Array:
        raise AssertionError("not announced")

    at = context()
    if not choice.uses_gradient:
        at = at._replace(gradient=refuse)
    if not choice.uses_surrogate:
        at = at._replace(center=None, log_surrogate=None)
    jaxpr = jax.make_jaxpr(lambda e, k, z: choice.propose(k, z, e, at))(
        1.0, jax.random.key(0), CENTER
    ).jaxpr
    step_size = jaxpr.invars[0]
    used = any(step_size is x for equation in jaxpr.eqns for x in equation.invars)
    assert used == choice.adapts_step_size


def test_the_derivatives_of_coordinates_whose_scales_vary() -> None:
    whitening = Whitening(ROOT, scales=SCALES)
    w = jnp.array([0.6, -1.1, 0.8])
    tolerance = 1e-10 if X64 else 1e-4
    np.testing.assert_allclose(
        whitening.whiten(whitening.color(w)), w, tolerance, tolerance
    )

    def grown(w: jax.Array) -> jax.Array:
        return jnp.linalg.slogdet(jax.jacfwd(whitening.color)(w))[1]

    difference = whitening.log_volume(w) - whitening.log_volume(0 * w)
    np.testing.assert_allclose(difference, grown(w) - grown(0 * w), rtol=tolerance)
    assert abs(difference) > 0.01

    def log_density(w: jax.Array) -> jax.Array:
        return log_surrogate(CENTER + whitening.color(w)) + grown(w)

    gradient = jax.grad(log_surrogate)(CENTER + whitening.color(w))
    np.testing.assert_allclose(
        whitening.whiten_gradient(gradient, w),
        jax.grad(log_density)(w),
        tolerance,
        tolerance,
    )


def test_whitening_is_undone_by_coloring() -> None:
    w = jnp.array([0.3, -1.0, 2.0])
    for root in ROOTS.values():
        whitening = Whitening(root)
        np.testing.assert_allclose(whitening.whiten(whitening.color(w)), w, 1e-5)


# Errors ----------------------------------------------------------------------------

FRACTION = "a number above 0 and at most 1"


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: proposal.surrogate_hmc(0), ValueError, r"num_steps=...\) must be"),
        (lambda: proposal.surrogate_hmc(2.0), TypeError, "positive integer, got 2.0"),
        (lambda: proposal.surrogate_hmc(True), TypeError, "got True"),
        (lambda: proposal.surrogate_hmc(4, 0.0), ValueError, r"step_size=...\) must"),
        (lambda: proposal.surrogate_hmc(4, np.inf), ValueError, "got inf"),
        (lambda: proposal.surrogate_hmc(4, "x"), TypeError, r"got 'x' \(str\)"),
        (lambda: proposal.surrogate_hmc(jitter=1), ValueError, "below 1, got 1"),
        (lambda: proposal.surrogate_hmc(jitter=-0.1), ValueError, "got -0.1"),
        (lambda: proposal.surrogate_hmc(independent=1), ValueError, "below 1, got 1"),
        (lambda: proposal.surrogate_hmc(independent="x"), TypeError, "got 'x'"),
        (lambda: proposal.student_t(0), ValueError, r"student_t\(df=...\).*got 0"),
        (lambda: proposal.student_t(np.nan), ValueError, "got nan"),
        (lambda: proposal.student_t(None), TypeError, "NoneType"),
        (lambda: proposal.student_t(True), TypeError, "got True"),
        (
            lambda: proposal.preconditioned_crank_nicolson(1.5),
            ValueError,
            f"{FRACTION}, got 1.5",
        ),
        (
            lambda: proposal.preconditioned_crank_nicolson(0.0),
            ValueError,
            f"{FRACTION}, got 0.0",
        ),
        (
            lambda: proposal.preconditioned_crank_nicolson("auto"),
            TypeError,
            f"{FRACTION}, got 'auto'",
        ),
        (lambda: proposal.mixture({}), ValueError, "no component: write mixture"),
        (lambda: proposal.mixture(3), TypeError, "got 3: write mixture"),
        (lambda: proposal.mixture([Shift()]), TypeError, "pairs.*got Shift"),
        (lambda: proposal.mixture([(Shift(), 1.0)]), TypeError, "pairs.*got .Shift"),
        (lambda: proposal.mixture({"walk": 1.0}), TypeError, "pairs.*walk"),
        (lambda: proposal.mixture({Shift(): 0.0}), ValueError, "weight.*got 0.0"),
        (lambda: proposal.mixture({Shift(): "1"}), TypeError, "weight.*got '1'"),
    ],
)
def test_errors_say_what_to_write(
    build: Callable[[], Proposal], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build()


def test_the_former_name_of_the_context_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="ProposalContext"):
        former = proposal.Landscape
    assert former is ProposalContext
    with pytest.raises(AttributeError, match="no attribute 'landscape'"):
        _ = proposal.landscape
