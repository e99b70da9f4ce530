"""Stochastic gradient MCMC: Langevin dynamics without an accept/reject step.

A draw of every kernel here is ``num_steps`` steps of a ``dynamics.*`` on minibatch
gradients. The draws are from the target in the limit of step size zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform

from numpyro_minibatch import dynamics as dynamics_
from numpyro_minibatch._internal.checks import (
    check_count,
    check_instance,
)
from numpyro_minibatch._internal.keys import unwrapped
from numpyro_minibatch.batch import BatchSize, Scheme
from numpyro_minibatch.control_variate import Taylor
from numpyro_minibatch.dynamics import Dynamics
from numpyro_minibatch.estimate import Reader
from numpyro_minibatch.kernels._shared.arguments import read_step_and_friction
from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.contract import Pieces, Start
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.kernels._shared.gradient_steps import NoiseEstimator, follow
from numpyro_minibatch.kernels._shared.pieces import SteppedKernel
from numpyro_minibatch.preconditioner import (
    Preconditioner,
    ScaleState,
    Whitening,
    known,
)
from numpyro_minibatch.schedule import as_schedule
from numpyro_minibatch.target import Target

__all__ = ["SGHMC", "SGLD", "SGMCMC", "SGNHT", "SGMCMCState"]

_WHITE_STEPS = 10  # steps of a draw that leave its start, in whitened coordinates


@with_named_items
class SGMCMCState(NamedTuple):
    """The state of a chain of :class:`SGMCMC`.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - key of the noise to come.
    - **index_key** - key of the rows: gradient step ``t`` reads the rows of
      ``fold_in(index_key, t)``.
    - **surrogate** - with a control variate, the surrogate.
    - **memory** - the auxiliary variables of the dynamics: momentum, thermostat.
    - **scale_state** - the preconditioner and its running mean of squared gradients.
    - **noise_estimator** - the measured noise of the gradients.
    - **step_size** - step size of the draw's last gradient step.
    - **diverging** - whether a number was not finite after the draw's steps; then ``z``
      is ``last_finite``, with fresh momentum.
    - **last_finite** - the start of the last draw whose steps were all finite. The end
      of that draw may itself have no finite gradient: SGLD reads it one step later.
    - **lp_estimate** - minibatch estimate of the target's log density where the draw's
      last gradient was taken.
    - **noise_ratio** - variance of the noise that a step injects over that of the
      gradient's, in the coordinate where it is smallest, as measured every hundred
      draws. Its inverse is the relative error of the temperature there, except with a
      thermostat. In high dimensions the minimum is biased downwards until some
      measurements have been averaged.
    - **num_rows** - rows of data read to make the draw.
    """

    i: Array
    z: Any
    rng_key: Array
    index_key: Array
    surrogate: Any
    memory: Any
    scale_state: ScaleState
    noise_estimator: NoiseEstimator
    step_size: Array
    diverging: Array
    last_finite: Any
    lp_estimate: Array
    noise_ratio: Array
    num_rows: Array


class SGMCMC(SteppedKernel, MinibatchKernel):
    """Stochastic gradient MCMC with any of the dynamics of the package.

    :class:`SGLD`, :class:`SGHMC` and :class:`SGNHT` are presets of it. The errors of a
    finite step size and of gradient noise are not corrected; ``noise_ratio`` in
    ``sample_stats`` and :func:`diagnose` report the size of the second.

    :param model: a NumPyro model with a data plate.
    :param dynamics: one of ``dynamics.*``.
    :param target: a :class:`~numpyro_minibatch.Target` instead of a model.
    :param batch_size: rows of a batch, or ``{plate: rows}``; by default each plate's
        own ``subsample_size``.
    :param batch: a ``batch.*`` scheme instead of ``batch_size``.
    :param step_size: a number, or a schedule: a function of the number of gradient
        steps made, warmup included, such as those of optax or
        :func:`schedule.polynomial`. Without one, there is a control variate, and its
        surrogate provides the scales of the posterior: the step size is 0.3 in whitened
        coordinates, or 0.05 for Langevin dynamics.
    :param num_steps: gradient steps per draw, each on a batch of its own; by default
        10, or 1 for Langevin dynamics with a ``step_size``.
    :param preconditioner: ``"rmsprop"`` to scale the coordinates in warmup by the root
        mean square of the gradients, or a :func:`preconditioner.rmsprop` with settings.
        It is frozen after warmup, so that it adds no bias.
    :param temperature: temperature ``T`` of the likelihood. Step sizes keep their
        meaning: the likelihood's gradient is not divided, noise and prior are
        multiplied.
    :param temper_prior: whether the prior has the same temperature.
    :param control_variate: ``"taylor1"``, ``"taylor2"`` or what
        :mod:`~numpyro_minibatch.control_variate` builds: batches then estimate only the
        gradients of the rows' residuals, which are far less noisy if there is one mode.
        Coordinates are whitened by the surrogate's covariance. By default ``"taylor2"``
        if there is no ``step_size``, and otherwise none.
    :param init_strategy: a per-site initialisation function of NumPyro.
    :param rows: ``{"X": 0, "y": 0}``: the arguments of the model that have the rows,
        and their axes, if the model does not index its data and the arguments cannot
        be found by their shapes; see :class:`MinibatchKernel`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import SGMCMC, dynamics

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = SGMCMC(model, dynamics=dynamics.sghmc(50.0), step_size=1e-3)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    draws_once_a_step = True
    keeps_target = False
    _noise_temperature: Any = None  # see `with_noise_temperature`

    def __init__(
        self,
        model: Callable | None = None,
        *,
        dynamics: Dynamics,
        target: Target | None = None,
        batch_size: BatchSize | None = None,
        batch: Scheme | None = None,
        step_size: float | Callable | None = None,
        num_steps: int | None = None,
        preconditioner: str | Preconditioner | None = None,
        temperature: float = 1.0,
        temper_prior: bool = False,
        control_variate: str | Taylor | None = None,
        init_strategy: Callable = init_to_uniform,
        rows: Mapping[str, Any] | None = None,
    ) -> None:
        name = self._who
        if step_size is None and control_variate is None:
            if preconditioner is not None:
                raise ValueError(
                    f"{name}(preconditioner={preconditioner!r}) needs a step_size: "
                    "there is no acceptance rate to adapt one to. Leave out the "
                    "preconditioner, so that a control variate provides the scales of "
                    "the posterior; or write a step_size, and divide it by ten until "
                    "the results stop changing."
                )
            # no acceptance rate to adapt to, but scales of the posterior will do
            control_variate = "taylor2"
        super().__init__(
            model,
            target=target,
            batch_size=batch_size,
            batch=batch,
            temperature=temperature,
            temper_prior=temper_prior,
            control_variate=control_variate,
            init_strategy=init_strategy,
            rows=rows,
        )
        check_instance(name, "dynamics", dynamics, Dynamics, "sgld()")
        if not dynamics.injected(1.0, 1.0) > 0.0:
            raise ValueError(
                f"{name}(dynamics={dynamics!r}) injects no noise, so the only noise is "
                "that of the gradients. Write a positive friction, or AMAGOLD(model, "
                "friction=0.0), which corrects for theirs."
            )
        if preconditioner is not None and self._control_variate is not None:
            raise ValueError(
                f"{name} got a preconditioner and a control_variate, which whitens the "
                "coordinates by the covariance of its surrogate. Leave one of them out."
            )
        if num_steps is None:
            white = step_size is None
            num_steps = _WHITE_STEPS if white else dynamics.default_num_steps
        if step_size is None:
            step_size = dynamics.white_step_size
        check_count(name, "num_steps", num_steps)
        self._dynamics = dynamics
        self._step_size = as_schedule(name, step_size)
        self.num_steps = int(num_steps)
        self._preconditioner = known(name, preconditioner)

    @property
    def in_full_precision(self) -> bool:
        """Whether a step multiplies matrices in full precision."""
        # without a control variate, rounding is far smaller than the gradients' noise
        return self.control_variate is not None

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that the driver collects."""
        return (
            "z",
            "diverging",
            "step_size",
            "lp_estimate",
            "noise_ratio",
            "num_rows",
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`~numpyro_minibatch.diagnose` needs."""
        return {**super().facts, **self._dynamics.facts, "num_steps": self.num_steps}

    def get_diagnostics_str(self, state: SGMCMCState) -> str:
        """The text of the progress bar."""
        return (
            f"step size {jnp.mean(state.step_size):.2e}. "
            f"lp={jnp.mean(state.lp_estimate):.4g}. "
            f"rows={jnp.mean(state.num_rows):.0f}"
        )

    def first_state(self, start: Start) -> SGMCMCState:
        """The state of a chain before its first draw."""
        key, index_key, momentum_key = jax.random.split(start.key, 3)
        flat = start.flat
        root = None if self._control_variate is None else start.surrogate.root
        zero = jnp.zeros((), flat.dtype)
        return SGMCMCState(
            i=jnp.int32(0),
            z=start.z,
            rng_key=key,
            index_key=index_key,
            surrogate=(),
            memory=self._dynamics.init(momentum_key, flat, self.temperature),
            scale_state=self._preconditioner.init(flat, root),
            noise_estimator=NoiseEstimator.init(flat),
            step_size=zero,
            diverging=jnp.array(False),
            last_finite=start.z,
            lp_estimate=zero,
            noise_ratio=zero,
            num_rows=jnp.zeros_like(self._gradient_rows(start.reader)),
        )

    def arrive(self, target: Target, here: Any, there: Any, key: Array) -> Any:
        """A rung's state with the position of another; see :class:`Tempered`."""
        momentum_key, row_key = jax.random.split(key)
        z, unravel = ravel_pytree(there.z)
        memory = self._dynamics.refresh(
            momentum_key, z, here.memory, there.memory, self.temperature
        )
        if self._dynamics.keeps_force:
            # the force of the other rung includes the prior at another temperature
            reader = self.energy(self.reader(target, unravel, here.surrogate))
            memory = memory._replace(force=reader.gradient(row_key, z))
        return here._replace(z=there.z, last_finite=there.last_finite, memory=memory)

    def transition(self, target: Target, state: SGMCMCState) -> SGMCMCState:
        """One draw of one chain."""
        moved, measure_key = self.advance(target, state)
        z, _ = ravel_pytree(state.z)
        return self._measured(target, moved, measure_key, z, state.i, self.num_warmup)

    def with_noise_temperature(self, temperature: Any) -> Self:
        """The same kernel with noise of another temperature; see :class:`NoiseDriven`.

        :param temperature: 0 makes it gradient descent; it may be traced.
        """
        other = copy.copy(self)
        other._noise_temperature = temperature
        return other

    def refreshed(self, key: Array, state: SGMCMCState, temperature: Any) -> Any:
        """Momentum and thermostat at their equilibrium, with the force unchanged."""
        z, _ = ravel_pytree(state.z)
        first, second = jax.random.split(key)
        fresh = self._dynamics.init(first, z, temperature)
        return self._dynamics.refresh(second, z, fresh, state.memory, temperature)

    @property
    def step_size_order(self) -> int:
        """The power of the step size that multiplies a gradient."""
        return self._dynamics.order

    def most_rows(self) -> int:
        """A bound on the rows that one step reads."""
        return 2 * sum(self.batch_sizes.values())

    def completed(
        self,
        target: Target,
        state: SGMCMCState,
        pieces: Pieces,
        key: Array,
        i: Array,
        num_warmup: int,
    ) -> SGMCMCState:
        """The state after the last piece of a draw; see :class:`InPieces`."""
        z, _ = ravel_pytree(state.z)
        state = state._replace(num_rows=pieces.num_rows)
        return self._measured(target, state, key, z, i, num_warmup)

    @property
    def _temperature_of_noise(self) -> Any:
        """The temperature of the noise, by default that of the target."""
        given = self._noise_temperature
        return self.temperature if given is None else given

    def _step_size_at(self, count: Array) -> Any:
        step_size = self._step_size(count)
        return (
            step_size
            if self._step_schedule is None
            else step_size * self._step_schedule(count)
        )

    def advance(self, target: Target, state: SGMCMCState) -> tuple[SGMCMCState, Array]:
        """The steps of a draw, without measurements; see :class:`InPieces`."""
        rng_key, noise_key, measure_key, restart_key = jax.random.split(
            state.rng_key, 4
        )
        z, unravel = ravel_pytree(state.z)
        dynamics, noise_temperature = self._dynamics, self._temperature_of_noise
        reader = self.energy(self.reader(target, unravel, state.surrogate))
        start = state.i * self.num_steps
        in_warmup = state.i < self.num_warmup

        moved, scale_state = follow(
            dynamics,
            reader,
            Whitening(state.scale_state.root),
            self._step_size_at,
            noise_temperature,
            self.num_steps,
            start,
            (noise_key, state.index_key),
            z,
            state.memory,
            lambda seen, gradient: self._preconditioner.observe(
                seen, gradient, in_warmup
            ),
            state.scale_state,
        )
        found = jax.tree.leaves((moved.z, moved.memory, moved.log_density))
        fine = jnp.stack([jnp.isfinite(x).all() for x in found]).all()
        # a branch, so that a new momentum is drawn only if a chain needs it
        last_finite = jnp.where(fine, z, ravel_pytree(state.last_finite)[0])
        bits, wrap = unwrapped(restart_key)
        z, memory = jax.lax.cond(
            fine,
            lambda: (moved.z, moved.memory),
            lambda: (
                last_finite,
                dynamics.init(wrap(bits), last_finite, noise_temperature),
            ),
        )
        last = start + self.num_steps - 1
        return state._replace(
            i=state.i + 1,
            z=unravel(z),
            rng_key=rng_key,
            memory=memory,
            scale_state=scale_state,
            step_size=jnp.asarray(self._step_size_at(last), z.dtype),
            diverging=~fine,
            last_finite=unravel(last_finite),
            lp_estimate=moved.log_density / self.temperature,
            num_rows=self._gradient_rows(reader),
        ), measure_key

    def _measured(
        self,
        target: Target,
        state: SGMCMCState,
        key: Array,
        z: Array,
        i: Array,
        num_warmup: int,
    ) -> SGMCMCState:
        """Measure the noise of the gradients at regular intervals.

        :param state: the state after a draw.
        :param key: PRNG key of the rows.
        :param z: where to measure it, flat.
        :param i: draws made before.
        :param num_warmup: number of warmup draws.
        """
        _, unravel = ravel_pytree(state.z)
        reader = self.energy(self.reader(target, unravel, state.surrogate))
        whitening = Whitening(state.scale_state.root)
        estimator, rows = state.noise_estimator.updated(
            reader, key, z, whitening, i, num_warmup
        )
        ratio = estimator.ratio(
            self._dynamics, state.step_size, self._temperature_of_noise
        )
        return state._replace(
            noise_estimator=estimator,
            noise_ratio=ratio,
            num_rows=rows + state.num_rows,
        )

    def arrival_rows(self, reader: Reader) -> int:
        """Rows that :meth:`arrive` reads; see :class:`Tempered`."""
        return reader.gradient_rows if self._dynamics.keeps_force else 0

    def _gradient_rows(self, reader: Reader) -> Array:
        """Rows that a draw's gradients read; a float if int32 could overflow."""
        number = self.num_steps * reader.gradient_rows
        return jnp.asarray(number, jnp.int32 if number < 2**30 else jnp.float32)


