"""Rows that the user names: the arguments of a model that have them, and their axes.

The form is that of ``in_axes`` of :func:`jax.vmap`, by the names of arguments: an axis,
or a tree of axes that is a prefix of the argument's tree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_minibatch.host_rows import HostRows
from numpyro_minibatch.target import flatten_arguments, named_arguments

__all__ = ["NamedRows", "RowAxes", "suggestion"]


class NamedRows(NamedTuple):
    """An array of a model that has rows.

    :param leaf: its number among the leaves of ``(args, kwargs)``.
    :param axis: the axis of the rows, from the first axis on.
    :param size: the number of rows.
    :param name: its name, for messages.
    """

    leaf: int
    axis: int
    size: int
    name: str


@dataclass(frozen=True)
class RowAxes:
    """The setting ``rows=`` of a kernel.

    :param given: by the name of an argument its axis of rows, or a tree of axes.
    """

    given: Mapping[str, Any]

    @classmethod
    def of(cls, who: str, given: Any) -> RowAxes | None:
        """The setting, from the user's argument.

        :param who: the kernel's name, for the messages.
        :param given: a mapping by names, or ``None``.
        :raises TypeError: it is no mapping from names to trees of axes.
        """
        if given is None or isinstance(given, cls):
            return given
        problem = ""
        if not isinstance(given, Mapping) or not given:
            problem = f"got {given!r}"
        else:
            for name, axes in given.items():
                if not isinstance(name, str):
                    problem = f"got the name {name!r}"
                for axis in jax.tree.leaves(axes):
                    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
                        problem = f"got the axis {axis!r} for {name!r}"
        if problem:
            raise TypeError(
                f"{who}(rows=...) must give an axis to each argument of the model that "
                f"has the rows of the data, {problem}. Write for example "
                'rows={"X": 0, "y": 0}, or rows={"data": {"X": 0, "y": 0}} for a dict.'
            )
        return cls(copy.deepcopy(dict(given)))

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.given)))

    def __repr__(self) -> str:
        return repr(dict(self.given))

    def find(
        self, who: str, model: Callable, args: tuple, kwargs: Mapping[str, Any]
    ) -> list[NamedRows]:
        """The arrays of these arguments that have rows.

        :param who: the kernel's name, for the messages.
        :param model: the model.
        :param args: its positional arguments.
        :param kwargs: its keyword arguments.
        :raises ValueError: the names, trees or axes do not fit the arguments.
        """
        who = f"{who}(rows={self!r})"
        leaves, treedef = flatten_arguments((args, dict(kwargs)))
        numbers = jax.tree.unflatten(treedef, range(len(leaves)))
        arguments = named_arguments(model, *numbers)
        found: list[NamedRows] = []
        for name, axes in self.given.items():
            if name not in arguments:
                raise ValueError(
                    f"{who} names {name!r}, which is none of the arguments that the "
                    f"model got: {', '.join(map(repr, arguments)) or 'it got none'}."
                )
            for number, axis, place in _matched(who, axes, arguments[name], name):
                found.append(_read(who, leaves[number], number, axis, place))
        if not found:
            raise ValueError(
                f"{who} gives no axis to any array. Write the axis of the rows, as in "
                'rows={"X": 0, "y": 0}, or leave rows out.'
            )
        return found


def _matched(
    who: str, axes: Any, numbers: Any, name: str
) -> Iterable[tuple[int, int, str]]:
    """The numbers, axes and names of the arrays that a tree of axes has rows of."""
    if axes is None:
        return
    if isinstance(axes, Mapping):
        fields = getattr(numbers, "_fields", None)
        within = (
            numbers
            if isinstance(numbers, Mapping)
            else {field: getattr(numbers, field) for field in fields or ()}
        )
        for key, inner in axes.items():
            if key not in within:
                has = ", ".join(map(repr, within)) if within else "no names"
                raise ValueError(f"{who}: {name} has no {key!r}; it has {has}.")
            place = f"{name}[{key!r}]" if fields is None else f"{name}.{key}"
            yield from _matched(who, inner, within[key], place)
    elif isinstance(axes, list | tuple):
        if not isinstance(numbers, list | tuple) or len(numbers) != len(axes):
            has = (
                f"{len(numbers)} entries"
                if isinstance(numbers, list | tuple)
                else "no entries"
            )
            raise ValueError(
                f"{who} gives {len(axes)} axes to the entries of {name}, which has "
                f"{has}. Give each entry an axis, or None if it has no rows."
            )
        for k, (inner, value) in enumerate(zip(axes, numbers, strict=True)):
            yield from _matched(who, inner, value, f"{name}[{k}]")
    else:
        paths = jax.tree_util.tree_flatten_with_path(numbers)[0]
        for path, number in paths:
            yield number, int(axes), name + jax.tree_util.keystr(path)


def _read(who: str, leaf: Any, number: int, axis: int, name: str) -> NamedRows:
    """The rows of one array."""
    if not hasattr(leaf, "shape"):
        raise ValueError(
            f"{who}: {name} is of type {type(leaf).__name__} and not an array, so it "
            "has no axis of rows. Give it None, or leave it out."
        )
    shape = np.shape(leaf)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{who}: {name} has shape {shape}, and no axis {axis}. Write the axis of "
            "the rows, or None if it has none."
        )
    axis = axis % len(shape)
    if isinstance(leaf, HostRows) and axis:
        raise ValueError(
            f"{who}: {name} is HostRows, which are read along their first axis. "
            "Transpose the data and write axis 0."
        )
    return NamedRows(number, axis, shape[axis], name)


def suggestion(model: Callable, arguments: Any, leaves: Iterable[Any]) -> str:
    """An example of ``rows=`` with the model's own names.

    :param model: the model.
    :param arguments: its ``(args, kwargs)``.
    :param leaves: ``(number, plate, axis)`` of the arrays that could have rows.
    """
    axes = {number: axis for number, _, axis in leaves}
    flat, treedef = flatten_arguments(arguments)
    numbers = jax.tree.unflatten(treedef, range(len(flat)))
    found: dict[str, Any] = {}
    for name, tree in named_arguments(model, *numbers).items():
        within = [axes.get(number) for number in jax.tree.leaves(tree)]
        some = {axis for axis in within if axis is not None}
        if len(some) == 1 and None not in within:
            found[name] = some.pop()
        elif some and isinstance(tree, Mapping):
            found[name] = {
                key: axes[value]
                for key, value in tree.items()
                if isinstance(value, int) and value in axes
            }
        elif some:
            found[name] = jax.tree.map(axes.get, tree)
    return f"rows={found!r}"
