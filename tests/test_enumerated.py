"""Kernels marginalize discrete sites with a value for each row, as NUTS does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS, Predictive
from scipy.special import logsumexp
from scipy.stats import norm

from numpyro_minibatch import AMAGOLD, MINT
from numpyro_minibatch.kernels._shared.numpyro import NumPyroKernel

N = 40
Y = np.random.default_rng(0).normal(size=N) * 2.0
Z = {"w": jnp.array(0.3), "means": jnp.array([-1.0, 2.0])}
KEY = jax.random.key(0)
ROWS = jnp.array([7, 0, 39, 11])


def parameters() -> Any:
    w = numpyro.sample("w", dist.Beta(2.0, 2.0))
    return w, numpyro.sample("means", dist.Normal(0.0, 2.0).expand([2]).to_event(1))


def mixture(y: Any = None, size: int = N) -> None:
    w, means = parameters()
    with numpyro.plate("data", size):
        kind = numpyro.sample(
            "kind", dist.Bernoulli(w), infer={"enumerate": "parallel"}
        )
        numpyro.sample("y", dist.Normal(means[kind], 1.0), obs=y)


def mixture_with_indices(y: Any = None, size: int = N) -> None:
    w, means = parameters()
    with numpyro.plate("data", size, subsample_size=8) as idx:
        kind = numpyro.sample("kind", dist.Bernoulli(w))
        rows = None if y is None else y[idx]
        numpyro.sample("y", dist.Normal(means[kind], 1.0), obs=rows)


def expected() -> np.ndarray:
    """The log likelihood of some rows, by hand."""
    w = 1.0 / (1.0 + np.exp(-0.3))
    parts = norm.logpdf(Y[np.asarray(ROWS), None], np.array([-1.0, 2.0]))
    return logsumexp(parts, b=[1.0 - w, w], axis=1)


KERNELS = {
    "MINT": lambda model, **size: MINT(model, temperature=2.0, **size),
    "AMAGOLD": lambda model, **size: AMAGOLD(model, step_size=1e-2, **size),
}


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("model", [mixture, mixture_with_indices])
def test_the_rows_are_sums_over_the_states(make: Any, model: Any) -> None:
    size = {"batch_size": 8} if model is mixture else {}
    kernel = make(model, **size)
    kernel._setup((jnp.asarray(Y),), {})
    assert kernel.layout.latents == ("w", "means")
    assert kernel.settings["marginalized"] == ["kind"]
    terms = kernel.make_target((jnp.asarray(Y),), {}).terms(Z, {"data": ROWS})
    np.testing.assert_allclose(terms.rows["data"], expected(), rtol=1e-5)


def test_numpyros_kernels_on_a_ladder_sum_them_out_too() -> None:
    kernel = NumPyroKernel(NUTS(mixture))
    kernel._setup((jnp.asarray(Y),), {})
    assert kernel.layout.latents == ("w", "means")


def test_what_reads_the_kernel_draws_the_sites_from_the_prior() -> None:
    kernel = MINT(mixture, batch_size=8, temperature=2.0)
    kernel._setup((jnp.asarray(Y),), {})
    assert kernel.model is not None
    drawn = Predictive(kernel.model, num_samples=3)(KEY)
    assert drawn["kind"].shape == drawn["y"].shape == (3, N)


def both_kinds(y: Any) -> None:
    w, means = parameters()
    with numpyro.plate("data", N):
        kind = numpyro.sample("kind", dist.Bernoulli(w))
        effect = numpyro.sample("effect", dist.Normal(means[kind], 1.0))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def shared_by_rows(y: Any) -> None:
    _, means = parameters()
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(means[kind], 1.0), obs=y)


def without_a_finite_support(y: Any) -> None:
    _, means = parameters()
    with numpyro.plate("data", N):
        count = numpyro.sample("count", dist.Poisson(2.0))
        numpyro.sample("y", dist.Normal(means[0] + count, 1.0), obs=y)


def with_four_numbers(y: Any) -> None:
    _, means = parameters()
    with numpyro.plate("data", N):
        a = numpyro.sample("a", dist.Dirichlet(jnp.ones(4)))
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(means[0] + b + a[..., 0], 1.0), obs=y)


def with_too_many_states(y: Any) -> None:
    _, means = parameters()
    with numpyro.plate("data", N):
        total = sum(numpyro.sample(f"bit{i}", dist.Bernoulli(0.5)) for i in range(13))
        numpyro.sample("y", dist.Normal(means[0] + total, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (both_kinds, r'marginalize\(model, sites=\["kind", "effect"\]\)'),
        (shared_by_rows, "'kind' is discrete. It is not a variable of single rows"),
        (without_a_finite_support, "'count' has no finite support.*NegativeBinomial2"),
        (with_four_numbers, r"4 continuous latent numbers, 'a' \(3\), 'b' \(1\)"),
        (with_too_many_states, "8192 joint states of the discrete sites of a row"),
    ],
)
def test_sites_that_cannot_be_marginalized_are_refused(model: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AMAGOLD(model, step_size=1e-2, batch_size=8)._setup((jnp.asarray(Y),), {})
