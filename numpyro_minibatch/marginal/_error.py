"""The error of the quadrature, measured against finer nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_minibatch._internal.checks import check_count, check_positive
from numpyro_minibatch._internal.precision import double, is_double
from numpyro_minibatch.marginal._model import RowsMarginalized
from numpyro_minibatch.marginal._recover import parameters_of, rows_of_plates
from numpyro_minibatch.marginal._rules import (
    ELSEWHERE,
    Look,
    QuadratureError,
    Rules,
    look_by,
    look_by_own,
    looks_of,
    rounded_spread,
    rules_of,
    summary,
    together,
    with_more_nodes,
)
from numpyro_minibatch.marginal._screen import Sample, Screen
from numpyro_minibatch.marginal._sites import Level
from numpyro_minibatch.marginal._visit import RowsAt, check_marginalized

__all__ = [
    "ACCURACY",
    "ADVISED",
    "MOST_NODES",
    "QuadratureError",
    "SetUpError",
    "quadrature_error",
]

ACCURACY = 1e-4  # of the log likelihood of a row
REFUSED = 0.5  # limit of ``spread``: the error of means in posterior sds
ADVISED = 0.05
# The same for second modes. Draws of a posterior without them may lie where they matter
# least: of a model with |x|, at means far from zero.
_SECOND_MODE = 0.1
MOST_NODES = 121  # that a user may ask for
_ELSEWHERE = 0.5  # log likelihood of a row that points elsewhere must add to refuse it

_NEARLY = 10.0  # times the accuracy that the finest reference is likely to reach

_TRIED = {
    1: (7, 11, 15, 21, 31, 45, 61),
    2: (5, 7, 9, 13, 17, 21, 25),
    3: (5, 7, 9, 11, 15),
}
_FINE = {1: 121, 2: 41, 3: 19}
_MOST_ROWS = 20_000
_FINE_SETUP = {1: 121, 2: 35, 3: 19}  # in the set-up of a kernel
# For rows where none of the above is accurate: further numbers of nodes, and that of
# their reference. With three numbers, these are up to 12,167 nodes and 29,791 of the
# reference, then 24,389 and 50,653: too many for models that do not need them.
_MORE: tuple[tuple[dict[int, tuple[int, ...]], dict[int, int]], ...] = (
    ({1: (), 2: (), 3: (15, 19, 23)}, {1: 121, 2: 41, 3: 31}),
    ({1: (), 2: (), 3: (29,)}, {1: 121, 2: 41, 3: 37}),
)


def quadrature_error(
    model: RowsMarginalized,
    idata: Any,
    *args: Any,
    rows: Any = None,
    num_draws: int = 16,
    tolerance: float = ACCURACY,
    **kwargs: Any,
) -> QuadratureError:
    """Measure the error of a marginalized model's quadrature at draws of a run.

    The log likelihood of each row is compared with its value by finer nodes (121 in one
    dimension, 41 per dimension in two, 19 in three, and 31 or 37 in three for rows
    where 15 are not accurate). It is also compared with its value by equally spaced
    points that extend further out, which find a second mode that the nodes miss. If
    continuous sites of inner plates are integrated out as well, their errors are
    measured at draws of the outer sites.

    :param model: what :func:`marginalize` returned, with continuous sites.
    :param idata: a run of it, as ``to_inference_data`` returned it.
    :param args: the arguments of the model, with the data.
    :param rows: indices of the rows to check. Default: all rows, or 20,000 if there
        are more: those where the model's nodes differ most from one finer rule, and a
        sample of the others.
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
    plates = RowsAt.each(who, model, args, kwargs)
    numbers = rows_of_plates(who, rows, plates)
    rules = [rules_of(at, _TRIED, _FINE) for at in plates]
    if not any(rules):
        names = [name for at in plates for name in at.sites]
        raise ValueError(
            f"{who}: the discrete sites {', '.join(map(repr, names))} are summed "
            "exactly, so there is no quadrature."
        )
    draws = parameters_of(who, idata, plates[0])
    chains, length = next(iter(draws.values())).shape[:2]
    count = chains * length
    which = np.unique(np.linspace(0, count - 1, min(num_draws, count)).astype(int))
    some = {
        name: np.stack([x[divmod(k, length)].to_numpy() for k in which.tolist()])
        for name, x in draws.items()
    }
    errors = []
    for at, rule in zip(plates, rules, strict=True):
        if not rule:
            continue
        those = numbers[at.plate]
        weights = np.full(len(those), at.size / len(those))
        if rows is None and at.size > _MOST_ROWS:
            those, weights, _ = Screen(at, rule).sample(some, _MOST_ROWS)
        found = at.looker(jax.random.key(0), look_by(rule))(some, those)
        used, found = _with_more(at, some, those, found, rule, tolerance)
        errors.append(summary(found, used, those, weights, tolerance))
    return together(errors)


