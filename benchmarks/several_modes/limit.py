"""The limit of the search: a mode of mass 0.2 that 32 searches do not find.

python -m benchmarks.several_modes.limit

Two thousand crude measurements of a number, and three precise ones that agree with each
other and not with the crude ones. The stated error of a measurement is right, or 3,000
times too small. If the three errors are too small, there is a wide mode at the mean of
the crude measurements; if they are right, there is a mode 250 times as narrow. A search
ends in the narrow mode only if it comes within about 0.01 of it. The distance between
the two modes is chosen so that the narrow mode has a mass of 0.2.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from .problems import Draws, moments
from .record import load, machine, save
from .worker import Clock, standard_error

CRUDE, PRECISE = 2000, 3  # rows
CRUDE_SD, PRECISE_SD, FACTOR = 20.0, 0.003, 3000.0
OFFSETS = np.array([-1.0, 0.0, 1.0])  # of the precise ones, in stated errors
PRIOR_SD = 10.0
MASS = 0.2  # approximate mass of the narrow mode
SETTING = "taylor2(modes=12)"
NEAR = "with a start near the narrow mode"
DRAWS = {SETTING: 2000, NEAR: 2000, "ladder": 20_000, "RENHD": 4_000}  # of each chain
# of the two ladders without a control variate
TEMPERATURES = [*np.geomspace(1.0, 40.0, 9).tolist(), np.inf]


class Hidden(NamedTuple):
    """Data with a narrow mode.

    :param wide: the mean of the crude measurements.
    :param seed: seed of the measurements.
    """

    wide: float = 1.2
    seed: int = 0

    @property
    def wide_sd(self) -> float:
        return CRUDE_SD / CRUDE**0.5

    @property
    def narrow(self) -> float:
        """The position of the precise measurements."""
        ratio = MASS / (1 - MASS) / (PRECISE_SD / PRECISE**0.5 / self.wide_sd)
        nats = PRECISE * np.log(FACTOR) - 0.5 * np.square(OFFSETS).sum() - np.log(ratio)
        return float(self.wide - self.wide_sd * np.sqrt(2 * nats))

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Stated errors and measurements, with a fixed mean."""
        rng = np.random.default_rng(self.seed)
        crude = rng.normal(size=CRUDE)
        y = [
            self.wide + CRUDE_SD * (crude - crude.mean()),
            self.narrow + PRECISE_SD * OFFSETS,
        ]
        stated = np.repeat([CRUDE_SD, PRECISE_SD], [CRUDE, PRECISE])
        return stated.astype(np.float32), np.concatenate(y).astype(np.float32)

    def truth(self, points: int = 400) -> dict[str, Any]:
        """Masses of the wide and of the narrow mode, by the trapezoidal rule.

        :param points: of the grid about each mode, which is ten of its standard
            deviations wide to each side.
        """
        stated, y = (x.astype(float) for x in self.data())
        sds = np.array([self.wide_sd, PRECISE_SD / PRECISE**0.5])
        white = np.linspace(-10, 10, points)
        grids = np.array([self.wide, self.narrow])[:, None] + sds[:, None] * white
        logs = np.array([[log_density(stated, y, at) for at in grid] for grid in grids])
        # the part of the wide mode under the narrow one counts as part of the narrow
        # one
        weights = np.exp(logs - logs.max()) * sds[:, None]
        wide = np.abs(grids[0] - self.narrow) > 10 * sds[1]
        weights[0] *= wide
        weights /= weights.sum()
        return {
            "masses": weights.sum(1).tolist(),
            "moments": [
                moments(grid, each / each.sum())
                for grid, each in zip(grids, weights, strict=True)
            ],
        }

    def label(self, draws: Draws) -> np.ndarray:
        """0 in the wide mode, 1 in the narrow one."""
        near = 10 * PRECISE_SD / PRECISE**0.5
        return (np.abs(draws["mu"] - self.narrow) < near).astype(int)


def log_density(stated: np.ndarray, y: np.ndarray, mu: float) -> float:
    """The log density in double precision, up to a constant."""
    square = np.square((y - mu) / stated)
    rows = np.logaddexp(-0.5 * square, -0.5 * square / FACTOR**2 - np.log(FACTOR))
    return float(rows.sum() - 0.5 * (mu / PRIOR_SD) ** 2)


def model(stated: Any, y: Any) -> None:
    """The model: the stated errors are right or too small."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD))
    with numpyro.plate("data", len(y)) as i:
        sds = jnp.stack([stated[i], FACTOR * stated[i]], -1)
        either = dist.Categorical(jnp.full(2, 0.5))
        rows = dist.MixtureSameFamily(either, dist.Normal(mu, sds))
        numpyro.sample("y", rows, obs=y[i])


def searched(hidden: Hidden) -> dict[str, Any]:
    """The modes, of the two, that the set-up finds."""
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
    found = hidden.label({"mu": locations[:, 0]})
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
        RENHD,
        MinibatchMH,
        ReplicaExchange,
        batch,
        control_variate,
        diagnose,
        to_inference_data,
    )

    data = tuple(jnp.asarray(x) for x in hidden.data())
    start, warmup, chains = None, 100, 4
    if method == "ladder":
        inner = MinibatchMH(model, estimate="exact")
        kernel = ReplicaExchange(inner, temperatures=TEMPERATURES, swap="exact")
        warmup = 5000
    elif method == "RENHD":
        # all rows, for three of them matter; steps of 0.4 sd of the narrow mode
        kernel = RENHD(
            model,
            temperatures=TEMPERATURES,
            swap="exact",
            batch=batch.full(),
            step_size=7e-4,
        )
        warmup = 1000
    else:
        kernel = MinibatchMH(model, control_variate=control_variate.taylor2(modes=12))
    if method == NEAR:
        start = {"mu": jnp.full(chains, hidden.narrow + 0.002)}
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
    # the driver returns before the draws are there
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    clock = Clock.now().since(begin)
    which = hidden.label({"mu": mu})
    diagnosis = diagnose(to_inference_data(mcmc, constant_data=False))
    return {
        "masses": [float((which == k).mean()) for k in range(2)],
        "errors": [standard_error(which == k) for k in range(2)],
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
    parser.add_argument("--methods", nargs="+", default=list(DRAWS), choices=DRAWS)
    parser.add_argument("--only", nargs="+", default=["search", "runs"])
    args = parser.parse_args()
    results = load("limit")
    results["machine"] = machine()
    if "search" in args.only:
        means = np.random.default_rng(5).uniform(0.5, 1.5, args.seeds)
        results["searches"] = []
        for seed, mean in enumerate(means):
            hidden = Hidden(float(mean), seed)
            found = searched(hidden) | {"truth": hidden.truth()["masses"]}
            results["searches"].append(found)
            print(seed, round(float(mean), 3), found, flush=True)
        save("limit", results)
    if "runs" in args.only:
        hidden = Hidden()
        results["truth"] = hidden.truth()
        print(results["truth"], flush=True)
        results.setdefault("runs", {})
        for method in args.methods:
            found = sampled(hidden, method, DRAWS[method])
            results["runs"][method] = found
            print(method, found, flush=True)
            save("limit", results)


if __name__ == "__main__":
    main()
