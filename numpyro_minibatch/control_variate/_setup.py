"""Set-up of a control variate: centre, surrogate, pilot, and results for the chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array

from numpyro_minibatch._internal.progress import stages
from numpyro_minibatch._model.start import finite_rows, listed, never_finite_rows
from numpyro_minibatch.batch import Scheme, Weighted, full
from numpyro_minibatch.control_variate._all_rows import (
    all_rows_at_once,
    compile_every_row,
    every_row,
    with_every_row,
)
from numpyro_minibatch.control_variate._bent import used
from numpyro_minibatch.control_variate._center import Center, OtherModes, find_center
from numpyro_minibatch.control_variate._coordinates import choose_coordinates
from numpyro_minibatch.control_variate._exact_rows import (
    check_exact_rows,
    may_be_exact,
    with_exact_rows,
)
from numpyro_minibatch.control_variate._expand import (
    Coordinates,
    Expansion,
    Expansions,
)
from numpyro_minibatch.control_variate._modes import FoundModes, find_modes
from numpyro_minibatch.control_variate._nuts import CHAINS, MIXED, starting_point
from numpyro_minibatch.control_variate._pilot import (
    COARSE,
    HELD_OUT,
    SCORING,
    Pilot,
    check_residuals,
    compile_pilot,
    rounding_of_modes,
    run_pilot,
)
from numpyro_minibatch.control_variate._posterior import (
    SurrogatePosterior,
    sampled_posterior,
    surrogate_posterior,
)
from numpyro_minibatch.control_variate._posterior_of_modes import (
    distances,
    posterior_of_modes,
    with_tails,
)
from numpyro_minibatch.control_variate._problem import (
    Chosen,
    HeavyTails,
    Imprecise,
    Needs,
    NeverFinite,
    NoExpansion,
    NotDefinite,
    PriorKinks,
    Problem,
    Refused,
    Rounded,
    TooCoarse,
)
from numpyro_minibatch.control_variate._surrogate import (
    compile_log_surrogate,
    flatten,
    log_surrogate_at,
    unflatten,
)
from numpyro_minibatch.control_variate._tails import (
    MAX_INEFFICIENCY,
    Tails,
    may_represent,
    measure_tails,
    with_fitting_representatives,
)
from numpyro_minibatch.control_variate._taylor import Form, Taylor
from numpyro_minibatch.control_variate._trajectories import (
    Trajectories,
    compile_trajectories,
    trajectories,
    with_draws,
)
from numpyro_minibatch.proposal import LONGER, Bent
from numpyro_minibatch.target import ModelTarget

__all__ = ["Plan", "Prepared", "Surrogate", "prepare"]

_Result = TypeVar("_Result")

_STARTS = 4  # searches for the mode
_SOME = 8  # of so many draws one, for a mean that need not be precise
_STAGES = 5
# rows that cost no more than their representatives, whose far tails are only similar
_HANDFUL = 100
# Up to so many evaluations of rows replace batches if the residual is above this. At
# 0.5 batches are better: on a hierarchy of 5,000 rows they accept 71% of the moves.
_COARSE_ROWS, _TOO_COARSE = 10_000, 0.75
_ROUGH = 0.2  # the same limit where the expansion alone was coarse
# Inefficiency of squares that exact rows may leave where it was not coarse. Effects of
# 30 groups crossed with 40 others, on 3,000 rows, had an infinite one.
_HEAVY = 2.0
# Residual of the expansion alone above which exact rows must leave even less. With 32
# of them, which left 0.2, the ratio of two scales of 3,000 rows still lacked its tail.
# One row for each of eight kinds of rows leaves next to nothing.
_FAR, _LEFT_OF_FAR = 1.0, 0.05
_GROUPS = 3  # fewest values of a site that are called effects of groups
_MANY = 40  # parameters above which exact rows are not tried before
_DISAGREE = 1.2  # R-hat of chains of NUTS above which a model is rather refused
_STUCK = 0.5  # largest share of draws that trajectories hardly leave
_REACH = np.array([0.0, 10.0, 100.0, 1000.0, 10_000.0])  # unconstrained units
_RECENTRED = 2  # times that a coarse expansion is made again
_BETTER = 0.8  # of the residual that it must leave
_STARTING = SCORING + HELD_OUT  # positions to start chains from, all rows known there
# share of effective draws by log weights of standard deviation 1/4
_ENOUGH_DRAWS = 0.94


class Surrogate(NamedTuple):
    """The part of a chain's state that a control variate needs.

    :param expansion: the summed polynomial, or those of several modes.
    :param location: about the mean of the surrogate's posterior, ``(D,)``.
    :param root: transpose of a root of about its covariance, ``(D, D)``.
    :param designs: how the rows of a batch are drawn, by plate.
    :param bent: coordinates of trajectories, if they differ from those of the root.
    """

    expansion: Expansion | Expansions
    location: Array
    root: Array
    designs: dict[str, Any]
    bent: Bent | None = None


class Plan(NamedTuple):
    """The decisions of the pilot that are part of the program; hashable.

    :param coordinates: what the rows are expanded in.
    :param form: how residuals are computed.
    :param scheme: how rows are drawn, bound to the plates.
    :param num_steps: steps of a trajectory on the surrogate; none where its dynamics
        are known in closed form.
    :param long: whether trajectories are longer than a quarter of a period.
    :param draws_fit: whether many independent draws may replace them.
    :param over_relaxed: whether draws of it may be over-relaxed there.
    """

    coordinates: Coordinates
    form: Form
    scheme: Scheme
    num_steps: int
    long: bool
    draws_fit: bool
    over_relaxed: bool


class Prepared(NamedTuple):
    """The result of the set-up.

    :param plan: what is part of the program.
    :param surrogate: what is part of the state.
    :param starts: positions where chains may start, with a leading axis. With one mode,
        the pilot evaluated all rows there.
    :param radius: how far from its mean the draws of the surrogate's posterior lie, in
        its standard deviations.
    :param report: what was measured, numbers and names.
    :param covariance: that of the surrogate's posterior, ``(D, D)``.
    """

    plan: Plan
    surrogate: Surrogate
    starts: Any
    radius: float
    report: dict[str, Any]
    covariance: np.ndarray


def prepare(who: str, problem: Problem, chosen: Chosen, needs: Needs) -> Prepared:
    """Expand the rows of a target, and measure how accurate the expansion is.

    :param who: the kernel's name, for the messages.
    :param problem: the target.
    :param chosen: the user's choices.
    :param needs: what the kernel needs.
    :raises Refused: the expansion is of no use; the message says why.
    :raises TooCoarse: the likelihood is an approximation, and a better one is needed.
    """
    try:
        with stages(who, _STAGES):
            return _prepared(problem, chosen, needs)
    except Refused as error:
        raise type(error)(f"{who}: {error}") from None


def _centred(
    problem: Problem, positions: np.ndarray, taylor: Taylor, at_once: bool
) -> tuple[Problem, Center]:
    """The centre, and the problem in the coordinates in which it was found.

    A prior with kinks, as ``dist.Laplace`` has one at zero, stops the steps towards the
    mode of the posterior. It is not expanded, so that it needs no derivatives. The same
    coordinates by the names of their sites are not those of the prior: the centre is
    then the mode of the likelihood with a ridge.

    :param at_once: whether all rows may replace the expansion as soon as its centre is
        known.
    """

    def of(problem: Problem) -> Center:
        phi = problem.in_coordinates(positions)

        def meanwhile() -> None:
            if not (at_once and problem.in_own_coordinates):
                compile_pilot(problem, taylor, phi.shape[1])
                if problem.better is not None:
                    problem.better.ahead(_starts(problem, positions))
                return
            expansion = compile_every_row(problem, phi[0]).cast(problem.dtype)
            compile_log_surrogate(problem, expansion, positions[0])
            compile_trajectories(problem, expansion, positions[0])

        return _searched(
            problem,
            positions,
            lambda: find_center(
                problem, phi, taylor, meanwhile, given=len(phi) > _STARTS
            ),
        )

    try:
        return problem, of(problem)
    except PriorKinks:
        if not isinstance(problem.target_of(problem.arrays), ModelTarget):
            raise NoExpansion(  # a ridge needs draws from the prior
                "the log prior has kinks where the search for the centre ended, as "
                "that of dist.Laplace has. Write the target as a NumPyro model, in "
                "which the rows are expanded without the prior."
            ) from None
        by_name = Coordinates(tuple(sorted(problem.example)))
        problem = replace(problem, coordinates=by_name)
        return problem, of(problem)


def _searched(
    problem: Problem, positions: np.ndarray, search: Callable[[], _Result]
) -> _Result:
    """The result of a search for modes.

    :param positions: where it starts, flat, ``(K, D)``.
    :raises NeverFinite: it fails, and some rows are finite at none of these positions.
    """
    try:
        return search()
    except Refused:
        starts = unflatten(positions, problem.example)
        plates = problem.target_of(problem.arrays).plates
        rows = never_finite_rows(plates, problem.compiled(_finite), starts)
        if not rows:
            raise
    raise NeverFinite(
        f"the log likelihood of some rows ({listed(rows)}) is not finite at any of the "
        f"{len(positions)} positions from which the set-up searches for the mode. "
        "Check that their values are in the support of their distribution, and drop or "
        "mask (numpyro.handlers.mask) those that are not. If the model allows these "
        "rows at other positions, start there: "
        "init_strategy=init_to_value(values=...)."
    )


def _finite(
    problem: Problem, arrays: list[Any], position: Any, indices: dict[str, Array]
) -> dict[str, Array]:
    return finite_rows(problem.target_of(arrays), position, indices)


def _prepared(problem: Problem, chosen: Chosen, needs: Needs) -> Prepared:
    taylor = chosen.taylor
    check_exact_rows(problem, taylor, needs)
    target = problem.target_of(problem.arrays)
    coordinates = choose_coordinates(target, problem.example, taylor, needs.follows)
    problem = replace(problem, coordinates=coordinates)
    positions = _positions(problem, chosen.start)
    phi = problem.in_coordinates(positions)
    if phi.ndim < 2 or phi.size == 0:  # older versions of JAX: one number
        raise NoExpansion(
            "the likelihood of the rows depends on no latent site: all observed sites "
            "are masked, numpyro.handlers.mask(mask=False). To sample the prior, use "
            "numpyro.infer.Predictive, or MCMC with NumPyro's NUTS."
        )
    few = may_be_exact(problem, chosen, needs)
    center, start, found = None, positions[0], None
    if taylor.modes > 1:
        if not problem.in_own_coordinates:
            raise Refused(_other_coordinates(problem))
        # of the starts of a search for one mode, those that are not random
        fixed = np.delete(phi, range(1, _STARTS), axis=0)
        found = _searched(
            problem, positions, lambda: find_modes(problem, fixed, taylor)
        )
        if len(found.modes) > 1:
            return _with_modes(problem, chosen, needs, found)
    # NUTS on rows that are integrals takes too long to be tried before an expansion
    plain = problem.row_size == 1
    at_once = few and plain and needs.follows and taylor == Taylor(taylor.order)
    sampled = None
    try:
        if at_once and not problem.in_own_coordinates:
            sampled = _target_posterior(problem, needs, positions)
            if sampled is not None and sampled.rhat <= MIXED:
                return _of_all_rows(problem, chosen, needs, OtherModes(), sampled)
        if found is None:
            problem, center = _centred(problem, positions, taylor, at_once)
        else:
            expansion, known = found.modes[0][:2]
            center = Center(expansion, OtherModes(), found.about, known.hessian)
        if at_once and problem.in_own_coordinates:
            exact = all_rows_at_once(problem, center)
            if exact is not None:
                return _of_all_rows(problem, chosen, needs, center.others, exact)
        start = starting_point(problem, center.expansion, start)
        posterior = surrogate_posterior(
            problem,
            center.expansion,
            start,
            center.known_hessian,
            meanwhile=compile_trajectories if needs.follows and not few else None,
        )
        _check_approximation(problem, center, posterior)
        # if representative rows suffice, this residual decides nothing
        rough = needs.follows and problem.in_own_coordinates and not few
        try:
            pilot = run_pilot(problem, chosen, needs, posterior, rough=rough)
        except Rounded:
            center = center.without_polynomials()
            posterior = posterior._replace(expansion=center.expansion)
            pilot = run_pilot(problem, chosen, needs, posterior, rough=rough)
    except NeverFinite:
        raise
    except Refused as reason:
        # with heavy tails, trajectories on all rows are slow: ten times AMAGOLD's time
        hard = isinstance(reason, HeavyTails | Imprecise)
        if not few and (hard or not _may_read_all(problem, chosen, needs)):
            raise
        if not plain or _is_flat(problem, reason):
            raise
        # Without an expansion there is still the target itself, whose rows are few. It
        # rounds less: a Gaussian process by 3e-5 where residuals were off by 0.8.
        sampled = sampled or _target_posterior(problem, needs, positions)
        if center is not None and (sampled is None or sampled.rhat > _DISAGREE):
            # chains from far starts can stay where every trajectory diverges
            sampled = _target_posterior(problem, needs, start[None])
        if sampled is None or sampled.rhat > _DISAGREE:
            raise
        try:
            return _of_all_rows(problem, chosen, needs, OtherModes(), sampled)
        except Refused:
            raise reason from None
    outcome = _of_expansion(problem, chosen, needs, center, posterior, pilot)
    if found is not None:
        outcome = outcome._replace(report=outcome.report | found.report)
    return outcome


def _check_approximation(
    problem: Problem, center: Center, posterior: SurrogatePosterior
) -> None:
    """Stop before all else if the likelihood is too coarse an approximation.

    The tails of a coarse quadrature differ from those of the model, so that all that
    is measured from here on would be measured in vain.

    :raises TooCoarse: there is a better approximation.
    """
    if problem.better is None:
        return
    better = problem.better(_starts(problem, posterior.draws))
    if better is not None:
        raise TooCoarse(better, posterior.location, center.others.report)


def _of_expansion(
    problem: Problem,
    chosen: Chosen,
    needs: Needs,
    center: Center,
    posterior: SurrogatePosterior,
    pilot: Pilot,
) -> Prepared:
    """The outcome with an expansion, or with exact rows in its place if it is coarse.

    :param pilot: what was measured with the expansion about this centre.
    """
    few = may_be_exact(problem, chosen, needs)
    if not few:
        posterior, pilot = _recentred(problem, chosen, needs, center, posterior, pilot)
    tails, all_exact, expanded = None, None, posterior
    alone = pilot.residual_sd if problem.in_own_coordinates else 0.0
    may_read_all = _may_read_all(problem, chosen, needs)
    many = posterior.draws.shape[1] > _MANY
    if may_read_all and many and pilot.residual_sd > _TOO_COARSE:
        # in many dimensions, a few rows hardly reduce the residual
        all_exact = with_every_row(problem, expanded, resample=alone <= COARSE)
    if all_exact is None and (needs.follows or (few and pilot.residual_sd > COARSE)):
        posterior, pilot, tails = _with_rows(problem, chosen, needs, posterior, pilot)
        if may_read_all and _too_coarse(pilot, tails, alone):
            all_exact = with_every_row(problem, expanded, resample=alone <= COARSE)
    if all_exact is not None:
        whole = _all_read(problem, chosen)
        posterior, pilot, tails = all_exact, Pilot.of_every_row(problem, whole), None
    check_residuals(problem, chosen.taylor, posterior, pilot)
    moves = _moves(problem, needs, posterior)
    return _outcome(problem, center.others, posterior, moves, pilot, tails)


def _is_flat(problem: Problem, reason: Refused) -> bool:
    """Whether the target is constant along the line without curvature.

    It is then not proper. NUTS would not refuse it before all of its trajectories have
    been as long as allowed: for 2,000 rows, after 15 s.
    """
    if not isinstance(reason, NotDefinite):
        return False
    if not (reason.in_sites or problem.in_own_coordinates):
        return False
    along = reason.along / max(np.linalg.norm(reason.along), 1e-300)
    line = reason.at + np.concatenate([-_REACH, _REACH])[:, None] * along
    target = every_row(problem, problem.in_coordinates(reason.at[None])[0])
    found = log_surrogate_at(problem, target.cast(problem.dtype), line)
    return bool(np.ptp(found) < 1.0)


def _too_coarse(pilot: Pilot, tails: Tails | None, alone: float) -> bool:
    """Whether a surrogate with exact rows is worse than all rows, if they are few.

    :param pilot: what was measured with exact rows.
    :param tails: the tails, if they were measured.
    :param alone: the residual of the expansion alone, in the coordinates that are
        sampled. If it is large, the posterior may have tails along curves, which the
        lines do not show.
    """
    most_left, most = _TOO_COARSE, _HEAVY
    if alone > COARSE:
        most_left, most = _LEFT_OF_FAR if alone > _FAR else _ROUGH, MAX_INEFFICIENCY
    if pilot.residual_sd > most_left:
        return True
    return tails is not None and tails.inefficiency > most


def _target_posterior(
    problem: Problem, needs: Needs, positions: np.ndarray
) -> SurrogatePosterior | None:
    """The posterior of a target with few rows, sampled by NUTS.

    A hierarchy has no mode, and the expansion about that of its likelihood is coarse if
    groups have few rows. So NUTS would sample both this surrogate and then the target.

    :param positions: where the chains start, far from each other, ``(K, D)``.
    :return: ``None`` if chains diverge or do not move.
    """
    starts = np.resize(positions[::-1], (CHAINS, positions.shape[1]))
    meanwhile = compile_trajectories if needs.follows else None
    try:
        far = every_row(problem, problem.in_coordinates(positions)[0], near=False)
        posterior = sampled_posterior(problem, far, starts, None, meanwhile)
    except Refused:
        return None
    center = problem.in_coordinates(posterior.draws[::_SOME]).mean(0)
    return posterior._replace(expansion=every_row(problem, center))


def _of_all_rows(
    problem: Problem,
    chosen: Chosen,
    needs: Needs,
    others: OtherModes,
    posterior: SurrogatePosterior,
) -> Prepared:
    """The outcome with a surrogate that evaluates all rows."""
    pilot = Pilot.of_every_row(problem, _all_read(problem, chosen))
    moves = _moves(problem, needs, posterior)
    return _outcome(problem, others, posterior, moves, pilot, None)


def _all_read(problem: Problem, chosen: Chosen) -> Chosen:
    """The choices if every decision reads all rows."""
    return chosen._replace(scheme=full(), sizes=dict(problem.plates))


def _may_read_all(problem: Problem, chosen: Chosen, needs: Needs) -> bool:
    """Whether all rows may replace the batches of a coarse expansion.

    The noise of batches and the residual then slow a chain more than all rows do. For a
    logistic regression with 150 columns and 3,000 rows, 12 times as many draws were
    effective. The user must have left the batch to the set-up.
    """
    if problem.on_host:
        return False
    rows = problem.row_size * sum(problem.plates.values())
    free = all(size is None for size in chosen.sizes.values())
    weighted = isinstance(chosen.scheme, Weighted) and chosen.taylor.exact_rows is None
    return needs.follows and free and weighted and rows <= _COARSE_ROWS


def _moves(
    problem: Problem, needs: Needs, posterior: SurrogatePosterior
) -> Trajectories:
    """The trajectories on the surrogate, if moves follow it."""
    if not needs.follows:
        return Trajectories(0, False, 0.0)
    moves = trajectories(problem, posterior)
    check_moves(moves, posterior)
    return with_draws(problem, posterior, moves)


def check_moves(moves: Trajectories, posterior: SurrogatePosterior) -> None:
    """Refuse a surrogate on which no trajectory moves a chain.

    All draws of a run would be equal to its start.

    :raises Refused: trajectories are rejected from too many of its draws.
    """
    if moves.stuck > _STUCK:
        raise NoExpansion(
            "trajectories on the surrogate move no chain: from "
            f"{moves.stuck:.0%} of the draws of its posterior, they are accepted "
            f"with a probability below 0.1, and {_STUCK:.0%} is the limit (R-hat of "
            f"these draws is {posterior.rhat:.2f}). The surrogate is too far from a "
            "normal distribution, as with several modes, heavy tails or strongly "
            "varying scales."
        )


def _with_modes(
    problem: Problem, chosen: Chosen, needs: Needs, found: FoundModes
) -> Prepared:
    """The outcome of a set-up that expands about several modes."""
    of_modes = posterior_of_modes(problem, found)
    tails: list[Tails] = []
    posterior, starts = of_modes.mixed()
    pilot = run_pilot(problem, chosen, needs, posterior)
    rounding = rounding_of_modes(
        problem, chosen.taylor, pilot, posterior, len(found.modes)
    )
    if needs.follows and may_represent(problem, chosen.taylor, pilot):
        better, tails = with_tails(problem, pilot, of_modes)
        if better is not of_modes:
            of_modes = better
            posterior, starts = better.mixed()
            pilot = run_pilot(problem, chosen, needs, posterior, pilot)
    check_residuals(problem, chosen.taylor, posterior, pilot)
    moves = Trajectories(0, False, 0.0)
    if needs.follows:
        moves = of_modes.trajectories(problem)
    expansions: Any = posterior.expansion
    posterior = posterior._replace(expansion=expansions.shifted(-rounding))
    known = [k for k, each in enumerate(tails) if np.isfinite(each.inefficiency)]
    worst = max(known, key=lambda k: tails[k].inefficiency, default=None)
    of_worst = None if worst is None else tails[worst]
    outcome = _outcome(problem, OtherModes(), posterior, moves, pilot, of_worst)
    if worst is not None:
        outcome.report["tail_mode"] = worst
    modes = posterior.expansion.modes  # type: ignore[attr-defined]
    return outcome._replace(
        starts=_starts(problem, starts),
        radius=float(distances(modes, posterior.draws).min(1).max()),
        report=outcome.report | found.report,
    )


def _other_coordinates(problem: Problem) -> str:
    names = ", ".join(sorted(problem.example))
    return (
        "control_variate.taylor2(modes=...) expands the rows in the coordinates that "
        f"are sampled, but those of this model are not expanded in all of {names}: the "
        "likelihood of a row depends on fewer numbers. Leave modes out, or sample at a "
        "temperature with ReplicaExchange."
    )


def _with_rows(
    problem: Problem,
    chosen: Chosen,
    needs: Needs,
    posterior: SurrogatePosterior,
    pilot: Pilot,
) -> tuple[SurrogatePosterior, Pilot, Tails | None]:
    """The surrogate with rows that it evaluates exactly, if it needs any.

    Representative rows where its tails are too light, or all rows if these do not
    suffice and all rows are read anyway. Where it is coarse, also with representative
    rows, exact rows if they leave less.
    """
    taylor, tails = chosen.taylor, None
    # few rows that are read anyway are all evaluated exactly, which settles the tails
    coarse = pilot.residual_sd > COARSE
    few = may_be_exact(problem, chosen, needs)
    every = coarse and few
    if may_represent(problem, taylor, pilot) and not every:
        tails = measure_tails(problem, pilot, posterior)
    best = posterior, pilot, tails
    if tails is not None and tails.inefficiency > MAX_INEFFICIENCY:
        handful = few and sum(problem.plates.values()) <= _HANDFUL
        found, after = posterior, tails
        all_exact = with_every_row(problem, posterior) if handful else None
        if all_exact is None:
            found, after = with_fitting_representatives(
                problem, pilot, posterior, tails
            )
            if few and not handful and after.inefficiency > MAX_INEFFICIENCY:
                all_exact = with_every_row(problem, posterior)
        if all_exact is not None:
            return all_exact, pilot.without_residuals(), tails
        if found is not posterior:
            best = found, run_pilot(problem, chosen, needs, found, pilot), after
            if best[1].residual_sd <= COARSE:
                return best
    pilot = pilot.settled(taylor, posterior)
    if best[0] is posterior:
        best = posterior, pilot, tails
    found = with_exact_rows(problem, taylor, pilot, posterior)
    if found.expansion.has_every_row:
        return found, pilot.without_residuals(), tails
    if found is not posterior:
        measured = run_pilot(problem, chosen, needs, found, pilot)
        if best[0] is posterior or measured.residual_sd < best[1].residual_sd:
            if tails is not None and measured.scores:
                tails = measure_tails(problem, measured, found)
            best = found, measured, tails
    return best


def _recentred(
    problem: Problem,
    chosen: Chosen,
    needs: Needs,
    center: Center,
    posterior: SurrogatePosterior,
    pilot: Pilot,
) -> tuple[SurrogatePosterior, Pilot]:
    """The same about the mean of the posterior, as long as that is better.

    For a hierarchy, only the mode of the likelihood with a ridge is known at first.
    The posterior shrinks the effects and is wider. If the expansion is coarse, it is
    therefore repeated about the mean of the posterior.
    """
    if problem.in_own_coordinates or chosen.taylor.center is not None:
        return posterior, pilot
    for _ in range(_RECENTRED):
        if pilot.residual_sd <= COARSE:
            break
        mean = problem.in_coordinates(posterior.draws[::_SOME]).mean(0)
        try:
            moved = surrogate_posterior(problem, center.about(mean), posterior.location)
            found = run_pilot(problem, chosen, needs, moved, pilot)
        except Refused:
            break
        if not found.residual_sd < _BETTER * pilot.residual_sd:
            break
        posterior, pilot = moved, found
    return posterior, pilot


def _positions(problem: Problem, start: Any) -> np.ndarray:
    """The starts of searches for the mode, flat, ``(K, D)``.

    A start that the user chose is one of them, so that another mode there is found.
    """
    if problem.near is not None:
        return problem.near[None]
    size = sum(np.size(x) for x in jax.tree.leaves(problem.example))
    # the box that NumPyro starts chains in
    positions = np.random.default_rng(40).uniform(-2, 2, size=(_STARTS, size))
    positions[0] = 0.0
    given = jax.tree.leaves(start)
    if not given or any(isinstance(x, jax.core.Tracer) for x in given):
        return positions
    return np.vstack([positions, flatten(start)])


def _starts(problem: Problem, draws: np.ndarray) -> Any:
    """The first of some flat draws, as positions in working precision."""
    positions = unflatten(draws[:_STARTING], problem.example)
    return jax.tree.map(lambda x: np.asarray(x, problem.dtype), positions)


def _element(problem: Problem, which: int) -> str:
    """The name of an element of a flat position, such as ``b[2]``."""
    named = jax.tree_util.tree_leaves_with_path(problem.example)
    for path, leaf in named:
        size = np.size(leaf)
        if which < size:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            index = np.unravel_index(which, np.shape(leaf))
            return f"{name}[{', '.join(map(str, index))}]" if index else name
        which -= size
    raise AssertionError("an element of another position")


def _drivers(problem: Problem, bent: Bent | None) -> str:
    """The coordinates that scales depend on, for the report."""
    if bent is None or bent.whitening.scales is None:
        return ""
    _, which = np.nonzero(bent.whitening.scales.drivers)
    return ", ".join(_element(problem, int(k)) for k in which)


def _may_have_groups(problem: Problem) -> bool:
    """Whether some latent site may be the effects of groups."""
    sizes = [np.size(x) for x in jax.tree.leaves(problem.example)]
    return not problem.in_own_coordinates and max(sizes) >= _GROUPS


def _outcome(
    problem: Problem,
    others: OtherModes,
    posterior: SurrogatePosterior,
    moves: Trajectories,
    pilot: Pilot,
    tails: Tails | None,
) -> Prepared:
    """The results of a set-up that chains keep, and its report."""
    dtype, coordinates = problem.dtype, problem.coordinates
    surrogate = Surrogate(
        expansion=posterior.expansion.cast(dtype),
        location=jax.device_put(np.asarray(posterior.location, dtype)),
        root=jax.device_put(np.asarray(posterior.root, dtype)),
        designs=pilot.designs,
        bent=jax.device_put(used(moves.bent)),
    )
    # in tails that a chain hardly leaves, the other side is the wrong place to look
    over_relaxed = posterior.gaussian and pilot.importance_ess >= _ENOUGH_DRAWS
    report = {
        **pilot.report,
        "coordinates": coordinates,
        "gaussian": posterior.gaussian,
        "hierarchical": _may_have_groups(problem),
        "surrogate_rhat": posterior.rhat,
        "surrogate_num_steps": moves.num_steps * (LONGER if moves.long else 1),
        "surrogate_long": moves.long,
        "surrogate_draws_fit": moves.draws_fit,
        "surrogate_stuck": moves.stuck,
        "surrogate_drivers": _drivers(problem, moves.bent),
        "over_relaxed": over_relaxed,
        **others.report,
        "exact_rows": posterior.expansion.num_exact,
    }
    if tails is not None and not posterior.expansion.has_every_row:
        report["tail_inefficiency"] = tails.inefficiency
        report["tail_parameter"] = _element(problem, tails.parameter)
    away = posterior.draws - posterior.location
    radius = np.linalg.norm(np.linalg.solve(posterior.root.T, away.T), axis=0).max()
    # the root of draws is shrunk, which hides strong correlations
    covariance = (
        posterior.root.T @ posterior.root
        if posterior.gaussian
        else np.atleast_2d(np.cov(posterior.draws.T))
    )
    return Prepared(
        Plan(
            coordinates,
            pilot.form,
            pilot.scheme,
            moves.num_steps,
            moves.long,
            moves.draws_fit,
            over_relaxed,
        ),
        surrogate,
        _starts(problem, posterior.draws),
        float(radius),
        report,
        covariance,
    )
