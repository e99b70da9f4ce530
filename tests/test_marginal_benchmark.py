"""The comparison with references in the benchmark of `marginalize`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from benchmarks.marginal_references import Compared, moments


def compared(draws: np.ndarray) -> Compared:
    """Two halves of the same draws."""
    return Compared.of(*map(moments, np.split(draws, 2)))


def test_chance_knows_that_numbers_depend_on_each_other() -> None:
    """Copies of one number have one error, so that their root mean square varies."""
    rng = np.random.default_rng(0)
    apart = compared(rng.normal(size=(8, 1000, 60)))
    copies = compared(np.repeat(rng.normal(size=(8, 1000, 1)), 60, -1))
    typical, largest = apart.by_chance()
    assert typical < 1.2
    assert largest == pytest.approx(3.5, abs=0.4)  # of 120 normal numbers
    typical, largest = copies.by_chance()
    # of a mean and a standard deviation
    assert typical == pytest.approx(1.73, abs=0.25)
    assert largest == pytest.approx(2.24, abs=0.35)
