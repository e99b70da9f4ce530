"""NUTS on the surrogate, and where its chains start."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc import hmc

from numpyro_minibatch.control_variate._expand import Expansion
from numpyro_minibatch.control_variate._problem import (
    NoExpansion,
    NotDefinite,
    Problem,
    double,
)
from numpyro_minibatch.control_variate._surrogate import (
    flatten,
    log_density,
    log_surrogate_at,
    unflatten,
)

__all__ = ["CHAINS", "MIXED", "by_nuts", "compile_nuts", "elsewhere", "starting_point"]

CHAINS = 4  # of NUTS on the surrogate
_DRAWS = 500  # of each, after as many of warmup
# Parameters up to which the draws of a warmup determine their covariance. With 85, in a
# centred hierarchy, R-hat was 1.5 with a dense matrix and 1.05 with a diagonal one.
_DENSE = 40
# R-hat of chains on all rows above which one of them is lost, and will not return.
_HOPELESS = 5.0
# Difference of the logarithms of the masses of two places above which one has none, and
# of how many draws one is looked at.
_NO_MASS, _EVERY = 20.0, 10
MIXED, _AGAIN = 1.05, (32, 37, 38)  # R-hat above which they go on, and the seeds
_DIVERGING = 0.1  # largest share of divergent trajectories
# Doublings of a trajectory. If so large a share of them ended there, the chains go on
# with longer ones: on 480 rows, scale parameters and their 30 effects had R-hat 3.4.
_DEPTH, _DEEP, _CUT_SHORT = 6, 10, 0.5
# Parameters up to which they do: with 770, of a horseshoe, a refusal took over 300 s.
_MOST_OF_DEEP = 100
_SEED_OF_DEEP = 41
_STEPS_TO_START = 100  # at most, to the starting point of NUTS
_NEARLY = 0.1  # gain of the log density below which the steps end
_FAR = 10.0  # distance over which no proper prior is constant


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
            if not np.isfinite(curvature).all():
                return flat  # NUTS says what it can make of it
            eigenvalues, vectors = np.linalg.eigh(curvature)
            least = np.abs(eigenvalues).argmin()
            ends = [float(at(flat + t * vectors[:, least])[0]) for t in (-_FAR, _FAR)]
            with np.errstate(invalid="ignore"):
                change = np.ptp([*ends, here])
            if change <= 1e-9 * max(abs(float(here)), 1.0):
                raise NotDefinite.of(
                    eigenvalues[least], flat, vectors[:, least], in_sites=True
                )
    return flat


def _phi_of(problem: Problem) -> Any:
    """Shapes of the coordinates of the expansion."""
    target, shapes = problem.target_of(problem.arrays), problem.example
    return jax.eval_shape(lambda z: problem.coordinates.of(target, z), shapes)


def _is_free(problem: Problem) -> np.ndarray:
    """The coordinates of a flat position that the centre does not fix, ``(D,)``."""
    fixed = problem.coordinates.latents or ()
    return flatten(
        {
            name: np.full(np.shape(x), name not in fixed)
            for name, x in problem.example.items()
        }
    ).astype(bool)


def _gauss_newton(
    problem: Problem, arrays: list[Any], expansion: Expansion, flat: Array
) -> tuple[Array, Array, Array]:
    """The surrogate's log density, its gradient, and its Gauss-Newton curvature."""
    density = partial(log_density, problem, arrays, expansion)
    value, slope = jax.value_and_grad(density)(flat)
    known = jax.hessian(lambda z: problem.known(arrays, z))(flat)
    to_phi = jax.jacfwd(lambda z: ravel_pytree(problem.phi_of(arrays, z))[0])(flat)
    rows = to_phi.T @ expansion.hessian @ to_phi
    return value, slope, -known - problem.weights.likelihood * rows


