"""Conversion of a run of NumPyro's MCMC to ArviZ's groups."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from warnings import warn

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from numpyro_minibatch._model.replay import (
    CHUNK,
    Run,
    Site,
    data_sites,
    deterministic_sites,
    log_likelihoods,
)
from numpyro_minibatch._version import __version__
from numpyro_minibatch.host_rows import find_rows

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["to_inference_data"]

# The statistics that have another name in ArviZ's schema or NumPyro's converters.
_RENAMED_STATS = {
    "accept_prob": "acceptance_rate",
    "potential_energy": "lp",  # with the opposite sign; never a minibatch estimate
    "num_steps": "n_steps",
    "adapt_state.step_size": "step_size",
}


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
    ``facts`` (what :func:`~numpyro_minibatch.diagnose` reads of the settings),
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
        was sampled.
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
    samples = {**samples, **_rowwise(run, samples, max_bytes)}
    predicted = _predicted(posterior_predictive, samples)
    before = _prior(prior)
    arguments = run.arguments
    data = _without_observed(arguments, run.observed) if constant_data else {}
    labels = _Labels.make(
        [*samples, *run.observed, *arguments, *predicted, *before], run, dims, coords
    )
    attrs = _attrs(mcmc, run, labels)
    groups = {
        "posterior": labels.draws(samples, attrs),
        "sample_stats": labels.draws(stats, attrs),
        "rungs": labels.draws_of_rungs(rungs, attrs),
        "posterior_predictive": labels.draws(predicted, attrs),
        "prior": labels.draws(
            {n: x for n, x in before.items() if not _is_observed(run, n)},
            _created(run),
        ),
        "prior_predictive": labels.draws(
            {n: x for n, x in before.items() if _is_observed(run, n)}, _created(run)
        ),
        "observed_data": labels.data(run.observed, _created(run)),
        "constant_data": labels.data(data, _created(run)),
    }
    if log_likelihood:
        rows = _log_likelihood(run, samples, log_likelihood_thin, chunk_size, max_bytes)
        description = (
            "log likelihood of each row under the full model, at temperature 1"
        )
        groups["log_likelihood"] = labels.rows(
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
    """The deterministic sites with a value for each row, which kernels do not keep."""
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
        size = "" if on_host else f" They would take about {cost:.3g} bytes: pass "
        size += "" if on_host else f"max_bytes={cost} to have them."
        warn(
            f"to_inference_data left out {', '.join(map(repr, names))}, deterministic "
            f"sites with a value for each of the {rows} rows.{size}",
            stacklevel=3,
        )
        return {}
    values = deterministic_sites(run.target, names, flat)
    return {n: v.reshape(chains, length, *v.shape[1:]) for n, v in values.items()}


def as_inference_data(groups: dict[str, Any], attrs: dict[str, Any]) -> InferenceData:
    """Put the groups into the container of the installed version of ArviZ."""
    # by the version: ArviZ 1 has a name `InferenceData` as well
    if int(version("arviz").partition(".")[0]) >= 1:
        tree = xr.DataTree.from_dict(groups)
        tree.attrs = dict(attrs)
        return tree
    import arviz as az  # a slow import, which also prints an announcement of ArviZ 1

    return az.InferenceData(attrs, **groups)


def get_group(idata: Any, name: str) -> xr.Dataset | None:
    """A group of an InferenceData or a DataTree; ``None`` if it has no such group."""
    if isinstance(idata, xr.DataTree):
        return idata[name].to_dataset() if name in idata.children else None
    return idata[name] if name in idata.groups() else None


def samples_of(idata: Any) -> Any:
    """The draws of a result, by the model's names for its sites, chains first.

    :param idata: the result of :func:`to_inference_data`, or an equivalent object.
    :return: a dict; an array for a target that is a function of an array.
    """
    posterior = get_group(idata, "posterior")
    assert posterior is not None
    original = json.loads(posterior.attrs.get("renamed_sites", "{}"))
    found = {
        original.get(str(name), str(name)): values.transpose(
            "chain", "draw", ...
        ).to_numpy()
        for name, values in posterior.data_vars.items()
    }
    return found["z"] if list(found) == ["z"] else found


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


# what the driver collected ----------------------------------------------------------


def collected_groups(mcmc: Any) -> dict[str, dict[str, np.ndarray]]:
    """The draws and the statistics of a run, by group and name, chains first.

    :param mcmc: an ``MCMC`` that has run, or an equivalent object.
    """
    samples, stats = _collected(mcmc)
    return {"posterior": samples, "sample_stats": stats, "rungs": _of_rungs(mcmc)}


def _collected(mcmc: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The draws and the statistics of a run, flat and by name."""
    if getattr(mcmc, "_states", None) is None:
        raise ValueError(
            "to_inference_data(mcmc) needs a numpyro.infer.MCMC that has run, got "
            f"{type(mcmc).__name__} without draws. Call mcmc.run(...) first."
        )
    samples = dict(_flatten(mcmc.get_samples(group_by_chain=True), "", "z"))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    stats: dict[str, np.ndarray] = {}
    for name, value in fields.items():
        if not hasattr(value, "shape"):  # a part of the state such as adapt_state
            continue
        array = np.asarray(value)
        if name == "replicas.z":
            continue  # draws, not a statistic
        if name.startswith("replicas."):
            # the array of all rungs, and that of the coldest by its usual name
            name = name.removeprefix("replicas.")
            renamed = _RENAMED_STATS.get(name, name)
            stats[f"rung_{renamed}"] = array
            stats[renamed] = array[..., 0]
            continue
        name = name.removeprefix("inner.")  # of the kernel inside another
        renamed = _RENAMED_STATS.get(name, name)
        renamed = name if renamed in fields else renamed
        stats[renamed] = -array if renamed == "lp" else array
    everything = [*samples.values(), *stats.values()]
    only_warmup = mcmc.post_warmup_state is mcmc.last_state
    if only_warmup and not any(value.any() for value in everything):
        raise ValueError(
            "to_inference_data(mcmc): the warmup was not collected, so there are no "
            "draws. Call mcmc.warmup(..., collect_warmup=True), or mcmc.run(...) first."
        )
    return samples, stats


