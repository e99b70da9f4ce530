"""Errors for models whose Python code needs the values of their data.

A program is compiled once and reads other rows at every step, so the arrays that the
model receives have no values while it is traced. A number that Python code computes
from them would also be that of a batch and not that of the data:
``len(np.unique(group))`` must be the number of all groups. If NumPy computes it, it is
(see ``numpy_calls``). Other such lines are not run. The message names the line, and
shows a replacement if the line itself determines one.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = [
    "arrays_around",
    "as_arguments",
    "first_line",
    "function_of",
    "is_of_array",
    "is_of_values",
    "line_of",
    "lines_with_numbers_of_rows",
    "needs_latents",
    "needs_values",
    "no_attribute",
    "own_check",
]

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

# libraries that compute with the values of arrays, and know nothing of JAX
_OF_VALUES = ("/pandas/", "/polars/", "/scipy/", "/sklearn/", "/xarray/")
_NOT_THE_MODEL = (
    *("/jax/", "/jaxlib/", "/numpy/", "/numpyro/", "/numpyro_minibatch/"),
    *_OF_VALUES,
)
# attributes of tables that lead to an array, which the model has already
_ARRAYS = {"array", "data", "iloc", "loc", "to_numpy", "values"}
_BUILT_IN = {
    "abs", "bool", "dict", "float", "int", "len", "list", "max", "min", "range",
    "round", "set", "sorted", "sum", "tuple",
}  # fmt: skip
_COMPUTE = {"jax", "math", "numpy", "pandas", "scipy", "sklearn"}
_TO_PYTHON = {"bool", "float", "int"}
_CONVERTERS = ("array", "asarray", "asanyarray", "ascontiguousarray", "copy")


class _Place(NamedTuple):
    """A line of a file and a column, which Python may have been told not to keep."""

    line: int
    column: int | None


class _Line(NamedTuple):
    """The line of a model that needs values.

    :param number: its number in the file.
    :param text: its first line as written; empty if the source is not known.
    :param code: all of it as code, as far as it could be parsed.
    :param traced: the names in it of arrays that have no values.
    :param numpy: the names in it of arrays that do, because the model reads them from
        its surroundings.
    :param computes: the names in it that are modules which compute, or traced.
    :param in_model: whether it is in the function that the kernel was given, and not in
        one that this calls.
    :param numpy_modules: the names in it of NumPy.
    :param loops: the names in it that a loop around it counts.
    """

    number: int
    text: str
    code: ast.stmt | None
    traced: tuple[str, ...]
    numpy: tuple[str, ...]
    computes: frozenset[str]
    in_model: bool
    numpy_modules: frozenset[str] = frozenset()
    loops: frozenset[str] = frozenset()


def is_of_values(error: BaseException | None) -> bool:
    """Whether code needed the values of an array that has none.

    Libraries that check the types of their arguments name that of JAX's arrays. In the
    model's own lines such an error has another reason: ``x + None``.

    :param error: any error, with its traceback.
    """
    if isinstance(error, _NEEDS_VALUES):
        return True
    if not isinstance(error, TypeError) or "Tracer" not in str(error):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _is_in(frame, _OF_VALUES)


def first_line(error: BaseException) -> str:
    """The first line of the message of an error, as part of another message.

    :param error: the error.
    """
    return str(error).partition("\n")[0].rstrip(".")


def own_check(error: BaseException) -> str:
    """The line of the user's that raised an error by itself; empty if none did.

    :param error: the error, with its traceback.
    """
    *_, (frame, place) = _places(error)
    if _is_of_a_library(frame):
        return ""
    number, text, code = _statement(frame, place)
    if not isinstance(code, ast.Assert | ast.Raise):
        return ""
    said = f" ({first_line(error)})" if str(error) else ""
    return f"line {number}, `{text}`{said}"


def line_of(model: Any, error: BaseException) -> tuple[str, str]:
    """The line of the user's that raised an error, and its largest call of a library.

    :param model: the model.
    :param error: the error, with its traceback.
    :return: both as parts of a message; empty where they are not known.
    """
    line = _line_in_model(model, error)
    if line is None or not line.text:
        return "", ""
    called = "" if line.code is None else _computed(line.code, line)
    return f"line {line.number}, `{line.text}`", called


def needs_values(who: str, model: Any, error: BaseException) -> str:
    """The message for a model that needs the values of its data.

    :param who: the kernel's name.
    :param model: the model.
    :param error: the error of JAX, with its traceback.
    """
    line = _line_in_model(model, error)
    where = ""
    if line is not None and line.text:
        where = f" in line {line.number}, `{line.text}`"
    return (
        f"{who} cannot run the model: its Python code needs the values of the data or "
        f"of a plate's indices{where} ({first_line(error)}). "
        f"{_advice(model, line, error)}"
    )


def needs_latents(who: str, model: Any, error: BaseException, kind: type) -> str:
    """The message for a model that needs the value of a latent site.

    :param who: the kernel's name.
    :param model: the model.
    :param error: the error of JAX, with its traceback.
    :param kind: the type of arrays that depend on a latent site.
    :return: nothing if what needs values depends on none.
    """
    line = _line_in_model(model, error, kind)
    if line is None or line.code is None or not line.traced:
        return ""

    def uses(node: ast.AST) -> bool:
        return bool(_names_in(node) & set(line.traced))

    remedy = ""
    for node in ast.walk(line.code):
        if isinstance(node, ast.If | ast.IfExp) and uses(node.test):
            remedy = f"jnp.where({ast.unparse(node.test)}, ..., ...)"
        elif isinstance(node, ast.While | ast.Assert) and uses(node.test):
            remedy = "jnp.where or jax.lax.while_loop for a choice that depends on it"
        elif isinstance(node, ast.Call) and uses(node):
            written = ast.unparse(node)
            module, _, rest = written.partition(".")
            if module in line.numpy_modules:
                remedy = f"jnp.{rest} in place of {written}"
            elif module.partition("(")[0] in _TO_PYTHON:
                remedy = (
                    f"jnp.asarray({ast.unparse(node.args[0])}) in place of {written}"
                )
        if remedy:
            return (
                f"{who} cannot run the model: its Python code needs the value of a "
                f"latent site in line {line.number}, `{line.text}` "
                f"({first_line(error)}). A latent site has no value while a model is "
                f"traced, in NumPyro's NUTS as well. Write {remedy}."
            )
    return ""


def _names_in(node: ast.AST) -> set[str]:
    """The names in an expression."""
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def is_of_array(error: BaseException) -> bool:
    """Whether an attribute is missing of one of JAX's arrays.

    :param error: any error.
    """
    return isinstance(error, AttributeError) and isinstance(error.obj, jax.Array)


def no_attribute(
    who: str, model: Any, error: AttributeError, is_column: bool = False
) -> str:
    """The message for a model that takes one of JAX's arrays for a table.

    :param who: the kernel's name.
    :param model: the model.
    :param error: the error, with its traceback.
    :param is_column: whether the attribute is a column of a table.
    """
    line = _line_in_model(model, error)
    nodes = [] if line is None or line.code is None else [*ast.walk(line.code)]
    read = [x for x in nodes if isinstance(x, ast.Attribute) and x.attr == error.name]
    called = any(isinstance(x, ast.Call) and x.func in read for x in nodes)
    array = ast.unparse(read[0].value) if read else ""
    if read and error.name in _ARRAYS:
        whole = f"{array}.{error.name}{'()' if called else ''}"
        remedy = f" Write {array} in place of {whole}."
    elif read and error.name == "index":
        remedy = f" Write jnp.arange(len({array})) in place of {array}.index."
    elif is_column:
        remedy = ""
    else:
        remedy = (
            " Write it with jax.numpy, or compute it before the run and pass the "
            "result as an argument."
        )
    where = f"line {line.number}, `{line.text}`," if line and line.text else "it"
    return (
        f"{who} cannot run the model: {where} reads .{error.name} of a JAX array, "
        f"which has none. Arguments are JAX arrays while a model is traced.{remedy}"
    )


def _advice(model: Any, line: _Line | None, error: BaseException) -> str:
    """A remedy."""
    code = None if line is None else line.code
    if line is None or code is None or not line.traced:
        return _GENERAL
    names = ", ".join(map(repr, line.traced))
    if line.numpy and isinstance(error, jax.errors.TracerArrayConversionError):
        others = arrays_around(model)
        if line.numpy[0] not in others:
            return (
                f"{line.numpy[0]} is a NumPy array, which a batch cannot index: pass "
                "it as an argument of the model, or write "
                f"jnp.asarray({line.numpy[0]})."
            )
        rows = len(others[line.numpy[0]])
        same = [
            name
            for name, x in others.items()
            if isinstance(x, np.ndarray) and len(x) == rows
        ]
        one = len(same) == 1
        return (
            f"{' and '.join(same)} {'is a NumPy array' if one else 'are NumPy arrays'} "
            f"from outside of the model, which a batch cannot index: pass "
            f"{'it as an argument' if one else 'them as arguments'}, "
            f"{as_arguments(model, same)}; or write jnp.asarray({same[0]})"
            f"{'' if one else ' and so on'}."
        )
    of_group = _of_group(line)
    if of_group:
        return f"{_has_rows(names)} {of_group}"
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return (
            f"{_has_rows(names)} Select rows before the model and pass those, or keep "
            "all of them and write with numpyro.handlers.mask(mask=...) around the "
            "observed site."
        )
    if isinstance(code, ast.Assert | ast.If | ast.While):
        return (
            f"{_has_rows(names)} Check the data before the run. For a choice within "
            "each row write jnp.where; for a choice of the model pass an argument that "
            "is True or False."
        )
    converted = _converted(code)
    if converted:
        return (
            f"{_has_rows(names)} Write jnp.asarray({converted}), and jnp for np in "
            "what is computed from it row by row. Compute everything that needs all "
            "rows before the model, and pass it as an argument."
        )
    function = function_of(model)
    if line.in_model and function is not None:
        if isinstance(code, ast.Assign) and len(code.targets) == 1:
            found = _before(code, line, function)
            found |= _others(function, line) if found else {}
            lines = "this line" if len(found) == 1 else "these lines"
        else:
            found, lines = _assigned_before(line, function)
        if found:
            one = len(found) == 1
            names_of, it = " and ".join(found), "it" if one else "them"
            written = ", ".join(f"{n}={value}" for n, value in found.items())
            return (
                f"{_has_rows(names)} Compute {names_of} from all rows before the "
                f"model and pass {it} as {'an argument' if one else 'arguments'}: "
                f"leave {lines} out, add {names_of if one else it} to the parameters "
                f"of {function.__name__}, and write mcmc.run(key, ..., {written})."
            )
    what = _computed(code, line) or "such numbers"
    return (
        f"{_has_rows(names)} Compute {what} beforehand, from all rows, and pass the "
        "result as an argument."
    )


_GENERAL = (
    "Compute numbers such as len(np.unique(group)) beforehand and pass them as "
    "arguments; pass the data as arguments too, or as JAX arrays (jnp.asarray), which "
    "can be indexed by a minibatch where NumPy arrays cannot. Values of latent sites "
    "are arrays of JAX: compute with jax.numpy, without float(), int() and if."
)


def _has_rows(names: str) -> str:
    return (
        f"A step has only a batch of rows, and there are no values of {names} before "
        "it runs."
    )


def function_of(model: Any) -> Callable | None:
    """The Python function of a model, inside of handlers and partial functions."""
    while not inspect.isfunction(model):
        # of handlers and of marginalized models, or of functools.partial
        inner = getattr(model, "fn", None) or getattr(model, "func", None)
        if inner is None or inner is model:
            return None
        model = inner
    return model


def arrays_around(model: Any) -> dict[str, Any]:
    """The arrays with rows that a model reads from its closure or from globals.

    :param model: the model.
    :return: the arrays by the names that its function has for them.
    """
    function = function_of(model)
    if function is None:
        return {}
    read = {
        name: function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        with contextlib.suppress(ValueError):  # not assigned yet
            read[name] = cell.cell_contents
    return {
        name: value
        for name, value in read.items()
        if isinstance(value, np.ndarray | jax.Array)
        and value.ndim
        and value.shape[0] > 1
    }


def as_arguments(model: Any, names: Iterable[str]) -> str:
    """What to write so that arrays around a model become arguments of it.

    :param model: the model.
    :param names: what it calls them.
    """
    function = function_of(model)
    names = [*names]
    if function is None or not names:
        return ""
    own = [*inspect.signature(function).parameters]
    heading = ", ".join([*(["..."] if own else []), *names])
    given = ", ".join(f"{name}={name}" for name in names)
    return (
        f"def {function.__name__}({heading}), and "
        f"mcmc.run(key, {'..., ' if own else ''}{given})"
    )


def _line_in_model(
    model: Any, error: BaseException, traced_type: type = jax.Array
) -> _Line | None:
    """The innermost line of the user's that an error was raised at.

    :param traced_type: the type of arrays that have no values.
    """
    function = function_of(model)
    found = [x for x in _places(error) if not _is_of_a_library(x[0])]
    if not found:
        return None
    frame, place = found[-1]
    number, text, code = _statement(frame, place)
    names = {x.id for x in ast.walk(code) if isinstance(x, ast.Name)} if code else set()
    # a local name that has no value yet is no global one
    local = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
    outside = {n: x for n, x in frame.f_globals.items() if n not in local}
    known = {**outside, **frame.f_locals}
    traced = sorted(n for n in names if _holds(frame.f_locals.get(n), traced_type))
    numpy = sorted(n for n in names if isinstance(known.get(n), np.ndarray))
    own = function is not None and frame.f_code is function.__code__
    modules = {n for n in names if _computes(outside.get(n))}
    computes = frozenset({*traced, *numpy, *modules})
    return _Line(
        number=number,
        text=text,
        code=code,
        traced=tuple(traced),
        numpy=tuple(numpy),
        computes=computes,
        in_model=own,
        numpy_modules=frozenset(n for n in names if known.get(n) is np),
        loops=frozenset(names & _loops_around(frame, number)),
    )


def _is_of_a_library(frame: FrameType) -> bool:
    return _is_in(frame, _NOT_THE_MODEL)


def _is_in(frame: FrameType, folders: tuple[str, ...]) -> bool:
    # compiled modules have relative names
    path = "/" + frame.f_code.co_filename.replace("\\", "/")
    return any(part in path for part in folders)


def _computes(value: Any) -> bool:
    """Whether calls of a module, a function or a class only compute their result."""
    name = "__name__" if inspect.ismodule(value) else "__module__"
    root = str(getattr(value, name, None)).partition(".")[0]
    return root in _COMPUTE and (inspect.ismodule(value) or callable(value))


def _holds(value: Any, kind: type) -> bool:
    return any(isinstance(x, kind) for x in jax.tree.leaves(value))


def _places(error: BaseException) -> list[tuple[FrameType, _Place]]:
    """The frames of a traceback, each with the place that was run."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        positions = [*trace.tb_frame.f_code.co_positions()]
        line, _, column, _ = positions[trace.tb_lasti // 2]
        found.append((trace.tb_frame, _Place(line or trace.tb_lineno, column)))
        trace = trace.tb_next
    return found


def _statement(frame: FrameType, place: _Place) -> tuple[int, str, ast.stmt | None]:
    """The line that runs, its text, and the code of the statement around it."""
    number, column = place
    try:
        lines, start = inspect.getsourcelines(frame.f_code)
    except (OSError, TypeError, IndexError):
        return number, "", None
    start = max(start, 1)
    at = number - start
    if not 0 <= at < len(lines):
        return number, "", None
    whole = "".join(lines)
    dedented = textwrap.dedent(whole)
    try:
        tree = ast.parse(dedented)
    except SyntaxError:
        return number, lines[at].strip(), None
    indent = whole.index("\n") - dedented.index("\n") if "\n" in whole else 0
    innermost: ast.stmt | None = None
    for node in ast.walk(tree):  # a child is seen after its parent
        if isinstance(node, ast.stmt) and _contains(node, at + 1, column, indent):
            innermost = node
    # what is in a block is none of its first line
    empty: list[ast.stmt] = [ast.Pass()]
    if isinstance(innermost, ast.With):
        innermost = ast.With(innermost.items, empty)
    elif isinstance(innermost, ast.If | ast.While):
        innermost = type(innermost)(innermost.test, empty, [])
    elif isinstance(innermost, ast.For):
        innermost = ast.For(innermost.target, innermost.iter, empty, [])
    elif isinstance(innermost, ast.Match):
        innermost = ast.Expr(innermost.subject)
    elif isinstance(innermost, ast.FunctionDef | ast.ClassDef | ast.Try):
        innermost = None
    return number, lines[at].strip(), innermost


def _contains(node: ast.stmt, line: int, column: int | None, indent: int) -> bool:
    """Whether a statement contains a place.

    :param line: the line, counted from that of the function.
    :param column: the column in the file. There may be several statements on a line.
    :param indent: the columns by which the file has the function farther to the right.
    """
    last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    if column is None:
        return node.lineno <= line <= last
    at = line, max(column - indent, 0)
    return (node.lineno, node.col_offset) <= at < (last, end)


def _loops_around(frame: FrameType, number: int) -> set[str]:
    """The names that loops around a line assign."""
    try:
        lines, start = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, IndexError, SyntaxError):
        return set()
    at = number - max(start, 1) + 1
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and node.lineno < at <= (node.end_lineno or 0)
        for name in _names_in(node.target)
    }


