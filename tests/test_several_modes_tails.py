"""Several modes, of which some are skewed: tails, and the rows that correct them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC

from benchmarks.several_modes.skewed import Truth, model, simulated
from numpyro_minibatch import (
    MinibatchMH,
    ReplicaExchange,
    control_variate,
    diagnose,
    sample,
    to_inference_data,
)
from numpyro_minibatch.control_variate import (
    _posterior_of_modes,
    expand,
    log_surrogate,
)
from numpyro_minibatch.control_variate._exact_rows import without
from numpyro_minibatch.control_variate._expand import (
    Coordinates,
    ExactRows,
    Expansions,
)
from numpyro_minibatch.control_variate._modes import find_modes
from numpyro_minibatch.control_variate._posterior_of_modes import posterior_of_modes
from numpyro_minibatch.control_variate._problem import Problem
from numpyro_minibatch.control_variate._residuals import ResidualScan
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.target import ModelTarget

slow = pytest.mark.slow
TWO = control_variate.taylor2(modes=4)
N = 2003  # not a multiple of a batch
DATA = simulated(N)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(*DATA)


@slow
def test_tails_in_both_modes_are_right(truth: Truth) -> None:
    """From the default start: masses, moments and tail probabilities of each mode."""
    kernel = MinibatchMH(model, control_variate=TWO, batch_size=16)
    chains = 96
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=1000,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *DATA)
    pilot = kernel.pilot
    assert pilot["num_modes"] == 2 and 1 <= pilot["exact_rows"] <= 64
    assert pilot["tail_inefficiency"] < 1.3
    draws = mcmc.get_samples(group_by_chain=True)
    g, a = (np.asarray(draws[name], float) for name in ("g", "a"))
    for name, (fn, expected) in truth.checks().items():
        by_chain = fn(g, a).mean(1)
        error = by_chain.std(ddof=1) / np.sqrt(chains)
        assert abs(by_chain.mean() - expected) < 4.5 * error, name
        assert error < 0.03, name
        # a chain of 1000 draws is at least as precise as 150 independent draws
        assert by_chain.std(ddof=1) < fn(g, a).std() / np.sqrt(150), name
    found = diagnose(to_inference_data(mcmc, constant_data=False))
    assert found.mode_acceptance > 0.3
    assert not any("tails" in text for text in found.advice)


@slow
def test_without_representatives_a_skewed_mode_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the set-up, and by the draws of a run."""
    monkeypatch.setattr(_posterior_of_modes, "MAX_INEFFICIENCY", np.inf)
    kernel = MinibatchMH(model, control_variate=TWO, batch_size=16)
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=2000,
        num_chains=16,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *DATA)
    pilot = kernel.pilot
    assert pilot["exact_rows"] == 0
    assert pilot["tail_inefficiency"] > 3 and pilot["tail_parameter"] == "a"
    assert pilot["tail_mode"] in (0, 1)
    found = diagnose(to_inference_data(mcmc, constant_data=False))
    assert found.tail_weight_name in ("a in mode 0", "a in mode 1")
    assert found.tail_weight > 2.5
    assert any(text.startswith("the tails are known less") for text in found.advice)
    assert any(text.startswith("the tails of mode") for text in found.advice)


def problem() -> Problem:
    args = tuple(map(jnp.asarray, DATA))
    sizes = {"data": N}

    def target_of(arrays: list[Any]) -> ModelTarget:
        return ModelTarget(model=model, args=tuple(arrays), sizes=sizes)

    example = target_of(list(args)).draw_prior(jax.random.key(0))
    return Problem(
        target_of=target_of,
        arrays=list(args),
        plates=sizes,
        weights=Weights(1.0, 1.0),
        example=jax.tree.map(np.asarray, example),
    )


