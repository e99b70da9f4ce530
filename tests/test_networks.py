"""Minibatch networks: a flax network in a NumPyro model, trained and sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, SVI, Trace_ELBO, init_to_sample, init_to_value

from numpyro_minibatch import (
    AMAGOLD,
    SGHMC,
    SGLD,
    SGMCMC,
    SGNHT,
    diagnose,
    dynamics,
    to_inference_data,
)

nn = pytest.importorskip("flax.linen", reason="networks need flax")
optax = pytest.importorskip("optax", reason="comes with flax")

from numpyro.contrib.module import random_flax_module  # noqa: E402
from numpyro.infer.autoguide import AutoDelta  # noqa: E402

N, INPUTS, WIDTH, BATCH = 1000, 4, 24, 50
SITES = {
    "net/Dense_0.kernel": (INPUTS, WIDTH),
    "net/Dense_0.bias": (WIDTH,),
    "net/Dense_1.kernel": (WIDTH, 2),
    "net/Dense_1.bias": (2,),
}
D = sum(int(np.prod(shape)) for shape in SITES.values())
H, B = 0.01 / N, 0.05

# the sign of a product, for which no linear classifier beats chance (0.5)
_rng = np.random.default_rng(0)
X, X_TEST = (_rng.normal(size=(n, INPUTS)).astype(np.float32) for n in (N, 2000))
Y, Y_TEST = ((x[:, 0] * x[:, 1] > 0).astype(np.int32) for x in (X, X_TEST))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = nn.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(2)(hidden)


def prior(name: str, shape: tuple[int, ...]) -> dist.Distribution:
    return dist.Normal(0.0, 2.0 * shape[0] ** -0.5 if name.endswith("kernel") else 1.0)


def model(X: Any, y: Any) -> None:
    net = random_flax_module("net", Network(), prior, input_shape=(1, INPUTS))
    with numpyro.plate("data", N, subsample_size=BATCH) as rows:
        logits = net(jnp.asarray(X)[rows])
        numpyro.sample("y", dist.Categorical(logits=logits), obs=jnp.asarray(y)[rows])


def accuracy(draws: dict[str, Any]) -> float:
    """The accuracy of the draws' mean probabilities."""

    def one(draw: dict[str, Any]) -> Any:
        layers = [{k: draw[f"net/Dense_{i}.{k}"] for k in LAYER} for i in range(2)]
        params = {f"Dense_{i}": layer for i, layer in enumerate(layers)}
        return jax.nn.softmax(Network().apply({"params": params}, X_TEST))

    found = jax.jit(lambda draws: jax.lax.map(one, draws).mean(0))(draws)
    return float((np.asarray(found).argmax(-1) == Y_TEST).mean())


LAYER = ("kernel", "bias")


@pytest.fixture(scope="module")
def start() -> dict[str, Any]:
    """A mode found by gradient descent with momentum on the same model."""
    guide = AutoDelta(model, init_loc_fn=init_to_sample)
    svi = SVI(model, guide, optax.sgd(0.1 / N, momentum=0.9), Trace_ELBO())
    result = svi.run(jax.random.key(0), 1500, X, Y, progress_bar=False)
    return guide.median(result.params)


def run(kernel: Any, draws: int, chains: int = 1, **settings: Any) -> MCMC:
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), X, Y, **settings)
    return mcmc


def test_sghmc_trains_from_a_draw_of_the_prior() -> None:
    kernel = SGHMC(model, h=H, b=B, init_strategy=init_to_sample)
    draws = run(kernel, 300).get_samples()
    # 2000 test images: a standard error of 0.011 at chance
    assert accuracy({k: v[:1] for k, v in draws.items()}) < 0.75
    assert accuracy({k: v[-100:] for k, v in draws.items()}) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGHMC", "AMAGOLD"])
def test_samples_from_the_mode_that_descent_found(name: str, start: Any) -> None:
    common: dict[str, Any] = {"b": B, "init_strategy": init_to_value(values=start)}
    kernel = (
        SGHMC(model, h=H, **common)
        if name == "SGHMC"
        else AMAGOLD(model, h=H / 20, resample_momentum=False, **common)
    )
    mcmc = run(kernel, 40, chains=2)
    draws = mcmc.get_samples()
    assert {k: v.shape for k, v in draws.items()} == {
        name: (80, *shape) for name, shape in SITES.items()
    }
    assert accuracy(draws) > 0.9 > 0.75 > accuracy(jax.tree.map(jnp.zeros_like, draws))
    if name == "AMAGOLD":
        assert 0.2 < float(mcmc.get_extra_fields()["accept_prob"].mean()) <= 1.0
    # a site of a flax module has a slash in its name, which netCDF does not take
    idata = to_inference_data(mcmc)
    assert set(idata.posterior.data_vars) == {n.replace("/", ".") for n in SITES}
    text = str(diagnose(idata, var_names=["net.Dense_1.bias"]))
    assert name in text and "gradient noise" in text


@pytest.mark.parametrize("route", ["init_strategy", "init_params"])
def test_starts_where_descent_ended(route: str, start: Any) -> None:
    strategy, params = {}, None
    if route == "init_strategy":
        strategy = {"init_strategy": init_to_value(values=start)}
    else:
        params = start  # normal priors: their unconstrained values are the values
    kernel = SGHMC(model, h=H, b=B, **strategy)
    state = kernel.init(
        jax.random.key(0), 0, init_params=params, model_args=(X, Y), model_kwargs={}
    )
    for name, value in start.items():
        np.testing.assert_array_equal(state.z[name], value)


