"""The general kernel: any proposal, batch, estimate and acceptance test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro.infer import init_to_uniform

from numpyro_minibatch._internal.checks import (
    check_count,
    check_positive,
)
from numpyro_minibatch.accept import AcceptanceTest, SequentialTest
from numpyro_minibatch.batch import BatchSize, FullBatch, Scheme
from numpyro_minibatch.control_variate import Taylor, log_surrogate
from numpyro_minibatch.control_variate._expand import Expansion, Expansions
from numpyro_minibatch.control_variate._problem import Needs
from numpyro_minibatch.estimate import (
    Augmented,
    Exact,
    Reader,
    Shared,
)
from numpyro_minibatch.kernels._shared.adaptation import AdaptedKernel, advanced
from numpyro_minibatch.kernels._shared.arguments import (
    read_acceptance,
    read_flags,
    read_target_accept_prob,
)
from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.contract import Pieces, Start
from numpyro_minibatch.kernels._shared.pieces import SteppedKernel
from numpyro_minibatch.kernels.metropolis._arguments import (
    read_estimate,
    read_fallback,
    read_proposal,
    refuse_unfit_rule,
)
from numpyro_minibatch.kernels.metropolis._state import MinibatchMHState
from numpyro_minibatch.kernels.metropolis._step import (
    Carry,
    Checks,
    MetropolisStep,
    Readers,
    Step,
)
from numpyro_minibatch.proposal import Proposal, ProposalContext, Whitening
from numpyro_minibatch.target import Target

__all__ = ["MinibatchMH"]

_OF_CHECKS = "check_rms_error", "check_rms_z", "check_change"  # fields
_OF_MODES = "mode", "mode_moves_tried", "mode_moves_made"  # fields
_FEWEST = 16  # the smallest batch that the pilot chooses; fewer rows save no time
# row likelihoods that the checks of a warmup evaluate, and the fewest checks
_CHECKED_EVALUATIONS, _FEWEST_CHECKS = 40_000_000, 32


class MinibatchMH(SteppedKernel, AdaptedKernel, MinibatchKernel):
    """Metropolis-Hastings whose log ratio is estimated from a minibatch.

    This is the general kernel of its family: it takes any proposal, any scheme that
    draws rows, any estimate of the log ratio, and any acceptance test for noisy log
    ratios. :class:`MINT` and :class:`MHMinibatch` are presets of it.

    The stationary distribution is ``prior * likelihood ** (1 / temperature)``, where
    the likelihood is every observed site and every factor in a data plate. This holds
    as long as the estimated log ratio is normal and its variance is inside the test's
    domain; ``reliable`` records for which decisions it was. With all rows
    (``batch=batch.full()``) the decisions have no noise, and the kernel is exact up to
    rounding. In float32, an error that is common to all rows adds up: for a normal
    model with 4e6 rows at ``T = 1`` it reached 0.3 in the log ratio. Use float64 there.

    :param model: a NumPyro model with a data plate.
    :param target: a :class:`~numpyro_minibatch.Target` instead of a model.
    :param batch_size: rows of a batch, or ``{plate: rows}``; by default each plate's
        own ``subsample_size``.
    :param batch: a ``batch.*`` scheme instead of ``batch_size``.
    :param estimate: ``"shared"`` (default: one batch for both positions),
        ``"augmented"`` (keep the current position's estimate), ``"exact"`` (all rows,
        by per-row differences), or an ``estimate.*`` object.
    :param acceptance: an ``accept.*`` test; by default :func:`accept.penalty`.
    :param proposal: a ``proposal.*`` object; by default
        :func:`proposal.random_walk`, with a control variate
        :func:`proposal.surrogate_hmc`.
    :param step_size: (initial) step size, in whitened coordinates; by default the
        proposal's own.
    :param adapt_step_size: adapt the step size in warmup to ``target_accept_prob``.
    :param adapt_mass_matrix: adapt the mass matrix in warmup.
    :param dense_mass: full mass matrix rather than a diagonal one.
    :param target_accept_prob: acceptance rate to adapt to. The default depends on the
        proposal and the test: 0.3 for a random walk, 0.57 for Langevin steps, and two
        thirds of that with a Barker test.
    :param num_steps: inner steps that make one draw.
    :param temperature: temperature ``T`` of the likelihood.
    :param temper_prior: whether the prior has the same temperature; by default only
        the likelihood is tempered.
    :param control_variate: ``"taylor2"`` (or ``"taylor1"``, or what
        :mod:`~numpyro_minibatch.control_variate` builds): estimate from a batch only
        the residual of each row's log likelihood over its Taylor polynomial, which
        makes temperature 1 practical. It has one mode, or several with
        ``control_variate.taylor2(modes=8)``. By default, batches are then
        those of :func:`batch.stratified`, of a size that a pilot chooses (16 rows if
        their noise is small) unless the model or ``batch_size`` does. Chains start at
        draws from the surrogate's posterior, unless an ``init_strategy`` is given.
        Coordinates are whitened by its covariance, and no mass matrix adapts.
        :attr:`pilot` holds the measurements.
    :param exact_checks: with a control variate, repeat about a hundred decisions of the
        warmup (over all vectorised chains together; down to 32 with more than 400,000
        rows, or fewer where rows are integrals), and a few afterwards, on all rows, to
        check the noise that the batches reported.
    :param fallback: ``"exact"`` to make those decisions on all rows whose noise is
        outside the test's domain.
    :param init_strategy: a per-site initialisation function of NumPyro.
    :param rows: ``{"X": 0, "y": 0}``: the arguments of the model that have the rows,
        and their axes, if the model does not index its data and the arguments cannot
        be found by their shapes; see :class:`MinibatchKernel`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or both of a pair are given.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import MinibatchMH, accept, proposal

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = MinibatchMH(
        ...     model, acceptance=accept.penalty(), proposal=proposal.langevin(),
        ...     temperature=100.0,
        ... )
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    _estimate: Shared | Augmented | Exact
    _acceptance: AcceptanceTest
    _proposal: Proposal
    _step_size: float
    _adapt_step_size: bool
    _adapt_mass_matrix: bool
    _dense_mass: bool
    _target_accept_prob: float
    draws_once_a_step = True
    keeps_target = True
    step_size_order = 1
    visits_modes = True

    def __init__(
        self,
        model: Callable | None = None,
        *,
        target: Target | None = None,
        batch_size: BatchSize | None = None,
        batch: Scheme | None = None,
        estimate: str | Shared | Augmented | Exact = "shared",
        acceptance: AcceptanceTest | None = None,
        proposal: Proposal | None = None,
        step_size: float | None = None,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        dense_mass: bool = False,
        target_accept_prob: float | None = None,
        num_steps: int = 1,
        temperature: float = 1.0,
        temper_prior: bool = False,
        control_variate: str | Taylor | None = None,
        exact_checks: bool = True,
        fallback: Literal["exact"] | None = None,
        init_strategy: Callable = init_to_uniform,
        rows: Mapping[str, Any] | None = None,
    ) -> None:
        name = self._who
        self._estimate, batch = read_estimate(name, estimate, batch, batch_size)
        super().__init__(
            model,
            target=target,
            batch_size=None if isinstance(self._estimate, Exact) else batch_size,
            batch=batch,
            temperature=temperature,
            temper_prior=temper_prior,
            control_variate=control_variate,
            init_strategy=init_strategy,
            rows=rows,
        )
        self._acceptance = read_acceptance(name, acceptance)
        self._proposal = read_proposal(
            name, proposal, self._control_variate is not None, self._several_modes
        )
        if step_size is None:
            step_size = self._proposal.default_step_size
        refuse_unfit_rule(name, self._acceptance, self._batch, self._estimate)
        check_positive(name, "step_size", step_size)
        check_count(name, "num_steps", num_steps)
        # a test that accepts at most half of small moves needs a lower target
        lower = 1.0 if self._acceptance.highest_accept_prob == 1 else 2 / 3
        self._target_accept_prob = read_target_accept_prob(
            name,
            target_accept_prob,
            self._proposal.target_accept_prob * lower,
            self._acceptance,
        )
        (
            adapt_step_size,
            self._adapt_mass_matrix,
            self._dense_mass,
            self._exact_checks,
        ) = read_flags(
            name,
            adapt_step_size=adapt_step_size,
            adapt_mass_matrix=adapt_mass_matrix,
            dense_mass=dense_mass,
            exact_checks=exact_checks,
        )
        self._adapt_step_size = adapt_step_size and self._proposal.adapts_step_size
        self._fallback = read_fallback(name, fallback, self._estimate)
        self._step_size = float(step_size)
        self.num_steps = int(num_steps)

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that the driver collects."""
        return (
            "z",
            "diverging",
            "accept_prob",
            "step_size",
            "lp_estimate",
            "log_ratio",
            "log_ratio_variance",
            "reliable",
            "num_rows",
            *(_OF_CHECKS if self._control_variate else ()),
            *(_OF_MODES if self._several_modes else ()),
        )

    def _advised_rows(self, rows: int, parameters: int) -> int:
        """The rows with which at least 90% of the decisions are reliable.

        In coordinates whitened by a normal posterior, a step of squared length J has a
        log ratio of variance J, and noise of variance J (N / m - 1) / T, which may be
        1. The step size adapts to an acceptance rate of 0.3, so that the 90% quantile
        of J is 42 with one parameter, 18 with two, 9.9 with five and 5 with a hundred.
        """
        if not self._batch.single_round:  # it grows to the size that it needs
            return super()._advised_rows(rows, parameters)
        long = max(10.0, 40.0 / (parameters or 10))
        wanted = float(f"{rows * long / (self._temperature + long):.2g}")
        return int(min(max(wanted, 2), rows))

    @property
    def _several_modes(self) -> bool:
        """Whether the control variate may have several modes."""
        return self._control_variate is not None and self._control_variate.modes > 1

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define the kernel, for records."""
        return {
            **super().settings,
            "max_variance": self._max_variance,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`~numpyro_minibatch.diagnose` needs."""
        return {
            **super().facts,
            **self._proposal.facts,
            **self._acceptance.facts,
            **self._estimate.facts,
            "target_accept_prob": self._target_accept_prob,
            "num_steps": self.num_steps,
        }

    @property
    def _max_variance(self) -> float:
        return getattr(self._estimate, "max_variance", self._acceptance.max_variance)

    def first_state(self, start: Start) -> MinibatchMHState:
        """The state of a chain before its first draw."""
        key, index_key, memory_key = jax.random.split(start.key, 3)
        flat = start.flat
        adapt_state = self._adaptation.init(flat, self._step_size)
        if self._control_variate is not None:
            adapt_state = adapt_state.with_root(start.surrogate.root)
        zero = jnp.zeros((), flat.dtype)
        return MinibatchMHState(
            i=jnp.int32(0),
            z=start.z,
            rng_key=key,
            index_key=index_key,
            surrogate=(),
            memory=self._estimate.init(start.reader, memory_key, flat),
            adapt_state=adapt_state,
            accept_prob=zero,
            mean_accept_prob=zero,
            step_size=adapt_state.step_size,
            diverging=jnp.array(False),
            lp_estimate=zero,
            log_ratio=zero,
            log_ratio_variance=zero,
            reliable=zero,
            num_rows=jnp.zeros((), self._rows_dtype(start.reader)),
            check_rms_error=jnp.full_like(zero, jnp.nan),
            check_rms_z=jnp.full_like(zero, jnp.nan),
            check_change=jnp.full_like(zero, jnp.nan),
            checks=Checks.none(zero),
            **(dict.fromkeys(_OF_MODES, jnp.int32(0)) if self._several_modes else {}),
        )

    def check_rung(self, who: str) -> None:
        """Raise if the kernel cannot be a rung; see :class:`Tempered`."""
        super().check_rung(who)
        if isinstance(self._estimate, Augmented):
            raise ValueError(
                f'{who}(inner) keeps estimates of a temperature (estimate="augmented") '
                'with its positions, which cannot be swapped. Write estimate="shared".'
            )

    def arrive(self, target: Target, here: Any, there: Any, key: Array) -> Any:
        """A rung's state with the position of another; see :class:`Tempered`."""
        arrived = here._replace(z=there.z, memory=there.memory)
        if not self._several_modes:
            return arrived
        modes = getattr(self._at_temperature(here.surrogate).expansion, "modes", None)
        if modes is None:
            return arrived
        return arrived._replace(mode=modes.of(ravel_pytree(there.z)[0]))

    def _at_temperature(self, surrogate: Any) -> Any:
        """The surrogate, with the rule of several modes at a rung's temperature."""
        expansion = getattr(surrogate, "expansion", None)
        if not self._moved or not isinstance(expansion, Expansions):
            return surrogate
        return surrogate._replace(expansion=expansion.tempered(self._weights))

    def _may_check(self, reader: Reader) -> bool:
        """Whether some decisions are also made on all rows."""
        return (
            self._exact_checks
            and self._control_variate is not None
            and isinstance(self._estimate, Shared)
            and not isinstance(self._acceptance, SequentialTest)
            and not isinstance(reader.scheme, FullBatch)
        )

    def _is_check(self, reader: Reader, i: Array) -> Array:
        """Whether to check a decision: up to a hundred in warmup, and few afterwards.

        The decisions are those of all vectorised chains together. Of 32, the root mean
        square of errors in units of the noise is known to about an eighth.
        """
        if not self._may_check(reader):
            return jnp.array(False)
        warmup = max(self.num_warmup, 1)
        evaluations = sum(reader.plates.values()) * reader.row_size
        checks = min(max(_CHECKED_EVALUATIONS // evaluations, _FEWEST_CHECKS), 100)
        often = max(warmup * self._run.num_chains // checks, 1)
        # batches of a hundred rows read at least a tenth of the number of rows of the
        # data between two checks, so that checks add little to the cost
        rarely = max(1000, sum(reader.plates.values()) // 10)
        return jnp.where(
            i < self.num_warmup,
            i % often == 0,
            (i - warmup) % rarely == rarely - 1,
        )

    def row_keys(self, key: Array) -> tuple[Array, ...]:
        """The keys of a step's rows: one for its decision, one for a gradient."""
        if not self._proposal.uses_gradient:
            return (key,)
        decision, gradient = jax.random.split(key)
        return decision, gradient

    def _rows_dtype(self, reader: Reader) -> Any:
        """Integers, unless the rows of a draw could be more than an int32 counts."""
        most = 3 * self.num_steps * sum(reader.plates.values())
        return jnp.int32 if most < 2**31 else jnp.float32

    def transition(self, target: Target, state: MinibatchMHState) -> MinibatchMHState:
        """One draw of one chain."""
        flat, unravel = ravel_pytree(state.z)
        surrogate = self._at_temperature(state.surrogate)
        reader = self.reader(target, unravel, surrogate)
        context = self._context(
            reader, target, unravel, state._replace(surrogate=surrogate)
        )
        residual, plain = None, None
        if self._run.plan is not None and isinstance(self._estimate, Shared):
            residual = self.reader(target, unravel, surrogate, residual_only=True)
            if self._run.plan.form == "direct":
                plain = self.plain_reader(target, unravel)

        step = MetropolisStep(
            self._proposal,
            self._estimate,
            self._acceptance,
            self._target_accept_prob,
            fallback=self._fallback is not None,
            checks=self._may_check(reader),
            readers=Readers(reader, residual, plain),
            context=context,
            unravel=unravel,
            row_keys=self.row_keys,
            rows_dtype=self._rows_dtype(reader),
        )
        is_check = self._is_check(reader, state.i)

        def inner(carry: Carry, n: ArrayLike) -> tuple[Carry, Step]:
            count = state.i * self.num_steps + n
            batch_key = jax.random.fold_in(state.index_key, count)
            step_size = self._step_size_at(count, state)
            return step(carry, step_size, batch_key, is_check & (n == 0))

        carry = Carry(state.rng_key, flat, state.memory, state.lp_estimate)
        if self.num_steps == 1:
            carry, last = inner(carry, 0)
            steps = jax.tree.map(lambda x: x[None], last)
        else:
            count = jnp.arange(self.num_steps, dtype=jnp.int32)
            carry, steps = jax.lax.scan(inner, carry, count)
            last = jax.tree.map(lambda x: x[-1], steps)
        checks = jax.tree.map(lambda a, b: a + b.sum(), state.checks, steps.checks)
        of_modes = self._of_modes(context, carry.z, steps.jumps)
        end = self._step_size_at((state.i + 1) * self.num_steps - 1, state)
        return advanced(
            self._adaptation,
            state._replace(
                z=unravel(carry.z),
                rng_key=carry.rng_key,
                memory=carry.memory,
                accept_prob=steps.accept_prob.mean(),
                diverging=~jnp.isfinite(last.lp_estimate),
                lp_estimate=last.lp_estimate,
                log_ratio=last.log_ratio,
                log_ratio_variance=last.log_ratio_variance,
                reliable=steps.reliable.mean(),
                num_rows=steps.num_rows.sum(dtype=state.num_rows.dtype),
                checks=checks,
                # NaN without checks
                check_rms_error=jnp.sqrt(checks.error / checks.number),
                check_rms_z=jnp.sqrt(checks.z / checks.number),
                check_change=checks.change / checks.number,
                **of_modes,
            ),
            carry.z,
            steps.mobility.mean(),
        )._replace(step_size=end)

    def _of_modes(
        self, context: ProposalContext, z: Array, jumps: tuple[Array, ...]
    ) -> dict[str, Any]:
        """The fields of a draw that name its mode and count moves between modes."""
        if not self._several_modes or context.modes is None:
            return {}
        tried, made = (jump.sum(dtype=jnp.int32) for jump in jumps)
        return dict(zip(_OF_MODES, (context.modes.of(z), tried, made), strict=True))

    def advance(
        self, target: Target, state: MinibatchMHState
    ) -> tuple[MinibatchMHState, None]:
        """The steps of a draw; see :class:`InPieces`."""
        return self.transition(target, state), None

    def completed(
        self,
        target: Target,
        state: MinibatchMHState,
        pieces: Pieces,
        key: Array,
        i: Array,
        num_warmup: int,
    ) -> MinibatchMHState:
        """The state after the last piece of a draw; see :class:`InPieces`."""
        return state._replace(
            num_rows=pieces.num_rows,
            accept_prob=pieces.accept_prob / pieces.number,
            reliable=pieces.reliable / pieces.number,
        )

    def most_rows(self) -> int:
        """A bound on the rows that one step reads."""
        return 3 * sum(self.plates.values())

    def _step_size_at(self, count: ArrayLike, state: MinibatchMHState) -> Array:
        """The step size of a step; only the proposal depends on it."""
        step_size = state.adapt_state.step_size
        if self._step_schedule is None:
            return step_size
        return (step_size * self._step_schedule(jnp.asarray(count))).astype(
            step_size.dtype
        )

    @property
    def _needs(self) -> Needs:
        # a decision needs few rows if their noise is small, whereas every row improves
        # a gradient
        smallest = super()._needs.smallest if self._proposal.uses_gradient else _FEWEST
        return Needs(smallest, follows=self._proposal.follows_surrogate)

    def _context(
        self,
        reader: Reader,
        target: Target,
        unravel: Callable[[Array], Any],
        state: MinibatchMHState,
    ) -> ProposalContext:
        """The context of a proposal, without the gradient of a step's own batch."""

        def no_batch(position: Array) -> Array:
            raise AssertionError("a step sets the gradient of its batch")

        if self._run.plan is None:
            return ProposalContext(no_batch, Whitening(state.adapt_state.root))
        expansion = state.surrogate.expansion
        several = isinstance(expansion, Expansions)

        coordinates, weights = self._run.plan.coordinates, reader.weights

        def surrogate(expansion: Expansion | Expansions) -> Callable[[Array], Array]:
            return log_surrogate(target, coordinates, expansion, weights, unravel)

        return ProposalContext(
            no_batch,
            # the surrogate's matrix, which vectorised chains share; with equal but
            # separate matrices, each chain would compute its own product
            Whitening(state.surrogate.root),
            center=state.surrogate.location,
            log_surrogate=surrogate(expansion),
            # at another temperature the surrogate is wider than in the set-up: never a
            # single rotation, and steps short enough for its flatter slopes
            num_steps=max(self._run.plan.num_steps, 4)
            if self._moved
            else self._run.plan.num_steps,
            long=self._run.plan.long,
            draws_fit=self._run.plan.draws_fit,
            over_relaxed=self._run.plan.over_relaxed,
            num_rows=expansion.num_exact,
            modes=expansion.modes if several else None,
            bent=state.surrogate.bent,
            log_surrogate_in=(lambda mode: surrogate(expansion.of_mode(mode)))
            if several
            else None,
        )
