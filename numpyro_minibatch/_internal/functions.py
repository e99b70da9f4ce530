"""Copies of Python functions that read other values from their surroundings."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from numpyro.primitives import Messenger

__all__ = ["library_of", "reading", "with_attributes"]

# code of others, which is left as it is
_LIBRARIES = sys.stdlib_module_names | {
    *("arviz", "blackjax", "chex", "distrax", "equinox", "flax", "funsor", "haiku"),
    *("jax", "jaxlib", "jaxtyping", "numpy", "numpyro", "numpyro_minibatch", "optax"),
    *("_pytest", "pandas", "pluggy", "pytest", "scipy", "sklearn"),
    *("tensorflow_probability", "xarray"),
}

_Compiled: Any = type(jax.jit(lambda: None))
# a model may read long lists of these
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}


def library_of(value: Any) -> str:
    """The library of a module or a function.

    :param value: the module or the function.
    :return: the first part of its name; empty for other values.
    """
    name = getattr(value, "__name__" if inspect.ismodule(value) else "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def reading(model: Any, replace: Callable[[Any], Any]) -> Any:
    """A function that reads replacements of its global names and enclosing variables.

    Functions of the same author that it calls read them too, as do attributes of its
    author's objects and modules. Code of libraries stays as it is.

    :param model: a function, a method, an object that is called, or partial functions
        or handlers around one; or any other value that such a function receives.
    :param replace: from a value that is none of these to its replacement.
    """
    return _Copies(replace).of(model)


def with_attributes(value: Any) -> bool:
    """Whether a function reads attributes of an object by copies of the object.

    Those are the objects of its author, namespaces and NumPyro's handlers.

    :param value: the object.
    """
    kind = type(value)
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    known = kind is types.SimpleNamespace or isinstance(value, Messenger)
    return known or library_of(kind) not in _LIBRARIES


class _Copies:
    """Copies of functions and of objects with attributes, one of each.

    :param replace: from any other value to its replacement.
    """

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self._replace = replace
        # with the originals, so that no other value gets their ids
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """The copy of a value, or the value itself if it reads no replacement."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, value  # it may contain itself
            self._made[id(value)] = value, self._copy(value)
        return self._made[id(value)][1]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__)
            return types.MethodType(self.of(value.__func__), owner)
        if isinstance(value, functools.partial):
            args = map(self.of, value.args)
            kwargs = {name: self.of(x) for name, x in value.keywords.items()}
            return functools.partial(self.of(value.func), *args, **kwargs)
        if isinstance(value, _Compiled):  # it would keep the constants of its programs
            known = library_of(value) in _LIBRARIES
            return value if known else self.of(value.__wrapped__)
        if isinstance(value, types.FunctionType):
            known = library_of(value) in _LIBRARIES
            return value if known else self._of_function(value)
        return self._of_object(self._replace(self._of_tree(value)))

    def _of_tree(self, value: Any) -> Any:
        """A tree with other leaves."""
        try:
            leaves, treedef = jax.tree.flatten(value, _is_iterator)
        except (TypeError, ValueError):  # a dict whose keys have no order
            return value
        if jax.tree_util.treedef_is_leaf(treedef):
            return value
        new = [self.of(leaf) for leaf in leaves]
        same = all(map(operator.is_, new, leaves))
        return value if same else jax.tree.unflatten(treedef, new)

    def _of_function(self, function: types.FunctionType) -> Any:
        scope, cells = dict(function.__globals__), function.__closure__ or ()
        read = {name: scope[name] for name in _names(function.__code__) & scope.keys()}
        new = types.FunctionType(
            function.__code__,
            scope,
            function.__name__,
            closure=tuple(types.CellType() for _ in cells),
        )
        new.__dict__.update(function.__dict__)
        # before the functions that it calls, which may call it
        self._made[id(function)] = function, new
        scope.update({name: self.of(value) for name, value in read.items()})
        same = all(scope[name] is value for name, value in read.items())
        for cell, old in zip(new.__closure__ or (), cells, strict=True):
            try:
                cell.cell_contents = self.of(old.cell_contents)
            except ValueError:  # not yet assigned
                continue
            same &= cell.cell_contents is old.cell_contents
        defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
        new.__defaults__ = tuple(map(self.of, defaults))
        new.__kwdefaults__ = {name: self.of(value) for name, value in by_name.items()}
        same &= all(map(operator.is_, new.__defaults__, defaults))
        same &= all(new.__kwdefaults__[name] is x for name, x in by_name.items())
        return function if same else new

    def _of_object(self, value: Any) -> Any:
        """An object or a module with other attributes."""
        if isinstance(value, types.ModuleType):
            return value if library_of(value) in _LIBRARIES else _Module(value, self.of)
        if not with_attributes(value):
            return value
        kind = type(value)
        attributes = {
            name: new
            for name, old in vars(value).items()
            if (new := self.of(old)) is not old
        }
        methods = {
            name: new
            for base in reversed(kind.__mro__)
            for name, old in vars(base).items()
            if isinstance(old, types.FunctionType)
            and library_of(base) not in _LIBRARIES
            and (new := self.of(old)) is not old
        }
        if not attributes and not methods:
            return value
        if methods:
            try:
                kind = types.new_class(
                    kind.__name__, (kind,), exec_body=lambda body: body.update(methods)
                )
            except TypeError:  # no class can inherit from it, such as that of an Enum
                return value
        other = copy.copy(value)
        other.__dict__.update(attributes)
        if methods:
            object.__setattr__(other, "__class__", kind)
        return other


class _Module(types.ModuleType):
    """A module whose attributes are replaced.

    :param module: the module.
    :param of: from an attribute to its replacement.
    """

    def __init__(self, module: types.ModuleType, of: Callable[[Any], Any]) -> None:
        super().__init__(module.__name__)
        self._module, self._of = module, of

    def __getattr__(self, name: str) -> Any:
        return self._of(getattr(self._module, name))


def _is_iterator(value: Any) -> bool:
    """Whether this is no tree, although it is iterable."""
    return isinstance(value, Iterator)


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
