"""Control variates with several modes: moves between them, search, masses."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from numpyro_minibatch import diagnose, proposal
from numpyro_minibatch.proposal import Modes, ProposalContext, Whitening

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


def context(num_steps, over_relaxed):
    return ProposalContext(
        gradient=surrogate,
        whitening=Whitening(jnp.ones((1, 1))),
        center=jnp.zeros(1),
        log_surrogate=surrogate,
        num_steps=num_steps,
        over_relaxed=over_relaxed,
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
    ("num_steps", "over_relaxed", "between"), [(2, False, 0.2), (0, True, 0.8)]
)
def test_moves_across_modes_leave_the_surrogate_invariant(
    num_steps, over_relaxed, between
):
    """One step from exact draws: the bins keep their counts, as far as chance allows.

    The steps that moved are counted before and after. A move that breaks balance by a
    few percent of its flow changes the counts by many standard errors.
    """
    move = proposal.across_modes(between)
    start = jnp.asarray(drawn_from_surrogate(jax.random.key(1), 200_000))[:, None]

    def step(key, z):
        found = move.propose(key, z, jnp.ones(()), context(num_steps, over_relaxed))
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
    key, z = jax.random.key(3), jnp.array([0.3])
    one, other = (
        move.propose(key, z, jnp.ones(()), alone)
        for move in (proposal.across_modes(), proposal.surrogate_hmc())
    )
    assert (one.z == other.z).all() and one.jump is None


@pytest.mark.parametrize("between", [0.0, 1.0, np.nan])
def test_the_share_of_moves_between_modes_is_checked(between):
    with pytest.raises(ValueError, match=r"across_modes\(between=...\) must be"):
        proposal.across_modes(between)
    with pytest.raises(TypeError, match="across_modes"):
        proposal.across_modes("half")


# diagnosis ---------------------------------------------------------------------------


def diagnosed(mode, tried=100, made=60, **pilot):
    """A diagnosis of draws in these modes, shape ``(chain, draw)``."""
    known = {
        "num_modes": 2,
        "mode_masses": [0.6, 0.4],
        "mode_found": [20, 12],
        "mode_searches": 32,
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
            {"mode_found": [31, 1], "mode_missed": 1 / 32},
            "1 of 2 modes was found by one of 32 random searches only",
        ),
        ({"mode_left_out": [0.1, 1e-5]}, "modes of a mass of 0.1 in all"),
    ],
)
def test_masses_that_cannot_be_trusted_are_named(changes, begins):
    mode = np.random.default_rng(1).integers(0, 2, size=(4, 2500))
    advice = [text for text in diagnosed(mode, **changes).advice if "mode" in text]
    assert len(advice) == 1 and advice[0].startswith(begins)


def test_chains_that_stay_in_their_modes_have_unknown_masses():
    mode = np.repeat([[0], [1], [1], [0]], 1000, axis=1)
    found = diagnosed(mode, made=30)
    assert found.mode_mass_error > 0.15
    assert any("standard error of up to" in text for text in found.advice)


def test_one_mode_has_no_line_on_modes():
    found = diagnosed(np.zeros((4, 100), int), num_modes=1)
    assert found.mode_masses == () and "modes  " not in str(found)
    assert np.isnan(found.mode_moves)
