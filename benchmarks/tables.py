"""Tables of results whose lines are measured one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

__all__ = ["fill"]


def fill(
    out: Path | None,
    header: str,
    columns: Collection[str],
    names: Collection[str],
    only: Iterable[str],
    measure: Callable[[str], list[str]],
) -> None:
    """Measure some rows of a table, and keep the others that its file has.

    :param out: the file, which is written after each measurement, or ``None``.
    :param header: the text above the table.
    :param columns: their titles.
    :param names: the first cells of all rows, in the order of the table.
    :param only: those to measure.
    :param measure: from a first cell to the lines that begin with it.
    """
    kept: dict[str, str] = {}
    if out and out.exists():
        for line in out.read_text().splitlines(True):
            if (found := line[2:].partition(" |")[0]) in names:
                kept[found] = kept.get(found, "") + line
    for name in only:
        kept[name] = "\n".join(measure(name)) + "\n"
        if out:
            text = f"{header}| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
            out.write_text(text + "".join(kept[n] for n in names if n in kept))
