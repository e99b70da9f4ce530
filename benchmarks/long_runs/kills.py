"""Kill runs repeatedly at random moments, and check what remains of them.

    python -m benchmarks.long_runs.kills

Runs with several chunk lengths and kinds of keys are started in separate processes,
killed (SIGKILL), opened, resumed and killed again; the activity of each at that moment
is recorded. Each write is held open for five milliseconds, so that some kills hit it.
At the end each run is finished and compared bit by bit with an uninterrupted one.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.long_runs.problem import KERNEL, X, Y, save
from numpyro_minibatch import open_run, sample
from numpyro_minibatch.inference_data import get_group
from numpyro_minibatch.sampling import _pace, _run
from numpyro_minibatch.sampling._store import Store

GROUPS = ("posterior", "sample_stats", "warmup_posterior", "warmup_sample_stats")
WARMUP = 20  # chunks
CHILD = """
import mmap, sys, time
import jax
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from benchmarks.long_runs import kills
from numpyro_minibatch.sampling._store import Store

file = open({doing!r}, "r+b")
doing = mmap.mmap(file.fileno(), 1)
append, commit = Store.append, Store.commit

def noted(function, mark):
    def wrapped(self, *args):
        doing[:] = mark
        function(self, *args)
        if mark == b"a":
            for file in self._files.values():
                file.flush()  # so that there are draws that are not committed yet
            time.sleep(0.005)  # otherwise hardly any kill would hit it
        doing[:] = b"d"
    return wrapped

Store.append = noted(append, b"a")
Store.commit = noted(commit, b"c")
kills.in_chunks_of({steps})
kills.start({steps}, {impl!r}, 10**7, {out!r}, True)
"""
DOING = {b"a": "writing draws", b"c": "committing", b"d": "drawing"}


def in_chunks_of(steps: int) -> None:
    """Make every chunk this many steps, with a commit after each."""

    def saw(self: Any, _: int) -> None:
        self.steps = steps

    _pace.Pace.saw = saw  # type: ignore[method-assign]
    _run._COMMIT_SECONDS = -1.0


def start(steps: int, impl: str, draws: int, out: str | None, resume: bool) -> Any:
    """Start or resume the run."""
    return sample(
        KERNEL,
        X,
        Y,
        num_warmup=WARMUP * steps,
        num_samples=draws,
        num_chains=2,
        seed=jax.random.key(7, impl=impl),
        keep_warmup=True,
        progress=False,
        out=out,
        resume=resume,
    )


def values(idata: Any) -> dict[str, np.ndarray]:
    """All draws and statistics."""
    return {
        f"{group}/{name}": np.asarray(array)
        for group in GROUPS
        if (dataset := get_group(idata, group)) is not None
        for name, array in dataset.data_vars.items()
    }


def attack(
    out: Path, cache: Path, steps: int, impl: str, number: int, rng: Any
) -> dict[str, Any]:
    """Kill a run several times, finish it, and compare it with an uninterrupted one."""
    store, moments, kept, opened = Store(out), [], 0, []
    doing = out.with_suffix(".doing")
    doing.write_bytes(b"d")
    names = {"cache": str(cache), "doing": str(doing), "out": str(out)}
    code = CHILD.format(steps=steps, impl=impl, **names)
    for kill in range(number):
        # a third of them in the warmup, if it is still under way
        counted = "steps" if kill < number / 3 else "posterior"
        before = store.counts().get(counted, 0)
        with subprocess.Popen([sys.executable, "-c", code]) as child:
            while store.counts().get(counted, 0) <= before:
                assert child.poll() is None, "ended by itself"
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.5))
            if kill % 2:  # half of them while it writes
                wanted = (b"a", b"c")[kill // 2 % 2]
                while doing.read_bytes() != wanted:
                    pass
            seen = store.counts().get("steps", 0)
            child.kill()
            child.wait()
        phase = "warmup" if store.counts()["steps"] < WARMUP * steps else "sampling"
        moments.append(f"{phase}, {DOING[doing.read_bytes()]}")
        # no committed draw is lost
        assert store.counts()["steps"] >= seen
        draws = store.counts().get("posterior", 0)
        assert draws >= kept
        kept = draws
        if draws:
            opened.append(values(open_run(out)))
    wanted = max(kept, 1) + 50
    finished = values(start(steps, impl, wanted, str(out), True))
    whole = values(start(steps, impl, wanted, None, False))
    same = finished.keys() == whole.keys() and all(
        np.array_equal(finished[name], whole[name]) for name in whole
    )
    prefixes = all(
        np.array_equal(part[name], whole[name][:, : part[name].shape[1]])
        for part in opened
        for name in part
    )
    return {
        "steps_of_a_chunk": steps,
        "keys": impl,
        "kills": number,
        "draws": wanted,
        "moments": moments,
        "identical_to_uninterrupted": bool(same),
        "opened_after_each_kill_identical": bool(prefixes),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns the recorded numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=6, help="of each run")
    parser.add_argument("--small", action="store_true", help="one run, two kills")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    lengths, kinds = (3, 17, 100), ("threefry2x32", "rbg")
    cases = list(itertools.product(lengths, kinds))[: 1 if options.small else None]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for steps, impl in cases:
            out = Path(folder) / f"run-{steps}-{impl}"
            number = 2 if options.small else options.kills
            runs.append(attack(out, Path(folder) / "cache", steps, impl, number, rng))
            print(runs[-1], flush=True)
    moments = Counter(moment for run in runs for moment in run["moments"])
    found = {
        "kills": sum(run["kills"] for run in runs),
        "runs_identical": sum(run["identical_to_uninterrupted"] for run in runs),
        "moments": dict(moments),
        "runs": runs,
    }
    if not options.small:
        save("kills", found)
    return found


if __name__ == "__main__":
    main()
