"""Numbers and advice: what a run on minibatches was worth, and what to change."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from numpyro_minibatch.diagnostics._advice import Settings, advise, remarks
from numpyro_minibatch.diagnostics._normality import (
    Normality,
    log_ratio_rows,
    normal_error_bound,
    normality,
)
from numpyro_minibatch.diagnostics._numbers import Diagnosis
from numpyro_minibatch.inference_data import get_group

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data import InferenceData

__all__ = [
    "Diagnosis",
    "Normality",
    "diagnose",
    "log_ratio_rows",
    "normal_error_bound",
    "normality",
    "ring_occupancy",
]


def diagnose(
    idata: InferenceData, *, var_names: Sequence[str] | None = None
) -> Diagnosis:
    """Summarise a run in numbers, and say what to change.

    :param idata: what :func:`~numpyro_minibatch.to_inference_data` returned, also read
        back from a file.
    :param var_names: the parameters whose R-hat and effective sample size are computed,
        by default all; some are enough for a large network.
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
    attrs = posterior.attrs
    stats = get_group(idata, "sample_stats")
    settings = Settings.of(attrs)
    diagnosis = _numbers(
        posterior if var_names is None else posterior[list(var_names)],
        xr.Dataset() if stats is None else stats,
        settings,
    )
    return replace(
        diagnosis,
        advice=advise(diagnosis, settings),
        notes=remarks(diagnosis, settings),
    )


def _numbers(posterior: xr.Dataset, stats: xr.Dataset, s: Settings) -> Diagnosis:
    attrs = posterior.attrs
    thinning = int(attrs.get("thinning", 1))

    def mean(name: str) -> float:
        return float(stats[name].astype(float).mean()) if name in stats else math.nan

    def finite(name: str) -> np.ndarray:
        values = stats[name].values.astype(float) if name in stats else np.empty(0)
        kept = values[np.isfinite(values)]
        return kept if kept.size else np.array([math.nan])

    noise = finite("log_ratio_variance")
    if s.pilot and (noise > 0).any():
        noise = noise[noise > 0]  # a proposal that stays is no decision
    median, high = np.quantile(np.sqrt(noise), [0.5, 0.95])

    def last(name: str) -> float:
        if name not in stats:
            return math.nan
        values = stats[name].isel(draw=-1).values.astype(float)
        return (
            math.sqrt(np.nanmean(values**2)) if (values == values).any() else math.nan
        )

    def lowest(name: str) -> float:
        """The lowest of the chains' last values that are not infinite."""
        if name not in stats:
            return math.nan
        # where steps change in cycles, of a whole one: its last steps are too short to
        # say anything
        few = int(s.samples_per_cycle) if s.samples_per_cycle >= 1 else 1
        values = stats[name].isel(draw=slice(-few, None)).values.astype(float)
        values = values[np.isfinite(values)]
        return float(values.min()) if values.size else math.nan

    rows = float(finite("num_rows").sum()) * thinning
    mixing = _mixing(posterior)
    ess = mixing["min_ess_bulk"]
    plates = json.loads(attrs.get("plates", "{}"))
    batch_sizes = json.loads(attrs.get("batch_sizes", "{}"))
    return Diagnosis(
        kernel=attrs.get("kernel", ""),
        target=attrs.get("target", ""),
        temperature=float(attrs.get("temperature", math.nan)),
        plates=plates,
        batch_sizes=plates if s.batch.startswith("FullBatch") else batch_sizes,
        num_chains=posterior.sizes["chain"],
        num_draws=posterior.sizes["draw"],
        acceptance_rate=mean("acceptance_rate"),
        unreliable=1.0 - mean("reliable"),
        diverging=mean("diverging"),
        mean_log_ratio=float(finite("log_ratio").mean()),
        noise_sd_median=float(median),
        noise_sd_95=float(high),
        check_rms_error=last("check_rms_error"),
        check_rms_z=last("check_rms_z"),
        noise_ratio=lowest("noise_ratio"),
        swap_rates=mean_rates(stats, "swap_acceptance_rate"),
        unreliable_swaps=1.0 - mean("swap_reliable"),
        round_trips=(
            float(stats["round_trips"].isel(draw=-1).sum())
            if "round_trips" in stats
            else math.nan
        ),
        jump_rates=tuple(np.nan_to_num(mean_rates(stats, "jump_acceptance_rate"))),
        jump_tries=_tries(stats, "jump_acceptance_rate"),
        energy_noise=_medians(stats, "energy_noise"),
        ring_occupancy=tuple(map(tuple, _occupancy(stats).tolist())),
        **_cycles(posterior, stats, s),
        rows_per_draw=mean("num_rows") * thinning,
        total_rows=rows,
        rows_per_effective_sample=rows / ess if ess > 0 else math.nan,
        **mixing,
    )


