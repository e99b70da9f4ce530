"""One method on one case, in a separate process; started by the command line."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from typing import Any, NamedTuple

import numpy as np

from .problems import CASES, Draws

LINE = "several_modes "
ENOUGH = 1000  # effective draws
WARMUP, DRAWS, CHAINS = 100, 2000, 4
SEED = 7


class Clock(NamedTuple):
    """Seconds of the wall clock, and of the processors in user mode."""

    wall: float
    user: float

    @classmethod
    def now(cls) -> Clock:
        return cls(time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)[0])

    def since(self, before: Clock) -> Clock:
        return Clock(self.wall - before.wall, self.user - before.user)


def measured(name: str, modes: int, size: int, draws: int = DRAWS) -> dict[str, Any]:
    """Run one method, and return its cost and its results.

    :param name: the case.
    :param modes: the setting of the control variate; 1 for the ordinary one.
    :param size: number of rows.
    :param draws: of each chain.
    """
    import jax
    import jax.numpy as jnp
    from numpyro.infer import MCMC

    from numpyro_minibatch import (
        MinibatchMH,
        control_variate,
        diagnose,
        to_inference_data,
    )

    case = CASES[name]
    data = tuple(jnp.asarray(x) for x in case.data(size))
    jax.block_until_ready(data)
    kernel = MinibatchMH(
        case.model, control_variate=control_variate.taylor2(modes=modes)
    )
    mcmc = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=draws,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )

    def run(seed: int) -> tuple[Clock, Draws]:
        begin = Clock.now()
        mcmc.run(jax.random.key(seed), *data)
        samples = mcmc.get_samples(group_by_chain=True)
        found = {k: np.asarray(v, float) for k, v in samples.items()}
        return Clock.now().since(begin), found

    first, found = run(SEED)
    diagnosis = diagnose(to_inference_data(mcmc, constant_data=False))
    # the cost of draws after compilation
    mcmc.post_warmup_state = mcmc.last_state
    more, _ = run(SEED + 1)
    keys = ("num_modes", "mode_found", "mode_masses", "mode_left_out", "residual_sd")
    pilot = {k: mcmc.sampler.pilot.get(k) for k in keys}
    ess = least_ess(found)
    missing = max(ENOUGH / ess - 1, 0.0)
    flat = case.label({k: v.reshape(-1, *v.shape[2:]) for k, v in found.items()})
    label = flat.reshape(CHAINS, draws)
    said = diagnosis.mode_masses
    return {
        "first": first,
        "more": more,
        "to_answer": [a + missing * b for a, b in zip(first, more, strict=True)],
        "ess": ess,
        "rhat": worst_rhat(found),
        "pilot": pilot,
        "masses": [float((label == k).mean()) for k in range(case.modes)],
        "errors": [standard_error(label == k) for k in range(case.modes)],
        "said": sorted(said, reverse=True),
        "said_error": diagnosis.mode_mass_error,
        "moves": diagnosis.mode_moves,
        "acceptance": diagnosis.mode_acceptance,
        "rows_per_draw": diagnosis.rows_per_draw,
        "noise": float(np.mean(mcmc.get_extra_fields()["log_ratio_variance"]) ** 0.5),
        "known": compared(case.known, found),
        "advice": list(diagnosis.advice),
        "load": os.getloadavg()[0],
    }


def compared(known: Any, found: Draws) -> dict[str, list[float]]:
    """Means and standard deviations with their Monte Carlo errors, by quantity."""
    shapes = {k: v.shape[:2] for k, v in found.items()}
    chains, draws = next(iter(shapes.values()))
    flat = {k: v.reshape(-1, *v.shape[2:]) for k, v in found.items()}
    results = {}
    for name, values in known(flat).items():
        each = values.reshape(chains, draws)
        sd = each.std()
        squares = np.square(each - each.mean())
        results[name] = [
            float(each.mean()),
            standard_error(each),
            float(sd),
            standard_error(squares) / (2 * float(sd)),
        ]
    return results


def standard_error(values: np.ndarray) -> float:
    """The standard error of the mean of draws ``(chains, draws)``, by effective draws.

    If draws alternate, the effective number can exceed the number of draws. It is
    capped at that number, as in :func:`numpyro_minibatch.diagnose`.
    """
    from numpyro.diagnostics import effective_sample_size

    values = np.asarray(values, float)
    if not values.std() > 0:
        return 0.0
    ess = min(float(effective_sample_size(values)), values.size)
    return float(values.std() / np.sqrt(ess))


def least_ess(found: Draws) -> float:
    """The smallest effective sample size of any element of the position."""
    from numpyro.diagnostics import effective_sample_size

    with np.errstate(all="ignore"):
        return float(min(np.nanmin(effective_sample_size(x)) for x in found.values()))


def worst_rhat(found: Draws) -> float:
    from numpyro.diagnostics import split_gelman_rubin

    with np.errstate(all="ignore"):
        return float(max(np.nanmax(split_gelman_rubin(x)) for x in found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--modes", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--draws", type=int, default=DRAWS)
    options = parser.parse_args()
    found = measured(options.case, options.modes, options.rows, options.draws)
    print(LINE + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
