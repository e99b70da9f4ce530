"""Control variates with several modes: moves between them, search, masses."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.infer import MCMC, init_to_value
from numpyro.infer.reparam import CircularReparam

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    SGLD,
    AusterityMH,
    ConfidenceMH,
    Cyclical,
    MHMinibatch,
    MinibatchMH,
    ReplicaExchange,
    accept,
    batch,
    control_variate,
    diagnose,
    open_run,
    proposal,
    sample,
    to_inference_data,
)
from numpyro_minibatch.control_variate import _setup, expand, log_surrogate
from numpyro_minibatch.control_variate._center import newton
from numpyro_minibatch.control_variate._ends import End, Ends
from numpyro_minibatch.control_variate._expand import Coordinates
from numpyro_minibatch.control_variate._modes import _newton_to, _refine, find_modes
from numpyro_minibatch.control_variate._pilot import rounding_of_modes
from numpyro_minibatch.control_variate._posterior_of_modes import posterior_of_modes
from numpyro_minibatch.control_variate._problem import Problem, Refused
from numpyro_minibatch.control_variate._residuals import ResidualScan
from numpyro_minibatch.control_variate._row_sums import modes_of
from numpyro_minibatch.control_variate._search import quasi_newton
from numpyro_minibatch.diagnostics import effective_sample_size
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.inference_data import as_inference_data
from numpyro_minibatch.proposal import (
    Modes,
    PriorAtModes,
    ProposalContext,
    Whitening,
)
from numpyro_minibatch.sampling import _pace, _run
from numpyro_minibatch.sampling._store import Store
from numpyro_minibatch.target import ModelTarget

slow = pytest.mark.slow

# moves -------------------------------------------------------------------------------

MODES = Modes(
    location=jnp.array([[-2.0], [0.7], [3.0]]),
    root=jnp.array([[[0.8]], [[0.5]], [[1.1]]]),
    log_weight=jnp.log(jnp.array([0.5, 0.2, 0.3])),
)
OFFSETS = jnp.array([0.0, 0.9, 0.4])  # not those of the weights


def surrogate_in(mode, z):
    """Smooth on the whole line, not normal, and different from mode to mode."""
    white = ((z - MODES.location[mode]) / MODES.root[mode][0])[0]
    return OFFSETS[mode] - 0.5 * white**2 - 0.05 * white**4 + 0.2 * jnp.sin(white)


def surrogate(z):
    """Has jumps at the boundaries of the regions."""
    return surrogate_in(MODES.of(z), z)


def context(num_steps, over_relaxed, num_rows=0):
    return ProposalContext(
        gradient=surrogate,
        whitening=Whitening(jnp.ones((1, 1))),
        center=jnp.zeros(1),
        log_surrogate=surrogate,
        num_steps=num_steps,
        over_relaxed=over_relaxed,
        num_rows=num_rows,
        modes=MODES,
        log_surrogate_in=lambda mode: partial(surrogate_in, mode),
    )


def drawn_from_surrogate(key, count):
    """Draws by the inverse of the distribution function on a fine grid."""
    grid = jnp.linspace(-7.0, 9.0, 64_001)
    density = np.exp(np.asarray(jax.vmap(surrogate)(grid[:, None]), float))
    cdf = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))])
    cdf /= cdf[-1]
    return np.interp(np.asarray(jax.random.uniform(key, (count,))), cdf, grid)


@pytest.mark.parametrize(
    ("num_steps", "over_relaxed", "between", "num_rows"),
    [(2, False, 0.2, 0), (0, True, 0.8, 0), (2, False, 0.8, 3)],
)
def test_moves_across_modes_leave_the_surrogate_invariant(
    num_steps, over_relaxed, between, num_rows
):
    """One step from exact draws: the bins keep their counts, as far as chance allows.

    The steps that moved are counted before and after. A move that breaks balance by a
    few percent of its flow changes the counts by many standard errors.
    """
    move = proposal.across_modes(between)
    start = jnp.asarray(drawn_from_surrogate(jax.random.key(1), 100_000))[:, None]

    def step(key, z):
        settings = context(num_steps, over_relaxed, num_rows)
        found = move.propose(key, z, jnp.ones(()), settings)
        return found.z, found.moved, found.jump

    keys = jax.random.split(jax.random.key(2), len(start))
    end, moved, jump = jax.jit(jax.vmap(step))(keys, start)
    before, after = np.asarray(start[:, 0]), np.asarray(end[:, 0])
    edges = np.linspace(-3.5, 5.0, 49)
    counts = [np.histogram(x, edges)[0].astype(float) for x in (before, after)]
    # each step that leaves a bin or enters it changes the difference by one
    which = [np.digitize(x, edges) for x in (before, after)]
    changed = which[0] != which[1]
    flow = sum(np.bincount(w[changed], minlength=50)[1:-1] for w in which)
    assert flow.min() > 50
    z = (counts[1] - counts[0]) / np.sqrt(flow)
    assert np.abs(z).max() < 4.5
    assert np.square(z).sum() < 48 + 5 * np.sqrt(2 * 48)
    # every kind of move is made
    mode = jax.vmap(MODES.of)
    crossed = np.asarray(mode(start) != mode(end))
    assert not (crossed & ~np.asarray(jump)).any()
    assert not (crossed & ~np.asarray(moved)).any()
    assert crossed.mean() > 0.2 * between
    within = np.asarray(moved) & ~crossed
    assert within.mean() > 0.5 * (1 - between)


def test_a_position_belongs_to_the_largest_weighted_density():
    z = jnp.linspace(-4.0, 5.0, 200)[:, None]
    white = (z - MODES.location[:, 0]) / MODES.root[:, 0, 0]
    density = np.exp(MODES.log_weight - 0.5 * white**2) / MODES.root[:, 0, 0]
    assert (jax.vmap(MODES.of)(z) == np.argmax(density, 1)).all()
    # so that regions end where the densities are equal
    assert len(np.unique(jax.vmap(MODES.of)(z))) == 3


def test_one_mode_is_followed_as_by_surrogate_hmc():
    """Where a surrogate has one mode, the proposal is the ordinary one."""
    alone = context(4, False)._replace(modes=None)
    keys, z = jax.random.split(jax.random.key(3), 50), jnp.array([0.3])
    one, other = (
        jax.vmap(lambda key, move=move: move.propose(key, z, jnp.ones(()), alone))(keys)
        for move in (proposal.across_modes(), proposal.surrogate_hmc())
    )
    assert (one.z == other.z).all() and one.jump is None


@pytest.mark.parametrize("between", [0.0, 1.0, np.nan])
def test_the_share_of_moves_between_modes_is_checked(between):
    with pytest.raises(ValueError, match=r"across_modes\(between=...\) must be"):
        proposal.across_modes(between)
    with pytest.raises(TypeError, match="across_modes"):
        proposal.across_modes("half")


# other temperatures ------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 3.0, 40.0])
@pytest.mark.parametrize("tempers_prior", [True, False])
def test_mixtures_at_a_temperature(temperature, tempers_prior):
    """With a normal prior they are known: it times the power of each polynomial."""
    rng = np.random.default_rng(0)
    number, dim = 3, 4

    def precision():
        root = rng.normal(size=(dim, dim))
        return root @ root.T + 0.3 * np.eye(dim)

    def square(t, matrix):
        return -0.5 * np.einsum("...i,ij,...j->...", t, matrix, t)

    of_prior, mean = 0.2 * precision(), rng.normal(size=dim)
    of_rows = [precision() for _ in range(number)]
    center, value = 3 * rng.normal(size=(number, dim)), rng.normal(size=number)

    def logs(t, prior, power):
        rows = [value[k] + square(t - center[k], of_rows[k]) for k in range(number)]
        return prior * square(t - mean, of_prior) + power * np.stack(rows)

    whole = [of_prior + each for each in of_rows]
    location = np.stack(
        [
            np.linalg.solve(whole[k], of_prior @ mean + of_rows[k] @ center[k])
            for k in range(number)
        ]
    )
    mass = logs(location, 1.0, 1.0).diagonal()
    mass = mass - 0.5 * np.linalg.slogdet(whole)[1]
    root = np.swapaxes(np.linalg.cholesky(np.linalg.inv(whole)), 1, 2)
    modes = Modes(*map(jnp.asarray, (location, root, jax.nn.log_softmax(mass))))
    prior = PriorAtModes.of(
        modes,
        square(location - mean, of_prior),
        -(location - mean) @ of_prior,
        np.repeat(-of_prior[None], number, 0),
    )
    power = 1.0 / temperature
    of_mixture = power if tempers_prior else 1.0
    found = modes.tempered(jax.tree.map(jnp.asarray, prior), power, of_mixture - power)

    def off(prior):
        t = 3 * np.random.default_rng(1).normal(size=(50, dim))
        densities = jax.vmap(found.log_densities)(jnp.asarray(t))
        return np.ptp(np.asarray(densities).T - logs(t, prior, power))

    assert off(of_mixture) < 1e-3
    # weights, means and covariances all matter to that
    assert off(0.9 * of_mixture) > 0.1
    assert float(jax.scipy.special.logsumexp(found.log_weight)) == pytest.approx(
        0.0, abs=1e-5
    )
    # the rule is that of temperature 1, and both directions of whitening agree
    t = jnp.asarray(3 * rng.normal(size=(100, dim)))
    assert (jax.vmap(found.of)(t) == jax.vmap(modes.of)(t)).all()
    white = found.whitened(t[0])
    back = jnp.stack([found.placed(k, white[k]) for k in range(number)])
    np.testing.assert_allclose(back, np.repeat(t[:1], number, 0), atol=1e-3)
    whitening = found.whitening(1)
    np.testing.assert_allclose(
        whitening.color(white[1]), t[0] - found.location[1], atol=1e-3
    )
    np.testing.assert_allclose(
        whitening.whiten(t[0] - found.location[1]), white[1], atol=1e-3
    )


def test_a_convex_prior_is_flat_at_a_temperature():
    """It has no normal approximation, and precisions stay positive."""
    prior = PriorAtModes.of(
        MODES, np.zeros(3), np.full((3, 1), 0.3), np.full((3, 1, 1), 5.0)
    )
    found = MODES.tempered(jax.tree.map(jnp.asarray, prior), 0.01, 0.99)
    np.testing.assert_allclose(np.abs(found.root), 10 * np.abs(MODES.root), rtol=1e-5)
    assert np.isfinite(found.log_weight).all()


# diagnosis ---------------------------------------------------------------------------


def diagnosed(mode, tried=100, made=60, ladder=False, **pilot):
    """A diagnosis of draws in these modes, shape ``(chain, draw)``."""
    known = {
        "num_modes": 2,
        "mode_masses": [0.6, 0.4],
        "mode_found": [20, 12],
        "mode_searches": 32,
        "mode_once": 0,
        "mode_never": 0,
        "mode_missed": 0.0,
        "mode_left_out": [],
    }
    mode = np.asarray(mode)
    dims = ("chain", "draw")
    stats = {
        "mode": (dims, mode),
        "mode_moves_tried": (dims, np.full(mode.shape, tried / mode.size)),
        "mode_moves_made": (dims, np.full(mode.shape, made / mode.size)),
    }
    if ladder:
        stats["rung_mode"] = ((*dims, "ladder"), mode[..., None])
    noise = np.random.default_rng(0).normal(size=mode.shape)
    facts = {"decides": True, "pilot": known | pilot}
    posterior = xr.Dataset(
        {"x": (dims, mode + 0.1 * noise)}, attrs={"facts": json.dumps(facts)}
    )
    tree = xr.DataTree.from_dict(
        {"posterior": posterior, "sample_stats": xr.Dataset(stats)}
    )
    return diagnose(tree)


def test_masses_are_reported_with_their_errors():
    """Independent draws have the error of a binomial share."""
    mode = (np.random.default_rng(1).uniform(size=(4, 2500)) < 0.3).astype(int)
    found = diagnosed(mode)
    assert found.mode_masses == pytest.approx((1 - mode.mean(), mode.mean()))
    binomial = np.sqrt(0.3 * 0.7 / 10_000)
    assert found.mode_mass_error == pytest.approx(binomial, rel=0.25)
    assert found.mode_acceptance == pytest.approx(0.6)
    assert "60 moves between them, 60% of those tried" in str(found)
    assert not any("mode" in text for text in found.advice)


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"made": 3}, "the chains moved only 3 times between 2 modes"),
        ({"tried": 10_000}, "moves between modes are accepted in 0.6%"),
        (
            {"mode_once": 1, "mode_missed": 1 / 32},
            "1 mode would not have been found without one of 32 random searches",
        ),
        ({"mode_never": 2}, "2 modes were found by none of 32 random searches"),
        ({"mode_left_out": [0.1, 1e-5]}, "modes with a mass of 0.1 in all"),
    ],
)
def test_masses_that_cannot_be_trusted_are_named(changes, begins):
    mode = np.random.default_rng(1).integers(0, 2, size=(4, 2500))
    advice = [text for text in diagnosed(mode, **changes).advice if "mode" in text]
    assert len(advice) == 1 and advice[0].startswith(begins)


def test_a_mode_without_draws_is_named():
    mode = np.random.default_rng(1).integers(0, 2, size=(4, 2500))
    masses = [0.5, 0.45, 0.04, 0.001]
    found = diagnosed(mode, num_modes=4, mode_masses=masses)
    advice = [text for text in found.advice if text.startswith("no draw is in")]
    assert len(advice) == 1 and "1 of 4 modes, with a mass of 0.04" in advice[0]


def test_moves_by_swaps_count_as_moves():
    """Where the rung's own moves are rejected, a ladder still carries it across."""
    mode = np.repeat(np.random.default_rng(1).integers(0, 2, (4, 250)), 10, axis=1)
    assert diagnosed(mode, made=3).mode_moves == pytest.approx(3)
    found = diagnosed(mode, made=3, ladder=True)
    assert found.mode_moves == (np.diff(mode, axis=1) != 0).sum() > 300
    assert not any("moved only" in text for text in found.advice)


