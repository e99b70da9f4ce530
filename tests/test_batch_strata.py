"""Rows drawn by importance: the tables are right, and so are draws from them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_minibatch import batch
from numpyro_minibatch.batch import Batch, FullBatch, Scheme, _strata
from numpyro_minibatch.batch._strata import (
    Design,
    build,
    draw,
    exact_variance,
    pack,
    stratum_of,
)
from numpyro_minibatch.estimate import Estimate, Reader, Weights, total

pytestmark = pytest.mark.x64

RNG = np.random.default_rng(7)
N = 3_001
# heavy tails: the scores are right up to a factor, the values are not their own scores
SCALE = RNG.pareto(1.2, size=N) + 0.01
VALUES = np.stack([SCALE * RNG.normal(0.5, 1.0, N), RNG.normal(size=N)])
SCORES = SCALE * np.exp(0.3 * RNG.normal(size=N))
SCHEMES = {
    "stratified": batch.stratified(40),
    "three of each": batch.Weighted(42, num_draws=3),
    "importance": batch.importance(40),
    "take_all": batch.take_all(40, num_sure=100),
}


def bound(scheme: Scheme, num_rows: int = N) -> Scheme:
    return scheme.bound({"data": scheme.size}, {"data": num_rows})


def designed(scheme: Scheme) -> tuple[Scheme, Design]:
    scheme = bound(scheme)
    return scheme, scheme.build(SCORES, VALUES[0], "data")


# the tables ---------------------------------------------------------------------------


def with_columns(design: Design, **columns) -> Design:
    """The design with other numbers in its slots."""
    names = ("threshold", "alias", "row", "inverse")
    slots = [columns.get(name, getattr(design, name)) for name in names]
    return design._replace(slots=jnp.asarray(pack(*slots)))


def unit(design: Design) -> np.ndarray:
    """The number of words, of 2 ** 32 per stratum, that select each slot."""
    shift = np.asarray(design.shift, np.int64)
    units = np.repeat(1 << shift, 1 << (32 - shift))
    return np.pad(units, (0, len(design.row) - len(units)))  # else no words


def drawn_probability(design: Design) -> np.ndarray:
    """The probability of each slot in a draw from its stratum, from the tables
    alone."""
    kept = np.asarray(design.threshold, np.int64)
    words = kept.copy()
    np.add.at(words, np.asarray(design.alias), unit(design) - kept)
    return words / 2.0**32


def check_tables(design: Design, scores: np.ndarray, uniform: float) -> None:
    """The tables contain each row once and draw it in proportion to its score."""
    num_rows = len(scores)
    found = drawn_probability(design)
    filled = np.flatnonzero(np.asarray(design.threshold))
    assert (found[np.asarray(design.threshold) == 0] == 0).all()
    row = np.asarray(design.row)[filled]
    rows = np.concatenate([design.sure, row])
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_rows))
    shift = np.asarray(design.shift, np.int64)
    assert ((shift >= 1) & (shift <= 31)).all()
    room = 1 << (32 - shift)
    np.testing.assert_array_equal(design.start, np.cumsum(room) - room)
    assert room.sum() <= len(design.row) <= room.sum() + max(len(row) / 2 + 1, 63)
    assert (np.asarray(design.threshold, np.int64) <= unit(design)).all()
    stratum, claimed = stratum_of(design, num_rows)
    of_slot = np.repeat(np.arange(len(room)), room)
    np.testing.assert_array_equal(stratum[row], of_slot[filled])
    alias = np.asarray(design.alias)[: len(of_slot)]
    np.testing.assert_array_equal(of_slot[alias], of_slot)
    assert (stratum[np.asarray(design.sure)] == -1).all()
    # no more slots than the next power of two
    count = np.bincount(of_slot[filled], minlength=len(room))
    assert ((count > room // 2) | (room == 2)).all() and count.min() >= 1
    # all words are assigned
    mass = np.add.reduceat(found[: len(of_slot)], design.start)
    np.testing.assert_array_equal(mass, 1.0)

    left = np.where(stratum >= 0, scores, 0.0)
    probability = np.where(stratum >= 0, uniform / len(row), 0.0)
    share = 1.0 - uniform if left.sum() > 0 else 0.0
    probability += share * left / max(left.sum(), 1e-300)
    probability += (1.0 - uniform - share) * (stratum >= 0) / len(row)
    total = np.bincount(stratum[row], probability[row])
    expected = (probability[row] / total[stratum[row]]).clip(0, 1)
    # at least one word for every row, and an error of one by rounding
    off = np.abs(found[filled] - expected)
    per_row = count[stratum[row]] * 2.0**-32
    assert (off <= 2.01 * 2.0**-32 + expected * (per_row + 1e-9)).all()
    # the stated probabilities are those of the draws, to the precision of float32
    np.testing.assert_allclose(found[filled], claimed[row], rtol=1e-7)


@pytest.mark.parametrize("num_rows", [103, 1_000, 100_000])
@pytest.mark.parametrize(
    ("size", "num_draws", "uniform", "num_sure"),
    [(100, 2, 0.1, None), (31, 3, 0.01, None), (50, 50, 0.1, 0), (20, 2, 1.0, 40)],
)
@pytest.mark.parametrize(
    "distribution", ["heavy", "even", "zero", "mostly zero", "extreme"]
)
def test_tables(num_rows, size, num_draws, uniform, num_sure, distribution):
    rng = np.random.default_rng(num_rows)
    scores = {
        "heavy": rng.pareto(0.7, num_rows),
        "even": np.ones(num_rows),
        "zero": np.zeros(num_rows),
        "mostly zero": np.where(rng.random(num_rows) < 0.05, 1.0, 0.0),
        "extreme": 10.0 ** rng.uniform(-300, 300, num_rows),
    }[distribution]
    order_by = rng.normal(size=num_rows) * scores
    design = build(
        scores, order_by, size, num_draws=num_draws, uniform=uniform, num_sure=num_sure
    )
    if design.num_strata:
        check_tables(design, scores, uniform)
        assert design.num_strata <= size // num_draws
    if num_sure is not None and design.num_strata:
        assert design.num_sure == num_sure
        stratum, _ = stratum_of(design, num_rows)
        assert scores[np.asarray(design.sure)].min(initial=np.inf) >= np.max(
            scores[stratum >= 0]
        )


def test_the_check_of_tables_can_fail():
    design = build(SCORES, VALUES[0], 40)
    check_tables(design, SCORES, 0.1)
    threshold = design.threshold.at[17].set(design.threshold[17] // 10 * 9)
    for broken in (
        {"threshold": threshold},
        {"alias": jnp.roll(design.alias, 1)},
        {"row": jnp.roll(design.row, 1)},
        {"inverse": design.inverse * 1.0001},
    ):
        with pytest.raises(AssertionError):
            check_tables(with_columns(design, **broken), SCORES, 0.1)


@pytest.mark.parametrize("rows_of_part", [1, 500])
def test_tables_made_in_parts_are_the_same(monkeypatch, rows_of_part):
    whole = build(SCORES, VALUES[0], 40)
    before = stratum_of(whole, N)
    monkeypatch.setattr(_strata, "_OF_PART", rows_of_part)
    parts = _strata._parts(np.full(20, 150))
    assert len(parts) == {1: 20, 500: 6}[rows_of_part]
    for found, expected in zip(build(SCORES, VALUES[0], 40), whole, strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(stratum_of(whole, N), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_places_are_sorted_as_values_are():
    values = np.r_[VALUES[0], -0.0, 0.0, -0.0, np.inf, -np.inf, 1e300, -1e-300, 1e-300]
    found = values[_strata._sorted(values)]
    # values that agree in 20 bits are in the order of the rows
    assert (np.diff(found[1:-1]) >= -2e-6 * np.abs(found[1:-2])).all()
    assert np.isneginf(found[0]) and np.isposinf(found[-1])
    ties = np.tile([1.0, 0.0, -0.0, -1.0], 50)
    np.testing.assert_array_equal(
        _strata._sorted(ties), np.argsort(ties, kind="stable")
    )


def test_strata_are_even_and_sorted():
    design = build(SCORES, VALUES[0], 40)
    stratum, _ = stratum_of(design, N)
    assert design.num_strata == 20
    left = stratum >= 0
    probability = 0.9 * SCORES / SCORES[left].sum() + 0.1 / left.sum()
    mass = np.bincount(stratum[left], probability[left])
    # a stratum misses or has at most half of the widest row at each end
    assert (np.abs(mass - 1 / 20) <= probability[left].max()).all()
    says = VALUES[0] / probability
    for low, high in zip(range(19), range(1, 20), strict=True):
        assert says[stratum == low].max() <= says[stratum == high].min()


def test_rows_found_at_every_draw_are_always_read():
    """The removal of rows one by one, as a loop."""
    scores = np.sort(RNG.pareto(0.6, 5_000))[::-1]
    design = build(scores, None, 60, uniform=0.1)
    num_sure, left = 0, scores
    while 60 * (0.9 * left[0] / left.sum() + 0.1 / len(left)) >= 1.0:
        num_sure, left = num_sure + 1, left[1:]
    assert 3 < num_sure < 60  # otherwise the test checks nothing
    np.testing.assert_array_equal(design.sure, np.arange(num_sure))


def test_at_most_as_many_sure_rows_as_random_ones():
    scores = 0.5 ** np.arange(900.0)
    design = build(scores, None, 50)
    np.testing.assert_array_equal(design.sure, np.arange(50))


def test_a_row_wider_than_a_stratum():
    scores = np.r_[np.ones(500), 1e6, np.ones(500)]
    design = build(scores, None, 40, num_sure=0)
    assert design.num_strata < 20
    check_tables(design, scores, 0.1)
    stratum, _ = stratum_of(design, len(scores))
    assert 1 in np.bincount(stratum)


@pytest.mark.parametrize("num_rows", [2, 3, 20, 21, 22])
@pytest.mark.parametrize("distribution", ["even", "heavy"])
def test_hardly_more_rows_than_draws(num_rows, distribution):
    """All of them are read, in order, as far as they can be drawn anyway."""
    scores = np.ones(num_rows) if distribution == "even" else 4.0 ** np.arange(num_rows)
    design = build(scores, None, 20)
    size = design.num_sure + 2 * design.num_strata
    assert size <= num_rows
    values = jnp.arange(1.0, num_rows + 1.0)
    rows, weights = draw(design, random.key(0), 2)
    assert rows.shape == weights.shape == (size,)
    if size == num_rows:
        assert design.num_strata == 0
        np.testing.assert_array_equal(rows, np.arange(num_rows))
        found = total(Batch(rows, 1.0, weights, 2, num_rows), values[None], num_rows)
        assert found.value == values.sum() and found.variance == 0
        assert exact_variance(design, values, 2) == 0
    else:
        check_tables(design, scores, 0.1)


@pytest.mark.parametrize(
    ("arguments", "say"),
    [
        (([1.0, np.nan, 2.0], None, 2), r"scores\[1\] is nan, and 1 of 3"),
        (([1.0, np.inf, np.nan], None, 2), r"scores\[1\] is inf, and 2 of 3"),
        (([1.0, -2.0, 2.0], None, 2), r"scores\[1\] is -2, .* cannot be negative"),
        (([1.0, 2.0, 2.0], [1.0, 2.0, -np.inf], 2), r"order_by\[2\] is -inf"),
        (([1.0, 2.0, 2.0], [1.0, 2.0], 2), "order_by has 2 values and scores has 3"),
        ((np.ones((3, 2)), None, 2), r"scores has shape \(3, 2\)"),
        (([], None, 2), r"scores has shape \(0,\)"),
        ((np.ones(9), None, 1), "num_draws=2 of size=1"),
    ],
)
def test_what_cannot_be_built(arguments, say):
    with pytest.raises(ValueError, match=say):
        build(*arguments)


@pytest.mark.parametrize(
    ("setting", "say"),
    [
        ({"uniform": 0.0}, "would never be read"),
        ({"uniform": 1.5}, r"in \(0, 1\]"),
        ({"num_draws": 1}, "at least 2 draws"),
        ({"num_sure": -1}, "at least 0"),
    ],
)
def test_settings_out_of_range(setting, say):
    with pytest.raises(ValueError, match=say):
        build(np.ones(50), None, 10, **setting)


# draws --------------------------------------------------------------------------------


def test_rounded_running_sums_of_a_very_uneven_distribution():
    """Half of the rows have zero score and a tiny uniform part; all have a word."""
    scores = np.r_[np.zeros(70_000), RNG.pareto(0.3, 70_000)]
    design = build(scores, None, 2, uniform=1e-12, num_sure=0)
    check_tables(design, scores, 1e-12)


def distribution_of_draws(design: Design, probability: np.ndarray) -> float:
    """The p-value of many draws from a small design, given its stated probabilities."""
    rows, _ = jax.jit(draw, static_argnums=2)(design, random.key(3), 100_000)
    drawn = np.asarray(rows)[design.num_sure :].reshape(design.num_strata, -1)
    stratum, _ = stratum_of(design, len(probability))
    chi2, free = 0.0, 0
    for h, found in enumerate(drawn):
        members = np.flatnonzero(stratum == h)
        assert np.isin(found, members).all()
        counts = np.bincount(found, minlength=len(probability))[members]
        expected = len(found) * probability[members] / probability[members].sum()
        assert expected.min() > 5
        chi2 += (np.square(counts - expected) / expected).sum()
        free += len(members) - 1
    return stats.chi2.sf(chi2, free)


def test_draws_follow_the_scores():
    scores = RNG.pareto(1.5, 300) + 0.05
    design = build(scores, RNG.normal(size=300), 20)
    left = np.ones(300, bool)
    left[np.asarray(design.sure)] = False
    probability = np.where(
        left, 0.9 * scores / scores[left].sum() + 0.1 / left.sum(), 0
    )
    assert distribution_of_draws(design, probability) > 1e-6
    # the check detects thresholds off by 1 in 30, and rows out of place
    wrong = with_columns(design, threshold=np.asarray(design.threshold) * 0.97)
    assert distribution_of_draws(wrong, probability) < 1e-6
    wrong = with_columns(design, alias=np.roll(design.alias, 1))
    with pytest.raises(AssertionError):
        distribution_of_draws(wrong, probability)


def test_a_million_rows_are_all_within_reach():
    """Uniform draws from a large table are uniform, down to the last bits of the
    row."""
    size = 1_000_003
    design = build(np.ones(size), None, 2, num_draws=2)
    rows, weights = jax.jit(draw, static_argnums=2)(design, random.key(1), 400_000)
    rows = np.asarray(rows)
    # 2 ** 32 words for a million rows: each has 4294 or 4295 of them, and says so
    claimed = np.unique(np.asarray(weights, np.float64) * 400_000)
    np.testing.assert_allclose(2.0**32 / claimed, [4295.0, 4294.0], rtol=1e-6)
    for cells in (rows * 1_000 // size, rows % 1_024):
        counts = np.bincount(cells)
        assert stats.chisquare(counts).pvalue > 1e-6


def test_draws_under_vmap_and_jit():
    scheme, design = designed(batch.stratified(40))
    keys = random.split(random.key(0), 5)
    one_design = jax.jit(jax.vmap(partial(draw, design, num_draws=2)))(keys)
    designs = jax.tree.map(lambda x: jnp.stack([x] * 5), design)
    many_designs = jax.vmap(lambda d, k: draw(d, k, 2))(designs, keys)
    one = jax.jit(draw, static_argnums=2)
    for i, key in enumerate(keys):
        rows, weights = one(design, key, 2)
        assert rows.dtype == jnp.int32 and weights.dtype == jnp.float32
        for batched in (one_design, many_designs):
            np.testing.assert_array_equal(batched[0][i], rows)
            np.testing.assert_array_equal(batched[1][i], weights)
    assert len(np.unique(one_design[0][:, design.num_sure :])) > 40
    # on the host, as a design that was pickled
    restored = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, design)))
    rows, _ = jax.jit(lambda key: draw(restored, key, 2))(keys[0])
    np.testing.assert_array_equal(rows, one_design[0][0])


# totals -------------------------------------------------------------------------------


def check_totals(
    scheme: Scheme, design: Design, spoil: Callable[[Batch], Batch] = lambda b: b
) -> None:
    """The estimate is unbiased, and its reported variance is exact."""
    values = jnp.asarray(VALUES, jnp.float32)

    @jax.jit
    @jax.vmap
    def estimates(key):
        drawn = spoil(scheme.draw(key, {"data": N}, {"data": design})["data"])
        found = total(drawn, values[:, drawn.indices], N)
        return found.value, found.variance, found.dof

    keys = random.split(random.key(5), 20_000)
    value, variance, dof = (np.asarray(x, np.float64) for x in estimates(keys))
    root = np.sqrt(len(keys))
    sums = np.asarray(values, np.float64).sum(-1)
    assert (np.abs(value.mean(0) - sums) < 4.5 * value.std(0) / root).all(), "mean"
    num_draws = scheme.draws_of("data")
    exact = exact_variance(design, values, num_draws)
    squares = np.square(value - sums)
    se = squares.std(0) / root
    assert (np.abs(squares.mean(0) - exact) < 4.5 * se).all(), "exact variance"
    se = variance.std(0) / root
    assert (np.abs(variance.mean(0) - exact) < 4.5 * se).all(), "reported variance"
    assert (dof >= num_draws - 1).all()
    assert (dof <= design.num_strata * (num_draws - 1)).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_totals_are_unbiased_with_the_variance_they_report(name):
    check_totals(*designed(SCHEMES[name]))


def once_for_both(drawn: Batch) -> Batch:
    """The first draw of each stratum in place of the second one."""
    first, second = slice(drawn.num_sure, None, 2), slice(drawn.num_sure + 1, None, 2)
    return drawn._replace(
        indices=drawn.indices.at[second].set(drawn.indices[first]),
        weights=drawn.weights.at[second].set(drawn.weights[first]),
    )


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda b: b._replace(weights=b.weights * 1.1), "mean"),
        (lambda b: b._replace(weights=b.weights[::-1]), "mean"),
        (lambda b: b._replace(indices=b.indices.at[: b.num_sure].set(0)), "mean"),
        (once_for_both, "exact"),
        (lambda b: b._replace(num_draws=4), "reported"),
    ],
    ids=["weights", "order", "a sure row lost", "a pair of one", "strata joined"],
)
def test_the_check_of_totals_can_fail(spoil, what):
    scheme, design = designed(batch.stratified(40))
    assert design.num_sure == 3 and design.num_strata == 20
    with pytest.raises(AssertionError, match=what):
        check_totals(scheme, design, spoil)


def test_designs_compare_as_they_should():
    """Each technique reduces the noise, for values like the scores."""
    exact = {}
    for name, scheme in SCHEMES.items():
        scheme, design = designed(scheme)
        exact[name] = exact_variance(design, VALUES[0], scheme.draws_of("data"))
    uniform = N**2 * VALUES[0].var() / 40
    assert exact["stratified"] < 0.5 * exact["importance"]
    assert exact["importance"] < 0.2 * uniform
    assert exact["take_all"] < 0.2 * uniform


def test_a_rare_column_is_found():
    """If a few rows carry everything, they are read, and uniform batches miss them.

    Uniform batches of 100 are unbiased, but all except 0.7% of them estimate zero with
    zero variance.
    """
    size = 200_000
    special = RNG.choice(size, 15, replace=False)
    values = np.zeros(size, np.float32)
    values[special] = RNG.normal(3.0, 1.0, 15)
    plates = {"data": size}
    keys = random.split(random.key(0), 200)
    scheme = bound(batch.stratified(100), size)
    design = scheme.build(np.abs(values), values, "data")
    np.testing.assert_array_equal(design.sure, np.sort(special))

    def estimates(scheme, designs):
        @jax.jit
        @jax.vmap
        def run(key):
            drawn = scheme.draw(key, plates, designs)["data"]
            found = total(drawn, jnp.asarray(values)[None, drawn.indices], size)
            return found.value[0], found.variance[0], drawn.indices

        return run(keys)

    value, variance, rows = estimates(scheme, {"data": design})
    np.testing.assert_allclose(value, values.sum(dtype=np.float64), rtol=1e-6)
    assert (variance == 0).all()
    assert (rows[:, :15] == np.sort(special)).all()
    assert not np.isin(rows[:, 15:], special).any()
    value, variance, _ = estimates(bound(batch.without_replacement(100), size), None)
    assert ((value == 0) & (variance == 0)).mean() > 0.95

    # with uninformative scores no row is lost, only the noise is large
    blind = build(np.ones(size), None, 100)
    assert exact_variance(blind, values, 2) > 1e3 * np.square(values).sum()


@partial(jax.jit, static_argnums=(2, 3))
def _total(weights, rows, num_draws, num_sure):
    return total(Batch(jnp.int32(0), 1.0, weights, num_draws, num_sure), rows, N)


def jit_total(drawn: Batch, rows: np.ndarray) -> Estimate:
    return _total(drawn.weights, rows, drawn.num_draws, drawn.num_sure)


@pytest.mark.parametrize("where", ["sure", "drawn"])
@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan])
def test_a_row_that_is_not_finite_is_never_a_finite_total(where, bad):
    scheme, design = designed(batch.stratified(40))
    drawn = scheme.draw(random.key(0), {"data": N}, {"data": design})["data"]
    assert 1 < drawn.num_sure < len(drawn.indices) - 2
    rows = np.ones((2, len(drawn.indices)), np.float32)
    rows[0, 0 if where == "sure" else -1] = bad
    found = jit_total(drawn, rows)
    np.testing.assert_array_equal(found.value[0], bad)
    assert (found.variance[0] == 0) == np.isinf(bad)
    assert np.isfinite(found.value[1]) and np.isfinite(found.variance[1])
    assert np.isfinite(found.dof).all()
    rows[0, 1] = -bad
    assert np.isnan(jit_total(drawn, rows).value[0])


def test_weights_of_even_draws_are_the_uniform_estimate():
    """Equal weights and one stratum give the estimate with replacement."""
    rows = jnp.asarray(VALUES[:, :40], jnp.float32)
    weights = jnp.full(40, N / 40, jnp.float32)
    weighted = total(Batch(jnp.arange(40), 1.0, weights, 40), rows, N)
    plain = total(Batch(jnp.arange(40), 1.0), rows, N)
    for name in ("value", "variance", "dof"):
        found, expected = getattr(weighted, name), getattr(plain, name)
        np.testing.assert_allclose(found, jnp.broadcast_to(expected, 2), rtol=2e-5)


def test_degrees_of_freedom():
    """The degrees of freedom of the true variances, for many normal strata."""
    num_strata = 2_000

    def found(scale, num_draws, key):
        noise = random.normal(key, (num_strata, num_draws), jnp.float32)
        rows = noise * jnp.asarray(scale, jnp.float32)[:, None]
        weights = jnp.full(rows.size, 1.0 / num_draws, jnp.float32)
        return float(_total(weights, rows.reshape(1, -1), num_draws, 0).dof[0])

    scale = np.linspace(0.1, 2.0, num_strata) * 1e12  # squared twice: beyond float32
    for num_draws in (2, 3):
        free = num_draws - 1
        effective = np.square(scale**2).sum()
        expected = free * np.square(np.sum(scale**2)) / effective
        many = [found(scale, num_draws, k) for k in random.split(random.key(1), 50)]
        se = np.std(many) / np.sqrt(50)
        # the error of a ratio of two estimates is of second order: 1 / strata
        assert abs(np.mean(many) - expected) < 4.5 * se + 20.0
        assert abs(np.mean(many) / expected - 1) < 0.05
    one = np.where(np.arange(num_strata) == 3, 1.0, 0.0)
    np.testing.assert_allclose(found(one, 3, random.key(2)), 2.0, rtol=1e-5)
    assert found(np.zeros(num_strata), 3, random.key(2)) == 2 * num_strata


# schemes ------------------------------------------------------------------------------


def test_reader_reads_weighted_rows():
    """Two plates, each with its own design, through the reader's one round."""
    plates = {"a": N, "b": 500}
    values = {"a": jnp.asarray(VALUES, jnp.float32)}
    values["b"] = values["a"][:, :500]
    scheme = batch.stratified({"a": 40, "b": 20}).bound({"a": 40, "b": 20}, plates)
    designs = {n: scheme.build(SCORES[:size], None, n) for n, size in plates.items()}

    def rows_of(indices):
        return (), {n: values[n][:, rows] for n, rows in indices.items()}

    @jax.jit
    def run(designs, keys):
        reader = Reader(None, plates, scheme, Weights(), designs)
        return jax.vmap(lambda key: reader.read(key, rows_of, 1.0))(keys)

    _, sums, num_rows = run(designs, random.split(random.key(0), 20_000))
    assert sums.value.shape == sums.variance.shape == sums.dof.shape == (20_000, 2)
    expected = sum(d.num_sure + 2 * d.num_strata for d in designs.values())
    assert (num_rows == expected).all() and designs["a"].num_sure > 0
    assert scheme.num_rows(plates, designs) == expected
    assert scheme.num_rows(plates) == 60
    value = np.asarray(sums.value, np.float64)
    truth = sum(np.asarray(v, np.float64).sum(-1) for v in values.values())
    assert (np.abs(value.mean(0) - truth) < 4.5 * value.std(0) / np.sqrt(20_000)).all()
    exact = sum(exact_variance(designs[n], values[n], 2) for n in plates)
    squares = np.square(value - truth)
    se = squares.std(0) / np.sqrt(20_000)
    assert (np.abs(squares.mean(0) - exact) < 4.5 * se).all()


