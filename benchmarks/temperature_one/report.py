"""Write the tables, including README's, and the figure from the results.

python -m benchmarks.temperature_one.report
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from .methods import MODULES
from .problems import PROBLEMS

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[2] / "docs"
Key = tuple[str, str, int]
CHAINS = (1, 4)
EARLIER = "\N{DAGGER}"  # after a bias from another reference
LOWEST = 0.003  # bias at the left end of the figure
COLOURS = {
    "nuts": "#000000",
    "hmcecs": "#0072B2",
    "ours": "#009E73",
    "blackjax": "#CC79A7",
    "sgmcmcjax": "#D55E00",
    "jax_sgmc": "#E69F00",
}
MARKERS = {
    "nuts": "o",
    "hmcecs": "sDp",
    "ours": "*P",
    "blackjax": "^v<>",
    "sgmcmcjax": "X8",
    "jax_sgmc": "dh",
}
PAGE, FIGURE = "benchmarks-temperature-one.md", "_static/temperature_one.png"

INTRODUCTION = f"""# Temperature one: speed and bias

Written by `python -m benchmarks.temperature_one.report` from the results of
`python -m benchmarks.temperature_one --all`. Every method runs in a separate process,
on the same data and in single precision, with one chain or with four chains vectorised
in one program (`--chains 4`), as users run them to compute R-hat. Not every method was
run on all data sets. With 10,000, 2 million and 10 million rows and on the larger
centred hierarchy there are only NUTS and MinibatchMH. Among the samplers without an
accept/reject step, SGHMC and the samplers of jax-sgmc were run only on the simulated
data with 200,000 rows; none was run on a9a, the centred hierarchies and the data with
500 rows.

`--method` and `--data` select methods and data sets, `--seconds` sets the sampling time
of a method (the result files state the time taken), and `--blackjax PYTHON` and
`--old PYTHON` name interpreters of environments with the other packages
(`benchmarks/temperature_one/envs/`).

Every speed is reported together with a bias. Sampling the wrong distribution can be
fast: a method that returns the normal approximation at the mode accepts every proposal.

- **ESS/s**: the smallest bulk effective sample size of the reported quantities, per
  second of sampling. Set-up, compilation and warmup are excluded; they are included in
  **to first draw**.
- **to NUTS**: the ratio to the ESS/s of NUTS with the covariance of the Laplace
  approximation as its mass matrix. Methods with one chain are compared with one chain
  of NUTS, those with four chains with the faster of one and four chains, if both were
  run.
- **bias**: the largest error of a posterior mean, in posterior standard deviations of a
  reference, which is the same for all methods of a problem. **noise** is the largest
  Monte Carlo standard error of those means, without the error of the reference, which
  stands above each table. With 20 quantities, an exact method is expected to have a
  bias of about two and a half times both errors together.
- **accepted**: the fraction of accepted moves, or the mean acceptance probability. It
  does not indicate bias: HMCECS accepts nearly all moves on the data in which its
  batches miss the important rows.
- **sd ratio**: the smallest and the largest ratio of a standard deviation to that of
  the reference.
- **load**: the machine's load average at the start and end of the run. The machine has
  two cores; with a load above two, a run shared them with other processes, and its
  speed is underestimated. The rows of NUTS and MinibatchMH with four chains were
  measured last, in November 2026, and so was MinibatchMH with one chain on the
  non-centred hierarchies; other rows are older. On a9a and the centred hierarchies,
  MinibatchMH then had trajectories three times as long as those of the present version.
  A dagger marks a bias from another run of the reference.

The stochastic gradient samplers have no accept/reject step, so their step size
determines their bias. All of them use the largest step size for which standard
deviations should be at most 3 percent too large, in coordinates whitened by the Laplace
approximation (`tuning.py`). CV means control variates at the mode.

More than four chains, on devices with one thread each, use the machine better; the
first two tables show such runs. Two runs with the same settings differ by 20 to 40
percent on these cores.

`kernel.pilot["sizes"]` gives the number of rows that MinibatchMH reads per
accept/reject step, and ESS/row the effective draws per row read. With fewer than a
thousand rows it reads all of them, as NUTS does; a draw is then a trajectory whose
length does not depend on its course, without a tree to build. Where a site has a wide
tail, trajectories take three times as many steps ([decision
37](decisions/0037-wide-tails-are-those-of-sites.md)); these hierarchies have none.

```{{image}} {FIGURE}
:alt: ESS per second against bias, a panel for each problem
```
"""


def read(folder: Path) -> dict[Key, dict[str, Any]]:
    """The results by problem, method and number of chains."""
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {(r["data"], r["method"], r.get("chains", 1)): r for r in results}


def number(value: float) -> str:
    """Three figures, without an exponent above one hundredth."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def same(one: dict[str, Any], other: dict[str, Any] | None) -> bool:
    """Whether two references are the same computation on the same draws."""
    return other is not None and np.isclose(one["ess"], other["ess"], rtol=1e-6)


