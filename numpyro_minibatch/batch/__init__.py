"""Which rows: schemes that draw the rows of a minibatch.

A scheme is built by a lower-case function and holds the number of rows that it
draws at a time. Rows come from their own key stream, never from the state of the
chain, so that the rows of step ``t`` can be known ahead.
"""

from numpyro_minibatch.batch._schemes import (
    Batch,
    Scheme,
    Weighted,
    full,
    growing,
    importance,
    pilot,
    stratified,
    take_all,
    with_replacement,
    without_replacement,
)
from numpyro_minibatch.batch._schemes import BatchSize as BatchSize
from numpyro_minibatch.batch._schemes import FullBatch as FullBatch

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
