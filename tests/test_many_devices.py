"""Runs on several devices and in several processes, and their export."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from compiling import quick_flags
from jax.sharding import Mesh
from test_sampling import N, X, Y, assert_same, model, run, values

from numpyro_minibatch import (
    SGLD,
    HostRows,
    MinibatchMH,
    ReplicaExchange,
    Target,
    batch,
    estimate,
    export_run,
    open_run,
    sample,
)
from numpyro_minibatch.__main__ import main
from numpyro_minibatch._internal import passes
from numpyro_minibatch.inference_data import get_group
from numpyro_minibatch.sampling import _reading
from numpyro_minibatch.sampling._devices import Share
from numpyro_minibatch.sampling._store import Store

slow = pytest.mark.slow

DEVICES = """
import sys
sys.path.insert(0, {tests!r})
import jax, numpy as np
from jax.sharding import Mesh
from numpyro_minibatch import MINT, MinibatchMH, open_run, sample
import test_many_devices as m
import test_sampling as t

mesh = Mesh(jax.devices(), ("chains",))
assert mesh.size == 2
kept = dict(num_samples=20, num_warmup=20, keep_warmup=True, num_chains=4)
one = t.run(**kept)
two = t.run(**kept, mesh=mesh, out={out!r})
t.assert_same(one, two)
t.assert_same(one, open_run({out!r}))
# the run goes on on the same devices, and its draws are those of one
more = {{**kept, "num_samples": 30}}
t.assert_same(t.run(**more), t.run(**more, mesh=mesh, out={out!r}, resume=True))
try:
    t.run(**more, out={out!r}, resume=True)
    raise AssertionError("a run goes on with other devices")
except ValueError as error:
    assert "differs in devices" in str(error)
# a kernel of NumPyro's
hmc = dict(num_warmup=20, num_samples=20, num_chains=2, progress=False)
found = [sample(t.HMC(t.whole), t.X, t.Y, **hmc, mesh=where) for where in (None, mesh)]
np.testing.assert_allclose(*[t.values(x)["b"] for x in found], rtol=1e-2, atol=1e-3)
try:
    rows = Mesh(jax.devices(), ("rows",))
    sample(t.HMC(t.whole), t.X, t.Y, **hmc, mesh=rows)
    raise AssertionError("rows of a kernel of NumPyro's are divided")
except ValueError as error:
    assert 'Use an axis "chains"' in str(error)
# a control variate is shared by all chains, and devices share the passes before a run
found = []
for where in (None, mesh):
    kernel = MinibatchMH(m.logistic, control_variate="taylor2", batch_size=50)
    settings = dict(num_warmup=20, num_samples=20, num_chains=2, progress=False)
    draws = t.values(sample(kernel, t.X, t.Y > 0, **settings, mesh=where))
    pilot = {{k: v for k, v in kernel.pilot.items() if isinstance(v, float)}}
    sums = jax.tree.leaves(kernel._run.prepared[2].surrogate.expansion)
    found.append({{**draws, **pilot, **dict(enumerate(sums))}})
one, two = found
for name in one:
    # single precision leaves its error of small residuals
    close = dict(rtol=1e-2, atol=1e-4, err_msg=str(name))
    np.testing.assert_allclose(one[name], two[name], **close)
# passes over all rows: each device reads the half of them
m.rows_are_shared()
print("same")
"""


def logistic(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", N) as i:
        numpyro.sample("obs", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


class Noted:
    """An array that records which rows are requested together."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.seen: list[np.ndarray] = []

    def __getitem__(self, index: Any) -> Any:
        self.seen.append(np.arange(N)[index])
        return self.array[index]