class SetUpError:
    """The error of the quadrature for a kernel's set-up, in double precision.

    A set-up measures it early, to choose the number of nodes, and again at the end.
    Both use the same compiled program, which compares many numbers of nodes.

    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param accuracy: the largest acceptable error of a row.
    """

    def __init__(self, args: tuple, kwargs: Mapping[str, Any], accuracy: float) -> None:
        self._args, self._kwargs, self._accuracy = args, kwargs, accuracy
        self._compared: dict[Any, list[_Compared]] = {}
        self._screens: dict[Any, Screen] = {}

    def ahead(self, draws: Mapping[str, Any], model: RowsMarginalized) -> None:
        """Compile the programs of a measurement on other threads.

        :param draws: constrained values of the parameters, along a first axis; only
            their shapes and precisions matter.
        :param model: the marginalized model.
        """
        for compared in self._comparisons(model, draws):
            at, look, rules = compared.at, compared.look, compared.rules_for(model)
            with double():
                if at.size > look.most:
                    self._screen(at, rules).ahead(draws)
                look.at.ahead(draws, np.arange(min(look.most, at.size)))

    def __call__(
        self, draws: Mapping[str, Any], model: RowsMarginalized
    ) -> dict[str, float]:
        """Measure the error at some draws, on the rows where it is largest and others.

        See :class:`~numpyro_minibatch.marginal._screen.Screen` for the choice of rows.

        :param draws: constrained values of the parameters, along a first axis.
        :param model: the marginalized model; others differ in ``num_nodes`` only.
        :return: numbers by name, none without quadrature.
        :raises ValueError: the error shifts the posterior too far, and the user chose
            the number of nodes.
        """
        accuracy = self._accuracy
        errors, measured, plates, own, most, screened = [], [], [], 0, 0, 1.0
        for compared in self._comparisons(model, draws):
            at, look, rules = compared.at, compared.look, compared.rules_for(model)
            with double():
                sample = self._sample(at, rules, draws, look.most)
                numbers, weights = sample.numbers, sample.weights
                found = look.at(draws, numbers)
                used, found = _with_more(at, draws, numbers, found, rules, accuracy)
            errors.append(summary(found, used, numbers, weights, accuracy))
            measured.append((at, numbers, found, used, weights))
            plates.append(at.plate)
            screened = min(screened, sample.screened / at.size)
            own = max(own, *(rule.own for rule in rules.values()))
            most = max(most, *(rule.fine for rule in used.values()))
        if not errors:
            return {}
        error = together(errors)
        better = _better_nodes(error, own, most, accuracy)
        # a default number of nodes is increased instead; see `Marginalized.refined`
        if model.num_nodes is not None:
            _check_spread(error, plates, better)
        _check_elsewhere(error, plates)
        beyond = error.modes > error.elsewhere
        far = error.modes if beyond else error.elsewhere
        row = error.row_modes if beyond else error.row_elsewhere
        rounded = 0.0
        coarse = error.spread > ADVISED or error.largest > accuracy
        if not (is_double() or (coarse and model.num_nodes is None)):
            rounded = sum(_rounded(draws, *each) for each in measured)
        return {
            "quadrature_sd": error.spread,
            "quadrature_sd_elsewhere": max(error.spread_elsewhere, error.spread_modes),
            "quadrature_sd_single": rounded,
            "quadrature_error": error.largest,
            "quadrature_accuracy": accuracy,
            "quadrature_elsewhere": far,
            "quadrature_row_elsewhere": row,
            "quadrature_unconverged": error.unconverged,
            "quadrature_kinks": error.kinks,
            "quadrature_screened": screened,
            "quadrature_nodes": own,
            "quadrature_better_nodes": better,
            "quadrature_better_error": error.by_nodes.get(better, np.inf),
        }

    def _sample(
        self, at: RowsAt, rules: Rules, draws: Mapping[str, Any], most: int
    ) -> Sample:
        """The rows of a plate to measure, so many at most."""
        if at.size <= most:
            return Sample(np.arange(at.size), np.ones(at.size), at.size)
        return self._screen(at, rules).sample(draws, most)

    def _screen(self, at: RowsAt, rules: Rules) -> Screen:
        key = at.plate, *(rule.own for rule in rules.values())
        if key not in self._screens:  # its program depends on the model's own nodes
            self._screens[key] = Screen(at, rules)
        return self._screens[key]

    def _comparisons(
        self, model: RowsMarginalized, draws: Mapping[str, Any]
    ) -> list[_Compared]:
        """The comparisons for a model with this number of nodes, or fewer."""
        count = len(next(iter(draws.values())))
        for (nodes, known), compared in self._compared.items():
            apart = all(len(each.rules) == 1 for each in compared)
            covered = all(
                _own_nodes(model, each.at.levels[rule.number]) in rule.tried
                for each in compared
                for rule in each.rules.values()
            )
            # integrals of inner plates have this number of nodes, too
            if known == count and (nodes == model.num_nodes or (apart and covered)):
                return compared
        compared = []
        for at in RowsAt.each("marginalize", model, self._args, self._kwargs):
            if rules := rules_of(at, _TRIED, _FINE_SETUP, finer=True):
                compared.append(_Compared(at, rules, looks_of(at, count, rules)))
        self._compared[model.num_nodes, count] = compared
        return compared


