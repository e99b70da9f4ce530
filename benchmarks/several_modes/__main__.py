"""Run the cases, each method in a separate process, and write the table.

python -m benchmarks.several_modes
python -m benchmarks.several_modes --cases tied light --rounds 3

Processes are started one after the other, without stored compiled programs. Results are
kept by case: a case that is run again replaces what was recorded of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from . import report
from .problems import CASES
from .record import load, machine, save
from .worker import DRAWS, LINE

MODES = 12  # the setting of the control variate, in all cases


def started(name: str, modes: int, rows: int, draws: int) -> dict[str, Any]:
    """The result of a new process."""
    env = {k: v for k, v in os.environ.items() if "JAX_" not in k and k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.several_modes.worker", "--case", name]
    command += ["--modes", str(modes), "--rows", str(rows), "--draws", str(draws)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(LINE):
            return json.loads(line.removeprefix(LINE))
    raise RuntimeError(f"{name} gave no result:\n{done.stdout}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each method")
    parser.add_argument("--rows", type=int, help="other than those of the case")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each chain")
    args = parser.parse_args()
    for name in args.cases:
        case = CASES[name]
        rows = args.rows or case.rows
        truth = case.truth(*case.data(rows))
        runs: dict[str, list[dict[str, Any]]] = {"several": [], "one": []}
        for _ in range(args.rounds):
            for method, modes in (("several", MODES), ("one", 1)):
                found = started(name, modes, rows, args.draws)
                runs[method].append(found)
                seconds = {
                    k: [round(x, 1) for x in found[k]] for k in ("first", "more")
                }
                print(name, method, seconds, found["said"], found["advice"], flush=True)
        results = load("cases")
        results[name] = {
            "rows": rows,
            "draws": args.draws,
            "truth": truth._asdict(),
            "machine": machine(),
            **runs,
        }
        save("cases", results)
        print(report.lines_of(name, results[name]), flush=True)
    report.write()


if __name__ == "__main__":
    main()
