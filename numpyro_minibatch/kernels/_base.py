"""What every kernel shares: setup, start, vectorised chains, identity, pickling."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import find_stack_level, is_prng_key

from numpyro_minibatch import control_variate as control_variates
from numpyro_minibatch._internal import passes
from numpyro_minibatch._internal.checks import check_flag, check_positive, describe
from numpyro_minibatch._internal.static import Seen, Static, digest
from numpyro_minibatch._model.preflight import (
    Layout,
    explained,
    inspect_model,
    known_content,
    layout_target,
)
from numpyro_minibatch._model.start import check_init_params, check_start, find_start
from numpyro_minibatch.batch import (
    BatchSize,
    FullBatch,
    Scheme,
    Weighted,
    full,
    stratified,
    without_replacement,
)
from numpyro_minibatch.control_variate import Taylor
from numpyro_minibatch.control_variate._problem import Chosen, Needs, Problem
from numpyro_minibatch.control_variate._setup import Plan, Prepared, prepare
from numpyro_minibatch.estimate import Reader, Weights
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.target import ModelTarget, Target

__all__ = ["MinibatchKernel", "Static", "over_chains", "warn_of_constants"]

_BATCH = 100  # rows of a batch where only the pilot is to say
_FEW = 1000  # rows from which on a minibatch pays
_LARGE = 2**28  # bytes of data above which it matters how they reach the program


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
    :param control_variate: ``"taylor1"``, ``"taylor2"`` or a ``control_variate.*``
        object; then rows are by default drawn by :func:`batch.stratified`.
    :param init_strategy: one of :mod:`numpyro.infer.initialization`; left at its
        default, chains with a control variate start in the surrogate's posterior.
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
        control_variate: str | Taylor | None = None,
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
        self._control_variate = _control_variate(name, control_variate)
        if batch is None:
            drawn = without_replacement if control_variate is None else stratified
            batch = drawn(batch_size)
        if isinstance(batch, Weighted) and control_variate is None:
            raise ValueError(
                f"{name}(batch={batch!r}) draws rows by how much they matter, which "
                'only a control variate can tell. Add control_variate="taylor2", or '
                "use batch.without_replacement."
            )
        self._model = model
        self._target = target
        self._scheme = batch
        self._temperature = float(temperature)
        self._temper_prior = bool(temper_prior)
        self._init_strategy = init_strategy
        self._num_warmup = 0
        self._num_chains = 1  # side by side, in one program
        self._pace: Callable[[Array], Any] | None = None  # see `paced`
        self._layout: Layout | None = None
        self._frozen: dict[str, Any] = {}
        self._sample_fn: Callable | None = None
        self._start_fn: Callable | None = None
        self._plan: Plan | None = None
        self._moved = False  # to another temperature than that of the set-up
        self._report: dict[str, Any] = {}
        self._start_given = False  # or left to the set-up of the control variate
        self._prepared: tuple[Any, Seen, Prepared] | None = None

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
        if self._plan is not None:
            return self._plan.scheme.widths
        return dict(self._require_layout().widths)

    @property
    def pilot(self) -> dict[str, Any]:
        """What the set-up of the control variate measured; empty without one."""
        return dict(self._report)

    @property
    def frozen(self) -> dict[str, Any]:
        """Values of the model's ``param`` sites, fixed at setup."""
        return self._frozen

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define what the kernel does, for records."""
        return {
            "batch": repr(self._plan.scheme if self._plan else self._scheme),
            "temperature": self.temperature,
            "temper_prior": self._temper_prior,
            "control_variate": repr(self._control_variate),
            **({"pilot": self._report} if self._report else {}),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What :func:`~numpyro_minibatch.diagnose` has to know: each part says its own.

        Numbers, booleans, names, and lists and dicts of them. They are stored with the
        result, as JSON.
        """
        scheme = self._plan.scheme if self._plan else self._scheme
        if not self._report:
            return dict(scheme.facts)
        measured = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in self._report.items()
            if isinstance(value, bool | int | float | str | np.generic)
        }
        return {
            **scheme.facts,
            "pilot": measured,
            "start_given": self._start_given,
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
            self._control_variate,
        )

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, MinibatchKernel)
            and self._identity() == other._identity()
            and self._init_strategy == other._init_strategy
            and self._num_warmup == other._num_warmup
            and self._num_chains == other._num_chains
            and self._layout == other._layout
            and self._plan == other._plan
            and digest(self._frozen) == digest(other._frozen)
        )

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def __getstate__(self) -> dict[str, Any]:
        # the driver initialises a kernel without a _sample_fn again
        again = {"_sample_fn": None, "_start_fn": None, "_prepared": None}
        return {**self.__dict__, **again}

    # setup ---------------------------------------------------------------------------

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Check the model and its data, and remember its layout."""
        name = type(self).__name__
        size = self._scheme.size
        sizes = dict(size) if isinstance(size, tuple) else size
        full = isinstance(self._scheme, FullBatch)
        automatic = None if self._control_variate is None else _BATCH
        if self._target is not None:
            if args or kwargs:
                raise ValueError(
                    f"{name}(target=...) got arguments for a model in MCMC.run, which "
                    "a target written by hand has no use for: its two functions hold "
                    "the data. Call mcmc.run(key, init_params=...)."
                )
            self._layout = layout_target(name, self._target, sizes, full, automatic)
        else:
            assert self._model is not None
            self._layout, self._frozen = inspect_model(
                name, self._model, args, kwargs, sizes, full=full, default=automatic
            )

    def _make_target(self, args: tuple, kwargs: Mapping[str, Any]) -> Target:
        if self._target is not None:
            return self._target
        assert self._model is not None
        return ModelTarget(
            model=self._model,
            args=args,
            kwargs=kwargs or {},
            sizes=dict(self._require_layout().plates),
            frozen=self._frozen,
        )

    def _reader(
        self,
        target: Target,
        unravel: Callable[[Array], Any],
        surrogate: Any = (),
        beyond: bool = False,
    ) -> Reader:
        """The target, read through the scheme.

        :param beyond: only what it has beyond the surrogate of a control variate.
        """
        layout, plan = self._require_layout(), self._plan
        plates = dict(layout.plates)
        if plan is None or self._control_variate is None:
            return Reader(
                lambda flat, indices: target.terms(unravel(flat), indices),
                plates,
                self._scheme.bound(dict(layout.widths), plates),
                self._weights,
            )
        evaluate = control_variates.expand(
            target,
            plan.coordinates,
            self._control_variate.order,
            plan.form,
            surrogate.expansion,
            unravel,
            beyond,
        )
        expansion = surrogate.expansion
        if beyond and expansion.has_every_row:
            plates = {}
        return Reader(
            evaluate,
            plates,
            plan.scheme,
            self._weights,
            surrogate.designs,
            known_rows=expansion.num_leading if beyond else expansion.num_exact,
        )

    @property
    def _weights(self) -> Weights:
        weight = 1.0 / self.temperature
        return Weights(weight if self._temper_prior else 1.0, weight)

    def _energy(self, reader: Reader) -> Reader:
        """The same for ``T`` times the log density, whose gradients are forces."""
        heat = self.temperature
        return reader._replace(
            weights=Weights(1.0 if self._temper_prior else heat, 1.0, heat)
        )

    # rows that are known before they are read -----------------------------------------

    _num_steps: int = 1
    _draws_once_a_step = False  # of the scheme, by `fold_in(index_key, step)`

    @property
    def knows_rows(self) -> bool:
        """Whether :meth:`rows_ahead` can tell the rows of steps to come."""
        return self._draws_once_a_step and self._scheme.single_round

    @property
    def rows_per_draw(self) -> int:
        """How many rows :meth:`rows_ahead` tells of one draw."""
        scheme = self._bound_scheme
        most = scheme.num_rows(self.plates)
        if isinstance(scheme, Weighted):
            most *= 2  # at most as many that are always read come on top
        return most * self._num_steps * len(self._row_keys(jax.random.key(0)))

    @property
    def _bound_scheme(self) -> Scheme:
        if self._plan is not None:
            return self._plan.scheme
        layout = self._require_layout()
        return self._scheme.bound(dict(layout.widths), dict(layout.plates))

    def _row_keys(self, key: Array) -> tuple[Array, ...]:
        """The keys that a step draws rows with, of the key of its rows."""
        return (key,)

    def rows_ahead(
        self, index_keys: Array, designs: Any, start: Array, number: int
    ) -> dict[str, Array]:
        """The rows that some draws will read, which do not depend on the chain's state.

        :param index_keys: the ``index_key`` of each chain's state.
        :param designs: of a scheme that weighs rows, the design of each plate.
        :param start: draws made before.
        :param number: for how many draws.
        :return: for each plate shape ``(chains, number, rows of a draw)``.
        """
        plates = tuple(sorted(self.plates.items()))
        streams = index_keys, designs, start
        return _rows_ahead(
            self._bound_scheme, plates, self._num_steps, number, self._row_keys, streams
        )

    def check_draws(self, num_warmup: int, num_samples: int) -> None:
        """Raise where a kernel has no use for these numbers of draws.

        :param num_warmup: draws of the warmup.
        :param num_samples: draws after it.
        :raises ValueError: they do not fit the kernel.
        """

    # rungs of a ladder ----------------------------------------------------------------

    def at(self, temperature: Any) -> Self:
        """The same kernel at another temperature.

        :param temperature: the temperature; it may be traced.
        """
        other = copy.copy(self)
        other._temperature, other._moved = temperature, True
        return other

    def _check_ladder(self, who: str) -> None:
        """Raise where a position means nothing at another temperature."""

    def _arrive(self, target: Target, here: Any, there: Any, key: Array) -> Any:
        """The state of a rung after it got the position of another.

        :param target: the target.
        :param here: the rung's own state, with the surrogate.
        :param there: the state that the position comes from.
        :param key: PRNG key.
        """
        return here._replace(z=there.z)

    def _arrival_rows(self, reader: Reader) -> int:
        """Rows that :meth:`_arrive` reads."""
        return 0

    # control variates -----------------------------------------------------------------

    @property
    def _needs(self) -> Needs:
        """What suits the kernel, of all that its set-up might choose."""
        return Needs(_BATCH)

    @property
    def _surveys(self) -> bool:
        """Whether all rows of the data are looked at before the run."""
        return self._control_variate is not None

    def _prepare(self, static: Static, arrays: list[Any], init: Any) -> Any:
        """What a look at all rows came to; once for the same data."""
        layout, who = self._require_layout(), type(self).__name__
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            what = (
                who if self._control_variate is None else f"{who}(control_variate=...)"
            )
            raise TypeError(
                f"{what} looks at all rows of the data before the "
                "run, and they are being traced (by jit or vmap). Call init outside, "
                "or close over the data."
            )
        if self._prepared is not None:
            known, seen, prepared = self._prepared
            if known == (static, layout) and seen == Seen.of(arrays):
                return prepared
        shapes = dict(zip(layout.latents, layout.shapes, strict=True))
        # where a search begins may depend on where a chain is told to start
        mesh, placed = passes.setup_devices(alike=init is None), None
        own = [jnp.asarray(x) for x in arrays]
        if mesh is not None:
            both = passes.everywhere(static.join(arrays), mesh)
            own, placed = (Static.split(*given)[1] for given in both)
        problem = Problem(
            target_of=lambda arrays: self._make_target(*static.join(arrays)),
            arrays=own,
            mesh=mesh,
            placed=placed,
            plates=dict(layout.plates),
            weights=self._weights,
            on_host=any(
                rows.mode != "alias" for rows in find_rows(static.join(arrays)).values()
            ),
            example=(
                {name: np.zeros(shape) for name, shape in shapes.items()}
                if self._target is None
                else jax.tree.map(lambda x: np.zeros(jnp.shape(x)), init)
            ),
        )
        prepared = self._survey(problem, init)
        self._prepared = (static, layout), Seen.of(arrays), prepared
        return prepared

    def _survey(self, problem: Problem, init: Any) -> Any:
        """Expand the likelihood and see how well that works.

        :param problem: the target and its data.
        :param init: where the first chain is to start, or ``None``.
        """
        assert self._control_variate is not None
        layout, who, plates = (
            self._require_layout(),
            type(self).__name__,
            problem.plates,
        )
        scheme = self._scheme
        sizes = {n: None if layout.automatic else w for n, w in layout.widths}
        if layout.automatic and max(plates.values()) < _FEW:
            warnings.warn(
                f"{who}: with {sum(plates.values())} rows of data a minibatch does not "
                "pay, and all rows are read instead. Pass batch=batch.full() to say "
                "so, or a batch_size.",
                UserWarning,
                stacklevel=find_stack_level(),
            )
            scheme, sizes = full(), dict(plates)
        chosen = Chosen(self._control_variate, scheme, sizes)
        return prepare(who, problem, chosen, self._needs)

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
        name, layout = type(self).__name__, self._require_layout()
        chains = (len(rng_key),) if vectorized else ()
        self._num_chains = len(rng_key) if vectorized else 1
        check_init_params(
            name, self._target, layout, self._init_strategy, init_params, chains
        )
        surrogate: Any = ()
        self._plan = None
        if self._surveys:
            with explained(name, model_args, kwargs):
                prepared = _untraced(
                    self._prepare, static, arrays, _first(init_params, chains)
                )
            self._plan, self._report = prepared.plan, prepared.report
            surrogate = prepared.surrogate
            starts = init_params is None and self._init_strategy is init_to_uniform
            self._start_given = not starts
            if starts and prepared.starts is not None:
                rng_key, start_key = _split(rng_key, vectorized)
                init_params = prepared.start(start_key)
        content = None if self._model is None else known_content()
        start_fn = self._start_fn
        if content is not None:
            # a copy, which has no data: this one may change
            start_fn = partial(_start_equal, copy.copy(self))
        elif start_fn is None:
            # compiled for this kernel only: another one may be made of the same model
            # after the arrays have changed that the model takes from its surroundings
            start = partial(_start_chains, self)
            self._start_fn = start_fn = jax.jit(start, static_argnums=(0, 1, 2))
        with explained(name, model_args, kwargs):
            state, log_density = start_fn(
                static,
                vectorized,
                (num_warmup, layout, self._plan, digest(self._frozen), content),
                rng_key,
                init_params,
                arrays,
                surrogate,
            )
        if not isinstance(log_density, jax.core.Tracer):
            target = self._make_target(model_args, kwargs)
            check_start(
                name, target, state.z, np.asarray(log_density), (model_args, kwargs)
            )
        transition = self._transition
        if vectorized:
            transition = partial(over_chains, transition)
        self._sample_fn = transition
        return state._replace(surrogate=surrogate)

    def sample(self, state, model_args, model_kwargs):  # type: ignore[no-untyped-def]
        """One draw from the current state."""
        assert self._sample_fn is not None
        warn_of_constants(type(self).__name__, state, (model_args, model_kwargs))
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
    def _first_state(
        self, reader: Reader, z: Any, flat: Array, key: Array, surrogate: Any
    ) -> Any:
        """The state of a chain that starts at ``z``; its ``surrogate`` stays empty."""

    @abstractmethod
    def _transition(self, target: Target, state: Any) -> Any:
        """One draw of one chain."""

    # pieces of a draw of another kernel --------------------------------------------

    def paced(self, factor: Callable[[Array], Any]) -> Self:
        """The same kernel with step sizes that change with the number of steps.

        :param factor: what the step size of the ``n``-th step of all is multiplied by.
        """
        other = copy.copy(self)
        other._pace = factor
        return other

    def _advance(self, target: Target, state: Any) -> tuple[Any, Array | None]:
        """The steps of a draw without what is measured once a draw.

        :return: the state after them, and a key to measure with.
        """
        return self._transition(target, state), None


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _rows_ahead(
    scheme: Scheme,
    plates: tuple[tuple[str, int], ...],
    num_steps: int,
    number: int,
    row_keys: Callable,
    streams: tuple[Array, Any, Array],
) -> dict[str, Array]:
    index_keys, designs, start = streams
    steps = start * num_steps + jnp.arange(number * num_steps, dtype=jnp.int32)

    def of_step(key: Array, step: Array) -> dict[str, Array]:
        keys = row_keys(jax.random.fold_in(key, step))
        # of batches only the indices, so that nothing else is computed
        draws = [scheme.draw(key, dict(plates), designs) for key in keys]
        return {
            name: jnp.concatenate([drawn[name].indices for drawn in draws])
            for name, _ in plates
        }

    found = jax.vmap(jax.vmap(of_step, (None, 0)), (0, None))(index_keys, steps)
    return {
        name: rows.reshape(len(index_keys), number, -1) for name, rows in found.items()
    }


def _start_chains(
    kernel: MinibatchKernel,
    static: Static,
    vectorized: bool,
    known: Hashable,  # of the kernel at setup: a key, so that a change compiles anew
    key: Array,
    init: Any,
    arrays: list[Any],
    surrogate: Any,
) -> tuple[Any, Array]:
    """The first states; compiled once for equal arguments and shapes."""
    start = partial(_start, kernel, static)
    if vectorized:
        start = jax.vmap(start, in_axes=(0, None if init is None else 0, None, None))
    return start(key, init, arrays, surrogate)


# for all kernels that are equal, as far as it is known that their models are
_start_equal = jax.jit(_start_chains, static_argnums=(0, 1, 2, 3))


def _start(
    kernel: MinibatchKernel,
    static: Static,
    key: Array,
    init: Any,
    arrays: list[Any],
    surrogate: Any,
) -> tuple[Any, Array]:
    """The first state of one chain, and its log density."""
    args, kwargs = static.join(arrays)
    target = kernel._make_target(args, kwargs)
    key, init_key = jax.random.split(key)
    z, log_density = find_start(
        target, kernel._require_layout(), kernel._init_strategy, init_key, init
    )
    flat, unravel = ravel_pytree(z)
    reader = kernel._reader(target, unravel, surrogate)
    return kernel._first_state(reader, z, flat, key, surrogate), log_density


def _control_variate(who: str, given: Any) -> Taylor | None:
    if given is None or isinstance(given, Taylor):
        return given
    found = control_variates.named(given) if isinstance(given, str) else None
    if found is None:
        raise ValueError(
            f'{who}(control_variate=...) must be "taylor1", "taylor2" or an object '
            "such as control_variate.taylor2(ridge=1.0), got "
            f"{describe(given)}."
        )
    return found


def _untraced(fn: Callable, *args: Any) -> Any:
    """Call a function of concrete values for real, even where JAX is tracing."""
    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        return fn(*args)
    # what is being traced is known to a thread; another one computes
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()


def _first(init: Any, chains: tuple[int, ...]) -> Any:
    """The starting point of the first chain."""
    return jax.tree.map(lambda x: x[0], init) if chains else init


def _split(key: Array, vectorized: bool) -> tuple[Array, Array]:
    """Two keys, or two keys per chain."""
    split = jax.vmap(jax.random.split)(key) if vectorized else jax.random.split(key)
    return (split[:, 0], split[:, 1]) if vectorized else (split[0], split[1])


def warn_of_constants(who: str, state: Any, args: Any) -> None:
    """Say so when large data are about to be compiled into the program.

    :param who: the kernel's name.
    :param state: the kernel's state.
    :param args: the model's arguments.
    """
    if getattr(jax.config, "jax_use_simplified_jaxpr_constants", False):
        return  # then JAX hands constants over as arguments
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
            "MCMC(..., jit_model_args=True, progress_bar=False), to hand them over as "
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
