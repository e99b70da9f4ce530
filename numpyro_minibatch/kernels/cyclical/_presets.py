"""Presets of Cyclical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro_minibatch import schedule as schedules
from numpyro_minibatch._internal.checks import check_count, check_positive
from numpyro_minibatch.kernels.cyclical._kernel import Cyclical
from numpyro_minibatch.kernels.langevin import SGHMC, SGLD, SGMCMC
from numpyro_minibatch.kernels.mint import MINT

__all__ = ["CyclicalMINT", "CyclicalSGHMC", "CyclicalSGLD"]


def _missing(who: str, more: str) -> str:
    """The message for a kernel that does not know how long a cycle is."""
    return (
        f"{who} needs the length of a cycle in steps: for 10,000 steps in ten cycles, "
        f"write {who}(model, {more}cycle_length=1000)."
    )


class CyclicalSGLD(Cyclical):
    """Cyclical stochastic gradient Langevin dynamics [1].

    :param model: a NumPyro model with a data plate.
    :param step_size: the step size with which a cycle begins, the paper's ``alpha_0``,
        in ``z + h * force + N(0, 2 h T)``.
    :param cycle_length: gradient steps of a cycle; for ``K`` steps in ``M`` cycles,
        ``ceil(K / M)``.
    :param samples_per_cycle: draws of a cycle.
    :param num_steps: gradient steps between draws; see :class:`Cyclical`.
    :param explore: the fraction of a cycle that is exploration, the paper's ``beta``.
    :param collect_from: the fraction of a cycle after which draws are collected.
    :param explore_temperature: temperature of the noise of exploration.
    :param scale_by_n: whether ``step_size`` is a learning rate for the mean loss.
    :param settings: the arguments of :class:`SGLD`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson
       (2020), *Cyclical stochastic gradient MCMC for Bayesian deep learning*, ICLR.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalSGLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = CyclicalSGLD(model, step_size=2e-6, cycle_length=500)
        >>> mcmc = MCMC(kernel, num_warmup=0, num_samples=10 * kernel.samples_per_cycle,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    _kind: type[SGMCMC] = SGLD

    def __init__(
        self,
        model: Callable | None = None,
        *,
        cycle_length: int | None = None,
        samples_per_cycle: int | None = None,
        num_steps: int | None = None,
        explore: float | None = None,
        collect_from: float = 0.8,
        explore_temperature: float = 0.0,
        scale_by_n: bool = False,
        **settings: Any,
    ) -> None:
        if cycle_length is None:
            raise TypeError(
                _missing(type(self).__name__, "batch_size=100, step_size=1e-3, ")
            )
        scales = "step_size", "h", "control_variate"
        if all(settings.get(name) is None for name in scales):
            # the default of the kernel expands about one mode, and cycles find several
            raise ValueError(
                f"{type(self).__name__} needs a step_size, the largest one of a cycle. "
                "Write for example step_size=1e-3, and the largest multiple of it at "
                "which the draws stay finite."
            )
        super().__init__(
            self._kind.within(type(self).__name__, model, **settings),
            cycle_length=cycle_length,
            samples_per_cycle=samples_per_cycle,
            num_steps=num_steps,
            explore=explore,
            collect_from=collect_from,
            explore_temperature=explore_temperature,
            scale_by_n=scale_by_n,
        )


class CyclicalSGHMC(CyclicalSGLD):
    """Cyclical stochastic gradient Hamiltonian Monte Carlo [1].

    The square of the step size follows the cosine: it multiplies the gradient and is
    the paper's ``alpha``. Momentum is drawn anew when sampling begins after descent.

    :param model: a NumPyro model with a data plate.
    :param settings: the arguments of :class:`CyclicalSGLD`, with those of
        :class:`SGHMC` instead of :class:`SGLD`'s: ``step_size`` with ``friction``, a
        rate; or ``h``, the paper's ``alpha_0``, with ``b``, half of its ``eta``. With
        ``b`` every step forgets the same fraction of the momentum.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson
       (2020), *Cyclical stochastic gradient MCMC for Bayesian deep learning*, ICLR.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalSGHMC

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = CyclicalSGHMC(model, step_size=2e-3, friction=50.0,
        ...                        cycle_length=1000, samples_per_cycle=10)
        >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    _kind = SGHMC


class CyclicalMINT(Cyclical):
    """MINT with proposals that shrink in each cycle and are enlarged at its end [1].

    Only the proposals change, by a schedule that does not depend on the chain, so that
    every step preserves the target. All steps could be collected; by default only the
    last one of each cycle is, before the step size rises.

    :param model: a NumPyro model with a data plate.
    :param cycle_length: steps of a cycle; ``50 * N / m`` for the paper's 50 epochs.
    :param rise: the factor on the step size at the end of a cycle.
    :param decay: the factor in between; see :func:`schedule.sawtooth`. The default
        makes all cycles equal. The paper's 0.9 begins each cycle at 0.7 times the step
        size of the previous one, and freezes a long run.
    :param decay_every: steps between decays; by default a tenth of a cycle.
    :param samples_per_cycle: draws of a cycle, evenly spaced, the last one at its end.
    :param collect_from: the fraction of a cycle after which draws are collected.
    :param settings: the arguments of :class:`MINT`. The step size adapts in warmup; the
        first cycle begins with it.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, section 4.3.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalMINT

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> kernel = CyclicalMINT(model, temperature=500.0, cycle_length=50)
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 1
        True
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        cycle_length: int | None = None,
        rise: float = 2.0,
        decay: float | None = None,
        decay_every: int | None = None,
        samples_per_cycle: int = 1,
        collect_from: float = 0.0,
        **settings: Any,
    ) -> None:
        if cycle_length is None:
            raise TypeError(
                _missing("CyclicalMINT", "batch_size=100, temperature=500.0, ")
            )
        if decay is None:
            check_count("CyclicalMINT", "cycle_length", cycle_length)
            check_positive("CyclicalMINT", "rise", rise)
            decay_every = decay_every or max(1, cycle_length // 10)
            decay = min(float(rise) ** (-decay_every / cycle_length), 1.0)
        pace = schedules.sawtooth(1.0, cycle_length, rise, decay, decay_every)
        super().__init__(
            MINT.within(type(self).__name__, model, **settings),
            cycle_length=cycle_length,
            samples_per_cycle=samples_per_cycle,
            collect_from=collect_from,
            schedule=pace,
        )
