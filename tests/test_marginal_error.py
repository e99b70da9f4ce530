"""The error of the quadrature of marginalized models, before and after a run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import xarray as xr
from marginal_runs import run_at, set_up_error
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.util import log_density

from numpyro_minibatch import (
    MinibatchMH,
    control_variate,
    diagnose,
    marginalize,
    sample,
)
from numpyro_minibatch._internal.passes import chunk_of
from numpyro_minibatch._internal.precision import double
from numpyro_minibatch._internal.static import Static
from numpyro_minibatch.control_variate import _setup
from numpyro_minibatch.control_variate._center import newton
from numpyro_minibatch.control_variate._row_sums import Some
from numpyro_minibatch.control_variate._setup import Prepared, _positions
from numpyro_minibatch.inference_data import (
    to_inference_data,
)
from numpyro_minibatch.kernels._shared import survey
from numpyro_minibatch.marginal import _error, _screen, _visit, quadrature_error
from numpyro_minibatch.marginal._quadrature import find_place, find_reach
from numpyro_minibatch.marginal._rules import Rule
from numpyro_minibatch.marginal._screen import Screen, chosen
from numpyro_minibatch.marginal._visit import RowsAt

rng = np.random.default_rng(5)


def test_the_error_of_few_nodes_is_measured() -> None:
    y = jnp.asarray(np.r_[np.zeros(5), 1.0, 40.0])

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[idx])

    found = quadrature_error(marginalize(model), run_at(2, s=3.0), y)
    # against a dense grid: log integral of exp(-a^2 / 18 - exp(a)), eleven nodes
    assert found.largest == pytest.approx(2.97e-3, rel=0.02)
    assert found.row < 5
    assert found.num_nodes == 21
    assert found.spread == 0.0  # all draws are the same
    assert "num_nodes=21" in str(found)


def overdispersed(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    s = numpyro.sample("s", dist.HalfNormal(2.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(mu, s))
        numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[idx])


def counts(size: int) -> np.ndarray:
    generator = np.random.default_rng(1)
    return generator.poisson(np.exp(-0.5 + 1.5 * generator.normal(size=size)))


def test_a_kink_at_the_maximum_is_told_from_a_density_without_one() -> None:
    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(jnp.maximum(a, 0.0), 0.3), obs=y)

    y = jnp.array([-0.2, 0.1, 1.5])
    found = quadrature_error(marginalize(model), run_at(2, mu=0.5), y)
    assert found.unconverged == found.kinks > 0 and "kink" in str(found)

    def rising(u: Any) -> Any:
        return u[..., 0]

    place = find_place(rising, jnp.zeros((2, 1)))
    assert not place.converged.any()
    assert not find_reach(rising, place).falls.any()


@pytest.mark.slow
def test_the_set_up_measures_the_quadrature_error_of_log_ratios() -> None:
    y = counts(2000)
    draws = {"mu": np.linspace(-0.7, -0.3, 8), "s": 1.5 + 0.1 * np.sin(np.arange(8.0))}
    # by a dense grid that does not depend on a row's mode
    grid = np.linspace(-15, 15, 6001)
    values = np.unique(y)
    exact_rows = []
    for mu, s in zip(draws["mu"], draws["s"], strict=True):
        rows = scipy.stats.poisson.pmf(values[:, None], np.exp(grid))
        rows = rows @ scipy.stats.norm.pdf(grid, mu, s) * (grid[1] - grid[0])
        exact_rows.append(np.log(rows)[np.searchsorted(values, y)])
    exact = np.sum(exact_rows, 1)

    def by_rows(nodes: int) -> np.ndarray:
        model = marginalize(overdispersed, num_nodes=nodes)
        with double():
            rows = jax.jit(jax.vmap(lambda values: log_rows_at(model, values, y)))
            return np.asarray(rows(draws))

    def by_quadrature(nodes: int) -> np.ndarray:
        return by_rows(nodes).sum(1)

    seven = marginalize(overdispersed, num_nodes=7)
    found = set_up_error(seven, draws, (jnp.asarray(y),))
    spread = np.std(by_quadrature(7) - exact)
    assert found["quadrature_sd"] == pytest.approx(spread, rel=1e-3)
    assert 0.1 < spread < 0.3
    # eleven nodes suffice for the sum of all rows, and fifteen for each of them
    largest = [np.abs(by_rows(n) - exact_rows).max() for n in (7, 11, 15)]
    assert found["quadrature_error"] == pytest.approx(largest[0], rel=1e-3)
    assert largest[1] > 1e-4 > largest[2]
    assert found["quadrature_better_nodes"] == 15
    rough = marginalize(overdispersed, num_nodes=7, accuracy=0.01)
    found = set_up_error(rough, draws, (jnp.asarray(y),))
    assert found["quadrature_better_nodes"] == 11
    # with five nodes it is more than half a posterior standard deviation
    assert np.std(by_quadrature(5) - exact) > 0.5
    with pytest.raises(ValueError, match=r"changes the log density by 0\.7.*nodes=15"):
        set_up_error(marginalize(overdispersed, num_nodes=5), draws, (jnp.asarray(y),))


def log_rows_at(model: Any, values: dict[str, Any], *args: Any) -> jax.Array:
    """The log likelihood of each row."""
    trace = numpyro.handlers.trace(numpyro.handlers.substitute(model, data=values))
    site = trace.get_trace(*args)["y"]
    return site["fn"].log_prob(site["value"])


@pytest.mark.slow
def test_a_run_reports_its_quadrature_error() -> None:
    """The set-up converges although values and gradients differ by the quadrature
    error."""
    y = jnp.asarray(counts(1500))
    kernel = MinibatchMH(marginalize(overdispersed), control_variate="taylor2")
    kernel.init(jax.random.key(0), 10, None, (y,), {})
    pilot = kernel.facts["pilot"]
    assert 0 < pilot["quadrature_sd"] < 0.05
    # eleven nodes are accurate for the sum, but not for each row
    assert 0 < pilot["quadrature_error"] < 1e-4 and pilot["quadrature_nodes"] == 15


@pytest.mark.slow
def test_a_coarse_quadrature_is_refined_unless_it_was_chosen() -> None:
    y = (jnp.asarray(counts(2000)),)
    draws = {"mu": np.linspace(-0.7, -0.3, 8), "s": 1.5 + 0.1 * np.sin(np.arange(8.0))}
    fine = marginalize(overdispersed, accuracy=0.01)
    report = set_up_error(fine, draws, y)
    assert report["quadrature_sd"] < 0.05 and fine.refined(report) is None
    # the accuracy of a row needs more
    exact = marginalize(overdispersed)
    assert report["quadrature_error"] > exact.accuracy == 1e-4
    assert exact.refined(set_up_error(exact, draws, y)).num_nodes == 15
    # an error as with five nodes: refused if the user chose them
    coarse = report | {"quadrature_sd": 0.7, "quadrature_better_nodes": 15}
    assert fine.refined(coarse) == replace(fine, num_nodes=15)
    assert marginalize(overdispersed, num_nodes=5).refined(coarse) is None


def test_a_complete_set_up_is_not_repeated_with_little_effect() -> None:
    model, some = marginalize(overdispersed), {"quadrature_nodes": 25}

    def late(sd: float, error: float, nodes: int, then: float) -> Any:
        report = {
            "quadrature_sd": sd,
            "quadrature_error": error,
            "quadrature_better_nodes": nodes,
            "quadrature_better_error": then,
        }
        assert model.refined(some | report).num_nodes == nodes
        return model.refined(some | report, late=True)

    # no number of nodes is accurate, and more of them leave half of the error
    assert late(0.06, 7e-3, 31, 3e-3) is None
    assert late(0.04, 1.5e-4, 31, 5e-5) is None
    assert late(0.2, 7e-3, 31, 3e-3) is not None
    assert late(0.06, 7e-3, 45, 1e-3) is not None
    assert late(0.04, 3e-4, 31, 5e-5) is not None


@pytest.mark.parametrize("found", ["early", "at the end"])
def test_the_second_set_up_searches_from_the_first_posterior(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """One search in place of four, and another mode stays known."""
    y = jnp.asarray(counts(50))
    kernel = MinibatchMH(marginalize(overdispersed), control_variate="taylor2")
    better = marginalize(overdispersed, num_nodes=15)
    asked, errors = [], [] if found == "early" else [{"quadrature_sd": 0.1}]
    starts = {"b": np.array([[1.0, 2.0], [3.0, 4.0]]), "s": np.array([5.0, 7.0])}
    fields = dict.fromkeys(Prepared._fields, None)
    before = Prepared(**fields | {"starts": starts, "report": {"other_mode": 6.0}})

    def surveyed(*_: Any, near: Any = None, **__: Any) -> Any:
        asked.append(near)
        if near is not None:
            return before._replace(report={"other_mode": 0.0})
        if found == "early":
            raise survey.TooCoarse(
                better, np.array([2.0, 3.0, 6.0]), {"other_mode": 6.0}
            )
        return before

    class Measured:
        def __init__(self, *_: Any) -> None:
            self.better = None

        def at(self, prepared: Any) -> Any:
            error = errors.pop() if errors else {"quadrature_sd": 0.01}
            return error, better if error["quadrature_sd"] > 0.05 else None

    monkeypatch.setattr(survey, "_surveyed", surveyed)
    monkeypatch.setattr(survey, "_Approximation", Measured)
    prepared = survey._refined(kernel, *Static.split((y,), {}), None)
    assert asked[0] is None and len(asked) == 2
    np.testing.assert_array_equal(asked[1], [2.0, 3.0, 6.0])
    assert prepared.report == {"other_mode": 6.0, "quadrature_sd": 0.01}
    assert kernel._sampled_model == better
    positions = _positions(SimpleNamespace(near=asked[1]), None)
    np.testing.assert_array_equal(positions, asked[1:])


@pytest.mark.slow
def test_a_measurement_is_compiled_before_its_draws_are_known() -> None:
    traced = []

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            traced.append(len(idx))
            numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[idx])

    marginal = marginalize(model)
    y = jnp.asarray(np.random.default_rng(2).poisson(1.5, 2_300))  # more than measured
    draws = {"s": np.linspace(0.5, 1.5, 8)}
    later = marginal.approximation((y,), {})
    expected = later(draws, marginal)
    assert expected["quadrature_error"] > 0
    ahead = marginal.approximation((y,), {})
    ahead.ahead({"s": np.zeros(8)}, marginal)
    seen = len(traced)
    assert ahead(draws, marginal) == expected
    assert len(traced) == seen
    another = marginal.approximation((y,), {})  # the check can fail
    another(draws, marginal)
    assert len(traced) > seen


@pytest.mark.slow
def test_the_search_for_the_mode_compiles_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, before, called = [], [], []
    look, better = _visit.Looker.__call__, survey._Approximation.__call__

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            traced.append(len(idx))
            numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[idx])

    def looked(self: Any, *args: Any) -> Any:
        before.append(len(traced))
        found = look(self, *args)
        called.append(len(traced))
        return found

    class MeasuredError(Exception):
        pass

    def measured(self: Any, positions: Any) -> Any:
        better(self, positions)
        raise MeasuredError  # all that follows would take long

    monkeypatch.setattr(_visit.Looker, "__call__", looked)
    monkeypatch.setattr(survey._Approximation, "__call__", measured)
    y = jnp.asarray(np.random.default_rng(2).poisson(1.5, 2_300))  # more than measured
    kernel = MinibatchMH(marginalize(model), control_variate="taylor2")
    with pytest.raises(MeasuredError):
        kernel.init(jax.random.key(0), 0, None, (y,), {})
    assert len(called) == 2  # the rows to measure, and their errors
    assert called == before, "the measurement traces nothing"


def test_a_coarse_quadrature_is_refined_before_anything_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tails and trajectories of a coarse one take longer than all else."""
    nodes, compiled = [], []

    def pilot(problem: Any, *_: Any, **__: Any) -> Any:
        nodes.append(problem.target_of(problem.arrays).model.num_nodes)
        raise StopIteration

    def looker(self: RowsAt, *args: Any, **kwargs: Any) -> Any:
        compiled.append(args)
        return looked(self, *args, **kwargs)

    looked = RowsAt.looker
    monkeypatch.setattr(_setup, "run_pilot", pilot)
    monkeypatch.setattr(RowsAt, "looker", looker)
    kernel = MinibatchMH(
        marginalize(overdispersed), control_variate="taylor2", batch_size=100
    )
    with pytest.raises(StopIteration):
        kernel.init(jax.random.key(0), 10, None, (jnp.asarray(counts(2000)),), {})
    assert nodes == [15]
    # both measurements of the error use one program
    assert len(compiled) == 1


