"""Imports inside the package run one way, and none needs an optional package."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "numpyro_minibatch"
ROOT = Path(__file__).resolve().parent.parent

LAYERS = {
    "target",
    "batch",
    "estimate",
    "control_variate",
    "accept",
    "proposal",
    "dynamics",
    "schedule",
    "preconditioner",
    "ladder",
}

# Module -> the modules of the package that it may import. A new module needs a row;
# a new entry in a row is a decision about the design, so docs/design.md says why.
# No row but those of `kernels` itself and of the package names `kernels`.
ALLOWED: dict[str, set[str]] = {
    # which rows, how noisy, take it?
    "_keys": set(),
    "_permutation": set(),
    "_strata": set(),
    "_correction": set(),
    "host_rows": set(),
    "_passes": {"host_rows"},
    "target": {"host_rows"},
    "batch": {"_permutation", "_strata"},
    "estimate": {"_keys", "_passes", "target", "batch"},
    "control_variate": {"target", "estimate"},
    "accept": {"estimate", "_correction"},
    # where to: feeds only the kernels
    "proposal": set(),
    # how to move, how fast, in which coordinates: feed only the kernels, too
    "dynamics": {"_checks", "proposal"},
    "schedule": {"_checks"},
    "ladder": {"_checks"},
    "preconditioner": {"_checks"},
    # the kernels, which compose all of the above
    "_dataflow": set(),
    "_checks": set(),
    "_preflight": {"target", "batch", "_dataflow", "_static", "host_rows"},
    "_start": {"target", "_preflight"},
    "_static": set(),
    # the set-up of a control variate
    "_expansion": {
        "target",
        "estimate",
        "control_variate",
        "_dataflow",
        "_passes",
        "_permutation",
    },
    "_posterior": {"control_variate", "proposal", "_expansion"},
    "_residuals": {"batch", "control_variate", "_expansion", "_passes", "_strata"},
    "_pilot": {"batch", "control_variate", "_expansion", "_residuals", "_strata"},
    "_exact_rows": {
        "batch",
        "control_variate",
        "_expansion",
        "_pilot",
        "_posterior",
        "_residuals",
    },
    "_progress": set(),
    "kernels._surrogate": {
        "batch",
        "control_variate",
        "_expansion",
        "_exact_rows",
        "_pilot",
        "_posterior",
        "_progress",
    },
    "kernels._base": LAYERS
    | {
        "_checks",
        "_preflight",
        "_start",
        "_static",
        "_expansion",
        "_passes",
        "host_rows",
        "kernels._surrogate",
    },
    "kernels._adaptation": set(),
    "kernels.metropolis": LAYERS
    | {"_checks", "kernels._adaptation", "kernels._base", "kernels._surrogate"},
    "kernels.mint": LAYERS | {"_checks", "kernels.metropolis"},
    "kernels.mh_minibatch": LAYERS | {"_checks", "kernels.metropolis"},
    "kernels.austerity": LAYERS | {"_checks", "kernels.metropolis"},
    "kernels.confidence": LAYERS | {"_checks", "kernels.metropolis"},
    "kernels._path": LAYERS | {"_keys"},
    "kernels.langevin": LAYERS | {"_checks", "_keys", "kernels._base", "kernels._path"},
    "kernels.amagold": LAYERS
    | {
        "_checks",
        "kernels._adaptation",
        "kernels._base",
        "kernels._path",
        "kernels.langevin",
    },
    "kernels._numpyro": LAYERS | {"_checks", "_preflight", "kernels._base"},
    "kernels.replica_exchange": LAYERS
    | {
        "_checks",
        "_preflight",
        "kernels._base",
        "kernels._numpyro",
        "kernels._outer",
        "kernels.langevin",
    },
    "kernels._nested": LAYERS | {"_passes", "_permutation"},
    "kernels._rings": set(),
    "kernels._energy_ladder": {"_checks", "proposal"},
    "kernels._energy_settings": {
        "_checks",
        "batch",
        "proposal",
        "kernels._adaptation",
        "kernels._energy_ladder",
    },
    "kernels._jumps": LAYERS | {"_keys", "kernels._nested", "kernels._rings"},
    "kernels._reference": {"target", "estimate", "_expansion", "_passes"},
    "kernels.equi_energy": LAYERS
    | {
        "_expansion",
        "_keys",
        "kernels._adaptation",
        "kernels._base",
        "kernels._energy_ladder",
        "kernels._energy_settings",
        "kernels._jumps",
        "kernels._nested",
        "kernels._reference",
        "kernels._rings",
    },
    "kernels._outer": {"kernels._base", "target"},
    "kernels.cyclical": LAYERS
    | {
        "_checks",
        "_keys",
        "kernels._base",
        "kernels._outer",
        "kernels.langevin",
        "kernels.metropolis",
        "kernels.mint",
    },
    "kernels": {
        "kernels.equi_energy",
        "kernels.cyclical",
        "kernels.replica_exchange",
        "kernels.amagold",
        "kernels.langevin",
        "kernels.austerity",
        "kernels.confidence",
        "kernels.metropolis",
        "kernels.mint",
        "kernels.mh_minibatch",
    },
    # what analyses a result reads plain attributes of the kernel that made it
    "_replay": {"_dataflow", "host_rows", "target"},
    "inference_data": {"_replay", "_version", "host_rows"},
    "_normality": {"_replay", "batch", "target"},
    "_diagnosis": set(),
    "_advice": {"_diagnosis", "_pilot"},
    "diagnostics": {"_advice", "_diagnosis", "_normality", "inference_data"},
    "evidence": {"inference_data", "diagnostics"},
    "cycles": {"_checks", "_replay", "inference_data"},
    "ensemble": {"_checks", "inference_data"},
    # the driver takes any kernel of NumPyro's interface
    "_program": {"_devices", "_passes", "_preflight", "_static", "host_rows"},
    "_devices": {"_checks", "_passes"},
    "_store": set(),
    "_reading": {"_store", "inference_data"},
    "sampling": {
        "_checks",
        "_devices",
        "_reading",
        "_program",
        "_progress",
        "_static",
        "_store",
        "_version",
        "host_rows",
        "inference_data",
    },
    "__main__": {"_reading", "diagnostics", "sampling"},
    "plots": {"inference_data", "diagnostics", "estimate"},
    # on their own
    "datasets": set(),
    "_version": set(),
    # the package re-exports
    "": LAYERS
    | {
        "_version",
        "cycles",
        "datasets",
        "diagnostics",
        "ensemble",
        "evidence",
        "host_rows",
        "inference_data",
        "kernels",
        "plots",
        "sampling",
    },
}


class Import(NamedTuple):
    """One imported thing: a module of the package, or a top-level name outside it."""

    line: int
    name: str
    inside: bool


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name below the package."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(
    source: str, module: str, *, is_package: bool, known: set[str], lazy: bool = True
) -> Iterator[Import]:
    """What a module imports, type-checking blocks included.

    :param lazy: whether imports inside functions count as well.
    """
    tree = ast.parse(source)
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *filter(None, module.split("."))]
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == PACKAGE:
                # `from package.module import thing` depends on the module.
                while rest and rest not in known:
                    rest = rest.rpartition(".")[0]
                yield Import(node.lineno, rest, inside=True)
            else:
                yield Import(node.lineno, top, inside=False)


def violations(
    source: str, module: str, *, is_package: bool = False, known: set[str] | None = None
) -> list[str]:
    """The imports of a module that its row of the table does not allow."""
    known = set(ALLOWED) if known is None else known
    found = {
        f"{PACKAGE}.{module}, line {line}: imports {name or PACKAGE!r}"
        for line, name, inside in imports(
            source, module, is_package=is_package, known=known
        )
        if inside and name not in ALLOWED[module]
    }
    return sorted(found)


def dependencies() -> set[str]:
    """Top-level names that pyproject.toml lets every module import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {requirement.partition(">")[0] for requirement in project["dependencies"]}


