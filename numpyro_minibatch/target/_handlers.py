"""Effect handlers that give a model's plates their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_minibatch.host_rows import HostRows
from numpyro_minibatch.target._arguments import Slices
from numpyro_minibatch.target._contract import Indices

__all__ = ["AllRows", "RowFrames", "SetDeterministic", "Subsample"]


class RowFrames(Messenger):
    """Mark a batch dimension of sites in no plate as the rows of one."""

    def __init__(self, fn: Callable, slices: Slices, indices: Indices) -> None:
        self.frames = {
            site: CondIndepStackFrame(plate, dim, len(indices[plate]))
            for site, plate, dim in slices.sites
        }
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.frames:
            frame = self.frames[msg["name"]]
            msg["cond_indep_stack"] = [*msg["cond_indep_stack"], frame]


class Subsample(Messenger):
    """Set the rows of each data plate, whatever its own ``subsample_size``.

    The plate reads its subsample size back from the message after the handlers
    ran, so setting both keeps its scale factor and its shapes consistent.

    :param fn: the model.
    :param indices: the rows of each data plate.
    :param given: plates for which the model received only these rows, which are then
        all rows that it sees.
    """

    def __init__(
        self, fn: Callable | None, indices: Indices, given: Collection[str] = ()
    ) -> None:
        self.indices = {
            name: jnp.arange(len(i), dtype=jnp.int32) if name in given else i
            for name, i in indices.items()
        }
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate" and msg["name"] in self.indices:
            indices = self.indices[msg["name"]]
            msg["value"] = indices
            msg["args"] = (msg["args"][0], len(indices))
        elif msg["type"] == "subsample":
            value, event_dim = msg["value"], msg["kwargs"]["event_dim"]
            if isinstance(value, HostRows) and value.in_place is not None:
                value = value.in_place  # as for data in memory
            found = _rows_in_plates(value, event_dim, self.indices)
            if found is not None:
                msg["value"] = found
                msg["kwargs"] = {"event_dim": None}  # plates subsample no more


class AllRows(Messenger):
    """Give plates with a ``subsample_size`` all of their rows, in their order.

    :param fn: the model, kept as ``as_written``.
    :param plates: the plates and their numbers of rows.
    """

    def __init__(self, fn: Callable, plates: Mapping[str, int]) -> None:
        self.as_written = fn
        self.plates = dict(plates)
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate" and msg["name"] in self.plates:
            size = msg["args"][0]
            # numbers, by which NumPy arrays can be indexed while JAX traces the model
            with jax.ensure_compile_time_eval():
                msg["value"], msg["args"] = jnp.arange(size), (size, size)


def _rows_in_plates(rows: Any, event_dim: int, drawn: Collection[str]) -> Any:
    """The result of ``numpyro.subsample(rows, event_dim)`` in the enclosing plates.

    NumPyro's plates check each index again, to fill rows that are out of range with
    NaN. A batch has no such rows, and for wide rows the check costs nearly as much as
    reading them.

    :param drawn: plates whose indices were drawn; even indices of all rows may be in
        another order.
    :return: the rows; ``None`` if an array does not fit a plate, which then raises.
    """
    value, shape = rows, jnp.shape(rows)
    plates = [p for p in numpyro.primitives._PYRO_STACK if isinstance(p, numpyro.plate)]
    # the plate of the first axis comes first; after that the rows are in memory
    for plate in sorted(plates, key=lambda plate: plate.dim):
        axis = plate.dim - event_dim + len(shape)
        if axis < 0 or shape[axis] == 1:
            continue
        if shape[axis] != plate.size:
            if not isinstance(rows, HostRows):
                return None
            raise ValueError(
                f"numpyro.subsample(x, event_dim={event_dim}) in plate "
                f"{plate.name!r} of {plate.size} rows got HostRows of shape "
                f"{shape}, which have {shape[axis]} along the plate's axis. "
                "Give the number of axes of one row as event_dim."
            )
        if axis == 0 and isinstance(value, HostRows):
            value = value[plate._indices]
        elif plate.subsample_size < plate.size or plate.name in drawn:
            if isinstance(value, HostRows):
                value = value[jnp.arange(len(value))]
            where = (slice(None),) * axis + (plate._indices,)
            value = jnp.asarray(value).at[where].get(mode="promise_in_bounds")
    return value


class SetDeterministic(Messenger):
    """Set the values of deterministic sites, so that later sites depend on them."""

    def __init__(self, fn: Callable, values: Mapping[str, Array]) -> None:
        self.values = values
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "deterministic" and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
