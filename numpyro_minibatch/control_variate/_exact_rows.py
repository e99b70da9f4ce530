"""The choice of the exact rows of a surrogate, and of the rows they represent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from scipy.linalg import eigh

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.batch import FullBatch, Weighted
from numpyro_minibatch.control_variate._expand import ExactRows, Expansion
from numpyro_minibatch.control_variate._pilot import (
    COARSE,
    FLOAT_ERROR,
    IN_DOUBLE,
    SCORING,
    Pilot,
)
from numpyro_minibatch.control_variate._posterior import SurrogatePosterior, refined
from numpyro_minibatch.control_variate._problem import (
    Chosen,
    Needs,
    Problem,
    Refused,
    double,
    known_hessian,
)
from numpyro_minibatch.control_variate._residuals import ResidualScan, Rows
from numpyro_minibatch.control_variate._surrogate import rounding_error
from numpyro_minibatch.control_variate._taylor import Taylor

__all__ = [
    "check_exact_rows",
    "may_be_exact",
    "reader",
    "with_exact_rows",
    "without",
]

_WORTH = 0.9  # largest share of the residual that exact rows may leave
_FITTING = 200  # draws that compare rows, and as many that judge the choice
_CANDIDATES = 2048  # rows among which representatives are chosen
_SMALL = 0.1  # smallest score of a representative, relative to a weighted median
_GAIN = 1e-4  # smallest share of the total that a representative must explain
_CURVED = 0.9  # largest share of the curvature that exact rows may take
_EXACT = (16, 32, 64, 128, 256, 512, 1024, 2048)  # numbers of exact rows to try


def check_exact_rows(problem: Problem, taylor: Taylor, needs: Needs) -> None:
    """Refuse exact rows that the user requested but that would be of no use.

    :raises Refused: the kernel's moves do not follow the surrogate, or the data are on
        the host.
    """
    asked = f"control_variate.taylor{taylor.order}(exact_rows={taylor.exact_rows})"
    if taylor.exact_rows and not needs.follows:
        raise Refused(
            f"{asked} is for proposals that follow the surrogate. Write "
            "proposal=proposal.surrogate_hmc(), or leave exact_rows out."
        )
    if taylor.exact_rows and problem.on_host:
        raise Refused(
            f"{asked} reads these rows at each evaluation of the surrogate, and the "
            "data are HostRows. Write exact_rows=0."
        )


def with_exact_rows(
    problem: Problem, taylor: Taylor, pilot: Pilot, posterior: SurrogatePosterior
) -> SurrogatePosterior:
    """The posterior of the surrogate with exact rows, if they improve it.

    :param problem: the target and its coordinates.
    :param taylor: the control variate.
    :param pilot: what was measured with the polynomials of all rows.
    :param posterior: that of the surrogate with these polynomials.
    :return: the same one where there are no such rows.
    :raises Refused: the user requested exact rows, and with them it cannot be sampled.
    """
    exact = _chosen_rows(problem, taylor, pilot, posterior)
    if not exact:
        return posterior
    stage("exact rows")
    expansion = without(problem, posterior.expansion, exact)
    changed = refined(problem, posterior, expansion)
    if changed is not None:
        return changed
    if taylor.exact_rows:
        raise Refused(
            f"with exact_rows={taylor.exact_rows} the surrogate could "
            "not be sampled. Write a smaller number, or 0."
        )
    return posterior


def may_be_exact(problem: Problem, chosen: Chosen, needs: Needs) -> bool:
    """Whether the surrogate may evaluate all rows, as every decision does anyway."""
    rows, asked = sum(problem.plates.values()), chosen.taylor.exact_rows
    if problem.on_host:
        return False
    full = isinstance(chosen.scheme, FullBatch)
    return full and rows <= (_EXACT[-1] if asked is None else asked)


def _chosen_rows(
    problem: Problem, taylor: Taylor, pilot: Pilot, posterior: SurrogatePosterior
) -> dict[str, ExactRows]:
    """The rows that the surrogate should evaluate exactly, by plate; maybe none.

    If an expansion is coarse, either a few rows carry much of the summed residual, or
    many rows have similar residuals. Exact rows are the same for every batch, so
    vectorised chains share them. Once they belong to the surrogate, trajectories follow
    them.

    :param problem: the target and its coordinates.
    :param taylor: the control variate.
    :param pilot: what was measured with the polynomials of all rows.
    :param posterior: that of the surrogate with these polynomials.
    """
    expansion, draws = posterior.expansion, posterior.draws
    sizes, number = problem.plates, sum(problem.plates.values())
    counts = _counts(problem, taylor, pilot)
    if not counts[-1]:
        return {}
    scan, by_plate = pilot.scan, pilot.scores
    if taylor.order < 2:  # the surrogate is still of second order
        scan = ResidualScan(problem, 2, pilot.form, expansion)
        by_plate = scan.scores(draws[:SCORING]).scatter
    scores = np.concatenate([by_plate[name] for name in sizes])
    rows = Rows(
        np.repeat(np.arange(len(sizes)), list(sizes.values())),
        np.concatenate([np.arange(size) for size in sizes.values()]),
    )
    highest = rows.take(np.argsort(-scores, kind="stable")[: counts[-1]])
    alone = highest.alone(sizes)
    if counts[-1] == number:
        return alone
    fitting, judging = draws[SCORING:][: 2 * _FITTING].reshape(2, _FITTING, -1)
    weight = problem.likelihood_weight
    sums, _ = scan.sums(judging)
    known = scan.of_rows(judging, highest).cumsum(1)
    before = weight * sums.std(ddof=1)
    left = weight * (sums[:, None] - known).std(0, ddof=1)
    if not np.isfinite(left).all():
        return {}
    enough = [count for count in counts if count and left[count - 1] <= COARSE]
    found = highest.take(slice(min(enough, default=counts[-1]))).alone(sizes)
    if enough or taylor.order < 2:
        return found
    if taylor.exact_rows is None and left[-1] > _WORTH * before:
        found = {}

    # too many rows matter, so some represent others, as far as these are similar
    representatives = rows.take(
        _representatives(scan, fitting, rows, scores, counts[-1])
    )
    representing = _represented(
        problem, scan, fitting, expansion, representatives.alone(sizes)
    )
    weights = np.concatenate([kept.weights for kept in representing.values()])
    after = weight * (sums - scan.of_rows(judging, representatives) @ weights).std(
        ddof=1
    )
    if not after <= _WORTH * min(left[-1], before):
        return found
    # a representative's rounding error is multiplied by its weight
    surrogate = without(problem, expansion, representing)
    error = rounding_error(problem, surrogate, judging[:IN_DOUBLE])
    return representing if error <= FLOAT_ERROR else found


def _counts(problem: Problem, taylor: Taylor, pilot: Pilot) -> list[int]:
    """The numbers of exact rows to consider, in increasing order."""
    number, of_batch = sum(problem.plates.values()), sum(pilot.sizes.values())
    full = isinstance(pilot.scheme, FullBatch)
    if taylor.exact_rows is not None:
        return [min(taylor.exact_rows, number)]
    if pilot.residual_sd <= COARSE or problem.on_host:
        return [0]
    if not (full or isinstance(pilot.scheme, Weighted)):
        return [0]  # the user chose an unweighted scheme
    if number <= (_EXACT[-1] if full else _EXACT[0]):
        return [
            number
        ]  # every decision reads them all anyway, or few more than it does
    # more than half a batch would cost more than they save
    most = max(of_batch // 2, _EXACT[0])
    return [0, *(count for count in _EXACT if count <= most)]


def _representatives(
    scan: ResidualScan, draws: np.ndarray, rows: Rows, scores: np.ndarray, many: int
) -> np.ndarray:
    """The rows that best represent all others, sorted; a greedy search among a sample.

    A row explains the square of a positive correlation times the score of the other
    row. Each step adds the row that most increases the total explained by the best
    representative of each row.

    :param scan: of the residuals.
    :param draws: draws of the surrogate's posterior, ``(K, D)``.
    :param rows: all rows.
    :param scores: how much each matters.
    :param many: the largest number of rows to choose.
    """
    some, represents = _sample(scores, max(_CANDIDATES, many))
    candidates = rows.take(some)
    residuals = scan.of_rows(draws, candidates)
    residuals = residuals - residuals.mean(0)
    norms = np.linalg.norm(residuals, axis=0)
    residuals = (residuals / np.where(norms > 0, norms, np.inf)).astype(np.float32)
    like = np.square(np.maximum(residuals.T @ residuals, 0.0))  # row, representative
    like *= candidates.plate == candidates.plate[:, None]
    # a row with a tiny residual would represent others by huge multiples of it
    by_score = np.argsort(scores[some])
    middle = np.searchsorted(represents[by_score].cumsum(), 0.5 * represents.sum())
    like *= scores[some] >= _SMALL * scores[some][by_score[middle]]
    like *= (represents / represents.sum())[:, None].astype(np.float32)
    taken: list[int] = []
    best = np.zeros((len(some), 1), np.float32)
    while len(taken) < many:
        gain = np.maximum(like - best, 0.0).sum(0)
        following = int(np.argmax(gain))
        if not gain[following] > _GAIN:
            break
        taken.append(following)
        best = np.maximum(best, like[:, following, None])
    return some[np.sort(taken)] if taken else some[:0]


def _sample(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample rows without replacement, about in proportion to their scores; sorted.

    :param scores: how much each row matters.
    :param count: how many rows.
    :return: the rows, and an unbiased estimate of the total score that each stands for.
    """
    # exponential times with the scores as rates; the rows with the smallest are chosen
    with np.errstate(divide="ignore"):
        times = np.random.default_rng(34).exponential(size=len(scores)) / scores
    order = np.argsort(times, kind="stable")
    some = np.sort(order[:count])
    if count >= len(scores):
        return some, scores
    chance = -np.expm1(-times[order[count]] * scores[some])
    return some, np.where(chance > 0, scores[some] / np.where(chance > 0, chance, 1), 0)