def test_the_set_up_reads_fewer_rows_if_they_have_many_nodes() -> None:
    def some(row_size: int) -> int:
        target = SimpleNamespace(row_size=row_size)
        problem = SimpleNamespace(
            arrays=[], plates={"data": 5000}, target_of=lambda _: target
        )
        return len(Some.of(problem).rows["data"])

    assert [some(n) for n in (1, 11, 81, 343, 3375)] == [5000, 2000, 2000, 495, 250]
    assert [chunk_of(8192, n) for n in (1, 11, 81, 343)] == [8192, 1024, 1024, 512]


def test_a_search_on_some_rows_does_not_converge_further_than_necessary() -> None:
    """The gradient of the quadrature is not that of its value, so steps are linear."""
    read = []

    def objective(x: np.ndarray) -> list[np.ndarray]:
        read.append(x)
        return [0.5 * x @ x, 0.7 * x, np.eye(1)]

    far, _ = newton(objective, np.array([3.0]), near=1e-2)
    first = len(read)
    exact, _ = newton(objective, np.array([3.0]))
    assert abs(exact[0]) < 1e-3 < abs(far[0]) < 0.2
    assert len(read) - first > first


@pytest.mark.slow
def test_the_set_up_takes_as_many_nodes_as_suffice() -> None:
    """The default number of nodes is too coarse here, but the posterior is right."""
    generator = np.random.default_rng(1)
    y = generator.poisson(np.exp(-1.0 + 3.0 * generator.normal(size=1200)))
    taylor2 = control_variate.taylor2(exact_rows=0)
    settings: dict[str, Any] = {"control_variate": taylor2}
    kernel = MinibatchMH(marginalize(overdispersed), **settings)
    state = kernel.init(jax.random.key(0), 10, None, (jnp.asarray(y),), {})
    pilot = kernel.facts["pilot"]
    assert pilot["quadrature_nodes"] > 11 and pilot["quadrature_sd"] < 0.05
    nodes = pilot["quadrature_nodes"]
    assert kernel.model == marginalize(overdispersed, num_nodes=nodes)
    # it is not a setting
    same = MinibatchMH(marginalize(overdispersed), **settings)
    assert kernel._identity() == same._identity()

    # the centre is the mode by a dense grid of the latent variable
    grid = np.linspace(-14, 12, 8001)
    values, often = np.unique(y, return_counts=True)
    poisson = scipy.stats.poisson.pmf(values[:, None], np.exp(grid))

    def minus_log_density(at: np.ndarray) -> float:
        mu, s = at[0], np.exp(at[1])
        rows = poisson @ scipy.stats.norm.pdf(grid, mu, s) * (grid[1] - grid[0])
        prior = scipy.stats.norm.logpdf(mu, 0, 2)
        prior += scipy.stats.halfnorm.logpdf(s, scale=2)
        return -float(np.log(rows) @ often + prior + at[1])

    mode = scipy.optimize.minimize(minus_log_density, [-1.0, 1.0]).x
    expansion = state.surrogate.expansion
    sd = np.sqrt(np.diag(np.linalg.inv(-np.asarray(expansion.hessian))))
    assert np.abs((np.asarray(expansion.center) - mode) / sd).max() < 0.05


