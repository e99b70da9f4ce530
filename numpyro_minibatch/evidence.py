"""How likely are the data: the evidence of a model, from the rungs of a ladder.

With the likelihood alone tempered, the normalising constants ``Z(b)`` of
``prior * likelihood ** b`` run from ``Z(0) = 1`` to the evidence ``Z(1)``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.special import logsumexp

from numpyro_minibatch.diagnostics import effective_sample_size
from numpyro_minibatch.inference_data import get_group

__all__ = ["Evidence", "log_evidence"]


@dataclass(frozen=True)
class Evidence:
    """An estimate of the log evidence.

    :param value: the estimate of ``log p(data)``, in nats.
    :param error: its Monte Carlo standard error.
    :param discretisation: for thermodynamic integration, by how much two rules of
        quadrature differ; more rungs make it smaller. Zero for stepping stones.
    :param method: ``"stepping-stone"`` or ``"thermodynamic"``.
    :param steps: what each pair of neighbouring rungs adds, from the coldest.
    """

    value: float
    error: float
    discretisation: float
    method: str
    steps: tuple[float, ...]

    def __str__(self) -> str:
        rules = f", rules differ by {self.discretisation:.2g}"
        return (
            f"log evidence {self.value:.4g} +- {self.error:.2g}"
            f"{rules if self.discretisation else ''} ({self.method})"
        )


def log_evidence(
    idata: Any, method: Literal["auto", "stepping-stone", "thermodynamic"] = "auto"
) -> Evidence:
    """The log evidence of a model from a run of :class:`ReplicaExchange`.

    The ladder must end at ``math.inf``, the prior, and temper the likelihood only.

    Stepping stones [1] average ``likelihood ** (b_j - b_k)`` over the draws of the
    hotter rung of each pair. They need exact likelihoods (``swap="exact"`` or the full
    batch): the exponential of a noisy one is biased. Thermodynamic integration [2] is
    linear in the log likelihood, so that the noise of minibatches averages out, but a
    sum over rungs stands for an integral over ``b``.

    :param idata: what :func:`to_inference_data` returned.
    :param method: ``"auto"`` takes stepping stones where the likelihoods are exact.
    :raises ValueError: the run is not one of such a ladder, its draws are too few, or
        stepping stones are asked for and the likelihoods are noisy.

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
            "likelihoods, and those of this run were read from minibatches, whose "
            'noise biases it. Run with ReplicaExchange(..., swap="exact"), or write '
            'method="thermodynamic".'
        )
    if method == "stepping-stone" or (method == "auto" and exact):
        return _stepping_stones(inverse, energies)
    return _thermodynamic(inverse, energies)


def _rungs(idata: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    """Inverse temperatures ``(chain, rung)``, log likelihoods, and if they are exact.

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
            "log_evidence(idata): the ladder of this run tempers the prior, too, so "
            "that it does not lead to the prior. Run with temper_prior=False."
        )
    if not math.isinf(ladder[-1]):
        raise ValueError(
            f"log_evidence(idata): the ladder ends at the temperature {ladder[-1]:g}; "
            "for the evidence it must reach the prior. Run with "
            "temperatures=[..., math.inf]."
        )
    if (temperatures != temperatures[:, -1:]).any():
        raise ValueError(
            "log_evidence(idata): the rungs moved during these draws. Leave out those "
            "of the warmup."
        )
    # the first draws may come before a rung took part in a swap
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
    else:  # ladders that adapted, each chain its own
        steps = logsumexp(exponents, axis=1) - math.log(number)
        error = float(steps.sum(-1).std(ddof=1) / math.sqrt(chains))
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
    value = steps.sum(-1).mean()
    plain = trapezoids.mean(1).sum(-1).mean()
    return Evidence(
        value=float(value),
        error=_standard_error(trapezoids.sum(-1)),
        discretisation=float(abs(value - plain)),
        method="thermodynamic",
        steps=tuple(steps.mean(0).tolist()),
    )


def _standard_error(series: np.ndarray) -> float:
    """The Monte Carlo standard error of the mean of ``(chain, draw)`` numbers."""
    return float(series.std(ddof=1) / math.sqrt(effective_sample_size(series)))
