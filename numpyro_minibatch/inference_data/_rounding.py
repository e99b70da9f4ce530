"""Rounding errors of a log density, at suspicious draws of a run.

A difference of large numbers, as of two log-gamma functions, can be wrong by more than
the log density varies. Where the error is positive, chains stay or wander far away, and
nothing else in their draws says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from numpyro_minibatch._internal.precision import double, is_double
from numpyro_minibatch._model.replay import Run, log_densities
from numpyro_minibatch.host_rows import find_rows

__all__ = ["are_suspicious", "measured_rounding"]

# A stay is long from so many draws on, and from such a share of a chain's draws. A draw
# is far out at so many interquartile ranges from the median. (The largest of 4,000
# draws of a Cauchy distribution is a thousand away.)
_DRAWS, _SHARE, _FAR = 50, 0.05, 1e5
_LATEST = 2**24  # numbers in the last draws, in which suspicious ones are looked for
# How many of each are looked at, and of ordinary draws.
_STAYS, _FAR_OUT, _ORDINARY = 12, 4, 5
# The pairs of neighbours of each, and how far these are away, in differences between
# neighbouring numbers.
_PAIRS, _STEPS = 6, 8
_MOST = 2**24  # evaluations of a row


class _Places(NamedTuple):
    """Draws of a run.

    :param chain: the chain of each.
    :param draw: its place in the chain.
    """

    chain: np.ndarray
    draw: np.ndarray

    def of(self, samples: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The values of the sites there."""
        return {n: np.asarray(x[self.chain, self.draw]) for n, x in samples.items()}


def _suspects(samples: Mapping[str, Any]) -> _Places:
    """The longest stays and the farthest draws, if they are suspicious.

    :param samples: draws by site, with axes of chains and draws first.
    """
    shape = np.shape(next(iter(samples.values()), ()))[:2]
    none = np.zeros(0, int)
    if len(shape) < 2 or shape[1] < _DRAWS:
        return _Places(none, none)
    samples, first = _latest(samples)
    columns = [x.reshape(shape[0], shape[1] - first, -1) for x in samples.values()]
    moved = np.ones(columns[0].shape[:2], bool)
    moved[:, 1:] = False
    away = np.zeros(moved.shape)
    for x in columns:
        moved[:, 1:] |= (x[:, 1:] != x[:, :-1]).any(-1)
        low, middle, high = np.nanquantile(x, [0.25, 0.5, 0.75], axis=(0, 1))
        with np.errstate(all="ignore"):
            away = np.fmax(away, (np.abs(x - middle) / (high - low)).max(-1))
    begins = np.flatnonzero(moved)  # each chain begins with a stay
    length = np.diff(begins, append=moved.size)
    longest = np.argsort(-length, kind="stable")[:_STAYS]
    longest = longest[length[longest] >= max(_DRAWS, _SHARE * moved.shape[1])]
    away = np.where(np.isfinite(away), away, 0.0).ravel()
    farthest = begins[np.argsort(-away[begins], kind="stable")[:_FAR_OUT]]
    farthest = farthest[away[farthest] > _FAR]
    chain, draw = np.divmod(
        np.unique(np.concatenate([begins[longest], farthest])), moved.shape[1]
    )
    return _Places(chain, first + draw)


