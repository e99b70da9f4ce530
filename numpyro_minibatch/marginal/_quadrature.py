"""Integrals over the continuous latent variables of each row, for all rows at once.

With mode m and curvature P = L L' of a row's log density f, the nodes are
u = m + L^-T x, and

    log integral = log sum_k w_k exp(f(u_k)) - log |L|.

Up to eleven nodes x_k of each dimension are those of Gauss and Hermite, which are exact
for a normal density times a polynomial. Many densities have exponential tails instead,
as that of the logarithm of a gamma variable, and 61 such nodes leave errors of 1e-3.
More nodes therefore follow the double exponential rule: x = sinh(t), with equally
spaced t between the points on either side of the mode at which the row's density has
fallen by `_FALLEN`. Its errors decrease geometrically for both kinds of tails.

The exact integral does not depend on the positions of the nodes. So the nodes are held
fixed when the sum is differentiated with respect to the parameters. The first
derivative applies the same rule to f' exp(f), the second to (f'' + f'^2) exp(f). Both
are quadrature rules for the exact derivatives, and their errors are of the same order
as the rule's. The derivative of the rule with respect to its nodes is left out. It is
zero for an exact rule, and otherwise of the order of the rule's error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = [
    "NODES",
    "Place",
    "Reach",
    "find_place",
    "find_reach",
    "is_wide",
    "log_integral",
    "log_integrals",
    "log_sum_exp",
    "nodes_of",
]

# nodes per dimension, by the number of dimensions
NODES = {1: 11, 2: 9, 3: 7}

_HERMITE = 11  # nodes per dimension up to which they are those of Gauss and Hermite
# Logarithm of the part of its largest value to which a density falls within the range
# of the double exponential rule. Rules with 21 nodes are most accurate at 18: what is
# left out is 1e-8.
_FALLEN = 18.0
_FIRST, _LAST = 2.0, 15.0  # range of t that is searched; sinh(15) is 1.6e6
_SHORTEST = 1e-4  # range on either side
_OTHERS = (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0)  # values of t of other numbers
_HALVINGS = 10  # steps of this search, which double t and then halve its interval
_MOST_STEPS = 60
# half the squared distance to the mode, in standard deviations, before the last step
_DECREMENT = 1e-5
_NEAR = 1.0  # the same, below which a step is judged by the gradient, not the value
_SHORTER = 0.25  # factor on a step that lowers the density
_BENT = 1e-3  # curvature that is negative, relative to the diagonal
_AWAY = 0.3  # step along it, relative to what it would be at a maximum
_NO_SHARE = -69.0  # log of a share that derivatives leave out
_FLOOR = 1e-4  # smallest curvature, relative to a scale of one


class Place(NamedTuple):
    """Mode and spread of the density of each row, in unconstrained coordinates.

    :param mode: shape ``rows + (d,)``.
    :param spread: the matrix ``L^-T``, where ``L L'`` is the curvature at the mode,
        shape ``rows + (d, d)``.
    :param log_det: log determinant of ``spread``, shape ``rows``.
    :param value: the log density at the mode, shape ``rows``.
    :param converged: whether the search ended at a maximum, shape ``rows``.
    """

    mode: Array
    spread: Array
    log_det: Array
    value: Array
    converged: Array

    def at(self, x: Any) -> Array:
        """The points at standardised ``x``, of shape ``(d,)`` or ``rows + (d,)``."""
        x = jnp.asarray(x, self.mode.dtype)
        # coordinate by coordinate, with the rows last in memory: programs then read
        # the coordinates of many rows at once
        d = self.mode.shape[-1]
        coordinates = [
            sum((self.spread[..., i, j] * x[..., j] for j in range(d)), 0.0)
            + self.mode[..., i]
            for i in range(d)
        ]
        return jnp.moveaxis(jnp.stack(coordinates), 0, -1)


class Reach(NamedTuple):
    """Where the density of each row has fallen, along each axis from its mode.

    :param low: values of t, shape ``rows + (d,)``; ``x = sinh(t)`` is standardised.
    :param high: the same on the other side.
    """

    low: Array
    high: Array

    @property
    def falls(self) -> Array:
        """Whether the density has fallen on each side, within what is searched."""
        inside = (self.low > -_LAST) & (self.high < _LAST)
        return jnp.all(inside, -1)


def is_wide(num_nodes: int) -> bool:
    """Whether so many nodes follow the double exponential rule."""
    return num_nodes > _HERMITE


@cache
def nodes_of(num_nodes: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and log weights of integrals with respect to Lebesgue measure.

    :param num_nodes: nodes of each dimension.
    :param d: dimensions.
    :return: nodes, shape ``(num_nodes**d, d)``, and log weights. The nodes are
        standardised if there are few, otherwise from 0 to 1 within the :class:`Reach`
        of a row, on which the weights depend as well.
    """
    if is_wide(num_nodes):
        x = np.linspace(0.0, 1.0, num_nodes)
        log_w = np.full(num_nodes, -np.log(num_nodes - 1.0))
    else:
        x, w = np.polynomial.hermite.hermgauss(num_nodes)
        log_w = np.log(w) + x**2 + 0.5 * np.log(2.0)
        x = np.sqrt(2.0) * x
    nodes = np.array(list(itertools.product(x, repeat=d)))
    weights = np.array([sum(ws) for ws in itertools.product(log_w, repeat=d)])
    return nodes, weights


