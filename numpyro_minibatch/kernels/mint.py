"""MINT: minibatch tempered MCMC, a preset of MinibatchMH."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numpyro_minibatch import accept
from numpyro_minibatch._internal.checks import check_flag, check_positive
from numpyro_minibatch._model.plates import few_rows
from numpyro_minibatch.estimate import Augmented, Exact, Shared
from numpyro_minibatch.kernels.metropolis import MinibatchMH

__all__ = ["MINT"]


class MINT(MinibatchMH):
    """Minibatch tempered MCMC: sample a tempered posterior from minibatches [1].

    The target is ``prior * likelihood ** (1 / T)``. The paper writes the temperature
    as ``T = N ** (1 - lam)`` with ``lam = alpha * tau`` and a batch of
    ``m = N ** tau`` rows; ``lam`` or ``alpha`` may be given instead of ``temperature``.

    Where the paper and this kernel differ:

    - Log ratios are reduced by a penalty for their noise (``penalty=True``). Without
      it, as printed, a shared batch flattens the posterior: for small moves, a log
      ratio with noise of standard deviation 1 acts like 1.46 times the temperature.
    - ``lam < tau`` is not enough for the noise to be small: at ``N = 1e6``, ``m =
      1000`` and ``alpha = 0.99`` the paper's relative correction is
      ``N ** -(tau - lam) = 0.93``. ``reliable`` and ``diagnose`` report the noise; at
      the optimal step size it is inside the test's domain if ``T`` is at least about
      ``5.6 N / m``.
    - The prior is not tempered unless ``temper_prior=True``.
    - The paper's proof needs the current position's estimate to be kept
      (``estimate="augmented"``). Such a chain is stuck unless ``T >= N sd / sqrt(m)``,
      where ``sd`` is the standard deviation of the rows' log likelihoods. The paper's
      experiments can only have used one batch for both positions, the default here.

    **References:**

    .. [1] Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*.

    :param model: a NumPyro model with a data plate.
    :param batch_size: rows of a batch, or ``{plate: rows}``; by default each plate's
        own ``subsample_size``.
    :param temperature: temperature ``T`` of the likelihood.
    :param lam: the paper's ``lambda``, instead of ``temperature``; below ``tau``.
    :param alpha: the paper's ``lam / tau``, between 0 and 1, instead of both.
    :param estimate: ``"shared"`` (default) or ``"augmented"``.
    :param penalty: correct for the noise; ``False`` is the paper's algorithm.
    :param settings: the other arguments of :class:`MinibatchMH`.

    :raises ValueError: not exactly one of ``temperature``, ``lam`` and ``alpha`` is
        given, or it is out of range.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import MINT, to_inference_data

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> mcmc = MCMC(MINT(model, temperature=500.0), num_warmup=500,
        ...             num_samples=1000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> idata = to_inference_data(mcmc)
        >>> sorted(idata.posterior.data_vars)
        ['mu']
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        temperature: float | None = None,
        lam: float | None = None,
        alpha: float | None = None,
        estimate: str | Shared | Augmented | Exact = "shared",
        penalty: bool = True,
        **settings: Any,
    ) -> None:
        given = {"temperature": temperature, "lam": lam, "alpha": alpha}
        named = {k: v for k, v in given.items() if v is not None}
        if len(named) != 1:
            raise ValueError(
                f"{self._who} takes exactly one of temperature=, lam= and alpha=, got "
                f"{named or 'none of them'}. Write for example temperature=100.0."
            )
        ((key, value),) = named.items()
        check_positive(self._who, key, value)
        if key != "temperature" and not value < 1:
            raise ValueError(
                f"{self._who}({key}={value}) must be below 1: the paper's lam is below "
                "tau, and alpha = lam / tau. For the untempered posterior pass "
                "temperature=1.0."
            )
        check_flag(self._who, "penalty", penalty)
        self._exponent = None if key == "temperature" else (key, float(value))
        if "acceptance" in settings:
            raise TypeError(
                f"{self._who} has its own acceptance test; for another choice write "
                "MinibatchMH(model, acceptance=...)."
            )
        if not penalty and isinstance(estimate, str) and estimate == "augmented":
            estimate = Augmented(penalty=False)
        elif not penalty and isinstance(estimate, Augmented):
            estimate = replace(estimate, penalty=False)
        super().__init__(
            model,
            estimate=estimate,
            acceptance=accept.penalty() if penalty else accept.metropolis(),
            temperature=1.0 if temperature is None else temperature,
            **settings,
        )

    def _advised_rows(self, rows: int, parameters: int) -> int:
        if self._exponent is not None:  # the temperature depends on the batch
            return few_rows(rows)
        return super()._advised_rows(rows, parameters)

    def check_rung(self, who: str) -> None:
        """Raise if the kernel cannot be a rung; see :class:`Tempered`."""
        if self._exponent is not None:
            key, value = self._exponent
            raise ValueError(self._has_temperature(who, f"{key}={value:g}"))
        super().check_rung(who)

    @property
    def temperature(self) -> float:
        """The temperature ``T``; from ``lam`` or ``alpha`` once the data are seen."""
        if self._exponent is None:
            return self._temperature
        layout = self.layout
        if len(layout.plates) > 1:
            raise ValueError(
                f"{self._who}({self._exponent[0]}=...) is defined for one data plate, "
                f"but the model has {len(layout.plates)}: pass temperature= instead."
            )
        ((_, size),), ((_, width),) = layout.plates, layout.widths
        tau = math.log(width) / math.log(size)
        key, value = self._exponent
        lam = value * tau if key == "alpha" else value
        if not lam < tau and width < size:
            raise ValueError(
                f"{self._who}(lam={value}) must be below tau = log({width}) / "
                f"log({size}) = {tau:.3f}, as in the paper: pass a smaller lam, a "
                "larger batch_size, or temperature= for any temperature."
            )
        return size ** (1.0 - lam)
