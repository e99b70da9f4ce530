"""Ladders: temperatures, the pairs of rungs that swap, and where rungs should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch._internal.checks import check_count, check_positive, describe

__all__ = ["barrier", "equalised", "geometric"]


def geometric(num_replicas: int, ratio: float) -> tuple[float, ...]:
    """The temperatures ``1, ratio, ratio ** 2, ...``.

    The ladder of [1] begins at ``ratio``, so that no rung has the temperature 1; this
    one begins at 1.

    :param num_replicas: the number of rungs, at least 1.
    :param ratio: the ratio of neighbouring temperatures, above 1.
    :raises ValueError: an argument is out of range.

    **References:**

    1. Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), *Replica-exchange
       Nosé-Hoover dynamics for Bayesian learning on large datasets*, NeurIPS.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import ladder
        >>> ladder.geometric(4, 2.0)
        (1.0, 2.0, 4.0, 8.0)
    """
    check_count("geometric", "num_replicas", num_replicas)
    check_positive("geometric", "ratio", ratio)
    if not ratio > 1:
        raise ValueError(
            f"geometric(ratio={ratio!r}) must be above 1: rungs get hotter."
        )
    return tuple(float(ratio) ** k for k in range(num_replicas))


def checked(who: str, temperatures: Any) -> tuple[float, ...]:
    """The temperatures of a ladder, checked.

    :param who: the kernel's name, for the messages.
    :param temperatures: ascending numbers, the first of which is 1; the last one may be
        infinite.
    :raises ValueError: they are not a ladder.
    """
    if not isinstance(temperatures, Sequence | np.ndarray) or isinstance(
        temperatures, str
    ):
        raise TypeError(
            f"{who}(temperatures=...) must be a sequence of numbers, such as "
            f"[1.0, 1.5, 2.25] or ladder.geometric(7, 1.5), got "
            f"{describe(temperatures)}."
        )
    for place, value in enumerate(temperatures):
        # at infinity, and only at the end, the likelihood has no weight
        is_last = place and place == len(temperatures) - 1
        if not (is_last and value == math.inf):
            check_positive(who, "temperatures", value)
    found = tuple(float(value) for value in temperatures)
    if not found or found[0] != 1.0:
        raise ValueError(
            f"{who}(temperatures=...) must begin with 1.0, the rung whose draws are "
            f"returned, got {found[0] if found else 'none'}. Write "
            "ladder.geometric(7, 1.5), or sample a tempered posterior with a kernel's "
            "own temperature."
        )
    for low, high in zip(found, found[1:], strict=False):
        if not high > low:
            raise ValueError(
                f"{who}(temperatures=...) must ascend, got {low:g} and then {high:g}."
            )
    return found


def pairs(number: int, parity: Array) -> tuple[Array, Array, Array]:
    """The neighbours that may swap in one pass: the even or the odd pairs.

    :param number: the number of rungs.
    :param parity: 0 or 1: whether the first pair begins at rung 0 or 1.
    :return: the lower and the upper rung of each pair, shape ``(number // 2,)``, and
        whether the pair exists.
    """
    lower = 2 * jnp.arange(number // 2, dtype=jnp.int32) + parity
    exists = lower + 1 < number
    lower = jnp.where(exists, lower, 0)
    return lower, jnp.where(exists, lower + 1, 0), exists


def barrier(rejection: ArrayLike) -> Array:
    """The communication barrier of a ladder: the sum of its rejection rates [1].

    With rungs close together it depends on the problem and not on the ladder. About
    twice as many rungs as this number are needed.

    :param rejection: mean rejection rate of the swaps of each pair.

    **References:**

    1. Saifuddin Syed, Alexandre Bouchard-Côté, George Deligiannidis, Arnaud Doucet
       (2022), *Non-reversible parallel tempering: a scalable highly parallel MCMC
       scheme*, JRSS B 84(2).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import ladder
        >>> float(ladder.barrier([0.25, 0.5]))
        0.75
    """
    return jnp.sum(jnp.asarray(rejection))


def equalised(temperatures: Array, rejection: Array) -> Array:
    """The ladder between the same ends with equal rejection rates of all pairs.

    The cumulative rejection rate is treated as a function of the inverse temperature
    that is linear between rungs, and new rungs are placed where it has risen by equal
    amounts [1].

    :param temperatures: the ladder, shape ``(R,)``.
    :param rejection: mean rejection rate of the swaps of each pair, ``(R - 1,)``.
    :return: the new ladder, shape ``(R,)``.

    **References:**

    1. Saifuddin Syed, Alexandre Bouchard-Côté, George Deligiannidis, Arnaud Doucet
       (2022), *Non-reversible parallel tempering: a scalable highly parallel MCMC
       scheme*, JRSS B 84(2), algorithm 4.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import ladder
        >>> new = ladder.equalised(jnp.array([1.0, 2.0, 4.0]), jnp.array([0.6, 0.2]))
        >>> [round(float(t), 2) for t in new]
        [1.0, 1.5, 4.0]
    """
    # a pair that was always accepted still needs a positive length
    rates = jnp.maximum(rejection, 1e-3)
    passed = jnp.concatenate([jnp.zeros(1, rates.dtype), jnp.cumsum(rates)])
    wanted = jnp.linspace(0.0, 1.0, temperatures.size, dtype=rates.dtype) * passed[-1]
    inverse = jnp.interp(wanted, passed, 1.0 / temperatures)
    # the ends stay bit for bit
    new = 1.0 / inverse
    return new.at[0].set(temperatures[0]).at[-1].set(temperatures[-1])
