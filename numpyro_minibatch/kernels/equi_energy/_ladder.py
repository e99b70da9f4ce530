"""Arguments of a ladder of energies, checked before the data are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numpyro_minibatch import proposal
from numpyro_minibatch._internal.checks import (
    check_count,
    check_instance,
    check_positive,
    describe,
)
from numpyro_minibatch.proposal import Proposal

__all__ = [
    "batch_sizes",
    "check_ascending",
    "given_energies",
    "local_moves",
    "number_of_chains",
    "temperature_rule",
]


def batch_sizes(name: str, batch_size: Any) -> tuple[int, ...] | None:
    """The given batch sizes: ``None``, the hottest chain's, or all chains'."""
    if batch_size is None:
        return None
    is_one = np.ndim(batch_size) == 0 and not isinstance(batch_size, Mapping)
    given = [batch_size] if is_one else batch_size
    if isinstance(given, Mapping) or not len(given):
        raise TypeError(
            f"{name}(batch_size=...) must be the rows of the hottest chain's batch, or "
            "of each chain's from the coldest on, such as [4000, 2000, 1000], got "
            f"{describe(batch_size)}."
        )
    for size in given:
        check_count(name, "batch_size", size)
    found = tuple(int(size) for size in given)
    for colder, hotter in zip(found, found[1:], strict=False):
        if hotter > colder:
            raise ValueError(
                f"{name}(batch_size=...) must not ascend, because the coldest chain "
                f"has the largest batch, got {colder} and then {hotter}."
            )
    if found[-1] < 2:
        raise ValueError(f"{name}(batch_size=...) must be at least 2, got {found[-1]}.")
    return found


def temperature_rule(name: str, given: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The argument that defines the temperatures, or ``None`` for the noise."""
    named = {key: value for key, value in given.items() if value is not None}
    if len(named) > 1:
        raise ValueError(
            f"{name} takes one of {', '.join(given)} for the temperatures, got "
            f"{' and '.join(named)}."
        )
    for key, value in named.items():
        if key in ("temperatures", "lam"):
            if np.ndim(value) != 1 or not len(value):
                raise TypeError(
                    f"{name}({key}=...) must have a number for each chain, from the "
                    f"coldest on, got {describe(value)}."
                )
            numbers = np.asarray(value).tolist()
            for number in numbers:
                check_positive(name, key, number)
            return key, tuple(float(number) for number in numbers)
        check_positive(name, key, value)
        if key == "alpha" and value > 1:
            raise ValueError(
                f"{name}(alpha={value}) must be at most 1: the paper's lam is below "
                "tau, and alpha = lam / tau."
            )
        if key == "temperature_ratio" and value <= 1:
            raise ValueError(
                f"{name}(temperature_ratio={value}) must be above 1: temperatures "
                "ascend from that of the coldest chain."
            )
        return key, float(value)
    return None, None


def number_of_chains(name: str, number: Any, rule: tuple, sizes: tuple | None) -> int:
    """The number of chains, on which all given arguments must agree."""
    said: dict[str, int] = {}
    if number is not None:
        check_count(name, "num_replicas", number)
        said["num_replicas"] = int(number)
    if rule[0] in ("temperatures", "lam"):
        said[f"len({rule[0]})"] = len(rule[1])
    if sizes is not None and len(sizes) > 1:
        said["len(batch_size)"] = len(sizes)
    if len(set(said.values())) > 1:
        text = ", ".join(f"{key} is {value}" for key, value in said.items())
        raise ValueError(f"{name}: the number of chains is ambiguous: {text}.")
    found = next(iter(said.values()), 7)
    if found < 2:
        raise ValueError(
            f"{name} jumps from one chain to states of another, so it needs at least "
            f"2 chains, got {found}. For one chain write MINT(model, temperature=...)."
        )
    return found


def check_ascending(
    name: str, temperatures: Sequence[float], sizes: Sequence[int]
) -> None:
    """Raise unless the temperatures that belong to the batch sizes ascend."""
    for low, high in zip(temperatures, temperatures[1:], strict=False):
        if not high > low:
            raise ValueError(
                f"{name}: temperatures must ascend, but those of batches of "
                f"{list(sizes)} rows are {[round(t, 4) for t in temperatures]}. Write "
                "temperatures=[...], or batch sizes that differ."
            )


def given_energies(
    name: str, energies: Any, ring_width: Any, number: int
) -> tuple[float, ...] | None:
    """The floors ``H_1`` to ``H_{number - 1}`` of the chains, if they were given."""
    if ring_width is not None:
        check_positive(name, "ring_width", ring_width)
        if energies is not None:
            raise ValueError(
                f"{name} got both energies and ring_width, which determines the "
                "energies: leave one of them out."
            )
    if energies is None:
        return None
    if np.ndim(energies) != 1 or len(energies) != number - 1:
        raise ValueError(
            f"{name}(energies=...) must be H_1 to H_{number - 1}, {number - 1} numbers "
            f"for {number} chains (the coldest one has no floor), got "
            f"{describe(energies)}."
        )
    found = tuple(float(value) for value in np.asarray(energies))
    if not all(np.isfinite(found)) or any(
        not high > low for low, high in zip(found, found[1:], strict=False)
    ):
        raise ValueError(
            f"{name}(energies=...) must be finite and ascend, got {list(found)}."
        )
    return found


def local_moves(name: str, given: Any) -> Proposal:
    """The proposal of moves between jumps, if it needs no surrogate."""
    if given is None:
        return proposal.random_walk()
    check_instance(name, "proposal", given, Proposal, "random_walk()")
    if given.uses_surrogate:
        raise ValueError(
            f"{name}(proposal={given!r}) moves on a surrogate of one mode. Write "
            "proposal.random_walk() or proposal.langevin()."
        )
    return given
