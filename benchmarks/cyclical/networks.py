"""Ensembles of networks: cyclical and other samplers, snapshots and gradient descent.

    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.cyclical.networks mnist
    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.cyclical.networks cifar

Sections 5.2 and 5.3 of the cyclical SG-MCMC paper, at a small size: a three-layer
network on part of MNIST, tested on notMNIST, and a small residual network on part of
CIFAR-10. It uses filter response normalisation, because batch normalisation has a state
that no density has. All methods make the same number of gradient steps on one model:
gradient descent with a cosine schedule; snapshots [Huang et al. 2017] at the ends of
four cycles of it; SGLD and SGHMC, without noise for the first three quarters as in the
paper (one long cycle); and the cyclical samplers with four cycles of three samples.
``--full`` has the paper's settings for CIFAR-10: 200 epochs, a learning rate of 0.5,
beta = 0.8, samples at the ends of the last three of a cycle's 50 epochs, and a network
of ResNet-18's width and depth. It needs all of CIFAR-10 in place of cifar10_small.npz,
and a GPU.

Reported are test error, NLL, entropy and calibration error of ensembles; distances of
functions and of weights between members, and the loss on the line between two of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen as nn
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import MCMC, init_to_value

from benchmarks.stochastic_gradient.record import load, machine, save
from numpyro_minibatch import CyclicalSGHMC, CyclicalSGLD, ensemble, schedule

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import bayesian_network as example  # noqa: E402

RESULTS = Path(__file__).parent / "results"
CYCLES, SAMPLES = 4, 3
METHODS = ("SGD", "Snapshot", "SGLD", "cSGLD", "SGHMC", "cSGHMC")
STYLES = {  # in the figure
    "SGD": ("#000000", "o"),
    "Snapshot": ("#E69F00", "s"),
    "SGLD": ("#56B4E9", "v"),
    "cSGLD": ("#0072B2", "^"),
    "SGHMC": ("#CC79A7", "<"),
    "cSGHMC": ("#D55E00", ">"),
}
UNITS = {
    "function": "mean total variation distance",
    "weight": "root mean square difference",
}


class Size(NamedTuple):
    """The size of a run."""

    rows: int
    test: int
    batch: int
    epochs: int
    widths: tuple[int, ...]
    rate: float  # learning rate of gradient descent with momentum, for the mean loss
    rate_sgld: float
    explore: float  # beta
    collect_from: float
    shrink: int = 1  # pixels averaged into one, in both directions
    momentum: float = 0.9  # the fraction that a step keeps, one minus the paper's eta


SIZES = {
    "mnist": Size(6000, 2000, 100, 40, (100, 100), 0.05, 0.25, 0.8, 0.9),
    "mnist-full": Size(60_000, 10_000, 100, 200, (400, 400), 0.05, 0.5, 0.8, 0.9),
    "cifar": Size(2000, 1000, 50, 16, (8, 16), 0.02, 0.1, 0.8, 0.9, 4),
    "cifar-full": Size(
        # eta is not stated; with constant momentum 0.9 a rate of 0.5 is too large
        50_000,
        10_000,
        128,
        200,
        (64, 128, 256, 512),
        0.5,
        0.5,
        0.8,
        0.94,
        1,
        0.1,
    ),
}


class Residual(nn.Module):
    """A residual network whose normalisation has no state."""

    widths: tuple[int, ...]
    blocks: int = 1

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = FilterResponse()(nn.Conv(self.widths[0], (3, 3), use_bias=False)(x))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                y = nn.Conv(width, (3, 3), strides=stride, use_bias=False)(x)
                y = nn.Conv(width, (3, 3), use_bias=False)(FilterResponse()(y))
                if x.shape != y.shape:
                    x = nn.Conv(width, (1, 1), strides=stride, use_bias=False)(x)
                x = FilterResponse()(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class FilterResponse(nn.Module):
    """Filter response normalisation with a thresholded linear unit.

    Saurabh Singh, Shankar Krishnan (2020), CVPR.
    """

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shape = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, shape)
        bias = self.param("bias", nn.initializers.zeros, shape)
        threshold = self.param("threshold", nn.initializers.zeros, shape)
        square = jnp.square(x).mean((1, 2), keepdims=True)
        return jnp.maximum(x * jax.lax.rsqrt(square + 1e-6) * scale + bias, threshold)


class Task(NamedTuple):
    """A network, its data, and images of other objects."""

    network: Any
    X: Any
    y: Any
    X_test: Any
    y_test: Any
    X_other: Any


def task(name: str, size: Size) -> Task:
    """The available data, with the requested number of rows."""
    folder = Path(os.environ.get("NUMPYRO_MINIBATCH_DATA", ""))
    rng = np.random.default_rng(0)
    if name == "mnist":
        data = example.load()
        net = example.Network(size.widths)
        arrays = list(data[1:5]), data.X_other
    else:
        path = folder / "cifar10_small" / "cifar10_small.npz"
        if not path.exists():
            raise SystemExit("NUMPYRO_MINIBATCH_DATA must name a folder with CIFAR-10")
        with np.load(path) as found:
            images = [found[k].astype(np.float32) / 255 for k in ("x_train", "x_test")]
            labels = [found[k].astype(np.int32) for k in ("y_train", "y_test")]
        k = size.shrink
        images = [
            x.reshape(len(x), 32 // k, k, 32 // k, k, 3).mean((2, 4)) for x in images
        ]
        center, scale = images[0].mean((0, 1, 2)), images[0].std((0, 1, 2))
        X, X_test = ((x - center) / scale for x in images)
        net = Residual(size.widths, 2 if len(size.widths) == 4 else 1)
        other = rng.permuted(X_test.reshape(len(X_test), -1), axis=1)
        arrays = [X, labels[0], X_test, labels[1]], other.reshape(X_test.shape)
    (X, y, X_test, y_test), other = arrays
    order = rng.permutation(len(X))[: size.rows]
    some = slice(size.test)
    found = (X[order], y[order], X_test[some], y_test[some], other[some])
    return Task(net, *(jnp.asarray(x) for x in found))


def prior(name: str, shape: tuple[int, ...]) -> dist.Distribution:
    """A width that keeps the size of the signal constant from layer to layer."""
    if name.endswith("kernel"):
        return dist.Normal(0.0, (2.0 / np.prod(shape[:-1])) ** 0.5)
    return dist.Normal(1.0 if name.endswith("scale") else 0.0, 1.0)


def make_model(net: Any, shape: tuple[int, ...]) -> Callable:
    """A classifier as a NumPyro model."""

    def model(X: Any, y: Any) -> None:
        f = random_flax_module("net", net, prior, input_shape=(1, *shape))
        with numpyro.plate("images", len(X)) as rows:
            numpyro.sample("y", dist.Categorical(logits=f(X[rows])), obs=y[rows])

    return model


def first_values(net: Any, X: Any, seed: int) -> dict[str, Any]:
    """The network's own initial weights, by site."""
    params = jax.jit(net.init)(random.key(seed), X[:1])["params"]
    flat = jax.tree_util.tree_leaves_with_path(params)
    return {"net/" + ".".join(key.key for key in path): value for path, value in flat}


