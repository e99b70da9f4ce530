"""Cyclical samplers: a kernel whose steps are long, then short, and long again.

A cycle is ``cycle_length`` steps of the kernel inside,

    explore | noise, not collected | draw, draw, ..., draw | explore | ...

with steps that get shorter on the way. Only its last part is collected from: the first
draw of a cycle runs all that comes before it, so that what is returned is a draw of
the sampling part, always.
"""

from numpyro_minibatch.kernels.cyclical._kernel import Cyclical, CyclicalState
from numpyro_minibatch.kernels.cyclical._presets import (
    CyclicalMINT,
    CyclicalSGHMC,
    CyclicalSGLD,
)

__all__ = ["Cyclical", "CyclicalMINT", "CyclicalSGHMC", "CyclicalSGLD", "CyclicalState"]
