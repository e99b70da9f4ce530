"""The loaders, on files that the tests write; no network and no real data set."""

from __future__ import annotations

import gzip
import io
import sys
import types
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from numpyro_minibatch import datasets

# A thousandth of the real file, so that a test writes it quickly.
SMALL_ROWS = tuple(round(n / 1000) for n in datasets._COVERTYPE_ROWS)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide every real folder and the network; the cache is a folder of the test."""
    cache = tmp_path / "cache"
    monkeypatch.delenv(datasets.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(datasets, "_cache_folder", lambda: cache)
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.setattr(datasets, "_COVERTYPE_ROWS", SMALL_ROWS)
    return cache


def covertype_table() -> np.ndarray:
    """Rows in the publisher's layout: 10 numbers, 44 indicators, the class."""
    y = np.repeat(np.arange(1, 8), SMALL_ROWS)
    table = np.zeros((y.size, 55), np.int16)
    table[:, :10] = np.random.default_rng(1).integers(-100, 4000, (y.size, 10))
    table[:, 0] = 10 * y + table[:, 0] % 10  # the first column determines the class
    table[:, -1] = y
    return table


def write_archive(folder: Path, table: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = io.BytesIO()
    np.savetxt(text, table, fmt="%d", delimiter=",")
    with zipfile.ZipFile(folder / "covertype.zip", "w") as archive:
        archive.writestr("covtype.data.gz", gzip.compress(text.getvalue()))
    return folder / "covertype.zip"


def write_arrays(path: Path, table: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, X=table[:, :10], y=table[:, -1].astype(np.int8))
    return path


def offer_download(monkeypatch: pytest.MonkeyPatch, table: np.ndarray) -> list[str]:
    """Put a stand-in for pooch in place; returns the list of addresses it served."""
    served: list[str] = []

    def retrieve(url: str, *, path: str, fname: str, **_: object) -> str:
        served.append(url)
        assert fname == "covertype.zip"
        return str(write_archive(Path(path), table))

    pooch = types.ModuleType("pooch")
    pooch.retrieve = retrieve  # type: ignore[attr-defined]
    pooch.HTTPDownloader = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pooch", pooch)
    return served


def test_default_classes(tmp_path: Path) -> None:
    table = covertype_table()
    write_archive(tmp_path, table)
    X, y = datasets.load_covertype(data_dir=tmp_path)
    assert X.shape == (SMALL_ROWS[1] + SMALL_ROWS[2], 10)
    assert X.dtype == np.float32 and y.dtype == np.int32
    np.testing.assert_array_equal(np.bincount(y), SMALL_ROWS[1:3])
    np.testing.assert_allclose(X.mean(axis=0, dtype=float), 0.0, atol=1e-6)
    np.testing.assert_allclose(X.std(axis=0, dtype=float), 1.0, rtol=1e-6)


@pytest.mark.parametrize("classes", [(2, 3), (3, 2), (7, 1, 4)])
def test_labels_stay_with_their_rows(tmp_path: Path, classes: tuple[int, ...]) -> None:
    table = covertype_table()
    write_archive(tmp_path, table)
    X, y = datasets.load_covertype(classes, tmp_path, standardize=False)
    np.testing.assert_array_equal(X[:, 0] // 10, np.asarray(classes)[y])
    kept = table[np.isin(table[:, -1], classes), :10]
    order = np.lexsort(X.T), np.lexsort(kept.T)
    np.testing.assert_array_equal(X[order[0]], kept[order[1]])


def test_rows_are_shuffled_the_same_way_each_time(tmp_path: Path) -> None:
    write_archive(tmp_path, covertype_table())
    X, y = datasets.load_covertype(data_dir=tmp_path)
    again, _ = datasets.load_covertype(data_dir=tmp_path)
    np.testing.assert_array_equal(X, again)
    # Sorted labels change once; shuffled ones about 2 N p (1 - p) = 63 times.
    assert np.count_nonzero(np.diff(y)) > 30


def test_the_named_folder_comes_first(
    tmp_path: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = covertype_table()
    for number, path in enumerate(
        [
            tmp_path / "argument" / "covertype.npz",
            tmp_path / "variable" / "covertype_234" / "covertype_234.npz",
            nowhere / "covertype.npz",
        ]
    ):
        table[:, 1] = number
        write_arrays(path, table)
    served = offer_download(monkeypatch, table)

    def place(**options: Path) -> float:
        return float(datasets.load_covertype(standardize=False, **options)[0][0, 1])

    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path / "variable"))
    assert place(data_dir=tmp_path / "argument") == 0
    assert place() == 1
    # The excerpt of classes 2 to 4 is skipped if it cannot contain the answer.
    X, _ = datasets.load_covertype((1, 2), standardize=False)
    assert X[0, 1] == 2
    monkeypatch.delenv(datasets.DATA_VARIABLE)
    assert place() == 2
    assert served == []


def test_a_download_is_kept(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = offer_download(monkeypatch, covertype_table())
    X, y = datasets.load_covertype()
    assert len(served) == 1 and served[0].startswith("https://")
    assert [path.name for path in nowhere.iterdir()] == ["covertype.npz"]
    kept_X, kept_y = datasets.load_covertype()
    assert len(served) == 1
    np.testing.assert_array_equal(X, kept_X)
    np.testing.assert_array_equal(y, kept_y)


def test_the_error_names_three_ways(tmp_path: Path, nowhere: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        datasets.load_covertype(data_dir=tmp_path)
    message = str(caught.value)
    for part in (
        str(tmp_path),
        datasets.DATA_VARIABLE,
        str(nowhere),
        "covertype.zip",
        "https://",
        "numpyro-minibatch[examples]",
    ):
        assert part in message


def test_a_failed_download_leaves_nothing(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_download(monkeypatch, covertype_table()[:-1])
    with pytest.raises(FileNotFoundError, match="download it again"):
        datasets.load_covertype()
    assert not nowhere.exists()


@pytest.mark.parametrize("damage", ["not a zip", "wrong member", "a row is missing"])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: str) -> None:
    path = write_archive(tmp_path, covertype_table()[:-1])
    if damage == "not a zip":
        path.write_bytes(b"<html>")
    elif damage == "wrong member":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("covtype.info", "")
    with pytest.raises(OSError, match="download it again"):
        datasets.load_covertype(data_dir=tmp_path)


@pytest.mark.parametrize("classes", [(), (2, 2), (0, 1), (2, 8), 2, "23"])
def test_impossible_classes(classes: object) -> None:
    with pytest.raises(ValueError, match=r"classes must be .*classes=\(2, 3\)"):
        datasets.load_covertype(classes)  # type: ignore[arg-type]


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the stand-ins of `nowhere`
    pytest.importorskip("platformdirs", reason="names the user's cache folder")
    folder = datasets._cache_folder()
    assert folder is not None and folder.is_absolute()
    assert "numpyro_minibatch" in folder.parts
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert datasets._cache_folder() is None


def test_simulated_rows_follow_the_stated_truth() -> None:
    X, y, truth = datasets.simulate_logistic(7, num_rows=200_000, dim=4)
    assert X.dtype == np.float32 and y.dtype == np.int32
    # The score of a logistic regression at the truth has mean 0 and the Fisher
    # information as its covariance; its whitened square is chi-squared.
    design = np.column_stack([np.ones(len(X)), X.astype(np.float64)])

    def score(coefficients: np.ndarray) -> float:
        p = 1.0 / (1.0 + np.exp(-design @ np.append(truth.intercept, coefficients)))
        gradient = design.T @ (y - p)
        information = (design * (p * (1.0 - p))[:, None]).T @ design
        return float(gradient @ np.linalg.solve(information, gradient))

    # 5 degrees of freedom; 41 is exceeded with probability 1e-7. The wrong truth
    # is 15 standard errors away, which adds about 15 ** 2.
    assert score(truth.coefficients) < 41
    assert score(truth.coefficients + np.array([0.1, 0, 0, 0])) > 41


def test_simulation_is_a_function_of_its_key() -> None:
    X, y, _ = datasets.simulate_logistic(3, num_rows=100, dim=2)
    for key in (jax.random.key(3), jax.random.PRNGKey(3), np.int64(3)):
        again, labels, _ = datasets.simulate_logistic(key, num_rows=100, dim=2)  # type: ignore[arg-type]
        np.testing.assert_array_equal(X, again)
        np.testing.assert_array_equal(y, labels)
    other, _, _ = datasets.simulate_logistic(4, num_rows=100, dim=2)
    assert not np.array_equal(X, other)


@pytest.mark.parametrize("size", [{"num_rows": 0}, {"dim": -1}])
def test_impossible_sizes(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        datasets.simulate_logistic(0, **size)


def test_not_a_key() -> None:
    with pytest.raises(TypeError, match="one JAX random key or an integer"):
        datasets.simulate_logistic(0.5)  # type: ignore[arg-type]


def write_fashion_mnist(folder: Path) -> dict[str, np.ndarray]:
    """The publisher's four files, of five and three images."""
    rng = np.random.default_rng(0)
    found = {}
    (folder / "fashion_mnist").mkdir(parents=True)
    for part, number in (("train", 5), ("t10k", 3)):
        for what, shape in (("images", (number, 28, 28)), ("labels", (number,))):
            values = rng.integers(0, 256 if what == "images" else 10, shape, np.uint8)
            header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
            name = f"{part}-{what}-idx{len(shape)}-ubyte.gz"
            path = folder / "fashion_mnist" / name
            path.write_bytes(gzip.compress(header + values.tobytes()))
            found[f"{part}-{what}"] = values
    return found


def test_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_FASHION_MNIST_ROWS", (5, 3))
    values = write_fashion_mnist(tmp_path)
    X, y, X_test, y_test = datasets.load_fashion_mnist(tmp_path)
    assert X.dtype == np.float32 and y.dtype == np.int32
    np.testing.assert_allclose(255 * X, values["train-images"], rtol=1e-6)
    np.testing.assert_array_equal(y, values["train-labels"])
    np.testing.assert_allclose(255 * X_test, values["t10k-images"], rtol=1e-6)
    np.testing.assert_array_equal(y_test, values["t10k-labels"])


def test_fashion_mnist_is_downloaded_once(
    tmp_path: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "_FASHION_MNIST_ROWS", (5, 3))
    write_fashion_mnist(tmp_path)
    served: list[str] = []

    def retrieve(url: str, *, path: str, fname: str, **_: object) -> str:
        served.append(fname)
        assert url.endswith(fname)
        return str(tmp_path / "fashion_mnist" / fname)

    pooch = types.ModuleType("pooch")
    pooch.retrieve = retrieve  # type: ignore[attr-defined]
    pooch.HTTPDownloader = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pooch", pooch)
    first = datasets.load_fashion_mnist()
    again = datasets.load_fashion_mnist()
    assert len(served) == 4 and len(list((nowhere / "fashion_mnist").iterdir())) == 4
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("damage", ["not compressed", "cut short", "of another size"])
def test_a_damaged_idx_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(datasets, "_FASHION_MNIST_ROWS", (5, 3))
    write_fashion_mnist(tmp_path)
    path = tmp_path / "fashion_mnist" / "train-images-idx3-ubyte.gz"
    if damage == "not compressed":
        path.write_bytes(b"<html>")
    elif damage == "cut short":
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    else:
        monkeypatch.setattr(datasets, "_FASHION_MNIST_ROWS", (6, 3))
    with pytest.raises(OSError, match="download it again"):
        datasets.load_fashion_mnist(tmp_path)
