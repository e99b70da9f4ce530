"""The form of a run's result: names, axes and attributes from its first draws."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xarray as xr
from jax import Array

from numpyro_minibatch._internal.static import Seen
from numpyro_minibatch.host_rows import map_rows
from numpyro_minibatch.inference_data import collected_groups, to_inference_data

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["Drawn", "groups", "template_of"]


@dataclass
class Drawn:
    """Draws with the attributes of a run that :func:`to_inference_data` reads."""

    sampler: Any
    fields: Mapping[str, Any]
    thinning: int
    _args: tuple
    _kwargs: Mapping[str, Any]
    _states: bool = True
    constrained: bool = True
    post_warmup_state: Any = None
    last_state: Any = True

    def get_samples(self, group_by_chain: bool = True) -> Any:
        return self.fields[self.sampler.sample_field]

    def get_extra_fields(self, group_by_chain: bool = True) -> dict[str, Any]:
        position = self.sampler.sample_field
        return {n: v for n, v in self.fields.items() if n != position}


def groups(drawn: Drawn) -> dict[str, dict[str, np.ndarray]]:
    return {name: values for name, values in collected_groups(drawn).items() if values}


# results of replaying models, so that running a kernel again compiles nothing; for
# large data they are not kept
_TEMPLATES: OrderedDict[Hashable, tuple[Seen, Any]] = OrderedDict()
_MOST_TEMPLATES, _MOST_TEMPLATE_BYTES = 8, 2**25


def template_of(identity: Hashable, drawn: Drawn) -> Any:
    """The result of the first draws, which later runs of the same program reuse."""
    # except for data on the host, which stay there
    given = map_rows(lambda _: None, (drawn._args, dict(drawn._kwargs)))
    leaves = jax.tree.leaves(given)
    arrays = [x for x in leaves if isinstance(x, np.ndarray | Array)]
    identity, seen = (identity, drawn.thinning), Seen.of(arrays)
    known = _TEMPLATES.get(identity)
    if known is not None and known[0] == seen:
        return known[1]
    template = to_inference_data(drawn)
    if sum(x.nbytes for x in arrays) <= _MOST_TEMPLATE_BYTES:
        _TEMPLATES[identity] = seen, template
        while len(_TEMPLATES) > _MOST_TEMPLATES:
            _TEMPLATES.popitem(last=False)
    return template
