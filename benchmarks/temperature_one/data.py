"""The data: simulated with known parameters, or published sets in a folder.

The true parameters do not depend on the number of rows, so that sizes can be compared.
"""

from __future__ import annotations

import bz2
import os
from pathlib import Path

import numpy as np

#: the arguments of a model, one row per observation in each
Arrays = tuple[np.ndarray, ...]


def simulated_logistic(num_rows: int) -> Arrays:
    """A logistic regression with 19 standard normal columns and an intercept."""
    from numpyro_minibatch.datasets import simulate_logistic

    x, y, _ = simulate_logistic(0, num_rows, 19)
    return np.concatenate([x, np.ones((num_rows, 1), np.float32)], 1), y


def rare_column(num_rows: int = 200_000, num_rare: int = 15) -> Arrays:
    """A logistic regression whose last column is nonzero in ``num_rare`` rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, 20), np.float32)
    x[num_rare:, -1] = 0.0
    x, beta = rng.permutation(x), np.linspace(-1.0, 1.0, 20)
    return x, _labels(rng, x @ beta)


def covertype() -> Arrays:
    """Covertype, class 2 against 3, standardised, with an intercept."""
    from numpyro_minibatch.datasets import load_covertype

    x, y = load_covertype()
    return np.concatenate([x, np.ones((len(y), 1), np.float32)], 1), y


def a9a() -> Arrays:
    """The training half of Adult in Platt's binary coding: 123 columns of 0 and 1."""
    path = _published("a9a/adult.trn.bz2", "https://doi.org/10.24432/C5XW20")
    with bz2.open(path, "rt") as file:
        lines = [line.split() for line in file]
    x = np.zeros((len(lines), 123), np.float32)
    for row, line in enumerate(lines):
        for entry in line[1:]:
            column, value = entry.split(":")
            x[row, int(column)] = float(value)
    return x, np.array([float(line[0]) > 0 for line in lines], np.int32)


def protein() -> Arrays:
    """Physicochemical properties of protein structure, standardised; 45,730 rows."""
    path = _published(
        "uci_regression/protein-tertiary-structure/data/data.txt",
        "https://doi.org/10.24432/C5QW3H",
    )
    table = np.loadtxt(path)
    table = ((table - table.mean(0)) / table.std(0)).astype(np.float32)
    # in the standard splits the columns are 9 features and then the response
    x, y = table[:, :9], table[:, 9]
    return np.concatenate([x, np.ones((len(y), 1), np.float32)], 1), y


def heavy_poisson(num_rows: int = 200_000) -> Arrays:
    """Counts with 9 Student-t columns of 4 degrees of freedom and an intercept."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(4, (num_rows, 10)).astype(np.float32)
    x[:, -1] = 1.0
    beta = np.linspace(-0.1, 0.1, 10)
    return x, rng.poisson(np.exp(x @ beta)).astype(np.int32)


def hierarchy(num_rows: int, num_groups: int) -> Arrays:
    """Labels of ``num_groups`` groups with three columns."""
    rng = np.random.default_rng(0)
    theta = 0.5 + 0.7 * rng.standard_normal(num_groups)
    x = rng.standard_normal((num_rows, 3), np.float32)
    group = rng.integers(num_groups, size=num_rows).astype(np.int32)
    return x, group, _labels(rng, theta[group] + x @ np.array([-1.0, 0.0, 1.0]))


def _labels(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    return (rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int32)


def _published(name: str, source: str) -> Path:
    folder = os.environ.get("NUMPYRO_MINIBATCH_DATA")
    if folder is None or not (Path(folder) / name).is_file():
        raise FileNotFoundError(
            f"{name} was not found in the folder that the environment variable "
            f"NUMPYRO_MINIBATCH_DATA names ({folder}). Put it there; it is published "
            f"at {source}."
        )
    return Path(folder) / name
