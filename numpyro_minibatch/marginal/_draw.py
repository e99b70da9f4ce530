"""Draws of the latent variables of rows from their conditional distribution."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to

from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch.marginal._model import Rows
from numpyro_minibatch.marginal._quadrature import Place
from numpyro_minibatch.marginal._row_sites import each_key
from numpyro_minibatch.marginal._split import Split

__all__ = ["draw_latents"]

# With one number per row, the distribution function is tabulated at these standardised
# points, dense at the mode and up to 27 standard deviations away.
_GRID = np.sinh(np.linspace(-4.0, 4.0, 193))
_STEPS, _FREEDOM = 64, 5.0  # of the Markov chain for two or three numbers per row


@full_precision
def draw_latents(rows: Rows, keys: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Draw the latent sites of each row, given its observations and the parameters.

    :param rows: the rows.
    :param keys: a PRNG key for each row, of the shape of the rows.
    :return: values of the sites, and of those that some of them are parts of, rows
        first; and for each discrete site the probabilities of its states, shape
        ``rows + (states,)``.
    """
    of_state, of_rest = _split(keys)
    by_state = (  # (states,) + rows; one state has no alternative
        rows.log_by_state() if len(rows.states) > 1 else jnp.zeros((1, *rows.shape))
    )
    gumbel = each_key(of_state, lambda k: jax.random.gumbel(k, by_state.shape[:1]))
    which = jnp.argmax(jnp.moveaxis(by_state, 0, -1) + gumbel, -1)
    state = jnp.asarray(rows.states)[which]  # rows + (discrete sites,)
    probability = jax.nn.softmax(by_state, axis=0)
    probabilities = {}
    for k, site in enumerate(rows.discrete):
        of_site = jax.nn.one_hot(rows.states[:, k], site.size)
        probabilities[site.name] = jnp.einsum("s...,sk->...k", probability, of_site)
    values = rows.state_values(state)
    if not rows.continuous:
        return values, probabilities
    density = rows.density(state)
    place = rows.place(density)
    draw = _by_table if place.mode.shape[-1] == 1 else _by_chain
    u = draw(density, place, of_rest)
    trace = rows.trace(state, u)
    for name, free in rows.free_values(u).items():
        fn = trace[name]["fn"]
        transform = biject_to(fn.support)
        value = transform(free.reshape(transform.inverse_shape(fn.shape())))
        values[name] = value.reshape(rows.shape + fn.event_shape)
    for site in rows.continuous:
        if site.part_of and site.part_of not in values:
            whole = jnp.asarray(trace[site.part_of]["value"])
            event = rows.fns[site.name].event_shape
            values[site.part_of] = whole.reshape(rows.shape + event)
        if site.fills:  # the observed values, where they are not missing
            value = trace[site.fills]["value"]
            values[site.name] = value.reshape(values[site.name].shape)
    return values, probabilities


def _split(keys: Array) -> tuple[Array, Array]:
    both = each_key(keys, lambda k: jax.random.split(k, 2))
    return both[..., 0], both[..., 1]


def _by_table(density: Split, place: Place, keys: Array) -> Array:
    """Invert the distribution function of a density that is linear between points."""
    grid = jnp.asarray(_GRID, place.mode.dtype)
    log_f = jax.vmap(lambda x: density(place.at(x)))(grid[:, None])
    log_f = jnp.where(jnp.isnan(log_f), -jnp.inf, log_f)
    f = jnp.exp(log_f - jnp.max(log_f, 0))
    f = jnp.moveaxis(f, 0, -1)  # rows + (points,)
    width = jnp.diff(grid)
    mass = 0.5 * (f[..., 1:] + f[..., :-1]) * width
    below = jnp.cumsum(mass, -1)
    uniform = each_key(keys, lambda k: jax.random.uniform(k, (), f.dtype))
    wanted = uniform * below[..., -1]
    cell = jnp.sum(below < wanted[..., None], -1)
    cell = jnp.minimum(cell, len(width) - 1)

    def at(x: Array) -> Array:
        return jnp.take_along_axis(x, cell[..., None], -1)[..., 0]

    left, right, h = at(f[..., :-1]), at(f[..., 1:]), width[cell]
    rest = jnp.clip(wanted - (at(below) - at(mass)), 0.0, at(mass))
    # left t + (right - left) t^2 / (2 h) = rest, solved for t in the form without
    # cancellation
    root = jnp.sqrt(jnp.maximum(left**2 + 2.0 * (right - left) * rest / h, 0.0))
    t = jnp.where(rest > 0, 2.0 * rest / jnp.maximum(left + root, 1e-30), 0.0)
    return place.at((grid[cell] + jnp.clip(t, 0.0, h))[..., None])


def _by_chain(density: Split, place: Place, keys: Array) -> Array:
    """Independence Metropolis with proposals from a t distribution at the mode."""
    d = place.mode.shape[-1]
    of_moves, of_tests = _split(keys)
    x = each_key(of_moves, lambda k: _t_draws(k, d))  # rows + (steps, d)
    x = jnp.moveaxis(x, -2, 0)
    log_q = -0.5 * (_FREEDOM + d) * jnp.log1p(jnp.sum(x**2, -1) / _FREEDOM)
    log_f = jax.vmap(lambda x: density(place.at(x)))(x)
    log_w = jnp.where(jnp.isnan(log_f), -jnp.inf, log_f) - log_q
    log_u = each_key(of_tests, lambda k: jnp.log(jax.random.uniform(k, (_STEPS,))))

    def step(current: Any, new: Any) -> Any:
        (at, weight), (x, log_w, log_u) = current, new
        accept = log_u < log_w - weight
        at = jnp.where(accept[..., None], x, at)
        return (at, jnp.where(accept, log_w, weight)), None

    start = x[0], log_w[0]
    (last, _), _ = jax.lax.scan(step, start, (x, log_w, jnp.moveaxis(log_u, -1, 0)))
    return place.at(last)


def _t_draws(key: Array, d: int) -> Array:
    of_normal, of_scale = jax.random.split(key)
    normal = jax.random.normal(of_normal, (_STEPS, d))
    squares = jax.random.normal(of_scale, (_STEPS, int(_FREEDOM))) ** 2
    return normal / jnp.sqrt(squares.mean(-1, keepdims=True))
