"""Rows that are nowhere finite because of their data, found before a run.

A row that is nowhere finite would otherwise be noticed only after the search for a
mode, or at the start of the chain, when several programs have been compiled. Here NumPy
compares the data with the supports and looks for NaN and infinite values, which
compiles nothing. Only if there is one, a program that evaluates the observed sites
alone computes their density. It contains neither the search nor the quadrature of
marginalized rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal
from numpyro.distributions import MaskedDistribution
from numpyro.distributions.distribution import ExpandedDistribution, Independent
from numpyro.infer import init_to_uniform

from numpyro_minibatch._internal.static import Static
from numpyro_minibatch._model.independence import known_by
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch._model.start import find_nan, listed, never_finite_rows
from numpyro_minibatch.target import ModelTarget, Target, without_integrals

__all__ = [
    "POSITIONS",
    "RADII",
    "check_latent_rows",
    "check_support",
    "nowhere_finite",
]

POSITIONS = 12
RADII = (2.0, 0.5, 0.05)  # positions are uniform within these
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


# Observed sites of models that ran before. A second run need not trace the model.
_KNOWN: WeakKeyDictionary[Any, dict[Hashable, list[_Observed]]] = WeakKeyDictionary()
_MOST_KNOWN = 64  # of each model


class _Observed(NamedTuple):
    """An observed site of a model, and where its values are.

    :param name: of the site.
    :param support: of its distribution, without event dimensions; ``None`` if it does
        not matter.
    :param plates: the axis of each of its plates, from the right.
    :param array: the number of the array among the arguments that has its values.
    """

    name: str
    support: Any
    plates: dict[str, int]
    array: int


def check_support(who: str, target: Target) -> None:
    """Raise if observations of a model have a density nowhere.

    These are values outside of a support, or rows of data with NaN or infinite values,
    whose density is finite at no position. A row that is finite at some position is
    accepted, and so are values outside of a support with a finite density, which a
    user's own distribution may have, and NaN in rows that are masked.

    :param who: the kernel's name, for the messages.
    :param target: the target; only that of a model is checked.
    :raises ValueError: with the site and rows of these observations.
    """
    if not isinstance(target, ModelTarget):
        return
    model: Any = target.model
    while getattr(model, "marginalizes", False):
        model = model.fn
    static, arrays = Static.split(target.args, target.kwargs)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    plates = tuple(sorted(target.sizes.items()))
    key = known_by(model, static, arrays, plates, target.slices)
    target = replace(target, model=model)
    strange: list[str] = []

    def observed(arrays: list[Any], key: Array) -> dict[str, Any]:
        args, kwargs = static.join(arrays)
        return _observed(replace(target, args=args, kwargs=kwargs), key)

    try:
        with warnings.catch_warnings(action="ignore"):  # the run gives them as well
            try:
                known = _KNOWN.setdefault(model, {})
            except TypeError:  # it cannot be referred to weakly
                known = {}
            if key not in known:
                sites = _observed_sites(observed, arrays)
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[key] = sites
            outside = {
                site.name: site
                for site in known[key]
                if not _all_inside(site.support, arrays[site.array])
            }
            if not outside:
                strange = find_nan((target.args, target.kwargs), infinite=True)
                if not strange:
                    return
                outside = _all_sites(observed, arrays)
            never = _never_finite(observed, arrays, outside)
    except (KeyError, RuntimeError, TypeError, ValueError):
        return  # later checks explain what is wrong with the model
    for name, (wrong, is_nan) in never.items():
        rows = {}
        for plate, dim in outside[name].plates.items():
            if plate in target.sizes:
                axis = wrong.ndim + dim
                others = tuple(k for k in range(wrong.ndim) if k != axis)
                (found,) = np.nonzero(wrong.any(others))
                rows[plate] = found[:_MOST_LISTED].tolist()
        if strange and rows and all(rows.values()):
            raise ValueError(
                f"{who}: the log likelihood of some rows ({listed(rows)}) is not "
                f"finite at any of {POSITIONS} positions, and there are NaN or "
                f"infinite values among the data ({'; '.join(strange)}). Drop those "
                "rows, or mask them with numpyro.handlers.mask."
            )
        if rows and all(rows.values()):
            why = f"outside of the support of its distribution ({outside[name].support}"
            if is_nan:
                nan = find_nan((target.args, target.kwargs))
                why = f"NaN ({'; '.join(nan) or 'which the model makes'}"
            raise ValueError(
                f"{who}: the log likelihood of some rows ({listed(rows)}) is not "
                f"finite at any of {POSITIONS} positions: their values of {name!r} "
                f"are {why}). Drop those rows, or mask them with "
                "numpyro.handlers.mask."
            )


def check_latent_rows(
    who: str,
    target: ModelTarget,
    finite: Callable[[Any, dict[str, np.ndarray]], Mapping[str, Array]],
    layout: Layout,
    init_strategy: Callable,
    init: Any,
) -> None:
    """Raise if rows of a marginalized model have a density nowhere.

    A few values of their latent variables and all discrete states are tried at several
    positions. The program contains neither the search nor the quadrature of the rows.

    :param who: the kernel's name, for the messages.
    :param target: the target.
    :param finite: :func:`finite_rows` as a function of a position and indices.
    :param layout: what is known of the model.
    :param init_strategy: draws some of the positions.
    :param init: the starting point of the first chain, which is one of them, if given.
    :raises ValueError: with the rows.
    """
    rng = np.random.default_rng(0)
    shapes = dict(zip(layout.latents, layout.shapes, strict=True))
    positions: list[Any] = [
        {name: rng.uniform(-r, r, shape) for name, shape in shapes.items()}
        for r in (RADII * POSITIONS)[:POSITIONS]
    ]
    if init is not None:
        positions[0] = init
    elif isinstance(init_strategy, partial):  # such as init_to_value(values=...)
        one_row = {name: jnp.zeros(1, jnp.int32) for name in target.sizes}
        with without_integrals():
            sites = target.trace(
                one_row, jax.random.key(0), substitute_fn=init_strategy
            )
        positions[0] = target.unconstrain(sites, layout.latents)
    dtype = jnp.result_type(float)
    stacked = jax.tree.map(lambda *x: np.stack(x).astype(dtype), *positions)
    rows = never_finite_rows(target.plates, finite, stacked)
    if not rows:
        return
    levels = target.model.levels(target.args, target.kwargs)  # type: ignore[attr-defined]
    names = [name for level in levels for name in level.written]
    raise nowhere_finite(who, rows, names)


def nowhere_finite(
    who: str, rows: Mapping[str, list[int]], names: Sequence[str]
) -> ValueError:
    """The error for rows of a marginalized model that have a density nowhere.

    :param who: what was called.
    :param rows: some of the rows of each plate.
    :param names: the latent sites that are integrated out.
    """
    latents = ", ".join(map(repr, names))
    return ValueError(
        f"{who}: the marginal likelihood of some rows ({listed(rows)}) is zero or NaN "
        f"at all of {POSITIONS} positions, whatever the values of {latents}. Check the "
        "observations and the factors of these rows, and drop or mask "
        "(numpyro.handlers.mask) those that the model does not allow. If it allows "
        "them at other positions, start there: "
        "init_strategy=init_to_value(values=...)."
    )


def _observed(target: ModelTarget, key: Array) -> dict[str, Any]:
    """The observed sites of a model on all rows, at a random position near zero."""
    rows = {n: jnp.arange(size, dtype=jnp.int32) for n, size in target.sizes.items()}
    trace = target.trace(rows, key, substitute_fn=init_to_uniform(radius=2.0))
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def _observed_sites(
    observed: Callable[..., dict[str, Any]], arrays: list[Any]
) -> list[_Observed]:
    """The observed sites with a support that is known beforehand, and their data.

    Data that are no argument are not checked.
    """
    sites: dict[str, tuple[Any, dict[str, int]]] = {}

    def run(arrays: list[Any], key: Array) -> list[Any]:
        sites.clear()
        values = []
        for name, site in observed(arrays, key).items():
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
            sites[name] = fn.support, frames
            values.append(site["value"])
        return values

    key = jax.eval_shape(lambda: jax.random.key(0))
    closed = jax.make_jaxpr(run)(arrays, key)
    places = {variable: k for k, variable in enumerate(closed.jaxpr.invars)}
    found = []
    for (name, site), out in zip(sites.items(), closed.jaxpr.outvars, strict=True):
        place = places.get(_source(closed.jaxpr, out))
        if place is not None and place < len(arrays):
            found.append(_Observed(name, *site, place))
    return found


def _all_inside(support: Any, data: Any) -> bool:
    """Whether data in memory are within a support; others are not read."""
    if isinstance(data, jax.Array):
        if not data.is_fully_addressable:
            return True
    elif not isinstance(data, np.ndarray) or isinstance(data, np.memmap):
        return True
    return bool(np.all(support(np.asarray(data))))


def _all_sites(
    observed: Callable[..., dict[str, Any]], arrays: list[Any]
) -> dict[str, _Observed]:
    """All observed sites, whose supports do not matter."""
    sites: dict[str, _Observed] = {}

    def run(arrays: list[Any], key: Array) -> None:
        for name, site in observed(arrays, key).items():
            frames = {f.name: f.dim for f in site["cond_indep_stack"]}
            sites[name] = _Observed(name, None, frames, -1)

    jax.eval_shape(run, arrays, jax.eval_shape(lambda: jax.random.key(0)))
    return sites


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
    observed: Callable[..., dict[str, Any]],
    arrays: list[Any],
    sites: Mapping[str, _Observed],
) -> dict[str, tuple[np.ndarray, bool]]:
    """Which values outside of the support of a site have a finite density nowhere.

    :return: for each site that has any, where they are, and whether all are NaN.
    """

    @jax.jit
    def everywhere(arrays: list[Any], keys: Array) -> dict[str, tuple[Array, Array]]:
        def finite(key: Array) -> dict[str, tuple[Array, Array, Array]]:
            run = observed(arrays, key)
            found = {}
            for name, site in sites.items():
                fn, value = run[name]["fn"], run[name]["value"]
                log_prob = fn.log_prob(value)
                shapes = log_prob.shape, fn.event_shape
                inside = jnp.zeros(log_prob.shape, bool)
                if site.support is not None:
                    inside = _by_element(site.support(value), *shapes).all(-1)
                nan = _by_element(value != value, *shapes).any(-1)
                found[name] = jnp.isfinite(log_prob), inside, nan
            return found

        found = jax.lax.map(finite, keys)
        result = {}
        for name, (finite, inside, nan) in found.items():
            never = ~(finite | inside).any(0)
            result[name] = never, (nan.any(0) | ~never).all()
        return result

    keys = jax.random.split(jax.random.key(0), POSITIONS)
    never = jax.tree.map(np.asarray, everywhere(arrays, keys))
    return {name: (x, bool(nan)) for name, (x, nan) in never.items() if x.any()}


def _by_element(x: Array, batch: tuple[int, ...], event: tuple[int, ...]) -> Array:
    """Numbers of each element of a batch, in its last axis."""
    return jnp.broadcast_to(x, batch + event).reshape(*batch, -1)
