"""User mistakes found before anything compiles: which plates, which rows, what shapes.

Everything here runs the model abstractly, so that it costs no arithmetic on the data.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import MaskedDistribution, biject_to
from numpyro.distributions.distribution import ExpandedDistribution, Independent
from numpyro.infer import init_to_uniform
from numpyro.primitives import CondIndepStackFrame
from numpyro.util import find_stack_level

from numpyro_minibatch._internal.static import Static, digest
from numpyro_minibatch._model.dataflow import inspect_flow
from numpyro_minibatch._model.row_axes import NamedRows, RowAxes, suggestion
from numpyro_minibatch._model.values import NEEDS_VALUES, first_line, needs_values
from numpyro_minibatch.host_rows import HostRows, find_rows, map_rows
from numpyro_minibatch.target import (
    ModelTarget,
    Slices,
    Subsample,
    Target,
    data_frames,
    flatten_arguments,
)

__all__ = [
    "Layout",
    "LocalSites",
    "check_prior",
    "explained",
    "fails_on_rows",
    "find_nan",
    "inspect_model",
    "inspect_target",
    "known_content",
    "layout_target",
    "local_sites",
    "remembered",
]

# distributions whose entries depend on each other
_PROCESSES = {
    "CAR",
    "CirculantNormal",
    "EulerMaruyama",
    "GaussianRandomWalk",
    "GaussianStateSpace",
    "LowRankMultivariateNormal",
    "MultivariateNormal",
}
_WHICH_FAILS = "which fails: "
_DO_NOT_FOLLOW = "do not follow the indices"

# a warning about work on all rows is worth its noise from so many batches of rows on
_WIDE = 10


class Layout(NamedTuple):
    """What is known of a model before it runs; static and hashable.

    :param plates: the data plates and their numbers of rows.
    :param widths: the rows of one draw of each data plate.
    :param latents: the latent sites.
    :param shapes: the shapes of their unconstrained values.
    :param value_shapes: the shapes of their constrained values.
    :param automatic: whether neither the user nor the model says how many rows a draw
        has.
    :param slices: the rows among the arguments, where the model takes none by indices.
    :param by_row: deterministic sites in no plate that have a value for each row.
    :param subsampled: whether plates of the model have a ``subsample_size``.
    """

    plates: tuple[tuple[str, int], ...]
    widths: tuple[tuple[str, int], ...]
    latents: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    value_shapes: tuple[tuple[int, ...], ...] = ()
    automatic: bool = False
    slices: Slices | None = None
    by_row: tuple[str, ...] = ()
    subsampled: bool = False


class LocalSites(NamedTuple):
    """The latent sites in plates that hold observations.

    :param discrete: those with a finite support, if all discrete sites of the model are
        of this kind; otherwise empty.
    :param continuous: the others.
    """

    discrete: tuple[str, ...] = ()
    continuous: tuple[str, ...] = ()


class Site(NamedTuple):
    """The static part of a site of a trace."""

    name: str
    type: str
    observed: bool
    auxiliary: bool
    discrete: bool
    frames: tuple[Any, ...]
    value_shape: tuple[int, ...] | None
    shape: tuple[int, ...]
    free_shape: tuple[int, ...]
    event_dim: int
    scaled: bool
    args: tuple[Any, ...]
    kind: str = ""
    in_scan: bool = False
    enumerable: bool = False

    def inside(self, plates: Collection[str]) -> list[Any]:
        """The frames of this site that belong to ``plates``."""
        return [f for f in self.frames if f.name in plates]


# what was found of models that a driver told the content of; it holds no data
_FOUND: WeakKeyDictionary[Callable, OrderedDict[Hashable, Layout]] = WeakKeyDictionary()
_MOST_FOUND = 8  # of each model
_CONTENT: ContextVar[str | None] = ContextVar("content of a model", default=None)


@contextmanager
def remembered(content: str) -> Iterator[None]:
    """Have models inspected once only, for arguments of the same shapes.

    :param content: a digest of the model and of what it reads from its surroundings.
    """
    token = _CONTENT.set(content)
    try:
        yield
    finally:
        _CONTENT.reset(token)


def known_content() -> str | None:
    """What a driver told of the content of the model; ``None`` where there is none."""
    return _CONTENT.get()


def content_of(model: Callable) -> str | None:
    """A digest of a model and of what it reads from its surroundings, if it has one.

    :param model: the model.
    """
    told = known_content()
    if told is not None:
        return told
    try:
        return digest(model)
    except Exception:  # it reads something of its author's that cannot be read here
        return None


def inspect_model(
    who: str,
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    sizes: int | Mapping[str, int] | None,
    full: bool = False,
    default: int | None = None,
    whole: bool = False,
    rows: RowAxes | None = None,
) -> tuple[Layout, dict[str, Any]]:
    """Find the data plates of a model and check that they can be subsampled.

    :param who: the kernel's name, for the messages.
    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param sizes: rows of one draw, as the user gave them.
    :param full: whether they are chunks of the full batch.
    :param default: rows of one draw where neither the user nor the model says.
    :param whole: whether the model is run on all rows in one piece, so that only the
        plates that it subsamples itself have to be known, if any.
    :param rows: the arguments that have the rows, if the user names them.
    :return: the layout, and the values of ``param`` sites to freeze.
    :raises ValueError: the model cannot be sampled from minibatches; the message says
        what was found and what to write instead.
    """
    options = who, _hashable(sizes), full, default, whole, rows
    key = _known_by(args, kwargs, options)
    try:
        found = _FOUND.setdefault(model, OrderedDict()) if key is not None else {}
    except TypeError:  # it cannot be referred to weakly
        found = {}
    if key in found:
        return found[key], {}
    layout, frozen, warned = _inspected(
        who, model, args, kwargs, sizes, full, default, whole, rows
    )
    # `param` sites may depend on the values of the data
    if key is not None and not frozen and not warned:
        found[key] = layout
        while len(found) > _MOST_FOUND:
            found.pop(next(iter(found)))
    return layout, frozen


def _hashable(sizes: int | Mapping[str, int] | None) -> Hashable:
    return tuple(sorted(sizes.items())) if isinstance(sizes, Mapping) else sizes


def _known_by(
    args: tuple, kwargs: Mapping[str, Any], options: tuple[Hashable, ...]
) -> Hashable:
    """What the layout of a model depends on; ``None`` where that is not known."""
    content = known_content()
    if content is None:
        return None
    # of rows on the host what a model can see of them
    plain = map_rows(lambda x: ("rows", x.shape, str(x.dtype)), (args, dict(kwargs)))
    static, arrays = Static.split(*plain)
    shapes = tuple(
        (type(x).__name__, x.shape, str(x.dtype), bool(getattr(x, "weak_type", False)))
        for x in arrays
    )
    real = str(jnp.result_type(float))
    return content, static.treedef, digest(static.leaves), shapes, real, *options


def _inspected(
    who: str,
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    sizes: int | Mapping[str, int] | None,
    full: bool,
    default: int | None,
    whole: bool,
    named: RowAxes | None = None,
) -> tuple[Layout, dict[str, Any], bool]:
    """What :func:`inspect_model` finds, and whether it had a warning to give."""
    target = ModelTarget(model=model, args=args, kwargs=kwargs, sizes={})
    sites, frozen = _sites_as_written(who, target)
    # the parameters of a random_flax_module are read for their shapes alone
    left = [
        name
        for name in frozen
        if not any(s.name.startswith(name.removesuffix("$params") + "/") for s in sites)
    ]
    if left:
        warnings.warn(
            f"{who}: numpyro.param sites are not sampled, and keep the values that "
            f"they have at the start: {', '.join(map(repr, left))}. Give them a "
            "prior with numpyro.sample (random_flax_module for a network) to sample "
            "them.",
            stacklevel=find_stack_level(),
        )
    slices = given = None
    if whole:
        names = {s.name: s.args[0] for s in sites if s.name in _own_sizes(sites)}
        widths, plates = names, names
    else:
        if named is not None:
            given = named.find(who, target.model, target.args, target.kwargs)
        lengths = None if given is None else {x.size for x in given}
        sites, rows = with_row_plate(target, sites, lengths)
        widths, plates = _choose_plates(who, sites, sizes, full, default)
    latents = _check_sites(who, sites, plates)
    target = replace(target, sizes=plates, frozen=frozen)
    by_name = {site.name: site for site in sites}
    if named is not None and given is not None:
        who_names = f"{who}(rows={named!r})"
        own = [name for name in _own_sizes(sites) if name in plates]
        target, by_row = _named_rows(
            who_names, target, plates, by_name, rows, given, own
        )
    elif not whole and rows and rows[0][1] in plates:
        target, by_row = _given_rows(who, target, plates, by_name, rows)
    else:
        try:
            by_row = _check_indexing(who, target, plates, by_name)
        except ValueError as error:
            if isinstance(error, _NotIndexed):
                error = ValueError(str(error)).with_traceback(error.__traceback__)
            if whole or _own_sizes(sites):
                raise error from None
            taken = find_slices(who, target, plates, by_name, ())
            if isinstance(taken, str):
                held = _conditioned(model, by_name)
                if held:
                    raise ValueError(_condition_holds(who, held)) from None
                local = _latent_of_rows(sites, latents, plates)
                if local:
                    raise ValueError(f"{who}: {local}") from None
                raise error from None
            target, by_row = taken
    slices = target.slices
    found = {site.name: site for site in sites if site.name in latents}
    z = {
        name: jax.ShapeDtypeStruct(site.free_shape, jnp.result_type(float))
        for name, site in found.items()
    }
    warned = _check_flow(who, target, widths, z)
    ordered = tuple(sorted(plates.items()))
    layout = Layout(
        ordered,
        tuple((n, widths[n]) for n, _ in ordered),
        latents,
        tuple(found[name].free_shape for name in latents),
        tuple(found[name].value_shape or () for name in latents),
        default is not None and sizes is None and not full and not _own_sizes(sites),
        slices,
        by_row,
        bool(_own_sizes(sites)),
    )
    return layout, frozen, warned


def fails_on_rows(error: ValueError) -> bool:
    """Whether a refusal is about a model that does not run on some of its rows.

    :param error: what :func:`inspect_model` raised.
    """
    return any(words in str(error) for words in (_WHICH_FAILS, _DO_NOT_FOLLOW))


def local_sites(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> LocalSites:
    """The latent sites of a model that have a value for each row or group of rows.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :return: no sites if the model does not run.
    """
    target = ModelTarget(model=model, args=args, kwargs=kwargs, sizes={})
    try:
        sites, _ = _abstract_sites(target)
    except Exception:  # the refusal that is being considered says why
        return LocalSites()
    samples = [s for s in sites if s.type == "sample"]
    holding = [{f.name for f in s.frames} for s in samples if s.observed]

    def is_local(site: Site) -> bool:
        plates = {f.name for f in site.frames}
        return bool(plates) and any(plates <= held for held in holding)

    latent = [s for s in samples if not s.observed]
    local = [s for s in latent if is_local(s)]
    discrete = tuple(s.name for s in local if s.discrete)
    summable = all(s.enumerable and is_local(s) for s in latent if s.discrete)
    continuous = tuple(s.name for s in local if not s.discrete)
    return LocalSites(discrete if summable else (), continuous)


def layout_target(
    who: str,
    target: Target,
    sizes: int | Mapping[str, int] | None,
    full: bool,
    default: int | None = None,
) -> Layout:
    """The layout of a target that was written by hand.

    :param who: the kernel's name, for the messages.
    :param target: the target.
    :param sizes: rows of one draw, as the user gave them.
    :param full: whether every decision reads all rows.
    :param default: rows of one draw where the user does not say.
    :raises ValueError: the sizes do not fit the target's plates.
    """
    plates = target.plates
    widths = dict(sizes) if isinstance(sizes, Mapping) else dict.fromkeys(plates, sizes)
    unknown = set(widths) - set(plates)
    if unknown:
        raise ValueError(
            f"{who} got batch_size for plate {min(unknown)!r}, which the target does "
            f"not have; its plates are: {', '.join(plates)}."
        )
    if full:
        widths = dict(plates)
    bound = []
    for plate, rows in sorted(plates.items()):
        width = widths.get(plate)
        if width is None and default is not None:
            width = min(default, rows)
        if width is None:
            raise ValueError(
                f"{who} needs a batch_size for plate {plate!r} of the target, which "
                f"has {rows} rows: pass for example batch_size="
                f"{{{plate!r}: {max(2, min(100, rows // 10))}}}."
            )
        if width > rows:
            raise ValueError(
                f"{who} got batch_size={width} for plate {plate!r}, which has only "
                f"{rows} rows. Use at most {rows}, the full batch."
            )
        bound.append((plate, width))
    automatic = default is not None and sizes is None and not full
    return Layout(tuple(sorted(plates.items())), tuple(bound), (), automatic=automatic)


def inspect_target(who: str, target: Target, widths: Mapping[str, int], z: Any) -> None:
    """Check that a target written by hand gives one number per row.

    :param who: the kernel's name, for the messages.
    :param target: the target.
    :param widths: rows of one draw of each plate.
    :param z: a position.
    :raises ValueError: it does not.
    """
    probe = _probe(target.plates)
    rows = jax.eval_shape(lambda z, indices: target.terms(z, indices).rows, z, probe)
    for name, indices in probe.items():
        shape = getattr(rows.get(name), "shape", None)
        if shape != indices.shape:
            raise ValueError(
                f"{who}: log_likelihood(z, indices) of the target must return one "
                f"number for each of the indices of plate {name!r}, so for "
                f"{len(indices)} indices an array of shape {indices.shape}, and "
                f"returned {'nothing' if shape is None else f'shape {shape}'}. Take "
                "the data by the indices, y[indices], and do not sum over them."
            )
    _check_flow(who, target, widths, z)


def check_prior(who: str, target: ModelTarget) -> None:
    """Raise unless running the model draws its latent sites from its prior.

    :param who: the kernel's name, for the messages.
    :param target: the model's target.
    :raises ValueError: its prior cannot be drawn from, or has other factors.
    """
    problem = ""

    def run(key: Array) -> None:
        nonlocal problem
        one_row = {name: jnp.zeros(1, jnp.int32) for name in target.sizes}
        for name, site in target.trace(one_row, key).items():
            if site["type"] != "sample" or data_frames(site, target.sizes):
                continue
            if site["is_observed"] and site["infer"].get("is_auxiliary", False):
                problem = f"the factor {name!r} changes the prior"
            elif not site["is_observed"] and site["scale"] is not None:
                problem = f"site {name!r} has a scale"
            elif not site["is_observed"] and isinstance(site["fn"], MaskedDistribution):
                problem = f"site {name!r} has a mask"

    try:
        jax.eval_shape(run, jax.random.PRNGKey(0))
    except NotImplementedError:
        problem = "a latent site has a distribution without draws (ImproperUniform?)"
    if problem:
        raise ValueError(
            f"{who}(temperatures=[..., inf]) makes draws of the prior at the hottest "
            f"rung, which running this model does not: {problem}. Change the model, or "
            "end the ladder at a finite temperature."
        )


@contextmanager
def explained(
    who: str, model: Any, args: tuple, kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Say what to write instead where a model cannot be traced by JAX.

    :param who: the kernel's name, for the messages.
    :param model: the model.
    :param args: the model's positional arguments.
    :param kwargs: its keyword arguments.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError) as error:
        unusable = _unusable(args, kwargs)
        if unusable:
            raise TypeError(
                f"{who} cannot run the model, which got {', '.join(unusable)}: data "
                "must be NumPy or JAX arrays of numbers. Convert them with "
                f"numpy.asarray first. ({first_line(error)})"
            ) from error
        if isinstance(error, NEEDS_VALUES):
            raise TypeError(needs_values(who, model, error)) from error
        raise


def _unusable(args: tuple, kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments of a model that look like data but are not arrays of numbers."""
    found = []
    for name, value in [*((f"args[{i}]", x) for i, x in enumerate(args))] + [
        *kwargs.items()
    ]:
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            found.append(f"{name} of dtype {value.dtype}")
        elif isinstance(value, list) or hasattr(value, "iloc"):
            found.append(f"{name} of type {type(value).__name__}")
    return found


