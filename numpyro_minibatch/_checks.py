"""Checks of single arguments, which say what was received and what is expected."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["check_flag", "check_positive", "describe"]


def describe(value: Any) -> str:
    """A value as a message shows it: arrays by shape, anything else in short."""
    if np.ndim(value) and hasattr(value, "dtype"):
        return f"an array of shape {np.shape(value)} and dtype {value.dtype}"
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def check_flag(who: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is true or false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{who}({name}=...) must be True or False, got {describe(value)}."
        )


def check_positive(who: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(
            f"{who}({name}=...) must be a positive number, got {describe(value)} "
            f"({type(value).__name__})."
        )
    if not (np.isfinite(value) and value > 0):
        raise ValueError(
            f"{who}({name}=...) must be positive and finite, got {value!r}."
        )
