"""Rows that have a density nowhere, found when a marginalized model first sees data.

Kernels of this package look for such rows before they compile. NumPyro's own inference
does not: it tries a hundred starting points, each with the search for the mode and the
quadrature of all rows, and then names neither the rows nor the site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.infer import init_to_uniform

from numpyro_minibatch._internal.precision import full_precision, in_this_precision
from numpyro_minibatch._internal.static import Seen, Static
from numpyro_minibatch._internal.threads import untraced
from numpyro_minibatch._model.support import POSITIONS, RADII, nowhere_finite
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.marginal._sites import Level
from numpyro_minibatch.target import integrates, traces_rows, without_integrals

__all__ = ["check_finite"]

_MOST_LISTED = 5
_MOST_SEEN = 64  # data sets of each model
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}  # it runs once


class Marginalized(Protocol):
    """A model whose rows are integrated over their latent variables."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""

    def levels(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Level, ...]:
        """The sites to integrate out."""

    def __hash__(self) -> int: ...


# data that were looked at
_SEEN: WeakKeyDictionary[Marginalized, list[tuple[Static, Seen]]] = WeakKeyDictionary()


def check_finite(model: Marginalized, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raise if rows of the data have a density nowhere, once for the same data.

    A few values of their latent variables and all discrete states are tried at several
    positions. Runs by a kernel of this package, which has looked already, and runs with
    data that are traced, on the host or in other processes are not checked.

    :param model: the marginalized model.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: with the rows.
    """
    if traces_rows() or not integrates():
        return
    static, arrays = Static.split(args, kwargs)
    if not arrays or any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    if find_rows((args, dict(kwargs))) or not all(map(_is_here, arrays)):
        return
    seen = _SEEN.setdefault(model, [])
    this = static, Seen.of(arrays)
    if this in seen:
        return
    untraced(_check, model, static, arrays, _given())
    if len(seen) >= _MOST_SEEN:
        seen.clear()
    seen.append(this)


def _is_here(x: Any) -> bool:
    """Whether an array has no part in another process."""
    return not isinstance(x, Array) or x.is_fully_addressable


def _given() -> dict[str, Any]:
    """Values that handlers around the model give to its sites, if they are known."""
    given: dict[str, Any] = {}
    for handler in numpyro.primitives._PYRO_STACK:
        if isinstance(handler, handlers.condition | handlers.substitute):
            strategy = getattr(handler, "substitute_fn", None)
            start = getattr(strategy, "keywords", {}).get("values")
            for values in (start, handler.data):
                given |= values if isinstance(values, Mapping) else {}
    return {
        name: value
        for name, value in given.items()
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value))
    }


def _check(
    model: Marginalized, static: Static, arrays: list[Any], given: dict[str, Any]
) -> None:
    args, kwargs = static.join(arrays)
    levels = model.levels(args, kwargs)
    plates = {name for level in levels for name in level.plates}
    where: dict[str, tuple[str, ...]] = {}

    def finite(
        arrays: list[Any], given: dict[str, Any], radius: Array, key: Array
    ) -> dict[str, Array]:
        args, kwargs = static.join(arrays)
        seeded = handlers.seed(in_this_precision(model), key)
        near = handlers.substitute(seeded, substitute_fn=init_to_uniform(radius=radius))
        run = handlers.substitute(near, data=given)
        with without_integrals(highest=True), handlers.block():
            trace = handlers.trace(run).get_trace(*args, **kwargs)
        found = {}
        where.clear()
        for name, site in trace.items():
            if site["type"] != "sample" or not site["is_observed"]:
                continue
            frames = {frame.dim: frame for frame in site["cond_indep_stack"]}
            log_prob = site["fn"].log_prob(site["value"])
            shape = [frames[d].size if d in frames else None for d in _dims(log_prob)]
            # rows of a plate, all of them, and nothing else
            whole = all(trace[f.name]["args"][0] == f.size for f in frames.values())
            if whole and shape == list(log_prob.shape):
                if plates & {frame.name for frame in frames.values()}:
                    found[name] = jnp.isfinite(log_prob)
                    where[name] = tuple(frames[d].name for d in _dims(log_prob))
        return found

    try:
        try:
            left = _never(jax.jit(finite), arrays, given)
        except TypeError:  # the model computes with NumPy
            left = _never(jax.jit(partial(finite, arrays)), None, given)
    except (KeyError, RuntimeError, TypeError, ValueError):
        return  # the run says what is wrong with the model
    rows = _first_rows(left, where)
    if not rows:
        return
    names = [name for level in levels for name in level.written]
    raise nowhere_finite("marginalize(model)", rows, names)


def _never(
    finite: Callable[..., dict[str, Array]],
    arrays: list[Any] | None,
    given: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Which elements of sites are finite at no position; nothing if all are at some.

    :param finite: which are at a position.
    :param arrays: its first argument, if it has one.
    :param given: values of sites at half of the positions.
    """
    first = () if arrays is None else (arrays,)
    left: dict[str, np.ndarray] = {}
    for k in range(POSITIONS):
        data = given if k % 2 == 0 else {}
        radius = jnp.asarray(RADII[k % len(RADII)])
        found = full_precision(finite)(*first, data, radius, jax.random.key(k))
        now = {name: ~np.asarray(x) for name, x in found.items()}
        left = {name: x & left.get(name, True) for name, x in now.items()}
        if not any(x.any() for x in left.values()):
            return {}
    return left


def _dims(x: Array) -> range:
    return range(-x.ndim, 0)


def _first_rows(
    never: Mapping[str, np.ndarray], where: Mapping[str, Sequence[str]]
) -> dict[str, list[int]]:
    """The first rows of each plate among elements of sites."""
    rows: dict[str, set[int]] = {}
    for name, wrong in never.items():
        for axis, plate in enumerate(where[name]):
            found = np.unique(np.nonzero(wrong)[axis])
            rows.setdefault(plate, set()).update(found.tolist())
    return {plate: sorted(which)[:_MOST_LISTED] for plate, which in rows.items()}
