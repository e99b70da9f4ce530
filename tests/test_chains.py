"""Chains of discrete states in the rows are marginalized: values, draws, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC
from numpyro.infer.util import log_density

from numpyro_minibatch import (
    MINT,
    MinibatchMH,
    marginalize,
    recover_marginals,
    to_inference_data,
)
from numpyro_minibatch.marginal._row_sites import (
    marked_numbers,
    marked_states,
    next_marks,
    row_marks,
)

N, T = 6, 4
RNG = np.random.default_rng(3)
Y = RNG.normal(size=(N, T)).astype(np.float32)
LENGTHS = np.array([4, 2, 3, 4, 1, 4])


def normal(x: Any, mean: Any) -> Any:
    return np.exp(-0.5 * (x - mean) ** 2) / np.sqrt(2 * np.pi)


# Models, values, and the probability of a path of a row by hand -----------------------


def first_order(y: Any, lengths: Any, reverse: bool = False) -> None:
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)).expand([3]).to_event(1))
    means = numpyro.sample("means", dist.Normal(0.0, 2.0).expand([3]).to_event(1))

    def step(carry: Any, y: Any) -> Any:
        x, t = carry
        with numpyro.plate("rows", len(y)), handlers.mask(mask=t < lengths):
            x = numpyro.sample("x", dist.Categorical(p[x]))
            numpyro.sample("y", dist.Normal(means[x], 1.0), obs=y)
        return (x, t + 1), None

    scan(step, (jnp.zeros(len(y), jnp.int32), 0), y.T, reverse=reverse)


P = np.array([[0.7, 0.2, 0.1], [0.3, 0.5, 0.2], [0.25, 0.25, 0.5]], np.float32)
MEANS = np.array([-1.0, 0.5, 2.0], np.float32)
FIRST = {"p": P, "means": MEANS}


def of_first(path: Any, row: int, reverse: bool = False) -> float:
    """The probability of a path and a row; a masked step has a weight of one."""
    y = Y[row, ::-1] if reverse else Y[row]
    found, x = 1.0, 0
    for t, new in enumerate(path):
        if t < LENGTHS[row]:
            found *= P[x, new] * normal(y[t], MEANS[new])
        x = new
    return found


def second_order(y: Any, lengths: Any) -> None:
    means = numpyro.sample("means", dist.Normal(0.0, 2.0).expand([2]).to_event(1))

    def step(carry: Any, y: Any) -> Any:
        older, old = carry
        with numpyro.plate("rows", len(y)):
            logits = 0.7 * older - 1.2 * old + 0.3
            x = numpyro.sample("x", dist.Bernoulli(logits=logits))
            numpyro.sample("y", dist.Normal(means[x] + 0.5 * old, 1.0), obs=y)
        return (old, x), None

    start = jnp.zeros(len(y), jnp.int32)
    scan(step, (start, start), y.T, history=2)


SECOND = {"means": np.array([-1.0, 1.5], np.float32)}


def of_second(path: Any, row: int) -> float:
    found, older, old = 1.0, 0, 0
    for t, x in enumerate(path):
        one = 1 / (1 + np.exp(-(0.7 * older - 1.2 * old + 0.3)))
        mean = SECOND["means"][x] + 0.5 * old
        found *= (one if x else 1 - one) * normal(Y[row, t], mean)
        older, old = old, x
    return found


def two_sites(y: Any, lengths: Any) -> None:
    """Two sites in a step, inner plates, and a shared site in each step."""

    def step(carry: Any, y: Any) -> Any:
        w, x = carry
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(y), dim=-2):
            w = numpyro.sample("w", dist.Bernoulli(0.2 + 0.6 * w))
            x = numpyro.sample("x", dist.Categorical(jnp.asarray(P)[x]))
            with numpyro.plate("inner", 2, dim=-1) as k:
                mean = jnp.asarray(MEANS)[x] + w * k + shift
                numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        return (w, x), None

    start = jnp.zeros((len(y), 1), jnp.int32)
    both = jnp.stack([y, 0.5 * y], -1)
    scan(step, (start, start), jnp.swapaxes(both, 0, 1))


TWO = {"shift": np.array([0.1, -0.4, 0.3, 0.8], np.float32)}


def of_two(path: Any, row: int) -> float:
    found, w, x = 1.0, 0, 0
    for t, joint in enumerate(path):
        new_w, new_x = divmod(joint, 3)
        one = 0.2 + 0.6 * w
        found *= (one if new_w else 1 - one) * P[x, new_x]
        for k in range(2):
            mean = MEANS[new_x] + new_w * k + TWO["shift"][t]
            found *= normal(Y[row, t] * (0.5 if k else 1.0), mean)
        w, x = new_w, new_x
    return found


MODELS = {
    "first order": (first_order, FIRST, of_first, 3, 1),
    "second order": (second_order, SECOND, of_second, 2, 2),
    "two sites": (two_sites, TWO, of_two, 6, 1),
}


def log_rows(model: Any, values: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """The log likelihood of each row of a marginalized model."""
    values = jax.tree.map(jnp.asarray, values)
    seeded = handlers.seed(handlers.substitute(model, data=values), 0)
    trace = handlers.trace(seeded).get_trace(*args, **kwargs).values()
    (site,) = (s for s in trace if s["type"] == "sample" and s["is_observed"])
    return site["fn"].log_prob(site["value"])


@pytest.mark.x64
@pytest.mark.parametrize("kind", MODELS)
def test_the_recursion_is_the_sum_over_all_paths(kind: str) -> None:
    model, values, of_path, states, order = MODELS[kind]
    marginal = marginalize(model)
    (level,) = marginal.levels((Y, LENGTHS), {})
    assert level.chain is not None and level.chain.order == order
    paths = list(itertools.product(range(states), repeat=T))
    by_hand = [np.log(sum(of_path(path, row) for path in paths)) for row in range(N)]
    found = log_rows(marginal, values, Y, LENGTHS)
    np.testing.assert_allclose(found, by_hand, rtol=2e-6, atol=2e-6)
    # rows in another order, and some of them
    some = np.array([4, 1, 3])
    few = log_rows(marginal, values, Y[some], LENGTHS[some])
    np.testing.assert_allclose(few, found[some], rtol=2e-6, atol=2e-6)


def test_a_scan_from_the_end_is_summed_from_the_end() -> None:
    found = log_rows(marginalize(first_order), FIRST, Y, LENGTHS, reverse=True)
    paths = list(itertools.product(range(3), repeat=T))
    by_hand = [np.log(sum(of_first(p, row, True) for p in paths)) for row in range(N)]
    np.testing.assert_allclose(found, by_hand, rtol=2e-6, atol=2e-6)


def animals(seen: Any) -> None:
    """Survival and recapture; the dead are clamped to the smallest probability."""
    phi = numpyro.sample("phi", dist.Uniform(0.0, 1.0))
    rho = numpyro.sample("rho", dist.Uniform(0.0, 1.0))

    def step(alive: Any, seen: Any) -> Any:
        with numpyro.plate("animals", len(seen)):
            p = dist.util.clamp_probs(phi * alive)
            alive = numpyro.sample(
                "alive", dist.Bernoulli(p), infer={"enumerate": "parallel"}
            )
            q = dist.util.clamp_probs(rho * alive)
            numpyro.sample("seen", dist.Bernoulli(q), obs=seen)
        return alive, None

    scan(step, jnp.ones(len(seen), jnp.int32), seen.T)


def simulated_animals(count: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    alive = np.cumprod(rng.uniform(size=(count, T)) < 0.7, 1)
    return (alive & (rng.uniform(size=(count, T)) < 0.6)).astype(np.int32)


def of_animals(phi: Any, rho: Any, seen: np.ndarray) -> Any:
    """The log likelihood of all animals: what follows the last time it was seen."""
    last = np.where(seen.any(1), T - np.argmax(seen[:, ::-1], 1), 0)
    times = seen.sum(1)
    missed = 1.0  # the probability of not being seen in the steps that are left
    by_left = [missed]
    for _ in range(T):
        missed = 1 - phi + phi * (1 - rho) * missed
        by_left.append(missed)
    total = 0.0
    pairs, counts = np.unique(np.stack([last, times]), axis=1, return_counts=True)
    for at, n, count in zip(*pairs, counts, strict=True):
        one = at * jnp.log(phi) + n * jnp.log(rho)
        one = one + (at - n) * jnp.log(1 - rho) + jnp.log(by_left[T - at])
        total = total + count * one
    return total


@pytest.mark.slow
@pytest.mark.x64
def test_states_of_probability_zero_have_derivatives() -> None:
    """Products with zero probabilities overflow in second derivatives by themselves."""
    seen = simulated_animals(8)
    model = marginalize(animals)

    def found(u: Any) -> Any:
        values = {"phi": u[0], "rho": u[1]}
        return log_density(model, (jnp.asarray(seen),), {}, values)[0]

    def by_hand(u: Any) -> Any:
        return of_animals(u[0], u[1], seen)

    u = jnp.array([0.6, 0.55])
    pairs = [(found, by_hand), (jax.grad(found), jax.grad(by_hand))]
    pairs += [(jax.hessian(found), jax.hessian(by_hand))]
    pairs += [(jax.jacfwd(jax.jacfwd(found)), jax.hessian(by_hand))]
    for one, other in pairs:
        np.testing.assert_allclose(one(u), other(u), rtol=2e-4)


@pytest.mark.slow
def test_a_kernel_samples_the_model_as_it_is_written() -> None:
    seen = simulated_animals(2_000)
    grid = np.linspace(0.5, 0.85, 201)
    phi, rho = np.meshgrid(grid, grid, indexing="ij")
    log_p = np.asarray(of_animals(phi, rho, seen))
    weight = np.exp(log_p - log_p.max())
    weight /= weight.sum()
    mean = {"phi": (weight * phi).sum(), "rho": (weight * rho).sum()}
    sd = {
        "phi": np.sqrt((weight * (phi - mean["phi"]) ** 2).sum()),
        "rho": np.sqrt((weight * (rho - mean["rho"]) ** 2).sum()),
    }
    kernel = MinibatchMH(animals, control_variate="taylor2")
    mcmc = MCMC(kernel, num_warmup=200, num_samples=2_000, progress_bar=False)
    mcmc.run(jax.random.key(0), seen)
    assert list(kernel.settings["marginalized"]) == ["alive"]
    samples = mcmc.get_samples()
    assert sorted(samples) == ["phi", "rho"]
    for name, draws in samples.items():
        # 1,000 effective draws at least: 4 errors of the mean, 4 of the sd
        assert abs(draws.mean() - mean[name]) < 4 * sd[name] / np.sqrt(1_000)
        assert abs(draws.std() / sd[name] - 1) < 4 / np.sqrt(2_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_states_are_drawn_given_all_observations(kind: str) -> None:
    model, values, of_path, states, _ = MODELS[kind]
    draws = 2_000

    repeated = {
        name: (
            ("chain", "draw", *(f"{name}_{k}" for k in range(np.ndim(x)))),
            np.broadcast_to(x, (1, draws, *np.shape(x))),
        )
        for name, x in values.items()
    }
    idata = xr.DataTree.from_dict({"posterior": xr.Dataset(repeated)})
    full = recover_marginals(
        marginalize(model), idata, Y, LENGTHS, probabilities=True, rows=[0, 1, 5]
    )["posterior"]
    paths = list(itertools.product(range(states), repeat=T))
    inner = 3 if kind == "two sites" else 1  # states of the last site
    assert full["x"].shape == (1, draws, 3, T)
    for k, row in enumerate([0, 1, 5]):
        weight = np.array([of_path(path, row) for path in paths])
        weight /= weight.sum()
        x = np.array(paths) % inner if inner > 1 else np.array(paths)
        count = full["x_probability"].shape[-1]
        for t in range(T):
            exact = np.array([weight[x[:, t] == s].sum() for s in range(count)])
            told = full["x_probability"].values[0, 0, k, t]
            np.testing.assert_allclose(told, exact, atol=2e-5)
        # paths are drawn as a whole: pairs of neighbouring steps
        drawn = full["x"].values[0, :, k]
        for a, b in [(0, 1), (2, 3), (0, 3)]:
            for s in range(count):
                exact_pair = weight[(x[:, a] == s) & (x[:, b] == s)].sum()
                share = ((drawn[:, a] == s) & (drawn[:, b] == s)).mean()
                error = np.sqrt(exact_pair * (1 - exact_pair) / draws) + 1e-9
                assert abs(share - exact_pair) < 4.5 * error


def with_an_effect(y: Any) -> None:
    """A latent number of each row beside the chain."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(y)):
        a = numpyro.sample("a", dist.Normal(0.0, tau))

    def step(x: Any, y: Any) -> Any:
        with numpyro.plate("rows", len(y)):
            x = numpyro.sample("x", dist.Bernoulli(0.2 + 0.6 * x))
            numpyro.sample("y", dist.Normal(2.0 * x + a, 1.0), obs=y)
        return x, None

    scan(step, jnp.zeros(len(y), jnp.int32), y.T)


