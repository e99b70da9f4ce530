"""NumPyro's own MCMC examples, with NUTS and with MinibatchMH in its place.

Each script in ``examples/`` and each notebook in ``notebooks/source/`` of a checkout of
NumPyro runs unchanged, in a separate process, up to its calls of ``MCMC.run``. Both
kernels then run on the model and the arguments of each call. Nothing is downloaded:
data sets are simulated in the shapes of the published ones, and loops of variational
inference are short.

    git clone https://github.com/pyro-ppl/numpyro
    python benchmarks/numpyro_examples.py numpyro --out table.md
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np

# options that make an example small, or that choose what it samples
OPTIONS = {
    "covtype": ["--algo", "NUTS"],
    "dais_demo": ["--num-svi-steps", "100"],
    "hmcecs": ["--dataset", "mock", "--num_datapoints", "2000", "--num_svi_steps", "50"]
    + ["--subsample_size", "5"],
    "hmm_enum": ["--num-sequences", "5", "--truncate", "20"],
    "neutra": ["--num-iters", "100"],
    "ssbvm_mixture": ["--device", "cpu", "--amino-acids", "S"],
    "zero_inflated_poisson": ["--maxiter", "100"],
}
PLOTS = {"seaborn", "preliz", "daft", "graphviz", "IPython"}
# other samplers, whose results are not compared
SAMPLERS = {"blackjax", "flowMC", "jaxns", "numpyro.contrib.nested_sampling"}
WARMUP, DRAWS = 500, 1000
SVI_STEPS = 100
FAR = 5.0  # Monte Carlo standard errors between two means that differ


class Outcome(NamedTuple):
    """The outcome of one call of ``MCMC.run``.

    :param example: the file.
    :param model: the model's name.
    :param outcome: ``"runs"``, ``"runs marginalized"`` (the original model is refused,
        and runs with :func:`numpyro_minibatch.marginalize`, which the message
        suggests), ``"refused"`` or ``"failed"``.
    :param reason: the message, if the original model does not run.
    :param rows: the plates and their rows.
    :param seconds: seconds until it had run, or was refused.
    :param tracing: seconds that tracing the model takes.
    :param nuts: seconds of NUTS.
    :param distance: the largest distance of a posterior mean from that of NUTS, in
        Monte Carlo standard errors, and of which parameter.
    """

    example: str
    model: str = ""
    outcome: str = ""
    reason: str = ""
    rows: str = ""
    seconds: float = 0.0
    tracing: float = 0.0
    nuts: float = 0.0
    distance: str = ""


# data in the shapes of the published ones --------------------------------------------


def _data_sets(rng: Any) -> dict[str, Callable[[], Any]]:
    def coins(p: Any) -> Any:
        return (rng.random(np.shape(p)) < p).astype(int)

    def covtype() -> Any:
        x = rng.normal(size=(2000, 54))
        logits = x[:, :5].sum(1) / 2
        return {"train": (x, np.where(coins(1 / (1 + np.exp(-logits))), 2, 1))}

    def dipper_vole() -> Any:
        caught = coins(np.full((294, 7), 0.4))
        caught[np.arange(294), rng.integers(0, 6, 294)] = 1
        sex = coins(np.full(294, 0.5))
        return {"dipper": (caught, sex), "vole": (caught.astype(float),)}

    def baseball() -> Any:
        at_bats = np.full(18, 45)
        skill = rng.beta(80, 220, 18)
        hits, later = rng.binomial(at_bats, skill), rng.binomial(400, skill)
        names = [f"player {i}" for i in range(18)]
        return {
            "train": (np.stack([at_bats, hits], 1), names),
            "test": (np.stack([np.full(18, 400), later], 1), names),
        }

    def ucbadmit() -> Any:
        department, male = np.repeat(np.arange(6), 2), np.tile([True, False], 6)
        applications = rng.integers(100, 800, 12)
        rate = 1 / (1 + np.exp(0.5 * department - 1 + 0.1 * male))
        return {
            "train": (
                department,
                male,
                applications,
                rng.binomial(applications, rate),
            )
        }

    def lynxhare() -> Any:
        t = np.arange(21)
        waves = [30 + 20 * np.sin(t / 1.6), 25 + 18 * np.sin(t / 1.6 - 1)]
        populations = np.stack(waves, 1) * np.exp(0.1 * rng.normal(size=(21, 2)))
        return {"train": (1900 + t, populations)}

    def chorales() -> Any:
        lengths = rng.integers(20, 40, 10)
        return {"train": (lengths, coins(np.full((10, 40, 88), 0.05)).astype("int32"))}

    def sp500() -> Any:
        returns = 0.01 * rng.standard_t(5, 500)
        days = [f"2005-01-{1 + i % 28:02}" for i in range(500)]
        return {"train": (days, 1000 * np.exp(np.cumsum(returns)))}

    def angles() -> Any:
        modes = np.array([[-1.5, 2.5], [-1.2, -0.6], [1.0, 0.5]])
        some = modes[rng.integers(0, 3, 300)] + 0.3 * rng.normal(size=(300, 2))
        return dict.fromkeys("SPG", (some + np.pi) % (2 * np.pi) - np.pi)

    def mortality() -> Any:
        a, s, t = (x.ravel() for x in np.indices((6, 10, 8)))
        population = rng.integers(200, 2000, a.size)
        effects = 0.3 * rng.normal(size=10)[s] + np.cumsum(0.15 * rng.normal(size=8))[t]
        trends = np.cumsum(0.03 * rng.normal(size=6))[a] * t
        logits = 0.6 * a - 5 + effects + trends
        deaths = rng.binomial(population, 1 / (1 + np.exp(-logits)))
        return {"train": (a, s // 5, s, t, deaths, population)}

    return {
        "covtype": covtype,
        "dipper_vole": dipper_vole,
        "baseball": baseball,
        "ucbadmit": ucbadmit,
        "lynxhare": lynxhare,
        "jsb_chorales": chorales,
        "SP500": sp500,
        "9mers": angles,
        "mortality": mortality,
    }


def _tables(rng: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """Columns of the files that examples read with pandas, by a part of the URL."""

    def patients() -> dict[str, Any]:
        who = np.repeat(np.arange(40), 9)
        status = np.array(["Ex-smoker", "Never smoked", "Currently smokes"])
        return {
            "Patient": np.array([f"ID{i:03}" for i in range(40)])[who],
            "Weeks": np.tile(np.arange(0, 45, 5), 40),
            "FVC": 2700 + 300.0 * rng.normal(size=40)[who] + 100 * rng.normal(size=360),
            "Percent": 70.0 + rng.normal(size=360),
            "Age": 65 + np.zeros(360, int),
            "Sex": np.repeat("Male", 360),
            "SmokingStatus": status[np.arange(40) % 3][who],
        }

    def wells() -> dict[str, Any]:
        return {
            "switch": rng.integers(0, 2, 3020),
            "arsenic": 0.5 + rng.gamma(1.5, 1.0, 3020),
            "dist": rng.gamma(2.0, 25.0, 3020),
            "assoc": rng.integers(0, 2, 3020),
            "educ": rng.integers(0, 18, 3020),
        }

    def titanic() -> dict[str, Any]:
        age = rng.gamma(6.0, 5.0, 891)
        age[rng.random(891) < 0.2] = np.nan
        titles = np.array(["Mr.", "Miss.", "Mrs.", "Master."])[rng.integers(0, 4, 891)]
        return {
            "Survived": rng.integers(0, 2, 891),
            "Pclass": rng.integers(1, 4, 891),
            "Name": [f"Doe, {title} Jo" for title in titles],
            "Sex": np.array(["male", "female"])[rng.integers(0, 2, 891)],
            "Age": age,
            "SibSp": rng.integers(0, 2, 891),
            "Parch": rng.integers(0, 3, 891),
            "Embarked": np.array(["S", "C", "Q"])[rng.integers(0, 3, 891)],
        }

    def divorces() -> dict[str, Any]:
        age = 26 + 1.2 * rng.normal(size=50)
        return {
            "Location": [f"state {i}" for i in range(50)],
            "Population": rng.gamma(2.0, 3.0, 50),
            "MedianAgeMarriage": age,
            "Marriage": 20 - 2 * (age - 26) + 3 * rng.normal(size=50),
            "Divorce": 9.5 - 1.0 * (age - 26) + 1.5 * rng.normal(size=50),
            "Divorce SE": 0.5 + rng.random(50),
            "WaffleHouses": rng.integers(0, 300, 50),
            "South": rng.integers(0, 2, 50),
        }

    def emails() -> dict[str, Any]:
        email = rng.integers(0, 2, 2000)
        limit = 800 + 300 * rng.gamma(2.0, 1.0, 2000)
        return {
            "email": email,
            "payments": 500 + 5 * email + 0.1 * limit + 50 * rng.normal(size=2000),
            "credit_limit": limit,
            "risk_score": rng.random(2000),
            "opened": rng.integers(0, 2, 2000),
            "agreement": rng.integers(0, 2, 2000),
        }

    def lynx() -> dict[str, Any]:
        t = np.arange(114)
        return {
            "time": 1821 + t,
            "value": np.exp(6.5 + 1.5 * np.sin(t * 0.65) + 0.3 * rng.normal(size=114)),
        }

    def births() -> dict[str, Any]:
        i = np.arange(730)
        weekend = np.isin(i % 7, (3, 4))
        return {
            "id": i + 1,
            "day_of_week": 1 + (i + 2) % 7,
            "day_of_year": 1 + i % 366,
            "births": 9000 - 1000 * weekend + 300 * rng.normal(size=730),
        }

    def fish() -> dict[str, Any]:
        return {
            "livebait": rng.integers(0, 2, 250),
            "camper": rng.integers(0, 2, 250),
            "persons": rng.integers(1, 5, 250),
            "child": rng.integers(0, 4, 250),
            "count": rng.poisson(2.0, 250) * rng.integers(0, 2, 250),
        }

    def credit() -> dict[str, Any]:
        codes = np.array([f"A{i}" for i in range(4)])
        return {
            **{f"code {i}": codes[rng.integers(0, 4, 1000)] for i in range(8)},
            **{f"number {i}": rng.normal(size=1000) for i in range(6)},
            "good": 1 + rng.integers(0, 2, 1000),
        }

    return {
        "statlog german credit": credit,
        "osic": patients,
        "gist.githubusercontent.com/ucals": patients,
        "wells.dat": wells,
        "titanic": titanic,
        "WaffleDivorce": divorces,
        "matheusfacure": emails,
        "lynx": lynx,
        "births_usa": births,
        "fish.dta": fish,
    }


# one example, in a separate process ---------------------------------------------------


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for modules that are not installed; they accept any call.

    :param names: of packages, or of modules inside one.
    """

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.names and name not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__all__ = [], spec, []
        return module

    def exec_module(self, module: Any) -> None:
        pass


