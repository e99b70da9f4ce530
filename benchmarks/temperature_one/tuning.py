"""Step sizes for the samplers without an accept/reject step, by one rule.

Their stationary distribution is too wide, because of the noise of the gradient and the
error of the integrator. In whitened coordinates the target is close to a standard
normal, for which both are known exactly. Every sampler gets the setting that mixes
fastest per gradient among those whose variance differs from one by at most `EXCESS`: a
standard deviation 3 percent off, the same tolerance as for everything else here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

EXCESS = 0.06
FRICTION = 0.01  # per unit of time; small, as trajectories refresh the momentum


class Setting(NamedTuple):
    """The setting of a sampler.

    :param step_size: step size of the diffusion in whitened coordinates.
    :param num_steps: steps, each with a gradient, from one draw to the next.
    :param relaxation: relaxation time of a chain, in draws.
    """

    step_size: float
    num_steps: int
    relaxation: float


def langevin(v: float) -> Setting:
    """The setting for ``w += e gradient + sqrt(2 e) noise``.

    Its variance is ``(2 e + e^2 v) / (2 e - e^2)``.

    :param v: variance of the gradient noise.
    """
    step_size = 2 * EXCESS / (v + 1 + EXCESS)
    return Setting(step_size, 1, 1 / step_size)


def hamiltonian(v: float, fresh: bool, symplectic: bool) -> Setting:
    """The setting for trajectories that start with a fresh momentum.

    :param v: variance of the gradient noise.
    :param fresh: whether every step has its own batch, or one serves the trajectory.
    :param symplectic: whether the gradient is taken at the new position, or, as in
        the explicit Euler scheme, at the old one.
    """
    best, found = 0.0, None
    for num_steps in (3, 5, 10, 20, 40, 80):
        for step_size in np.geomspace(1e-4, 0.5, 150):
            keep, variance = _stationary(step_size, num_steps, v, fresh, symplectic)
            speed = (1 - keep) / (1 + keep) / num_steps
            if 0 <= keep < 1 and abs(variance - 1) <= EXCESS and speed > best:
                best = speed
                found = Setting(float(step_size), num_steps, 1 / (1 - keep))
    if found is None:
        raise ValueError(f"no setting is close enough at gradient noise {v:.3g}")
    return found


def _stationary(
    e: float, num_steps: int, v: float, fresh: bool, symplectic: bool
) -> tuple[float, float]:
    """The autocorrelation of a trajectory's end, and the stationary variance."""
    step = np.array([[1.0, e], [-e, 1.0 - (e * e if symplectic else 0.0)]])
    whole, kicks = np.eye(2), np.empty(num_steps)
    for k in range(num_steps):
        kicks[k] = whole[0, 1] * e  # factor of the noise k gradients before the end
        whole = whole @ step
    noise = v * ((kicks**2).sum() if fresh else kicks.sum() ** 2)
    keep = whole[0, 0]
    if abs(keep) >= 1:
        return keep, np.inf
    return keep, (whole[0, 1] ** 2 + noise) / (1 - keep**2)
