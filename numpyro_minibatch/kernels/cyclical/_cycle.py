"""The arithmetic of cycles: which steps belong to which draw."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_minibatch._internal.checks import check_count, check_positive

__all__ = ["AfterWarmup", "AtOnce", "Cycles", "Place", "Shape", "shape_of"]


class Shape(NamedTuple):
    """What a cycle consists of, in steps of the kernel inside."""

    length: int
    explore: int  # steps with the exploration's noise
    start: int  # steps before those that are collected from
    num_steps: int  # of a draw
    samples: int  # draws
    piece: int  # steps that run in one go: a divisor of all of these


class Place(NamedTuple):
    """Where a draw is.

    - **cycle** - its cycle: 0 for the first after warmup.
    - **before** - pieces before it.
    - **pieces** - pieces of its own.
    """

    cycle: Array
    before: Array
    pieces: Array


@dataclass(frozen=True)
class Cycles(ABC):
    """The cycles of a run.

    :param shape: the parts of a cycle.
    """

    shape: Shape

    @abstractmethod
    def inner_warmup(self, who: str, num_warmup: int) -> int:
        """Pieces that the warmup has.

        :param who: the kernel's name, for errors.
        :param num_warmup: draws of the warmup.
        """

    @abstractmethod
    def place(self, i: Array, num_warmup: int) -> Place:
        """Where the ``i``-th draw of all is.

        :param i: the number of the draw.
        :param num_warmup: draws of the warmup.
        """

    @abstractmethod
    def factor(
        self, schedule: Callable[[Array], Any], count: Array, num_warmup: int
    ) -> Any:
        """What the step size of the ``count``-th step of all is multiplied by.

        :param schedule: from the number of steps in cycles to a factor.
        :param count: the number of the step.
        :param num_warmup: draws of the warmup.
        """

    def _in_cycles(self, number: Array) -> tuple[Array, Array, Array]:
        """Of a draw of the cycles: its cycle, steps before it, and its own."""
        shape = self.shape
        cycle, place = number // shape.samples, number % shape.samples
        first = place == 0
        before = cycle * shape.length + jnp.where(
            first, 0, shape.start + place * shape.num_steps
        )
        return cycle, before, shape.num_steps + jnp.where(first, shape.start, 0)


@dataclass(frozen=True)
class AtOnce(Cycles):
    """Cycles from the first step on: those of the warmup are discarded."""

    def inner_warmup(self, who: str, num_warmup: int) -> int:
        """Pieces that the warmup has, which is whole cycles."""
        shape = self.shape
        cycles, rest = divmod(num_warmup, shape.samples)
        if rest:
            some = f"num_warmup={cycles * shape.samples} or "
            raise ValueError(
                f"{who} discards whole cycles of {shape.samples} draws in warmup, and "
                f"num_warmup={num_warmup} is not a number of them. Write "
                f"{some if cycles else ''}"
                f"num_warmup={(cycles + 1) * shape.samples}"
                f"{'' if cycles else ', or num_warmup=0 for none'}."
            )
        return cycles * shape.length // shape.piece

    def place(self, i: Array, num_warmup: int) -> Place:
        """Where the ``i``-th draw of all is."""
        shape = self.shape
        cycle, before, steps = self._in_cycles(i)
        cycle = cycle - num_warmup // shape.samples
        return Place(cycle, before // shape.piece, steps // shape.piece)

    def factor(
        self, schedule: Callable[[Array], Any], count: Array, num_warmup: int
    ) -> Any:
        """That of the schedule."""
        return schedule(count)


@dataclass(frozen=True)
class AfterWarmup(Cycles):
    """Cycles that begin after a warmup at steady steps, in which the kernel adapts.

    :param warmup_steps: steps of a draw of the warmup.
    """

    warmup_steps: int

    def inner_warmup(self, who: str, num_warmup: int) -> int:
        """Pieces that the warmup has."""
        return num_warmup * self.warmup_steps // self.shape.piece

    def place(self, i: Array, num_warmup: int) -> Place:
        """Where the ``i``-th draw of all is."""
        each, piece = self.warmup_steps, self.shape.piece
        cycle, before, steps = self._in_cycles(i - num_warmup)
        early = i < num_warmup
        before = jnp.where(early, i * each, num_warmup * each + before)
        steps = jnp.where(early, each, steps)
        return Place(cycle, before // piece, steps // piece)

    def factor(
        self, schedule: Callable[[Array], Any], count: Array, num_warmup: int
    ) -> Any:
        """One in the warmup, and then that of the schedule."""
        since = count - num_warmup * self.warmup_steps
        return jnp.where(since < 0, 1.0, schedule(jnp.maximum(since, 0)))


def shape_of(
    who: str,
    own: int,
    cycle_length: Any,
    samples: Any,
    num_steps: Any,
    explore: Any,
    collect_from: Any,
) -> Shape:
    """The parts of a cycle in steps, if they agree.

    :param own: the steps of a draw of the inner kernel.
    """
    check_count(who, "cycle_length", cycle_length)
    for key, share in (("explore", explore), ("collect_from", collect_from)):
        check_positive(who, key, share, zero=True)
        if not share < 1:
            raise ValueError(
                f"{who}({key}={share!r}) is a share of a cycle, from 0 to below 1; "
                "what comes last in a cycle are the steps that draws are made of."
            )
    if explore > collect_from:
        raise ValueError(
            f"{who}(explore={explore!r}, collect_from={collect_from!r}) would collect "
            "from the exploration, which does not sample the target. Write "
            f"collect_from={explore!r} or more."
        )
    length = int(cycle_length)
    # the first steps n with n / length at least the share: C3 of the errata
    begin, start = (math.ceil(s * length - 1e-6) for s in (explore, collect_from))
    collected = length - start
    if num_steps is not None:
        check_count(who, "num_steps", num_steps)
    if samples is not None:
        check_count(who, "samples_per_cycle", samples)
        each = collected // samples if num_steps is None else int(num_steps)
    else:
        each = own if num_steps is None else int(num_steps)
        samples = collected // each
    samples = int(samples)
    if samples * each != collected or not samples * each:
        raise ValueError(
            f"{who}: {collected} of the {length} steps of a cycle are collected from "
            f"(collect_from={collect_from!r}), and "
            + (
                f"{samples} draws of {each} steps each are {samples * each}"
                if samples * each
                else "a draw takes more"
            )
            + f". Write {_agreeing(length, start, begin, samples, each)}."
        )
    piece = math.gcd(math.gcd(begin, start), each)
    return Shape(length, begin, start, each, samples, piece)


def _agreeing(length: int, start: int, begin: int, samples: int, each: int) -> str:
    """Settings with which the parts of a cycle agree."""
    collected = length - start
    each, samples = max(each, 1), max(samples, 1)
    ways = []
    if collected % each == 0:
        ways.append(f"samples_per_cycle={collected // each}")
    if collected % samples == 0:
        ways.append(f"num_steps={collected // samples}")
    else:
        fitting = [n for n in range(1, collected + 1) if collected % n == 0]
        best = min(fitting, key=lambda n: abs(math.log(n / samples)))
        ways.append(f"samples_per_cycle={best}, num_steps={collected // best}")
    if begin <= length - samples * each < length:
        ways.append(f"collect_from={1 - samples * each / length!r}")
    return ", or ".join(ways)
