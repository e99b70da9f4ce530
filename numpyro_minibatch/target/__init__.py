"""Targets: a NumPyro model as a prior and one log likelihood per row."""

from numpyro_minibatch.target._arguments import Slices as Slices
from numpyro_minibatch.target._arguments import condition_inside as condition_inside
from numpyro_minibatch.target._arguments import flatten_arguments as flatten_arguments
from numpyro_minibatch.target._arguments import given_data as given_data
from numpyro_minibatch.target._arguments import is_marginalized as is_marginalized
from numpyro_minibatch.target._arguments import named_arguments as named_arguments
from numpyro_minibatch.target._arguments import (
    with_bound_arguments as with_bound_arguments,
)
from numpyro_minibatch.target._contract import Position as Position
from numpyro_minibatch.target._contract import Target, Terms
from numpyro_minibatch.target._contract import integrates as integrates
from numpyro_minibatch.target._contract import takes_highest as takes_highest
from numpyro_minibatch.target._contract import traces_rows as traces_rows
from numpyro_minibatch.target._contract import without_integrals as without_integrals
from numpyro_minibatch.target._handlers import AllRows as AllRows
from numpyro_minibatch.target._handlers import Subsample as Subsample
from numpyro_minibatch.target._model import ModelTarget
from numpyro_minibatch.target._model import data_frames as data_frames

__all__ = ["ModelTarget", "Target", "Terms"]
