"""A network on MNIST by MINT, its cycles, and gradient samplers: error over passes.

    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.papers.mint_network

Figure 3 of Dangna Li, Wing H. Wong (2017), Mini-batch Tempered MCMC, at a small size:
784-50-10 instead of 784-200-10, 10,000 images instead of 50,000, and fewer passes.
Batches are the paper's 200. MINT has its temperature, ``N ** (1 - 0.99 tau)``, and
proposes by Langevin steps on a minibatch gradient, whose length adapts to the
acceptance rate. All samplers have the prior of ``benchmarks.cyclical.networks`` (the
paper: none for MINT, gamma mixtures for the others) and the same start, before any
gradient descent.

The paper compares MINT with samplers at temperature 1. This script adds SGHMC at MINT's
own temperature, which samples the same distribution by gradients alone.

An accept/reject step reads 200 images, and each of the two gradients of a Langevin step
another 200. A pass is as many images as there are, whatever they are read for; the
paper counts accept/reject steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random
from numpyro.infer import MCMC, init_to_value

from numpyro_minibatch import MINT, SGHMC, SGLD, CyclicalMINT, proposal

from .record import COLOURS, DOCS, RESULTS, load, save

BATCH, ALPHA = 200, 0.99
RATE, MOMENTUM = 0.05, 0.9  # for gradient descent and SGHMC, per mean loss
RATE_SGLD = 0.05
STEP = 1e-3  # for MINT, before it adapts
MEMBERS = 20  # draws of the second half in an ensemble
CYCLES = 5
FIGURE = DOCS / "_static" / "mint_network.png"


def temperature(size: int, batch: int) -> float:
    """The paper's, ``N ** (1 - lambda)``."""
    return size / batch**ALPHA


