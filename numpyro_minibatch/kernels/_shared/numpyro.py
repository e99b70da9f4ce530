"""NumPyro's kernels as rungs of a ladder, on all data and at any temperature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import HMC, BarkerMH
from numpyro.infer.mcmc import MCMCKernel

from numpyro_minibatch import batch
from numpyro_minibatch._internal.checks import describe
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch.estimate import Reader
from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.contract import Start
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.target import Target

__all__ = ["NumPyroKernel", "NumPyroState"]


@with_named_items
class NumPyroState(NamedTuple):
    """The state of a chain of :class:`NumPyroKernel`.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - the inner kernel has its own; this one is for the driver.
    - **surrogate** - empty.
    - **inner** - the state of NumPyro's kernel.
    - **accept_prob** - mean acceptance probability of the draw's proposals.
    - **num_steps** - gradients taken to make the draw.
    - **step_size** - step size.
    - **diverging** - whether the draw's trajectory diverged.
    - **lp_estimate** - the target's log density, without noise.
    - **num_rows** - rows of data read to make the draw.
    """

    i: Array
    z: Any
    rng_key: Array
    surrogate: Any
    inner: Any
    accept_prob: Array
    num_steps: Array
    step_size: Array
    diverging: Array
    lp_estimate: Array
    num_rows: Array


class NumPyroKernel(MinibatchKernel):
    """One of NumPyro's gradient-based kernels, on all rows, at a temperature.

    :class:`ReplicaExchange` wraps a NumPyro kernel in it.

    :param kernel: a ``NUTS``, ``HMC`` or ``BarkerMH`` with a model.
    :param temper_prior: whether the prior has the temperature of the likelihood.
    :param who: the name of the kernel that asks, for the messages.
    :raises TypeError: it is another kernel.
    :raises ValueError: it has no model.
    """

    def __init__(
        self, kernel: MCMCKernel, temper_prior: bool = False, who: str = "NumPyroKernel"
    ) -> None:
        if not isinstance(kernel, HMC | BarkerMH):
            raise TypeError(
                f"{who}(inner) must be a kernel of numpyro_minibatch, such as "
                "MinibatchMH(model) or SGHMC(model, step_size=1e-3), or NumPyro's "
                f"NUTS, HMC or BarkerMH, got {describe(kernel)}."
            )
        if kernel.model is None:
            raise ValueError(
                f"{who}(inner) got a {type(kernel).__name__} with a potential_fn, in "
                "which the likelihood, the prior and the maps to the unconstrained "
                "coordinates cannot be separated. Write "
                f"{type(kernel).__name__}(model)."
            )
        super().__init__(
            kernel.model,
            batch=batch.full(),
            temper_prior=temper_prior,
            init_strategy=kernel._init_strategy,
        )
        self._kernel = kernel

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that the driver collects."""
        return (
            "z",
            "diverging",
            "accept_prob",
            "num_steps",
            "step_size",
            "lp_estimate",
            "num_rows",
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define the kernel, for records."""
        return {**super().settings, "kernel": type(self._kernel).__name__}

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        who = type(self._kernel).__name__
        self._inspect(
            args,
            kwargs,
            lambda model: inspect_model(
                who, model, args, kwargs, None, full=True, whole=True
            ),
        )
        layout = self.layout
        shapes = zip(layout.latents, layout.shapes, strict=True)
        real = jnp.result_type(float)
        z = {name: jax.ShapeDtypeStruct(shape, real) for name, shape in shapes}
        terms = jax.eval_shape(self.make_target(args, kwargs).terms, z, self._all_rows)
        observed = jax.tree.leaves((terms.likelihood, terms.rows))
        num_rows = sum(part.size for part in observed)
        self._learn(observed_rows=num_rows)
        if not num_rows and not self._temper_prior:
            raise ValueError(
                f"ReplicaExchange({type(self._kernel).__name__}(model)) tempers the "
                "likelihood, but the model has no observed site: a numpyro.factor "
                "counts as part of the prior. Write temper_prior=True, which tempers "
                "everything, or make the likelihood an observed site."
            )

    @property
    def _all_rows(self) -> dict[str, Array]:
        sizes = self.plates.items()
        return {name: jnp.arange(size, dtype=jnp.int32) for name, size in sizes}

    def _potential(self, reader: Reader) -> Callable[[Any], Array]:
        """The potential energy at this temperature, as NumPyro's kernels need it."""

        def potential(z: Any) -> Array:
            terms = reader.evaluate(ravel_pytree(z)[0], self._all_rows)
            rows = sum((x.sum() for x in terms.rows.values()), jnp.zeros(()))
            weights = reader.weights
            return -weights.known(terms) - weights.likelihood * rows

        return potential

    def _bound(self, reader: Reader, z: Any) -> tuple[MCMCKernel, Callable]:
        """NumPyro's kernel for this target, and a function that starts it."""
        # a copy, turned into the kernel that its class makes from a `potential_fn`
        kernel = copy.copy(self._kernel)
        kernel._model, kernel._potential_fn = None, self._potential(reader)
        kernel._init_fn = kernel._sample_fn = None
        if isinstance(kernel, HMC) and isinstance(kernel._dense_mass, bool):
            # as the kernel itself does for a model's sites
            kernel._dense_mass = [tuple(sorted(z))] if kernel._dense_mass else []
        return kernel, lambda key, z: kernel.init(key, self.num_warmup, z, (), {})

    def first_state(self, start: Start) -> NumPyroState:
        """The state of a chain before its first draw."""
        _, init = self._bound(start.reader, start.z)
        key, inner_key = jax.random.split(start.key)
        inner = init(inner_key, start.z)
        return NumPyroState(
            i=jnp.int32(0),
            z=start.z,
            rng_key=key,
            surrogate=(),
            inner=inner,
            accept_prob=jnp.zeros((), start.flat.dtype),
            num_steps=jnp.int32(0),
            step_size=inner.adapt_state.step_size,
            diverging=jnp.array(False),
            lp_estimate=-inner.potential_energy,
            num_rows=jnp.int32(0),
        )

    def arrive(self, target: Target, here: Any, there: Any, key: Array) -> Any:
        """A rung's state with the position of another; see :class:`Tempered`."""
        _, unravel = ravel_pytree(there.z)
        potential = self._potential(self.reader(target, unravel))
        if getattr(self._kernel, "_forward_mode_differentiation", False):
            energy, gradient = potential(there.z), jax.jacfwd(potential)(there.z)
        else:
            energy, gradient = jax.value_and_grad(potential)(there.z)
        inner = here.inner._replace(z=there.z, potential_energy=energy, z_grad=gradient)
        return here._replace(z=there.z, inner=inner)

    def transition(self, target: Target, state: NumPyroState) -> NumPyroState:
        """One draw of one chain."""
        _, unravel = ravel_pytree(state.z)
        kernel, init = self._bound(self.reader(target, unravel), state.z)
        # `init` stores its arguments for `sample` in functions that it creates
        jax.eval_shape(init, state.rng_key, state.z)
        # the shared count, so that its adaptation stays a branch
        inner = kernel.sample(state.inner._replace(i=state.i), (), {})
        steps = jnp.asarray(getattr(inner, "num_steps", 1), jnp.int32)
        return state._replace(
            i=state.i + 1,
            z=inner.z,
            inner=inner,
            accept_prob=inner.accept_prob,
            num_steps=steps,
            step_size=inner.adapt_state.step_size,
            diverging=jnp.asarray(getattr(inner, "diverging", False)),
            lp_estimate=-inner.potential_energy,
            # one more gradient, because a swap may have changed the position
            num_rows=(steps + 1) * self._run.observed_rows,
        )
