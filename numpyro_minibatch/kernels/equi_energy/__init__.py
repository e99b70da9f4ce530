"""MINTEE: the equi-energy sampler on nested minibatches.

Chain k of a ladder samples ``exp(-max(h, H_k) / T_k)``. Every step is one decision for
each chain,

    accept  iff  test(log w_k(s') - log w_k(s) + proposal ratio)          a local move
    accept  iff  test(log w_k(s') / w_{k+1}(s') - log w_k(s) / w_{k+1}(s))    a jump

where a state s is a position with the key of its batch, a jump's s' is any that the
next hotter chain has had in the same ring of energies, and the weight w_k(s) is known
exactly: it is what the state's own batch says.
"""

from numpyro_minibatch.kernels.equi_energy._kernel import MINTEE, MINTEEState

__all__ = [
    "MINTEE",
    "MINTEEState",
]
