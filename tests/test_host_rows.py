"""Rows that stay on the host: the same draws as with data in memory, and no copy."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from compiling import quick_flags
from jax import random
from numpyro.infer import MCMC

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    HostRows,
    MinibatchMH,
    control_variate,
    host_rows,
    proposal,
    sample,
)
from numpyro_minibatch._internal.precision import double
from numpyro_minibatch._internal.static import digest
from numpyro_minibatch.inference_data import get_group

slow = pytest.mark.slow

N = 3001
_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 4)).astype(np.float32)
Y = (X @ np.ones(4) + _rng.normal(size=N)).astype(np.float32)
MODES = ["alias", "prefetch", "callback"]
SETTINGS: dict[str, Any] = {
    "num_warmup": 30,
    "num_samples": 40,
    "num_chains": 2,
    "progress": False,
}


def model(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=50) as i:
        x = numpyro.subsample(x, event_dim=1)
        numpyro.sample("obs", dist.Normal(x @ b, 1.0), obs=y[i])


KERNELS = {
    "mint": MINT(model, temperature=20.0),
    "langevin": MinibatchMH(model, temperature=20.0, proposal=proposal.langevin()),
    "amagold": AMAGOLD(model, temperature=20.0, num_steps=3, friction=1.0),
    "control variate": MinibatchMH(model, control_variate="taylor2"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    np.save(folder / "fortran.npy", np.asfortranarray(X))
    np.save(folder / "double.npy", X.astype(np.float64))
    X.tofile(folder / "raw.bin")
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = X
    return folder


def mapped(files: Path, name: str) -> np.ndarray:
    return np.load(files / f"{name}.npy", mmap_mode="r")


def draws(idata: Any, group: str = "posterior") -> dict[str, np.ndarray]:
    dataset = get_group(idata, group)
    assert dataset is not None
    return {str(name): np.asarray(dataset[name]) for name in dataset.data_vars}


def assert_same(one: Any, other: Any, but: tuple[str, ...] = ()) -> None:
    for group in ("posterior", "sample_stats"):
        first, second = draws(one, group), draws(other, group)
        assert first.keys() == second.keys() and first
        for name in first.keys() - set(but):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@slow
def test_both_positions_of_a_decision_share_a_fetch(monkeypatch: Any) -> None:
    calls = []
    fetch = host_rows.Source.fetch
    monkeypatch.setattr(
        host_rows.Source, "fetch", lambda self, i: calls.append(0) or fetch(self, i)
    )
    few, many = (
        sample(
            KERNELS["mint"],
            HostRows(X, mode="callback"),
            jnp.asarray(Y),
            **{**SETTINGS, "num_chains": 1, "num_samples": number},
        )
        and len(calls)
        for number in (40, 140)
    )
    # the compared runs differ by a hundred decisions, with one call for each
    assert many - 2 * few == 100


def test_rows_can_be_pickled_after_they_were_used() -> None:
    rows = HostRows(X, mode="callback")
    jax.jit(lambda i: rows[i])(jnp.arange(3))
    index = jnp.arange(2)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(rows))[index], X[:2])


@slow
def test_a_surrogate_does_not_fetch_rows(files: Path) -> None:
    """Exact rows would be fetched at each evaluation of the surrogate."""
    variate = control_variate.taylor2(exact_rows=5)
    kernel = MinibatchMH(model, control_variate=variate)
    alias = HostRows(mapped(files, "x"))
    kernel.init(jax.random.key(0), 10, None, (alias, Y), {})
    assert kernel.pilot["exact_rows"] == 5
    elsewhere = HostRows(mapped(files, "x"), mode="callback")
    with pytest.raises(ValueError, match="the data are HostRows. Write exact_rows=0"):
        kernel.init(jax.random.key(0), 10, None, (elsewhere, Y), {})


# sources of rows ----------------------------------------------------------------------


def test_an_alias_is_no_copy(files: Path) -> None:
    for array in (mapped(files, "x"), np.memmap(files / "raw.bin", np.float32, "r")):
        rows = HostRows(array)
        assert rows.mode == "alias"
        (alias,) = jax.tree.leaves(rows)
        assert alias.unsafe_buffer_pointer() == array.ctypes.data
        # nor does an argument of a program copy it
        assert jnp.asarray(alias).unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fortran", "not in C order"),
        ("unaligned", "multiple of 64 bytes"),
        ("h5py", "no address in memory"),
        ("big endian", "JAX would convert its"),
    ],
)
def test_what_would_be_copied_is_not_an_alias(name: str, why: str, files: Path) -> None:
    with h5py.File(files / "x.h5") as file:
        array: Any = {
            "fortran": mapped(files, "fortran"),
            "unaligned": mapped(files, "x")[1:],
            "h5py": file["x"],
            "big endian": X.astype(">f4"),
        }[name]
        rows = HostRows(array)
        assert rows.mode == "callback"
        with pytest.raises(ValueError, match=why):
            HostRows(array, "alias")
        index = jnp.array([[5, 2], [2, 7]])
        expected = np.asarray(array[:10])[np.asarray(index)]
        for mode in ("callback", "prefetch"):
            found = jax.jit(lambda rows, i: rows[i])(HostRows(array, mode), index)
            np.testing.assert_array_equal(found, expected)


def test_a_table_of_rows_can_be_in_double_precision() -> None:
    """As in the set-up, which converts the arrays of a model."""
    rows = HostRows(X, "prefetch").with_rows(np.array([3, 7]))
    with double():
        wide = jax.tree.map(
            lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            rows,
        )
        for index in ([3, 7], [3, 8]):  # from the table, and by callback
            found = jax.jit(lambda rows, i: rows[i])(wide, jnp.array(index))
            assert found.dtype == np.float64
            np.testing.assert_array_equal(found, X[index])


def test_doubles_are_those_that_jax_has(files: Path) -> None:
    rows = HostRows(mapped(files, "double"))
    if jax.config.read("jax_enable_x64"):
        assert rows.mode == "alias" and rows.dtype == np.float64
        return
    assert rows.mode == "callback" and rows.dtype == np.float32
    np.testing.assert_array_equal(rows[jnp.arange(5)], X[:5])


def test_rows_at_hand_and_rows_that_are_not(monkeypatch: Any) -> None:
    asked = []
    fetch = host_rows.Source.fetch

    def noted(self: Any, index: Any) -> np.ndarray:
        asked.append(np.asarray(index).tolist())
        return fetch(self, index)

    monkeypatch.setattr(host_rows.Source, "fetch", noted)
    rows = HostRows(X, "prefetch").with_rows(np.array([7, 3, 3, 11]))
    take = jax.jit(jax.vmap(lambda rows, i: rows[i], (None, 0)))
    np.testing.assert_array_equal(
        take(rows, jnp.array([[3, 7], [11, 3]])), X[[[3, 7], [11, 3]]]
    )
    assert not asked
    np.testing.assert_array_equal(
        take(rows, jnp.array([[3, 7], [12, 3]])), X[[[3, 7], [12, 3]]]
    )
    assert asked == [[[3, 7], [12, 3]]]


def test_pages_can_be_given_back(files: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(host_rows, "_LARGE", 0)
    rows = HostRows(mapped(files, "x"))
    assert rows._source.releasable
    rows._source.release()
    np.testing.assert_array_equal(rows[jnp.arange(N)], X)
    copy_on_write = HostRows(np.load(files / "x.npy", mmap_mode="c"))
    assert not copy_on_write._source.releasable  # writes would be lost
    assert not HostRows(X)._source.releasable


# draws --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_memory() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("mint", "alias"),
        ("mint", "prefetch"),
        ("mint", "callback"),
        *(
            pytest.param(name, mode, marks=slow)
            for name in ("langevin", "amagold", "control variate")
            for mode in MODES
        ),
    ],
)
def test_draws_are_those_of_data_in_memory(
    name: str, mode: str, files: Path, in_memory: dict[str, Any]
) -> None:
    if name not in in_memory:
        in_memory[name] = sample(KERNELS[name], X, Y, **SETTINGS)
    data = [HostRows(mapped(files, n), mode) for n in ("x", "y")]
    found = sample(KERNELS[name], *data, **SETTINGS)
    # in single precision, errors of exact checks are mostly rounding
    rounded = "check_rms_error", "check_rms_z", "check_change"
    assert_same(found, in_memory[name], rounded if mode != "alias" else ())
    modes = json.loads(found["posterior"].attrs["host_rows"])
    assert modes == {"args[0]": mode, "args[1]": mode}
    # the data are not copied into the result
    assert get_group(found, "observed_data") is None
    assert get_group(found, "constant_data") is None


@pytest.mark.parametrize("name", ["mint", pytest.param("langevin", marks=slow)])
def test_rows_computed_in_advance_are_the_rows_read(
    name: str, monkeypatch: Any
) -> None:
    asked: list[int] = []

    def noted(self: Any, index: Any) -> np.ndarray:
        asked.append(np.asarray(index).size)
        return self._take(np.asarray(index).ravel()).reshape(*index.shape)

    monkeypatch.setattr(host_rows.Source, "fetch", noted)
    kernel = KERNELS[name]
    told: list[int] = []
    rows_ahead = type(kernel).rows_ahead

    def note(self: Any, *args: Any) -> Any:
        told.append(len(asked))
        return rows_ahead(self, *args)

    monkeypatch.setattr(type(kernel), "rows_ahead", note)
    sample(kernel, X, HostRows(Y, "prefetch"), **SETTINGS)
    # the start reads rows by callback, but no step after it does
    assert told and asked and len(asked) == told[0]


def test_a_driver_of_numpyro_takes_them(files: Path) -> None:
    found = []
    for data in ((X, Y), tuple(HostRows(mapped(files, n)) for n in ("x", "y"))):
        mcmc = MCMC(
            KERNELS["mint"],
            num_warmup=20,
            num_samples=20,
            progress_bar=False,
            jit_model_args=True,
        )
        mcmc.run(random.key(0), *data)
        found.append(np.asarray(mcmc.get_samples()["b"]))
    np.testing.assert_array_equal(*found)


def test_a_run_goes_on_with_the_same_file_and_no_other(
    files: Path, tmp_path: Path
) -> None:
    assert digest(HostRows(X)) == digest(X) == digest(HostRows(mapped(files, "x")))
    settings = {**SETTINGS, "out": tmp_path / "run"}
    data = [HostRows(mapped(files, n)) for n in ("x", "y")]
    sample(KERNELS["mint"], *data, **{**settings, "num_samples": 10})
    other = HostRows(Y + 1e-6)
    with pytest.raises(ValueError, match="differs in data"):
        sample(KERNELS["mint"], data[0], other, **settings, resume=True)
    sample(KERNELS["mint"], *data, **settings, resume=True)


# refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x @ jnp.ones(4),
        lambda x: x + 1.0,
        lambda x: x == 1.0,
        lambda x: jnp.sum(x),
        lambda x: np.asarray(x),
        lambda x: x[:10],
        lambda x: x[0],
        lambda x: x[jnp.ones(N, bool)],
        lambda x: list(x),
    ],
)
def test_only_rows_can_be_indexed(use: Any) -> None:
    with pytest.raises(
        TypeError, match=r"take the rows of a minibatch first, x\[idx\]"
    ):
        use(HostRows(X))
    with pytest.raises(AttributeError, match=r"no 'mean'. Inside the model take"):
        HostRows(X).mean  # noqa: B018


def test_a_model_that_needs_all_rows_is_refused() -> None:
    def whole(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("data", N, subsample_size=50) as i:
            numpyro.sample("obs", dist.Normal((x @ b)[i], 1.0), obs=y[i])

    with pytest.raises(TypeError, match="take the rows of a minibatch first"):
        sample(MINT(whole, temperature=20.0), HostRows(X), Y, **SETTINGS)


@pytest.mark.parametrize(
    ("array", "mode", "error", "says"),
    [
        ([1.0, 2.0], "auto", TypeError, "must be a NumPy array or memory map"),
        (jnp.ones(3), "auto", TypeError, "must be a NumPy array or memory map"),
        (np.array(["a"]), "auto", TypeError, "must hold numbers"),
        (np.ones(()), "auto", ValueError, "must have rows"),
        (np.ones((0, 2)), "auto", ValueError, "must have rows"),
        (X, "fast", ValueError, "must be one of 'auto'"),
    ],
)
def test_bad_arguments(array: Any, mode: str, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        HostRows(array, mode)


def test_an_array_that_is_too_short_is_found(files: Path) -> None:
    def short(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("data", N + 1, subsample_size=50) as i:
            numpyro.sample("obs", dist.Normal(mu, 1.0), obs=y[i])

    kernel = MINT(short, temperature=20.0)
    with pytest.raises(ValueError, match="which has 3002 rows: beyond its 3001"):
        sample(kernel, HostRows(mapped(files, "y")), **SETTINGS)
    with pytest.raises(IndexError, match="row 3001 of HostRows .* was requested"):
        HostRows(Y, "callback")._source.fetch(np.array([0, N]))


LARGE = """
import sys, tempfile
import jax, numpy as np, numpyro, numpyro.distributions as dist
from numpyro_minibatch import MINT, HostRows, sample

rows = int(sys.argv[1])
path = tempfile.mkdtemp(dir=sys.argv[2]) + "/x.bin"
with open(path, "wb") as file:
    file.truncate(rows * 4 * 64)
x = np.memmap(path, np.float32, "r", shape=(rows, 64))

def model(x):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([64]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=100) as i:
        numpyro.sample("obs", dist.Normal(mu, 1.0).to_event(1), obs=x[i])

rows = HostRows(x)
found = sample(MINT(model, temperature=1e6), rows, num_warmup=100, num_samples=100,
               progress=False)
peak = [line for line in open("/proc/self/status") if "RssAnon" in line][0]
print(rows.mode, int(peak.split()[1]) * 1024)
"""


@slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    used = []
    for rows in (10_000, 40_000_000):  # 2.5 MB, 10 GB
        command = [sys.executable, "-c", LARGE, str(rows), str(tmp_path)]
        done = subprocess.run(
            command,
            env={**os.environ, "XLA_FLAGS": quick_flags()},
            capture_output=True,
            text=True,
            check=True,
        )
        mode, memory = done.stdout.split()
        assert mode == "alias"
        used.append(int(memory))
    assert used[1] < used[0] + 200e6
