"""Log densities that are computed without LAPACK are those of NumPyro."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_minibatch.target._densities import log_prob

RNG = np.random.default_rng(0)


def factors(*batch: int, size: int) -> np.ndarray:
    """Lower Cholesky factors."""
    lower = np.tril(RNG.normal(size=(*batch, size, size)), -1)
    return lower + np.exp(RNG.normal(size=size)) * np.eye(size)


def normal(*batch: int, size: int, each: bool = True) -> Any:
    loc = RNG.normal(size=(*batch, size))
    factor = factors(*(batch if each else ()), size=size)
    return dist.MultivariateNormal(loc, scale_tril=factor)


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "one factor for all": (lambda: normal(5, size=2, each=False), (5, 2)),
    "a factor of each": (lambda: normal(5, size=3), (5, 3)),
    "draws in front": (lambda: normal(5, size=2), (4, 5, 2)),
    "axes between": (
        lambda: dist.MultivariateNormal(np.zeros(2), scale_tril=factors(3, 1, size=2)),
        (3, 5, 2),
    ),
    "a covariance": (
        lambda: dist.MultivariateNormal(0.0, np.array([[2.0, 0.5], [0.5, 1.0]])),
        (2,),
    ),
    "expanded": (lambda: normal(1, size=4).expand([5]), (5, 4)),
    "an event": (lambda: normal(5, size=2).to_event(1), (3, 5, 2)),
    "masked": (lambda: normal(3, size=2).mask(np.array([True, False, True])), (3, 2)),
    "expanded, masked, an event": (
        lambda: normal(size=2).expand([5]).mask(np.arange(5) < 3).to_event(1),
        (5, 2),
    ),
}


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("name", CASES)
def test_short_normal_vectors_have_the_densities_of_numpyro(name: str) -> None:
    make, shape = CASES[name]
    fn, value = make(), jnp.asarray(RNG.normal(size=shape), float)
    expected, found = fn.log_prob(value), log_prob(fn, value)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    slopes = [
        jax.grad(lambda x, f=f: f(x).sum())(value)
        for f in (fn.log_prob, lambda x: log_prob(fn, x))
    ]
    np.testing.assert_allclose(*slopes, rtol=2e-4, atol=1e-4)
    text = jax.jit(lambda x: log_prob(fn, x)).lower(value).as_text()
    assert "triangular" not in text and "trsm" not in text
    assert fn.log_prob(value).shape == expected.shape  # the user's is as it was
    assert type(fn) is type(make())


def test_other_distributions_are_left_alone() -> None:
    long = dist.MultivariateNormal(np.zeros(9), np.eye(9))
    for fn in (long, dist.Normal(0.0, 1.0), dist.Normal(0.0, 1.0).expand([3])):
        value = jnp.ones(fn.shape())
        np.testing.assert_array_equal(log_prob(fn, value), fn.log_prob(value))
    checked = dist.MultivariateNormal(np.zeros(2), np.eye(2), validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        assert log_prob(checked, jnp.array([0.0, jnp.nan])) == -jnp.inf
