"""Cases of the step benchmarks: our kernels, and the same arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random

from numpyro_minibatch import MINT, MHMinibatch
from numpyro_minibatch.batch._permutation import permute
from numpyro_minibatch.estimate import Estimate, penalty_correction

DIM, BATCH = 20, 100


def make_data(size: int) -> tuple[Array, Array]:
    """A logistic regression with ``size`` rows.

    The numbers are hashed counters: they need no additional memory, which a measurement
    of peak memory would otherwise count.
    """

    @jax.jit
    def make() -> tuple[Array, Array]:
        def uniform(counter: Array) -> Array:
            for shift in (16, 15, 16):
                counter = (counter ^ (counter >> shift)) * jnp.uint32(0x7FEB352D)
            return counter.astype(jnp.float32) / 2.0**32

        rows = jnp.arange(size, dtype=jnp.uint32)
        cells = rows[:, None] * DIM + jnp.arange(DIM, dtype=jnp.uint32)
        x = (uniform(cells) - 0.5) * 12**0.5
        logits = ((uniform(cells) - 0.5) * 12**0.5).sum(-1) / DIM
        noise = uniform(rows + jnp.uint32(0x9E3779B9))
        return x, (noise < jax.nn.sigmoid(logits)).astype(jnp.float32)

    return jax.block_until_ready(make())


def model(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with numpyro.plate("data", x.shape[0], subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def temperature(size: int) -> float:
    """The same tempered posterior for every N, so that the same steps are made."""
    return size / 1000.0


def kernel(name: str, size: int) -> Any:
    kind = {"MINT": MINT, "MHMinibatch": MHMinibatch}[name]
    return kind(
        model,
        temperature=temperature(size),
        step_size=0.05,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )


Runner = Callable[[int], Any]


def ours(name: str, data: tuple[Array, Array]) -> Runner:
    """``run(n)``: n draws of a kernel in one compiled scan, data as arguments."""
    chosen = kernel(name, data[0].shape[0])
    state = chosen.init(random.key(2), 0, None, data, {})

    @partial(jax.jit, static_argnums=2)
    def scan(state: Any, data: Any, n: int) -> Any:
        def body(state: Any, _: None) -> Any:
            state = chosen.sample(state, data, {})
            return state, (state.z["beta"], state.accept_prob)

        return jax.lax.scan(body, state, None, length=n)

    return lambda n: jax.block_until_ready(scan(state, data, n))


def by_hand(data: tuple[Array, Array]) -> Runner:
    """``run(n)``: the arithmetic of a MINT step, written without any package."""
    size = data[0].shape[0]
    scale = size / temperature(size)

    def log_likelihood(x: Array, y: Array, beta: Array) -> Array:
        logits = x @ beta
        return y * logits - jnp.maximum(logits, 0) - jnp.log1p(jnp.exp(-abs(logits)))

    @partial(jax.jit, static_argnums=2)
    def scan(carry: Any, data: Any, n: int) -> Any:
        x, y = data

        def body(carry: Any, t: Array) -> Any:
            beta, key, index_key = carry
            key, proposal_key, accept_key = random.split(key, 3)
            proposed = beta + 0.05 * random.normal(proposal_key, (DIM,))
            rows = permute(random.fold_in(index_key, t), jnp.arange(BATCH), size)
            xb, yb = x[rows], y[rows]
            both = jax.vmap(partial(log_likelihood, xb, yb))(
                jnp.stack([beta, proposed])
            )
            difference = both[1] - both[0]
            variance = scale**2 * difference.var(ddof=1) / BATCH * (1 - BATCH / size)
            ratio = scale * difference.mean()
            ratio -= 0.5 * (jnp.square(proposed) - jnp.square(beta)).sum()
            penalty = penalty_correction(Estimate(ratio, variance, BATCH - 1.0))
            accept_prob = jnp.exp(jnp.minimum(ratio - penalty, 0.0))
            accepted = random.uniform(accept_key) < accept_prob
            beta = jnp.where(accepted, proposed, beta)
            return (beta, key, index_key), (beta, accept_prob)

        return jax.lax.scan(body, carry, jnp.arange(n))

    carry = jnp.zeros(DIM), random.key(3), random.key(4)
    return lambda n: jax.block_until_ready(scan(carry, data, n))
