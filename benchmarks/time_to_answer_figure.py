"""The seconds that a user waits for 1,000 effective draws, MinibatchMH and NUTS.

    python benchmarks/time_to_answer.py --sizes 1e4 2e5 --methods ours nuts \\
        --rounds 3 --json benchmarks/results/time_to_answer.json
    python benchmarks/time_to_answer_figure.py

A run returns its draws when it ends, so that the wait is one number: bars are medians
over the runs of a method, from the call of ``MCMC.run``, with compilation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/time_to_answer.json"
FIGURE = ROOT / "docs/_static/time_to_answer.png"
STYLES = {
    "ours": ("MinibatchMH", "#0072B2"),
    "nuts": ("NUTS", "#999999"),
}


def median(results: list[dict[str, Any]], method: str, size: int) -> float:
    """The median time to the answer, in seconds."""
    found = [
        r["found"]["to_answer"][0]
        for r in results
        if (r["case"]["method"], r["case"]["size"]) == (method, size)
    ]
    return float(np.median(found))


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """One panel for each number of rows."""
    sizes = sorted({r["case"]["size"] for r in results})
    methods = [m for m in STYLES if any(r["case"]["method"] == m for r in results)]
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(3.3 * len(sizes), 1.7), layout="constrained"
    )
    for axis, size in zip(np.atleast_1d(axes), sizes, strict=True):
        seconds = [median(results, method, size) for method in methods]
        labels, colors = zip(*(STYLES[method] for method in methods), strict=True)
        bars = axis.barh(labels, seconds, color=colors, height=0.65)
        texts = [f"{x:.1f} s" if x < 10 else f"{x:.0f} s" for x in seconds]
        axis.bar_label(bars, texts, padding=3)
        axis.invert_yaxis()
        axis.set(xlim=(0, 1.25 * max(seconds)), title=f"{size:,} rows")
        axis.set_xlabel("seconds to 1,000 effective draws")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the time to an answer")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=FIGURE)
    args = parser.parse_args()
    results = json.loads(args.results.read_text())["results"]
    draw([r for r in results if r["case"]["problem"] == "logistic"], args.out)


if __name__ == "__main__":
    main()
