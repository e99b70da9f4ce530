"""Whether the data of a model follow the indices of its plates."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import (
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
)
from numpyro.infer import init_to_uniform
from numpyro.util import find_stack_level

from numpyro_minibatch._model.dataflow import (
    inputs_used,
    inspect_flow,
    part_of,
)
from numpyro_minibatch._model.plates import example_plate
from numpyro_minibatch._model.rowwise import trace_rows
from numpyro_minibatch._model.rowwise_rules import rows_of_plate
from numpyro_minibatch._model.sites import Site, own_sizes, static_site, values_missing
from numpyro_minibatch._model.values import (
    first_line,
    is_of_array,
    is_of_values,
    own_check,
)
from numpyro_minibatch.target import ModelTarget, Target, Terms, data_frames

__all__ = [
    "WHICH_FAILS",
    "NeedsValues",
    "NotIndexed",
    "OwnCheck",
    "check_flow",
    "check_indexing",
    "check_lined_up",
    "fails_on_rows",
    "inspect_target",
    "latent_of_rows",
    "not_indexed",
    "probe_indices",
]

WHICH_FAILS = "which fails: "
_DO_NOT_FOLLOW = "do not follow the indices"
# a warning about work on all rows is worth its noise from so many batches of rows on
_WIDE = 10


def fails_on_rows(error: ValueError) -> bool:
    """Whether a refusal is about a model that does not run on some of its rows.

    :param error: what :func:`inspect_model` raised.
    """
    return any(words in str(error) for words in (WHICH_FAILS, _DO_NOT_FOLLOW))


def inspect_target(who: str, target: Target, widths: Mapping[str, int], z: Any) -> None:
    """Check that a target written by hand gives one number per row.

    :param who: the kernel's name, for the messages.
    :param target: the target.
    :param widths: rows of one draw of each plate.
    :param z: a position.
    :raises ValueError: it does not.
    """
    probe = probe_indices(target.plates)
    rows = jax.eval_shape(lambda z, indices: target.terms(z, indices).rows, z, probe)
    for name, indices in probe.items():
        shape = getattr(rows.get(name), "shape", None)
        if shape != indices.shape:
            raise ValueError(
                f"{who}: log_likelihood(z, indices) of the target must return one "
                f"number for each of the indices of plate {name!r}, so for "
                f"{len(indices)} indices an array of shape {indices.shape}, and "
                f"returned {'nothing' if shape is None else f'shape {shape}'}. Index "
                "the data, y[indices], and do not sum over them."
            )
    check_flow(who, target, widths, z)


def not_indexed(
    who: str, problem: str, size: int, plate: str = "data", site: Site | None = None
) -> str:
    """The message for data that keep all of their rows in a plate.

    :param site: an observed site in the plate.
    """
    return (
        f"{who}: the data of the model {_DO_NOT_FOLLOW} of its plate "
        f"({problem}). Inside the plate, index every array, y[idx], or use "
        f"numpyro.subsample(y, event_dim=0):{example_plate(size, plate, site)}"
    )


def probe_indices(plates: Mapping[str, int]) -> dict[str, Any]:
    """Some rows per plate, two if there are more, without values: nothing is computed.

    All rows would not show which arrays follow the indices.
    """
    return {
        name: jax.ShapeDtypeStruct((max(1, min(2, size - 1)),), jnp.int32)
        for name, size in plates.items()
    }


class NeedsValues(TypeError):
    """The Python code of a model needs the values of its data."""


class OwnCheck(ValueError):
    """A check in the model itself does not hold for some of the rows."""


class NotIndexed(ValueError):
    """Data do not follow the indices; the error also has the problem by itself."""

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


def check_indexing(
    who: str,
    target: ModelTarget,
    plates: Mapping[str, int],
    as_written: Mapping[str, Site],
) -> tuple[str, ...]:
    """Run the model on some rows per plate: data that are not indexed do not fit.

    :return: the deterministic sites in no plate whose values depend on the rows.
    """
    problem = crossed = ""
    by_row: list[str] = []

    def run(indices: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal problem, crossed
        trace = target.trace(indices, substitute_fn=init_to_uniform())
        by_row.clear()
        for name, site in trace.items():
            written = as_written.get(name)
            if site["type"] == "deterministic" and written is not None:
                if jnp.shape(site["value"]) != written.value_shape:
                    by_row.append(name)
            is_latent = site["type"] == "sample" and not site["is_observed"]
            if is_latent and written is not None and target.slices is not None:
                if jnp.shape(site["value"]) != written.value_shape:
                    problem = problem or _latent_by_row(name, plates)
            if site["type"] == "sample" and site["is_observed"]:
                found = static_site(site)
                problem = problem or _shape_problem(found, plates)
                if not problem and found.inside(plates):
                    crossed = crossed or _crossed(found, as_written[found.name], plates)
        return {} if problem else target.site_rows(trace)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.eval_shape(run, probe_indices(plates))
    except (ValueError, TypeError, AssertionError, AttributeError) as error:
        if is_of_values(error) or is_of_array(error):
            args, kwargs = target.args, target.kwargs
            message = values_missing(who, target.model, args, kwargs, error)
            raise NeedsValues(message) from error
        if isinstance(error, AttributeError):
            raise
        if not any(size > 1 for size in plates.values()):
            raise
        if target.slices is not None and (line := own_check(error)):
            raise OwnCheck(
                f"{who}: the model does not index its data by a plate, so it is run on "
                f"some of the rows of its arguments, and then raises in {line}. Leave "
                "this check out, and make it before the run."
            ) from error
        few = "1 row" if max(plates.values()) == 2 else "2 rows"
        problem = f"on {few} the model fails with: {first_line(error)}"
    if problem:
        plate, size = next(iter(plates.items()))
        inside = (s for s in as_written.values() if s.observed and s.inside({plate}))
        message = not_indexed(who, problem, size, plate, next(inside, None))
        raise NotIndexed(message, problem)
    if crossed:
        raise ValueError(f"{who}: {crossed}")
    return (*by_row, *_of_rows(target, plates, by_row))


def _of_rows(
    target: ModelTarget, plates: Mapping[str, int], known: Collection[str]
) -> list[str]:
    """The deterministic sites in no plate that are a summary of the rows.

    Such as an average effect, ``p.mean()``: of one row it has the same shape, but not
    the same value.

    :param known: sites that need not be looked at.
    """
    names: list[str] = []

    def values(indices: Mapping[str, Array]) -> list[Any]:
        trace = target.trace(indices, substitute_fn=init_to_uniform())
        names[:] = [
            name
            for name, site in trace.items()
            if site["type"] == "deterministic"
            and name not in known
            and not data_frames(site, target.sizes)
        ]
        return [trace[name]["value"] for name in names]

    few = probe_indices(plates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = jax.make_jaxpr(values)(few)
        if not names:
            return []
        whole = {n: jax.ShapeDtypeStruct((k,), jnp.int32) for n, k in plates.items()}
        one = jax.make_jaxpr(values)(whole)
    facts = trace_rows(one, other, [(rows_of_plate(name),) for name in sorted(plates)])
    of_rows = set(other.jaxpr.invars)
    for eqn in other.jaxpr.eqns:
        if any(not hasattr(v, "val") and v in of_rows for v in eqn.invars):
            of_rows.update(eqn.outvars)
    # without any fact there is no proof, which does not say that values differ
    unproven = {k for k, fact in enumerate(facts) if fact is None}
    unproven = unproven if len(unproven) < len(facts) else set()
    return [
        name
        for k, (name, v) in enumerate(zip(names, other.jaxpr.outvars, strict=True))
        if k in unproven or (not hasattr(v, "val") and v in of_rows)
    ]


def latent_of_rows(
    sites: list[Site], latents: Collection[str], plates: Mapping[str, int]
) -> str:
    """The problem if a latent site has as many entries as a plate that fails."""
    for site in sites:
        for plate, size in plates.items():
            if site.name in latents and size > 1 and size in (site.value_shape or ()):
                return (
                    f"latent site {site.name!r} has {size} entries, as many as plate "
                    f"{plate!r} has rows. If its values are independent effects of the "
                    "rows, index it and the data inside the plate, "
                    f"{site.name}[idx] and y[idx]; of many rows, sample it inside the "
                    "plate and integrate it out: numpyro_minibatch.marginalize(model, "
                    f'sites=["{site.name}"]). If the rows have no value of their own, '
                    "index the data, y[idx]. If each value follows from others, as in "
                    "a Gaussian process or a random walk, there are no minibatches: "
                    "sample with NUTS."
                )
    return ""


def _latent_by_row(name: str, plates: Mapping[str, int]) -> str:
    size = next(iter(plates.values()))
    return f"latent site {name!r} has a value for each of the {size} rows"


def _crossed(site: Site, as_written: Site, plates: Mapping[str, int]) -> str:
    """The problem if each row of the data is paired with each of the distribution."""
    shapes = []
    for seen in (as_written, site):
        shape = jnp.broadcast_shapes(seen.shape, seen.value_shape or ())
        shapes.append(shape[: len(shape) - seen.event_dim])
    written, probed = shapes
    declared = {frame.dim for frame in site.frames}
    for axis in range(-min(len(written), len(probed)), 0):
        if axis not in declared and written[axis] != probed[axis]:
            return _CROSSED.format(site=site.name, shape=written, take="[idx]")
    return ""


_CROSSED = (
    "observed site {site!r} has shape {shape}: it has the rows twice, because "
    "its distribution and its data do not line up, as (n, 1) and (n,) do not. "
    "Give both one entry per row, for example y{take}[:, 0] or (X{take} @ beta)[:, 0]."
)


def check_lined_up(who: str, sites: list[Site], plates: Mapping[str, int]) -> None:
    """Raise if each row of the data is paired with each of the distribution.

    The rows then have two axes as well when the model is run on some of them, which may
    be all rows of one axis and some of the other.
    """
    for site in sites:
        if site.type != "sample" or not site.observed:
            continue
        shapes = [site.shape, site.value_shape or ()]
        shapes = [x[: len(x) - site.event_dim] for x in shapes]
        most = max(map(len, shapes))
        fn, value = ((1,) * (most - len(x)) + tuple(x) for x in shapes)
        whole = tuple(map(max, fn, value))  # of shapes that may not fit either
        declared = {frame.dim for frame in site.frames}
        for frame in site.inside(plates):
            twice = [a for a in range(-len(whole), 0) if whole[a] == frame.size > 1]
            other = [a for a in twice if a not in declared]
            if frame.dim in twice and other and _is_once(value, frame.size, twice):
                take = "[idx]" if own_sizes(sites) else ""
                text = _CROSSED.format(site=site.name, shape=whole, take=take)
                raise ValueError(f"{who}: {text}")


def _is_once(value: tuple[int, ...], size: int, axes: list[int]) -> bool:
    """Whether data have so many entries along one of the axes, and are repeated."""
    return sorted(value[a] for a in axes) == [1] * (len(axes) - 1) + [size]


def check_flow(
    who: str, target: Target, widths: Mapping[str, int], z: Any, parameters: bool = True
) -> bool:
    """Check whether a target uses data beyond the requested rows, and its parameters.

    :param parameters: whether the rows must depend on a parameter.
    :return: whether there was something to warn of.
    :raises ValueError: an array has fewer rows than its plate, or the likelihood of the
        rows depends on no parameter.
    """
    plates, probe = target.plates, probe_indices(target.plates)
    closed, shapes = jax.make_jaxpr(target.terms, return_shape=True)(z, probe)
    if parameters:
        _check_parameters(who, target, z, closed, shapes)
    indices = [None] * len(jax.tree.leaves(z)) + sorted(probe)
    found = inspect_flow(closed, plates, indices)
    for plate, rows, shape in found.short:
        raise ValueError(
            f"{who}: an array of shape {shape} is indexed by plate {plate!r}, which "
            f"has {plates[plate]} rows: beyond its {rows} entries JAX would silently "
            "repeat the last one. All arrays of a plate must have the same length, "
            "which is the size of the plate."
        )
    for plate, primitive in found.wide:
        if plates[plate] > _WIDE * widths[plate]:
            warnings.warn(
                f"{who}: the model computes on all {plates[plate]} rows of plate "
                f"{plate!r} ({primitive}) to use {widths[plate]} of them, at every "
                "step. The result is correct, but slow: index the data first, X[idx] @ "
                "beta instead of (X @ beta)[idx].",
                stacklevel=find_stack_level(),
            )
            return True
    return False


def _check_parameters(
    who: str, target: Target, z: Any, closed: Any, shapes: Terms
) -> None:
    """Raise if the likelihood of the rows depends on no parameter.

    :param closed: the jaxpr of the target's terms.
    :param shapes: the shapes of its outputs.
    """
    none = jax.tree.map(lambda _: False, shapes)
    marked = none._replace(rows=jax.tree.map(lambda _: True, shapes.rows))
    jaxpr = closed.jaxpr
    outputs = zip(jax.tree.leaves(marked), jaxpr.outvars, strict=True)
    rows = [v for of_rows, v in outputs if of_rows]
    part = part_of(jaxpr, jaxpr.constvars, jaxpr.invars, jaxpr.eqns, rows)
    parameters = jax.tree.leaves(z)
    used = inputs_used(closed.replace(jaxpr=part))[: len(parameters)]
    if any(used) or not parameters:
        return
    advice = (
        "A minibatch of such rows says nothing about the parameters. Check that the "
        "model uses its parameters"
    )
    if not isinstance(target, ModelTarget):
        raise ValueError(
            f"{who}: log_likelihood(z, indices) of the target does not depend on z. "
            f"{advice} where it computes the likelihood."
        )
    trace: dict[str, Any] = {}

    def run(indices: Mapping[str, Array]) -> None:
        trace.update(target.trace(indices, substitute_fn=init_to_uniform()))

    jax.eval_shape(run, probe_indices(target.plates))
    observed = [
        name
        for name, site in trace.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and data_frames(site, target.sizes)
    ]
    if any(_is_left_out(trace[name]["fn"]) for name in observed):
        return  # the prior, on purpose
    raise ValueError(
        f"{who}: no latent site enters the likelihood of the rows: observed "
        f"{_sites(observed)} {'does' if len(observed) == 1 else 'do'} not depend on "
        f"latent {_sites(z)}. {advice} in the distribution of the observations, or "
        "sample the model with NumPyro's NUTS."
    )


def _is_left_out(fn: Any) -> bool:
    """Whether a site is masked as a whole, by ``numpyro.handlers.mask(mask=False)``."""
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution) and fn._mask is False:
            return True
        fn = fn.base_dist
    return False


def _sites(names: Collection[str]) -> str:
    return f"site{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


def _shape_problem(site: Site, plates: Mapping[str, int]) -> str:
    for frame in site.inside(plates):
        size = plates[frame.name]
        axis = frame.dim - site.event_dim
        shape = site.value_shape or ()
        rows = shape[axis] if len(shape) >= -axis else 1
        if rows not in (1, frame.size):
            return (
                f"observed site {site.name!r} has {rows} rows of data for {frame.size} "
                f"indices of plate {frame.name!r}, which has {size} rows"
            )
    return ""