@pytest.mark.slow
@pytest.mark.skipif(jax.config.jax_enable_x64, reason="about single precision")
def test_what_single_precision_rounds_to_a_border_is_measured() -> None:
    """The density of a beta variable is rounded beyond 1 - 6e-8."""
    some = np.random.default_rng(5)
    y = some.binomial(20, some.beta(0.6, 0.4, size=3000)).astype(float)

    def model(y: Any) -> None:
        a = numpyro.sample("a", dist.LogNormal(-1.0, 1.0))
        b = numpyro.sample("b", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            p = numpyro.sample("p", dist.Beta(a, b))
            numpyro.sample("y", dist.Binomial(20, p), obs=y[idx])

    draws = {"a": np.full(8, 0.6), "b": np.linspace(0.36, 0.44, 8)}
    fine = marginalize(model, num_nodes=31)
    found = set_up_error(fine, draws, (jnp.asarray(y),))
    assert found["quadrature_sd"] < 1e-3 < 0.1 < found["quadrature_sd_single"]
    off = []
    for b in draws["b"]:
        values = {"a": jnp.float32(0.6), "b": jnp.float32(b)}
        rows = np.asarray(log_rows_at(fine, values, jnp.asarray(y)), float)
        exact = scipy.stats.betabinom(20, 0.6, b).logpmf(y)
        off.append((rows - exact).sum())
    assert found["quadrature_sd_single"] == pytest.approx(np.std(off), rel=0.25)
    # numbers on the whole line have no border
    y = jnp.asarray(counts(500))
    draws = {"mu": np.full(8, -0.5), "s": np.linspace(1.4, 1.6, 8)}
    assert (
        set_up_error(marginalize(overdispersed), draws, (y,))["quadrature_sd_single"]
        == 0.0
    )


@pytest.mark.slow
@pytest.mark.skipif(jax.config.jax_enable_x64, reason="about single precision")
def test_rows_of_inner_plates_are_compared_in_double_precision_only() -> None:
    """They are compared at draws of the outer sites, which depend on the precision."""

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("groups", len(y)) as idx:
            mean = numpyro.sample("mean", dist.Normal(0.0, s))
            with numpyro.plate("within", y.shape[1]):
                rate = numpyro.sample("rate", dist.Gamma(3.0, 3.0 * jnp.exp(-mean)))
                numpyro.sample("y", dist.Poisson(rate), obs=y[idx].T)

    y, draws = jnp.asarray(counts(90).reshape(30, 3)), {"s": np.linspace(0.8, 1.2, 8)}
    assert set_up_error(marginalize(model), draws, (y,))["quadrature_sd_single"] == 0.0


@pytest.mark.slow
def test_a_posterior_with_exponential_tails_is_right_from_the_default_start() -> None:
    """A gamma shape; with Gauss-Hermite nodes its mean was off by half an sd."""
    shape, some = 0.15, np.random.default_rng(31)
    y = some.poisson(some.gamma(shape, 1 / shape, size=3000)).astype(float)

    def model(y: Any) -> None:
        r = numpyro.sample("r", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            rate = numpyro.sample("rate", dist.Gamma(r, r))
            numpyro.sample("y", dist.Poisson(rate), obs=y[idx])

    mcmc = MCMC(
        MinibatchMH(marginalize(model), control_variate="taylor2"),
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), jnp.asarray(y))
    grid = np.linspace(0.11, 0.2, 2001)
    log_f = scipy.stats.nbinom(grid[:, None], grid[:, None] / (grid[:, None] + 1))
    log_f = log_f.logpmf(y).sum(1) + scipy.stats.lognorm(1.0, scale=np.exp(-1)).logpdf(
        grid
    )
    mass = np.exp(log_f - log_f.max())
    mass /= mass.sum()
    mean = mass @ grid
    sd = np.sqrt(mass @ (grid - mean) ** 2)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["r"], float)
    ess = effective_sample_size(draws)
    assert ess > 1000
    assert abs(draws.mean() - mean) < 4.5 * sd / np.sqrt(ess)
    squares = effective_sample_size((draws - mean) ** 2)
    assert abs(draws.std() / sd - 1) < 4.5 / np.sqrt(2 * squares)


