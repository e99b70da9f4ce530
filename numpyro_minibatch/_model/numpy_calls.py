"""Models that compute numbers from data with NumPy, such as ``len(np.unique(x))``.

NumPy computes while a model is traced, so it must receive the values of all rows of an
argument, as with NUTS. A kernel traces the model with the rows of a batch, which have
no values at that time. The model is therefore run with NumPy functions that receive the
values of all rows in place of arguments of the model. JAX's functions get the batch.

Elementwise functions of NumPy (``np.log(x)``, ``np.where(x > 0, 1, 0)``) are computed
by JAX for the rows of the batch. If their arguments are those of the model, their
values for all rows are known, too.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_minibatch._internal.functions import library_of, reading
from numpyro_minibatch._internal.precision import in_this_precision
from numpyro_minibatch._internal.static import digest
from numpyro_minibatch.target import ModelTarget, flatten_arguments, traces_rows

__all__ = ["ReadsValues"]

_CONVERSIONS = {np.asarray, np.array, np.asanyarray, np.ascontiguousarray, np.copy}
# functions besides NumPy's universal ones whose entry for a row needs that row only
_BY_ROW = {
    np.around,
    np.clip,
    np.column_stack,
    np.digitize,
    np.isin,
    np.nan_to_num,
    np.ones_like,
    np.round,
    np.searchsorted,
    np.where,
    np.zeros_like,
}


class _Known(NamedTuple):
    """An array of a model, and the values that NumPy functions receive in its place.

    :param array: the array, which is kept so that no other one has its id.
    :param values: computes the values of all rows.
    """

    array: Any
    values: Callable[[], np.ndarray]


_GIVEN: ContextVar[dict[int, _Known] | None] = ContextVar(
    "arrays of a model, by their ids", default=None
)


@dataclass(frozen=True, eq=False)
class ReadsValues:
    """A model whose NumPy calls receive the values of all rows of its arguments.

    It is the model as it was written, except where a kernel traces it.

    :param fn: the model.
    :param treedef: the structure of its ``(args, kwargs)``.
    :param values: what NumPy gets, by the numbers of arguments among the leaves: the
        array, or ``None`` if it computes of it entry by entry only.
    """

    fn: Callable
    treedef: Any
    values: Mapping[int, np.ndarray | None]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest(dict(self.values)))
        try:  # arguments are called what the model calls them
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            return
        object.__setattr__(self, "__signature__", signature)

    @classmethod
    def of(
        cls, model: Callable, args: tuple, kwargs: Mapping[str, Any]
    ) -> ReadsValues | None:
        """The model, if it reads values of its arguments with NumPy.

        :param model: the model.
        :param args: its positional arguments.
        :param kwargs: its keyword arguments.
        :return: ``None`` if it reads none, or does not run with them.
        """
        if reading(model, _with_all_rows) is model:  # it calls nothing of NumPy
            return None
        leaves, treedef = flatten_arguments((args, dict(kwargs)))
        known = {
            number: np.asarray(leaf)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, np.ndarray | jax.Array)
            and not isinstance(leaf, jax.core.Tracer)
            and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        }
        seen = _Recording(model, known, set(), set())

        def run(arrays: dict[int, Any]) -> None:
            filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(treedef, filled)
            target = ModelTarget(model=seen, args=args, kwargs=kwargs, sizes={})
            target.trace({}, substitute_fn=init_to_uniform())

        try:
            jax.eval_shape(run, known)
        except Exception:  # why the model does not run is found elsewhere
            return None
        if not seen.used:
            return None
        values = {i: known[i] if i in seen.read else None for i in sorted(seen.used)}
        return cls(model, treedef, values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        leaves, treedef = flatten_arguments((args, kwargs))
        if not traces_rows() or treedef != self.treedef:
            return in_this_precision(self.fn)(*args, **kwargs)
        known = {
            id(leaves[number]): _Known(leaves[number], lambda x=x: x)  # type: ignore[misc]
            for number, x in self.values.items()
        }
        return _run(in_this_precision(self._fn), known, args, kwargs)

    @property
    def reads(self) -> bool:
        """Whether NumPy computes numbers of all rows, and not only entry by entry."""
        return any(x is not None for x in self.values.values())

    @functools.cached_property
    def _fn(self) -> Callable:
        return reading(self.fn, _with_all_rows)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ReadsValues)
            and self.fn == other.fn
            and self.treedef == other.treedef
            and self.digest == other.digest
        )

    def __hash__(self) -> int:
        return hash((self.fn, self.digest))

    def __reduce__(self) -> Any:
        return type(self), (self.fn, self.treedef, self.values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.fn, '__name__', self.fn)})"


@dataclass(frozen=True, eq=False)
class _Recording:
    """A model that notes which of its arguments NumPy gets.

    :param fn: the model.
    :param values: the values of its arguments, by their numbers.
    :param used: where it notes the numbers of those that NumPy gets.
    :param read: where it notes the numbers of those whose values are read.
    """

    fn: Callable
    values: Mapping[int, np.ndarray]
    used: set[int]
    read: set[int]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten_arguments((args, kwargs))
        known = _Noted(self, leaves)
        return _run(reading(self.fn, _with_all_rows), known, args, kwargs)


class _Noted(dict[int, _Known]):
    """Arrays by their ids, which record the arguments that are requested."""

    def __init__(self, recording: _Recording, leaves: list[Any]) -> None:
        self._recording = recording
        self._numbers = {id(leaves[number]): number for number in recording.values}
        super().__init__(
            {
                id(leaves[number]): _Known(leaves[number], partial(self._read, number))
                for number in recording.values
            }
        )

    def _read(self, number: int) -> np.ndarray:
        self._recording.read.add(number)
        return self._recording.values[number]

    def note_rows(self) -> None:
        """Note that NumPy computes of the rows of arguments, of whichever."""
        self._recording.used.update(self._recording.values)

    def __getitem__(self, key: int) -> _Known:
        if key in self._numbers:
            self._recording.used.add(self._numbers[key])
        return super().__getitem__(key)


def _run(
    fn: Callable, known: dict[int, _Known], args: tuple, kwargs: Mapping[str, Any]
) -> Any:
    token = _GIVEN.set(known)
    try:
        return fn(*args, **kwargs)
    finally:
        _GIVEN.reset(token)


class _Function:
    """A NumPy function that receives values in place of arrays of the model."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = _GIVEN.get() or {}
        leaves, treedef = jax.tree.flatten((args, kwargs))
        found = {i: known[id(x)] for i, x in enumerate(leaves) if id(x) in known}

        def compute() -> Any:
            filled = [
                found[i].values() if i in found else x for i, x in enumerate(leaves)
            ]
            args, kwargs = jax.tree.unflatten(treedef, filled)
            return self._function(*args, **kwargs)

        traced = _traced(leaves)
        by_row = self._by_row(len(args)) if found or traced else None
        if by_row is None:
            return compute()
        rows = by_row(*args, **kwargs)
        if all(id(x) in known for x in traced):
            known[id(rows)] = _Known(rows, compute)
        elif isinstance(known, _Noted):
            known.note_rows()
        return rows

    def _by_row(self, number: int) -> Callable | None:
        """The function of JAX for the rows of a batch, if it acts entry by entry."""
        if self._function in _CONVERSIONS and number <= 2:
            return jnp.array  # a new array, even of one that has a place already
        if self._function in _BY_ROW and (
            self._function is not np.where or number == 3
        ):
            function = getattr(jnp, self._function.__name__)
            return lambda *args, **kwargs: function(*map(_array, args), **kwargs)
        if isinstance(self._function, np.ufunc) and self._function.signature is None:
            return getattr(jnp, self._function.__name__, None)
        return None

    def __getattr__(self, name: str) -> Any:
        return _wrapped(getattr(self._function, name))


def _array(x: Any) -> Any:
    """A list of numbers as the array that JAX requires in its place."""
    return np.asarray(x) if isinstance(x, list) and not _traced(x) else x


def _traced(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if isinstance(x, jax.core.Tracer)]


class _Module(types.ModuleType):
    """NumPy, or a module inside of it, with such functions."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _wrapped(getattr(self._module, name))


def _wrapped(found: Any) -> Any:
    if isinstance(found, types.ModuleType):
        return _Module(found)
    return (
        _Function(found) if callable(found) and not isinstance(found, type) else found
    )


def _with_all_rows(value: Any) -> Any:
    """NumPy and its functions, such that they receive the values of all rows."""
    if library_of(value) == "numpy" and not isinstance(value, type):
        return _wrapped(value)
    return value
