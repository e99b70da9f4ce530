"""A Bayesian network on MNIST
===========================

A Bayesian neural network on MNIST, sampled by SGHMC and AMAGOLD on minibatches.

The model is a NumPyro model with a flax network. Gradient descent with momentum on the
same model finds a starting point for SGHMC and AMAGOLD. Ensembles of their draws
predict the classes of test images, and the uncertainty of their predictions is compared
with that for images that show no digits.

MNIST and notMNIST are read from the folder named by ``NUMPYRO_MINIBATCH_DATA``. Without
them, and with ``--small``, as on the page of the gallery, the digits included in
scikit-learn replace MNIST, and images with shuffled pixels replace notMNIST.

What to look at: whether an ensemble has a lower error than its draws, and, in the right
panel of the figure, whether its predictions are uncertain for images that show no
digit. ``diagnose`` reports few effective draws of the biases: compare ensembles by
their predictions.

Ruqi Zhang, A. Feder Cooper, Christopher De Sa (2020), AMAGOLD: amortized Metropolis
adjustment for efficient stochastic gradient MCMC, section 6.3.
"""

from __future__ import annotations

import argparse
import gzip
import os
import time
from pathlib import Path
from typing import NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen as nn
from jax import random
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import (
    MCMC,
    SVI,
    Trace_ELBO,
    init_to_sample,
    init_to_value,
)
from numpyro.infer.autoguide import AutoDelta

from numpyro_minibatch import AMAGOLD, SGHMC, diagnose, to_inference_data

H = 0.0005  # the paper's step, per mean loss; for the sum over N rows it is H / N
B = 0.01  # momentum is multiplied by (1 - B) / (1 + B)
SIZES = {
    "small": {"hidden": (50,), "batch": 200, "epochs": 20, "draws": 20, "thin": 2},
    "default": {"hidden": (100,), "batch": 500, "epochs": 3, "draws": 20, "thin": 5},
    "full": {"hidden": (500, 256), "batch": 2000, "epochs": 3, "draws": 20, "thin": 50},
}
NUM_STEPS = 10
COLOURS = {"optimum": "0.3", "SGHMC": "#D55E00", "AMAGOLD": "#0072B2"}


class Network(nn.Module):
    hidden: tuple[int, ...]
    classes: int = 10

    @nn.compact
    def __call__(self, x):
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.classes)(x)


def prior(name, shape):
    """A width that keeps the size of the signal constant from layer to layer."""
    is_kernel = name.endswith("kernel")
    return dist.Normal(0.0, (2.0 / shape[0]) ** 0.5 if is_kernel else 1.0)


def network(hidden, num_inputs, prior=prior):
    return random_flax_module(
        "net", Network(hidden), prior, input_shape=(1, num_inputs)
    )


def make_model(hidden, batch_size, prior=prior):
    """A classifier; `batch_size` is the batch size of gradient descent."""

    def model(X, y):
        net = network(hidden, X.shape[-1], prior)
        with numpyro.plate("images", len(X), subsample_size=batch_size) as rows:
            numpyro.sample("y", dist.Categorical(logits=net(X[rows])), obs=y[rows])

    return model


def burn_in(key, model, X, y, num_steps, start=init_to_sample):
    """Gradient descent with momentum to a mode of the posterior: a value per site."""
    guide = AutoDelta(model, init_loc_fn=start)
    # the loss is a sum over all rows
    optimizer = optax.sgd(0.1 / len(X), momentum=0.5)
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    result = svi.run(key, num_steps, X, y, progress_bar=False)
    return guide.median(result.params)


def predict(draws, X, hidden):
    """Class probabilities predicted by each draw, (draws, rows, classes)."""

    def one(draw):
        with handlers.seed(rng_seed=0), handlers.substitute(data=draw):
            net = network(hidden, X.shape[-1])
        return jax.nn.softmax(net(X))

    return np.asarray(jax.jit(lambda draws: jax.lax.map(one, draws))(draws))


