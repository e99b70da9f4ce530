"""Cold-start seconds from ``MCMC.run`` to 1,000 effective draws of every parameter.

Each case is a separate process, started one after the other, with no compiled program
kept from before. Data are on the device before the clock starts; the progress bar is
off. Each run reports:

- seconds of the wall clock and of the processors (user time) of the first `run`;
- the same to 1,000 effective draws: the additional time is scaled from a second part of
  the same chains, which compiles nothing but the driver's loop;
- every program that was compiled, with its lines of StableHLO and its seconds of
  tracing, lowering and compiling (``--programs``).

    python benchmarks/time_to_answer.py --problems logistic --sizes 1e4 2e5 1e6
    python benchmarks/time_to_answer.py --problems quadrature --sizes 1e4 --programs

Without ``--sizes`` and ``--methods``, each problem has its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ENOUGH = 1000  # effective draws
_LINE = "time_to_answer "


# in a separate process ----------------------------------------------------------------


class Clock(NamedTuple):
    """Seconds of the wall clock, and of the processors in this process."""

    wall: float
    user: float

    @classmethod
    def now(cls) -> Clock:
        return cls(time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)[0])

    def since(self, before: Clock) -> Clock:
        return Clock(self.wall - before.wall, self.user - before.user)


class Programs:
    """Everything that JAX compiles, by the name of the function, in order."""

    def __init__(self) -> None:
        import jax

        self.stages: dict[str, str] = {
            "/jax/core/compile/jaxpr_trace_duration": "trace",
            "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
            "/jax/core/compile/backend_compile_duration": "compile",
        }
        self.found: list[tuple[str, str, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **kwargs: Any) -> None:
        if event in self.stages:
            name = str(kwargs.get("fun_name", "?"))
            self.found.append((name, self.stages[event], seconds))

    def totals(self) -> dict[str, float]:
        """Number of programs, and the seconds of each stage."""
        total: dict[str, float] = defaultdict(float)
        for _, stage, seconds in self.found:
            total[stage] += seconds
            total["programs"] += stage == "compile"
        return dict(total)

    def by_name(self) -> dict[str, dict[str, float]]:
        """The same of each function; tracing contains what is traced within it."""
        found: dict[str, dict[str, float]] = {}
        for name, stage, seconds in self.found:
            each = found.setdefault(name.removeprefix("jit(").rstrip(")"), {})
            each[stage] = each.get(stage, 0.0) + seconds
            each["programs"] = each.get("programs", 0) + (stage == "compile")
        return found


def lines_of(folder: str) -> dict[str, list[int]]:
    """Lines of StableHLO of each program that was dumped, by the function's name."""
    found: dict[str, list[int]] = {}
    for path in sorted(Path(folder).glob("*compile*.mlir")):
        name = path.stem.split("jit_", 1)[-1].removesuffix("_compile")
        # lines with the source location of an operation are not counted
        count = sum(not line.startswith("#loc") for line in path.open())
        found.setdefault(name, []).append(count)
    return found


def logistic(size: int) -> tuple[Any, tuple]:
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    from numpyro_minibatch import datasets

    def model(X: Any, y: Any, subsample_size: int | None = None) -> None:
        shape = [X.shape[1]]
        b = numpyro.sample("b", dist.Normal(0, 1).expand(shape).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ b - 2), obs=y[i])

    X, y, _ = datasets.simulate_logistic(0, size, 12)
    return model, (jnp.asarray(X), jnp.asarray(y))


