"""A model run again on all its rows: its sites, its data, each row's likelihood.

The modules that analyse a run use this one for the model that the run sampled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from warnings import warn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import init_to_uniform, log_likelihood

from numpyro_minibatch._internal.precision import full_precision, is_double
from numpyro_minibatch._internal.threads import compilers
from numpyro_minibatch._model.dataflow import inputs_used
from numpyro_minibatch.host_rows import HostRows, find_rows, map_rows
from numpyro_minibatch.target import AllRows, ModelTarget, Target

__all__ = [
    "CHUNK",
    "Program",
    "Run",
    "Site",
    "compute_rows",
    "data_sites",
    "deterministic_sites",
    "entry_log_likelihoods",
    "inspect_sites",
    "log_densities",
    "log_likelihoods",
    "subsampled_plates",
]

CHUNK = 262_144  # log likelihoods that are computed at a time
_CHUNK_ROWS = 16_384  # rows that are evaluated at a time


class Site(NamedTuple):
    """The facts about a site of a model that reads all its rows, without its value.

    The site has a distribution, or is a deterministic one.

    :param observed: whether it is data; factors are not.
    :param latent: whether it has a value in each draw, which the density depends on.
    :param shape: of its value.
    :param event_dim: of its distribution; ``None`` where it has none.
    :param frames: its plates, as ``(name, dim, size)``, the outermost first.
    :param event_names: names of its last axes, from ``infer={"event_dims": [...]}``,
        which ArviZ reads too.
    """

    observed: bool
    latent: bool
    shape: tuple[int, ...]
    event_dim: int | None
    frames: tuple[tuple[str, int, int], ...]
    event_names: tuple[str, ...]

    @property
    def deterministic(self) -> bool:
        """Whether the site has no distribution."""
        return self.event_dim is None

    @classmethod
    def of(cls, site: Mapping[str, Any]) -> Site:
        """The static part of a site of a trace."""
        is_sample = site["type"] == "sample"
        given = is_sample and site["is_observed"]
        infer = site.get("infer") or {}
        frames = [(f.name, f.dim, f.size) for f in site.get("cond_indep_stack", ())]
        return cls(
            observed=given and not infer.get("is_auxiliary", False),  # not a factor
            latent=is_sample and not given,
            shape=jnp.shape(site["value"]) if is_sample else (),
            event_dim=site["fn"].event_dim if is_sample else None,
            frames=tuple(sorted(frames, key=lambda frame: frame[1])),
            event_names=tuple(infer.get("event_dims", ())),
        )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the log likelihoods of an observed site; none for others."""
        if not self.observed:
            return (0,)
        return self.shape[: len(self.shape) - (self.event_dim or 0)]

    def axes(self, shape: tuple[int, ...]) -> list[str | None]:
        """Names for the axes of a value of this site; ``None`` where it has none."""
        names: list[str | None] = [None] * len(shape)
        for place, (name, dim, size) in enumerate(self.frames):
            # the axes of plates stand left of those of the distribution; where there
            # is no distribution they are taken to be the first ones
            axis = (
                place if self.event_dim is None else len(shape) - self.event_dim + dim
            )
            if 0 <= axis < len(shape) and shape[axis] == size:
                names[axis] = name
        if 0 < len(self.event_names) <= len(shape):
            names[-len(self.event_names) :] = self.event_names
        return names


class Program:
    """A function of a model, compiled so that the model's arrays are its inputs.

    Arrays that are constants of a compiled program are copied into it.

    :param target: the model with its arguments.
    :param fn: ``fn(target, *inputs)``.
    :param options: those of the compiler.
    """

    def __init__(
        self,
        target: ModelTarget,
        fn: Callable[..., Any],
        options: dict[str, Any] | None = None,
    ) -> None:
        leaves, treedef = jax.tree.flatten((target.args, dict(target.kwargs)))
        places = [i for i, leaf in enumerate(leaves) if _is_numeric(leaf)]

        def with_arrays(arrays: list[Any], *inputs: Any) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            args, kwargs = jax.tree.unflatten(treedef, filled)
            return fn(replace(target, args=args, kwargs=kwargs), *inputs)

        self._plain = partial(fn, target)
        self._with_arrays = with_arrays
        self._compiled = jax.jit(with_arrays, compiler_options=options)
        self._arrays = [leaves[place] for place in places]
        self._on_device: dict[bool, list[Array]] = {}
        self._pending: list[Future] = []

    @full_precision
    def __call__(self, *inputs: Any) -> Any:
        """The value of ``fn`` at ``inputs``."""
        while self._pending:
            self._pending.pop().exception()
        try:
            return self._compiled(self._arrays_on_device(), *inputs)
        except jax.errors.JAXTypeError:
            # a model may take its shapes from the values of its data
            return self._plain(*inputs)

    @full_precision
    def ahead(self, *inputs: Any) -> None:
        """Compile for inputs of these shapes on another thread."""
        try:
            lowered = self._compiled.lower(self._arrays_on_device(), *inputs)
        except jax.errors.JAXTypeError:
            return
        self._pending.append(compilers().submit(lowered.compile))

    def _arrays_on_device(self) -> list[Array]:
        """The model's arrays in the present precision."""
        if is_double() not in self._on_device:
            arrays = [_in_this_precision(x) for x in self._arrays]
            self._on_device[is_double()] = arrays
        return self._on_device[is_double()]

    def trace(self, *inputs: Any) -> None:
        """Run ``fn`` only for its side effects, without any arithmetic."""
        try:
            jax.eval_shape(self._with_arrays, self._arrays, *inputs)
        except jax.errors.JAXTypeError:
            self._plain(*inputs)


