"""An ensemble of networks on small images
=======================================

A convolutional network on CIFAR-10, sampled by one chain of cyclical SGHMC. The draws
of its cycles form an ensemble. This example compares the ensemble with a single draw,
and checks whether its members lie in one mode or in several.

8,000 training images of CIFAR-10 are read from the folder named by
``NUMPYRO_MINIBATCH_DATA``. Without them, and with ``--small``, the digits included in
scikit-learn are used instead.
"""

import argparse
import os
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.infer import MCMC, init_to_sample

from numpyro_minibatch import CyclicalSGHMC, diagnose, ensemble, to_inference_data

parser = argparse.ArgumentParser(description="An ensemble of networks on small images")
sizes = parser.add_mutually_exclusive_group()
sizes.add_argument("--small", action="store_true", help="digits, short cycles")
sizes.add_argument("--full", action="store_true", help="200 epochs of 128 channels")
parser.add_argument("--out", type=Path, default=Path("demo-output"))
args = parser.parse_args()
cycles, samples = 4, 3
epochs = 10 if args.small else 50 if args.full else 20  # per cycle
channels = 8 if args.small else 128 if args.full else 32
args.out.mkdir(parents=True, exist_ok=True)


def load():
    """Images as (rows, height, width, colours), classes, and their source."""
    folder = Path(os.environ.get("NUMPYRO_MINIBATCH_DATA", "")) / "cifar10_small"
    path = folder / "cifar10_small.npz"
    if path.exists() and not args.small:
        with np.load(path) as found:
            images = [found[k] / 255.0 for k in ("x_train", "x_test")]
            labels = [found[k] for k in ("y_train", "y_test")]
        name = "CIFAR-10"
    else:
        from sklearn.datasets import load_digits

        print("DIGITS of scikit-learn instead of CIFAR-10")
        X, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(X))
        X = X[order].reshape(-1, 8, 8, 1) / 16.0
        images, labels = [X[:1400], X[1400:]], [y[order][:1400], y[order][1400:]]
        name = "digits"
    center, scale = images[0].mean((0, 1, 2)), images[0].std((0, 1, 2))
    images = [jnp.asarray((x - center) / scale, jnp.float32) for x in images]
    return images, [jnp.asarray(y, jnp.int32) for y in labels], name


(X, X_test), (y, y_test), name = load()
print(f"{name}: {len(y)} training images, {len(y_test)} test images")

# %%
# A network without state
# -----------------------
# Batch normalisation would make the likelihood of a row depend on the other rows of its
# batch, so it would not be a likelihood. Without normalisation, the prior keeps the
# size of the signal constant from layer to layer.
#
# A chain is a compiled loop, and on a CPU XLA computes the gradient of a convolution
# with respect to its weights far more slowly inside a loop than outside. ``nn.Dense``
# over windows is the same convolution without this problem: for this network a gradient
# took 26 ms of CPU time instead of the 790 ms of ``nn.Conv(width, (3, 3), strides=2)``
# (measured by ``benchmarks/bayesian_network/convolution.py --channels 32``). On GPUs,
# use ``nn.Conv``.


