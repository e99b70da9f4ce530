"""Sequential tests, which stop reading rows early: austerity and confidence."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from statistics import NormalDist
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from numpyro_minibatch.accept._contract import AcceptanceTest, uniform
from numpyro_minibatch.accept._one_shot import Metropolis
from numpyro_minibatch.estimate import SequentialEvidence, StoppingRule

__all__ = [
    "SequentialTest",
    "austerity",
    "average_epsilon",
    "confidence",
    "logistic_bound",
]


@dataclass(frozen=True)
class SequentialTest(Metropolis):
    """The Metropolis test on only as many rows as its decision needs.

    The test compares the log ratio with the log of a uniform number. That number is
    drawn first, so that reading can stop as soon as the outcome is clear enough.
    ``accept_prob`` is the acceptance probability that the estimate gives over all
    uniform numbers.
    """

    max_variance = math.inf

    @abstractmethod
    def decided(
        self, distance: Array, evidence: SequentialEvidence, bounds: Any
    ) -> Array:
        """Whether the comparison is clear enough.

        :param distance: the distance of the estimated log ratio from the log of the
            uniform number.
        :param evidence: what has been read, with the proposal's ratio in its log ratio.
        :param bounds: what :meth:`bounds` returned for the move.
        """

    def bounds(self, move: tuple[Any, Any]) -> Any:
        """Bounds on a move, computed before its rows are read; by default none."""
        return ()

    def rule(
        self, key: Array, log_q_ratio: ArrayLike, move: tuple[Any, Any]
    ) -> StoppingRule | None:
        """A rule that stops when the comparison with the uniform number is clear."""
        bounds = self.bounds(move)  # once per decision, not once per look

        def enough(evidence: SequentialEvidence) -> Array:
            evidence = evidence._replace(log_ratio=evidence.log_ratio + log_q_ratio)
            value = jnp.asarray(evidence.log_ratio.value)
            # cloned on purpose: the final decision uses the same number
            level = jnp.log(uniform(jax.random.clone(key), value))
            decided = self.decided(jnp.abs(value - level), evidence, bounds)
            # a row that is not finite also ends the reading
            return decided | ~jnp.isfinite(value)

        return enough


@dataclass(frozen=True)
class Austerity(SequentialTest):
    """The test that :func:`austerity` builds."""

    epsilon: float = 0.005

    def __post_init__(self) -> None:
        _check_share("austerity", "epsilon", self.epsilon, 0.5, 0.005)
        object.__setattr__(self, "epsilon", float(self.epsilon))

    def decided(
        self, distance: Array, evidence: SequentialEvidence, bounds: Any
    ) -> Array:
        # As in the paper, rows without any scatter decide by their sign alone. The
        # paper has n - 1 degrees of freedom and the factor (N - n) / (N - 1); here they
        # are (n - 1) / (1 - n / N) and 1 - n / N, those of a sample without
        # replacement. Unlike in the paper, fewer than ten rows do not decide.
        variance = jnp.asarray(evidence.log_ratio.variance)
        noisy = variance > 0
        scale = jnp.sqrt(jnp.where(noisy, variance, 1.0))
        dof = jnp.where(noisy, evidence.log_ratio.dof, 1.0)
        clear = normal_deviate(distance / scale, dof) > _quantile(self.epsilon)
        count = sum(rows.seen for rows in evidence.rows.values())
        return (count >= _FEWEST_ROWS) & (~noisy | clear)


_FEWEST_ROWS = 10


def normal_deviate(t: Any, dof: Any, xp: Any = jnp) -> Any:
    """The normal deviate with the upper tail of a Student-t deviate ``t >= 0``.

    By Hill's expansion [1]: in float32 the relative error of a tail above 1e-5 is below
    1e-5 for 9 degrees of freedom or more, and below 1e-2 for 4.

    **References:**

    .. [1] G. W. Hill (1970), *Algorithm 395: Student's t-distribution*,
       Communications of the ACM 13, 617-619.
    """
    t = xp.minimum(t, 1e4)  # far enough, and its powers do not overflow in float32
    a = dof - 0.5
    b = 48.0 * xp.square(a)
    y = a * xp.log1p(xp.square(t) / dof)
    next_term = ((-0.4 * y - 3.3) * y - 24.0) * y - 85.5
    next_term = next_term / (0.8 * xp.square(y) + 100.0 + b)
    return xp.sqrt(y) * (1.0 + (next_term + y + 3.0) / b)


Bound = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Confidence(SequentialTest):
    """The test that :func:`confidence` builds."""

    bound: Bound
    delta: float = 0.01
    p: float = 2.0
    inequality: Literal["bernstein", "serfling"] = "bernstein"

    def __post_init__(self) -> None:
        if not callable(self.bound):
            raise TypeError(
                "confidence(bound=...) must be a function bound(z, z_new) of two "
                "unconstrained positions that bounds |log_likelihood(z_new) - "
                "log_likelihood(z)| of every row, such as "
                f"accept.logistic_bound(x) for a logistic regression, got "
                f"{self.bound!r}."
            )
        _check_share("confidence", "delta", self.delta, 1.0, 0.01)
        if not isinstance(self.p, Real) or not 1.0 < float(self.p) < math.inf:
            raise ValueError(
                f"confidence(p={self.p!r}): the k-th look may fail with a probability "
                "proportional to k ** -p, which has a finite sum only for p above 1; "
                "write p=2.0 (the default)."
            )
        if self.inequality not in ("bernstein", "serfling"):
            raise ValueError(
                f"confidence(inequality={self.inequality!r}) must be "
                '"bernstein" (the default) or "serfling".'
            )
        object.__setattr__(self, "delta", float(self.delta))
        object.__setattr__(self, "p", float(self.p))

    def bounds(self, move: tuple[Any, Any]) -> Any:
        given = self.bound(*move)
        for value in given.values() if isinstance(given, Mapping) else [given]:
            if jnp.shape(value) != ():
                raise ValueError(
                    "confidence(bound=...) must return one number, the largest change "
                    "of a row's log likelihood, or a dict of one for each data plate; "
                    f"got an array of shape {jnp.shape(value)}. Write for example "
                    "jnp.max(...)."
                )
        return given

    def decided(
        self, distance: Array, evidence: SequentialEvidence, bounds: Any
    ) -> Array:
        given = (
            bounds
            if isinstance(bounds, Mapping)
            else dict.fromkeys(evidence.sizes, bounds)
        )
        if set(given) != set(evidence.sizes):
            raise ValueError(
                f"confidence(bound=...) returned bounds for {sorted(given)}, but the "
                f"data plates are {sorted(evidence.sizes)}."
            )
        # the paper's delta_k = (p - 1) / (p k ** p) delta, one part for each plate
        share = (self.p - 1.0) / self.p * self.delta / len(evidence.sizes)
        more = self.p * jnp.log(evidence.number.astype(distance.dtype))
        width = jnp.zeros_like(distance)
        holds = jnp.array(True)
        for name, rows in evidence.rows.items():
            count = rows.seen.astype(distance.dtype)
            half = self._half_width(
                jnp.sqrt(rows.m2 / count),
                given[name],
                count,
                evidence.sizes[name],
                more - math.log(share),
            )
            width += evidence.weight * evidence.sizes[name] * half
            # if rows exceed the bound (up to rounding), all rows are read
            square = rows.m2 / count + jnp.square(rows.mean)
            holds &= square <= jnp.square(1.001 * given[name])
        return holds & (distance >= width)

    def _half_width(
        self, sd: Array, bound: ArrayLike, count: Array, size: int, log_inverse: Array
    ) -> Array:
        """The half-width of a confidence interval for the mean of all rows."""
        rho: ArrayLike
        if self.inequality == "bernstein":
            # the range of the rows is twice the bound of their size
            rho, factor, log_term = 1.0, 3.0, log_inverse + math.log(3.0)
        else:
            factor, log_term = (
                7.0 / 3.0 + 3.0 / math.sqrt(2.0),
                log_inverse + math.log(5),
            )
            rho = jnp.where(
                count <= size / 2,
                1.0 - (count - 1.0) / size,
                (1.0 - count / size) * (1.0 + 1.0 / count),
            )
        return sd * jnp.sqrt(2.0 * rho * log_term / count) + (
            factor * 2.0 * bound * log_term / count
        )


@dataclass(frozen=True)
class LogisticBound:
    """The bound that :func:`logistic_bound` builds."""

    radius: float
    coefficients: Callable[[Any], Any] | None = None

    def __call__(self, z: Any, z_new: Any) -> Array:
        """The largest change of a row's log likelihood from ``z`` to ``z_new``."""
        if self.coefficients is not None:
            z, z_new = self.coefficients(z), self.coefficients(z_new)
        step = ravel_pytree(jax.tree.map(jnp.subtract, z_new, z))[0]
        return self.radius * jnp.linalg.norm(step)


