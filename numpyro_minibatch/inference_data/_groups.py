"""The container of groups, of the installed version of ArviZ."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import xarray as xr

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["as_inference_data", "get_group", "samples_of"]


def as_inference_data(groups: dict[str, Any], attrs: dict[str, Any]) -> InferenceData:
    """Put the groups into the container of the installed version of ArviZ."""
    # by the version: ArviZ 1 has a name `InferenceData` as well
    if int(version("arviz").partition(".")[0]) >= 1:
        tree = xr.DataTree.from_dict(groups)
        tree.attrs = dict(attrs)
        return tree
    import arviz as az  # a slow import, which also prints an announcement of ArviZ 1

    return az.InferenceData(attrs, **groups)


def get_group(idata: Any, name: str) -> xr.Dataset | None:
    """A group of an InferenceData or a DataTree; ``None`` if it has no such group."""
    if isinstance(idata, xr.DataTree):
        return idata[name].to_dataset() if name in idata.children else None
    return idata[name] if name in idata.groups() else None


def samples_of(idata: Any) -> Any:
    """The draws of a result, by the model's names for its sites, chains first.

    :param idata: the result of :func:`to_inference_data`, or an equivalent object.
    :return: a dict; an array for a target that is a function of an array.
    """
    posterior = get_group(idata, "posterior")
    assert posterior is not None
    original = json.loads(posterior.attrs.get("renamed_sites", "{}"))
    found = {
        original.get(str(name), str(name)): values.transpose(
            "chain", "draw", ...
        ).to_numpy()
        for name, values in posterior.data_vars.items()
    }
    return found["z"] if list(found) == ["z"] else found
