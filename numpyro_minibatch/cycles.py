"""Weights of cycles, and draws resampled by such weights.

Each cycle of :class:`~numpyro_minibatch.Cyclical` samples the mode that it reached. The
number of visits to a mode carries little information about its mass.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np
import xarray as xr
from numpyro.util import find_stack_level
from scipy.special import digamma, logsumexp

from numpyro_minibatch._internal.checks import check_count, describe
from numpyro_minibatch._model.replay import CHUNK, Run, log_densities
from numpyro_minibatch.inference_data import as_inference_data, get_group, samples_of

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data import InferenceData

__all__ = ["densities", "draw_weights", "effective_cycles", "reweight", "weights"]

Method = Literal["equal", "harmonic", "laplace"]


def weights(
    idata: InferenceData, method: Method = "equal", densities: xr.Dataset | None = None
) -> xr.DataArray:
    """Weights of cycles, of all chains together, which sum to one.

    :param idata: what :func:`~numpyro_minibatch.to_inference_data` returned for a run
        of a cyclical kernel.
    :param method: ``"equal"``: each cycle has the same weight. ``"harmonic"``: the
        inverse of the mean inverse likelihood of the draws, as in the paper [1], in
        logarithms. ``"laplace"``: the mean density of the draws times the volume of the
        normal distribution that fits them.
    :param densities: what :func:`densities` returned; for all methods but ``"equal"``.
    :return: dimensions ``chain`` and ``cycle``.
    :raises ValueError: there are no cycles, the method is not known or lacks densities,
        or a cycle has too few draws to estimate its volume.

    ``"harmonic"`` warns: it estimates the mass of a region divided by its **prior**
    mass, so that of two modes with the same mass the wider one gets less weight. Its
    variance is infinite in general, and its error grows with the number of parameters.
    ``"laplace"`` has neither fault if all draws of a cycle belong to one mode that is
    nearly normal; it needs clearly more draws per cycle than there are parameters. No
    method detects that two cycles sampled the same mode, which then counts twice.

    **References:**

    1. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson
       (2020), *Cyclical stochastic gradient MCMC for Bayesian deep learning*, ICLR,
       section F.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalSGLD, cycles, to_inference_data

        >>> def model(y):  # the sign of mu is not determined
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=50) as idx:
        ...         numpyro.sample("obs", dist.Normal(jnp.abs(mu), 5), obs=y[idx])

        >>> y = 3 + 5 * jax.random.normal(jax.random.key(0), (1000,))
        >>> kernel = CyclicalSGLD(model, step_size=0.02, cycle_length=500)
        >>> mcmc = MCMC(kernel, num_warmup=0, num_samples=400, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> idata = to_inference_data(mcmc)
        >>> w = cycles.weights(idata, "laplace", cycles.densities(mcmc))
        >>> dict(w.sizes), 0.999 < float(w.sum()) < 1.001
        ({'chain': 1, 'cycle': 4}, True)
    """
    if method not in get_args(Method):
        known = ", ".join(map(repr, get_args(Method)))
        raise ValueError(
            f"weights(method=...) must be one of {known}, got {describe(method)}."
        )
    posterior, numbers = _cycles_of("weights", idata)
    if method != "equal" and densities is None:
        raise ValueError(
            f"weights(method={method!r}) needs the likelihood of all rows at each draw."
            f" Write weights(idata, {method!r}, cycles.densities(mcmc))."
        )
    names = np.unique(numbers)
    chains = posterior.sizes["chain"]
    log_w = np.zeros((chains, len(names)))
    if method != "equal":
        assert densities is not None
        temperature = float(posterior.attrs.get("temperature", 1.0))
        likelihood = densities["log_likelihood"].values / temperature
        if likelihood.shape != numbers.shape:
            raise ValueError(
                f"weights(densities=...) has {likelihood.shape} chains and draws, but "
                f"the run has {numbers.shape}: pass cycles.densities of the same run."
            )
        density = likelihood + densities["log_prior"].values / (
            temperature if _tempers_prior(posterior) else 1.0
        )
        if method == "harmonic":
            warnings.warn(
                "weights(method='harmonic') is the harmonic mean of the likelihood: it "
                "ignores the prior mass of a mode's region, and its variance is "
                "infinite in general. See cycles.weights for 'laplace'.",
                UserWarning,
                stacklevel=find_stack_level(),
            )
        for chain in range(chains):
            for place, name in enumerate(names):
                here = numbers[chain] == name
                if method == "harmonic":
                    inverse = logsumexp(-likelihood[chain, here])
                    log_w[chain, place] = np.log(here.sum()) - inverse
                else:
                    draws = _matrix(posterior, densities, chain)[here]
                    log_w[chain, place] = density[chain, here].mean() + _log_volume(
                        draws, int(name)
                    )
    w = np.exp(log_w - logsumexp(log_w))
    return xr.DataArray(
        w,
        dims=("chain", "cycle"),
        coords={"chain": posterior["chain"], "cycle": names},
        name="weight",
        attrs={"method": method},
    )


def _log_volume(draws: np.ndarray, cycle: int) -> float:
    """The log of mass over geometric mean density, for the fitted normal.

    The mean of ``log p - log w`` over draws of ``p / w = N(mean, cov)`` is ``-d / 2 -
    log det(2 pi cov) / 2``, minus the entropy.
    """
    count, d = draws.shape
    if count < d + 2:
        raise ValueError(
            f"weights(method='laplace'): cycle {cycle} has {count} draws, but the "
            f"covariance of {d} parameters needs at least {d + 2}. Write a larger "
            "samples_per_cycle, or method='equal'."
        )
    cov = np.atleast_2d(np.cov(draws.T))
    sign, log_det = np.linalg.slogdet(2 * np.pi * cov)
    if sign <= 0 or not np.isfinite(log_det):
        raise ValueError(
            f"weights(method='laplace'): the draws of cycle {cycle} have no volume: "
            "some of their values are constant, or are determined by others, as in a "
            "simplex. Write method='equal'."
        )
    # the bias of the log determinant of a sample covariance
    places = np.arange(1, d + 1)
    bias = (digamma((count - places) / 2) + np.log(2 / (count - 1))).sum()
    return float(0.5 * (log_det - bias + d))


def densities(
    run: Any,
    kernel: Any = None,
    *args: Any,
    model_kwargs: Mapping[str, Any] | None = None,
    chunk_size: int = CHUNK,
) -> xr.Dataset:
    """Log prior and log likelihood of every draw, on all rows of the data.

    :param run: a ``numpyro.infer.MCMC`` that has run, with a kernel of this package; or
        what :func:`~numpyro_minibatch.sample` or
        :func:`~numpyro_minibatch.to_inference_data` returned, which holds neither the
        model nor its data.
    :param kernel: in that case, the kernel that made these draws.
    :param args: in that case, the positional arguments of the model.
    :param model_kwargs: in that case, its keyword arguments.
    :param chunk_size: how many log likelihoods of rows are computed at a time.
    :return: ``log_prior`` and ``log_likelihood``, at temperature 1, with dimensions
        ``chain`` and ``draw``; densities with respect to the values of the draws.
    :raises TypeError: results come without their kernel, or ``MCMC`` with one.
    :raises ValueError: the kernel is not of this package, or has not seen the data.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import CyclicalSGLD, Target, cycles, sample
        >>> target = Target(lambda z: -0.5 * z**2, lambda z, rows: 0.0 * rows * z, 100)
        >>> kernel = CyclicalSGLD(target=target, batch_size=10, step_size=0.1,
        ...                       cycle_length=10)
        >>> mcmc = MCMC(kernel, num_warmup=0, num_samples=4, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), init_params=jnp.zeros(()))
        >>> found = cycles.densities(mcmc)
        >>> bool(jnp.allclose(found["log_prior"].values[0],
        ...                   -0.5 * mcmc.get_samples()**2))
        True

        >>> idata = sample(kernel, num_warmup=0, num_samples=4, progress=False,
        ...                init_params=jnp.zeros((1,)))
        >>> cycles.densities(idata, kernel)["log_prior"].shape
        (1, 4)
    """
    check_count("densities", "chunk_size", chunk_size)
    target, samples = _sampled(run, kernel, args, model_kwargs or {})
    names = list(samples) if isinstance(samples, Mapping) else ["z"]
    chains, draws = np.shape(jax.tree.leaves(samples)[0])[:2]
    flattened = jax.tree.map(
        lambda x: np.reshape(x, (chains * draws, *x.shape[2:])), samples
    )
    prior, likelihood = log_densities(target, flattened, chunk_size)
    shape, dims = (chains, draws), ("chain", "draw")
    return xr.Dataset(
        {
            "log_prior": (dims, prior.reshape(shape)),
            "log_likelihood": (dims, likelihood.reshape(shape)),
        },
        attrs={"sites": json.dumps([name.replace("/", ".") for name in names])},
    )


def _sampled(
    run: Any, kernel: Any, args: tuple, model_kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The target of a run and its draws, with axes of chains and draws."""
    is_mcmc = hasattr(run, "get_samples")
    if is_mcmc and (kernel is not None or args or model_kwargs):
        raise TypeError(
            "densities(mcmc) takes the kernel and the data from the MCMC: leave the "
            "other arguments out. They belong to what sample(...) returned."
        )
    if not is_mcmc and (kernel is None or not _is_result(run)):
        raise TypeError(
            "densities(...) takes an MCMC that has run, or what sample(kernel, *args) "
            "returned with the same kernel and arguments: write densities(idata, "
            f"kernel, *args). Got {type(run).__name__}"
            f"{' without a kernel' if kernel is None else ''}."
        )
    replayed = Run.of(run) if is_mcmc else Run.of_kernel(kernel, args, model_kwargs)
    target: Any = replayed.target
    if target is None and replayed.of_package:
        target = replayed.kernel.make_target((), {})
    if not replayed.of_package or target is None:
        raise ValueError(
            "densities needs a run of a kernel of numpyro_minibatch, got "
            f"{type(replayed.kernel).__name__}."
        )
    samples = run.get_samples(group_by_chain=True) if is_mcmc else samples_of(run)
    if replayed.target is not None:
        return target, {n: samples[n] for n, s in replayed.sites.items() if s.latent}
    return target, samples


