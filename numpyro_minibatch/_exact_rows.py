"""Which rows the surrogate has as they are, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from scipy.linalg import eigh

from numpyro_minibatch._expansion import Problem, double
from numpyro_minibatch._pilot import SCORING, Pilot
from numpyro_minibatch._residuals import ResidualScan, Rows
from numpyro_minibatch.batch import FullBatch, Scheme, Weighted
from numpyro_minibatch.control_variate import ExactRows, Expansion, Taylor

__all__ = ["exact_rows", "without"]

_COARSE = 0.5  # residual above which the surrogate should have some rows exactly
_WORTH = 0.9  # of it that may be left
_FITTING = 200  # draws by which rows are found to be alike, and as many that judge
_CANDIDATES = 2048  # rows of which some are taken that others are like
_CURVED = 0.9  # of the curvature that exact rows may take from the polynomials
_EXACT = (16, 32, 64, 128, 256, 512, 1024, 2048)  # how many that may be


def exact_rows(
    problem: Problem,
    taylor: Taylor,
    scheme: Scheme,
    pilot: Pilot,
    expansion: Expansion,
    draws: np.ndarray,
) -> dict[str, ExactRows]:
    """The rows that the surrogate had better have as they are, by plate; maybe none.

    Where an expansion is coarse, a few rows carry much of what it leaves over, or rows
    are like each other. The exact ones are the same for every batch, so that chains
    side by side share them, and once they belong to the surrogate, trajectories follow
    what they say.

    :param problem: the target and its coordinates.
    :param taylor: the control variate.
    :param scheme: how rows are drawn.
    :param pilot: what was measured with the polynomials of all rows.
    :param expansion: these.
    :param draws: draws of the surrogate's posterior, ``(K, D)``.
    """
    sizes, full = problem.plates, isinstance(scheme, FullBatch)
    number, of_batch = sum(sizes.values()), sum(pilot.sizes.values())
    if taylor.exact_rows is not None:
        counts = [min(taylor.exact_rows, number)]
    elif pilot.residual_sd <= _COARSE or problem.on_host:
        counts = [0]
    elif not (full or isinstance(scheme, Weighted)):
        counts = [0]  # somebody wants to see what such batches do
    elif full and number <= _EXACT[-1]:
        counts = [number]  # they are all read anyway
    else:
        # more than half a batch would cost more than they save
        most = max(of_batch // 2, _EXACT[0])
        counts = [0, *(count for count in _EXACT if count <= most)]
    if not counts[-1]:
        return {}
    scan, by_plate = pilot.scan, pilot.scores
    if taylor.order < 2:  # the surrogate is of second order all the same
        scan = ResidualScan(problem, 2, pilot.form, expansion)
        by_plate, _ = scan.scores(draws[:SCORING])
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
    sums, _ = scan.sums(judging)
    weight = np.asarray(problem.weights.likelihood, float)
    left = weight * (sums[:, None] - scan.of_rows(judging, highest).cumsum(1))
    left = left.std(0, ddof=1)
    enough = [count for count in counts if count and left[count - 1] <= _COARSE]
    found = highest.take(slice(min(enough, default=counts[-1]))).alone(sizes)
    if enough or taylor.order < 2:
        return found
    if taylor.exact_rows is None and left[-1] > _WORTH * pilot.residual_sd:
        found = {}

    # too many matter: rather some that stand for others, as far as these are alike
    leaders = rows.take(_leaders(scan, fitting, rows, scores, counts[-1]))
    leading = _led(problem, scan, fitting, expansion, leaders.alone(sizes))
    weights = np.concatenate([kept.weights for kept in leading.values()])
    led = weight * (sums - scan.of_rows(judging, leaders) @ weights).std(ddof=1)
    return leading if led <= _WORTH * min(left[-1], pilot.residual_sd) else found


def _leaders(
    scan: ResidualScan, draws: np.ndarray, rows: Rows, scores: np.ndarray, many: int
) -> np.ndarray:
    """Which rows are most like all others, sorted; a greedy search.

    Each step takes the one that adds most to what the best of those taken explains of
    each row, the square of a correlation times the row's score.

    :param scan: of the residuals.
    :param draws: draws of the surrogate's posterior, ``(K, D)``.
    :param rows: all rows.
    :param scores: how much each matters.
    :param many: how many to take.
    """
    count = min(_CANDIDATES, len(scores))
    # without replacement, in proportion to the scores: the first of so many clocks
    clocks = np.random.default_rng(33).exponential(size=len(scores))
    with np.errstate(divide="ignore"):
        some = np.sort(np.argsort(clocks / scores, kind="stable")[:count])
    chance = np.minimum(1.0, count * scores[some] / scores.sum())
    stands_for = scores[some] / np.where(chance > 0, chance, 1.0)
    candidates = rows.take(some)
    residuals = scan.of_rows(draws, candidates)
    residuals = residuals - residuals.mean(0)
    norms = np.linalg.norm(residuals, axis=0)
    residuals = (residuals / np.where(norms > 0, norms, 1.0)).astype(np.float32)
    like = np.square(residuals.T @ residuals)
    like *= candidates.plate == candidates.plate[:, None]
    like *= stands_for[:, None].astype(np.float32)  # by row
    taken = np.zeros(min(many, count), int)
    best = np.zeros((count, 1), np.float32)
    for k in range(len(taken)):
        taken[k] = np.argmax(np.maximum(like, best).sum(0))
        best = np.maximum(best, like[:, taken[k], None])
    return some[np.unique(taken)]


def _led(
    problem: Problem,
    scan: ResidualScan,
    draws: np.ndarray,
    expansion: Expansion,
    alone: dict[str, ExactRows],
) -> dict[str, ExactRows]:
    """These rows, each of which stands for those that it leads.

    :param problem: the target and its coordinates.
    :param scan: of the residuals.
    :param draws: draws of the surrogate's posterior, ``(K, D)``.
    :param expansion: of all rows.
    :param alone: the rows.
    """
    found = {}
    for name, (leader, share) in scan.led(draws, alone).items():
        rows = np.asarray(alone[name].rows)
        share[rows] = 0.0  # for now
        leader[rows] = np.arange(len(rows))
        found[name] = leader, share

    def led(scale: float) -> dict[str, ExactRows]:
        new = dict(alone)
        for name, (leader, share) in found.items():
            kept = alone[name]
            share = np.where(kept.others, scale * share, 1.0)
            new[name] = kept._replace(
                weights=jnp.asarray(np.bincount(leader, share, len(kept.rows))),
                leader=jnp.asarray(leader),
                share=jnp.asarray(share),
            )
        return new

    # What polynomials are left must have a maximum: without it the surrogate, which
    # follows a leader's log likelihood where it is flat, would have no tails.
    before = without(problem, expansion, alone).hessian
    taken = without(problem, expansion, led(1.0)).hessian - before
    curvature = 1e-6 * np.mean(-np.diag(before)) * np.eye(len(before)) - before
    if problem.coordinates.latents is None:  # the prior has these coordinates, too
        weight = np.asarray(problem.weights.likelihood, float)
        with double():
            known = jax.hessian(partial(problem.known, problem.arrays))
            at = jnp.asarray(expansion.center, jnp.float64)
            curvature = curvature - np.asarray(jax.jit(known)(at)) / weight
    try:
        highest = eigh(taken, curvature, eigvals_only=True)[-1]
    except np.linalg.LinAlgError:  # it had none before
        return alone
    return led(min(1.0, _CURVED / highest) if highest > 0 else 1.0)


def without(
    problem: Problem, expansion: Expansion, exact: Mapping[str, ExactRows]
) -> Expansion:
    """The same expansion of all but what these rows stand for.

    :param exact: rows of each plate, which it has as they are.
    """
    alone = expansion._replace(exact=exact)

    def total(arrays: list[Any], phi: Array) -> Array:
        target = problem.target_of(arrays)
        zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x)), problem.example)
        _, unravel_phi = ravel_pytree(problem.coordinates.of(target, zeros))
        read = problem.coordinates.rows(
            target, unravel_phi(phi), zeros, alone.exact_rows
        )
        values = alone.exact_values(read)
        return sum((x.sum() for x in values), jnp.zeros(()))

    with double():
        at = jnp.asarray(expansion.center, jnp.float64)
        kinds = total, jax.grad(total, 1), jax.hessian(total, 1)
        found = [np.asarray(jax.jit(fn)(problem.arrays, at)) for fn in kinds]
    value, gradient, hessian = found
    return alone._replace(
        value=expansion.value - value,
        gradient=expansion.gradient - gradient,
        hessian=expansion.hessian - hessian,
    )
