"""The error of the quadrature, measured against finer nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_minibatch._internal.checks import check_count, check_positive
from numpyro_minibatch._internal.precision import double
from numpyro_minibatch.marginal._chain import ChainRows
from numpyro_minibatch.marginal._model import Rows, RowsMarginalized
from numpyro_minibatch.marginal._quadrature import (
    NODES,
    log_integral,
    log_integrals,
    log_sum_exp,
)
from numpyro_minibatch.marginal._recover import chosen_rows, values_of
from numpyro_minibatch.marginal._visit import RowsAt, check_marginalized

__all__ = ["ADVISED", "QuadratureError", "quadrature_error", "set_up_error"]

_TRIED = {1: (7, 11, 15, 21, 31), 2: (5, 7, 9, 13, 17), 3: (5, 7, 9, 11)}
_FINE = {1: 61, 2: 31, 3: 15}
_MOST_ROWS = 20_000
# in the set-up of a kernel, with fewer nodes, rows and evaluations of row likelihoods
_FINE_SETUP = {1: 61, 2: 21, 3: 13}
_MOST_SETUP_ROWS, _MOST_SETUP = 2_000, 8_000_000
REFUSED = 0.5  # limit of ``spread``: the error of means in posterior sds
ADVISED = 0.05
_WIDE = 2.5  # factor on the spread of the nodes in a second check


class QuadratureError(NamedTuple):
    """The errors of a marginalized model's quadrature, on the log scale.

    :param largest: the largest error of the log likelihood of a row, over the checked
        rows and draws.
    :param spread: the standard deviation over the draws of the summed error of all
        rows. A constant error would cancel in log ratios between posterior draws. To
        first order, a posterior mean is off by at most this many posterior standard
        deviations.
    :param row: the row with the largest error.
    :param by_nodes: the largest error by the number of nodes of each dimension.
    :param num_nodes: the smallest of these numbers of nodes with an error below
        ``tolerance``; ``None`` if there is none.
    :param elsewhere: the largest difference in a row's log likelihood between the
        finest nodes and nodes that are spread 2.5 times as wide. It is large if the
        nodes at the mode miss a second mode or a heavy tail.
    :param unconverged: the number of pairs of row and draw for which the search did not
        converge to a mode.
    :param tolerance: the requested error.
    :param spread_by_nodes: ``spread`` by the number of nodes of each dimension.
    :param spread_elsewhere: ``spread`` of the difference from the wider nodes.
    """

    largest: float
    spread: float
    row: int
    by_nodes: dict[int, float]
    num_nodes: int | None
    elsewhere: float
    unconverged: int
    tolerance: float
    spread_by_nodes: dict[int, float]
    spread_elsewhere: float

    def __str__(self) -> str:
        lines = [
            f"quadrature error of a row's log likelihood: {self.largest:.1e} at most "
            f"(row {self.row}); standard deviation of the sum over rows between draws: "
            f"{self.spread:.1e}",
            "by number of nodes: "
            + ", ".join(f"{n}: {e:.1e}" for n, e in self.by_nodes.items()),
        ]
        if self.num_nodes is not None:
            lines.append(
                f"below {self.tolerance:.0e}: marginalize(model, num_nodes="
                f"{self.num_nodes})"
            )
        else:
            lines.append(
                f"no number of nodes that was tried is below {self.tolerance:.0e}"
            )
        if self.elsewhere > 10 * self.tolerance:
            lines.append(
                f"nodes spread wider find a difference of {self.elsewhere:.1e}: the "
                "density of a row has a second mode or a heavy tail"
            )
        if self.unconverged:
            lines.append(f"the search found no mode in {self.unconverged} cases")
        return "\n".join(lines)


def quadrature_error(
    model: RowsMarginalized,
    idata: Any,
    *args: Any,
    rows: Any = None,
    num_draws: int = 16,
    tolerance: float = 1e-4,
    **kwargs: Any,
) -> QuadratureError:
    """Measure the error of a marginalized model's quadrature at draws of a run.

    The log likelihood of each row is compared with its value by finer nodes (61 in one
    dimension, 31 per dimension in two, 15 in three). It is also compared with its value
    by nodes that are spread wider, which find a second mode that the first ones miss.

    :param model: what :func:`marginalize` returned, with continuous sites.
    :param idata: a run of it, as ``to_inference_data`` returned it.
    :param args: the arguments of the model, with the data.
    :param rows: indices of the rows to check. Default: all rows, or 20,000 evenly
        spaced ones if there are more.
    :param num_draws: the number of draws to check, evenly spaced.
    :param tolerance: the largest acceptable error of a row.
    :param kwargs: keyword arguments of the model.
    :raises TypeError: ``model`` is not marginalized.
    :raises ValueError: it has no continuous site, or other arguments are out of range.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp, xarray as xr
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_minibatch import marginalize
        >>> from numpyro_minibatch.marginal import quadrature_error
        >>> def model(y):
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        ...     with numpyro.plate("data", len(y)) as idx:
        ...         a = numpyro.sample("a", dist.Normal(0.0, tau))
        ...         numpyro.sample("y", dist.Bernoulli(logits=a), obs=y[idx])
        >>> draws = xr.Dataset({"tau": (("chain", "draw"), [[0.5, 1.5]])})
        >>> idata = xr.DataTree.from_dict({"posterior": draws})
        >>> found = quadrature_error(marginalize(model), idata, jnp.array([0.0, 1.0]))
        >>> found.largest < 1e-4, found.num_nodes
        (True, 7)
    """
    who = "quadrature_error"
    check_marginalized(who, model)
    check_count(who, "num_draws", num_draws)
    check_positive(who, "tolerance", tolerance)
    at = RowsAt.of(who, model, args, kwargs)
    d = at.level.dimensions
    if not d:
        raise ValueError(
            f"{who}: the discrete sites {', '.join(map(repr, at.level.names))} are "
            "summed exactly, so there is no quadrature."
        )
    numbers = chosen_rows(who, rows, at.size, at.plate)
    if rows is None and len(numbers) > _MOST_ROWS:
        numbers = numbers[np.linspace(0, len(numbers) - 1, _MOST_ROWS).astype(int)]
    draws, _ = values_of(who, idata, at)
    count = len(next(iter(draws.values())))
    which = np.unique(np.linspace(0, count - 1, min(num_draws, count)).astype(int))
    own = model.num_nodes
    tried = sorted({*_TRIED[d], *([own] if own else [])})
    some = {name: x[which] for name, x in draws.items()}
    return _measured(at, some, numbers, tried, _FINE[d], tolerance)


def set_up_error(
    model: RowsMarginalized, draws: Mapping[str, Any], args: tuple, kwargs: Any
) -> dict[str, float]:
    """The error of the quadrature for a kernel's set-up, in double precision.

    :param model: the marginalized model.
    :param draws: constrained values of the parameters, along a first axis.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :raises ValueError: the error shifts the posterior too far, and the user chose the
        number of nodes.
    """
    at = RowsAt.of("marginalize", model, args, kwargs)
    d = at.level.dimensions
    if not d:
        return {}
    count = len(next(iter(draws.values())))
    own = model.num_nodes or NODES[d]
    fine = max(_FINE_SETUP[d], own + 2)
    tried = [own, *(n for n in _TRIED[d] if own < n < fine)]
    states = int(np.prod([s.size for s in at.level.sites if s.discrete], dtype=int))
    nodes = states * (sum(n**d for n in tried) + 2 * fine**d)
    most = max(50, min(_MOST_SETUP_ROWS, _MOST_SETUP // (nodes * count)))
    numbers = np.arange(at.size)
    if at.size > most:
        numbers = np.linspace(0, at.size - 1, most).astype(int)
    with double():
        found = _measured(at, draws, numbers, tried, fine, 1e-4)
    enough = [n for n, s in found.spread_by_nodes.items() if s < ADVISED]
    better = min((n for n in enough if n > own), default=fine)
    # a default number of nodes is increased instead; see `Marginalized.refined`
    if found.spread > REFUSED and model.num_nodes is not None:
        raise ValueError(
            f"the quadrature of the rows of plate {at.plate!r} is too coarse: between "
            f"posterior draws its error changes the log density by {found.spread:.2g} "
            f"(standard deviation; {REFUSED:g} is the limit), most of all in row "
            f"{found.row}. Write marginalize(model, num_nodes={better})"
            + (
                "."
                if enough
                else ", and if that is refused as well, sample the model with its "
                "latent sites, by NumPyro's NUTS."
            )
        )
    return {
        "quadrature_sd": found.spread,
        "quadrature_sd_elsewhere": found.spread_elsewhere,
        "quadrature_error": found.largest,
        "quadrature_nodes": own,
        "quadrature_better_nodes": better,
    }


def _measured(
    at: RowsAt,
    draws: Mapping[str, Any],
    numbers: np.ndarray,
    tried: list[int],
    fine: int,
    tolerance: float,
) -> QuadratureError:
    """Compare quadrature rules with a finer rule, and that with a wider one."""
    names, count = at.level.names, len(next(iter(draws.values())))
    found = at(
        draws,
        numbers,
        jax.random.key(0),
        lambda rows, values, probabilities: _look(rows, tried, fine, names),
    )
    exact = found["fine"].astype(np.float64)
    off = {n: found[f"nodes {n}"] - exact for n in tried}
    used = at.model.num_nodes or int(found["used"].flat[0])

    def spread(errors: np.ndarray) -> float:
        sums = errors.reshape(count, -1).sum(1)
        return float(sums.std()) * at.size / len(numbers)

    by_nodes = {n: float(np.abs(e).max()) for n, e in off.items()}
    worst = np.abs(off[used]).reshape(count, len(numbers), -1).max((0, 2))
    enough = [n for n in tried if max(by_nodes[m] for m in tried if m >= n) < tolerance]
    wider = found["wide"] - exact
    return QuadratureError(
        largest=by_nodes[used],
        spread=spread(off[used]),
        row=int(numbers[worst.argmax()]),
        by_nodes=by_nodes,
        num_nodes=min(enough, default=None),
        elsewhere=float(np.abs(wider).max()),
        unconverged=int((~found["converged"]).sum()),
        tolerance=tolerance,
        spread_by_nodes={n: spread(e) for n, e in off.items()},
        spread_elsewhere=spread(wider),
    )


def _look(
    rows: Rows | ChainRows, tried: list[int], fine: int, names: tuple[str, ...]
) -> dict[str, Array]:
    """Log likelihoods of the rows of the outermost plate by several rules."""
    if isinstance(rows, ChainRows) or rows.model.level.names != names:
        return {}
    d = rows.model.level.dimensions

    def one(state: Array) -> dict[str, Array]:
        density = rows.density(state)
        place = rows.place(density)
        wide = place._replace(
            spread=_WIDE * place.spread, log_det=place.log_det + d * np.log(_WIDE)
        )
        values = log_integrals(density, place, [*tried, fine])
        found = {f"nodes {n}": x for n, x in zip(tried, values, strict=False)}
        found["fine"] = values[-1]
        found["wide"] = log_integral(density, wide, fine)
        found["converged"] = place.converged
        return found

    by_state = jax.vmap(one)(jnp.asarray(rows.states))
    out = {name: log_sum_exp(x) for name, x in by_state.items() if name != "converged"}
    out["converged"] = jnp.all(by_state["converged"], 0)
    out["used"] = jnp.full(rows.shape, rows.num_nodes)
    return out
