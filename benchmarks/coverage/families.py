"""Families of small posteriors, skewed or with heavy tails, known by quadrature.

A family is a NumPyro model, a function that makes data of one shape, and the log
posterior density written by hand, in NumPy and without the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.interpolate import CubicSpline
from scipy.special import betaln, gammaln
from scipy.stats import nbinom, norm
from scipy.stats import t as student

Axis = tuple[str, float, float]  # transformation, and range in transformed coordinates


@dataclass(frozen=True)
class Family:
    """Posteriors of one kind.

    :param words: its description on the page.
    :param model: the NumPyro model.
    :param make: ``make(rng)`` gives the model's arguments.
    :param log_posterior: ``log_posterior(data, *parameters)``, up to a constant, for
        arrays of parameters that broadcast.
    :param axes: the axis of the quadrature for each examined parameter.
    """

    words: str
    model: Callable
    make: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    log_posterior: Callable[..., np.ndarray]
    axes: dict[str, Axis]

    def data(self, seed: int) -> tuple[np.ndarray, ...]:
        """The arguments of the model for a seed."""
        return self.make(np.random.default_rng(seed))


def _forward(kind: str, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A parameter at a coordinate of an axis, and the log of the derivative."""
    if kind == "log":
        return np.exp(u), u
    if kind == "logit":
        return 1 / (1 + np.exp(-u)), -np.logaddexp(0, u) - np.logaddexp(0, -u)
    if kind == "atanh":
        return np.tanh(u), np.log1p(-(np.tanh(u) ** 2))
    return u, np.zeros_like(u)


