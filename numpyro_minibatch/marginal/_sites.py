"""The sites of a model to integrate out, and the rows they belong to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import MaskedDistribution, biject_to, constraints
from numpyro.distributions.distribution import ExpandedDistribution, Independent
from numpyro.infer import init_to_uniform

from numpyro_minibatch._internal.precision import in_this_precision
from numpyro_minibatch._model.sites import MOST_DIMENSIONS, is_circular
from numpyro_minibatch.marginal._quadrature import NODES
from numpyro_minibatch.marginal._row_sites import kind_of
from numpyro_minibatch.marginal._scans import SameTypes

__all__ = [
    "canonical",
    "Chain",
    "Found",
    "Level",
    "Local",
    "find_levels",
    "find_sites",
    "masks_of",
    "num_states",
    "run_hidden",
    "states_of",
    "summed_site",
]

# names of the two sites that numpyro.sample(..., obs_mask=...) makes
_OBSERVED, _UNOBSERVED = "_observed", "_unobserved"

_SKEWED = 21  # quadrature nodes of one number with a skewed prior
MOST_STATES = 4096  # joint values of the discrete sites of one row


class Local(NamedTuple):
    """A latent site with a value for each row.

    :param name: the site.
    :param discrete: whether its support is finite.
    :param size: unconstrained numbers of a row, or states of a row.
    :param bounded: whether a continuous site has a support with a border, near which
        values in single precision are rounded to it.
    :param skewed: whether its unconstrained value may have a skewed prior, as that of a
        gamma or a beta variable has.
    :param improper: whether its prior is improper, or other masks than that of
        ``obs_mask=`` may leave out its density.
    :param fills: the site whose missing values these are, if ``obs_mask=`` made this
        one; otherwise empty.
    :param circular: whether it is an angle.
    :param part_of: the site of the user's model that it is a part of, if it is one.
    """

    name: str
    discrete: bool
    size: int
    bounded: bool = False
    skewed: bool = False
    improper: bool = False
    fills: str = ""
    circular: bool = False
    part_of: str = ""


class Chain(NamedTuple):
    """A scan whose discrete states are marginalized by the forward recursion.

    :param position: that of the scan among the scans of the model.
    :param order: the number of earlier states that a step depends on.
    :param varying: for each carried array, whether it depends on the states.
    :param observed: names of the observed sites of a step.
    :param length: the number of steps.
    """

    position: int
    order: int
    varying: tuple[bool, ...]
    observed: tuple[str, ...]
    length: int


class Level(NamedTuple):
    """Latent sites that are integrated out together: those of the same plates.

    :param plates: names of the plates whose elements are the rows, the outermost
        dimension first.
    :param sites: the sites.
    :param hidden: deterministic sites outside of the plates that depend on these sites.
        They have no value in the marginalized model.
    :param chain: the scan that the sites are in; ``None`` outside of scans.
    :param broadcasts: whether a state that is the same in all rows may be given to the
        model as one value, with axes of length one in place of the plates.
    :param own_values: whether it is proven that no row depends on the latent values of
        another one.
    """

    plates: tuple[str, ...]
    sites: tuple[Local, ...]
    hidden: tuple[str, ...] = ()
    chain: Chain | None = None
    broadcasts: bool = False
    own_values: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sites."""
        return tuple(site.name for site in self.sites)

    @property
    def written(self) -> tuple[str, ...]:
        """The names in the user's model, where some sites may be one."""
        return tuple(dict.fromkeys(site.part_of or site.name for site in self.sites))

    @property
    def dimensions(self) -> int:
        """The continuous latent numbers of a row."""
        return sum(site.size for site in self.sites if not site.discrete)

    @property
    def nodes(self) -> int:
        """Quadrature nodes of each dimension, if neither user nor set-up choose them.

        A set-up measures the error and may choose more. NUTS has no set-up, and 11
        nodes leave errors of up to 1e-2 in the rows of gamma and beta variables.
        """
        number = NODES[max(self.dimensions, 1)]
        skewed = any(site.skewed for site in self.sites if not site.discrete)
        return _SKEWED if skewed and self.dimensions == 1 else number

    @property
    def states(self) -> int:
        """The density evaluations of a row that sum over its discrete sites."""
        joint = int(np.prod([s.size for s in self.sites if s.discrete], dtype=int))
        if self.chain is None:
            return joint
        return self.chain.length * joint ** (self.chain.order + 1)


