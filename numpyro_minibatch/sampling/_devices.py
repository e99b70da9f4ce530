"""The division of chains and rows among devices and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from numpyro_minibatch._internal.checks import check_divides, describe
from numpyro_minibatch._internal.passes import AXIS

__all__ = ["CHAINS", "Share"]

CHAINS = "chains"  # the axis of a program for its chains
ROWS = "rows"  # the axis of a mesh for the rows of a pass


@dataclass(frozen=True)
class Share:
    """The part of a run that belongs to this process.

    Chains are independent, so that processes do not wait for each other while they
    draw: each runs its own program on its own devices.

    :param first: its first chain.
    :param count: the number of its chains.
    :param mesh: its own devices, with an axis of chains and one of rows; ``None`` for
        the first device alone.
    :param setup: the devices of all processes, for the passes before the run; ``None``
        if there is only one.
    :param process: the number of this process.
    :param processes: the number of processes.
    """

    first: int
    count: int
    mesh: Mesh | None = None
    setup: Mesh | None = None
    process: int = 0
    processes: int = 1

    @classmethod
    def of(cls, num_chains: int, mesh: Any) -> Share:
        """Divide the chains evenly among the devices of a mesh.

        :param num_chains: the number of chains.
        :param mesh: a mesh with an axis of chains, one called ``"rows"``, or both; or
            ``None``.
        :raises TypeError: ``mesh`` is not such a mesh.
        :raises ValueError: the chains cannot be divided evenly, or none of the devices
            belongs to this process.
        """
        if mesh is None:
            return cls(0, num_chains)
        devices = _chains_and_rows(mesh)
        check_divides("sample", len(devices), num_chains, "chains", "num_chains")
        owners = list(dict.fromkeys(d.process_index for d in devices.flat))
        here = jax.process_index()
        if here not in owners:
            raise ValueError(
                f"sample(mesh=...): none of its devices belongs to process {here}. "
                'Write Mesh(jax.devices(), ("chains",)), the devices of all processes.'
            )
        if any(d.process_index != row[0].process_index for row in devices for d in row):
            raise ValueError(
                "sample(mesh=...): the devices along the axis of rows must belong to "
                "one process. Write Mesh(numpy.reshape(jax.devices(), "
                f'({len(owners)}, -1)), ("chains", "rows")).'
            )
        places = [k for k, row in enumerate(devices) if row[0].process_index == here]
        if places != list(range(places[0], places[0] + len(places))):
            raise ValueError(
                "sample(mesh=...): the devices of a process must be next to each "
                'other. Write Mesh(jax.devices(), ("chains",)).'
            )
        each = num_chains // len(devices)
        own, setup = devices[places], None
        alone = own.size == 1 and own[0, 0] == jax.local_devices()[0]
        if devices.size > 1:
            setup = Mesh(devices.ravel(), (AXIS,))
        return cls(
            each * places[0],
            each * len(places),
            None if alone else Mesh(own, (CHAINS, AXIS)),
            setup,
            owners.index(here),
            len(owners),
        )

    @property
    def devices(self) -> dict[str, int]:
        """The numbers of this process's devices for chains and for rows."""
        chains, rows = self.mesh.devices.shape if self.mesh is not None else (1, 1)
        return {"chains": chains, "rows": rows}

    def slice(self, of_chains: Any) -> Any:
        """The part of a tree of arrays that have a leading axis of chains.

        :param of_chains: the tree.
        """
        own = slice(self.first, self.first + self.count)
        return jax.tree.map(lambda x: x[own], of_chains)


def _chains_and_rows(mesh: Any) -> np.ndarray:
    """The devices of a mesh, with the axes of chains and of rows."""
    names = mesh.axis_names if isinstance(mesh, Mesh) else ()
    if len(names) == 1:
        devices = mesh.devices[None] if ROWS in names else mesh.devices[:, None]
    elif len(names) == 2 and ROWS in names:
        devices = mesh.devices if names[1] == ROWS else mesh.devices.T
    else:
        raise TypeError(
            "sample(mesh=...) must be a jax.sharding.Mesh with one axis, such as "
            'Mesh(jax.devices(), ("chains",)) or Mesh(jax.devices(), ("rows",)), or '
            f'with both, ("chains", "rows"), got {describe(mesh)}.'
        )
    return devices
