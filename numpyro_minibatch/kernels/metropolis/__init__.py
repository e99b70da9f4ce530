"""Metropolis-Hastings on minibatches; the named algorithms are presets of it.

Every kernel of this family makes the accept/reject step

    accept  iff  test(log_ratio(target, z, z', batch) / T + proposal and prior ratios)

with its own choice of the batch, the estimate and the test.
"""

from numpyro_minibatch.kernels.metropolis._kernel import MinibatchMH
from numpyro_minibatch.kernels.metropolis._state import MinibatchMHState

__all__ = ["MinibatchMH", "MinibatchMHState"]
