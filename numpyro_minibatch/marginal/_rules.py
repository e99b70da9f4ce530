"""Quadrature rules of a marginalized model, compared with finer and wider ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal.xla import older_emitters
from numpyro_minibatch.marginal._chain import ChainRows
from numpyro_minibatch.marginal._model import Rows
from numpyro_minibatch.marginal._quadrature import (
    Place,
    Reach,
    find_place,
    find_reach,
    log_integrals,
    log_sum_exp,
)
from numpyro_minibatch.marginal._split import Split
from numpyro_minibatch.marginal._visit import Looker, RowsAt

__all__ = [
    "ELSEWHERE",
    "QuadratureError",
    "Rule",
    "Rules",
    "WIDE",
    "Look",
    "look_by",
    "log_trapezoidal",
    "look_by_own",
    "looks_of",
    "rounded_spread",
    "rules_of",
    "summary",
    "together",
    "with_more_nodes",
]

ELSEWHERE = 0.01  # share of a row's likelihood elsewhere that is reported

# equally spaced points, by the number of dimensions: their number along each, and how
# many standard deviations they are apart
WIDE = {1: (121, 0.5), 2: (31, 0.8), 3: (19, 1.0)}
_APART = 0.1  # asinh of standard deviations beyond the range of a mode
# rows at all draws, and evaluations of row likelihoods there
_FEWEST_ROWS, _MOST_ROWS, _MOST = 24, 2_000, 9_000_000
_COMMON = 4.0  # times the variance of independent errors that is not by chance


class QuadratureError(NamedTuple):
    """The errors of a marginalized model's quadrature, on the log scale.

    :param largest: the largest error of the log likelihood of a row, over the checked
        rows and draws.
    :param spread: the standard deviation over the draws of the summed error of all
        rows. A constant error would cancel in log ratios between posterior draws. To
        first order, a posterior mean is off by at most this many posterior standard
        deviations.
    :param row: the row with the largest error.
    :param by_nodes: the largest error by the number of nodes of each dimension.
    :param num_nodes: the smallest of these numbers of nodes with an error below
        ``tolerance``; ``None`` if there is none.
    :param elsewhere: the largest difference in a row's log likelihood between the
        finest nodes and equally spaced points further out (up to 30 standard deviations
        from the mode in one dimension, 12 in two, 9 in three). It is large if the nodes
        at the mode miss a second mode or a heavy tail.
    :param unconverged: the number of pairs of row and draw for which the search did not
        converge to a mode.
    :param kinks: the number of these for which the density is finite and falls on each
        side of where the search ended, as at a kink.
    :param tolerance: the requested error.
    :param spread_by_nodes: ``spread`` by the number of nodes of each dimension.
    :param spread_elsewhere: ``spread`` of the difference from the points further out.
    :param row_elsewhere: the row with the largest such difference.
    :param modes: the same as ``elsewhere``, for second modes that searches from far
        out in the prior find beyond the range of the nodes.
    :param spread_modes: ``spread`` of these differences.
    :param row_modes: the row with the largest one.
    """

    largest: float
    spread: float
    row: int
    by_nodes: dict[int, float]
    num_nodes: int | None
    elsewhere: float
    unconverged: int
    tolerance: float
    spread_by_nodes: dict[int, float]
    spread_elsewhere: float
    row_elsewhere: int
    modes: float = 0.0
    spread_modes: float = 0.0
    row_modes: int = 0
    kinks: int = 0

    def __str__(self) -> str:
        lines = [
            f"quadrature error of a row's log likelihood: {self.largest:.1e} at most "
            f"(row {self.row}); standard deviation of the sum over rows between draws: "
            f"{self.spread:.1e}",
            "by number of nodes: "
            + ", ".join(f"{n}: {e:.1e}" for n, e in self.by_nodes.items()),
        ]
        if self.num_nodes is not None:
            lines.append(
                f"below {self.tolerance:.0e}: marginalize(model, num_nodes="
                f"{self.num_nodes})"
            )
        else:
            lines.append(
                f"no number of nodes that was tried is below {self.tolerance:.0e}"
            )
        far = max(10 * self.tolerance, ELSEWHERE)
        if self.elsewhere > far or min(self.by_nodes.values()) > far:
            lines.append(
                f"points further out find a difference of {self.elsewhere:.1e} (row "
                f"{self.row_elsewhere}): the density of a row has a second mode or a "
                "heavy tail"
            )
        if self.modes > ELSEWHERE:
            lines.append(
                f"a search from far out in the prior finds a second mode in row "
                f"{self.row_modes}: it changes the log likelihood by {self.modes:.1e}"
            )
        if self.unconverged:
            lines.append(
                f"the search did not converge to a mode in {self.unconverged} cases; "
                f"in {self.kinks} of them the density falls on each side, as at a kink"
            )
        return "\n".join(lines)


class Rule(NamedTuple):
    """The numbers of nodes that are compared for the sites of a level.

    :param number: of the level.
    :param own: the nodes of each dimension that the model uses.
    :param tried: numbers of nodes.
    :param fine: the number of nodes of the reference.
    """

    number: int
    own: int
    tried: tuple[int, ...]
    fine: int


Rules = Mapping[tuple[str, ...], Rule]


def rules_of(
    at: RowsAt,
    tried: Mapping[int, tuple[int, ...]],
    fine: Mapping[int, int],
    finer: bool = False,
) -> dict[tuple[str, ...], Rule]:
    """The rules of each level with continuous sites, by the names of its sites.

    :param finer: whether to try only more nodes than the model has.
    """
    levels = [(k, level) for k, level in enumerate(at.levels) if level.dimensions]
    dimensions = [level.dimensions for _, level in levels]
    counts = {n for d in dimensions for n in tried[d]}
    owns = [at.model.num_nodes or level.nodes for _, level in levels]
    rules = {}
    for (k, level), d, own in zip(levels, dimensions, owns, strict=True):
        reference = max(fine[d], own + 4)
        some = {n for n in counts if n < reference and not (finer and n < min(owns))}
        rules[level.names] = Rule(k, own, tuple(sorted(some | {own})), reference)
    return rules


class Look(NamedTuple):
    """A compiled comparison of rules.

    :param most: the number of rows that are compared at all draws.
    :param at: results at draws and rows, as :meth:`RowsAt.looker` returns them.
    """

    most: int
    at: Looker


def looks_of(at: RowsAt, count: int, rules: Rules) -> Look:
    """The comparison of some rules at so many draws, which compiles when it is used."""
    nodes = 0
    for rule in rules.values():
        level = at.levels[rule.number]
        states = int(np.prod([s.size for s in level.sites if s.discrete], dtype=int))
        d = level.dimensions
        nodes += states * sum(n**d for n in (*rule.tried, rule.fine, WIDE[d][0]))
    most = max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST // (nodes * count)))
    width = min(most, at.size)
    key, look, options = jax.random.key(0), look_by(rules), older_emitters()
    return Look(most, at.looker(key, look, width, height=1, options=options))


def with_more_nodes(
    at: RowsAt,
    draws: Mapping[str, Any],
    numbers: np.ndarray,
    found: Mapping[str, np.ndarray],
    rules: Rules,
    more: Rules,
    tolerance: float,
) -> tuple[Rules, dict[str, np.ndarray]]:
    """Rules and results with more nodes at the rows where the others are inaccurate.

    Where the most nodes have half of the tolerated error at most, further nodes have
    not more than that, and are not evaluated.

    :param numbers: the rows of ``found``, the results by ``rules``.
    :param more: the same with more nodes and a finer reference.
    """
    most = [_off(found, r, max(r.tried)).max(0) for r in rules.values()]
    (bad,) = np.nonzero(np.max(most, axis=0) > tolerance / 2)
    larger = any(max(more[k].tried) > max(r.tried) for k, r in rules.items())
    if not len(bad) or not larger:
        return rules, dict(found)
    height, width = 1, min(len(bad), _FEWEST_ROWS)
    look = at.looker(jax.random.key(0), look_by(more), width=width, height=height)
    finer = look(draws, numbers[bad])
    out, both = dict(found), {}
    for names, rule in rules.items():
        new = more[names]
        tried = tuple(sorted({*rule.tried, *new.tried}))
        both[names] = new._replace(tried=tried)
        exact = f"{rule.number} fine"
        for n in (*tried, "wide", "modes"):
            known = n if n in (*rule.tried, "wide", "modes") else max(rule.tried)
            signed = _signed(found, rule, known)
            if n in new.tried:
                signed[:, bad] = _signed(finer, new, n)
            out[f"{rule.number} {n}"] = found[exact] + signed
    return both, out


def _off(found: Mapping[str, np.ndarray], rule: Rule, nodes: Any) -> np.ndarray:
    """Errors of rows, the largest in size of a row's, shape ``(draws, rows)``."""
    signed = _signed(found, rule, nodes)
    return np.abs(signed).reshape(*signed.shape[:2], -1).max(-1)


