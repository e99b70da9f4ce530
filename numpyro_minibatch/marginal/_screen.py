"""The rows, of many, on which the error of the quadrature is measured.

A measurement compares many numbers of nodes, too many for all rows. A small class of
rows can have all of the error, and a sample of the rows may not contain any of them. So
every row is looked at first, at one or two draws, with the model's own nodes and one
finer rule. The rows where these differ most are measured. The others are sampled with
probabilities that increase with the difference. Each row has the inverse of its
probability as its weight, so that the weighted sum of the errors is an unbiased
estimate of the sum over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal.xla import older_emitters
from numpyro_minibatch.marginal._chain import ChainRows
from numpyro_minibatch.marginal._model import Rows
from numpyro_minibatch.marginal._quadrature import (
    find_reach,
    is_wide,
    log_integral,
    log_integrals,
    log_sum_exp,
)
from numpyro_minibatch.marginal._rules import WIDE, Rules, log_trapezoidal
from numpyro_minibatch.marginal._visit import RowsAt

__all__ = ["Sample", "Screen"]

# evaluations of row likelihoods: in all, up to which a second draw is looked at, and at
# one time
_MOST, _FEW, _AT_ONCE = 50_000_000, 5_000_000, 1_000_000
# A finer rule for two and three numbers, if equally spaced points are too many. It does
# not see second modes, but costs no more than a few times the model's own nodes.
_FINER = {1: 11, 2: 11, 3: 9}
_WORST = 4  # one in so many of the rows that are measured are the worst ones
_UNIFORM = 0.5  # share of the others that does not depend on the difference
_LARGE = 10.0  # difference of a row above which it does not matter how large it is


class Sample(NamedTuple):
    """Some rows.

    :param numbers: their indices.
    :param weights: the number of rows that each one stands for.
    :param screened: the number of rows from which they were chosen.
    """

    numbers: np.ndarray
    weights: np.ndarray
    screened: int


class Screen:
    """A first look at all rows, or at random ones if there are several 100,000.

    :param at: the rows.
    :param rules: their rules, with the model's own nodes.
    """

    def __init__(self, at: RowsAt, rules: Rules) -> None:
        self._at = at
        finer: dict[tuple[str, ...], int | None] = dict.fromkeys(rules)
        cost = self._cost(rules, finer)
        if cost * at.size > _MOST:
            for names, rule in rules.items():
                more = _FINER[at.levels[rule.number].dimensions]
                finer[names] = more if rule.own < more else None
            cost = self._cost(rules, finer)
        self._most = max(1, _MOST // cost)
        self._draws = 2 if cost * at.size <= _FEW else 1
        width = min(at.size, max(1, _AT_ONCE // cost))
        look = _differences(rules, finer)
        key, options = jax.random.key(0), older_emitters()
        self._look = at.looker(key, look, width, height=1, options=options)

    def _cost(self, rules: Rules, finer: Mapping[Any, int | None]) -> int:
        """Evaluations of the likelihood for a row of the plate and a draw."""
        total, inside = 0, 1  # levels of inner plates are part of the outer densities
        for level in self._at.levels:
            if level.chain is not None:
                inside *= level.states
                continue
            d, sizes = level.dimensions, self._at.target.sizes
            rows = [sizes[name] for name in level.plates if name != self._at.plate]
            each = inside * level.states * int(np.prod(rows, dtype=int))
            rule = rules.get(level.names)
            if rule is not None:
                other = finer[level.names]
                reference = WIDE[d][0] if other is None else other
                total += each * (rule.own**d + reference**d)
            inside = each * (1 if rule is None else rule.own**d)
        return max(total, 1)

    def ahead(self, draws: Mapping[str, Any]) -> None:
        """Compile the program on another thread.

        :param draws: values as those of :meth:`sample`.
        """
        self._look.ahead(self._some(draws), np.arange(self._at.size))

    def _some(self, draws: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x[: self._draws] for name, x in draws.items()}

    def sample(self, draws: Mapping[str, Any], most: int) -> Sample:
        """The rows to measure.

        :param draws: constrained values of the parameters, along a first axis.
        :param most: the largest number of rows.
        """
        size = self._at.size
        screened = np.arange(size)
        if self._most < size:
            random = np.random.default_rng(0)
            number = max(self._most, most)
            screened = np.sort(random.choice(size, number, replace=False))
        found = self._look(self._some(draws), screened)
        # a row without a finite value is one of the worst
        off = [
            np.nan_to_num(np.abs(x), nan=_LARGE, posinf=_LARGE) for x in found.values()
        ]
        each = [x.reshape(*x.shape[:2], -1).max((0, 2)) for x in off]
        places, weights = chosen(np.minimum(np.max(each, 0), _LARGE), most)
        weights = weights * (size / len(screened))
        return Sample(screened[places], weights, len(screened))


def chosen(errors: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of some rows, and how many rows each one stands for.

    :param errors: of all rows, not negative.
    :param most: the number of rows to choose.
    """
    if len(errors) <= most:
        return np.arange(len(errors)), np.ones(len(errors))
    order = np.argsort(-errors, kind="stable")
    certain = np.zeros(len(errors), bool)
    certain[order[: most // _WORST]] = True
    chance = np.ones(len(errors))
    while True:
        left, rest = most - certain.sum(), ~certain
        share = errors[rest]
        share = share / max(share.sum(), np.finfo(float).tiny)
        share = _UNIFORM / rest.sum() + (1 - _UNIFORM) * share
        chance[rest] = left * share / share.sum()
        above = rest & (chance >= 1.0)
        if not above.any():
            break
        chance[above], certain = 1.0, certain | above
    # at equal distances in the order of the errors, so that all sizes are represented
    others = order[~certain[order]]
    reached = np.cumsum(chance[others])
    taken = np.searchsorted(reached, np.arange(left) + 0.5)
    some = np.unique(np.minimum(taken, len(others) - 1))
    places = np.sort(np.concatenate([np.flatnonzero(certain), others[some]]))
    return places, 1.0 / chance[places]


def _differences(
    rules: Rules, finer: Mapping[Any, int | None]
) -> Callable[..., dict[str, Array]]:
    """The difference between the model's own nodes and one finer rule.

    :param finer: the number of nodes of this rule, or ``None`` for equally spaced
        points, by the names of a level's sites.
    """

    def look(rows: Rows | ChainRows, *_: Any) -> dict[str, Array]:
        rule = rules.get(rows.model.level.names)
        if rule is None or isinstance(rows, ChainRows):
            return {}
        more = finer[rows.model.level.names]

        def one(state: Array) -> tuple[Array, Array]:
            density = rows.density(state)
            place = rows.place(density)
            reach = None
            if is_wide(rule.own):
                reach = find_reach(density.stopped(), place)
            if more is not None:
                own, other = log_integrals(density, place, (rule.own, more), reach)
                return own, other
            own = log_integral(density, place, rule.own, reach)
            return own, log_trapezoidal(density, place)

        own, other = jax.vmap(one)(jnp.asarray(rows.states))
        return {f"{rule.number}": log_sum_exp(own) - log_sum_exp(other)}

    return look