def kernels(
    model: Callable, size: int, batch: int, start: Any
) -> dict[str, tuple[Any, bool]]:
    """The samplers, with one pass per draw, and whether they adapt at first."""
    shared = {"init_strategy": init_to_value(values=start), "batch_size": batch}
    gradients = {**shared, "num_steps": size // batch}
    hot = temperature(size, batch)
    momentum = {"h": RATE / size, "b": (1 - MOMENTUM) / (1 + MOMENTUM)}
    mint = MINT(
        model,
        temperature=hot,
        proposal=proposal.langevin(),
        step_size=STEP,
        adapt_mass_matrix=False,
        target_accept_prob=0.5,
        num_steps=size // (3 * batch),
        **shared,
    )
    return {
        "SGLD": (SGLD(model, step_size=RATE_SGLD / size, **gradients), False),
        "SGHMC": (SGHMC(model, **momentum, **gradients), False),
        "SGHMC, MINT's temperature": (
            SGHMC(model, temperature=hot, **momentum, **gradients),
            False,
        ),
        "MINT": (mint, True),
    }


def descend(
    logits: Callable, images: Any, start: Any, passes: int, batch: int
) -> dict[str, Any]:
    """Gradient descent with momentum on the likelihood: weights after each pass."""
    size = len(images.X)
    optimizer = optax.sgd(RATE, momentum=MOMENTUM)

    def loss(values: Any, rows: Any) -> Any:
        found = logits(values, images.X[rows])
        return optax.softmax_cross_entropy_with_integer_labels(
            found, images.y[rows]
        ).mean()

    def step(carry: Any, key: Any) -> Any:
        values, state = carry
        rows = random.randint(key, (batch,), 0, size)
        updates, state = optimizer.update(jax.grad(loss)(values, rows), state)
        return (optax.apply_updates(values, updates), state), None

    def one(carry: Any, key: Any) -> Any:
        carry = jax.lax.scan(step, carry, random.split(key, size // batch))[0]
        return carry, carry[0]

    carry = start, optimizer.init(start)
    keys = random.split(random.key(1), passes)
    kept = jax.jit(lambda carry: jax.lax.scan(one, carry, keys)[1])(carry)
    return {"draws": kept, "passes": list(range(1, passes + 1))}


def sample(kernel: Any, images: Any, passes: int, adapts: bool) -> dict[str, Any]:
    """One draw per pass; with ``adapts``, a quarter of them are warmup."""
    warmup = passes // 4 if adapts else 0
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=passes - warmup,
        progress_bar=False,
        jit_model_args=True,
    )
    first = []
    if warmup:
        mcmc.warmup(random.key(2), images.X, images.y, collect_warmup=True)
        first = [mcmc.get_samples()]
    state = mcmc.post_warmup_state
    key = random.key(3) if state is None else state.rng_key
    mcmc.run(key, images.X, images.y)
    fields = mcmc.get_extra_fields()
    parts = [*first, mcmc.get_samples()]
    found: dict[str, Any] = {
        "draws": jax.tree.map(lambda *x: jnp.concatenate(x), *parts),
        "passes": list(range(1, passes + 1)),
    }
    if adapts:
        found["acceptance"] = float(np.mean(fields["accept_prob"]))
        found["reliable"] = float(np.mean(fields["reliable"]))
        found["step_size"] = float(fields["step_size"][-1])
    return found


def cyclical(
    model: Callable, images: Any, start: Any, step: float, passes: int, batch: int
) -> dict[str, Any]:
    """CMINT: the draws at the ends of its cycles.

    A cycle goes from 1.4 times ``step`` to 0.7 times it.
    """
    size = len(images.X)
    length = max(1, passes * size // (3 * batch) // CYCLES)
    kernel = CyclicalMINT(
        model,
        cycle_length=length,
        batch_size=batch,
        temperature=temperature(size, batch),
        proposal=proposal.langevin(),
        step_size=1.4 * step,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        init_strategy=init_to_value(values=start),
    )
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=CYCLES,
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(3), images.X, images.y)
    at = [(k + 1) * length * 3 * batch / size for k in range(CYCLES)]
    return {"draws": mcmc.get_samples(), "passes": at}


def judged(logits: Callable, found: dict[str, Any], images: Any) -> dict[str, Any]:
    """Test errors and fit of draws and of their ensemble."""
    draws = found.pop("draws")
    logs = jax.jit(
        lambda draws: jax.lax.map(
            lambda draw: jax.nn.log_softmax(logits(draw, images.X_test)), draws
        )
    )(draws)
    y = np.asarray(images.y_test)
    logs = np.asarray(logs)
    single = 100 * (logs.argmax(-1) != y).mean(-1)
    members = min(MEMBERS, len(logs) // 2 + 1) if len(logs) > CYCLES else len(logs)
    together = np.exp(logs[-members:]).mean(0).argmax(-1)
    return {
        **found,
        "error_percent": single.tolist(),
        "nll": (-logs[:, np.arange(len(y)), y].mean(-1)).tolist(),
        "members": members,
        "ensemble_error_percent": float(100 * (together != y).mean()),
    }


def draw(content: dict[str, Any], path: Path) -> None:
    """Test error over passes; a dashed line for CMINT's ensemble."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    markers = "osPXD^"
    for run, colour, marker in zip(content["runs"], COLOURS, markers, strict=False):
        axis.plot(
            run["passes"],
            run["error_percent"],
            color=colour,
            marker=marker,
            ms=4,
            markevery=max(1, len(run["passes"]) // 12),
            lw=1.3,
            label=run["method"],
        )
        if run["method"] == "CMINT":
            axis.axhline(
                run["ensemble_error_percent"],
                color=colour,
                ls="--",
                label="CMINT, ensemble",
            )
    axis.set(yscale="log", xlabel="passes over the training images")
    ticks = [4, 6, 10, 20, 40, 90]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_ylabel("test error of a draw (%)")
    axis.legend(fontsize=9, ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--report", action="store_true", help="the figure only")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    path = FIGURE if options.folder == RESULTS else options.folder / FIGURE.name
    if options.report:
        draw(load("mint_network", options.folder), path)
        return
    # imported here, because the module looks for the examples
    from benchmarks.cyclical import networks

    size = networks.SIZES["mnist"]
    size = size._replace(rows=options.rows, test=options.test, widths=(options.hidden,))
    images = networks.task("mnist", size)
    shape = images.X.shape[1:]
    model = networks.make_model(images.network, shape)
    logits = networks.logits_of(images.network, shape)
    start = networks.first_values(images.network, images.X, 0)
    runs: list[dict[str, Any]] = []

    def tell(method: str, begin: float, found: dict[str, Any]) -> None:
        seconds = time.perf_counter() - begin
        runs.append({"method": method, "seconds": seconds, **found})
        shown = {k: v for k, v in runs[-1].items() if not isinstance(v, list)}
        print(shown, found["error_percent"][-1], found["nll"][-1], flush=True)
        settings = {**vars(options), "folder": None, "cycles": CYCLES}
        settings["temperature"] = temperature(len(images.X), options.batch)
        save("mint_network", {"settings": settings, "runs": runs}, options.folder)

    begin = time.perf_counter()
    found = descend(logits, images, start, options.passes, options.batch)
    tell("descent", begin, judged(logits, found, images))
    every = kernels(model, len(images.X), options.batch, start)
    for method, (kernel, adapts) in every.items():
        begin = time.perf_counter()
        found = sample(kernel, images, options.passes, adapts)
        tell(method, begin, judged(logits, found, images))
    begin = time.perf_counter()
    step = runs[-1]["step_size"]
    found = cyclical(model, images, start, step, options.passes, options.batch)
    tell("CMINT", begin, judged(logits, found, images))
    draw(load("mint_network", options.folder), path)


if __name__ == "__main__":
    main()
