"""The tied-means mixture of the MINT paper
========================================

The tied-means mixture of the MINT paper, compared with quadrature.

A million rows from 0.5 N(0, 2) + 0.5 N(1, 2), batches of 1000 and alpha = 0.5, which
corresponds to the temperature n ** 0.75. The exact tempered posterior is computed on a
grid and compared with five samplers: MINT with one batch for both positions and MINT
with the kept estimate of the paper's proof, each with and without the penalty for the
noise, and MHMinibatch. With ``--small``, as on the page of the gallery, there are
10,000 rows and batches of 100.

What to look at: the errors of the standard deviations, lower right, and the black bars.
They show the values expected for the kept estimate without a penalty, which samples a
known distribution that is not the tempered posterior. R-hat and effective sample sizes
are in the summary.

Dangna Li, Wing H. Wong (2017), Mini-batch Tempered MCMC, section 4.1.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import arviz as az
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_minibatch import MINT, MHMinibatch, diagnose, to_inference_data

VARIANCE = 2.0  # of each component
PRIOR_SD = np.sqrt(10.0), 1.0
ALPHA = 0.5
CHAINS = 20
SIZES = {  # draws of each chain
    "small": {"rows": 10_000, "batch": 100, "draws": 500},
    "default": {"rows": 1_000_000, "batch": 1000, "draws": 2500},
    "full": {"rows": 1_000_000, "batch": 1000, "draws": 50_000},
}
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73")
MARKERS = "osD^v"


def model(x, batch_size):
    theta1 = numpyro.sample("theta1", dist.Normal(0, PRIOR_SD[0]))
    theta2 = numpyro.sample("theta2", dist.Normal(0, PRIOR_SD[1]))
    components = dist.Normal(jnp.stack([theta1, theta1 + theta2]), VARIANCE**0.5)
    mixture = dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), components)
    with numpyro.plate("data", len(x), subsample_size=batch_size) as rows:
        numpyro.sample("x", mixture, obs=x[rows])


def main(args):
    size = SIZES["small" if args.small else "full" if args.full else "default"]
    n, m = size["rows"], size["batch"]
    temperature = n ** (1 - ALPHA * np.log(m) / np.log(n))
    key_which, key_noise, key_start, *keys = random.split(random.key(args.seed), 8)
    second = random.bernoulli(key_which, 0.5, (n,))
    x = second + VARIANCE**0.5 * random.normal(key_noise, (n,))
    say(f"{n} rows, batches of {m}, alpha = {ALPHA}: temperature {temperature:.6g}")

    grid = Grid(np.asarray(x, float), temperature, m)
    say(f"quadrature: binning the rows changed log densities by {grid.error:.0e}")

    mint = partial(MINT, model, alpha=ALPHA, dense_mass=True)
    kernels = {
        "shared, penalty": mint(),
        "shared": mint(penalty=False),
        "augmented, penalty": mint(estimate="augmented"),
        "augmented": mint(estimate="augmented", penalty=False),
        "MHMinibatch": MHMinibatch(
            model, batch_size=250, temperature=temperature, dense_mass=True
        ),
    }
    start = grid.draw(key_start, CHAINS)
    results, summaries = {}, {}
    for (name, kernel), key in zip(kernels.items(), keys, strict=True):
        begin = time.perf_counter()
        mcmc = MCMC(
            kernel,
            num_warmup=800,
            num_samples=size["draws"],
            num_chains=CHAINS,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(key, x, m, init_params=start)
        results[name] = summarise(mcmc)
        idata = to_inference_data(mcmc, constant_data=False)
        summaries[name] = f"{diagnose(idata)}\n\n{az.summary(idata)}"
        say(f"{name}: {time.perf_counter() - begin:.1f} s")
    print(f"\n{table(grid, results)}\n")
    for name, summary in summaries.items():
        print(f"{name}\n{summary}\n")
    args.out.mkdir(parents=True, exist_ok=True)
    plot(grid, results, n, temperature, args.out / "tied_means.png")
    say(f"wrote {args.out / 'tied_means.png'}")


class Grid:
    """The tempered posterior by the trapezoidal rule on a grid.

    The rows are summarised by the number and the mean of those in each of 2000 bins. To
    first order this is exact. The second-order error is h ** 2 / 8 * max |f''|, for
    bins of width h and a row's log likelihood f with |f''| <= 1 / 2 + theta2 ** 2 / 16;
    it changes the tempered log density by less than 1e-3 where the posterior has its
    mass. `error` is measured: it is the largest change of the differences between 10
    draws from the posterior.
    """

    def __init__(self, x, temperature, batch_size):
        counts, edges = np.histogram(x, bins=2000)
        sums, _ = np.histogram(x, bins=edges, weights=x)
        bins = sums[counts > 0] / counts[counts > 0], counts[counts > 0] / len(x)
        self.theta1, self.theta2 = np.linspace(-4, 5, 181), np.linspace(-6, 6, 161)
        theta = np.meshgrid(self.theta1, self.theta2, indexing="ij")
        columns = [row_moments(*pair, *bins) for pair in zip(*theta, strict=True)]
        mean, variance = np.stack(columns, 1)
        prior = sum(-0.5 * (t / sd) ** 2 for t, sd in zip(theta, PRIOR_SD, strict=True))
        power = len(x) / temperature
        self.density = normalise(prior + power * mean)
        # The kept estimate without a penalty samples E exp(estimate).
        noise = power**2 * variance * (1 / batch_size - 1 / len(x))
        self.augmented = normalise(prior + power * mean + noise / 2)
        some = [np.asarray(t, float) for t in self.draw(random.key(0), 10).values()]
        everything = x, np.full(len(x), 1 / len(x))
        change = np.array(
            [
                row_moments(*pair, *bins)[0] - row_moments(*pair, *everything)[0]
                for pair in zip(*some, strict=True)
            ]
        )
        self.error = power * np.ptp(change)

    def draw(self, key, number):
        """Points of the grid, drawn from the posterior."""
        chosen = random.choice(
            key, self.density.size, (number,), p=jnp.asarray(self.density.ravel())
        )
        i, j = np.unravel_index(np.asarray(chosen), self.density.shape)
        return {
            "theta1": jnp.asarray(self.theta1[i], jnp.float32),
            "theta2": jnp.asarray(self.theta2[j], jnp.float32),
        }

    def moments(self, density):
        """sd(theta1), sd(theta2) and P(theta2 > 0)."""
        first, second = density.sum(1), density.sum(0)
        positive = second[self.theta2 > 1e-9].sum() + second[self.theta2 == 0].sum() / 2
        return sd_of(self.theta1, first), sd_of(self.theta2, second), positive


def row_moments(theta1, theta2, x, weights):
    """Mean and variance of a row's log likelihood, up to a constant."""
    means = np.stack([theta1, theta1 + theta2])[..., None]
    f = np.logaddexp(*(-0.5 * (x - means) ** 2 / VARIANCE))
    mean = f @ weights
    return mean, f**2 @ weights - mean**2


