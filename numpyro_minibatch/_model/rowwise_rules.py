"""The effects of single operations on the rows of a batch, one rule per primitive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ELEMENTWISE",
    "PLAIN",
    "RULES",
    "SAME",
    "Fact",
    "Unproven",
    "broadcast",
    "elementwise",
    "growing",
    "replaced",
    "row_axes",
    "rows_of_plate",
    "shape_of",
    "stretched",
]

# Kinds of an axis. Along SAME the value is constant; along PLAIN it varies in a way
# that has nothing to do with the batch; every other kind is the rows of a plate.
SAME, PLAIN = "same", "plain"

# The kinds of all axes of a value; None for a value of which nothing is known.
Fact = tuple[str, ...] | None

ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil",
    "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag",
    "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic",
    "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg", "nextafter", "not", "or",
    "polygamma", "population_count", "pow", "random_gamma_grad", "real",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    "zeta",
}  # fmt: skip


def rows_of_plate(name: str) -> str:
    """The kind of an axis that has the rows of a plate.

    :param name: the plate.
    """
    return f"rows of {name}"


class Unproven(Exception):
    """The two jaxprs do not have the same form."""


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal of a jaxpr."""
    return tuple(getattr(atom.aval, "shape", ()))


def growing(a: Any, b: Any) -> set[int]:
    """The axes whose lengths are those of batches."""
    one, other = shape_of(a), shape_of(b)
    if len(one) != len(other):
        raise Unproven
    return {i for i, (m, n) in enumerate(zip(one, other, strict=True)) if m != n}


def row_axes(fact: tuple[str, ...]) -> set[int]:
    """The axes that have rows of a plate."""
    return {i for i, kind in enumerate(fact) if kind not in (SAME, PLAIN)}


def replaced(fact: tuple[str, ...], kinds: dict[int, str]) -> tuple[str, ...]:
    """A fact with other kinds of some axes."""
    return tuple(kinds.get(i, kind) for i, kind in enumerate(fact))


def _joined(a: str, b: str) -> str | None:
    """The kind of an axis of two values that are combined elementwise."""
    if a == b or b == SAME:
        return a
    # numbers that vary with the place in a batch do not belong to rows
    return b if a == SAME else None


def stretched(fact: Fact, shape: tuple[int, ...], made: tuple[int, ...]) -> Fact:
    """The fact of an input of an operation that repeats it along axes of length one."""
    if fact is None or len(shape) != len(made):
        return fact
    alone = {i: SAME for i, n in enumerate(shape) if n == 1 and made[i] != 1}
    return replaced(fact, alone)


def elementwise(facts: Sequence[Fact], ndim: int) -> Fact:
    """The fact of the output of an elementwise operation."""
    found: list[str] = [SAME] * ndim
    for fact in facts:
        if fact is None:
            return None
        if not fact:
            continue  # scalars combine with any shape
        if len(fact) != ndim:
            return None  # numbers of other sizes are cast to more or fewer of them
        for i, kind in enumerate(fact):
            joined = _joined(found[i], kind)
            if joined is None:
                return None
            found[i] = joined
    return tuple(found)


# primitives with rows among their inputs, or with axes of a batch's length ------------

_Facts = list[tuple[str, ...]]
_Sets = list[set[int]]


def broadcast(eqn: Any, fact: Fact) -> Fact:
    """The fact of an array repeated along new axes or along axes of length one."""
    if fact is None:
        return None
    shape, place = shape_of(eqn.outvars[0]), eqn.params["broadcast_dimensions"]
    found, given = [SAME] * len(shape), shape_of(eqn.invars[0])
    for i, axis in enumerate(place):
        found[axis] = fact[i] if given[i] == shape[axis] else SAME
    return tuple(found)


