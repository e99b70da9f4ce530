"""Set-up of a ladder of energies: a search for the lowest energy, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch._internal.passes import Chunks
from numpyro_minibatch.control_variate._problem import Problem
from numpyro_minibatch.control_variate._row_sums import Some, row_sums
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.target import Terms

__all__ = ["Lowest", "find_lowest"]

_STARTS = 4  # searches from random starts, in addition to the given one
_CHUNK = 2**14


class Lowest(NamedTuple):
    """The energies at the position of lowest energy that a search found.

    :param rows: log likelihood of each row, ``(N,)``.
    :param known: the terms of the log density that are not rows.
    :param energy: minus the log density of the tempered part.
    :param log_prior: the log density of the rest.
    """

    rows: Array
    known: Terms
    energy: float
    log_prior: float

    @property
    def row_sd(self) -> float:
        """Standard deviation of the rows."""
        return float(np.std(np.asarray(self.rows, np.float64), ddof=1))


def find_lowest(problem: Problem, start: np.ndarray, temper_prior: bool) -> Lowest:
    """Search for the lowest energy by quasi-Newton steps, on some rows, then on all.

    The result is the best of several searches, or the best of their starts if none
    makes progress. Any position is valid; a low one makes the energies less noisy.

    :param problem: the target, with one data plate.
    :param start: a starting point, flat; others are drawn.
    :param temper_prior: whether the prior is part of the energy.
    """
    rng = np.random.default_rng(40)
    # the box in which NumPyro starts chains
    starts = [start, *rng.uniform(-2, 2, size=(_STARTS, start.size))]
    of_some = _objective(problem, some=True)
    searches = [_search(of_some, start, 200) for start in starts]
    best = min(searches, key=lambda found: found[0])[1]
    if not Some.of(problem).are_all:
        best = _search(_objective(problem, some=False), best, 50)[1]
    return _at(problem, best, temper_prior)


Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


def _objective(problem: Problem, some: bool) -> Objective:
    """Minus the log density from some or all rows, with its gradient."""
    rows = row_sums(problem)
    known = jax.jit(jax.value_and_grad(problem.known, argnums=1))
    weight = float(np.asarray(problem.weights.likelihood))

    def objective(z: np.ndarray) -> tuple[float, np.ndarray]:
        point = jnp.asarray(z, problem.dtype)
        pairs = zip(rows(point, some), known(problem.arrays, point), strict=True)
        # the precision of the run is enough: any position is a valid reference
        value, gradient = (
            -(weight * np.asarray(r, np.float64) + np.asarray(k)) for r, k in pairs
        )
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return np.inf, np.zeros_like(z)
        return float(value), gradient

    return objective


def _search(
    objective: Objective, start: np.ndarray, steps: int
) -> tuple[float, np.ndarray]:
    """The lowest value of a search, and its position."""
    from scipy.optimize import minimize  # here because it takes long to import

    lowest = [(np.inf, start)]

    def watched(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(z)
        if value < lowest[0][0]:
            lowest[0] = value, np.array(z)
        return value, gradient

    with np.errstate(all="ignore"):
        options = {"maxiter": steps}
        minimize(watched, start, jac=True, method="L-BFGS-B", options=options)
    return lowest[0]


def _at(problem: Problem, flat: np.ndarray, temper_prior: bool) -> Lowest:
    """The energies at a position, in the precision of the run."""
    (plate,) = problem.plates

    def evaluate(arrays: list[Any], flat: Array) -> tuple[Array, Terms]:
        target, z = problem.target_of(arrays), problem.unravel(flat)
        chunks = Chunks.of(problem.plates, {plate: _CHUNK})
        rows = chunks.map(lambda i: target.terms(z, chunks.at(i)[0]).rows[plate])
        known = target.terms(z, problem.one_row)._replace(rows={})
        return chunks.joined(plate, rows), known

    found = problem.once_over_rows(evaluate)(jnp.asarray(flat, problem.dtype))
    rows, known = jax.tree.map(jnp.asarray, found)
    tempered = Weights(float(temper_prior), 1.0, 0.0).known(known)
    rest = Weights(float(not temper_prior), 0.0, 1.0).known(known)
    energy = -(np.asarray(rows, np.float64).sum() + float(tempered))
    return Lowest(rows, known, float(energy), float(rest))


def flat_start(problem: Problem, init: Any) -> np.ndarray:
    """The starting point of the search: the first chain's, or zero."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(init))
    given = problem.example if init is None or traced else init
    return np.asarray(ravel_pytree(given)[0], np.float64)
