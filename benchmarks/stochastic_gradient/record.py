"""Results as files, with versions, machine and load."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "numpyro", "blackjax", "jax-sgmc", "optax")


def machine() -> dict[str, Any]:
    """A description of the machine, its load, and versions."""
    found: dict[str, Any] = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def save(name: str, content: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write results; a file of the same name is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, sort_keys=True)
    (folder / f"{name}.json").write_text(text + "\n")


def load(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Read results."""
    return json.loads((folder / f"{name}.json").read_text())
