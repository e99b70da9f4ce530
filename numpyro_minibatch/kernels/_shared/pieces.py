"""Shared code of kernels whose draws can be made in pieces of fewer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

from jax import Array

__all__ = ["SteppedKernel"]


class SteppedKernel:
    """A kernel with a number of steps, and step sizes that may follow a schedule."""

    num_steps: int
    _step_schedule: Callable[[Array], Any] | None = None

    def with_num_steps(self, num_steps: int) -> Self:
        """The same kernel with draws of another number of steps.

        :param num_steps: steps of a draw.
        """
        other = copy.copy(self)
        other.num_steps = num_steps
        return other

    def with_step_schedule(self, factor: Callable[[Array], Any]) -> Self:
        """The same kernel with step sizes that change with the number of steps.

        :param factor: from the number of a step to the factor on its step size.
        """
        other = copy.copy(self)
        other._step_schedule = factor
        return other