class _Compared(NamedTuple):
    """The comparison of rules for the rows of a plate."""

    at: RowsAt
    rules: Rules
    look: Look

    def rules_for(self, model: RowsMarginalized) -> Rules:
        """The rules, with this model's own nodes."""
        return {
            names: rule._replace(own=_own_nodes(model, self.at.levels[rule.number]))
            for names, rule in self.rules.items()
        }


def _own_nodes(model: RowsMarginalized, level: Level) -> int:
    return model.num_nodes or level.nodes


def _rounded(
    draws: Mapping[str, Any],
    at: RowsAt,
    numbers: np.ndarray,
    found: Mapping[str, np.ndarray],
    rules: Rules,
    weights: np.ndarray,
) -> float:
    """The spread of the error in single precision, in which a run evaluates the rows.

    A beta variable near one is rounded to one, and an exponential below 1e-38 to zero.
    The part of its density that lies beyond is missing in every number of nodes.

    :param numbers: the rows of ``found``, the results in double precision.
    """
    # those of inner plates are compared at draws, which differ between precisions
    outer = len(at.levels) - 1
    rules = {names: rule for names, rule in rules.items() if rule.number == outer}
    if not rules or not any(site.bounded for site in at.levels[outer].sites):
        return 0.0
    key, width = jax.random.key(0), len(numbers)
    look = at.looker(key, look_by_own(rules), width=width, height=1)
    return rounded_spread(look(draws, numbers), found, rules, weights)


