"""The structure of the documentation; none of its code is run here."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from numpyro.infer.mcmc import MCMCKernel

import numpyro_minibatch
from numpyro_minibatch import kernels

mpl.use("Agg")

ROOT = Path(__file__).resolve().parent.parent
KERNELS = [  # the kernels that users choose, without their building blocks
    name
    for name in kernels.__all__
    if issubclass(getattr(kernels, name), MCMCKernel)
    and not inspect.isabstract(getattr(kernels, name))
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = sorted(p for p in (ROOT / "docs").glob("**/*.md") if "_build" not in p.parts)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_page_of_the_gallery(path: Path) -> None:
    text = path.read_text()
    title, line, empty, *_ = (ast.get_docstring(ast.parse(text)) or "").split("\n")
    assert line == "=" * len(title) and empty == ""  # required by the gallery
    assert '"--small"' in text and '"--out"' in text  # the options it is run with
    assert '"--full"' in text
    assert "diagnose(" in text and "az.summary(" in text
    assert "look at" in text.lower()


def test_the_design_page_lists_every_package() -> None:
    listed = re.findall(
        r"^\| `([\w.]+)` \|", (ROOT / "docs/design.md").read_text(), re.M
    )
    folder = ROOT / "numpyro_minibatch"
    there = {path.stem for path in folder.glob("[!_]*.py")}
    there |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted(listed) == sorted(there | {"kernels.equi_energy"})


def test_every_decision_record_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = [r for r in (folder / "index.md").read_text().split("\n") if r[:3] == "| ["]
    made = []
    for number, path in enumerate(sorted(folder.glob("[0-9]*.md")), 1):
        title, _, date, *_ = path.read_text().split("\n")
        assert path.stem[:5] == f"{number:04d}-" and title.startswith(f"# {number}. ")
        title = title.partition(". ")[2]
        made.append(f"| [{number}]({path.name}) | {title} | {date.strip('*')} |")
    assert rows == made != []


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gallery() -> Any:
    return load("docs/_gallery.py")


def test_the_picture_of_the_architecture_is_what_its_script_draws() -> None:
    script = load("tools/architecture.py")
    drawn = script.picture()
    assert drawn == (ROOT / "docs" / "_static" / "architecture.svg").read_text()
    names = re.findall(r'font-weight="600">([^<]*)</text>', drawn)
    folder = ROOT / "numpyro_minibatch"
    there = {path.stem for path in [*folder.glob("*.py"), *folder.glob("*/")]}
    boxes = {
        part
        for name in names
        if " " not in name.replace(", ", "")
        for part in name.split(", ")
    }
    assert {"target", "batch", "estimate", "accept", "proposal"} < boxes <= there
    with pytest.raises(ValueError, match="split it"):
        script.draw(script.Box(0, 0, 50, 40, "control_variate"))


def test_the_gallery_has_an_order() -> None:
    assert sorted(gallery().ORDER) == [path.stem for path in EXAMPLES]


def test_figures_of_the_gallery_have_labels() -> None:
    """During a build, a figure that is blank or lacks a label is an error."""
    figure, axes = plt.subplots(1, 3)
    axes[0].plot([1, 2])
    axes[0].set(xlabel="draw", ylabel="rung")
    axes[1].plot([1, 2])
    axes[1].set(xlabel="draw")
    wrong = list(gallery().unlabelled(figure))
    assert wrong == ["the y axis of axes 1 has no label", "axes 2 are blank"] + [
        f"the {name} axis of axes 2 has no label" for name in "xy"
    ]
    plt.close(figure)
    figure = plt.figure()  # a label that is of a part of the figure
    part = figure.subfigures(1, 2)[0]
    part.subplots().plot([1, 2])
    part.supxlabel("draw")
    assert list(gallery().unlabelled(figure)) == ["the y axis of axes 0 has no label"]
    plt.close(figure)


@pytest.mark.parametrize("page", ["choosing.md", "index.md"])
def test_every_kernel_is_in_the_tables(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    general = {"SGMCMC", "Cyclical"}  # their presets are
    missing = [k for k in KERNELS if k not in text and k not in general]
    assert not missing


def test_what_figures_there_are_is_in_the_documentation() -> None:
    text = "".join(page.read_text() for page in PAGES)
    text += "".join(path.read_text() for path in EXAMPLES)
    unseen = [f for f in numpyro_minibatch.plots.__all__ if f"plots.{f}" not in text]
    assert not unseen


def test_code_in_the_documentation_is_run() -> None:
    """Each block is a doctest or shell commands, and each doctest is in a block."""
    seen = 0
    for page in PAGES:  # of README.md, test_readme.py
        blocks = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.M | re.S)
        for language, text in blocks:
            if not language.startswith("{"):  # a directive
                assert language in {"pycon", "sh", "text"}, (page.name, language)
                assert (language == "pycon") == (">>> " in text), (page.name, text)
                assert "+SKIP" not in text, page.name
                seen += language == "pycon"
    assert seen > 20


def test_no_code_hides_in_an_indented_block() -> None:
    """The test above sees fences only."""
    for page in [*PAGES, ROOT / "README.md"]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        assert not re.search(r"^\n {4,}\S", text, re.M), page.name


def test_the_commands_of_the_reproduction_exist() -> None:
    text = (ROOT / "docs" / "reproduction.md").read_text()
    modules = re.findall(r"python -m (benchmarks[\w.]+)", text)
    scripts = re.findall(r"python ((?:benchmarks|examples)/[\w/]+\.py)", text)
    assert modules and scripts
    for module in modules:
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    for script in scripts:
        assert (ROOT / script).exists(), script
