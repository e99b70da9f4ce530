"""How tests compile: as fast as can be, for they run little.

``python tests/compiling.py`` prints the flags of `make test`.
"""

from __future__ import annotations

import os
from importlib.metadata import version

# a program of XLA ends at a flag that it does not know: those known from JAX 0.7 on
_ONE_THREAD = "xla_cpu_parallel_codegen_split_count"
_EMITTERS = "xla_cpu_use_fusion_emitters"  # a third of the compiler's time
_HAS_EMITTERS = tuple(map(int, version("jax").split(".")[:2])) < (0, 11)

# Options of a program that is compiled as those of users are. Few programs need it:
# without fusion emitters, one whose fusions repeat each other compiles without end.
AS_USERS: dict[str, bool] = {_EMITTERS: True} if _HAS_EMITTERS else {}


def flags(level: int) -> str:
    """Flags for the installed JAX.

    :param level: how much LLVM optimises, from 0.
    """
    found = f"--xla_backend_optimization_level={level} --{_ONE_THREAD}=1"
    return f"{found} --{_EMITTERS}=false" if _HAS_EMITTERS else found


def quick_flags(devices: int | None = None) -> str:
    """``XLA_FLAGS`` of a new process, with as many devices of the processor."""
    found = f"{os.environ.get('XLA_FLAGS', '')} {flags(0)}"
    if devices is not None:
        found += f" --xla_force_host_platform_device_count={devices}"
    return found


if __name__ == "__main__":
    print(flags(1))