def _by_place(stats: xr.Dataset, name: str) -> np.ndarray | None:
    """A statistic of each rung or pair, the draws of all chains in one axis."""
    if name not in stats or not stats[name].size:
        return None  # a ladder of one rung has no pairs
    return stats[name].values.reshape(-1, stats[name].shape[-1])


def mean_rates(stats: xr.Dataset, name: str) -> tuple[float, ...]:
    """The mean acceptance rate of each pair; not a number if no try is recorded."""
    rates = _by_place(stats, name)
    if rates is None:
        return ()
    with np.errstate(invalid="ignore"):
        return tuple((np.nansum(rates, 0) / (rates == rates).sum(0)).tolist())


def _tries(stats: xr.Dataset, name: str) -> tuple[float, ...]:
    """The share of the draws in which each pair was tried."""
    rates = _by_place(stats, name)
    return () if rates is None else tuple((rates == rates).mean(0).tolist())


def _medians(stats: xr.Dataset, name: str) -> tuple[float, ...]:
    values = _by_place(stats, name)
    return () if values is None else tuple(np.median(values, 0).tolist())


def ring_occupancy(idata: InferenceData) -> xr.DataArray:
    """The share of the draws of each chain of MINTEE in each ring of energies.

    The paper's table 3 [1]. Chains whose draws are in rings that the next hotter one
    hardly visits cannot jump; the share of the coldest chain in ring ``j`` divided by
    that of the next one says how old the states are that it jumps to.

    :param idata: what :func:`~numpyro_minibatch.to_inference_data` or
        :func:`~numpyro_minibatch.sample` returned for a run of ``MINTEE``.
    :return: dimensions ``ladder``, the coldest chain first, and ``ring``, the lowest
        energies first; with the coordinates ``temperature`` and ``rows``, those of each
        chain's batch, and ``energy``, the lower end of each ring.
    :raises ValueError: there are no rings.

    **References:**

    1. Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, appendix D.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import MINTEE, Target, batch, diagnostics, sample
        >>> target = Target(lambda z: 0.0, lambda z, rows: -0.5 * z**2 + 0.0 * rows, 10)
        >>> kernel = MINTEE(target=target, batch=batch.full(), temperatures=[1.0, 4.0])
        >>> idata = sample(kernel, num_warmup=100, num_samples=100, progress=False,
        ...                init_params=jnp.zeros((1,)))
        >>> table = diagnostics.ring_occupancy(idata)
        >>> table.dims, table.sum("ring").values.tolist()
        (('ladder', 'ring'), [1.0, 1.0])
    """
    stats = get_group(idata, "sample_stats")
    if stats is None or "ring" not in stats:
        raise ValueError(
            "ring_occupancy(idata) needs the rings of draws, which a run of MINTEE "
            "records in sample_stats."
        )
    shares = _occupancy(stats)
    settings = json.loads(stats.attrs.get("settings", "{}"))
    known = {
        "temperature": ("ladder", settings.get("temperatures")),
        "rows": ("ladder", settings.get("rung_batch_sizes")),
        "energy": ("ring", [-math.inf, *settings.get("energies", [])]),
    }
    coords = {
        name: (dim, values)
        for name, (dim, values) in known.items()
        if values is not None and len(values) == len(shares)
    }
    return xr.DataArray(shares, dims=("ladder", "ring"), coords=coords, name="share")


def _occupancy(stats: xr.Dataset) -> np.ndarray:
    """The share of the draws of each chain in each ring."""
    rings = _by_place(stats, "ring")
    if rings is None:
        return np.empty((0, 0))
    return (rings[..., None] == np.arange(rings.shape[1])).mean(0)


