"""Checks for mistakes before anything compiles: plates, rows and shapes.

Everything here runs the model abstractly, so that it costs no arithmetic on the data.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import find_stack_level

from numpyro_minibatch._internal.static import Static, digest
from numpyro_minibatch._model.content import known_content
from numpyro_minibatch._model.indexing import (
    NeedsValues,
    NotIndexed,
    check_flow,
    check_indexing,
    check_lined_up,
    latent_of_rows,
    not_indexed,
)
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch._model.plates import (
    PLAIN,
    Advised,
    candidates,
    check_sites,
    choose_plates,
    other_lengths,
)
from numpyro_minibatch._model.row_arguments import (
    condition_holds,
    conditioned,
    find_slices,
    given_rows,
    in_one_plate,
    named_rows,
    with_row_plate,
)
from numpyro_minibatch._model.row_axes import RowAxes
from numpyro_minibatch._model.sites import (
    AllRows,
    Site,
    abstract_sites,
    explained,
    own_sizes,
    without_rows,
)
from numpyro_minibatch._model.tables import check_masked
from numpyro_minibatch._model.values import (
    arrays_around,
    as_arguments,
    first_line,
    is_of_values,
)
from numpyro_minibatch.host_rows import find_rows, map_rows
from numpyro_minibatch.target import ModelTarget

__all__ = ["inspect_model"]

# layouts of models whose digest a driver passed; they hold no data
_FOUND: WeakKeyDictionary[Callable, OrderedDict[Hashable, Layout]] = WeakKeyDictionary()
_MOST_FOUND = 8  # of each model
_AS_ARGUMENTS = (
    " Or pass arrays with one entry for each of its rows as arguments of the model, "
    "lagged ones as y[1:] and y[:-1]; arrays from its closure or from globals keep all "
    "of their rows."
)


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
    advised: Advised = PLAIN,
    sampled: bool = True,
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
    :param advised: what to advise where no rows of a batch are given.
    :param sampled: whether the model is sampled from these rows, and not only evaluated
        on them, so that they must depend on a parameter.
    :return: the layout, and the values of ``param`` sites to freeze.
    :raises ValueError: the model cannot be sampled from minibatches; the message says
        what was found and what to write instead.
    """
    check_masked(who, model, args, kwargs)
    options = who, _hashable(sizes), full, default, whole, rows, sampled
    key = _known_by(args, kwargs, options)
    try:
        found = _FOUND.setdefault(model, OrderedDict()) if key is not None else {}
    except TypeError:  # it cannot be referred to weakly
        found = {}
    if key in found:
        return found[key], {}
    asked = _Asked(sizes, full, default, whole, rows, advised, sampled)
    try:
        layout, frozen, warned = _inspected(who, model, args, kwargs, asked)
    except NeedsValues as error:
        plain = TypeError(str(error)).with_traceback(error.__traceback__)
        raise plain from error.__cause__
    except ValueError as error:
        remedy = without_rows(model, args, kwargs)
        if not remedy:
            raise
        raise ValueError(f"{error}{remedy}").with_traceback(
            error.__traceback__
        ) from error.__cause__
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
    """A key of what the layout of a model depends on; ``None`` if it is not known."""
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


class _Asked(NamedTuple):
    """What :func:`inspect_model` was asked for, in its words."""

    sizes: int | Mapping[str, int] | None
    full: bool
    default: int | None
    whole: bool
    named: RowAxes | None
    advised: Advised
    sampled: bool


def _inspected(
    who: str,
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    asked: _Asked,
) -> tuple[Layout, dict[str, Any], bool]:
    """The result of :func:`inspect_model`, and whether it has a warning to give."""
    target = ModelTarget(model=model, args=args, kwargs=kwargs, sizes={})
    sites, frozen = _sites_as_written(who, target)
    _warn_of_params(who, frozen, sites)
    with_plates = partial(_with_plates, who, target, sites, frozen, asked)
    try:
        return with_plates(None)
    except ValueError as error:
        # rows of the largest plate depend on each other, or have latent values
        by_name = asked.named is not None or isinstance(asked.sizes, Mapping)
        if asked.whole or by_name or own_sizes(sites):
            raise
        for length in other_lengths(sites):
            with contextlib.suppress(ValueError, NotImplementedError):
                return with_plates({length})
        raise error


