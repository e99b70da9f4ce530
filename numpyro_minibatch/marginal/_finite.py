"""Rows that have a density nowhere, found when a marginalized model first sees data.

Kernels of this package look for such rows before they compile. NumPyro's own inference
does not: it tries a hundred starting points, each with the search for the mode and the
quadrature of all rows, and then names neither the rows nor the site.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
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
    positions, every other one as the handlers around the model determine it, such as by
    an ``init_strategy``. Runs by a kernel of this package, which has looked already,
    and runs with data that are traced, on the host or in other processes are not
    checked.

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
    untraced(_check, model, static, arrays, _Called.now())
    if len(seen) >= _MOST_SEEN:
        seen.clear()
    seen.append(this)


def _is_here(x: Any) -> bool:
    """Whether an array has no part in another process."""
    return not isinstance(x, Array) or x.is_fully_addressable


class _Called(NamedTuple):
    """How handlers around the model determine its sites, as far as that is known.

    :param values: by site.
    :param strategy: gives the values of other sites, such as an ``init_strategy``;
        ``None`` if they are drawn from their distributions.
    """

    values: dict[str, Any]
    strategy: Callable | None

    @classmethod
    def now(cls) -> _Called:
        """What the handlers that are active do."""
        values: dict[str, Any] = {}
        strategy = None
        for handler in numpyro.primitives._PYRO_STACK:
            if isinstance(handler, handlers.replay):
                sites = (handler.trace or {}).items()
                values |= {n: s["value"] for n, s in sites if s["type"] == "sample"}
            elif isinstance(handler, handlers.condition | handlers.substitute):
                values |= handler.data or {}
                found = getattr(handler, "substitute_fn", None)
                bound = getattr(found, "args", ()), getattr(found, "keywords", {})
                if found is not None and _is_known(bound):
                    strategy = found
        known = {name: x for name, x in values.items() if _is_known(x)}
        return cls(known, strategy)


def _is_known(values: Any) -> bool:
    return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))


def _check(
    model: Marginalized, static: Static, arrays: list[Any], called: _Called
) -> None:
    args, kwargs = static.join(arrays)
    levels = model.levels(args, kwargs)
    plates = {name for level in levels for name in level.plates}
    where: dict[str, tuple[str, ...]] = {}

    def finite(
        as_called: bool, arrays: list[Any], radius: Array, key: Array
    ) -> dict[str, Array]:
        args, kwargs = static.join(arrays)
        strategy = called.strategy if as_called else init_to_uniform(radius=radius)
        run = handlers.seed(in_this_precision(model), key)
        if strategy is not None:
            run = handlers.substitute(run, substitute_fn=strategy)
        if as_called:
            run = handlers.substitute(run, data=called.values)
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

    program = jax.jit(finite, static_argnums=0, compiler_options=_QUICKLY)
    with warnings.catch_warnings(action="ignore"):  # the run gives them as well
        try:
            try:
                left = _never(lambda as_called, *at: program(as_called, arrays, *at))
            except TypeError:  # the model computes with NumPy
                left = _never(
                    lambda as_called, *at: jax.jit(partial(finite, as_called, arrays))(
                        *at
                    )
                )
        except (KeyError, RuntimeError, TypeError, ValueError):
            return  # the run says what is wrong with the model
    rows = _first_rows(left, where)
    if not rows:
        return
    names = [name for level in levels for name in level.written]
    raise nowhere_finite("marginalize(model)", rows, names)


def _never(finite: Callable[..., dict[str, Array]]) -> dict[str, np.ndarray]:
    """Which elements of sites are finite at no position; nothing if all are at some.

    :param finite: which are at a position: one of the run itself, or a random one.
    """
    left: dict[str, np.ndarray] = {}
    for k in range(POSITIONS):
        radius = jnp.asarray(RADII[k % len(RADII)])
        found = full_precision(finite)(k % 2 == 0, radius, jax.random.key(k))
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