def _in_this_precision(x: Any) -> Array:
    """A NumPy array as one of JAX, in the present precision.

    JAX remembers the identity of NumPy arrays that were constants of a program, and
    would pass their numbers in the precision of that program.
    """
    if not isinstance(x, np.ndarray):
        return x
    return jnp.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))


def _is_numeric(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "biufc"
    return isinstance(leaf, Array)


def _sites_at_all_rows(target: ModelTarget) -> dict[str, Any]:
    rows = {n: jnp.arange(size, dtype=jnp.int32) for n, size in target.sizes.items()}
    return target.trace(rows, substitute_fn=init_to_uniform)


def inspect_sites(target: ModelTarget) -> dict[str, Site]:
    """The sites of a model that reads all rows of its data plates."""
    found: dict[str, Site] = {}

    def note(target: ModelTarget) -> None:
        found.clear()
        for name, site in _sites_at_all_rows(target).items():
            if site["type"] in ("sample", "deterministic"):
                found[name] = Site.of(site)
            if name in target.by_row and not found[name].frames:  # in no plate
                first = jnp.shape(site["value"])[:1]
                given = sorted(target.slices.plates) if target.slices else []
                fit = [plate for plate in given if first == (target.sizes[plate],)]
                frames = tuple((plate, -1, target.sizes[plate]) for plate in fit[:1])
                found[name] = found[name]._replace(frames=frames)

    Program(target, note).trace()
    return found


def subsampled_plates(target: ModelTarget) -> dict[str, int]:
    """The plates that have a ``subsample_size`` of their own, and their rows."""
    found: dict[str, int] = {}

    def note(target: ModelTarget) -> None:
        for name, site in _sites_at_all_rows(target).items():
            if site["type"] == "plate" and len(site["value"]) != site["args"][0]:
                found[name] = site["args"][0]

    Program(target, note).trace()
    return found


def _is_on_host(target: ModelTarget, name: str) -> bool:
    """Whether the value of a site consists of rows that should stay out of memory."""
    args = (target.args, dict(target.kwargs))
    if not find_rows(args):
        return False

    def value(arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = map_rows(lambda rows: rows.filled(next(given)), args)
        replaced = replace(target, args=filled[0], kwargs=filled[1])
        return _sites_at_all_rows(replaced)[name]["value"]

    described = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in find_rows(args).values()
    ]
    return any(inputs_used(jax.make_jaxpr(value)(described)))


@dataclass(frozen=True)
class Run:
    """The model that a run sampled, with its arguments.

    :param kernel: the kernel.
    :param of_package: whether it is a kernel of this package.
    :param target: the model with its arguments, if the kernel has a model.
    :param sites: the sites of the model.
    :param observed: the values of its observed sites, all rows of them.
    """

    kernel: Any
    of_package: bool
    target: ModelTarget | None = None
    sites: Mapping[str, Site] = field(default_factory=dict)
    observed: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, mcmc: Any) -> Run:
        """Replay the model of an ``MCMC`` that has run."""
        return cls.of_kernel(mcmc.sampler, mcmc._args, mcmc._kwargs)

    @classmethod
    def of_kernel(cls, kernel: Any, args: tuple, kwargs: Mapping[str, Any]) -> Run:
        """Replay the model of a kernel that has run with these arguments."""
        # attributes that only the kernels of this package have; on the class, because
        # reading them from a kernel that has not run raises
        of_package = hasattr(type(kernel), "plates") and hasattr(type(kernel), "frozen")
        run = cls(kernel, of_package)
        model = getattr(kernel, "model", None)
        if not callable(model):
            return run
        target = ModelTarget(model=model, args=args, kwargs=kwargs)
        if of_package:
            return run._replay(
                replace(
                    target,
                    sizes=kernel.plates,
                    frozen=kernel.frozen,
                    slices=kernel.slices,
                    by_row=kernel.layout.by_row,
                )
            )
        try:
            return run._replay(replace(target, sizes=subsampled_plates(target)))
        except Exception as error:  # nothing is known of the models of other kernels
            warn(
                f"to_inference_data could not replay the model of "
                f"{type(kernel).__name__} ({type(error).__name__}: {error}); its data "
                "and the names of its plates are left out.",
                stacklevel=4,
            )
            return run

    def _replay(self, target: ModelTarget) -> Run:
        sites = inspect_sites(target)
        names = [name for name, site in sites.items() if site.observed]
        names = [name for name in names if not _is_on_host(target, name)]

        def values(target: ModelTarget) -> dict[str, Any]:
            trace = _sites_at_all_rows(target)
            return {name: trace[name]["value"] for name in names}

        # compiled, so that nothing but the values asked for is computed
        observed = {n: np.asarray(v) for n, v in Program(target, values)().items()}
        return replace(self, target=target, sites=sites, observed=observed)

    @property
    def arguments(self) -> dict[str, Any]:
        """The array arguments of the model, by the names of its signature."""
        if self.target is None:
            return {}
        model: Any = self.target.model
        args, kwargs = self.target.args, self.target.kwargs
        while callable(getattr(model, "fn", None)):  # an effect handler
            model = model.fn
        try:
            signature = inspect.signature(model)
            given = signature.bind(*args, **kwargs).arguments
            for name, parameter in signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    given |= given.pop(name, {})
        except (TypeError, ValueError):
            given = {f"arg_{i}": arg for i, arg in enumerate(args)} | dict(kwargs)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(
                given, is_leaf=lambda x: isinstance(x, HostRows)
            )[0]
            if _is_numeric(leaf)
            and leaf.ndim
            and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        }


