"""Weights of cycles against closed forms, and the reweighting of a run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.infer import MCMC, NUTS
from scipy import stats

from numpyro_minibatch import (
    CyclicalSGLD,
    Target,
    cycles,
    diagnose,
    sample,
    to_inference_data,
)


def a_run(draws: np.ndarray, numbers: Any, **attrs: Any) -> xr.DataTree:
    """An InferenceData of these draws, chains x draws x D, and their cycles."""
    posterior = xr.Dataset({"z": (("chain", "draw", "d"), draws)}, attrs=attrs)
    stats_ = xr.Dataset({"cycle": (("chain", "draw"), np.asarray(numbers))})
    for group in (posterior, stats_):
        group.coords["chain"] = np.arange(draws.shape[0])
        group.coords["draw"] = np.arange(draws.shape[1])
    return xr.DataTree.from_dict({"posterior": posterior, "sample_stats": stats_})


def of_densities(log_likelihood: Any, log_prior: Any = None) -> xr.Dataset:
    log_likelihood = np.asarray(log_likelihood, float)
    prior = np.zeros_like(log_likelihood) if log_prior is None else log_prior
    dims = ("chain", "draw")
    values = {"log_prior": (dims, prior), "log_likelihood": (dims, log_likelihood)}
    return xr.Dataset(values, attrs={"sites": '["z"]'})


MASSES, VARIANCES, PLACES, K = (0.3, 0.7), (0.03, 0.12), (-3.0, 3.0), 4000


@pytest.fixture(scope="module")
def modes() -> tuple[xr.DataTree, xr.Dataset]:
    """Two modes of known mass in two dimensions, a cycle in each; the prior is flat."""
    rng = np.random.default_rng(0)
    draws = np.concatenate(
        [
            place + variance**0.5 * rng.normal(size=(K, 2))
            for place, variance in zip(PLACES, VARIANCES, strict=True)
        ]
    )
    density = sum(
        mass * stats.multivariate_normal([place] * 2, variance).pdf(draws)
        for mass, place, variance in zip(MASSES, PLACES, VARIANCES, strict=True)
    )
    run = a_run(draws[None], [[4] * K + [5] * K])
    return run, of_densities(np.log(density)[None] - 1e5)


def test_equal_weights(modes: Any) -> None:
    w = cycles.weights(modes[0])
    np.testing.assert_array_equal(w["cycle"], [4, 5])
    np.testing.assert_allclose(w, [[0.5, 0.5]])


def test_volumes_find_the_masses_of_modes(modes: Any) -> None:
    """The log weight of a normal mode has an error of about ``sqrt(d / (2 K))``."""
    w = cycles.weights(*_args(modes, "laplace")).values[0]
    error = (2 * 2 / K) ** 0.5
    assert abs(np.log(w[1] / w[0]) - np.log(MASSES[1] / MASSES[0])) < 4.5 * error


def test_harmonic_means_do_not(modes: Any) -> None:
    """They leave out the prior mass of the regions, which here differs by a factor of
    four."""
    with pytest.warns(UserWarning, match="ignores the prior mass"):
        w = cycles.weights(*_args(modes, "harmonic")).values[0]
    assert np.log(w[1] / w[0]) < np.log(MASSES[1] / MASSES[0]) - 0.7


def test_harmonic_mean_in_logarithms() -> None:
    """Compared with the paper's formula, and finite where the formula underflows."""
    rng = np.random.default_rng(1)
    likelihood = rng.normal(size=(2, 6))
    numbers = [[0, 0, 0, 1, 1, 1]] * 2
    run = a_run(np.zeros((2, 6, 1)), numbers)
    inverse = (1 / np.exp(likelihood)).reshape(2, 2, 3).mean(-1)
    expected = (1 / inverse) / (1 / inverse).sum()
    for shift in (0.0, -1e6):
        found = of_densities(likelihood + shift)
        with pytest.warns(UserWarning, match="harmonic"):
            w = cycles.weights(run, "harmonic", found)
        np.testing.assert_allclose(w, expected, rtol=1e-6)


def _args(modes: Any, method: str) -> tuple[Any, ...]:
    return modes[0], method, modes[1]


def test_weights_are_of_the_tempered_target() -> None:
    rng = np.random.default_rng(2)
    draws = rng.normal(size=(1, 40, 1))
    likelihood, prior = rng.normal(size=(2, 1, 40))
    numbers = [[0] * 20 + [1] * 20]
    log_sd = np.log(draws.reshape(2, 20).std(1, ddof=1))
    for target, prior_heat in (
        ("prior * likelihood ** (1 / 4)", 1.0),
        ("(prior * likelihood) ** (1 / 4)", 4.0),
    ):
        run = a_run(draws, numbers, temperature=4.0, target=target)
        w = cycles.weights(run, "laplace", of_densities(likelihood, prior)).values[0]
        density = (likelihood / 4.0 + prior / prior_heat).reshape(2, 20).mean(1)
        expected = np.diff(density + log_sd)[0]
        assert np.log(w[1] / w[0]) == pytest.approx(expected)


