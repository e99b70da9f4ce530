"""The keyed permutation is a permutation, and as random as documented.

Every check of randomness compares draws over many keys with the exact expectation for a
uniformly random permutation. The same checks reject networks with too few rounds and
other ways of drawing rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_minibatch.batch import _permutation
from numpyro_minibatch.batch._permutation import permute

# jax.enable_x64 is newer than the lowest supported version
enable_x64 = getattr(jax, "enable_x64", None)
if enable_x64 is None:
    from jax.experimental import enable_x64

# The file computes fewer than 1,000 p-values, so that one of them falls below this
# by chance in fewer than 1 in 100,000 runs; that leaves a factor of ten for the
# normal and chi-square approximations of their tails.
ALPHA = 1e-5 / 1_000

NUM_KEYS = 100_000
NUM_KEYS_OF_BATCHES = 25_000  # these have up to 200 positions

# Both sides of the bound below which the permutation is drawn exactly; 129 and 131
# have the smallest grids of the network, 129, 131, 1,009 and 999,983 surplus cells.
SIZES = (3, 5, 7, 10, 60, 128, 129, 131, 1_000, 1_009, 999_983, 10**6, 10**7)


@functools.partial(jax.jit, static_argnames=("size", "rounds"))
def _draw(keys, positions, size, rounds):
    def one(key):
        if rounds is None:
            return permute(key, positions, size)
        words = jax.random.bits(key, (rounds,), "uint32")
        return _permutation._feistel(words, positions.astype("uint32"), size)

    return jax.vmap(one)(keys)


@functools.lru_cache(maxsize=2)
def _keys(num_keys):
    return jax.random.split(jax.random.key(0), num_keys)


def draw(positions, size, rounds=None, num_keys=NUM_KEYS):
    """Values at the positions (columns) under many keys (rows)."""
    # In pieces of one shape, so that a size is compiled once: that costs more than
    # all draws together.
    keys = _keys(num_keys)
    padded = np.resize(positions, math.ceil(len(positions) / 16) * 16)
    values = [
        [
            _draw(keys[i : i + 25_000], padded[j : j + 16], size, rounds)
            for j in range(0, padded.size, 16)
        ]
        for i in range(0, num_keys, 25_000)
    ]
    return np.block(values)[:, : len(positions)].astype(np.int64)


def chi_square(cells: np.ndarray, distribution: np.ndarray) -> float:
    """P-value of the cells' counts; a cell that cannot occur must not."""
    counts = np.bincount(cells.ravel(), minlength=distribution.size)
    expected = counts.sum() * distribution.ravel()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    counts, expected = counts[possible], expected[possible]
    assert expected.min() > 20
    if counts.size == 1:
        return 1.0
    statistic = np.sum((counts - expected) ** 2 / expected)
    return stats.chi2.sf(statistic, counts.size - 1)


def normal_test(draws: np.ndarray, mean: float) -> float:
    """P-value of the mean of independent draws."""
    error = draws.std() / math.sqrt(draws.size)
    if error == 0:
        return float(np.isclose(draws.mean(), mean))
    return 2 * stats.norm.sf(abs(draws.mean() - mean) / error)