def test_chains_that_stay_in_their_modes_have_unknown_masses():
    mode = np.repeat([[0], [1], [1], [0]], 1000, axis=1)
    found = diagnosed(mode, made=30)
    assert found.mode_mass_error > 0.15
    assert any("standard error of up to" in text for text in found.advice)


def test_one_mode_has_no_line_on_modes():
    found = diagnosed(np.zeros((4, 100), int), num_modes=1)
    assert found.mode_masses == () and "modes  " not in str(found)
    assert np.isnan(found.mode_moves)


# the search for modes ----------------------------------------------------------------


def searched(fn, start=0.0, prior=None, size=500):
    """Modes of a parameter whose coefficient, a function of it, is near zero."""
    prior = dist.Normal(0, 3) if prior is None else prior

    def model(x, y):
        a = numpyro.sample("a", prior)
        with numpyro.plate("data", len(y)) as i:
            numpyro.sample("obs", dist.Normal(fn(a) * x[i], 1.0), obs=y[i])

    x, y = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    y -= x * (x @ y) / (x @ x)
    problem = problem_of(model, (jnp.asarray(x), jnp.asarray(y)))
    dim = sum(np.size(v) for v in jax.tree.leaves(problem.example))
    found = find_modes(
        problem, np.full((1, dim), start), control_variate.taylor2(modes=20)
    )
    return found


