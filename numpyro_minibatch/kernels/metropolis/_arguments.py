"""Arguments of MinibatchMH that must fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from numpyro_minibatch import batch, estimate, proposal
from numpyro_minibatch._internal.checks import check_instance, describe
from numpyro_minibatch.accept import AcceptanceTest, SequentialTest
from numpyro_minibatch.batch import BatchSize, Scheme
from numpyro_minibatch.estimate import Augmented, Exact, Shared
from numpyro_minibatch.proposal import Proposal

__all__ = [
    "read_estimate",
    "read_fallback",
    "read_proposal",
    "refuse_unfit_rule",
]


def read_proposal(name: str, given: Any, known: bool, several: bool) -> Proposal:
    """The proposal, which must fit the control variate.

    :param name: the kernel's name.
    :param given: the argument, or ``None``.
    :param known: whether there is a control variate.
    :param several: whether it has several modes.
    """
    found = _default_proposal(known, several) if given is None else given
    check_instance(name, "proposal", found, Proposal, "random_walk()")
    if found.uses_surrogate and not known:
        raise ValueError(
            f"{name}(proposal={found!r}) moves on a surrogate of the posterior, which "
            'a control variate provides. Add control_variate="taylor2", or use '
            "proposal.random_walk()."
        )
    if several != found.moves_between_modes:
        raise ValueError(_other_number_of_modes(name, found, several))
    return found


def read_fallback(name: str, fallback: Any, estimator: Any) -> Literal["exact"] | None:
    """Whether decisions that are too noisy are made on all rows.

    :param name: the kernel's name.
    :param fallback: the argument.
    :param estimator: the estimator of the log ratio.
    """
    if fallback not in (None, "exact"):
        raise ValueError(
            f'{name}(fallback=...) must be "exact" (decisions that are too noisy '
            "for the test are made on all rows) or None, got "
            f"{describe(fallback)}."
        )
    if fallback and not isinstance(estimator, Shared):
        raise ValueError(
            f'{name}(fallback="exact") compares two positions on the same rows, so '
            'it needs estimate="shared".'
        )
    return fallback


def _other_number_of_modes(name: str, given: Proposal, several: bool) -> str:
    """The reason why a proposal does not fit the control variate's number of modes."""
    if several:
        return (
            f"{name}(proposal={given!r}) moves within one mode, but control_variate="
            "control_variate.taylor2(modes=...) asks for several. Leave the proposal "
            "out, or write proposal.across_modes()."
        )
    return (
        f"{name}(proposal={given!r}) moves between the modes of a surrogate, which "
        "has several with control_variate=control_variate.taylor2(modes=8)."
    )


def _default_proposal(surrogate: bool, several: bool) -> Proposal:
    """The proposal if the user gives none.

    :param surrogate: whether there is a control variate.
    :param several: whether it has several modes.
    """
    if several:
        return proposal.across_modes()
    return proposal.surrogate_hmc() if surrogate else proposal.random_walk()


def refuse_unfit_rule(
    name: str, acceptance: AcceptanceTest, scheme: Scheme, estimator: Any
) -> None:
    """Raise if a sequential test cannot stop the batch, or compares other rows."""
    if not isinstance(acceptance, SequentialTest):
        return
    if not scheme.sequential:
        raise ValueError(
            f"{name}(acceptance={acceptance!r}) decides when it has read enough rows, "
            f"but batch={scheme!r} cannot be stopped. Write batch=batch.growing(500)."
        )
    if not isinstance(estimator, Shared):
        raise ValueError(
            f"{name}(acceptance={acceptance!r}) compares two positions on the same "
            f"rows, but estimate={estimator!r} does not. Leave estimate= out."
        )


def read_estimate(
    name: str, estimate_: Any, scheme: Scheme | None, batch_size: BatchSize | None
) -> tuple[Shared | Augmented | Exact, Scheme | None]:
    """The estimator of the log ratio, and the scheme that it needs, if any."""
    if not isinstance(estimate_, str | Shared | Augmented | Exact):
        raise TypeError(_unknown_estimate(name, estimate_))
    if estimate_ == "exact":
        estimate_ = estimate.exact()
    if isinstance(estimate_, Exact):
        if scheme is not None or batch_size is not None:
            raise ValueError(
                f'{name}(estimate="exact") reads all rows: it takes no batch_size and '
                "no batch. For another chunk size pass batch=batch.full(chunk_size) "
                "alone."
            )
        return estimate_, batch.full()
    if not isinstance(estimate_, str):
        return estimate_, scheme
    named: Mapping[str, Callable[[], Shared | Augmented]] = {
        "shared": estimate.shared,
        "augmented": estimate.augmented,
    }
    if estimate_ not in named:
        raise ValueError(_unknown_estimate(name, estimate_))
    return named[estimate_](), scheme


def _unknown_estimate(name: str, estimate_: Any) -> str:
    return (
        f'{name}(estimate=...) must be "shared", "augmented", "exact" or an '
        f"estimate.* object such as estimate.shared(), got {describe(estimate_)}."
    )
