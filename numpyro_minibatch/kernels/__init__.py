"""The kernels, each a short composition of parts from the other modules.

To write a kernel, subclass :class:`MinibatchKernel`.
"""

from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.contract import (
    Approximated,
    InPieces,
    KernelState,
    NoiseDriven,
    Pieces,
    Start,
    Tempered,
)
from numpyro_minibatch.kernels.amagold import AMAGOLD
from numpyro_minibatch.kernels.austerity import AusterityMH
from numpyro_minibatch.kernels.confidence import ConfidenceMH
from numpyro_minibatch.kernels.cyclical import (
    Cyclical,
    CyclicalMINT,
    CyclicalSGHMC,
    CyclicalSGLD,
)
from numpyro_minibatch.kernels.equi_energy import MINTEE
from numpyro_minibatch.kernels.langevin import SGHMC, SGLD, SGMCMC, SGNHT
from numpyro_minibatch.kernels.metropolis import MinibatchMH
from numpyro_minibatch.kernels.mh_minibatch import MHMinibatch
from numpyro_minibatch.kernels.mint import MINT
from numpyro_minibatch.kernels.replica_exchange import RELD, RENHD, ReplicaExchange

__all__ = [
    "AMAGOLD",
    "MINT",
    "MINTEE",
    "RELD",
    "RENHD",
    "SGHMC",
    "SGLD",
    "SGMCMC",
    "SGNHT",
    "Approximated",
    "AusterityMH",
    "ConfidenceMH",
    "Cyclical",
    "CyclicalMINT",
    "CyclicalSGHMC",
    "CyclicalSGLD",
    "InPieces",
    "KernelState",
    "MHMinibatch",
    "MinibatchKernel",
    "MinibatchMH",
    "NoiseDriven",
    "Pieces",
    "ReplicaExchange",
    "Start",
    "Tempered",
]
