"""`recommend`: its estimates, its decisions, and the models that it cannot judge.

No test depends on a time. Where a decision depends on one, the test sets it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

from numpyro_minibatch import (
    MINT,
    HostRows,
    MinibatchMH,
    batch,
    control_variate,
    recommend,
)
from numpyro_minibatch.control_variate import _setup
from numpyro_minibatch.kernels._shared import survey
from numpyro_minibatch.recommendation import _gradient, _recommend
from numpyro_minibatch.recommendation._gradient import Gradient, measure_gradient
from numpyro_minibatch.recommendation._nuts import of_run, trajectories
from numpyro_minibatch.recommendation._result import _short

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(3_000, 3)), jnp.float32)
Y = jnp.asarray(RNG.uniform(size=3_000) < 1 / (1 + np.exp(-X.sum(1))), jnp.float32)


def logistic(X: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ b), obs=y[i])


def schools(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("schools", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mu, 1.0))
        numpyro.sample("score", dist.Normal(effect, 1.0), obs=y)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the time of a gradient; the set-up takes 2 seconds."""

    def set_(seconds: float) -> None:
        found = Gradient(seconds, compilation=0.3, lines=400)
        monkeypatch.setattr(_recommend, "measure_gradient", lambda *_: found)

    clock = itertools.count(step=2)
    monkeypatch.setattr(_gradient, "now", lambda: next(clock))
    return set_


def advise(model: Any, *args: Any, **settings: Any) -> Any:
    return recommend(model, *args, progress=False, **settings)


def test_slow_gradients_favour_minibatches(timed: Any) -> None:
    timed(5e-3)
    found = advise(logistic, X, Y)
    assert found.sampler == "MinibatchMH"
    assert found.code.startswith('MCMC(MinibatchMH(logistic, control_variate="taylor2"')
    assert "times as long" in found.reason
    assert str(found).startswith("MinibatchMH is recommended: NUTS would take")
    # the code to write runs
    made = eval(
        found.code.replace("num_chains=4", "num_chains=4, progress_bar=False"),
        {"MCMC": MCMC, "MinibatchMH": MinibatchMH, "logistic": logistic},
    )
    made.run(jax.random.key(0), X, Y)
    assert made.get_samples()["b"].shape == (4 * found.minibatch.num_samples, 3)


def test_fast_gradients_favour_nuts(timed: Any) -> None:
    timed(1e-6)
    found = advise(logistic, X, Y)
    assert found.sampler == "NUTS"
    assert found.code.startswith("MCMC(NUTS(logistic), num_warmup=1000, num_samples=")
    eval(found.code, {"MCMC": MCMC, "NUTS": NUTS, "logistic": logistic})


def test_many_draws_favour_minibatches(timed: Any) -> None:
    timed(1e-4)
    few = advise(logistic, X, Y)
    many = advise(logistic, X, Y, draws=1_000_000)
    assert (few.sampler, many.sampler) == ("NUTS", "MinibatchMH")
    assert many.nuts.sampling > 100 * few.nuts.sampling


def test_a_small_difference_is_not_a_reason(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1e-6)
    monkeypatch.setattr(_recommend, "_LINES_OF_NUTS", (1_000, 18.0))
    found = advise(logistic, X, Y)
    assert 1 < found.nuts.total / found.minibatch.total < 2
    assert found.sampler == "NUTS"
    assert "within the error of the estimates" in found.reason


def test_few_rows_favour_nuts(timed: Any) -> None:
    timed(2e-5)
    found = advise(logistic, X[:200], Y[:200])
    assert found.sampler == "NUTS"
    # the warning of the set-up is part of the text
    assert any("a minibatch does not pay" in note for note in found.notes)
    assert "does not" in str(found)


def test_measured_costs_are_consistent() -> None:
    found = advise(logistic, X, Y, draws=500, num_chains=2, num_warmup=50)
    assert math.isfinite(found.gradient) and found.gradient > 0
    for cost in (found.minibatch, found.nuts):
        numbers = [x for x in dataclasses.astuple(cost) if not isinstance(x, str)]
        assert np.isfinite(numbers).all() and min(numbers) >= 0
        parts = cost.setup + cost.compilation + cost.warmup + cost.sampling
        assert cost.total == parts
        assert cost.remaining == pytest.approx(cost.total - cost.setup)
        effective = cost.ess_per_draw * cost.num_samples * cost.num_chains
        assert effective >= 500
        assert f"{cost.num_warmup:,} + {cost.num_samples:,} draws" in str(cost)
    assert found.minibatch.setup > 0 == found.nuts.setup
    assert (found.minibatch.num_chains, found.minibatch.num_warmup) == (2, 50)
    assert found.minibatch.rows_per_draw < 200 < 3_000 < found.nuts.rows_per_draw
    assert repr(found) == str(found)
    assert max(map(len, str(found).splitlines())) <= 88