def windows(x):
    """Every second 3 by 3 window of the images, as (..., 9 * colours)."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
    shifted = [
        x[:, i : i + height - 1 : 2, j : j + width - 1 : 2]
        for i in range(3)
        for j in range(3)
    ]
    return jnp.concatenate(shifted, axis=-1)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (channels, 2 * channels):
            x = nn.relu(nn.Dense(width)(windows(x)))
        return nn.Dense(10)(x.reshape(len(x), -1))


def prior(name, shape):
    wide = (2 / np.prod(shape[:-1])) ** 0.5 if name.endswith("kernel") else 0.1
    return dist.Normal(0.0, wide)


def network():
    return random_flax_module("net", Network(), prior, input_shape=(1, *X.shape[1:]))


def model(X, y):
    net = network()
    with numpyro.plate("images", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Categorical(logits=net(X[i])), obs=y[i])


# %%
# Four cycles with three draws each
# ---------------------------------
# The chain starts at a draw from the prior, so the first cycle serves as burn-in.

steps = epochs * len(y) // 100
each = steps // 10 // samples
kernel = CyclicalSGHMC(
    model,
    h=0.02,
    b=0.05,
    scale_by_n=True,
    cycle_length=steps,
    samples_per_cycle=samples,
    num_steps=each,
    collect_from=1 - samples * each / steps,
    init_strategy=init_to_sample,
)
mcmc = MCMC(
    kernel,
    num_warmup=0,
    num_samples=cycles * samples,
    progress_bar=False,
    jit_model_args=True,
)
mcmc.run(jax.random.key(0), X, y)
idata = to_inference_data(mcmc, constant_data=False)
print(diagnose(idata, var_names=["net.Dense_2.bias"]))


def logits(draw, rows):
    with handlers.seed(rng_seed=0), handlers.substitute(data=draw):
        return network()(rows)


draws = mcmc.get_samples()
found = ensemble.scores(logits, draws, X_test, y_test)
print(f"{'draws':>5} {'error, %':>9} {'NLL':>7} {'calibration error':>18}")
for i in (0, samples - 1, cycles * samples - 1):
    print(
        f"{found.members[i]:5} {100 * (1 - found.accuracy[i]):9.2f} "
        f"{found.nll[i]:7.4f} {found.calibration_error[i]:18.4f}"
    )

# %%
# Size of the ensemble
# --------------------
# Error and negative log likelihood of the first one, two, ... draws. Draws of one cycle
# are similar, and draws of different cycles should differ: the curves should have their
# steps between cycles.

figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained")
lines = (
    ("test error (%)", 100 * (1 - found.accuracy), "#0072B2"),
    ("negative log likelihood (nats)", found.nll, "#D55E00"),
)
for axis, (label, values, colour) in zip(axes, lines, strict=False):
    axis.plot(found.members, values, "o-", color=colour)
    for cycle in range(1, cycles):
        axis.axvline(cycle * samples + 0.5, color="0.8", lw=1)
    axis.set(xlabel="draws in the ensemble", ylabel=label, xticks=found.members[::2])
axes[0].set_title(f"{name}: {cycles} cycles of {samples} draws")
axes[1].set_title("Grey lines: start of a cycle")

# distances of predictions: zero on the diagonal, small within a cycle
distance = ensemble.function_distances(logits, draws, X_test)
edges = (0.5, len(distance) + 0.5)
image = axes[2].imshow(distance, cmap="cividis", extent=(*edges, *edges[::-1]))
axes[2].set(
    xlabel="draw",
    ylabel="draw",
    title="Distance between predictions",
)
figure.colorbar(image, ax=axes[2], label="distance")
figure.savefig(args.out / "cifar_ensemble.png", dpi=80)

# %%
# Calibration of the probabilities
# --------------------------------

probabilities = ensemble.predict(logits, draws, X_test)
single = ensemble.predict(logits, jax.tree.map(lambda v: v[-1:], draws), X_test)
figure, axis = plt.subplots(figsize=(5, 5), layout="constrained")
for title, p, colour in (
    ("all draws", probabilities, "#0072B2"),
    ("the last draw", single, "#D55E00"),
):
    sure, right = p.max(1), p.argmax(1) == np.asarray(y_test)
    cells = np.array_split(np.argsort(sure), 8)
    axis.plot(
        [sure[cell].mean() for cell in cells],
        [right[cell].mean() for cell in cells],
        "o-",
        color=colour,
        label=title,
    )
axis.axline((1, 1), slope=1, color="0.6", lw=1)
axis.set(
    xlabel="probability of the most likely class",
    ylabel="fraction of images classified correctly",
    title=f"Calibration, eight groups of {len(y_test) // 8} images",
)
axis.legend()
figure.savefig(args.out / "cifar_ensemble_reliability.png", dpi=80)

# %%
# **What to look at.** The blocks on the diagonal of the distances: if they do not stand
# out, the cycles never left one mode, and the ensemble consists of draws from it. R-hat
# needs several chains, and single weights have symmetries, so compare predictions.
# ``noise_ratio`` in ``diagnose`` shows that the temperature of some weights is too
# high.

print(az.summary(idata, var_names=["net.Dense_2.bias"], kind="stats").head())
