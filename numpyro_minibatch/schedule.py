"""Schedules: step sizes that change with the number of gradient steps.

A schedule is any function from the number of gradient steps made so far, warmup
included, to a step size. Schedules of optax work without change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch._internal.checks import check_count, check_positive, describe

__all__ = ["Schedule", "constant", "cosine_restarts", "polynomial", "sawtooth"]

Schedule = Callable[[Array], Any]


@dataclass(frozen=True)
class _Constant:
    value: float

    def __call__(self, count: ArrayLike) -> float:
        return self.value


def constant(step_size: float) -> Schedule:
    """The same step size throughout; a number as ``step_size`` means the same.

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
    by the step size with which it was made. It does so slowly: a power of 1/3 gives the
    smallest error for a given amount of work [2].

    :param step_size: the first step size.
    :param power: the exponent of the decay, in ``(0, 1]``.
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
            f"polynomial(power={power!r}) must be at most 1: if steps fall faster, "
            "the chain stops before it has explored the target."
        )
    return _Polynomial(float(step_size), float(power), float(offset))


@dataclass(frozen=True)
class _CosineRestarts:
    step_size: float
    cycle_length: int
    power: float

    def __call__(self, count: ArrayLike) -> Array:
        # the remainder of integers is exact, however many steps were made; the sine of
        # the rest of the cycle is accurate where 1 + cos would cancel
        left = self.cycle_length - jnp.asarray(count) % self.cycle_length
        root = jnp.sin(0.5 * jnp.pi * left / self.cycle_length)
        return self.step_size * root ** (2.0 * self.power)


def cosine_restarts(
    step_size: float, cycle_length: int, power: float = 1.0
) -> Schedule:
    """Half a cosine from ``step_size`` towards zero, repeated in cycles [1, 2].

    The step size after ``t`` steps is ``step_size * (cos(pi * r) / 2 + 1 / 2) **
    power`` with ``r = (t % cycle_length) / cycle_length``, which is the paper's
    equation 1, where steps count from one, so that ``t = k - 1``. The last step of a
    cycle has ``r = 1 - 1 / cycle_length``: the step size is never zero.

    :param step_size: the first step size of a cycle.
    :param cycle_length: steps of a cycle.
    :param power: 1, or 1/2 if the square of the step size should follow a cosine: the
        learning rate of dynamics with momentum is that square.
    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range.

    **References:**

    1. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson
       (2020), *Cyclical stochastic gradient MCMC for Bayesian deep learning*, ICLR.
    2. Ilya Loshchilov, Frank Hutter (2017), *SGDR: stochastic gradient descent with
       warm restarts*, ICLR.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import schedule
        >>> step_size = schedule.cosine_restarts(0.1, cycle_length=100)
        >>> [round(float(step_size(t)), 3) for t in (0, 25, 50, 99, 100)]
        [0.1, 0.085, 0.05, 0.0, 0.1]
    """
    check_positive("cosine_restarts", "step_size", step_size)
    check_count("cosine_restarts", "cycle_length", cycle_length)
    check_positive("cosine_restarts", "power", power)
    return _CosineRestarts(float(step_size), int(cycle_length), float(power))


@dataclass(frozen=True)
class _Sawtooth:
    step_size: float
    cycle_length: int
    rise: float
    decay: float
    decay_every: int

    def __call__(self, count: ArrayLike) -> Array:
        count = jnp.asarray(count)
        rises = count // self.cycle_length
        decays = count // self.decay_every
        # a sum of logarithms: the powers alone would overflow in a long run
        log = rises * math.log(self.rise) + decays * math.log(self.decay)
        return self.step_size * jnp.exp(log)


def sawtooth(
    step_size: float,
    cycle_length: int,
    rise: float = 2.0,
    decay: float = 0.9,
    decay_every: int | None = None,
) -> Schedule:
    """Step sizes that rise by a factor once per cycle and decay in between [1].

    The step size after ``t`` steps is ``step_size * rise ** (t // cycle_length) *
    decay ** (t // decay_every)``. Cycles are equal if the product of ``rise`` and all
    the ``decay`` factors of a cycle is one. With the paper's 2 and 0.9, ten times per
    cycle, they are not: each cycle begins at 0.697 times the step size of the previous
    one.

    :param step_size: the first step size.
    :param cycle_length: steps of a cycle.
    :param rise: the factor, at least 1, at the end of each cycle.
    :param decay: the factor, at most 1, in between.
    :param decay_every: steps from one decay to the next; a tenth of a cycle by default.
    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range.

    **References:**

    1. Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 4.3.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import schedule
        >>> step_size = schedule.sawtooth(0.1, cycle_length=50, decay=0.5)
        >>> [round(float(step_size(t)), 4) for t in (0, 4, 5, 49)]
        [0.1, 0.1, 0.05, 0.0002]
    """
    check_positive("sawtooth", "step_size", step_size)
    check_count("sawtooth", "cycle_length", cycle_length)
    check_positive("sawtooth", "rise", rise)
    check_positive("sawtooth", "decay", decay)
    if decay_every is None:
        decay_every = max(1, int(cycle_length) // 10)
    check_count("sawtooth", "decay_every", decay_every)
    if not (decay <= 1 <= rise):
        raise ValueError(
            f"sawtooth(rise={rise!r}, decay={decay!r}): step sizes rise by a factor of "
            "at least 1 and decay by one of at most 1, such as rise=2.0, decay=0.9."
        )
    return _Sawtooth(
        float(step_size), int(cycle_length), float(rise), float(decay), int(decay_every)
    )


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
            f"{describe(first) if first.shape else first}, but must return scalars "
            "that are finite and not negative."
        )
    return given
