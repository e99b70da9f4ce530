"""A model whose rows have had their latent variables integrated out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro.distributions import biject_to
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_minibatch._internal.precision import full_precision, in_this_precision
from numpyro_minibatch._internal.static import Static, digest
from numpyro_minibatch._internal.threads import untraced
from numpyro_minibatch._model.dataflow import (
    indexes_one_element,
    inputs_used,
    smooth_inputs,
)
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.marginal._chain import ChainModel
from numpyro_minibatch.marginal._find_chains import find_chains
from numpyro_minibatch.marginal._finite import check_finite
from numpyro_minibatch.marginal._kinks import (
    TwoSides,
    kinked_sites,
    parts_of,
    with_wholes,
)
from numpyro_minibatch.marginal._quadrature import (
    NODES,
    Place,
    find_place,
    find_reach,
    is_wide,
    log_integral,
    log_sum_exp,
)
from numpyro_minibatch.marginal._row_sites import (
    RowMarginal,
    kind_of,
    marked_numbers,
    marked_states,
    next_marks,
    row_marks,
    rows_first,
    site_rows,
)
from numpyro_minibatch.marginal._shared import check_not_shared, is_proven
from numpyro_minibatch.marginal._sites import (
    Level,
    Local,
    canonical,
    find_levels,
    find_sites,
    indexable,
    masks_of,
    placeholder,
    plates_of,
    run_hidden,
    states_of,
)
from numpyro_minibatch.marginal._split import Split
from numpyro_minibatch.target import (
    integrates,
    takes_highest,
    with_bound_arguments,
)

__all__ = ["HideRows", "LevelModel", "Rows", "RowsMarginalized"]

# starts of searches for other modes, by the number of dimensions, in standard
# deviations of the prior, which some draws estimate
_FAR_OUT = {1: (1.5, 4.0, 8.0), 2: (2.0, 6.0), 3: (4.0,)}
_PRIOR_DRAWS = 32
# unconstrained distances from the start of a search at which a row may have a density
_TRIED = (0.0, 0.7, -0.7, 2.0, -2.0, 5.0, -5.0)
_ANYWHERE = (-0.7071, 0.5413)  # unconstrained distances at which no value has an atom


@dataclass(frozen=True)
class RowsMarginalized:
    """A model without the latent variables of its rows.

    :param fn: the original model.
    :param sites: names of the sites that are integrated out; ``None`` for all.
    :param num_nodes: quadrature nodes of each dimension.
    """

    fn: Callable
    sites: tuple[str, ...] | None = None
    num_nodes: int | None = None

    marginalizes: ClassVar[bool] = True  # for who does not import this package

    def __post_init__(self) -> None:
        try:  # arguments are bound to the model's own names
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            return
        object.__setattr__(self, "__signature__", signature)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its return value depends on no site that is integrated out."""
        if isinstance(self.fn, partial):  # which may hold NumPy arrays
            model, args, bound = with_bound_arguments(self, args, kwargs)
            return model(*args, **bound)
        args, kwargs = jax.tree.map(indexable, (args, kwargs))
        models = self.chain(args, kwargs)
        _check_not_given(models)
        check_finite(self, args, kwargs)
        model = models[-1] if models else in_this_precision(self.fn)
        return model(*args, **kwargs)

    def row_size(self, args: tuple, kwargs: Mapping[str, Any]) -> int:
        """About how many likelihood evaluations one marginal likelihood takes.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        found = [self.num_nodes or NODES[1]]
        for level in self.levels(args, kwargs):
            if level.chain is None:
                nodes = self.num_nodes or level.nodes
                found.append(level.states * nodes**level.dimensions)
        return max(found)

    def levels(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Level, ...]:
        """The sites to integrate out, by level, the innermost plates first."""
        static, arrays = Static.split(args, kwargs)
        shapes = tuple((x.shape, str(canonical(x.dtype))) for x in arrays)
        known = _LEVELS.setdefault(self, {})
        key = static, shapes
        if key not in known:  # only then are arrays copied
            known[key] = self._find_levels(*jax.tree.map(indexable, (args, kwargs)))
        unproven = not all(level.own_values for level in known[key])
        if unproven and not any(isinstance(x, jax.core.Tracer) for x in arrays):
            self._check_not_shared(known[key], args, kwargs, arrays)
        return known[key]

    def _check_not_shared(
        self,
        levels: tuple[Level, ...],
        args: tuple,
        kwargs: Mapping[str, Any],
        arrays: Sequence[Any],
    ) -> None:
        """Raise if rows share latent values, once for the same indices in the data."""
        whole = [x for x in arrays if not jnp.issubdtype(x.dtype, jnp.floating)]
        key = levels, digest(whole)
        checked = _APART.setdefault(self, set())
        if key in checked or find_rows((args, dict(kwargs))):
            return
        args, kwargs = jax.tree.map(indexable, (args, kwargs))
        for model in self._models(levels):
            if not model.level.own_values:
                untraced(check_not_shared, model, args, kwargs)
        checked.add(key)

    def _find_levels(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Level, ...]:
        sites = self.sites
        found = find_sites(self.fn, args, kwargs)
        kinked = kinked_sites(found, sites)
        model = _in_parts(self.fn, kinked)
        if kinked:
            found = find_sites(model, args, kwargs)
            parts = {part for name in kinked for part in parts_of(name)}
            sites = None if sites is None else tuple(set(sites) - set(kinked) | parts)
        levels: list[Level] = []
        if any(s.in_scan and s.plates and not s.observed for s in found):
            levels += find_chains(model, args, kwargs, sites)
            for level in levels:
                model = ChainModel(model, level)
        if levels:
            found = find_sites(model, args, kwargs)
            names = {name for level in levels for name in level.names}
            sites = None if sites is None else tuple(set(sites) - names)
        for level in find_levels(found, sites, more=not levels):
            level = with_wholes(level, kinked)
            one = LevelModel(model, level, self.num_nodes)
            one = LevelModel(model, one.checked(args, kwargs), self.num_nodes)
            levels.append(one.level)
            model = one
        return tuple(
            model.level._replace(own_values=is_proven(model, args, kwargs))
            for model in self._models(levels)
        )

    def angles(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """The sites that are integrated out and have a circular support.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        sites = [site for level in self.levels(args, kwargs) for site in level.sites]
        return tuple(site.name for site in sites if site.circular)

    def chain(
        self, args: tuple, kwargs: Mapping[str, Any]
    ) -> list[LevelModel | ChainModel]:
        """The model with all levels integrated out, one after the other."""
        return self._models(self.levels(args, kwargs))

    def _models(self, levels: Sequence[Level]) -> list[LevelModel | ChainModel]:
        models: list[LevelModel | ChainModel] = []
        kinked = {x.part_of for level in levels for x in level.sites if x.part_of}
        for level in levels:
            below = models[-1] if models else _in_parts(self.fn, kinked)
            if level.chain is None:
                models.append(LevelModel(below, level, self.num_nodes))
            else:
                models.append(ChainModel(below, level))
        return models


