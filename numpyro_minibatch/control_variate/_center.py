"""Where rows are expanded, found on the host in double precision before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from numpyro_minibatch._internal import passes
from numpyro_minibatch._internal.passes import Chunks
from numpyro_minibatch._model.dataflow import inputs_used
from numpyro_minibatch.batch import permute
from numpyro_minibatch.control_variate._taylor import Coordinates, Expansion, Taylor
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.target import ModelTarget, Target

__all__ = [
    "Center",
    "Problem",
    "choose_coordinates",
    "double",
    "find_center",
    "not_definite",
]

_SUBSAMPLE = 10_000  # rows on which the search for the centre begins
_MAX_DIM = 2_000  # above this a Hessian is too large to keep and to factorise
_STARTS = 4  # searches from different starts, to see whether there are several modes


@contextmanager
def double() -> Iterator[None]:
    """Double precision inside, whatever the setting outside."""
    if hasattr(jax, "enable_x64"):
        wide = jax.enable_x64(True)
    else:  # jax < 0.8
        from jax.experimental import enable_x64  # type: ignore[attr-defined]

        wide = enable_x64()
    with wide:
        yield


@dataclass
class Problem:
    """What the set-up is about: a target whose arrays are handed over, and its plates.

    :param target_of: the target with these arrays as its data.
    :param arrays: the data, in working precision.
    :param plates: the number of rows of each data plate.
    :param weights: the powers of the prior and of the likelihood.
    :param example: a position, for its structure and shapes.
    :param coordinates: what the rows are expanded in.
    :param dtype: the working precision.
    :param mesh: devices that share the passes over all rows; ``None`` for one.
    :param placed: the data on each of them.
    :param on_host: whether rows stay in the host's memory, or in files.
    """

    target_of: Callable[[list[Any]], Target]
    arrays: list[Any]
    plates: Mapping[str, int]
    weights: Weights
    example: Any
    coordinates: Coordinates = field(default_factory=Coordinates)
    dtype: Any = field(default_factory=lambda: jnp.result_type(float))
    mesh: Mesh | None = None
    placed: list[Any] | None = None
    on_host: bool = False

    def over_rows(self, fn: Callable) -> Callable:
        """Compile a function that makes passes over all rows.

        :param fn: a function of the data and of other trees of arrays.
        :return: a function of the others.
        """
        compiled = passes.shared(fn, self.mesh)
        arrays = self.arrays if self.placed is None else self.placed
        return lambda *rest: compiled(arrays, *rest)

    @cached_property
    def shapes(self) -> Any:
        """Shapes of the position."""
        return jax.tree.map(jnp.shape, self.example)

    def unravel(self, flat: Array) -> Any:
        """A position from a flat one of any precision."""
        leaves, treedef = jax.tree.flatten(
            self.shapes, is_leaf=lambda x: isinstance(x, tuple)
        )
        sizes = [int(np.prod(shape)) for shape in leaves]
        cuts = np.cumsum(sizes)[:-1].tolist()
        parts = jnp.split(flat, cuts)
        return jax.tree.unflatten(
            treedef, [p.reshape(s) for p, s in zip(parts, leaves, strict=True)]
        )

    @property
    def one_row(self) -> dict[str, Array]:
        """One row of each plate: enough for everything that is not a row."""
        return {name: jnp.zeros(1, jnp.int32) for name in self.plates}

    def known(self, arrays: list[Any], flat: Array) -> Array:
        """The weighted log density of all but the rows."""
        terms = self.target_of(arrays).terms(self.unravel(flat), self.one_row)
        return self.weights.known(terms)

    def phi_of(self, arrays: list[Any], flat: Array) -> Any:
        """The coordinates of the expansion at a flat position."""
        return self.coordinates.of(self.target_of(arrays), self.unravel(flat))


class Center(NamedTuple):
    """What the search for the centre found.

    :param center: the centre, ``(d,)``.
    :param gradient: gradient of the summed log likelihood there.
    :param hessian: its Hessian there.
    :param value: the summed log likelihood there.
    :param other_mode: distance to another mode that some search ended in, in
        posterior standard deviations; 0 where all ended in the same.
    """

    center: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray
    value: np.ndarray
    other_mode: float

    @property
    def expansion(self) -> Expansion:
        """The polynomial, in double precision."""
        return Expansion(self.center, self.gradient, self.hessian, self.value)  # type: ignore[arg-type]


def choose_coordinates(
    who: str, target: Target, example: Any, sites: tuple[str, ...] | None
) -> Coordinates:
    """Choose what the rows of a target are expanded in.

    :param who: the kernel's name, for the messages.
    :param target: the target.
    :param example: a position.
    :param sites: what the user asked for.
    :raises ValueError: the sites do not determine the likelihood of a row.
    """
    if not isinstance(target, ModelTarget):
        if sites is not None:
            raise ValueError(
                f"{who}: control_variate.taylor2(sites={sites!r}) chooses sites of a "
                "model; a target written by hand is expanded in its own position."
            )
        return Coordinates()
    rows = {name: jnp.zeros(1, jnp.int32) for name in target.sizes}
    shapes = jax.eval_shape(target.deterministic, example)
    values = {n: v for n, v in shapes.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def used(names: tuple[str, ...]) -> tuple[set[str], set[str]]:
        """The latent sites and the named deterministic sites that rows depend on."""
        given = {name: values[name] for name in names}

        def fn(z: Any, given: Any) -> Any:
            return target.rows(z, rows, given)

        depends = inputs_used(jax.make_jaxpr(fn)(example, given))
        flags = jax.tree.unflatten(jax.tree.structure((example, given)), depends)
        return tuple({n for n, yes in part.items() if yes} for part in flags)  # type: ignore[return-value]

    every = set(example)
    if sites is not None:
        unknown = set(sites) - every - set(values)
        if unknown:
            raise ValueError(
                f"{who}: control_variate sites {sorted(unknown)} are neither latent "
                f"sites ({', '.join(sorted(every))}) nor deterministic sites outside "
                f"of the data plate ({', '.join(sorted(values)) or 'none'})."
            )
        named = tuple(sorted(set(sites) & set(values)))
        missing = used(named)[0] - set(sites)
        if missing:
            raise ValueError(
                f"{who}: the likelihood of a row also depends on {sorted(missing)}, "
                f"which are not among control_variate sites {sorted(sites)}. Add them."
            )
        return Coordinates(tuple(sorted(set(sites) & every)), named)

    def size(latents: set[str], deterministic: set[str]) -> int:
        count = sum(int(np.prod(jnp.shape(example[n]))) for n in latents)
        return count + sum(int(np.prod(values[n].shape)) for n in deterministic)

    plain = used(())[0]
    latents, deterministic = used(tuple(values))
    # fewer numbers behind the same likelihood: the sites in between screen it off
    if size(latents, deterministic) < size(plain, set()):
        return Coordinates(tuple(sorted(latents)), tuple(sorted(deterministic)))
    return Coordinates() if plain == every else Coordinates(tuple(sorted(plain)))


def row_sums(problem: Problem, counts: Mapping[str, int], derivatives: int) -> Any:
    """A function of ``phi``: the summed log likelihood and its derivatives.

    :param counts: rows that are read of each plate; fewer than all are a random
        subset, scaled up.
    :param derivatives: how many of value, gradient and Hessian.
    """
    plates = problem.plates
    key = jax.random.key(20)

    def of_chunk(phi: Array, i: Array, template: Any, arrays: list[Any]) -> Array:
        target, (unravel_phi, z, chunks) = problem.target_of(arrays), template
        indices, masks = chunks.at(i)
        for name, positions in indices.items():
            if counts[name] != plates[name]:
                indices[name] = permute(key, positions, plates[name])
        rows = problem.coordinates.rows(target, unravel_phi(phi), z, indices)
        parts = [
            plates[n] / counts[n] * jnp.where(masks[n], r, 0.0).sum()
            for n, r in rows.items()
        ]
        return reduce(add, parts)

    def sums(arrays: list[Any], phi: Array) -> tuple[Array, ...]:
        # some 2 ** 22 numbers at once, whatever the dimension
        most = max(256, min(2**14, 2**22 // (phi.size + 1)))
        chunks = Chunks.of(counts, dict.fromkeys(counts, most))
        z = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), phi.dtype), problem.example)
        _, unravel_phi = ravel_pytree(
            problem.coordinates.of(problem.target_of(arrays), z)
        )
        functions = [of_chunk, jax.grad(of_chunk), jax.hessian(of_chunk)][:derivatives]

        def sums_of(i: Array) -> tuple[Array, ...]:
            template = unravel_phi, z, chunks
            return tuple(fn(phi, i, template, arrays) for fn in functions)

        zeros = [jnp.zeros((phi.size,) * k, phi.dtype) for k in range(derivatives)]
        return chunks.sum(sums_of, tuple(zeros))

    return problem.over_rows(sums)


def find_center(
    who: str,
    problem: Problem,
    starts: np.ndarray,
    taylor: Taylor,
    progress: Callable[[str], None],
) -> Center:
    """Find the mode that rows are expanded about.

    A quasi-Newton search on some rows, from several starts, then Newton steps with
    backtracking on all of them.

    :param who: the kernel's name, for the messages.
    :param problem: the target and its coordinates.
    :param starts: where to start from, shape ``(k, d)``.
    :param taylor: the control variate.
    :param progress: told what is being done.
    :raises ValueError: the search does not converge, or ends where the curvature is
        not that of a maximum.
    """
    identity = problem.coordinates.latents is None
    ridge = taylor.ridge if taylor.ridge is not None else (0.0 if identity else 1.0)
    weight = problem.weights.likelihood if identity else 1.0
    dim = starts.shape[1]
    if dim > _MAX_DIM:
        raise ValueError(
            f"{who}: control variates keep a Hessian of the {dim} coordinates of the "
            f"expansion, and are limited to {_MAX_DIM}. Choose fewer with "
            "control_variate.taylor2(sites=...), or sample at a temperature."
        )

    @jax.jit
    def known(arrays: list[Any], phi: Array) -> tuple[Array, Array, Array]:
        def fn(phi: Array) -> Array:
            own = problem.known(arrays, phi) if identity else jnp.zeros((), phi.dtype)
            return own - 0.5 * ridge * jnp.square(phi).sum()

        return fn(phi), jax.grad(fn)(phi), jax.hessian(fn)(phi)

    def objective(sums: Callable, phi: np.ndarray) -> list[np.ndarray]:
        """Minus the log density and its derivatives."""
        with double():
            point = jnp.asarray(phi, jnp.float64)
            rows = sums(point)
            other = known(problem.arrays, point)
            return [
                np.asarray(-(weight * np.asarray(r) + np.asarray(k)))
                for r, k in zip(rows, other, strict=False)
            ]

    with double():
        few = {n: min(size, _SUBSAMPLE) for n, size in problem.plates.items()}
        some = row_sums(problem, few, 2)
        all_rows = row_sums(problem, dict(problem.plates), 3)
    if taylor.center is not None:
        center = _given(who, problem, taylor.center.values)
        hessian = objective(all_rows, center)[2]
        if identity and not np.linalg.eigvalsh(hessian).min() > 0:
            raise ValueError(not_definite(who, np.linalg.eigvalsh(hessian).min()))
        return _at_center(all_rows, problem, center, 0.0)
    progress("mode of some rows")
    found = []
    from scipy.optimize import minimize  # here because it takes long to import

    for start in starts:
        result = minimize(
            lambda phi: tuple(objective(some, phi)),
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 1000, "maxfun": 3000},
        )
        found.append(result)
    best = min(found, key=lambda r: r.fun if np.isfinite(r.fun) else np.inf)
    if not np.isfinite(best.fun):
        raise ValueError(
            f"{who}: the log density is not finite where the search for the centre of "
            "the control variate went. Pass a centre, control_variate.taylor2(center="
            "{site: unconstrained value}), or bound the parameters by their priors."
        )
    progress("mode of all rows")
    center, hessian = _newton(who, lambda phi: objective(all_rows, phi), best.x)
    root = np.linalg.cholesky(hessian)
    others = [np.linalg.norm(root.T @ (r.x - best.x)) for r in found]
    # a worse optimum matters where its density is not negligible
    near = [
        r.fun < best.fun + 20.0 * max(problem.plates.values()) / _SUBSAMPLE + 20.0
        for r in found
    ]
    scatter = np.sqrt(dim * max(1.0, max(problem.plates.values()) / _SUBSAMPLE))
    far = [d for d, n in zip(others, near, strict=True) if n and d > 5 * scatter]
    return _at_center(all_rows, problem, center, float(max(far, default=0.0)))


def _at_center(
    all_rows: Callable, problem: Problem, center: np.ndarray, other_mode: float
) -> Center:
    with double():
        found = all_rows(jnp.asarray(center, jnp.float64))
        value, gradient, hessian = map(np.asarray, found)
    return Center(center, gradient, hessian, value, float(other_mode))


def _given(who: str, problem: Problem, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The centre that the user gave, flat."""
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x)), problem.example)
    target = problem.target_of(problem.arrays)
    shapes = jax.eval_shape(lambda z: problem.coordinates.of(target, z), zeros)
    wanted = {n: s.shape for n, s in shapes.items()} if isinstance(shapes, dict) else {}
    got = {name: value.shape for name, value in values.items()}
    if wanted != got:
        raise ValueError(
            f"{who}: control_variate.taylor2(center=...) must give unconstrained "
            f"values of these sites and shapes: {wanted}, got {got}."
        )
    parts = [np.ravel(values[name]).astype(np.float64) for name in sorted(values)]
    return np.concatenate(parts)