def _with_plates(
    who: str,
    target: ModelTarget,
    sites: list[Site],
    frozen: dict[str, Any],
    asked: _Asked,
    lengths: set[int] | None,
) -> tuple[Layout, dict[str, Any], bool]:
    """The same, with the plates that have given numbers of rows, by default any."""
    sizes, full, default, whole, named, advised, sampled = asked
    given = moved = None
    around = _around(target.model, sites)
    if whole:
        names = {s.name: s.args[0] for s in sites if s.name in own_sizes(sites)}
        widths, plates = names, names
    else:
        if named is not None:
            given = named.find(who, target.model, target.args, target.kwargs)
            lengths = {x.size for x in given}
        named_lengths = None if named is None else lengths
        sites, rows = with_row_plate(target, sites, named_lengths)
        sites, moved, sizes = in_one_plate(who, target, sites, sizes)
        widths, plates = choose_plates(
            who, sites, sizes, full, default, advised, _held(sites, lengths), around
        )
    # whichever plate the rows are taken from, this is wrong in any of them
    every = {site.name: site.args[0] for site in sites if site.type == "plate"}
    check_lined_up(who, sites, every)
    latents = check_sites(who, sites, plates)
    target = replace(target, sizes=plates, frozen=frozen, slices=moved)
    by_name = {site.name: site for site in sites}
    if named is not None and given is not None:
        who_names = f"{who}(rows={named!r})"
        own = [name for name in own_sizes(sites) if name in plates]
        target, by_row = named_rows(
            who_names, target, plates, by_name, rows, given, own
        )
    elif not whole and rows and rows[0][1] in plates:
        target, by_row = given_rows(who, target, plates, by_name, rows)
    else:
        target, by_row = _indexed_or_given(who, target, plates, sites, latents, whole)
    found = {site.name: site for site in sites if site.name in latents}
    z = {
        name: jax.ShapeDtypeStruct(site.free_shape, jnp.result_type(float))
        for name, site in found.items()
    }
    check_parameters = sampled and not whole
    warned = check_flow(who, target, widths, z, check_parameters)
    ordered = tuple(sorted(plates.items()))
    layout = Layout(
        ordered,
        tuple((n, widths[n]) for n, _ in ordered),
        latents,
        tuple(found[name].free_shape for name in latents),
        tuple(found[name].value_shape or () for name in latents),
        default is not None and sizes is None and not full and not own_sizes(sites),
        target.slices,
        by_row,
        bool(own_sizes(sites)),
        tuple(name for name in latents if found[name].circular),
    )
    return layout, frozen, warned


def _around(model: Any, sites: list[Site]) -> str:
    """The advice to pass arrays that a model reads from its surroundings."""
    observed = [s for s in sites if s.type == "sample" and s.observed]
    # the shapes of a site need not fit, which is refused later
    sizes = {n for s in observed for n in (*s.shape, *(s.value_shape or ()))}
    rows = {name: x for name, x in arrays_around(model).items() if len(x) in sizes}
    if not rows:
        return ""
    size = max(map(len, rows.values()))
    names = [name for name, x in rows.items() if len(x) == size]
    one = len(names) == 1
    return (
        f"{' and '.join(names)} {'has' if one else 'have'} {size} rows and "
        f"{'comes' if one else 'come'} from outside of the model; pass "
        f"{'it as an argument' if one else 'them as arguments'}, "
        f"{as_arguments(model, names)}"
    )


def _held(sites: list[Site], lengths: set[int] | None) -> set[int] | None:
    """These numbers of rows, if a plate has one of them."""
    plates = {s.name: s.args for s in sites if s.type == "plate"}
    return lengths if lengths and candidates(sites, plates, lengths) else None


def _warn_of_params(who: str, frozen: Mapping[str, Any], sites: list[Site]) -> None:
    """Warn about ``param`` sites, which keep their values."""
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


def _indexed_or_given(
    who: str,
    target: ModelTarget,
    plates: Mapping[str, int],
    sites: list[Site],
    latents: tuple[str, ...],
    whole: bool,
) -> tuple[ModelTarget, tuple[str, ...]]:
    """The target of a model that indexes its data, or is given rows of its arguments.

    :param whole: whether the model is run on all rows in one piece.
    :return: the target, and the deterministic sites in no plate that have a value for
        each row.
    """
    by_name = {site.name: site for site in sites}
    try:
        if target.slices is None:
            return target, check_indexing(who, target, plates, by_name)
        site, plate, _ = target.slices.sites[0]
        problem = f"site {site!r} is in a plate as large as {plate!r}, and not indexed"
        raise NotIndexed(not_indexed(who, problem, plates[plate], plate), problem)
    except ValueError as error:
        if isinstance(error, NotIndexed):
            error = ValueError(str(error)).with_traceback(error.__traceback__)
        if whole or own_sizes(sites):
            raise error from None
        found = find_slices(who, target, plates, by_name, ())
        if not isinstance(found, str):
            return found
        held = conditioned(target.model, by_name)
        if held:
            raise ValueError(condition_holds(who, held)) from None
        local = latent_of_rows(sites, latents, plates)
        if local:
            raise ValueError(f"{who}: {local}") from None
        around = _around(target.model, sites)
        remedy = f" Or: {around}." if around else _AS_ARGUMENTS
        raise ValueError(f"{error}{remedy}") from None


def _sites_as_written(
    who: str, target: ModelTarget
) -> tuple[list[Site], dict[str, Any]]:
    """The sites of a model that runs as written; raises with the reason if not."""
    try:
        with explained(who, target.model, target.args, target.kwargs):
            return abstract_sites(target)
    except (ValueError, TypeError, AssertionError) as error:
        if is_of_values(error.__cause__):
            _raise_reason_by_values(who, target)
        if find_rows((target.args, dict(target.kwargs))):
            try:
                found = abstract_sites(target, in_memory=True)
            except (ValueError, TypeError, AssertionError):
                raise error from None
            if own_sizes(found[0]):
                raise  # it takes rows by indices, and yet needs all of them
            return found
        model = AllRows(target.model)
        try:
            abstract_sites(
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
                raise ValueError(not_indexed(who, problem, size)) from error
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
        sites = with_row_plate(target, abstract_sites(target)[0])[0]
    except Exception:  # it needs values that are computed
        return
    choose_plates(who, sites, None, False, 1)