class _Frame:
    """The few methods of a table of polars that an example calls.

    :param columns: the columns by name.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = {name: np.asarray(x) for name, x in columns.items()}

    def __getitem__(self, name: str) -> Any:
        column = MagicMock(wraps=self.columns[name])
        column.to_jax = lambda: __import__("jax").numpy.asarray(self.columns[name])
        return column

    def filter(self, chosen: Callable[[_Frame], Any]) -> _Frame:
        rows = chosen(self)
        return _Frame({name: x[rows] for name, x in self.columns.items()})

    def head(self) -> None:
        pass


class _Column:
    """A column of a table that is not known yet, for comparisons."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, value: object) -> Any:
        return lambda frame: frame.columns[self.name] == value


def _stand_ins(tables: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Modules that are not installed, with what the examples call of them."""
    import jax.numpy as jnp
    import pandas as pd  # type: ignore[import-untyped]

    def module(name: str, **contents: Any) -> Any:
        found = sys.modules[name] = types.ModuleType(name)
        vars(found).update(contents)
        return found

    def bessel_ive(order: Any, z: Any) -> Any:
        """Of whole orders, by the trapezoidal rule, which is exact for a period."""
        t = jnp.arange(256) * jnp.pi / 128
        order, z = jnp.asarray(order)[..., None], jnp.asarray(z)[..., None]
        return (jnp.exp(z * jnp.cos(t) - jnp.abs(z)) * jnp.cos(order * t)).mean(-1)

    def fetch(id: int) -> Any:
        columns = tables["statlog german credit"]()
        table = pd.DataFrame(
            {
                name: pd.Series(x, dtype=object if x.dtype.kind == "U" else None)
                for name, x in columns.items()
            }
        )
        features, targets = table.drop(columns="good"), table[["good"]]
        data = types.SimpleNamespace(features=features, targets=targets)
        return types.SimpleNamespace(data=data)

    math = types.SimpleNamespace(bessel_ive=bessel_ive)
    jax_of_tfp = module("tensorflow_probability.substrates.jax", math=math)
    substrates = module("tensorflow_probability.substrates", jax=jax_of_tfp)
    module("tensorflow_probability", substrates=substrates)
    # libraries of data frames ask polars, once it is imported, for its types
    kinds = {name: type(name, (), {}) for name in ("LazyFrame", "Series", "Expr")}
    module("polars", DataFrame=_Frame, col=_Column, lit=lambda value: value, **kinds)
    module("ucimlrepo", fetch_ucirepo=fetch)
    if importlib.util.find_spec("funsor") is None:
        # NUTS cannot enumerate then; the mark on the model changes nothing here
        enumeration = MagicMock(name="numpyro.contrib.funsor")
        enumeration.config_enumerate = lambda fn=None, **kwargs: fn or (lambda fn: fn)
        sys.modules["numpyro.contrib.funsor"] = enumeration


def _prepare(
    found: Callable[[Outcome], None], example: str, check: bool, chains: int
) -> None:
    """Replace data, loops and kernels by simulated data, short loops and both
    kernels."""
    import matplotlib
    import numpyro
    import pandas as pd  # type: ignore[import-untyped]
    from numpyro.examples import datasets
    from numpyro.infer import MCMC, SVI

    matplotlib.use("Agg")
    sys.meta_path.append(_Missing(PLOTS))
    sys.meta_path.insert(0, _Missing(SAMPLERS))
    rng = np.random.default_rng(0)
    simulated, tables = _data_sets(rng), _tables(rng)
    _stand_ins(tables)

    def load(dset: Any, num_datapoints: int | None = None) -> Any:
        return simulated[dset.name]()

    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        for part, make in tables.items():
            if part in str(path):
                return pd.DataFrame(make())
        raise FileNotFoundError(f"no data like {path}")

    datasets._load = load
    pd.read_csv = pd.read_stata = read
    fit = SVI.run

    def short(self: Any, key: Any, num_steps: int, *args: Any, **kwargs: Any) -> Any:
        kwargs["progress_bar"] = False
        return fit(self, key, min(num_steps, SVI_STEPS), *args, **kwargs)

    SVI.run = short
    sample = MCMC.run
    inside = False
    seen: set[Any] = set()

    def run(self: Any, rng_key: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        if inside:
            sample(self, rng_key, *args, **kwargs)
            return
        inside = True
        known = _key(self.sampler), _flags(args, kwargs)
        outcome = None
        if known not in seen:
            seen.add(known)
            call = rng_key, args, kwargs
            outcome = _compare(found, example, self.sampler, call, check, chains)
        inside = False
        # few draws, with which the example continues
        runs = outcome is not None and outcome.outcome == "runs"
        self.num_warmup = self.num_samples = 20 if runs else 5
        self.thinning, self.progress_bar = 1, False
        self._set_collection_params()
        inside = True
        try:
            sample(self, rng_key, *args, **kwargs)
        finally:
            inside = False

    MCMC.run = run
    numpyro.set_platform = lambda *args: None


def _key(sampler: Any) -> Any:
    """The identity of a model: its code, also inside of handlers."""
    model = _model(sampler)
    while model is not None and not hasattr(model, "__code__"):
        model = getattr(model, "fn", getattr(model, "func", None))
    return getattr(model, "__code__", None), getattr(model, "__closure__", None)


def _model(sampler: Any) -> Any:
    """The model of a kernel, also of one that an example defines."""
    return getattr(sampler, "model", None) or getattr(sampler, "_model", None)


def _flags(*arguments: Any) -> str:
    """The arguments of a call that choose a branch of the model."""
    import jax

    leaves = jax.tree.leaves(arguments)
    return repr([x for x in leaves if isinstance(x, bool)])


def _name(model: Any) -> str:
    while model is not None and not hasattr(model, "__name__"):
        model = getattr(model, "fn", getattr(model, "func", None))
    return getattr(model, "__name__", "")


def _compare(
    found: Callable[[Outcome], None],
    example: str,
    sampler: Any,
    call: tuple[Any, tuple, Mapping[str, Any]],
    check: bool,
    chains: int,
) -> Outcome:
    import jax
    from numpyro import handlers
    from numpyro.infer import MCMC, NUTS, init_to_uniform, init_to_value
    from numpyro.util import is_prng_key

    from numpyro_minibatch import MinibatchMH, marginalize

    rng_key, args, kwargs = call
    model = _model(sampler)
    outcome = Outcome(example, _name(model))
    if model is None:
        outcome = outcome._replace(outcome="refused", reason="potential_fn, no model")
        found(outcome)
        return outcome
    given = {k: v for k, v in kwargs.items() if k not in ("extra_fields",)}
    own = {k: v for k, v in given.items() if k != "init_params"}
    # refusals are timed on machines that do other things, too
    clock = time.process_time if check else time.perf_counter
    begin = clock()
    with contextlib.suppress(Exception):
        seeded = handlers.seed(model, 0)
        jax.eval_shape(lambda: handlers.trace(seeded).get_trace(*args, **own) and None)
    outcome = outcome._replace(tracing=clock() - begin)
    inner = getattr(sampler, "inner_kernel", sampler)
    start = getattr(inner, "_init_strategy", init_to_uniform)
    if not is_prng_key(rng_key):
        rng_key = rng_key[0]  # for several chains

    def sampled(kernel: Any) -> Any:
        mcmc = MCMC(
            kernel,
            num_warmup=WARMUP,
            num_samples=DRAWS,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(rng_key, *args, **given)
        return jax.block_until_ready(mcmc.get_samples(group_by_chain=True))

    def tried(model: Any) -> tuple[Any, Any]:
        kernel = MinibatchMH(model, control_variate="taylor2", init_strategy=start)
        if not check:
            return kernel, sampled(kernel)
        _check_only(kernel, given.get("init_params"), args, own)
        return kernel, {}

    begin = clock()
    how = "runs"
    try:
        kernel, ours = tried(model)
    except Exception as error:
        refused = isinstance(error, ValueError | TypeError)
        outcome = outcome._replace(
            outcome="refused" if refused else "failed",
            reason=str(error) if refused else traceback.format_exc()[-1500:],
            seconds=clock() - begin,
        )
        found(outcome)
        offered = re.search(r"marginalize\(model, sites=(\[.*?\])\)", outcome.reason)
        if not refused or offered is None:
            return outcome
        begin = clock()
        try:
            kernel, ours = tried(marginalize(model, sites=json.loads(offered[1])))
        except Exception:
            return outcome
        how = "runs marginalized"
    outcome = outcome._replace(
        outcome=how,
        seconds=clock() - begin,
        rows=", ".join(f"{n} {name}" for name, n in kernel.plates.items()),
    )
    found(outcome)  # printed now, in case NUTS exceeds the time limit
    if check:
        return outcome
    begin = clock()
    try:
        # NUTS enumerates by funsor, if that is installed: the same posterior
        same = kernel.model if _differs(kernel) else model
        theirs = sampled(NUTS(same, init_strategy=start))
        seconds = clock() - begin
        distance = _distance(ours, theirs)
        if chains == 1 and float(distance.split()[0] if distance else 0) > FAR:
            # of components with interchangeable labels, say, each has its own order
            draw = {name: x[0, -1] for name, x in ours.items()}
            theirs = sampled(NUTS(same, init_strategy=init_to_value(values=draw)))
            near = _distance(ours, theirs)
            distance = f"{near} with NUTS from a draw of ours, {distance} without"
    except Exception as error:
        outcome = outcome._replace(distance=f"NUTS: {type(error).__name__}")
    else:
        outcome = outcome._replace(nuts=seconds, distance=distance)
    found(outcome)
    return outcome


def _check_only(kernel: Any, start: Any, args: tuple, kwargs: Any) -> None:
    """The checks of a kernel before its set-up."""
    from numpyro_minibatch._model.independence import check_rows

    kernel._setup(args, kwargs)
    target, layout = kernel.make_target, kernel.layout
    check_rows("MinibatchMH", target, kernel.model, args, kwargs, layout, start)


def _differs(kernel: Any) -> bool:
    """Whether NUTS does not run on the model as it is: discrete sites, subsamples."""
    return bool(kernel.settings.get("marginalized") or kernel.layout.subsampled)


def _distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The largest distance of two means, in Monte Carlo standard errors.

    It tells little where a chain has not converged, so the largest split R-hat of
    either kernel stands beside it if it is above 1.05.
    """
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

    worst, where = 0.0, ""
    rhat = [0.0, 0.0]
    for name in ours.keys() & theirs.keys():
        both = [np.asarray(x[name], np.float64) for x in (ours, theirs)]
        if both[0].shape[2:] != both[1].shape[2:] or not both[0].size:
            continue
        means = [x.mean((0, 1)) for x in both]
        with np.errstate(all="ignore"):
            each = [np.nan_to_num(split_gelman_rubin(x)).max() for x in both]
            rhat = [max(a, float(b)) for a, b in zip(rhat, each, strict=True)]
            errors = [x.var((0, 1)) / effective_sample_size(x) for x in both]
            far = np.abs(means[0] - means[1]) / np.sqrt(errors[0] + errors[1])
        largest = np.nanmax(np.where(np.isfinite(far), far, 0.0))
        if largest > worst:
            worst, where = float(largest), name
    slow = [
        f"R-hat {x:.2f} of {kernel}"
        for kernel, x in zip(("ours", "NUTS"), rhat, strict=True)
        if x > 1.05
    ]
    return "; ".join([f"{worst:.1f} ({where})", *slow]) if where else ""


def _run_one(path: Path, out: Path, check: bool, chains: int) -> None:
    import numpyro_minibatch  # noqa: F401  # sets a flag before JAX makes an array

    warnings.simplefilter("ignore")

    def found(outcome: Outcome) -> None:
        with out.open("a") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")

    example = path.stem
    _prepare(found, example, check, chains)
    sys.argv = [str(path), *OPTIONS.get(example, [])]
    sys.path.insert(0, str(path.parent))
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    if path.suffix == ".py":
        # an example requires one version of NumPyro, but others work, too
        text = re.sub(
            r"^( *)assert numpyro.__version__.*$",
            r"\1pass",
            path.read_text(),
            flags=re.M,
        )
        exec(compile(text, str(path), "exec"), space)
        return
    cells = json.loads(path.read_text())["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        text = "\n".join("" if re.match(r"\s*[!%]", x) else x for x in lines)
        name = f"{path.name} cell {number}"
        # messages quote the lines of a model
        linecache.cache[name] = len(text), None, text.splitlines(True), name
        try:
            exec(compile(text, name, "exec"), space)
        except Exception as error:  # most often a plot
            print(f"{example}: {type(error).__name__}: {error}", file=sys.stderr)


# all of them -------------------------------------------------------------------------


def _is_mcmc(path: Path) -> bool:
    return bool(re.search(r"\bMCMC\(", path.read_text()))


def _outcomes(path: Path, limit: float, check: bool, chains: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        command = [sys.executable, __file__, "--one", str(path), "--out", str(out)]
        command += ["--check"] if check else []
        command += ["--chains", str(chains)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, cwd=folder
            )
            errors = done.stderr
        except subprocess.TimeoutExpired as error:
            errors = f"more than {limit:.0f} s"
            del error
        lines = out.read_text().splitlines() if out.exists() else []
    found = {o["model"]: Outcome(**o) for o in map(json.loads, lines)}
    if found:
        return list(found.values())
    last = errors.strip().splitlines()[-1] if errors.strip() else "no call of MCMC.run"
    return [Outcome(path.stem, outcome="not tried", reason=last[:200])]


def _table(outcomes: list[Outcome]) -> str:
    lines = [
        "| example | model | outcome | rows | seconds | NUTS | distance | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        reason = re.sub(r"\s+", " ", o.reason).replace("|", "/")
        nuts = f"{o.nuts:.1f}" if o.nuts else ""
        lines.append(
            f"| `{o.example}` | `{o.model}` | {o.outcome} | {o.rows} | {o.seconds:.1f} "
            f"| {nuts} | {o.distance} | {reason} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?", help="of NumPyro")
    parser.add_argument("--only", nargs="*", help="names of examples")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of each")
    parser.add_argument(
        "--check",
        action="store_true",
        help="the model only: no draws, and seconds of processor time",
    )
    parser.add_argument("--chains", type=int, default=1, help="vectorised, of each run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _run_one(args.one, args.out, args.check, args.chains)
        return
    root = args.checkout.resolve()
    files = sorted(root.glob("examples/*.py")) + sorted(
        root.glob("notebooks/source/*.ipynb")
    )
    outcomes: list[Outcome] = []
    for path in files:
        if (args.only and path.stem not in args.only) or not _is_mcmc(path):
            continue
        found = _outcomes(path, args.limit, args.check, args.chains)
        outcomes += found
        print(_table(found).split("\n", 2)[2], end="", flush=True)
        if args.out:
            args.out.write_text(_table(outcomes))


if __name__ == "__main__":
    main()
