"""Write the page, its tables and its figures from the recorded results.

python -m benchmarks.stochastic_gradient.report
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .record import load

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "benchmarks-stochastic-gradient.md"
FIGURES = {
    "double_well": "_static/stochastic_gradient_double_well.png",
    "logistic": "_static/stochastic_gradient_logistic.png",
}
# colours by Okabe and Ito, distinguishable for the colour-blind; markers differ too
STYLES = {
    "AMAGOLD": ("#0072B2", "o"),
    "AMAGOLD, reversible": ("#56B4E9", "v"),
    "AMAGOLD, irreversible": ("#0072B2", "o"),
    "SGHMC, baoab": ("#D55E00", "s"),
    "SGHMC, midpoint": ("#E69F00", "D"),
    "SGHMC, euler": ("#CC79A7", "^"),
    "L2MC": ("#009E73", "P"),
    "HMC": ("#000000", "X"),
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(line) + "|" for line in lines)


def step_speed(results: dict[str, Any]) -> str:
    """Gradient steps per second."""
    rows = []
    for run in results["runs"]:
        speeds = [
            f"{found['steps_per_second']:,.0f}"
            for found in (run["methods"][m] for m in ("blackjax", "ours"))
        ]
        ratios = [
            f"{run['methods'][m]['speed_over_blackjax']:.2f}"
            for m in ("ours", "ours_with_replacement")
        ]
        rows.append(
            [run["problem"], run["sampler"].upper(), str(run["num_steps"])]
            + [*speeds, *ratios]
        )
    head = ["problem", "sampler", "steps per draw", "blackjax, steps/s"]
    head += ["ours, steps/s", "ours / blackjax", "ours, with replacement"]
    return _table(head, rows)


def amagold_speed(results: dict[str, Any]) -> str:
    """AMAGOLD's inner and effective draws per second."""
    rows = []
    for name, found in results["problems"].items():
        for method in ("ours", "jax_sgmc"):
            if method in found:
                run = found[method]
                rows.append(
                    [name, method.replace("_", "-"), run["jax"]]
                    + [f"{run['steps_per_second']:,.0f}"]
                    + [f"{run['min_ess_per_second']:.2f}", f"{run['acceptance']:.2f}"]
                )
        if "ratio_of_steps_per_second" in found:
            ratios = [f"{found[f'ratio_of_{k}_per_second']:.2f}" for k in _RATIOS]
            rows.append([name, "ratio", "", *ratios, ""])
    head = ["problem", "package", "JAX", "inner steps/s", "smallest ESS/s"]
    return _table([*head, "acceptance"], rows)


_RATIOS = ("steps", "min_ess")


def double_well(results: dict[str, Any]) -> str:
    """Symmetric divergence by step size."""
    runs = results["runs"]
    methods = list(dict.fromkeys(run["method"] for run in runs))
    sizes = sorted({run["step_size"] for run in runs})
    found = {(run["method"], run["step_size"]): run for run in runs}
    rows = []
    for size in sizes:
        accept = found["AMAGOLD, irreversible", size]["acceptance"]
        cells = [
            f"{run['symmetric_kl']:.4f} ± {run['standard_error']:.4f}"
            if run["diverging"] < 1e-3
            else "diverges"
            for run in (found[method, size] for method in methods)
        ]
        rows.append([f"{size:g}", *cells, f"{accept:.2f}"])
    return _table(["step size", *methods, "acceptance"], rows)


def bias(results: dict[str, Any]) -> str:
    """Ratio of the variance to the exact one, measured and to leading order."""
    rows = [
        [
            run["sampler"],
            f"{run['temperature']:g}",
            str(run["batch_size"]),
            "" if run["friction"] is None else f"{run['friction']:g}",
            f"{run['step_size']:g}",
            f"{run['measured_ratio']:.3f} ± {run['standard_error']:.3f}",
            f"{run['predicted_ratio']:.3f}",
        ]
        for run in sorted(
            results["runs"],
            key=lambda r: (
                ["SGLD", "SGHMC", "SGNHT"].index(r["sampler"]),
                r["temperature"],
                r["batch_size"],
                r["friction"] or 0,
                r["step_size"],
            ),
        )
    ]
    head = ["sampler", "T", "batch size", "friction", "step size", "measured"]
    return _table([*head, "leading order"], rows)


