"""Arguments that several kernels take, checked in one place.

Each function takes the kernel's name first, for its messages, and returns the setting.
"""

from __future__ import annotations

from typing import Any

from numpyro_minibatch import accept
from numpyro_minibatch import control_variate as control_variates
from numpyro_minibatch._internal.checks import (
    check_flag,
    check_instance,
    check_positive,
    describe,
)
from numpyro_minibatch._model.row_axes import RowAxes
from numpyro_minibatch.accept import AcceptanceTest
from numpyro_minibatch.batch import (
    BatchSize,
    Scheme,
    Weighted,
    stratified,
    without_replacement,
)
from numpyro_minibatch.control_variate import Taylor
from numpyro_minibatch.target import Target

__all__ = [
    "check_init_strategy",
    "check_model",
    "read_acceptance",
    "read_batch",
    "read_control_variate",
    "read_flags",
    "read_rows",
    "read_step_and_friction",
    "read_target_accept_prob",
]


def check_model(name: str, model: Any, target: Any) -> None:
    """Raise unless a kernel is given either a model or a target.

    :param name: the kernel's name.
    :param model: a function, or ``None``.
    :param target: a target written by hand, or ``None``.
    """
    if (model is None) == (target is None):
        raise ValueError(
            f"{name} takes either a model or target=, got "
            f"{'neither' if model is None else 'both'}. Write {name}(model, ...)."
        )
    if model is not None and not callable(model):
        raise TypeError(
            f"{name}(model) must be a function with NumPyro primitives, got "
            f"{type(model).__name__}."
        )
    if target is not None and not isinstance(target, Target):
        raise TypeError(
            f"{name}(target=...) must be a numpyro_minibatch.Target, got "
            f"{type(target).__name__}."
        )


def check_init_strategy(name: str, init_strategy: Any) -> None:
    """Raise unless this is one of NumPyro's functions that choose starting points.

    :param name: the kernel's name.
    :param init_strategy: the argument.
    """
    if not callable(init_strategy):
        raise TypeError(
            f"{name}(init_strategy=...) must be one of NumPyro's, such as "
            "init_to_uniform or init_to_value(values=...), got "
            f"{describe(init_strategy)}."
        )


def read_batch(
    name: str,
    batch: Scheme | BatchSize | None,
    batch_size: Scheme | BatchSize | None,
    control_variate: Taylor | None,
) -> Scheme:
    """The scheme that draws rows, from either form of the argument.

    :param name: the kernel's name.
    :param batch: a scheme, or ``None``.
    :param batch_size: a number of rows, or ``{plate: rows}``, or ``None``.
    :param control_variate: the control variate, or ``None``.
    """
    if isinstance(batch_size, Scheme):
        batch, batch_size = batch_size, None
    if batch is not None and not isinstance(batch, Scheme):
        raise TypeError(
            f"{name}(batch=...) must be one of the numpyro_minibatch.batch "
            "schemes, such as batch.without_replacement(100), got "
            f"{describe(batch)}."
        )
    if batch is not None and batch_size is not None:
        raise ValueError(
            f"{name} got both batch_size={batch_size!r} and batch={batch!r}; "
            "the scheme has its own size: pass batch alone."
        )
    if batch is None:
        drawn = without_replacement if control_variate is None else stratified
        batch = drawn(batch_size)
    if isinstance(batch, Weighted) and control_variate is None:
        raise ValueError(
            f"{name}(batch={batch!r}) draws rows by importance, which only a control "
            'variate measures. Add control_variate="taylor2", or use '
            "batch.without_replacement."
        )
    return batch


def read_control_variate(name: str, given: Any) -> Taylor | None:
    """The control variate, given by name or as an object.

    :param name: the kernel's name.
    :param given: a name, an object, or ``None``.
    """
    if given is None or isinstance(given, Taylor):
        return given
    found = control_variates.named(given) if isinstance(given, str) else None
    if found is None:
        raise ValueError(
            f'{name}(control_variate=...) must be "taylor1", "taylor2" or an object '
            "such as control_variate.taylor2(ridge=1.0), got "
            f"{describe(given)}."
        )
    return found


def read_acceptance(name: str, given: Any) -> AcceptanceTest:
    """The acceptance test; by default :func:`accept.penalty`.

    :param name: the kernel's name.
    :param given: a test, or ``None``.
    """
    test = accept.penalty() if given is None else given
    check_instance(name, "acceptance", test, AcceptanceTest, "penalty()")
    return test


def read_target_accept_prob(
    name: str, given: Any, default: float, test: AcceptanceTest
) -> float:
    """The acceptance rate to adapt to, which the test must be able to reach.

    :param name: the kernel's name.
    :param given: a rate, or ``None``.
    :param default: the rate that suits the kernel and the test.
    :param test: the acceptance test.
    """
    rate = default if given is None else given
    check_positive(name, "target_accept_prob", rate)
    if not rate < test.highest_accept_prob:
        raise ValueError(
            f"{name}(target_accept_prob={rate}) must be below "
            f"{test.highest_accept_prob}, the highest acceptance rate of {test!r}."
        )
    return float(rate)


def read_flags(name: str, **flags: Any) -> tuple[bool, ...]:
    """Settings that are true or false, in the order in which they are given.

    :param name: the kernel's name.
    :param flags: the settings.
    """
    for flag, value in flags.items():
        check_flag(name, flag, value)
    return tuple(bool(value) for value in flags.values())


def read_rows(name: str, given: Any, target: Any) -> RowAxes | None:
    """The arguments of the model that have the rows, as far as the user names them.

    :param name: the kernel's name.
    :param given: ``{argument: axis}``, or ``None``.
    :param target: a target written by hand, or ``None``.
    :raises TypeError: it is not a mapping from names to axes.
    :raises ValueError: a target written by hand takes no arguments.
    """
    if given is not None and target is not None:
        raise ValueError(
            f"{name}(target=..., rows={given!r}): a target written by hand takes no "
            "arguments, and reads its rows by their indices. Leave rows out."
        )
    return RowAxes.of(name, given)


def read_step_and_friction(
    name: str, step_size: Any, friction: Any, h: Any, b: Any
) -> tuple[Any, Any]:
    """Step size and friction from either form of the two.

    :param name: the kernel's name.
    :param step_size: the step size, or ``None``.
    :param friction: the friction, or ``None``.
    :param h: the squared step size, or ``None``.
    :param b: half of step size times friction, or ``None``.
    :raises ValueError: both forms are given, or only half of one.
    """
    if h is None and b is None:
        return step_size, friction
    if step_size is not None or friction is not None or h is None or b is None:
        given = {"step_size": step_size, "friction": friction, "h": h, "b": b}
        raise ValueError(
            f"{name} takes step_size= with friction=, or h= with b= (h = step_size "
            "** 2 and b = step_size * friction / 2), got "
            f"{', '.join(k for k, v in given.items() if v is not None)}."
        )
    check_positive(name, "h", h)
    check_positive(name, "b", b, zero=True)
    return float(h) ** 0.5, 2.0 * float(b) / float(h) ** 0.5
