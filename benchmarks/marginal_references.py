"""The gallery's examples of `marginalize` against long runs of NUTS.

Each example is sampled at a size that NUTS can do, by `MinibatchMH(marginalize(model))`
and by NUTS on the model with its continuous latent variables; discrete ones, which NUTS
cannot sample, are summed by hand there. Models and data are those of `examples/`.

    python benchmarks/marginal_references.py --only item_response

Results: `--out benchmarks/results/marginal_references.md`. With ``--only``,
the other lines of an existing file are kept.
"""

from __future__ import annotations

import argparse
import ast
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_uniform, init_to_value

from numpyro_minibatch import (
    MinibatchMH,
    by_group,
    marginalize,
    recover_marginals,
    to_inference_data,
)

ROOT = Path(__file__).resolve().parents[1]
SOME = np.arange(100)  # rows whose latent variables are compared
Draws = Mapping[str, np.ndarray]  # by name: chains, draws, shape of one


class Case(NamedTuple):
    """An example at the size of its reference.

    :param model: the model of the example.
    :param whole: the model that NUTS samples.
    :param args: the data.
    :param latent: from draws of NUTS to those of a latent variable of the rows, or to
        the probabilities of a state, by the name of ``recover_marginals``.
    :param about: what the line of the table says of model and size.
    """

    model: Callable
    whole: Callable
    args: tuple
    latent: Callable[[Draws], Draws]
    about: str
    kwargs: Mapping[str, Any] = {}
    start: Callable = init_to_uniform
    names: tuple[str, ...] = ()


def example(name: str) -> dict[str, Any]:
    """The functions of an example, without running it."""
    path = ROOT / "examples" / f"{name}.py"
    kinds = ast.Import, ast.ImportFrom, ast.FunctionDef
    body = [x for x in ast.parse(path.read_text()).body if isinstance(x, kinds)]
    found: dict[str, Any] = {}
    exec(compile(ast.Module(body, []), path, "exec"), found)
    return found


def item_response() -> Case:
    """Two-parameter item response, with the abilities in the position of NUTS."""
    there = example("item_response")
    y = jnp.asarray(there["simulate"](600, 12)[0])
    return Case(
        there["model"],
        there["model"],
        (y,),
        lambda found: {"ability": found["ability"][..., SOME]},
        "two-parameter item response, 600 persons, 12 items",
        names=("difficulty", "discrimination"),
    )


def annotators() -> Case:
    """Dawid and Skene's model, with the classes summed by hand."""
    there = example("annotators")
    sizes = {"classes": 3, "annotators": 5}
    item, annotator, label, *_ = there["simulate"](1000, **sizes)
    groups = by_group(item, annotator.astype(np.int32), label.astype(np.int32))
    args = tuple(map(jnp.asarray, (*groups.arrays, groups.mask)))

    def by_class(share: Any, confusion: Any, rows: Any = slice(None)) -> Any:
        who, what, mask = (x[rows] for x in args)
        found = jnp.log(confusion[who, :, what])  # items, labels, classes
        return jnp.log(share) + jnp.where(mask[..., None], found, 0.0).sum(1)

    def whole(*_: Any, classes: int, annotators: int) -> None:
        share = numpyro.sample("share", dist.Dirichlet(2 * jnp.ones(classes)))
        prior = dist.Dirichlet(jnp.ones(classes) + 2 * jnp.eye(classes))
        prior = prior.expand([annotators, classes]).to_event(2)
        confusion = numpyro.sample("confusion", prior)
        total = jax.nn.logsumexp(by_class(share, confusion), -1).sum()
        numpyro.factor("labels", total)

    def latent(found: Draws) -> Draws:
        def one(values: tuple[Any, Any]) -> Any:
            return jax.nn.softmax(by_class(*values, rows=SOME))

        probability = jax.jit(lambda v: jax.lax.map(jax.vmap(one), v))
        values = found["share"], found["confusion"]
        return {"true_class_probability": np.asarray(probability(values))}

    start = {
        "share": np.full(3, 1 / 3),
        "confusion": np.tile(0.15 + 0.55 * np.eye(3), (5, 1, 1)),
    }
    return Case(
        there["model"],
        whole,
        args,
        latent,
        "Dawid-Skene, 1,000 items, 3 classes, 5 annotators",
        sizes,
        init_to_value(values=start),
        ("share", "confusion"),
    )


