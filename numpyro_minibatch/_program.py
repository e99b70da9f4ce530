"""The compiled program of a long run: some draws of all chains, again and again.

One program makes any number of draws, of any number of steps each, so that warmup,
short chunks and long ones compile once, and no draw depends on how they were divided.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import HMC

from numpyro_minibatch._static import Seen, Static, digest

__all__ = ["Program"]

_MOST_BYTES = 2**26  # of the draws that one call of the program returns
_MOST_DRAWS = 2**14

# what NumPyro's HMC does not collect by itself
_OF_HMC = (
    "accept_prob",
    "num_steps",
    "potential_energy",
    "adapt_state.step_size",
)


@dataclass(frozen=True)
class Chains:
    """What a compiled program depends on; equal for equal kernels.

    :param kernel: the kernel, after its ``init``.
    :param identity: what says whether two kernels make the same program.
    :param vectorized: whether the kernel's own functions take many chains.
    :param num_chains: the number of chains.
    :param static: the model's arguments without their arrays.
    :param fields: the fields of the state that are collected.
    :param capacity: the most draws that one call returns.
    """

    kernel: Any
    identity: Hashable
    vectorized: bool
    num_chains: int
    static: Static
    fields: tuple[str, ...]
    capacity: int

    def _key(self) -> tuple[Any, ...]:
        return (
            self.identity,
            self.vectorized,
            self.num_chains,
            self.static,
            self.fields,
            self.capacity,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chains) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def next_state(self, state: Any, arrays: list[Any]) -> Any:
        """One step of all chains."""
        args, kwargs = self.static.join(arrays)

        def step(state: Any) -> Any:
            return self.kernel.sample(state, args, kwargs)

        if self.vectorized or self.num_chains == 1:
            return step(state)
        return jax.vmap(step)(state)

    def collect(self, state: Any, arrays: list[Any]) -> dict[str, Any]:
        """What is kept of a state, with an axis of chains."""
        args, kwargs = self.static.join(arrays)
        found = {name: attrgetter(name)(state) for name in self.fields}
        position = self.kernel.sample_field
        if self.num_chains == 1:
            found = jax.tree.map(lambda x: x[None], found)
        constrain = self.kernel.postprocess_fn(args, kwargs)
        found[position] = jax.vmap(constrain)(found[position])
        if "replicas.z" in found:  # of all rungs
            found["replicas.z"] = jax.vmap(jax.vmap(constrain))(found["replicas.z"])
        return found


@partial(jax.jit, static_argnums=0)
def _draw(
    chains: Chains, state: Any, arrays: list[Any], draws: Array, steps: Array
) -> tuple[Any, Any]:
    """So many draws of so many steps each, in a buffer of fixed size."""
    shapes = jax.eval_shape(chains.collect, state, arrays)
    buffer = jax.tree.map(
        lambda x: jnp.zeros((chains.capacity, *x.shape), x.dtype), shapes
    )

    def one_step(_: Array, state: Any) -> Any:
        return chains.next_state(state, arrays)

    def one_draw(place: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, buffer = carry
        state = jax.lax.fori_loop(0, steps, one_step, state)
        kept = chains.collect(state, arrays)
        return state, jax.tree.map(lambda b, x: b.at[place].set(x), buffer, kept)

    return jax.lax.fori_loop(0, draws, one_draw, (state, buffer))


class Program:
    """A kernel ready to draw.

    :param kernel: a kernel of NumPyro's interface.
    :param num_warmup: steps in which it adapts.
    :param num_chains: number of chains.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param extra_fields: fields of the state that are collected besides those that the
        kernel names.
    """

    def __init__(
        self,
        kernel: Any,
        num_warmup: int,
        num_chains: int,
        args: tuple,
        kwargs: Mapping[str, Any],
        extra_fields: tuple[str, ...] = (),
    ) -> None:
        self.kernel = kernel
        self.num_warmup = num_warmup
        self.num_chains = num_chains
        self.args, self.kwargs = args, dict(kwargs)
        static, given = Static.split(args, self.kwargs)
        self._static, self._given = static, given
        # once for the run, and not closed over
        self._arrays = [jnp.asarray(x) for x in given]
        names = (kernel.sample_field, *kernel.default_fields, *extra_fields)
        if isinstance(kernel, HMC):
            names += _OF_HMC
        self._fields = tuple(dict.fromkeys(names))
        self._chains: Chains | None = None

    def init(self, key: Array, init_params: Any = None) -> Any:
        """The first state of all chains.

        :param key: a PRNG key.
        :param init_params: unconstrained start, with a leading axis of chains.
        """
        keys = jax.random.split(key, self.num_chains)
        kernel = self.kernel
        vectorized = hasattr(type(kernel), "plates")
        if vectorized:
            one = self.num_chains == 1
            start = init_params
            if one:
                start = jax.tree.map(lambda x: x[0], init_params)
            state = kernel.init(
                keys[0] if one else keys,
                self.num_warmup,
                start,
                model_args=self.args,
                model_kwargs=self.kwargs,
            )
            kernel = _snapshot(kernel)
            # what a model reads from its surroundings is compiled in
            identity: Hashable = _ByValue(kernel), digest(kernel.model)
        else:
            kernel, state = _started(
                kernel,
                self.num_warmup,
                keys,
                init_params,
                self._static,
                self._given,
            )
            identity = (_ById(kernel), self.num_warmup, digest(kernel.model))
        self._chains = Chains(
            kernel,
            identity,
            vectorized,
            self.num_chains,
            self._static,
            self._fields,
            1,
        )
        shapes = jax.eval_shape(self._chains.collect, state, self._arrays)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        capacity = int(np.clip(_MOST_BYTES // max(size, 1), 1, _MOST_DRAWS))
        self._chains = Chains(**{**self._chains.__dict__, "capacity": capacity})
        return state

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the state that are collected."""
        return self._fields

    def peek(self, state: Any) -> Any:
        """What would be collected of a state, with the axes chain and draw first."""
        assert self._chains is not None
        found = jax.jit(self._chains.collect)(state, self._arrays)
        return jax.tree.map(lambda x: np.asarray(x)[:, None], found)

    @property
    def identity(self) -> Hashable:
        """Equal for runs of the same program."""
        assert self._chains is not None
        return self._chains

    @property
    def capacity(self) -> int:
        """The most draws of one call."""
        assert self._chains is not None
        return self._chains.capacity

    def draw(self, state: Any, draws: int, steps: int) -> tuple[Any, Callable]:
        """Begin to make draws; returns at once.

        :param state: the state of all chains.
        :param draws: how many draws, at most :attr:`capacity`.
        :param steps: steps of the kernel to a draw.
        :return: the state after them, and a function that waits for the draws and
            returns what was collected, with the axes draw and chain first.
        """
        assert self._chains is not None
        state, buffer = _draw(
            self._chains,
            state,
            self._arrays,
            jnp.int32(draws),
            jnp.int32(steps),
        )
        return state, lambda: jax.tree.map(
            lambda x: np.asarray(x)[:draws].copy(), buffer
        )


