"""Langevin dynamics on minibatch gradients.

One step of a dynamics reads one gradient, of one fresh batch. Positions are flat. The
dynamics run in the whitened coordinates of a mass matrix, in which momenta have the
distribution ``N(0, T)`` and mass one. In all dynamics, ``friction`` is the rate
``gamma`` of

    dp = force dt - gamma p dt + sqrt(2 gamma T) dW,    dz = p dt

and forces are gradients of ``T * log target``. The likelihood then has the weight that
it has at ``T = 1``, so that a step size keeps its meaning at any temperature, and at
``T = 0`` the dynamics reduce to gradient ascent with momentum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_minibatch._internal.checks import check_flag, check_positive, describe
from numpyro_minibatch.preconditioner import Whitening

__all__ = ["Dynamics", "Moved", "Scalar", "nose_hoover", "sghmc", "sgld"]

Scalar = Array | float
Force = Callable[[Array], tuple[Array, Array]]


class Moved(NamedTuple):
    """One step of a dynamics.

    :param z: the position, flat, shape ``(D,)``.
    :param memory: momentum and thermostat, in the dynamics' own format.
    :param log_density: ``T`` times the log density of the target where the force was
        evaluated, estimated from the batch.
    :param gradient: its gradient there, in the whitened coordinates, shape ``(D,)``.
    :param work: for the midpoint integrator, the energy that the force took from the
        momentum, ``-(p + p') . force * step / 2``, which an amortized Metropolis test
        needs.
    """

    z: Array
    memory: Any
    log_density: Array
    gradient: Array
    work: Scalar = 0.0


class Dynamics(ABC):
    """A rule that moves a position and its auxiliary variables by one gradient.

    Subclasses are frozen dataclasses: compared and hashed by value, so that a compiled
    step is found again.
    """

    #: Default step size in the whitened coordinates of a surrogate's posterior, which
    #: have unit variances.
    white_step_size: float = 0.1
    #: Default number of gradient steps per draw.
    default_num_steps: int = 1
    #: The power of the step size that multiplies a gradient: the learning rate of the
    #: literature is ``step_size ** order``.
    order: int = 1
    #: Whether it compensates for gradient noise that is equal in all coordinates.
    is_thermostat: bool = False
    #: Whether a larger friction reduces the effect of gradient noise.
    has_friction: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that results record, for :func:`~numpyro_minibatch.diagnose`."""
        return {
            "gradient_steps": True,
            "is_thermostat": self.is_thermostat,
            "has_friction": self.has_friction,
        }

    @property
    def keeps_force(self) -> bool:
        """Whether the memory includes the force with which the next step begins."""
        return False

    def init(self, key: Array, z: Array, temperature: Scalar) -> Any:
        """The initial auxiliary variables: momenta at their equilibrium.

        :param key: PRNG key.
        :param z: flat position, shape ``(D,)``.
        :param temperature: the temperature ``T``.
        """
        return ()

    def refresh(
        self, key: Array, z: Array, here: Any, there: Any, temperature: Scalar
    ) -> Any:
        """The auxiliary variables of a position that came from another temperature.

        Momenta are drawn anew, and forces come with their position.

        :param key: PRNG key.
        :param z: flat position, shape ``(D,)``.
        :param here: the auxiliary variables at this temperature.
        :param there: those that came with the position.
        :param temperature: the temperature ``T``.
        """
        return self.init(key, z, temperature)

    @abstractmethod
    def step(
        self,
        key: Array,
        z: Array,
        memory: Any,
        force: Force,
        step_size: Scalar,
        temperature: Scalar,
        whitening: Whitening,
    ) -> Moved:
        """Move by one gradient.

        :param key: PRNG key of the noise: one normal number per coordinate.
        :param z: flat position, shape ``(D,)``.
        :param memory: what :meth:`init` or the previous step returned.
        :param force: ``T`` times the log density and its gradient at a position,
            estimated from this step's batch. Called once.
        :param step_size: length of the step.
        :param temperature: the temperature ``T >= 0``.
        :param whitening: the whitened coordinates.
        """

    @abstractmethod
    def injected(self, step_size: Scalar, temperature: Scalar) -> Scalar:
        """Variance of the noise that a step injects, in units of the gradient's.

        Gradient noise of this variance in a coordinate doubles its temperature.
        """


def _normal(key: Array, z: Array) -> Array:
    return jax.random.normal(key, z.shape, z.dtype)


@dataclass(frozen=True)
class _SGLD(Dynamics):
    white_step_size = 0.05

    def step(
        self,
        key: Array,
        z: Array,
        memory: Any,
        force: Force,
        step_size: Scalar,
        temperature: Scalar,
        whitening: Whitening,
    ) -> Moved:
        value, gradient = force(z)
        drift = whitening.whiten_gradient(gradient)
        noise = jnp.sqrt(2.0 * step_size * temperature) * _normal(key, z)
        z = z + whitening.color(step_size * drift + noise)
        return Moved(z, memory, value, drift)

    def injected(self, step_size: Scalar, temperature: Scalar) -> Scalar:
        return 2.0 * temperature / step_size


def sgld() -> Dynamics:
    """Stochastic gradient Langevin dynamics, ``z + h * force + N(0, 2 h T)`` [1].

    The step size ``h`` is half of the paper's epsilon. If the log density is quadratic
    with curvature ``k``, the variance of the draws is ``T / k`` divided by
    ``1 - h k / 2``; a gradient with noise of variance ``V`` adds ``h V / 2`` to ``T``.

    **References:**

    1. Max Welling, Yee Whye Teh (2011), *Bayesian learning via stochastic gradient
       Langevin dynamics*, ICML.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import dynamics
        >>> dynamics.sgld() == dynamics.sgld()
        True
    """
    return _SGLD()


Integrator = Literal["baoab", "midpoint", "euler"]


class Kicked(NamedTuple):
    """A momentum, and the force of the last half kick, which the next one reuses."""

    momentum: Array
    force: Array


@dataclass(frozen=True)
class _SGHMC(Dynamics):
    friction: float = 1.0
    integrator: Integrator = "baoab"
    per_step: bool = False

    white_step_size = 0.3
    default_num_steps = 10
    order = 2
    has_friction = True

    @property
    def keeps_force(self) -> bool:
        return self.integrator == "baoab"

    def _decay(self, step_size: Scalar) -> Scalar:
        """The decay of the momentum in a step: the friction times its length."""
        return self.friction if self.per_step else self.friction * step_size

    def init(self, key: Array, z: Array, temperature: Scalar) -> Any:
        p = jnp.sqrt(jnp.asarray(temperature, z.dtype)) * _normal(key, z)
        # no force is known before the first step; the error is soon forgotten
        return Kicked(p, jnp.zeros_like(z)) if self.integrator == "baoab" else p

    def refresh(
        self, key: Array, z: Array, here: Any, there: Any, temperature: Scalar
    ) -> Any:
        new = self.init(key, z, temperature)
        return new._replace(force=there.force) if isinstance(new, Kicked) else new

    def step(
        self,
        key: Array,
        z: Array,
        memory: Any,
        force: Force,
        step_size: Scalar,
        temperature: Scalar,
        whitening: Whitening,
    ) -> Moved:
        h, noise = step_size, _normal(key, z)
        p = memory.momentum if isinstance(memory, Kicked) else memory

        def drift(z: Array, p: Array, h: Scalar) -> Array:
            return z + whitening.color(h * p)

        if self.integrator == "baoab":
            # a draw is the position where the force was evaluated, as in [2], and the
            # half kicks before and after it use this one force
            p = p + 0.5 * h * whitening.whiten_gradient(memory.force)
            z = drift(z, p, 0.5 * h)
            p = _ornstein_uhlenbeck(p, noise, self._decay(h), temperature)
            z = drift(z, p, 0.5 * h)
            value, force_here = force(z)
            gradient = whitening.whiten_gradient(force_here)
            p_new = p + 0.5 * h * gradient
            return Moved(z, Kicked(p_new, force_here), value, gradient)
        if self.integrator == "midpoint":
            # algorithm 2 of [3], with beta = friction / 2: friction acts on the mean of
            # the momenta before and after, so that any step size preserves N(0, T)
            z = drift(z, p, 0.5 * h)
            value, gradient = force(z)
            gradient = whitening.whiten_gradient(gradient)
            a = 0.5 * self._decay(h)
            scale = jnp.sqrt(4.0 * a * temperature)
            p_new = ((1.0 - a) * p + h * gradient + scale * noise) / (1.0 + a)
            z = drift(z, p_new, 0.5 * h)
        else:
            # [1], where the momentum is h * p
            value, gradient = force(z)
            gradient = whitening.whiten_gradient(gradient)
            decay = self._decay(h)
            scale = jnp.sqrt(2.0 * decay * temperature)
            p_new = (1.0 - decay) * p + h * gradient + scale * noise
            z = drift(z, p_new, h)
        work = -0.5 * h * (gradient @ (p + p_new))
        return Moved(z, p_new, value, gradient, work)

    def injected(self, step_size: Scalar, temperature: Scalar) -> Scalar:
        if self.per_step:
            return 2.0 * self.friction * temperature / step_size**2
        return 2.0 * self.friction * temperature / step_size


def _ornstein_uhlenbeck(
    p: Array, noise: Array, decay: Scalar, temperature: Scalar
) -> Array:
    """The exact solution of ``dp = -rate p dt + sqrt(2 rate T) dW``."""
    kept = jnp.exp(-jnp.asarray(decay, p.dtype))
    scale = jnp.sqrt(-jnp.expm1(-2.0 * jnp.asarray(decay, p.dtype)) * temperature)
    return kept * p + scale * noise


def sghmc(
    friction: float = 1.0, integrator: Integrator = "baoab", per_step: bool = False
) -> Dynamics:
    """Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum [1].

    :param friction: the decay rate ``gamma`` of the momentum, in units of one over the
        step size's.
    :param integrator: ``"baoab"``, whose draws have the exact variance if the log
        density is quadratic, at any stable step size [2]; ``"midpoint"``, that of
        AMAGOLD [3], where ``friction`` is twice the paper's beta; or ``"euler"``, that
        of [1].
    :param per_step: whether ``friction`` is the decay per step, ``gamma * step_size``,
        so that the momentum of gradient descent stays the same while the step size
        changes.
    :raises ValueError: ``friction`` is negative, or there is no such integrator.

    **References:**

    1. Tianqi Chen, Emily B. Fox, Carlos Guestrin (2014), *Stochastic gradient
       Hamiltonian Monte Carlo*, ICML.
    2. Benedict Leimkuhler, Charles Matthews (2013), *Rational construction of
       stochastic numerical methods for molecular sampling*, AMRX 2013(1).
    3. Ruqi Zhang, A. Feder Cooper, Christopher De Sa (2020), *AMAGOLD: amortized
       Metropolis adjustment for efficient stochastic gradient MCMC*, AISTATS.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import dynamics
        >>> dynamics.sghmc(friction=0.5).integrator
        'baoab'
    """
    check_positive("sghmc", "friction", friction, zero=True)
    check_flag("sghmc", "per_step", per_step)
    known = _known("sghmc", integrator, Integrator)
    return _SGHMC(float(friction), known, bool(per_step))


class Thermostat(NamedTuple):
    """The state of :func:`nose_hoover`: momentum, current friction and last force."""

    momentum: Array
    friction: Array
    force: Array


@dataclass(frozen=True)
class _NoseHoover(Dynamics):
    friction: float = 1.0
    thermal_mass: float = 1.0
    integrator: Literal["symmetric", "euler"] = "symmetric"

    white_step_size = 0.3
    default_num_steps = 10
    order = 2
    is_thermostat = True

    @property
    def keeps_force(self) -> bool:
        return self.integrator == "symmetric"

    def init(self, key: Array, z: Array, temperature: Scalar) -> Thermostat:
        p = jnp.sqrt(jnp.asarray(temperature, z.dtype)) * _normal(key, z)
        friction = jnp.asarray(self.friction, z.dtype)
        return Thermostat(p, friction, jnp.zeros_like(z))

    def refresh(
        self, key: Array, z: Array, here: Any, there: Any, temperature: Scalar
    ) -> Thermostat:
        # the friction belongs to the temperature, not to the position
        new = self.init(key, z, temperature)
        return new._replace(friction=here.friction, force=there.force)

    def step(
        self,
        key: Array,
        z: Array,
        memory: Thermostat,
        force: Force,
        step_size: Scalar,
        temperature: Scalar,
        whitening: Whitening,
    ) -> Moved:
        h, (p, friction, last), noise = step_size, memory, _normal(key, z)

        def updated(friction: Array, p: Array, h: Scalar) -> Array:
            excess = jnp.mean(jnp.square(p)) - temperature
            return friction + h / self.thermal_mass * excess

        if self.integrator == "symmetric":
            p = p + 0.5 * h * whitening.whiten_gradient(last)
            z = z + whitening.color(0.5 * h * p)
            friction = updated(friction, p, 0.5 * h)
            p = _thermal(p, noise, friction, self.friction, h, temperature)
            friction = updated(friction, p, 0.5 * h)
            z = z + whitening.color(0.5 * h * p)
            value, last = force(z)
            gradient = whitening.whiten_gradient(last)
            p = p + 0.5 * h * gradient
        else:
            value, last = force(z)
            gradient = whitening.whiten_gradient(last)
            scale = jnp.sqrt(2.0 * self.friction * h * temperature)
            p = p - h * friction * p + h * gradient + scale * noise
            z = z + whitening.color(h * p)
            friction = updated(friction, p, h)
        return Moved(z, Thermostat(p, friction, last), value, gradient)

    def injected(self, step_size: Scalar, temperature: Scalar) -> Scalar:
        return 2.0 * self.friction * temperature / step_size


def _thermal(
    p: Array,
    noise: Array,
    rate: Array,
    injected: float,
    h: Scalar,
    temperature: Scalar,
) -> Array:
    """The exact solution of ``dp = -rate p dt + sqrt(2 injected T) dW`` after ``h``.

    ``rate`` may have either sign, and be zero.
    """
    x = 2.0 * rate * h
    small = jnp.abs(x) < 1e-4
    safe = jnp.where(small, 1.0, x)
    mean = jnp.where(small, 1.0 - 0.5 * x, -jnp.expm1(-safe) / safe)
    scale = jnp.sqrt(2.0 * injected * temperature * h * mean)
    return jnp.exp(-0.5 * x) * p + scale * noise


def nose_hoover(
    friction: float = 1.0,
    thermal_mass: float = 1.0,
    integrator: Literal["symmetric", "euler"] = "symmetric",
) -> Dynamics:
    """Langevin dynamics whose friction adapts to the noise of the gradients [1].

    A Nosé-Hoover thermostat ``d xi = (|p|^2 / D - T) / mu dt`` replaces the friction,
    while noise of the fixed ``friction`` is injected. Gradient noise that is the same
    in all coordinates only raises the mean of ``xi``.

    :param friction: rate of the injected noise, and the thermostat's initial value.
    :param thermal_mass: the thermostat's mass ``mu``, per coordinate.
    :param integrator: ``"symmetric"``, a splitting into exactly solved parts [2], with
        one gradient per step; or ``"euler"``, that of [1].
    :raises ValueError: ``friction`` is negative, the mass is not positive, or there is
        no such integrator.

    **References:**

    1. Nan Ding, Youhan Fang, Ryan Babbush, Changyou Chen, Robert D. Skeel, Hartmut
       Neven (2014), *Bayesian sampling using stochastic gradient thermostats*, NeurIPS.
    2. Benedict Leimkuhler, Xiaocheng Shang (2016), *Adaptive thermostats for noisy
       gradient systems*, SIAM Journal on Scientific Computing 38(2).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import dynamics
        >>> dynamics.nose_hoover(friction=0.1).friction
        0.1
    """
    check_positive("nose_hoover", "friction", friction, zero=True)
    check_positive("nose_hoover", "thermal_mass", thermal_mass)
    known = _known("nose_hoover", integrator, Literal["symmetric", "euler"])
    return _NoseHoover(float(friction), float(thermal_mass), known)


def _known(who: str, given: Any, names: Any) -> Any:
    if given not in get_args(names):
        known = ", ".join(map(repr, get_args(names)))
        raise ValueError(
            f"{who}(integrator=...) must be one of {known}, got {describe(given)}."
        )
    return given
