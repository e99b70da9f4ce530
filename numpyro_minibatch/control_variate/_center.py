"""The centre of the expansion, found on the host in double precision before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.control_variate._expand import Expansion
from numpyro_minibatch.control_variate._problem import (
    Kinks,
    NoCenter,
    NoExpansion,
    NotDefinite,
    PriorKinks,
    Problem,
    Refused,
    double,
)
from numpyro_minibatch.control_variate._row_sums import RowSums, Some
from numpyro_minibatch.control_variate._search import Optimum, quasi_newton
from numpyro_minibatch.control_variate._taylor import Taylor

__all__ = [
    "Center",
    "Density",
    "Known",
    "find_center",
    "newton",
]

_NEWTON_DIM = 32  # above this a Hessian costs more than a program without one
_MAX_DIM = 2_000  # above this a Hessian is too large to keep and to factorise
_PRIOR_DRAWS = 400  # whose quartiles give the ridge its width
_VAGUE = 1e-4  # precision of the ridge where the prior has no scale
_NEAR = 1e-6  # gain of a last step, a thousandth of a posterior sd
# The same on a part of the rows. If rows are integrals, steps converge linearly at the
# end, because the gradient is not that of the quadrature, and each takes long.
_NEAR_OF_SOME = 1e-2
_CLOSE = 0.02  # a decrement from which on the gradient decides: 0.2 standard deviations
_ASIDE = 1e-3  # of a standard deviation
_DIRECTIONS = 4  # in which the curvature is compared with values
_AS_HIGH = 1.0  # nats within which the mode next to the user's start is preferred
_SAME_DENSITY = 0.01  # nats by which rounding changes the density after a turn
_LOWER = 2  # lower optima that make one wonder whether there are higher ones
_MORE_STARTS = 8  # of searches that then look for them


class OtherModes(NamedTuple):
    """What the searches for the mode saw of others.

    :param away: the distance to another mode that some search ended in, in posterior
        standard deviations; 0 if all ended in the same mode.
    :param gap: the difference between the log densities of the highest mode found and
        the next one, if only one search ended in the highest one and several in lower
        ones, so that there may be higher ones; otherwise 0.
    :param searches: how many searches were made then.
    """

    away: float = 0.0
    gap: float = 0.0
    searches: int = 0

    @property
    def report(self) -> dict[str, float]:
        """The same as a part of the report of the set-up."""
        gap = {"other_mode_gap": self.gap, "other_mode_searches": self.searches}
        return {"other_mode": self.away, **(gap if self.searches else {})}


class Center(NamedTuple):
    """The result of the search for the centre.

    :param expansion: the sum of the rows' polynomials about it, in double precision.
    :param others: what the searches saw of other modes.
    :param about: the expansion about another point, by the same compiled pass.
    :param known_hessian: the Hessian there of everything that is not expanded; zero if
        the coordinates are not those that are sampled.
    """

    expansion: Expansion
    others: OtherModes
    about: Callable[[np.ndarray], Expansion]
    known_hessian: np.ndarray

    def without_polynomials(self) -> Center:
        """The same if each evaluation derives the polynomials of rows."""

        def about(point: np.ndarray) -> Expansion:
            return self.about(point)._replace(rows={})

        return self._replace(expansion=self.expansion._replace(rows={}), about=about)


def find_center(
    problem: Problem,
    starts: np.ndarray,
    taylor: Taylor,
    meanwhile: Callable[[], None] = lambda: None,
    given: bool = False,
) -> Center:
    """Find the mode about which rows are expanded.

    Searches from several starts use some rows, and Newton steps with backtracking then
    use all of them. A mode with exchanged labels is as high as the one next to a start
    that the user chose, and rounding would decide between them.

    :param problem: the target and its coordinates.
    :param starts: where to start from, shape ``(k, d)``.
    :param taylor: the control variate.
    :param meanwhile: called while other threads compile what the search needs.
    :param given: whether the user chose the last start. The mode that it leads to is
        taken unless another one is clearly higher.
    :raises Refused: the search does not converge, or ends where the curvature is not
        that of a maximum.
    :raises PriorKinks: the prior has kinks, and the likelihood has none.
    """
    dim = starts.shape[1]
    if dim > _MAX_DIM:
        raise NoExpansion(
            f"control variates keep a Hessian of the {dim} coordinates of the "
            f"expansion, and are limited to {_MAX_DIM}. Choose fewer with "
            "control_variate.taylor2(sites=...), or sample at a temperature."
        )
    density = Density.of(problem, taylor, dim)
    meanwhile()

    def found(center: np.ndarray, others: OtherModes) -> Center:
        expansion, known = density.with_known(center)
        return Center(expansion, others, density.about, known)

    if taylor.center is not None:
        center = _given(problem, taylor.center.values)
        if problem.in_own_coordinates:
            values, vectors = np.linalg.eigh(density.of_all(center)[2])
            if not values[0] > 0:
                raise NotDefinite.of(values[0], center, vectors[:, 0])
        return found(center, OtherModes())
    stage("mode of some rows")
    ends, are_optima = density.searched(starts)
    if are_optima and problem.near is None:
        ends = _until_confirmed(density, problem, ends)
    best = _highest(ends)
    own = ends[len(starts) - 1]
    if given and own.fun < best.fun + _AS_HIGH:
        best = own
    if not np.isfinite(best.fun):
        raise NoExpansion(
            "the log density is not finite where the search for the centre of "
            "the control variate went. Pass a centre, control_variate.taylor2(center="
            "{site: unconstrained value}), or bound the parameters by their priors."
        )
    stage("mode of all rows")
    try:
        center, hessian = newton(density.of_all, best.x)
    except Kinks as kinks:
        if problem.in_own_coordinates:
            more = _more_than_curvature(density.of_rows, kinks.start, kinks.step)
            if not more > 0.5:
                raise PriorKinks(str(kinks)) from None
        raise
    alone = are_optima and _is_alone(density, ends)
    return found(center, _other_modes(density, ends, best, hessian, alone))


class Known(NamedTuple):
    """The weighted log density of everything that is not expanded, at a point."""

    value: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray


@dataclass(frozen=True)
class Density:
    """Minus the log density whose mode is the centre, with its derivatives.

    :param weight: the power of the likelihood.
    :param sums: of the likelihood and of everything else.
    :param ridge: where the ridge has its maximum, and its precision.
    :param by_newton: whether searches on some rows use the Hessian.
    :param turned: a position with its angles turned towards those of another.
    """

    weight: Any
    sums: RowSums
    ridge: tuple[Any, Any]
    by_newton: bool
    turned: Callable[[np.ndarray, np.ndarray], np.ndarray]

    @classmethod
    def of(cls, problem: Problem, taylor: Taylor, dim: int) -> Density:
        """The density of the posterior, or that of the likelihood with a ridge.

        Other threads begin to compile its programs.

        :param dim: the number of coordinates of the expansion.
        """
        sums = RowSums.of(problem, taylor, dim)
        by_newton = taylor.modes == 1 and dim <= _NEWTON_DIM
        sums.ahead(dim, slopes=not by_newton)
        return cls(
            weight=problem.weights.likelihood if problem.in_own_coordinates else 1.0,
            sums=sums,
            ridge=_ridge(problem, taylor),  # other threads go on compiling
            by_newton=by_newton,
            turned=problem.turned,
        )

    @property
    def share(self) -> float:
        """The number of all rows divided by the number of the rows used."""
        return self.sums.some.share

    @property
    def spread(self) -> float:
        """The width of the posterior of some rows relative to that of all rows."""
        return float(np.sqrt(self.share))

    def of_some(self, phi: np.ndarray) -> list[np.ndarray]:
        """The value and the gradient, from some rows."""
        return self._at(phi, self.sums.some, slopes=True)

    def curved(self, phi: np.ndarray) -> list[np.ndarray]:
        """The value, the gradient and the Hessian, from some rows."""
        return self._at(phi, self.sums.some)

    def of_all(self, phi: np.ndarray) -> list[np.ndarray]:
        """The value, the gradient and the Hessian, from all rows."""
        return self._at(phi, None)

    def of_rows(self, phi: np.ndarray) -> list[np.ndarray]:
        """The same without the prior."""
        rows = self.sums.at(phi, None).rows
        return [np.asarray(-self.weight * r) for r in rows]

    def _at(
        self, phi: np.ndarray, some: Some | None, slopes: bool = False
    ) -> list[np.ndarray]:
        found = self.sums.at(phi, some, slopes)
        middle, precision = self.ridge
        away = np.asarray(phi) - middle
        slope = np.broadcast_to(precision, away.shape) * away
        ridge = (
            0.5 * slope @ away,
            slope,
            np.diag(np.broadcast_to(precision, away.shape)),
        )
        triples = zip(found.rows, found.known, ridge, strict=False)
        return [np.asarray(q - (self.weight * r + k)) for r, k, q in triples]

    def searched(self, starts: np.ndarray) -> tuple[list[Optimum], bool]:
        """The ends of searches on some rows, one for each start.

        The searches use Newton steps, which need one program for some rows and for all.
        If none of them ends at a mode, or if there are many coordinates, they use
        quasi-Newton steps.

        :return: the ends, and whether they are those of Newton steps: optima, where
            others may only have stalled.
        """
        if self.by_newton:
            ends = [self.optimum(start) for start in starts]
            if any(np.isfinite(end.fun) for end in ends):
                return ends, True
        return [self.descended(start) for start in starts], False

    def descended(self, start: np.ndarray, *rest: Any) -> Optimum:
        """The end of quasi-Newton steps on some rows."""
        return quasi_newton(self.of_some, start, *rest)

    def optimum(self, start: np.ndarray) -> Optimum:
        """The end of Newton steps on some rows; infinite if they do not converge."""
        try:
            # the end of a search on a part of the rows is only a start for all rows
            close = _NEAR if self.sums.some.are_all else _NEAR_OF_SOME
            end, _ = newton(self.curved, start, near=close)
        except Refused:
            return Optimum(start, np.inf, False)
        return Optimum(end, float(self.curved(end)[0]), True)

    def away(self, phi: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The difference between two positions, up to turns of angles.

        A model with ``CircularReparam`` has the same density at positions that differ
        by turns. A site can have such a name and not be an angle, so the densities are
        compared.
        """
        turned = self.turned(phi, other)
        if turned is not phi:
            of = self.curved if self.by_newton else self.of_some
            before, after = (float(of(x)[0]) for x in (phi, turned))
            if not abs(after - before) < _SAME_DENSITY:
                turned = phi
        return turned - other

    def about(self, center: np.ndarray) -> Expansion:
        """The expansion of the likelihood about a point."""
        return self.with_known(center)[0]

    def with_known(self, center: np.ndarray) -> tuple[Expansion, np.ndarray]:
        """The same, and the Hessian there of everything that is not expanded."""
        found = self.sums.at(center, None)
        value, gradient, hessian = found.rows
        expansion = Expansion(
            center,  # type: ignore[arg-type]
            gradient,
            hessian,
            value,
            rows=found.polynomials,
        )
        return expansion, found.known[2]

    def known_at(self, center: np.ndarray) -> Known:
        """The log density of everything that is not expanded, with its derivatives."""
        return Known(*map(np.asarray, self.sums.at(center, None).known))


