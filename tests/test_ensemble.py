"""Ensembles' predictions compared with a few lines of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from scipy.special import softmax

from numpyro_minibatch import ensemble

RNG = np.random.default_rng(0)
MEMBERS, ROWS, INPUTS, CLASSES = 5, 103, 3, 4
X = RNG.normal(size=(ROWS, INPUTS)).astype(np.float32)
Y = RNG.integers(CLASSES, size=ROWS)
DRAWS = {
    "w": RNG.normal(size=(MEMBERS, INPUTS, CLASSES)).astype(np.float32),
    "b": RNG.normal(size=(MEMBERS, CLASSES)).astype(np.float32),
}
PROBABILITIES = softmax(
    np.einsum("ri,mic->mrc", X, DRAWS["w"]) + DRAWS["b"][:, None], -1
)


def logits(draw: Any, rows: Any) -> Any:
    return rows @ draw["w"] + draw["b"]


def test_members_of_a_run() -> None:
    """Sites by name, with the chains concatenated."""
    values = {f"net.{n}": x[:4].reshape(2, 2, *x.shape[1:]) for n, x in DRAWS.items()}
    posterior = xr.Dataset(
        {
            n: (("chain", "draw", *(f"{n}_{i}" for i in range(x.ndim - 2))), x)
            for n, x in values.items()
        },
        attrs={"renamed_sites": '{"net.w": "net/w"}'},
    ).transpose("draw", "chain", ...)
    found = ensemble.members(xr.DataTree.from_dict({"posterior": posterior}))
    assert set(found) == {"net/w", "net.b"}
    np.testing.assert_array_equal(found["net/w"], DRAWS["w"][:4])
    np.testing.assert_array_equal(found["net.b"], DRAWS["b"][:4])
    alone = xr.Dataset({"z": (("chain", "draw"), [[1.0, 2.0]])})
    tree = xr.DataTree.from_dict({"posterior": alone})
    np.testing.assert_array_equal(ensemble.members(tree), [1.0, 2.0])
    with pytest.raises(TypeError, match="or an MCMC that has run, got"):
        ensemble.members({"w": 1})


@pytest.mark.parametrize("chunk_size", [10, 1000])
def test_predictions_are_means_of_probabilities(chunk_size: int) -> None:
    found = ensemble.predict(logits, DRAWS, X, chunk_size=chunk_size)
    np.testing.assert_allclose(found, PROBABILITIES.mean(0), atol=1e-6)
    w = np.array([3.0, 0.0, 1.0, 0.0, 0.0])
    found = ensemble.predict(logits, DRAWS, X, weights=w, chunk_size=chunk_size)
    expected = 0.75 * PROBABILITIES[0] + 0.25 * PROBABILITIES[2]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def naive_calibration_error(p: np.ndarray, y: np.ndarray, bins: int) -> float:
    total = 0.0
    for k in range(bins):
        top = p.max(-1)
        inside = (top >= k / bins) & ((top < (k + 1) / bins) | (k == bins - 1))
        if inside.any():
            right = (p[inside].argmax(-1) == y[inside]).mean()
            total += inside.mean() * abs(right - top[inside].mean())
    return total


def test_scores_of_ever_larger_ensembles() -> None:
    found = ensemble.scores(logits, DRAWS, X, Y, bins=7, chunk_size=40)
    np.testing.assert_array_equal(found.members, [1, 2, 3, 4, 5])
    for k in range(MEMBERS):
        p = PROBABILITIES[: k + 1].mean(0)
        own = p[np.arange(ROWS), Y]
        assert found.nll[k] == pytest.approx(-np.log(own).mean(), rel=1e-5)
        assert found.accuracy[k] == pytest.approx((p.argmax(-1) == Y).mean())
        entropy = -(p * np.log(p)).sum(-1).mean()
        assert found.entropy[k] == pytest.approx(entropy, rel=1e-5)
        expected = naive_calibration_error(p, Y, 7)
        assert found.calibration_error[k] == pytest.approx(expected, rel=1e-4)


def test_calibration_error_of_calibrated_predictions_is_small() -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(3), size=20_000)
    y = (p.cumsum(-1) > rng.random((20_000, 1))).argmax(-1)
    assert ensemble.calibration_error(p, y) < 3 * (15 / 20_000) ** 0.5
    assert ensemble.calibration_error(p, (y + 1) % 3) > 0.2


def test_sure_and_wrong_is_not_infinite() -> None:
    p = np.array([[1.0, 0.0]])
    assert 80 < ensemble.nll(p, [1]) < 100
    assert ensemble.entropy(p)[0] == 0 and ensemble.nll(p, [0]) == 0


def test_distances() -> None:
    found = ensemble.function_distances(logits, DRAWS, X, chunk_size=50)
    for i in range(MEMBERS):
        for j in range(MEMBERS):
            expected = 0.5 * np.abs(PROBABILITIES[i] - PROBABILITIES[j]).sum(-1).mean()
            assert found[i, j] == pytest.approx(expected, abs=1e-6)
    flat = np.concatenate([DRAWS["b"], DRAWS["w"].reshape(MEMBERS, -1)], -1)
    expected = np.sqrt(np.square(flat[:, None] - flat).mean(-1))
    np.testing.assert_allclose(ensemble.weight_distances(DRAWS), expected, atol=1e-6)


def test_losses_of_a_line() -> None:
    first, second = ({"w": DRAWS["w"][i], "b": DRAWS["b"][i]} for i in (0, 1))
    places, found = ensemble.line_losses(
        lambda draw: (draw["w"] ** 2).sum(), first, second, 7
    )
    expected = [np.square((1 - t) * first["w"] + t * second["w"]).sum() for t in places]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert places[0] == 0 and places[-1] == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ensemble.predict(logits, {}, X), "first axis of members"),
        (lambda: ensemble.predict(logits, {"a": X, "b": Y[:9]}, X), "first axes"),
        (lambda: ensemble.predict(logits, DRAWS, X, weights=[1.0]), "5 numbers"),
        (lambda: ensemble.predict(logits, DRAWS, X, weights=[-1.0] * 5), "negative"),
        (lambda: ensemble.predict(logits, DRAWS, X, chunk_size=0), "chunk_size"),
        (lambda: ensemble.calibration_error(PROBABILITIES[0], Y, 0), "bins"),
    ],
)
def test_mistakes(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("score", [ensemble.nll, ensemble.accuracy])
def test_classes_in_a_column_are_refused(score: Any) -> None:
    mean = PROBABILITIES.mean(0)
    with pytest.raises(ValueError, match=r"shape \(103,\), got shape \(103, 1\)"):
        score(mean, Y[:, None])
