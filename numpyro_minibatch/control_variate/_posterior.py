"""Draws from the posterior of the surrogate, before any batch is read."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc import hmc

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch._internal.threads import compilers
from numpyro_minibatch.control_variate._center import not_definite
from numpyro_minibatch.control_variate._expand import Expansion, log_surrogate
from numpyro_minibatch.control_variate._problem import Problem, Refused, double
from numpyro_minibatch.proposal import (
    HEAVY_DF,
    JITTER,
    LONGER,
    TRAJECTORY_LENGTH,
    ProposalContext,
    Whitening,
    follow,
    log_metropolis_ratio,
)

__all__ = [
    "SurrogatePosterior",
    "Trajectories",
    "flatten",
    "log_surrogate_at",
    "refined",
    "rounding_error",
    "starting_point",
    "surrogate_posterior",
    "trajectories",
    "unflatten",
]

_CHAINS, _NUTS_DRAWS = 4, 500  # of NUTS on the surrogate, after as many of warmup
_MIXED, _AGAIN = 1.05, (32, 37, 38)  # R-hat above which they go on, and the seeds
_POOL = 2000  # draws of the surrogate for all later stages
_DIVERGING = 0.1  # largest share of divergent trajectories
_NUM_STEPS = (1, 2, 4, 8, 16, 32, 64)  # numbers of steps of a trajectory to try
_FRESH = 8  # number of steps to draws that the covariance was not computed from
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
# The covariance of more coordinates also uses so many Hessians of the surrogate. The
# draws then count as this share of independent ones.
_FEW_COORDINATES, _CURVATURES, _EFFECTIVE = 40, 32, 0.5
_FEW_DRAWS = 200  # smallest effective number of draws after resampling
_STEPS_TO_START = 100  # at most, to the starting point of NUTS
_NEARLY = 0.1  # gain of the log density below which the steps end
_FAR = 10.0  # distance over which no proper prior is constant
_BLOCK = 64  # draws at which a program evaluates the surrogate
_JUDGING = 56  # draws that judge whether the posterior is normal


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
    moves: bool = False,
) -> SurrogatePosterior:
    """Draw from the posterior of the surrogate, without reading data.

    If the prior is nearly normal, a normal distribution stands for the posterior.
    Otherwise NUTS samples it.

    :param problem: the target and its coordinates.
    :param expansion: the expansion about the centre, in double precision.
    :param start: where NUTS starts, flat.
    :param known_hessian: the Hessian of all that is not expanded at the centre, if it
        is already known.
    :param moves: whether :func:`trajectories` of this surrogate will be needed.
    :raises Refused: it is not proper, or trajectories diverge.
    """
    stage("posterior of the surrogate")
    few = _JUDGING
    normal = np.random.default_rng(30).normal(size=(_POOL, len(start)))
    if problem.in_own_coordinates:
        center = np.asarray(expansion.center)
        with double():
            wide = expansion.cast(jnp.float64)
            if known_hessian is None or expansion.exact:
                of_all = problem.compiled(_hessian)(wide, wide.center)
                precision = -np.asarray(of_all)
            else:
                weight = problem.likelihood_weight
                precision = -(known_hessian + weight * np.asarray(expansion.hessian))
            smallest = np.linalg.eigvalsh(precision).min()
            if not smallest > 0:
                # the search converged because of a ridge, which is not part of the
                # posterior
                raise Refused(not_definite(smallest))
            root = np.asarray(np.linalg.cholesky(np.linalg.inv(precision)).T)
            draws = center + normal @ root
            some = jnp.asarray(draws[:few], jnp.float64)
            values = problem.compiled(_log_densities)(wide, some)
        misfit = np.asarray(values) + 0.5 * np.square(normal[:few]).sum(1)
        if np.std(misfit) < 0.1:
            return SurrogatePosterior(expansion, center, root, draws, True, 1.0)
        start = center
    starts = start + 0.01 * normal[:_CHAINS]
    return _sampled(problem, expansion, starts, _elsewhere(problem, starts), moves)


def _elsewhere(problem: Problem, starts: np.ndarray) -> np.ndarray | None:
    """Other starts, at random positions of all sites that the centre does not fix.

    The search for a start can end in a spike of the density that has no mass: where the
    means of groups are no effects of the rows themselves, their scale goes to zero.
    """
    if problem.in_own_coordinates:
        return None
    free = _is_free(problem)
    random = np.random.default_rng(39).uniform(-1.0, 1.0, starts.shape)
    return np.where(free, random, starts)


def _is_free(problem: Problem) -> np.ndarray:
    """The coordinates of a flat position that the centre does not fix, ``(D,)``."""
    fixed = problem.coordinates.latents or ()
    return flatten(
        {
            name: np.full(np.shape(x), name not in fixed)
            for name, x in problem.example.items()
        }
    ).astype(bool)


def _sampled(
    problem: Problem,
    expansion: Expansion,
    starts: np.ndarray,
    elsewhere: np.ndarray | None,
    moves: bool,
) -> SurrogatePosterior:
    """Sample the posterior of a surrogate with NUTS."""
    cast = expansion.cast(problem.dtype)
    if moves:  # both are compiled at once, on other threads
        problem.compiled(_nuts).ahead(*_chain(problem, cast, starts[0], 0))
        zeros = np.zeros((_CHAINS * _NUTS_DRAWS, starts.shape[1]))
        at = zeros[0], np.outer(zeros[0], zeros[0]), zeros, zeros
        problem.compiled(_ends_of_trajectories).ahead(
            *_followed(problem, cast, at, zeros[:, 0], 1)
        )
    draws, rhat = _by_nuts(problem, cast, starts, elsewhere)
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
        hessian = problem.compiled(_hessian)
        at = draws[np.linspace(0, len(draws) - 1, _CURVATURES).astype(int)]
        found = [hessian(expansion, jnp.asarray(x, problem.dtype)) for x in at]
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


def starting_point(
    problem: Problem, expansion: Expansion, start: np.ndarray
) -> np.ndarray:
    """A position from which NUTS reaches the bulk of the surrogate's posterior.

    Gauss-Newton steps lead towards the conditional mode given the sites that are both
    sampled and expanded, which stay at the centre. A centred hierarchy has no joint
    mode, because its density grows without bound as all effects become equal. The first
    step explains the effects by the sites on which they depend linearly, not by a huge
    scale of small effects.

    :param problem: the target and its coordinates.
    :param expansion: the expansion about the centre, in double precision.
    :param start: a flat position of finite density.
    :raises Refused: the density is the same along a direction.
    """
    latents = problem.coordinates.latents
    if latents is None:
        return np.asarray(expansion.center)
    with double():
        z = unflatten(start, problem.example)
        for name, value in unflatten(expansion.center, _phi_of(problem)).items():
            if name in latents:
                z[name] = value
        flat, free = flatten(z), np.flatnonzero(_is_free(problem))
        wide = expansion.cast(jnp.float64)

        def at(flat: np.ndarray) -> list[np.ndarray]:
            found = problem.compiled(_gauss_newton)(wide, jnp.asarray(flat))
            return [np.asarray(x) for x in found]

        for _ in range(_STEPS_TO_START if len(free) else 0):
            value, slope, curvature = at(flat)
            slope, curvature = slope[free], curvature[np.ix_(free, free)]
            if not np.isfinite(curvature).all() or not np.isfinite(slope).all():
                break
            eigenvalues, vectors = np.linalg.eigh(curvature)
            floor = 1e-8 * np.abs(eigenvalues).max() + 1e-12
            along = (vectors.T @ slope) / np.maximum(np.abs(eigenvalues), floor)
            step = np.zeros_like(flat)
            step[free] = vectors @ along
            gain, shrink = slope @ step[free], 1.0
            while shrink > 1e-6 and gain > _NEARLY:
                if at(flat + shrink * step)[0] >= value + 1e-4 * shrink * gain:
                    break
                shrink /= 2.0
            else:
                break
            flat = flat + shrink * step
        if len(free):
            here, _, curvature = at(flat)
            eigenvalues, vectors = np.linalg.eigh(curvature)
            least = np.abs(eigenvalues).argmin()
            ends = [float(at(flat + t * vectors[:, least])[0]) for t in (-_FAR, _FAR)]
            with np.errstate(invalid="ignore"):
                change = np.ptp([*ends, here])
            if change <= 1e-9 * max(abs(float(here)), 1.0):
                raise Refused(not_definite(eigenvalues[least]))
    return flat


def _phi_of(problem: Problem) -> Any:
    """Shapes of the coordinates of the expansion."""
    target, shapes = problem.target_of(problem.arrays), problem.example
    return jax.eval_shape(lambda z: problem.coordinates.of(target, z), shapes)


def unflatten(flat: Any, example: Any) -> Any:
    """A tree of NumPy arrays with the shapes of another tree.

    :param flat: the numbers; leading axes become leading axes of all leaves.
    :param example: a tree of arrays or shapes.
    """
    leaves, treedef = jax.tree.flatten(example)
    shapes = [jnp.shape(x) for x in leaves]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    parts = np.split(np.asarray(flat, np.float64), cuts, axis=-1)
    pairs = zip(parts, shapes, strict=True)
    return jax.tree.unflatten(
        treedef, [x.reshape(x.shape[:-1] + shape) for x, shape in pairs]
    )


def flatten(tree: Any) -> np.ndarray:
    """All numbers of a tree, in the order of :func:`unflatten`."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def _gauss_newton(
    problem: Problem, arrays: list[Any], expansion: Expansion, flat: Array
) -> tuple[Array, Array, Array]:
    """The surrogate's log density, its gradient, and its Gauss-Newton curvature."""
    density = partial(_log_density, problem, arrays, expansion)
    value, slope = jax.value_and_grad(density)(flat)
    known = jax.hessian(lambda z: problem.known(arrays, z))(flat)
    to_phi = jax.jacfwd(lambda z: ravel_pytree(problem.phi_of(arrays, z))[0])(flat)
    rows = to_phi.T @ expansion.hessian @ to_phi
    return value, slope, -known - problem.weights.likelihood * rows


