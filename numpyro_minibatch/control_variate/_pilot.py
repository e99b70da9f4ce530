"""The residuals of a control variate, measured on all rows before a run relies on it.

A few rows can carry nearly all of the summed residual. A batch that misses them
underestimates its own noise. So the pilot evaluates every row at a few draws of the
surrogate's posterior. It finds out which rows matter, how noisy a batch is, and whether
the expansion is accurate enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal.precision import double
from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch._model.prior import heavy_tailed
from numpyro_minibatch.batch import Design, FullBatch, Scheme, Weighted
from numpyro_minibatch.control_variate._expand import (
    Expansion,
    Expansions,
    num_coefficients,
)
from numpyro_minibatch.control_variate._posterior import SurrogatePosterior
from numpyro_minibatch.control_variate._problem import (
    Chosen,
    HeavyTails,
    Imprecise,
    Needs,
    NoExpansion,
    Problem,
    Rounded,
)
from numpyro_minibatch.control_variate._residuals import (
    ResidualScan,
    Rows,
    Scores,
)
from numpyro_minibatch.control_variate._row_sums import (
    RowSums,
    keeps_polynomials,
    modes_of,
)
from numpyro_minibatch.control_variate._taylor import Form, Taylor
from numpyro_minibatch.target import ModelTarget, without_integrals

__all__ = [
    "COARSE",
    "FLOAT_ERROR",
    "HELD_OUT",
    "IN_DOUBLE",
    "QUIET",
    "SCORING",
    "Pilot",
    "check_residuals",
    "compile_pilot",
    "run_pilot",
]

SCORING = 24  # draws that score the rows
_MOST_TAILS = 4  # parameters whose tails do, too, with as many calls of the program
_FAR_OUT = 3.5  # standard deviations, or as far as draws are, and a little farther
_FARTHER = 1.15
HELD_OUT = 32  # draws that judge the design, in pairs
IN_DOUBLE = 8  # draws on which the precisions are compared
_FAR = 100  # times the limit of the residual, where the precision does not matter
_HOPELESS = 1e5  # the same where it is high enough, but no exact rows would help
_OF_STORED = 0.2  # the share of it that polynomials may have which could be derived
FLOAT_ERROR = 0.05  # largest rounding error of a summed residual, as a log ratio
# The same between modes: above it, their constants are corrected.
_FLOAT_ERROR_OF_MODES = 0.005
_OF_EACH_MODE = 64  # draws of each mode that correct it
_MIN_BATCH = 100  # enough rows for a normal estimate with a known variance
COARSE = 0.5  # residual above which the surrogate should have exact rows
_FEW_BLOCKS = 4  # blocks of draws, enough for a clear decision
_MORE_BLOCKS = (19, 39)  # enough for a closer one, if rows are expensive
_LARGE = 128  # evaluations of a row from which on the first of these is final
_ALL_ROWS = 2**14  # up to so many rows are all read; of more, a weighted sample
# the same if rows are integrals: as many as take so many evaluations, within limits
_EVALUATIONS, _FEWEST_INTEGRALS, _ALL_INTEGRALS = 160_000, 480, 2**12
QUIET = 0.25  # noise of a log ratio that has no effect on decisions


class Pilot(NamedTuple):
    """The results of the pilot, in units of the log ratio of a decision.

    :param form: how residuals are computed.
    :param sizes: rows of a batch, by plate.
    :param scheme: how they are drawn, bound to these sizes.
    :param designs: the tables from which the rows are drawn, by plate.
    :param batch_sd: median over pairs of draws of the true standard deviation of a
        batch's log ratio.
    :param batch_sd_95: its 95% quantile.
    :param uniform_sd: the median for as many rows drawn uniformly.
    :param residual_sd: standard deviation over draws of the sum of all residuals.
    :param residual_sd_error: its standard error, which includes the sampling of draws
        and of rows.
    :param num_draws: the number of draws.
    :param importance_ess: effective share of independent draws with importance weights
        given by this sum.
    :param float_error: standard deviation of the sum's rounding error.
    :param effective_rows: number of rows that carry the mean square of the residuals.
    :param scores: how much each row matters, by plate.
    :param scan: the passes over the residuals.
    :param sums: the sums of all residuals so far, and the variances of their errors.
    """

    form: Form
    sizes: dict[str, int]
    scheme: Scheme
    designs: dict[str, Design]
    batch_sd: float
    batch_sd_95: float
    uniform_sd: float
    residual_sd: float
    residual_sd_error: float
    num_draws: int
    importance_ess: float
    float_error: float
    effective_rows: float
    scores: dict[str, np.ndarray]
    scan: Any
    sums: Any

    @classmethod
    def of_every_row(cls, problem: Problem, chosen: Chosen) -> Pilot:
        """The results if the surrogate evaluates every row exactly."""
        sizes = dict(problem.plates)
        scheme = chosen.scheme.bound(sizes, problem.plates)
        numbers = dict.fromkeys(cls._fields, 0.0)
        values = dict(
            form="direct",
            sizes=sizes,
            scheme=scheme,
            designs={},
            num_draws=0,
            importance_ess=1.0,
            scores={},
            scan=None,
            sums=None,
        )
        return cls(**(numbers | values))  # type: ignore[arg-type]

    def without_residuals(self) -> Pilot:
        """The measured values if no row is expanded."""
        return self._replace(
            batch_sd=0.0,
            batch_sd_95=0.0,
            uniform_sd=0.0,
            residual_sd=0.0,
            residual_sd_error=0.0,
            importance_ess=1.0,
            float_error=0.0,
            effective_rows=0.0,
        )

    def settled(self, taylor: Taylor, posterior: SurrogatePosterior) -> Pilot:
        """The same with the residual measured at as many draws as decisions need.

        :param taylor: the control variate.
        :param posterior: that of the surrogate.
        """
        if self.sums is None:
            return self
        sums, noise = self.sums
        spread = _spread(
            self.scan,
            self.scores,
            posterior.draws,
            sums,
            taylor.max_residual_sd,
            noise,
        )
        return self._replace(
            residual_sd=spread.sd,
            residual_sd_error=spread.error,
            num_draws=spread.num_draws,
            sums=None,
        )

    @property
    def report(self) -> dict[str, Any]:
        """All results but the tables, and the noise below which it has no effect."""
        tables = "scheme", "designs", "scores", "scan", "sums"
        measured = {k: v for k, v in self._asdict().items() if k not in tables}
        return {**measured, "quiet_sd": QUIET}


def run_pilot(
    problem: Problem,
    chosen: Chosen,
    needs: Needs,
    posterior: SurrogatePosterior,
    before: Pilot | None = None,
    rough: bool = False,
) -> Pilot:
    """Measure the residuals of the expansion, and design the batches from them.

    :param problem: the target and its coordinates.
    :param chosen: the user's choices.
    :param needs: what the kernel needs.
    :param posterior: that of the surrogate.
    :param before: the results with the polynomials of all rows, if some are exact now.
    :param rough: whether few draws measure the residual until :meth:`Pilot.settled`,
        if rows are integrals.
    :raises Refused: the expansion is too coarse, or the precision too low.
    """
    taylor, exact = chosen.taylor, posterior.expansion.exact
    held_out = _held_out(posterior)
    stage("pilot: scores")
    if before is None:
        found, float_error = _choose_form(problem, chosen, needs, posterior)
    else:
        scan, float_error = before.scan, before.float_error
        scan = scan.keeping(exact) if exact else scan.about(posterior.expansion)
        found = _measured(scan, chosen, needs, posterior)
    scan, sums, scores = found.scan, found.sums, found.scores.scatter
    for name, score in scores.items():
        if not np.isfinite(score).all():
            row = int(np.argmin(np.isfinite(score)))
            raise NoExpansion(_not_finite(f"row {row} of plate {name!r}"))
    stage("pilot: noise of a batch")
    second = scan
    if taylor.order < 2:
        # the surrogate's posterior still uses the second order
        second = ResidualScan(problem, 2, scan.form, scan.expansion).keeping(exact)
        sums, _ = second.sums(held_out)
    # other rows are cheap
    rough = rough and scan.integrals and second is scan
    weight = problem.likelihood_weight
    importance = np.exp(weight * (sums - sums.max()))
    spread = _spread(
        second,
        scores,
        posterior.draws,
        sums,
        taylor.max_residual_sd,
        rough=rough,
    )
    batch, sd, uniform_sd = _choose_sizes(found, chosen, held_out)
    total = sum(np.square(s).sum() for s in scores.values())
    fourth = sum((np.asarray(s, np.float64) ** 4).sum() for s in scores.values())
    return Pilot(
        form=scan.form,
        sizes=batch.sizes,
        scheme=batch.scheme,
        designs=batch.designs,
        batch_sd=float(np.median(sd)),
        batch_sd_95=float(np.quantile(sd, 0.95)),
        uniform_sd=float(np.median(uniform_sd)),
        residual_sd=spread.sd,
        residual_sd_error=spread.error,
        num_draws=spread.num_draws,
        importance_ess=float(
            importance.sum() ** 2 / np.square(importance).sum() / len(importance)
        ),
        float_error=float_error,
        effective_rows=float(total**2 / fourth) if fourth > 0 else 0.0,
        scores=scores,
        scan=scan,
        sums=(spread.sums, spread.noise) if rough else None,
    )


def _far_out(posterior: SurrogatePosterior) -> np.ndarray | None:
    """Positions in the tails of the surrogate, ``(T, D)``, that score rows.

    The tails of some parameters, along lines on which the other parameters have about
    their conditional means, a little farther than the farthest draws. With more than
    four parameters, these are the ones whose draws are the most skewed. With several
    modes there are no such lines.
    """
    if isinstance(posterior.expansion, Expansions):
        return None
    mean = posterior.draws.mean(0)
    covariance = np.atleast_2d(np.cov(posterior.draws.T))
    sd = np.maximum(np.sqrt(np.diag(covariance)), np.finfo(float).tiny)
    away = (posterior.draws - mean) / sd
    which = np.arange(len(sd))
    if len(sd) > _MOST_TAILS:
        skewness = np.abs((away**3).mean(0))
        which = np.argsort(-skewness, kind="stable")[:_MOST_TAILS]
    along = covariance[which] / sd[which, None]
    low = np.minimum(-_FAR_OUT, _FARTHER * away.min(0)[which])
    high = np.maximum(_FAR_OUT, _FARTHER * away.max(0)[which])
    return mean + np.concatenate([low[:, None] * along, high[:, None] * along])


def compile_pilot(problem: Problem, taylor: Taylor, dim: int) -> None:
    """Compile the model's pass for :func:`run_pilot` during the search.

    :param problem: the target and its coordinates.
    :param taylor: the control variate.
    :param dim: the number of coordinates.
    """
    form: Form = "direct" if taylor.form == "auto" else taylor.form
    polynomials = {}
    if form == "direct" and keeps_polynomials(problem, dim):
        shape = num_coefficients(dim)
        polynomials = {n: _zeros(size, shape) for n, size in problem.plates.items()}
    nothing = Expansion(
        _zeros(dim), _zeros(dim), _zeros(dim, dim), _zeros(), rows=polynomials
    )
    size = sum(np.size(x) for x in jax.tree.leaves(problem.example))
    ResidualScan(problem, taylor.order, form, nothing).ahead(size)


def _zeros(*shape: int) -> Array:
    # NumPy converts, so that nothing is compiled for it
    return jax.device_put(np.zeros(shape, np.float32))


class _Batch(NamedTuple):
    """A batch, and its noise.

    :param sizes: its rows, by plate.
    :param scheme: how they are drawn, bound to these sizes.
    :param designs: the tables from which they are drawn, by plate.
    :param variances: of its estimate, for each pair of draws, if they are known and do
        not follow from those over rows.
    """

    sizes: dict[str, int]
    scheme: Scheme
    designs: dict[str, Design]
    variances: np.ndarray | None = None

    @classmethod
    def of(cls, asked: Chosen, sizes: dict[str, int], scores: Scores) -> _Batch:
        """A batch of so many rows.

        Without tables if the score of some row is not finite, which is refused later.
        """
        plates = {name: len(chance) for name, chance in scores.chance.items()}
        scheme = asked.scheme.bound(sizes, plates)
        designs = {}
        finite = all(np.isfinite(score).all() for score in scores.scatter.values())
        if finite and isinstance(scheme, Weighted):
            for name, chance in scores.chance.items():
                designs[name] = scheme.build(chance, scores.loading[name], name)
        return cls(sizes, scheme, designs)


class _Measured(NamedTuple):
    """What two passes over all rows find: one scores them, and one judges a batch.

    :param scan: the passes.
    :param scores: how much each row matters.
    :param sums: the sums of all residuals at the draws that judge, ``(K,)``.
    :param uniform: the variance over rows of the difference between each pair of these.
    :param smallest: the smallest batch.
    """

    scan: ResidualScan
    scores: Scores
    sums: np.ndarray
    uniform: dict[str, np.ndarray]
    smallest: _Batch


def _held_out(posterior: SurrogatePosterior) -> np.ndarray:
    """Draws that judge a batch, in pairs."""
    return posterior.draws[SCORING : SCORING + HELD_OUT]


def _measured(
    scan: ResidualScan, asked: Chosen, needs: Needs, posterior: SurrogatePosterior
) -> _Measured:
    """Score the rows, and measure the smallest batch.

    :param scan: the passes.
    :param asked: the user's choices.
    :param needs: what the kernel needs.
    :param posterior: that of the surrogate.
    """
    scoring, far = posterior.draws[:SCORING], _far_out(posterior)
    if scan.integrals and far is not None:  # a block of draws more would take long
        scoring = scoring[len(far) :]
    scores = scan.scores(scoring, far)
    plates = scan.problem.plates
    sizes = {
        name: min(m or needs.smallest, plates[name]) for name, m in asked.sizes.items()
    }
    batch, draws = _Batch.of(asked, sizes, scores), _held_out(posterior)
    if not (batch.designs and isinstance(batch.scheme, Weighted)):
        return _Measured(scan, scores, *scan.sums(draws), batch)
    sums, uniform, variances = scan.measured(draws, batch.designs, batch.scheme)
    batch = batch._replace(variances=variances)
    return _Measured(scan, scores, sums, uniform, batch)


class _Sizes(NamedTuple):
    """A batch, and its noise for each pair of draws."""

    batch: _Batch
    sd: np.ndarray
    uniform_sd: np.ndarray


def _choose_sizes(found: _Measured, asked: Chosen, draws: np.ndarray) -> _Sizes:
    """Choose the smallest batch that the noise allows.

    A batch is kept if its noise is too small to affect a decision. Otherwise it has
    enough rows for its mean to be normal and for its noise to be acceptable.

    :param found: the scores of the rows, and the smallest batch.
    :param asked: the user's choices.
    :param draws: pairs of draws that judge the batches.
    """
    problem = found.scan.problem
    plates, weight = problem.plates, problem.likelihood_weight
    free = [name for name, m in asked.sizes.items() if m is None]
    batch = found.smallest
    for _ in range(6):
        sizes, scheme = batch.sizes, batch.scheme
        plain = np.zeros(len(draws) // 2)
        for name, size in plates.items():
            rows = sizes[name]
            # rounding can make a tiny variance negative
            among = np.maximum(found.uniform[name], 0.0)
            plain = plain + size**2 * among / rows * (1 - rows / size)
        if not isinstance(scheme, Weighted):
            variances = 0.0 * plain if isinstance(scheme, FullBatch) else plain
        elif batch.variances is not None:
            variances = batch.variances
        else:
            variances = found.scan.variances(draws, batch.designs, scheme)
        sd = weight * np.sqrt(np.asarray(variances))
        q95 = float(np.quantile(sd, 0.95))
        if q95 <= QUIET or not free or isinstance(scheme, FullBatch):
            break
        many = [sizes[name] >= min(_MIN_BATCH, plates[name]) for name in free]
        if q95 <= 1.0 and all(many):
            break
        larger = dict(sizes)
        for name in free:
            wanted = 2 * int(np.ceil(0.55 * sizes[name] * (q95 / QUIET) ** 2))
            if wanted > _MIN_BATCH:
                enough = 2 * int(np.ceil(0.55 * sizes[name] * q95**2))
                wanted = max(_MIN_BATCH, enough)
            larger[name] = min(wanted, plates[name])
        if larger == sizes:
            break
        batch = _Batch.of(asked, larger, found.scores)
    return _Sizes(batch, sd, weight * np.sqrt(plain))


def _not_finite(which: str) -> str:
    return (
        f"the log likelihood of {which} is not finite within the posterior of "
        "the surrogate, so it has no expansion there. Choose priors that restrict the "
        "parameters to values under which every row has positive likelihood."
    )


def rounding_of_modes(
    problem: Problem,
    taylor: Taylor,
    pilot: Pilot,
    posterior: SurrogatePosterior,
    number: int,
) -> np.ndarray:
    """The mean rounding error of the sum of all residuals in each mode.

    Numbers that all rows share are rounded alike for all of them, in another way at
    each position. The mean over a mode is an error of the logarithm of its mass, which
    no number of draws averages out. It can be estimated from some rows, because they
    share it, at many draws.

    :param problem: the target and its coordinates.
    :param taylor: the control variate.
    :param pilot: the pilot of the surrogate without representative rows.
    :param posterior: that of this surrogate.
    :param number: the number of modes.
    :return: zeros if the error hardly differs between draws.
    """
    if pilot.float_error <= _FLOAT_ERROR_OF_MODES:
        return np.zeros(number)
    pool = modes_of(problem, posterior.expansion, posterior.draws)
    chosen = [np.flatnonzero(pool == k)[:_OF_EACH_MODE] for k in range(number)]
    draws = posterior.draws[np.concatenate(chosen)]
    exact = RowSums.of(problem, taylor, len(np.ravel(problem.in_coordinates(draws)[0])))
    some = exact.some
    right = exact.residuals(taylor.order, posterior.expansion, draws, some, slopes=True)
    rows = Rows(
        np.repeat(np.arange(len(some.rows)), [len(x) for x in some.rows.values()]),
        np.concatenate([np.asarray(x) for x in some.rows.values()]),
    )
    scales = np.array(list(some.scales.values()))[rows.plate]
    blocks = range(0, len(draws), HELD_OUT)
    parts = [pilot.scan.of_rows(draws[k : k + HELD_OUT], rows) @ scales for k in blocks]
    errors = np.split(
        np.concatenate(parts) - right, np.cumsum([len(each) for each in chosen])[:-1]
    )
    found = np.array([each.mean() if len(each) else np.nan for each in errors])
    return np.where(np.isfinite(found), found, np.nanmean(found))


def check_residuals(
    problem: Problem, taylor: Taylor, posterior: SurrogatePosterior, pilot: Pilot
) -> None:
    """Refuse an expansion that is too coarse after all possible improvements.

    :raises Refused: the residual is above the user's limit.
    """
    found, limit = pilot.residual_sd, taylor.max_residual_sd
    if found <= limit:
        return
    rows, exact = sum(problem.plates.values()), posterior.expansion.num_exact
    told = f"{found:.3g} +- {pilot.residual_sd_error:.1g} over {pilot.num_draws} draws"
    some = f", with {exact} of {rows} rows evaluated exactly" if exact else ""
    ways = []
    several = isinstance(posterior.expansion, Expansions)
    if several:
        some = ", over several modes"
    elif rows <= 2048 and not isinstance(pilot.scheme, FullBatch):
        ways.append(f"batch=batch.full(), which evaluates all {rows} rows exactly")
    if found < 2 * limit:
        share = math.erfc(found / 2)  # of two normal log weights with this spread
        ways.append(
            f"control_variate.taylor{taylor.order}(max_residual_sd={np.ceil(found):g})"
            f", with which about {share:.0%} of independent proposals are accepted"
        )
    if problem.in_own_coordinates and not several:
        ways.append(
            "deterministic sites in which the likelihood is closer to quadratic, "
            f"named in control_variate.taylor{taylor.order}(sites=[...])"
        )
    ways.append("a temperature above 1")
    raise NoExpansion(
        "the expansion of the likelihood does not hold over the posterior: the "
        f"standard deviation of the sum of the residuals is {told}{some}, and "
        f"max_residual_sd={limit:g} is the limit. Write {'; or '.join(ways)}."
        + ("" if several else " No single expansion fits several separate modes.")
    )


class _Spread(NamedTuple):
    """The standard deviation of the sum of all residuals over the posterior."""

    sd: float
    error: float
    sums: np.ndarray
    noise: np.ndarray

    @property
    def num_draws(self) -> int:
        """The number of draws that were used."""
        return len(self.sums)


def _spread(
    scan: ResidualScan,
    scores: Mapping[str, np.ndarray],
    draws: np.ndarray,
    sums: np.ndarray,
    limit: float,
    noise: np.ndarray | None = None,
    rough: bool = False,
) -> _Spread:
    """Measure how far the surrogate is from the target, with as few draws as needed.

    The sum of residuals has heavy tails, so its standard deviation over a few draws is
    imprecise. It is compared with two limits: :data:`COARSE`, above which some rows are
    evaluated exactly, and the user's. If the estimate from 160 draws is not within a
    factor of two of either limit, it is final. Otherwise all 2,000 draws are used. A
    standard error is then 3.4% if the kurtosis of the sum is 10: a decision is wrong
    with probability 0.0015 where the true value is 10% from the limit. If rows are
    integrals, 640 and 1,280 draws are tried first by the same rule. If they are large,
    as those of three latent numbers, 640 draws are final: the standard error is 6%.

    :param scan: passes over the residuals of second order.
    :param scores: how much each row matters.
    :param draws: draws of the surrogate's posterior, ``(K, D)``.
    :param sums: the sums at the held-out draws and at the first of the others.
    :param limit: the largest standard deviation that is accepted.
    :param noise: the variances of their errors; ``None`` for zeros.
    :param rough: whether 160 draws are final.
    """
    weight = scan.problem.likelihood_weight
    held_out = slice(SCORING, SCORING + HELD_OUT)
    rest = np.delete(draws, np.r_[:SCORING, held_out], axis=0)
    few = _Estimated(scan, scores)
    sums, used = sums.astype(float), len(sums) - min(len(sums), HELD_OUT)
    noise = np.zeros(len(sums)) if noise is None else noise
    more = _MORE_BLOCKS if scan.integrals else ()
    further = () if rough else (*more, len(rest) // HELD_OUT)
    if scan.row_size >= _LARGE:
        further = further[:1]
    for until in (_FEW_BLOCKS, *further):
        sd, error = _sd_of(weight * sums, weight**2 * noise)
        if 4 * sd <= COARSE or not np.isfinite(sd):
            break
        limits = COARSE, limit
        if used and all(abs(sd - x) > max(4 * error, x / 2) for x in limits):
            break
        # blocks of equal size need one compiled program
        while used + HELD_OUT <= min(until * HELD_OUT, len(rest)):
            found, variance = few.sums(rest[used : used + HELD_OUT])
            sums, noise = np.append(sums, found), np.append(noise, variance)
            used += HELD_OUT
    sd, error = _sd_of(weight * sums, weight**2 * noise)
    return _Spread(sd, error, sums, noise)


def _sd_of(sums: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """The standard deviation of sums, corrected for their noise, and its error."""
    with np.errstate(invalid="ignore", over="ignore"):
        away = np.square(sums - sums.mean())
        variance = max(away.sum() / (len(sums) - 1) - noise.mean(), 0.0)
        sd = np.sqrt(variance)
        # standard error of the variance; that of its root follows by the delta method
        error = np.std(away, ddof=1) / np.sqrt(len(sums)) / (2 * max(sd, 1e-30))
    return float(sd) if np.isfinite(sums).all() else np.inf, float(error)


class _Estimated:
    """Sums of all residuals, exact or estimated from some rows with known noise.

    If rows are sampled, they are drawn in proportion to their scores, the same rows for
    all draws.

    :param scan: of the residuals.
    :param scores: how much each row matters.
    """

    def __init__(self, scan: ResidualScan, scores: Mapping[str, np.ndarray]) -> None:
        self.scan, self.rows = scan, None
        sizes = scan.problem.plates
        number = sum(sizes.values())
        few = _ALL_ROWS
        if scan.integrals:
            cheap = max(_EVALUATIONS // scan.row_size, _FEWEST_INTEGRALS)
            few = min(cheap, _ALL_INTEGRALS)
        if number <= few:
            return
        whole = np.concatenate([scores[name] for name in sizes]).astype(float)
        share = 0.9 * whole / max(whole.sum(), 1e-300) + 0.1 / number
        share /= share.sum()
        rng = np.random.default_rng(35)
        chosen = np.sort(rng.choice(number, few, p=share))
        starts = np.cumsum([0, *sizes.values()])
        plate = np.searchsorted(starts, chosen, side="right") - 1
        self.rows = Rows(plate, chosen - starts[plate])
        self.weights = 1 / (few * share[chosen])

    def sums(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sums at some draws, and the variances of their errors."""
        if self.rows is None:
            sums, _ = self.scan.sums(draws)
            return sums, np.zeros(len(draws))
        parts = self.scan.of_rows(draws, self.rows, left=True) * self.weights
        # an error that all draws share cancels in their differences
        apart = parts - parts.mean(0)
        sums = parts.sum(1) - self.scan.of_surplus(draws)
        return sums, parts.shape[1] * apart.var(1, ddof=1)


