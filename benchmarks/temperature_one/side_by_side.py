"""Many chains on all cores with `sample`: one thread per device.

    python -m benchmarks.temperature_one.side_by_side --data logistic_2e5
    python -m benchmarks.temperature_one.side_by_side --data a9a --method nuts

Each method runs in a separate process, in each of its settings in `SETTINGS`: threads
of JAX's CPU runtime, devices among which its chains are divided, and chains. The time
of sampling is the difference of two runs that differ only in their number of draws, so
that set-up, compilation and warmup are excluded. Results are written to
results/side_by_side, one file per problem.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .prepare import default_cache, load
from .problems import PROBLEMS
from .scores import scores

RESULTS = Path(__file__).parent / "results" / "side_by_side"
# (threads, devices, chains); no threads: one per core
SETTINGS = {
    "ours": [(None, 1, 4), (1, 2, 8), (1, 2, 16), (1, 2, 32), (1, 2, 64)],
    "nuts": [(None, 1, 1), (None, 1, 4), (1, 2, 8)],
    "hmcecs": [(None, 1, 4), (1, 2, 8), (1, 2, 32)],
}
FIRST = {"ours": 500, "nuts": 40, "hmcecs": 100}  # draws in the shorter run
WARMUP = {"ours": 1000, "nuts": 200, "hmcecs": 200}


def kernel_of(method: str, name: str, prepared: Any) -> Any:
    """The kernel of the main benchmark, with the same settings."""
    from numpyro.infer import NUTS

    from numpyro_minibatch import MinibatchMH

    from .flat import Flat
    from .numpyro_methods import _tuned, hmcecs_kernel

    model = PROBLEMS[name].model
    if method == "ours":
        return MinibatchMH(model, control_variate="taylor2")
    if method == "hmcecs":
        return hmcecs_kernel(PROBLEMS[name], prepared, size=100, blocks=1)
    return NUTS(model, **_tuned(Flat(model, prepared.args), prepared))


def work(options: argparse.Namespace) -> dict[str, Any]:
    """One method in one setting, in this process."""
    import jax

    from numpyro_minibatch import sample

    name, method = options.data, options.method
    prepared = load(name, options.cache)
    kernel = kernel_of(method, name, prepared)
    devices = np.array(jax.devices()[: options.devices])
    mesh = jax.sharding.Mesh(devices, ("chains",)) if options.devices > 1 else None

    def run(draws: int) -> tuple[float, Any]:
        start = time.perf_counter()
        found = sample(
            kernel,
            *prepared.args,
            num_warmup=WARMUP[method],
            num_samples=draws,
            num_chains=options.chains,
            seed=0,
            mesh=mesh,
            progress=False,
        )
        return time.perf_counter() - start, found

    few = FIRST[method]
    first, _ = run(few)
    short = min(run(few)[0] for _ in range(2))
    # as many as take about the requested time, found by doubling
    draws = 4 * few
    while True:
        longer, found = run(draws)
        if longer - short > options.seconds / 2 or longer > options.limit:
            break
        draws *= 4
    again, found = run(draws)
    seconds = min(longer, again) - short
    sites = PROBLEMS[name].report
    posterior = [np.asarray(found.posterior[s]) for s in sites]
    values = np.concatenate([x.reshape(*x.shape[:2], -1) for x in posterior], -1)
    judged = scores(values, prepared, 1.0, 1.0)
    share = (draws - few) / draws  # for the timed draws
    return {
        "threads": options.threads,
        "devices": options.devices,
        "chains": options.chains,
        "draws": draws,
        "seconds": seconds,
        "to_first_run": first,
        "load_average": os.getloadavg()[0],
        "ess_per_second": judged["ess"] * share / seconds,
        **{k: judged[k] for k in ("ess", "ess_tail", "bias", "bias_noise")},
        "sd_ratio": judged["sd_ratio"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, choices=PROBLEMS)
    parser.add_argument("--method", choices=SETTINGS, help="by default each")
    parser.add_argument("--seconds", type=float, default=6.0, help="of sampling")
    parser.add_argument("--limit", type=float, default=60.0, help="per run")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--chains", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.devices is not None:
        print(json.dumps(work(options)))
        return
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{options.data}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for method in [options.method] if options.method else list(SETTINGS):
        found[method] = []
        for threads, devices, chains in SETTINGS[method]:
            command = [sys.executable, "-m", "benchmarks.temperature_one.side_by_side"]
            command += ["--data", options.data, "--method", method]
            command += ["--devices", str(devices), "--chains", str(chains)]
            command += ["--seconds", str(options.seconds)]
            command += ["--limit", str(options.limit), "--cache", str(options.cache)]
            flag = f"--xla_force_host_platform_device_count={devices}"
            environment = os.environ | {"XLA_FLAGS": flag}
            if threads is not None:
                command += ["--threads", str(threads)]
                environment["PJRT_NPROC"] = str(threads)
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            result = json.loads(done.stdout.splitlines()[-1])
            found[method].append(result)
            print(method, json.dumps(result), flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
