"""A model's arguments as arrays and the static part that programs depend on."""

from __future__ import annotations

import functools
import hashlib
import re
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["Given", "Seen", "Static", "digest"]


@dataclass(frozen=True, eq=False)
class Static:
    """What JAX does not compute with in a model's arguments; a key of programs.

    Leaves without a hash are equal only if they are the same object. All are equal only
    if they had the same content when they were separated.

    :param treedef: the structure of ``(args, kwargs)``.
    :param leaves: its leaves, with a mark where an array goes.
    :param content: a digest of the leaves.
    """

    treedef: Any
    leaves: tuple[Any, ...]
    content: str

    def _key(self) -> tuple[Any, ...]:
        def identify(leaf: Any) -> Any:
            try:
                hash(leaf)
            except TypeError:  # a frozen dataclass has a hash only if its fields have
                return id(leaf)
            return leaf

        return self.treedef, self.content, *map(identify, self.leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @classmethod
    def split(cls, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Static, list[Any]]:
        """Separate the arrays of a model's arguments from the rest."""
        leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
        is_array = [
            isinstance(leaf, Array)
            or (isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUTMm")
            for leaf in leaves
        ]
        arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
        rest = [
            _ARRAY if yes else leaf for leaf, yes in zip(leaves, is_array, strict=True)
        ]
        try:
            content = digest(rest)
        except Exception:  # an object that cannot be read here
            content = ""
        return cls(treedef, tuple(rest), content), arrays

    def join(self, arrays: list[Any]) -> tuple[tuple, dict[str, Any]]:
        """Put the arrays back."""
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)


class _ArrayMark:
    def __repr__(self) -> str:
        return "<array>"


_ARRAY = _ArrayMark()


@dataclass(frozen=True, eq=False)
class Seen:
    """A record of arrays, which is equal for the same arrays with the same content.

    References are weak, so that the arrays can be freed. JAX's arrays do not change;
    for NumPy's arrays a digest is stored.

    :param arrays: references to the arrays.
    :param digests: the digests of NumPy arrays.
    """

    arrays: tuple[Any, ...]
    digests: tuple[str | None, ...]

    @classmethod
    def of(cls, arrays: list[Any]) -> Seen:
        """Record some arrays."""
        return cls(
            tuple(weakref.ref(x) for x in arrays),
            tuple(digest(x) if isinstance(x, np.ndarray) else None for x in arrays),
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Seen)
            and len(self.arrays) == len(other.arrays)
            and all(
                a() is not None and a() is b()
                for a, b in zip(self.arrays, other.arrays, strict=True)
            )
            and self.digests == other.digests
        )

    def __hash__(self) -> int:
        return hash(self.digests)


_SAMPLED = 4096  # entries of an array that identify it


@dataclass(frozen=True, eq=False)
class Given:
    """A record of a model's arguments, which tells whether others are the same.

    Arrays need not be the same objects. An array that has been freed is known by its
    shape and by some thousand of its entries.

    :param arrays: by place, a weak reference, shape and sampled entries of each array.
    """

    arrays: dict[str, tuple[Any, tuple[int, ...], str]]

    @classmethod
    def of(cls, args: tuple, kwargs: Mapping[str, Any]) -> Given | None:
        """Record some arguments; ``None`` if they are being traced."""
        arrays = _arrays_by_place(args, kwargs)
        if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
            return None
        return cls(
            {
                place: (weakref.ref(x), tuple(x.shape), _sampled(x))
                for place, x in arrays.items()
            }
        )

    def difference(self, args: tuple, kwargs: Mapping[str, Any]) -> str:
        """The first array that is another one, in words; empty if there is none.

        Arrays that are being traced are known by their shape only.
        """
        arrays = _arrays_by_place(args, kwargs)
        for place in dict.fromkeys([*self.arrays, *arrays]):
            if place not in self.arrays:
                return f"{place} is an array now, and was not before"
            if place not in arrays:
                return f"{place} was an array, and is none now"
            reference, shape, sampled = self.arrays[place]
            other, known = arrays[place], reference()
            if tuple(other.shape) != shape:
                return f"{place} had shape {shape} and now has {tuple(other.shape)}"
            if isinstance(other, jax.core.Tracer) or not _can_be_read(other):
                continue
            if known is None or known is other:  # NumPy's arrays may have changed
                same = isinstance(known, Array) or _sampled(other) == sampled
            else:
                pair = _as_in_jax(np.asarray(known)), _as_in_jax(np.asarray(other))
                floats = all(np.issubdtype(x.dtype, np.inexact) for x in pair)
                same = np.array_equal(*pair, equal_nan=floats)
            if not same:
                return f"{place} has other values than before"
        return ""