def _static(site: Any) -> Site:
    fn = site.get("fn")
    value = site.get("value")
    sample = site["type"] == "sample"
    return Site(
        name=site["name"],
        type=site["type"],
        observed=bool(site.get("is_observed", False)),
        auxiliary=bool(site.get("infer", {}).get("is_auxiliary", False)),
        discrete=bool(sample and fn.support is not None and fn.support.is_discrete),
        frames=tuple(site.get("cond_indep_stack", ())),
        value_shape=(
            jnp.shape(value) if sample or site["type"] == "deterministic" else None
        ),
        shape=tuple(fn.shape()) if sample else (),
        free_shape=_free_shape(fn, value) if sample else (),
        event_dim=fn.event_dim if sample else 0,
        scaled=site.get("scale") is not None,
        args=tuple(site.get("args", ())),
        kind=_kind(fn) if sample else "",
        in_scan=bool(site.get("_control_flow_done", False))
        and "_scan_current_index" in site.get("infer", {}),
        enumerable=bool(sample and fn.has_enumerate_support),
    )


def _kind(fn: Any) -> str:
    """The class of a distribution, and whether it is an event by ``to_event``."""
    independent = ""
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        independent = ".to_event" if isinstance(fn, Independent) else independent
        fn = fn.base_dist
    return type(fn).__name__ + independent


