"""Error messages for rows that depend on their batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.distributions.distribution import ExpandedDistribution, Independent

from numpyro_minibatch._model.batch_comparison import DIFFERS, Comparison, Difference
from numpyro_minibatch._model.row_axes import suggestion
from numpyro_minibatch._model.values import lines_with_numbers_of_rows
from numpyro_minibatch.target import ModelTarget, Slices, data_frames, flatten_arguments

__all__ = ["message_of"]


def message_of(who: str, comparison: Comparison, found: Difference) -> str:
    """The message: the rows that depend on their batch, by how much, and a remedy."""
    one, other = (f"{x:.4g}" for x in found.values)
    if one == other:
        one, other = (f"{x:.8g}" for x in found.values)
    differs = f"{one} in one batch and {other} in another {DIFFERS[found.between]}"
    target = comparison.target_of(comparison.arrays)
    plates = target.plates
    if not isinstance(target, ModelTarget):
        return (
            f"{who}: log_likelihood(z, indices) of the target does not give rows that "
            f"are independent of each other: row {found.row} of plate {found.plate!r} "
            f"has {differs}. Compute the entry of each index from the row of that "
            "index alone."
        )
    if target.slices is not None:
        return _message_of_slices(who, comparison, target, found, differs)
    if found.plate is None:
        return _message_of_other(who, found, differs, list(plates))
    advice = _advice(comparison, target, found, plates[found.plate])
    return (
        f"{who}: the rows of plate {found.plate!r} are not independent of each other. "
        f"At the same parameters, the log likelihood of row {found.row} at site "
        f"{found.site!r} is {differs}. {advice}"
    )


def _message_of_other(
    who: str, found: Difference, differs: str, plates: list[str]
) -> str:
    names = ", ".join(map(repr, plates))
    where = f"plate{'s' if len(plates) > 1 else ''} {names}"
    site = found.site
    if site.startswith("_") and site.endswith("_log_det"):
        site = site.removeprefix("_").removesuffix("_log_det")
    what = (
        "It uses the number of rows of the batch: use the number of all rows, len(y) "
        "and not len(y[idx])."
        if found.between == "size"
        else "It reads rows of the batch: compute it from all of the data before "
        "indexing them, y.mean() and not y[idx].mean(). If it is a likelihood of "
        "rows, put it inside the plate."
    )
    return (
        f"{who}: site {site!r} is outside of {where}, and yet depends on the batch: "
        f"at the same parameters its log density is {differs}. {what}"
    )


def _message_of_slices(
    who: str,
    comparison: Comparison,
    target: ModelTarget,
    found: Difference,
    differs: str,
) -> str:
    """The message for a model that is run on rows of its arguments."""
    assert target.slices is not None
    arguments = target.args, dict(target.kwargs)
    given = ", ".join(map(repr, target.slices.names(target.model, arguments)))
    example = suggestion(target.model, arguments, target.slices.leaves)
    what = (
        f"site {found.site!r} depends on which rows of {given} it is given"
        if found.between != "size"
        else f"site {found.site!r} depends on how many rows of {given} it is given"
    )
    value = "its log density" if found.plate is None else f"of row {found.row} it"
    cause = ""
    if found.plate is None and _is_event_of_rows(comparison, target, found.site):
        return (
            f"{who}: observed site {found.site!r} is in no plate and has its entries "
            "as one event, although they are rows of the data: leave out "
            ".to_event(...), or move it into the plate of the data. If its entries "
            "depend on each other, use NUTS."
        )
    if found.plate is not None:
        site = _describe(comparison, found)
        if site.event:
            cause = f"{_advice(comparison, target, found, 0)} "
    if found.between == "size":
        of_rows = target.slices.names(target.model, arguments)
        lines = lines_with_numbers_of_rows(target.model, of_rows)
        if lines:
            cause += f"It is computed with a number of rows in {'; '.join(lines[:3])}. "
    known = {number for number, _, _ in target.slices.leaves}
    left = tuple(
        (number, "", 0)
        for number, leaf in enumerate(flatten_arguments(arguments)[0])
        if number not in known
        and hasattr(leaf, "shape")
        and set(leaf.shape) & set(target.plates.values())
    )
    if left:
        whole = ", ".join(map(repr, Slices(left).names(target.model, arguments)))
        cause += (
            f"All entries of {whole} are passed at every step: if those are rows, "
            "name them in rows=, too. "
        )
    return (
        f"{who}: the model does not index its data by a plate, so it is run on rows of "
        f"its arguments, and {what}: at the same parameters {value} is {differs}. "
        f"{cause}Compute everything that needs all rows (means, numbers of rows, lags) "
        "before the model and pass it as an argument; what NumPy computes from an "
        "argument, such as np.mean(x), has all rows, too. If an argument has this "
        "length by chance and has no rows, name the arguments that have rows, with "
        f"their axes: the current ones are {example}; leave it out of them. If rows "
        "depend on each other in the model itself, use NUTS."
    )


class _Described(NamedTuple):
    """The description of a site in an error.

    :param kind: the class of its distribution.
    :param factor: whether it is a factor.
    :param event: whether the rows have no axis of their own in its log density.
    :param independent: whether they are an event by ``to_event``.
    """

    kind: str
    factor: bool
    event: bool
    independent: bool


def _layers(fn: Any) -> list[Any]:
    """A distribution and those that it wraps."""
    found = [fn]
    while isinstance(found[-1], ExpandedDistribution | Independent):
        found.append(found[-1].base_dist)
    return found


def _own_batch(fn: Any) -> tuple[int, ...]:
    """The batch shape of a distribution before plates expanded it."""
    if isinstance(fn, ExpandedDistribution):
        return _own_batch(fn.base_dist)
    if isinstance(fn, Independent):
        inner = _own_batch(fn.base_dist)
        return inner[: max(0, len(inner) - fn.reinterpreted_batch_ndims)]
    return tuple(fn.batch_shape)


def _describe(comparison: Comparison, found: Difference) -> _Described:
    described: list[_Described] = []

    def run(arrays: list[Any], z: Any, indices: Any) -> None:
        target = comparison.target_of(arrays)
        assert isinstance(target, ModelTarget)
        site = target.sites_at(z, indices)[found.site]
        (frame,) = data_frames(site, target.sizes)
        fn = site["fn"]
        value = jnp.shape(site["value"])
        shapes = _own_batch(fn), value[: len(value) - fn.event_dim]
        has_axis = any(len(s) >= -frame.dim and s[frame.dim] > 1 for s in shapes)
        factor = bool(site["infer"].get("is_auxiliary", False))
        kinds = [type(part) for part in _layers(fn)]
        independent = Independent in kinds
        name = kinds[-1].__name__
        described.append(_Described(name, factor, not has_axis, independent))

    jax.eval_shape(run, comparison.arrays, comparison.position, comparison.batch(0))
    return described[-1]


def _is_event_of_rows(comparison: Comparison, target: Any, name: str) -> bool:
    """Whether an observed site has the rows of a batch as an event."""
    lengths: list[int] = []

    def run(arrays: list[Any], z: Any, indices: Any) -> None:
        site = comparison.target_of(arrays).sites_at(z, indices).get(name)  # type: ignore[attr-defined]
        if site is None or not site["is_observed"]:
            return
        event = site["fn"].event_dim
        shape = jnp.shape(site["value"])
        lengths.append(max(shape[len(shape) - event :], default=0) if event else 0)

    for size in (0, 1):
        batch = comparison.batch(size)
        jax.eval_shape(run, comparison.arrays, comparison.position, batch)
    return len(set(lengths)) > 1


def _advice(
    comparison: Comparison, target: ModelTarget, found: Difference, size: int
) -> str:
    """A remedy."""
    site = _describe(comparison, found)
    if site.event and site.factor:
        return (
            f"numpyro.factor({found.site!r}, ...) got one number for the whole batch: "
            "give it one number for each row, and do not sum over the rows."
        )
    if site.event and site.independent:
        return (
            "Its distribution has the rows as an event, one log likelihood for the "
            f"whole batch: leave out the .to_event(...) over the rows, as in "
            f'numpyro.sample("{found.site}", dist.{site.kind}(...), obs=...).'
        )
    if site.event:
        return (
            f"Its {site.kind} has the rows as an event, one log likelihood for the "
            "whole batch. A distribution over all rows together has no minibatches: "
            "use NUTS, or a likelihood that is a product over the rows."
        )
    use_nuts = (
        "If the model's rows do depend on each other, as in a time series, use NUTS."
    )
    if found.between == "order":
        return (
            "It reads neighbours inside of the batch. Index all of the data for them, "
            "for example y[idx - 1], or shift the data before the plate and index the "
            f"result by idx. {use_nuts}"
        )
    if found.between == "rows":
        return (
            "It computes a statistic of the batch, such as a mean or a sum over its "
            "rows. Compute it from all of the data before the plate and index the "
            f"result, ((x - x.mean()) / x.std())[idx]. {use_nuts}"
        )
    return (
        "It uses the number of rows of the batch. Use the number of all rows, "
        f"{size}, and leave the scaling of minibatches to the plate."
    )
