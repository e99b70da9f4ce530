"""Options of the compiler: an error to avoid, and one that some programs need."""

from __future__ import annotations

import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax._src import xla_bridge
from numpyro.util import find_stack_level

__all__ = ["avoid_wrong_sums", "older_emitters"]

# XLA ends the process at a flag that it does not know, so that it is set for the
# versions that need it and no others
_WRONG = frozenset({"0.10.2"})
_OPTION = "xla_cpu_experimental_ynn_fusion_type"
_OLDER: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}


def avoid_wrong_sums() -> None:
    """Set a flag of XLA without which jaxlib 0.10.2 computes wrong sums on processors.

    Where two sums over the last axis are combined and one of them is of an array that
    is broadcast, as in ``sum(v * c, -1) - sum(c * c, -1)`` for ``v`` of shape (N, 2)
    and ``c`` of shape (chains, N, 2), that version returns wrong numbers without an
    error if the result has more than some ten thousand entries [1]_. The log density of
    ``dist.Beta`` has this form: with 100,000 rows and four chains that are vectorised,
    three quarters of the densities are wrong, by up to 6. Flags are read when JAX makes
    its first array.

    Warns (``UserWarning``) if that has happened already.

    References
    ----------
    .. [1] https://github.com/jax-ml/jax/issues/39103
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _jaxlib() not in _WRONG or _OPTION in flags:
        return
    if not xla_bridge.backends_are_initialized():
        os.environ["XLA_FLAGS"] = f"{flags} --{_OPTION}=".strip()
    elif jax.default_backend() == "cpu":
        warnings.warn(
            f"jaxlib {_jaxlib()} computes some sums of large arrays wrongly on CPUs "
            "(https://github.com/jax-ml/jax/issues/39103), and log densities with them."
            " Import numpyro_minibatch before JAX makes its first array, set "
            f"XLA_FLAGS=--{_OPTION}= before Python starts, or install another version: "
            'pip install "jax!=0.10.2".',
            UserWarning,
            stacklevel=find_stack_level(),
        )


def older_emitters() -> dict[str, Any]:
    """Options of ``jax.jit`` with which passes over integrals compile sooner.

    JAX below 0.11 has two code generators for fusions on processors. With the older one
    the derivatives of rows that are integrals take 1.4 s to compile instead of 2.7 s,
    and their values 40 ms instead of 60 to compute (100,000 groups). Gradients of other
    rows take up to three times as long with it, so that programs of many steps do not
    use it. Later versions do not know the option, and refuse it.
    """
    numbers = _jaxlib().split(".")[:2]
    known = all(x.isdecimal() for x in numbers) and tuple(map(int, numbers)) < (0, 11)
    return _OLDER if known and jax.default_backend() == "cpu" else {}


def _jaxlib() -> str:
    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return ""
