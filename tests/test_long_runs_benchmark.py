"""Small versions of the benchmarks of long runs: they run, and their claims hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_runs import costs, kills
from numpyro_minibatch.sampling import _pace, _run

# separate processes, which compile their own programs
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]


def test_killed_runs_are_those_of_an_uninterrupted_one(monkeypatch):
    monkeypatch.setattr(_pace.Pace, "saw", _pace.Pace.saw)
    monkeypatch.setattr(_run, "_COMMIT_SECONDS", -1.0)
    found = kills.main(["--small"])
    (run,) = found["runs"]
    assert run["kills"] == len(run["moments"]) == 2
    assert run["identical_to_uninterrupted"]
    assert run["opened_after_each_kill_identical"]


def test_costs(monkeypatch):
    monkeypatch.setattr(_pace.Pace, "saw", _pace.Pace.saw)
    found = costs.main(["--small"])
    assert found["second_call"]["second"]["compiled"] == []
    assert found["second_call"]["first"]["compiled"]
    assert all(case["identical"] for case in found["rows_on_host"].values())
    assert {case["mode"] for case in found["large_file"]} == {"alias"}
