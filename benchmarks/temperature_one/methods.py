"""The methods, and the environment that each of them needs."""

from __future__ import annotations

from typing import NamedTuple


class Method(NamedTuple):
    """Where a method is found.

    :param module: the module of this folder that contains it.
    :param environment: its Python environment: ``main``, ``blackjax`` or ``old``.
    :param title: its name in tables.
    """

    module: str
    environment: str
    title: str


def _main(title: str) -> Method:
    return Method("numpyro_methods", "main", title)


def _blackjax(title: str) -> Method:
    return Method("rival_blackjax", "blackjax", f"blackjax {title}")


MODULES = {
    "nuts": _main("NUTS, whitened"),
    "hmcecs": _main("HMCECS, Taylor, whitened, m=100"),
    "hmcecs_1000": _main("HMCECS, Taylor, whitened, m=1000"),
    "hmcecs_example": _main("HMCECS, Taylor, m=1000, as in its example"),
    "ours": _main("MinibatchMH, taylor2"),
    "ours_uniform": _main("MinibatchMH, taylor2, uniform batches"),
    "blackjax_sgld": _blackjax("SGLD, m=1000"),
    "blackjax_sghmc": _blackjax("SGHMC, m=1000"),
    "blackjax_sgld_cv": _blackjax("SGLD-CV, m=100"),
    "blackjax_sghmc_cv": _blackjax("SGHMC-CV, m=100"),
    "sgmcmcjax_sgld_cv": Method("rival_sgmcmcjax", "old", "SGMCMCJax SGLD-CV, m=100"),
    "sgmcmcjax_sghmc_cv": Method("rival_sgmcmcjax", "old", "SGMCMCJax SGHMC-CV, m=100"),
    "jax_sgmc_sgld": Method("rival_jax_sgmc", "old", "jax-sgmc SGLD, m=1000"),
    "jax_sgmc_sghmc": Method("rival_jax_sgmc", "old", "jax-sgmc SGHMC, m=1000"),
}