def truth(
    family: Family, data: tuple[np.ndarray, ...], points: int = 401
) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and 5% and 95% quantiles of each parameter.

    Uses the rectangle rule in coordinates in which the density vanishes at both ends,
    on a grid around the region found by a coarse one. Its error falls faster than any
    power of the spacing.
    """
    ranges = {name: axis[1:] for name, axis in family.axes.items()}
    many = points if len(ranges) > 1 else 40 * points
    for last in (False, True):
        grids = [np.linspace(*r, many) for r in ranges.values()]
        found, log_derivative = zip(
            *[
                _forward(axis[0], u)
                for axis, u in zip(family.axes.values(), grids, strict=True)
            ],
            strict=True,
        )
        mesh = np.meshgrid(*found, indexing="ij", sparse=True)
        log_p = family.log_posterior(data, *mesh)
        log_p = log_p + sum(np.meshgrid(*log_derivative, indexing="ij", sparse=True))
        p = np.exp(log_p - log_p.max())
        if not last:
            for k, name in enumerate(ranges):
                other = tuple(j for j in range(p.ndim) if j != k)
                inside = np.flatnonzero(log_p.max(other) > log_p.max() - 25)
                u = grids[k]
                low, high = max(inside[0] - 1, 0), min(inside[-1] + 1, len(u) - 1)
                ranges[name] = (float(u[low]), float(u[high]))
    result = {}
    for k, name in enumerate(ranges):
        other = tuple(j for j in range(p.ndim) if j != k)
        weights = p.sum(other) / p.sum()
        mean = weights @ found[k]
        fine = np.linspace(grids[k][0], grids[k][-1], 40_001)
        below = CubicSpline(grids[k], weights).antiderivative()(fine)
        levels = np.interp([0.05, 0.95], below / below[-1], fine)
        q5, q95 = _forward(family.axes[name][0], levels)[0]
        sd = np.sqrt(weights @ (found[k] - mean) ** 2)
        result[name] = {
            "mean": float(mean),
            "sd": float(sd),
            "q5": float(q5),
            "q95": float(q95),
            "skewness": float(weights @ (found[k] - mean) ** 3 / sd**3),
        }
    return result


def _ones(size: int, number: int) -> np.ndarray:
    return (np.arange(size) < number).astype(np.float32)


# rare events ---


def _intercept(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Bernoulli(logits=a * jnp.ones(len(i))), obs=y[i])


def _intercept_density(data: Any, a: np.ndarray) -> np.ndarray:
    y = data[0]
    return y.sum() * a - len(y) * np.logaddexp(0, a) - a**2 / 50


def _slope(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Bernoulli(logits=a + b * x[i]), obs=y[i])


def _slope_density(data: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (np.asarray(v, float) for v in data)
    total = y.sum() * a + (x * y).sum() * b - (a**2 + b**2) / 50
    for value in x:
        total = total - np.log1p(np.exp(a + b * value))
    return total


def _make_slope(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.normal(size=2000)
    chance = np.exp(0.5 * x)
    y = np.zeros(2000)
    y[rng.choice(2000, 5, replace=False, p=chance / chance.sum())] = 1
    return x.astype(np.float32), y.astype(np.float32)


# counts ---


def _poisson(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 3))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Poisson(jnp.exp(a) * jnp.ones(len(i))), obs=y[i])


def _poisson_density(data: Any, a: np.ndarray) -> np.ndarray:
    return data[0].sum() * a - len(data[0]) * np.exp(a) - a**2 / 18


def _negative_binomial(y: Any) -> None:
    m = numpyro.sample("m", dist.HalfNormal(10))
    phi = numpyro.sample("phi", dist.HalfNormal(5))
    with numpyro.plate("data", len(y)) as i:
        obs = dist.NegativeBinomial2(m * jnp.ones(len(i)), phi)
        numpyro.sample("obs", obs, obs=y[i])


def _negative_binomial_density(data: Any, m: Any, phi: Any) -> np.ndarray:
    values, counts = np.unique(data[0], return_counts=True)
    total = -(m**2) / 200 - phi**2 / 50
    for value, count in zip(values, counts, strict=True):
        total = total + count * nbinom.logpmf(value, phi, phi / (phi + m))
    return total


# rates, shapes and scales ---


def _exponential(y: Any) -> None:
    rate = numpyro.sample("rate", dist.HalfNormal(5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Exponential(rate * jnp.ones(len(i))), obs=y[i])


def _exponential_density(data: Any, rate: np.ndarray) -> np.ndarray:
    return len(data[0]) * np.log(rate) - rate * data[0].sum() - rate**2 / 50


def _gamma(y: Any) -> None:
    shape = numpyro.sample("shape", dist.HalfNormal(5))
    rate = numpyro.sample("rate", dist.HalfNormal(5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Gamma(shape * jnp.ones(len(i)), rate), obs=y[i])


def _gamma_density(data: Any, shape: Any, rate: Any) -> np.ndarray:
    y = np.asarray(data[0], float)
    rows = shape * np.log(rate) - gammaln(shape)
    terms = len(y) * rows + (shape - 1) * np.log(y).sum() - rate * y.sum()
    return terms - (shape**2 + rate**2) / 50


def _weibull(y: Any) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(5))
    shape = numpyro.sample("shape", dist.HalfNormal(5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Weibull(scale * jnp.ones(len(i)), shape), obs=y[i])


def _weibull_density(data: Any, scale: Any, shape: Any) -> np.ndarray:
    total = -(scale**2 + shape**2) / 50
    for value in np.asarray(data[0], float):
        ratio = value / scale
        total = total + np.log(shape / scale) + (shape - 1) * np.log(ratio)
        total = total - ratio**shape
    return total


def _scale(y: Any) -> None:
    s = numpyro.sample("s", dist.HalfCauchy(2.0))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(0, s * jnp.ones(len(i))), obs=y[i])


def _scale_density(data: Any, s: np.ndarray) -> np.ndarray:
    y = np.asarray(data[0], float)
    return -len(y) * np.log(s) - 0.5 * (y @ y) / s**2 - np.log1p(s**2 / 4)


def _student(y: Any) -> None:
    nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
    s = numpyro.sample("s", dist.HalfNormal(3))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.StudentT(nu * jnp.ones(len(i)), 0, s), obs=y[i])


def _student_density(data: Any, nu: Any, s: Any) -> np.ndarray:
    total = np.log(nu) - 0.1 * nu - s**2 / 18
    for value in np.asarray(data[0], float):
        total = total + student.logpdf(value / s, nu) - np.log(s)
    return total


# bounds, groups, mixtures, and a heavy tail ---


def _bounded(y: Any) -> None:
    p = numpyro.sample("p", dist.Uniform(0, 1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Bernoulli(p * jnp.ones(len(i))), obs=y[i])


def _bounded_density(data: Any, p: np.ndarray) -> np.ndarray:
    ones = data[0].sum()
    return ones * np.log(p) + (len(data[0]) - ones) * np.log1p(-p)


def _correlation(x: Any, y: Any) -> None:
    r = numpyro.sample("r", dist.Uniform(-1, 1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(r * x[i], jnp.sqrt(1 - r**2)), obs=y[i])


def _correlation_density(data: Any, r: np.ndarray) -> np.ndarray:
    x, y = (np.asarray(v, float) for v in data)
    square = y @ y - 2 * r * (x @ y) + r**2 * (x @ x)
    return -0.5 * len(y) * np.log1p(-(r**2)) - 0.5 * square / (1 - r**2)


def _make_correlation(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x, z = rng.normal(size=(2, 12))
    y = 0.9 * x + np.sqrt(1 - 0.81) * z
    return x.astype(np.float32), y.astype(np.float32)


_GROUPS, _EACH = 5, 8


def _groups(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(3))
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([_GROUPS]).to_event(1))
    group = jnp.repeat(jnp.arange(_GROUPS), _EACH)
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(m + tau * effect[group[i]], 1), obs=y[i])


def _groups_density(data: Any, m: np.ndarray, tau: np.ndarray) -> np.ndarray:
    variance = tau**2 + 1 / _EACH  # of a group's mean, the effects integrated
    total = -(m**2) / 50 - tau**2 / 18
    for mean in np.asarray(data[0], float).reshape(_GROUPS, _EACH).mean(1):
        total = total - 0.5 * (mean - m) ** 2 / variance - 0.5 * np.log(variance)
    return total


def _make_groups(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    effects = rng.normal(size=_GROUPS).repeat(_EACH)
    y = 1 + 0.5 * effects + rng.normal(size=_GROUPS * _EACH)
    return (y.astype(np.float32),)


def _mixture(y: Any) -> None:
    w = numpyro.sample("w", dist.Uniform(0, 1))
    with numpyro.plate("data", len(y)) as i:
        weights = dist.Categorical(probs=jnp.stack([1 - w, w]))
        parts = dist.Normal(jnp.array([0.0, 3.0]), 1.0)
        numpyro.sample("obs", dist.MixtureSameFamily(weights, parts), obs=y[i])


def _mixture_density(data: Any, w: np.ndarray) -> np.ndarray:
    total = np.zeros_like(w)
    for value in np.asarray(data[0], float):
        total = total + np.log((1 - w) * norm.pdf(value) + w * norm.pdf(value - 3))
    return total


def _make_mixture(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    y = rng.normal(size=200) + 3 * (np.arange(200) < 4)
    return (y.astype(np.float32),)


def _cauchy(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 10))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Cauchy(m * jnp.ones(len(i)), 1), obs=y[i])


def _cauchy_density(data: Any, m: np.ndarray) -> np.ndarray:
    total = -(m**2) / 200
    for value in np.asarray(data[0], float):
        total = total - np.log1p((value - m) ** 2)
    return total


# wide tails and posteriors that the data hardly bound ---


def _normal(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 10))
    s = numpyro.sample("s", dist.HalfCauchy(5.0))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(m * jnp.ones(len(i)), s), obs=y[i])


def _normal_density(data: Any, m: Any, s: Any) -> np.ndarray:
    total = -(m**2) / 200 - np.log1p(s**2 / 25)
    for value in np.asarray(data[0], float):
        total = total - np.log(s) - 0.5 * ((value - m) / s) ** 2
    return total


def _zeros(y: Any) -> None:
    gate = numpyro.sample("gate", dist.Uniform(0, 1))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(y)) as i:
        obs = dist.ZeroInflatedPoisson(gate * jnp.ones(len(i)), rate=rate)
        numpyro.sample("obs", obs, obs=y[i])


def _zeros_density(data: Any, gate: Any, rate: Any) -> np.ndarray:
    y = np.asarray(data[0], float)
    total = (
        np.log(rate) - rate + (y == 0).sum() * np.log(gate + (1 - gate) * np.exp(-rate))
    )
    for value in y[y > 0]:
        total = total + np.log1p(-gate) - rate + value * np.log(rate)
    return total


def _beta(y: Any) -> None:
    mean = numpyro.sample("mean", dist.Uniform(0, 1))
    size = numpyro.sample("size", dist.HalfCauchy(20.0))
    with numpyro.plate("data", len(y)) as i:
        ones = jnp.ones(len(i))
        numpyro.sample(
            "obs", dist.Beta(mean * size * ones, (1 - mean) * size), obs=y[i]
        )


def _beta_density(data: Any, mean: Any, size: Any) -> np.ndarray:
    a, b, y = mean * size, (1 - mean) * size, np.asarray(data[0], float)
    rows = (a - 1) * np.log(y).sum() + (b - 1) * np.log1p(-y).sum()
    return rows - len(y) * betaln(a, b) - np.log1p(size**2 / 400)


def _location(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 10))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.StudentT(2.0, m * jnp.ones(len(i)), 1.0), obs=y[i])


def _location_density(data: Any, m: np.ndarray) -> np.ndarray:
    total = -(m**2) / 200
    for value in np.asarray(data[0], float):
        total = total + student.logpdf(value - m, 2)
    return total


def _separated(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Bernoulli(logits=b * x[i]), obs=y[i])


def _separated_density(data: Any, b: np.ndarray) -> np.ndarray:
    total = -(b**2) / 50
    for value in np.abs(np.asarray(data[0], float)):
        total = total - np.logaddexp(0, -value * b)
    return total


def _make_separated(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.normal(size=25).astype(np.float32)
    return x, (x > 0).astype(np.float32)


def _log_normal(y: Any) -> None:
    median = numpyro.sample("median", dist.HalfNormal(5.0))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(y)) as i:
        location = jnp.log(median) * jnp.ones(len(i))
        numpyro.sample("obs", dist.LogNormal(location, s), obs=y[i])


def _log_normal_density(data: Any, median: Any, s: Any) -> np.ndarray:
    total = -(median**2) / 50 - s**2 / 2
    for value in np.log(np.asarray(data[0], float)):
        total = total - np.log(s) - 0.5 * ((value - np.log(median)) / s) ** 2
    return total


# rows far from the others ---


def _events(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Poisson(jnp.exp(a + b * x[i])), obs=y[i])


def _events_density(data: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (np.asarray(v, float) for v in data)
    rate = sum(np.exp(b * value) for value in x)
    linear = y.sum() * a + (x * y).sum() * b
    return linear - np.exp(a) * rate - a**2 / 50 - b**2 / 8


def _make_events(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.standard_t(4, size=3000)
    chance = np.exp(0.4 * np.clip(x, -4, 4))
    y = np.zeros(3000)
    np.add.at(y, rng.choice(3000, 6, p=chance / chance.sum()), 1)
    return x.astype(np.float32), y.astype(np.float32)


def _leverage(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Bernoulli(logits=a + b * x[i]), obs=y[i])


def _leverage_density(data: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (np.asarray(v, float) for v in data)
    total = y.sum() * a + (x * y).sum() * b - a**2 / 50 - b**2 / 8
    for value in x:
        total = total - np.logaddexp(0, a + b * value)
    return total


def _make_leverage(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.standard_t(2, size=10_000)
    chance = np.exp(0.3 * np.clip(x, -6, 6))
    y = np.zeros(10_000)
    y[rng.choice(10_000, 30, replace=False, p=chance / chance.sum())] = 1
    return x.astype(np.float32), y.astype(np.float32)


def _censored(t: Any, censored: Any) -> None:
    k = numpyro.sample("k", dist.LogNormal(0, 1))
    s = numpyro.sample("s", dist.LogNormal(0, 2))
    with numpyro.plate("data", len(t)) as i:
        z = t[i] / s
        density = jnp.log(k / s) + (k - 1) * jnp.log(z) - z**k
        numpyro.factor("obs", jnp.where(censored[i] > 0, -(z**k), density))


def _censored_density(data: Any, k: np.ndarray, s: np.ndarray) -> np.ndarray:
    total = -(np.log(k) ** 2) / 2 - np.log(k) - np.log(s) ** 2 / 8 - np.log(s)
    for time, censored in zip(*(np.asarray(v, float) for v in data), strict=True):
        z = time / s
        total = total - z**k
        if not censored:
            total = total + np.log(k / s) + (k - 1) * np.log(z)
    return total


def _make_censored(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    t = 2.0 * rng.weibull(1.2, 12)
    return np.minimum(t, 1.2).astype(np.float32), (t > 1.2).astype(np.float32)


def _one(draw: Callable[[np.random.Generator], np.ndarray]) -> Callable:
    return lambda rng: (np.asarray(draw(rng), np.float32),)


FAMILIES = {
    "intercept": Family(
        "logistic intercept, 4 ones of 3,000",
        _intercept,
        _one(lambda rng: rng.permutation(_ones(3000, 4))),
        _intercept_density,
        {"a": ("linear", -25.0, 0.0)},
    ),
    "slope": Family(
        "logistic intercept and slope, 5 ones of 2,000",
        _slope,
        _make_slope,
        _slope_density,
        {"a": ("linear", -14.0, -3.0), "b": ("linear", -5.0, 7.0)},
    ),
    "counts": Family(
        "log rate, 3 events in 200 rows",
        _poisson,
        _one(lambda rng: rng.permutation(_ones(200, 3))),
        _poisson_density,
        {"a": ("linear", -20.0, 2.0)},
    ),
    "overdispersed": Family(
        "negative binomial, 60 rows",
        _negative_binomial,
        _one(lambda rng: rng.negative_binomial(1.0, 1 / 4, 60)),
        _negative_binomial_density,
        {"m": ("log", -1.5, 4.0), "phi": ("log", -4.0, 4.0)},
    ),
    "rate": Family(
        "exponential rate, 6 rows",
        _exponential,
        _one(lambda rng: rng.exponential(1.0, 6)),
        _exponential_density,
        {"rate": ("log", -12.0, 4.0)},
    ),
    "gamma": Family(
        "gamma shape and rate, 25 rows",
        _gamma,
        _one(lambda rng: rng.gamma(2.0, 1.0, 25)),
        _gamma_density,
        {"shape": ("log", -3.0, 4.0), "rate": ("log", -5.0, 4.0)},
    ),
    "weibull": Family(
        "Weibull scale and shape, 15 rows",
        _weibull,
        _one(lambda rng: 2.0 * rng.weibull(1.5, 15)),
        _weibull_density,
        {"scale": ("log", -3.0, 4.0), "shape": ("log", -3.0, 3.0)},
    ),
    "scale": Family(
        "standard deviation of 8 normal rows, half-Cauchy prior",
        _scale,
        _one(lambda rng: rng.normal(size=8)),
        _scale_density,
        {"s": ("log", -4.0, 8.0)},
    ),
    "student": Family(
        "Student-t degrees of freedom and scale, 150 rows",
        _student,
        _one(lambda rng: rng.standard_t(4.0, 150)),
        _student_density,
        {"nu": ("log", -1.5, 6.0), "s": ("log", -1.5, 1.5)},
    ),
    "bound": Family(
        "probability near 0, 2 ones of 300",
        _bounded,
        _one(lambda rng: rng.permutation(_ones(300, 2))),
        _bounded_density,
        {"p": ("logit", -25.0, 0.0)},
    ),
    "correlation": Family(
        "correlation near 1, 12 rows",
        _correlation,
        _make_correlation,
        _correlation_density,
        {"r": ("atanh", -6.0, 9.0)},
    ),
    "groups": Family(
        "hierarchy of 5 groups of 8 rows, non-centred",
        _groups,
        _make_groups,
        _groups_density,
        {"m": ("linear", -6.0, 8.0), "tau": ("log", -12.0, 2.5)},
    ),
    "mixture": Family(
        "weight of a mixture, about 4 of 200 rows in the second part",
        _mixture,
        _make_mixture,
        _mixture_density,
        {"w": ("logit", -25.0, 0.0)},
    ),
    "cauchy": Family(
        "location of 7 Cauchy rows",
        _cauchy,
        _one(lambda rng: rng.standard_cauchy(7)),
        _cauchy_density,
        {"m": ("linear", -45.0, 45.0)},
    ),
    "normal": Family(
        "mean and standard deviation of 5 normal rows",
        _normal,
        _one(lambda rng: rng.normal(size=5)),
        _normal_density,
        {"m": ("linear", -60.0, 60.0), "s": ("log", -4.0, 7.0)},
    ),
    "zeros": Family(
        "share of structural zeros and rate, 60 counts",
        _zeros,
        _one(lambda rng: (rng.uniform(size=60) < 0.25) * rng.poisson(1.2, 60)),
        _zeros_density,
        {"gate": ("logit", -12.0, 12.0), "rate": ("log", -7.0, 4.0)},
    ),
    "beta": Family(
        "mean and precision of 12 beta rows",
        _beta,
        _one(lambda rng: rng.beta(0.5, 4.0, 12).clip(1e-4)),
        _beta_density,
        {"mean": ("logit", -7.0, 5.0), "size": ("log", -3.0, 8.0)},
    ),
    "location": Family(
        "location of 5 Student-t rows, 2 degrees of freedom",
        _location,
        _one(lambda rng: rng.standard_t(2.0, 5)),
        _location_density,
        {"m": ("linear", -45.0, 45.0)},
    ),
    "separated": Family(
        "logistic slope, 25 rows that are separated",
        _separated,
        _make_separated,
        _separated_density,
        {"b": ("linear", -10.0, 40.0)},
    ),
    "lognormal": Family(
        "median and scale of 6 log-normal rows",
        _log_normal,
        _one(lambda rng: np.exp(rng.normal(size=6))),
        _log_normal_density,
        {"median": ("log", -6.0, 4.0), "s": ("log", -3.0, 3.0)},
    ),
    "events": Family(
        "Poisson regression, 6 events in 3,000 rows, Student-t covariates",
        _events,
        _make_events,
        _events_density,
        {"a": ("linear", -25.0, 3.0), "b": ("linear", -8.0, 8.0)},
    ),
    "leverage": Family(
        "logistic regression, 30 ones of 10,000, covariates with 2 degrees of freedom",
        _leverage,
        _make_leverage,
        _leverage_density,
        {"a": ("linear", -9.0, -3.0), "b": ("linear", -1.5, 2.0)},
    ),
    "censored": Family(
        "Weibull shape and scale, 12 rows, many censored",
        _censored,
        _make_censored,
        _censored_density,
        {"k": ("log", -3.0, 3.0), "s": ("log", -4.0, 12.0)},
    ),
}