def _of_group(line: _Line) -> str:
    """What to write for a loop that selects the rows of each group."""
    for node in ast.walk(line.code) if line.code else ():
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        sides = node.left, node.comparators[0]
        for group, counted in (sides, sides[::-1]):
            one = isinstance(counted, ast.Name) and counted.id in line.loops
            if (
                isinstance(node.ops[0], ast.Eq)
                and one
                and _names_in(group) & {*line.traced}
            ):
                index, rows = ast.unparse(counted), ast.unparse(group)
                return (
                    f"A loop over {index} selects the rows of each group. Write one "
                    "site for all rows in place of the loop, without selecting: "
                    f"parameters of the groups as a[{rows}] in place of a[{index}], "
                    f"and y in place of y[{ast.unparse(node)}]."
                )
    return ""


def _known_outside(value: ast.expr, function: Callable) -> bool:
    """Whether an expression reads only arguments of a function and global names."""
    arguments = set(inspect.signature(function).parameters)
    local = set(function.__code__.co_varnames) - arguments
    closed = set(function.__code__.co_freevars)
    names = {x.id for x in ast.walk(value) if isinstance(x, ast.Name)}
    return not names & (local | closed)


def _before(code: ast.Assign, line: _Line, function: Callable) -> dict[str, str]:
    """What an assignment computes from arguments of the model alone, by name."""
    target = code.targets[0]
    if (
        isinstance(target, ast.Name)
        and _only_computes(code.value, line)
        and _known_outside(code.value, function)
    ):
        return {target.id: ast.unparse(code.value)}
    return {}