@slow
@pytest.mark.parametrize("form", ["direct", "remainder"])
def test_representatives_of_modes_leave_log_ratios_exact(form: Any) -> None:
    """Different rows for each mode, of which one has more than the other."""
    here = problem()
    found = find_modes(here, np.zeros((1, 2)), TWO)
    of_modes = posterior_of_modes(here, found)
    chosen = [([3, 70, 1999], [200.0, 900.0, 300.0]), ([5], [700.0])]
    parts = [
        part._replace(
            expansion=without(
                here,
                part.expansion,
                {"data": ExactRows.representing(np.array(rows), np.array(weights))},
            )
        )
        for part, (rows, weights) in zip(of_modes.parts, chosen, strict=True)
    ]
    posterior, _ = of_modes._replace(parts=tuple(parts)).mixed()
    dtype = jnp.result_type(float)
    expansion = posterior.expansion.cast(dtype)
    assert isinstance(expansion, Expansions)
    assert expansion.num_exact == expansion.num_in_residuals == 3
    target = here.target_of(here.arrays)
    shared = target, Coordinates()
    args = 2, form, expansion, here.unravel
    residual, whole = expand(*shared, *args, True), expand(*shared, *args)
    density = log_surrogate(*shared, expansion, here.weights, here.unravel)
    every = {"data": jnp.arange(N)}

    def logs(z: Any) -> Any:
        left, terms = residual(z, every), whole(z, every)
        rows = target.rows(here.unravel(z), every)["data"].sum()
        return jnp.stack(
            [
                here.weights.known(target.terms(here.unravel(z), every)) + rows,
                density(z)
                + here.weights.known(left)
                - expansion.each.value[0]
                + left.rows["data"].sum(),
                here.weights.known(terms) + terms.rows["data"].sum(),
                density(z),
            ]
        )

    # twice as far from the modes as draws are, where residuals are large
    z = np.concatenate([2 * part.draws[:8] - part.location for part in parts])
    assert len(np.unique(jax.vmap(expansion.modes.of)(jnp.asarray(z, dtype)))) == 2
    values = np.asarray(jax.jit(jax.vmap(logs))(jnp.asarray(z, dtype)), float)
    apart = (values - values[0]) - (values[:, :1] - values[0, :1])
    assert np.abs(apart[:, 1:3]).max() < 0.02  # of single precision
    # the surrogate alone is off by more than that
    assert np.abs(apart[:, 3]).max() > 0.2
    # the pilot's sums of what is left are the same numbers, up to a constant
    without_rows = of_modes.mixed()[0].expansion
    scan = ResidualScan(here, 2, form, without_rows).keeping(posterior.expansion.exact)
    sums, _ = scan.sums(z)
    left = values[:, 0] - values[:, 3] - sums
    assert np.abs(left - left[0]).max() < 0.02
    assert np.abs(scan.of_surplus(z)).max() > 0.2


@slow
def test_a_run_with_representative_rows_is_resumed(tmp_path: Path) -> None:
    """The rows and multiples of each mode are part of the state in a folder."""
    kernel = MinibatchMH(model, control_variate=TWO, batch_size=16)
    settings: dict[str, Any] = dict(num_warmup=20, num_chains=2, seed=3, progress=False)
    whole = sample(kernel, *DATA, num_samples=60, out=tmp_path / "whole", **settings)
    assert kernel.pilot["exact_rows"] >= 1
    parts = {"out": tmp_path / "parts", **settings}
    sample(kernel, *DATA, num_samples=30, **parts)
    found = sample(kernel, *DATA, num_samples=60, resume=True, **parts)
    for name in ("a", "g"):
        both = (each["posterior"][name].values for each in (found, whole))
        np.testing.assert_array_equal(*both)


@slow
def test_ladders_of_skewed_modes(truth: Truth) -> None:
    """The cold rung, between swaps and with the representative rows of its modes."""
    inner = MinibatchMH(model, control_variate=TWO, batch_size=32)
    kernel = ReplicaExchange(inner, temperatures=[1.0, 2.0])
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=1000,
        num_chains=24,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), *DATA)
    draws = mcmc.get_samples(group_by_chain=True)
    g, a = (np.asarray(draws[name], float) for name in ("g", "a"))
    for name, (fn, expected) in truth.checks().items():
        by_chain = fn(g, a).mean(1)
        error = by_chain.std(ddof=1) / np.sqrt(len(by_chain))
        assert abs(by_chain.mean() - expected) < 4.5 * error, name
        assert error < 0.05, name
