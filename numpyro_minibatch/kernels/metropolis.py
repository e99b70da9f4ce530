"""Metropolis-Hastings on minibatches; the named algorithms are presets of it.

Every kernel here makes the accept/reject step

    accept  iff  test(log_ratio(target, z, z', batch) / T + proposal and prior ratios)

with its own choice of the batch, the estimate and the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro.infer import init_to_uniform

from numpyro_minibatch import batch, estimate, proposal
from numpyro_minibatch._internal.checks import (
    check_count,
    check_instance,
    check_positive,
    describe,
)
from numpyro_minibatch.accept import AcceptanceTest, SequentialTest
from numpyro_minibatch.batch import BatchSize, FullBatch, Scheme
from numpyro_minibatch.control_variate import Taylor, log_surrogate
from numpyro_minibatch.control_variate._expand import Expansion, Expansions
from numpyro_minibatch.control_variate._problem import Needs
from numpyro_minibatch.estimate import (
    Augmented,
    Comparison,
    Estimate,
    Exact,
    Reader,
    Shared,
)
from numpyro_minibatch.kernels._adaptation import AdaptedKernel, AdaptState, advanced
from numpyro_minibatch.kernels._arguments import (
    read_acceptance,
    read_flags,
    read_target_accept_prob,
)
from numpyro_minibatch.kernels._base import MinibatchKernel
from numpyro_minibatch.kernels._contract import Pieces, Start
from numpyro_minibatch.kernels._fields import with_named_items
from numpyro_minibatch.kernels._pieces import SteppedKernel
from numpyro_minibatch.proposal import Proposal, ProposalContext, Whitening
from numpyro_minibatch.target import Target

__all__ = ["MinibatchMH", "MinibatchMHState"]

_OF_MODES = "mode", "mode_moves_tried", "mode_moves_made"  # fields
_FEWEST = 16  # the smallest batch that the pilot chooses; fewer rows save no time


class _Checks(NamedTuple):
    """Sums over the decisions that were also made on all rows."""

    number: Array
    error: Array  # squared errors of the log ratio
    z: Array  # the same, relative to the variance that the decision assumed


@with_named_items
class MinibatchMHState(NamedTuple):
    """The state of a chain of :class:`MinibatchMH`.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - key of the proposals and decisions to come.
    - **index_key** - key of the rows; step ``t`` reads the rows of
      ``fold_in(index_key, t)``. Runs that continue from one state read the same rows,
      whatever their ``rng_key``.
    - **surrogate** - with a control variate, the expansion, the surrogate's posterior
      and the tables that rows are drawn from; one for all vectorised chains.
    - **memory** - what the estimator keeps with the position; empty for a shared batch.
    - **adapt_state** - step size and mass matrix with their adaptation.
    - **accept_prob** - mean acceptance probability of the draw's inner steps.
    - **mean_accept_prob** - the same averaged over warmup, or since its end.
    - **step_size** - step size with which the draw was made.
    - **diverging** - whether the log density at ``z`` is not finite, according to the
      rows that the draw read.
    - **lp_estimate** - minibatch estimate of the target's log density at ``z``.
    - **log_ratio** - estimated log acceptance ratio of the last inner step.
    - **log_ratio_variance** - its estimated variance.
    - **reliable** - share of the inner steps whose noise was inside the test's domain.
    - **check_rms_error** - with a control variate: root mean square, over the
      decisions that were checked on all rows so far, of the error of their log ratio;
      NaN before the first.
    - **check_rms_z** - the same in units of the noise's estimated standard deviation;
      about 1 if that is right.
    - **num_rows** - rows of data read to make the draw; a row of a shared batch is
      evaluated at both positions and counts once.
    - **mode** - with ``taylor2(modes=...)``, the mode that ``z`` belongs to, in the
      order of ``kernel.pilot["mode_masses"]``; else empty.
    - **mode_moves_tried**, **mode_moves_made** - with ``taylor2(modes=...)``, the inner
      steps of the draw that tried another mode, and those that reached it; else empty.
    """

    i: Array
    z: Any
    rng_key: Array
    index_key: Array
    surrogate: Any
    memory: Any
    adapt_state: AdaptState
    accept_prob: Array
    mean_accept_prob: Array
    step_size: Array
    diverging: Array
    lp_estimate: Array
    log_ratio: Array
    log_ratio_variance: Array
    reliable: Array
    num_rows: Array
    check_rms_error: Array
    check_rms_z: Array
    checks: _Checks
    mode: Any = ()
    mode_moves_tried: Any = ()
    mode_moves_made: Any = ()


class _Carry(NamedTuple):
    """The values that change from one inner step to the next."""

    rng_key: Array
    z: Array
    memory: Any
    lp_estimate: Array


class _Step(NamedTuple):
    """The results of an inner step."""

    accept_prob: Array
    mobility: Array  # the same, relative to the highest rate that the noise allows
    lp_estimate: Array
    log_ratio: Array
    log_ratio_variance: Array
    reliable: Array
    num_rows: Array
    checks: _Checks
    jumps: tuple[Array, ...] = ()  # whether another mode was tried, and reached


class _Readers(NamedTuple):
    """Ways to read the rows of a target.

    :param all: the reader that everything else uses.
    :param residual: with a surrogate, reads the residual of the target over it.
    :param plain: with a surrogate whose residuals are differences from polynomials,
        reads the log likelihoods themselves. The polynomials of all rows have a known
        sum, so that a decision on all rows needs no derivatives.
    """

    all: Reader
    residual: Reader | None
    plain: Reader | None


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
        warmup (over all vectorised chains together), and a few afterwards, on all rows,
        to check the noise that the batches reported.
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
        name = type(self).__name__
        self._estimate, batch = _estimator(name, estimate, batch, batch_size)
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
        known = self._control_variate is not None
        several = self._several_modes
        self._proposal = (
            _default_proposal(known, several) if proposal is None else proposal
        )
        check_instance(name, "proposal", self._proposal, Proposal, "random_walk()")
        if self._proposal.uses_surrogate and not known:
            raise ValueError(
                f"{name}(proposal={self._proposal!r}) moves on a surrogate of the "
                "posterior, which a control variate provides. Add control_variate="
                '"taylor2", or use proposal.random_walk().'
            )
        if several != self._proposal.moves_between_modes:
            raise ValueError(_other_number_of_modes(name, self._proposal, several))
        if step_size is None:
            step_size = self._proposal.default_step_size
        _refuse_unfit_rule(name, self._acceptance, self._batch, self._estimate)
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
        if fallback not in (None, "exact"):
            raise ValueError(
                f'{name}(fallback=...) must be "exact" (decisions that are too noisy '
                "for the test are made on all rows) or None, got "
                f"{describe(fallback)}."
            )
        if fallback and not isinstance(self._estimate, Shared):
            raise ValueError(
                f'{name}(fallback="exact") compares two positions on the same rows, so '
                'it needs estimate="shared".'
            )
        self._fallback = fallback
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
            *(("check_rms_error", "check_rms_z") if self._control_variate else ()),
            *(_OF_MODES if self._several_modes else ()),
        )

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
            checks=_Checks(zero, zero, zero),
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
        """Whether to check a decision: a hundred in warmup, and few afterwards.

        The hundred decisions are those of all vectorised chains together.
        """
        if not self._may_check(reader):
            return jnp.array(False)
        warmup = max(self.num_warmup, 1)
        often = max(warmup * self._run.num_chains // 100, 1)
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

        is_check = self._is_check(reader, state.i)

        def inner(carry: _Carry, n: ArrayLike) -> tuple[_Carry, _Step]:
            count = state.i * self.num_steps + n
            batch_key = jax.random.fold_in(state.index_key, count)
            step_size = self._step_size_at(count, state)
            return self._metropolis_step(
                _Readers(reader, residual, plain),
                context,
                step_size,
                is_check & (n == 0),
                batch_key,
                carry,
                unravel,
            )

        carry = _Carry(state.rng_key, flat, state.memory, state.lp_estimate)
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
            over_relaxed=self._run.plan.over_relaxed,
            num_rows=expansion.num_exact,
            modes=expansion.modes if several else None,
            log_surrogate_in=(lambda mode: surrogate(expansion.of_mode(mode)))
            if several
            else None,
        )

    def _metropolis_step(
        self,
        readers: _Readers,
        context: ProposalContext,
        step_size: Array,
        is_check: Array,
        batch_key: Array,
        carry: _Carry,
        unravel: Callable[[Array], Any],
    ) -> tuple[_Carry, _Step]:
        """Propose, compare on a batch, accept or reject."""
        reader, residual, plain = readers
        rng_key, z, memory, lp = carry
        rng_key, key_proposal, key_accept = jax.random.split(rng_key, 3)
        evaluations = self._proposal.evaluations(context)
        proposal_rows: ArrayLike = context.num_rows * evaluations
        if self._proposal.uses_gradient:
            batch_key, gradient_key = self.row_keys(batch_key)
            proposal_rows = proposal_rows + reader.gradient_rows

        def gradient(position: Array) -> Array:
            # cloned deliberately: both ends of a Langevin step read one batch
            return reader.gradient(jax.random.clone(gradient_key), position)

        proposed = self._proposal.propose(
            key_proposal, z, step_size, context._replace(gradient=gradient)
        )

        judge, known, log_q_ratio = reader, None, proposed.log_q_ratio
        if residual is not None and proposed.log_surrogate is not None:
            # the surrogate's part of the log ratio and the proposal's ratio cancel
            judge, known = residual, proposed.log_surrogate
            log_q_ratio = jnp.zeros_like(log_q_ratio)

        test = self._acceptance
        move = unravel(z), unravel(proposed.z)
        rule = test.rule(key_accept, log_q_ratio, move)

        def compare(everything: Reader | None = None) -> Comparison:
            seen = self._estimate.compare(
                everything or judge,
                # cloned: all rows, or the batch that a branch did not draw
                jax.random.clone(batch_key),
                z,
                proposed.z,
                memory,
                test.max_variance,
                None if everything else rule,
            )
            if known is None:
                return seen
            return seen._replace(log_density=seen.log_density + known)

        def exact_log_ratio() -> Array:
            whole = (plain or judge).difference(z, proposed.z)
            if known is None or plain is None:
                return whole
            return whole - (known[1] - known[0])  # the surrogate has decided on that

        if judge.known_rows < sum(reader.plates.values()):  # if not, all are the batch
            rows = judge.known_rows * jnp.asarray(proposed.moved)
            proposal_rows = proposal_rows + rows
        if self._proposal.uses_surrogate:
            # a proposal that stays needs no rows
            seen = jax.lax.cond(
                proposed.moved, compare, lambda: _stay(compare, memory, lp)
            )
        else:
            seen = compare()
        seen, checks = self._check_exactly(
            judge, compare, exact_log_ratio, seen, is_check, proposed.moved
        )
        log_ratio = seen.log_ratio + log_q_ratio
        decision = test(key_accept, log_ratio)
        accept_prob = jnp.where(proposed.moved, decision.accept_prob, 0.0)
        mobility = accept_prob / seen.ceiling
        z, memory, lp = jax.tree.map(
            lambda new, old: jnp.where(decision.accept, new, old),
            (proposed.z, seen.memory, seen.log_density[1]),
            (z, memory, seen.log_density[0]),
        )
        return _Carry(rng_key, z, memory, lp), _Step(
            accept_prob=accept_prob,
            mobility=jnp.where(proposed.tunes, mobility, self._target_accept_prob),
            lp_estimate=lp,
            log_ratio=jnp.asarray(log_ratio.value),
            log_ratio_variance=seen.noise,
            reliable=(decision.reliable & seen.reliable).astype(lp.dtype),
            num_rows=(seen.num_rows + proposal_rows).astype(self._rows_dtype(reader)),
            checks=checks,
            jumps=()
            if proposed.jump is None
            else (
                proposed.jump,
                proposed.jump & jnp.asarray(proposed.moved) & decision.accept,
            ),
        )

    def _check_exactly(
        self,
        reader: Reader,
        compare: Callable,
        exact_log_ratio: Callable[[], Array],
        seen: Comparison,
        is_check: Array,
        moved: ArrayLike,
    ) -> tuple[Comparison, _Checks]:
        """Read all rows if a decision is checked, or too noisy for the test."""
        noise = jnp.asarray(seen.log_ratio.variance)
        zero = jnp.zeros_like(noise)
        checks = _Checks(zero, zero, zero)
        if self._may_check(reader):
            # a branch, since vectorised chains check the same draws
            exact = jax.lax.cond(is_check, exact_log_ratio, lambda: zero)
            error = jnp.square(seen.log_ratio.value - exact)
            # differences from rounding are not noise
            tiny = jnp.finfo(noise.dtype).eps
            relative = error / jnp.maximum(noise, tiny)
            is_check = is_check & moved
            checks = jax.tree.map(
                lambda x: jnp.where(is_check, x, 0.0),
                _Checks(zero + 1.0, error, relative),
            )
            number = jnp.where(is_check, sum(reader.plates.values()), 0)
            seen = seen._replace(num_rows=seen.num_rows + number)
        if self._fallback is None or isinstance(reader.scheme, FullBatch):
            return seen, checks
        # each chain has a condition of its own: all chains run the branch, and read
        # only the rows that are active for them
        is_noisy = ~(noise <= self._acceptance.max_variance)
        exact = jax.lax.cond(
            is_noisy,
            lambda: compare(reader.everything(is_noisy)),
            lambda: _stay(compare, seen.memory, seen.log_density[0]),
        )
        seen = jax.tree.map(
            lambda all_rows, few: jnp.where(is_noisy, all_rows, few),
            exact._replace(log_ratio=exact.log_ratio + Estimate(zero, zero)),
            seen,
        )._replace(num_rows=seen.num_rows + exact.num_rows)
        return seen, checks


def _other_number_of_modes(name: str, given: Proposal, several: bool) -> str:
    if several:
        return (
            f"{name}(proposal={given!r}) moves within one mode, but control_variate="
            "control_variate.taylor2(modes=...) asks for several. Leave the proposal "
            "out, or write proposal.across_modes()."
        )
    return (
        f"{name}(proposal={given!r}) moves between the modes of a surrogate, which "
        "has several with control_variate=control_variate.taylor2(modes=8)."
    )


def _default_proposal(surrogate: bool, several: bool) -> Proposal:
    if several:
        return proposal.across_modes()
    return proposal.surrogate_hmc() if surrogate else proposal.random_walk()


def _stay(compare: Callable[[], Comparison], memory: Any, lp: Array) -> Comparison:
    """A comparison of a position with itself."""
    shapes = jax.eval_shape(compare)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return nothing._replace(
        reliable=jnp.array(True),
        log_density=jnp.stack([lp, lp]).astype(nothing.log_density.dtype),
        memory=memory,
        ceiling=jnp.ones_like(nothing.ceiling),
    )


def _refuse_unfit_rule(
    name: str, acceptance: AcceptanceTest, scheme: Scheme, estimator: Any
) -> None:
    if not isinstance(acceptance, SequentialTest):
        return
    if not scheme.sequential:
        raise ValueError(
            f"{name}(acceptance={acceptance!r}) decides when it has read enough rows, "
            f"but batch={scheme!r} cannot be stopped. Write batch=batch.growing(500)."
        )
    if not isinstance(estimator, Shared):
        raise ValueError(
            f"{name}(acceptance={acceptance!r}) compares two positions on the same "
            f"rows, but estimate={estimator!r} does not. Leave estimate= out."
        )


def _estimator(
    name: str, estimate_: Any, scheme: Scheme | None, batch_size: BatchSize | None
) -> tuple[Shared | Augmented | Exact, Scheme | None]:
    if not isinstance(estimate_, str | Shared | Augmented | Exact):
        raise TypeError(_unknown_estimate(name, estimate_))
    if estimate_ == "exact":
        estimate_ = estimate.exact()
    if isinstance(estimate_, Exact):
        if scheme is not None or batch_size is not None:
            raise ValueError(
                f'{name}(estimate="exact") reads all rows: it takes no batch_size and '
                "no batch. For another chunk size pass batch=batch.full(chunk_size) "
                "alone."
            )
        return estimate_, batch.full()
    if not isinstance(estimate_, str):
        return estimate_, scheme
    named: Mapping[str, Callable[[], Shared | Augmented]] = {
        "shared": estimate.shared,
        "augmented": estimate.augmented,
    }
    if estimate_ not in named:
        raise ValueError(_unknown_estimate(name, estimate_))
    return named[estimate_](), scheme


def _unknown_estimate(name: str, estimate_: Any) -> str:
    return (
        f'{name}(estimate=...) must be "shared", "augmented", "exact" or an '
        f"estimate.* object such as estimate.shared(), got {describe(estimate_)}."
    )
