"""The paper's mixture of five modes with gradient noise: RENHD and other samplers.

    python -m benchmarks.replica_exchange.five_modes

Seven rungs, each 1.5 times as hot as the one before, start at temperature 1. The noise
comes from the rows of a data plate, which have linear terms that sum to zero: it
affects gradients and swaps, and no kernel is treated specially. Noise of variance 0.25
is the paper's; with 25, constant friction leads to a far too high temperature.

All chains start in the middle mode. Samplers on one rung make the same number of
gradients, in draws of seven times as many steps.

The paper does not say how its 4.16e3 effective samples of 1e5 draws are computed. Here
the coordinate with the smaller value is used. "Alone" is for 1e5 draws by the
integrated autocorrelation of each chain separately, which is all that one long chain as
in the paper allows; "ArviZ" is ``az.ess(method="mean")`` over all chains.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer import MCMC

from numpyro_minibatch import RELD, RENHD, SGHMC, SGNHT, batch

from . import mixture
from .record import DOCS, RESULTS, load, machine, save, table

STEP_SIZE, FRICTION, NUM_STEPS = 0.1, 1.0, 20
RUNGS, RATIO = 7, 1.5
PAPER_NOISE, PAPER_ESS = 0.25, 4.1638e3
FIGURE = DOCS / "_static" / "replica_exchange_five_modes.png"


def methods(variance: float) -> dict[str, Callable[[], Any]]:
    """The samplers by name; ``variance`` is that of the noise."""
    shared: dict[str, Any] = {
        "target": mixture.target(variance),
        "batch_size": mixture.WIDTH,
        "step_size": STEP_SIZE,
        "friction": FRICTION,
    }
    rungs = {"num_replicas": RUNGS, "temperature_ratio": RATIO, "num_steps": NUM_STEPS}
    of_gradients = batch.without_replacement(mixture.WIDTH)
    alone = {**shared, "num_steps": RUNGS * NUM_STEPS}
    rungs_of_gradients = {**rungs, "swap_batch": of_gradients}
    found: dict[str, Callable[[], Any]] = {
        "RENHD": lambda: RENHD(**shared, **rungs),
        "RENHD, rows of gradients": lambda: RENHD(**shared, **rungs_of_gradients),
        "RENHD, Barker": lambda: RENHD(**shared, **rungs, swap="barker"),
        "RENHD, exact swaps": lambda: RENHD(**shared, **rungs, swap="exact"),
        "RENHD, random pairs": lambda: RENHD(**shared, **rungs, pairing="random"),
        "RENHD, euler": lambda: RENHD(**shared, **rungs, integrator="euler"),
        "RELD": lambda: RELD(**shared, **rungs),
        "SGNHT alone": lambda: SGNHT(**alone),
        "SGHMC alone": lambda: SGHMC(**alone),
    }
    return found


def sample(kernel: Any, chains: int, draws: int, warmup: int, seed: int = 0) -> Any:
    """A run with all chains started in the middle mode."""
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), init_params=jnp.zeros((chains, 2)))
    return mcmc


def measured(mcmc: Any) -> tuple[dict[str, Any], np.ndarray, np.ndarray | None]:
    """Numbers of a run, its draws, and the rungs of its replicas."""
    draws = np.asarray(mcmc.get_samples(group_by_chain=True))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    found = mixture.held_against(draws)
    found["diverging"] = float(np.mean(np.asarray(fields["diverging"])))
    found["rows_a_draw"] = float(np.mean(np.asarray(fields["num_rows"], np.float64)))
    if "rung" not in fields:
        return found, draws, None
    rates = np.nanmean(np.asarray(fields["swap_acceptance_rate"]), axis=(0, 1))
    found["swap_rates"] = rates.tolist()
    found["unreliable_swaps"] = 1.0 - float(np.nanmean(fields["swap_reliable"]))
    found["round_trips"] = int(np.asarray(fields["round_trips"])[:, -1].sum())
    found["round_trips_per_1e5"] = found["round_trips"] * 1e5 / found["draws"]
    return found, draws, np.asarray(fields["rung"])


def checks(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requirements on RENHD, and whether they hold."""
    found = {(run["noise"], run["method"]): run for run in runs}

    def check(what: str, value: float, bound: float, holds: bool) -> dict[str, Any]:
        return {"what": what, "value": value, "bound": bound, "holds": bool(holds)}

    made = []
    for (noise, name), run in found.items():
        if name != "RENHD":
            continue
        tv, ess = run["total_variation"], run["ess_alone"]
        off = abs(run["variance_ratio"] - 1)
        bound = 0.03 if noise <= PAPER_NOISE else 0.10
        title = f"{name}, noise {noise:g}: "
        made.append(check(f"{title}total variation of weights", tv, 0.02, tv < 0.02))
        made.append(check(f"{title}error of the variance", off, bound, off < bound))
        if noise <= PAPER_NOISE:
            made.append(
                check(f"{title}ESS of 1e5 draws", ess, PAPER_ESS, ess > PAPER_ESS)
            )
    for (noise, name), run in found.items():
        if name.endswith("alone"):
            modes = run["modes_a_chain"]
            what = f"{name}, noise {noise:g}: modes that a chain sees, of five"
            made.append(check(what, modes, 2.0, modes < 2.0))
    return made


