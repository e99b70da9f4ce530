"""The five modes, and the arguments of every method: jax and numpy only.

The paper says that its mixture has five isolated modes in two dimensions and shows them
in a figure without numbers, so the numbers here are ours: one mode in the middle and
one at each corner of a square, with different weights. The barrier between the middle
and a corner is 16 nats at temperature 1, and 1.4 at the hottest of the paper's seven
rungs.

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
    """Log density of the mixture, up to a constant; coordinates are the last axis."""
    square = jnp.square((z[..., None, :] - CENTERS) / SD).sum(-1)
    return jax.scipy.special.logsumexp(jnp.log(WEIGHTS) - 0.5 * square, axis=-1)


def cells(z: np.ndarray) -> np.ndarray:
    """The nearest mode of each position."""
    return np.square(z[..., None, :] - CENTERS).sum(-1).argmin(-1)


def round_trips(rung: np.ndarray) -> int:
    """The number of round trips between the coldest and the hottest rung.

    :param rung: the rung of each replica after each draw, ``(..., draws, R)``.
    """
    hottest = rung.shape[-1] - 1
    paths = np.moveaxis(rung, -2, -1).reshape(-1, rung.shape[-2])
    # of the visits to either end, only those that follow the other end are turning
    # points; they alternate along a path, and every second one completes a round trip
    count = 0
    for path in paths:
        ends = path[(path == 0) | (path == hottest)]
        if ends.size and hottest:
            turns = ends[np.concatenate([[True], np.diff(ends) != 0])]
            count += max(0, len(turns) - 1 - int(turns[0] != 0)) // 2
    return count


def worker_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments of a method's process."""
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
