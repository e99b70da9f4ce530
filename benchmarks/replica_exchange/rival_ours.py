"""Replica exchange of this package on all rows, and the same in ten lines."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import HMC, MCMC

import numpyro_minibatch
from numpyro_minibatch import (
    AMAGOLD,
    MinibatchMH,
    ReplicaExchange,
    Target,
    batch,
    proposal,
)

from .modes import TEMPERATURES, log_density, worker_options

ROWS = 10
TARGET = Target(
    lambda z: jnp.zeros(()),
    lambda z, rows: log_density(z) / ROWS + 0.0 * rows,
    ROWS,
)


def model() -> None:
    """The same target as a NumPyro model, whose prior is flat."""
    flat = dist.ImproperUniform(dist.constraints.real, (), (2,))
    z = numpyro.sample("z", flat)
    with numpyro.plate("rows", ROWS) as rows:
        # observed, so that it belongs to the likelihood, which is tempered
        part = dist.Unit(log_density(z) / ROWS + 0.0 * rows)
        numpyro.sample("row", part, obs=jnp.empty((ROWS, 0)))


def plain(
    key: Any, start: Any, draws: int, warmup: int, step: float, steps: int
) -> Any:
    """Parallel tempering in ten lines, HMC at every rung; momenta of variance T."""
    T, number = jnp.asarray(TEMPERATURES, jnp.float32), len(TEMPERATURES)
    force, log_p = jax.vmap(jax.grad(log_density)), jax.vmap(log_density)

    def draw(carry: Any, i: Any) -> Any:
        z, walker, key = carry
        key, *keys = random.split(key, 4)
        p = first = jnp.sqrt(T)[:, None] * random.normal(keys[0], z.shape)
        p, new = p + 0.5 * step * force(z), z
        for k in range(steps):
            new = new + step * p
            p = p + (1.0 if k < steps - 1 else 0.5) * step * force(new)
        energy = 0.5 * (jnp.square(first) - jnp.square(p)).sum(-1)
        ratio = (log_p(new) - log_p(z) + energy) / T
        z = jnp.where(
            (jnp.log(random.uniform(keys[1], T.shape)) < ratio)[:, None], new, z
        )
        low = jnp.arange(number - 1)  # swaps, of even and odd pairs alternately
        gain = (1 / T[1:] - 1 / T[:-1]) * (log_p(z)[:-1] - log_p(z)[1:])
        swap = (jnp.log(random.uniform(keys[2], low.shape)) < gain) & (low % 2 == i % 2)
        up = jnp.append(swap, False) * 1 - jnp.append(False, swap) * 1
        source = jnp.arange(number) + up
        z, walker = z[source], walker[source]
        return (z, walker, key), (
            z[0],
            jnp.argsort(walker),
            jnp.exp(jnp.minimum(ratio, 0.0)),
        )

    carry = jnp.tile(start, (number, 1)), jnp.arange(number), key
    _, (z, rung, accept) = jax.lax.scan(draw, carry, jnp.arange(warmup + draws))
    return z[warmup:], rung[warmup:], accept[warmup:].mean()


def kernel(name: str, step: float, steps: int) -> tuple[Any, int, Any]:
    """A kernel, the gradients per rung and draw, and the name of its site."""
    ladder = {"temperatures": TEMPERATURES.tolist()}
    if name == "AMAGOLD":
        # full batches and no friction: Hamiltonian Monte Carlo
        inner = AMAGOLD(
            target=TARGET,
            batch=batch.full(),
            friction=0.0,
            step_size=step,
            num_steps=steps,
            adapt_step_size=False,
            adapt_mass_matrix=False,
        )
        return ReplicaExchange(inner, swap="exact", **ladder), steps, None
    if name == "MinibatchMH":
        moves = max(1, steps // 2)
        inner = MinibatchMH(
            target=TARGET,
            batch=batch.full(),
            proposal=proposal.langevin(),
            num_steps=moves,
            adapt_mass_matrix=False,
        )
        # gradients at both ends of a move
        return ReplicaExchange(inner, swap="exact", **ladder), 2 * moves, None
    # momenta have variance one at every rung, so steps adapt to the temperature
    inner = HMC(
        model,
        step_size=step,
        num_steps=steps,
        trajectory_length=None,
        adapt_mass_matrix=False,
    )
    # one more because a swap may have changed the position
    return ReplicaExchange(inner, **ladder), steps + 1, "z"


def main() -> None:
    options = worker_options()
    begin, number = time.perf_counter(), len(TEMPERATURES)
    start = jnp.zeros((options.chains, 2))
    size = options.step_size, options.num_steps
    found: dict[str, Any] = {}
    if options.method == "plain":
        run = partial(plain, draws=options.draws, warmup=options.warmup)
        keys = random.split(random.key(options.seed), options.chains)
        each = jax.vmap(partial(run, step=size[0], steps=size[1]))
        z, rung, accept = jax.jit(each)(keys, start)
        gradients, version = number * (size[1] + 1), f"jax {jax.__version__}"
        found["densities"] = 3 * number
        found["acceptance"] = float(accept.mean())
    else:
        inside, each_rung, site = kernel(options.method, *size)
        gradients = number * each_rung
        mcmc = MCMC(
            inside,
            num_warmup=options.warmup,
            num_samples=options.draws,
            num_chains=options.chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        init = start if site is None else {site: start}
        mcmc.run(random.key(options.seed), init_params=init)
        z = mcmc.get_samples(group_by_chain=True)
        z = z if site is None else z[site]
        rung = mcmc.get_extra_fields()["rung"]
        rung = rung.reshape(options.chains, options.draws, number)
        fields = mcmc.get_extra_fields()
        if "replicas.accept_prob" in fields:
            found["acceptance"] = float(fields["replicas.accept_prob"].mean())
        # one at the end of each move or path, and both of each of three swaps; NumPyro
        # has the first with the gradient
        moves = {"AMAGOLD": 1, "MinibatchMH": each_rung // 2}.get(options.method, 0)
        found["densities"] = number * moves + 2 * ((number - 1) // 2)
        version = f"numpyro_minibatch {numpyro_minibatch.__version__}"
    np.savez(
        options.file,
        draws=np.asarray(z),
        rung=np.asarray(rung),
        gradients=gradients,
        seconds=time.perf_counter() - begin,
        versions=version,
        **found,
    )


if __name__ == "__main__":
    main()
