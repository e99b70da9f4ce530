"""What kernels share that drive another kernel: they read its model, and sample it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any

from numpyro.infer.mcmc import MCMCKernel

from numpyro_minibatch.kernels._base import MinibatchKernel, warn_of_constants
from numpyro_minibatch.target import Target

__all__ = ["OuterKernel"]


class OuterKernel(MCMCKernel):
    """Base class of the kernels that run another one inside.

    :param inner: the kernel inside.
    """

    def __init__(self, inner: MinibatchKernel) -> None:
        self._inner = inner
        self._num_warmup = 0
        self._sample_fn: Any = None

    @property
    def inner(self) -> MinibatchKernel:
        """The kernel inside."""
        return self._inner

    @property
    def model(self) -> Any:
        """The NumPyro model."""
        return self._inner.model

    @property
    def sample_field(self) -> str:
        """The field of the state that holds the unconstrained position."""
        return "z"

    @property
    def temperature(self) -> float:
        """The temperature of the draws."""
        return self._inner.temperature

    @property
    def plates(self) -> dict[str, int]:
        """The number of rows of each data plate, once the kernel has seen the data."""
        return self._inner.plates

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The rows of one draw of each data plate, once the data have been seen."""
        return self._inner.batch_sizes

    @property
    def pilot(self) -> dict[str, Any]:
        """What the set-up of a control variate measured; empty without one."""
        return self._inner.pilot

    @property
    def frozen(self) -> dict[str, Any]:
        """Values of the model's ``param`` sites, fixed at setup."""
        return self._inner.frozen

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define what the kernel does, for records."""
        return {**self._inner.settings, "inner": type(self._inner).__name__}

    @property
    def facts(self) -> dict[str, Any]:
        """What :func:`~numpyro_minibatch.diagnose` has to know."""
        return self._inner.facts

    @abstractmethod
    def _identity(self) -> tuple[Hashable, ...]:
        """Everything the constructor was given, hashable."""

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, OuterKernel)
            and self._identity() == other._identity()
            and self._num_warmup == other._num_warmup
        )

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def __getstate__(self) -> dict[str, Any]:
        # the driver initialises a kernel without a _sample_fn again
        return {**self.__dict__, "_sample_fn": None}

    def _make_target(self, args: tuple, kwargs: Mapping[str, Any]) -> Target:
        return self._inner._make_target(args, kwargs)

    def sample(self, state, model_args, model_kwargs):  # type: ignore[no-untyped-def]
        """One draw from the current state."""
        assert self._sample_fn is not None
        warn_of_constants(type(self).__name__, state, (model_args, model_kwargs))
        target = self._make_target(model_args, model_kwargs or {})
        return self._sample_fn(target, state)

    def postprocess_fn(self, args, kwargs):  # type: ignore[no-untyped-def]
        """A function from a position to the model's constrained values."""
        return self._inner.postprocess_fn(args, kwargs)
