"""Schemes that draw the rows of a minibatch.

A lower-case function builds a scheme, which stores the number of rows of a draw. Rows
depend only on their own key stream and never on the state of the chain, so that the
rows of step ``t`` can be computed in advance.
"""

from numpyro_minibatch.batch._contract import Batch, Scheme, full
from numpyro_minibatch.batch._contract import BatchSize as BatchSize
from numpyro_minibatch.batch._contract import FullBatch as FullBatch
from numpyro_minibatch.batch._growing import growing, pilot
from numpyro_minibatch.batch._permutation import permute as permute
from numpyro_minibatch.batch._strata import Design as Design
from numpyro_minibatch.batch._strata import stratum_of as stratum_of
from numpyro_minibatch.batch._uniform import with_replacement, without_replacement
from numpyro_minibatch.batch._weighted import Weighted, importance, stratified, take_all

__all__ = [
    "Batch",
    "Scheme",
    "Weighted",
    "full",
    "growing",
    "importance",
    "pilot",
    "stratified",
    "take_all",
    "with_replacement",
    "without_replacement",
]
