"""Values that a model computes from its parameters before it reads any row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._model.dataflow import needed_equations, part_of
from numpyro_minibatch.target import Position, Target

__all__ = ["Computed"]


class Computed(NamedTuple):
    """The last values through which the parameters enter the rows.

    A non-centred hierarchy computes the effects ``mu + tau * eta`` and then takes the
    effect of each row. Such a value serves as a coordinate of the expansion if it has
    fewer elements than the values that it is computed from.

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


def _last_values(jaxpr: Any, position: Sequence[Any]) -> list[Any]:
    """The variables through which the position enters the rows.

    All depend on the position and not on the indices of rows, and the outputs depend on
    the position only through them. Beginning with those that the equations of rows
    read, a value is replaced by what it is computed from unless that has more elements.
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
    return [v for v in order if v in last]


def _size(variable: Any) -> int:
    return int(np.prod(variable.aval.shape))