def _snapshot(kernel: Any) -> Any:
    """The kernel as it is now: what it is equal to must not change if it is used again.

    Not `copy.copy`, for which kernels forget that they were started.
    """
    other = object.__new__(type(kernel))
    other.__dict__.update(kernel.__dict__)
    if "_inner" in other.__dict__:  # of a kernel that runs another one
        other._inner = copy.copy(kernel._inner)
    made = kernel._sample_fn
    own = other._transition
    other._sample_fn = partial(made.func, own) if isinstance(made, partial) else own
    return other


@dataclass(frozen=True, eq=False)
class _ByValue:
    """A kernel of this package, equal to those that make the same program."""

    kernel: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and bool(self.kernel == other.kernel)

    def __hash__(self) -> int:
        return hash(self.kernel)


@dataclass(frozen=True, eq=False)
class _ById:
    """A kernel that is equal to itself only; held, so that its place is not reused."""

    kernel: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.kernel is other.kernel

    def __hash__(self) -> int:
        return id(self.kernel)


# NumPyro's kernels keep what `init` was told in functions that they make, and have no
# equality: each is started in a copy that is kept for as long as it is itself
_STARTED: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def _started(
    kernel: Any,
    num_warmup: int,
    keys: Array,
    init_params: Any,
    static: Static,
    arrays: list[Any],
) -> tuple[Any, Any]:
    """A kernel of NumPyro that was started, and the states of its chains."""
    # other data, another copy: some keep what they computed of the data
    told = (num_warmup, static, Seen.of(arrays), digest(kernel.model))
    if kernel not in _STARTED or _STARTED[kernel][0] != told:
        _STARTED[kernel] = told, copy.copy(kernel)
    own = _STARTED[kernel][1]
    args, kwargs = static.join(arrays)
    starts = [None] * len(keys)
    if init_params is not None:
        starts = [jax.tree.map(itemgetter(k), init_params) for k in range(len(keys))]
    states = [
        own.init(key, num_warmup, start, args, kwargs)
        for key, start in zip(keys, starts, strict=True)
    ]
    if len(states) == 1:
        return own, states[0]
    return own, jax.tree.map(lambda *x: jnp.stack(x), *states)
