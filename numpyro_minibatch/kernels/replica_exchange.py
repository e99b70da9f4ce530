"""Replica exchange: one kernel at several temperatures, whose positions are swapped.

Every pass is one line of algebra for each pair of neighbouring rungs,

    swap  iff  test((1 / T_j - 1 / T_k) * log_ratio(likelihood, z_j, z_k, batch))

with both positions on one batch, and the inner kernel at each temperature in between.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
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

from numpyro_minibatch import accept, batch, ladder
from numpyro_minibatch._internal.checks import (
    check_count,
    check_divides,
    check_flag,
    check_mesh,
    check_positive,
    describe,
)
from numpyro_minibatch._model.preflight import check_prior, known_content
from numpyro_minibatch.accept import AcceptanceTest, SequentialTest
from numpyro_minibatch.batch import FullBatch, Scheme, Weighted
from numpyro_minibatch.estimate import Comparison, Reader, Shared, Weights
from numpyro_minibatch.kernels._base import MinibatchKernel, Static, over_chains
from numpyro_minibatch.kernels._numpyro import NumPyroKernel
from numpyro_minibatch.kernels._wrapper import OuterKernel
from numpyro_minibatch.kernels.langevin import SGHMC, SGMCMC, SGNHT
from numpyro_minibatch.target import ModelTarget, Target

__all__ = ["RELD", "RENHD", "ReplicaExchange", "ReplicaExchangeState"]


class ReplicaExchangeState(NamedTuple):
    """The state of a chain of :class:`ReplicaExchange`, of ``R`` rungs.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites, at temperature 1.
    - **rng_key** - key of the decisions to come.
    - **index_key** - key of the rows that swaps read.
    - **surrogate** - with a control variate, the expansion and what belongs to it.
    - **replicas** - states of the inner kernel, by rung, the coldest first.
    - **temperatures** - of the rungs, ``(R,)``.
    - **walker** - which replica is at each rung, ``(R,)``.
    - **rung** - the rung of each replica, ``(R,)``.
    - **heading** - for each replica 1 after it was at the coldest rung, -1 after it was
      at the hottest one since, 0 before, ``(R,)``.
    - **round_trips** - how often replicas went from the coldest rung to the hottest and
      back since the warmup, of all together.
    - **swap_acceptance_rate** - acceptance probability of the swap of each pair of
      neighbours, ``(R - 1,)``; not a number for pairs that were not tried.
    - **swap_log_ratio_variance** - estimated variance of the log ratio of each swap.
    - **swap_reliable** - share of the draw's swaps whose noise was inside the test's
      domain; not a number where none was tried.
    - **rejected** - sums of rejection rates of each pair and their number, since the
      ladder could last change, ``(2, R - 1)``.
    - **log_likelihood** - estimated log density of what is tempered, at each rung, just
      before it last took part in a swap, ``(R,)``. Afterwards it would be biased: a
      swap prefers what its own batch makes look good.
    - **diverging** - whether any rung's state is diverging.
    - **step_size** - step size of the coldest rung.
    - **lp_estimate** - the inner kernel's, at the coldest rung.
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


class _Swaps(NamedTuple):
    """What a pass of swaps came to."""

    source: Array  # from which rung each rung has its position
    accept_prob: Array
    variance: Array
    reliable: Array
    log_likelihood: Array
    num_rows: Array


