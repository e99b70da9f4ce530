"""The gallery's examples of `marginalize` against independent references.

Each example is sampled by `MinibatchMH(marginalize(model))` at a size that NUTS can do.
The parameters are compared with weighted draws of the model without latent variables,
written by hand with a dense grid in double precision, and the latent variables of 100
rows with NUTS on the model with its continuous latent variables. Discrete ones, which
NUTS cannot sample, are summed by hand there. Models and data are those of `examples/`.

    python benchmarks/marginal_references.py --only item_response

Results: `--out benchmarks/results/marginal_references.md`. With ``--only``,
the other lines of an existing file are kept.
"""

from __future__ import annotations

import argparse
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from importance import Weighted, importance_sample
from marginal_cases import CASES, SOME, Case, Draws
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from tables import fill

from numpyro_minibatch import (
    MinibatchMH,
    marginalize,
    recover_marginals,
    to_inference_data,
)
from numpyro_minibatch.marginal import quadrature_error

BLOCKS = 100  # of the draws of each side, for the correlations between errors


def run(kernel: Any, case: Case, warmup: int, draws: int, thin: int, seed: int) -> Any:
    """Four vectorised chains, and the processor time in seconds."""
    begin = time.process_time()
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=4,
        thinning=thin,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *case.args, **case.kwargs)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.process_time() - begin


class Moment(NamedTuple):
    """Mean and log standard deviation of each number, with Monte Carlo errors.

    :param parts: the contributions of blocks of draws to the errors of all means, in
        standard deviations, and of all log standard deviations: their sum is zero, and
        that of their squares the square of an error, up to noise.
    """

    mean: np.ndarray
    mean_error: np.ndarray
    log_sd: np.ndarray
    log_sd_error: np.ndarray
    ess: np.ndarray
    parts: np.ndarray


def influence(x: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """What each draw contributes to means, in sds, and to log sds, in the last axis."""
    away = (x - mean) / np.sqrt(var)
    return np.concatenate([away, 0.5 * (away**2 - 1)], -1)


def moments(draws: np.ndarray) -> Moment:
    """Of draws with chains and draws in front."""
    x = np.asarray(draws, float).reshape(*draws.shape[:2], -1)
    mean, var = x.mean((0, 1)), x.var((0, 1))
    squares = (x - mean) ** 2
    most = x.shape[0] * x.shape[1]
    of_mean, of_square = (
        np.minimum(effective_sample_size(v), most) for v in (x, squares)
    )
    # blocks are long beside the autocorrelation times
    blocks = np.array_split(influence(x, mean, var), BLOCKS // len(x), axis=1)
    parts = np.concatenate([block.sum(1) for block in blocks]) / most
    return Moment(
        mean,
        np.sqrt(var / of_mean),
        0.5 * np.log(var),
        0.5 * np.sqrt(squares.var((0, 1)) / of_square) / var,
        np.minimum(of_mean, of_square),
        parts,
    )


def weighted_moments(draws: Weighted) -> Moment:
    """Of independent draws with weights."""
    parts = [x.reshape(len(x), -1) for x in draws.values.values()]
    x, w = np.concatenate(parts, -1), draws.weights[:, None]
    mean = (w * x).sum(0)
    squares = (x - mean) ** 2
    var = (w * squares).sum(0)
    of_mean = (w**2 * squares).sum(0)
    of_var = (w**2 * (squares - var) ** 2).sum(0)
    blocks = np.array_split(w * influence(x, mean, var), BLOCKS)
    return Moment(
        mean,
        np.sqrt(of_mean),
        0.5 * np.log(var),
        0.5 * np.sqrt(of_var) / var,
        np.full(len(mean), draws.ess),
        np.stack([block.sum(0) for block in blocks]),
    )


def rms(x: np.ndarray) -> float:
    """The root mean square."""
    return float(np.sqrt(np.mean(x**2)))


class Compared(NamedTuple):
    """Differences from the reference, in its standard deviations, and their errors.

    :param parts: the contributions of blocks of draws of both sides to the errors.
    """

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray
    parts: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, one: Moment, other: Moment) -> Compared:
        """Ours first, then the reference."""
        scale = np.exp(other.log_sd)
        return cls(
            (one.mean - other.mean) / scale,
            np.hypot(one.mean_error, other.mean_error) / scale,
            one.log_sd - other.log_sd,
            np.hypot(one.log_sd_error, other.log_sd_error),
            (one.parts, other.parts),
        )

    def by_chance(self) -> tuple[float, float]:
        """The 95% quantiles of the root mean square of z and of its largest size.

        Both are those of Monte Carlo errors alone: random multiples of the blocks'
        contributions have the correlations between the numbers, which can be functions
        of few parameters. Then the root mean square of z is far from one more often.
        """
        rng = np.random.default_rng(0)
        error = np.concatenate([self.mean_error, self.sd_error])
        z = sum(rng.normal(size=(4000, len(p))) @ (p - p.mean(0)) for p in self.parts)
        z = z / error
        both = np.sqrt(np.mean(z**2, 1)), np.abs(z).max(1)
        return float(np.quantile(both[0], 0.95)), float(np.quantile(both[1], 0.95))

    def cells(self) -> list[str]:
        """Root mean square, that of the Monte Carlo errors, and the largest."""
        usual, usual_largest = self.by_chance()
        scores = np.concatenate([self.mean / self.mean_error, self.sd / self.sd_error])
        return [
            f"{rms(self.mean):.3f} ({rms(self.mean_error):.3f})",
            f"{np.abs(self.mean).max():.3f}",
            f"{rms(self.sd):.2%} ({rms(self.sd_error):.2%})",
            f"{np.abs(self.sd).max():.1%}",
            f"{rms(scores):.2f} ({usual:.2f})",
            f"{np.abs(scores).max():.1f} ({usual_largest:.1f})",
        ]


def numbers(found: Draws, names: Any) -> np.ndarray:
    """All numbers of some sites along one axis."""
    parts = [np.asarray(found[n]) for n in names]
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], -1)


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """Two lines of the table: parameters and latent variables."""
    case = CASES[name]()
    marginal = marginalize(case.model)
    kernel = MinibatchMH(
        marginal,
        control_variate="taylor2",
        init_strategy=case.start,
        **case.settings,
    )
    ours, seconds = run(kernel, case, 300, options.draws, 1, 0)
    print(f"{name}: {seconds:.0f} s of processor time", flush=True)
    idata = to_inference_data(ours, constant_data=False)
    mine = numbers({n: idata["posterior"][n].values for n in case.names}, case.names)

    begin = time.process_time()
    weighted = importance_sample(
        case.by_hand,
        case.args,
        case.kwargs,
        case.names,
        case.start,
        options.weighted_draws,
    )
    print(
        f"weights: {weighted.ess:,.0f} of {len(weighted.weights):,} draws, Pareto "
        f"shape {weighted.shape:.2f}; {time.process_time() - begin:.0f} s",
        flush=True,
    )
    parameters = moments(mine), weighted_moments(weighted)

    nuts = NUTS(case.whole, init_strategy=case.start)
    theirs, nuts_seconds = run(nuts, case, 500, options.nuts_draws, 1, 1)
    wanted = case.latent(theirs.get_samples(group_by_chain=True))
    thin = idata.sel(draw=slice(None, None, options.thin))
    full = recover_marginals(
        marginal,
        thin,
        *case.args,
        rows=SOME,
        key=jax.random.key(2),
        probabilities=True,
        **case.kwargs,
    )
    found = {n: full["posterior"][n].values for n in wanted}
    for n, values in wanted.items():
        if found[n].ndim > values.ndim:  # of two states the probability of the second
            found[n] = found[n][..., 1]
        if found[n].ndim > values.ndim:  # of all steps the last one
            found[n] = found[n][..., -1]
    pair = numbers(found, wanted), numbers(wanted, wanted)
    varies = pair[1].std((0, 1)) > 1e-6  # not the states that are certain
    latent = moments(pair[0][..., varies]), moments(pair[1][..., varies])

    lines = []
    times = (f"{seconds:.0f}", f"{nuts_seconds:.0f}", quadrature(case, idata))
    for what, (a, b) in (("parameters", parameters), ("latent", latent)):
        cells = [
            name,
            case.about if what == "parameters" else "",
            what,
            str(len(a.mean)),
            f"{a.ess.min():,.0f}",
            f"{b.ess.min():,.0f}",
            *Compared.of(a, b).cells(),
            *(times if what == "parameters" else ("", "", "")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines), flush=True)
    return lines