def quadrature(size: int) -> tuple[Any, tuple]:
    """Groups of five rows with an intercept each, which is integrated out.

    Adaptive Gauss-Hermite quadrature at nine points about the mode, which four Newton
    steps find: a row likelihood of a thousand operations.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    dim, each = 5, 5
    rng = np.random.default_rng(1)
    X = rng.normal(size=(size, each, dim)).astype(np.float32)
    b = rng.normal(size=dim) / 2
    eta = X @ b + 0.8 * rng.normal(size=(size, 1)) - 0.5
    y = (rng.uniform(size=eta.shape) < 1 / (1 + np.exp(-eta))).astype(np.float32)
    nodes, weights = np.polynomial.hermite_e.hermegauss(9)
    log_weights = jnp.asarray(np.log(weights / weights.sum()) + nodes**2 / 2)

    def log_marginal(eta: Any, y: Any, sd: Any) -> Any:
        def joint(u: Any) -> Any:
            logits = eta + sd * u
            return (y * logits - jax.nn.softplus(logits)).sum() - u**2 / 2

        mode = jnp.zeros(())
        for _ in range(4):
            slope, curvature = jax.grad(joint)(mode), jax.hessian(joint)(mode)
            mode = mode - slope / curvature
        mode = jax.lax.stop_gradient(mode)
        width = jax.lax.stop_gradient((-jax.hessian(joint)(mode)) ** -0.5)
        values = jax.vmap(lambda node: joint(mode + width * node))(jnp.asarray(nodes))
        return jnp.log(width) + jax.scipy.special.logsumexp(values + log_weights)

    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([dim]).to_event(1))
        log_sd = numpyro.sample("log_sd", dist.Normal(0, 1))
        a = numpyro.sample("a", dist.Normal(0, 2))
        with numpyro.plate("groups", len(y)) as i:
            of_group = jax.vmap(log_marginal, (0, 0, None))
            numpyro.factor("y", of_group(a + X[i] @ b, y[i], jnp.exp(log_sd)))

    return model, (jnp.asarray(X), jnp.asarray(y))


def groups(size: int) -> tuple[Any, tuple]:
    """Groups of five rows; `marginalize` integrates the intercept of each out."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    from numpyro_minibatch import marginalize

    dim, each = 5, 5
    rng = np.random.default_rng(0)
    X = rng.normal(size=(size, each, dim)).astype(np.float32)
    eta = X @ (rng.normal(size=dim) / 2) + 0.8 * rng.normal(size=(size, 1)) - 0.5
    y = (rng.uniform(size=eta.shape) < 1 / (1 + np.exp(-eta))).astype(np.float32)

    def model(X: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([dim]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(2))
        a = numpyro.sample("a", dist.Normal(0, 2))
        with numpyro.plate("groups", len(y)) as i:
            u = numpyro.sample("u", dist.Normal(a, sd))
            with numpyro.plate("within", y.shape[1]):
                logits = u + (X[i] @ b).T
                numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i].T)

    return marginalize(model), (jnp.asarray(X), jnp.asarray(y))


def persons(size: int) -> tuple[Any, tuple]:
    """Answers of persons to ten questions; `marginalize` integrates the abilities."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    from numpyro_minibatch import marginalize

    questions = 10
    rng = np.random.default_rng(5)
    ability = rng.normal(size=(size, 1))
    slopes, places = rng.lognormal(0, 0.3, questions), rng.normal(size=questions)
    p = 1 / (1 + np.exp(-slopes * (ability - places)))
    y = (rng.uniform(size=p.shape) < p).astype(np.float32)

    def model(y: Any) -> None:
        shape = [y.shape[1]]
        slope = numpyro.sample("slope", dist.LogNormal(0, 0.5).expand(shape).to_event())
        place = numpyro.sample("place", dist.Normal(0, 1.5).expand(shape).to_event())
        with numpyro.plate("persons", len(y)) as i:
            ability = numpyro.sample("ability", dist.Normal(0, 1))
            logits = slope * (ability[:, None] - place)
            answers = dist.Bernoulli(logits=logits).to_event(1)
            numpyro.sample("y", answers, obs=y[i])

    return marginalize(model), (jnp.asarray(y),)


def hierarchy(size: int) -> tuple[Any, tuple]:
    """Effects of 40 groups, non-centred."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    groups = 40
    rng = np.random.default_rng(2)
    group = rng.integers(groups, size=size)
    effects = 1.0 + 0.7 * rng.normal(size=groups)
    y = effects[group] + rng.normal(size=size)

    def model(group: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        eta = numpyro.sample("eta", dist.Normal(0, 1).expand([groups]).to_event(1))
        theta = numpyro.deterministic("theta", mu + tau * eta)
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(theta[group[i]], sigma), obs=y[i])

    return model, (jnp.asarray(group), jnp.asarray(y, jnp.float32))