# draws -------------------------------------------------------------------------------


def test_draws_share_the_weight_of_their_cycle() -> None:
    run = a_run(np.arange(10.0).reshape(2, 5, 1), [[0, 0, 0, 1, 1]] * 2)
    w = xr.DataArray([[0.1, 0.2], [0.3, 0.4]], dims=("chain", "cycle"))
    w = w.assign_coords(cycle=[0, 1])
    found = cycles.draw_weights(run, w).values
    np.testing.assert_allclose(found[0], [0.1 / 3] * 3 + [0.1] * 2)
    np.testing.assert_allclose(found[1], [0.1] * 3 + [0.2] * 2)
    new = cycles.reweight(run, w, num_draws=1000)
    values = new["posterior"]["z"].values.ravel()
    assert new["posterior"].sizes["chain"] == 1 and len(values) == 1000
    counts = np.bincount(values.astype(int), minlength=10)
    # of systematic resampling: up to one
    assert np.abs(counts - 1000 * found.ravel()).max() <= 1
    numbers = new["sample_stats"]["cycle"].values[0]
    np.testing.assert_array_equal(numbers, (values % 5 >= 3).astype(int))
    assert new["posterior"].attrs["reweighted"] == "given"


def test_effective_cycles() -> None:
    assert cycles.effective_cycles(xr.DataArray(np.ones(7))) == pytest.approx(7)
    assert cycles.effective_cycles(xr.DataArray([3.0, 1.0])) == pytest.approx(1.6)


# of a run ----------------------------------------------------------------------------

N = 203
Y = (1.5 + np.random.default_rng(3).normal(size=N)).astype(np.float32)


def model(y: Any) -> None:
    """A scale with a map, a site outside of the plate, a factor, two modes."""
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    numpyro.deterministic("square", mu**2)
    numpyro.sample("whole", dist.Normal(mu**2, 1.0), obs=2.0)
    numpyro.factor("bonus", -0.1 * scale)
    with numpyro.plate("data", N, subsample_size=50) as idx:
        numpyro.sample("obs", dist.Normal(jnp.abs(mu), scale), obs=y[idx])


@pytest.fixture(scope="module")
def run() -> MCMC:
    kernel = CyclicalSGLD(
        model, step_size=0.0005, cycle_length=100, samples_per_cycle=10, num_steps=2
    )
    mcmc = MCMC(
        kernel,
        num_warmup=10,
        num_samples=25,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), Y)
    return mcmc


def test_densities_of_a_model(run: MCMC) -> None:
    samples = run.get_samples(group_by_chain=True)
    mu, scale = (np.asarray(samples[n], float) for n in ("mu", "scale"))
    prior = stats.norm(0, 3).logpdf(mu) + stats.halfnorm(0, 2).logpdf(scale)
    rows = stats.norm(np.abs(mu)[..., None], scale[..., None]).logpdf(Y).sum(-1)
    expected = rows + stats.norm(mu**2, 1).logpdf(2.0)
    for chunk in (None, 500):  # ten rows at a time
        found = cycles.densities(
            run, **({} if chunk is None else {"chunk_size": chunk})
        )
        np.testing.assert_allclose(found["log_prior"], prior - 0.1 * scale, rtol=1e-4)
        np.testing.assert_allclose(found["log_likelihood"], expected, rtol=1e-4)


def test_densities_of_results(run: MCMC) -> None:
    """Of what ``sample`` returns, which holds neither the model nor its data."""
    idata = to_inference_data(run)
    expected = cycles.densities(run)
    found = cycles.densities(idata, run.sampler, Y)
    np.testing.assert_allclose(found["log_likelihood"], expected["log_likelihood"])
    assert found.attrs == expected.attrs
    w = cycles.weights(idata, "laplace", found)
    assert w.equals(cycles.weights(idata, "laplace", expected))
    by_name = cycles.densities(idata, run.sampler, model_kwargs={"y": Y})
    np.testing.assert_allclose(by_name["log_prior"], expected["log_prior"])
    # the data count, and not those of the run
    other = cycles.densities(idata, run.sampler, Y + 1)
    assert not np.allclose(other["log_likelihood"], expected["log_likelihood"])