def between(low: float, high: float, form: str) -> str:
    """A range with a hyphen at which a narrow column does not break."""
    return f"{low:{form}}\N{NON-BREAKING HYPHEN}{high:{form}}"


def row(
    result: dict[str, Any], nuts: float | None, reference: dict[str, Any] | None
) -> str:
    """One line of a table.

    :param result: of one method.
    :param nuts: the ESS/s of NUTS.
    :param reference: that of the table.
    """
    title = MODULES[result["method"]].title
    if result.get("chains", 1) > 1:
        title += f", {result['chains']} chains"
    if "failed" in result:
        return f"| {title} | failed: {result['failed'][:60]} |||||||||"
    seconds = result["seconds"]
    first = seconds["setup"] + seconds["compile"] + seconds["warmup"]
    ratio = "" if not nuts else number(result["ess_per_second"] / nuts)
    accept = result.get("accept")
    accepted = "" if accept is None else f"{accept:.3g}"
    earlier = "" if same(result["reference"], reference) else EARLIER
    return (
        f"| {title} | {number(result['ess_per_second'])} | {ratio} "
        f"| {result['ess_per_row']:.1e} | {accepted} "
        f"| {result['bias']:.3f}{earlier} | {result['bias_noise']:.3f} "
        f"| {between(*result['sd_ratio'], '.2f')} "
        f"| {first:.0f} s | {between(*result['load_average'], '.0f')} |"
    )