@pytest.mark.slow
def test_a_latent_number_of_a_row_is_integrated_after_its_chain() -> None:
    tau = 0.8
    a = np.linspace(-8, 8, 2_001)
    by_hand = []
    for row in range(N):
        density: Any = 0.0
        for path in itertools.product(range(2), repeat=T):
            p, x = 1.0, 0
            for t, new in enumerate(path):
                one = 0.2 + 0.6 * x
                p = p * (one if new else 1 - one) * normal(Y[row, t], 2.0 * new + a)
                x = new
            density = density + p
        prior = normal(a / tau, 0.0) / tau
        by_hand.append(np.log((density * prior).sum() * (a[1] - a[0])))
    model = marginalize(with_an_effect)
    found = log_rows(model, {"tau": tau}, Y)
    np.testing.assert_allclose(found, by_hand, atol=2e-4)


def walk(y: Any, in_scan: bool = True) -> None:
    """A site in a scan that all rows share, and a latent number of each row."""
    if in_scan:

        def step(level: Any, _: Any) -> Any:
            level = numpyro.sample("level", dist.Normal(0.8 * level, 1.0))
            return level, level

        _, levels = scan(step, jnp.zeros(()), None, length=T)
    else:
        levels = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([T]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("times", T):
            numpyro.sample("y", dist.Normal(levels[:, None] + a, 1.0), obs=y[i].T)


@pytest.mark.slow
def test_sites_of_another_scan_keep_their_values_in_the_integrals() -> None:
    values = {"level": np.array([0.5, -1.0, 2.0, 0.3], np.float32)}
    found = log_rows(marginalize(walk), values, Y)
    plain = log_rows(marginalize(walk), values, Y, in_scan=False)
    np.testing.assert_allclose(found, plain, rtol=1e-5)


# Refusals -----------------------------------------------------------------------------


def chain(carried: Any = lambda x, new: new, observe: bool = True, **more: Any) -> Any:
    """A model of a chain with something changed."""

    def model(y: Any) -> None:
        q = numpyro.sample("q", dist.Beta(1.0, 1.0))

        def step(x: Any, y: Any) -> Any:
            with numpyro.plate("rows", len(y)):
                new = numpyro.sample("x", dist.Bernoulli(q))
                if "normal" in more:
                    numpyro.sample("u", dist.Normal(0.0, 1.0))
                if "coupled" in more:
                    new = jnp.broadcast_to(jnp.mean(new * 1.0), (len(y),))
                if observe:
                    numpyro.sample("y", dist.Normal(new + 0.1 * x, 1.0), obs=y)
            if "shared" in more:
                numpyro.sample("s", dist.Normal(jnp.sum(new), 1.0))
            return carried(x, new), new

        _, all_x = scan(step, jnp.zeros(len(y)), y.T)
        if "after" in more:
            with numpyro.plate("rows", len(y)):
                numpyro.sample("z", dist.Normal(all_x.sum(0), 1.0), obs=y[:, 0])

    return model


def many_states(y: Any) -> None:
    def step(x: Any, y: Any) -> Any:
        with numpyro.plate("rows", len(y)):
            x = numpyro.sample("x", dist.Categorical(jnp.ones(80) / 80))
            numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
        return x, None

    scan(step, jnp.zeros(len(y), jnp.int32), y.T)


def nothing_observed(y: Any) -> None:
    chain(observe=False)(y)
    with numpyro.plate("rows", len(y)):
        numpyro.sample("other", dist.Normal(0.0, 1.0), obs=y[:, 0])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (chain(lambda x, new: x + new), "has no recursion"),
        (chain(normal=True), "'u', which has a value for each row and each step"),
        (chain(shared=True), "site 's' depends on it"),
        (chain(after=True), "site 'z' depends on it"),
        (nothing_observed, "'x', which is in a scan: .* inside of the function"),
        (many_states, "6400 joint states"),
    ],
)
def test_what_has_no_recursion_is_refused(model: Any, says: str) -> None:
    y = jnp.asarray(Y)
    with pytest.raises(ValueError, match=says):
        marginalize(model).levels((y,), {})


