"""Table 5 of the cyclical SG-MCMC paper: effective sample sizes of three regressions.

    NUMPYRO_MINIBATCH_DATA=... python -m benchmarks.cyclical.uci

Logistic regressions on Australian, German and Heart: 5000 draws after 1000 steps, as
many gradients for each sampler. The cyclical ones have their 1000 steps as exploration,
a hundred in each of ten cycles, which gives the 5000 draws of the table.

The paper states neither prior, batches nor step sizes. Here covariates are
standardised, the prior is N(0, 10), batches have 32 rows; step sizes are tried on a
grid, that of a cycle's beginning being twice (for SGHMC's square) that of the sampler
beside it, so that their means are equal. An effective sample size alone rewards long
steps, whatever they do to the draws: each comes with the relative error of the
posterior's standard deviations, the median of all coefficients. ``best`` has the
largest one at which that is at most a tenth, and the largest of all. References are
four chains of NUTS.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from benchmarks.stochastic_gradient.record import machine, save
from numpyro_minibatch import SGHMC, SGLD, CyclicalSGHMC, CyclicalSGLD

RESULTS = Path(__file__).parent / "results"
PAPER = {
    "SGLD": {"australian": 1676, "german": 492, "heart": 2199},
    "cSGLD": {"australian": 2138, "german": 978, "heart": 2541},
    "SGHMC": {"australian": 1317, "german": 2007, "heart": 5000},
    "cSGHMC": {"australian": 4707, "german": 2436, "heart": 5000},
}
BATCH, MOMENTUM, PRIOR = 32, 0.9, 10.0**0.5
GRID = (0.0005, 0.002, 0.01, 0.05)
BEST_AT = 0.1


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Standardised covariates with a constant, and labels."""
    folder = Path(os.environ.get("NUMPYRO_MINIBATCH_DATA", ""))
    path = folder / "uci_classification" / "uci_classification.npz"
    if not path.exists():
        raise SystemExit(
            "NUMPYRO_MINIBATCH_DATA must name a folder with uci_classification/; "
            "the sets are Statlog's, of the UCI Machine Learning Repository."
        )
    with np.load(path) as data:
        X, y = data[f"{name}_X"].astype(float), data[f"{name}_y"]
    X = (X - X.mean(0)) / X.std(0)
    X = np.column_stack([np.ones(len(X)), X])
    return X.astype(np.float32), (y == y.max()).astype(np.float32)


def model(X: Any, y: Any) -> None:
    """A logistic regression."""
    shape = dist.Normal(0, PRIOR).expand([X.shape[1]]).to_event(1)
    beta = numpyro.sample("beta", shape)
    with numpyro.plate("data", len(y)) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=X[rows] @ beta), obs=y[rows])


def reference(X: np.ndarray, y: np.ndarray, draws: int) -> np.ndarray:
    """Draws of the posterior, ``(draws, D)``."""
    mcmc = MCMC(
        NUTS(model),
        num_warmup=500,
        num_samples=draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(7), X, y)
    return np.asarray(mcmc.get_samples()["beta"], np.float64)


def samplers(alpha: float, draws: int, burn_in: int) -> dict[str, Any]:
    """With ``alpha`` what multiplies the gradient; ``None`` where burn-in is warmup."""
    total, cycles = draws + burn_in, 10
    share = burn_in / total
    cycle: dict[str, Any] = {
        "cycle_length": total // cycles,
        "explore": share,
        "collect_from": share,
        "num_steps": 1,
        "batch_size": BATCH,
    }
    eta: dict[str, Any] = {"b": 0.5 * (1 - MOMENTUM)}
    plain: dict[str, Any] = {"batch_size": BATCH, "num_steps": 1}
    return {
        "SGLD": SGLD(model, step_size=alpha, **plain),
        "cSGLD": CyclicalSGLD(model, step_size=2 * alpha, **cycle),
        "SGHMC": SGHMC(model, h=alpha * (1 - MOMENTUM), **eta, **plain),
        "cSGHMC": CyclicalSGHMC(model, h=2 * alpha * (1 - MOMENTUM), **eta, **cycle),
    }


def measure(
    kernel: Any, data: Any, start: np.ndarray, truth: np.ndarray, options: Any
) -> dict[str, float]:
    """Effective sample size and error, means over the chains."""
    cyclical = hasattr(kernel, "samples_per_cycle")
    mcmc = MCMC(
        kernel,
        num_warmup=0 if cyclical else options.burn_in,
        num_samples=options.draws,
        num_chains=options.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    init = {"beta": jnp.asarray(start, jnp.float32)}
    mcmc.run(jax.random.key(3), *data, init_params=init)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], np.float64)
    ess, error = [], []
    for chain in draws:
        each = [float(az.ess(column[None])) for column in chain.T]
        ess.append(np.median(each))
        error.append(np.median(np.abs(chain.std(0) / truth.std(0) - 1)))
    shift = np.abs(draws.mean((0, 1)) - truth.mean(0)) / truth.std(0)
    return {
        "ess": float(np.mean(ess)),
        "ess_se": float(np.std(ess, ddof=1) / len(ess) ** 0.5),
        "sd_error": float(np.mean(error)),
        "sd_ratio": float(np.median(draws.std((0, 1)) / truth.std(0))),
        "mean_error_in_sd": float(np.median(shift)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = list(PAPER["SGLD"])
    parser.add_argument("--data", nargs="+", default=names, choices=names)
    parser.add_argument("--grid", nargs="+", type=float, default=GRID)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--burn-in", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--reference", type=int, default=2000, help="draws of NUTS")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    runs: list[dict[str, Any]] = []
    for name in options.data:
        X, y = load(name)
        data = jnp.asarray(X), jnp.asarray(y)
        truth = reference(*data, options.reference)
        start = np.random.default_rng(0).normal(size=(options.chains, X.shape[1]))
        for alpha in options.grid:
            for sampler, kernel in samplers(
                alpha, options.draws, options.burn_in
            ).items():
                found = measure(kernel, data, start, truth, options)
                runs.append({"data": name, "sampler": sampler, "alpha": alpha, **found})
                print(runs[-1], flush=True)
                jax.clear_caches()
    best: dict[str, dict[str, Any]] = {}
    for sampler in PAPER:
        for name in options.data:
            fit = [r for r in runs if (r["sampler"], r["data"]) == (sampler, name)]
            best.setdefault(sampler, {})[name] = {
                "right": max(
                    (r for r in fit if r["sd_error"] <= BEST_AT),
                    key=lambda r: r["ess"],
                    default=None,
                ),
                "largest": max(fit, key=lambda r: r["ess"]),
            }
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "data")}
    content = {"machine": machine(), "settings": settings, "paper": PAPER}
    save("uci", {**content, "best": best, "runs": runs}, options.out)


if __name__ == "__main__":
    main()
