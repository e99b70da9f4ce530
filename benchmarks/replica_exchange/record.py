"""Results as JSON and as a table in Markdown, written by the commands themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.stochastic_gradient.record import load, machine
from benchmarks.stochastic_gradient.record import save as save_json

__all__ = ["DOCS", "RESULTS", "load", "machine", "save", "table"]

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[2] / "docs"


def save(name: str, content: dict[str, Any], text: str, folder: Path = RESULTS) -> None:
    """Write ``name.json`` and ``name.md``; files of these names are replaced."""
    save_json(name, content, folder)
    (folder / f"{name}.md").write_text(text.rstrip() + "\n")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(line) + "|" for line in lines)