def visits(size: int) -> tuple[Any, tuple]:
    """Overdispersed counts: gamma functions of a parameter, which compile slowly."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    rng = np.random.default_rng(21)
    columns = [rng.gamma(3, 1, size), rng.random(size) < 0.4, rng.random(size) < 0.02]
    X = np.stack([*columns, rng.normal(size=size)], 1).astype(np.float32)
    rate = np.exp(-1 + 0.2 * X[:, 0] + 1.5 * X[:, 2])
    y = rng.poisson(rate * rng.gamma(1.5, 1 / 1.5, size))

    def model(X: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.Normal(0, 2).expand([4]).to_event(1))
        phi = numpyro.sample("phi", dist.Gamma(1, 0.1))
        with numpyro.plate("rows", len(y)) as i:
            mean = jnp.exp(a + X[i] @ b)
            numpyro.sample("y", dist.NegativeBinomial2(mean, phi), obs=y[i])

    return model, (jnp.asarray(X), jnp.asarray(y, jnp.int32))


def published(name: str, size: int) -> tuple[Any, tuple]:
    """A problem of `benchmarks.temperature_one`, of its own size."""
    import jax.numpy as jnp
    from temperature_one.problems import PROBLEMS

    problem = PROBLEMS[name]
    return problem.model, tuple(jnp.asarray(x) for x in problem.data())


def network(size: int) -> tuple[Any, tuple]:
    """A regression with one hidden layer of 16 units: 161 weights, and the noise.

    Hidden units can be exchanged, so that the answer is the function at twenty points.
    """
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    inputs, hidden = 8, 16
    rng = np.random.default_rng(3)
    X = rng.normal(size=(size + 20, inputs)).astype(np.float32)
    f = np.sin(X[:, 0]) + X[:, 1] * X[:, 2] / 2
    y = jnp.asarray(f[:size] + 0.3 * rng.normal(size=size), jnp.float32)
    new = jnp.asarray(X[size:])

    def model(X: Any, y: Any) -> None:
        def weights(name: str, *shape: int) -> Any:
            prior = dist.Normal(0, shape[0] ** -0.5).expand(shape).to_event()
            return numpyro.sample(name, prior)

        first, bias = weights("first", inputs, hidden), weights("bias", 1, hidden)
        last = weights("last", hidden, 1)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))

        def predicted(X: Any) -> Any:
            return (jnp.tanh(X @ first + bias) @ last)[:, 0]

        numpyro.deterministic("answer", predicted(new))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(predicted(X[i]), sigma), obs=y[i])

    return model, (jnp.asarray(X[:size]), y)


def two_modes(size: int) -> tuple[Any, tuple]:
    """A slope whose sign the data do not tell, between modes 8 sd away from zero."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    rng = np.random.default_rng(4)
    x = np.abs(rng.normal(size=size)).astype(np.float32)
    y = jnp.asarray(x * 8 * size**-0.5 + rng.normal(size=size), jnp.float32)

    def model(x: Any, y: Any) -> None:
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(jnp.abs(slope) * x[i], 1), obs=y[i])

    return model, (jnp.asarray(x), y)


class Problem(NamedTuple):
    """A problem, and what is run if the command line does not say."""

    make: Callable[[int], tuple[Any, tuple]]
    sizes: tuple[int, ...]
    methods: tuple[str, ...] = ("ours", "nuts", "nuts4")


_WITH_HMCECS = "ours", "nuts", "nuts4", "hmcecs"
PROBLEMS = {
    "logistic": Problem(logistic, (10_000, 200_000, 1_000_000), _WITH_HMCECS),
    "covertype": Problem(partial(published, "covertype"), (319_055,), _WITH_HMCECS),
    "poisson": Problem(partial(published, "poisson"), (200_000,)),
    "visits": Problem(visits, (4_000,)),
    "hierarchy": Problem(hierarchy, (5_000,)),
    "quadrature": Problem(quadrature, (10_000,)),
    "groups": Problem(groups, (10_000,)),
    "persons": Problem(persons, (300, 3_000), ("ours", "latents")),
    "network": Problem(network, (1_000,), ("amagold", "sghmc", "nuts")),
    "two_modes": Problem(two_modes, (20_000,), ("ladder", "nuts4")),
}


# the methods --------------------------------------------------------------------------


def _ours(model: Any, data: tuple) -> Any:
    from numpyro_minibatch import MinibatchMH

    return MinibatchMH(model, control_variate="taylor2")


def _amagold(model: Any, data: tuple) -> Any:
    from numpyro_minibatch import AMAGOLD

    return AMAGOLD(model)


def _sghmc(model: Any, data: tuple) -> Any:
    """The settings of the documentation of networks."""
    from numpyro_minibatch import SGHMC

    rate = 0.005 / len(data[-1])
    return SGHMC(model, batch_size=200, h=rate, b=0.05, num_steps=10)


def _ladder(model: Any, data: tuple) -> Any:
    from numpyro_minibatch import MinibatchMH, ReplicaExchange

    inner = MinibatchMH(model, estimate="exact")
    return ReplicaExchange(inner, num_replicas=4, temperature_ratio=3.0)


def _nuts(model: Any, data: tuple) -> Any:
    from numpyro.infer import NUTS

    return NUTS(model)


def _latents(model: Any, data: tuple) -> Any:
    """NUTS on the model before its rows were marginalized."""
    from numpyro.infer import NUTS

    return NUTS(model.fn)


