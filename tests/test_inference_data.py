"""The ArviZ result of a run: groups, names, full data, attributes, files."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.contrib.module import random_flax_module
from numpyro.infer import HMC, HMCECS, MCMC, NUTS, BarkerMH, init_to_value
from numpyro.infer import log_likelihood as numpyro_log_likelihood
from scipy.stats import norm

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    MHMinibatch,
    MinibatchMH,
    Target,
    diagnose,
    to_inference_data,
)
from numpyro_minibatch._model import replay
from numpyro_minibatch.inference_data import get_group

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.2x announces ArviZ 1
    import arviz as az

matplotlib.use("Agg")
OLD_ARVIZ = int(az.__version__.partition(".")[0]) < 1

N, GROUPS = 61, 4
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 3)).astype(np.float32)
group = rng.integers(0, GROUPS, N).astype(np.int32)
y = rng.normal(size=N).astype(np.float32)


def hierarchy(X: Any, group: Any, *, y: Any, scale: float = 1.0) -> None:
    """A full plate, a matrix, a factor, a deterministic, and rows taken by index."""
    with numpyro.plate("group", GROUPS):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.deterministic("twice", 2 * a)
    W = numpyro.sample("W", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    numpyro.deterministic("total", a.sum())
    numpyro.factor("penalty", -jnp.square(a).sum())
    with numpyro.plate("data", N, subsample_size=20) as idx:
        mean = a[group[idx]] + (X[idx] @ W).sum(-1)
        numpyro.sample("obs", dist.Normal(mean, scale), obs=y[idx])


def hierarchy_at_full_size(X: Any, group: Any, *, y: Any, scale: float = 1.0) -> None:
    """The same model for ``numpyro.infer.log_likelihood``."""
    with numpyro.plate("group", GROUPS):
        a = numpyro.sample("a", dist.Normal(0, 1))
    W = numpyro.sample("W", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    with numpyro.plate("data", N):
        mean = a[group] + (X @ W).sum(-1)
        numpyro.sample("obs", dist.Normal(mean, scale), obs=y)


def run(
    kernel: Any, *args: Any, draws: int = 5, warmup: int = 4, **kwargs: Any
) -> MCMC:
    """A run that is as short as can be."""
    driver = {k: kwargs.pop(k) for k in ("num_chains", "chain_method") if k in kwargs}
    mcmc = MCMC(
        kernel, num_warmup=warmup, num_samples=draws, progress_bar=False, **driver
    )
    # an old key: NumPyro's driver cannot collect a field with new ones
    mcmc.run(jax.random.PRNGKey(0), *args, **kwargs)
    return mcmc


class Case(NamedTuple):
    """A run of two chains that keeps its warmup, and its ArviZ result."""

    mcmc: MCMC
    warm: Any
    idata: Any


@pytest.fixture(scope="module")
def case() -> Case:
    kernel = MINT(hierarchy, temperature=50.0)
    mcmc = MCMC(
        kernel,
        num_warmup=20,
        num_samples=30,
        thinning=2,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    data = {"X": jnp.asarray(X), "group": jnp.asarray(group), "y": jnp.asarray(y)}
    mcmc.warmup(jax.random.key(0), collect_warmup=True, **data)
    warm = to_inference_data(mcmc)
    mcmc.run(jax.random.key(1), **data)
    return Case(mcmc, warm, to_inference_data(mcmc, warmup=warm, log_likelihood=True))


def dims(idata: Any, name: str) -> dict[str, tuple[str, ...]]:
    dataset = get_group(idata, name)
    assert dataset is not None
    return {str(n): tuple(map(str, v.dims)) for n, v in dataset.data_vars.items()}


def values(idata: Any, name: str, variable: str) -> np.ndarray:
    dataset = get_group(idata, name)
    assert dataset is not None
    return dataset[variable].values


def attrs(idata: Any) -> dict[str, Any]:
    dataset = get_group(idata, "posterior")
    assert dataset is not None
    return dataset.attrs


# groups and names -------------------------------------------------------------------


def test_is_what_this_line_of_arviz_works_with(case: Case) -> None:
    expected = az.InferenceData if OLD_ARVIZ else xr.DataTree
    assert type(case.idata) is expected
    groups = case.idata.groups() if OLD_ARVIZ else list(case.idata.children)
    assert sorted(groups) == [
        "constant_data",
        "log_likelihood",
        "observed_data",
        "posterior",
        "sample_stats",
        "warmup_posterior",
        "warmup_sample_stats",
    ]


def test_posterior_has_the_names_of_the_plates(case: Case) -> None:
    assert dims(case.idata, "posterior") == {
        "a": ("chain", "draw", "group_dim"),  # an argument is called group, too
        "W": ("chain", "draw", "W_dim_0", "W_dim_1"),
        "twice": ("chain", "draw", "group_dim"),
        "total": ("chain", "draw"),
    }
    samples = case.mcmc.get_samples(group_by_chain=True)
    for name, value in samples.items():
        np.testing.assert_array_equal(values(case.idata, "posterior", name), value)
    assert samples["a"].shape == (2, 15, GROUPS)


def test_sample_stats_are_flat(case: Case) -> None:
    found = dims(case.idata, "sample_stats")
    assert set(found.values()) == {("chain", "draw")}
    assert sorted(found) == [
        "acceptance_rate",
        "diverging",
        "log_ratio",
        "log_ratio_variance",
        "lp_estimate",
        "num_rows",
        "reliable",
        "step_size",
    ]
    fields = case.mcmc.get_extra_fields(group_by_chain=True)
    np.testing.assert_array_equal(
        values(case.idata, "sample_stats", "acceptance_rate"), fields["accept_prob"]
    )
    assert values(case.idata, "sample_stats", "diverging").dtype == bool
    assert (values(case.idata, "sample_stats", "num_rows") == 20).all()


def test_data_are_there_at_full_size(case: Case) -> None:
    assert dims(case.idata, "observed_data") == {"obs": ("data",)}
    np.testing.assert_array_equal(values(case.idata, "observed_data", "obs"), y)
    assert dims(case.idata, "constant_data") == {
        "X": ("data", "X_dim_0"),
        "group": ("data",),
    }
    np.testing.assert_array_equal(values(case.idata, "constant_data", "X"), X)
    np.testing.assert_array_equal(values(case.idata, "constant_data", "group"), group)


def test_attributes_say_what_was_sampled(case: Case) -> None:
    found = attrs(case.idata)
    assert found["kernel"] == "MINT"
    assert found["temperature"] == 50.0
    assert found["target"] == "prior * likelihood ** (1 / 50)"
    assert json.loads(found["plates"]) == {"data": N}
    assert json.loads(found["batch_sizes"]) == {"data": 20}
    settings = json.loads(found["settings"])
    assert settings["max_variance"] == 1.0
    assert settings["target_accept_prob"] == 0.3
    assert found["inference_library"] == "numpyro_minibatch"
    assert found["thinning"] == 2
    assert found["numpyro_version"] == numpyro.__version__
    assert found["created_at"].startswith("20")
    assert dict(case.idata.attrs) == found
    assert "renamed_sites" not in found


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": 1.0}, "prior * likelihood"),
        ({"temperature": 12.5}, "prior * likelihood ** (1 / 12.5)"),
        (
            {"temperature": 1e6, "temper_prior": True},
            "(prior * likelihood) ** (1 / 1e+06)",
        ),
    ],
)
def test_target_sentence(settings: dict[str, Any], sentence: str) -> None:
    target = Target(lambda z: -(z**2), lambda z, i: 0.0 * z + 0.0 * i, 10)
    kernel = MinibatchMH(target=target, batch_size=5, **settings)
    mcmc = run(kernel, draws=1, warmup=0, init_params=jnp.array(0.5))
    assert attrs(to_inference_data(mcmc))["target"] == sentence


def test_arviz_analyses_it(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so few draws
        summary = az.summary(case.idata)
        ess = az.ess(case.idata)
        az.plot_trace(case.idata, var_names=["a"])
    assert len(summary) == 2 * GROUPS + 6 + 1
    assert "W[2, 1]" in summary.index
    assert ess["a"].shape == (GROUPS,)
    matplotlib.pyplot.close("all")


def test_netcdf_round_trip(case: Case, tmp_path: Path) -> None:
    path = str(tmp_path / "run.nc")
    case.idata.to_netcdf(path)
    back = az.from_netcdf(path)
    groups = case.idata.groups() if OLD_ARVIZ else list(case.idata.children)
    for name in groups:
        before, after = get_group(case.idata, name), get_group(back, name)
        assert before is not None and after is not None
        xr.testing.assert_equal(before, after)
        assert dict(after.attrs) == before.attrs
        for variable in before:
            assert after[variable].dtype == before[variable].dtype
    assert dict(back.attrs) == dict(case.idata.attrs)


# full data from every kind of model -------------------------------------------------


def by_index(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", N, subsample_size=7) as idx:
        numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])


def by_subsample(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", N, subsample_size=7):
        rows = numpyro.subsample(y, event_dim=0)
        numpyro.sample("obs", dist.Normal(mu, 1), obs=rows)


def full_plate(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", N) as idx:
        numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])


@pytest.mark.parametrize(
    ("model", "settings"),
    [(by_index, {}), (by_subsample, {}), (full_plate, {"batch_size": {"data": 7}})],
)
def test_observed_data_are_never_a_minibatch(model: Callable, settings: Any) -> None:
    data = np.where(np.arange(N) == 5, np.nan, y)  # NaN is data, too
    masked = numpyro.handlers.mask(model, mask=False)
    idata = to_inference_data(
        run(MINT(masked, temperature=5.0, **settings), data, draws=2, warmup=0)
    )
    np.testing.assert_array_equal(values(idata, "observed_data", "obs"), data)
    assert get_group(idata, "constant_data") is None  # y is there already


def test_the_check_of_full_data_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_rows(target: Any) -> Any:
        rows = {name: jnp.arange(7) for name in target.sizes}
        return target.trace(rows, substitute_fn=init_to_value(values={}))

    mcmc = run(MINT(by_index, temperature=5.0), y, draws=2, warmup=0)
    monkeypatch.setattr(replay, "_sites_at_all_rows", first_rows)
    found = values(to_inference_data(mcmc), "observed_data", "obs")
    assert found.shape != y.shape


def two_plates(first: Any, second: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("kind", 3, dim=-2):
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        with numpyro.plate("left", 3 * N, dim=-1) as idx:
            numpyro.sample("x/inner", dist.Normal(mu[0] + shift, 1), obs=first[:, idx])
    with numpyro.plate("right", N) as idx:
        covariance = dist.MultivariateNormal(mu, jnp.eye(2))
        numpyro.sample("z", covariance, obs=second[idx])
    numpyro.sample("alone", dist.Normal(mu[0], 1), obs=jnp.array(0.25))


def test_several_plates_and_sites() -> None:
    first = rng.normal(size=(3, 3 * N)).astype(np.float32)
    second = rng.normal(size=(N, 2)).astype(np.float32)
    kernel = MINT(two_plates, batch_size={"left": 20, "right": 10}, temperature=10.0)
    mcmc = run(kernel, first, second)
    idata = to_inference_data(mcmc, log_likelihood=True, chunk_size=100)
    assert dims(idata, "posterior") == {
        "mu": ("chain", "draw", "mu_dim_0"),
        "shift": ("chain", "draw", "kind", "shift_dim_0"),
    }
    assert dims(idata, "observed_data") == {
        "x.inner": ("kind", "left"),
        "z": ("right", "z_dim_0"),
        "alone": (),
    }
    np.testing.assert_array_equal(values(idata, "observed_data", "x.inner"), first)
    np.testing.assert_array_equal(values(idata, "observed_data", "z"), second)
    assert json.loads(attrs(idata)["plates"]) == {"left": 3 * N, "right": N}
    assert json.loads(attrs(idata)["renamed_sites"]) == {"x.inner": "x/inner"}
    # one number per row of a data plate: kinds are summed, events belong to their row
    assert dims(idata, "log_likelihood") == {
        "x.inner": ("chain", "draw", "left"),
        "z": ("chain", "draw", "right"),
    }
    mu, shift = (values(idata, "posterior", name)[0] for name in ("mu", "shift"))
    mean = (mu[:, 0, None] + shift[..., 0])[..., None]
    np.testing.assert_allclose(
        values(idata, "log_likelihood", "x.inner")[0],
        norm.logpdf(first, mean).sum(1),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        values(idata, "log_likelihood", "z")[0],
        norm.logpdf(second, mu[:, None]).sum(-1),
        rtol=1e-5,
    )


def test_names_of_networks(tmp_path: Path) -> None:
    nn = pytest.importorskip("flax.linen")

    def network(X: Any, y: Any) -> None:
        net = random_flax_module(
            "net", nn.Dense(1), prior=dist.Normal(0, 1), input_shape=(1, 3)
        )
        with numpyro.plate("data", N, subsample_size=7) as idx:
            numpyro.sample("obs", dist.Normal(net(X[idx])[:, 0], 1), obs=y[idx])

    idata = to_inference_data(run(MINT(network, temperature=5.0), X, y))
    renamed = json.loads(attrs(idata)["renamed_sites"])
    assert renamed == {"net.bias": "net/bias", "net.kernel": "net/kernel"}
    assert sorted(dims(idata, "posterior")) == sorted(renamed)
    path = str(tmp_path / "network.nc")
    idata.to_netcdf(path)
    back = az.from_netcdf(path)
    assert values(back, "posterior", "net.kernel").shape == (1, 5, 3, 1)


def test_names_that_collide() -> None:
    def model(y: Any) -> None:
        one = numpyro.sample("a/b", dist.Normal(0, 1))
        two = numpyro.sample("a.b", dist.Normal(0, 1))
        with numpyro.plate("draw", 2):
            numpyro.sample("c", dist.Normal(0, 1))
        with numpyro.plate("obs", N, subsample_size=7) as idx:
            numpyro.sample("y", dist.Normal(one + two, 1), obs=y[idx])
        with numpyro.plate("c_dim_0", N, subsample_size=7) as idx:
            numpyro.sample("z", dist.Normal(one, 1), obs=-y[idx])

    idata = to_inference_data(run(MINT(model, temperature=5.0), y))
    assert dims(idata, "posterior") == {
        "a.b": ("chain", "draw"),
        "a.b_": ("chain", "draw"),
        "c": ("chain", "draw", "draw_dim"),
    }
    # a plate cannot have the name of a site, but it can have that of an argument
    assert dims(idata, "observed_data") == {"y": ("obs",), "z": ("c_dim_0",)}


def test_dims_and_coords_of_the_user(case: Case) -> None:
    idata = to_inference_data(
        case.mcmc,
        dims={"W": ["feature", None], "X": [None, "feature"], "a": ["school"]},
        coords={"feature": ["x", "y", "z"], "school": [10, 20, 30, 40], "other": [1]},
    )
    found = dims(idata, "posterior")
    assert found["W"] == ("chain", "draw", "feature", "W_dim_0")
    assert found["a"] == ("chain", "draw", "school")
    assert found["twice"] == ("chain", "draw", "group_dim")
    assert dims(idata, "constant_data")["X"] == ("data", "feature")
    posterior = get_group(idata, "posterior")
    assert posterior is not None
    assert posterior["feature"].values.tolist() == ["x", "y", "z"]
    assert posterior["school"].values.tolist() == [10, 20, 30, 40]
    assert get_group(idata, "log_likelihood") is None


def test_event_dims_of_the_model_and_arguments_of_all_kinds() -> None:
    def model(weights: Any, *more: Any, options: Any = None, **rest: Any) -> None:
        infer = {"event_dims": ["feature"]}
        mu = numpyro.sample(
            "mu", dist.Normal(0, 1).expand([3]).to_event(1), infer=infer
        )
        with numpyro.plate("data", N, subsample_size=7) as idx:
            mean = options["X"][idx] @ mu
            numpyro.sample("obs", dist.Normal(mean, 1), obs=rest["y"][idx])

    mcmc = run(
        MINT(model, temperature=5.0),
        np.ones(N),
        np.ones(2),
        2.0,
        options={"X": X, "flag": True},
        y=y.astype(float),  # as float32 it equals the observed value
    )
    idata = to_inference_data(mcmc)
    assert dims(idata, "posterior") == {"mu": ("chain", "draw", "feature")}
    assert dims(idata, "constant_data") == {
        "more.0": ("more.0_dim_0",),
        "options.X": ("data", "options.X_dim_0"),
        "weights": ("data",),
    }
    without = to_inference_data(mcmc, constant_data=False)
    assert get_group(without, "constant_data") is None


# log likelihood ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected_rows(case: Case) -> np.ndarray:
    samples = case.mcmc.get_samples(group_by_chain=True)
    latent = {name: samples[name] for name in ("a", "W")}
    return numpyro_log_likelihood(
        hierarchy_at_full_size, latent, X, group, y=y, batch_ndims=2
    )["obs"]


@pytest.mark.parametrize(
    ("chunk_size", "thin"),
    [(262_144, 1), (7, 1), (300, 4), (N, 1), (N * 15 - 1, 2)],
)
def test_log_likelihood_is_that_of_the_full_model(
    case: Case, expected_rows: np.ndarray, chunk_size: int, thin: int
) -> None:
    idata = to_inference_data(
        case.mcmc,
        log_likelihood=True,
        log_likelihood_thin=thin,
        chunk_size=chunk_size,
    )
    found = get_group(idata, "log_likelihood")
    assert found is not None
    assert found["obs"].dims == ("chain", "draw", "data")
    assert found["draw"].values.tolist() == list(range(0, 15, thin))
    np.testing.assert_allclose(
        found["obs"].values, expected_rows[:, ::thin], rtol=1e-5, atol=1e-5
    )
    assert "at temperature 1" in found.attrs["description"]


def test_log_likelihood_that_is_too_large(case: Case) -> None:
    itemsize = jnp.result_type(float).itemsize
    cost = 2 * 15 * N * itemsize
    with pytest.raises(ValueError, match=f"pass max_bytes={cost}") as error:
        to_inference_data(case.mcmc, log_likelihood=True, max_bytes=cost / 3)
    assert "log_likelihood_thin=3" in str(error.value)
    for fitting in ({"log_likelihood_thin": 3, "max_bytes": cost / 3}, {}):
        limits = fitting or {"max_bytes": cost}
        idata = to_inference_data(case.mcmc, log_likelihood=True, **limits)
        assert values(idata, "log_likelihood", "obs").nbytes <= limits["max_bytes"]
    with pytest.raises(ValueError, match="To compute it, pass max_bytes"):
        to_inference_data(case.mcmc, log_likelihood=True, max_bytes=10)


# warmup -----------------------------------------------------------------------------


def test_warmup_becomes_groups(case: Case) -> None:
    for name in ("posterior", "sample_stats"):
        warm = get_group(case.warm, name)
        kept = get_group(case.idata, f"warmup_{name}")
        assert warm is not None and kept is not None
        xr.testing.assert_identical(warm, kept)
    assert values(case.idata, "warmup_posterior", "a").shape == (2, 10, GROUPS)
    # the run continues at the end of the warmup
    first = values(case.idata, "posterior", "a")[:, 0]
    assert not np.array_equal(values(case.idata, "warmup_posterior", "a")[:, 0], first)
    steps = values(case.idata, "warmup_sample_stats", "step_size")
    assert len(np.unique(steps[0])) > 2  # it adapted
    assert len(np.unique(values(case.idata, "sample_stats", "step_size")[0])) == 1


# other kernels and targets ----------------------------------------------------------


def test_a_target_written_by_hand() -> None:
    data = jnp.asarray(y)
    target = Target(
        log_prior=lambda z: -0.5 * jnp.square(z).sum(),
        log_likelihood=lambda z, i: -0.5 * jnp.square(data[i] - z[0]),
        sizes=N,
    )
    kernel = MHMinibatch(target=target, batch_size=7, temperature=5.0)
    mcmc = run(kernel, init_params=jnp.zeros(2))
    idata = to_inference_data(mcmc)
    assert dims(idata, "posterior") == {"z": ("chain", "draw", "z_dim_0")}
    assert json.loads(attrs(idata)["plates"]) == {"data": N}
    assert get_group(idata, "observed_data") is None
    with pytest.raises(ValueError, match="MHMinibatch without a model"):
        to_inference_data(mcmc, log_likelihood=True)


def test_a_target_of_a_tree() -> None:
    target = Target(
        log_prior=lambda z: -0.5 * (z["a"] ** 2 + z["b"][0] ** 2 + z["b"][1] ** 2),
        log_likelihood=lambda z, i: 0.0 * i * z["a"],
        sizes=N,
    )
    start = {"a": jnp.zeros(2), "b": (jnp.zeros(2), jnp.zeros(2))}
    mcmc = run(
        MINT(target=target, batch_size=7, temperature=5.0),
        init_params=start,
        num_chains=2,
        chain_method="vectorized",
    )
    assert sorted(dims(to_inference_data(mcmc), "posterior")) == ["a", "b.0", "b.1"]


def test_chains_drawn_one_after_the_other_and_pickled() -> None:
    mcmc = run(
        MINT(by_index, temperature=5.0),
        jnp.asarray(y),
        num_chains=2,
        chain_method="sequential",
        extra_fields=("adapt_state.step_size", "rng_key", "i", "adapt_state"),
    )
    idata = to_inference_data(pickle.loads(pickle.dumps(mcmc)))
    assert values(idata, "posterior", "mu").shape == (2, 5)
    np.testing.assert_array_equal(values(idata, "observed_data", "obs"), y)
    stats = dims(idata, "sample_stats")
    # two fields would be called step_size, so each keeps its full name
    assert {"step_size", "adapt_state.step_size", "rng_key", "i"} <= set(stats)
    assert "adapt_state" not in stats
    assert stats["rng_key"] == ("chain", "draw", "rng_key_dim_0")


def test_kernels_of_numpyro() -> None:
    def model(group: Any, y: Any) -> None:
        with numpyro.plate("group", len(np.unique(group))):  # a shape from the data
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("obs", dist.Normal(a[group], 1), obs=y)

    fields = ("potential_energy", "num_steps", "adapt_state.step_size")
    mcmc = run(NUTS(model), group, y, extra_fields=fields)
    idata = to_inference_data(mcmc)
    assert dims(idata, "posterior") == {"a": ("chain", "draw", "group_dim")}
    assert sorted(dims(idata, "sample_stats")) == [
        "diverging",
        "lp",
        "n_steps",
        "step_size",
    ]
    energy = mcmc.get_extra_fields(group_by_chain=True)["potential_energy"]
    np.testing.assert_array_equal(values(idata, "sample_stats", "lp"), -energy)
    np.testing.assert_array_equal(values(idata, "observed_data", "obs"), y)
    assert attrs(idata)["inference_library"] == "numpyro"
    assert attrs(idata)["kernel"] == "NUTS"
    assert "target" not in attrs(idata)
    idata = to_inference_data(mcmc, log_likelihood=True, log_likelihood_thin=2)
    found = get_group(idata, "log_likelihood")
    assert found is not None and found["obs"].dims == ("chain", "draw", "data")
    assert found["draw"].values.tolist() == list(range(0, found.sizes["draw"] * 2, 2))
    draws = {"a": mcmc.get_samples(group_by_chain=True)["a"][:, ::2]}
    expected = numpyro_log_likelihood(model, draws, group, y, batch_ndims=2)["obs"]
    np.testing.assert_allclose(found["obs"].values, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="log_likelihood_thin="):
        to_inference_data(mcmc, log_likelihood=True, max_bytes=8 * N)


def test_runs_of_two_packages_are_compared() -> None:
    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(y)):
            numpyro.sample("obs", dist.Normal(X @ b, 1), obs=y)

    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 2))
    y = X @ [1.0, -1.0] + rng.normal(size=50)
    idatas = {}
    for kernel in (AMAGOLD(model, batch_size=50), NUTS(model)):
        mcmc = MCMC(kernel, num_warmup=200, num_samples=200, progress_bar=False)
        mcmc.run(jax.random.key(0), X, y)
        name = type(kernel).__name__
        idatas[name] = to_inference_data(mcmc, log_likelihood=True)
    table = az.compare(idatas)
    assert set(table.index) == {"AMAGOLD", "NUTS"}
    elpd = table.filter(like="elpd").iloc[:, 0]
    assert abs(np.ptp(elpd)) < 1.0


def test_sites_that_numpyro_enumerates_have_no_draws() -> None:
    def model(y: Any) -> None:
        k = numpyro.sample("k", dist.Normal(0, 1))
        numpyro.sample("obs", dist.Normal(k, 1), obs=y)

    mcmc = run(NUTS(model), y)
    states = mcmc._states
    states["z"] = {"other": states["z"].pop("k")}
    with pytest.raises(ValueError, match=r"\['k'\] were not collected.*marginalize"):
        to_inference_data(mcmc, log_likelihood=True)


def test_convergence_is_that_of_the_parameters_and_not_of_values_of_rows() -> None:
    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", len(y), subsample_size=10) as i:
            numpyro.deterministic("left", y[i] - mu)
            numpyro.sample("obs", dist.Normal(mu, 1), obs=y[i])

    idata = to_inference_data(run(MINT(model, temperature=5.0), jnp.asarray(y)))
    assert "left" in dims(idata, "posterior")
    assert diagnose(idata).precision["parameter"].values.tolist() == ["mu"]
    asked = diagnose(idata, var_names=["left"]).precision
    assert asked.sizes["parameter"] == len(y)


def test_a_subsampling_kernel_of_numpyro() -> None:
    mcmc = run(
        HMCECS(HMC(by_index, trajectory_length=1.0), num_blocks=2), jnp.asarray(y)
    )
    np.testing.assert_array_equal(
        values(to_inference_data(mcmc), "observed_data", "obs"), y
    )


def test_a_potential_of_numpyro() -> None:
    kernel = BarkerMH(potential_fn=lambda z: jnp.square(z["q"]).sum())
    idata = to_inference_data(run(kernel, init_params={"q": jnp.zeros(3)}))
    assert dims(idata, "posterior") == {"q": ("chain", "draw", "q_dim_0")}


def test_a_model_that_cannot_be_replayed() -> None:
    replays = False

    def model() -> None:
        if replays:
            raise RuntimeError("not again")
        numpyro.sample("mu", dist.Normal(0, 1))

    mcmc = run(BarkerMH(model))
    replays = True
    with pytest.warns(UserWarning, match="model of BarkerMH .RuntimeError: not again"):
        idata = to_inference_data(mcmc)
    assert dims(idata, "posterior") == {"mu": ("chain", "draw")}


# mistakes ---------------------------------------------------------------------------


def test_a_run_without_draws(case: Case) -> None:
    mcmc = MCMC(
        MINT(by_index, temperature=5.0),
        num_warmup=3,
        num_samples=4,
        progress_bar=False,
    )
    with pytest.raises(ValueError, match=r"Call mcmc\.run"):
        to_inference_data(mcmc)
    with pytest.raises(ValueError, match="dict without draws"):
        to_inference_data({})
    mcmc.warmup(jax.random.key(0), y)
    with pytest.raises(ValueError, match="collect_warmup=True"):
        to_inference_data(mcmc)
    mcmc.run(jax.random.key(1), y)
    idata = to_inference_data(mcmc)
    assert values(idata, "posterior", "mu").shape == (1, 4)
    with pytest.raises(ValueError, match="of the same run"):
        to_inference_data(mcmc, warmup=case.warm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": {"w": ["k"]}}, "names 'w', which is neither a site"),
        ({"dims": {"W": ["k", "l", "m"]}}, "which?.*2 besides chain and draw|it has 2"),
        ({"dims": {"W": ["k", "k"]}}, "can occur only once"),
        ({"dims": {"W": ["k"], "a": ["k"]}}, "give them different names"),
        ({"coords": {"group_dim": [1, 2]}}, "which has 4 entries"),
        ({"warmup": 3}, "got int"),
        ({"warmup": {}}, "got dict"),
        ({"log_likelihood": True, "log_likelihood_thin": 0}, "positive integer"),
        ({"log_likelihood": True, "chunk_size": 2.5}, "positive integer"),
    ],
)
def test_mistakes(case: Case, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_inference_data(case.mcmc, **options)


def test_sites_that_were_not_collected() -> None:
    mcmc = run(MINT(hierarchy, temperature=5.0), X, group, y=y, extra_fields=("~z.W",))
    idata = to_inference_data(mcmc)
    assert "W" not in dims(idata, "posterior")
    with pytest.raises(ValueError, match="without the extra field '~z.W'"):
        to_inference_data(mcmc, log_likelihood=True)


def _effects(x: Any, y: Any, inside: bool) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        p = jax.nn.sigmoid(a + x)
        raised = jax.nn.sigmoid(a + b + x)
        numpyro.sample("obs", dist.Bernoulli(logits=a + b * x), obs=y)
        if inside:
            numpyro.deterministic("of_row", p)
    numpyro.deterministic("effect", (raised - p).mean())
    numpyro.deterministic("number", jnp.asarray(len(x)))
    numpyro.deterministic("sum", a + b)


@pytest.mark.parametrize("inside", [False, True])
def test_summaries_of_the_rows_are_those_of_all_rows(inside: bool) -> None:
    """A kernel evaluates deterministic sites on one row, whose mean is no average."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=40))
    y = jnp.asarray(rng.integers(0, 2, 40))
    mcmc = MCMC(
        MINT(
            partial(_effects, inside=inside),
            step_size=0.1,
            batch_size=8,
            temperature=1.0,
        ),
        num_warmup=2,
        num_samples=3,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), x, y)
    assert set(mcmc.get_samples()) == {"a", "b", "sum"}
    posterior = to_inference_data(mcmc)["posterior"]
    a, b = (posterior[name].to_numpy()[..., None] for name in ("a", "b"))
    effect = jax.nn.sigmoid(a + b + x) - jax.nn.sigmoid(a + x)
    np.testing.assert_allclose(posterior["effect"], effect.mean(-1), rtol=1e-4)
    assert (posterior["number"] == 40).all()
    assert ("of_row" in posterior) == inside