# the cost of a step -----------------------------------------------------------------


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations of a program, and how often each runs.

    Of the branches of a condition, the one with the fewest normal numbers counts. The
    others are for chains that left the domain, and for the first or every 100th draw.
    """
    for equation in jaxpr.eqns:
        yield equation, times
        name, parameters = equation.primitive.name, equation.params
        if name == "cond":
            branches = [b.jaxpr for b in parameters["branches"]]
            yield from equations(min(branches, key=normal_numbers), times)
            continue
        assert name != "while" or not normal_numbers_inside(parameters)
        length = parameters["length"] if name == "scan" else 1
        for part in jax.tree.leaves(parameters, is_leaf=is_jaxpr):
            if is_jaxpr(part):
                yield from equations(getattr(part, "jaxpr", part), times * length)


def is_jaxpr(part: Any) -> bool:
    return hasattr(part, "eqns") or hasattr(part, "jaxpr")


def normal_numbers_inside(parameters: dict[str, Any]) -> int:
    """A loop whose number of iterations is unknown."""
    parts = (parameters["cond_jaxpr"], parameters["body_jaxpr"])
    return sum(normal_numbers(part.jaxpr) for part in parts)


def normal_numbers(jaxpr: Any) -> int:
    """How many normal numbers a program draws: each is an inverse error function."""
    return sum(
        times * equation.outvars[0].aval.size
        for equation, times in equations(jaxpr)
        if equation.primitive.name == "erf_inv"
    )


def program(kernel: Any) -> tuple[Any, Any]:
    """The first state of a kernel, and the program of one draw."""
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SITES.items()}
    init = {"init_params": zeros, "model_args": (X, Y), "model_kwargs": {}}
    state = kernel.init(jax.random.key(0), 0, **init)
    sample = partial(kernel.sample, model_args=(X, Y), model_kwargs={})
    return state, jax.make_jaxpr(sample)(state).jaxpr


KERNELS: dict[str, Callable[[], Any]] = {
    "SGLD": lambda: SGLD(model, step_size=1e-6),
    "SGHMC": lambda: SGHMC(model, h=H, b=B, num_steps=1),
    "SGNHT": lambda: SGNHT(model, step_size=H**0.5, num_steps=7),
    "AMAGOLD": lambda: AMAGOLD(model, h=H, b=B, resample_momentum=False),
    "AMAGOLD-minibatch": lambda: AMAGOLD(
        model, h=H, b=B, resample_momentum=False, correction="minibatch"
    ),
}
every_kernel = pytest.mark.parametrize("name", KERNELS)


@cache
def program_of(name: str) -> tuple[Any, Any]:
    return program(KERNELS[name]())


@pytest.mark.slow
@every_kernel
def test_noise_is_one_normal_number_per_parameter_and_step(name: str) -> None:
    steps = KERNELS[name]().settings["num_steps"]
    assert normal_numbers(program_of(name)[1]) == steps * D


class Twice(type(dynamics.sgld())):  # type: ignore[misc]
    """Draws a second, unused normal number for each coordinate."""

    def step(self, key: Any, z: Any, *rest: Any) -> Any:
        moved = super().step(key, z, *rest)
        more = jax.random.normal(jax.random.fold_in(key, 1), z.shape)
        return moved._replace(z=moved.z + 0.0 * more)


def test_the_count_sees_noise_that_is_drawn_twice() -> None:
    kernel = SGMCMC(model, dynamics=Twice(), step_size=1e-6, num_steps=3)
    assert normal_numbers(program(kernel)[1]) == 6 * D


def largest(jaxpr: Any) -> int:
    """The size of the largest array that a program makes."""
    return max(
        getattr(out.aval, "size", 0)
        for equation, _ in equations(jaxpr)
        for out in equation.outvars
    )


@every_kernel
def test_nothing_has_a_number_per_row_and_parameter(name: str) -> None:
    state, jaxpr = program_of(name)
    sizes = [leaf.size for leaf in jax.tree.leaves(state)]
    # vectors of positions, and for the exact correction one number per row
    assert sum(sizes) < 16 * D + 4 * N
    # the widest layer of a chunk of rows, or the data
    assert largest(jaxpr) <= max(N * WIDTH, N * INPUTS)
    assert largest(jaxpr) < N * D // 4


def test_the_size_sees_gradients_of_rows() -> None:
    def row(flat: Any, x: Any) -> Any:
        return jnp.tanh(flat[: INPUTS * WIDTH].reshape(INPUTS, WIDTH).T @ x).sum()

    per_row = jax.vmap(jax.grad(row), (None, 0))
    assert largest(jax.make_jaxpr(per_row)(jnp.zeros(D), X).jaxpr) >= N * D // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGHMC", "AMAGOLD"])
def test_chains_read_rows_of_their_own(name: str, start: Any) -> None:
    # steps too short to move, so estimates differ only by their rows
    tiny: dict[str, Any] = {"h": 1e-30, "b": B, "num_steps": 1}
    strategy = init_to_value(values=start)
    kernel = (
        SGHMC(model, init_strategy=strategy, **tiny)
        if name == "SGHMC"
        else AMAGOLD(model, init_strategy=strategy, correction=None, **tiny)
    )
    mcmc = run(kernel, 20, chains=2)
    draws = mcmc.get_samples(group_by_chain=True)
    bias = np.asarray(draws["net/Dense_1.bias"])
    np.testing.assert_allclose(bias[0], bias[1], rtol=1e-6)
    seen = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["lp_estimate"])
    assert len(np.unique(seen)) == seen.size
    # as large between chains as between draws of one chain
    assert 0.3 < np.std(seen[0] - seen[1]) / (2**0.5 * seen.std()) < 3.0
