"""The prior of a model: whether it can be drawn from, and its tails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import MaskedDistribution

from numpyro_minibatch.target import ModelTarget, data_frames

__all__ = ["check_prior", "heavy_tailed"]

_FAR, _FURTHER = 1e8, 1e12  # values at which tails are compared
_POWER = 10.0  # largest ratio of the exponents there; 1 for a power law


def heavy_tailed(
    target: ModelTarget, one_row: Any, values: Mapping[str, Any]
) -> list[str]:
    """The names of the latent sites whose priors have heavy tails.

    The log density of a power law, such as that of a Cauchy distribution, changes by
    the same amount whenever the value is multiplied by some factor. With an exponential
    tail, the change near 1e12 is 10,000 times that near 1e8.

    :param target: the model's target, in double precision.
    :param one_row: one row of each data plate.
    :param values: constrained values of the latent sites, on which the priors of others
        may depend.
    """
    found = []
    for name, site in target.trace(one_row, data=values).items():
        if name not in values or site["type"] != "sample":
            continue
        fn, shape = site["fn"], jnp.shape(site["value"])

        def exponent(size: float, fn: Any = fn, shape: Any = shape) -> Array:
            far = jnp.full(shape, size)
            return -jnp.sum(far * jax.grad(lambda x: fn.log_prob(x).sum())(far))

        if not jnp.issubdtype(jnp.result_type(site["value"]), jnp.floating):
            continue
        if not jnp.all(fn.support(jnp.full(shape, _FURTHER))):
            continue
        near, far = exponent(_FAR), exponent(_FURTHER)
        if jnp.isfinite(near) & (far <= _POWER * near):
            found.append(name)
    return found


def check_prior(who: str, target: ModelTarget) -> None:
    """Raise unless running the model draws its latent sites from its prior.

    :param who: the kernel's name, for the messages.
    :param target: the model's target.
    :raises ValueError: its prior cannot be drawn from, or has other factors.
    """
    problem = ""

    def run(key: Array) -> None:
        nonlocal problem
        one_row = {name: jnp.zeros(1, jnp.int32) for name in target.sizes}
        for name, site in target.trace(one_row, key).items():
            if site["type"] != "sample" or data_frames(site, target.sizes):
                continue
            if site["is_observed"] and site["infer"].get("is_auxiliary", False):
                problem = f"the factor {name!r} changes the prior"
            elif not site["is_observed"] and site["scale"] is not None:
                problem = f"site {name!r} has a scale"
            elif not site["is_observed"] and isinstance(site["fn"], MaskedDistribution):
                problem = f"site {name!r} has a mask"

    try:
        jax.eval_shape(run, jax.random.PRNGKey(0))
    except NotImplementedError:
        problem = "a latent site has a distribution without draws (ImproperUniform?)"
    if problem:
        raise ValueError(
            f"{who}(temperatures=[..., inf]) makes draws of the prior at the hottest "
            f"rung, which running this model does not: {problem}. Change the model, or "
            "end the ladder at a finite temperature."
        )