def _cycles(posterior: xr.Dataset, stats: xr.Dataset, s: Settings) -> dict[str, Any]:
    """How many cycles there are, and how much they differ."""
    found: dict[str, Any] = {
        "num_cycles": math.nan,
        "samples_per_cycle": math.nan,
        "between_cycles": math.nan,
        "between_cycles_name": "",
    }
    if "cycle" not in stats:
        return found
    numbers = stats["cycle"].transpose("chain", "draw").values
    found["num_cycles"] = sum(len(np.unique(chain)) for chain in numbers)
    found["samples_per_cycle"] = s.samples_per_cycle
    columns, names = _parameters(posterior)
    groups = [
        columns[chain][numbers[chain] == cycle]
        for chain in range(len(numbers))
        for cycle in np.unique(numbers[chain])
    ]
    if len(groups) < 2 or max(map(len, groups)) < 2:
        return found
    total = columns.reshape(-1, columns.shape[-1])
    with np.errstate(all="ignore"):
        sizes = np.array([len(group) for group in groups])[:, None]
        means = np.stack([group.mean(0) for group in groups]) - total.mean(0)
        share = (sizes * means**2).sum(0) / sizes.sum() / total.var(0)
    share = np.where(np.isfinite(share), share, 0.0)
    return found | _worst("between_cycles", share, names, np.argmax)


def _mixing(posterior: xr.Dataset) -> dict[str, Any]:
    """R-hat and effective sample sizes, the worst of all parameters."""
    columns, names = _parameters(posterior)
    chains, draws = columns.shape[:2]
    with np.errstate(invalid="ignore"):
        span = np.ptp(columns, axis=1)
        varies = ~(np.ptp(columns, axis=(0, 1)) == 0)  # NaN does
    if not varies.any():
        varies = ~varies
    still = (span == 0)[:, varies]
    columns, stuck = columns[:, :, varies], still.any(0)
    names = [name for name, yes in zip(names, varies, strict=True) if yes]
    result: dict[str, Any] = {"still_chains": int(still.all(1).sum())}
    for key, method in (("min_ess_bulk", "bulk"), ("min_ess_tail", "tail")):
        values = _arviz("ess", columns, method=method) if draws >= 4 else None
        if values is not None:
            # ArviZ gives a constant all its draws, and NaN nothing at all
            values = np.where(stuck | np.isnan(values), 0.0, values)
        result |= _worst(key, values, names, np.argmin)
    rhat = _arviz("rhat", columns) if chains > 1 and draws >= 4 else None
    if rhat is not None:
        rhat = np.where(stuck | np.isnan(rhat), np.inf, rhat)
    return result | _worst("max_rhat", rhat, names, np.argmax)


def _worst(
    key: str, values: np.ndarray | None, names: Sequence[str], pick: Callable
) -> dict[str, Any]:
    if values is None or not values.size:
        return {key: math.nan, f"{key}_name": ""}
    place = int(pick(values))
    return {key: float(values[place]), f"{key}_name": names[place]}


def _parameters(posterior: xr.Dataset) -> tuple[np.ndarray, list[str]]:
    """All scalars of a posterior, shape ``(chain, draw, parameter)``, and names."""
    columns, names = [], []
    for name, values in posterior.data_vars.items():
        values = values.transpose("chain", "draw", ...)
        columns.append(values.values.reshape(*values.shape[:2], -1).astype(float))
        labels = [values[dim].values for dim in values.dims[2:]]
        for place in np.ndindex(*values.shape[2:]):
            which = ", ".join(
                str(label[i]) for label, i in zip(labels, place, strict=True)
            )
            names.append(f"{name}[{which}]" if which else str(name))
    return np.concatenate(columns, axis=-1), names


def effective_sample_size(series: np.ndarray) -> float:
    """The effective sample size of the mean of ``(chain, draw)`` numbers."""
    return float(_arviz("ess", series[:, :, None].astype(float), method="mean")[0])


def _arviz(function: str, columns: np.ndarray, **options: Any) -> np.ndarray:
    import arviz as az  # here because it takes long and announces ArviZ 1

    data = xr.Dataset({"x": (("chain", "draw", "parameter"), columns)})
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of constants and NaN, which are dealt with
        return getattr(az, function)(data, **options)["x"].values
