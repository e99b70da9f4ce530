"""Proposals, in the coordinates that the adapted mass matrix whitens.

A proposal is a density ``q(z' | z)``, and a kernel needs only the ratio of its two
directions. Some proposals use a surrogate of the target, a density that needs no data:
the exact prior times a Taylor polynomial of the likelihood, which control variates
provide. A move that is reversible with respect to the surrogate ``pi_s`` satisfies
``pi_s(z) q(z' | z) = pi_s(z') q(z | z')``. Its ratio is therefore known, however the
move was made, and the minibatch decides only on the error of the surrogate.
"""

import warnings
from typing import Any

from numpyro_minibatch.preconditioner import Scales as Scales
from numpyro_minibatch.preconditioner import Whitening
from numpyro_minibatch.proposal._contract import Bent as Bent
from numpyro_minibatch.proposal._contract import Proposal, ProposalContext, Proposed
from numpyro_minibatch.proposal._local import langevin, random_walk
from numpyro_minibatch.proposal._mixture import mixture
from numpyro_minibatch.proposal._modes import across_modes
from numpyro_minibatch.proposal._normals import Modes as Modes
from numpyro_minibatch.proposal._normals import PriorAtModes as PriorAtModes
from numpyro_minibatch.proposal._on_surrogate import HEAVY_DF as HEAVY_DF
from numpyro_minibatch.proposal._on_surrogate import JITTER as JITTER
from numpyro_minibatch.proposal._on_surrogate import LONGER as LONGER
from numpyro_minibatch.proposal._on_surrogate import (
    MOST_FOR_MANY_DRAWS as MOST_FOR_MANY_DRAWS,
)
from numpyro_minibatch.proposal._on_surrogate import (
    TRAJECTORY_LENGTH as TRAJECTORY_LENGTH,
)
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
    "ProposalContext",
    "Proposal",
    "Proposed",
    "Whitening",
    "across_modes",
    "delayed_random_walk",
    "independence",
    "langevin",
    "mixture",
    "preconditioned_crank_nicolson",
    "random_walk",
    "student_t",
    "surrogate_hmc",
]


def __getattr__(name: str) -> Any:
    if name == "Landscape":  # the name of development versions before 0.1
        warnings.warn(
            "proposal.Landscape is now proposal.ProposalContext.",
            DeprecationWarning,
            stacklevel=2,
        )
        return ProposalContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