class SGLD(SGMCMC):
    """Stochastic gradient Langevin dynamics [1]: gradient steps with noise.

    :param model: a NumPyro model with a data plate.
    :param step_size: the ``h`` of ``z + h * force + N(0, 2 h T)``, half of the paper's
        epsilon, or a schedule. The coordinates are unconstrained, and the force is that
        of all rows.
    :param settings: the other arguments of :class:`SGMCMC`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Max Welling, Yee Whye Teh (2011), *Bayesian learning via stochastic gradient
       Langevin dynamics*, ICML.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import SGLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = SGLD(model, step_size=1e-6)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        step_size: float | Callable | None = None,
        **settings: Any,
    ) -> None:
        _no_dynamics(self._who, settings)
        super().__init__(
            model, dynamics=dynamics_.sgld(), step_size=step_size, **settings
        )


class SGHMC(SGMCMC):
    """Stochastic gradient Hamiltonian Monte Carlo [1]: gradient steps with momentum.

    :param model: a NumPyro model with a data plate.
    :param step_size: step size of position and momentum, or a schedule.
    :param friction: the decay rate of the momentum; see :func:`dynamics.sghmc`.
    :param h: ``step_size ** 2``, the learning rate in the form of gradient descent with
        momentum, instead of ``step_size``; then ``b`` must be given too.
    :param b: ``step_size * friction / 2``: the momentum of gradient descent is ``(1 -
        b) / (1 + b)``.
    :param integrator: ``"baoab"``, ``"midpoint"`` or ``"euler"``; see
        :func:`dynamics.sghmc`.
    :param settings: the other arguments of :class:`SGMCMC`; ``num_steps`` is 10.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Tianqi Chen, Emily B. Fox, Carlos Guestrin (2014), *Stochastic gradient
       Hamiltonian Monte Carlo*, ICML.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import SGHMC

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = SGHMC(model, step_size=1e-3, friction=50.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        step_size: float | Callable | None = None,
        friction: float | None = None,
        h: float | None = None,
        b: float | None = None,
        integrator: dynamics_.Integrator = "baoab",
        **settings: Any,
    ) -> None:
        _no_dynamics(self._who, settings)
        step_size, friction = read_step_and_friction(
            self._who, step_size, friction, h, b
        )
        if b is not None:
            # the same friction, held per step where the step size changes
            dynamics = dynamics_.sghmc(2.0 * float(b), integrator, per_step=True)
        else:
            friction = 1.0 if friction is None else friction
            dynamics = dynamics_.sghmc(friction, integrator)
        super().__init__(model, dynamics=dynamics, step_size=step_size, **settings)