def _signed(found: Mapping[str, np.ndarray], rule: Rule, nodes: Any) -> np.ndarray:
    exact = found[f"{rule.number} fine"].astype(np.float64)
    if nodes in ("wide", "modes"):
        # equally spaced points can find more than nodes do, but not all of a heavy tail
        return np.maximum(found[f"{rule.number} {nodes}"] - exact, 0.0)
    if nodes >= rule.fine:
        return np.zeros_like(exact)
    return found[f"{rule.number} {nodes}"] - exact


def summary(
    found: Mapping[str, np.ndarray],
    rules: Rules,
    numbers: np.ndarray,
    weights: np.ndarray,
    tolerance: float,
) -> QuadratureError:
    """The errors of all levels together.

    :param weights: the number of rows that each one stands for.
    """

    def always(nodes: int) -> Callable[[Rule], Any]:
        return lambda rule: nodes

    def spread(of: Callable[[Rule], Any]) -> float:
        total: Any = 0.0
        for rule in rules.values():
            signed = _signed(found, rule, of(rule))
            total = total + signed.reshape(*signed.shape[:2], -1).sum(-1)
        return float((total @ weights).std())

    def by_row(of: Callable[[Rule], Any]) -> np.ndarray:
        each = [_off(found, rule, of(rule)).max(0) for rule in rules.values()]
        return np.max(each, axis=0)

    def count_without(name: str) -> int:
        flags = [found[f"{rule.number} {name}"] for rule in rules.values()]
        return sum(int((~x).sum()) for x in flags)

    unconverged = count_without("converged")
    tried = sorted({n for rule in rules.values() for n in rule.tried})
    common = [
        n
        for n in tried
        if all(n in rule.tried or n >= rule.fine for rule in rules.values())
    ]
    by_nodes = {n: float(by_row(always(n)).max()) for n in common}
    enough = [
        n for n in common if max(by_nodes[m] for m in common if m >= n) < tolerance
    ]
    own, wide = by_row(lambda rule: rule.own), by_row(lambda rule: "wide")
    modes = by_row(lambda rule: "modes")
    return QuadratureError(
        largest=float(own.max()),
        spread=spread(lambda rule: rule.own),
        row=int(numbers[own.argmax()]),
        by_nodes=by_nodes,
        num_nodes=min(enough, default=None),
        elsewhere=float(wide.max()),
        unconverged=unconverged,
        kinks=unconverged - count_without("bounded"),
        tolerance=tolerance,
        spread_by_nodes={n: spread(always(n)) for n in common},
        spread_elsewhere=spread(lambda rule: "wide"),
        row_elsewhere=int(numbers[wide.argmax()]),
        modes=float(modes.max()),
        spread_modes=spread(lambda rule: "modes"),
        row_modes=int(numbers[modes.argmax()]),
    )