@jax.custom_jvp
def log_sum_exp(x: Array) -> Array:
    """``log(sum(exp(x)))`` along the first axis; NaN stays NaN.

    Derivatives leave out terms whose share of the sum is below 1e-30, and so those of
    ``-inf``. A state whose probability is clamped to the smallest number has such a
    share, and second derivatives that overflow.
    """
    top = jnp.max(x, axis=0)
    top = jnp.where(jnp.isinf(top), 0.0, top)
    return jnp.log(jnp.sum(jnp.exp(x - top), axis=0)) + top


@log_sum_exp.defjvp
def _derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (along,) = primals, tangents
    total = log_sum_exp(x)
    present = ~((x == -jnp.inf) | (x - total < _NO_SHARE))
    share = jnp.where(present, jnp.exp(jnp.where(present, x - total, 0.0)), 0.0)
    return total, jnp.sum(share * jnp.where(present, along, 0.0), axis=0)


def log_integral(
    log_density: Callable[[Array], Array],
    place: Place,
    num_nodes: int,
    reach: Reach | None = None,
) -> Array:
    """The log of the integral of each row's density over its latent numbers.

    :param log_density: from ``u`` of shape ``rows + (d,)`` to shape ``rows``.
    :param place: mode and spread of each row; derivatives do not pass through it.
    :param num_nodes: an odd number of nodes of each dimension.
    :param reach: what :func:`find_reach` returned, if :func:`is_wide`.
    """
    return log_integrals(log_density, place, (num_nodes,), reach)[0]


def log_integrals(
    log_density: Callable[[Array], Array],
    place: Place,
    rules: Sequence[int],
    reach: Reach | None = None,
) -> list[Array]:
    """The same by several rules, with one copy of the density in the program.

    :param rules: the number of nodes of each dimension, for each rule.
    """
    place, reach = jax.lax.stop_gradient((place, reach))
    pairs = [nodes_of(n, place.mode.shape[-1]) for n in rules]
    kinds = [is_wide(n) for n in rules]
    nodes = jnp.asarray(np.concatenate([x for x, _ in pairs]))
    wide = [np.full(len(w), kind) for kind, (_, w) in zip(kinds, pairs, strict=True)]

    def one(x: Array, is_wide: Array) -> Array:
        if reach is None:
            return log_density(place.at(x))
        between, log_scale = _between(reach, x)
        if all(kinds):
            return log_density(place.at(between)) + log_scale
        at = place.at(jnp.where(is_wide, between, x))
        return log_density(at) + jnp.where(is_wide, log_scale, 0.0)

    values = jax.vmap(one)(nodes, jnp.asarray(np.concatenate(wide)))
    # in some models distant nodes overflow; the density there counts as zero
    values = jnp.where(jnp.isnan(values), -jnp.inf, values)
    cuts = np.cumsum([len(w) for _, w in pairs])[:-1].tolist()
    found = []
    for part, (_, weights) in zip(jnp.split(values, cuts), pairs, strict=True):
        log_w = jnp.asarray(weights, values.dtype)
        total = log_sum_exp(part + log_w.reshape(-1, *(1,) * (values.ndim - 1)))
        total = total + place.log_det
        found.append(jnp.where(jnp.isnan(place.value), jnp.nan, total))
    return found


def _between(reach: Reach, share: Array) -> tuple[Array, Array]:
    """Standardised points of the double exponential rule, and the log of its scale.

    :param share: where between both ends they are, shape ``(d,)``.
    """
    # coordinate by coordinate, as in `Place.at`
    points, log_scale = [], jnp.zeros(())
    for j in range(reach.low.shape[-1]):
        low, high = reach.low[..., j], reach.high[..., j]
        t = low + (high - low) * share[j]
        points.append(jnp.sinh(t))
        log_scale = log_scale + jnp.log((high - low) * jnp.cosh(t))
    return jnp.stack(points, -1), log_scale


