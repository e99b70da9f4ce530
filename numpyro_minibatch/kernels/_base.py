"""What every kernel shares: setup, start, vectorised chains, identity, pickling."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import find_stack_level, is_prng_key

from numpyro_minibatch._preflight import (
    Layout,
    explained,
    find_nan,
    inspect_model,
    inspect_target,
)
from numpyro_minibatch.batch import BatchSize, FullBatch, Scheme, without_replacement
from numpyro_minibatch.estimate import Reader, Weights
from numpyro_minibatch.target import ModelTarget, Target

__all__ = ["MinibatchKernel"]

_LARGE = 2**28  # bytes of data above which it matters how they reach the program
_MAX_TRIES = 100  # starting points tried, as many as NumPyro tries


@dataclass(frozen=True, eq=False)
class Static:
    """The part of a model's arguments that is not arrays; a key of compiled functions.

    Leaves without a hash are the same only if they are the same object.

    :param treedef: the structure of ``(args, kwargs)``.
    :param leaves: its leaves, with a mark where an array goes.
    """

    treedef: Any
    leaves: tuple[Any, ...]

    def _key(self) -> tuple[Any, ...]:
        def identify(leaf: Any) -> Any:
            return leaf if isinstance(leaf, Hashable) else id(leaf)

        return self.treedef, *map(identify, self.leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @classmethod
    def split(cls, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Static, list[Any]]:
        """Separate the arrays of a model's arguments from the rest."""
        leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
        is_array = [isinstance(leaf, np.ndarray | Array) for leaf in leaves]
        arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
        rest = [
            _ARRAY if yes else leaf for leaf, yes in zip(leaves, is_array, strict=True)
        ]
        return cls(treedef, tuple(rest)), arrays

    def join(self, arrays: list[Any]) -> tuple[tuple, dict[str, Any]]:
        """Put the arrays back."""
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)


class _ArrayMark:
    def __repr__(self) -> str:
        return "<array>"


_ARRAY = _ArrayMark()


