"""What a proposal is: a position and the log ratio of densities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch.preconditioner import Whitening

__all__ = ["ProposalContext", "Proposal", "Proposed"]


class ProposalContext(NamedTuple):
    """What a proposal may use of the target.

    :param gradient: the gradient of the target's log density at a position, estimated
        from one batch, the same for the whole proposal and independent of the batch
        which decides.
    :param whitening: the whitened coordinates.
    :param center: centre of the surrogate's posterior, shape ``(D,)``; only with a
        control variate.
    :param log_surrogate: log density of the surrogate at a position, a scalar, up to
        a constant; only with a control variate.
    :param num_steps: steps in which a quarter of a period of the surrogate's dynamics
        keeps accepting, in its tails as well; 0 where the surrogate is normal with the
        mean ``center`` and the whitening's covariance.
    :param over_relaxed: whether the target is so close to a normal surrogate that
        over-relaxed moves, to the other side of its centre, are accepted from the tails
        as well.
    :param num_rows: rows of data that an evaluation of the surrogate reads.
    """

    gradient: Callable[[Array], Array]
    whitening: Whitening
    center: Array | None = None
    log_surrogate: Callable[[Array], Array] | None = None
    num_steps: int = 4
    over_relaxed: bool = False
    num_rows: int = 0


class Proposed(NamedTuple):
    """A proposed position.

    :param z: the position, shape ``(D,)``.
    :param log_q_ratio: ``log q(z | z') - log q(z' | z)``; zero for a stay.
    :param moved: whether the position is another one. A proposal with a first stage of
        its own that rejected stays at the very same ``z``: no row needs to be read.
    :param tunes: whether the fate of the move says something about the step size.
        Only a component of a :func:`mixture` that has no step size says no.
    :param log_surrogate: the log surrogate at both positions, shape ``(2,)``, where
        ``log_q_ratio`` is their difference: it cancels in a decision, which then is
        about what the target has beyond the surrogate and needs nothing else.
    """

    z: Array
    log_q_ratio: Array
    moved: ArrayLike = np.True_
    tunes: ArrayLike = np.True_
    log_surrogate: Array | None = None


@dataclass(frozen=True)
class Proposal(ABC):
    """A way to propose a position; the base of the ``proposal.*`` choices."""

    #: acceptance rate that a Metropolis test should aim at, all stages together
    target_accept_prob = 0.3
    #: whether :meth:`propose` calls the context's ``gradient``
    uses_gradient = False
    #: whether it needs the context's ``center`` and ``log_surrogate``
    uses_surrogate = False
    #: whether it follows the surrogate's gradient, so that what it knows pays
    follows_surrogate = False
    #: whether it has a scale that warmup should tune
    adapts_step_size = True
    #: step size to start from
    default_step_size = 1.0

    @property
    def facts(self) -> dict[str, Any]:
        """What a result records of it, for :func:`~numpyro_minibatch.diagnose`."""
        return {
            "has_step_size": self.adapts_step_size,
            "uses_surrogate": self.uses_surrogate,
        }

    @abstractmethod
    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        """Propose a position.

        :param key: PRNG key.
        :param z: the current position, shape ``(D,)``.
        :param step_size: step size in the whitened coordinates.
        :param context: what can be known about the target.
        """

    def evaluations(self, context: ProposalContext) -> int:
        """How often the surrogate is evaluated for a proposal, at most."""
        return 0


# checks ------------------------------------------------------------------------------


def check_number(
    what: str, value: Any, allowed: Callable[[Any], bool], expected: str
) -> float:
    """Raise unless a value is a finite number that is allowed.

    :param what: the function and its argument, for the messages.
    :param value: what the user wrote.
    :param allowed: whether a number is.
    :param expected: what is allowed, in words.
    :return: the value as a ``float``.
    :raises TypeError: the value is no number.
    :raises ValueError: it is not finite, or not allowed.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(
            f"{what} must be {expected}, got {value!r} ({type(value).__name__})."
        )
    if not (np.isfinite(float(value)) and allowed(value)):
        raise ValueError(f"{what} must be {expected}, got {value!r}.")
    return float(value)


def is_positive(value: Any) -> bool:
    """Whether a number is above zero."""
    return value > 0
