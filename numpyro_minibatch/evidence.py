"""The evidence of a model, from the rungs of a ladder.

If only the likelihood is tempered, the normalising constants ``Z(b)`` of
``prior * likelihood ** b`` range from ``Z(0) = 1`` to the evidence ``Z(1)``.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpyro.util import find_stack_level
from scipy.interpolate import PchipInterpolator
from scipy.special import logsumexp

from numpyro_minibatch.diagnostics import effective_sample_size
from numpyro_minibatch.inference_data import get_group

__all__ = ["Evidence", "log_evidence"]

_FEWEST = 20  # the fewest effective draws for a mean of exponentials


@dataclass(frozen=True)
class Evidence:
    """An estimate of the log evidence.

    :param value: the estimate of ``log p(data)``, in nats.
    :param error: its Monte Carlo standard error.
    :param discretisation: for thermodynamic integration, the error of the quadrature:
        in each interval the difference between rules, one of which uses the derivatives
        at both ends, but at most as much as the bounds allow. More rungs make it
        smaller. Zero for stepping stones.
    :param method: ``"stepping-stone"`` or ``"thermodynamic"``.
    :param steps: the contribution of each pair of neighbouring rungs, from the coldest.
    :param lower: a lower bound for any ladder. The mean log likelihood rises with the
        inverse temperature, so that the integral is at least the sum with the hotter
        end of each interval; the bound is two standard errors below that sum.
    :param upper: an upper bound: two standard errors above the sum with the colder
        ends.
    """

    value: float
    error: float
    discretisation: float
    method: str
    steps: tuple[float, ...]
    lower: float = -math.inf
    upper: float = math.inf

    def __str__(self) -> str:
        rules = f", quadrature {self.discretisation:.2g}"
        return (
            f"log evidence {self.value:.4g} +- {self.error:.2g}"
            f"{rules if self.discretisation else ''} ({self.method}), between "
            f"{self.lower:.4g} and {self.upper:.4g}"
        )


def log_evidence(
    idata: Any, method: Literal["auto", "stepping-stone", "thermodynamic"] = "auto"
) -> Evidence:
    """The log evidence of a model from a run of :class:`ReplicaExchange`.

    The ladder must end at ``math.inf``, the prior, and temper the likelihood only.

    Stepping stones [1] average ``likelihood ** (b_j - b_k)`` over the draws of the
    hotter rung of each pair. They need exact likelihoods (``swap="exact"`` or the full
    batch), because the exponential of a noisy log likelihood is biased. Thermodynamic
    integration [2] is linear in the log likelihood, so that the noise of minibatches
    averages out, but it approximates an integral over ``b`` by a sum over rungs.

    Both fail if the last interval, from the hottest rung to the prior, is too wide.
    With a thousand rows, one parameter and a ladder to 100 and then the prior, the
    integral was 2.7 to 3.1 nats too small with 20 to 6 rungs. With ten parameters,
    stepping stones were 7 to 11 nats too small, with a standard error below one. A
    warning then names the missing temperature. ``lower`` and ``upper`` are bounds in
    any case.

    :param idata: what :func:`to_inference_data` returned.
    :param method: ``"auto"`` uses stepping stones if the likelihoods are exact.
    :raises ValueError: the run is not one of such a ladder, it has too few draws, or
        stepping stones are requested and the likelihoods are noisy.

    **References:**

    1. Wangang Xie, Paul O. Lewis, Yu Fan, Lynn Kuo, Ming-Hui Chen (2011), *Improving
       marginal likelihood estimation for Bayesian phylogenetic model selection*,
       Systematic Biology 60(2), equation 9.
    2. Nial Friel, Anthony N. Pettitt (2008), *Marginal likelihood estimation via power
       posteriors*, JRSS B 70(3), equation 4.

    **Example**

    .. doctest::

        >>> import jax, math, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_minibatch import ReplicaExchange, log_evidence
        >>> from numpyro_minibatch import to_inference_data

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     numpyro.sample("obs", dist.Normal(mu, 1), obs=y)

        >>> ladder = [1.0, 3.0, 10.0, math.inf]
        >>> kernel = ReplicaExchange(NUTS(model), temperatures=ladder, swap="exact")
        >>> mcmc = MCMC(kernel, num_warmup=300, num_samples=1000, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), 1.5)
        >>> found = log_evidence(to_inference_data(mcmc))
        >>> abs(found.value - float(dist.Normal(0, 2**0.5).log_prob(1.5))) < 0.1
        True
    """
    if method not in ("auto", "stepping-stone", "thermodynamic"):
        raise ValueError(
            'log_evidence(method=...) must be "auto", "stepping-stone" or '
            f'"thermodynamic", got {method!r}.'
        )
    inverse, energies, exact = _rungs(idata)
    if method == "stepping-stone" and not exact:
        raise ValueError(
            'log_evidence(method="stepping-stone") averages exponentials of the log '
            "likelihoods, but those of this run are from minibatches, whose noise "
            'biases the average. Run with ReplicaExchange(..., swap="exact"), or write '
            'method="thermodynamic".'
        )
    if method == "stepping-stone" or (method == "auto" and exact):
        found = _stepping_stones(inverse, energies)
    else:
        found = _thermodynamic(inverse, energies)
    lower, upper = _bounds(inverse, energies)
    return replace(found, lower=lower, upper=upper)


def _bounds(inverse: np.ndarray, energies: np.ndarray) -> tuple[float, float]:
    """A lower and an upper bound of the integral."""
    gaps = (inverse[:, :-1] - inverse[:, 1:])[:, None]
    with np.errstate(invalid="ignore"):
        hot, cold = (
            (gaps * e).sum(-1) for e in (energies[..., 1:], energies[..., :-1])
        )
        lower, upper = (
            float(sums.mean() + sign * 2 * _standard_error(sums))
            if np.isfinite(sums).all()
            else sign * math.inf
            for sums, sign in ((hot, -1), (cold, 1))
        )
    return lower, upper


def _warn(inverse: np.ndarray, energies: np.ndarray, pair: int, what: str) -> None:
    """Warn that an interval of the ladder is too wide.

    :param pair: the interval, from the coldest.
    :param what: the evidence for it.
    """
    hot, cold = inverse[:, pair + 1].mean(), inverse[:, pair].mean()
    scale = float(np.ma.masked_invalid(energies[..., pair + 1]).std())
    if hot == 0:
        # the temperature at which log likelihoods of draws of the prior differ by one
        ends = f"{1 / cold:.3g} and the prior"
        wanted = f"up to about {scale:.2g} before math.inf"
    else:
        ends = f"{1 / cold:.3g} and {1 / hot:.3g}"
        wanted = "between them, or num_replicas= of more"
    warnings.warn(
        f"log_evidence: the temperatures {ends} are too far apart: {what}. The error "
        f"may be larger than stated. Add temperatures {wanted}.",
        UserWarning,
        stacklevel=find_stack_level(),
    )


def _rungs(idata: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    """Inverse temperatures ``(chain, rung)``, log likelihoods, whether these are exact.

    The log likelihoods have the shape ``(chain, draw, rung)``.
    """
    stats = get_group(idata, "sample_stats")
    names = ("log_likelihood", "temperatures", "swap_log_ratio_variance")
    if stats is None or any(name not in stats for name in names):
        raise ValueError(
            "log_evidence(idata) needs what to_inference_data(mcmc) returned after a "
            "run of ReplicaExchange, with the statistics "
            f"{', '.join(names)}."
        )
    energies, temperatures, noise = (
        np.asarray(stats[name].transpose("chain", "draw", ...), float) for name in names
    )
    ladder = temperatures[0, -1]
    if json.loads(stats.attrs.get("settings", "{}")).get("temper_prior"):
        raise ValueError(
            "log_evidence(idata): the ladder of this run tempers the prior, too, and "
            "does not end at the prior. Run with temper_prior=False."
        )
    if not math.isinf(ladder[-1]):
        raise ValueError(
            f"log_evidence(idata): the ladder ends at the temperature {ladder[-1]:g}; "
            "for the evidence it must reach the prior. Run with "
            "temperatures=[..., math.inf]."
        )
    if (temperatures != temperatures[:, -1:]).any():
        raise ValueError(
            "log_evidence(idata): the rungs moved during these draws. Leave out the "
            "draws of the warmup."
        )
    # in the first draws some rungs may not have taken part in a swap yet
    seen = np.maximum.accumulate(~np.isnan(energies).any((0, 2)))
    if seen.sum() < 10:
        raise ValueError(
            f"log_evidence(idata) needs more draws than {energies.shape[1]}, of which "
            f"{seen.sum()} have the log likelihoods of all rungs."
        )
    measured = noise[np.isfinite(noise)]
    exact = measured.size > 0 and measured.max() == 0.0
    return 1.0 / temperatures[:, -1], energies[:, seen], bool(exact)


def _stepping_stones(inverse: np.ndarray, energies: np.ndarray) -> Evidence:
    gaps = inverse[:, :-1] - inverse[:, 1:]
    exponents = gaps[:, None] * energies[:, :, 1:]
    chains, number = energies.shape[:2]
    if (inverse == inverse[0]).all():
        steps = logsumexp(exponents, axis=(0, 1), keepdims=True)
        steps = steps[0] - math.log(chains * number)  # shape (1, pair)
        # to first order, the error is that of the mean of this: shape (chain, draw)
        error = _standard_error((np.exp(exponents - steps) - 1.0).sum(-1))
    else:  # ladders that adapted, one for each chain
        steps = logsumexp(exponents, axis=1) - math.log(number)
        error = float(steps.sum(-1).std(ddof=1) / math.sqrt(chains))
    # the effective number of draws of the hotter rung in the mean of each pair
    weights = np.exp(exponents - exponents.max((0, 1)))
    resting = weights.sum((0, 1)) ** 2 / np.square(weights).sum((0, 1))
    if resting.min() < _FEWEST:
        worst = int(resting.argmin())
        _warn(
            inverse,
            energies,
            worst,
            f"only {resting[worst]:.2g} of {chains * number} draws of the hotter one "
            "determine the mean",
        )
    return Evidence(
        value=float(steps.sum(-1).mean()),
        error=error,
        discretisation=0.0,
        method="stepping-stone",
        steps=tuple(steps.mean(0).tolist()),
    )


def _thermodynamic(inverse: np.ndarray, energies: np.ndarray) -> Evidence:
    if not np.isfinite(energies).all():
        raise ValueError(
            "log_evidence(idata): some draws of hot rungs have a likelihood of zero, "
            "whose logarithm has no mean. Write tighter priors, or run with "
            'swap="exact" and take method="stepping-stone".'
        )
    gaps = inverse[:, :-1] - inverse[:, 1:]
    pairs = 0.5 * (energies[:, :, :-1] + energies[:, :, 1:])
    trapezoids = gaps[:, None] * pairs  # (chain, draw, pair)
    means = energies.mean(1)
    # the mean rises with the inverse temperature, hence a monotone interpolant
    curves = [
        PchipInterpolator(b[::-1], u[::-1]) for b, u in zip(inverse, means, strict=True)
    ]
    steps = np.array(
        [
            [
                float(curve.integrate(low, high))
                for high, low in zip(b, b[1:], strict=False)
            ]
            for curve, b in zip(curves, inverse, strict=True)
        ]
    )
    plain = trapezoids.mean(1)  # shape (chain, pair)
    # the derivative of the mean is the variance: the rule of Euler and Maclaurin
    slopes = energies.var(1)
    better = plain + gaps**2 / 12 * (slopes[:, 1:] - slopes[:, :-1])
    ends = np.stack([gaps * means[:, 1:], gaps * means[:, :-1]])
    allowed = np.abs(ends - steps).max(0)
    off = np.maximum(
        np.abs(steps - plain), np.minimum(np.abs(steps - better), allowed)
    ).mean(0)
    error = _standard_error(trapezoids.sum(-1))
    if off.max() > max(1.0, 2 * error):
        worst = int(off.argmax())
        _warn(inverse, energies, worst, f"quadrature rules differ by {off[worst]:.2g}")
    return Evidence(
        value=float(steps.sum(-1).mean()),
        error=error,
        discretisation=float(off.sum()),
        method="thermodynamic",
        steps=tuple(steps.mean(0).tolist()),
    )


def _standard_error(series: np.ndarray) -> float:
    """The Monte Carlo standard error of the mean of ``(chain, draw)`` numbers."""
    return float(series.std(ddof=1) / math.sqrt(effective_sample_size(series)))
