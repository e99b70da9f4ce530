"""Figures that ArviZ does not have, with Matplotlib: Axes in, Axes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from numpyro_minibatch.diagnostics import mean_rates
from numpyro_minibatch.inference_data import get_group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["replica_paths", "swap_rates"]


def replica_paths(idata: Any, *, chain: int = 0, ax: Axes | None = None) -> Axes:
    """Draw on which rung each replica of a ladder was, draw by draw.

    A ladder that works has paths that cross it from end to end, again and again. The
    replica that began at the coldest rung is drawn strongly.

    :param idata: what :func:`to_inference_data` returned after a run of
        :class:`ReplicaExchange`.
    :param chain: which chain.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: the run has no replicas, or no such chain.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import plots
        >>> rung = np.array([[[0, 1], [1, 0], [1, 0]]])  # chain, draw, replica
        >>> stats = xr.Dataset({"rung": (("chain", "draw", "replica"), rung)})
        >>> tree = xr.DataTree.from_dict({"sample_stats": stats})
        >>> len(plots.replica_paths(tree).lines)
        2
    """
    stats = _stats("replica_paths", idata, "rung")
    rung = stats["rung"].transpose("chain", "draw", "replica").values
    if not 0 <= chain < len(rung):
        raise ValueError(
            f"replica_paths(chain={chain!r}): the run has the chains 0 to "
            f"{len(rung) - 1}."
        )
    ax = _axes(ax)
    number = rung.shape[-1]
    for replica in reversed(range(number)):
        first = replica == 0
        ax.plot(
            stats["draw"].values,
            rung[chain, :, replica],
            drawstyle="steps-mid",
            color="#0072B2" if first else "0.75",
            linewidth=1.4 if first else 0.6,
            label="replica that began coldest" if first else None,
        )
    ax.set(
        xlabel="draw",
        ylabel="rung (0 is the coldest)",
        title=f"Paths of {number} replicas, chain {chain}",
        yticks=range(number),
    )
    ax.margins(x=0)
    ax.legend(loc="upper right")
    return ax


def swap_rates(idata: Any, *, ax: Axes | None = None) -> Axes:
    """Draw how often neighbouring rungs of a ladder swap, over the ladder.

    Bars that are alike say that the rungs are where they should be; a low one is a gap
    that replicas do not cross.

    :param idata: what :func:`to_inference_data` returned after a run of
        :class:`ReplicaExchange`.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: the run has no swaps.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import plots
        >>> rate = np.array([[[0.5, np.nan], [np.nan, 0.25]]])  # chain, draw, pair
        >>> heat = np.array([[[1.0, 2.0, 4.0]] * 2])
        >>> stats = xr.Dataset({
        ...     "swap_acceptance_rate": (("chain", "draw", "pair"), rate),
        ...     "temperatures": (("chain", "draw", "ladder"), heat),
        ... })
        >>> tree = xr.DataTree.from_dict({"sample_stats": stats})
        >>> [float(bar.get_height()) for bar in plots.swap_rates(tree).patches]
        [0.5, 0.25]
    """
    stats = _stats("swap_rates", idata, "swap_acceptance_rate")
    rates = mean_rates(stats, "swap_acceptance_rate")
    heat = stats["temperatures"].isel(draw=-1).mean("chain").values
    ax = _axes(ax)
    ax.bar(range(len(rates)), rates, color="#56B4E9", edgecolor="#0072B2")
    names = [
        f"{low:.3g}\n{high:.3g}" for low, high in zip(heat, heat[1:], strict=False)
    ]
    barrier = np.nansum([1.0 - rate for rate in rates])
    ax.set(
        xlabel="temperatures of the pair",
        ylabel="mean acceptance rate of swaps",
        title=f"Swaps along the ladder, barrier {barrier:.2f}",
        ylim=(0.0, 1.0),
    )
    ax.set_xticks(range(len(rates)), names)
    return ax


def _stats(who: str, idata: Any, name: str) -> xr.Dataset:
    stats = get_group(idata, "sample_stats")
    if stats is None or name not in stats or not stats[name].size:
        raise ValueError(
            f"{who}(idata) needs what to_inference_data(mcmc) returned after a run of "
            f"ReplicaExchange with more than one rung; there is no {name!r}."
        )
    return stats


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # an extra, and slow to import
    except ImportError as error:
        raise ImportError(
            "numpyro_minibatch.plots needs Matplotlib. Install it with "
            "`pip install 'numpyro-minibatch[plots]'`."
        ) from error
    return plt.subplots(layout="constrained")[1]