def draw_weights(idata: InferenceData, weights: xr.DataArray) -> xr.DataArray:
    """Weights of draws, which sum to one: draws of a cycle share its weight equally.

    :param idata: the run.
    :param weights: of its cycles, from :func:`weights`.
    :return: dimensions ``chain`` and ``draw``. An expectation is ``(posterior *
        draw_weights).sum(("chain", "draw"))``.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import cycles
        >>> numbers = xr.Dataset({"cycle": (("chain", "draw"), [[0, 0, 1]])})
        >>> run = xr.DataTree.from_dict({"posterior": numbers, "sample_stats": numbers})
        >>> cycles.draw_weights(run, cycles.weights(run)).values.tolist()
        [[0.25, 0.25, 0.5]]
    """
    posterior, numbers = _cycles_of("draw_weights", idata)
    names = weights["cycle"].values
    missing = np.setdiff1d(numbers, names)
    if missing.size or weights.sizes["chain"] != len(numbers):
        raise ValueError(
            f"draw_weights(weights) has {weights.sizes['chain']} chains and cycles "
            f"{names.tolist()}, but the run has {len(numbers)} chains and cycles "
            f"{np.unique(numbers).tolist()}: pass cycles.weights of the same run."
        )
    found = np.zeros(numbers.shape)
    for place, name in enumerate(names):
        here = numbers == name
        share = weights.transpose("chain", "cycle").values[:, place]
        found += here * (share / np.maximum(here.sum(1), 1))[:, None]
    coords = {n: posterior[n] for n in ("chain", "draw") if n in posterior.coords}
    return xr.DataArray(found, dims=("chain", "draw"), coords=coords)