def data_sites(sites: Mapping[str, Site], target: Target) -> dict[str, str]:
    """The data plate of each observed site that is in one."""
    return {
        name: plate
        for name, site in sites.items()
        if site.observed
        for plate, _, _ in site.frames
        if plate in target.plates
    }


def deterministic_sites(
    target: ModelTarget, names: list[str], draws: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The values of deterministic sites at each draw, of all rows.

    :param target: the model with its arguments.
    :param names: the sites.
    :param draws: constrained values of every latent site, along a first axis.
    """

    def values(target: ModelTarget, draws: Any) -> Any:
        rows = {n: jnp.arange(k, dtype=jnp.int32) for n, k in target.sizes.items()}

        def one(draw: Any) -> dict[str, Array]:
            trace = target.trace(rows, data=draw)
            return {name: jnp.asarray(trace[name]["value"]) for name in names}

        return jax.lax.map(one, draws)

    found = Program(target, values)(dict(draws))
    return {name: np.asarray(value) for name, value in found.items()}


def log_likelihoods(
    target: ModelTarget,
    sites: Mapping[str, Site],
    draws: Mapping[str, Any],
    chunk_size: int = CHUNK,
) -> dict[str, np.ndarray]:
    """The log likelihood of each row at each draw, for each site of a data plate.

    :param target: the model with its arguments.
    :param sites: its sites.
    :param draws: constrained values of every latent site, along a first axis.
    :param chunk_size: how many log likelihoods are computed at a time.
    :return: for each site shape ``(draws, rows)``.
    """
    plates = data_sites(sites, target)
    draws = {name: draws[name] for name, site in sites.items() if site.latent}
    found: dict[str, np.ndarray] = {}
    for plate in dict.fromkeys(plates.values()):
        names = [name for name in plates if plates[name] == plate]

        def rows_of(
            target: ModelTarget, draw: Any, rows: Any, names: list[str] = names
        ) -> dict[str, Array]:
            by_site = target.site_rows(target.trace(rows, data=draw))
            return {name: by_site[name] for name in names}

        found |= compute_rows(target, plate, rows_of, draws, chunk_size)
    return {name: found[name] for name in plates}


def entry_log_likelihoods(
    target: ModelTarget, sites: Mapping[str, Site], draws: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The log likelihood of each entry of each observed site, for any model.

    :param target: the model with its arguments.
    :param sites: its sites.
    :param draws: constrained values of every latent site, along a first axis.
    :return: for each site the shape of its batch, after an axis of draws.
    """
    model = AllRows(target.model, dict(target.sizes))
    found = log_likelihood(model, dict(draws), *target.args, **target.kwargs)
    return {n: np.asarray(found[n]) for n, site in sites.items() if site.observed}


@full_precision
def log_densities(
    target: Target,
    draws: Any,
    chunk_size: int = CHUNK,
) -> tuple[np.ndarray, np.ndarray]:
    """Log prior and log likelihood of all rows at each draw, in chunks of the rows.

    With respect to the values of the draws: constrained ones for a model. Sums are
    made in double precision.

    :param target: the model with its arguments, or a target written by hand.
    :param draws: values of every latent site, along a first axis.
    :param chunk_size: how many log likelihoods are computed at a time.
    :return: both of shape ``(draws,)``, at temperature 1.
    """
    sizes = target.plates

    def terms(target: Target, draw: Any, rows: Any) -> Any:
        if isinstance(target, ModelTarget):
            return target.terms_of_draw(draw, rows)
        return target.terms(draw, rows)

    def part(target: Target, draws: Any, rows: Any) -> Any:
        def one(draw: Any) -> Any:
            found = terms(target, draw, rows)
            known = (
                sum((jnp.sum(x) for x in jax.tree.leaves(tree)), jnp.zeros(()))
                for tree in (found.prior, found.likelihood)
            )
            return *known, found.rows

        return jax.lax.map(one, draws)

    program = (
        Program(target, part)
        if isinstance(target, ModelTarget)
        else jax.jit(partial(part, target))
    )
    count = len(jax.tree.leaves(draws)[0])
    prior, likelihood = np.zeros(count), np.zeros(count)
    width = max(1, min(_CHUNK_ROWS, chunk_size // max(count, 1), max(sizes.values())))
    for left in range(0, max(sizes.values()), width):
        # the last chunks repeat a row: one shape is compiled once
        place = np.arange(left, left + width, dtype=np.int32)
        rows = {
            n: jnp.asarray(np.minimum(place, size - 1)) for n, size in sizes.items()
        }
        known, other, by_plate = program(draws, rows)
        if left == 0:
            prior += np.asarray(known, np.float64)
            likelihood += np.asarray(other, np.float64)
        for name, values in by_plate.items():
            new = np.asarray(values, np.float64)[:, place < sizes[name]]
            likelihood += new.sum(1)
    return prior, likelihood


@full_precision
def compute_rows(
    target: Target,
    plate: str,
    rows_of: Callable[..., dict[str, Array]],
    draws: Any,
    chunk_size: int,
) -> dict[str, np.ndarray]:
    """Numbers for each row of a plate at each draw, computed in chunks.

    :param target: what the rows belong to.
    :param plate: the data plate.
    :param rows_of: ``rows_of(target, draw, indices)``, a dict of vectors with an entry
        for each index of the plate.
    :param draws: arrays with a first axis of draws.
    :param chunk_size: how many numbers are computed at a time.
    :return: arrays of shape ``(draws, rows)``, by the keys of ``rows_of``.
    """
    sizes = target.plates
    # of other plates as few rows as there can be, for their sites are evaluated too
    few = {n: jnp.arange(min(2, size), dtype=jnp.int32) for n, size in sizes.items()}

    def chunk(target: Target, draws: Any, rows: Array) -> dict[str, Array]:
        indices = few | {plate: rows}
        return jax.vmap(lambda draw: rows_of(target, draw, indices))(draws)

    program = (
        Program(target, chunk)
        if isinstance(target, ModelTarget)
        else jax.jit(partial(chunk, target))
    )
    size, num_draws = sizes[plate], len(jax.tree.leaves(draws)[0])
    width = min(size, chunk_size, _CHUNK_ROWS)
    height = min(num_draws, max(1, chunk_size // width))
    out: dict[str, np.ndarray] = {}
    for top in range(0, num_draws, height):
        # the last chunks repeat a draw or a row: one shape is compiled once
        which = np.minimum(np.arange(top, top + height), num_draws - 1)
        some = jax.tree.map(lambda x, which=which: x[which], draws)
        for left in range(0, size, width):
            rows = np.minimum(np.arange(left, left + width, dtype=np.int32), size - 1)
            for name, value in program(some, jnp.asarray(rows)).items():
                if name not in out:
                    out[name] = np.empty((num_draws, size), value.dtype)
                part = out[name][top : top + height, left : left + width]
                part[:] = np.asarray(value)[: part.shape[0], : part.shape[1]]
    return out
