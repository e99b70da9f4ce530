"""Replica exchange: one kernel at several temperatures, whose positions are swapped.

Every pass is one line of algebra for each pair of neighbouring rungs,

    swap  iff  test((1 / T_j - 1 / T_k) * log_ratio(likelihood, z_j, z_k, batch))

with both positions on one batch, and the inner kernel at each temperature in between.
"""

from numpyro_minibatch.kernels.replica_exchange._kernel import (
    ReplicaExchange,
    ReplicaExchangeState,
)
from numpyro_minibatch.kernels.replica_exchange._presets import RELD, RENHD

__all__ = [
    "RELD",
    "RENHD",
    "ReplicaExchange",
    "ReplicaExchangeState",
]
