"""Microseconds per step by number of rows: ``pytest benchmarks --benchmark-only``."""

from __future__ import annotations

import pytest
from cases import by_hand, make_data, ours

pytest.importorskip("pytest_benchmark")
STEPS = 20_000
SIZES = [10_000, 100_000, 1_000_000, 10_000_000]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"N={size:.0e}")
def data(request):
    return make_data(request.param)


@pytest.mark.parametrize("name", ["MINT", "MHMinibatch"])
def test_kernel(benchmark, data, name):
    run = ours(name, data)
    run(STEPS)
    benchmark.extra_info["steps"] = STEPS
    benchmark.pedantic(run, args=(STEPS,), rounds=7)


def test_by_hand(benchmark, data):
    run = by_hand(data)
    run(STEPS)
    benchmark.extra_info["steps"] = STEPS
    benchmark.pedantic(run, args=(STEPS,), rounds=7)