def test_the_set_up_is_found_again(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(1e-3)
    calls = []
    prepare = survey.prepare

    def counted(*args: Any) -> Any:
        calls.append(args)
        return prepare(*args)

    monkeypatch.setattr(survey, "prepare", counted)
    monkeypatch.setattr(survey, "_MOST_FOUND", 4)  # tests keep none otherwise
    data = X + 0.0, Y + 0.0
    advise(logistic, *data)
    kernel = MinibatchMH(logistic, control_variate="taylor2")
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(1), *data)
    assert len(calls) == 1 and kernel.pilot


def test_a_kernel_is_compared_and_not_changed(timed: Any) -> None:
    timed(5e-3)
    kernel = MinibatchMH(
        logistic, control_variate="taylor2", batch=batch.stratified(64)
    )
    found = advise(kernel, X, Y)
    assert found.minibatch.rows_per_draw == 64
    assert found.code.startswith("MCMC(kernel, ")
    assert kernel.pilot == {}


def test_a_refused_model_goes_to_nuts_with_the_reason() -> None:
    found = advise(schools, Y)
    assert (found.sampler, found.minibatch, found.nuts) == ("NUTS", None, None)
    assert "marginalize" in found.refusal and "effect" in found.refusal
    assert found.gradient > 0
    assert found.code == "MCMC(NUTS(schools), num_warmup=1000, num_samples=1000)"
    assert "cannot sample" in str(found) and "a gradient takes" in str(found)


def test_a_refusal_of_the_expansion_goes_to_nuts(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1e-3)

    def refuse(*_: Any) -> None:
        raise _setup.Refused("the expansion does not hold.")

    monkeypatch.setattr(_setup, "check_residuals", refuse)
    found = advise(logistic, X + 1.0, Y)
    assert found.sampler == "NUTS"
    assert found.refusal == "MinibatchMH: the expansion does not hold."


def test_a_refused_model_that_reads_values() -> None:
    def model(group: Any, y: Any) -> None:
        effects = numpyro.sample("a", dist.Normal(0, 1).expand([int(group.max()) + 1]))
        numpyro.sample("y", dist.Normal(effects[group], 1).to_event(1), obs=y)

    group = np.arange(3_000) % 3
    found = advise(model, group, Y)
    assert found.sampler == "NUTS" and found.refusal and found.gradient > 0


def test_an_error_that_nuts_raises_as_well_is_raised() -> None:
    def wrong(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([7]).to_event(1))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ b), obs=y[i])

    with pytest.raises(TypeError, match="dot_general"):
        advise(wrong, X, Y)
    with pytest.raises(TypeError, match="positional argument"):
        advise(logistic, X)


def test_discrete_latent_sites_of_rows_are_marginalized(timed: Any) -> None:
    def mixture(y: Any) -> None:
        weight = numpyro.sample("weight", dist.Beta(2, 2))
        with numpyro.plate("rows", len(y)):
            kind = numpyro.sample("kind", dist.Bernoulli(weight))
            numpyro.sample("y", dist.Normal(3.0 * kind, 1), obs=y)

    timed(1e-3)
    y = 3 * Y + jnp.asarray(RNG.normal(size=3_000), jnp.float32)
    found = advise(mixture, y)
    assert found.refusal is None and found.nuts is not None


def test_a_discrete_site_that_rows_share() -> None:
    def change(y: Any) -> None:
        which = numpyro.sample("which", dist.Bernoulli(0.5))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(which, 1), obs=y)

    found = advise(change, Y)
    assert found.sampler == "NUTS" and math.isnan(found.gradient)
    assert "funsor" in found.notes[-1] and found.refusal


def test_rows_on_the_host(timed: Any) -> None:
    found = advise(logistic, HostRows(np.asarray(X)), Y)
    assert found.sampler == "MinibatchMH" and found.nuts is None
    assert math.isfinite(found.minibatch.total)
    assert "HostRows" in found.notes[-1]
    assert "NUTS: not known" in str(found)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"draws": 0}, ValueError, "draws"),
        ({"draws": 10.5}, TypeError, "draws"),
        ({"num_chains": 0}, ValueError, "num_chains"),
        ({"num_warmup": -1}, ValueError, "num_warmup"),
    ],
)
def test_wrong_numbers(settings: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=rf"recommend\({message}="):
        advise(logistic, X, Y, **settings)


