"""The contract of a proposal: a position and the log ratio of densities."""

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
from numpyro_minibatch.proposal._normals import Modes

__all__ = ["Bent", "ProposalContext", "Proposal", "Proposed"]


class Bent(NamedTuple):
    """Whitened coordinates in which scales vary less than in linear ones.

    :param center: the position where they are zero, ``(D,)``.
    :param whitening: the coordinates about it.
    """

    center: Array
    whitening: Whitening


class ProposalContext(NamedTuple):
    """The information about the target that a proposal may use.

    :param gradient: the gradient of the target's log density at a position. It is
        estimated from one batch, which is the same for the whole proposal and
        independent of the batch of the accept/reject step.
    :param whitening: the whitened coordinates.
    :param center: centre of the surrogate's posterior, shape ``(D,)``; only with a
        control variate.
    :param log_surrogate: log density of the surrogate at a position, a scalar, up to
        a constant; only with a control variate.
    :param num_steps: the number of steps for a quarter of a period of the surrogate's
        dynamics that are short enough to be accepted in its tails, too; 0 if the
        surrogate is normal with mean ``center`` and the whitening's covariance.
    :param long: whether trajectories should be longer, up to three quarters.
    :param draws_fit: whether so many independent draws are accepted that half of the
        moves may be such draws; only with few parameters.
    :param over_relaxed: whether the target is so close to a normal surrogate that
        over-relaxed moves, to the other side of its centre, are accepted from the tails
        as well.
    :param num_rows: rows of data that an evaluation of the surrogate reads.
    :param modes: the modes of the surrogate if there are several; ``None`` with one.
    :param bent: the centre and coordinates in which trajectories follow the surrogate,
        if scales vary there in those of ``whitening``; ``None`` if they do not.
    :param log_surrogate_in: a function from a mode to the log density of its own
        surrogate, which is smooth everywhere; only with several modes.
    """

    gradient: Callable[[Array], Array]
    whitening: Whitening
    center: Array | None = None
    log_surrogate: Callable[[Array], Array] | None = None
    num_steps: int = 4
    long: bool = False
    draws_fit: bool = False
    over_relaxed: bool = False
    num_rows: int = 0
    modes: Modes | None = None
    bent: Bent | None = None
    log_surrogate_in: Callable[[Array], Callable[[Array], Array]] | None = None


class Proposed(NamedTuple):
    """A proposed position.

    :param z: the position, shape ``(D,)``.
    :param log_q_ratio: ``log q(z | z') - log q(z' | z)``; zero if the position does not
        change.
    :param moved: whether the position changed. A proposal whose first stage rejected
        stays at the very same ``z``, and no row needs to be read.
    :param tunes: whether the step-size adaptation may use the outcome of the move. It
        is false only for components of a :func:`mixture` without a step size.
    :param log_surrogate: the log surrogate at both positions, shape ``(2,)``, if
        ``log_q_ratio`` is their difference. It then cancels in the acceptance ratio,
        and the decision needs only the residual of the target over the surrogate.
    :param jump: whether the proposal tried another mode, even if the first stage
        rejected it; ``None`` from a proposal that does not move between modes.
    """

    z: Array
    log_q_ratio: Array
    moved: ArrayLike = np.True_
    tunes: ArrayLike = np.True_
    log_surrogate: Array | None = None
    jump: Array | None = None


@dataclass(frozen=True)
class Proposal(ABC):
    """A way to propose a position; the base of the ``proposal.*`` choices."""

    #: target acceptance rate of a Metropolis test, over all stages together
    target_accept_prob = 0.3
    #: whether :meth:`propose` calls the context's ``gradient``
    uses_gradient = False
    #: whether it needs the context's ``center`` and ``log_surrogate``
    uses_surrogate = False
    #: whether it follows the surrogate's gradient, so that an accurate one pays
    follows_surrogate = False
    #: whether it moves between the modes of a surrogate that has several
    moves_between_modes = False
    #: whether it has a scale that warmup should tune
    adapts_step_size = True
    #: step size to start from
    default_step_size = 1.0

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that results record, for :func:`~numpyro_minibatch.diagnose`."""
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
        :param context: the available information about the target.
        """

    def evaluations(self, context: ProposalContext) -> int:
        """The largest number of surrogate evaluations of a proposal."""
        return 0


# checks ------------------------------------------------------------------------------


def check_number(
    what: str, value: Any, allowed: Callable[[Any], bool], expected: str
) -> float:
    """Raise unless a value is a finite number that is allowed.

    :param what: the function and its argument, for the messages.
    :param value: the argument that the user gave.
    :param allowed: a function that is true for allowed numbers.
    :param expected: a description of the allowed numbers.
    :return: the value as a ``float``.
    :raises TypeError: the value is not a number.
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