def test_a_second_mode_is_seen() -> None:
    y = jnp.array([-6.0, 6.0])

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            a = numpyro.sample("a", dist.Normal(0.0, s))
            numpyro.sample("y", dist.Normal(a**2 - 9.0, 1.0), obs=y[idx])

    found = quadrature_error(marginalize(model), run_at(2, s=3.0), y)
    # half of the mass of the second row is 46 standard deviations away
    assert found.modes == pytest.approx(np.log(2.0), abs=0.01) and found.row_modes == 1
    assert "second mode" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_a_second_mode_out_of_reach_is_refused(noise: float) -> None:
    """The sign of a number is not observed: modes are up to a thousand sds apart."""

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
        with numpyro.plate("data", len(y)) as idx:
            x = numpyro.sample("x", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(x**2, noise), obs=y[idx])

    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.normal(0.5, 1.0, 100) ** 2 + noise * rng.normal(size=100))
    with pytest.raises(ValueError, match="have a second mode, and nodes are placed at"):
        set_up_error(marginalize(model), {"mu": np.linspace(-0.9, -0.6, 8)}, (y,))
    # from the minimum between two equal modes, the search finds one of them, whose
    # nodes may reach the other one
    marginal = marginalize(model)
    found, _ = log_density(marginal, (y[:1],), {}, {"mu": 0.0})
    grid = np.linspace(0.0, 5.0, 100_001)
    logs = scipy.stats.norm.logpdf(grid)
    logs = logs + scipy.stats.norm.logpdf(np.asarray(y[0]), grid**2, noise)
    half = np.log(np.exp(logs).sum() * grid[1])
    half = half + scipy.stats.norm.logpdf(0.0, 0.0, 2.0)
    assert half - 0.1 < float(found) < half + np.log(2.0) + 0.1


