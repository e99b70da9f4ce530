"""Time and memory of long runs: chunks, second calls, draws on disk, large files.

    python -m benchmarks.long_runs.costs

Cases that measure memory run in a process of their own; cases that compare times run
alternately in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.long_runs.problem import DIM, KERNEL, X, Y, model, save
from numpyro_minibatch import MINT, HostRows, Target, sample
from numpyro_minibatch.sampling import _pace


def memory() -> dict[str, float]:
    """Megabytes of this process: the peak, and its own memory now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if " kB" in line}
    return {
        "peak_mb": int(found["VmHWM"]) / 1024,
        "anonymous_mb": int(found["RssAnon"]) / 1024,
        "file_mb": int(found["RssFile"]) / 1024,
    }


def in_one_process(case: str, *arguments: Any) -> dict[str, Any]:
    """The result of a case, run alone."""
    command = [sys.executable, "-m", __spec__.name, case, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# cases in a process of their own ------------------------------------------------------


def many_draws(draws: str, where: str, dim: str = "500") -> dict[str, Any]:
    """A run whose draws are large, to a folder or in memory."""
    size = int(dim)
    target = Target(lambda z: -0.5 * z @ z, lambda z, i: 0.0 * i * z[0], 1000)
    with tempfile.TemporaryDirectory() as folder:
        sample(
            MINT(target=target, batch_size=10, temperature=10.0),
            num_warmup=100,
            num_samples=int(draws),
            num_chains=2,
            init_params=np.zeros((2, size), np.float32),
            progress=False,
            out=folder + "/run" if where == "folder" else None,
        )
        return {**memory(), "draws_mb": 8 * int(draws) * size / 2**20}


def large_file(gigabytes: str, folder: str, steps: str) -> dict[str, Any]:
    """A run on a file that may be larger than memory; a sparse one."""
    rows = int(float(gigabytes) * 2**30 / (4 * DIM))
    path = Path(folder) / "x.bin"
    with path.open("wb") as file:
        file.truncate(rows * 4 * DIM)
    x = HostRows(np.memmap(path, np.float32, "r", shape=(rows, DIM)))
    y = HostRows(np.memmap(path, np.float32, "r", shape=(rows,)))
    begin = time.perf_counter()
    settings = {"num_warmup": 100, "num_samples": int(steps), "progress": False}
    found = sample(MINT(model, temperature=1e4 * rows / 1e4), x, y, **settings)
    seconds = time.perf_counter() - begin
    assert found.posterior.sizes["draw"] == int(steps)
    path.unlink()
    total = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    about = {"file_gb": float(gigabytes), "ram_gb": total, "mode": x.mode}
    return {**about, "seconds": seconds, **memory()}


# cases in this process ----------------------------------------------------------------


def chunk_overhead(draws: int, repeats: int) -> dict[str, Any]:
    """The same draws in one chunk, and in chunks of the usual length."""
    pace = _pace.Pace.saw
    steps: list[int] = []

    def whole(self: Any, _: int) -> None:
        self.steps = 10**9

    def chunks(self: Any, done: int) -> None:
        steps.append(done)
        pace(self, done)

    seconds: dict[str, list[float]] = {"one": [], "chunks": []}
    for _ in range(repeats + 1):
        for name, saw in (("one", whole), ("chunks", chunks)):
            _pace.Pace.saw = saw  # type: ignore[method-assign]
            begin = time.perf_counter()
            sample(KERNEL, X, Y, num_warmup=1, num_samples=draws, progress=False)
            seconds[name].append(time.perf_counter() - begin)
    _pace.Pace.saw = pace  # type: ignore[method-assign]
    ratios = [c / o for c, o in zip(seconds["chunks"], seconds["one"], strict=True)]
    return {
        "draws": draws,
        "us_per_draw": {
            n: 1e6 * statistics.median(s[1:]) / draws for n, s in seconds.items()
        },
        "ratio_of_pairs": sorted(ratios[1:]),
        "median_ratio": statistics.median(ratios[1:]),
        "chunks_of": statistics.median(steps),
    }


def second_call() -> dict[str, Any]:
    """Traces and compilations of a second call with the same kernel and shapes.

    Tracing runs the model's Python code. The checks of a model do so too, on abstract
    arrays, and compile nothing.
    """
    seen: list[tuple[str, str, float]] = []

    def note(name: str, seconds: float, **more: Any) -> None:
        seen.append((name, str(more.get("fun_name", "")), seconds))

    jax.monitoring.register_event_duration_secs_listener(note)

    def count(seed: int) -> dict[str, Any]:
        seen.clear()
        sample(KERNEL, X, Y, num_warmup=20, num_samples=20, seed=seed, progress=False)
        traced = [(name, s) for kind, name, s in seen if "jaxpr_trace" in kind]
        return {
            "compiled": [name for kind, name, _ in seen if "backend_compile" in kind],
            "traced": [name for name, _ in traced],
            "seconds_of_tracing": sum(s for _, s in traced),
        }

    return {"first": count(0), "second": count(1)}


def where_rows_are(draws: int, repeats: int) -> dict[str, Any]:
    """Microseconds per step with data in memory, and with rows of a file."""
    with tempfile.TemporaryDirectory() as folder:
        for name, array in (("x", X), ("y", Y)):
            np.save(f"{folder}/{name}.npy", array)
        data: dict[str, Any] = {"memory": (jax.numpy.asarray(X), jax.numpy.asarray(Y))}
        for mode in ("alias", "prefetch", "callback"):
            data[mode] = tuple(
                HostRows(np.load(f"{folder}/{name}.npy", mmap_mode="r"), mode)
                for name in ("x", "y")
            )
        seconds: dict[str, list[float]] = {name: [] for name in data}
        found = {}
        for _ in range(repeats + 1):
            for name, given in data.items():
                begin = time.perf_counter()
                settings = {"num_warmup": 10, "num_samples": draws, "progress": False}
                found[name] = sample(KERNEL, *given, **settings)
                seconds[name].append(time.perf_counter() - begin)
    return {
        name: {
            "us_per_step": 1e6 * statistics.median(some[1:]) / (draws + 10),
            "identical": bool(
                (found[name].posterior == found["memory"].posterior).b.all()
            ),
        }
        for name, some in seconds.items()
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns the recorded numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    if options.case:
        name, *rest = options.case
        cases = {"many_draws": many_draws, "large_file": large_file}
        print(json.dumps(cases[name](*rest)))
        return {}
    small = options.small
    few, many = (20, 200) if small else (10_000, 100_000)
    found: dict[str, Any] = {}

    def note(name: str, result: Any) -> None:
        found[name] = result
        if not small:
            save("costs", found)  # partial results, in case a later case is killed

    note("second_call", second_call())
    times = (100, 1) if small else (100_000, 14)
    note("chunk_overhead", chunk_overhead(*times))
    note("rows_on_host", where_rows_are(*((50, 1) if small else (5000, 3))))
    cases = [(draws, where) for where in ("folder", "memory") for draws in (few, many)]
    note("draws_on_disk", [in_one_process("many_draws", *case) for case in cases])
    with tempfile.TemporaryDirectory() as folder:
        ram = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
        sizes = (0.01, 0.02) if small else (0.1, round(1.1 * ram))
        cases = [(size, folder, 50 if small else 500) for size in sizes]
        note("large_file", [in_one_process("large_file", *case) for case in cases])
    return found


if __name__ == "__main__":
    main()
