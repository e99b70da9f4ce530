"""An error of the compiler that the package avoids."""

from __future__ import annotations

import os
import warnings
from importlib.metadata import PackageNotFoundError, version

import jax
from jax._src import xla_bridge
from numpyro.util import find_stack_level

__all__ = ["avoid_wrong_sums"]

# XLA ends the process at a flag that it does not know, so that it is set for the
# versions that need it and no others
_WRONG = frozenset({"0.10.2"})
_OPTION = "xla_cpu_experimental_ynn_fusion_type"


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


def _jaxlib() -> str:
    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return ""