def text(content: dict[str, Any]) -> str:
    """The results as tables."""
    names = list(methods(PAPER_NOISE))
    runs = sorted(
        content["runs"], key=lambda run: (run["noise"], names.index(run["method"]))
    )
    head = ["noise", "method", "total variation", "expected if exact"]
    head += ["variance ratio", "modes per chain", "diverging"]
    worth = ["noise", "method", "ESS alone", "ArviZ", "bulk", "of modes"]
    worth += ["swap rates", "unreliable", "round trips"]
    accuracy, worths = [], []
    for run in runs:
        of = [f"{run['noise']:g}", run["method"]]
        rates = run.get("swap_rates")
        ratio, error = run["variance_ratio"], run["variance_ratio_error"]
        accuracy.append(
            [
                *of,
                f"{run['total_variation']:.4f}",
                f"{run['total_variation_expected']:.4f}",
                f"{ratio:.3f} ± {error:.3f}",
                f"{run['modes_a_chain']:.1f}",
                f"{100 * run['diverging']:.2g}%" if run["diverging"] else "",
            ]
        )
        worths.append(
            [
                *of,
                *(
                    f"{run[key]:,.0f}"
                    for key in ("ess_alone", "ess_arviz", "ess_arviz_bulk", "ess_modes")
                ),
                f"{rates[0]:.2f}, {rates[-1]:.2f}" if rates else "",
                f"{run['unreliable_swaps']:.2f}" if rates else "",
                f"{run['round_trips_per_1e5']:,.0f}" if rates else "",
            ]
        )
    asked = [
        [c["what"], f"{c['value']:.4g}", f"{c['bound']:.4g}", str(c["holds"]).lower()]
        for c in content["checks"]
    ]
    return "\n\n".join(
        [
            table(head, accuracy),
            table(worth, worths),
            table(["check", "value", "bound", "holds"], asked),
        ]
    )


def draw(kept: dict[str, Any], noise: float, path: Path) -> None:
    """Fractions in the modes, draws, and paths of two replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    weights, _ = mixture.truth()
    names = [n for n in ("RENHD", "RELD", "SGNHT alone") if n in kept]
    colours = ("#0072B2", "#D55E00", "#009E73")
    modes, width = np.arange(len(weights)), 0.8 / (len(names) + 1)
    axes[0].bar(modes, weights, width, color="0.6", label="truth")
    for k, (name, colour) in enumerate(zip(names, colours, strict=False), 1):
        run = kept[name][0]
        axes[0].bar(
            modes + k * width,
            run["shares"],
            width,
            yerr=run["shares_error"],
            color=colour,
            label=name,
        )
    axes[0].set(xlabel="mode", ylabel="fraction of draws")
    axes[0].set_title(f"Weights, gradient noise {noise:g}")
    axes[0].legend(fontsize=8)
    for name, colour in (("RENHD", colours[0]), ("SGNHT alone", colours[2])):
        if name in kept:
            z = kept[name][1][:, ::25].reshape(-1, 2)
            axes[1].plot(*z.T, ".", ms=1.5, color=colour, label=name)
    axes[1].set(xlabel="$z_1$", ylabel="$z_2$", aspect="equal", title="Draws")
    axes[1].legend(fontsize=8, markerscale=6, loc="lower right")
    rung = kept["RENHD"][2]
    if rung is not None:
        for replica, style in ((0, "-"), (6, "--")):
            path_ = rung[0, :300, min(replica, rung.shape[-1] - 1)]
            axes[2].step(np.arange(len(path_)), path_, style, lw=0.9, where="post")
    axes[2].set(xlabel="draw", ylabel="rung (0: coldest)", title="Two replicas")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=32)
    parser.add_argument("--draws", type=int, default=100_000, help="total over chains")
    parser.add_argument("--warmup", type=int, default=300, help="draws per chain")
    parser.add_argument("--noise", type=float, nargs="+", default=[PAPER_NOISE, 25.0])
    parser.add_argument("--methods", nargs="+", help="all, unless named")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="only missing runs")
    parser.add_argument("--out", default="five_modes")
    options = parser.parse_args(argv)
    length = options.draws // options.chains
    settings = {
        **{"chains": options.chains, "draws": length, "warmup": options.warmup},
        **{"step_size": STEP_SIZE, "friction": FRICTION, "num_steps": NUM_STEPS},
        **{"rungs": RUNGS, "ratio": RATIO, "seed": options.seed},
        **{"rows": mixture.SIZE, "batch": mixture.WIDTH},
    }
    runs: list[dict[str, Any]] = []
    if options.resume:
        recorded = load(options.out, RESULTS)
        if recorded["settings"] != settings:
            raise SystemExit("the recorded results have other settings")
        runs = recorded["runs"]
    known = {(run["noise"], run["method"]) for run in runs}
    for noise in options.noise:
        kept = {}
        for name, make in methods(noise).items():
            if options.methods and name not in options.methods:
                continue
            if (noise, name) in known:
                continue
            begin = time.perf_counter()
            mcmc = sample(make(), options.chains, length, options.warmup, options.seed)
            found, draws, rung = measured(mcmc)
            kept[name] = found, draws, rung
            seconds = time.perf_counter() - begin
            runs.append({"noise": noise, "method": name, "seconds": seconds, **found})
            shown = ("total_variation", "variance_ratio", "ess_alone", "ess_arviz")
            print(
                f"noise {noise:g}, {name}: ",
                {key: round(found[key], 4) for key in (*shown, "modes_a_chain")},
                f"{seconds:.0f} s",
                flush=True,
            )
            content = {"machine": machine(), "settings": settings, "runs": runs}
            content["checks"] = checks(runs)
            save(options.out, content, text(content))
        if noise == PAPER_NOISE and "RENHD" in kept:
            draw(kept, noise, options.figure)
    for check in checks(runs):
        print(check, flush=True)


if __name__ == "__main__":
    main()
