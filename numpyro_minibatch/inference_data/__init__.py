"""Conversion of a run of NumPyro's MCMC to ArviZ's groups."""

from typing import TYPE_CHECKING

from numpyro_minibatch.inference_data._collected import (
    collected_groups as collected_groups,
)
from numpyro_minibatch.inference_data._convert import to_inference_data
from numpyro_minibatch.inference_data._errors import (
    errors_of_kernel as errors_of_kernel,
)
from numpyro_minibatch.inference_data._errors import (
    with_errors as with_errors,
)
from numpyro_minibatch.inference_data._groups import (
    as_inference_data as as_inference_data,
)
from numpyro_minibatch.inference_data._groups import get_group as get_group
from numpyro_minibatch.inference_data._groups import samples_of as samples_of

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data._groups import InferenceData as InferenceData

__all__ = ["to_inference_data"]
