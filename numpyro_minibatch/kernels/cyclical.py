"""Cyclical samplers: a kernel whose steps are long, then short, and long again.

A cycle is ``cycle_length`` steps of the kernel inside,

    explore | noise, not collected | draw, draw, ..., draw | explore | ...

with steps that get shorter on the way. Only its last part is collected from: the first
draw of a cycle runs all that comes before it, so that what is returned is a draw of
the sampling part, always.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.util import is_prng_key

from numpyro_minibatch import schedule as schedules
from numpyro_minibatch._internal.checks import (
    check_count,
    check_flag,
    check_positive,
    describe,
)
from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch.kernels._base import MinibatchKernel, over_chains
from numpyro_minibatch.kernels._wrapper import OuterKernel
from numpyro_minibatch.kernels.langevin import SGHMC, SGLD, SGMCMC
from numpyro_minibatch.kernels.metropolis import MinibatchMH
from numpyro_minibatch.kernels.mint import MINT
from numpyro_minibatch.target import Target

__all__ = ["Cyclical", "CyclicalMINT", "CyclicalSGHMC", "CyclicalSGLD", "CyclicalState"]

_RESTART = 0x72657374  # folded into a key, and no number of one of its children


class CyclicalState(NamedTuple):
    """The state of a chain of :class:`Cyclical`.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - key of the noise to come.
    - **surrogate** - with a control variate, the expansion and what belongs to it.
    - **inner** - the state of the inner kernel, but for its key.
    - **cycle** - the cycle that the draw belongs to: 0 for the first after warmup.
    - **step_size** - step size of the draw's last step.
    - **temperature** - temperature of the noise with which that step was made.
    - **diverging** - whether, since the draw before, steps ended where a number is not
      finite; the exploration of a cycle counts to its first draw.
    - **lp_estimate** - the inner kernel's.
    - **num_rows** - rows of data read to make the draw; of the first draw of a cycle,
      its exploration included.
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


class _Tally(NamedTuple):
    """What adds up over the pieces of a draw."""

    num_rows: Array
    diverging: Array
    accept_prob: Array
    reliable: Array


class _Shape(NamedTuple):
    """What a cycle consists of, in steps of the kernel inside."""

    length: int
    explore: int  # steps with the exploration's noise
    start: int  # steps before those that are collected from
    num_steps: int  # of a draw
    samples: int  # draws
    piece: int  # steps that run in one go: a divisor of all of these