class Found(NamedTuple):
    """The static part of a site of a trace.

    :param plates: the plates of the site, the outermost dimension first.
    :param sizes: their sizes.
    :param free_shape: the shape of the unconstrained value of a continuous latent site.
    """

    name: str
    type: str
    observed: bool
    plates: tuple[str, ...]
    sizes: tuple[int, ...]
    fn: Any
    in_scan: bool
    free_shape: tuple[int, ...]


class _Indexable(np.ndarray):
    """A NumPy array that can be indexed by, and compared with, arrays being traced.

    It stays one, so that a model can call functions of NumPy with it.
    """

    def __getitem__(self, where: Any) -> Any:
        if any(isinstance(i, jax.Array) for i in jax.tree.leaves(where)):
            return jnp.asarray(np.asarray(self))[where]
        return super().__getitem__(where)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, _Indexable) else x for x in inputs]
        traced = any(isinstance(x, jax.core.Tracer) for x in inputs)
        # NumPyro checks NumPy data by NumPy, against bounds that may be latent states
        of_jax = getattr(jnp, ufunc.__name__, None) if traced else None
        if of_jax is not None and method == "__call__":
            return of_jax(*plain, **kwargs)
        out = kwargs.get("out")
        if out is not None:
            kwargs["out"] = tuple(
                x.view(np.ndarray) if isinstance(x, _Indexable) else x for x in out
            )
        found = getattr(ufunc, method)(*plain, **kwargs)
        return jax.tree.map(
            lambda x: x.view(_Indexable) if type(x) is np.ndarray else x, found
        )


