"""Set-up of a control variate: centre, surrogate, pilot, and what chains keep of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.util import is_prng_key

from numpyro_minibatch._internal.progress import stages
from numpyro_minibatch.batch import Scheme
from numpyro_minibatch.control_variate._center import (
    Problem,
    choose_coordinates,
    double,
    find_center,
)
from numpyro_minibatch.control_variate._exact_rows import exact_rows, without
from numpyro_minibatch.control_variate._pilot import Pilot, run_pilot
from numpyro_minibatch.control_variate._posterior import refined, surrogate_posterior
from numpyro_minibatch.control_variate._taylor import (
    Coordinates,
    ExactRows,
    Expansion,
    Form,
    Taylor,
)

__all__ = ["Needs", "Plan", "Prepared", "Surrogate", "prepare"]

_STARTS = 4  # searches for the mode
_STAGES = 5
_STARTING = 56  # positions to start chains from
_NEAR = 0.94  # share of effective draws by log weights of standard deviation 1/4


class Surrogate(NamedTuple):
    """What a chain with a control variate keeps in its state.

    :param expansion: the summed polynomial.
    :param location: about the mean of the surrogate's posterior, ``(D,)``.
    :param root: transpose of a root of about its covariance, ``(D, D)``.
    :param designs: how the rows of a batch are drawn, by plate.
    """

    expansion: Expansion
    location: Array
    root: Array
    designs: dict[str, Any]


class Plan(NamedTuple):
    """What the pilot decided that is part of the program; hashable.

    :param coordinates: what the rows are expanded in.
    :param form: how residuals are computed.
    :param scheme: how rows are drawn, bound to the plates.
    :param num_steps: steps of a trajectory on the surrogate; none where its dynamics
        are known in closed form.
    :param near: whether draws of it may be over-relaxed there.
    """

    coordinates: Coordinates
    form: Form
    scheme: Scheme
    num_steps: int
    near: bool


class Needs(NamedTuple):
    """What a kernel has to say on what suits it.

    :param smallest: rows of a batch for the pilot to try first.
    :param follows: whether moves follow the surrogate, so that what it knows pays.
    """

    smallest: int
    follows: bool = False


class Prepared(NamedTuple):
    """The result of the set-up.

    :param plan: what is part of the program.
    :param surrogate: what is part of the state.
    :param starts: positions where chains may start, with a leading axis.
    :param report: what was measured, numbers and names.
    """

    plan: Plan
    surrogate: Surrogate
    starts: Any
    report: dict[str, Any]

    def start(self, key: Array) -> Any:
        """Where chains start: a draw of the surrogate's posterior for each key."""
        count = len(jax.tree.leaves(self.starts)[0])

        def one(key: Array) -> Any:
            chosen = jax.random.randint(key, (), 0, count)
            return jax.tree.map(lambda x: x[chosen], self.starts)

        return one(key) if is_prng_key(key) else jax.vmap(one)(key)


def _check_exact_rows(who: str, problem: Problem, taylor: Taylor, needs: Needs) -> None:
    call = f"control_variate.taylor{taylor.order}(exact_rows={taylor.exact_rows})"
    asked = f"{who}: {call}"
    if taylor.exact_rows and not needs.follows:
        raise ValueError(
            f"{asked} is for proposals that follow the surrogate. Write "
            "proposal=proposal.surrogate_hmc(), or leave exact_rows out."
        )
    if taylor.exact_rows and problem.on_host:
        raise ValueError(
            f"{asked} reads these rows at each evaluation of the surrogate, and the "
            "data are HostRows. Write exact_rows=0."
        )


def prepare(
    who: str,
    problem: Problem,
    taylor: Taylor,
    scheme: Scheme,
    sizes: Mapping[str, int | None],
    needs: Needs,
) -> Prepared:
    """Expand the rows of a target, and see how well that works.

    :param who: the kernel's name, for the messages.
    :param problem: the target.
    :param taylor: the control variate.
    :param scheme: how rows are drawn.
    :param sizes: rows of a batch, by plate; ``None`` where the pilot is to choose.
    :param needs: what suits the kernel.
    :raises ValueError: the expansion is of no use; the message says why.
    """
    _check_exact_rows(who, problem, taylor, needs)
    target = problem.target_of(problem.arrays)
    problem.coordinates = choose_coordinates(who, target, problem.example, taylor.sites)
    flat, _ = ravel_pytree(problem.example)
    rng = np.random.default_rng(40)
    # the box that NumPyro starts chains in
    positions = rng.uniform(-2, 2, size=(_STARTS, flat.size))
    positions[0] = 0.0
    with stages(who, _STAGES) as progress:
        with double():
            arrays = problem.arrays
            of = jax.jit(
                jax.vmap(
                    lambda z: ravel_pytree(problem.phi_of(arrays, z))[0], in_axes=0
                )
            )
            starts = np.asarray(of(jnp.asarray(positions, jnp.float64)))
        center = find_center(who, problem, starts, taylor, progress)
        progress("posterior of the surrogate")
        posterior = surrogate_posterior(who, problem, center, positions[0])
        expansion = center.expansion

        def measure(
            expansion: Expansion, draws: np.ndarray, before: Pilot | None = None
        ) -> Pilot:
            return run_pilot(
                who,
                problem,
                taylor,
                scheme,
                sizes,
                expansion,
                draws,
                needs.smallest,
                progress,
                before,
            )

        pilot = measure(expansion, posterior.draws)
        exact: dict[str, ExactRows] = {}
        if needs.follows:
            bound = scheme.bound(pilot.sizes, problem.plates)
            exact = exact_rows(
                problem, taylor, bound, pilot, expansion, posterior.draws
            )
        if exact:
            progress("rows that the surrogate has as they are")
            fewer = without(problem, expansion, exact)
            changed = refined(who, problem, posterior, expansion, fewer)
            if changed is None and taylor.exact_rows:
                raise ValueError(
                    f"{who}: with exact_rows={taylor.exact_rows} the surrogate could "
                    "not be sampled. Write a smaller number, or 0."
                )
            if changed is None:
                exact = {}
            else:
                posterior, expansion = changed, fewer
        if exact:
            if expansion.has_every_row:
                pilot = pilot.without_residuals()
            else:
                pilot = measure(expansion, posterior.draws, pilot)
    dtype = problem.dtype
    surrogate = Surrogate(
        expansion=expansion.cast(dtype),
        location=jnp.asarray(posterior.location, dtype),
        root=jnp.asarray(posterior.root, dtype),
        designs=pilot.designs,
    )
    # in tails that a chain hardly leaves, the other side is the wrong place to look
    near = posterior.gaussian and pilot.importance_ess >= _NEAR
    report = {
        **pilot.report,
        "coordinates": problem.coordinates,
        "gaussian": posterior.gaussian,
        "surrogate_rhat": posterior.rhat,
        "surrogate_num_steps": posterior.num_steps,
        "surrogate_stuck": posterior.stuck,
        "over_relaxed": near,
        "other_mode": center.other_mode,
        "exact_rows": sum(len(kept.rows) for kept in exact.values()),
    }
    return Prepared(
        Plan(
            problem.coordinates,
            pilot.form,
            scheme.bound(pilot.sizes, problem.plates),
            posterior.num_steps,
            near,
        ),
        surrogate,
        jax.vmap(problem.unravel)(jnp.asarray(posterior.draws[:_STARTING], dtype)),
        report,
    )
