"""How tests compile: quickly, because most of their programs run once.

``python tests/compiling.py`` prints the flags of `make test`, and with ``--optimised``
those of the tests whose programs run for long.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

# XLA ends the process at a flag that it does not know; these are known from JAX 0.7 on
_LEVEL = "--xla_backend_optimization_level={}"
_ONE_THREAD = "--xla_cpu_parallel_codegen_split_count=1"
# The older emitters take a third of the time of those that XLA has by default. Some of
# what they emit (for a ladder of many chains) LLVM optimises without end.
_OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
_HAS_OLDER = tuple(map(int, version("jax").split(".")[:2])) < (0, 11)

# options of a program that a test compiles as a user's process does
AS_USERS: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
if _HAS_OLDER:
    AS_USERS["xla_cpu_use_fusion_emitters"] = True


def flags(optimised: bool = False) -> str:
    """Flags of XLA.

    :param optimised: whether programs run for longer than they compile.
    """
    if optimised:
        return f"{_LEVEL.format(1)} {_ONE_THREAD}"
    found = f"{_LEVEL.format(0)} {_ONE_THREAD}"
    return f"{found} {_OLDER_EMITTERS}" if _HAS_OLDER else found


def quick_flags(devices: int | None = None) -> str:
    """``XLA_FLAGS`` of a new process, with as many devices of the processor."""
    found = f"{os.environ.get('XLA_FLAGS', '')} {flags()}"
    if devices is not None:
        found += f" --xla_force_host_platform_device_count={devices}"
    return found


if __name__ == "__main__":
    print(flags(optimised="--optimised" in sys.argv[1:]))
