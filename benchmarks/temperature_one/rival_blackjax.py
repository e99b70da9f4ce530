"""blackjax's SGLD and SGHMC, plain and with its control variates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import blackjax
import jax.numpy as jnp
from blackjax.sgmcmc import gradients
from jax import Array, random

from .drive import Sampler
from .prepare import Prepared
from .problems import Problem
from .tuning import FRICTION, hamiltonian, langevin
from .whitened import Whitened


def sampler(
    problem: Problem, prepared: Prepared, batch: int, control: bool, momentum: bool
) -> Sampler:
    """One of the four samplers.

    :param batch: rows per batch.
    :param control: whether to use control variates at the mode.
    :param momentum: SGHMC rather than SGLD.
    """
    white = Whitened(problem, prepared)
    batch = min(batch, white.num_rows // 2)
    v = white.noise_variance(batch, control)
    # one batch for all steps of a trajectory, with the explicit Euler scheme
    setting = hamiltonian(v, fresh=False, symplectic=False) if momentum else langevin(v)
    gradient = gradients.grad_estimator(
        white.log_prior, lambda w, row: white.log_row(w, *row), white.num_rows
    )
    mode = jnp.zeros(white.size)
    if control:
        gradient = gradients.control_variates(gradient, mode, white.args)
    if momentum:
        algorithm = blackjax.sghmc(gradient, setting.num_steps, alpha=FRICTION)
    else:
        algorithm = blackjax.sgld(gradient)

    def step(state: tuple[Array, Array], args: Any) -> tuple[Array, Array]:
        w, key = state
        key, index_key, step_key = random.split(key, 3)
        indices = random.randint(index_key, (batch,), 0, white.num_rows)
        rows = tuple(arg[indices] for arg in args)
        return algorithm.step(step_key, w, rows, setting.step_size), key

    def read(state: tuple[Array, Array]) -> tuple[Array, float, float]:
        return white.position(state[0]), float(batch), 1.0

    warmup, thin = int(10 * setting.relaxation), max(1, int(setting.relaxation / 20))
    chosen = {"gradient_noise": v, **setting._asdict()}
    return Sampler((mode, random.PRNGKey(1)), step, read, warmup, thin, chosen)


METHODS: dict[str, Callable[[Problem, Prepared], Sampler]] = {
    "blackjax_sgld": partial(sampler, batch=1000, control=False, momentum=False),
    "blackjax_sghmc": partial(sampler, batch=1000, control=False, momentum=True),
    "blackjax_sgld_cv": partial(sampler, batch=100, control=True, momentum=False),
    "blackjax_sghmc_cv": partial(sampler, batch=100, control=True, momentum=True),
}
