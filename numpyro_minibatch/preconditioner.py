"""Preconditioners: scales learnt from gradients in warmup and frozen afterwards.

A preconditioner that keeps adapting changes the distribution that is sampled unless a
correction term with its derivatives is added, which is rarely done. Here it is frozen
at the end of the warmup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from numpyro_minibatch._internal.checks import check_positive, describe

__all__ = ["Preconditioner", "ScaleState", "Scales", "Whitening", "rmsprop"]


class Scales(NamedTuple):
    """Coordinates whose locations and scales depend on others: funnels and bananas.

    ``x = exp(L(d)) * (y + B(d)) + S(d)`` with ``d = drivers @ y``. Each of the three
    curves is linear in ``d`` and ``h(d) = widths * log(cosh((d - knees) / widths))``,
    less its value at zero. It thus has one slope far to the left and another one far to
    the right, and approaches them like the shrinkage of group effects by their scale. A
    driver depends on those before it only, so that the map has an inverse: in its rows
    of ``curves``, the columns of itself and of later drivers are zero. A coordinate can
    have a wide tail by itself: ``q = r * sqrt(1 + growths * r**2)`` and ``y = q + bends
    * g(q)`` with ``g(q) = sqrt(widths**2 + (q - knees)**2)``, less its value at zero,
    whose inverse has a closed form.

    :param drivers: selects the coordinates that others depend on, ``(k, D)``.
    :param curves: coefficients of ``d`` and ``h(d)`` in the logarithms of the scales,
        ``L``, in the locations in units of the scales, ``B``, and in the locations,
        ``S``; ``(3, D, 2, k)``.
    :param knees: where slopes change, ``(k,)``.
    :param widths: over which distance of a driver they change, ``(k,)``.
    :param tails: growths, bends, knees and widths of coordinates by themselves,
        ``(4, D)``.
    """

    drivers: Array
    curves: Array
    knees: Array
    widths: Array
    tails: Array

    def apply(self, r: Array) -> Array:
        """``x``, of ``r``."""
        y, _ = self._with_tails(r)
        log_scale, bend, location = self._at(self.drivers @ y)
        return jnp.exp(log_scale) * (y + bend) + location

    def undo(self, x: Array) -> Array:
        """The inverse of :meth:`apply`."""
        order = jnp.arange(len(self.drivers))

        # one driver after the other; a loop contains their curves once
        def with_driver(k: Array, r: Array) -> Array:
            d = jnp.where(order <= k, self.drivers @ r, 0.0)
            log_scale, bend, location = self._at(d)
            return jnp.exp(-log_scale) * (x - location) - bend

        y = jax.lax.fori_loop(0, len(order), with_driver, x)
        growths, bends, knees, widths = self.tails
        free = 1.0 - jnp.square(bends)
        off = y - knees + bends * jnp.hypot(widths, knees)
        root = jnp.sqrt(jnp.square(off) + free * jnp.square(widths))
        q = knees + (off - bends * root) / free
        return q * jnp.sqrt(2.0 / (1.0 + jnp.sqrt(1.0 + 4.0 * growths * q * q)))

    def _with_tails(self, r: Array) -> tuple[Array, Array]:
        """``y``, of ``r``, and its derivative."""
        growths, bends, knees, widths = self.tails
        part = growths * jnp.square(r)
        root = jnp.sqrt(1.0 + part)
        q = r * root
        distance = jnp.hypot(widths, q - knees)
        y = q + bends * (distance - jnp.hypot(widths, knees))
        grows = (1.0 + 2.0 * part) / root
        return y, (1.0 + bends * (q - knees) / distance) * grows

    def _at(self, d: Array) -> Array:
        """The three curves at values of the drivers, ``(3, D)``."""
        from_knee, at_zero = (d - self.knees) / self.widths, self.knees / self.widths
        # the logarithm of the hyperbolic cosine, up to a constant that cancels
        h = jnp.logaddexp(from_knee, -from_knee) - jnp.logaddexp(at_zero, -at_zero)
        return jnp.tensordot(self.curves, jnp.stack([d, self.widths * h]), 2)

    def log_volume(self, r: Array) -> Array:
        """The logarithm of the determinant of the derivative of :meth:`apply`."""
        y, grows = self._with_tails(r)
        return self._at(self.drivers @ y)[0].sum() + jnp.log(grows).sum()

    def pull_back(self, gradient: Array, r: Array) -> Array:
        """The gradient with respect to ``r`` of a log density of ``r``.

        :param gradient: that of the log density of ``x`` with respect to ``x``.
        :param r: where it was evaluated.
        """
        y, grows = self._with_tails(r)
        d = self.drivers @ y
        log_scale, bend, _ = self._at(d)
        direct = jnp.exp(log_scale) * gradient
        of_curves = jnp.stack([direct * (y + bend) + 1.0, direct, gradient])
        straight, bent = jnp.tensordot(of_curves, self.curves, 2)
        slope = jnp.tanh((d - self.knees) / self.widths)
        of_y = direct + (straight + slope * bent) @ self.drivers
        of_volume = jax.grad(lambda r: jnp.log(self._with_tails(r)[1]).sum())(r)
        return of_y * grows + of_volume


class Whitening(NamedTuple):
    """A square root of the inverse mass matrix: ``z = C @ w`` with white ``w``.

    :param root: ``C``'s transpose, shape ``(D, D)``, upper triangular, or its
        diagonal, ``(D,)``.
    :param inverse: the inverse of a root that is not triangular, ``(D, D)``.
    :param scales: further changes ``C @ w``, whose coordinates have scales that vary.
    """

    root: Array
    inverse: Array | None = None
    scales: Scales | None = None

    def color(self, w: Array) -> Array:
        """``C @ w``: a displacement in the coordinates of the position."""
        r = self._linear(w)
        return r if self.scales is None else self.scales.apply(r)

    def _linear(self, w: Array) -> Array:
        return self.root.T @ w if self.root.ndim == 2 else self.root * w

    def whiten(self, displacement: Array) -> Array:
        """The inverse of :meth:`color`."""
        if self.scales is not None:
            displacement = self.scales.undo(displacement)
        if self.inverse is not None:
            return self.inverse.T @ displacement
        if self.root.ndim == 2:
            return solve_triangular(self.root, displacement, trans=1)
        return displacement / self.root

    def whiten_gradient(self, gradient: Array, w: Array | None = None) -> Array:
        """The gradient of the log density of ``w``: without scales ``C.T @ gradient``.

        :param gradient: that of the log density of the position.
        :param w: where; only needed with scales.
        """
        if self.scales is not None:
            assert w is not None  # the caller knows that there may be scales
            gradient = self.scales.pull_back(gradient, self._linear(w))
        return self.root @ gradient if self.root.ndim == 2 else self.root * gradient

    def log_volume(self, w: Array) -> Array | float:
        """The log determinant of the derivative of :meth:`color`, up to a constant."""
        return 0.0 if self.scales is None else self.scales.log_volume(self._linear(w))


class ScaleState(NamedTuple):
    """The state of a preconditioner.

    - **root** - ``C.T`` with ``C @ C.T`` the preconditioner ``(D, D)``, or its
      diagonal, ``(D,)``.
    - **square** - running mean of the squared gradients, ``(D,)``; empty without
      adaptation.
    - **weight** - the total weight of that mean so far.
    """

    root: Array
    square: Any = ()
    weight: Any = ()


@dataclass(frozen=True)
class Preconditioner:
    """Unscaled coordinates; the base of the ``preconditioner.*`` choices."""

    def init(self, z: Array, root: Array | None) -> ScaleState:
        """The state before the first step.

        :param z: flat position, shape ``(D,)``.
        :param root: a root that is known in advance, from a surrogate.
        """
        return ScaleState(jnp.ones_like(z) if root is None else root)

    def observe(
        self, state: ScaleState, gradient: Array, in_warmup: Array
    ) -> ScaleState:
        """Learn from one gradient.

        :param gradient: in the whitened coordinates, shape ``(D,)``.
        :param in_warmup: whether the warmup is still running.
        """
        return state


@dataclass(frozen=True)
class _RMSProp(Preconditioner):
    decay: float = 0.99
    damping: float = 0.01

    def init(self, z: Array, root: Array | None) -> ScaleState:
        return ScaleState(jnp.ones_like(z), jnp.zeros_like(z), jnp.zeros((), z.dtype))

    def observe(
        self, state: ScaleState, gradient: Array, in_warmup: Array
    ) -> ScaleState:
        # a gradient that is not finite would stay in the mean forever
        useful = in_warmup & jnp.isfinite(gradient).all()
        new = jnp.where(useful, 1.0 - self.decay, 0.0)
        unscaled = jnp.where(useful, gradient, 0.0) / state.root
        square = state.square + new * (jnp.square(unscaled) - state.square)
        weight = state.weight + new * (1.0 - state.weight)
        size = jnp.sqrt(square / jnp.maximum(weight, 1e-12))
        scale = 1.0 / (size + self.damping * size.mean())
        # a geometric mean of one keeps the meaning of the step size; by logarithms,
        # because a product would overflow
        scale = scale * jnp.exp(-jnp.mean(jnp.log(scale)))
        return ScaleState(
            jnp.where(useful, jnp.sqrt(scale), state.root), square, weight
        )


def rmsprop(decay: float = 0.99, damping: float = 0.01) -> Preconditioner:
    """Scale each coordinate by the root mean square of its gradients [1].

    The preconditioner is ``1 / (g + damping * mean(g))`` with ``g`` the root mean
    square, scaled to the geometric mean 1. It adapts during the warmup and is then
    fixed. The paper's preconditioner keeps changing, and has a bias that only small
    step sizes keep small.

    :param decay: weight of the past in the running mean of squares, in ``(0, 1)``.
    :param damping: smallest scale of a gradient, relative to the mean of all.
    :raises ValueError: an argument is out of range.

    **References:**

    1. Chunyuan Li, Changyou Chen, David Carlson, Lawrence Carin (2016), *Preconditioned
       stochastic gradient Langevin dynamics for deep neural networks*, AAAI.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import preconditioner
        >>> preconditioner.rmsprop(decay=0.9)
        _RMSProp(decay=0.9, damping=0.01)
    """
    check_positive("rmsprop", "decay", decay)
    check_positive("rmsprop", "damping", damping)
    if not decay < 1:
        raise ValueError(
            f"rmsprop(decay={decay!r}) must be below 1: it is the weight of the past. "
            "0.99 is the default."
        )
    return _RMSProp(float(decay), float(damping))


def known(who: str, given: Any) -> Preconditioner:
    """The preconditioner that a kernel was given, by name or as an object.

    :param who: the kernel's name, for the messages.
    :param given: ``None``, ``"rmsprop"`` or one of ``preconditioner.*``.
    """
    if given is None:
        return Preconditioner()
    if isinstance(given, Preconditioner):
        return given
    if given == "rmsprop":
        return rmsprop()
    raise ValueError(
        f'{who}(preconditioner=...) must be "rmsprop", an object such as '
        f"preconditioner.rmsprop(decay=0.9), or None, got {describe(given)}."
    )
