"""Adaptive tempered sequential Monte Carlo of blackjax, in a separate process.

blackjax 1.7 has no parallel tempering; this is its tempering. It needs a proper initial
distribution and goes from a normal distribution with standard deviation 6 to the
mixture, so its path differs from the ladder. A "chain" is a whole run, whose particles
are its draws. Nothing of this package is imported.
"""

from __future__ import annotations

import time
from typing import Any

import blackjax
import blackjax.smc.resampling as resampling
import jax
import jax.numpy as jnp
import numpy as np

from .modes import TEMPERATURES, log_density, worker_options

PRIOR_SD, MOVES, ESS = 6.0, 5, 0.7


def log_prior(z: jax.Array) -> jax.Array:
    return -0.5 * jnp.square(z / PRIOR_SD).sum()


def main() -> None:
    options = worker_options()
    # the number of gradients of the ladder; a run has about 8 temperatures
    particles = options.draws * len(TEMPERATURES) // (8 * MOVES)
    smc = blackjax.adaptive_tempered_smc(
        log_prior,
        lambda z: log_density(z) - log_prior(z),
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        {
            "step_size": jnp.full(1, options.step_size),
            "inverse_mass_matrix": jnp.ones((1, 2)),
            "num_integration_steps": jnp.full(1, options.num_steps),
        },
        resampling.systematic,
        ESS,
        num_mcmc_steps=MOVES,
    )

    @jax.jit
    def run(key: jax.Array) -> Any:
        start, key = jax.random.split(key)
        z = PRIOR_SD * jax.random.normal(start, (particles, 2))

        def body(carry: Any) -> Any:
            state, key, count = carry
            key, use = jax.random.split(key)
            state, _ = smc.step(use, state)
            return state, key, count + 1

        first = smc.init(z), key, 0
        state, _, count = jax.lax.while_loop(
            lambda carry: carry[0].tempering_param < 1.0, body, first
        )
        weights = jnp.log(state.weights)
        picked = jax.random.categorical(key, weights, shape=(particles,))
        return state.particles[picked], count

    begin = time.perf_counter()
    keys = jax.random.split(jax.random.key(options.seed), options.chains)
    found = [run(key) for key in keys]
    count = float(np.mean([int(count) for _, count in found]))
    np.savez(
        options.file,
        draws=np.stack([np.asarray(z) for z, _ in found]),
        # for a particle that is kept in the end
        gradients=count * MOVES * options.num_steps,
        densities=count,
        temperatures=count,
        seconds=time.perf_counter() - begin,
        versions=f"blackjax {blackjax.__version__}, jax {jax.__version__}",
    )


if __name__ == "__main__":
    main()