@slow
def test_copies_of_modes_do_not_depend_on_one_search():
    """Sixteen modes, each found by two of 32 searches on average, and none missed."""
    found = searched(
        lambda a: jnp.square(jnp.square(a) - 1.0).sum(),
        prior=dist.Normal(0, 1).expand([4]).to_event(1),
    )
    assert len(found.modes) == 16 and found.num_searches == 32
    counts = [mode.found for mode in found.modes]
    # by modes, Good-Turing would say that one search in sixteen or more finds another
    assert sum(counts) == 32 and counts.count(1) >= 2
    assert found.once == found.never == 0 and found.missed == 0


def narrow(a):
    """Zero at 1, and at 9 in a basin that few starts lead to."""
    return 1.5 * jnp.tanh(a - 1.0) * (1.0 - jnp.exp(-0.5 * jnp.square((a - 9.0) / 0.3)))


@slow
def test_a_mode_is_found_once_where_no_copy_leads_to_it():
    """Copies of the narrow mode lead to the wide one, but not the other way."""
    prior = dist.Normal(0, 4)
    lucky = searched(narrow, prior=prior, start=9.1)
    assert [mode.found for mode in lucky.modes][:1] == [32]
    assert len(lucky.modes) == 2 and lucky.never == 1 and lucky.once == 0
    assert lucky.report["mode_never"] == 1
    without = searched(narrow, prior=prior)
    assert len(without.modes) == 1 and without.missed == 0


def test_what_is_known_without_a_search():
    ends = Ends(None)
    for found in (3, 1, 0, 1, 1):
        ends.found.append(End(np.zeros(1), 0.0, np.eye(1), found))
        ends.led.append(set())
    ends.given.add(2)
    ends.leads(0, 3)  # copies of the first lead to the fourth, and
    ends.leads(1, 0)  # those of the second to the first
    assert ends.known_without(set()) == {0, 1, 2, 3, 4}
    # the second and the last depend on one search; the fourth does not
    assert [k in ends.known_without({k}) for k in (1, 3, 4)] == [False, True, False]
    assert ends.known_without(set(), given=False) == {0, 1, 3, 4}


# Newton steps from some rows to all ------------------------------------------------


def wave_of(x):
    """Value, gradient and Hessian of wells at -0.5 and at 3.5, and a parabola."""
    turn = np.pi / 2
    value = 20 * np.cos(turn * (x[0] - 1.5)) + 5e3 * x[1] ** 2
    gradient = np.array([-20 * turn * np.sin(turn * (x[0] - 1.5)), 1e4 * x[1]])
    curvature = -20 * turn**2 * np.cos(turn * (x[0] - 1.5))
    return [np.asarray(value), gradient, np.diag([curvature, 1e4])]


@pytest.mark.parametrize("start", [0.6, 1.4, 1.6])
def test_newton_steps_from_negative_curvature_end_at_a_minimum(start):
    """The coordinate's scale is the size of its curvature, whatever the sign."""
    found, hessian = newton(wave_of, np.array([start, 0.3]))
    away = (found[0] + 0.5) / 4
    assert abs(away - round(away)) < 1e-4 and abs(found[1]) < 1e-4
    assert np.linalg.eigvalsh(hessian).min() > 0


