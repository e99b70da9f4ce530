"""Progress bars for the work before the first draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from numpyro_minibatch._internal.frames import running

__all__ = ["asked_by", "shown", "stage", "stages"]

_SHOWN = ContextVar("_SHOWN", default=True)
_TELL: ContextVar[Callable[[str], None] | None] = ContextVar("_TELL", default=None)
_DELAY = 3.0  # seconds; shorter work needs no bar


@contextmanager
def shown(yes: bool) -> Iterator[None]:
    """Show progress bars inside this context, or hide them."""
    before = _SHOWN.set(yes)
    try:
        yield
    finally:
        _SHOWN.reset(before)


def asked_by(driver: type) -> bool:
    """Whether to show bars: the setting of the running driver, if there is one.

    :param driver: a class with a method ``run`` and an attribute ``progress_bar``.
    """
    found = running(driver)
    return _SHOWN.get() and (found is None or bool(found.progress_bar))


@contextmanager
def stages(who: str, total: int) -> Iterator[None]:
    """Show a bar with the stages that are named inside, see :func:`stage`.

    :param who: the name of the kernel.
    :param total: the number of stages; more are possible.
    """
    # passed only if true: disable=False would override the user's TQDM_DISABLE
    off = {} if _SHOWN.get() else {"disable": True}
    with tqdm(total=total, delay=_DELAY, leave=False, desc=who, **off) as bar:

        def tell(name: str) -> None:
            bar.total = max(bar.total, bar.n + 1)
            bar.set_description(f"{who}: {name}")
            bar.update()

        before = _TELL.set(tell)
        try:
            yield
        finally:
            _TELL.reset(before)


def stage(name: str) -> None:
    """Name the stage that begins on the bar of :func:`stages`, if there is one."""
    tell = _TELL.get()
    if tell is not None:
        tell(name)
