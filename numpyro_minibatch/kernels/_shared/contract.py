"""Types for authors of kernels: the start, a ready-made state, and protocols.

:class:`~numpyro_minibatch.kernels.MinibatchKernel` is the contract itself. The
protocols here describe abilities that only some kernels have or need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_minibatch.estimate import Reader
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.target import Target

__all__ = [
    "Approximated",
    "InPieces",
    "KernelState",
    "NoiseDriven",
    "Pieces",
    "Start",
    "Tempered",
]


class Start(NamedTuple):
    """The start of a chain, which :meth:`MinibatchKernel.first_state` receives.

    :param reader: the target's rows, read as the kernel's batches are.
    :param z: unconstrained values of the latent sites.
    :param flat: the same as one vector, ``(D,)``.
    :param key: PRNG key of the chain.
    :param surrogate: with a control variate, the surrogate; otherwise empty.
    """

    reader: Reader
    z: Any
    flat: Array
    key: Array
    surrogate: Any


@with_named_items
class KernelState(NamedTuple):
    """A state for kernels that need no fields of their own.

    A kernel with its own ``NamedTuple`` uses the same names. Every kernel has ``i``,
    ``z``, ``rng_key`` and ``surrogate``, and :class:`ReplicaExchange` also reads
    ``diverging``, ``step_size``, ``lp_estimate`` and ``num_rows``.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - key of the draws to come.
    - **index_key** - key of the rows; step ``t`` reads those of ``fold_in(index_key,
      t)``.
    - **surrogate** - with a control variate, the surrogate; the kernel passes it on.
    - **memory** - anything else that the kernel keeps from one draw to the next.
    - **accept_prob** - acceptance probability of the draw.
    - **diverging** - whether the log density at ``z`` is not finite.
    - **step_size** - step size of the draw.
    - **lp_estimate** - estimate of the target's log density at ``z``.
    - **num_rows** - rows of data read to make the draw.
    """

    i: Array
    z: Any
    rng_key: Array
    index_key: Array
    surrogate: Any
    memory: Any
    accept_prob: Array
    diverging: Array
    step_size: Array
    lp_estimate: Array
    num_rows: Array

    @classmethod
    def first(cls, start: Start, memory: Any = ()) -> KernelState:
        """The state of a chain that has made no draws.

        :param start: where it starts.
        :param memory: anything else that the kernel keeps.
        """
        rng_key, index_key = jax.random.split(start.key)
        zero = jnp.zeros((), start.flat.dtype)
        return cls(
            i=jnp.int32(0),
            z=start.z,
            rng_key=rng_key,
            index_key=index_key,
            surrogate=(),
            memory=memory,
            accept_prob=zero,
            diverging=jnp.array(False),
            step_size=zero,
            lp_estimate=zero,
            num_rows=jnp.int32(0),
        )


class Measurement(Protocol):
    """The measurement of an approximation's error."""

    def ahead(self, draws: Mapping[str, Any], model: Any) -> None:
        """Compile the programs of a measurement on other threads.

        :param draws: constrained values of the parameters, along a first axis; only
            their shapes and precisions matter.
        :param model: the model, or a better one.
        """
        ...

    def __call__(self, draws: Mapping[str, Any], model: Any) -> dict[str, float]:
        """The error of the approximation, numbers by name.

        :param draws: constrained values of the parameters, along a first axis.
        :param model: the model, or a better one.
        :raises ValueError: it is not good enough, and :meth:`Approximated.refined` has
            no better one.
        """
        ...


@runtime_checkable
class Approximated(Protocol):
    """A model whose log likelihood is an approximation with a measurable error.

    :func:`~numpyro_minibatch.marginalize` returns one.
    """

    def approximation_advice(self, args: tuple, kwargs: Mapping[str, Any]) -> str:
        """Advice for a failed set-up, which a coarse approximation can cause.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        ...

    def finer(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The model to try next if the search for its mode does not converge.

        It is ``None`` if the user chose the approximation, or if there is none.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        ...

    def approximation(self, args: tuple, kwargs: Mapping[str, Any]) -> Measurement:
        """The measurement of the approximation's error, for set-ups.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        ...

    def refined(self, report: Mapping[str, float], late: bool = False) -> Any:
        """The model with a better approximation, if it needs and has one.

        The set-up goes on with it. It is ``None`` if the user chose the
        approximation.

        :param report: what :meth:`approximation` measured.
        :param late: whether a set-up is complete, so that it would have to be repeated.
        """
        ...

    def settled(self, report: Mapping[str, float]) -> bool:
        """Whether an error is so small that it need not be measured again nearby.

        :param report: what :meth:`approximation` measured; empty for nothing.
        """
        ...


