"""NumPyro's own samplers and the kernels of this package, in one Python environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import HMCECS, NUTS, init_to_value

from .drive import Sampler
from .flat import Flat
from .prepare import Prepared
from .problems import Problem

WARMUP = 200  # the mass matrix is given, so only the step size is adapted


def nuts(problem: Problem, prepared: Prepared, chains: int = 1) -> Sampler:
    """NUTS on all rows; the given mass matrix is equivalent to whitened coordinates."""
    num_rows = len(prepared.args[0])
    flat = Flat(problem.model, prepared.args)
    kernel = NUTS(problem.model, **_tuned(flat, prepared))
    return _sampler(
        kernel,
        prepared,
        lambda s: (s.z, s.num_steps * num_rows, s.accept_prob),
        WARMUP,
        chains,
    )


def hmcecs(
    problem: Problem,
    prepared: Prepared,
    size: int,
    blocks: int,
    whitened: bool = True,
    chains: int = 1,
) -> Sampler:
    """HMCECS with its second-order Taylor proxy at the mode, where it starts.

    :param size: rows per batch.
    :param blocks: parts of the batch, of which one is proposed anew at each step.
    :param whitened: whether the mass matrix is given, as for NUTS here, or NumPyro
        adapts a diagonal one in warmup.
    """
    kernel = hmcecs_kernel(problem, prepared, size, blocks, whitened)

    def read(state: Any) -> tuple[Any, Array, Array]:
        inner = state.hmc_state
        rows = inner.num_steps * size + 2.0 * size  # and two energies for the new batch
        return inner.z, rows, state.accept_prob

    return _sampler(kernel, prepared, read, WARMUP if whitened else 1000, chains)


def hmcecs_kernel(
    problem: Problem, prepared: Prepared, size: int, blocks: int, whitened: bool = True
) -> HMCECS:
    """The kernel of :func:`hmcecs`."""
    flat = Flat(problem.model, prepared.args)
    model = partial(problem.model, subsample_size=min(size, len(prepared.args[0]) // 2))
    mode = flat.constrain(jnp.asarray(prepared.center, jnp.float32))
    start = {"init_strategy": init_to_value(values=mode)}
    return HMCECS(
        NUTS(model, **(_tuned(flat, prepared) if whitened else start)),
        num_blocks=blocks,
        proxy=HMCECS.taylor_proxy(mode, degree=2),
    )


def ours(
    problem: Problem, prepared: Prepared, chains: int = 1, **settings: Any
) -> Sampler:
    """`MinibatchMH` with second-order control variates and default settings."""
    from numpyro_minibatch import MinibatchMH

    kernel: Any = MinibatchMH(problem.model, control_variate="taylor2", **settings)
    return _sampler(
        kernel,
        prepared,
        lambda s: (s.z, s.num_rows, s.accept_prob),
        1000,
        chains,
    )


def ours_uniform(problem: Problem, prepared: Prepared, chains: int = 1) -> Sampler:
    """The same with uniform batches, which miss the important rows."""
    from numpyro_minibatch import batch

    size = min(100, len(prepared.args[0]) - 1)
    return ours(problem, prepared, chains, batch=batch.without_replacement(size))


def _tuned(flat: Flat, prepared: Prepared) -> dict[str, Any]:
    root = prepared.root
    mode = flat.constrain(jnp.asarray(prepared.center, jnp.float32))
    return {
        "inverse_mass_matrix": jnp.asarray(root @ root.T, jnp.float32),
        "dense_mass": True,
        "adapt_mass_matrix": False,
        "init_strategy": init_to_value(values=mode),
    }


def _flat(z: Any) -> Array:
    return ravel_pytree(z)[0]


def _sampler(
    kernel: Any,
    prepared: Prepared,
    read: Callable[[Any], Any],
    warmup: int,
    chains: int,
) -> Sampler:
    """A kernel whose chains are vectorised in one program."""
    args = tuple(jnp.asarray(np.asarray(arg)) for arg in prepared.args)

    def init(key: Array) -> Any:
        # keywords, as in calls by NumPyro's driver
        state = kernel.init(
            key, warmup, init_params=None, model_args=args, model_kwargs={}
        )
        return jax.tree.map(jnp.asarray, state)

    def step(state: Any, args: Any) -> Any:
        return kernel.sample(state, args, {})

    def total(state: Any) -> tuple[Array, Array, Array]:
        z, rows, accept = read(state)
        flat = _flat if chains == 1 else jax.vmap(_flat)
        return flat(z), rows.sum(), accept.mean()

    key = random.PRNGKey(0)
    if chains == 1:
        return Sampler(init(key), step, total, warmup)
    keys = random.split(key, chains)
    if hasattr(type(kernel), "plates"):  # kernels of this package take many chains
        return Sampler(init(keys), step, total, warmup)
    states = jax.tree.map(lambda *x: jnp.stack(x), *map(init, keys))
    return Sampler(states, jax.vmap(step, (0, None)), total, warmup)


METHODS: dict[str, Callable[..., Sampler]] = {
    "nuts": nuts,
    "hmcecs": partial(hmcecs, size=100, blocks=1),
    "hmcecs_1000": partial(hmcecs, size=1000, blocks=10),
    # as in NumPyro's own example of it
    "hmcecs_example": partial(hmcecs, size=1000, blocks=100, whitened=False),
    "ours": ours,
    "ours_uniform": ours_uniform,
}
