"""Rows with latent variables of their own, which are integrated out of each row.

:func:`marginalize` turns a model with such sites into one that every kernel samples.
"""

from numpyro_minibatch.marginal._model import Marginalized, marginalize

__all__ = ["Marginalized", "marginalize"]