def test_short_newton_steps_end_at_the_nearest_minimum():
    """Where the curvature is nearly zero a whole step jumps into another well."""
    start = np.array([0.6, 0.0])
    whole, _ = newton(wave_of, start)
    short, _ = newton(wave_of, start, np.diag([50.0, 1e4]), 3.0)
    assert short[0] == pytest.approx(-0.5, abs=1e-4)
    assert abs(whole[0] + 0.5) > 1


def rosenbrock(x):
    """A curved valley, not finite beyond a wall, whose minimum is at one."""
    if x[0] < -1.5:
        return np.inf, np.full(2, np.nan)
    bent = x[1] - x[0] ** 2
    slope = np.array([-400 * x[0] * bent - 2 * (1 - x[0]), 200 * bent])
    return 100 * bent**2 + (1 - x[0]) ** 2, slope


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_quasi_newton_steps(scale):
    """They end at the minimum, in some times the evaluations that are needed."""
    evaluated = []

    def scaled(x):
        evaluated.append(x)
        value, slope = rosenbrock(x)
        return scale * value, scale * slope

    found = quasi_newton(scaled, np.array([-1.2, 1.0]))
    assert found.ended and len(evaluated) < 80
    np.testing.assert_allclose(found.x, 1.0, atol=1e-3)
    assert found.fun == min(scale * rosenbrock(x)[0] for x in evaluated)
    assert found.fun == scale * rosenbrock(found.x)[0]
    # a search can be told that it has arrived, and cannot start where nothing is known
    early = quasi_newton(scaled, np.array([-1.2, 1.0]), lambda x, _: x[0] > 0)
    assert early.ended and 0 < early.x[0] < 0.9
    nowhere = quasi_newton(scaled, np.array([-2.0, 0.0]))
    assert not nowhere.ended and nowhere.fun == np.inf


def test_newton_steps_give_up_on_an_optimum_that_does_not_matter():
    start = np.array([0.2, 0.1])
    newton(wave_of, start, largest=-19.0)  # the wells are 20 deep
    with pytest.raises(Refused, match="the optimum is above"):
        newton(wave_of, start, largest=-21.0)


def test_a_copy_that_leads_to_another_mode_hides_none():
    """An end has its own mode although a copy of another one is near."""
    density = SimpleNamespace(
        of_all=wave_of,
        spread=3.0,
        about=lambda position: None,
        away=lambda one, other: one - other,
        known_at=lambda position: None,
    )
    end = End(np.array([0.2, 0.0]), -15.0, np.diag([40.0, 1e4]), 1)
    known, _ = _refine(density, end._replace(position=np.array([3.4, 0.0])), [], [])
    assert known.end.position[0] == pytest.approx(3.5, abs=1e-4)
    copy = np.array([1.7, 0.0])
    by_copy = _newton_to(density, end, copy, 10.0, np.inf)
    assert by_copy.end.position[0] == pytest.approx(3.5, abs=1e-4)
    found, same = _refine(density, end, [known], [copy])
    assert same is None
    assert found.end.position[0] == pytest.approx(-0.5, abs=1e-4)


# runs, against quadrature ----------------------------------------------------------

TWO = control_variate.taylor2(modes=8)


def uneven_data(size):
    """Rows whose likelihood prefers one sign, by 0.5 nats."""
    rng = np.random.default_rng(5)
    z = np.where(np.arange(size) < 50, 0.2, 0.0)
    x, noise = (v - z * (z @ v) / (z @ z) for v in rng.normal(size=(2, size)))
    return tuple(v.astype(np.float32) for v in (x, z, 2 * x + noise + 0.09 * z))


def uneven(x, z, y):
    a = numpyro.sample("a", dist.Normal(0.22, 1.0))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(a**2 * x[i] + a * z[i], 1.0), obs=y[i])


def problem_of(model, args):
    """What a set-up starts from."""
    sizes = {"data": len(args[-1])}
    target = ModelTarget(model=model, args=args, sizes=sizes)
    example = target.draw_prior(jax.random.key(0))
    return Problem(
        target_of=lambda arrays: ModelTarget(
            model=model, args=tuple(arrays), sizes=sizes
        ),
        arrays=list(args),
        plates=sizes,
        weights=Weights(1.0, 1.0),
        example=jax.tree.map(np.asarray, example),
    )


def run(model, args, draws=1000, **settings):
    kernel = MinibatchMH(model, control_variate=TWO, **settings)
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(7), *args)
    return mcmc, diagnose(to_inference_data(mcmc))


def squared_data(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=size).astype(np.float32)
    noise = rng.normal(size=(2, size)).astype(np.float32)
    # a column that says little about its coefficient, whose prior then matters
    z = np.where(np.arange(size) < 5, 0.8, 0.0).astype(np.float32)
    return x, z, 2.0 * x + z + noise[0]


