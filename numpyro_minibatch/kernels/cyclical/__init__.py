"""Cyclical samplers: an inner kernel whose step sizes fall and rise in cycles.

A cycle is ``cycle_length`` steps of the inner kernel,

    explore | sample, not collected | draw, draw, ..., draw | explore | ...

with step sizes that decrease along the way. Draws are collected only from the last part
of a cycle. The first draw of a cycle runs all steps that precede it, so that every
returned draw belongs to the sampling part.
"""

from numpyro_minibatch.kernels.cyclical._kernel import Cyclical, CyclicalState
from numpyro_minibatch.kernels.cyclical._presets import (
    CyclicalMINT,
    CyclicalSGHMC,
    CyclicalSGLD,
)

__all__ = ["Cyclical", "CyclicalMINT", "CyclicalSGHMC", "CyclicalSGLD", "CyclicalState"]