def _ridge(problem: Problem, taylor: Taylor) -> tuple[Any, Any]:
    """The position of the ridge's maximum, and its precision.

    By default they are those of a normal distribution with the quartiles of the prior
    in each coordinate. Whatever the unit of an effect is, a ridge that is as wide as
    its prior moves the centre by little more than the prior itself would.
    """
    if taylor.ridge is not None or problem.in_own_coordinates:
        return 0.0, taylor.ridge or 0.0
    try:
        with double():
            draws = np.asarray(problem.compiled(_prior_of_phi)(np.int32(21)))
    except NotImplementedError:  # a prior that is improper says nothing of a scale
        return 0.0, _VAGUE
    with np.errstate(invalid="ignore"):  # a log of a number that underflows
        lower, middle, upper = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
        scale = (upper - lower) / 1.349
    known = np.isfinite(scale) & np.isfinite(middle) & (scale > 0)
    middle = np.where(known, middle, 0.0)
    return middle, np.where(known, np.where(known, scale, 1.0) ** -2.0, _VAGUE)


def _prior_of_phi(problem: Problem, arrays: list[Any], seed: Array) -> Array:
    """Draws of the coordinates from the prior, ``(K, d)``."""
    keys = jax.random.split(jax.random.key(seed), _PRIOR_DRAWS)
    target = problem.target_of(arrays)

    def one(key: Array) -> Array:
        z = target.draw_prior(key)  # type: ignore[attr-defined]
        return ravel_pytree(problem.coordinates.of(target, z))[0]

    return jax.vmap(one)(keys)