def _choose_form(
    problem: Problem, asked: Chosen, needs: Needs, posterior: SurrogatePosterior
) -> tuple[_Measured, float]:
    """What the first form with negligible rounding error finds, and this error."""
    taylor, draws = asked.taylor, _held_out(posterior)
    expansion = posterior.expansion
    auto = taylor.form == "auto"
    forms: tuple[Form, ...] = ("direct", "remainder") if auto else (taylor.form,)
    if problem.dtype == jnp.float64:
        scan = ResidualScan(problem, taylor.order, forms[0], expansion)
        return _measured(scan, asked, needs, posterior), 0.0
    few = draws[:IN_DOUBLE]
    exact = RowSums.of(problem, taylor, len(np.ravel(problem.in_coordinates(few)[0])))
    errors, spread = [], 0.0
    # products of single coordinates cancel where columns are not centred
    one = isinstance(expansion, Expansion)  # of several modes, none are stored
    stored = one and bool(expansion.rows) and problem.row_size == 1
    for form in forms:
        scan = ResidualScan(problem, taylor.order, form, expansion)
        found = _measured(scan, asked, needs, posterior)
        if np.isfinite(found.sums).all():
            scatter = found.scores.scatter
            error = _rounding_of_some(scan, exact, expansion, draws, scatter)
            if stored and error > _OF_STORED * FLOAT_ERROR:
                raise Rounded("stored polynomials of rows are imprecise")
            if error <= FLOAT_ERROR:
                spread = float(found.sums.std(ddof=1) * problem.likelihood_weight)
                if spread > _HOPELESS * taylor.max_residual_sd:
                    raise _too_far(problem, taylor, spread, draws, draws)
                return found, error
        right = exact.residuals(taylor.order, expansion, few)
        if not np.isfinite(right).all():
            raise NoExpansion(_not_finite("some row"))
        with np.errstate(invalid="ignore"):
            error = (found.sums[: len(few)] - right).std(ddof=1)
        errors.append(float(error * problem.likelihood_weight))
        spread = float(right.std(ddof=1) * problem.likelihood_weight)
        if errors[-1] <= FLOAT_ERROR:
            return found, errors[-1]
    if not spread <= _FAR * taylor.max_residual_sd:
        # numbers of this size are rounded, too, but more digits would not help
        raise _too_far(problem, taylor, spread, few, draws)
    if not np.isfinite(errors).any():
        raise Imprecise(
            "within the posterior of the surrogate, the log likelihood of some row "
            "overflows in single precision but not in double precision. Call "
            "numpyro.enable_x64() before the run, or standardise the data."
        )
    raise Imprecise(
        "in single precision the sum of the residuals is off by "
        f"{np.nanmin(errors):.2g}, and {FLOAT_ERROR} is the limit. Rounding errors "
        "that all rows share are multiplied by the number of rows. Call "
        "numpyro.enable_x64() before the run, or standardise the data."
    )