def _arrays_by_place(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    # rows outside of memory arrive in arrays that change during a run
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        (tuple(args), dict(kwargs)), lambda x: hasattr(type(x), "_digest_parts")
    )
    return {
        ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]): leaf
        for path, leaf in leaves
        if isinstance(leaf, np.ndarray | Array)
    }


def _sampled(array: Any) -> str:
    """A digest of evenly spaced entries, if they can be read."""
    if not _can_be_read(array):
        return ""
    plain = np.atleast_1d(array)
    places = np.arange(0, plain.size, max(1, plain.size // _SAMPLED))
    # by indices, because a flat view of an array that is not contiguous is a copy
    return digest(_as_in_jax(plain[np.unravel_index(places, plain.shape)]))


def _as_in_jax(array: np.ndarray) -> np.ndarray:
    """Numbers in the precision that JAX gives them."""
    if not jnp.issubdtype(array.dtype, np.number):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _can_be_read(array: Any) -> bool:
    """Whether an array is on this process, and no array of keys."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    return not isinstance(array, Array) or array.is_fully_addressable


def digest(value: Any) -> str:
    """A short text that is equal for equal values, also in another process.

    Arrays are identified by their content; functions by their code, their defaults, and
    the closure and globals that they read; everything else by its parts.

    :param value: anything.
    """
    found = hashlib.blake2b(digest_size=12)
    for part in _parts(value, set()):
        found.update(part)
    return found.hexdigest()


_ARRAYS = np.generic | np.ndarray | Array


def _parts(value: Any, seen: set[int]) -> Iterator[bytes]:
    """The bytes that identify a value."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{type(value).__name__} {value!r}".encode()
        return
    if isinstance(value, _ARRAYS):
        yield from _of_array(value)
        return
    if isinstance(value, types.ModuleType):
        yield value.__name__.encode()
        return
    if hasattr(type(value), "_digest_parts"):  # data that are not in memory
        yield from value._digest_parts()
        return
    if id(value) in seen:
        return
    seen = seen | {id(value)}
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _parts(value[key], seen)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        yield from _parts((value.__func__, value.__self__), seen)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, seen)
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}".encode()
    elif hasattr(value, "__array__"):  # a table, whose text may leave out rows
        yield f"{type(value).__qualname__} {value!r}".encode()
        yield from _of_array(np.asarray(value))
    elif is_dataclass(value):
        yield type(value).__qualname__.encode()
        for entry in fields(value):
            yield from _parts(getattr(value, entry.name), seen)
    elif getattr(value, "__dict__", None):
        yield type(value).__qualname__.encode()
        yield from _parts(vars(value), seen)
    else:
        yield re.sub(r"0x[0-9a-f]+", "", repr(value)).encode()


def _of_array(value: Any) -> Iterator[bytes]:
    if isinstance(value, jax.core.Tracer):
        yield str(value.aval).encode()
        return
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        yield str(jax.random.key_impl(value)).encode()
        value = jax.random.key_data(value)
    plain = np.ascontiguousarray(np.asarray(value))
    yield f"{plain.dtype}{plain.shape}".encode()
    yield repr(plain.tolist()).encode() if plain.dtype.hasobject else plain.tobytes()


def _of_function(value: types.FunctionType, seen: set[int]) -> Iterator[bytes]:
    yield from _of_code(value.__code__)
    yield from _parts((value.__defaults__, value.__kwdefaults__), seen)
    for name, content in surroundings(value):
        yield name.encode()
        # for libraries the name is enough
        module = getattr(content, "__module__", None)
        own = isinstance(module, str) and module == value.__module__
        if isinstance(content, types.FunctionType | type) and not own:
            yield f"{module}.{getattr(content, '__qualname__', '')}".encode()
        else:
            yield from _parts(content, seen)
        if isinstance(content, types.FunctionType) and not own:
            yield from _of_code(content.__code__)  # its module may be loaded again
        if isinstance(content, types.ModuleType | type):
            # settings that the function reads: `config.SCALE`
            for attribute in sorted(_names(value.__code__) & vars(content).keys()):
                held = vars(content)[attribute]
                if isinstance(held, bool | int | float | complex | str | _ARRAYS):
                    yield attribute.encode()
                    yield from _parts(held, seen)


def _of_code(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield from _parts(constant, set())


def surroundings(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables other than arguments that a function reads: closure and globals."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    names = _names(code)
    for name in sorted(names & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
