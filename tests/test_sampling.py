"""The driver for long runs: chunks, folders, interrupts and refusals."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import test_contract as contract
from jax import random
from numpyro.infer import HMC, MCMC, BarkerMH

from numpyro_minibatch import (
    MINT,
    CyclicalSGLD,
    MinibatchMH,
    ReplicaExchange,
    Target,
    open_run,
    sample,
)
from numpyro_minibatch.__main__ import main
from numpyro_minibatch._internal import progress
from numpyro_minibatch._internal.static import digest
from numpyro_minibatch._model import content, preflight
from numpyro_minibatch.inference_data import get_group
from numpyro_minibatch.sampling import _pace, _run
from numpyro_minibatch.sampling._store import Store
from numpyro_minibatch.target import ModelTarget

slow = pytest.mark.slow

N = 503
_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 2)).astype(np.float32)
Y = (X @ [1.0, -0.5] + _rng.normal(size=N)).astype(np.float32)


def model(x: Any, y: Any = None) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("norm", jnp.sqrt(jnp.sum(b**2)))
    with numpyro.plate("data", N, subsample_size=50) as i:
        numpyro.sample("obs", dist.Normal(x[i] @ b, 1.0), obs=y[i])


def whole(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("obs", dist.Normal(x @ b, 1.0), obs=y)


KERNEL = MINT(model, temperature=20.0)
SETTINGS: dict[str, Any] = {
    "num_warmup": 60,
    "num_samples": 90,
    "num_chains": 2,
    "seed": 3,
    "progress": False,
}


def run(**changes: Any) -> Any:
    return sample(KERNEL, X, Y, **{**SETTINGS, **changes})


def values(idata: Any, group: str = "posterior") -> dict[str, np.ndarray]:
    dataset = get_group(idata, group)
    assert dataset is not None
    return {str(name): np.asarray(dataset[name]) for name in dataset.data_vars}


def assert_same(one: Any, other: Any, group: str = "posterior") -> None:
    first, second = values(one, group), values(other, group)
    assert first.keys() == second.keys() and first
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.fixture(scope="module")
def whole_run() -> Any:
    """The reference run, in memory and in one chunk."""
    return run(keep_warmup=True)


def in_chunks_of(monkeypatch: Any, steps: int) -> None:
    """Make every chunk this many steps long, with a commit after each."""

    def saw(self: Any, _: int) -> None:
        self.steps = steps

    monkeypatch.setattr(_pace.Pace, "saw", saw)
    monkeypatch.setattr(_run, "_COMMIT_SECONDS", -1.0)


# progress ----------------------------------------------------------------------------


def test_without_progress_the_setup_shows_none(
    monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    prepared = KERNEL.init

    def init(*args: Any, **kwargs: Any) -> Any:
        with progress.stages("a kernel", 2):
            progress.stage("a stage")
        return prepared(*args, **kwargs)

    monkeypatch.setattr(KERNEL, "init", init)
    for shown in (True, False):
        run(progress=shown, num_samples=10, num_warmup=10)
        assert ("a kernel: a stage" in capfd.readouterr().err) == shown


@pytest.mark.parametrize("shown", [True, False])
def test_the_driver_of_numpyro_decides_on_the_bar_of_the_setup(
    shown: bool, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    for variable in ("TQDM_DISABLE", "CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(variable, raising=False)

    class Surveyed(MINT):
        """Prepares a run, and says so."""

        @property
        def _surveys(self) -> bool:
            return True

        def _survey(self, problem: Any, init: Any) -> Any:
            with progress.stages("a kernel", 1):
                progress.stage("a stage")
            raise InterruptedError

    kernel = Surveyed(model, temperature=20.0)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=shown)
    with pytest.raises(InterruptedError):
        mcmc.run(random.key(0), X, Y)
    assert ("a kernel: a stage" in capfd.readouterr().err) == shown


@pytest.mark.parametrize("yes", [True, False])
def test_a_bar_leaves_it_to_tqdm_whether_the_environment_wants_one(
    yes: bool, monkeypatch: Any
) -> None:
    given: dict[str, Any] = {}
    real = progress.tqdm
    monkeypatch.setattr(
        progress, "tqdm", lambda **k: given.update(k) or real(**{**k, "disable": True})
    )
    with progress.shown(yes), progress.stages("a kernel", 2):
        progress.stage("a stage")
    assert given.get("disable") is (None if yes else True)  # False overrules it


# draws -------------------------------------------------------------------------------


def test_draws_are_those_of_a_plain_loop(whole_run: Any) -> None:
    kernel = MINT(model, temperature=20.0)
    keys = random.split(random.key(3), 2)
    state = kernel.init(keys, 60, model_args=(X, Y), model_kwargs={})

    def step(state: Any, _: Any) -> Any:
        state = kernel.sample(state, (jnp.asarray(X), jnp.asarray(Y)), {})
        return state, (state.z["b"], state.num_rows)

    _, (b, rows) = jax.jit(lambda s: jax.lax.scan(step, s, length=150))(state)
    b = np.moveaxis(np.asarray(b), 0, 1)
    np.testing.assert_allclose(values(whole_run)["b"], b[:, 60:], rtol=1e-5)
    warm = values(whole_run, "warmup_posterior")["b"]
    np.testing.assert_allclose(warm, b[:, :60], rtol=1e-5)
    found = values(whole_run, "sample_stats")["num_rows"]
    np.testing.assert_array_equal(found, np.asarray(rows).T[:, 60:])


def test_what_a_result_holds(whole_run: Any) -> None:
    posterior = whole_run["posterior"]
    assert posterior["b"].dims == ("chain", "draw", "b_dim_0")
    norm = np.linalg.norm(posterior["b"].values, axis=-1)
    np.testing.assert_allclose(posterior["norm"].values, norm, rtol=1e-5)
    assert posterior.attrs["target"] == "prior * likelihood ** (1 / 20)"
    assert whole_run["observed_data"]["obs"].shape == (N,)
    assert {"acceptance_rate", "num_rows"} <= set(whole_run["sample_stats"].data_vars)


@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_draws_do_not_depend_on_chunks(
    steps: int, whole_run: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    in_chunks_of(monkeypatch, steps)
    for out in (None, tmp_path / "run"):
        found = run(keep_warmup=True, out=out)
        for group in ("posterior", "sample_stats", "warmup_posterior"):
            assert_same(found, whole_run, group)


def test_thinning(whole_run: Any) -> None:
    thinned = run(num_samples=30, thinning=3)
    np.testing.assert_array_equal(values(thinned)["b"], values(whole_run)["b"][:, 2::3])


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("acceptance_rate", "accept_prob"), ("lp_estimat", "lp_estimate")],
)
def test_a_field_that_is_misspelt_is_named(asked: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"asks for '{asked}'.*'{meant}'"):
        run(extra_fields=(asked,))


def test_one_chain_and_extra_fields() -> None:
    found = run(num_chains=1, extra_fields=("mean_accept_prob",))
    assert found["posterior"].sizes["chain"] == 1
    assert values(found, "sample_stats")["mean_accept_prob"].shape == (1, 90)


def test_a_second_run_compiles_and_traces_nothing(
    whole_run: Any, monkeypatch: Any
) -> None:
    compiled, traced = [], []
    trace = ModelTarget.trace

    def note_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(self.model)  # every run of a model passes through here
        return trace(self, *args, **kwargs)

    monkeypatch.setattr(ModelTarget, "trace", note_trace)

    def note(name: str, *_: Any, **__: Any) -> None:
        compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        again = run(keep_warmup=True)
        equal = sample(
            MINT(model, temperature=20.0), X, Y, **SETTINGS, keep_warmup=True
        )
        after = [name for name in compiled if "backend_compile" in name]
        number = len(traced)
        run(num_chains=3)
        assert len(traced) > number
        assert any("backend_compile" in name for name in compiled)  # the check can fail
    finally:
        # the public function for removal came later
        getattr(
            jax.monitoring,
            "unregister_event_duration_listener",
            getattr(
                jax._src.monitoring,
                "_unregister_event_duration_listener_by_callback",
                lambda _: None,
            ),
        )(note)
    assert not after and not number
    assert_same(again, whole_run)
    assert_same(equal, whole_run)


def in_groups(y: Any, number: int, scale: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, WIDTH).expand([number]).to_event(1))
    if scale is not None:
        mu = mu * numpyro.param("scale", jnp.mean(scale))
    with numpyro.plate("data", len(y), subsample_size=len(y) // 5) as i:
        numpyro.sample("obs", dist.Normal(mu[i % number], 1.0), obs=y[i])


WIDTH = 1.0


def test_what_a_model_is_remembered_by(monkeypatch: Any) -> None:
    runs = []
    inspected = preflight._inspected

    def note(*args: Any) -> Any:
        runs.append(args)
        return inspected(*args)

    monkeypatch.setattr(preflight, "_inspected", note)

    def layout(y: Any, *rest: Any) -> tuple[Any, bool]:
        """The layout of the result, and whether the model had to be run for it."""
        runs.clear()
        with content.remembered(digest(in_groups)):
            found = preflight.inspect_model("MINT", in_groups, (y, *rest), {}, None)
        return found, bool(runs)

    preflight._FOUND.pop(in_groups, None)
    y = np.ones(100, np.float32)
    first, anew = layout(y, 2)
    assert anew and first[0].shapes == ((2,),) and first[0].plates == (("data", 100),)
    assert layout(y + 1, 2) == (first, False)  # only the content differs
    # another shape, another number that the model reads, another type
    for changed in ((y[:50], 2), (y, 3), (y.astype(np.int32), 2)):
        found, anew = layout(*changed)
        assert anew and (found != first or changed[0].dtype != y.dtype)
    # values of `param` sites come from the data
    for factor in (1.0, 2.0):
        found, anew = layout(y, 2, factor * y)
        assert anew and found[1]["scale"] == factor
    # what the model reads from its surroundings
    monkeypatch.setitem(globals(), "WIDTH", 2.0)
    assert layout(y, 2)[1]
    # without a driver that identifies the content, nothing is remembered
    preflight.inspect_model("MINT", in_groups, (y, 2), {}, None)
    assert len(runs) == 2
    # no data are kept alive
    kept = weakref.ref(y)
    runs.clear()
    del y, changed
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("inner", [HMC(whole), BarkerMH(whole)], ids=["HMC", "Barker"])
def test_kernels_of_numpyro(inner: Any) -> None:
    found = sample(inner, X, Y, **{**SETTINGS, "num_warmup": 200, "num_samples": 300})
    b = values(found)["b"]
    exact = np.linalg.solve(X.T @ X + np.eye(2), X.T @ Y)
    np.testing.assert_allclose(b.mean((0, 1)), exact, atol=0.05)
    again = sample(inner, X, Y, **{**SETTINGS, "num_warmup": 200, "num_samples": 300})
    assert_same(found, again)
    if isinstance(inner, HMC):
        stats = values(found, "sample_stats")
        assert {"acceptance_rate", "lp", "n_steps", "step_size"} <= set(stats)


def test_targets_ladders_and_start() -> None:
    target = Target(lambda z: -0.5 * z @ z, lambda z, i: 0.0 * i * z[0], 40)
    inner = MinibatchMH(target=target, estimate="exact")
    kernel = ReplicaExchange(inner, temperatures=[1.0, 2.0], collect_rungs=True)
    start = jnp.ones((2, 3))
    found = sample(kernel, **SETTINGS, init_params=start)
    assert found["rungs"]["z"].dims[:3] == ("chain", "draw", "ladder")
    np.testing.assert_array_equal(
        found["rungs"]["z"].values[:, :, 0], found["posterior"]["z"].values
    )


# folders -----------------------------------------------------------------------------


def test_a_run_goes_on_bit_for_bit(whole_run: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(num_samples=20, out=out, keep_warmup=True)
    part = open_run(out)
    assert part["posterior"].sizes["draw"] == 20
    found = run(out=out, resume=True, keep_warmup=True)
    for group in ("posterior", "sample_stats", "warmup_posterior"):
        assert_same(found, whole_run, group)
        assert_same(open_run(out), whole_run, group)
    # there is nothing left to do
    assert_same(run(out=out, resume=True, keep_warmup=True), whole_run)
    assert found["posterior"].attrs["temperature"] == 20.0
    assert json.loads((out / "run.json").read_text())["num_samples"] == 90


def test_a_folder_is_read_where_it_is_looked_at(tmp_path: Path) -> None:
    run(out=tmp_path / "run")
    b = open_run(tmp_path / "run")["posterior"]["b"].variable._data
    array = np.asarray(b.array if hasattr(b, "array") else b)
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base  # type: ignore[assignment]
    assert isinstance(array, np.memmap)


def test_show(tmp_path: Path, capsys: Any) -> None:
    run(out=tmp_path / "run")
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "2 chains: 60 of 60 steps of the warmup, 90 of 90 draws" in shown
    assert "acceptance rate" in shown and "b[0]" in shown
    assert main(["show", str(tmp_path)]) == 1
    assert "no run.json" in capsys.readouterr().err


KILLED = """
import sys
import jax
sys.path.insert(0, {tests!r})
import test_sampling as t
from numpyro_minibatch.sampling import _pace, _run

