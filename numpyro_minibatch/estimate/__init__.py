"""How noisy: numbers that know their own noise, and how rows are turned into them.

Every decision of the package compares log likelihoods summed over all rows of
the data but read from a few. What such a sum is worth is an
:class:`Estimate`; exact is not a mode, it is ``variance == 0``.
"""

from numpyro_minibatch.estimate._estimates import (
    Augmented,
    Estimate,
    Exact,
    Shared,
    Weights,
    augmented,
    exact,
    penalty_correction,
    shared,
)
from numpyro_minibatch.estimate._estimates import Comparison as Comparison
from numpyro_minibatch.estimate._estimates import Look as Look
from numpyro_minibatch.estimate._estimates import Moments as Moments
from numpyro_minibatch.estimate._estimates import Reader as Reader
from numpyro_minibatch.estimate._estimates import Rule as Rule
from numpyro_minibatch.estimate._estimates import total as total

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
