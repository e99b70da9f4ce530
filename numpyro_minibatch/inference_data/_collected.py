"""The draws and statistics that a driver collected, flat and by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["collected_groups"]

# The statistics that have another name in ArviZ's schema or NumPyro's converters.
_RENAMED_STATS = {
    "accept_prob": "acceptance_rate",
    "potential_energy": "lp",  # with the opposite sign; never a minibatch estimate
    "num_steps": "n_steps",
    "adapt_state.step_size": "step_size",
}


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
    # the driver remembers arguments before it uses them
    data = getattr(mcmc.sampler, "data", None)
    other = "" if data is None else data.difference(mcmc._args, mcmc._kwargs)
    if other:
        raise ValueError(
            "to_inference_data(mcmc): the draws are not those of the last run, which "
            f"ended with an error, but of one with other data: {other}. Run it again."
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
