"""Where are the data? Rows that stay in a file, or in the memory of the host."""

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
_CHUNK_BYTES = 2**26  # of a pass over all rows
_TABLE_BYTES = 2**26  # of rows that are fetched ahead of a chunk
_ALIGNMENT = 64  # what XLA asks of memory that it takes as it is
_LARGE = 2**30  # bytes of a file whose pages are given back while a run goes on
_READERS = 8  # threads: pages that are not in memory are waited for side by side
_NO_ROW = np.iinfo(np.int32).max

_ADVICE = (
    "Inside the model take the rows of a minibatch first, x[idx] with the indices of "
    "the plate or numpyro.subsample(x, event_dim=...), and compute on those; outside "
    "of it use the array itself."
)


@jax.tree_util.register_pytree_node_class
class HostRows:
    """Data that stay where they are, and of which the model sees the rows it asks for.

    Pass it to a kernel's model in the place of an array, with :func:`sample` or with
    NumPyro's ``MCMC``. The model may ask for ``x[idx]`` with the indices of a plate,
    ``numpyro.subsample(x, event_dim=...)``, ``len(x)``, ``x.shape`` and ``x.dtype``;
    everything else, which would need all rows at once, raises. The file must not
    change while it is in use.

    How rows reach the program:

    - ``"alias"`` - the program reads the array where it is, and the operating system
      brings in the pages that it touches. For NumPy arrays and memory maps on the CPU,
      in C order, aligned to 64 bytes and of a type that JAX has (``float64`` only with
      x64). Draws are bit for bit those of data in memory.
    - ``"prefetch"`` - :func:`sample` fetches the rows of a chunk of steps while the
      chunk before runs, for kernels that know their rows ahead. Rows that were not
      foreseen come by callback.
    - ``"callback"`` - the program asks the host for the rows of each step. Works with
      every kernel and array, and takes tenths of a millisecond a step.

    :param array: a NumPy array or memory map, or an array of ``h5py`` or ``zarr``,
        shape ``(N, ...)``.
    :param mode: one of these; by default ``"auto"``, the first of them that works.

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
                f"HostRows(mode='alias'): {why_not}, so a program could only have a "
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

    # what a model may ask for ---------------------------------------------------------

    @property
    def mode(self) -> str:
        """How the rows reach the program."""
        return self._mode

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._source.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the rows as the model gets them."""
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
            self._source.last = (), None  # kept no longer than for the second one
            return found
        if self._mode == "prefetch":
            found = _looked_up(self._source, index, *self._parts)
        else:
            found = _called(self._source, index)
        # not from within a branch or a loop that the numbers come from outside of
        if getattr(found, "_trace", None) is getattr(index, "_trace", self):
            self._source.last = known, found
        return found

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"HostRows are not an array that can be computed on. {_ADVICE}")

    __array__ = __jax_array__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _refuse
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse  # and not False where a mask is meant
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"HostRows have no {name!r}. {_ADVICE}")

    # what drivers ask for -------------------------------------------------------------

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """What of it is an argument of a program, and what is part of the program."""
        return self._parts, (self._source, self._mode, self._asked)

    @classmethod
    def tree_unflatten(cls, aux: Any, parts: tuple[Any, ...]) -> HostRows:
        """Put it together again."""
        self = object.__new__(cls)
        self._source, self._mode, self._asked = aux
        self._parts = tuple(parts)
        return self

    def foreseen(self, known: bool) -> HostRows:
        """The same for a driver that knows the rows ahead, or that does not.

        :param known: whether it does.
        """
        if self._mode == "callback" and self._asked == "auto" and known:
            parts = self._source.table(np.zeros(0, np.int32))
            return self.tree_unflatten((self._source, "prefetch", "auto"), parts)
        return self

    def with_rows(self, rows: np.ndarray) -> HostRows:
        """The same with these rows at hand; as many of them as fit.

        :param rows: the numbers of the rows.
        """
        aux = self.tree_flatten()[1]
        return self.tree_unflatten(aux, self._source.table(rows))

    @property
    def in_place(self) -> Array | None:
        """The whole array as JAX sees it, where a program reads it in place."""
        return self._parts[0] if self._mode == "alias" else None

    def on(self, devices: list[Any], sharding: Any) -> HostRows:
        """The same for a program on several devices; the alias is made on each.

        :param devices: the devices, all of this process.
        :param sharding: how an array that each has a whole copy of is described.
        """
        if self._mode != "alias":
            return self
        parts = [self._source.alias(device) for device in devices]
        whole = jax.make_array_from_single_device_arrays(self.shape, sharding, parts)
        return self.tree_unflatten(self.tree_flatten()[1], (whole,))

    def filled(self, array: Any) -> HostRows:
        """The same with an array of JAX in its place, to see what depends on it.

        :param array: the array; it may be traced.
        """
        return self.tree_unflatten((self._source, "alias", "alias"), (array,))

    @property
    def most_ahead(self) -> int:
        """How many rows can be at hand at once."""
        return self._source.capacity

    def _digest_parts(self) -> Iterator[bytes]:
        """What the data are told by: the same as if they were in memory."""
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
    """Keep the pages of large files from piling up in memory meanwhile.

    :param arguments: a model's arguments, the positional ones and the others.
    :param every: how often, in seconds.
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
    """An array on the host; equal to itself only, as compiled programs call it.

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
        # what the rows last asked for in a program are told by, and the rows
        self.last: tuple[tuple, Any] = (), None
        self.capacity = int(np.clip(_TABLE_BYTES // self.row_bytes, 1, self.shape[0]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"last": ((), None)}  # it belongs to a program

    # in place -------------------------------------------------------------------------

    def why_no_alias(self) -> str:
        """What keeps a program from reading the array where it is; empty if nothing."""
        array = self.array
        if jax.default_backend() != "cpu":
            return f"programs run on {jax.default_backend()} and not on the CPU"
        if not isinstance(array, np.ndarray):
            return f"an array of type {type(array).__name__} has no address in memory"
        if not array.flags.c_contiguous:
            return "the array is not in C order (rows one after the other)"
        if self.stored != self.dtype:
            return f"JAX would make {self.dtype} of its {array.dtype}"
        if array.ctypes.data % _ALIGNMENT:
            return f"the array does not begin at a multiple of {_ALIGNMENT} bytes"
        try:
            self._alias(array[:1], None)
        except RuntimeError as error:
            return str(error)
        return ""

    def alias(self, device: Any = None) -> Array:
        """The array itself as an array of JAX.

        :param device: where; by default the first one.
        """
        return self._alias(self.array, device)

    def _alias(self, array: np.ndarray, device: Any) -> Array:
        # a plain view: of a subclass JAX would make a copy to be sure
        view = array.view(np.ndarray)
        found = jax.device_put(view, device, may_alias=True)
        if found.unsafe_buffer_pointer() != array.ctypes.data:
            raise RuntimeError("this version of JAX makes a copy of the array")
        return found

    # fetched --------------------------------------------------------------------------

    def fetch(self, index: Any) -> np.ndarray:
        """The rows of these numbers, as JAX would have them.

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
                f"row {index.max()} was asked for of HostRows with {self.shape[0]} "
                "rows: the arrays of a plate must have as many rows as the plate."
            )
        if isinstance(self.array, np.ndarray):
            return np.ascontiguousarray(self.array[index], self.dtype)
        # h5py wants increasing numbers, and each of them once
        unique, inverse = np.unique(index, return_inverse=True)
        if len(unique) and unique[-1] - unique[0] + 1 == len(unique):
            rows = self.array[int(unique[0]) : int(unique[-1]) + 1]
        else:
            rows = getattr(self.array, "oindex", self.array)[unique]
        return np.ascontiguousarray(np.asarray(rows)[inverse], self.dtype)

    def table(self, rows: np.ndarray) -> tuple[Array, Array]:
        """Sorted numbers of rows and the rows; of one shape, whatever they are.

        :param rows: numbers of rows; as many are taken as there is place for.
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
        """Whether it is a large file in memory that nobody can have changed there."""
        array = self.array
        return (
            isinstance(array, np.memmap)
            and array.mode in ("r", "r+")
            and array.nbytes > _LARGE
            and hasattr(mmap, "MADV_DONTNEED")
        )

    def release(self) -> None:
        """Give the pages of a mapped file back; what is needed comes in again."""
        self.array._mmap.madvise(mmap.MADV_DONTNEED)


def _called(source: Source, index: Array) -> Array:
    shape = jax.ShapeDtypeStruct((*index.shape, *source.shape[1:]), source.dtype)
    return jax.pure_callback(source.fetch, shape, index, vmap_method="expand_dims")


def _looked_up(source: Source, index: Array, numbers: Array, rows: Array) -> Array:
    """Rows from a table of some of them; if one is missing, by callback."""

    @custom_vmap
    def look(index: Array, numbers: Array, rows: Array) -> Array:
        place = jnp.minimum(jnp.searchsorted(numbers, index), len(numbers) - 1)
        return jax.lax.cond(
            jnp.all(numbers[place] == index),
            lambda: rows[place],
            lambda: _called(source, index),
        )

    @look.def_vmap
    def rule(size: int, batched: list[bool], *given: Array) -> tuple[Array, bool]:
        # of all chains at once, so that the condition stays one number
        index, *table = given
        # a branch that chains take each for itself makes copies of what they share
        shared = (x[0] if b else x for x, b in zip(table, batched[1:], strict=True))
        return look(index, *shared), batched[0]

    return look(index, numbers, rows)
