"""Targets: a NumPyro model as a prior and one log likelihood per row.

This is the only module that uses NumPyro's effect handlers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_minibatch.host_rows import HostRows

__all__ = ["ModelTarget", "Target", "Terms"]

Position = Any  # a pytree of unconstrained parameters; a dict for a model
Indices = Mapping[str, Array]


class Terms(NamedTuple):
    """The terms of the log density at one position, not yet summed.

    All but ``rows`` are pytrees of log densities. They are not summed, because a
    difference of two large float32 sums is less accurate than the sum of differences.

    :param prior: the latent sites, and factors outside the data plates.
    :param rows: for each data plate the log likelihood of each requested row, shape
        ``(len(indices),)``.
    :param likelihood: observed sites outside the data plates, which are part of the
        likelihood and are always read in full.
    :param volume: log determinants of the maps to the unconstrained coordinates,
        which are never tempered.
    """

    prior: Any
    rows: dict[str, Array]
    likelihood: Any = ()
    volume: Any = ()

    @property
    def known(self) -> Array:
        """The log density of all but the rows, a scalar."""
        parts = jax.tree.leaves((self.prior, self.likelihood, self.volume))
        return sum((jnp.sum(part) for part in parts), jnp.zeros(()))


class Parts(NamedTuple):
    """Log densities by site, to find the dependencies of each site.

    :param rows: for each site with rows the log likelihood of each of them.
    :param fixed: the log density of every other site.
    :param plates: the data plate of each site with rows.
    """

    rows: dict[str, Array]
    fixed: dict[str, Array]
    plates: dict[str, str]


_WITHOUT_INTEGRALS: ContextVar[bool] = ContextVar("without integrals", default=False)


@contextmanager
def without_integrals() -> Iterator[None]:
    """Trace marginalized models with one value of each row's latent variables.

    The rows then have the log density at that value instead of its integral. Their
    shapes and dependencies are the same. It is useful if only these matter and not the
    values of the rows, because the search for the mode and the quadrature are most of
    the program.
    """
    token = _WITHOUT_INTEGRALS.set(True)
    try:
        yield
    finally:
        _WITHOUT_INTEGRALS.reset(token)


def integrates() -> bool:
    """Whether marginalized models integrate, see :func:`without_integrals`."""
    return not _WITHOUT_INTEGRALS.get()


_TRACES_ROWS: ContextVar[bool] = ContextVar("traces rows", default=False)


def traces_rows() -> bool:
    """Whether a model is being run by a :class:`ModelTarget`, perhaps on some rows."""
    return _TRACES_ROWS.get()


@dataclass(frozen=True)
class Target:
    """Two pure functions of an unconstrained position, and the number of rows.

    Written by hand, or built from a NumPyro model by the kernels.

    :param log_prior: ``log_prior(z)``, a scalar: the log density of the prior with
        respect to ``z`` itself, and everything else that is not a row.
    :param log_likelihood: ``log_likelihood(z, indices)``, the log likelihood of
        each of the rows ``indices`` (an int32 vector), shape ``(len(indices),)``.
        With several data plates ``indices`` is a dict ``{plate: vector}`` and so is
        the result.
    :param sizes: the number of rows; for several plates a dict ``{plate: rows}``.

    :raises ValueError: a size is not a positive integer.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import Target
        >>> y = jnp.array([0.5, 1.5, 1.0])
        >>> target = Target(
        ...     log_prior=lambda z: -0.5 * z**2,
        ...     log_likelihood=lambda z, i: -0.5 * (y[i] - z) ** 2,
        ...     sizes=3,
        ... )
        >>> terms = target.terms(jnp.array(1.0), {"data": jnp.array([0, 2])})
        >>> float(terms.known), terms.rows["data"].tolist()
        (-0.5, [-0.125, -0.0])
    """

    log_prior: Callable[[Position], Array]
    log_likelihood: Callable[[Position, Any], Any]
    sizes: int | Mapping[str, int]

    def __post_init__(self) -> None:
        if type(self) is Target and not self.plates:
            raise ValueError(
                "Target(sizes=...) must give the rows of at least one plate, got {}. "
                'Write sizes=1000, or sizes={"data": 1000}.'
            )
        for name, size in self.plates.items():
            if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"Target(sizes=...) must count the rows of plate {name!r} with a "
                    f"positive integer, got {size!r}."
                )

    def __hash__(self) -> int:
        plates = tuple(sorted(self.plates.items()))
        return hash((self.log_prior, self.log_likelihood, plates))

    @property
    def row_size(self) -> int:
        """The number of likelihood evaluations per row, by which chunks are smaller."""
        return 1

    @property
    def plates(self) -> dict[str, int]:
        """The number of rows of each data plate; one plate is called ``"data"``."""
        return (
            dict(self.sizes)
            if isinstance(self.sizes, Mapping)
            else {"data": self.sizes}
        )

    def terms(self, z: Position, indices: Indices) -> Terms:
        """The prior and the log likelihood of the rows ``indices`` at ``z``."""
        if isinstance(self.sizes, Mapping):
            return Terms(self.log_prior(z), dict(self.log_likelihood(z, indices)))
        rows = self.log_likelihood(z, indices["data"])
        return Terms(self.log_prior(z), {"data": rows})

    def rows(
        self, z: Position, indices: Indices, values: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """The log likelihood of the rows ``indices`` at ``z``.

        :param values: values that deterministic sites of a model are set to.
        """
        return self.terms(z, indices).rows

    def by_site(self, z: Position, indices: Indices) -> Parts:
        """Log densities by site, or by plate for a target written by hand."""
        terms = self.terms(z, indices)
        plates = {name: name for name in terms.rows}
        return Parts(terms.rows, {"log_prior": terms.known}, plates)


class Slices(NamedTuple):
    """The rows among a model's arguments, for a model that does not index them.

    Such a model runs on a batch by receiving only the rows of the batch.

    :param leaves: ``(number, plate, axis)`` of each array with rows, by its number
        among the leaves of ``(args, kwargs)``.
    :param sites: ``(site, plate, dim)`` of observed sites in no plate whose batch
        dimension ``dim`` is that of the rows.
    """

    leaves: tuple[tuple[int, str, int], ...]
    sites: tuple[tuple[str, str, int], ...] = ()

    @property
    def plates(self) -> set[str]:
        """The plates whose rows are passed to the model."""
        return {plate for _, plate, _ in self.leaves}

    def names(self, model: Callable, arguments: Any) -> list[str]:
        """The names of the arrays in the signature of the model.

        :param model: the model.
        :param arguments: its ``(args, kwargs)``.
        """
        leaves, treedef = flatten_arguments(arguments)
        numbers = jax.tree.unflatten(treedef, range(len(leaves)))
        names = {
            number: name + jax.tree_util.keystr(path)
            for name, tree in named_arguments(model, *numbers).items()
            for path, number in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        return [names[number] for number, _, _ in self.leaves]

    def take(self, arguments: Any, indices: Indices) -> Any:
        """A model's ``(args, kwargs)`` with only the rows ``indices``."""
        leaves, treedef = flatten_arguments(arguments)
        for number, plate, axis in self.leaves:
            x = leaves[number]
            if isinstance(x, HostRows) and x.in_place is not None:
                x = x.in_place
            if isinstance(x, HostRows):
                leaves[number] = x[indices[plate]]
                continue
            where = (slice(None),) * axis + (indices[plate],)
            # the indices of a batch are never out of range
            leaves[number] = jnp.asarray(x).at[where].get(mode="promise_in_bounds")
        return jax.tree.unflatten(treedef, leaves)


