"""What a control variate leaves over, measured on all rows before a run relies on it.

The residuals of a few rows can carry nearly all of what a decision needs, and a batch
that misses them has too little scatter to show it. So a few draws of the surrogate's
posterior are compared on every row: which rows matter, how noisy a batch really is,
and whether the expansion holds at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.batch import Design, FullBatch, Scheme, Weighted
from numpyro_minibatch.control_variate._posterior import SurrogatePosterior
from numpyro_minibatch.control_variate._problem import (
    Chosen,
    Needs,
    Problem,
    Refused,
    double,
)
from numpyro_minibatch.control_variate._residuals import ResidualScan
from numpyro_minibatch.control_variate._taylor import Form, Taylor

__all__ = [
    "FLOAT_ERROR",
    "IN_DOUBLE",
    "QUIET",
    "SCORING",
    "Pilot",
    "run_pilot",
]

SCORING = 24  # draws that score the rows
_HELD_OUT = 32  # draws that judge the design, in pairs
IN_DOUBLE = 8  # draws on which the precisions are compared
FLOAT_ERROR = 0.05  # error of a summed residual, in units of the log ratio
_MIN_BATCH = 100  # rows that make an estimate normal and its variance known
QUIET = 0.25  # noise of a log ratio at which neither matters


class Pilot(NamedTuple):
    """What the pilot measured; all in units of the log ratio of a decision.

    :param form: how residuals are computed.
    :param sizes: rows of a batch, by plate.
    :param scheme: how they are drawn, bound to these sizes.
    :param designs: the tables by which they are drawn, by plate.
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
    scheme: Scheme
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
        """Everything but the tables, and the noise below which neither matters."""
        tables = "scheme", "designs", "scores", "scan"
        measured = {k: v for k, v in self._asdict().items() if k not in tables}
        return {**measured, "quiet_sd": QUIET}


def run_pilot(
    problem: Problem,
    chosen: Chosen,
    needs: Needs,
    posterior: SurrogatePosterior,
    before: Pilot | None = None,
) -> Pilot:
    """Measure what the expansion leaves over, and design the batches by it.

    :param problem: the target and its coordinates.
    :param chosen: the user's choices.
    :param needs: what the kernel needs.
    :param posterior: that of the surrogate.
    :param before: what was measured with the polynomials of all rows, where some are
        exact now.
    :raises Refused: the expansion or the precision is not good enough.
    """
    taylor, exact = chosen.taylor, posterior.expansion.exact
    scoring = posterior.draws[:SCORING]
    held_out = posterior.draws[SCORING : SCORING + _HELD_OUT]
    stage("pilot: scores")
    if before is None:
        scan, (sums, uniform), float_error = _choose_form(
            problem, taylor, posterior, held_out
        )
    else:
        scan, float_error = before.scan.keeping(exact), before.float_error
        sums, uniform = scan.sums(held_out)
    scores, order_by = scan.scores(scoring)
    for name, score in scores.items():
        if not np.isfinite(score).all():
            row = int(np.argmin(np.isfinite(score)))
            raise Refused(_not_finite(f"row {row} of plate {name!r}"))
    stage("pilot: noise of a batch")
    if taylor.order < 2:
        # the surrogate's posterior is of second order all the same
        second = ResidualScan(problem, 2, scan.form, scan.expansion)
        sums, _ = second.keeping(exact).sums(held_out)
    weight = problem.weights.likelihood
    residual_sd = weight * sums.std(ddof=1)
    if not residual_sd <= taylor.max_residual_sd:
        raise Refused(_refusal(residual_sd, taylor.max_residual_sd))
    importance = np.exp(weight * (sums - sums.max()))
    found = _choose_sizes(scan, chosen, needs, (scores, order_by), held_out, uniform)
    total = sum(np.square(s).sum() for s in scores.values())
    fourth = sum((np.asarray(s, np.float64) ** 4).sum() for s in scores.values())
    return Pilot(
        form=scan.form,
        sizes=found.sizes,
        scheme=chosen.scheme.bound(found.sizes, problem.plates),
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
    scan: ResidualScan,
    asked: Chosen,
    needs: Needs,
    scores: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
    draws: np.ndarray,
    uniform: Mapping[str, np.ndarray],
) -> _Sizes:
    """As few rows as the noise allows.

    A batch is kept whose noise is nothing that a decision would notice; else it has
    enough rows for its mean to be normal, and for a noise that a decision can take.

    :param scan: of the residuals.
    :param asked: the user's choices.
    :param needs: what the kernel needs.
    :param scores: how much each row matters, and what to sort them by.
    :param draws: draws that judge, in pairs.
    :param uniform: variance over the rows of the differences of each pair.
    """
    plates, weight = scan.problem.plates, scan.problem.likelihood_weight
    chosen = {
        name: min(m or needs.smallest, plates[name]) for name, m in asked.sizes.items()
    }
    free = [name for name, m in asked.sizes.items() if m is None]
    for _ in range(6):
        bound = asked.scheme.bound(chosen, plates)
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


def _not_finite(which: str) -> str:
    return (
        f"the log likelihood of {which} is not finite within the posterior of "
        "the surrogate, so it has no expansion there. Bound the parameters by their "
        "priors to where all rows are possible, or sample without a control variate."
    )


def _refusal(found: float, limit: float) -> str:
    return (
        "the expansion of the likelihood does not hold over the posterior: "
        f"what it leaves of the log density has a standard deviation of {found:.2g}, "
        f"and {limit:.2g} is the limit. Minibatches cannot make up for it. Expand in "
        "coordinates in which the likelihood is closer to a parabola "
        '(numpyro.deterministic sites: control_variate.taylor2(sites=["theta"])), '
        'transform or standardise the parameters, use estimate="exact" or '
        "NumPyro's NUTS if the data are few, or sample at a temperature. For several "
        "separate modes no expansion is right."
    )


def _choose_form(
    problem: Problem, taylor: Taylor, posterior: SurrogatePosterior, draws: np.ndarray
) -> tuple[ResidualScan, Any, float]:
    """The first form whose rounding errors do not matter, and its sums at the draws."""
    expansion = posterior.expansion
    auto = taylor.form == "auto"
    forms: tuple[Form, ...] = ("direct", "remainder") if auto else (taylor.form,)
    if problem.dtype == jnp.float64:
        scan = ResidualScan(problem, taylor.order, forms[0], expansion)
        return scan, scan.sums(draws), 0.0
    few = draws[:IN_DOUBLE]
    with double():
        wide = ResidualScan(problem, taylor.order, "direct", expansion, jnp.float64)
        right, _ = wide.sums(few)
    if not np.isfinite(right).all():
        raise Refused(_not_finite("some row"))
    error = np.inf
    for form in forms:
        scan = ResidualScan(problem, taylor.order, form, expansion)
        found = scan.sums(draws)
        error = (found[0][: len(few)] - right).std(ddof=1) * problem.weights.likelihood
        if error <= FLOAT_ERROR:
            return scan, found, float(error)
    raise Refused(
        f"in single precision the sum of the residuals is off by {error:.2g}, "
        f"and {FLOAT_ERROR} is the limit: an error that all rows share is multiplied "
        "by their number. Call numpyro.enable_x64() before the run, or standardise "
        "the data."
    )
