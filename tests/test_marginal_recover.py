"""Latent variables drawn after a run, and groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import xarray as xr
from marginal_runs import run_at, set_up_error
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from xarray.backends import BackendArray
from xarray.core import indexing

from numpyro_minibatch import (
    by_group,
    marginalize,
    recover_marginals,
)
from numpyro_minibatch.inference_data import (
    as_inference_data,
    get_group,
    to_inference_data,
)
from numpyro_minibatch.marginal import quadrature_error
from numpyro_minibatch.marginal._recover import _with_nodes

rng = np.random.default_rng(5)


def drawn(idata: Any, name: str) -> np.ndarray:
    """Draws of a site along one axis."""
    posterior = get_group(idata, "posterior")
    assert posterior is not None
    values = posterior[name].to_numpy()
    return values.reshape(-1, *values.shape[2:])


def normal(y: Any) -> None:
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("groups", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(1.0, tau))
        with numpyro.plate("within", y.shape[1]):
            numpyro.sample("y", dist.Normal(a, 2.0), obs=y[idx].T)


def normal_of_rows(y: Any) -> None:
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("groups", len(y), dim=-2):
        a = numpyro.sample("a", dist.Normal(1.0, tau))
        with numpyro.plate("within", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(a, 2.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("skew", [None, 1.6])
def test_a_number_with_a_kink_has_its_conditional_distribution(skew: Any) -> None:
    """Under its own name, although it is integrated as a side and a distance."""

    def prior(tau: Any) -> Any:
        if skew is None:
            return dist.Laplace(0.5, tau)
        return dist.AsymmetricLaplace(0.5, tau, skew)

    def model(y: Any) -> None:
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("groups", len(y)) as idx:
            a = numpyro.sample("a", prior(tau))
            numpyro.sample("y", dist.Normal(a, 2.0), obs=y[idx])

    y, tau, count = jnp.array([0.4, 6.0, -3.0]), 1.5, 4000
    found = recover_marginals(marginalize(model), run_at(count, tau=tau), y)
    posterior = get_group(found, "posterior")
    assert posterior is not None
    assert set(posterior.data_vars) == {"tau", "a"}
    a, grid = drawn(found, "a"), np.linspace(-60.0, 60.0, 200_001)
    log_p = np.asarray(prior(tau).log_prob(grid), np.float64)
    for row in range(3):
        weight = np.exp(log_p + scipy.stats.norm.logpdf(float(y[row]), grid, 2.0))
        below = np.cumsum(weight) / weight.sum()
        uniform = np.interp(a[:, row], grid, below)
        assert scipy.stats.kstest(uniform, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    "model", [normal, pytest.param(normal_of_rows, marks=pytest.mark.slow)]
)
def test_one_number_of_a_row_has_its_conditional_distribution(model: Any) -> None:
    y, tau, count = jnp.asarray(rng.normal(1.0, 3.0, size=(6, 4))), 1.5, 4000
    idata = run_at(count, tau=tau)
    found = recover_marginals(marginalize(model), idata, y)
    a = drawn(found, "a")
    assert a.shape == (count, 6)
    precision = 1 / tau**2 + 4 / 4.0
    mean = (1.0 / tau**2 + np.asarray(y).sum(1) / 4.0) / precision
    # five standard errors; those of squares from the fourth moment of a normal
    z = (a - mean) * np.sqrt(precision)
    assert np.all(np.abs(z.mean(0)) < 5 / np.sqrt(count))
    assert np.all(np.abs((z**2).mean(0) - 1.0) < 5 * np.sqrt(2 / count))
    assert abs((z**4).mean() - 3.0) < 5 * np.sqrt(96 / z.size)
    # rows and draws are independent of each other
    assert np.abs(np.corrcoef(z.T) - np.eye(6)).max() < 5 / np.sqrt(count)
    posterior = get_group(found, "posterior")
    assert posterior["a"].dims == ("chain", "draw", "groups")
    # a row's draws do not depend on which other rows are drawn
    some = recover_marginals(marginalize(model), idata, y, rows=[4, 1])
    np.testing.assert_allclose(drawn(some, "a"), a[:, [4, 1]], atol=1e-4)
    assert get_group(some, "posterior")["groups"].values.tolist() == [4, 1]
    assert dict(some.attrs)["kernel"] == "test"


@pytest.mark.slow
def test_two_numbers_of_a_row_have_their_conditional_distribution() -> None:
    covariance = np.array([[2.0, 0.8], [0.8, 1.0]])
    design, y, count = rng.normal(size=(3, 4, 2)), rng.normal(size=(3, 4)), 4000

    def model(design: Any, y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("groups", len(y)) as idx:
            prior = dist.MultivariateNormal(jnp.zeros(2), jnp.asarray(covariance))
            b = numpyro.sample("b", prior)
            mean = jnp.einsum("gki,gi->gk", design[idx], b)
            numpyro.sample("y", dist.Normal(mean, s).to_event(1), obs=y[idx])

    found = recover_marginals(
        marginalize(model), run_at(count, s=0.7), jnp.asarray(design), jnp.asarray(y)
    )
    b = drawn(found, "b")
    for g in range(3):
        precision = np.linalg.inv(covariance) + design[g].T @ design[g] / 0.49
        mean = np.linalg.solve(precision, design[g].T @ y[g] / 0.49)
        z = (b[:, g] - mean) @ np.linalg.cholesky(precision)
        assert np.all(np.abs(z.mean(0)) < 5 / np.sqrt(count))
        off = (z.T @ z) / count - np.eye(2)
        assert np.abs(off).max() < 5 * np.sqrt(2 / count)


def test_states_are_drawn_with_their_probabilities() -> None:
    y, count = jnp.array([-1.0, 0.4, 2.0]), 4000
    weights, means = np.array([0.2, 0.5, 0.3]), np.array([-1.0, 0.0, 2.0])

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            z = numpyro.sample("z", dist.Categorical(jnp.asarray(weights)))
            numpyro.sample("y", dist.Normal(jnp.asarray(means)[z], s), obs=y[idx])

    found = recover_marginals(
        marginalize(model), run_at(count, s=0.9), y, probabilities=True
    )
    off = (np.asarray(y)[:, None] - means) / 0.9
    expected = weights * np.exp(-0.5 * off**2)
    expected /= expected.sum(1, keepdims=True)
    probability = drawn(found, "z_probability")
    np.testing.assert_allclose(probability[0], expected, atol=2e-6)
    frequency = (drawn(found, "z")[..., None] == np.arange(3)).mean(0)
    error = np.sqrt(expected * (1 - expected) / count)
    assert np.all(np.abs(frequency - expected) < 5 * error + 1e-9)


def test_states_beside_a_skewed_number_are_drawn_with_many_nodes() -> None:
    shape = 0.3

    def model(y: Any) -> None:
        g = numpyro.sample("g", dist.Normal(0.0, 1.5))
        with numpyro.plate("data", len(y)):
            zero = numpyro.sample("zero", dist.Bernoulli(logits=g))
            rate = numpyro.sample("rate", dist.Gamma(shape, shape / 2))
            numpyro.sample("y", dist.Poisson(jnp.where(zero == 1, 1e-20, rate)), obs=y)

    y, idata = jnp.array([0, 3]), run_at(2, g=-1.0)
    found = recover_marginals(marginalize(model), idata, y, probabilities=True)
    present = (1 - scipy.special.expit(-1.0)) * (shape / (shape + 2)) ** shape
    expected = scipy.special.expit(-1.0) / (scipy.special.expit(-1.0) + present)
    probability = drawn(found, "zero_probability")[0, :, 1]
    np.testing.assert_allclose(probability, [expected, 0.0], atol=1e-4)


def test_missing_values_are_drawn_and_others_are_those_observed() -> None:
    missing, count = np.array([True, False, True, False]), 4000
    p = np.array([0.3, 0.7])

    def model(x: Any, k: Any, y: Any, missing: Any) -> None:
        numpyro.sample("g", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            prior = dist.Normal(0.0, 2.0)
            x = numpyro.sample("x", prior, obs=x, obs_mask=~missing)
            k = numpyro.sample("k", dist.Categorical(p), obs=k, obs_mask=~missing)
            numpyro.sample("y", dist.Normal(x + 10.0 * k, 1.0), obs=y)

    x, k, y = np.array([0.0, 2.5, 0.0, -3.0]), np.array([0, 1, 0, 0]), np.arange(4.0)
    args = x, k, y, missing
    found = recover_marginals(
        marginalize(model), run_at(count, g=0.0), *args, probabilities=True
    )
    drawn_x, drawn_k = drawn(found, "x_unobserved"), drawn(found, "k_unobserved")
    assert (drawn_x[:, ~missing] == x[~missing]).all()
    assert (drawn_k[:, ~missing] == k[~missing]).all()
    z = (drawn_x[:, 0] - 0.8 * y[0])[drawn_k[:, 0] == 0] / np.sqrt(0.8)
    assert abs(z.mean()) < 5 / np.sqrt(len(z))
    assert abs((z**2).mean() - 1.0) < 5 * np.sqrt(2 / len(z))
    probability = drawn(found, "k_unobserved_probability")[0]
    np.testing.assert_allclose(probability[~missing], np.eye(2)[k[~missing]], atol=1e-6)


def test_draws_have_as_many_nodes_as_the_run() -> None:
    def model(y: Any) -> None:
        with numpyro.plate("data", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            a = numpyro.sample("a", dist.Normal(z, 1.0))
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    own, y = marginalize(model), jnp.zeros(3)

    def nodes(idata: Any, model: Any = own) -> Any:
        return _with_nodes(model, idata, (y,), {}).num_nodes

    idata = run_at(2, g=0.0)
    assert nodes(idata) == 61
    assert nodes(idata, marginalize(model, num_nodes=7)) == 7
    facts = {"facts": json.dumps({"pilot": {"quadrature_nodes": 83}})}
    posterior = get_group(idata, "posterior").assign_attrs(facts)
    assert nodes(as_inference_data({"posterior": posterior}, {})) == 83


@pytest.mark.slow
def test_sites_of_inner_plates_are_drawn_given_the_outer_ones() -> None:
    y, count = np.array([[0.2, 3.0, 2.4], [-0.5, 0.1, 1.0]]), 8000

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("groups", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            with numpyro.plate("within", 3):
                z = numpyro.sample("z", dist.Bernoulli(0.2))
                numpyro.sample("y", dist.Normal(a + 2.0 * z, 1.0), obs=y[idx].T)

    found = recover_marginals(marginalize(model), run_at(count, s=1.5), jnp.asarray(y))
    posterior = get_group(found, "posterior")
    assert posterior["z"].dims == ("chain", "draw", "groups", "within")
    # by a fine grid of `a`, jointly with each state
    grid = np.linspace(-9, 9, 3001)[:, None, None]
    off = y - grid
    both = np.stack([0.8 * np.exp(-0.5 * off**2), 0.2 * np.exp(-0.5 * (off - 2) ** 2)])
    of_a = np.exp(-0.5 * (grid[:, :, 0] / 1.5) ** 2) * both.sum(0).prod(-1)
    of_a /= of_a.sum(0)
    mean = (of_a * grid[:, :, 0]).sum(0)
    sd = np.sqrt((of_a * (grid[:, :, 0] - mean) ** 2).sum(0))
    p = (of_a[..., None] * both[1] / both.sum(0)).sum(0)
    a, z = drawn(found, "a"), drawn(found, "z")
    assert np.all(np.abs(a.mean(0) - mean) < 5 * sd / np.sqrt(count))
    assert np.all(np.abs(z.mean(0) - p) < 5 * np.sqrt(p * (1 - p) / count))


def test_a_long_run_is_recovered_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws are read from a folder and written to one, a few at a time."""
    y = jnp.asarray(rng.normal(size=(6, 2)))
    chains = run_at(46, tau=1.3)["posterior"]["tau"].values * np.ones((2, 1))
    chains += 0.1 * rng.normal(size=chains.shape)
    read: list[tuple[int, ...]] = []

    class Folder(BackendArray):
        """Draws in a file, which say how many of them are read."""

        shape, dtype = chains.shape, chains.dtype

        def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
            support = indexing.IndexingSupport.BASIC
            return indexing.explicit_indexing_adapter(
                key, self.shape, support, self.read
            )

        def read(self, key: tuple[Any, ...]) -> np.ndarray:
            found = chains[key]
            read.append(found.shape)
            return found

    lazy = indexing.LazilyIndexedArray(Folder())
    draws = xr.Dataset({"tau": (("chain", "draw"), lazy)})
    idata = xr.DataTree.from_dict({"posterior": draws})
    in_memory = recover_marginals(marginalize(normal), idata, y)
    read.clear()
    monkeypatch.setattr("numpyro_minibatch.marginal._recover._PIECE", 5 * 4 * 6)
    folder = tmp_path / "latents"
    found = recover_marginals(marginalize(normal), idata, y, out=folder, max_bytes=10.0)
    full, rest = divmod(chains.shape[1], 5)
    of_chain = [(5,)] * full + ([(rest,)] if rest else [])
    assert read == of_chain * len(chains) and full > 1
    one, other = (x["posterior"]["a"] for x in (in_memory, found))
    assert other.dims == ("chain", "draw", "groups")
    np.testing.assert_array_equal(one.values, other.values)
    root = other.data  # a view of the file, not a copy in memory
    while isinstance(root.base, np.ndarray):
        root = root.base
    assert isinstance(root, np.memmap)
    np.testing.assert_array_equal(np.load(folder / "a.npy", "r"), one.values)
    with pytest.raises(ValueError, match=r"a\.npy already exists"):
        recover_marginals(marginalize(normal), idata, y, out=folder)


