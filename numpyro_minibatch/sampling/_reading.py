"""The draws of a run in a folder, read from disk when they are accessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from numpyro_minibatch.inference_data import as_inference_data
from numpyro_minibatch.sampling._store import Store

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["dataset_of", "export_run", "groups_of", "open_run", "progress_of"]

_PIECE_BYTES = 2**26  # of draws that are exported at once


def open_run(path: str | Path) -> InferenceData:
    """The draws of a run in a folder, also while it is running.

    For a run of several processes, the result has the draws that all chains have.

    :param path: the folder that was given to :func:`sample` as ``out``.
    :return: the groups that have draws, read from disk when they are accessed.
    :raises ValueError: the folder holds no run, no draws yet, or is damaged.

    **Example**

    .. doctest::

        >>> import tempfile
        >>> from numpyro_minibatch import open_run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     open_run(folder)
        Traceback (most recent call last):
        ...
        ValueError: ... holds no run of numpyro_minibatch: it has no run.json.
    """
    found = _groups_in(Path(path))
    return as_inference_data(found, dict(found["posterior"].attrs))


def export_run(path: str | Path, to: str | Path) -> None:
    """Write the draws of a run in a folder to one netCDF file or zarr store.

    A run may be larger than memory, because draws are read and written in pieces. The
    content is that of :func:`open_run`. ``xarray.open_datatree(to)`` reads both
    formats, and ``arviz.from_netcdf(to)`` reads a netCDF file on both lines of ArviZ.

    :param path: the folder that was given to :func:`sample` as ``out``.
    :param to: the file to write. Its ending determines the format: ``.nc`` (with
        ``h5netcdf``) or ``.zarr`` (with ``zarr``). It must not exist.

    :raises ValueError: the folder holds no draws, ``to`` exists, or has another ending.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import export_run
        >>> export_run("run", "run.csv")
        Traceback (most recent call last):
        ...
        ValueError: export_run(to='run.csv') must end in .nc or .zarr.
    """
    to = Path(to)
    if to.suffix not in (".nc", ".zarr"):
        raise ValueError(f"export_run(to={str(to)!r}) must end in .nc or .zarr.")
    if to.exists():
        raise ValueError(
            f"export_run(to={str(to)!r}): the file already exists. Move it away, or "
            "choose another name."
        )
    groups = _groups_in(Path(path))
    write = _to_netcdf if to.suffix == ".nc" else _to_zarr
    # under another name until it is complete
    unfinished = to.with_name(f"unfinished-{to.name}")
    write(groups, unfinished)
    unfinished.replace(to)


def progress_of(path: str | Path) -> str:
    """One line on the progress of the run in a folder, for each process.

    :param path: the folder.
    :raises ValueError: it holds no run.
    """
    return "\n".join(_progress_of(store) for store in _stores(Path(path)))


def _progress_of(store: Store) -> str:
    counts, header = store.counts(), store.header
    warmup = min(counts.get("steps", 0), header["num_warmup"])
    process, processes = header.get("process", (0, 1))
    who = f"process {process}, " if processes > 1 else ""
    modes = ", ".join(dict.fromkeys(header.get("host_rows", {}).values()))
    return (
        f"{who}{header['kernel']}, {header['num_chains']} chains: {warmup} of "
        f"{header['num_warmup']} steps of the warmup, {counts.get('posterior', 0)} of "
        f"{header.get('num_samples', '?')} draws"
        + (f"; rows on the host by {modes}" if modes else "")
    )


# the folder ---------------------------------------------------------------------------


def _stores(path: Path) -> list[Store]:
    """The part of each process, the first one's first."""
    parts = sorted(path.glob("process-*"))
    stores = [Store(part) for part in parts or [path]]
    for store in stores:
        store.read()
    if parts:
        count = stores[0].header["process"][1]
        there = {store.header["process"][0] for store in stores}
        missing = sorted(set(range(count)) - there)
        if missing:
            raise ValueError(
                f"{path} holds a run of {count} processes, but has nothing of process "
                f"{missing[0]} yet."
            )
    return stores


def _groups_in(path: Path) -> dict[str, xr.Dataset]:
    stores = _stores(path)
    counts = [store.counts() for store in stores]
    if not all(count.get("posterior") for count in counts):
        steps = min(count.get("steps", 0) for count in counts)
        raise ValueError(
            f"{path}: the run has no draws yet ({steps} of "
            f"{stores[0].header['num_warmup']} steps of the warmup)."
        )
    least = {name: min(c.get(name, 0) for c in counts) for name in counts[0]}
    parts = [groups_of(store, least) for store in stores]
    if len(parts) == 1:
        return parts[0]
    return {name: _concatenated([part[name] for part in parts]) for name in parts[0]}