def _of_rungs(mcmc: Any) -> dict[str, np.ndarray]:
    """The draws at all rungs of a ladder, where they were collected."""
    z = mcmc.get_extra_fields(group_by_chain=True).get("replicas.z")
    if z is None:
        return {}
    if getattr(mcmc, "constrained", False):
        return dict(_flatten(z, "", "z"))
    constrain = mcmc.sampler.postprocess_fn(mcmc._args, mcmc._kwargs)
    for _ in range(3):  # chain, draw, rung
        constrain = jax.vmap(constrain)
    return dict(_flatten(jax.jit(constrain)(z), "", "z"))


def _flatten(tree: Any, prefix: str, alone: str) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a tree with their names; ``alone`` names a bare array."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}{key}.", alone)
    elif hasattr(tree, "shape"):
        yield prefix[:-1] or alone, np.asarray(tree)
    else:
        for key, value in enumerate(jax.tree.leaves(tree)):
            yield f"{prefix or alone + '.'}{key}", np.asarray(value)


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
    if target is None or not run.of_package:
        raise ValueError(
            "to_inference_data(log_likelihood=True) needs a kernel of "
            f"numpyro_minibatch with a NumPyro model, got {type(run.kernel).__name__}"
            f"{'' if target else ' without a model'}. For other kernels see "
            "numpyro.infer.log_likelihood."
        )
    latents = [name for name, site in run.sites.items() if site.latent]
    missing = [name for name in latents if name not in samples]
    if missing:
        raise ValueError(
            "to_inference_data(log_likelihood=True) needs the draws of all latent "
            f"sites; {missing} were not collected. Run without the extra field "
            f"'~z.{missing[0]}'."
        )
    draws = {name: samples[name][:, ::thin] for name in latents}
    chains, kept = draws[latents[0]].shape[:2]
    rows = sum(target.sizes[p] for p in data_sites(run.sites, target).values())
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
    values = log_likelihoods(target, run.sites, flat, chunk_size)
    return {n: v.reshape(chains, kept, v.shape[1]) for n, v in values.items()}