class MinibatchKernel(MCMCKernel):
    """Base class of the kernels: a target read through a batch scheme.

    A concrete kernel says what a state is made of (:meth:`_first_state`) and how one
    chain moves (:meth:`_transition`); everything that NumPyro's driver asks for is
    here.

    :param model: a NumPyro model with a data plate, or ``None``.
    :param target: a :class:`~numpyro_minibatch.Target` written by hand, instead of a
        model; then ``init_params`` must be passed to ``MCMC.run``.
    :param batch_size: rows of a batch, or ``{plate: rows}``; by default each plate's
        own ``subsample_size``.
    :param batch: a ``batch.*`` scheme instead of ``batch_size``.
    :param temperature: temperature ``T > 0`` of the likelihood.
    :param temper_prior: whether the prior has the same temperature.
    :param init_strategy: one of :mod:`numpyro.infer.initialization`.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        target: Target | None = None,
        batch_size: BatchSize | None = None,
        batch: Scheme | None = None,
        temperature: float = 1.0,
        temper_prior: bool = False,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        name = type(self).__name__
        if (model is None) == (target is None):
            raise ValueError(
                f"{name} takes either a model or target=, got "
                f"{'neither' if model is None else 'both'}. Write {name}(model, ...)."
            )
        if model is not None and not callable(model):
            raise TypeError(
                f"{name}(model) must be a function with NumPyro primitives, got "
                f"{type(model).__name__}."
            )
        if target is not None and not isinstance(target, Target):
            raise TypeError(
                f"{name}(target=...) must be a numpyro_minibatch.Target, got "
                f"{type(target).__name__}."
            )
        if isinstance(batch_size, Scheme):
            batch, batch_size = batch_size, None
        if batch is not None and not isinstance(batch, Scheme):
            raise TypeError(
                f"{name}(batch=...) must be one of the numpyro_minibatch.batch "
                "schemes, such as batch.without_replacement(100), got "
                f"{describe(batch)}."
            )
        if batch is not None and batch_size is not None:
            raise ValueError(
                f"{name} got both batch_size={batch_size!r} and batch={batch!r}; "
                "the scheme says the size: pass batch alone."
            )
        check_positive(name, "temperature", temperature)
        check_flag(name, "temper_prior", temper_prior)
        if not callable(init_strategy):
            raise TypeError(
                f"{name}(init_strategy=...) must be one of NumPyro's, such as "
                "init_to_uniform or init_to_value(values=...), got "
                f"{describe(init_strategy)}."
            )
        self._model = model
        self._target = target
        self._scheme = without_replacement(batch_size) if batch is None else batch
        self._temperature = float(temperature)
        self._temper_prior = bool(temper_prior)
        self._init_strategy = init_strategy
        self._num_warmup = 0
        self._layout: Layout | None = None
        self._frozen: dict[str, Any] = {}
        self._sample_fn: Callable | None = None

    # what the driver and the analysis read -----------------------------------------

    @property
    def model(self) -> Callable | None:
        """The NumPyro model."""
        return self._model

    @property
    def sample_field(self) -> str:
        """The field of the state that holds the unconstrained position."""
        return "z"

    @property
    def temperature(self) -> float:
        """The temperature of the likelihood."""
        return self._temperature

    @property
    def plates(self) -> dict[str, int]:
        """The number of rows of each data plate, once the kernel has seen the data."""
        return dict(self._require_layout().plates)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The rows of one draw of each data plate, once the data have been seen."""
        return dict(self._require_layout().widths)

    @property
    def frozen(self) -> dict[str, Any]:
        """Values of the model's ``param`` sites, fixed at setup."""
        return self._frozen

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define what the kernel does, for records."""
        return {
            "batch": repr(self._scheme),
            "temperature": self.temperature,
            "temper_prior": self._temper_prior,
        }

    def _require_layout(self) -> Layout:
        if self._layout is None:
            raise RuntimeError(
                f"{type(self).__name__} has not seen the model's data yet; it does in "
                "MCMC.run."
            )
        return self._layout

    # identity: compiled steps are found again by value -------------------------------

    def _identity(self) -> tuple[Hashable, ...]:
        """Everything the constructor was given, hashable."""
        return (
            self._model,
            self._target,
            self._scheme,
            self._temperature,
            self._temper_prior,
        )

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, MinibatchKernel)
            and self._identity() == other._identity()
            and self._init_strategy == other._init_strategy
            and self._num_warmup == other._num_warmup
            and self._layout == other._layout
        )

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def __getstate__(self) -> dict[str, Any]:
        # the driver initialises a kernel without a _sample_fn again
        return {**self.__dict__, "_sample_fn": None}

    # setup ---------------------------------------------------------------------------

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Check the model and its data, and remember its layout."""
        name = type(self).__name__
        size = self._scheme.size
        sizes = dict(size) if isinstance(size, tuple) else size
        if self._target is not None:
            plates = self._target.plates
            widths = (
                dict.fromkeys(plates, sizes) if not isinstance(sizes, dict) else sizes
            )
            if args or kwargs:
                raise ValueError(
                    f"{name}(target=...) got arguments for a model in MCMC.run, which "
                    "a target written by hand has no use for: its two functions hold "
                    "the data. Call mcmc.run(key, init_params=...)."
                )
            unknown = set(widths) - set(plates)
            if unknown:
                raise ValueError(
                    f"{name} got batch_size for plate {min(unknown)!r}, which the "
                    f"target does not have; its plates are: {', '.join(plates)}."
                )
            if isinstance(self._scheme, FullBatch):
                widths = dict(plates)
            for plate, rows in plates.items():
                width = widths.get(plate)
                if width is None:
                    raise ValueError(
                        f"{name} needs a batch_size for plate {plate!r} of the target, "
                        f"which has {rows} rows: pass for example batch_size="
                        f"{{{plate!r}: {max(2, min(100, rows // 10))}}}."
                    )
                if width > rows:
                    raise ValueError(
                        f"{name} got batch_size={width} for plate {plate!r}, which has "
                        f"only {rows} rows. Use at most {rows}, the full batch."
                    )
            ordered = tuple(sorted(plates.items()))
            bound = tuple((n, widths[n]) for n, _ in ordered)
            self._layout, self._frozen = Layout(ordered, bound, ()), {}
        else:
            assert self._model is not None
            self._layout, self._frozen = inspect_model(
                name,
                self._model,
                args,
                kwargs,
                sizes,
                full=isinstance(self._scheme, FullBatch),
            )

    def _make_target(self, args: tuple, kwargs: Mapping[str, Any]) -> Target:
        if self._target is not None:
            return self._target
        return ModelTarget(
            model=self._model,
            args=args,
            kwargs=kwargs or {},
            sizes=dict(self._require_layout().plates),
            frozen=self._frozen,
        )

    def _reader(self, target: Target, unravel: Callable[[Array], Any]) -> Reader:
        layout = self._require_layout()
        plates = dict(layout.plates)
        weight = 1.0 / self.temperature
        return Reader(
            evaluate=lambda flat, indices: target.terms(unravel(flat), indices),
            plates=plates,
            scheme=self._scheme.bound(dict(layout.widths), plates),
            weights=Weights(weight if self._temper_prior else 1.0, weight),
        )

    # the driver's interface -----------------------------------------------------------

    def init(  # type: ignore[no-untyped-def]
        self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None
    ):
        """Check the model, find a starting point and return the first state.

        :param rng_key: a PRNG key, or one per chain for vectorised chains.
        :param num_warmup: number of warmup draws, during which settings adapt.
        :param init_params: unconstrained starting point, a dict of arrays by site
            (with a leading axis of chains for vectorised chains); by default drawn by
            ``init_strategy``.
        :param model_args: positional arguments of the model.
        :param model_kwargs: keyword arguments of the model.
        :return: the first state.
        :raises ValueError: the model cannot be sampled from minibatches, or its log
            density is not finite at the start.
        """
        kwargs = {} if model_kwargs is None else dict(model_kwargs)
        self._num_warmup = int(num_warmup)
        self._setup(model_args, kwargs)
        static, arrays = Static.split(model_args, kwargs)
        vectorized = not is_prng_key(rng_key)
        self._check_init_params(init_params, (len(rng_key),) if vectorized else ())
        # a copy, because a key of the compiled functions must not change any more
        start = partial(_start_chains, copy.copy(self), static, vectorized)
        with explained(type(self).__name__, model_args, kwargs):
            state, log_density = start(rng_key, init_params, arrays)
        if not isinstance(log_density, jax.core.Tracer):
            self._check_start(state, np.asarray(log_density), model_args, kwargs)
        transition = self._transition
        if vectorized:
            transition = partial(_vectorized, transition)
        self._sample_fn = transition
        return state

    def sample(self, state, model_args, model_kwargs):  # type: ignore[no-untyped-def]
        """One draw from the current state."""
        assert self._sample_fn is not None
        _warn_of_constants(type(self).__name__, state, (model_args, model_kwargs))
        target = self._make_target(model_args, model_kwargs or {})
        return self._sample_fn(target, state)

    def postprocess_fn(self, args, kwargs):  # type: ignore[no-untyped-def]
        """A function from a position to the model's constrained values.

        Deterministic sites are included where they lie outside the data plates.
        """
        if self._target is not None:
            return lambda z: z
        target = self._make_target(args, kwargs or {})
        assert isinstance(target, ModelTarget)
        return target.constrain

    @abstractmethod
    def _first_state(self, reader: Reader, z: Any, flat: Array, key: Array) -> Any:
        """The state of a chain that starts at ``z``."""

    @abstractmethod
    def _transition(self, target: Target, state: Any) -> Any:
        """One draw of one chain."""

    # checks of the starting point ----------------------------------------------------

    def _check_init_params(self, init_params: Any, chains: tuple[int, ...]) -> None:
        """Check a starting point, which has a leading axis of vectorised chains."""
        name, layout = type(self).__name__, self._require_layout()
        if init_params is None:
            if self._target is not None:
                raise ValueError(
                    f"{name}(target=...) cannot choose a starting point: pass "
                    "init_params=... to MCMC.run."
                )
            self._check_init_values()
            return
        if self._target is not None:
            leaves, treedef = jax.tree.flatten(init_params)
            shapes = [jnp.shape(x)[len(chains) :] for x in leaves]
            if not leaves:
                raise ValueError(
                    f"{name}(target=...) got init_params without a number in it: "
                    f"{init_params!r}. Pass a position of the target."
                )
            dtype = jnp.result_type(float)
            z = treedef.unflatten([jax.ShapeDtypeStruct(x, dtype) for x in shapes])
            inspect_target(name, self._target, dict(layout.widths), z)
            return
        shapes = dict(zip(layout.latents, layout.shapes, strict=True))
        if not isinstance(init_params, Mapping) or set(init_params) != set(shapes):
            got = (
                sorted(init_params)
                if isinstance(init_params, Mapping)
                else type(init_params).__name__
            )
            raise ValueError(
                "init_params must be a dict of unconstrained values for the latent "
                f"sites {sorted(shapes)}, got {got}."
            )
        for site, shape in shapes.items():
            value = init_params[site]
            if not isinstance(value, np.ndarray | Array | np.number | float | int):
                raise TypeError(
                    f"init_params[{site!r}] must be an array of shape "
                    f"{chains + shape}, got {type(value).__name__}. Write "
                    "jnp.asarray(...)."
                )
            if jnp.shape(value) != chains + shape:
                per_chain = ", one row per chain" if chains else ""
                raise ValueError(
                    f"init_params[{site!r}] must have shape {chains + shape}, that of "
                    f"the unconstrained value of the site{per_chain}, got shape "
                    f"{jnp.shape(value)}."
                )

    def _check_init_values(self) -> None:
        """Check what init_to_value was given."""
        values = getattr(self._init_strategy, "keywords", {}).get("values")
        if not isinstance(values, Mapping):
            return
        layout = self._require_layout()
        for site, shape in zip(layout.latents, layout.value_shapes, strict=True):
            if site in values and jnp.shape(values[site]) != shape:
                raise ValueError(
                    f"init_to_value(values=...) must give site {site!r} a value of "
                    f"shape {shape}, got shape {jnp.shape(values[site])}."
                )

    def _check_start(
        self, state: Any, log_density: np.ndarray, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self._check_position(state.z)
        nan = find_nan((args, kwargs))
        finite = np.isfinite(log_density).all()
        if finite and not nan:
            return
        z = state.z
        if np.ndim(log_density):
            chain = int(np.isfinite(log_density).argmin())
            z = jax.tree.map(lambda x: x[chain], z)
        bad = self._non_finite_rows(z, args, kwargs)
        if bad:
            where = "; ".join(f"plate {p!r}, rows {rows}" for p, rows in bad.items())
            cause = f" The arguments contain NaN ({'; '.join(nan)})." if nan else ""
            raise ValueError(
                f"{type(self).__name__}: the log likelihood is not finite at the "
                f"starting point for some rows ({where}).{cause} Drop or mask those "
                "rows (numpyro.handlers.mask), or start elsewhere with "
                "init_strategy=init_to_value(values=...)."
            )
        if not finite:
            raise ValueError(
                f"{type(self).__name__}: the log density is not finite at the start, "
                f"after {_MAX_TRIES} tries: the log prior is not. Start from "
                "values that the model allows, "
                "init_strategy=init_to_value(values=...), or check the priors."
            )

    def _check_position(self, z: Any) -> None:
        for path, value in jax.tree_util.tree_leaves_with_path(z):
            if not np.isfinite(np.asarray(value)).all():
                raise ValueError(
                    f"{type(self).__name__}: the starting point has values that are "
                    f"not finite when unconstrained, at z{jax.tree_util.keystr(path)}: "
                    "init_params must be finite, and init_to_value must give each site "
                    "a value inside its support, not on its border."
                )

    def _non_finite_rows(
        self, z: Any, args: tuple, kwargs: dict[str, Any]
    ) -> dict[str, list[int]]:
        """The first rows of each plate whose log likelihood is not finite."""
        target = self._make_target(args, kwargs)
        plates = dict(self._require_layout().plates)
        start = {
            name: jnp.zeros(min(2, size), jnp.int32) for name, size in plates.items()
        }
        rows_fn = jax.jit(lambda z, indices: target.terms(z, indices).rows)
        bad: dict[str, list[int]] = {}
        for name, size in plates.items():
            chunk = min(size, 65_536)
            for first in range(0, size, chunk):
                positions = np.minimum(np.arange(first, first + chunk), size - 1)
                rows = rows_fn(z, {**start, name: jnp.asarray(positions, jnp.int32)})
                wrong = positions[~np.isfinite(np.asarray(rows[name]))]
                if wrong.size:
                    bad[name] = sorted({int(row) for row in wrong[:5]})
                    break
        return bad


def describe(value: Any) -> str:
    """A value as a message shows it: arrays by shape, anything else in short."""
    if np.ndim(value) and hasattr(value, "dtype"):
        return f"an array of shape {np.shape(value)} and dtype {value.dtype}"
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def check_flag(who: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is true or false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{who}({name}=...) must be True or False, got {describe(value)}."
        )


def check_positive(who: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(
            f"{who}({name}=...) must be a positive number, got {describe(value)} "
            f"({type(value).__name__})."
        )
    if not (np.isfinite(value) and value > 0):
        raise ValueError(
            f"{who}({name}=...) must be positive and finite, got {value!r}."
        )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _start_chains(
    kernel: MinibatchKernel,
    static: Static,
    vectorized: bool,
    key: Array,
    init: Any,
    arrays: list[Any],
) -> tuple[Any, Array]:
    """The first states; compiled once for equal kernels and shapes."""
    start = partial(_start, kernel, static)
    if vectorized:
        start = jax.vmap(start, in_axes=(0, None if init is None else 0, None))
    return start(key, init, arrays)


def _start(
    kernel: MinibatchKernel, static: Static, key: Array, init: Any, arrays: list[Any]
) -> tuple[Any, Array]:
    """The first state of one chain, and its log density."""
    args, kwargs = static.join(arrays)
    target = kernel._make_target(args, kwargs)
    key, init_key = jax.random.split(key)
    # enough rows, evenly spread, to see that the likelihood is finite here
    rows = {
        name: jnp.asarray(np.linspace(0, size - 1, min(size, 1000)), jnp.int32)
        for name, size in kernel._require_layout().plates
    }

    def log_density(z: Any) -> Array:
        terms = target.terms(z, rows)
        return terms.log_prior + sum(r.sum() for r in terms.rows.values())

    if init is None:
        assert isinstance(target, ModelTarget)
        z = _find_start(kernel, target, init_key, rows, log_density)
    else:
        z = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), init)
    flat, unravel = ravel_pytree(z)
    state = kernel._first_state(kernel._reader(target, unravel), z, flat, key)
    return state, log_density(z)