def _other_modes(
    density: Density,
    ends: list[Optimum],
    best: Optimum,
    hessian: np.ndarray,
    alone: bool,
) -> OtherModes:
    """What the ends of searches other than the best one say of other modes.

    :param alone: whether one search found the best one, and the others lower ones.
    """
    root = np.linalg.cholesky(hessian)
    distances = [np.linalg.norm(root.T @ density.away(r.x, best.x)) for r in ends]
    # a worse optimum matters where its density is not negligible
    share = density.share
    # or where it shows that searches miss higher ones, too
    most = np.inf if alone else 20.0 * share + 20.0
    near = [r.fun < best.fun + most for r in ends]
    scatter = np.sqrt(len(hessian) * share)
    far = [d for d, n in zip(distances, near, strict=True) if n and d > 5 * scatter]
    away = float(max(far, default=0.0))
    if not alone or not away:
        return OtherModes(away)
    lower = sorted(r.fun for r in ends if np.isfinite(r.fun))
    return OtherModes(away, lower[1] - lower[0], len(ends))


def _highest(ends: list[Optimum]) -> Optimum:
    return min(ends, key=lambda r: r.fun if np.isfinite(r.fun) else np.inf)


def _is_alone(density: Density, ends: list[Optimum]) -> bool:
    """Whether one search ended at the highest optimum, and several at lower ones.

    The chance that another search ends in a mode that none has found is estimated by
    the share of searches that were alone in their mode (Good 1953). Here only the
    highest mode is looked at, because a higher one would take its place.
    """
    best = _highest(ends).fun
    as_high = sum(r.fun < best + density.share + _AS_HIGH for r in ends)
    found = sum(np.isfinite(r.fun) for r in ends)
    return as_high == 1 and found > _LOWER


