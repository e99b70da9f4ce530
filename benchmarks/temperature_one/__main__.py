"""Measure methods on problems, each pair in a separate process.

    python -m benchmarks.temperature_one --data covertype --method nuts ours
    python -m benchmarks.temperature_one --all
    python -m benchmarks.temperature_one --all --method nuts ours --chains 4

Results are written to benchmarks/temperature_one/results, one file per pair; then
`python -m benchmarks.temperature_one.report` makes the table and the figure. The other
packages need environments of their own, made from the files in `envs`: `--blackjax` and
`--old` name the Python interpreters in them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .flat import Flat, reported_draws
from .methods import MODULES
from .prepare import default_cache, load
from .problems import PROBLEMS
from .scores import scores

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]


def measure(name: str, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one pair and score it; if a method fails, record the reason."""
    python = getattr(options, MODULES[method].environment)
    if python is None:
        environment = MODULES[method].environment
        raise SystemExit(
            f"{method} needs its own environment: make one from envs/{environment}.txt "
            f"and give its interpreter, --{environment} PATH"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [python, "-m", "benchmarks.temperature_one.worker"]
        command += ["--data", name, "--method", method, "--out", str(out)]
        command += ["--cache", str(options.cache), "--seconds", str(options.seconds)]
        command += ["--x64"] if options.x64 else []
        command += ["--chains", str(options.chains)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=options.limit, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not finished within {options.limit:g} s"}
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            lines = [line for line in done.stderr.splitlines() if "Error: " in line]
            return {"failed": (lines or [f"ended with {done.returncode}"])[-1]}
        run = json.loads(out.with_suffix(".json").read_text())
        draws = np.load(out.with_suffix(".npy"))
    problem, prepared = PROBLEMS[name], load(name, options.cache)
    flat = Flat(problem.model, prepared.args)
    chains = draws[None] if draws.ndim == 2 else draws.swapaxes(0, 1)
    quantities = np.stack(
        [reported_draws(flat, c, problem.report, prepared.args) for c in chains]
    )
    run |= scores(quantities, prepared, run["seconds"]["sampling"], run["rows"])
    run["reference"] = prepared.info
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=PROBLEMS, default=[])
    parser.add_argument("--method", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--all", action="store_true", help="all problems")
    parser.add_argument("--seconds", type=float, default=60.0, help="of sampling")
    parser.add_argument("--limit", type=float, default=600.0, help="per process")
    parser.add_argument("--x64", action="store_true", help="double precision")
    parser.add_argument(
        "--chains", type=int, default=1, help="vectorised in one program"
    )
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--main", default=sys.executable, help="interpreter")
    parser.add_argument("--blackjax", help="interpreter with blackjax")
    parser.add_argument("--old", help="interpreter with jax 0.4.25 and its packages")
    options = parser.parse_args()
    names = list(PROBLEMS) if options.all else options.data
    if not names:
        parser.error("name the data: --data covertype, or --all")
    options.results.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (options.cache / name / "info.json").is_file():
            command = [options.main, "-m", "benchmarks.temperature_one.prepare"]
            command += ["--data", name, "--cache", str(options.cache)]
            subprocess.run(command, cwd=ROOT, check=True)
        for method in options.method:
            result = {"data": name, "method": method} | measure(name, method, options)
            many = "" if options.chains == 1 else f"__{options.chains}_chains"
            path = options.results / f"{name}__{method}{many}.json"
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
