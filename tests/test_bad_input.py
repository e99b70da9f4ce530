"""All mistakes of users in one table, with the required content of the messages.

Messages must come before anything compiles.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.infer import MCMC, init_to_uniform, init_to_value

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    MINTEE,
    SGHMC,
    SGLD,
    SGMCMC,
    SGNHT,
    AusterityMH,
    ConfidenceMH,
    Cyclical,
    CyclicalMINT,
    CyclicalSGHMC,
    CyclicalSGLD,
    MHMinibatch,
    MinibatchMH,
    Target,
    accept,
    batch,
    dynamics,
    estimate,
    preconditioner,
    proposal,
    schedule,
)
from numpyro_minibatch._model.preflight import inspect_model

N, MANY = 40, 5_000
KEY = jax.random.key(0)
# NumPy, so that making the data compiles nothing
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2)).astype(np.float32)
Y = RNG.normal(size=N).astype(np.float32)
GROUP = np.arange(N, dtype=np.int32) % 3
JAX_GROUP = jnp.asarray(GROUP)
BIG = np.zeros(MANY, np.float32)


# models ------------------------------------------------------------------------------


def slope() -> Any:
    return numpyro.sample("slope", dist.Normal(0.0, 1.0))


def coefficients(size: int = 2) -> Any:
    return numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([size]).to_event(1))


def regression(X: Any, y: Any, subsample_size: int | None = 10) -> None:
    beta = coefficients()
    with numpyro.plate("data", len(y), subsample_size=subsample_size) as idx:
        numpyro.sample("obs", dist.Normal(X[idx] @ beta, 1.0), obs=y[idx])


def full_plate(X: Any, y: Any) -> None:
    regression(X, y, None)


def no_plate(X: Any, y: Any) -> None:
    means = jnp.asarray(Y) * slope()  # of data that are no argument
    numpyro.sample("obs", dist.Normal(means, 1.0), obs=y)


def data_left_out(X: Any, y: Any = None) -> None:
    with numpyro.plate("data", N):
        numpyro.sample("obs", dist.Normal(slope(), 1.0), obs=y)


def plate_of_latents(X: Any, y: Any) -> None:
    with numpyro.plate("groups", 5):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("obs", dist.Normal(mean.sum(), 1.0), obs=y[0])


def two_subsampled(X: Any, y: Any) -> None:
    mean = slope()
    with (
        numpyro.plate("rows", N, 10, dim=-2) as i,
        numpyro.plate("columns", 2, dim=-1) as j,
    ):
        numpyro.sample("obs", dist.Normal(mean, 1.0), obs=X[i][:, j])


def twice_the_same_plate(X: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("data", 50, subsample_size=10) as idx:
        numpyro.sample("obs", dist.Normal(beta, 1), obs=y[idx])
    with numpyro.plate("data", 30, subsample_size=5) as idx:
        numpyro.sample("more", dist.Normal(beta, 1), obs=y[idx])


def local_latent(X: Any, y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, 10) as idx:
        effect = numpyro.sample("effect", dist.Normal(mean, 1.0))
        numpyro.sample("obs", dist.Normal(effect, 1.0), obs=y[idx])


def partly_observed(X: Any, y: Any) -> None:
    mean = slope()
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y[idx], obs_mask=y[idx] > 0)


def discrete(X: Any, y: Any) -> None:
    which = numpyro.sample("which", dist.Bernoulli(0.5))
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(which, 1.0), obs=y[idx])


def nothing_observed(X: Any, y: Any) -> None:
    mean = slope()
    with numpyro.plate("data", N, 10) as idx:
        rows = y[idx]
    numpyro.sample("obs", dist.Normal(mean, 1.0), obs=rows)


def nothing_latent(X: Any, y: Any) -> None:
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(X[idx, 0], 1.0), obs=y[idx])


def lone_obs_not_indexed(X: Any, y: Any) -> None:
    mean = slope()
    with numpyro.plate("data", N, 10):
        numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y)


def covariate_not_indexed(X: Any, y: Any) -> None:
    mean = slope()
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(X[:, 0] * mean, 1.0), obs=y[idx])


def neither_indexed(X: Any = None, y: Any = None) -> None:
    mean = slope()
    with numpyro.plate("data", len(y)):
        numpyro.sample("obs", dist.Normal(X[:, 0] * mean, 1.0), obs=y)


def factor_not_indexed(X: Any, y: Any) -> None:
    mean = slope()
    with numpyro.plate("data", N, 10):
        numpyro.factor("obs", dist.Normal(mean, 1.0).log_prob(y))


def plate_too_long(X: Any, y: Any) -> None:
    mean = slope()
    with numpyro.plate("data", 1_000, 10) as idx:
        numpyro.sample("obs", dist.Normal(X[idx, 0] * mean, 1.0), obs=y[idx])


def subsample_too_short(X: Any, y: Any) -> None:
    mean = slope()
    with numpyro.plate("data", N, 10):
        rows = numpyro.subsample(X, event_dim=1)[:, 0]
        y_rows = numpyro.subsample(y, event_dim=0)
        numpyro.sample("obs", dist.Normal(rows * mean, 1.0), obs=y_rows)


def column_of_means(X: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(X[idx] @ beta, 1.0), obs=y[idx])


def plate_in_scan(X: Any, y: Any, subsample_size: int | None = None) -> None:
    mean = slope()

    def body(carry: Any, rows: Any) -> Any:
        with numpyro.plate("data", N, subsample_size) as idx:
            numpyro.sample("obs", dist.Normal(mean, 1.0), obs=rows[idx])
        return carry, None

    scan(body, 0, jnp.stack([y, y]))


def subsampled_in_scan_too(X: Any, y: Any) -> None:
    regression(X, y)

    def body(carry: Any, rows: Any) -> Any:
        with numpyro.plate("days", N, 5) as idx:
            numpyro.sample("other", dist.Normal(0.0, 1.0), obs=rows[idx])
        return carry, None

    scan(body, 0, jnp.stack([y, y]))


def batch_normalised(X: Any, y: Any) -> None:
    nn = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import flax_module

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))[:, 0]

    net = flax_module("net", Net(), input_shape=(10, 2), mutable=["batch_stats"])
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(net(X[idx]), scale), obs=y[idx])


def two_candidates(X: Any, y: Any) -> None:
    mean = slope()
    for name in ("men", "women"):
        with numpyro.plate(name, N) as idx:
            numpyro.sample(f"obs_{name}", dist.Normal(mean, 1.0), obs=y[idx])


def counts_its_groups(group: Any, y: Any) -> None:
    mean = coefficients(int(jnp.max(group)) + 1)
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(mean[group[idx]], 1.0), obs=y[idx])


def selects_rows(X: Any, y: Any) -> None:
    mean = slope()
    y = y[y > 0]
    with numpyro.plate("data", len(y), 10) as idx:
        numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y[idx])


def closes_over_numpy() -> None:
    regression(X, Y)


def forgot_the_observations(X: Any, y: Any = None) -> None:
    beta = coefficients()
    with numpyro.plate("data", len(X), 10) as idx:
        rows = None if y is None else y[idx]
        numpyro.sample("obs", dist.Normal(X[idx] @ beta, 1.0), obs=rows)


def duplicate_site(X: Any, y: Any) -> None:
    slope()
    slope()


def impossible_prior(X: Any, y: Any) -> None:
    regression(X, y)
    numpyro.factor("never", -jnp.inf)


def bounded(X: Any, y: Any) -> None:
    scale = numpyro.sample("scale", dist.Uniform(0.0, 1.0))
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample("obs", dist.Normal(0.0, scale), obs=y[idx])


def positive_data(X: Any, y: Any) -> None:
    rate = numpyro.sample("rate", dist.HalfNormal(1.0))
    with numpyro.plate("data", N, 10) as idx:
        numpyro.sample(
            "obs", dist.Exponential(rate, validate_args=False), obs=jnp.log(y[idx])
        )


def masked(X: Any, y: Any) -> None:
    beta = coefficients()
    with numpyro.plate("data", N, 10) as idx:
        rows = y[idx]
        with handlers.mask(mask=~jnp.isnan(rows)):
            numpyro.sample("obs", dist.Normal(X[idx] @ beta, 1.0), obs=rows)


# targets written by hand -------------------------------------------------------------


def target(
    log_likelihood: Callable | None = None, sizes: Any = N, y: Any = Y
) -> Target:
    def by_row(z: Any, i: Any) -> Any:
        return -0.5 * (jnp.asarray(y)[i] - z) ** 2

    return Target(lambda z: -0.5 * z**2, log_likelihood or by_row, sizes)


# the table ---------------------------------------------------------------------------


class Case(NamedTuple):
    """One mistake.

    :param name: what is wrong.
    :param make: makes the mistake.
    :param error: the exact type of the error.
    :param says: what the message must contain: what was received, what to write.
    :param compiles: what may be compiled before the mistake is found: nothing, the
        model's initial ``"parameters"``, or its ``"start"``.
    """

    name: str
    make: Callable[[], object]
    error: type[Exception]
    says: tuple[str, ...]
    compiles: str = "nothing"


def start(
    kernel: MinibatchMH, *args: Any, init_params: Any = None, **kwargs: Any
) -> Any:
    return kernel.init(KEY, 10, init_params, args, kwargs)


def run(model: Callable, *args: Any, init_params: Any = None, **settings: Any) -> Any:
    """Start MINT on a model, by default with the data of all models above."""
    data = args or (X, Y)
    kernel = MINT(model, **{"temperature": 1.0, **settings})
    return start(kernel, *data, init_params=init_params)


def refuse(
    name: str,
    make: Callable[[], object],
    error: type[Exception],
    *says: str,
    compiles: str = "nothing",
) -> Case:
    return Case(name, make, error, says, compiles)


INDEXED = ("do not follow the indices of its plate", "with numpyro.plate(", "y[idx]")
SUBSAMPLED = ("needs a data plate", "batch_size=")


def with_nan(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[7] = np.nan
    return array


MODELS = [
    refuse(
        "no plate, and data that are no arguments",
        lambda: run(no_plate, batch_size=10),
        ValueError,
        "'obs' has 40 rows and is in no plate",
        "pass all data as arguments of the model",
        "with numpyro.plate(",
    ),
    refuse(
        "no plate that is subsampled",
        lambda: run(full_plate),
        ValueError,
        "a batch size for plate 'data', which has 40 rows",
        "batch_size={'data': 38}",
        "subsample_size",
        'control_variate="taylor2"',
    ),
    refuse(
        "an empty batch_size",
        lambda: run(full_plate, batch_size={}),
        ValueError,
        "a batch size for plate 'data', which has 40 rows",
        "batch_size={'data': 38}",
    ),
    refuse(
        "no plate that can be subsampled",
        lambda: run(plate_of_latents, batch_size=2),
        ValueError,
        *SUBSAMPLED,
        "'groups' (5 rows)",
    ),
    refuse(
        "a site in two subsampled plates",
        lambda: run(two_subsampled, batch_size={"rows": 10, "columns": 2}),
        ValueError,
        "'obs' is inside two subsampled plates",
        "'rows'",
        "'columns'",
        "Subsample one of them",
    ),
    refuse(
        "a latent site with a value per row",
        lambda: run(local_latent),
        ValueError,
        "'effect'",
        "'data'",
        "marginalize",
    ),
    refuse(
        "obs_mask",
        lambda: run(partly_observed),
        ValueError,
        "'obs_unobserved'",
        "obs_mask",
        "numpyro.handlers.mask",
    ),
    refuse(
        "observations left out",
        lambda: run(forgot_the_observations, X),
        ValueError,
        "'obs' is inside the subsampled plate 'data'",
        "obs=None",
    ),
    refuse(
        "nothing observed, in a plate without a size of its batches",
        lambda: run(data_left_out, X, batch_size=10),
        ValueError,
        "observes nothing",
        "'obs'",
        "mcmc.run(key, X, y)",
    ),
    refuse(
        "a discrete latent site",
        lambda: run(discrete),
        ValueError,
        "'which'",
        "discrete",
        "Write a continuous form of it",
    ),
    refuse(
        "a subsampled plate without an observed site",
        lambda: run(nothing_observed),
        ValueError,
        "'data' has no observed site",
        "Put the observations inside it",
    ),
    refuse("no latent site", lambda: run(nothing_latent), ValueError, "no latent site"),
    refuse(
        "the only observations not indexed",
        lambda: run(lone_obs_not_indexed),
        ValueError,
        *INDEXED,
        "'obs' has 40 rows of data",
    ),
    refuse(
        "a covariate not indexed",
        lambda: run(covariate_not_indexed),
        ValueError,
        *INDEXED,
        "with all 40 rows the model runs, with 10 it fails",
    ),
    refuse(
        "a factor not indexed", lambda: run(factor_not_indexed), ValueError, *INDEXED
    ),
    refuse(
        "fewer rows of X than of y",
        lambda: run(regression, X[:30], Y),
        ValueError,
        "shape (30, 2)",
        "'data', which has 40 rows",
        "same length",
    ),
    refuse(
        "a plate longer than its data",
        lambda: run(plate_too_long),
        ValueError,
        "shape (40, 2)",
        "'data', which has 1000 rows",
        "same length",
    ),
    refuse(
        "fewer rows of X than of y, numpyro.subsample",
        lambda: run(subsample_too_short, X[:30], Y),
        ValueError,
        "(30, 2)",
        "numpyro.plate(data, 40",
    ),
    refuse(
        "observations in a column",
        lambda: run(regression, X, Y[:, None]),
        ValueError,
        "'obs' has shape (10, 10)",
        "y[idx][:, 0]",
    ),
    refuse(
        "means in a column",
        lambda: run(column_of_means),
        ValueError,
        "'obs' has shape (10, 10)",
        "(X[idx] @ beta)[:, 0]",
    ),
    refuse(
        "mutable state",
        lambda: run(batch_normalised),
        ValueError,
        "mutable state",
        "'net$state'",
        "stateless layer",
        compiles="parameters",
    ),
    refuse(
        "a plate inside scan",
        lambda: run(plate_in_scan, batch_size=10),
        ValueError,
        "'data'",
        "inside a scan",
        "Move the plate",
    ),
    refuse(
        "a plate inside scan, by name",
        lambda: run(plate_in_scan, batch_size={"data": 10}),
        ValueError,
        "'data'",
        "inside a scan",
        "Move the plate",
    ),
    refuse(
        "a subsampled plate inside scan",
        lambda: run(plate_in_scan, X, Y, 10),
        ValueError,
        "'data'",
        "inside a scan",
        "Move the plate",
    ),
    refuse(
        "a second subsampled plate inside scan",
        lambda: run(subsampled_in_scan_too),
        ValueError,
        "'days'",
        "inside a scan",
        "without a subsample_size",
    ),
    refuse(
        "no rows",
        lambda: run(regression, X[:0], Y[:0]),
        ValueError,
        "MINT cannot run the model",
        "size of plate should be positive",
    ),
    refuse(
        "two sites of one name",
        lambda: run(duplicate_site),
        ValueError,
        "unique names",
        "`slope`",
    ),
]

SIZES = [
    refuse(
        "more rows than there are",
        lambda: run(full_plate, batch_size=41),
        ValueError,
        "batch_size=41",
        "'data'",
        "Use at most 40",
    ),
    refuse(
        "more rows than there are, by name",
        lambda: run(full_plate, batch_size={"data": 41}),
        ValueError,
        "batch_size=41",
        "'data'",
        "Use at most 40",
    ),
    refuse(
        "a subsample_size above the size",
        lambda: run(regression, X, Y, 100),
        ValueError,
        "batch_size=100",
        "'data'",
        "Use at most 40",
    ),
    refuse(
        "a negative subsample_size",
        lambda: run(regression, X, Y, -5),
        ValueError,
        "subsample_size=-5",
        "at least 2",
    ),
    refuse(
        "a subsample_size of one",
        lambda: run(regression, X, Y, 1),
        ValueError,
        "'data'",
        "got 1",
        "at least 2",
    ),
    refuse(
        "several candidates",
        lambda: run(two_candidates, batch_size=10),
        ValueError,
        "batch_size=10",
        "'men', 'women'",
        "batch_size={'men': 10}",
    ),
    refuse(
        "an unknown plate",
        lambda: run(full_plate, batch_size={"dta": 10}),
        ValueError,
        "'dta'",
        "'data' (40 rows)",
    ),
    refuse(
        "an unknown plate of a full batch",
        lambda: start(MinibatchMH(full_plate, batch=batch.full({"dta": 10})), X, Y),
        ValueError,
        "'dta'",
        "'data' (40 rows)",
    ),
    *(
        refuse(
            f"batch_size={how.format(repr(size))}",
            lambda size=size, how=how: run(
                full_plate, batch_size={"data": size} if "data" in how else size
            ),
            error,
            f"got {size!r}",
            "batch_size=100",
        )
        for how in ("{}", "{{'data': {}}}")
        for size, error in [
            (-1, ValueError),
            (0, ValueError),
            (1, ValueError),
            (2.5, TypeError),
            (10.0, TypeError),
            (np.float32(10.0), TypeError),
            (True, TypeError),
            ("10", TypeError),
            ([10], TypeError),
            ((10,), TypeError),
        ]
    ),
    refuse(
        "an array as batch_size",
        lambda: run(full_plate, batch_size=BIG),
        TypeError,
        "an array of shape (5000,)",
        "batch_size=100",
    ),
    *(
        refuse(
            f"batch.{scheme.__name__}(0)",
            lambda scheme=scheme: scheme(0),
            ValueError,
            "got 0",
            "batch_size=100",
        )
        for scheme in (
            batch.full,
            batch.growing,
            batch.importance,
            batch.pilot,
            batch.stratified,
            batch.take_all,
            batch.with_replacement,
            batch.without_replacement,
        )
    ),
    *(
        refuse(
            f"batch.{scheme.__name__}(10, uniform={uniform!r})",
            lambda scheme=scheme, uniform=uniform: scheme(10, uniform=uniform),
            error,
            f"uniform={uniform!r}" if error is ValueError else f"got {uniform!r}",
            "0.1",
        )
        for scheme in (batch.importance, batch.stratified)
        for uniform, error in [
            (0.0, ValueError),
            (-0.1, ValueError),
            (1.1, ValueError),
            (np.nan, ValueError),
            ("0.1", TypeError),
            (None, TypeError),
            (True, TypeError),
        ]
    ),
    *(
        refuse(
            f"batch.take_all(10, num_sure={num_sure!r})",
            lambda num_sure=num_sure: batch.take_all(10, num_sure=num_sure),
            error,
            "num_sure",
            f"got {num_sure!r}",
            "num_sure=1000",
        )
        for num_sure, error in [
            (-1, ValueError),
            (2.5, TypeError),
            ("10", TypeError),
            (True, TypeError),
        ]
    ),
    refuse(
        "a margin below one",
        lambda: batch.pilot(10, margin=0.5),
        ValueError,
        "margin=0.5",
        "1.25",
    ),
    refuse(
        "batch and batch_size",
        lambda: MinibatchMH(regression, batch=batch.pilot(10), batch_size=10),
        ValueError,
        "both batch_size=10 and batch=",
        "pass batch alone",
    ),
    refuse(
        "exact and batch_size",
        lambda: MinibatchMH(regression, estimate="exact", batch_size=10),
        ValueError,
        "no batch_size",
        "batch=batch.full(chunk_size)",
    ),
]

SETTINGS = [
    *(
        refuse(
            f"{name}={value!r}",
            lambda name=name, value=value: run(regression, **{name: value}),
            error,
            f"MINT({name}",
            f"{value!r}",
            *says,
        )
        for name, value, error, *says in [
            ("temperature", -1.0, ValueError, "positive and finite"),
            ("temperature", 0, ValueError, "positive and finite"),
            ("temperature", np.inf, ValueError, "positive and finite"),
            ("temperature", np.nan, ValueError, "positive and finite"),
            ("temperature", "1", TypeError, "positive number"),
            ("temperature", True, TypeError, "positive number"),
            ("step_size", -1.0, ValueError, "positive and finite"),
            ("step_size", 0.0, ValueError, "positive and finite"),
            ("step_size", np.nan, ValueError, "positive and finite"),
            ("step_size", "1", TypeError, "positive number"),
            ("num_steps", 0, ValueError, "at least 1"),
            ("num_steps", -1, ValueError, "at least 1"),
            ("num_steps", 1.5, TypeError, "positive integer"),
            ("num_steps", True, TypeError, "positive integer"),
            ("num_steps", "2", TypeError, "positive integer"),
            ("target_accept_prob", 0.0, ValueError, "positive and finite"),
            ("target_accept_prob", -0.1, ValueError, "positive and finite"),
            ("target_accept_prob", 1.0, ValueError, "below 1.0"),
            ("target_accept_prob", 1.5, ValueError, "below 1.0"),
            ("target_accept_prob", "0.3", TypeError, "positive number"),
            ("adapt_step_size", "no", TypeError, "True or False"),
            ("adapt_mass_matrix", None, TypeError, "True or False"),
            ("dense_mass", [("beta",)], TypeError, "True or False"),
            ("temper_prior", 0.5, TypeError, "True or False"),
            ("penalty", "no", TypeError, "True or False"),
            ("init_strategy", 3, TypeError, "init_to_value"),
            ("proposal", "langevin", TypeError, "proposal.random_walk()"),
            ("batch", 10, TypeError, "batch.without_replacement(100)"),
            ("estimate", "share", ValueError, '"shared", "augmented"'),
            ("estimate", 1, TypeError, '"shared", "augmented"'),
        ]
    ),
    *(
        refuse(
            f"MINT({name}={value!r})",
            lambda name=name, value=value: start(MINT(regression, **{name: value})),
            error,
            f"{name}=",
            f"{value!r}",
            "must be",
        )
        for name in ("lam", "alpha")
        for value, error in [
            (-0.5, ValueError),
            (0.0, ValueError),
            (1.0, ValueError),
            (1.5, ValueError),
            ("0.5", TypeError),
        ]
    ),
    refuse(
        "lam above tau",
        lambda: start(MINT(regression, lam=0.9), X, Y),
        ValueError,
        "lam=0.9",
        "tau = log(10) / log(40) = 0.624",
        "a larger batch_size, or temperature=",
    ),
    refuse(
        "alpha with two data plates",
        lambda: start(
            MINT(two_candidates, alpha=0.5, batch_size={"men": 10, "women": 10}), X, Y
        ),
        ValueError,
        "alpha=",
        "has 2",
        "temperature=",
    ),
    refuse(
        "neither temperature, lam nor alpha",
        lambda: MINT(regression),
        ValueError,
        "exactly one of temperature=, lam= and alpha=",
        "none of them",
        "temperature=100.0",
    ),
    refuse(
        "temperature and lam",
        lambda: MINT(regression, temperature=2.0, lam=0.5),
        ValueError,
        "'temperature': 2.0",
        "'lam': 0.5",
        "temperature=100.0",
    ),
    refuse(
        "temperature, lam and alpha",
        lambda: MINT(regression, temperature=2.0, lam=0.5, alpha=0.5),
        ValueError,
        "exactly one",
        "'alpha': 0.5",
    ),
    refuse(
        "an array as temperature",
        lambda: MINT(regression, temperature=BIG),
        TypeError,
        "temperature",
        "an array of shape (5000,)",
    ),
    *(
        refuse(
            f"an array as {name}",
            lambda name=name: MinibatchMH(regression, **{name: BIG}),
            error,
            name,
            "an array of shape (5000,)",
        )
        for name, error in [
            ("acceptance", TypeError),
            ("batch", TypeError),
            ("estimate", TypeError),
            ("init_strategy", TypeError),
            ("num_steps", TypeError),
            ("proposal", TypeError),
            ("step_size", TypeError),
            ("target_accept_prob", TypeError),
        ]
    ),
    *(
        refuse(
            f"{name} without its brackets",
            lambda name=name, choice=choice: MinibatchMH(regression, **{name: choice}),
            error,
            name,
            f"<function {choice.__name__}",
        )
        for name, choice, error in [
            ("acceptance", accept.penalty, TypeError),
            ("batch", batch.pilot, TypeError),
            ("estimate", estimate.shared, TypeError),
            ("proposal", proposal.langevin, TypeError),
        ]
    ),
    refuse(
        "a name for an acceptance test",
        lambda: MinibatchMH(regression, acceptance="penalty"),
        TypeError,
        "MinibatchMH(acceptance=...)",
        "'penalty'",
        "accept.penalty()",
    ),
    refuse(
        "an acceptance test for MINT",
        lambda: MINT(regression, temperature=1.0, acceptance=accept.barker()),
        TypeError,
        "MINT has its own acceptance test",
        "MinibatchMH(model, acceptance=...)",
    ),
    refuse(
        "two plates of one name",
        lambda: run(twice_the_same_plate),
        ValueError,
        "several plates called 'data'",
        "a name of its own",
    ),
    refuse(
        "an unknown setting",
        lambda: MINT(regression, temperature=1.0, stepsize=0.1),
        TypeError,
        "'stepsize'",
    ),
    refuse(
        "a target rate that a Barker test cannot reach",
        lambda: MHMinibatch(regression, target_accept_prob=0.6),
        ValueError,
        "target_accept_prob=0.6",
        "below 0.5",
    ),
    refuse(
        "a variance that no correction can complete",
        lambda: MHMinibatch(regression, variance=5.0),
        ValueError,
        "variance=5.0",
        "write variance=1.0",
    ),
    refuse(
        "a variance that is no number",
        lambda: MHMinibatch(regression, variance="1"),
        ValueError,
        "variance='1'",
        "from 0.01 to 3.0",
    ),
    refuse(
        "sequential is a word",
        lambda: MHMinibatch(regression, sequential="yes"),
        TypeError,
        "sequential",
        "True or False",
        "'yes'",
    ),
    refuse(
        "MHMinibatch with a batch",
        lambda: MHMinibatch(regression, batch=batch.full()),
        TypeError,
        "MinibatchMH(model, batch=..., acceptance=...)",
    ),
    refuse(
        "a negative max_variance",
        lambda: accept.penalty(max_variance=-1.0),
        ValueError,
        "max_variance=-1.0",
        "write 1.0",
    ),
    refuse(
        "neither model nor target",
        lambda: MINT(temperature=1.0),
        ValueError,
        "neither",
        "MINT(model, ...)",
    ),
    refuse(
        "model and target",
        lambda: MINT(regression, target=target(), temperature=1.0),
        ValueError,
        "both",
        "MINT(model, ...)",
    ),
    refuse(
        "a model that is no function",
        lambda: MINT("regression", temperature=1.0),
        TypeError,
        "must be a function",
        "got str",
    ),
    *(
        refuse(
            f"AusterityMH(epsilon={value!r})",
            lambda value=value: AusterityMH(regression, epsilon=value),
            error,
            f"epsilon={value!r}",
            *says,
        )
        for value, error, *says in [
            (0.0, ValueError, "above 0 and below 0.5", "epsilon=0.005"),
            (0.5, ValueError, "above 0 and below 0.5"),
            (-0.1, ValueError, "above 0"),
            (np.nan, ValueError, "above 0"),
            ("0.1", TypeError, "a probability, such as 0.005"),
            (None, TypeError, "a probability"),
        ]
    ),
    *(
        refuse(
            f"ConfidenceMH({name}={value!r})",
            lambda name=name, value=value: ConfidenceMH(
                regression, **{"bound": max, name: value}
            ),
            error,
            f"{name}=",
            f"{value!r}",
            *says,
        )
        for name, value, error, *says in [
            ("delta", 0.0, ValueError, "above 0 and below 1"),
            ("delta", 1.0, ValueError, "above 0 and below 1"),
            ("delta", True, TypeError, "a probability, such as 0.01"),
            ("p", 1.0, ValueError, "above 1", "p=2.0"),
            ("p", "2", ValueError, "above 1"),
            ("gamma", 1.0, ValueError, "above 1", "gamma=2.0"),
            ("gamma", np.inf, ValueError, "positive and finite"),
            ("gamma", "2", TypeError, "positive number"),
            ("inequality", "hoeffding", ValueError, '"serfling"'),
            ("bound", 3.0, TypeError, "bound(z, z_new)", "accept.logistic_bound(x)"),
        ]
    ),
    refuse(
        "ConfidenceMH without a bound",
        lambda: ConfidenceMH(regression),
        TypeError,
        "needs bound=",
        "accept.logistic_bound(x)",
        "accept.austerity()",
    ),
    *(
        refuse(
            f"{kernel.__name__} with {name}",
            lambda kernel=kernel, name=name: kernel(
                regression,
                **{name: accept.penalty() if name != "batch" else batch.full()},
            ),
            TypeError,
            f"{kernel.__name__} has its own batch and acceptance",
            "MinibatchMH(model, batch=..., acceptance=...)",
        )
        for kernel in (AusterityMH, ConfidenceMH)
        for name in ("batch", "acceptance")
    ),
    *(
        refuse(
            f"a sequential test with {scheme!r}",
            lambda scheme=scheme: MinibatchMH(
                regression, batch=scheme, acceptance=accept.austerity()
            ),
            ValueError,
            "cannot be stopped",
            "batch=batch.growing(500)",
        )
        for scheme in (None, batch.pilot(10), batch.with_replacement(10))
    ),
    refuse(
        "a sequential test with kept estimates",
        lambda: AusterityMH(regression, estimate="augmented"),
        ValueError,
        "two positions on the same rows",
        "Leave estimate= out",
    ),
    *(
        refuse(
            f"growing(factor={value!r})",
            lambda value=value: batch.growing(10, factor=value),
            error,
            f"factor={value!r}" if error is ValueError else repr(value),
            "factor=2.0",
        )
        for value, error in [(1.0, ValueError), (np.nan, ValueError), ("2", TypeError)]
    ),
    refuse(
        "logistic_bound of a vector",
        lambda: accept.logistic_bound(Y),
        ValueError,
        "the matrix of covariates",
        f"shape ({N},)",
    ),
    refuse(
        "logistic_bound of NaN",
        lambda: accept.logistic_bound(with_nan(X)),
        ValueError,
        "not all finite",
    ),
    refuse(
        "average_epsilon of unequal moves",
        lambda: accept.average_epsilon(
            0.01, np.zeros(3), np.ones(4), size=100, batch_size=10
        ),
        ValueError,
        "(3,) and (4,)",
    ),
    refuse(
        "a target that is none",
        lambda: MinibatchMH(target=lambda z: z),
        TypeError,
        "numpyro_minibatch.Target",
        "got function",
    ),
]

DATA = [
    refuse(
        "NaN in X",
        lambda: run(regression, with_nan(X), Y),
        ValueError,
        "plate 'data', rows [7]",
        "args[0]: 2 of 80 values",
        "numpyro.handlers.mask",
        compiles="start",
    ),
    refuse(
        "NaN in y",
        lambda: run(regression, X, jnp.asarray(with_nan(Y))),
        ValueError,
        "plate 'data', rows [7]",
        "args[1]: 1 of 40 values",
        "numpyro.handlers.mask",
        compiles="start",
    ),
    refuse(
        "NaN in keyword data",
        lambda: start(MINT(regression, temperature=1.0), X, y=with_nan(Y)),
        ValueError,
        "plate 'data', rows [7]",
        "kwargs['y']: 1 of 40 values",
        "numpyro.handlers.mask",
        compiles="start",
    ),
    refuse(
        "data outside of the support",
        lambda: run(positive_data),
        ValueError,
        "not finite",
        "plate 'data', rows [",
        "init_to_value",
        compiles="start",
    ),
    refuse(
        "a prior that is nowhere finite",
        lambda: run(impossible_prior),
        ValueError,
        "the log prior is not",
        "after 100 tries",
        "init_to_value",
        compiles="start",
    ),
    refuse(
        "a start outside of the support",
        lambda: run(bounded, init_strategy=init_to_value(values={"scale": 2.0})),
        ValueError,
        "z['scale']",
        "inside its support",
        compiles="start",
    ),
    refuse(
        "a start of the wrong shape",
        lambda: run(
            regression, init_strategy=init_to_value(values={"beta": np.zeros(3)})
        ),
        ValueError,
        "'beta'",
        "shape (2,), got shape (3,)",
    ),
    refuse(
        "a list",
        lambda: run(regression, X, Y.tolist()),
        TypeError,
        "y of type list",
        "numpy.asarray",
    ),
    refuse(
        "words",
        lambda: run(regression, X.astype(str), Y),
        TypeError,
        "X of dtype <U32",
        "arrays of numbers",
    ),
    refuse(
        "objects in keyword data",
        lambda: start(MINT(regression, temperature=1.0), X, y=Y.astype(object)),
        TypeError,
        "y of dtype object",
        "arrays of numbers",
    ),
    refuse(
        "NumPy data in a closure",
        lambda: start(MINT(closes_over_numpy, temperature=1.0)),
        TypeError,
        "values of the data or of a plate's indices",
        "jnp.asarray",
    ),
    refuse(
        "values of the data read in Python",
        lambda: run(counts_its_groups, GROUP, Y),
        TypeError,
        "values of the data",
        "Compute int(jnp.max(group)) beforehand",
    ),
    refuse(
        "values of JAX data read in Python",
        lambda: run(counts_its_groups, JAX_GROUP, Y),
        TypeError,
        "values of the data",
        "Compute int(jnp.max(group)) beforehand",
    ),
    refuse(
        "rows selected by their values",
        lambda: run(selects_rows),
        TypeError,
        "values of the data",
        "before the model",
    ),
    refuse(
        "an argument missing", lambda: run(regression, X), TypeError, "argument: 'y'"
    ),
]

STARTS = [
    refuse(
        "init_params for another site",
        lambda: run(regression, init_params={"b": np.zeros(2)}),
        ValueError,
        "got ['b']",
        "['beta']",
    ),
    refuse(
        "init_params without a site",
        lambda: run(regression, init_params={}),
        ValueError,
        "got []",
        "['beta']",
    ),
    refuse(
        "init_params without names",
        lambda: run(regression, init_params=BIG),
        ValueError,
        "got ndarray",
        "dict of unconstrained values",
        "['beta']",
    ),
    *(
        refuse(
            f"init_params of shape {shape}",
            lambda shape=shape: run(regression, init_params={"beta": np.zeros(shape)}),
            ValueError,
            "init_params['beta'] must have shape (2,)",
            f"got shape {shape}",
        )
        for shape in [(), (3,), (1, 2), (MANY,)]
    ),
    refuse(
        "init_params without the axis of chains",
        lambda: MINT(regression, temperature=1.0).init(
            np.zeros((3, 2), np.uint32), 10, {"beta": np.zeros(2)}, (X, Y), {}
        ),
        ValueError,
        "init_params['beta'] must have shape (3, 2)",
        "one row per chain",
        "got shape (2,)",
    ),
    *(
        refuse(
            f"init_params of {type(value).__name__}",
            lambda value=value: run(regression, init_params={"beta": value}),
            TypeError,
            "init_params['beta'] must be an array of shape (2,)",
            f"got {type(value).__name__}",
            "jnp.asarray",
        )
        for value in ([0.0, 0.0], "zero", None)
    ),
    refuse(
        "init_params that are NaN",
        lambda: run(regression, init_params={"beta": np.array([0.0, np.nan])}),
        ValueError,
        "z['beta']",
        "init_params must be finite",
        compiles="start",
    ),
]


def begin(chosen: Target, z: Any = 0.0, **settings: Any) -> Any:
    return start(
        MinibatchMH(target=chosen, **{"batch_size": 10, **settings}), init_params=z
    )


TARGETS = [
    refuse(
        "a target without init_params",
        lambda: begin(target(), None),
        ValueError,
        "cannot choose a starting point",
        "init_params=",
    ),
    refuse(
        "a target with an empty position",
        lambda: begin(target(), {}),
        ValueError,
        "without a number",
        "{}",
    ),
    *(
        refuse(
            f"Target(sizes={sizes!r})",
            lambda sizes=sizes: target(sizes=sizes),
            ValueError,
            "Target(sizes=...)",
            "got {}" if sizes == {} else f"got {wrong!r}",
            *says,
        )
        for sizes, wrong, *says in [
            (0, 0, "positive integer"),
            (-3, -3, "positive integer"),
            (1.5, 1.5, "positive integer"),
            ("3", "3", "positive integer"),
            (True, True, "positive integer"),
            (None, None, "positive integer"),
            ({"rows": 0}, 0, "'rows'", "positive integer"),
            ({}, {}, "sizes=1000"),
        ]
    ),
    refuse(
        "a target without batch_size",
        lambda: begin(target(), batch_size=None),
        ValueError,
        "'data' of the target",
        "40 rows",
        "batch_size={'data': 36}",
    ),
    refuse(
        "a target without batch_size, MHMinibatch",
        lambda: start(MHMinibatch(target=target()), init_params=0.0),
        ValueError,
        "'data' of the target",
        "40 rows",
        "batch_size={'data': 4}",
    ),
    refuse(
        "a target with too large a batch",
        lambda: begin(target(), batch_size=50),
        ValueError,
        "batch_size=50",
        "Use at most 40",
    ),
    refuse(
        "a target with an unknown plate",
        lambda: begin(target(), batch_size={"dta": 10}),
        ValueError,
        "'dta'",
        "its plates are: data",
    ),
    refuse(
        "a target that reads all rows",
        lambda: begin(target(lambda z, i: -0.5 * (jnp.asarray(Y) - z) ** 2)),
        ValueError,
        "one number for each of the indices of plate 'data'",
        "returned shape (40,)",
        "y[indices]",
    ),
    refuse(
        "a target that sums its rows",
        lambda: begin(
            target(lambda z, i: -0.5 * jnp.sum((jnp.asarray(Y)[i] - z) ** 2))
        ),
        ValueError,
        "one number for each of the indices of plate 'data'",
        "returned shape ()",
        "do not sum",
    ),
    refuse(
        "a target with fewer data than rows",
        lambda: begin(target(y=Y[:30])),
        ValueError,
        "shape (30,)",
        "'data', which has 40 rows",
        "same length",
    ),
    refuse(
        "a target with the arguments of a model",
        lambda: start(
            MinibatchMH(target=target(), batch_size=10), X, Y, init_params=0.0
        ),
        ValueError,
        "arguments for a model",
        "mcmc.run(key, init_params=...)",
    ),
]

GRADIENTS = [
    *(
        refuse(
            f"{kind.__name__} with a preconditioner, without a step size",
            lambda kind=kind: kind(regression, preconditioner="rmsprop"),
            ValueError,
            f"{kind.__name__}(preconditioner=",
            "needs a step_size",
            "Leave out the preconditioner",
        )
        for kind in (SGLD, SGHMC, SGNHT)
    ),
    *(
        refuse(
            f"SGLD(step_size={step_size!r})",
            lambda step_size=step_size: SGLD(regression, step_size=step_size),
            error,
            "step_size",
            repr(step_size),
        )
        for step_size, error in [
            (0.0, ValueError),
            (-1.0, ValueError),
            (np.inf, ValueError),
            (True, TypeError),
            ("0.1", TypeError),
        ]
    ),
    refuse(
        "a schedule of negative numbers",
        lambda: SGLD(regression, step_size=lambda count: -0.1),
        ValueError,
        "begins with -0.1",
    ),
    refuse(
        "a schedule of vectors",
        lambda: SGLD(regression, step_size=lambda count: np.ones(2)),
        ValueError,
        "an array of shape (2,)",
        "must return scalars",
    ),
    refuse(
        "a preconditioner that nobody knows",
        lambda: SGLD(regression, step_size=0.1, preconditioner="adam"),
        ValueError,
        "'adam'",
        '"rmsprop"',
    ),
    refuse(
        "a preconditioner of a whitened space",
        lambda: SGLD(regression, control_variate="taylor2", preconditioner="rmsprop"),
        ValueError,
        "a preconditioner and a control_variate",
    ),
    refuse(
        "a preset with other dynamics",
        lambda: SGLD(regression, step_size=0.1, dynamics=dynamics.sghmc()),
        TypeError,
        "SGLD has its own dynamics",
        "SGMCMC(model, dynamics=...)",
    ),
    refuse(
        "dynamics that are none",
        lambda: SGMCMC(regression, step_size=0.1, dynamics="sgld"),
        TypeError,
        "dynamics.sgld()",
        "'sgld'",
    ),
    refuse(
        "an integrator that nobody knows",
        lambda: SGHMC(regression, step_size=0.1, integrator="verlet"),
        ValueError,
        "'baoab', 'midpoint', 'euler'",
        "'verlet'",
    ),
    refuse(
        "a negative friction",
        lambda: SGHMC(regression, step_size=0.1, friction=-1.0),
        ValueError,
        "friction",
        "at least 0",
        "-1.0",
    ),
    refuse(
        "no friction and no correction",
        lambda: SGHMC(regression, step_size=0.1, friction=0.0),
        ValueError,
        "injects no noise",
        "AMAGOLD(model, friction=0.0)",
    ),
    refuse(
        "a thermostat without mass",
        lambda: SGNHT(regression, step_size=0.1, thermal_mass=0.0),
        ValueError,
        "thermal_mass",
        "positive",
    ),
    *(
        refuse(
            f"{kind.__name__} with {', '.join(settings)}",
            lambda kind=kind, settings=settings: kind(regression, **settings),
            ValueError,
            "h= with b=",
            f"got {', '.join(settings)}",
        )
        for kind in (SGHMC, AMAGOLD)
        for settings in (
            {"h": 0.01},
            {"b": 0.01},
            {"step_size": 0.1, "h": 0.01},
            {"friction": 0.1, "h": 0.01, "b": 0.1},
        )
    ),
    refuse(
        "a polynomial that stops",
        lambda: schedule.polynomial(0.1, power=1.5),
        ValueError,
        "power=1.5",
        "at most 1",
    ),
    refuse(
        "a running mean without a past",
        lambda: preconditioner.rmsprop(decay=1.0),
        ValueError,
        "decay=1.0",
        "0.99",
    ),
    refuse(
        "a correction that nobody knows",
        lambda: AMAGOLD(regression, correction="full"),
        ValueError,
        "'full'",
        '"exact", "minibatch"',
    ),
    refuse(
        "a correction with a design of its own",
        lambda: AMAGOLD(
            regression,
            control_variate="taylor2",
            correction=batch.stratified(100),
        ),
        ValueError,
        "one design of the rows",
        'correction="minibatch"',
    ),
    refuse(
        "a momentum that is never forgotten",
        lambda: AMAGOLD(regression, friction=0.0, resample_momentum=False),
        ValueError,
        "never forgets its momentum",
        "positive friction",
    ),
    refuse(
        "a correction that decides when it has read enough",
        lambda: AMAGOLD(regression, acceptance=accept.austerity()),
        ValueError,
        "accept.penalty()",
    ),
    refuse(
        "an acceptance rate out of reach",
        lambda: AMAGOLD(
            regression, acceptance=accept.compensated_barker(), target_accept_prob=0.6
        ),
        ValueError,
        "must be below 0.5",
    ),
    *(
        refuse(
            f"AMAGOLD({name}={value!r})",
            lambda name=name, value=value: AMAGOLD(regression, **{name: value}),
            error,
            name,
            repr(value),
        )
        for name, value, error in [
            ("step_size", -0.1, ValueError),
            ("friction", -0.1, ValueError),
            ("momentum_variance", 0.0, ValueError),
            ("num_steps", 0, ValueError),
            ("num_steps", 2.5, TypeError),
            ("resample_momentum", "no", TypeError),
            ("dense_mass", 1, TypeError),
        ]
    ),
]

ENERGIES = [
    refuse(
        "two ways to say the temperatures",
        lambda: MINTEE(regression, temperatures=[1.0, 2.0], alpha=0.5),
        ValueError,
        "MINTEE takes one of",
        "temperatures and alpha",
    ),
    refuse(
        "all rows, and no ladder",
        lambda: MINTEE(regression, batch=batch.full()),
        ValueError,
        "needs a ladder",
        "temperature_ratio=3.0",
    ),
    refuse(
        "a scheme that cannot be nested",
        lambda: MINTEE(regression, batch=batch.pilot(10)),
        TypeError,
        "must be batch.full() or left out",
        "batch_size and batch_ratio",
    ),
    refuse(
        "batches that ascend",
        lambda: MINTEE(regression, batch_size=[10, 20], temperatures=[1.0, 2.0]),
        ValueError,
        "must not ascend",
        "10 and then 20",
    ),
    refuse(
        "batch sizes by plate",
        lambda: MINTEE(regression, batch_size={"data": 10}, temperatures=[1.0, 2.0]),
        TypeError,
        "from the coldest on",
        "{'data': 10}",
    ),
    refuse(
        "a batch of one row",
        lambda: MINTEE(regression, batch_size=1, temperatures=[1.0, 2.0]),
        ValueError,
        "at least 2, got 1",
    ),
    refuse(
        "as many temperatures as there are no chains",
        lambda: MINTEE(regression, temperatures=[1.0, 2.0], num_replicas=3),
        ValueError,
        "num_replicas is 3, len(temperatures) is 2",
    ),
    refuse(
        "a ladder of one chain",
        lambda: MINTEE(regression, temperatures=[1.0]),
        ValueError,
        "at least 2 chains, got 1",
        "MINT(model, temperature=...)",
    ),
    refuse(
        "a temperature that is no list",
        lambda: MINTEE(regression, temperatures=4.0),
        TypeError,
        "a number for each chain",
        "4.0",
    ),
    refuse(
        "a ratio of batches below one",
        lambda: MINTEE(regression, batch_ratio=0.7, alpha=0.5),
        ValueError,
        "batch_ratio=0.7",
        "colder chains read larger batches",
    ),
    refuse(
        "a ratio of temperatures of one",
        lambda: MINTEE(regression, temperature_ratio=1),
        ValueError,
        "temperature_ratio=1",
        "above 1",
    ),
    refuse(
        "an alpha above one",
        lambda: MINTEE(regression, alpha=1.5),
        ValueError,
        "alpha=1.5",
        "lam is below tau",
    ),
    refuse(
        "too few energies",
        lambda: MINTEE(regression, temperatures=[1.0, 2.0, 3.0], energies=[5.0]),
        ValueError,
        "H_1 to H_2, 2 numbers for 3 chains",
        "[5.0]",
    ),
    refuse(
        "energies that fall",
        lambda: MINTEE(regression, temperatures=[1.0, 2.0, 3.0], energies=[5.0, 4.0]),
        ValueError,
        "finite and ascend",
        "[5.0, 4.0]",
    ),
    refuse(
        "energies and what makes them",
        lambda: MINTEE(
            regression, temperatures=[1.0, 2.0], energies=[5.0], ring_width=2.0
        ),
        ValueError,
        "both energies and ring_width",
    ),
    refuse(
        "nothing but jumps",
        lambda: MINTEE(regression, temperatures=[1.0, 2.0], jump_prob=1.0),
        ValueError,
        "jump_prob=1.0",
        "jump_prob=0.1",
    ),
    refuse(
        "rings without places",
        lambda: MINTEE(regression, temperatures=[1.0, 2.0], ring_capacity=0),
        ValueError,
        "ring_capacity",
        "at least 1, got 0",
    ),
    refuse(
        "moves on a surrogate that is not there",
        lambda: MINTEE(
            regression, temperatures=[1.0, 2.0], proposal=proposal.independence()
        ),
        ValueError,
        "surrogate of one mode",
        "proposal.langevin()",
    ),
    refuse(
        "batches of more rows than there are",
        lambda: start(
            MINTEE(regression, batch_size=[50, 10], temperatures=[1.0, 2.0]), X, Y
        ),
        ValueError,
        "more rows than the data, 40",
        "batch_size=[40, 10]",
    ),
    refuse(
        "batches that give one temperature twice",
        lambda: start(
            MINTEE(regression, batch_size=30, batch_ratio=2.0, alpha=0.5), X, Y
        ),
        ValueError,
        "temperatures must ascend",
        "temperatures=[...]",
    ),
    refuse(
        "rings that no memory holds",
        lambda: start(
            MINTEE(regression, temperatures=[1.0, 2.0], ring_capacity=10**9), X, Y
        ),
        ValueError,
        "the rings would take",
        "a smaller ring_capacity",
    ),
]


def cyclical(**settings: Any) -> CyclicalSGLD:
    return CyclicalSGLD(regression, **{"step_size": 0.1, **settings})


CYCLES = [
    refuse(
        "cycles of a kernel that is none",
        lambda: Cyclical(regression, cycle_length=100),
        TypeError,
        "SGLD(model, step_size=1e-3)",
        "MINT(model, temperature=100.0)",
    ),
    refuse(
        "cycles of AMAGOLD",
        lambda: Cyclical(AMAGOLD(regression), cycle_length=100),
        TypeError,
        "a kernel of gradient steps or a Metropolis kernel",
    ),
    *(
        refuse(
            f"a cycle with {', '.join(f'{k}={v}' for k, v in settings.items())}",
            lambda settings=settings: cyclical(**{"cycle_length": 100, **settings}),
            error,
            *says,
        )
        for settings, error, says in [
            ({"cycle_length": 0}, ValueError, ["cycle_length", "at least 1"]),
            ({"cycle_length": 10.0}, TypeError, ["cycle_length", "10.0"]),
            ({"explore": 1.0}, ValueError, ["explore=1.0", "below 1"]),
            ({"collect_from": -0.1}, ValueError, ["collect_from", "at least 0"]),
            (
                {"explore": 0.9},
                ValueError,
                ["collect from the exploration", "collect_from=0.9"],
            ),
            ({"explore_temperature": -1.0}, ValueError, ["explore_temperature"]),
            ({"scale_by_n": 1}, TypeError, ["scale_by_n", "True or False"]),
            (
                {"samples_per_cycle": 3},
                ValueError,
                [
                    "20 of the 100 steps",
                    "3 draws of 6 steps each are 18",
                    "samples_per_cycle=4, num_steps=5",
                    "collect_from=0.8",
                ],
            ),
            (
                {"num_steps": 15, "samples_per_cycle": 1},
                ValueError,
                ["are 15", "num_steps=20", "collect_from=0.85"],
            ),
            (
                {"num_steps": 30},
                ValueError,
                ["a draw takes more", "num_steps=20", "collect_from=0.7"],
            ),
            ({"samples_per_cycle": 0}, ValueError, ["samples_per_cycle"]),
        ]
    ),
    *(
        refuse(
            f"{kernel.__name__} without the length of a cycle",
            lambda kernel=kernel: kernel(regression),
            TypeError,
            f"{kernel.__name__} needs the length of a cycle",
            "cycle_length=1000",
        )
        for kernel in (CyclicalSGLD, CyclicalSGHMC, CyclicalMINT)
    ),
    refuse(
        "cycles without a step size",
        lambda: CyclicalSGHMC(regression, cycle_length=100),
        ValueError,
        "CyclicalSGHMC needs a step_size",
    ),
    refuse(
        "descent of a kernel that decides",
        lambda: Cyclical(MinibatchMH(regression), cycle_length=100, explore=0.25),
        ValueError,
        "explore=0.25",
        "keep its target at any step size",
    ),
    refuse(
        "a schedule of cycles that is none",
        lambda: Cyclical(SGLD(regression, step_size=0.1), cycle_length=9, schedule=1),
        TypeError,
        "schedule.sawtooth(1.0, 1000)",
    ),
    refuse(
        "a warmup that is not whole cycles",
        lambda: cyclical(cycle_length=100).init(KEY, 50, None, (X, Y), {}),
        ValueError,
        "whole cycles of 20 draws",
        "num_warmup=50",
        "num_warmup=40 or num_warmup=60",
    ),
    refuse(
        "a warmup of less than a cycle",
        lambda: cyclical(cycle_length=100).init(KEY, 5, None, (X, Y), {}),
        ValueError,
        "num_warmup=20, or num_warmup=0 for none",
    ),
    refuse(
        "a saw without teeth",
        lambda: CyclicalMINT(regression, temperature=2.0, cycle_length=9, rise=0.5),
        ValueError,
        "rise=0.5",
        "at least 1",
    ),
    refuse(
        "cosines of nothing",
        lambda: schedule.cosine_restarts(0.1, 0),
        ValueError,
        "cycle_length",
    ),
]

CASES = [
    *MODELS,
    *SIZES,
    *SETTINGS,
    *DATA,
    *STARTS,
    *TARGETS,
    *GRADIENTS,
    *ENERGIES,
    *CYCLES,
]


# the test ----------------------------------------------------------------------------

_compiled: list[str] = []


def _listen(event: str, duration: float, **details: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(str(details.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions compiled inside the context."""
    before = len(_compiled)
    inside: list[str] = []
    yield inside
    inside += _compiled[before:]


