"""The rows of a marginalized model at given values of its parameters, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array

from numpyro_minibatch._internal.checks import describe
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch._model.replay import Program
from numpyro_minibatch.marginal._chain import ChainRows
from numpyro_minibatch.marginal._draw import draw_latents
from numpyro_minibatch.marginal._model import Rows, RowsMarginalized
from numpyro_minibatch.marginal._sites import Level, indexable, run_hidden
from numpyro_minibatch.target import ModelTarget, with_bound_arguments

__all__ = ["Looker", "RowsAt", "check_marginalized"]

_MARK = "_marginal_"  # prefix of the sites that hold the results of ``look``
# evaluations of a row that draw its continuous sites, by the number of dimensions
_DRAW = {0: 64, 1: 193, 2: 1000, 3: 1000}
_MOST_EVALUATIONS = 4_000_000  # row likelihoods in memory at one time


def check_marginalized(who: str, model: Any) -> None:
    """Raise unless ``model`` comes from :func:`marginalize`."""
    if not isinstance(model, RowsMarginalized):
        raise TypeError(
            f"{who} needs a marginalized model, the value of marginalize(model), got "
            f"{describe(model)}."
        )


@dataclass(frozen=True)
class _Visit:
    """A model that draws the latent sites of its rows and applies a function to them.

    :param model: the marginalized model.
    :param look: ``look(rows, values, probabilities)``, a dict of arrays.
    :param key: PRNG key of the draw.
    :param plate: the plate of the rows.
    :param places: the indices of its rows.
    """

    model: RowsMarginalized
    look: Callable[[Rows | ChainRows, Any, Any], dict[str, Array]]
    key: Array
    plate: str
    places: Array

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the model, the outermost plates first."""
        args, kwargs = jax.tree.map(indexable, (args, kwargs))
        models = self.model.chain(args, kwargs)
        rows: Rows | ChainRows
        drawn: dict[str, Array] = {}
        known: dict[str, Any] = {}
        for k, model in enumerate(reversed(models)):
            seen = model.observer()
            if k == 0:  # handlers see the parameters once
                seen(*args, **kwargs)
            else:
                run_hidden(seen, args, kwargs, known)
            known = {**known, **seen.globals}
            if self.plate not in model.level.plates:  # other rows
                continue
            rows = model.rows(seen, args, kwargs)
            keys = self._keys(rows, k)
            if isinstance(rows, ChainRows):  # no other level depends on its states
                values, probabilities = rows.draw(keys)
            else:
                values, probabilities = draw_latents(rows, keys)
                for name, fn in rows.fns.items():
                    known[name] = values[name].reshape(fn.shape())
            shown = model.level.written
            values = {name: values[name] for name in shown}
            probabilities = {n: p for n, p in probabilities.items() if n in shown}
            axis = model.level.plates.index(self.plate)
            found = self.look(rows, values, probabilities)
            drawn |= {name: jnp.moveaxis(x, axis, 0) for name, x in found.items()}
        for name, value in drawn.items():
            numpyro.deterministic(f"{_MARK}{name}", value)

    def _keys(self, rows: Rows | ChainRows, level: int) -> Array:
        """A key for each row, independent of its chunk."""
        key = jax.random.fold_in(self.key, level)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(self.places)
        axis = rows.model.level.plates.index(self.plate)
        inner = rows.shape[:axis] + rows.shape[axis + 1 :]
        if inner:
            number = int(np.prod(inner, dtype=int))
            keys = jax.vmap(lambda k: jax.random.split(k, number))(keys)
        return jnp.moveaxis(keys.reshape(-1, *inner), 0, axis)


