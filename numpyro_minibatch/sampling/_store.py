"""The folder of a run: its draws so far, and the state from which it can resume.

``run.json`` describes the run, ``draws/`` has a raw file for each variable, draw after
draw, and ``state.npz``, which is replaced atomically, records how many draws are valid.
Anything that a killed run wrote after them is cut off when the folder is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

try:
    import fcntl
except ImportError:  # not on every system; then there is no lock
    fcntl = None  # type: ignore[assignment]

__all__ = ["FORMAT", "Layout", "Store"]

FORMAT = 1


class Layout(NamedTuple):
    """The place and the name of a variable.

    :param group: the group of the result that it belongs to.
    :param name: its name there.
    :param file: its file, relative to the folder.
    :param dtype: the type of its entries.
    :param shape: the shape of one draw, chains first.
    :param dims: the names of all its axes in the result: chain, draw and its own.
    """

    group: str
    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one draw."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=int))


class Store:
    """The folder of a run.

    :param path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.layouts: list[Layout] = []
        self._files: dict[str, Any] = {}
        self._lock: Any = None

    # reading -------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "run.json").exists()

    def read(self) -> None:
        """Read the description of the run.

        :raises ValueError: the folder holds no run, or one of another version.
        """
        try:
            found = json.loads((self.path / "run.json").read_text())
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} holds no run of numpyro_minibatch: it has no run.json."
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path / 'run.json'} is damaged: {error}.") from None
        if found.get("format") != FORMAT:
            raise ValueError(
                f"{self.path} was written in format {found.get('format')}, but this "
                f"version of numpyro_minibatch reads format {FORMAT}. Open it with the "
                f"version that wrote it ({found.get('numpyro_minibatch', 'unknown')})."
            )
        self.layouts = [
            Layout(**{**v, "shape": tuple(v["shape"]), "dims": tuple(v["dims"])})
            for v in found.pop("variables")
        ]
        self.header = found

    def counts(self) -> dict[str, int]:
        """The numbers of valid steps and draws; empty if there are none."""
        try:
            with np.load(self.path / "state.npz") as saved:
                return json.loads(bytes(saved["counts"]).decode())
        except FileNotFoundError:
            return {}

    def arrays(self, group: str, draws: int) -> dict[str, tuple[Layout, np.ndarray]]:
        """The variables of a group, read from disk when they are accessed.

        :raises ValueError: a file is missing or too short.
        """
        found = {}
        for layout in self.layouts:
            if layout.group != group:
                continue
            path = self.path / layout.file
            have = path.stat().st_size if path.exists() else -1
            if have < draws * layout.bytes:
                what = "is missing" if have < 0 else f"has only {have} bytes"
                raise ValueError(
                    f"{path} {what}, but {draws} draws take {draws * layout.bytes}: "
                    "the run cannot be read. Restore the file, or start a new run."
                )
            shape = (draws, *layout.shape)
            raw: np.ndarray
            if draws and layout.bytes:
                raw = np.memmap(path, layout.dtype, "r", shape=shape)
            else:
                raw = np.zeros(shape, layout.dtype)
            found[layout.name] = layout, np.moveaxis(raw, 0, 1)
        return found

    # writing -------------------------------------------------------------------------

    def create(self, header: Mapping[str, Any]) -> None:
        """Begin a run.

        :param header: its description, for ``run.json``.
        """
        (self.path / "draws").mkdir(parents=True, exist_ok=True)
        self.header = {**header, "format": FORMAT}

    def describe(self, layouts: list[Layout], **more: Any) -> None:
        """Record the variables; from then on the folder holds a run."""
        self.layouts = layouts
        self.header |= more
        variables = [layout._asdict() for layout in layouts]
        text = json.dumps({**self.header, "variables": variables}, indent=1)
        _replace(self.path / "run.json", text.encode())

    def update(self, **changes: Any) -> None:
        """Change entries of ``run.json``."""
        self.describe(self.layouts, **changes)

    def truncate(self, counts: Mapping[str, int]) -> None:
        """Cut off what was written after the last commit."""
        for layout in self.layouts:
            path = self.path / layout.file
            size = counts.get(layout.group, 0) * layout.bytes
            have = path.stat().st_size if path.exists() else 0
            if have < size:
                self.arrays(layout.group, counts[layout.group])  # raises
            with path.open("ab") as file:
                file.truncate(size)

    def append(self, group: str, values: Mapping[str, np.ndarray]) -> None:
        """Append draws.

        :param values: by name, with the axes chain and draw first.
        """
        for layout in self.layouts:
            if layout.group == group:
                if layout.file not in self._files:
                    self._files[layout.file] = (self.path / layout.file).open("ab")
                rows = np.moveaxis(values[layout.name], 1, 0)
                self._files[layout.file].write(np.ascontiguousarray(rows).tobytes())

    def commit(self, state: Any, constant: Any, counts: Mapping[str, int]) -> None:
        """Make everything written so far valid.

        :param state: the state from which to resume.
        :param constant: the constant part of the state; written once.
        :param counts: steps made, and draws of each group.
        """
        if jax.tree.leaves(constant) and not (self.path / "constant.npz").exists():
            _save(self.path / "constant.npz", constant)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        said = np.frombuffer(json.dumps(dict(counts)).encode(), np.uint8)
        _save(self.path / "state.npz", state, counts=said)

    def restore(self, like: Any, constant: Any) -> tuple[Any, Any]:
        """The state of the last commit, and its constant part.

        :param like: a state of the same run, for the shapes and types of its parts.
        :param constant: the constant part of such a state.
        :raises ValueError: the stored state does not fit.
        """
        if jax.tree.leaves(constant):
            constant = _load(self.path / "constant.npz", constant)
        return _load(self.path / "state.npz", like), constant

    def lock(self) -> None:
        """Lock the folder.

        :raises BlockingIOError: another process holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("a")
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.unlock()
                raise

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}


def _save(path: Path, tree: Any, **more: np.ndarray) -> None:
    """Write the arrays of a tree atomically."""
    leaves = enumerate(jax.tree.leaves(tree))
    arrays = {f"leaf_{k}": _raw(leaf) for k, leaf in leaves}
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays, **more)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _load(path: Path, like: Any) -> Any:
    leaves, treedef = jax.tree.flatten(like)
    with np.load(path) as saved:
        stored = [name for name in saved.files if name.startswith("leaf_")]
        if len(stored) != len(leaves):
            raise ValueError(
                f"{path} has {len(stored)} arrays, but the kernel's state has "
                f"{len(leaves)}: they are not of one run."
            )
        found = [_from_raw(saved[f"leaf_{k}"], x) for k, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, found)


def _raw(leaf: Any) -> np.ndarray:
    """The bytes of an array, or of a key."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.frombuffer(np.ascontiguousarray(np.asarray(leaf)).tobytes(), np.uint8)


def _from_raw(raw: np.ndarray, like: Any) -> Any:
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    plain = jax.random.key_data(like) if is_key else like
    if raw.nbytes != plain.size * plain.dtype.itemsize:
        raise ValueError(
            f"the stored state has an array of {raw.nbytes} bytes where the kernel's "
            f"has shape {plain.shape} and type {plain.dtype}: they are not of one run."
        )
    value = np.frombuffer(raw.tobytes(), plain.dtype).reshape(plain.shape)
    array = jnp.asarray(value)
    impl = jax.random.key_impl(like) if is_key else None
    return jax.random.wrap_key_data(array, impl=impl) if is_key else array


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