def reweight(
    idata: InferenceData,
    weights: xr.DataArray,
    num_draws: int | None = None,
    seed: int = 0,
) -> InferenceData:
    """Draws in proportion to the weights of their cycles, as one chain.

    Draws are resampled systematically: a draw of weight ``w`` occurs ``num_draws * w``
    times, rounded up or down. R-hat and effective sample size are meaningless for the
    result; see :func:`effective_cycles`.

    :param idata: the run.
    :param weights: of its cycles, from :func:`weights`.
    :param num_draws: the number of draws, by default as many as there are.
    :param seed: of the random start of systematic resampling.
    :return: all groups that have draws, with one chain; the other groups unchanged.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import cycles
        >>> numbers = xr.Dataset({"cycle": (("chain", "draw"), [[0, 0, 1]])})
        >>> run = xr.DataTree.from_dict({"posterior": numbers, "sample_stats": numbers})
        >>> new = cycles.reweight(run, cycles.weights(run), num_draws=4)
        >>> new["posterior"]["cycle"].values.tolist()
        [[0, 0, 1, 1]]
    """
    of_draws = draw_weights(idata, weights)
    total = of_draws.size
    number = total if num_draws is None else num_draws
    check_count("reweight", "num_draws", number)
    start = np.random.default_rng(seed).random()
    comb = (np.arange(number) + start) / number
    edges = np.cumsum(of_draws.values.ravel())
    # the last edge is one up to rounding
    chosen = np.minimum(np.searchsorted(edges / edges[-1], comb), total - 1)
    chain, draw = np.unravel_index(chosen, of_draws.shape)
    groups: dict[str, Any] = {}
    for name in _group_names(idata):
        group = get_group(idata, name)
        assert group is not None
        has_draws = {"chain", "draw"} <= set(group.dims)
        if not has_draws or name.startswith("warmup"):
            groups[name] = group
        elif group.sizes["draw"] == of_draws.shape[1]:
            place = {
                "chain": xr.DataArray(chain, dims="draw"),
                "draw": xr.DataArray(draw, dims="draw"),
            }
            picked = group.isel(place).drop_vars(["chain", "draw"], errors="ignore")
            picked = picked.expand_dims(chain=[0]).assign_coords(draw=np.arange(number))
            method = weights.attrs.get("method", "given")
            groups[name] = picked.transpose("chain", "draw", ...).assign_attrs(
                group.attrs, reweighted=method
            )
    return as_inference_data(groups, dict(getattr(idata, "attrs", {})))


