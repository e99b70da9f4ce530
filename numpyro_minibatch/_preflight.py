"""User mistakes found before anything compiles: which plates, which rows, what shapes.

Everything here runs the model abstractly, so that it costs no arithmetic on the data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import init_to_uniform

from numpyro_minibatch.target import ModelTarget

__all__ = ["Layout", "inspect_model"]


class Layout(NamedTuple):
    """What is known of a model before it runs; static and hashable.

    :param plates: the data plates and their numbers of rows.
    :param widths: the rows of one draw of each data plate.
    :param latents: the latent sites.
    """

    plates: tuple[tuple[str, int], ...]
    widths: tuple[tuple[str, int], ...]
    latents: tuple[str, ...]


class Site(NamedTuple):
    """The static part of a site of a trace."""

    name: str
    type: str
    observed: bool
    auxiliary: bool
    discrete: bool
    frames: tuple[Any, ...]
    value_shape: tuple[int, ...] | None
    event_dim: int
    args: tuple[Any, ...]

    def inside(self, plates: Mapping[str, Any]) -> list[Any]:
        """The frames of this site that belong to ``plates``."""
        return [f for f in self.frames if f.name in plates]


def inspect_model(
    who: str,
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    sizes: int | Mapping[str, int] | None,
) -> tuple[Layout, dict[str, Any]]:
    """Find the data plates of a model and check that they can be subsampled.

    :param who: the kernel's name, for the messages.
    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param sizes: rows of one draw, as the user gave them.
    :return: the layout, and the values of ``param`` sites to freeze.
    :raises ValueError: the model cannot be sampled from minibatches; the message says
        what was found and what to write instead.
    """
    target = ModelTarget(model=model, args=args, kwargs=kwargs, sizes={})
    sites, frozen = _abstract_sites(target)
    widths, plates = _choose_plates(who, sites, sizes)
    latents = _check_sites(who, sites, plates)
    target = ModelTarget(
        model=model, args=args, kwargs=kwargs, sizes=plates, frozen=frozen
    )
    _check_indexing(who, target, plates)
    ordered = tuple(sorted(plates.items()))
    return Layout(ordered, tuple((n, widths[n]) for n, _ in ordered), latents), frozen


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
        value_shape=jnp.shape(value) if sample else None,
        event_dim=fn.event_dim if sample else 0,
        args=tuple(site.get("args", ())),
    )


def _abstract_sites(target: ModelTarget) -> tuple[list[Site], dict[str, Any]]:
    """The sites of a model that runs as written, and its ``param`` values."""
    found: list[Site] = []

    def run() -> dict[str, Any]:
        found.clear()
        trace = target.trace({}, substitute_fn=init_to_uniform())
        found.extend(_static(site) for site in trace.values())
        return {n: s["value"] for n, s in trace.items() if s["type"] == "param"}

    frozen = jax.eval_shape(run)
    if jax.tree.leaves(frozen):
        # every chain must share these values, so they come from a fixed key and are
        # computed for real even where the kernel is being initialised under a transform
        with jax.ensure_compile_time_eval():
            frozen = jax.jit(run)()
    return found, frozen


def _example(size: int) -> str:
    return (
        f'\n    with numpyro.plate("data", {size}) as idx:'
        '\n        numpyro.sample("obs", dist.Normal(X[idx] @ beta, 1.0), obs=y[idx])'
        '\nand pass batch_size={"data": 100}.'
    )


def _choose_plates(
    who: str, sites: list[Site], sizes: int | Mapping[str, int] | None
) -> tuple[dict[str, int], dict[str, int]]:
    plates = {s.name: s.args for s in sites if s.type == "plate"}
    own = {
        name: args[1]
        for name, args in plates.items()
        if len(args) > 1 and args[1] is not None and args[1] != args[0]
    }
    listing = ", ".join(f"{n!r} ({a[0]} rows)" for n, a in plates.items()) or "none"
    in_scan = {f.name for s in sites for f in s.frames} - set(plates)
    if isinstance(sizes, Mapping):
        unknown = [name for name in sizes if name not in plates]
        if unknown and unknown[0] in in_scan:
            raise ValueError(
                f"{who} cannot subsample plate {unknown[0]!r}: it stands inside a scan "
                "or another control flow primitive. Move the plate of the data out of "
                "it."
            )
        if unknown:
            raise ValueError(
                f"{who} got batch_size for plate {unknown[0]!r}, which the model does "
                f"not have; its plates are: {listing}."
            )
        widths = {**own, **sizes}
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
    if not widths:
        advice = (
            "Put the observed sites into a plate and take the data by its indices:"
            + _example(1000)
            if not plates
            else "Pass batch_size={plate: rows}, or give the plate of the data a "
            "subsample_size; the data inside must be taken by the plate's indices:"
            + _example(max(a[0] for a in plates.values()))
        )
        raise ValueError(
            f"{who} needs a data plate whose rows it can subsample, and found none to "
            f"subsample among the model's plates: {listing}. {advice}"
        )
    for name, width in widths.items():
        size = plates[name][0]
        if width > size:
            raise ValueError(
                f"{who} got batch_size={width} for plate {name!r}, which has only "
                f"{size} rows. Use at most {size}, the full batch."
            )
    return widths, {name: plates[name][0] for name in widths}


def _candidates(sites: list[Site], plates: Mapping[str, Any]) -> list[str]:
    """Plates that hold observations and no latent site."""
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
            raise ValueError(_local_latent(site.name, inside[0].name))
        if site.discrete:
            raise ValueError(
                f"{who} samples continuous parameters, but latent site {site.name!r} "
                "is discrete. Sum it out, for example with MixtureSameFamily."
            )
    for name in plates:
        if not any(
            s.type == "sample" and s.observed and s.inside({name}) for s in sites
        ):
            raise ValueError(
                f"plate {name!r} has no observed site, so subsampling it estimates "
                "nothing. Put the observations inside it, or leave it out of "
                "batch_size and give it no subsample_size."
            )
    if not latents:
        raise ValueError(
            f"{who} has nothing to sample: the model has no latent site. Does it "
            "condition on every site, or need other arguments?"
        )
    return tuple(latents)


def _local_latent(site: str, plate: str) -> str:
    message = (
        f"latent site {site!r} is inside the subsampled plate {plate!r}: it has one "
        "value per row, and most rows are not in a minibatch."
    )
    if site.endswith("_unobserved"):
        return (
            f"{message} numpyro.sample(..., obs_mask=...) made it for the missing "
            "values; use numpyro.handlers.mask around a plain observed site instead."
        )
    return f"{message} Sum it out, or move it out of the plate."


def _check_indexing(who: str, target: ModelTarget, plates: Mapping[str, int]) -> None:
    """Run the model on two rows per plate: data that are not indexed do not fit."""
    probe = {n: jnp.arange(min(2, size), dtype=jnp.int32) for n, size in plates.items()}
    problem = ""

    def run() -> dict[str, Array]:
        nonlocal problem
        trace = target.trace(probe, substitute_fn=init_to_uniform())
        for site in trace.values():
            if site["type"] == "sample" and site["is_observed"]:
                problem = problem or _shape_problem(_static(site), plates)
        return {} if problem else target.site_rows(trace)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.eval_shape(run)
    except (ValueError, TypeError, AssertionError) as error:
        if not any(size > 2 for size in plates.values()):
            raise
        problem = f"running the model on 2 rows failed with: {error}"
    if problem:
        name = next(iter(plates))
        raise ValueError(
            f"{who}: the data of the model do not follow the indices of its plate "
            f"({problem}). Inside the plate take every array by its indices, or by "
            f"numpyro.subsample(y, event_dim=0):{_example(plates[name])}"
        )


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
    """The array arguments that contain NaN, described."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        if isinstance(leaf, jax.core.Tracer) or not isinstance(
            leaf, np.ndarray | Array
        ):
            continue
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        values = np.asarray(leaf)
        if np.issubdtype(values.dtype, np.floating):
            count = int(np.isnan(values).sum())
            if count:
                where = jax.tree_util.keystr(path)
                found.append(f"args{where}: {count} of {values.size} values")
    return found
