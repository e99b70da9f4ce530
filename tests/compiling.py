"""How processes that tests start compile: as fast as can be, for they run little."""

from __future__ import annotations

import os

import jax

# a program of XLA ends at a flag that it does not know: those known from JAX 0.7 on
_FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    _FAST += " --xla_cpu_use_fusion_emitters=false"


def quick_flags(devices: int | None = None) -> str:
    """``XLA_FLAGS`` of a new process, with as many devices of the processor."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_FAST}"
    if devices is not None:
        flags += f" --xla_force_host_platform_device_count={devices}"
    return flags