def test_sites_of_a_scan_are_summed_together() -> None:
    with pytest.raises(ValueError, match=r'write sites=\["w", "x"\]'):
        marginalize(two_sites, sites=["x"]).levels((Y, LENGTHS), {})


def coupled(y: Any) -> None:
    """The density of a row depends on the latent state of the others."""
    q = numpyro.sample("q", dist.Beta(1.0, 1.0))
    with numpyro.plate("rows", len(y)):
        x = numpyro.sample("x", dist.Bernoulli(q))
        numpyro.sample("y", dist.Normal(2.0 * jnp.mean(1.0 * x), 1.0), obs=y[:, 0])


def coupled_numbers(y: Any) -> None:
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(y)):
        a = numpyro.sample("a", dist.Normal(0.0, tau))
        numpyro.sample("y", dist.Normal(a - a.mean(), 1.0), obs=y[:, 0])


@pytest.mark.parametrize(
    "model",
    [coupled, coupled_numbers, chain(coupled=True)],
    ids=["state", "u", "chain"],
)
def test_rows_that_share_latent_values_are_refused(model: Any) -> None:
    """An integral gives all rows the same states, which would hide it."""
    y = jnp.asarray(RNG.normal(size=(40, 3)))
    kernel = MINT(marginalize(model), batch_size=5, temperature=2.0)
    with pytest.raises(ValueError, match="in other rows"):
        kernel.init(jax.random.key(0), 0, None, (y,), {})