def _until_confirmed(
    density: Density, problem: Problem, ends: list[Optimum]
) -> list[Optimum]:
    """Search from more starts until two searches agree on the highest optimum."""
    rng = np.random.default_rng(41)
    ends = list(ends)
    size = sum(np.size(x) for x in jax.tree.leaves(problem.example))
    for _ in range(_MORE_STARTS):
        if not _is_alone(density, ends):
            break
        start = problem.in_coordinates(rng.uniform(-2, 2, size=(1, size)))[0]
        ends.append(density.optimum(start))
    return ends


def _given(problem: Problem, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The centre that the user gave, flat."""
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x)), problem.example)
    target = problem.target_of(problem.arrays)
    shapes = jax.eval_shape(lambda z: problem.coordinates.of(target, z), zeros)
    wanted = {n: s.shape for n, s in shapes.items()} if isinstance(shapes, dict) else {}
    got = {name: value.shape for name, value in values.items()}
    if wanted != got:
        raise Refused(
            "control_variate.taylor2(center=...) must give unconstrained "
            f"values of these sites and shapes: {wanted}, got {got}."
        )
    parts = [np.ravel(values[name]).astype(np.float64) for name in sorted(values)]
    return np.concatenate(parts)


class _Step(NamedTuple):
    """A Newton step, what it gains by the quadratic model, and the curvature there."""

    step: np.ndarray
    decrement: float
    smallest: float
    maximum: bool
    along: np.ndarray


def newton(
    objective: Callable,
    start: np.ndarray,
    metric: np.ndarray | None = None,
    longest: float = np.inf,
    largest: float = np.inf,
    near: float = _NEAR,
) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method with backtracking; the optimum and the Hessian there.

    Directions of negative curvature are followed as if it were positive, so that the
    steps leave a saddle instead of stopping there.

    :param objective: value, gradient and Hessian at a point.
    :param start: where to start.
    :param metric: a positive definite matrix that measures steps; ``None`` for steps of
        any length.
    :param longest: the largest length of a step. A longer one from a point of negative
        curvature could end at another optimum.
    :param largest: value above which an optimum does not matter.
    :param near: the gain of a step by the quadratic model below which the search ends.
    :raises Refused: the steps do not converge, end where the curvature is not that of
        an optimum, or would end above ``largest`` if they gained twice what the
        quadratic model says.
    """
    last: dict[bytes, list[np.ndarray]] = {}

    def at(x: np.ndarray) -> list[np.ndarray]:
        key = x.tobytes()
        if key not in last:
            last.clear()
            last[key] = objective(x)
        return last[key]

    hessian = at(start)[2]
    # where the curvature is negative its size is the scale: a tiny one would make the
    # floor of the eigenvalues below larger than the curvature of other coordinates
    size, least = np.abs(np.diag(hessian)), 1e-12 * np.abs(hessian).max() + 1e-12
    scale = np.sqrt(np.maximum(size, least))

    def step_from(x: np.ndarray) -> _Step:
        _, gradient, hessian = at(x)
        with np.errstate(invalid="ignore", over="ignore"):
            white = hessian / np.outer(scale, scale)
        if not (np.isfinite(white).all() and np.isfinite(gradient).all()):
            nothing = np.zeros_like(x)
            return _Step(nothing, np.inf, -np.inf, False, nothing)
        eigenvalues, vectors = np.linalg.eigh(white)
        floor = 1e-8 * max(eigenvalues.max(), 1.0)
        slope = vectors.T @ (gradient / scale)
        step = -vectors @ (slope / np.maximum(np.abs(eigenvalues), floor)) / scale
        smallest, along = eigenvalues[0], vectors[:, 0] / scale
        return _Step(step, float(-gradient @ step), smallest, smallest > floor, along)

    best = None
    for _ in range(50):
        value, hessian, step = at(start)[0], at(start)[2], step_from(start)
        decrement = step.decrement
        if step.maximum and decrement < _CLOSE and (not best or value < best[0]):
            best = value, start, hessian
        if step.maximum and value - decrement > largest:
            raise Refused(f"the optimum is above {largest:.6g}")
        if decrement < near:
            if not step.maximum:
                raise NotDefinite.of(step.smallest, start, step.along)
            return start, hessian
        shrink = 1.0
        if metric is not None:
            length = np.sqrt(step.step @ metric @ step.step)
            shrink = min(1.0, longest / max(length, 1e-300))
        while shrink > 1e-6:
            trial = start + shrink * step.step
            new = at(trial)[0]
            if np.isfinite(new) and new <= value - 1e-4 * shrink * decrement:
                break
            # the last digits of a sum over many rows decide nothing, nor does a value
            # with an error that moves: rows that are integrated by quadrature have the
            # gradient of the integral, not of the quadrature
            if np.isfinite(new) and decrement < 1e-9 * abs(value):
                break
            if decrement < _CLOSE and step_from(trial).decrement < 0.5 * decrement:
                break
            shrink /= 2.0
        else:
            break
        start = trial
    # around the kink of a single row, as that of a change point, steps go to and fro
    if best and _is_curved(lambda x: float(at(x)[0]), best):
        _, optimum, hessian = best
        # next to the kink both precisions are on the same side of it
        return optimum + _ASIDE / np.sqrt(np.diag(hessian)), hessian
    more = _more_than_curvature(objective, start, step.step)
    if more > 0.5:
        raise Kinks(
            "the log likelihood has kinks, as that of dist.Laplace or of jnp.abs: "
            "along a step of the search for the centre, the gradient changes "
            f"{1 + more:.3g} times as much as second derivatives say, so that no "
            "expansion fits.",
            start,
            step.step,
        )
    if not np.isfinite(decrement) and np.isfinite(at(start)[0]):
        raise NoCenter(
            "the log likelihood is finite where the search for the centre ended, and "
            "its derivatives are not. This happens where a function has no derivative: "
            "a rate, a scale or a mean of zero, as in dist.Poisson(present * rate), or "
            "jnp.sqrt(0.0). Write a small number such as 1e-10 in place of zero, "
            "jnp.where(present, rate, 1e-10). In single precision, values near the "
            "border of a support are rounded to it: try numpyro.enable_x64()."
        )
    raise NoCenter(
        "the search for the centre of the control variate did not converge "
        f"(Newton decrement {decrement:.2g}). Standardise the data, or pass a centre: "
        "control_variate.taylor2(center={site: unconstrained value})."
    )


def _is_curved(value_at: Callable[[np.ndarray], float], best: tuple) -> bool:
    """Whether the Hessian describes the function over about a standard deviation.

    Where most rows have kinks, or the prior has one, the function rises much faster.

    :param value_at: the function.
    :param best: its value at an approximate optimum, the optimum, and the Hessian.
    """
    value, optimum, hessian = best
    root = np.linalg.cholesky(np.linalg.inv(hessian))
    white = np.random.default_rng(41).normal(size=(_DIRECTIONS, len(optimum)))
    white /= np.linalg.norm(white, axis=1, keepdims=True)
    steps = white @ root.T
    rises = [value_at(optimum + x) + value_at(optimum - x) - 2 * value for x in steps]
    return all(0.5 < rise < 2.0 for rise in rises)  # 1 by the Hessian


@np.errstate(invalid="ignore", over="ignore")
def _more_than_curvature(
    objective: Callable, start: np.ndarray, step: np.ndarray
) -> float:
    """The change of the gradient that second derivatives do not explain, relative.

    Without kinks, it vanishes with the length of the step. The gradients of many rows
    with one kink each change in proportion to it, until the step has passed most of the
    kinks. A step can be much longer than that, because the curvature that determines it
    leaves the kinks out. So parts of it are compared, until the change is proportional
    over two decades.

    :return: zero if the change is not proportional to the length of a part.
    """
    _, gradient, hessian = objective(start)
    explained = float(step @ hessian @ step)
    more: list[float] = []
    for t in 10.0 ** -np.arange(2.0, 8.0):
        change = float((objective(start + t * step)[1] - gradient) @ step)
        more.append(change / t - explained)
        if not np.isfinite(more[-1]):
            return 0.0
        if len(more) == 2 and explained > 0 and more[1] > 0.3 * more[0] > 0:
            return more[1] / explained
        ratios = [y / x if x > 0 else np.inf for x, y in pairwise(more[-3:])]
        if len(ratios) == 2 and all(0.25 < ratio < 4.0 for ratio in ratios):
            return more[-1] / max(abs(explained), 1e-6 * abs(more[-1]))
    return 0.0
