"""Rows whose integral over a latent variable is infinite."""

from __future__ import annotations

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
from numpyro_minibatch.marginal._sites import Local, is_missing, plates_of, run_hidden

__all__ = ["check_integrals"]

_NEAR = 1.0  # unconstrained distance at which a density that depends on x has changed
_FAR = 20.0  # one at which a density with a finite integral has fallen
_FALLEN = 1.0


def check_integrals(
    models: list[LevelModel | ChainModel], args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Raise if a row has no finite integral over a site with an improper density.

    Quadrature does not notice it: there is a finite sum at the nodes.

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
            infinite = np.asarray(_is_infinite(rows, site))
            if infinite.any():
                where = np.argwhere(infinite)[0].tolist()
                raise ValueError(_message(rows, site, where))


def _is_infinite(rows: Rows, site: Local) -> Array:
    """Whether a row has an infinite integral in some state of its discrete sites."""

    def in_state(state: Array) -> Array:
        own, rest = _apart(rows, site, state, 0.0)
        infinite = jnp.isfinite(sum(rest))  # elsewhere a density of zero
        far: Any = -jnp.inf
        for x in (-_NEAR, _NEAR, -_FAR, _FAR):
            there, other = _apart(rows, site, state, x)
            if abs(x) == _FAR:
                far = jnp.maximum(far, there)
                continue
            for before, after in zip(rest, other, strict=True):
                infinite &= before == after
        infinite &= far > own - _FALLEN
        if site.fills:  # others have a density with a finite integral
            infinite &= is_missing(rows.fns[site.name], rows.shape)
        return infinite

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
        f"{row} of plate {plate!r} do not depend on it"
    )
    if site.fills:
        return (
            f"{message}, and numpyro.handlers.mask leaves out its density, so that the "
            "integral over all its values is infinite. Pass an obs_mask that is true "
            "where the mask around the site is false."
        )
    return (
        f"{message}, and its prior is improper, so that the integral over all its "
        "values is infinite. Give the site a proper prior. If it is the part of a "
        "censored value above its bound, leave it out and write "
        "dist.RightCensoredDistribution(dist.Normal(mean, sd), censored) for the "
        "observations."
    )