def squared(x, z, y):
    """Two modes in ``a``, of unequal mass; the posterior of ``b`` is not normal."""
    a = numpyro.sample("a", dist.Normal(1.375, 1))
    b = numpyro.sample("b", dist.StudentT(3.0, 0.0, 0.5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(a**2 * x[i] + b * z[i], 1.0), obs=y[i])


def quadrature_of_squared(x, z, y):
    """Weights on a grid of ``a`` and ``b``."""
    x, z, y = (v.astype(float) for v in (x, z, y))
    a = np.concatenate([s * np.linspace(1.2, 1.6, 801) for s in (-1, 1)])
    b = np.linspace(-6.0, 7.0, 1301)
    s, t = a[:, None] ** 2, b[None]
    square = s**2 * (x @ x) + t**2 * (z @ z) + 2 * s * t * (x @ z)
    likelihood = s * (x @ y) + t * (z @ y) - 0.5 * square
    prior = -0.5 * (a[:, None] - 1.375) ** 2 - 2 * np.log1p((t / 0.5) ** 2 / 3)
    density = np.exp(likelihood + prior - (likelihood + prior).max())
    return a, b, density / density.sum()


@slow
def test_two_modes_of_unequal_mass():
    """Masses of 0.98 and 0.02, and the distribution within the modes."""
    data = squared_data(3000)
    mcmc, found = run(squared, data, draws=2500)
    a, b, weights = quadrature_of_squared(*data)
    mass = weights[a > 0].sum()
    assert 0.97 < mass < 0.99
    draws = mcmc.get_samples()
    masses = found.mode_masses
    assert masses[0] == pytest.approx(float((draws["a"] > 0).mean()), abs=1e-6)
    assert 0 < found.mode_mass_error < 0.005
    assert abs(masses[0] - mass) < 4 * found.mode_mass_error
    # these modes need trajectories, for the prior of b is not normal
    assert mcmc.sampler.pilot["surrogate_num_steps"] > 0
    assert found.mode_acceptance > 0.3
    density = weights.sum(0)
    mean = density @ b
    sd = np.sqrt(density @ (b - mean) ** 2)
    known = found.precision.sel(parameter="b")
    assert abs(known["mean"] - mean) < 4 * known["mcse_mean"]
    assert abs(known["sd"] - sd) < 4 * known["mcse_sd"]
    assert not found.advice


def tied_means(x):
    first = numpyro.sample("first", dist.Normal(0, 10**0.5))
    second = numpyro.sample("second", dist.Normal(0, 1))
    means = jnp.stack([first, first + second])
    mixture = dist.MixtureSameFamily(
        dist.Categorical(jnp.full(2, 0.5)), dist.Normal(means, 2**0.5)
    )
    with numpyro.plate("data", len(x)) as i:
        numpyro.sample("x", mixture, obs=x[i])


def tied_density(x, first, second):
    """The log posterior in double precision, at one position."""
    parts = [-0.25 * (x - m) ** 2 for m in (first, first + second)]
    rows = np.logaddexp(*parts) - np.log(2) - 0.5 * np.log(4 * np.pi)
    return rows.sum() - first**2 / 20 - second**2 / 2


def tied_data(size):
    rng = np.random.default_rng(3)
    x = rng.integers(0, 2, size) + 2**0.5 * rng.normal(size=size)
    return x.astype(np.float32)


@slow
def test_tied_means_at_temperature_one():
    """The mixture of the MINT paper: both modes with their masses."""
    x = tied_data(20_000)
    mcmc, found = run(tied_means, (jnp.asarray(x),), draws=2000)
    modes = mcmc.last_state.surrogate.expansion.modes
    steps = np.linspace(-6, 6, 21)  # in standard deviations
    masses = []
    for location, root in zip(modes.location, modes.root, strict=True):
        root = np.asarray(root, float)
        logs = [
            tied_density(x.astype(float), *(np.asarray(location) + np.array(w) @ root))
            for w in itertools.product(steps, steps)
        ]
        masses.append((np.array(logs), np.log(np.diag(root)).sum()))
    top = max(logs.max() for logs, _ in masses)
    masses = np.array([np.exp(logs - top + s).sum() for logs, s in masses])
    masses /= masses.sum()
    assert found.mode_mass_error < 0.01
    assert abs(found.mode_masses[0] - masses[0]) < 4 * found.mode_mass_error
    assert abs(found.mode_masses[0] - masses[0]) < 0.02
    assert found.mode_acceptance > 0.8
    assert found.rows_per_draw < 40
    assert not found.advice


def test_rounding_errors_that_differ_between_modes_are_known():
    """They would be errors of the log ratio of the masses."""
    x = tied_data(1500)
    problem = problem_of(tied_means, (jnp.asarray(x),))
    found = find_modes(problem, np.zeros((1, 2)), TWO)
    posterior, _ = posterior_of_modes(problem, found).mixed()
    scan = ResidualScan(problem, 2, "direct", posterior.expansion)
    modes = modes_of(problem, posterior.expansion, posterior.draws)
    errors = np.array([0.3, -0.1])

    def of_rows(draws, rows):
        places = [np.flatnonzero((posterior.draws == z).all(1))[0] for z in draws]
        shared = errors[modes[places]] / len(x)
        return scan.of_rows(draws, rows) + shared[:, None]

    rounded = SimpleNamespace(float_error=0.04, scan=SimpleNamespace(of_rows=of_rows))
    measured = rounding_of_modes(problem, TWO, rounded, posterior, 2)
    np.testing.assert_allclose(measured, errors, atol=0.005)
    shifted = posterior.expansion.shifted(-measured)
    np.testing.assert_allclose(
        np.diff(shifted.each.offset),
        np.diff(posterior.expansion.each.offset) + 0.4,
        atol=0.005,
    )
    small = SimpleNamespace(float_error=0.004, scan=None)
    assert not rounding_of_modes(problem, TWO, small, posterior, 2).any()


@pytest.mark.slow
def test_rounding_errors_are_subtracted_from_the_constants(monkeypatch):
    data = (jnp.asarray(tied_data(1500)),)

    def offsets(error):
        monkeypatch.setattr(_setup, "rounding_of_modes", lambda *_: np.array(error))
        kernel = MinibatchMH(tied_means, control_variate=TWO)
        state = kernel.init(jax.random.key(0), 10, None, data, {})
        return np.asarray(state.surrogate.expansion.each.offset, float)

    moved = offsets([0.3, -0.1]) - offsets([0.0, 0.0])
    np.testing.assert_allclose(moved, [-0.3, 0.1], atol=1e-4)


@slow
def test_log_ratios_between_modes_are_exact():
    """All rows of the transformed target, against the density in double precision."""
    x = tied_data(2000)
    problem = problem_of(tied_means, (jnp.asarray(x),))
    found = find_modes(problem, np.zeros((1, 2)), TWO)
    assert len(found.modes) == 2
    posterior, _ = posterior_of_modes(problem, found).mixed()
    expansion = posterior.expansion.cast(jnp.result_type(float))
    target = problem.target_of(problem.arrays)
    shared = target, Coordinates()
    residual = expand(
        *shared, 2, "direct", expansion, problem.unravel, residual_only=True
    )
    whole = expand(*shared, 2, "direct", expansion, problem.unravel)
    density = log_surrogate(*shared, expansion, problem.weights, problem.unravel)
    every = {"data": jnp.arange(len(x))}

    def logs(z):
        left = residual(z, every).rows["data"].sum()
        terms = whole(z, every)
        return jnp.stack(
            [
                density(z) + left,
                problem.weights.known(terms) + terms.rows["data"].sum(),
            ]
        )

    # positions in both modes, and beyond the boundary between them
    z = np.concatenate([posterior.draws[:6], posterior.draws[:6] * [1.0, 0.1]])
    values = np.asarray(jax.jit(jax.vmap(logs))(jnp.asarray(z, jnp.result_type(float))))
    right = np.array([tied_density(x.astype(float), *p) for p in z])
    assert len(np.unique(jax.vmap(expansion.modes.of)(jnp.asarray(z[:6])))) == 2
    for one in values.T:
        error = (one - one[0]) - (right - right[0])
        assert np.abs(error).max() < 0.02  # of single precision
    # the polynomials alone are off by more than that
    alone = np.asarray(jax.vmap(density)(jnp.asarray(z, jnp.result_type(float))))
    assert np.abs((alone - alone[0]) - (right - right[0])).max() > 1.0


@slow
def test_labels_of_a_mixture():
    """Six labellings of three components have the same mass."""

    def model(x):
        mean = numpyro.sample("mean", dist.Normal(0, 5).expand([3]).to_event(1))
        weight = numpyro.sample("weight", dist.Dirichlet(jnp.ones(3)))
        mixture = dist.MixtureSameFamily(
            dist.Categorical(weight), dist.Normal(mean, 1.0)
        )
        with numpyro.plate("data", len(x)) as i:
            numpyro.sample("x", mixture, obs=x[i])

    rng = np.random.default_rng(0)
    which = rng.choice(3, 3000, p=[0.5, 0.3, 0.2])
    x = np.array([-3.0, 0.0, 3.0])[which] + rng.normal(size=3000)
    mcmc, found = run(model, (jnp.asarray(x, jnp.float32),), draws=1500)
    assert mcmc.sampler.pilot["mode_masses"] == pytest.approx([1 / 6] * 6, rel=1e-4)
    assert len(found.mode_masses) == 6 and found.mode_mass_error < 0.01
    away = np.abs(np.array(found.mode_masses) - 1 / 6)
    assert away.max() < 4 * found.mode_mass_error
    assert found.mode_acceptance > 0.8
    assert not found.advice


def resumable(**settings):
    inner = MinibatchMH(uneven, control_variate=TWO)
    kernel = ReplicaExchange(inner, temperatures=[1.0, 4.0])
    fixed = {"num_warmup": 20, "num_chains": 2, "seed": 3, "progress": False}
    return sample(kernel, *uneven_data(2000), **fixed, **settings)


@slow
def test_a_killed_ladder_with_several_modes_goes_on(tmp_path, monkeypatch):
    """Bit for bit: the expansions of all rungs are part of the state in a folder.

    What a kill leaves is the folder as it is at that moment.
    """
    append, killed = Store.append, tmp_path / "killed"

    def copied(self, group, values):
        append(self, group, values)
        steps = self.counts().get("steps", 0)
        # draws are written, and not committed
        if group == "sample_stats" and steps > 100 and not killed.exists():
            shutil.copytree(self.path, killed)

    monkeypatch.setattr(Store, "append", copied)
    monkeypatch.setattr(_pace.Pace, "saw", lambda self, _: setattr(self, "steps", 20))
    monkeypatch.setattr(_run, "_COMMIT_SECONDS", -1.0)
    whole = resumable(num_samples=300, out=tmp_path / "whole")
    assert 0 < open_run(killed)["posterior"].sizes["draw"] < 150
    found = resumable(num_samples=300, out=killed, resume=True)
    for group, names in {
        "posterior": ("a",),
        "sample_stats": ("mode", "rung_mode", "mode_moves_tried", "mode_moves_made"),
    }.items():
        for name in names:
            assert (found[group][name].values == whole[group][name].values).all(), name
    assert len(np.unique(whole["sample_stats"]["mode"].values)) == 2
    assert diagnose(found).mode_masses == diagnose(whole).mode_masses


# kernels, and errors of masses -------------------------------------------------------


@slow
@pytest.mark.parametrize(
    "kernel",
    [
        MHMinibatch(uneven, control_variate=TWO),
        MHMinibatch(uneven, sequential=True, batch_size=100, control_variate=TWO),
        AusterityMH(uneven, batch_size=100, control_variate=TWO),
        ConfidenceMH(
            uneven,
            bound=lambda z, z_new: jnp.asarray(0.05),  # of residuals; else all rows
            batch_size=100,
            control_variate=TWO,
        ),
        MINT(uneven, temperature=1.0, control_variate=TWO),
        MINT(uneven, temperature=4.0, estimate="augmented", control_variate=TWO),
        MinibatchMH(uneven, estimate="exact", control_variate=TWO),
        MinibatchMH(
            uneven, acceptance=accept.barker(), num_steps=2, control_variate=TWO
        ),
    ],
    ids=[
        "compensated Barker",
        "growing batch",
        "austerity",
        "confidence",
        "MINT",
        "augmented at a temperature",
        "exact",
        "Barker, two steps",
    ],
)
def test_presets_have_the_masses_of_quadrature(kernel):
    data = uneven_data(3000)
    mcmc = MCMC(
        kernel,
        num_warmup=50,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(5), *data)
    found = to_inference_data(mcmc)
    a, weights = quadrature_of_uneven(*data, kernel.temperature)
    scores = z_scores(found["posterior"]["a"].values, a, weights)
    assert max(map(abs, scores.values())) < 4, scores
    assert abs(weights[a > 0].sum() - 0.5) > 0.15
    diagnosis = diagnose(found)
    assert diagnosis.mode_mass_error < 0.02
    assert diagnosis.mode_acceptance > 0.4  # Barker accepts half
    reliable = float(found["sample_stats"]["reliable"].mean())
    # the Barker test without compensation is reliable without noise only
    assert reliable > 0.99 or kernel.settings["acceptance"] == repr(accept.barker())


@slow
def test_errors_of_masses_are_those_of_many_runs():
    """Forty short runs of four chains, in one program."""
    runs, draws = 40, 300
    mcmc = MCMC(
        MinibatchMH(uneven, control_variate=TWO),
        num_warmup=20,
        num_samples=draws,
        num_chains=4 * runs,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(11), *uneven_data(3000))
    mode = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["mode"])
    found = [diagnosed(each) for each in mode.reshape(runs, 4, draws)]
    said = np.sqrt(np.mean([np.square(each.mode_mass_error) for each in found]))
    true = np.std([each.mode_masses[0] for each in found], ddof=1)
    assert 0.8 < said / true < 1.25


