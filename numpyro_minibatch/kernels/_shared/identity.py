"""Kernels as values: equality, hash, records and repr follow from their settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

import jax

from numpyro_minibatch._internal.static import Given, Seen, digest
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch.control_variate._setup import Plan, Prepared

__all__ = ["ByValue", "Run", "recorded"]

_NO_SETTINGS = frozenset({"_run", "_key", "_called"})


@dataclass(frozen=True)
class Run:
    """The results of ``init``: they are not settings, and are replaced as a whole.

    :param num_warmup: number of warmup draws.
    :param num_chains: chains in one program.
    :param layout: the model's sites and data plates.
    :param plan: with a control variate, the choices of its set-up.
    :param model: the model as it can be sampled, if not as the user wrote it.
    :param marginalized: its discrete sites that were marginalized.
    :param refined: the model with a finer approximation of its likelihood, if the
        set-up chose one; see :class:`~numpyro_minibatch.kernels.Approximated`.
    :param frozen_digest: a digest of ``frozen``, and of data whose values the model
        reads while it is traced.
    :param frozen: values of the model's ``param`` sites.
    :param report: the measurements of the set-up.
    :param start_given: whether the user chose where chains start.
    :param prepared: the result of the set-up, and the data that it belongs to.
    :param observed_rows: number of observations of a kernel that reads all rows.
    :param vectorized: whether a state has an axis of chains; ``None`` before ``init``.
    :param start_fn: the compiled start of this kernel only.
    :param values: a digest of the data whose values the model reads while it is traced.
    :param compiled_values: the same, of programs of NumPyro's driver that take the data
        as arguments, so that it would not compile them anew for other values.
    :param data: the data that the states belong to.
    :param state: shapes of a state, and the values of its surrogate.
    """

    num_warmup: int = 0
    num_chains: int = 1
    layout: Layout | None = None
    plan: Plan | None = None
    model: Any = None
    marginalized: tuple[str, ...] = ()
    refined: Any = None
    frozen_digest: str = ""
    observed_rows: int = 0
    frozen: dict[str, Any] = field(default_factory=dict, compare=False)
    report: dict[str, Any] = field(default_factory=dict, compare=False)
    start_given: bool = field(default=False, compare=False)
    prepared: tuple[Any, Seen, Prepared] | None = field(default=None, compare=False)
    vectorized: bool | None = field(default=None, compare=False)
    start_fn: Callable | None = field(default=None, compare=False)
    values: str = ""
    compiled_values: str = field(default="", compare=False)
    data: Given | None = field(default=None, compare=False)
    state: Any = field(default=None, compare=False)

    def not_started(self) -> Run:
        """The same without functions and arrays, for copies and pickles."""
        return replace(
            self,
            vectorized=None,
            start_fn=None,
            prepared=None,
            compiled_values="",
            data=None,
            state=None,
        )


class ByValue:
    """Base of the kernels: every attribute is a setting, and settings define equality.

    A compiled step is found again by the value of its kernel. Kernels do not list their
    settings: every attribute counts, so that two kernels with different settings can
    never be equal. The results of ``init`` are stored separately, in ``_run``.

    Attributes are compared by type and value; those without a hash, such as arrays,
    lists and dicts, by a digest of their content.
    """

    _run: Run = Run()
    _called: str = ""  # the kernel that the user wrote, if it made this one
    # the target is recorded elsewhere, and functions have no value in JSON
    _unrecorded: frozenset[str] = frozenset({"model", "target", "init_strategy"})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__slots__" in vars(cls):
            raise TypeError(
                f"{cls.__name__} has __slots__, but kernels are compared by the "
                "attributes in their __dict__: two with different settings would be "
                "equal. Leave __slots__ out."
            )

    @classmethod
    def within(cls, outer: str, *args: Any, **settings: Any) -> Self:
        """A kernel that messages call by the name of the one that makes it.

        :param outer: that name, the only one that the user knows.
        :param args: positional arguments.
        :param settings: keyword arguments.
        """
        made = cls.__new__(cls)
        made._called = outer
        cls.__init__(made, *args, **settings)
        return made

    @property
    def _who(self) -> str:
        """The name by which messages call the kernel."""
        return self._called or type(self).__name__

    def _learn(self, **found: Any) -> None:
        """Store results of ``init``."""
        if "frozen" in found:
            found["frozen_digest"] = digest(found["frozen"])
        self._run = replace(self._run, **found)

    @property
    def num_warmup(self) -> int:
        """The number of warmup draws, once the kernel has been started."""
        return self._run.num_warmup

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _NO_SETTINGS:
            vars(self).pop("_key", None)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        vars(self).pop("_key", None)
        super().__delattr__(name)

    def _attributes(self) -> dict[str, Any]:
        """Every attribute that is a setting."""
        return {k: x for k, x in vars(self).items() if k not in _NO_SETTINGS}

    def _identity(self) -> tuple[Hashable, ...]:
        """The names, types and values of all settings, hashable."""
        known = vars(self).get("_key")
        if known is not None:
            return known
        settings = self._attributes()
        names = tuple(sorted(settings))
        values = tuple(_hashable(settings[name]) for name in names)
        key = names, tuple(type(settings[name]) for name in names), values
        # the driver compares kernels often; content that could change is not cached
        if all(
            value is settings[name] for name, value in zip(names, values, strict=True)
        ):
            vars(self)["_key"] = key
        return key

    def __eq__(self, other: object) -> bool:
        return self is other or (
            type(self) is type(other)
            and isinstance(other, ByValue)
            and self._run == other._run
            and self._identity() == other._identity()
        )

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def __getstate__(self) -> dict[str, Any]:
        run = self._run.not_started()
        return {**self._attributes(), "_run": run, "_called": self._called}

    def snapshot(self) -> Self:
        """A copy in the current state, which later calls of ``init`` do not change.

        ``copy.copy`` returns a kernel that has not been started.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def _recorded_settings(self) -> dict[str, Any]:
        """Every setting in a form for JSON, by its name without underscore."""
        named = {name.lstrip("_"): x for name, x in self._attributes().items()}
        return {
            name: recorded(value)
            for name, value in named.items()
            if name not in self._unrecorded
        }

    def __repr__(self) -> str:
        defaults = _defaults(type(self).__mro__)
        named = {name.lstrip("_"): x for name, x in self._attributes().items()}
        shown = [
            f"{name}={_shown(value)}"
            for name, value in named.items()
            if value is not None
            and not (name in defaults and _is_same(value, defaults[name]))
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def recorded(value: Any) -> Any:
    """A setting in a form for JSON: numbers, texts and lists of them, or its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [recorded(item) for item in value]
    return repr(value)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, jax.core.Tracer):
        return id(value)  # a traced value equals only itself
    try:
        hash(value)
    except TypeError:
        return digest(value)
    return value


@cache
def _defaults(kinds: tuple[type, ...]) -> dict[str, Any]:
    """The defaults of a constructor, and of those that it passes settings to."""
    return {
        name: parameter.default
        for base in reversed(kinds)
        if "__init__" in vars(base) and base is not object
        for name, parameter in inspect.signature(
            vars(base)["__init__"]
        ).parameters.items()
    }


def _is_same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and _hashable(value) == _hashable(default)


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