def _too_far(
    problem: Problem,
    taylor: Taylor,
    spread: float,
    measured: np.ndarray,
    draws: np.ndarray,
) -> HeavyTails:
    """The error for a residual that no exact rows would make small."""
    return HeavyTails(
        "the expansion of the likelihood does not hold over the posterior of the "
        f"surrogate: the sum of the residuals has a standard deviation of "
        f"{spread:.2g} over {len(measured)} of its draws, and max_residual_sd="
        f"{taylor.max_residual_sd:g} is the limit. {_why_far(problem, draws)}"
    )


def _why_far(problem: Problem, draws: np.ndarray) -> str:
    """The reason for which the expansion is far from the likelihood, and a remedy."""
    if not isinstance(problem.target_of(problem.arrays), ModelTarget):
        return (
            "So large a number means that draws of the surrogate are far from where "
            "the expansion is close to the likelihood: the expanded likelihood and the "
            "prior do not bound them."
        )
    middle = np.median(draws, 0)
    with double(), without_integrals():
        exact: Any = problem.target_of(problem.arrays)
        z = problem.unravel(jnp.asarray(middle, jnp.float64))
        values = exact.constrain(z)
        values = {name: value for name, value in values.items() if name in z}
        heavy = heavy_tailed(exact, problem.one_row, values)
    if heavy:
        names = ", ".join(map(repr, heavy))
        return (
            "So large a number means that the draws of the surrogate have heavy tails, "
            f"in which the expansion is far from the likelihood: the prior of {names} "
            "has them, as dist.HalfCauchy has, and the expanded likelihood does not "
            "bound it. Write a prior with lighter tails, such as dist.HalfNormal."
        )
    return (
        "The surrogate is the exact prior times the expanded likelihood. No prior has "
        "heavy tails, so the likelihood itself is far from its expansion within a few "
        "standard deviations of its mode: it may have a ridge, a boundary or a second "
        "mode there. With parameters in which it is closer to a quadratic function, "
        "the expansion may hold."
    )


def _rounding_of_some(
    scan: ResidualScan,
    exact: RowSums,
    expansion: Expansion | Expansions,
    draws: np.ndarray,
    scatter: Mapping[str, np.ndarray],
) -> float:
    """An upper estimate of the rounding error of a sum of all residuals, from some.

    It is that of random rows, scaled up, and that of the rows whose residuals scatter
    most, since a rounding error is part of the scatter. Scaling up overestimates errors
    that rows do not share, which is harmless if they are small.

    :param expansion: in double precision.
    :param draws: those of which the first are compared.
    :param scatter: the standard deviation of each row's residual over likely positions.
    """
    few = draws[:IN_DOUBLE]
    samples = [(exact.some, 1.0)]
    if not exact.some.are_all:
        largest = exact.some.largest(scatter)
        samples.append((largest, 1 / min(largest.scales.values())))
    errors = []
    for some, share in samples:
        right = exact.residuals(scan.order, expansion, few, some)
        rounded = scan.sums_of_some(draws, some)[: len(few)]
        errors.append(share * (rounded - right).std(ddof=1))
    return float(np.hypot.reduce(errors) * scan.problem.likelihood_weight)