@pytest.mark.parametrize("module", modules())
def test_imports_run_one_way(module: str) -> None:
    assert module in ALLOWED, f"{PACKAGE}.{module} needs a row in the table ALLOWED"
    path = modules()[module]
    found = violations(
        path.read_text(),
        module,
        is_package=path.name == "__init__.py",
        known=set(modules()),
    )
    assert not found, "\n".join(found)


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    remaining = dict(ALLOWED)
    while remaining:
        free = [name for name, needs in remaining.items() if needs <= set(order)]
        assert free, f"these modules may import each other: {sorted(remaining)}"
        order += free
        for name in free:
            del remaining[name]


def test_only_kernels_and_the_package_know_kernels() -> None:
    knowing = {
        module
        for module, needs in ALLOWED.items()
        if any(name.partition(".")[0] == "kernels" for name in needs)
    }
    inside = {name for name in ALLOWED if name.startswith("kernels.")}
    assert knowing <= {"", "kernels"} | inside


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batch", "import numpyro_minibatch.estimate"),
        ("target", "from numpyro_minibatch.batch import Batch"),
        ("target", "from numpyro_minibatch import batch"),
        ("target", "from . import batch"),
        ("target", "from .batch import Batch"),
        ("kernels._base", "from .metropolis import MINT"),
        ("kernels._base", "from ..datasets import load_covertype"),
        ("kernels", "from . import unknown"),
        ("estimate", "from numpyro_minibatch import Batch"),
        ("estimate", "if TYPE_CHECKING:\n    from numpyro_minibatch import accept"),
        ("diagnostics", "def f():\n    from numpyro_minibatch.kernels import MINT"),
        ("inference_data", "from numpyro_minibatch.kernels._base import State"),
        ("proposal", "try:\n    from .accept import penalty\nexcept ValueError: ..."),
    ],
)
def test_the_check_can_fail(module: str, source: str) -> None:
    assert len(violations(source, module, is_package=module == "kernels")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("estimate", "from numpyro_minibatch import batch"),
        ("estimate", "from .batch import Batch"),
        ("kernels._base", "from ..target import Target"),
        ("kernels", "from .metropolis import MINT"),
        ("kernels", "from numpyro_minibatch.kernels.metropolis import MINT"),
        ("target", "import jax.numpy as jnp\nfrom numpyro import handlers"),
    ],
)
def test_the_check_can_pass(module: str, source: str) -> None:
    assert not violations(source, module, is_package=module == "kernels")


@pytest.mark.parametrize("module", modules())
def test_modules_import_only_dependencies(module: str) -> None:
    path = modules()[module]
    outside = {
        name
        for _, name, inside in imports(
            path.read_text(),
            module,
            is_package=path.name == "__init__.py",
            known=set(modules()),
            lazy=False,
        )
        if not inside
    }
    optional = {"matplotlib"} if module == "plots" else set()
    assert outside <= dependencies() | optional | set(sys.stdlib_module_names)


def test_importing_the_package_loads_nothing_optional() -> None:
    script = (
        f"import sys, {PACKAGE}; "
        "print(*{'flax', 'pooch', 'sklearn'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