def in_buckets(small: Any, large: Any) -> None:
    """Groups of two sizes, in plates of their own."""
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    for name, y in (("small", small), ("large", large)):
        with numpyro.plate(name, len(y)) as idx:
            a = numpyro.sample(f"a_{name}", dist.Normal(0.0, tau))
            with numpyro.plate(f"in_{name}", y.shape[1]):
                numpyro.sample(f"y_{name}", dist.Normal(a, 1.0), obs=y[idx].T)


@pytest.mark.slow
def test_rows_of_several_plates_are_recovered() -> None:
    """Buckets of ``by_group`` have plates of their own."""
    group = np.repeat(np.arange(9), [1, 1, 1, 1, 1, 4, 4, 4, 4])
    buckets = by_group(group, rng.normal(size=len(group))).buckets(2)
    y = tuple(jnp.asarray(bucket.arrays[0]) for bucket in buckets)
    idata, model = run_at(4000, tau=1.5), marginalize(in_buckets)
    full = recover_marginals(model, idata, *y, rows={"large": [3, 1]})["posterior"]
    assert full["a_small"].dims == ("chain", "draw", "small")
    assert full["large"].values.tolist() == [3, 1]
    for name, data, some in (("small", y[0], range(5)), ("large", y[1], [3, 1])):
        n = data.shape[1]
        variance = 1.0 / (n + 1.5**-2)
        mean = variance * np.asarray(data)[list(some)].sum(1)
        values = full[f"a_{name}"].values[0]
        z = (values.mean(0) - mean) / np.sqrt(variance / 4000)
        assert np.abs(z).max() < 4.5
        z = (values.var(0) / variance - 1) / np.sqrt(2 / 4000)
        assert np.abs(z).max() < 4.5
    for rows, says in (
        ([0], "in several plates, 'small', 'large'"),
        ({"b": [0]}, "'b'"),
    ):
        with pytest.raises(ValueError, match=says):
            recover_marginals(model, idata, *y, rows=rows)
    assert quadrature_error(model, run_at(3, tau=1.5), *y).largest < 1e-5
    draws = {"tau": np.linspace(1.0, 2.0, 8)}
    assert set_up_error(model, draws, y)["quadrature_error"] < 1e-5


# bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": normal}, TypeError, "needs a marginalized model"),
        ({"rows": [6]}, ValueError, "from 0 to 5, the rows of plate 'groups', got 6"),
        ({"rows": 0.5}, ValueError, "must be numbers of rows"),
        ({"idata": run_at(2, sigma=1.0)}, ValueError, "no draws of 'tau'.*'sigma'"),
        ({"idata": 3}, ValueError, "needs a run with a posterior, .* got int"),
        ({"max_bytes": 10.0}, ValueError, "at least 48 bytes: 2 draws of 6 rows"),
        ({"y": None}, ValueError, "the model observes nothing"),
    ],
)
def test_bad_input_is_refused(change: Any, error: type, message: str) -> None:
    def model(y: Any = None) -> None:
        normal(y) if y is not None else numpyro.sample("tau", dist.Normal(0.0, 1.0))

    given = {
        "model": marginalize(model),
        "idata": run_at(2, tau=1.0),
        "y": jnp.ones((6, 4)),
        **change,
    }
    with pytest.raises(error, match=f"(?s){message}"):
        recover_marginals(given.pop("model"), given.pop("idata"), **given)


# groups -------------------------------------------------------------------------------


def test_groups_hold_their_observations() -> None:
    group = rng.integers(0, 30, size=200)
    x, y = rng.normal(size=(200, 3)), rng.normal(size=200)
    groups = by_group(group, x, y)
    np.testing.assert_array_equal(groups.labels, np.unique(group))
    for k, label in enumerate(groups.labels):
        seen = groups.mask[k]
        np.testing.assert_array_equal(groups.arrays[0][k][seen], x[group == label])
        np.testing.assert_array_equal(groups.arrays[1][k][seen], y[group == label])
        # padded entries are data of the group
        assert np.all(groups.arrays[1][k][~seen] == groups.arrays[1][k][0])
    assert groups.mask.sum() == 200


