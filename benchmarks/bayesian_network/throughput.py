"""An inner step of SGHMC compared with the same step written by hand in optax.

    python benchmarks/bayesian_network/throughput.py --batch 2000 --steps 10 --pairs 12

Both read batches of the same scheme in one compiled scan and draw one normal number per
parameter and step. Pairs are interleaved. Data are random numbers of MNIST's shape. CPU
time is reported as well as wall time, for machines with other users.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import bayesian_network as network  # noqa: E402

from numpyro_minibatch import SGHMC, batch  # noqa: E402

HIDDEN, N = (500, 256), 60_000
H, B = network.H / N, network.B


def start(X):
    params = network.Network(HIDDEN).init(random.key(0), X[:1])["params"]
    return params, {
        f"net/{layer}.{name}": value
        for layer, values in params.items()
        for name, value in values.items()
    }


def of_package(X, y, size, steps):
    """A function that moves a state by `steps` steps, and the first state."""
    model = network.make_model(HIDDEN, size)
    kernel = SGHMC(model, h=H, b=B, num_steps=10, integrator="euler")
    arguments = {"model_args": (X, y), "model_kwargs": {}}
    state = kernel.init(random.key(0), 0, init_params=start(X)[1], **arguments)

    @jax.jit
    def move(state, X, y):
        def draw(state, _):
            return kernel.sample(state, (X, y), {}), None

        return jax.lax.scan(draw, state, None, length=steps // 10)[0]

    return move, state


def by_hand(X, y, size, steps):
    """The same with optax: noise, momentum, and a gradient of the log posterior."""
    plates = {"data": N}
    rows_of = batch.without_replacement(size).bound({"data": size}, plates)
    optimizer = optax.chain(
        optax.scale(-H),
        optax.add_noise(eta=4 * H * B, gamma=0.0, key=random.key(5)),
        optax.trace(decay=1 - 2 * B),
    )

    def loss(params, X, y, rows):
        logits = network.Network(HIDDEN).apply({"params": params}, X[rows])
        log_p = jax.nn.log_softmax(logits)
        likelihood = jnp.take_along_axis(log_p, y[rows][:, None], 1).sum() * N / size
        prior = 0.0
        for path, value in jax.tree_util.tree_leaves_with_path(params):
            variance = 2.0 / len(value) if path[-1].key == "kernel" else 1.0
            prior += jnp.square(value).sum() / variance
        return 0.5 * prior - likelihood

    @jax.jit
    def move(state, X, y):
        key, params, optimizer_state, _ = state
        key, next_key = random.split(key)

        def step(carry, n):
            params, optimizer_state, _ = carry
            rows = rows_of.draw(random.fold_in(key, n), plates)["data"].indices
            value, gradient = jax.value_and_grad(loss)(params, X, y, rows)
            updates, optimizer_state = optimizer.update(gradient, optimizer_state)
            params = optax.apply_updates(params, updates)
            return (params, optimizer_state, value), None

        carry = (params, optimizer_state, jnp.zeros(()))
        carry, _ = jax.lax.scan(step, carry, jnp.arange(steps))
        return next_key, *carry

    params = start(X)[0]
    return move, (random.key(7), params, optimizer.init(params), jnp.zeros(()))


def main(args):
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.normal(size=(N, 784)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 10, N), jnp.int32)
    rows = []
    makers = (of_package, by_hand)
    both = [list(make(X, y, args.batch, args.steps)) for make in makers]
    for pair in range(-1, args.pairs):  # the first compiles
        row = []
        for one in both if pair % 2 else both[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            one[1] = jax.block_until_ready(one[0](one[1], X, y))
            used = time.perf_counter() - wall, time.process_time() - cpu
            row.append(1e3 * np.array(used) / args.steps)
        if pair >= 0:
            rows.append(row if pair % 2 else row[::-1])
    times = np.array(rows)  # (pairs, ours and by hand, wall and processor)
    ratios = times[:, 0] / times[:, 1]
    found = {
        "batch_size": args.batch,
        "pairs": args.pairs,
        "steps_of_a_run": args.steps,
        "jax": jax.__version__,
        "ms_a_step_wall": dict(
            zip(("ours", "by_hand"), np.median(times, 0)[:, 0], strict=True)
        ),
        "ms_a_step_cpu": dict(
            zip(("ours", "by_hand"), np.median(times, 0)[:, 1], strict=True)
        ),
        "ratio_wall": np.quantile(ratios[:, 0], (0.25, 0.5, 0.75)).tolist(),
        "ratio_cpu": np.quantile(ratios[:, 1], (0.25, 0.5, 0.75)).tolist(),
        "ratio_of_fastest": float(times[:, 0, 0].min() / times[:, 1, 0].min()),
    }
    text = json.dumps(found, indent=1, default=float)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"throughput_{args.batch}.json").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10, help="of one timed run")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    main(parser.parse_args())
