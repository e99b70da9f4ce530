"""The chains of discrete states in the scans of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import init_to_uniform

from numpyro_minibatch._model.dataflow import inputs_used
from numpyro_minibatch.marginal._chain import ChainModel, StatesGiven
from numpyro_minibatch.marginal._scans import EachScan
from numpyro_minibatch.marginal._sites import (
    MOST_STATES,
    Chain,
    Level,
    plates_of,
    run_hidden,
    summed_site,
)

__all__ = ["find_chains"]


class _Step(NamedTuple):
    """The static part of a scan: its sites, and what its steps carry.

    :param position: that of the scan among the scans of the model.
    :param sites: ``(name, type, observed, plates, distribution)`` of a step's sites.
    :param uses: for each carried array, the carried arrays of the step before that it
        depends on; the last entry is for the states of its own step.
    :param subsampled: plates of the step that read some of their rows only.
    :param length: the number of steps.
    """

    position: int
    sites: tuple[Any, ...]
    uses: tuple[tuple[bool, ...], ...]
    subsampled: tuple[str, ...]
    length: int


class _Recorder(EachScan):
    """Record the sites of each scan, and what its steps carry."""

    def __init__(self) -> None:
        self.steps: dict[int, _Step] = {}
        super().__init__()

    def at_scan(self, msg: Any, index: int) -> None:
        step, init, xs, length, *rest = msg["args"]
        if length is None:
            length = len(jax.tree.leaves(xs)[0])

        def recorded(carry: Any, x: Any) -> Any:
            with handlers.trace() as trace:
                out = step(carry, x)
            self.steps[index] = _described(index, step, carry, x, trace, length)
            return out

        msg["args"] = (recorded, init, xs, length, *rest)


def _described(
    index: int, step: Callable, carry: Any, x: Any, trace: Mapping, length: int
) -> _Step:
    sites, subsampled = [], []
    for name, site in trace.items():
        kind = site["type"]
        if kind == "plate":
            size, rows = site["args"]
            if rows is not None and rows != size:
                subsampled.append(name)
        elif kind in ("sample", "deterministic"):
            observed = bool(site.get("is_observed", False))
            sites.append((name, kind, observed, plates_of(site), site.get("fn")))
    local = [
        name
        for name, kind, observed, plates, fn in sites
        if kind == "sample" and not observed and plates and _is_discrete(fn)
    ]
    uses: list[tuple[bool, ...]] = []
    if local:
        leaves, tree = jax.tree.flatten(carry)

        def carried(places: dict[str, Array], *leaves: Array) -> list[Any]:
            # the handlers around the scan must not see the sites a second time
            with (
                handlers.block(),
                handlers.substitute(substitute_fn=init_to_uniform()),
                handlers.seed(rng_seed=0),
                StatesGiven(places),
            ):
                found, _ = step(jax.tree.unflatten(tree, leaves), x)
            return jax.tree.leaves(found)

        places = {name: jnp.zeros((), jnp.int32) for name in local}
        closed = jax.make_jaxpr(carried)(places, *leaves)
        for k in range(len(leaves)):
            one = closed.jaxpr.replace(outvars=closed.jaxpr.outvars[k : k + 1])
            used = inputs_used(closed.replace(jaxpr=one))
            uses.append((*used[len(local) :], any(used[: len(local)])))
    return _Step(index, tuple(sites), tuple(uses), tuple(subsampled), length)


def _is_discrete(fn: Any) -> bool:
    return fn.support is not None and fn.support.is_discrete


def find_chains(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    sites: Collection[str] | None,
) -> tuple[Level, ...]:
    """Find the chains of discrete states in the rows of a model, one for each scan.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param sites: names of the sites to marginalize; ``None`` for all.
    :raises ValueError: a chain cannot be marginalized.
    """
    recorder = _Recorder()

    def run() -> None:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with recorder:
                return model(*args, **kwargs)

        run_hidden(recorded, args, kwargs)

    jax.eval_shape(run)
    levels = []
    for step in recorder.steps.values():
        level = _chain_of(step, sites)
        if level is not None:
            one = ChainModel(model, level)
            levels.append(one.checked(args, kwargs))
    return tuple(levels)


def _chain_of(step: _Step, sites: Collection[str] | None) -> Level | None:
    samples = [s for s in step.sites if s[1] == "sample"]
    observed = [s for s in samples if s[2]]
    local = [
        (name, plates, fn)
        for name, _, seen, plates, fn in samples
        if not seen and plates and any(set(plates) <= set(o[3]) for o in observed)
    ]
    chosen = [s for s in local if sites is None or s[0] in sites]
    if not chosen:
        return None
    continuous = [name for name, _, fn in chosen if not _is_discrete(fn)]
    if continuous:
        raise ValueError(
            f"marginalize cannot integrate out site {continuous[0]!r}, which has a "
            "value for each row and each step of a scan: the integral has as many "
            "dimensions as there are steps. Sample the model with NUTS."
        )
    left = [name for name, _, _ in local if name not in {s[0] for s in chosen}]
    if left:
        both = ", ".join(f'"{name}"' for name, _, _ in local)
        raise ValueError(
            "marginalize needs all discrete sites of a scan at once, and sites= lacks "
            f"{left[0]!r}, which has a value for each row: write sites=[{both}]."
        )
    name, plates, _ = chosen[0]
    other = [s for s in chosen if set(s[1]) != set(plates)]
    if other:
        raise ValueError(
            f"marginalize cannot sum over {name!r} "
            f"(in {', '.join(map(repr, plates))}) and "
            f"{other[0][0]!r} (in {', '.join(map(repr, other[0][1]))}), which are "
            "in one scan and in different plates. Put them into the same plates."
        )
    if step.subsampled:
        raise ValueError(
            f"marginalize: plate {step.subsampled[0]!r} in a scan has a "
            "subsample_size. Leave it out, and pass the data as arguments with one "
            "entry for each row."
        )
    order = _order(step.uses, [s[0] for s in chosen])
    members = tuple(summed_site(name, fn) for name, _, fn in chosen)
    states = int(np.prod([s.size for s in members], dtype=int))
    if states ** (order + 1) > MOST_STATES:
        raise ValueError(
            f"marginalize would sum over {states ** (order + 1)} joint states in each "
            f"step of a scan: {states} of {', '.join(repr(s.name) for s in members)}, "
            f"and of the {order} steps before. At most {MOST_STATES} are allowed. "
            "Sample the model with NUTS."
        )
    varying = tuple(k > 0 for k in _orders(step.uses) or ())
    names = tuple(s[0] for s in observed if set(plates) <= set(s[3]))
    chain = Chain(step.position, order, varying, names, step.length)
    return Level(plates, members, chain=chain)


def _orders(uses: tuple[tuple[bool, ...], ...]) -> list[int] | None:
    """For each carried array the number of last states that it depends on.

    :return: ``None`` if an array depends on the states of all steps.
    """
    orders = [0] * len(uses)
    for _ in range(len(uses) + 1):
        new = []
        for *arrays, states in uses:
            older = [k for k, used in zip(orders, arrays, strict=True) if used and k]
            new.append(1 + max(older) if older else int(states))
        if new == orders:
            return orders
        orders = new
    return None


def _order(uses: tuple[tuple[bool, ...], ...], names: list[str]) -> int:
    orders = _orders(uses)
    if orders is None:
        which = ", ".join(map(repr, names))
        raise ValueError(
            f"marginalize cannot sum over {which}: the carry of the scan depends on "
            "its values in all earlier steps, as a sum or a count of the states does. "
            "The states are then not a Markov chain of finite order, and the sum over "
            "them has no recursion. Carry only the last states, or use NUTS on a model "
            "with a closed form."
        )
    return max([1, *orders])
