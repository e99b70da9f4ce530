"""The contract of a target: a prior, and one log likelihood per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = [
    "TRACES_ROWS",
    "Indices",
    "Parts",
    "Position",
    "Target",
    "Terms",
    "integrates",
    "takes_highest",
    "traces_rows",
    "without_integrals",
]

Position = Any  # a pytree of unconstrained parameters; a dict for a model
Indices = Mapping[str, Array]


class Terms(NamedTuple):
    """The terms of the log density at one position, not yet summed.

    All but ``rows`` are pytrees of log densities. They are not summed, because a
    difference of two large float32 sums is less accurate than the sum of differences.

    :param prior: the latent sites, and factors outside the data plates.
    :param rows: for each data plate the log likelihood of each requested row, shape
        ``(len(indices),)``.
    :param likelihood: observed sites outside the data plates, which are part of the
        likelihood and are always read in full.
    :param volume: log determinants of the maps to the unconstrained coordinates,
        which are never tempered.
    """

    prior: Any
    rows: dict[str, Array]
    likelihood: Any = ()
    volume: Any = ()

    @property
    def known(self) -> Array:
        """The log density of all but the rows, a scalar."""
        parts = jax.tree.leaves((self.prior, self.likelihood, self.volume))
        return sum((jnp.sum(part) for part in parts), jnp.zeros(()))


class Parts(NamedTuple):
    """Log densities by site, to find the dependencies of each site.

    :param rows: for each site with rows the log likelihood of each of them.
    :param fixed: the log density of every other site.
    :param plates: the data plate of each site with rows.
    """

    rows: dict[str, Array]
    fixed: dict[str, Array]
    plates: dict[str, str]


# what a row has in place of its integral: nothing, or a density at some latent values
INSTEAD: ContextVar[str] = ContextVar("instead of integrals", default="")


@contextmanager
def without_integrals(highest: bool = False) -> Iterator[None]:
    """Trace marginalized models with one value of each row's latent variables.

    The rows then have the log density at that value instead of its integral. Their
    shapes and dependencies are the same. It is useful if only these matter and not the
    values of the rows, because the search for the mode and the quadrature are most of
    the program.

    :param highest: whether the value is the one with the highest density, of a few
        values and of all discrete states. It tells whether a row has a density at all.
    """
    token = INSTEAD.set("highest density" if highest else "density")
    try:
        yield
    finally:
        INSTEAD.reset(token)


def integrates() -> bool:
    """Whether marginalized models integrate, see :func:`without_integrals`."""
    return not INSTEAD.get()


def takes_highest() -> bool:
    """Whether :func:`without_integrals` asked for the highest density."""
    return INSTEAD.get() == "highest density"


TRACES_ROWS: ContextVar[bool] = ContextVar("traces rows", default=False)


def traces_rows() -> bool:
    """Whether a model is being run by a :class:`ModelTarget`, perhaps on some rows."""
    return TRACES_ROWS.get()


@dataclass(frozen=True)
class Target:
    """Two pure functions of an unconstrained position, and the number of rows.

    Written by hand, or built from a NumPyro model by the kernels.

    :param log_prior: ``log_prior(z)``, a scalar: the log density of the prior with
        respect to ``z`` itself, and everything else that is not a row.
    :param log_likelihood: ``log_likelihood(z, indices)``, the log likelihood of
        each of the rows ``indices`` (an int32 vector), shape ``(len(indices),)``.
        With several data plates ``indices`` is a dict ``{plate: vector}`` and so is
        the result.
    :param sizes: the number of rows; for several plates a dict ``{plate: rows}``.

    :raises ValueError: a size is not a positive integer.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import Target
        >>> y = jnp.array([0.5, 1.5, 1.0])
        >>> target = Target(
        ...     log_prior=lambda z: -0.5 * z**2,
        ...     log_likelihood=lambda z, i: -0.5 * (y[i] - z) ** 2,
        ...     sizes=3,
        ... )
        >>> terms = target.terms(jnp.array(1.0), {"data": jnp.array([0, 2])})
        >>> float(terms.known), terms.rows["data"].tolist()
        (-0.5, [-0.125, -0.0])
    """

    log_prior: Callable[[Position], Array]
    log_likelihood: Callable[[Position, Any], Any]
    sizes: int | Mapping[str, int]

    def __post_init__(self) -> None:
        if type(self) is Target and not self.plates:
            raise ValueError(
                "Target(sizes=...) must give the rows of at least one plate, got {}. "
                'Write sizes=1000, or sizes={"data": 1000}.'
            )
        for name, size in self.plates.items():
            if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"Target(sizes=...) must count the rows of plate {name!r} with a "
                    f"positive integer, got {size!r}."
                )

    def __hash__(self) -> int:
        plates = tuple(sorted(self.plates.items()))
        return hash((self.log_prior, self.log_likelihood, plates))

    @property
    def row_size(self) -> int:
        """The number of likelihood evaluations per row, by which chunks are smaller."""
        return 1

    @property
    def plates(self) -> dict[str, int]:
        """The number of rows of each data plate; one plate is called ``"data"``."""
        return (
            dict(self.sizes)
            if isinstance(self.sizes, Mapping)
            else {"data": self.sizes}
        )

    def constrain(self, z: Position) -> Any:
        """The values that a user reads at ``z``; here ``z`` itself."""
        return z

    def terms(self, z: Position, indices: Indices) -> Terms:
        """The prior and the log likelihood of the rows ``indices`` at ``z``."""
        if isinstance(self.sizes, Mapping):
            return Terms(self.log_prior(z), dict(self.log_likelihood(z, indices)))
        rows = self.log_likelihood(z, indices["data"])
        return Terms(self.log_prior(z), {"data": rows})

    def rows(
        self, z: Position, indices: Indices, values: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """The log likelihood of the rows ``indices`` at ``z``.

        :param values: values that deterministic sites of a model are set to.
        """
        return self.terms(z, indices).rows

    def by_site(self, z: Position, indices: Indices) -> Parts:
        """Log densities by site, or by plate for a target written by hand."""
        terms = self.terms(z, indices)
        plates = {name: name for name in terms.rows}
        return Parts(terms.rows, {"log_prior": terms.known}, plates)
