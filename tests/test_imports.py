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

import numpyro_minibatch

PACKAGE = "numpyro_minibatch"
ROOT = Path(__file__).resolve().parent.parent

# The parts of a step, in the order in which a sampler uses them.
PARTS = {
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

# Package or module -> the others that it may import. A new one needs a row; a new entry
# in a row is a decision about the design, so docs/design.md says why. Inside a package
# only circles are forbidden. Only `recommendation`, which runs the set-up of a kernel,
# and the package itself import `kernels`.
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "host_rows": set(),
    "_internal": {"host_rows"},
    # rows, estimates, control variates, acceptance
    # _internal: a trace in double precision reads copies of the model's constants
    "target": {"_internal", "host_rows"},
    "batch": {"_internal"},
    "estimate": {"_internal", "batch", "target"},
    "accept": {"_internal", "estimate"},
    "control_variate": {
        "_internal",
        "_model",
        "batch",
        "estimate",
        "proposal",
        "target",
    },
    # coordinates, proposals, dynamics, schedules, temperatures
    "preconditioner": {"_internal"},
    "proposal": {"_internal", "preconditioner"},
    "dynamics": {"_internal", "preconditioner"},
    "schedule": {"_internal"},
    "ladder": {"_internal"},
    # NumPyro's models: checked, started, and run on all rows
    "_model": {"_internal", "batch", "host_rows", "target"},
    # the kernels, which compose all of the above
    # marginal: kernels marginalize discrete sites of the rows, as NUTS does
    "kernels": PARTS | {"_internal", "_model", "host_rows", "marginal"},
    # analyses of a result read plain attributes of the kernel that made it
    # _internal: log densities of a result in double precision
    "inference_data": {"_internal", "_model", "_version", "host_rows"},
    "diagnostics": {
        "_internal",
        "_model",
        "batch",
        "inference_data",
        "target",
    },
    "evidence": {"diagnostics", "inference_data"},
    # a transformation of NumPyro's models
    "marginal": {"_internal", "_model", "host_rows", "inference_data", "target"},
    "cycles": {"_internal", "_model", "inference_data"},
    "ensemble": {"_internal", "inference_data"},
    "plots": {"diagnostics", "estimate", "inference_data"},
    # the driver takes any kernel of NumPyro's interface
    "sampling": {"_internal", "_model", "_version", "host_rows", "inference_data"},
    # before a run: the set-up of a kernel, and the cost of NUTS
    "recommendation": {"_internal", "control_variate", "host_rows", "kernels"},
    "__main__": {"diagnostics", "sampling"},
    "datasets": set(),
    # the package re-exports
    # _internal: a flag of the compiler has to be set before JAX makes an array
    "": PARTS
    | {
        "_internal",
        "_version",
        "cycles",
        "datasets",
        "diagnostics",
        "ensemble",
        "evidence",
        "host_rows",
        "inference_data",
        "kernels",
        "marginal",
        "plots",
        "recommendation",
        "sampling",
    },
}


# Public names that are imported when first used.
LAZY = numpyro_minibatch._LAZY_MODULES | set(numpyro_minibatch._LAZY_FUNCTIONS)


class Import(NamedTuple):
    """One import: a module of the package, or a dotted name outside it."""

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
                yield Import(node.lineno, name, inside=False)


def room(module: str) -> str:
    """The row of the table that a module belongs to."""
    return module.partition(".")[0]


def violations(
    source: str, module: str, *, is_package: bool = False, known: set[str] | None = None
) -> list[str]:
    """The imports of a module that its row of the table does not allow."""
    known = set(modules()) if known is None else known
    here = room(module)
    found = {
        f"{PACKAGE}.{module}, line {line}: imports {name or PACKAGE!r}"
        for line, name, inside in imports(
            source, module, is_package=is_package, known=known
        )
        if inside and room(name) != here and room(name) not in ALLOWED[here]
    }
    return sorted(found)


def ordered(needs: dict[str, set[str]]) -> list[str]:
    """Names in an order in which each comes after what it needs."""
    order: list[str] = []
    remaining = dict(needs)
    while remaining:
        free = [name for name, need in remaining.items() if need <= set(order)]
        assert free, f"these import each other: {sorted(remaining)}"
        order += free
        for name in free:
            del remaining[name]
    return order


