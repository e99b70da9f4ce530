"""Passes over all rows, in chunks that are divided among devices.

Everything that reads all rows uses this module: the centre and the sums of a control
variate, the scores of its rows, full batches and exact decisions. If the program that
is being traced has an axis of devices called :data:`AXIS`, each device processes its
part of the chunks, and the sums are added over the devices. Otherwise one device
processes all chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from numpyro_minibatch.host_rows import map_rows

__all__ = [
    "AXIS",
    "Chunks",
    "agreed",
    "chunk_of",
    "everywhere",
    "gathered",
    "num_devices",
    "scan_shared",
    "setup_devices",
    "shared",
    "using",
    "which_device",
]

AXIS = "rows of a pass"  # of a mesh; a name that no other axis is likely to have
_LEAST = 1024  # rows of a chunk, however large a row is
# The same for large rows. Smaller chunks are not faster, but passes over some rows fill
# whole chunks, and these rows are few if a row is large.
_LEAST_LARGE, _LARGE = 512, 128


def chunk_of(rows: int, row_size: int) -> int:
    """The number of rows of a chunk that keeps its values in the processor's cache.

    :param rows: for rows of one likelihood each.
    :param row_size: likelihoods of a row.
    """
    if row_size <= 1:
        return rows
    least = _LEAST if row_size < _LARGE else _LEAST_LARGE
    return min(rows, max(least, rows // row_size))


def num_devices() -> int:
    """The number of devices that share passes in the program being traced."""
    try:
        return int(jax.lax.psum(1, AXIS))
    except NameError:  # there is no such axis
        return 1


def which_device() -> ArrayLike:
    """The number of the device among those that share a pass."""
    return jax.lax.axis_index(AXIS) if num_devices() > 1 else 0


def gathered(found: Any) -> Any:
    """The results of all devices, with a leading axis of devices.

    :param found: a tree of arrays.
    """
    if num_devices() == 1:
        return jax.tree.map(lambda x: x[None], found)
    return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS), found)


def agreed(found: Any) -> Any:
    """The result of the first device, on all devices.

    All devices compute the same numbers, but some hardware does not add in the same
    order every time, and devices whose decisions differ would diverge.

    :param found: a tree of arrays; integers and keys are the same anyway.
    """
    if num_devices() == 1:
        return found
    leaves, treedef = jax.tree.flatten(found)
    places = [k for k, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    first = which_device() == 0
    own = [jnp.where(first, leaves[k], 0) for k in places]
    for place, leaf in zip(places, jax.lax.psum(own, AXIS), strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(treedef, leaves)


def scan_shared(fn: Callable, carry: Any, items: Any) -> tuple[Any, Any]:
    """A ``lax.scan`` whose steps are divided among the devices.

    :param fn: as for ``lax.scan``; its carry must be the same after any step.
    :param carry: the initial carry.
    :param items: a tree of arrays whose leading axis is that of the steps.
    :return: the carry, and the outputs of all steps, on every device.
    """
    devices = num_devices()
    if devices == 1:
        return jax.lax.scan(fn, carry, items)
    count = len(jax.tree.leaves(items)[0])
    each = -(-count // devices)
    # the last device may repeat some steps, which are cut off
    own = jnp.minimum(which_device() * each + jnp.arange(each), count - 1)
    mine = jax.tree.map(lambda x: jnp.asarray(x)[own], items)
    carry, found = jax.lax.scan(fn, carry, mine)
    whole = jax.tree.map(
        lambda x: jax.lax.all_gather(x, AXIS, tiled=True)[:count], found
    )
    return carry, whole


class Chunks(NamedTuple):
    """All rows of some plates, in chunks of one width, the last ones masked.

    Chunks of neighbouring rows belong to one device, and all devices have the same
    number of chunks.

    :param plates: the number of rows of each plate.
    :param widths: the rows of a chunk of each plate.
    :param number: the number of chunks on all devices together.
    """

    plates: Mapping[str, int]
    widths: Mapping[str, int]
    number: int

    @classmethod
    def of(
        cls,
        plates: Mapping[str, int],
        most: Mapping[str, int],
        devices: int | None = None,
    ) -> Chunks:
        """Divide the rows evenly.

        :param plates: the number of rows of each plate.
        :param most: the most rows of a chunk of each plate.
        :param devices: how many share a pass; by default those of the program that is
            being traced.
        """
        devices, widths, number = devices or num_devices(), {}, 1
        for name, size in plates.items():
            share = -(-size // devices)
            chunks = -(-share // most[name])
            widths[name] = -(-share // chunks)
            number = max(number, chunks)
        return cls(dict(plates), widths, devices * number)

    def at(self, i: ArrayLike) -> tuple[dict[str, Array], dict[str, Array]]:
        """The rows of the ``i``-th chunk, and which of them are new.

        :param i: the number of the chunk; it may be traced.
        """
        indices: dict[str, Array] = {}
        masks: dict[str, Array] = {}
        for name, width in self.widths.items():
            positions = i * width + jnp.arange(width, dtype=jnp.int32)
            indices[name] = jnp.minimum(positions, self.plates[name] - 1)
            masks[name] = jnp.less(positions, self.plates[name])
        return indices, masks

    def sum(
        self, of_chunk: Callable[[Array], Any], zeros: Any, until: Array | None = None
    ) -> Any:
        """The sum of the results of a function for all chunks.

        :param of_chunk: a function of the number of a chunk.
        :param zeros: the sum of no chunks.
        :param until: the number of the first chunk that is left out, with all after
            it; ``None`` for none.
        """
        devices = num_devices()
        each = self.number // devices
        first = jnp.int32(which_device() * each)

        def add(j: Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, of_chunk(first + j))

        own = each if until is None else jnp.clip(until - first, 0, each)
        total = jax.lax.fori_loop(0, own, add, zeros)
        return total if devices == 1 else jax.lax.psum(total, AXIS)

    def map(self, of_chunk: Callable[[Array], Any], until: Array | None = None) -> Any:
        """The results of a function for all chunks, stacked.

        :param of_chunk: a function of the number of a chunk.
        :param until: as for :meth:`sum`; results of chunks that are left out are zero.
        """
        numbers = jnp.arange(self.number, dtype=jnp.int32)
        if until is None:
            return scan_shared(lambda _, i: (None, of_chunk(i)), None, numbers)[1]
        # the shapes and the loop use one trace, which takes long for derivatives
        of_chunk = jax.jit(of_chunk, inline=True)
        shapes = jax.eval_shape(of_chunk, numbers[0])

        def zeros(i: Array) -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def step(_: None, i: Array) -> tuple[None, Any]:
            return None, jax.lax.cond(i < until, of_chunk, zeros, i)

        return scan_shared(step, None, numbers)[1]

    def cut(self, name: str, rows: Array) -> Array:
        """Numbers of all rows of a plate as chunks; those beyond the last are zero.

        :param name: the plate.
        :param rows: shape ``(N,)``.
        """
        width = self.widths[name]
        pad = self.number * width - self.plates[name]
        return jnp.pad(rows, (0, pad)).reshape(self.number, width)

    def joined(self, name: str, chunks: Array) -> Array:
        """The inverse of :meth:`cut`: numbers of all rows from those of chunks."""
        return chunks.reshape(-1)[: self.plates[name]]


# before a run: separate programs, for all devices ------------------------------------

_SETUP: ContextVar[Mesh | None] = ContextVar("devices of a set-up", default=None)


@contextmanager
def using(mesh: Mesh | None) -> Iterator[None]:
    """Use these devices for the passes of kernels' set-ups.

    :param mesh: the devices, with the one axis :data:`AXIS`. They may include those of
        other processes, which must then make the same passes.
    """
    token = _SETUP.set(mesh)
    try:
        yield
    finally:
        _SETUP.reset(token)


def setup_devices(alike: bool) -> Mesh | None:
    """The devices for a set-up; ``None`` for the first device alone.

    :param alike: whether the set-up is the same in every process; if not, a process
        uses only its own devices.
    """
    mesh = _SETUP.get()
    if mesh is None or alike or not mesh.is_multi_process:
        return mesh
    own = mesh.local_devices
    return Mesh(np.array(own), mesh.axis_names) if len(own) > 1 else None


def everywhere(arguments: Any, mesh: Mesh) -> tuple[Any, Any]:
    """A model's arguments with their arrays on the first device, and on every one.

    :param arguments: the positional ones and the others.
    :param mesh: the devices; each process puts the arrays on its own.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    devices = list(mesh.local_devices)

    def on_all(x: Any) -> Any:
        if not isinstance(x, np.ndarray | Array):
            return x
        if isinstance(x, Array) and x.sharding == whole:
            return x
        parts = [jax.device_put(x, device) for device in devices]
        return jax.make_array_from_single_device_arrays(x.shape, whole, parts)

    def on_first(x: Any) -> Any:
        return x.addressable_data(0) if isinstance(x, Array) else x

    placed = map_rows(lambda rows: rows.on(devices, whole), arguments)
    placed = jax.tree.map(on_all, placed)
    return jax.tree.map(on_first, placed), placed


def shared(
    fn: Callable, mesh: Mesh | None, options: dict[str, Any] | None = None
) -> Callable:
    """Compile a function whose passes are divided among some devices.

    :param fn: a function of trees of arrays; the first one is on every device.
    :param mesh: the devices; ``None`` for the default device.
    :param options: those of the compiler.
    :return: the function; with a mesh it returns NumPy arrays.
    """
    if mesh is None:
        return jax.jit(fn, compiler_options=options)
    # all devices have all arrays, and compute the same result
    whole = PartitionSpec()
    on_each = jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False),
        compiler_options=options,
    )

    def call(arrays: Any, *rest: Any) -> Any:
        # plain numbers are the same for every process
        found = on_each(arrays, *jax.tree.map(np.asarray, rest))
        return jax.tree.map(np.asarray, found)

    return call
