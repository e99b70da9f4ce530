"""Draws from the posterior of the surrogate, before any batch is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.control_variate._expand import Expansion
from numpyro_minibatch.control_variate._nuts import (
    CHAINS,
    by_nuts,
    compile_nuts,
    elsewhere,
)
from numpyro_minibatch.control_variate._problem import (
    NotDefinite,
    Problem,
    Refused,
    double,
)
from numpyro_minibatch.control_variate._surrogate import (
    hessian,
    log_densities,
    log_density,
    log_surrogate_at,
)
from numpyro_minibatch.proposal import HEAVY_DF

__all__ = [
    "NORMAL",
    "POOL",
    "SurrogatePosterior",
    "laplace",
    "misfit",
    "refined",
    "sampled_posterior",
    "surrogate_posterior",
]

POOL = 2000  # draws of the surrogate for all later stages
# The covariance of more coordinates also uses so many Hessians of the surrogate. The
# draws then count as this share of independent ones.
_FEW_COORDINATES, _CURVATURES, _EFFECTIVE = 40, 32, 0.5
_FEW_DRAWS = 200  # smallest effective number of draws after resampling
# draws that judge whether the posterior is normal, and the largest standard deviation
# of their log ratio to a normal distribution
_JUDGING, NORMAL = 56, 0.1
# So few draws have no tails. They are also looked at, so many standard deviations from
# the mode along the first parameters, and their log ratio may be larger by so much.
_FAR, _HIGHER, _LOOKED_AT = (2.0, 3.0), 0.4, 12

# given the target, the surrogate in working precision, and a flat position
Meanwhile = Callable[[Problem, Expansion, np.ndarray], None]


class SurrogatePosterior(NamedTuple):
    """The posterior of the surrogate, known before any decision reads a row.

    :param expansion: the surrogate's, in double precision.
    :param location: approximately its mean, flat, ``(D,)``.
    :param root: the transpose of a root of its approximate covariance, ``(D, D)``.
    :param draws: draws from it, ``(K, D)``.
    :param gaussian: whether it is normal, up to differences too small for a decision.
    :param rhat: the largest R-hat of its draws; 1 where they are independent.
    """

    expansion: Expansion
    location: np.ndarray
    root: np.ndarray
    draws: np.ndarray
    gaussian: bool
    rhat: float


def surrogate_posterior(
    problem: Problem,
    expansion: Expansion,
    start: np.ndarray,
    known_hessian: np.ndarray | None = None,
    meanwhile: Meanwhile | None = None,
) -> SurrogatePosterior:
    """Draw from the posterior of the surrogate, without reading data.

    If the prior is nearly normal, a normal distribution stands for the posterior.
    Otherwise NUTS samples it.

    :param problem: the target and its coordinates.
    :param expansion: the expansion about the centre, in double precision.
    :param start: where NUTS starts, flat.
    :param known_hessian: the Hessian of all that is not expanded at the centre, if it
        is already known.
    :param meanwhile: compiles, on other threads, what is needed later.
    :raises Refused: it is not proper, or trajectories diverge.
    """
    stage("posterior of the surrogate")
    if problem.in_own_coordinates:
        normal = laplace(problem, expansion, known_hessian)
        with double():
            wide = expansion.cast(jnp.float64)
            some = jnp.asarray(_judged(normal), jnp.float64)
            values = problem.compiled(log_densities)(wide, some)
        if _misfit(normal, np.asarray(values)) < NORMAL:
            return normal
        start = normal.location
    starts = start + 0.01 * _normals(len(start))[:CHAINS]
    others = elsewhere(problem, starts)
    return sampled_posterior(problem, expansion, starts, others, meanwhile)


def laplace(
    problem: Problem, expansion: Expansion, known_hessian: np.ndarray | None = None
) -> SurrogatePosterior:
    """The normal distribution with the mode and the curvature of the surrogate.

    :param problem: the target, whose coordinates are its own.
    :param expansion: the expansion about the mode, in double precision.
    :param known_hessian: the Hessian of all that is not expanded at the centre, if it
        is already known.
    :raises Refused: the curvature is not that of a maximum.
    """
    center = np.asarray(expansion.center)
    if known_hessian is None or expansion.exact:
        with double():
            wide = expansion.cast(jnp.float64)
            precision = -np.asarray(problem.compiled(hessian)(wide, wide.center))
    else:
        weight = problem.likelihood_weight
        precision = -(known_hessian + weight * np.asarray(expansion.hessian))
    values, vectors = np.linalg.eigh(precision)
    if not values[0] > 0:
        # the search converged because of a ridge, which is not part of the posterior
        raise NotDefinite.of(values[0], center, vectors[:, 0])
    root = np.asarray(np.linalg.cholesky(np.linalg.inv(precision)).T)
    draws = center + _normals(len(center)) @ root
    return SurrogatePosterior(expansion, center, root, draws, True, 1.0)


def misfit(problem: Problem, normal: SurrogatePosterior, expansion: Expansion) -> float:
    """Standard deviation of the log ratio of a surrogate to a normal distribution.

    If tails are heavier than those of a normal distribution, it is that of the tails.

    :param problem: the target and its coordinates.
    :param normal: what :func:`laplace` returned, whose draws are used.
    :param expansion: that of the surrogate.
    """
    some = _judged(normal)
    values = log_surrogate_at(problem, expansion.cast(problem.dtype), some)
    return _misfit(normal, values)


def _judged(normal: SurrogatePosterior) -> np.ndarray:
    """Draws, the mode, and positions in both tails of parameters."""
    covariance = (normal.root.T @ normal.root)[:_LOOKED_AT]
    away = covariance / np.sqrt(np.diagonal(covariance))[:, None]
    tails = [normal.location + sign * far * away for far in _FAR for sign in (-1, 1)]
    mode = normal.location[None]
    return np.concatenate([normal.draws[:_JUDGING], mode, *tails])


def _misfit(normal: SurrogatePosterior, values: np.ndarray) -> float:
    """The same, of the log density at these positions."""
    squares = np.square(_normals(len(normal.location))[:_JUDGING]).sum(1)
    with np.errstate(invalid="ignore"):
        ratio = values[:_JUDGING] + 0.5 * squares
        found = float(np.std(ratio))
        at_mode, *of_tails = values[_JUDGING:]
        tails = np.reshape(of_tails, (len(_FAR), -1)).T + 0.5 * np.square(_FAR)
        # the mean of the draws is lower or higher in many coordinates
        higher = float(tails.max() - at_mode)
    if not np.isfinite(found) or np.isnan(higher):
        return np.inf
    return max(found, higher) if higher > _HIGHER else found


def _normals(dim: int) -> np.ndarray:
    """The whitened draws of every normal distribution here."""
    return np.random.default_rng(30).normal(size=(POOL, dim))


def sampled_posterior(
    problem: Problem,
    expansion: Expansion,
    starts: np.ndarray,
    elsewhere: np.ndarray | None,
    meanwhile: Meanwhile | None = None,
) -> SurrogatePosterior:
    """Sample the posterior of a surrogate with NUTS.

    :param problem: the target and its coordinates.
    :param expansion: that of the surrogate, in double precision.
    :param starts: a flat position for each chain.
    :param elsewhere: other starts for half of them, if there are any.
    :param meanwhile: compiles, on other threads, what is needed later.
    :raises Refused: the posterior is not proper, or trajectories diverge.
    """
    cast = expansion.cast(problem.dtype)
    if meanwhile is not None:  # compiled at the same time as NUTS
        compile_nuts(problem, cast, starts[0])
        meanwhile(problem, cast, starts[0])
    draws, rhat = by_nuts(problem, cast, starts, elsewhere)
    location, root = _scaled(problem, cast, draws)
    draws = draws[np.random.default_rng(32).permutation(len(draws))]
    return SurrogatePosterior(expansion, location, root, draws, False, rhat)


def _scaled(
    problem: Problem, expansion: Expansion, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mean of some draws, and the transpose of a root of their covariance.

    With ``D`` coordinates and ``n`` draws, the variances of combinations of coordinates
    in units of the true ones range from ``(1 - sqrt(D / n))**2`` to
    ``(1 + sqrt(D / n))**2``: from 0.25 to 2.25 for 500 coordinates. So with many
    coordinates, the covariance is shrunk towards the inverse of the mean curvature,
    which few draws determine. The weight is that of Ledoit and Wolf (2004), in
    coordinates in which this inverse is the identity.

    :param problem: the target and its coordinates.
    :param expansion: that of the surrogate, in working precision.
    :param draws: draws from the surrogate's posterior.
    """
    covariance = np.atleast_2d(np.cov(draws.T))
    known = None
    if len(covariance) > _FEW_COORDINATES:
        hessian_at = problem.compiled(hessian)
        at = draws[np.linspace(0, len(draws) - 1, _CURVATURES).astype(int)]
        found = [hessian_at(expansion, jnp.asarray(x, problem.dtype)) for x in at]
        known = _root_of_inverse(-np.stack(found).mean(0, np.float64))
    if known is None:
        weight, target = 0.02, np.diag(np.diag(covariance))
    else:
        target = known.T @ known
        white = np.linalg.solve(known.T, np.linalg.solve(known.T, covariance).T)
        noise = len(white) * (len(white) + 1) / (_EFFECTIVE * len(draws))
        weight = min(1.0, noise / np.square(white - np.eye(len(white))).sum())
    covariance = (1 - weight) * covariance + weight * target
    return draws.mean(0), np.asarray(np.linalg.cholesky(covariance).T, np.float64)