@runtime_checkable
class Tempered(Protocol):
    """A kernel that can be a rung of a ladder of temperatures.

    :class:`MinibatchKernel` has all of it; a kernel whose state holds something that
    depends on the temperature overrides :meth:`arrive`.
    """

    def check_rung(self, who: str) -> None:
        """Raise if the kernel cannot be a rung.

        :param who: the name of the kernel that asks, for the message.
        :raises ValueError: it has a temperature of its own, or its positions are not
            valid at another one.
        """

    def with_temperature(self, temperature: Any) -> Self:
        """The same kernel at another temperature.

        :param temperature: the temperature; it may be traced.
        """

    def arrive(self, target: Target, here: Any, there: Any, key: Array) -> Any:
        """The state of a rung after it received the position of another.

        :param target: the target.
        :param here: the rung's own state, with the surrogate.
        :param there: the state that the position comes from.
        :param key: PRNG key.
        """

    def arrival_rows(self, reader: Reader) -> int:
        """The number of rows that :meth:`arrive` reads.

        :param reader: the target's rows.
        """


class Pieces(NamedTuple):
    """Sums over the pieces of a draw.

    - **number** - the number of pieces; empty until the last.
    - **num_rows** - rows read by all pieces.
    - **diverging** - whether any piece diverged.
    - **accept_prob** - sum of their acceptance probabilities, if they have any.
    - **reliable** - sum of their ``reliable``.
    """

    number: Any
    num_rows: Array
    diverging: Array
    accept_prob: Array
    reliable: Array

    def plus(self, moved: Any) -> Pieces:
        """The sums with one more piece.

        :param moved: the state after it.
        """
        rate = getattr(moved, "accept_prob", self.accept_prob)
        reliable = getattr(moved, "reliable", self.reliable)
        return self._replace(
            num_rows=self.num_rows + moved.num_rows.astype(self.num_rows.dtype),
            diverging=self.diverging | moved.diverging,
            accept_prob=self.accept_prob + rate,
            reliable=self.reliable + reliable,
        )


@runtime_checkable
class InPieces(Protocol):
    """A kernel whose draws can be made in pieces, as :class:`Cyclical` makes them.

    A draw of a cycle is a loop of pieces of ``num_steps`` steps, with step sizes that
    depend on the number of steps made. :class:`SGMCMC` and :class:`MinibatchMH` have
    all of it.
    """

    @property
    def num_steps(self) -> int:
        """Steps of a draw."""

    @property
    def keeps_target(self) -> bool:
        """Whether an accept/reject step preserves the target at any step size.

        If so, the kernel adapts in warmup, and its cycles begin afterwards. If not, it
        is :class:`NoiseDriven`, and its cycles begin at once.
        """

    @property
    def step_size_order(self) -> int:
        """The power of the step size that multiplies a gradient: 2 with momentum."""

    def with_num_steps(self, num_steps: int) -> Self:
        """The same kernel with draws of another number of steps.

        :param num_steps: steps of a draw.
        """

    def with_step_schedule(self, factor: Callable[[Array], Any]) -> Self:
        """The same kernel with step sizes that change with the number of steps.

        :param factor: from the number of a step to the factor on its step size.
        """

    def most_rows(self) -> int:
        """A bound on the rows that one step reads."""

    def advance(self, target: Target, state: Any) -> tuple[Any, Array | None]:
        """The steps of a draw, without the measurements made once per draw.

        :param target: the target.
        :param state: the state before the steps.
        :return: the state after them, and a key for the measurements.
        """

    def completed(
        self,
        target: Target,
        state: Any,
        pieces: Pieces,
        key: Array,
        i: Array,
        num_warmup: int,
    ) -> Any:
        """The state after the last piece of a draw, which reports the draw as a whole.

        :param target: the target.
        :param state: the state after the last piece, with the surrogate.
        :param pieces: the sums over all pieces.
        :param key: the key that :meth:`advance` returned last, for the measurements.
        :param i: draws made before.
        :param num_warmup: number of warmup draws.
        """


@runtime_checkable
class NoiseDriven(InPieces, Protocol):
    """A kernel in pieces that moves by gradients and noise, as :class:`SGMCMC` does."""

    def with_noise_temperature(self, temperature: Any) -> Self:
        """The same kernel for the same target, with noise of another temperature.

        :param temperature: 0 makes it gradient descent; it may be traced.
        """

    def refreshed(self, key: Array, state: Any, temperature: Any) -> Any:
        """The state's ``memory`` with a new momentum, at equilibrium.

        :param key: PRNG key.
        :param state: the state.
        :param temperature: the temperature of the equilibrium.
        """
