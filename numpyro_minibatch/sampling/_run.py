"""A run in progress: chunks are drawn, fetched, stored and reported."""

from __future__ import annotations

import datetime
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xarray as xr
from jax import Array
from numpyro.util import find_stack_level
from tqdm.auto import tqdm

from numpyro_minibatch._internal.progress import shown
from numpyro_minibatch._internal.static import digest
from numpyro_minibatch._version import __version__
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.inference_data import (
    as_inference_data,
    errors_of_kernel,
    get_group,
    with_errors,
)
from numpyro_minibatch.sampling._devices import Share
from numpyro_minibatch.sampling._pace import Pace, interruptible, reported
from numpyro_minibatch.sampling._program import Program
from numpyro_minibatch.sampling._reading import dataset_of, groups_of
from numpyro_minibatch.sampling._result import Drawn, groups, template_of
from numpyro_minibatch.sampling._resume import (
    check_same,
    fingerprint,
    lock,
    refuse_draws_alone,
    refuse_other_processes,
)
from numpyro_minibatch.sampling._store import Layout, Store

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["Run"]

_COMMIT_SECONDS = 2.0
_WARMUP = "warmup_"


@dataclass
class Run:
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
            "what the kernel does": fingerprint(self.program.kernel),
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
        lock(store)
        self.store = store
        refuse_other_processes(store, self.share.processes > 1)
        if store.exists and not resume:
            raise ValueError(
                f"sample(out={str(store.path)!r}): the folder already holds a run. "
                "Pass resume=True to resume it, or another folder; open_run reads it."
            )
        if not store.exists:
            refuse_draws_alone(store)
            store.create(header)
            return
        store.read()
        check_same(store, header)
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
        pace = Pace()
        waiting: tuple[Any, Callable, str, int, int] | None = None
        bar = tqdm(total=total, initial=ahead, disable=not self.progress, unit="step")
        with bar, interruptible() as stop:
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
        pace: Pace,
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
            for group, values in groups(drawn).items():
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
        bar.set_postfix_str(reported(fields, pace), refresh=False)

    def _drawn(self, fields: Mapping[str, Any]) -> Drawn:
        return Drawn(
            self.program.kernel,
            fields,
            self.thinning,
            self.program.args,
            self.program.kwargs,
        )

    def _describe(self, drawn: Drawn) -> None:
        """Determine names, axes and attributes of the result from its first draws."""
        first = {
            name: jax.tree.map(lambda x: x[:, :1], value)
            for name, value in drawn.fields.items()
        }
        small = Drawn(drawn.sampler, first, self.thinning, drawn._args, drawn._kwargs)
        self.template = template_of(self.program.identity, small)
        if self.store is None or self.store.layouts:
            return
        layouts: list[Layout] = []
        attrs: dict[str, Any] = {}
        coords: dict[str, Any] = {}
        found = groups(small)
        for prefix in ("", _WARMUP) if self.keep_warmup else ("",):
            for group, values in found.items():
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
        errors = errors_of_kernel(
            self.program.kernel,
            self.program.args,
            self.program.kwargs,
            {str(name): x.data for name, x in found["posterior"].items()},
        )
        for dataset in found.values():
            dataset.attrs = with_errors(dataset.attrs, errors) | {"created_at": now}
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


def _divided(state: Any) -> tuple[Any, Any]:
    """The part of a state that changes, and the surrogate, which is constant."""
    if not hasattr(state, "surrogate"):
        return state, ()
    return state._replace(surrogate=()), state.surrogate


def _joined(state: Any, constant: Any) -> Any:
    return state._replace(surrogate=constant) if hasattr(state, "surrogate") else state