@pytest.mark.slow
def test_shared_latent_values_are_seen_because_rows_have_values_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where this is not proven, as for rows on the host."""
    same = lambda observed, shape: jnp.zeros(shape, jnp.uint32)  # noqa: E731
    y = jnp.asarray(RNG.normal(size=(40, 3)))
    arguments = jax.random.key(0), 0, None, (y,), {}

    def kernel() -> MINT:  # of a model that was not checked before
        def model(y: Any) -> None:
            coupled(y)

        return MINT(marginalize(model), batch_size=5, temperature=2.0)

    model = "numpyro_minibatch.marginal._model"
    monkeypatch.setattr(f"{model}.is_proven", lambda *args: True)
    with pytest.raises(ValueError, match="in one batch and"):
        kernel().init(*arguments)
    monkeypatch.setattr(f"{model}.row_marks", same)
    kernel().init(*arguments)


def test_the_values_that_a_check_gives_differ_between_rows() -> None:
    y = RNG.normal(size=(400, 3))
    marks = row_marks([y], (400,))
    numbers = marked_numbers(marks)
    assert abs(float(numbers.mean())) < 0.15 and 0.5 < float(numbers.std()) < 0.65
    assert (row_marks([y[7:9]], (2,)) == marks[7:9]).all()
    for some in (marks, next_marks(marks)):
        counts = np.bincount(marked_states(some, 4), minlength=4)
        assert abs(counts - 100).max() < 40
    binary = row_marks([(y > 0).astype(int)], (400,))
    assert len(np.unique(binary)) == 8


@pytest.mark.slow
def test_draws_of_a_run_have_the_steps_of_the_scan() -> None:
    seen = simulated_animals(60)
    kernel = MINT(animals, batch_size=20, temperature=3.0)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), seen)
    idata = to_inference_data(mcmc, constant_data=False)
    full = recover_marginals(kernel.model, idata, seen)["posterior"]["alive"]
    assert full.dims[:3] == ("chain", "draw", "animals") and full.shape[3] == T
    # the dead stay dead, and who was seen is alive
    assert (np.diff(full.values, axis=-1) <= 0).all()
    assert (full.values >= seen).all()
