"""Tables of pandas, Polars and xarray among the arguments of a model.

A batch is rows of arrays. Where a model needs more of a table than the array that JAX
makes of it, the message shows which arrays to pass in its place. NumPy's masked arrays
are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from numpyro_minibatch._internal.functions import library_of
from numpyro_minibatch.target import flatten_arguments, named_arguments

__all__ = ["as_arrays", "check_masked", "labels_differ", "lengths", "tables_among"]

_MOST_SHOWN = 3
_LIBRARIES = {"pandas": "pandas", "polars": "Polars", "xarray": "xarray"}


def lengths(leaf: Any) -> tuple[int, ...]:
    """The lengths of the axes of a leaf; empty unless it has numbers in rows.

    :param leaf: any leaf of the arguments of a model.
    """
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUTMm":
        return ()
    shape = getattr(leaf, "shape", ())
    if _is_table(leaf) and hasattr(leaf, "data_vars"):
        shape = tuple(leaf.sizes.values())
    return shape if isinstance(shape, tuple) else ()


def tables_among(
    model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The tables among the arguments of a model, by what the model calls them.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    """
    return _named(model, args, kwargs, _is_table)


def _named(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    which: Callable[[Any], bool],
) -> dict[str, Any]:
    """Some leaves of the arguments of a model, by what the model calls them."""
    if not any(map(which, flatten_arguments((args, dict(kwargs)))[0])):
        return {}
    return {
        name + jax.tree_util.keystr(path): leaf
        for name, tree in named_arguments(model, args, kwargs).items()
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if which(leaf)
    }


def check_masked(
    who: str, model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Raise if an argument of a model is a masked array, which JAX does not have.

    :param who: the kernel's name, for the message.
    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :raises ValueError: there is one.
    """
    for name in _named(model, args, kwargs, np.ma.isMaskedArray):
        raise ValueError(
            f"{who}: {name} is a NumPy masked array, and JAX's arrays have no mask. "
            f"Pass {name}.filled(0.0) in its place and ~numpy.ma.getmaskarray({name}) "
            "as another argument, observed, and write "
            "numpyro.handlers.mask(mask=observed) around the observed site."
        )


def labels_differ(tables: Mapping[str, Any]) -> bool:
    """Whether sums of two tables pair other rows than sums of their arrays.

    pandas and xarray pair rows by their labels, and arrays by their places.

    :param tables: the tables by name.
    """
    known: dict[Any, Any] = {}
    for table in tables.values():
        labels = getattr(table, "indexes", None)  # of xarray, by dimension
        if labels is None:
            labels = {"": table.index} if hasattr(table, "iloc") else {}
        for axis, found in labels.items():
            if not known.setdefault(axis, found).equals(found):
                return True
    return False


def _is_table(leaf: Any) -> bool:
    return library_of(type(leaf)) in _LIBRARIES


def as_arrays(tables: Mapping[str, Any]) -> str:
    """What to pass in place of tables, and to write in the model.

    :param tables: the tables by name.
    """
    found = [
        f"{name} is {_kind(table)}: {_instead(name, table)}"
        for name, table in tables.items()
    ]
    if len(found) > _MOST_SHOWN:
        found[_MOST_SHOWN:] = [f"and so on for {len(found) - _MOST_SHOWN} more"]
    changes, leave = "", ".values and .to_numpy()"
    named = [name for name, table in tables.items() if _has_columns(table)]
    if named:
        changes = f" read {named[0]}[...] by name"
    for name in named:
        columns = [*getattr(tables[name], "columns", ())]
        if columns:  # the length of a dict is the number of its arrays
            length = f"len({name}[{columns[0]!r}])"
            changes += f", write {length} in place of len({name}) and {name}.shape[0]"
            if "cat.codes" in found[0]:
                leave = f".cat.codes, {leave}"
            break
    joined = f"{changes}, and" if changes else ""
    return f"{'; '.join(found)}. In the model,{joined} leave out {leave}."


def _instead(name: str, table: Any) -> str:
    """What to pass in place of a table."""
    if not _has_columns(table) and not _is_numeric(table):
        return (
            f"compute names, codes = numpy.unique({name}, return_inverse=True) before "
            f"the model, and pass codes and len(names) in its place"
        )
    return f"pass {_arrays(name, table)} in its place"


def _is_numeric(column: Any) -> bool:
    """Whether JAX can have the values of a column."""
    return np.asarray(column[:1]).dtype.kind in "biufc"


def _kind(table: Any) -> str:
    library = _LIBRARIES[library_of(type(table))]
    article = "an" if library == "xarray" else "a"
    return f"{article} {library} {type(table).__name__}"


def _has_columns(table: Any) -> bool:
    return hasattr(table, "columns") or hasattr(table, "data_vars")


def _arrays(name: str, table: Any) -> str:
    if not _has_columns(table):
        values = ".values" if library_of(type(table)) == "xarray" else ".to_numpy()"
        return name + values
    if hasattr(table, "data_vars"):
        return f"{{k: {name}[k].values for k in {name}}}"
    columns = f"{name}.columns"
    if hasattr(table, "select_dtypes"):  # of pandas, which may have columns of text
        kinds = ["number", "bool"]
        numbers = table.select_dtypes(kinds)
        if numbers.shape != table.shape:
            columns = f"{name}.select_dtypes({kinds})"
        words = [k for k in table.columns if k not in numbers.columns]
        codes = ", ".join(
            f"{k!r}: {name}[{k!r}].astype('category').cat.codes.to_numpy()"
            for k in words[:_MOST_SHOWN]
        )
    else:
        codes = ""
    arrays = f"{{k: {name}[k].to_numpy() for k in {columns}}}"
    return f"{arrays} | {{{codes}}}" if codes else arrays
