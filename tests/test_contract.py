"""What ``numpyro.infer.MCMC`` and its users expect of a kernel, for every kernel."""

from __future__ import annotations

import ast
import gc
import inspect
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
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
from numpyro.infer import MCMC, NUTS, init_to_median, init_to_uniform

from numpyro_minibatch import (
    AMAGOLD,
    MINT,
    MINTEE,
    RENHD,
    SGHMC,
    SGLD,
    SGMCMC,
    SGNHT,
    AusterityMH,
    ConfidenceMH,
    Cyclical,
    CyclicalMINT,
    CyclicalSGHMC,
    MHMinibatch,
    MinibatchMH,
    ReplicaExchange,
    Target,
    accept,
    batch,
    dynamics,
    estimate,
    proposal,
    sample,
    schedule,
    to_inference_data,
)
from numpyro_minibatch import kernels as kernels_of_the_package
from numpyro_minibatch._internal.static import Given
from numpyro_minibatch.kernels import (
    InPieces,
    KernelState,
    MinibatchKernel,
    NoiseDriven,
    Start,
    Tempered,
)
from numpyro_minibatch.kernels._shared import base as shared_base
from numpyro_minibatch.kernels._shared import driver as shared_driver
from numpyro_minibatch.kernels.equi_energy._settings import EnergyArguments

# the warmup is short because step-size adaptation amplifies rounding, from 1e-16 to
# 1e-4 in a hundred draws
N, CHAINS, WARMUP, DRAWS = 60, 2, 40, 12
FIELDS = ("i",)

_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 2)).astype(np.float32)
Y = (X @ np.array([1.0, -0.5]) + 0.3 * _rng.normal(size=N)).astype(np.float32)


