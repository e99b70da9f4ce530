"""Files for GitHub, Read the Docs and pre-commit refer to existing targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.skipif(
    not (ROOT / ".github").is_dir(), reason="a source distribution has none of them"
)


def load(path: str) -> Any:
    yaml = pytest.importorskip("yaml")  # flax, of the extra `test`, installs it
    # YAML 1.1 reads the key `on` as True; nothing here is another boolean
    return yaml.load((ROOT / path).read_text(), yaml.BaseLoader)


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_workflow_tests_every_version_of_python() -> None:
    workflow = load(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    versions = job["strategy"]["matrix"]["python"]
    stated = "Programming Language :: Python :: "
    found = [c.removeprefix(stated) for c in PROJECT["classifiers"] if stated in c]
    assert versions == [
        version for version in found if re.fullmatch(r"3\.\d+", version)
    ]
    (command,) = [step for step in job["steps"] if "run" in step]
    assert os.access(ROOT / command["run"], os.X_OK)
    assert command["env"]["PYTHON"] == "python${{ matrix.python }}"


def test_the_hooks_are_targets_of_the_makefile() -> None:
    (repo,) = load(".pre-commit-config.yaml")["repos"]
    for hook in repo["hooks"]:
        make, target = hook["entry"].split()
        assert make == "make" and target in targets()


def test_read_the_docs_builds_what_make_docs_builds() -> None:
    config = load(".readthedocs.yaml")
    assert (ROOT / config["sphinx"]["configuration"]).is_file()
    (install,) = config["python"]["install"]
    assert set(install["extra_requirements"]) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_have_labelled_fields(name: str) -> None:
    form = load(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in form["body"])


@pytest.fixture
def ci(tmp_path: Path) -> Any:
    """`.ci/run` with a `make` that prints its environment and does nothing."""
    make = tmp_path / "make"
    make.write_text(
        '#!/bin/sh\necho "make [$PYTHON] [$VENV] [$NUMPYRO_MINIBATCH_DATA] $*"\n'
    )
    make.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV")}

    def run(**variables: str) -> list[str]:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [ROOT / ".ci" / "run"],
            env={**clean, "PATH": path, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return re.findall(r"^make .*", done.stdout, re.MULTILINE)

    return run


def test_ci_takes_an_interpreter_and_a_folder_of_data(ci: Any) -> None:
    lines = ci(PYTHON=sys.executable, NUMPYRO_MINIBATCH_DATA="/some/data")
    version = "{}.{}".format(*sys.version_info)
    start = f"make [{sys.executable}] [.venv-{version}] [/some/data] "
    assert all(line.startswith(start) for line in lines)
    called = {line.removeprefix(start).split()[0] for line in lines}
    assert {"test", "lint", "types", "docs"} <= called <= targets()


def test_ci_without_an_interpreter_uses_that_of_the_makefile(ci: Any) -> None:
    lines = ci()
    assert lines and all(line.startswith("make [] [] ") for line in lines)


def test_ci_refuses_an_interpreter_that_is_not_there(ci: Any) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        ci(PYTHON="python-of-nowhere")
    assert "python-of-nowhere" in failed.value.stderr
