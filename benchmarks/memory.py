"""Peak memory of a run by size of its data, and the time to the first draw.

Each case runs in a separate process, because peak memory never decreases.

    python benchmarks/memory.py --out benchmarks/results/memory.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any


def measure(size: int, draws: int, how: str) -> dict[str, float]:
    """Run MINT in this process, in the given way."""
    import jax
    from cases import kernel, make_data
    from jax import random
    from numpyro.infer import MCMC

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    random.normal(random.key(0), (10,)).block_until_ready()
    base = peak()
    data = make_data(size)
    made = peak()
    start = time.perf_counter()
    first_draw = 0.0
    if how == "scan":
        chosen = kernel("MINT", size)
        state = chosen.init(random.key(1), 0, None, data, {})

        @partial(jax.jit, static_argnums=2)
        def scan(state: Any, data: Any, n: int) -> Any:
            def body(state: Any, _: None) -> Any:
                state = chosen.sample(state, data, {})
                return state, state.z

            return jax.lax.scan(body, state, None, length=n)

        for n in (1, draws):
            jax.block_until_ready(scan(state, data, n))
            first_draw = first_draw or time.perf_counter() - start
    else:
        for n in (1, draws):
            mcmc = MCMC(
                kernel("MINT", size),
                num_warmup=0,
                num_samples=n,
                progress_bar="progress_bar=True" in how,
                jit_model_args="jit_model_args=True" in how,
            )
            mcmc.run(random.key(1), *data)
            jax.block_until_ready(mcmc.last_state)
            first_draw = first_draw or time.perf_counter() - start
            del mcmc
    return {
        "data": sum(array.nbytes for array in data),
        "making": made - base,
        "peak": peak() - base,
        "first_draw": first_draw,
    }


# JAX reads the option when imported, so it is set in the environment
OPTION = "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS"
WAYS = (
    "scan",
    "MCMC, jit_model_args=True",
    "MCMC",
    f"MCMC, {OPTION}=1",
    f"MCMC, progress_bar=True, {OPTION}=1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e7])
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(*json.loads(args.worker))))
        return
    import jax

    lines = [
        "# Memory and time to the first draw",
        "",
        "MINT under `numpyro.infer.MCMC`, with `progress_bar=False` unless it says "
        "otherwise and with the environment variable that it names, or in a plain "
        "jitted `lax.scan` over `kernel.sample` with the data as arguments; logistic "
        f"regression, D = 20, m = 100, float32, {args.draws} draws; jax "
        f"{jax.__version__}, Python {platform.python_version()}. Peak: highest "
        "resident memory above that of a process that has imported jax and made some "
        "random numbers. First draw: set-up, compilation and one draw.",
        "",
        "| N | run by | data, MB | peak during generation of the data | "
        "peak of the run | peak / data | first draw, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in args.sizes:
        for how in WAYS:
            job = json.dumps([int(size), args.draws, how])
            out = subprocess.run(
                [sys.executable, __file__, "--worker", job],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, OPTION: str(int(OPTION in how))},
            ).stdout
            r = json.loads(out.splitlines()[-1])
            lines.append(
                f"| {size:.0e} | {how} | {r['data'] / 1e6:.0f} "
                f"| {r['making'] / 1e6:.0f} | {r['peak'] / 1e6:.0f} "
                f"| {r['peak'] / r['data']:.2f} | {r['first_draw']:.1f} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
