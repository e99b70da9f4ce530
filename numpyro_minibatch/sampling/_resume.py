"""Whether a folder holds the run that is to be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpyro_minibatch._internal.static import digest
from numpyro_minibatch.sampling._store import Store

__all__ = [
    "check_same",
    "fingerprint",
    "lock",
    "refuse_draws_alone",
    "refuse_other_processes",
]


def lock(store: Store) -> None:
    """Raise if the folder cannot be written, or another process writes there."""
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


def refuse_other_processes(store: Store, several: bool) -> None:
    """Raise if the folder holds a run of one process, and this is one of several.

    :param several: whether this run has several processes.
    """
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


def refuse_draws_alone(store: Store) -> None:
    """Raise if the folder has draws without the description of their run."""
    if (store.path / "state.npz").exists() or list(store.path.glob("draws/*")):
        raise ValueError(
            f"sample(out={str(store.path)!r}): the folder has draws of a run "
            "whose run.json is missing. Restore it, or use another folder."
        )


def check_same(store: Store, header: Mapping[str, Any]) -> None:
    """Raise if the run in the folder differs from this one.

    :param header: the description of this run.
    """
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


def fingerprint(kernel: Any) -> str:
    """A digest of a kernel's arguments, its model included."""
    identity = getattr(kernel, "_identity", None)
    if identity is not None:
        return digest((type(kernel).__name__, identity()))
    # attributes that `init` creates
    made = {"_sample_fn", "_init_fn", "_potential_fn_gen", "_postprocess_fn"}
    made |= {"_inv_transforms", "_dynamic_support", "_wa_update", "_num_warmup"}
    given = {name: x for name, x in vars(kernel).items() if name not in made}
    return digest((type(kernel).__name__, given))
