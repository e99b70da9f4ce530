"""The starts of chains: positions at which the log density is resolved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import MaskedDistribution
from numpyro.distributions.distribution import ExpandedDistribution, Independent
from numpyro.util import find_stack_level

from numpyro_minibatch._model.indexing import inspect_target
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch.target import ModelTarget, Target

__all__ = [
    "check_init_params",
    "check_start",
    "finite_rows",
    "find_nan",
    "find_start",
    "listed",
    "never_finite_rows",
]

_MAX_ROWS = 2**20  # rows looked at before the first draw
_CHUNK = 2**15  # of which so many at a time
_MAX_TRIES = 100  # starting points tried, as many as NumPyro tries

# Where the log density of a thousand rows is resolved no finer than this, a step that
# is short enough to be accepted can be lost in rounding, and a chain never leaves.
_RESOLUTION = 0.1


def find_start(
    target: Target, layout: Layout, init_strategy: Callable, key: Array, init: Any
) -> tuple[Any, Array]:
    """The start of one chain, and the log density of some rows there.

    :param target: the target.
    :param layout: what is known of the model.
    :param init_strategy: draws starting points until the log density is resolved in
        working precision; of a hundred that are not, the highest one is taken.
    :param key: PRNG key of the draws.
    :param init: the starting point, where there is one.
    """
    # enough rows, evenly spread, to see that the likelihood is finite here
    rows = {
        name: jnp.asarray(np.linspace(0, size - 1, min(size, 1000)), jnp.int32)
        for name, size in layout.plates
    }

    def log_density(z: Any) -> Array:
        terms = target.terms(z, rows)
        return terms.known + sum(r.sum() for r in terms.rows.values())

    if init is not None:
        z = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), init)
        return z, _log_density_of_many(target, layout, z)
    assert isinstance(target, ModelTarget)
    is_bound = isinstance(init_strategy, partial)
    of_site = init_strategy if is_bound else init_strategy()

    def strategy(site: Any) -> Any:
        # a batch cannot index values that were given as NumPy arrays
        return jax.tree.map(jnp.asarray, of_site(site))

    def draw(key: Array) -> Any:
        sites = target.trace(rows, key, substitute_fn=strategy)
        z = target.unconstrain(sites, layout.latents)
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), z)

    def try_again(carry: tuple[Array, Array, Any, Array]) -> Any:
        tries, key, best, highest = carry
        key, draw_key = jax.random.split(key)
        z = draw(draw_key)
        height = log_density(z)
        finite = jnp.isfinite(height)
        better = (tries == 0) | (finite & (height > highest))
        z = jax.tree.map(lambda new, old: jnp.where(better, new, old), z, best)
        height = jnp.where(finite, height, -jnp.inf)
        return tries + 1, key, z, jnp.maximum(height, highest)

    shapes = jax.eval_shape(draw, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    first = (jnp.int32(0), key, zeros, jnp.asarray(-jnp.inf, jnp.result_type(float)))
    lowest = -_RESOLUTION / jnp.finfo(jnp.result_type(float)).eps
    _, _, z, _ = jax.lax.while_loop(
        lambda carry: (carry[0] < _MAX_TRIES) & (carry[3] < lowest), try_again, first
    )
    return z, _log_density_of_many(target, layout, z)


def _log_density_of_many(target: Target, layout: Layout, z: Any) -> Array:
    """The log density of all rows, or of a million spread over them, at the start.

    One impossible row that no early batch contains would go unnoticed.
    """
    counts = {name: min(size, _MAX_ROWS) for name, size in layout.plates}
    strides = {name: size // counts[name] for name, size in layout.plates}
    widths = {name: min(count, _CHUNK) for name, count in counts.items()}

    def add_chunk(i: Array, total: Array) -> Array:
        rows = {}
        for name, width in widths.items():
            positions = i * width + jnp.arange(width, dtype=jnp.int32)
            rows[name] = jnp.minimum(positions, counts[name] - 1) * strides[name]
        terms = target.terms(z, rows)
        return total + terms.known + sum(r.sum() for r in terms.rows.values())

    chunks = max((-(-counts[n] // width) for n, width in widths.items()), default=1)
    return jax.lax.fori_loop(0, chunks, add_chunk, jnp.zeros(()))


def check_init_params(
    who: str,
    target: Target | None,
    layout: Layout,
    init_strategy: Callable,
    init_params: Any,
    chains: tuple[int, ...],
) -> None:
    """Check the given starting point of a chain, before anything compiles.

    :param who: the kernel's name, for the messages.
    :param target: the target, if it was written by hand.
    :param layout: what is known of the model.
    :param init_strategy: used when there are no ``init_params``.
    :param init_params: the starting point, or ``None``.
    :param chains: its leading shape, ``(num_chains,)`` for vectorised chains.
    """
    if init_params is None:
        if target is not None:
            raise ValueError(
                f"{who}(target=...) cannot choose a starting point: pass "
                "init_params=... to MCMC.run."
            )
        _check_init_values(layout, init_strategy)
        return
    if target is not None:
        leaves, treedef = jax.tree.flatten(init_params)
        given = [jnp.shape(x)[len(chains) :] for x in leaves]
        if not leaves:
            raise ValueError(
                f"{who}(target=...) got init_params without a number in it: "
                f"{init_params!r}. Pass a position of the target."
            )
        dtype = jnp.result_type(float)
        z = jax.tree.unflatten(
            treedef, [jax.ShapeDtypeStruct(shape, dtype) for shape in given]
        )
        inspect_target(who, target, dict(layout.widths), z)
        return
    shapes = dict(zip(layout.latents, layout.shapes, strict=True))
    if not isinstance(init_params, Mapping) or set(init_params) != set(shapes):
        got = (
            sorted(init_params)
            if isinstance(init_params, Mapping)
            else type(init_params).__name__
        )
        raise ValueError(
            "init_params must be a dict of unconstrained values for the latent "
            f"sites {sorted(shapes)}, got {got}."
        )
    for site, shape in shapes.items():
        value = init_params[site]
        if not isinstance(value, np.ndarray | Array | np.number | float | int):
            raise TypeError(
                f"init_params[{site!r}] must be an array of shape "
                f"{chains + shape}, got {type(value).__name__}. Write "
                "jnp.asarray(...)."
            )
        if jnp.shape(value) != chains + shape:
            per_chain = ", one row per chain" if chains else ""
            raise ValueError(
                f"init_params[{site!r}] must have shape {chains + shape}, that of "
                f"the unconstrained value of the site{per_chain}, got shape "
                f"{jnp.shape(value)}."
            )


def _check_init_values(layout: Layout, init_strategy: Callable) -> None:
    """Check the values that init_to_value was given."""
    values = getattr(init_strategy, "keywords", {}).get("values")
    if not isinstance(values, Mapping):
        return
    for site, shape in zip(layout.latents, layout.value_shapes, strict=True):
        if site in values and jnp.shape(values[site]) != shape:
            raise ValueError(
                f"init_to_value(values=...) must give site {site!r} a value of "
                f"shape {shape}, got shape {jnp.shape(values[site])}."
            )


def check_start(
    who: str, target: Target, z: Any, log_density: np.ndarray, args: Any
) -> None:
    """Raise unless the log density is finite where the chains start.

    :param who: the kernel's name, for the messages.
    :param target: the target.
    :param z: the starting point, with a leading axis of vectorised chains.
    :param log_density: its log density on some rows, a number or one per chain.
    :param args: the model's ``(args, kwargs)``, which may contain NaN.
    """
    _check_position(who, z)
    nan = find_nan(args)
    finite = np.isfinite(log_density).all()
    if finite and not nan:
        return
    if np.ndim(log_density):
        chain = int(np.isfinite(log_density).argmin())
        z = jax.tree.map(lambda x: x[chain], z)
    bad = _non_finite_rows(target, z)
    if bad:
        cause = f" The arguments contain NaN ({'; '.join(nan)})." if nan else ""
        raise ValueError(
            f"{who}: the log likelihood is not finite at the "
            f"starting point for some rows ({listed(bad)}).{cause} Drop or mask those "
            "rows (numpyro.handlers.mask), or start elsewhere with "
            "init_strategy=init_to_value(values=...)."
        )
    if not finite:
        raise ValueError(
            f"{who}: the log density is not finite at the start, "
            f"after {_MAX_TRIES} tries, because the log prior is not. Start from "
            "values that the model allows, "
            "init_strategy=init_to_value(values=...), or check the priors."
        )
    if isinstance(target, ModelTarget) and not _treats_nan(target, z):
        warnings.warn(
            f"{who}: the arguments contain NaN ({'; '.join(nan)}), and yet every row "
            "has a finite log likelihood: some distributions assign a finite "
            "value to NaN, for example a Bernoulli with logits. Drop those rows, or "
            "mask them with numpyro.handlers.mask.",
            stacklevel=find_stack_level(),
        )


def _treats_nan(target: ModelTarget, z: Any) -> bool:
    """Whether a model has masked observations, or looks for NaN itself."""
    masked: list[str] = []
    while getattr(target.model, "marginalizes", False):  # masks are inside of it
        target = replace(target, model=target.model.fn)  # type: ignore[attr-defined]

    def run(z: Any, rows: dict[str, Array]) -> None:
        for name, site in target.sites_at(z, rows).items():
            fn = site.get("fn")
            while isinstance(fn, ExpandedDistribution | Independent):
                fn = fn.base_dist
            if isinstance(fn, MaskedDistribution) and site["is_observed"]:
                masked.append(name)

    rows = {name: jnp.zeros(min(2, n), jnp.int32) for name, n in target.plates.items()}
    program = jax.make_jaxpr(run)(z, rows)
    return bool(masked) or _compares_with_itself(program)


def _compares_with_itself(program: Any) -> bool:
    """Whether a program contains ``x != x``, which is how JAX looks for NaN."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        if eqn.primitive.name == "ne" and eqn.invars[0] is eqn.invars[1]:
            return True
        parts = [x for value in eqn.params.values() for x in jax.tree.leaves(value)]
        if any(hasattr(x, "eqns") and _compares_with_itself(x) for x in parts):
            return True
    return False


