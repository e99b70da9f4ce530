"""Expansions of the likelihood: the target whose rows are residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from numpyro_minibatch.control_variate._computed import Computed
from numpyro_minibatch.control_variate._taylor import Form
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.proposal import Modes, PriorAtModes
from numpyro_minibatch.target import (
    ModelTarget,
    Position,
    Target,
    Terms,
    without_integrals,
)

__all__ = [
    "Coordinates",
    "ExactRows",
    "Expansion",
    "Expansions",
    "coefficients",
    "derivatives_of",
    "expand",
    "gauss_jacobi",
    "log_surrogate",
    "num_coefficients",
]


class ExactRows(NamedTuple):
    """Rows of a plate that the surrogate evaluates exactly.

    An exact row can also represent similar rows. The residual of a represented row is
    predicted by a multiple of its representative's residual, and a batch estimates the
    error of this prediction. This is a second control variate, not an approximation.

    :param rows: their indices, int32, ``(S,)``; may be empty.
    :param weights: for each exact row, the sum of the coefficients of the rows that it
        represents, itself included with 1, ``(S,)``.
    :param at_center: their log likelihoods at the centre of the expansion, ``(S,)``.
    :param others: false for the exact rows and true for all others, ``(N,)``; ``None``
        if batches still estimate the residuals of all rows.
    :param representative: for each row of the plate, which of ``rows`` represents it,
        ``(N,)``; ``None`` if no row represents another.
    :param coefficient: the multiple of the representative's residual, ``(N,)``;
        ``None`` under the same condition.
    :param surplus: multiples of the residuals of :attr:`rows` that the surrogate
        contains while batches still estimate the residuals of all rows, ``(S,)``. They
        are subtracted exactly. ``None`` if there are none.
    """

    rows: Array
    weights: Array
    at_center: Array
    others: Array | None
    representative: Array | None = None
    coefficient: Array | None = None
    surplus: Array | None = None

    @classmethod
    def alone(cls, rows: np.ndarray, size: int) -> ExactRows:
        """Exact rows of a plate of ``size`` rows that represent no others."""
        return cls(
            jax.device_put(np.asarray(rows, np.int32)),
            jax.device_put(np.ones(len(rows), jnp.result_type(float))),
            jax.device_put(np.zeros(len(rows), jnp.result_type(float))),
            jax.device_put(~np.isin(np.arange(size), rows)),
        )

    @classmethod
    def representing(cls, rows: ArrayLike, weights: ArrayLike) -> ExactRows:
        """Exact rows of a plate, weighted to represent all of its rows.

        :param rows: their indices, ``(S,)``.
        :param weights: multiples of their residuals that sum to about the sum of all
            rows' residuals, ``(S,)``.
        """
        return cls(
            jnp.asarray(rows, jnp.int32),
            jnp.asarray(weights),
            jnp.zeros(np.shape(rows)),
            None,
            surplus=jnp.asarray(weights),
        )

    @property
    def every(self) -> bool:
        """Whether every row of the plate is exact and represents only itself."""
        if self.others is None:
            return False
        whole = self.rows.shape[-1] == self.others.shape[-1]
        return whole and self.surplus is None

    @property
    def in_residuals(self) -> bool:
        """Whether remaining residuals depend on the residuals of these rows."""
        return self.coefficient is not None or self.surplus is not None

    def values(self, rows: Array) -> Array:
        """The contribution of each row to the surrogate; zero at the centre.

        :param rows: the log likelihoods of the rows, ``(S,)``.
        """
        return self.weights * (rows - self.at_center)

    def unexplained(
        self, residual: Array, index: Array, of_rows: Array | None
    ) -> Array:
        """The residuals of some rows after the exact rows are taken into account.

        :param residual: their residuals from the polynomials, ``(m,)``.
        :param index: the indices of the rows, ``(m,)``.
        :param of_rows: the residuals of :attr:`rows`, ``(S,)``, if these represent
            others.
        """
        if self.coefficient is not None:
            assert self.representative is not None and of_rows is not None
            residual = (
                residual - self.coefficient[index] * of_rows[self.representative[index]]
            )
        if self.others is None:
            return residual
        return jnp.where(self.others[index], residual, 0.0)


class Expansion(NamedTuple):
    """The sum of the rows' polynomials; part of a chain's state.

    :param center: the centre, flat, in the coordinates of the expansion, ``(d,)``.
    :param gradient: gradient of the summed log likelihood at the centre, ``(d,)``.
    :param hessian: its Hessian at the centre, ``(d, d)``.
    :param value: the summed log likelihood at the centre, a scalar.
    :param exact: the exact rows, by plate. Their polynomials, times their weights, are
        not part of the gradient and the Hessian. Empty if there are none.
    :param offset: the summed log likelihood at the centre minus ``value``, if several
        expansions share ``value``; ``None`` with one expansion.
    :param rows: the polynomial of each row, by plate, as :func:`coefficients` writes
        it, ``(N, P)``. Empty if each evaluation computes the polynomials again.
    :param root: the transpose of a Cholesky factor of the negative Hessian, ``(d, d)``.
        In single precision the quadratic form has the rounding error of its largest
        terms, which cancel where columns have large means: 0.2 for four columns with
        means of a thousand standard deviations, and 1e-4 by the root. ``None`` in
        double precision, or if the Hessian is not negative definite.
    """

    center: Array
    gradient: Array
    hessian: Array
    value: Array
    exact: Mapping[str, ExactRows] = {}
    offset: Array | None = None
    rows: Mapping[str, Array] = {}
    root: Array | None = None

    def at(self, flat: Array) -> Expansion:
        """The expansion that a position belongs to; here the only one."""
        return self

    def polynomial(self, displacement: Array, order: int = 2) -> Array:
        """The sum of all rows' polynomials of the given order, without ``value``."""
        if order == 1:
            whole = self.gradient @ displacement
        elif self.root is None:
            slope = self.gradient + 0.5 * (self.hessian @ displacement)
            whole = slope @ displacement
        else:
            white = self.root @ displacement
            whole = self.gradient @ displacement - 0.5 * (white @ white)
        return whole if self.offset is None else whole + self.offset

    def cast(self, dtype: Any) -> Expansion:
        """The same as JAX arrays, numbers of this type."""
        return _cast(self._replace(root=_root(self.hessian, dtype)), dtype)

    def of_rows(self, dtype: Any) -> Expansion:
        """The same without what only the sum of all rows needs."""
        return _cast(self._replace(root=None), dtype)

    @property
    def num_exact(self) -> int:
        """The number of exact rows."""
        return sum(len(kept.rows) for kept in self.exact.values())

    @property
    def num_in_residuals(self) -> int:
        """The number of exact rows that the remaining residuals depend on."""
        kept = self.exact.values()
        return sum(len(each.rows) for each in kept if each.in_residuals)

    @property
    def has_every_row(self) -> bool:
        """Whether the surrogate is the target."""
        return bool(self.exact) and all(kept.every for kept in self.exact.values())

    @property
    def exact_rows(self) -> dict[str, Array]:
        """The rows to request from a target: one row of a plate without exact rows."""
        one = jnp.zeros(1, jnp.int32)
        return {n: e.rows if len(e.rows) else one for n, e in self.exact.items()}

    def exact_values(self, rows: Mapping[str, Array]) -> list[Array]:
        """The contribution of the exact rows to the surrogate, by plate.

        :param rows: those of :attr:`exact_rows`, by plate.
        """
        exact = self.exact.items()
        return [e.values(rows[name]) for name, e in exact if len(e.rows)]


