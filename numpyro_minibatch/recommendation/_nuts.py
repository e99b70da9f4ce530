"""NUTS on a normal distribution: gradients per draw and effective draws.

The surrogate of a control variate has nearly the covariance of the posterior. If the
posterior is normal, a leapfrog step is linear, and the positions and momenta of a whole
trajectory are known in closed form. NumPy therefore simulates NUTS in a fraction of a
second, without compiling a program.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer.hmc_util import build_adaptation_schedule

__all__ = ["Trajectories", "of_run", "trajectories"]

# NumPyro's default target, and the acceptance rate to which its warmup often leads. The
# length of a trajectory is a power of two, so that a mean of both is more reliable.
_ACCEPTANCE = 0.8, 0.9
_DEPTH = 10  # NumPyro's largest depth of a tree
_CHAINS = 32
_DRAWS = 120
_FEW = 8  # draws that show the number of gradients
_NUMBERS = 5e6  # of all trajectories, at most about so many: a second of NumPy's time
_PROBED = 64  # positions at which the step size is chosen
_BISECTIONS = 7


class Trajectories(NamedTuple):
    """The cost of a draw.

    :param gradients: gradients per draw.
    :param ess: effective draws per draw, of the parameter that has the fewest.
    """

    gradients: float
    ess: float


def of_run(covariance: np.ndarray, num_warmup: int) -> tuple[float, Trajectories]:
    """The gradients of a warmup of NUTS, and the cost of a draw after it.

    :param covariance: of a normal distribution, ``(D, D)``.
    :param num_warmup: draws of the warmup.
    """
    variances, total, learnt = np.diag(covariance), 0.0, 0
    inverse_mass = np.ones(len(variances))
    windows = build_adaptation_schedule(num_warmup)
    for k, (first, last) in enumerate(windows):
        # the mass matrix changes after all windows but the first and the last
        if learnt and k > 1:
            inverse_mass = _learnt(variances, learnt)
        count = last - first + 1
        total += count * trajectories(covariance, inverse_mass, _FEW).gradients
        learnt = count if k > 0 else 0
    return total, trajectories(covariance, inverse_mass)


def _learnt(variances: np.ndarray, number: int) -> np.ndarray:
    """The inverse mass matrix that NumPyro learns from a number of draws.

    It adds a constant to the variances, which exceeds those of a posterior of many
    rows. Where the scales of parameters differ, this makes trajectories longer.
    """
    return (number * variances + 5e-3) / (number + 5)


def trajectories(
    covariance: np.ndarray, inverse_mass: np.ndarray, draws: int = _DRAWS
) -> Trajectories:
    """The cost of a draw of NUTS from a normal distribution.

    :param covariance: of the distribution, ``(D, D)``.
    :param inverse_mass: the diagonal of the inverse mass matrix, ``(D,)``.
    :param draws: at most so many draws of each chain are simulated.
    """
    scales = np.sqrt(np.asarray(inverse_mass, float))
    variances, axes = np.linalg.eigh(covariance / np.outer(scales, scales))
    variances = np.maximum(variances, 1e-12 * variances.max())
    # NUTS does not change if its coordinates are rotated, here to the principal axes
    both = [_at_acceptance(variances, axes, rate, draws) for rate in _ACCEPTANCE]
    gradients, ess = np.mean(both, axis=0)
    return Trajectories(float(gradients), float(ess))


def _at_acceptance(
    variances: np.ndarray, axes: np.ndarray, rate: float, draws: int
) -> tuple[float, float]:
    """Gradients and effective draws per draw, at a step size for an acceptance rate."""
    rng = np.random.default_rng(41)
    step = _step_size(rng, variances, rate)
    chains = _Normal(rng, variances, step, _CHAINS)
    each = max(chains.draw().mean() * len(variances) * _CHAINS, 1.0)
    draws = int(np.clip(_NUMBERS / each, _FEW, draws))
    steps, positions = [], []
    for _ in range(draws):
        steps.append(chains.draw())
        positions.append(chains.position @ axes.T)
    found = effective_sample_size(np.stack(positions, 1))
    ess = float(np.nanmin(found)) / (draws * _CHAINS)
    return float(np.mean(steps)), min(ess, 1.0)


def _step_size(rng: np.random.Generator, variances: np.ndarray, rate: float) -> float:
    """The step size for an acceptance rate."""
    shortest = np.sqrt(variances.min())
    low, high = 0.05 * shortest, 1.99 * shortest
    for _ in range(_BISECTIONS):
        middle = np.sqrt(low * high)
        chains = _Normal(rng, variances, middle, _PROBED, depth=5)
        chains.draw()
        if chains.acceptance.mean() > rate:
            low = middle
        else:
            high = middle
    return float(np.sqrt(low * high))


class _Normal:
    """Chains of NUTS on a normal distribution with independent coordinates.

    :param rng: random numbers.
    :param variances: of the coordinates, ``(D,)``.
    :param step: the step size, below the limit of stability.
    :param chains: the number of chains, which start in the distribution.
    :param depth: the largest depth of a tree.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        variances: np.ndarray,
        step: float,
        chains: int,
        depth: int = _DEPTH,
    ) -> None:
        self.rng, self.step, self.depth = rng, step, depth
        self.precision = 1 / variances
        self.position = rng.normal(size=(chains, len(variances))) * np.sqrt(variances)
        self.acceptance = np.zeros(chains)
        # a leapfrog step is a rotation by this angle, of momenta times `stretch`
        self.angle = np.arccos(1 - step**2 * self.precision / 2)
        self.stretch = step / np.sin(self.angle)

    def _energy(self, position: np.ndarray, momentum: np.ndarray) -> np.ndarray:
        squares = self.precision * np.square(position) + np.square(momentum)
        return 0.5 * squares.sum(-1)

    def _along(
        self, position: np.ndarray, momentum: np.ndarray, times: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions and momenta after some numbers of steps, ``(K, steps, D)``.

        :param times: the numbers of steps, ``(K, steps)``; negative ones run backwards.
        """
        angle = times[..., None] * self.angle
        cosine, sine = np.cos(angle), np.sin(angle)
        position, momentum = position[:, None], momentum[:, None]
        return (
            cosine * position + sine * self.stretch * momentum,
            cosine * momentum - sine / self.stretch * position,
        )

    def draw(self) -> np.ndarray:
        """Make one draw of each chain, and return the numbers of gradients."""
        rng, start, count = self.rng, self.position.copy(), len(self.position)
        momentum = rng.normal(size=start.shape)
        energy = self._energy(start, momentum)
        gradients, accepted = np.zeros(count), np.zeros(count)
        first, last = np.zeros(count, int), np.zeros(count, int)
        total, sums = np.zeros(count), momentum.copy()  # log weight, sum of momenta
        going = np.arange(count)
        for depth in range(self.depth):
            if not len(going):
                break
            size = 2**depth
            ahead = rng.uniform(size=len(going)) < 0.5
            steps = np.arange(1, size + 1)
            times = np.where(
                ahead[:, None],
                last[going, None] + steps,
                first[going, None] - steps,
            )
            where, momenta = self._along(start[going], momentum[going], times)
            lost = energy[going, None] - self._energy(where, momenta)
            # backwards in time the ends of a tree change places, not its turning
            ends = _first_turn(momenta)
            whole = ends > size
            made = np.minimum(ends, size)
            gradients[going] += made
            running = steps <= made[:, None]
            accepted[going] += (np.exp(np.minimum(lost, 0)) * running).sum(1)
            weight = np.logaddexp.reduce(lost, axis=1)
            take = whole & (
                np.log(rng.uniform(size=len(going))) < weight - total[going]
            )
            among = (lost + rng.gumbel(size=lost.shape)).argmax(1)
            self.position[going[take]] = where[take, among[take]]
            total[going] = np.logaddexp(total[going], weight)
            sums[going] += momenta.sum(1)
            last[going[ahead]] += size
            first[going[~ahead]] -= size
            ends_at = np.stack([first[going], last[going]], 1)
            _, both = self._along(start[going], momentum[going], ends_at)
            turned = _turning(both[:, 0], both[:, 1], sums[going])
            going = going[whole & ~turned]
        self.acceptance = accepted / gradients
        return gradients


def _first_turn(momenta: np.ndarray) -> np.ndarray:
    """The number of steps after which some part of a subtree turns.

    :param momenta: of a subtree in order, ``(K, 2^depth, D)``.
    :return: a number above all steps if no part turns.
    """
    count, size, dim = momenta.shape
    found = np.full(count, size + 1)
    width = 2
    while width <= size:
        parts = momenta.reshape(count, size // width, width, dim)
        turned = _turning(parts[:, :, 0], parts[:, :, -1], parts.sum(2))
        which = turned.argmax(1)
        end = np.where(turned.any(1), (which + 1) * width, size + 1)
        found = np.minimum(found, end)
        width *= 2
    return found


def _turning(first: np.ndarray, last: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """NumPyro's condition for the end of a trajectory, for a unit mass matrix."""
    sums = sums - (first + last) / 2
    return ((first * sums).sum(-1) <= 0) | ((last * sums).sum(-1) <= 0)