@dataclass(frozen=True)
class RowsAt:
    """The rows of a marginalized model with its arguments.

    :param model: the marginalized model.
    :param target: the same with its arguments.
    :param levels: what is integrated out of these rows, the innermost plates first.
    :param plate: the plate of the rows.
    :param sites: the plates of each site that is integrated out, by name.
    :param latents: the parameters.
    :param cost: the number of evaluations of a row's likelihood per draw.
    """

    model: RowsMarginalized
    target: ModelTarget
    levels: tuple[Level, ...]
    plate: str
    sites: Mapping[str, tuple[str, ...]]
    latents: tuple[str, ...]
    cost: int

    @classmethod
    def each(
        cls, who: str, model: RowsMarginalized, args: tuple, kwargs: Mapping[str, Any]
    ) -> list[RowsAt]:
        """The rows of each plate of a model, the outermost ones only.

        :raises ValueError: it observes nothing, or its rows cannot be read in chunks.
        """
        model, args, kwargs = with_bound_arguments(model, args, kwargs)
        plain = jax.tree.map(indexable, (args, dict(kwargs)))
        levels = model.levels(*plain)
        if not levels:
            raise ValueError(
                f"{who}: with these arguments the model observes nothing. Pass the "
                "data as well, as in mcmc.run(key, X, y)."
            )
        return [
            cls._of(who, model, args, kwargs, some) for some in _separate(list(levels))
        ]

    @classmethod
    def _of(
        cls,
        who: str,
        model: RowsMarginalized,
        args: tuple,
        kwargs: Mapping[str, Any],
        levels: list[Level],
    ) -> RowsAt:
        """The rows of levels that share a plate."""
        common = [
            plate
            for plate in levels[-1].plates
            if all(plate in level.plates for level in levels)
        ]
        if not common:
            names = ", ".join(
                map(repr, sorted({p for lv in levels for p in lv.plates}))
            )
            raise ValueError(
                f"{who} reads the rows of one plate, and the latent sites of this "
                f"model are in several: {names}. Marginalize the sites of one of them."
            )
        for plate in common:
            try:
                layout, frozen = inspect_model(
                    who, model, args, kwargs, {plate: 2}, sampled=False
                )
                break
            except ValueError:  # the indices of another plate select its data
                if plate == common[-1]:
                    raise
        target = ModelTarget(
            model=model,
            args=args,
            kwargs=dict(kwargs),
            sizes=dict(layout.plates),
            frozen=frozen,
            slices=layout.slices,
            by_row=layout.by_row,
        )
        cost = chains = 1
        for level in levels:
            if level.chain is not None:  # in each evaluation of the other levels
                chains *= level.states
                continue
            d = level.dimensions
            nodes = (model.num_nodes or level.nodes) ** d
            cost = max(cost, level.states * max(nodes, _DRAW[d]))
        cost *= chains
        sites = {
            name: (plate, *(p for p in level.plates if p != plate))
            for level in levels
            for name in level.written
        }
        return cls(model, target, tuple(levels), plate, sites, layout.latents, cost)

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.target.sizes[self.plate]

    def most_rows(self, rows: int) -> int:
        """The number of so many rows that are computed together."""
        return min(rows, max(1, _MOST_EVALUATIONS // self.cost))

    def most_draws(self, rows: int) -> int:
        """The number of draws that are computed together for so many rows."""
        return max(1, _MOST_EVALUATIONS // self.most_rows(rows))

    def looker(
        self,
        key: Array,
        look: Callable[[Rows | ChainRows, Any, Any], dict[str, Array]],
        width: int | None = None,
        height: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Looker:
        """A function of draws of the parameters and of the indices of rows.

        :param key: PRNG key.
        :param look: ``look(rows, values, probabilities)``, arrays with the rows first.
        :param width: the number of rows in a chunk; by default as many as fit.
        :param height: the number of draws in a chunk; by default as many as fit.
        :param options: those of the compiler.
        """
        few = {n: jnp.zeros(1, jnp.int32) for n in self.target.sizes}

        def chunk(target: ModelTarget, draws: Any, numbers: Any, rows: Any) -> Any:
            def one(draw: Any, number: Array) -> dict[str, Array]:
                of_draw = jax.random.fold_in(key, number)
                visit = _Visit(self.model, look, of_draw, self.plate, rows)
                trace = replace(target, model=visit).trace(
                    few | {self.plate: rows}, data=draw
                )
                return {
                    name: site["value"]
                    for name, site in trace.items()
                    if site["type"] == "deterministic" and name.startswith(_MARK)
                }

            return jax.lax.map(lambda x: one(*x), (draws, numbers))

        return Looker(self, Program(self.target, chunk, options), width, height)


class Looker(NamedTuple):
    """What :meth:`RowsAt.looker` returns; compiled once for each size of its chunks.

    :param at: the rows.
    :param program: the results for a chunk of draws and rows.
    :param width: the number of rows in a chunk, ``None`` for as many as fit.
    :param height: the number of draws in a chunk, ``None`` for as many as fit.
    """

    at: RowsAt
    program: Program
    width: int | None
    height: int | None

    def ahead(self, draws: Mapping[str, Any], rows: np.ndarray) -> None:
        """Compile the program on another thread.

        :param draws: values of the parameters as those of the call.
        :param rows: as many indices of rows.
        """
        _, _, inputs = next(self._chunks(draws, rows, 0))
        self.program.ahead(*inputs)

    def __call__(
        self, draws: Mapping[str, Any], rows: np.ndarray, first: int = 0
    ) -> dict[str, np.ndarray]:
        """Arrays of shape ``(draws, rows) + ...``, with other plates after the rows.

        :param draws: values of the parameters, along a first axis.
        :param rows: indices of rows.
        :param first: the number of the first of the draws, which decides its key.
        """
        count = len(next(iter(draws.values())))
        out: dict[str, np.ndarray] = {}
        for top, left, inputs in self._chunks(draws, rows, first):
            for marked, value in self.program(*inputs).items():
                name, value = marked.removeprefix(_MARK), np.asarray(value)
                if name not in out:
                    shape = (count, len(rows), *value.shape[2:])
                    out[name] = np.empty(shape, value.dtype)
                height, width = value.shape[:2]
                part = out[name][top : top + height, left : left + width]
                part[:] = value[: part.shape[0], : part.shape[1]]
        return out

    def _chunks(
        self, draws: Mapping[str, Any], rows: np.ndarray, first: int
    ) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """The first draw and row of each chunk, and the arguments of the program."""
        draws = {name: np.asarray(draws[name]) for name in self.at.latents}
        count = len(next(iter(draws.values())))
        width = self.width or self.at.most_rows(len(rows))
        height = self.height or min(count, self.at.most_draws(width))
        for top in range(0, count, height):
            # the last chunks repeat a draw or a row, so that all have one shape and
            # compile once
            which = np.minimum(np.arange(top, top + height), count - 1)
            some = {name: x[which] for name, x in draws.items()}
            for left in range(0, len(rows), width):
                place = np.minimum(np.arange(left, left + width), len(rows) - 1)
                indices = jax.device_put((first + which, rows[place]))
                yield top, left, (some, *indices)


def _separate(levels: list[Level]) -> list[list[Level]]:
    """Levels in parts that share no plate, such as those of buckets of groups."""
    parts: list[list[Level]] = []
    for level in levels:
        plates = set(level.plates)
        linked = [part for part in parts if any(plates & set(x.plates) for x in part)]
        rest = [part for part in parts if part not in linked]
        parts = [*rest, [*(x for part in linked for x in part), level]]
    return parts