def model(X: Any, y: Any) -> None:
    """A regression with a constrained parameter and a deterministic site."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.deterministic("norm", jnp.sqrt(jnp.sum(beta**2)))
    with numpyro.plate("data", N, subsample_size=20) as idx:
        numpyro.sample("obs", dist.Normal(X[idx] @ beta, scale), obs=y[idx])


def largest_change(z: Any, z_new: Any) -> Any:
    """The bound that the confidence test needs, from all rows."""

    def rows(z: Any) -> Any:
        return dist.Normal(X @ z["beta"], jnp.exp(z["scale"])).log_prob(Y)

    return jnp.abs(rows(z_new) - rows(z)).max()


# a high temperature and acceptance rate, so that chains move after a short warmup
KERNELS: dict[str, Callable[[], MinibatchKernel]] = {
    "MINT": lambda: MINT(model, temperature=20.0, target_accept_prob=0.6),
    "MINT-augmented": lambda: MINT(
        model, temperature=100.0, estimate="augmented", target_accept_prob=0.5
    ),
    "MINT-langevin": lambda: MINT(
        model,
        temperature=20.0,
        proposal=proposal.langevin(),
        num_steps=3,
        dense_mass=True,
    ),
    "MHMinibatch": lambda: MHMinibatch(
        model, temperature=20.0, target_accept_prob=0.35
    ),
    "MHMinibatch-sequential": lambda: MHMinibatch(
        model, temperature=20.0, target_accept_prob=0.35, sequential=True
    ),
    "exact": lambda: MinibatchMH(
        model, temperature=20.0, target_accept_prob=0.6, estimate="exact"
    ),
    "control-variate": lambda: MinibatchMH(
        model,
        control_variate="taylor2",
        proposal=proposal.delayed_random_walk(),
        num_steps=2,
    ),
    "AusterityMH": lambda: AusterityMH(
        model, temperature=20.0, target_accept_prob=0.6, epsilon=0.1
    ),
    "ConfidenceMH": lambda: ConfidenceMH(
        model, temperature=20.0, target_accept_prob=0.6, bound=largest_change
    ),
    "AMAGOLD": lambda: AMAGOLD(
        model, num_steps=3, temperature=20.0, resample_momentum=False, dense_mass=True
    ),
    "SGLD": lambda: SGLD(model, step_size=schedule.polynomial(0.002), temperature=20.0),
    "SGNHT": lambda: SGNHT(
        model,
        step_size=0.02,
        friction=5.0,
        num_steps=3,
        temperature=20.0,
        preconditioner="rmsprop",
    ),
    "RENHD": lambda: RENHD(
        model,
        temperatures=[1.0, 5.0],
        step_size=0.005,
        friction=20.0,
        num_steps=3,
        adapt_ladder=True,
    ),
    "MINTEE": lambda: MINTEE(
        model,
        batch_ratio=1.4,
        num_replicas=3,
        temperatures=[20.0, 40.0, 80.0],
        jump_prob=0.3,
        ring_capacity=20,
        ring_thinning=2,
        num_steps=2,
    ),
    "CyclicalSGHMC": lambda: CyclicalSGHMC(
        model,
        step_size=0.02,
        friction=5.0,
        temperature=20.0,
        cycle_length=15,
        samples_per_cycle=4,
        collect_from=0.2,
    ),
    "CyclicalMINT": lambda: CyclicalMINT(
        model,
        temperature=20.0,
        target_accept_prob=0.6,
        cycle_length=12,
        samples_per_cycle=3,
    ),
}
GRADIENTS = {"SGLD", "SGNHT", "RENHD", "CyclicalSGHMC"}  # without an accept/reject step
CHANGING = {"SGLD", "CyclicalSGHMC", "CyclicalMINT"}  # step sizes, after warmup too
# One kernel for each code path through the driver. The others add programs but no
# interface, so they run on the main interpreter only.
ON_ALL_VERSIONS = {"MINT", "control-variate", "AMAGOLD", "RENHD", "CyclicalMINT"}


def kernels(*names: str, quick: Collection[str] = KERNELS) -> pytest.MarkDecorator:
    """The fewest kernels that cover all code, for tests that do not depend on the
    kernel.

    :param quick: the kernels of the quick tests; the others take long to compile.
    """
    assert set(names) <= set(KERNELS)
    slow, once = pytest.mark.slow, pytest.mark.once
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=[
                    *([] if name in quick else [slow]),
                    *([] if name in ON_ALL_VERSIONS else [once]),
                ],
            )
            for name in names
        ],
    )


every_kernel = kernels(*KERNELS)


Draws = dict[str, np.ndarray]


def driver(kernel: MinibatchKernel, **settings: Any) -> MCMC:
    return MCMC(
        kernel,
        **{
            "num_warmup": WARMUP,
            "num_samples": DRAWS,
            "progress_bar": False,
            **settings,
        },
    )


def draws(mcmc: MCMC, group_by_chain: bool = False) -> Draws:
    """Samples and fields of a run."""
    samples = mcmc.get_samples(group_by_chain)
    fields = mcmc.get_extra_fields(group_by_chain)
    return {name: np.asarray(x) for name, x in {**samples, **fields}.items()}


def run(
    kernel: MinibatchKernel, key: jax.Array, /, *args: Any, **settings: Any
) -> tuple[MCMC, Draws]:
    mcmc = driver(kernel, **settings)
    mcmc.run(key, *(args or (X, Y)), extra_fields=FIELDS)
    return mcmc, draws(mcmc, mcmc.num_chains > 1)


def chain_keys() -> jax.Array:
    return jax.random.split(jax.random.key(0), CHAINS)


@cache
def reference(name: str) -> tuple[MCMC, Draws]:
    """One chain, with twice as many draws as elsewhere and no progress bar."""
    return run(KERNELS[name](), chain_keys()[0], num_samples=2 * DRAWS)


def part(draws: Mapping[str, np.ndarray], which: Any) -> Draws:
    return {name: x[which] for name, x in draws.items()}


def assert_identical(actual: Draws, expected: Draws) -> None:
    assert set(actual) == set(expected)
    for name, x in actual.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def assert_close(actual: Draws, expected: Draws) -> None:
    """Equal up to the rounding of double precision."""
    assert set(actual) == set(expected)
    for name, x in actual.items():
        assert x.dtype == expected[name].dtype, name
        assert x.dtype.kind != "f" or x.dtype == np.float64, name
        largest = np.nanmax(np.abs(expected[name]))  # untried swaps have no rate
        np.testing.assert_allclose(
            x, expected[name], rtol=1e-6, atol=1e-6 * float(largest), err_msg=name
        )


# older versions of JAX have it elsewhere
enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64


@cache
def precise_reference(name: str) -> Draws:
    """The same in double precision, to compare programs that are compiled differently.

    In single precision, rounding changes one decision in ten thousand.
    """
    with enable_x64(True):
        return run(KERNELS[name](), chain_keys()[0], num_samples=2 * DRAWS)[1]


_compiled: list[str] = []


def _listen(event: str, duration: float, **details: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(str(details.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_listen)


# one run -----------------------------------------------------------------------------


@every_kernel
def test_a_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mcmc, seen = reference(name)
    assert {"beta", "scale", "norm", *FIELDS} <= set(seen)
    assert seen["beta"].shape == (2 * DRAWS, 2)
    assert seen["beta"].dtype == jnp.result_type(float)
    np.testing.assert_array_equal(seen["i"], WARMUP + 1 + np.arange(2 * DRAWS))
    np.testing.assert_allclose(
        seen["norm"], np.sqrt((seen["beta"] ** 2).sum(-1)), rtol=1e-5
    )
    # after warmup the step size stays
    assert name in CHANGING or len(set(seen["step_size"])) == 1
    assert (seen["scale"] > 0).all() and not seen["diverging"].any()
    # for an inner kernel, under the field's name in the outer state
    inside = {field.rpartition(".")[2]: values for field, values in seen.items()}
    assert name in GRADIENTS or 0 < np.nanmean(inside["accept_prob"]) < 1
    ratio = inside.get("noise_ratio")
    assert name not in GRADIENTS or (ratio > 0).all()
    mcmc.print_summary()
    printed = capsys.readouterr().out
    assert "beta[0]" in printed and "scale" in printed and "norm" not in printed


def test_what_the_driver_evaluates_around_its_loop_is_compiled_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    class AtOnce:
        def submit(self, compile_: Callable, *args: Any) -> None:
            # on a thread, which has none of the settings of the set-up
            with ThreadPoolExecutor(1) as pool:
                pool.submit(compile_, *args).result()
            started.append(len(_compiled))

    monkeypatch.setattr(shared_driver, "compilers", AtOnce)

    def compiled_after(num_samples: int) -> set[str]:
        before = len(_compiled)
        settings = {"num_chains": CHAINS, "chain_method": "vectorized"}
        mcmc = driver(KERNELS["MINT"](), num_samples=num_samples, **settings)
        mcmc.run(chain_keys()[0], X, Y)
        mcmc.get_samples()
        first = started.pop() if started else before
        names = {name.removeprefix("jit(").rstrip(")") for name in _compiled[first:]}
        return names & {"multiply", "swapaxes", "reshape"}

    # sizes that no other test has compiled
    assert not compiled_after(29)
    monkeypatch.setattr(shared_base, "compile_around_loop", lambda *_: None)
    assert compiled_after(31) == {"multiply", "swapaxes", "reshape"}


@kernels(
    *("MINT", "MHMinibatch", "control-variate", "RENHD", "CyclicalSGHMC", "MINTEE"),
    quick=("MINT", "MHMinibatch", "CyclicalSGHMC"),
)
def test_progress_bar_and_continuation_in_place(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # with either of these the driver disables its bar
    for variable in ("CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(variable, raising=False)
    expected = precise_reference(name)
    with enable_x64(True):
        mcmc = driver(KERNELS[name](), progress_bar=True)
        assert mcmc.progress_bar
        mcmc.run(chain_keys()[0], X, Y, extra_fields=FIELDS)
        assert_close(draws(mcmc), part(expected, slice(DRAWS)))
        shown = {"RENHD": "swaps=", "CyclicalSGHMC": "cycle "}.get(name, "acc. prob=")
        assert shown in capsys.readouterr().err
        mcmc.post_warmup_state = mcmc.last_state
        del _compiled[:]
        mcmc.run(mcmc.last_state.rng_key, X, Y, extra_fields=FIELDS)
        assert_close(draws(mcmc), part(expected, slice(DRAWS, None)))
    assert "jit(_body_fn)" not in _compiled


@kernels(*KERNELS, quick=ON_ALL_VERSIONS)
def test_warmup_and_continuation_of_a_pickle(name: str) -> None:
    mcmc = driver(KERNELS[name]())
    mcmc.warmup(chain_keys()[0], X, Y, collect_warmup=True, extra_fields=FIELDS)
    warmup = draws(mcmc)
    np.testing.assert_array_equal(warmup["i"], 1 + np.arange(WARMUP))
    assert name in GRADIENTS - CHANGING or len(set(warmup["step_size"])) > 2
    # chains that never move would pass all comparisons in this file
    assert len(np.unique(warmup["scale"])) > 5
    mcmc.run(mcmc.post_warmup_state.rng_key, X, Y, extra_fields=FIELDS)
    first = draws(mcmc)

    mcmc = pickle.loads(pickle.dumps(mcmc))
    assert_identical(draws(mcmc), first)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, X, Y, extra_fields=FIELDS)
    second = draws(mcmc)

    whole = {name: np.concatenate([x, second[name]]) for name, x in first.items()}
    expected = reference(name)[1]
    if jax.__version_info__ >= (0, 10):
        assert_identical(whole, expected)
    else:
        # JAX 0.7 compiles loops of different lengths to steps that round differently
        np.testing.assert_allclose(whole["beta"], expected["beta"], rtol=1e-4)


def test_arguments_are_compared_by_what_they_hold() -> None:
    key, words = jax.random.key(3), np.array(["a", "b"])
    table = np.arange(60_000.0).reshape(200, 300)
    table += 0.1  # which single precision rounds
    table[3, 4] = np.nan
    given = Given.of((table, words), {"key": key, "scale": np.array(2.0)})
    assert given is not None
    same = {"key": key, "scale": jnp.array(2.0)}
    assert not given.difference((table.copy(), words.copy()), same)
    assert not given.difference((jnp.asarray(table), words), same)
    assert "args[1] has other" in given.difference((table, words[::-1]), same)
    assert "kwargs['scale'] was" in given.difference((table, words), {"key": key})
    other = table.copy()
    other[150, 7] = 0.0  # one entry of many, compared while the first array is alive
    assert "args[0] has other values" in given.difference((other, words), same)
    turned = np.asfortranarray(table)
    assert not given.difference((turned, words), same)
    table *= 2.0  # in place
    assert "args[0] has other values" in given.difference((table, words), same)
    del table
    assert "args[0] has other values" in given.difference((2 * turned, words), same)
    assert not given.difference((turned, words), same)
    assert Given.of((np.zeros((0, 3)),), {}) is not None


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True])
@kernels(
    *("MINT", "SGLD", "control-variate", "RENHD", "CyclicalSGHMC"),
    quick=("MINT", "RENHD"),
)
def test_a_state_goes_on_with_its_own_data_only(name: str, jitted: bool) -> None:
    mcmc = driver(KERNELS[name](), jit_model_args=jitted, progress_bar=False)
    mcmc.run(chain_keys()[0], X, Y)
    mcmc.post_warmup_state, last = mcmc.last_state, mcmc.last_state.z
    for data, says in (
        ((X[:-1], Y[:-1]), r"args\[0\] had shape"),
        ((X, 1 - Y), r"args\[1\] has other values"),
    ):
        with pytest.raises(ValueError, match=f"made for other data: {says}"):
            mcmc.run(chain_keys()[1], *data)
    mcmc.run(chain_keys()[1], np.array(X), jnp.asarray(Y))  # equal data
    mcmc.post_warmup_state = None
    mcmc.run(chain_keys()[1], X, 1 - Y, init_params=last)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # NumPyro's, with vmap
def test_a_state_of_another_kernel_is_refused() -> None:
    """NumPyro's driver reads fields of the state before the kernel sees it."""
    together = {"num_chains": 2, "chain_method": "vectorized"}
    made = {1: driver(KERNELS["MINT"]()), 2: driver(KERNELS["MINT"](), **together)}
    for mcmc in made.values():
        mcmc.run(jax.random.key(0), X, Y)

    def alone() -> None:
        numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    other = driver(NUTS(alone))
    other.run(jax.random.key(0))
    ladder = driver(KERNELS["RENHD"]())
    for begin, end, says in (
        (other, made[1], "the state of another kernel"),
        (other, ladder, "the state of another kernel"),
        (made[2], made[1], "num_chains=2, and the driver has num_chains=1"),
        (made[1], made[2], "num_chains=1, and the driver has num_chains=2"),
    ):
        end.post_warmup_state = begin.last_state
        with pytest.raises(ValueError, match=says):
            end.run(jax.random.key(1), X, Y)
        end.post_warmup_state = None

    def wider(X: Any, y: Any) -> None:
        model(X, y)
        numpyro.sample("more", dist.Normal(0.0, 1.0))

    mint = driver(MINT(wider, temperature=20.0, target_accept_prob=0.6))
    mint.post_warmup_state = made[1].last_state
    with pytest.raises(ValueError, match="for another model"):
        mint.run(jax.random.key(1), X, Y)
    # states of separate chains have a leading axis
    for method in ("sequential", jax.vmap):
        mapped = driver(KERNELS["MINT"](), num_chains=2, chain_method=method)
        mapped.run(jax.random.key(0), X, Y)
        mapped.post_warmup_state = mapped.last_state
        mapped.run(jax.random.key(1), X, Y)


