"""What a search for several modes costs where there is one.

Run ``python -m benchmarks.several_modes.single`` twice: the first call compiles.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import numpy as np

ROWS, DIM = 100_000, 6


def model(x: Any, y: Any) -> None:
    """A logistic regression."""
    import numpyro
    import numpyro.distributions as dist

    b = numpyro.sample("b", dist.Normal(0, 2).expand([DIM]).to_event(1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


def measured(modes: int) -> None:
    """Print the processor seconds of a run with this setting."""
    import jax
    from numpyro.infer import MCMC

    from numpyro_minibatch import MinibatchMH, control_variate

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    chance = 1 / (1 + np.exp(-x @ np.linspace(-1.0, 1.0, DIM)))
    y = (rng.uniform(size=ROWS) < chance).astype(np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    kernel = MinibatchMH(model, control_variate=control_variate.taylor2(modes=modes))
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=2000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), jax.device_put(x), jax.device_put(y))
    jax.block_until_ready(mcmc.get_samples())
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    found = kernel.pilot.get("num_modes", 1)
    print(f"modes={modes}: {found} found, {used:.1f} processor seconds")


def main() -> None:
    if len(sys.argv) > 1:
        measured(int(sys.argv[1]))
        return
    for modes in (1, 8):
        command = [sys.executable, "-m", "benchmarks.several_modes.single", str(modes)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
