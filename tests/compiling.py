"""How tests compile: quickly, because most of their programs run once.

``python tests/compiling.py`` prints the flags of `make test`.
"""

from __future__ import annotations

import os
from importlib.metadata import version

# XLA ends the process at a flag that it does not know; these are known from JAX 0.7 on.
# LLVM optimises nothing: most of a test's time would be LLVM's.
_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# The older emitters take a third of the time of those that XLA has by default. With them
# LLVM never ends some loops (a ladder of many chains is one) from level 1 on.
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")

# options of a program that a test compiles as a user's process does
AS_USERS = {
    "xla_backend_optimization_level": 3,
    **({"xla_cpu_use_fusion_emitters": True} if len(_FLAGS) == 3 else {}),
}


def flags() -> str:
    """Flags of XLA."""
    return " ".join(_FLAGS)


def quick_flags(devices: int | None = None) -> str:
    """``XLA_FLAGS`` of a new process, with as many devices of the processor."""
    found = f"{os.environ.get('XLA_FLAGS', '')} {flags()}"
    if devices is not None:
        found += f" --xla_force_host_platform_device_count={devices}"
    return found


if __name__ == "__main__":
    print(flags())
