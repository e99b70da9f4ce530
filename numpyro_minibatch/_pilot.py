"""What a control variate leaves over, measured on all rows before a run relies on it.

The residuals of a few rows can carry nearly all of what a decision needs, and a batch
that misses them has too little scatter to show it. So a few draws of the surrogate's
posterior are compared on every row: which rows matter, how noisy a batch really is,
and whether the expansion holds at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from scipy.linalg import eigh

from numpyro_minibatch import control_variate
from numpyro_minibatch._expansion import Problem, double
from numpyro_minibatch._passes import Chunks
from numpyro_minibatch._strata import Design, stratum_of
from numpyro_minibatch.batch import FullBatch, Scheme, Weighted
from numpyro_minibatch.control_variate import ExactRows, Expansion, Form, Taylor

__all__ = [
    "QUIET",
    "Pilot",
    "exact_rows",
    "run_pilot",
    "without",
]

_SCORING = 24  # draws that score the rows
_HELD_OUT = 32  # draws that judge the design, in pairs
_IN_DOUBLE = 8  # draws on which the precisions are compared
_FLOAT_ERROR = 0.05  # error of a summed residual, in units of the log ratio
_MIN_BATCH = 100  # rows that make an estimate normal and its variance known
QUIET = 0.25  # noise of a log ratio at which neither matters
_WIDTH = 2**13  # rows that are read at once, at all draws
_COARSE = 0.5  # residual above which the surrogate should have some rows exactly
_WORTH = 0.9  # of it that may be left, with as many of them as a batch has rows
_FITTING = 200  # draws by which rows are found to be alike
_CANDIDATES = 2048  # rows of which some are taken that others are like
_CURVED = 0.9  # of the curvature that exact rows may take from the polynomials
_EXACT = (16, 32, 64, 128, 256, 512, 1024, 2048)  # how many that may be


class Pilot(NamedTuple):
    """What the pilot measured; all in units of the log ratio of a decision.

    :param form: how residuals are computed.
    :param sizes: rows of a batch, by plate.
    :param designs: how they are drawn, by plate.
    :param batch_sd: median over pairs of draws of the true standard deviation of a
        batch's log ratio.
    :param batch_sd_95: its 95% quantile.
    :param uniform_sd: the median for as many rows drawn uniformly.
    :param residual_sd: standard deviation over draws of the sum of all residuals.
    :param importance_ess: share of independent draws that importance weights with
        this sum leave.
    :param float_error: standard deviation of the sum's rounding error.
    :param effective_rows: number of rows that carry the mean square of the residuals.
    :param scores: how much each row matters, by plate.
    :param scan: the passes over the residuals.
    """

    form: Form
    sizes: dict[str, int]
    designs: dict[str, Design]
    batch_sd: float
    batch_sd_95: float
    uniform_sd: float
    residual_sd: float
    importance_ess: float
    float_error: float
    effective_rows: float
    scores: dict[str, np.ndarray]
    scan: Any

    def without_residuals(self) -> Pilot:
        """What is measured where no row is expanded."""
        return self._replace(
            batch_sd=0.0,
            batch_sd_95=0.0,
            uniform_sd=0.0,
            residual_sd=0.0,
            importance_ess=1.0,
            float_error=0.0,
            effective_rows=0.0,
        )

    @property
    def report(self) -> dict[str, Any]:
        """Everything but the tables."""
        tables = "designs", "scores", "scan"
        return {k: v for k, v in self._asdict().items() if k not in tables}


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
        # more than a batch would cost more than they save
        counts = [0, *(count for count in _EXACT if count <= of_batch)]
    if not counts[-1]:
        return {}
    scan, by_plate = pilot.scan, pilot.scores
    if taylor.order < 2:  # the surrogate is of second order all the same
        scan = _ResidualScan(problem, 2, pilot.form, expansion)
        by_plate, _ = scan.scores(draws[:_SCORING])
    scores = np.concatenate([by_plate[name] for name in sizes])
    rows = _Rows(
        np.repeat(np.arange(len(sizes)), list(sizes.values())),
        np.concatenate([np.arange(size) for size in sizes.values()]),
    )
    highest = rows.take(np.argsort(-scores, kind="stable")[: counts[-1]])
    alone = highest.alone(sizes)
    if counts[-1] == number:
        return alone
    fitting, judging = draws[_SCORING:][: 2 * _FITTING].reshape(2, _FITTING, -1)
    sums, _ = scan.sums(judging)
    weight = np.asarray(problem.weights.likelihood, float)
    left = weight * (sums[:, None] - scan.of_rows(judging, highest).cumsum(1))
    left = left.std(0, ddof=1)
    many = counts[-1] if len(counts) == 1 else max(counts[-1] // 2, _EXACT[0])
    enough = [count for count in counts if count and left[count - 1] <= _COARSE]
    found = highest.take(slice(min(enough, default=counts[-1]))).alone(sizes)
    if enough and min(enough) <= many or taylor.order < 2:
        return found
    if taylor.exact_rows is None and left[-1] > _WORTH * pilot.residual_sd:
        found = {}

    # too many matter: rather some that stand for others, as far as these are alike
    leaders = rows.take(_leaders(scan, fitting, rows, scores, many))
    leading = _led(problem, scan, fitting, expansion, leaders.alone(sizes))
    weights = np.concatenate([kept.weights for kept in leading.values()])
    led = weight * (sums - scan.of_rows(judging, leaders) @ weights).std(ddof=1)
    return leading if led <= _WORTH * min(left[-1], pilot.residual_sd) else found


class _Rows(NamedTuple):
    """Rows of several plates.

    :param plate: the number of the plate of each.
    :param row: which row of it.
    """

    plate: np.ndarray
    row: np.ndarray

    def take(self, which: Any) -> _Rows:
        """Some of them."""
        return _Rows(self.plate[which], self.row[which])

    def alone(self, sizes: Mapping[str, int]) -> dict[str, ExactRows]:
        """These as exact rows, sorted, that stand for themselves."""
        return {
            name: ExactRows.alone(np.sort(self.row[self.plate == k]), size)
            for k, (name, size) in enumerate(sizes.items())
        }


def _leaders(
    scan: _ResidualScan, draws: np.ndarray, rows: _Rows, scores: np.ndarray, many: int
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
    scan: _ResidualScan,
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


def run_pilot(
    who: str,
    problem: Problem,
    taylor: Taylor,
    scheme: Scheme,
    sizes: Mapping[str, int | None],
    expansion: Expansion,
    draws: np.ndarray,
    smallest: int,
    progress: Callable[[str], None],
    before: Pilot | None = None,
) -> Pilot:
    """Measure what the expansion leaves over, and design the batches by it.

    :param who: the kernel's name, for the messages.
    :param problem: the target and its coordinates.
    :param taylor: the control variate.
    :param scheme: how rows are drawn.
    :param sizes: rows of a batch, by plate; ``None`` where the pilot is to choose.
    :param expansion: the expansion, in double precision.
    :param draws: draws of the surrogate's posterior, ``(K, D)``.
    :param smallest: rows of a batch to try first.
    :param progress: told what is being done.
    :param before: what was measured with the polynomials of all rows, where some are
        exact now.
    :raises ValueError: the expansion or the precision is not good enough.
    """
    scoring, held_out = draws[:_SCORING], draws[_SCORING : _SCORING + _HELD_OUT]
    progress("pilot: scores")
    if before is None:
        scan, (sums, uniform), float_error = _choose_form(
            who, problem, taylor, expansion, held_out
        )
    else:
        scan, float_error = before.scan.keeping(expansion.exact), before.float_error
        sums, uniform = scan.sums(held_out)
    weight = problem.weights.likelihood
    scores, order_by = scan.scores(scoring)
    for name, score in scores.items():
        if not np.isfinite(score).all():
            row = int(np.argmin(np.isfinite(score)))
            raise ValueError(_not_finite(who, f"row {row} of plate {name!r}"))
    progress("pilot: noise of a batch")
    if taylor.order < 2:
        # the surrogate's posterior is of second order all the same
        second = _ResidualScan(problem, 2, scan.form, scan.expansion)
        sums, _ = second.keeping(expansion.exact).sums(held_out)
    residual_sd = weight * sums.std(ddof=1)
    if not residual_sd <= taylor.max_residual_sd:
        raise ValueError(_refusal(who, residual_sd, taylor.max_residual_sd))
    log_weights = weight * (sums - sums.max())
    importance = np.exp(log_weights)
    found = _choose_sizes(
        scan, scheme, sizes, smallest, (scores, order_by), held_out, uniform
    )
    total = sum(np.square(s).sum() for s in scores.values())
    fourth = sum((np.asarray(s, np.float64) ** 4).sum() for s in scores.values())
    return Pilot(
        form=scan.form,
        sizes=found.sizes,
        designs=found.designs,
        batch_sd=float(np.median(found.sd)),
        batch_sd_95=float(np.quantile(found.sd, 0.95)),
        uniform_sd=float(np.median(found.uniform_sd)),
        residual_sd=float(residual_sd),
        importance_ess=float(
            importance.sum() ** 2 / np.square(importance).sum() / len(importance)
        ),
        float_error=float_error,
        effective_rows=float(total**2 / fourth) if fourth > 0 else 0.0,
        scores=scores,
        scan=scan,
    )


class _Sizes(NamedTuple):
    """Rows of a batch, how they are drawn, and the noise of each pair of draws."""

    sizes: dict[str, int]
    designs: dict[str, Design]
    sd: np.ndarray
    uniform_sd: np.ndarray


def _choose_sizes(
    scan: _ResidualScan,
    scheme: Scheme,
    given: Mapping[str, int | None],
    smallest: int,
    scores: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
    draws: np.ndarray,
    uniform: Mapping[str, np.ndarray],
) -> _Sizes:
    """As few rows as the noise allows.

    A batch is kept whose noise is nothing that a decision would notice; else it has
    enough rows for its mean to be normal, and for a noise that a decision can take.

    :param scan: of the residuals.
    :param scheme: how rows are drawn.
    :param given: rows of a batch, by plate; ``None`` where they are to be chosen.
    :param smallest: rows of a batch to try first.
    :param scores: how much each row matters, and what to sort them by.
    :param draws: draws that judge, in pairs.
    :param uniform: variance over the rows of the differences of each pair.
    """
    plates = scan.problem.plates
    weight = np.asarray(scan.problem.weights.likelihood, float)
    chosen = {name: min(m or smallest, plates[name]) for name, m in given.items()}
    free = [name for name, m in given.items() if m is None]
    for _ in range(6):
        bound = scheme.bound(chosen, plates)
        plain = np.zeros(len(draws) // 2)
        for name, size in plates.items():
            rows = chosen[name]
            plain = plain + size**2 * uniform[name] / rows * (1 - rows / size)
        designs: dict[str, Design] = {}
        if isinstance(bound, Weighted):
            for name in plates:
                designs[name] = bound.build(scores[0][name], scores[1][name], name)
            variances = scan.variances(draws, designs, bound)
        else:
            variances = 0.0 * plain if isinstance(bound, FullBatch) else plain
        sd = weight * np.sqrt(np.asarray(variances))
        q95 = float(np.quantile(sd, 0.95))
        if q95 <= QUIET or not free or isinstance(bound, FullBatch):
            break
        many = [chosen[name] >= min(_MIN_BATCH, plates[name]) for name in free]
        if q95 <= 1.0 and all(many):
            break
        before = dict(chosen)
        for name in free:
            wanted = 2 * int(np.ceil(0.55 * chosen[name] * (q95 / QUIET) ** 2))
            if wanted > _MIN_BATCH:
                enough = 2 * int(np.ceil(0.55 * chosen[name] * q95**2))
                wanted = max(_MIN_BATCH, enough)
            chosen[name] = min(wanted, plates[name])
        if chosen == before:
            break
    return _Sizes(chosen, designs, sd, weight * np.sqrt(plain))


def _not_finite(who: str, which: str) -> str:
    return (
        f"{who}: the log likelihood of {which} is not finite within the posterior of "
        "the surrogate, so it has no expansion there. Bound the parameters by their "
        "priors to where all rows are possible, or sample without a control variate."
    )


def _refusal(who: str, found: float, limit: float) -> str:
    return (
        f"{who}: the expansion of the likelihood does not hold over the posterior: "
        f"what it leaves of the log density has a standard deviation of {found:.2g}, "
        f"and {limit:.2g} is the limit. Minibatches cannot make up for it. Expand in "
        "coordinates in which the likelihood is closer to a parabola "
        '(numpyro.deterministic sites: control_variate.taylor2(sites=["theta"])), '
        'transform or standardise the parameters, use estimate="exact" or '
        "NumPyro's NUTS if the data are few, or sample at a temperature. For several "
        "separate modes no expansion is right."
    )


def _choose_form(
    who: str, problem: Problem, taylor: Taylor, expansion: Expansion, draws: np.ndarray
) -> tuple[_ResidualScan, Any, float]:
    """The first form whose rounding errors do not matter, and its sums at the draws."""
    auto = taylor.form == "auto"
    forms: tuple[Form, ...] = ("direct", "remainder") if auto else (taylor.form,)
    if problem.dtype == jnp.float64:
        scan = _ResidualScan(problem, taylor.order, forms[0], expansion)
        return scan, scan.sums(draws), 0.0
    few = draws[:_IN_DOUBLE]
    with double():
        wide = _ResidualScan(problem, taylor.order, "direct", expansion, jnp.float64)
        right, _ = wide.sums(few)
    if not np.isfinite(right).all():
        raise ValueError(_not_finite(who, "some row"))
    error = np.inf
    for form in forms:
        scan = _ResidualScan(problem, taylor.order, form, expansion)
        found = scan.sums(draws)
        error = (found[0][: len(few)] - right).std(ddof=1) * problem.weights.likelihood
        if error <= _FLOAT_ERROR:
            return scan, found, float(error)
    raise ValueError(
        f"{who}: in single precision the sum of the residuals is off by {error:.2g}, "
        f"and {_FLOAT_ERROR} is the limit: an error that all rows share is multiplied "
        "by their number. Call numpyro.enable_x64() before the run, or standardise "
        "the data."
    )


class _ResidualScan:
    """Passes over the residuals of all rows at some draws.

    Each pass is compiled once, also for :meth:`keeping` some rows out of it.
    """

    def __init__(
        self,
        problem: Problem,
        order: int,
        form: Form,
        expansion: Expansion,
        dtype: Any = None,
    ) -> None:
        self.problem, self.order, self.form = problem, order, form
        self.dtype = problem.dtype if dtype is None else dtype
        self.expansion = expansion.cast(self.dtype)
        none = np.zeros(0, int)
        self.exact = {n: ExactRows.alone(none, N) for n, N in problem.plates.items()}
        self.leaders: dict[str, np.ndarray] = {}

    def keeping(self, exact: Mapping[str, ExactRows]) -> _ResidualScan:
        """The same passes over what these rows leave of the residuals."""
        scan = copy.copy(self)
        scan.exact = {
            # which they are is no part of a pass
            name: exact.get(name, none)._replace(rows=none.rows, weights=none.weights)
            for name, none in self.exact.items()
        }
        leads = {n: kept for n, kept in exact.items() if kept.share is not None}
        scan.leaders = {n: np.asarray(kept.rows) for n, kept in leads.items()}
        return scan

    def _at(self, draws: np.ndarray) -> tuple[Expansion, Any, Array]:
        """What every pass depends on but the data."""
        kept = {
            name: (exact, self._of_rows(draws, name, self.leaders[name]))
            if name in self.leaders
            else (exact, None)
            for name, exact in self.exact.items()
        }
        return self.expansion, kept, jnp.asarray(draws, self.dtype)

    def _chunks(self, counts: Mapping[str, int] | None = None) -> Chunks:
        """How the program that is being traced goes through the rows."""
        counts = self.problem.plates if counts is None else counts
        return Chunks.of(counts, dict.fromkeys(counts, _WIDTH))

    def _residuals(
        self,
        arrays: list[Any],
        expansion: Expansion,
        kept: Mapping[str, Any],
        draws: Array,
        indices: Mapping[str, Array],
        masks: Mapping[str, Array],
    ) -> dict[str, Array]:
        """What is left of some rows, ``(K, width)``; zero where they are masked."""
        problem = self.problem
        evaluate = control_variate.expand(
            problem.target_of(arrays),
            problem.coordinates,
            self.order,
            self.form,
            expansion,
            problem.unravel,
        )

        def left(flat: Array, of_exact: Mapping[str, Array | None]) -> dict[str, Array]:
            rows = evaluate(flat, indices).rows
            return {
                n: kept[n][0].unexplained(r, indices[n], of_exact[n]) if kept else r
                for n, r in rows.items()
            }

        rows = jax.vmap(left)(draws, {n: pair[1] for n, pair in kept.items()})
        return {n: jnp.where(masks[n], r, 0.0) for n, r in rows.items()}

    def _of_rows(self, draws: np.ndarray, name: str, rows: ArrayLike) -> Array:
        """The residuals of a few rows of a plate, ``(K, number of rows)``."""
        indices = self.problem.one_row | {name: jnp.asarray(rows, jnp.int32)}
        masks = {n: jnp.ones(len(i), bool) for n, i in indices.items()}
        return jax.jit(self._residuals)(
            self.problem.arrays,
            self.expansion,
            {},
            jnp.asarray(draws, self.dtype),
            indices,
            masks,
        )[name]

    def of_rows(self, draws: np.ndarray, rows: _Rows) -> np.ndarray:
        """The residuals of a few rows, ``(K, number of rows)``."""
        found = np.zeros((len(draws), len(rows.row)))
        for k, name in enumerate(self.problem.plates):
            mine = np.flatnonzero(rows.plate == k)
            if len(mine):
                found[:, mine] = self._of_rows(draws, name, rows.row[mine])
        return found

    def led(
        self, draws: np.ndarray, exact: Mapping[str, ExactRows]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Which exact row of its plate each row is most like, and its multiple of it.

        None of it where the likeness may be chance.
        """
        leaders = {n: kept.rows for n, kept in exact.items() if len(kept.rows)}
        found = {n: self._of_rows(draws, n, rows) for n, rows in leaders.items()}
        # a squared correlation that the largest of so many may have by chance
        chance = {n: 2 * np.log(2 * len(r)) / len(draws) for n, r in leaders.items()}

        def led(
            arrays: list[Any], expansion: Expansion, of_exact: Any, draws: Array
        ) -> Any:
            chunks = self._chunks()
            unit = {n: r - r.mean(0) for n, r in of_exact.items()}
            norms = {n: jnp.linalg.norm(r, axis=0) for n, r in unit.items()}
            norms = {n: jnp.where(r > 0, r, 1.0) for n, r in norms.items()}

            def of_chunk(i: Array) -> Any:
                rows = self._residuals(arrays, expansion, {}, draws, *chunks.at(i))
                leader, share = {}, {}
                for n in leaders:
                    centred = rows[n] - rows[n].mean(0)
                    along = (unit[n] / norms[n]).T @ centred
                    leader[n] = jnp.argmax(jnp.abs(along), 0).astype(jnp.int32)
                    highest = jnp.take_along_axis(along, leader[n][None], 0)[0]
                    alike = jnp.square(highest) > chance[n] * jnp.square(centred).sum(0)
                    share[n] = jnp.where(alike, highest / norms[n][leader[n]], 0.0)
                return leader, share

            return tuple(
                {n: chunks.joined(n, part) for n, part in found.items()}
                for found in chunks.map(of_chunk)
            )

        args = self.expansion, found, jnp.asarray(draws, self.dtype)
        leader, share = self.problem.over_rows(led)(*args)
        return {n: (np.array(leader[n]), np.array(share[n])) for n in leaders}

    def scores(
        self, draws: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """How much each row matters, and its loading on the leading direction."""
        args = self._at(draws)
        grams = jax.tree.map(np.asarray, self._gram(*args))
        leading = {
            n: jnp.asarray(np.linalg.eigh(np.nan_to_num(g))[1][:, -1], self.dtype)
            for n, g in grams.items()
        }
        return jax.tree.map(np.asarray, self._score(*args, leading))

    @cached_property
    def _gram(self) -> Callable:
        """Inner products over rows of the residuals of each two draws."""
        plates = self.problem.plates

        def gram(
            arrays: list[Any], expansion: Expansion, kept: Any, draws: Array
        ) -> Any:
            # pieces of the data, the same ones on any number of devices
            strides = {n: -(-size // _WIDTH) // 16 for n, size in plates.items()}
            counts = {n: min(size, 16 * _WIDTH) for n, size in plates.items()}
            chunks = self._chunks(counts)

            def of_chunk(i: Array) -> Any:
                indices, masks = chunks.at(i)
                for name, row in indices.items():
                    skipped = (max(strides[name], 1) - 1) * (row // _WIDTH)
                    indices[name] = row + skipped * _WIDTH
                rows = self._residuals(arrays, expansion, kept, draws, indices, masks)
                centred = {n: r - r.mean(0) for n, r in rows.items()}
                return {n: r @ r.T for n, r in centred.items()}

            zeros = jnp.zeros((len(draws),) * 2, draws.dtype)
            return chunks.sum(of_chunk, dict.fromkeys(plates, zeros))

        return self.problem.over_rows(gram)

    @cached_property
    def _score(self) -> Callable:
        """The scatter of each row's residual, and its part along a direction."""

        def score(
            arrays: list[Any],
            expansion: Expansion,
            kept: Any,
            draws: Array,
            leading: Any,
        ) -> Any:
            chunks = self._chunks()

            def of_chunk(i: Array) -> Any:
                rows = self._residuals(arrays, expansion, kept, draws, *chunks.at(i))
                centred = {n: r - r.mean(0) for n, r in rows.items()}
                rms = {
                    n: jnp.sqrt(jnp.square(r).sum(0) / (len(draws) - 1))
                    for n, r in centred.items()
                }
                return rms, {n: leading[n] @ r for n, r in centred.items()}

            return tuple(
                {n: chunks.joined(n, part) for n, part in found.items()}
                for found in chunks.map(of_chunk)
            )

        return self.problem.over_rows(score)

    def sums(self, draws: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Sums of all residuals at each draw, and the variance of a row's difference.

        :return: the sums, ``(K,)``, and for each plate the variance over its rows of
            the difference between the draws of each pair, ``(K // 2,)``.
        """
        found = self._total(*self._at(draws))
        sums = np.zeros(len(draws))
        variances: dict[str, np.ndarray] = {}
        for name, (whole, square) in found.items():
            size = self.problem.plates[name]
            whole = np.asarray(whole, np.float64)
            with np.errstate(invalid="ignore"):  # infinite ones are refused later
                sums += whole
                mean = (whole[1::2] - whole[::2]) / size
                variances[name] = np.asarray(square, np.float64) / size - mean**2
        return sums, variances

    @cached_property
    def _total(self) -> Callable:
        """Sums over rows of the residuals, and of the squares of their differences."""

        def total(
            arrays: list[Any], expansion: Expansion, kept: Any, draws: Array
        ) -> Any:
            chunks = self._chunks()

            def of_chunk(i: Array) -> Any:
                rows = self._residuals(arrays, expansion, kept, draws, *chunks.at(i))
                return {
                    name: (r.sum(1), jnp.square(r[1::2] - r[::2]).sum(1))
                    for name, r in rows.items()
                }

            zeros = jnp.zeros(len(draws), draws.dtype)
            first = {n: (zeros, zeros[::2]) for n in self.problem.plates}
            return chunks.sum(of_chunk, first)

        return self.problem.over_rows(total)

    def variances(
        self, draws: np.ndarray, designs: Mapping[str, Design], scheme: Weighted
    ) -> np.ndarray:
        """The exact variance of a batch's estimate, for each pair of draws."""
        tables, strata, num_draws = {}, {}, {}
        for name, design in designs.items():
            size = self.problem.plates[name]
            stratum, probability = stratum_of(design, size)
            count = design.num_strata
            tables[name] = (
                jnp.asarray(np.where(stratum < 0, count, stratum), jnp.int32),
                jnp.asarray(probability, self.dtype),
            )
            strata[name] = count + 1
            num_draws[name] = scheme.draws_of(name)

        def total(
            arrays: list[Any],
            expansion: Expansion,
            kept: Any,
            draws: Array,
            tables: Any,
        ) -> Any:
            chunks = self._chunks()

            def of_chunk(i: Array) -> Any:
                indices, masks = chunks.at(i)
                rows = self._residuals(arrays, expansion, kept, draws, indices, masks)
                sums = {}
                for name, count in strata.items():
                    # rows that are none count for the last stratum, as the sure ones
                    stratum, probability = (t[indices[name]] for t in tables[name])
                    stratum = jnp.where(masks[name], stratum, count - 1)
                    pairs = (rows[name][1::2] - rows[name][::2]).T
                    parts = (pairs, jnp.square(pairs) / probability[:, None])
                    sums[name] = tuple(
                        jax.ops.segment_sum(p, stratum, count) for p in parts
                    )
                return sums

            first = {
                n: (jnp.zeros((count, len(draws) // 2), draws.dtype),) * 2
                for n, count in strata.items()
            }
            return chunks.sum(of_chunk, first)

        found = self.problem.over_rows(total)(*self._at(draws), tables)
        variance = np.zeros(len(draws) // 2)
        for name, parts in found.items():
            whole, square = (np.asarray(p, np.float64)[:-1] for p in parts)
            variance += np.maximum(square - whole**2, 0).sum(0) / num_draws[name]
        return variance