def together(errors: list[QuadratureError]) -> QuadratureError:
    """The errors of the rows of several plates; spreads add up at most."""
    if len(errors) == 1:
        return errors[0]
    worst = max(errors, key=lambda e: e.largest)
    far = max(errors, key=lambda e: e.elsewhere)
    other = max(errors, key=lambda e: e.modes)
    tried = sorted({n for e in errors for n in e.by_nodes})
    common = [n for n in tried if all(n >= min(e.by_nodes) for e in errors)]
    enough = [e.num_nodes for e in errors if e.num_nodes is not None]
    return worst._replace(
        spread=sum(e.spread for e in errors),
        by_nodes={n: max(_at(e.by_nodes, n) for e in errors) for n in common},
        num_nodes=max(enough) if len(enough) == len(errors) else None,
        elsewhere=far.elsewhere,
        row_elsewhere=far.row_elsewhere,
        unconverged=sum(e.unconverged for e in errors),
        kinks=sum(e.kinks for e in errors),
        spread_by_nodes={
            n: sum(_at(e.spread_by_nodes, n) for e in errors) for n in common
        },
        spread_elsewhere=sum(e.spread_elsewhere for e in errors),
        modes=other.modes,
        spread_modes=sum(e.spread_modes for e in errors),
        row_modes=other.row_modes,
    )


