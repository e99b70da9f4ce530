"""Conversion of a run of NumPyro's MCMC to ArviZ's groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from warnings import warn

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from numpyro_minibatch._model.replay import (
    CHUNK,
    Run,
    data_sites,
    deterministic_sites,
    entry_log_likelihoods,
    log_likelihoods,
)
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.inference_data._attributes import attributes_of, created
from numpyro_minibatch.inference_data._collected import collected_groups
from numpyro_minibatch.inference_data._errors import (
    measured_errors,
    with_errors,
)
from numpyro_minibatch.inference_data._groups import as_inference_data, get_group
from numpyro_minibatch.inference_data._labels import Labels

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data._groups import InferenceData

__all__ = ["to_inference_data"]


def to_inference_data(
    mcmc: Any,
    *,
    dims: Mapping[str, Sequence[str | None]] | None = None,
    coords: Mapping[str, Any] | None = None,
    constant_data: bool = True,
    log_likelihood: bool = False,
    log_likelihood_thin: int = 1,
    chunk_size: int = CHUNK,
    max_bytes: float = 2e9,
    warmup: InferenceData | None = None,
    posterior_predictive: Mapping[str, Any] | None = None,
    prior: Mapping[str, Any] | None = None,
) -> InferenceData:
    """Convert a run of ``numpyro.infer.MCMC`` for ArviZ.

    The groups are ``posterior``, ``sample_stats``, ``observed_data``,
    ``constant_data`` and, on request, ``log_likelihood`` and those of the warmup.
    Replica exchange with ``collect_rungs=True`` adds ``rungs``, the draws at all
    temperatures. Data are stored at their full size, however few rows a step of the
    kernel read.

    The attributes of ``posterior`` describe what was sampled: ``kernel``, ``settings``,
    ``facts`` (those about the settings that :func:`~numpyro_minibatch.diagnose` reads),
    ``temperature``, ``plates`` and ``batch_sizes`` (JSON), and ``target``, for example
    ``"prior * likelihood ** (1 / 100)"``: the draws of a tempered run are called
    ``posterior`` like any others, but they are not draws of the posterior.

    Deterministic sites inside a data plate are not among the draws of the kernel. They
    are computed here, and stored in ``posterior`` if they take at most ``max_bytes``.

    Runs of NumPyro's kernels are converted, too. If their model cannot be replayed, the
    groups and names that need the model are left out with a warning.

    :param mcmc: an ``MCMC`` that has run, with any kernel.
    :param dims: ``{name: dimensions}`` of sites and of array arguments of the model, as
        ArviZ takes them. By default, and for each ``None``, an axis of a plate has the
        plate's name, the first axis of an argument with as many entries as a data
        plate has that plate's name, and any other axis is called ``{name}_dim_0`` and
        so on.
    :param coords: ``{dimension: values}``; by default ``0, 1, ...``.
    :param constant_data: whether to store the array arguments of the model, by the
        names of its signature; those that equal an observed value are left out.
    :param log_likelihood: whether to compute the log likelihood of every row of the
        data plates at every draw, under the full model and at temperature 1 whatever
        was sampled. For NumPyro's kernels, of every entry of the observed sites.
    :param log_likelihood_thin: compute it at every so many draws.
    :param chunk_size: the number of log likelihoods that are computed at once.
    :param max_bytes: the largest size of a ``log_likelihood`` group; a larger one is an
        error. Deterministic sites with a value for each row that are larger are left
        out with a warning.
    :param warmup: what this function returned after ``mcmc.warmup(...,
        collect_warmup=True)``; its draws become the groups ``warmup_posterior`` and
        ``warmup_sample_stats``.
    :param posterior_predictive: what ``Predictive(mcmc.sampler.model, draws)`` returned
        for the draws of ``mcmc.get_samples()``, all of them in their order: arrays with
        a leading axis of draws, or of chains and draws.
    :param prior: what ``Predictive(mcmc.sampler.model, num_samples=...)`` returned:
        arrays with a leading axis of draws. Its observed sites become the group
        ``prior_predictive``, all others ``prior``.
    :return: an ``arviz.InferenceData`` on ArviZ 0.2x, an ``xarray.DataTree`` on ArviZ
        1.x. A ``/`` in a name, which neither can hold, becomes a ``.``; the attribute
        ``renamed_sites`` has the original names.
    :raises ValueError: the run has no draws, ``dims``, ``coords`` or ``warmup`` do not
        fit it, or the log likelihood would be larger than ``max_bytes``.

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
        >>> mcmc = MCMC(MINT(model, temperature=500.0), num_warmup=100,
        ...             num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> idata = to_inference_data(mcmc)
        >>> idata["observed_data"]["obs"].sizes["data"]
        10000
        >>> idata["posterior"].attrs["target"]
        'prior * likelihood ** (1 / 500)'
    """
    samples, stats, rungs = collected_groups(mcmc).values()
    run = Run.of(mcmc)
    of_rows = _rowwise(run, samples, max_bytes)
    samples = {**samples, **of_rows}
    predicted = _predicted(posterior_predictive, samples)
    before = _prior(prior)
    arguments = run.arguments
    data = _without_observed(arguments, run.observed) if constant_data else {}
    labels = Labels.make(
        [*samples, *run.observed, *arguments, *predicted, *before], run, dims, coords
    )
    errors = measured_errors(run, samples)
    attrs = with_errors(attributes_of(mcmc, run, labels), errors)
    groups = {
        "posterior": labels.draws(samples, attrs | labels.listed("of_rows", of_rows)),
        "sample_stats": labels.draws(stats, attrs),
        "rungs": labels.draws_of_rungs(rungs, attrs),
        "posterior_predictive": labels.draws(predicted, attrs),
        "prior": labels.draws(
            {n: x for n, x in before.items() if not _is_observed(run, n)},
            created(run),
        ),
        "prior_predictive": labels.draws(
            {n: x for n, x in before.items() if _is_observed(run, n)}, created(run)
        ),
        "observed_data": labels.data(run.observed, created(run)),
        "constant_data": labels.data(data, created(run)),
    }
    if log_likelihood:
        rows = _log_likelihood(run, samples, log_likelihood_thin, chunk_size, max_bytes)
        description = (
            "log likelihood of each row under the full model, at temperature 1"
        )
        label = labels.rows if run.of_package else labels.entries
        groups["log_likelihood"] = label(
            rows, {**attrs, "description": description}, log_likelihood_thin
        )
    if warmup is not None:
        for name, dataset in _warmup_groups(warmup, groups["posterior"]).items():
            groups[f"warmup_{name}"] = dataset
    return as_inference_data(
        {name: ds for name, ds in groups.items() if ds.data_vars}, attrs
    )


def _is_observed(run: Run, name: str) -> bool:
    return name in run.sites and run.sites[name].observed


def _predicted(
    given: Mapping[str, Any] | None, samples: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Predictions at the draws, chains first."""
    chains, draws = next(iter(samples.values())).shape[:2]
    found = {}
    for name, value in (given or {}).items():
        if name in samples:
            continue  # they are stored once, in the posterior
        array = np.asarray(value)
        if array.shape[:1] == (chains * draws,):
            array = array.reshape(chains, draws, *array.shape[1:])
        if array.shape[:2] != (chains, draws):
            raise ValueError(
                f"to_inference_data(posterior_predictive=...) has {name!r} of shape "
                f"{array.shape}: for {chains} chains of {draws} draws its first axis "
                f"must have {chains * draws} entries. Pass what Predictive(mcmc."
                "sampler.model, mcmc.get_samples()) returned."
            )
        found[name] = array
    return found


def _prior(given: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Draws of the prior, as those of one chain."""
    found = {name: np.asarray(value)[None] for name, value in (given or {}).items()}
    lengths = {name: array.shape[1:2] for name, array in found.items()}
    if len(set(lengths.values())) > 1 or () in lengths.values():
        raise ValueError(
            "to_inference_data(prior=...) must have arrays with one leading axis of "
            f"draws, of one length, got {dict(lengths)}."
        )
    return found


def _rowwise(
    run: Run, samples: Mapping[str, np.ndarray], max_bytes: float
) -> dict[str, np.ndarray]:
    """The deterministic sites that depend on the rows, which kernels do not keep."""
    sites = run.sites.items()
    names = [n for n, site in sites if site.deterministic and n not in samples]
    latents = [n for n, site in sites if site.latent]
    if not run.of_package or run.target is None or not names:
        return {}
    if any(name not in samples for name in latents):
        return {}
    draws = {name: samples[name] for name in latents}
    chains, length = draws[latents[0]].shape[:2]
    flat = {n: d.reshape(chains * length, *d.shape[2:]) for n, d in draws.items()}
    on_host = find_rows((run.target.args, dict(run.target.kwargs)))
    rows = sum(run.target.sizes.values())
    cost = chains * length * rows * len(names) * jnp.result_type(float).itemsize
    if on_host or cost > max_bytes:
        size = (
            "" if on_host else f" At all draws, the rows take {cost:.3g} bytes: pass "
        )
        size += "" if on_host else f"max_bytes={cost} to have them."
        warn(
            f"to_inference_data left out {', '.join(map(repr, names))}, deterministic "
            f"sites that depend on the {rows} rows.{size}",
            stacklevel=3,
        )
        return {}
    values = deterministic_sites(run.target, names, flat)
    return {n: v.reshape(chains, length, *v.shape[1:]) for n, v in values.items()}


def _warmup_groups(warmup: Any, posterior: xr.Dataset) -> dict[str, xr.Dataset]:
    is_idata = isinstance(warmup, xr.DataTree) or hasattr(warmup, "groups")
    draws = get_group(warmup, "posterior") if is_idata else None
    if draws is None:
        raise ValueError(
            f"to_inference_data(warmup=...) must be what to_inference_data(mcmc) "
            "returned after mcmc.warmup(..., collect_warmup=True), got "
            f"{type(warmup).__name__}{' without a posterior' if is_idata else ''}."
        )
    if set(draws.data_vars) != set(posterior.data_vars):
        raise ValueError(
            f"to_inference_data(warmup=...) has the variables {list(draws)}, but the "
            f"run has {list(posterior)}: pass the warmup of the same run."
        )
    stats = get_group(warmup, "sample_stats")
    return {"posterior": draws} | ({} if stats is None else {"sample_stats": stats})


def _without_observed(
    arguments: Mapping[str, Any], observed: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    def is_observed(array: np.ndarray) -> bool:
        # the model saw float64 data as float32 unless x64 is enabled
        seen = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        nan = seen.dtype.kind == "f"
        return any(
            seen.shape == value.shape
            and seen.dtype == value.dtype
            and np.array_equal(seen, value, equal_nan=nan)
            for value in observed.values()
        )

    arrays = {name: np.asarray(leaf) for name, leaf in arguments.items()}
    return {name: array for name, array in arrays.items() if not is_observed(array)}


def _log_likelihood(
    run: Run,
    samples: Mapping[str, np.ndarray],
    thin: int,
    chunk_size: int,
    max_bytes: float,
) -> dict[str, np.ndarray]:
    """The log likelihood of each row of the data plates, by observed site."""
    for name, value in (("log_likelihood_thin", thin), ("chunk_size", chunk_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"to_inference_data({name}={value!r}): expected a positive integer."
            )
    target = run.target
    if target is None:
        raise ValueError(
            "to_inference_data(log_likelihood=True) needs a kernel with a NumPyro "
            f"model, got {type(run.kernel).__name__} without a model that it can "
            "replay. Write the kernel with a model, as in NUTS(model)."
        )
    latents = [name for name, site in run.sites.items() if site.latent]
    missing = [name for name in latents if name not in samples]
    if missing:
        remedy = (
            f"Run without the extra field '~z.{missing[0]}'."
            if run.of_package
            else "Discrete sites that NumPyro enumerates have no draws: write "
            "NUTS(numpyro_minibatch.marginalize(model))."
        )
        raise ValueError(
            "to_inference_data(log_likelihood=True) needs the draws of all latent "
            f"sites; {missing} were not collected. {remedy}"
        )
    draws = {name: samples[name][:, ::thin] for name in latents}
    chains, kept = draws[latents[0]].shape[:2]
    rows = (
        sum(target.sizes[p] for p in data_sites(run.sites, target).values())
        if run.of_package
        else sum(math.prod(site.batch_shape) for site in run.sites.values())
    )
    bytes_each = jnp.result_type(float).itemsize
    cost = chains * kept * rows * bytes_each
    if cost > max_bytes:
        fitting = int(max_bytes // (chains * rows * bytes_each))
        every = math.ceil(samples[latents[0]].shape[1] / max(fitting, 1))
        fewer = f"take fewer draws with log_likelihood_thin={every}, or "
        raise ValueError(
            f"to_inference_data(log_likelihood=True) would take {cost:.3g} bytes: "
            f"{chains} chains x {kept} draws x {rows} rows x {bytes_each} bytes, more "
            f"than max_bytes={max_bytes:.3g}. To compute it, {fewer if fitting else ''}"
            f"pass max_bytes={cost}."
        )
    flat = {n: d.reshape(chains * kept, *d.shape[2:]) for n, d in draws.items()}
    if run.of_package:
        values = log_likelihoods(target, run.sites, flat, chunk_size)
    else:
        values = entry_log_likelihoods(target, run.sites, flat)
    return {n: v.reshape(chains, kept, *v.shape[1:]) for n, v in values.items()}