def dependencies() -> set[str]:
    """Top-level names that pyproject.toml lets every module import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {requirement.partition(">")[0] for requirement in project["dependencies"]}


@pytest.mark.parametrize("module", modules())
def test_imports_run_one_way(module: str) -> None:
    row = room(module)
    assert row in ALLOWED, f"{PACKAGE}.{row} needs a row in the table ALLOWED"
    path = modules()[module]
    found = violations(
        path.read_text(),
        module,
        is_package=path.name == "__init__.py",
        known=set(modules()),
    )
    assert not found, "\n".join(found)


def test_no_file_is_hidden_by_a_package_of_its_name() -> None:
    for path in (ROOT / PACKAGE).rglob("*.py"):
        assert not path.with_suffix("").is_dir(), f"{path} is never imported"


def test_the_table_has_no_circle() -> None:
    ordered(ALLOWED)


def test_the_table_has_no_row_without_a_module() -> None:
    assert set(ALLOWED) == {room(module) for module in modules()}


def test_no_circle_inside_a_package() -> None:
    known = set(modules())
    needs: dict[str, set[str]] = {}
    for module, path in modules().items():
        if path.name == "__init__.py":
            continue  # the `__init__` of a package imports all of its modules
        needs[module] = {
            name
            for _, name, inside in imports(
                path.read_text(), module, is_package=False, known=known
            )
            if inside and name != module and modules()[name].name != "__init__.py"
        }
    ordered(needs)


def test_a_circle_is_found() -> None:
    with pytest.raises(AssertionError, match="import each other: \\['a', 'b'\\]"):
        ordered({"a": {"b"}, "b": {"a", "c"}, "c": set()})


def test_only_recommendation_and_the_package_know_kernels() -> None:
    know = {name for name, needs in ALLOWED.items() if "kernels" in needs}
    assert know == {"", "recommendation"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batch", "import numpyro_minibatch.estimate"),
        ("target", "from numpyro_minibatch.batch import Batch"),
        ("target", "from numpyro_minibatch import batch"),
        ("target", "from . import batch"),
        ("target", "from .batch import Batch"),
        ("kernels._shared.base", "from ...datasets import load_covertype"),
        ("kernels.equi_energy._kernel", "from ...datasets import load_covertype"),
        ("estimate", "from numpyro_minibatch import Batch"),
        ("estimate", "if TYPE_CHECKING:\n    from numpyro_minibatch import accept"),
        ("diagnostics", "def f():\n    from numpyro_minibatch.kernels import MINT"),
        ("inference_data", "from numpyro_minibatch.kernels._shared.base import State"),
        ("batch._contract", "from numpyro_minibatch.estimate import Estimate"),
        ("accept._one_shot", "from ..kernels import MINT"),
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
        ("kernels._shared.base", "from ..target import Target"),
        ("kernels", "from .metropolis import MINT"),
        ("kernels._shared.base", "from .metropolis import MINT"),
        ("batch._contract", "from numpyro_minibatch.batch._strata import Design"),
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
        name.partition(".")[0]
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


# They take longer to import than the package itself, so only their users load them.
HEAVY = {"arviz", "matplotlib", "pandas", "scipy.stats", "xarray"}
OPTIONAL = {"flax", "h5netcdf", "h5py", "optax", "pooch", "sklearn", "zarr"}

# The modules that run until the draws are made, without preparation and analysis.
RUN = PARTS | {"_internal", "_model", "host_rows", "kernels"}


def heavy(source: str, module: str) -> set[str]:
    """Heavy modules that a module imports, also where it does so inside a function."""
    return {
        name
        for _, name, inside in imports(
            source, module, is_package=False, known=set(modules())
        )
        if not inside and any(f"{name}.".startswith(f"{one}.") for one in HEAVY)
    }


@pytest.mark.parametrize("module", [m for m in modules() if room(m) in RUN])
def test_a_run_loads_nothing_heavy(module: str) -> None:
    assert not heavy(modules()[module].read_text(), module)


@pytest.mark.parametrize(
    "source",
    [
        "from scipy import stats",
        "from scipy.stats import norm",
        "def f():\n    import scipy.stats",
        "import xarray as xr",
    ],
)
def test_a_heavy_module_is_found(source: str) -> None:
    assert heavy(source, "batch")
    assert not heavy("from scipy.special import ndtr", "batch")


def test_importing_the_package_loads_nothing_heavy_or_optional() -> None:
    # a difference, because NumPyro may begin to load one of them
    unwanted = HEAVY | OPTIONAL | {"scipy.interpolate", "scipy.optimize"}
    script = (
        f"import sys, jax, numpyro; before = set(sys.modules); import {PACKAGE}; "
        f"print(*({unwanted} & set(sys.modules)) - before); "
        f"print(*set({PACKAGE}.__all__) - set(dir({PACKAGE})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "\n\n"


@pytest.mark.parametrize("name", numpyro_minibatch.__all__)
def test_public_names_are_there_at_their_first_use(name: str) -> None:
    # names imported with the package are attributes and never requested
    lazy = vars(numpyro_minibatch)["__getattr__"]
    if name in LAZY:
        assert lazy(name) is getattr(numpyro_minibatch, name)
    else:
        with pytest.raises(AttributeError, match=f"'{PACKAGE}' has no attribute"):
            lazy(name)


def test_names_that_are_not_there_are_refused() -> None:
    assert not hasattr(numpyro_minibatch, "diagnos")
    with pytest.raises(ImportError, match="cannot import name 'diagnos'"):
        from numpyro_minibatch import diagnos  # noqa: F401
