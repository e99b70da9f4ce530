"""A driver for long runs, which can be streamed to disk, stopped and resumed.

It is an alternative to NumPyro's ``MCMC`` and takes the same kernels. A run is a
sequence of chunks of one compiled program. While a chunk runs, the draws of the
previous one are fetched, written and reported.
"""

from numpyro_minibatch.sampling._reading import export_run, open_run
from numpyro_minibatch.sampling._sample import sample

__all__ = [
    "export_run",
    "open_run",
    "sample",
]
