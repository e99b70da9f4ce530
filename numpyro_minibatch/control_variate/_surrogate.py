"""The log density of the surrogate at flat positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch.control_variate._expand import Expansion, log_surrogate
from numpyro_minibatch.control_variate._problem import Problem, double

__all__ = [
    "compile_log_surrogate",
    "flatten",
    "hessian",
    "log_densities",
    "log_density",
    "log_surrogate_at",
    "rounding_error",
    "unflatten",
]

_BLOCK = 64  # draws at which a program evaluates the surrogate


def unflatten(flat: Any, example: Any) -> Any:
    """A tree of NumPy arrays with the shapes of another tree.

    :param flat: the numbers; leading axes become leading axes of all leaves.
    :param example: a tree of arrays or shapes.
    """
    leaves, treedef = jax.tree.flatten(example)
    shapes = [jnp.shape(x) for x in leaves]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    parts = np.split(np.asarray(flat, np.float64), cuts, axis=-1)
    pairs = zip(parts, shapes, strict=True)
    return jax.tree.unflatten(
        treedef, [x.reshape(x.shape[:-1] + shape) for x, shape in pairs]
    )


def flatten(tree: Any) -> np.ndarray:
    """All numbers of a tree, in the order of :func:`unflatten`."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def log_density(
    problem: Problem, arrays: list[Any], expansion: Expansion, flat: Array
) -> Array:
    """The log density of the surrogate at a flat position."""
    fn = log_surrogate(
        problem.target_of(arrays),
        problem.coordinates,
        expansion,
        problem.weights,
        problem.unravel,
    )
    return fn(flat)


def log_densities(
    problem: Problem, arrays: list[Any], expansion: Expansion, draws: Array
) -> Array:
    """The log density of the surrogate at flat positions, ``(K, D)``."""
    return jax.vmap(partial(log_density, problem, arrays, expansion))(draws)


def hessian(
    problem: Problem, arrays: list[Any], expansion: Expansion, flat: Array
) -> Array:
    """The Hessian of the log density of the surrogate at a flat position."""
    return jax.hessian(partial(log_density, problem, arrays, expansion))(flat)


def log_surrogate_at(
    problem: Problem, expansion: Expansion, draws: np.ndarray
) -> np.ndarray:
    """The log density of the surrogate at some positions.

    :param problem: the target and its coordinates.
    :param expansion: the expansion of the surrogate.
    :param draws: positions, ``(K, D)``.
    """
    program = problem.compiled(log_densities)
    # in blocks of one size, so that the exact rows are compiled once
    place = np.arange(-(-len(draws) // _BLOCK) * _BLOCK)
    at = np.asarray(draws, problem.dtype)[np.minimum(place, len(draws) - 1)]
    parts = [
        np.asarray(program(expansion, jax.device_put(at[k : k + _BLOCK])), float)
        for k in range(0, len(at), _BLOCK)
    ]
    return np.concatenate(parts)[: len(draws)]


def compile_log_surrogate(
    problem: Problem, expansion: Expansion, start: np.ndarray
) -> None:
    """Compile :func:`log_surrogate_at` on another thread.

    :param expansion: the expansion of the surrogate, in working precision.
    :param start: a flat position.
    """
    block = np.zeros((_BLOCK, len(start)), problem.dtype)
    problem.compiled(log_densities).ahead(expansion, block)


def rounding_error(problem: Problem, expansion: Expansion, draws: np.ndarray) -> float:
    """Standard deviation of the rounding error of the surrogate's log density.

    :param problem: the target and its coordinates.
    :param expansion: the surrogate's, in double precision.
    :param draws: positions, ``(K, D)``.
    """
    if problem.dtype == jnp.float64:
        return 0.0

    with double():
        at, wide = jnp.asarray(draws, jnp.float64), expansion.cast(jnp.float64)
        right = np.asarray(problem.compiled(log_densities)(wide, at))
    found = log_surrogate_at(problem, expansion.cast(problem.dtype), draws)
    return float((found - right).std(ddof=1))