def logits_of(net: Any, shape: tuple[int, ...]) -> Callable:
    """The logits of a draw for rows."""

    def logits(draw: Any, rows: Any) -> Any:
        with handlers.seed(rng_seed=0), handlers.substitute(data=draw):
            return random_flax_module("net", net, prior, input_shape=(1, *shape))(rows)

    return logits


def descend(
    task: Task, logits: Callable, size: Size, start: Any, cycles: int, seed: int
) -> Any:
    """Gradient descent with momentum on the posterior; the weights at cycles' ends."""
    steps = size.epochs * size.rows // size.batch
    length = steps // cycles
    rate = schedule.cosine_restarts(size.rate, length)
    optimizer = optax.sgd(rate, momentum=size.momentum)

    def loss(values: Any, rows: Any) -> Any:
        chosen = logits(values, task.X[rows])
        likelihood = -optax.softmax_cross_entropy_with_integer_labels(
            chosen, task.y[rows]
        ).mean()
        log_prior = sum(
            prior(name, value.shape).log_prob(value).sum()
            for name, value in values.items()
        )
        return -likelihood - log_prior / size.rows

    @jax.jit
    def cycle(carry: Any, key: Any) -> Any:
        def step(carry: Any, key: Any) -> Any:
            values, state = carry
            rows = random.randint(key, (size.batch,), 0, size.rows)
            updates, state = optimizer.update(jax.grad(loss)(values, rows), state)
            return (optax.apply_updates(values, updates), state), None

        return jax.lax.scan(step, carry, random.split(key, length))[0]

    carry, found = (start, optimizer.init(start)), []
    for key in random.split(random.key(seed), cycles):
        carry = cycle(carry, key)
        found.append(carry[0])
    return jax.tree.map(lambda *x: jnp.stack(x), *found)