def species_counts() -> Case:
    """Structural zeros summed by hand, with the effects in the position of NUTS."""
    there = example("species_counts")
    true = [-0.2, 0.4, 0.3]
    X, counts, *_ = there["simulate"](500, np.array([0.3, 0.8, -0.5]), true, 0.7)
    X, counts = jnp.asarray(X), jnp.asarray(counts)

    def by_state(occupancy: Any, abundance: Any, effect: Any, rows: Any) -> Any:
        """Absent and present; up to what both have in common."""
        logits = X[rows] @ occupancy
        eta = X[rows] @ abundance + effect
        found = counts[rows]
        total = found.sum(-1)
        absent = -jax.nn.softplus(logits) + total * jnp.log(1e-6) - 3e-6
        rate = 3 * jnp.exp(eta)
        present = -jax.nn.softplus(-logits) + total * eta - rate
        return jnp.stack([absent, present], -1)

    def whole(X: Any, counts: Any) -> None:
        prior = dist.Normal(0, 1.5).expand([3]).to_event(1)
        occupancy = numpyro.sample("occupancy", prior)
        abundance = numpyro.sample("abundance", prior)
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        unit = dist.Normal(0, 1).expand([len(X)]).to_event(1)
        effect = sd * numpyro.sample("standardised", unit)
        numpyro.deterministic("effect", effect)
        found = by_state(occupancy, abundance, effect, slice(None))
        numpyro.factor("counts", jax.nn.logsumexp(found, -1).sum())

    def latent(found: Draws) -> Draws:
        def one(values: Any) -> Any:
            return jax.nn.softmax(by_state(*values, SOME))

        values = (
            found["occupancy"],
            found["abundance"],
            found["effect"][..., SOME],
        )
        probability = np.asarray(jax.jit(jax.vmap(jax.vmap(one)))(values))[..., 1]
        # given an effect, so that probabilities differ from those of `marginalize` in
        # spread; draws of the states do not
        present = np.random.default_rng(3).uniform(size=probability.shape) < probability
        return {
            "present": present.astype(float),
            "effect": np.asarray(found["effect"])[..., SOME],
        }

    return Case(
        there["model"],
        whole,
        (X, counts),
        latent,
        "structural zeros and overdispersion, 500 sites, 3 visits",
        names=("occupancy", "abundance", "sd"),
    )


def capture_recapture() -> Case:
    """Cormack, Jolly and Seber, with the states summed by hand."""
    there = example("capture_recapture")
    args = tuple(map(jnp.asarray, there["simulate"](2000, 5)[:3]))
    mass, first, seen = args

    def latent(found: Draws) -> Draws:
        """Alive on the last occasion, by the recursion in double precision."""
        some = SOME
        logits = found["survival"] @ np.stack([np.ones(len(some)), mass[some]])
        stays = 1 / (1 + np.exp(-np.asarray(logits, float)))
        caught = 1 / (1 + np.exp(-np.asarray(found["capture"], float)))
        alive, dead = np.ones_like(stays), np.zeros_like(stays)
        for t in range(1, seen.shape[1]):
            p = caught[..., t - 1, None]
            now = np.asarray(seen[some, t]) == 1
            lives = alive * stays * np.where(now, p, 1 - p)
            dies = np.where(now, 0.0, dead + alive * (1 - stays))
            after = np.asarray(first[some]) < t
            alive = np.where(after, lives, alive)
            dead = np.where(after, dies, dead)
        chance = alive / (alive + dead)
        return {"alive_probability": chance}

    return Case(
        there["model"],
        there["recursion"],
        args,
        latent,
        "Cormack-Jolly-Seber, 2,000 animals, 5 occasions",
        names=("survival", "capture"),
    )


def random_intercepts() -> Case:
    """A multilevel logistic regression, with the intercepts in the position of NUTS."""
    there = example("random_intercepts")
    rng = np.random.default_rng(1)
    covariates = rng.normal(size=(500, 6, 3)).astype(np.float32)
    logits = 1.2 * rng.normal(size=(500, 1)) + covariates @ np.array([0.5, -1.0, 0.25])
    recovered = rng.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))
    mask = np.arange(6) < rng.integers(3, 7, size=500)[:, None]
    args = tuple(map(jnp.asarray, (covariates, recovered.astype(np.float32), mask)))
    return Case(
        there["model"],
        there["model"],
        args,
        lambda found: {"intercept": found["intercept"][..., SOME]},
        "random intercepts, 500 clinics, 3 to 6 patients",
        names=("slopes", "tau"),
    )


