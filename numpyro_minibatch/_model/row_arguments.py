"""The arguments of a model that have the rows, found by shape or named by the user."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from numpyro import handlers
from numpyro.primitives import CondIndepStackFrame

from numpyro_minibatch._model.indexing import (
    WHICH_FAILS,
    NeedsValues,
    NotIndexed,
    OwnCheck,
    check_indexing,
)
from numpyro_minibatch._model.plates import candidates, example_plate, missing_values
from numpyro_minibatch._model.row_axes import NamedRows, suggestion
from numpyro_minibatch._model.sites import Site, arguments_of, batch_shape, own_sizes
from numpyro_minibatch._model.tables import as_arrays, labels_differ, tables_among
from numpyro_minibatch._model.tables import lengths as lengths_of
from numpyro_minibatch._model.values import first_line
from numpyro_minibatch.host_rows import HostRows
from numpyro_minibatch.target import ModelTarget, Slices, flatten_arguments

__all__ = [
    "condition_holds",
    "conditioned",
    "find_slices",
    "given_rows",
    "in_one_plate",
    "named_rows",
    "with_row_plate",
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


def conditioned(model: Any, as_written: Mapping[str, Site]) -> str:
    """An observed site whose data ``numpyro.handlers.condition`` holds."""
    while model is not None:
        if isinstance(model, handlers.condition) and model.data:
            return next((n for n in model.data if n in as_written), "")
        model = getattr(model, "fn", None)
    return ""


def condition_holds(who: str, site: str) -> str:
    """A remedy for a model that is conditioned on the data of a site."""
    return (
        f"{who}: numpyro.handlers.condition holds all rows of site {site!r}, but a "
        "batch has only some rows of the other data. Pass them as an argument of the "
        f'model, numpyro.sample("{site}", ..., obs=y).'
    )


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
    if own_sizes(sites) or in_control_flow:
        return sites, ()
    lengths = named
    if lengths is None:
        leaves = flatten_arguments(arguments_of(target))[0]
        lengths = {n for x in leaves for n in lengths_of(x)}
    found: dict[int, list[tuple[Site, int]]] = {}
    for site in sites:
        if site.type != "sample" or not site.observed or site.in_scan:
            continue
        shape = batch_shape(site)
        taken = {frame.dim for frame in site.frames}
        # the first dimension, or any if the user names the axis of the rows
        axes = range(1 if named is None else len(shape))
        fit = [
            axis
            for axis in axes
            if axis < len(shape)
            and shape[axis] > 1
            and shape[axis] in lengths
            and axis - len(shape) not in taken
        ]
        if fit:
            axis = max(fit, key=lambda axis: shape[axis])
            found.setdefault(shape[axis], []).append((site, axis - len(shape)))
    plates = {s.name: s.args[0] for s in sites if s.type == "plate"}
    largest = max([plates[n] for n in candidates(sites, plates)], default=1)
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


def in_one_plate(
    who: str,
    target: ModelTarget,
    sites: list[Site],
    asked: int | Mapping[str, int] | None,
) -> tuple[list[Site], Slices | None, int | Mapping[str, int] | None]:
    """The sites of a model as if its plates with the same number of rows were one.

    Its data cannot be told apart by their length. So row i of all of them together is
    one row. A model without plates is understood in the same way. Plates whose data are
    indexed stay apart.

    :param asked: the rows of a batch, as the user gave them.
    :return: the sites, which of them and which plates have the rows of another one, if
        any, and the rows of a batch by the plates that are left, of several numbers the
        smallest.
    """
    sizes = {s.name: s.args[0] for s in sites if s.type == "plate"}
    holding = candidates(sites, sizes)
    if isinstance(asked, Mapping):  # all rows of other plates are read
        wanted = {sizes[name] for name in asked if name in sizes}
        holding = [name for name in holding if sizes[name] in wanted]
    twice = {n: sizes[n] for n in holding if list(sizes.values()).count(sizes[n]) > 1}
    first: dict[int, str] = {}
    same = {name: first.setdefault(size, name) for name, size in twice.items()}
    if len(first) == len(same) or own_sizes(sites):
        return sites, None, asked
    try:
        trial = replace(target, sizes=twice)
        check_indexing(who, trial, twice, {s.name: s for s in sites})
        return sites, None, asked
    except NeedsValues:
        raise
    except (ValueError, TypeError, AssertionError, IndexError):
        pass
    placed, moved = [], []
    for site in sites:
        frames = list(site.frames)
        for k, frame in enumerate(frames):
            if same.get(frame.name, frame.name) != frame.name:
                frames[k] = frame._replace(name=same[frame.name])
                if site.type == "sample" and site.observed:
                    moved.append((site.name, same[frame.name], frame.dim))
        if site.type != "plate" or same.get(site.name, site.name) == site.name:
            placed.append(site._replace(frames=tuple(frames)))
    if isinstance(asked, Mapping):
        one = {name: same.get(name, name) for name in asked}
        asked = {
            name: min(n for other, n in asked.items() if one[other] == name)
            for name in one.values()
        }
    others = tuple((n, plate) for n, plate in same.items() if n != plate)
    return placed, Slices((), tuple(moved), others), asked


def given_rows(
    who: str,
    target: ModelTarget,
    plates: Mapping[str, int],
    as_written: Mapping[str, Site],
    rows: tuple[tuple[str, str, int], ...],
) -> tuple[ModelTarget, tuple[str, ...]]:
    """The target of a model whose observed sites are in no plate, given its rows."""
    found = find_slices(who, target, plates, as_written, rows)
    held = conditioned(target.model, as_written)
    if isinstance(found, str) and held:
        raise ValueError(condition_holds(who, held))
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
        if found.startswith("latent site") and "_unobserved'" in found:
            name = found.split("'")[1]
            raise ValueError(
                f"{who}: {found}: numpyro.sample(..., obs_mask=...) made it for the "
                "missing values. Put the sites of a row into a plate of the rows. "
                f"{missing_values(name)}"
            )
        if found.startswith("latent site"):
            other = _by_another_axis(who, target, as_written, rows)
            raise ValueError(
                f"{who}: {found} of observed site {site!r}, and most rows are not in a "
                f"minibatch. {other or 'Put'} both into a plate of the rows and "
                "integrate the latent site out by numpyro_minibatch.marginalize("
                "model), or have one value for each group of rows. Otherwise sample "
                "with NUTS."
            )
        raise ValueError(
            f"{who}: observed site {site!r} has {plates[plate]} rows and is in no "
            "plate, so the model is run on some of the rows of its arguments, "
            f"{WHICH_FAILS}{found}. {_along_another_axis(as_written[site])}"
            "If each row follows from the ones before, as in a "
            "time series, use NUTS. Otherwise: "
            f"{_give_names(target, plates)}{_GIVE_ARGUMENTS}"
            f"{example_plate(plates[plate], plate, as_written[site])}"
        )
    return found


def _by_another_axis(
    who: str,
    target: ModelTarget,
    as_written: Mapping[str, Site],
    rows: tuple[tuple[str, str, int], ...],
) -> str:
    """The advice to take rows along another axis, if the model runs on these.

    The rows of a panel may be its units or its times, and effects belong to one.
    """
    leaves = flatten_arguments(arguments_of(target))[0]
    name, plate, _ = rows[0]
    shape = batch_shape(as_written[name])
    for axis in sorted(range(1, len(shape)), key=lambda k: -shape[k]):
        size, dim = shape[axis], axis - len(shape)
        places = _places(leaves, {plate: size})
        if size < 2 or size in shape[:axis] or not places or len(rows) > 1:
            continue
        site = as_written[name]
        frames = [f for f in site.frames if f.name != plate]
        frames.append(CondIndepStackFrame(plate, dim, size))
        moved = {**as_written, name: site._replace(frames=tuple(frames))}
        sized = replace(target, sizes={**target.sizes, plate: size})
        given = _given(sized, places, ((name, plate, dim),))
        with contextlib.suppress(ValueError, TypeError, AssertionError, IndexError):
            check_indexing(who, given, {plate: size}, moved)
            names = suggestion(target.model, arguments_of(target), places)
            return (
                f"With the {size} entries along axis {axis} as its rows, the model "
                f"runs: write {names}. Or: put"
            )
    return ""


def _along_another_axis(site: Site) -> str:
    """The advice to name the axis of the rows if another one is longer."""
    shape = batch_shape(site)
    if max(shape) == shape[0]:
        return ""
    return (
        f"Site {site.name!r} has shape {shape}, and rows are taken along its first "
        f"axis. If they are along axis {shape.index(max(shape))}, name this axis of "
        "the arguments, as in rows={'y': 1}. "
    )


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
    places = _places(flatten_arguments(arguments_of(target))[0], plates)
    if len(places) < 2:
        return ""
    example = suggestion(target.model, arguments_of(target), places)
    return f"name the arguments that have rows, as in {example}; "


_GIVE_ARGUMENTS = (
    "pass all data as arguments of the model (arrays from its closure or from globals "
    "keep all rows, as does jnp.arange(n)); or put the site into a plate and index the "
    "data by it:"
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
    :raises ValueError: the model itself checks that it gets all rows, or needs more of
        a table than an array.
    """
    if len(set(plates.values())) < len(plates):
        return "two plates have the same number of rows, and arrays may be of either"
    leaves = flatten_arguments(arguments_of(target))[0]
    places = _places(leaves, plates)
    if not places:
        return "no argument of the model has as many rows"
    tables = _tables_with_rows(who, target, plates)
    reason, own = "", None
    smaller = [places[:k] + places[k + 1 :] for k in range(len(places))]
    for some in [places, *(smaller if len(places) > 1 else [])]:
        given = _given(target, some, rows)
        try:
            return given, check_indexing(who, given, plates, as_written)
        except NotIndexed as error:
            reason = reason or error.problem
        except NeedsValues:
            raise  # whichever arrays have the rows
        except OwnCheck as error:
            own = own or error
        except (ValueError, TypeError, AssertionError, IndexError) as error:
            reason = reason or first_line(error)
    if own is not None:
        raise ValueError(str(own)) from None
    if tables:
        raise ValueError(_of_tables(who, tables, reason))
    return reason


