"""The flow of a target's data, read off its jaxpr without computing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "Findings",
    "indexes_one_element",
    "inputs_used",
    "inspect_flow",
    "needed_equations",
    "part_of",
    "sizes_of_scan",
    "smooth_inputs",
]

# Work that XLA does not fuse into the gather of a few rows behind it, and so does on
# every row. (Elementwise work it fuses: taking the logarithm of a million rows and then
# a hundred of them costs what a hundred logarithms cost.)
_UNFUSED = {
    "argmax",
    "argmin",
    "cholesky",
    "conv_general_dilated",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dot_general",
    "fft",
    "ragged_dot_general",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "scatter",
    "scatter-add",
    "sort",
    "top_k",
    "triangular_solve",
}
# Primitives through which row numbers stay row numbers.
_KEEPS_NUMBERS = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reshape",
    "squeeze",
}


# Primitives whose derivative is zero, although they return real numbers.
_STEPS = {"ceil", "floor", "nextafter", "round", "sign"}


class Findings(NamedTuple):
    """Errors and slow operations, each once.

    :param short: ``(plate, rows, shape)`` of an array that is taken by the indices of
        a plate with more rows than it has.
    :param wide: ``(plate, primitive)`` of work on all rows of a plate that depends on
        the position, so that it is done at every step.
    """

    short: list[tuple[str, int, tuple[int, ...]]]
    wide: list[tuple[str, str]]


class _Fact(NamedTuple):
    """The known facts about a value.

    :param numbers: for each of its columns the plate whose row numbers it holds.
    :param shifted: the plate whose row numbers, plus a constant, it holds.
    :param rows: the plates whose rows it has, one per entry of an axis.
    :param position: whether it depends on the position.
    """

    numbers: tuple[str | None, ...] = ()
    shifted: str | None = None
    rows: frozenset[str] = frozenset()
    position: bool = False


def inspect_flow(
    closed: Any, plates: Mapping[str, int], indices: Sequence[str | None]
) -> Findings:
    """Follow the indices, the data and the position through a jaxpr.

    :param closed: the jaxpr of a target's terms.
    :param plates: the number of rows of each data plate.
    :param indices: for each input of the jaxpr the plate whose indices it is, or
        ``None`` for a part of the position.
    """
    flow = _Flow(plates)
    facts = [_Fact((n,)) if n else _Fact(position=True) for n in indices]
    flow.follow(closed, facts, [True] * len(closed.jaxpr.outvars))
    return flow.findings


class _Flow:
    def __init__(self, plates: Mapping[str, int]) -> None:
        self.plates = plates
        self.findings = Findings([], [])

    def data(self, shape: tuple[int, ...]) -> _Fact:
        """The fact of a constant: whose rows its leading axis may be."""
        rows = [name for name, size in self.plates.items() if shape[:1] == (size,)]
        return _Fact(rows=frozenset(rows))

    def follow(
        self, closed: Any, facts: Sequence[_Fact], live: Sequence[bool]
    ) -> list[_Fact]:
        """The facts of the outputs of a jaxpr, given those of its inputs.

        :param closed: a jaxpr, closed or open.
        :param live: which of its outputs are used.
        """
        jaxpr = getattr(closed, "jaxpr", closed)
        env = {v: self.data(_shape(v)) for v in jaxpr.constvars}
        env |= dict(zip(jaxpr.invars, facts, strict=True))

        def read(atom: Any) -> _Fact:
            # outputs that nothing uses were not followed
            unknown = self.data(_shape(atom)) if _is_literal(atom) else _Fact()
            return unknown if _is_literal(atom) else env.get(atom, unknown)

        for eqn, used in _live_equations(jaxpr, live):
            inputs = [read(atom) for atom in eqn.invars]
            outputs = self.apply(eqn, inputs, used)
            for var, fact in zip(eqn.outvars, outputs, strict=True):
                shape = _shape(var)
                rows = [name for name in fact.rows if self.plates[name] in shape]
                env[var] = fact._replace(rows=frozenset(rows))
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: Any, inputs: list[_Fact], live: Sequence[bool]) -> list[_Fact]:
        """The facts of the outputs of one equation."""
        name = eqn.primitive.name
        rows = frozenset().union(*(f.rows for f in inputs))
        position = any(f.position for f in inputs)
        if name == "gather":
            rows -= self.gather(eqn, inputs)
        whole = {p for p in rows if eqn.params.get("length") == self.plates[p]}
        if position and (wide := rows if name in _UNFUSED else whole):
            for plate in sorted(wide):
                if (plate, name) not in self.findings.wide:
                    self.findings.wide.append((plate, name))
        outputs = [_Fact(rows=rows, position=position)] * len(eqn.outvars)
        for inner, skipped in _inner_jaxprs(eqn):
            results = self.follow(inner, inputs[skipped:], live)
            if len(results) == len(outputs):
                outputs = [
                    fact._replace(position=fact.position or position)
                    for fact in results
                ]
        if name in _KEEPS_NUMBERS:
            outputs = [outputs[0]._replace(numbers=inputs[0].numbers)]
        elif name == "add":
            # x[i] is x[where(i < 0, i + len(x), i)]: the sum is not a row number
            for this, other in ((0, 1), (1, 0)):
                if len(inputs[this].numbers) == 1 and _is_literal(eqn.invars[other]):
                    shifted = inputs[this].numbers[0]
                    outputs = [outputs[0]._replace(shifted=shifted)]
        elif name == "select_n" and len(inputs) == 3:
            for this, other in ((1, 2), (2, 1)):
                shifted = inputs[other].shifted
                if shifted and inputs[this].numbers == (shifted,):
                    outputs = [outputs[0]._replace(numbers=(shifted,))]
        elif name == "concatenate" and _columns(eqn):
            columns = tuple(f.numbers[0] if f.numbers else None for f in inputs)
            outputs = [outputs[0]._replace(numbers=columns)]
        return outputs

    def gather(self, eqn: Any, inputs: list[_Fact]) -> set[str]:
        """Check a gather, and find the plates whose rows it takes by their indices."""
        shape = _shape(eqn.invars[0])
        axes = eqn.params["dimension_numbers"].start_index_map
        taken = set()
        if len(inputs[1].numbers) == len(axes):
            for plate, axis in zip(inputs[1].numbers, axes, strict=True):
                if plate is not None:
                    taken.add(plate)
                    # asked for by name, x.at[i].get(mode="clip") repeats the last row
                    clip = "CLIP" in str(eqn.params["mode"])
                    found = (plate, shape[axis], shape)
                    if shape[axis] < self.plates[plate] and not clip:
                        if found not in self.findings.short:
                            self.findings.short.append(found)
        return taken


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _columns(eqn: Any) -> bool:
    """Whether an equation concatenates columns."""
    axis = eqn.params["dimension"]
    shapes = [_shape(atom) for atom in eqn.invars]
    return all(axis == len(shape) - 1 and shape[axis] == 1 for shape in shapes)


def _inner_jaxprs(eqn: Any) -> list[tuple[Any, int]]:
    """The jaxprs that an equation calls, and how many of its inputs come before theirs.

    Only those whose inputs are the equation's own, in order: not those of ``while``.
    """
    found: list[tuple[Any, int]] = []
    if eqn.primitive.name == "while":
        return found
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple) else (value,):
            jaxpr: Any = getattr(inner, "jaxpr", inner)
            if hasattr(jaxpr, "eqns") and hasattr(jaxpr, "invars"):
                skipped = len(eqn.invars) - len(jaxpr.invars)
                if skipped == (eqn.primitive.name == "cond"):
                    found.append((inner, skipped))
    return found


def inputs_used(closed: Any) -> list[bool]:
    """Which inputs of a jaxpr its outputs depend on."""
    jaxpr = closed.jaxpr
    used = [True] * len(jaxpr.outvars)
    inside = {v for v in jaxpr.outvars if not _is_literal(v)}
    for part, part_used in _live_equations(jaxpr, used):
        inside.update(v for v in _needs(part, part_used) if not _is_literal(v))
    return [var in inside for var in jaxpr.invars]


def smooth_inputs(closed: Any) -> list[bool]:
    """Which inputs of a jaxpr its outputs depend on by more than steps.

    Comparisons, rounding and the choice of a branch change their results in steps, and
    have no derivative. Loops are taken to be smooth.
    """
    jaxpr = closed.jaxpr
    return [any(_follow_smooth(jaxpr, {v})) for v in jaxpr.invars]


def _follow_smooth(jaxpr: Any, smooth: set[Any]) -> list[bool]:
    """Which outputs of a jaxpr change smoothly with its smooth inputs."""
    for eqn in jaxpr.eqns:
        inputs = [not _is_literal(v) and v in smooth for v in eqn.invars]
        if not any(inputs) or eqn.primitive.name in _STEPS:
            continue
        outputs = [True] * len(eqn.outvars)
        for inner, skipped in _inner_jaxprs(eqn):
            body = getattr(inner, "jaxpr", inner)
            same = len(body.outvars) == len(outputs)
            if eqn.primitive.name in ("scan", "cond") or not same:
                continue
            pairs = zip(body.invars, inputs[skipped:], strict=True)
            outputs = _follow_smooth(body, {v for v, yes in pairs if yes})
            break
        for var, yes in zip(eqn.outvars, outputs, strict=True):
            if yes and "float" in str(getattr(var.aval, "dtype", "")):
                smooth.add(var)
    return [not _is_literal(v) and v in smooth for v in jaxpr.outvars]


def indexes_one_element(jaxpr: Any) -> bool:
    """Whether a jaxpr indexes an axis of one element.

    An axis of one element can stand for many equal ones in all operations but this: an
    index may be beyond its end.

    :param jaxpr: a jaxpr, closed or open.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        numbers = eqn.params.get("dimension_numbers")
        axes: Sequence[int] = ()
        if eqn.primitive.name == "gather":
            axes = numbers.start_index_map
        elif eqn.primitive.name.startswith("scatter"):
            axes = numbers.scatter_dims_to_operand_dims
        if any(eqn.invars[0].aval.shape[axis] == 1 for axis in axes):
            return True
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    if indexes_one_element(inner):
                        return True
    return False


