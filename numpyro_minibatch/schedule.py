"""How fast: step sizes that change with the number of gradient steps.

A schedule is any function from the number of gradient steps made so far, warmup
included, to a step size; those of optax are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch._checks import check_positive, describe

__all__ = ["Schedule", "constant", "polynomial"]

Schedule = Callable[[Array], Any]


@dataclass(frozen=True)
class _Constant:
    value: float

    def __call__(self, count: ArrayLike) -> float:
        return self.value


def constant(step_size: float) -> Schedule:
    """The same step size throughout, which is what a number stands for.

    :param step_size: the step size.
    :raises ValueError: it is not positive.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import schedule
        >>> schedule.constant(0.1)(1000)
        0.1
    """
    check_positive("constant", "step_size", step_size)
    return _Constant(float(step_size))


@dataclass(frozen=True)
class _Polynomial:
    step_size: float
    power: float
    offset: float

    def __call__(self, count: ArrayLike) -> Array:
        return self.step_size * (1.0 + jnp.asarray(count) / self.offset) ** -self.power


def polynomial(
    step_size: float, power: float = 0.55, offset: float = 1000.0
) -> Schedule:
    """Step sizes ``step_size * (1 + t / offset) ** -power``, as in SGLD's paper [1].

    With a power in ``(0.5, 1]`` the bias of the draws goes to zero if each is weighted
    by the step size with which it was made, slowly: a power of 1/3 gives the smallest
    error for a given amount of work [2].

    :param step_size: the first step size.
    :param power: how fast they fall, in ``(0, 1]``.
    :param offset: gradient steps over which they fall to ``2 ** -power`` of the first.
    :raises ValueError: an argument is out of range.

    **References:**

    1. Max Welling, Yee Whye Teh (2011), *Bayesian learning via stochastic gradient
       Langevin dynamics*, ICML.
    2. Yee Whye Teh, Alexandre H. Thiery, Sebastian J. Vollmer (2016), *Consistency and
       fluctuations for stochastic gradient Langevin dynamics*, JMLR 17.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import schedule
        >>> float(schedule.polynomial(0.1, power=0.5, offset=100)(300))
        0.05...
    """
    check_positive("polynomial", "step_size", step_size)
    check_positive("polynomial", "power", power)
    check_positive("polynomial", "offset", offset)
    if power > 1:
        raise ValueError(
            f"polynomial(power={power!r}) must be at most 1: with steps that fall "
            "faster the chain stops before it has been everywhere."
        )
    return _Polynomial(float(step_size), float(power), float(offset))


def as_schedule(who: str, given: Any) -> Schedule:
    """A step size or a schedule as a schedule.

    :param who: the kernel's name, for the messages.
    :param given: a positive number, or a function of the number of gradient steps.
    """
    if not callable(given):
        if not isinstance(given, Real) or isinstance(given, bool):
            raise TypeError(
                f"{who}(step_size=...) must be a positive number or a schedule: a "
                "function of the number of gradient steps made, such as one of optax's "
                f"or schedule.polynomial(0.01), got {describe(given)}."
            )
        check_positive(who, "step_size", given)
        return _Constant(float(given))
    first = np.asarray(given(0))
    if first.shape or not (np.isfinite(first) and first >= 0):
        raise ValueError(
            f"{who}(step_size=...) is a schedule that begins with "
            f"{describe(first) if first.shape else first}, and must give single "
            "numbers that are not negative."
        )
    return given