def _tables_with_rows(
    who: str, target: ModelTarget, plates: Mapping[str, int]
) -> dict[str, Any]:
    """The tables among the arguments that have as many rows as a plate.

    :raises ValueError: the arrays of their rows are not what the model computes with.
    """
    sizes = set(plates.values())
    tables = {
        name: table
        for name, table in tables_among(target.model, *arguments_of(target)).items()
        if sizes & {*lengths_of(table)}
    }
    if labels_differ(tables):
        raise ValueError(_of_tables(who, tables, "their rows have different labels"))
    return tables


def _of_tables(who: str, tables: Mapping[str, Any], reason: str) -> str:
    """The message for a model that does not run on rows of its tables."""
    return (
        f"{who} cannot run the model on some of the rows of its tables ({reason}). "
        f"{as_arrays(tables)}"
    )


def _given(
    target: ModelTarget,
    places: list[tuple[int, str, int]],
    rows: tuple[tuple[str, str, int], ...],
) -> ModelTarget:
    """The target that reads rows of the arrays at these places.

    :param target: the target; plates of it may have the rows of others already.
    """
    known = target.slices or Slices(())
    slices = known._replace(leaves=tuple(places), sites=(*known.sites, *rows))
    return replace(target, slices=slices)


def _places(leaves: list[Any], plates: Mapping[str, int]) -> list[tuple[int, str, int]]:
    """The arrays that have an axis of a plate's length: number, plate and axis."""
    places = []
    for number, leaf in enumerate(leaves):
        shape = lengths_of(leaf)
        if isinstance(leaf, HostRows):
            shape = shape[:1]  # others are not read a few at a time
        for plate, size in plates.items():
            if size > 1 and size in shape:
                places.append((number, plate, shape.index(size)))
                break
    return places