def logistic(results: dict[str, Any]) -> str:
    """Errors of mean and standard deviation by step size."""
    rows = [
        [
            run["data"].capitalize(),
            run["method"],
            f"{run['step_size']:g}",
            f"{run['mse_mean']:.2g} ± {run['mse_mean_error']:.1g}",
            f"{run['mse_sd']:.2g} ± {run['mse_sd_error']:.1g}"
            if run["mse_sd"] is not None
            else "stuck",
            "" if run["mse_sd"] is None else f"{run['sd_ratio']:.3f}",
            "" if run["method"].startswith("SGHMC") else f"{run['acceptance']:.2f}",
        ]
        for run in results["runs"]
    ]
    head = ["data", "method", "step size", "MSE of the mean", "MSE of the sd"]
    return _table([*head, "sd / true sd", "acceptance"], rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "step_speed": step_speed,
    "amagold_speed": amagold_speed,
    "double_well": double_well,
    "logistic": logistic,
    "bias": bias,
}


def _lines(axes: Any, runs: list[dict[str, Any]], key: str, error: str) -> None:
    for method in dict.fromkeys(run["method"] for run in runs):
        mine = [r for r in runs if r["method"] == method and (r[key] or 0.0) > 0]
        color, marker = STYLES[method]
        axes.errorbar(
            [run["step_size"] for run in mine],
            [run[key] for run in mine],
            [run[error] for run in mine] if error else None,
            color=color,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            label=method,
        )


def draw_double_well(results: dict[str, Any], path: Path) -> None:
    """The divergence against the step size."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    runs = [run for run in results["runs"] if run["diverging"] < 1e-3]
    _lines(axes, runs, "symmetric_kl", "standard_error")
    floor = 85 / results["settings"]["draws"]
    axes.axhline(floor, color="gray", linestyle=":", label="independent draws")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="step size",
        ylabel="symmetric KL divergence (nats)",
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_logistic(results: dict[str, Any], path: Path) -> None:
    """Errors and acceptance against the step size, a column for each data set."""
    from matplotlib import pyplot

    names = list(dict.fromkeys(run["data"] for run in results["runs"]))
    figure, grid = pyplot.subplots(
        3,
        len(names),
        figsize=(4.2 * len(names), 8),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for column, name in zip(grid.T, names, strict=True):
        runs = [run for run in results["runs"] if run["data"] == name]
        _lines(column[0], runs, "mse_mean", "mse_mean_error")
        _lines(column[1], runs, "mse_sd", "mse_sd_error")
        tested = [run for run in runs if not run["method"].startswith("SGHMC")]
        _lines(column[2], tested, "acceptance", "")
        column[0].set(title=name.capitalize(), xscale="log", yscale="log")
        column[1].set(yscale="log")
        column[2].set(xlabel="step size", ylim=(0, 1.05))
    grid[0, 0].set_ylabel("MSE of the posterior mean")
    grid[1, 0].set_ylabel("MSE of the posterior sd")
    grid[2, 0].set_ylabel("acceptance rate")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


TEXTS = {
    "step_speed": """## Gradient steps per second compared with blackjax

`python -m benchmarks.stochastic_gradient.step_speed --steps 5000 --rounds 15`, in one
environment with NumPyro and blackjax. All samplers use Euler's scheme and batches of
100 of 100,000 rows, with a fresh batch for each gradient. One chain makes all steps in
one compiled `lax.scan`. blackjax's SGHMC reads one batch in all of its integration
steps and draws a new momentum at each call; here its integrator is called with the
momentum carried over and a fresh batch. Its rows are drawn with replacement, as its
users draw them. Ours are drawn without replacement (the default), and with replacement
in the last column. Ours also report the log density, the noise ratio and divergences.
The ratios are medians over rounds in which the methods took turns, because the machine
was shared.""",
    "amagold_speed": """## AMAGOLD compared with jax-sgmc

`python -m benchmarks.stochastic_gradient.amagold_speed --old PYTHON`, with the
interpreter of an environment that has jax-sgmc 0.1.5, which needs JAX 0.4.25. Both
packages run the irreversible chain with ten inner steps on a logistic regression, with
the same step size, friction and batch size. *Small* has 1,000 rows, 15 columns and
batches of 32; *tall* has 100,000 rows, 20 columns and batches of 1,000. Each
measurement is a separate process, and the two packages take turns; a process reports
the fastest of ten runs. For jax-sgmc, only the solver is timed, without its driver. The
two problems were run separately, with `--problems small --draws 3000` and
`--problems tall --draws 100 --rounds 3`. ESS is the smallest effective sample size over
the coordinates.""",
    "double_well": """## The double well