def groups_of(store: Store, counts: Mapping[str, int]) -> dict[str, xr.Dataset]:
    """The groups of a run, on disk.

    :param store: its folder, read.
    :param counts: the number of draws of each group.
    """
    groups = {}
    for group in dict.fromkeys(layout.group for layout in store.layouts):
        draws = counts.get(group, 0)
        if not draws:
            continue
        arrays = store.arrays(group, draws)
        groups[group] = dataset_of(
            {
                layout.dims[0]: (layout.dims[1:], array)
                for layout, array in arrays.values()
            },
            {name: np.asarray(value) for name, value in store.header["coords"].items()},
            store.header["attrs"][group],
            store.header.get("first_chain", 0),
        )
    return groups


def dataset_of(
    variables: Mapping[str, tuple[tuple[str, ...], Any]],
    coords: Mapping[str, Any],
    attrs: dict[str, Any],
    first_chain: int = 0,
) -> xr.Dataset:
    """A group from its arrays.

    :param variables: dimensions and values by name.
    :param coords: labels of the dimensions that are not chains and draws.
    :param attrs: its attributes.
    :param first_chain: the number of the first of the chains.
    """
    sizes: dict[str, int] = {}
    for dims, array in variables.values():
        sizes |= dict(zip(dims, array.shape, strict=True))
    chosen = {
        dim: np.arange(size) if dim in ("chain", "draw") else coords[dim]
        for dim, size in sizes.items()
    }
    if "chain" in chosen:
        chosen["chain"] = chosen["chain"] + first_chain
    return xr.Dataset(dict(variables), chosen, attrs)


class _Concatenated(BackendArray):
    """Arrays of several files as one along the first axis, read when accessed."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        self.parts = parts
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        self.dtype = parts[0].dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.BASIC
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        chains, rest = key[0], key[1:]
        places = [(p, k) for p, part in enumerate(self.parts) for k in range(len(part))]
        if not isinstance(chains, slice):
            part, k = places[chains]
            return np.asarray(self.parts[part][(k, *rest)])
        return np.stack([self.parts[p][(k, *rest)] for p, k in places[chains]])


def _concatenated(parts: list[xr.Dataset]) -> xr.Dataset:
    """The chains of several processes."""
    first = parts[0]
    variables = {}
    for name, variable in first.data_vars.items():
        files = [part[name].variable._data for part in parts]
        plain = [np.asanyarray(getattr(file, "array", file)) for file in files]
        lazy = indexing.LazilyIndexedArray(_Concatenated(plain))
        variables[str(name)] = (tuple(map(str, variable.dims)), lazy)
    coords = {str(dim): first[dim].values for dim in first.dims}
    found = dataset_of(variables, coords, dict(first.attrs))
    chains = np.concatenate([part["chain"].values for part in parts])
    return found.assign_coords(chain=chains)


# other formats ------------------------------------------------------------------------


def _pieces(dataset: xr.Dataset) -> Iterator[slice]:
    """Ranges of draws that are read and written at once."""
    draws = dataset.sizes["draw"]
    step = max(1, _PIECE_BYTES // max(dataset.nbytes // max(draws, 1), 1))
    for left in range(0, draws, step):
        yield slice(left, min(left + step, draws))


def _chunked(dataset: xr.Dataset, draws: int, name: str) -> dict[str, Any]:
    """The chunks of variables in the file, so that they can be written in pieces."""
    return {
        str(key): {
            name: tuple(
                min(draws, 1024) if dim == "draw" else variable.sizes[dim]
                for dim in variable.dims
            )
        }
        for key, variable in dataset.data_vars.items()
    }


def _to_netcdf(groups: Mapping[str, xr.Dataset], path: Path) -> None:
    import h5netcdf  # here because only this needs it

    path.unlink(missing_ok=True)
    for name, dataset in groups.items():
        first, *others = _pieces(dataset)
        dataset.isel(draw=first).to_netcdf(
            path,
            mode="a" if path.exists() else "w",
            group=name,
            engine="h5netcdf",
            unlimited_dims=["draw"],
            encoding=_chunked(dataset, first.stop, "chunksizes"),
        )
        with h5netcdf.File(path, "a") as file:
            group = file[name]
            group.resize_dimension("draw", dataset.sizes["draw"])
            group["draw"][:] = dataset["draw"].values
            for piece in others:
                part = dataset.isel(draw=piece)
                for key, variable in part.data_vars.items():
                    stored = group[key]
                    # booleans are stored as small integers
                    stored[:, piece] = variable.values.astype(stored.dtype)


def _to_zarr(groups: Mapping[str, xr.Dataset], path: Path) -> None:
    import zarr  # here because only this needs it

    for name, dataset in groups.items():
        for piece in _pieces(dataset):
            # with an encoding for the first piece
            new = piece.start == 0
            dataset.isel(draw=piece).to_zarr(
                path,
                group=name,
                consolidated=False,
                zarr_format=2,
                **(
                    {"mode": "w", "encoding": _chunked(dataset, piece.stop, "chunks")}
                    if new
                    else {"mode": "a", "append_dim": "draw"}
                ),
            )
    zarr.consolidate_metadata(path, zarr_format=2)