def _cast(tree: Any, dtype: Any) -> Any:
    """A tree of JAX arrays, numbers of this type."""

    def array(x: Any) -> Array:
        floating = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        if isinstance(x, jax.core.Tracer) or not floating:
            return jnp.asarray(x, dtype if floating else None)
        # NumPy converts, because JAX would compile a program for each conversion
        return jax.device_put(np.asarray(x, dtype))

    return jax.tree.map(array, tree)


def _root(hessian: Any, dtype: Any) -> Any:
    """The root of a negative Hessian for another precision, or of several of them."""
    if isinstance(hessian, jax.core.Tracer) or dtype == jnp.float64:
        return None
    try:
        factor = np.linalg.cholesky(-np.asarray(hessian, np.float64))
    except np.linalg.LinAlgError:
        return None
    return np.swapaxes(factor, -1, -2) if np.isfinite(factor).all() else None


class Expansions(NamedTuple):
    """Sums of the rows' polynomials about several modes; part of a chain's state.

    Callers first select the expansion of the mode that a position belongs to, with
    :meth:`at`. Log ratios are exact whatever rule assigns positions to modes, see
    ``docs/several-modes.md``.

    :param each: the expansions, with a leading axis of modes. They share the ``value``
        of the first and differ in ``offset``. Each mode has exact rows of its own, as
        many as the mode that has most.
    :param modes: normal approximations of the posterior at the modes. They define the
        rule.
    :param prior: the log prior at the modes, which gives the rule at another
        temperature.
    """

    each: Expansion
    modes: Modes
    prior: PriorAtModes

    @classmethod
    def of(
        cls, expansions: Sequence[Expansion], modes: Modes, prior: PriorAtModes
    ) -> Expansions:
        """Expansions about some points, in double precision.

        The differences between their values determine the masses of the modes, so they
        are computed before rounding to working precision.

        :param expansions: one for each mode. Their exact rows represent all rows.
        :param modes: the normal approximations, as NumPy arrays.
        :param prior: the log prior at their means, as NumPy arrays.
        """
        base = np.asarray(expansions[0].value, np.float64)
        exact = _stacked([e.exact for e in expansions])
        parts = [
            e._replace(
                value=base,  # type: ignore[arg-type]
                offset=np.asarray(e.value, np.float64) - base,  # type: ignore[arg-type]
                exact={},
                rows={},
            )
            for e in expansions
        ]
        stacked = jax.tree.map(lambda *x: np.stack([np.asarray(p) for p in x]), *parts)
        return cls(stacked._replace(exact=exact), modes, prior)

    def tempered(self, weights: Weights) -> Expansions:
        """The same expansions, with the rule for another temperature.

        :param weights: the powers of the prior and of the likelihood; both are one for
            the posterior that was expanded.
        """
        power: Any = weights.likelihood
        surplus = weights.prior - power
        return self._replace(modes=self.modes.tempered(self.prior, power, surplus))

    def shifted(self, constants: np.ndarray) -> Expansions:
        """The same expansions with other constants.

        :param constants: what is added to that of each mode, ``(K,)``.
        """
        offset: Any = np.asarray(self.each.offset, np.float64) + constants
        return self._replace(each=self.each._replace(offset=offset))

    def at(self, flat: Array) -> Expansion:
        """The expansion of the mode that a position belongs to."""
        return self.of_mode(self.modes.of(flat))

    def of_mode(self, mode: Array) -> Expansion:
        """The expansion about one mode."""
        return jax.tree.map(lambda x: jnp.asarray(x)[mode], self.each)

    def cast(self, dtype: Any) -> Expansions:
        """The same as JAX arrays, numbers of this type."""
        root = _root(self.each.hessian, dtype)
        return _cast(self._replace(each=self.each._replace(root=root)), dtype)

    def of_rows(self, dtype: Any) -> Expansions:
        """The same without what only the sum of all rows needs."""
        return _cast(self._replace(each=self.each._replace(root=None)), dtype)

    @property
    def exact(self) -> Mapping[str, ExactRows]:
        """The exact rows of all modes, by plate, with a leading axis of modes."""
        return self.each.exact

    @property
    def num_exact(self) -> int:
        """The number of exact rows that the surrogate of a mode evaluates."""
        return sum(kept.rows.shape[-1] for kept in self.exact.values())

    @property
    def num_in_residuals(self) -> int:
        """The number of exact rows that the remaining residuals depend on."""
        return self.num_exact

    @property
    def has_every_row(self) -> bool:
        """Whether the surrogate is the target."""
        return False


