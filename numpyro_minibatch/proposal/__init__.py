"""Where to: proposals, in the coordinates that the adapted mass matrix whitens.

A proposal is a density ``q(z' | z)`` and the kernels only ever need the ratio of its
two directions. Some proposals look at a surrogate of the target, a density that needs
no data: the exact prior times a Taylor polynomial of the likelihood, which control
variates provide. A move that leaves the surrogate ``pi_s`` invariant and is reversible
has ``pi_s(z) q(z' | z) = pi_s(z') q(z | z')``, so that its ratio is known however the
move was made, and what is left for the minibatch to decide is the surrogate's error.
"""

from numpyro_minibatch.preconditioner import Whitening
from numpyro_minibatch.proposal._contract import Landscape, Proposal, Proposed
from numpyro_minibatch.proposal._local import langevin, random_walk
from numpyro_minibatch.proposal._mixture import mixture
from numpyro_minibatch.proposal._on_surrogate import LENGTH as LENGTH
from numpyro_minibatch.proposal._on_surrogate import (
    delayed_random_walk,
    independence,
    preconditioned_crank_nicolson,
    student_t,
    surrogate_hmc,
)
from numpyro_minibatch.proposal._on_surrogate import follow as follow
from numpyro_minibatch.proposal._on_surrogate import (
    log_metropolis_ratio as log_metropolis_ratio,
)

__all__ = [
    "Landscape",
    "Proposal",
    "Proposed",
    "Whitening",
    "delayed_random_walk",
    "independence",
    "langevin",
    "mixture",
    "preconditioned_crank_nicolson",
    "random_walk",
    "student_t",
    "surrogate_hmc",
]
