"""The kernels: each a short composition of the choices in the other modules."""

from numpyro_minibatch.kernels.austerity import AusterityMH
from numpyro_minibatch.kernels.confidence import ConfidenceMH
from numpyro_minibatch.kernels.metropolis import MinibatchMH
from numpyro_minibatch.kernels.mh_minibatch import MHMinibatch
from numpyro_minibatch.kernels.mint import MINT

__all__ = ["MINT", "AusterityMH", "ConfidenceMH", "MHMinibatch", "MinibatchMH"]
