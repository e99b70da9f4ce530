"""Proofs that rows are independent, read off jaxprs without computing anything.

The rows of a batch are followed as axes of arrays. An operation that acts elementwise
along such an axis keeps the rows separate; any other makes the proof fail, which does
not mean that rows depend on each other. Two jaxprs of the same function, for batches of
two sizes, are followed in parallel, to detect a dependence on the number of rows, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_minibatch._model.dataflow import sizes_of_scan
from numpyro_minibatch._model.rowwise_rules import (
    ELEMENTWISE,
    PLAIN,
    RULES,
    SAME,
    Fact,
    Unproven,
    broadcast,
    elementwise,
    growing,
    replaced,
    row_axes,
    shape_of,
    stretched,
)

__all__ = ["trace_rows"]

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


def trace_rows(one: Any, other: Any, facts: Sequence[Fact]) -> list[Fact]:
    """The known facts about the outputs of a function.

    :param one: its jaxpr for batches of one size.
    :param other: its jaxpr for batches of another size. If it is the same jaxpr, only
        the inputs whose facts have rows are followed, and everything else counts as
        constant along all axes.
    :param facts: what is known of its inputs.
    :return: a fact for each output; ``None`` for all of them where the jaxprs do not
        have the same form. Axes of kind ``SAME`` and ``PLAIN`` that differ in length
        between the jaxprs have lengths of the batch.
    """
    try:
        return _Reader(one is other).follow(one, other, facts)
    except (Unproven, KeyError, AttributeError):
        # parameters of primitives are JAX's own and change from version to version:
        # what is not understood is not proven
        return [None] * len(one.jaxpr.outvars)


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


@dataclass(frozen=True)
class _Reader:
    """Follows rows through jaxprs.

    :param alone: whether both jaxprs are the same one.
    """

    alone: bool

    def follow(self, one: Any, other: Any, facts: Sequence[Fact]) -> list[Fact]:
        (one, consts), (other, other_consts) = _open(one), _open(other)
        if len(one.eqns) != len(other.eqns) or len(consts) != len(other_consts):
            raise Unproven
        env: dict[Any, Fact] = dict(zip(one.invars, facts, strict=True))
        for var, a, b in zip(one.constvars, consts, other_consts, strict=True):
            env[var] = self._constant(a, b)

        def read(a: Any, b: Any) -> Fact:
            if hasattr(a, "val") != hasattr(b, "val"):
                raise Unproven
            return self._constant(a.val, b.val) if hasattr(a, "val") else env[a]

        for eqn, twin in zip(one.eqns, other.eqns, strict=True):
            same = eqn.primitive is twin.primitive or (
                eqn.primitive.name == twin.primitive.name
            )
            if not same or len(eqn.invars) != len(twin.invars):
                raise Unproven
            inputs = [read(a, b) for a, b in zip(eqn.invars, twin.invars, strict=True)]
            for var, fact in zip(
                eqn.outvars, self._apply(eqn, twin, inputs), strict=True
            ):
                env[var] = fact
        return [read(a, b) for a, b in zip(one.outvars, other.outvars, strict=True)]

    def _constant(self, a: Any, b: Any) -> Fact:
        """The fact of a constant, which must be the same for batches of any size."""
        kind = SAME if self.alone else PLAIN
        return (kind,) * np.ndim(a) if _same_constant(a, b) else None

    def _apply(self, eqn: Any, twin: Any, inputs: list[Fact]) -> list[Fact]:
        """The facts of the outputs of an equation."""
        unknown: list[Fact] = [None] * len(eqn.outvars)
        clean = all(f is not None and set(f) <= {SAME, PLAIN} for f in inputs)
        if clean and self.alone:
            return [(SAME,) * len(shape_of(v)) for v in eqn.outvars]
        pairs = [*zip(eqn.invars, twin.invars, strict=True)]
        outs = [*zip(eqn.outvars, twin.outvars, strict=True)]
        name, params, others = eqn.primitive.name, eqn.params, twin.params
        if name in ELEMENTWISE:
            inputs = [
                stretched(fact, *pair)
                for fact, pair in zip(
                    inputs,
                    [(shape_of(v), shape_of(eqn.outvars[0])) for v in eqn.invars],
                    strict=True,
                )
            ]
        inner = _inner(params, others, len(eqn.invars))
        if inner is not None:
            return self.follow(*inner, inputs)
        if name == "scan":
            return self._scan(params, others, inputs, len(eqn.outvars))
        if name == "while":
            return self._while(params, others, inputs, unknown)
        if name == "cond":
            return self._cond(params, others, inputs, unknown)
        if not _alike(params, others):
            return unknown
        grows = [growing(*pair) for pair in (*pairs, *outs)]
        if clean and not any(grows):
            if params.keys() & _SHAPES and not _equal(params, others):
                return unknown
            spread = name == "broadcast_in_dim"
            return [
                (SAME,) * len(shape_of(v)) if spread and not pairs[0][0]
                else elementwise(inputs, len(shape_of(v))) if name in ELEMENTWISE
                else broadcast(eqn, inputs[0]) if spread
                else (PLAIN,) * len(shape_of(v))
                for v in eqn.outvars
            ]  # fmt: skip
        if any(fact is None for fact in inputs):
            return unknown
        facts: list[tuple[str, ...]] = [fact for fact in inputs if fact is not None]
        rule = RULES.get(name)
        if name in ELEMENTWISE:
            return [elementwise(inputs, len(shape_of(eqn.outvars[0])))]
        if name in _REDUCTIONS:
            axes = set(params["axes"])
            bad = axes & (row_axes(facts[0]) | grows[0])
            kept = tuple(k for i, k in enumerate(facts[0]) if i not in axes)
            return unknown if bad else [kept]
        if name in _ALONG_AXIS:
            axis = params["axis"]
            if axis in row_axes(facts[0]) | grows[0]:
                return unknown
            return [replaced(facts[0], {axis: PLAIN})]
        if rule is None:
            return unknown
        try:
            return rule(eqn, twin, facts, grows)
        except (KeyError, IndexError, AttributeError, TypeError):
            return unknown  # another version of JAX

    def _scan(
        self, params: Any, others: Any, inputs: list[Fact], outputs: int
    ) -> list[Fact]:
        consts, carries = sizes_of_scan(params)
        if params["length"] != others["length"]:  # over the rows of a batch
            return [None] * outputs
        items: list[Fact] = []
        for fact in inputs[consts + carries :]:
            along_rows = fact is None or fact[0] not in (SAME, PLAIN)
            items.append(None if fact is None or along_rows else fact[1:])

        def body(carry: list[Fact]) -> list[Fact]:
            given = [*inputs[:consts], *carry, *items]
            return self.follow(params["jaxpr"], others["jaxpr"], given)

        carry, rest = _loop(body, inputs[consts : consts + carries])
        return [*carry, *(None if f is None else (PLAIN, *f) for f in rest)]

    def _while(
        self, params: Any, others: Any, inputs: list[Fact], unknown: Any
    ) -> list[Fact]:
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        body_consts = inputs[of_cond : of_cond + of_body]

        def body(carry: list[Fact]) -> list[Fact]:
            given = [*body_consts, *carry]
            return self.follow(params["body_jaxpr"], others["body_jaxpr"], given)

        carry, _ = _loop(body, inputs[of_cond + of_body :])
        given = [*inputs[:of_cond], *carry]
        (go_on,) = self.follow(params["cond_jaxpr"], others["cond_jaxpr"], given)
        # steps until all rows have converged are a dependence on the other rows
        return unknown if go_on != () else carry

    def _cond(
        self, params: Any, others: Any, inputs: list[Fact], unknown: Any
    ) -> list[Fact]:
        which, *given = inputs
        if which != ():
            return unknown
        found: list[Fact] | None = None
        for one, other in zip(params["branches"], others["branches"], strict=True):
            new = self.follow(one, other, given)
            found = new if found is None else _merged(found, new)
        return unknown if found is None else found


def _same_constant(a: Any, b: Any) -> bool:
    """Whether constants are the same for batches of both sizes."""
    if a is b:
        return True
    if np.shape(a) != np.shape(b) or getattr(a, "dtype", 0) != getattr(b, "dtype", 0):
        return False
    try:
        # numbers that were computed from the size and back again are equal up to this
        return np.allclose(a, b, rtol=1e-9, atol=0.0, equal_nan=True)
    except TypeError:  # PRNG keys
        return False


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
            and all(_same_constant(*c) for c in zip(consts, other_consts, strict=True))
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
    """The facts that hold for both of two possible values."""
    found: list[Fact] = []
    for a, b in zip(old, new, strict=True):
        found.append(None if a is None or b is None else elementwise([a, b], len(a)))
    return found


def _loop(body: Any, carry: list[Fact]) -> tuple[list[Fact], list[Fact]]:
    """The carry of a loop, and the other outputs of its body."""
    for _ in range(_MOST_ROUNDS):
        found = body(carry)
        merged = _merged(carry, found[: len(carry)])
        if merged == carry:
            return carry, found[len(carry) :]
        carry = merged
    raise Unproven
