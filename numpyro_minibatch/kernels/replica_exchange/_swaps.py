"""Swaps of neighbouring rungs: the rows that they read, and their acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch import accept, batch, ladder
from numpyro_minibatch._internal.checks import describe
from numpyro_minibatch.accept import AcceptanceTest, SequentialTest
from numpyro_minibatch.batch import FullBatch, Scheme, Weighted
from numpyro_minibatch.estimate import Comparison, Reader, Shared, Weights

__all__ = ["SwapPass", "Swapping"]


class SwapPass(NamedTuple):
    """The results of a pass of swaps, for ``R`` rungs.

    - **source** - the rung from which each rung has its position, ``(R,)``.
    - **accept_prob** - acceptance probability of each pair's swap, ``(R - 1,)``; NaN
      for pairs that were not tried.
    - **variance** - estimated variance of the log ratio of each swap.
    - **reliable** - share of the swaps whose noise was inside the test's domain.
    - **log_likelihood** - estimated log density of the tempered part before the swaps,
      ``(R,)``.
    - **num_rows** - rows read.
    """

    source: Array
    accept_prob: Array
    variance: Array
    reliable: Array
    log_likelihood: Array
    num_rows: Array


@dataclass(frozen=True)
class Swapping:
    """The rules by which neighbouring rungs swap positions.

    :param test: the acceptance test.
    :param exact: whether swaps read all rows.
    :param batch: the scheme that draws their rows; ``None`` for that of the inner
        kernel.
    :param pairing: ``"even-odd"`` or ``"random"``.
    """

    test: AcceptanceTest
    exact: bool
    batch: Scheme | None
    pairing: str

    @classmethod
    def of(
        cls, name: str, swap: Any, swap_batch: Any, pairing: Any, inner: Any
    ) -> Swapping:
        """Check the arguments of a kernel.

        :param name: the kernel's name, for errors.
        :param swap: a name or an acceptance test.
        :param swap_batch: a scheme or ``None``.
        :param pairing: a name.
        :param inner: the kernel inside.
        """
        test, exact = _swap_test(name, swap)
        if swap_batch is not None and (
            not isinstance(swap_batch, Scheme) or isinstance(swap_batch, Weighted)
        ):
            raise TypeError(
                f"{name}(swap_batch=...) must be one of the batch.* schemes that draw "
                "rows uniformly, such as batch.growing(500), got "
                f"{describe(swap_batch)}."
            )
        if swap_batch is not None and exact:
            raise ValueError(
                f'{name}(swap="exact") reads all rows and does not take '
                f"swap_batch={swap_batch!r}. Leave one of them out."
            )
        weighs = inner.control_variate is not None
        if swap_batch is not None and weighs:
            raise ValueError(
                f"{name}(swap_batch={swap_batch!r}): with a control variate swaps read "
                "rows by importance, as the inner kernel does. Leave swap_batch out."
            )
        if (
            swap_batch is None
            and not (exact or weighs)
            and not isinstance(inner.batch, FullBatch)
        ):
            # noise that is small enough for a gradient may be far too large for a swap
            swap_batch = batch.growing()
        if pairing not in ("even-odd", "random"):
            raise ValueError(
                f'{name}(pairing=...) must be "even-odd" or "random", got '
                f"{describe(pairing)}."
            )
        return cls(test, exact, swap_batch, pairing)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of swaps, for records."""
        return {
            "swap": "exact" if self.exact else repr(self.test),
            "swap_batch": repr(self.batch),
            "pairing": self.pairing,
        }

    def reader(self, reader: Reader, temper_prior: bool) -> Reader:
        """The rows of swaps, and the weights of the tempered part.

        :param reader: the rows of the inner kernel.
        :param temper_prior: whether the prior is tempered.
        """
        tempered = 1.0 if temper_prior else 0.0
        reader = reader._replace(weights=Weights(tempered, 1.0, 0.0))
        if self.exact:
            return reader.everything(jnp.array(True))
        if self.batch is not None:
            scheme = self.batch.fitted(reader.scheme.widths, reader.plates)
            reader = reader._replace(scheme=scheme, designs=None)
        return reader

    def decide(
        self, reader: Reader, state: Any, row_key: Array, keys: dict[str, Array]
    ) -> SwapPass:
        """Accept or reject the swaps of every second pair of neighbours.

        :param reader: the rows of swaps.
        :param state: the state of the ladder.
        :param row_key: PRNG key of the rows.
        :param keys: keys of the pairing, ``"parity"``, and of decisions, ``"accept"``.
        """
        number = len(state.temperatures)
        parity = state.i % 2
        if self.pairing == "random":
            parity = jax.random.bernoulli(keys["parity"]).astype(jnp.int32)
        lower, upper, exists = ladder.pairs(number, parity)
        flat = jax.vmap(lambda z: ravel_pytree(z)[0])(state.replicas.z)
        inverse = 1.0 / state.temperatures

        def decide(j: Array, k: Array, keys: tuple[Array, Array]) -> Any:
            rows, decision = keys
            gap = inverse[j] - inverse[k]
            # the largest variance of the difference that the test tolerates
            limit = self.test.max_variance / jnp.square(gap)
            seen: Comparison = Shared().compare(
                reader, rows, flat[j], flat[k], (), limit
            )
            log_ratio = gap * seen.log_ratio
            return seen, log_ratio, self.test(decision, log_ratio)

        each = [jax.random.split(key, len(lower)) for key in (row_key, keys["accept"])]
        seen, log_ratio, decision = jax.vmap(decide)(lower, upper, (each[0], each[1]))
        accepted = decision.accept & exists
        rungs = jnp.arange(number, dtype=jnp.int32)
        # indices of pairs that do not exist are out of range and dropped
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
        return SwapPass(
            source=source,
            accept_prob=none.at[at_lower].set(decision.accept_prob, mode="drop"),
            variance=none.at[at_lower].set(log_ratio.variance, mode="drop"),
            # NaN if no pair was tried
            reliable=(decision.reliable & exists).sum() / exists.sum(),
            log_likelihood=energies,
            num_rows=jnp.where(exists, seen.num_rows, 0).sum(),
        )


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
