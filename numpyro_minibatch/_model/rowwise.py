"""Proofs that rows are independent, read off jaxprs: nothing here computes.

The rows of a batch are followed as axes of arrays. An operation that acts along such an
axis entry by entry keeps the rows apart; any other makes the proof fail, which does not
mean that rows depend on each other. Two jaxprs of the same function, for batches of two
sizes, are followed in step, so that a dependence on the number of rows is seen, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numpyro_minibatch._model.dataflow import sizes_of_scan

__all__ = ["PLAIN", "SAME", "Fact", "rows_of_plate", "trace_rows"]

# Kinds of an axis. Along SAME the value is constant; along PLAIN it varies in a way
# that has nothing to do with the batch; every other kind is the rows of a plate.
SAME, PLAIN = "same", "plain"

# The kinds of all axes of a value; None for a value of which nothing is known.
Fact = tuple[str, ...] | None

_ELEMENTWISE = {
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
_REDUCTIONS = {
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reduce_prod", "reduce_sum", "reduce_xor",
}  # fmt: skip
_ALONG_AXIS = {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"}
# what differs between batches of two sizes without a difference in meaning
_SHAPES = {
    "limit_indices", "name", "out_sharding", "shape", "sharding", "sizes",
    "slice_sizes", "new_sizes", "ctx_mesh", "in_shardings", "out_shardings",
}  # fmt: skip
_MOST_ROUNDS = 8  # until what a loop carries is known


def rows_of_plate(name: str) -> str:
    """The kind of an axis that has the rows of a plate.

    :param name: the plate.
    """
    return f"rows of {name}"


class _Unproven(Exception):
    """The two jaxprs are not of one form."""


def trace_rows(one: Any, other: Any, facts: Sequence[Fact]) -> list[Fact]:
    """What is known of the outputs of a function.

    :param one: its jaxpr for batches of one size.
    :param other: its jaxpr for batches of another size.
    :param facts: what is known of its inputs.
    :return: a fact for each output; ``None`` for all of them where the jaxprs do not
        have the same form. Axes of kind ``SAME`` and ``PLAIN`` that differ in length
        between the jaxprs have lengths of the batch.
    """
    try:
        return _follow(one, other, facts)
    except (_Unproven, KeyError, AttributeError):
        # parameters of primitives are JAX's own and change from version to version:
        # what is not understood is not proven
        return [None] * len(one.jaxpr.outvars)


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _follow(one: Any, other: Any, facts: Sequence[Fact]) -> list[Fact]:
    (one, consts), (other, other_consts) = _open(one), _open(other)
    if len(one.eqns) != len(other.eqns) or len(consts) != len(other_consts):
        raise _Unproven
    env: dict[Any, Fact] = dict(zip(one.invars, facts, strict=True))
    for var, a, b in zip(one.constvars, consts, other_consts, strict=True):
        env[var] = _constant(a, b)

    def read(a: Any, b: Any) -> Fact:
        if hasattr(a, "val") != hasattr(b, "val"):
            raise _Unproven
        return _constant(a.val, b.val) if hasattr(a, "val") else env[a]

    for eqn, twin in zip(one.eqns, other.eqns, strict=True):
        same = eqn.primitive is twin.primitive or (
            eqn.primitive.name == twin.primitive.name
        )
        if not same or len(eqn.invars) != len(twin.invars):
            raise _Unproven
        inputs = [read(a, b) for a, b in zip(eqn.invars, twin.invars, strict=True)]
        for var, fact in zip(eqn.outvars, _apply(eqn, twin, inputs), strict=True):
            env[var] = fact
    return [read(a, b) for a, b in zip(one.outvars, other.outvars, strict=True)]


def _constant(a: Any, b: Any) -> Fact:
    """Of a constant, which must be the same for batches of any size."""
    if a is b:
        return (PLAIN,) * np.ndim(a)
    if np.shape(a) != np.shape(b) or getattr(a, "dtype", 0) != getattr(b, "dtype", 0):
        return None
    try:
        # numbers that were computed from the size and back again are equal up to this
        close = np.allclose(a, b, rtol=1e-9, atol=0.0, equal_nan=True)
    except TypeError:  # PRNG keys
        return None
    return (PLAIN,) * np.ndim(a) if close else None


def _apply(eqn: Any, twin: Any, inputs: list[Fact]) -> list[Fact]:
    """The facts of the outputs of an equation."""
    unknown: list[Fact] = [None] * len(eqn.outvars)
    pairs = [*zip(eqn.invars, twin.invars, strict=True)]
    outs = [*zip(eqn.outvars, twin.outvars, strict=True)]
    name, params, others = eqn.primitive.name, eqn.params, twin.params
    if name in _ELEMENTWISE:
        inputs = [
            _stretched(fact, *pair)
            for fact, pair in zip(
                inputs,
                [(_shape(v), _shape(eqn.outvars[0])) for v in eqn.invars],
                strict=True,
            )
        ]
    inner = _inner(params, others, len(eqn.invars))
    if inner is not None:
        return _follow(*inner, inputs)
    if name == "scan":
        return _scan(params, others, inputs, len(eqn.outvars))
    if name == "while":
        return _while(params, others, inputs, unknown)
    if name == "cond":
        return _cond(params, others, inputs, unknown)
    if not _alike(params, others):
        return unknown
    grows = [_growing(*pair) for pair in (*pairs, *outs)]
    clean = all(f is not None and set(f) <= {SAME, PLAIN} for f in inputs)
    if clean and not any(grows):
        if params.keys() & _SHAPES and not _equal(params, others):
            return unknown
        return [
            (SAME,) * len(_shape(v)) if name == "broadcast_in_dim" and not pairs[0][0]
            else _elementwise(inputs, len(_shape(v))) if name in _ELEMENTWISE
            else _broadcast(eqn, inputs[0]) if name == "broadcast_in_dim"
            else (PLAIN,) * len(_shape(v))
            for v in eqn.outvars
        ]  # fmt: skip
    if any(fact is None for fact in inputs):
        return unknown
    facts: list[tuple[str, ...]] = [fact for fact in inputs if fact is not None]
    rule = _RULES.get(name)
    if name in _ELEMENTWISE:
        return [_elementwise(inputs, len(_shape(eqn.outvars[0])))]
    if name in _REDUCTIONS:
        axes = set(params["axes"])
        bad = axes & (_rows(facts[0]) | grows[0])
        kept = tuple(k for i, k in enumerate(facts[0]) if i not in axes)
        return unknown if bad else [kept]
    if name in _ALONG_AXIS:
        axis = params["axis"]
        if axis in _rows(facts[0]) | grows[0]:
            return unknown
        return [_replaced(facts[0], {axis: PLAIN})]
    if rule is None:
        return unknown
    try:
        return rule(eqn, twin, facts, grows)
    except (KeyError, IndexError, AttributeError, TypeError):
        return unknown  # another version of JAX


def _growing(a: Any, b: Any) -> set[int]:
    """The axes whose lengths are those of batches."""
    one, other = _shape(a), _shape(b)
    if len(one) != len(other):
        raise _Unproven
    return {i for i, (m, n) in enumerate(zip(one, other, strict=True)) if m != n}


def _rows(fact: tuple[str, ...]) -> set[int]:
    return {i for i, kind in enumerate(fact) if kind not in (SAME, PLAIN)}


def _replaced(fact: tuple[str, ...], kinds: dict[int, str]) -> tuple[str, ...]:
    return tuple(kinds.get(i, kind) for i, kind in enumerate(fact))


def _joined(a: str, b: str) -> str | None:
    """The kind of an axis of two values that are combined entry by entry."""
    if a == b or b == SAME:
        return a
    # numbers that vary with the place in a batch do not belong to rows
    return b if a == SAME else None


def _stretched(fact: Fact, shape: tuple[int, ...], made: tuple[int, ...]) -> Fact:
    """Of an input of an operation that repeats it along axes of length one."""
    if fact is None or len(shape) != len(made):
        return fact
    alone = {i: SAME for i, n in enumerate(shape) if n == 1 and made[i] != 1}
    return _replaced(fact, alone)


def _elementwise(facts: Sequence[Fact], ndim: int) -> Fact:
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


# parameters of primitives ------------------------------------------------------------


def _alike(params: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether parameters other than shapes are equal."""
    return params.keys() == others.keys() and all(
        _equal(params[k], others[k]) for k in params if k not in _SHAPES
    )


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if hasattr(a, "eqns") or hasattr(a, "jaxpr"):
        (one, consts), (other, other_consts) = _open(a), _open(b)
        return (
            str(one) == str(other)
            and len(consts) == len(other_consts)
            and all(
                _constant(*c) is not None
                for c in zip(consts, other_consts, strict=True)
            )
        )
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False