def random_slopes() -> Case:
    """The same with random slopes, all in the position of NUTS."""
    there = example("random_slopes")
    treated, recovered, *_ = there["simulate"](500)
    return Case(
        there["model"],
        there["model"],
        (jnp.asarray(treated), jnp.asarray(recovered)),
        lambda found: {"z": found["z"][..., SOME, :]},
        "random intercepts and slopes, 500 clinics, 8 patients",
        names=("means", "scales", "correlation"),
    )


def gaussian_mixture() -> Case:
    """Three components, with the members summed by hand."""
    there = example("gaussian_mixture")
    rng = np.random.default_rng(2)
    mean, sd = np.array([-2.0, 0.5, 3.0]), np.array([0.8, 0.6, 1.0])
    member = rng.choice(3, size=2000, p=[0.3, 0.45, 0.25])
    y = jnp.asarray(mean[member] + sd[member] * rng.normal(size=2000), jnp.float32)

    def by_member(mean: Any, sd: Any, weight: Any, rows: Any = slice(None)) -> Any:
        found = dist.Normal(mean, sd).log_prob(y[rows, None])
        return found + jnp.log(weight)

    def whole(y: Any) -> None:
        support = dist.constraints.ordered_vector
        mean = numpyro.sample("mean", dist.ImproperUniform(support, (), (3,)))
        numpyro.factor("prior", dist.Normal(0.0, 5.0).log_prob(mean).sum())
        sd = numpyro.sample("sd", dist.LogNormal(0.0, 0.5).expand([3]).to_event(1))
        weight = numpyro.sample("weight", dist.Dirichlet(2.0 * jnp.ones(3)))
        total = jax.nn.logsumexp(by_member(mean, sd, weight), -1).sum()
        numpyro.factor("y", total)

    def latent(found: Draws) -> Draws:
        def one(values: Any) -> Any:
            return jax.nn.softmax(by_member(*values, SOME))

        values = found["mean"], found["sd"], found["weight"]
        return {"member_probability": np.asarray(jax.vmap(jax.vmap(one))(values))}

    start = {"mean": np.array([-2.0, 0.5, 3.0])}
    return Case(
        there["model"],
        whole,
        (y,),
        latent,
        "a mixture of three normal components, 2,000 rows",
        start=init_to_value(values=start),
        names=("mean", "sd", "weight"),
    )


CASES = {
    "random_intercepts": random_intercepts,
    "random_slopes": random_slopes,
    "gaussian_mixture": gaussian_mixture,
    "annotators": annotators,
    "item_response": item_response,
    "species_counts": species_counts,
    "capture_recapture": capture_recapture,
}


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
    mcmc.get_samples()
    return mcmc, time.process_time() - begin


class Moment(NamedTuple):
    """Mean and log standard deviation of each number, with Monte Carlo errors."""

    mean: np.ndarray
    mean_error: np.ndarray
    log_sd: np.ndarray
    log_sd_error: np.ndarray
    ess: np.ndarray


def moments(draws: np.ndarray) -> Moment:
    """Of draws with chains and draws in front."""
    x = np.asarray(draws, float).reshape(*draws.shape[:2], -1)
    mean, var = x.mean((0, 1)), x.var((0, 1))
    squares = (x - mean) ** 2
    most = x.shape[0] * x.shape[1]
    of_mean, of_square = (
        np.minimum(effective_sample_size(v), most) for v in (x, squares)
    )
    return Moment(
        mean,
        np.sqrt(var / of_mean),
        0.5 * np.log(var),
        0.5 * np.sqrt(squares.var((0, 1)) / of_square) / var,
        np.minimum(of_mean, of_square),
    )


