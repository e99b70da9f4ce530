"""The normal approximation at the mode, in double precision and in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .flat import Flat

CHUNK = 20_000  # rows in memory at once


def chunks(args: tuple[Any, ...], size: int = CHUNK) -> Iterator[tuple[Any, ...]]:
    """The rows of ``args``, ``size`` at a time."""
    for start in range(0, len(args[0]), size):
        yield tuple(arg[start : start + size] for arg in args)


def summed(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The sum over all rows of ``fn(*rows)``, a pytree."""
    total = None
    for rows in chunks(args):
        value = fn(*rows)
        total = value if total is None else jax.tree.map(jnp.add, total, value)
    return total


def laplace(
    flat: Flat, args: tuple[np.ndarray, ...], tolerance: float = 1e-9
) -> tuple[np.ndarray, np.ndarray]:
    """The mode, and the Cholesky root of the inverse of the curvature there.

    :raises RuntimeError: when Newton's method does not converge.
    """
    few = tuple(arg[:1] for arg in args)
    prior = jax.jit(_derivatives(lambda z: flat.terms(z, *few)[0]))
    rows = jax.jit(lambda z, *a: _derivatives(lambda z: flat.terms(z, *a)[1].sum())(z))
    z = np.zeros(flat.size)

    def everything(z: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        parts = jax.tree.map(jnp.add, prior(z), summed(lambda *a: rows(z, *a), args))
        return float(parts[0]), np.asarray(parts[1]), np.asarray(parts[2])

    value, gradient, hessian = everything(z)
    for _ in range(50):
        step = np.linalg.solve(-hessian, gradient)
        decrement, scale = float(gradient @ step), 1.0
        if 0 <= decrement < tolerance:
            return z, np.linalg.cholesky(np.linalg.inv(-hessian))
        while True:  # halve until the density increases
            moved = everything(z + scale * step)
            if np.isfinite(moved[0]) and moved[0] > value - 1e-9 * abs(value):
                break
            scale /= 2
            if scale < 1e-8:
                raise RuntimeError(f"no uphill step at decrement {decrement:.3g}")
        z, (value, gradient, hessian) = z + scale * step, moved
    raise RuntimeError(f"not at the mode after 50 steps: decrement {decrement:.3g}")


def _derivatives(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda z: (fn(z), jax.grad(fn)(z), jax.hessian(fn)(z))
