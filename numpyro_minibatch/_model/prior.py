"""Whether running a model draws its latent sites from its prior."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import MaskedDistribution

from numpyro_minibatch.target import ModelTarget, data_frames

__all__ = ["check_prior"]


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