def _in_parts(model: Callable, kinked: Collection[str]) -> Callable:
    """The model with each of these sites in two parts, without a kink."""
    if not kinked:
        return model
    return numpyro.handlers.reparam(model, config=dict.fromkeys(kinked, TwoSides()))


def _check_not_given(models: Sequence[LevelModel | ChainModel]) -> None:
    """Refuse handlers that condition on a site that is integrated out.

    They do not see it. Handlers that substitute may have more values than the model has
    sites, such as all draws of a run.
    """
    given: set[str] = set()
    for handler in numpyro.primitives._PYRO_STACK:
        if isinstance(handler, numpyro.handlers.condition):
            given.update(handler.data or ())
    hidden = sorted(given & {n for model in models for n in model.level.written})
    if hidden:
        names = ", ".join(map(repr, hidden))
        raise ValueError(
            f"handlers.condition around marginalize(model) has no effect on {names}, "
            "which is integrated out. Write marginalize(handlers.condition(model, "
            "data=...)), with the data inside, or choose other sites with sites=[...]."
        )


# levels by model and argument shapes; they hold no data
_LEVELS: WeakKeyDictionary[RowsMarginalized, dict[Any, tuple[Level, ...]]] = (
    WeakKeyDictionary()
)
# levels that were checked on data with these indices
_APART: WeakKeyDictionary[RowsMarginalized, set[Any]] = WeakKeyDictionary()


class _Observed(NamedTuple):
    """An observed site of the rows.

    :param kind: the class of its distribution.
    :param value: the observations, rows first.
    :param names: names of the axes of one row, if they have any.
    """

    name: str
    kind: str
    value: Array
    names: tuple[str | None, ...]
    infer: Mapping[str, Any]