# ladders of temperatures ------------------------------------------------------------


def quadrature_of_uneven(x, z, y, temperature=1.0, of_prior=1.0):
    """Weights on a grid of ``a``."""
    x, z, y = (v.astype(float) for v in (x, z, y))
    a = np.linspace(-6, 6, 240_001)
    square = a**4 * (x @ x) + a**2 * (z @ z) + 2 * a**3 * (x @ z)
    likelihood = a**2 * (x @ y) + a * (z @ y) - 0.5 * square
    density = likelihood / temperature - of_prior * 0.5 * (a - 0.22) ** 2
    density = np.exp(density - density.max())
    return a, density / density.sum()


def z_scores(draws, grid, weights):
    """Errors of the mass of a mode and of moments, in standard errors."""
    found = {}
    for name, fn in {
        "mass": lambda a: (a > 0).astype(float),
        "mean": lambda a: a,
        "square": np.square,
    }.items():
        values = fn(draws)
        error = values.std() / np.sqrt(effective_sample_size(values))
        found[name] = float((values.mean() - weights @ fn(grid)) / error)
    return found


def ladder_of(kind, data, temperatures, rung=MinibatchMH, num_samples=1000, **settings):
    """Draws of a ladder ``(chain, draw, rung)``, and the run."""
    inner = rung(uneven, control_variate=TWO, **settings)
    kernel = kind(inner, temperatures=temperatures, collect_rungs=True)
    mcmc = MCMC(
        kernel,
        num_warmup=50,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = "replicas.num_rows", "replicas.mode_moves_tried"
    mcmc.run(jax.random.key(1), *data, extra_fields=fields)
    return np.asarray(to_inference_data(mcmc)["rungs"]["a"]), mcmc


class SwapsWithWrongConstants(ReplicaExchange):
    """A ladder whose swaps confuse the constants of the expansions."""

    def _swap_pass(self, target, state, keys):
        expansion = state.surrogate.expansion
        each = expansion.each._replace(offset=expansion.each.offset[::-1])
        wrong = state.surrogate._replace(expansion=expansion._replace(each=each))
        return super()._swap_pass(target, state._replace(surrogate=wrong), keys)


class OneRule(MinibatchMH):
    """A rung whose mixture is that of temperature 1."""

    def _at_temperature(self, surrogate):
        return surrogate


@slow
def test_rungs_have_their_masses():
    """Few rows at every temperature, and moves between modes that are accepted."""
    data, temperatures = uneven_data(3000), [1.0, 4.0]
    # so few moves between modes that the swaps matter to the masses
    settings = {"proposal": proposal.across_modes(0.1)}
    # twice the draws that the diagnosis asks for
    draws, mcmc = ladder_of(
        ReplicaExchange, data, temperatures, num_samples=2000, **settings
    )
    for rung, temperature in enumerate(temperatures):
        known = quadrature_of_uneven(*data, temperature)
        scores = z_scores(draws[..., rung], *known)
        assert max(map(abs, scores.values())) < 4, (temperature, scores)
    a, weights = quadrature_of_uneven(*data)
    assert 0.7 < weights[a > 0].sum() < 0.8
    stats = to_inference_data(mcmc)["sample_stats"]
    rows = mcmc.get_extra_fields()["replicas.num_rows"]
    assert (rows.mean(0) < 40).all()
    tried, made = (
        stats[f"rung_mode_moves_{name}"].values.sum((0, 1))
        for name in ("tried", "made")
    )
    assert (made > 0.9 * tried).all()
    found = diagnose(to_inference_data(mcmc))
    assert found.mode_masses[0] == pytest.approx((draws[..., 0] > 0).mean())
    assert not found.advice
    # the test sees a swap whose expansions are wrong, by 0.8 nats
    wrong, _ = ladder_of(SwapsWithWrongConstants, data, temperatures, **settings)
    grids = [quadrature_of_uneven(*data, t) for t in temperatures]
    apart = np.diff([weights[a > 0].sum() for a, weights in grids])[0]

    def score(draws):
        values = np.diff((draws > 0).astype(float), axis=-1)[..., 0]
        error = values.std() / np.sqrt(effective_sample_size(values))
        return abs(values.mean() - apart) / error

    assert score(draws) < 4 and score(wrong) > 6


@slow
def test_rungs_with_a_tempered_prior():
    """All rows, and temperatures at which the modes are far from normal."""
    data, temperatures = uneven_data(300), [1.0, 10.0, 100.0]
    settings = {"temper_prior": True, "batch": batch.full()}
    draws, mcmc = ladder_of(ReplicaExchange, data, temperatures, **settings)
    for rung, temperature in enumerate(temperatures):
        known = quadrature_of_uneven(*data, temperature, 1 / temperature)
        scores = z_scores(draws[..., rung], *known)
        assert max(map(abs, scores.values())) < 4, (temperature, scores)
    stats = to_inference_data(mcmc)["sample_stats"]
    mode = stats["rung_mode"].values
    assert (mode[..., 0] == (draws[..., 0] < 0)).all()
    made, tried = (
        stats[f"rung_mode_moves_{name}"].values.sum((0, 1))
        for name in ("made", "tried")
    )
    assert (made > 0.5 * tried).all()


@slow
def test_any_rule_and_any_mixture_is_exact():
    """Those of another temperature cost acceptance, and change no distribution."""
    data, temperatures = uneven_data(300), [1.0, 20.0]
    settings = {"rung": OneRule, "batch": batch.full()}
    draws, _ = ladder_of(ReplicaExchange, data, temperatures, **settings)
    for rung, temperature in enumerate(temperatures):
        known = quadrature_of_uneven(*data, temperature)
        scores = z_scores(draws[..., rung], *known)
        assert max(map(abs, scores.values())) < 4, (temperature, scores)


# what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modes": 0}, r"taylor2\(modes=0\) must be at least 1"),
        ({"modes": 4, "exact_rows": 16}, r"modes=4\) takes no exact_rows="),
        ({"modes": 4, "center": {"a": 0.0}}, r"modes=4\) takes no center="),
        ({"modes": 4, "sites": ["a"]}, r"modes=4\) takes no sites="),
    ],
)
def test_settings_that_contradict_several_modes(settings, message):
    with pytest.raises(ValueError, match=message):
        control_variate.taylor2(**settings)
    with pytest.raises(TypeError, match="must be an integer"):
        control_variate.taylor2(modes=2.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MinibatchMH(
                squared, control_variate=TWO, proposal=proposal.surrogate_hmc()
            ),
            "moves within one mode",
        ),
        (
            lambda: MinibatchMH(
                squared, control_variate="taylor2", proposal=proposal.across_modes()
            ),
            "moves between the modes of a surrogate",
        ),
        (
            lambda: SGLD(squared, control_variate=TWO),
            "needs moves between modes, which MinibatchMH makes",
        ),
        (
            lambda: AMAGOLD(squared, control_variate=TWO),
            "needs moves between modes, which MinibatchMH makes",
        ),
        (
            lambda: Cyclical(
                MinibatchMH(squared, control_variate=TWO), cycle_length=100
            ),
            "moves within and between modes have no step size",
        ),
    ],
)
def test_kernels_that_cannot_move_between_modes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_hierarchy_is_refused():
    """Its rows are expanded in fewer coordinates than are sampled."""

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        a = numpyro.sample("a", dist.Normal(0, scale))
        with numpyro.plate("data", len(y)) as i:
            numpyro.sample("obs", dist.Normal(a**2, 1.0), obs=y[i])

    with pytest.raises(ValueError, match="expands the rows in the coordinates that"):
        run(model, (jnp.ones(2000),))


