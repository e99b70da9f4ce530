"""Posteriors with several modes whose masses are known.

Every case has a model, simulated rows, a rule that says to which mode a draw belongs,
and the masses: by quadrature in double precision on all rows, or by symmetry.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

__all__ = ["CASES", "PERIODS", "Case", "Nights", "Truth"]

Draws = dict[str, np.ndarray]


class Truth(NamedTuple):
    """The known properties of a posterior.

    :param masses: of each mode, in the order of the labels.
    :param moments: mean and standard deviation of some quantities, by name.
    """

    masses: list[float]
    moments: dict[str, tuple[float, float]]


class Case(NamedTuple):
    """A posterior with several modes.

    :param words: its description in a table.
    :param rows: the number of rows.
    :param modes: the number of modes.
    :param model: the model, a function of the data.
    :param data: the data, by number of rows.
    :param truth: the masses, by the data, and moments if they are known.
    :param label: the mode of each draw.
    :param known: quantities whose moments can be compared, by the draws.
    """

    words: str
    rows: int
    modes: int
    model: Callable[..., None]
    data: Callable[[int], tuple[np.ndarray, ...]]
    truth: Callable[..., Truth]
    label: Callable[[Draws], np.ndarray]
    known: Callable[[Draws], Draws]


def moments(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of values with these weights, which sum to one."""
    mean = float(weights @ values)
    return mean, float(np.sqrt(weights @ np.square(values - mean)))


# tied means ----------------------------------------------------------------------


def tied(x: Any) -> None:
    """The mixture of the MINT paper, section 4.1."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    first = numpyro.sample("first", dist.Normal(0, 10**0.5))
    second = numpyro.sample("second", dist.Normal(0, 1))
    means = jnp.stack([first, first + second])
    mixture = dist.MixtureSameFamily(
        dist.Categorical(jnp.full(2, 0.5)), dist.Normal(means, 2**0.5)
    )
    with numpyro.plate("data", len(x)) as i:
        numpyro.sample("x", mixture, obs=x[i])


def tied_data(size: int) -> tuple[np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 2, size) + 2**0.5 * rng.normal(size=size)
    return (x.astype(np.float32),)


def tied_truth(x: np.ndarray, spacing: float = 1.0) -> Truth:
    """A grid of whitened coordinates about each mode, six standard deviations wide.

    The trapezoidal rule with a spacing of one standard deviation is exact to 1e-8 for
    a normal density.
    """
    rows = x.astype(float)

    def log_density(first: float, second: float) -> float:
        # log(exp(-(x - a)^2 / 4) + exp(-(x - b)^2 / 4)) without overflow
        a, b = first, first + second
        half = 0.25 * (b - a) * (rows - 0.5 * (a + b))
        middle = -0.25 * (np.square(rows - 0.5 * (a + b)) + 0.25 * (a - b) ** 2)
        likelihood = (middle + np.logaddexp(half, -half)).sum()
        return float(likelihood - first**2 / 20 - second**2 / 2)

    grids = [_grid(log_density, start, spacing) for start in ([0.0, 1.0], [1.0, -1.0])]
    top = max(logs.max() for _, logs, _ in grids)
    weights = [np.exp(logs - top) * scale for _, logs, scale in grids]
    total = sum(w.sum() for w in weights)
    second = np.concatenate([points[:, 1] for points, _, _ in grids])
    every = np.concatenate(weights) / total
    return Truth(
        [float(w.sum() / total) for w in weights],
        {"|second|": moments(np.abs(second), every)},
    )


def _grid(
    log_density: Callable[..., float], start: list[float], spacing: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Points about a mode, their log densities, and the volume of a cell.

    :param log_density: of two numbers.
    :param start: a point near the mode.
    :param spacing: of the grid, in standard deviations.
    """
    at, step = np.array(start), 1e-3
    for _ in range(6):  # Newton steps by central differences
        gradient, hessian = _derivatives(log_density, at, step)
        at = at - np.linalg.solve(hessian, gradient)
    _, hessian = _derivatives(log_density, at, step)
    root = np.linalg.cholesky(np.linalg.inv(-hessian))
    axis = np.arange(-6.0, 6.0 + spacing / 2, spacing)
    white = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    points = at + white @ root.T
    logs = np.array([log_density(*point) for point in points])
    return points, logs, float(np.prod(np.diag(root))) * spacing**2


