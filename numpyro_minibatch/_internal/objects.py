"""Copies of objects in which other objects take the place of some parts."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["rebuilt"]

# never taken apart; JAX's arrays are not copied to the host
_WHOLE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(np.ndarray, np.generic, np.ufunc, jax.Array),
)


def rebuilt(value: Any, replace: Callable[[Any], Any]) -> Any:
    """An object with other arrays, wherever it holds them, such as a table.

    The object is taken apart and put together by its own rules for pickling, which its
    library keeps up to date. Buffers, functions and classes are not copied.

    :param value: the object.
    :param replace: from an array that it holds to its replacement.
    :return: the object itself if none of its arrays is replaced or if it cannot be
        pickled.
    """
    taken, kept, buffers = io.BytesIO(), _Kept(replace), list[pickle.PickleBuffer]()
    try:
        pickler = _Pickler(taken, protocol=5, buffer_callback=buffers.append)
        pickler.kept = kept
        pickler.dump(value)
        if not kept.replaced:
            return value
        taken.seek(0)
        unpickler = _Unpickler(taken, buffers=buffers)
        unpickler.kept = kept
        return unpickler.load()
    except Exception:  # an open file, say
        return value


class _Kept(list[Any]):
    """The parts of an object that were not taken apart."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        super().__init__()
        self._replace, self.replaced = replace, False

    def number(self, part: Any) -> int:
        """The place of a part in this list."""
        self.append(self._replace(part))
        self.replaced |= self[-1] is not part
        return len(self) - 1


class _Pickler(pickle.Pickler):
    kept: _Kept

    def persistent_id(self, value: Any) -> int | None:
        return self.kept.number(value) if isinstance(value, _WHOLE) else None


class _Unpickler(pickle.Unpickler):
    kept: _Kept

    def persistent_load(self, number: Any) -> Any:
        return self.kept[number]
