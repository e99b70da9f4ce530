"""The contract of a kernel: settings, the state at the start, and one transition."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC, init_to_uniform
from numpyro.util import is_prng_key

from numpyro_minibatch import control_variate as control_variates
from numpyro_minibatch._internal.checks import check_flag, check_positive
from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch._internal.progress import asked_by, shown
from numpyro_minibatch._internal.static import Given, Static, digest
from numpyro_minibatch._internal.threads import untraced
from numpyro_minibatch._model.content import content_of
from numpyro_minibatch._model.independence import check_rows
from numpyro_minibatch._model.layout import Layout, layout_target
from numpyro_minibatch._model.plates import Advised, few_rows
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch._model.sites import explained
from numpyro_minibatch._model.start import check_init_params, check_start
from numpyro_minibatch._model.support import check_support
from numpyro_minibatch.batch import BatchSize, FullBatch, Scheme
from numpyro_minibatch.control_variate import Taylor
from numpyro_minibatch.control_variate._problem import Needs, Problem
from numpyro_minibatch.estimate import Reader, Weights
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.kernels._shared.arguments import (
    check_init_strategy,
    check_model,
    read_batch,
    read_control_variate,
    read_rows,
)
from numpyro_minibatch.kernels._shared.contract import Start
from numpyro_minibatch.kernels._shared.driver import DrivenKernel, compile_around_loop
from numpyro_minibatch.kernels._shared.prepared import (
    Inspected,
    prepare_model,
    warn_of_angles,
)
from numpyro_minibatch.kernels._shared.rows_ahead import RowsAhead
from numpyro_minibatch.kernels._shared.start import (
    Within,
    _start_chains,
    _start_equal,
    check_finite_rows,
    constraining,
    first_chain,
)
from numpyro_minibatch.kernels._shared.survey import expand_likelihood, survey
from numpyro_minibatch.target import (
    AllRows,
    ModelTarget,
    Slices,
    Target,
    is_marginalized,
)

__all__ = ["MinibatchKernel"]

_BATCH = 100  # the smallest batch that a pilot chooses


class MinibatchKernel(RowsAhead, DrivenKernel):
    """The contract of the kernels: subclass it to write one.

    A kernel is written in three steps:

    1. ``__init__`` passes the arguments below to this class and stores its own settings
       as attributes. Every attribute counts: kernels are equal if their settings are,
       and equality, hash, ``repr`` and the recorded :attr:`settings` need no code.
       Settings do not change during a run.
    2. :meth:`first_state` returns the state of a chain before its first draw.
    3. :meth:`transition` makes one draw of one chain. It is traced by JAX once, and
       vectorised over chains.

    Everything else has a default. Override :attr:`default_fields` to record other
    fields of the state, :attr:`facts` to give :func:`~numpyro_minibatch.diagnose` facts
    about the settings, and :meth:`arrive` if the state holds something that depends on
    the temperature (see :class:`Tempered`). Add the methods of :class:`InPieces` for
    :class:`Cyclical`.

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
    :param rows: for a model that does not index its data, which of its arguments have
        the rows, and along which axis: ``{"X": 0, "y": 0}``, or a tree of axes for an
        argument that is a tree, as ``in_axes`` of :func:`jax.vmap`. By default these
        are all arrays with as many entries along an axis as there are rows.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or both of a pair are given.

    **Example**

    A chain that ignores the data: it makes independent draws from a normal
    distribution.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from jax.flatten_util import ravel_pytree
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch.kernels import KernelState, MinibatchKernel

        >>> class Noise(MinibatchKernel):
        ...     def __init__(self, model=None, *, scale=1.0, **settings):
        ...         super().__init__(model, **settings)
        ...         self.scale = scale
        ...
        ...     def first_state(self, start):
        ...         return KernelState.first(start)
        ...
        ...     def transition(self, target, state):
        ...         rng_key, key = jax.random.split(state.rng_key)
        ...         flat, unravel = ravel_pytree(state.z)
        ...         z = unravel(self.scale * jax.random.normal(key, flat.shape))
        ...         return state._replace(i=state.i + 1, z=z, rng_key=rng_key)

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=10) as i:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[i])

        >>> Noise(model, scale=2.0) == Noise(model, scale=2.0) != Noise(model)
        True
        >>> Noise(model, scale=2.0).settings["scale"]
        2.0
        >>> mcmc = MCMC(Noise(model, scale=2.0), num_warmup=0, num_samples=4000,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(0), jnp.zeros(100))
        >>> 1.8 < mcmc.get_samples()["mu"].std() < 2.2
        Array(True, dtype=bool)
    """

    _moved = False  # whether the temperature is not that of the set-up
    visits_modes = False  # whether it moves between the modes of a control variate
    takes_control_variate = True

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
        rows: Mapping[str, Any] | None = None,
    ) -> None:
        name = self._who
        check_model(name, model, target)
        check_positive(name, "temperature", temperature)
        check_flag(name, "temper_prior", temper_prior)
        check_init_strategy(name, init_strategy)
        control_variate = read_control_variate(name, control_variate)
        if control_variate and control_variate.modes > 1 and not self.visits_modes:
            raise ValueError(
                f"{name}(control_variate=...) with modes={control_variate.modes} needs "
                "moves between modes, which MinibatchMH makes. Leave modes out, or "
                "write MinibatchMH(model, control_variate=...)."
            )
        batch = read_batch(name, batch, batch_size, control_variate)
        self._model = model
        self._target = target
        self._batch = batch
        self._temperature = float(temperature)
        self._temper_prior = bool(temper_prior)
        self._control_variate = control_variate
        self._init_strategy = init_strategy
        self._rows = read_rows(name, rows, target)

    # required methods -----------------------------------------------------------------

    @abstractmethod
    def first_state(self, start: Start) -> Any:
        """The state of a chain before its first draw.

        :param start: where the chain starts, with its key.
        :return: a ``NamedTuple`` with the fields ``i`` (zero), ``z``, ``rng_key`` and
            ``surrogate`` (empty), such as :class:`KernelState`.
        """

    # optional overrides ---------------------------------------------------------------

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that the driver collects."""
        return ("z", "diverging", "accept_prob", "step_size", "lp_estimate", "num_rows")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define the kernel, for records."""
        report, summed = self._run.report, self._run.marginalized
        return {
            **self._recorded_settings(),
            "batch": repr(self._run.plan.scheme if self._run.plan else self._batch),
            "temperature": self.temperature,
            **({"marginalized": list(summed)} if summed else {}),
            **({"pilot": report} if report else {}),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of all parts that :func:`~numpyro_minibatch.diagnose` needs.

        They are numbers, booleans, names, and lists and dicts of these, and are stored
        with the result as JSON.
        """
        plan, report = self._run.plan, self._run.report
        scheme = plan.scheme if plan else self._batch
        if not report:
            return dict(scheme.facts)
        measured = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in report.items()
            if isinstance(value, bool | int | float | str | list | np.generic)
        }
        return {
            **scheme.facts,
            "pilot": measured,
            "start_given": self._run.start_given,
        }

    def get_diagnostics_str(self, state: Any) -> str:
        """The text of the progress bar.

        :param state: the state of a chain, or of vectorised chains.
        """
        shown = {
            "step_size": "step size {:.2e}",
            "mean_accept_prob": "acc. prob={:.2f}",
            "num_rows": "rows={:.0f}",
        }
        return ". ".join(
            text.format(jnp.mean(getattr(state, name)))
            for name, text in shown.items()
            if hasattr(state, name)
        )

    def check_draws(self, num_warmup: int, num_samples: int) -> None:
        """Raise if these numbers of draws do not fit the kernel.

        :param num_warmup: draws of the warmup.
        :param num_samples: draws after it.
        :raises ValueError: they do not fit the kernel.
        """

    # read by the driver and by analyses -----------------------------------------------

    @property
    def model(self) -> Callable | None:
        """The NumPyro model; after a run, one that reads all rows of its plates.

        Functions that run the model of a kernel, such as ``arviz.from_numpyro``,
        ``Predictive`` and ``numpyro.infer.log_likelihood``, need no ``subsample_size``.
        Discrete sites that the kernel marginalized are marginalized here, too.
        """
        layout, model = self._run.layout, self._sampled_model
        if model is None or layout is None or not layout.subsampled:
            return model
        return AllRows(model, dict(layout.plates))

    @property
    def written_model(self) -> Callable | None:
        """The model as the user wrote it, the same before and after a run."""
        return self._model

    @property
    def _prepared_model(self) -> Callable | None:
        """The model as it can be sampled; see :func:`prepare_model`."""
        return self._model if self._run.model is None else self._run.model

    @property
    def _sampled_model(self) -> Callable | None:
        """The same, with the approximation of its likelihood that the set-up chose."""
        return self._prepared_model if self._run.refined is None else self._run.refined

    @property
    def batch(self) -> Scheme:
        """The scheme that draws rows, as the user gave it."""
        return self._batch

    @property
    def bound_scheme(self) -> Scheme:
        """The scheme that draws rows, once the data have been seen."""
        if self._run.plan is not None:
            return self._run.plan.scheme
        return self._batch.bound(dict(self.layout.widths), dict(self.layout.plates))

    @property
    def temperature(self) -> float:
        """The temperature of the likelihood."""
        return self._temperature

    @property
    def temper_prior(self) -> bool:
        """Whether the prior has the temperature of the likelihood."""
        return self._temper_prior

    @property
    def control_variate(self) -> Taylor | None:
        """The control variate, if there is one."""
        return self._control_variate

    @property
    def layout(self) -> Layout:
        """The model's sites and data plates, once the data have been seen."""
        if self._run.layout is None:
            raise RuntimeError(
                f"{self._who} has not seen the model's data yet; it does in MCMC.run."
            )
        return self._run.layout

    @property
    def plates(self) -> dict[str, int]:
        """The number of rows of each data plate, once the kernel has seen the data."""
        return dict(self.layout.plates)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The rows of one draw of each data plate, once the data have been seen."""
        if self._run.plan is not None:
            return self._run.plan.scheme.widths
        return dict(self.layout.widths)

    @property
    def pilot(self) -> dict[str, Any]:
        """The measurements of the control variate's set-up; empty without one."""
        return dict(self._run.report)

    @property
    def slices(self) -> Slices | None:
        """The rows among the model's arguments, if the model does not index them."""
        return self.layout.slices

    @property
    def frozen(self) -> dict[str, Any]:
        """Values of the model's ``param`` sites, fixed at setup."""
        return self._run.frozen

    # the target, and its rows ---------------------------------------------------------

    def make_target(self, args: tuple, kwargs: Mapping[str, Any]) -> Target:
        """The target of the model with these arguments.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        if self._target is not None:
            return self._target
        model = self._sampled_model
        assert model is not None
        return ModelTarget(
            model=model,
            args=args,
            kwargs=kwargs or {},
            sizes=self.plates,
            frozen=self.frozen,
            slices=self.layout.slices,
            by_row=self.layout.by_row,
        )

    def reader(
        self,
        target: Target,
        unravel: Callable[[Array], Any],
        surrogate: Any = (),
        residual_only: bool = False,
    ) -> Reader:
        """The target's rows, read as the kernel's batches are, and their weights.

        :param target: the target.
        :param unravel: from a flat position to the latent sites.
        :param surrogate: the surrogate of the state; with a control variate, rows are
            residuals.
        :param residual_only: whether to read only the residual of the target over the
            surrogate.
        """
        plates, plan = self.plates, self._run.plan
        if plan is None or self._control_variate is None:
            return self.plain_reader(target, unravel)
        evaluate = control_variates.expand(
            target,
            plan.coordinates,
            self._control_variate.order,
            plan.form,
            surrogate.expansion,
            unravel,
            residual_only,
        )
        expansion = surrogate.expansion
        if residual_only and expansion.has_every_row:
            plates = {}
        return Reader(
            evaluate,
            plates,
            plan.scheme,
            self._weights,
            surrogate.designs,
            known_rows=expansion.num_in_residuals
            if residual_only
            else expansion.num_exact,
            row_size=target.row_size,
        )

    def plain_reader(self, target: Target, unravel: Callable[[Array], Any]) -> Reader:
        """The target's rows themselves, even with a control variate.

        :param target: the target.
        :param unravel: from a flat position to the latent sites.
        """
        return Reader(
            lambda flat, indices: target.terms(unravel(flat), indices),
            self.plates,
            self.bound_scheme,
            self._weights,
            row_size=target.row_size,
        )

    @property
    def _weights(self) -> Weights:
        weight = 1.0 / self.temperature
        return Weights(weight if self._temper_prior else 1.0, weight)

    def energy(self, reader: Reader) -> Reader:
        """The same rows for ``T`` times the log density, whose gradients are forces.

        :param reader: the target's rows.
        """
        temperature = self.temperature
        return reader._replace(
            weights=Weights(
                1.0 if self._temper_prior else temperature, 1.0, temperature
            )
        )

    # rungs of a ladder: see `Tempered` ------------------------------------------------

    def check_rung(self, who: str) -> None:
        """Raise where the kernel cannot be a rung; see :class:`Tempered`."""
        if self._temperature != 1.0:
            raise ValueError(self._has_temperature(who, f"{self._temperature}"))

    def _has_temperature(self, who: str, given: str) -> str:
        return (
            f"{who}(inner) sets the temperature of its inner kernel, which must be 1, "
            f"got {given}. Leave it out; for MINT write MINT(model, temperature=1.0)."
        )

    def with_temperature(self, temperature: Any) -> Self:
        """The same kernel at another temperature; see :class:`Tempered`."""
        other = copy.copy(self)
        other._temperature, other._moved = temperature, True
        return other

    def arrive(self, target: Target, here: Any, there: Any, key: Array) -> Any:
        """A rung's state with the position of another; see :class:`Tempered`."""
        return here._replace(z=there.z)

    def arrival_rows(self, reader: Reader) -> int:
        """Rows that :meth:`arrive` reads; see :class:`Tempered`."""
        return 0

    # the set-up -----------------------------------------------------------------------

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Check the model and its data, and remember its layout."""
        name = self._who
        size = self._batch.size
        sizes = dict(size) if isinstance(size, tuple) else size
        full = isinstance(self._batch, FullBatch)
        automatic = self._rows_unless_said
        if self._target is not None:
            if args or kwargs:
                raise ValueError(
                    f"{name}(target=...) got arguments for a model in MCMC.run, but a "
                    "target written by hand takes none: its two functions hold the "
                    "data. Call mcmc.run(key, init_params=...)."
                )
            layout = layout_target(
                name, self._target, sizes, full, automatic, self._advised
            )
            self._learn(layout=layout)
        else:
            self._inspect(
                args,
                kwargs,
                lambda model: inspect_model(
                    name,
                    model,
                    args,
                    kwargs,
                    sizes,
                    full=full,
                    default=automatic,
                    rows=self._rows,
                    advised=self._advised,
                ),
            )

    @property
    def data(self) -> Given | None:
        """The data that the states belong to, once the kernel has been started."""
        return self._run.data

    def compiles_for_data(self) -> None:
        """Note that a program is being compiled that takes the data as arguments."""
        self._learn(compiled_values=self._run.values)

    def _inspect(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        inspect: Callable[[Callable], Inspected],
    ) -> None:
        """Find the model to sample, and remember its layout."""
        assert self._model is not None
        prepared = prepare_model(self._model, args, kwargs, inspect)
        layout, frozen = prepared.found
        if layout != self._run.layout:  # each chain of a driver sets up its kernel
            warn_of_angles(self._who, prepared, args, kwargs)
        if self._run.compiled_values not in ("", prepared.values):
            raise ValueError(
                f"{self._who}: the model computes numbers of its data with "
                "NumPy, which are constants of the program that MCMC(..., "
                "jit_model_args=True) has compiled and would use again for these "
                "other data. Make a new kernel and a new MCMC, or leave "
                "jit_model_args out."
            )
        self._learn(
            layout=layout,
            frozen=frozen,
            model=None if prepared.model is self._model else prepared.model,
            marginalized=prepared.marginalized,
            values=prepared.values,
        )
        if prepared.values:  # values, too, are constants of programs
            self._learn(frozen_digest=digest((frozen, prepared.values)))

    @property
    def _rows_unless_said(self) -> int | None:
        """Rows of a batch if neither user nor model says; ``None`` to ask."""
        return None if self._control_variate is None else _BATCH

    @property
    def _advised(self) -> Advised:
        return Advised(self._advised_rows, self.takes_control_variate)

    def _advised_rows(self, rows: int, parameters: int) -> int:
        """The rows of a batch to advise if the user gives none.

        :param rows: the number of all rows of a plate.
        :param parameters: the number of parameters; zero if it is not known.
        """
        return few_rows(rows)

    @property
    def _needs(self) -> Needs:
        """The kernel's requirements on the choices of the set-up."""
        return Needs(_BATCH)

    @property
    def _surveys(self) -> bool:
        """Whether the set-up reads all rows of the data before the run."""
        return self._control_variate is not None

    def _survey(self, problem: Problem, init: Any) -> Any:
        """Prepare the run from a pass over all rows.

        :param problem: the target and its data.
        :param init: the starting point of the first chain, or ``None``.
        """
        return expand_likelihood(self, problem, init)

    # the driver's interface -----------------------------------------------------------

    @full_precision
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
        vectorized = not is_prng_key(rng_key)
        self._learn(
            num_warmup=int(num_warmup),
            num_chains=len(rng_key) if vectorized else 1,
            vectorized=None,
        )
        self._setup(model_args, kwargs)
        static, arrays = Static.split(model_args, kwargs)
        name, layout = self._who, self.layout
        chains = (len(rng_key),) if vectorized else ()
        check_init_params(
            name, self._target, layout, self._init_strategy, init_params, chains
        )
        with explained(name, self._model, model_args, kwargs):
            check_rows(
                name,
                self.make_target,
                self._prepared_model or self._target,
                model_args,
                kwargs,
                layout,
                first_chain(init_params, chains),
            )
        target = self.make_target(model_args, kwargs)
        check_support(name, target)
        if isinstance(target, ModelTarget) and is_marginalized(target.model):
            arguments, marginalized = (target.args, dict(target.kwargs)), target.model
            if not find_rows(arguments):
                check = marginalized.check_integrals  # type: ignore[attr-defined]
                untraced(check, *arguments)
                first = first_chain(init_params, chains)
                untraced(check_finite_rows, self, static, arrays, first)
        surrogate: Any = ()
        within = None
        self._learn(plan=None)
        if self._surveys:
            with (
                explained(name, self._model, model_args, kwargs),
                shown(asked_by(MCMC)),
            ):
                surrogate, within = self._from_survey(
                    static, arrays, init_params, first_chain(init_params, chains)
                )
        model = self._sampled_model
        content = None if model is None else content_of(model)
        start_fn = partial(
            self._start_fn(content),
            static,
            vectorized,
            (num_warmup, layout, self._run.plan, self._run.frozen_digest, content),
        )
        inputs = rng_key, init_params, arrays, surrogate, within
        with explained(name, self._model, model_args, kwargs):
            # the same trace as that of the call
            shapes, *_ = jax.eval_shape(start_fn, *inputs)
            names = {self.sample_field, *self.default_fields}
            compile_around_loop(attrgetter(*names)(shapes), vectorized)
            state, log_density, distance = start_fn(*inputs)
        if within is not None and distance is not None:
            self._learn(report={**self._run.report, **within.report(distance)})
        if not any(
            isinstance(x, jax.core.Tracer)
            for x in jax.tree.leaves((state.z, log_density))
        ):
            target = self.make_target(model_args, kwargs)
            check_start(
                name, target, state.z, np.asarray(log_density), (model_args, kwargs)
            )
        state = state._replace(surrogate=surrogate)
        self._started(state, vectorized, Given.of(model_args, kwargs))
        return state

    def _from_survey(
        self, static: Static, arrays: list[Any], init_params: Any, first: Any
    ) -> tuple[Any, Within | None]:
        """The surrogate of a pass over all rows, and where chains may start.

        :param init_params: the starting points that the user gave, or ``None``.
        :param first: that of the first chain.
        """
        prepared = untraced(survey, self, static, arrays, first)
        starts = init_params is None and self._init_strategy is init_to_uniform
        self._learn(plan=prepared.plan, report=prepared.report, start_given=not starts)
        if prepared.starts is None:
            return prepared.surrogate, None
        if starts:
            return prepared.surrogate, Within(prepared.starts)
        if self.num_warmup > 0:
            return prepared.surrogate, Within(prepared.starts, prepared.radius)
        return prepared.surrogate, None

    def _start_fn(self, content: str | None) -> Callable:
        """The function that starts all chains.

        :param content: a digest of the model, if it has one.
        """
        if content is not None:
            # a copy without data, because this kernel may change
            return partial(_start_equal, copy.copy(self))
        start_fn = self._run.start_fn
        if start_fn is None:
            # compiled for this kernel only: arrays in the model's closure may change
            # before another kernel is made of the same model
            start = partial(_start_chains, self)
            start_fn = jax.jit(start, static_argnums=(0, 1, 2))
            self._learn(start_fn=start_fn)
        return start_fn

    def postprocess_fn(self, args, kwargs):  # type: ignore[no-untyped-def]
        """A function from a position to the model's constrained values.

        Deterministic sites outside the data plates are included.
        """
        if self._target is not None:
            return lambda z: z
        return constraining(self, args, kwargs or {})