def _root_of_inverse(precision: np.ndarray) -> np.ndarray | None:
    """``R`` with ``R.T @ R`` the inverse; ``None`` if it is not positive definite."""
    if not np.isfinite(precision).all():
        return None
    try:
        return np.linalg.inv(np.linalg.cholesky(precision))
    except np.linalg.LinAlgError:
        return None


def refined(
    problem: Problem,
    posterior: SurrogatePosterior,
    expansion: Expansion,
    resample: bool = True,
) -> SurrogatePosterior | None:
    """The posterior of a changed surrogate.

    Its draws are resampled from those of the previous surrogate, or from Student-t
    draws if that one was normal. The location and the root then stay the same: they
    only scale moves, and the covariance of resampled draws has more noise than the
    difference between the two posteriors. If too few effective draws would be left, the
    posterior has moved: NUTS makes new draws, which give a new location and root.

    :param problem: the target and its coordinates.
    :param posterior: the posterior of the previous surrogate.
    :param expansion: the changed expansion, in double precision.
    :param resample: whether draws may be resampled; otherwise NUTS makes new ones.
    :return: ``None`` if it cannot be sampled.
    """
    both = tuple(e.cast(problem.dtype) for e in (posterior.expansion, expansion))
    rng, rhat = np.random.default_rng(34), posterior.rhat
    location, root = posterior.location, posterior.root
    if posterior.gaussian:
        pool, log_proposal = _heavier(posterior)
        logs = log_surrogate_at(problem, both[1], pool) - log_proposal
    else:
        pool = posterior.draws
        draws = jnp.asarray(pool, problem.dtype)
        logs = np.asarray(problem.compiled(_log_weights)(both, draws), np.float64)
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    weights = np.exp(logs - max(logs.max(), np.finfo(float).min))
    enough = weights.sum() ** 2 >= _FEW_DRAWS * np.square(weights).sum() > 0
    if resample and enough:
        places = (np.arange(len(weights)) + rng.uniform()) / len(weights)
        found = np.searchsorted(np.cumsum(weights / weights.sum()), places)
        chosen = pool[np.minimum(found, len(weights) - 1)]
    else:
        scales = 0.01 * root.T @ rng.normal(size=(len(root), CHAINS))
        try:
            chosen, rhat = by_nuts(problem, both[1], location + scales.T)
        except Refused:
            return None
        location, root = _scaled(problem, both[1], chosen)
    chosen = rng.permutation(chosen)
    return SurrogatePosterior(expansion, location, root, chosen, False, rhat)


def _heavier(posterior: SurrogatePosterior) -> tuple[np.ndarray, np.ndarray]:
    """Student-t draws in place of normal ones, and their log density.

    Resampled normals would lack the tails of a surrogate with heavier ones, and with
    them the positions at which its moves are hardest.
    """
    normal = np.linalg.solve(posterior.root.T, (posterior.draws - posterior.location).T)
    chi_squared = np.random.default_rng(35).chisquare(
        HEAVY_DF, size=len(posterior.draws)
    )
    white = normal.T * np.sqrt(HEAVY_DF / chi_squared)[:, None]
    squares = np.square(white).sum(1)
    logs = -0.5 * (HEAVY_DF + len(normal)) * np.log1p(squares / HEAVY_DF)
    return posterior.location + white @ posterior.root, logs


def _log_weights(
    problem: Problem, arrays: list[Any], both: tuple[Expansion, ...], draws: Array
) -> Array:
    def one(flat: Array) -> Array:
        logs = [log_density(problem, arrays, e, flat) for e in both]
        return logs[1] - logs[0]

    return jax.lax.map(one, draws, batch_size=100)