def test_a_second_mode_far_out_in_the_prior_is_found_in_each_row() -> None:
    """Draws of the prior would find it in few rows, and the sum would be too small."""

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        with numpyro.plate("data", len(y)) as idx:
            x = numpyro.sample("x", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(x**2, 0.001), obs=y[idx])

    x = np.array([0.3, 0.2, 0.4, 0.25, 0.35])
    found = quadrature_error(marginalize(model), run_at(2, mu=3.0), jnp.asarray(x**2))
    # the densities of x and -x differ by the factor exp(6 x)
    gains = np.log1p(np.exp(-6.0 * x))
    assert found.modes == pytest.approx(gains.max(), rel=0.05)
    both = {"mu": np.array([[2.9, 3.1]])}
    draws = xr.Dataset({n: (("chain", "draw"), v) for n, v in both.items()})
    idata = xr.DataTree.from_dict({"posterior": draws})
    found = quadrature_error(marginalize(model), idata, jnp.asarray(x**2))
    sums = [np.log1p(np.exp(-2.0 * mu * x)).sum() for mu in (2.9, 3.1)]
    assert found.spread_modes == pytest.approx(np.std(sums), rel=0.1)


def heavy(y: Any, prior: Any = dist.StudentT) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", prior(1.0, 0.0, s))
        numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[idx])


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["heavy", "light"])
def test_a_heavy_tail_is_integrated(tail: str) -> None:
    """A Cauchy effect given a count of zero has nearly half of its mass far out."""

    def normal(_: float, mean: float, s: Any) -> Any:
        return dist.Normal(mean, s)

    prior = dist.StudentT if tail == "heavy" else normal
    y, draws = jnp.asarray(counts(500)), {"s": np.linspace(0.8, 1.2, 8)}
    model = marginalize(partial(heavy, prior=prior))
    found = set_up_error(model, draws, (y,))
    assert (found["quadrature_error"] > 0.1) == (tail == "heavy")
    # equally spaced points find a smaller part of it than the nodes
    assert found["quadrature_elsewhere"] < 1e-3
    if tail == "light":
        return
    refined = model.refined(found)
    assert refined is not None and refined.num_nodes in (21, 31)
    scale = draws["s"][0]

    def density(t: float) -> float:  # of a count of zero, at effects s sinh(t)
        effect = scale * np.sinh(t)
        zero = np.exp(-np.exp(min(effect, 50.0)))
        return scipy.stats.cauchy.pdf(np.sinh(t)) * np.cosh(t) * zero

    exact = np.log(scipy.integrate.quad(density, -40.0, 6.0, limit=500)[0])
    with double():
        rows = log_rows_at(refined, {"s": jnp.asarray(scale)}, jnp.zeros(1))
    assert abs(float(rows[0]) - exact) < 1e-3


