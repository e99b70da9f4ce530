"""Arguments of a ladder of temperatures, checked before the data are read."""

from __future__ import annotations

import math
from typing import Any

from numpyro_minibatch import ladder
from numpyro_minibatch._internal.checks import check_count, check_flag, check_positive
from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.contract import Tempered
from numpyro_minibatch.kernels._shared.numpyro import NumPyroKernel

__all__ = ["as_rung", "check_prior_rung", "temperatures_of"]


def as_rung(name: str, inner: Any, temper_prior: bool | None) -> MinibatchKernel:
    """The kernel that runs at each rung.

    :param name: the kernel's name, for errors.
    :param inner: a kernel of this package or one of NumPyro's.
    :param temper_prior: the ladder's own setting, or ``None``.
    """
    if temper_prior is not None:
        check_flag(name, "temper_prior", temper_prior)
    if not isinstance(inner, Tempered):
        return NumPyroKernel(inner, bool(temper_prior), name)
    rung: Any = inner
    rung.check_rung(name)
    if temper_prior not in (None, rung.temper_prior):
        raise ValueError(
            f"{name}(temper_prior={temper_prior}) got an inner kernel with "
            f"temper_prior={rung.temper_prior}. Write it there only: "
            f"{type(inner).__name__}(model, temper_prior={temper_prior})."
        )
    return rung


def check_prior_rung(
    name: str, inner: MinibatchKernel, temperatures: tuple[float, ...]
) -> None:
    """Raise if a hottest rung at infinity could not draw from the prior.

    :param name: the ladder's name, for the messages.
    :param inner: the kernel of the other rungs.
    :param temperatures: all temperatures, from the coldest.
    :raises ValueError: the prior is tempered as well, or there is no model.
    """
    if not math.isinf(temperatures[-1]):
        return
    if inner.temper_prior:
        raise ValueError(
            f"{name}(temperatures=[..., inf]) draws from the prior at the hottest "
            "rung, but with temper_prior=True the prior is tempered, too, and has no "
            "weight there. Leave temper_prior out, or end the ladder at a finite "
            "temperature."
        )
    if inner.model is None:
        raise ValueError(
            f"{name}(temperatures=[..., inf]) draws from the prior at the hottest "
            "rung, but a target written by hand has no function that does. Write a "
            "NumPyro model, or end the ladder at a finite temperature."
        )


def temperatures_of(
    name: str, temperatures: Any, number: Any, ratio: Any
) -> tuple[float, ...]:
    """The temperatures of a ladder, given one by one or by their number and ratio.

    :param name: the ladder's name, for the messages.
    :param temperatures: all of them, or ``None``.
    :param number: their number, or ``None``.
    :param ratio: the ratio of neighbours, or ``None``.
    :raises ValueError: neither is given, or both, or the ladder is not valid.
    """
    if temperatures is not None:
        if number is not None or ratio is not None:
            raise ValueError(
                f"{name} takes temperatures=, or num_replicas= with "
                "temperature_ratio=, got both."
            )
        return ladder.checked(name, temperatures)
    if number is None or ratio is None:
        raise ValueError(
            f"{name} needs a ladder: write temperatures=[1.0, 2.0, 4.0], or "
            "num_replicas=7, temperature_ratio=1.5."
        )
    check_count(name, "num_replicas", number)
    check_positive(name, "temperature_ratio", ratio)
    return ladder.checked(name, ladder.geometric(number, ratio))