def normalise(log_density):
    density = np.exp(log_density - log_density.max())
    return density / density.sum()


def sd_of(values, weights):
    return np.sqrt(weights @ (values - weights @ values) ** 2)


def summarise(mcmc):
    """The numbers of the table, each with its Monte Carlo standard error."""
    draws = {k: np.asarray(v, float) for k, v in mcmc.get_samples(True).items()}
    numbers = []
    for name in ("theta1", "theta2"):
        sd = draws[name].std()
        squares = (draws[name] - draws[name].mean()) ** 2
        numbers.append((sd, standard_error(squares) / (2 * sd)))
    positive = (draws["theta2"] > 0).astype(float)
    numbers.append((positive.mean(), standard_error(positive)))
    statistics = mcmc.get_extra_fields()
    mean = {k: float(statistics[k].mean()) for k in ("accept_prob", "num_rows")}
    mean["reliable"] = float(statistics["reliable"].mean())
    return draws, numbers, mean


def standard_error(values):
    return values.std() / np.sqrt(effective_sample_size(values))


def table(grid, results):
    header = f"{'':<22} {'sd(theta1)':>16} {'sd(theta2)':>16} {'P(theta2 > 0)':>16}"
    lines = [header + f" {'accepted':>9} {'reliable':>9} {'rows':>5}"]
    exact = {"grid": grid.density, "grid, augmented": grid.augmented}
    for name, density in exact.items():
        values = grid.moments(density)
        lines.append(f"{name:<22}" + "".join(f" {v:7.4f}{'':9}" for v in values))
    for name, (_, numbers, mean) in results.items():
        cells = "".join(f" {value:7.4f} ({error:.4f})" for value, error in numbers)
        lines.append(
            f"{name:<22}{cells} {mean['accept_prob']:9.2f} {mean['reliable']:9.1%}"
            f" {mean['num_rows']:5.0f}"
        )
    lines.append("In parentheses: Monte Carlo standard errors. Rows: read per step.")
    return "\n".join(lines)


