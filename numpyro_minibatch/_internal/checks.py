"""Checks of single arguments, whose errors state what was received and expected."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from jax.sharding import Mesh

__all__ = [
    "check_count",
    "check_flag",
    "check_divides",
    "check_instance",
    "check_mesh",
    "check_positive",
    "describe",
]


def describe(value: Any) -> str:
    """A value for a message: arrays by shape, anything else shortened."""
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


def check_positive(who: str, name: str, value: Any, *, zero: bool = False) -> None:
    """Raise unless ``value`` is positive and finite, or 0 if ``zero`` allows it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(
            f"{who}({name}=...) must be a positive number, got {describe(value)} "
            f"({type(value).__name__})."
        )
    if not (np.isfinite(value) and (value >= 0 if zero else value > 0)):
        allowed = "at least 0" if zero else "positive"
        raise ValueError(
            f"{who}({name}=...) must be {allowed} and finite, got {value!r}."
        )


def check_count(who: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{who}({name}=...) must be a positive integer, got {describe(value)}."
        )
    if value < 1:
        raise ValueError(f"{who}({name}=...) must be at least 1, got {value}.")


def check_instance(who: str, name: str, value: Any, kind: type, example: str) -> None:
    """Raise unless ``value`` is one of the choices of a module of the package."""
    if not isinstance(value, kind):
        parts = kind.__module__.split(".")
        module = next(part for part in reversed(parts) if not part.startswith("_"))
        raise TypeError(
            f"{who}({name}=...) must be one of the {module}.* choices, such as "
            f"{module}.{example}, got {describe(value)}."
        )


def check_mesh(who: str, mesh: Any, what: str) -> None:
    """Raise unless a mesh has one axis."""
    if not isinstance(mesh, Mesh) or len(mesh.axis_names) != 1:
        raise TypeError(
            f"{who}(mesh=...) must be a jax.sharding.Mesh with one axis, such as "
            f'Mesh(jax.devices(), ("{what}",)), got {describe(mesh)}.'
        )


def check_divides(who: str, devices: int, number: int, what: str, advice: str) -> None:
    """Raise unless a number of things divides evenly among devices."""
    if number % devices:
        raise ValueError(
            f"{who}(mesh=...) divides {number} {what} evenly among {devices} "
            f"devices. Write {advice} of a multiple of {devices}."
        )