def named_rows(
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
            f"{who}: plate {own[0]!r} has a subsample_size, so the model "
            "indexes its data. Leave out rows, or subsample_size."
        )
    _tables_with_rows(who, target, plates)
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
                f"{fit[1]!r}, which have {array.size} each. Index the data of both "
                "inside their plates, and leave out rows."
            )
        places.append((array.leaf, fit[0], array.axis))
    places.sort()
    given = _given(target, places, rows)
    try:
        return given, check_indexing(who, given, plates, as_written)
    except NeedsValues:
        raise
    except (ValueError, TypeError, AssertionError, IndexError) as error:
        problem = error.problem if isinstance(error, NotIndexed) else str(error)
    left = []
    known = {array.leaf for array in named}
    sizes = {array.size for array in named}
    everything = flatten_arguments(arguments_of(target))[0]
    for number, leaf in enumerate(everything):
        shape = lengths_of(leaf)
        for axis, size in enumerate(shape):
            if number not in known and size in sizes:
                left.append((number, "", axis))
                break
    more = ""
    if left:
        names = Slices(tuple(left)).names(target.model, arguments_of(target))
        more = (
            f" Other arguments with as many entries: {', '.join(names)}. With all of "
            "them it reads "
            f"{suggestion(target.model, arguments_of(target), [*places, *left])}."
        )
    raise ValueError(
        f"{who}: given some of these rows, the model fails: "
        f"{problem.partition(chr(10))[0].rstrip('.')}. Name all arguments that have "
        f"the rows, and no others, each with the axis of the rows.{more}"
    )
