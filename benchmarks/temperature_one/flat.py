"""A NumPyro model as functions of one unconstrained vector, for any NumPyro version."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to


class Flat:
    """The log density of a model over a vector of its unconstrained latent sites.

    The sites are in alphabetical order, like those of `ravel_pytree`.

    :param model: a model with one data plate and no subsampling.
    :param args: its arguments; only their first rows are read.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.model = model
        few = [arg[:2] for arg in args]
        seeded = handlers.seed(model, jax.random.PRNGKey(0))
        trace = handlers.trace(seeded).get_trace(*few)
        latent = {
            name: site
            for name, site in sorted(trace.items())
            if site["type"] == "sample" and not site["is_observed"]
        }
        self.transforms = {k: biject_to(v["fn"].support) for k, v in latent.items()}
        self.shapes = {k: jnp.shape(v["value"]) for k, v in latent.items()}
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    def unravel(self, z: Array) -> dict[str, Array]:
        """The unconstrained sites of the vector ``z``."""
        sites, start = {}, 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape)
            sites[name], start = z[start:stop].reshape(shape), stop
        return sites

    def constrain(self, z: Array) -> dict[str, Array]:
        """The sites' values at ``z``, as its `sample` statements return them."""
        return {k: self.transforms[k](v) for k, v in self.unravel(z).items()}

    def ravel(self, values: Mapping[str, Array]) -> Array:
        """The vector of the latent sites' constrained values."""
        parts = [jnp.ravel(self.transforms[k].inv(values[k])) for k in self.shapes]
        return jnp.concatenate(parts)

    def terms(self, z: Array, *args: Any) -> tuple[Array, Array]:
        """The log prior of ``z`` and the log likelihood of each row of ``args``."""
        unconstrained, values = self.unravel(z), self.constrain(z)
        model = handlers.substitute(self.model, data=values)
        prior, rows = jnp.zeros(()), jnp.zeros(())
        for name, site in handlers.trace(model).get_trace(*args).items():
            if site["type"] != "sample":
                continue
            log_prob = site["fn"].log_prob(site["value"])
            if site["is_observed"]:
                rows = rows + log_prob
            else:
                volume = self.transforms[name].log_abs_det_jacobian(
                    unconstrained[name], values[name]
                )
                prior = prior + jnp.sum(log_prob) + jnp.sum(volume)
        return prior, rows

    def log_density(self, z: Array, *args: Any) -> Array:
        """The log density of the posterior, up to a constant."""
        prior, rows = self.terms(z, *args)
        return prior + rows.sum()

    def reported(self, z: Array, names: tuple[str, ...], few: tuple[Any, ...]) -> Array:
        """The sites ``names``, deterministic ones too, as one vector.

        :param few: a few rows of the model's arguments, whose values do not matter.
        """
        model = handlers.substitute(self.model, data=self.constrain(z))
        trace = handlers.trace(model).get_trace(*few)
        return jnp.concatenate([jnp.ravel(trace[name]["value"]) for name in names])


def reported_draws(
    flat: Flat, draws: np.ndarray, names: tuple[str, ...], args: tuple[Any, ...]
) -> np.ndarray:
    """The reported sites of each of ``draws``, shape ``(draws, quantities)``."""
    few = tuple(arg[:2] for arg in args)
    fn = jax.jit(jax.vmap(lambda z: flat.reported(z, names, few)))
    blocks = [
        np.asarray(fn(draws[i : i + 50_000])) for i in range(0, len(draws), 50_000)
    ]
    return np.concatenate(blocks)
