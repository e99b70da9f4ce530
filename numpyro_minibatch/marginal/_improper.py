"""Latent variables of rows whose density is improper or left out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to

from numpyro_minibatch.marginal._chain import ChainModel
from numpyro_minibatch.marginal._model import LevelModel, Rows
from numpyro_minibatch.marginal._row_sites import site_rows
from numpyro_minibatch.marginal._sites import Local, masks_of, plates_of, run_hidden

__all__ = ["check_integrals"]

_NEAR = 1.0  # unconstrained distance at which a density that depends on x has changed
_FAR = 20.0  # one at which a density with a finite integral has fallen
_OUT = (1e6, 1e8)  # between which it falls further, on either side
_FALLEN = 1.0


def check_integrals(
    models: list[LevelModel | ChainModel], args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Raise if a row has no integral over a site with an improper density.

    It is infinite for an improper prior of a site on which nothing else in the row
    depends. Quadrature does not notice it: there is a finite sum at the nodes. A
    missing value whose density is masked out must not be used where that mask is false.

    :param models: a model with its levels integrated out, one after the other.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: with the site and a row.
    """
    for model in models:
        improper = [site for site in model.level.sites if site.improper]
        if not improper or isinstance(model, ChainModel):
            continue
        seen = model.observer()
        run_hidden(seen, args, kwargs)
        rows = model.rows(seen, args, kwargs)
        for site in improper:
            with warnings.catch_warnings():  # of values rounded to a border
                warnings.simplefilter("ignore")
                refused = np.asarray(_is_refused(rows, site))
            if refused.any():
                where = np.argwhere(refused)[0].tolist()
                raise ValueError(_message(rows, site, where))


def _is_refused(rows: Rows, site: Local) -> Array:
    """Whether a row has no integral in some state of its discrete sites."""

    def in_state(state: Array) -> Array:
        own, rest = _apart(rows, site, state, 0.0)
        same = jnp.ones(rows.shape, bool)
        for x in (-_NEAR, _NEAR):
            _, other = _apart(rows, site, state, x)
            for before, after in zip(rest, other, strict=True):
                same &= before == after
        if site.fills:
            missing, within = masks_of(rows.fns[site.name], rows.shape)
            return ~same & missing & ~within
        far = [_apart(rows, site, state, x)[0] for x in (-_FAR, _FAR)]
        # elsewhere the density of the row is zero, or falls
        finite = jnp.isfinite(sum(rest))
        refused = same & finite & (jnp.maximum(*far) > own - _FALLEN)
        # a count of zero bounds the logarithm of its rate on one side only
        for side in (-1.0, 1.0):
            near, beyond = (
                own + sum(rest, jnp.zeros(rows.shape))
                for own, rest in (_apart(rows, site, state, side * x) for x in _OUT)
            )
            refused |= jnp.isfinite(beyond) & (beyond > near - _FALLEN)
        return refused

    return jax.vmap(in_state)(jnp.asarray(rows.states)).any(0)


def _apart(
    rows: Rows, site: Local, state: Array, x: float
) -> tuple[Array, list[Array]]:
    """The log density of a site, and those of the others of each row.

    :param x: how far unconstrained values of the site are from the start of a search.
    """
    free = rows.free_values(rows.start())
    free[site.name] = free[site.name] + x
    u = jnp.concatenate([free[s.name] for s in rows.continuous], -1)
    trace, plates = rows.trace(state, u), rows.model.level.plates
    rest = []
    for name, found in trace.items():
        if found["type"] != "sample" or not set(plates) <= set(plates_of(found)):
            continue
        if name != site.name:
            rest.append(site_rows(found, plates, rows.scale))
    found = trace[site.name]
    transform = biject_to(found["fn"].support)
    shape = transform.inverse_shape(found["fn"].shape())
    change = transform.log_abs_det_jacobian(
        free[site.name].reshape(shape), found["value"]
    )
    own = site_rows(found, plates, rows.scale)
    return own + change.reshape(*rows.shape, -1).sum(-1), rest


def _message(rows: Rows, site: Local, where: list[int]) -> str:
    row = where[0] if len(where) == 1 else tuple(where)
    plate = rows.model.level.plates[-1]
    message = (
        f"marginalize cannot integrate out site {site.name!r}: the observations of row "
        f"{row} of plate {plate!r}"
    )
    if site.fills:
        return (
            f"{message} depend on it, although a mask "
            f"of numpyro.handlers.mask around site {site.fills!r} leaves out its "
            "density. Put the same mask around everything that uses its value."
        )
    return (
        f"{message} do not bound it, and its prior is improper, so that the integral "
        "over all its values is infinite. Give the site a proper prior. If it is the "
        "part of a censored value above its bound, leave it out and write "
        "dist.RightCensoredDistribution(dist.Normal(mean, sd), censored) for the "
        "observations."
    )
