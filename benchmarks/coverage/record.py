"""The results as a file, which grows by one family and kernel at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.stochastic_gradient import record

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict[str, Any]:
    """The recorded results."""
    if not (RESULTS / f"{name}.json").exists():
        return {}
    return record.load(name, RESULTS)


def save(name: str, content: dict[str, Any]) -> None:
    """Write the results; a file of the same name is replaced."""
    record.save(name, content, RESULTS)
