"""Rows that stay in a file or in the memory of the host."""

from __future__ import annotations

import mmap
import operator
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap

__all__ = ["HostRows"]

_MODES = ("auto", "alias", "prefetch", "callback")
_CHUNK_BYTES = 2**26  # of one chunk in a pass over all rows
_TABLE_BYTES = 2**26  # of rows that are fetched before a chunk
_ALIGNMENT = 64  # of memory that XLA can use without a copy
_LARGE = 2**30  # smallest file, in bytes, whose pages are released during a run
_READERS = 8  # threads, which wait in parallel for pages that are not in memory
_NO_ROW = np.iinfo(np.int32).max

_ADVICE = (
    "Inside the model take the rows of a minibatch first, x[idx] with the indices of "
    "the plate or numpyro.subsample(x, event_dim=...), and compute on those; outside "
    "of it use the array itself."
)


@jax.tree_util.register_pytree_node_class
class HostRows:
    """Data that stay on disk or in host memory, of which the model reads single rows.

    Pass it to a kernel's model in place of an array, with :func:`sample` or with
    NumPyro's ``MCMC``. The model may use ``x[idx]`` with the indices of a plate,
    ``numpyro.subsample(x, event_dim=...)``, ``len(x)``, ``x.shape`` and ``x.dtype``.
    Everything else would need all rows at once and raises. The file must not change
    while it is in use.

    Rows reach the program in one of three ways:

    - ``"alias"`` - the program reads the array in place, and the operating system loads
      the pages that it touches. This works for NumPy arrays and memory maps on the CPU,
      in C order, aligned to 64 bytes and of a type that JAX supports (``float64`` only
      with x64). Draws are bit for bit those of data in memory.
    - ``"prefetch"`` - :func:`sample` fetches the rows of a chunk of steps while the
      previous chunk runs, for kernels that can compute their rows in advance. Other
      rows come by callback.
    - ``"callback"`` - the program requests the rows of each step from the host. This
      works with every kernel and array, and takes tenths of a millisecond per step.

    :param array: a NumPy array or memory map, or an array of ``h5py`` or ``zarr``,
        shape ``(N, ...)``.
    :param mode: one of these; by default ``"auto"``, the first that works.

    :raises TypeError: ``array`` is not an array of numbers.
    :raises ValueError: ``array`` has no rows, or the mode is not possible for it.

    **Example**

    .. doctest::

        >>> import tempfile, jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> from numpyro_minibatch import MINT, HostRows, sample

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = np.random.default_rng(0).normal(3, 1, 10_000).astype(np.float32)
        >>> path = tempfile.mkdtemp() + "/y.npy"
        >>> np.save(path, y)
        >>> rows = HostRows(np.load(path, mmap_mode="r"))
        >>> rows
        HostRows((10000,), float32, mode='alias')
        >>> settings = {"num_warmup": 100, "num_samples": 100, "progress": False}
        >>> kernel = MINT(model, temperature=500.0)
        >>> one, other = (sample(kernel, x, **settings) for x in (rows, y))
        >>> bool((one.posterior["mu"] == other.posterior["mu"]).all())
        True
    """

    def __init__(self, array: Any, mode: str = "auto") -> None:
        if mode not in _MODES:
            raise ValueError(
                f"HostRows(mode={mode!r}) must be one of {', '.join(map(repr, _MODES))}"
            )
        self._source = Source(array)
        self._parts: tuple[Any, ...] = ()
        why_not = self._source.why_no_alias()
        if mode == "alias" and why_not:
            raise ValueError(
                f"HostRows(mode='alias'): {why_not}, so a program could only use a "
                "copy. Leave mode out, or write the array anew with numpy.save and "
                "open it with numpy.load(path, mmap_mode='r')."
            )
        self._asked = mode
        if mode == "auto":
            mode = "callback" if why_not else "alias"
        self._mode = mode
        if mode == "alias":
            self._parts = (self._source.alias(),)
        elif mode == "prefetch":
            self._parts = self._source.table(np.zeros(0, np.int32))

    # used by models -------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """The way in which rows reach the program."""
        return self._mode

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._source.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the rows that the model receives."""
        return self._source.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"HostRows({self.shape}, {self.dtype.name}, mode={self.mode!r})"

    def __getitem__(self, index: Any) -> Array:
        kind = getattr(index, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.integer):
            what = f"of type {kind}" if kind is not None else repr(index)
            raise TypeError(f"HostRows cannot be indexed by {what}. {_ADVICE}")
        asked, index = index, jnp.asarray(index)
        if self._mode == "alias":
            return self._parts[0][index]
        # a decision evaluates two positions on the same rows, and fetches them once
        known = asked, *self._parts
        last, found = self._source.last
        if len(last) == len(known) and all(map(operator.is_, last, known)):
            self._source.last = (), None  # needed only for the second position
            return found
        if self._mode == "prefetch":
            found = _looked_up(self._source, index, *self._parts)
        else:
            found = _called(self._source, index)
        # not inside a branch or a loop if the numbers come from outside of it
        if getattr(found, "_trace", None) is getattr(index, "_trace", self):
            self._source.last = known, found
        return found

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"HostRows cannot be used in computations. {_ADVICE}")

    __array__ = __jax_array__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _refuse
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse  # instead of False where a mask is meant
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"HostRows have no {name!r}. {_ADVICE}")

    # used by drivers ------------------------------------------------------------------

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """The arrays that are arguments of a program, and the static parts."""
        return self._parts, (self._source, self._mode, self._asked)

    @classmethod
    def tree_unflatten(cls, aux: Any, parts: tuple[Any, ...]) -> HostRows:
        """Rebuild the object from its parts."""
        self = object.__new__(cls)
        self._source, self._mode, self._asked = aux
        self._parts = tuple(parts)
        return self

    def foreseen(self, known: bool) -> HostRows:
        """The same for a driver that knows the rows in advance, or does not.

        :param known: whether it knows them.
        """
        if self._mode == "callback" and self._asked == "auto" and known:
            parts = self._source.table(np.zeros(0, np.int32))
            return self.tree_unflatten((self._source, "prefetch", "auto"), parts)
        return self

    def with_rows(self, rows: np.ndarray) -> HostRows:
        """The same with these rows in its table, as many as fit.

        :param rows: the numbers of the rows.
        """
        aux = self.tree_flatten()[1]
        return self.tree_unflatten(aux, self._source.table(rows))

    @property
    def in_place(self) -> Array | None:
        """The whole array as a JAX array, if programs read it in place."""
        return self._parts[0] if self._mode == "alias" else None

    def on(self, devices: list[Any], sharding: Any) -> HostRows:
        """The same for a program on several devices; the alias is made on each.

        :param devices: the devices, all of this process.
        :param sharding: the sharding of an array that each device holds completely.
        """
        if self._mode != "alias":
            return self
        parts = [self._source.alias(device) for device in devices]
        whole = jax.make_array_from_single_device_arrays(self.shape, sharding, parts)
        return self.tree_unflatten(self.tree_flatten()[1], (whole,))

    def filled(self, array: Any) -> HostRows:
        """The same with a JAX array in its place, to find what depends on it.

        :param array: the array; it may be traced.
        """
        return self.tree_unflatten((self._source, "alias", "alias"), (array,))

    @property
    def most_ahead(self) -> int:
        """The number of rows that fit into the table."""
        return self._source.capacity

    def _digest_parts(self) -> Iterator[bytes]:
        """The bytes that identify the data, the same as for data in memory."""
        yield from self._source.digest_parts()


def _is_rows(value: Any) -> bool:
    return isinstance(value, HostRows)


def find_rows(arguments: tuple[Any, Any]) -> dict[str, HostRows]:
    """The rows on the host among a model's arguments, by their places.

    :param arguments: the positional ones and the others.
    """
    found = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=_is_rows)[0]
    return {
        ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]): leaf
        for path, leaf in found
        if isinstance(leaf, HostRows)
    }


def map_rows(change: Any, arguments: Any) -> Any:
    """A model's arguments with other rows on the host.

    :param change: a function of a :class:`HostRows`.
    :param arguments: the positional ones and the others.
    """
    return jax.tree.map(
        lambda x: change(x) if isinstance(x, HostRows) else x,
        arguments,
        is_leaf=_is_rows,
    )


@contextmanager
def given_back(arguments: Any, every: float = 0.5) -> Iterator[None]:
    """Release the pages of large files regularly, so that memory does not fill up.

    :param arguments: a model's arguments, the positional ones and the others.
    :param every: the interval, in seconds.
    """
    sources = [x._source for x in find_rows(arguments).values() if x._source.releasable]
    if not sources:
        yield
        return
    done = threading.Event()

    def keep() -> None:
        while not done.wait(every):
            for source in sources:
                source.release()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()


class Source:
    """An array on the host; it equals only itself, because programs call it.

    :param array: the array.
    """

    def __init__(self, array: Any) -> None:
        shape, kind = getattr(array, "shape", None), getattr(array, "dtype", None)
        if shape is None or kind is None or isinstance(array, HostRows | jax.Array):
            raise TypeError(
                "HostRows(array) must be a NumPy array or memory map, or an array of "
                f"h5py or zarr, got {type(array).__name__}. Write for example "
                "HostRows(numpy.load('x.npy', mmap_mode='r'))."
            )
        if np.dtype(kind).kind not in "biufc":
            raise TypeError(f"HostRows(array) must hold numbers, got dtype {kind}.")
        if not len(shape) or shape[0] < 1 or shape[0] >= 2**31:
            raise ValueError(
                f"HostRows(array) must have rows, from 1 to 2 ** 31 - 1 of them along "
                f"its first axis; got shape {tuple(shape)}."
            )
        self.array = array
        self.shape = tuple(map(int, shape))
        self.stored = np.dtype(kind)
        native = self.stored.newbyteorder("=")
        self.dtype = np.dtype(jax.dtypes.canonicalize_dtype(native))
        self.row_bytes = max(1, self.dtype.itemsize * int(np.prod(self.shape[1:])))
        # the key of the rows last requested in a program, and these rows
        self.last: tuple[tuple, Any] = (), None
        self.capacity = int(np.clip(_TABLE_BYTES // self.row_bytes, 1, self.shape[0]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"last": ((), None)}  # it belongs to a program

    # in place -------------------------------------------------------------------------

    def why_no_alias(self) -> str:
        """The reason why a program cannot read the array in place; empty if it can."""
        array = self.array
        if jax.default_backend() != "cpu":
            return f"programs run on {jax.default_backend()} and not on the CPU"
        if not isinstance(array, np.ndarray):
            return f"an array of type {type(array).__name__} has no address in memory"
        if not array.flags.c_contiguous:
            return "the array is not in C order (rows one after the other)"
        if self.stored != self.dtype:
            return f"JAX would convert its {array.dtype} to {self.dtype}"
        if array.ctypes.data % _ALIGNMENT:
            return f"the array does not begin at a multiple of {_ALIGNMENT} bytes"
        try:
            self._alias(array[:1], None)
        except RuntimeError as error:
            return str(error)
        return ""

    def alias(self, device: Any = None) -> Array:
        """The array itself as a JAX array, without a copy.

        :param device: the device; by default the first one.
        """
        return self._alias(self.array, device)

    def _alias(self, array: np.ndarray, device: Any) -> Array:
        # a plain view, because JAX copies subclasses
        view = array.view(np.ndarray)
        found = jax.device_put(view, device, may_alias=True)
        if found.unsafe_buffer_pointer() != array.ctypes.data:
            raise RuntimeError("this version of JAX makes a copy of the array")
        return found

    # fetched --------------------------------------------------------------------------

    def fetch(self, index: Any) -> np.ndarray:
        """The rows with these numbers, in the type that JAX uses.

        :param index: integers, any shape.
        :raises IndexError: there is no such row.
        """
        index = np.asarray(index)
        rows = self._take(index.ravel())
        return rows.reshape(*index.shape, *self.shape[1:])

    def _take(self, index: np.ndarray) -> np.ndarray:
        index = np.where(index < 0, index + self.shape[0], index)
        if index.size and (index.max() >= self.shape[0] or index.min() < 0):
            raise IndexError(
                f"row {index.max()} of HostRows with {self.shape[0]} rows was "
                "requested: the arrays of a plate must have as many rows as the plate."
            )
        if isinstance(self.array, np.ndarray):
            return np.ascontiguousarray(self.array[index], self.dtype)
        # h5py needs increasing numbers without repetition
        unique, inverse = np.unique(index, return_inverse=True)
        if len(unique) and unique[-1] - unique[0] + 1 == len(unique):
            rows = self.array[int(unique[0]) : int(unique[-1]) + 1]
        else:
            rows = getattr(self.array, "oindex", self.array)[unique]
        return np.ascontiguousarray(np.asarray(rows)[inverse], self.dtype)

    def table(self, rows: np.ndarray) -> tuple[Array, Array]:
        """Sorted numbers of rows and the rows, in arrays of fixed shape.

        :param rows: numbers of rows; those beyond the capacity are dropped.
        """
        unique = np.unique(rows)[: self.capacity].astype(np.int32)
        numbers = np.full(self.capacity, _NO_ROW, np.int32)
        numbers[: len(unique)] = unique
        values = np.zeros((self.capacity, *self.shape[1:]), self.dtype)
        if isinstance(self.array, np.ndarray) and len(unique) > _READERS:
            cuts = np.linspace(0, len(unique), _READERS + 1).astype(int)

            def read(left: int, right: int) -> None:
                values[left:right] = self._take(unique[left:right])

            with ThreadPoolExecutor(_READERS) as pool:
                list(pool.map(read, cuts[:-1], cuts[1:]))
        elif len(unique):
            values[: len(unique)] = self._take(unique)
        return jnp.asarray(numbers), jnp.asarray(values)

    # all of it ------------------------------------------------------------------------

    def digest_parts(self) -> Iterator[bytes]:
        """The bytes of the array, piece by piece."""
        yield f"{self.stored}{self.shape}".encode()
        stored = self.stored.itemsize * int(np.prod(self.shape[1:]))
        step = max(1, _CHUNK_BYTES // max(stored, 1))
        for left in range(0, self.shape[0], step):
            piece = np.asarray(self.array[left : left + step])
            yield np.ascontiguousarray(piece).tobytes()
            if self.releasable:
                self.release()

    @property
    def releasable(self) -> bool:
        """Whether it is a large mapped file without changes in memory."""
        array = self.array
        return (
            isinstance(array, np.memmap)
            and array.mode in ("r", "r+")
            and array.nbytes > _LARGE
            and hasattr(mmap, "MADV_DONTNEED")
        )

    def release(self) -> None:
        """Release the pages of a mapped file; needed pages are loaded again."""
        self.array._mmap.madvise(mmap.MADV_DONTNEED)


def _called(source: Source, index: Array) -> Array:
    shape = jax.ShapeDtypeStruct((*index.shape, *source.shape[1:]), source.dtype)
    return jax.pure_callback(source.fetch, shape, index, vmap_method="expand_dims")


def _looked_up(source: Source, index: Array, numbers: Array, rows: Array) -> Array:
    """Rows from a table, or by callback if one is missing."""

    @custom_vmap
    def look(index: Array, numbers: Array, rows: Array) -> Array:
        place = jnp.minimum(jnp.searchsorted(numbers, index), len(numbers) - 1)
        return jax.lax.cond(
            jnp.all(numbers[place] == index),
            lambda: rows[place],
            # in double precision, a table may have been converted
            lambda: _called(source, index).astype(rows.dtype),
        )

    @look.def_vmap
    def rule(size: int, batched: list[bool], *given: Array) -> tuple[Array, bool]:
        # for all chains at once, so that the condition remains a scalar
        index, *table = given
        # a branch with a condition per chain would copy what the chains share
        shared = (x[0] if b else x for x, b in zip(table, batched[1:], strict=True))
        return look(index, *shared), batched[0]

    return look(index, numbers, rows)