`python -m benchmarks.stochastic_gradient.double_well`. The energy is
`(x + 4)(x + 1)(x - 1)(x - 3) / 14 + 0.5`, with gradient noise of variance one. A draw
has ten steps, with friction 0.5 (the paper's beta is half of it); 16 chains start from
the target. The error is the symmetric Kullback-Leibler divergence from the exact
distribution over 86 bins of equal probability; independent draws would have 0.00085.
Its standard error is by a jackknife over chains. AMAGOLD's error comes from the finite
number of draws, and at small steps from few visits to each well. SGHMC's error grows
with the step size, because the gradient noise raises the temperature by
`h V / (2 friction)`. The last column is the acceptance rate of the irreversible
AMAGOLD.""",
    "logistic": """## Australian and Heart

`python -m benchmarks.stochastic_gradient.logistic --draws 10000 --full-draws 2000
--reference-draws 5000`. The model is a Bayesian logistic regression (standard normal
prior, standardised columns and an intercept), as in figure 4 of the AMAGOLD paper.
Batches have 32 of 690 rows and 16 of 270. A draw has ten steps, with friction 10; eight
chains start from the posterior. L2MC is AMAGOLD with all rows, and HMC is the same
without friction and with new momenta for each draw; both make fewer draws. The step
size is the paper's epsilon, and `h` in its second parametrisation is the step size
squared. MSE is the squared error of one chain's estimate, averaged over coordinates and
chains, with the standard error over chains; with longer chains it decreases to the
squared bias. Gradient noise mainly affects standard deviations; the ratio of the pooled
standard deviation to the true one shows by how much.

At the smallest step sizes no chain has moved far enough. At large ones the acceptance
rate of AMAGOLD on minibatches collapses, because its test corrects for the noise of ten
gradients, while SGHMC keeps moving at too high a temperature. In the paper's figure the
error of the mean is smaller for AMAGOLD than for SGHMC; this is not reproduced here.
The chains have 10,000 draws instead of five million, so the error of the mean is mostly
Monte Carlo error, and SGHMC has less of it because it rejects nothing. SGHMC's bias is
in the standard deviation: AMAGOLD's ratio of standard deviations stays at one as long
as moves are accepted, while SGHMC's increases with the step size. With all rows, steps
can be ten or more times as long. Acceptance at the paper's larger step sizes is limited
by the noise of the batches, not by the scale of the posterior. `stuck` means that too
few moves were accepted to estimate a standard deviation.""",
    "bias": """## Bias on a conjugate model

`python -m benchmarks.stochastic_gradient.bias --draws 1000`. The table compares the
ratio of the variance of the draws to the exact variance with its leading order in the
step size, for the mean of 200 normal rows in ten dimensions. For SGLD the formula is
exact on this model. For SGHMC (BAOAB) and SGNHT it is the first term of an expansion.
Measured and predicted values diverge once the product of step size and friction is no
longer small; for SGNHT, the friction is the `h V / (2 T)` with which the thermostat
removes the heat of the gradient noise. SGNHT's variance even becomes too small once the
noise of a single kick, with variance `h ** 2 * V`, exceeds the variance of the
momentum, `T`: with batches of 10, `V` is 19, and `h ** 2 * V` at a step size of 0.3 is
1.7.""",
}
DRAWN = {"double_well": draw_double_well, "logistic": draw_logistic}


def _machine(machine: dict[str, Any]) -> str:
    names = ("python", "jax", "numpyro", "blackjax")
    versions = ", ".join(f"{n} {machine[n]}" for n in names if n in machine)
    load = machine["load_average"]
    return f"{machine['cores']} cores, {versions}; load {load:.0f} when it ended."


def main() -> None:
    parts = [
        "# Stochastic gradients: speed and bias\n\nWritten by `python -m "
        "benchmarks.stochastic_gradient.report` from the results of the\ncommands "
        "below. Everything is in single precision, on a virtual machine with two "
        "x86-64\ncores that were shared with other work. Compare methods within a "
        "table, not numbers\nacross machines. A load above two means that processes "
        "waited for a core."
    ]
    for name, table in TABLES.items():
        try:
            results = load(name)
        except FileNotFoundError:
            continue
        parts.append(TEXTS[name])
        if name in FIGURES:
            path = DOCS / FIGURES[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            DRAWN[name](results, path)
            parts.append(f"```{{image}} {FIGURES[name]}\n:alt: {name}\n```")
        parts += [table(results), _machine(results["machine"])]
    (DOCS / PAGE).write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