def effective_cycles(weights: xr.DataArray) -> float:
    """The effective number of cycles, given their weights.

    :param weights: from :func:`weights`; they need not sum to one.
    :return: ``sum(w) ** 2 / sum(w ** 2)``: the number of cycles if all weights are the
        same, 1 if one has all the weight.

    **Example**

    .. doctest::

        >>> import xarray as xr
        >>> from numpyro_minibatch import cycles
        >>> cycles.effective_cycles(xr.DataArray([0.5, 0.5, 0.0]))
        2.0
    """
    w = np.asarray(weights, float)
    return float(w.sum() ** 2 / (w**2).sum())


def _group_names(idata: Any) -> list[str]:
    if isinstance(idata, xr.DataTree):
        return list(idata.children)
    return list(idata.groups())


def _is_result(found: Any) -> bool:
    return isinstance(found, xr.DataTree) or hasattr(found, "groups")


def _cycles_of(who: str, idata: Any) -> tuple[xr.Dataset, np.ndarray]:
    """The posterior, and the cycle of each draw, ``(chain, draw)``."""
    if not _is_result(idata):
        raise TypeError(
            f"{who}(idata) takes what to_inference_data(mcmc) returned, got "
            f"{type(idata).__name__}."
        )
    posterior, stats = (get_group(idata, n) for n in ("posterior", "sample_stats"))
    if posterior is None or stats is None or "cycle" not in stats:
        raise ValueError(
            f"{who}(idata) needs the cycles of draws, which a run of Cyclical, "
            "CyclicalSGLD, CyclicalSGHMC or CyclicalMINT records in sample_stats."
        )
    return posterior, stats["cycle"].transpose("chain", "draw").values


def _matrix(posterior: xr.Dataset, densities: xr.Dataset, chain: int) -> np.ndarray:
    """The draws of a chain, ``(draw, parameter)``, of the density's arguments."""
    columns = []
    for name in json.loads(densities.attrs["sites"]):
        values = posterior[name].transpose("chain", "draw", ...).values[chain]
        columns.append(values.reshape(len(values), -1).astype(float))
    return np.concatenate(columns, -1)


def _tempers_prior(posterior: xr.Dataset) -> bool:
    return posterior.attrs.get("target", "").startswith("(")
