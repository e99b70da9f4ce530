"""What a set-up starts from: the data, the user's choices, the kernel's needs.

Each stage of a set-up is a function of these values and of what earlier stages
returned; none of them changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
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
from numpyro_minibatch.batch import Scheme, permute
from numpyro_minibatch.control_variate._expand import Coordinates
from numpyro_minibatch.control_variate._taylor import Taylor
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.target import Target

__all__ = ["Chosen", "Needs", "Problem", "Refused", "double", "row_sums"]


class Refused(ValueError):
    """A control variate is of no use here; the message says why and what to do.

    A stage leaves the kernel's name to
    :func:`~numpyro_minibatch.control_variate._setup.prepare`.
    """


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


class Chosen(NamedTuple):
    """What the user chose.

    :param taylor: the control variate.
    :param scheme: how rows are drawn.
    :param sizes: rows of a batch, by plate; ``None`` where the pilot is to choose.
    """

    taylor: Taylor
    scheme: Scheme
    sizes: Mapping[str, int | None]


class Needs(NamedTuple):
    """What a kernel needs of a control variate.

    :param smallest: rows of a batch for the pilot to try first.
    :param follows: whether moves follow the surrogate, so that what it knows pays.
    """

    smallest: int
    follows: bool = False


@dataclass(frozen=True, eq=False)
class Problem:
    """A target whose arrays are handed over, and its plates.

    :param target_of: the target with these arrays as its data.
    :param arrays: the data, in working precision.
    :param plates: the number of rows of each data plate.
    :param weights: the powers of the prior and of the likelihood.
    :param example: a position, for its structure and shapes.
    :param coordinates: what the rows are expanded in; by default the position.
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
    coordinates: Coordinates = Coordinates()
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

    def compiled(self, fn: Callable) -> Callable:
        """A function of this problem, compiled once for all who ask.

        :param fn: a function of a module, ``fn(problem, arrays, ...)``.
        :return: a function of what follows ``arrays``.
        """
        if fn not in self._programs:
            self._programs[fn] = jax.jit(partial(fn, self))
        return partial(self._programs[fn], self.arrays)

    @cached_property
    def _programs(self) -> dict[Callable, Callable]:
        return {}

    @property
    def one_row(self) -> dict[str, Array]:
        """One row of each plate: enough for everything that is not a row."""
        return {name: jnp.zeros(1, jnp.int32) for name in self.plates}

    @property
    def in_own_coordinates(self) -> bool:
        """Whether the rows are expanded in the position itself."""
        return self.coordinates.latents is None

    @property
    def likelihood_weight(self) -> np.ndarray:
        """The power of the likelihood, as a number of the host."""
        return np.asarray(self.weights.likelihood, float)

    def known(self, arrays: list[Any], flat: Array) -> Array:
        """The weighted log density of all but the rows."""
        terms = self.target_of(arrays).terms(self.unravel(flat), self.one_row)
        return self.weights.known(terms)

    def phi_of(self, arrays: list[Any], flat: Array) -> Any:
        """The coordinates of the expansion at a flat position."""
        return self.coordinates.of(self.target_of(arrays), self.unravel(flat))


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