def page(results: dict[Key, dict[str, Any]], side_by_side_tables: list[str]) -> str:
    """The page of the documentation."""
    lines = [INTRODUCTION, *side_by_side_tables]
    for name, problem in PROBLEMS.items():
        keys = [(name, m, c) for m in MODULES for c in CHAINS]
        found = [results[key] for key in keys if key in results]
        if not found:
            continue
        speeds = [
            results.get((name, "nuts", c), {}).get("ess_per_second", 0.0)
            for c in CHAINS
        ]
        nuts = {1: speeds[0], 4: max(speeds)}
        lines += ["", f"## {problem.title}", ""]
        references = [r["reference"] for r in found if "reference" in r]
        # the latest one states its errors
        references.sort(key=lambda r: "errors" not in r)
        reference = references[0] if references else None
        if reference:
            text = f"Reference: {reference['how']}, ESS {number(reference['ess'])}."
            if "errors" in reference:
                means, sds = reference["errors"]
                text += (
                    f" Its largest Monte Carlo standard errors: {means:.4f} standard "
                    f"deviations for means and {sds:.2%} for standard deviations."
                )
            if reference["laplace_bias"] is not None:
                text += (
                    " The Laplace approximation itself has bias "
                    f"{reference['laplace_bias']:.3f}."
                )
            lines += [text, ""]
        lines += [
            "| method | ESS/s | to NUTS | ESS/row | accepted | bias | noise | sd ratio "
            "| to first draw | load |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [row(r, nuts[r.get("chains", 1)], reference) for r in found]
    return "\n".join(lines) + "\n"


SIDE_BY_SIDE = """
## The fastest settings on two cores

This table compares methods on two cores, each with the number of chains and devices
that suits it best: `python -m benchmarks.temperature_one.side_by_side --data NAME`. One
run of this command measures all settings of all methods for a problem, one after the
other, with {py:func}`~numpyro_minibatch.sample`; only sampling is timed. The table
shows the fastest setting of each method. [Threads](performance.md#threads) lists all
settings for the simulated data, and describes how to set up devices with one thread.
Successive draws of NUTS, of HMCECS and, on a normal surrogate, of MinibatchMH are
negatively correlated, which makes means more precise. **by tails** is the ratio of the
smallest tail effective sample sizes per second, those of the 5% and 95% quantiles.

On a9a, the rare column and both hierarchies MinibatchMH was measured again in November
2026 with the present references, on the first two with trajectories that were three
times as long as those of the present version. So was NUTS on the hierarchies.
Everything else in these two tables is from an earlier run, and on these four problems
its bias is from the earlier reference.

| data | MinibatchMH | chains | bias | noise | sd ratio | NUTS | chains | ratio \
| by tails |
|---|---|---|---|---|---|---|---|---|---|"""

RIVAL = """
The same comparison with HMCECS with its Taylor proxy (batches of 100 rows, the mass
matrix of the Laplace approximation). A bias many times its noise means that it samples
another distribution.

| data | MinibatchMH | HMCECS | chains | bias | noise | sd ratio | ratio | by tails |
|---|---|---|---|---|---|---|---|---|"""


def fastest(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The fastest setting of each method, by problem."""
    best = {}
    for name in PROBLEMS:
        path = folder / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("ours") and found.get("nuts"):
            best[name] = {
                method: max(settings, key=lambda r: r["ess_per_second"])
                for method, settings in found.items()
                if settings
            }
    return best


def ratio(found: dict[str, dict[str, Any]], method: str) -> str:
    """How many times as fast as a method ours is."""
    return number(found["ours"]["ess_per_second"] / found[method]["ess_per_second"])


def tails(found: dict[str, dict[str, Any]], method: str) -> str:
    """The same of the tails, where both have them."""
    both = [found["ours"], found[method]]
    if any("ess_tail" not in result for result in both):
        return ""
    ours, other = (r["ess_per_second"] * r["ess_tail"] / r["ess"] for r in both)
    return number(ours / other)


def side_by_side(best: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """A table of each method on each problem, and one of HMCECS."""
    lines, rivals = [], []
    for name, found in best.items():
        ours, nuts, title = found["ours"], found["nuts"], PROBLEMS[name].title
        lines.append(
            f"| {title} | {number(ours['ess_per_second'])} | {ours['chains']} "
            f"| {ours['bias']:.3f} | {ours['bias_noise']:.3f} "
            f"| {between(*ours['sd_ratio'], '.2f')} "
            f"| {number(nuts['ess_per_second'])} | {nuts['chains']} "
            f"| {ratio(found, 'nuts')} | {tails(found, 'nuts')} |"
        )
        if "hmcecs" in found:
            rival = found["hmcecs"]
            rivals.append(
                f"| {title} | {number(ours['ess_per_second'])} "
                f"| {number(rival['ess_per_second'])} | {rival['chains']} "
                f"| {rival['bias']:.3f} | {rival['bias_noise']:.3f} "
                f"| {between(*rival['sd_ratio'], '.2f')} | {ratio(found, 'hmcecs')} "
                f"| {tails(found, 'hmcecs')} |"
            )
    if not lines:
        return []
    return [SIDE_BY_SIDE, *lines, *([RIVAL, *rivals] if rivals else [])]


MEASURED = "<!-- measured -->\n", "<!-- end of measured -->"


def measured(best: dict[str, dict[str, dict[str, Any]]]) -> str:
    """README's table."""

    def cell(result: dict[str, Any] | None) -> str:
        if result is None:
            return ""
        return f"{number(result['ess_per_second'])} ({result['bias']:.3f})"

    lines = [
        "| | NUTS | HMCECS, Taylor | MinibatchMH | |",
        "|---|---|---|---|---|",
    ]
    for name, found in best.items():
        cells = [cell(found.get(method)) for method in ("nuts", "hmcecs", "ours")]
        lines.append(
            f"| {PROBLEMS[name].title} | {' | '.join(cells)} | {ratio(found, 'nuts')} |"
        )
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    """README with this table in the place of its own."""
    before, rest = text.split(MEASURED[0])
    return before + MEASURED[0] + table + MEASURED[1] + rest.split(MEASURED[1])[1]


def style(method: str) -> dict[str, Any]:
    """A colour for a package and a marker for a method, distinct in grey too."""
    package = next(p for p in COLOURS if method.startswith(p))
    members = [m for m in MODULES if m.startswith(package)]
    shape = MARKERS[package][members.index(method) % len(MARKERS[package])]
    size = 13 if shape == "*" else 7
    return {"color": COLOURS[package], "marker": shape, "markersize": size}


def figure(results: dict[Key, dict[str, Any]], path: Path) -> None:
    """ESS per second against bias, a panel for each problem."""
    names = [n for n in PROBLEMS if any(key[0] == n for key in results)]
    columns = min(2, len(names))
    height = -(-len(names) // columns)
    fig, axes = plt.subplots(
        *(height, columns),
        figsize=(5 * columns, 3 * height + 1.3),
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes.flat, names, strict=False):
        shown = [(m, c) for m in MODULES for c in CHAINS]
        for method, chains in shown:
            result = results.get((name, method, chains), {"failed": ""})
            if "failed" in result:
                continue
            axis.errorbar(
                min(max(result["bias"], 1.1 * LOWEST), 0.9),  # stay inside the axes
                result["ess_per_second"],
                xerr=result["bias_noise"],
                fillstyle="full" if chains == 1 else "none",
                label=MODULES[method].title + ("" if chains == 1 else ", 4 chains"),
                **style(method),
            )
        axis.set(xscale="log", yscale="log")
        axis.set_title(PROBLEMS[name].title, fontsize=11)
        axis.set_xlim(LOWEST, 1.0)
        low, high = axis.get_ylim()  # whole decades, so that there is always a label
        axis.set_ylim(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high)))
        axis.set_xlabel("largest bias (posterior sd)")
        axis.set_ylabel("ESS per second")
        axis.grid(color="0.9")
        axis.set_axisbelow(True)
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    labels: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    fig.legend(
        *(list(labels.values()), list(labels)),
        loc="outside lower center",
        ncols=columns,
        fontsize=10,
        title="top left is best; bars: Monte Carlo standard error of the bias",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    results, best = read(options.results), fastest(options.results / "side_by_side")
    (options.docs / PAGE).write_text(page(results, side_by_side(best)))
    readme = options.docs.parent / "README.md"
    readme.write_text(with_table(readme.read_text(), measured(best)))
    figure(results, options.docs / FIGURE)
    print(options.docs / PAGE)


if __name__ == "__main__":
    main()
