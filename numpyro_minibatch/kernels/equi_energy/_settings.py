"""The settings of an equi-energy sampler as one value, and the ladder they define."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from numpyro_minibatch._internal.checks import (
    check_count,
    check_flag,
    check_positive,
    describe,
)
from numpyro_minibatch.batch import FullBatch
from numpyro_minibatch.kernels._shared.adaptation import Adaptation
from numpyro_minibatch.kernels.equi_energy import _ladder
from numpyro_minibatch.proposal import Proposal

__all__ = ["EnergyArguments", "EnergySettings"]

_RULES = ("temperatures", "temperature_ratio", "lam", "alpha")
_COUNTS = ("ring_capacity", "ring_thinning", "num_steps")
_FLAGS = ("penalty", "adapt_step_size", "adapt_mass_matrix", "dense_mass")
_HIGHEST_RATE = 0.45  # of local moves; the paper recommends 0.2 to 0.5


class EnergyArguments(TypedDict, total=False):
    """The arguments of :class:`MINTEE` for its ladder, its jumps and its moves."""

    batch_size: int | Sequence[int] | None
    batch_ratio: float
    num_replicas: int | None
    temperatures: Sequence[float] | None
    temperature_ratio: float | None
    lam: Sequence[float] | None
    alpha: float | None
    energies: Sequence[float] | None
    ring_width: float | None
    jump_prob: float
    ring_capacity: int
    ring_thinning: int
    penalty: bool
    proposal: Proposal | None
    step_size: float | None
    adapt_step_size: bool
    adapt_mass_matrix: bool
    dense_mass: bool
    target_accept_prob: float | None
    num_steps: int


_DEFAULTS: EnergyArguments = {
    "batch_ratio": 1.4,
    "jump_prob": 0.1,
    "ring_capacity": 1000,
    "ring_thinning": 1,
    "penalty": True,
    "adapt_step_size": True,
    "adapt_mass_matrix": False,
    "dense_mass": False,
    "num_steps": 1,
}


@dataclass(frozen=True)
class EnergySettings:
    """The arguments of a kernel on a ladder of energies, checked; hashable.

    :param full: whether all chains read all rows.
    :param sizes: rows of the batches: ``None``, the hottest chain's, or all chains'.
    :param batch_ratio: ratio of the batches of neighbours.
    :param rule: the argument that defines the temperatures, and its value.
    :param number: the number of chains.
    :param floors: the energies ``H_1 .. H_{K-1}``, if they were given.
    :param ring_width: their rise in temperatures otherwise.
    :param jump_prob: probability of trying a jump.
    :param ring_capacity: states that a ring holds.
    :param ring_thinning: draws from one state of a ring to the next.
    :param penalty: whether weights are corrected for their noise.
    :param proposal: of the local moves.
    :param step_size: initial step size of the coldest chain's local moves.
    :param adapt_step_size: whether warmup tunes step sizes.
    :param adapt_mass_matrix: whether warmup tunes mass matrices.
    :param dense_mass: whether these are full.
    :param target_accept_prob: acceptance rate to which step sizes are tuned.
    :param num_steps: inner steps of a draw.
    """

    full: bool
    sizes: tuple[int, ...] | None
    batch_ratio: float
    rule: tuple[str | None, Any]
    number: int
    floors: tuple[float, ...] | None
    ring_width: float | None
    jump_prob: float
    ring_capacity: int
    ring_thinning: int
    penalty: bool
    proposal: Proposal
    step_size: float
    adapt_step_size: bool
    adapt_mass_matrix: bool
    dense_mass: bool
    target_accept_prob: float
    num_steps: int

    @classmethod
    def of(cls, name: str, batch: Any, arguments: EnergyArguments) -> EnergySettings:
        """Check the arguments of a kernel.

        :param name: the kernel's name, for errors.
        :param batch: its scheme, if it was given.
        :param arguments: its other arguments; those left out have their defaults.
        """
        for key in arguments:
            if key not in EnergyArguments.__annotations__:
                raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        given: dict[str, Any] = dict.fromkeys(EnergyArguments.__annotations__)
        given |= {**_DEFAULTS, **arguments}
        full = _is_full(name, batch)
        sizes = _ladder.batch_sizes(name, given["batch_size"])
        _check_batch_ratio(name, given["batch_ratio"])
        rule = _ladder.temperature_rule(name, {k: given[k] for k in _RULES})
        number = _ladder.number_of_chains(name, given["num_replicas"], rule, sizes)
        if rule[0] is None and full:
            raise ValueError(
                f"{name}(batch=batch.full()) needs a ladder: energies have no noise "
                "from which to choose temperatures. Write num_replicas=5, "
                "temperature_ratio=3.0, or temperatures=[1.0, 3.0, 9.0]."
            )
        width = given["ring_width"]
        floors = _ladder.given_energies(name, given["energies"], width, number)
        _check_jump_prob(name, given["jump_prob"])
        for key in _COUNTS:
            check_count(name, key, given[key])
        for key in _FLAGS:
            check_flag(name, key, given[key])
        plain: dict[str, Any] = {key: int(given[key]) for key in _COUNTS}
        plain |= {key: bool(given[key]) for key in _FLAGS}
        moves = _ladder.local_moves(name, given["proposal"])
        return cls(
            full=full,
            sizes=sizes,
            batch_ratio=float(given["batch_ratio"]),
            rule=rule,
            number=number,
            floors=floors,
            ring_width=None if width is None else float(width),
            jump_prob=float(given["jump_prob"]),
            proposal=moves,
            step_size=_step_size(name, given["step_size"], moves),
            target_accept_prob=_rate(name, given["target_accept_prob"], moves),
            **plain,
        )

    @property
    def batch_size(self) -> int | None:
        """Rows of the hottest chain's batch, if they were given."""
        return None if self.sizes is None else self.sizes[-1]

    def rung_batch_sizes(self, size: int, width: int) -> tuple[int, ...]:
        """Rows of each chain's batch.

        :param size: the rows of the data.
        :param width: those of the hottest chain's batch.
        """
        if self.full:
            return (size,) * self.number
        if self.sizes is not None and len(self.sizes) > 1:
            return self.sizes
        steps = range(self.number - 1, -1, -1)
        return tuple(min(size, round(width * self.batch_ratio**j)) for j in steps)

    def temperatures(self, size: int, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """The temperatures that the rule defines, if there is one.

        :param size: the rows of the data.
        :param sizes: those of each chain's batch.
        """
        kind, value = self.rule
        if kind == "temperatures":
            return value
        if kind == "temperature_ratio":
            return tuple(value**k for k in range(self.number))
        if kind == "lam":
            return tuple(size ** (1.0 - lam) for lam in value)
        return tuple(
            1.0 if m == size else size ** (1.0 - value * math.log(m) / math.log(size))
            for m in sizes
        )

    def rise(
        self, temperatures: tuple[float, ...], dim: int, lowest: float
    ) -> np.ndarray:
        """The energies ``H_1 .. H_{K-1}``, relative to the reference.

        :param temperatures: of the chains.
        :param dim: the number of parameters.
        :param lowest: the energy of the reference.
        """
        if self.floors is not None:
            return np.asarray(self.floors) - lowest
        width = self.ring_width or math.sqrt(2 * dim)
        return width * np.cumsum(temperatures[:-1])

    def adaptation(self, num_warmup: int) -> Adaptation:
        """The adaptation of each chain's local moves in warmup."""
        return Adaptation(
            num_warmup=num_warmup,
            target_accept_prob=self.target_accept_prob,
            adapt_step_size=self.adapt_step_size,
            adapt_mass_matrix=self.adapt_mass_matrix,
            dense_mass=self.dense_mass,
        )

    def stages(self, num_warmup: int) -> tuple[np.ndarray, np.ndarray]:
        """The draws from which each chain fills its rings, and from which it jumps.

        The hottest chain begins. Each colder chain runs, already with jumps, for half
        of its part of the warmup before its own rings begin to fill.
        """
        share = num_warmup // self.number
        begins = share * np.arange(self.number - 1, -1, -1)
        return begins + share // 2, begins


def _is_full(name: str, batch: Any) -> bool:
    if batch is None or isinstance(batch, FullBatch):
        return batch is not None
    raise TypeError(
        f"{name}(batch=...) must be batch.full() or left out: the chains read "
        "nested batches without replacement, with sizes from batch_size and "
        f"batch_ratio; got {describe(batch)}."
    )


def _check_batch_ratio(name: str, ratio: Any) -> None:
    check_positive(name, "batch_ratio", ratio)
    if ratio < 1:
        raise ValueError(
            f"{name}(batch_ratio={ratio}) must be at least 1: colder chains "
            "read larger batches."
        )


def _check_jump_prob(name: str, jump_prob: Any) -> None:
    check_positive(name, "jump_prob", jump_prob, zero=True)
    if jump_prob >= 1:
        raise ValueError(
            f"{name}(jump_prob={jump_prob}) must be below 1, to leave some local "
            "moves: write jump_prob=0.1."
        )


def _step_size(name: str, given: Any, moves: Proposal) -> float:
    step_size = moves.default_step_size if given is None else given
    check_positive(name, "step_size", step_size)
    return float(step_size)


def _rate(name: str, given: Any, moves: Proposal) -> float:
    rate = min(moves.target_accept_prob, _HIGHEST_RATE) if given is None else given
    check_positive(name, "target_accept_prob", rate)
    if rate >= 1:
        raise ValueError(f"{name}(target_accept_prob={rate}) must be below 1.")
    return float(rate)
