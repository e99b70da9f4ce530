"""Replica exchange: one kernel at several temperatures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_minibatch import ladder
from numpyro_minibatch._internal.checks import check_divides, check_flag, check_mesh
from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch._internal.static import Static
from numpyro_minibatch._model.content import known_content
from numpyro_minibatch._model.prior import check_prior
from numpyro_minibatch.accept import AcceptanceTest
from numpyro_minibatch.batch import Scheme
from numpyro_minibatch.kernels._shared.contract import Start
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.kernels._shared.wrapper import OuterKernel
from numpyro_minibatch.kernels.replica_exchange._arguments import (
    as_rung,
    check_prior_rung,
    temperatures_of,
)
from numpyro_minibatch.kernels.replica_exchange._swaps import SwapPass, Swapping
from numpyro_minibatch.target import ModelTarget, Target

__all__ = ["ReplicaExchange", "ReplicaExchangeState"]


@with_named_items
class ReplicaExchangeState(NamedTuple):
    """The state of a chain of :class:`ReplicaExchange`, of ``R`` rungs.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites, at temperature 1.
    - **rng_key** - key of the decisions to come.
    - **index_key** - key of the rows that swaps read.
    - **surrogate** - with a control variate, the surrogate.
    - **replicas** - states of the inner kernel, by rung, the coldest first.
    - **temperatures** - of the rungs, ``(R,)``.
    - **walker** - the replica at each rung, ``(R,)``.
    - **rung** - the rung of each replica, ``(R,)``.
    - **heading** - for each replica 1 if it last visited the coldest rung, -1 if it has
      visited the hottest rung since, 0 before either, ``(R,)``.
    - **round_trips** - number of trips from the coldest rung to the hottest and back
      since the warmup, over all replicas.
    - **swap_acceptance_rate** - acceptance probability of the swap of each pair of
      neighbours, ``(R - 1,)``; NaN for pairs that were not tried.
    - **swap_log_ratio_variance** - estimated variance of the log ratio of each swap.
    - **swap_reliable** - share of the draw's swaps whose noise was inside the test's
      domain; NaN if none was tried.
    - **rejected** - sums of rejection rates of each pair and their number, since the
      ladder could last change, ``(2, R - 1)``.
    - **log_likelihood** - estimated log density of the tempered part, at each rung,
      just before its last swap, ``(R,)``. After the swap it would be biased, because
      acceptance favours positions that the swap's own batch overestimates.
    - **diverging** - whether any rung's state is diverging.
    - **step_size** - step size of the coldest rung.
    - **lp_estimate** - that of the inner kernel, at the coldest rung.
    - **num_rows** - rows of data read to make the draw, by all replicas.
    """

    i: Array
    z: Any
    rng_key: Array
    index_key: Array
    surrogate: Any
    replicas: Any
    temperatures: Array
    walker: Array
    rung: Array
    heading: Array
    round_trips: Array
    swap_acceptance_rate: Array
    swap_log_ratio_variance: Array
    swap_reliable: Array
    rejected: Array
    log_likelihood: Array
    diverging: Array
    step_size: Array
    lp_estimate: Array
    num_rows: Array


class ReplicaExchange(OuterKernel):
    """Parallel tempering of any kernel of the package, with a test for noisy swaps.

    One replica of the inner kernel runs at each temperature of a ladder. After each
    draw, neighbouring rungs may swap positions. Hot replicas cross between modes, and
    swaps pass their positions down to colder rungs. The draws are those of the coldest
    rung, at temperature 1.

    A swap compares both positions on the same rows. Its noise is that of the rows'
    differences, and the acceptance test corrects for it. Replicas are vectorised inside
    one chain, so that chains remain independent and R-hat is valid.

    :param inner: the kernel that runs at each rung: :class:`SGNHT`, :class:`SGHMC`,
        :class:`SGLD`, :class:`AMAGOLD`, :class:`MinibatchMH` or one of its presets, at
        temperature 1; or NumPyro's ``NUTS``, ``HMC`` or ``BarkerMH``, which read all
        data and need no data plate.
    :param temperatures: the ladder, ascending from 1.0. The last one may be
        ``math.inf``: that rung makes independent draws from the prior.
    :param num_replicas: with ``temperature_ratio``, a geometric ladder instead.
    :param temperature_ratio: ratio of neighbouring temperatures.
    :param swap: ``"penalty"`` (Metropolis with a penalty for the noise), ``"barker"``
        (the compensated test of the paper, on a batch that grows until its noise is
        in the test's domain), ``"exact"`` (all rows), or an ``accept.*`` test.
    :param swap_batch: a ``batch.*`` scheme for the rows of swaps; by default
        ``batch.growing()``, which reads until the noise of a swap is in the test's
        domain. With a control variate, or an inner kernel that reads all rows, swaps
        draw rows as the inner kernel does.
    :param pairing: ``"even-odd"``: even and odd pairs of neighbours alternately, which
        carries replicas along the ladder [2]; ``"random"``: one of the two at random.
    :param adapt_ladder: in warmup, move the rungs between the first and the last so
        that all pairs are rejected equally often.
    :param temper_prior: whether the ladder tempers the prior, too; by default the
        setting of the inner kernel, or false for a kernel of NumPyro.
    :param collect_rungs: whether to collect the draws of all rungs, which
        :func:`to_inference_data` puts into a group ``rungs``.
    :param mesh: devices among which the rungs are divided, as a
        ``jax.sharding.Mesh`` with one axis.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or the ladder is not valid.

    **References:**

    1. Robert H. Swendsen, Jian-Sheng Wang (1986), *Replica Monte Carlo simulation of
       spin-glasses*, Physical Review Letters 57.
    2. Saifuddin Syed, Alexandre Bouchard-Côté, George Deligiannidis, Arnaud Doucet
       (2022), *Non-reversible parallel tempering: a scalable highly parallel MCMC
       scheme*, JRSS B 84(2).

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import MinibatchMH, ReplicaExchange

        >>> def model(y):  # the sign of mu is not determined
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=50) as idx:
        ...         numpyro.sample("obs", dist.Normal(jnp.abs(mu), 5), obs=y[idx])

        >>> y = 3 + 5 * jax.random.normal(jax.random.key(0), (100,))
        >>> inner = MinibatchMH(model, estimate="exact")
        >>> kernel = ReplicaExchange(inner, temperatures=[1.0, 4.0, 16.0, 64.0])
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=2000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> 0.3 < float((mcmc.get_samples()["mu"] > 0).mean()) < 0.7
        True
    """

    _unrecorded = OuterKernel._unrecorded | {"swapping", "mesh"}

    def __init__(
        self,
        inner: MCMCKernel,
        *,
        temperatures: Sequence[float] | None = None,
        num_replicas: int | None = None,
        temperature_ratio: float | None = None,
        swap: Literal["penalty", "barker", "exact"] | AcceptanceTest = "penalty",
        swap_batch: Scheme | None = None,
        pairing: Literal["even-odd", "random"] = "even-odd",
        adapt_ladder: bool = False,
        temper_prior: bool | None = None,
        collect_rungs: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        name = type(self).__name__
        super().__init__(as_rung(name, inner, temper_prior))
        self._temperatures = temperatures_of(
            name, temperatures, num_replicas, temperature_ratio
        )
        check_prior_rung(name, self._inner, self._temperatures)
        self._swapping = Swapping.of(name, swap, swap_batch, pairing, self._inner)
        check_flag(name, "adapt_ladder", adapt_ladder)
        self._adapt_ladder = bool(adapt_ladder)
        check_flag(name, "collect_rungs", collect_rungs)
        self._collect_rungs = bool(collect_rungs)
        if mesh is not None:
            # a rung of infinite temperature runs no kernel
            check_mesh(name, mesh, "rungs")
            check_divides(name, mesh.size, self._num_running, "rungs", "a ladder")
        self._mesh = mesh

    # read by the driver and by analyses --------------------------------------------

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that the driver collects."""
        return (
            *(f"replicas.{name}" for name in self._of_rungs),
            *(("replicas.z",) if self._collect_rungs else ()),
            "z",
            "diverging",
            "step_size",
            "lp_estimate",
            "rung",
            "log_likelihood",
            "swap_acceptance_rate",
            "swap_log_ratio_variance",
            "swap_reliable",
            "round_trips",
            "temperatures",
            "num_rows",
        )

    @property
    def _of_rungs(self) -> tuple[str, ...]:
        """The fields of the inner kernel that are collected for all rungs."""
        own = ("z", "diverging", "step_size", "lp_estimate", "num_rows")
        return tuple(name for name in self._inner.default_fields if name not in own)

    @property
    def stat_dims(self) -> Mapping[str, tuple[str, ...]]:
        """Names for the axes of the fields."""
        return {
            "rung": ("replica",),
            **{f"rung_{name}": ("ladder",) for name in self._of_rungs},
            "rung_acceptance_rate": ("ladder",),
            "rung_n_steps": ("ladder",),
            "log_likelihood": ("ladder",),
            "temperatures": ("ladder",),
            "swap_acceptance_rate": ("pair",),
            "swap_log_ratio_variance": ("pair",),
        }

    @property
    def temperature(self) -> float:
        """The temperature of the draws."""
        return 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define the kernel, for records."""
        return {
            **super().settings,
            **self._swapping.settings,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`~numpyro_minibatch.diagnose` needs."""
        return {**super().facts, "temperatures": list(self._temperatures)}

    def get_diagnostics_str(self, state: ReplicaExchangeState) -> str:
        """The text of the progress bar."""
        sums, number = state.rejected[..., 0, :], state.rejected[..., 1, :]
        rate = 1.0 - jnp.sum(sums) / jnp.maximum(jnp.sum(number), 1.0)
        return (
            f"step size {jnp.mean(state.step_size):.2e}. swaps={rate:.2f}. "
            f"round trips={jnp.sum(state.round_trips):.0f}"
        )

    # the driver's interface -----------------------------------------------------------

    @full_precision
    def init(  # type: ignore[no-untyped-def]
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        """Start the inner kernel at each rung; see :meth:`MinibatchMH.init`."""
        self._learn(num_warmup=int(num_warmup), vectorized=None)
        number = len(self._temperatures)
        is_chain = is_prng_key(rng_key)
        keys = rng_key[None] if is_chain else rng_key
        chains = len(keys)

        def split(key: Array) -> tuple[Array, Array]:
            # the coldest rung has the chain's key: a ladder of one is the inner kernel;
            # the number folded in must not be that of a child of the key
            own, *others = jax.random.split(jax.random.fold_in(key, 0x6C616464), number)
            return own, jnp.stack([key, *others])

        own, rungs = jax.vmap(split)(keys)
        if init_params is not None:
            init_params = jax.tree.map(
                lambda x: jnp.repeat(x[None] if is_chain else x, number, 0),
                jax.tree.map(jnp.asarray, init_params),
            )
        flat_keys = rungs.reshape((chains * number, *rungs.shape[2:]))
        states = self._inner.init(
            flat_keys, num_warmup, init_params, model_args, model_kwargs
        )
        if math.isinf(self._temperatures[-1]):
            target = self._inner.make_target(tuple(model_args), model_kwargs or {})
            assert isinstance(target, ModelTarget)
            check_prior(type(self).__name__, target)
        surrogate = states.surrogate
        replicas = jax.tree.map(
            lambda x: x.reshape((chains, number, *x.shape[1:])),
            states._replace(surrogate=()),
        )
        static, arrays = Static.split(tuple(model_args), model_kwargs or {})
        content = known_content()
        if content is not None and self.model is not None:
            # like the inner kernel's first states, found again by value
            first = _begin_equal(
                self._not_started(), static, content, own, replicas, arrays, surrogate
            )
        else:
            begin = jax.jit(partial(self._begin, static))
            first = begin(own, replicas, arrays, surrogate)
        if is_chain:
            first = jax.tree.map(lambda x: x[0], first)
        first = first._replace(surrogate=surrogate)
        self._started(first, not is_chain)
        return first

    def _begin(
        self,
        static: Static,
        keys: Array,
        replicas: Any,
        arrays: list[Any],
        surrogate: Any,
    ) -> ReplicaExchangeState:
        """The first states, of several chains, from states at temperature 1."""
        target = self._inner.make_target(*static.join(arrays))
        return jax.vmap(partial(self._first_state, target, surrogate))(keys, replicas)

    def _first_state(
        self, target: Target, surrogate: Any, key: Array, replicas: Any
    ) -> ReplicaExchangeState:
        number = len(self._temperatures)
        key, index_key = jax.random.split(key)
        if number > 1:
            # what depends on the temperature is adjusted to the rung from the start
            key, momentum_key = jax.random.split(key)
            rungs, temperatures = jnp.arange(number), jnp.asarray(self._temperatures)
            replicas = self._exchanged(
                target,
                replicas,
                rungs,
                rungs > 0,
                temperatures,
                surrogate,
                momentum_key,
            )
        real = replicas.step_size.dtype
        none = jnp.full((number - 1,), jnp.nan, real)
        rungs = jnp.arange(number, dtype=jnp.int32)
        return ReplicaExchangeState(
            i=jnp.int32(0),
            z=jax.tree.map(lambda x: x[0], replicas.z),
            rng_key=key,
            index_key=index_key,
            surrogate=(),
            replicas=replicas,
            temperatures=jnp.asarray(self._temperatures, real),
            walker=rungs,
            rung=rungs,
            heading=jnp.zeros_like(rungs),
            round_trips=jnp.int32(0),
            swap_acceptance_rate=none,
            swap_log_ratio_variance=none,
            swap_reliable=jnp.ones((), real),
            rejected=jnp.zeros((2, number - 1), real),
            log_likelihood=jnp.full((number,), jnp.nan, real),
            diverging=jnp.array(False),
            step_size=replicas.step_size[0],
            lp_estimate=jnp.zeros((), real),
            num_rows=jnp.zeros_like(replicas.num_rows[0]),
        )

    # one draw -------------------------------------------------------------------------

    def transition(
        self, target: Target, state: ReplicaExchangeState
    ) -> ReplicaExchangeState:
        """Swap positions of neighbours, and make a draw of the kernel at each rung."""
        names = ("rng", "parity", "accept", "momentum", "prior")
        keys = dict(zip(names, jax.random.split(state.rng_key, 5), strict=True))
        replicas, walker, swaps = state.replicas, state.walker, None
        if len(self._temperatures) > 1:
            swaps = self._swap_pass(target, state, keys)
            is_new = swaps.source != jnp.arange(len(self._temperatures))
            # in the draw after the rungs moved, all temperatures have changed
            is_new |= self._adapt_ladder & (state.i == self._ladder_ends).any()
            replicas = self._exchanged(
                target,
                replicas,
                swaps.source,
                is_new,
                state.temperatures,
                state.surrogate,
                keys["momentum"],
            )
            walker = walker[swaps.source]
        moved = self._moved(target, state, replicas, keys["prior"])
        state = state._replace(
            i=state.i + 1,
            z=jax.tree.map(lambda x: x[0], moved.z),
            rng_key=keys["rng"],
            replicas=moved,
            diverging=moved.diverging.any(),
            step_size=moved.step_size[0],
            lp_estimate=moved.lp_estimate[0],
            num_rows=moved.num_rows.sum(dtype=moved.num_rows.dtype),
        )
        return state if swaps is None else self._counted(state, walker, swaps)

    def _moved(
        self, target: Target, state: ReplicaExchangeState, replicas: Any, key: Array
    ) -> Any:
        """A draw of the inner kernel at each rung, or from the prior at infinity."""
        # the count of draws is shared, so that its branches stay branches
        shared = {"i": state.i, "surrogate": state.surrogate}
        if len(self._temperatures) == 1:
            # not vectorised, so that it equals the inner kernel bit for bit
            alone = jax.tree.map(lambda x: x[0], replicas)._replace(**shared)
            moved = self._inner.transition(target, alone)
            return jax.tree.map(lambda x: x[None], moved._replace(surrogate=()))
        axes = type(replicas)(*[None if n in shared else 0 for n in replicas._fields])
        number = self._num_running
        running = self._on_devices(jax.tree.map(lambda x: x[:number], replicas))

        def move(temperature: Array, replica: Any) -> Any:
            moved = self._inner.with_temperature(temperature).transition(
                target, replica
            )
            return moved._replace(surrogate=())

        moved = jax.vmap(
            move, in_axes=(0, axes), out_axes=axes._replace(surrogate=None)
        )(state.temperatures[:number], running._replace(**shared))
        moved = moved._replace(i=jnp.broadcast_to(moved.i, (number,)))
        if number == len(self._temperatures):
            return moved
        hottest = jax.tree.map(lambda x: x[-1], replicas)
        drawn = self._from_prior(target, state, hottest, key)
        return jax.tree.map(
            lambda all_others, last: jnp.concatenate([all_others, last[None]]),
            moved,
            drawn._replace(i=moved.i[0]),
        )

    @full_precision
    def _from_prior(
        self, target: Target, state: ReplicaExchangeState, hottest: Any, key: Array
    ) -> Any:
        """The state of the rung at infinity: a new draw from the prior."""
        assert isinstance(target, ModelTarget)
        draw_key, first_key, arrive_key = jax.random.split(key, 3)
        z = target.draw_prior(draw_key)
        flat, unravel = ravel_pytree(z)
        inner = self._inner.with_temperature(self._finite(state.temperatures)[-1])
        hottest = hottest._replace(surrogate=state.surrogate)
        reader = inner.reader(target, unravel, state.surrogate)
        start = Start(reader, z, flat, first_key, state.surrogate)
        fresh = inner.first_state(start)
        arrived = inner.arrive(target, hottest, fresh, arrive_key)
        return arrived._replace(surrogate=())

    @property
    def _num_running(self) -> int:
        """The number of rungs that run the inner kernel; the prior rung does not."""
        return len(self._temperatures) - math.isinf(self._temperatures[-1])

    def _finite(self, temperatures: Array) -> Array:
        """The temperatures, with that of the rung below instead of infinity."""
        if self._num_running == len(self._temperatures):
            return temperatures
        return temperatures.at[-1].set(temperatures[-2])

    def _on_devices(self, replicas: Any) -> Any:
        """The replicas, divided among the devices."""
        if self._mesh is None:
            return replicas
        over_rungs = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names[0]))
        return jax.lax.with_sharding_constraint(replicas, over_rungs)

    @full_precision
    def _swap_pass(
        self, target: Target, state: ReplicaExchangeState, keys: dict[str, Array]
    ) -> SwapPass:
        """Accept or reject the swaps of every second pair of neighbours."""
        _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], state.replicas.z))
        rows_of_inner = self._inner.reader(target, unravel, state.surrogate)
        row_key = jax.random.fold_in(state.index_key, state.i)
        swaps = self._swapping.decide(
            self._swapping.reader(rows_of_inner, self._inner.temper_prior),
            state,
            row_key,
            keys,
        )
        arrivals = len(self._temperatures) * self._inner.arrival_rows(rows_of_inner)
        return swaps._replace(num_rows=swaps.num_rows + arrivals)

    def _exchanged(
        self,
        target: Target,
        replicas: Any,
        source: Array,
        is_new: Array,
        temperatures: Array,
        surrogate: Any,
        key: Array,
    ) -> Any:
        """The states of the rungs, with the position of ``source`` if ``is_new``."""
        rungs = jnp.arange(len(self._temperatures))
        keys = jax.random.split(key, len(rungs))

        def take(
            rung: Array, origin: Array, is_new: Array, temperature: Array, key: Array
        ) -> Any:
            here = jax.tree.map(lambda x: x[rung], replicas)
            there = jax.tree.map(lambda x: x[origin], replicas)
            at_rung = self._inner.with_temperature(temperature)
            arrived = at_rung.arrive(
                target, here._replace(surrogate=surrogate), there, key
            )._replace(surrogate=())

            def choose(new: Array, old: Array) -> Array:
                # fields that stay with the rung are not touched, such as its keys
                return old if new is old else jnp.where(is_new, new, old)

            return jax.tree.map(choose, arrived, here)

        return jax.vmap(take)(rungs, source, is_new, self._finite(temperatures), keys)

    def _counted(
        self, state: ReplicaExchangeState, walker: Array, swaps: SwapPass
    ) -> ReplicaExchangeState:
        """Track the replicas, and in warmup move the rungs."""
        number = len(self._temperatures)
        rung = jnp.argsort(walker).astype(walker.dtype)
        at_top, at_bottom = rung == number - 1, rung == 0
        home = at_bottom & (state.heading == -1)
        heading = jnp.where(at_bottom, 1, state.heading)
        heading = jnp.where(at_top & (state.heading == 1), -1, heading)
        in_warmup = state.i <= self.num_warmup
        trips = jnp.where(in_warmup, 0, state.round_trips + home.sum(dtype=jnp.int32))
        tried = ~jnp.isnan(swaps.accept_prob)
        rejection = jnp.where(tried, 1.0 - swaps.accept_prob, 0.0)
        rejected = state.rejected + jnp.stack(
            [rejection, tried.astype(rejection.dtype)]
        )
        state = state._replace(
            walker=walker,
            rung=rung,
            heading=heading.astype(state.heading.dtype),
            round_trips=trips,
            swap_acceptance_rate=swaps.accept_prob,
            swap_log_ratio_variance=swaps.variance,
            swap_reliable=swaps.reliable.astype(state.swap_reliable.dtype),
            rejected=rejected,
            log_likelihood=swaps.log_likelihood,
            num_rows=state.num_rows + swaps.num_rows.astype(state.num_rows.dtype),
        )
        ends = self._ladder_ends
        if not ends.size:
            return state
        at_end = (state.i == jnp.asarray(ends)).any()
        # step sizes no longer adapt after the warmup; pairs must have been tried
        moves = at_end & (state.i < self.num_warmup) & (rejected[1].min() > 0)
        moves &= self._adapt_ladder
        mean = rejected[0] / jnp.maximum(rejected[1], 1.0)
        new = ladder.equalised(state.temperatures, mean)
        return state._replace(
            temperatures=jnp.where(moves, new, state.temperatures),
            rejected=jnp.where(at_end, 0.0, rejected),
        )

    @property
    def _ladder_ends(self) -> np.ndarray:
        """The draws of the warmup after which the rungs move and counts restart."""
        warmup = self.num_warmup
        ends = {warmup // 16, warmup // 8, warmup // 4, warmup // 2, warmup}
        return np.array(sorted(ends - {0}), np.int32)


def _begin(
    kernel: ReplicaExchange, static: Static, content: str | None, *rest: Any
) -> ReplicaExchangeState:
    return kernel._begin(static, *rest)


# for all equal kernels, if their models are known to be equal
_begin_equal = jax.jit(_begin, static_argnums=(0, 1, 2))
