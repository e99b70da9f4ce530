"""The sites of a model that is run abstractly: shapes and plates, no arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from numbers import Number
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import MaskedDistribution, biject_to, constraints
from numpyro.distributions.distribution import ExpandedDistribution, Independent
from numpyro.infer import init_to_uniform

from numpyro_minibatch._model.tables import as_arrays, tables_among
from numpyro_minibatch._model.values import (
    first_line,
    is_of_array,
    is_of_values,
    needs_latents,
    needs_values,
    no_attribute,
)
from numpyro_minibatch.host_rows import HostRows
from numpyro_minibatch.target import (
    ModelTarget,
    Subsample,
    flatten_arguments,
    named_arguments,
)

__all__ = [
    "MOST_DIMENSIONS",
    "AllRows",
    "LocalSites",
    "Site",
    "abstract_sites",
    "arguments_of",
    "batch_shape",
    "explained",
    "is_circular",
    "latents_needed",
    "local_sites",
    "own_sizes",
    "static_site",
    "values_missing",
    "without_rows",
]


# the continuous latent numbers of one row that `marginalize` integrates out
MOST_DIMENSIONS = 3


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
    circular: bool = False

    def inside(self, plates: Collection[str]) -> list[Any]:
        """The frames of this site that belong to ``plates``."""
        return [f for f in self.frames if f.name in plates]


def local_sites(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> LocalSites:
    """The latent sites of a model that have a value for each row or group of rows.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :return: no sites if the model does not run.
    """
    target = ModelTarget(model=model, args=args, kwargs=kwargs, sizes={})
    try:
        sites, _ = abstract_sites(target)
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


@contextmanager
def explained(
    who: str, model: Any, args: tuple, kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """State a remedy if JAX cannot trace a model.

    :param who: the kernel's name, for the messages.
    :param model: the model.
    :param args: the model's positional arguments.
    :param kwargs: its keyword arguments.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        if isinstance(error, AttributeError):
            if not is_of_array(error):
                raise
            message = values_missing(who, model, args, kwargs, error)
            raise TypeError(message) from error
        unusable = _unusable(model, args, kwargs)
        if unusable:
            raise TypeError(
                f"{who} cannot run the model, which got {unusable}. "
                f"({first_line(error)})"
            ) from error
        of_table = isinstance(error, TypeError) and tables_among(model, args, kwargs)
        if is_of_values(error) or of_table:
            message = values_missing(who, model, args, kwargs, error)
            raise TypeError(message) from error
        raise


def values_missing(
    who: str, model: Any, args: tuple, kwargs: Mapping[str, Any], error: BaseException
) -> str:
    """The message for a model that needs more of its data than JAX's arrays have.

    :param who: the kernel's name.
    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param error: the error of JAX or of a table, with its traceback.
    """
    tables = tables_among(model, args, kwargs)
    if isinstance(error, AttributeError):
        columns = {
            x for table in tables.values() for x in getattr(table, "columns", ())
        }
        message = no_attribute(who, model, error, error.name in columns)
        return f"{message} {as_arrays(tables)}" if tables else message
    if tables:
        return f"{who} cannot run the model ({first_line(error)}). {as_arrays(tables)}"
    of_latents = latents_needed(who, model, args, kwargs)
    return of_latents or needs_values(who, model, error)


