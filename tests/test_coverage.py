"""Reported errors cover the truth, and ranks of simulated parameters are uniform."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from numpyro.infer.util import log_density
from scipy.stats import beta as beta_distribution
from scipy.stats import chisquare

from benchmarks.coverage.calibration import PROBLEMS, SETTINGS
from benchmarks.coverage.calibration import ranks as ranks_of
from benchmarks.coverage.families import FAMILIES, truth
from numpyro_minibatch import AMAGOLD, MinibatchMH, proposal, sample
from numpyro_minibatch._internal.precision import double

slow = pytest.mark.slow


def test_quadrature_is_right_where_a_closed_form_is_known():
    """The probability near 0 has a beta posterior."""
    family = FAMILIES["bound"]
    data = family.data(0)
    known = beta_distribution(1 + data[0].sum(), 1 + len(data[0]) - data[0].sum())
    found = truth(family, data)["p"]
    assert np.isclose(found["mean"], known.mean(), rtol=1e-5)
    assert np.isclose(found["sd"], known.std(), rtol=1e-5)
    assert np.isclose(found["q5"], known.ppf(0.05), rtol=1e-4)
    assert np.isclose(found["q95"], known.ppf(0.95), rtol=1e-4)


@pytest.mark.parametrize("name", ["gamma", "groups", "correlation"])
def test_quadrature_does_not_depend_on_the_grid(name):
    family = FAMILIES[name]
    data = family.data(0)
    fine, coarse = truth(family, data), truth(family, data, points=301)
    for parameter, values in fine.items():
        off = [values[k] - coarse[parameter][k] for k in ("mean", "sd", "q5", "q95")]
        assert np.abs(off).max() < 1e-3 * values["sd"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "groups"])
def test_densities_by_hand_are_those_of_the_models(name):
    """Up to a constant, at random parameters; those of groups are integrated out."""
    family, rng = FAMILIES[name], np.random.default_rng(7)
    data = family.data(0)
    differences, size = [], 0.0
    with double():
        for _ in range(3):
            at = {
                parameter: rng.normal() if kind == "linear" else rng.uniform(0.2, 0.8)
                for parameter, (kind, *_) in family.axes.items()
            }
            found, _ = log_density(family.model, data, {}, at)
            values = [np.asarray(value) for value in at.values()]
            differences.append(
                float(found) - float(family.log_posterior(data, *values))
            )
            size = max(size, abs(float(found)))
    # the data are in single precision
    assert np.ptp(differences) < 1e-3 + 1e-6 * size


@pytest.mark.filterwarnings("ignore:.*a minibatch does not pay")
@pytest.mark.parametrize(("name", "fit"), [("cauchy", False), ("intercept", True)])
def test_the_moves_know_whether_independent_draws_are_accepted(monkeypatch, name, fit):
    seen = []
    original = type(proposal.surrogate_hmc()).propose

    def propose(self, key, z, step_size, context):
        seen.append(context.draws_fit)
        return original(self, key, z, step_size, context)

    monkeypatch.setattr(type(proposal.surrogate_hmc()), "propose", propose)
    family = FAMILIES[name]
    kernel = MinibatchMH(family.model, control_variate="taylor2")
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), *(jnp.asarray(x) for x in family.data(0)))
    assert kernel.pilot["surrogate_draws_fit"] == fit
    assert set(seen) == {fit}


@slow
@pytest.mark.filterwarnings("ignore:.*a minibatch does not pay")
@pytest.mark.parametrize(
    ("name", "long", "driven"), [("zeros", False, True), ("cauchy", True, False)]
)
def test_skewed_posteriors_are_sampled(name, long, driven):
    """Of 64 chains from the default start, with a tolerance from their scatter."""
    family = FAMILIES[name]
    data = [jnp.asarray(x) for x in family.data(0)]
    kernel = MinibatchMH(family.model, control_variate="taylor2")
    result = sample(
        kernel,
        *data,
        num_warmup=500,
        num_samples=1000,
        num_chains=64,
        seed=2,
        progress=False,
    )
    kernel.init(random.key(0), 0, None, tuple(data), {})
    assert kernel.pilot["surrogate_long"] == long
    # either parameter of structural zeros may drive the other
    assert bool(kernel.pilot["surrogate_drivers"]) == driven
    for parameter, known in truth(family, family.data(0)).items():
        draws = np.asarray(result.posterior[parameter].values, np.float64)
        white = (draws - known["mean"]) / known["sd"]
        below = (draws < known["q5"]) - 0.05
        above = (draws > known["q95"]) - 0.05
        for values in (white, white**2 - 1, below, above):
            of_chains = values.mean(1)
            error = of_chains.std(ddof=1) / np.sqrt(len(of_chains))
            assert abs(of_chains.mean()) < 4 * error


# simulation-based calibration: many data sets at once, one chain for each ---

SETS, ROWS, BINS = 240, 12, 8


def rates(y, prior=1.0):
    """A rate for each of many independent data sets, a row of ``y`` each."""
    with numpyro.plate("sets", SETS):
        rate = numpyro.sample("rate", dist.Gamma(2.0, prior))
    with numpyro.plate("data", y.shape[1]) as i:
        rows = dist.Exponential(rate).to_event(1)
        numpyro.sample("obs", rows, obs=y[:, i].T)


def ranks(prior):
    """Ranks of the true rates among draws from their posteriors."""
    rng = np.random.default_rng(4)
    true = rng.gamma(2.0, 1.0, SETS)
    y = rng.exponential(1 / true, (ROWS, SETS)).T
    mcmc = MCMC(
        AMAGOLD(rates), num_warmup=300, num_samples=960, thinning=5, progress_bar=False
    )
    mcmc.run(random.key(1), jnp.asarray(y, jnp.float32), prior)
    return (np.asarray(mcmc.get_samples()["rate"]) < true).mean(0)


@slow
def test_ranks_of_simulated_parameters_are_uniform():
    """Simulation-based calibration, which a wrong prior fails."""

    def probability(prior):
        counts, _ = np.histogram(ranks(prior), np.linspace(0, 1, BINS + 1))
        return chisquare(counts).pvalue

    assert probability(1.0) > 1e-4
    assert probability(3.0) < 1e-4


@slow
def test_a_control_variate_is_calibrated():
    """Batches of 8,000 rows, a set-up for each data set; another prior fails."""

    def probability(shape, sets):
        problem = PROBLEMS["counts"]
        problem = problem._replace(model=partial(problem.model, shape=shape))
        found = ranks_of(problem, SETTINGS["MinibatchMH"]["counts"], sets)
        counts, _ = np.histogram(found["rate"], np.linspace(0, 1, 6))
        return chisquare(counts).pvalue

    assert probability(2.0, sets=4) > 1e-4
    assert probability(8.0, sets=2) < 1e-4