def test_a_state_brings_no_control_variate_of_other_data() -> None:
    """A new kernel measures its data, and finds the surrogate of others in a state."""
    begin = driver(KERNELS["control-variate"]())
    begin.run(jax.random.key(0), X, Y)
    again = driver(KERNELS["control-variate"]())
    again.post_warmup_state = begin.last_state
    again.run(jax.random.key(1), np.array(X), np.array(Y))  # the same, in other arrays
    other = driver(KERNELS["control-variate"]())
    other.post_warmup_state = begin.last_state
    with pytest.raises(ValueError, match="its control variate differs"):
        other.run(jax.random.key(1), X, Y + np.float32(0.05) * X[:, 0])


def ladder() -> ReplicaExchange:
    inner = KERNELS["control-variate"]()
    return ReplicaExchange(inner, num_replicas=2, temperature_ratio=4.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [KERNELS["control-variate"], ladder], ids=["kernel", "ladder"]
)
def test_a_run_goes_on_from_its_state_after_another_one_was_refused(make: Any) -> None:
    """The set-up that was refused has begun to replace that of the state."""
    expected, mcmc = (driver(make()) for _ in range(2))
    for one in (expected, mcmc):
        one.run(chain_keys()[0], X, Y)
    with pytest.raises(ValueError, match="derivatives"):
        mcmc.run(chain_keys()[0], X, 0 * Y)
    again = driver(mcmc.sampler)  # which has not compiled a step
    again.post_warmup_state = mcmc.last_state
    expected.post_warmup_state = expected.last_state
    for one in (expected, again):
        one.run(chain_keys()[1], X, Y)
    assert_identical(draws(again), draws(expected))


