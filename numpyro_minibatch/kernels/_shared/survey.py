"""The set-up of a kernel that reads all rows before a run."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_value
from numpyro.util import find_stack_level

from numpyro_minibatch._internal import passes
from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch._internal.static import Seen, Static
from numpyro_minibatch._model.content import content_of, known_content
from numpyro_minibatch._model.start import find_nan
from numpyro_minibatch.batch import full
from numpyro_minibatch.control_variate._problem import (
    Better,
    Chosen,
    NeverFinite,
    NoExpansion,
    Problem,
    Refused,
    TooCoarse,
)
from numpyro_minibatch.control_variate._setup import Prepared, prepare
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.kernels._shared.contract import Approximated
from numpyro_minibatch.target import ModelTarget, without_integrals

__all__ = ["expand_likelihood", "survey"]

_LOOKS = 8  # draws at which an approximation of the likelihood is checked
_FEW = 1000  # smallest number of rows for which a minibatch pays


class _Found(NamedTuple):
    """The result of a set-up.

    :param seen: the data that it belongs to.
    :param refined: the model with a finer approximation, if the set-up chose one.
    :param prepared: what the kernel needs of it.
    """

    seen: Seen
    refined: Any
    prepared: Any


# results that equal kernels find while the data exist, the last ones at the end
_FOUND: OrderedDict[Hashable, _Found] = OrderedDict()
_MOST_FOUND = 4


@full_precision
def survey(kernel: Any, static: Static, arrays: list[Any], init: Any) -> Any:
    """The result of the set-up on all rows, computed once for the same data.

    Equal kernels share it, unless a start was given, from which it searches as well.

    :param kernel: the kernel, whose ``_survey`` computes it.
    :param static: the model's arguments without their arrays.
    :param arrays: these arrays.
    :param init: where the first chain is to start, or ``None``.
    :raises TypeError: the arrays are being traced.
    """
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        who = kernel._who
        what = who if kernel.control_variate is None else f"{who}(control_variate=...)"
        raise TypeError(
            f"{what} reads all rows of the data before the run, but they are being "
            "traced (by jit or vmap). Call init outside, or close over the data."
        )
    seen = Seen.of(arrays)
    if kernel._run.prepared is not None:
        known, before, prepared = kernel._run.prepared
        if known == (static, kernel.layout) and seen == before:
            return prepared
    kernel._learn(refined=None)
    key = _setting(kernel, static, arrays) if init is None else None
    found = _FOUND.get(key) if key is not None else None
    if found is None or found.seen != seen:
        prepared = _refined(kernel, static, arrays, init)
        found = _Found(seen, kernel._run.refined, prepared)
        if key is not None and arrays:
            _keep(key, found)
    kernel._learn(
        refined=found.refined, prepared=((static, kernel.layout), seen, found.prepared)
    )
    return found.prepared


def _keep(key: Hashable, found: _Found) -> None:
    """Keep a result for equal kernels until an array of the data is freed."""
    _FOUND[key] = found
    _FOUND.move_to_end(key)
    while len(_FOUND) > _MOST_FOUND:
        _FOUND.popitem(last=False)
    for reference in found.seen.arrays:
        array = reference()
        if array is not None:
            weakref.finalize(array, _drop, key, found.seen).atexit = False


def _drop(key: Hashable, seen: Seen) -> None:
    if key in _FOUND and _FOUND[key].seen is seen:
        del _FOUND[key]


def _setting(kernel: Any, static: Static, arrays: list[Any]) -> Hashable | None:
    """A key of what a set-up depends on, except for the content of the data."""
    identity = _identity(kernel, static)
    if identity is None or passes.setup_devices(alike=True) is not None:
        return None
    bare = copy.copy(kernel)
    run = kernel._run.not_started()
    bare._run = replace(run, report={}, num_warmup=0, num_chains=1)
    return bare, identity, jnp.result_type(float), tuple(map(id, arrays))


class _Approximation:
    """The accuracy of a model's approximate likelihood, measured in a set-up.

    :param kernel: the kernel, whose model approximates its likelihood.
    :param args: positional arguments of the model.
    :param kwargs: its keyword arguments.
    """

    def __init__(self, kernel: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self._kernel, self._args, self._kwargs = kernel, args, kwargs
        self._measure = kernel._prepared_model.approximation(args, kwargs)
        self._found: dict[str, float] = {}

    def ahead(self, positions: Any) -> None:
        """Compile the measurement on other threads.

        :param positions: any positions, with a leading axis.
        """
        some = jax.tree.map(lambda x: np.resize(x, (_LOOKS, *x.shape[1:])), positions)
        shapes = jax.eval_shape(self._constrain, some)
        draws = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        try:
            self._measure.ahead(draws, self._kernel._sampled_model)
        except ValueError:  # a refusal waits for the measurement
            return

    def __call__(self, positions: Any) -> Any:
        """The approximation to use instead of a coarse one, or ``None``.

        :param positions: draws of the surrogate's posterior, with a leading axis.
        """
        try:
            self._found = self._error(positions)
        except ValueError:  # a refusal waits until the posterior is known better
            return None
        return self._other(self._found)

    def at(self, prepared: Prepared) -> tuple[dict[str, float], Any]:
        """The error over the posterior, and the approximation to use instead, if any.

        :param prepared: the result of a set-up.
        :raises ValueError: the error is too large.
        """
        settled = self._kernel._prepared_model.settled(self._found)
        if not (settled and prepared.report.get("gaussian")):
            self._found = self._error(prepared.starts)
        return self._found, self._other(self._found, late=True)

    def _error(self, positions: Any) -> dict[str, float]:
        """The error at unconstrained positions with a leading axis."""
        kernel = self._kernel
        some = jax.tree.map(lambda x: x[:_LOOKS], positions)
        draws = jax.tree.map(np.asarray, self._constrain(jax.device_put(some)))
        try:
            return self._measure(draws, kernel._sampled_model)
        except ValueError as error:
            raise ValueError(f"{kernel._who}: {error}") from None

    @cached_property
    def _constrain(self) -> Callable[[Any], Any]:
        """Values of the parameters at unconstrained positions."""
        constrain = self._kernel.make_target(self._args, self._kwargs).constrain
        return jax.jit(jax.vmap(constrain))

    def _other(self, error: dict[str, float], late: bool = False) -> Any:
        better = self._kernel._prepared_model.refined(error, late)
        return None if better == self._kernel._sampled_model else better


def _refined(kernel: Any, static: Static, arrays: list[Any], init: Any) -> Any:
    """The result of a set-up whose model is approximated well enough."""
    model = kernel._prepared_model
    if not isinstance(model, Approximated):
        return _surveyed(kernel, static, arrays, init)
    args, kwargs = static.join(arrays)
    approximation = _Approximation(kernel, args, kwargs)
    # of several modes, each search starts somewhere else
    one = kernel.control_variate is not None and kernel.control_variate.modes == 1
    other: dict[str, Any] = {}
    try:
        try:
            prepared = _surveyed(kernel, static, arrays, init, better=approximation)
        except TooCoarse as coarse:
            kernel._learn(refined=coarse.better)
            other |= coarse.others
            prepared = _surveyed(kernel, static, arrays, init, near=coarse.near)
    except Refused as reason:
        finer = model.finer(args, kwargs)
        if finer in (None, kernel._sampled_model) or isinstance(reason, NeverFinite):
            raise
        # the gradient of a coarse approximation is not that of its values, which ends
        # a search for the centre without a centre, and trajectories in rejections
        kernel._learn(refined=finer)
        other = {}
        prepared = _surveyed(kernel, static, arrays, init)
    if prepared.starts is None:
        return prepared
    error, finer = approximation.at(prepared)
    if finer is not None:
        kernel._learn(refined=finer)
        near = None
        if one:  # searches from several starts found out whether there is another mode
            leaves = jax.tree.leaves(prepared.starts)
            near = np.concatenate([np.mean(x, 0, dtype=float).ravel() for x in leaves])
            found = prepared.report.items()
            seen = {n: x for n, x in found if n.startswith("other_mode")}
            other = seen | other
        prepared = _surveyed(kernel, static, arrays, init, near=near)
        error, _ = approximation.at(prepared)
    return prepared._replace(report=prepared.report | other | error)


def _surveyed(
    kernel: Any,
    static: Static,
    arrays: list[Any],
    init: Any,
    near: np.ndarray | None = None,
    better: Better | None = None,
) -> Any:
    """The result of one set-up with the current approximation of the model.

    :param near: where the search for the mode starts, in the middle of the posterior.
    :param better: what finds an approximation to use instead.
    :raises TooCoarse: there is such a one.
    """
    try:
        problem = _problem(kernel, static, arrays, init)
        problem = replace(problem, near=near, better=better)
        return kernel._survey(problem, init)
    except NeverFinite:  # values outside of a support, not a matter of accuracy
        raise
    except Refused as refused:
        model = kernel._sampled_model
        other = ""
        if isinstance(refused, NoExpansion):
            other = (
                " AMAGOLD(target=...), whose decisions read all rows, needs no "
                "expansion."
                if model is None
                else " AMAGOLD(model), whose decisions read all rows, and NUTS need "
                "no expansion."
            )
        if strange := find_nan(static.join(arrays), infinite=True):
            raise type(refused)(
                f"{refused} There are NaN or infinite values among the data "
                f"({'; '.join(strange)}), which may be the reason."
            ) from None
        if isinstance(model, Approximated):
            advice = model.approximation_advice(*static.join(arrays))
            raise type(refused)(f"{refused}{advice}{other}") from None
        raise type(refused)(f"{refused}{other}") from None


def _problem(kernel: Any, static: Static, arrays: list[Any], init: Any) -> Problem:
    """The target and its data, in the form that the set-up needs."""
    layout = kernel.layout
    shapes = dict(zip(layout.latents, layout.shapes, strict=True))
    # the start of a search may depend on the given start of a chain
    mesh, placed = passes.setup_devices(alike=init is None), None
    own = [jnp.asarray(x) for x in arrays]
    if mesh is not None:
        both = passes.everywhere(static.join(arrays), mesh)
        own, placed = (Static.split(*given)[1] for given in both)
    # a copy without data, because stored programs hold a reference to it
    bare = copy.copy(kernel)
    bare._run = replace(kernel._run.not_started(), report={})
    return Problem(
        target_of=lambda arrays: bare.make_target(*static.join(arrays)),
        identity=_identity(kernel, static),
        arrays=own,
        mesh=mesh,
        placed=placed,
        plates=dict(layout.plates),
        weights=kernel._weights,
        on_host=any(
            rows.mode != "alias" for rows in find_rows(static.join(arrays)).values()
        ),
        example=(
            {name: np.zeros(shape) for name, shape in shapes.items()}
            if kernel.model is not None
            else jax.tree.map(lambda x: np.zeros(jnp.shape(x)), init)
        ),
    )


def _identity(kernel: Any, static: Static) -> Hashable:
    """The dependencies of a set-up's programs besides shapes; ``None`` if not known."""
    model = kernel._sampled_model
    content = None if model is None else content_of(model)
    if content is None:
        return None
    if kernel._run.refined is not None and known_content() is not None:
        return None  # the driver's key describes the original model
    key = content, static, kernel.layout, kernel._run.frozen_digest, kernel._weights
    try:
        hash(key)
    except TypeError:  # a traced temperature
        return None
    return key


