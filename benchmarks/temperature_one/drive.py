"""One driver for all samplers: compiled blocks of steps, timed without compilation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: ``read(state)`` gives the position, the rows read and the acceptance probability
Read = Callable[[Any], tuple[Any, Any, Any]]


class Sampler(NamedTuple):
    """A Markov chain.

    :param state: the initial state.
    :param step: ``step(state, args)``, the next state.
    :param read: the record of a state: a flat unconstrained position, the number of
        rows that the step read, and its acceptance probability.
    :param warmup: steps that are discarded.
    :param thin: steps from one kept draw to the next.
    :param settings: its settings, to be recorded with the result.
    """

    state: Any
    step: Callable[[Any, Any], Any]
    read: Read
    warmup: int
    thin: int = 1
    settings: dict[str, float] | None = None


class Run(NamedTuple):
    """The result of a run.

    :param draws: positions, shape ``(draws, size)``, or ``(draws, chains, size)``;
        float32.
    :param times: seconds for each of set-up, compilation, warmup and sampling.
    :param rows: rows of data read while sampling.
    :param accept: mean acceptance probability.
    :param steps: number of steps while sampling.
    :param settings: settings of the sampler.
    """

    draws: np.ndarray
    times: dict[str, float]
    rows: float
    accept: float
    steps: int
    settings: dict[str, float] | None = None


def drive(
    build: Callable[[], Sampler], args: Any, seconds: float, max_draws: int
) -> Run:
    """Run a sampler for a given time.

    :param build: makes the sampler; the time it takes is counted as set-up.
    :param args: the data, which compiled steps take as an argument.
    :param seconds: how long to sample.
    :param max_draws: stop after this many draws.
    """
    times, clock = {}, time.perf_counter
    start = clock()
    sampler = build()
    state = jax.block_until_ready(sampler.state)
    times["setup"] = clock() - start

    # The number of warmup steps is not static: one program serves for all counts.
    @jax.jit
    def advance(state: Any, args: Any, count: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, s: sampler.step(s, args), state)

    @partial(jax.jit, static_argnums=2)
    def collect(state: Any, args: Any, count: int) -> Any:
        def body(carry: Any, _: None) -> Any:
            def inner(_: int, carry: Any) -> Any:
                state, rows, accept = carry
                state = sampler.step(state, args)
                _, more, probability = sampler.read(state)
                return state, rows + more, accept + probability

            state, rows, accept = jax.lax.fori_loop(0, sampler.thin, inner, carry)
            return (state, rows, accept), sampler.read(state)[0]

        zero = jnp.zeros(())
        return jax.lax.scan(body, (state, zero, zero), None, length=count)

    start = clock()
    warm = advance.lower(state, args, 1).compile()
    times["compile"] = clock() - start
    start = clock()
    state = jax.block_until_ready(warm(state, args, max(1, sampler.warmup)))
    times["warmup"] = clock() - start
    # A chain that is still adapting, or checked on all rows, is slower than afterwards;
    # and a call copies the state with its tables, a cost that a few steps would
    # exaggerate.
    tried, took = 5, 0.0
    while took < seconds / 20:
        tried, start = 2 * tried, clock()
        state = jax.block_until_ready(warm(state, args, tried))
        took = clock() - start
    each = took / tried * sampler.thin
    count = int(np.clip(seconds / 10 / each, 10, max_draws / 4))
    start = clock()
    block = collect.lower(state, args, count).compile()
    times["compile"] += clock() - start

    draws, rows, accept, start = [], 0.0, 0.0, clock()
    while True:
        (state, more, total), positions = block(state, args)
        draws.append(np.asarray(positions, np.float32))
        rows, accept = rows + float(more), accept + float(total)
        if clock() - start >= seconds or len(draws) * count >= max_draws:
            break
    times["sampling"] = clock() - start
    steps = len(draws) * count * sampler.thin
    means = rows, accept / steps, steps
    return Run(np.concatenate(draws), times, *means, sampler.settings)
