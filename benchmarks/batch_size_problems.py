"""The two problems of Seita et al. as the batch-size benchmark samples them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints
from numpyro.examples import datasets

from numpyro_minibatch.datasets import DATA_VARIABLE

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tied_means import PRIOR_SD, VARIANCE, Grid
from tied_means import model as mixture_model

Position = dict[str, Array]


class Problem(NamedTuple):
    """A posterior, the paper's settings for it, and the judge of the draws."""

    title: str
    model: Callable[..., None]
    data: tuple[Array, ...]
    temperature: float
    step: float
    slice: int  # rows of a pilot, of an increment and of a slice
    rows: Callable[[Position], Array]  # log likelihood of each row, up to a constant
    log_prior: Callable[[Position], Any]
    bound: Callable[[Position, Position], Array]
    first_batch: int  # of the confidence sampler
    start: Callable[[int], Position]
    judge: Callable[[dict[str, np.ndarray]], list[str]]
    judged: list[str]
    paper: dict[str, str]
    full_draws: int  # of the chain that reads all rows


def mixture() -> Problem:
    """The million-row mixture of table 1, started in the posterior."""
    size, temperature = 1_000_000, 1e4
    which, noise = random.split(random.key(0))
    x = 1.0 * random.bernoulli(which, 0.5, (size,))
    x = x + VARIANCE**0.5 * random.normal(noise, (size,))
    grid = Grid(np.asarray(x, float), temperature, 1000)
    marginals = {"theta1": grid.density.sum(1), "theta2": grid.density.sum(0)}
    ends = float(x.min()), float(x.max())
    points = jnp.linspace(*ends, 2049)

    def rows(z: Position, x: Array = x) -> Array:
        means = z["theta1"], z["theta1"] + z["theta2"]
        return jnp.logaddexp(*(-0.5 * (x - m) ** 2 / VARIANCE for m in means))

    def log_prior(z: Position) -> Array:
        return sum(-0.5 * (z[k] / sd) ** 2 for k, sd in zip(z, PRIOR_SD, strict=True))

    def bound(z: Position, new: Position) -> Array:
        # the largest difference on a grid, and how much more lies between its points
        slope = abs(new["theta1"] - z["theta1"]) + abs(z["theta2"]) + abs(new["theta2"])
        between = (points[1] - points[0]) / 2 * slope / VARIANCE
        return jnp.abs(rows(new, points) - rows(z, points)).max() + between

    def judge(draws: dict[str, np.ndarray]) -> list[str]:
        """Errors of mean and sd, in sds, with standard errors from the trials."""
        cells = []
        for name, weights in marginals.items():
            values = getattr(grid, name)
            mean = weights @ values
            sd = np.sqrt(weights @ (values - mean) ** 2)
            off = (draws[name] - mean) / sd
            root = np.sqrt((off**2).mean())
            cells.append(plus_minus(off.mean(1), "+.2f", of_mean=True))
            error = (off**2).mean(1).std(ddof=1) / np.sqrt(len(off)) / (2 * root)
            cells.append(f"{root - 1:+.2f} ± {error:.2f}")
        return cells

    return Problem(
        f"Mixture: {size:,} rows, K = {temperature:g}, steps of sd 0.15",
        partial(mixture_model, batch_size=50),
        (x,),
        temperature,
        0.15,
        50,
        rows,
        log_prior,
        bound,
        500,
        lambda trials: grid.draw(random.key(1), trials),
        judge,
        ["mean θ1", "sd θ1", "mean θ2", "sd θ2"],
        {
            "MHMinibatch, sequential": "182.3 ± 11.4",
            "AusterityMH, conservative": "13540.5 ± 1521.4",
            "ConfidenceMH": "65758.9 ± 3222.6",
        },
        400,
    )


def ones_and_sevens() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Images and labels (7: 1.0, 1: 0.0), training and test."""
    named = os.environ.get(DATA_VARIABLE)
    if named and (Path(named) / "mnist").is_dir():
        datasets.DATA_DIR = str(Path(named) / "mnist")

    def load(split: str) -> tuple[Array, Array]:
        init, batch = datasets.load_dataset(datasets.MNIST, split=split, shuffle=False)
        images, labels = map(np.asarray, batch(0, init()[1]))
        kept = np.isin(labels, (1, 7))
        x = images[kept].reshape(kept.sum(), -1)
        return jnp.asarray(x), jnp.asarray(labels[kept] == 7, jnp.float32)

    return load("train"), load("test")


def mnist() -> Problem:
    """Logistic regression of ones against sevens, table 2, started at zero."""
    (x, y), (x_test, y_test) = ones_and_sevens()

    def rows(z: Position) -> Array:
        logits = x @ z["beta"]
        return y * logits - jax.nn.softplus(logits)

    @jax.jit
    def right(beta: Array) -> tuple[Array, Array]:
        """Accuracy of each draw, and of their averaged probability."""
        logits = beta @ x_test.T
        averaged = jax.nn.sigmoid(logits).mean(0)
        return ((logits > 0) == y_test).mean(1), ((averaged > 0.5) == y_test).mean()

    def judge(draws: dict[str, np.ndarray]) -> list[str]:
        beta = draws["beta"]
        shares = [right(chain[len(chain) // 2 :]) for chain in beta]
        single, averaged = zip(*shares, strict=True)
        return [
            plus_minus(100 * np.mean(single, 1), ".2f"),
            plus_minus(100 * np.array(averaged), ".2f"),
        ]

    return Problem(
        f"MNIST, 1 against 7: {len(y):,} rows, {x.shape[1]} pixels, K = 100, steps of "
        "sd 0.05",
        partial(logistic, flat(x.shape[1])),
        (x, y),
        100.0,
        0.05,
        100,
        rows,
        lambda z: 0.0,
        lambda z, new: jnp.abs(rows(new) - rows(z)).max(),
        100,
        lambda trials: {"beta": jnp.zeros((trials, x.shape[1]))},
        judge,
        ["% right, one draw", "averaged"],
        {
            "MHMinibatch, sequential": "125.4 ± 9.2",
            "AusterityMH, non-conservative": "973.8 ± 49.8",
            "AusterityMH, conservative": "1924.3 ± 52.4",
            "ConfidenceMH": "10783.4 ± 78.9",
        },
        3000,
    )


def logistic(prior: Any, x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", prior)
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def flat(dim: int) -> Any:
    return dist.ImproperUniform(constraints.real_vector, (), (dim,))


def normal(dim: int) -> Any:
    return dist.Normal(0, 1).expand([dim]).to_event(1)


def principal(x: Array, number: int) -> Array:
    """The principal components of largest variance, shape ``(rows, number)``."""
    centred = np.asarray(x, float) - np.mean(x, 0, dtype=float)
    _, basis = np.linalg.eigh(centred.T @ centred)
    return jnp.asarray(centred @ basis[:, -number:], jnp.float32)


def plus_minus(values: Any, form: str, of_mean: bool = False) -> str:
    """Mean over trials and their sd, or the standard error of the mean."""
    spread = np.std(values, ddof=1) / (np.sqrt(len(values)) if of_mean else 1)
    return f"{np.mean(values):{form}} ± {spread:{form.strip('+')}}"
