"""SGMCMCJax's SGLD and SGHMC with control variates; needs the old environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, random
from sgmcmcjax import kernels

from .drive import Sampler
from .prepare import Prepared
from .problems import Problem
from .tuning import FRICTION, hamiltonian, langevin
from .whitened import Whitened


def sampler(
    problem: Problem, prepared: Prepared, batch: int, momentum: bool
) -> Sampler:
    """SGLD-CV or SGHMC-CV.

    :param batch: rows per batch.
    :param momentum: SGHMC rather than SGLD.
    """
    white = Whitened(problem, prepared)
    batch = min(batch, white.num_rows // 2)
    v = white.noise_variance(batch, control=True)
    mode = jnp.zeros(white.size)
    log_row, data = white.log_row, white.args
    if len(data) > 2:  # it takes at most two arrays, so it gets the indices of the rows

        def log_row(w: Array, i: Array) -> Array:  # type: ignore[misc]
            return white.log_row(w, *(arg[i] for arg in white.args))

        data = (jnp.arange(white.num_rows),)
    shared = (log_row, white.log_prior, data, batch, mode)
    if momentum:
        setting = hamiltonian(v, fresh=True, symplectic=False)
        e = setting.step_size
        # its momentum is ours times the step size, so its step size is the square
        init, kernel, position = kernels.build_sghmcCV_kernel(
            e**2, setting.num_steps, *shared, alpha=FRICTION * e
        )
    else:
        setting = langevin(v)
        init, kernel, position = kernels.build_sgldCV_kernel(setting.step_size, *shared)
    rows = float(batch * setting.num_steps)

    def step(state: tuple[Any, Array, Array], args: Any) -> tuple[Any, Array, Array]:
        inner, key, i = state
        key, step_key = random.split(key)
        return kernel(i, step_key, inner), key, i + 1

    def read(state: tuple[Any, Array, Array]) -> tuple[Array, float, float]:
        return white.position(position(state[0])), rows, 1.0

    start = init(random.PRNGKey(1), mode), random.PRNGKey(2), jnp.int32(0)
    warmup, thin = int(10 * setting.relaxation), max(1, int(setting.relaxation / 20))
    chosen = {"gradient_noise": v, **setting._asdict()}
    return Sampler(start, step, read, warmup, thin, chosen)


METHODS: dict[str, Callable[[Problem, Prepared], Sampler]] = {
    "sgmcmcjax_sgld_cv": partial(sampler, batch=100, momentum=False),
    "sgmcmcjax_sghmc_cv": partial(sampler, batch=100, momentum=True),
}
