"""Cycles of long and short steps with an inner kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.util import is_prng_key

from numpyro_minibatch import schedule as schedules
from numpyro_minibatch._internal.checks import check_flag, check_positive, describe
from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch.kernels._shared.contract import InPieces, Pieces
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.kernels._shared.wrapper import OuterKernel
from numpyro_minibatch.kernels.cyclical._cycle import (
    AfterWarmup,
    AtOnce,
    Cycles,
    Shape,
    shape_of,
)
from numpyro_minibatch.target import Target

__all__ = ["Cyclical", "CyclicalState"]

_RESTART = 0x72657374  # folded into a key; not the number of one of its children


@with_named_items
class CyclicalState(NamedTuple):
    """The state of a chain of :class:`Cyclical`.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - key of the noise to come.
    - **surrogate** - with a control variate, the surrogate.
    - **inner** - the state of the inner kernel, without its key.
    - **cycle** - the cycle that the draw belongs to: 0 for the first after warmup.
    - **step_size** - step size of the draw's last step.
    - **temperature** - temperature of the noise with which that step was made.
    - **diverging** - whether, since the previous draw, steps ended where a number is
      not finite; the exploration of a cycle counts as part of its first draw.
    - **lp_estimate** - that of the inner kernel.
    - **num_rows** - rows of data read to make the draw, for the first draw of a cycle
      including its exploration.
    """

    i: Array
    z: Any
    rng_key: Array
    surrogate: Any
    inner: Any
    cycle: Array
    step_size: Array
    temperature: Array
    diverging: Array
    lp_estimate: Array
    num_rows: Array


class Cyclical(OuterKernel):
    """Cycles of long and short steps with a kernel of the package [1].

    Long steps carry the chain away from its current mode, and short steps sample the
    mode that it reaches. :class:`CyclicalSGLD`, :class:`CyclicalSGHMC` and
    :class:`CyclicalMINT` are presets of it.

    The draws of a run come in cycles of ``samples_per_cycle``: for 30 cycles write
    ``num_samples=30 * kernel.samples_per_cycle``. With any other number the last cycle
    is cut short. A cycle samples the mode that it reached, but carries no information
    about the mass of that mode: the number of cycles in a mode counts visits. The
    functions in :mod:`numpyro_minibatch.cycles` weight cycles by estimates of the mass.

    **Warmup**: for a kernel of gradient steps, ``num_warmup`` draws are whole cycles
    that are discarded; it may be 0. A Metropolis kernel adapts in warmup, without
    cycles, which begin afterwards.

    :param inner: :class:`SGLD`, :class:`SGHMC`, :class:`SGNHT`, :class:`SGMCMC`,
        :class:`MinibatchMH` or one of its presets. Its step size is that of the
        beginning of a cycle.
    :param cycle_length: number of steps of a cycle.
    :param samples_per_cycle: draws of a cycle; by default as many as ``num_steps``
        allows.
    :param num_steps: steps per draw; by default the collected steps divided by
        ``samples_per_cycle``, or that of the inner kernel. The draws divide the
        collected part evenly, and the last draw ends the cycle.
    :param explore: the fraction of a cycle that is exploration, at
        ``explore_temperature``: the paper's ``beta``. The default is 0.25, or 0 for a
        Metropolis kernel, whose target never changes.
    :param collect_from: the fraction of a cycle after which draws are collected, by
        default 0.8: the steps early in the sampling part are too long for accurate
        draws.
    :param explore_temperature: temperature of the noise of exploration. 0 is gradient
        descent, as in the paper, to the nearest mode; the temperature of the kernel
        keeps the noise on. The forces remain those of the target.
    :param schedule: from the number of steps in cycles to the factor on the step size;
        by default half a cosine from 1 towards 0 in each cycle, for ``step_size ** 2``
        with dynamics with momentum.
    :param scale_by_n: whether the step size applies to the mean of the rows' potentials
        and not to their sum: a learning rate, divided by the number of rows.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or the parts of a cycle do not
        agree.

    **References:**

    1. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson
       (2020), *Cyclical stochastic gradient MCMC for Bayesian deep learning*, ICLR.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import SGNHT, Cyclical

        >>> def model(y):  # the sign of mu is not determined
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=50) as idx:
        ...         numpyro.sample("obs", dist.Normal(jnp.abs(mu), 5), obs=y[idx])

        >>> y = 3 + 5 * jax.random.normal(jax.random.key(0), (1000,))
        >>> inner = SGNHT(model, step_size=0.1, friction=10.0)
        >>> kernel = Cyclical(inner, cycle_length=500, explore_temperature=1.0)
        >>> kernel.samples_per_cycle
        10
        >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y, extra_fields=("cycle",))
        >>> mcmc.get_extra_fields()["cycle"][::10].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    _unrecorded = OuterKernel._unrecorded | {"cycles"}

    def __init__(
        self,
        inner: Any,
        *,
        cycle_length: int,
        samples_per_cycle: int | None = None,
        num_steps: int | None = None,
        explore: float | None = None,
        collect_from: float = 0.8,
        explore_temperature: float = 0.0,
        schedule: Callable | None = None,
        scale_by_n: bool = False,
    ) -> None:
        name = type(self).__name__
        if not isinstance(inner, InPieces):
            raise TypeError(
                f"{name}(inner) must be a kernel of gradient steps or a Metropolis "
                "kernel, such as SGLD(model, step_size=1e-3) or MINT(model, "
                f"temperature=100.0), got {describe(inner)}."
            )
        variate = getattr(inner, "control_variate", None)
        if variate is not None and variate.modes > 1:
            raise ValueError(
                f"{name}(inner) has a control variate with modes={variate.modes}. Its "
                "moves within and between modes have no step size, so that cycles "
                "would change nothing. Run the inner kernel alone."
            )
        kept = inner.keeps_target
        check_positive(name, "collect_from", collect_from, zero=True)
        if explore is None:
            explore = 0.0 if kept else min(0.25, collect_from)
        check_positive(name, "explore_temperature", explore_temperature, zero=True)
        check_flag(name, "scale_by_n", scale_by_n)
        if kept and (explore > 0 or scale_by_n):
            given = f"explore={explore!r}" if explore > 0 else "scale_by_n=True"
            raise ValueError(
                f"{name}({given}) is for kernels of gradient steps: the accept/reject "
                f"steps of {type(inner).__name__} keep its target at any step size. "
                "Leave it out; collect_from= discards the part of a cycle with long "
                "steps."
            )
        if schedule is not None and not callable(schedule):
            raise TypeError(
                f"{name}(schedule=...) must be a function of the number of steps, such "
                f"as schedule.sawtooth(1.0, 1000), got {describe(schedule)}."
            )
        own = inner.num_steps
        shape = shape_of(
            name, own, cycle_length, samples_per_cycle, num_steps, explore, collect_from
        )
        if kept:  # so that a draw of the warmup is the same as without cycles
            shape = shape._replace(piece=math.gcd(shape.piece, own))
        self._cycles: Cycles = AfterWarmup(shape, own) if kept else AtOnce(shape)
        piece: Any = inner.with_num_steps(shape.piece)
        super().__init__(piece)
        self._explore = float(explore)
        self._collect_from = float(collect_from)
        self._explore_temperature = float(explore_temperature)
        self._schedule = schedule
        self._scale_by_n = bool(scale_by_n)

    # read by the driver and by analyses --------------------------------------------

    @property
    def _shape(self) -> Shape:
        return self._cycles.shape

    @property
    def cycle_length(self) -> int:
        """Steps of a cycle."""
        return self._shape.length

    @property
    def samples_per_cycle(self) -> int:
        """Draws of a cycle."""
        return self._shape.samples

    @property
    def num_steps(self) -> int:
        """Steps between two draws of a cycle."""
        return self._shape.num_steps

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that the driver collects."""
        own = (
            "z",
            "diverging",
            "step_size",
            "lp_estimate",
            "cycle",
            "temperature",
            "num_rows",
        )
        return *own, *(f"inner.{n}" for n in self._inner.default_fields if n not in own)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define the kernel, for records."""
        return {
            **super().settings,
            "num_steps": self.num_steps,
            "cycle_length": self.cycle_length,
            "samples_per_cycle": self.samples_per_cycle,
            "schedule": repr(self._factor),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`~numpyro_minibatch.diagnose` needs."""
        return {
            **super().facts,
            "num_steps": self.num_steps,
            "samples_per_cycle": self.samples_per_cycle,
        }

    def get_diagnostics_str(self, state: CyclicalState) -> str:
        """The text of the progress bar."""
        return (
            f"cycle {jnp.max(state.cycle):.0f}. "
            f"step size {jnp.mean(state.step_size):.2e}. "
            f"lp={jnp.mean(state.lp_estimate):.4g}"
        )

    @property
    def _factor(self) -> Callable[[Array], Any]:
        """The function from the number of steps in cycles to the step size factor."""
        if self._schedule is not None:
            return self._schedule
        power = 1.0 / self._inner.step_size_order
        return schedules.cosine_restarts(1.0, self.cycle_length, power)

    def _step_factor(self, count: Array) -> Any:
        """The factor of the ``count``-th step of all."""
        factor = self._cycles.factor(self._factor, count, self.num_warmup)
        if not self._scale_by_n:
            return factor
        (rows,) = self.plates.values()
        return factor * rows ** (-1.0 / self._inner.step_size_order)

    def check_draws(self, num_warmup: int, num_samples: int) -> None:
        """Raise unless the draws after warmup are whole cycles.

        :param num_warmup: draws of the warmup.
        :param num_samples: draws after it.
        :raises ValueError: the last cycle would be cut short.
        """
        each = self.samples_per_cycle
        cycles, rest = divmod(num_samples, each)
        if rest:
            below = f"{cycles * each} or " if cycles else ""
            raise ValueError(
                f"{type(self).__name__} makes {each} draws in a cycle of "
                f"{self.cycle_length} steps, and {num_samples} draws would end in a "
                f"cycle of only {rest}. Write "
                f"num_samples={below}{(cycles + 1) * each} (times thinning), or choose "
                "samples_per_cycle, or num_steps and cycle_length, so that it divides "
                f"{num_samples}."
            )

    # the driver's interface -----------------------------------------------------------

    @full_precision
    def init(  # type: ignore[no-untyped-def]
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        """Start the inner kernel; see :meth:`MinibatchMH.init`.

        :raises ValueError: for a kernel of gradient steps, ``num_warmup`` is not a
            multiple of the draws of a cycle.
        """
        name = type(self).__name__
        self._learn(num_warmup=int(num_warmup), vectorized=None)
        pieces = self._cycles.inner_warmup(name, self.num_warmup)
        states = self._inner.init(
            rng_key, pieces, init_params, model_args, model_kwargs
        )
        if self._scale_by_n and len(self.plates) > 1:
            raise ValueError(
                f"{name}(scale_by_n=True) divides a step size by the rows of one data "
                f"plate, but the model has {len(self.plates)}. Divide step_size by "
                "hand."
            )
        surrogate, vectorized = states.surrogate, not is_prng_key(rng_key)
        begin = jax.vmap(self._first_state) if vectorized else self._first_state
        first = begin(states._replace(surrogate=()))._replace(surrogate=surrogate)
        self._started(first, vectorized)
        return first

    def _first_state(self, inner: Any) -> CyclicalState:
        zero = jnp.zeros_like(inner.lp_estimate)
        return CyclicalState(
            i=jnp.int32(0),
            z=inner.z,
            rng_key=inner.rng_key,
            surrogate=(),
            inner=inner,
            cycle=jnp.int32(0),
            step_size=zero,
            temperature=zero + self.temperature,
            diverging=jnp.array(False),
            lp_estimate=zero,
            num_rows=jnp.zeros((), self._rows_dtype),
        )

    @property
    def _rows_dtype(self) -> Any:
        """Integers, unless the rows of a draw could be more than an int32 counts."""
        most = self._inner.most_rows() * self.cycle_length
        return jnp.int32 if most < 2**31 else jnp.float32

    # one draw -------------------------------------------------------------------------

    def transition(self, target: Target, state: CyclicalState) -> CyclicalState:
        """The steps of a draw; for the first of a cycle, with those that precede it."""
        cycle, before, number = self._cycles.place(state.i, self.num_warmup)
        # as bits, because the check for reused keys counts a key as used if a
        # vectorised loop runs through it
        noise_bits, wrap = _bits(state.rng_key)
        row_bits, wrap_rows = _bits(state.inner.index_key)
        begin = state.inner._replace(rng_key=noise_bits, index_key=row_bits)
        real = state.lp_estimate.dtype
        zero = jnp.zeros((), real)
        none = Pieces((), jnp.zeros_like(state.num_rows), jnp.array(False), zero, zero)
        no_key = jnp.zeros_like(noise_bits)

        def piece(k: Array, carry: tuple[Any, Pieces, Array]) -> Any:
            inner, pieces, _ = carry
            inner = inner._replace(
                i=before + k,
                rng_key=wrap(inner.rng_key),
                index_key=wrap_rows(row_bits),
                surrogate=state.surrogate,
            )
            kernel, inner = self._at(inner)
            moved, measure_key = kernel.advance(target, inner)
            measure = no_key if measure_key is None else _bits(measure_key)[0]
            pieces = pieces.plus(moved)
            moved = moved._replace(
                rng_key=_bits(moved.rng_key)[0], index_key=row_bits, surrogate=()
            )
            return moved, pieces, measure

        # one loop, with more pieces if the draw begins a cycle; all chains have the
        # same count of draws, so that no chain waits for another
        inner, pieces, measure = jax.lax.fori_loop(
            0, number, piece, (begin, none, no_key)
        )
        moved = self._inner.completed(
            target,
            inner._replace(
                rng_key=wrap(inner.rng_key),
                index_key=wrap_rows(row_bits),
                surrogate=state.surrogate,
                diverging=pieces.diverging,
            ),
            pieces._replace(number=number),
            wrap(measure),
            state.i,
            self.num_warmup,
        )
        return state._replace(
            i=state.i + 1,
            z=moved.z,
            rng_key=moved.rng_key,
            inner=moved._replace(i=state.inner.i, surrogate=()),
            cycle=cycle.astype(jnp.int32),
            step_size=moved.step_size,
            diverging=moved.diverging,
            lp_estimate=moved.lp_estimate,
            num_rows=moved.num_rows.astype(state.num_rows.dtype),
        )

    def _at(self, inner: Any) -> tuple[Any, Any]:
        """The kernel of a piece, and its initial state."""
        kernel = self._inner.with_step_schedule(self._step_factor)
        shape, temperature = self._shape, self.temperature
        if not shape.explore or self._explore_temperature == temperature:
            return kernel, inner
        count = inner.i % (shape.length // shape.piece) * shape.piece
        real = inner.lp_estimate.dtype
        noise = jnp.where(count < shape.explore, self._explore_temperature, temperature)
        if jax.tree.leaves(inner.memory):
            # the momentum after descent is not at equilibrium: erratum C5
            bits, wrap = _bits(jax.random.fold_in(inner.rng_key, _RESTART))
            memory = jax.lax.cond(
                count == shape.explore,
                lambda: self._inner.refreshed(wrap(bits), inner, temperature),
                lambda: inner.memory,
            )
            inner = inner._replace(memory=memory)
        return kernel.with_noise_temperature(noise.astype(real)), inner


def _bits(key: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The bits of a key, and a function that makes a key of the same kind of them."""
    bits, wrap = unwrapped(key)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return bits, wrap if is_typed else lambda bits: bits
