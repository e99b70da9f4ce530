"""One gradient of the log density on all rows, compiled and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy

from numpyro_minibatch._internal.static import Static

__all__ = ["Gradient", "discrete_latents", "measure_gradient", "now"]

now = time.perf_counter  # a benchmark on a busy machine replaces it

_LEAST = 3  # gradients that are timed together
_MOST = 100
_ENOUGH = 0.1  # seconds
_ROUNDS = 3
_SHORT = 1e-20  # a step that does not move, so that values stay finite


class Gradient(NamedTuple):
    """The measurements of one gradient.

    :param seconds: of one evaluation.
    :param compilation: seconds to trace and compile it.
    :param lines: of its StableHLO program.
    """

    seconds: float
    compilation: float
    lines: int


def _trace(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The sites of a model, run in the prior without its data being copied."""
    seeded = handlers.seed(model, jax.random.key(0))
    return handlers.trace(seeded).get_trace(*args, **kwargs)


def discrete_latents(
    model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names of latent sites whose values are discrete.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    """
    found: list[str] = []

    def run() -> None:
        for name, site in _latents(_trace(model, args, kwargs)):
            if site["fn"].support.is_discrete:
                found.append(name)

    jax.eval_shape(run)
    return tuple(found)


def _latents(trace: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, site)
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    ]


def measure_gradient(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], position: Any = None
) -> Gradient:
    """Compile and time a gradient of a model's log density on all rows.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param position: an unconstrained position, by site; by default zeros.
    """
    static, arrays = Static.split(args, kwargs)
    try:
        data = [jnp.asarray(x) for x in arrays]
        return _measured(model, static.join, data, position)
    except Exception:  # a model that reads values, which NUTS compiles as constants
        return _measured(model, lambda _: (args, dict(kwargs)), [], position)


def _measured(
    model: Callable, join: Callable, arrays: list[Any], position: Any
) -> Gradient:
    """The measurements with some of a model's arguments as those of the program.

    :param join: the model's arguments, from these arrays.
    """
    # a `param` site that is not yet initialised needs a key
    seeded = handlers.seed(model, jax.random.key(0))
    begin = now()
    if position is None:
        args, kwargs = join(arrays)
        shapes = jax.eval_shape(lambda: _unconstrained(_trace(model, args, kwargs)))
        position = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    position = jax.tree.map(jnp.asarray, position)

    def energy(z: Any, arrays: list[Any]) -> Any:
        args, kwargs = join(arrays)
        return potential_energy(seeded, args, kwargs, z)

    # A loop, as in NUTS: terms of the data alone are computed once for all gradients,
    # which can save half of the time.
    def descend(z: Any, arrays: list[Any], count: Any) -> Any:
        def step(_: Any, z: Any) -> Any:
            value, slope = jax.value_and_grad(energy)(z, arrays)
            return jax.tree.map(lambda x, dx: x - _SHORT * (dx + value), z, slope)

        return jax.lax.fori_loop(0, count, step, z)

    lowered = jax.jit(descend).lower(position, arrays, np.int32(0))
    compiled = lowered.compile()
    compilation = now() - begin

    def timed(count: int) -> float:
        begin = now()
        jax.block_until_ready(compiled(position, arrays, np.int32(count)))
        return (now() - begin) / count

    timed(1)
    count = int(np.clip(_ENOUGH / max(timed(_LEAST), 1e-9), _LEAST, _MOST))
    seconds = float(np.median([timed(count) for _ in range(_ROUNDS)]))
    return Gradient(seconds, compilation, lowered.as_text().count("\n"))


def _unconstrained(trace: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: biject_to(site["fn"].support).inv(site["value"])
        for name, site in _latents(trace)
    }