class Cyclical(OuterKernel):
    """Cycles of long and short steps over a kernel of the package [1].

    Long steps carry the chain away from the mode it is in, short ones sample the mode
    it has come to. :class:`CyclicalSGLD`, :class:`CyclicalSGHMC` and
    :class:`CyclicalMINT` are presets of it.

    The draws of a run come in cycles of ``samples_per_cycle``: for 30 cycles write
    ``num_samples=30 * kernel.samples_per_cycle``. Another number ends in a cycle that
    is cut short. A cycle tells of the mode that it came to and not of how much mass
    that has: how often a mode is seen is a count of visits.
    :mod:`numpyro_minibatch.cycles` has what can be done about it.

    **Warmup**: for a kernel of gradient steps, ``num_warmup`` draws are whole cycles
    that are discarded, and may be none. A Metropolis kernel adapts in warmup, at
    steady steps; the cycles begin after it.

    :param inner: :class:`SGLD`, :class:`SGHMC`, :class:`SGNHT`, :class:`SGMCMC`,
        :class:`MinibatchMH` or one of its presets. Its step size is that of the
        beginning of a cycle.
    :param cycle_length: steps of a cycle.
    :param samples_per_cycle: draws of a cycle; by default as many as ``num_steps``
        allows.
    :param num_steps: steps that make a draw; by default what ``samples_per_cycle``
        leaves to each, or that of the inner kernel. The draws share the collected part
        evenly, and the last one ends the cycle.
    :param explore: the share of a cycle that is exploration, at
        ``explore_temperature``: the paper's ``beta``. By default 0.25, and 0 for a
        Metropolis kernel, whose target stays what it is.
    :param collect_from: the share of a cycle after which draws are collected, 0.8 by
        default: steps get too long for sampling long before exploration begins.
    :param explore_temperature: temperature of the noise of exploration. 0 is gradient
        descent, as in the paper, which goes to the mode that is nearest uphill; the
        temperature of the kernel keeps the noise on. Forces stay those of the target.
    :param schedule: from the number of steps in cycles to what the step size is
        multiplied by; by default half a cosine from 1 towards 0 in each cycle, of
        ``step_size ** 2`` for dynamics with momentum.
    :param scale_by_n: whether the step size is that of the mean of the rows'
        potentials and not of their sum: a learning rate, divided by the number of rows.

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

    def __init__(
        self,
        inner: MinibatchKernel,
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
        if not isinstance(inner, SGMCMC | MinibatchMH):
            raise TypeError(
                f"{name}(inner) must be a kernel of gradient steps or of decisions, "
                "such as SGLD(model, step_size=1e-3) or MINT(model, temperature=100.0),"
                f" got {describe(inner)}."
            )
        self._decides = isinstance(inner, MinibatchMH)
        check_positive(name, "collect_from", collect_from, zero=True)
        if explore is None:
            explore = 0.0 if self._decides else min(0.25, collect_from)
        check_positive(name, "explore_temperature", explore_temperature, zero=True)
        check_flag(name, "scale_by_n", scale_by_n)
        if self._decides and (explore > 0 or scale_by_n):
            given = f"explore={explore!r}" if explore > 0 else "scale_by_n=True"
            raise ValueError(
                f"{name}({given}) is for kernels of gradient steps: the decisions of "
                f"{type(inner).__name__} keep its target at any step size. Leave it "
                "out; collect_from= discards the part of a cycle with long steps."
            )
        if schedule is not None and not callable(schedule):
            raise TypeError(
                f"{name}(schedule=...) must be a function of the number of steps, such "
                f"as schedule.sawtooth(1.0, 1000), got {describe(schedule)}."
            )
        own = inner._num_steps
        shape = _shape(
            name, own, cycle_length, samples_per_cycle, num_steps, explore, collect_from
        )
        if self._decides:  # so that a draw of the warmup is what it is without cycles
            shape = shape._replace(piece=math.gcd(shape.piece, own))
        self._warmup_steps = own
        inner = copy.copy(inner)
        inner._num_steps = shape.piece
        super().__init__(inner)
        self._shape = shape
        self._shares = float(explore), float(collect_from)
        self._explore_temperature = float(explore_temperature)
        self._schedule = schedule
        self._scale_by_n = bool(scale_by_n)

    # what the driver and the analysis read -----------------------------------------

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
        """The settings that define what the kernel does, for records."""
        explore, collect_from = self._shares
        return {
            **super().settings,
            "num_steps": self.num_steps,
            "cycle_length": self.cycle_length,
            "samples_per_cycle": self.samples_per_cycle,
            "explore": explore,
            "collect_from": collect_from,
            "explore_temperature": self._explore_temperature,
            "schedule": repr(self._factor),
            "scale_by_n": self._scale_by_n,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What :func:`~numpyro_minibatch.diagnose` has to know."""
        return {
            **super().facts,
            "num_steps": self.num_steps,
            "samples_per_cycle": self.samples_per_cycle,
        }

    def get_diagnostics_str(self, state: CyclicalState) -> str:
        """What the progress bar shows."""
        return (
            f"cycle {jnp.max(state.cycle):.0f}. "
            f"step size {jnp.mean(state.step_size):.2e}. "
            f"lp={jnp.mean(state.lp_estimate):.4g}"
        )

    def _identity(self) -> tuple[Hashable, ...]:
        return (
            self._inner,
            self._shape,
            self._shares,
            self._explore_temperature,
            self._schedule,
            self._scale_by_n,
            self._warmup_steps,
        )

    @property
    def _factor(self) -> Callable[[Array], Any]:
        """From the number of steps in cycles to a factor of the step size."""
        if self._schedule is not None:
            return self._schedule
        order = 1 if self._decides else self._inner._dynamics.order
        return schedules.cosine_restarts(1.0, self.cycle_length, 1.0 / order)

    def _pace(self, count: Array) -> Any:
        """The factor of the ``count``-th step of all."""
        factor = self._factor
        if self._decides:
            since = count - self._num_warmup * self._warmup_steps
            return jnp.where(since < 0, 1.0, factor(jnp.maximum(since, 0)))
        if not self._scale_by_n:
            return factor(count)
        (rows,) = self.plates.values()
        return factor(count) * rows ** (-1.0 / self._inner._dynamics.order)

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
                f"cycle of {rest}, which tells less of its mode than the others. Write "
                f"num_samples={below}{(cycles + 1) * each} (times thinning), or choose "
                "samples_per_cycle, or num_steps and cycle_length, so that it divides "
                f"{num_samples}."
            )

    # the driver's interface -----------------------------------------------------------

    def init(  # type: ignore[no-untyped-def]
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        """Start the inner kernel; see :meth:`MinibatchMH.init`.

        :raises ValueError: ``num_warmup`` is not a number of whole cycles, for a kernel
            of gradient steps.
        """
        name, shape = type(self).__name__, self._shape
        self._num_warmup = int(num_warmup)
        cycles, rest = divmod(self._num_warmup, shape.samples)
        if rest and not self._decides:
            some = f"num_warmup={cycles * shape.samples} or "
            raise ValueError(
                f"{name} discards whole cycles of {shape.samples} draws in warmup, and "
                f"num_warmup={num_warmup} is not a number of them. Write "
                f"{some if cycles else ''}"
                f"num_warmup={(cycles + 1) * shape.samples}"
                f"{'' if cycles else ', or num_warmup=0 for none'}."
            )
        steps = cycles * shape.length
        if self._decides:
            steps = self._num_warmup * self._warmup_steps
        states = self._inner.init(
            rng_key, steps // shape.piece, init_params, model_args, model_kwargs
        )
        if self._scale_by_n and len(self.plates) > 1:
            raise ValueError(
                f"{name}(scale_by_n=True) divides a step size by the rows of one data "
                f"plate, and the model has {len(self.plates)}. Divide step_size by "
                "hand."
            )
        surrogate, transition = states.surrogate, self._transition
        first: Callable = self._first_state
        if not is_prng_key(rng_key):
            first, transition = jax.vmap(first), partial(over_chains, transition)
        self._sample_fn = transition
        return first(states._replace(surrogate=()))._replace(surrogate=surrogate)

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
        most = 3 * sum(self.plates.values())
        if not self._decides:
            most = 2 * sum(self.batch_sizes.values())
        return jnp.int32 if most * self.cycle_length < 2**31 else jnp.float32

    # one draw -------------------------------------------------------------------------

    def _place(self, i: Array) -> tuple[Array, Array, Array]:
        """Where the ``i``-th draw of all is: cycle, pieces before it, and its own."""
        shape = self._shape
        warmup = self._num_warmup
        begin = warmup if self._decides else 0  # the draw that begins the first cycle
        cycle, place = (i - begin) // shape.samples, (i - begin) % shape.samples
        first = place == 0
        before = cycle * shape.length + jnp.where(
            first, 0, shape.start + place * shape.num_steps
        )
        steps = shape.num_steps + jnp.where(first, shape.start, 0)
        if self._decides:
            early = i < warmup
            before = begin * self._warmup_steps + before
            before = jnp.where(early, i * self._warmup_steps, before)
            steps = jnp.where(early, self._warmup_steps, steps)
        else:
            cycle = cycle - warmup // shape.samples
        return cycle, before // shape.piece, steps // shape.piece

    def _transition(self, target: Target, state: CyclicalState) -> CyclicalState:
        cycle, before, pieces = self._place(state.i)
        # as bits, because the check for keys that are used twice takes a key for used
        # when a vectorised loop goes through it
        noise_bits, wrap = _bits(state.rng_key)
        row_bits, wrap_rows = _bits(state.inner.index_key)
        begin = state.inner._replace(rng_key=noise_bits, index_key=row_bits)
        real = state.lp_estimate.dtype
        zero = jnp.zeros((), real)
        tally = _Tally(jnp.zeros_like(state.num_rows), jnp.array(False), zero, zero)
        no_key = jnp.zeros_like(noise_bits)

        def piece(k: Array, carry: tuple[Any, _Tally, Array]) -> Any:
            inner, tally, _ = carry
            inner = inner._replace(
                i=before + k,
                rng_key=wrap(inner.rng_key),
                index_key=wrap_rows(row_bits),
                surrogate=state.surrogate,
            )
            kernel, inner = self._at(inner)
            moved, measure_key = kernel._advance(target, inner)
            measure = no_key if measure_key is None else _bits(measure_key)[0]
            tally = _added(tally, moved)
            moved = moved._replace(
                rng_key=_bits(moved.rng_key)[0], index_key=row_bits, surrogate=()
            )
            return moved, tally, measure

        # one loop, of more pieces where the draw begins a cycle: the count of draws is
        # the chains', so that no chain waits for another
        inner, tally, measure = jax.lax.fori_loop(
            0, pieces, piece, (begin, tally, no_key)
        )
        inner = inner._replace(
            rng_key=wrap(inner.rng_key), index_key=wrap_rows(row_bits)
        )
        moved = self._reported(target, inner, tally, pieces, wrap(measure), state)
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
        """The kernel of a piece, and the state that it begins with."""
        kernel = self._inner.paced(self._pace)
        shape, heat = self._shape, self.temperature
        if not shape.explore or self._explore_temperature == heat:
            return kernel, inner
        count = inner.i % (shape.length // shape.piece) * shape.piece
        real = inner.lp_estimate.dtype
        noise = jnp.where(count < shape.explore, self._explore_temperature, heat)
        if jax.tree.leaves(inner.memory):
            # the momentum of descent is not that of a temperature: erratum C5
            bits, wrap = _bits(jax.random.fold_in(inner.rng_key, _RESTART))
            memory = jax.lax.cond(
                count == shape.explore,
                lambda: self._restarted(wrap(bits), inner, heat),
                lambda: inner.memory,
            )
            inner = inner._replace(memory=memory)
        return kernel.heated(noise.astype(real)), inner

    def _restarted(self, key: Array, inner: Any, temperature: Any) -> Any:
        """Momentum and thermostat at their equilibrium, the force that is known."""
        z, _ = ravel_pytree(inner.z)
        dynamics = self._inner._dynamics
        first, second = jax.random.split(key)
        fresh = dynamics.init(first, z, temperature)
        return dynamics.refresh(second, z, fresh, inner.memory, temperature)

    def _reported(
        self,
        target: Target,
        inner: Any,
        tally: _Tally,
        pieces: Array,
        key: Array,
        state: CyclicalState,
    ) -> Any:
        """The inner state with what is known of the draw as a whole."""
        inner = inner._replace(diverging=tally.diverging)
        if self._decides:
            return inner._replace(
                num_rows=tally.num_rows,
                accept_prob=tally.accept_prob / pieces,
                reliable=tally.reliable / pieces,
            )
        z, _ = ravel_pytree(inner.z)
        return self._inner._measured(
            target,
            inner._replace(surrogate=state.surrogate, num_rows=tally.num_rows),
            key,
            z,
            state.i,
            self._num_warmup,
        )


class CyclicalSGLD(Cyclical):
    """Cyclical stochastic gradient Langevin dynamics [1].

    :param model: a NumPyro model with a data plate.
    :param step_size: the step size with which a cycle begins, the paper's ``alpha_0``,
        in ``z + h * force + N(0, 2 h T)``.
    :param cycle_length: gradient steps of a cycle. For ``K`` steps in ``M`` cycles that
        is ``ceil(K / M)``.
    :param samples_per_cycle: draws of a cycle.
    :param num_steps: gradient steps between draws; see :class:`Cyclical`.
    :param explore: the share of a cycle that is exploration, the paper's ``beta``.
    :param collect_from: the share of a cycle after which draws are collected.
    :param explore_temperature: temperature of the noise of exploration.
    :param scale_by_n: whether ``step_size`` is a learning rate, of the mean loss.
    :param settings: the arguments of :class:`SGLD`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson
       (2020), *Cyclical stochastic gradient MCMC for Bayesian deep learning*, ICLR.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalSGLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = CyclicalSGLD(model, step_size=2e-6, cycle_length=500)
        >>> mcmc = MCMC(kernel, num_warmup=0, num_samples=10 * kernel.samples_per_cycle,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    _kind: type[SGMCMC] = SGLD

    def __init__(
        self,
        model: Callable | None = None,
        *,
        cycle_length: int,
        samples_per_cycle: int | None = None,
        num_steps: int | None = None,
        explore: float | None = None,
        collect_from: float = 0.8,
        explore_temperature: float = 0.0,
        scale_by_n: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            self._kind(model, **settings),
            cycle_length=cycle_length,
            samples_per_cycle=samples_per_cycle,
            num_steps=num_steps,
            explore=explore,
            collect_from=collect_from,
            explore_temperature=explore_temperature,
            scale_by_n=scale_by_n,
        )


class CyclicalSGHMC(CyclicalSGLD):
    """Cyclical stochastic gradient Hamiltonian Monte Carlo [1].

    The square of the step size follows the cosine: it is what multiplies a gradient,
    the paper's ``alpha``. Momentum is drawn anew where sampling begins after descent.

    :param model: a NumPyro model with a data plate.
    :param settings: the arguments of :class:`CyclicalSGLD`, with those of
        :class:`SGHMC` for those of :class:`SGLD`: ``step_size`` with ``friction``, a
        rate, or ``h``, the paper's ``alpha_0``, with ``b``, half of its ``eta``, by
        which every step forgets the same share of the momentum.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson
       (2020), *Cyclical stochastic gradient MCMC for Bayesian deep learning*, ICLR.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalSGHMC

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = CyclicalSGHMC(model, step_size=2e-3, friction=50.0,
        ...                        cycle_length=1000, samples_per_cycle=10)
        >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    _kind = SGHMC


class CyclicalMINT(Cyclical):
    """MINT whose proposals get longer at the end of each cycle, and shorter in it [1].

    Only the proposals change, by a schedule that does not look at the chain, so that
    every step keeps the target as it is: all steps could be collected from, and by
    default the last one of each cycle is, before the step size rises.

    :param model: a NumPyro model with a data plate.
    :param cycle_length: steps of a cycle. The paper's 50 epochs are ``50 * N / m`` of
        them.
    :param rise: by what the step size is multiplied at the end of a cycle.
    :param decay: by what it is multiplied in between; see :func:`schedule.sawtooth`. By
        default what makes all cycles alike. The paper's 0.9 begins each cycle at 0.7
        times the step size of the one before, and freezes a long run.
    :param decay_every: after how many steps; by default a tenth of a cycle.
    :param samples_per_cycle: draws of a cycle, evenly spaced, the last one at its end.
    :param collect_from: the share of a cycle after which draws are collected.
    :param settings: the arguments of :class:`MINT`. The step size adapts in warmup,
        and is that of the first cycle's beginning.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 4.3.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalMINT

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = CyclicalMINT(model, temperature=500.0, cycle_length=50)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 1
        True
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        cycle_length: int,
        rise: float = 2.0,
        decay: float | None = None,
        decay_every: int | None = None,
        samples_per_cycle: int = 1,
        collect_from: float = 0.0,
        **settings: Any,
    ) -> None:
        if decay is None:
            check_count("CyclicalMINT", "cycle_length", cycle_length)
            check_positive("CyclicalMINT", "rise", rise)
            decay_every = decay_every or max(1, cycle_length // 10)
            decay = min(float(rise) ** (-decay_every / cycle_length), 1.0)
        pace = schedules.sawtooth(1.0, cycle_length, rise, decay, decay_every)
        super().__init__(
            MINT(model, **settings),
            cycle_length=cycle_length,
            samples_per_cycle=samples_per_cycle,
            collect_from=collect_from,
            schedule=pace,
        )


def _bits(key: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The bits of a key, and what makes a key of the same kind of them."""
    bits, wrap = unwrapped(key)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return bits, wrap if is_typed else lambda bits: bits


def _added(tally: _Tally, moved: Any) -> _Tally:
    """The tally with a piece more."""
    rate = getattr(moved, "accept_prob", tally.accept_prob)
    reliable = getattr(moved, "reliable", tally.reliable)
    return _Tally(
        tally.num_rows + moved.num_rows.astype(tally.num_rows.dtype),
        tally.diverging | moved.diverging,
        tally.accept_prob + rate,
        tally.reliable + reliable,
    )


def _shape(
    who: str,
    own: int,
    cycle_length: Any,
    samples: Any,
    num_steps: Any,
    explore: Any,
    collect_from: Any,
) -> _Shape:
    """The parts of a cycle in steps, if they agree.

    :param own: the steps of a draw of the inner kernel.
    """
    check_count(who, "cycle_length", cycle_length)
    for key, share in (("explore", explore), ("collect_from", collect_from)):
        check_positive(who, key, share, zero=True)
        if not share < 1:
            raise ValueError(
                f"{who}({key}={share!r}) is a share of a cycle, from 0 to below 1; "
                "what comes last in a cycle are the steps that draws are made of."
            )
    if explore > collect_from:
        raise ValueError(
            f"{who}(explore={explore!r}, collect_from={collect_from!r}) would collect "
            "from the exploration, which does not sample the target. Write "
            f"collect_from={explore!r} or more."
        )
    length = int(cycle_length)
    # the first steps n with n / length at least the share: C3 of the errata
    begin, start = (math.ceil(s * length - 1e-6) for s in (explore, collect_from))
    collected = length - start
    if num_steps is not None:
        check_count(who, "num_steps", num_steps)
    if samples is not None:
        check_count(who, "samples_per_cycle", samples)
        each = collected // samples if num_steps is None else int(num_steps)
    else:
        each = own if num_steps is None else int(num_steps)
        samples = collected // each
    samples = int(samples)
    if samples * each != collected or not samples * each:
        raise ValueError(
            f"{who}: {collected} of the {length} steps of a cycle are collected from "
            f"(collect_from={collect_from!r}), and "
            + (
                f"{samples} draws of {each} steps each are {samples * each}"
                if samples * each
                else "a draw takes more"
            )
            + f". Write {_agreeing(length, start, begin, samples, each)}."
        )
    piece = math.gcd(math.gcd(begin, start), each)
    return _Shape(length, begin, start, each, samples, piece)


def _agreeing(length: int, start: int, begin: int, samples: int, each: int) -> str:
    """Settings with which the parts of a cycle agree."""
    collected = length - start
    each, samples = max(each, 1), max(samples, 1)
    ways = []
    if collected % each == 0:
        ways.append(f"samples_per_cycle={collected // each}")
    if collected % samples == 0:
        ways.append(f"num_steps={collected // samples}")
    else:
        fitting = [n for n in range(1, collected + 1) if collected % n == 0]
        best = min(fitting, key=lambda n: abs(math.log(n / samples)))
        ways.append(f"samples_per_cycle={best}, num_steps={collected // best}")
    if begin <= length - samples * each < length:
        ways.append(f"collect_from={1 - samples * each / length!r}")
    return ", or ".join(ways)
