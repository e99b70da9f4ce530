"""RENHD and RELD: replica exchange of Langevin dynamics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jax.sharding import Mesh

from numpyro_minibatch.accept import AcceptanceTest
from numpyro_minibatch.batch import Scheme
from numpyro_minibatch.kernels.langevin import SGHMC, SGMCMC, SGNHT
from numpyro_minibatch.kernels.replica_exchange._kernel import ReplicaExchange

__all__ = ["RELD", "RENHD"]


class RENHD(ReplicaExchange):
    """Replica-exchange Nosé-Hoover dynamics [1]: :class:`SGNHT` on a ladder.

    Each rung has its own thermostat, which stays with the rung and remains adapted to
    the gradient noise there; the paper's pseudo-code resets it before it can act.
    Momenta are drawn anew when positions are swapped.

    :param model: a NumPyro model with a data plate.
    :param temperatures: the ladder, ascending from 1.0; or ``num_replicas`` and
        ``temperature_ratio``, by default the paper's 7 and 1.5.
    :param num_replicas: number of rungs of a geometric ladder.
    :param temperature_ratio: ratio of neighbouring temperatures.
    :param swap: ``"penalty"``, ``"barker"`` (the paper's), ``"exact"`` or a test.
    :param swap_batch: a ``batch.*`` scheme for the rows of swaps.
    :param pairing: ``"even-odd"`` or ``"random"``.
    :param adapt_ladder: move the rungs in warmup to equal rejection rates.
    :param collect_rungs: whether to collect the draws of all rungs.
    :param mesh: devices among which the rungs are divided.
    :param settings: the arguments of :class:`SGNHT`: ``step_size``, ``friction``,
        ``num_steps`` and so on; ``integrator="euler"`` is the paper's.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), *Replica-exchange
       Nosé-Hoover dynamics for Bayesian learning on large datasets*, NeurIPS.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import RENHD, Target
        >>> target = Target(lambda z: -0.5 * z**2, lambda z, rows: 0.0 * rows * z, 100)
        >>> kernel = RENHD(target=target, batch_size=10, step_size=0.1)
        >>> kernel.settings["temperatures"][:3]
        [1.0, 1.5, 2.25]
    """

    _rung: type[SGMCMC] = SGNHT

    def __init__(
        self,
        model: Any = None,
        *,
        temperatures: Sequence[float] | None = None,
        num_replicas: int | None = None,
        temperature_ratio: float | None = None,
        swap: Literal["penalty", "barker", "exact"] | AcceptanceTest = "penalty",
        swap_batch: Scheme | None = None,
        pairing: Literal["even-odd", "random"] = "even-odd",
        adapt_ladder: bool = False,
        collect_rungs: bool = False,
        mesh: Mesh | None = None,
        **settings: Any,
    ) -> None:
        if temperatures is None:
            num_replicas = 7 if num_replicas is None else num_replicas
            temperature_ratio = 1.5 if temperature_ratio is None else temperature_ratio
        super().__init__(
            self._rung.within(type(self).__name__, model, **settings),
            temperatures=temperatures,
            num_replicas=num_replicas,
            temperature_ratio=temperature_ratio,
            swap=swap,
            swap_batch=swap_batch,
            pairing=pairing,
            adapt_ladder=adapt_ladder,
            collect_rungs=collect_rungs,
            mesh=mesh,
        )


class RELD(RENHD):
    """Replica-exchange Langevin dynamics: :class:`SGHMC` on a ladder.

    This is the rival in [1], with the correct friction for each temperature: the
    friction printed there, ``0.999 + c / T``, gives every rung a temperature below 0.1.

    :param model: a NumPyro model with a data plate.
    :param settings: the arguments of :class:`RENHD`, with those of :class:`SGHMC` for
        those of :class:`SGNHT`.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or missing.

    **References:**

    1. Rui Luo, Qiang Zhang, Yaodong Yang, Jun Wang (2020), *Replica-exchange
       Nosé-Hoover dynamics for Bayesian learning on large datasets*, NeurIPS.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import RELD, Target
        >>> target = Target(lambda z: -0.5 * z**2, lambda z, rows: 0.0 * rows * z, 100)
        >>> kernel = RELD(target=target, batch_size=10, step_size=0.1, num_replicas=3)
        >>> kernel.settings["inner"]
        'SGHMC'
    """

    _rung = SGHMC
