"""A convolution in a loop on a CPU: `nn.Conv` and `nn.Dense` over windows.

    python benchmarks/bayesian_network/convolution.py --channels 32 --pairs 3

Gradient steps of the network of examples/cifar_ensemble.py on 100 images of 32 by 32,
outside a loop and inside a `lax.scan`, as in a chain. Pairs are interleaved; the script
prints medians of the CPU time per step, in milliseconds.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

LENGTH = 5  # steps in a loop


def windows(x):
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
    shifted = [
        x[:, i : i + height - 1 : 2, j : j + width - 1 : 2]
        for i in range(3)
        for j in range(3)
    ]
    return jnp.concatenate(shifted, axis=-1)


class Network(nn.Module):
    channels: int
    convolution: bool

    @nn.compact
    def __call__(self, x):
        for width in (self.channels, 2 * self.channels):
            if self.convolution:
                x = nn.Conv(width, (3, 3), strides=2)(x)
            else:
                x = nn.Dense(width)(windows(x))
            x = nn.relu(x)
        return nn.Dense(10)(x.reshape(len(x), -1))


def programs(channels, convolution):
    """Functions of the weights: one gradient step, and several in a loop."""
    net = Network(channels, convolution)
    X = jax.random.normal(jax.random.key(0), (100, 32, 32, 3))
    y = jax.random.randint(jax.random.key(1), (100,), 0, 10)

    def loss(weights):
        logs = jax.nn.log_softmax(net.apply(weights, X))
        return -jnp.take_along_axis(logs, y[:, None], 1).sum()

    def step(weights, _=None):
        gradient = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 1e-5 * g, weights, gradient), None

    def loop(weights):
        return jax.lax.scan(step, weights, length=LENGTH)

    return net.init(jax.random.key(2), X), jax.jit(step), jax.jit(loop)


def milliseconds(function, weights):
    begin = time.process_time()
    jax.block_until_ready(function(weights))
    return 1e3 * (time.process_time() - begin)


def main(args):
    cases = {
        "nn.Conv": programs(args.channels, convolution=True),
        "nn.Dense over windows": programs(args.channels, convolution=False),
    }
    alone, loop = {name: [] for name in cases}, {name: [] for name in cases}
    for _ in range(args.pairs + 1):  # the first compiles
        for name, (weights, one, several) in cases.items():
            alone[name].append(milliseconds(one, weights))
            loop[name].append(milliseconds(several, weights) / LENGTH)
    print(f"{'':<22} {'alone':>8} {'in a loop':>10}")
    for name in cases:
        times = np.median(alone[name][1:]), np.median(loop[name][1:])
        print(f"{name:<22} {times[0]:8.1f} {times[1]:10.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    main(parser.parse_args())