def complaints(case: Case) -> list[str]:
    """The faults of the reaction to a mistake."""
    with compilations() as compiled:
        try:
            case.make()
        except Exception as error:
            caught: Exception | None = error
        else:
            caught = None
    if caught is None:
        return ["no error"]
    message = str(caught)
    found = []
    if type(caught) is not case.error:
        found.append(f"{type(caught).__name__} is not {case.error.__name__}")
    found += [f"does not say {words!r}" for words in case.says if words not in message]
    if re.search(r"(?i)array\(\s*\[|\[\s*-?\d+\.\d*\s", message):
        found.append("shows the values of an array")
    if len(message) > 700:
        found.append(f"takes {len(message)} characters")
    if case.compiles == "nothing" and compiled:
        found.append(f"compiled {compiled}")
    if case.compiles == "parameters" and any("_start" in name for name in compiled):
        found.append(f"compiled the start: {compiled}")
    return [f"{text}; the message was: {message}" for text in found]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_refused(case: Case) -> None:
    assert not complaints(case)


def test_cases_have_different_names() -> None:
    assert [n for n, count in Counter(c.name for c in CASES).items() if count > 1] == []


def _raises(error: Exception) -> Callable[[], object]:
    def make() -> object:
        raise error

    return make


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        (Case("silent", lambda: run(regression), ValueError, ()), "no error"),
        (
            Case("wrong words", lambda: run(no_plate), ValueError, ("cheese",)),
            "does not say 'cheese'",
        ),
        (
            Case("wrong type", lambda: run(no_plate), TypeError, ()),
            "ValueError is not TypeError",
        ),
        (
            Case("a subclass", _raises(UnicodeError("")), ValueError, ()),
            "UnicodeError is not ValueError",
        ),
        (
            Case("late", lambda: run(regression, X, with_nan(Y)), ValueError, ()),
            "compiled [",
        ),
        (
            Case("short array", _raises(ValueError(f"got {Y!r}")), ValueError, ()),
            "shows the values",
        ),
        (
            Case("printed array", _raises(ValueError(f"got {Y}")), ValueError, ()),
            "shows the values",
        ),
        (
            Case("JAX array", _raises(ValueError(f"{jnp.ones(3)!r}")), ValueError, ()),
            "shows the values",
        ),
        (
            Case("tuple", _raises(ValueError(f"got {tuple(BIG)}")), ValueError, ()),
            "characters",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_the_check_can_fail(case: Case, complaint: str) -> None:
    assert any(complaint in text for text in complaints(case))


# models that look wrong but are right ------------------------------------------------


def test_masked_nan_is_accepted() -> None:
    state = run(masked, X, with_nan(Y))
    assert np.isfinite(state.z["beta"]).all()


def test_rows_without_indices_are_accepted_where_all_are_read() -> None:
    run(neither_indexed, X[:2], Y[:2], batch_size=2)


@pytest.mark.parametrize("size", [np.int64(10), np.int32(10), np.uint8(10)])
def test_numpy_integers_are_accepted(size: Any) -> None:
    expected = MINT(regression, batch_size=10, num_steps=10, temperature=1.0)
    assert expected == MINT(
        regression, batch_size=size, num_steps=size, temperature=np.float32(1.0)
    )
    named = MINT(regression, batch_size={"data": size}, temperature=1.0)
    assert named == MINT(regression, batch_size={"data": 10}, temperature=1.0)
    assert type(named._batch.widths["data"]) is int
    assert batch.pilot(size) == batch.pilot(10)
    assert target(sizes=size).plates == {"data": 10}


@pytest.mark.parametrize(
    "settings",
    [
        {"estimate": "exact"},
        {"batch": batch.full()},
        {"batch": batch.full(1_000)},
        {"batch": batch.full({"data": 7})},
    ],
    ids=str,
)
def test_the_full_batch_needs_no_batch_size(settings: dict[str, Any]) -> None:
    kernel = MinibatchMH(full_plate, **settings)
    kernel._setup((X, Y), {})
    assert kernel.plates == {"data": N}


def test_a_start_is_where_single_precision_resolves_the_log_density() -> None:
    """Elsewhere, sufficiently short steps are lost to rounding, so chains do not
    move."""

    def model(y: Any) -> None:
        log_sd = numpyro.sample("log_sd", dist.Uniform(-10, 10))
        with numpyro.plate("data", 1000, subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(0, jnp.exp(log_sd)), obs=y[i])

    wide = init_to_uniform(radius=10)
    y = jnp.ones(1000)
    state = MINT(model, temperature=10.0, init_strategy=wide).init(
        jax.random.split(jax.random.key(0), 200), 0, None, (y,), {}
    )
    log_sd = 20 * jax.nn.sigmoid(state.z["log_sd"]) - 10
    log_density = -1000 * (log_sd + jnp.exp(-2 * log_sd) / 2)
    assert (log_density > -0.1 / jnp.finfo(jnp.float32).eps).all()
    # and starts are not the best of many: they stay overdispersed, as R-hat requires
    assert (log_sd < -2).any() and (log_sd > 9).any()


def test_integers_are_a_start() -> None:
    state = run(regression, init_params={"beta": np.array([0, 1])})
    assert state.z["beta"].dtype == jnp.result_type(float)


# work on all rows --------------------------------------------------------------------

TALL = 2_000
TALL_X = RNG.normal(size=(TALL, 2)).astype(np.float32)
TALL_Y = RNG.normal(size=TALL).astype(np.float32)
TALL_GROUP = RNG.integers(0, 5, TALL)


def observe(y: Any, mean: Callable[[Any], Any]) -> None:
    with numpyro.plate("data", len(y), 10) as idx:
        numpyro.sample("obs", dist.Normal(mean(idx), 1.0), obs=y[idx])


def product_outside(X: Any, y: Any, group: Any) -> None:
    means = X @ coefficients()
    observe(y, lambda idx: means[idx])


def product_outside_subsampled(X: Any, y: Any, group: Any) -> None:
    means = jax.nn.sigmoid(X @ coefficients())
    with numpyro.plate("data", TALL, 10):
        rows = numpyro.subsample(means, event_dim=0)
        numpyro.sample("obs", dist.Normal(rows), obs=numpyro.subsample(y, event_dim=0))


def product_in_jit(X: Any, y: Any, group: Any) -> None:
    means = jax.jit(jnp.matmul)(X, coefficients())
    observe(y, lambda idx: means[idx])


def product_in_vmap(X: Any, y: Any, group: Any) -> None:
    beta = coefficients()
    means = jax.vmap(lambda row: row @ beta)(X)
    observe(y, lambda idx: means[idx])


def product_in_scan(X: Any, y: Any, group: Any) -> None:
    beta = coefficients()
    _, means = jax.lax.scan(lambda carry, row: (carry, row @ beta), 0.0, X)
    observe(y, lambda idx: means[idx])


def sum_outside(X: Any, y: Any, group: Any) -> None:
    mean = slope()
    numpyro.factor("penalty", -jnp.sum((X[:, 0] * mean) ** 2))
    observe(y, lambda idx: mean)


@pytest.mark.parametrize(
    ("model", "primitive"),
    [
        (product_outside, "dot_general"),
        (product_outside_subsampled, "dot_general"),
        (product_in_jit, "dot_general"),
        (product_in_vmap, "dot_general"),
        (product_in_scan, "scan"),
        (sum_outside, "reduce_sum"),
    ],
)
def test_work_on_all_rows_is_pointed_out(model: Callable, primitive: str) -> None:
    advice = rf"all 2000 rows of plate 'data' \({primitive}\) to use 10 .*X\[idx\]"
    with compilations() as compiled, pytest.warns(UserWarning, match=advice) as caught:
        inspect_model("MINT", model, (TALL_X, TALL_Y, TALL_GROUP), {}, None)
    assert len(caught) == 1
    assert not compiled


def rows_inside(X: Any, y: Any, group: Any) -> None:
    beta = coefficients()
    observe(y, lambda idx: X[idx] @ beta)


def elementwise_outside(X: Any, y: Any, group: Any) -> None:
    # XLA fuses the exponential into the gather behind it
    means = jnp.exp(X[:, 0] * slope())
    observe(y, lambda idx: means[idx])


def groups_outside(X: Any, y: Any, group: Any) -> None:
    means = coefficients(5)[group]
    observe(y, lambda idx: means[idx])


def standardised(X: Any, y: Any, group: Any) -> None:
    # does not depend on the position: folded, or done once before the loop
    X = (X - X.mean(0)) / X.std(0)
    beta = coefficients()
    observe(y, lambda idx: X[idx] @ beta)


def empirical_prior(X: Any, y: Any, group: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(y.mean(), y.std()))
    observe(y, lambda idx: mean)


def fitted_values(X: Any, y: Any, group: Any) -> None:
    # not part of the density
    beta = coefficients()
    numpyro.deterministic("fitted", X @ beta)
    observe(y, lambda idx: X[idx] @ beta)


def half_used_jit(X: Any, y: Any, group: Any) -> None:
    beta = coefficients()
    _, total = jax.jit(lambda X, beta: (X @ beta, beta.sum()))(X, beta)
    observe(y, lambda idx: X[idx] @ beta + total)


def tall_matrix(X: Any, y: Any, group: Any) -> None:
    weights = numpyro.sample(
        "weights", dist.Normal(0.0, 1.0).expand([TALL, 3]).to_event(2)
    )
    total = (weights @ jnp.ones(3)).sum()
    observe(y, lambda idx: X[idx, 0] * total)


def square_data(X: Any, y: Any, group: Any) -> None:
    basis = jnp.ones((TALL, TALL))
    weights = coefficients(TALL)
    observe(y, lambda idx: basis[idx] @ weights)


def square_data_subsampled(X: Any, y: Any, group: Any) -> None:
    basis = jnp.ones((TALL, TALL))
    weights = coefficients(TALL)
    with numpyro.plate("data", TALL, 10):
        means = numpyro.subsample(basis, event_dim=1) @ weights
        numpyro.sample("obs", dist.Normal(means), obs=numpyro.subsample(y, event_dim=0))


def scan_prior(X: Any, y: Any, group: Any) -> None:
    def body(level: Any, _: Any) -> Any:
        level = numpyro.sample("level", dist.Normal(level, 1.0))
        return level, level

    _, levels = scan(body, 0.0, jnp.arange(5))
    observe(y, lambda idx: levels[group[idx]])


def cond_prior(X: Any, y: Any, group: Any) -> None:
    mean = cond(
        True,
        lambda _: numpyro.sample("mean", dist.Normal(0.0, 1.0)),
        lambda _: numpyro.sample("mean", dist.Normal(0.0, 2.0)),
        None,
    )
    observe(y, lambda idx: mean)


def loop_inside(X: Any, y: Any, group: Any) -> None:
    beta = coefficients()

    def add(total: Any, _: Any) -> Any:
        return total + X[idx_of[0]] @ beta, None

    idx_of: list[Any] = []

    def mean(idx: Any) -> Any:
        idx_of[:] = [idx]
        return jax.lax.scan(add, jnp.zeros(idx.shape), jnp.arange(3))[0]

    observe(y, mean)


def wide_network(X: Any, y: Any, group: Any, random: bool = False) -> None:
    nn = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import flax_module, random_flax_module

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(1)(nn.tanh(nn.Dense(TALL)(x)))[:, 0]

    if random:
        net = random_flax_module("net", Net(), dist.Normal(), input_shape=(10, 2))
    else:
        net = flax_module("net", Net(), input_shape=(10, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    observe(y, lambda idx: net(X[idx]) * scale)


def random_network(X: Any, y: Any, group: Any) -> None:
    wide_network(X, y, group, random=True)


def correlated(X: Any, y: Any, group: Any) -> None:
    factor = numpyro.sample("factor", dist.LKJCholesky(2, 1.0))
    beta = numpyro.sample(
        "beta", dist.MultivariateNormal(jnp.zeros(2), scale_tril=factor)
    )
    observe(y, lambda idx: X[idx] @ beta)


def outputs(X: Any, y: Any, group: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    with (
        numpyro.plate("data", TALL, 10, dim=-2) as idx,
        numpyro.plate("outputs", 2, dim=-1),
    ):
        numpyro.sample("obs", dist.Normal(X[idx] @ beta, 1.0), obs=X[idx])


def undeclared_axis(X: Any, y: Any, group: Any) -> None:
    beta = coefficients(3)
    observe(y, lambda idx: beta[:, None] * X[idx, 0])


def mixture(X: Any, y: Any, group: Any) -> None:
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    means = coefficients()
    with numpyro.plate("data", TALL, 10) as idx:
        parts = dist.Normal(means, 1.0)
        numpyro.sample(
            "obs",
            dist.MixtureSameFamily(dist.Categorical(weights), parts),
            obs=y[idx],
        )


def lagged(X: Any, y: Any, group: Any) -> None:
    mean = slope()
    with numpyro.plate("data", TALL - 1, 10) as idx:
        numpyro.sample("obs", dist.Normal(y[idx] * mean, 1.0), obs=y[idx + 1])


def blocks(X: Any, y: Any, group: Any) -> None:
    means, parities = coefficients(TALL // 2), slope()
    observe(y, lambda idx: means[idx // 2] + jnp.ones(7)[idx % 7] * parities)


def clipped(X: Any, y: Any, group: Any) -> None:
    short, mean = X[:900, 0], slope()
    observe(
        y,
        lambda idx: (
            mean
            + short.at[idx].get(mode="clip")
            + short[jnp.minimum(idx, 899)]
            + short[jnp.where(idx < 900, idx, 0)]
        ),
    )


@pytest.mark.parametrize(
    "model",
    [
        rows_inside,
        elementwise_outside,
        groups_outside,
        standardised,
        empirical_prior,
        fitted_values,
        half_used_jit,
        tall_matrix,
        square_data,
        square_data_subsampled,
        scan_prior,
        cond_prior,
        loop_inside,
        wide_network,
        random_network,
        correlated,
        outputs,
        undeclared_axis,
        mixture,
        lagged,
        blocks,
        clipped,
    ],
)
def test_no_false_alarm(model: Callable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a network with fixed weights is worth one
        warnings.filterwarnings("ignore", ".*numpyro.param sites are not sampled")
        inspect_model("MINT", model, (TALL_X, TALL_Y, TALL_GROUP), {}, None)


def gathered(take: Callable[[Any, Any, Any], Any]) -> Callable:
    def model(X: Any, y: Any) -> None:
        beta = coefficients()
        shape = dist.Normal(0.0, 1.0).expand([len(X), 2]).to_event(2)
        by_row = numpyro.sample("by_row", shape)
        observe(y, lambda idx: take(X, by_row, idx) @ beta)

    return model


@pytest.mark.parametrize(
    "take",
    [
        lambda X, latent, idx: X[idx],
        lambda X, latent, idx: X[idx, :1] * jnp.ones(2),
        lambda X, latent, idx: X[idx[:, None], jnp.arange(2)],
        lambda X, latent, idx: X.T[:, idx].T,
        lambda X, latent, idx: jnp.take(X, idx, axis=0),
        lambda X, latent, idx: jnp.take_along_axis(X, idx[:, None], 0) * jnp.ones(2),
        lambda X, latent, idx: jax.jit(lambda X, idx: X[idx])(X, idx),
        lambda X, latent, idx: latent[idx],
    ],
    ids=["rows", "column", "points", "columns", "take", "along", "jit", "latent"],
)
def test_short_arrays_are_found_however_they_are_indexed(take: Callable) -> None:
    with pytest.raises(ValueError, match="'data', which has 2000 rows"):
        inspect_model("MINT", gathered(take), (TALL_X[:900], TALL_Y), {}, None)
    inspect_model("MINT", gathered(take), (TALL_X, TALL_Y), {}, None)


# densities that overflow --------------------------------------------------------------


def overflowing(y: Any) -> None:
    """Beyond one the density is infinite, as after an overflow."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.factor("overflow", jnp.where(mu > 1.0, jnp.inf, 0.0))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("obs", dist.Normal(mu, 3.0), obs=y[idx])


@pytest.mark.parametrize(
    "make",
    [
        lambda m: MINT(m, batch=batch.full(), temperature=1.0, step_size=1.0),
        lambda m: MinibatchMH(m, batch=batch.full(), step_size=1.0),
        lambda m: AMAGOLD(m, batch=batch.full(), step_size=0.5),
    ],
    ids=["MINT", "MinibatchMH", "AMAGOLD"],
)
def test_a_density_that_overflows_is_not_entered(make: Any) -> None:
    """An infinite density would be accepted, and then every other move rejected."""
    y = np.linspace(-3.0, 3.0, 20)
    mcmc = MCMC(make(overflowing), num_warmup=50, num_samples=400, progress_bar=False)
    mcmc.run(jax.random.key(0), y, init_params={"mu": jnp.array(0.0)})
    mu = mcmc.get_samples()["mu"]
    assert mu.max() <= 1.0
    assert len(np.unique(mu)) > 50
