"""The arithmetic of cycles: the steps that belong to each draw."""

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
    """The parts of a cycle, in steps of the inner kernel."""

    length: int
    explore: int  # steps with the exploration's noise
    start: int  # steps before the collected part
    num_steps: int  # of a draw
    samples: int  # draws
    piece: int  # steps that run at once: a divisor of all of these


class Place(NamedTuple):
    """The place of a draw among the cycles.

    - **cycle** - its cycle: 0 for the first after warmup.
    - **before** - number of pieces before it.
    - **pieces** - number of its own pieces.
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
        """The number of pieces in the warmup.

        :param who: the kernel's name, for errors.
        :param num_warmup: draws of the warmup.
        """

    @abstractmethod
    def place(self, i: Array, num_warmup: int) -> Place:
        """The place of the ``i``-th draw of all.

        :param i: the number of the draw.
        :param num_warmup: draws of the warmup.
        """

    @abstractmethod
    def factor(
        self, schedule: Callable[[Array], Any], count: Array, num_warmup: int
    ) -> Any:
        """The factor on the step size of the ``count``-th step of all.

        :param schedule: from the number of steps in cycles to a factor.
        :param count: the number of the step.
        :param num_warmup: draws of the warmup.
        """

    def _in_cycles(self, number: Array) -> tuple[Array, Array, Array]:
        """A draw's cycle, the number of steps before it, and the number of its own."""
        shape = self.shape
        cycle, place = number // shape.samples, number % shape.samples
        first = place == 0
        before = cycle * shape.length + jnp.where(
            first, 0, shape.start + place * shape.num_steps
        )
        return cycle, before, shape.num_steps + jnp.where(first, shape.start, 0)


@dataclass(frozen=True)
class AtOnce(Cycles):
    """Cycles from the first step on; those of the warmup are discarded."""

    def inner_warmup(self, who: str, num_warmup: int) -> int:
        """The number of pieces in the warmup, which consists of whole cycles."""
        shape = self.shape
        cycles, rest = divmod(num_warmup, shape.samples)
        if rest:
            some = f"num_warmup={cycles * shape.samples} or "
            raise ValueError(
                f"{who} discards whole cycles of {shape.samples} draws in warmup, but "
                f"num_warmup={num_warmup} is not a multiple of this. Write "
                f"{some if cycles else ''}"
                f"num_warmup={(cycles + 1) * shape.samples}"
                f"{'' if cycles else ', or num_warmup=0 for none'}."
            )
        return cycles * shape.length // shape.piece

    def place(self, i: Array, num_warmup: int) -> Place:
        """The place of the ``i``-th draw of all."""
        shape = self.shape
        cycle, before, steps = self._in_cycles(i)
        cycle = cycle - num_warmup // shape.samples
        return Place(cycle, before // shape.piece, steps // shape.piece)

    def factor(
        self, schedule: Callable[[Array], Any], count: Array, num_warmup: int
    ) -> Any:
        """The factor of the schedule."""
        return schedule(count)


@dataclass(frozen=True)
class AfterWarmup(Cycles):
    """Cycles that begin after a warmup without cycles, in which the kernel adapts.

    :param warmup_steps: steps of a draw of the warmup.
    """

    warmup_steps: int

    def inner_warmup(self, who: str, num_warmup: int) -> int:
        """The number of pieces in the warmup."""
        return num_warmup * self.warmup_steps // self.shape.piece

    def place(self, i: Array, num_warmup: int) -> Place:
        """The place of the ``i``-th draw of all."""
        each, piece = self.warmup_steps, self.shape.piece
        cycle, before, steps = self._in_cycles(i - num_warmup)
        early = i < num_warmup
        before = jnp.where(early, i * each, num_warmup * each + before)
        steps = jnp.where(early, each, steps)
        return Place(cycle, before // piece, steps // piece)

    def factor(
        self, schedule: Callable[[Array], Any], count: Array, num_warmup: int
    ) -> Any:
        """One in the warmup, and the factor of the schedule afterwards."""
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
    """The parts of a cycle in steps; raises if they do not agree.

    :param own: the steps of a draw of the inner kernel.
    """
    check_count(who, "cycle_length", cycle_length)
    for key, share in (("explore", explore), ("collect_from", collect_from)):
        check_positive(who, key, share, zero=True)
        if not share < 1:
            raise ValueError(
                f"{who}({key}={share!r}) must be a fraction of a cycle, at least 0 and "
                "below 1; the last part of a cycle is the one that is collected."
            )
    if explore > collect_from:
        raise ValueError(
            f"{who}(explore={explore!r}, collect_from={collect_from!r}) would collect "
            "from the exploration, which does not sample the target. Write "
            f"collect_from={explore!r} or more."
        )
    length = int(cycle_length)
    # the first steps n with n / length at least the fraction: C3 of the errata
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
            f"{who}: draws are collected from {collected} of the {length} steps of a "
            f"cycle (collect_from={collect_from!r}), but "
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
