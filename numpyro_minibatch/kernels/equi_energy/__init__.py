"""MINTEE: the equi-energy sampler on nested minibatches.

Chain k of a ladder samples ``exp(-max(h, H_k) / T_k)``. A step is one accept/reject
step for each chain,

    accept  iff  test(log w_k(s') - log w_k(s) + proposal ratio)          a local move
    accept  iff  test(log w_k(s') / w_{k+1}(s') - log w_k(s) / w_{k+1}(s))    a jump

where a state s is a position with the key of its batch, the s' of a jump is a past
state of the next hotter chain in the same ring of energies, and the weight w_k(s) is
computed from the state's own batch, so that it is known exactly.
"""

from numpyro_minibatch.kernels.equi_energy._kernel import MINTEE, MINTEEState

__all__ = [
    "MINTEE",
    "MINTEEState",
]
