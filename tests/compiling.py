"""How tests compile: as fast as can be, for they run little.

``python tests/compiling.py`` prints the flags of `make test`.
"""

from __future__ import annotations

import os

# A program of XLA ends at a flag that it does not know: this one is known from JAX 0.7
# on. Fusion emitters stay on: without them a third of the compiler's time is saved, and
# a program whose fusions repeat each other compiles without end.
_ONE_THREAD = "--xla_cpu_parallel_codegen_split_count=1"


def flags(level: int) -> str:
    """Flags of XLA.

    :param level: how much LLVM optimises, from 0.
    """
    return f"--xla_backend_optimization_level={level} {_ONE_THREAD}"


def quick_flags(devices: int | None = None) -> str:
    """``XLA_FLAGS`` of a new process, with as many devices of the processor."""
    found = f"{os.environ.get('XLA_FLAGS', '')} {flags(0)}"
    if devices is not None:
        found += f" --xla_force_host_platform_device_count={devices}"
    return found


if __name__ == "__main__":
    print(flags(1))
