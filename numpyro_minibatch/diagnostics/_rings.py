"""Energy rings: the jumps of an equi-energy sampler, and their targets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import xarray as xr

from numpyro_minibatch.diagnostics._ladder import mean_rates
from numpyro_minibatch.diagnostics._run import (
    Family,
    Numbers,
    Rule,
    Run,
    by_place,
    rising,
    show,
)
from numpyro_minibatch.diagnostics._setup import Setup
from numpyro_minibatch.inference_data import get_group

if TYPE_CHECKING:
    from numpyro_minibatch.inference_data import InferenceData

__all__ = ["FAMILY", "Rings", "ring_occupancy"]


@dataclass(frozen=True, kw_only=True)
class Rings(Numbers):
    """The jumps of an equi-energy sampler.

    :param jump_rates: the mean acceptance rate of each chain's jumps to states of the
        next hotter chain, from the coldest.
    :param jump_tries: the share of the draws with a jump, accepted or not.
    :param energy_noise: the median noise of each chain's energies, in temperatures.
    :param ring_occupancy: for each chain the share of its draws in each ring, the
        lowest energies first.
    """

    jump_rates: tuple[float, ...]
    jump_tries: tuple[float, ...]
    energy_noise: tuple[float, ...]
    ring_occupancy: tuple[tuple[float, ...], ...]

    @classmethod
    def measure(cls, run: Run) -> Self:
        tries = by_place(run.stats, "jump_acceptance_rate")
        noise = by_place(run.stats, "energy_noise")
        rates = mean_rates(run.stats, "jump_acceptance_rate")
        return cls(
            jump_rates=tuple(np.nan_to_num(rates)),
            jump_tries=(
                () if tries is None else tuple((tries == tries).mean(0).tolist())
            ),
            energy_noise=() if noise is None else tuple(np.median(noise, 0).tolist()),
            ring_occupancy=tuple(map(tuple, _occupancy(run.stats).tolist())),
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        yield (
            "jumps",
            show(
                "accepted {:.2f} at least, {:.2f} on average",
                min(self.jump_rates, default=math.nan),
                sum(self.jump_rates) / max(len(self.jump_rates), 1),
            )
            + show(
                ", energies with noise of up to {:.2g} temperatures",
                max(self.energy_noise, default=math.nan),
            ),
        )
        lowest = [ring[0] for ring in self.ring_occupancy] or [math.nan]
        yield (
            "lowest ring",
            show(
                "{:.0%} of the coldest chain's draws, {:.1%} of the hottest's",
                lowest[0],
                lowest[-1],
            ),
        )


def ring_occupancy(idata: InferenceData) -> xr.DataArray:
    """The share of the draws of each chain of MINTEE in each ring of energies.

    The paper's table 3 [1]. A chain whose draws are in rings that the next hotter chain
    hardly visits cannot jump. The share of the coldest chain in ring ``j`` divided by
    that of the next one measures how old the states are that it jumps to.

    :param idata: the result of :func:`~numpyro_minibatch.to_inference_data` or
        :func:`~numpyro_minibatch.sample` for a run of ``MINTEE``.
    :return: dimensions ``ladder``, the coldest chain first, and ``ring``, the lowest
        energies first; with the coordinates ``temperature`` and ``rows``, those of each
        chain's batch, and ``energy``, the lower end of each ring.
    :raises ValueError: there are no rings.

    **References:**

    1. Dangna Li, Wing H. Wong (2017), *Mini-batch Tempered MCMC*, appendix D.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_minibatch import MINTEE, Target, batch, diagnostics, sample
        >>> target = Target(lambda z: 0.0, lambda z, rows: -0.5 * z**2 + 0.0 * rows, 10)
        >>> kernel = MINTEE(target=target, batch=batch.full(), temperatures=[1.0, 4.0])
        >>> idata = sample(kernel, num_warmup=100, num_samples=100, progress=False,
        ...                init_params=jnp.zeros((1,)))
        >>> table = diagnostics.ring_occupancy(idata)
        >>> table.dims, table.sum("ring").values.tolist()
        (('ladder', 'ring'), [1.0, 1.0])
    """
    stats = get_group(idata, "sample_stats")
    if stats is None or "ring" not in stats:
        raise ValueError(
            "ring_occupancy(idata) needs the rings of draws, which a run of MINTEE "
            "records in sample_stats."
        )
    shares = _occupancy(stats)
    settings = json.loads(stats.attrs.get("settings", "{}"))
    known = {
        "temperature": ("ladder", settings.get("temperatures")),
        "rows": ("ladder", settings.get("rung_batch_sizes")),
        "energy": ("ring", [-math.inf, *settings.get("energies", [])]),
    }
    coords = {
        name: (dim, values)
        for name, (dim, values) in known.items()
        if values is not None and len(values) == len(shares)
    }
    return xr.DataArray(shares, dims=("ladder", "ring"), coords=coords, name="share")


def _occupancy(stats: xr.Dataset) -> np.ndarray:
    """The share of the draws of each chain in each ring."""
    rings = by_place(stats, "ring")
    if rings is None:
        return np.empty((0, 0))
    return (rings[..., None] == np.arange(rings.shape[1])).mean(0)


def _advise_energies(run: Run) -> Iterator[str]:
    """Chains that keep the batch of their state stick at underestimated energies."""
    noise = run.measured(Rings).energy_noise
    noisy = [chain for chain, sd in enumerate(noise) if sd > 1]
    if not noisy:
        return
    worst = max(noisy, key=lambda chain: noise[chain])
    temperatures = run.facts.get("temperatures", ())
    batch_sizes = run.facts.get("rung_batch_sizes", ())
    needed = [t * max(1.0, sd) for t, sd in zip(temperatures, noise, strict=True)]
    (size,) = run.measured(Setup).plates.values()
    sizes = [
        m if sd <= 1 else math.ceil(1 / ((1 / m - 1 / size) / sd**2 + 1 / size))
        for m, sd in zip(batch_sizes, noise, strict=True)
    ]
    # temperatures that are left out follow from the batches, and so does their noise
    kept = [float(f"{t:.6g}") for t in temperatures]
    larger = [min(m, size) for m in rising(sizes[::-1])[::-1]]
    yield (
        f"the energies of {len(noisy)} of {len(noise)} chains have noise of "
        f"more than one temperature, those of chain {worst} of "
        f"{noise[worst]:.2g}: such a chain is stuck at underestimated energies, and "
        f"its rings reflect noise. Write about temperatures={rising(needed)}, or about "
        f"batch_size={larger} with temperatures={kept}."
    )


def _advise_jumps(run: Run) -> Iterator[str]:
    d, jump_prob = run.measured(Rings), run.number("jump_prob")
    if not jump_prob > 0:
        return
    expected = 1 - (1 - jump_prob) ** max(int(run.number("num_steps", 0)), 1)
    more = f"num_replicas={len(d.jump_rates) + 3} for the same range of temperatures"
    for chain, (rate, tries) in enumerate(zip(d.jump_rates, d.jump_tries, strict=True)):
        if tries < 0.5 * expected:
            yield (
                f"chain {chain} tried jumps in {tries:.2g} of its draws instead of "
                f"{expected:.2g}: chain {chain + 1} has hardly visited its energies. "
                f"Write a longer num_warmup, or {more}."
            )
        elif rate < 0.1 and not any(sd > 1 for sd in d.energy_noise):
            yield (
                f"the jumps of chain {chain} are accepted at a rate of {rate:.2g}: "
                "the energies of a ring differ too much for its temperature. Write "
                f"{more}, or a smaller ring_width."
            )


def _advise_rings(run: Run) -> Iterator[str]:
    """Jumps that lead to the same few states, even if they are often accepted."""
    occupancy = run.measured(Rings).ring_occupancy
    stale = [
        (seldom / often, chain, ring, often, seldom)
        for chain, (colder, hotter) in enumerate(pairwise(occupancy))
        for ring, (often, seldom) in enumerate(zip(colder, hotter, strict=True))
        if often > 0.1 and seldom < 0.05 * often
    ]
    if not (run.number("jump_prob") > 0 and stale):
        return
    _, chain, ring, often, seldom = min(stale)
    stored = seldom * run.measured(Setup).num_draws
    yield (
        f"chain {chain} has {often:.0%} of its draws in ring {ring}, where chain "
        f"{chain + 1} has a fraction {seldom:.2g} of its own, about {stored:.0f}: "
        f"chain {chain} jumps to these again and again, and the modes that were found "
        "first keep their weight. Write ring_width=0.01, which puts all energies into "
        "one ring, or "
        f"num_replicas={len(occupancy) + 3} for the same range of temperatures."
    )


FAMILY = Family(
    Rings,
    (
        Rule(
            "the energies of ... chains have noise of more than one temperature",
            "MINTEE's rings reflect noise",
            "larger batches, a hotter ladder",
            _advise_energies,
        ),
        Rule(
            "chain k tried jumps in*, *the jumps of chain k",
            "neighbouring chains have hardly any energies in common",
            "more rungs, a longer warmup",
            _advise_jumps,
        ),
        Rule(
            "chain k has n % of its draws in ring j",
            "it jumps to the few draws of the hotter chain that are stored there",
            "`ring_width=0.01`, one ring of all energies; more rungs",
            _advise_rings,
        ),
    ),
)