def test_draws_are_not_those_of_a_run_that_was_refused() -> None:
    """NumPyro's driver remembers the arguments of such a run, beside older draws."""
    mcmc = driver(KERNELS["MINT"]())
    mcmc.run(jax.random.key(0), X, Y)
    before = to_inference_data(mcmc)
    with pytest.raises(ValueError, match="not finite"):
        mcmc.run(jax.random.key(0), X, np.full_like(Y, np.nan))
    with pytest.raises(ValueError, match=r"other data: args\[1\]"):
        to_inference_data(mcmc)
    mcmc.run(jax.random.key(0), X, Y)
    xr.testing.assert_equal(to_inference_data(mcmc)["posterior"], before["posterior"])


@kernels("MINT-langevin", "MHMinibatch", "SGLD")
def test_thinning_and_jax_data_by_keyword(name: str) -> None:
    mcmc = driver(KERNELS[name](), num_samples=2 * DRAWS, thinning=3)
    data = {"X": jnp.asarray(X), "y": jnp.asarray(Y)}
    mcmc.run(chain_keys()[0], extra_fields=FIELDS, **data)
    assert_identical(draws(mcmc), part(reference(name)[1], slice(2, None, 3)))


# chains ------------------------------------------------------------------------------


@cache
def vectorized(name: str) -> Draws:
    settings = {"num_chains": CHAINS, "chain_method": "vectorized"}
    with enable_x64(True):
        return run(KERNELS[name](), chain_keys(), **settings)[1]


SEQUENTIAL = (
    "MINT-langevin",
    "MHMinibatch",
    "control-variate",
    "AMAGOLD",
    "RENHD",
    "CyclicalSGHMC",
    "MINTEE",
)