def expand_likelihood(kernel: Any, problem: Problem, init: Any = None) -> Prepared:
    """Expand the likelihood for a control variate, and measure its residuals.

    :param kernel: the kernel.
    :param problem: the target and its data.
    :param init: where the first chain is to start, or ``None``.
    """
    layout, who, plates = kernel.layout, kernel._who, problem.plates
    scheme = kernel.batch
    sizes = {n: None if layout.automatic else w for n, w in layout.widths}
    if layout.automatic and max(plates.values()) < _FEW:
        if kernel._run.refined is None:  # else it has been said
            warnings.warn(
                f"{who}: with {sum(plates.values())} rows of data a minibatch does not "
                "pay, and all rows are read instead. Pass batch=batch.full() to avoid "
                "this warning, or a batch_size. NumPyro's NUTS may be faster.",
                UserWarning,
                stacklevel=find_stack_level(),
            )
        scheme, sizes = full(), dict(plates)
    start = _start_of_values(kernel, problem) if init is None else init
    chosen = Chosen(kernel.control_variate, scheme, sizes, start)
    return prepare(who, problem, chosen, kernel._needs)


def _start_of_values(kernel: Any, problem: Problem) -> Any:
    """The start that the user chose by ``init_to_value``, if there is one.

    Sites without a value in it have those of a draw from the prior.
    """
    strategy = kernel._init_strategy
    if not isinstance(strategy, partial) or strategy.func is not init_to_value:
        return None
    values = {
        name: np.asarray(value)
        for name, value in strategy.keywords["values"].items()
        if name in problem.example
    }
    return problem.compiled(_unconstrained)(values) if values else None


def _unconstrained(problem: Problem, arrays: list[Any], values: Any) -> Any:
    target = problem.target_of(arrays)
    assert isinstance(target, ModelTarget)
    with without_integrals():
        sites = target.trace(problem.one_row, data=values)
    return target.unconstrain(sites, list(problem.example))