class HideRows(Messenger):
    """Record the sites of the rows and hide them from handlers around the model.

    :param level: what is integrated out.
    :param values: values of its sites; by default arbitrary values.
    """

    def __init__(
        self, fn: Any, level: Level, values: Mapping[str, Array] | None = None
    ) -> None:
        self.level, self.values = level, values or {}
        self.names = set(level.names)
        self.fns: dict[str, Any] = {}
        self.observed: list[_Observed] = []
        self.globals: dict[str, Any] = {}
        self.plates: dict[str, tuple[Array, int]] = {}
        self.sizes: dict[str, int] = {}
        self._asked: set[int] = set()
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        kind, name = msg["type"], msg.get("name")
        if kind == "sample" and name in self.names:
            fn = msg["fn"]
            self.fns[name] = fn
            given = self.values.get(name)
            msg["value"] = placeholder(fn) if given is None else given
            msg["stop"] = True
            self.sizes |= {f.name: f.size for f in msg["cond_indep_stack"]}
        elif kind == "sample" and msg["is_observed"] and self._in_rows(msg):
            self.observed.append(_observed(msg, self.level.plates))
            msg["stop"] = True
        elif kind == "deterministic" and (
            self._in_rows(msg) or name in self.level.hidden
        ):
            msg["stop"] = True
        elif kind == "param" or (kind == "sample" and _is_drawn(msg)):
            self._asked.add(id(msg))

    def postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "plate":
            self.plates[msg["name"]] = msg["value"], msg["args"][0]
        elif id(msg) in self._asked:
            self._asked.discard(id(msg))
            self.globals[msg["name"]] = msg["value"]

    def _in_rows(self, msg: Any) -> bool:
        plates = {frame.name for frame in msg["cond_indep_stack"]}
        return plates.issuperset(self.level.plates)


def _is_drawn(msg: Any) -> bool:
    """Whether a site gets its value by this message, or got it in a scan."""
    in_scan = msg.get("_control_flow_done", False) and not msg["is_observed"]
    return in_scan or msg["value"] is None


class _Fill(Messenger):
    """Set the rows of the plates and the values of the sites that are integrated out.

    :param plates: indices and size of each plate.
    :param states: values of discrete sites.
    :param free: unconstrained values of continuous sites.
    """

    def __init__(
        self,
        fn: Callable,
        plates: Mapping[str, tuple[Array, int]],
        states: Mapping[str, Array],
        free: Mapping[str, Array],
    ) -> None:
        self.plates, self.states, self.free = plates, states, free
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        kind, name = msg["type"], msg.get("name")
        if kind == "plate" and name in self.plates:
            indices, size = self.plates[name]
            msg["value"] = indices
            msg["args"] = (size, len(indices))
            msg["stop"] = True
        elif kind == "sample" and name in self.states:
            value, fn = self.states[name], msg["fn"]
            batch = fn.batch_shape
            if value.ndim == len(fn.event_shape):  # one for all rows
                batch = (1,) * len(batch)
            msg["value"] = value.reshape(batch + fn.event_shape)
        elif kind == "sample" and name in self.free:
            fn = msg["fn"]
            transform = biject_to(fn.support)
            shape = transform.inverse_shape(fn.shape())
            msg["value"] = transform(self.free[name].reshape(shape))


def _observed(msg: Any, plates: Sequence[str]) -> _Observed:
    fn, value = msg["fn"], jnp.asarray(msg["value"])
    shape = jnp.broadcast_shapes(value.shape, fn.shape())
    event_dim = fn.event_dim
    value = jnp.broadcast_to(value, shape)
    names: list[str | None] = [None] * len(shape)
    for frame in msg["cond_indep_stack"]:
        names[len(shape) - event_dim + frame.dim] = frame.name
    infer = dict(msg["infer"])
    own = tuple(infer.pop("event_dims", ()))
    if own:
        names[len(names) - len(own) :] = own
    value = rows_first(value, msg, plates, event_dim)
    rest = [name for name in names if name not in plates]
    # axes of length one without a plate only align shapes
    kept = [
        i
        for i in range(len(rest))
        if i >= len(rest) - event_dim
        or rest[i] is not None
        or value.shape[len(plates) + i] != 1
    ]
    rows = value.shape[: len(plates)]
    inner = tuple(value.shape[len(plates) + i] for i in kept)
    return _Observed(
        msg["name"],
        kind_of(fn),
        value.reshape(rows + inner),
        tuple(rest[i] for i in kept),
        infer,
    )


