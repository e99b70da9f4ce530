"""Cost of a step by number of rows, compared with the same step by hand.

Absolute times drift on a shared machine, so every round times all cases one after the
other, and the table reports medians over rounds of ratios within a round.

    python benchmarks/step_cost.py --out benchmarks/results/step_cost.md
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import jax
import numpy as np
from cases import by_hand, make_data, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes]
    runs = {}
    for size in sizes:
        data = make_data(size)
        runs["MINT", size] = ours("MINT", data)
        runs["by hand", size] = by_hand(data)
    for run in runs.values():
        run(args.steps)
    times = {case: [] for case in runs}
    for _ in range(args.rounds):
        for case, run in runs.items():
            start = time.perf_counter()
            run(args.steps)
            times[case].append((time.perf_counter() - start) / args.steps * 1e6)

    lines = [
        "# Cost of a MINT step",
        "",
        f"Logistic regression, D = 20, m = 100, float32; jax {jax.__version__}, "
        f"Python {platform.python_version()}, {jax.default_backend()}. "
        f"{args.rounds} rounds of {args.steps} steps, all cases in turn.",
        "",
        "| N | us per step, median (min) | by hand | ratio to by hand, median "
        f"| ratio to N = {sizes[0]:.0e}: MINT | by hand |",
        "|---|---|---|---|---|---|",
    ]
    first = {name: np.array(times[name, sizes[0]]) for name in ("MINT", "by hand")}
    for size in sizes:
        mint, hand = (np.array(times[name, size]) for name in ("MINT", "by hand"))
        lines.append(
            f"| {size:.0e} | {np.median(mint):.1f} ({mint.min():.1f}) "
            f"| {np.median(hand):.1f} ({hand.min():.1f}) "
            f"| {np.median(mint / hand):.2f} | {np.median(mint / first['MINT']):.2f} "
            f"| {np.median(hand / first['by hand']):.2f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
