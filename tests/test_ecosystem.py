"""What NumPyro and ArviZ do with a finished run works for subsampled models, too."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, Predictive, log_likelihood

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    MINTEE,
    SGHMC,
    Cyclical,
    MHMinibatch,
    MinibatchMH,
    ReplicaExchange,
    to_inference_data,
)
from numpyro_minibatch._model.preflight import inspect_model

N, DRAWS = 300, 20
RNG = np.random.default_rng(0)
X = RNG.normal(size=N).astype(np.float32)
Y = (1.0 + X + RNG.normal(size=N)).astype(np.float32)


def line(x: Any, y: Any = None) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=50) as idx:
        mean = numpyro.deterministic("mean", a + b * x[idx])
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=None if y is None else y[idx])


@pytest.fixture(scope="module")
def run() -> MCMC:
    kernel = MINT(line, temperature=20.0)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=DRAWS,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, y=Y)
    return mcmc


def densities(run: MCMC) -> np.ndarray:
    draws = {k: np.asarray(v) for k, v in run.get_samples().items()}
    means = draws["a"][:, None] + draws["b"][:, None] * X
    return -0.5 * (Y - means) ** 2 - 0.5 * np.log(2 * np.pi)


def test_the_model_of_a_kernel_reads_all_rows(run: MCMC) -> None:
    model = run.sampler.model
    found = log_likelihood(model, run.get_samples(), X, y=Y)["y"]
    np.testing.assert_allclose(found, densities(run), rtol=1e-4, atol=1e-5)
    predicted = Predictive(model, run.get_samples())(jax.random.key(1), X)
    assert predicted["y"].shape == predicted["mean"].shape == (2 * DRAWS, N)


def test_before_a_run_the_model_is_the_one_that_was_given() -> None:
    assert MINT(line, temperature=20.0).model is line


def test_arviz_converts_a_run_and_its_results_agree_with_ours(run: MCMC) -> None:
    az = pytest.importorskip("arviz", minversion="0.20")
    if not hasattr(az, "from_numpyro"):
        pytest.skip("ArviZ without a converter")
    theirs = az.from_numpyro(run, log_likelihood=True)
    assert theirs.observed_data["y"].shape == (N,)
    np.testing.assert_array_equal(theirs.observed_data["y"], Y)
    flat = theirs.log_likelihood["y"].values.reshape(2 * DRAWS, N)
    np.testing.assert_allclose(flat, densities(run), rtol=1e-4, atol=1e-5)
    ours = to_inference_data(run, log_likelihood=True)
    if int(az.__version__.split(".")[0]) > 0:
        return  # ArviZ 1 fits no tail to so few draws with repetitions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so few draws
        both = [az.loo(idata).elpd_loo for idata in (theirs, ours)]
        compared = az.compare({"one": theirs, "two": ours})
    assert both[0] == pytest.approx(both[1], rel=1e-4)
    assert set(compared.index) == {"one", "two"}


def test_deterministic_sites_of_rows_are_kept_if_their_size_allows(run: MCMC) -> None:
    draws = run.get_samples(group_by_chain=True)
    found = to_inference_data(run)["posterior"]["mean"]
    assert found.dims == ("chain", "draw", "data")
    a, b = (np.asarray(draws[name])[..., None] for name in "ab")
    np.testing.assert_allclose(found, a + b * X, rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match="left out 'mean'.*300 rows.*max_bytes="):
        small = to_inference_data(run, max_bytes=1e3)
    assert "mean" not in small["posterior"]


def test_predictions_become_groups_that_arviz_plots(run: MCMC) -> None:
    az = pytest.importorskip("arviz")
    model = run.sampler.model
    predicted = Predictive(model, run.get_samples())(jax.random.key(1), X)
    before = Predictive(model, num_samples=7)(jax.random.key(2), X)
    idata = to_inference_data(run, posterior_predictive=predicted, prior=before)
    group = idata["posterior_predictive"]
    assert group["y"].dims == ("chain", "draw", "data")
    np.testing.assert_array_equal(
        group["y"].values.reshape(2 * DRAWS, N), predicted["y"]
    )
    assert idata["prior"]["a"].sizes == {"chain": 1, "draw": 7}
    assert idata["prior_predictive"]["y"].sizes["data"] == N
    assert "a" not in idata["prior_predictive"]
    if hasattr(az, "plot_ppc"):
        import matplotlib

        matplotlib.use("Agg")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ArviZ's own use of Matplotlib
            az.plot_ppc(idata, num_pp_samples=5)
        matplotlib.pyplot.close("all")


def test_predictions_of_other_draws_are_refused(run: MCMC) -> None:
    with pytest.raises(ValueError, match="first axis must have 40 entries"):
        to_inference_data(run, posterior_predictive={"y": np.zeros((7, N))})
    with pytest.raises(ValueError, match="of one length"):
        to_inference_data(run, prior={"a": np.zeros(7), "b": np.zeros(6)})


def test_a_field_that_there_is_not_is_named() -> None:
    mcmc = MCMC(
        MINT(line, temperature=20.0), num_warmup=0, num_samples=1, progress_bar=False
    )
    with pytest.raises(ValueError, match="'potential_energy'.*Use 'lp_estimate'"):
        mcmc.run(jax.random.key(0), X, y=Y, extra_fields=("potential_energy",))


def test_params_are_said_to_be_frozen() -> None:
    def model(y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        scale = numpyro.param("scale", 1.0)
        numpyro.sample("y", dist.Normal(a, scale), obs=y)

    with pytest.warns(UserWarning, match="numpyro.param sites are not sampled.*'scal"):
        inspect_model("MINT", model, (Y,), {}, 10)


class Lenient(dist.BernoulliLogits):
    """Its log probability at a NaN logit is 0, as it was in some versions."""

    def log_prob(self, value: Any) -> Any:
        return jnp.nan_to_num(super().log_prob(value))


@pytest.mark.parametrize("model_does", ["nothing", "mask", "replace"])
def test_nan_in_finite_rows_gives_a_warning_unless_treated(model_does: str) -> None:
    x = X.copy()
    x[3] = np.nan

    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N, subsample_size=50) as idx:
            known = ~jnp.isnan(x[idx]) if model_does == "mask" else True
            rows = jnp.nan_to_num(x[idx]) if model_does == "replace" else x[idx]
            with handlers.mask(mask=known):
                numpyro.sample("y", Lenient(b * rows), obs=y[idx])

    kernel = MINT(model, temperature=20.0)
    arguments = {"model_args": (jnp.asarray(x), np.zeros(N))}
    if model_does != "nothing":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel.init(jax.random.key(0), 1, **arguments)
    else:
        with pytest.warns(UserWarning, match="contain NaN.*1 of 300.*handlers.mask"):
            kernel.init(jax.random.key(0), 1, **arguments)


def without_a_plate(x: Any, y: Any = None) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    mean = numpyro.deterministic("mean", a + b * x)
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def with_kernel(name: str) -> Any:
    """A kernel with settings that compile fast; other tests check how well it samples.

    Half of the models take rows by indices, the others take rows of their arguments.
    """
    if name == "AMAGOLD":
        return AMAGOLD(line, step_size=0.01, num_steps=2)
    if name == "SGHMC":
        return SGHMC(without_a_plate, batch_size=50, step_size=1e-3, num_steps=2)
    if name == "MHMinibatch":
        return MHMinibatch(line, temperature=20.0)
    if name == "MINTEE":
        return MINTEE(without_a_plate, batch_size=50, num_replicas=2)
    if name == "ReplicaExchange":
        inner = MinibatchMH(without_a_plate, batch_size=50)
        return ReplicaExchange(inner, temperatures=[1.0, 4.0])
    assert name == "Cyclical"
    return Cyclical(SGHMC(line, step_size=1e-3, num_steps=2), cycle_length=40)


@pytest.mark.parametrize(
    "name",
    [
        "SGHMC",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "AMAGOLD",
                "MHMinibatch",
                "MINTEE",
                "ReplicaExchange",
                "Cyclical",
            )
        ),
    ],
)
def test_a_run_of_every_kernel_is_what_others_expect(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    mcmc = MCMC(
        with_kernel(name),
        num_warmup=0,
        num_samples=DRAWS,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, y=Y)
    model, draws = mcmc.sampler.model, mcmc.get_samples()
    expected = densities(mcmc)
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
    found = log_likelihood(model, draws, X, y=Y)["y"]
    np.testing.assert_allclose(found, expected, **close)
    predicted = Predictive(model, draws)(jax.random.key(1), X)
    assert predicted["y"].shape == predicted["mean"].shape == (2 * DRAWS, N)
    before = Predictive(model, num_samples=7)(jax.random.key(2), X)
    mcmc.print_summary()
    assert "r_hat" in capsys.readouterr().out
    ours = to_inference_data(
        mcmc, log_likelihood=True, posterior_predictive=predicted, prior=before
    )
    (rows,) = set(ours["observed_data"]["y"].dims)
    assert rows == ("data" if "data" in mcmc.sampler.plates else "rows")
    assert ours["posterior"]["mean"].dims == ("chain", "draw", rows)
    assert ours["posterior_predictive"]["y"].dims == ("chain", "draw", rows)
    assert ours["prior_predictive"]["y"].sizes[rows] == N
    flat = ours["log_likelihood"]["y"].to_numpy().reshape(2 * DRAWS, N)
    np.testing.assert_allclose(flat, expected, **close)
    az = pytest.importorskip("arviz", minversion="0.20")
    if not hasattr(az, "from_numpyro"):
        return
    theirs = az.from_numpyro(mcmc, log_likelihood=True)
    np.testing.assert_array_equal(theirs.observed_data["y"], Y)
    flat = theirs.log_likelihood["y"].values.reshape(2 * DRAWS, N)
    np.testing.assert_allclose(flat, expected, **close)
    for site in ("a", "b"):
        np.testing.assert_array_equal(theirs.posterior[site], ours["posterior"][site])
