"""Values that a model computes from its parameters before it reads any row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._model.dataflow import needed_equations, part_of
from numpyro_minibatch.target import Position, Target

__all__ = ["Computed"]

# work on each entry that can be done before or after the entries of rows are taken
_ELEMENTWISE = {
    "add",
    "div",
    "exp",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "max",
    "min",
    "mul",
    "neg",
    "sub",
    "tanh",
}


class Computed(NamedTuple):
    """The last values through which the parameters enter the rows.

    A non-centred hierarchy computes the effects ``mu + tau * eta`` and then takes the
    effect of each row. Such a value serves as a coordinate of the expansion if it has
    fewer elements than the values that it is computed from. If the model first takes
    the rows, ``tau * eta[group]``, the order is exchanged.

    :param closed: the jaxpr of the log likelihood of rows, as a function of the
        position and of the indices of the rows.
    :param given: the variables of this jaxpr that hold the position.
    :param variables: those that hold the last values, in the order of the jaxpr.
    :param tree: the structure of the log likelihoods of the rows.
    """

    closed: Any
    given: dict[Any, str]
    variables: list[Any]
    tree: Any

    @classmethod
    def of(cls, target: Target, z: Position, indices: Any) -> Computed:
        """Trace the log likelihood of the rows ``indices``."""
        trace = jax.make_jaxpr(target.rows, return_shape=True)
        closed, shapes = trace(z, indices)
        before = _before_gathers(closed, len(z))
        closed = jax.make_jaxpr(before)(*jax.tree.leaves((z, indices)))
        names = sorted(z)  # the order of the leaves of a dict
        given = dict(zip(closed.jaxpr.invars, names, strict=False))
        variables = _last_values(closed.jaxpr, list(given))
        return cls(closed, given, variables, jax.tree.structure(shapes))

    @property
    def names(self) -> list[str]:
        """The latent sites among the values; a label for each other one."""
        labels = [f"computed value {k}" for k in range(len(self.variables))]
        pairs = zip(self.variables, labels, strict=True)
        return [self.given.get(v, label) for v, label in pairs]

    @property
    def size(self) -> int:
        """The number of elements of all values."""
        return sum(_size(v) for v in self.variables)

    def values(self, z: Position, indices: Any) -> dict[str, Array]:
        """The values at a position."""
        wanted = [v for v in self.variables if v not in self.given]
        inputs = self.closed.jaxpr.invars
        found = self._evaluated(inputs, jax.tree.leaves((z, indices)), wanted)
        by_variable = dict(zip(wanted, found, strict=True))
        pairs = zip(self.names, self.variables, strict=True)
        return {n: by_variable[v] if v in by_variable else z[n] for n, v in pairs}

    def rows(self, values: dict[str, Array], indices: Any) -> Any:
        """The log likelihood of the rows, as a function of the values."""
        jaxpr = self.closed.jaxpr
        of_rows = jaxpr.invars[len(self.given) :]
        given = [values[name] for name in self.names] + jax.tree.leaves(indices)
        found = self._evaluated([*self.variables, *of_rows], given, jaxpr.outvars)
        return jax.tree.unflatten(self.tree, found)

    def _evaluated(
        self, inputs: Sequence[Any], given: Sequence[Any], outputs: Sequence[Any]
    ) -> list[Array]:
        """Evaluate a part of the jaxpr."""
        jaxpr, known = self.closed.jaxpr, set(inputs)
        free = [e for e in jaxpr.eqns if not any(v in known for v in e.outvars)]
        part = part_of(jaxpr, jaxpr.constvars, [*inputs], free, [*outputs])
        part = part.replace(eqns=needed_equations(part))
        return jax.core.eval_jaxpr(part, self.closed.consts, *given)


class _Taken(NamedTuple):
    """Rows of a value of the parameters, which are not taken yet.

    :param value: a value with an entry for each group.
    :param groups: the groups of the rows.
    :param eqn: the equation that takes them.
    """

    value: Array
    groups: Array
    eqn: Any

    def rows(self) -> Array:
        """The rows."""
        params = dict(self.eqn.params)
        return self.eqn.primitive.bind(self.value, self.groups, **params)


def _before_gathers(closed: Any, number: int) -> Callable[..., list[Array]]:
    """The function of a jaxpr, with elementwise work done before rows are taken.

    :param number: how many of its inputs are the position.
    """
    jaxpr = closed.jaxpr
    live = needed_equations(jaxpr)
    of_position, of_rows = _dependence(jaxpr, jaxpr.invars[:number], live)
    used = {_key(x) for eqn in live for x in eqn.invars} | set(map(_key, jaxpr.outvars))

    def fn(*inputs: Array) -> list[Array]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, inputs, strict=True))
        narrow: dict[Any, tuple[Array, tuple[int, ...]]] = {}  # before broadcasting

        def read(atom: Any) -> Any:
            found = atom.val if hasattr(atom, "val") else env[atom]
            return found.rows() if isinstance(found, _Taken) else found

        def as_wide(atom: Any, like: Array) -> Array | None:
            """A value of the parameters, as wide as one with entries of groups."""
            if hasattr(atom, "val") or not atom.aval.shape:
                free = hasattr(atom, "val") or atom not in of_rows
                return jnp.broadcast_to(read(atom), like.shape) if free else None
            if atom in narrow and atom not in of_rows:
                value, axes = narrow[atom]
                if 0 not in axes and len(atom.aval.shape) == like.ndim:
                    return jax.lax.broadcast_in_dim(value, like.shape, axes)
            return None

        def exchanged(eqn: Any) -> _Taken | None:
            """The rows of an elementwise value, to be taken after it is computed."""
            taken = [x for x in eqn.invars if isinstance(env.get(_key(x)), _Taken)]
            if eqn.primitive.name not in _ELEMENTWISE or len(taken) != 1:
                return None
            own = env[taken[0]]
            wide = [
                own.value if x is taken[0] else as_wide(x, own.value)
                for x in eqn.invars
            ]
            if any(x is None for x in wide):
                return None
            return own._replace(value=eqn.primitive.bind(*wide, **eqn.params))

        for eqn in live:
            if _takes_rows(eqn) and eqn.invars[0] in of_position - of_rows:
                if _key(eqn.invars[1]) not in of_position:
                    value, groups = map(read, eqn.invars)
                    env[eqn.outvars[0]] = _Taken(value, groups, eqn)
                    continue
            later = exchanged(eqn)
            if later is not None:
                env[eqn.outvars[0]] = later
                continue
            if eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1:
                axes = eqn.params["broadcast_dimensions"]
                narrow[eqn.outvars[0]] = read(eqn.invars[0]), axes
            inside = list(dict.fromkeys(x for x in eqn.invars if _key(x) is not None))
            out = [v for v in eqn.outvars if v in used]
            one = part_of(jaxpr, [], inside, [eqn], out)
            found = jax.core.eval_jaxpr(one, [], *map(read, inside))
            env.update(zip(out, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return fn


def _key(atom: Any) -> Any:
    """A variable, or ``None`` for a number, which has no hash."""
    return None if hasattr(atom, "val") else atom


def _takes_rows(eqn: Any) -> bool:
    """Whether an equation is ``x[groups]``, with entries of the first axis."""
    if eqn.primitive.name != "gather" or hasattr(eqn.invars[0], "val"):
        return False
    (value, groups), (out,) = eqn.invars, eqn.outvars
    numbers, shape = eqn.params["dimension_numbers"], value.aval.shape
    if eqn.params["fill_value"] is not None:
        return False  # work on what stands for a missing entry cannot be exchanged
    return (
        numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and numbers.offset_dims == tuple(range(1, len(shape)))
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        and len(groups.aval.shape) == 2
        and len(out.aval.shape) == len(shape)
    )


def _dependence(
    jaxpr: Any, position: Sequence[Any], live: Sequence[Any]
) -> tuple[set[Any], set[Any]]:
    """The variables that depend on the position, and those that depend on rows."""
    of_position = set(position)
    of_rows = set(jaxpr.invars) - of_position
    for eqn in live:
        for those in of_position, of_rows:
            if any(_key(v) in those for v in eqn.invars):
                those.update(eqn.outvars)
    return of_position, of_rows


def _last_values(jaxpr: Any, position: Sequence[Any]) -> list[Any]:
    """The variables through which the position enters the rows.

    All depend on the position and not on the indices of rows, and the outputs depend on
    the position only through them. Beginning with those that the equations of rows
    read, a value is replaced by what it is computed from unless that has more elements.
    No value follows from the others.
    """
    live = needed_equations(jaxpr)
    of_position = set(position)
    of_rows = set(jaxpr.invars) - of_position
    last = {v for v in jaxpr.outvars if v in of_position}
    before = []
    for eqn in live:
        inputs = [v for v in eqn.invars if not hasattr(v, "val")]
        if any(v in of_rows for v in inputs):
            of_rows.update(eqn.outvars)
            last.update(v for v in inputs if v in of_position)
        elif any(v in of_position for v in inputs):
            of_position.update(eqn.outvars)
            last.update(v for v in eqn.outvars if v in jaxpr.outvars)
            before.append(eqn)
    for eqn in reversed(before):
        held = [v for v in eqn.outvars if v in last]
        if not held:
            continue
        needed = {v for v in eqn.invars if not hasattr(v, "val") and v in of_position}
        smooth = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in held)
        size = sum(map(_size, held))
        if not smooth or sum(_size(v) for v in needed - last) <= size:
            last = (last - set(held)) | needed
    order = [*position, *(v for eqn in before for v in eqn.outvars)]
    for v in reversed(order):
        if (
            v in last
            and v not in position
            and _follows(v, before, of_position - (last - {v}))
        ):
            # As a coordinate of its own, the normalising constant of a Student-t
            # distribution would be free of its degrees of freedom.
            last = last - {v}
    return [v for v in order if v in last]


def _follows(variable: Any, equations: Sequence[Any], unknown: set[Any]) -> bool:
    """Whether equations compute a variable without any of the unknown ones."""
    unknown = set(unknown)
    for eqn in equations:
        if not any(_key(v) in unknown for v in eqn.invars):
            unknown.difference_update(eqn.outvars)
    return variable not in unknown


def _size(variable: Any) -> int:
    return int(np.prod(variable.aval.shape))