def rows_are_shared() -> None:
    """On two devices, each reads half of a full pass, and sums equal those of one
    device."""
    full: dict[str, Any] = {"batch": batch.full(), "step_size": 1e-4}
    for kernel, num_chains in (
        (SGLD(model, **full), 1),
        (MinibatchMH(model, estimate="exact"), 2),
        (MinibatchMH(model, estimate=estimate.exact(max_rows=1)), 1),
    ):
        found, reads = [], []
        for mesh in (None, Mesh(jax.devices(), ("rows",))):
            y = Noted(Y)
            settings: dict[str, Any] = {"num_warmup": 0, "num_samples": 3}
            settings |= {"num_chains": num_chains, "progress": False, "mesh": mesh}
            idata = sample(kernel, X, HostRows(y), **settings)
            found.append(values(idata) | values(idata, "sample_stats"))
            # indices among all rows, without those of minibatches
            many = [rows for rows in y.seen if len(rows) > N // 3]
            reads.append({(int(rows[0]), int(rows[-1])) for rows in many})
        for name in found[0]:
            close = {"rtol": 2e-4, "atol": 2e-4, "err_msg": name}
            np.testing.assert_allclose(found[0][name], found[1][name], **close)
        assert reads[0] == {(0, N - 1)}
        # the evaluation of a start is not shared
        assert reads[1] - reads[0] == {(0, 251), (252, N - 1)}


def processes_share_rows() -> None:
    """The passes of a set-up before a run, on two processes of one device each."""
    share = Share.of(2, Mesh(jax.devices(), ("chains",)))
    assert share.mesh is None and share.setup is not None and share.setup.size == 2
    widths = []

    def total(given: Any, scale: Any) -> Any:
        chunks = passes.Chunks.of({"data": N}, {"data": 100})
        widths.append((chunks.number, chunks.widths["data"]))

        def of_chunk(i: Any) -> Any:
            indices, masks = chunks.at(i)
            rows = given[0][0][indices["data"]]
            return jnp.where(masks["data"], rows, 0.0).sum()

        return scale * chunks.sum(of_chunk, jnp.zeros(()))

    with passes.using(share.setup):
        assert passes.setup_devices(alike=False) is None
        mesh = passes.setup_devices(alike=True)
    assert mesh is not None
    own, placed = passes.everywhere(((Y,), {}), mesh)
    found = passes.shared(total, mesh)(placed, 2.0)
    assert widths == [(6, 84)]
    np.testing.assert_allclose(found, 2.0 * Y.sum(), rtol=1e-5)
    np.testing.assert_array_equal(own[0][0], Y)


def in_new_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@slow
def test_two_devices_draw_what_one_does(tmp_path: Path) -> None:
    code = DEVICES.format(tests=str(Path(__file__).parent), out=str(tmp_path / "run"))
    flags = quick_flags(2)
    assert "same" in in_new_process(code, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


def test_a_mesh_of_one_device(tmp_path: Path) -> None:
    mesh = Mesh(jax.devices()[:1], ("chains",))
    assert_same(run(num_samples=5), run(num_samples=5, mesh=mesh))


@pytest.mark.parametrize(
    ("mesh", "error", "says"),
    [
        ("cpu", TypeError, r'Mesh\(jax.devices\(\), \("chains",\)\)'),
        (
            Mesh(np.array(jax.devices()[:1])[None], ("a", "b")),
            TypeError,
            r'with both, \("chains", "rows"\)',
        ),
    ],
)
def test_meshes_that_are_none(mesh: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        run(mesh=mesh)


def test_chains_and_rungs_are_not_both_divided() -> None:
    mesh = Mesh(jax.devices()[:1], ("devices",))
    target = Target(lambda z: -0.5 * z @ z, lambda z, i: 0.0 * i * z[0], 40)
    inner = MinibatchMH(target=target, estimate="exact")
    kernel = ReplicaExchange(inner, temperatures=[1.0, 2.0], mesh=mesh)
    with pytest.raises(ValueError, match="Pass only one mesh"):
        sample(kernel, num_warmup=1, num_samples=1, mesh=mesh)


# processes ----------------------------------------------------------------------------

PROCESS = """
import sys
sys.path.insert(0, {tests!r})
import jax
jax.distributed.initialize("127.0.0.1:{port}", 2, {which})
from jax.sharding import Mesh
import test_many_devices as m
import test_sampling as t
m.processes_share_rows()
found = t.run(num_samples={draws}, num_warmup=20, mesh=Mesh(jax.devices(), ("chains",)),
              num_chains=2, out={out!r}, resume={resume})
assert found["posterior"]["chain"].values.tolist() == [{which}]
"""


def two_processes(**settings: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = str(Path(__file__).parent)
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROCESS.format(tests=tests, port=port, which=which, **settings),
            ],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_flags()},
            stderr=subprocess.PIPE,
            text=True,
        )
        for which in (0, 1)
    ]
    for child in children:
        _, error = child.communicate(timeout=300)
        assert child.returncode == 0, error


@slow
def test_two_processes_draw_what_one_does(tmp_path: Path) -> None:
    out = tmp_path / "run"
    two_processes(draws=10, out=str(out), resume=False)
    two_processes(draws=15, out=str(out), resume=True)
    found = open_run(out)
    whole = run(num_samples=15, num_warmup=20)
    for group in ("posterior", "sample_stats"):
        first, second = values(found, group), values(whole, group)
        assert first.keys() == second.keys()
        for name in first:
            # programs for one chain and for two round differently
            np.testing.assert_allclose(first[name], second[name], rtol=1e-4, atol=1e-5)
    assert found["posterior"]["chain"].values.tolist() == [0, 1]
    part = found["posterior"]["b"].isel(chain=[1, 0], draw=slice(2, 9, 3), b_dim_0=1)
    np.testing.assert_array_equal(part.values, values(found)["b"][[1, 0], 2:9:3, 1])
    export_run(out, tmp_path / "run.nc")
    with xr.open_dataset(tmp_path / "run.nc", group="posterior") as file:
        np.testing.assert_array_equal(file["b"].values, values(found)["b"])