class SGNHT(SGMCMC):
    """Stochastic gradient Nosé-Hoover thermostat [1]: friction that adapts to noise.

    Gradient noise that is the same in all coordinates does not bias the draws, however
    large. The current friction is the field ``memory.friction`` of the state.

    :param model: a NumPyro model with a data plate.
    :param step_size: step size of position, momentum and thermostat, or a schedule.
    :param friction: rate of the injected noise; see :func:`dynamics.nose_hoover`.
    :param thermal_mass: the thermostat's mass per coordinate.
    :param integrator: ``"symmetric"`` or ``"euler"``.
    :param settings: the other arguments of :class:`SGMCMC`; ``num_steps`` is 10.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Nan Ding, Youhan Fang, Ryan Babbush, Changyou Chen, Robert D. Skeel, Hartmut
       Neven (2014), *Bayesian sampling using stochastic gradient thermostats*, NeurIPS.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import SGNHT

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = SGNHT(model, step_size=1e-3, friction=50.0)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        step_size: float | Callable | None = None,
        friction: float = 1.0,
        thermal_mass: float = 1.0,
        integrator: Any = "symmetric",
        **settings: Any,
    ) -> None:
        _no_dynamics(self._who, settings)
        dynamics = dynamics_.nose_hoover(friction, thermal_mass, integrator)
        super().__init__(model, dynamics=dynamics, step_size=step_size, **settings)


def _no_dynamics(who: str, settings: dict[str, Any]) -> None:
    if "dynamics" in settings:
        raise TypeError(
            f"{who} has its own dynamics; for another choice write "
            "SGMCMC(model, dynamics=...)."
        )
