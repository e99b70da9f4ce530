"""The driver that runs a kernel, found in the calling frames."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["running"]


def running(driver: type) -> Any:
    """The driver that is running, read from the calling frames, or ``None``.

    :param driver: a class with a method ``run``.
    """
    # Only the frame of this method is read. A frame whose locals have been read holds
    # them until it returns, so a caller could not free data by deleting it.
    run = driver.run.__code__  # type: ignore[attr-defined]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not run:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
