"""Threads that compile while the calling thread goes on, or compute while it traces."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["compilers", "untraced"]


@cache
def compilers() -> ThreadPoolExecutor:
    """The threads, at least two; a task must not trace a model.

    All threads share NumPyro's handlers, so that models are traced on the calling
    thread.
    """
    return ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1)), "compile")


def untraced(fn: Callable, *args: Any) -> Any:
    """Evaluate a function of concrete values, even while JAX is tracing."""
    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        return fn(*args)
    # tracing belongs to a thread, so another thread can compute
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, fn, *args).result()
