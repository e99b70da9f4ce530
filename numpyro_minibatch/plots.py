"""Figures that ArviZ does not have, drawn on Matplotlib axes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from numpyro_minibatch.diagnostics import effective_sample_size, mean_rates
from numpyro_minibatch.estimate import Estimate
from numpyro_minibatch.inference_data import get_group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "acceptance_curves",
    "cycles",
    "decision_noise",
    "mode_map",
    "mode_masses",
    "replica_paths",
    "rows_and_samples",
    "swap_rates",
]

_FEW_MODES = 3  # whose legend has room inside of the axes
# the palette of Okabe and Ito, whose colours the colour-blind can distinguish
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")


def replica_paths(idata: Any, *, chain: int = 0, ax: Axes | None = None) -> Axes:
    """Plot the rung of each replica of a ladder, draw by draw.

    In a ladder that works, paths cross it from end to end many times. The replica that
    began at the coldest rung is highlighted.

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
    _check_chain("replica_paths", chain, len(rung))
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
            label="replica that started coldest" if first else None,
        )
    ax.set(
        xlabel="draw",
        ylabel="rung (0: coldest)",
        title=f"Paths of {number} replicas, chain {chain}",
        yticks=range(number),
    )
    ax.margins(x=0)
    ax.set_ylim(-0.4, 1.25 * number - 0.6)  # room for the legend
    ax.legend(loc="upper right")
    return ax


def swap_rates(idata: Any, *, ax: Axes | None = None) -> Axes:
    """Plot the swap rates of neighbouring rungs along a ladder.

    Bars of equal height show that the rungs are well placed; a low bar is a gap that
    replicas hardly cross.

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
        >>> temperatures = np.array([[[1.0, 2.0, 4.0]] * 2])
        >>> stats = xr.Dataset({
        ...     "swap_acceptance_rate": (("chain", "draw", "pair"), rate),
        ...     "temperatures": (("chain", "draw", "ladder"), temperatures),
        ... })
        >>> tree = xr.DataTree.from_dict({"sample_stats": stats})
        >>> [float(bar.get_height()) for bar in plots.swap_rates(tree).patches]
        [0.5, 0.25]
    """
    stats = _stats("swap_rates", idata, "swap_acceptance_rate")
    rates = mean_rates(stats, "swap_acceptance_rate")
    temperatures = stats["temperatures"].isel(draw=-1).mean("chain").values
    ax = _axes(ax)
    ax.bar(range(len(rates)), rates, color="#56B4E9", edgecolor="#0072B2")
    names = [
        f"{low:.3g}\n{high:.3g}"
        for low, high in zip(temperatures, temperatures[1:], strict=False)
    ]
    barrier = np.nansum([1.0 - rate for rate in rates])
    ax.set(
        xlabel="temperatures of the two rungs",
        ylabel="mean swap acceptance rate",
        title=f"Swap rates along the ladder, barrier {barrier:.2f}",
        ylim=(0.0, 1.0),
    )
    ax.set_xticks(range(len(rates)), names)
    return ax


