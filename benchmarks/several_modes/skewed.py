"""Two modes that are skewed in opposite directions, with representative rows or not.

Run ``python -m benchmarks.several_modes.skewed`` for the numbers of the page.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, ONES = 5000, 5
RUNS, CHAINS, WARMUP, DRAWS = 30, 4, 300, 1000


def model(x: Any, z: Any, y: Any, seen: Any) -> None:
    """Two signs of ``g``; ``a`` is skewed to the left in one and right in the other."""
    import numpyro
    import numpyro.distributions as dist

    g = numpyro.sample("g", dist.Normal(0.1, 1.0))
    a = numpyro.sample("a", dist.Normal(1.0, 5.0))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Normal(g**2 * x[i], 1.0), obs=y[i])
        numpyro.sample("seen", dist.Bernoulli(logits=a * g + z[i]), obs=seen[i])


def simulated(size: int = ROWS) -> tuple[np.ndarray, ...]:
    """Rows of which five have a one in the second outcome."""
    rng = np.random.default_rng(1)
    x, noise = rng.normal(size=(2, size))
    z = 0.5 * rng.normal(size=size)
    seen = np.zeros(size)
    seen[rng.choice(size, ONES, replace=False)] = 1
    return tuple(v.astype(np.float32) for v in (x, z, x + noise, seen))


class Truth:
    """The posterior on a grid; the likelihood of the ones depends on a product."""

    def __init__(self, *data: np.ndarray) -> None:
        x, z, y, seen = (v.astype(float) for v in data)
        half = np.linspace(0.8, 1.2, 161)
        self.g = np.concatenate([-half[::-1], half])
        self.a = np.linspace(-14.0, 14.0, 2801)
        grid = np.linspace(-18.0, 0.0, 3601)
        of_product = [e * ONES + z @ seen - np.logaddexp(0, e + z).sum() for e in grid]
        square = self.g**2
        logs = square * (x @ y) - 0.5 * square**2 * (x @ x) - 0.5 * (self.g - 0.1) ** 2
        logs = logs[:, None] - 0.02 * (self.a - 1.0) ** 2
        product = self.g[:, None] * self.a
        seen_logs = np.interp(product, grid, of_product, -np.inf, -np.inf)
        self.weights = np.exp(logs + seen_logs - (logs + seen_logs).max())
        self.weights /= self.weights.sum()

    def of_mode(self, sign: int) -> np.ndarray:
        """Weights of ``a`` in a mode, up to its mass."""
        return self.weights[np.sign(self.g) == sign].sum(0)

    def checks(self) -> dict[str, tuple[Any, float]]:
        """Functions of the draws ``(g, a)``, and their expectations."""
        found: dict[str, tuple[Any, float]] = {}
        for sign in (-1, 1):
            weights = self.of_mode(sign)
            mass = weights.sum()
            mean = weights @ self.a / mass
            sd = np.sqrt(weights @ (self.a - mean) ** 2 / mass)
            distribution = (weights.cumsum() - 0.5 * weights) / mass

            def inside(g: Any, sign: int = sign) -> Any:
                return np.sign(g) == sign

            def white(a: Any, mean: float = mean, sd: float = sd) -> Any:
                return (a - mean) / sd

            found[f"mass {sign}"] = (lambda g, a, i=inside: 1.0 * i(g)), mass
            found[f"mean {sign}"] = (lambda g, a, i=inside, w=white: i(g) * w(a)), 0.0
            found[f"square {sign}"] = (
                (lambda g, a, i=inside, w=white: i(g) * w(a) ** 2),
                mass,
            )
            for level in (0.05, 0.95):
                end = np.interp(level, distribution, self.a)
                found[f"tail {level} {sign}"] = (
                    (lambda g, a, i=inside, e=end: 1.0 * (i(g) & (a < e))),
                    level * mass,
                )
        return found


def compared(draws: int = DRAWS, runs: int = RUNS) -> None:
    """Print what runs say of their precision, and what the variance between them is."""
    import jax
    from numpyro.infer import MCMC

    from numpyro_minibatch import (
        MinibatchMH,
        control_variate,
        diagnose,
        to_inference_data,
    )
    from numpyro_minibatch.diagnostics import effective_sample_size

    data = simulated()
    checks = Truth(*data).checks()
    kernel = MinibatchMH(model, control_variate=control_variate.taylor2(modes=4))
    mcmc = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=draws,
        num_chains=CHAINS * runs,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(3), *data)
    names = "mode_masses", "tail_inefficiency", "tail_mode", "exact_rows"
    print({name: kernel.pilot.get(name) for name in names})
    found = mcmc.get_samples(group_by_chain=True)
    g, a = (np.asarray(found[name], float) for name in ("g", "a"))
    for name, (fn, truth) in checks.items():
        values = np.asarray(fn(g, a)).reshape(runs, CHAINS, draws)
        means = values.mean((1, 2))
        said = np.array([float(effective_sample_size(each)) for each in values])
        z = (means - truth) / (values.std((1, 2)) / np.sqrt(said))
        error = means.std(ddof=1) / np.sqrt(runs)
        true = values.var() / means.var(ddof=1)
        print(
            f"{name:14s} truth {truth:.4f}, found {means.mean():.4f} +- {error:.4f}, "
            f"ESS reported {np.median(said):.0f}, true {true:.0f}, "
            f"95% intervals that miss {np.mean(abs(z) > 1.96):.0%}"
        )
    tree = to_inference_data(mcmc, constant_data=False)
    told = 0
    for run in range(runs):
        chains = slice(CHAINS * run, CHAINS * (run + 1))
        advice = diagnose(tree.isel(chain=chains)).advice
        told += any("tails" in text for text in advice)
    print(f"{told} of {runs} runs are advised about tails")


def main() -> None:
    from numpyro_minibatch.control_variate import _posterior_of_modes

    compared()
    print("without representative rows:")
    _posterior_of_modes.MAX_INEFFICIENCY = np.inf
    compared()


if __name__ == "__main__":
    main()