def saw(self, _):
    self.steps = 5
_pace.Pace.saw = saw
_run._COMMIT_SECONDS = -1.0
print("started", flush=True)
t.run(num_samples=4000, out={out!r}, resume=True, keep_warmup=True,
      seed=jax.random.key(3, impl={impl!r}))
"""


@slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_killed_runs_go_on(impl: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = KILLED.format(tests=str(Path(__file__).parent), out=str(out), impl=impl)
    rng = np.random.default_rng(0)
    before = 0
    for _ in range(2):
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            steps = _steps(out)
            # after it has run for a while
            while _steps(out) < steps + 40:
                assert child.poll() is None, "ended by itself"
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
        have = open_run(out)["posterior"].sizes["draw"] if _steps(out) > 60 else 0
        assert have >= before
        before = have
    key = random.key(3, impl=impl)
    wanted = before + 30
    found = run(num_samples=wanted, out=out, resume=True, keep_warmup=True, seed=key)
    whole = run(num_samples=wanted, keep_warmup=True, seed=key)
    for group in ("posterior", "sample_stats", "warmup_posterior"):
        assert_same(found, whole, group)


def _steps(out: Path) -> int:
    return Store(out).counts().get("steps", 0)


def test_an_interrupt_returns_what_was_drawn(whole_run: Any, monkeypatch: Any) -> None:
    in_chunks_of(monkeypatch, 5)
    calls = 0
    take = _run.Run._take

    def interrupted(self: Any, *args: Any, **settings: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            os.kill(os.getpid(), signal.SIGINT)
        take(self, *args, **settings)

    monkeypatch.setattr(_run.Run, "_take", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.warns(UserWarning, match="interrupted after .. of 90 draws"):
        found = run()
    assert signal.getsignal(signal.SIGINT) is before
    b = values(found)["b"]
    assert 0 < b.shape[1] < 90
    np.testing.assert_array_equal(b, values(whole_run)["b"][:, : b.shape[1]])
    calls = 19
    with pytest.raises(KeyboardInterrupt, match="before the first draw"):
        run(num_warmup=500)


def test_in_a_thread() -> None:
    found = []
    worker = threading.Thread(target=lambda: found.append(run()))
    worker.start()
    worker.join()
    assert found[0]["posterior"].sizes["draw"] == 90


# refusals ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    run(out=out)
    return out


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 4}, "seed"),
        ({"num_chains": 3}, "num_chains"),
        ({"num_warmup": 61}, "num_warmup"),
        ({"thinning": 2}, "thinning"),
        ({"keep_warmup": True}, "keep_warmup"),
        ({"num_samples": 10}, "already has 90 draws"),
        ({"resume": False}, "already holds a run"),
    ],
)
def test_another_run_is_not_gone_on_with(
    changes: Any, names: str, finished: Path
) -> None:
    with pytest.raises(ValueError, match=names):
        run(**{"out": finished, "resume": True, **changes})


def test_other_data_and_kernels_are_not_gone_on_with(finished: Path) -> None:
    settings = {**SETTINGS, "out": finished, "resume": True}
    with pytest.raises(ValueError, match="differs in data"):
        sample(KERNEL, X, Y + 1e-6, **settings)
    with pytest.raises(ValueError, match="differs in what the kernel does"):
        sample(MINT(model, temperature=21.0), X, Y, **settings)
    with pytest.raises(ValueError, match="differs in kernel"):
        sample(HMC(whole), X, Y, **settings)

    def other(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        with numpyro.plate("data", N, subsample_size=50) as i:
            numpyro.sample("obs", dist.Normal(x[i] @ b, 1.0), obs=y[i])

    with pytest.raises(ValueError, match="differs in what the kernel does"):
        sample(MINT(other, temperature=20.0), X, Y, **settings)
    # another kernel object that is equal is accepted
    again = sample(MINT(model, temperature=20.0), X, Y, **settings)
    assert_same(again, open_run(finished))


def test_damage_is_found(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out=out)
    header = json.loads((out / "run.json").read_text())
    first = out / header["variables"][0]["file"]
    content = first.read_bytes()
    first.write_bytes(content[:-8])
    with pytest.raises(ValueError, match="has only .* bytes, but 90 draws take"):
        open_run(out)
    with pytest.raises(ValueError, match="has only .* bytes"):
        run(out=out, resume=True)
    first.unlink()
    with pytest.raises(ValueError, match="is missing"):
        open_run(out)
    # a killed run leaves more than the valid draws
    first.write_bytes(content + b"more")
    assert open_run(out)["posterior"].sizes["draw"] == 90
    run(out=out, resume=True)
    assert first.read_bytes() == content
    (out / "run.json").write_text(json.dumps({**header, "format": 2}))
    with pytest.raises(ValueError, match="written in format 2"):
        open_run(out)
    (out / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        open_run(out)


def test_a_disk_that_is_full_keeps_what_was_committed(
    whole_run: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    in_chunks_of(monkeypatch, 10)
    append, calls = Store.append, 0

    def full(self: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise OSError(28, "No space left on device")
        append(self, *args)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", full)
        with pytest.raises(OSError, match="No space left"):
            run(out=out)
    kept = values(open_run(out))["b"]
    assert 0 < kept.shape[1] < 90
    np.testing.assert_array_equal(kept, values(whole_run)["b"][:, : kept.shape[1]])
    assert_same(run(out=out, resume=True), whole_run)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write there"):
        run(out=tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"num_samples": 0}, ValueError, "num_samples"),
        ({"num_chains": 1.5}, TypeError, "num_chains"),
        ({"thinning": 0}, ValueError, "thinning"),
        ({"num_warmup": -1}, ValueError, "num_warmup"),
        ({"resume": True}, ValueError, "pass out="),
        ({"progress": 1}, TypeError, "progress"),
    ],
)
def test_bad_arguments(changes: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        run(**changes)
    with pytest.raises(TypeError, match="needs a kernel such as"):
        sample(model, X, Y, **SETTINGS)  # type: ignore[arg-type]


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run\.json"):
        open_run(tmp_path)


# the dependencies of a program -------------------------------------------------------

CENTRE = [0.0]


def reads_a_global(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", N, subsample_size=50) as i:
        numpyro.sample("obs", dist.Normal(mu + CENTRE[0], 1.0), obs=y[i])


def reads_a_param(y: Any) -> None:
    centre = numpyro.param("centre", jnp.mean(y))
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", N, subsample_size=50) as i:
        numpyro.sample("obs", dist.Normal(mu + centre, 1.0), obs=y[i])


def mean_of(kernel: Any, *data: Any) -> float:
    settings = {**SETTINGS, "num_warmup": 200, "num_samples": 300}
    return float(values(sample(kernel, *data, **settings))["mu"].mean())


def test_settings_in_a_module_or_a_class_are_part_of_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Settings:
        scale = 1.0

    module = types.ModuleType("settings")
    module.__dict__["other"] = np.ones(2)

    def model() -> Any:
        return Settings.scale * module.other

    before = digest(model)
    assert digest(model) == before
    Settings.scale = 2.0
    assert digest(model) != before
    Settings.scale = 1.0
    monkeypatch.setitem(module.__dict__, "other", np.zeros(2))
    assert digest(model) != before


@slow
def test_surroundings_of_a_model_are_seen(monkeypatch: Any) -> None:
    for kernel in (MINT(reads_a_global, temperature=1.0), HMC(reads_a_global_whole)):
        monkeypatch.setattr(sys.modules[__name__], "CENTRE", [0.0])
        assert abs(mean_of(kernel, NOISE)) < 0.5
        monkeypatch.setattr(sys.modules[__name__], "CENTRE", [5.0])
        assert abs(mean_of(kernel, NOISE) + 5.0) < 0.5


def reads_a_global_whole(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.sample("obs", dist.Normal(mu + CENTRE[0], 1.0), obs=y)


NOISE = (Y - X @ [1.0, -0.5]).astype(np.float32)


@slow
def test_params_and_arrays_that_change_are_seen() -> None:
    for kernel in (MINT(reads_a_param, temperature=1.0), HMC(reads_a_param_whole)):
        assert abs(mean_of(kernel, NOISE)) < 0.5
        assert abs(mean_of(kernel, NOISE + 5.0)) < 0.5  # the mean is taken out


def reads_a_param_whole(y: Any) -> None:
    centre = numpyro.param("centre", jnp.mean(y))
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.sample("obs", dist.Normal(mu + centre, 1.0), obs=y)


@slow
def test_a_control_variate_is_of_the_data_as_they_are(tmp_path: Path) -> None:
    data = np.tile(NOISE, 4)

    kernel = MinibatchMH(reads_nothing_else, control_variate="taylor2")
    first = mean_of(kernel, data)
    data += 0.3
    assert abs(mean_of(kernel, data) - first - 0.3) < 0.05
    # the expansion is written once, and a resumed run uses it
    settings = {**SETTINGS, "out": tmp_path / "run"}
    sample(kernel, data, **{**settings, "num_samples": 20})
    written = (tmp_path / "run" / "constant.npz").stat().st_mtime_ns
    found = sample(kernel, data, **settings, resume=True)
    assert (tmp_path / "run" / "constant.npz").stat().st_mtime_ns == written
    assert_same(found, sample(kernel, data, **SETTINGS))


def reads_nothing_else(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("data", 4 * N, subsample_size=100) as i:
        numpyro.sample("obs", dist.StudentT(5.0, mu, 1.0), obs=y[i])


DIGEST = """
import functools
from numpyro_minibatch import SGLD, schedule
from numpyro_minibatch._internal.static import digest

