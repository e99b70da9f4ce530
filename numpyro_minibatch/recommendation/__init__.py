"""The choice between a minibatch kernel and NUTS, before a run."""

from numpyro_minibatch.recommendation._recommend import recommend
from numpyro_minibatch.recommendation._result import Cost, Recommendation

__all__ = ["Cost", "Recommendation", "recommend"]
