"""The kernels: each a short composition of the choices in the other modules."""

from numpyro_minibatch.kernels.metropolis import MINT, MHMinibatch, MinibatchMH

__all__ = ["MINT", "MHMinibatch", "MinibatchMH"]