def split_in_two(folder: Path) -> None:
    """Turn the folder of a two-chain run into a readable one of two processes."""
    store = Store(folder)
    store.read()
    counts = store.counts()
    for which in (0, 1):
        part = Store(folder / f"process-{which:04d}")
        part.create({**store.header, "first_chain": which, "process": [which, 2]})
        part.describe([v._replace(shape=(1, *v.shape[1:])) for v in store.layouts])
        for group in {layout.group for layout in store.layouts}:
            some = counts[group] - which  # one process is a draw ahead
            arrays = store.arrays(group, counts[group])
            part.append(
                group, {n: a[which : which + 1, :some] for n, (_, a) in arrays.items()}
            )
        steps = counts.pop("steps")
        part.commit(
            (), (), {n: k - which for n, k in counts.items()} | {"steps": steps}
        )
        counts["steps"] = steps
        part.close()


def test_the_parts_of_processes_are_read_side_by_side(
    tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    whole = run(num_samples=12, num_warmup=20, out=out)
    split_in_two(out)
    found = open_run(out)
    assert found["posterior"]["chain"].values.tolist() == [0, 1]
    # the draws that all processes have
    b = values(whole)["b"][:, :11]
    np.testing.assert_array_equal(values(found)["b"], b)
    lazy = found["posterior"]["b"]
    np.testing.assert_array_equal(lazy[1, 3:9:2].values, b[1, 3:9:2])
    np.testing.assert_array_equal(lazy[::-1, [4, 2], 0].values, b[::-1, [4, 2], 0])
    assert _reading.progress_of(out).splitlines()[1].startswith("process 1, MINT")
    (out / "run.json").unlink()
    with pytest.raises(ValueError, match="a run of several processes"):
        run(num_samples=12, num_warmup=20, out=out, resume=True)
    header = out / "process-0000" / "run.json"
    header.unlink()
    (out / "process-0000").joinpath("state.npz").unlink()
    with pytest.raises(ValueError, match=r"no run\.json"):
        open_run(out)


# other formats ------------------------------------------------------------------------


needs_newer_xarray = pytest.mark.skipif(
    tuple(map(int, xr.__version__.split(".")[:3])) < (2025, 1, 1),
    reason="this xarray does not write with zarr 3",
)


@pytest.mark.parametrize(
    "ending", [".nc", pytest.param(".zarr", marks=needs_newer_xarray)]
)
def test_export(ending: str, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "run"
    run(num_samples=25, num_warmup=20, keep_warmup=True, out=out)
    for name, piece in (("whole", 2**26), ("pieces", 200)):
        monkeypatch.setattr(_reading, "_PIECE_BYTES", piece)
        to = tmp_path / f"{name}{ending}"
        export_run(out, to)
        engine = "h5netcdf" if ending == ".nc" else "zarr"
        for group in ("posterior", "sample_stats", "warmup_posterior"):
            expected = get_group(open_run(out), group)
            assert expected is not None
            more = {"consolidated": False} if engine == "zarr" else {}
            with xr.open_dataset(to, group=group, engine=engine, **more) as found:
                xr.testing.assert_equal(found, expected)
                assert found.attrs["kernel"] == "MINT"
                for variable in expected.data_vars:
                    assert found[variable].dtype == expected[variable].dtype
        with pytest.raises(ValueError, match="the file already exists"):
            export_run(out, to)
    assert not list(tmp_path.glob("unfinished*"))
    with pytest.raises(ValueError, match=r"must end in \.nc or \.zarr"):
        export_run(out, tmp_path / "run.csv")
    if ending == ".nc":
        assert main(["export", str(out), str(tmp_path / "again.nc")]) == 0
        assert (tmp_path / "again.nc").exists()
    header = json.loads((out / "run.json").read_text())
    assert header["process"] == [0, 1]


# compiled programs --------------------------------------------------------------------

CACHED = """
import sys
sys.path.insert(0, {tests!r})
import jax
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
import test_sampling as t
t.run(num_samples=5, num_warmup=5)
names = ("/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses")
print(*(seen.count(name) for name in names))
"""


@slow
def test_compiled_programs_outlive_the_process(tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    code = CACHED.format(tests=tests, folder=str(tmp_path / "cache"))
    hits, misses = map(int, in_new_process(code).split())
    # an operation outside of programs is the same program in either matmul precision
    assert hits <= 2 < misses
    hits, misses = map(int, in_new_process(code).split())
    assert hits and not misses