def _newton(
    who: str, objective: Callable, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method with backtracking; the optimum and the Hessian there.

    Directions of negative curvature are followed as if it were positive, so that a
    saddle is left and not taken for the optimum.
    """
    last: dict[bytes, list[np.ndarray]] = {}

    def at(x: np.ndarray) -> list[np.ndarray]:
        key = x.tobytes()
        if key not in last:
            last.clear()
            last[key] = objective(x)
        return last[key]

    value, gradient, hessian = at(start)
    scale = np.sqrt(np.maximum(np.diag(hessian), 1e-12 * np.abs(hessian).max() + 1e-12))
    for _ in range(50):
        value, gradient, hessian = at(start)
        white = hessian / np.outer(scale, scale)
        eigenvalues, vectors = np.linalg.eigh(white)
        floor = 1e-8 * max(eigenvalues.max(), 1.0)
        slope = vectors.T @ (gradient / scale)
        step = -vectors @ (slope / np.maximum(np.abs(eigenvalues), floor)) / scale
        decrement = -gradient @ step
        # 1e-8: a ten-thousandth of a posterior standard deviation
        if decrement < 1e-8:
            if eigenvalues.min() <= floor:
                raise ValueError(not_definite(who, eigenvalues.min()))
            return start, hessian
        shrink = 1.0
        while shrink > 1e-6:
            trial = start + shrink * step
            new = at(trial)[0]
            if np.isfinite(new) and new <= value - 1e-4 * shrink * decrement:
                break
            # the last digits of a sum over many rows decide nothing
            if np.isfinite(new) and decrement < 1e-9 * abs(value):
                break
            shrink /= 2.0
        else:
            break
        start = trial
    raise ValueError(
        f"{who}: the search for the centre of the control variate did not converge "
        f"(Newton decrement {decrement:.2g}). Standardise the data, or pass a centre: "
        "control_variate.taylor2(center={site: unconstrained value})."
    )


def not_definite(who: str, smallest: float) -> str:
    """What to say where the density to sample has no Laplace approximation."""
    return (
        f"{who}: at the centre of the expansion the curvature of the log density is "
        f"not that of a maximum (smallest eigenvalue {smallest:.2g}): the data and the "
        "prior do not determine some combination of the parameters, or the centre is "
        "far from the mode. Give the parameters proper priors; where sites= of a "
        "hierarchical model are expanded, leave ridge= positive."
    )