def test_a_second_mode_that_matters_is_refused() -> None:
    """Nodes at one of two modes, whose masses depend on a parameter."""

    def model(y: Any) -> None:
        w = numpyro.sample("w", dist.Beta(2.0, 2.0))
        with numpyro.plate("data", len(y)) as idx:
            both = dist.Normal(jnp.array([-4.0, 4.0]), 0.5)
            which = dist.Categorical(probs=jnp.stack([w, 1 - w]))
            a = numpyro.sample("a", dist.MixtureSameFamily(which, both))
            numpyro.sample("y", dist.Normal(a, 20.0), obs=y[idx])

    def by_component(y: Any) -> None:
        w = numpyro.sample("w", dist.Beta(2.0, 2.0))
        with numpyro.plate("data", len(y)) as idx:
            k = numpyro.sample("k", dist.Bernoulli(1 - w))
            a = numpyro.sample("a", dist.Normal(8.0 * k - 4.0, 0.5))
            numpyro.sample("y", dist.Normal(a, 20.0), obs=y[idx])

    y = jnp.asarray(20.0 * np.random.default_rng(0).normal(size=100))
    draws = {"w": np.linspace(0.3, 0.5, 8)}
    with pytest.raises(ValueError, match="have a second mode"):
        set_up_error(marginalize(model), draws, (y,))
    found = set_up_error(marginalize(by_component), draws, (y,))
    assert found["quadrature_sd_elsewhere"] < 1e-3


@pytest.mark.slow
def test_a_few_rows_with_all_of_the_error_are_measured() -> None:
    """Four of 60,000 rows have a count of zero, between those of a fixed distance."""
    y = np.full(60_000, 40.0)
    rare = [102, 20_012, 33_334, 59_002]
    y[rare] = 0.0
    draws = {"mu": np.linspace(3.6, 3.8, 8), "s": np.full(8, 3.0)}
    assert not set(rare) & set(np.linspace(0, 59_999, 16_000).astype(int))
    model = marginalize(overdispersed, num_nodes=15)
    found = set_up_error(model, draws, (jnp.asarray(y),))
    alone = set_up_error(model, draws, (jnp.asarray(y[rare]),))
    assert found["quadrature_error"] == pytest.approx(alone["quadrature_error"])
    assert found["quadrature_screened"] == 1.0


