"""A NumPyro model as a target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost

from numpyro_minibatch._internal.precision import in_this_precision
from numpyro_minibatch.target._arguments import Slices, indexable, with_bound_arguments
from numpyro_minibatch.target._contract import (
    TRACES_ROWS,
    Indices,
    Parts,
    Position,
    Target,
    Terms,
    without_integrals,
)
from numpyro_minibatch.target._densities import log_prob as log_prob_of
from numpyro_minibatch.target._handlers import RowFrames, SetDeterministic, Subsample

__all__ = ["ModelTarget", "data_frames"]


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
        log_prob = log_prob_of(site["fn"], site["value"])
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
    :param by_row: deterministic sites in no plate whose values depend on the rows.
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
        key = jax.random.PRNGKey(0) if key is None else key
        model = handlers.seed(in_this_precision(self.model), key)
        if substitution:
            model = handlers.substitute(model, **substitution)
        model = handlers.substitute(model, data=dict(self.frozen))
        args, kwargs = self.args, dict(self.kwargs)
        if self.indexable:
            args, kwargs = jax.tree.map(indexable, (args, kwargs))
        given: Collection[str] = ()
        if self.slices is not None and indices:
            given = self.slices.plates
            args, kwargs = self.slices.take((args, kwargs), indices)
            model = RowFrames(model, self.slices, indices)
            indices = self.slices.by_plate(indices)
        model = Subsample(model, indices, given)
        token = TRACES_ROWS.set(True)
        try:
            return handlers.trace(model).get_trace(*args, **kwargs)
        finally:
            TRACES_ROWS.reset(token)

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
        count = getattr(self.model, "row_size", None)
        return 1 if count is None else int(count(self.args, self.kwargs))

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
