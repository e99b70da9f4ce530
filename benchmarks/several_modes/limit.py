"""The limit of the search: a mode of mass 0.2 that 32 searches do not find.

python -m benchmarks.several_modes.limit

A wave with a period of 16 days, measured at nearly the same hour of 60 nights, has an
alias with a period of 1.07 days. The prior is uniform in the logarithm of the period,
and so are the starts of the searches: the basin of attraction of a period of 1.07 days
is fifteen times as narrow there as that of 16 days. The spread of the hours is such
that the alias has a mass of about 0.2.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from .problems import Draws, moments
from .record import load, machine, save
from .worker import Clock, standard_error

ROWS, NIGHTS, GAIN, PRIOR_SD = 3000, 60, 60.0, 0.5
SHORTEST, LONGEST = 0.7, 60.0  # periods, in days
MASS = 0.2  # of the alias, about


class Hidden(NamedTuple):
    """Data with a long period whose alias is near one day.

    :param frequency: of the long period, in cycles per day.
    :param seed: of the times and of the noise.
    """

    frequency: float = 1 / 16
    seed: int = 0

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Times and measurements, in which the wave has the short period.

        The noise has no part along either wave, so that the masses are those that the
        spread of the hours makes, and not those of chance.
        """
        rng = np.random.default_rng(self.seed)
        short = 1 - self.frequency
        nats = np.log(MASS / (1 - MASS) * short / self.frequency)
        spread = np.sqrt(nats / GAIN) / (2 * np.pi)
        night = rng.integers(NIGHTS, size=ROWS) - (NIGHTS - 1) // 2
        t = night + spread * rng.normal(size=ROWS)
        phases = [2 * np.pi * f * t for f in (self.frequency, short)]
        waves = np.stack([fn(p) for p in phases for fn in (np.sin, np.cos)], 1)
        noise = rng.normal(size=ROWS)
        noise -= waves @ np.linalg.lstsq(waves, noise, rcond=None)[0]
        wave = 2 * np.sqrt(GAIN / ROWS) * np.sin(phases[1] + 0.5)
        return t.astype(np.float32), (wave + noise).astype(np.float32)

    def truth(self, points: int = 60_000) -> dict[str, Any]:
        """Masses of the long period and of the alias, by quadrature over the period.

        :param points: of the grid, which is uniform in the logarithm of the period.
        """
        t, y = (x.astype(float) for x in self.data())
        edges = np.log(SHORTEST), np.log(LONGEST)
        grid = edges[0] + (np.arange(points) + 0.5) * (edges[1] - edges[0]) / points
        logs = np.concatenate(
            [log_evidence(t, y, np.exp(-part)) for part in np.array_split(grid, 600)]
        )
        weights = np.exp(logs - logs.max())
        weights /= weights.sum()
        which = self.label({"period": np.exp(grid)})
        long, alias, rest = (weights[which == k] for k in range(3))
        return {
            "masses": [float(x.sum()) for x in (long, alias, rest)],
            "log_period": [
                moments(
                    grid[which == k], weights[which == k] / weights[which == k].sum()
                )
                for k in range(2)
            ],
        }

    def label(self, draws: Draws) -> np.ndarray:
        """0 for the long period, 1 for its alias, 2 for anything else."""
        f = 1 / draws["period"]
        near = [
            np.abs(f - g) < 1 / NIGHTS for g in (self.frequency, 1 - self.frequency)
        ]
        return np.where(near[0], 0, np.where(near[1], 1, 2))


