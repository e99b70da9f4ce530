"""Run the study: python -m benchmarks.coverage [--runs 20] [--families slope rate]

A user run is four chains at default settings from the default start. The set-up of a
kernel depends on the data only, not on the seed, and chains do not see each other: all
runs of a family are chains of one program, and runs are groups of four of them.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpyro.infer import NUTS
from scipy.stats import norm

from benchmarks.coverage.families import FAMILIES, Family, truth
from benchmarks.stochastic_gradient.record import machine
from numpyro_minibatch import AMAGOLD, MinibatchMH, diagnose, sample

from .record import load, save

CHAINS = 4
LEVELS = (0.5, 0.9, 0.95)
QUANTITIES = ("mean", "sd", "q5", "q95")
KERNELS: dict[str, Callable[[Callable], Any]] = {
    "MinibatchMH": lambda model: MinibatchMH(model, control_variate="taylor2"),
    "AMAGOLD": lambda model: AMAGOLD(model),
    "NUTS": lambda model: NUTS(model),
}


def study(
    family: Family,
    kernel: Callable[[Callable], Any],
    runs: int,
    draws: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """The runs of one family by one kernel.

    :param family: the family.
    :param kernel: makes the kernel of a model.
    :param runs: user runs, each of four chains.
    :param draws: draws of a chain, after as many of warmup.
    :param seed: seed of the data and of the chains.
    """
    data = family.data(seed)
    known = truth(family, data)
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        result = sample(
            kernel(family.model),
            *(jax.numpy.asarray(values) for values in data),
            num_warmup=draws,
            num_samples=draws,
            num_chains=CHAINS * runs,
            seed=seed + 1,
            progress=False,
        )
    except ValueError as error:
        return {"refused": str(error)}
    seconds = time.perf_counter() - begun, time.process_time() - cpu
    return {
        **summary(result, known, runs),
        "seconds": seconds[0],
        "cpu_seconds": seconds[1],
        "truth": known,
    }


def summary(result: Any, known: dict[str, dict[str, float]], runs: int) -> dict:
    """Coverage, effective sample sizes and advice.

    :param result: draws of ``4 * runs`` chains.
    :param known: the truth about each parameter.
    :param runs: user runs.
    """
    names = list(known)
    scores: dict[str, list] = {quantity: [] for quantity in QUANTITIES}
    said: dict[str, list] = {"mean": [], "sd": []}
    advice: list[list[str]] = []
    rhat = []
    for run in range(runs):
        chains = slice(CHAINS * run, CHAINS * (run + 1))
        one = result.isel(chain=chains)
        diagnosis = diagnose(one, var_names=names)
        advice.append([_kind(line) for line in diagnosis.advice])
        rhat.append(float(diagnosis.max_rhat))
        found = diagnosis.precision
        order = [list(found["parameter"].values).index(name) for name in names]
        for quantity in QUANTITIES:
            value = found[quantity].values[order]
            error = found[f"mcse_{quantity}"].values[order]
            true = np.array([known[name][quantity] for name in names])
            scores[quantity].append((value - true) / error)
        for quantity in said:
            said[quantity].append(found[f"ess_{quantity}"].values[order])
    true_ess = _true_ess(result, known)
    misses = {}
    for quantity in QUANTITIES:
        z = np.abs(np.array(scores[quantity]))
        misses[quantity] = {
            str(level): _share(~(z <= norm.ppf(0.5 + level / 2))) for level in LEVELS
        }
    return {
        "runs": runs,
        "misses": misses,
        "said_ess": {
            key: [float(v) for v in np.median(values, 0)]
            for key, values in said.items()
        },
        "true_ess": true_ess,
        "with_advice": float(np.mean([bool(lines) for lines in advice])),
        "advice": sorted({line for lines in advice for line in lines}),
        "rhat_above": float(np.mean(np.array(rhat) > 1.01)),
    }


def _kind(advice: str) -> str:
    """Advice without its numbers."""
    return re.sub(r"[-\d.,]*\d", "#", advice.split(". ")[0])


def _share(missed: np.ndarray) -> list[float]:
    """A share of misses, and its standard error; runs are independent."""
    per_run = missed.mean(1)
    return [float(per_run.mean()), float(per_run.std(ddof=1) / np.sqrt(len(per_run)))]


def _true_ess(result: Any, known: dict[str, dict[str, float]]) -> dict[str, list]:
    """The ESS of four chains, from the squared errors of the means of all chains."""
    found: dict[str, list] = {"mean": [], "sd": []}
    for name, true in known.items():
        draws = np.asarray(result.posterior[name].values, np.float64)
        away = draws - true["mean"]
        square = away**2 - true["sd"] ** 2
        for key, values in (("mean", away), ("sd", square)):
            error = np.mean(values.mean(1) ** 2)
            found[key].append(float(CHAINS * np.mean(values**2) / error))
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of data and chains")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    chosen = parser.parse_args(arguments)
    file = f"coverage_seed_{chosen.seed}" if chosen.seed else "coverage"
    for name in chosen.families:
        for kernel in chosen.kernels:
            found = study(
                FAMILIES[name], KERNELS[kernel], chosen.runs, chosen.draws, chosen.seed
            )
            every = load(file)
            every["machine"] = machine()
            every.setdefault("families", {}).setdefault(name, {})[kernel] = found
            save(file, every)
            words = found.get("refused") or {
                key: [round(v, 3) for v in found["misses"][key]["0.95"]]
                for key in QUANTITIES
            }
            print(name, kernel, str(words)[:300], flush=True)


if __name__ == "__main__":
    main()
