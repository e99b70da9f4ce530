"""Threads that compile programs while the calling thread goes on."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

__all__ = ["compilers"]


@cache
def compilers() -> ThreadPoolExecutor:
    """The threads, at least two; a task must not trace a model.

    All threads share NumPyro's handlers, so that models are traced on the calling
    thread.
    """
    return ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1)), "compile")
