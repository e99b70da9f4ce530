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

from numpyro_minibatch._internal.functions import reading

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
    the precision of the first program that has it. A model that reads NumPy arrays from
    its surroundings, such as the scales of its priors, and that has been traced in
    single precision, then fails in double precision. There, it reads copies.

    :param model: the model.
    """
    if not _WITHIN.get():
        return model
    copied = reading(model, _Fresh())

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return copied(*args, **kwargs)
        except _SinglePrecisionError:
            raise
        except TypeError as error:
            raise _SinglePrecisionError(_MESSAGE.format(error=error)) from error

    return run


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
    """Copies of NumPy arrays and of trees that contain them, one of each."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, value: Any) -> Any:
        if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(value)):
            return value
        return jax.tree.map(self._copy, value)

    def _copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        if id(leaf) not in self._made:
            self._made[id(leaf)] = leaf, leaf.copy()
        return self._made[id(leaf)][1]