def log_evidence(t: np.ndarray, y: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Log densities of frequencies; the two coefficients are integrated out."""
    phase = 2 * np.pi * f[:, None] * t
    waves = np.stack([np.sin(phase), np.cos(phase)], 1)
    precision = waves @ waves.swapaxes(1, 2) + np.eye(2) / PRIOR_SD**2
    slope = waves @ y
    fit = 0.5 * (slope * np.linalg.solve(precision, slope[..., None])[..., 0]).sum(1)
    return fit - 0.5 * np.linalg.slogdet(precision)[1]


def model(t: Any, y: Any) -> None:
    """Sine and cosine of an unknown period."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    period = numpyro.sample("period", dist.LogUniform(SHORTEST, LONGEST))
    sine = numpyro.sample("sine", dist.Normal(0, PRIOR_SD))
    cosine = numpyro.sample("cosine", dist.Normal(0, PRIOR_SD))
    with numpyro.plate("data", len(y)) as i:
        phase = 2 * jnp.pi * t[i] / period
        wave = sine * jnp.sin(phase) + cosine * jnp.cos(phase)
        numpyro.sample("y", dist.Normal(wave, 1.0), obs=y[i])


def searched(hidden: Hidden) -> dict[str, Any]:
    """Which of the two modes the set-up finds."""
    import jax
    import jax.numpy as jnp

    from numpyro_minibatch import MinibatchMH, control_variate

    data = tuple(jnp.asarray(x) for x in hidden.data())
    begin = Clock.now()
    kernel = MinibatchMH(model, control_variate=control_variate.taylor2(modes=12))
    try:
        state = kernel.init(jax.random.key(0), 10, None, data, {})
    except ValueError as error:
        return {"refused": str(error), "found": []}
    report = kernel.pilot
    if report["num_modes"] > 1:
        locations = np.asarray(state.surrogate.expansion.modes.location, float)
    else:
        locations = np.asarray(state.surrogate.location, float)[None]
    # sites in the order of their names: cosine, period, sine
    period = kernel.postprocess_fn(data, {})
    constrained = [
        period({"cosine": z[0], "period": jnp.asarray(z[1]), "sine": z[2]})["period"]
        for z in locations
    ]
    found = hidden.label({"period": np.array(constrained, float)})
    return {
        "found": sorted({int(k) for k in found}),
        "mode_found": report["mode_found"],
        "mode_missed": report["mode_missed"],
        "seconds": Clock.now().since(begin).user,
    }


def sampled(hidden: Hidden, method: str, draws: int) -> dict[str, Any]:
    """Masses by one method, with their Monte Carlo errors."""
    import jax
    import jax.numpy as jnp
    from numpyro.infer import MCMC

    from numpyro_minibatch import (
        MinibatchMH,
        ReplicaExchange,
        control_variate,
        diagnose,
        to_inference_data,
    )

    data = tuple(jnp.asarray(x) for x in hidden.data())
    start, warmup, chains = None, 100, 4
    if method == "ladder":
        ladder = [*np.geomspace(1.0, 40.0, 9).tolist(), np.inf]
        inner = MinibatchMH(model, estimate="exact", dense_mass=True)
        kernel = ReplicaExchange(inner, temperatures=ladder, swap="exact")
        warmup = 5000
    else:
        kernel = MinibatchMH(model, control_variate=control_variate.taylor2(modes=12))
    if method == "with a start near the alias":
        u = (np.log(1 / (1 - hidden.frequency)) - np.log(SHORTEST)) / np.log(
            LONGEST / SHORTEST
        )
        at = {"cosine": 0.1, "period": np.log(u / (1 - u)), "sine": 0.1}
        start = {k: jnp.full(chains, v) for k, v in at.items()}
    begin = Clock.now()
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *data, init_params=start)
    clock = Clock.now().since(begin)
    period = np.asarray(mcmc.get_samples(group_by_chain=True)["period"], float)
    which = hidden.label({"period": period})
    diagnosis = diagnose(to_inference_data(mcmc, constant_data=False))
    return {
        "masses": [float((which == k).mean()) for k in range(3)],
        "errors": [standard_error(which == k) for k in range(3)],
        "by_chain": (which == 1).mean(1).tolist(),
        "seconds": clock,
        "draws": draws,
        "rhat": float(diagnosis.rhat) if hasattr(diagnosis, "rhat") else None,
        "swap_rates": list(getattr(diagnosis, "swap_rates", ())),
        "round_trips": getattr(diagnosis, "round_trips", None),
        "advice": list(diagnosis.advice),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="data sets to search")
    parser.add_argument("--draws", type=int, default=20_000, help="of the ladder")
    parser.add_argument("--only", nargs="+", default=["search", "runs"])
    args = parser.parse_args()
    results = load("limit")
    results["machine"] = machine()
    if "search" in args.only:
        frequencies = np.random.default_rng(5).uniform(1 / 20, 1 / 12, args.seeds)
        results["searches"] = []
        for seed, frequency in enumerate(frequencies):
            hidden = Hidden(float(frequency), seed)
            found = searched(hidden) | {"truth": hidden.truth(20_000)["masses"]}
            results["searches"].append(found)
            print(seed, round(1 / frequency, 2), found, flush=True)
        save("limit", results)
    if "runs" in args.only:
        hidden = Hidden()
        results["truth"] = hidden.truth()
        print(results["truth"], flush=True)
        results["runs"] = {}
        for method, draws in (
            ("taylor2(modes=12)", 2000),
            ("with a start near the alias", 2000),
            ("ladder", args.draws),
        ):
            results["runs"][method] = found = sampled(hidden, method, draws)
            print(method, found, flush=True)
        save("limit", results)


if __name__ == "__main__":
    main()
