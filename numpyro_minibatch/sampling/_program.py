"""The compiled program of a long run, which makes some draws of all chains.

One program makes any number of draws, of any number of steps each. Warmup, short chunks
and long ones therefore compile once, and no draw depends on the division into chunks.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import HMC

from numpyro_minibatch._internal.passes import agreed, using
from numpyro_minibatch._internal.static import Seen, Static, digest
from numpyro_minibatch._model.content import remembered
from numpyro_minibatch.host_rows import HostRows, find_rows, map_rows
from numpyro_minibatch.sampling._devices import CHAINS

__all__ = ["Program"]

_MOST_BYTES = 2**26  # of the draws that one call of the program returns
_MOST_DRAWS = 2**14
_PIECE = 64  # draws whose rows are computed at once

# fields that NumPyro's HMC does not collect by default
_OF_HMC = (
    "accept_prob",
    "num_steps",
    "potential_energy",
    "adapt_state.step_size",
)


@dataclass(frozen=True)
class Chains:
    """The static inputs of a compiled program; equal for equal kernels.

    :param kernel: the kernel, after its ``init``.
    :param identity: a value that is equal if two kernels make the same program.
    :param vectorized: whether the kernel's own functions take several chains.
    :param num_chains: the number of chains.
    :param static: the model's arguments without their arrays.
    :param fields: the fields of the state that are collected.
    :param capacity: the most draws that one call returns.
    :param mesh: devices among which the chains and the rows of a pass are divided.
    """

    kernel: Any
    identity: Hashable
    vectorized: bool
    num_chains: int
    static: Static
    fields: tuple[str, ...]
    capacity: int
    mesh: Mesh | None = None

    def _key(self) -> tuple[Any, ...]:
        return (
            self.identity,
            self.vectorized,
            self.num_chains,
            self.static,
            self.fields,
            self.capacity,
            self.mesh,
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
        """The collected fields of a state, with an axis of chains."""
        args, kwargs = self.static.join(arrays)
        found = {name: _field(state, name) for name in self.fields}
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
    """``draws`` draws of ``steps`` steps each, in a buffer of fixed size."""
    run = partial(_some_draws, chains)
    if chains.mesh is not None:
        # devices run their own chains, and wait only for devices with which they share
        # rows
        of_chains, whole = _specs(chains, state), PartitionSpec()
        kept = PartitionSpec(None, CHAINS) if chains.num_chains > 1 else whole
        run = jax.shard_map(
            run,
            mesh=chains.mesh,
            in_specs=(of_chains, whole, whole, whole),
            out_specs=(of_chains, kept),
            check_vma=False,
        )
    return run(state, arrays, draws, steps)


@partial(jax.jit, static_argnums=0)
def _collected(chains: Chains, state: Any, arrays: list[Any]) -> dict[str, Any]:
    return chains.collect(state, arrays)


def _specs(chains: Chains, state: Any) -> Any:
    """The division of a state among devices: by chains, except for shared parts."""
    if chains.num_chains == 1:  # it has no axis of chains
        return jax.tree.map(lambda _: PartitionSpec(), state)
    divided = jax.tree.map(lambda _: PartitionSpec(CHAINS), state)
    if not hasattr(state, "surrogate"):
        return divided
    shared = jax.tree.map(lambda _: PartitionSpec(), state.surrogate)
    return divided._replace(surrogate=shared)


def _some_draws(
    chains: Chains, state: Any, arrays: list[Any], draws: Array, steps: Array
) -> tuple[Any, Any]:
    shapes = jax.eval_shape(chains.collect, state, arrays)
    buffer = jax.tree.map(
        lambda x: jnp.zeros((chains.capacity, *x.shape), x.dtype), shapes
    )

    def one_step(_: Array, state: Any) -> Any:
        moved = chains.next_state(state, arrays)
        if not hasattr(moved, "surrogate"):
            return agreed(moved)
        constant = moved.surrogate
        return agreed(moved._replace(surrogate=()))._replace(surrogate=constant)

    def one_draw(place: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, buffer = carry
        state = jax.lax.fori_loop(0, steps, one_step, state)
        kept = chains.collect(state, arrays)
        return state, jax.tree.map(lambda b, x: b.at[place].set(x), buffer, kept)

    return jax.lax.fori_loop(0, draws, one_draw, (state, buffer))


class Program:
    """A kernel that is ready to draw.

    :param kernel: a kernel with NumPyro's interface.
    :param num_warmup: steps in which it adapts.
    :param num_chains: number of chains.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param extra_fields: fields of the state that are collected in addition to the
        kernel's default fields.
    :param mesh: devices of this process, with an axis for the chains and one for the
        rows of a pass.
    :param setup: devices among which the passes before the run are divided.
    """

    def __init__(
        self,
        kernel: Any,
        num_warmup: int,
        num_chains: int,
        args: tuple,
        kwargs: Mapping[str, Any],
        extra_fields: tuple[str, ...] = (),
        mesh: Mesh | None = None,
        setup: Mesh | None = None,
    ) -> None:
        self.kernel = kernel
        self.num_warmup = num_warmup
        self.num_chains = num_chains
        self._mesh, self._setup = mesh, setup
        known = bool(getattr(kernel, "knows_rows", False))
        given = map_rows(lambda rows: rows.foreseen(known), (args, dict(kwargs)))
        self.args, self.kwargs = given
        self._static, self._given = Static.split(*given)
        self._arrays: list[Any] = []
        self._streams: Any = None
        names = (kernel.sample_field, *kernel.default_fields, *extra_fields)
        if isinstance(kernel, HMC):
            names += _OF_HMC
        self._fields = tuple(dict.fromkeys(names))
        self._chains: Chains | None = None

    def _placed(self, given: tuple[tuple, dict[str, Any]]) -> list[Any]:
        """The arrays of a model's arguments, on the devices of the program."""
        if self._mesh is not None:
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            devices = list(self._mesh.devices.flat)
            given = map_rows(lambda rows: rows.on(devices, everywhere), given)
        return [self._put(x) for x in Static.split(*given)[1]]

    def _put(self, array: Any) -> Any:
        if self._mesh is None:
            return jnp.asarray(array)
        return jax.device_put(array, NamedSharding(self._mesh, PartitionSpec()))

    def place(self, state: Any) -> Any:
        """A state on the devices among which its chains are divided.

        :param state: the state of all chains.
        """
        if self._mesh is None:
            return state
        mesh = self._mesh
        assert self._chains is not None
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
            state,
            _specs(self._chains, state),
        )

    def init(self, keys: Array, init_params: Any = None) -> Any:
        """The first state of all chains.

        :param keys: a PRNG key for each chain.
        :param init_params: unconstrained start, with a leading axis of chains.
        """
        kernel = self.kernel
        vectorized = hasattr(type(kernel), "plates")
        if vectorized:
            one = self.num_chains == 1
            start = init_params
            if one:
                start = jax.tree.map(lambda x: x[0], init_params)
            content = digest(_as_written(kernel))
            with using(self._setup), remembered(content):
                state = kernel.init(
                    keys[0] if one else keys,
                    self.num_warmup,
                    start,
                    model_args=self.args,
                    model_kwargs=self.kwargs,
                )
            # a copy, because this kernel may change if it is used again
            kernel = kernel.snapshot()
            # the closure and globals of a model are compiled in
            identity: Hashable = _ByValue(kernel), content
        else:
            kernel, state = _started(
                kernel,
                self.num_warmup,
                keys,
                init_params,
                self._static,
                self._given,
            )
            identity = (_ById(kernel), self.num_warmup, digest(_as_written(kernel)))
        # placed once for the run, and passed as arguments instead of closed over
        self._arrays = self._placed((self.args, self.kwargs))
        self._chains = Chains(
            kernel,
            identity,
            vectorized,
            self.num_chains,
            self._static,
            self._fields,
            1,
            self._mesh,
        )
        # through the compiled function, so that the result is cached
        shapes = _collected.eval_shape(self._chains, state, self._arrays)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        capacity = int(np.clip(_MOST_BYTES // max(size, 1), 1, _MOST_DRAWS))
        self._chains = Chains(**{**self._chains.__dict__, "capacity": capacity})
        return state

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the state that are collected."""
        return self._fields

    def peek(self, state: Any) -> Any:
        """The collected fields of a state, with the axes chain and draw first."""
        assert self._chains is not None
        found = _collected(self._chains, state, self._arrays)
        return jax.tree.map(lambda x: np.asarray(x)[:, None], found)

    @property
    def identity(self) -> Hashable:
        """A value that is equal for runs of the same program."""
        assert self._chains is not None
        return self._chains

    @property
    def capacity(self) -> int:
        """The largest number of draws of one call."""
        assert self._chains is not None
        return self._chains.capacity

    @property
    def most_steps(self) -> int:
        """The largest number of steps whose rows can all be fetched in advance."""
        ahead = [rows for rows in self._ahead() if rows.most_ahead < len(rows)]
        if not ahead:
            return 2**31
        each = self.num_chains * self.kernel.rows_per_draw
        return max(1, min(rows.most_ahead for rows in ahead) // each)

    def _ahead(self) -> list[HostRows]:
        found = find_rows((self.args, self.kwargs)).values()
        return [rows for rows in found if rows.mode == "prefetch"]

    def _fetch_ahead(self, state: Any, done: int, steps: int) -> None:
        """Fetch the rows of the following steps."""
        if not self._ahead() or not getattr(self.kernel, "knows_rows", False):
            return
        if self._streams is None:  # they never change
            one = self.num_chains == 1
            keys = state.index_key[None] if one else state.index_key
            designs = getattr(state.surrogate, "designs", None)
            self._streams = self.kernel, keys, designs
        kernel, keys, designs = self._streams
        sizes = dict(kernel.plates)
        by_plate: dict[str, np.ndarray] = {
            name: np.zeros(0, np.int32) for name in sizes
        }
        # in pieces of equal length, which compile once
        for start in range(done, done + steps, _PIECE):
            found = kernel.rows_ahead(keys, designs, jnp.int32(start), _PIECE)
            for name, rows in found.items():
                some = np.asarray(rows)[:, : done + steps - start]
                by_plate[name] = np.union1d(by_plate[name], some)

        def fetched(rows: HostRows) -> HostRows:
            mine = [by_plate[name] for name, size in sizes.items() if size == len(rows)]
            if rows.mode != "prefetch" or not mine:
                return rows
            return rows.with_rows(np.concatenate(mine).astype(np.int32))

        # all other arrays are in place already
        renewed = map_rows(fetched, self._static.join(self._arrays))
        self._arrays = [self._put(x) for x in Static.split(*renewed)[1]]

    def draw(
        self, state: Any, draws: int, steps: int, done: int
    ) -> tuple[Any, Callable]:
        """Start making draws; returns at once.

        :param state: the state of all chains.
        :param draws: the number of draws, at most :attr:`capacity`.
        :param steps: steps of the kernel per draw.
        :param done: steps that were made before.
        :return: the state after them, and a function that waits for the draws and
            returns the collected fields, with the axes draw and chain first.
        """
        assert self._chains is not None
        self._fetch_ahead(state, done, draws * steps)
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
    """A kernel that equals only itself; the reference protects its id from reuse."""

    kernel: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.kernel is other.kernel

    def __hash__(self) -> int:
        return id(self.kernel)


# NumPyro's kernels keep the arguments of `init` in functions that they create, and have
# no equality: each is started in a copy that is kept for as long as the kernel
_STARTED: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def _started(
    kernel: Any,
    num_warmup: int,
    keys: Array,
    init_params: Any,
    static: Static,
    arrays: list[Any],
) -> tuple[Any, Any]:
    """A started kernel of NumPyro, and the states of its chains."""
    # other data need another copy: some kernels keep results computed from the data
    given = (num_warmup, static, Seen.of(arrays), digest(_as_written(kernel)))
    if kernel not in _STARTED or _STARTED[kernel][0] != given:
        _STARTED[kernel] = given, copy.copy(kernel)
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


def _as_written(kernel: Any) -> Any:
    """The model of a kernel, the same one before a run and after it."""
    model = getattr(kernel, "written_model", kernel.model)
    return getattr(model, "as_written", model)


def _field(state: Any, name: str) -> Any:
    """A field of a state, or of one inside it.

    :raises ValueError: the state lacks it; the message names the one that was meant.
    """
    try:
        return attrgetter(name)(state)
    except AttributeError:
        if type(state).__getitem__ is tuple.__getitem__:  # of another package
            raise
        return state[name]  # as NumPyro's driver asks for it
