"""The interface to NumPyro's driver: a draw of one chain or of several chains."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import find_stack_level

from numpyro_minibatch._internal.frames import running
from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch._internal.static import Given
from numpyro_minibatch._internal.threads import compilers
from numpyro_minibatch.kernels._shared.identity import ByValue
from numpyro_minibatch.target import Target

__all__ = ["DrivenKernel", "compile_around_loop", "over_chains", "warn_of_constants"]

_SMALL = 2**24  # bytes of an array of draws that can be made twice
_ROUNDING = 1e-3  # relative error of a surrogate in single precision
_LARGE = 2**28  # bytes of data above which compiling them into the program is slow


class DrivenKernel(ByValue, MCMCKernel):
    """A kernel that ``numpyro.infer.MCMC`` and :func:`sample` can run.

    A subclass makes the target from the model's arguments (:meth:`make_target`) and one
    draw of one chain (:meth:`transition`). Its ``init`` sets ``_run.vectorized``,
    whether states have an axis of chains.
    """

    @property
    def sample_field(self) -> str:
        """The field of the state that holds the unconstrained position."""
        return "z"

    @property
    def _sample_fn(self) -> Callable | None:
        # NumPyro's driver reads this in each run that goes on from a state, even where
        # it has compiled the step, and initialises a kernel again if it is None
        if self._run.vectorized is None:
            return None
        driver = running(MCMC)
        if driver is not None:
            self._check_state(driver)
            self._check_data(driver._args, driver._kwargs)
        return (
            partial(over_chains, self.transition)
            if self._run.vectorized
            else self.transition
        )

    @property
    def data(self) -> Given | None:
        """The data that the states belong to, once the kernel has been started."""
        return None

    def compiles_for_data(self) -> None:
        """Note that a program is being compiled that takes the data as arguments."""

    @abstractmethod
    def make_target(self, args: tuple, kwargs: Mapping[str, Any]) -> Target:
        """The target of the model with these arguments.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """

    @abstractmethod
    def transition(self, target: Target, state: Any) -> Any:
        """One draw of one chain.

        :param target: the target.
        :param state: the state of the chain.
        :return: the state after the draw, with ``i`` one larger.
        """

    @property
    def in_full_precision(self) -> bool:
        """Whether a step multiplies matrices in full precision.

        Steps that compare log densities need it; gradients of minibatches do not.
        """
        return True

    def sample(self, state, model_args, model_kwargs):  # type: ignore[no-untyped-def]
        """One draw from the current state.

        :param state: the state of a chain, or of vectorised chains.
        :param model_args: positional arguments of the model.
        :param model_kwargs: keyword arguments of the model.
        :return: the state after the draw.
        :raises ValueError: the data are not those of the state.
        """
        step = self._sample_fn
        assert step is not None
        self._check_data(model_args, model_kwargs or {})
        warn_of_constants(type(self).__name__, state, (model_args, model_kwargs))
        data = jax.tree.leaves((model_args, model_kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in data):
            self.compiles_for_data()
        if self.in_full_precision:
            step = full_precision(step)
        return step(self.make_target(model_args, model_kwargs or {}), state)

    def _started(self, state: Any, vectorized: bool, data: Given | None = None) -> None:
        """Note what ``init`` has made.

        :param state: the first state.
        :param vectorized: whether it has an axis of chains.
        :param data: the data that it belongs to.
        """
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        if self._run.plan is not None:  # a control variate follows from the data
            like = like._replace(surrogate=state.surrogate)
        self._learn(vectorized=vectorized, state=like, data=data)
        driver = running(MCMC)
        if driver is not None and driver.sampler is self:
            self._check_state(driver)

    def _check_state(self, driver: MCMC) -> None:
        """Raise if NumPyro's driver goes on from a state of another kernel."""
        given, own = driver.post_warmup_state, self._run.state
        if given is None or own is None:
            return
        remedy = "Write mcmc.post_warmup_state = None, for a run with its own warmup."
        who = type(self).__name__
        if type(given) is not type(own):
            raise ValueError(
                f"{who}: mcmc.post_warmup_state is a {type(given).__name__}, the state "
                f"of another kernel; the states of this one are {type(own).__name__}. "
                f"{remedy}"
            )
        # other methods than "vectorized" map a kernel of one chain over the chains
        chains = (
            ()
            if self._run.vectorized or driver.num_chains == 1
            else (driver.num_chains,)
        )
        here, there = given._replace(rng_key=()), own._replace(rng_key=())
        if jnp.shape(here.i) != (*chains, *there.i.shape):
            raise ValueError(
                f"{who}: mcmc.post_warmup_state is that of num_chains="
                f"{math.prod(jnp.shape(here.i))}, and the driver has num_chains="
                f"{driver.num_chains}. {remedy}"
            )
        if _shapes(here) != {n: (*chains, *x) for n, x in _shapes(there).items()}:
            raise ValueError(
                f"{who}: mcmc.post_warmup_state was made with other settings, data or "
                f"for another model. {remedy}"
            )
        if self._run.plan is not None and not _close(here.surrogate, there.surrogate):
            raise ValueError(
                f"{who}: mcmc.post_warmup_state was made for other data: its control "
                f"variate differs from that of these data. {remedy}"
            )

    def _check_data(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raise if a state would go on with other data than its own.

        A state holds what was found of its data: a surrogate, log likelihoods, scales.
        NumPyro's driver starts from a state that it has without calling ``init``.
        """
        other = "" if self.data is None else self.data.difference(args, kwargs)
        if other:
            raise ValueError(
                f"{type(self).__name__}: the state to start from, such as "
                f"mcmc.post_warmup_state, was made for other data: {other}. Write "
                "mcmc.post_warmup_state = None, or make a new MCMC; then "
                "init_params=mcmc.last_state.z starts at the last draw."
            )


def _shapes(state: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of a state, by their places."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def _close(given: Any, own: Any) -> bool:
    """Whether surrogates agree, except for the rounding of sums over all rows.

    :param given: a surrogate, possibly with an axis of chains.
    :param own: another one, of the same structure.
    """
    leaves = jax.tree.leaves(given), jax.tree.leaves(own)
    for one, other in zip(*leaves, strict=True):
        if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
            continue
        x, y = np.asarray(one), np.asarray(other)
        atol = _ROUNDING * np.abs(y[np.isfinite(y)]).max(initial=0.0)
        if not np.allclose(x, y, rtol=0.0, atol=atol, equal_nan=True):
            return False
    return True


def compile_around_loop(fields: Any, vectorized: bool) -> None:
    """Compile on another thread what NumPyro's driver evaluates around its loop.

    Before the loop it makes arrays for the draws, after it it exchanges the axes of
    draws and chains, an operation at a time: about ten small programs, for which the
    user would wait.

    :param fields: shapes of the fields of the state that are collected.
    :param vectorized: whether they have an axis of chains.
    """
    driver = running(MCMC)
    if driver is None:
        return
    size = driver.num_samples // driver.thinning
    distinct = {(x.shape, x.dtype) for x in jax.tree.leaves(fields)}

    def compile_(shape: tuple[int, ...], dtype: Any) -> None:
        one = jax.device_put(np.zeros(shape, dtype))
        # as in `numpyro.util.fori_collect`
        draws = jnp.zeros((size, *one.shape), dtype=one.dtype) * one[None, ...]
        # as in `MCMC.run` and `MCMC.get_samples`
        chains = jnp.swapaxes(draws, 0, 1) if vectorized else draws[jnp.newaxis, ...]
        jnp.reshape(chains, (-1, *chains.shape[2:]))

    for shape, dtype in distinct:
        if size * math.prod(shape) * dtype.itemsize <= _SMALL:
            compilers().submit(compile_, shape, dtype)


def warn_of_constants(who: str, state: Any, args: Any) -> None:
    """Warn if large data are about to be compiled into the program.

    :param who: the kernel's name.
    :param state: the kernel's state.
    :param args: the model's arguments.
    """
    if getattr(jax.config, "jax_use_simplified_jaxpr_constants", False):
        return  # then JAX passes constants as arguments
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        return
    size = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(args)
        if isinstance(leaf, np.ndarray | Array)
        and not isinstance(leaf, jax.core.Tracer)
    )
    if size > _LARGE:
        warnings.warn(
            f"{who}: {size / 1e6:.0f} MB of data are compiled into the program as "
            "constants, which takes several times their memory and slows compilation. "
            "Set JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1 before JAX is imported, or pass "
            "MCMC(..., jit_model_args=True, progress_bar=False), to pass them as "
            "arguments.",
            UserWarning,
            stacklevel=find_stack_level(),
        )


def over_chains(transition: Callable, target: Target, state: Any) -> Any:
    """One draw of several chains, which share their iteration count.

    :param transition: from a target and a chain's state to its next state.
    :param target: the target.
    :param state: the states, stacked.
    """
    # an unbatched count keeps `cond(i < num_warmup, ...)` a branch: batched, it would
    # run the adaptation at every draw; the chains share one surrogate
    fields = state._fields
    shared = ("i", "surrogate")
    axes = type(state)(*[None if name in shared else 0 for name in fields])
    count, surrogate = state.i, state.surrogate

    def move(state: Any) -> Any:
        return transition(target, state)._replace(surrogate=())

    moved = jax.vmap(move, in_axes=(axes,), out_axes=axes._replace(surrogate=None))(
        state._replace(i=count[0])
    )
    return moved._replace(i=jnp.broadcast_to(moved.i, count.shape), surrogate=surrogate)
