"""Take it or leave it: acceptance tests for a log ratio that is known up to noise.

A move is decided by one :class:`~numpyro_minibatch.estimate.Estimate` of the log of
the Metropolis-Hastings ratio. Each test maps it to a probability of acceptance, and
differs from the others in what it does about the noise: :func:`metropolis` and
:func:`barker` ignore it, :func:`penalty` pays for it with acceptance, and
:func:`compensated_barker` makes it part of its own randomness. With ``value ~
N(delta, variance)`` around the true log ratio ``delta``, and ``A(delta)`` the
acceptance probability averaged over that noise, detailed balance asks for
``A(delta) = exp(delta) * A(-delta)``; this is what the figures below measure.
All of it rests on the noise being normal; no test can repair noise that is not.

Two tests are sequential: :func:`austerity` and :func:`confidence` draw their uniform
number before any row, and read rows until it is clear enough on which side of it the
log ratio lies. They decide a share of the moves wrongly, and bound that share.
"""

from numpyro_minibatch.accept._contract import AcceptanceTest, Decision
from numpyro_minibatch.accept._one_shot import (
    barker,
    compensated_barker,
    metropolis,
    penalty,
    series,
)
from numpyro_minibatch.accept._sequential import (
    SequentialTest,
    austerity,
    average_epsilon,
    confidence,
    logistic_bound,
)
from numpyro_minibatch.estimate import penalty_correction

__all__ = [
    "AcceptanceTest",
    "Decision",
    "SequentialTest",
    "austerity",
    "average_epsilon",
    "barker",
    "compensated_barker",
    "confidence",
    "logistic_bound",
    "metropolis",
    "penalty",
    "penalty_correction",
    "series",
]
