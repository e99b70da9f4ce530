"""MINTEE: the equi-energy sampler on nested minibatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform

from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch.batch import Scheme
from numpyro_minibatch.control_variate._problem import Problem
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.kernels._shared.adaptation import Adaptation, AdaptState
from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.contract import Start
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.kernels._shared.identity import recorded
from numpyro_minibatch.kernels.equi_energy import _ladder
from numpyro_minibatch.kernels.equi_energy._jumps import Moves, Rungs, Step, log_density
from numpyro_minibatch.kernels.equi_energy._nested import Nested, Reference
from numpyro_minibatch.kernels.equi_energy._reference import find_lowest, flat_start
from numpyro_minibatch.kernels.equi_energy._rings import Rings, ring_of
from numpyro_minibatch.kernels.equi_energy._settings import (
    EnergyArguments,
    EnergySettings,
)
from numpyro_minibatch.target import Target

__all__ = ["MINTEE", "MINTEEState"]

_MAX_BYTES = 2e9  # of the rings of one chain of MCMC
_OF_RUNGS = (
    "energy",
    "ring",
    "energy_noise",
    "rung_acceptance_rate",
    "rung_step_size",
    "rung_num_rows",
)
_RECORDED = (
    "jump_prob",
    "ring_capacity",
    "ring_thinning",
    "penalty",
    "target_accept_prob",
    "num_steps",
)


@with_named_items
class MINTEEState(NamedTuple):
    """The state of :class:`MINTEE`, of ``K`` chains of a ladder.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites, of the coldest chain.
    - **rng_key** - key of the proposals and decisions to come.
    - **index_key** - key of the rows.
    - **surrogate** - the reference from which energies are measured, and the ladder;
      one for all vectorised chains.
    - **rungs** - positions of all chains, with their batches and energies.
    - **rings** - past states of the hotter chains, by energy.
    - **adapt_state** - step size and mass matrix of each chain.
    - **tally** - sums of acceptance probabilities and numbers of local moves and of
      jumps of each chain, over warmup or since its end, ``(2, 2, K)``.
    - **accept_prob** - mean acceptance probability of the coldest chain's local moves;
      NaN if there were none.
    - **step_size** - step size of the coldest chain's local moves.
    - **diverging** - whether the coldest chain's log density is not finite.
    - **lp_estimate** - estimate of its log density, from its batch.
    - **log_ratio** - the log ratio of its last decision.
    - **log_ratio_variance** - estimated variance of that, from both batches.
    - **reliable** - share of the decisions of all chains whose log weights had noise in
      the domain of the penalty. The distribution of the draws depends on those of the
      coldest chain, but hotter chains must not get stuck either.
    - **num_rows** - rows of data read to make the draw, by all chains; the batch of a
      gradient is evaluated at both ends of a move and counts once.
    - **energy** - estimated energy of each chain's state, with the penalty for its
      noise, ``(K,)``.
    - **ring** - the ring of energies of each chain's state, ``(K,)``.
    - **energy_noise** - estimated standard deviation of that energy in units of the
      temperature, ``(K,)``.
    - **rung_acceptance_rate** - mean acceptance probability of local moves, ``(K,)``.
    - **rung_step_size** - step sizes of local moves, ``(K,)``.
    - **rung_num_rows** - rows of data read for the draw by each chain, ``(K,)``.
    - **jump_acceptance_rate** - mean acceptance probability of the jumps to states of
      the next hotter chain, ``(K - 1,)``; NaN if there were none.
    """

    i: Array
    z: Any
    rng_key: Array
    index_key: Array
    surrogate: Any
    rungs: Rungs
    rings: Rings
    adapt_state: AdaptState
    tally: Array
    accept_prob: Array
    step_size: Array
    diverging: Array
    lp_estimate: Array
    log_ratio: Array
    log_ratio_variance: Array
    reliable: Array
    num_rows: Array
    energy: Array
    ring: Array
    energy_noise: Array
    rung_acceptance_rate: Array
    rung_step_size: Array
    rung_num_rows: Array
    jump_acceptance_rate: Array


class _Carry(NamedTuple):
    """The values that change from one inner step to the next."""

    rng_key: Array
    rungs: Rungs
    rings: Rings


class _Survey(NamedTuple):
    """The result of the set-up, in the form that :class:`MinibatchKernel` needs."""

    surrogate: Reference
    report: dict[str, Any]
    plan: None = None
    starts: None = None


class MINTEE(MinibatchKernel):
    """The equi-energy sampler [2], on nested minibatches [1].

    Several chains run at ascending temperatures. The density of chain ``k`` is flat
    below an energy ``H_k``. The past states of a chain are stored by energy, in rings.
    With some probability, the next colder chain jumps to a member of the ring of its
    own energy, however far away it is. The draws are those of the coldest chain.

    Hotter chains read smaller batches. A chain keeps the batch of its state, as in the
    proof of [1], so that all weights are known. The only error of the stationary
    distribution comes from treating the noise as normal. However, a chain whose
    energies have noise of more than about one temperature gets stuck, which
    ``reliable`` and ``diagnose`` report. With all rows (``batch=batch.full()``) this is
    the equi-energy sampler, which becomes exact as the rings converge to the
    distribution of the hotter chain.

    Energies are differences from a reference: the position of lowest energy that a
    search finds before the run. Their noise is that of the rows' differences from it.

    Where the paper and this kernel differ:

    - Weights are corrected for their noise (``penalty=True``); see :class:`MINT`.
    - At the paper's temperatures, ``N ** (1 - 0.995 tau)``, energies have noise of 20
      to 50 temperatures. By default the temperature of a chain is the noise of its
      energies without a reference, ``N sd / sqrt(m)``.
    - A ring keeps its latest states, and drops older ones.
    - A jump evaluates the whole nested batch of the proposed state, although the rows
      of the hotter chain have been read before, so that a ring stores no energies.

    **References:**

    .. [1] Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 5 and
       appendix D.
    .. [2] S. C. Kou, Qing Zhou, Wing Hung Wong (2006), *Equi-energy sampler with
       applications in statistical inference and statistical mechanics*, Annals of
       Statistics 34(4).

    :param model: a NumPyro model with one data plate.
    :param target: a :class:`~numpyro_minibatch.Target` instead of a model.
    :param batch_size: rows of the hottest chain's batch, by default the plate's own
        ``subsample_size``; or of each chain's, the coldest first.
    :param batch_ratio: ratio of the batches of neighbours, if ``batch_size`` is one
        number; a batch has at most all rows.
    :param batch: ``batch.full()`` for all rows in every chain.
    :param num_replicas: number of chains; by default as many as there are temperatures
        or batch sizes, or else 7.
    :param temperatures: of the chains, ascending.
    :param temperature_ratio: ratio of neighbouring temperatures, starting at 1.
    :param lam: the paper's ``lambda`` of each chain, coldest first: ``T = N ** (1 -
        lam)``.
    :param alpha: the paper's ``lam / tau``, where ``tau`` is ``log m / log N``; a chain
        that reads all rows then has temperature 1.
    :param temper_prior: whether the prior is part of the energy.
    :param energies: ``H_1 .. H_{K-1}``, ascending: minus the log density of the
        tempered part. By default they rise from that of the reference.
    :param ring_width: the rise in temperatures, ``(H_{k+1} - H_k) / T_k``; by default
        ``sqrt(2 D)``, which is 10 for the paper's 50 parameters.
    :param jump_prob: probability of trying a jump, if the ring has members.
    :param ring_capacity: number of states that a ring holds. All rings together hold
        ``(K - 1) * K * ring_capacity`` positions and are part of the state. Below about
        1000, the small number of members biases the colder chain.
    :param ring_thinning: a chain stores every so many of its draws in a ring.
    :param penalty: correct weights for their noise; ``False`` is the paper's algorithm.
    :param proposal: of the local moves: :func:`proposal.random_walk` (default) or
        :func:`proposal.langevin`, whose gradients read batches of the hottest chain's
        size and ignore the floors.
    :param step_size: (initial) step size of the coldest chain; those of the others are
        ``sqrt(T_k / T_0)`` times as large.
    :param adapt_step_size: adapt each chain's step size in warmup.
    :param adapt_mass_matrix: adapt each chain's mass matrix in warmup; by default off,
        because a chain that moves between modes would adapt to their distances.
    :param dense_mass: full mass matrices rather than diagonal ones.
    :param target_accept_prob: by default 0.3 for a random walk and 0.45 for Langevin
        steps; the paper recommends a rate between 0.2 and 0.5.
    :param num_steps: inner steps per draw.
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
        >>> from numpyro_minibatch import MINTEE, batch

        >>> def model(y):  # the sign of mu is not determined
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=50) as idx:
        ...         numpyro.sample("obs", dist.Normal(jnp.abs(mu), 5), obs=y[idx])

        >>> y = 3 + 5 * jax.random.normal(jax.random.key(0), (100,))
        >>> kernel = MINTEE(model, batch=batch.full(), num_replicas=4,
        ...                 temperature_ratio=4.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=2000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> 0.3 < float((mcmc.get_samples()["mu"] > 0).mean()) < 0.7
        True
    """

    takes_control_variate = False

    def __init__(
        self,
        model: Callable | None = None,
        *,
        target: Target | None = None,
        batch: Scheme | None = None,
        temper_prior: bool = False,
        init_strategy: Callable = init_to_uniform,
        rows: Mapping[str, Any] | None = None,
        **settings: Unpack[EnergyArguments],
    ) -> None:
        ladder = EnergySettings.of(type(self).__name__, batch, settings)
        super().__init__(
            model,
            target=target,
            batch_size=ladder.batch_size,
            batch=batch,
            temper_prior=temper_prior,
            init_strategy=init_strategy,
            rows=rows,
        )
        self._settings = ladder

    # read by the driver and by analyses --------------------------------------------

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
            *_OF_RUNGS,
            "jump_acceptance_rate",
        )

    @property
    def stat_dims(self) -> Mapping[str, tuple[str, ...]]:
        """Names for the axes of the fields."""
        rungs = {name: ("ladder",) for name in _OF_RUNGS}
        return {**rungs, "jump_acceptance_rate": ("pair",)}

    @property
    def temperature(self) -> float:
        """The temperature of the coldest chain, once the data have been seen."""
        return self.temperatures[0]

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures of the chains, once the data have been seen."""
        if self._settings.rule[0] is None:
            return self._run.report["temperatures"] if self.layout else ()
        if self._settings.rule[0] in ("temperatures", "temperature_ratio"):
            return self._settings.temperatures(0, ())
        ((_, size),) = self.layout.plates
        return self._settings.temperatures(size, self.rung_batch_sizes)

    @property
    def rung_batch_sizes(self) -> tuple[int, ...]:
        """The rows of each chain's batch, once the data have been seen."""
        layout = self.layout
        ((_, size),), ((_, width),) = layout.plates, layout.widths
        return self._settings.rung_batch_sizes(size, width)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The rows of the coldest chain's batch, once the data have been seen."""
        ((plate, _),) = self.layout.plates
        return {plate: self.rung_batch_sizes[0]}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define the kernel, for records."""
        return {
            "batch": repr(self._batch),
            "temperature": self.temperature,
            "temper_prior": self._temper_prior,
            "temperatures": list(self.temperatures),
            "rung_batch_sizes": list(self.rung_batch_sizes),
            "energies": list(self._run.report.get("energies", ())),
            "reference_energy": self._run.report.get("reference_energy"),
            **{name: getattr(self._settings, name) for name in _RECORDED},
            "proposal": repr(self._settings.proposal),
            "rows": recorded(self._rows),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`~numpyro_minibatch.diagnose` needs."""
        return {
            **self._batch.facts,
            "temperatures": list(self.temperatures),
            "rung_batch_sizes": list(self.rung_batch_sizes),
            "jump_prob": self._settings.jump_prob,
            "num_steps": self._settings.num_steps,
        }

    def get_diagnostics_str(self, state: MINTEEState) -> str:
        """The text of the progress bar."""
        tally = state.tally.sum(0) if state.tally.ndim > 3 else state.tally
        sums, number = tally
        local, jump = sums[:, 0] / jnp.maximum(number[:, 0], 1)
        return (
            f"step size {jnp.mean(state.step_size):.2e}. "
            f"acc. prob={local:.2f}. jumps={jump:.2f}"
        )

    def check_rung(self, who: str) -> None:
        """Raise: the kernel is a ladder itself."""
        raise ValueError(
            f"{who}(inner) cannot be MINTEE, which is a ladder itself. Write "
            "MinibatchMH(model), or use MINTEE alone."
        )

    # setup ---------------------------------------------------------------------------

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        super()._setup(args, kwargs)
        name, layout = type(self).__name__, self.layout
        if len(layout.plates) > 1:
            names = ", ".join(plate for plate, _ in layout.plates)
            raise ValueError(
                f"{name} reads nested batches of one data plate, but the model has "
                f"{len(layout.plates)}: {names}. Write ReplicaExchange(MinibatchMH("
                "model), ...), which takes several."
            )
        ((_, size),) = layout.plates
        sizes = self.rung_batch_sizes
        if sizes[0] > size:
            raise ValueError(
                f"{name}(batch_size={list(sizes)}): the coldest chain's batch has more "
                f"rows than the data, {size}. Write batch_size={[size, *sizes[1:]]}."
            )
        if self._settings.rule[0] is not None:
            _ladder.check_ascending(name, self.temperatures, sizes)
        dim = max(sum(math.prod(shape) for shape in layout.shapes), 1)
        number, capacity = self._settings.number, self._settings.ring_capacity
        places = (number - 1) * number * capacity
        cost = places * dim * jnp.result_type(float).itemsize
        if cost > _MAX_BYTES:
            raise ValueError(
                f"{name}: the rings would take {cost:.3g} bytes: {number - 1} chains x "
                f"{number} rings x {capacity} states of {dim} numbers. Write a smaller "
                "ring_capacity or num_replicas."
            )

    @property
    def _surveys(self) -> bool:
        return True

    @property
    def _weights(self) -> Weights:
        # for the search for the reference; temperatures that depend on its result are
        # not known yet
        weight = 1.0 if self._settings.rule[0] is None else 1.0 / self.temperature
        return Weights(weight if self._temper_prior else 1.0, weight)

    def _survey(self, problem: Problem, init: Any) -> _Survey:
        """Find the reference, and derive the ladder from it."""
        start = flat_start(problem, init)
        lowest = find_lowest(problem, start, self._temper_prior)
        temperatures = self._ladder_from(lowest.row_sd)
        rise = self._settings.rise(temperatures, start.size, lowest.energy)
        dtype = problem.dtype
        reference = Reference(
            rows=lowest.rows,
            known=lowest.known,
            energy=jnp.asarray(lowest.energy, dtype),
            log_prior=jnp.asarray(lowest.log_prior, dtype),
            temperatures=jnp.asarray(temperatures, dtype),
            floors=jnp.asarray([-np.inf, *rise], dtype),
        )
        report = {
            "reference_energy": lowest.energy,
            "row_sd": lowest.row_sd,
            "temperatures": temperatures,
            "energies": tuple((lowest.energy + rise).tolist()),
        }
        return _Survey(reference, report)

    def _ladder_from(self, row_sd: float) -> tuple[float, ...]:
        """The given temperatures, or those that equal the noise of the energies."""
        if self._settings.rule[0] is not None:
            return self.temperatures
        ((_, size),) = self.layout.plates
        sizes = self.rung_batch_sizes
        # the noise of an energy without a reference; with one it is less
        noise = [size * row_sd * math.sqrt((1 - m / size) / m) for m in sizes]
        temperatures = tuple(max(1.0, sd) for sd in noise)
        _ladder.check_ascending(type(self).__name__, temperatures, sizes)
        return temperatures

    @property
    def _nested(self) -> Nested:
        ((plate, size),) = self.layout.plates
        sizes = self.rung_batch_sizes
        return Nested(plate, size, sizes, self._temper_prior, self._settings.penalty)

    @property
    def _adaptation(self) -> Adaptation:
        return self._settings.adaptation(self.num_warmup)

    def first_state(self, start: Start) -> MINTEEState:
        """The state of a chain before its first draw."""
        key, index_key, rows_key = jax.random.split(start.key, 3)
        flat, surrogate = start.flat, start.surrogate
        number = self._settings.number
        positions = jnp.broadcast_to(flat, (number, *flat.shape))
        bits, wrap = unwrapped(jax.random.split(rows_key, number))
        temperatures = surrogate.temperatures
        steps = self._settings.step_size * jnp.sqrt(temperatures / temperatures[0])
        energies = self._nested.energies(start.reader, surrogate, positions, bits, wrap)
        zero = jnp.zeros((), flat.dtype)
        each = jnp.zeros((number,), flat.dtype)
        rows = jnp.zeros((number,), self._rows_dtype)
        return MINTEEState(
            i=jnp.int32(0),
            z=start.z,
            rng_key=key,
            index_key=index_key,
            surrogate=(),
            rungs=Rungs(positions, bits, energies),
            rings=Rings.empty(number, self._settings.ring_capacity, flat, bits[0]),
            adapt_state=jax.vmap(self._adaptation.init)(positions, steps),
            tally=jnp.zeros((2, 2, number), flat.dtype),
            accept_prob=zero,
            step_size=steps[0],
            diverging=jnp.array(False),
            lp_estimate=zero,
            log_ratio=zero,
            log_ratio_variance=zero,
            reliable=zero,
            num_rows=rows[0],
            energy=each,
            ring=jnp.zeros((number,), jnp.int32),
            energy_noise=each,
            rung_acceptance_rate=each,
            rung_step_size=steps,
            rung_num_rows=rows,
            jump_acceptance_rate=each[1:],
        )

    @property
    def _rows_dtype(self) -> Any:
        """Integers, unless the rows of a draw could be more than an int32 counts."""
        most = self._settings.num_steps * (sum(self.rung_batch_sizes) * 2 + 1)
        return jnp.int32 if most < 2**31 else jnp.float32

    # one draw -------------------------------------------------------------------------

    def transition(self, target: Target, state: MINTEEState) -> MINTEEState:
        """One draw of one chain."""
        _, unravel = ravel_pytree(state.z)
        settings, reference = self._settings, state.surrogate
        moves = Moves(
            nested=self._nested,
            reader=self.reader(target, unravel),
            reference=reference,
            proposal=settings.proposal,
            whitening=(state.adapt_state.root, state.adapt_state.step_size),
            jump_prob=settings.jump_prob,
        )
        fill_from, jump_from = settings.stages(self.num_warmup)
        fills = (state.i >= fill_from) & (state.i % settings.ring_thinning == 0)
        may_jump = state.i >= jump_from

        def inner(carry: tuple[Array, Rungs], n: Array) -> tuple[Any, Step]:
            rows_key = jax.random.fold_in(
                state.index_key, state.i * settings.num_steps + n
            )
            key, rungs = carry
            key, rungs, step = moves.step(key, rows_key, rungs, state.rings, may_jump)
            return (key, rungs), step

        carry = state.rng_key, state.rungs
        if settings.num_steps == 1:
            carry, last = inner(carry, jnp.int32(0))
            steps = jax.tree.map(lambda x: x[None], last)
        else:
            count = jnp.arange(settings.num_steps, dtype=jnp.int32)
            carry, steps = jax.lax.scan(inner, carry, count)
        rng_key, rungs = carry
        ring = ring_of(rungs.energies.own, reference.floors)
        rings = state.rings.put(ring[1:], rungs.z[1:], rungs.bits[1:], fills[1:])
        state = state._replace(
            z=unravel(rungs.z[0]), rng_key=rng_key, rungs=rungs, rings=rings
        )
        return self._recorded(state, ring, steps)

    def _recorded(self, state: MINTEEState, ring: Array, steps: Step) -> MINTEEState:
        """Adapt in warmup, and compute the statistics of the draw."""
        reference, energies = state.surrogate, state.rungs.energies
        kinds = jnp.stack([~steps.jumped, steps.jumped], 1)  # steps, kinds, chains
        sums = jnp.where(kinds, steps.accept_prob[:, None], 0.0).sum(0)
        number = kinds.sum(0).astype(sums.dtype)
        rates = sums / number  # NaN if there were none
        adapt_state = self._adapted(state, rates[0], number[0])
        fresh = (state.i == 0) | (state.i == self.num_warmup)
        rows = self._rows_of_a_draw
        lp_estimate = log_density(energies, reference)[0] + (
            reference.log_prior - reference.energy / reference.temperatures[0]
        )
        return state._replace(
            i=state.i + 1,
            adapt_state=adapt_state,
            tally=jnp.where(fresh, 0.0, state.tally) + jnp.stack([sums, number]),
            accept_prob=rates[0, 0],
            step_size=adapt_state.step_size[0],
            diverging=~jnp.isfinite(lp_estimate),
            lp_estimate=lp_estimate,
            log_ratio=steps.log_ratio[-1, 0],
            log_ratio_variance=steps.variance[-1, 0],
            reliable=steps.reliable.mean(dtype=sums.dtype),
            num_rows=jnp.asarray(rows.sum(), self._rows_dtype),
            energy=reference.energy + energies.own,
            ring=ring,
            energy_noise=jnp.sqrt(energies.noise),
            rung_acceptance_rate=rates[0],
            rung_step_size=adapt_state.step_size,
            rung_num_rows=jnp.asarray(rows, self._rows_dtype),
            jump_acceptance_rate=rates[1, :-1],
        )

    def _adapted(self, state: MINTEEState, rate: Array, number: Array) -> AdaptState:
        """The adaptation after a draw with ``number`` local moves at rate ``rate``."""
        adaptation, adapt_state = self._adaptation, state.adapt_state
        if not adaptation.active:
            return adapt_state
        # jumps carry no information about the step size
        seen = jnp.where(number > 0, rate, self._settings.target_accept_prob)
        return jax.lax.cond(
            state.i < adaptation.num_warmup,
            lambda: jax.vmap(adaptation.update, (None, 0, 0, 0))(
                state.i, seen, state.rungs.z, adapt_state
            ),
            lambda: adapt_state,
        )

    @property
    def _rows_of_a_draw(self) -> np.ndarray:
        """Rows that each chain reads: the batches of a new state and of a gradient."""
        sizes = np.array(self.rung_batch_sizes)
        if self._settings.proposal.uses_gradient:
            sizes = sizes + sizes[-1]
        return self._settings.num_steps * sizes
