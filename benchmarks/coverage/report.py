"""Write the page of the recorded results: python -m benchmarks.coverage.report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.coverage.families import FAMILIES

from .calibration import COPIES
from .record import load

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-coverage.md"
OTHER_SEEDS = (7, 11)  # of other data
QUANTITIES = {"mean": "mean", "sd": "sd", "q5": "5%", "q95": "95%"}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def overview(families: dict[str, Any]) -> str:
    """Misses of each kind of interval, over all families."""
    rows = []
    kernels = list(dict.fromkeys(k for found in families.values() for k in found))
    for kernel in kernels:
        found = [f[kernel] for f in families.values() if kernel in f]
        ran = [run for run in found if "refused" not in run]
        for level in ("0.5", "0.9", "0.95"):
            cells = []
            for quantity in QUANTITIES:
                shares = np.array([run["misses"][quantity][level] for run in ran])
                error = np.sqrt((shares[:, 1] ** 2).sum()) / len(shares)
                cells.append(f"{_percent(shares[:, 0].mean())} ± {100 * error:.1f}")
            name = f"{kernel}, {len(ran)} of {len(found)} families"
            rows.append([name, _percent(float(level)), *cells])
    return _table(["kernel", "interval", *QUANTITIES.values()], rows)


def details(families: dict[str, Any], kernel: str) -> str:
    """One row for each family."""
    rows = []
    for name, family in FAMILIES.items():
        found = families.get(name, {}).get(kernel)
        if found is None:
            continue
        if "refused" in found:
            rows.append([family.words, "refused", *[""] * 8])
            continue
        skewness = max((p["skewness"] for p in found["truth"].values()), key=abs)
        ratios = [
            max(
                said / true
                for said, true in zip(
                    found["said_ess"][key], found["true_ess"][key], strict=True
                )
            )
            for key in ("mean", "sd")
        ]
        rows.append(
            [
                family.words,
                f"{skewness:.1f}",
                *(_percent(found["misses"][q]["0.95"][0]) for q in QUANTITIES),
                f"{min(found['true_ess']['mean']):.0f}",
                *(f"{ratio:.2f}" for ratio in ratios),
                _percent(found["with_advice"]),
            ]
        )
    head = ["posterior", "skewness", *QUANTITIES.values(), "true ESS"]
    return _table([*head, "reported / true, means", "squares", "with advice"], rows)


def refusals(families: dict[str, Any]) -> str:
    """The messages of kernels that refused a family."""
    lines = [
        f"- {FAMILIES[name].words}: `{' '.join(found['refused'].split())}`"
        for name, kernels in families.items()
        for found in kernels.values()
        if "refused" in found
    ]
    return "\n".join(lines) or "None."


def advice(families: dict[str, Any]) -> str:
    """The advice of the runs, without numbers."""
    lines = [
        f"- {FAMILIES[name].words}, {kernel}, {_percent(found['with_advice'])} of the "
        f"runs: {'; '.join(found['advice'])}"
        for name, kernels in families.items()
        for kernel, found in kernels.items()
        if found.get("advice")
    ]
    return "\n".join(lines) or "None."


def calibration(results: dict[str, Any]) -> str:
    """Histograms of ranks, one of each parameter."""
    rows = [
        [
            kernel,
            found["words"],
            name.split(", ")[1],
            str(sum(found["counts"])),
            " ".join(str(count) for count in found["counts"]),
            f"{found['probability']:.2f}",
        ]
        for kernel, problems in results["kernels"].items()
        for name, found in problems.items()
    ]
    head = ["kernel", "posterior", "parameter", "ranks", "ranks in each tenth"]
    return _table([*head, "probability of a larger chi-squared"], rows)


def page(
    results: dict[str, Any], others: dict[int, dict[str, Any]], ranks: dict[str, Any]
) -> str:
    """The page.

    :param results: of the study of coverage.
    :param others: of the same study on other data, by seed.
    :param ranks: of simulation-based calibration.
    """
    families = results["families"]
    runs = max(
        found.get("runs", 0)
        for kernels in families.values()
        for found in kernels.values()
    )
    parts = [
        INTRODUCTION.format(runs=runs, families=len(families)),
        "## All families\n\n" + overview(families),
    ]
    for kernel in ("MinibatchMH", "AMAGOLD", "NUTS"):
        parts.append(f"## {kernel}\n\n" + details(families, kernel))
    for seed, other in others.items():
        title = f"## MinibatchMH, other data (`--seed {seed}`)\n\n"
        parts.append(title + details(other["families"], "MinibatchMH"))
    if ranks:
        first = next(iter(next(iter(ranks["kernels"].values())).values()))
        sets = sum(first["counts"]) // COPIES
        parts.append(CALIBRATION.format(sets=sets) + calibration(ranks))
    parts.append("## Refusals\n\n" + refusals(families))
    parts.append("## Advice\n\n" + advice(families))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Coverage of reported errors

These simulations check the numbers that a run reports on posteriors that are skewed,
have heavy tails or lie at a bound. Each family below has one or two parameters whose
posterior mean, standard deviation and 5% and 95% quantiles are known by quadrature. A
user run consists of four chains of 1,000 + 1,000 draws at default settings, from the
default start. Its estimates and Monte Carlo errors are those of
`diagnose(...).precision`. An interval misses if it does not contain the truth. If the
errors are right, 50%, 10% and 5% of the intervals of level 50%, 90% and 95% miss.

There are {families} families. MinibatchMH ran {runs} times on each of three data sets
of a family, AMAGOLD and NUTS 100 times on the first one. A share of 5% in one family
therefore has a standard error of 1.5 or two percentage points. The standard errors of
the shares over all families come from the scatter between runs. The **true ESS** is
that of four chains. It is computed from the squared errors of the means of all chains
about the truth, with a relative error of about 7%, and more where rare excursions into
a heavy tail contribute most of it. **Reported / true** is the median ESS that runs
reported, divided by the true ESS, for the parameter for which it is largest.

Written by `python -m benchmarks.coverage.report`. `python -m benchmarks.coverage` makes
the results; `--runs`, `--families`, `--kernels` and `--seed` choose among them. The
kernels are `MinibatchMH(model, control_variate="taylor2")`, `AMAGOLD(model)` and
NumPyro's `NUTS(model)`. NumPyro's result has fewer statistics, so some advice cannot be
given for NUTS. Families without a row in a table have no result yet.

For MinibatchMH, 4 to 6% of the intervals of level 95% miss over all families, in each
of three data sets. Of the 276 single shares, three are above 8%: 9.2% for the 95%
quantiles of the hierarchy and 8.5% for the 5% quantiles of five normal rows, both on
the first data set, and 8.5% for gamma shapes on the second one. With 200 runs, about
four would be by chance if every share were 5%. At most 1.5% of the runs of a family
give advice. Reported effective sample sizes are at most 1.25 times the true ones.
Coordinates are fitted to gradients, and also where no draw is (decisions
[58](decisions/0058-coordinates-that-hold-where-no-draw-is.md) to
[60](decisions/0060-fits-that-begin-near-their-solution.md)). So this includes the
hierarchy of five groups, whose standard deviation between groups has draws up to 29
standard deviations from the mean in 1,200 chains. The true effective sample sizes of
its squares are 2,800 to 3,040 in place of 750 to 950 for the mean of the groups, and
2,640 to 2,810 in place of 1,500 for their standard deviation.

Before errors of quantiles came from order statistics farther apart, their intervals
missed in 5.2 to 6.7% of 100 runs over all families. Before trajectories used
coordinates whose scales vary less ([decision
51](decisions/0051-trajectories-in-coordinates-whose-scales-vary.md)), the ratio was up
to 4 for the hierarchy and 2.4 for the five normal rows. With one or two parameters,
more of the moves are independent draws since [decision
56](decisions/0056-trajectories-that-follow-curves.md); before, the ratio was up to 1.57
for the scale of normal rows and for the Student-t location. Intervals of means are too
wide where trajectories make successive draws negatively correlated. Three families were
added when they were found to fail. Before [decision
53](decisions/0053-rows-that-matter-only-in-the-tails.md), the ratio for the Poisson
regression was 3.1 on the first data, with advice in 30% of the runs, and 16% of the
runs of the logistic regression with heavy covariates had advice. The scale of the
censored rows has a kurtosis of 55,000 (690,000 on other data), so that draws hardly
determine its standard deviation. Most runs say that its error is infinite, and such an
interval does not miss. On the third data its tail is lighter (a skewness of 32), and
most runs state an error. In 300 other runs, 24% of its intervals missed before the
errors included what draws beyond the largest one would contribute, and 8% afterwards.
Errors of means allow for such a tail as well. Of 200 runs on the first data, 10.5% of
the intervals for the mean of this scale missed before, and 7% do now.

At these lengths the hierarchy is too hard for AMAGOLD and NUTS, and nearly all of
their runs give advice: large standard deviations of the groups are visited too
rarely. On the other families at most 10% of AMAGOLD's intervals miss, and 11% for
the standard deviations of the Cauchy location and of the five normal rows, where the
ratios are 2.0 and 3.9; it is 2.5 for structural zeros and up to 1.5 elsewhere. In
one of eight draws its steps are a third of the adapted size ([decision
34](decisions/0034-some-trajectories-take-shorter-steps.md)). Without these draws,
14% of the intervals for a quantile of the gamma family missed, and reported
effective sample sizes of squares were 2.4 times the true ones. Chains share the
random lengths of AMAGOLD's trajectories, so its true ESS is conditional on them. In
all runs of NUTS on the Poisson regression some trajectories diverge; its intervals
are right."""

CALIBRATION = """## Simulation-based calibration

A parameter is drawn from the prior, data are drawn given it, and the kernel draws from
the posterior. If the kernel is exact, the parameter's rank among these draws is uniform
([Talts and others, 2018](https://arxiv.org/abs/1804.06788)). A model has twelve
independent copies of a small problem and runs on {sets} simulated data sets, in one
chain from the default start. MinibatchMH has a control variate and reads batches of
4,000 to 8,000 rows; AMAGOLD reads all of 20 to 40 rows; MINT and MHMinibatch sample a
likelihood at temperature 50 from batches of 100 of 2,000 rows, whose data are simulated
from its power 1 / 50. `python -m benchmarks.coverage.calibration` makes the results,
and a test in `make verify` repeats one of them and checks that a wrong prior fails.

"""


def main() -> None:
    """Write the page."""
    others = {seed: load(f"coverage_seed_{seed}") for seed in OTHER_SEEDS}
    PAGE.write_text(page(load("coverage"), others, load("calibration")))


if __name__ == "__main__":
    main()
