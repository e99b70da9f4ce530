"""The benchmark's problems: a model, its data, and the scored quantities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import data, models


@dataclass(frozen=True)
class Problem:
    """One model of one data set.

    :param title: its name in tables.
    :param model: a NumPyro model with one data plate.
    :param data: makes the model's arguments, one row per observation in each.
    :param report: sites whose bias, sd and effective sample size are reported.
    :param parent: the problem whose posterior this is in other coordinates.
    :param near_normal: whether the posterior has one mode that Newton's method finds;
        otherwise a long NUTS run gives the centre and the scales.
    """

    title: str
    model: Callable[..., Any]
    data: Callable[[], data.Arrays]
    report: tuple[str, ...] = ("beta",)
    parent: str | None = None
    near_normal: bool = True


def _simulated(size: float) -> Problem:
    make = partial(data.simulated_logistic, int(size))
    return Problem(f"simulated logistic, N={size:,.0f}, D=20", models.logistic, make)


def _hierarchy(size: int, groups: int, centred: bool) -> Problem:
    return Problem(
        f"hierarchy, N={size}, {'' if centred else 'non-'}centred",
        partial(models.hierarchy, num_groups=groups, centred=centred),
        partial(data.hierarchy, size, groups),
        report=("beta", "mu", "tau", "theta"),
        parent=f"hierarchy_{size}" if centred else None,
        near_normal=False,
    )


PROBLEMS = {
    "logistic_1e4": _simulated(1e4),
    "logistic_2e5": _simulated(2e5),
    "logistic_2e6": _simulated(2e6),
    "logistic_1e7": _simulated(1e7),
    "covertype": Problem(
        "Covertype 2 v 3, N=319,055, D=11", models.logistic, data.covertype
    ),
    "a9a": Problem(
        "a9a, N=32,561, D=123", partial(models.logistic, scale=1.0), data.a9a
    ),
    "poisson": Problem(
        "heavy-tailed Poisson, N=200,000, D=10", models.poisson, data.heavy_poisson
    ),
    "student_t": Problem(
        "Student-t regression, protein, N=45,730, D=11",
        models.student_t,
        data.protein,
        report=("beta", "sigma"),
    ),
    "rare_column": Problem(
        "one column nonzero in 15 rows, N=200,000, D=20",
        models.logistic,
        data.rare_column,
    ),
    "hierarchy_5000": _hierarchy(5000, 50, centred=False),
    "hierarchy_5000_centred": _hierarchy(5000, 50, centred=True),
    "hierarchy_500": _hierarchy(500, 20, centred=False),
    "hierarchy_500_centred": _hierarchy(500, 20, centred=True),
}