def flatten_arguments(arguments: Any) -> tuple[list[Any], Any]:
    """The leaves of a model's arguments; rows on the host are one leaf."""
    return jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, HostRows))


def named_arguments(
    model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A model's arguments by their names in its signature.

    :param model: the model.
    :param args: its positional arguments; ``args[i]`` is the name of one that the
        signature does not name.
    :param kwargs: its keyword arguments.
    """
    while isinstance(model, Messenger) and model.fn is not None:
        model = model.fn
    parameters: Iterable[inspect.Parameter] = ()
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(model).parameters.values()
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = [*positional, *(f"args[{i}]" for i in range(len(positional), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def with_bound_arguments(
    model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Callable, tuple, Mapping[str, Any]]:
    """A model with all of its arguments, those of ``functools.partial`` included.

    Arrays that a partial function holds can have rows like any other argument.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    """
    while isinstance(model, functools.partial):
        args, kwargs = (*model.args, *args), {**model.keywords, **kwargs}
        model = model.func
    return model, args, kwargs


class RowFrames(Messenger):
    """Mark a batch dimension of sites in no plate as the rows of one."""

    def __init__(self, fn: Callable, slices: Slices, indices: Indices) -> None:
        self.frames = {
            site: CondIndepStackFrame(plate, dim, len(indices[plate]))
            for site, plate, dim in slices.sites
        }
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.frames:
            frame = self.frames[msg["name"]]
            msg["cond_indep_stack"] = [*msg["cond_indep_stack"], frame]


class Subsample(Messenger):
    """Set the rows of each data plate, whatever its own ``subsample_size``.

    The plate reads its subsample size back from the message after the handlers
    ran, so setting both keeps its scale factor and its shapes consistent.

    :param fn: the model.
    :param indices: the rows of each data plate.
    :param given: plates for which the model received only these rows, which are then
        all rows that it sees.
    """

    def __init__(
        self, fn: Callable | None, indices: Indices, given: Collection[str] = ()
    ) -> None:
        self.indices = {
            name: jnp.arange(len(i), dtype=jnp.int32) if name in given else i
            for name, i in indices.items()
        }
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate" and msg["name"] in self.indices:
            indices = self.indices[msg["name"]]
            msg["value"] = indices
            msg["args"] = (msg["args"][0], len(indices))
        elif msg["type"] == "subsample":
            value, event_dim = msg["value"], msg["kwargs"]["event_dim"]
            if isinstance(value, HostRows) and value.in_place is not None:
                value = value.in_place  # as for data in memory
            found = _rows_in_plates(value, event_dim, self.indices)
            if found is not None:
                msg["value"] = found
                msg["kwargs"] = {"event_dim": None}  # plates subsample no more


class AllRows(Messenger):
    """Give plates with a ``subsample_size`` all of their rows, in their order.

    :param fn: the model, kept as ``as_written``.
    :param plates: the plates and their numbers of rows.
    """

    def __init__(self, fn: Callable, plates: Mapping[str, int]) -> None:
        self.as_written = fn
        self.plates = dict(plates)
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate" and msg["name"] in self.plates:
            size = msg["args"][0]
            # numbers, by which NumPy arrays can be indexed while JAX traces the model
            with jax.ensure_compile_time_eval():
                msg["value"], msg["args"] = jnp.arange(size), (size, size)


def _rows_in_plates(rows: Any, event_dim: int, drawn: Collection[str]) -> Any:
    """The result of ``numpyro.subsample(rows, event_dim)`` in the enclosing plates.

    NumPyro's plates check each index again, to fill rows that are out of range with
    NaN. A batch has no such rows, and for wide rows the check costs nearly as much as
    reading them.

    :param drawn: plates whose indices were drawn; even indices of all rows may be in
        another order.
    :return: the rows; ``None`` if an array does not fit a plate, which then raises.
    """
    value, shape = rows, jnp.shape(rows)
    plates = [p for p in numpyro.primitives._PYRO_STACK if isinstance(p, numpyro.plate)]
    # the plate of the first axis comes first; after that the rows are in memory
    for plate in sorted(plates, key=lambda plate: plate.dim):
        axis = plate.dim - event_dim + len(shape)
        if axis < 0 or shape[axis] == 1:
            continue
        if shape[axis] != plate.size:
            if not isinstance(rows, HostRows):
                return None
            raise ValueError(
                f"numpyro.subsample(x, event_dim={event_dim}) in plate "
                f"{plate.name!r} of {plate.size} rows got HostRows of shape "
                f"{shape}, which have {shape[axis]} along the plate's axis. "
                "Give the number of axes of one row as event_dim."
            )
        if axis == 0 and isinstance(value, HostRows):
            value = value[plate._indices]
        elif plate.subsample_size < plate.size or plate.name in drawn:
            if isinstance(value, HostRows):
                value = value[jnp.arange(len(value))]
            where = (slice(None),) * axis + (plate._indices,)
            value = jnp.asarray(value).at[where].get(mode="promise_in_bounds")
    return value


class SetDeterministic(Messenger):
    """Set the values of deterministic sites, so that later sites depend on them."""

    def __init__(self, fn: Callable, values: Mapping[str, Array]) -> None:
        self.values = values
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "deterministic" and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]


def _log_det_name(site: str) -> str:
    return f"_{site}_log_det"


def _unconstrained(z: Mapping[str, Array]) -> Callable:
    """A ``substitute_fn`` that maps ``z`` into each site's support.

    The log determinant of the map is emitted as an additional factor, inside the
    site's own plates and scales, so that it survives ``scan`` and ``cond``.
    """

    def substitute_fn(site: Any) -> Array | None:
        name = site["name"]
        if site["type"] != "sample" or name not in z:
            return None
        transform = biject_to(site["fn"].support)
        value = z[name]
        step = site["infer"].get("_scan_current_index")
        if step is not None:
            event_shift = transform.codomain.event_dim - transform.domain.event_dim
            if jnp.ndim(value) > len(site["fn"].shape()) - event_shift:
                value = value[step]
        constrained = transform(value)
        log_det = transform.log_abs_det_jacobian(value, constrained)
        extra = jnp.ndim(log_det) - jnp.ndim(constrained) + site["fn"].event_dim
        log_det = sum_rightmost(log_det, extra)
        numpyro.factor(_log_det_name(name), log_det)
        return constrained

    return substitute_fn


def _site_log_prob(site: Any) -> Array:
    intermediates = site["intermediates"]
    if intermediates:
        log_prob = site["fn"].log_prob(site["value"], intermediates)
    else:
        log_prob = site["fn"].log_prob(site["value"])
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def _rows_of(site: Any, frame: Any, size: int) -> Array:
    """The log likelihood of each row, without the plate's scale but with the user's."""
    # site["scale"] holds the plate's own size / batch as a factor of the user's scales
    scale = frame.size / size
    if isinstance(site["scale"], int | float):
        scale = site["scale"] * scale
        site = {**site, "scale": None}
    log_prob = _site_log_prob(site)
    if abs(scale - 1.0) > 1e-12:
        log_prob = log_prob * scale
    shape = jnp.broadcast_shapes(jnp.shape(log_prob), tuple(site["fn"].batch_shape))
    rows = jnp.moveaxis(jnp.broadcast_to(log_prob, shape), frame.dim, 0)
    return rows.reshape(rows.shape[0], -1).sum(-1)


def _indexable(leaf: Any) -> Any:
    """Convert to a JAX array, because a traced batch cannot index NumPy arrays."""
    numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
    if not numeric:
        return leaf
    # With the precision by name: JAX remembers constants by the identity of their
    # arrays, and would return the float64 numbers of a trace in double precision here.
    return jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def data_frames(site: Any, plates: Mapping[str, int]) -> list[Any]:
    """The frames of ``site`` that belong to data plates."""
    return [f for f in site["cond_indep_stack"] if f.name in plates]


@dataclass(frozen=True)
class ModelTarget(Target):
    """The target of a NumPyro model at given arguments.

    :param model: the model, a callable with NumPyro primitives.
    :param args: positional arguments of the model, the data among them.
    :param kwargs: keyword arguments of the model.
    :param frozen: values of ``param`` sites, fixed at setup, because a model draws new
        ones each time it runs.
    :param sizes: the number of rows of each data plate.
    :param slices: the rows among the arguments, if the model does not index them.
    :param by_row: deterministic sites in no plate that have a value for each row.
    :param indexable: whether NumPy arrays among the arguments become JAX arrays, which
        a batch can index.
    """

    log_prior: Any = field(init=False, default=None)
    log_likelihood: Any = field(init=False, default=None)
    sizes: Mapping[str, int] = field(default_factory=dict)
    model: Callable = field(kw_only=True)
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    frozen: Mapping[str, Any] = field(default_factory=dict)
    slices: Slices | None = None
    by_row: tuple[str, ...] = ()
    indexable: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        model, args, kwargs = with_bound_arguments(self.model, self.args, self.kwargs)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)

    def trace(
        self, indices: Indices, key: Array | None = None, **substitution: Any
    ) -> dict[str, Any]:
        """Run the model on the rows ``indices`` and return its sites.

        :param indices: the rows of each data plate.
        :param key: PRNG key for sites that are not substituted; by default a fixed
            one, because everything random in the target is substituted.
        :param substitution: ``data=`` or ``substitute_fn=`` of
            :class:`numpyro.handlers.substitute` for the latent sites.
        """
        # seed innermost: an init strategy reads the site's key
        model = handlers.seed(self.model, jax.random.PRNGKey(0) if key is None else key)
        if substitution:
            model = handlers.substitute(model, **substitution)
        model = handlers.substitute(model, data=dict(self.frozen))
        args, kwargs = self.args, dict(self.kwargs)
        if self.indexable:
            args, kwargs = jax.tree.map(_indexable, (args, kwargs))
        given: Collection[str] = ()
        if self.slices is not None and indices:
            given = self.slices.plates
            args, kwargs = self.slices.take((args, kwargs), indices)
            model = RowFrames(model, self.slices, indices)
        model = Subsample(model, indices, given)
        token = _TRACES_ROWS.set(True)
        try:
            return handlers.trace(model).get_trace(*args, **kwargs)
        finally:
            _TRACES_ROWS.reset(token)

    def site_rows(self, sites: Mapping[str, Any]) -> dict[str, Array]:
        """The log likelihood of each row, for each observed site of a data plate."""
        rows = {}
        for name, site in sites.items():
            if site["type"] == "sample":
                for frame in data_frames(site, self.sizes):
                    # in a model that receives rows, the plate has only these
                    plate = sites.get(frame.name, {"type": ""})
                    is_plate = plate["type"] == "plate"
                    size = plate["args"][0] if is_plate else frame.size
                    rows[name] = _rows_of(site, frame, size)
        return rows

    @property
    def row_size(self) -> int:
        """The model's own value, if it has one, as marginalized models do."""
        return int(getattr(self.model, "row_size", 1))

    def __hash__(self) -> int:
        return id(self)  # arrays among the arguments have no hash

    def sites_at(self, z: Position, indices: Indices) -> dict[str, Any]:
        """The sites of the model on the rows ``indices`` at ``z``."""
        return self.trace(indices, substitute_fn=_unconstrained(z))

    def by_site(self, z: Position, indices: Indices) -> Parts:
        """Log densities by site."""
        sites = self.sites_at(z, indices)
        rows = self.site_rows(sites)
        fixed = {
            name: _site_log_prob(site)
            for name, site in sites.items()
            if site["type"] == "sample" and name not in rows
        }
        plates = {name: data_frames(sites[name], self.sizes)[0].name for name in rows}
        return Parts(rows, fixed, plates)

    def terms(self, z: Position, indices: Indices) -> Terms:
        """The prior and the log likelihood of the rows ``indices`` at ``z``."""
        sites = self.sites_at(z, indices)
        return self._terms(sites, {_log_det_name(name) for name in z})

    def terms_of_draw(self, draw: Mapping[str, Array], indices: Indices) -> Terms:
        """The terms at values of the latent sites, with respect to these values."""
        return self._terms(self.trace(indices, data=dict(draw)), set())

    def _by_plate(
        self, sites: Mapping[str, Any], by_site: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """The log likelihood of each row, summed over the sites of a plate."""
        rows: dict[str, Array] = {}
        by_site = self.site_rows(sites) if by_site is None else by_site
        for name, row in by_site.items():
            plate = data_frames(sites[name], self.sizes)[0].name
            rows[plate] = rows[plate] + row if plate in rows else row
        return rows

    def _terms(self, sites: Mapping[str, Any], log_dets: set[str]) -> Terms:
        by_site = self.site_rows(sites)
        rows = self._by_plate(sites, by_site)
        terms = Terms(prior=[], rows=rows, likelihood=[], volume=[])
        for name, site in sites.items():
            # A factor may belong to prior or likelihood. Outside the data plates it
            # counts as part of the prior.
            if name not in by_site and site["type"] == "sample":
                factor = site["infer"].get("is_auxiliary", False)
                likelihood = site["is_observed"] and not factor
                part = terms.likelihood if likelihood else terms.prior
                part = terms.volume if name in log_dets else part
                part.append(_site_log_prob(site))
        return terms

    def rows(
        self, z: Position, indices: Indices, values: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """The log likelihood of the rows ``indices`` at ``z``.

        :param values: values that deterministic sites are set to.
        """
        target = self
        if values:
            target = replace(self, model=SetDeterministic(self.model, values))
        # without the prior, which :meth:`terms` would add to the program
        return target._by_plate(target.sites_at(z, indices))

    def deterministic(self, z: Position) -> dict[str, Array]:
        """The values of the deterministic sites outside the data plates at ``z``."""
        values = self.constrain(z)
        return {name: value for name, value in values.items() if name not in z}

    def constrain(self, z: Position) -> dict[str, Array]:
        """The model's latent and deterministic values at ``z``.

        Deterministic sites inside a data plate are left out, because they have a value
        per row. One row per plate is enough to replay the model.
        """
        one_row = {name: jnp.zeros(1, jnp.int32) for name in self.sizes}
        with without_integrals():
            sites = self.trace(one_row, substitute_fn=_unconstrained(z))
        return {
            name: site["value"]
            for name, site in sites.items()
            if name in z
            or (
                site["type"] == "deterministic"
                and name not in self.by_row
                and not data_frames(site, self.sizes)
            )
        }

    def draw_prior(self, key: Array) -> dict[str, Array]:
        """The unconstrained values of the latent sites in a draw from the prior.

        :param key: PRNG key.
        """
        one_row = {name: jnp.zeros(1, jnp.int32) for name in self.sizes}
        with without_integrals():
            sites = self.trace(one_row, key)
        latents = [
            name
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"]
        ]
        return self.unconstrain(sites, latents)

    def unconstrain(self, sites: Mapping[str, Any], latents: Any) -> dict[str, Array]:
        """The unconstrained values of the ``latents`` in a trace."""
        return {
            name: biject_to(sites[name]["fn"].support).inv(sites[name]["value"])
            for name in latents
        }
