"""Predictions of an ensemble of networks, their scores, and distances of members.

A member is a draw of the weights. Members are evaluated one at a time, and rows in
chunks, so that memory holds the predictions of one member for one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.flatten_util import ravel_pytree

from numpyro_minibatch._internal.checks import check_count, describe
from numpyro_minibatch._internal.precision import full_precision
from numpyro_minibatch.inference_data import get_group, samples_of

__all__ = [
    "Scores",
    "accuracy",
    "calibration_error",
    "entropy",
    "function_distances",
    "line_losses",
    "members",
    "nll",
    "predict",
    "scores",
    "weight_distances",
]

_CHUNK = 1000  # rows that are evaluated at once


class Scores(NamedTuple):
    """Scores of the predictions of ensembles of increasing size.

    :param members: the number of members.
    :param nll: mean negative log likelihood, in nats.
    :param accuracy: fraction of the rows whose most probable class is correct.
    :param entropy: mean entropy of the predictions, in nats.
    :param calibration_error: expected calibration error.
    """

    members: np.ndarray
    nll: np.ndarray
    accuracy: np.ndarray
    entropy: np.ndarray
    calibration_error: np.ndarray


def members(run: Any) -> Any:
    """The draws of a run as members of an ensemble, with concatenated chains.

    :param run: what :func:`~numpyro_minibatch.sample` or
        :func:`~numpyro_minibatch.to_inference_data` returned, or a
        ``numpyro.infer.MCMC`` that has run.
    :return: a dict by the model's names for its sites, such as ``"net/Dense_0.bias"``,
        which results may store under other names; the first axis is that of members.
    :raises TypeError: ``run`` is none of these.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import ensemble
        >>> posterior = xr.Dataset(
        ...     {"net.w": (("chain", "draw"), [[1.0, 2.0], [3.0, 4.0]])},
        ...     attrs={"renamed_sites": '{"net.w": "net/w"}'})
        >>> idata = xr.DataTree.from_dict({"posterior": posterior})
        >>> {name: x.tolist() for name, x in ensemble.members(idata).items()}
        {'net/w': [1.0, 2.0, 3.0, 4.0]}
    """
    if hasattr(run, "get_samples"):
        return run.get_samples()
    is_result = isinstance(run, xr.DataTree) or hasattr(run, "groups")
    if not is_result or get_group(run, "posterior") is None:
        raise TypeError(
            "members(run) takes what sample(...) or to_inference_data(mcmc) returned, "
            f"or an MCMC that has run, got {describe(run)}."
        )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples_of(run))


def predict(
    logits: Callable[[Any, Any], Any],
    draws: Any,
    X: Any,
    *,
    weights: Any = None,
    chunk_size: int = _CHUNK,
) -> np.ndarray:
    """The class probabilities, averaged over the members.

    :param logits: ``logits(draw, rows)``, the logits of the classes for some rows of
        ``X``, shape ``(rows, classes)``.
    :param draws: a pytree of arrays with a first axis of members, such as
        ``mcmc.get_samples()``, or :func:`members` of what ``sample`` returned.
    :param X: rows, or a pytree of arrays with a first axis of rows.
    :param weights: weights of the members, for example the values of
        :func:`cycles.draw_weights` in one vector; equal by default.
    :param chunk_size: rows that are evaluated at once.
    :return: shape ``(rows, classes)``.
    :raises ValueError: there are no members, or not as many weights.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import ensemble
        >>> def logits(draw, rows):
        ...     return jnp.stack([rows * draw["slope"], jnp.zeros_like(rows)], -1)
        >>> draws = {"slope": jnp.array([0.0, 100.0])}
        >>> ensemble.predict(logits, draws, jnp.array([-1.0, 1.0])).round(3).tolist()
        [[0.25, 0.75], [0.75, 0.25]]
    """
    number = _members("predict", draws)
    w = np.full(number, 1 / number) if weights is None else np.asarray(weights, float)
    if w.shape != (number,) or not (w >= 0).all() or not w.sum() > 0:
        raise ValueError(
            f"predict(weights=...) must be {number} numbers that are not negative, one "
            f"for each member, got {describe(weights)}."
        )
    total: Any = 0.0
    for member, probabilities in _each(logits, draws, X, chunk_size):
        total = total + w[member] / w.sum() * probabilities
    return np.asarray(total)


def scores(
    logits: Callable[[Any, Any], Any],
    draws: Any,
    X: Any,
    y: Any,
    *,
    bins: int = 15,
    chunk_size: int = _CHUNK,
) -> Scores:
    """Scores of the ensembles of the first one, two, ... members.

    :param logits: ``logits(draw, rows)``, see :func:`predict`.
    :param draws: a pytree of arrays with a first axis of members.
    :param X: rows.
    :param y: their classes, integers.
    :param bins: number of bins of the calibration error.
    :param chunk_size: rows that are evaluated at once.
    :return: arrays with an entry for each number of members; the last is that of all.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import ensemble
        >>> def logits(draw, rows):
        ...     return jnp.stack([rows * draw, jnp.zeros_like(rows)], -1)
        >>> X, y = jnp.array([-1.0, 1.0]), jnp.array([1, 0])
        >>> ensemble.scores(logits, jnp.array([-3.0, 9.0]), X, y).accuracy.tolist()
        [0.0, 1.0]
    """
    total: Any = 0.0
    found = []
    for member, probabilities in _each(logits, draws, X, chunk_size):
        total = total + probabilities
        mean = total / (member + 1)
        found.append(
            (
                member + 1,
                nll(mean, y),
                accuracy(mean, y),
                entropy(mean).mean(),
                calibration_error(mean, y, bins),
            )
        )
    return Scores(*(np.asarray(column) for column in zip(*found, strict=True)))


def nll(probabilities: Any, y: Any) -> float:
    """Mean negative log likelihood of the classes ``y``, in nats.

    :param probabilities: of the classes, ``(rows, classes)``.
    :param y: classes, ``(rows,)``.
    """
    p = np.asarray(probabilities, float)
    own = p[np.arange(len(p)), _classes("nll", y, len(p))]
    # a float32 softmax rounds smaller probabilities to zero
    return float(-np.log(np.maximum(own, np.finfo(np.float32).tiny)).mean())


def accuracy(probabilities: Any, y: Any) -> float:
    """Fraction of the rows whose most probable class is ``y``.

    :param probabilities: of the classes, ``(rows, classes)``.
    :param y: classes, ``(rows,)``.
    """
    likeliest = np.asarray(probabilities).argmax(-1)
    return float((likeliest == _classes("accuracy", y, len(likeliest))).mean())


def _classes(who: str, y: Any, rows: int) -> np.ndarray:
    found = np.asarray(y)
    if found.shape != (rows,):
        raise ValueError(
            f"{who}(y=...) must have one class for each of the {rows} rows, shape "
            f"({rows},), got shape {found.shape}."
        )
    return found


def entropy(probabilities: Any) -> np.ndarray:
    """Entropy of each row's prediction, in nats, from 0 to ``log(classes)``.

    :param probabilities: of the classes, ``(rows, classes)``.
    :return: shape ``(rows,)``.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import ensemble
        >>> ensemble.entropy([[1.0, 0.0], [0.5, 0.5]]).round(3).tolist()
        [0.0, 0.693]
    """
    p = np.asarray(probabilities, float)
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1) + 0.0


def calibration_error(probabilities: Any, y: Any, bins: int = 15) -> float:
    """Expected calibration error [1]: the difference of confidence and accuracy.

    The mean over rows of the difference between the mean confidence and the accuracy in
    the row's bin of confidence. Even for calibrated predictions it is positive on
    average, of about the square root of ``bins`` over the number of rows.

    :param probabilities: of the classes, ``(rows, classes)``.
    :param y: classes, ``(rows,)``.
    :param bins: number of bins, of equal width.

    **References:**

    1. Chuan Guo, Geoff Pleiss, Yu Sun, Kilian Q. Weinberger (2017), *On calibration of
       modern neural networks*, ICML.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import ensemble
        >>> round(ensemble.calibration_error([[0.8, 0.2]] * 2, [0, 1]), 3)
        0.3
    """
    check_count("calibration_error", "bins", bins)
    p = np.asarray(probabilities, float)
    confidence, right = (
        p.max(-1),
        p.argmax(-1) == _classes("calibration_error", y, len(p)),
    )
    # a confidence of one belongs to the last bin
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    sums = [np.bincount(place, x, minlength=bins) for x in (confidence, right)]
    return float(np.abs(sums[0] - sums[1]).sum() / len(p))


def function_distances(
    logits: Callable[[Any, Any], Any], draws: Any, X: Any, *, chunk_size: int = _CHUNK
) -> np.ndarray:
    """Mean total variation distances between the members' predictions.

    For two members, the mean over rows of half the sum of the absolute differences of
    their probabilities: 0 if they predict the same, 1 if they are certain of different
    classes.

    :param logits: ``logits(draw, rows)``, see :func:`predict`.
    :param draws: a pytree of arrays with a first axis of members; few, because the
        predictions of all of them for a chunk are compared.
    :param X: rows.
    :param chunk_size: rows that are evaluated at once.
    :return: shape ``(members, members)``, symmetric with zeros in the diagonal.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import ensemble
        >>> def logits(draw, rows):
        ...     return jnp.stack([rows * draw, jnp.zeros_like(rows)], -1)
        >>> draws = jnp.array([-100.0, 0.0, 100.0])
        >>> ensemble.function_distances(logits, draws, jnp.ones(5)).round(3).tolist()
        [[0.0, 0.5, 1.0], [0.5, 0.0, 0.5], [1.0, 0.5, 0.0]]
    """
    number, rows = _members("function_distances", draws), _rows(X)
    total = np.zeros((number, number))
    for part in _chunks(X, chunk_size):
        p = np.stack(
            [
                np.asarray(_probabilities(logits, _at(draws, i), part))
                for i in range(number)
            ]
        )
        for i in range(number):
            total[i] += 0.5 * np.abs(p - p[i]).sum((1, 2))
    return total / rows


def weight_distances(draws: Any) -> np.ndarray:
    """Distances between members' weights, as root mean squares per weight.

    :param draws: a pytree of arrays with a first axis of members.
    :return: shape ``(members, members)``, symmetric with zeros in the diagonal.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import ensemble
        >>> draws = {"a": jnp.array([0.0, 3.0]), "b": jnp.array([0.0, 4.0])}
        >>> ensemble.weight_distances(draws).round(4).tolist()
        [[0.0, 3.5355], [3.5355, 0.0]]
    """
    number = _members("weight_distances", draws)
    flat = [np.asarray(ravel_pytree(_at(draws, i))[0], float) for i in range(number)]
    found = np.zeros((number, number))
    for i in range(number):
        for j in range(i):
            found[i, j] = found[j, i] = np.sqrt(np.square(flat[i] - flat[j]).mean())
    return found


def line_losses(
    loss: Callable[[Any], Any], first: Any, second: Any, num_points: int = 21
) -> tuple[np.ndarray, np.ndarray]:
    """The loss along the straight line between two members.

    A barrier in between means that they are in different modes of the weights; there
    should be none between two members of one cycle.

    :param loss: from the weights of a member to a number.
    :param first: weights of one member, a pytree.
    :param second: weights of the other.
    :param num_points: points of the line, both ends included.
    :return: the points' places, from 0 to 1, and the losses there.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import ensemble
        >>> places, losses = ensemble.line_losses(
        ...     lambda w: (w**2 - 1) ** 2, jnp.array(-1.0), jnp.array(1.0), 5)
        >>> losses.tolist()
        [0.0, 0.5625, 1.0, 0.5625, 0.0]
    """
    check_count("line_losses", "num_points", num_points)
    places = np.linspace(0.0, 1.0, num_points)

    @full_precision
    @jax.jit
    def at(place: Any) -> Any:
        return loss(jax.tree.map(lambda a, b: a + place * (b - a), first, second))

    return places, np.array([float(at(jnp.asarray(p, float))) for p in places])


@full_precision
@partial(jax.jit, static_argnums=0)  # compiled once for a function of logits
def _probabilities(logits: Callable, draw: Any, rows: Any) -> Any:
    return jax.nn.softmax(logits(draw, rows), axis=-1)


def _members(who: str, draws: Any) -> int:
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(draws)}
    if len(sizes) != 1 or sizes in ({()}, {(0,)}):
        raise ValueError(
            f"{who}(draws) must be arrays with one first axis of members, such as "
            f"mcmc.get_samples(), got first axes {sorted(sizes)}."
        )
    return int(sizes.pop()[0])


def _rows(X: Any) -> int:
    return int(np.shape(jax.tree.leaves(X)[0])[0])


def _at(draws: Any, member: int) -> Any:
    return jax.tree.map(lambda x: x[member], draws)


def _chunks(X: Any, chunk_size: int) -> Any:
    for left in range(0, _rows(X), chunk_size):
        yield jax.tree.map(lambda x, left=left: x[left : left + chunk_size], X)


def _each(logits: Callable, draws: Any, X: Any, chunk_size: int) -> Any:
    """The probabilities of all rows, member by member, in double precision."""
    check_count("predict", "chunk_size", chunk_size)
    for member in range(_members("predict", draws)):
        draw = _at(draws, member)
        parts = [
            np.asarray(_probabilities(logits, draw, part), float)
            for part in _chunks(X, chunk_size)
        ]
        yield member, np.concatenate(parts)