def _quantile(tail: float) -> float:
    """The normal deviate with this upper tail."""
    return -NormalDist().inv_cdf(tail)


def _check_share(who: str, name: str, value: Any, below: float, example: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(
            f"{who}({name}={value!r}): expected a probability, such as {example}."
        )
    if not 0.0 < float(value) < below:
        raise ValueError(
            f"{who}({name}={value!r}): the allowed fraction of wrong decisions must be "
            f"above 0 and below {below:g}; write {name}={example} (the default)."
        )


def austerity(epsilon: float = 0.005) -> AcceptanceTest:
    """Build the sequential t-test of Korattikara et al.

    The uniform number ``u`` is drawn first. After each slice of rows, a t-test asks
    whether the log ratio differs from ``log u``; reading stops when its one-sided
    p-value is below ``epsilon``, or with the last row. Needs a batch that grows:
    ``batch.growing(500)``.

    ``epsilon`` is the error of one look. A decision takes several looks, and is wrong
    more often: if the log ratio equals ``log u``, in nearly half of the decisions that
    stop early. Averaged over ``u``, the fraction of wrong decisions was 0.5% at
    ``epsilon=0.005`` with slices of 50 rows, and 0.2% with 500, on the tied-means
    mixture of Seita et al.; the stationary distribution has an unknown error of that
    order. A t-test also needs means that are close to normal: slices of at least a few
    hundred rows.

    :param epsilon: the p-value to stop at, above 0 and below 0.5.
    :raises TypeError: if ``epsilon`` is not a number.
    :raises ValueError: if it is out of range.

    **References:**

    1. Korattikara, A., Chen, Y. and Welling, M. (2014). Austerity in MCMC land:
       cutting the Metropolis-Hastings budget.

    **Example**

    .. doctest::

        >>> from numpyro_minibatch import MinibatchMH, accept, batch
        >>> def model(): ...
        >>> kernel = MinibatchMH(
        ...     model, batch=batch.growing(500), acceptance=accept.austerity(0.01)
        ... )
    """
    return Austerity(epsilon)


def average_epsilon(
    error: float,
    log_ratios: ArrayLike,
    row_sds: ArrayLike,
    *,
    size: int,
    batch_size: int,
    seed: int = 0,
) -> float:
    """The ``epsilon`` of :func:`austerity` for a given fraction of wrong decisions.

    The fraction is averaged over moves and their uniform numbers, by simulating the
    t-test with normal rows. With large slices it is below ``epsilon``, so that a larger
    ``epsilon``, and fewer rows, suffice. This is the average design of Korattikara et
    al., and what the table of Seita et al. seems to mean by non-conservative. It needs
    some moves whose log ratio is known from all rows.

    :param error: the fraction of wrong decisions, above 0 and below 0.5.
    :param log_ratios: true log ratios of a few hundred moves as the chain makes them,
        at its temperature, prior and proposal included, shape ``(k,)``.
    :param row_sds: for each move ``N / T`` times the standard deviation of the rows'
        differences in log likelihood, shape ``(k,)``.
    :param size: the number of rows ``N``.
    :param batch_size: rows of a slice.
    :param seed: of the simulation, which makes 4000 decisions at each ``epsilon``.
    :return: the largest ``epsilon`` up to 0.4, within 10%.
    :raises ValueError: if ``error`` is out of range, or the moves are not finite
        vectors of one length.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch.accept import average_epsilon
        >>> deltas = np.linspace(-4.0, 2.0, 100)
        >>> epsilon = average_epsilon(
        ...     0.005, deltas, 20.0 + 0 * deltas, size=100_000, batch_size=500
        ... )
        >>> 0.005 < epsilon < 0.1
        True
    """
    _check_share("average_epsilon", "error", error, 0.5, 0.005)
    deltas, sds = (np.asarray(x, np.float64) for x in (log_ratios, row_sds))
    if deltas.ndim != 1 or deltas.shape != sds.shape or not deltas.size:
        raise ValueError(
            "average_epsilon takes one log ratio and one standard deviation for each "
            f"move, got arrays of shapes {deltas.shape} and {sds.shape}."
        )
    if not (np.isfinite(deltas).all() and np.isfinite(sds).all() and (sds >= 0).all()):
        raise ValueError(
            "average_epsilon: log ratios and standard deviations must be finite, and "
            "standard deviations non-negative. Leave out moves to positions where the "
            "density is zero."
        )
    which = np.arange(4000) % deltas.size
    low, high = math.log(1e-6), math.log(0.4)
    while high - low > 0.1:
        middle = 0.5 * (low + high)
        share = _share_wrong(
            math.exp(middle), deltas[which], sds[which], size, batch_size, seed
        )
        low, high = (middle, high) if share <= error else (low, middle)
    return math.exp(low)


def _share_wrong(
    epsilon: float,
    deltas: np.ndarray,
    sds: np.ndarray,
    size: int,
    batch_size: int,
    seed: int,
) -> float:
    """The fraction of wrong decisions of the t-test, simulated with normal rows."""
    rng = np.random.default_rng(seed)
    levels = np.log1p(-rng.random(deltas.size))
    right = deltas >= levels
    walk = np.zeros(deltas.size)  # the sum of the rows read, less their mean
    wrong, count = 0, 0
    while count < size:
        fresh = min(batch_size, size - count)
        left = size - count
        # without replacement, the rows left lack those that have been read
        walk += -walk * fresh / left + sds * math.sqrt(
            fresh * (1.0 - fresh / left)
        ) * rng.normal(size=walk.size)
        count += fresh
        if count == size:
            break  # the rest is decided by all rows
        means = deltas + walk / count
        scale = sds * math.sqrt((1.0 - count / size) / count)
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = np.abs(means - levels) / scale
        dof = (count - 1.0) * size / (size - count)
        stop = normal_deviate(distance, dof, np) > _quantile(epsilon)
        wrong += int(((means >= levels) != right)[stop].sum())
        keep = ~stop
        deltas, sds, levels, right, walk = (
            x[keep] for x in (deltas, sds, levels, right, walk)
        )
        if not walk.size:
            break
    return wrong / 4000


def confidence(
    delta: float = 0.01,
    *,
    bound: Bound | None = None,
    p: float = 2.0,
    inequality: Literal["bernstein", "serfling"] = "bernstein",
) -> AcceptanceTest:
    r"""Build the confidence test of Bardenet et al.

    The uniform number ``u`` is drawn first, which sets a threshold for the mean of the
    rows' differences in log likelihood. The :math:`k`-th look, at :math:`t` rows with
    standard deviation :math:`\sigma`, stops the reading if their mean is further from
    the threshold than

    .. math:: \sigma \sqrt{2 \log(3 / \delta_k) / t} + 6 C \log(3 / \delta_k) / t,
       \qquad \delta_k = \frac{p - 1}{p k^p} \delta,

    where no row's difference is larger than :math:`C`. The bound holds at all looks
    with probability :math:`1 - \delta`, whatever the distribution of the rows, so that
    at most a fraction :math:`\delta` of the decisions is wrong. The test often reads
    nearly all rows, because :math:`C` is large. It needs a batch that grows:
    ``batch.growing(100, factor=2.0)``.

    With several data plates the half-widths add, and each has its part of ``delta``.

    :param delta: allowed fraction of wrong decisions, above 0 and below 1.
    :param bound: ``bound(z, z_new)``: the largest ``|log_likelihood(z_new) -
        log_likelihood(z)|`` of any row, at temperature 1. It gets two unconstrained
        positions as the model has them (for a model a dict by site), and returns one
        number for all plates or a dict ``{plate: number}``. With control variates it
        bounds the differences of the residuals. See :func:`logistic_bound`. If rows
        exceed the bound, all rows are read.
    :param p: the power by which ``delta`` is divided among the looks, above 1.
    :param inequality: ``"bernstein"``, the empirical Bernstein bound [1]; or
        ``"serfling"``, the empirical Bernstein-Serfling bound [3], which gets narrower
        as few rows are left: ``(7 / 3 + 3 / sqrt(2)) 2 C`` in place of ``6 C``,
        ``log(5 / delta_k)``, and a factor of about ``1 - t / N`` in the root.
    :raises TypeError: if ``bound`` is missing or not a function, or ``delta`` is not a
        number.
    :raises ValueError: if a number is out of range.

    **References:**

    1. Bardenet, R., Doucet, A. and Holmes, C. (2014). Towards scaling up Markov chain
       Monte Carlo: an adaptive subsampling approach.
    2. Bardenet, R., Doucet, A. and Holmes, C. (2017). On Markov chain Monte Carlo
       methods for tall data.
    3. Bardenet, R. and Maillard, O.-A. (2015). Concentration inequalities for sampling
       without replacement.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch import MinibatchMH, accept, batch
        >>> x = np.ones((1000, 2))
        >>> def model(x, y): ...
        >>> kernel = MinibatchMH(
        ...     model,
        ...     batch=batch.growing(100, factor=2.0),
        ...     acceptance=accept.confidence(bound=accept.logistic_bound(x)),
        ... )
    """
    if bound is None:
        raise TypeError(
            "confidence needs bound=, a function bound(z, z_new) of two unconstrained "
            "positions that bounds |log_likelihood(z_new) - log_likelihood(z)| of "
            "every row. Write bound=accept.logistic_bound(x) for a logistic "
            "regression, or accept.austerity(), which needs no bound."
        )
    return Confidence(bound, delta, p, inequality)


def logistic_bound(
    x: ArrayLike, coefficients: Callable[[Any], Any] | None = None
) -> Bound:
    """Bound the change of a row's log likelihood in a logistic regression.

    The log likelihood of a row changes by at most as much as its logit, and so by at
    most ``|b_new - b| * max_i |x_i|``.

    :param x: the covariates, shape ``(N, D)``, with a column of ones if there is an
        intercept. Read once.
    :param coefficients: from a position to the coefficients of ``x``, in any form, such
        as ``lambda z: z["beta"]``; by default all coordinates of the position. The
        default is right if these are the coefficients themselves, and gives a bound
        larger than needed if there are others.
    :raises ValueError: if ``x`` is not a finite matrix.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_minibatch.accept import logistic_bound
        >>> bound = logistic_bound(np.array([[3.0, 4.0], [1.0, 0.0]]))
        >>> float(bound({"beta": np.zeros(2)}, {"beta": np.array([0.0, 2.0])}))
        10.0
    """
    rows = np.asarray(x)
    if rows.ndim != 2 or rows.dtype.kind not in "biuf":
        raise ValueError(
            "logistic_bound(x) takes the matrix of covariates, one row for each row of "
            f"data, got an array of shape {rows.shape} and dtype {rows.dtype}."
        )
    radius = math.sqrt(np.square(rows, dtype=np.float64).sum(-1).max(initial=0.0))
    if not math.isfinite(radius):
        raise ValueError(
            "logistic_bound(x): the covariates are not all finite, so nothing bounds "
            "the log likelihood of a row."
        )
    return LogisticBound(radius, coefficients)
