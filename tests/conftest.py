"""Says in the header of a run what it ran on, and frees compiled programs; sets
nothing, so that a test file behaves the same on its own.

The marks ``slow``, ``long_runs``, ``x64`` and ``once`` are explained in
``pyproject.toml``.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# ArviZ 0.23 writes a file at its first import on each day. Two processes that do so at
# once end with an error: here it is written before there are others.
import arviz  # noqa: F401
import jax
import pytest

from numpyro_minibatch.kernels._shared import survey


@pytest.fixture(autouse=True)
def _own_set_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel has a set-up of its own, since tests change what a set-up does."""
    monkeypatch.setattr(survey, "_MOST_FOUND", 0)


def pytest_report_header() -> str:
    """Name the versions and the precision that this run tests."""
    packages = ("numpyro", "jax", "numpy", "arviz", "xarray")
    return ", ".join(
        [*(f"{name} {version(name)}" for name in packages)]
        + [f"JAX_ENABLE_X64 {'on' if _is_double() else 'off'}"]
    )


# Files that check distributions and not interfaces: other versions of Python and of the
# dependencies change interfaces, and these files take most of the time.
STATISTICAL = {
    "test_accept",
    "test_amagold",
    "test_control_variate",
    "test_coverage",
    "test_cycles",
    "test_cyclical",
    "test_cyclical_benchmarks",
    "test_dynamics",
    "test_ensemble",
    "test_equi_energy",
    "test_equi_energy_benchmark",
    "test_estimate",
    "test_evidence",
    "test_exactness",
    "test_long_runs_benchmark",
    "test_marginal_error",
    "test_marginal_kernels",
    "test_matched",
    "test_marginal_recover",
    "test_paper_figures",
    "test_batch_permutation",
    "test_proposal",
    "test_replica_exchange",
    "test_replica_exchange_benchmarks",
    "test_rivals",
    "test_stochastic_gradient_benchmarks",
    "test_batch_strata",
    "test_tails",
}

# Files of tests that make so many steps that they are compiled with optimisation.
LONG_RUNS = {"test_exactness"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these files."""
    for item in items:
        if item.path.stem in STATISTICAL:
            item.add_marker("once")
        if item.path.stem in LONG_RUNS:
            item.add_marker("long_runs")


_UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))  # seconds since 1970
_NO_TIME = "there was no time for this test"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would start after the time that ``.ci/run`` gives."""
    if time.time() > _UNTIL:
        pytest.skip(_NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests that were."""
    skipped = terminalreporter.getreports("skipped")
    count = sum(_NO_TIME in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.section(f"NO TIME for {count} tests", sep="!")
        if "TESTS_SKIPPED" in os.environ:  # the file that .ci/run counts
            with open(os.environ["TESTS_SKIPPED"], "a") as file:
                file.write(f"{count}\n")


def _is_double() -> bool:
    value = os.environ.get("JAX_ENABLE_X64", "").lower()
    return value in ("1", "true", "yes", "on")


_MOST_MAPS = 35_000  # Linux allows a process 65,530; a program takes several


@pytest.fixture(autouse=True, scope="module")
def _programs_are_freed() -> Iterator[None]:
    """Free what a module compiled: a process can map so many programs, and no more."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _there_is_room_for_programs() -> Iterator[None]:
    """Free them earlier in a module that compiles very many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()
