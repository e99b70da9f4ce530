"""The times that `recommend` predicts, and the times that the runs take.

Each number is from a new process: one calls `recommend`, one runs MinibatchMH and one
NUTS, both with NumPyro's driver, until every parameter has 1,000 effective draws. The
seconds are processor time on one core, which other jobs on a machine disturb less than
wall-clock time.

    taskset -c 0 python benchmarks/recommend.py --out benchmarks/results/recommend.md

With `--json`, results are kept in a file, and runs of some problems or methods replace
their results there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from time_to_answer import groups, hierarchy, least_ess, logistic

_LINE = "result: "
DRAWS = 1000
METHODS = "recommend", "ours", "nuts"


def small(size: int) -> tuple[Any, tuple]:
    """A logistic regression with few rows and 4 columns."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(6)
    X = rng.normal(size=(size, 4)).astype(np.float32)
    y = (rng.uniform(size=size) < 1 / (1 + np.exp(-X.sum(1)))).astype(np.float32)
    model, _ = logistic(10)
    return model, (jnp.asarray(X), jnp.asarray(y))


def poisson(size: int) -> tuple[Any, tuple]:
    """A Poisson regression with 8 columns."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    rng = np.random.default_rng(3)
    X = rng.normal(size=(size, 8)).astype(np.float32)
    y = rng.poisson(np.exp(0.5 + X @ (0.3 * rng.normal(size=8)))).astype(np.float32)

    def model(X: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(a + X[i] @ b)), obs=y[i])

    return model, (jnp.asarray(X), jnp.asarray(y))


def radon(size: int) -> tuple[Any, tuple]:
    """Centred effects of 85 groups, as for the radon data, and a slope."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    groups = 85
    rng = np.random.default_rng(4)
    group = rng.integers(groups, size=size)
    floor = rng.integers(2, size=size).astype(np.float32)
    effects = 1.3 + 0.35 * rng.normal(size=groups)
    y = effects[group] - 0.65 * floor + 0.75 * rng.normal(size=size)

    def model(group: Any, floor: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        slope = numpyro.sample("slope", dist.Normal(0, 2))
        a = numpyro.sample("a", dist.Normal(mu, tau).expand([groups]).to_event(1))
        with numpyro.plate("rows", len(y)) as i:
            mean = a[group[i]] + slope * floor[i]
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])

    return model, (
        jnp.asarray(group),
        jnp.asarray(floor),
        jnp.asarray(y, jnp.float32),
    )


def correlated(size: int) -> tuple[Any, tuple]:
    """A linear regression with 10 columns that have pairwise correlations of 0.99."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    rng = np.random.default_rng(5)
    X = np.sqrt(0.99) * rng.normal(size=(size, 1))
    X = X + np.sqrt(0.01) * rng.normal(size=(size, 10))
    y = X @ rng.normal(size=10) + rng.normal(size=size)

    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(2))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(X[i] @ b, sd), obs=y[i])

    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32))


def robust(size: int) -> tuple[Any, tuple]:
    """A Student-t regression with 6 columns of different scales."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    rng = np.random.default_rng(7)
    X = rng.normal(size=(size, 6)) * [0.1, 0.3, 1, 1, 3, 10]
    y = X @ rng.normal(size=6) + rng.standard_t(4, size=size)

    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(2))
        df = numpyro.sample("df", dist.Gamma(2, 0.2))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.StudentT(df, X[i] @ b, sd), obs=y[i])

    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32))


