"""Names of dimensions, coordinates and variables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from numpyro_minibatch._model.replay import Run, Site

__all__ = ["Labels"]


@dataclass(frozen=True)
class Labels:
    """Names of variables, dimensions and coordinates.

    :param names: the stored name of each variable.
    :param dims: names of the first axes of some variables, from the user.
    :param sites: the sites of the model.
    :param data_plates: the sizes of the data plates.
    :param coords: coordinates by dimension, from the user.
    """

    names: Mapping[str, str]
    dims: Mapping[str, Sequence[str | None]]
    sites: Mapping[str, Site]
    data_plates: Mapping[str, int]
    coords: Mapping[str, Any]

    @classmethod
    def make(
        cls,
        originals: Sequence[str],
        run: Run,
        dims: Mapping[str, Sequence[str | None]] | None,
        coords: Mapping[str, Any] | None,
    ) -> Labels:
        names: dict[str, str] = {}
        for original in dict.fromkeys(originals):
            name = original.replace("/", ".")
            while name in names.values():
                name += "_"
            names[original] = name
        known = {**{new: old for old, new in names.items()}, **{n: n for n in names}}
        unknown = [name for name in dims or {} if name not in known]
        if unknown:
            raise ValueError(
                f"to_inference_data(dims=...) names {unknown[0]!r}, which is neither a "
                f"site nor an array argument of the model; it has {sorted(names)}."
            )
        return cls(
            names,
            {
                **getattr(run.kernel, "stat_dims", {}),
                **{known[name]: tuple(value) for name, value in (dims or {}).items()},
            },
            run.sites,
            {} if run.target is None else run.target.sizes,
            coords or {},
        )

    @property
    def renamed(self) -> dict[str, str]:
        """The original name of each variable that is stored under another one."""
        return {new: old for old, new in self.names.items() if new != old}

    def draws(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any]
    ) -> xr.Dataset:
        """A group with the dimensions chain and draw."""
        return self._dataset(values, ("chain", "draw"), attrs)

    def draws_of_rungs(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any]
    ) -> xr.Dataset:
        """A group with chain, draw and the rungs of a ladder."""
        kept = {k: v for k, v in attrs.items() if k not in ("temperature", "target")}
        kept["description"] = "draws at the temperatures of all rungs"
        return self._dataset(values, ("chain", "draw", "ladder"), kept)

    def rows(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any], thin: int
    ) -> xr.Dataset:
        """A group with chain, every so many draws, and the rows of a data plate."""
        dims = {}
        for name in values:
            site = self.sites[name]
            axes = self._axes(name, site.shape)
            named = dict(zip(site.axes(site.shape), axes, strict=True))
            (plate,) = (f for f, _, _ in site.frames if f in self.data_plates)
            dims[name] = (named.get(plate, self._plate_name(plate)),)
        group = replace(self, dims=dims, sites={}).draws(values, attrs)
        return group.assign_coords(draw=group["draw"] * thin)

    def entries(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any], thin: int
    ) -> xr.Dataset:
        """The same, with the axes of an observed site without those of its events."""
        sites = {
            name: self.sites[name]._replace(event_dim=0, event_names=())
            for name in values
        }
        dims = {
            name: tuple(self.dims.get(name, ()))[: value.ndim - 2]
            for name, value in values.items()
        }
        group = replace(self, dims=dims, sites=sites).draws(values, attrs)
        return group.assign_coords(draw=group["draw"] * thin)

    def listed(self, attribute: str, names: Iterable[str]) -> dict[str, str]:
        """An attribute that lists variables, if there are any."""
        stored = [self._stored(name) for name in names]
        return {attribute: json.dumps(stored)} if stored else {}

    def data(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any]
    ) -> xr.Dataset:
        """A group of data."""
        return self._dataset(values, (), attrs)

    def _dataset(
        self,
        values: Mapping[str, np.ndarray],
        leading: tuple[str, ...],
        attrs: dict[str, Any],
    ) -> xr.Dataset:
        variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
        sizes: dict[str, int] = {}
        for original, value in values.items():
            shape = value.shape[len(leading) :]
            axes = leading + self._axes(original, shape)
            if len(set(axes)) < len(axes):
                raise ValueError(
                    f"variable {original!r} would have the dimensions {axes}, but a "
                    "dimension can occur only once: pass dims="
                    f"{{{original!r}: [...]}} with {len(shape)} different names."
                )
            variables[self.names.get(original, original)] = (axes, value)
            for axis, size in zip(axes, value.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(
                        f"dimension {axis!r} has {size} entries in {original!r} and "
                        f"{sizes[axis]} in another variable: give them different names "
                        "in dims."
                    )
        coords = {axis: self._coord(axis, size) for axis, size in sizes.items()}
        return xr.Dataset(variables, coords, attrs)

    def _coord(self, axis: str, size: int) -> np.ndarray:
        values = np.asarray(self.coords.get(axis, np.arange(size)))
        if values.shape != (size,):
            raise ValueError(
                f"to_inference_data(coords=...) has values of shape {values.shape} for "
                f"dimension {axis!r}, which has {size} entries."
            )
        return values

    def _axes(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        given = self.dims.get(name, ())
        if len(given) > len(shape):
            raise ValueError(
                f"to_inference_data(dims=...) names {len(given)} dimensions for "
                f"{name!r}, {list(given)}; it has {len(shape)} apart from chain and "
                "draw."
            )
        found: list[str | None] = [None] * len(shape)
        if name in self.sites:
            found = self.sites[name].axes(shape)
        elif name in self.names and shape:
            fitting = [n for n, size in self.data_plates.items() if size == shape[0]]
            found[0] = fitting[0] if len(fitting) == 1 else None
        axes: list[str] = []
        for place in range(len(shape)):
            axis = given[place] if place < len(given) else None
            if axis is None and found[place] is not None:
                axis = self._plate_name(found[place] or "")
            if axis is None:
                unnamed = sum(a.startswith(f"{self._stored(name)}_dim_") for a in axes)
                axis = f"{self._stored(name)}_dim_{unnamed}"
            axes.append(axis)
        return tuple(axes)

    def _stored(self, name: str) -> str:
        return self.names.get(name, name)

    def _plate_name(self, plate: str) -> str:
        name = plate.replace("/", ".")
        # xarray treats a variable with the name of its dimension as a coordinate
        while name in {"chain", "draw", *self.names.values()}:
            name += "_dim"
        return name
