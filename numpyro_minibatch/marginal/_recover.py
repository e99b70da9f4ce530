"""Draws of the latent variables that were integrated out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xarray as xr
from jax import Array
from numpyro.util import find_stack_level

from numpyro_minibatch._internal.checks import check_flag, describe
from numpyro_minibatch.inference_data import as_inference_data, get_group
from numpyro_minibatch.marginal._model import RowsMarginalized
from numpyro_minibatch.marginal._rules import ELSEWHERE
from numpyro_minibatch.marginal._visit import RowsAt, check_marginalized
from numpyro_minibatch.target import condition_inside, with_bound_arguments

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data import InferenceData

__all__ = ["parameters_of", "recover_marginals", "rows_of_plates"]

_PIECE = 2**25  # bytes of the result that are computed at once
# Nodes of each dimension with which states are compared, by the number of dimensions. A
# draw of the continuous sites takes about as many evaluations.
_NODES = {1: 61, 2: 25, 3: 15}


def recover_marginals(
    model: RowsMarginalized,
    idata: InferenceData,
    *args: Any,
    rows: Any = None,
    key: Array | None = None,
    probabilities: bool = False,
    max_bytes: float = 2e9,
    out: str | Path | None = None,
    **kwargs: Any,
) -> InferenceData:
    """Draw the latent variables that were integrated out, given draws of the rest.

    Each draw of the parameters gets one draw of the latent sites of each row from their
    conditional distribution. Together these are draws from the posterior of the
    original model. Discrete sites are drawn first. Their conditional probabilities are
    exact if the row has no continuous site. Otherwise they are integrals over the
    continuous sites, by quadrature with at least 61 nodes for one number, 25 x 25 for
    two and 15 x 15 x 15 for three, and more if the set-up of the run chose more. If
    ``model`` has a ``num_nodes`` of its own, this number is used. A single continuous
    number per row is drawn by inverting its distribution function, tabulated at 193
    points. Two or three numbers are drawn by 64 steps of an independence Metropolis
    chain with proposals from a t distribution at the row's mode.

    Deterministic sites in the plate of the rows are not returned. Compute them from the
    draws: for ``numpyro.deterministic("size", jnp.exp(u))``, write
    ``found["posterior"]["size"] = np.exp(found["posterior"]["u"])``.

    :param model: the result of :func:`marginalize`.
    :param idata: a run of it, as ``to_inference_data`` returned it. Thin it first if
        fewer draws are enough: ``idata.sel(draw=slice(None, None, 10))``.
    :param args: the arguments of the model, with the data.
    :param rows: indices of the rows (groups) to draw for. Default: all. For rows in
        several plates, such as buckets of groups, a dict ``{plate: indices}``.
    :param key: PRNG key, by default ``jax.random.key(0)``.
    :param probabilities: whether to add the conditional probabilities of the states of
        discrete sites, under the name of the site and ``"_probability"``. Their means
        over the draws have less noise than the frequencies of the states.
    :param max_bytes: the largest size of a result in memory.
    :param out: a folder for a result that is larger than memory. The sites are written
        there piece by piece, as ``.npy`` files of shape ``(chains, draws, rows) +
        ...``, and are read from it when they are accessed. Draws of a run in a folder
        (:func:`~numpyro_minibatch.open_run`) are read piece by piece as well.
    :param kwargs: keyword arguments of the model.
    :return: the same groups, with the sites added to ``posterior``. They have the
        dimensions ``chain``, ``draw`` and those of their plates, with the row indices
        as coordinates.
    :raises TypeError: ``model`` is not marginalized.
    :raises ValueError: the run lacks parameters of the model, rows are out of range,
        the result would be larger than ``max_bytes``, or ``out`` has such a file.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist, xarray as xr
        >>> from numpyro_minibatch import marginalize, recover_marginals
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("data", len(y)) as idx:
        ...         z = numpyro.sample("z", dist.Bernoulli(0.5))
        ...         numpyro.sample("y", dist.Normal(mu + 8 * z, 1.0), obs=y[idx])
        >>> draws = xr.Dataset({"mu": (("chain", "draw"), [[0.0, 0.1, -0.1]])})
        >>> idata = xr.DataTree.from_dict({"posterior": draws})
        >>> y = jnp.array([0.3, 7.9, 8.2])
        >>> found = recover_marginals(marginalize(model), idata, y)
        >>> found["posterior"]["z"].mean(("chain", "draw")).values.tolist()
        [0.0, 1.0, 1.0]
    """
    who = "recover_marginals"
    model, args, bound = with_bound_arguments(condition_inside(model), args, kwargs)
    kwargs = dict(bound)
    check_marginalized(who, model)
    check_flag(who, "probabilities", probabilities)
    model = _with_nodes(model, idata, args, kwargs)
    plates = RowsAt.each(who, model, args, kwargs)
    numbers = rows_of_plates(who, rows, plates)
    parameters = parameters_of(who, idata, plates[0])
    shape = next(iter(parameters.values())).shape[:2]
    entries = sum(len(numbers[at.plate]) * len(at.sites) for at in plates)
    size = 4.0 * np.prod(shape) * entries
    if out is None and size > max_bytes:
        count = ", ".join(f"{len(n)} rows of {p!r}" for p, n in numbers.items())
        raise ValueError(
            f"recover_marginals would make at least {size:.2g} bytes: {np.prod(shape)} "
            f"draws of {count}. Choose some rows (rows=[...]), thin the run "
            "(idata.sel(draw=slice(None, None, 10))), write the result to a folder "
            '(out="folder"), or allow more by max_bytes.'
        )
    key = jax.random.key(0) if key is None else key
    result = _Arrays(out, shape)
    posterior = get_group(idata, "posterior")
    assert posterior is not None
    posterior = posterior.transpose("chain", "draw", ...)
    for k, at in enumerate(plates):
        of_plate = key if k == 0 else jax.random.fold_in(key, k)
        some = numbers[at.plate]
        drawn = _drawn(at, some, parameters, of_plate, probabilities, result)
        variables = {name: _with_dims(at, name, value) for name, value in drawn.items()}
        variables = {name.replace("/", "."): v for name, v in variables.items()}
        posterior = posterior.drop_vars(set(variables) & set(posterior.data_vars))
        posterior = posterior.drop_dims(at.plate, errors="ignore")
        posterior = posterior.assign(variables).assign_coords({at.plate: some})
    names = list(idata.children) if isinstance(idata, xr.DataTree) else idata.groups()
    groups = {str(name).lstrip("/"): get_group(idata, str(name)) for name in names}
    attrs = dict(getattr(idata, "attrs", {}))
    return as_inference_data({**groups, "posterior": posterior}, attrs)


def _with_nodes(
    model: RowsMarginalized, idata: Any, args: tuple, kwargs: Mapping[str, Any]
) -> RowsMarginalized:
    """The model with enough nodes to draw from, if the user did not choose them.

    A constant error of a row's log likelihood cancels in a run. It does not cancel
    between the states of a row, which have nodes of their own.
    """
    posterior = get_group(idata, "posterior") if _is_result(idata) else None
    attributes = {} if posterior is None else posterior.attrs
    pilot = json.loads(attributes.get("facts", "{}")).get("pilot", {})
    elsewhere = pilot.get("quadrature_elsewhere", 0.0)
    if elsewhere > ELSEWHERE:
        warnings.warn(
            "recover_marginals: the set-up of the run found a second mode or a heavy "
            "tail of the latent sites of some rows, which holds "
            f"{-np.expm1(-elsewhere):.0%} of row "
            f"{pilot.get('quadrature_row_elsewhere', 0):.0f}. Draws of such rows come "
            "from one part only.",
            UserWarning,
            stacklevel=find_stack_level(),
        )
    levels = model.levels(args, kwargs)
    dimensions = [
        level.dimensions
        for level in levels
        # states of the row, or integrals within the density of an outer row
        if level.states > 1 or any(set(x.plates) < set(level.plates) for x in levels)
    ]
    most = max(dimensions, default=0)
    if model.num_nodes is not None or not most:
        return model
    of_run = pilot.get("quadrature_nodes", 0)
    return replace(model, num_nodes=max(_NODES[most], of_run))


def _is_result(idata: Any) -> bool:
    return isinstance(idata, xr.DataTree) or hasattr(idata, "groups")


def _drawn(
    at: RowsAt,
    numbers: np.ndarray,
    parameters: Mapping[str, xr.DataArray],
    key: Array,
    probabilities: bool,
    result: _Arrays,
) -> dict[str, np.ndarray]:
    """Draws of the sites of some rows of a plate, piece by piece."""

    def look(
        rows: Any, values: Mapping[str, Array], found: Mapping[str, Array]
    ) -> dict[str, Array]:
        more = {f"{name}_probability": p for name, p in found.items()}
        return {**values, **(more if probabilities else {})}

    chains, draws = result.shape
    piece = min(draws, max(1, _PIECE // (4 * len(numbers) * len(at.sites))))
    looker = at.looker(key, look, height=min(piece, at.most_draws(len(numbers))))
    names: dict[str, None] = {}
    for chain in range(chains):
        for start in range(0, draws, piece):
            some = {
                name: x[chain, start : start + piece].to_numpy()
                for name, x in parameters.items()
            }
            found = looker(some, numbers, chain * draws + start)
            result.put(chain, start, found)
            names |= dict.fromkeys(found)
    return {name: result.arrays[name] for name in names}


def _with_dims(at: RowsAt, name: str, value: np.ndarray) -> tuple[list[str], Any]:
    """Dimensions and values of a site, or of the probabilities of its states."""
    site = name if name in at.sites else name.removesuffix("_probability")
    plates = at.sites[site]
    rest = [f"{name}_dim_{k}" for k in range(value.ndim - 2 - len(plates))]
    return ["chain", "draw", *plates, *rest], value


def rows_of_plates(who: str, rows: Any, plates: list[RowsAt]) -> dict[str, np.ndarray]:
    """The requested row indices of each plate."""
    names = [at.plate for at in plates]
    if isinstance(rows, Mapping):
        unknown = [name for name in rows if name not in names]
        if unknown:
            raise ValueError(
                f"{who}(rows=...) got plate {unknown[0]!r}; the plates of the rows "
                f"are: {', '.join(map(repr, names))}."
            )
        return {
            at.plate: chosen_rows(who, rows.get(at.plate), at.size, at.plate)
            for at in plates
        }
    if rows is not None and len(names) > 1:
        raise ValueError(
            f"{who}(rows=...): the rows of this model are in several plates, "
            f"{', '.join(map(repr, names))}. Write rows={{{names[0]!r}: [0, 5], ...}}."
        )
    return {at.plate: chosen_rows(who, rows, at.size, at.plate) for at in plates}


def chosen_rows(who: str, rows: Any, size: int, plate: str) -> np.ndarray:
    """The requested row indices."""
    if rows is None:
        return np.arange(size, dtype=np.int32)
    numbers = np.atleast_1d(np.asarray(rows))
    if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"{who}(rows=...) must be numbers of rows of plate {plate!r}, such as "
            f"rows=[0, 5], got {describe(rows)}."
        )
    if numbers.min() < 0 or numbers.max() >= size:
        raise ValueError(
            f"{who}(rows=...) must be from 0 to {size - 1}, the rows of plate "
            f"{plate!r}, got {numbers.min()} to {numbers.max()}."
        )
    return numbers.astype(np.int32)


class _Arrays:
    """The arrays of a result by the name of their site.

    :param out: the folder for their files; ``None`` keeps them in memory.
    :param shape: the numbers of chains and of draws.
    """

    def __init__(self, out: str | Path | None, shape: tuple[int, ...]) -> None:
        self.out = None if out is None else Path(out)
        self.shape = shape
        self.arrays: dict[str, np.ndarray] = {}

    def put(self, chain: int, start: int, found: Mapping[str, np.ndarray]) -> None:
        """Write some draws of a chain."""
        for name, value in found.items():
            if name not in self.arrays:
                self.arrays[name] = self._new(name, value)
            self.arrays[name][chain, start : start + len(value)] = value

    def _new(self, name: str, value: np.ndarray) -> np.ndarray:
        shape = (*self.shape, *value.shape[1:])
        if self.out is None:
            return np.empty(shape, value.dtype)
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{name.replace('/', '.')}.npy"
        if path.exists():
            raise ValueError(
                f"recover_marginals(out={str(self.out)!r}): {path.name} already "
                "exists. Move it away, or choose another folder."
            )
        return np.lib.format.open_memmap(path, "w+", value.dtype, shape)


def parameters_of(who: str, idata: Any, at: RowsAt) -> dict[str, xr.DataArray]:
    """The parameters of a run by name, chains and draws first, without reading them."""
    posterior = get_group(idata, "posterior") if _is_result(idata) else None
    if posterior is None:
        raise ValueError(
            f"{who} needs a run with a posterior, as to_inference_data(mcmc) returns "
            f"it, got {type(idata).__name__}."
        )
    original = json.loads(posterior.attrs.get("renamed_sites", "{}"))
    found = {original.get(str(n), str(n)): x for n, x in posterior.data_vars.items()}
    missing = [name for name in at.latents if name not in found]
    if missing:
        raise ValueError(
            f"{who}: the run has no draws of {', '.join(map(repr, missing))}, which "
            f"the model has; it has {', '.join(map(repr, found))}. Pass a run of this "
            "model."
        )
    return {n: found[n].transpose("chain", "draw", ...) for n in at.latents}
