"""AMAGOLD's two densities in the plane: error by step size, and by iteration.

    python -m benchmarks.papers.amagold_plane step_sizes     # figure 2
    python -m benchmarks.papers.amagold_plane iterations     # figure 3

The densities are the paper's (appendix G.2.1): a banana, ``z2 ~ N(0, 4)`` and
``z1 ~ N(z2 ** 2 / 4, 1)``, and a cross, two centred normal distributions of equal
weight with variances 2 and covariances 1.8 and -1.8. The noise of the gradients,
``N(0, I)``, is the paper's too. It comes from the rows of a data plate, which have
linear terms that sum to zero, so no kernel is treated specially.

The error is the symmetric Kullback-Leibler divergence over 12 x 12 cells of equal
probability. The sides of the cells are quantiles of ``z2`` and of ``z1`` given ``z2``
(for the cross, the other way round), which are known in closed form; the paper does not
say how it computes the divergence. Independent draws would have 143 divided by their
number.

Ruqi Zhang, A. Feder Cooper, Christopher De Sa (2020), AMAGOLD: amortized Metropolis
adjustment for efficient stochastic gradient MCMC, figures 2 and 3.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.stats import norm

from benchmarks.stochastic_gradient.grid import Dial, averages
from numpyro_minibatch import AMAGOLD, SGHMC, Target, batch

from .record import COLOURS, DOCS, RESULTS, load, save

SIDE = 12
CELLS = SIDE**2
SIZE, WIDTH = 40, 8  # rows, and rows of a batch
FRICTION, NUM_STEPS = 0.5, 10  # twice the paper's beta of 0.25, its T
STEP_SIZES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5)
STEP_SIZE = 0.15  # for figure 3
FLOOR = 0.5  # pseudo-counts of each cell, so that no fraction is 0
FIGURES = {
    "amagold_plane_step_sizes": DOCS / "_static" / "amagold_plane.png",
    "amagold_plane_iterations": DOCS / "_static" / "amagold_convergence.png",
}


def log_banana(z: Array) -> Array:
    """Density 1, up to a constant."""
    return -0.5 * (z[0] - z[1] ** 2 / 4) ** 2 - z[1] ** 2 / 8


def log_cross(z: Array) -> Array:
    """Density 2, up to a constant: both covariances have determinant 0.76."""
    square, twice = 2 * (z[0] ** 2 + z[1] ** 2), 3.6 * z[0] * z[1]
    return jnp.logaddexp(-(square - twice) / 1.52, -(square + twice) / 1.52)


def uniform_banana(z: Array) -> Array:
    """Two independent uniform numbers, where ``z`` has density 1."""
    return jnp.stack([norm.cdf(z[0] - z[1] ** 2 / 4), norm.cdf(z[1] / 2)])


def uniform_cross(z: Array) -> Array:
    """The same for density 2, where ``z2`` given ``z1`` has two normal parts."""
    sd = math.sqrt(2 - 1.8**2 / 2)
    parts = norm.cdf((z[1] - 0.9 * z[0]) / sd), norm.cdf((z[1] + 0.9 * z[0]) / sd)
    return jnp.stack([norm.cdf(z[0] / math.sqrt(2)), 0.5 * (parts[0] + parts[1])])


def draw_banana(rng: np.random.Generator, number: int) -> np.ndarray:
    """Independent draws of density 1, shape ``(number, 2)``."""
    z2 = 2 * rng.normal(size=number)
    return np.column_stack([z2**2 / 4 + rng.normal(size=number), z2])


def draw_cross(rng: np.random.Generator, number: int) -> np.ndarray:
    """Independent draws of density 2, shape ``(number, 2)``."""
    z1 = math.sqrt(2) * rng.normal(size=number)
    sign = np.where(rng.random(number) < 0.5, 0.9, -0.9)
    noise = math.sqrt(2 - 1.8**2 / 2) * rng.normal(size=number)
    return np.column_stack([z1, sign * z1 + noise])


DENSITIES: dict[str, tuple[Callable, Callable, Callable]] = {
    "banana": (log_banana, uniform_banana, draw_banana),
    "cross": (log_cross, uniform_cross, draw_cross),
}


def cell(uniform: Callable[[Array], Array], z: Array) -> Array:
    """The number of the cell that ``z`` is in; ``CELLS`` if it is not finite."""
    of_side = jnp.clip((uniform(z) * SIDE).astype(jnp.int32), 0, SIDE - 1)
    number = of_side[0] * SIDE + of_side[1]
    return jnp.where(jnp.isfinite(z).all(), number, CELLS)


def target(log_density: Callable[[Array], Array]) -> Target:
    """Rows whose batches of ``WIDTH`` have gradients with noise ``N(0, I)``."""
    slopes = np.random.default_rng(0).normal(size=(SIZE, 2))
    slopes -= slopes.mean(0)
    slopes = slopes @ np.linalg.inv(np.linalg.cholesky(np.cov(slopes.T))).T
    slopes *= math.sqrt(WIDTH / (1 - WIDTH / SIZE)) / SIZE
    terms = jnp.asarray(slopes, jnp.float32)

    def log_likelihood(z: Array, indices: Array) -> Array:
        return terms[indices] @ z + log_density(z) / SIZE

    return Target(lambda z: jnp.zeros(()), log_likelihood, SIZE)


def methods(log_density: Callable[[Array], Array]) -> dict[str, Callable[[Dial], Any]]:
    """The kernels by schedule; all but SGHMC draw new momenta, as in [1]."""
    posterior = target(log_density)
    fixed: dict[str, Any] = {"target": posterior, "num_steps": NUM_STEPS}
    fixed |= {"step_size": 0.1, "adapt_step_size": False, "adapt_mass_matrix": False}

    def amagold(friction: float, **rows: Any) -> Callable[[Dial], Any]:
        return lambda dial: AMAGOLD(**fixed, friction=friction, **rows)

    def sghmc(dial: Dial) -> Any:
        return SGHMC(
            target=posterior,
            batch_size=WIDTH,
            step_size=dial,
            friction=FRICTION,
            num_steps=NUM_STEPS,
            integrator="euler",
        )

    return {
        "AMAGOLD": amagold(FRICTION, batch_size=WIDTH),
        "SGHMC": sghmc,
        "L2MC": amagold(FRICTION, batch=batch.full()),
        "HMC": amagold(0.0, batch=batch.full()),
    }


def symmetric_kl(counts: np.ndarray) -> np.ndarray:
    """Divergence between fractions in the cells and equal ones; cells are last."""
    smooth = counts + FLOOR
    found = smooth / smooth.sum(-1, keepdims=True)
    return ((found - 1 / CELLS) * np.log(found * CELLS)).sum(-1)


def jackknife(counts: np.ndarray) -> float:
    """Standard error of the divergence of all chains (the first axis) pooled."""
    alone = symmetric_kl(counts.sum(0) - counts)
    return float(alone.std() * math.sqrt(len(counts) - 1))


def observer(uniform: Callable[[Array], Array]) -> Callable[[Any], dict[str, Array]]:
    """The quantities averaged over draws: their cells, and acceptances."""

    def observe(state: Any) -> dict[str, Array]:
        # outside of all cells: a row of zeros
        cells = jax.nn.one_hot(cell(uniform, state.z), CELLS)
        accepted = getattr(state, "accept_prob", jnp.ones(()))
        lost = ~jnp.isfinite(state.z).all()
        return {"cells": cells, "accepted": accepted, "lost": lost * 1.0}

    return observe


def by_step_size(draws: int, chains: int, sizes: list[float]) -> list[dict[str, Any]]:
    """Figure 2: bias of chains that start in the target."""
    runs = []
    blocks, burn = 10, 2
    length = max(1, draws // (chains * blocks))
    for density, (log_density, uniform, sample) in DENSITIES.items():
        starts = sample(np.random.default_rng(1), chains)
        for method, make in methods(log_density).items():
            begin = time.perf_counter()
            found = averages(
                make,
                sizes,
                jnp.asarray(starts, jnp.float32),
                observer(uniform),
                blocks=blocks + burn,
                length=length,
            )
            shares = {name: x[:, :, burn:].mean(2) for name, x in found.items()}
            for i, step_size in enumerate(sizes):
                counts = shares["cells"][i] * length * blocks
                runs.append(
                    {
                        "density": density,
                        "method": method,
                        "step_size": step_size,
                        "draws": length * blocks * chains,
                        "symmetric_kl": float(symmetric_kl(counts.sum(0))),
                        "standard_error": jackknife(counts),
                        "acceptance": float(shares["accepted"][i].mean()),
                        "lost": float(shares["lost"][i].mean()),
                    }
                )
            told = [f"{run['symmetric_kl']:.5f}" for run in runs[-len(sizes) :]]
            seconds = time.perf_counter() - begin
            print(
                f"{density}, {method}: {', '.join(told)}; {seconds:.0f} s", flush=True
            )
    return runs


def by_iteration(iterations: int, chains: int, crowd: int) -> list[dict[str, Any]]:
    """Figure 3: convergence of chains that start at 0, on the banana.

    For ``chains`` long chains, the divergence of the draws that each has made so far;
    for many short chains, that of their positions at one iteration.
    """
    runs = []
    log_density, uniform, _ = DENSITIES["banana"]
    short = max(4, min(100, iterations))
    for method, make in methods(log_density).items():
        if method == "HMC":
            continue
        begin = time.perf_counter()
        kernel = make(Dial(STEP_SIZE))

        def one(key: Array, length: int, kernel: Any = kernel) -> tuple[Array, Array]:
            state = kernel.init(key, 0, jnp.zeros(2))
            if hasattr(state, "adapt_state"):
                adapted = state.adapt_state._replace(step_size=jnp.float32(STEP_SIZE))
                state = state._replace(adapt_state=adapted)

            def draw(state: Any, _: None) -> tuple[Any, tuple[Array, Array]]:
                state = kernel.sample(state, (), {})
                accepted = getattr(state, "accept_prob", jnp.ones(()))
                return state, (cell(uniform, state.z).astype(jnp.uint8), accepted)

            return jax.lax.scan(draw, state, None, length=length)[1]

        def run(number: int, length: int, seed: int) -> tuple[np.ndarray, float]:
            keys = jax.random.split(jax.random.key(seed), number)
            cells, accepted = jax.jit(jax.vmap(lambda key: one(key, length)))(keys)  # noqa: B023
            return np.asarray(cells), float(accepted.mean())

        cells, acceptance = run(chains, iterations, 0)
        points = np.unique(np.geomspace(10, iterations, 25).astype(int))
        counts = np.zeros((chains, CELLS + 1))
        curve, last = [], 0
        for point in points:
            for counted, path in zip(counts, cells[:, last:point], strict=True):
                counted += np.bincount(path, minlength=CELLS + 1)
            last = point
            each = symmetric_kl(counts[:, :CELLS])
            error = each.std(ddof=1) / math.sqrt(chains)
            curve.append([int(point), float(each.mean()), float(error)])
        together, _ = run(crowd, short, 1)
        there = [np.bincount(t, minlength=CELLS + 1)[:CELLS] for t in together.T]
        runs.append(
            {
                "method": method,
                "acceptance": acceptance,
                "so_far": curve,
                "at_iteration": symmetric_kl(np.array(there)).tolist(),
            }
        )
        seconds = time.perf_counter() - begin
        print(f"{method}: {curve[-1]}, {seconds:.0f} s", flush=True)
    return runs


def slowdown(runs: list[dict[str, Any]]) -> list[float]:
    """Iterations of AMAGOLD per iteration of L2MC, at equal divergences."""
    curves = {run["method"]: np.array(run["so_far"]).T for run in runs}
    (n, error, _), (n_full, error_full, _) = curves["AMAGOLD"], curves["L2MC"]
    n, error = n[n >= 5 * CELLS], error[n >= 5 * CELLS]
    inside = error >= error_full[-1]
    falling = slice(int(error_full.argmax()), None)
    # np.interp needs increasing axes
    at = np.interp(
        -np.log(error[inside]),
        -np.log(error_full[falling]),
        np.log(n_full[falling]),
    )
    return (n[inside] / np.exp(at)).tolist()


STYLES = dict(zip(("AMAGOLD", "SGHMC", "L2MC", "HMC"), "osPX", strict=True))
NAMES = {"banana": "banana (Dist1)", "cross": "cross (Dist2)"}


def draw_step_sizes(content: dict[str, Any], path: Path) -> None:
    """The densities, and below them the divergences against the step size."""
    from matplotlib import pyplot

    number = len(DENSITIES)
    figure, grid = pyplot.subplots(
        2, number, figsize=(4.5 * number, 7.2), squeeze=False, layout="constrained"
    )
    spans = {"banana": ((-4, 9), (-6, 6)), "cross": ((-5, 5), (-5, 5))}
    for (top, bottom), name in zip(grid.T, DENSITIES, strict=True):
        x, y = (np.linspace(*ends, 200) for ends in spans[name])
        points = jnp.stack(jnp.meshgrid(x, y), -1).reshape(-1, 2)
        density = np.exp(np.asarray(jax.vmap(DENSITIES[name][0])(points)))
        top.contourf(x, y, density.reshape(200, 200), 12, cmap="cividis")
        top.set(title=NAMES[name], xlabel="$z_1$", ylabel="$z_2$")
        mine = [run for run in content["runs"] if run["density"] == name]
        for (method, marker), colour in zip(STYLES.items(), COLOURS, strict=False):
            runs = [r for r in mine if r["method"] == method and r["lost"] < 1e-3]
            bottom.errorbar(
                [run["step_size"] for run in runs],
                [run["symmetric_kl"] for run in runs],
                [run["standard_error"] for run in runs],
                color=colour,
                marker=marker,
                markersize=5,
                label=method,
            )
        floor = (CELLS - 1) / mine[0]["draws"]
        bottom.axhline(floor, color="gray", ls=":", label="independent draws")
        bottom.set(xscale="log", yscale="log", xlabel="step size")
        bottom.set_ylabel("symmetric KL divergence (nats)")
        ticks = sorted({run["step_size"] for run in mine})
        bottom.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
        bottom.minorticks_off()
    grid[1, 0].legend(fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_iterations(content: dict[str, Any], path: Path) -> None:
    """All draws of a chain so far, and positions of many chains."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.8), layout="constrained"
    )
    lines = dict(zip(STYLES, zip(COLOURS, ("-", "-.", "--", ":"), strict=False)))  # noqa: B905
    for run in content["runs"]:
        colour, line = lines[run["method"]]
        # with few draws per cell the pseudo-counts dominate
        enough = [point for point in run["so_far"] if point[0] >= 5 * CELLS]
        n, mean, error = np.array(enough or run["so_far"]).T
        left.errorbar(n, mean, error, color=colour, ls=line, label=run["method"])
        at = run["at_iteration"]
        right.plot(np.arange(1, len(at) + 1), at, color=colour, ls=line)
    floor = (CELLS - 1) / content["settings"]["crowd"]
    right.axhline(floor, color="gray", ls=":", label="independent chains of the target")
    left.set(xscale="log", yscale="log", xlabel="iterations of a chain")
    left.set_title("all draws so far")
    left.set_ylabel("symmetric KL divergence (nats)")
    right.set(yscale="log", xlabel="iteration", title="the draws of one iteration")
    left.legend(fontsize=9)
    right.legend(fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=["step_sizes", "iterations"])
    parser.add_argument("--draws", type=int, default=400_000, help="per step size")
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--step-sizes", type=float, nargs="+", default=STEP_SIZES)
    parser.add_argument("--iterations", type=int, default=30_000, help="per chain")
    parser.add_argument("--crowd", type=int, default=20_000, help="short chains")
    parser.add_argument("--report", action="store_true", help="the figure only")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    name = f"amagold_plane_{options.figure}"
    if not options.report:
        settings = {"chains": options.chains, "num_steps": NUM_STEPS}
        settings |= {"friction": FRICTION, "cells": CELLS}
        if options.figure == "step_sizes":
            arguments = options.draws, options.chains, list(options.step_sizes)
            runs = by_step_size(*arguments)
        else:
            settings |= {"step_size": STEP_SIZE, "crowd": options.crowd}
            runs = by_iteration(options.iterations, options.chains, options.crowd)
        save(name, {"settings": settings, "runs": runs}, options.folder)
    if options.figure == "iterations":
        factors = slowdown(load(name, options.folder)["runs"])
        told = ", ".join(f"{factor:.2f}" for factor in factors)
        print(f"iterations of AMAGOLD for one of L2MC's: {told}")
    draw = draw_step_sizes if options.figure == "step_sizes" else draw_iterations
    figures = FIGURES[name].parent if options.folder == RESULTS else options.folder
    draw(load(name, options.folder), figures / FIGURES[name].name)


if __name__ == "__main__":
    main()