def find_reach(log_density: Callable[[Array], Array], place: Place) -> Reach:
    """Find where the density of each row has fallen, on either side of its mode.

    With several numbers per row, the density must have fallen at several values of the
    other ones. The tail of a scale and that of an effect with this scale do not lie
    along an axis.

    :param log_density: from ``u`` of shape ``rows + (d,)`` to shape ``rows``.
    :param place: what :func:`find_place` returned.
    """
    d, dtype = place.mode.shape[-1], place.mode.dtype
    others = np.array(list(itertools.product(_OTHERS, repeat=d - 1)))
    sides = [
        np.insert(others, j, side, axis=1) for side in (-1.0, 1.0) for j in range(d)
    ]
    axes = np.tile(np.eye(d, dtype=bool), (2, 1))[:, None]
    # where t is, as factors of it and as what is added; (2 d, others, d)
    factor = jnp.asarray(np.where(axes, sides, 0.0), dtype)
    added = jnp.asarray(np.where(axes, 0.0, sides), dtype)
    shape = (2 * d, *place.mode.shape[:-1])

    def largest(factor: Array, added: Array, t: Array) -> Array:
        def at(factor: Array, added: Array) -> Array:
            x = [jnp.sinh(t * factor[j] + added[j]) for j in range(d)]
            value = log_density(place.at(jnp.stack(x, -1)))
            return jnp.where(jnp.isnan(value), -jnp.inf, value)

        return jnp.max(jax.vmap(at)(factor, added), 0)

    def body(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        inside, outside = ends
        further = jnp.clip(2 * inside, _FIRST, _LAST)
        t = jnp.where(jnp.isinf(outside), further, 0.5 * (inside + outside))
        value = jax.vmap(largest)(factor, added, t)
        fallen = ~(value > place.value - _FALLEN)
        return jnp.where(fallen, inside, t), jnp.where(fallen, t, outside)

    ends = jnp.zeros(shape, dtype), jnp.full(shape, jnp.inf, dtype)
    # where it has fallen, it may be zero, with derivatives that are not finite
    inside, _ = jax.lax.fori_loop(0, _HALVINGS, body, ends)
    t = jnp.moveaxis(jnp.maximum(inside, _SHORTEST), 0, -1)
    return Reach(-t[..., :d], t[..., d:])


class _Search(NamedTuple):
    u: Array
    value: Array
    curvature: Array
    step: Array
    decrement: Array
    done: Array
    steps: Array


def find_place(log_density: Callable[[Array], Array], start: Array) -> Place:
    """Find the mode of each row and the curvature there, by Newton steps.

    A step that lowers the density is shortened. Near a maximum, a step must lower the
    Newton decrement instead: the value of a count of thousands is the difference of
    terms whose rounding errors exceed what the last steps gain. Each row takes separate
    steps and stops when it has converged, so its result does not depend on the other
    rows.

    :param log_density: from ``u`` of shape ``rows + (d,)`` to shape ``rows``.
    :param start: shape ``rows + (d,)``.
    """
    rows, d = start.shape[:-1], start.shape[-1]

    def body(s: _Search) -> _Search:
        u = s.u + s.step
        value, gradient, curvature = _expanded(log_density, u)
        rounding = 1e-6 + 4 * jnp.finfo(value.dtype).eps * jnp.abs(s.value)
        factor = _factor(curvature)
        step = _solve(factor, gradient)
        decrement = 0.5 * jnp.sum(step * gradient, -1)
        # a minimum or a saddle has no gradient either, as between two equal modes
        down, is_maximum = _out_of_valley(curvature, factor)
        ends = decrement < _DECREMENT
        step = jnp.where((ends & ~is_maximum)[..., None], step + down, step)
        ends &= is_maximum
        # not finite if the value, the gradient or the curvature is not
        finite = jnp.isfinite(value + decrement + jnp.sum(curvature, (-2, -1)))
        rises = ~(value < s.value - rounding)
        nearer = (s.decrement < _NEAR) & is_maximum & (decrement < s.decrement)
        better = ~s.done & finite & (rises | nearer)
        step = jnp.where(better[..., None], step, _SHORTER * s.step)
        return _Search(
            u=jnp.where(better[..., None], u, s.u),
            value=jnp.where(better, value, s.value),
            curvature=jnp.where(better[..., None, None], curvature, s.curvature),
            step=jnp.where(s.done[..., None], s.step, step),
            decrement=jnp.where(
                better, jnp.where(is_maximum, decrement, jnp.inf), s.decrement
            ),
            done=s.done | (better & ends),
            steps=s.steps + 1,
        )

    search = _Search(
        u=start,
        value=jnp.full(rows, -jnp.inf, start.dtype),
        curvature=jnp.broadcast_to(jnp.eye(d, dtype=start.dtype), (*rows, d, d)),
        step=jnp.zeros((*rows, d), start.dtype),
        decrement=jnp.full(rows, jnp.inf, start.dtype),
        done=jnp.zeros(rows, bool),
        steps=jnp.zeros((), jnp.int32),
    )
    found = jax.lax.while_loop(
        lambda s: jnp.any(~s.done) & (s.steps < _MOST_STEPS), body, search
    )
    # after the last step, which is short, the remaining distance is negligible
    u = jnp.where(found.done[..., None], found.u + found.step, found.u)
    factor = _factor(found.curvature)
    basis = jnp.eye(d, dtype=start.dtype)
    columns = [
        _solve_upper(factor, jnp.broadcast_to(basis[j], (*rows, d))) for j in range(d)
    ]
    log_det = -sum((jnp.log(factor[j][j]) for j in range(d)), jnp.zeros(()))
    return Place(u, jnp.stack(columns, -1), log_det, found.value, found.done)


def _out_of_valley(curvature: Array, factor: list[list[Array]]) -> tuple[Array, Array]:
    """A step along negative curvature, and whether there is none.

    :param factor: what :func:`_factor` returned for the curvature.
    """
    d = curvature.shape[-1]
    ahead, is_maximum = [], jnp.ones(curvature.shape[:-2], bool)
    for i in range(d):
        diagonal = curvature[..., i, i]
        size = jnp.maximum(jnp.abs(diagonal), _FLOOR)
        # a replaced pivot is larger than that of the matrix
        pivot = diagonal - sum((x * x for x in factor[i][:i]), jnp.zeros(()))
        bent = pivot < -jnp.maximum(_FLOOR, _BENT * size)
        ahead.append(jnp.where(bent, _AWAY, 0.0))
        is_maximum &= ~bent
    return _solve_upper(factor, jnp.stack(ahead, -1)), is_maximum


def _expanded(
    log_density: Callable[[Array], Array], u: Array
) -> tuple[Array, Array, Array]:
    """Value, gradient and minus the Hessian of each row's density."""
    d = u.shape[-1]

    def value(t: Array) -> tuple[Array, Array]:
        found = log_density(u + t)
        return found, found

    def slope(t: Array) -> tuple[Array, tuple[Array, Array]]:
        found = jax.jacfwd(value, has_aux=True)(t)
        return found[0], found

    bend, (gradient, at) = jax.jacfwd(slope, has_aux=True)(jnp.zeros(d, u.dtype))
    return at, gradient, -bend


# Cholesky factors of d x d matrices, entry by entry: d is at most three, and entrywise
# code shows analyses of the program that rows are independent ------------------------


def _factor(matrix: Array) -> list[list[Array]]:
    """The Cholesky factor of each matrix, with non-positive pivots replaced."""
    d = matrix.shape[-1]
    # smaller pivots are rounding errors; numbers with a correlation of 0.9999 are not
    least = float(jnp.finfo(matrix.dtype).eps) ** 0.75
    rows: list[list[Array]] = []
    for i in range(d):
        row: list[Array] = []
        size = jnp.maximum(jnp.abs(matrix[..., i, i]), _FLOOR)
        for j in range(i):
            inner = sum((row[k] * rows[j][k] for k in range(j)), jnp.zeros(()))
            row.append((matrix[..., i, j] - inner) / rows[j][j])
        pivot = matrix[..., i, i] - sum((x * x for x in row), jnp.zeros(()))
        pivot = jnp.where(pivot > least * size, pivot, size)
        row.append(jnp.sqrt(pivot))
        rows.append(row)
    return rows


def _solve(factor: list[list[Array]], b: Array) -> Array:
    """Solve ``L L' x = b``."""
    x: list[Array] = []
    for i, row in enumerate(factor):
        inner = sum((row[k] * x[k] for k in range(i)), jnp.zeros(()))
        x.append((b[..., i] - inner) / row[i])
    return _solve_upper(factor, jnp.stack(x, -1))


def _solve_upper(factor: list[list[Array]], b: Array) -> Array:
    """Solve ``L' x = b``."""
    d = len(factor)
    x: list[Any] = [None] * d
    for i in reversed(range(d)):
        inner = sum((factor[k][i] * x[k] for k in range(i + 1, d)), jnp.zeros(()))
        x[i] = (b[..., i] - inner) / factor[i][i]
    return jnp.stack(x, -1)