@slow
def test_one_mode_has_the_draws_of_an_ordinary_run():
    """The search ends at the same mode; what follows is the same program."""

    def model(x):
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("data", len(x)) as i:
            numpyro.sample("x", dist.Normal(mean, scale), obs=x[i])

    x = jnp.asarray(np.random.default_rng(0).normal(1, 1, 3000), jnp.float32)
    draws = []
    for variate in ("taylor2", TWO):
        kernel = MinibatchMH(model, control_variate=variate)
        mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
        mcmc.run(jax.random.key(0), x)
        draws.append(mcmc.get_samples())
    assert kernel.pilot["num_modes"] == 1 and kernel.pilot["mode_missed"] == 0
    for name in draws[0]:
        np.testing.assert_allclose(draws[1][name], draws[0][name], atol=1e-4)


def angle_model(y):
    mean = numpyro.sample("mean", dist.VonMises(0.0, 0.1))
    with numpyro.plate("rows", len(y), subsample_size=16) as idx:
        numpyro.sample("y", dist.VonMises(mean, 2.0), obs=y[idx])


def angles_about(center, size=400):
    y = center + 0.7 * np.random.default_rng(5).normal(size=size)
    return ((y + np.pi) % (2 * np.pi) - np.pi).astype(np.float32)


# At 3.1 the angle jumps, at 2.0 and 2.2 searches from a box of 4 end in two turns.
@pytest.mark.parametrize(
    ("modes", "center"), [(1, 3.1), (4, 3.1), (4, 2.0), (4, 2.2), (4, 2.4)]
)
def test_angles_that_differ_by_a_turn_are_one_mode(modes, center):
    model = numpyro.handlers.reparam(angle_model, config={"mean": CircularReparam()})
    variate = control_variate.taylor2(modes=modes)
    kernel = MinibatchMH(model, control_variate=variate)
    mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), angles_about(center))
    if modes == 1:
        assert kernel.pilot["other_mode"] == 0
    else:
        assert kernel.pilot["num_modes"] == 1
    if center != 3.1:
        return
    # the angle itself jumps from one end to the other
    idata = to_inference_data(mcmc)
    assert np.ptp(idata.posterior["mean"].values) > 6
    diagnosis = diagnose(idata)
    assert not [text for text in diagnosis.advice if "mode" in text]
    assert diagnosis.precision["parameter"].values.tolist() == ["mean"]