@pytest.mark.slow
def test_a_class_larger_than_what_is_measured_counts_with_its_size() -> None:
    """3,000 of 20,000 rows have nearly all of the error; 2,000 are measured."""
    y = np.full(20_000, 40.0)
    bad = np.arange(5_000, 8_000)
    y[bad] = bad % 3
    draws = {"mu": np.linspace(1.0, 3.0, 8), "s": np.full(8, 3.0)}
    found = set_up_error(marginalize(overdispersed), draws, (jnp.asarray(y),))
    kinds, each = np.unique(y, return_counts=True)

    def rows(nodes: int) -> Any:
        finer = marginalize(overdispersed, num_nodes=nodes)
        at = jax.vmap(lambda draw: log_rows_at(finer, draw, jnp.asarray(kinds)))
        return np.asarray(at(jax.tree.map(jnp.asarray, draws)))

    with double():
        off = rows(11) - rows(121)
    assert found["quadrature_sd"] == pytest.approx((off @ each).std(), rel=0.03)


def test_rows_are_chosen_with_known_probabilities() -> None:
    """Weighted sums over the chosen rows are those over all."""
    generator = np.random.default_rng(0)
    errors = np.concatenate([generator.exponential(size=200), np.full(9_000, 1e-9)])
    errors = np.concatenate([errors, 1e-3 * generator.uniform(size=10_800)])
    errors = generator.permutation(errors)
    places, weights = chosen(errors, 1_000)
    assert len(places) == len(set(places)) == 1_000
    assert np.isin(np.argsort(errors)[-250:], places[weights == 1.0]).all()
    assert weights @ errors[places] == pytest.approx(errors.sum(), rel=1e-3)
    assert weights.sum() == pytest.approx(len(errors), rel=0.02)
    # none stands for more than twice as many as in a sample of equal probabilities
    assert weights.max() <= 2 * (len(errors) - 250) / 750
    alike, same = chosen(np.zeros(500), 20)
    assert len(alike) == 20
    assert np.unique(same.round(9)).tolist() == [1.0, 33.0]
    assert chosen(np.ones(5), 9)[0].tolist() == [0, 1, 2, 3, 4]


def test_the_error_after_a_run_is_measured_where_it_is_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_error, "_MOST_ROWS", 100)
    y = np.full(2_000, 40.0)
    y[1_234] = 0.0
    model, idata = marginalize(overdispersed), run_at(4, mu=3.7, s=3.0)
    found = quadrature_error(model, idata, jnp.asarray(y))
    assert found.row == 1_234 and found.largest > 1e-4


class Peaked(dist.Laplace):
    """A distribution whose kink is not known, as it may be of a user's own."""


def kinked(y: Any) -> None:
    g = numpyro.sample("g", dist.HalfNormal(2.0))
    with numpyro.plate("data", len(y)) as idx:
        u = numpyro.sample("u", Peaked(0.0, g))
        numpyro.sample("y", dist.Normal(u, 1.0), obs=y[idx])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "accurate"), [(kinked, False), (overdispersed, True)]
)
def test_runs_without_a_control_variate_are_measured_afterwards(
    model: Any, accurate: bool
) -> None:
    """Eleven nodes are too wide at the kink, and the chains go where they are worst."""
    y = jnp.asarray(np.random.default_rng(2).normal(size=60).round())
    y = jnp.abs(y) if model is overdispersed else y
    kernel = MinibatchMH(marginalize(model), batch_size=30)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    idata = to_inference_data(mcmc)
    advice = str(diagnose(idata))
    assert ("the quadrature of marginalize is not accurate" in advice) != accurate
    facts = json.loads(idata["posterior"].attrs["facts"])
    assert ("quadrature_sd" in facts["quadrature"]) == accurate


@pytest.mark.slow
def test_sample_measures_the_quadrature_at_draws_and_not_at_its_start(
    tmp_path: Path,
) -> None:
    """Names and axes come from the first draw, and from earlier runs of the program."""
    y = jnp.asarray(np.random.default_rng(2).poisson(3.0, size=60))
    model = marginalize(overdispersed)
    kernel = MinibatchMH(model, batch_size=30)
    settings: dict[str, Any] = {"num_warmup": 5, "num_samples": 10, "progress": False}
    found = {}
    for seed, out in ((0, None), (1, None), (1, tmp_path / "run")):
        idata = sample(kernel, y, **settings, seed=seed, out=out)
        draws = {n: x.to_numpy()[0] for n, x in idata["posterior"].items()}
        which = np.linspace(0, 9, 8).astype(int)
        expected = model.approximation((y,), {})(
            {name: x[which] for name, x in draws.items()}, model
        )
        facts = json.loads(idata["posterior"].attrs["facts"])
        found[seed, out] = facts["quadrature"]["quadrature_sd"]
        assert found[seed, out] == pytest.approx(expected["quadrature_sd"], rel=1e-3)
    assert len(set(found.values())) == 2  # of two seeds