class Compared(NamedTuple):
    """Differences from the reference, in its standard deviations, and their errors."""

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray

    @classmethod
    def of(cls, one: Moment, other: Moment) -> Compared:
        """Ours first, then the reference."""
        scale = np.exp(other.log_sd)
        return cls(
            (one.mean - other.mean) / scale,
            np.hypot(one.mean_error, other.mean_error) / scale,
            one.log_sd - other.log_sd,
            np.hypot(one.log_sd_error, other.log_sd_error),
        )

    def cells(self) -> list[str]:
        """Root mean square, that of the Monte Carlo errors, and the largest."""

        def rms(x: np.ndarray) -> float:
            return float(np.sqrt(np.mean(x**2)))

        scores = self.mean / self.mean_error, self.sd / self.sd_error
        return [
            f"{rms(self.mean):.3f} ({rms(self.mean_error):.3f})",
            f"{np.abs(self.mean).max():.3f}",
            f"{rms(self.sd):.1%} ({rms(self.sd_error):.1%})",
            f"{np.abs(self.sd).max():.1%}",
            f"{max(np.abs(z).max() for z in scores):.1f}",
        ]


def numbers(found: Draws, names: Any) -> np.ndarray:
    """All numbers of some sites along one axis."""
    parts = [np.asarray(found[n]) for n in names]
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], -1)


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """Two lines of the table: parameters and latent variables."""
    case = CASES[name]()
    marginal = marginalize(case.model)
    kernel = MinibatchMH(marginal, control_variate="taylor2", init_strategy=case.start)
    ours, seconds = run(kernel, case, 300, options.draws, 1, 0)
    print(f"{name}: {seconds:.0f} s of processor time", flush=True)
    nuts = NUTS(case.whole, init_strategy=case.start)
    theirs, nuts_seconds = run(nuts, case, 500, options.nuts_draws, 1, 1)
    reference = theirs.get_samples(group_by_chain=True)
    idata = to_inference_data(ours, constant_data=False)
    wanted = case.latent(reference)
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
    mine = numbers({n: idata["posterior"][n].values for n in case.names}, case.names)
    one, other = moments(mine), moments(numbers(reference, case.names))
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
    for what, (a, b) in (("parameters", (one, other)), ("latent", latent)):
        cells = [
            name,
            case.about if what == "parameters" else "",
            what,
            str(len(a.mean)),
            f"{a.ess.min():,.0f}",
            f"{b.ess.min():,.0f}",
            *Compared.of(a, b).cells(),
        ]
        if what == "parameters":
            cells += [f"{seconds:.0f}", f"{nuts_seconds:.0f}"]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines), flush=True)
    return lines


HEADER = """# The examples of `marginalize` against long runs of NUTS

`python benchmarks/marginal_references.py`; jax {jax}, Python {python}. NUTS samples
the model with its continuous latent variables; discrete ones are summed by hand. Four
vectorised chains each. Differences of means are in standard deviations of the
reference, those of standard deviations are relative: root mean squares over all
numbers, in brackets the root mean square of their Monte Carlo errors, and the largest.
z is the largest difference over its Monte Carlo error. Latent variables are those of
100 rows: draws of continuous ones, conditional probabilities of the states of discrete
ones (draws of them in rows with continuous ones too), where they are not certain.
Processor seconds include compilation; other jobs shared the machine's two cores.

"""

COLUMNS = (
    "example",
    "model",
    "numbers of",
    "count",
    "smallest ESS",
    "of NUTS",
    "means (error)",
    "largest",
    "sds (error)",
    "largest",
    "z",
    "CPU s",
    "of NUTS",
)


def main() -> None:
    """Measure the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--draws", type=int, default=10_000, help="of each chain")
    parser.add_argument("--nuts-draws", type=int, default=5_000, help="of each chain")
    parser.add_argument("--thin", type=int, default=4, help="for the latent variables")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept: dict[str, str] = {}
    if options.out and options.out.exists():
        for line in options.out.read_text().splitlines(True):
            if (found := line[2:].partition(" |")[0]) in CASES:
                kept[found] = kept.get(found, "") + line
    for name in options.only:
        kept[name] = "\n".join(measure(name, options)) + "\n"
        if options.out:
            text = HEADER.format(jax=jax.__version__, python=platform.python_version())
            text += f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
            text += "".join(kept[n] for n in CASES if n in kept)
            options.out.write_text(text)


if __name__ == "__main__":
    main()