@pytest.mark.slow
@kernels(*SEQUENTIAL, quick=("MHMinibatch",))
def test_vectorized_chains_are_the_sequential_ones(name: str) -> None:
    # as many draws as in the reference, so that the program is not compiled again
    settings = {"num_chains": CHAINS, "chain_method": "sequential"}
    with enable_x64(True):
        _, sequential = run(
            KERNELS[name](), chain_keys(), num_samples=2 * DRAWS, **settings
        )
    assert_identical(part(sequential, 0), precise_reference(name))
    sequential = part(sequential, (slice(None), slice(DRAWS)))
    assert not np.allclose(*sequential["beta"])
    assert_close(vectorized(name), sequential)


# for every kernel, vectorised chains equal chains run one at a time, by one of two
# chain methods; one kernel is tested with both
IN_PARALLEL = [n for n in KERNELS if n == "MHMinibatch" or n not in SEQUENTIAL]
PARALLEL = """
import sys
import jax, numpy as np
from test_contract import CHAINS, IN_PARALLEL, KERNELS, chain_keys, run

assert jax.local_device_count() == CHAINS, jax.devices()
for name in IN_PARALLEL:
    mcmc, seen = run(
        KERNELS[name](), chain_keys(), num_chains=CHAINS, chain_method="parallel"
    )
    assert mcmc.chain_method == "parallel"
    np.savez(f"{sys.argv[1]}/{name}.npz", **seen)
"""


