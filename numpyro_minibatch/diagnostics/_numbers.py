"""What a diagnosis of a run consists of, and how it is printed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Diagnosis"]


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`~numpyro_minibatch.diagnose` found; ``print`` it.

    A number that the run did not record, or that has no meaning for it, is NaN.

    :param kernel: the name of the kernel.
    :param target: what was sampled, such as ``prior * likelihood ** (1 / 100)``.
    :param temperature: the temperature of the likelihood.
    :param plates: the number of rows of each data plate.
    :param batch_sizes: the rows of one draw of each data plate.
    :param num_chains: the chains.
    :param num_draws: the draws of each chain.
    :param acceptance_rate: the mean acceptance rate.
    :param unreliable: the share of the decisions whose noise was outside the domain of
        the acceptance test.
    :param diverging: the share of the draws where the log density is not finite.
    :param mean_log_ratio: the mean of the log ratios; half the mean square of what they
        are without noise, with the other sign.
    :param noise_sd_median: the median standard deviation of the log ratios.
    :param noise_sd_95: their 95% quantile.
    :param check_rms_error: with a control variate, the root mean square error of the
        log ratios that were checked on all rows.
    :param check_rms_z: the same in units of the noise that the batches claimed.
    :param noise_ratio: the variance of the noise that gradient steps inject over that
        of their gradients, where it is smallest; its inverse is about the relative
        error of the temperature that nothing corrects.
    :param swap_rates: of replica exchange, the mean acceptance rate of each pair of
        neighbouring rungs, from the coldest.
    :param unreliable_swaps: the share of the draws' swaps whose noise was outside the
        domain of the test.
    :param round_trips: how often replicas went from the coldest rung to the hottest
        and back, in all chains.
    :param jump_rates: of the equi-energy sampler, the mean acceptance rate of each
        chain's jumps to states of the next hotter one, from the coldest.
    :param jump_tries: the share of the draws with a jump, accepted or not.
    :param energy_noise: the median noise of each chain's energies, in temperatures.
    :param ring_occupancy: for each chain the share of its draws in each ring, the
        lowest energies first.
    :param num_cycles: of a cyclical kernel, the cycles of all chains.
    :param samples_per_cycle: the draws of a whole cycle.
    :param between_cycles: the largest share of a parameter's variance that is between
        the means of cycles; about one over the draws of a cycle if they see the same.
    :param between_cycles_name: the parameter that has it.
    :param rows_per_draw: rows of data read for a draw, thinned-away ones included.
    :param total_rows: rows of data read for all draws, without the warmup.
    :param rows_per_effective_sample: ``total_rows`` by the smallest bulk ESS.
    :param max_rhat: the largest R-hat; NaN with one chain.
    :param max_rhat_name: the parameter that has it.
    :param still_chains: the number of chains that never moved.
    :param min_ess_bulk: the smallest bulk effective sample size of all parameters that
        vary; 0 for one that is constant in a chain or not a number.
    :param min_ess_bulk_name: the parameter that has it.
    :param min_ess_tail: the smallest tail effective sample size.
    :param min_ess_tail_name: the parameter that has it.
    :param advice: what is wrong and what to write instead; empty if nothing is.
    :param notes: what to keep in mind.
    """

    kernel: str
    target: str
    temperature: float
    plates: Mapping[str, int]
    batch_sizes: Mapping[str, int]
    num_chains: int
    num_draws: int
    acceptance_rate: float
    unreliable: float
    diverging: float
    mean_log_ratio: float
    noise_sd_median: float
    noise_sd_95: float
    check_rms_error: float
    check_rms_z: float
    noise_ratio: float
    swap_rates: tuple[float, ...]
    unreliable_swaps: float
    round_trips: float
    jump_rates: tuple[float, ...]
    jump_tries: tuple[float, ...]
    energy_noise: tuple[float, ...]
    ring_occupancy: tuple[tuple[float, ...], ...]
    num_cycles: float
    samples_per_cycle: float
    between_cycles: float
    between_cycles_name: str
    rows_per_draw: float
    total_rows: float
    rows_per_effective_sample: float
    max_rhat: float
    max_rhat_name: str
    still_chains: int
    min_ess_bulk: float
    min_ess_bulk_name: str
    min_ess_tail: float
    min_ess_tail_name: str
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def barrier(self) -> float:
        """The communication barrier of a ladder: the sum of its rejection rates."""
        return sum(1.0 - rate for rate in self.swap_rates if rate == rate)

    def __str__(self) -> str:
        batches = ", ".join(
            f"{name}: {self.batch_sizes.get(name, size)} of {size} rows"
            for name, size in self.plates.items()
        )
        plural = "s" if self.num_chains > 1 else ""
        source = f" from {self.target}" if self.target else ""
        lines = {
            "draws": f"{self.num_chains} chain{plural} of {self.num_draws}{source}",
            "batch": batches,
            "acceptance rate": _show("{:.2f}", self.acceptance_rate),
            "unreliable": _show("{:.1%} of the decisions", self.unreliable),
            "diverging": _show("{:.1%} of the draws", self.diverging),
            "noise sd": _show(
                "median {:.2g}, 95% {:.2g}", self.noise_sd_median, self.noise_sd_95
            ),
            "exact checks": _show(
                "log ratios off by {:.2g}, {:.2g} of their noise",
                self.check_rms_error,
                self.check_rms_z,
            ),
            "gradient noise": _show(
                "its variance is 1 / {:.3g} of what steps inject", self.noise_ratio
            ),
            "swaps": _show(
                "accepted {:.2f} at least, {:.2f} on average",
                # of pairs that were tried in the draws that were kept
                min((r for r in self.swap_rates if r == r), default=math.nan),
                _mean([r for r in self.swap_rates if r == r]),
            )
            + _show(", {:.1%} unreliable", self.unreliable_swaps),
            "ladder": _show(
                f"{len(self.swap_rates) + 1} rungs, barrier {self.barrier:.2f}, "
                "{:.0f} round trips",
                self.round_trips if self.swap_rates else math.nan,
            ),
            "jumps": _show(
                "accepted {:.2f} at least, {:.2f} on average",
                min(self.jump_rates, default=math.nan),
                sum(self.jump_rates) / max(len(self.jump_rates), 1),
            )
            + _show(
                ", energies with noise of up to {:.2g} temperatures",
                max(self.energy_noise, default=math.nan),
            ),
            "lowest ring": _show(
                "{:.0%} of the coldest chain's draws, {:.1%} of the hottest's",
                *(
                    self.ring_occupancy[chain][0] if self.ring_occupancy else math.nan
                    for chain in (0, -1)
                ),
            ),
            "cycles": _show(
                "{:.0f} of {:.0f} draws", self.num_cycles, self.samples_per_cycle
            )
            + _show(
                f", {{:.0%}} of the variance between them ({self.between_cycles_name})",
                self.between_cycles,
            ),
            "rows": _show(
                "{:.4g} a draw, {:.3g} in all", self.rows_per_draw, self.total_rows
            )
            + _show(", {:.3g} an effective sample", self.rows_per_effective_sample),
            "R-hat": _show(f"{{:.3f}} ({self.max_rhat_name})", self.max_rhat),
            "ESS": _show(f"bulk {{:.0f}} ({self.min_ess_bulk_name})", self.min_ess_bulk)
            + _show(f", tail {{:.0f}} ({self.min_ess_tail_name})", self.min_ess_tail),
        }
        text = [self.kernel or "MCMC"]
        text += [f"  {name:<16} {value}" for name, value in lines.items() if value]
        for title, sentences in (("Advice", self.advice), ("Notes", self.notes)):
            text += [title] * bool(sentences) + [f"  - {s}" for s in sentences]
        return "\n".join(text)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def _show(text: str, *numbers: float) -> str:
    """The text with its numbers, or nothing if one of them is not there."""
    return "" if any(map(math.isnan, numbers)) else text.format(*numbers)
