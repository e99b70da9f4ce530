"""AMAGOLD: stochastic gradient HMC with one Metropolis test for many gradient steps.

Each of the ``num_steps`` inner steps reads a separate batch. The effects of these
gradients on the momentum are summed along the way, and

    accept  iff  test(log_ratio(target, z, z*) + work / T)

corrects for the discretisation and for the noise of the gradients together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_uniform

from numpyro_minibatch import dynamics, estimate
from numpyro_minibatch._internal.checks import (
    check_count,
    check_positive,
    describe,
)
from numpyro_minibatch.accept import AcceptanceTest, Decision, SequentialTest
from numpyro_minibatch.batch import BatchSize, Scheme, Weighted
from numpyro_minibatch.control_variate import Taylor
from numpyro_minibatch.dynamics import Moved
from numpyro_minibatch.estimate import Comparison, Estimate, Exact, Reader, Shared
from numpyro_minibatch.kernels._shared.adaptation import (
    MOST_STEPS,
    AdaptedKernel,
    AdaptState,
    advanced,
)
from numpyro_minibatch.kernels._shared.arguments import (
    read_acceptance,
    read_flags,
    read_step_and_friction,
    read_target_accept_prob,
)
from numpyro_minibatch.kernels._shared.base import MinibatchKernel
from numpyro_minibatch.kernels._shared.contract import Start
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.kernels._shared.gradient_steps import NoiseEstimator, follow
from numpyro_minibatch.preconditioner import Whitening
from numpyro_minibatch.target import Target

__all__ = ["AMAGOLD", "AMAGOLDState"]

_ALL = 2**31 - 1  # more rows than any data set has
_FEWEST = 100  # rows of a batch at high temperatures


@with_named_items
class AMAGOLDState(NamedTuple):
    """The state of a chain of :class:`AMAGOLD`.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - key of momenta, noise and decisions to come.
    - **index_key** - key of the rows: gradient step ``t`` reads the rows of
      ``fold_in(index_key, t)``.
    - **surrogate** - with a control variate, the surrogate.
    - **momentum** - momentum in the whitened coordinates, flat.
    - **memory** - what the exact correction keeps: the rows' log likelihoods at ``z``.
    - **adapt_state** - step size and mass matrix with their adaptation.
    - **noise_estimator** - the measured noise of the gradients.
    - **accept_prob** - acceptance probability of the draw.
    - **mean_accept_prob** - the same averaged over warmup, or since its end.
    - **step_size** - step size with which the draw was made.
    - **diverging** - whether the log density at ``z`` is not finite, as far as the
      rows read for the draw can tell.
    - **lp_estimate** - the target's log density at ``z``; an estimate if the correction
      reads a minibatch.
    - **log_ratio** - log ratio that was tested, including the work.
    - **log_ratio_variance** - its estimated variance; 0 for an exact correction.
    - **reliable** - whether the noise was inside the test's domain.
    - **noise_ratio** - variance of the noise that a step injects over that of the
      gradient's, in the coordinate where it is smallest.
    - **num_steps** - gradient steps of the draw.
    - **num_rows** - rows of data read to make the draw.
    """

    i: Array
    z: Any
    rng_key: Array
    index_key: Array
    surrogate: Any
    momentum: Array
    memory: Any
    adapt_state: AdaptState
    noise_estimator: NoiseEstimator
    accept_prob: Array
    mean_accept_prob: Array
    step_size: Array
    diverging: Array
    lp_estimate: Array
    log_ratio: Array
    log_ratio_variance: Array
    reliable: Array
    noise_ratio: Array
    num_steps: Array
    num_rows: Array


class AMAGOLD(AdaptedKernel, MinibatchKernel):
    """Amortized Metropolis-adjusted stochastic gradient HMC [1].

    A draw is ``num_steps`` noisy gradient steps, each on a batch of its own, and one
    Metropolis test that makes the draws exact for the target, whatever the noise of the
    gradients, the step size and the friction. That test reads all rows once per draw,
    or, with ``correction="minibatch"``, a batch.

    Special cases: with ``batch=batch.full()`` it is Langevin dynamics with an amortized
    correction (L2MC); with ``friction=0.0`` as well it is Hamiltonian Monte Carlo; with
    ``correction=None`` it is SGHMC.

    :param model: a NumPyro model with a data plate.
    :param target: a :class:`~numpyro_minibatch.Target` instead of a model.
    :param batch_size: rows of a gradient, or ``{plate: rows}``; by default each plate's
        own ``subsample_size``, and without one as many as the temperature requires:
        at ``T = 1`` all rows.
    :param batch: a ``batch.*`` scheme instead of ``batch_size``.
    :param step_size: (initial) step size, in whitened coordinates; 0.1 by default,
        with a control variate 0.3.
    :param friction: the rate at which momentum decays, twice the paper's ``beta``. By
        default 0 if the length of trajectories adapts and each has a momentum of its
        own, and otherwise 0.5, the paper's value.
    :param momentum_variance: the paper's ``sigma ** 2``: variance of the momentum. It
        only changes the unit of ``step_size`` and ``friction``: a step moves by
        ``step_size / sigma`` times a standard normal momentum.
    :param h: ``step_size ** 2 / momentum_variance``, the other form of [1], which looks
        like gradient descent with momentum; then ``b`` must be given too, and neither
        step size nor mass matrix adapts unless the arguments for it request this.
    :param b: ``step_size * friction / 2``.
    :param num_steps: gradient steps of one draw. By default warmup adapts the length
        of the trajectories: they are as long as they can be before they turn back, and
        each draw takes a number of steps between 1 and that, at most 1,000. If the step
        size does not adapt, it is 10.
    :param resample_momentum: draw a new momentum for each draw: the reversible variant.
        Without it the momentum continues, and is reversed if a draw is rejected. In
        warmup, where chains would then move back and forth, it is always drawn anew.
    :param correction: ``"exact"`` (by default, without a control variate) reads all
        rows at the end of each draw; ``"minibatch"`` (by default with one) a batch as
        large as a gradient's, a ``batch.*`` scheme a batch of its own; ``None`` accepts
        every finite proposal.
    :param acceptance: an ``accept.*`` test; by default :func:`accept.penalty`, which is
        the Metropolis test if there is no noise.
    :param adapt_step_size: adapt the step size in warmup to ``target_accept_prob``; by
        default unless ``h`` is given.
    :param adapt_mass_matrix: adapt the mass matrix in warmup; by default unless ``h``
        is given.
    :param dense_mass: full mass matrix rather than a diagonal one.
    :param target_accept_prob: by default 0.8, under a Barker test 0.4.
    :param temperature: temperature ``T`` of the likelihood.
    :param temper_prior: whether the prior has the same temperature.
    :param control_variate: ``"taylor1"``, ``"taylor2"`` or what
        :mod:`~numpyro_minibatch.control_variate` builds: gradients and correction read
        the rows' residuals, which makes a correction on a minibatch accurate at
        temperature 1 near one mode.
    :param init_strategy: a per-site initialisation function of NumPyro.
    :param rows: ``{"X": 0, "y": 0}``: the arguments of the model that have the rows,
        and their axes, if the model does not index its data and the arguments cannot
        be found by their shapes; see :class:`MinibatchKernel`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or both of a pair are given.

    **References:**

    1. Ruqi Zhang, A. Feder Cooper, Christopher De Sa (2020), *AMAGOLD: amortized
       Metropolis adjustment for efficient stochastic gradient MCMC*, AISTATS.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import AMAGOLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = AMAGOLD(model)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    draws_once_a_step = True

    def __init__(
        self,
        model: Callable | None = None,
        *,
        target: Target | None = None,
        batch_size: BatchSize | None = None,
        batch: Scheme | None = None,
        step_size: float | None = None,
        friction: float | None = None,
        momentum_variance: float = 1.0,
        h: float | None = None,
        b: float | None = None,
        num_steps: int | None = None,
        resample_momentum: bool = True,
        correction: Literal["exact", "minibatch", "default"]
        | Scheme
        | None = "default",
        acceptance: AcceptanceTest | None = None,
        adapt_step_size: bool | None = None,
        adapt_mass_matrix: bool | None = None,
        dense_mass: bool = False,
        target_accept_prob: float | None = None,
        temperature: float = 1.0,
        temper_prior: bool = False,
        control_variate: str | Taylor | None = None,
        init_strategy: Callable = init_to_uniform,
        rows: Mapping[str, Any] | None = None,
    ) -> None:
        name = self._who
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
        check_positive(name, "momentum_variance", momentum_variance)
        adapt_step_size = h is None if adapt_step_size is None else adapt_step_size
        if adapt_mass_matrix is None:
            adapt_mass_matrix = h is None
        step_size, friction = read_step_and_friction(name, step_size, friction, h, b)
        if step_size is None:
            step_size = 0.1 if self._control_variate is None else 0.3
        check_positive(name, "step_size", step_size)
        if num_steps is not None:
            check_count(name, "num_steps", num_steps)
        (
            self._resample_momentum,
            adapt_step_size,
            self._adapt_mass_matrix,
            self._dense_mass,
        ) = read_flags(
            name,
            resample_momentum=resample_momentum,
            adapt_step_size=adapt_step_size,
            adapt_mass_matrix=adapt_mass_matrix,
            dense_mass=dense_mass,
        )
        self._adapt_step_size = adapt_step_size and correction is not None
        self._adapt_length = num_steps is None and self._adapt_step_size
        if friction is None:
            # a new momentum for each trajectory is enough; friction would turn a long
            # trajectory into a random walk
            friction = 0.0 if self._adapt_length and self._resample_momentum else 0.5
        check_positive(name, "friction", friction, zero=True)
        if isinstance(correction, str) and correction == "default":
            correction = "exact" if self._control_variate is None else "minibatch"
        known = self._control_variate is not None
        if isinstance(correction, Weighted) or (
            isinstance(correction, Scheme) and known
        ):
            raise ValueError(
                f"{name}(correction={correction!r}): with a control variate gradients "
                "and correction share one design of the rows, by how much they matter. "
                'Pass it as batch=, and correction="minibatch".'
            )
        is_named = isinstance(correction, str) and correction in ("exact", "minibatch")
        if not (is_named or correction is None or isinstance(correction, Scheme)):
            raise ValueError(
                f'{name}(correction=...) must be "exact", "minibatch", a scheme such '
                f"as batch.growing(1000), or None, got {describe(correction)}."
            )
        self._acceptance = read_acceptance(name, acceptance)
        if isinstance(self._acceptance, SequentialTest):
            raise ValueError(
                f"{name}(acceptance={self._acceptance!r}) decides when it has read "
                "enough rows of one comparison. Write acceptance=accept.penalty()."
            )
        self._target_accept_prob = read_target_accept_prob(
            name,
            target_accept_prob,
            0.8 * self._acceptance.highest_accept_prob,
            self._acceptance,
        )
        if not friction and not resample_momentum:
            raise ValueError(
                f"{name}(friction=0.0, resample_momentum=False) never forgets its "
                "momentum. Write a positive friction, or resample_momentum=True."
            )
        # h and b include the variance of the momentum
        sigma = float(momentum_variance) ** 0.5 if h is None else 1.0
        self._step_size = float(step_size) / sigma
        self._dynamics = dynamics.sghmc(float(friction) * sigma, "midpoint")
        self.num_steps = 10 if num_steps is None else int(num_steps)
        self._correction = correction

    def _setup(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Choose the batch of a gradient if neither the user nor the model does.

        In coordinates in which the posterior is white, a gradient of ``m`` of ``N``
        rows has noise of variance ``N / (m T)``, as the information equality says. On a
        trajectory of length ``t`` in steps of ``h`` the noise gives the log ratio a
        variance of ``h t D N / (m T)``. It should be below 1 at a step that the
        discretisation allows, about 1 / 2 at ``t = pi / 2``. At ``T = 1`` this requires
        all rows: batches would read ``t ** 2 * D * N`` rows in all, whatever their
        size.
        """
        super()._setup(args, kwargs)
        layout = self.layout
        if not layout.automatic or self._control_variate is not None:
            return
        # the dimension of a target written by hand is not known yet
        dim = sum(math.prod(shape) for shape in layout.shapes) or 1
        share = 0.75 * dim / self._temperature
        widths = {
            name: size if share > 0.5 else min(size, max(_FEWEST, int(share * size)))
            for name, size in layout.plates
        }
        self._learn(layout=layout._replace(widths=tuple(widths.items())))

    @property
    def _rows_unless_said(self) -> int | None:
        return super()._rows_unless_said or _ALL

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that the driver collects."""
        return (
            "z",
            "diverging",
            "accept_prob",
            "step_size",
            "lp_estimate",
            "log_ratio",
            "log_ratio_variance",
            "reliable",
            "noise_ratio",
            "num_steps",
            "num_rows",
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that define what the kernel does, for records."""
        settings = {**super().settings, "correction": repr(self._correction)}
        if self._correction is None:
            del settings["acceptance"]  # nothing is decided
            return settings
        return {
            **settings,
            "estimate": repr(self._estimator),
            "max_variance": self._acceptance.max_variance,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that :func:`~numpyro_minibatch.diagnose` needs."""
        facts = {
            **super().facts,
            **self._dynamics.facts,
            "num_steps": 0 if self._adapt_length else self.num_steps,
            "has_step_size": True,
            "adapts_length": self._adapt_length,
        }
        if self._correction is None:
            return facts
        return {
            **facts,
            **self._acceptance.facts,
            **self._estimator.facts,
            "target_accept_prob": self._target_accept_prob,
        }

    @property
    def _estimator(self) -> Exact | Shared:
        return estimate.exact() if self._correction == "exact" else estimate.shared()

    def first_state(self, start: Start) -> AMAGOLDState:
        """The state of a chain before its first draw."""
        key, index_key, momentum_key, memory_key = jax.random.split(start.key, 4)
        flat = start.flat
        adapt_state = self._adaptation.init(flat, self._step_size)
        if self._control_variate is not None:
            adapt_state = adapt_state.with_root(start.surrogate.root)
        zero = jnp.zeros((), flat.dtype)
        return AMAGOLDState(
            i=jnp.int32(0),
            z=start.z,
            rng_key=key,
            index_key=index_key,
            surrogate=(),
            momentum=self._dynamics.init(momentum_key, flat, self.temperature),
            memory=self._estimator.init(start.reader, memory_key, flat),
            adapt_state=adapt_state,
            noise_estimator=NoiseEstimator.init(flat),
            accept_prob=zero,
            mean_accept_prob=zero,
            step_size=adapt_state.step_size,
            diverging=jnp.array(False),
            lp_estimate=zero,
            log_ratio=zero,
            log_ratio_variance=zero,
            reliable=jnp.array(False),
            noise_ratio=zero,
            num_steps=jnp.int32(0),
            num_rows=jnp.zeros((), self._rows_dtype(start.reader)),
        )

    def arrive(self, target: Target, here: Any, there: Any, key: Array) -> Any:
        """A rung's state with the position of another; see :class:`Tempered`."""
        momentum = self._dynamics.init(key, here.momentum, self.temperature)
        return here._replace(z=there.z, memory=there.memory, momentum=momentum)

    def transition(self, target: Target, state: AMAGOLDState) -> AMAGOLDState:
        """One draw of one chain."""
        names = ("rng", "momentum", "noise", "measure", "rows", "accept")
        keys = dict(zip(names, jax.random.split(state.rng_key, 6), strict=True))
        z, unravel = ravel_pytree(state.z)
        reader = self.reader(target, unravel, state.surrogate)
        energy, temperature = self.energy(reader), self.temperature
        whitening = Whitening(state.adapt_state.root)
        step_size = self._adaptation.step_size(state.i, state.adapt_state)

        def resample() -> Array:
            return self._dynamics.init(keys["momentum"], z, temperature)

        # in warmup too many draws are rejected to reverse the momentum each time
        momentum = (
            resample()
            if self._resample_momentum
            else jax.lax.cond(
                state.i < self.num_warmup, resample, lambda: state.momentum
            )
        )

        def constant(n: Array) -> Array:
            return step_size

        number: int | Array = self.num_steps
        if self._adapt_length:
            number = self._adaptation.num_steps(state.i, state.adapt_state)
        end, _ = follow(
            self._dynamics,
            energy,
            whitening,
            constant,
            temperature,
            number,
            state.i * self._most_steps,
            (keys["noise"], state.index_key),
            z,
            momentum,
        )
        decision, seen = self._decide(reader, keys, z, end, state)
        if self._adapt_length:
            before, after = seen.log_density
            decision = self._adaptation.descends(state.i, after - before, decision)
        # a density that overflows would be accepted and never left again; the
        # estimate is NaN where an impossible start is left, which is fine
        fine = seen.log_density[1] != jnp.inf
        decision = decision._replace(
            accept=decision.accept & fine,
            accept_prob=jnp.where(fine, decision.accept_prob, 0.0),
        )
        progress = whitening.whiten(end.z - z) @ end.memory
        # without a new momentum, the reverse path starts with this one reversed
        z, momentum, memory, lp = jax.tree.map(
            lambda new, old: jnp.where(decision.accept, new, old),
            (end.z, end.memory, seen.memory, seen.log_density[1]),
            (z, -momentum, state.memory, seen.log_density[0]),
        )
        estimator, rows = state.noise_estimator.updated(
            energy, keys["measure"], z, whitening, state.i, self.num_warmup
        )
        return advanced(
            self._adaptation,
            state._replace(
                z=unravel(z),
                rng_key=keys["rng"],
                momentum=momentum,
                memory=memory,
                noise_estimator=estimator,
                accept_prob=decision.accept_prob,
                diverging=~jnp.isfinite(lp),
                lp_estimate=lp,
                log_ratio=jnp.asarray(seen.log_ratio.value),
                log_ratio_variance=seen.noise,
                reliable=decision.reliable,
                noise_ratio=estimator.ratio(self._dynamics, step_size, temperature),
                num_steps=jnp.asarray(number, jnp.int32),
                num_rows=seen.num_rows + rows + self._gradient_rows(reader, number),
            ),
            z,
            decision.accept_prob,
            progress,
        )

    @property
    def _most_steps(self) -> int:
        """The largest number of gradient steps of a draw."""
        return MOST_STEPS if self._adapt_length else self.num_steps

    @property
    def knows_rows(self) -> bool:
        """Whether the rows of future steps are known, as in :class:`RowsAhead`."""
        return super().knows_rows and not self._adapt_length

    def _gradient_rows(self, reader: Reader, number: int | Array) -> Array:
        """Rows that the gradients of a draw read."""
        each = jnp.asarray(reader.gradient_rows, self._rows_dtype(reader))
        return number * each

    def _rows_dtype(self, reader: Reader) -> Any:
        """Integers, unless the rows of a draw could be more than an int32 counts."""
        most = (self._most_steps + 8) * sum(reader.plates.values())
        return jnp.int32 if most < 2**31 else jnp.float32

    def _decide(
        self,
        reader: Reader,
        keys: dict[str, Array],
        z: Array,
        end: Moved,
        state: AMAGOLDState,
    ) -> tuple[Decision, Comparison]:
        """Accept or reject the end of the path."""
        work = end.work / self.temperature
        if self._correction is None:
            lp = end.log_density / self.temperature
            fine = jnp.isfinite(end.z).all() & jnp.isfinite(end.memory).all()
            fine &= jnp.isfinite(lp)
            zero = jnp.zeros_like(lp)
            lps = jnp.stack([jnp.where(fine, lp, state.lp_estimate), lp])
            nothing = Estimate(zero, zero)
            seen = Comparison(
                nothing, zero, fine, lps, (), jnp.int32(0), jnp.ones_like(lp)
            )
            return Decision(fine, fine.astype(lp.dtype), fine), seen
        if isinstance(self._correction, Scheme):
            scheme = self._correction.fitted(reader.scheme.widths, reader.plates)
            reader = reader._replace(scheme=scheme, designs=None)
        seen = self._estimator.compare(
            reader, keys["rows"], z, end.z, state.memory, self._acceptance.max_variance
        )
        seen = seen._replace(log_ratio=seen.log_ratio + work)
        decision = self._acceptance(keys["accept"], seen.log_ratio)
        # the target does not detect a momentum that is not finite
        fine = jnp.isfinite(end.memory).all()
        decision = decision._replace(
            accept=decision.accept & fine,
            accept_prob=jnp.where(fine, decision.accept_prob, 0.0),
            reliable=decision.reliable & seen.reliable & fine,
        )
        return decision, seen
