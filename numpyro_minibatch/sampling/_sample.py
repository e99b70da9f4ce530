"""A driver for long runs, which can be streamed to disk, stopped and resumed."""

from __future__ import annotations

import datetime
import math
import signal
import threading
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xarray as xr
from jax import Array
from jax.sharding import Mesh
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import find_stack_level
from tqdm.auto import tqdm

from numpyro_minibatch._internal.checks import check_count, check_flag, describe
from numpyro_minibatch._internal.progress import shown
from numpyro_minibatch._internal.static import Seen, digest
from numpyro_minibatch._version import __version__
from numpyro_minibatch.host_rows import find_rows, given_back, map_rows
from numpyro_minibatch.inference_data import (
    as_inference_data,
    collected_groups,
    get_group,
    to_inference_data,
)
from numpyro_minibatch.sampling._devices import Share
from numpyro_minibatch.sampling._program import Program
from numpyro_minibatch.sampling._reading import (
    dataset_of,
    export_run,
    groups_of,
    open_run,
)
from numpyro_minibatch.sampling._store import Layout, Store

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["export_run", "open_run", "sample"]

_CHUNK_SECONDS = 0.25  # long compared with a chunk's overhead, but a short wait
_COMMIT_SECONDS = 2.0
_WARMUP = "warmup_"


def sample(
    kernel: MCMCKernel,
    *args: Any,
    num_warmup: int,
    num_samples: int,
    num_chains: int = 1,
    seed: int | Array = 0,
    thinning: int = 1,
    init_params: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    extra_fields: Sequence[str] = (),
    keep_warmup: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    mesh: Mesh | None = None,
) -> InferenceData:
    """Run a kernel, and return its draws for ArviZ.

    It is made for runs that are long, or whose draws are large. With ``out`` the draws
    are written to disk as they are made, memory never holds more than two chunks, and a
    run that was stopped or killed can be resumed. The draws do not depend on any of
    this.

    An interrupt (Ctrl-C) ends the run after the current chunk and returns the draws
    made so far; a second one raises at once.

    :param kernel: a kernel of this package or one of NumPyro's, such as ``NUTS``.
    :param args: the positional arguments of the model. Arrays are passed to the
        compiled program as arguments and are not constants of it.
    :param num_warmup: number of warmup steps, in which the kernel adapts.
    :param num_samples: number of draws of each chain.
    :param num_chains: number of chains, which are vectorised in one program.
    :param seed: a number, or a PRNG key.
    :param thinning: number of steps per draw.
    :param init_params: unconstrained start, by site, with a leading axis of chains.
    :param model_kwargs: keyword arguments of the model.
    :param extra_fields: fields of the kernel's state to collect in addition to the
        kernel's default fields.
    :param keep_warmup: whether to return the draws of the warmup, too.
    :param out: a folder for the run; ``None`` keeps the draws in memory.
    :param resume: resume the run in ``out``, if there is one. A larger ``num_samples``
        extends it. Everything else must be the same.
    :param progress: whether to show a progress bar.
    :param mesh: devices among which the chains are divided evenly, as a
        ``jax.sharding.Mesh`` with one axis; by default all chains run on the first
        device. The devices of an axis called ``"rows"``, alone or in addition to that
        of the chains, make the steps of a chain together: each processes its part of
        every pass over all rows. The passes before a run are always divided among all
        devices. With the devices of several processes, each process draws its own
        chains, returns them, and writes them to its own folder in ``out``.
    :return: an ``arviz.InferenceData`` or, on ArviZ 1.x, an ``xarray.DataTree``, as
        from :func:`to_inference_data`; with ``out`` its draws are read from disk when
        they are accessed.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or the folder already holds a run,
        or a different one.
    :raises KeyboardInterrupt: at an interrupt before there is a draw.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_minibatch import MINT, sample

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> idata = sample(MINT(model, temperature=500.0), y, num_warmup=500,
        ...                num_samples=1000, num_chains=2, progress=False)
        >>> idata.posterior.sizes["chain"], idata.posterior.sizes["draw"]
        (2, 1000)
    """
    if not isinstance(kernel, MCMCKernel):
        raise TypeError(
            "sample(kernel, ...) needs a kernel such as MINT(model, temperature=100.0) "
            f"or NUTS(model), got {describe(kernel)}."
        )
    for name, value in (
        ("num_samples", num_samples),
        ("num_chains", num_chains),
        ("thinning", thinning),
    ):
        check_count("sample", name, value)
    if num_warmup != 0:
        check_count("sample", "num_warmup", num_warmup)
    for name, flag in (
        ("keep_warmup", keep_warmup),
        ("resume", resume),
        ("progress", progress),
    ):
        check_flag("sample", name, flag)
    if resume and out is None:
        raise ValueError(
            "sample(resume=True) needs the folder of the run: pass out=..., too."
        )
    if hasattr(kernel, "check_draws"):
        kernel.check_draws(num_warmup, num_samples * thinning)
    if mesh is not None and getattr(kernel, "_mesh", None) is not None:
        raise ValueError(
            "sample(mesh=...) divides the chains among devices, and "
            f"{type(kernel).__name__}(mesh=...) its rungs. Pass only one mesh: that of "
            "the chains, if there are as many as devices."
        )
    share = Share.of(num_chains, mesh)
    if share.devices["rows"] > 1 and not hasattr(type(kernel), "plates"):
        raise ValueError(
            'sample(mesh=...): devices of an axis "rows" divide the passes over all '
            f"rows that kernels of this package make, but {type(kernel).__name__} "
            'makes none that can be divided. Use an axis "chains".'
        )
    key = jax.random.key(seed) if isinstance(seed, int | np.integer) else seed
    kwargs = dict(model_kwargs or {})
    program = Program(
        kernel,
        num_warmup,
        share.count,
        args,
        kwargs,
        tuple(extra_fields),
        share.mesh,
        share.setup,
    )
    run = _Run(
        program,
        share,
        num_warmup,
        num_samples,
        thinning,
        bool(keep_warmup),
        bool(progress) and share.process == 0,
    )
    keys = share.slice(jax.random.split(key, num_chains))
    start = share.slice(init_params)
    with given_back((program.args, program.kwargs)):
        if out is None:
            return run.finish(keys, start)
        path = Path(out)
        if share.processes > 1:
            path = path / f"process-{share.process:04d}"
        store = Store(path)
        try:
            run.begin_in(store, key, init_params, resume)
            return run.finish(keys, start)
        finally:
            store.unlock()