def _stacked(modes: Sequence[Mapping[str, ExactRows]]) -> dict[str, ExactRows]:
    """The representative rows of several modes, with a leading axis of modes.

    A mode with fewer rows than another repeats the first row of the plate with a
    multiple of zero.

    :param modes: the representative rows of each mode, by plate.
    """
    stacked = {}
    for name in dict.fromkeys(name for exact in modes for name in exact):
        size = max(len(exact[name].rows) for exact in modes if name in exact)
        rows = np.zeros((len(modes), size), np.int32)
        weights, at_center = np.zeros((2, len(modes), size))
        for k, exact in enumerate(modes):
            if name in exact:
                kept = exact[name]
                count = len(kept.rows)
                rows[k, :count] = kept.rows
                weights[k, :count] = kept.weights
                at_center[k, :count] = kept.at_center
        stacked[name] = ExactRows(
            rows,  # type: ignore[arg-type]
            weights,  # type: ignore[arg-type]
            at_center,  # type: ignore[arg-type]
            None,
            surplus=weights,  # type: ignore[arg-type]
        )
    return stacked


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of the expansion, which can differ from the sampled ones.

    The log likelihood of a hierarchical model is approximately quadratic in the group
    effects themselves, but not in the standardised effects and their scale.

    :param latents: latent sites, in their unconstrained coordinates; ``None`` for the
        whole position.
    :param values: deterministic sites, by their values.
    :param computed: whether ``values`` are not sites but what the model computes from
        its parameters, the :class:`Computed`.
    """

    latents: tuple[str, ...] | None = None
    values: tuple[str, ...] = ()
    computed: bool = False

    def of(self, target: Target, z: Position) -> Any:
        """The coordinates of the position ``z``."""
        if self.latents is None:
            return z
        if self.computed:
            one = {name: jnp.zeros(1, jnp.int32) for name in target.plates}
            return Computed.of(target, z, one).values(z, one)
        chosen = {name: z[name] for name in self.latents}
        if self.values:
            assert isinstance(target, ModelTarget)
            known = target.deterministic(z)
            chosen |= {name: known[name] for name in self.values}
        return chosen

    def rows(self, target: Target, phi: Any, z: Position, indices: Any) -> Any:
        """The log likelihood of rows at the coordinates ``phi``.

        :param z: a position; it supplies the latent sites that no row depends on.
        """
        if self.latents is None:
            return target.rows(phi, indices)
        if self.computed:
            return Computed.of(target, z, indices).rows(phi, indices)
        rest = {**z, **{name: phi[name] for name in self.latents}}
        return target.rows(rest, indices, {name: phi[name] for name in self.values})


def expand(
    target: Target,
    coordinates: Coordinates,
    order: int,
    form: Form,
    expansions: Expansion | Expansions,
    unravel: Callable[[Array], Position],
    residual_only: bool = False,
) -> Callable[[Array, Mapping[str, Array]], Terms]:
    """The target whose rows are residuals.

    :param target: the target.
    :param coordinates: the coordinates of the expansion.
    :param order: order of the polynomials.
    :param form: ``"direct"`` subtracts each row's polynomial from it; ``"remainder"``
        integrates the next derivative along the displacement, so that rounding errors
        are relative to the residual and not to the log likelihood.
    :param expansions: the summed polynomial, or those of several modes.
    :param unravel: a function from a flat position to the target's.
    :param residual_only: whether to return only the difference between the target and
        :func:`log_surrogate`: the residuals and, at order 1, the second-order terms of
        the surrogate. Plates whose rows are all exact need no indices.
    :return: ``evaluate(flat, indices)``, the terms at a flat position.
    """
    one = jnp.zeros(1, jnp.int32)  # for plates that are not requested

    def evaluate(flat: Array, asked: Mapping[str, Array]) -> Terms:
        z, expansion = unravel(flat), expansions.at(flat)
        indices = dict.fromkeys(target.plates, one) | dict(asked)
        terms = target.terms(z, indices)
        phi, unravel_phi = ravel_pytree(coordinates.of(target, z))
        displacement = phi - expansion.center
        rest = jax.tree.map(jnp.zeros_like, z)

        def residuals(values: Any, indices: Mapping[str, Array]) -> Any:
            def rows(phi: Array) -> dict[str, Array]:
                return coordinates.rows(target, unravel_phi(phi), rest, indices)

            if form == "remainder":
                return _remainder(rows, expansion.center, displacement, order)
            if expansion.rows:
                kept = {n: expansion.rows[n][indices[n]] for n in values}
                return _minus_kept(values, kept, displacement, order)
            # at the centre itself, which vectorised positions have in common: whatever
            # does not depend on the displacement is computed once for all of them
            at_center = _derivatives(rows, displacement, order)(expansion.center)
            return _minus_polynomial(values, at_center)

        residual = residuals(terms.rows, indices)
        polynomial = expansion.polynomial(displacement, order)
        exact, of_exact, surplus = [], {}, []
        if expansion.exact:
            read = target.terms(z, expansion.exact_rows)
            exact = expansion.exact_values(read.rows)
            if any(kept.in_residuals for kept in expansion.exact.values()):
                of_exact = residuals(read.rows, expansion.exact_rows)
            surplus = [
                -kept.surplus * of_exact[name]
                for name, kept in expansion.exact.items()
                if kept.surplus is not None
            ]
            residual = {
                name: jnp.zeros_like(rows)
                if (kept := expansion.exact[name]).every
                else kept.unexplained(rows, indices[name], of_exact.get(name))
                for name, rows in residual.items()
            }
        residual = {name: residual[name] for name in asked}
        # the value is kept separate, so that it cancels exactly in a difference
        if residual_only:
            likelihood = [expansion.value, *surplus]
            if order == 1:
                likelihood.append(polynomial - expansion.polynomial(displacement))
            return Terms(prior=(), rows=residual, likelihood=likelihood)
        # not summed yet, because rows are subtracted from each other first
        whole = [terms.likelihood, polynomial, expansion.value, exact, surplus]
        return terms._replace(rows=residual, likelihood=whole)

    return evaluate


def log_surrogate(
    target: Target,
    coordinates: Coordinates,
    expansions: Expansion | Expansions,
    weights: Weights,
    unravel: Callable[[Array], Position],
) -> Callable[[Array], Array]:
    """The surrogate's log density: the exact prior and the expanded likelihood.

    The expansion is always of second order, because a linear log likelihood has no
    proper posterior. The only data it needs are those of exact rows, if there are any.

    :return: a function of a flat position, up to a constant.
    """
    one = {name: jnp.zeros(1, jnp.int32) for name in target.plates}

    def density(flat: Array) -> Array:
        z, expansion = unravel(flat), expansions.at(flat)
        some = one | expansion.exact_rows
        phi, _ = ravel_pytree(coordinates.of(target, z))
        # without exact rows there is nothing to integrate
        with nullcontext() if expansion.exact else without_integrals():
            terms = target.terms(z, some)
        polynomial = expansion.polynomial(phi - expansion.center)
        likelihood = polynomial
        for values in expansion.exact_values(terms.rows):
            likelihood = likelihood + values.sum()
        return weights.known(terms) + weights.likelihood * likelihood

    return density


def _derivatives(
    fn: Callable[[Array], Any], direction: Array, order: int
) -> Callable[[Array], list[Any]]:
    """``x -> [value, first directional derivative, ...]`` of a function at ``x``."""

    def nest(k: int) -> Callable[[Array], list[Any]]:
        if k == 0:
            return lambda x: [fn(x)]

        def value_and_next(x: Array) -> list[Any]:
            values, tangents = jax.jvp(nest(k - 1), (x,), (direction,))
            return [*values, tangents[-1]]

        return value_and_next

    return nest(order)


def _minus_polynomial(rows: Any, derivatives: list[Any]) -> Any:
    residual, factorial = rows, 1.0
    for k, derivative in enumerate(derivatives):
        factorial *= max(k, 1)
        residual = jax.tree.map(
            lambda r, d, f=factorial: r - d / f, residual, derivative
        )
    return residual


def num_coefficients(dim: int) -> int:
    """The number of coefficients of a second-order polynomial in ``dim`` variables."""
    return 1 + dim + dim * (dim + 1) // 2


def coefficients(value: Array, gradient: Array, hessian: Array) -> Array:
    """The polynomial with these derivatives as one array, ``(P,)``.

    It holds the value, the gradient, and the factor of each product of two coordinates.
    """
    first, second = np.triu_indices(gradient.shape[-1])
    factor = np.where(first == second, 0.5, 1.0)
    products = hessian[first, second] * jnp.asarray(factor, hessian.dtype)
    return jnp.concatenate([value[None], gradient, products])


def derivatives_of(polynomial: Array, dim: int) -> tuple[Array, Array, Array]:
    """The inverse of :func:`coefficients`: value, gradient and Hessian."""
    first, second = np.triu_indices(dim)
    half = jnp.zeros((dim, dim), polynomial.dtype)
    half = half.at[first, second].set(polynomial[1 + dim :])
    return polynomial[0], polynomial[1 : 1 + dim], half + half.T


def _minus_kept(
    rows: Mapping[str, Array],
    polynomials: Mapping[str, Array],
    displacement: Array,
    order: int,
) -> dict[str, Array]:
    """Rows minus their polynomials; the large common terms are subtracted first."""
    first, second = np.triu_indices(displacement.size)
    products = displacement[first] * displacement[second]
    of_order = [displacement, products][:order]
    terms = jnp.concatenate(of_order)
    return {
        n: (r - p[:, 0]) - p[:, 1 : 1 + terms.size] @ terms
        for n, r in rows.items()
        for p in [polynomials[n]]
    }


def _remainder(
    fn: Callable[[Array], Any], center: Array, displacement: Array, order: int
) -> Any:
    """The residual as an integral: Gauss-Jacobi quadrature of the next derivative.

    ``r = integral over [0, 1] of (1 - t) ** q / q! * l^(q + 1)(t)`` along the straight
    line from the centre. Three nodes are exact if that derivative is a polynomial of
    degree five in ``t``.
    """
    nodes, weights = gauss_jacobi(order)
    derivatives = _derivatives(fn, displacement, order + 1)
    dtype = displacement.dtype
    highest = jax.vmap(lambda t: derivatives(center + t * displacement)[-1])
    return jax.tree.map(
        lambda d: jnp.tensordot(jnp.asarray(weights, dtype), d, 1),
        highest(jnp.asarray(nodes, dtype)),
    )


def gauss_jacobi(order: int, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on [0, 1] for the weight ``(1 - t) ** order / order!``."""
    from scipy.special import factorial, roots_jacobi

    nodes, weights = roots_jacobi(count, order, 0)
    return (1 + nodes) / 2, weights / 2 ** (order + 1) / factorial(order)
