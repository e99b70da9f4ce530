"""A model that cannot be sampled from minibatches is refused for the true reason, in
its own names, and before anything compiles."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC
from scipy.stats import rankdata

from numpyro_minibatch import (
    MINT,
    MINTEE,
    RELD,
    RENHD,
    CyclicalMINT,
    CyclicalSGHMC,
    MinibatchMH,
    Target,
    batch,
    marginalize,
)
from numpyro_minibatch._model.preflight import inspect_model

N = 60
RNG = np.random.default_rng(0)
Y = jnp.asarray(RNG.normal(size=N))


def level() -> Any:
    return numpyro.sample("level", dist.Normal(0.0, 1.0))


def schools(y: Any) -> None:
    mu = level()
    with numpyro.plate("schools", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mu, 1.0))
        numpyro.sample("score", dist.Normal(effect, 1.0), obs=y)


def enumerated(y: Any) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("people", len(y)):
        kind = numpyro.sample(
            "kind", dist.Bernoulli(0.5), infer={"enumerate": "parallel"}
        )
        numpyro.sample("score", dist.Normal(means[kind], 1.0), obs=y)


def with_missing(y: Any) -> None:
    mu = level()
    with numpyro.plate("people", len(y)) as idx:
        numpyro.sample("score", dist.Normal(mu, 1.0), obs=y[idx], obs_mask=y[idx] > 0)


def after_the_block(y: Any) -> None:
    mu = level()
    with numpyro.plate("people", len(y), subsample_size=10) as idx:
        rows = y[idx]
    numpyro.sample("score", dist.Normal(mu, 1.0), obs=rows)


def autoregression(y: Any) -> None:
    mu = level()

    def step(last: Any, now: Any) -> Any:
        numpyro.sample("price", dist.Normal(mu * last, 1.0), obs=now)
        return now, None

    scan(step, 0.0, y)


def seasons(y: Any) -> None:
    with numpyro.plate("season", 4):
        numpyro.sample("effect", dist.Normal(0.0, 1.0))
    autoregression(y)


def conditioned_series(y: Any) -> None:
    def step(last: Any, _: Any) -> Any:
        now = numpyro.sample("price", dist.Normal(last, 1.0))
        return now, None

    level()
    with handlers.condition(data={"price": y}):
        scan(step, 0.0, None, length=len(y))


def lagged(y: Any) -> None:
    numpyro.sample("price", dist.Normal(level() * y[:-1], 1.0), obs=y[1:])


def random_walk(y: Any) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("price", dist.GaussianRandomWalk(scale, len(y)), obs=y)


def gaussian_process(y: Any) -> None:
    cov = jnp.eye(len(y)) * numpyro.sample("scale", dist.HalfNormal(1.0))
    zeros = jnp.zeros(len(y))
    numpyro.sample(
        "price", dist.MultivariateNormal(zeros, cov, validate_args=False), obs=y
    )


def gaussian_process_in_a_plate(y: Any) -> None:
    size = len(Y)
    price = numpyro.sample("curve", dist.MultivariateNormal(level(), jnp.eye(size)))
    with numpyro.plate("days", size):
        numpyro.sample("price", dist.Normal(price, 1.0), obs=y)


def gaussian_process_in_no_plate(y: Any) -> None:
    curve = numpyro.sample("curve", dist.MultivariateNormal(level(), jnp.eye(N)))
    numpyro.sample("price", dist.Normal(curve, 1.0), obs=y)


def in_one_line(y: Any) -> None:
    numpyro.sample("score", dist.Normal(level(), 1.0), obs=y[None])


def enumerated_and_counted(y: Any) -> None:
    count = int(np.max(y > 0)) + 1
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(count)))
    with numpyro.plate("people", len(y)):
        kind = numpyro.sample("kind", dist.Categorical(probs))
        numpyro.sample("score", dist.Normal(kind, 1.0), obs=y)


def enumerated_in_a_scan(y: Any) -> None:
    mu = level()

    def step(kind: Any, now: Any) -> Any:
        with numpyro.plate("series", 5):
            kind = numpyro.sample("kind", dist.Bernoulli(logits=mu + kind))
            numpyro.sample("price", dist.Normal(kind, 1.0), obs=now)
        return kind, None

    scan(step, jnp.zeros(5, int), y.reshape(-1, 5))


def one_event(y: Any) -> None:
    mean = jnp.full(len(y), level())
    numpyro.sample("score", dist.Normal(mean, 1.0).to_event(1), obs=y)


def one_factor(y: Any) -> None:
    numpyro.factor("fit", dist.Normal(level(), 1.0).log_prob(y).sum())


def random_effects(y: Any) -> None:
    effect = numpyro.sample("effect", dist.Normal(level(), 1.0).expand([len(y)]))
    numpyro.sample("score", dist.Normal(effect, 1.0), obs=y)


def held_outside(y: Any) -> None:
    mu = level()
    with numpyro.plate("people", N) as idx:
        numpyro.sample("score", dist.Normal(mu * y[idx], 1.0))


def no_batch_size(y: Any) -> None:
    mu = level()
    with numpyro.plate("people", N):
        numpyro.sample("score", dist.Normal(mu, 1.0), obs=y)


LOCAL = ("one value per row", "'people'")
SERIES = ("'price' is in a scan", "NUTS", "jax.lax.scan")


def no_shared_parameter(y: Any) -> None:
    with numpyro.plate("players", N):
        skill = numpyro.sample("skill", dist.Normal(0.0, 1.0))
        numpyro.sample("score", dist.Normal(skill, 1.0), obs=y)


def votes(y: Any) -> None:
    """The plate with the latent classes is not the one whose rows are taken."""
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    with numpyro.plate("items", 5, dim=-2):
        kind = numpyro.sample(
            "kind", dist.Bernoulli(p), infer={"enumerate": "parallel"}
        )
        with numpyro.plate("people", N):
            numpyro.sample("score", dist.Normal(kind * p, 1.0), obs=y)


def in_a_loop(y: Any) -> None:
    mu = level()
    for k in range(5):
        numpyro.sample(f"score_{k}", dist.Normal(mu, 1.0), obs=y[k])


def one_entry(y: Any) -> None:
    numpyro.sample("score", dist.Poisson(jnp.exp(level())), obs=3)


def lags_in_a_plate(y: Any) -> None:
    mu = level()
    with numpyro.plate("days", len(y) - 1):
        numpyro.sample("price", dist.Poisson(jnp.exp(mu * y[:-1])), obs=y[1:])


def point_of_change(y: Any) -> None:
    day = numpyro.sample("day", dist.DiscreteUniform(0, 9))
    after = jnp.arange(len(y)) > day
    numpyro.sample("price", dist.Normal(level() * after, 1.0), obs=y)


REASONS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "a latent site of each row": (schools, ("'effect'", "'schools'", "one value per")),
    "an enumerated site": (enumerated, ("'kind'", "discrete", "Mixture", *LOCAL)),
    "obs_mask": (with_missing, ("obs_mask", "handlers.mask", *LOCAL)),
    "after the block": (after_the_block, ("'score' stands outside", "indent")),
    "rows without a shared parameter": (
        no_shared_parameter,
        ("'skill'", "share no parameter", "Sample it with NUTS"),
    ),
    "an enumerated site in a smaller plate": (
        votes,
        ("'kind'", "plate 'items'", 'marginalize(model, sites=["kind"])'),
    ),
    "a scan": (autoregression, SERIES),
    "a plate of four seasons": (seasons, SERIES),
    "a series that is conditioned": (conditioned_series, SERIES),
    "lags": (lagged, ("'price' has 59 entries", "also lagged ones (y[1:], y[:-1])")),
    "a random walk": (random_walk, ("one GaussianRandomWalk of 60", "NUTS")),
    "a Gaussian process": (gaussian_process, ("one MultivariateNormal of 60", "NUTS")),
    "a Gaussian process in a plate": (
        gaussian_process_in_a_plate,
        ("latent site 'curve' has 60 entries", "plate 'days'", "NUTS"),
    ),
    "rows in the second dimension": (
        in_one_line,
        ("'score' has batch shape (1, 60)", "leave the dimension of length 1 out"),
    ),
    "a Gaussian process in no plate": (
        gaussian_process_in_no_plate,
        ("latent site 'curve' is one MultivariateNormal", "'price'", "with NUTS"),
    ),
    "an enumerated site, of as many values as data have": (
        enumerated_and_counted,
        ("'kind'", "discrete", "Mixture", *LOCAL),
    ),
    "an enumerated site in a scan": (
        enumerated_in_a_scan,
        ("'series'", "'kind'", "enumeration", "jax.lax.scan", "numpyro.factor"),
    ),
    "one event": (one_event, ("'score'", "leave out .to_event")),
    "one factor": (one_factor, ("numpyro.factor('fit', ...) is one number",)),
    "effects of rows in no plate": (random_effects, ("'effect' has a value for each",)),
    "a site for each step of a loop": (
        in_a_loop,
        (
            "'score_0', 'score_1' and 3 more",
            "a Python loop",
            "time series",
            "sample it with",
        ),
    ),
    "one entry": (one_entry, ("'score' has one entry", 'sample("score", dist.Poisson')),
    "lags in a plate": (
        lags_in_a_plate,
        ('plate("days", 59)', 'sample("price", dist.Poisson', "y[1:] and y[:-1]"),
    ),
    "a discrete site of all rows": (
        point_of_change,
        ("'day' is discrete", "not a variable of single rows", "with NUTS"),
    ),
    "condition": (
        handlers.condition(held_outside, {"score": Y}),
        ("handlers.condition holds all rows of site 'score'", "obs=y"),
    ),
}


NAMED = {
    "a latent site of each row": {"schools": 10},
    "an enumerated site": {"people": 10},
    "obs_mask": {"people": 10},
}


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [(name, size) for name in REASONS for size in (10, None)] + [*NAMED.items()],
)
def test_the_reason_is_the_true_one(name: str, batch_size: Any) -> None:
    model, says = REASONS[name]
    asks_first = (
        "an enumerated site in a smaller plate",
        "a discrete site of all rows",
        "lags in a plate",
        "condition",
        "effects of rows in no plate",
        "a Gaussian process in a plate",
        "a Gaussian process in no plate",
    )
    if batch_size is None and name in asks_first:
        says = ("batch_size=",)
    with pytest.raises(ValueError) as caught:
        inspect_model("MINT", model, (Y,), {}, batch_size)
    message = str(caught.value)
    assert [words for words in says if words not in message] == [], message
    assert len(message) < 700


def repeated(y: Any) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("units", len(y), dim=-2):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
        with numpyro.plate("visits", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@pytest.mark.parametrize("batch_size", [10, None])
def test_repeated_observations_of_many_units_are_no_rows(batch_size: Any) -> None:
    y = Y.reshape(-1, 3)
    says = r'marginalize\(model, sites=\["effect"\]\)'
    with pytest.raises(ValueError, match=says):
        inspect_model("MINT", repeated, (y,), {}, batch_size, default=10)
    model = marginalize(repeated, sites=["effect"])
    layout, _ = inspect_model("MINT", model, (y,), {}, batch_size, default=10)
    assert layout.plates == (("units", len(y)),)
    # many observations of few units are rows, whose latent sites are parameters
    layout, _ = inspect_model("MINT", repeated, (y.T,), {}, batch_size, default=10)
    assert layout.plates == (("visits", len(y)),)


def test_lists_of_numbers_are_named() -> None:
    def model(x: Any, y: Any) -> None:
        numpyro.sample("score", dist.Normal(level() * jnp.array(x), 1.0), obs=y)

    x = [float(v) for v in Y]
    with pytest.raises(ValueError, match="x is a list of 60 numbers"):
        inspect_model("MINT", model, (x, Y), {}, 10)
    layout, _ = inspect_model("MINT", model, (np.asarray(x), Y), {}, 10)
    assert layout.plates == (("data", N),)


def test_text_is_named_and_its_codes_run() -> None:
    def model(group: Any, y: Any) -> None:
        names, codes = np.unique(group, return_inverse=True)
        with numpyro.plate("groups", len(names)):
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(a[codes], 1.0), obs=y)

    def advised(codes: Any, number: int, y: Any) -> None:
        with numpyro.plate("groups", number):
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(a[codes], 1.0), obs=y)

    group = np.array(["a", "b", "c"])[RNG.integers(0, 3, N)]
    says = r"group has dtype <U1: .*numpy.unique\(group, return_inverse=True\)"
    with pytest.raises(ValueError, match=says):
        inspect_model("MINT", model, (group, Y), {}, 10)
    names, codes = np.unique(group, return_inverse=True)
    layout, _ = inspect_model("MINT", advised, (codes, len(names), Y), {}, 10)
    assert layout.plates == (("data", N),)


def test_objects_that_hold_arrays_are_named_and_run_if_registered() -> None:
    @dataclass
    class Survey:
        y: Any

    def model(survey: Any) -> None:
        numpyro.sample("score", dist.Normal(level(), 1.0), obs=survey.y)

    with pytest.raises(ValueError, match=r"survey is a Survey: .*_dataclass\(Survey\)"):
        inspect_model("MINT", model, (Survey(Y),), {}, 10)
    jax.tree_util.register_dataclass(Survey, data_fields=["y"], meta_fields=[])
    layout, _ = inspect_model("MINT", model, (Survey(Y),), {}, 10)
    assert layout.plates == (("data", N),)


def groups_counted_inside(y: Any, group: Any) -> None:
    with numpyro.plate("groups", len(np.unique(group))):
        means = numpyro.sample("means", dist.Normal(0.0, 1.0))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_python_code_that_needs_values_is_named(as_array: Any) -> None:
    group = as_array(np.arange(N) % 3)
    with pytest.raises(TypeError, match="needs the values") as caught:
        inspect_model("MINT", groups_counted_inside, (Y, group), {}, 10)
    message = str(caught.value)
    assert 'with numpyro.plate("groups", len(np.unique(group)))' in message
    assert "Compute len(np.unique(group)) beforehand, from all rows" in message


def count_groups(x: Any) -> int:
    return int(
        np.max(x)
    ) + 1  # fmt: skip


def assigned(group: Any, y: Any) -> None:
    number = len(np.unique(group))
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([number]))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


def assigned_before(group: Any, y: Any) -> None:
    number = group.max() + 1
    with numpyro.plate("groups", number):
        means = numpyro.sample("means", dist.Normal(0.0, 1.0))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


def several(group: Any, y: Any) -> None:
    number = len(np.unique(group))
    lowest, n = np.min(y), len(y)
    half = number / 2  # of what is computed before
    top = float(np.max(y))
    means = numpyro.sample("means", dist.Normal(lowest, half).expand([number]))
    with numpyro.plate("rows", n):
        numpyro.sample("score", dist.Normal(means[group], top), obs=y)


def in_a_helper(group: Any, y: Any) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([count_groups(group)]))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


def of_a_local_name(group: Any, y: Any) -> None:
    other = group + 1
    number = int(other.max())
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([number]))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


def of_a_sample(group: Any, y: Any) -> None:
    means = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([len(np.unique(group))]))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


def converted(group: Any, y: Any) -> None:
    group = np.asarray(group)
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


def checked(group: Any, y: Any) -> None:
    if (y < -100).any():
        raise ValueError("too small")
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)


def selected(group: Any, y: Any) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([3]))
    with numpyro.plate("rows", N) as idx:
        group, y = group[idx], y[idx]
        y = y[group > 0]
        numpyro.sample("score", dist.Normal(means[0], 1.0), obs=y)


def a_site_of_each_group(group: Any, y: Any) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([3]))
    for j in range(3):
        with numpyro.plate(f"rows_{j}", int((group == j).sum())):
            numpyro.sample(f"y_{j}", dist.Normal(means[j], 1.0), obs=y[group == j])


def factorized(group: Any, y: Any) -> None:
    codes, names = pd.factorize(group)
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([len(names)]))
    numpyro.sample("score", dist.Normal(means[codes], 1.0), obs=y)


def categories(group: Any, y: Any) -> None:
    codes = pd.Categorical(group).codes
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("score", dist.Normal(means[codes], 1.0), obs=y)


def ranked(group: Any, y: Any) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("score", dist.Normal(slope * rankdata(group), 1.0), obs=y)


X_AROUND = RNG.normal(size=N)
Y_AROUND = RNG.normal(size=N)


def with_arrays_around(group: Any, y: Any) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", N, subsample_size=10) as idx:
        numpyro.sample(
            "score", dist.Normal(slope * X_AROUND[idx], 1.0), obs=Y_AROUND[idx]
        )


# pandas warned of arrays of JAX before it refused them
@pytest.mark.filterwarnings("ignore:factorize with argument:FutureWarning")
@pytest.mark.parametrize(
    ("model", "line", "says"),
    [
        (
            a_site_of_each_group,
            '`with numpyro.plate(f"rows_{j}", int((group == j).sum())):`',
            "a[group] in place of a[j], and y in place of y[group == j]",
        ),
        (
            factorized,
            "`codes, names = pd.factorize(group)`",
            "Compute pd.factorize(group) beforehand, from all rows",
        ),
        (
            categories,
            "`codes = pd.Categorical(group).codes`",
            "add codes to the parameters of categories, and write mcmc.run(key, ..., "
            "codes=pd.Categorical(group).codes)",
        ),
        (ranked, "rankdata(group)", "Compute rankdata(group) beforehand"),
        (
            with_arrays_around,
            "slope * X_AROUND[idx]",
            "X_AROUND and Y_AROUND are NumPy arrays from outside of the model, which "
            "a batch cannot index: pass them as arguments, def with_arrays_around(..., "
            "X_AROUND, Y_AROUND), and mcmc.run(key, ..., X_AROUND=X_AROUND, "
            "Y_AROUND=Y_AROUND); or write jnp.asarray(X_AROUND)",
        ),
        (
            assigned,
            "`number = len(np.unique(group))`",
            "add number to the parameters of assigned, and write mcmc.run(key, ..., "
            "number=len(np.unique(group)))",
        ),
        (
            assigned_before,
            '`with numpyro.plate("groups", number):`',
            "pass it as an argument: leave line LINE, `number = group.max() + 1`, out, "
            "add number to the parameters of assigned_before, and write "
            "mcmc.run(key, ..., number=int(group.max() + 1))",
        ),
        (
            numpyro.handlers.scale(assigned, scale=2.0),
            "`number = len(np.unique(group))`",
            "add number to the parameters of assigned",
        ),
        (
            several,
            "`number = len(np.unique(group))`",
            "Compute number and top from all rows before the model and pass them as "
            "arguments: leave these lines out, add them to the parameters of several, "
            "and write mcmc.run(key, ..., number=len(np.unique(group)), "
            "top=float(np.max(y)))",
        ),
        (in_a_helper, "`return int(`", "Compute int(np.max(x)) beforehand"),
        (
            of_a_local_name,
            "`number = int(other.max())`",
            "Compute int(other.max()) beforehand",
        ),
        (of_a_sample, "`means = numpyro", "Compute len(np.unique(group)) beforehand"),
        (converted, "`group = np.asarray(group)`", "Write jnp.asarray(group)"),
        (checked, "`if (y < -100).any():`", "Check the data before the run"),
        (selected, "`y = y[group > 0]`", "numpyro.handlers.mask(mask=...)"),
    ],
)
def test_the_line_that_needs_values_is_written_anew(
    model: Callable, line: str, says: str
) -> None:
    group = np.arange(N) % 3
    with pytest.raises(TypeError) as caught:
        inspect_model("MINT", model, (group, Y), {}, 10)
    message = str(caught.value)
    says = says.replace("LINE", str(assigned_before.__code__.co_firstlineno + 1))
    assert line in message and says in message, message


def reads_globals() -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("score", dist.Normal(slope * X_AROUND, 1.0), obs=Y_AROUND)


def test_arrays_from_outside_become_arguments() -> None:
    x, y = X_AROUND, Y_AROUND

    def reads_closure() -> None:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N):
            numpyro.sample("score", dist.Normal(slope * x, 1.0), obs=y)

    def advised(x: Any, y: Any) -> None:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N):
            numpyro.sample("score", dist.Normal(slope * x, 1.0), obs=y)

    says = r"def reads_closure\(x, y\), and mcmc.run\(key, x=x, y=y\)"
    with pytest.raises(ValueError, match=says):
        inspect_model("MINT", reads_closure, (), {}, 10)
    with pytest.raises(ValueError, match=r"def reads_globals\(X_AROUND, Y_AROUND\)"):
        inspect_model("MINT", reads_globals, (), {}, 10)
    assert inspect_model("MINT", advised, (x, y), {}, 10)[0].plates == (("rows", N),)


def two_outcomes() -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("score1", dist.Normal(slope * X_AROUND, 1.0), obs=Y_AROUND)
    numpyro.sample("score2", dist.Normal(slope * X_AROUND, 1.0), obs=Y_AROUND)


def test_two_outcomes_are_no_loop() -> None:
    with pytest.raises(ValueError, match="from outside of the model") as caught:
        inspect_model("MINT", two_outcomes, (), {}, 10)
    assert "loop" not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, "1"])
def test_an_error_of_the_model_itself_is_not_one_of_values(wrong: Any) -> None:
    """NUTS raises the same, which names the true reason."""

    def model(x: Any, y: Any) -> None:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N):
            numpyro.sample("score", dist.Normal(slope * x + wrong, 1.0), obs=y)

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        inspect_model("MINT", model, (X_AROUND, Y_AROUND), {}, 10)
    assert "values" not in str(caught.value)


def test_sites_that_a_loop_makes_of_groups_are_named() -> None:
    group = np.arange(N) % 4

    def written(group: Any, y: Any) -> None:
        means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([4]))
        for j in range(4):
            numpyro.sample(f"y_{j}", dist.Normal(means[j], 1.0), obs=y[group == j])

    def advised(group: Any, y: Any) -> None:
        means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([4]))
        with numpyro.plate("data", N) as idx:
            numpyro.sample("y", dist.Normal(means[group[idx]], 1.0), obs=y[idx])

    says = r"'y_0', 'y_1' and 2 more have 15, 15, ... entries.*group of each row"
    with pytest.raises(ValueError, match=says) as caught:
        inspect_model("MINT", written, (group, np.asarray(Y)), {}, 10)
    assert 'sample("y", dist.Normal(a[group[idx]], ...), obs=y[idx])' in str(
        caught.value
    )
    layout, _ = inspect_model("MINT", advised, (group, Y), {}, 10)
    assert layout.plates == (("data", N),)


def test_what_the_refusal_advises_runs() -> None:
    """The advice for ``assigned``, followed."""

    def model(group: Any, y: Any, number: int) -> None:
        means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([number]))
        numpyro.sample("score", dist.Normal(means[group], 1.0), obs=y)

    group = np.arange(N) % 3
    number = {"number": len(np.unique(group))}
    layout, _ = inspect_model("MINT", model, (group, Y), number, 10)
    assert layout.shapes == ((3,),)


def test_the_batch_size_that_is_suggested_runs() -> None:
    with pytest.raises(ValueError, match=r"batch_size=\{'people': 6\}"):
        inspect_model("MINT", no_batch_size, (Y,), {}, None)
    layout, _ = inspect_model("MINT", no_batch_size, (Y,), {}, {"people": 6})
    assert layout.widths == (("people", 6),)


def mean(y: Any) -> None:
    numpyro.sample("y", dist.Normal(level(), 1.0), obs=y)


@pytest.mark.parametrize("temperature, rows", [(1.0, 980), (100.0, 290)])
def test_the_batch_that_is_suggested_decides_reliably(
    temperature: float, rows: int
) -> None:
    """One parameter: 10 N / T rows left 43% of the decisions unreliable at T = 100."""
    y = np.random.default_rng(0).normal(size=1000)

    def run(**settings: Any) -> MCMC:
        kernel = MINT(mean, temperature=temperature, **settings)
        mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, progress_bar=False)
        mcmc.run(jax.random.key(0), y)
        return mcmc

    with pytest.raises(ValueError, match=f"or batch_size={rows} if"):
        run()
    reliable = run(batch_size=rows).get_extra_fields()["reliable"]
    assert reliable.mean() > 0.9


@pytest.mark.parametrize(
    "kernel, says",
    [
        (MinibatchMH(mean), 'Add control_variate="taylor2".* most decisions need 980'),
        (MinibatchMH(mean, temperature=1e4), "pass batch_size.* With control_variate"),
        (MINTEE(mean), r"sets it, too\.$"),
    ],
)
def test_a_control_variate_is_advised_where_batches_would_be_large(
    kernel: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        kernel.init(jax.random.key(0), 10, None, (np.zeros(1000),), {})


@pytest.mark.parametrize("kind", [RENHD, RELD, CyclicalSGHMC, CyclicalMINT])
def test_a_kernel_that_another_one_makes_is_called_by_that_name(kind: Any) -> None:
    cycles = {"cycle_length": 100} if "Cyclical" in kind.__name__ else {}
    rate = {"temperature": 2.0} if kind is CyclicalMINT else {"step_size": 0.1}
    for wrong in ({"temperature": -1.0}, {"batch_size": 5, "batch": 5}):
        with pytest.raises((TypeError, ValueError), match=rf"^{kind.__name__}\b"):
            kind(no_batch_size, **{**rate, **cycles, **wrong})
    kernel = kind(no_batch_size, **rate, **cycles)
    with pytest.raises(ValueError, match=f"^{kind.__name__} needs a batch size"):
        kernel.init(jax.random.key(0), 10, None, (Y,), {})
    # it is the same kernel as one that a user makes, in copies and pickles, too
    inner = copy.copy(kind(no_batch_size, **rate, **cycles)).inner
    assert inner == type(inner)(no_batch_size, **rate).with_num_steps(inner.num_steps)
    assert repr(kind.__name__) not in repr(inner) + str(inner.settings)


@pytest.mark.parametrize("kind", [CyclicalSGHMC, CyclicalMINT])
def test_the_cycles_that_are_suggested_run(kind: Any) -> None:
    with pytest.raises(TypeError, match="needs the length of a cycle") as error:
        kind(no_batch_size)
    (call,) = re.findall(rf"write ({kind.__name__}\(.*\))", str(error.value))
    kernel = eval(call, {kind.__name__: kind, "model": mean})
    kernel.init(jax.random.key(0), 0, None, (jnp.zeros(200),), {})


def test_of_nested_plates_that_of_the_data_is_subsampled() -> None:
    def model(y: Any) -> None:
        mu = level()
        with numpyro.plate("sensors", 5):
            bias = numpyro.sample("bias", dist.Normal(mu, 1.0))
            with numpyro.plate("times", 100):
                numpyro.sample("obs", dist.Normal(bias, 1.0), obs=y)

    layout, _ = inspect_model("MINT", model, (jnp.ones((100, 5)),), {}, 10)
    assert layout.plates == (("times", 100),)


def no_parameter(y: Any) -> None:
    level()
    with numpyro.plate("people", len(y)):
        numpyro.sample("score", dist.Normal(0.0, 1.0), obs=y)


def no_shared_parameter(y: Any) -> None:
    level()
    with numpyro.plate("people", len(y)):
        kind = numpyro.sample("kind", dist.DiscreteUniform(0, 9))
        numpyro.sample("score", dist.Normal(kind, 1.0), obs=y)


@pytest.mark.parametrize("model", [no_parameter, marginalize(no_shared_parameter)])
def test_rows_that_depend_on_no_parameter_are_refused(model: Any) -> None:
    says = "observed site 'score' does not depend on latent site 'level'.*NUTS"
    with pytest.raises(ValueError, match=says):
        inspect_model("MinibatchMH", model, (Y,), {}, 10)
    target = Target(lambda z: -(z["a"] ** 2), lambda z, i: jnp.zeros(len(i)), N)
    kernel = MinibatchMH(target=target, batch_size=10)
    with pytest.raises(ValueError, match="target does not depend on z"):
        kernel.init(jax.random.key(0), 0, {"a": jnp.zeros(())}, (), {})


def test_a_model_that_is_masked_has_nothing_to_expand() -> None:
    def model(y: Any) -> None:
        mu = level()
        with numpyro.plate("people", len(y)) as i, numpyro.handlers.mask(mask=False):
            numpyro.sample("score", dist.Normal(mu, 1.0), obs=y[i])

    kernel = MinibatchMH(model, control_variate="taylor2", batch=batch.full())
    with pytest.raises(ValueError, match="all observed sites are masked"):
        kernel.init(jax.random.key(0), 1, None, (Y,), {})


def numpy_of_row(y: Any) -> None:
    mu = level()
    with numpyro.plate("people", len(y)):
        u = numpyro.sample("u", dist.Normal(mu, 1.0))
        numpyro.sample("score", dist.Normal(np.exp(u), 1.0), obs=y)


def choice_of_row(y: Any) -> None:
    mu = level()
    with numpyro.plate("people", len(y)):
        u = numpyro.sample("u", dist.Normal(mu, 1.0))
        if (u > 0).all(): u = u + 1  # fmt: skip # noqa: E701
        numpyro.sample("score", dist.Normal(u, 1.0), obs=y)


def choice(y: Any) -> None:
    mu = level()
    mean = 1.0 if mu > 0 else 2.0
    with numpyro.plate("people", len(y)):
        numpyro.sample("score", dist.Normal(mean, 1.0), obs=y)


def number(y: Any) -> None:
    mu = level()
    mu = float(mu)
    with numpyro.plate("people", len(y)):
        numpyro.sample("score", dist.Normal(mu, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (marginalize(numpy_of_row), "Write jnp.exp(u) in place of np.exp(u)."),
        (marginalize(choice_of_row), "Write jnp.where((u > 0).all(), ..., ...)."),
        (choice, "Write jnp.where(mu > 0, ..., ...)."),
        (number, "Write jnp.asarray(mu) in place of float(mu)."),
    ],
)
def test_code_that_needs_the_value_of_a_latent_site_is_written_with_jax(
    model: Any, says: str
) -> None:
    """It has no value in NumPyro's NUTS, either, and cannot be computed from data."""
    kernel = MinibatchMH(model, batch=batch.full())
    with pytest.raises(TypeError, match="needs the value of a latent site") as caught:
        kernel._setup((Y,), {})  # before anything compiles
    assert says in str(caught.value)
    assert "beforehand" not in str(caught.value)


