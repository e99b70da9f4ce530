"""A model's arguments in two parts: arrays, and what a compiled program depends on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

__all__ = ["Static"]


@dataclass(frozen=True, eq=False)
class Static:
    """The part of a model's arguments that is not arrays; a key of compiled functions.

    Leaves without a hash are the same only if they are the same object.

    :param treedef: the structure of ``(args, kwargs)``.
    :param leaves: its leaves, with a mark where an array goes.
    """

    treedef: Any
    leaves: tuple[Any, ...]

    def _key(self) -> tuple[Any, ...]:
        def identify(leaf: Any) -> Any:
            return leaf if isinstance(leaf, Hashable) else id(leaf)

        return self.treedef, *map(identify, self.leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @classmethod
    def split(cls, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Static, list[Any]]:
        """Separate the arrays of a model's arguments from the rest."""
        leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
        is_array = [isinstance(leaf, np.ndarray | Array) for leaf in leaves]
        arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
        rest = [
            _ARRAY if yes else leaf for leaf, yes in zip(leaves, is_array, strict=True)
        ]
        return cls(treedef, tuple(rest)), arrays

    def join(self, arrays: list[Any]) -> tuple[tuple, dict[str, Any]]:
        """Put the arrays back."""
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)


class _ArrayMark:
    def __repr__(self) -> str:
        return "<array>"


_ARRAY = _ArrayMark()
