"""Shared code of kernels that run another kernel."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from numpyro_minibatch._internal.static import Given
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.driver import DrivenKernel
from numpyro_minibatch.target import Slices, Target

__all__ = ["OuterKernel"]


class OuterKernel(DrivenKernel):
    """Base class of the kernels that run another one inside.

    :param inner: the kernel inside.
    """

    def __init__(self, inner: MinibatchKernel) -> None:
        self._inner = inner

    @property
    def inner(self) -> MinibatchKernel:
        """The kernel inside."""
        return self._inner

    @property
    def model(self) -> Any:
        """The NumPyro model."""
        return self._inner.model

    @property
    def in_full_precision(self) -> bool:
        """Whether a step of the kernel inside multiplies in full precision."""
        return self._inner.in_full_precision

    @property
    def data(self) -> Given | None:
        """The data that the states belong to, once the kernel has been started."""
        return self._inner.data

    def compiles_for_data(self) -> None:
        """Note that a program is being compiled that takes the data as arguments."""
        self._inner.compiles_for_data()

    @property
    def written_model(self) -> Any:
        """The model as the user wrote it, the same before and after a run."""
        return self._inner.written_model

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
    def layout(self) -> Layout:
        """The model's sites and data plates, once the data have been seen."""
        return self._inner.layout

    @property
    def pilot(self) -> dict[str, Any]:
        """The measurements of the control variate's set-up; empty without one."""
        return self._inner.pilot

    @property
    def slices(self) -> Slices | None:
        """The rows among the model's arguments, if the model does not index them."""
        return self._inner.slices

    @property
    def frozen(self) -> dict[str, Any]:
        """Values of the model's ``param`` sites, fixed at setup."""
        return self._inner.frozen

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define the kernel, for records."""
        return {
            **self._inner.settings,
            **self._recorded_settings(),
            "inner": type(self._inner).__name__,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`~numpyro_minibatch.diagnose` needs."""
        return self._inner.facts

    def snapshot(self) -> Self:
        """A copy in the current state, which later calls of ``init`` do not change.

        ``copy.copy`` returns a kernel that has not been started.
        """
        other = super().snapshot()
        other._inner = self._inner.snapshot()
        return other

    def _not_started(self) -> Self:
        """A copy without arrays that is independent of this kernel."""
        other = copy.copy(self)
        other._inner = copy.copy(self._inner)
        return other

    def make_target(self, args: tuple, kwargs: Mapping[str, Any]) -> Target:
        """The target of the model with these arguments."""
        return self._inner.make_target(args, kwargs)

    def postprocess_fn(self, args, kwargs):  # type: ignore[no-untyped-def]
        """A function from a position to the model's constrained values."""
        return self._inner.postprocess_fn(args, kwargs)
