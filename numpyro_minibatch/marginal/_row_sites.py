"""Sites of rows: their log density row by row, and a site for a marginal one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import (
    BernoulliProbs,
    Distribution,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    constraints,
)
from numpyro.distributions.util import clamp_probs

from numpyro_minibatch.target._densities import log_prob as log_prob_of

__all__ = [
    "RowMarginal",
    "each_key",
    "kind_of",
    "marked_numbers",
    "marked_states",
    "next_marks",
    "row_marks",
    "rows_first",
    "site_rows",
]

_NEVER = 1e30  # minus the log of a density of zero, which may be a finite number
_IMPOSSIBLE = 1e-18  # the square of a probability is a number in single precision


class RowMarginal(Distribution):
    """The marginal distribution of the observations of each row, as its log density.

    :param log_factor: the log density of each row.
    :param event_shape: the shape of the observations of a row.
    :param written_as: the distribution of the observations in the user's model, which
        error messages name.
    """

    pytree_data_fields = ("log_factor",)
    pytree_aux_fields = ("written_as",)

    def __init__(
        self,
        log_factor: Array,
        event_shape: tuple[int, ...],
        written_as: str = "Normal",
    ) -> None:
        self.log_factor = log_factor
        self.written_as = written_as
        super().__init__(jnp.shape(log_factor), event_shape)

    @property
    def support(self) -> Any:
        """Unconstrained: the values are the given observations."""
        return constraints.independent(constraints.real, self.event_dim)

    def log_prob(self, value: Any) -> Array:
        """The log density of each row at the observations it was computed from."""
        return self.log_factor

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """Not available; the model without observations draws new rows."""
        raise NotImplementedError(
            "a marginalized row with observations cannot be sampled. Run the model "
            "without observations (obs=None) to draw latent sites and observations."
        )


def kind_of(fn: Any) -> str:
    """The class of a distribution as the user wrote it."""
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        fn = fn.base_dist
    return getattr(fn, "written_as", type(fn).__name__)


def rows_first(value: Array, site: Any, plates: Sequence[str], event_dim: int) -> Array:
    """An array of a site with the axes of the plates in front of all others."""
    dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
    axes = [dims[name] - event_dim for name in plates]
    return jnp.moveaxis(value, axes, range(len(axes)))


def _log_prob(fn: Any, value: Array) -> Array:
    """The log density of a value, with finite second derivatives.

    NumPyro multiplies both logarithms of a Bernoulli variable by its value. A state
    that cannot follow another one has the smallest probability there is: the second
    derivative of its logarithm overflows, and zero times it is NaN. So only the
    logarithm that is needed is taken, and at such a probability it is constant.
    """
    if isinstance(fn, Independent):
        entries = _log_prob(fn.base_dist, value)
        return entries.sum(tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    base, masks = fn, []
    while isinstance(base, MaskedDistribution | ExpandedDistribution):
        if isinstance(base, MaskedDistribution):
            masks.append(base._mask)
        base = base.base_dist
    if not isinstance(base, BernoulliProbs):
        found = _with_zeros(base, value)
        if found is None:
            return log_prob_of(fn, value)
        for mask in masks:
            found = jnp.where(mask, found, 0.0)
        return found
    p = clamp_probs(base.probs)
    yes = jnp.asarray(value) == 1
    possible = p > _IMPOSSIBLE
    constant = jnp.where(possible, 0.0, jnp.log(jax.lax.stop_gradient(p)))
    found = jnp.where(
        yes,
        jnp.log(jnp.where(yes & possible, p, 1.0)) + constant,
        jnp.log1p(-jnp.where(yes, 0.0, p)),
    )
    for mask in masks:
        found = jnp.where(mask, found, 0.0)
    return found


def _with_zeros(fn: Any, value: Array) -> Array | None:
    """The log density of a discrete value, with finite derivatives at rates of zero.

    ``dist.Poisson(present * rate)`` excludes counts above zero where nothing is present
    and has an infinite derivative there, which zero times a share of zero does not
    remove.

    :return: ``None`` if no parameter of the distribution can be zero.
    """
    if not getattr(fn.support, "is_discrete", False):  # a user's may have no support
        return None
    zero: Any = False
    changed = copy.copy(fn)
    for name, constraint in fn.arg_constraints.items():
        if constraint in (constraints.positive, constraints.unit_interval):
            x = vars(fn).get(name)
            if x is not None and jnp.issubdtype(jnp.result_type(x), jnp.floating):
                zero = zero | (x == 0)
                setattr(changed, name, jnp.where(x == 0, _IMPOSSIBLE, x))
    if zero is False:
        return None
    excluded = jax.lax.stop_gradient(fn.log_prob(value)) < -_NEVER
    return jnp.where(zero & excluded, -jnp.inf, changed.log_prob(value))


def site_rows(site: Any, plates: Sequence[str], scale: float) -> Array:
    """The log density of a site for each row, without the ``scale`` of the plates."""
    fn = site["fn"]
    if site["intermediates"]:
        log_prob = fn.log_prob(site["value"], site["intermediates"])
    else:
        log_prob = _log_prob(fn, site["value"])
    own = site["scale"]
    if own is not None and not (isinstance(own, int | float) and own == scale):
        log_prob = log_prob * (own / scale)
    shape = jnp.broadcast_shapes(jnp.shape(log_prob), tuple(fn.batch_shape))
    rows = rows_first(jnp.broadcast_to(log_prob, shape), site, plates, 0)
    return rows.sum(tuple(range(len(plates), rows.ndim)))


def row_marks(observed: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """A hash of the observations of each row.

    A check of independence gives each row latent values by its mark: the same row has
    the same ones in every batch, and other rows have others. Sums of integers have no
    rounding errors, which depend on the batch.

    :param observed: observations, rows first.
    :param shape: the number of rows along each plate.
    :return: unsigned integers of 32 bits.
    """
    total = jnp.zeros(shape, jnp.uint32)
    for value in observed:
        real = jnp.asarray(value, jnp.float32).reshape(*shape, -1)
        # the last bits may be rounding errors, too, if the model computes them
        bits = jax.lax.bitcast_convert_type(real, jnp.uint32) >> 8
        each = 2 * jnp.arange(real.shape[-1], dtype=jnp.uint32) + 1
        total = total + jnp.sum(_mixed(bits) * each, -1, dtype=jnp.uint32)
    return _mixed(total)


def _mixed(x: Array) -> Array:
    """A bijection of integers after which all bits depend on all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def next_marks(marks: Array) -> Array:
    """Other marks of the same rows."""
    return _mixed(marks + jnp.uint32(0x9E3779B9))


def marked_numbers(marks: Array) -> Array:
    """A number in [-1, 1) for each row."""
    return (marks >> 8).astype(jnp.result_type(float)) / 2.0**23 - 1.0


def marked_states(marks: Array, count: int) -> Array:
    """A number below ``count`` for each row."""
    return ((marks >> 8) % jnp.uint32(count)).astype(jnp.int32)


def each_key(keys: Array, fn: Callable[[Array], Array]) -> Array:
    """Apply a function to the key of each row.

    :param keys: an array of keys.
    :param fn: from one key to an array.
    :return: the axes of ``keys`` and then those of the values.
    """
    found = jax.vmap(fn)(keys.reshape(-1))
    return found.reshape(keys.shape + found.shape[1:])
