"""Effective draws over the seconds that a user has waited, MinibatchMH and NUTS.

    python benchmarks/time_to_answer.py --sizes 1e4 2e5 1e6 --methods ours nuts \\
        --rounds 3 --json benchmarks/results/time_to_answer.json
    python benchmarks/time_to_answer_figure.py

Before the first draw there is only waiting: for compilation, the set-up and the warmup.
From then on effective draws arrive at a steady rate.
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
ENOUGH = 1000
STYLES = {
    "ours": ("MinibatchMH, 4 chains", "#0072B2", "-"),
    "nuts": ("NUTS, 1 chain", "#555555", "--"),
    "nuts4": ("NUTS, 4 chains", "#D55E00", ":"),
}


def middle(results: list[dict[str, Any]], method: str, size: int) -> dict[str, float]:
    """The run with the median time to the answer."""
    found = [
        r["found"]
        for r in results
        if (r["case"]["method"], r["case"]["size"]) == (method, size)
    ]
    by_answer = sorted(found, key=lambda f: f["to_answer"][0])
    best = by_answer[len(by_answer) // 2]
    first, draws = best["first"][0], best["draws"][0]
    return {
        "answer": best["to_answer"][0],
        "begins": first - draws,
        "rate": best["ess"] / draws,
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """One panel for each number of rows."""
    sizes = sorted({r["case"]["size"] for r in results})
    methods = [m for m in STYLES if any(r["case"]["method"] == m for r in results)]
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(3.4 * len(sizes), 3.1), layout="constrained"
    )
    for axis, size in zip(np.atleast_1d(axes), sizes, strict=True):
        runs = {m: middle(results, m, size) for m in methods}
        longest = 1.15 * max(run["answer"] for run in runs.values())
        for method, run in runs.items():
            label, color, style = STYLES[method]
            seconds = np.linspace(run["begins"], longest, 400)
            effective = run["rate"] * (seconds - run["begins"])
            axis.plot(seconds, effective, style, color=color, label=label, lw=2)
            axis.plot(run["answer"], ENOUGH, "o", color=color)
            axis.annotate(
                f"{run['answer']:.1f} s"
                if run["answer"] < 10
                else f"{run['answer']:.0f} s",
                (run["answer"], ENOUGH),
                textcoords="offset points",
                xytext=(-4, 6),
                ha="right",
                color=color,
            )
        axis.axhline(ENOUGH, color="#bbbbbb", lw=1, zorder=0)
        axis.set(
            xlim=(0, longest),
            ylim=(0, 1.25 * ENOUGH),
            xlabel="seconds after the call of MCMC.run",
            title=f"{size:,} rows",
        )
    np.atleast_1d(axes)[0].set_ylabel("effective draws")
    np.atleast_1d(axes)[0].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the time to an answer")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=FIGURE)
    args = parser.parse_args()
    draw(json.loads(args.results.read_text())["results"], args.out)


if __name__ == "__main__":
    main()