def score(probabilities, y):
    """Test error in percent and mean negative log likelihood of an ensemble."""
    mean = probabilities.mean(0)
    nll = -np.log(np.maximum(mean[np.arange(len(y)), y], 1e-12)).mean()
    return 100 * (mean.argmax(-1) != y).mean(), nll


def entropy(probabilities):
    """Entropy of an ensemble's prediction for each row, in nats; at most log 10."""
    mean = np.maximum(probabilities.mean(0), 1e-12)
    return -(mean * np.log(mean)).sum(-1)


def kernels(model, size, start, num_rows):
    """Both kernels at the same step size and friction, in the paper's notation."""
    common = {
        "batch_size": size["batch"],
        "h": H / num_rows,
        "b": B,
        "init_strategy": init_to_value(values=start),
    }
    return {
        "SGHMC": SGHMC(model, num_steps=NUM_STEPS, **common),
        "AMAGOLD": AMAGOLD(
            model, num_steps=NUM_STEPS, resample_momentum=False, **common
        ),
    }


def main(args):
    size = SIZES["small" if args.small else "full" if args.full else "default"]
    data = load(digits_only=args.small)
    X, y = jnp.asarray(data.X), jnp.asarray(data.y)
    say(f"{data.name}: {len(X)} images of {X.shape[1]} pixels")
    key_burn_in, *keys = random.split(random.key(args.seed), 3)

    descent_batch = min(500, len(X) // 10)
    model = make_model(size["hidden"], descent_batch)
    epochs = size["epochs"] if len(X) > 10_000 else 20
    begin = time.perf_counter()
    start = burn_in(key_burn_in, model, X, y, epochs * len(X) // descent_batch)
    number = sum(value.size for value in start.values())
    seconds = time.perf_counter() - begin
    say(f"{epochs} epochs of gradient descent, {number} parameters: {seconds:.1f} s")

    draws = {"optimum": {name: value[None] for name, value in start.items()}}
    size["batch"] = min(size["batch"], len(X) // 5)
    for (name, kernel), key in zip(
        kernels(model, size, start, len(X)).items(), keys, strict=True
    ):
        begin = time.perf_counter()
        mcmc = MCMC(
            kernel,
            num_warmup=0,  # nothing adapts: the step size is the paper's
            num_samples=size["draws"] * size["thin"],
            thinning=size["thin"],
            progress_bar=False,
            jit_model_args=True,  # the images are arguments of the program
        )
        mcmc.run(key, X, y)
        draws[name] = mcmc.get_samples()
        idata = to_inference_data(mcmc)
        say(f"{name}: {time.perf_counter() - begin:.1f} s")
        # a few of half a million parameters
        last = [str(v) for v in idata.posterior.data_vars if str(v).endswith("bias")]
        print(diagnose(idata, var_names=last[-1:]), "\n")
        # a single chain has no statistics that compare chains
        print(az.summary(idata, var_names=last[-1:], kind="stats"), "\n")

    results = {}
    for name, values in draws.items():
        inside = predict(values, data.X_test, size["hidden"])
        outside = predict(values, data.X_other, size["hidden"])
        results[name] = Result(
            *score(inside, data.y_test),
            [score(inside[i : i + 1], data.y_test)[0] for i in range(len(inside))],
            entropy(inside),
            entropy(outside),
        )
    print(table(results, data), "\n")
    args.out.mkdir(parents=True, exist_ok=True)
    plot(results, data, args.out / "bayesian_network.png")
    say(f"wrote {args.out / 'bayesian_network.png'}")


class Result(NamedTuple):
    error: float
    nll: float
    errors: list[float]  # one per draw
    inside: np.ndarray  # entropies for test images
    outside: np.ndarray  # for other images


def table(results, data):
    lines = [
        f"{'':<10} {'test error':>11} {'NLL':>7}   mean entropy: "
        f"{data.name}, {data.other}"
    ]
    for name, result in results.items():
        lines.append(
            f"{name:<10} {result.error:10.2f}% {result.nll:7.4f}"
            f"   {result.inside.mean():.3f}, {result.outside.mean():.3f}"
        )
    return "\n".join(lines)


def plot(results, data, path):
    """Errors of draws and of ensembles, and entropies of the ensembles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    for name, result in results.items():
        colour = COLOURS[name]
        if name == "optimum":
            axes[0].axhline(result.error, color=colour, ls=":", label=name)
        else:
            style = "o-" if name == "AMAGOLD" else "s-"
            axes[0].plot(
                result.errors, style, ms=4, color=colour, label=f"{name}, draw"
            )
            style = "--" if name == "AMAGOLD" else "-."
            axes[0].axhline(
                result.error, color=colour, ls=style, label=f"{name}, ensemble"
            )
        for values, style, what in (
            (result.inside, "-", data.name),
            (result.outside, "--", data.other),
        ):
            grid = np.sort(values)
            levels = np.arange(1, len(grid) + 1) / len(grid)
            axes[1].plot(grid, levels, style, color=colour, label=f"{name}, {what}")
    axes[0].set(xlabel="draw", ylabel="test error (%)")
    axes[1].set(xlabel="entropy of the prediction (nats)")
    axes[1].set_ylabel("cumulative fraction of images")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_title("Errors of single draws and of ensembles")
    axes[1].set_title("Uncertainty of the ensembles")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2}
    for axis in axes:
        axis.legend(fontsize=9, **below)
    figure.suptitle(f"A Bayesian network on {data.name}")
    figure.savefig(path, dpi=80)


class Data(NamedTuple):
    name: str
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    other: str  # what the other images are
    X_other: np.ndarray


def load(digits_only=False):
    """MNIST with notMNIST, or scikit-learn's digits with their pixels shuffled."""
    folder = Path(os.environ.get("NUMPYRO_MINIBATCH_DATA", ""))
    rng = np.random.default_rng(0)
    other, X_other = "shuffled pixels", None
    if not digits_only and (folder / "mnist" / "train-images-idx3-ubyte.gz").exists():
        name = "MNIST"
        X, y, X_test, y_test = (
            read_idx(folder / "mnist" / f"{part}-ubyte.gz")
            for part in (
                "train-images-idx3",
                "train-labels-idx1",
                "t10k-images-idx3",
                "t10k-labels-idx1",
            )
        )
        path = folder / "notmnist" / "t10k-images-idx3-ubyte.gz"
        if path.exists():
            other, X_other = "notMNIST", read_idx(path)
    else:
        from sklearn.datasets import load_digits

        name = "digits"
        images, labels = load_digits(return_X_y=True)
        order = rng.permutation(len(images))
        train, test = order[:1437], order[1437:]
        X, y, X_test, y_test = images[train], labels[train], images[test], labels[test]
    X, X_test = (np.asarray(x, np.float32).reshape(len(x), -1) for x in (X, X_test))
    if X_other is None:
        X_other = rng.permuted(X_test, axis=1)
    X_other = np.asarray(X_other, np.float32).reshape(len(X_other), -1)
    center, scale = X.mean(), X.std()
    X, X_test, X_other = ((x - center) / scale for x in (X, X_test, X_other))
    y, y_test = (np.asarray(labels, np.int32) for labels in (y, y_test))
    return Data(name, X, y, X_test, y_test, other, X_other)


def read_idx(path):
    """The array in a file in MNIST's format."""
    raw = gzip.decompress(path.read_bytes())
    num_dims = raw[3]
    shape = np.frombuffer(raw, ">i4", num_dims, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def say(text):
    """A line of progress with the seconds since the start."""
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


BEGIN = time.perf_counter()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A Bayesian network on MNIST")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--small", action="store_true", help="digits, under a minute")
    length.add_argument("--full", action="store_true", help="the paper's network")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
