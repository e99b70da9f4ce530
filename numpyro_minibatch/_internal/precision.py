"""The precision of numbers, and that of products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_minibatch._internal.functions import (
    library_of,
    reading,
    with_attributes,
)
from numpyro_minibatch._internal.objects import rebuilt

__all__ = ["double", "full_precision", "in_this_precision", "is_double"]

P = ParamSpec("P")
T = TypeVar("T")

_WITHIN: ContextVar[bool] = ContextVar("double precision in single", default=False)


def is_double() -> bool:
    """Whether numbers are in double precision."""
    return jnp.result_type(float) == jnp.float64


@contextmanager
def double() -> Iterator[None]:
    """Use double precision inside the context, whatever the global setting."""
    if hasattr(jax, "enable_x64"):
        wide = jax.enable_x64(True)
    else:  # jax < 0.8
        from jax.experimental import enable_x64  # type: ignore[attr-defined]

        wide = enable_x64()
    token = _WITHIN.set(_WITHIN.get() or not is_double())
    try:
        with wide:
            yield
    finally:
        _WITHIN.reset(token)


def full_precision(fn: Callable[P, T]) -> Callable[P, T]:
    """A function whose products of matrices have the precision of their factors.

    On GPUs and TPUs, JAX rounds the factors of a float32 product to 10 or 7 bits: on an
    H200, entries of a (1048576, 20) by (20, 16) product were wrong by 1e-2 instead of
    6e-6. A log likelihood sums such errors over the rows, and a step compares two of
    these sums. A precision that the user has set (``jax_default_matmul_precision``) is
    left as it is.

    :param fn: the function, which JAX may trace.
    """

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        chosen = getattr(jax.config, "jax_default_matmul_precision", None)
        if chosen is not None:
            return fn(*args, **kwargs)
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return run


def in_this_precision(model: Callable) -> Callable:
    """A model that can be traced in the precision of its context.

    JAX remembers a NumPy array that is a constant of a program by its identity, with
    the precision of the first program that has it. NumPy arrays that a model reads from
    its surroundings or from its arguments, such as the scales of its priors, would then
    fail in the other precision, here or in the user's own programs. In double
    precision, the model therefore reads other arrays with the same memory.

    :param model: the model.
    """
    if not _WITHIN.get():
        return model
    fresh = _Fresh()
    copied = reading(model, fresh)
    # these run the user's model by this function, and remember its arguments
    ours = library_of(_inside(model)) == "numpyro_minibatch"

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ours:
            args, kwargs = reading((args, kwargs), fresh)
        try:
            return copied(*args, **kwargs)
        except _SinglePrecisionError:
            raise
        except TypeError as error:
            raise _SinglePrecisionError(_MESSAGE.format(error=error)) from error

    return run


def _inside(model: Any) -> Any:
    """The model inside of handlers."""
    while isinstance(model, Messenger) and model.fn is not None:
        model = model.fn
    return model


class _SinglePrecisionError(TypeError):
    """A model cannot be evaluated in double precision."""


_MESSAGE = (
    "the set-up evaluates the model in double precision also, where it fails:\n"
    "  {error}\n"
    "Usually a part of the model has a precision of its own. Leave out dtype= "
    "(jnp.zeros(3) has the precision of its context), or take it from another array "
    "(jnp.zeros_like(x), x.dtype)."
)


class _Fresh:
    """Other NumPy arrays with the same memory, one of each, also inside of objects."""

    def __init__(self) -> None:
        # with the originals, so that no other array gets their ids
        self._made: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._view(value)
        # what is inside of the former is replaced one by one; the latter are trees
        if with_attributes(value) or library_of(type(value)) in _OF_JAX:
            return value
        return rebuilt(value, self._view)

    def _view(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, value.view()
        return self._made[id(value)][1]


_OF_JAX = {"jax", "jaxlib", "numpyro", "numpyro_minibatch"}
