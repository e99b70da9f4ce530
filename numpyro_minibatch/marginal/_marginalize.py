"""The public transformation of a model, and the interface of its result for kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import jax

from numpyro_minibatch._internal.checks import check_positive
from numpyro_minibatch.marginal._error import (
    ACCURACY,
    ADVISED,
    MOST_NODES,
    SetUpError,
)
from numpyro_minibatch.marginal._improper import check_integrals
from numpyro_minibatch.marginal._model import RowsMarginalized
from numpyro_minibatch.marginal._rules import ELSEWHERE
from numpyro_minibatch.marginal._sites import indexable

__all__ = ["Marginalized", "marginalize"]


_THIRD = 1 / 3
_WORTH_IT = 1.5  # times as many nodes reduce the error by more than half

# nodes of each dimension with which a search for the mode is repeated
_MANY_NODES = {1: 31, 2: 21, 3: 15}


def marginalize(
    model: Callable,
    sites: Collection[str] | None = None,
    *,
    num_nodes: int | None = None,
    accuracy: float = ACCURACY,
) -> Marginalized:
    r"""Integrate the latent variables of each row out of a NumPyro model.

    A latent site in the plate of the observations has a value for each row. A kernel
    that reads minibatches cannot update all these values. The returned model does not
    contain such sites. Instead, each row has its marginal likelihood,

    .. math:: p(y_i \mid \theta) = \sum_{k} \int p(y_i, k, u \mid \theta) \, du.

    Discrete sites with finite support are summed exactly over all joint states.
    Continuous sites, with one to three numbers per row on any support, are integrated
    by adaptive quadrature. Its nodes follow the mode and the curvature of each row,
    given each joint state of the discrete sites: up to 11 of each dimension are
    Gauss-Hermite nodes [1], [2], and more follow the double exponential rule [3]. Sites
    of inner plates are integrated out first.

    The result takes the model's arguments, and works with every kernel of this package
    and with NumPyro's NUTS, SVI and Predictive. If nothing is observed, it runs the
    original model, so that ``Predictive`` draws new rows.

    :param model: the model. The latent sites of its rows are in a plate that contains
        the observations of these rows, directly or in inner plates.
    :param sites: names of the sites to integrate out. Default: all latent sites in
        plates that hold observations.
    :param num_nodes: quadrature nodes of each continuous dimension, an odd number.
        By default 11 for one dimension, or 21 if its support has a border as that of a
        gamma variable has, 9 for two, 7 for three; the set-up of a control variate uses
        more if ``accuracy`` requires them.
    :param accuracy: the largest error of the log likelihood of a row over the
        posterior. The set-up of a control variate measures it, and
        :func:`quadrature_error` does for runs of other kernels.
    :return: the marginalized model. Its observed site has a log likelihood for each
        row. It has the name of the original observed site, or the names of several
        joined by ``"_"``.
    :raises TypeError: an argument has the wrong type.
    :raises ValueError: an argument is out of range. The model also raises it when it
        runs, if rows share a site or depend on its values in other rows, a discrete
        site has no finite support, or continuous sites have more than three dimensions.

    **References**

    1. J. C. Pinheiro and D. M. Bates. Approximations to the log-likelihood function in
       the nonlinear mixed-effects model. *Journal of Computational and Graphical
       Statistics* 4 (1995).
    2. J. C. Naylor and A. F. M. Smith. Applications of a method for the efficient
       computation of posterior distributions. *Applied Statistics* 31 (1982).
    3. H. Takahasi and M. Mori. Double exponential formulas for numerical integration.
       *Publications of the Research Institute for Mathematical Sciences* 9 (1974).

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_minibatch import marginalize
        >>> def model(y):
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        ...     with numpyro.plate("data", len(y)) as idx:
        ...         a = numpyro.sample("a", dist.Normal(0.0, tau))
        ...         numpyro.sample("y", dist.Normal(a, 1.0), obs=y[idx])
        >>> y = jnp.array([0.3, -1.2, 2.0])
        >>> found, _ = numpyro.infer.util.log_density(
        ...     marginalize(model), (y,), {}, {"tau": 2.0}
        ... )
        >>> exact = dist.Normal(0.0, jnp.sqrt(5.0)).log_prob(y).sum()
        >>> exact += dist.HalfNormal(1.0).log_prob(2.0)
        >>> bool(abs(found - exact) < 1e-5)
        True
    """
    if not callable(model):
        raise TypeError(f"marginalize needs a NumPyro model, got {model!r}.")
    if isinstance(sites, str) or not isinstance(sites, Collection | None):
        raise TypeError(
            f'marginalize(sites=...) must be a list of names, such as ["a"], got '
            f"{sites!r}."
        )
    if sites is not None and not sites:
        raise ValueError(
            "marginalize(sites=[]) would integrate nothing out. Give the names of "
            "latent sites, or None for all those in plates that hold observations."
        )
    if num_nodes is not None:
        whole = isinstance(num_nodes, Integral) and not isinstance(num_nodes, bool)
        if not whole or num_nodes < 3 or num_nodes > MOST_NODES or num_nodes % 2 == 0:
            raise ValueError(
                "marginalize(num_nodes=...) must be an odd number from 3 to "
                f"{MOST_NODES}, got {num_nodes!r}."
            )
    check_positive("marginalize", "accuracy", accuracy)
    names = None if sites is None else tuple(sites)
    nodes = None if num_nodes is None else int(num_nodes)
    return Marginalized(model, names, nodes, float(accuracy))


@dataclass(frozen=True)
class Marginalized(RowsMarginalized):
    """A model without the latent variables of its rows; see :func:`marginalize`.

    :param fn: the original model.
    :param sites: names of the sites that are integrated out; ``None`` for all.
    :param num_nodes: quadrature nodes of each dimension.
    :param accuracy: the largest error of the log likelihood of a row.
    """

    accuracy: float = ACCURACY

    def check_integrals(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raise if a row has an infinite integral, unless the arguments are traced.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        :raises ValueError: with the site and the row.
        """
        levels = self.levels(args, kwargs)
        improper = any(site.improper for level in levels for site in level.sites)
        leaves = jax.tree.leaves((args, kwargs))
        if not improper or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        args, kwargs = jax.tree.map(indexable, (args, kwargs))
        check_integrals(self.chain(args, kwargs), args, kwargs)

    def approximation_advice(self, args: tuple, kwargs: Mapping[str, Any]) -> str:
        """Advice for a failed set-up of a kernel; empty without quadrature.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        levels = self.levels(args, kwargs)
        dimensions = max((level.dimensions for level in levels), default=0)
        if not dimensions:
            return ""
        more = _MANY_NODES[dimensions]
        if self.num_nodes is not None:
            more = max(more, min(2 * self.num_nodes + 1, MOST_NODES))
            if self.num_nodes >= more:
                return ""
        return (
            " This can be due to a quadrature that is too coarse: try "
            f"marginalize(model, num_nodes={more})."
        )

    def finer(self, args: tuple, kwargs: Mapping[str, Any]) -> Marginalized | None:
        """The model with many nodes, if the user did not choose their number.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        levels = self.levels(args, kwargs)
        dimensions = max((level.dimensions for level in levels), default=0)
        if self.num_nodes is not None or not dimensions:
            return None
        return replace(self, num_nodes=_MANY_NODES[dimensions])

    def approximation(self, args: tuple, kwargs: Mapping[str, Any]) -> SetUpError:
        """The measurement of the quadrature's error, for set-ups.

        :param args: positional arguments of the model.
        :param kwargs: keyword arguments of the model.
        """
        return SetUpError(args, kwargs, self.accuracy)

    def refined(
        self, report: Mapping[str, float], late: bool = False
    ) -> Marginalized | None:
        """The model with enough nodes, if the user did not choose their number.

        :param report: what :meth:`approximation` measured.
        :param late: whether a set-up is complete. It is then not repeated with a few
            more nodes that do not make the rows accurate either.
        """
        spread = report.get("quadrature_sd", 0.0)
        if self.num_nodes is not None:
            return None
        error = report.get("quadrature_error", 0.0)
        if spread <= ADVISED and error <= self.accuracy:
            return None
        better = int(report["quadrature_better_nodes"])
        few = better < _WORTH_IT * report["quadrature_nodes"] and spread <= 2 * ADVISED
        helps = report["quadrature_better_error"] <= self.accuracy < error / 2
        if late and few and not helps:
            return None
        return replace(self, num_nodes=better)

    def settled(self, report: Mapping[str, float]) -> bool:
        """Whether all errors are below a third of what is reported or changed.

        :param report: what :meth:`approximation` measured; empty for nothing.
        """
        limits = {
            "quadrature_sd": ADVISED,
            "quadrature_sd_elsewhere": ADVISED,
            "quadrature_sd_single": ADVISED,
            "quadrature_error": self.accuracy,
            "quadrature_elsewhere": ELSEWHERE,
            "quadrature_unconverged": 1.0,
        }
        return bool(report) and all(report[n] < _THIRD * x for n, x in limits.items())
