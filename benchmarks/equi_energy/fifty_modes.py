"""The experiment of the MINTEE paper: 50 modes in 50 dimensions.

    python -m benchmarks.equi_energy.fifty_modes [--small | --rings | --full | --paper]

The data are draws from a mixture of 50 normals, of which one has mean 2 and all others
mean 0. The parameters are the 50 means, so the posterior has 50 modes, one for each
component that may be the one at 2. For each size, the modes visited by MINTEE and their
frequencies are written to ``results/``, with those of plain Metropolis-Hastings from
the same start at the same temperature, and the rows that each read.

The paper's uniform prior is improper here: a component that goes to infinity costs at
most ``N log(50 / 49)``, which for 1e5 rows is 2020, or 19.5 at the paper's highest
temperature and 100 at the highest one used here. The prior is ``N(0, 5)`` for each
mean, the same for all 50 modes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer import MCMC
from scipy.stats import f

from benchmarks.stochastic_gradient.record import machine, save
from numpyro_minibatch import (
    MINTEE,
    MinibatchMH,
    Target,
    batch,
    diagnose,
    to_inference_data,
)
from numpyro_minibatch import proposal as proposals

RESULTS = Path(__file__).parent / "results"
NEAR = 0.6  # distance from 2 within which a component is at 2

SIZES: dict[str, dict[str, Any]] = {
    # for tests
    "small": {
        "rows": 2_000,
        "modes": 5,
        "rounded_to": None,
        "temperatures": [2.0, 4.0, 8.0, 16.0],
        "batch_size": [2_000, 2_000, 1_700, 1_400],
        "jump_prob": 0.3,
        "num_warmup": 400,
        "num_samples": 800,
        "num_steps": 2,
    },
    # the paper's size at temperature 1, with counts of rounded data; a ring holds
    # states of all energies
    "default": {
        "rows": 100_000,
        "modes": 50,
        "rounded_to": 0.05,
        "temperatures": [round(1.65**k, 3) for k in range(7)],
        "ring_width": 0.01,
        "batch_size": None,
        "jump_prob": 0.5,
        "num_warmup": 10_000,
        "num_samples": 70_000,
        "num_steps": 5,
    },
    # the same with rings as wide as the paper's
    "rings": {
        "rows": 100_000,
        "modes": 50,
        "rounded_to": 0.05,
        "temperatures": [round(1.65**k, 3) for k in range(7)],
        "ring_width": 10.0,
        "batch_size": None,
        "jump_prob": 0.5,
        "num_warmup": 2_000,
        "num_samples": 8_000,
        "num_steps": 5,
    },
    # the same row by row, which takes days
    "full": {
        "rows": 100_000,
        "modes": 50,
        "rounded_to": None,
        "temperatures": [1.0, 1.73, 3.0, 5.2, 9.0, 15.6, 27.0],
        "ring_width": 0.01,
        "batch_size": [100_000] * 6 + [60_000],
        "jump_prob": 0.3,
        "num_warmup": 10_000,
        "num_samples": 60_000,
        "num_steps": 5,
    },
    # the paper's temperatures and batches, long enough to show their behaviour
    "paper": {
        "rows": 100_000,
        "modes": 50,
        "rounded_to": None,
        "temperatures": [1.0, 19.41, 27.13, 37.93, 53.02, 74.06, 103.51],
        "batch_size": [100_000, 5_378, 3_841, 2_744, 1_960, 1_400, 1_000],
        "jump_prob": 0.1,
        "num_warmup": 140,
        "num_samples": 200,
        "num_steps": 2,
    },
}

NAMES = [name for name in SIZES if name != "default"]


def simulate(rows: int, modes: int, seed: int = 0) -> np.ndarray:
    """Draws from the mixture with means ``(2, 0, ..., 0)``."""
    rng = np.random.default_rng(seed)
    is_first = rng.integers(modes, size=rows) == 0
    return (2.0 * is_first + rng.normal(size=rows)).astype(np.float32)


def mixture(x: np.ndarray, modes: int, rounded_to: float | None = None) -> Target:
    """The posterior of the means.

    :param rounded_to: round the data, and use one row for each distinct value, with its
        count: the same posterior except for the rounding.
    """
    if rounded_to is None:
        values, counts = x, np.ones_like(x)
    else:
        values, counts = np.unique(np.round(x / rounded_to), return_counts=True)
        values = values * rounded_to
    data = jnp.asarray(values, jnp.float32)
    weights = jnp.asarray(counts, jnp.float32)

    def log_likelihood(z: Any, rows: Any) -> Any:
        parts = -0.5 * jnp.square(data[rows][:, None] - z)
        log_p = jax.scipy.special.logsumexp(parts, axis=1) - np.log(modes)
        return weights[rows] * log_p

    return Target(lambda z: -0.02 * jnp.sum(jnp.square(z)), log_likelihood, len(data))


def mode_of(z: np.ndarray) -> np.ndarray:
    """The only component at 2; -1 if there is none or more than one."""
    near = np.abs(z - 2.0) < NEAR
    return np.where(near.sum(-1) == 1, near.argmax(-1), -1)


def shares(labels: np.ndarray, modes: int) -> dict[str, Any]:
    """How evenly the draws of several chains are distributed over the modes.

    The effective number of draws comes from the differences between chains: the rings
    of a chain remember visited modes for longer than the autocorrelation of its draws
    shows. Chi-square divided by its degrees of freedom then has an F distribution.

    :param labels: shape ``(chains, draws)``.
    """
    chains = len(labels)
    each = np.stack([(labels == k).sum(1) for k in range(modes)], -1)
    each = each / np.maximum(each.sum(1, keepdims=True), 1)  # chains, modes
    share, expected = each.mean(0), 1.0 / modes
    scatter = np.square(each - share).sum() / max(chains - 1, 1)
    ess = chains * (1.0 - expected) / scatter if scatter > 0 else np.nan
    free = modes - 1
    statistic = float(ess * np.square(share - expected).sum() / expected)
    changes = [(np.diff(row[row >= 0]) != 0).sum() for row in labels]
    return {
        "modes_visited": int((share > 0).sum()),
        "modes_visited_by_each_chain": (each > 0).sum(1).tolist(),
        "share_in_a_mode": float((labels >= 0).mean()),
        "changes_of_mode": int(np.sum(changes)),
        "effective_sample_size": float(ess),
        "chi_square": statistic,
        "degrees_of_freedom": free,
        "p_value": float(f.sf(statistic / free, free, free * (chains - 1))),
        "smallest_and_largest_share": [float(share.min()), float(share.max())],
    }


def rounding(
    draws: np.ndarray, data: np.ndarray, target: Target, modes: int, temperature: float
) -> dict[str, float]:
    """The variation of the weights that would correct draws for the rounding.

    :param draws: draws from the posterior of the rounded data, ``(draws, D)``.
    :param data: the data before rounding, all rows of which are evaluated here.
    """
    every = mixture(data, modes)

    def total(of: Target) -> np.ndarray:
        size = of.plates["data"]
        rows = np.array_split(np.arange(size), -(-size // 5000))
        parts = jax.jit(lambda z, i: of.log_likelihood(z, i))
        sums = [
            [np.asarray(parts(z, i), np.float64).sum() for i in rows]
            for z in jnp.asarray(draws)
        ]
        return np.sum(sums, axis=1)

    log_weights = (total(every) - total(target)) / temperature
    weights = np.exp(log_weights - log_weights.max())
    return {
        "draws": len(draws),
        "sd_of_log_weights": float(log_weights.std(ddof=1)),
        "effective_share": float(weights.sum() ** 2 / np.square(weights).sum())
        / len(draws),
    }


def run(kernel: Any, size: dict[str, Any], chains: int, seed: int) -> Any:
    mcmc = MCMC(
        kernel,
        num_warmup=size["num_warmup"],
        num_samples=size["num_samples"],
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = jnp.zeros((chains, size["modes"]))
    began = time.time()
    mcmc.run(random.key(seed), init_params=start if chains > 1 else start[0])
    idata = to_inference_data(mcmc)
    return idata, time.time() - began


def summary(idata: Any, seconds: float, modes: int) -> dict[str, Any]:
    z = idata["posterior"]["z"].values
    rows = idata["sample_stats"]["num_rows"].values.sum(dtype=float)
    return {
        **shares(mode_of(z), modes),
        "share_of_the_first_coordinate_near_2": float(
            (np.abs(z[..., 0] - 2.0) < NEAR).mean()
        ),
        "mean_share_of_a_coordinate_near_2": float((np.abs(z - 2.0) < NEAR).mean()),
        "rows_read": rows,
        "seconds_with_compilation": round(seconds, 1),
        "acceptance_rate": float(idata["sample_stats"]["acceptance_rate"].mean()),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in NAMES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--ring-width", type=float, help="instead of that of the size")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    name = next((n for n in NAMES if vars(given)[n]), "default")
    size = dict(SIZES[name])
    if given.ring_width is not None:
        size["ring_width"] = given.ring_width
        name = f"{name}_width_{given.ring_width:g}"
    data = simulate(size["rows"], size["modes"])
    target = mixture(data, size["modes"], size["rounded_to"])
    everything = size["batch_size"] is None
    kernel = MINTEE(
        target=target,
        temperatures=size["temperatures"],
        batch_size=size["batch_size"],
        batch=batch.full() if everything else None,
        ring_width=size.get("ring_width"),
        jump_prob=size["jump_prob"],
        num_steps=size["num_steps"],
        proposal=proposals.langevin(),
        step_size=0.03,
    )
    idata, seconds = run(kernel, size, given.chains, given.seed)
    found = diagnose(idata)
    content = {
        "command": f"fifty_modes {name}",
        "size": size,
        "chains": given.chains,
        "seed": given.seed,
        "machine": machine(),
        "rows_of_the_target": target.sizes,
        "mintee": {
            **summary(idata, seconds, size["modes"]),
            "energies_above_the_reference": (
                np.array(kernel.pilot["energies"]) - kernel.pilot["reference_energy"]
            ).tolist(),
            "jump_rates": found.jump_rates,
            "jump_tries": found.jump_tries,
            "energy_noise": found.energy_noise,
            "ring_occupancy": found.ring_occupancy,
            "unreliable": found.unreliable,
            "advice": found.advice,
        },
    }
    if size["rounded_to"] is not None:
        z = idata["posterior"]["z"].values.reshape(-1, size["modes"])
        some = z[np.linspace(0, len(z) - 1, 100).astype(int)]
        content["rounding"] = rounding(
            some, data, target, size["modes"], size["temperatures"][0]
        )
    save(f"fifty_modes_{name}", content, RESULTS)  # before what follows
    plain = MinibatchMH(
        target=target,
        temperature=size["temperatures"][0],
        batch_size=None if everything else size["batch_size"][0],
        batch=batch.full() if everything else None,
        proposal=proposals.langevin(),
        step_size=0.03,
        adapt_mass_matrix=False,
        num_steps=size["num_steps"],
    )
    if name in SIZES and name != "paper":
        idata, seconds = run(plain, size, given.chains, given.seed)
        content["plain"] = summary(idata, seconds, size["modes"])
    save(f"fifty_modes_{name}", content, RESULTS)
    return content


if __name__ == "__main__":
    result = main()
    for part in ("mintee", "plain"):
        for key, value in result.get(part, {}).items():
            print(f"{part:8} {key:40} {value}")
