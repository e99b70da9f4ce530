"""A random choice among proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch.proposal._contract import (
    Proposal,
    ProposalContext,
    Proposed,
    check_number,
    is_positive,
)

__all__ = ["mixture"]


# mixtures ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mixture(Proposal):
    components: tuple[tuple[float, Proposal], ...]

    def __post_init__(self) -> None:
        total = sum(weight for weight, _ in self.components)
        scaled = tuple((weight / total, part) for weight, part in self.components)
        parts = [part for _, part in scaled]
        tuned = [pair for pair in scaled if pair[1].adapts_step_size] or list(scaled)
        share = sum(weight for weight, _ in tuned)
        # the target for moves of the components that have a step size
        target = sum(w * part.target_accept_prob for w, part in tuned) / share
        derived = {
            "components": scaled,
            "target_accept_prob": target,
            "uses_gradient": any(part.uses_gradient for part in parts),
            "uses_surrogate": any(part.uses_surrogate for part in parts),
            "follows_surrogate": any(part.follows_surrogate for part in parts),
            "adapts_step_size": any(part.adapts_step_size for part in parts),
            "default_step_size": min(part.default_step_size for _, part in tuned),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def evaluations(self, context: ProposalContext) -> int:
        return max(part.evaluations(context) for _, part in self.components)

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        def branch(part: Proposal) -> Callable[[Array], Proposed]:
            def propose(key: Array) -> Proposed:
                made = part.propose(key, z, step_size, context)
                return Proposed(
                    made.z,
                    jnp.asarray(made.log_q_ratio, z.dtype),
                    jnp.asarray(made.moved),
                    jnp.asarray(made.tunes) & part.adapts_step_size,
                )

            return propose

        key_choice, key_move = jax.random.split(key)
        ends = np.cumsum([weight for weight, _ in self.components])[:-1]
        # rounded to the type of the number, so that float64 stays out of float32
        uniform = jax.random.uniform(key_choice, (), z.dtype)
        choice = (uniform >= jnp.asarray(ends, z.dtype)).sum(dtype=jnp.int32)
        branches = [branch(part) for _, part in self.components]
        return jax.lax.switch(choice, branches, key_move)


def mixture(
    components: Mapping[Proposal, float] | Iterable[tuple[float, Proposal]],
) -> Proposal:
    """One of several proposals at each step, chosen at random.

    The choice does not depend on the position, so the chain is a mixture of valid
    kernels, and each component uses its own proposal ratio [1].

    Components share one step size. Only moves of components with a step size adapt it,
    and the target acceptance rate is the mean of theirs. Vectorised chains compute
    every component at every step.

    :param components: ``{proposal: weight}``, or pairs ``(weight, proposal)``; the
        weights are positive and need not sum to one.
    :raises TypeError: if a component is not a proposal, or its weight not a number.
    :raises ValueError: if there is no component, or a weight is not positive.

    **References:**

    1. Luke Tierney (1994), *Markov chains for exploring posterior distributions*,
       Annals of Statistics 22(4).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> both = proposal.mixture(
        ...     {proposal.surrogate_hmc(): 3, proposal.delayed_random_walk(): 1}
        ... )
        >>> [weight for weight, _ in both.components]
        [0.75, 0.25]
    """
    usage = (
        "write mixture({surrogate_hmc(): 0.9, delayed_random_walk(): 0.1}) or "
        "mixture([(0.9, surrogate_hmc()), (0.1, delayed_random_walk())])"
    )
    if isinstance(components, Mapping):
        pairs: list[Any] = [(weight, part) for part, weight in components.items()]
    elif isinstance(components, Iterable):
        pairs = list(components)
    else:
        raise TypeError(
            f"mixture(...) must be given proposals with their weights, got "
            f"{components!r}: {usage}."
        )
    if not pairs:
        raise ValueError(f"mixture(...) got no component: {usage}.")
    checked = []
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Proposal)
        ):
            raise TypeError(
                f"mixture(...) must be given pairs (weight, proposal), got {pair!r}: "
                f"{usage}."
            )
        who = f"mixture({pair[1]!r}: weight)"
        checked.append(
            (check_number(who, pair[0], is_positive, "a positive number"), pair[1])
        )
    return _Mixture(tuple(checked))