def _broadcast_in_dim(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    return [broadcast(eqn, facts[0])]


def _groups(
    one: tuple[int, ...], other: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Groups of adjacent axes that a reshape turns into each other."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(one) or j < len(other):
        left, right, sizes = [], [], [1, 1]
        if i < len(one):
            left, sizes[0], i = [i], one[i], i + 1
        if j < len(other):
            right, sizes[1], j = [j], other[j], j + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1] and i < len(one):
                left.append(i)
                sizes[0] *= one[i]
                i += 1
            elif sizes[1] < sizes[0] and j < len(other):
                right.append(j)
                sizes[1] *= other[j]
                j += 1
            else:
                raise Unproven
        found.append((left, right))
    return found


def _reshape(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    given, made = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    groups = _groups(given, made)
    if groups != _groups(shape_of(twin.invars[0]), shape_of(twin.outvars[0])):
        return [None]
    found = [SAME] * len(made)
    rows = row_axes(facts[0]) | grows[0]
    for left, right in groups:
        wide_left = [i for i in left if given[i] != 1]
        wide_right = [j for j in right if made[j] != 1]
        if len(wide_left) == len(wide_right) == 1:
            found[wide_right[0]] = facts[0][wide_left[0]]
        elif rows & set(wide_left):
            return [None]
        else:
            for j in wide_right:
                found[j] = PLAIN
    return [tuple(found)]


def _squeeze(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    gone = set(eqn.params["dimensions"])
    return [tuple(kind for i, kind in enumerate(facts[0]) if i not in gone)]


def _transpose(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    return [tuple(facts[0][i] for i in eqn.params["permutation"])]


def _rev(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    bad = set(eqn.params["dimensions"]) & (row_axes(facts[0]) | grows[0])
    return [None] if bad else [facts[0]]


def _concatenate(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["dimension"]
    if any(axis in row_axes(f) | g for f, g in zip(facts, grows, strict=False)):
        return [None]
    rest = [replaced(fact, {axis: PLAIN}) for fact in facts]
    return [elementwise(rest, len(rest[0]))]


def _stack(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["axis"]
    joined = elementwise(facts, len(facts[0]))
    return [None if joined is None else (*joined[:axis], PLAIN, *joined[axis:])]


def _split(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["axis"]
    bad = axis in row_axes(facts[0]) | grows[0]
    return [None if bad else facts[0]] * len(eqn.outvars)


def _unstack(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["axis"]
    bad = axis in row_axes(facts[0]) | grows[0]
    kept = (*facts[0][:axis], *facts[0][axis + 1 :])
    return [None if bad else kept] * len(eqn.outvars)


def _identity(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    return list(facts)


def _slice(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    rows = row_axes(facts[0]) | grows[0]
    for e in (eqn, twin):
        given, made = shape_of(e.invars[0]), shape_of(e.outvars[0])
        if any(given[i] != made[i] for i in rows):
            return [None]
    # a slice of the batch's length out of all data belongs to places and not to rows
    return [replaced(facts[0], dict.fromkeys(grows[-1] - rows, PLAIN))]


def _dynamic_slice(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    if any(fact != () for fact in facts[1:]):
        return [None]
    return _slice(eqn, twin, facts, grows)


def _pad(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    rows = row_axes(facts[0]) | grows[0]
    config = eqn.params["padding_config"]
    if any(tuple(config[i]) != (0, 0, 0) for i in rows):
        return [None]
    padded = [i for i, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    return [replaced(facts[0], dict.fromkeys(padded, PLAIN))]


def _iota(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    kinds = [SAME] * len(shape_of(eqn.outvars[0]))
    kinds[eqn.params["dimension"]] = PLAIN
    return [tuple(kinds)]


def _dot_general(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    contracting, batch = eqn.params["dimension_numbers"]
    for side in (0, 1):
        if set(contracting[side]) & (row_axes(facts[side]) | grows[side]):
            return [None]
    found: list[str] = []
    for i, j in zip(*batch, strict=True):
        kind = _joined(facts[0][i], facts[1][j])
        if kind is None:
            return [None]
        found.append(kind)
    for side in (0, 1):
        used = {*contracting[side], *batch[side]}
        found += [kind for i, kind in enumerate(facts[side]) if i not in used]
    return [tuple(found)]


def _gather(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    numbers = eqn.params["dimension_numbers"]
    operand, index = facts
    shape, ndim = shape_of(eqn.invars[0]), len(shape_of(eqn.outvars[0]))
    if (len(index) - 1) in row_axes(index) | grows[1]:
        return [None]  # an index of several numbers
    paired = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims,
            strict=True)
    )  # fmt: skip
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    sliced = [i for i in range(len(shape)) if i not in gone]
    if set(numbers.operand_batching_dims) != set(paired.values()):
        return [None]
    whole = {i: eqn.params["slice_sizes"][i] == shape[i] for i in sliced}
    for i in row_axes(operand) | grows[0]:
        kept = i in sliced and whole[i] and i not in numbers.start_index_map
        if not kept and i not in numbers.operand_batching_dims:
            return [None]
        twin_shape = shape_of(twin.invars[0])
        if i in sliced and twin.params["slice_sizes"][i] != twin_shape[i]:
            return [None]
    found: list[str] = [PLAIN] * ndim
    for place, i in zip(numbers.offset_dims, sliced, strict=True):
        found[place] = operand[i] if whole[i] else PLAIN
    rest = [i for i in range(ndim) if i not in numbers.offset_dims]
    for place, j in zip(rest, range(len(index) - 1), strict=True):
        kind: str | None = index[j]
        if j in paired:
            kind = _joined(index[j], operand[paired[j]])
        if kind is None:
            return [None]
        found[place] = kind
    return [tuple(found)]


def _sort(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["dimension"]
    if any(axis in row_axes(f) | g for f, g in zip(facts, grows, strict=False)):
        return [None] * len(eqn.outvars)
    joined = elementwise([replaced(f, {axis: PLAIN}) for f in facts], len(facts[0]))
    return [joined] * len(eqn.outvars)


def _of_matrices(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    """The facts of functions of stacked matrices, all stacked alike."""
    leading: list[Fact] = []
    for fact, grown in zip(facts, grows, strict=False):
        last = {len(fact) - 1, len(fact) - 2}
        if last & (row_axes(fact) | grown):
            return [None] * len(eqn.outvars)
        leading.append(fact[:-2])
    joined = elementwise(leading, len(facts[0]) - 2)
    if joined is None:
        return [None] * len(eqn.outvars)
    return [
        (*joined, *([PLAIN] * (len(shape_of(v)) - len(joined)))) for v in eqn.outvars
    ]


def _triangular_solve(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    # right-hand sides in one matrix are solved for one by one
    free = len(facts[1]) - (1 if eqn.params["left_side"] else 2)
    kind, left = facts[1][free], row_axes(facts[1]) | grows[1]
    if left == {free} and not row_axes(facts[0]) | grows[0]:
        return [replaced((PLAIN,) * len(facts[1]), {free: kind})]
    return _of_matrices(eqn, twin, facts, grows)


def _convolution(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    numbers = eqn.params["dimension_numbers"]
    batch, image = numbers.lhs_spec[0], facts[0]
    alone = row_axes(image) | grows[0] <= {batch} and not row_axes(facts[1]) | grows[1]
    if not alone or eqn.params["batch_group_count"] != 1:
        return [None]
    kinds = [PLAIN] * len(image)
    kinds[numbers.out_spec[0]] = image[batch]
    return [tuple(kinds)]


RULES: dict[str, Any] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "cholesky": _of_matrices,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "iota": _iota,
    "optimization_barrier": _identity,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
    "triangular_solve": _triangular_solve,
    "unstack": _unstack,
}
