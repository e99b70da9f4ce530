"""The contract of an acceptance test: a probability, and the noise it tolerates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch.estimate import Estimate, StoppingRule

__all__ = ["AcceptanceTest", "Decision"]


class Decision(NamedTuple):
    """The result of an acceptance test; all fields have the shape of the log ratio.

    :param accept: boolean, whether the move is accepted.
    :param accept_prob: the probability of acceptance, given the estimate. Step-size
        adaptation and ``acceptance_rate`` use it because it is less noisy than
        ``accept``.
    :param reliable: boolean, whether the noise was inside the domain of the test.
    """

    accept: Array
    accept_prob: Array
    reliable: Array


class AcceptanceTest(ABC):
    """A rule that accepts or rejects a move by an estimate of its log ratio.

    Subclasses define the acceptance probability; the base class draws the decision.
    Subclasses are compared and hashed by value, so that a compiled step is found again.
    """

    #: The acceptance rate that ever smaller moves tend to, without noise.
    highest_accept_prob: float = 1.0

    @property
    @abstractmethod
    def max_variance(self) -> float:
        """The largest variance of a log ratio that is in the domain of the test."""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that results record, for :func:`~numpyro_minibatch.diagnose`."""
        return {
            "decides": True,
            "highest_accept_prob": self.highest_accept_prob,
            "max_variance": self.max_variance,
        }

    @abstractmethod
    def probability(self, log_ratio: Estimate) -> Array:
        """Probability of acceptance given the estimate; NaN where that is undefined.

        :param log_ratio: estimated log ratio, of any shape.
        """

    def __call__(self, key: Array, log_ratio: Estimate) -> Decision:
        """Decide.

        :param key: a JAX random key, used for one uniform number per log ratio.
        :param log_ratio: estimated log ratio, of any shape. A NaN in its value or
            variance is a rejection and not reliable.
        """
        probability = self.probability(log_ratio)
        variance = jnp.asarray(log_ratio.variance)
        undefined = jnp.isnan(probability + variance)
        accept_prob = jnp.where(undefined, 0.0, probability)
        accept = uniform(key, accept_prob) <= accept_prob
        reliable = (variance <= self.max_variance) & ~undefined
        return Decision(accept, accept_prob, reliable)

    def rule(
        self, key: Array, log_q_ratio: ArrayLike, move: tuple[Any, Any]
    ) -> StoppingRule | None:
        """A rule for when to stop reading; by default ``None``, for a fixed variance.

        :param key: the key with which the test is going to decide.
        :param log_q_ratio: the proposal's log ratio.
        :param move: the current and the proposed position, unconstrained, in the
            form that the target takes.
        """
        return None


def uniform(key: Array, like: Array) -> Array:
    """The uniform numbers that decide."""
    # JAX draws from [0, 1), zero included. One minus that number is never zero, so that
    # a hopeless move is not accepted once in 2 ** 23 draws (the float32 grid), and it
    # never exceeds one, so that a certain move is always accepted.
    return 1.0 - jax.random.uniform(key, like.shape, like.dtype)