def _inner(params: Any, others: Any, number: int) -> tuple[Any, Any] | None:
    """The jaxprs that an equation calls with its inputs as they are."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        found, twin = params.get(key), others.get(key)
        if "length" in params or "linear" in params and key == "jaxpr":
            continue  # a scan
        jaxpr = getattr(found, "jaxpr", found)
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == number:
            return found, twin
    return None


# control flow ------------------------------------------------------------------------


def _merged(old: Sequence[Fact], new: Sequence[Fact]) -> list[Fact]:
    """What holds of values that may be either."""
    found: list[Fact] = []
    for a, b in zip(old, new, strict=True):
        found.append(None if a is None or b is None else _elementwise([a, b], len(a)))
    return found


def _loop(body: Any, carry: list[Fact]) -> tuple[list[Fact], list[Fact]]:
    """What a loop carries, and what its body gives besides."""
    for _ in range(_MOST_ROUNDS):
        found = body(carry)
        merged = _merged(carry, found[: len(carry)])
        if merged == carry:
            return carry, found[len(carry) :]
        carry = merged
    raise _Unproven


def _scan(params: Any, others: Any, inputs: list[Fact], outputs: int) -> list[Fact]:
    consts, carries = sizes_of_scan(params)
    if params["length"] != others["length"]:  # over the rows of a batch
        return [None] * outputs
    items: list[Fact] = []
    for fact in inputs[consts + carries :]:
        along_rows = fact is None or fact[0] not in (SAME, PLAIN)
        items.append(None if fact is None or along_rows else fact[1:])

    def body(carry: list[Fact]) -> list[Fact]:
        given = [*inputs[:consts], *carry, *items]
        return _follow(params["jaxpr"], others["jaxpr"], given)

    carry, rest = _loop(body, inputs[consts : consts + carries])
    return [*carry, *(None if f is None else (PLAIN, *f) for f in rest)]


def _while(params: Any, others: Any, inputs: list[Fact], unknown: Any) -> list[Fact]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    body_consts = inputs[of_cond : of_cond + of_body]

    def body(carry: list[Fact]) -> list[Fact]:
        given = [*body_consts, *carry]
        return _follow(params["body_jaxpr"], others["body_jaxpr"], given)

    carry, _ = _loop(body, inputs[of_cond + of_body :])
    given = [*inputs[:of_cond], *carry]
    (go_on,) = _follow(params["cond_jaxpr"], others["cond_jaxpr"], given)
    # steps until all rows have converged are a dependence on the other rows
    return unknown if go_on != () else carry


def _cond(params: Any, others: Any, inputs: list[Fact], unknown: Any) -> list[Fact]:
    which, *given = inputs
    if which != ():
        return unknown
    found: list[Fact] | None = None
    for one, other in zip(params["branches"], others["branches"], strict=True):
        new = _follow(one, other, given)
        found = new if found is None else _merged(found, new)
    return unknown if found is None else found


# primitives with rows among their inputs, or with axes of a batch's length ------------

_Facts = list[tuple[str, ...]]
_Sets = list[set[int]]


def _broadcast(eqn: Any, fact: Fact) -> Fact:
    if fact is None:
        return None
    shape, place = _shape(eqn.outvars[0]), eqn.params["broadcast_dimensions"]
    found, given = [SAME] * len(shape), _shape(eqn.invars[0])
    for i, axis in enumerate(place):
        found[axis] = fact[i] if given[i] == shape[axis] else SAME
    return tuple(found)


def _broadcast_in_dim(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    return [_broadcast(eqn, facts[0])]


def _groups(
    one: tuple[int, ...], other: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Runs of axes that a reshape makes out of each other."""
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
                raise _Unproven
        found.append((left, right))
    return found