def _hmcecs(model: Any, data: tuple) -> Any:
    """HMCECS with a Taylor proxy at the mode, which an optimiser finds from batches.

    A thousand rows in a hundred blocks, as in NumPyro's example of it.
    """
    import jax
    from numpyro.infer import HMCECS, NUTS, SVI, Trace_ELBO, init_to_value
    from numpyro.infer.autoguide import AutoDelta
    from numpyro.optim import Adam

    model = partial(model, subsample_size=1000)
    guide = AutoDelta(model)
    svi = SVI(model, guide, Adam(0.01), Trace_ELBO())
    found = svi.run(jax.random.key(0), 2000, *data, progress_bar=False)
    mode = guide.median(found.params)
    inner = NUTS(model, init_strategy=init_to_value(values=mode))
    return HMCECS(inner, num_blocks=100, proxy=HMCECS.taylor_proxy(mode, degree=2))


class Method(NamedTuple):
    """A kernel, and the driver's settings."""

    kernel: Callable[[Any, tuple], Any]
    chains: int
    warmup: int
    draws: int


METHODS = {
    "ours": Method(_ours, 4, 200, 500),
    "amagold": Method(_amagold, 4, 1000, 1000),
    "sghmc": Method(_sghmc, 4, 1000, 1000),
    "ladder": Method(_ladder, 4, 500, 1000),
    "nuts": Method(_nuts, 1, 300, 500),
    "nuts4": Method(_nuts, 4, 300, 500),
    "latents": Method(_latents, 1, 300, 500),
    "hmcecs": Method(_hmcecs, 1, 1000, 2000),
}


def worker(case: dict[str, Any]) -> None:
    """Time one case, and print the result."""
    folder = tempfile.mkdtemp() if case["programs"] else None
    if folder is not None:
        os.environ["JAX_DUMP_IR_TO"] = folder
        os.environ["JAX_DUMP_IR_MODES"] = "stablehlo"
    begin = Clock.now()
    import jax
    import numpy as np
    from numpyro.infer import MCMC

    imported = Clock.now().since(begin)
    begin = Clock.now()
    from numpyro_minibatch import MinibatchMH  # noqa: F401

    ours = Clock.now().since(begin)
    model, data = PROBLEMS[case["problem"]].make(case["size"])
    jax.block_until_ready(data)
    method = METHODS[case["method"]]

    def make() -> MCMC:
        return MCMC(
            method.kernel(model, data),
            num_warmup=method.warmup,
            num_samples=method.draws,
            num_chains=method.chains,
            chain_method="vectorized",
            progress_bar=False,
        )

    parts: list[dict[str, np.ndarray]] = []

    def run(mcmc: MCMC | None, key: int) -> tuple[MCMC, Clock]:
        begin = Clock.now()
        if mcmc is None:
            mcmc = make()
        mcmc.run(jax.random.key(key), *data)
        samples = mcmc.get_samples(group_by_chain=True)
        parts.append({n: np.asarray(x) for n, x in samples.items()})
        return mcmc, Clock.now().since(begin)

    if folder is not None:  # drop the programs that made the data
        for path in Path(folder).glob("*"):
            path.unlink()
    programs = Programs()
    mcmc, first = run(None, 1)
    found = programs.totals()
    by_name, lines = programs.by_name(), lines_of(folder) if folder else {}
    ess = least_ess(parts[0])
    # the cost of a draw after compilation
    mcmc.post_warmup_state = mcmc.last_state
    run(mcmc, 2)
    mcmc.post_warmup_state = mcmc.last_state
    _, more = run(mcmc, 3)
    missing = max(ENOUGH / ess - 1.0, 0.0)
    answer = {
        "first": first,
        "to_answer": [a + missing * b for a, b in zip(first, more, strict=True)],
        "ess": ess,
        "draws": more,  # of as many draws as the first part kept
        "import_numpyro": imported,
        "import_ours": ours,
        "totals": found,
        "lines": sum(map(sum, lines.values())),
        "load": os.getloadavg()[0],
    }
    if case["again"]:
        answer["again"] = {}
        mcmc.post_warmup_state = None
        for name, again in {"run again": mcmc, "equal kernel": None}.items():
            before = programs.totals()
            _, clock = run(again, 4)
            after = programs.totals()
            spent = {k: after[k] - before.get(k, 0.0) for k in after}
            answer["again"][name] = [clock, spent]
        data = tuple(x[::-1] for x in data)
        before = programs.totals()
        _, clock = run(None, 5)
        after = programs.totals()
        spent = {k: after[k] - before.get(k, 0.0) for k in after}
        answer["again"]["other data"] = [clock, spent]
    if folder is not None:
        answer["by_name"], answer["lines_by_name"] = by_name, lines
    print(_LINE + json.dumps(answer), flush=True)


