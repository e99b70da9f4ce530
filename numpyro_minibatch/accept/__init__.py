"""Acceptance tests for a log acceptance ratio that is estimated with noise.

An :class:`~numpyro_minibatch.estimate.Estimate` of the log Metropolis-Hastings ratio
decides each move. A test maps the estimate to an acceptance probability. The tests
differ in how they treat the noise: :func:`metropolis` and :func:`barker` ignore it,
:func:`penalty` compensates for it with a lower acceptance rate, and
:func:`compensated_barker` uses it as part of its own randomness. Let ``value ~
N(delta, variance)``, where ``delta`` is the true log ratio, and let ``A(delta)`` be the
acceptance probability averaged over that noise. Detailed balance requires ``A(delta) =
exp(delta) * A(-delta)``; the figures below measure the deviation from it. All tests
assume normal noise, and none can correct noise that is not normal.

Two tests are sequential: :func:`austerity` and :func:`confidence` draw their uniform
number before any row, and read rows until it is clear enough on which side of it the
log ratio lies. A bounded fraction of their decisions is wrong.
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
