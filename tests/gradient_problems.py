"""Targets whose distributions are known, with gradient noise of a known variance."""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC
from scipy.linalg import solve_discrete_lyapunov
from scipy.stats import norm

from numpyro_minibatch import Target


def start_of(points):
    """Starting points in the precision of the run."""
    return jnp.asarray(points, jnp.result_type(float))


def run(kernel, start, *data, num_samples, num_warmup=0, seed=12, fields=()):
    """The sampler, with a chain from each of ``start``, which is a dict for a model."""
    chains = len(next(iter(start.values())) if isinstance(start, dict) else start)
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    if isinstance(start, dict):
        init = {name: start_of(value) for name, value in start.items()}
    else:
        init = start_of(start)
    mcmc.run(random.key(seed), *data, init_params=init, extra_fields=fields)
    return mcmc


def draws_of(mcmc, name=None):
    """Draws, chains x draws x ..., in double precision."""
    found = mcmc.get_samples(group_by_chain=True)
    return np.asarray(found if name is None else found[name], np.float64)


def standardised(values, truth):
    """Errors of the means of ``values``, chains x draws x k, in standard errors.

    Chains are independent, so the scatter of their means gives the standard error.
    """
    per_chain = values.mean(1)
    error = per_chain.std(0, ddof=1) / np.sqrt(len(per_chain))
    return (per_chain.mean(0) - truth) / error


def second_moments(draws, mean, cov):
    """Standardised errors of means, variances and covariances."""
    root = np.linalg.inv(np.linalg.cholesky(cov))
    white = (draws - mean) @ root.T
    i, j = np.triu_indices(len(mean))
    both = np.concatenate([white, white[..., i] * white[..., j]], -1)
    return standardised(both, np.concatenate([np.zeros(len(mean)), i == j]))


# targets written by hand, whose rows have linear terms that sum to zero ---


def noisy_target(log_density, dim, variance=1.0, size=103, width=7, seed=0):
    """A target with gradients of noise ``N(0, variance)`` in each coordinate.

    Row ``i`` is ``c_i . z + log_density(z) / size``, and the ``c_i`` add up to zero.
    Their scale gives the gradient of ``width`` rows out of ``size`` the ``variance``.
    """
    quantiles = norm.ppf((np.arange(size) + 0.5) / size)
    rng = np.random.default_rng(seed)
    c = np.stack([rng.permutation(quantiles) for _ in range(dim)], -1)
    c -= c.mean(0)
    # the shuffles may be correlated, but the noise of the coordinates is not
    c = c @ np.linalg.inv(np.linalg.cholesky(np.cov(c.T).reshape(dim, dim))).T
    c *= np.sqrt(variance * width / (1 - width / size)) / size
    terms = jnp.asarray(c, jnp.result_type(float))

    def log_likelihood(z, i):
        z = jnp.atleast_1d(z)
        return (terms[i] * z).sum(-1) + log_density(z) / size

    return Target(lambda z: jnp.zeros(()), log_likelihood, size)


def double_well(z):
    """Minus the potential of the AMAGOLD paper's figure 1."""
    t = z[..., 0]
    return -((t + 4) * (t + 1) * (t - 1) * (t - 3) / 14 + 0.5)


class Line:
    """A density on a line by quadrature: draws and bins of equal probability."""

    def __init__(self, log_density, low, high, count=400_001):
        self.points = np.linspace(low, high, count)
        log_p = np.asarray(log_density(self.points[:, None]), np.float64)
        p = np.exp(log_p - log_p.max())
        self.weights = p / p.sum()
        self.cdf = np.cumsum(self.weights) - 0.5 * self.weights

    def quantile(self, u):
        return np.interp(u, self.cdf, self.points)

    def draws(self, count, seed=3):
        return self.quantile(np.random.default_rng(seed).random(count))

    def uniform(self, draws):
        """The probability transform: uniform if the draws have this distribution."""
        return np.interp(draws, self.points, self.cdf)

    def symmetric_kl(self, draws, bins=86):
        """The divergence between draws and truth, over bins of equal probability.

        With ``n`` independent draws it is ``(bins - 1) / n`` on average.
        """
        counts, _ = np.histogram(self.uniform(draws), np.linspace(0, 1, bins + 1))
        found = (counts + 0.5) / (counts.sum() + 0.5 * bins)
        return float(((found - 1 / bins) * np.log(found * bins)).sum())


