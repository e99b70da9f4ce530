"""The cost of NumPyro's progress bar per draw: the same run with and without it.

Each run compiles, with the bar and without it. The time of a draw is therefore the
difference of two runs that differ only in their number of draws. Rounds time both in
turn.

    python benchmarks/progress_bar.py --out benchmarks/results/progress_bar.md
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import jax
import numpy as np
from cases import kernel, make_data
from numpyro.infer import MCMC


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = make_data(args.rows)

    def run(draws: int, bar: bool) -> np.ndarray:
        """Microseconds of wall time and of CPU time."""
        mcmc = MCMC(
            kernel("MINT", args.rows),
            num_warmup=0,
            num_samples=draws,
            progress_bar=bar,
        )
        begin = time.perf_counter(), time.process_time()
        mcmc.run(jax.random.key(0), *data)
        jax.block_until_ready(mcmc.last_state)
        end = time.perf_counter(), time.process_time()
        return 1e6 * np.subtract(end, begin)

    def draw(bar: bool) -> np.ndarray:
        return (run(2 * args.draws, bar) - run(args.draws, bar)) / args.draws

    rounds = [(draw(True), draw(False)) for _ in range(args.rounds)]
    with_bar, without = np.median(rounds, axis=0)
    text = (
        "# The progress bar\n\n"
        f"MINT under `numpyro.infer.MCMC`, N = {args.rows:.0e}, D = 20, m = 100, one "
        f"step per draw; jax {jax.__version__}, Python {platform.python_version()}. "
        f"Medians of {args.rounds} rounds of {args.draws} draws, us per draw.\n\n"
        "| | wall time | CPU time |\n|---|---|---|\n"
        f"| with the bar | {with_bar[0]:.0f} | {with_bar[1]:.0f} |\n"
        f"| without | {without[0]:.0f} | {without[1]:.0f} |\n"
    )
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