def elsewhere(problem: Problem, starts: np.ndarray) -> np.ndarray | None:
    """Other starts, at random positions of all sites that the centre does not fix.

    The search for a start can end in a spike of the density that has no mass: where the
    means of groups are no effects of the rows themselves, their scale goes to zero.
    """
    if problem.in_own_coordinates:
        return None
    free = _is_free(problem)
    random = np.random.default_rng(39).uniform(-1.0, 1.0, starts.shape)
    return np.where(free, random, starts)


def by_nuts(
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
        if rhat <= MIXED:
            break
        again, better = _mixed_from(problem, expansion, attempt)
        if better < rhat or not np.isfinite(rhat):
            found, rhat = again, better
    draws, diverging, _ = found
    within = draws.var(1, ddof=1).mean(0)
    draws = draws.reshape(-1, draws.shape[-1])
    share = diverging.mean()
    if not np.isfinite(draws).all() or not within.min() > 0:
        names = sorted(problem.example)
        raise NoExpansion(
            "NUTS could not sample the surrogate of the control variate (the exact "
            f"prior and the expanded likelihood) of {', '.join(names)}: a chain "
            f"{'did not move' if np.isfinite(draws).all() else 'became infinite'}. "
            "The expansion has no maximum in the region that these chains reached. "
            "Either the data and the prior do not determine the parameters, or the "
            "centre is far from the posterior. Give them proper priors, or pass "
            "control_variate.taylor2(center={...})."
        )
    if share > _DIVERGING:
        form = (
            "sample them as they are (centred) if their groups have many rows"
            if problem.coordinates.values
            else "sample them in their non-centred form, with "
            'numpyro.deterministic("theta", mu + tau * eta)'
        )
        raise NoExpansion(
            "NUTS could not sample the surrogate of the control variate (the exact "
            f"prior and the expanded likelihood): {share:.0%} of its trajectories "
            f"diverged, and {_DIVERGING:.0%} is the limit. The local scale of its "
            f"posterior varies too much, as in a funnel. If there are effects of "
            f"groups, {form}."
        )
    return draws, rhat


class _Chains(NamedTuple):
    """Chains of NUTS.

    :param draws: their draws, ``(C, K, D)``.
    :param diverging: whether a trajectory diverged, ``(C, K)``.
    :param cut_short: whether it ended because it was as long as allowed.
    """

    draws: np.ndarray
    diverging: np.ndarray
    cut_short: np.ndarray


def _mixed_from(
    problem: Problem, expansion: Expansion, starts: np.ndarray
) -> tuple[_Chains, float]:
    """The same as :func:`_nuts_from`, of chains that go on while they disagree.

    On all rows, far starts can be places that a chain does not leave. These chains go
    on from where the others ended. If chains disagree as much without that, more draws
    do not help, unless their trajectories were cut short.

    Chains that integrate rows do not go on: each time takes long, and gradients of a
    coarse quadrature, of which more nodes are a remedy, can be the cause.
    """
    found, rhat = _nuts_from(problem, expansion, starts, 31)
    integrates = expansion.exact and problem.row_size > 1
    again = () if integrates else _AGAIN
    if expansion.has_every_row and rhat > _HOPELESS:
        lost = _lost(problem, expansion, found)
        if lost.any() and not lost.all():
            ends = np.resize(found.draws[~lost, -1], starts.shape)
            found, rhat = _nuts_from(problem, expansion, ends, 36)
        else:
            again = ()
    for seed in again:
        if rhat <= MIXED or not np.isfinite(found.draws).all():
            break
        more, better = _nuts_from(problem, expansion, found.draws[:, -1], seed)
        if better < rhat:
            found, rhat = more, better
    finite = np.isfinite(found.draws).all()
    cut_short = found.cut_short.mean() > _CUT_SHORT
    cut_short = cut_short and found.draws.shape[-1] <= _MOST_OF_DEEP
    if rhat > MIXED and finite and cut_short and not integrates:
        ends = found.draws[:, -1]
        more, better = _nuts_from(problem, expansion, ends, _SEED_OF_DEEP, _DEEP)
        if better < rhat:
            found, rhat = more, better
    return found, rhat


def _lost(problem: Problem, expansion: Expansion, found: _Chains) -> np.ndarray:
    """Chains in places of no mass, which they do not leave, ``(C,)``.

    The logarithm of the mass of a region is the mean of the log density there plus its
    entropy, here that of a normal distribution with the same standard deviations. For
    five groups a chain that started at a large scale of large effects stayed there, and
    the difference was 12,000.
    """
    some = found.draws[:, ::_EVERY]
    flat = some.reshape(-1, some.shape[-1])
    logs = log_surrogate_at(problem, expansion, flat).reshape(some.shape[:2]).mean(1)
    with np.errstate(all="ignore"):  # a chain may have stayed in one place
        mass = logs + np.log(found.draws.std(1)).sum(-1)
    largest = mass.max(initial=-np.inf, where=np.isfinite(mass))
    return (found.diverging.mean(1) > 0.5) | ~(mass > largest - _NO_MASS)


def _nuts_from(
    problem: Problem,
    expansion: Expansion,
    starts: np.ndarray,
    seed: int,
    depth: int = _DEPTH,
) -> tuple[_Chains, float]:
    """Draws of chains whose trajectories double ``depth`` times, and their R-hat."""
    seeds = np.random.SeedSequence(seed).generate_state(len(starts))
    inputs = [
        _chain(problem, expansion, *of_chain)
        for of_chain in zip(starts, seeds, strict=True)
    ]
    parts = problem.compiled(_nuts, depth).each(inputs)
    draws, diverging, steps = (np.stack(x) for x in zip(*parts, strict=True))
    draws = draws.astype(np.float64)
    found = _Chains(draws, diverging, steps >= 2**depth - 1)
    within, between = draws.var(1, ddof=1).mean(0), draws.mean(1).var(0, ddof=1)
    with np.errstate(all="ignore"):
        rhat = np.sqrt(1 + between / within).max()
    return found, float(rhat)


def _chain(
    problem: Problem, expansion: Expansion, start: np.ndarray, seed: int
) -> tuple[Expansion, Array, np.uint32]:
    """The arguments of a chain of :func:`_nuts`."""
    return expansion, jnp.asarray(start, problem.dtype), np.uint32(seed)


def _nuts(
    problem: Problem,
    depth: int,
    arrays: list[Any],
    expansion: Expansion,
    start: Array,
    seed: Array,
) -> tuple[Array, Array, Array]:
    """Draws from NUTS after an equally long warmup.

    With each draw comes whether its trajectory diverged, and the number of its steps.

    One chain: the program of several vectorised ones takes twice as long to trace and
    compile, and their trajectories all take the steps of the longest.
    """
    # compiled as one function, so that the model is traced once and not at every use

    def potential_fn(z: Any) -> Array:
        energy = -log_density(problem, arrays, expansion, z)
        # a density that overflows would be accepted and never left again
        return jnp.where(energy > -jnp.inf, energy, jnp.inf)

    potential = jax.jit(potential_fn)
    init, step = hmc(potential_fn=potential, algo="NUTS")
    state = init(
        start,
        _DRAWS,
        dense_mass=len(start) <= _DENSE,
        target_accept_prob=0.9,
        max_tree_depth=depth,
        rng_key=jax.random.key(seed),
    )

    def body(state: Any, _: None) -> Any:
        state = step(state)
        return state, (state.z, state.diverging, state.num_steps)

    # one loop for warmup and draws, because each would be compiled separately
    _, draws = jax.lax.scan(body, state, length=2 * _DRAWS)
    return jax.tree.map(lambda x: x[_DRAWS:], draws)


def compile_nuts(problem: Problem, expansion: Expansion, start: np.ndarray) -> None:
    """Compile the program of a chain on another thread.

    :param problem: the target and its coordinates.
    :param expansion: the expansion of the surrogate, in working precision.
    :param start: a flat position.
    """
    problem.compiled(_nuts, _DEPTH).ahead(*_chain(problem, expansion, start, 0))
