"""Parallel tempering of TensorFlow Probability on JAX, in a separate process.

HMC at every rung, with alternating even and odd swaps. TensorFlow Probability 0.25
needs a JAX older than 0.5; nothing of this package is imported.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .modes import TEMPERATURES, log_density, worker_options


def main() -> None:
    options = worker_options()
    from tensorflow_probability.substrates import jax as tfp

    number, chains = len(TEMPERATURES), options.chains
    inverse = jnp.asarray(1.0 / TEMPERATURES, jnp.float32)
    # in TFP momenta have variance one and the density is tempered: at temperature T a
    # step is sqrt(T) times one with momenta of variance T
    steps = options.step_size * jnp.sqrt(1.0 / inverse)[:, None, None]
    kernel = tfp.mcmc.ReplicaExchangeMC(
        target_log_prob_fn=log_density,
        inverse_temperatures=inverse,
        make_kernel_fn=lambda f: tfp.mcmc.HamiltonianMonteCarlo(
            f, step_size=steps, num_leapfrog_steps=options.num_steps
        ),
        swap_proposal_fn=tfp.mcmc.even_odd_swap_proposal_fn(1.0),
    )

    def trace(_: Any, results: Any) -> tuple[jax.Array, jax.Array]:
        accepted = results.is_swap_accepted  # (R, R, chains), symmetric
        other = accepted & ~jnp.eye(number, dtype=bool)[..., None]
        own = jnp.arange(number)[:, None]
        source = jnp.where(other.any(1), other.argmax(1), own)
        moved = results.post_swap_replica_results
        return source, jnp.exp(jnp.minimum(moved.log_accept_ratio, 0.0)).mean()

    @partial(jax.jit, static_argnums=2)
    def run(key: Any, start: Any, draws: int) -> Any:
        return tfp.mcmc.sample_chain(
            draws,
            start,
            kernel=kernel,
            num_burnin_steps=options.warmup,
            trace_fn=trace,
            seed=key,
        )

    begin = time.perf_counter()
    key = jax.random.PRNGKey(options.seed)
    draws, (source, accept) = run(key, jnp.zeros((chains, 2)), options.draws)
    source = np.moveaxis(np.asarray(source), 2, 0)  # (chains, draws, R)
    walker = np.broadcast_to(np.arange(number), (chains, number)).copy()
    rung = np.empty_like(source)
    for i in range(options.draws):
        walker = np.take_along_axis(walker, source[:, i], 1)
        rung[:, i] = np.argsort(walker, 1)
    np.savez(
        options.file,
        draws=np.moveaxis(np.asarray(draws), 0, 1),
        rung=rung,
        gradients=number * options.num_steps,
        densities=0,
        acceptance=float(np.mean(accept)),
        seconds=time.perf_counter() - begin,
        versions=f"tensorflow-probability {tfp.__version__}, jax {jax.__version__}",
    )


if __name__ == "__main__":
    main()