@cache
def double_well_line():
    return Line(double_well, -7.0, 7.0)


# a conjugate model ---

N, PRIOR_SD = 203, 2.5
_rng = np.random.default_rng(5)
SCALE = np.array([[16.0, 0.0], [9.0, 11.0]])  # so that energies have a curvature near 1
NOISE_COV = SCALE @ SCALE.T
Y = np.array([1.0, -0.5]) + _rng.normal(size=(N, 2)) @ SCALE.T
WHITEN = np.linalg.inv(SCALE).T
DATA = (jnp.asarray(Y @ WHITEN, jnp.float32),)


def normal_model(y):
    """Rows with a mean of ``mu``, and coordinates in which their noise is white."""
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD).expand([2]).to_event(1))
    with numpyro.plate("data", N) as idx:
        rows = dist.Normal(mu @ jnp.asarray(WHITEN, y.dtype), 1.0).to_event(1)
        numpyro.sample("obs", rows, obs=y[idx])


class Energy:
    """``T`` times minus the log posterior of :func:`normal_model`, a quadratic.

    The gradient of a batch has the same noise at all positions.
    """

    def __init__(self, temperature, temper_prior=False):
        self.temperature = temperature
        precision = np.linalg.inv(NOISE_COV)
        prior = np.eye(2) / PRIOR_SD**2 * (1.0 if temper_prior else temperature)
        self.curvature = N * precision + prior
        self.mean = np.linalg.solve(self.curvature, precision @ Y.sum(0))
        self.cov = temperature * np.linalg.inv(self.curvature)

    def noise(self, width, fpc=True):
        """The covariance of a gradient of ``width`` rows without replacement."""
        rows = np.cov((Y @ np.linalg.inv(NOISE_COV)).T)
        return N**2 * rows / width * ((1 - width / N) if fpc else 1.0)


# linear schemes on a quadratic potential: their stationary covariance ---


def scheme(name, curvature, friction, h, temperature, noise):
    """One step ``(z, p) -> move @ (z, p) + kick @ gradient noise + N(0, inject)``.

    It is written from the papers, not from the package. It returns ``move``, the
    covariance of all noise, and the matrix that multiplies a gradient's noise.
    """
    d = len(curvature)
    eye, zero = np.eye(d), np.zeros((d, d))
    if name == "sgld":
        move = eye - h * curvature
        return move, 2 * h * temperature * eye + h**2 * noise, h * eye
    drift = np.block([[eye, 0.5 * h * eye], [zero, eye]])
    kick = np.block([[eye, zero], [-h * curvature, eye]])
    momentum = np.concatenate([zero, eye])
    if name == "baoab":
        c = np.exp(-friction * h)
        forget = np.block([[eye, zero], [zero, c * eye]])
        inject = kick @ drift @ momentum * np.sqrt((1 - c**2) * temperature)
        move = kick @ drift @ forget @ drift
        gradient = h * momentum
    elif name == "midpoint":
        a = friction * h / 2
        centre = np.block(
            [[eye, zero], [-h * curvature / (1 + a), (1 - a) / (1 + a) * eye]]
        )
        move = drift @ centre @ drift
        inject = drift @ momentum * np.sqrt(4 * a * temperature) / (1 + a)
        gradient = drift @ momentum * h / (1 + a)
    else:
        new = np.block([[eye, zero], [-h * curvature, (1 - friction * h) * eye]])
        whole = drift @ drift
        move = whole @ new
        inject = whole @ momentum * np.sqrt(2 * friction * h * temperature)
        gradient = whole @ momentum * h
    return move, inject @ inject.T + gradient @ noise @ gradient.T, gradient


def settled(name, curvature, friction, h, temperature, noise):
    """The stationary covariance of a linear scheme, from a discrete Lyapunov
    equation."""
    move, total, _ = scheme(name, curvature, friction, h, temperature, noise)
    assert np.abs(np.linalg.eigvals(move)).max() < 1
    return solve_discrete_lyapunov(move, total)


