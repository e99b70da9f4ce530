"""The tails of the surrogate, and the representative rows that correct them.

Moves follow the surrogate and are corrected for the target. So the weight
``w = target / surrogate`` determines how long a chain stays at a position: about ``w``
steps if ``w > 1``. A chain of independent draws of the surrogate is uniformly ergodic
if and only if ``w`` is bounded [1]_. In a skewed posterior the log weight is
approximately cubic. Draws from the surrogate hardly show this, because excursions into
the heavier tail are rare but long. So the weight is measured in the tails, where the
target has mass that the surrogate lacks. If a tail is too heavy, the surrogate gets
representative rows: a few rows of the data with weights, such that their weighted
residuals sum to about the sum over all rows.

References:
    1. Mengersen, K. L. and Tweedie, R. L. (1996). *Rates of convergence of the Hastings
       and Metropolis algorithms.* Annals of Statistics 24(1), 101-121.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.linalg import cho_solve, eigh, solve_triangular

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.batch import FullBatch, Weighted
from numpyro_minibatch.control_variate._exact_rows import without
from numpyro_minibatch.control_variate._expand import ExactRows, Expansion
from numpyro_minibatch.control_variate._pilot import FLOAT_ERROR, IN_DOUBLE, Pilot
from numpyro_minibatch.control_variate._posterior import SurrogatePosterior, refined
from numpyro_minibatch.control_variate._problem import (
    Problem,
    double,
    known_hessian,
)
from numpyro_minibatch.control_variate._residuals import Rows
from numpyro_minibatch.control_variate._surrogate import (
    log_surrogate_at,
    rounding_error,
)
from numpyro_minibatch.control_variate._taylor import Taylor

__all__ = [
    "MAX_INEFFICIENCY",
    "Inside",
    "Tails",
    "everywhere",
    "may_represent",
    "measure_tails",
    "nonnegative_fit",
    "squares_inefficiency",
    "with_fitting_representatives",
    "with_representatives",
]

MAX_INEFFICIENCY = 1.2  # of squares; above it tails need representative rows
# Standard deviation of the residual above which tails are measured. If it were a cubic
# of one parameter, its skewness would be 0.08 there and the inefficiency 1.3.
_CUBIC = 0.05
# Draws of the surrogate do not show a residual that grows faster: for the location of
# five Student-t rows with 2 degrees of freedom, 0.01 and 0.04 went with inefficiencies
# of 6 and 104. It does so if the posterior is wide on the scale of some row. A row's
# own residual is then not small either: 0.04 there, and 2e-5 for a logistic regression
# on 200,000 rows, whose posterior is narrow on the scale of every row.
_LEAST, _OF_A_ROW = 0.002, 1e-4
_KNOTS = np.array([-4.5, -3.0, -1.5, 0.0, 1.5, 3.0, 4.5])  # standard deviations
_GRID = np.linspace(-4.5, 4.5, 151)
_MOST_VALUES = 2**22  # largest number of residuals computed at the knots
_FEWEST_ROWS, _MOST_ROWS = 512, 2048  # of the sample that stands in for all rows
# if rows are integrals: evaluations at a knot, and the fewest of these rows
_EVALUATIONS, _FEWEST_INTEGRALS = 160_000, 480
# the scale of a fit is wrong if standard deviations are so many times larger, or if the
# mean is so many of them away
_WIDER, _ELSEWHERE = 1.15, 0.3
_WIDTHS = (1.0, 1.5, 2.0)  # scales of the draws for the fit of representatives
_FITTING = 768  # number of such draws
_JUDGING = 64  # draws of the surrogate that judge the representatives
_WORTH = 0.9  # largest share of the residual that they may leave
_TOLERANCE = 0.02  # weighted root mean square of the remaining log weight
_MOST_REPRESENTATIVES = 512
_RIDGE = 1e-10  # of the Gram matrix of representative rows
_CURVED = 0.999  # largest share of the curvature that they may take


Inside = Callable[[np.ndarray], np.ndarray]  # whether positions belong to a mode


def everywhere(draws: np.ndarray) -> np.ndarray:
    """Whether positions belong to a mode if there is only one: all of them."""
    return np.ones(len(draws), bool)


class Tails(NamedTuple):
    """The weight of the target in the tails of the surrogate, parameter by parameter.

    The tail of a parameter is explored along the line on which the surrogate's other
    parameters have their conditional means. There the chain is one of independent draws
    in one dimension, whose autocorrelation times are known.

    :param inefficiency: the largest integrated autocorrelation time of the squares,
        which is 1 for independent draws of the target.
    :param parameter: the index in the flat position of the parameter that has it.
    :param log_surrogate: the surrogate along the lines, ``(D, 7)``; minus infinity
        where another mode begins.
    :param rows: a sample that stands in for all rows.
    :param multiples: the inverse inclusion probability of each sampled row.
    :param residuals: their residuals along the lines, ``(D, 7, m)``.
    """

    inefficiency: float
    parameter: int
    log_surrogate: np.ndarray
    rows: Rows
    multiples: np.ndarray
    residuals: np.ndarray


def may_represent(problem: Problem, taylor: Taylor, pilot: Pilot) -> bool:
    """Whether tails are worth measuring and representative rows can correct them.

    :param problem: the target and its coordinates.
    :param taylor: the control variate.
    :param pilot: the pilot, with the scheme by which rows are drawn.
    """
    if problem.on_host or taylor.order < 2 or taylor.exact_rows is not None:
        return False
    if not isinstance(pilot.scheme, FullBatch | Weighted):
        return False
    of_rows = np.max([np.max(scores) for scores in pilot.scores.values()])
    grows = pilot.residual_sd > _LEAST and not of_rows < _OF_A_ROW
    return grows or pilot.residual_sd > _CUBIC


def measure_tails(
    problem: Problem,
    pilot: Pilot,
    posterior: SurrogatePosterior,
    inside: Inside = everywhere,
) -> Tails:
    """Measure the tails; deterministic except for the sample of rows.

    :param problem: the target and its coordinates.
    :param pilot: the scores of all rows.
    :param posterior: that of the surrogate.
    :param inside: the positions that belong to the mode of the posterior. Lines end
        where another mode begins, because moves within a mode do.
    """
    stage("tails")
    covariance = posterior.root.T @ posterior.root
    along = covariance / np.sqrt(np.diag(covariance))[:, None]  # a line in each row
    points = posterior.location + _KNOTS[:, None] * along[:, None]
    flat = points.reshape(-1, points.shape[-1])
    few = np.clip(_MOST_VALUES // len(flat), _FEWEST_ROWS, _MOST_ROWS)
    if pilot.scan.integrals:
        few = min(few, max(_EVALUATIONS // pilot.scan.row_size, _FEWEST_INTEGRALS))
    rows, multiples = _standing_in(problem, pilot, int(few))
    residuals = pilot.scan.of_rows(flat, rows).reshape(*points.shape[:2], -1)
    expansion = posterior.expansion.cast(problem.dtype)
    log_surrogate = log_surrogate_at(problem, expansion, flat)
    log_surrogate = np.where(inside(flat), log_surrogate, -np.inf)
    log_surrogate = log_surrogate.reshape(points.shape[:2])
    known = problem.likelihood_weight * (residuals @ multiples)
    inefficiency, parameter = _worst(log_surrogate, known)
    return Tails(inefficiency, parameter, log_surrogate, rows, multiples, residuals)


def _standing_in(problem: Problem, pilot: Pilot, few: int) -> tuple[Rows, np.ndarray]:
    """A systematic sample of rows with probabilities proportional to their scores."""
    sizes = problem.plates
    plate = np.repeat(np.arange(len(sizes)), list(sizes.values()))
    row = np.concatenate([np.arange(size) for size in sizes.values()])
    if len(row) <= few:
        return Rows(plate, row), np.ones(len(row))
    scores = np.concatenate([pilot.scores[name] for name in sizes]).astype(float)
    chance = few * (0.2 / len(row) + 0.8 * scores / max(scores.sum(), 1e-300))
    while (chance > 1).any():  # no row is drawn twice; the rest is redistributed
        sure = chance >= 1
        chance[~sure] *= (few - sure.sum()) / chance[~sure].sum()
        chance[sure] = 1.0
    by_score = np.argsort(scores, kind="stable")
    ends = np.cumsum(chance[by_score])
    places = np.searchsorted(ends, np.arange(few) + 0.5)
    chosen = np.sort(by_score[np.minimum(places, len(row) - 1)])
    return Rows(plate[chosen], row[chosen]), 1.0 / chance[chosen]


def _worst(log_surrogate: np.ndarray, log_weights: np.ndarray) -> tuple[float, int]:
    """The largest autocorrelation time of squares, and the parameter that has it."""
    found = [
        squares_inefficiency(*both)
        for both in zip(log_surrogate, log_weights, strict=True)
    ]
    if np.isnan(found).all():
        return np.nan, 0
    worst = int(np.nanargmax(found))
    return float(found[worst]), worst


def squares_inefficiency(log_surrogate: np.ndarray, log_weight: np.ndarray) -> float:
    """The autocorrelation time of squares in an independence sampler on a line.

    :param log_surrogate: the log density of the proposals at 0, 1.5, 3 and 4.5 standard
        deviations to both sides, ``(7,)``.
    :param log_weight: the log ratio of the target to this density at the same points,
        ``(7,)``.
    :return: NaN if fewer than four of the points are known.
    """
    from scipy.interpolate import CubicSpline  # slow to import

    if min(np.isfinite(values).sum() for values in (log_surrogate, log_weight)) < 4:
        return np.nan

    def on_grid(values: np.ndarray) -> np.ndarray:
        known = np.isfinite(values)
        fine = CubicSpline(_KNOTS[known], values[known])(_GRID)
        inside = (_GRID >= _KNOTS[known][0]) & (_GRID <= _KNOTS[known][-1])
        return np.where(inside, fine, -np.inf)

    logs = on_grid(log_surrogate)
    proposed = np.exp(logs - logs.max())
    proposed /= proposed.sum()
    weight = np.where(proposed > 0, on_grid(log_weight), -np.inf)
    target = proposed * np.exp(weight - weight.max())
    target /= target.sum()
    # a chain on the grid: its transition matrix, and the sum of its autocorrelations
    possible = (proposed > 0) & (target > 0)
    proposed, target, grid = proposed[possible], target[possible], _GRID[possible]
    proposed /= proposed.sum()
    weight = weight[possible]
    step = proposed * np.exp(np.minimum(weight - weight[:, None], 0.0))
    step[np.diag_indices(len(grid))] += 1.0 - step.sum(1)
    centred = grid - target @ grid
    square = centred**2 - target @ centred**2
    try:
        solved = np.linalg.solve(np.eye(len(grid)) - step + target, square)
    except np.linalg.LinAlgError:  # it never leaves a position
        return np.inf
    variance = target @ square**2
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(2 * (target @ (square * solved)) / variance - 1)
    return found if np.isfinite(found) else np.inf


def with_representatives(
    problem: Problem,
    pilot: Pilot,
    posterior: SurrogatePosterior,
    tails: Tails,
    inside: Inside = everywhere,
) -> tuple[SurrogatePosterior, Tails]:
    """The posterior of a surrogate with representative rows, and its tails.

    The representatives come from the sample that stands in for all rows. Non-negative
    least squares fits their weighted residuals to the sum of all residuals, at draws of
    several widths and along the lines of the tails.

    :param problem: the target and its coordinates.
    :param pilot: the pilot of the surrogate without them.
    :param posterior: the posterior of the surrogate without them.
    :param tails: the tails of that surrogate.
    :param inside: the positions that belong to the mode of the posterior.
    :return: the unchanged arguments if representative rows do not improve them.
    """
    same = posterior, tails
    stage("representative rows")
    rng = np.random.default_rng(50)
    width = np.resize(_WIDTHS, _FITTING)
    normal = width[:, None] * rng.normal(size=(_FITTING, len(posterior.location)))
    wide = posterior.location + normal @ posterior.root
    on_lines = tails.residuals.reshape(-1, tails.residuals.shape[-1])
    at_draws = pilot.scan.of_rows(wide, tails.rows)
    residuals = np.concatenate([at_draws, on_lines])
    of_knots = np.maximum(1.0, np.abs(_KNOTS) / 2)
    far = np.concatenate([width, np.tile(of_knots, len(tails.residuals))])
    sums = residuals @ tails.multiples
    belong = np.append(inside(wide), np.isfinite(tails.log_surrogate.ravel()))
    usable = belong & np.isfinite(residuals).all(1)
    weight = problem.likelihood_weight
    importance = 1 / (far * np.sqrt(1 + weight * np.abs(sums)))
    fitted = nonnegative_fit(
        (importance[:, None] * residuals)[usable],
        (importance * sums)[usable],
        _TOLERANCE / float(weight),
        _MOST_REPRESENTATIVES,
    )
    chosen = fitted > 0
    if not chosen.any():
        return same
    exact = _representing(problem, tails.rows.take(chosen), fitted[chosen])
    expansion = without(problem, posterior.expansion, exact)
    scale = _scale(problem, posterior.expansion, expansion)
    if scale < 1:
        expansion = _scaled(posterior.expansion, expansion, scale)
    explained = weight * (tails.residuals @ (scale * fitted))
    log_surrogate = tails.log_surrogate + explained
    left = weight * (tails.residuals @ tails.multiples) - explained
    inefficiency, parameter = _worst(log_surrogate, left)
    if not inefficiency < tails.inefficiency:
        return same
    judging = posterior.draws[-_JUDGING:]
    before, _ = pilot.scan.sums(judging)
    after = before - pilot.scan.keeping(expansion.exact).of_surplus(judging)
    if not after.std() <= _WORTH * before.std():
        return same
    if rounding_error(problem, expansion, judging[:IN_DOUBLE]) > FLOAT_ERROR:
        return same
    changed = refined(problem, posterior, expansion)
    if changed is None:
        return same
    return changed, tails._replace(
        inefficiency=inefficiency, parameter=parameter, log_surrogate=log_surrogate
    )


def with_fitting_representatives(
    problem: Problem, pilot: Pilot, posterior: SurrogatePosterior, tails: Tails
) -> tuple[SurrogatePosterior, Tails]:
    """The same, fitted again if the posterior turns out to be wider, or elsewhere.

    The scale of a normal posterior is that of the curvature at the mode. With a few
    rows of extreme covariates, the standard deviation was 1.4 times as large, and the
    lines of the tails ended where the posterior still has mass.

    :param problem: the target and its coordinates.
    :param pilot: the pilot of the surrogate without them.
    :param posterior: the posterior of the surrogate without them.
    :param tails: the tails of that surrogate.
    """
    found, after = with_representatives(problem, pilot, posterior, tails)
    if found is posterior or not posterior.gaussian:
        return found, after
    location, covariance = found.draws.mean(0), np.atleast_2d(np.cov(found.draws.T))
    sd = np.sqrt(np.diag(posterior.root.T @ posterior.root))
    wider = np.sqrt(np.diag(covariance)) > _WIDER * sd
    elsewhere = np.abs(location - posterior.location) > _ELSEWHERE * sd
    if not (wider | elsewhere).any():
        return found, after
    # a normal distribution on this scale, of which draws are resampled
    root = np.linalg.cholesky(covariance).T
    white = np.random.default_rng(51).normal(size=posterior.draws.shape)
    scaled = posterior._replace(
        location=location, root=root, draws=location + white @ root
    )
    tails = measure_tails(problem, pilot, scaled)
    again, after_again = with_representatives(problem, pilot, scaled, tails)
    return (found, after) if again is scaled else (again, after_again)


def _representing(
    problem: Problem, rows: Rows, weights: np.ndarray
) -> dict[str, ExactRows]:
    """The representative rows with their weights, by plate."""
    exact = {}
    for k, (name, size) in enumerate(problem.plates.items()):
        mine = np.flatnonzero(rows.plate == k)
        if len(mine):
            exact[name] = ExactRows.representing(rows.row[mine], weights[mine])
        else:
            exact[name] = ExactRows.alone(np.zeros(0, int), size)
    return exact


def _scale(problem: Problem, before: Expansion, after: Expansion) -> float:
    """A factor for the weights such that the remaining polynomials have a maximum.

    Where the representative rows are flat, the surrogate is the prior times the
    remaining polynomials. It is proper only if these have a maximum.
    """
    taken = np.asarray(after.hessian - before.hessian)
    curvature = -np.asarray(before.hessian)
    if problem.in_own_coordinates:  # the prior has the same coordinates
        with double():
            at = jnp.asarray(before.center, jnp.float64)
            prior = np.asarray(problem.compiled(known_hessian)(at))
        curvature = curvature - prior / problem.likelihood_weight
    try:
        highest = eigh(taken, curvature, eigvals_only=True)[-1]
    except (np.linalg.LinAlgError, ValueError):  # no maximum before, or not finite
        return 1.0
    return float(min(1.0, _CURVED / highest)) if highest > 0 else 1.0


def _scaled(before: Expansion, after: Expansion, scale: float) -> Expansion:
    """The expansion after with the weights of its representative rows scaled."""

    def scaled(kept: ExactRows) -> ExactRows:
        if kept.surplus is None:
            return kept
        weights = scale * kept.weights
        return kept._replace(weights=weights, surplus=weights)

    return after._replace(
        gradient=before.gradient + scale * (after.gradient - before.gradient),
        hessian=before.hessian + scale * (after.hessian - before.hessian),
        exact={name: scaled(kept) for name, kept in after.exact.items()},
    )


def _solve_lower(root: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The solution of a lower triangular system, the first rows of a larger one."""
    size = len(values)
    if not size:
        return values
    return solve_triangular(root[:size, :size], values, lower=True, check_finite=False)


