"""Write the tables of the page from the recorded results.

python -m benchmarks.several_modes.report
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .problems import CASES
from .record import PAGE, load

# the part of the page between the two comments is written here
BEGIN, END = "% written by benchmarks.several_modes.report: {}", "% end of {}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of(runs: list[dict[str, Any]], key: str) -> np.ndarray:
    """A number of all runs."""
    return np.array([run[key] for run in runs])


def user(runs: list[dict[str, Any]], key: str) -> float:
    """The median of the seconds of the processors."""
    return float(np.median(of(runs, key)[:, 1]))


def masses_of(case: dict[str, Any]) -> dict[str, Any]:
    """Masses of the first run, compared with the truth."""
    run, truth = case["several"][0], np.array(case["truth"]["masses"])
    masses, errors = np.array(run["masses"]), np.array(run["errors"])
    away = np.abs(masses - truth)
    # a mode without draws has an error of zero, but not a known mass
    z = np.divide(away, errors, where=errors > 0, out=np.full_like(away, np.inf))
    return {"masses": masses, "truth": truth, "away": away, "z": z, "errors": errors}


def numbers(values: np.ndarray) -> str:
    """Few values in full, or the range of many."""
    if len(values) <= 2:
        return ", ".join(f"{v:.3f}" for v in values)
    low, high = f"{values.min():.3f}", f"{values.max():.3f}"
    return low if low == high else f"{low} to {high}"


def line_of_masses(name: str, case: dict[str, Any]) -> list[str]:
    found, run = masses_of(case), case["several"][0]
    return [
        f"{CASES[name].words}, {case['rows']:,} rows",
        f"{run['pilot']['num_modes']} of {len(found['truth'])}",
        numbers(found["masses"]),
        numbers(found["truth"]),
        f"{found['away'].max():.4f}",
        f"{found['errors'].max():.4f}",
        f"{found['z'].max():.1f}",
        f"{run['acceptance']:.2f}",
        f"{run['rows_per_draw']:.0f}",
        f"{run['noise']:.2f}",
    ]


def line_of_times(name: str, case: dict[str, Any]) -> list[str]:
    cells, seconds = [], []
    for method in ("several", "one"):
        runs = case[method]
        seconds.append(user(runs, "to_answer"))
        wall = float(np.median(of(runs, "to_answer")[:, 0]))
        ess = float(np.median(of(runs, "ess")))
        cells.append(f"{seconds[-1]:.0f} ({wall:.0f})")
        cells += [f"{user(runs, 'more'):.1f}", f"{ess:,.0f}"]
    words = f"{CASES[name].words}, {case['rows']:,} rows"
    return [words, *cells, f"{seconds[0] / seconds[1]:.1f}"]


HEAD_OF_MASSES = [
    "posterior",
    "modes found",
    "masses",
    "truth",
    "largest error",
    "largest standard error",
    "largest error, in its standard errors",
    "moves accepted",
    "rows per draw",
    "noise",
]
HEAD_OF_TIMES = [
    "posterior",
    "several modes: seconds",
    "of which drawing",
    "ESS",
    "one mode: seconds",
    "of which drawing",
    "ESS",
    "ratio",
]


def lines_of(name: str, case: dict[str, Any]) -> str:
    """Both lines of a case."""
    lines = line_of_masses(name, case), line_of_times(name, case)
    return "\n".join(" | ".join(line) for line in lines)


def tables() -> dict[str, str]:
    """The tables of the recorded results, by name."""
    cases = load("cases")
    there = [name for name in CASES if name in cases]
    return {
        "masses": table(
            HEAD_OF_MASSES, [line_of_masses(name, cases[name]) for name in there]
        ),
        "times": table(
            HEAD_OF_TIMES, [line_of_times(name, cases[name]) for name in there]
        ),
    }


def written(page: str) -> str:
    """The page with these tables."""
    for name, text in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.S)
        block = f"{begin}\n\n{text}\n\n{end}"
        page = pattern.sub(lambda _, block=block: block, page)
    return page


def write() -> None:
    """Write them into the page."""
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    write()
