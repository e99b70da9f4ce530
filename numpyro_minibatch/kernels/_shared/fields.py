"""Fields of the states of kernels, and errors for missing ones."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, TypeVar

__all__ = ["with_named_items"]

_T = TypeVar("_T", bound=type)
_INSTEAD = {
    "potential_energy": "lp_estimate",
    "energy": "lp_estimate",
    "num_steps": "num_rows",
    "acceptance_rate": "accept_prob",  # its name in sample_stats
    "hmc_state": "",
}


def _item(state: Any, item: Any) -> Any:
    """An item of a state; NumPyro's driver asks for one by the name of a field.

    :param state: the state.
    :param item: its number, or the name of an extra field that the state lacks.
    :raises ValueError: it is a name.
    """
    if not isinstance(item, str):
        return tuple.__getitem__(state, item)
    instead = _INSTEAD.get(item, "")
    close = get_close_matches(item, state._fields, n=1)
    hint = (
        f" Use {instead!r} instead."
        if instead in state._fields
        else f" Did you mean {close[0]!r}?"
        if close
        else ""
    )
    fields = ", ".join(name for name in state._fields)
    raise ValueError(
        f"extra_fields asks for {item!r}, which {type(state).__name__} does not have: "
        f"its fields are {fields}.{hint}"
    )


def with_named_items(cls: _T) -> _T:
    """A ``NamedTuple`` of a state, whose error for an unknown name lists the fields.

    :param cls: the class.
    """
    cls.__getitem__ = _item  # type: ignore[index]
    return cls