def quadrature(case: Case, idata: Any) -> str:
    """The largest error of a row's log likelihood at draws of the run."""
    try:
        found = quadrature_error(
            marginalize(case.model), idata, *case.args, **case.kwargs
        )
    except ValueError:  # no continuous sites
        return "exact"
    return f"{found.largest:.0e}"


HEADER = """# The examples of `marginalize` against independent references

`python benchmarks/marginal_references.py`; jax {jax}, Python {python}. Four
vectorised chains. Parameters are compared with weighted draws (importance sampling) of
a model without latent variables that is written by hand, with sums over the discrete
ones and a dense grid of the continuous ones, in double precision. Latent variables of
100 rows are compared with four chains of NUTS on the model with its continuous latent
variables, where discrete ones are summed by hand: draws of continuous ones, conditional
probabilities of the states of discrete ones (draws of them in rows with continuous ones
too), where they are not certain. Differences of means are in standard deviations of the
reference, those of standard deviations are relative: root mean squares over all
numbers, in brackets the root mean square of their Monte Carlo errors, and the largest.
z is a difference over its Monte Carlo error: root mean square and the largest. In
brackets are the values that Monte Carlo errors alone exceed once in twenty runs: many
numbers that are functions of few parameters have nearly the same error, so that the
root mean square is not always close to one. The last column is the largest error of a
row's log likelihood at draws of the run, by `quadrature_error`. Processor seconds
include compilation; other jobs shared the machine's two cores.

"""

COLUMNS = (
    "example",
    "model",
    "numbers of",
    "count",
    "smallest ESS",
    "of the reference",
    "means (error)",
    "largest",
    "sds (error)",
    "largest",
    "z (95% by chance)",
    "largest (95% by chance)",
    "CPU s",
    "of NUTS",
    "quadrature",
)


def main() -> None:
    """Measure the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--draws", type=int, default=20_000, help="of each chain")
    parser.add_argument("--weighted-draws", type=int, default=100_000)
    parser.add_argument("--nuts-draws", type=int, default=8_000, help="of each chain")
    parser.add_argument("--thin", type=int, default=4, help="for the latent variables")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    header = HEADER.format(jax=jax.__version__, python=platform.python_version())
    measured = partial(measure, options=options)
    fill(options.out, header, COLUMNS, CASES, options.only, measured)


if __name__ == "__main__":
    main()
