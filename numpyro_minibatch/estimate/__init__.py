"""How noisy: numbers that know their own noise, and how rows are turned into them.

Every decision of the package compares log likelihoods summed over all rows of
the data but read from a few. What such a sum is worth is an
:class:`Estimate`; exact is not a mode, it is ``variance == 0``.
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
