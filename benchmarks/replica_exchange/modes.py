"""The five modes, and what every rival is told: jax and numpy only.

The paper says that its mixture has five isolated modes in two dimensions and draws them
in a figure without numbers, so the numbers here are ours: one mode in the middle and
one at each corner of a square, of different weights. Between the middle and a corner
there is a barrier of 16 nats at temperature 1, and of 1.4 at the hottest of the paper's
seven rungs.

Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), Replica-exchange Nosé-Hoover
dynamics for Bayesian learning on large datasets, section 4.1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CENTERS = np.array([[0.0, 0.0], [4.0, 4.0], [-4.0, 4.0], [-4.0, -4.0], [4.0, -4.0]])
WEIGHTS = np.array([0.30, 0.25, 0.20, 0.15, 0.10])
SD = 0.5
TEMPERATURES = 1.5 ** np.arange(7)


def log_density(z: Any) -> Any:
    """Of the mixture, up to a constant; the last axis is the coordinates'."""
    square = jnp.square((z[..., None, :] - CENTERS) / SD).sum(-1)
    return jax.scipy.special.logsumexp(jnp.log(WEIGHTS) - 0.5 * square, axis=-1)


def cells(z: np.ndarray) -> np.ndarray:
    """The nearest mode of each position."""
    return np.square(z[..., None, :] - CENTERS).sum(-1).argmin(-1)


def round_trips(rung: np.ndarray) -> int:
    """How often replicas went from the coldest rung to the hottest and back.

    :param rung: where each replica is after each draw, ``(..., draws, R)``.
    """
    hottest = rung.shape[-1] - 1
    paths = np.moveaxis(rung, -2, -1).reshape(-1, rung.shape[-2])
    # of the visits to either end only those that follow the other end are a turn; a
    # path's turns alternate, and every second one ends a trip
    count = 0
    for path in paths:
        ends = path[(path == 0) | (path == hottest)]
        if ends.size and hottest:
            turns = ends[np.concatenate([[True], np.diff(ends) != 0])]
            count += max(0, len(turns) - 1 - int(turns[0] != 0)) // 2
    return count


def worker_options(argv: list[str] | None = None) -> argparse.Namespace:
    """What the process of a rival is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--method", default="")
    parser.add_argument("--chains", type=int, required=True)
    parser.add_argument("--draws", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--step-size", type=float, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)