def latents_needed(who: str, model: Any, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """The message for a model whose code needs the value of a latent site.

    What is computed from a latent site is traced by :func:`jax.vmap` besides, so that
    its type differs from that of all else. Nothing is computed.

    :param who: the kernel's name.
    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :return: nothing if it needs no such value.
    """
    while getattr(model, "marginalizes", False):
        model = model.fn
    target = ModelTarget(model=model, args=args, kwargs=kwargs, sizes={})
    kind: type = jax.core.Tracer

    def run(yes: Array) -> None:
        nonlocal kind
        kind = type(yes)

        def traced(site: Any) -> Any:
            if site["type"] != "sample" or site["is_observed"]:
                return None
            fn, key = site["fn"], site["kwargs"].get("rng_key")
            discrete = fn.support is not None and fn.support.is_discrete
            value = fn.sample(key) if discrete else init_to_uniform(site)
            return jnp.where(yes, value, value)

        target.trace({}, substitute_fn=traced)

    try:
        with warnings.catch_warnings(action="ignore"):
            jax.eval_shape(jax.vmap(run), jax.ShapeDtypeStruct((1,), bool))
    except Exception as error:  # others have their own explanations
        return needs_latents(who, model, error, kind) if is_of_values(error) else ""
    return ""


def without_rows(model: Any, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """A remedy for arguments from which no rows are taken: lists, text, other objects.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :return: nothing if there are none.
    """
    named = named_arguments(model, args, kwargs)
    lists = [
        f"{name} is a list of {len(value)} numbers"
        for name, value in named.items()
        if isinstance(value, list)
        and len(value) > 1
        and all(np.ndim(x) == 0 and isinstance(x, Number | Array) for x in value)
    ]
    found = ""
    if lists:
        found = f", but {', '.join(lists)}: pass numpy.asarray of it."
    for name, value in named.items():
        if found:
            break
        kind = type(value).__name__
        if _is_text(value):
            found = f" of numbers, but {name} has dtype {value.dtype}: {_codes(name)}."
        elif _holds_arrays(value):
            found = (
                f", also of those in lists, dicts and named tuples, but {name} is a "
                f"{kind}: pass its arrays"
            )
            if is_dataclass(value):
                found += f", or register it by jax.tree_util.register_dataclass({kind})"
            found += "."
    return f" Rows are taken of arrays{found}" if found else ""


def _is_text(value: Any) -> bool:
    """Whether this is an array of words, such as the names of groups."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or not value.size:
        return False
    if not isinstance(value[0], str | bytes):
        return False
    try:
        float(value[0])
    except ValueError:
        return True
    return False


def _codes(name: str) -> str:
    return (
        f"compute names, codes = numpy.unique({name}, return_inverse=True) before the "
        f"model, and pass codes and len(names) in place of {name}"
    )


def _holds_arrays(value: Any) -> bool:
    """Whether this is an object with arrays that JAX does not know of."""
    if not jax.tree_util.all_leaves([value]):  # JAX knows what it holds
        return False
    if hasattr(value, "shape") or isinstance(value, type) or callable(value):
        return False
    held = vars(value).values() if hasattr(value, "__dict__") else ()
    return any(isinstance(x, np.ndarray | Array) and x.ndim for x in held)


def _unusable(model: Any, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Why arguments of a model that look like data cannot be used, and a remedy."""
    named = named_arguments(model, args, kwargs)
    for name, value in named.items():
        if _is_text(value):
            return (
                f"{name} of dtype {value.dtype}: data must be numbers; {_codes(name)}"
            )
    found = []
    for name, value in named.items():
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            found.append(f"{name} of dtype {value.dtype}")
        elif isinstance(value, list):
            found.append(f"{name} of type {type(value).__name__}")
    if not found:
        return ""
    return (
        f"{', '.join(found)}: data must be NumPy or JAX arrays of numbers. Convert "
        "them with numpy.asarray(..., float) first"
    )


def static_site(site: Any) -> Site:
    """The static part of a site of NumPyro's trace."""
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
        circular=bool(sample and is_circular(fn.support)),
    )


def is_circular(support: Any) -> bool:
    """Whether both ends of a support are the same point, as of an angle.

    :param support: that of a distribution, possibly of an event; may be ``None``.
    """
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.circular


def _kind(fn: Any) -> str:
    """The class of a distribution, and whether it is an event by ``to_event``."""
    independent = ""
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        independent = ".to_event" if isinstance(fn, Independent) else independent
        fn = fn.base_dist
    # a marginalized row has the name of the distribution in the user's model
    return getattr(fn, "written_as", type(fn).__name__) + independent


def _free_shape(fn: Any, value: Any) -> tuple[int, ...]:
    """The shape of the unconstrained value of a site."""
    if fn.support is None or fn.support.is_discrete:
        return jnp.shape(value)
    return tuple(biject_to(fn.support).inverse_shape(jnp.shape(value)))


class AllRows(Subsample):
    """Give each plate all its rows, and record the subsample size that it requested."""

    def __init__(self, fn: Callable) -> None:
        super().__init__(fn, {})
        self.asked: dict[str, tuple[int, int]] = {}

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            self.asked[msg["name"]] = (size, subsample_size)
            msg["value"] = jnp.arange(size)
            msg["args"] = (size, size)


def abstract_sites(
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

    leaves, treedef = flatten_arguments(arguments_of(target))
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
        found.extend(static_site(site) for site in trace.values())
        return {n: s["value"] for n, s in trace.items() if s["type"] == "param"}

    with warnings.catch_warnings():
        # what the message below says better
        warnings.filterwarnings("ignore", "subsample_size does not match")
        arrays = [described(x) for x, yes in zip(leaves, on_host, strict=True) if yes]
        frozen = jax.eval_shape(run, *arrays)
    if arrays and jax.tree.leaves(frozen):
        raise ValueError(
            "a model with HostRows and numpyro.param sites must index the HostRows by "
            "a plate."
        )
    if jax.tree.leaves(frozen):
        # every chain must share these values, so they come from a fixed key and are
        # computed for real even where the kernel is being initialised under a transform
        with jax.ensure_compile_time_eval():
            frozen = jax.jit(run)()
    return found, frozen


def own_sizes(sites: list[Site]) -> dict[str, int]:
    """The plates that the model itself subsamples, and their sizes."""
    plates = {s.name: s.args for s in sites if s.type == "plate"}
    return {
        name: args[1]
        for name, args in plates.items()
        if len(args) > 1 and args[1] is not None and args[1] != args[0]
    }


def arguments_of(target: ModelTarget) -> Any:
    """A model's arguments by position and by name, as one tree."""
    return target.args, dict(target.kwargs)


def batch_shape(site: Site) -> tuple[int, ...]:
    """The batch shape of a site's distribution and value, broadcast."""
    shapes = [site.shape, site.value_shape or ()]
    cut = [shape[: len(shape) - site.event_dim] for shape in shapes]
    return jnp.broadcast_shapes(*cut)