def _represented(
    problem: Problem,
    scan: ResidualScan,
    draws: np.ndarray,
    expansion: Expansion,
    alone: dict[str, ExactRows],
) -> dict[str, ExactRows]:
    """Exact rows together with the rows that each represents.

    :param problem: the target and its coordinates.
    :param scan: of the residuals.
    :param draws: draws of the surrogate's posterior, ``(K, D)``.
    :param expansion: the expansion of all rows.
    :param alone: the exact rows, without represented rows.
    """
    fitted = scan.represented(draws, alone)

    def scaled(scale: float) -> dict[str, ExactRows]:
        new = dict(alone)
        for name, (representative, coefficient) in fitted.items():
            kept = alone[name]
            assert kept.others is not None
            own = np.asarray(kept.rows)
            representative[own] = np.arange(len(own))
            others = np.asarray(kept.others)
            coefficient = np.where(others, scale * coefficient, 1.0)
            new[name] = kept._replace(
                weights=jnp.asarray(np.bincount(representative, coefficient, len(own))),
                representative=jnp.asarray(representative),
                coefficient=jnp.asarray(coefficient),
            )
        return new

    # The remaining polynomials times the prior must have a maximum. Otherwise the
    # surrogate has no tails where the representatives are flat.
    before = without(problem, expansion, alone).hessian
    taken = without(problem, expansion, scaled(1.0)).hessian - before
    curvature = 1e-6 * np.mean(-np.diag(before)) * np.eye(len(before)) - before
    if problem.in_own_coordinates:  # the prior has the same coordinates
        weight = problem.likelihood_weight
        with double():
            at = jnp.asarray(expansion.center, jnp.float64)
            known = np.asarray(problem.compiled(known_hessian)(at))
            curvature = curvature - known / weight
    try:
        highest = eigh(taken, curvature, eigvals_only=True)[-1]
    except (np.linalg.LinAlgError, ValueError):  # no maximum before, or not finite
        return alone
    return scaled(min(1.0, _CURVED / highest) if highest > 0 else 1.0)