# names ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Labels:
    """Names of variables, dimensions and coordinates.

    :param names: the stored name of each variable.
    :param dims: names of the first axes of some variables, from the user.
    :param sites: the sites of the model.
    :param data_plates: the sizes of the data plates.
    :param coords: coordinates by dimension, from the user.
    """

    names: Mapping[str, str]
    dims: Mapping[str, Sequence[str | None]]
    sites: Mapping[str, Site]
    data_plates: Mapping[str, int]
    coords: Mapping[str, Any]

    @classmethod
    def make(
        cls,
        originals: Sequence[str],
        run: Run,
        dims: Mapping[str, Sequence[str | None]] | None,
        coords: Mapping[str, Any] | None,
    ) -> _Labels:
        names: dict[str, str] = {}
        for original in dict.fromkeys(originals):
            name = original.replace("/", ".")
            while name in names.values():
                name += "_"
            names[original] = name
        known = {**{new: old for old, new in names.items()}, **{n: n for n in names}}
        unknown = [name for name in dims or {} if name not in known]
        if unknown:
            raise ValueError(
                f"to_inference_data(dims=...) names {unknown[0]!r}, which is neither a "
                f"site nor an array argument of the model; it has {sorted(names)}."
            )
        return cls(
            names,
            {
                **getattr(run.kernel, "stat_dims", {}),
                **{known[name]: tuple(value) for name, value in (dims or {}).items()},
            },
            run.sites,
            {} if run.target is None else run.target.sizes,
            coords or {},
        )

    @property
    def renamed(self) -> dict[str, str]:
        """The original name of each variable that is stored under another one."""
        return {new: old for old, new in self.names.items() if new != old}

    def draws(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any]
    ) -> xr.Dataset:
        """A group with the dimensions chain and draw."""
        return self._dataset(values, ("chain", "draw"), attrs)

    def draws_of_rungs(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any]
    ) -> xr.Dataset:
        """A group with chain, draw and the rungs of a ladder."""
        kept = {k: v for k, v in attrs.items() if k not in ("temperature", "target")}
        kept["description"] = "draws at the temperatures of all rungs"
        return self._dataset(values, ("chain", "draw", "ladder"), kept)

    def rows(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any], thin: int
    ) -> xr.Dataset:
        """A group with chain, every so many draws, and the rows of a data plate."""
        dims = {}
        for name in values:
            site = self.sites[name]
            axes = self._axes(name, site.shape)
            named = dict(zip(site.axes(site.shape), axes, strict=True))
            (plate,) = (f for f, _, _ in site.frames if f in self.data_plates)
            dims[name] = (named.get(plate, self._plate_name(plate)),)
        group = replace(self, dims=dims, sites={}).draws(values, attrs)
        return group.assign_coords(draw=group["draw"] * thin)

    def data(
        self, values: Mapping[str, np.ndarray], attrs: dict[str, Any]
    ) -> xr.Dataset:
        """A group of data."""
        return self._dataset(values, (), attrs)

    def _dataset(
        self,
        values: Mapping[str, np.ndarray],
        leading: tuple[str, ...],
        attrs: dict[str, Any],
    ) -> xr.Dataset:
        variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
        sizes: dict[str, int] = {}
        for original, value in values.items():
            shape = value.shape[len(leading) :]
            axes = leading + self._axes(original, shape)
            if len(set(axes)) < len(axes):
                raise ValueError(
                    f"variable {original!r} would have the dimensions {axes}, but a "
                    "dimension can occur only once: pass dims="
                    f"{{{original!r}: [...]}} with {len(shape)} different names."
                )
            variables[self.names.get(original, original)] = (axes, value)
            for axis, size in zip(axes, value.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(
                        f"dimension {axis!r} has {size} entries in {original!r} and "
                        f"{sizes[axis]} in another variable: give them different names "
                        "in dims."
                    )
        coords = {axis: self._coord(axis, size) for axis, size in sizes.items()}
        return xr.Dataset(variables, coords, attrs)

    def _coord(self, axis: str, size: int) -> np.ndarray:
        values = np.asarray(self.coords.get(axis, np.arange(size)))
        if values.shape != (size,):
            raise ValueError(
                f"to_inference_data(coords=...) has values of shape {values.shape} for "
                f"dimension {axis!r}, which has {size} entries."
            )
        return values

    def _axes(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        given = self.dims.get(name, ())
        if len(given) > len(shape):
            raise ValueError(
                f"to_inference_data(dims=...) names {len(given)} dimensions for "
                f"{name!r}, {list(given)}; it has {len(shape)} apart from chain and "
                "draw."
            )
        found: list[str | None] = [None] * len(shape)
        if name in self.sites:
            found = self.sites[name].axes(shape)
        elif name in self.names and shape:
            fitting = [n for n, size in self.data_plates.items() if size == shape[0]]
            found[0] = fitting[0] if len(fitting) == 1 else None
        axes: list[str] = []
        for place in range(len(shape)):
            axis = given[place] if place < len(given) else None
            if axis is None and found[place] is not None:
                axis = self._plate_name(found[place] or "")
            if axis is None:
                unnamed = sum(a.startswith(f"{self._stored(name)}_dim_") for a in axes)
                axis = f"{self._stored(name)}_dim_{unnamed}"
            axes.append(axis)
        return tuple(axes)

    def _stored(self, name: str) -> str:
        return self.names.get(name, name)

    def _plate_name(self, plate: str) -> str:
        name = plate.replace("/", ".")
        # xarray treats a variable with the name of its dimension as a coordinate
        while name in {"chain", "draw", *self.names.values()}:
            name += "_dim"
        return name


# attributes -------------------------------------------------------------------------


def _created(run: Run) -> dict[str, Any]:
    """The attributes that ArviZ stores in every group, and versions."""
    library = "numpyro_minibatch" if run.of_package else "numpyro"
    return {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "arviz_version": version("arviz"),
        "numpyro_version": version("numpyro"),
        "jax_version": version("jax"),
        "inference_library": library,
        "inference_library_version": (
            __version__ if run.of_package else version("numpyro")
        ),
    }


def _attrs(mcmc: Any, run: Run, labels: _Labels) -> dict[str, Any]:
    """The attributes of a run, as strings and numbers, which netCDF can store."""
    kernel = run.kernel
    attrs = {
        **_created(run),
        "kernel": type(kernel).__name__,
        "thinning": mcmc.thinning,
    }
    on_host = find_rows((mcmc._args, dict(mcmc._kwargs)))
    if on_host:
        modes = {place: rows.mode for place, rows in on_host.items()}
        attrs["host_rows"] = json.dumps(modes)
    if labels.renamed:
        attrs["renamed_sites"] = json.dumps(labels.renamed)
    if not run.of_package:
        return attrs
    settings = dict(getattr(kernel, "settings", {}))
    attrs["settings"] = json.dumps(settings, default=repr)
    # a user's own part may state NumPy numbers
    attrs["facts"] = json.dumps(
        getattr(kernel, "facts", {}),
        default=lambda value: value.item() if hasattr(value, "item") else repr(value),
    )
    attrs["plates"] = json.dumps(kernel.plates)
    attrs["batch_sizes"] = json.dumps(kernel.batch_sizes)
    temperature = getattr(kernel, "temperature", None)
    if temperature is not None:
        attrs["temperature"] = float(temperature)
        attrs["target"] = _target_sentence(
            temperature, settings.get("temper_prior", False)
        )
    return attrs


def _target_sentence(temperature: float, temper_prior: bool) -> str:
    if temperature == 1:
        return "prior * likelihood"
    if temper_prior:
        return f"(prior * likelihood) ** (1 / {temperature:.6g})"
    return f"prior * likelihood ** (1 / {temperature:.6g})"
