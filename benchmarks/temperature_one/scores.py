"""Scores of draws: effective sample size, bias and sd relative to the reference."""

from __future__ import annotations

from typing import Any

import arviz as az
import numpy as np

from .prepare import Prepared


def scores(draws: np.ndarray, prepared: Prepared, seconds: float, rows: float) -> Any:
    """Score the draws of one or several chains.

    :param draws: reported quantities, shape ``(chains, draws, quantities)``.
    :param prepared: the problem with its reference.
    :param seconds: the time that sampling took.
    :param rows: the rows of data that were read.
    :returns: the scores; ``bias_noise`` is the largest Monte Carlo standard error of a
        mean, below which a bias cannot be detected. Bias and noise are in posterior
        standard deviations.
    """
    if not np.isfinite(draws).all():
        return {"ess": 0.0, "failed": "draws that are not finite"}
    each = np.array(
        [float(az.ess(draws[..., q], method="bulk")) for q in range(draws.shape[-1])]
    )
    tail = min(
        float(az.ess(draws[..., q], method="tail")) for q in range(draws.shape[-1])
    )
    mean = draws.mean((0, 1), dtype=np.float64)
    sd = draws.std((0, 1), dtype=np.float64)
    bias = np.abs(mean - prepared.mean) / prepared.sd
    ratio = sd / prepared.sd
    noise = np.hypot(sd / np.sqrt(each), prepared.mcse) / prepared.sd
    ess = float(each.min())
    return {
        "draws": draws.shape[0] * draws.shape[1],
        "ess": ess,
        "ess_tail": tail,
        "ess_per_second": ess / seconds,
        "ess_per_row": ess / rows,
        "bias": float(bias.max()),
        "bias_at": int(bias.argmax()),
        "bias_noise": float(noise.max()),
        "sd_ratio": [float(ratio.min()), float(ratio.max())],
    }