def least_ess(samples: dict[str, Any]) -> float:
    """The smallest effective sample size of any element of the position.

    If the model has a site of that name, of any element of its ``answer``.
    """
    import numpy as np
    from numpyro.diagnostics import effective_sample_size

    if "answer" in samples:
        samples = {"answer": samples["answer"]}
    with np.errstate(all="ignore"):
        found = [
            effective_sample_size(np.asarray(x, np.float64)) for x in samples.values()
        ]
    return float(min(np.nanmin(x) for x in found))


# the process that starts the others ---------------------------------------------------


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """The result of a new process."""
    env = {k: v for k, v in os.environ.items() if "JAX_" not in k and k != "XLA_FLAGS"}
    command = [sys.executable, __file__, "--worker", json.dumps(case)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(_LINE):
            return json.loads(line.removeprefix(_LINE))
    raise RuntimeError(f"{case} gave no result:\n{done.stdout}")


def shown(case: dict[str, Any], found: dict[str, Any]) -> str:
    """A line of the table."""
    totals, (wall, user) = found["totals"], found["first"]
    return (
        f"| {case['problem']}, {case['size']:.0e} | {case['method']} "
        f"| {wall:.1f} | {user:.1f} | {found['ess']:.0f} "
        f"| {found['to_answer'][0]:.1f} | {found['to_answer'][1]:.1f} "
        f"| {totals['programs']:.0f} | {found['lines'] or ''} "
        f"| {totals['trace']:.1f} | {totals['lower']:.1f} | {totals['compile']:.1f} "
        f"| {found['load']:.1f} |"
    )


def shown_programs(found: dict[str, Any]) -> str:
    """Every compiled program, the most expensive first."""
    rows = []
    for name, spent in found["by_name"].items():
        if not spent["programs"]:
            continue
        lines = found["lines_by_name"].get(name, [])
        seconds = [spent.get(k, 0.0) for k in ("trace", "lower", "compile")]
        rows.append((sum(seconds), name, spent["programs"], lines, seconds))
    text = ["| program | times | lines | tracing | lowering | compiling |"]
    text.append("|---|---|---|---|---|---|")
    for _, name, times, lines, seconds in sorted(rows, reverse=True):
        numbers = " | ".join(f"{x:.2f}" for x in seconds)
        joined = ", ".join(map(str, lines))
        text.append(f"| `{name}` | {times:.0f} | {joined} | {numbers} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", default=["logistic"], choices=PROBLEMS)
    parser.add_argument("--sizes", type=float, nargs="+")
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the tables")
    parser.add_argument("--json", type=Path, help="a file for all results")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    import jax

    lines = [
        f"jax {jax.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores",
        "",
        "| problem | method | first run, s | user s | effective draws | "
        "to 1,000 effective draws, s | user s | programs | lines of StableHLO | "
        "tracing, s | lowering, s | compiling, s | load |",
        "|" + "---|" * 13,
    ]
    details, results = [], []
    print("\n".join(lines), flush=True)
    for _ in range(args.rounds):
        for problem in args.problems:
            for size in args.sizes or PROBLEMS[problem].sizes:
                for method in args.methods or PROBLEMS[problem].methods:
                    case = {
                        "problem": problem,
                        "size": int(size),
                        "method": method,
                        "programs": args.programs,
                        "again": args.again,
                    }
                    found = measured(case)
                    results.append({"case": case, "found": found})
                    lines.append(shown(case, found))
                    print(lines[-1], flush=True)
                    for name, (clock, spent) in found.get("again", {}).items():
                        details.append(
                            f"{name}: {clock[0]:.2f} s, user {clock[1]:.2f} s; "
                            f"programs {spent['programs']:.0f}, tracing "
                            f"{spent['trace']:.2f}, lowering {spent['lower']:.2f}, "
                            f"compiling {spent['compile']:.2f} s"
                        )
                        print(details[-1], flush=True)
                    if args.programs:
                        details.append(shown_programs(found))
                        print(details[-1], flush=True)
    if args.json:
        machine = {
            "jax": jax.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        text = json.dumps({"machine": machine, "results": results}, indent=1)
        args.json.write_text(text + "\n")
    if args.out:
        args.out.write_text("\n".join([*lines, "", *details, ""]))


if __name__ == "__main__":
    main()