def cycles(idata: Any, *, chain: int = 0, ax: Axes | None = None) -> Axes:
    """Plot the place of each draw on the step-size curve of its cycle.

    Long steps explore and are not collected; draws come from the short steps at the end
    of a cycle. Neighbouring cycles differ in colour and marker. If the schedule is the
    cosine, its curve is drawn, too.

    :param idata: what :func:`to_inference_data` returned after a run of
        :class:`Cyclical`.
    :param chain: which chain.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: the run has no cycles, or no such chain.

    **Example**

    .. doctest::

        >>> import json, numpy as np, xarray as xr
        >>> from numpyro_minibatch import plots
        >>> stats = xr.Dataset({
        ...     "cycle": (("chain", "draw"), np.array([[0, 0, 1, 1]])),
        ...     "step_size": (("chain", "draw"), np.array([[0.02, 0.01, 0.02, 0.01]])),
        ... })
        >>> settings = {"cycle_length": 10, "explore": 0.25, "collect_from": 0.8}
        >>> posterior = xr.Dataset(attrs={"settings": json.dumps(settings)})
        >>> groups = {"posterior": posterior, "sample_stats": stats}
        >>> ax = plots.cycles(xr.DataTree.from_dict(groups))
        >>> [line.get_xdata().tolist() for line in ax.lines]
        [[9.0, 10.0], [19.0, 20.0]]
    """
    stats = _stats("cycles", idata, "cycle", "Cyclical, CyclicalSGLD or CyclicalSGHMC")
    settings = _settings(idata)
    length, since = settings["cycle_length"], settings["collect_from"]
    numbers = _of_chain("cycles", stats["cycle"], chain)
    sizes = _of_chain("cycles", stats["step_size"], chain)
    ax = _axes(ax)
    for cycle in np.unique(numbers):
        own = sizes[numbers == cycle]
        part = since + (1 - since) * np.arange(1, len(own) + 1) / len(own)
        ax.plot(
            (cycle + part) * length,
            own,
            "os"[int(cycle) % 2],
            markersize=4,
            color=_COLOURS[int(cycle) % 2],
            label="draws, alternating cycles" if cycle == numbers.min() else None,
        )
        ax.axvspan(
            cycle * length,
            (cycle + settings["explore"]) * length,
            color="0.92",
            linewidth=0,
            label="exploration" if cycle == numbers.min() else None,
        )
    cosine = re.match(
        r"_CosineRestarts\(.*power=([\d.]+)", settings.get("schedule", "")
    )
    if cosine:
        _draw_cosine(ax, numbers, sizes, length, since, float(cosine[1]))
    ax.set(
        xlabel="step of the chain",
        ylabel="step size",
        title=f"Step sizes of the draws of {len(np.unique(numbers))} cycles",
    )
    ax.margins(x=0.01)
    ax.set_ylim(0, 1.2 * ax.get_ylim()[1])  # room for the legend
    ax.legend(loc="upper right", fontsize="small", ncols=2)
    return ax


def _draw_cosine(
    ax: Axes,
    numbers: np.ndarray,
    sizes: np.ndarray,
    length: float,
    since: float,
    power: float,
) -> None:
    """The curve of the recorded step sizes."""

    def shape(part: Any) -> Any:
        return (0.5 * (np.cos(np.pi * part) + 1)) ** power

    # the first draw of a cycle was made by the step before its place
    count = (numbers == numbers.min()).sum()
    longest = sizes[0] / shape(since + (1 - since) / count - 1 / length)
    part = np.linspace(0, 1, 100, endpoint=False)
    for cycle in np.unique(numbers):
        place = (cycle + part) * length + 1
        ax.plot(place, longest * shape(part), "-", color="0.6", linewidth=1)


