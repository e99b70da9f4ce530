"""Trajectories on the surrogate that are short and long enough for its tails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch.control_variate._expand import Expansion
from numpyro_minibatch.control_variate._posterior import POOL, SurrogatePosterior
from numpyro_minibatch.control_variate._problem import Problem
from numpyro_minibatch.control_variate._surrogate import log_density
from numpyro_minibatch.proposal import (
    JITTER,
    LONGER,
    TRAJECTORY_LENGTH,
    ProposalContext,
    Whitening,
    follow,
    log_metropolis_ratio,
)

__all__ = ["Trajectories", "compile_trajectories", "trajectories"]

# Likelihoods of rows that all draws evaluate at a step, above which half as many draws
# are followed, or a quarter.
_COSTLY, _FEW_DRAWS = 5_000_000, POOL // 4
# numbers of steps of a trajectory to try; the last ones where NUTS needs as many
_NUM_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# More are tried from few draws only. If none suits, this number is preferred unless
# chains stick at more than so many times as many draws.
_MANY_STEPS, _HARDLY_MORE = 64, 2.0
_BLOCK = 100  # draws from which trajectories are followed at once
# share of a block at which chains stick, however short their steps, above which no
# further draws are looked at
_HOPELESS = 0.75
# With more coordinates, trajectories are judged at draws that the covariance was not
# computed from: the ends of trajectories of so many steps.
_FEW_COORDINATES, _FRESH = 40, 8
_HELD = 0.1  # acceptance probability below which a chain sticks at a draw
_STUCK = 0.001  # largest share of draws at which it may stick
# largest mean probability of a rejection, with draws weighted by their share in the
# variance of the squares
_LOST = 0.1
# Correlation of the squares at both ends of a trajectory above which there is a wide
# tail: as estimates of their mean, they are then about half as efficient as independent
# ones. Where unconstrained squares are below `_SCREEN`, sites are not looked at.
_KEPT = 0.3
_SCREEN = 0.11


class Trajectories(NamedTuple):
    """The trajectories that suit a surrogate.

    :param num_steps: the number of steps for a quarter of a period of its dynamics; 0
        if it is normal.
    :param long: whether trajectories should be longer than that.
    :param stuck: the share of its draws from which trajectories are rarely accepted.
    """

    num_steps: int
    long: bool
    stuck: float


def trajectories(problem: Problem, posterior: SurrogatePosterior) -> Trajectories:
    """Steps short enough for the tails, and trajectories long enough for them.

    In a tail, steps that are too long are rejected. The chain is reversible, so it also
    rarely enters such a tail during a run. An acceptance rate of 0.82 can go together
    with a variance that is a tenth too small. So draws count by their weight in the
    error of each parameter's variance.

    A quarter of a period forgets the start where the surrogate is normal. Where scales
    vary, a trajectory crosses a wide tail in several quarters of the average period.
    Such tails are those of the sites that a user reads. A wide tail of a logarithm
    towards minus infinity is no tail of the scale itself.

    :param problem: the target and its coordinates.
    :param posterior: that of the surrogate.
    """
    if posterior.gaussian:
        return Trajectories(0, False, 0.0)
    _, location, root, draws, *_ = posterior
    expansion = posterior.expansion.cast(problem.dtype)
    draws = draws[:: POOL // _number_followed(problem, expansion)]
    rng = np.random.default_rng(33)
    momenta = rng.normal(size=draws.shape)
    stretch = 1.0 + JITTER * rng.uniform(-1.0, 1.0, size=len(draws))
    ends = problem.compiled(_ends_of_trajectories)

    def blocks(
        num_steps: int, quarters: int, stretch: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ends of the trajectories from as many draws as there are stretches."""
        steps = quarters * TRAJECTORY_LENGTH / num_steps * stretch
        for begin in range(0, len(steps), _BLOCK):
            some = slice(begin, min(begin + _BLOCK, len(steps)))
            at = location, root, draws[some], momenta[some]
            given = _followed(problem, expansion, at, steps[some], num_steps)
            accepted, z = ends(*given)
            yield np.asarray(accepted, np.float64), np.asarray(z, np.float64)

    def followed(
        num_steps: int, quarters: int, stretch: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        parts = blocks(num_steps, quarters, stretch)
        accepted, z = zip(*parts, strict=True)
        return np.concatenate(accepted), np.concatenate(z)

    if draws.shape[1] > _FEW_COORDINATES:
        # The covariance has been fitted to these draws: with 100 coordinates, 96% of
        # the moves from them were accepted, and 77% of those of a chain.
        accepted, z = followed(_FRESH, 1, stretch)
        taken = rng.uniform(size=(len(draws), 1)) < accepted[:, None]
        draws, momenta = np.where(taken, z, draws), rng.normal(size=draws.shape)
    mean, sd = draws.mean(0), draws.std(0)
    squares = np.square(np.square((draws - mean) / sd) - 1)

    def judged(num_steps: int, last: bool) -> tuple[bool, float, int]:
        number = len(draws)
        if num_steps > _MANY_STEPS:
            number = min(number, _FEW_DRAWS)
        quarter = blocks(num_steps, 1, np.ones(number))
        return *_suit(quarter, number, squares[:number], last), number

    most = _NUM_STEPS[-1]
    for num_steps in _NUM_STEPS:
        suits, stuck, number = judged(num_steps, num_steps == most)
        if suits:
            break
    else:
        if most > _MANY_STEPS:
            _, stuck_of_few, _ = judged(_MANY_STEPS, True)
            if stuck_of_few <= _HARDLY_MORE * stuck:
                return Trajectories(_MANY_STEPS, False, stuck_of_few)
        return Trajectories(most, False, stuck)
    draws, stretch = draws[:number], stretch[:number]
    accepted, z = followed(num_steps, 1, stretch)
    kept = _correlation_of_squares(draws, z, accepted)
    if kept > _SCREEN:
        values = problem.compiled(_site_values)
        begin, end = (
            np.asarray(values(jnp.asarray(x, problem.dtype))) for x in (draws, z)
        )
        kept = _correlation_of_squares(begin, end, accepted)
    if kept > _KEPT:
        longer = blocks(LONGER * num_steps, LONGER, stretch)
        suits, stuck_of_long = _suit(longer, number)
        if suits:
            return Trajectories(num_steps, True, max(stuck, stuck_of_long))
    return Trajectories(num_steps, False, stuck)


def _suit(
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
    number: int,
    squares: np.ndarray | None = None,
    last: bool = False,
) -> tuple[bool, float]:
    """Whether trajectories are accepted from nearly all draws, and where they stick.

    No block is looked at after the one that decides.

    :param blocks: acceptance probabilities and ends, from some of the draws at a time.
    :param number: the number of draws.
    :param squares: the weights of the draws in the error of each parameter's variance,
        ``(number, D)``; without them, only draws count at which chains stick.
    :param last: whether there are no shorter steps, so that the share counts.
    :return: the answer, and the share of the draws looked at from which trajectories
        are rarely accepted.
    """
    done = stuck = 0
    lost: Any = 0.0
    total: Any = 1.0
    if squares is not None:
        total = squares.sum(0)
    for accepted, _ in blocks:
        if squares is not None:
            weights = squares[done : done + len(accepted)] / total
            lost = lost + (1 - accepted) @ weights
        done += len(accepted)
        stuck += int((accepted < _HELD).sum())
        suits = stuck <= _STUCK * number and np.max(lost) <= _LOST
        if stuck > _HOPELESS * done if last else not suits:
            break
    return bool(suits), stuck / done


def _number_followed(problem: Problem, expansion: Expansion) -> int:
    """The number of draws from which trajectories start."""
    number = POOL
    cost_of_one = expansion.num_exact * problem.row_size
    while number > _FEW_DRAWS and number * cost_of_one > _COSTLY:
        number //= 2
    return number


def _followed(
    problem: Problem,
    expansion: Expansion,
    at: tuple[np.ndarray, ...],
    steps: np.ndarray,
    num_steps: int,
) -> tuple[Any, ...]:
    """The arguments of :func:`_ends_of_trajectories`.

    :param at: the location, the root, the draws, and a momentum for each.
    :param steps: a step size for each draw.
    """
    arrays = [jnp.asarray(x, problem.dtype) for x in (*at, steps)]
    return expansion, *arrays, np.int32(num_steps)


def _correlation_of_squares(
    starts: np.ndarray, ends: np.ndarray, accepted: np.ndarray
) -> float:
    """The largest correlation between the squares at both ends of trajectories.

    :param starts: values at the starts, which are draws, ``(K, d)``.
    :param ends: values at the ends.
    :param accepted: the acceptance probabilities, ``(K,)``.
    """
    starts, ends = np.asarray(starts, np.float64), np.asarray(ends, np.float64)
    mean, sd = starts.mean(0), starts.std(0)
    varies = sd > 1e-6 * np.abs(mean)  # unlike the first row of a Cholesky factor
    mean, sd = mean[varies], sd[varies]
    before = np.square((starts[:, varies] - mean) / sd) - 1
    after = np.square((ends[:, varies] - mean) / sd) - 1
    taken = accepted[:, None]
    after = np.where(taken > 0, taken * after, 0.0) + (1 - taken) * before
    kept = (before * after).mean(0) / np.square(before).mean(0)
    return float(kept.max(initial=-1.0))


def _site_values(problem: Problem, arrays: list[Any], positions: Array) -> Array:
    """The constrained values of the latent sites at some positions, ``(K, d)``."""
    target = problem.target_of(arrays)

    def one(flat: Array) -> Array:
        z = problem.unravel(flat)
        values = target.constrain(z)
        if isinstance(z, dict):  # without deterministic sites, which may be large
            values = {name: values[name] for name in z}
        return ravel_pytree(values)[0]

    return jax.vmap(one)(positions)


def _ends_of_trajectories(
    problem: Problem,
    arrays: list[Any],
    expansion: Expansion,
    location: Array,
    root: Array,
    draws: Array,
    momenta: Array,
    steps: Array,
    num_steps: Array,
) -> tuple[Array, Array]:
    """The acceptance probabilities of trajectories from some draws, and their ends."""

    def unread(_: Array) -> Array:
        raise AssertionError("the surrogate has its own gradient")

    context = ProposalContext(
        unread,
        Whitening(root),
        location,
        log_surrogate=partial(log_density, problem, arrays, expansion),
    )

    def one(z: Array, momentum: Array, step: Array) -> tuple[Array, Array]:
        z_new, after, logs = follow(z, momentum, step, num_steps, context)
        lost = log_metropolis_ratio(momentum, after, logs)
        lost = jnp.minimum(jnp.nan_to_num(lost, nan=-jnp.inf), 0.0)
        return jnp.exp(lost), z_new

    return jax.vmap(one)(draws, momenta, steps)


def compile_trajectories(
    problem: Problem, expansion: Expansion, start: np.ndarray
) -> None:
    """Compile what :func:`trajectories` needs on another thread.

    :param problem: the target and its coordinates.
    :param expansion: the expansion of the surrogate, in working precision.
    :param start: a flat position.
    """
    dim = len(start)
    zeros = np.zeros((_BLOCK, dim))
    at = zeros[0], np.zeros((dim, dim)), zeros, zeros
    problem.compiled(_ends_of_trajectories).ahead(
        *_followed(problem, expansion, at, zeros[:, 0], 1)
    )
