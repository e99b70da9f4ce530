"""Observations outside of the support of their distribution, found before a run.

The log density of a marginalized row is expensive to compile, and a row that is nowhere
finite is noticed only after the search for a mode. Here NumPy compares the data with
the supports, which compiles nothing. Only if a value is outside of one, a program
without search and quadrature evaluates its density.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal
from numpyro import handlers
from numpyro.distributions import MaskedDistribution
from numpyro.distributions.distribution import ExpandedDistribution, Independent
from numpyro.infer import init_to_uniform

from numpyro_minibatch._internal.static import Static
from numpyro_minibatch._model.start import listed

__all__ = ["check_support"]

_POSITIONS = 12
_MOST_LISTED = 5
# operations that move the elements of their first operand and change none
_MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "reshape",
    "slice",
    "squeeze",
    "transpose",
}


class _Observed(NamedTuple):
    """An observed site of a model.

    :param support: of its distribution, without event dimensions.
    :param plates: the axis of each of its plates, from the right.
    """

    support: Any
    plates: dict[str, int]


def check_support(
    who: str,
    model: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    plates: Collection[str],
) -> None:
    """Raise if observations of a marginalized model have a density nowhere.

    These are values outside of a support whose density is finite at no position. A row
    that is finite at some position is accepted, and so are values outside of a support
    with a finite density, which a user's own distribution may have.

    :param who: the kernel's name, for the messages.
    :param model: the model; others than marginalized ones are not checked.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param plates: the plates whose rows are named.
    :raises ValueError: with the site and rows of these observations.
    """
    if not getattr(model, "marginalizes", False):
        return
    while getattr(model, "marginalizes", False):
        model = model.fn
    static, arrays = Static.split(args, kwargs)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # the run gives them as well
            outside = _outside(model, static, arrays)
            if not outside:
                return
            never = _never_finite(model, static, arrays, outside)
    except (KeyError, RuntimeError, TypeError, ValueError):
        return  # later checks explain what is wrong with the model
    for name, wrong in never.items():
        rows = {}
        for plate, dim in outside[name].plates.items():
            if plate in plates:
                axis = wrong.ndim + dim
                others = tuple(k for k in range(wrong.ndim) if k != axis)
                (found,) = np.nonzero(wrong.any(others))
                rows[plate] = found[:_MOST_LISTED].tolist()
        if rows and all(rows.values()):
            raise ValueError(
                f"{who}: the log likelihood of some rows ({listed(rows)}) is not "
                f"finite at any of {_POSITIONS} positions: their values of {name!r} "
                "are outside of the support of its distribution "
                f"({outside[name].support}). Drop those rows, or mask them with "
                "numpyro.handlers.mask."
            )


def _run(model: Callable, static: Static, arrays: Any, key: Array) -> dict[str, Any]:
    """The observed sites of a model at a random position, near the origin."""
    args, kwargs = static.join(arrays)
    seeded = handlers.seed(model, key)
    start = handlers.substitute(seeded, substitute_fn=init_to_uniform(radius=2.0))
    trace = handlers.trace(start).get_trace(*args, **kwargs)
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def _outside(
    model: Callable, static: Static, arrays: list[Any]
) -> dict[str, _Observed]:
    """The observed sites with values outside of a support that is known beforehand."""
    sites: dict[str, _Observed] = {}

    def run(arrays: list[Any], key: Array) -> list[Any]:
        sites.clear()
        values = []
        for name, site in _run(model, static, arrays, key).items():
            fn = site["fn"]
            # a mask lets values pass, such as the padding of groups
            masked = isinstance(fn, MaskedDistribution)
            while isinstance(fn, ExpandedDistribution | Independent):
                fn = fn.base_dist
                masked |= isinstance(fn, MaskedDistribution)
            leaves = jax.tree.leaves(fn.support)
            fixed = not any(isinstance(x, jax.core.Tracer) for x in leaves)
            if masked or not fixed or fn.support.event_dim or fn.event_dim:
                continue
            frames = {f.name: f.dim for f in site["cond_indep_stack"]}
            sites[name] = _Observed(fn.support, frames)
            values.append(site["value"])
        return values

    key = jax.eval_shape(lambda: jax.random.key(0))
    closed = jax.make_jaxpr(run)(arrays, key)
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(closed.jaxpr.invars, arrays, strict=False))
    found = {}
    for (name, site), out in zip(sites.items(), closed.jaxpr.outvars, strict=True):
        data = known.get(_source(closed.jaxpr, out))
        if _is_in_memory(data) and not np.all(site.support(np.asarray(data))):
            found[name] = site
    return found


def _is_in_memory(data: Any) -> bool:
    if isinstance(data, jax.Array):
        return data.is_fully_addressable
    return isinstance(data, np.ndarray) and not isinstance(data, np.memmap)


def _source(jaxpr: Any, variable: Any) -> Any:
    """The input of a program whose elements a variable has, or ``None``."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while True:
        if isinstance(variable, Literal) or variable not in made:
            return None if isinstance(variable, Literal) else variable
        eqn = made[variable]
        if eqn.primitive.name in _MOVES:
            variable = eqn.invars[0]
            continue
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name not in ("jit", "pjit") or inner is None:
            return None
        place = eqn.outvars.index(variable)
        source = _source(inner.jaxpr, inner.jaxpr.outvars[place])
        if source not in inner.jaxpr.invars:
            return None
        variable = eqn.invars[inner.jaxpr.invars.index(source)]


def _never_finite(
    model: Callable, static: Static, arrays: list[Any], sites: Mapping[str, _Observed]
) -> dict[str, np.ndarray]:
    """Which values outside of the support of a site have a finite density nowhere."""

    @jax.jit
    def everywhere(arrays: list[Any], keys: Array) -> dict[str, Array]:
        def finite(key: Array) -> dict[str, tuple[Array, Array]]:
            run = _run(model, static, arrays, key)
            found = {}
            for name, site in sites.items():
                fn, value = run[name]["fn"], run[name]["value"]
                log_prob = fn.log_prob(value)
                shape = log_prob.shape + fn.event_shape
                inside = jnp.broadcast_to(site.support(value), shape)
                inside = inside.reshape(*log_prob.shape, -1).all(-1)
                found[name] = jnp.isfinite(log_prob), inside
            return found

        found = jax.lax.map(finite, keys)
        return {
            name: ~(finite | inside).any(0) for name, (finite, inside) in found.items()
        }

    keys = jax.random.split(jax.random.key(0), _POSITIONS)
    never = jax.tree.map(np.asarray, everywhere(arrays, keys))
    return {name: x for name, x in never.items() if x.any()}