def decision_noise(
    idata: Any, *, max_variance: float | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the noise of a run's decisions, and the domain of their acceptance test.

    Decisions to the left of the line were inside the test's domain, where they equal,
    on average, those of a test on all rows. Decisions to the right were outside of it.

    :param idata: what :func:`to_inference_data` returned after a run with decisions on
        minibatches.
    :param max_variance: the largest variance that the test tolerates; by default that
        of the kernel's settings.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: the run has no such decisions.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import plots
        >>> variance = np.array([[0.01, 0.25, 0.25, 4.0]])
        >>> stats = xr.Dataset({"log_ratio_variance": (("chain", "draw"), variance)})
        >>> groups = {"posterior": xr.Dataset(), "sample_stats": stats}
        >>> tree = xr.DataTree.from_dict(groups)
        >>> plots.decision_noise(tree, max_variance=1.0).get_title()
        'Noise of the decisions: 25% outside the domain'
    """
    kernels = "MinibatchMH, MINT or MHMinibatch"
    stats = _stats("decision_noise", idata, "log_ratio_variance", kernels)
    variance = stats["log_ratio_variance"].values.ravel().astype(float)
    noise = np.sqrt(variance[np.isfinite(variance)])
    noise = noise[noise > 0]  # zero where no row was read
    if not noise.size:
        raise ValueError(
            "decision_noise(idata): no decision of this run had noise: all rows were "
            "read."
        )
    limit = _settings(idata).get("max_variance") if max_variance is None else None
    limit = max_variance if limit is None else limit
    ax = _axes(ax)
    edges = np.geomspace(noise.min() * 0.99, noise.max() * 1.01, 50)
    ax.hist(
        noise, edges.tolist(), color=_COLOURS[5], edgecolor=_COLOURS[0], linewidth=0.4
    )
    title = "Noise of the decisions"
    if limit:
        ax.axvline(limit**0.5, color=_COLOURS[1], ls="--", label="limit of the test")
        title += f": {(noise**2 > limit).mean():.0%} outside the domain"
        ax.legend(fontsize="small")
    ax.set(
        xscale="log",
        xlabel="standard deviation of the log ratio (nats)",
        ylabel="number of decisions",
        title=title,
    )
    return ax


def rows_and_samples(
    runs: Mapping[str, Any],
    *,
    var_name: str | None = None,
    number: int = 12,
    ax: Axes | None = None,
) -> Axes:
    """Plot effective samples against rows of data read, for one run or several.

    Each line begins with a tenth of the draws of a run and ends with all of them. A
    line of slope one means that the run mixes as well at its end as at its beginning;
    the distance between lines compares the kernels per row read. Warmup and set-up are
    not counted.

    :param runs: results of :func:`to_inference_data`, with a label for each. For a run
        without ``num_rows``, such as one of NUTS, the rows are counted by leapfrog
        steps if it has ``n_steps`` and an observed value with the number of rows.
    :param var_name: the parameter; by default the entry with the fewest effective
        samples in each run.
    :param number: points of a line.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: the number of rows that a run read is not known.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import plots
        >>> draws = np.random.default_rng(0).normal(size=(4, 500))
        >>> groups = {
        ...     "posterior": xr.Dataset({"mu": (("chain", "draw"), draws)}),
        ...     "sample_stats": xr.Dataset(
        ...         {"num_rows": (("chain", "draw"), np.full((4, 500), 100))}
        ...     ),
        ... }
        >>> tree = xr.DataTree.from_dict(groups)
        >>> ax = plots.rows_and_samples({"ours": tree})
        >>> float(ax.lines[0].get_xdata()[-1])  # four chains, 500 draws, 100 rows
        200000.0
    """
    ax = _axes(ax)
    for place, (label, idata) in enumerate(runs.items()):
        rows = _rows_read(label, idata)
        columns = _columns(idata, var_name)
        first = max(min(20, rows.shape[1]), rows.shape[1] // 10)
        ends = np.unique(np.geomspace(first, rows.shape[1], number).astype(int))
        found = [
            min(effective_sample_size(column[:, :end]) for column in columns)
            for end in ends
        ]
        ax.plot(
            rows.cumsum(1)[:, ends - 1].sum(0),
            found,
            _STYLES[place % len(_STYLES)],
            marker="osD^v"[place % 5],
            markersize=4,
            color=_COLOURS[place % len(_COLOURS)],
            label=label,
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="rows read (all chains)",
        ylabel="effective sample size of the mean",
        title=f"Effective sample size of {var_name or 'the slowest parameter'}",
    )
    ax.legend(fontsize="small")
    return ax


def _rows_read(label: str, idata: Any) -> np.ndarray:
    """The number of rows that each draw read, ``(chain, draw)``."""
    stats = get_group(idata, "sample_stats")
    if stats is not None and "num_rows" in stats:
        return stats["num_rows"].transpose("chain", "draw").values.astype(float)
    observed = get_group(idata, "observed_data")
    if stats is not None and "n_steps" in stats and observed is not None:
        size = max(v.sizes[v.dims[0]] for v in observed.values() if v.dims)
        return size * stats["n_steps"].transpose("chain", "draw").values.astype(float)
    raise ValueError(
        f"rows_and_samples: the number of rows that run {label!r} read is not known: "
        "it has neither 'num_rows' nor 'n_steps' with observed data. Run it with "
        "extra_fields=('num_steps',) if it is NUTS or HMC."
    )


def _columns(idata: Any, var_name: str | None) -> list[np.ndarray]:
    """The entries of parameters, each ``(chain, draw)``."""
    posterior: Any = get_group(idata, "posterior")
    names = list(posterior.data_vars) if var_name is None else [var_name]
    columns: list[np.ndarray] = []
    for name in names:
        values = posterior[name].transpose("chain", "draw", ...).values
        columns += list(np.moveaxis(values.reshape(*values.shape[:2], -1), -1, 0))
    return columns


def acceptance_curves(
    tests: Mapping[str, Any],
    *,
    sd: float = 1.0,
    balance: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Plot the acceptance probabilities of tests for a log ratio with normal noise.

    :param tests: acceptance tests (``accept.*``, or your own), with a label for each.
    :param sd: standard deviation of the noise, in nats.
    :param balance: draw the error of detailed balance instead: the log of ``A(delta) /
        A(-delta)``, averaged over the noise, minus ``delta``, which should be 0. Below
        0 the test flattens the target.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: ``sd`` is negative.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import accept, plots
        >>> tests = {"ignored": accept.metropolis(), "corrected": accept.penalty()}
        >>> ax = plots.acceptance_curves(tests, balance=True)
        >>> bool(ax.lines[0].get_ydata()[-1] < -0.4)  # at delta = 3
        True
        >>> bool(abs(ax.lines[1].get_ydata()).max() < 0.01)
        True
    """
    if not sd >= 0:
        raise ValueError(
            f"acceptance_curves(sd={sd!r}): the standard deviation of the noise must "
            "be at least 0."
        )
    ax = _axes(ax)
    delta = np.linspace(0 if balance else -6, 3 if balance else 4, 81)
    for place, (label, test) in enumerate(tests.items()):
        curve = _averaged(test, delta, sd)
        if balance:
            curve = np.log(curve / _averaged(test, -delta, sd)) - delta
        ax.plot(
            delta,
            curve,
            _STYLES[place % len(_STYLES)],
            color=_COLOURS[place % len(_COLOURS)],
            label=label,
        )
    ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    ax.set(
        xlabel="true log ratio, delta (nats)",
        ylabel="log A(delta) / A(-delta) - delta"
        if balance
        else "acceptance probability A(delta)",
        title=f"Acceptance tests with noise of sd {sd:g}",
    )
    ax.legend(fontsize="small")
    return ax


def _averaged(test: Any, delta: np.ndarray, sd: float) -> np.ndarray:
    """The probability of acceptance, averaged over the noise."""
    # probabilities have kinks and steps: use a fine rule, not Gaussian quadrature
    nodes = np.linspace(-7, 7, 1401)
    weights = np.exp(-(nodes**2) / 2)
    values = delta[:, None] + sd * nodes
    noisy = Estimate(values.astype(np.float32), np.float32(sd**2))
    return np.asarray(test.probability(noisy), float) @ (weights / weights.sum())


def mode_map(
    idata: Any,
    var_names: str | tuple[str, str],
    *,
    centers: Any = None,
    masses: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the draws in the plane, with the fraction of them at each of some modes.

    :param idata: what :func:`to_inference_data` returned.
    :param var_names: one parameter with two entries, or two parameters.
    :param centers: positions of modes, shape ``(modes, 2)``. Each draw counts for the
        nearest one, and its fraction of the draws is written next to it.
    :param masses: the true fractions, one for each center.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: the parameters do not have two entries together, or there is not
        one mass for each center.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import plots
        >>> z = np.array([[[0.0, 0.1], [0.1, 0.0], [4.0, 4.1], [0.0, 0.0]]])
        >>> posterior = xr.Dataset({"z": (("chain", "draw", "axis"), z)})
        >>> tree = xr.DataTree.from_dict({"posterior": posterior})
        >>> ax = plots.mode_map(tree, "z", centers=[[0, 0], [4, 4]])
        >>> [text.get_text() for text in ax.texts]
        ['75.0%', '25.0%']
    """
    names = [var_names] if isinstance(var_names, str) else list(var_names)
    columns = [c for name in names for c in _columns(idata, name)]
    if len(columns) != 2:
        raise ValueError(
            f"mode_map(var_names={var_names!r}): these have {len(columns)} numbers per "
            "draw, but a plane has two: name one parameter with two entries, or two "
            "parameters."
        )
    z = np.stack([column.ravel() for column in columns], -1)
    ax = _axes(ax)
    bins = ax.hexbin(*z.T, gridsize=60, bins="log", mincnt=1, cmap="cividis")
    ax.figure.colorbar(bins, ax=ax, label="draws")
    labels = [f"{names[0]}[{i}]" for i in (0, 1)] if len(names) == 1 else names
    ax.set(xlabel=labels[0], ylabel=labels[1], title=f"{len(z):,} draws")
    if centers is not None:
        _draw_shares(ax, z, np.asarray(centers, float), masses)
    return ax


def mode_masses(idata: Any, *, ax: Axes | None = None) -> Axes:
    """Plot how the masses of modes converge, with their Monte Carlo errors.

    Each line is the share of the draws so far in one mode, over all chains, with a band
    of two Monte Carlo standard errors. Thin lines are the shares of single chains: if
    they stay apart from each other, chains hardly move between modes. A dashed line is
    the mass by the Laplace approximation, if the set-up of a control variate recorded
    it.

    :param idata: what :func:`to_inference_data` returned after a run with several
        modes, ``control_variate.taylor2(modes=8)``; in a ladder, the coldest rung is
        drawn.
    :param ax: where to draw; by default new axes.
    :return: the axes.
    :raises ValueError: the run has no modes.

    **Example**

    .. doctest::

        >>> import numpy as np, xarray as xr
        >>> from numpyro_minibatch import plots
        >>> mode = np.random.default_rng(0).integers(0, 2, (4, 500))
        >>> stats = xr.Dataset({"mode": (("chain", "draw"), mode)})
        >>> groups = {"posterior": xr.Dataset(), "sample_stats": stats}
        >>> ax = plots.mode_masses(xr.DataTree.from_dict(groups))
        >>> [text.get_text()[:6] for text in ax.get_legend().get_texts()]
        ['mode 0', 'mode 1']
    """
    kernels = "MinibatchMH with control_variate.taylor2(modes=...) that found modes"
    stats = _stats("mode_masses", idata, "mode", kernels)
    mode = stats["mode"].transpose("chain", "draw").values
    laplace = _pilot(idata).get("mode_masses", ())
    number = max(int(mode.max()) + 1, len(laplace))
    draws = mode.shape[1]
    inside = (mode[..., None] == np.arange(number)).astype(float)
    so_far = inside.cumsum(1) / np.arange(1, draws + 1)[:, None]
    first = max(min(20, draws), draws // 50)
    ends = np.unique(np.geomspace(first, draws, 60).astype(int))
    known = np.unique(np.geomspace(first, draws, 12).astype(int))
    errors = np.stack([_error_of_masses(inside[:, :end]) for end in known])
    ax = _axes(ax)
    for k in range(number):
        colour = _COLOURS[k % len(_COLOURS)]
        style = _STYLES[k // len(_COLOURS) % len(_STYLES)]
        whole = so_far[:, ends - 1, k].mean(0)
        ax.plot(ends, so_far[:, ends - 1, k].T, style, color=colour, lw=0.5, alpha=0.35)
        error = np.interp(ends, known, np.nan_to_num(errors[:, k]))
        ax.fill_between(
            ends,
            whole - 2 * error,
            whole + 2 * error,
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
        text = f"mode {k}: {whole[-1]:.3f} ± {errors[-1, k]:.2g}"
        ax.plot(ends, whole, style, color=colour, linewidth=1.6, label=text)
        if k < len(laplace):
            ax.axhline(laplace[k], color=colour, linestyle="--", linewidth=0.8)
    ax.set(
        xscale="log",
        xlabel="draws of each chain",
        ylabel="share of the draws",
        title=f"Masses of {number} modes, {len(mode)} chains"
        + (" (dashed: Laplace)" if len(laplace) else ""),
    )
    ax.margins(x=0)
    low, high = (fn(so_far[:, -1]) for fn in (np.min, np.max))
    room = max(0.05, 1.5 * (high - low), 8 * float(np.nanmax(errors[-1], initial=0)))
    ax.set_ylim(max(0.0, low - room), min(1.0, high + room))
    if number <= _FEW_MODES:
        ax.legend(fontsize="small")
    else:  # beside the axes, because it would hide lines
        ax.legend(
            fontsize="small",
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
        )
    return ax


def _error_of_masses(inside: np.ndarray) -> np.ndarray:
    """Standard errors of the means of ``(chain, draw, mode)`` indicators."""
    mass = inside.mean((0, 1))
    return np.sqrt(mass * (1 - mass) / effective_sample_size(inside))


def _pilot(idata: Any) -> Mapping[str, Any]:
    """The recorded results of the set-up of a control variate."""
    posterior = get_group(idata, "posterior")
    attrs = {} if posterior is None else posterior.attrs
    return json.loads(attrs.get("facts", "{}")).get("pilot", {})


def _draw_shares(ax: Axes, z: np.ndarray, centers: np.ndarray, masses: Any) -> None:
    if masses is not None and len(masses) != len(centers):
        raise ValueError(
            f"mode_map(masses=...) has {len(masses)} numbers for {len(centers)} "
            "centers. Give one for each."
        )
    nearest = np.square(z[:, None] - centers).sum(-1).argmin(-1)
    shares = np.bincount(nearest, minlength=len(centers)) / len(z)
    ax.plot(*centers.T, "+", color=_COLOURS[1], markersize=8)
    for k, (center, share) in enumerate(zip(centers, shares, strict=True)):
        should = "" if masses is None else f"\n({masses[k]:.1%})"
        ax.annotate(
            f"{share:.1%}{should}",
            center,
            xytext=(5, 5),
            textcoords="offset points",
            fontsize="x-small",
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1},
        )
    seen = int((shares > 0).sum())
    title = f"{len(z):,} draws in {seen} of {len(centers)} modes"
    if masses is not None:
        away = 0.5 * np.abs(shares - np.asarray(masses, float)).sum()
        title += f", total variation {away:.3f}"
    ax.set_title(title)


def _settings(idata: Any) -> dict[str, Any]:
    posterior = get_group(idata, "posterior")
    attrs = {} if posterior is None else posterior.attrs
    return json.loads(attrs.get("settings", "{}"))


def _of_chain(who: str, values: xr.DataArray, chain: int) -> np.ndarray:
    array = values.transpose("chain", "draw").values
    _check_chain(who, chain, len(array))
    return array[chain]


def _check_chain(who: str, chain: int, number: int) -> None:
    if not 0 <= chain < number:
        raise ValueError(
            f"{who}(chain={chain!r}): the run has the chains 0 to {number - 1}."
        )


def _stats(
    who: str,
    idata: Any,
    name: str,
    kernels: str = "ReplicaExchange with more than one rung",
) -> xr.Dataset:
    stats = get_group(idata, "sample_stats")
    if stats is None or name not in stats or not stats[name].size:
        raise ValueError(
            f"{who}(idata) needs what to_inference_data(mcmc) returned after a run of "
            f"{kernels}; there is no {name!r}."
        )
    return stats


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # optional, and slow to import
    except ImportError as error:
        raise ImportError(
            "numpyro_minibatch.plots needs Matplotlib. Install it with "
            "`pip install 'numpyro-minibatch[plots]'`."
        ) from error
    return plt.subplots(layout="constrained")[1]
