"""Conversion of long data with a group column into one row per group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numpyro_minibatch._internal.checks import check_count, describe

__all__ = ["Groups", "by_group"]


class Groups(NamedTuple):
    """Padded arrays with one row for each group; made by :func:`by_group`.

    :param labels: the value of ``group`` of each row, shape ``(G,)``.
    :param mask: true where a row has an observation, shape ``(G, n)``; ``n`` is the
        size of the largest group.
    :param arrays: the arrays, each of shape ``(G, n) + shape of one entry``. Padded
        entries repeat the first one of their group, so that they are valid data.
    :param positions: the number of each entry in the long data, shape ``(G, n)``.
    """

    labels: np.ndarray
    mask: np.ndarray
    arrays: tuple[np.ndarray, ...]
    positions: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """The number of observations of each group, shape ``(G,)``."""
        return self.mask.sum(1)

    def buckets(self, most: int = 4) -> list[Groups]:
        """Split the groups by size to reduce padding.

        Each bucket is as wide as its largest group. The boundaries minimise the total
        number of entries. The model needs a separate plate for each bucket.

        :param most: the largest number of buckets.
        :return: the buckets, the smallest groups first.
        :raises ValueError: ``most`` is not a positive integer.
        """
        check_count("buckets", "most", most)
        widths, counts = np.unique(self.sizes, return_counts=True)
        k = len(widths)
        total = np.concatenate([[0], np.cumsum(counts)])
        # cost[b][j]: entries of the j smallest group sizes in b buckets
        cost = np.full((most + 1, k + 1), np.inf)
        cost[:, 0] = 0.0
        cut = np.zeros((most + 1, k + 1), int)
        for b in range(1, most + 1):
            for j in range(1, k + 1):
                found = cost[b - 1, :j] + (total[j] - total[:j]) * widths[j - 1]
                cut[b, j] = int(np.argmin(found))
                cost[b, j] = found[cut[b, j]]
        edges, j = [k], k
        for b in range(most, 0, -1):
            j = cut[b, j]
            edges.append(j)
        found = []
        for low, high in zip(sorted(set(edges)), sorted(set(edges))[1:], strict=False):
            rows = np.isin(self.sizes, widths[low:high])
            found.append(self._take(rows, int(widths[high - 1])))
        return found

    def _take(self, rows: np.ndarray, width: int) -> Groups:
        return Groups(
            self.labels[rows],
            self.mask[rows, :width],
            tuple(x[rows, :width] for x in self.arrays),
            self.positions[rows, :width],
        )


def by_group(group: Any, *arrays: Any) -> Groups:
    """Turn long data with a column of groups into one padded row for each group.

    A model with a latent variable for each group then has a plate of groups and a plate
    of the observations within them, and :func:`marginalize` applies::

        groups = by_group(school, X, y)

        def model(X, y, mask):
            ...
            with numpyro.plate("groups", len(y)) as idx:
                a = numpyro.sample("a", dist.Normal(0.0, tau))
                with numpyro.plate("within", y.shape[1]):
                    with numpyro.handlers.mask(mask=mask[idx].T):
                        mean = a + (X[idx] @ beta).T
                        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx].T)

        mcmc.run(key, *groups.arrays, groups.mask)

    :param group: the group of each observation, shape ``(N,)``: integers or names.
    :param arrays: data, each of shape ``(N,) + shape of one entry``.
    :return: the rows, sorted by label; the observations within a group keep their
        order.
    :raises ValueError: ``group`` is not a vector, is empty or has missing values, or an
        array has a different length.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch import by_group
        >>> groups = by_group(["b", "a", "b"], np.array([1.0, 2.0, 3.0]))
        >>> groups.labels.tolist(), groups.arrays[0].tolist()
        (['a', 'b'], [[2.0, 2.0], [1.0, 3.0]])
        >>> groups.mask.tolist()
        [[True, False], [True, True]]
    """
    masked = np.ma.getmaskarray(group) if np.ma.isMaskedArray(group) else False
    names = np.asarray(group)
    if names.ndim != 1 or not len(names):
        raise ValueError(
            "by_group(group, ...) must be a vector with the group of each observation, "
            f"got {describe(names)}."
        )
    if (masked | _missing(names)).any():
        raise ValueError(
            "by_group(group, ...) contains NaN or other missing labels: leave out "
            "these rows."
        )
    data = [np.asarray(x) for x in arrays]
    for k, x in enumerate(data):
        if x.shape[:1] != names.shape:
            raise ValueError(
                f"by_group got {len(names)} groups of observations and array {k} of "
                f"shape {x.shape}: its first axis must have one entry for each."
            )
    labels, which, sizes = np.unique(names, return_inverse=True, return_counts=True)
    order = np.argsort(which, kind="stable")
    starts = np.cumsum(sizes) - sizes
    place = np.arange(sizes.max())
    mask = place < sizes[:, None]
    index = order[starts[:, None] + np.where(mask, place, 0)]
    return Groups(labels, mask, tuple(x[index] for x in data), index)


def _missing(names: np.ndarray) -> np.ndarray:
    """Where labels are missing: ``None``, and those that do not equal themselves."""
    if names.dtype.kind != "O":
        return names != names
    # whether pandas.NA equals itself is pandas.NA
    same = [(x is not None, x == x) for x in names.tolist()]
    return np.array(
        [not (known and isinstance(x, bool | np.bool) and x) for known, x in same]
    )