@dataclass(frozen=True, eq=False)
class LevelModel:
    """A model with the sites of one level integrated out.

    :param fn: the model.
    :param level: the sites and their plates.
    :param num_nodes: quadrature nodes of each dimension.
    """

    fn: Callable
    level: Level
    num_nodes: int | None = None

    @full_precision
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and observe the marginal likelihood of each row."""
        seen = self.observer()
        returned = seen(*args, **kwargs)
        rows = self.rows(seen, args, kwargs)
        self._observe(seen, rows, rows.log_marginal())
        return returned

    def observer(self) -> HideRows:
        """The model without the sites of its rows, to be run for :meth:`rows`."""
        return HideRows(in_this_precision(self.fn), self.level)

    def rows(self, seen: HideRows, args: tuple, kwargs: Mapping[str, Any]) -> Rows:
        """The rows of the model after a run.

        :param seen: the :meth:`observer` that was run.
        """
        return Rows.of(self, seen, args, kwargs)

    def _observe(self, seen: HideRows, rows: Rows, log_marginal: Array) -> None:
        """The marginal likelihood of the rows as a site in their plates."""
        name = "_".join(site.name for site in seen.observed)
        first = seen.observed[0]
        shape = rows.shape
        if len(seen.observed) == 1:
            value, names, infer = first.value, first.names, dict(first.infer)
        else:
            real = jnp.result_type(float)
            flat = [
                jnp.asarray(site.value, real).reshape(*shape, -1)
                for site in seen.observed
            ]
            value, names, infer = jnp.concatenate(flat, -1), (None,), {}
        if names and all(names):
            infer["event_dims"] = list(names)
        infer.pop("enumerate", None)
        fn = RowMarginal(log_marginal, value.shape[len(shape) :], first.kind)
        frames = [
            CondIndepStackFrame(plate, dim, seen.sizes[plate])
            for dim, plate in enumerate(self.level.plates, -len(self.level.plates))
        ]
        with _InPlates(None, name, frames, rows.scale):
            numpyro.sample(name, fn, obs=value, infer=infer)

    def checked(self, args: tuple, kwargs: Mapping[str, Any]) -> Level:
        """The level with the deterministic sites that depend on its sites.

        :raises ValueError: something outside of the row depends on one of its sites,
            or the observations change only in steps with a continuous one.
        """
        names = self.level.names
        outputs: list[tuple[str, bool]] = []

        def run(values: Mapping[str, Array]) -> list[Any]:
            outputs.clear()
            trace = run_hidden(HideRows(self.fn, self.level, values), args, kwargs)
            found = []
            for name, site in trace.items():
                if site["type"] == "sample" and name not in names:
                    if set(self.level.plates) <= set(plates_of(site)):
                        if site["is_observed"]:
                            continue
                    log_prob = site["fn"].log_prob(site["value"])
                    outputs.append((name, False))
                    found.append(log_prob)
                elif site["type"] == "deterministic":
                    if not set(self.level.plates) <= set(plates_of(site)):
                        outputs.append((name, True))
                        found.append(site["value"])
            return found

        hidden_run = HideRows(self.fn, self.level)

        def values() -> dict[str, Array]:
            run_hidden(hidden_run, args, kwargs)
            return {n: placeholder(fn) for n, fn in hidden_run.fns.items()}

        given = jax.eval_shape(values)
        closed = jax.make_jaxpr(run)(given)
        depends = []
        for k, (name, deterministic) in enumerate(outputs):
            alone = closed.jaxpr.replace(outvars=closed.jaxpr.outvars[k : k + 1])
            used = inputs_used(closed.replace(jaxpr=alone))
            if not any(used):
                continue
            if deterministic:
                depends.append(name)
                continue
            which = sorted(n for n, yes in zip(sorted(given), used, strict=True) if yes)
            raise ValueError(
                f"marginalize cannot integrate {', '.join(map(repr, which))} out of "
                f"each row of plate {self.level.plates[-1]!r}: site {name!r} depends "
                "on it and is not an observation of that row. Integrate both out "
                f'(sites=[..., "{name}"]) if it is a latent site of the row; '
                "otherwise rows share the latent site, which then has no marginal "
                "likelihood for each row."
            )
        self._check_smooth(args, kwargs)
        level = self.level._replace(hidden=tuple(depends))
        broadcasts = replace(self, level=level)._broadcasts(args, kwargs)
        return level._replace(broadcasts=broadcasts)

    def _broadcasts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the rows can share one value of each discrete site.

        What depends on a state but not on the row, such as the normalising constant of
        a component, is then computed for each state and not for each row and state.
        Enumeration in NumPyro asks this of a model; models that need a value for each
        row, in ``jax.vmap`` for instance, raise an error here.
        """
        sites = self.level.sites
        if self.level.states == 1 or any(site.fills for site in sites):
            return False
        shared = replace(self, level=self.level._replace(broadcasts=True))

        def run(state: Array) -> Array:
            seen = shared.observer()
            run_hidden(seen, args, kwargs)
            rows = shared.rows(seen, args, kwargs)
            return rows.log_joint(state, rows.start() if rows.continuous else None)

        state = jnp.zeros(sum(site.discrete for site in sites), jnp.int32)
        try:
            closed = jax.make_jaxpr(run)(state)
        except Exception:  # whatever the user's code raises
            return False
        return not indexes_one_element(closed)

    def _check_smooth(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Refuse latent numbers on which the density of a row depends by jumps.

        :raises ValueError: quadrature would have to find the jumps.
        """
        for site in self.level.sites:
            if site.discrete:
                continue
            if not site.improper:
                self._check_density(site.name, args, kwargs)
            self._check_bounds(site.name, args, kwargs)

            def rest(x: Array, name: str = site.name) -> list[Array]:
                seen = self.observer()
                run_hidden(seen, args, kwargs)
                return self.rows(seen, args, kwargs).densities_without(name, x)

            closed = jax.make_jaxpr(rest)(0.0)
            if inputs_used(closed)[0] and not smooth_inputs(closed)[0]:
                name = site.name
                raise ValueError(
                    f"marginalize cannot integrate {name!r} by quadrature: the "
                    f"observations depend on it only in steps, such as {name} > 0. "
                    "Write the probability of an interval instead. For "
                    f"{name} ~ Normal(m, s), that of {name} > 0 is "
                    "jax.scipy.special.ndtr(m / s), as in "
                    "dist.Bernoulli(probs=jax.scipy.special.ndtr(m / s))."
                )

    def _check_density(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Refuse a latent number that has no density, as that of ``dist.Delta``.

        :raises ValueError: the density is zero wherever it is evaluated.
        """
        kind = ""

        def own(x: Array) -> Array:
            nonlocal kind
            seen = self.observer()
            run_hidden(seen, args, kwargs)
            kind = kind_of(seen.fns[name])
            return self.rows(seen, args, kwargs).density_of(name, x)

        closed = jax.make_jaxpr(own)(0.0)
        if not inputs_used(closed)[0] or smooth_inputs(closed)[0]:
            return
        # computed for such a site only: steps may also be those of a uniform density
        with jax.ensure_compile_time_eval():
            values = [own(jnp.asarray(x)) for x in _ANYWHERE]
        if any(isinstance(x, jax.core.Tracer) for x in values):
            return
        if all(np.all(np.asarray(x) == -np.inf) for x in values):
            raise ValueError(
                f"marginalize cannot integrate {name!r}: {kind} has no density, "
                "because its value is determined by its parameters. So it is no latent "
                f"variable. Write it as a value, {name} = ..., or as "
                f'numpyro.deterministic("{name}", ...).'
            )

    def _check_bounds(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Refuse a latent number that bounds the values of an observation.

        :raises ValueError: the density of a row jumps to zero at some value of it.
        """
        bounded: list[str] = []

        def bounds(x: Array) -> list[Array]:
            seen = self.observer()
            run_hidden(seen, args, kwargs)
            found = self.rows(seen, args, kwargs).bounds(name, x)
            bounded[:] = [site for site, leaves in found.items() for _ in leaves]
            return [jnp.asarray(x) for leaves in found.values() for x in leaves]

        closed = jax.make_jaxpr(bounds)(0.0)
        for k, site in enumerate(bounded):
            alone = closed.jaxpr.replace(outvars=closed.jaxpr.outvars[k : k + 1])
            if not inputs_used(closed.replace(jaxpr=alone))[0]:
                continue
            raise ValueError(
                f"marginalize cannot integrate {name!r} by quadrature: a bound of the "
                f"values of {site!r} depends on it, so that the density of a row jumps "
                f"to zero where {name!r} does not allow the observation. Integrate it "
                "by hand over the values that allow the observation, and write the "
                "logarithm of the result as numpyro.factor in the plate; or sample the "
                "model with its latent sites, by NumPyro's NUTS."
            )


class _InPlates(Messenger):
    """Put a site into plates, with their scale."""

    def __init__(self, fn: Any, name: str, frames: list[Any], scale: float) -> None:
        self.name, self.frames, self.scale = name, frames, scale
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] == self.name:
            msg["cond_indep_stack"] = [*msg["cond_indep_stack"], *self.frames]
            if self.scale != 1.0:
                scale = 1.0 if msg["scale"] is None else msg["scale"]
                msg["scale"] = scale * self.scale


@dataclass(frozen=True, eq=False)
class Rows:
    """The latent variables of rows at one position: densities, modes, integrals.

    :param model: the level.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param globals: values of the sites that rows share.
    :param plates: indices and size of each plate.
    :param fns: the distributions of the sites, as functions of each other's values.
    :param shape: the number of rows along each plate of the level.
    :param scale: scale of the rows if the plates are subsampled.
    :param observed: the observations, rows first.
    """

    model: LevelModel
    args: tuple
    kwargs: Mapping[str, Any]
    globals: Mapping[str, Any]
    plates: Mapping[str, tuple[Array, int]]
    fns: Mapping[str, Any]
    shape: tuple[int, ...]
    scale: float
    observed: tuple[Array, ...]

    @classmethod
    def of(
        cls, model: LevelModel, seen: HideRows, args: tuple, kwargs: Mapping[str, Any]
    ) -> Rows:
        """The rows of a model that has been run."""
        shape = tuple(seen.sizes[name] for name in model.level.plates)
        scale = 1.0
        for name in model.level.plates:
            indices, size = seen.plates[name]
            scale *= size / len(indices) if size != len(indices) else 1.0
        rows = int(np.prod(shape, dtype=int))
        for name, fn in seen.fns.items():
            entries = int(np.prod(fn.batch_shape, dtype=int))
            if entries != rows:
                raise ValueError(
                    f"marginalize: site {name!r} has batch shape {fn.batch_shape} in "
                    f"{' and '.join(map(repr, model.level.plates))} of {shape} rows. "
                    "Make the other axes an event, with .to_event, or put them into a "
                    "plate."
                )
        return cls(
            model=model,
            args=args,
            kwargs=kwargs,
            globals=seen.globals,
            plates=seen.plates,
            fns=seen.fns,
            shape=shape,
            scale=scale,
            observed=tuple(site.value for site in seen.observed),
        )

    @property
    def discrete(self) -> list[Local]:
        """The sites that are summed."""
        return [site for site in self.model.level.sites if site.discrete]

    @property
    def continuous(self) -> list[Local]:
        """The sites that are integrated by quadrature."""
        return [site for site in self.model.level.sites if not site.discrete]

    @property
    def num_nodes(self) -> int:
        """Quadrature nodes of each dimension."""
        return self.model.num_nodes or self.model.level.nodes

    @property
    def states(self) -> np.ndarray:
        """All joint states of the discrete sites, one state per line."""
        ranges = [range(site.size) for site in self.discrete]
        joint = list(itertools.product(*ranges))
        return np.array(joint, np.int32).reshape(len(joint), len(ranges))

    def state_values(self, state: Array) -> dict[str, Array]:
        """The values of the discrete sites in a joint state.

        :param state: one for all rows, shape ``(sites,)``, or one per row with leading
            axes of rows.
        """
        values = {}
        for k, site in enumerate(self.discrete):
            fn = self.fns[site.name]
            value = states_of(fn)[state[..., k]]
            if state.ndim > 1 or not self.model.level.broadcasts:
                value = jnp.broadcast_to(value, self.shape + fn.event_shape)
            values[site.name] = value
        return values

    def free_values(self, u: Array) -> dict[str, Array]:
        """The unconstrained values of the continuous sites, in the last axis of u."""
        values, left = {}, 0
        for site in self.continuous:
            values[site.name] = u[..., left : left + site.size]
            left += site.size
        return values

    def start(self) -> Array:
        """The start of the search for the modes: the means of the sites, if known."""
        parts = []
        for site in self.continuous:
            fn = self.fns[site.name]
            transform = biject_to(fn.support)
            free = jnp.zeros(transform.inverse_shape(fn.shape()))
            try:
                mean = jnp.broadcast_to(fn.mean, fn.shape())
                guess = transform.inv(mean)
                free = jnp.where(jnp.isfinite(guess), guess, free)
            except (NotImplementedError, AttributeError, ValueError, TypeError):
                pass
            parts.append(free.reshape(*self.shape, site.size))
        return jax.lax.stop_gradient(jnp.concatenate(parts, -1))

    def other_starts(self) -> Array:
        """Other starts of a search, far out in the prior, shape ``(k,) + rows + (d,)``.

        Each row has the same ones: of 100,000 rows, each thousandth may have another
        mode that few draws of its prior lead to. Centre and scale of the prior are
        those of some draws; a site that cannot be drawn has those of a normal number.
        """
        first = self.start()
        keys = jax.random.split(jax.random.key(0), len(self.continuous))
        parts = []
        for site, key in zip(self.continuous, keys, strict=True):
            fn = self.fns[site.name]
            transform = biject_to(fn.support)
            shape = _PRIOR_DRAWS, *self.shape, site.size
            near = self.free_values(first)[site.name]
            free = near + jax.random.normal(key, shape, first.dtype)
            try:
                drawn = fn.sample(key, (_PRIOR_DRAWS,))
                drawn = jax.vmap(transform.inv)(drawn).reshape(shape)
                free = jnp.where(jnp.isfinite(drawn), drawn, free)
            except (NotImplementedError, AttributeError, ValueError, TypeError):
                pass
            parts.append(free)
        draws = jnp.sort(jnp.concatenate(parts, -1), 0)
        low, middle, high = (draws[int(q * _PRIOR_DRAWS)] for q in (0.16, 0.5, 0.84))
        d = first.shape[-1]
        along = [
            middle + k * side * 0.5 * (high - low) * jnp.eye(d, dtype=first.dtype)[j]
            for j in range(d)
            for k in _FAR_OUT[d]
            for side in (-1.0, 1.0)
        ]
        return jax.lax.stop_gradient(jnp.stack(along))

    def blank(self) -> dict[str, Array]:
        """Zeros for :meth:`log_joint_of`."""
        free = self.free_values(self.start()) if self.continuous else {}
        places = {x.name: jnp.zeros(self.shape, jnp.int32) for x in self.discrete}
        return jax.tree.map(jnp.zeros_like, {**places, **free})

    def log_joint_of(self, values: Mapping[str, Array]) -> Array:
        """:meth:`log_joint` at values of each row.

        :param values: by site, numbers of the states, or distances of unconstrained
            values from where a search starts.
        """
        places = [values[site.name] for site in self.discrete]
        state = jnp.stack(places, -1) if places else jnp.asarray(self.states[0])
        if not self.continuous:
            return self.log_joint(state, None)
        free = [values[site.name] for site in self.continuous]
        return self.log_joint(state, self.start() + jnp.concatenate(free, -1))

    def trace(self, state: Array, u: Array | None) -> dict[str, Any]:
        """Run the model at given values of the latent sites of the rows."""
        return self.trace_at(
            self.state_values(state), {} if u is None else self.free_values(u)
        )

    def trace_at(
        self, states: Mapping[str, Array], free: Mapping[str, Array]
    ) -> dict[str, Any]:
        """The same by site, of discrete and of unconstrained continuous values."""
        model = _Fill(self.model.fn, self.plates, states, free)
        return run_hidden(model, self.args, self.kwargs, self.globals)

    def densities_without(self, name: str, x: Array) -> list[Array]:
        """The log densities of all sites of the rows but one, as a function of that.

        :param name: a continuous site.
        :param x: how far its unconstrained values are from where a search starts.
        """
        return [
            site["fn"].log_prob(site["value"])
            for other, site in self._moved(name, x).items()
            if other != name
        ]

    def density_of(self, name: str, x: Array) -> Array:
        """The log density of the unconstrained values of a site, without their sums.

        :param name: a continuous site.
        :param x: how far its unconstrained values are from where a search starts.
        """
        fn = self._moved(name, x)[name]["fn"]
        transform = biject_to(fn.support)
        free = (self.free_values(self.start())[name] + x).reshape(
            transform.inverse_shape(fn.shape())
        )
        value = transform(free)
        change = transform.log_abs_det_jacobian(free, value)
        return fn.log_prob(value).sum() + change.sum()

    def bounds(self, name: str, x: Array) -> dict[str, list[Array]]:
        """The bounds of the values of each observed site, as a function of one site.

        :param name: a continuous site.
        :param x: how far its unconstrained values are from where a search starts.
        """
        found = {}
        for other, site in self._moved(name, x).items():
            if site["is_observed"]:
                leaves = jax.tree.leaves(getattr(site["fn"], "support", None))
                # the support of a user's distribution may be any object
                found[other] = [leaf for leaf in leaves if isinstance(leaf, Array)]
        return found

    def _moved(self, name: str, x: Array) -> dict[str, Any]:
        """The sites of the rows, with another value of one of them."""
        free = self.free_values(self.start())
        free[name] = free[name] + x
        trace = self.trace_at(self.state_values(jnp.asarray(self.states[0])), free)
        return {
            other: site
            for other, site in trace.items()
            if site["type"] == "sample"
            and set(self.model.level.plates) <= set(plates_of(site))
        }

    def log_joint(self, state: Array, u: Array | None) -> Array:
        """The log density of observations and latent variables of each row.

        The density is with respect to the unconstrained values of continuous sites.

        :param state: a joint state of the discrete sites, of all rows or of each.
        :param u: unconstrained values, shape ``rows + (d,)``.
        """
        total: Any = jnp.zeros(self.shape)
        plates, trace = self.model.level.plates, self.trace(state, u)
        for name, site in trace.items():
            if site["type"] != "sample" or not set(plates) <= set(plates_of(site)):
                continue
            if not (site["is_observed"] or name in self.fns):
                continue
            total = total + site_rows(site, plates, self.scale)
        free = {} if u is None else self.free_values(u)
        for local in self.model.level.sites:
            site, own = trace[local.name], jnp.zeros(self.shape)
            if local.name in free:
                transform = biject_to(site["fn"].support)
                shape = transform.inverse_shape(site["fn"].shape())
                x = free[local.name].reshape(shape)
                own = transform.log_abs_det_jacobian(x, site["value"])
                own = own.reshape(*self.shape, -1).sum(-1)
            if local.fills:
                missing, within = masks_of(site["fn"], self.shape)
                known = self._log_known(local, trace, free.get(local.name), missing)
                own = jnp.where(missing & within, own, known)
            total = total + own
        return total

    def _log_known(
        self,
        local: Local,
        trace: Mapping[str, Any],
        free: Array | None,
        missing: Array,
    ) -> Array:
        """The log density of a latent value that is not missing, or is left out.

        Nothing depends on it, and its density is masked, so that its integral would be
        infinite. The density here has an integral of one, whatever the parameters are:
        that of a standard normal, or one at the observed state.

        :param missing: whether there is no observed state, in values that are left out.
        """
        if free is not None:
            normal = -0.5 * free**2 - 0.5 * np.log(2 * np.pi)
            return normal.sum(-1)
        value = trace[local.name]["value"]
        same = value == trace[f"{local.fills}_observed"]["value"]
        observed = jnp.where(same.reshape(*self.shape, -1).all(-1), 0.0, -jnp.inf)
        return jnp.where(missing, -np.log(local.size), observed)

    def log_integrand(self) -> Array:
        """The log density of each row at latent values of its own.

        They differ between rows, so that a row whose density depends on the latent
        values of another one has another density in another batch.
        """
        marks = row_marks(self.observed, self.shape)
        state = jnp.asarray(self.states)[marked_states(marks, len(self.states))]
        if not self.continuous:
            return self.log_joint(state, None)
        start = self.start()
        apart = 0.5 / jnp.arange(1.0, start.shape[-1] + 1.0, dtype=start.dtype)
        numbers = marked_numbers(next_marks(marks))
        return self.log_joint(state, start + numbers[..., None] * apart)

    def log_highest(self) -> Array:
        """The highest log density of each row in all states, at a few latent values.

        Values are tried until all rows have a finite density.
        """
        apart = jnp.asarray(_TRIED) if self.continuous else jnp.zeros(1)

        def at(state: Array, x: Array) -> Array:
            u = self.start() + x if self.continuous else None
            found = self.log_joint(state, u)
            return jnp.where(jnp.isfinite(found), found, -jnp.inf)

        def more(carry: tuple[Array, Array]) -> Array:
            k, found = carry
            return (k < len(apart)) & ~jnp.isfinite(found).all()

        def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            k, found = carry
            states = jnp.asarray(self.states)
            new = jax.lax.map(lambda state: at(state, apart[k]), states).max(0)
            return k + 1, jnp.maximum(found, new)

        nothing = jnp.full(self.shape, -jnp.inf)
        return jax.lax.while_loop(more, one, (jnp.asarray(0), nothing))[1]

    def density(self, state: Array) -> Split:
        """:meth:`log_joint` of a joint state as a function of the continuous ones."""
        return Split.of(lambda u: self.log_joint(state, u), self.start())

    def place(self, density: Split) -> Place:
        """Mode and curvature of the continuous variables in a joint state.

        :param density: what :meth:`density` returned for the state.
        """
        return find_place(density.stopped(), self.start())

    def log_by_state(self, num_nodes: int | None = None) -> Array:
        """The log density of the observations and of each joint state of the rows.

        :return: shape ``(states,) + rows``.
        """
        nodes = num_nodes or self.num_nodes

        def one(state: Array) -> Array:
            if not self.continuous:
                return self.log_joint(state, None)
            density = self.density(state)
            place = self.place(density)
            reach = find_reach(density.stopped(), place) if is_wide(nodes) else None
            return log_integral(density, place, nodes, reach)

        states = jnp.asarray(self.states)
        return one(states[0])[None] if len(states) == 1 else jax.vmap(one)(states)

    def log_marginal(self, num_nodes: int | None = None) -> Array:
        """The log marginal likelihood of each row."""
        if takes_highest():
            return self.log_highest()
        if not integrates():
            return self.log_integrand()
        return log_sum_exp(self.log_by_state(num_nodes))