def test_rows_of_the_other_schemes_are_counted():
    plates = {"data": N}
    assert bound(batch.without_replacement(40)).num_rows(plates) == 40
    assert batch.full().bound({"data": N}, plates).num_rows(plates) == N


def test_no_design_is_an_error():
    scheme = bound(batch.stratified(40))
    with pytest.raises(ValueError, match="only a control variate measures"):
        scheme.draw(random.key(0), {"data": N})


@pytest.mark.parametrize("make", [batch.stratified, batch.importance, batch.take_all])
def test_a_draw_of_all_rows_is_the_full_batch(make):
    whole = make({"data": N}).bound({"data": N}, {"data": N})
    assert isinstance(whole, FullBatch)


def test_schemes_are_values():
    schemes = [
        batch.stratified(40),
        batch.stratified(42),
        batch.stratified(40, uniform=0.2),
        batch.importance(40),
        batch.take_all(40),
        batch.take_all(40, num_sure=10),
        batch.stratified({"data": 40}),
        batch.without_replacement(40),
    ]
    assert len(set(schemes)) == len(schemes)
    assert batch.stratified(np.int64(40)) == batch.stratified(40, uniform=0.1)
    assert hash(batch.take_all(40)) == hash(batch.take_all(40, np.int64(1_000)))
    for scheme in schemes:
        assert pickle.loads(pickle.dumps(scheme)) == scheme
    scheme, design = designed(batch.take_all(40, num_sure=7))
    assert design.num_sure == 7 and design.num_strata == 1
    assert set(np.asarray(design.sure)) == set(np.argsort(-SCORES)[:7])
