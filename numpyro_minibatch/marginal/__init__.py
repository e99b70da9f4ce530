"""Models in which each row has latent variables, which are integrated out.

:func:`marginalize` turns a model with such sites into one that every kernel samples,
and :func:`recover_marginals` draws the sites afterwards. :func:`by_group` arranges long
data into one row for each group, and :func:`quadrature_error` measures the error of the
quadrature.
"""

from numpyro_minibatch.marginal._error import quadrature_error
from numpyro_minibatch.marginal._groups import Groups, by_group
from numpyro_minibatch.marginal._marginalize import Marginalized, marginalize
from numpyro_minibatch.marginal._recover import recover_marginals
from numpyro_minibatch.marginal._rules import QuadratureError

__all__ = [
    "Groups",
    "Marginalized",
    "QuadratureError",
    "by_group",
    "marginalize",
    "quadrature_error",
    "recover_marginals",
]