def _assigned_before(line: _Line, function: Callable) -> tuple[dict[str, str], str]:
    """The assignment of a name that a line needs the value of.

    :return: what it computes from arguments of the model, by name, and its line as a
        part of a message; nothing if the line reads other arrays, too.
    """
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return {}, ""
    arguments = set(inspect.signature(function).parameters)
    known = line._replace(computes=line.computes | arguments)
    if len(line.traced) != 1:
        return {}, ""
    at, found = "", {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        number = start + node.lineno - 1
        if number < line.number and _names_in(node.targets[0]) == set(line.traced):
            found = {
                name: value if value.startswith(("int(", "len(")) else f"int({value})"
                for name, value in _before(node, known, function).items()
            }
            at = f"line {number}, `{lines[node.lineno - 1].strip()}`,"
    return found, at


def _others(function: Callable, line: _Line) -> dict[str, str]:
    """Other numbers that a function computes with NumPy from its arguments, by name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return {}
    arguments = set(inspect.signature(function).parameters)
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        roots = {
            x.func.value.id
            for x in ast.walk(node.value)
            if isinstance(x, ast.Call)
            and isinstance(x.func, ast.Attribute)
            and isinstance(x.func.value, ast.Name)
        }
        numpy = {x for x in roots if function.__globals__.get(x) is np}
        names = {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
        known = line._replace(computes=line.computes | arguments | numpy)
        if (
            isinstance(target, ast.Name)
            and target.id not in arguments
            and numpy
            and names & arguments
            and _only_computes(node.value, known)
            and _known_outside(node.value, function)
        ):
            found[target.id] = ast.unparse(node.value)
    return found


def _converted(code: ast.stmt) -> str:
    """The value that a statement only converts to a NumPy array."""
    value = getattr(code, "value", None)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    if value.func.attr in _CONVERTERS and len(value.args) == 1:
        return ast.unparse(value.args[0])
    return ""


def lines_with_numbers_of_rows(model: Any, names: Iterable[str]) -> list[str]:
    """The lines of a model that use the length of one of its arguments.

    :param model: the model.
    :param names: the arguments that have rows, on their first axis.
    :return: the lines, as parts of a message. Those that only give a plate or an array
        its size, or the length a name, are none.
    """
    rows, lengths = set(names), set()

    def has_rows(node: ast.AST) -> bool:  # also an entry of a dict
        of = node.value if isinstance(node, ast.Subscript) else node
        return isinstance(of, ast.Name) and of.id in rows

    def is_shape(node: ast.AST, of: str = "shape") -> bool:
        named = isinstance(node, ast.Attribute) and node.attr == of
        return named and has_rows(node.value)  # type: ignore[attr-defined]

    def is_length(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in lengths and isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.Call) and len(node.args) == 1:
            name = getattr(node.func, "id", None)
            if name in ("int", "float"):
                return is_length(node.args[0])
            return name == "len" and has_rows(node.args[0])
        if isinstance(node, ast.Subscript):
            return is_shape(node.value) and ast.unparse(node.slice) == "0"
        return is_shape(node, "size")

    def visit(node: ast.AST) -> Iterator[int]:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("plate", "plate_stack", "ones", "zeros", "arange"):
                return
            if called == "expand":
                yield from visit(node.func)
                return
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and is_shape(node.value):
                target = target.elts[0] if target.elts else target
            elif not is_length(node.value):
                target = ast.Tuple([], ast.Store())
            if isinstance(target, ast.Name):
                lengths.add(target.id)
                return
        if is_length(node):
            yield node.lineno  # type: ignore[attr-defined]
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return _lines_of(model, visit)


def lines_with_numpy(model: Any) -> list[str]:
    """The lines of a model that call NumPy with its arguments, for a message."""
    function = function_of(model)
    if function is None:
        return []
    arguments = set(inspect.signature(function).parameters)

    def visit(node: ast.AST) -> Iterator[int]:
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or not isinstance(
                call.func, ast.Attribute
            ):
                continue
            root = next(iter(_names_in(call.func)), "")
            if function.__globals__.get(root) is np and _names_in(call) & arguments:
                yield call.lineno

    return _lines_of(model, visit)


def _lines_of(model: Any, visit: Callable[[ast.AST], Iterator[int]]) -> list[str]:
    """Lines of a model's source, as parts of a message.

    :param visit: the lines of its syntax tree, counted from its first one.
    """
    try:
        lines, start = inspect.getsourcelines(function_of(model))  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    numbers = sorted({*visit(tree)})
    return [f"line {start + n - 1}, `{lines[n - 1].strip()}`" for n in numbers]


def _only_computes(expression: ast.expr, line: _Line) -> bool:
    """Whether an expression computes a value, and calls nothing that may sample."""
    for node in ast.walk(expression):
        if not isinstance(node, ast.Call):
            continue
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name):
            return False
        if root.id not in line.computes and root.id not in _BUILT_IN:
            return False
    return True


def _computed(code: ast.stmt, line: _Line) -> str:
    """The largest call in a statement that only computes, of a name without values."""
    found = ""
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and _only_computes(node, line):
            inside = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
            text = ast.unparse(node)
            if inside & set(line.traced) and len(text) > len(found):
                found = text
    return found
