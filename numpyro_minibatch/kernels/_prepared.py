"""The model that a kernel samples, where it is not the user's as it is written.

NUTS sums out discrete latent sites by itself. So does a kernel, for sites that have a
value for each row: it samples the marginalized model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpyro_minibatch._model.preflight import Layout, local_sites

__all__ = ["Inspected", "prepare_model"]

Inspected = tuple[Layout, dict[str, Any]]


def prepare_model(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    inspect: Callable[[Callable], Inspected],
) -> tuple[Callable, Inspected]:
    """The model to sample, and what an inspection finds of it.

    It is the user's where that can be sampled as it is. Otherwise its discrete sites
    with a value for each row are summed out.

    :param model: the user's model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param inspect: an inspection, which raises where a model cannot be sampled.
    :raises ValueError: neither model can be sampled. The message is about what is left
        to be changed.
    """
    try:
        return model, inspect(model)
    except ValueError as error:
        local = local_sites(model, args, kwargs)
        if not local.discrete:
            raise
        # loaded where it is needed, like all that analyses a model
        from numpyro_minibatch.marginal import marginalize

        summed = marginalize(model, sites=local.discrete)
        try:
            return summed, inspect(summed)
        except ValueError as left:
            # continuous sites are not integrated out without being asked for: their
            # draws would be missing, and a quadrature has an error
            raise (error if local.continuous else left) from None