def _reshape(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    given, made = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    groups = _groups(given, made)
    if groups != _groups(_shape(twin.invars[0]), _shape(twin.outvars[0])):
        return [None]
    found = [SAME] * len(made)
    rows = _rows(facts[0]) | grows[0]
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
    bad = set(eqn.params["dimensions"]) & (_rows(facts[0]) | grows[0])
    return [None] if bad else [facts[0]]


def _concatenate(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["dimension"]
    if any(axis in _rows(f) | g for f, g in zip(facts, grows, strict=False)):
        return [None]
    rest = [_replaced(fact, {axis: PLAIN}) for fact in facts]
    return [_elementwise(rest, len(rest[0]))]


def _stack(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["axis"]
    joined = _elementwise(facts, len(facts[0]))
    return [None if joined is None else (*joined[:axis], PLAIN, *joined[axis:])]


def _split(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["axis"]
    bad = axis in _rows(facts[0]) | grows[0]
    return [None if bad else facts[0]] * len(eqn.outvars)


def _unstack(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    axis = eqn.params["axis"]
    bad = axis in _rows(facts[0]) | grows[0]
    kept = (*facts[0][:axis], *facts[0][axis + 1 :])
    return [None if bad else kept] * len(eqn.outvars)


def _identity(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    return list(facts)


def _slice(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    rows = _rows(facts[0]) | grows[0]
    for e in (eqn, twin):
        given, made = _shape(e.invars[0]), _shape(e.outvars[0])
        if any(given[i] != made[i] for i in rows):
            return [None]
    # a slice of the batch's length out of all data belongs to places and not to rows
    return [_replaced(facts[0], dict.fromkeys(grows[-1] - rows, PLAIN))]


def _dynamic_slice(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    if any(fact != () for fact in facts[1:]):
        return [None]
    return _slice(eqn, twin, facts, grows)


def _pad(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    rows = _rows(facts[0]) | grows[0]
    config = eqn.params["padding_config"]
    if any(tuple(config[i]) != (0, 0, 0) for i in rows):
        return [None]
    padded = [i for i, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    return [_replaced(facts[0], dict.fromkeys(padded, PLAIN))]


def _iota(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    kinds = [SAME] * len(_shape(eqn.outvars[0]))
    kinds[eqn.params["dimension"]] = PLAIN
    return [tuple(kinds)]


def _dot_general(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    contracting, batch = eqn.params["dimension_numbers"]
    for side in (0, 1):
        if set(contracting[side]) & (_rows(facts[side]) | grows[side]):
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
    shape, ndim = _shape(eqn.invars[0]), len(_shape(eqn.outvars[0]))
    if (len(index) - 1) in _rows(index) | grows[1]:
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
    for i in _rows(operand) | grows[0]:
        kept = i in sliced and whole[i] and i not in numbers.start_index_map
        if not kept and i not in numbers.operand_batching_dims:
            return [None]
        twin_shape = _shape(twin.invars[0])
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
    if any(axis in _rows(f) | g for f, g in zip(facts, grows, strict=False)):
        return [None] * len(eqn.outvars)
    joined = _elementwise([_replaced(f, {axis: PLAIN}) for f in facts], len(facts[0]))
    return [joined] * len(eqn.outvars)


def _of_matrices(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    """Of functions of stacked matrices, all stacked alike."""
    leading: list[Fact] = []
    for fact, grown in zip(facts, grows, strict=False):
        last = {len(fact) - 1, len(fact) - 2}
        if last & (_rows(fact) | grown):
            return [None] * len(eqn.outvars)
        leading.append(fact[:-2])
    joined = _elementwise(leading, len(facts[0]) - 2)
    if joined is None:
        return [None] * len(eqn.outvars)
    return [(*joined, *([PLAIN] * (len(_shape(v)) - len(joined)))) for v in eqn.outvars]


def _triangular_solve(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    # right-hand sides in one matrix are solved for one by one
    free = len(facts[1]) - (1 if eqn.params["left_side"] else 2)
    kind, left = facts[1][free], _rows(facts[1]) | grows[1]
    if left == {free} and not _rows(facts[0]) | grows[0]:
        return [_replaced((PLAIN,) * len(facts[1]), {free: kind})]
    return _of_matrices(eqn, twin, facts, grows)


def _convolution(eqn: Any, twin: Any, facts: _Facts, grows: _Sets) -> list[Fact]:
    numbers = eqn.params["dimension_numbers"]
    batch, image = numbers.lhs_spec[0], facts[0]
    alone = _rows(image) | grows[0] <= {batch} and not _rows(facts[1]) | grows[1]
    if not alone or eqn.params["batch_group_count"] != 1:
        return [None]
    kinds = [PLAIN] * len(image)
    kinds[numbers.out_spec[0]] = image[batch]
    return [tuple(kinds)]


_RULES: dict[str, Any] = {
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