def _by_nuts(
    problem: Problem,
    expansion: Expansion,
    starts: np.ndarray,
    elsewhere: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Draws of the surrogate's posterior, ``(K, D)``, and their largest R-hat.

    :param problem: the target and its coordinates.
    :param expansion: the expansion of the surrogate, in working precision.
    :param starts: a flat position for each chain.
    :param elsewhere: other starts. Half of the chains start there, so that R-hat shows
        if one of the two is not in the bulk. Then all of them start there, and only if
        they disagree again all at ``starts``: in a spike, chains may well agree.
    :raises Refused: trajectories diverge.
    """
    attempts = [starts]
    if elsewhere is not None:
        half = len(starts) // 2
        mixed = np.concatenate([starts[:half], elsewhere[half:]])
        attempts = [mixed, elsewhere, starts]
    found, rhat = _mixed_from(problem, expansion, attempts[0])
    for attempt in attempts[1:]:
        if rhat <= _MIXED:
            break
        again, better = _mixed_from(problem, expansion, attempt)
        if better < rhat or not np.isfinite(rhat):
            found, rhat = again, better
    draws, diverging = found
    within = draws.var(1, ddof=1).mean(0)
    draws = draws.reshape(-1, draws.shape[-1])
    share = diverging.mean()
    if not np.isfinite(draws).all() or not within.min() > 0:
        names = sorted(problem.example)
        raise Refused(
            "NUTS could not sample the surrogate of the control variate (the exact "
            f"prior and the expanded likelihood) of {', '.join(names)}: a chain "
            f"{'did not move' if np.isfinite(draws).all() else 'became infinite'}. "
            "The expansion has no maximum in the region that these chains reached. "
            "Either the data and the prior do not determine the parameters, or the "
            "centre is far from the posterior. Give them proper priors, pass "
            "control_variate.taylor2(center={...}), or use NumPyro's NUTS."
        )
    if share > _DIVERGING:
        form = (
            "Sample the effects themselves (centred) if their groups have many rows"
            if problem.coordinates.values
            else "Sample the effects in their non-centred form, with "
            'numpyro.deterministic("theta", mu + tau * eta)'
        )
        raise Refused(
            "NUTS could not sample the surrogate of the control variate (the exact "
            f"prior and the expanded likelihood): {share:.0%} of its trajectories "
            f"diverged, and {_DIVERGING:.0%} is the limit. The local scale of its "
            f"posterior varies too much, as in a funnel. {form}, or use "
            "NumPyro's NUTS."
        )
    return draws, rhat


def _mixed_from(
    problem: Problem, expansion: Expansion, starts: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """The same as :func:`_nuts_from`, of chains that go on while they disagree."""
    found, rhat = _nuts_from(problem, expansion, starts, 31)
    for seed in _AGAIN:
        if rhat <= _MIXED or not np.isfinite(found[0]).all():
            break
        again, better = _nuts_from(problem, expansion, found[0][:, -1], seed)
        if better < rhat:
            found, rhat = again, better
    return found, rhat


def _nuts_from(
    problem: Problem, expansion: Expansion, starts: np.ndarray, seed: int
) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """Draws of chains, which trajectories diverged, and the largest R-hat."""
    chain = problem.compiled(_nuts)
    seeds = np.random.SeedSequence(seed).generate_state(len(starts))
    inputs = [
        _chain(problem, expansion, *of_chain)
        for of_chain in zip(starts, seeds, strict=True)
    ]
    first = chain(*inputs[0])
    parts = [first, *compilers().map(lambda of_chain: chain(*of_chain), inputs[1:])]
    draws, diverging = (np.stack(x) for x in zip(*parts, strict=True))
    draws = draws.astype(np.float64)
    within, between = draws.var(1, ddof=1).mean(0), draws.mean(1).var(0, ddof=1)
    with np.errstate(all="ignore"):
        rhat = np.sqrt(1 + between / within).max()
    return (draws, diverging), float(rhat)


def _chain(
    problem: Problem, expansion: Expansion, start: np.ndarray, seed: int
) -> tuple[Expansion, Array, np.uint32]:
    """The arguments of a chain of :func:`_nuts`."""
    return expansion, jnp.asarray(start, problem.dtype), np.uint32(seed)


def _nuts(
    problem: Problem,
    arrays: list[Any],
    expansion: Expansion,
    start: Array,
    seed: Array,
) -> tuple[Array, Array]:
    """Draws from NUTS after an equally long warmup, and which trajectories diverged.

    One chain: the program of several vectorised ones takes twice as long to trace and
    compile, and their trajectories all take the steps of the longest.
    """
    # compiled as one function, so that the model is traced once and not at every use
    potential = jax.jit(lambda z: -_log_density(problem, arrays, expansion, z))
    init, step = hmc(potential_fn=potential, algo="NUTS")
    state = init(
        start,
        _NUTS_DRAWS,
        dense_mass=len(start) <= 200,
        target_accept_prob=0.9,
        max_tree_depth=6,
        rng_key=jax.random.key(seed),
    )

    def body(state: Any, _: None) -> Any:
        state = step(state)
        return state, (state.z, state.diverging)

    # one loop for warmup and draws, because each would be compiled separately
    _, draws = jax.lax.scan(body, state, length=2 * _NUTS_DRAWS)
    return jax.tree.map(lambda x: x[_NUTS_DRAWS:], draws)


def _log_density(
    problem: Problem, arrays: list[Any], expansion: Expansion, flat: Array
) -> Array:
    """The log density of the surrogate at a flat position."""
    fn = log_surrogate(
        problem.target_of(arrays),
        problem.coordinates,
        expansion,
        problem.weights,
        problem.unravel,
    )
    return fn(flat)


def _log_densities(
    problem: Problem, arrays: list[Any], expansion: Expansion, draws: Array
) -> Array:
    return jax.vmap(partial(_log_density, problem, arrays, expansion))(draws)


def _hessian(
    problem: Problem, arrays: list[Any], expansion: Expansion, flat: Array
) -> Array:
    return jax.hessian(partial(_log_density, problem, arrays, expansion))(flat)


def log_surrogate_at(
    problem: Problem, expansion: Expansion, draws: np.ndarray
) -> np.ndarray:
    """The log density of the surrogate at some positions.

    :param problem: the target and its coordinates.
    :param expansion: the expansion of the surrogate.
    :param draws: positions, ``(K, D)``.
    """
    program = problem.compiled(_log_densities)
    # in blocks of one size, so that the exact rows are compiled once
    place = np.arange(-(-len(draws) // _BLOCK) * _BLOCK)
    at = np.asarray(draws, problem.dtype)[np.minimum(place, len(draws) - 1)]
    parts = [
        np.asarray(program(expansion, jax.device_put(at[k : k + _BLOCK])), float)
        for k in range(0, len(at), _BLOCK)
    ]
    return np.concatenate(parts)[: len(draws)]


def rounding_error(problem: Problem, expansion: Expansion, draws: np.ndarray) -> float:
    """Standard deviation of the rounding error of the surrogate's log density.

    :param problem: the target and its coordinates.
    :param expansion: the surrogate's, in double precision.
    :param draws: positions, ``(K, D)``.
    """
    if problem.dtype == jnp.float64:
        return 0.0

    with double():
        at, wide = jnp.asarray(draws, jnp.float64), expansion.cast(jnp.float64)
        right = np.asarray(problem.compiled(_log_densities)(wide, at))
    found = log_surrogate_at(problem, expansion.cast(problem.dtype), draws)
    return float((found - right).std(ddof=1))


def refined(
    problem: Problem, posterior: SurrogatePosterior, expansion: Expansion
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
    if weights.sum() ** 2 >= _FEW_DRAWS * np.square(weights).sum() > 0:
        places = (np.arange(len(weights)) + rng.uniform()) / len(weights)
        found = np.searchsorted(np.cumsum(weights / weights.sum()), places)
        chosen = pool[np.minimum(found, len(weights) - 1)]
    else:
        scales = 0.01 * root.T @ rng.normal(size=(len(root), _CHAINS))
        try:
            chosen, rhat = _by_nuts(problem, both[1], location + scales.T)
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
        logs = [_log_density(problem, arrays, e, flat) for e in both]
        return logs[1] - logs[0]

    return jax.lax.map(one, draws, batch_size=100)


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
    rng = np.random.default_rng(33)
    momenta = rng.normal(size=draws.shape)
    stretch = 1.0 + JITTER * rng.uniform(-1.0, 1.0, size=len(draws))
    ends = problem.compiled(_ends_of_trajectories)

    def followed(
        num_steps: int, quarters: int, stretch: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        steps = quarters * TRAJECTORY_LENGTH / num_steps * stretch
        at = location, root, draws, momenta
        accepted, z = ends(*_followed(problem, expansion, at, steps, num_steps))
        return np.asarray(accepted, np.float64), np.asarray(z, np.float64)

    if draws.shape[1] > _FEW_COORDINATES:
        # The covariance has been fitted to these draws: with 100 coordinates, 96% of
        # the moves from them were accepted, and 77% of those of a chain.
        accepted, z = followed(_FRESH, 1, stretch)
        taken = rng.uniform(size=(len(draws), 1)) < accepted[:, None]
        draws, momenta = np.where(taken, z, draws), rng.normal(size=draws.shape)
    mean, sd = draws.mean(0), draws.std(0)
    squares = np.square((draws - mean) / sd) - 1
    weights = np.square(squares) / np.square(squares).sum(0)

    for num_steps in _NUM_STEPS:
        accepted, _ = followed(num_steps, 1, np.ones(len(draws)))
        stuck = float((accepted < _HELD).mean())
        if stuck <= _STUCK and ((1 - accepted) @ weights).max() <= _LOST:
            break
    else:
        return Trajectories(num_steps, False, stuck)
    accepted, z = followed(num_steps, 1, stretch)
    kept = _correlation_of_squares(draws, z, accepted)
    if kept > _SCREEN:
        values = problem.compiled(_site_values)
        begin, end = (
            np.asarray(values(jnp.asarray(x, problem.dtype))) for x in (draws, z)
        )
        kept = _correlation_of_squares(begin, end, accepted)
    if kept > _KEPT:
        accepted, _ = followed(LONGER * num_steps, LONGER, stretch)
        stuck_of_long = float((accepted < _HELD).mean())
        if stuck_of_long <= _STUCK:
            return Trajectories(num_steps, True, max(stuck, stuck_of_long))
    return Trajectories(num_steps, False, stuck)


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
        log_surrogate=partial(_log_density, problem, arrays, expansion),
    )

    def one(z: Array, momentum: Array, step: Array) -> tuple[Array, Array]:
        z_new, after, logs = follow(z, momentum, step, num_steps, context)
        lost = log_metropolis_ratio(momentum, after, logs)
        lost = jnp.minimum(jnp.nan_to_num(lost, nan=-jnp.inf), 0.0)
        return jnp.exp(lost), z_new

    inputs = draws, momenta, steps
    return jax.lax.map(lambda x: one(*x), inputs, batch_size=100)
