"""Digests of models, by which drivers and kernels recognise them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from numpyro_minibatch._internal.static import digest

__all__ = ["content_of", "known_content", "remembered"]

_CONTENT: ContextVar[str | None] = ContextVar("content of a model", default=None)


@contextmanager
def remembered(content: str) -> Iterator[None]:
    """Have models inspected once only, for arguments of the same shapes.

    :param content: a digest of the model and of what it reads from its surroundings.
    """
    token = _CONTENT.set(content)
    try:
        yield
    finally:
        _CONTENT.reset(token)


def known_content() -> str | None:
    """The digest of the model that a driver passed, or ``None``."""
    return _CONTENT.get()


def content_of(model: Callable) -> str | None:
    """A digest of a model and of what it reads from its surroundings, if it has one.

    :param model: the model.
    """
    known = known_content()
    if known is not None:
        return known
    try:
        return digest(model)
    except Exception:  # it reads something of its author's that cannot be read here
        return None
