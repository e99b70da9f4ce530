"""The model that a kernel samples, if it differs from the model as the user wrote it.

NUTS runs a model with the values of all data, and marginalizes discrete latent sites. A
minibatch kernel does so too: NumPy functions receive the values of all rows, and
discrete sites that have a value for each row are marginalized. Data that
``numpyro.handlers.condition`` holds become arguments, from which a batch takes rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from numpyro import handlers
from numpyro.util import find_stack_level

from numpyro_minibatch._model.indexing import fails_on_rows
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch._model.numpy_calls import ReadsValues
from numpyro_minibatch._model.sites import latents_needed, local_sites
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.target import (
    condition_inside,
    given_data,
    is_marginalized,
    with_bound_arguments,
)

__all__ = ["Inspected", "PreparedModel", "prepare_model", "warn_of_angles"]

Inspected = tuple[Layout, dict[str, Any]]


class PreparedModel(NamedTuple):
    """A model that can be sampled.

    :param model: the model; the user's own, if nothing had to be done.
    :param found: the result of its inspection.
    :param marginalized: discrete sites that are marginalized out of the user's model.
    :param values: a digest of the data whose values the model reads; empty for none.
    """

    model: Callable
    found: Inspected
    marginalized: tuple[str, ...] = ()
    values: str = ""


def prepare_model(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    inspect: Callable[[Callable], Inspected],
) -> PreparedModel:
    """The model to sample, and the result of its inspection.

    It is the user's model if that can be sampled as it is. Otherwise conditioned data
    become arguments, NumPy functions receive the values of all rows, and discrete sites
    with a value for each row are marginalized.

    :param model: the user's model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param inspect: an inspection, which raises where a model cannot be sampled.
    :raises TypeError: the model needs values that have no meaning for all rows.
    :raises ValueError: no such model can be sampled. The message states the change that
        remains to be made.
    """
    model = condition_inside(model)
    if isinstance(model, partial):
        return _prepare_inside(model, args, kwargs, inspect)
    try:
        found = inspect(model)
    except (ValueError, TypeError) as error:
        reason = error
    else:
        return _with_values_of_all_rows(model, args, kwargs, inspect, found)
    if isinstance(model, handlers.condition) and model.data:
        try:
            return prepare_model(given_data(model), args, kwargs, inspect)
        except (ValueError, TypeError):  # the message is to name what the user wrote
            raise reason from None
    values = ""
    reading, known = _reading(model, args, kwargs)
    # a marginalized model is run as it was written as well, where NumPy has no values
    # of a latent site
    as_written = known is not None and is_marginalized(model)
    if as_written and latents_needed("", model, args, kwargs):
        raise reason
    if known is not None:
        model, values = reading, known.digest
        try:
            return PreparedModel(model, inspect(model), values=values)
        except ValueError as error:
            # all rows where the model needs a row each: the line is the reason
            if isinstance(reason, TypeError) and fails_on_rows(error):
                raise reason from None
            reason = error
        except TypeError:  # not only what NumPy computes needs values
            raise reason from None
    local = local_sites(model, args, kwargs)
    if not local.discrete:
        raise reason
    # loaded where it is needed, like all that analyses a model
    from numpyro_minibatch.marginal import marginalize

    summed = marginalize(model, sites=local.discrete)
    try:
        return PreparedModel(summed, inspect(summed), local.discrete, values)
    except ValueError as left:
        # continuous sites are not integrated out without being asked for: their draws
        # would be missing, and a quadrature has an error
        raise (reason if local.continuous else left) from None


def warn_of_angles(
    who: str, prepared: PreparedModel, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Warn of angles, whose support ends at one point on both sides.

    :param who: the kernel's name.
    :param prepared: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    """
    for name in prepared.found[0].angles:
        warnings.warn(
            f"{who}: latent site {name!r} is an angle, and its posterior is sampled as "
            "two modes if it lies around -pi and pi, which are the same angle: write "
            f"numpyro.handlers.reparam(model, config={{{name!r}: CircularReparam()}}), "
            "with numpyro.infer.reparam.CircularReparam.",
            UserWarning,
            stacklevel=find_stack_level(),
        )
    model, args, kwargs = with_bound_arguments(prepared.model, args, kwargs)
    if not is_marginalized(model) or find_rows((args, dict(kwargs))):
        return
    for name in model.angles(args, kwargs):  # type: ignore[attr-defined]
        warnings.warn(
            f"{who}: marginalize integrates {name!r} as a number between -pi and pi, "
            "which is inaccurate for rows with an angle around these ends: write it as "
            "a discrete site of equally spaced angles, grid = jnp.linspace(-jnp.pi, "
            f"jnp.pi, 65)[:-1] and {name} = grid[numpyro.sample({name!r}, dist."
            "Categorical(logits=dist.VonMises(mean, concentration).log_prob(grid)))].",
            UserWarning,
            stacklevel=find_stack_level(),
        )


def _with_values_of_all_rows(
    model: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    inspect: Callable[[Callable], Inspected],
    found: Inspected,
) -> PreparedModel:
    """A model that runs on rows of its arguments, with the numbers of all of them.

    ``np.mean(x)`` and some other functions run on the rows of a batch as well, but mean
    the number of all rows.

    :param found: the result of the inspection of the model as it is.
    """
    if found[0].slices is not None:
        reading, known = _reading(model, args, kwargs)
        if known is not None and known.reads:
            try:
                return PreparedModel(reading, inspect(reading), values=known.digest)
            except (ValueError, TypeError):  # such as the sum of each row, along axis 1
                pass
    return PreparedModel(model, found)


def _prepare_inside(
    model: partial,
    args: tuple,
    kwargs: Mapping[str, Any],
    inspect: Callable[[Callable], Inspected],
) -> PreparedModel:
    """The same for a partial function, whose arguments are arguments of the model."""

    def bound(inner: Callable) -> Callable:
        if inner is model.func:
            return model
        return partial(inner, *model.args, **model.keywords)

    fn, args, kwargs = with_bound_arguments(model, args, kwargs)
    found = prepare_model(fn, args, kwargs, lambda inner: inspect(bound(inner)))
    return found._replace(model=bound(found.model))


def _reading(
    model: Any, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Any, ReadsValues | None]:
    """A model that reads the values of all rows, if it calls NumPy with arguments."""
    if is_marginalized(model):  # the values are for the model inside
        inner, known = _reading(model.fn, args, kwargs)
        return replace(model, fn=inner), known
    known = ReadsValues.of(model, args, kwargs)
    return known, known