def _check_position(who: str, z: Any) -> None:
    for path, value in jax.tree_util.tree_leaves_with_path(z):
        if not np.isfinite(np.asarray(value)).all():
            raise ValueError(
                f"{who}: the starting point has values that are "
                f"not finite when unconstrained, at z{jax.tree_util.keystr(path)}: "
                "init_params must be finite, and init_to_value must give each site "
                "a value inside its support, not on its border."
            )


def _non_finite_rows(target: Target, z: Any) -> dict[str, list[int]]:
    """The first rows of each plate whose log likelihood is not finite."""
    positions = jax.tree.map(lambda x: np.asarray(x)[None], z)
    return never_finite_rows(
        target.plates, jax.jit(partial(finite_rows, target)), positions
    )


def finite_rows(
    target: Target, position: Any, indices: Mapping[str, Array]
) -> dict[str, Array]:
    """Whether rows have a finite log likelihood at a position.

    :param target: the target.
    :param position: an unconstrained position.
    :param indices: the rows of each plate.
    """
    rows = target.terms(position, indices).rows
    return {name: jnp.isfinite(rows[name]) for name in indices}


def never_finite_rows(
    plates: Mapping[str, int],
    finite: Callable[[Any, dict[str, np.ndarray]], Mapping[str, Array]],
    positions: Any,
) -> dict[str, list[int]]:
    """The first rows of each plate whose log likelihood is finite at no position.

    :param plates: the number of rows of each plate.
    :param finite: :func:`finite_rows` as a function of a position and indices.
    :param positions: unconstrained positions, with a leading axis. They are tried one
        after the other until all rows are finite at one of them.
    :return: up to five rows of each plate that has any.
    """
    start = {name: np.zeros(min(2, size), np.int32) for name, size in plates.items()}
    count = len(jax.tree.leaves(positions)[0])
    never: dict[str, list[int]] = {}
    for name, size in plates.items():
        chunk = min(size, 65_536)
        for first in range(0, size, chunk):
            rows = np.minimum(np.arange(first, first + chunk), size - 1)
            left = np.ones(chunk, bool)
            for k in range(count):
                position = jax.tree.map(lambda x, k=k: x[k], positions)
                found = finite(position, {**start, name: rows.astype(np.int32)})
                left &= ~np.asarray(found[name])
                if not left.any():
                    break
            if left.any():
                never[name] = sorted({int(row) for row in rows[left][:5]})
                break
    return never


def listed(rows: Mapping[str, list[int]]) -> str:
    """Rows of plates, for messages."""
    return "; ".join(f"plate {plate!r}, rows {which}" for plate, which in rows.items())


def find_nan(args: Any, *, infinite: bool = False) -> list[str]:
    """The arrays in a model's ``(args, kwargs)`` that contain NaN, described.

    Data on devices of other processes are not read.

    :param args: positional and keyword arguments of a model.
    :param infinite: whether infinite values count, too.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        if isinstance(leaf, jax.core.Tracer) or not isinstance(
            leaf, np.ndarray | Array
        ):
            continue
        if isinstance(leaf, Array) and not leaf.is_fully_addressable:
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        values = np.asarray(leaf)
        if not np.issubdtype(values.dtype, np.floating) or not values.size:
            continue
        # both are NaN if any value is, and need no memory
        ends = [values.min()] + [values.max()] * infinite
        wrong = (lambda x: ~np.isfinite(x)) if infinite else np.isnan
        if np.any(wrong(np.array(ends))):
            kind = ("args", "kwargs")[path[0].idx]
            where = jax.tree_util.keystr(path[1:])
            count = int(wrong(values).sum())
            found.append(f"{kind}{where}: {count} of {values.size} values")
    return found