@pytest.mark.slow
def test_parallel_chains_are_the_vectorized_ones(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    environment = {
        **os.environ,
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": quick_flags(CHAINS),
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PARALLEL, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in IN_PARALLEL:
        with np.load(tmp_path / f"{name}.npz") as parallel:
            assert_close(dict(parallel), vectorized(name))


# keys ---------------------------------------------------------------------------------


@pytest.mark.slow
@kernels("MINT-augmented", "MINT-langevin", "MHMinibatch")
def test_old_keys_give_the_draws_of_typed_keys(name: str) -> None:
    old = jax.random.split(jax.random.PRNGKey(0), CHAINS)[0]
    _, seen = run(KERNELS[name](), old, num_samples=2 * DRAWS)
    assert_identical(seen, reference(name)[1])


@kernels("MHMinibatch")
def test_rbg_keys(name: str) -> None:
    _, seen = run(KERNELS[name](), jax.random.key(0, impl="rbg"))
    assert np.isfinite(seen["beta"]).all()
    assert not np.allclose(seen["beta"], reference(name)[1]["beta"][:DRAWS])


def steps_without_reuse(name: str, key: jax.Array) -> None:
    kernel = KERNELS[name]()
    state = kernel.init(key, 4, None, (X, Y), {})

    def steps(state: Any) -> Any:
        for _ in range(3):
            state = kernel.sample(state, (X, Y), {})
        return state

    with jax.debug_key_reuse(True):
        jax.jit(steps).lower(state)  # the check happens before anything compiles


@pytest.mark.slow
@every_kernel
def test_no_key_is_used_twice(name: str) -> None:
    steps_without_reuse(name, jax.random.key(0))


def test_a_key_used_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(
        self: object, key: Any, z: Any, step_size: Any, context: Any
    ) -> proposal.Proposed:
        noise = jax.random.normal(key, z.shape) + jax.random.uniform(key, z.shape)
        return proposal.Proposed(z + step_size * noise, jnp.zeros(()))

    monkeypatch.setattr(type(proposal.random_walk()), "propose", propose)
    with pytest.raises(jax.errors.KeyReuseError):
        steps_without_reuse("MINT", jax.random.key(0))


# compilation -------------------------------------------------------------------------


@kernels("MINT", "MHMinibatch", "control-variate", "AMAGOLD")
def test_data_as_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(variable, raising=False)
    expected = part(precise_reference(name), slice(DRAWS))
    with enable_x64(True):
        mcmc = driver(KERNELS[name](), jit_model_args=True, progress_bar=True)
        mcmc.run(chain_keys()[0], X, Y, extra_fields=FIELDS)
        assert_close(draws(mcmc), expected)
        assert "jit(_body_fn)" in _compiled

        del _compiled[:]
        mcmc.run(chain_keys()[0], X, -Y, extra_fields=FIELDS)
    assert "jit(_body_fn)" not in _compiled
    assert not np.allclose(draws(mcmc)["beta"], expected["beta"])


@kernels("MINT-langevin", "MHMinibatch")
def test_inside_jit(name: str) -> None:
    @jax.jit
    def sample(key: jax.Array, X: jax.Array) -> Any:
        mcmc = driver(KERNELS[name]())
        mcmc.run(key, X, Y, extra_fields=FIELDS)
        return {**mcmc.get_samples(), **mcmc.get_extra_fields()}

    with enable_x64(True):
        seen = {n: np.asarray(x) for n, x in sample(chain_keys()[0], X).items()}
    assert_close(seen, part(precise_reference(name), slice(DRAWS)))


# starting points ---------------------------------------------------------------------


@kernels("MINT-augmented", "exact", "AMAGOLD")
def test_init_params(name: str) -> None:
    position = {"beta": np.array([0.5, -1.0]), "scale": np.array(-0.7)}
    state = KERNELS[name]().init(jax.random.key(0), 10, position, (X, Y), {})
    for site, value in position.items():
        np.testing.assert_allclose(state.z[site], value, rtol=1e-6)
        assert state.z[site].dtype == jnp.result_type(float)

    chains = {site: np.stack([value, 2 * value]) for site, value in position.items()}
    states = KERNELS[name]().init(chain_keys(), 10, chains, (X, Y), {})
    for site, value in chains.items():
        np.testing.assert_allclose(states.z[site], value, rtol=1e-6)


def test_init_params_through_the_driver() -> None:
    position = {"beta": np.array([0.5, -1.0]), "scale": np.array(-0.7)}
    kernel = MINT(model, temperature=20.0, step_size=1e-6, adapt_step_size=False)
    mcmc = driver(kernel, num_warmup=0)
    mcmc.run(jax.random.key(0), X, Y, init_params=position)
    seen = mcmc.get_samples()
    np.testing.assert_allclose(seen["beta"], [position["beta"]] * DRAWS, atol=1e-4)
    np.testing.assert_allclose(seen["scale"], np.exp(-0.7), atol=1e-4)


# identity ----------------------------------------------------------------------------


def other_model(X: Any, y: Any) -> None:
    model(X, y)


def _target(z: Any, i: Any) -> Any:
    return -0.5 * (jnp.asarray(Y)[i] - z) ** 2


TARGET = Target(lambda z: -0.5 * z**2, _target, N)

# two values for each argument of a constructor, the default first
COMMON: dict[str, tuple[Any, Any]] = {
    "model": (model, other_model),
    "batch_size": (None, 10),
    "step_size": (1.0, 0.5),
    "adapt_step_size": (True, False),
    "adapt_mass_matrix": (True, False),
    "dense_mass": (False, True),
    "target_accept_prob": (None, 0.25),
    "num_steps": (1, 2),
    "temperature": (1.0, 2.0),
    "temper_prior": (False, True),
    "control_variate": (None, "taylor2"),
    "exact_checks": (True, False),
    "fallback": (None, "exact"),
    "init_strategy": (init_to_uniform, init_to_median),
    "rows": (None, {"x": 0, "y": 0}),
    "proposal": (None, proposal.langevin()),
    "target": (None, TARGET),
}
GENERAL: dict[str, tuple[Any, Any]] = {
    "batch": (None, batch.pilot(10)),
    "estimate": ("shared", "augmented"),
    "acceptance": (None, accept.barker()),
}
GRADIENT: dict[str, tuple[Any, Any]] = {
    "model": (model, other_model),
    "target": (None, TARGET),
    "batch_size": (None, 10),
    "batch": (None, batch.with_replacement(10)),
    "step_size": (0.01, 0.02),
    "num_steps": (None, 7),
    "preconditioner": (None, "rmsprop"),
    "temperature": (1.0, 2.0),
    "temper_prior": (False, True),
    "control_variate": (None, "taylor2"),
    "init_strategy": (init_to_uniform, init_to_median),
    "rows": (None, {"x": 0, "y": 0}),
}
ARGUMENTS: dict[type[MinibatchKernel], dict[str, tuple[Any, Any]]] = {
    MinibatchMH: {**COMMON, **GENERAL},
    SGMCMC: {**GRADIENT, "dynamics": (dynamics.sgld(), dynamics.sghmc())},
    SGLD: GRADIENT,
    SGHMC: {
        **GRADIENT,
        "friction": (None, 2.0),
        "h": (None, 0.04),
        "b": (None, 0.3),
        "integrator": ("baoab", "euler"),
    },
    SGNHT: {
        **GRADIENT,
        "friction": (1.0, 2.0),
        "thermal_mass": (1.0, 2.0),
        "integrator": ("symmetric", "euler"),
    },
    MINTEE: {
        "model": (model, other_model),
        "target": (None, TARGET),
        "batch_size": (None, 10),
        "batch_ratio": (1.4, 1.5),
        "batch": (None, batch.full()),
        "num_replicas": (None, 3),
        "temperatures": (None, [1.0, 2.0]),
        "temperature_ratio": (None, 2.0),
        "lam": (None, [0.5, 0.4]),
        "alpha": (None, 0.5),
        "temper_prior": (False, True),
        "energies": (None, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        "ring_width": (None, 3.0),
        "jump_prob": (0.1, 0.2),
        "ring_capacity": (1000, 10),
        "ring_thinning": (1, 2),
        "penalty": (True, False),
        "proposal": (None, proposal.langevin()),
        "step_size": (None, 0.5),
        "adapt_step_size": (True, False),
        "adapt_mass_matrix": (False, True),
        "dense_mass": (False, True),
        "target_accept_prob": (None, 0.25),
        "num_steps": (1, 2),
        "init_strategy": (init_to_uniform, init_to_median),
        "rows": (None, {"x": 0, "y": 0}),
    },
    AMAGOLD: {
        **{k: v for k, v in GRADIENT.items() if k != "preconditioner"},
        "step_size": (None, 0.02),
        "num_steps": (None, 7),
        "friction": (None, 2.0),
        "momentum_variance": (1.0, 2.0),
        "h": (None, 0.04),
        "b": (None, 0.3),
        "resample_momentum": (True, False),
        "correction": ("default", "minibatch"),
        "acceptance": (None, accept.barker()),
        "adapt_step_size": (None, False),
        "adapt_mass_matrix": (None, False),
        "dense_mass": (False, True),
        "target_accept_prob": (None, 0.25),
    },
    MINT: {
        **COMMON,
        "batch": (None, batch.pilot(10)),
        "estimate": ("shared", "augmented"),
        "penalty": (True, False),
        "lam": (None, 0.3),
        "alpha": (None, 0.3),
    },
    MHMinibatch: {
        **COMMON,
        "estimate": ("shared", "augmented"),
        "sequential": (False, True),
        "variance": (1.0, 0.5),
    },
}


def build(kind: type[MinibatchKernel], **changed: Any) -> MinibatchKernel:
    settings = {"model": model, "temperature": 1.0, **changed}
    if "step_size" in ARGUMENTS[kind] and issubclass(kind, SGMCMC):
        settings = {"step_size": 0.01, **settings}
    if kind is SGMCMC:
        settings = {"dynamics": dynamics.sgld(), **settings}
    if {"h", "b"} & set(changed):
        settings = {"h": 0.01, "b": 0.1, **settings, "step_size": None}
    if "target" in changed:
        settings["model"] = None
    if {"lam", "alpha"} & set(changed) or kind is MINTEE:
        del settings["temperature"]
    if kind is MINTEE and "batch" in changed:
        settings["temperature_ratio"] = 2.0
    return kind(settings.pop("model"), **settings)


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_argument_is_in_the_table(kind: type[MinibatchKernel]) -> None:
    general = next(
        c for c in (MinibatchMH, SGMCMC, AMAGOLD, MINTEE) if issubclass(kind, c)
    )
    signatures = [inspect.signature(c.__init__) for c in (kind, general)]
    names = {name for s in signatures for name in s.parameters}
    if kind is MINTEE:
        names |= set(EnergyArguments.__annotations__)
    presets = dict.fromkeys((SGLD, SGHMC, SGNHT), {"dynamics"})
    chosen = {MINT: {"acceptance"}, MHMinibatch: {"acceptance", "batch"}, **presets}
    names -= {"self", "settings"} | chosen.get(kind, set())
    assert set(ARGUMENTS[kind]) == names


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_equal_settings_make_equal_kernels(kind: type[MinibatchKernel]) -> None:
    assert build(kind) == build(kind)
    assert hash(build(kind)) == hash(build(kind))
    for name, (first, second) in ARGUMENTS[kind].items():
        if first is not None and name != "target":
            assert build(kind, **{name: first}) == build(kind)
        changed, same = build(kind, **{name: second}), build(kind, **{name: second})
        assert changed == same and hash(changed) == hash(same), name
        assert changed != build(kind), name


def test_an_argument_that_a_kernel_does_not_have() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        MINTEE(model, temperature=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'ladder'"):
        MINT(model, temperature=1.0, ladder=1.0)


def test_different_kinds_are_different() -> None:
    assert build(MINT) != build(MinibatchMH)
    assert build(MINT) != "MINT"
    assert build(MINT, lam=0.3) != build(MINT, alpha=0.3)
    assert MinibatchMH(model, batch=batch.pilot(10)) != MinibatchMH(
        model, batch=batch.growing(10)
    )
    assert MinibatchMH(model, estimate=estimate.augmented()) == MinibatchMH(
        model, estimate="augmented"
    )


@every_kernel
def test_pickling_a_kernel(name: str) -> None:
    fresh = KERNELS[name]()
    assert pickle.loads(pickle.dumps(fresh)) == fresh
    used = reference(name)[0].sampler
    copy = pickle.loads(pickle.dumps(used))
    assert copy == used and hash(copy) == hash(used)
    # this tells the driver to initialise the kernel again
    assert copy._sample_fn is None
    assert copy.plates == {"data": N}


# a kernel of one's own ---------------------------------------------------------------


class Wanderer(MinibatchKernel):
    """A setting and two methods: a random walk that ignores the data."""

    def __init__(
        self, model: Any = None, *, step_size: float = 0.1, **settings: Any
    ) -> None:
        super().__init__(model, **settings)
        self.step_size = step_size

    def first_state(self, start: Start) -> KernelState:
        return KernelState.first(start)

    def transition(self, target: Target, state: KernelState) -> KernelState:
        rng_key, key = jax.random.split(state.rng_key)
        move = self.step_size * jax.random.normal(key, (2,))
        z = {**state.z, "beta": state.z["beta"] + move}
        return state._replace(i=state.i + 1, z=z, rng_key=rng_key)


def test_settings_of_a_custom_kernel_distinguish_compiled_programs() -> None:
    def moved(step_size: float) -> np.ndarray:
        kernel = Wanderer(model, step_size=step_size)
        idata = sample(kernel, X, Y, num_warmup=0, num_samples=3, progress=False)
        return np.diff(idata["posterior"]["beta"].values[0], axis=0)

    far, still = moved(0.1), moved(1e-9)
    assert np.abs(far).max() > 0.01 and np.abs(still).max() < 1e-6
    del _compiled[:]
    np.testing.assert_array_equal(moved(0.1), far)
    assert "jit(_draw)" not in _compiled  # found again by value


def test_every_attribute_is_part_of_a_kernels_value() -> None:
    one, other = Wanderer(model), Wanderer(model, step_size=1e-9)
    assert one == Wanderer(model) and hash(one) == hash(Wanderer(model))
    assert one != other and pickle.loads(pickle.dumps(other)) == other
    assert other.settings["step_size"] == 1e-9
    assert (
        repr(other) == "Wanderer(model=model, batch=Scheme(size=None), step_size=1e-09)"
    )
    # whatever attributes are stored afterwards
    values: list[Any] = [1, True, 1.0, "a", np.ones(2), np.zeros(2), [1], {"a": 1}]
    values += [jnp.ones(3), (1, 2), None, [1, 2], lambda: None, lambda: None]
    made = []
    for value in values:
        kernel = Wanderer(model)
        hash(kernel)
        kernel.added = value
        assert kernel != one
        made.append(kernel)
        same = Wanderer(model)
        same.added = value
        assert kernel == same and hash(kernel) == hash(same)
    for k, kernel in enumerate(made):
        assert all(kernel != later for later in made[k + 1 :]), values[k]
    made[4].added[0] = 5.0  # in place
    assert made[4] != one and made[6] != made[11]
    made[6].added.append(2)
    assert made[6] == made[11] and hash(made[6]) == hash(made[11])
    with pytest.raises(TypeError, match="Hidden has __slots__"):

        class Hidden(Wanderer):
            __slots__ = ("secret",)


def private_members(source: str) -> set[str]:
    """Private attributes read from anything but ``self``, ``cls`` and states."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        owner = ast.unparse(node.value)
        standard = {"_replace", "_fields"}  # of any NamedTuple
        own = owner in ("self", "cls") or owner.startswith("super()")
        if node.attr not in standard and not own and node.attr[:2] != "__":
            found.add(f"{owner}.{node.attr}")
    return found


@pytest.mark.parametrize("package", ["replica_exchange", "cyclical"])
def test_kernels_of_kernels_use_nothing_private(package: str) -> None:
    folder = Path(kernels_of_the_package.__file__).parent / package
    paths = sorted(folder.glob("*.py"))
    assert len(paths) > 3
    for path in paths:
        found = private_members(path.read_text())
        # their own copies, and attributes of their base class
        allowed = {"kernel._begin", "OuterKernel._unrecorded"}
        assert found <= allowed, path.name
        for kind in ("MinibatchMH", "SGMCMC", "NumPyroKernel"):
            assert f"isinstance(inner, {kind}" not in path.read_text()
    base = private_members((folder.parent / "_shared" / "wrapper.py").read_text())
    assert base <= {"other._inner"}  # of their own copy


def test_a_private_member_is_found() -> None:
    source = "def f(self): return self._inner._dynamics, kernel._advance(1)"
    assert private_members(source) == {"self._inner._dynamics", "kernel._advance"}


def test_what_the_kernels_can_do_is_what_they_say() -> None:
    walker = Wanderer(model)
    assert isinstance(walker, Tempered) and not isinstance(walker, InPieces)
    for name in ("MINT", "SGNHT"):
        assert isinstance(KERNELS[name](), InPieces)
    assert isinstance(KERNELS["SGNHT"](), NoiseDriven)
    assert not isinstance(KERNELS["MINT"](), NoiseDriven)
    with pytest.raises(TypeError, match="must be a kernel of gradient steps"):
        Cyclical(walker, cycle_length=10)


# memory ------------------------------------------------------------------------------


def survivors(kernel: MinibatchKernel) -> list[Any]:
    """The arrays of a model's data that are alive when only the kernel holds them."""
    data = jnp.asarray(X), jnp.asarray(Y)
    watched = [weakref.ref(array) for array in data]
    state = kernel.init(jax.random.key(0), 2, None, data, {})
    jax.jit(partial(kernel.sample, model_args=data, model_kwargs={})).lower(state)
    jax.jit(kernel.postprocess_fn(data, {})).lower(state.z)
    del data, state
    jax.clear_caches()  # to drop traces that contain the data
    gc.collect()
    return [array() for array in watched if array() is not None]


@pytest.mark.slow
@kernels("MINT-augmented", "MHMinibatch", "control-variate", "AMAGOLD", "SGNHT")
def test_the_kernel_does_not_hold_the_data(name: str) -> None:
    kernel = KERNELS[name]()
    assert survivors(kernel) == []
    assert kernel.plates == {"data": N}


class _Hoarder(MINT):
    def sample(self, state: Any, model_args: Any, model_kwargs: Any) -> Any:
        self._kept = model_args
        return super().sample(state, model_args, model_kwargs)


def test_a_kernel_that_holds_the_data_is_found() -> None:
    assert len(survivors(_Hoarder(model, temperature=20.0))) == 2


# the comparisons ---------------------------------------------------------------------


def test_the_comparisons_can_fail() -> None:
    expected = precise_reference("MINT")
    assert_identical(dict(expected), expected)
    rounded = {**expected, "beta": expected["beta"] * (1 + 1e-12)}
    assert_close(rounded, expected)
    with pytest.raises(AssertionError):
        assert_identical(rounded, expected)
    late = {name: np.roll(x, 1, axis=0) for name, x in expected.items()}
    for wrong in (
        late,
        {**expected, "beta": late["beta"]},
        {**expected, "i": expected["i"].astype(float)},
        {**expected, "beta": expected["beta"].astype(np.float32)},
        {name: x for name, x in expected.items() if name != "beta"},
    ):
        with pytest.raises(AssertionError):
            assert_close(wrong, expected)