class ReplicaExchange(OuterKernel):
    """Parallel tempering over any kernel of the package, with swaps that know noise.

    One replica of the inner kernel runs at each temperature of a ladder. After each
    draw neighbouring rungs may swap positions; hot replicas cross between modes, and
    hand them down. The draws are those of the coldest rung, at temperature 1.

    A swap compares both positions on the same rows, so that its noise is that of the
    rows' differences, and the test makes up for it. Replicas are vectorised inside one
    chain: chains stay independent, and R-hat means what it always does.

    :param inner: the kernel that runs at each rung: :class:`SGNHT`, :class:`SGHMC`,
        :class:`SGLD`, :class:`AMAGOLD`, :class:`MinibatchMH` or one of its presets, at
        temperature 1; or NumPyro's ``NUTS``, ``HMC`` or ``BarkerMH``, which read all
        data and need no data plate.
    :param temperatures: the ladder, ascending from 1.0. The last one may be
        ``math.inf``: that rung makes independent draws of the prior.
    :param num_replicas: with ``temperature_ratio``, a geometric ladder instead.
    :param temperature_ratio: ratio of neighbouring temperatures.
    :param swap: ``"penalty"`` (Metropolis with a penalty for the noise), ``"barker"``
        (the compensated test of the paper, on a batch that grows until its noise is
        inside), ``"exact"`` (all rows), or an ``accept.*`` test.
    :param swap_batch: a ``batch.*`` scheme for the rows of swaps; by default
        ``batch.growing()``, which reads until the noise of a swap is inside its test.
        With a control variate, or an inner kernel that reads all rows, swaps read the
        rows that it does.
    :param pairing: ``"even-odd"``: even and odd pairs of neighbours by turns, which
        carries replicas along the ladder [2]; ``"random"``: one of the two by chance.
    :param adapt_ladder: in warmup, move the rungs between the first and the last to
        where swaps are rejected equally often.
    :param temper_prior: whether the ladder tempers the prior, too; by default what the
        inner kernel says, and for one of NumPyro's, no.
    :param collect_rungs: whether to collect the draws of all rungs, which
        :func:`to_inference_data` puts into a group ``rungs``.
    :param mesh: devices among which the rungs are divided, as a
        ``jax.sharding.Mesh`` with one axis.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or the ladder is none.

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
        super().__init__(_checked_inner(name, inner, temper_prior))
        self._ladder = _ladder(name, temperatures, num_replicas, temperature_ratio)
        _check_prior_rung(name, self._inner, self._ladder)
        self._swap, self._exact = _swap_test(name, swap)
        if swap_batch is not None and (
            not isinstance(swap_batch, Scheme) or isinstance(swap_batch, Weighted)
        ):
            raise TypeError(
                f"{name}(swap_batch=...) must be one of the batch.* schemes that draw "
                "rows evenly, such as batch.growing(500), got "
                f"{describe(swap_batch)}."
            )
        if swap_batch is not None and self._exact:
            raise ValueError(
                f'{name}(swap="exact") reads all rows, and has no use for '
                f"swap_batch={swap_batch!r}. Leave one of them out."
            )
        weighs = self._inner._control_variate is not None
        if swap_batch is not None and weighs:
            raise ValueError(
                f"{name}(swap_batch={swap_batch!r}): with a control variate swaps read "
                "rows by how much they matter, as the inner kernel does. Leave "
                "swap_batch out."
            )
        if (
            swap_batch is None
            and not (self._exact or weighs)
            and not isinstance(self._inner._scheme, FullBatch)
        ):
            # what is small enough a noise for a gradient may be far too much for a swap
            swap_batch = batch.growing()
        if pairing not in ("even-odd", "random"):
            raise ValueError(
                f'{name}(pairing=...) must be "even-odd" or "random", got '
                f"{describe(pairing)}."
            )
        check_flag(name, "adapt_ladder", adapt_ladder)
        self._swap_batch = swap_batch
        self._pairing = pairing
        self._adapt_ladder = bool(adapt_ladder)
        check_flag(name, "collect_rungs", collect_rungs)
        self._collect_rungs = bool(collect_rungs)
        if mesh is not None:
            # a rung of infinite temperature runs no kernel
            check_mesh(name, mesh, "rungs")
            check_divides(name, mesh.size, self._num_running, "rungs", "a ladder")
        self._mesh = mesh

    # what the driver and the analysis read -----------------------------------------

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
        """The settings that define what the kernel does, for records."""
        return {
            **super().settings,
            "temperatures": list(self._ladder),
            "swap": "exact" if self._exact else repr(self._swap),
            "swap_batch": repr(self._swap_batch),
            "pairing": self._pairing,
            "adapt_ladder": self._adapt_ladder,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What :func:`~numpyro_minibatch.diagnose` has to know."""
        return {**super().facts, "temperatures": list(self._ladder)}

    def get_diagnostics_str(self, state: ReplicaExchangeState) -> str:
        """What the progress bar shows."""
        sums, number = state.rejected[..., 0, :], state.rejected[..., 1, :]
        rate = 1.0 - jnp.sum(sums) / jnp.maximum(jnp.sum(number), 1.0)
        return (
            f"step size {jnp.mean(state.step_size):.2e}. swaps={rate:.2f}. "
            f"round trips={jnp.sum(state.round_trips):.0f}"
        )

    def _identity(self) -> tuple[Hashable, ...]:
        return (
            self._inner,
            self._ladder,
            self._swap,
            self._exact,
            self._swap_batch,
            self._pairing,
            self._adapt_ladder,
            self._collect_rungs,
            self._mesh,
        )

    # the driver's interface -----------------------------------------------------------

    def init(  # type: ignore[no-untyped-def]
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        """Start the inner kernel at each rung; see :meth:`MinibatchMH.init`."""
        self._num_warmup = int(num_warmup)
        number = len(self._ladder)
        is_chain = is_prng_key(rng_key)
        keys = rng_key[None] if is_chain else rng_key
        chains = len(keys)

        def split(key: Array) -> tuple[Array, Array]:
            # the coldest rung has the chain's key: a ladder of one is the inner kernel
            # what is folded in must not be the number of a child of the key
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
        if math.isinf(self._ladder[-1]):
            target = self._inner._make_target(tuple(model_args), model_kwargs or {})
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
            # as the inner kernel's first states, found again by value
            equal = copy.copy(self)
            equal._inner = copy.copy(self._inner)
            first = _begin_equal(
                equal, static, content, own, replicas, arrays, surrogate
            )
        else:
            begin = jax.jit(partial(self._begin, static))
            first = begin(own, replicas, arrays, surrogate)
        if is_chain:
            first = jax.tree.map(lambda x: x[0], first)
        transition = self._transition
        self._sample_fn = transition if is_chain else partial(over_chains, transition)
        return first._replace(surrogate=surrogate)

    def _begin(
        self,
        static: Static,
        keys: Array,
        replicas: Any,
        arrays: list[Any],
        surrogate: Any,
    ) -> ReplicaExchangeState:
        """The first states, of several chains, from states at temperature 1."""
        target = self._inner._make_target(*static.join(arrays))
        return jax.vmap(partial(self._first_state, target, surrogate))(keys, replicas)

    def _first_state(
        self, target: Target, surrogate: Any, key: Array, replicas: Any
    ) -> ReplicaExchangeState:
        number = len(self._ladder)
        key, index_key = jax.random.split(key)
        if number > 1:
            # what depends on the temperature is that of the rung from the beginning
            key, momentum_key = jax.random.split(key)
            rungs, temperatures = jnp.arange(number), jnp.asarray(self._ladder)
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
            temperatures=jnp.asarray(self._ladder, real),
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

    def _transition(
        self, target: Target, state: ReplicaExchangeState
    ) -> ReplicaExchangeState:
        names = ("rng", "parity", "accept", "momentum", "prior")
        keys = dict(zip(names, jax.random.split(state.rng_key, 5), strict=True))
        replicas, walker, swaps = state.replicas, state.walker, None
        if len(self._ladder) > 1:
            swaps = self._swap_pass(target, state, keys)
            is_new = swaps.source != jnp.arange(len(self._ladder))
            # the draw after the rungs moved, all have another temperature
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
        """A draw of the inner kernel at each rung, or of the prior at the hottest."""
        # the count of draws is shared, so that its branches stay branches
        shared = {"i": state.i, "surrogate": state.surrogate}
        if len(self._ladder) == 1:
            # not vectorised, so that it is the inner kernel to the last bit
            alone = jax.tree.map(lambda x: x[0], replicas)._replace(**shared)
            moved = self._inner._transition(target, alone)
            return jax.tree.map(lambda x: x[None], moved._replace(surrogate=()))
        axes = type(replicas)(*[None if n in shared else 0 for n in replicas._fields])
        number = self._num_running
        running = self._on_devices(jax.tree.map(lambda x: x[:number], replicas))

        def move(temperature: Array, replica: Any) -> Any:
            moved = self._inner.at(temperature)._transition(target, replica)
            return moved._replace(surrogate=())

        moved = jax.vmap(
            move, in_axes=(0, axes), out_axes=axes._replace(surrogate=None)
        )(state.temperatures[:number], running._replace(**shared))
        moved = moved._replace(i=jnp.broadcast_to(moved.i, (number,)))
        if number == len(self._ladder):
            return moved
        hottest = jax.tree.map(lambda x: x[-1], replicas)
        drawn = self._from_prior(target, state, hottest, key)
        return jax.tree.map(
            lambda all_others, last: jnp.concatenate([all_others, last[None]]),
            moved,
            drawn._replace(i=moved.i[0]),
        )

    def _from_prior(
        self, target: Target, state: ReplicaExchangeState, hottest: Any, key: Array
    ) -> Any:
        """The state of the rung of infinite temperature: a new draw of the prior."""
        assert isinstance(target, ModelTarget)
        draw_key, first_key, arrive_key = jax.random.split(key, 3)
        z = target.draw_prior(draw_key)
        flat, unravel = ravel_pytree(z)
        inner = self._inner.at(self._finite(state.temperatures)[-1])
        hottest = hottest._replace(surrogate=state.surrogate)
        reader = inner._reader(target, unravel, state.surrogate)
        fresh = inner._first_state(reader, z, flat, first_key, state.surrogate)
        arrived = inner._arrive(target, hottest, fresh, arrive_key)
        return arrived._replace(surrogate=())

    @property
    def _num_running(self) -> int:
        """How many rungs run the inner kernel; the prior needs none."""
        return len(self._ladder) - math.isinf(self._ladder[-1])

    def _finite(self, temperatures: Array) -> Array:
        """The temperatures; for infinity that of the rung below, for its momentum."""
        if self._num_running == len(self._ladder):
            return temperatures
        return temperatures.at[-1].set(temperatures[-2])

    def _on_devices(self, replicas: Any) -> Any:
        """The replicas, divided among the devices."""
        if self._mesh is None:
            return replicas
        over_rungs = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names[0]))
        return jax.lax.with_sharding_constraint(replicas, over_rungs)

    def _swap_pass(
        self, target: Target, state: ReplicaExchangeState, keys: dict[str, Array]
    ) -> _Swaps:
        """Decide about every second pair of neighbours."""
        number = len(self._ladder)
        parity = state.i % 2
        if self._pairing == "random":
            parity = jax.random.bernoulli(keys["parity"]).astype(jnp.int32)
        lower, upper, exists = ladder.pairs(number, parity)
        _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], state.replicas.z))
        flat = jax.vmap(lambda z: ravel_pytree(z)[0])(state.replicas.z)
        reader = self._swap_reader(target, unravel, state)
        rows_of_inner = self._inner._reader(target, unravel, state.surrogate)
        inverse = 1.0 / state.temperatures
        row_key = jax.random.fold_in(state.index_key, state.i)

        def decide(j: Array, k: Array, keys: tuple[Array, Array]) -> Any:
            rows, decision = keys
            gap = inverse[j] - inverse[k]
            # how much noise of the difference the test can take
            limit = self._swap.max_variance / jnp.square(gap)
            seen: Comparison = Shared().compare(
                reader, rows, flat[j], flat[k], (), limit
            )
            log_ratio = gap * seen.log_ratio
            return seen, log_ratio, self._swap(decision, log_ratio)

        each = [jax.random.split(key, len(lower)) for key in (row_key, keys["accept"])]
        seen, log_ratio, decision = jax.vmap(decide)(lower, upper, (each[0], each[1]))
        accepted = decision.accept & exists
        rungs = jnp.arange(number, dtype=jnp.int32)
        # pairs that do not exist write nowhere
        at_lower = jnp.where(exists, lower, number)
        at_upper = jnp.where(exists, upper, number)
        source = rungs.at[at_lower].set(jnp.where(accepted, upper, lower), mode="drop")
        source = source.at[at_upper].set(jnp.where(accepted, lower, upper), mode="drop")
        none = jnp.full((number - 1,), jnp.nan, flat.dtype)
        before = seen.log_density.astype(state.log_likelihood.dtype)
        # an impossible position is rejected, and its likelihood is zero
        before = jnp.where(jnp.isnan(before), -jnp.inf, before)
        energies = state.log_likelihood
        energies = energies.at[at_lower].set(before[:, 0], mode="drop")
        energies = energies.at[at_upper].set(before[:, 1], mode="drop")
        return _Swaps(
            source=source,
            accept_prob=none.at[at_lower].set(decision.accept_prob, mode="drop"),
            variance=none.at[at_lower].set(log_ratio.variance, mode="drop"),
            # without a try, not a number
            reliable=(decision.reliable & exists).sum() / exists.sum(),
            log_likelihood=energies,
            num_rows=jnp.where(exists, seen.num_rows, 0).sum()
            + number * self._inner._arrival_rows(rows_of_inner),
        )

    def _swap_reader(self, target: Target, unravel: Any, state: Any) -> Reader:
        """The rows of swaps, and the weights of what is tempered."""
        reader = self._inner._reader(target, unravel, state.surrogate)
        tempered = 1.0 if self._inner._temper_prior else 0.0
        reader = reader._replace(weights=Weights(tempered, 1.0, 0.0))
        if self._exact:
            return reader.everything(jnp.array(True))
        if self._swap_batch is not None:
            scheme = self._swap_batch.fitted(reader.scheme.widths, reader.plates)
            reader = reader._replace(scheme=scheme, designs=None)
        return reader

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
        """The states of the rungs, where ``is_new`` with the position of ``source``."""
        rungs = jnp.arange(len(self._ladder))
        keys = jax.random.split(key, len(rungs))

        def take(
            rung: Array, origin: Array, is_new: Array, heat: Array, key: Array
        ) -> Any:
            here = jax.tree.map(lambda x: x[rung], replicas)
            there = jax.tree.map(lambda x: x[origin], replicas)
            at_rung = self._inner.at(heat)
            arrived = at_rung._arrive(
                target, here._replace(surrogate=surrogate), there, key
            )._replace(surrogate=())

            def choose(new: Array, old: Array) -> Array:
                # what stays with the rung is not touched, its keys least of all
                return old if new is old else jnp.where(is_new, new, old)

            return jax.tree.map(choose, arrived, here)

        return jax.vmap(take)(rungs, source, is_new, self._finite(temperatures), keys)

    def _counted(
        self, state: ReplicaExchangeState, walker: Array, swaps: _Swaps
    ) -> ReplicaExchangeState:
        """Follow the replicas, and in warmup move the rungs."""
        number = len(self._ladder)
        rung = jnp.argsort(walker).astype(walker.dtype)
        at_top, at_bottom = rung == number - 1, rung == 0
        home = at_bottom & (state.heading == -1)
        heading = jnp.where(at_bottom, 1, state.heading)
        heading = jnp.where(at_top & (state.heading == 1), -1, heading)
        in_warmup = state.i <= self._num_warmup
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
        moves = at_end & (state.i < self._num_warmup) & (rejected[1].min() > 0)
        moves &= self._adapt_ladder
        mean = rejected[0] / jnp.maximum(rejected[1], 1.0)
        new = ladder.equalised(state.temperatures, mean)
        return state._replace(
            temperatures=jnp.where(moves, new, state.temperatures),
            rejected=jnp.where(at_end, 0.0, rejected),
        )

    @property
    def _ladder_ends(self) -> np.ndarray:
        """After which draws of the warmup the rungs move, the last a fresh count."""
        warmup = self._num_warmup
        ends = {warmup // 16, warmup // 8, warmup // 4, warmup // 2, warmup}
        return np.array(sorted(ends - {0}), np.int32)


def _begin(
    kernel: ReplicaExchange, static: Static, content: str | None, *rest: Any
) -> ReplicaExchangeState:
    return kernel._begin(static, *rest)


# for all kernels that are equal, as far as it is known that their models are
_begin_equal = jax.jit(_begin, static_argnums=(0, 1, 2))


class RENHD(ReplicaExchange):
    """Replica-exchange Nosé-Hoover dynamics [1]: :class:`SGNHT` on a ladder.

    Each rung has its own thermostat, which stays with the rung and keeps what it has
    learnt about the noise of the gradients; the paper's pseudo-code resets it before it
    can act. Momenta are drawn anew where positions are swapped.

    :param model: a NumPyro model with a data plate.
    :param temperatures: the ladder, ascending from 1.0; or ``num_replicas`` and
        ``temperature_ratio``, by default the paper's 7 and 1.5.
    :param num_replicas: number of rungs of a geometric ladder.
    :param temperature_ratio: ratio of neighbouring temperatures.
    :param swap: ``"penalty"``, ``"barker"`` (the paper's), ``"exact"`` or a test.
    :param swap_batch: a ``batch.*`` scheme for the rows of swaps.
    :param pairing: ``"even-odd"`` or ``"random"``.
    :param adapt_ladder: move the rungs in warmup to equal rates of rejection.
    :param collect_rungs: whether to collect the draws of all rungs.
    :param mesh: devices among which the rungs are divided.
    :param settings: the arguments of :class:`SGNHT`: ``step_size``, ``friction``,
        ``num_steps`` and so on; ``integrator="euler"`` is the paper's.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), *Replica-exchange
       Nosé-Hoover dynamics for Bayesian learning on large datasets*, NeurIPS.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import RENHD, Target
        >>> target = Target(lambda z: -0.5 * z**2, lambda z, rows: 0.0 * rows * z, 100)
        >>> kernel = RENHD(target=target, batch_size=10, step_size=0.1)
        >>> kernel.settings["temperatures"][:3]
        [1.0, 1.5, 2.25]
    """

    _rung: type[SGMCMC] = SGNHT

    def __init__(
        self,
        model: Any = None,
        *,
        temperatures: Sequence[float] | None = None,
        num_replicas: int | None = None,
        temperature_ratio: float | None = None,
        swap: Literal["penalty", "barker", "exact"] | AcceptanceTest = "penalty",
        swap_batch: Scheme | None = None,
        pairing: Literal["even-odd", "random"] = "even-odd",
        adapt_ladder: bool = False,
        collect_rungs: bool = False,
        mesh: Mesh | None = None,
        **settings: Any,
    ) -> None:
        if temperatures is None:
            num_replicas = 7 if num_replicas is None else num_replicas
            temperature_ratio = 1.5 if temperature_ratio is None else temperature_ratio
        super().__init__(
            self._rung(model, **settings),
            temperatures=temperatures,
            num_replicas=num_replicas,
            temperature_ratio=temperature_ratio,
            swap=swap,
            swap_batch=swap_batch,
            pairing=pairing,
            adapt_ladder=adapt_ladder,
            collect_rungs=collect_rungs,
            mesh=mesh,
        )


class RELD(RENHD):
    """Replica-exchange Langevin dynamics: :class:`SGHMC` on a ladder.

    What [1] compares with, at the friction that each temperature asks for: the one
    printed there, ``0.999 + c / T``, gives every rung a temperature below 0.1.

    :param model: a NumPyro model with a data plate.
    :param settings: the arguments of :class:`RENHD`, with those of :class:`SGHMC` for
        those of :class:`SGNHT`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), *Replica-exchange
       Nosé-Hoover dynamics for Bayesian learning on large datasets*, NeurIPS.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import RELD, Target
        >>> target = Target(lambda z: -0.5 * z**2, lambda z, rows: 0.0 * rows * z, 100)
        >>> kernel = RELD(target=target, batch_size=10, step_size=0.1, num_replicas=3)
        >>> kernel.settings["inner"]
        'SGHMC'
    """

    _rung = SGHMC


def _checked_inner(name: str, inner: Any, temper_prior: bool | None) -> MinibatchKernel:
    if temper_prior is not None:
        check_flag(name, "temper_prior", temper_prior)
    if not isinstance(inner, MinibatchKernel):
        return NumPyroKernel(inner, bool(temper_prior), name)
    exponent = getattr(inner, "_exponent", None)
    if inner._temperature != 1.0 or exponent:
        given = f"{exponent[0]}={exponent[1]:g}" if exponent else inner._temperature
        raise ValueError(
            f"{name}(inner) sets the temperature of its inner kernel, which must be 1, "
            f"got {given}. Leave it out; for MINT write MINT(model, temperature=1.0)."
        )
    if temper_prior not in (None, inner._temper_prior):
        raise ValueError(
            f"{name}(temper_prior={temper_prior}) got an inner kernel with "
            f"temper_prior={inner._temper_prior}. Write it there only: "
            f"{type(inner).__name__}(model, temper_prior={temper_prior})."
        )
    inner._check_ladder(name)
    return inner


def _check_prior_rung(
    name: str, inner: MinibatchKernel, temperatures: tuple[float, ...]
) -> None:
    if not math.isinf(temperatures[-1]):
        return
    if inner._temper_prior:
        raise ValueError(
            f"{name}(temperatures=[..., inf]) makes draws of the prior at the hottest "
            "rung, and with temper_prior=True the prior is tempered, too: nothing "
            "would be left to draw from. Leave temper_prior out, or end the ladder at "
            "a finite temperature."
        )
    if inner.model is None:
        raise ValueError(
            f"{name}(temperatures=[..., inf]) makes draws of the prior at the hottest "
            "rung, and a target written by hand has nothing that draws from it. Write "
            "a NumPyro model, or end the ladder at a finite temperature."
        )


def _ladder(name: str, temperatures: Any, number: Any, ratio: Any) -> tuple[float, ...]:
    if temperatures is not None:
        if number is not None or ratio is not None:
            raise ValueError(
                f"{name} takes temperatures=, or num_replicas= with "
                "temperature_ratio=, got both."
            )
        return ladder.checked(name, temperatures)
    if number is None or ratio is None:
        raise ValueError(
            f"{name} needs a ladder: write temperatures=[1.0, 2.0, 4.0], or "
            "num_replicas=7, temperature_ratio=1.5."
        )
    check_count(name, "num_replicas", number)
    check_positive(name, "temperature_ratio", ratio)
    return ladder.checked(name, ladder.geometric(number, ratio))


def _swap_test(name: str, swap: Any) -> tuple[AcceptanceTest, bool]:
    if isinstance(swap, str) and swap in ("penalty", "barker", "exact"):
        test = accept.compensated_barker() if swap == "barker" else accept.penalty()
        return test, swap == "exact"
    if isinstance(swap, SequentialTest) or not isinstance(swap, AcceptanceTest):
        raise TypeError(
            f'{name}(swap=...) must be "penalty", "barker", "exact" or a test such as '
            f"accept.penalty(), got {describe(swap)}."
        )
    return swap, False
