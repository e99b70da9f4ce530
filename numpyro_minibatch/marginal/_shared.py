"""A check that no row depends on the latent values of another one.

Where rows share latent values, as in ``u[group]``, the integral over all of them is no
product over the rows. The integral of each row by itself exists all the same, so that
nothing else would notice it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch._model.rowwise import trace_rows
from numpyro_minibatch._model.rowwise_rules import PLAIN, SAME, Fact, rows_of_plate
from numpyro_minibatch.marginal._sites import Level, run_hidden
from numpyro_minibatch.target import without_integrals

__all__ = ["check_not_shared", "is_proven"]

# Half of the rows get other values. A row that depends on one other row is noticed
# unless both are in the same half each time.
_HALVES = 6
_TOLERANCE = 1e-5  # relative, for rounding
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}  # it runs once


class Rows(Protocol):
    """Rows whose log density is a function of the values of their latent sites."""

    def blank(self) -> dict[str, Array]:
        """Zeros for :meth:`log_joint_of`."""

    def log_joint_of(self, values: Mapping[str, Array]) -> Array:
        """The log density of each row at values by site."""


class OneLevel(Protocol):
    """A model with one more level to integrate out."""

    @property
    def level(self) -> Level:
        """The sites and their plates."""

    def observer(self) -> Callable:
        """The model without the sites of its rows, to be run for :meth:`rows`."""

    def rows(self, seen: Any, args: tuple, kwargs: Mapping[str, Any]) -> Rows:
        """The rows of the model after a run."""


def _density(
    model: OneLevel, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Callable[[dict[str, Array]], Array], dict[str, Any]]:
    """The log density of each row at latent values, and their shapes by site."""

    def shapes() -> dict[str, Array]:
        seen = model.observer()
        run_hidden(seen, args, kwargs)
        return model.rows(seen, args, kwargs).blank()

    def log_joint(values: dict[str, Array]) -> Array:
        seen = model.observer()
        run_hidden(seen, args, kwargs)
        with without_integrals():  # of inner levels
            return model.rows(seen, args, kwargs).log_joint_of(values)

    return log_joint, jax.eval_shape(shapes)


def is_proven(model: OneLevel, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a model's computations prove that rows share no latent values.

    :param model: the model.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    """
    log_joint, shapes = _density(model, args, kwargs)
    closed = jax.make_jaxpr(log_joint)(shapes)
    rows = tuple(map(rows_of_plate, model.level.plates))
    facts: list[Fact] = []
    for var in closed.jaxpr.invars:
        others = len(var.aval.shape) - len(rows)
        chain = model.level.chain is not None  # steps come first
        facts.append((PLAIN,) * others + rows if chain else rows + (PLAIN,) * others)
    (found,) = trace_rows(closed, closed, facts)
    return found is not None and all(
        kind in (own, SAME) for kind, own in zip(found, rows, strict=True)
    )


def check_not_shared(model: OneLevel, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raise if rows change when the latent values of other rows do.

    :param model: the model.
    :param args: positional arguments of the model, with known values.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: with the site and a row.
    """
    log_joint, shapes = _density(model, args, kwargs)
    level, rng = model.level, np.random.default_rng(0)
    chain = level.chain is not None
    some = next(iter(shapes.values()))
    rows = some.shape[1:] if chain else some.shape[: len(level.plates)]
    count = int(np.prod(rows, dtype=int))
    if count < 2:
        return
    evaluate = full_precision(jax.jit(log_joint, compiler_options=_QUICKLY))
    sizes = {site.name: site.size for site in level.sites}
    halves = [rng.permutation(count) < count // 2 for _ in range(_HALVES)]

    def moved(values: dict[str, Any], names: list[str], which: np.ndarray) -> Any:
        new = dict(values)
        for name in names:
            x = values[name]
            at = which.reshape(rows + (1,) * (x.ndim - len(rows)))
            at = which.reshape(rows) if chain else at
            other = x + 1.0 if x.dtype.kind == "f" else (x + 1) % sizes[name]
            new[name] = np.where(at, other, x).astype(x.dtype)
        return new

    def changed(names: list[str]) -> int | None:
        """A row that changes with the values of these sites in other rows."""
        for half in halves:
            values = {
                name: rng.normal(0.0, 0.5, x.shape).astype(x.dtype)
                if jnp.issubdtype(x.dtype, jnp.floating)
                else rng.integers(sizes[name], size=x.shape).astype(x.dtype)
                for name, x in shapes.items()
            }
            before = np.asarray(evaluate(values), np.float64).ravel()
            for which in (half, ~half):
                after = evaluate(moved(values, names, which))
                after = np.asarray(after, np.float64).ravel()
                same = np.isclose(before, after, _TOLERANCE, _TOLERANCE, equal_nan=True)
                wrong = ~same & ~which
                if wrong.any():
                    return int(wrong.argmax())
        return None

    row = changed(list(level.names))
    if row is None:
        return
    # perhaps no site does it alone, as in a product of two
    alone = {name: changed([name]) for name in level.names}
    name, row = next(((n, k) for n, k in alone.items() if k is not None), ("", row))
    where = tuple(int(k) for k in np.unravel_index(row, rows))
    raise ValueError(_message(level, name or level.names[0], where))


def _message(level: Level, name: str, row: tuple[int, ...]) -> str:
    where = row[0] if len(row) == 1 else row
    plate = level.plates[-1]
    return (
        f"marginalize cannot integrate {name!r} out of each row of plate {plate!r}: "
        f"the log density of row {where} changes with the value of {name!r} in other "
        f"rows. Rows that share latent values, as in {name}[group], or that depend on "
        f"those of their neighbours, as in {name} + jnp.roll({name}, 1), have no "
        "marginal likelihood of their own. If a column of the data says which value a "
        f"row has, put {name!r} into a plate of the groups, with the rows of each "
        "group in an inner plate: numpyro_minibatch.by_group(group, *arrays) arranges "
        "the data. Otherwise sample the model with its latent sites, by NumPyro's NUTS."
    )
