"""Threads that compile or compute while the calling thread goes on, waits or traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["compilers", "in_parallel", "untraced"]


@cache
def compilers() -> ThreadPoolExecutor:
    """The threads, at least two; a task must not trace a model.

    All threads share NumPyro's handlers, so that models are traced on the calling
    thread.
    """
    return ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1)), "compile")


def in_parallel(fn: Callable[[Any], None], parts: Sequence[Any]) -> None:
    """Call a function of NumPy arrays for each part, on one thread for each core.

    :param fn: a function that writes its result, each call to another place.
    :param parts: its arguments.
    """
    if len(parts) < 2:
        for part in parts:
            fn(part)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fn, parts))


def untraced(fn: Callable, *args: Any) -> Any:
    """Evaluate a function of concrete values, even while JAX is tracing."""
    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        return fn(*args)
    # tracing belongs to a thread, so another thread can compute
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, fn, *args).result()