def nonnegative_fit(
    columns: np.ndarray, sums: np.ndarray, tolerance: float, most: int
) -> np.ndarray:
    """Non-negative least squares with few columns, by Lawson and Hanson, stopped early.

    :param columns: shape ``(K, m)``.
    :param sums: the vector to fit by multiples of the columns, ``(K,)``.
    :param tolerance: root mean square of the residual at which to stop.
    :param most: the largest number of columns with a non-zero multiple.
    :return: the multiples, ``(m,)``, nearly all zero.
    """
    norms = np.linalg.norm(columns, axis=0)
    norms = np.where(norms > 0, norms, 1.0)
    unit = columns / norms
    gram, target = unit.T @ unit, unit.T @ sums
    most_left, of_sums = tolerance**2 * len(sums), sums @ sums
    found = np.zeros(columns.shape[1])
    active: list[int] = []
    root = np.zeros((most, most))  # lower triangular, of the Gram matrix of the active
    for _ in range(3 * most):
        explained = found[active] @ gram[active]
        left = of_sums - (2.0 * target - explained) @ found
        gain = target - explained
        gain[active] = -np.inf
        best = int(np.argmax(gain))
        done = left <= most_left or len(active) >= most
        if done or not gain[best] > 1e-9 * np.sqrt(of_sums):
            break
        active.append(best)
        size = len(active)
        row = _solve_lower(root, gram[active[:-1], best])
        root[size - 1, : size - 1] = row
        root[size - 1, size - 1] = np.sqrt(max(1.0 + _RIDGE - row @ row, _RIDGE))
        while active:
            solved = cho_solve(
                (root[: len(active), : len(active)], True), target[active]
            )
            if solved.min() > 0:
                found[:] = 0
                found[active] = solved
                break
            # move towards the solution as far as all multiples stay positive
            old = found[active]
            falling = solved <= 0
            with np.errstate(divide="ignore", invalid="ignore"):
                step = np.where(falling, old / (old - solved), np.inf).min()
            new = old + step * (solved - old)
            found[active] = new
            stay = [k for k, value in zip(active, new, strict=True) if value > 1e-12]
            found[[k for k in active if k not in stay]] = 0
            active = stay
            size = len(active)
            inner = gram[np.ix_(active, active)] + _RIDGE * np.eye(size)
            root[:size, :size] = np.linalg.cholesky(inner)
    return found / norms
