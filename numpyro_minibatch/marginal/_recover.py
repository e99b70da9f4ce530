"""Draws of the latent variables that were integrated out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xarray as xr
from jax import Array

from numpyro_minibatch._internal.checks import check_flag, describe
from numpyro_minibatch.inference_data import as_inference_data, get_group, samples_of
from numpyro_minibatch.marginal._model import RowsMarginalized
from numpyro_minibatch.marginal._visit import RowsAt, check_marginalized

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data import InferenceData

__all__ = ["chosen_rows", "recover_marginals", "values_of"]


def recover_marginals(
    model: RowsMarginalized,
    idata: InferenceData,
    *args: Any,
    rows: Any = None,
    key: Array | None = None,
    probabilities: bool = False,
    max_bytes: float = 2e9,
    **kwargs: Any,
) -> InferenceData:
    """Draw the latent variables that were integrated out, given draws of the rest.

    Each draw of the parameters gets one draw of the latent sites of each row from their
    conditional distribution. Together these are draws from the posterior of the
    original model. Discrete sites are drawn exactly. A single continuous number per row
    is drawn by inverting its distribution function, tabulated at 193 points. Two or
    three numbers are drawn, after a joint state of the discrete sites, by 64 steps of
    an independence Metropolis chain with proposals from a t distribution at the row's
    mode.

    :param model: the result of :func:`marginalize`.
    :param idata: a run of it, as ``to_inference_data`` returned it. Thin it first if
        fewer draws are enough: ``idata.sel(draw=slice(None, None, 10))``.
    :param args: the arguments of the model, with the data.
    :param rows: indices of the rows (groups) to draw for. Default: all.
    :param key: PRNG key, by default ``jax.random.key(0)``.
    :param probabilities: whether to add the conditional probabilities of the states of
        discrete sites, under the name of the site and ``"_probability"``. Their means
        over the draws have less noise than the frequencies of the states.
    :param max_bytes: the largest size of the result.
    :param kwargs: keyword arguments of the model.
    :return: the same groups, with the sites added to ``posterior``. They have the
        dimensions ``chain``, ``draw`` and those of their plates, with the row indices
        as coordinates.
    :raises TypeError: ``model`` is not marginalized.
    :raises ValueError: the run lacks parameters of the model, rows are out of range, or
        the result would be larger than ``max_bytes``.

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
    check_marginalized(who, model)
    check_flag(who, "probabilities", probabilities)
    at = RowsAt.of(who, model, args, kwargs)
    numbers = chosen_rows(who, rows, at.size, at.plate)
    draws, shape = values_of(who, idata, at)

    def look(
        rows: Any, values: Mapping[str, Array], found: Mapping[str, Array]
    ) -> dict[str, Array]:
        more = {f"{name}_probability": p for name, p in found.items()}
        return {**values, **(more if probabilities else {})}

    size = 4.0 * np.prod(shape) * len(numbers) * len(at.sites)
    if size > max_bytes:
        raise ValueError(
            f"recover_marginals would make at least {size:.2g} bytes: {np.prod(shape)} "
            f"draws of {len(numbers)} rows and {len(at.sites)} sites. Choose some rows "
            "(rows=[...]), thin the run (idata.sel(draw=slice(None, None, 10))), or "
            "allow more by max_bytes."
        )
    key = jax.random.key(0) if key is None else key
    found = at.looker(key, look)(draws, numbers)
    posterior = get_group(idata, "posterior")
    assert posterior is not None
    variables = {}
    for name, value in found.items():
        site = name if name in at.sites else name.removesuffix("_probability")
        plates = at.sites[site]
        rest = [f"{name}_dim_{k}" for k in range(value.ndim - 1 - len(plates))]
        dims = ["chain", "draw", *plates, *rest]
        variables[name.replace("/", ".")] = (
            dims,
            value.reshape(*shape, *value.shape[1:]),
        )
    clash = set(variables) & set(posterior.data_vars)
    posterior = posterior.drop_vars(clash).transpose("chain", "draw", ...)
    posterior = posterior.drop_dims(at.plate, errors="ignore")
    posterior = posterior.assign(variables).assign_coords({at.plate: numbers})
    names = list(idata.children) if isinstance(idata, xr.DataTree) else idata.groups()
    groups = {str(name).lstrip("/"): get_group(idata, str(name)) for name in names}
    attrs = dict(getattr(idata, "attrs", {}))
    return as_inference_data({**groups, "posterior": posterior}, attrs)


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


def values_of(
    who: str, idata: Any, at: RowsAt
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
    """The parameters of a run along one axis, and the numbers of chains and draws."""
    is_result = isinstance(idata, xr.DataTree) or hasattr(idata, "groups")
    if not is_result or get_group(idata, "posterior") is None:
        raise ValueError(
            f"{who} needs a run with a posterior, as to_inference_data(mcmc) returns "
            f"it, got {type(idata).__name__}."
        )
    found = samples_of(idata)
    missing = [name for name in at.latents if name not in found]
    if missing:
        raise ValueError(
            f"{who}: the run has no draws of {', '.join(map(repr, missing))}, which "
            f"the model has; it has {', '.join(map(repr, found))}. Pass a run of this "
            "model."
        )
    first = found[at.latents[0]]
    flat = {n: found[n].reshape(-1, *found[n].shape[2:]) for n in at.latents}
    return flat, (first.shape[0], first.shape[1])
