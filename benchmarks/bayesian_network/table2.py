"""Table 2 and figure 5 of the AMAGOLD paper: a network on MNIST at four settings.

    python benchmarks/bayesian_network/table2.py            # 1000 gradient steps each
    python benchmarks/bayesian_network/table2.py --full     # the authors' run lengths

The folder named by NUMPYRO_MINIBATCH_DATA must hold mnist/ and notmnist/. One JSON file
per setting is written as soon as it is available; `--report` reads them.

Settings that the paper leaves open are those of the authors' published program: the
network is 784-500-256-10; the energy is the summed loss plus 5e-4 / 2 times the squared
weights, which is a prior with standard deviation 44.7; h is per mean loss, so for the
sum it is h / 60000; SGHMC's friction times step is 2 b; burn-in has batches of 500,
learning rate 0.1 and momentum 0.5. Its Metropolis ratio omits the prior and ours does
not; with such a wide prior the two differ little.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC, init_to_value

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import bayesian_network as network  # noqa: E402

from numpyro_minibatch import AMAGOLD, SGHMC  # noqa: E402

HIDDEN, BATCH, NUM_STEPS, DRAWS = (500, 256), 2000, 10, 20
FULL = {"SGHMC": 30_000, "AMAGOLD": 25_000}  # gradient steps
PAPER = {
    ("SGHMC", 0.01): ("3.69 (0.03)", "3.77 (0.17)"),
    ("SGHMC", 5e-6): ("89.95 (0.29)", "89.70 (0.91)"),
    ("AMAGOLD", 0.01): ("3.63 (0.04)", "3.65 (0.08)"),
    ("AMAGOLD", 5e-6): ("3.65 (0.10)", "3.63 (0.10)"),
}
STEPS = (0.0005, 0.001)


def prior(name, shape):
    return dist.Normal(0.0, 5e-4**-0.5)


def descend(key, data, hidden, path):
    """The burn-in, once for all settings."""
    if path.exists():
        with np.load(path) as values:
            return {name: jnp.asarray(value) for name, value in values.items()}
    X, y = jnp.asarray(data.X), jnp.asarray(data.y)
    model = network.make_model(hidden, 500, prior)
    key, init_key = random.split(key)
    # gradient descent cannot start at a draw from such a wide prior
    params = network.Network(hidden).init(init_key, X[:1])["params"]
    first = {
        f"net/{layer}.{name}": value
        for layer, values in params.items()
        for name, value in values.items()
    }
    begin = init_to_value(values=first)
    start = network.burn_in(key, model, X, y, 3 * len(X) // 500, begin)
    np.savez(path, **{name: np.asarray(value) for name, value in start.items()})
    return start


def make_kernel(name, h, b, start, num_rows, hidden):
    model = network.make_model(hidden, 500, prior)
    common = {
        "batch_size": BATCH,
        "h": h / num_rows,
        "b": b,
        "num_steps": NUM_STEPS,
        "init_strategy": init_to_value(values=start),
    }
    if name == "SGHMC":
        return SGHMC(model, integrator="euler", **common)
    return AMAGOLD(model, resample_momentum=False, **common)


def run(name, h, b, steps, start, data, hidden, seed):
    X, y = jnp.asarray(data.X), jnp.asarray(data.y)
    thin = steps // (DRAWS * NUM_STEPS)
    mcmc = MCMC(
        make_kernel(name, h, b, start, len(X), hidden),
        num_warmup=0,
        num_samples=DRAWS * thin,
        thinning=thin,
        progress_bar=False,
        jit_model_args=True,
    )
    begin = time.perf_counter()
    fields = ("accept_prob",) if name == "AMAGOLD" else ()
    mcmc.run(random.key(seed), X, y, extra_fields=fields)
    draws = jax.block_until_ready(mcmc.get_samples())
    seconds = time.perf_counter() - begin
    extra = {k: np.asarray(v, float) for k, v in mcmc.get_extra_fields().items()}
    inside = network.predict(draws, data.X_test, hidden)
    outside = network.entropy(network.predict(draws, data.X_other, hidden))
    error, nll = network.score(inside, data.y_test)
    each = [network.score(inside[i : i + 1], data.y_test)[0] for i in range(DRAWS)]
    levels = np.linspace(0, 1, 101)
    return {
        "kernel": name,
        "hidden": list(hidden),
        "h": h,
        "b": b,
        "gradient_steps": steps,
        "batch_size": BATCH,
        "draws": DRAWS,
        "seed": seed,
        "seconds_with_compilation": round(seconds, 1),
        "ensemble_error_percent": round(float(error), 3),
        "ensemble_nll": round(float(nll), 4),
        "error_percent_of_draws": [round(float(e), 2) for e in each],
        "diverging": float(extra["diverging"].mean()),
        "noise_ratio": float(extra["noise_ratio"][-1]),
        "lp_estimate_of_draws": [float(f"{v:.5g}") for v in extra["lp_estimate"]],
        "acceptance_rate": (
            float(extra["accept_prob"].mean()) if "accept_prob" in extra else None
        ),
        "distance_per_parameter": float(
            np.sqrt(
                sum(float(((draws[k][-1] - start[k]) ** 2).sum()) for k in start)
                / sum(v.size for v in start.values())
            )
        ),
        "entropy_quantiles_notmnist": np.quantile(outside, levels).round(4).tolist(),
        "entropy_quantiles_mnist": np.quantile(network.entropy(inside), levels)
        .round(4)
        .tolist(),
    }


def report(folder):
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*__*.json"))]
    by_setting = {(r["kernel"], r["b"], r["h"]): r for r in found}
    lines = [
        "| kernel | b | h | error of the draws, % | error of the ensemble, % | NLL "
        "| acceptance rate | mean entropy, MNIST / notMNIST | gradient steps "
        "| paper, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, b), published in PAPER.items():
        for h, theirs in zip(STEPS, published, strict=True):
            r = by_setting.get((name, b, h))
            if r is None:
                continue
            errors = np.array(r["error_percent_of_draws"])
            rate = r["acceptance_rate"]
            means = [
                np.mean(r[f"entropy_quantiles_{what}"])
                for what in ("mnist", "notmnist")
            ]
            lines.append(
                f"| {name} | {b:g} | {h:g} | {errors.mean():.2f} ({errors.std():.2f}) "
                f"| {r['ensemble_error_percent']:.2f} | {r['ensemble_nll']:.3f} "
                f"| {'' if rate is None else f'{rate:.2f}'} "
                f"| {means[0]:.3f} / {means[1]:.3f} "
                f"| {r['gradient_steps']} | {theirs} |"
            )
    base = json.loads((folder / "optimum.json").read_text())
    lines.append(
        "\nAll runs start at the result of gradient descent: "
        f"{base['error_percent']:.2f}%, NLL {base['nll']:.3f}. "
        "In parentheses: standard deviations over the 20 draws."
    )
    text = "\n".join(lines)
    (folder / "table2.md").write_text(text + "\n")
    print(text)
    plot(by_setting, folder / "entropy.png")


def plot(by_setting, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    levels = np.linspace(0, 1, 101)
    styles = {(0.01, 0.0005): "-", (0.01, 0.001): "--"}
    styles |= {(5e-6, 0.0005): "-.", (5e-6, 0.001): ":"}
    for (name, b, h), r in by_setting.items():
        axis = axes[0 if name == "SGHMC" else 1]
        for what, colour in (("mnist", "0.6"), ("notmnist", "#D55E00")):
            axis.plot(
                r[f"entropy_quantiles_{what}"],
                levels,
                styles[b, h],
                color=colour,
                label=f"{'notMNIST' if what == 'notmnist' else 'MNIST'}, b={b:g}, "
                f"h={h:g}",
            )
    for axis, name in zip(axes, ("SGHMC", "AMAGOLD"), strict=True):
        axis.set(title=name, xlabel="entropy of the prediction (nats)", xlim=(0, 2.35))
        axis.set_ylabel("cumulative fraction of images")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=80)


def main(args):
    folder = args.out
    if args.report:
        report(folder)
        return
    data = network.load()
    if data.name != "MNIST" or data.other != "notMNIST":
        raise SystemExit(
            "NUMPYRO_MINIBATCH_DATA must name a folder with both data sets"
        )
    folder.mkdir(parents=True, exist_ok=True)
    hidden = tuple(args.hidden)
    start = descend(random.key(args.seed), data, hidden, args.cache)
    alone = network.predict({k: v[None] for k, v in start.items()}, data.X_test, hidden)
    error, nll = network.score(alone, data.y_test)
    known = {"error_percent": float(error), "nll": float(nll)}
    (folder / "optimum.json").write_text(json.dumps(known, indent=1))
    print(known, flush=True)
    for name in args.kernels:
        for b in args.b:
            for h in args.h:
                steps = FULL[name] if args.full else args.steps
                found = run(name, h, b, steps, start, data, hidden, args.seed + 1)
                path = folder / f"{name.lower()}__b{b:g}__h{h:g}.json"
                path.write_text(json.dumps(found, indent=1))
                shown = ("seconds_with_compilation", "ensemble_error_percent")
                shown += ("error_percent_of_draws", "acceptance_rate", "diverging")
                print(name, b, h, {k: found[k] for k in shown}, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the authors' run lengths")
    parser.add_argument("--report", action="store_true", help="tables and figure only")
    parser.add_argument("--steps", type=int, default=1000, help="gradient steps")
    parser.add_argument("--kernels", nargs="+", default=["SGHMC", "AMAGOLD"])
    parser.add_argument("--b", nargs="+", type=float, default=[0.01, 5e-6])
    parser.add_argument("--hidden", nargs="+", type=int, default=HIDDEN)
    parser.add_argument("--h", nargs="+", type=float, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--cache", type=Path, default=Path("burn_in.npz"))
    main(parser.parse_args())
