"""The inputs of a set-up: the data, the user's choices, the kernel's needs.

Each stage of a set-up is a function of these values and of what earlier stages
returned; none of them changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from numpyro_minibatch._internal import passes
from numpyro_minibatch._internal.precision import double
from numpyro_minibatch._internal.threads import compilers
from numpyro_minibatch._internal.xla import older_emitters
from numpyro_minibatch.batch import Scheme
from numpyro_minibatch.control_variate._expand import Coordinates
from numpyro_minibatch.control_variate._taylor import Taylor
from numpyro_minibatch.estimate import Weights
from numpyro_minibatch.target import ModelTarget, Target, without_integrals

__all__ = [
    "Better",
    "Chosen",
    "HeavyTails",
    "Needs",
    "NeverFinite",
    "NoExpansion",
    "NotDefinite",
    "Imprecise",
    "Kinks",
    "NoCenter",
    "PriorKinks",
    "Problem",
    "Program",
    "Refused",
    "Rounded",
    "TooCoarse",
    "double",
    "known_hessian",
]


class Refused(ValueError):
    """The control variate cannot be used; the message gives the reason and a remedy.

    :func:`~numpyro_minibatch.control_variate._setup.prepare` adds the kernel's name.
    """


class NoExpansion(Refused):
    """The model may be sampled, but not by an expansion of its likelihood.

    The kernel adds the samplers that need none.
    """


class HeavyTails(NoExpansion):
    """Draws of the surrogate are so far out that its expansion means nothing there."""


class Imprecise(NoExpansion):
    """Single precision does not suffice for the data."""


class Rounded(Imprecise):
    """Stored polynomials of rows round more than those that are derived would."""


class NeverFinite(Refused):
    """The log likelihood of some rows is finite at no position that was tried."""


class NotDefinite(Refused):
    """The density to sample has no Laplace approximation where a search ended.

    :param message: the reason.
    :param at: where the search ended, if a user does not see the error yet.
    :param along: the direction of the smallest eigenvalue of the curvature.
    :param in_sites: whether both are flat positions, not coordinates of the expansion.
    """

    def __init__(
        self, message: str, at: Any = None, along: Any = None, in_sites: bool = False
    ) -> None:
        super().__init__(message)
        self.at, self.along, self.in_sites = at, along, in_sites

    @classmethod
    def of(
        cls, smallest: float, at: Any, along: Any, in_sites: bool = False
    ) -> NotDefinite:
        """The error for this smallest eigenvalue."""
        message = (
            "at the centre of the expansion the curvature of the log density is not "
            f"that of a maximum (smallest eigenvalue {smallest:.2g}): the data and the "
            "prior do not determine some combination of the parameters, or the centre "
            "is far from the mode. Give the parameters proper priors; where sites= of "
            "a hierarchical model are expanded, leave ridge= positive."
        )
        return cls(message, at, along, in_sites)


class NoCenter(NoExpansion):
    """The search for the mode did not converge."""


class Kinks(NoExpansion):
    """The search for the mode met kinks.

    :param message: the reason.
    :param start: where the search was, if a user does not see the error yet.
    :param step: the step along which they are.
    """

    def __init__(self, message: str, start: Any = None, step: Any = None) -> None:
        super().__init__(message)
        self.start = start
        self.step = step


class PriorKinks(Refused):
    """The kinks are those of the prior, which is not expanded."""


class TooCoarse(Exception):
    """The likelihood is an approximation, and a better one is to be expanded instead.

    :param better: the better one.
    :param near: a flat position in the middle of the posterior.
    :param others: what the searches saw of other modes, for the report.
    """

    def __init__(self, better: Any, near: np.ndarray, others: dict[str, float]) -> None:
        super().__init__("the approximation of the likelihood is too coarse")
        self.better, self.near, self.others = better, near, others


class Chosen(NamedTuple):
    """The choices of the user.

    :param taylor: the control variate.
    :param scheme: how rows are drawn.
    :param sizes: rows of a batch, by plate; ``None`` if the pilot chooses.
    :param start: the starting point of the first chain, or ``None``.
    """

    taylor: Taylor
    scheme: Scheme
    sizes: Mapping[str, int | None]
    start: Any = None


class Needs(NamedTuple):
    """The needs of a kernel with a control variate.

    :param smallest: the batch size that the pilot tries first.
    :param follows: whether moves follow the surrogate, so that an accurate one pays.
    """

    smallest: int
    follows: bool = False


class _Compiled:
    """A function for JAX to compile, with its compilations in progress."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        self.pending: list[Future] = []
        self.asked: set[Hashable] = set()


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled function of a problem's data and of other trees of arrays.

    :param compiled: the function.
    :param arrays: the data.
    """

    compiled: _Compiled
    arrays: list[Any]

    def __call__(self, *rest: Any) -> Any:
        """Call the function, after any compilation in progress has finished."""
        self._finish()
        return self.compiled.fn(self.arrays, *rest)

    def _finish(self) -> None:
        """Wait for any compilation in progress."""
        while self.compiled.pending:
            self.compiled.pending.pop().exception()

    def each(self, inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results for several arguments of the same shapes, on several threads.

        The threads call an executable. Contexts of JAX, such as that of the precision
        of products, belong to a thread: the function itself would be traced and
        compiled once more by another one.
        """
        self._finish()
        function: Any = self.compiled.fn
        executable = function.lower(self.arrays, *inputs[0]).compile()
        return list(
            compilers().map(lambda rest: executable(self.arrays, *rest), inputs)
        )

    def ahead(self, *rest: Any) -> None:
        """Compile the function for arguments of these shapes on another thread.

        The model is traced on the calling thread, because all threads share NumPyro's
        handlers.
        """
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(rest))
        if shapes in self.compiled.asked or not hasattr(self.compiled.fn, "lower"):
            return
        self.compiled.asked.add(shapes)
        lowered = self.compiled.fn.lower(self.arrays, *rest)
        self.compiled.pending.append(compilers().submit(lowered.compile))