def test_a_plate_of_one_row_is_no_matter_of_the_batch_size() -> None:
    def model(y: Any) -> None:
        mu = level()
        with numpyro.plate("people", len(y)) as i:
            numpyro.sample("score", dist.Normal(mu, 1.0), obs=y[i])

    says = "plate '(people|data)' has 1 row.*NUTS"
    for settings in ({"control_variate": "taylor2"}, {"batch": batch.full()}):
        kernel = MinibatchMH(model, **settings)
        with pytest.raises(ValueError, match=says):
            kernel._setup((Y[:1],), {})
    target = Target(lambda z: 0.0, lambda z, i: z["a"] * i, 1)
    with pytest.raises(ValueError, match=says):
        MinibatchMH(target=target, batch=batch.full())._setup((), {})


def test_beside_rows_of_another_plate_one_row_is_read_in_full() -> None:
    def model(x: Any, y: Any) -> None:
        mu = level()
        with numpyro.plate("people", len(y)) as i:
            numpyro.sample("score", dist.Normal(mu, 1.0), obs=y[i])
        with numpyro.plate("studies", len(x)) as i:
            numpyro.sample("earlier", dist.Normal(mu, 1.0), obs=x[i])

    layout, _ = inspect_model("MINT", model, (Y[:1], Y), {}, None, default=10)
    assert layout.widths == (("people", 10),)


def test_angles_are_warned_of_once_before_the_run() -> None:
    def model(y: Any) -> None:
        mean = numpyro.sample("mean", dist.VonMises(0.0, 0.1))
        with numpyro.plate("people", len(y)):
            numpyro.sample("score", dist.VonMises(mean, 2.0), obs=y)

    def messages(model: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel = MinibatchMH(model, batch=batch.full())
            kernel._setup((Y,), {})
            kernel._setup((Y,), {})  # for another chain
        return [str(w.message) for w in caught]

    (message,) = messages(model)
    assert "latent site 'mean' is an angle" in message
    remedy = "numpyro.handlers.reparam(model, config={'mean': CircularReparam()})"
    assert remedy in message
    from numpyro.infer.reparam import CircularReparam  # noqa: F401

    assert not messages(eval(remedy, {**globals(), **locals()}))
    assert not messages(no_batch_size)
