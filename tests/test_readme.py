"""The code that README.md shows runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks of Python in a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_start_of_the_readme_runs_as_it_is():
    (start,) = python_blocks((ROOT / "README.md").read_text())
    # another process: a user's session has no settings of the test suite
    done = subprocess.run(
        [sys.executable, "-c", start],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "acceptance rate" in done.stdout  # of the diagnosis, which comes last


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\nb\n```sh\nls\n```\n"
    assert python_blocks(text) == ["x = 1\n"]
