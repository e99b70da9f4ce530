"""Latent numbers whose density has a kink, written as a side and a normal number.

Quadrature converges slowly where a density has a kink, and its nodes pass the kink
while the parameters change, so that sums over them are not smooth either. A Laplace
variable is its location plus or minus an exponential variable. The sides are two states
of the row, which are summed, and in each of them the density is smooth.

The logarithm of an exponential variable has an exponential tail, for which nodes of a
Gauss-Hermite rule converge slowly. So the exponential variable is a function of a
nearly normal one: eleven nodes leave 1e-3 of a row's log likelihood where they left
7e-3. Set-ups choose more nodes where that is too much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer.reparam import Reparam

from numpyro_minibatch.marginal._sites import Found, Level

__all__ = ["TwoSides", "kinked_sites", "parts_of", "with_wholes"]

_KINKED = (dist.Laplace, dist.AsymmetricLaplace, dist.AsymmetricLaplaceQuantile)
_LINEAR, _CUBIC = 1.5976, 0.070566  # of the normal distribution function's logit


class TwoSides(Reparam):
    """Write a Laplace variable as a side of its location and a score of distance."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[Any, Any]:
        """Sample both parts.

        :param name: the site.
        :param fn: its distribution.
        :param obs: its value, if it is given.
        """
        if obs is not None:
            return fn, obs
        base, shape, event_dim = self._unwrap(fn)
        left, right, above = _halves(base)
        side, score = (
            numpyro.sample(part, self._wrap(own, shape, event_dim))
            for part, own in zip(
                parts_of(name),
                (dist.Bernoulli(probs=above), _Score()),
                strict=True,
            )
        )
        distance = jax.nn.softplus(_logit(score))
        return None, base.loc + jnp.where(side == 1, right, -left) * distance


def _logit(score: Any) -> Any:
    """The logit of the distribution function of :class:`_Score`."""
    return score * (_LINEAR + _CUBIC * score**2)


class _Score(dist.Distribution):
    """A nearly standard normal number whose distribution function is elementary.

    It is the logistic function of a cubic polynomial, which differs from the normal
    distribution function by at most 1.4e-4 [1]_. So a function of the number that is
    exponentially distributed is elementary, too: the softplus function of that
    polynomial. The difference is no error, because this is the exact density.

    .. [1] S. R. Bowling, M. T. Khasawneh, S. Kaewkuekool and B. R. Cho. A logistic
       approximation to the cumulative normal distribution. *Journal of Industrial
       Engineering and Management* 2 (2009).
    """

    support = dist.constraints.real

    def __init__(self) -> None:
        super().__init__()

    @property
    def mean(self) -> Array:
        """Zero: the density is symmetric."""
        return jnp.zeros(())

    def log_prob(self, value: Any) -> Any:
        """The log density."""
        logit, slope = _logit(value), _LINEAR + 3 * _CUBIC * value**2
        return jnp.log(slope) - logit - 2 * jax.nn.softplus(-logit)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """The root of the polynomial at logistic numbers, in closed form."""
        logit = jax.random.logistic(key, sample_shape)
        p, q = _LINEAR / _CUBIC, logit / _CUBIC
        angle = jnp.arcsinh(1.5 * q / p * np.sqrt(3 / p))
        return 2 * np.sqrt(p / 3) * jnp.sinh(angle / 3)


def _halves(base: Any) -> tuple[Array, Array, Array | float]:
    """The mean distances on the left and on the right, and the chance of the right."""
    scale = base.scale
    if isinstance(base, dist.Laplace):
        return scale, scale, 0.5
    if isinstance(base, dist.AsymmetricLaplaceQuantile):
        return scale / (1 - base.quantile), scale / base.quantile, 1 - base.quantile
    square = base.asymmetry**2
    return scale * base.asymmetry, scale / base.asymmetry, 1 / (1 + square)


def parts_of(name: str) -> tuple[str, str]:
    """The names of the two parts of a site."""
    return f"{name}_side", f"{name}_score"


def kinked_sites(
    found: Sequence[Found], sites: Collection[str] | None
) -> tuple[str, ...]:
    """The latent sites of rows, among those to integrate out, that have a kink.

    :param found: the sites of the model.
    :param sites: names of the sites to integrate out; ``None`` for all.
    """
    observed = [set(s.plates) for s in found if s.type == "sample" and s.observed]
    return tuple(
        s.name
        for s in found
        if s.type == "sample"
        and not s.observed
        and not s.in_scan
        and s.plates
        and any(set(s.plates) <= plates for plates in observed)
        and (sites is None or s.name in sites)
        and _has_kink(s.fn)
    )


def _has_kink(fn: Any) -> bool:
    """Whether :class:`TwoSides` can write a distribution, possibly that of an event."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return type(fn) in _KINKED  # a subclass may have another density


def with_wholes(level: Level, kinked: Collection[str]) -> Level:
    """A level whose sites know which site of the user's model they are a part of."""
    whole = {part: name for name in kinked for part in parts_of(name)}
    sites = [site._replace(part_of=whole.get(site.name, "")) for site in level.sites]
    return level._replace(sites=tuple(sites))
