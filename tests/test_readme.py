"""The code in README.md runs, and prints the output shown there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of a language in a Markdown text."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def labels(text: str) -> list[str]:
    """The labels left of the numbers in the lines of a diagnosis."""
    return [re.split(r"  +", line.strip())[0] for line in text.splitlines()]


@pytest.mark.slow
def test_the_start_of_the_readme_runs_as_it_is():
    text = (ROOT / "README.md").read_text()
    (start,), output = blocks(text, "python"), blocks(text, "text")[0]
    # another process: a user's session has no settings of the test suite
    done = subprocess.run(
        [sys.executable, "-c", start],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # digits depend on the machine, but the sizes of the run and of a batch do not
    assert labels(done.stdout) == labels(output)
    assert done.stdout.splitlines()[:3] == output.splitlines()[:3]


def test_the_start_is_short_and_that_of_the_documentation():
    text = (ROOT / "README.md").read_text()
    (start,) = blocks(text, "python")
    lines = [line for line in start.splitlines() if line]
    assert len(lines) <= 11 and max(map(len, lines)) <= 88
    begin, end = text.index("<!-- start -->"), text.index("<!-- end -->")
    assert start in text[begin:end]
    page = (ROOT / "docs" / "index.md").read_text()
    assert (
        "```{include} ../README.md\n:start-after: <!-- start -->\n"
        ":end-before: <!-- end -->\n```"
    ) in page


def test_the_table_is_that_of_the_results():
    from benchmarks.temperature_one import report

    text = (ROOT / "README.md").read_text()
    best = report.fastest(report.RESULTS / "side_by_side")
    assert len(best) >= 8 and report.with_table(text, report.measured(best)) == text


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\nb\n```sh\nls\n```\n"
    assert blocks(text, "python") == ["x = 1\n"]
    assert labels("K\n  R-hat            1.0 (b)\n  noise sd         1") == [
        *("K", "R-hat", "noise sd")
    ]
