"""How long: a driver for long runs, which streams, stops, and goes on.

It stands beside NumPyro's ``MCMC`` and takes the same kernels. A run is a sequence of
chunks of one compiled program; while one runs, the draws of the one before it are
fetched, written and reported.
"""

from numpyro_minibatch.sampling._sample import export_run, open_run, sample

__all__ = [
    "export_run",
    "open_run",
    "sample",
]