def categorical(size: int) -> tuple[Any, tuple]:
    """A multinomial regression with 4 classes and 6 columns."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    rng = np.random.default_rng(8)
    X = rng.normal(size=(size, 6))
    logits = X @ rng.normal(size=(6, 3))
    logits = np.hstack([np.zeros((size, 1)), logits])
    y = (logits + rng.gumbel(size=logits.shape)).argmax(1)

    def model(X: Any, y: Any) -> None:
        shape = [X.shape[1], 3]
        b = numpyro.sample("b", dist.Normal(0, 2).expand(shape).to_event(2))
        with numpyro.plate("rows", len(y)) as i:
            logits = X[i] @ b
            logits = jnp.concatenate([jnp.zeros_like(logits[..., :1]), logits], -1)
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y[i])

    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(y))


PROBLEMS = {
    "small": (small, 200),
    "logistic 1e4": (logistic, 10_000),
    "logistic 2e5": (logistic, 200_000),
    "logistic 1e6": (logistic, 1_000_000),
    "poisson": (poisson, 100_000),
    "radon": (radon, 20_000),
    "hierarchy": (hierarchy, 20_000),
    "correlated": (correlated, 20_000),
    "robust": (robust, 50_000),
    "categorical": (categorical, 50_000),
    "groups": (groups, 3_000),
}
# the constants of `recommend` were not calibrated on these
HELD_OUT = "robust", "categorical", "groups"


def worker(problem: str, method: str) -> dict[str, Any]:
    """The result of one method, in this process."""
    import warnings

    import jax
    import numpy as np
    from numpyro.infer import MCMC, NUTS

    from numpyro_minibatch import MinibatchMH, recommend
    from numpyro_minibatch.recommendation import _gradient

    warnings.simplefilter("ignore")
    now = time.process_time
    make, size = PROBLEMS[problem]
    model, data = make(size)
    jax.block_until_ready(data)
    if method == "recommend":
        _gradient.now = now
        begin = now()
        found = recommend(model, *data, draws=DRAWS, progress=False)
        costs = {"ours": found.minibatch, "nuts": found.nuts}
        return {
            "seconds": now() - begin,
            "sampler": found.sampler,
            "gradient": found.gradient,
            **{
                name: vars(cost) | {"total": cost.total}
                for name, cost in costs.items()
                if cost is not None
            },
        }
    if method == "ours":
        kernel: Any = MinibatchMH(model, control_variate="taylor2")
        settings = dict(num_warmup=200, num_samples=1000, num_chains=4)
        mcmc = MCMC(kernel, **settings, chain_method="vectorized", progress_bar=False)
    else:
        mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=1000, progress_bar=False)

    def run(key: int) -> tuple[float, float]:
        begin = now()
        fields = ("num_steps",) if method == "nuts" else ()
        mcmc.run(jax.random.key(key), *data, extra_fields=fields)
        draws = mcmc.get_samples(group_by_chain=True)
        draws = {name: np.asarray(x) for name, x in draws.items()}
        return now() - begin, least_ess(draws)

    first, ess = run(1)
    gradients = None
    if method == "nuts":
        gradients = float(np.mean(mcmc.get_extra_fields()["num_steps"]))
    # the time of a draw, from runs of two lengths, which compile equally long
    long = mcmc.num_samples
    mcmc.post_warmup_state = mcmc.last_state
    after, _ = run(2)
    mcmc.num_samples = long // 4
    mcmc.post_warmup_state = mcmc.last_state
    before, _ = run(3)
    draw = max((after - before) / (long - long // 4), 0.0)
    return {
        "total": first + (DRAWS / ess - 1) * long * draw,
        "first": first,
        "ess_per_draw": ess / long / mcmc.num_chains,
        "draw": draw,
        "gradients": gradients,
        "fixed": first - long * draw,
        "load": os.getloadavg()[0],
    }


def measured(problem: str, method: str) -> dict[str, Any]:
    """The result of a new process."""
    env = {k: v for k, v in os.environ.items() if "JAX_" not in k and k != "XLA_FLAGS"}
    # one thread, whose processor time is the time of an idle core
    env["PJRT_NPROC"] = "1"
    command = [sys.executable, __file__, "--worker", problem, method]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(_LINE):
            return json.loads(line.removeprefix(_LINE))
    raise RuntimeError(f"{problem}, {method} gave no result:\n{done.stdout}")


def shown(problem: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    said, ours, nuts = (found[method] for method in METHODS)
    gradients = said["nuts"]["rows_per_draw"] / PROBLEMS[problem][1]
    return (
        f"| {problem} | {PROBLEMS[problem][1]:,} "
        f"| {said['ours']['total']:.1f} | {ours['total']:.1f} "
        f"| {said['ours']['total'] / ours['total']:.2f} "
        f"| {said['nuts']['total']:.1f} | {nuts['total']:.1f} "
        f"| {said['nuts']['total'] / nuts['total']:.2f} "
        f"| {gradients:.0f} | {nuts['gradients']:.0f} "
        f"| {said['nuts']['ess_per_draw']:.2f} | {nuts['ess_per_draw']:.2f} "
        f"| {said['ours']['ess_per_draw']:.2f} | {ours['ess_per_draw']:.2f} "
        f"| {said['ours']['setup']:.1f} | {said['seconds']:.1f} | {said['sampler']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--json", type=Path, help="all results, read and completed")
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--worker", nargs=2)
    args = parser.parse_args()
    if args.worker:
        print(_LINE + json.dumps(worker(*args.worker)), flush=True)
        return
    results: dict[str, dict[str, Any]] = {}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text())
    for problem in args.problems:
        for method in args.methods:
            results.setdefault(problem, {})[method] = measured(problem, method)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
            print(problem, method, results[problem][method], flush=True)
    import jax

    lines = [
        "# The times that `recommend` predicts",
        "",
        f"`taskset -c 0 python benchmarks/recommend.py`; jax {jax.__version__}, "
        f"Python {platform.python_version()}. Processor seconds to {DRAWS:,} effective "
        "draws of every parameter, from the first call to the last draw, with "
        "compilation: four vectorised chains of MinibatchMH, and one chain of NUTS "
        "with 1,000 draws of warmup. Each number is from a process of its own with one "
        "thread, while other jobs used the machine. The constants of `recommend` were "
        f"calibrated on the other problems than {', '.join(HELD_OUT)}. With `robust`, "
        "it was found that NumPyro's warmup adds a constant to small variances, which "
        "`recommend` takes into account since then.",
        "",
        "| problem | rows | MinibatchMH, predicted s | measured | ratio | "
        "NUTS, predicted s | measured | ratio | gradients a draw, predicted | measured "
        "| NUTS's effective draws a draw, predicted | measured | MinibatchMH's, "
        "predicted | measured | set-up, s | `recommend`, s | recommended |",
        "|" + "---|" * 17,
    ]
    complete = [p for p in PROBLEMS if set(METHODS) <= set(results.get(p, {}))]
    lines += [shown(problem, results[problem]) for problem in complete]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