def _find_start(
    kernel: MinibatchKernel,
    target: ModelTarget,
    key: Array,
    rows: Mapping[str, Array],
    log_density: Callable[[Any], Array],
) -> Any:
    """Draw starting points until the log density is finite."""
    strategy = kernel._init_strategy
    strategy = strategy if isinstance(strategy, partial) else strategy()

    def draw(key: Array) -> Any:
        sites = target.trace(rows, key, substitute_fn=strategy)
        z = target.unconstrain(sites, kernel._require_layout().latents)
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), z)

    def try_again(carry: tuple[Array, Array, Any, Array]) -> Any:
        tries, key, _, _ = carry
        key, draw_key = jax.random.split(key)
        z = draw(draw_key)
        return tries + 1, key, z, jnp.isfinite(log_density(z))

    shapes = jax.eval_shape(draw, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    first = (jnp.int32(0), key, zeros, jnp.array(False))
    return jax.lax.while_loop(
        lambda carry: (carry[0] < _MAX_TRIES) & ~carry[3], try_again, first
    )[2]


def _warn_of_constants(who: str, state: Any, args: Any) -> None:
    """Say so when large data are about to be compiled into the program."""
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        return
    size = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(args)
        if isinstance(leaf, np.ndarray | Array) and not isinstance(leaf, jax.core.Tracer)
    )
    if size > _LARGE:
        warnings.warn(
            f"{who}: {size / 1e6:.0f} MB of data are compiled into the program as "
            "constants, which takes several times their memory and makes compilation "
            "slow. Pass MCMC(..., jit_model_args=True, progress_bar=False) to hand them "
            "over as arguments.",
            UserWarning,
            stacklevel=find_stack_level(),
        )


def _vectorized(transition: Callable, target: Target, state: Any) -> Any:
    """One draw of several chains, which share their iteration count."""
    # an unbatched count keeps `cond(i < num_warmup, ...)` a branch: batched, it would
    # run the adaptation at every draw
    fields = state._fields
    axes = type(state)(*[None if name == "i" else 0 for name in fields])
    count = state.i
    moved = jax.vmap(partial(transition, target), in_axes=(axes,), out_axes=axes)(
        state._replace(i=count[0])
    )
    return moved._replace(i=jnp.broadcast_to(moved.i, count.shape))
