"""AusterityMH: the sequential t-test of Korattikara et al., a preset of MinibatchMH."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro_minibatch import accept, batch
from numpyro_minibatch.batch import BatchSize
from numpyro_minibatch.kernels.metropolis import MinibatchMH

__all__ = ["AusterityMH"]


class AusterityMH(MinibatchMH):
    """Approximate Metropolis-Hastings by a sequential t-test [1].

    Each decision draws its uniform number first, and reads slices of rows until a
    t-test determines on which side of it the log ratio lies. By design, some decisions
    are wrong: this kernel is included for comparison. :class:`MINT` and
    :class:`MHMinibatch` read fewer rows, and account for their noise.

    ``reliable`` is 1 for decisions made by the t-test or on all rows; it does not
    measure how many are wrong.

    Where the paper and this kernel differ:

    - ``epsilon`` is the p-value at which one look stops, as in the paper's Algorithm 1.
      The paper's search for the ``epsilon`` and the batch size that read the fewest
      rows at a given error of the whole decision is not done; for the error averaged
      over moves, which Seita et al. [2] call non-conservative, there is
      :func:`accept.average_epsilon <numpyro_minibatch.accept.average_epsilon>`.
    - The t-test uses the degrees of freedom of a sample without replacement, and does
      not decide on fewer than ten rows.

    **References:**

    .. [1] Anoop Korattikara, Yutian Chen, Max Welling (2014), *Austerity in MCMC Land:
       Cutting the Metropolis-Hastings Budget*, Algorithm 1.
    .. [2] Daniel Seita, Xinlei Pan, Haoyu Chen, John Canny (2017), *An Efficient
       Minibatch Acceptance Test for Metropolis-Hastings*, section 5.

    :param model: a NumPyro model with a data plate.
    :param batch_size: rows of a slice, or ``{plate: rows}``; by default each plate's
        own ``subsample_size``. The t-test needs at least a few hundred.
    :param epsilon: the p-value at which reading stops, between 0 and 0.5.
    :param settings: the other arguments of :class:`MinibatchMH`.

    :raises TypeError: ``batch`` or ``acceptance`` is given, or an argument is of the
        wrong kind.
    :raises ValueError: an argument is out of range.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import AusterityMH

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=500) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> mcmc = MCMC(AusterityMH(model, epsilon=0.01), num_warmup=500,
        ...             num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> abs(float(mcmc.get_samples()["mu"].mean()) - 3) < 0.1
        True
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        batch_size: BatchSize | None = None,
        epsilon: float = 0.005,
        **settings: Any,
    ) -> None:
        if "batch" in settings or "acceptance" in settings:
            raise TypeError(
                "AusterityMH has its own batch and acceptance; for other choices write "
                "MinibatchMH(model, batch=..., acceptance=...)."
            )
        super().__init__(
            model,
            batch=batch.growing(batch_size),
            acceptance=accept.austerity(epsilon),
            **settings,
        )