class Labels:
    """A label for every value, and the distributions of labels of random values."""

    def __init__(self, size: int, num_labels: int, label) -> None:
        self.size, self.num_labels, self.label = size, num_labels, label
        self.counts = np.bincount(label(np.arange(size)), minlength=num_labels)

    def single(self, values: np.ndarray) -> float:
        return chi_square(self.label(values), self.counts / self.size)

    def pair(self, first: np.ndarray, second: np.ndarray) -> float:
        distribution = np.outer(self.counts, self.counts) - np.diag(self.counts)
        cells = self.label(first) * self.num_labels + self.label(second)
        return chi_square(cells, distribution / (self.size * (self.size - 1)))

    @functools.cached_property
    def distribution_of_difference(self) -> np.ndarray:
        # The number of pairs at each difference is a circular autocorrelation.
        transform = np.fft.rfft(self.counts)
        pairs = np.fft.irfft(transform * transform.conj(), self.num_labels)
        pairs = np.rint(pairs)
        pairs[0] -= self.size
        return pairs / (self.size * (self.size - 1))

    def difference(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return (self.label(second) - self.label(first)) % self.num_labels


@functools.lru_cache(maxsize=2)
def labels_of(size: int) -> dict[str, Labels]:
    num_rows, num_columns = _permutation._grid(size)
    fine, coarse = min(size, 1_000), min(size, 12)
    return {
        "fine": Labels(size, fine, lambda v: v * fine // size),
        "coarse": Labels(size, coarse, lambda v: v * coarse // size),
        "parity": Labels(size, 2, lambda v: v % 2),
        "row": Labels(size, num_rows, lambda v: v // num_columns),
        "column": Labels(size, num_columns, lambda v: v % num_columns),
    }


def pairs_of_positions(size: int) -> dict[str, tuple[int, int]]:
    num_rows, num_columns = _permutation._grid(size)
    pairs = {
        "adjacent": (0, 1),
        "last": (size - 2, size - 1),
        "column": (0, num_columns),
        "column, far": (1, 1 + num_columns * (num_rows // 2)),
        "apart": (0, num_columns + 1),
    }
    return {name: pair for name, pair in pairs.items() if pair[0] < pair[1] < size}


def p_values_of_pairs(size, rounds=None, num_keys=NUM_KEYS) -> dict[str, float]:
    pairs, labels = pairs_of_positions(size), labels_of(size)
    positions = [position for pair in pairs.values() for position in pair]
    values = draw(positions, size, rounds, num_keys)
    num_gaps = min(size - 1, 200)
    # All gaps from 1 to size - 1, around the circle, have the same probability.
    gaps = Labels(size - 1, num_gaps, lambda gap: gap * num_gaps // (size - 1))
    found = {}
    for i, name in enumerate(pairs):
        first, second = values[:, 2 * i], values[:, 2 * i + 1]
        found[f"{name}: gap"] = gaps.single((second - first) % size - 1)
        for label in ("coarse", "parity"):
            found[f"{name}: {label}"] = labels[label].pair(first, second)
        for label in ("row", "column"):
            distribution = labels[label].distribution_of_difference
            differences = labels[label].difference(first, second)
            found[f"{name}: {label}"] = chi_square(differences, distribution)
            # As in a network with few rounds, the positions keep their distance.
            distance = labels[label].difference(*np.array(pairs[name]))
            kept = np.array([1 - distribution[distance], distribution[distance]])
            found[f"{name}: {label} kept"] = chi_square(differences == distance, kept)
    return found


def rows_of_data(size: int) -> Iterator[tuple[str, np.ndarray]]:
    num_columns = _permutation._grid(size)[1]
    index = np.arange(size)
    yield "linear", index / size
    # Every eighth residue class, and every eighth block, of the network's grid; a
    # single one is hit so rarely that the mean of its products is not normal.
    yield "residues", (index % num_columns % 8 == 0).astype(float)
    yield "blocks", (index // num_columns % 8 == 0).astype(float)
    yield "heavy", np.log((index + 0.5) / size) ** 2
    yield "alternating", 1.0 - 2.0 * (index % 2)


def p_values_of_batches(batches: np.ndarray, size: int) -> dict[str, float]:
    """Compare two disjoint batches a key with random draws without replacement."""
    m = batches.shape[1] // 2
    found = {}
    for name, data in rows_of_data(size):
        spread = data.var(ddof=1)
        values = data[batches] - data.mean()
        first, second = values[:, :m].mean(1), values[:, m:].mean(1)
        found[f"{name}: mean"] = normal_test(first, 0.0)
        found[f"{name}: variance"] = normal_test(first**2, spread / m * (1 - m / size))
        found[f"{name}: covariance"] = normal_test(first * second, -spread / size)
    # The number of grid rows and columns that a batch touches depends on all its
    # members at once, not on two at a time.
    for name in ("row", "column"):
        labels = labels_of(size)[name]
        touched = np.diff(np.sort(labels.label(batches[:, :m]), axis=1), axis=1) > 0
        missed = stats.hypergeom.pmf(0, size, labels.counts, m)
        mean = labels.num_labels - missed.sum()
        found[f"{name}s touched"] = normal_test(1.0 + touched.sum(1), mean)
    return found


def batch_size(size: int) -> int:
    return min(size // 3, 100)


def too_small(found: dict[str, float]) -> dict[str, float]:
    return {name: p for name, p in found.items() if not p > ALPHA}


# --- bijectivity --------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", (1, 2, 3, 5, 7, 10, 128, 129, 131, 1_000, 1_009, 4_099)
)
def test_all_positions_give_every_value_once(size):
    values = draw(np.arange(size), size, num_keys=20)
    np.testing.assert_array_equal(np.sort(values, axis=1), [np.arange(size)] * 20)


@pytest.mark.parametrize("size", (3, 11, 61))
def test_network_permutes_tiny_sizes_too(size):
    # The bound on tiny sizes is a choice of quality, not of correctness.
    values = draw(np.arange(size), size, rounds=3, num_keys=20)
    np.testing.assert_array_equal(np.sort(values, axis=1), [np.arange(size)] * 20)


@pytest.mark.parametrize("size", (999_983, 10**7, 2**31 - 1))
def test_distinct_positions_of_a_large_size_have_distinct_values(size):
    positions = np.concatenate([np.arange(1_000), np.arange(size - 1_000, size)])
    values = draw(positions, size, num_keys=20)
    assert values.min() >= 0 and values.max() < size
    assert all(np.unique(row).size == positions.size for row in values)


@pytest.mark.parametrize("size", (5, 1_009))
def test_positions_outside_the_range_have_a_valid_value(size):
    positions = jnp.array([[size - 1, size], [2**31 - 1, -1]])
    values = permute(jax.random.key(0), positions, size)
    assert values.shape == (2, 2) and values.dtype == jnp.int32
    assert 0 <= int(values.min()) and int(values.max()) == int(values.min()) < size


# --- JAX transformations and arguments ----------------------------------------------


@pytest.mark.parametrize("size", (7, 1_009))
@pytest.mark.parametrize("impl", ("threefry2x32", "rbg"))
def test_same_values_under_all_transformations(size, impl):
    positions = jnp.arange(7)
    keys = jax.random.split(jax.random.key(0, impl=impl), 4)

    def step(carry, key):
        return carry, permute(key, positions, size)

    scanned = jax.jit(lambda keys: jax.lax.scan(step, 0, keys)[1])(keys)
    assert np.unique(scanned, axis=0).shape[0] == 4
    np.testing.assert_array_equal(scanned[0], permute(keys[0], positions, size))
    vmapped = jax.jit(jax.vmap(lambda key: permute(key, positions, size)))(keys)
    if impl == "threefry2x32":
        np.testing.assert_array_equal(scanned, vmapped)
    # rbg draws other bits under vmap, which jax documents; they must still differ.
    assert np.unique(vmapped, axis=0).shape[0] == 4
    assert all(np.unique(row).size == 7 for row in np.asarray(vmapped))


@pytest.mark.parametrize("size", (7, 1_009))
def test_raw_and_typed_keys_agree(size):
    typed = permute(jax.random.key(3), jnp.arange(7), size)
    raw = permute(jax.random.PRNGKey(3), jnp.arange(7), size)
    np.testing.assert_array_equal(typed, raw)


@pytest.mark.parametrize("size", (7, 1_009))
def test_x64_mode_changes_no_value(size):
    values = []
    for x64 in (False, True):
        with enable_x64(x64):
            key = jax.random.key(0)
            values.append(jax.jit(lambda k: permute(k, jnp.arange(7), size))(key))
            assert values[-1].dtype == jnp.int32
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("size", (7, 1_000, 1_009))
def test_key_is_consumed_once(size):
    @jax.jit
    def once(key):
        return permute(key, jnp.arange(7), size)

    @jax.jit
    def twice(key):
        return once(key) + once(key)

    with jax.debug_key_reuse(True):
        once(jax.random.key(0))
        with pytest.raises(jax.errors.KeyReuseError):
            twice(jax.random.key(0))


@pytest.mark.parametrize(
    "size, walks", ((129, True), (1_000, False), (2**31 - 1, True))
)
def test_program_is_small_and_of_32_bits(size, walks):
    with enable_x64(True):
        positions = jnp.arange(100, dtype=jnp.int32)
        program = jax.make_jaxpr(lambda k, p: permute(k, p, size))(
            jax.random.key(0), positions
        )
    text = str(program)
    assert text.count("random_bits") == 1
    assert ("while" in text) == walks
    assert "64[" not in text
    # Nothing is longer than the positions: the work does not grow with the size.
    assert not any(f"[{length}]" in text for length in (size, size + 1))


@pytest.mark.parametrize("size", (0, -1, 2**31, 10.0, True, "10", None))
def test_wrong_size_is_refused(size):
    with pytest.raises(ValueError, match="permutation needs a Python integer"):
        permute(jax.random.key(0), jnp.arange(3), size)


def test_traced_size_is_refused():
    with pytest.raises(ValueError, match="known when the program is traced"):
        jax.jit(lambda n: permute(jax.random.key(0), jnp.arange(3), n))(10)


def test_fractional_positions_are_refused():
    with pytest.raises(TypeError, match="dtype float32"):
        permute(jax.random.key(0), jnp.linspace(0.0, 1.0, 3, dtype="float32"), 10)


def test_grid_is_nearly_square_and_nearly_full():
    for size in [*range(129, 3_000), 999_983, 10**7 + 19, 2**31 - 1]:
        num_rows, num_columns = _permutation._grid(size)
        assert 0 <= num_rows * num_columns - size < num_rows <= num_columns
        assert num_columns < 2.5 * num_rows
        # Words: cells and shifted halves must not wrap.
        assert num_rows * num_columns < 2**32 and num_columns <= 2**17


# --- randomness ---------------------------------------------------------------------


@pytest.mark.parametrize("size", (2, 3, 4, 5))
def test_all_permutations_are_equally_likely(size):
    values = draw(np.arange(size), size)
    ranks = values @ size ** np.arange(size)
    codes, ranks = np.unique(ranks, return_inverse=True)
    number = math.factorial(size)
    assert codes.size == number
    assert chi_square(ranks, np.full(number, 1 / number)) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_single_positions_are_uniform(size):
    num_columns = _permutation._grid(size)[1]
    positions = sorted(
        {0, 1, size // 2, min(num_columns, size - 1), size - 2, size - 1}
    )
    values, labels = draw(positions, size), labels_of(size)
    found = {
        f"{position}: {name}": labels[name].single(values[:, i])
        for i, position in enumerate(positions)
        for name in ("fine", "row", "column")
    }
    assert not too_small(found)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_pairs_of_positions_are_uniform(size):
    assert not too_small(p_values_of_pairs(size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [size for size in SIZES if size > 7])
def test_batches_are_random_draws_without_replacement(size):
    m = batch_size(size)
    batches = draw(np.arange(2 * m), size, num_keys=NUM_KEYS_OF_BATCHES)
    assert not too_small(p_values_of_batches(batches, size))


# --- the checks can fail ------------------------------------------------------------


@pytest.mark.parametrize("size", (129, 1_009, 10**6, 10**7))
@pytest.mark.parametrize("rounds", (2, 4))
def test_pairs_reject_too_few_rounds(size, rounds):
    assert too_small(p_values_of_pairs(size, rounds))


@pytest.mark.parametrize("size", (129, 131))
def test_pairs_reject_half_the_rounds_on_the_smallest_grids(size):
    rounds = _permutation._ROUNDS // 2
    assert too_small(p_values_of_pairs(size, rounds, num_keys=400_000))


@pytest.mark.parametrize("size", (129, 1_009))
def test_batches_reject_two_rounds(size):
    m = batch_size(size)
    batches = draw(np.arange(2 * m), size, rounds=2, num_keys=NUM_KEYS_OF_BATCHES)
    assert too_small(p_values_of_batches(batches, size))


def test_batches_reject_draws_with_replacement_and_rotations():
    size, m = 129, batch_size(129)
    rng = np.random.default_rng(0)
    independent = rng.integers(size, size=(NUM_KEYS_OF_BATCHES, 2 * m))
    found = too_small(p_values_of_batches(independent, size))
    assert "linear: variance" in found and "linear: covariance" in found
    rotated = (
        rng.integers(size, size=(NUM_KEYS_OF_BATCHES, 1)) + np.arange(2 * m)
    ) % size
    assert "linear: variance" in too_small(p_values_of_batches(rotated, size))