def needed_equations(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr that its outputs need, in order.

    They can be evaluated: all inputs of each are there, used inside of it or not.
    """
    needed = {v for v in jaxpr.outvars if not _is_literal(v)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not _is_literal(v))
    return kept[::-1]


def part_of(
    jaxpr: Any, constvars: Any, invars: list[Any], eqns: list[Any], outvars: list[Any]
) -> Any:
    """Some equations of a jaxpr, with other inputs and outputs."""
    # a jaxpr needs as many names as inputs and outputs
    names = jaxpr.debug_info._replace(
        arg_names=("",) * len(invars), result_paths=("",) * len(outvars)
    )
    return jaxpr.replace(
        constvars=list(constvars),
        invars=invars,
        eqns=eqns,
        outvars=list(outvars),
        debug_info=names,
    )


def _live_equations(
    jaxpr: Any, live: Sequence[bool]
) -> list[tuple[Any, Sequence[bool]]]:
    """The equations that the used outputs need, each with its own used outputs."""
    needed = {
        v
        for v, used in zip(jaxpr.outvars, live, strict=True)
        if used and not _is_literal(v)
    }
    kept: list[tuple[Any, Sequence[bool]]] = []
    for eqn in reversed(jaxpr.eqns):
        used = [v in needed for v in eqn.outvars]
        if any(used):
            kept.append((eqn, used))
            needed |= {v for v in _needs(eqn, used) if not _is_literal(v)}
    return kept[::-1]


def _needs(eqn: Any, used: Sequence[bool]) -> list[Any]:
    """The inputs of an equation that its used outputs need."""
    if eqn.primitive.name == "scan":
        return _needs_of_scan(eqn, used)
    if eqn.primitive.name == "cond":
        return list(eqn.invars)
    for inner, _ in _inner_jaxprs(eqn):
        jaxpr = getattr(inner, "jaxpr", inner)
        if len(jaxpr.outvars) == len(used):
            inside = {v for v, u in zip(jaxpr.outvars, used, strict=True) if u}
            for part, part_used in _live_equations(jaxpr, used):
                inside.update(v for v in _needs(part, part_used) if not _is_literal(v))
            return [
                atom
                for atom, var in zip(eqn.invars, jaxpr.invars, strict=True)
                if var in inside
            ]
    return list(eqn.invars)


def _needs_of_scan(eqn: Any, used: Sequence[bool]) -> list[Any]:
    """The inputs of a scan that its used outputs need, in some step."""
    if not eqn.params["length"]:
        return list(eqn.invars)
    consts, carries = sizes_of_scan(eqn.params)
    inner = eqn.params["jaxpr"]
    jaxpr = getattr(inner, "jaxpr", inner)
    used = list(used)
    while True:
        inside = {
            v
            for v, u in zip(jaxpr.outvars, used, strict=True)
            if u and not _is_literal(v)
        }
        for part, part_used in _live_equations(jaxpr, used):
            inside.update(v for v in _needs(part, part_used) if not _is_literal(v))
        needed = [var in inside for var in jaxpr.invars]
        # what a step needs of the step before is an output that is used
        before = needed[consts : consts + carries]
        more = [u or b for u, b in zip(used[:carries], before, strict=True)]
        if more == used[:carries]:
            pairs = zip(eqn.invars, needed, strict=True)
            return [atom for atom, yes in pairs if yes]
        used[:carries] = more


def sizes_of_scan(params: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are carried."""
    if "ft_in" in params:  # since JAX 0.12
        consts, carries, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carries))
    return params["num_consts"], params["num_carry"]
