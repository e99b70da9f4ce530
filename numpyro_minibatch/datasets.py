"""Data sets with many rows: published ones from disk or download, and simulated ones.

A published set is searched for in three places, in this order:

1. the folder ``data_dir``, by default the one that the environment variable
   ``NUMPYRO_MINIBATCH_DATA`` names;
2. the user's cache folder, where an earlier download left it;
3. its publisher. This needs a network and the packages of the extra ``examples``.
"""

from __future__ import annotations

import gzip
import importlib
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import is_prng_key

__all__ = [
    "COVERTYPE_COLUMNS",
    "Images",
    "Truth",
    "load_covertype",
    "load_fashion_mnist",
    "simulate_logistic",
]

#: the environment variable that names a folder with data sets
DATA_VARIABLE = "NUMPYRO_MINIBATCH_DATA"

#: names of the columns that :func:`load_covertype` returns, in their order
COVERTYPE_COLUMNS = (
    "Elevation",
    "Aspect",
    "Slope",
    "Horizontal_Distance_To_Hydrology",
    "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways",
    "Hillshade_9am",
    "Hillshade_Noon",
    "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
)

# Rows of classes 1 to 7, which identify the file whatever its compression.
_COVERTYPE_ROWS = (211840, 283301, 35754, 2747, 9493, 17367, 20510)

# Training and test images.
_FASHION_MNIST_ROWS = (60_000, 10_000)


class _Source(NamedTuple):
    """A published data set: all that is needed to add one.

    :param title: its name in messages.
    :param url: the publisher's address of the file.
    :param parse: reads the publisher's file into named arrays.
    :param stem: file name without suffix. Folders are searched for the parsed
        arrays, ``<stem>.npz``, and for the publisher's own ``<stem><suffix>``.
    :param excerpts: further ``.npz`` files, relative to a folder, that hold all
        requested rows.
    """

    title: str
    url: str
    parse: Callable[[Path], dict[str, np.ndarray]]
    stem: str
    excerpts: tuple[str, ...] = ()

    @property
    def original(self) -> str:
        """The file name that the publisher's file has in a folder."""
        return self.stem + Path(self.url).suffix

    def read(self, folder: Path) -> dict[str, np.ndarray] | None:
        """The arrays, if ``folder`` holds them in any of the known forms."""
        for name in (*self.excerpts, f"{self.stem}.npz"):
            if (folder / name).is_file():
                with np.load(folder / name, allow_pickle=False) as arrays:
                    return dict(arrays)
        if (folder / self.original).is_file():
            return self.parse(folder / self.original)
        return None


