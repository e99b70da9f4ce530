"""Proposals that follow a surrogate of the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_minibatch._internal.keys import normal
from numpyro_minibatch.proposal._contract import (
    Proposal,
    ProposalContext,
    Proposed,
    check_number,
    is_positive,
)

__all__ = [
    "delayed_random_walk",
    "independence",
    "preconditioned_crank_nicolson",
    "student_t",
    "surrogate_hmc",
]


# proposals that use the surrogate ----------------------------------------------------


def _surrogate(context: ProposalContext) -> Callable[[Array], Array]:
    assert context.log_surrogate is not None  # the kernel has checked
    return context.log_surrogate


def _centered(z: Array, context: ProposalContext) -> tuple[Array, Array]:
    """The centre, and the whitened displacement from it."""
    assert context.center is not None  # the kernel has checked
    return context.center, context.whitening.whiten(z - context.center)


def _rotated(
    z: Array,
    noise: Array,
    cos: Array | float,
    sin: Array | float,
    context: ProposalContext,
) -> Proposed:
    """Rotate the displacement towards the noise, which preserves the normal."""
    center, white = _centered(z, context)
    white_new = cos * white + sin * noise
    log_q_ratio = 0.5 * (jnp.square(white_new) - jnp.square(white)).sum()
    return Proposed(center + context.whitening.color(white_new), log_q_ratio)


def accept_on_surrogate(
    z: Array, z_new: Array, logs: Array, log_ratio: Array, noise: Array
) -> Proposed:
    """Accept or reject on the surrogate; the second stage corrects for this ratio.

    :param logs: log surrogate at both positions.
    :param log_ratio: the log ratio of this stage; NaN is a rejection.
    :param noise: two normal numbers.
    """
    # Half the square of two normals is an exponential, the -log of a uniform: one
    # draw of normals then serves the whole proposal.
    accept = log_ratio >= -0.5 * jnp.square(noise).sum()
    return Proposed(
        jnp.where(accept, z_new, z),
        jnp.where(accept, logs[0] - logs[1], 0.0),
        moved=accept,
        log_surrogate=logs,
    )


#: length of a trajectory, about a quarter of a period, ``pi / 2``
TRAJECTORY_LENGTH = 1.56
#: where scales vary, trajectories have so many times as many steps
LONGER = 3
# The size of these steps is uniform from this share of the other's size. In a wide tail
# the period depends on the energy; lengths that vary little could be half of it, and
# then squares hardly mix.
_SHORTEST = 0.4
# This share of these trajectories, and of those with drivers, has steps ``LONGER``
# times shorter. They leave places where other steps are too long: far in the tail of a
# hierarchy, one of 1,600 chains stayed for 155 draws. With few parameters, where
# independent draws are accepted, they only cost effective draws: of means up to 13%.
_FINE = 0.125
#: Cosine of one rotation on a normal surrogate close to the target, which is the
#: correlation of successive draws. Below zero the errors of successive draws cancel in
#: their mean, whose variance is ``(1 + cos) / (1 - cos)`` times that of independent
#: draws. For an even function the factor is ``(1 + cos**2) / (1 - cos**2)``, which is
#: larger. The indicator of a 5% tail is a sum of both kinds, and at this number the two
#: effects cancel.
OVERRELAXATION_COSINE = -0.3


def follow(
    z: Array,
    momentum: Array,
    step: Array,
    num_steps: ArrayLike,
    context: ProposalContext,
    instead: tuple[Array, Array] | None = None,
) -> tuple[Array, Array, Array, Array | float]:
    """Follow the surrogate's dynamics.

    The exact dynamics of the normal distribution with the surrogate's mean and
    covariance rotate position and momentum into each other. A step is such a rotation
    between two half kicks, each by the difference of the surrogate's gradient and the
    normal's. Its error comes from this difference alone; that of leapfrog comes from
    the whole gradient.

    :param step: time of a step; a rotation by ``pi / 2`` is a quarter of a period.
    :param instead: whether the end is another position, and this position. The loop
        evaluates the surrogate there, so that the program contains it no more often.
    :return: position and momentum at the end, the log surrogate at both ends, and by
        how much the volume of the coordinates grew, as a logarithm.
    """
    density = _surrogate(context)
    whitening = context.whitening
    center, white = _centered(z, context)
    cos, sin = jnp.cos(step), jnp.sin(step)

    # There is a half kick at each end of every rotation; two that meet are one kick.
    # The loop keeps the surrogate, which contains the model's prior, at few places of
    # the compiled program.
    def kick_and_rotate(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        position, white, momentum, first, last = carry
        at_end = (i == 0) | (i == num_steps)
        # only the ends need the density; the condition is the same for all chains
        value, gradient = jax.lax.cond(
            at_end,
            jax.value_and_grad(density),
            lambda position: (last, jax.grad(density)(position)),
            position,
        )
        kick = jnp.where(at_end, 0.5 * step, step)
        momentum = momentum + kick * (
            whitening.whiten_gradient(gradient, white) + white
        )
        ends = i == num_steps
        rotated = cos * white + sin * momentum
        momentum = jnp.where(ends, momentum, cos * momentum - sin * white)
        moved = center + whitening.color(rotated)
        if instead is not None:
            moved = jnp.where(instead[0], instead[1], moved)
        position = jnp.where(ends, position, moved)
        white = jnp.where(ends, white, rotated)
        return position, white, momentum, jnp.where(i == 0, value, first), value

    zero = jnp.zeros((), z.dtype)
    z, end, momentum, first, last = jax.lax.fori_loop(
        0, num_steps + 1, kick_and_rotate, (z, white, momentum, zero, zero)
    )
    grown = whitening.log_volume(end) - whitening.log_volume(white)
    return z, momentum, jnp.stack([first, last]), grown


def log_metropolis_ratio(
    momentum: Array, momentum_new: Array, logs: Array, grown: Array | float
) -> Array:
    """The energy that a trajectory lost, the log of its acceptance ratio.

    :param logs: log surrogate at both ends.
    :param grown: the logarithm of the ratio of volumes at the ends; the momentum is
        that of the whitened coordinates, in which the density is that of positions
        times the volume.
    """
    kinetic = 0.5 * (jnp.square(momentum) - jnp.square(momentum_new)).sum()
    return logs[1] - logs[0] + kinetic + grown


# Of trajectories, the share that independent draws replace, and the largest number of
# parameters for which they are. A trajectory takes many draws to come back from a heavy
# tail, and such excursions are too rare for a run to count them. With few parameters
# most independent draws are accepted, and for some posteriors nearly all.
_INDEPENDENT, _OF_FEW, _IF_ACCEPTED = 0.2, 0.35, 0.5
_MOST_FOR_INDEPENDENT = 16
#: parameters up to which more of the trajectories are replaced
MOST_FOR_MANY_DRAWS = 2
#: Degrees of freedom of these draws. On a normal surrogate they are accepted with
#: probability 0.89 in one dimension, 0.67 in five and 0.45 in sixteen. With 5 degrees
#: of freedom it is 0.93, 0.77 and 0.57, but less in heavy tails, where they are needed:
#: for the mean and scale of five normal rows, 0.04 in place of 0.19 at the worst of
#: 40,000 draws of the posterior.
HEAVY_DF = 3.0
#: relative half width of the uniform distribution of the length of a step
JITTER = 0.1
STUDENT_DF = 5.0  # of independent draws without trajectories


@dataclass(frozen=True)
class _SurrogateHMC(Proposal):
    uses_surrogate = True
    follows_surrogate = True
    adapts_step_size = False

    num_steps: int | None = None
    step_size: float | None = None
    jitter: float = JITTER
    independent: float | None = None

    def __post_init__(self) -> None:
        what = "surrogate_hmc({}=...)".format
        if self.num_steps is not None:
            if not isinstance(self.num_steps, Integral):
                raise TypeError(
                    f"{what('num_steps')} must be a positive integer, got "
                    f"{self.num_steps!r} ({type(self.num_steps).__name__})."
                )
            check_number(
                what("num_steps"), self.num_steps, is_positive, "a positive integer"
            )
            object.__setattr__(self, "num_steps", int(self.num_steps))
        if self.step_size is not None:
            step_size = check_number(
                what("step_size"), self.step_size, is_positive, "a positive number"
            )
            object.__setattr__(self, "step_size", step_size)
        jitter = check_number(
            what("jitter"), self.jitter, lambda x: 0 <= x < 1, "at least 0 and below 1"
        )
        object.__setattr__(self, "jitter", jitter)
        if self.independent is not None:
            independent = check_number(
                what("independent"),
                self.independent,
                lambda x: 0 <= x < 1,
                "at least 0 and below 1",
            )
            object.__setattr__(self, "independent", independent)

    def trajectory(self, context: ProposalContext) -> tuple[int, float]:
        """The number of steps and their length; 0 if a rotation is the exact flow."""
        num_steps, step_size = self.num_steps, self.step_size
        if num_steps is None:
            num_steps = context.num_steps
            if step_size is not None:
                num_steps = max(1, round(TRAJECTORY_LENGTH / step_size))
        if step_size is None:
            step_size = TRAJECTORY_LENGTH / max(num_steps, 1)
        return num_steps, step_size

    def _is_longer(self, context: ProposalContext) -> bool:
        """Whether trajectories are longer than a quarter of a period."""
        return context.long and self.num_steps is None and self.step_size is None

    def _is_bent(self, context: ProposalContext) -> bool:
        """Whether trajectories that the set-up chose have drivers."""
        chosen = self.num_steps is None and self.step_size is None
        return context.bent is not None and chosen

    def evaluations(self, context: ProposalContext) -> int:
        num_steps, _ = self.trajectory(context)
        if self._is_longer(context):
            num_steps *= LONGER
        return num_steps + 1 if num_steps else 0

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        num_steps, length = self.trajectory(context)
        if num_steps == 0:
            # the exact flow of the normal distribution, which loses no energy
            if not context.over_relaxed:
                return independence().propose(key, z, step_size, context)
            noise = normal(key, z.size, z.dtype)
            return _rotated(
                z,
                noise,
                OVERRELAXATION_COSINE,
                math.sqrt(1.0 - OVERRELAXATION_COSINE**2),
                context,
            )
        many = z.size > MOST_FOR_MANY_DRAWS
        finer = self._is_longer(context) or (many and self._is_bent(context))
        if context.bent is not None:
            context = context._replace(
                center=context.bent.center, whitening=context.bent.whitening
            )
        share = self.independent
        if share is None:
            share = _INDEPENDENT
            if not many:
                share = _IF_ACCEPTED if context.draws_fit else _OF_FEW
            share = share if z.size <= _MOST_FOR_INDEPENDENT else 0.0
        extra = 1 + int(HEAVY_DF) if share else 0
        longer = self._is_longer(context)
        noise = normal(key, z.size + 3 + extra + finer, z.dtype)
        momentum, noise = noise[: z.size], noise[z.size :]
        for_step, for_accept, for_draw = noise[0], noise[1:3], noise[3 : 3 + extra]
        step = jnp.asarray(length, z.dtype)
        low, high = 1.0 - self.jitter, 1.0 + self.jitter
        if longer:
            num_steps, low = LONGER * num_steps, _SHORTEST
        if low < high:
            step = step * (low + (high - low) * _uniform(for_step))
        if finer:
            step = jnp.where(_uniform(noise[-1]) < _FINE, step / LONGER, step)
        if not share:
            z_new, after, logs, grown = follow(z, momentum, step, num_steps, context)
            log_ratio = log_metropolis_ratio(momentum, after, logs, grown)
            return accept_on_surrogate(z, z_new, logs, log_ratio, for_accept)
        # the choice does not depend on the position: a mixture of two kernels that are
        # reversible with respect to the surrogate
        draws = _uniform(for_draw[0]) < share
        drawn, log_q_ratio = _student_t(
            z, momentum, jnp.square(for_draw[1:]).sum(), HEAVY_DF, context
        )
        z_new, after, logs, grown = follow(
            z, momentum, step, num_steps, context, (draws, drawn)
        )
        log_ratio = jnp.where(
            draws,
            logs[1] - logs[0] + log_q_ratio,
            log_metropolis_ratio(momentum, after, logs, grown),
        )
        return accept_on_surrogate(z, z_new, logs, log_ratio, for_accept)


def _uniform(noise: Array) -> Array:
    """A uniform number, of a normal one."""
    return 0.5 + 0.5 * jax.scipy.special.erf(noise * np.sqrt(0.5).item())


def _student_t(
    z: Array, noise: Array, chi_squared: Array, df: float, context: ProposalContext
) -> tuple[Array, Array]:
    """A multivariate Student-t draw about the centre, and its log proposal ratio.

    :param noise: normals, as many as parameters.
    :param chi_squared: an independent chi-squared variate with ``df`` degrees of
        freedom. A sum of squares is cheaper than a gamma variate.
    """
    center, white = _centered(z, context)
    white_new = noise * jnp.sqrt(df / chi_squared)
    logs = jnp.log1p(jnp.square(jnp.stack([white_new, white])).sum(-1) / df)
    log_q_ratio = 0.5 * (df + z.size) * (logs[0] - logs[1])
    volume = context.whitening.log_volume
    log_q_ratio = log_q_ratio + (volume(white_new) - volume(white))
    return center + context.whitening.color(white_new), log_q_ratio


@dataclass(frozen=True)
class _DelayedRandomWalk(Proposal):
    uses_surrogate = True

    def evaluations(self, context: ProposalContext) -> int:
        return 2

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        noise = normal(key, z.size + 2, z.dtype)
        z_new = z + step_size * context.whitening.color(noise[:-2])
        logs = jax.vmap(_surrogate(context))(jnp.stack([z, z_new]))
        return accept_on_surrogate(z, z_new, logs, logs[1] - logs[0], noise[-2:])


@dataclass(frozen=True)
class _Independence(Proposal):
    uses_surrogate = True
    adapts_step_size = False

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        noise = normal(key, z.size, z.dtype)
        center, white = _centered(z, context)
        log_q_ratio = 0.5 * (jnp.square(noise) - jnp.square(white)).sum()
        return Proposed(center + context.whitening.color(noise), log_q_ratio)


@dataclass(frozen=True)
class _StudentT(Proposal):
    uses_surrogate = True
    adapts_step_size = False

    df: float = STUDENT_DF

    def __post_init__(self) -> None:
        df = check_number(
            "student_t(df=...)", self.df, is_positive, "a positive number"
        )
        object.__setattr__(self, "df", df)

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        if self.df.is_integer() and self.df <= 32:
            noise = jax.random.normal(key, (z.size + int(self.df),), z.dtype)
            noise, others = noise[: z.size], noise[z.size :]
            chi_squared = jnp.square(others).sum()
        else:
            key_normal, key_scale = jax.random.split(key)
            noise = jax.random.normal(key_normal, z.shape, z.dtype)
            chi_squared = 2.0 * jax.random.gamma(key_scale, 0.5 * self.df, (), z.dtype)
        return Proposed(*_student_t(z, noise, chi_squared, self.df, context))


@dataclass(frozen=True)
class _PreconditionedCrankNicolson(Proposal):
    uses_surrogate = True
    default_step_size = 0.5

    beta: float | None = None

    def __post_init__(self) -> None:
        if self.beta is not None:
            beta = check_number(
                "preconditioned_crank_nicolson(beta=...)",
                self.beta,
                lambda x: 0 < x <= 1,
                "a number above 0 and at most 1",
            )
            object.__setattr__(self, "beta", beta)
            object.__setattr__(self, "adapts_step_size", False)

    def propose(
        self, key: Array, z: Array, step_size: Array, context: ProposalContext
    ) -> Proposed:
        noise = normal(key, z.size, z.dtype)
        beta = step_size if self.beta is None else self.beta
        beta = jnp.minimum(jnp.asarray(beta, z.dtype), 1.0)
        # sqrt((1 - b) (1 + b)) keeps its digits where b is close to one
        return _rotated(z, noise, jnp.sqrt((1.0 - beta) * (1.0 + beta)), beta, context)


def surrogate_hmc(
    num_steps: int | None = None,
    step_size: float | None = None,
    jitter: float = JITTER,
    independent: float | None = None,
) -> Proposal:
    """Hamiltonian Monte Carlo on the surrogate, then one decision on the data.

    The first stage draws a momentum, follows the surrogate's dynamics for a few steps,
    and accepts according to the surrogate's energy. It is reversible with respect to
    the surrogate, and reads only the rows that the surrogate evaluates exactly. The
    minibatch then decides on moves that the first stage accepted, by the surrogate's
    error alone: delayed acceptance [1]. The trajectory follows the skewness of a skewed
    surrogate, which :func:`independence` cannot.

    A step rotates position and momentum into each other, which is the exact flow of the
    normal distribution with the surrogate's mean and covariance. Half kicks before and
    after it apply the difference of the surrogate's gradient and the normal's [3]. The
    error of a step comes from this difference alone.

    The length of a trajectory is measured in the standard deviations of the whitening.
    On a normal surrogate a quarter of a period, about ``pi / 2`` in all, forgets the
    start. Where the set-up finds successive squares correlated, scales vary, and a
    trajectory crosses a wide tail more slowly. There it takes three times as many
    steps. Their size is uniform from 0.4 to 1.1 of that of a quarter, or, in one of
    eight trajectories, a third of that. The set-up halves the step until trajectories
    are rejected from hardly any draw of the surrogate: steps that are too long for the
    tails keep the chain out of them, and the acceptance rate does not show it. If the
    surrogate is too far from the target for trajectories to pay,
    :func:`delayed_random_walk` is the better choice.

    Where scales of some parameters depend on others, as in a funnel, trajectories
    follow the surrogate in coordinates in which they do not, which the set-up fits to
    its draws. It is the non-centred parametrisation [5]. Where trajectories then still
    leave a site or its square correlated, coordinates are fitted to the gradients of
    the surrogate [6]: locations and logarithms of scales are curves in other
    parameters, which may have wide tails themselves. They describe bananas, and
    hierarchies of few groups, centred ones as well. In coordinates of
    both kinds, one of eight trajectories takes steps of a third of the size, to leave
    places where others are too long.

    Where the set-up finds the surrogate normal, there is neither a trajectory nor a
    first stage. One rotation is the exact flow, and the minibatch decides on the whole
    difference between the target and the normal. If the target is close to it, the
    rotation is slightly longer than a quarter of a period, so that successive draws
    have a correlation of -0.3. If all moves are accepted, such over-relaxed [4] draws
    give means as precise as those of 1.9 times as many independent draws, medians of
    1.4, the 5% and 95% quantiles of 1.05, and standard deviations of 0.8 times as many.
    A rejection repeats a draw. With two rotations per draw (``num_steps=2`` of the
    kernel, or thinning) the correlation is 0.09. If the target is further away, so that
    importance sampling from the normal would have an efficiency below 0.94, the
    rotation leads to an independent draw: an over-relaxed chain would stay longer in a
    skewed tail, because the target has little mass on the other side. For uncorrelated
    draws write :func:`independence`.

    With a trajectory there are also independent draws. A trajectory returns from a
    heavy tail in many steps, and excursions to such a tail are too rare for a run to
    measure how long they are. So a share of the moves draws from a multivariate
    Student-t distribution with 3 degrees of freedom, the centre and the whitening,
    instead of following a trajectory. It passes the same two stages.

    Needs a control variate.

    :param num_steps: the number of steps; each evaluates the surrogate's gradient, as
        does the start. By default it follows from ``step_size`` if that is given, and
        otherwise from the set-up: none, or 1, 2, 4, ..., 512, or three times as many.
    :param step_size: length of a step, in the whitened coordinates. By default the
        steps together make a quarter of a period, or up to three where scales vary and
        ``num_steps`` is not given.
    :param jitter: relative half width of the uniform distribution around ``step_size``
        from which a trajectory draws its own, in ``[0, 1)``. Without jitter, a
        coordinate whose scale is half of that in the whitening is mirrored and never
        mixes. The steps of longer trajectories begin at 0.4 in any case. A single
        rotation on a normal surrogate has no jitter.
    :param independent: the share of the moves that are independent draws, in ``[0,
        1)``. By default 0.2 with at most 16 parameters, and otherwise 0, because too
        few would be accepted. With one or two parameters it is 0.35, or 0.5 if the
        set-up measures that more than 80% of them are accepted. Moves on a normal
        surrogate are a rotation, of which none is replaced.
    :raises TypeError: if an argument is of the wrong kind.
    :raises ValueError: if an argument is out of range.

    **References:**

    1. J. Andres Christen, Colin Fox (2005), *Markov chain Monte Carlo using an
       approximation*, Journal of Computational and Graphical Statistics 14(4).
    2. Radford M. Neal (2011), *MCMC using Hamiltonian dynamics*, Handbook of
       Markov Chain Monte Carlo, chapter 5.
    3. Babak Shahbaba, Shiwei Lan, Wesley O. Johnson, Radford M. Neal (2014), *Split
       Hamiltonian Monte Carlo*, Statistics and Computing 24(3).
    4. Stephen L. Adler (1981), *Over-relaxation method for the Monte Carlo evaluation
       of the partition function for multiquadratic actions*, Physical Review D 23(12).
    5. Omiros Papaspiliopoulos, Gareth O. Roberts, Martin Sköld (2007), *A general
       framework for the parametrization of hierarchical models*, Statistical Science
       22(1).
    6. Aapo Hyvärinen (2005), *Estimation of non-normalized statistical models by score
       matching*, Journal of Machine Learning Research 6.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_minibatch import proposal
        >>> hmc = proposal.surrogate_hmc()
        >>> hmc.uses_surrogate, hmc.adapts_step_size
        (True, False)
        >>> context = proposal.ProposalContext(
        ...     gradient=lambda z: -z,
        ...     whitening=proposal.Whitening(jnp.ones(3)),
        ...     center=jnp.zeros(3),
        ...     log_surrogate=lambda z: -0.5 * (z**2).sum(),
        ... )
        >>> z = jnp.array([3.0, 0.0, -2.0])
        >>> proposed = hmc.propose(jax.random.key(0), z, 1.0, context)
        >>> ratio = context.log_surrogate(z) - context.log_surrogate(proposed.z)
        >>> bool(proposed.moved), bool(proposed.log_q_ratio == ratio)
        (True, True)
    """
    return _SurrogateHMC(num_steps, step_size, jitter, independent)


def delayed_random_walk() -> Proposal:
    """A random walk whose steps pass the surrogate before any data are read.

    The first stage accepts on the surrogate, without data. The minibatch decides on the
    moves that it accepted, by the surrogate's error alone: delayed acceptance [1]. The
    walk is that of :func:`random_walk` with the decision in two parts, and it reads
    rows for only a fraction of its steps.

    The target acceptance rate of the step size counts both stages. Needs a control
    variate.

    **References:**

    1. J. Andres Christen, Colin Fox (2005), *Markov chain Monte Carlo using an
       approximation*, Journal of Computational and Graphical Statistics 14(4).
    2. Chris Sherlock, Alexandre Thiery, Andrew Golightly (2021), *Efficiency of
       delayed-acceptance random walk Metropolis algorithms*, Annals of Statistics
       49(5).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> walk = proposal.delayed_random_walk()
        >>> walk.uses_surrogate, walk.adapts_step_size, walk.target_accept_prob
        (True, True, 0.3)
    """
    return _DelayedRandomWalk()


def independence() -> Proposal:
    """Independent draws from the Laplace approximation, ``N(center, C C')``.

    The draws do not depend on the position, so on a posterior that is nearly normal
    successive draws are nearly independent. If the posterior's tails are heavier than
    normal, the chain gets stuck in them [1]: prefer :func:`student_t` or
    :func:`surrogate_hmc` there.

    Needs a control variate, whose centre it uses.

    **References:**

    1. Luke Tierney (1994), *Markov chains for exploring posterior distributions*,
       Annals of Statistics 22(4).
    2. Kerrie L. Mengersen, Richard L. Tweedie (1996), *Rates of convergence of the
       Hastings and Metropolis algorithms*, Annals of Statistics 24(1).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.independence().adapts_step_size
        False
    """
    return _Independence()


def student_t(df: float = STUDENT_DF) -> Proposal:
    """Independent draws from a multivariate Student-t around the Laplace centre.

    Like :func:`independence`, but with tails heavier than those of most posteriors, so
    that the chain does not get stuck in a tail [1]. The acceptance rate is lower,
    especially in high dimensions.

    Needs a control variate, whose centre it uses.

    :param df: degrees of freedom. The scale matrix is that of the normal, ``C C'``;
        the covariance is ``df / (df - 2)`` times as large.
    :raises TypeError: if ``df`` is not a number.
    :raises ValueError: if ``df`` is not positive.

    **References:**

    1. Kerrie L. Mengersen, Richard L. Tweedie (1996), *Rates of convergence of the
       Hastings and Metropolis algorithms*, Annals of Statistics 24(1).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.student_t(df=4.0) == proposal.student_t(4)
        True
    """
    return _StudentT(df)


def preconditioned_crank_nicolson(beta: float | None = None) -> Proposal:
    """Steps that preserve the Laplace approximation (pCN).

    ``z' = c + sqrt(1 - beta ** 2) (z - c) + beta C xi`` is reversible with respect to
    ``N(c, C C')`` [1], so that the decision depends only on the posterior's departure
    from it. At ``beta = 1`` this is :func:`independence`. Smaller steps are still
    accepted where the posterior is further from normal, whatever the dimension.

    Needs a control variate, whose centre it uses.

    :param beta: length of a step, in ``(0, 1]``; by default the step size, which warmup
        adapts and which is capped at one.
    :raises TypeError: if ``beta`` is not a number.
    :raises ValueError: if ``beta`` is out of range.

    **References:**

    1. Simon L. Cotter, Gareth O. Roberts, Andrew M. Stuart, David White (2013),
       *MCMC methods for functions: modifying old algorithms to make them faster*,
       Statistical Science 28(3).

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import proposal
        >>> proposal.preconditioned_crank_nicolson().adapts_step_size
        True
        >>> proposal.preconditioned_crank_nicolson(beta=0.5).adapts_step_size
        False
    """
    return _PreconditionedCrankNicolson(beta)