# a scale: a site with a map to unconstrained coordinates ---

SCALE_SIZE = 40
_y = 1.7 * np.random.default_rng(2).normal(size=SCALE_SIZE)
SCALE_DATA = (jnp.asarray(_y, jnp.float32),)


def scale_model(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", SCALE_SIZE) as i:
        numpyro.sample("y", dist.Normal(0.0, s), obs=y[i])


def tempered_scale(temperature, temper_prior=False, jacobian=1.0, chains=256):
    """The tempered distribution of the scale, and draws of it.

    ``jacobian`` is the power of the map's derivative; values other than 1 are bugs.
    """

    def log_density(s):
        s = s[..., 0]
        rows = -SCALE_SIZE * np.log(s) - 0.5 * (_y @ _y) / s**2
        prior = -0.5 * s**2 / (temperature if temper_prior else 1.0)
        # the density of s itself; that of log s is s times as large
        return prior + rows / temperature + (jacobian - 1.0) * np.log(s)

    line = Line(log_density, 0.02, 12.0)
    return line, line.draws(chains)


def shape_errors(uniform):
    """Standardised errors of four moments of values that should be uniform."""
    values = np.stack([np.cos(np.pi * k * uniform) for k in (1, 2, 3, 4)], -1)
    return standardised(values, 0.0)


# a skewed posterior in two dimensions, by quadrature ---

ROWS = 603
_x = np.column_stack([np.ones(ROWS), np.random.default_rng(7).normal(size=ROWS)])
_p = 1 / (1 + np.exp(-(_x @ [-3.2, 0.7])))
_successes = (np.random.default_rng(8).random(ROWS) < _p).astype(float)
LOGISTIC_DATA = jnp.asarray(_x, jnp.float32), jnp.asarray(_successes, jnp.float32)


def logistic_model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("obs", dist.Bernoulli(logits=x[idx] @ beta), obs=y[idx])


class Plane:
    """A density in two dimensions on a grid: its draws, and the errors of other
    draws."""

    def __init__(self, log_density, center, root, width=7.0, count=161):
        axis = np.linspace(-width, width, count)
        white = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
        self.points, self.step = center + white @ root, (axis[1] - axis[0]) * root
        log_p = log_density(self.points)
        p = np.exp(log_p - log_p.max())
        self.weights = p / p.sum()
        self.mean = self.weights @ self.points
        away = self.points - self.mean
        self.root = np.linalg.inv(np.linalg.cholesky((away.T * self.weights) @ away)).T

    def draws(self, count, seed=11):
        rng = np.random.default_rng(seed)
        chosen = rng.choice(len(self.weights), count, p=self.weights)
        return self.points[chosen] + (rng.random((count, 2)) - 0.5) @ self.step

    def features(self, points):
        """Means, second and third moments, and smoothed indicators of half planes.

        A sharp edge would cut through cells of the grid and make the true value
        inexact.
        """
        w = (points - self.mean) @ self.root
        parts = [w, w**2, w[..., :1] * w[..., 1:], w**3, np.tanh(4 * (w - 0.5))]
        return np.concatenate(parts, -1)

    def z_scores(self, draws):
        truth = self.weights @ self.features(self.points)
        return standardised(self.features(draws), truth)


@cache
def logistic_plane(temperature=1.0):
    """The posterior of the logistic regression with a tempered likelihood."""
    weight = 1.0 / temperature

    def log_density(points):
        parts = []
        for part in np.array_split(points, 64):
            logits = part @ _x.T
            rows = _successes * logits - np.logaddexp(0, logits)
            parts.append(weight * rows.sum(1) - (part**2).sum(1) / 18)
        return np.concatenate(parts)

    beta = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-_x @ beta))
        hessian = weight * (_x.T * (p * (1 - p))) @ _x + np.eye(2) / 9
        gradient = weight * _x.T @ (_successes - p) - beta / 9
        beta = beta + np.linalg.solve(hessian, gradient)
    root = np.linalg.cholesky(np.linalg.inv(hessian)).T
    return Plane(log_density, beta, 1.2 * root)
