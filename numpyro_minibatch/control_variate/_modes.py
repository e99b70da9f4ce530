"""The search for the modes of a posterior, from many starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numpyro_minibatch._internal.progress import stage
from numpyro_minibatch.control_variate._center import (
    Density,
    Known,
    newton,
)
from numpyro_minibatch.control_variate._ends import (
    NEGLIGIBLE,
    SAME,
    End,
    Ends,
    copies_of,
    random_starts,
    transformed,
)
from numpyro_minibatch.control_variate._expand import Expansion
from numpyro_minibatch.control_variate._problem import NoExpansion, Problem, Refused
from numpyro_minibatch.control_variate._taylor import Taylor

__all__ = ["FoundMode", "FoundModes", "find_modes"]

_LEAST = 1e-4  # mass of a mode below which it is left out


class FoundMode(NamedTuple):
    """A mode of the posterior of all rows.

    :param expansion: the sum of the rows' polynomials about it, in double precision.
    :param known: the log density of all that is not expanded, there.
    :param mass: by the Laplace approximation, relative to all that were found.
    :param found: how many of the random starts led to it.
    """

    expansion: Expansion
    known: Known
    mass: float
    found: int


class FoundModes(NamedTuple):
    """The result of a search for modes.

    :param modes: those that are kept, the heaviest first.
    :param about: the expansion about a point, by a pass that is compiled.
    :param num_searches: searches from random starts that ended.
    :param left_out: masses of the modes that are not kept.
    :param once: how many modes would not have been found without a single one of the
        random starts, among those whose mass is not negligible.
    :param never: how many of these would not have been found from the random starts.
    """

    modes: tuple[FoundMode, ...]
    about: Callable[[np.ndarray], Expansion]
    num_searches: int
    left_out: tuple[float, ...]
    once: int
    never: int

    @property
    def missed(self) -> float:
        """The probability that another search ends in a mode not found: Good-Turing.

        A search also finds what copies of its mode lead to. A mode that copies of
        another one lead to thus does not depend on one search.
        """
        return self.once / max(self.num_searches, 1)

    @property
    def report(self) -> dict[str, Any]:
        """The report of the search."""
        return {
            "num_modes": len(self.modes),
            "mode_masses": [mode.mass for mode in self.modes],
            "mode_found": [mode.found for mode in self.modes],
            "mode_searches": self.num_searches,
            "mode_once": self.once,
            "mode_never": self.never,
            "mode_missed": self.missed,
            "mode_left_out": list(self.left_out),
        }


class _Refined(NamedTuple):
    """A mode of the posterior of all rows, and the parts of its expansion."""

    end: End
    expansion: Expansion
    known: Known

    @property
    def score(self) -> float:
        """Minus the logarithm of its mass, up to a constant."""
        return self.end.value + _half_log_det(self.end.hessian)


def _half_log_det(matrix: np.ndarray) -> float:
    return 0.5 * float(np.linalg.slogdet(matrix)[1])


def find_modes(problem: Problem, starts: np.ndarray, taylor: Taylor) -> FoundModes:
    """Find the modes of a posterior that is expanded in its own coordinates.

    :param problem: the target and its coordinates.
    :param starts: where to start as well as at random positions, shape ``(k, d)``.
    :param taylor: the control variate, whose ``modes`` are kept at most.
    :raises Refused: no search ends in a mode.
    """
    density = Density.of(problem, taylor, starts.shape[1])
    stage("modes of some rows")
    ends, ended = Ends(density), 0
    for start in random_starts(problem, starts.shape[1]):
        optimum = ends.search(start)
        number = ends.add(optimum, random=True)
        ended += number is not None or (optimum.ended and ends.too_low(optimum.fun))
    for start in starts:
        ends.given.add(ends.add(ends.search(start), random=False))
    stage("copies of these modes")
    while (number := ends.next()) is not None:  # also copies of copies
        for start in copies_of(problem, density, ends, number):
            ends.leads(number, ends.add(ends.search(start), random=False))
    if not ends.found:
        raise NoExpansion(
            "none of the searches for modes ended at a maximum of the log density. "
            "Give the parameters proper priors, standardise the data, or pass a "
            "centre: control_variate.taylor2(center={site: unconstrained value})."
        )
    stage("modes of all rows")
    return _of_all_rows(problem, density, ends, ended, taylor.modes)


def _refine(
    density: Density, end: End, refined: list[_Refined], copies: list[np.ndarray]
) -> tuple[_Refined, int | None]:
    """The mode of all rows that an end on some rows leads to.

    :param refined: the modes that are known.
    :param copies: their transformed copies. One that is near may be the mode already,
        or may lead to another one: then Newton steps start at the end itself.
    :return: the mode, and its number among those that are known, if it is one.
    :raises Refused: the steps do not end at a mode that matters.
    """
    best = min((one.score for one in refined), default=np.inf)
    largest = best + NEGLIGIBLE - _half_log_det(end.hessian)
    # the mode of all rows is a few standard deviations of some rows away
    reach = (2.0 + np.sqrt(len(end.position))) * density.spread
    distances = [end.distance(x, density) for x in copies]
    nearest = int(np.argmin(distances)) if copies else -1
    if copies and distances[nearest] < reach:
        try:
            start = copies[nearest]
            found = _newton_to(density, end, start, reach, largest)
        except Refused:
            pass
        else:
            if (same := _number_of(density, found, refined)) is None:
                return found, same
    found = _newton_to(density, end, end.position, reach, largest)
    return found, _number_of(density, found, refined)


def _newton_to(
    density: Density, end: End, start: np.ndarray, reach: float, largest: float
) -> _Refined:
    """The mode at which Newton steps on all rows end."""
    position, hessian = newton(density.of_all, start, end.hessian, reach, largest)
    value = float(density.of_all(position)[0])
    return _Refined(
        end._replace(position=position, value=value, hessian=hessian),
        density.about(position),
        density.known_at(position),
    )


def _number_of(density: Density, new: _Refined, refined: list[_Refined]) -> int | None:
    """The number of a mode among those that are known, if it is one."""
    for k, old in enumerate(refined):
        apart = (
            old.end.distance(new.end.position, density),
            new.end.distance(old.end.position, density),
        )
        if min(apart) < SAME:
            return k
    return None


def _of_all_rows(
    problem: Problem, density: Density, ends: Ends, ended: int, most: int
) -> FoundModes:
    """The modes of the posterior of all rows, with their masses.

    :raises Refused: the best of them has no Laplace approximation.
    """
    refined: list[_Refined] = []
    copies: list[np.ndarray] = []  # of those, which other modes may be
    members: list[set[int]] = []  # the ends on some rows that each comes from
    for number, end in sorted(enumerate(ends.found), key=lambda pair: pair[1].value):
        if ends.too_low(end.value):
            continue
        try:
            new, same = _refine(density, end, refined, copies)
        except Refused:
            if not refined:  # the best one is not left out without a word
                raise
            continue
        if same is None:
            refined.append(new)
            members.append({number})
            copies += transformed(problem, new.end.position)
        else:
            old = refined[same]
            better = min(old, new, key=lambda one: one.end.value)
            found = old.end.found + new.end.found
            refined[same] = better._replace(end=better.end._replace(found=found))
            members[same].add(number)
    logs = -np.array([one.score for one in refined])
    masses = np.exp(logs - logs.max())
    masses /= masses.sum()
    order = np.argsort(-masses, kind="stable")
    kept = [k for k in order[:most] if masses[k] >= _LEAST]
    modes = [
        FoundMode(
            refined[k].expansion,
            refined[k].known,
            float(masses[k]),
            refined[k].end.found,
        )
        for k in kept
    ]
    left_out = tuple(float(masses[k]) for k in order[len(kept) :])
    heavy = [k for k in order if masses[k] >= _LEAST]
    once = sum(
        refined[k].end.found == 1 and not ends.known_without(members[k]) & members[k]
        for k in heavy
    )
    by_random = ends.known_without(set(), given=False)
    never = sum(not by_random & members[k] for k in heavy)
    return FoundModes(tuple(modes), density.about, ended, left_out, once, never)
