"""What an acceptance test is: a probability, and the noise that it takes."""

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
    """What an acceptance test made of a log ratio; all fields have its shape.

    :param accept: boolean, whether the move is taken.
    :param accept_prob: the probability, given the estimate, that it is taken: what
        step-size adaptation and ``acceptance_rate`` use, being less noisy than
        ``accept``.
    :param reliable: boolean, whether the noise was inside the domain of the test.
    """

    accept: Array
    accept_prob: Array
    reliable: Array


class AcceptanceTest(ABC):
    """A rule that decides a move from an estimate of its log ratio.

    Subclasses say with which probability to accept; the decision is the same for
    all. They are compared and hashed by value, so that a compiled step is found again.
    """

    #: The rate of acceptance that ever smaller moves tend to, without noise.
    highest_accept_prob: float = 1.0

    @property
    @abstractmethod
    def max_variance(self) -> float:
        """The largest variance of a log ratio that is in the domain of the test."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a result records of it, for :func:`~numpyro_minibatch.diagnose`."""
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
        """Which rows are enough; ``None``, the default, where the variance says so.

        :param key: the key with which the test is going to decide.
        :param log_q_ratio: the proposal's log ratio.
        :param move: the current and the proposed position, unconstrained, in the
            form that the target takes.
        """
        return None


def uniform(key: Array, like: Array) -> Array:
    """The uniform numbers that decide."""
    # JAX draws from [0, 1), zero included: one minus it never is zero, so that a
    # hopeless move is not taken once in 2 ** 23 draws (the float32 grid), and it
    # never exceeds one, so that a certain move is always taken.
    return 1.0 - jax.random.uniform(key, like.shape, like.dtype)