@pytest.mark.parametrize("most", [1, 2, 3, 50])
def test_buckets_hold_every_group_once_and_pad_least(most: int) -> None:
    group = np.repeat(np.arange(40), rng.permutation(np.r_[np.arange(1, 40), 300]))
    groups = by_group(group, np.arange(len(group)))
    buckets = groups.buckets(most)
    assert len(buckets) == min(most, 40)
    labels = np.concatenate([b.labels for b in buckets])
    np.testing.assert_array_equal(np.sort(labels), np.arange(40))
    entries = sum(b.mask.size for b in buckets)
    assert sum(b.mask.sum() for b in buckets) == len(group)
    if most == 2:  # by trying all boundaries
        sizes = np.sort(groups.sizes)
        tried = [k * sizes[k - 1] + (40 - k) * sizes[-1] for k in range(1, 40)]
        assert entries == min(tried)
    if most == 50:
        assert entries == len(group)


def test_labels_of_any_type_make_groups() -> None:
    for labels in (np.array(["b", "a", "b"], object), pd.Series(["b", "a", "b"])):
        assert by_group(labels, np.arange(3.0)).labels.tolist() == ["a", "b"]
    known = np.ma.array([2, 1, 2], mask=False)
    assert by_group(known, np.arange(3.0)).labels.tolist() == [1, 2]
    exact = np.array([np.int64(2), np.str_("1"), 2][::2], object)
    assert by_group(exact, np.arange(2.0)).labels.tolist() == [2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([[1, 2]], [1.0]), "must be a vector.*shape"),
        (([], []), "must be a vector"),
        (([1.0, np.nan], [1.0, 2.0]), "contains NaN"),
        ((np.array(["a", None], object), [1.0, 2.0]), "leave out these rows"),
        ((np.array(["a", np.nan], object), [1.0, 2.0]), "leave out these rows"),
        ((pd.Series(["a", pd.NA], dtype="string"), [1.0, 2.0]), "leave out these rows"),
        (
            (np.array(["2020-01-02", "NaT"], "M8[D]"), [1.0, 2.0]),
            "other missing labels",
        ),
        ((np.ma.array([1, 2], mask=[False, True]), [1.0, 2.0]), "other missing labels"),
        (([1, 2], [1.0]), r"2 groups of observations and array 0 of shape \(1,\)"),
    ],
)
def test_bad_groups_are_refused(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_group(*args)


def effective(x: np.ndarray) -> np.ndarray:
    """The effective sample size of each column of one chain."""
    found = effective_sample_size(x.reshape(1, len(x), -1))
    return np.minimum(found, len(x)).reshape(x.shape[1:])


@pytest.mark.slow
def test_keys_decide_the_draws() -> None:
    y, idata = jnp.ones((3, 2)), run_at(2, tau=1.0)
    one, same, other = (
        drawn(recover_marginals(marginalize(normal), idata, y, key=key), "a")
        for key in map(jax.random.key, (1, 1, 2))
    )
    np.testing.assert_array_equal(one, same)
    assert not np.any(one == other)


@pytest.mark.slow
def test_a_run_with_its_drawn_sites_is_that_of_nuts_on_the_whole_model() -> None:
    x, groups = rng.normal(size=(15, 5)), 15
    logits = 1.5 * rng.normal(size=(groups, 1)) + 0.8 * x
    y = (rng.uniform(size=x.shape) < 1 / (1 + np.exp(-logits))).astype("f")

    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("groups", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, tau))
            with numpyro.plate("within", y.shape[1]):
                linear = a + b * x[idx].T
                numpyro.sample("y", dist.Bernoulli(logits=linear), obs=y[idx].T)

    def run(model: Any, count: int) -> Any:
        mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=count, progress_bar=False)
        mcmc.run(jax.random.key(1), jnp.asarray(x), jnp.asarray(y))
        return to_inference_data(mcmc, constant_data=False)

    whole, marginal = run(model, 1000), run(marginalize(model), 400)
    full = recover_marginals(
        marginalize(model), marginal, jnp.asarray(x), jnp.asarray(y)
    )
    for name in ("b", "tau", "a"):
        one, other = drawn(whole, name), drawn(full, name)
        for power in (1, 2):  # means, and squares about the mean of both
            center = one.mean(0) if power == 2 else 0.0
            p, q = (one - center) ** power, (other - center) ** power
            error = sum(v.var(0) / effective(v) for v in (p, q))
            z = (p.mean(0) - q.mean(0)) / np.sqrt(error)
            assert np.max(np.abs(z)) < 5.0, (name, power)


def test_draws_from_one_of_two_modes_are_pointed_out() -> None:
    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            numpyro.sample("y", dist.Normal(a**2, 0.01), obs=y[idx])

    y, marginal = jnp.array([1.0, 4.0]), marginalize(model)
    facts = {"pilot": {"quadrature_elsewhere": 0.69, "quadrature_row_elsewhere": 1}}
    idata = run_at(2, s=1.0)
    posterior = get_group(idata, "posterior")
    posterior.attrs["facts"] = json.dumps(facts)
    idata = as_inference_data({"posterior": posterior}, {})
    with pytest.warns(UserWarning, match="50% of row 1. Draws of such rows come from"):
        recover_marginals(marginal, idata, y, key=jax.random.key(0))
