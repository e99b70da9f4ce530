"""The analysis of a result: numbers, and what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from numpyro_minibatch.diagnostics._report import Diagnosis, diagnosed
from numpyro_minibatch.inference_data import get_group

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data import InferenceData

__all__ = ["diagnose"]


def diagnose(
    idata: InferenceData, *, var_names: Sequence[str] | None = None
) -> Diagnosis:
    """Summarise a run in numbers, and recommend changes.

    :param idata: the result of :func:`~numpyro_minibatch.to_inference_data`, which may
        have been saved and read back.
    :param var_names: the parameters whose R-hat and effective sample size are computed;
        some are enough for a large network. By default all but the deterministic sites
        with a value for each row and the angles of ``CircularReparam``, which are
        functions of the others.
    :return: the numbers and the advice.
    :raises TypeError: ``idata`` is not an InferenceData or DataTree.
    :raises ValueError: it has no ``posterior``, or not the variables ``var_names``.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import MINT, diagnose, to_inference_data

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> mcmc = MCMC(MINT(model, temperature=20.0), num_warmup=500,
        ...             num_samples=1000, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> diagnosis = diagnose(to_inference_data(mcmc))
        >>> diagnosis.rows_per_draw
        100.0
        >>> "of the decisions were unreliable" in diagnosis.advice[0]
        True
    """
    is_idata = isinstance(idata, xr.DataTree) or hasattr(idata, "groups")
    if not is_idata:
        raise TypeError(
            "diagnose(idata) takes what to_inference_data(mcmc) returned, got "
            f"{type(idata).__name__}."
        )
    posterior = get_group(idata, "posterior")
    if posterior is None:
        raise ValueError("diagnose(idata): there is no group posterior in it.")
    if var_names is not None:
        missing = [name for name in var_names if name not in posterior]
        if missing:
            raise ValueError(
                f"diagnose(var_names=...) has {missing}, the posterior has "
                f"{list(posterior)}."
            )
    stats = get_group(idata, "sample_stats")
    of_rows = json.loads(posterior.attrs.get("of_rows", "[]"))
    angles = _angles(posterior)
    if var_names is None:
        left_out = {*of_rows, *(f"{name}_unwrapped" for name in angles)}
        var_names = [str(name) for name in posterior if name not in left_out]
    chosen = posterior[list(var_names)]
    about = {n: _about_mean(posterior[n]) for n in angles if n in chosen}
    return diagnosed(chosen.assign(about), xr.Dataset() if stats is None else stats)


def _angles(posterior: xr.Dataset) -> list[str]:
    """Sites that ``CircularReparam`` made of others: the same up to turns."""
    return [
        str(name)
        for name in posterior
        if f"{name}_unwrapped" in posterior
        and np.allclose(
            np.sin(0.5 * (posterior[name] - posterior[f"{name}_unwrapped"])),
            0,
            atol=1e-3,
        )
    ]


def _about_mean(angle: xr.DataArray) -> xr.DataArray:
    """An angle within half a turn of its circular mean.

    The angle itself jumps where a turn ends, and chains of the unwrapped site may
    differ by turns.
    """
    values = angle.values  # (chain, draw, ...)
    mean = np.arctan2(np.sin(values).mean((0, 1)), np.cos(values).mean((0, 1)))
    away = np.arctan2(np.sin(values - mean), np.cos(values - mean))
    return angle.copy(data=mean + away)
