"""A function split into the part that depends on its argument and the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import Array

from numpyro_minibatch._model.dataflow import needed_equations, part_of

__all__ = ["Split"]


@dataclass(frozen=True, eq=False)
class Split:
    """A function of one array, with everything else computed in advance.

    Quadrature evaluates the log density of a row at many values of its latent numbers,
    and the search for its mode does so in a loop. Gathered rows of data, linear
    predictors and normalising constants are the same for all of these values. They are
    computed once, outside of the loop, so that they are neither evaluated nor compiled
    repeatedly.

    :param known: the values that do not depend on the argument.
    :param rest: the jaxpr of the rest, with the inputs ``known`` and the argument.
    """

    known: list[Any]
    rest: Any

    @classmethod
    def of(cls, fn: Callable[[Array], Array], example: Array) -> Split:
        """Trace a function once.

        :param fn: from an array to an array; it may use other values being traced.
        :param example: an argument, for its shape and type.
        """
        closed = jax.make_jaxpr(fn)(example)
        jaxpr = closed.jaxpr
        depends = set(jaxpr.invars)
        before, after = [], []
        for eqn in needed_equations(jaxpr):
            if any(_is_variable(x) and x in depends for x in eqn.invars):
                depends.update(eqn.outvars)
                after.append(eqn)
            else:
                before.append(eqn)
        read = [x for eqn in after for x in eqn.invars] + list(jaxpr.outvars)
        border = list(
            dict.fromkeys(x for x in read if _is_variable(x) and x not in depends)
        )
        first = part_of(jaxpr, jaxpr.constvars, [], before, border)
        known = jax.core.eval_jaxpr(first, closed.consts)
        rest = part_of(jaxpr, [], [*border, *jaxpr.invars], after, jaxpr.outvars)
        return cls(list(known), rest)

    def __call__(self, x: Array) -> Array:
        """The function at ``x``."""
        return jax.core.eval_jaxpr(self.rest, [], *self.known, x)[0]

    def stopped(self) -> Split:
        """The same function, with no derivatives through ``known``."""
        return replace(self, known=[jax.lax.stop_gradient(x) for x in self.known])


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")
