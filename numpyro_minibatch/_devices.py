"""Which device draws which chains, and which process of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from numpyro_minibatch._checks import check_mesh

__all__ = ["Share"]


@dataclass(frozen=True)
class Share:
    """The part of a run that this process does.

    Chains do not need each other, so processes do not wait for each other: each runs a
    program of its own on the devices that it has.

    :param first: its first chain.
    :param count: how many chains it has.
    :param mesh: its own devices; ``None`` for the first one alone.
    :param process: which process it is.
    :param processes: how many take part.
    """

    first: int
    count: int
    mesh: Mesh | None = None
    process: int = 0
    processes: int = 1

    @classmethod
    def of(cls, num_chains: int, mesh: Any) -> Share:
        """Divide the chains evenly among the devices of a mesh.

        :param num_chains: the number of chains.
        :param mesh: a mesh with one axis, or ``None``.
        :raises TypeError: it is no such mesh.
        :raises ValueError: the chains cannot be divided evenly, or none of the devices
            belongs to this process.
        """
        if mesh is None:
            return cls(0, num_chains)
        check_mesh("sample", mesh, num_chains, "chains", "num_chains")
        devices = list(mesh.devices.flat)
        owners = list(dict.fromkeys(d.process_index for d in devices))
        here = jax.process_index()
        if here not in owners:
            raise ValueError(
                f"sample(mesh=...): none of its devices belongs to process {here}. "
                'Write Mesh(jax.devices(), ("chains",)), the devices of all processes.'
            )
        places = [k for k, d in enumerate(devices) if d.process_index == here]
        if places != list(range(places[0], places[0] + len(places))):
            raise ValueError(
                "sample(mesh=...): the devices of a process must stand side by side. "
                'Write Mesh(jax.devices(), ("chains",)).'
            )
        each = num_chains // len(devices)
        own = None
        alone = len(places) == 1 and devices[places[0]] == jax.local_devices()[0]
        if not alone and each * len(places) > 1:
            own = Mesh(np.array([devices[k] for k in places]), mesh.axis_names)
        return cls(
            each * places[0],
            each * len(places),
            own,
            owners.index(here),
            len(owners),
        )

    def slice(self, of_chains: Any) -> Any:
        """The part of a tree of arrays that have a leading axis of chains.

        :param of_chains: the tree.
        """
        own = slice(self.first, self.first + self.count)
        return jax.tree.map(lambda x: x[own], of_chains)