def sample(
    kind: str,
    cyclical: bool,
    model: Callable,
    task: Task,
    size: Size,
    start: Any,
    seed: int,
) -> tuple[Any, dict[str, float]]:
    """Twelve draws of a sampler."""
    steps = size.epochs * size.rows // size.batch
    cycles = CYCLES if cyclical else 1
    shares = (size.explore, size.collect_from) if cyclical else (0.75, 0.75)
    length = steps // cycles
    samples = CYCLES * SAMPLES // cycles
    each = int(length * (1 - shares[1])) // samples
    settings: dict[str, Any] = {
        "batch_size": size.batch,
        "init_strategy": init_to_value(values=start),
        "cycle_length": length,
        "samples_per_cycle": samples,
        "num_steps": each,
        "explore": shares[0],
        "collect_from": 1 - samples * each / length,
        "scale_by_n": True,
    }
    if kind == "SGLD":
        kernel = CyclicalSGLD(model, step_size=size.rate_sgld, **settings)
    else:
        b = (1 - size.momentum) / (1 + size.momentum)
        kernel = CyclicalSGHMC(model, h=size.rate, b=b, **settings)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=cycles * samples,
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(seed), task.X, task.y)
    fields = mcmc.get_extra_fields()
    return mcmc.get_samples(), {
        "gradient_steps": length * cycles,
        "diverging": float(np.mean(fields["diverging"])),
        "noise_ratio": float(fields["inner.noise_ratio"][-1]),
    }


def judge(task: Task, logits: Callable, draws: Any) -> dict[str, Any]:
    """Scores of an ensemble."""
    found = ensemble.scores(logits, draws, task.X_test, task.y_test)
    other = ensemble.entropy(ensemble.predict(logits, draws, task.X_other))
    inside = ensemble.entropy(ensemble.predict(logits, draws, task.X_test))
    levels = np.linspace(0, 1, 51)
    return {
        "members": int(found.members[-1]),
        "error_percent": round(100 * (1 - float(found.accuracy[-1])), 2),
        "first_member_error_percent": round(100 * (1 - float(found.accuracy[0])), 2),
        "nll": round(float(found.nll[-1]), 4),
        "calibration_error": round(float(found.calibration_error[-1]), 4),
        "entropy": round(float(found.entropy[-1]), 4),
        "entropy_of_others": round(float(other.mean()), 4),
        "entropy_quantiles": np.quantile(inside, levels).round(4).tolist(),
        "entropy_quantiles_of_others": np.quantile(other, levels).round(4).tolist(),
    }


def diversity(task: Task, logits: Callable, draws: Any) -> dict[str, Any]:
    """Distances between members, and losses on lines between and within cycles."""

    def loss(values: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(values, task.X_test), task.y_test
        ).mean()

    def at(member: int) -> Any:
        return jax.tree.map(lambda x: x[member], draws)

    function = ensemble.function_distances(logits, draws, task.X_test)
    weight = ensemble.weight_distances(draws)
    number = len(function)
    every = number // CYCLES
    cycle = np.arange(number) // every
    same = cycle[:, None] == cycle
    off = ~np.eye(number, dtype=bool)
    lines = {"between": ensemble.line_losses(loss, at(every - 1), at(2 * every - 1))}
    if every > 1:
        lines["within"] = ensemble.line_losses(loss, at(0), at(every - 1))
    found: dict[str, Any] = {
        "function_distances": function.round(4).tolist(),
        "weight_distances": weight.round(6).tolist(),
        "lines": {k: [p.tolist(), x.round(4).tolist()] for k, (p, x) in lines.items()},
    }
    for name, matrix in (("function", function), ("weight", weight)):
        found[f"{name}_between"] = float(matrix[~same].mean())
        if every > 1:
            found[f"{name}_within"] = float(matrix[same & off].mean())
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=["mnist", "cifar"])
    parser.add_argument("--full", action="store_true", help="the paper's settings")
    parser.add_argument("--epochs", type=int, help="instead of those of the size")
    parser.add_argument("--rows", type=int, help="instead of those of the size")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="the figure only")
    options = parser.parse_args(argv)
    if options.report:
        known = load(options.data, options.out)["methods"]
        plot(known, options.data, options.out / f"{options.data}.png")
        return
    size = SIZES[f"{options.data}-full" if options.full else options.data]
    size = size._replace(
        epochs=options.epochs or size.epochs, rows=options.rows or size.rows
    )
    images = task(options.data, size)
    shape = images.X.shape[1:]
    model, logits = make_model(images.network, shape), logits_of(images.network, shape)
    starts = [first_values(images.network, images.X, seed) for seed in options.seeds]
    number = ravel_pytree(starts[0])[0].size
    print(f"{len(images.X)} rows, {number} parameters", flush=True)
    content: dict[str, Any] = {
        "machine": machine(),
        "size": size._asdict(),
        "parameters": int(number),
        "seeds": options.seeds,
        "methods": {},
    }
    for name in options.methods:
        each = [
            run(name, images, model, logits, size, start, seed + 1)
            for seed, start in zip(options.seeds, starts, strict=True)
        ]
        content["methods"][name] = joined(each)
        save(options.data, content, options.out)
    plot(content["methods"], options.data, options.out / f"{options.data}.png")