def of_angles(angle, unwrapped):
    over = "chain", "draw"
    values = {"mean": (over, angle), "mean_unwrapped": (over, unwrapped)}
    return as_inference_data({"posterior": xr.Dataset(values)}, {})


def test_chains_in_different_turns_agree():
    """And a site is not an angle because of its name."""
    rng = np.random.default_rng(0)
    unwrapped = np.pi + 0.1 * rng.normal(size=(4, 500))
    unwrapped[3] -= 2 * np.pi
    angle = (unwrapped + np.pi) % (2 * np.pi) - np.pi
    found = diagnose(of_angles(angle, unwrapped))
    assert found.max_rhat < 1.01
    assert float(found.precision["sd"][0]) == pytest.approx(0.1, rel=0.1)
    assert abs(abs(float(found.precision["mean"][0])) - np.pi) < 0.02
    other = diagnose(of_angles(angle, 2 * unwrapped))
    assert other.max_rhat > 1.5 and len(other.precision["parameter"]) == 2


def test_a_site_with_the_name_of_an_angle_need_not_be_one():
    """A normal prior tells the turns of a phase apart, and the higher mode is taken."""
    y = angles_about(-1.2, 1000)

    def model(y):
        phase = numpyro.sample("phase_unwrapped", dist.Normal(5.0, 1.0))
        numpyro.deterministic("phase", phase % (2 * jnp.pi))
        with numpyro.plate("rows", len(y)) as idx:
            numpyro.sample("y", dist.VonMises(phase, 4.0), obs=y[idx])

    start = init_to_value(values={"phase_unwrapped": 5.0})
    kernel = MinibatchMH(model, control_variate="taylor2", init_strategy=start)
    mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    assert abs(mcmc.get_samples()["phase_unwrapped"].mean() - (2 * np.pi - 1.2)) < 0.2
    assert kernel.pilot["other_mode"] > 0
