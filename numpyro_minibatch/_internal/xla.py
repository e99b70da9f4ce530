"""Options of the compiler: an error to avoid, and programs that compile sooner."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax._src import xla_bridge
from numpyro.util import find_stack_level

__all__ = ["avoid_wrong_sums", "used_rarely"]

# XLA ends the process at a flag that it does not know, so that it is set for the
# versions that need it and no others
_WRONG = frozenset({"0.10.2"})
_OPTION = "xla_cpu_experimental_ynn_fusion_type"
# The emitters of fusions that are newer take up to twice as long to compile: 2.7 s
# instead of 1.4 s for the derivatives of integrals. Later versions have no others.
_SOONER: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}


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


@cache
def used_rarely() -> dict[str, Any]:
    """Options of ``jax.jit`` for programs that a run calls a few times only.

    Their compilation is what a user waits for. The options depend on the version of
    JAX, which refuses those that it does not know.
    """
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, compiler_options=_SOONER)()
    except Exception:  # the class depends on the version, too
        return {}
    return _SOONER


def _jaxlib() -> str:
    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return ""
