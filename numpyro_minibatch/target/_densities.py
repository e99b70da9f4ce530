"""Log densities of NumPyro's distributions, some of them without LAPACK."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import (
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    MultivariateNormal,
)
from numpyro.distributions.util import validate_sample

__all__ = ["log_prob"]

_SHORT = 4  # entries of a vector whose triangular system is solved entry by entry


def log_prob(fn: Any, value: Any) -> Array:
    """The log density of a distribution at a value.

    On CPUs, JAX solves a triangular system with LAPACK, whose threads wait for each
    other. With two numbers per row and 300 rows, it took 1 ms on an idle machine and 18
    ms on a busy one, which was 95% of the log density. XLA fuses a system of few
    numbers that is solved entry by entry with what surrounds it.

    :param fn: the distribution.
    :param value: a value in its support.
    """
    return _without_lapack(fn).log_prob(value)


def _without_lapack(fn: Any) -> Any:
    """The same distribution, with another program for its log density."""
    if isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        base = _without_lapack(fn.base_dist)
        if base is fn.base_dist:
            return fn
        fn = copy.copy(fn)
        fn.base_dist = base
        return fn
    if type(fn) is not MultivariateNormal or fn.event_shape[0] > _SHORT:
        return fn
    found = copy.copy(fn)
    found.__class__ = _ShortNormal
    return found


class _ShortNormal(MultivariateNormal):
    """A normal vector of few numbers."""

    @validate_sample
    def log_prob(self, value: Any) -> Array:
        """As that of the base class, which solves all systems at once."""
        away, factor = jnp.asarray(value) - self.loc, self.scale_tril
        solved: list[Array] = []
        total = jnp.zeros(())
        for i in range(self.event_shape[0]):
            inner = sum((factor[..., i, j] * x for j, x in enumerate(solved)), 0.0)
            pivot = factor[..., i, i]
            solved.append((away[..., i] - inner) / pivot)
            total = total - 0.5 * solved[-1] ** 2 - jnp.log(jnp.abs(pivot))
        return total - 0.5 * len(solved) * np.log(2 * np.pi)