def run(
    name: str,
    images: Task,
    model: Callable,
    logits: Callable,
    size: Size,
    start: Any,
    seed: int,
) -> dict[str, Any]:
    """One method from one start, and the scores of its ensemble."""
    begin = time.perf_counter()
    extra: dict[str, Any] = {}
    if name in ("SGD", "Snapshot"):
        cycles = 1 if name == "SGD" else CYCLES
        draws = descend(images, logits, size, start, cycles, seed)
    else:
        arguments = (name.removeprefix("c"), name.startswith("c"), model, images)
        draws, extra = sample(*arguments, size, start, seed)
    jax.block_until_ready(draws)
    extra["seconds_with_compilation"] = round(time.perf_counter() - begin, 1)
    found = {**judge(images, logits, draws), **extra}
    if name != "SGD":
        found["diversity"] = diversity(images, logits, draws)
    shown = ("error_percent", "nll", "calibration_error", "entropy_of_others")
    print(name, seed, {k: found[k] for k in shown} | extra, flush=True)
    jax.clear_caches()
    return found


def joined(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over several runs of a method, with standard errors.

    Distances and losses along lines are those of the first run.
    """
    found = dict(each[0])
    for name in ("entropy_quantiles", "entropy_quantiles_of_others"):
        found[name] = np.mean([one[name] for one in each], 0).round(4).tolist()
    errors = {}
    for name, value in each[0].items():
        if isinstance(value, float):
            values = [one[name] for one in each]
            found[name] = round(float(np.mean(values)), 4)
            if len(each) > 1:
                spread = np.std(values, ddof=1) / len(values) ** 0.5
                errors[name] = round(float(spread), 4)
    return {**found, "standard_errors": errors}


def plot(methods: dict[str, Any], name: str, path: Path) -> None:
    """Entropies, distances between members, and losses along lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = {k: methods[k] for k in METHODS if k in methods}
    figure, grid = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    entropy, losses, *distances = grid.flat
    levels = np.linspace(0, 1, 51)
    for method, found in methods.items():
        colour, mark = STYLES[method]
        entropy.plot(
            *(found["entropy_quantiles_of_others"], levels),
            color=colour,
            marker=mark,
            markevery=5,
            label=method,
        )
        for line, style in (("between", "-"), ("within", ":")):
            lines = found.get("diversity", {}).get("lines", {})
            if line in lines and method not in ("SGLD", "SGHMC"):  # within one cycle
                losses.plot(
                    *lines[line],
                    style,
                    color=colour,
                    marker=mark,
                    markevery=5,
                    label=f"{method}, {line}",
                )
    others = "notMNIST" if name == "mnist" else "images of shuffled pixels"
    entropy.set(
        title=f"Predictions for {others}", ylabel="cumulative fraction of images"
    )
    entropy.set_xlabel("entropy of the prediction (nats)")
    entropy.legend()
    for axis, key in zip(distances, ("function", "weight"), strict=True):
        shown = max(methods, key=METHODS.index)  # cSGHMC, if it ran
        image = axis.imshow(methods[shown]["diversity"][f"{key}_distances"])
        axis.set(title=f"{shown}: distances of {key}s", xlabel="draw", ylabel="draw")
        figure.colorbar(image, ax=axis, label=UNITS[key])
    losses.set(title="Lines between and within cycles", ylabel="test loss (nats)")
    losses.set_xlabel("position on the line between two draws")
    low, high = losses.get_ylim()
    losses.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
    losses.legend(loc="upper center", ncols=2, fontsize=9, columnspacing=1)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