def make(scale):
    def model(x, kind="a"):
        return x * scale if kind in {"a", "bcd", "e"} else helper(x)
    return model

def helper(x):
    return x + 1

print(digest((make(1.0), functools.partial(helper, 2), lambda k: 0.1 / (k + 1))))
print(digest(make(2.0)) == digest(make(1.0)))
"""


def test_digests_are_those_of_another_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1 and "False" in found.pop()


def test_surroundings_are_part_of_a_run(tmp_path: Path, monkeypatch: Any) -> None:
    kernel = MINT(reads_a_global, temperature=1.0)
    settings = {**SETTINGS, "out": tmp_path / "run"}
    sample(kernel, NOISE, **{**settings, "num_samples": 10})
    monkeypatch.setattr(sys.modules[__name__], "CENTRE", [5.0])
    with pytest.raises(ValueError, match="differs in what the kernel does"):
        sample(kernel, NOISE, **settings, resume=True)
    monkeypatch.setattr(sys.modules[__name__], "CENTRE", [0.0])
    with pytest.raises(ValueError, match="differs in fields"):
        sample(kernel, NOISE, **settings, resume=True, extra_fields=("adapt_state",))
    sample(kernel, NOISE, **settings, resume=True)


def test_one_process_at_a_run(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    store = Store(tmp_path / "run")
    store.lock()
    with pytest.raises(ValueError, match="another process is writing this run"):
        run(out=tmp_path / "run")
    store.unlock()
    run(out=tmp_path / "run")


def test_what_is_left_of_a_run_is_not_written_to(tmp_path: Path) -> None:
    run(out=tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ValueError, match=r"whose run\.json is missing"):
        run(out=tmp_path / "run")


def test_a_finished_run_has_its_data_and_its_thinning(tmp_path: Path) -> None:
    run(out=tmp_path / "run", thinning=2, num_samples=10)
    found = run(out=tmp_path / "run", thinning=2, num_samples=10, resume=True)
    assert found["observed_data"]["obs"].shape == (N,)
    assert found["posterior"].attrs["thinning"] == 2
    assert open_run(tmp_path / "run")["posterior"].attrs["thinning"] == 2


# the kernels under both drivers ------------------------------------------------------


@slow
@pytest.mark.parametrize(
    "name", ["AMAGOLD", "RENHD", "MINTEE", "CyclicalSGHMC", "CyclicalMINT"]
)
def test_draws_are_those_of_numpyros_driver(name: str) -> None:
    made = contract.KERNELS[name]
    draws = 2 * getattr(made(), "samples_per_cycle", 6)
    mcmc = MCMC(
        made(),
        num_warmup=contract.WARMUP,
        num_samples=draws,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    data = jnp.asarray(contract.X), jnp.asarray(contract.Y)
    mcmc.run(random.key(1), *data)
    settings = {"num_warmup": contract.WARMUP, "num_samples": draws, "num_chains": 2}
    found = sample(made(), *data, **settings, seed=1, progress=False)
    expected = mcmc.get_samples(group_by_chain=True)
    assert np.ptp(values(found)["beta"], axis=1).max() > 0.0  # they moved
    for site in ("beta", "scale", "norm"):
        # rounding differs between the programs of the two drivers and grows with the
        # steps
        np.testing.assert_allclose(
            values(found)[site], expected[site], rtol=2e-3, atol=2e-4
        )


def test_a_cycle_that_would_be_cut_short_is_refused() -> None:
    kernel = CyclicalSGLD(model, step_size=1e-4, cycle_length=50, samples_per_cycle=5)
    says = r"num_samples=10 or 15 \(times thinning\), or choose samples_per_cycle"
    with pytest.raises(ValueError, match=says):
        sample(kernel, X, Y, num_warmup=0, num_samples=12, progress=False)
    with pytest.raises(ValueError, match=r"num_samples=5 \(times"):
        sample(kernel, X, Y, num_warmup=0, num_samples=2, progress=False)
    # with thinning the steps count
    kernel.check_draws(0, 4 * 5)