def reader(problem: Problem, arrays: list[Any], indices: Any) -> Callable[[Array], Any]:
    """The log likelihoods of rows as a function of the expansion's coordinates.

    :param indices: the rows of each plate.
    """
    target = problem.target_of(arrays)
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x)), problem.example)
    _, unravel_phi = ravel_pytree(problem.coordinates.of(target, zeros))
    return lambda phi: problem.coordinates.rows(
        target, unravel_phi(phi), zeros, indices
    )


def _weighted(
    problem: Problem, arrays: list[Any], phi: Array, indices: Any, weights: Any
) -> tuple[Any, Array, Array]:
    """The log likelihoods of rows, and the derivatives of their weighted sum."""
    read_at = reader(problem, arrays, indices)

    def total(phi: Array) -> tuple[Array, Any]:
        read = read_at(phi)
        parts = [weights[n] @ read[n] for n in weights]
        return sum(parts, jnp.zeros(())), {n: read[n] for n in weights}

    def slope(phi: Array) -> tuple[Array, Any]:
        return jax.grad(total, has_aux=True)(phi)

    def both(phi: Array) -> Any:
        gradient, rows = slope(phi)
        return gradient, (gradient, rows)

    hessian, (gradient, rows) = jax.jacfwd(both, has_aux=True)(phi)
    return rows, gradient, hessian


def without(
    problem: Problem, expansion: Expansion, exact: Mapping[str, ExactRows]
) -> Expansion:
    """The same expansion with these rows exact, in place of their polynomials.

    :param exact: the exact rows of each plate.
    """
    indices = expansion._replace(exact=exact).exact_rows
    weights = {n: np.asarray(e.weights) for n, e in exact.items() if len(e.rows)}
    with double():
        at = jnp.asarray(expansion.center, jnp.float64)
        rows = {n: np.asarray(i) for n, i in indices.items()}
        values, gradient, hessian = jax.tree.map(
            np.asarray, problem.compiled(_weighted)(at, rows, weights)
        )
    return expansion._replace(
        gradient=expansion.gradient - gradient,
        hessian=expansion.hessian - hessian,
        exact={
            name: kept._replace(at_center=values[name]) if name in values else kept
            for name, kept in exact.items()
        },
    )