def indexable(leaf: Any) -> Any:
    """Make a NumPy array one that a traced batch can index."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    # a new array of the present precision: JAX remembers constants by the identity of
    # their arrays, also between traces in single and in double precision
    return np.array(leaf, canonical(leaf.dtype)).view(_Indexable)


def canonical(dtype: Any) -> Any:
    """The type that JAX gives to numbers of a type, in the present precision."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def run_hidden(
    fn: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trace a model's sites without showing them to the handlers around it.

    The handlers see only the rows that plates and ``numpyro.subsample`` request.

    :param fn: the model.
    :param data: values of global sites; by default arbitrary values.
    """
    shown = ("plate", "subsample")
    fn = SameTypes(in_this_precision(fn))
    key = jax.random.PRNGKey(0)
    if data is None:  # an init strategy reads the site's key
        seeded = handlers.seed(fn, key)
        model = handlers.substitute(seeded, substitute_fn=init_to_uniform())
    else:  # keys cost operations, so only sites without a value get them
        model = handlers.seed(handlers.substitute(fn, data=dict(data)), key)
    with handlers.block(hide_fn=lambda msg: msg["type"] not in shown):
        return handlers.trace(model).get_trace(*args, **kwargs)


def plates_of(site: Any) -> tuple[str, ...]:
    """The plates of a site, the outermost dimension first."""
    frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
    return tuple(frame.name for frame in frames)


def _sizes_of(site: Any) -> tuple[int, ...]:
    frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
    return tuple(frame.size for frame in frames)


def placeholder(fn: Any) -> Array:
    """Some value of a latent site."""
    if fn.support.is_discrete:
        return jnp.broadcast_to(states_of(fn)[0], fn.batch_shape + fn.event_shape)
    transform = biject_to(fn.support)
    return transform(jnp.zeros(transform.inverse_shape(fn.shape())))


def _bases(fn: Any) -> tuple[Any, int, tuple[int, ...]]:
    """The distribution of an entry of an event, its states, and axes of the entries."""
    while isinstance(fn, ExpandedDistribution | MaskedDistribution):
        fn = fn.base_dist
    if not isinstance(fn, Independent):
        return fn, len(fn.enumerate_support(expand=False)), ()
    base, count, inner = _bases(fn.base_dist)
    return base, count, (*fn.event_shape[: fn.reinterpreted_batch_ndims], *inner)


def num_states(fn: Any) -> int:
    """The number of values of a discrete site; of an event, that of its joint values.

    :param fn: its distribution, possibly ``.to_event``.
    """
    _, count, axes = _bases(fn)
    return int(count ** math.prod(axes))


def states_of(fn: Any) -> Array:
    """The values of a discrete site, which are the same for all rows.

    :param fn: its distribution. Entries of ``.to_event`` have all joint values.
    :return: the states along the first axis, and then the axes of the event.
    """
    base, count, axes = _bases(fn)
    support = jnp.asarray(base.enumerate_support(expand=False))
    support = support.reshape(count, *base.event_shape)
    if not axes:
        return support
    joint = np.array(list(itertools.product(range(count), repeat=math.prod(axes))))
    return support[joint.reshape(len(joint), *axes)]


def _free_shape(site: Any) -> tuple[int, ...]:
    # inside of the trace: bounds of a support may be values of other sites
    fn = site.get("fn")
    latent = site["type"] == "sample" and not site["is_observed"]
    if not latent or fn.support is None or fn.support.is_discrete:
        return ()
    return tuple(biject_to(fn.support).inverse_shape(fn.shape()))


def find_sites(
    model: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Found, ...]:
    """The sites of a model, in their order.

    :param model: the model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    """
    found: list[Found] = []

    def run() -> None:
        found.clear()
        for name, site in run_hidden(model, args, kwargs).items():
            if site["type"] not in ("sample", "deterministic"):
                continue
            found.append(
                Found(
                    name,
                    site["type"],
                    bool(site.get("is_observed", False)),
                    plates_of(site),
                    _sizes_of(site),
                    site.get("fn"),
                    "_scan_current_index" in (site.get("infer") or {}),
                    _free_shape(site),
                )
            )

    jax.eval_shape(run)
    return tuple(found)


def find_levels(
    found: Sequence[Found], sites: Collection[str] | None, *, more: bool = True
) -> tuple[Level, ...]:
    """Find the sites to integrate out of a model, the innermost plates first.

    :param found: the sites of the model.
    :param sites: names, or ``None`` for all latent sites in plates with observations.
    :param more: whether there must be such a site.
    :return: nothing if the model observes nothing.
    :raises ValueError: the sites cannot be integrated out of each row.
    """
    observed = [s for s in found if s.type == "sample" and s.observed]
    if not observed:
        return ()
    latent = [s for s in found if s.type == "sample" and not s.observed]
    chosen = _chosen(latent, observed, sites, more)
    by_plates: dict[frozenset[str], list[Found]] = {}
    for site in chosen:
        by_plates.setdefault(frozenset(site.plates), []).append(site)
    _check_nesting(by_plates, found)
    levels = []
    for plates in sorted(by_plates, key=lambda plates: -len(plates)):
        members = by_plates[plates]
        locals_ = tuple(
            _local(site.name, site.fn, site.free_shape, _filled(site, found))
            for site in members
        )
        level = Level(members[0].plates, locals_)
        _check_sizes(level)
        levels.append(level)
    return tuple(levels)


def _chosen(
    latent: list[Found],
    observed: list[Found],
    sites: Collection[str] | None,
    more: bool,
) -> list[Found]:
    """The requested latent sites."""
    by_name = {site.name: site for site in latent}

    def has_data(site: Found) -> bool:
        return any(set(site.plates) <= set(other.plates) for other in observed)

    local = [s for s in latent if s.plates and has_data(s)]
    if sites is None:
        if not local and more:
            raise ValueError(_nothing(latent, observed))
        for site in local:
            if site.in_scan:
                raise ValueError(_in_scan(site.name))
        return local
    chosen = []
    for name in sites:
        if name not in by_name:
            known = ", ".join(map(repr, by_name)) or "none"
            seen = {s.name for s in observed}
            what = "is observed" if name in seen else "is not in the model"
            raise ValueError(
                f"marginalize(sites=...) got {name!r}, which {what}; the latent sites "
                f"are: {known}."
            )
        site = by_name[name]
        if site.in_scan:
            raise ValueError(_in_scan(name))
        if not site.plates:
            raise ValueError(
                f"marginalize cannot integrate out site {name!r}, which is in no "
                "plate: all rows share it. Put it into the plate of the rows if each "
                "row has a value of its own; otherwise leave it to the sampler."
            )
        if not has_data(site):
            raise ValueError(_shared(site, observed))
        chosen.append(site)
    return chosen


def _in_scan(name: str) -> str:
    return (
        f"marginalize cannot sum over site {name!r}, which is in a scan: the steps "
        "of the scan have no observation in the plate of the site. Write the plate of "
        "the rows inside of the function that is scanned, and put both the site and "
        "its observation into it."
    )


def _nothing(latent: list[Found], observed: list[Found]) -> str:
    in_scan = [s.name for s in latent if s.in_scan]
    if in_scan:
        return _in_scan(in_scan[0])
    in_plates = [s for s in latent if s.plates]
    if in_plates:
        return _shared(in_plates[0], observed)
    names = ", ".join(repr(s.name) for s in latent) or "none"
    message = (
        "marginalize found no latent site in a plate with observations; the latent "
        f"sites are: {names}. A site with a value for each row belongs in the plate "
        "of the observations"
    )
    for site, other in itertools.product(latent, observed):
        lengths = other.sizes or other.fn.batch_shape
        if lengths and lengths[-1] in site.fn.shape():
            plate = other.plates[-1] if other.plates else "rows"
            code = _one_plate(plate, lengths[-1], site, other)
            return f"{message}, without .expand([{lengths[-1]}]):{code}"
    return f"{message}."


def _one_plate(plate: str, size: int, site: Found, observed: Found) -> str:
    """The code for a latent site and its observation in one plate."""
    kinds = [kind_of(s.fn) for s in (site, observed)]
    return (
        f'\n    with numpyro.plate("{plate}", {size}):'
        f'\n        {site.name} = numpyro.sample("{site.name}", dist.{kinds[0]}(...))'
        f'\n        numpyro.sample("{observed.name}", dist.{kinds[1]}({site.name}, '
        f"...), obs={observed.name})"
    )


def _shared(site: Found, observed: list[Found]) -> str:
    for other in observed:
        if other.sizes and other.sizes[-1] == site.sizes[-1]:
            size, plate = other.sizes[-1], other.plates[-1]
            return (
                f"marginalize cannot integrate out site {site.name!r}: its plate "
                f"{site.plates[-1]!r} holds no observation. Plate {plate!r} of "
                f"observed site {other.name!r} has {size} elements, too. If element i "
                "of both is one row, use one plate:"
                f"{_one_plate(plate, size, site, other)}"
            )
    others = ", ".join(
        f"{s.name!r} (in {', '.join(map(repr, s.plates)) or 'no plate'})"
        for s in observed
    )
    return (
        f"marginalize cannot integrate out site {site.name!r}: its plate "
        f"{site.plates[-1]!r} holds no observation, so that rows share its values. "
        f"Observed: {others}. Put the observations of an element into its plate, for "
        "example with numpyro_minibatch.by_group, which turns long data into one row "
        "for each group:"
        f'\n    with numpyro.plate("{site.plates[-1]}", G) as idx:'
        f'\n        {site.name} = numpyro.sample("{site.name}", ...)'
        '\n        with numpyro.plate("within", n), numpyro.handlers.mask('
        "mask=mask[idx].T):"
        '\n            numpyro.sample("obs", ..., obs=y[idx].T)'
    )


def _check_nesting(
    by_plates: Mapping[frozenset[str], list[Found]], found: Sequence[Found]
) -> None:
    for one, sites in by_plates.items():
        for other, others in by_plates.items():
            if one <= other or other <= one:
                continue
            for site in found:
                if one | other <= set(site.plates):
                    a, b = sites[0], others[0]
                    raise ValueError(
                        f"marginalize cannot integrate out both {a.name!r} (in "
                        f"{', '.join(map(repr, a.plates))}) and {b.name!r} (in "
                        f"{', '.join(map(repr, b.plates))}): site {site.name!r} is in "
                        "the plates of both, which cross. Choose one of them, "
                        f'sites=["{a.name}"], and leave the other to the sampler.'
                    )


def _is_masked(fn: Any) -> bool:
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution) and fn._mask is not True:
            return True
        fn = fn.base_dist
    return False


def _num_masks(fn: Any) -> int:
    count = 0
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        count += isinstance(fn, MaskedDistribution) and fn._mask is not True
        fn = fn.base_dist
    return count


def summed_site(name: str, fn: Any) -> Local:
    """A discrete site to sum over.

    :raises ValueError: it has no finite support.
    """
    if name.endswith(_UNOBSERVED) and _is_masked(fn):
        raise ValueError(
            f"marginalize cannot sum over site {name!r} in a scan, which "
            "numpyro.sample(..., obs_mask=...) made for missing values. If nothing "
            "else uses the value of the site, leave its missing values out by "
            "numpyro.handlers.mask around a plain observed site."
        )
    return _local(name, fn, ())


def _filled(site: Found, found: Sequence[Found]) -> str:
    """The site whose missing values ``obs_mask=`` made this site for, if it did."""
    name = site.name.removesuffix(_UNOBSERVED)
    names = {s.name for s in found}
    made = name != site.name and {name, f"{name}{_OBSERVED}"} <= names
    return name if made and _is_masked(site.fn) else ""


def masks_of(fn: Any, rows: tuple[int, ...]) -> tuple[Array, Array]:
    """The masks of a site that ``obs_mask=`` made, of the shape of rows.

    :param fn: its distribution. The innermost mask is that of ``obs_mask``.
    :return: which values are missing, and which are in no mask around the site.
    """
    shape, masks = fn.batch_shape, []
    while isinstance(fn, ExpandedDistribution | Independent | MaskedDistribution):
        if isinstance(fn, MaskedDistribution):
            masks.append(jnp.broadcast_to(fn._mask, shape).reshape(rows))
        fn = fn.base_dist
    within = jnp.ones(rows, bool)
    for mask in masks[:-1]:
        within &= mask
    return masks[-1], within


def _local(name: str, fn: Any, free_shape: tuple[int, ...], fills: str = "") -> Local:
    extra = int(np.prod(fn.batch_shape, dtype=int))
    if fn.support is None:
        raise ValueError(f"marginalize: site {name!r} has no support.")
    if fn.support.is_discrete:
        if not fn.has_enumerate_support:
            raise ValueError(
                f"marginalize cannot sum over site {name!r}: {kind_of(fn)} has "
                "no finite support that NumPyro enumerates. Truncate it, for example "
                "to dist.Categorical over 0, 1, ..., n, or use a distribution with the "
                "sum in closed form, such as dist.NegativeBinomial2 for a gamma "
                "mixture of Poisson counts."
            )
        try:
            count = num_states(fn)
        except (NotImplementedError, jax.errors.JAXTypeError) as error:
            raise ValueError(
                f"marginalize cannot sum over site {name!r}: its support depends on "
                f"values or differs between rows ({str(error).partition(chr(10))[0]}). "
                f"{_one_support(fn)}"
            ) from error
        return Local(name, True, count, fills=fills)
    if _is_masked(fn) and not fills:
        raise ValueError(
            f"marginalize cannot integrate out site {name!r}, which is inside of "
            "numpyro.handlers.mask: where the mask is false, its density is left out, "
            "and the integral over all its values is infinite. Put the mask around the "
            "observed sites only."
        )
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    size = math.prod(free_shape) // max(extra, 1)
    return Local(
        name,
        False,
        size,
        bounded=support is not constraints.real,
        skewed=support is not constraints.real and kind_of(fn) != "LogNormal",
        improper=kind_of(fn) == "ImproperUniform" or _num_masks(fn) > 1,
        fills=fills,
        circular=is_circular(support),
    )


def _one_support(fn: Any) -> str:
    """A remedy for a discrete site whose support differs between rows."""
    if kind_of(fn) == "DiscreteUniform":
        return (
            "Give all rows one support, with bounds that are numbers of Python. For "
            "upper bounds n of the rows that are at most 8:"
            "\n    within = jnp.arange(9) <= n[:, None]"
            "\n    dist.Categorical(within / within.sum(1, keepdims=True))"
        )
    return (
        "Give all rows one support of a fixed size, such as total_count=8, a number of "
        "Python and not an array."
    )


def _check_sizes(level: Level) -> None:
    states = int(np.prod([s.size for s in level.sites if s.discrete], dtype=int))
    if states > MOST_STATES:
        which = ", ".join(f"{s.name!r} ({s.size})" for s in level.sites if s.discrete)
        raise ValueError(
            f"marginalize would sum over {states} joint states of the discrete sites "
            f"of a row: {which}; at most {MOST_STATES} are allowed. A chain of states "
            "is summed by the forward recursion if it is written with "
            "numpyro.contrib.control_flow.scan, with the plate inside of the scan."
        )
    if level.dimensions > MOST_DIMENSIONS:
        which = ", ".join(
            f"{s.name!r} ({s.size})" for s in level.sites if not s.discrete
        )
        raise ValueError(
            f"marginalize integrates at most {MOST_DIMENSIONS} continuous numbers of a "
            f"row by quadrature, and this model has {level.dimensions}: {which}. "
            "Choose some of them with sites=[...], leave the others to NUTS, or write "
            "the integral in closed form."
        )