def _check_spread(error: QuadratureError, plates: list[str], better: int) -> None:
    """Refuse a number of nodes that moves the posterior."""
    if error.spread <= REFUSED:
        return
    enough = any(s < ADVISED for s in error.spread_by_nodes.values())
    if better > MOST_NODES:
        remedy = _OTHER_REMEDY
    elif enough:
        remedy = f"Write marginalize(model, num_nodes={better})."
    else:
        remedy = (
            f"Write marginalize(model, num_nodes={better}), and if that is refused as "
            "well, sample the model with its latent sites, by NumPyro's NUTS."
        )
    raise ValueError(
        f"the quadrature of the rows of plate {', '.join(map(repr, plates))} is too "
        "coarse: between "
        f"posterior draws its error changes the log density by {error.spread:.2g} "
        f"(standard deviation; {REFUSED:g} is the limit), most of all in row "
        f"{error.row}. {remedy}"
    )


_OTHER_REMEDY = (
    "If the density of a row has several modes, those of components, write the "
    "component as a discrete latent site of the row: each of its states has nodes of "
    "its own. Otherwise sample the model with its latent sites, by NumPyro's NUTS."
)


def _check_elsewhere(error: QuadratureError, plates: list[str]) -> None:
    """Refuse rows of which a part is out of the reach of nodes at the mode."""
    if error.modes > ELSEWHERE and error.spread_modes > _SECOND_MODE:
        raise ValueError(
            f"the latent variables of some rows of plate "
            f"{', '.join(map(repr, plates))} have a second mode, and nodes are placed "
            f"at one mode only: the other one changes the log likelihood of row "
            f"{error.row_modes} by {error.modes:.2g}, and that of all rows by "
            f"{error.spread_modes:.2g} (standard deviation between posterior draws; "
            f"{_SECOND_MODE:g} is the limit). Write what tells the modes apart, for "
            "example a sign or a component, as a discrete latent site of the row: each "
            "of its states has nodes of its own. Otherwise sample the model with its "
            "latent sites, by NumPyro's NUTS."
        )
    if error.elsewhere <= _ELSEWHERE or error.spread_elsewhere <= REFUSED:
        return
    raise ValueError(
        "the quadrature misses a part of some rows of plate "
        f"{', '.join(map(repr, plates))}: points further from the mode change the log "
        f"likelihood of row {error.row_elsewhere} by {error.elsewhere:.2g}, and "
        f"that of all rows by {error.spread_elsewhere:.2g} (standard deviation "
        f"between posterior draws; {REFUSED:g} is the limit). The density of a "
        "row's latent variables has a second mode or a heavy tail, which more "
        f"nodes at the mode do not reach. {_OTHER_REMEDY}"
    )


def _with_more(
    at: RowsAt,
    draws: Mapping[str, Any],
    numbers: np.ndarray,
    found: dict[str, np.ndarray],
    rules: Rules,
    accuracy: float,
) -> tuple[Rules, dict[str, np.ndarray]]:
    """Rules and results, with more nodes of three dimensions if they are necessary."""
    if all(level.dimensions != 3 for level in at.levels):
        return rules, found
    for tried, fine in _MORE:
        more = rules_of(at, tried, fine, finer=True)
        rules, found = with_more_nodes(at, draws, numbers, found, rules, more, accuracy)
    return rules, found


def _better_nodes(error: QuadratureError, own: int, most: int, accuracy: float) -> int:
    """The smallest number of nodes above ``own`` that suffices, or that helps most."""
    finer = [n for n in error.by_nodes if n > own]
    finer = [n for n in finer if error.spread_by_nodes[n] < ADVISED] or finer
    if not finer:
        return max(own + 2, most)
    accurate = [n for n in finer if error.num_nodes and n >= error.num_nodes]
    largest = max(finer)
    at_most = error.by_nodes[largest]
    if not accurate and len(finer) > 1 and at_most < _NEARLY * accuracy:
        if at_most < 0.5 * error.by_nodes[sorted(finer)[-2]]:
            return most  # errors decrease, and will be small enough there
    # no number of nodes is accurate for a heavy tail
    best = min(error.by_nodes[n] for n in finer)
    return min(accurate or [n for n in finer if error.by_nodes[n] <= 2 * best])
