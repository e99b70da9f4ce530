"""The five modes as rows of data with noise, and scores of draws."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.diagnostics import effective_sample_size
from scipy.stats import norm

from numpyro_minibatch import Target

from .modes import CENTERS, cells, log_density

SIZE, WIDTH = 200, 20  # rows, and rows of a batch


def slopes(variance: float, size: int = SIZE, width: int = WIDTH) -> np.ndarray:
    """Linear terms of the rows, which sum to zero.

    They give the gradient of ``width`` rows, drawn without replacement, noise with this
    variance in each coordinate and no correlation.
    """
    quantiles = norm.ppf((np.arange(size) + 0.5) / size)
    rng = np.random.default_rng(0)
    c = np.stack([rng.permutation(quantiles) for _ in range(2)], -1)
    c -= c.mean(0)
    c = c @ np.linalg.inv(np.linalg.cholesky(np.cov(c.T))).T
    return c * np.sqrt(variance * width / (1 - width / size)) / size


def target(variance: float) -> Target:
    """The mixture as rows of data with noisy batches; the whole density is tempered."""
    terms = jnp.asarray(slopes(variance), jnp.result_type(float))

    def log_likelihood(z: Array, rows: Array) -> Array:
        return terms[rows] @ z + log_density(z) / SIZE

    return Target(lambda z: jnp.zeros(()), log_likelihood, SIZE)


@cache
def truth(count: int = 401) -> tuple[np.ndarray, float]:
    """Masses of the cells, and mean squared distance to the nearest mode.

    Both are per coordinate, by quadrature; with modes this far apart they are the
    weights and the variance.
    """
    axis = np.linspace(-8.0, 8.0, count)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    p = np.exp(np.asarray(log_density(points), np.float64))
    p /= p.sum()
    nearest = cells(points)
    square = 0.5 * np.square(points - CENTERS[nearest]).sum(-1)
    return np.bincount(nearest, p, len(CENTERS)), float(p @ square)


def _mean_and_error(per_chain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    error = per_chain.std(0, ddof=1) / np.sqrt(len(per_chain))
    return per_chain.mean(0), error


def alone(values: np.ndarray) -> float:
    """Effective sample size of all draws, each chain separately; ``(chains, n)``.

    The sum of autocorrelations ends at the first negative pair. A chain that stays
    where it started appears well mixed by itself, so this is not a diagnostic.
    """
    return float(sum(effective_sample_size(chain[None]) for chain in values))


def together(values: np.ndarray, method: str = "mean") -> float:
    """ArviZ's effective sample size of all draws, small if chains differ."""
    import arviz as az

    return float(az.ess(values, method=method))


def held_against(draws: np.ndarray) -> dict[str, Any]:
    """Errors of draws of shape ``(chains, n, 2)``, with Monte Carlo errors."""
    draws = np.asarray(draws, np.float64)
    weights, variance = truth()
    nearest = cells(draws)
    inside = nearest[..., None] == np.arange(len(CENTERS))
    shares, error = _mean_and_error(inside.mean(1))
    square = 0.5 * np.square(draws - CENTERS[nearest]).sum(-1).mean(1) / variance
    ratio, ratio_error = _mean_and_error(square)
    number = draws.shape[0] * draws.shape[1]
    scale = 1e5 / number
    return {
        "draws": number,
        "shares": shares.tolist(),
        "shares_error": error.tolist(),
        "total_variation": float(0.5 * np.abs(shares - weights).sum()),
        # for exact draws as correlated as these: half the mean |error| of each fraction
        "total_variation_expected": float(0.5 * np.sqrt(2 / np.pi) * error.sum()),
        "variance_ratio": float(ratio),
        "variance_ratio_error": float(ratio_error),
        "modes_a_chain": float(inside.any(1).sum(-1).mean()),
        "changes_of_mode": int((np.diff(nearest, axis=1) != 0).sum()),
        "ess_alone": scale * min(alone(draws[..., i]) for i in range(2)),
        "ess_arviz": scale * min(together(draws[..., i]) for i in range(2)),
        "ess_arviz_bulk": scale
        * min(together(draws[..., i], "bulk") for i in range(2)),
        "ess_modes": scale
        * min(
            # a mode that was never visited has no effective sample
            together(one.astype(float)) if 0 < one.mean() < 1 else 0.0
            for one in np.moveaxis(inside, -1, 0)
        ),
    }
