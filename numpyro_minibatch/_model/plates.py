"""The choice of the plates to subsample, and errors for models without any."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from numpyro_minibatch._model.sites import (
    MOST_DIMENSIONS,
    Site,
    batch_shape,
    own_sizes,
)

__all__ = [
    "Advised",
    "PLAIN",
    "candidates",
    "check_sites",
    "choose_plates",
    "example_plate",
    "few_rows",
    "missing_values",
    "one_row",
    "other_lengths",
]


# how parameters of some distributions follow from the rows of a regression
_OF_ROWS = {
    "BernoulliLogits": "Bernoulli(logits=X[idx] @ beta)",
    "BernoulliProbs": "Bernoulli(logits=X[idx] @ beta)",
    "Poisson": "Poisson(jnp.exp(X[idx] @ beta))",
    "Normal": "Normal(X[idx] @ beta, 1.0)",
}


def example_plate(size: int, plate: str = "data", site: Site | None = None) -> str:
    """A model that indexes its data by a plate, for the messages.

    :param site: the observed site, for its name and its distribution.
    """
    name = "obs" if site is None else site.name
    kind = "Normal" if site is None else site.kind.removesuffix(".to_event")
    fn = _OF_ROWS.get(kind, f"{kind}(X[idx] @ beta, ...)")
    factor = site is not None and site.auxiliary
    line = (
        f'numpyro.factor("{name}", log_prob(X[idx], y[idx]))'
        if factor
        else f'numpyro.sample("{name}", dist.{fn}, obs=y[idx])'
    )
    return (
        f'\n    with numpyro.plate("{plate}", {size}) as idx:\n        {line}'
        f'\nand pass batch_size={{"{plate}": {few_rows(size)}}}.'
    )


def missing_values(unobserved: str) -> str:
    """A remedy for a continuous site of missing values.

    :param unobserved: the name of the site that ``obs_mask=`` made.
    """
    name = unobserved.removesuffix("_unobserved")
    return (
        "Integrate them out by numpyro_minibatch.marginalize(model). If nothing else "
        "in the model uses the value of the site, leave them out instead:"
        "\n    with numpyro.handlers.mask(mask=obs_mask):"
        f'\n        numpyro.sample("{name}", ..., obs={name})'
    )


def few_rows(size: int) -> int:
    """A number of rows of a batch with which a kernel of gradient steps runs.

    :param size: the number of all rows.
    """
    return max(2, min(100, size // 10))


def one_row(who: str, plate: str) -> str:
    """The message for a plate with a single row.

    :param who: the kernel's name.
    :param plate: the plate.
    """
    return (
        f"{who}: plate {plate!r} has 1 row, so that there is nothing to subsample, and "
        "the variance between rows is not defined. Sample the model with NumPyro's "
        "NUTS. If the data have more rows, give the plate their number."
    )


class Advised(NamedTuple):
    """Advice for a kernel that no one gave the rows of a batch.

    :param rows: their number, of the rows of a plate and the number of parameters.
    :param control_variate: whether the kernel takes one, whose set-up chooses them.
    """

    rows: Callable[[int, int], int] = lambda rows, parameters: few_rows(rows)
    control_variate: bool = True


PLAIN = Advised()


def choose_plates(
    who: str,
    sites: list[Site],
    sizes: int | Mapping[str, int] | None,
    full: bool,
    default: int | None = None,
    advised: Advised = PLAIN,
    lengths: Collection[int] | None = None,
    around: str = "",
) -> tuple[dict[str, int], dict[str, int]]:
    """The rows of one draw of each subsampled plate, and the sizes of these plates.

    :param advised: what to advise where no rows of a batch are given.
    :param around: what to advise about arrays around the model, if it reads any.
    :raises ValueError: there is none, or the sizes given do not fit the model.
    """
    plates = {s.name: s.args for s in sites if s.type == "plate"}
    own = own_sizes(sites)
    listing = ", ".join(f"{n!r} ({a[0]} rows)" for n, a in plates.items()) or "none"
    # sorted: the message must not depend on the hashes of strings
    in_scan = sorted({f.name for s in sites for f in s.frames} - set(plates))
    subsampled_in_scan = [
        f.name for s in sites if s.scaled for f in s.frames if f.name in in_scan
    ]
    if subsampled_in_scan:
        raise ValueError(_inside_scan(who, subsampled_in_scan[0]))
    if isinstance(sizes, Mapping):
        unknown = [name for name in sizes if name not in plates]
        if unknown and unknown[0] in in_scan:
            raise ValueError(_inside_scan(who, unknown[0]))
        if unknown:
            raise ValueError(
                f"{who} got batch_size for plate {unknown[0]!r}, which the model does "
                f"not have; its plates are: {listing}."
            )
        widths = {**own, **sizes}
    elif full:
        widths = dict.fromkeys(list(own) or candidates(sites, plates, lengths), 0)
    elif sizes is None and default is not None and not own:
        found = candidates(sites, plates, lengths)
        widths = {name: min(default, plates[name][0]) for name in found}
    elif sizes is None:
        widths = own
    else:
        names = list(own) or candidates(sites, plates, lengths)
        if len(names) > 1:
            raise ValueError(
                f"{who} got batch_size={sizes}, but the model has several plates that "
                f"can be subsampled: {', '.join(map(repr, names))}. Say which: "
                f"batch_size={{{names[0]!r}: {sizes}}}."
            )
        widths = dict.fromkeys(names, sizes)
    if full:
        widths = {name: plates[name][0] for name in widths}
    if not widths:
        raise ValueError(
            _no_plate(who, sites, plates, in_scan, listing, advised, around)
        )
    for name, width in widths.items():
        size = plates[name][0]
        if size == 1:
            raise ValueError(one_row(who, name))
        if width > size:
            raise ValueError(
                f"{who} got batch_size={width} for plate {name!r}, which has only "
                f"{size} rows. Use at most {size}, the full batch."
            )
    return widths, {name: plates[name][0] for name in widths}


def _no_plate(
    who: str,
    sites: list[Site],
    plates: Mapping[str, tuple[Any, ...]],
    in_scan: list[str],
    listing: str,
    advised: Advised,
    around: str,
) -> str:
    """The reason why no plate is subsampled, and a remedy.

    :param in_scan: plates in a scan.
    :param listing: the plates of the model, described.
    :param around: what to advise about arrays around the model, if it reads any.
    """
    samples = [s for s in sites if s.type == "sample"]
    if in_scan:
        latents = [s for s in samples if not s.observed]
        local = [s for s in latents if s.discrete and s.inside(in_scan)]
        return _inside_scan(who, in_scan[0], local[0].name if local else "")
    if samples and not any(s.observed for s in samples):
        unobserved = ", ".join(repr(s.name) for s in samples)
        return (
            f"{who}: the model observes nothing, all of its sites ({unobserved}) "
            "are parameters. Pass the data, for example mcmc.run(key, X, y), "
            "and in the model to the likelihood, obs=y[idx]."
        )
    ready = candidates(sites, plates)
    if ready:
        name = max(ready, key=lambda name: plates[name][0])
        size = plates[name][0]
        parameters = [s for s in samples if not s.observed]
        number = sum(math.prod(s.free_shape) for s in parameters)
        return _needs_batch_size(who, name, size, number, advised)
    return (
        f"{who} needs a data plate whose rows it can subsample, and found none to "
        f"subsample among the model's plates: {listing}. "
        f"{_why_no_rows(sites, plates, around)}"
    )


def _needs_batch_size(
    who: str, plate: str, size: int, parameters: int, advised: Advised
) -> str:
    rows = advised.rows(size, parameters)
    needed = f"{who} needs a batch size for plate {plate!r}, which has {size} rows"
    given = (
        f"batch_size={{{plate!r}: {rows}}}, or batch_size={rows} if the model has no "
        "other data. A subsample_size of the plate in the model sets it, too."
    )
    if advised.control_variate and rows > size // 4:  # a batch of them saves little
        return (
            f'{needed}. Add control_variate="taylor2", whose set-up chooses a size: '
            "only what its expansion leaves is estimated from a batch. Without it, "
            f"most decisions need {rows} rows: {given}"
        )
    variate = ' With control_variate="taylor2" the set-up chooses it.'
    return f"{needed}: pass {given}{variate if advised.control_variate else ''}"


def _why_no_rows(
    sites: list[Site], plates: Mapping[str, tuple[Any, ...]], around: str = ""
) -> str:
    """The reason why nothing in a model can be subsampled, and a remedy.

    :param around: the advice to pass arrays that the model reads from its surroundings.
    """
    observed = [s for s in sites if s.type == "sample" and s.observed]
    for name in sorted(plates, key=lambda name: -plates[name][0]):
        local = _latent_in(name, sites)
        if local and any(s.inside({name}) for s in observed):
            why = _local_latent(local, name, sites)
            return f"Plate {name!r} has observations, but {why}"
    in_scan = [s for s in observed if s.in_scan]
    if in_scan:
        return (
            f"Observed site {in_scan[0].name!r} is in a scan, so that each step may "
            "depend on the ones before: a time series has no rows that can be read by "
            "themselves. Sample it with NUTS. If each row of the data is a series of "
            "its own, put the rows into a plate and loop over time with jax.lax.scan "
            "inside of it."
        )
    for site in observed:
        length = max((site.value_shape or (0,))[-site.event_dim or 0 :], default=0)
        if site.event_dim and not batch_shape(site) and length > 1:
            kind = site.kind.removesuffix(".to_event")
            if kind != site.kind:
                return (
                    f"Observed site {site.name!r} has its {length} entries as one "
                    "event: leave out .to_event(...), which makes them conditionally "
                    "independent rows."
                )
            return (
                f"Observed site {site.name!r} is one {kind} of {length} entries, which "
                "depend on each other: it does not divide into rows. Sample such a "
                "model (a Gaussian process, a random walk) with NUTS."
            )
    scalars = [s for s in observed if s.auxiliary and not batch_shape(s)]
    if scalars and all(s.auxiliary for s in observed):
        name = scalars[0].name
        return (
            f"numpyro.factor({name!r}, ...) is one number. Give it one number for each "
            "row of the data and do not sum over the rows. All data that it needs must "
            "be arguments of the model."
        )
    for site in observed:
        shape = batch_shape(site)
        if shape and shape[0] == 1 and max(shape) > 1:
            return (
                f"Observed site {site.name!r} has batch shape {shape}. The rows must "
                "be its first dimension: leave the dimension of length 1 out, and pass "
                "the data as arguments of the model that have one entry for each row."
            )
        of_groups = _of_one_loop(site, observed)
        if of_groups and not around:
            return of_groups
        if shape and shape[0] > 1:
            given = (
                "Pass the data as arguments that have one entry for each row, also "
                "lagged ones (y[1:], y[:-1])"
            )
            return (
                f"Observed site {site.name!r} has {shape[0]} entries, and no argument "
                f"of the model has as many along an axis. {around or given}; or put "
                "the site into a plate:"
                f"{example_plate(shape[0], _unused(sites), site)}"
            )
    if len(observed) > 1:
        named = ", ".join(repr(s.name) for s in observed[:2])
        more = f" and {len(observed) - 2} more" if len(observed) > 2 else ""
        return (
            f"Observed sites {named}{more} have no rows, as if a Python loop made one "
            "site for each row. If each depends on the ones before, it is a time "
            "series: sample it with NUTS. Otherwise write one site that has one entry "
            f"for each row:{example_plate(len(observed), site=observed[0])}"
        )
    site = observed[0]
    return (
        f"Observed site {site.name!r} has one entry. Rows are entries of a site, so "
        f"give it all of the data:{example_plate(1000, _unused(sites), site)}"
    )


def _of_one_loop(site: Site, observed: list[Site]) -> str:
    """What to write in place of a loop that makes a site for the rows of each group."""
    stem = site.name.rstrip("0123456789")
    same = [
        s
        for s in observed
        if s.name.rstrip("0123456789") == stem != s.name and s.kind == site.kind
    ]
    rows = [shape[0] for s in same if (shape := batch_shape(s))]
    if site not in same or len(same) < 2 or len(rows) < len(same) or sum(rows) < 3:
        return ""
    name = stem.rstrip("_-./[( ") or "y"
    if name in {s.name for s in observed}:
        name = f"{name}_all"
    more = f" and {len(same) - 2} more" if len(same) > 2 else ""
    kind = site.kind.removesuffix(".to_event")
    return (
        f"Observed sites {same[0].name!r}, {same[1].name!r}{more} have {rows[0]}, "
        f"{rows[1]}{', ...' if more else ''} entries, as if a Python loop made one "
        "site for each group of rows. Write one site for the rows of all groups, and "
        "index the parameters of the groups by an argument that has the group of each "
        "row:\n"
        f'    with numpyro.plate("data", {sum(rows)}) as idx:\n'
        f'        numpyro.sample("{name}", dist.{kind}(a[group[idx]], ...), '
        "obs=y[idx])\n"
        "where a has one value for each group."
    )


def _unused(sites: list[Site]) -> str:
    """A name for a plate of the rows."""
    used = {site.name for site in sites}
    return next(n for n in ("data", "rows", "data_rows", "_rows") if n not in used)


def _inside_scan(who: str, plate: str, discrete: str = "") -> str:
    if discrete:
        return (
            f"{who} cannot subsample plate {plate!r}: it stands inside a scan, with "
            f"discrete latent site {discrete!r} for each of its rows, which NumPyro "
            "marginalizes by enumeration. Enumerated sites are not supported. If each "
            "row is a series of its own, write its log likelihood with jax.lax.scan "
            "(the forward algorithm) as a numpyro.factor with one entry for each row, "
            "inside the plate."
        )
    return (
        f"{who} cannot subsample plate {plate!r}: it stands inside a scan or another "
        "control flow primitive. Move the plate of the data out of it; a plate that "
        "stays inside needs all its rows, without a subsample_size or scale."
    )


def candidates(
    sites: list[Site],
    plates: Mapping[str, Any],
    lengths: Collection[int] | None = None,
) -> list[str]:
    """Plates that hold observations and no latent site; of nested ones the largest.

    Of nested plates of one size, it is the one whose dimension is the first. A plate
    with a single row is one only if no other plate is.

    The repeated observations of many units are no rows if the units have latent sites:
    ``marginalize`` makes the units rows. It is named by the error if no plate is left.

    :param lengths: the numbers of rows among which to choose, by default all.
    """
    holding = _holding_data(sites, plates)
    found = [
        name for name in holding if lengths is None or _size(plates[name]) in lengths
    ]
    observed = [s for s in sites if s.type == "sample" and s.observed]
    units = [
        name
        for name in plates
        if name not in holding
        and any(s.inside({name}) for s in observed)
        and not _beyond_marginalize(_latent_in(name, sites))
    ]

    def is_inner(name: str) -> bool:
        """Whether all that it holds is in a larger plate, too."""
        held = [s.inside([*found, *units]) for s in observed if s.inside({name})]

        def rank(frame: Any) -> tuple[int, int]:
            return _size(plates[frame.name]), -frame.dim

        return all(max(frames, key=rank).name != name for frames in held)

    outer = [name for name in found if not is_inner(name)]
    return [name for name in outer if _size(plates[name]) != 1] or outer


def other_lengths(sites: list[Site]) -> list[int]:
    """The rows of plates that could be subsampled instead of the largest, in order.

    A plate holds observations, and stands inside or around a larger one.
    """
    plates = {s.name: s.args for s in sites if s.type == "plate"}
    first = {_size(plates[name]) for name in candidates(sites, plates)}
    sizes = {_size(plates[name]) for name in _holding_data(sites, plates)} - first
    left = [size for size in sizes if size > 1 and candidates(sites, plates, {size})]
    return sorted(left, reverse=True)


def _latent_in(plate: str, sites: list[Site]) -> list[Site]:
    return [
        s for s in sites if s.type == "sample" and not s.observed and s.inside({plate})
    ]


def _size(plate: Any) -> int:
    return plate[0] if isinstance(plate, tuple) else plate


def _holding_data(sites: list[Site], plates: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in plates
        if any(s.type == "sample" and s.observed and s.inside({name}) for s in sites)
        and not _latent_in(name, sites)
    ]


def check_sites(
    who: str, sites: list[Site], plates: Mapping[str, int]
) -> tuple[str, ...]:
    """The latent sites of a model, if given plates of it can be subsampled.

    :raises ValueError: they cannot, or there is nothing to sample.
    """
    latents = []
    _check_plate_names(sites, plates)
    for site in sites:
        inside = site.inside(plates)
        if site.type == "mutable":
            raise ValueError(
                f"{who} cannot sample a model with mutable state: site {site.name!r} "
                "(batch normalisation?) would carry one minibatch into the next. Use a "
                "stateless layer, such as layer or group normalisation."
            )
        if site.type != "sample":
            continue
        if len(inside) > 1:
            raise ValueError(
                f"{who}: site {site.name!r} is inside two subsampled plates, "
                f"{inside[0].name!r} and {inside[1].name!r}, so it has no single "
                f"number per row. Subsample one of them: batch_size={{"
                f"{inside[0].name!r}: ...}}, and no subsample_size for the other."
            )
        if site.observed:
            continue
        latents.append(site.name)
        if inside:
            local = _latent_in(inside[0].name, sites)
            raise ValueError(_local_latent(local, inside[0].name, sites))
        if site.discrete:
            held = _holds_rows(site, sites)
            how = (
                f"Each row of {held} has a value of it: marginalize it by "
                f'numpyro_minibatch.marginalize(model, sites=["{site.name}"]).'
                if held
                else "It is not a variable of single rows, so the sum over its values "
                "does not divide into rows. Write a continuous form of it (a smooth "
                "step for a change point), or sample the model with NUTS."
            )
            raise ValueError(
                f"{who} samples continuous parameters, but latent site {site.name!r} "
                f"is discrete. {how}"
            )
    for name in plates:
        if not any(
            s.type == "sample" and s.observed and s.inside({name}) for s in sites
        ):
            after = [s.name for s in sites if s.type == "sample" and s.observed]
            outside = (
                f" Observed site {after[0]!r} stands outside of it, perhaps after the "
                "with block: indent it."
                if after
                else ""
            )
            raise ValueError(
                f"plate {name!r} has no observed site, so subsampling it estimates "
                f"nothing.{outside} Put the observations inside it, or leave it out of "
                "batch_size and give it no subsample_size."
            )
    if not latents:
        raise ValueError(
            f"{who} has nothing to sample: the model has no latent site. Does it "
            "condition on every site, or need other arguments?"
        )
    return tuple(latents)


def _holds_rows(latent: Site, sites: list[Site]) -> str:
    """The plate of a latent site in which there are observations, too."""
    observed = [s for s in sites if s.type == "sample" and s.observed]
    for frame in latent.frames:
        if any(s.inside({frame.name}) for s in observed):
            return f"plate {frame.name!r}"
    return ""


def _check_plate_names(sites: list[Site], plates: Mapping[str, int]) -> None:
    """A trace keeps one plate of each name: a second one must be the same."""
    for name in plates:
        sizes = {frame.size for site in sites for frame in site.inside({name})}
        if len(sizes) > 1:
            raise ValueError(
                f"the model has several plates called {name!r}, of sizes "
                f"{' and '.join(map(str, sorted(sizes)))}. Give each a name of its own."
            )


def _local_latent(sites: list[Site], plate: str, everything: list[Site]) -> str:
    """A remedy for latent sites that have a value for each row."""
    first = sites[0]
    names_of = {s.name for s in sites}
    shared = [
        s.name
        for s in everything
        if s.type == "sample" and not s.observed and s.name not in names_of
    ]
    site = first.name
    names = ", ".join(f'"{s.name}"' for s in sites)
    message = (
        f"latent site {site!r} is inside the subsampled plate {plate!r}: it has one "
        "value per row, and most rows are not in a minibatch."
    )
    if not shared and not site.endswith("_unobserved"):
        return (
            f"{message} If {site!r} is meant to be observed, pass its data: it has "
            "obs=None. Otherwise the rows share no parameter, so each has a posterior "
            "of its own, independent of all other rows. Sample it with NUTS."
        )
    if site.endswith("_unobserved"):
        return (
            f"{message} numpyro.sample(..., obs_mask=...) made it for the missing "
            f"values. {missing_values(site)}"
        )
    beyond = _beyond_marginalize(sites)
    if beyond:
        return f"{message} {beyond}"
    if first.discrete:
        return (
            f"{message} It is discrete: marginalize it by "
            f"numpyro_minibatch.marginalize(model, sites=[{names}]), or write the sum "
            "yourself, as dist.MixtureSameFamily(dist.Categorical(weights), parts)."
        )
    return (
        f"{message} If {site!r} is meant to be observed, pass its data: it has "
        "obs=None. Otherwise integrate it out of each row by "
        f"numpyro_minibatch.marginalize(model, sites=[{names}])."
    )


def _beyond_marginalize(sites: list[Site]) -> str:
    """Why ``marginalize`` cannot integrate these sites out; nothing if it can."""
    for site in sites:
        if site.discrete and not site.enumerable:
            return (
                f"{site.kind} site {site.name!r} has no finite support, so its values "
                "cannot be summed over. Truncate it, for example to dist.Categorical "
                "over 0, 1, ..., n, or use a distribution with the sum in closed form, "
                "such as dist.NegativeBinomial2 for a gamma mixture of Poisson counts."
            )
    # sites of other plates are integrated out separately
    numbers = {
        s.name: _numbers_of_a_row(s)
        for s in sites
        if not s.discrete and s.frames == sites[0].frames
    }
    if sum(numbers.values()) <= MOST_DIMENSIONS:
        return ""
    held = ", ".join(f"{name!r} ({count})" for name, count in numbers.items())
    return (
        f"A row has {sum(numbers.values())} continuous latent numbers, {held}, and "
        "numpyro_minibatch.marginalize integrates out at most "
        f"{MOST_DIMENSIONS}. Write the integral over the others in closed form, give "
        "the row fewer latent numbers, or sample the model with NUTS."
    )


def _numbers_of_a_row(site: Site) -> int:
    batch = site.shape[: len(site.shape) - site.event_dim]
    return math.prod(site.free_shape) // max(math.prod(batch), 1)
