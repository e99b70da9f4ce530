"""The first states of chains, compiled once for kernels that are equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular

from numpyro_minibatch._internal.static import Static
from numpyro_minibatch._model.content import content_of
from numpyro_minibatch._model.start import find_start, finite_rows
from numpyro_minibatch._model.support import check_latent_rows
from numpyro_minibatch.control_variate._expand import Expansions
from numpyro_minibatch.kernels._shared.contract import Start
from numpyro_minibatch.target import without_integrals

__all__ = [
    "Within",
    "check_finite_rows",
    "constraining",
    "first_chain",
    "_start_chains",
    "_start_equal",
]


class Within(NamedTuple):
    """The possible starts of a warmup for chains with a surrogate.

    :param draws: draws from the surrogate's posterior, with a leading axis.
    :param radius: the largest distance of a start from its mean, in its standard
        deviations; ``None`` if the user chose no start, so that chains start at draws.
    """

    draws: Any
    radius: float | None = None

    def drawn(self, key: Array) -> Any:
        """One of the draws."""
        count = len(jax.tree.leaves(self.draws)[0])
        # not randint, which takes three times as long to compile
        chosen = jnp.int32(count * jax.random.uniform(key))
        return jax.tree.map(lambda x: jnp.asarray(x)[chosen], self.draws)

    def is_known(self, surrogate: Any) -> bool:
        """Whether chains start at positions where the set-up has evaluated all rows.

        :param surrogate: the set-up's. With several modes, starts are drawn by the
            masses of the modes, and the pilot's draws evenly from all modes.
        """
        return self.radius is None and not isinstance(surrogate.expansion, Expansions)

    def report(self, distance: Array) -> dict[str, Any]:
        """The number of moved chains, and the largest distance of their starts.

        :param distance: of each chain's start, or of one chain's.
        """
        if isinstance(distance, jax.core.Tracer):
            return {}
        far = ~(np.asarray(distance) <= self.radius)
        if not far.any():
            return {}
        farthest = float(np.max(np.asarray(distance)))
        return {"moved_starts": int(far.sum()), "start_distance": farthest}


def _start_chains(
    kernel: Any,
    static: Static,
    vectorized: bool,
    known: Hashable,  # the results of the set-up; a change compiles again
    key: Array,
    init: Any,
    arrays: list[Any],
    surrogate: Any,
    within: Within | None,
) -> tuple[Any, Array, Array | None]:
    """The first states; compiled once for equal arguments and shapes."""
    start = partial(_start, kernel, static)
    if vectorized:
        chains = 0, None if init is None else 0
        start = jax.vmap(start, in_axes=(*chains, None, None, None))
    return start(key, init, arrays, surrogate, within)


# shared by equal kernels, if their models are known to be equal
_start_equal = jax.jit(_start_chains, static_argnums=(0, 1, 2, 3))


def _start(
    kernel: Any,
    static: Static,
    key: Array,
    init: Any,
    arrays: list[Any],
    surrogate: Any,
    within: Within | None,
) -> tuple[Any, Array, Array | None]:
    """The first state of one chain, its log density, and the distance of its start.

    The log density is that of the requested start, wherever the chain begins. It is 0
    if the set-up has already evaluated all rows at the start and found it finite.
    """
    args, kwargs = static.join(arrays)
    target = kernel.make_target(args, kwargs)
    key, init_key = jax.random.split(key)
    if within is not None and within.radius is None:
        init = within.drawn(init_key)  # and then no other start is drawn
    if within is not None and within.is_known(surrogate):
        z = init
        log_density = jnp.zeros(())
    else:
        z, log_density = find_start(
            target, kernel.layout, kernel._init_strategy, init_key, init
        )
    distance = None
    if within is not None and within.radius is not None:
        start_key = jax.random.fold_in(init_key, 1)
        distance, z = _moved_within(within, surrogate, start_key, z)
    flat, unravel = ravel_pytree(z)
    reader = kernel.reader(target, unravel, surrogate)
    start = Start(reader, z, flat, key, surrogate)
    return kernel.first_state(start), log_density, distance


def _moved_within(
    within: Within, surrogate: Any, key: Array, z: Any
) -> tuple[Array, Any]:
    """The distance of a start, and the start, or a draw if it is too far away.

    Moves are scaled to the surrogate's posterior. Where the polynomial about its centre
    is wrong by a thousand, all moves are rejected. A warmup forgets its start in any
    case.
    """
    flat, _ = ravel_pytree(z)
    if isinstance(surrogate.expansion, Expansions):  # to the closest of several modes
        white = surrogate.expansion.modes.whitened(flat)
        distance = jnp.linalg.norm(white, axis=-1).min()
    else:
        away = solve_triangular(surrogate.root.T, flat - surrogate.location, lower=True)
        distance = jnp.linalg.norm(away)
    near = distance <= within.radius
    return distance, jax.tree.map(
        lambda start, draw: jnp.where(near, start, draw), z, within.drawn(key)
    )


def _finite(
    kernel: Any,
    static: Static,
    known: Hashable,
    arrays: list[Any],
    position: Any,
    indices: dict[str, Array],
) -> dict[str, Array]:
    """Whether rows have a density; compiled once, as the first states are."""
    with without_integrals(highest=True):
        target = kernel.make_target(*static.join(arrays))
        return finite_rows(target, position, indices)


# the program runs once
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
_finite_equal = jax.jit(_finite, static_argnums=(0, 1, 2), compiler_options=_QUICKLY)


def check_finite_rows(
    kernel: Any, static: Static, arrays: list[Any], init: Any
) -> None:
    """Raise if a row that is integrated over latent values has a density nowhere.

    :param kernel: the kernel, of a marginalized model.
    :param static: the model's arguments without their arrays.
    :param arrays: these arrays.
    :param init: the starting point of the first chain, or ``None``.
    :raises ValueError: with the rows.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arrays, init))):
        return
    content = content_of(kernel.model)
    finite = _finite_equal
    if content is None:  # not shared
        finite = jax.jit(_finite, static_argnums=(0, 1, 2), compiler_options=_QUICKLY)
    known = content, kernel.layout, kernel._run.frozen_digest
    check_latent_rows(
        kernel._who,
        kernel.make_target(*static.join(arrays)),
        partial(finite, copy.copy(kernel), static, known, arrays),
        kernel.layout,
        kernel._init_strategy,
        init,
    )


def _constrain(
    kernel: Any, static: Static, content: Hashable, arrays: list[Any], z: Any
) -> dict[str, Array]:
    """The model's values at a position; compiled once, as the first states are."""
    return kernel.make_target(*static.join(arrays)).constrain(z)


_constrain_equal = jax.jit(_constrain, static_argnums=(0, 1, 2))


def constraining(
    kernel: Any, args: tuple, kwargs: Mapping[str, Any]
) -> Callable[[Any], dict[str, Array]]:
    """A function from a position to the model's constrained values.

    :param kernel: the kernel, which has seen the data.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    """
    static, arrays = Static.split(args, kwargs)
    content = content_of(kernel.model)
    here = kernel.make_target(args, kwargs).constrain
    if content is None or any(isinstance(x, jax.core.Tracer) for x in arrays):
        return here
    bare = copy.copy(kernel)

    def constrain(z: Any) -> dict[str, Array]:
        # outside of other programs: one program instead of one per operation of the
        # model
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            return here(z)
        return _constrain_equal(bare, static, content, arrays, z)

    return constrain


def first_chain(init: Any, chains: tuple[int, ...]) -> Any:
    """The starting point of the first chain."""
    return jax.tree.map(lambda x: x[0], init) if chains else init