def _derivatives(
    fn: Callable[..., float], at: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    offsets = step * np.array([[1, 0], [0, 1], [1, 1], [1, -1]])
    up, down = (np.array([fn(*(at + s * o)) for o in offsets]) for s in (1, -1))
    middle = fn(*at)
    gradient = (up[:2] - down[:2]) / (2 * step)
    second = (up - 2 * middle + down) / step**2
    mixed = (second[2] - second[3]) / 4
    return gradient, np.array([[second[0], mixed], [mixed, second[1]]])


# labels of a mixture -------------------------------------------------------------

ORDERS = list(permutations(range(3)))


def labels(x: Any) -> None:
    """Three components whose means, standard deviations and weights are sampled."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    mean = numpyro.sample("mean", dist.Normal(0, 5).expand([3]).to_event(1))
    sd = numpyro.sample("sd", dist.LogNormal(0, 0.5).expand([3]).to_event(1))
    weight = numpyro.sample("weight", dist.Dirichlet(jnp.ones(3)))
    mixture = dist.MixtureSameFamily(dist.Categorical(weight), dist.Normal(mean, sd))
    with numpyro.plate("data", len(x)) as i:
        numpyro.sample("x", mixture, obs=x[i])


def labels_data(size: int) -> tuple[np.ndarray]:
    rng = np.random.default_rng(0)
    which = rng.choice(3, size, p=[0.5, 0.3, 0.2])
    x = np.array([-3.0, 0.0, 3.0])[which]
    x = x + np.array([0.8, 0.6, 1.0])[which] * rng.normal(size=size)
    return (x.astype(np.float32),)


def labels_truth(x: np.ndarray) -> Truth:
    """Prior and likelihood do not change if the components are exchanged."""
    return Truth([1 / 6] * 6, {})


def order_of(draws: Draws) -> np.ndarray:
    """The number of the labelling of each draw."""
    order = np.argsort(draws["mean"], axis=-1)
    codes = np.array([a * 9 + b * 3 + c for a, b, c in ORDERS])
    return np.searchsorted(codes, order @ np.array([9, 3, 1]))


def in_order(draws: Draws) -> Draws:
    """All parameters with the components in the order of their means."""
    order = np.argsort(draws["mean"], axis=-1)
    return {
        f"{name}[{k}]": np.take_along_axis(draws[name], order, -1)[..., k]
        for name in ("mean", "sd", "weight")
        for k in range(3)
    }


# periods -------------------------------------------------------------------------


class Nights(NamedTuple):
    """A weak wave, measured on a few nights at nearly the same hour.

    A frequency ``f`` (cycles per day) and the frequencies ``k + f`` and ``k - f`` go
    through the same values at whole days. The spread of the hours of a night is all
    that tells them apart, and fewer hours leave a posterior with a mode at each.

    :param nights: number of nights.
    :param spread: standard deviation of the times of a night, in days.
    :param highest: the prior of the frequency is uniform between zero and this.
    :param frequency: the true frequency of the data.
    """

    nights: int
    spread: float
    highest: float
    frequency: float = 0.3
    gain: float = 200.0  # log likelihood ratio of the wave to no wave, in nats
    prior_sd: float = 0.5  # for the coefficients of sine and cosine

    def model(self, t: Any, y: Any) -> None:
        """Sine and cosine of an unknown frequency, and noise of variance one."""
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as dist

        frequency = numpyro.sample("frequency", dist.Uniform(0, self.highest))
        sine = numpyro.sample("sine", dist.Normal(0, self.prior_sd))
        cosine = numpyro.sample("cosine", dist.Normal(0, self.prior_sd))
        with numpyro.plate("data", len(y)) as i:
            phase = 2 * jnp.pi * frequency * t[i]
            wave = sine * jnp.sin(phase) + cosine * jnp.cos(phase)
            numpyro.sample("y", dist.Normal(wave, 1.0), obs=y[i])

    def data(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Times about the middle of the campaign, and measurements."""
        rng = np.random.default_rng(0)
        night = rng.integers(self.nights, size=size) - (self.nights - 1) // 2
        t = night + self.spread * rng.normal(size=size)
        amplitude = 2 * np.sqrt(self.gain / size)
        y = amplitude * np.sin(2 * np.pi * self.frequency * t + 0.5)
        y = y + rng.normal(size=size)
        return t.astype(np.float32), y.astype(np.float32)

    @property
    def aliases(self) -> np.ndarray:
        """All frequencies of the prior that agree at whole days, sorted."""
        k = np.arange(np.ceil(self.highest) + 1)
        found = np.sort(np.concatenate([k + self.frequency, k - self.frequency]))
        return found[(found > 0) & (found < self.highest)]

    def log_evidence(self, t: np.ndarray, y: np.ndarray, frequency: float) -> float:
        """The log density of a frequency: the two coefficients are integrated out."""
        phase = 2 * np.pi * frequency * t
        waves = np.stack([np.sin(phase), np.cos(phase)])
        precision = waves @ waves.T + np.eye(2) / self.prior_sd**2
        slope = waves @ y
        fit = 0.5 * slope @ np.linalg.solve(precision, slope)
        return float(fit - 0.5 * np.linalg.slogdet(precision)[1])

    def density(
        self, t: np.ndarray, y: np.ndarray, points: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """A grid of all frequencies, and weights that sum to one.

        :param points: of the grid; by default three to a standard deviation.
        """
        t, y = t.astype(float), y.astype(float)
        # the information of the data on the frequency, by its closed form
        sd = np.sqrt(3 / self.gain) / (2 * np.pi * self.nights)
        points = points or int(3 * self.highest / sd)
        grid = (np.arange(points) + 0.5) * self.highest / points
        logs = np.array([self.log_evidence(t, y, f) for f in grid])
        weights = np.exp(logs - logs.max())
        return grid, weights / weights.sum()

    def truth(self, t: np.ndarray, y: np.ndarray) -> Truth:
        """By the trapezoidal rule over the frequency alone."""
        grid, weights = self.density(t, y)
        which = self.label({"frequency": grid})
        masses = np.bincount(which, weights, len(self.aliases))
        known = {"|f - alias|": moments(self._away(grid), weights)}
        return Truth(masses.tolist(), known)

    def label(self, draws: Draws) -> np.ndarray:
        """The number of the nearest alias."""
        middles = 0.5 * (self.aliases[1:] + self.aliases[:-1])
        return np.searchsorted(middles, draws["frequency"])

    def known(self, draws: Draws) -> Draws:
        return {"|f - alias|": self._away(draws["frequency"])}

    def _away(self, frequency: np.ndarray) -> np.ndarray:
        return np.abs(frequency - self.aliases[self.label({"frequency": frequency})])


# the flips of sign with which the search copies modes do not map 0.3 to 0.7 here
PERIODS = Nights(nights=10, spread=0.01, highest=0.8)
TEN = Nights(nights=5, spread=0.003, highest=5.0)

# a light mode --------------------------------------------------------------------


def light(x: Any, z: Any, y: Any) -> None:
    """A squared coefficient, whose prior favours one sign; the other is not normal."""
    import numpyro
    import numpyro.distributions as dist

    a = numpyro.sample("a", dist.Normal(1.375, 1))
    b = numpyro.sample("b", dist.StudentT(3.0, 0.0, 0.5))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("obs", dist.Normal(a**2 * x[i] + b * z[i], 1.0), obs=y[i])


def light_data(size: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=size)
    # a column that says little about its coefficient, whose prior then matters
    z = np.where(np.arange(size) < 5, 0.8, 0.0)
    y = 2.0 * x + z + rng.normal(size=size)
    return tuple(v.astype(np.float32) for v in (x, z, y))


def light_truth(x: np.ndarray, z: np.ndarray, y: np.ndarray) -> Truth:
    """A grid: the likelihood depends on sums over the rows."""
    x, z, y = (v.astype(float) for v in (x, z, y))
    middle = np.sqrt((x @ y) / (x @ x))
    reach = 8 / (2 * middle * np.sqrt(x @ x))
    one = middle + np.linspace(-reach, reach, 401)
    a, b = np.concatenate([-one[::-1], one]), np.linspace(-6.0, 7.0, 1301)
    s, t = a[:, None] ** 2, b[None]
    square = s**2 * (x @ x) + t**2 * (z @ z) + 2 * s * t * (x @ z)
    log = s * (x @ y) + t * (z @ y) - 0.5 * square
    log = log - 0.5 * (a[:, None] - 1.375) ** 2 - 2 * np.log1p((t / 0.5) ** 2 / 3)
    weights = np.exp(log - log.max())
    weights /= weights.sum()
    masses = [weights[a > 0].sum(), weights[a < 0].sum()]
    known = {
        "|a|": moments(np.abs(a), weights.sum(1)),
        "b": moments(b, weights.sum(0)),
    }
    return Truth([float(mass) for mass in masses], known)


CASES = {
    "tied": Case(
        "tied means of the MINT paper",
        1_000_000,
        2,
        tied,
        tied_data,
        tied_truth,
        lambda draws: (draws["second"] < 0).astype(int),
        lambda draws: {"|second|": np.abs(draws["second"])},
    ),
    "labels": Case(
        "mixture of 3 components, 6 labellings",
        1_000_000,
        6,
        labels,
        labels_data,
        labels_truth,
        order_of,
        in_order,
    ),
    "periods": Case(
        "a wave with one of two periods",
        100_000,
        2,
        PERIODS.model,
        PERIODS.data,
        PERIODS.truth,
        PERIODS.label,
        PERIODS.known,
    ),
    "light": Case(
        "a squared coefficient",
        100_000,
        2,
        light,
        light_data,
        light_truth,
        lambda draws: (draws["a"] < 0).astype(int),
        lambda draws: {"|a|": np.abs(draws["a"]), "b": draws["b"]},
    ),
    "ten": Case(
        "a wave with one of ten periods",
        100_000,
        10,
        TEN.model,
        TEN.data,
        TEN.truth,
        TEN.label,
        TEN.known,
    ),
}