def _free_shape(fn: Any, value: Any) -> tuple[int, ...]:
    """The shape of the unconstrained value of a site."""
    if fn.support is None or fn.support.is_discrete:
        return jnp.shape(value)
    return tuple(biject_to(fn.support).inverse_shape(jnp.shape(value)))


class _AllRows(Subsample):
    """Give each plate all its rows, and note the subsample size that it asked for."""

    def __init__(self, fn: Callable) -> None:
        super().__init__(fn, {})
        self.asked: dict[str, tuple[int, int]] = {}

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            self.asked[msg["name"]] = (size, subsample_size)
            msg["value"] = jnp.arange(size)
            msg["args"] = (size, size)


def _sites_as_written(
    who: str, target: ModelTarget
) -> tuple[list[Site], dict[str, Any]]:
    """The sites of a model that runs as written; where it does not run, say why."""
    try:
        with explained(who, target.model, target.args, target.kwargs):
            return _abstract_sites(target)
    except (ValueError, TypeError, AssertionError) as error:
        if isinstance(error.__cause__, NEEDS_VALUES):
            _raise_reason_by_values(who, target)
        if find_rows((target.args, dict(target.kwargs))):
            try:
                found = _abstract_sites(target, in_memory=True)
            except (ValueError, TypeError, AssertionError):
                raise error from None
            if _own_sizes(found[0]):
                raise  # it takes rows by indices, and yet needs all of them
            return found
        model = _AllRows(target.model)
        try:
            _abstract_sites(
                ModelTarget(model=model, args=target.args, kwargs=target.kwargs)
            )
            runs = True
        except Exception:
            runs = False
        asked = {n: a for n, a in model.asked.items() if a[1] not in (None, a[0])}
        for name, (size, subsample_size) in asked.items():
            if subsample_size < 1:
                raise ValueError(
                    f"plate {name!r} has subsample_size={subsample_size}. Write a "
                    f"number of its {size} rows, at least 2."
                ) from error
            if runs:
                problem = (
                    f"with all {size} rows the model runs, with {subsample_size} it "
                    f"fails: {first_line(error)}"
                )
                raise ValueError(_not_indexed(who, problem, size)) from error
        if isinstance(error, AssertionError):
            raise ValueError(f"{who} cannot run the model: {error}.") from error
        raise


