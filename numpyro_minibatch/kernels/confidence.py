"""ConfidenceMH: the confidence sampler of Bardenet et al., a preset of MinibatchMH."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from numpyro_minibatch import accept, batch
from numpyro_minibatch._internal.checks import check_positive
from numpyro_minibatch.batch import BatchSize
from numpyro_minibatch.kernels.metropolis import MinibatchMH

__all__ = ["ConfidenceMH"]


class ConfidenceMH(MinibatchMH):
    """The confidence sampler MHSubLhd: errors have at most probability delta [1, 2].

    Each decision draws its uniform number first, and reads a batch that grows by the
    factor ``gamma`` until a concentration inequality determines on which side of it the
    log ratio lies. This does not assume normality, but needs a bound on the change of a
    row's log likelihood, and often reads nearly all rows: this kernel is included for
    comparison.

    ``reliable`` is 1 for decisions made by the bound or on all rows.

    Where the papers and this kernel differ:

    - The first batch has ``batch_size`` rows, not one or two: those looks cannot stop.
    - If no bound was known, experiments computed it from all rows of the data at each
      step. ``bound`` may do so, too, but then a step costs as much as an exact one.
    - If rows exceed the bound, all rows are read.

    **References:**

    .. [1] Rémi Bardenet, Arnaud Doucet, Chris Holmes (2014), *Towards scaling up Markov
       chain Monte Carlo: an adaptive subsampling approach*.
    .. [2] Rémi Bardenet, Arnaud Doucet, Chris Holmes (2017), *On Markov chain Monte
       Carlo methods for tall data*.

    :param model: a NumPyro model with a data plate.
    :param bound: ``bound(z, z_new)``, the largest change of a row's log likelihood
        between two unconstrained positions; such as
        :func:`accept.logistic_bound(x) <numpyro_minibatch.accept.logistic_bound>`. See
        :func:`accept.confidence <numpyro_minibatch.accept.confidence>`.
    :param batch_size: rows of the first batch, or ``{plate: rows}``; also how many are
        read at a time. By default each plate's own ``subsample_size``.
    :param delta: allowed fraction of wrong decisions, between 0 and 1.
    :param gamma: factor by which the batch grows, above 1.
    :param p: the power by which ``delta`` is divided among the looks, above 1.
    :param inequality: ``"bernstein"``, as in [1], or ``"serfling"``, which is tighter
        because rows are drawn without replacement.
    :param settings: the other arguments of :class:`MinibatchMH`.

    :raises TypeError: ``bound`` is missing, ``batch`` or ``acceptance`` is given, or an
        argument is of the wrong kind.
    :raises ValueError: an argument is out of range.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_minibatch import ConfidenceMH, accept

        >>> def model(x, y):
        ...     b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as i:
        ...         numpyro.sample("obs", dist.Bernoulli(logits=x[i] @ b), obs=y[i])

        >>> x = jax.random.normal(jax.random.key(0), (10_000, 2))
        >>> y = jax.random.bernoulli(jax.random.key(1), jax.nn.sigmoid(x[:, 0]))
        >>> kernel = ConfidenceMH(model, bound=accept.logistic_bound(x), delta=0.1)
        >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(2), x, y.astype(jnp.float32))
        >>> int(mcmc.get_extra_fields()["num_rows"].max())
        10000
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        bound: Callable[[Any, Any], Any] | None = None,
        batch_size: BatchSize | None = None,
        delta: float = 0.01,
        gamma: float = 2.0,
        p: float = 2.0,
        inequality: Literal["bernstein", "serfling"] = "bernstein",
        **settings: Any,
    ) -> None:
        if "batch" in settings or "acceptance" in settings:
            raise TypeError(
                "ConfidenceMH has its own batch and acceptance; for others write "
                "MinibatchMH(model, batch=..., acceptance=...)."
            )
        check_positive("ConfidenceMH", "gamma", gamma)
        if not gamma > 1:
            raise ValueError(
                f"ConfidenceMH(gamma={gamma!r}) must be above 1: a batch that does not "
                "decide grows to gamma times its rows. Write gamma=2.0 (the default)."
            )
        super().__init__(
            model,
            batch=batch.growing(batch_size, factor=gamma),
            acceptance=accept.confidence(
                delta, bound=bound, p=p, inequality=inequality
            ),
            **settings,
        )
