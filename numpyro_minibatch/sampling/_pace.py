"""The length of a chunk, the text of the progress bar, and interrupts."""

from __future__ import annotations

import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["Pace", "interruptible", "reported"]

_CHUNK_SECONDS = 0.25  # long compared with a chunk's overhead, but a short wait


class Pace:
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


def reported(fields: Mapping[str, Any], pace: Pace) -> str:
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


@contextmanager
def interruptible() -> Iterator[threading.Event]:
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
