"""Estimates with a variance, and how they are computed from rows.

Every accept/reject step compares log likelihoods summed over all rows of the data, but
reads only a few rows. Such a sum is an :class:`Estimate`, a value with its variance. An
exact sum has ``variance == 0`` and needs no special case.
"""

from numpyro_minibatch.estimate._comparison import (
    Augmented,
    Exact,
    Shared,
    augmented,
    exact,
    shared,
)
from numpyro_minibatch.estimate._comparison import Comparison as Comparison
from numpyro_minibatch.estimate._number import Estimate, Weights, penalty_correction
from numpyro_minibatch.estimate._number import Moments as Moments
from numpyro_minibatch.estimate._number import total as total
from numpyro_minibatch.estimate._reader import Reader as Reader
from numpyro_minibatch.estimate._reader import SequentialEvidence as SequentialEvidence
from numpyro_minibatch.estimate._reader import StoppingRule as StoppingRule

__all__ = [
    "Augmented",
    "Estimate",
    "Exact",
    "Shared",
    "Weights",
    "augmented",
    "exact",
    "penalty_correction",
    "shared",
]
