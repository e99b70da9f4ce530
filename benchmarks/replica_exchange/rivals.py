"""Parallel tempering on all rows: ours, TFP's, blackjax's tempering, and ten lines.

    python -m benchmarks.replica_exchange.rivals --tfp PYTHON --blackjax PYTHON

The target has the five modes without noise. All methods use the same ladder,
Hamiltonian Monte Carlo with the same step size and number of steps at every rung, and
chains started in the middle mode. Each method is a separate process, in the
environment that has it. All counts are made here, from the draws and the rungs of the
replicas, by one rule for all.

The effective sample size of the modes is p (1 - p) divided by the mean squared error of
a run's fractions of draws in the modes, summed over modes: the number of independent
draws with the same error. It needs no autocorrelations, and applies to sequential Monte
Carlo as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from . import mixture
from .modes import CENTERS, TEMPERATURES, cells, round_trips
from .record import RESULTS, load, machine, save, table

ROOT = Path(__file__).parents[2]
#: the module and the argument of each method
METHODS = {
    "ReplicaExchange(AMAGOLD), full batch, no friction": ("ours", "AMAGOLD"),
    "ReplicaExchange(MinibatchMH), Langevin": ("ours", "MinibatchMH"),
    "ReplicaExchange(HMC) of NumPyro": ("ours", "HMC"),
    "ten lines of JAX": ("ours", "plain"),
    "TFP, ReplicaExchangeMC": ("tfp", ""),
    "blackjax, adaptive tempered SMC": ("blackjax", ""),
}


def scores(z: np.ndarray, rung: np.ndarray | None, found: dict[str, Any]) -> Any:
    """Scores of draws of shape ``(chains, n, 2)``, per gradient."""
    truth, variance = mixture.truth()
    chains, number = z.shape[:2]
    nearest = cells(z)
    inside = nearest[..., None] == np.arange(len(CENTERS))
    shares = inside.mean(1)
    modes = (truth * (1 - truth)).sum() / np.square(shares - truth).mean(0).sum()
    gradients = number * found["gradients"] / 1e3
    square = 0.5 * np.square(z - CENTERS[nearest]).sum(-1).mean() / variance
    made = {
        "thousands_of_gradients": gradients,
        "modes_ess": float(modes) / gradients,
        "total_variation": float(0.5 * np.abs(shares.mean(0) - truth).sum()),
        "variance_ratio": float(square),
    }
    if rung is None:
        return made
    seen = np.moveaxis(inside, -1, 0).astype(float)
    total = gradients * chains
    made["indicator_ess"] = min(mixture.together(one) for one in seen) / total
    coordinates = [mixture.together(z[..., i]) for i in range(2)]
    made["coordinate_ess"] = min(coordinates) / total
    made["round_trips"] = round_trips(rung) / total
    return made


def measured(name: str, python: str, options: argparse.Namespace) -> dict[str, Any]:
    """One method in a separate process."""
    where, method = METHODS[name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "draws.npz"
        command = [python, "-m", f"{__package__}.rival_{where}", "--file", str(file)]
        for key in ("chains", "draws", "warmup", "step_size", "num_steps", "seed"):
            command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
        command += ["--method", method] if method else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"method": name, "absent": last.split(",")[0][:90]}
        with np.load(file) as arrays:
            found = dict(arrays)
    z, rung = np.asarray(found.pop("draws"), np.float64), found.pop("rung", None)
    plain = {key: value.item() for key, value in found.items()}
    return {"method": name, **plain, **scores(z, rung, plain)}


def text(content: dict[str, Any]) -> str:
    """Two tables: the settings of the methods, and their results."""
    how = ["method", "gradients per draw", "densities per draw", "acceptance rate"]
    how += ["package"]
    found = ["method", "ESS", "of the rarest mode", "of modes, by error"]
    found += ["round trips", "total variation", "variance ratio"]
    keys = ("coordinate_ess", "indicator_ess", "modes_ess", "round_trips")
    runs, results = [], []
    for run in content["runs"]:
        if "absent" in run:
            runs.append([run["method"], f"did not run: {run['absent']}", "", "", ""])
            continue
        runs.append(
            [
                run["method"],
                f"{run['gradients']:.0f}",
                f"{run['densities']:.0f}",
                f"{run['acceptance']:.2f}" if "acceptance" in run else "",
                run["versions"],
            ]
        )
        results.append(
            [
                run["method"],
                *(f"{run[key]:.2f}" if key in run else "" for key in keys),
                f"{run['total_variation']:.4f}",
                f"{run['variance_ratio']:.3f}",
            ]
        )
    return "\n\n".join([table(how, runs), table(found, results)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tfp", help="interpreter that imports TFP on JAX")
    parser.add_argument("--blackjax", help="interpreter that has blackjax")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--chains", type=int, default=32)
    parser.add_argument("--draws", type=int, default=3000, help="per chain")
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--step-size", type=float, default=0.27)
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep recorded results")
    parser.add_argument("--out", default="rivals")
    options = parser.parse_args(argv)
    pythons = {"ours": sys.executable, "tfp": options.tfp, "blackjax": options.blackjax}
    os.environ["PYTHONPATH"] = str(ROOT)
    runs: list[dict[str, Any]] = []
    if options.keep:
        runs = [r for r in load(options.out, RESULTS)["runs"] if "absent" not in r]
    settings = {
        key: getattr(options, key)
        for key in ("chains", "draws", "warmup", "step_size", "num_steps", "seed")
    }
    settings["temperatures"] = TEMPERATURES.tolist()
    for name in options.methods:
        python = pythons[METHODS[name][0]]
        if python is None or name in {run["method"] for run in runs}:
            continue
        runs.append(measured(name, python, options))
        print(runs[-1], flush=True)
        runs.sort(key=lambda run: list(METHODS).index(run["method"]))
        content = {"machine": machine(), "settings": settings, "runs": runs}
        save(options.out, content, text(content))


if __name__ == "__main__":
    main()
