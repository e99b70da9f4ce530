"""Cyclical kernels: the parts of a cycle, and the distribution of each draw."""

from __future__ import annotations

import pickle
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_problems import (
    DATA,
    Energy,
    N,
    draws_of,
    normal_model,
    run,
    second_moments,
    start_of,
)
from numpyro.infer import MCMC

from numpyro_minibatch import (
    SGHMC,
    SGLD,
    SGNHT,
    Cyclical,
    CyclicalMINT,
    CyclicalSGHMC,
    CyclicalSGLD,
    Target,
    schedule,
    to_inference_data,
)

WIDTH, CHAINS = 60, 8192


# schedules ---------------------------------------------------------------------------


def paper_step_sizes(first: float, cycles: int, total: int) -> list[float]:
    """Equation 1 of the paper, with its ceilings and its count from one."""
    length = -(-total // cycles)
    return [
        first / 2 * (np.cos(np.pi * ((k - 1) % length) / length) + 1)
        for k in range(1, total + 1)
    ]


@pytest.mark.parametrize(("cycles", "total"), [(4, 100), (3, 100), (30, 50_000)])
def test_cosine_restarts_is_equation_1(cycles: int, total: int) -> None:
    """If the cycles do not divide the steps, the last one is cut short."""
    expected = paper_step_sizes(0.09, cycles, total)
    rule = schedule.cosine_restarts(0.09, -(-total // cycles))
    found = rule(jnp.arange(total))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[0] == pytest.approx(0.09) and (found > 0).all()
    root = schedule.cosine_restarts(0.3, -(-total // cycles), power=0.5)
    np.testing.assert_allclose(root(jnp.arange(total)) ** 2, expected, rtol=1e-5)


def test_golden_values_of_cosine_restarts() -> None:
    """By hand: half of one plus the cosine of 0, 45, 90 and 135 degrees."""
    found = [float(schedule.cosine_restarts(2.0, 4)(t)) for t in range(6)]
    half = 2**-0.5
    expected = [2.0, 1 + half, 1.0, 1 - half, 2.0, 1 + half]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # the last step of a cycle: alpha_0 pi ** 2 / (4 L ** 2) to leading order
    last = float(schedule.cosine_restarts(1.0, 100_000)(99_999))
    assert last == pytest.approx(np.pi**2 / 4e10, rel=1e-5)


def test_golden_values_of_sawtooth() -> None:
    """The paper's: doubled every 50 epochs, times 0.9 every 5."""
    expected, value = [], 0.22
    for t in range(175):
        if t and t % 5 == 0:
            value *= 0.9
        if t and t % 50 == 0:
            value *= 2.0
        expected.append(value)
    found = schedule.sawtooth(0.22, 50)(jnp.arange(175))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# the parts of a cycle ----------------------------------------------------------------

FLAT = Target(lambda z: -0.5 * z**2, lambda z, rows: 0.0 * rows * z, 100)


def kernel_of(**settings: Any) -> CyclicalSGLD:
    return CyclicalSGLD(target=FLAT, batch_size=10, step_size=0.1, **settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # (explore, start, num_steps, samples, piece)
        ({"cycle_length": 1000}, (250, 800, 1, 200, 1)),
        ({"cycle_length": 1000, "samples_per_cycle": 4}, (250, 800, 50, 4, 50)),
        ({"cycle_length": 1000, "num_steps": 25}, (250, 800, 25, 8, 25)),
        # the first step with n / L >= beta samples; 0.29 * 100 is below 29
        (
            {"cycle_length": 100, "explore": 0.29, "collect_from": 0.29},
            (29, 29, 1, 71, 1),
        ),
        ({"cycle_length": 10, "explore": 0.21}, (3, 8, 1, 2, 1)),
        ({"cycle_length": 1667, "explore": 0.25}, (417, 1334, 1, 333, 1)),
        ({"cycle_length": 7, "explore": 0.0, "collect_from": 0.0}, (0, 0, 1, 7, 1)),
    ],
)
def test_parts_of_a_cycle(settings: Any, expected: tuple[int, ...]) -> None:
    shape = kernel_of(**settings)._shape
    assert shape == (settings["cycle_length"], *expected)
    assert shape.start + shape.samples * shape.num_steps == shape.length


def test_draws_are_placed_in_their_cycles() -> None:
    """The steps before and of each draw and the number of its cycle, without gaps."""
    kernel = kernel_of(cycle_length=60, samples_per_cycle=3, explore=0.2)
    length = kernel._shape.piece
    cycle, before, pieces = (
        np.asarray(x)
        for x in jax.vmap(partial(kernel._cycles.place, num_warmup=6))(jnp.arange(10))
    )
    np.testing.assert_array_equal(cycle, [-2, -2, -2, -1, -1, -1, 0, 0, 0, 1])
    np.testing.assert_array_equal(pieces[:3] * length, [52, 4, 4])
    np.testing.assert_array_equal(before[1:], (before + pieces)[:-1])
    np.testing.assert_array_equal(
        (before + pieces) * length, [52, 56, 60, 112, 116, 120, 172, 176, 180, 232]
    )


def test_a_run_goes_on_within_a_cycle() -> None:
    """From ``last_state``, after a cycle that was cut short."""
    found = []
    for number in (4, 8):
        kernel = kernel_of(cycle_length=15, samples_per_cycle=3)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=number, progress_bar=False)
        key = jax.random.key(0)
        for _ in range(8 // number):
            mcmc.run(key, init_params=jnp.ones(()), extra_fields=("cycle",))
            fields = mcmc.get_extra_fields()
            found.append((np.asarray(mcmc.get_samples()), fields["cycle"]))
            mcmc.post_warmup_state = mcmc.last_state
            key = mcmc.last_state.rng_key
    (first, _), (second, cycles), (whole, all_cycles) = found
    np.testing.assert_array_equal(all_cycles, [0, 0, 0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(cycles, all_cycles[4:])
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)


def test_settings_that_a_cyclical_kernel_is_equal_by() -> None:
    base = {"cycle_length": 100}
    changes: list[dict[str, Any]] = [
        {"cycle_length": 200},
        {"samples_per_cycle": 4},
        {"num_steps": 5},
        {"explore": 0.1},
        {"collect_from": 0.5},
        {"explore_temperature": 1.0},
        {"scale_by_n": True},
        {"temperature": 2.0},
    ]
    for change in changes:
        changed, same = (kernel_of(**{**base, **change}) for _ in range(2))
        assert changed == same and hash(changed) == hash(same), change
        assert changed != kernel_of(**base), change
    assert pickle.loads(pickle.dumps(CyclicalMINT(normal_model, **MINT_)))._shape
    sgld = SGLD(target=FLAT, batch_size=10, step_size=0.1)
    assert Cyclical(sgld, **base) != kernel_of(**base)
    pace = schedule.sawtooth(1.0, 100)
    assert Cyclical(sgld, schedule=pace, **base) != Cyclical(sgld, **base)


MINT_ = {"temperature": 2.0, "cycle_length": 10}


# the distribution of every draw -------------------------------------------------------
# On a quadratic potential with constant gradient noise, the position, momentum and last
# force are normal after every step, so a recursion gives their means and covariances.


class Distribution:
    """Mean and covariance of position, momentum and last force of linear dynamics."""

    def __init__(self, energy: Energy, start: np.ndarray, p_variance: float) -> None:
        self.energy, d = energy, len(start)
        self.mean = np.concatenate([start - energy.mean, np.zeros(2 * d)])
        self.cov = np.zeros((3 * d, 3 * d))
        self.cov[d : 2 * d, d : 2 * d] = p_variance * np.eye(d)

    def _apply(self, move: np.ndarray, noise: Any = 0.0) -> None:
        self.mean = move @ self.mean
        self.cov = move @ self.cov @ move.T + noise

    def _block(self, place: tuple[int, int], value: np.ndarray) -> np.ndarray:
        d, full = len(value), np.zeros((3 * len(value), 3 * len(value)))
        i, j = place
        full[i * d : (i + 1) * d, j * d : (j + 1) * d] = value
        return full

    def sgld(self, h: float, temperature: float, noise: np.ndarray) -> None:
        eye = np.eye(len(noise))
        self._apply(
            np.eye(3 * len(noise)) - self._block((0, 0), h * self.energy.curvature),
            self._block((0, 0), 2 * h * temperature * eye + h**2 * noise),
        )

    def baoab(
        self, h: float, keep: float, temperature: float, noise: np.ndarray
    ) -> None:
        d = len(noise)
        eye, whole = np.eye(d), np.eye(3 * d)
        half_kick = whole + self._block((1, 2), 0.5 * h * eye)
        half_drift = whole + self._block((0, 1), 0.5 * h * eye)
        self._apply(half_kick)
        self._apply(half_drift)
        self._apply(
            whole + self._block((1, 1), (keep - 1) * eye),
            self._block((1, 1), (1 - keep**2) * temperature * eye),
        )
        self._apply(half_drift)
        force = whole - self._block((2, 2), eye)
        force -= self._block((2, 0), self.energy.curvature)
        self._apply(force, self._block((2, 2), noise))
        self._apply(half_kick)

    def redraw(self, temperature: float, d: int = 2) -> None:
        self._apply(
            np.eye(3 * d) - self._block((1, 1), np.eye(d)),
            self._block((1, 1), temperature * np.eye(d)),
        )

    def of_position(self, d: int = 2) -> tuple[np.ndarray, np.ndarray]:
        return self.energy.mean + self.mean[:d], self.cov[:d, :d]


def expected_distributions(
    name: str, draws: int, shape: Any, temperature: float, **wrong: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The distribution of each draw, by the paper; ``wrong`` changes one thing."""
    energy = Energy(temperature)
    heat = wrong.get("heat", temperature)
    cold = wrong.get("cold", 0.0)
    noise = energy.noise(WIDTH, fpc=wrong.get("fpc", True))
    distribution = Distribution(energy, START, temperature)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    alpha = SETTINGS[name]["h"] if name != "SGLD" else SETTINGS[name]["step_size"]
    t = 0
    while len(found) < draws:
        n = t % shape.length
        now = alpha / 2 * (np.cos(np.pi * n / shape.length) + 1)
        sampling = n >= wrong.get("explore", shape.explore)
        warm = heat if sampling else cold
        if name == "SGLD":
            distribution.sgld(now, warm, noise)
        else:
            if n == shape.explore and wrong.get("redraw", True):
                distribution.redraw(heat)
            eta = 2 * SETTINGS[name]["b"]
            distribution.baoab(now**0.5, np.exp(-eta), warm, noise)
        t += 1
        done = t % shape.length or shape.length
        since = done - shape.start
        if since > 0 and since % shape.num_steps == 0:
            found.append(distribution.of_position())
    return found


START = np.array([4.0, -3.0])
SETTINGS: dict[str, dict[str, Any]] = {
    "SGLD": {"step_size": 0.15, "cycle_length": 40, "num_steps": 4, "explore": 0.28},
    "SGHMC": {"h": 0.1, "b": 0.06, "cycle_length": 40, "num_steps": 4},
}
KINDS = {"SGLD": CyclicalSGLD, "SGHMC": CyclicalSGHMC}
DRAWS = 16  # seven of each cycle, with collect_from=0.3; the last one is cut short
TEMPERATURES = {"SGLD": 0.5, "SGHMC": 2.0}


@cache
def sampled(name: str) -> tuple[Any, np.ndarray]:
    settings = {"collect_from": 0.3, **SETTINGS[name]}
    kernel = KINDS[name](
        normal_model, batch_size=WIDTH, temperature=TEMPERATURES[name], **settings
    )
    start = {"mu": np.tile(START, (CHAINS, 1))}
    mcmc = run(kernel, start, *DATA, num_samples=DRAWS, fields=("i",))
    return kernel, draws_of(mcmc, "mu")


def errors_of(name: str, **wrong: Any) -> np.ndarray:
    """Standardised errors of first and second moments, of every draw."""
    kernel, draws = sampled(name)
    distributions = expected_distributions(
        name, DRAWS, kernel._shape, TEMPERATURES[name], **wrong
    )
    return np.stack(
        [
            second_moments(draws[:, i : i + 1], mean, cov)
            for i, (mean, cov) in enumerate(distributions)
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_draw_has_the_distribution_of_the_algorithm(name: str) -> None:
    """Descent, sampling, restart, a cycle cut short; minibatch noise; T is not 1."""
    assert sampled(name)[1].shape == (CHAINS, DRAWS, 2)
    assert np.abs(errors_of(name)).max() < 4.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param("SGLD", {"heat": 0.6}, marks=pytest.mark.slow),
        ("SGLD", {"heat": 0.5 / N}),  # the temperature divided by the rows once more
        ("SGLD", {"cold": 0.5}),
        ("SGLD", {"explore": 20}),
        ("SGLD", {"fpc": False}),
        pytest.param("SGHMC", {"heat": 2.4}, marks=pytest.mark.slow),
        ("SGHMC", {"redraw": False}),
        ("SGHMC", {"cold": 2.0}),
    ],
)
def test_the_check_of_distributions_can_fail(name: str, wrong: dict[str, Any]) -> None:
    assert np.abs(errors_of(name, **wrong)).max() > 6


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_temperature_is_temperature(temperature: float) -> None:
    """Late in long cycles the draws have the variance of the tempered posterior."""
    energy = Energy(temperature)
    kernel = CyclicalSGLD(
        normal_model,
        step_size=0.1,
        batch_size=100,
        temperature=temperature,
        cycle_length=480,
        samples_per_cycle=2,
        explore=0.25,
        collect_from=0.7,
    )
    start = {"mu": np.tile(START, (512, 1))}
    mcmc = run(kernel, start, *DATA, num_samples=8)
    # of the first draws of the cycles; their steps of about 0.02 raise the variance by
    # 1 to 2%
    white = (draws_of(mcmc, "mu")[:, ::2] - energy.mean) @ np.linalg.inv(
        np.linalg.cholesky(energy.cov)
    ).T
    square = np.square(white).mean(-1, keepdims=True)
    mean, error = square.mean(), square.mean((1, 2)).std(ddof=1) / 512**0.5
    assert abs(mean - 1) < 0.04 + 4.5 * error
    assert 4.5 * error < 0.15


@pytest.mark.slow
def test_noise_that_stays_on_and_a_thermostat() -> None:
    """A thermostat lags behind a schedule, so the gradients have little noise here."""
    inner = SGNHT(normal_model, step_size=0.2, friction=2.0, batch_size=100)
    kernel = Cyclical(
        inner, cycle_length=200, samples_per_cycle=2, explore_temperature=1.0
    )
    start = {"mu": np.tile(START, (256, 1))}
    mcmc = run(kernel, start, *DATA, num_samples=12, num_warmup=2)
    energy = Energy(1.0)
    white = (draws_of(mcmc, "mu") - energy.mean) @ np.linalg.inv(
        np.linalg.cholesky(energy.cov)
    ).T
    values = np.square(white).mean(-1, keepdims=True)
    error = values.mean((1, 2)).std(ddof=1) / 16
    assert abs(values.mean() - 1.0) < 0.03 + 4.5 * error
    assert error < 0.03


# records -----------------------------------------------------------------------------


def test_what_is_recorded() -> None:
    kernel = CyclicalSGHMC(
        normal_model,
        batch_size=WIDTH,
        step_size=0.2,
        friction=2.0,
        cycle_length=20,
        collect_from=0.6,
        num_steps=2,
        temperature=2.0,
    )
    start = {"mu": np.tile(START, (2, 1))}
    # the last cycle is cut short
    mcmc = run(kernel, start, *DATA, num_samples=10, num_warmup=4)
    fields = mcmc.get_extra_fields(group_by_chain=True)
    cycles = [0] * 4 + [1] * 4 + [2] * 2
    np.testing.assert_array_equal(fields["cycle"], [cycles] * 2)
    assert fields["cycle"].dtype == np.int32
    assert (np.asarray(fields["temperature"]) == 2.0).all()
    step = [0.2 * (0.5 * (np.cos(np.pi * n / 20) + 1)) ** 0.5 for n in (13, 15, 17, 19)]
    expected = (step * 3)[:10]
    np.testing.assert_allclose(fields["step_size"][0], expected, rtol=1e-5)
    rows = np.asarray(fields["num_rows"])[0]
    assert rows[4] == 14 * WIDTH and rows[5] == 2 * WIDTH
    stats = to_inference_data(mcmc)["sample_stats"]
    assert {"cycle", "temperature", "noise_ratio", "step_size"} <= set(stats)


def test_exploration_of_one_chain_costs_no_other() -> None:
    """All chains share the length of the loop, so that none waits for another."""
    kernel = kernel_of(cycle_length=50, samples_per_cycle=5)
    keys = jax.random.split(jax.random.key(0), 3)
    state = kernel.init(keys, 0, start_of(np.zeros(3)), (), {})

    def each(state: Any) -> Any:
        return kernel.transition(FLAT, state)

    shared = list(conditions(jax.make_jaxpr(lambda s: kernel.sample(s, (), {}))(state)))
    alone = list(conditions(jax.make_jaxpr(jax.vmap(each))(state)))
    # a condition for each chain would make a loop that runs until no chain needs it
    assert shared and set(shared) == {()}
    assert (3,) in alone


def conditions(closed: Any) -> Any:
    """The shapes of the conditions that end the loops of a program."""
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation.params["cond_jaxpr"].out_avals[0].shape
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "jaxpr"):
                    yield from conditions(part)


@pytest.mark.parametrize(
    ("kind", "rate", "root"),
    [
        (CyclicalSGLD, {"step_size": 20.0}, 20.0 / N),
        (CyclicalSGHMC, {"h": 2.0, "b": 0.1}, (2.0 / N) ** 0.5),
    ],
)
def test_scale_by_n_is_a_learning_rate(kind: Any, rate: Any, root: float) -> None:
    """The learning rate of a mean loss, divided by N, is that of the summed loss."""
    kernel = kind(
        normal_model,
        batch_size=WIDTH,
        scale_by_n=True,
        cycle_length=10,
        num_steps=1,
        collect_from=0.0,
        **rate,
    )
    mcmc = run(kernel, {"mu": np.tile(START, (2, 1))}, *DATA, num_samples=2)
    first = float(mcmc.get_extra_fields()["step_size"][0])
    assert first == pytest.approx(root, rel=1e-5)


# CyclicalMINT ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_mint() -> Any:
    """Chains that start from draws of the target, so the distribution must not
    change."""
    energy = Energy(2.0)
    rng = np.random.default_rng(0)
    start = rng.multivariate_normal(energy.mean, energy.cov, 2048)
    kernel = CyclicalMINT(
        normal_model,
        temperature=2.0,
        estimate="exact",
        penalty=False,
        step_size=3.0,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        cycle_length=10,
        samples_per_cycle=2,
        rise=4.0,
        decay=0.5,
        decay_every=4,
    )
    return run(kernel, {"mu": start}, *DATA, num_samples=6), energy


def test_cyclical_mint_keeps_its_target(of_mint: Any) -> None:
    mcmc, energy = of_mint
    draws = draws_of(mcmc, "mu")
    for i in range(6):
        errors = second_moments(draws[:, i : i + 1], energy.mean, energy.cov)
        assert np.abs(errors).max() < 4.5
    wrong = second_moments(draws, energy.mean, 1.2 * energy.cov)
    assert np.abs(wrong).max() > 6
    assert np.mean(np.abs(np.diff(draws, axis=1)) > 0) > 0.8  # and it moves


def test_snapshots_are_taken_before_the_step_size_rises(of_mint: Any) -> None:
    fields = of_mint[0].get_extra_fields(group_by_chain=True)
    np.testing.assert_array_equal(fields["cycle"][0], [0, 0, 1, 1, 2, 2])
    # after steps 4, 9, 14, 19, ...: rises at 10 and 20, decays at 4, 8, 12, ...
    expected = [3 * 4 ** (t // 10) * 0.5 ** (t // 4) for t in (4, 9, 14, 19, 24, 29)]
    np.testing.assert_allclose(fields["step_size"][0], expected, rtol=1e-5)
    rate = np.asarray(fields["inner.accept_prob"]).mean(0)
    assert (0 < rate).all() and (rate < 1).all()


def test_cyclical_mint_adapts_before_its_cycles() -> None:
    kernel = CyclicalMINT(
        normal_model,
        temperature=2.0,
        estimate="exact",
        cycle_length=8,
        rise=1.0,
        decay=0.9,
    )
    start = {"mu": np.tile(START, (8, 1))}
    mcmc = run(kernel, start, *DATA, num_samples=3, num_warmup=150)
    fields = mcmc.get_extra_fields(group_by_chain=True)
    state = mcmc.last_state
    adapted = np.asarray(state.inner.adapt_state.step_size)
    found = np.asarray(fields["step_size"])
    # a tenth of a cycle is one step here, so that steps decay at each
    powers = 0.9 ** np.array([7, 15, 23])
    np.testing.assert_allclose(found, adapted[:, None] * powers, rtol=1e-4)
    assert len(np.unique(adapted)) == 8
    rows = np.asarray(fields["num_rows"])
    assert (rows == 8 * N).all()


def test_a_general_inner_kernel_with_a_schedule_of_its_own() -> None:
    """Its own schedule and the cycle's are multiplied."""
    inner = SGHMC(
        normal_model,
        step_size=schedule.polynomial(0.1, power=0.5, offset=10),
        batch_size=WIDTH,
        num_steps=1,
    )
    kernel = Cyclical(inner, cycle_length=4, explore=0.0, collect_from=0.0)
    start = {"mu": np.tile(START, (2, 1))}
    found = run(kernel, start, *DATA, num_samples=6).get_extra_fields()["step_size"]
    t = np.arange(6)
    expected = 0.1 * (1 + t / 10) ** -0.5 * np.cos(0.5 * np.pi * (t % 4) / 4)
    np.testing.assert_allclose(found[:6], expected, rtol=1e-5)
