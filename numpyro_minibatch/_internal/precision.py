"""A context with double precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

__all__ = ["double"]


@contextmanager
def double() -> Iterator[None]:
    """Use double precision inside the context, whatever the global setting."""
    if hasattr(jax, "enable_x64"):
        wide = jax.enable_x64(True)
    else:  # jax < 0.8
        from jax.experimental import enable_x64  # type: ignore[attr-defined]

        wide = enable_x64()
    with wide:
        yield