@dataclass
class _Drawn:
    """Draws with the attributes of a run that :func:`to_inference_data` reads."""

    sampler: Any
    fields: Mapping[str, Any]
    thinning: int
    _args: tuple
    _kwargs: Mapping[str, Any]
    _states: bool = True
    constrained: bool = True
    post_warmup_state: Any = None
    last_state: Any = True

    def get_samples(self, group_by_chain: bool = True) -> Any:
        return self.fields[self.sampler.sample_field]

    def get_extra_fields(self, group_by_chain: bool = True) -> dict[str, Any]:
        position = self.sampler.sample_field
        return {n: v for n, v in self.fields.items() if n != position}


@dataclass
class _Run:
    """A run in progress.

    :param program: the program that draws.
    :param share: this process's part of the chains.
    :param num_warmup: steps of the warmup.
    :param num_samples: draws to make.
    :param thinning: steps per draw.
    :param keep_warmup: whether the draws of the warmup are kept.
    :param progress: whether to show a progress bar.
    """

    program: Program
    share: Share
    num_warmup: int
    num_samples: int
    thinning: int
    keep_warmup: bool
    progress: bool
    store: Store | None = None
    kept: dict[str, list[dict[str, np.ndarray]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    template: Any = None  # an InferenceData of one draw
    committed: float = -math.inf  # time of the last commit

    # the folder ----------------------------------------------------------------------

    def begin_in(self, store: Store, key: Array, init: Any, resume: bool) -> None:
        """Use a folder: a new one, or one that holds a part of this run."""
        modes = find_rows((self.program.args, self.program.kwargs)).items()
        header = {
            "numpyro_minibatch": __version__,
            "jax": version("jax"),
            "numpyro": version("numpyro"),
            "x64": bool(jax.config.read("jax_enable_x64")),
            "backend": jax.default_backend(),
            "kernel": type(self.program.kernel).__name__,
            "what the kernel does": _fingerprint_of_kernel(self.program.kernel),
            "data": digest((self.program.args, self.program.kwargs)),
            "host_rows": {place: rows.mode for place, rows in modes},
            "init_params": digest(init),
            "seed": digest(key),
            "num_chains": self.program.num_chains,
            "first_chain": self.share.first,
            "process": [self.share.process, self.share.processes],
            "devices": self.share.devices,
            "num_warmup": self.num_warmup,
            "thinning": self.thinning,
            "keep_warmup": self.keep_warmup,
            "fields": list(self.program.fields),
        }
        try:
            store.lock()
        except BlockingIOError:
            raise ValueError(
                f"sample(out={str(store.path)!r}): another process is writing this "
                "run. Wait until it has ended; open_run reads the draws made so far."
            ) from None
        except OSError as error:
            raise ValueError(
                f"sample(out={str(store.path)!r}): cannot write there ({error})."
            ) from error
        self.store = store
        several = self.share.processes > 1
        if (
            (store.path.parent / "run.json").exists()
            if several
            else any(store.path.glob("process-*"))
        ):
            raise ValueError(
                f"sample(out={str(store.path)!r}): the folder holds a run of "
                f"{'one process' if several else 'several processes'}, but this run is "
                f"of {'several' if several else 'one'}. A run can only be resumed as "
                "it began; use another folder for this one."
            )
        if store.exists and not resume:
            raise ValueError(
                f"sample(out={str(store.path)!r}): the folder already holds a run. "
                "Pass resume=True to resume it, or another folder; open_run reads it."
            )
        if not store.exists:
            if (store.path / "state.npz").exists() or list(store.path.glob("draws/*")):
                raise ValueError(
                    f"sample(out={str(store.path)!r}): the folder has draws of a run "
                    "whose run.json is missing. Restore it, or use another folder."
                )
            store.create(header)
            return
        store.read()
        # the rows are the same wherever they are read from
        expected = {name: x for name, x in header.items() if name != "host_rows"}
        for name, value in expected.items():
            there = store.header.get(name)
            if there != value:
                raise ValueError(
                    f"sample(out={str(store.path)!r}, resume=True): the run there "
                    f"differs in {name}: it has {there!r}, this call has {value!r}. A "
                    "run can only be resumed as it began; use another folder for this "
                    "one."
                )
        self.counts = store.counts()
        have = self.counts.get("posterior", 0)
        if have > self.num_samples:
            raise ValueError(
                f"sample(out={str(store.path)!r}, resume=True, "
                f"num_samples={self.num_samples}): the run already has {have} draws. "
                f"Write num_samples={have} or more, or read it with open_run."
            )
        store.truncate(self.counts)
        store.update(num_samples=self.num_samples)

    # drawing -------------------------------------------------------------------------

    def finish(self, key: Array, init_params: Any) -> Any:
        """Make the missing draws, and return the result.

        :param key: a PRNG key for each chain.
        :param init_params: unconstrained start, with a leading axis of chains.
        """
        with shown(self.progress):
            state = self.program.init(key, init_params)
        if self.store is not None and self.counts:
            state = _joined(*self.store.restore(*_divided(state)))
        state = self.program.place(state)
        if self.store is not None and self.counts:
            if not self.template:
                self._describe(self._drawn(self.program.peek(state)))
        try:
            self._loop(state)
            return self._result()
        finally:
            if self.store is not None:
                self.store.close()

    @property
    def _steps_done(self) -> int:
        return self.counts.get("steps", 0)

    def _next(self, done: int, most: int) -> tuple[str, int, int]:
        """The phase, draws and steps per draw of the next chunk of ``most`` steps."""
        capacity = self.program.capacity
        left = self.num_warmup - done
        if left > 0 and self.keep_warmup:
            return _WARMUP, min(left, most, capacity), 1
        if left > 0:
            return _WARMUP, 1, min(left, most)
        drawn = (done - self.num_warmup) // self.thinning
        left = self.num_samples - drawn
        return "", max(min(left, most // self.thinning, capacity), 1), self.thinning

    def _loop(self, state: Any) -> None:
        total = self.num_warmup + self.num_samples * self.thinning
        ahead = self._steps_done
        pace = _Pace()
        waiting: tuple[Any, Callable, str, int, int] | None = None
        bar = tqdm(total=total, initial=ahead, disable=not self.progress, unit="step")
        with bar, _interruptible() as stop:
            while True:
                following = None
                if ahead < total and not stop.is_set():
                    most = min(pace.steps, self.program.most_steps)
                    phase, draws, steps = self._next(ahead, most)
                    state, fetch = self.program.draw(state, draws, steps, ahead)
                    following = state, fetch, phase, draws, steps
                    ahead += draws * steps
                if waiting is not None:
                    self._take(*waiting, bar, pace, last=following is None)
                if following is None:
                    break
                waiting = following
        if stop.is_set() and self._steps_done < total:
            drawn = self.counts.get("posterior", 0)
            if not drawn:
                raise KeyboardInterrupt("interrupted before the first draw")
            warnings.warn(
                f"sample: interrupted after {drawn} of {self.num_samples} draws, which "
                "are returned.",
                UserWarning,
                stacklevel=find_stack_level(),
            )

    def _take(
        self,
        state: Any,
        fetch: Callable,
        phase: str,
        draws: int,
        steps: int,
        bar: Any,
        pace: _Pace,
        last: bool,
    ) -> None:
        """Wait for a chunk; store, commit and report it."""
        fields = {
            name: jax.tree.map(lambda x: np.moveaxis(x, 0, 1), value)
            for name, value in fetch().items()
        }
        pace.saw(draws * steps)
        drawn = self._drawn(fields)
        if self.template is None:
            self._describe(drawn)
        if not phase or self.keep_warmup:
            for group, values in _groups(drawn).items():
                name = phase + group
                if self.store is not None:
                    self.store.append(name, values)
                else:
                    self.kept.setdefault(name, []).append(values)
                self.counts[name] = self.counts.get(name, 0) + draws
        self.counts["steps"] = self._steps_done + draws * steps
        waited = time.monotonic() - self.committed
        if self.store is not None and (last or waited > _COMMIT_SECONDS):
            self.store.commit(*_divided(state), self.counts)
            self.committed = time.monotonic()  # a commit may take long
        bar.update(draws * steps)
        bar.set_description("warmup" if phase else "sample", refresh=False)
        bar.set_postfix_str(_reported(fields, pace), refresh=False)

    def _drawn(self, fields: Mapping[str, Any]) -> _Drawn:
        return _Drawn(
            self.program.kernel,
            fields,
            self.thinning,
            self.program.args,
            self.program.kwargs,
        )

    def _describe(self, drawn: _Drawn) -> None:
        """Determine names, axes and attributes of the result from its first draws."""
        first = {
            name: jax.tree.map(lambda x: x[:, :1], value)
            for name, value in drawn.fields.items()
        }
        small = _Drawn(drawn.sampler, first, self.thinning, drawn._args, drawn._kwargs)
        self.template = _template(self.program.identity, small)
        if self.store is None or self.store.layouts:
            return
        layouts: list[Layout] = []
        attrs: dict[str, Any] = {}
        coords: dict[str, Any] = {}
        groups = _groups(small)
        for prefix in ("", _WARMUP) if self.keep_warmup else ("",):
            for group, values in groups.items():
                dataset = get_group(self.template, group)
                assert dataset is not None
                for (name, value), stored in zip(
                    values.items(), dataset.data_vars, strict=True
                ):
                    layouts.append(
                        Layout(
                            prefix + group,
                            name,
                            f"draws/{len(layouts):03d}.bin",
                            value.dtype.name,
                            (value.shape[0], *value.shape[2:]),
                            (str(stored), *map(str, dataset[stored].dims)),
                        )
                    )
                attrs[prefix + group] = dict(dataset.attrs)
                coords |= {
                    str(d): dataset[d].values.tolist()
                    for d in dataset.dims
                    if d not in ("chain", "draw")
                }
        self.store.describe(
            layouts, attrs=attrs, coords=coords, num_samples=self.num_samples
        )

    # results -------------------------------------------------------------------------

    def _result(self) -> Any:
        if self.store is not None:
            found = groups_of(self.store, self.counts)
        else:
            found = {
                name: self._in_memory(name, chunks)
                for name, chunks in self.kept.items()
            }
        for group in ("observed_data", "constant_data"):
            dataset = get_group(self.template, group) if self.template else None
            if dataset is not None:
                found[group] = dataset
        now = datetime.datetime.now(datetime.UTC).isoformat()
        for dataset in found.values():
            dataset.attrs["created_at"] = now
        return as_inference_data(found, dict(found["posterior"].attrs))

    def _in_memory(self, name: str, chunks: list[dict[str, np.ndarray]]) -> xr.Dataset:
        like = get_group(self.template, name.removeprefix(_WARMUP))
        assert like is not None
        values = {
            key: np.concatenate([chunk[key] for chunk in chunks], axis=1)
            for key in chunks[0]
        }
        return dataset_of(
            {
                str(stored): (tuple(map(str, like[stored].dims)), values[key])
                for key, stored in zip(values, like.data_vars, strict=True)
            },
            {str(d): like[d].values for d in like.dims},
            dict(like.attrs),
            self.share.first,
        )


def _groups(drawn: _Drawn) -> dict[str, dict[str, np.ndarray]]:
    return {name: values for name, values in collected_groups(drawn).items() if values}


def _divided(state: Any) -> tuple[Any, Any]:
    """The part of a state that changes, and the surrogate, which is constant."""
    if not hasattr(state, "surrogate"):
        return state, ()
    return state._replace(surrogate=()), state.surrogate


def _joined(state: Any, constant: Any) -> Any:
    return state._replace(surrogate=constant) if hasattr(state, "surrogate") else state


class _Pace:
    """The number of steps of a chunk."""

    def __init__(self) -> None:
        self.steps = 1
        self.per_second = 0.0
        self._last: float | None = None

    def saw(self, steps: int) -> None:
        """Record that a chunk of ``steps`` steps is done."""
        now = time.monotonic()
        if self._last is not None:
            self.per_second = steps / max(now - self._last, 1e-9)
            wanted = self.per_second * _CHUNK_SECONDS
            # the first chunks are not representative
            self.steps = int(np.clip(wanted, 1, 8 * self.steps))
        self._last = now


def _reported(fields: Mapping[str, Any], pace: _Pace) -> str:
    """The text of the progress bar for a chunk."""
    parts = []
    for name, label in (("accept_prob", "acceptance"), ("reliable", "reliable")):
        for key in (name, f"replicas.{name}", f"inner.{name}"):
            if key in fields:
                values = np.asarray(fields[key], float)
                # in a short chunk without proposals all values are NaN
                if np.isfinite(values).any():
                    parts.append(f"{label} {np.nanmean(values):.2f}")
                break
    if "num_rows" in fields and pace.per_second:
        rows = float(np.mean(fields["num_rows"])) * pace.per_second
        parts.append(f"{rows:.2g} rows/s")
    if "diverging" in fields and np.any(fields["diverging"]):
        parts.append(f"diverging {np.mean(fields['diverging']):.1%}")
    return ", ".join(parts)


# results of replaying models, so that running a kernel again compiles nothing; for
# large data they are not kept
_TEMPLATES: OrderedDict[Hashable, tuple[Seen, Any]] = OrderedDict()
_MOST_TEMPLATES, _MOST_TEMPLATE_BYTES = 8, 2**25


def _template(identity: Hashable, drawn: _Drawn) -> Any:
    """The result of the first draws, which later runs of the same program reuse."""
    # except for data on the host, which stay there
    given = map_rows(lambda _: None, (drawn._args, dict(drawn._kwargs)))
    leaves = jax.tree.leaves(given)
    arrays = [x for x in leaves if isinstance(x, np.ndarray | Array)]
    identity, seen = (identity, drawn.thinning), Seen.of(arrays)
    known = _TEMPLATES.get(identity)
    if known is not None and known[0] == seen:
        return known[1]
    template = to_inference_data(drawn)
    if sum(x.nbytes for x in arrays) <= _MOST_TEMPLATE_BYTES:
        _TEMPLATES[identity] = seen, template
        while len(_TEMPLATES) > _MOST_TEMPLATES:
            _TEMPLATES.popitem(last=False)
    return template


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn the first interrupt into a request to stop, in the main thread."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: types.FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# is it the same run? ------------------------------------------------------------------


def _fingerprint_of_kernel(kernel: Any) -> str:
    """A digest of a kernel's arguments, its model included."""
    identity = getattr(kernel, "_identity", None)
    if identity is not None:
        return digest((type(kernel).__name__, identity()))
    # attributes that `init` creates
    made = {"_sample_fn", "_init_fn", "_potential_fn_gen", "_postprocess_fn"}
    made |= {"_inv_transforms", "_dynamic_support", "_wa_update", "_num_warmup"}
    given = {name: x for name, x in vars(kernel).items() if name not in made}
    return digest((type(kernel).__name__, given))