def _latest(samples: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], int]:
    """The last draws of each chain, and how many there are before."""
    chains, length = np.shape(next(iter(samples.values())))[:2]
    each = sum(np.size(x[0, 0]) for x in samples.values())
    first = max(0, length - max(_DRAWS, _LATEST // (chains * each)))
    return {name: np.asarray(x[:, first:]) for name, x in samples.items()}, first


def are_suspicious(samples: Mapping[str, Any]) -> bool:
    """Whether a chain stood still for a long time, or went very far away.

    :param samples: draws by site, with axes of chains and draws first.
    """
    return _suspects(samples).chain.size > 0


def measured_rounding(run: Run, samples: Mapping[str, Any]) -> dict[str, Any]:
    """The rounding error of the log density at suspicious draws.

    It is looked for in two ways. Errors differ between neighbouring numbers: in second
    differences over pairs of neighbours, a smooth density cancels, and their variance
    is six times that of the error. Where all digits are lost, neighbours have the same
    error. In single precision, the difference from double precision is therefore
    compared with that at ordinary draws.

    :param run: the run.
    :param samples: its draws by site, with axes of chains and draws first.
    :return: the largest error, the scalar parameter that is farthest out there, its
        value, and whether numbers are in double precision; nothing if no draw is
        suspicious, or if too many rows would be read.
    """
    target = run.target
    if not run.of_package or target is None:
        return {}
    names = [name for name, site in run.sites.items() if site.latent]
    on_host = find_rows((target.args, dict(target.kwargs)))
    if on_host or not names or any(name not in samples for name in names):
        return {}
    samples = {name: samples[name] for name in names}
    suspects = _suspects(samples)
    number = len(suspects.chain)
    rows = sum(target.sizes.values())
    if not number or rows * (number * (2 * _PAIRS + 1) + _ORDINARY) > _MOST:
        return {}
    ordinary = _ordinary(samples).of(samples)
    at = suspects.of(samples)
    draws = {
        name: np.concatenate([ordinary[name], near])
        for name, near in _with_neighbours(at).items()
    }
    found = _log_densities(run, draws)
    known, near = found[:_ORDINARY], found[_ORDINARY:].reshape(number, -1)
    bends = near[:, 1::2] + near[:, 2::2] - 2 * near[:, :1]
    error = np.sqrt(np.square(bends).mean(1) / 6)
    if not is_double():
        both = {n: np.concatenate([ordinary[n], at[n]]) for n in names}
        off = np.concatenate([known, near[:, 0]]) - _in_double(run, both)
        error = np.fmax(error, np.abs(off[_ORDINARY:] - np.median(off[:_ORDINARY])))
    error = np.where(np.isfinite(error), error, 0.0)
    worst = int(error.argmax())
    name, value = _farthest_out(samples, {n: x[worst] for n, x in at.items()})
    return {
        "error": float(error[worst]),
        "name": name,
        "value": value,
        "double": is_double(),
    }


def _ordinary(samples: Mapping[str, Any]) -> _Places:
    """Draws that are spread over the run, and the latest."""
    chains, length = np.shape(next(iter(samples.values())))[:2]
    which = np.linspace(0, chains * length - 1, _ORDINARY).astype(int)
    return _Places(*np.divmod(which, length))


def _log_densities(run: Run, draws: Mapping[str, Any]) -> np.ndarray:
    assert run.target is not None
    prior, likelihood = log_densities(run.target, draws)
    return prior + likelihood


def _in_double(run: Run, draws: Mapping[str, np.ndarray]) -> np.ndarray:
    """Log densities in double precision; NaN for models that cannot be evaluated so."""
    wide = {
        n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in draws.items()
    }
    try:
        with double():
            return _log_densities(run, wide)
    except TypeError:
        return np.full(len(next(iter(draws.values()))), np.nan)


def _with_neighbours(at: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each position, followed by pairs of neighbours on opposite sides of it."""
    rng = np.random.default_rng(0)
    found = {}
    for name, x in at.items():
        x = x[:, None]
        steps = rng.integers(-_STEPS, _STEPS + 1, size=(_PAIRS, *x.shape[2:]))
        both = np.stack([steps, -steps], axis=1).reshape(2 * _PAIRS, *x.shape[2:])
        near = (x + both * np.spacing(np.abs(x))).astype(x.dtype)
        found[name] = np.concatenate([x, near], axis=1).reshape(-1, *x.shape[2:])
    return found


def _farthest_out(
    samples: Mapping[str, Any], at: Mapping[str, np.ndarray]
) -> tuple[str, float]:
    """The scalar that is farthest from its draws, and its value."""
    worst, found = -1.0, ("", np.nan)
    for name, latest in _latest(samples)[0].items():
        low, middle, high = np.quantile(latest, [0.25, 0.5, 0.75], axis=(0, 1))
        away = np.abs(at[name] - middle) / np.maximum(high - low, 1e-300)
        place = np.unravel_index(int(away.argmax()), away.shape)
        if away[place] > worst:
            which = ", ".join(map(str, place))
            worst = float(away[place])
            found = (f"{name}[{which}]" if place else name, float(at[name][place]))
    return found