def _at(by_nodes: Mapping[int, float], nodes: int) -> float:
    """The error of so many nodes, or of the next smaller number that was tried."""
    return by_nodes[max(n for n in by_nodes if n <= nodes)]


def look_by_own(rules: Rules) -> Callable[..., dict[str, Array]]:
    """Log likelihoods of the rows by the model's own nodes alone."""

    def look(rows: Rows | ChainRows, *_: Any) -> dict[str, Array]:
        rule = rules.get(rows.model.level.names)
        if rule is None or isinstance(rows, ChainRows):
            return {}
        return {f"{rule.number} own": rows.log_marginal(rule.own)}

    return look


def rounded_spread(
    single: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    rules: Rules,
    weights: np.ndarray,
) -> float:
    """The spread of errors in single precision that rows have in common.

    Rounding errors of rows are independent and cancel; their part is left out.

    :param single: results of :func:`look_by_own` in single precision.
    :param found: results of :func:`look_by` in double precision.
    :param weights: the number of rows that each one stands for.
    """
    total: Any = 0.0
    for rule in rules.values():
        off = single[f"{rule.number} own"] - found[f"{rule.number} fine"]
        total = total + off.reshape(*off.shape[:2], -1).sum(-1)
    common = float((total @ weights).var(ddof=1))
    apart = float(np.square(weights) @ total.var(0, ddof=1))
    return common**0.5 if common > _COMMON * apart else 0.0


def look_by(rules: Rules) -> Callable[..., dict[str, Array]]:
    """Log likelihoods of the rows of the levels with continuous sites."""

    def look(rows: Rows | ChainRows, *_: Any) -> dict[str, Array]:
        rule = rules.get(rows.model.level.names)
        if rule is None or isinstance(rows, ChainRows):
            return {}

        def one(state: Array) -> dict[str, Array]:
            density = rows.density(state)
            # the first search is that of the model; compiled once for all of them
            starts = jnp.concatenate([rows.start()[None], rows.other_starts()])
            places = jax.vmap(partial(find_place, density.stopped()))(starts)
            place = jax.tree.map(lambda x: x[0], places)
            reach = find_reach(density.stopped(), place)
            values = log_integrals(density, place, [*rule.tried, rule.fine], reach)
            found = {str(n): x for n, x in zip(rule.tried, values, strict=False)}
            found["fine"] = values[-1]
            found["wide"] = log_trapezoidal(density, place)
            found["modes"] = jnp.logaddexp(found["fine"], _beyond(places, place, reach))
            found["converged"] = place.converged
            falls = jnp.isfinite(place.value) & reach.falls
            found["bounded"] = place.converged | falls
            return found

        by_state = jax.vmap(one)(jnp.asarray(rows.states))
        flags = {n: jnp.all(by_state.pop(n), 0) for n in ("converged", "bounded")}
        out = {name: log_sum_exp(x) for name, x in by_state.items()}
        return {f"{rule.number} {name}": x for name, x in {**out, **flags}.items()}

    return look


def _beyond(places: Place, place: Place, reach: Reach) -> Array:
    """The log of the normal approximation to a mode out of reach, the largest one.

    :param places: what searches from several starts found, along a first axis.
    :param place: what the model's own search found.
    :param reach: how far the density about it was followed.
    """
    d = place.mode.shape[-1]
    away = places.mode - place.mode
    # `spread` is triangular, and its inverse makes distances standardised
    t = jnp.arcsinh(jnp.linalg.solve(place.spread, away[..., None])[..., 0])
    outside = ((t < reach.low - _APART) | (t > reach.high + _APART)).any(-1)
    mass = places.value + places.log_det + 0.5 * d * np.log(2 * np.pi)
    there = outside & places.converged & jnp.isfinite(mass)
    return jnp.max(jnp.where(there, mass, -jnp.inf), 0)


def log_trapezoidal(density: Split, place: Place) -> Array:
    """The log integral by equally spaced points, further out than quadrature nodes."""
    d = place.mode.shape[-1]
    count, apart = WIDE[d]
    line = apart * (np.arange(count) - count // 2)
    points = np.stack(np.meshgrid(*[line] * d, indexing="ij"), -1).reshape(-1, d)
    values = jax.vmap(lambda x: density(place.at(x)))(jnp.asarray(points))
    total = log_sum_exp(jnp.where(jnp.isnan(values), -jnp.inf, values))
    return total + place.log_det + d * np.log(apart)