@pytest.mark.slow
def test_of_very_many_rows_random_ones_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_screen, "_MOST", 400_000)
    draws = {"mu": np.linspace(-0.6, -0.4, 8), "s": np.full(8, 1.5)}
    y = jnp.asarray(counts(10_000))
    found = set_up_error(marginalize(overdispersed, num_nodes=31), draws, (y,))
    # 31 nodes and 121 equally spaced points
    assert found["quadrature_screened"] == pytest.approx(0.26, abs=0.01)
    monkeypatch.undo()
    whole = set_up_error(marginalize(overdispersed, num_nodes=31), draws, (y,))
    assert found["quadrature_sd"] == pytest.approx(whole["quadrature_sd"], rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "finer"), [(3_000, None), (200_000, 11)])
def test_two_numbers_of_many_rows_are_looked_at_with_fewer_points(
    size: int, finer: int | None
) -> None:
    """A class of gamma effects among nearly normal ones, in two dimensions."""

    def model(rare: Any, y: Any) -> None:
        lk = numpyro.sample("lk", dist.Normal(-2.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            k = jnp.where(rare[idx], jnp.exp(lk), 200.0)
            for j in range(2):
                a = numpyro.sample(f"a{j}", dist.Gamma(k, k / 30.0))
                numpyro.sample(f"y{j}", dist.Poisson(a), obs=y[idx, j])

    rare = np.zeros(size, bool)
    those = [11, 1_234, 2_777]
    rare[those] = True
    y = np.full((size, 2), 30.0)
    y[those] = [[0.0, 3.0], [10.0, 0.0], [0.0, 0.0]]
    args = jnp.asarray(rare), jnp.asarray(y)
    (at,) = RowsAt.each("test", marginalize(model), args, {})
    screen = Screen(at, {("a0", "a1"): Rule(0, 9, (9,), 35)})
    with double():
        found = screen.sample({"lk": np.array([-2.3, -2.2])}, 20)
    assert set(those) <= set(found.numbers[found.weights == 1.0])
    assert found.screened == size


def nested(y: Any) -> None:
    """An effect of each count within a class of its group."""
    s = numpyro.sample("s", dist.HalfNormal(2.0))
    with numpyro.plate("groups", len(y)) as idx:
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        with numpyro.plate("within", y.shape[1]):
            a = numpyro.sample("a", dist.Normal(jnp.where(z == 1, 1.0, -1.0), s))
            numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[idx].T)


@pytest.mark.slow
def test_the_quadrature_of_inner_plates_is_measured() -> None:
    y = jnp.asarray(counts(60).reshape(20, 3))
    found = quadrature_error(marginalize(nested), run_at(4, s=3.0), y)
    assert found.largest > 1e-4
    finer = quadrature_error(marginalize(nested, num_nodes=45), run_at(4, s=3.0), y)
    assert finer.largest < 1e-4
    with double():
        draw = {"s": jnp.asarray(3.0)}
        one, other = (
            log_rows_at(marginalize(nested, num_nodes=n), draw, y) for n in (11, 81)
        )
    # a row has three integrals
    assert np.abs(one - other).max() < 3 * found.largest
    assert np.abs(one - other).max() > 1e-4


def test_without_a_quadrature_there_is_no_error() -> None:
    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx:
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            numpyro.sample("y", dist.Normal(z, s), obs=y[idx])

    with pytest.raises(ValueError, match="'z' are summed exactly"):
        quadrature_error(marginalize(model), run_at(2, s=1.0), jnp.zeros(3))


@pytest.mark.parametrize("num_nodes", [None, 11])
def test_a_search_that_does_not_converge_is_repeated_with_more_nodes(
    monkeypatch: Any, num_nodes: int | None
) -> None:
    """As by the inefficiencies of a stochastic frontier, half-normal ones."""

    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("firms", len(y)):
            u = numpyro.sample("u", dist.HalfNormal(scale))
            numpyro.sample("y", dist.Normal(-u, 0.3), obs=y)

    tried = []

    def surveyed(kernel: Any, *_: Any, **__: Any) -> Any:
        tried.append(kernel._sampled_model.num_nodes)
        if tried[-1] == num_nodes:
            raise survey.Refused("no mode")
        raise StopIteration

    monkeypatch.setattr(survey, "_surveyed", surveyed)
    marginal = marginalize(model, num_nodes=num_nodes)
    kernel = MinibatchMH(marginal, control_variate="taylor2")
    y = -np.abs(np.random.default_rng(0).normal(size=50))
    with pytest.raises(survey.Refused if num_nodes else StopIteration):
        kernel.init(jax.random.key(0), 10, None, (y,), {})
    assert tried == ([11] if num_nodes else [None, 31])
