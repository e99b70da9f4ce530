"""Surrogates that evaluate all rows exactly, and so are the target itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.control_variate._center import Center
from numpyro_minibatch.control_variate._exact_rows import reader
from numpyro_minibatch.control_variate._expand import ExactRows, Expansion
from numpyro_minibatch.control_variate._posterior import (
    NORMAL,
    SurrogatePosterior,
    laplace,
    misfit,
    refined,
)
from numpyro_minibatch.control_variate._problem import Problem

__all__ = [
    "all_rows_at_once",
    "compile_every_row",
    "every_row",
    "with_every_row",
]


def every_row(problem: Problem, center: np.ndarray, near: bool = True) -> Expansion:
    """An expansion in which all rows are exact, so that the surrogate is the target.

    :param center: any point at which the rows are finite, ``(d,)``.
    :param near: whether it is near the mode. The log likelihoods of the rows there are
        subtracted, which leaves small numbers. Those of a far point would leave large
        ones: 4.7e6 for the weights of 30 rats, of which single precision keeps halves.
    """
    expansion = _every_row(problem, center)
    if not near:
        return expansion
    at = jnp.asarray(center, problem.dtype)
    rows = {n: np.asarray(i) for n, i in expansion.exact_rows.items()}
    values = problem.compiled(_row_values)(at, rows)
    exact = {
        name: kept._replace(at_center=jax.device_put(_finite(values[name])))
        for name, kept in expansion.exact.items()
    }
    return expansion._replace(exact=exact)


def compile_every_row(problem: Problem, center: np.ndarray) -> Expansion:
    """Compile :func:`every_row` on another thread.

    :param center: a point in the coordinates of the expansion, ``(d,)``.
    :return: an expansion with the shapes of the result.
    """
    expansion = _every_row(problem, center)
    rows = {n: np.asarray(i) for n, i in expansion.exact_rows.items()}
    problem.compiled(_row_values).ahead(np.asarray(center, problem.dtype), rows)
    return expansion


def _every_row(problem: Problem, center: np.ndarray) -> Expansion:
    alone = {n: ExactRows.alone(np.arange(N), N) for n, N in problem.plates.items()}
    zeros = np.zeros((len(center),) * 2)
    return Expansion(center, zeros[0], zeros, np.zeros(()), alone)  # type: ignore[arg-type]


def _finite(values: Array) -> np.ndarray:
    found = np.asarray(values)
    return np.where(np.isfinite(found), found, 0.0)


def _row_values(problem: Problem, arrays: list[Any], phi: Array, indices: Any) -> Any:
    """The log likelihoods of rows."""
    return reader(problem, arrays, indices)(phi)


def with_every_row(
    problem: Problem, posterior: SurrogatePosterior, resample: bool = True
) -> SurrogatePosterior | None:
    """The posterior of a surrogate in which all rows are exact.

    :param problem: the target and its coordinates.
    :param posterior: that of another surrogate.
    :param resample: whether its draws may be resampled, where enough would be left.
        They lack tails that the other surrogate lacks.
    :return: ``None`` if it cannot be sampled.
    """
    stage("exact rows")
    expansion = every_row(problem, np.asarray(posterior.expansion.center))
    return refined(problem, posterior, expansion, resample)


def all_rows_at_once(problem: Problem, center: Center) -> SurrogatePosterior | None:
    """The posterior of all rows, if it is not normal.

    The expansion need not be evaluated: where it would be as good as normal, the
    log density of the target is normal as well.

    :param problem: the target and its coordinates.
    :param center: the mode.
    :return: ``None`` if the posterior is normal, or cannot be sampled.
    """
    normal = laplace(problem, center.expansion, center.known_hessian)
    expansion = every_row(problem, np.asarray(center.expansion.center))
    if misfit(problem, normal, expansion) < NORMAL:
        return None
    return refined(problem, normal, expansion)
