"""jax-sgmc's SGLD and SGHMC, with its own driver; needs the old environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_sgmc import alias, potential
from jax_sgmc.data.numpy_loader import DeviceNumpyDataLoader

from .drive import Run
from .prepare import Prepared
from .problems import Problem
from .tuning import FRICTION, Setting, hamiltonian, langevin
from .whitened import Whitened

BATCH = 1000


def run(build: Any, problem: Problem, prepared: Prepared, seconds: float) -> Run:
    """Run for about ``seconds``: a short run to measure the speed, then a long one.

    The driver compiles anew for every run. The difference of the two runs is therefore
    the cost of the additional steps, which is reported as the sampling time.
    """
    times, clock = {}, time.perf_counter
    start = clock()
    white = Whitened(problem, prepared)
    batch = min(BATCH, white.num_rows // 2)
    sample, setting, v = build(white, batch)
    times["setup"] = clock() - start

    def timed(steps: int, kept: int) -> tuple[float, np.ndarray]:
        start = clock()
        draws = sample(steps, kept)
        return clock() - start, draws

    first, _ = timed(20, 20)
    short, longer = 500, first
    # shorter times are lost in the variation of the compiler
    while longer < first + 0.1 * seconds:
        short *= 4
        longer, _ = timed(short, 20)
    each = (longer - first) / short
    steps = int(max(short, seconds / each))
    warmup = min(int(10 * setting.relaxation), steps // 2)
    kept = int(min(100_000, max(1000, 20 * steps / setting.relaxation)))
    total, draws = timed(steps + warmup, min(kept, steps))
    times["compile"] = first
    times["warmup"] = warmup * each
    times["sampling"] = max(total - first - times["warmup"], steps * each / 2)
    positions = np.asarray(jax.vmap(white.position)(jnp.asarray(draws)), np.float32)
    # its random thinning may keep draws of the warmup, so the first part is cut
    cut = int(len(positions) * warmup / (steps + warmup))
    rows = float(steps * batch * setting.num_steps)
    chosen = {"gradient_noise": v, **setting._asdict()}
    return Run(positions[cut:], times, rows, 1.0, steps, chosen)


def sampler(
    white: Whitened, batch: int, momentum: bool
) -> tuple[Callable[[int, int], np.ndarray], Setting, float]:
    """SGLD or SGHMC: the sampler, its setting, and the gradient noise.

    :param batch: rows per batch.
    :param momentum: SGHMC rather than SGLD.
    """
    names = [f"arg_{i}" for i in range(len(white.args))]
    data = dict(zip(names, map(np.asarray, white.args), strict=True))
    v = white.noise_variance(batch, control=False)
    energy = potential.minibatch_potential(
        prior=lambda sample: white.log_prior(sample["w"]),
        likelihood=lambda sample, row: white.log_row(
            sample["w"], *(row[name] for name in names)
        ),
        strategy="vmap",
    )
    if momentum:
        setting = hamiltonian(v, fresh=True, symplectic=True)
        make = partial(
            alias.sghmc, integration_steps=setting.num_steps, friction=FRICTION
        )
    else:
        setting, make = langevin(v), alias.sgld

    def sample(steps: int, kept: int) -> np.ndarray:
        solver = make(
            energy,
            DeviceNumpyDataLoader(**data),
            cache_size=1,
            batch_size=batch,
            # the schedule divides by the logarithm of their ratio
            first_step_size=1.001 * setting.step_size,
            last_step_size=0.999 * setting.step_size,
            burn_in=0,
            accepted_samples=kept,
            progress_bar=False,
        )
        result = solver({"w": jnp.zeros(white.size)}, iterations=steps)
        return np.asarray(result[0]["samples"]["variables"]["w"])

    return sample, setting, v


METHODS: dict[str, Any] = {
    "jax_sgmc_sgld": partial(sampler, momentum=False),
    "jax_sgmc_sghmc": partial(sampler, momentum=True),
}
