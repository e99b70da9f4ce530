"""The arguments of a model, and the rows among them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_minibatch._internal.precision import in_this_precision
from numpyro_minibatch.host_rows import HostRows
from numpyro_minibatch.target._contract import Indices

__all__ = [
    "Slices",
    "condition_inside",
    "flatten_arguments",
    "given_data",
    "indexable",
    "is_marginalized",
    "named_arguments",
    "with_bound_arguments",
]


class Slices(NamedTuple):
    """The rows among a model's arguments, for a model that does not index them.

    Such a model runs on a batch by receiving only the rows of the batch.

    :param leaves: ``(number, plate, axis)`` of each array with rows, by its number
        among the leaves of ``(args, kwargs)``.
    :param sites: ``(site, plate, dim)`` of observed sites in no plate whose batch
        dimension ``dim`` is that of the rows.
    :param same: ``(plate, other)`` of each plate that has the rows of another one.
    """

    leaves: tuple[tuple[int, str, int], ...]
    sites: tuple[tuple[str, str, int], ...] = ()
    same: tuple[tuple[str, str], ...] = ()

    @property
    def plates(self) -> set[str]:
        """The plates whose rows are passed to the model."""
        own = {plate for _, plate, _ in self.leaves}
        return own | {plate for plate, other in self.same if other in own}

    def by_plate(self, indices: Indices) -> dict[str, Any]:
        """The indices of all plates, also of those that have the rows of another."""
        others = {plate: indices[other] for plate, other in self.same}
        return {**indices, **others}

    def names(self, model: Callable, arguments: Any) -> list[str]:
        """The names of the arrays in the signature of the model.

        :param model: the model.
        :param arguments: its ``(args, kwargs)``.
        """
        leaves, treedef = flatten_arguments(arguments)
        numbers = jax.tree.unflatten(treedef, range(len(leaves)))
        names = {
            number: name + jax.tree_util.keystr(path)
            for name, tree in named_arguments(model, *numbers).items()
            for path, number in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        return [names[number] for number, _, _ in self.leaves]

    def take(self, arguments: Any, indices: Indices) -> Any:
        """A model's ``(args, kwargs)`` with only the rows ``indices``."""
        leaves, treedef = flatten_arguments(arguments)
        for number, plate, axis in self.leaves:
            x = leaves[number]
            if isinstance(x, HostRows) and x.in_place is not None:
                x = x.in_place
            if isinstance(x, HostRows):
                leaves[number] = x[indices[plate]]
                continue
            if not isinstance(x, jax.Array):  # such as an xarray.DataArray
                x = indexable(np.asarray(x))
            where = (slice(None),) * axis + (indices[plate],)
            # the indices of a batch are never out of range
            leaves[number] = jnp.asarray(x).at[where].get(mode="promise_in_bounds")
        return jax.tree.unflatten(treedef, leaves)


def flatten_arguments(arguments: Any) -> tuple[list[Any], Any]:
    """The leaves of a model's arguments; rows on the host are one leaf."""
    return jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, HostRows))


def named_arguments(
    model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A model's arguments by their names in its signature.

    :param model: the model.
    :param args: its positional arguments; ``args[i]`` is the name of one that the
        signature does not name.
    :param kwargs: its keyword arguments.
    """
    while isinstance(model, Messenger) and model.fn is not None:
        model = model.fn
    parameters: Iterable[inspect.Parameter] = ()
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(model).parameters.values()
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = [*positional, *(f"args[{i}]" for i in range(len(positional), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def with_bound_arguments(
    model: Any, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Any, tuple, Mapping[str, Any]]:
    """A model with all of its arguments, those of ``functools.partial`` included.

    Arrays that a partial function holds can have rows like any other argument. Inside
    of a marginalized model, so do the data of ``numpyro.handlers.condition``.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    """
    while isinstance(model, functools.partial):
        args, kwargs = (*model.args, *args), {**model.keywords, **kwargs}
        model = model.func
    if is_marginalized(model):
        inside, args, kwargs = with_bound_arguments(model.fn, args, kwargs)
        if isinstance(inside, handlers.condition) and inside.data:
            given = given_data(inside)
            inside, args, kwargs = with_bound_arguments(given, args, kwargs)
        if inside is not model.fn:
            model = replace(model, fn=inside)
    return model, args, kwargs


def condition_inside(model: Any) -> Any:
    """A marginalized model whose data are given by a handler inside of it.

    Without data, a marginalized model runs as it was written. It does not see those
    that ``numpyro.handlers.condition`` gives to its sites from outside.
    """
    if isinstance(model, functools.partial):
        inside = condition_inside(model.func)
        same = inside is model.func
        return (
            model if same else functools.partial(inside, *model.args, **model.keywords)
        )
    if isinstance(model, handlers.condition) and model.data:
        inside = condition_inside(model.fn)
        if is_marginalized(inside):
            return replace(inside, fn=handlers.condition(inside.fn, model.data))
    return model


@dataclass(frozen=True)
class GivenData:
    """A model whose observations are keyword arguments, which can have rows.

    :param fn: the model, which does not observe them.
    :param names: the sites, by the names of these arguments.
    """

    fn: Callable
    names: tuple[tuple[str, str], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, conditioned on the observations."""
        data = {site: kwargs.pop(name) for name, site in self.names}
        return handlers.condition(in_this_precision(self.fn), data)(*args, **kwargs)


def given_data(model: handlers.condition) -> Callable:
    """A conditioned model, with its observations as arguments of a partial function.

    :param model: the model in ``numpyro.handlers.condition``.
    """
    data = {f"data of {site}": value for site, value in model.data.items()}
    names = tuple(zip(data, model.data, strict=True))
    return functools.partial(GivenData(model.fn, names), **data)


def is_marginalized(model: Any) -> bool:
    """Whether this is a model that ``marginalize`` returned."""
    return bool(getattr(model, "marginalizes", False))


def indexable(leaf: Any) -> Any:
    """Convert to a JAX array, because a traced batch cannot index NumPy arrays."""
    numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
    if not numeric:
        return leaf
    # With the precision by name: JAX remembers constants by the identity of their
    # arrays, and would return the float64 numbers of a trace in double precision here.
    return jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
