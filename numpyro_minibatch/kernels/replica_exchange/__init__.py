"""Replica exchange: one kernel at several temperatures, with swaps of positions.

A pass decides for each pair of neighbouring rungs,

    swap  iff  test((1 / T_j - 1 / T_k) * log_ratio(likelihood, z_j, z_k, batch))

with both positions on one batch. Between passes, the inner kernel runs at each
temperature.
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
