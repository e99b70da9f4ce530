"""A recurrent network on Fashion-MNIST with replica exchange
==========================================================

A recurrent Bayesian network on Fashion-MNIST: RENHD compared with SGHMC and SGNHT.

An LSTM reads each image row by row. Three samplers use the same number of gradients and
start at the same draw from the prior of its weights. RENHD runs a ladder of
temperatures and swaps positions between rungs; SGNHT and SGHMC spend all gradients on
one chain. This example compares the test accuracy of their ensembles.

What to look at: whether the curves of the ensembles are still rising, in which case the
figure compares speed and not posteriors; how much chains of one sampler differ; and
whether replicas change their rungs at all.

Fashion-MNIST is read from the folder named by ``NUMPYRO_MINIBATCH_DATA``, or
downloaded. Without it, and with ``--small``, as on the page of the gallery, the digits
included in scikit-learn are used instead.

The default is a smaller network than the paper's, on fewer images, with fewer rungs and
far fewer steps, so that two cores can run it in a few minutes. ``--full`` uses the
paper's settings, which need an accelerator and hours.

Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), Replica-exchange Nosé-Hoover
dynamics for Bayesian learning on large datasets, section 4.2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn
from jax import random
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import MCMC

from numpyro_minibatch import (
    RENHD,
    SGHMC,
    SGNHT,
    batch,
    datasets,
    diagnose,
    to_inference_data,
)

COLOURS = {"RENHD": "#0072B2", "SGNHT": "#009E73", "SGHMC": "#D55E00"}
MARKERS = {"RENHD": "o", "SGNHT": "s", "SGHMC": "^"}


ZEROS = nn.initializers.zeros  # never used: the prior provides the initial values


class Size(NamedTuple):
    hidden: int  # outputs of the LSTM
    dense: int
    rows: int  # training images
    test_rows: int
    rungs: int
    ratio: float  # of neighbouring temperatures
    chains: int
    draws: int
    num_steps: int  # gradients of a replica per draw
    batch: int = 128
    swap_batch: int = 256
    h: float = 0.3  # the paper's epsilon times the number of images
    c: float = 0.1  # friction times step


SIZES = {
    "small": Size(12, 12, 1437, 360, 3, 1.2, 2, 12, 8, batch=100, h=0.1),
    "default": Size(32, 32, 10_000, 2000, 4, 1.2, 2, 24, 50, swap_batch=1000, h=0.1),
    # 2344 draws are 1000 epochs
    "full": Size(128, 64, 60_000, 10_000, 12, 1.2, 1, 2344, 200),
}


class LSTM(nn.Module):
    """Long short-term memory; its output after the last row of pixels.

    Flax's own LSTM has eight kernels, each a site of the model. This one has a single
    kernel, which keeps the program small.
    """

    hidden: int

    @nn.compact
    def __call__(self, x):
        pixels, gates = x.shape[-1], 4 * self.hidden
        kernel = self.param("kernel", ZEROS, (pixels + self.hidden, gates))
        bias = self.param("bias", ZEROS, (gates,))

        def step(carry, row):
            cell, out = carry
            known = jnp.concatenate([row, out], -1) @ kernel + bias
            keep, write, new, show = jnp.split(known, 4, -1)
            cell = nn.sigmoid(keep) * cell + nn.sigmoid(write) * jnp.tanh(new)
            return (cell, nn.sigmoid(show) * jnp.tanh(cell)), None

        zero = jnp.zeros((*x.shape[:-2], self.hidden), x.dtype)
        (_, out), _ = jax.lax.scan(step, (zero, zero), jnp.moveaxis(x, -2, 0))
        return out


class Network(nn.Module):
    hidden: int
    dense: int
    classes: int = 10

    @nn.compact
    def __call__(self, x):
        x = nn.relu(LSTM(self.hidden)(x))
        x = nn.relu(nn.Dense(self.dense, kernel_init=ZEROS)(x))
        return nn.Dense(self.classes, kernel_init=ZEROS)(x)


def prior(name, shape):
    """A width that keeps the size of the signal constant from layer to layer."""
    return dist.Normal(0.0, shape[0] ** -0.5 if name.endswith("kernel") else 1.0)


def network(size, image):
    return random_flax_module(
        "net", Network(size.hidden, size.dense), prior, input_shape=(1, *image)
    )


def make_model(size):
    def model(X, y):
        net = network(size, X.shape[1:])
        with numpyro.plate("images", len(X), subsample_size=size.batch) as rows:
            numpyro.sample("y", dist.Categorical(logits=net(X[rows])), obs=y[rows])

    return model


def starts(key, model, X, y, chains):
    """A draw from the prior for each chain, at which all samplers start."""

    def one(key):
        with handlers.seed(rng_seed=key), handlers.trace() as trace:
            model(X, y)
        sites = trace.items()
        return {n: s["value"] for n, s in sites if n.startswith("net/")}

    return jax.jit(jax.vmap(one))(random.split(key, chains))


def kernels(model, size, num_rows):
    """The three samplers, with the same number of gradients per draw."""
    step_size = (size.h / num_rows) ** 0.5
    common = {
        "step_size": step_size,
        "friction": size.c / step_size,
        "batch_size": size.batch,
        "temper_prior": True,  # as in the paper: the whole energy is divided by T
    }
    alone = size.rungs * size.num_steps
    return {
        "RENHD": RENHD(
            model,
            num_replicas=size.rungs,
            temperature_ratio=size.ratio,
            swap="barker",  # on a batch that grows until its noise is small enough
            swap_batch=batch.growing(size.swap_batch),
            num_steps=size.num_steps,
            **common,
        ),
        "SGNHT": SGNHT(model, num_steps=alone, **common),
        "SGHMC": SGHMC(model, num_steps=alone, **common),
    }


def predictor(X, size):
    """A function from draws to the class probabilities of the rows of X."""

    def one(draw):
        with handlers.seed(rng_seed=0), handlers.substitute(data=draw):
            net = network(size, X.shape[1:])
        return jax.nn.softmax(net(X))

    return jax.jit(lambda draws: jax.lax.map(one, draws))


def score(mean, y):
    """Accuracy in percent and mean negative log likelihood."""
    nll = -np.log(np.maximum(mean[np.arange(len(y)), y], 1e-12)).mean()
    return 100.0 * float((mean.argmax(-1) == y).mean()), float(nll)


class Result(NamedTuple):
    gradients: np.ndarray  # made up to each draw, of all replicas
    draws: np.ndarray  # accuracy of each draw, (chains, draws)
    ensembles: np.ndarray  # of the later half of the draws so far
    nll: np.ndarray  # of the last ensemble, (chains,)
    rows: float  # read by a chain, in millions; swaps included
    seconds: float
    rung: np.ndarray | None  # of each replica of the first chain
    swaps: list[float]


def measured(mcmc, predict, y, size, seconds):
    """Test accuracies of a sampler's draws, by number of gradients."""
    samples = mcmc.get_samples(group_by_chain=True)
    draws, ensembles, nll = [], [], []
    for chain in range(size.chains):
        mine = jax.tree.map(lambda x: x[chain], samples)  # noqa: B023
        found = np.asarray(predict(mine))
        draws.append([score(p, y)[0] for p in found])
        means = [found[(k + 1) // 2 : k + 1].mean(0) for k in range(len(found))]
        ensembles.append([score(p, y)[0] for p in means])
        nll.append(score(means[-1], y)[1])
    number = np.arange(1, size.draws + 1) * size.num_steps * size.rungs
    fields = mcmc.get_extra_fields(group_by_chain=True)
    rung, swaps = None, []
    if "rung" in fields:
        rung = np.asarray(fields["rung"][0])
        rates = np.asarray(fields["swap_acceptance_rate"])
        swaps = np.nanmean(rates, (0, 1)).tolist()
    return Result(
        number,
        np.array(draws),
        np.array(ensembles),
        np.array(nll),
        float(np.asarray(fields["num_rows"], np.float64)[0].sum()) / 1e6,
        seconds,
        rung,
        swaps,
    )


def main(args):
    name = "small" if args.small else "full" if args.full else "default"
    size = SIZES[name]
    changed = {key: getattr(args, key) for key in ("draws", "chains")}
    size = size._replace(**{k: v for k, v in changed.items() if v is not None})
    title, data = load(size, digits_only=args.small, permuted=args.permuted)
    say(f"{title}: {len(data.X)} images of {data.X.shape[1]} x {data.X.shape[2]}")
    arrays = jnp.asarray(data.X), jnp.asarray(data.y)
    predict = predictor(data.X_test, size)
    model = make_model(size)
    first, *keys = random.split(random.key(args.seed), 4)
    start, results = starts(first, model, *arrays, size.chains), {}
    if size.chains == 1:  # then NumPyro expects no axis of chains
        start = jax.tree.map(lambda x: x[0], start)
    for (method, kernel), key in zip(
        kernels(model, size, len(data.X)).items(), keys, strict=True
    ):
        begin = time.perf_counter()
        mcmc = MCMC(
            kernel,
            num_warmup=0,  # the way from the prior is part of what is compared
            num_samples=size.draws,
            num_chains=size.chains,
            chain_method="vectorized",
            progress_bar=False,
            jit_model_args=True,  # the images are no constants of the program
        )
        mcmc.run(key, *arrays, init_params=start)
        jax.block_until_ready(mcmc.get_samples())
        seconds = time.perf_counter() - begin
        results[method] = measured(mcmc, predict, data.y_test, size, seconds)
        say(f"{method}: {results[method].gradients[-1]} gradients a chain")
        idata = to_inference_data(mcmc)
        # a few of many thousand weights: the biases of the last layer
        offsets = [str(v) for v in idata.posterior.data_vars if "Dense_1.bias" in v]
        print(diagnose(idata, var_names=offsets), "\n")
        print(az.summary(idata, var_names=offsets), "\n")
    print(table(results), "\n")
    print(advice(results), "\n")
    args.out.mkdir(parents=True, exist_ok=True)
    plot(results, title, args.out / "fashion_mnist_lstm.png")
    say(f"wrote {args.out / 'fashion_mnist_lstm.png'}")
    if args.record:
        record(results, size, title, args)


def table(results):
    head = f"{'':<6} {'accuracy of ensemble':>24} {'NLL':>16} {'best draw':>11}"
    lines = [f"{head} {'rows, 1e6':>10} {'time':>8}"]
    for name, found in results.items():
        last, spread = found.ensembles[:, -1], " "
        if len(last) > 1:
            spread = f" (chains {min(last):.1f} to {max(last):.1f})"
        lines.append(
            f"{name:<6} {last.mean():6.2f}%{spread:>22} {found.nll.mean():10.4f}"
            f" {found.draws.max():10.2f}% {found.rows:10.2f} {found.seconds:6.0f} s"
        )
    return "\n".join(lines)


def advice(results):
    """What to look at."""
    last = {name: found.ensembles[:, -1].mean() for name, found in results.items()}
    others = max(last["SGNHT"], last["SGHMC"])
    rates = ", ".join(f"{rate:.2f}" for rate in results["RENHD"].swaps)
    verdict = "better" if last["RENHD"] > others else "not better"
    return (
        f"RENHD is {verdict} than SGNHT and SGHMC with the same number of gradients. "
        f"Swap rates: {rates}.\nLook at the figure: whether the curves are still "
        "rising (then it compares speed, not posteriors),\nhow much chains of one "
        "sampler differ, and whether replicas change their rungs: if they do not,\n"
        "RENHD is SGNHT with a fraction of the gradients. R-hat shows that single "
        "weights have not\nmixed; in a network only predictions can mix."
    )


def plot(results, title, path):
    """Accuracies of ensembles and draws by gradients, and the replicas' paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, found in results.items():
        colour = COLOURS[name]
        for chain, (ensemble, each) in enumerate(
            zip(found.ensembles, found.draws, strict=True)
        ):
            label = name if chain == 0 else None
            mark = {"marker": MARKERS[name], "ms": 4}
            axes[0].plot(found.gradients, ensemble, color=colour, label=label, **mark)
            axes[0].plot(found.gradients, each, ":", lw=0.7, color=colour)
    low = min(
        found.ensembles[:, len(found.gradients) // 4 :].min()
        for found in results.values()
    )
    axes[0].set(
        xlabel="gradients (all replicas)",
        ylabel="test accuracy (%)",
        ylim=(low - 3, None),
        title="Ensembles (solid) and single draws (dotted)",
    )
    axes[0].legend(fontsize=9)
    rung = results["RENHD"].rung
    for replica in range(rung.shape[1]):
        # shifted, and with a style of its own
        height = rung[:, replica] + 0.04 * replica
        style = ("-", "--", "-.", ":")[replica % 4]
        axes[1].step(np.arange(len(rung)), height, style, where="post", lw=1.5)
    axes[1].set(xlabel="draw", ylabel="rung (0: coldest)")
    axes[1].set_title("Paths of RENHD's replicas")
    axes[1].set_yticks(range(rung.shape[1]))
    figure.suptitle(f"A recurrent network on {title}")
    figure.savefig(path, dpi=80)


def record(results, size, title, args):
    """Write the numbers to a file."""
    content = {
        "data": title,
        "permuted": args.permuted,
        "seed": args.seed,
        "settings": size._asdict(),
        "machine": {
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "numpyro")},
        },
        "methods": {
            name: {
                "gradients": int(found.gradients[-1]),
                "accuracy": found.ensembles[:, -1].tolist(),
                "accuracy_of_draws": found.draws[:, -5:].mean(1).tolist(),
                "nll": found.nll.tolist(),
                "swap_rates": found.swaps,
                "million_rows": found.rows,
                "seconds": found.seconds,
            }
            for name, found in results.items()
        },
    }
    args.record.parent.mkdir(parents=True, exist_ok=True)
    args.record.write_text(json.dumps(content, indent=1) + "\n")
    say(f"wrote {args.record}")


def load(size, digits_only=False, permuted=0.0):
    """Fashion-MNIST, or scikit-learn's digits, and a name for it."""
    rng = np.random.default_rng(0)
    title, data = "digits", None
    if not digits_only:
        try:
            data, title = datasets.load_fashion_mnist(), "Fashion-MNIST"
        except FileNotFoundError as error:
            say(f"digits instead of Fashion-MNIST: {error}")
    if data is None:
        from sklearn.datasets import load_digits

        found = load_digits()
        order = rng.permutation(len(found.images))
        train, test = order[:1437], order[1437:]
        images = (found.images / 16).astype(np.float32)
        labels = found.target.astype(np.int32)
        data = datasets.Images(images[train], labels[train], images[test], labels[test])
    rows = rng.permutation(len(data.X))[: size.rows]
    X, y = data.X[rows], data.y[rows].copy()
    # the paper permutes a fraction of the labels at each epoch; here it is done once,
    # so that there is one posterior
    some = rng.permutation(len(y))[: int(permuted * len(y))]
    y[some] = y[rng.permutation(some)]
    center, scale = X.mean(), X.std()
    X, X_test = ((x - center) / scale for x in (X, data.X_test[: size.test_rows]))
    return title, datasets.Images(X, y, X_test, data.y_test[: size.test_rows])


def say(text):
    """A line of progress with the seconds since the start."""
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


BEGIN = time.perf_counter()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="A recurrent network on Fashion-MNIST with replica exchange"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--small", action="store_true", help="digits, half a minute")
    length.add_argument("--full", action="store_true", help="the paper's settings")
    parser.add_argument("--draws", type=int, help="per chain")
    parser.add_argument("--chains", type=int)
    parser.add_argument(
        "--permuted", type=float, default=0.0, help="fraction of labels, such as 0.2"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--record", type=Path, help="file for the numbers")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
