"""Table 4 of the cyclical SG-MCMC paper: the number of modes found of 25.

    python -m benchmarks.cyclical.gaussians

50,000 steps per chain, 30 cycles from a step size of 0.09, SGLD with 0.05 k ** -0.55. A
mode is found if more than 100 draws are within 0.25 of it. There are ten runs of four
chains from N(0, 1). The draws of cSGLD are those of the last fifth of each cycle and,
for the paper's own collection, all draws after its exploration phase. ``within`` is the
variance about the nearest mode, whose true value is 0.03. The gradients have no noise,
as in the paper.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from benchmarks.stochastic_gradient.record import machine, save
from numpyro_minibatch import SGLD, CyclicalSGLD, Target, schedule

RESULTS = Path(__file__).parent / "results"
CENTERS = np.array([(x, y) for x in range(-4, 5, 2) for y in range(-4, 5, 2)], float)
VARIANCE, RADIUS, ENOUGH = 0.03, 0.25, 100
PAPER = {  # as printed, and with the rows corrected that were very likely swapped
    "printed": {"SGLD": 1.8, "cSGLD": 6.7, "4 x SGLD": 18.0, "4 x cSGLD": 24.4},
    "likely": {"SGLD": 1.8, "cSGLD": 18.0, "4 x SGLD": 6.7, "4 x cSGLD": 24.4},
}


def target() -> Target:
    """The mixture, as a prior; its rows carry no information."""

    def log_density(z: Any) -> Any:
        square = jnp.square(z - jnp.asarray(CENTERS, z.dtype)).sum(-1)
        return jax.nn.logsumexp(-0.5 * square / VARIANCE)

    return Target(log_density, lambda z, rows: 0.0 * rows * z[0], 4)


def kernels(total: int, cycles: int) -> dict[str, Any]:
    """The samplers, each with its number of draws."""
    common: dict[str, Any] = {"target": target(), "batch_size": 2}
    length = -(-total // cycles)
    cycle: dict[str, Any] = {"step_size": 0.09, "cycle_length": length, "explore": 0.25}
    slow = schedule.polynomial(0.05, power=0.55, offset=1)
    found = {
        "SGLD": (SGLD(step_size=slow, **common), total),
    }
    noisy = {"explore_temperature": 1.0}
    for name, settings in {
        "cSGLD": {"collect_from": 0.8},
        "cSGLD, collected as in the paper": {"collect_from": 0.25},
        "cSGLD, noise always on": {"collect_from": 0.8, **noisy},
    }.items():
        kernel = CyclicalSGLD(**common, **cycle, **settings)
        full, rest = divmod(total, length)
        start = kernel._shape.start
        found[name] = (kernel, full * kernel.samples_per_cycle + max(0, rest - start))
    return found


def modes_found(draws: np.ndarray) -> int:
    """The number of modes found by draws of shape ``(draws, 2)``."""
    distance = np.linalg.norm(draws[:, None] - CENTERS, axis=-1)
    return int(((distance < RADIUS).sum(0) > ENOUGH).sum())


def within(draws: np.ndarray) -> float:
    """The variance of a coordinate about the nearest mode."""
    away = draws[:, None] - CENTERS
    nearest = np.square(away).sum(-1).argmin(-1)
    return float(np.square(away[np.arange(len(draws)), nearest]).mean())


def balance(draws: np.ndarray) -> float:
    """Total variation distance of the fractions in the modes from 1 / 25."""
    nearest = np.square(draws[:, None] - CENTERS).sum(-1).argmin(-1)
    shares = np.bincount(nearest, minlength=25) / len(draws)
    return float(0.5 * np.abs(shares - 1 / 25).sum())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    chains = 4 * options.runs
    init = np.random.default_rng(0).normal(size=(chains, 2))
    rows = []
    clouds = {}
    for name, (kernel, number) in kernels(options.steps, options.cycles).items():
        mcmc = MCMC(
            kernel,
            num_warmup=0,
            num_samples=number,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(1), init_params=jnp.asarray(init, jnp.float32))
        draws = np.asarray(mcmc.get_samples(group_by_chain=True), np.float64)
        clouds[name] = draws[:4]
        groups = draws.reshape(options.runs, 4, -1, 2)
        single = np.array([modes_found(chain) for chain in draws])
        four = np.array([modes_found(group.reshape(-1, 2)) for group in groups])
        spread = np.array([within(group.reshape(-1, 2)) for group in groups])
        rows.append(
            {
                "sampler": name,
                "one_chain": float(single.mean()),
                "one_chain_se": float(single.std(ddof=1) / len(single) ** 0.5),
                "four_chains": float(four.mean()),
                "four_chains_se": float(four.std(ddof=1) / len(four) ** 0.5),
                "within": float(spread.mean()),
                "within_se": float(spread.std(ddof=1) / len(spread) ** 0.5),
                "total_variation": float(
                    np.mean([balance(group.reshape(-1, 2)) for group in groups])
                ),
                "draws": number,
            }
        )
        print(rows[-1], flush=True)
    content = {
        "machine": machine(),
        "steps": options.steps,
        "cycles": options.cycles,
        "runs": options.runs,
        "truth": {"within": VARIANCE, "modes": 25},
        "paper": PAPER,
        "samplers": rows,
    }
    save("gaussians", content, options.out)
    plot(clouds, options.out / "gaussians.png")


def plot(clouds: dict[str, np.ndarray], path: Path) -> None:
    """The draws of the first four chains."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ["SGLD", "cSGLD"]
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 5.4), layout="constrained")
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    for axis, name in zip(axes, names, strict=True):
        for i, chain in enumerate(clouds[name]):
            some = chain[:: max(1, len(chain) // 3000)]
            label = f"chain {i + 1}"
            axis.plot(*some.T, ".", ms=1.5, alpha=0.4, color=colours[i], label=label)
        axis.plot(*CENTERS.T, "k+", ms=6, label="modes")
        axis.set(title=f"{name}, four chains", xlabel="$z_1$", ylabel="$z_2$")
        axis.set(xlim=(-5.5, 5.5), ylim=(-5.5, 5.5))
        axis.set_aspect("equal")
    handles, labels = axes[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=5)
    for handle in legend.legend_handles[:-1]:
        handle.set(markersize=8, alpha=1)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