def load_covertype(
    classes: Sequence[int] = (2, 3),
    data_dir: str | os.PathLike[str] | None = None,
    *,
    standardize: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Load UCI Covertype: cartographic measurements and the type of forest.

    The default pair of classes, lodgepole and ponderosa pine, is a tall logistic
    regression: 319,055 rows, 11.2 percent of them of class 3, not separable. The
    file is sorted by class, so rows are returned in a shuffled order, always the
    same one.

    :param classes: the classes to keep, distinct numbers from 1 to 7.
    :param data_dir: folder to look in first; by default the one named by the
        environment variable ``NUMPYRO_MINIBATCH_DATA``.
    :param standardize: whether to give each column mean 0 and standard deviation 1
        over the returned rows (the default).
    :returns: ``X``, float32 of shape ``(N, 10)``, the continuous columns named in
        ``COVERTYPE_COLUMNS``; ``y``, int32 of shape ``(N,)``, the position of each
        row's class in ``classes``.
    :raises ValueError: if ``classes`` is not made of distinct numbers from 1 to 7.
    :raises FileNotFoundError: if the file can be neither found nor downloaded;
        the message states what can be done.

    **References:**

    1. Blackard, J. (1998). *Covertype*. UCI Machine Learning Repository.
    """
    wanted = np.asarray(classes)
    if (
        wanted.ndim != 1
        or wanted.size == 0
        or np.unique(wanted).size != wanted.size
        or not np.isin(wanted, np.arange(1, 8)).all()
    ):
        raise ValueError(
            f"classes must be distinct numbers from 1 to 7, got {classes!r}; "
            "write for example classes=(2, 3)"
        )
    # Folders may hold only classes 2 to 4, a tenth of the size of the whole.
    excerpt = "covertype_234/covertype_234.npz"
    source = _Source(
        title="UCI Covertype",
        url="https://archive.ics.uci.edu/static/public/31/covertype.zip",
        parse=_parse_covertype,
        stem="covertype",
        excerpts=(excerpt,) if np.isin(wanted, (2, 3, 4)).all() else (),
    )
    arrays = _load(source, data_dir)
    rows = np.flatnonzero(np.isin(arrays["y"], wanted))
    rows = np.random.default_rng(0).permutation(rows)
    label = arrays["y"][rows]
    y = np.argmax(label[:, None] == wanted, axis=1).astype(np.int32)
    X = arrays["X"][rows].astype(np.float64)
    if standardize:
        X = (X - X.mean(axis=0)) / X.std(axis=0)
    return X.astype(np.float32), y


class Images(NamedTuple):
    """Images with their classes.

    :param X: training images, float32 from 0 to 1, shape ``(N, height, width)``.
    :param y: their classes, int32, shape ``(N,)``.
    :param X_test: test images.
    :param y_test: their classes.
    """

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def load_fashion_mnist(data_dir: str | os.PathLike[str] | None = None) -> Images:
    """Load Fashion-MNIST: 60,000 and 10,000 pictures of clothes, of ten classes.

    The folder ``fashion_mnist`` of ``data_dir`` is searched for the publisher's four
    files, such as ``train-images-idx3-ubyte.gz``.

    :param data_dir: folder to look in first; by default the one named by the
        environment variable ``NUMPYRO_MINIBATCH_DATA``.
    :returns: :class:`Images` of 28 x 28 pixels.
    :raises FileNotFoundError: if a file can be neither found nor downloaded; the
        message states what can be done.

    **References:**

    1. Han Xiao, Kashif Rasul, Roland Vollgraf (2017), *Fashion-MNIST: a novel image
       dataset for benchmarking machine learning algorithms*.
    """

    def read(part: str, *shape: int) -> np.ndarray:
        name = f"{part}-idx{len(shape)}-ubyte"
        source = _Source(
            title=f"Fashion-MNIST ({part})",
            url=f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}.gz",
            parse=lambda path: _parse_idx(path, shape),
            stem=f"fashion_mnist/{name}",
        )
        return _load(source, data_dir)["values"]

    found: list[np.ndarray] = []
    for part, number in zip(("train", "t10k"), _FASHION_MNIST_ROWS, strict=True):
        images = read(f"{part}-images", number, 28, 28)
        found += [
            images.astype(np.float32) / 255.0,
            read(f"{part}-labels", number).astype(np.int32),
        ]
    return Images(*found)


def _parse_idx(path: Path, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Read a compressed idx file of bytes: a header of big-endian sizes, then them."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise OSError(
            f"{path} is not a compressed file ({error}); delete it and download it "
            "again"
        ) from error
    start = 4 + 4 * len(shape)
    header = np.array([0x0800 + len(shape), *shape], ">i4").tobytes()
    if raw[:start] != header or len(raw) != start + math.prod(shape):
        raise OSError(
            f"{path} is not an idx file of {' x '.join(map(str, shape))} bytes; delete "
            "it and download it again"
        )
    return {"values": np.frombuffer(raw, np.uint8, offset=start).reshape(shape)}


class Truth(NamedTuple):
    """The parameters that simulated data were drawn from.

    :param intercept: the log odds of a row of zeros.
    :param coefficients: the change of the log odds per unit of each column, shape
        ``(dim,)``.
    """

    intercept: float
    coefficients: np.ndarray


def simulate_logistic(
    key_or_seed: Array | int, num_rows: int = 1_000_000, dim: int = 10
) -> tuple[np.ndarray, np.ndarray, Truth]:
    """Simulate a logistic regression from a stated truth.

    Columns are independent standard normals. The intercept is -2 and the
    coefficients are evenly spaced from -1 to 1, whatever the seed, so that about
    one row in five has ``y = 1``.

    :param key_or_seed: a JAX random key, old or typed, or an integer seed.
    :param num_rows: number of rows ``N``, by default a million.
    :param dim: number of columns, by default 10.
    :returns: ``X``, float32 of shape ``(num_rows, dim)``; ``y``, int32 of shape
        ``(num_rows,)``; and the :class:`Truth`.
    :raises ValueError: if ``num_rows`` or ``dim`` is not positive.
    :raises TypeError: if ``key_or_seed`` is neither a key nor an integer.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch.datasets import simulate_logistic
        >>> X, y, truth = simulate_logistic(0, num_rows=1000, dim=3)
        >>> X.shape, y.shape
        ((1000, 3), (1000,))
        >>> truth.intercept, truth.coefficients.tolist()
        (-2.0, [-1.0, 0.0, 1.0])
    """
    if num_rows < 1 or dim < 1:
        raise ValueError(
            f"num_rows and dim must be positive, got num_rows={num_rows}, dim={dim}; "
            "write for example simulate_logistic(0, num_rows=1000, dim=3)"
        )
    if isinstance(key_or_seed, int | np.integer):
        key_or_seed = jax.random.key(int(key_or_seed))
    elif not is_prng_key(key_or_seed):
        raise TypeError(
            f"key_or_seed must be one JAX random key or an integer, got {key_or_seed!r}"
            "; write for example simulate_logistic(0)"
        )
    truth = Truth(-2.0, np.linspace(-1.0, 1.0, dim, dtype=np.float32))
    key_x, key_y = jax.random.split(key_or_seed)
    # The dtype is named, so that double precision changes none of the data.
    X = jax.random.normal(key_x, (num_rows, dim), jnp.float32)
    probability = jax.nn.sigmoid(truth.intercept + X @ truth.coefficients)
    y = jax.random.uniform(key_y, (num_rows,), jnp.float32) < probability
    return np.asarray(X), np.asarray(y, np.int32), truth


def _parse_covertype(path: Path) -> dict[str, np.ndarray]:
    """Read the publisher's archive: 10 continuous columns first, the class last."""
    try:
        with (
            zipfile.ZipFile(path) as archive,
            archive.open("covtype.data.gz") as packed,
            gzip.open(packed, "rt") as text,
        ):
            table = np.loadtxt(
                text, dtype=np.int16, delimiter=",", usecols=(*range(10), 54), ndmin=2
            )
        num_rows = tuple(np.bincount(table[:, -1], minlength=8)[1:].tolist())
    except (KeyError, ValueError, zipfile.BadZipFile, gzip.BadGzipFile) as error:
        raise OSError(
            f"{path} is not the Covertype archive of the UCI repository ({error}); "
            "delete it and download it again"
        ) from error
    if num_rows != _COVERTYPE_ROWS:
        raise OSError(
            f"{path} holds {num_rows} rows of classes 1 to 7, but Covertype has "
            f"{_COVERTYPE_ROWS}; delete it and download it again"
        )
    return {"X": table[:, :-1], "y": table[:, -1].astype(np.int8)}


def _load(
    source: _Source, data_dir: str | os.PathLike[str] | None
) -> dict[str, np.ndarray]:
    """The arrays of ``source``, from the first place that has them."""
    named = data_dir or os.environ.get(DATA_VARIABLE)
    cache = _cache_folder()
    folders = [Path(folder) for folder in (named, cache) if folder]
    for folder in folders:
        arrays = source.read(folder)
        if arrays is not None:
            return arrays
    try:
        return _download(source, cache)
    except Exception as error:  # networks fail in many ways; the advice is the same
        searched = ", ".join(map(str, folders)) or "no folder, as none is named"
        raise FileNotFoundError(
            f"{source.title} was not found (searched: {searched}) and not downloaded "
            f"({error}). Do one of three things: set the environment variable "
            f"{DATA_VARIABLE}, or data_dir, to a folder that holds {source.original}, "
            f"as published at {source.url}; or put that file into the cache folder "
            f"{cache or '(needs the package platformdirs)'}; or install "
            "numpyro-minibatch[examples] and connect to the network, and it is "
            "downloaded."
        ) from error


def _download(source: _Source, cache: Path | None) -> dict[str, np.ndarray]:
    """Download, parse, and leave the arrays in the cache for the next time."""
    pooch = _optional("pooch")
    if pooch is None or cache is None:
        raise ImportError(
            "downloading needs the packages pooch and platformdirs: "
            "pip install 'numpyro-minibatch[examples]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = pooch.retrieve(
            source.url,
            known_hash=None,  # `parse` checks what is in the file
            fname=Path(source.original).name,
            path=folder,
            downloader=pooch.HTTPDownloader(timeout=10),
        )
        arrays = source.parse(Path(path))
    place = cache / f"{source.stem}.npz"
    place.parent.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Any] = {**arrays}  # savez's own options are no arrays
    # Written to a temporary folder and then moved, so that an interrupted run, or a
    # second one at the same time, leaves no incomplete file.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        np.savez_compressed(Path(folder) / "arrays.npz", **entries)
        os.replace(Path(folder) / "arrays.npz", place)
    return arrays


def _cache_folder() -> Path | None:
    """The user's cache folder for this package, if platformdirs can name it."""
    platformdirs = _optional("platformdirs")
    if platformdirs is None:
        return None
    return Path(platformdirs.user_cache_dir("numpyro_minibatch", appauthor=False))


def _optional(name: str) -> ModuleType | None:
    """A package that only the extra ``examples`` installs, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
