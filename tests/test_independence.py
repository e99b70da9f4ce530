"""Rows must be independent of their batch. Models that break this are refused with the
site, the difference and a remedy; other models are accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_minibatch import MINT, SGHMC, HostRows, Target
from numpyro_minibatch._model import batch_comparison
from numpyro_minibatch._model.independence import check_rows
from numpyro_minibatch._model.preflight import inspect_model
from numpyro_minibatch.target import ModelTarget

N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = RNG.normal(size=N).astype(np.float32)
GROUP = RNG.integers(0, 4, N)


def check(model: Callable, *args: Any) -> None:
    layout, frozen = inspect_model("MINT", model, args, {}, None)

    def target(args: tuple, kwargs: dict[str, Any]) -> ModelTarget:
        plates = dict(layout.plates)
        return ModelTarget(
            model=model, args=args, kwargs=kwargs, sizes=plates, frozen=frozen
        )

    check_rows("MINT", target, model, args, {}, layout)


@contextmanager
def comparisons() -> Iterator[list[int]]:
    """Counts the numerical comparisons that are made inside."""
    counted: list[int] = []
    evaluate = batch_comparison.Comparison.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batch_comparison.Comparison,
            "evaluate",
            lambda self, *more: counted.append(1) or evaluate(self, *more),
        )
        yield counted


def slope() -> Any:
    return numpyro.sample("slope", dist.Normal(0.0, 1.0))


def plate() -> Any:
    return numpyro.plate("data", N, subsample_size=10)


def observe(mean: Callable[[Any, Any], Any]) -> Callable:
    """A model whose rows have this mean, a function of a parameter and of indices."""

    def model(X: Any, y: Any, group: Any) -> None:
        b = slope()
        with plate() as idx:
            numpyro.sample("obs", dist.Normal(mean(b, idx), 1.0), obs=y[idx])

    return model


# rows that depend on their batch -----------------------------------------------------


def autoregression(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        rows = y[idx]
        before = jnp.concatenate([jnp.zeros(1), rows[:-1]])
        numpyro.sample("obs", dist.Normal(b * before, 1.0), obs=rows)


def event(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        numpyro.sample("obs", dist.Normal(b * X[idx, 0], 1.0).to_event(1), obs=y[idx])


def event_of_a_number(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        numpyro.sample("obs", dist.Normal(b, 1.0).expand([len(idx)]).to_event(1),
                       obs=y[idx])  # fmt: skip


def summed_factor(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        numpyro.factor("obs", dist.Normal(b * X[idx, 0], 1.0).log_prob(y[idx]).sum())


def gaussian_process(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        x = X[idx, 0]
        cov = jnp.exp(-jnp.square(x[:, None] - x)) + jnp.eye(len(x))
        numpyro.sample(
            "obs", dist.MultivariateNormal(b * x, cov, validate_args=False), obs=y[idx]
        )


def recurrence(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        _, means = lax.scan(lambda m, r: (b * (m + r),) * 2, 0.0, X[idx, 0])
        numpyro.sample("obs", dist.Normal(means, 1.0), obs=y[idx])


def scaled_by_hand(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        rows = dist.Normal(b, 1.0).log_prob(y[idx])
        numpyro.factor("obs", N / len(idx) * rows)


def prior_of_the_size(X: Any, y: Any, group: Any) -> None:
    with plate() as idx:
        rows = y[idx]
    b = numpyro.sample("slope", dist.Normal(0.0, len(rows) ** -0.5))
    with plate():
        numpyro.sample("obs", dist.Normal(b, 1.0), obs=rows)


def prior_of_many_rows(X: Any, y: Any, group: Any) -> None:
    """Only with all rows another prior than in every batch."""
    with plate() as idx:
        rows = y[idx]
    b = numpyro.sample("slope", dist.Normal(0.0, 1.0 if len(rows) > 30 else 0.1))
    with plate():
        numpyro.sample("obs", dist.Normal(b, 1.0), obs=rows)


def prior_of_the_mean(X: Any, y: Any, group: Any) -> None:
    with plate() as idx:
        rows = y[idx]
    b = numpyro.sample("slope", dist.Normal(rows.mean(), 1.0))
    with plate():
        numpyro.sample("obs", dist.Normal(b, 1.0), obs=rows)


def observed_outside(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with plate() as idx:
        numpyro.sample("obs", dist.Normal(b, 1.0), obs=y[idx])
        rows = X[idx, 0]
    numpyro.sample("more", dist.Normal(b, 1.0), obs=rows)


def of_another_plate(X: Any, y: Any, group: Any) -> None:
    b = slope()
    with numpyro.plate("first", N, 10) as i:
        numpyro.sample("one", dist.Normal(b, 1.0), obs=y[i])
    with numpyro.plate("second", N, 10) as j:
        numpyro.sample("two", dist.Normal(b * X[i, 0].mean(), 1.0), obs=y[j])


DEPENDENT: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "lag": (
        autoregression,
        ("'data'", "site 'obs'", "rows in another order", "y[idx - 1]", "NUTS"),
    ),
    "standardised in the batch": (
        observe(lambda b, i: b * jax.nn.standardize(jnp.asarray(Y)[i])),
        ("of other rows", "from all of the data before the plate"),
    ),
    "number of rows": (
        observe(lambda b, i: b / len(i)),
        ("another number of rows", "all rows, 60"),
    ),
    "many rows": (
        observe(lambda b, i: b if len(i) > 30 else 2 * b),
        ("another number of rows", "all rows, 60"),
    ),
    "prior of many rows": (
        prior_of_many_rows,
        ("site 'slope' is outside of plate 'data'", "len(y) and not len(y[idx])"),
    ),
    "event": (event, ("leave out the .to_event", 'numpyro.sample("obs", dist.Normal')),
    "event of a number": (event_of_a_number, ("leave out the .to_event",)),
    "sum in a factor": (
        summed_factor,
        ("numpyro.factor('obs'", "one number for each row"),
    ),
    "multivariate normal": (gaussian_process, ("MultivariateNormal", "use NUTS")),
    "scaled by hand": (scaled_by_hand, ("another number of rows", "to the plate")),
    "prior of the size": (
        prior_of_the_size,
        ("site 'slope' is outside of plate 'data'", "len(y) and not len(y[idx])"),
    ),
    "prior of the mean": (
        prior_of_the_mean,
        ("site 'slope'", "y.mean() and not y[idx].mean()"),
    ),
    "observed outside": (observed_outside, ("site 'more'", "inside the plate")),
    "rows of another plate": (of_another_plate, ("'two'", "plate 'second'")),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_depend_on_their_batch_are_refused(name: str) -> None:
    model, says = DEPENDENT[name]
    with pytest.raises(ValueError) as caught:
        check(model, X, Y, GROUP)
    message = str(caught.value)
    assert message.startswith("MINT: ")
    assert [words for words in says if words not in message] == [], message
    assert len(message) < 700


def centred(x: Any) -> Any:
    return x - x.mean()


def imputed(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), jnp.nanmean(x), x)


@pytest.mark.parametrize(
    ("change", "value"), [(centred, 1.0), (imputed, np.nan)], ids=["centred", "imputed"]
)
@pytest.mark.parametrize("as_row", [False, True])
def test_dependence_by_few_unusual_rows_is_seen(
    change: Callable, value: float, as_row: bool
) -> None:
    size = 20_000
    x = np.zeros((size, 3), np.float32)
    x[:, 0] = RNG.normal(size=size) if change is imputed else 0.0
    x[[577, 6011, 19_000], 0] = value
    y = RNG.normal(size=size).astype(np.float32)

    def model(x: Any, y: Any) -> None:
        b = slope()
        with numpyro.plate("data", size, 10) as idx:
            rows = x[:, idx].T if as_row else x[idx]
            numpyro.sample("obs", dist.Normal(b * change(rows[:, 0]), 1.0), obs=y[idx])

    with pytest.raises(ValueError, match="statistic of the batch"):
        check(model, x.T if as_row else x, y)


@pytest.mark.parametrize("kernel", [MINT, SGHMC])
def test_kernels_refuse_them_in_init(kernel: Any) -> None:
    own = {"temperature": 10.0} if kernel is MINT else {"step_size": 0.01}
    with pytest.raises(ValueError, match="not independent of each other"):
        kernel(autoregression, **own).init(
            jax.random.key(0), 5, None, (X, Y, GROUP), {}
        )


ACROSS: dict[str, Callable[[Any, Any], Any]] = {
    "cumulative sum": lambda b, i: b * jnp.cumsum(jnp.asarray(Y)[i]),
    "difference": lambda b, i: b * jnp.diff(jnp.asarray(Y)[i], prepend=0.0),
    "scan": lambda b, i: lax.scan(
        lambda m, r: (b * (m + r),) * 2, 0.0, jnp.asarray(X)[i, 0]
    )[1],
    "place in the batch": lambda b, i: b * jnp.arange(len(i)),
    "not indexed": lambda b, i: b * jnp.asarray(X)[: len(i), 0],
    "softmax": lambda b, i: jax.nn.softmax(b * jnp.asarray(Y)[i]),
    "largest": lambda b, i: b * jnp.asarray(Y)[i].max(),
    "ranks": lambda b, i: b * jnp.argsort(jnp.asarray(Y)[i]),
    "number of rows": lambda b, i: b / len(i),
    "number of rows, again": lambda b, i: b / jnp.ones(len(i)).sum(),
    "random numbers": lambda b, i: b + jax.random.normal(numpyro.prng_key(), i.shape),
    "until all have converged": lambda b, i: lax.while_loop(
        lambda v: jnp.any(v > 1), lambda v: v / 2, b + jnp.asarray(Y)[i]
    ),
}


@pytest.mark.parametrize("name", ACROSS)
def test_no_proof_for_rows_that_depend_on_their_batch(name: str) -> None:
    with comparisons() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batch_comparison.Comparison, "difference", lambda self: made.append(1)
        )
        check(observe(ACROSS[name]), jnp.asarray(X), jnp.asarray(Y), jnp.asarray(GROUP))
    assert made


# rows that do not --------------------------------------------------------------------


def per_row(x: Any) -> Any:
    """Independent rows, written so that a proof is not trivial."""
    x = jnp.stack([x, x**2], -1)
    x = jnp.einsum("nj,jk->kn", x, jnp.ones((2, 4)))
    return jax.nn.logsumexp(x, 0) + jnp.sort(x, 0)[1] - jnp.cumsum(x, 0)[2]


def newton(x: Any) -> Any:
    def step(_: int, root: Any) -> Any:
        return root - (root**3 + root - x) / (3 * root**2 + 1)

    return lax.fori_loop(0, 4, step, jnp.zeros_like(x))


def lookup(logits: Any, which: Any) -> Any:
    return jnp.take_along_axis(logits, which[:, None], 1)[:, 0]


ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast, einsum, sort": lambda b, i: per_row(b * jnp.asarray(Y)[i]),
    "newton": lambda b, i: newton(b * jnp.asarray(Y)[i]),
    "neighbours in the data": lambda b, i: b * jnp.asarray(Y)[jnp.maximum(i - 1, 0)],
    "standardised data": lambda b, i: b * jax.nn.standardize(jnp.asarray(Y))[i],
    "lookup": lambda b, i: lookup(b * jnp.asarray(X)[i], jnp.asarray(GROUP)[i] % 3),
    "where": lambda b, i: jnp.where(jnp.asarray(Y)[i] > 0, b, -b),
    "a vmap": lambda b, i: jax.vmap(lambda r: b * (r @ r))(jnp.asarray(X)[i]),
    "a matrix of each row": lambda b, i: jnp.linalg.cholesky(
        jnp.eye(3) + b**2 * jax.vmap(jnp.outer)(jnp.asarray(X)[i], jnp.asarray(X)[i])
    )[:, 2, 0],
    "time steps of each row": lambda b, i: lax.scan(
        lambda c, x: (b * c + x, x), jnp.zeros(len(i)), jnp.asarray(X)[i].T
    )[0],
    "no row at all": lambda b, i: b,
    "zeros": lambda b, i: b + jnp.zeros(len(i)),
}


@pytest.mark.parametrize("name", ROWS)
def test_most_models_are_proven_right_without_arithmetic(name: str) -> None:
    with comparisons() as made:
        check(observe(ROWS[name]), X, Y, GROUP)
    assert not made


def test_what_cannot_be_proven_is_compared() -> None:
    def mean(b: Any, i: Any) -> Any:  # right, but not provable
        x = b * jnp.asarray(X)[i]
        return x[jnp.arange(len(i)), jnp.asarray(GROUP)[i] % 3]

    with comparisons() as made:
        check(observe(mean), X, Y, GROUP)
    assert made == [1]  # clear without a comparison in double precision


def test_what_jax_cannot_compile_is_refused() -> None:
    """NumPy calls the method of a traced array with arguments that JAX rejects."""

    def ranked(X: Any, y: Any, group: Any) -> None:
        b = slope()
        with plate() as idx:
            ranks = np.argsort(np.argsort(jnp.asarray(y)[idx]))
            numpyro.sample("obs", dist.Normal(b * ranks, 1.0), obs=y[idx])

    with pytest.raises(ValueError, match="such as ranks.* before the model"):
        check(ranked, X, jnp.asarray(Y), GROUP)


@pytest.mark.parametrize("run_on", ["pairs", "alternating signs"])
def test_rows_that_need_an_even_number(run_on: str) -> None:
    """Two rows run and five do not: the comparison says what is wrong."""

    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        if run_on == "pairs":
            z = jnp.repeat(x.reshape(-1, 2).sum(-1), 2)
        else:
            z = x * jnp.tile(jnp.array([1.0, -1.0]), len(x) // 2)
        with numpyro.plate("rows", len(y)):
            numpyro.sample("obs", dist.Normal(b * z, 1.0), obs=y)

    x = np.asarray(X)[:, 0]
    with pytest.raises(ValueError, match="'obs' depends on which rows"):
        MCMC(
            MINT(model, batch_size=20, temperature=9.0), num_warmup=1, num_samples=1
        ).run(jax.random.key(0), x, Y)


def test_a_verdict_is_remembered() -> None:
    def mean(b: Any, i: Any) -> Any:
        return (b * jnp.asarray(X)[i])[jnp.arange(len(i)), 0]

    model = observe(mean)
    with comparisons() as made:
        check(model, X, Y, GROUP)
        check(model, X + 1.0, Y, GROUP)
        assert made == [1]
        check(model, X, Y.astype(np.int32), GROUP)
    assert made == [1, 1]


def test_masks_scales_and_rows_on_the_host() -> None:
    def model(X: Any, y: Any, weights: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with plate() as idx:
            rows = X[idx]
            with handlers.mask(mask=y[idx] > 0), handlers.scale(scale=weights[idx]):
                numpyro.sample("obs", dist.Normal(rows @ b, 1.0), obs=y[idx])

    check(model, HostRows(X), Y, jnp.abs(Y))
    check(model, HostRows(X, mode="callback"), Y, jnp.abs(Y))


def test_rounding_of_single_precision_is_no_dependence() -> None:
    """Sums in another order, in a model without a proof."""
    far = (1e4 + RNG.normal(size=(N, 40))).astype(np.float32)

    def model(X: Any, y: Any, group: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([40]).to_event(1))
        with plate() as idx:
            product = X[idx] @ b
            # the lost precision depends on the place
            noise = 1e-4 * jnp.sin(1e3 * jnp.arange(len(idx), dtype=X.dtype))
            means = (product + noise * 1e-9) - product + y[idx]
            numpyro.sample("obs", dist.Normal(means, 1e-3), obs=y[idx])

    check(model, far, Y, GROUP)


def test_chains_in_parallel_are_checked_too() -> None:
    """The caller is traced and the data are not."""
    kernel = MINT(autoregression, temperature=10.0)

    def start(key: Any) -> Any:
        return kernel.init(key, 5, None, (X, Y, GROUP), {}).z

    with pytest.raises(ValueError, match="another order"):
        jax.jit(start)(jax.random.key(0))


def test_targets_written_by_hand_are_checked() -> None:
    y = jnp.asarray(Y)

    def start(log_likelihood: Callable) -> None:
        target = Target(lambda z: -0.5 * z @ z, log_likelihood, N)
        kernel = MINT(target=target, temperature=10.0, batch_size=10)
        kernel.init(jax.random.key(0), 5, jnp.ones(2), (), {})

    start(lambda z, i: -((y[i] - z[0]) ** 2))
    with pytest.raises(ValueError, match="row .* of plate 'data'.* of other rows"):
        start(lambda z, i: -((y[i] - y[i].mean() - z[0]) ** 2))


# generated models --------------------------------------------------------------------

_BY_ROW: list[Callable[[Any, Any], Any]] = [
    lambda x, z: x * z,
    lambda x, z: jnp.tanh(x),
    lambda x, z: x[:, ::-1],
    lambda x, z: x @ jnp.ones((3, 3)),
    lambda x, z: jnp.sort(x, 1),
    lambda x, z: jnp.cumsum(x, 1),
    lambda x, z: x - x.mean(1, keepdims=True),
    lambda x, z: jnp.where(x > 0, x, z),
    lambda x, z: x.T.reshape(3, -1).T,
    lambda x, z: jnp.concatenate([x[:, 1:], x[:, :1]], 1),
    lambda x, z: jax.vmap(lambda r: r / (1 + r @ r))(x),
    lambda x, z: lax.fori_loop(0, 2, lambda _, v: jnp.sin(v) + z, x),
    lambda x, z: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    lambda x, z: jnp.pad(x, ((0, 0), (0, 1)))[:, 1:],
    lambda x, z: (x[:, None, :] * jnp.ones((1, 2, 1))).sum(1),
]
_ACROSS_ROWS: list[Callable[[Any, Any], Any]] = [
    lambda x, z: x - x.mean(0),
    lambda x, z: x[::-1],
    lambda x, z: jnp.roll(x, 1, 0),
    lambda x, z: jnp.cumsum(x, 0),
    lambda x, z: jnp.sort(x, 0),
    lambda x, z: x.reshape(3, -1).T,
    lambda x, z: x * len(x),
    lambda x, z: x + jnp.arange(len(x))[:, None],
    lambda x, z: x @ (x.T @ x),
    lambda x, z: x + x[0],
    lambda x, z: x + jnp.zeros_like(x).at[0].set(z),
    lambda x, z: x + lax.dynamic_slice(x, (0, 0), (1, 3)),
    lambda x, z: lax.while_loop(lambda v: v.max() > 1, lambda v: v / 2, x),
    lambda x, z: x / jnp.ones(len(x)).sum(),
    lambda x, z: jax.nn.softmax(x, 0),
    lambda x, z: jnp.repeat(x, 2, 0)[: len(x)],
]


@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(st.sampled_from(_BY_ROW), max_size=3),
    st.lists(st.sampled_from(_ACROSS_ROWS), max_size=1),
    st.lists(st.sampled_from(_BY_ROW), max_size=3),
)
def test_never_a_dependence_without_an_error(
    first: list[Callable], across: list[Callable], last: list[Callable]
) -> None:
    """The check passes only if rows equal those of an evaluation of all rows."""
    x = jnp.asarray(X)

    def rows(z: Any, i: Any) -> Any:
        value = x[i]
        for step in (*first, *across, *last):
            value = step(value, z)
        return value @ jnp.arange(1.0, 4.0)

    target = Target(lambda z: -0.5 * z**2, rows, N)
    layout = MINT(target=target, temperature=1.0, batch_size=5)
    layout._setup((), {})
    chosen = [np.arange(5), np.array([9, 40, 1, 17, 3, 28]), np.arange(50, 8, -7)]

    def differ(z: float) -> bool:
        with jax.disable_jit():
            whole = np.asarray(rows(z, np.arange(N)))
            parts = [np.asarray(rows(z, i)) for i in chosen]
        scale = np.abs(whole).max()
        return any(
            not np.allclose(part, whole[i], rtol=1e-4, atol=1e-4 * scale)
            for i, part in zip(chosen, parts, strict=True)
        )

    dependent = any(differ(z) for z in (0.7, -1.3))
    try:
        check_rows(
            "MINT", lambda *_: target, target, (), {}, layout.layout, np.float32(0.7)
        )
    except ValueError as error:
        assert across, f"a false alarm: {error}"
    else:
        assert not dependent