def test_wrong_models() -> None:
    with pytest.raises(TypeError, match="needs a NumPyro model or a kernel"):
        advise("logistic", X, Y)
    for kernel in (
        NUTS(logistic),
        MINT(logistic, batch_size=10, temperature=10.0),
        MinibatchMH(logistic, batch_size=10),
    ):
        with pytest.raises(ValueError, match="with a control variate"):
            advise(kernel, X, Y)
    hot = MinibatchMH(logistic, control_variate="taylor2", temperature=10.0)
    with pytest.raises(ValueError, match="temperature 1"):
        advise(hot, X, Y)


def test_a_model_that_subsamples(timed: Any) -> None:
    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=50) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ b), obs=y[i])

    timed(1e-3)
    found = advise(model, X, Y)
    assert found.minibatch.rows_per_draw == 50
    assert any("Leave it out for NUTS" in note for note in found.notes)


def test_several_modes(timed: Any) -> None:
    def mixture(y: Any) -> None:
        means = numpyro.sample("means", dist.Normal(0, 3).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y)) as i:
            half = dist.Categorical(probs=jnp.ones(2) / 2)
            parts = dist.MixtureSameFamily(half, dist.Normal(means, 1))
            numpyro.sample("y", parts, obs=y[i])

    timed(1e-3)
    y = 4 * Y - 2 + jnp.asarray(RNG.normal(size=3_000), jnp.float32)
    several = control_variate.taylor2(modes=4)
    found = advise(MinibatchMH(mixture, control_variate=several), y)
    assert found.sampler == "MinibatchMH" and found.nuts is None
    assert "several modes" in found.notes[-1]


def test_keyword_arguments_of_the_model(timed: Any) -> None:
    timed(1e-3)
    found = advise(logistic, X, model_kwargs={"y": Y})
    assert found.minibatch is not None


def test_a_measured_gradient_has_all_rows() -> None:
    seen = []

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.HalfNormal(1))
        seen.append(y.shape)
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    found = measure_gradient(model, (Y,), {})
    assert set(seen) == {(3_000,)}
    assert found.seconds > 0 and found.compilation > 0 and found.lines > 10


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_trajectories_do_not_depend_on_the_unit(scale: float) -> None:
    one = trajectories(np.eye(3), np.ones(3))
    other = trajectories(scale**2 * np.eye(3), np.full(3, scale**2))
    np.testing.assert_allclose(one, other)


def test_trajectories_are_longer_where_parameters_are_correlated() -> None:
    correlated = np.full((2, 2), 0.999) + 0.001 * np.eye(2)
    independent, hard = (trajectories(c, np.ones(2)) for c in (np.eye(2), correlated))
    assert hard.gradients > 5 * independent.gradients
    assert 0 < hard.ess <= 1
    # and without a mass matrix where their scales differ
    scales = np.diag([1.0, 1e-4])
    assert trajectories(scales, np.ones(2)).gradients > 20 * independent.gradients
    scaled = trajectories(scales, np.diag(scales)).gradients
    np.testing.assert_allclose(scaled, independent.gradients)


def test_a_warmup_learns_scales_down_to_the_constant_that_numpyro_adds() -> None:
    total, cost = of_run(np.diag([1.0, 1e-2]), 1000)
    assert total > 1000 * cost.gradients  # the first draws have no mass matrix
    scales = np.diag([1e-6, 1e-10])  # those of a posterior of many rows
    _, hard = of_run(scales, 1000)
    assert hard.gradients > 5 * cost.gradients


@pytest.mark.slow
def test_trajectories_are_those_of_nuts() -> None:
    rng = np.random.default_rng(1)
    root = rng.normal(size=(8, 8)) / 3 + np.eye(8)
    covariance = root @ root.T
    found = trajectories(covariance, np.diag(covariance))
    precision = jnp.asarray(np.linalg.inv(covariance))
    kernel = NUTS(potential_fn=lambda z: 0.5 * z @ precision @ z)
    mcmc = MCMC(kernel, num_warmup=1000, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(8), extra_fields=("num_steps",))
    number = float(np.mean(mcmc.get_extra_fields()["num_steps"]))
    assert number / 2 < found.gradients < 2 * number


def test_seconds_are_short() -> None:
    shown = [_short(x) for x in (0.00123, 0.25, 4.321, 14.321, 12_345.0)]
    assert shown == ["0.001", "0.2", "4.3", "14", "12,000"]
