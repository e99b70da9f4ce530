"""Effective draws a second with the latent variables integrated out, and with NUTS.

A logistic regression with a random intercept for each group of five rows. `MinibatchMH`
samples the marginalized model, which has seven parameters; NUTS samples the model as it
is written, with one more parameter for each group. Rates are those of draws after
warmup and compilation, for the parameter with the smallest bulk effective sample size
of the seven. NUTS's cost grows with the number of groups, that of `MinibatchMH` does
not, so the ratio at few groups is a lower bound for many.

    python benchmarks/marginal_rate.py --groups 20000 --out rate.md
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from time_to_answer import groups

from numpyro_minibatch import MinibatchMH

NAMES = "b", "sd", "a"


class Rate(NamedTuple):
    """One kernel's draws and what they cost.

    :param warmup: seconds of the warmup, with everything that precedes it.
    :param seconds: seconds of the draws.
    :param processor: processor seconds of the draws.
    :param draws: their number, in all chains.
    :param effective: the smallest effective sample size.
    :param means: posterior means.
    """

    warmup: float
    seconds: float
    processor: float
    draws: int
    effective: float
    means: dict[str, np.ndarray]


def measured(kernel: Any, data: tuple, chains: int, warmup: int, draws: int) -> Rate:
    """The rate of one kernel."""
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )

    def run(seed: int) -> tuple[dict[str, np.ndarray], float, float]:
        began, processor = time.perf_counter(), time.process_time()
        mcmc.run(jax.random.key(seed), *data)
        samples = mcmc.get_samples(group_by_chain=True)
        kept = {name: np.asarray(samples[name], float) for name in NAMES}
        return kept, time.perf_counter() - began, time.process_time() - processor

    _, first, _ = run(0)
    # the second run continues from the first, with the same programs and no warmup
    mcmc.post_warmup_state = mcmc.last_state
    run(1)  # the program without a warmup
    mcmc.post_warmup_state = mcmc.last_state
    found, seconds, processor = run(2)
    size = min(float(np.min(effective_sample_size(found[name]))) for name in NAMES)
    size = min(size, chains * draws)  # as in `diagnose`: errors of draws may cancel
    means = {name: found[name].mean((0, 1)) for name in NAMES}
    return Rate(first, seconds, processor, chains * draws, size, means)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--draws", type=int, default=5_000, help="of each chain")
    parser.add_argument("--nuts-draws", type=int, default=150, help="of one chain")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    marginal, data = groups(chosen.groups)
    ours = MinibatchMH(marginal, control_variate="taylor2")
    rates = {
        "MinibatchMH, marginalized": measured(ours, data, 4, 500, chosen.draws),
        "NUTS, all latents": measured(
            NUTS(marginal.fn), data, 1, chosen.nuts_draws, chosen.nuts_draws
        ),
    }
    lines = [
        "# Effective draws a second, with and without the latent variables",
        "",
        f"Written by `python benchmarks/marginal_rate.py --groups {chosen.groups}`:",
        f"{chosen.groups} groups of five rows, one run each, on a {platform.machine()}",
        f"processor, JAX {jax.__version__}.",
        "",
        "| kernel | draws | ESS | seconds | ESS a second | ESS a processor second "
        "| first run (s) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rate in rates.items():
        lines.append(
            f"| {name} | {rate.draws} | {rate.effective:.0f} | {rate.seconds:.1f} "
            f"| {rate.effective / rate.seconds:.3g} "
            f"| {rate.effective / rate.processor:.3g} | {rate.warmup:.0f} |"
        )
    one, other = (rate.effective / rate.seconds for rate in rates.values())
    lines += ["", f"Ratio of the effective draws a second: {one / other:.0f}.", ""]
    for name, rate in rates.items():
        values = np.concatenate([np.atleast_1d(rate.means[k]) for k in NAMES])
        lines.append(f"- means of b, sd, a by {name}: {np.round(values, 3).tolist()}")
    text = "\n".join(lines) + "\n"
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text)


if __name__ == "__main__":
    main()
