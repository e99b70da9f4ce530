"""Results as JSON, the folder of figures, and the colours of all figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.stochastic_gradient.record import load, machine
from benchmarks.stochastic_gradient.record import save as save_json

__all__ = ["COLOURS", "DOCS", "RESULTS", "load", "machine", "save"]

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[2] / "docs"
# by Okabe and Ito, distinguishable for the colour-blind
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def save(name: str, content: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write ``name.json`` with the machine it was measured on."""
    save_json(name, {"machine": machine(), **content}, folder)