def plot(grid, results, n, temperature, path):
    """The posterior with draws, its marginals, and the errors of the sds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    figure, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    draws = {name: result[0] for name, result in results.items()}
    first = next(iter(draws))
    points = {k: v.reshape(-1)[:: v.size // 2000] for k, v in draws[first].items()}
    axis = axes[0, 0]
    axis.plot(points["theta1"], points["theta2"], ".", ms=3, c=COLOURS[0], alpha=0.5)
    levels = np.sort(grid.density.ravel())
    levels = levels[np.searchsorted(np.cumsum(levels), [0.01, 0.1, 0.5])]
    axis.contour(grid.theta1, grid.theta2, grid.density.T, levels, colors="k")
    axis.set(xlabel="theta1", ylabel="theta2", xlim=(-1.5, 2.5), ylim=(-3.5, 3.5))
    axis.set_title(f"Draws of MINT ({first}),\ncontours containing 50%, 90% and 99%")

    for place, name in enumerate(("theta1", "theta2")):
        axis, truth = axes.flat[1 + place], grid.density.sum(1 - place)
        points = getattr(grid, name)
        axis.fill_between(points, truth / (points[1] - points[0]), color="0.8", lw=0)
        for values, colour in zip(draws.values(), COLOURS, strict=True):
            thinned = values[name].reshape(-1)[:: max(1, values[name].size // 50_000)]
            axis.plot(points, gaussian_kde(thinned)(points), color=colour, lw=1.2)
        axis.set(xlabel=name, ylabel="density", yticks=[], ylim=(0, None))
        axis.set_xlim((-1.5, 2.5) if place == 0 else (-3.5, 3.5))
        axis.set_title(f"Marginal of {name}\n(grey: quadrature; colours: lower right)")

    axis, truth = axes[1, 1], grid.moments(grid.density)
    for row, (_, numbers, _) in enumerate(results.values()):
        for place, filled in enumerate((True, False)):
            value, error = (100 * np.array(numbers[place]) / truth[place]).tolist()
            axis.errorbar(
                *(value - 100, -row - 0.25 * place),
                xerr=2 * error,
                fmt=MARKERS[row],
                color=COLOURS[row],
                mfc=COLOURS[row] if filled else "white",
            )
    predicted = grid.moments(grid.augmented)
    for place in (0, 1):
        off = 100 * predicted[place] / truth[place] - 100
        row = list(results).index("augmented")
        axis.plot(off, -row - 0.25 * place, "k|", ms=14, mew=2)
    axis.axvline(0, color="0.6", lw=1)
    axis.set_yticks([-row - 0.125 for row in range(len(results))], list(results))
    axis.set_xlabel("error of the sd (%, ± 2 standard errors)")
    axis.set_title(
        "Filled: theta1, open: theta2;\nbars: values expected for 'augmented'"
    )
    figure.suptitle(f"Tied means, {n:,} rows, temperature {temperature:,.0f}")
    figure.savefig(path, dpi=80)


def say(text):
    """A line of progress with the seconds since the start."""
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    BEGIN = time.perf_counter()
    parser = argparse.ArgumentParser(
        description="The tied-means mixture of the MINT paper"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--small", action="store_true", help="10,000 rows, few draws")
    length.add_argument("--full", action="store_true", help="the paper's 1e6 draws")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