class Better(Protocol):
    """A likelihood that is an approximation, for which there may be a better one."""

    def ahead(self, positions: Any) -> None:
        """Compile on other threads what the call needs.

        :param positions: any positions, with a leading axis.
        """
        ...

    def __call__(self, positions: Any) -> Any:
        """A better approximation if this one is too coarse, otherwise ``None``.

        :param positions: where it is to be good enough, with a leading axis.
        """
        ...


_PROGRAMS: OrderedDict[Hashable, dict[Hashable, _Compiled]] = OrderedDict()
_MOST_PROBLEMS = 8


@dataclass(frozen=True, eq=False)
class Problem:
    """A target with its data as explicit arrays, and its plates.

    :param target_of: the target with these arrays as its data.
    :param arrays: the data, in working precision.
    :param plates: the number of rows of each data plate.
    :param weights: the powers of the prior and of the likelihood.
    :param example: a position, for its structure and shapes.
    :param coordinates: the coordinates of the expansion; by default the position
        itself.
    :param dtype: the working precision.
    :param mesh: devices that share the passes over all rows; ``None`` for one.
    :param placed: the data on each of them.
    :param on_host: whether rows stay in host memory or in files.
    :param near: a flat position near the mode, known from another set-up, from which
        the search for the mode starts; ``None`` for several starts.
    :param better: if the likelihood is an approximation, what finds a better one.
    :param identity: a key for everything but the data, so that compiled programs are
        found again for other data of the same shapes; ``None`` if there is no such key.
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
    near: np.ndarray | None = None
    better: Better | None = None
    identity: Hashable = None

    def over_rows(self, fn: Callable, *static: Hashable) -> Program:
        """A function that makes passes over all rows, compiled once and then shared.

        :param fn: a function of a module, ``fn(problem, *static, arrays, ...)``.
        :param static: what else its program depends on.
        :return: a function of what follows ``arrays``.
        """
        arrays = self.arrays if self.placed is None else self.placed
        options = older_emitters() if self.row_size > 1 else None
        return Program(self._program(fn, static, self.mesh, options), arrays)

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

    def compiled(self, fn: Callable, *static: Hashable) -> Program:
        """A function of this problem, compiled once and then shared.

        :param fn: a function of a module, ``fn(problem, *static, arrays, ...)``.
        :param static: what else its program depends on.
        :return: a function of what follows ``arrays``.
        """
        return Program(self._program(fn, static, None), self.arrays)

    def once_over_rows(self, fn: Callable) -> Callable:
        """A function that makes passes over all rows, compiled for a single use.

        :param fn: a function of the data and of other trees of arrays.
        :return: a function of the others.
        """
        compiled = passes.shared(fn, self.mesh)
        arrays = self.arrays if self.placed is None else self.placed
        return lambda *rest: compiled(arrays, *rest)

    def _program(
        self,
        fn: Callable,
        static: tuple[Hashable, ...],
        mesh: Mesh | None,
        options: dict[str, Any] | None = None,
    ) -> _Compiled:
        key = fn, static, mesh
        if key not in self._programs:
            # without the data, which the stored program would keep in memory
            bare = replace(self, arrays=[], placed=None, near=None, better=None)
            shared = passes.shared(partial(fn, bare, *static), mesh, options)
            self._programs[key] = _Compiled(shared)
        return self._programs[key]

    @cached_property
    def _programs(self) -> dict[Hashable, _Compiled]:
        """The programs of this problem and of all that differ only in their data."""
        if self.identity is None:
            return {}
        key = self.identity, self.coordinates, self.dtype
        known = _PROGRAMS.setdefault(key, {})
        _PROGRAMS.move_to_end(key)
        while len(_PROGRAMS) > _MOST_PROBLEMS:
            _PROGRAMS.popitem(last=False)
        return known

    @property
    def one_row(self) -> dict[str, Array]:
        """One row of each plate, enough to evaluate everything but the rows."""
        # a NumPy array, so that nothing is compiled for it
        return {name: jax.device_put(np.zeros(1, np.int32)) for name in self.plates}

    @property
    def row_size(self) -> int:
        """About how many likelihoods the density of one row evaluates."""
        return self.target_of(self.arrays).row_size

    @property
    def in_own_coordinates(self) -> bool:
        """Whether the rows are expanded in the position itself."""
        return self.coordinates.latents is None

    @property
    def likelihood_weight(self) -> np.ndarray:
        """The power of the likelihood, as a NumPy number."""
        return np.asarray(self.weights.likelihood, float)

    def known(self, arrays: list[Any], flat: Array) -> Array:
        """The weighted log density of all but the rows."""
        with without_integrals():
            terms = self.target_of(arrays).terms(self.unravel(flat), self.one_row)
        return self.weights.known(terms)

    def phi_of(self, arrays: list[Any], flat: Array) -> Any:
        """The coordinates of the expansion at a flat position."""
        return self.coordinates.of(self.target_of(arrays), self.unravel(flat))

    def in_coordinates(self, positions: np.ndarray) -> np.ndarray:
        """The coordinates of the expansion at some flat positions, ``(K, d)``."""
        if self.in_own_coordinates:
            return np.asarray(positions, np.float64)
        with double():
            at = jnp.asarray(positions, jnp.float64)
            return np.asarray(self.compiled(_phi_of)(at))

    @cached_property
    def _angles(self) -> np.ndarray:
        """Which flat coordinates are named as ``CircularReparam`` names angles."""
        target = self.target_of(self.arrays)
        shapes = jax.eval_shape(lambda z: self.coordinates.of(target, z), self.example)
        if not isinstance(target, ModelTarget) or not isinstance(shapes, dict):
            return np.zeros(1, bool)
        angles = jax.eval_shape(target.deterministic, self.example)
        unwrapped = {f"{name}_unwrapped" for name in angles}
        flags = {n: np.full(shapes[n].shape, n in unwrapped) for n in sorted(shapes)}
        return np.concatenate([flag.ravel() for flag in flags.values()])

    def turned(self, phi: np.ndarray, to: np.ndarray) -> np.ndarray:
        """A position with its angles turned as near to those of another as possible.

        The result is the same object if none needs a turn.
        """
        turns = np.round((phi - to) / (2 * np.pi)) if self._angles.any() else 0.0
        turns = np.where(self._angles, turns, 0.0)
        return phi - 2 * np.pi * turns if turns.any() else phi


def _phi_of(problem: Problem, arrays: list[Any], positions: Array) -> Array:
    return jax.vmap(lambda z: ravel_pytree(problem.phi_of(arrays, z))[0])(positions)


def known_hessian(problem: Problem, arrays: list[Any], flat: Array) -> Array:
    """The Hessian of the weighted log density of all but the rows."""
    return jax.hessian(lambda flat: problem.known(arrays, flat))(flat)