def test_densities_of_a_network_that_sample_ran() -> None:
    """Sites whose names a result cannot have, and a target of several arrays."""

    def model(y: Any) -> None:
        mu = numpyro.sample("net/mu", dist.Normal(0, 3))
        with numpyro.plate("data", N, subsample_size=50) as idx:
            numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

    def rows(z: Any, i: Any) -> Any:
        return -0.5 * (jnp.asarray(Y)[i] - z["a"] - z["b"][0]) ** 2

    target = Target(lambda z: -0.5 * z["a"] ** 2, rows, N)
    settings = {"step_size": 0.001, "cycle_length": 10, "batch_size": 20}
    for kernel, args, start in (
        (CyclicalSGLD(model, **{**settings, "batch_size": None}), (Y,), None),
        (
            CyclicalSGLD(target=target, **settings),
            (),
            {"a": jnp.zeros(1), "b": jnp.zeros((1, 1))},
        ),
    ):
        idata = sample(
            kernel,
            *args,
            num_warmup=0,
            num_samples=4,
            init_params=start,
            progress=False,
        )
        found = cycles.densities(idata, kernel, *args)
        draws = idata["posterior"]
        if args:
            mean = draws["net.mu"].values
            log_prior = stats.norm(0, 3).logpdf(mean)
            constant = -0.5 * N * np.log(2 * np.pi)
        else:
            mean = draws["a"].values + draws["b"].values[..., 0]
            log_prior, constant = -0.5 * draws["a"].values ** 2, 0.0
        rows_at = -0.5 * np.square(Y - mean[..., None]).sum(-1) + constant
        np.testing.assert_allclose(found["log_likelihood"], rows_at, rtol=1e-4)
        np.testing.assert_allclose(found["log_prior"], log_prior, rtol=1e-4)
        assert found.attrs["sites"] == ('["net.mu"]' if args else '["a", "b"]')


def test_densities_that_cannot_be_found(run: MCMC) -> None:
    idata = to_inference_data(run)
    for arguments, error, says in (
        ((idata,), TypeError, "without a kernel"),
        ((run, run.sampler), TypeError, "leave the other arguments out"),
        (({"posterior": 1}, run.sampler), TypeError, "Got dict"),
        ((idata, NUTS(model), Y), ValueError, "got NUTS"),
        (
            (idata, CyclicalSGLD(model, step_size=0.1, cycle_length=100), Y),
            RuntimeError,
            "has not seen the model's data",
        ),
    ):
        with pytest.raises(error, match=says):
            cycles.densities(*arguments)


def test_a_run_from_end_to_end(run: MCMC) -> None:
    idata = to_inference_data(run)
    w = cycles.weights(idata, "laplace", cycles.densities(run))
    # the last cycle was cut short, after five of its draws
    assert w.shape == (2, 3) and float(w.sum()) == pytest.approx(1.0)
    assert 1 <= cycles.effective_cycles(w) <= 6
    new = cycles.reweight(idata, w)
    assert new["posterior"]["mu"].shape == (1, 50)
    # mu ** 2 is a function of mu and not an additional parameter
    np.testing.assert_allclose(
        new["posterior"]["square"], new["posterior"]["mu"] ** 2, rtol=1e-5
    )
    assert new["observed_data"]["obs"].shape == (N,)
    text = str(diagnose(idata))
    assert "cycles" in text and "num_samples=20" in text


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda run: cycles.weights(run, "bayes"), ValueError, "'laplace'"),
        (lambda run: cycles.weights(run, "laplace"), ValueError, "densities\\(mcmc\\)"),
        (lambda run: cycles.weights({}), TypeError, "got dict"),
        (
            lambda run: cycles.weights(run, "laplace", of_densities(np.zeros((1, 3)))),
            ValueError,
            "same run",
        ),
        (
            lambda run: cycles.weights(run, "laplace", of_densities(np.zeros((1, 4)))),
            ValueError,
            "has 2 draws",
        ),
        (
            lambda run: cycles.weights(
                xr.DataTree.from_dict({"posterior": run["posterior"].to_dataset()})
            ),
            ValueError,
            "needs the cycles of draws",
        ),
        (
            lambda run: cycles.draw_weights(run, cycles.weights(run)[:, :1]),
            ValueError,
            "same run",
        ),
    ],
)
def test_mistakes(make: Any, error: Any, says: str) -> None:
    run = a_run(np.zeros((1, 4, 1)), [[0, 0, 1, 1]])
    with pytest.raises(error, match=says):
        make(run)


def test_draws_without_volume() -> None:
    run = a_run(np.zeros((1, 8, 1)), [[0] * 4 + [1] * 4])
    with pytest.raises(ValueError, match="have no volume"):
        cycles.weights(run, "laplace", of_densities(np.zeros((1, 8))))


def test_volumes_of_few_draws_are_not_too_small() -> None:
    """Without its correction: two nats off, with seven draws of five parameters."""
    rng = np.random.default_rng(0)
    for count, d in ((7, 5), (30, 3)):
        found = [
            cycles._log_volume(rng.normal(size=(count, d)), 0) for _ in range(3000)
        ]
        expected = 0.5 * d * (np.log(2 * np.pi) + 1)
        error = np.std(found, ddof=1) / np.sqrt(len(found))
        assert abs(np.mean(found) - expected) < 5 * error
