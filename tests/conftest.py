"""Says in the header of a run what it ran on; sets nothing, so that a test file
behaves the same on its own.

The marks ``slow`` and ``x64`` are explained in ``pyproject.toml``.
"""

from __future__ import annotations

import os
from importlib.metadata import version


def pytest_report_header() -> str:
    """Name the versions and the precision that this run tests."""
    packages = ("numpyro", "jax", "numpy", "arviz", "xarray")
    double = os.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true", "yes", "on")
    return ", ".join(
        [*(f"{name} {version(name)}" for name in packages)]
        + [f"JAX_ENABLE_X64 {'on' if double else 'off'}"]
    )