def _raise_reason_by_values(who: str, target: ModelTarget) -> None:
    """Raise if a model that needs the values of its data has no rows to subsample.

    That is the reason then, and passing numbers instead of values is of no use.
    """

    def known(x: Any) -> Any:
        return np.asarray(x) if isinstance(x, Array) else x

    try:
        args, kwargs = jax.tree.map(known, (target.args, dict(target.kwargs)))
        target = replace(target, args=args, kwargs=kwargs, indexable=False)
        sites = with_row_plate(target, _abstract_sites(target)[0])[0]
    except Exception:  # it needs values that are computed
        return
    _choose_plates(who, sites, None, False, 1)


def _abstract_sites(
    target: ModelTarget, in_memory: bool = False
) -> tuple[list[Site], dict[str, Any]]:
    """The sites of a model that runs as written, and its ``param`` values.

    :param in_memory: whether rows on the host are taken for arrays in memory, as a
        model has them that is given rows of its arguments.
    """
    found: list[Site] = []

    def described(x: Any) -> Any:
        if in_memory and isinstance(x, HostRows):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x

    leaves, treedef = flatten_arguments(_arguments(target))
    on_host = [isinstance(x, HostRows) and in_memory for x in leaves]

    def run(*arrays: Any) -> dict[str, Any]:
        found.clear()
        given = iter(arrays)
        filled = [
            next(given) if yes else x for x, yes in zip(leaves, on_host, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        filled_target = replace(target, args=args, kwargs=kwargs)
        trace = filled_target.trace({}, substitute_fn=init_to_uniform())
        found.extend(_static(site) for site in trace.values())
        return {n: s["value"] for n, s in trace.items() if s["type"] == "param"}

    with warnings.catch_warnings():
        # what the message below says better
        warnings.filterwarnings("ignore", "subsample_size does not match")
        arrays = [described(x) for x, yes in zip(leaves, on_host, strict=True) if yes]
        frozen = jax.eval_shape(run, *arrays)
    if arrays and jax.tree.leaves(frozen):
        raise ValueError(
            "HostRows need a model that takes them by the indices of a plate if it has "
            "numpyro.param sites, too."
        )
    if jax.tree.leaves(frozen):
        # every chain must share these values, so they come from a fixed key and are
        # computed for real even where the kernel is being initialised under a transform
        with jax.ensure_compile_time_eval():
            frozen = jax.jit(run)()
    return found, frozen


def _example(size: int, plate: str = "data") -> str:
    return (
        f'\n    with numpyro.plate("{plate}", {size}) as idx:'
        '\n        numpyro.sample("obs", dist.Normal(X[idx] @ beta, 1.0), obs=y[idx])'
        f'\nand pass batch_size={{"{plate}": {_rows_of_batch(size)}}}.'
    )


def _not_indexed(who: str, problem: str, size: int) -> str:
    return (
        f"{who}: the data of the model {_DO_NOT_FOLLOW} of its plate "
        f"({problem}). Inside the plate take every array by its indices, or by "
        f"numpyro.subsample(y, event_dim=0):{_example(size)}"
    )


def _own_sizes(sites: list[Site]) -> dict[str, int]:
    """The plates that the model itself subsamples, and their sizes."""
    plates = {s.name: s.args for s in sites if s.type == "plate"}
    return {
        name: args[1]
        for name, args in plates.items()
        if len(args) > 1 and args[1] is not None and args[1] != args[0]
    }


def _choose_plates(
    who: str,
    sites: list[Site],
    sizes: int | Mapping[str, int] | None,
    full: bool,
    default: int | None = None,
) -> tuple[dict[str, int], dict[str, int]]:
    plates = {s.name: s.args for s in sites if s.type == "plate"}
    own = _own_sizes(sites)
    listing = ", ".join(f"{n!r} ({a[0]} rows)" for n, a in plates.items()) or "none"
    # sorted: the message must not depend on the hashes of strings
    in_scan = sorted({f.name for s in sites for f in s.frames} - set(plates))
    subsampled_in_scan = [
        f.name for s in sites if s.scaled for f in s.frames if f.name in in_scan
    ]
    if subsampled_in_scan:
        raise ValueError(_inside_scan(who, subsampled_in_scan[0]))
    if isinstance(sizes, Mapping):
        unknown = [name for name in sizes if name not in plates]
        if unknown and unknown[0] in in_scan:
            raise ValueError(_inside_scan(who, unknown[0]))
        if unknown:
            raise ValueError(
                f"{who} got batch_size for plate {unknown[0]!r}, which the model does "
                f"not have; its plates are: {listing}."
            )
        widths = {**own, **sizes}
    elif full:
        widths = dict.fromkeys(list(own) or _candidates(sites, plates), 0)
    elif sizes is None and default is not None and not own:
        found = _candidates(sites, plates)
        widths = {name: min(default, plates[name][0]) for name in found}
    elif sizes is None:
        widths = own
    else:
        names = list(own) or _candidates(sites, plates)
        if len(names) > 1:
            raise ValueError(
                f"{who} got batch_size={sizes}, but the model has several plates that "
                f"can be subsampled: {', '.join(map(repr, names))}. Say which: "
                f"batch_size={{{names[0]!r}: {sizes}}}."
            )
        widths = dict.fromkeys(names, sizes)
    if full:
        widths = {name: plates[name][0] for name in widths}
    if not widths and in_scan:
        latents = [s for s in sites if s.type == "sample" and not s.observed]
        local = [s for s in latents if s.discrete and s.inside(in_scan)]
        raise ValueError(_inside_scan(who, in_scan[0], local[0].name if local else ""))
    if not widths:
        samples = [s for s in sites if s.type == "sample"]
        if samples and not any(s.observed for s in samples):
            unobserved = ", ".join(repr(s.name) for s in samples)
            raise ValueError(
                f"{who}: the model observes nothing, all of its sites ({unobserved}) "
                "are parameters. Pass the data, for example mcmc.run(key, X, y), "
                "and in the model to the likelihood, obs=y[idx]."
            )
        ready = _candidates(sites, plates)
        if ready:
            name = max(ready, key=lambda name: plates[name][0])
            raise ValueError(_needs_batch_size(who, name, plates[name][0]))
        raise ValueError(
            f"{who} needs a data plate whose rows it can subsample, and found none to "
            f"subsample among the model's plates: {listing}. "
            f"{_why_no_rows(sites, plates)}"
        )
    for name, width in widths.items():
        size = plates[name][0]
        if width > size:
            raise ValueError(
                f"{who} got batch_size={width} for plate {name!r}, which has only "
                f"{size} rows. Use at most {size}, the full batch."
            )
    return widths, {name: plates[name][0] for name in widths}


def _rows_of_batch(size: int) -> int:
    """A number of rows of a batch that would run."""
    return max(2, min(100, size // 10))


def _needs_batch_size(who: str, plate: str, size: int) -> str:
    return (
        f"{who} needs the number of rows of plate {plate!r} that a step reads, of its "
        f"{size}: pass batch_size={{{plate!r}: {_rows_of_batch(size)}}}, or batch_size="
        f"{_rows_of_batch(size)} if the model has no other data. A subsample_size of "
        "the plate in the model sets it, too."
    )


def _why_no_rows(sites: list[Site], plates: Mapping[str, tuple[Any, ...]]) -> str:
    """Why nothing of a model can be subsampled, and what to write."""
    observed = [s for s in sites if s.type == "sample" and s.observed]
    for name in sorted(plates, key=lambda name: -plates[name][0]):
        local = [
            s
            for s in sites
            if s.type == "sample" and not s.observed and s.inside({name})
        ]
        if local and any(s.inside({name}) for s in observed):
            why = _local_latent(local, name, sites)
            return f"Plate {name!r} has observations, but {why}"
    in_scan = [s for s in observed if s.in_scan]
    if in_scan:
        return (
            f"Observed site {in_scan[0].name!r} is in a scan, so that each step may "
            "depend on the ones before: a time series has no rows that can be read by "
            "themselves. Sample it with NUTS. If each row of the data is a series of "
            "its own, put the rows into a plate and loop over time with jax.lax.scan "
            "inside of it."
        )
    for site in observed:
        length = max((site.value_shape or (0,))[-site.event_dim or 0 :], default=0)
        if site.event_dim and not _batch_shape(site) and length > 1:
            kind = site.kind.removesuffix(".to_event")
            if kind != site.kind:
                return (
                    f"Observed site {site.name!r} has its {length} entries as one "
                    "event: leave out .to_event(...), which makes them conditionally "
                    "independent rows."
                )
            return (
                f"Observed site {site.name!r} is one {kind} of {length} entries, which "
                "depend on each other: it does not divide into rows. Sample such a "
                "model (a Gaussian process, a random walk) with NUTS."
            )
    scalars = [s for s in observed if s.auxiliary and not _batch_shape(s)]
    if scalars and all(s.auxiliary for s in observed):
        name = scalars[0].name
        return (
            f"numpyro.factor({name!r}, ...) is one number. Give it one number for each "
            "row of the data and do not sum over the rows; what is needed of the data "
            "must be an argument of the model."
        )
    for site in observed:
        shape = _batch_shape(site)
        if shape and shape[0] == 1 and max(shape) > 1:
            return (
                f"Observed site {site.name!r} has batch shape {shape}. The rows must "
                "be its first dimension: leave the dimension of length 1 out, and pass "
                "the data as arguments of the model that have one entry for each row."
            )
        if shape and shape[0] > 1:
            return (
                f"Observed site {site.name!r} has {shape[0]} entries, and no argument "
                "of the model has as many along an axis. Pass the data as arguments "
                "that have one entry for each row, also lagged ones (y[1:], y[:-1]); "
                f"or put the site into a plate:{_example(shape[0])}"
            )
    return (
        "Put the observed sites into a plate and take the data by its indices:"
        f"{_example(max((a[0] for a in plates.values()), default=1000))}"
    )


def _inside_scan(who: str, plate: str, discrete: str = "") -> str:
    if discrete:
        return (
            f"{who} cannot subsample plate {plate!r}: it stands inside a scan, with "
            f"discrete latent site {discrete!r} for each of its rows, which NumPyro "
            "sums out by enumeration. Enumerated sites are not supported. If each row "
            "is a series of its own, write its log likelihood with jax.lax.scan (the "
            "forward algorithm) as a numpyro.factor with one entry for each row, "
            "inside of the plate."
        )
    return (
        f"{who} cannot subsample plate {plate!r}: it stands inside a scan or another "
        "control flow primitive. Move the plate of the data out of it; a plate that "
        "stays inside needs all its rows, without a subsample_size or scale."
    )


def _candidates(sites: list[Site], plates: Mapping[str, Any]) -> list[str]:
    """Plates that hold observations and no latent site; of nested ones the largest."""
    found = _holding_data(sites, plates)
    observed = [s for s in sites if s.type == "sample" and s.observed]

    def is_inner(name: str) -> bool:
        """Whether all that it holds is in a larger plate, too."""
        held = [s.inside(found) for s in observed if s.inside({name})]
        return all(
            any(
                _size(plates[f.name]) > _size(plates[name])
                for f in frames
                if f.name != name
            )
            for frames in held
        )

    return [name for name in found if not is_inner(name)]


def _size(plate: Any) -> int:
    return plate[0] if isinstance(plate, tuple) else plate


def _holding_data(sites: list[Site], plates: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in plates
        if any(s.type == "sample" and s.observed and s.inside({name}) for s in sites)
        and not any(
            s.type == "sample" and not s.observed and s.inside({name}) for s in sites
        )
    ]


def _check_sites(
    who: str, sites: list[Site], plates: Mapping[str, int]
) -> tuple[str, ...]:
    latents = []
    _check_plate_names(sites, plates)
    for site in sites:
        inside = site.inside(plates)
        if site.type == "mutable":
            raise ValueError(
                f"{who} cannot sample a model with mutable state: site {site.name!r} "
                "(batch normalisation?) would carry one minibatch into the next. Use a "
                "stateless layer, such as layer or group normalisation."
            )
        if site.type != "sample":
            continue
        if len(inside) > 1:
            raise ValueError(
                f"site {site.name!r} is inside two subsampled plates, "
                f"{inside[0].name!r} and {inside[1].name!r}, so it has no single "
                f"number per row. Subsample one of them: batch_size={{"
                f"{inside[0].name!r}: ...}}, and no subsample_size for the other."
            )
        if site.observed:
            continue
        latents.append(site.name)
        if inside:
            local = [
                s
                for s in sites
                if s.type == "sample" and not s.observed and s.inside({inside[0].name})
            ]
            raise ValueError(_local_latent(local, inside[0].name, sites))
        if site.discrete:
            held = _holds_rows(site, sites)
            how = (
                f"{held} has a value of it for each of its rows: sum it out of them "
                f'by numpyro_minibatch.marginalize(model, sites=["{site.name}"]).'
                if held
                else "Sum it out, for example with MixtureSameFamily."
            )
            raise ValueError(
                f"{who} samples continuous parameters, but latent site {site.name!r} "
                f"is discrete. {how}"
            )
    for name in plates:
        if not any(
            s.type == "sample" and s.observed and s.inside({name}) for s in sites
        ):
            after = [s.name for s in sites if s.type == "sample" and s.observed]
            outside = (
                f" Observed site {after[0]!r} stands outside of it, perhaps after the "
                "with block: indent it."
                if after
                else ""
            )
            raise ValueError(
                f"plate {name!r} has no observed site, so subsampling it estimates "
                f"nothing.{outside} Put the observations inside it, or leave it out of "
                "batch_size and give it no subsample_size."
            )
    if not latents:
        raise ValueError(
            f"{who} has nothing to sample: the model has no latent site. Does it "
            "condition on every site, or need other arguments?"
        )
    return tuple(latents)


def _holds_rows(latent: Site, sites: list[Site]) -> str:
    """The plate of a latent site in which there are observations, too."""
    observed = [s for s in sites if s.type == "sample" and s.observed]
    for frame in latent.frames:
        if any(s.inside({frame.name}) for s in observed):
            return f"Plate {frame.name!r}"
    return ""


def _check_plate_names(sites: list[Site], plates: Mapping[str, int]) -> None:
    """A trace keeps one plate of each name: a second one must be the same."""
    for name in plates:
        sizes = {frame.size for site in sites for frame in site.inside({name})}
        if len(sizes) > 1:
            raise ValueError(
                f"the model has several plates called {name!r}, of sizes "
                f"{' and '.join(map(str, sorted(sizes)))}. Give each a name of its own."
            )


def _local_latent(sites: list[Site], plate: str, everything: list[Site]) -> str:
    """What to write where latent sites have a value for each row."""
    first = sites[0]
    names_of = {s.name for s in sites}
    shared = [
        s.name
        for s in everything
        if s.type == "sample" and not s.observed and s.name not in names_of
    ]
    site = first.name
    names = ", ".join(f'"{s.name}"' for s in sites)
    message = (
        f"latent site {site!r} is inside the subsampled plate {plate!r}: it has one "
        "value per row, and most rows are not in a minibatch."
    )
    if not shared and not site.endswith("_unobserved"):
        return (
            f"{message} If it holds the observations, pass them: it got obs=None. "
            "Otherwise the rows share no parameter, so that each has a posterior of "
            "its own, which no other row tells anything about. Sample it with NUTS."
        )
    if first.discrete:
        return (
            f"{message} It is discrete: sum it out of each row by "
            f"numpyro_minibatch.marginalize(model, sites=[{names}]), or write the sum "
            "yourself, as dist.MixtureSameFamily(dist.Categorical(weights), parts)."
        )
    if site.endswith("_unobserved"):
        return (
            f"{message} numpyro.sample(..., obs_mask=...) made it for the missing "
            "values; use numpyro.handlers.mask around a plain observed site instead."
        )
    return (
        f"{message} If it holds the observations, pass them: it got obs=None. "
        "Otherwise integrate it out of each row by "
        f"numpyro_minibatch.marginalize(model, sites=[{names}])."
    )


def _probe(plates: Mapping[str, int]) -> dict[str, Any]:
    """Two rows per plate, without values: nothing is computed."""
    return {
        name: jax.ShapeDtypeStruct((min(2, size),), jnp.int32)
        for name, size in plates.items()
    }


def _conditioned(model: Any, as_written: Mapping[str, Site]) -> str:
    """An observed site whose data ``numpyro.handlers.condition`` holds."""
    while model is not None:
        if isinstance(model, handlers.condition) and model.data:
            return next((n for n in model.data if n in as_written), "")
        model = getattr(model, "fn", None)
    return ""


def _condition_holds(who: str, site: str) -> str:
    return (
        f"{who}: numpyro.handlers.condition holds all rows of site {site!r}, whichever "
        "rows of the other data a batch has. Pass them as an argument of the model, "
        f'numpyro.sample("{site}", ..., obs=y).'
    )


class _NeedsValues(TypeError):
    """The Python code of a model needs the values of its data."""


class _NotIndexed(ValueError):
    """Data do not follow the indices; with what is wrong by itself."""

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


def _check_indexing(
    who: str,
    target: ModelTarget,
    plates: Mapping[str, int],
    as_written: Mapping[str, Site],
) -> tuple[str, ...]:
    """Run the model on two rows per plate: data that are not indexed do not fit.

    :return: the deterministic sites in no plate that have a value for each row.
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
                found = _static(site)
                problem = problem or _shape_problem(found, plates)
                if not problem and found.inside(plates):
                    crossed = crossed or _crossed(found, as_written[found.name], plates)
        return {} if problem else target.site_rows(trace)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.eval_shape(run, _probe(plates))
    except (ValueError, TypeError, AssertionError) as error:
        if isinstance(error, NEEDS_VALUES):
            raise _NeedsValues(needs_values(who, target.model, error)) from error
        if not any(size > 2 for size in plates.values()):
            raise
        problem = f"on 2 rows the model fails with: {first_line(error)}"
    if problem:
        message = _not_indexed(who, problem, next(iter(plates.values())))
        raise _NotIndexed(message, problem)
    if crossed:
        raise ValueError(f"{who}: {crossed}")
    return tuple(by_row)


def _latent_of_rows(
    sites: list[Site], latents: Collection[str], plates: Mapping[str, int]
) -> str:
    """What is wrong if a latent site has as many entries as a plate that fails."""
    for site in sites:
        for plate, size in plates.items():
            if site.name in latents and size > 1 and size in (site.value_shape or ()):
                return (
                    f"latent site {site.name!r} has {size} entries, as many as plate "
                    f"{plate!r} has rows. If it has a value for each row, as a "
                    "Gaussian process or a random walk has, there are no minibatches: "
                    "sample with NUTS. If not, take the data inside the plate by its "
                    "indices, y[idx]."
                )
    return ""


def _latent_by_row(name: str, plates: Mapping[str, int]) -> str:
    size = next(iter(plates.values()))
    return f"latent site {name!r} has a value for each of the {size} rows"


def with_row_plate(
    target: ModelTarget, sites: list[Site], named: Collection[int] | None = None
) -> tuple[list[Site], tuple[tuple[str, str, int], ...]]:
    """The sites of a model as if observed sites in no plate were in a plate of rows.

    NumPyro's batch dimensions are conditionally independent, so the first one of an
    observed site is a plate without a name if an argument has as many entries.

    :param named: the numbers of rows of the arguments, where the user names those.
    :return: the sites, and ``(site, plate, dim)`` of those that were put into it.
    """
    known = {s.name for s in sites if s.type == "plate"}
    in_control_flow = any(f.name not in known for s in sites for f in s.frames)
    if _own_sizes(sites) or in_control_flow:
        return sites, ()
    lengths = named
    if lengths is None:
        leaves = flatten_arguments(_arguments(target))[0]
        lengths = {n for x in leaves for n in np.shape(x)}
    found: dict[int, list[tuple[Site, int]]] = {}
    for site in sites:
        if site.type != "sample" or not site.observed or site.in_scan:
            continue
        shape = _batch_shape(site)
        taken = {frame.dim for frame in site.frames}
        if shape and shape[0] > 1 and shape[0] in lengths and -len(shape) not in taken:
            found.setdefault(shape[0], []).append((site, -len(shape)))
    plates = {s.name: s.args[0] for s in sites if s.type == "plate"}
    largest = max([plates[n] for n in _candidates(sites, plates)], default=1)
    if not found or (named is None and max(found) <= largest):
        return sites, ()
    size = max(found)
    used = {site.name for site in sites}
    name = next(n for n in ("data", "rows", "data_rows", "_rows") if n not in used)
    dims = {site.name: dim for site, dim in found[size]}
    placed = [
        site._replace(
            frames=(*site.frames, CondIndepStackFrame(name, dims[site.name], size))
        )
        if site.name in dims
        else site
        for site in sites
    ]
    empty = sites[0]._replace(
        name=name, type="plate", observed=False, frames=(), args=(size, None)
    )
    return [*placed, empty], tuple((site, name, dim) for site, dim in dims.items())


def _arguments(target: ModelTarget) -> Any:
    return target.args, dict(target.kwargs)


def _batch_shape(site: Site) -> tuple[int, ...]:
    shapes = [site.shape, site.value_shape or ()]
    cut = [shape[: len(shape) - site.event_dim] for shape in shapes]
    return jnp.broadcast_shapes(*cut)


def _given_rows(
    who: str,
    target: ModelTarget,
    plates: Mapping[str, int],
    as_written: Mapping[str, Site],
    rows: tuple[tuple[str, str, int], ...],
) -> tuple[ModelTarget, tuple[str, ...]]:
    """The target of a model whose observed sites are in no plate, given its rows."""
    found = find_slices(who, target, plates, as_written, rows)
    held = _conditioned(target.model, as_written)
    if isinstance(found, str) and held:
        raise ValueError(_condition_holds(who, held))
    if isinstance(found, str):
        site, plate, _ = rows[0]
        process = _process_of_rows(as_written, plates[plate])
        if process is not None and (
            found.startswith("latent site") or process.kind in _PROCESSES
        ):
            raise ValueError(
                f"{who}: latent site {process.name!r} is one {process.kind} with a "
                f"value for each of the {plates[plate]} rows of observed site "
                f"{site!r}. These values depend on each other, as in a Gaussian "
                "process or a random walk, so that there are no minibatches: sample "
                "with NUTS."
            )
        if found.startswith("latent site"):
            raise ValueError(
                f"{who}: {found} of observed site {site!r}, and most rows are not in a "
                "minibatch. Put both into a plate of the rows and integrate the latent "
                "site out by numpyro_minibatch.marginalize(model), or have one value "
                "for each group of rows. Otherwise sample with NUTS."
            )
        raise ValueError(
            f"{who}: observed site {site!r} has {plates[plate]} rows and is in no "
            "plate, so the model is run on some of the rows of its arguments, "
            f"{_WHICH_FAILS}{found}. If each row follows from the ones before, as in a "
            "time series, use NUTS. Otherwise: "
            f"{_give_names(target, plates)}{_GIVE_ARGUMENTS}{_example(plates[plate])}"
        )
    return found


def _process_of_rows(as_written: Mapping[str, Site], size: int) -> Site | None:
    """A latent site that is one event with a value for each row, if there is one."""
    for site in as_written.values():
        event = (site.value_shape or ())[len(site.value_shape or ()) - site.event_dim :]
        if (
            site.type == "sample"
            and not site.observed
            and size in event
            and not site.kind.endswith(".to_event")
        ):
            return site
    return None


def _give_names(target: ModelTarget, plates: Mapping[str, int]) -> str:
    """The advice to name the arguments that have rows, if several could."""
    places = _places(flatten_arguments(_arguments(target))[0], plates)
    if len(places) < 2:
        return ""
    example = suggestion(target.model, _arguments(target), places)
    return f"name the arguments that have rows, as in {example}; "


_GIVE_ARGUMENTS = (
    "pass all data as arguments of the model (arrays from its surroundings keep all of "
    "their rows); or put the site into a plate and take the data by the indices:"
)


def find_slices(
    who: str,
    target: ModelTarget,
    plates: Mapping[str, int],
    as_written: Mapping[str, Site],
    rows: tuple[tuple[str, str, int], ...],
) -> tuple[ModelTarget, tuple[str, ...]] | str:
    """Find the arrays among a model's arguments that have the rows of its plates.

    Those are all that have an axis of a plate's length; if the model does not run on
    some of their rows, all but one of them. Whether the model computes the same on
    rows as on all data is checked later, by values.

    :param rows: ``(site, plate, dim)`` of observed sites in no plate.
    :return: the target that reads rows of them, and the deterministic sites in no plate
        that have a value for each row; if there is no such set of arrays, the reason.
    """
    if len(set(plates.values())) < len(plates):
        return "two plates have the same number of rows, and arrays may be of either"
    leaves = flatten_arguments(_arguments(target))[0]
    if any(hasattr(leaf, "iloc") for leaf in leaves):
        return (
            "an argument is a table of pandas, of which a batch cannot take rows; pass "
            "its columns as arrays, {name: table[name].to_numpy() for name in table}"
        )
    places = _places(leaves, plates)
    if not places:
        return "no argument of the model has as many rows"
    reason = ""
    smaller = [places[:k] + places[k + 1 :] for k in range(len(places))]
    for some in [places, *(smaller if len(places) > 1 else [])]:
        given = replace(target, slices=Slices(tuple(some), rows))
        try:
            return given, _check_indexing(who, given, plates, as_written)
        except _NotIndexed as error:
            reason = reason or error.problem
        except _NeedsValues:
            raise  # whichever arrays have the rows
        except (ValueError, TypeError, AssertionError, IndexError) as error:
            reason = reason or first_line(error)
    return reason


def _places(leaves: list[Any], plates: Mapping[str, int]) -> list[tuple[int, str, int]]:
    """The arrays that have an axis of a plate's length: number, plate and axis."""
    places = []
    for number, leaf in enumerate(leaves):
        shape = np.shape(leaf) if hasattr(leaf, "shape") else ()
        if isinstance(leaf, HostRows):
            shape = shape[:1]  # others are not read a few at a time
        for plate, size in plates.items():
            if size > 1 and size in shape:
                places.append((number, plate, shape.index(size)))
                break
    return places


def _named_rows(
    who: str,
    target: ModelTarget,
    plates: Mapping[str, int],
    as_written: Mapping[str, Site],
    rows: tuple[tuple[str, str, int], ...],
    named: list[NamedRows],
    own: list[str],
) -> tuple[ModelTarget, tuple[str, ...]]:
    """The target of a model whose arguments with rows the user names.

    :param who: the kernel with its setting, for the messages.
    :param rows: ``(site, plate, dim)`` of observed sites in no plate.
    :param named: the arrays that have rows.
    :param own: the plates that the model subsamples itself.
    :raises ValueError: the model contradicts the names.
    """
    if own:
        raise ValueError(
            f"{who}: plate {own[0]!r} has a subsample_size, so the model takes its "
            "rows by the plate's indices. Leave rows out, or subsample_size."
        )
    listing = ", ".join(f"{name!r} ({size} rows)" for name, size in plates.items())
    places = []
    for array in named:
        fit = [name for name, size in plates.items() if size == array.size]
        if not fit:
            raise ValueError(
                f"{who}: {array.name} has {array.size} entries along axis "
                f"{array.axis}, and no plate of observations has as many rows: "
                f"{listing}. Write the axis of the rows, or leave {array.name} out if "
                "it has none."
            )
        if len(fit) > 1:
            raise ValueError(
                f"{who}: {array.name} could have the rows of plate {fit[0]!r} or of "
                f"{fit[1]!r}, which have {array.size} each. Take the data of both "
                "inside of their plates by the indices, and leave rows out."
            )
        places.append((array.leaf, fit[0], array.axis))
    places.sort()
    given = replace(target, slices=Slices(tuple(places), rows))
    try:
        return given, _check_indexing(who, given, plates, as_written)
    except _NeedsValues:
        raise
    except (ValueError, TypeError, AssertionError, IndexError) as error:
        problem = error.problem if isinstance(error, _NotIndexed) else str(error)
    left = []
    known = {array.leaf for array in named}
    sizes = {array.size for array in named}
    everything = flatten_arguments(_arguments(target))[0]
    for number, leaf in enumerate(everything):
        shape = np.shape(leaf) if hasattr(leaf, "shape") else ()
        for axis, size in enumerate(shape):
            if number not in known and size in sizes:
                left.append((number, "", axis))
                break
    more = ""
    if left:
        names = Slices(tuple(left)).names(target.model, _arguments(target))
        more = (
            f" Not named, and of as many entries: {', '.join(names)}. With all of "
            "them it reads "
            f"{suggestion(target.model, _arguments(target), [*places, *left])}."
        )
    raise ValueError(
        f"{who}: given some of these rows, the model fails: "
        f"{problem.partition(chr(10))[0].rstrip('.')}. Name all arguments that have "
        f"the rows, and no others, each with the axis of the rows.{more}"
    )


def _crossed(site: Site, as_written: Site, plates: Mapping[str, int]) -> str:
    """What is wrong if every row of the data meets every row of the distribution."""
    shapes = []
    for seen in (as_written, site):
        shape = jnp.broadcast_shapes(seen.shape, seen.value_shape or ())
        shapes.append(shape[: len(shape) - seen.event_dim])
    written, probed = shapes
    declared = {frame.dim for frame in site.frames}
    for axis in range(-min(len(written), len(probed)), 0):
        if axis not in declared and written[axis] != probed[axis]:
            return (
                f"observed site {site.name!r} has shape {written} in plate "
                f"{site.inside(plates)[0].name!r}: it has the rows of the plate twice, "
                "because its distribution and its data do not line up, as (n, 1) and "
                "(n,) do not. Give both one entry per row, for example y[idx][:, 0] or "
                "(X[idx] @ beta)[:, 0]."
            )
    return ""


def _check_flow(who: str, target: Target, widths: Mapping[str, int], z: Any) -> bool:
    """Check what a target does with its data beyond the rows that it is asked for.

    :return: whether there was something to warn of.
    """
    plates, probe = target.plates, _probe(target.plates)
    closed = jax.make_jaxpr(target.terms)(z, probe)
    indices = [None] * len(jax.tree.leaves(z)) + sorted(probe)
    found = inspect_flow(closed, plates, indices)
    for plate, rows, shape in found.short:
        raise ValueError(
            f"{who}: an array of shape {shape} is taken by the indices of plate "
            f"{plate!r}, which has {plates[plate]} rows: beyond its {rows} entries "
            "JAX would repeat the last one without a word. Give the arrays of a plate "
            "one length, and the plate that size."
        )
    for plate, primitive in found.wide:
        if plates[plate] > _WIDE * widths[plate]:
            warnings.warn(
                f"{who}: the model computes on all {plates[plate]} rows of plate "
                f"{plate!r} ({primitive}) to use {widths[plate]} of them, at every "
                "step. This is right but slow: take the data by the plate's indices "
                "first, X[idx] @ beta instead of (X @ beta)[idx].",
                stacklevel=find_stack_level(),
            )
            return True
    return False


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


def find_nan(args: Any) -> list[str]:
    """The arrays in a model's ``(args, kwargs)`` that contain NaN, described."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        if isinstance(leaf, jax.core.Tracer) or not isinstance(
            leaf, np.ndarray | Array
        ):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        values = np.asarray(leaf)
        # the minimum is NaN if any value is, and needs no memory
        if (
            np.issubdtype(values.dtype, np.floating)
            and values.size
            and np.isnan(values.min())
        ):
            kind = ("args", "kwargs")[path[0].idx]
            where = jax.tree_util.keystr(path[1:])
            count = int(np.isnan(values).sum())
            found.append(f"{kind}{where}: {count} of {values.size} values")
    return found
