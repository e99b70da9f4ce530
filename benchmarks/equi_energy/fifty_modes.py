"""The experiment of the MINTEE paper: 50 modes in 50 dimensions.

    python -m benchmarks.equi_energy.fifty_modes [--small | --full | --paper]

The data are draws of a mixture of 50 normals of which one has the mean 2 and all others
0; the parameters are the 50 means, so that the posterior has 50 modes, one for each
component that may be the one at 2. Written to ``results/`` for each size: what MINTEE
visited, and how much; the same of plain Metropolis-Hastings from the same start at the
same temperature; the rows that each read.

The paper's uniform prior is improper here: a component that goes to infinity costs at
most ``N log(50 / 49)``, 2020 for 1e5 rows, which is 19.5 at the paper's highest
temperature and less than 14 at those used here. The prior is ``N(0, 5)`` for each mean,
the same for all 50 modes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer import MCMC
from scipy.stats import chi2

from benchmarks.stochastic_gradient.record import machine, save
from numpyro_minibatch import MINTEE, MinibatchMH, Target, diagnose, to_inference_data
from numpyro_minibatch import proposal as proposals

RESULTS = Path(__file__).parent / "results"
NEAR = 0.6  # of 2, for a component to be the one that is there

SIZES: dict[str, dict[str, Any]] = {
    # for a test
    "small": {
        "rows": 2_000,
        "modes": 5,
        "temperatures": [2.0, 4.0, 8.0, 16.0],
        "batch_size": [2_000, 2_000, 1_500, 1_000],
        "num_warmup": 400,
        "num_samples": 800,
        "num_steps": 2,
    },
    # a few minutes on two cores
    "default": {
        "rows": 100_000,
        "modes": 50,
        "temperatures": [30.0, 40.0, 53.0, 70.0, 94.0, 125.0, 166.0],
        "batch_size": [50_000, 35_000, 28_000, 20_000, 12_000, 7_500, 5_000],
        "num_warmup": 400,
        "num_samples": 1_600,
        "num_steps": 5,
    },
    # the same for longer, and colder
    "full": {
        "rows": 100_000,
        "modes": 50,
        "temperatures": [15.0, 22.0, 32.0, 47.0, 69.0, 101.0, 148.0],
        "batch_size": [100_000, 70_000, 50_000, 35_000, 25_000, 12_000, 7_000],
        "num_warmup": 10_000,
        "num_samples": 60_000,
        "num_steps": 5,
    },
    # the paper's temperatures and batches, for as long as shows what they do
    "paper": {
        "rows": 100_000,
        "modes": 50,
        "temperatures": [1.0, 19.41, 27.13, 37.93, 53.02, 74.06, 103.51],
        "batch_size": [100_000, 5_378, 3_841, 2_744, 1_960, 1_400, 1_000],
        "num_warmup": 200,
        "num_samples": 400,
        "num_steps": 5,
    },
}


def simulate(rows: int, modes: int, seed: int = 0) -> np.ndarray:
    """Draws of the mixture with the means ``(2, 0, ..., 0)``."""
    rng = np.random.default_rng(seed)
    is_first = rng.integers(modes, size=rows) == 0
    return (2.0 * is_first + rng.normal(size=rows)).astype(np.float32)


def mixture(x: np.ndarray, modes: int) -> Target:
    """The posterior of the means."""
    data = jnp.asarray(x)

    def log_likelihood(z: Any, rows: Any) -> Any:
        parts = -0.5 * jnp.square(data[rows][:, None] - z)
        return jax.scipy.special.logsumexp(parts, axis=1) - np.log(modes)

    return Target(lambda z: -0.02 * jnp.sum(jnp.square(z)), log_likelihood, len(x))


def mode_of(z: np.ndarray) -> np.ndarray:
    """Which component is at 2, none of the others being there; -1 if there is none."""
    near = np.abs(z - 2.0) < NEAR
    return np.where(near.sum(-1) == 1, near.argmax(-1), -1)


def shares(labels: np.ndarray, modes: int) -> dict[str, Any]:
    """How evenly the draws of several chains lie on the modes.

    :param labels: shape ``(chains, draws)``.
    """
    inside = labels >= 0
    counts = np.bincount(labels[inside], minlength=modes)
    expected = 1.0 / modes
    share = counts / max(counts.sum(), 1)
    # the effective size of the sample, from the indicators of all modes together
    each = [az.ess((labels == k).astype(float)) for k in range(modes) if counts[k]]
    ess = float(np.median(each)) * inside.mean() if each else 0.0
    statistic = float(ess * (np.square(share - expected) / expected).sum())
    changes = [(np.diff(row[row >= 0]) != 0).sum() for row in labels]
    return {
        "modes_visited": int((counts > 0).sum()),
        "share_in_a_mode": float(inside.mean()),
        "changes_of_mode": int(np.sum(changes)),
        "effective_sample_size": ess,
        "chi_square": statistic,
        "degrees_of_freedom": modes - 1,
        "p_value": float(chi2.sf(statistic, modes - 1)),
        "smallest_and_largest_share": [float(share.min()), float(share.max())],
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
    for name in ("small", "full", "paper"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    name = next((n for n in ("small", "full", "paper") if vars(given)[n]), "default")
    size = SIZES[name]
    target = mixture(simulate(size["rows"], size["modes"]), size["modes"])
    kernel = MINTEE(
        target=target,
        temperatures=size["temperatures"],
        batch_size=size["batch_size"],
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
    plain = MinibatchMH(
        target=target,
        temperature=size["temperatures"][0],
        batch_size=size["batch_size"][0],
        proposal=proposals.langevin(),
        step_size=0.03,
        adapt_mass_matrix=False,
        num_steps=size["num_steps"],
    )
    if name != "paper":
        idata, seconds = run(plain, size, given.chains, given.seed)
        content["plain"] = summary(idata, seconds, size["modes"])
    save(f"fifty_modes_{name}", content, RESULTS)
    return content


if __name__ == "__main__":
    result = main()
    for part in ("mintee", "plain"):
        for key, value in result.get(part, {}).items():
            print(f"{part:8} {key:40} {value}")
