"""The sequential tests: decisions against the papers, distributions, rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from scipy import stats

from numpyro_minibatch import (
    AusterityMH,
    ConfidenceMH,
    MinibatchMH,
    Target,
    accept,
    batch,
    estimate,
    proposal,
)
from numpyro_minibatch.accept import _sequential
from numpyro_minibatch.estimate import Reader, Weights

pytestmark = pytest.mark.x64  # in double precision, too

slow = pytest.mark.slow


# decisions, against the papers' pseudo code -------------------------------------------


def austerity_by_the_paper(rows, mu0, epsilon, m):
    """Korattikara et al., Algorithm 1: accept, rows, and the last two p-values."""
    size = len(rows)
    n, tails = 0, [1.0]
    while True:
        n = min(n + m, size)
        mean, square = rows[:n].mean(), (rows[:n] ** 2).mean()
        s = np.sqrt((square - mean**2) * n / (n - 1) / n * (1 - (n - 1) / (size - 1)))
        if n == size:
            return mean > mu0, n, tails
        tails.append(stats.t.sf(abs(mean - mu0) / s, n - 1))
        if tails[-1] < epsilon:
            return mean > mu0, n, tails


def confidence_by_the_paper(rows, psi, delta, c, b, gamma=2.0, p=2.0):
    """Bardenet et al., MHSubLhd with the empirical Bernstein bound."""
    size, t, look, margins = len(rows), 0, 0, [np.inf]
    while True:
        t, look = b, look + 1
        mean = rows[:t].mean()
        delta_look = (p - 1) / (p * look**p) * delta
        log_term = np.log(3 / delta_look)
        width = rows[:t].std() * np.sqrt(2 * log_term / t) + 6 * c * log_term / t
        b = min(size, int(np.ceil(gamma * t)))
        if t == size:
            return mean > psi, t, margins
        margins.append(abs(mean - psi) / width)
        if margins[-1] >= 1:
            return mean > psi, t, margins


SIZE = 1013  # a prime: no slice divides it


def looks(test, scheme, values, temperature, keys, log_q_ratio=0.3, step=1.0):
    """Decisions on the move from 0 to ``step`` where row i gains ``step * values[i]``.

    The prior's log ratio is -0.2.
    """
    target = Target(
        lambda z: -0.2 * z[0],
        lambda z, i: jnp.where(z[0] == 0, 0.0, values[i] * z[0]),
        len(values),
    )
    plates = target.plates
    weights = Weights(likelihood=1 / temperature)
    reader = Reader(target.terms, plates, scheme.bound(scheme.widths, plates), weights)
    z, z_new = jnp.zeros(1), jnp.full(1, step)

    @jax.jit
    @jax.vmap
    def decide(key):
        key_rows, key_accept = random.split(key)
        rule = test.rule(key_accept, log_q_ratio, (z, z_new))
        seen = estimate.shared().compare(
            reader, key_rows, z, z_new, (), test.max_variance, rule
        )
        decision = test(key_accept, seen.log_ratio + log_q_ratio)
        # the scheme's order of the rows: slices of the first of two streams
        stream, _ = random.split(key_rows)
        width = scheme.widths["data"]
        starts = jnp.arange(0, SIZE, width)
        order = jax.vmap(
            lambda start: scheme.rows_at(stream, start + jnp.arange(width), SIZE)
        )(starts).ravel()[:SIZE]
        level = jnp.log1p(-random.uniform(key_accept, (), seen.log_ratio.value.dtype))
        reliable = decision.reliable & seen.reliable
        return decision.accept, seen.num_rows, reliable, order, level

    return [np.asarray(x) for x in decide(keys)]


def as_growing(width, factor=None):
    return batch.growing({"data": width}, factor)


def gains(spread, shift):
    """Differences in log likelihood, some of which decide early and some late."""
    rng = np.random.default_rng(3)
    return np.asarray(spread * rng.normal(size=SIZE) + shift, np.float32)


@pytest.mark.parametrize("temperature, epsilon", [(1.0, 0.005), (7.0, 0.05)])
def test_austerity_decides_like_the_paper(temperature, epsilon):
    values = gains(0.05 * temperature, -0.001 * temperature)
    keys = random.split(random.key(1), 400)
    accepted, num_rows, reliable, order, level = looks(
        accept.austerity(epsilon),
        as_growing(50),
        jnp.asarray(values),
        temperature,
        keys,
    )
    assert all(sorted(rows) == list(range(SIZE)) for rows in order[:20].tolist())
    same = 0
    for i in range(len(keys)):
        # mu0 = (log u - log prior ratio - log q ratio) / N, in tempered units
        mu0 = (level[i] + 0.2 - 0.3) / SIZE
        rows = values[order[i]].astype(np.float64) / temperature
        taken, n, tails = austerity_by_the_paper(rows, mu0, epsilon, 50)
        if n == num_rows[i]:
            assert taken == accepted[i]
            same += 1
        else:
            # the factor (N - n) / (N - 1) for (N - n) / N, and the degrees of freedom,
            # move a p-value by some percent, and so some that are close to epsilon
            assert min(abs(np.log(np.array(tails) / epsilon))) < 0.15
    assert same > 0.95 * len(keys)
    assert reliable.all()
    # early, late and all rows
    assert (num_rows == 50).any() and (num_rows >= 1000).any()
    assert len(set(num_rows.tolist())) > 5
    assert set((num_rows[num_rows < SIZE] % 50).tolist()) == {0}


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=slow), 7.0])
def test_confidence_decides_like_the_paper(temperature):
    values = gains(0.002 * temperature, -0.002 * temperature)
    largest = float(np.abs(values).max())
    test = accept.confidence(
        0.1, bound=lambda z, z_new: largest * jnp.abs(z_new - z)[0]
    )
    keys = random.split(random.key(2), 400)
    accepted, num_rows, reliable, order, level = looks(
        test, as_growing(60, 1.5), jnp.asarray(values), temperature, keys
    )
    for i in range(len(keys)):
        psi = (level[i] + 0.2 - 0.3) / SIZE
        rows = values[order[i]].astype(np.float64) / temperature
        taken, n, margins = confidence_by_the_paper(
            rows, psi, 0.1, largest / temperature, 60, 1.5
        )
        close = min(abs(np.log(margins))) < 1e-3
        assert (n == num_rows[i] and taken == accepted[i]) or close
    assert reliable.all()
    assert (num_rows < SIZE).any() and (num_rows == SIZE).any()
    assert set(num_rows.tolist()) <= {60, 90, 135, 203, 305, 458, 687, SIZE}


def test_the_comparison_can_fail():
    """A test at another level does not decide like the paper's."""
    values = gains(0.05, -0.001)
    keys = random.split(random.key(1), 200)
    _, num_rows, _, order, level = looks(
        accept.austerity(0.05), as_growing(50), jnp.asarray(values), 1.0, keys
    )
    wrong = [
        austerity_by_the_paper(values[order[i]], (level[i] - 1.0) / SIZE, 0.05, 50)[1]
        for i in range(len(keys))
    ]
    assert (np.array(wrong) == num_rows).mean() < 0.8


def test_serfling_and_bernstein_hold_the_mean():
    """The bounds hold with at least the stated probability, at every look."""
    rng = np.random.default_rng(0)
    rows = rng.exponential(size=400)
    rows -= rows.mean()
    largest = np.abs(rows).max()
    orders = np.argsort(rng.random((2000, 400)))
    for inequality in ("bernstein", "serfling"):
        test = accept.confidence(0.1, bound=max, inequality=inequality)
        for t in (20, 100, 300, 399):
            seen = rows[orders[:, :t]]
            half = test._half_width(
                seen.std(-1), largest, jnp.float32(t), 400, -np.log(0.1)
            )
            assert (np.abs(seen.mean(-1)) > half).mean() < 0.1
    # and the second bound is narrower near the end
    ends = [
        accept.confidence(0.1, bound=max, inequality=name)._half_width(
            1.0, 1e-3, jnp.float32(399), 400, -np.log(0.1)
        )
        for name in ("bernstein", "serfling")
    ]
    assert ends[1] < 0.5 * ends[0]


@pytest.mark.slow
def test_rows_that_break_the_bound_are_all_read():
    values = jnp.asarray(gains(0.002, -0.01))
    keys = random.split(random.key(5), 50)
    bound = float(jnp.abs(values).max())
    fractions = {}
    for share in (1.0, 0.3):  # right, and below the root mean square
        test = accept.confidence(0.1, bound=lambda z, w, c=share * bound: c)
        _, num_rows, reliable, *_ = looks(test, as_growing(60, 2.0), values, 1.0, keys)
        fractions[share] = (num_rows == SIZE).mean()
        assert reliable.all()
    assert fractions[1.0] < 0.5 and fractions[0.3] == 1.0


@pytest.mark.parametrize(
    "test", [accept.austerity(), accept.confidence(bound=lambda z, z_new: 1e3)]
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_an_impossible_row_is_a_rejection(test, value):
    """The decision is immediate, whatever the bound, without more rows."""
    values = jnp.full(SIZE, value)
    keys = random.split(random.key(6), 20)
    accepted, num_rows, reliable, *_ = looks(test, as_growing(60), values, 1.0, keys)
    assert not accepted.any()
    assert (num_rows == 60).all()
    assert reliable.all() == (value == -np.inf)


def test_equal_rows_decide_when_there_are_ten():
    """Rows without scatter decide at once, as in the paper, but only ten or more."""
    values = jnp.full(SIZE, -0.5)
    keys = random.split(random.key(6), 20)
    accepted, num_rows, *_ = looks(
        accept.austerity(), as_growing(4), values, 1.0, keys, log_q_ratio=0.0
    )
    assert (num_rows == 12).all() and not accepted.any()


@pytest.mark.parametrize("dof", [9.0, 19.0, 99.0, 1e6])
def test_the_t_distribution(dof):
    tail = np.array([0.3, 0.05, 0.005, 1e-4, 1e-5])
    t = jnp.asarray(stats.t.isf(tail, dof), jnp.float32)
    deviate = np.asarray(_sequential.normal_deviate(t, jnp.float32(dof)), np.float64)
    np.testing.assert_allclose(stats.norm.sf(deviate), tail, rtol=1e-5)


def test_average_epsilon():
    """The share of wrong decisions, of the paper's test on real rows."""
    rng = np.random.default_rng(7)
    size, m, error = 3000, 100, 0.02
    deltas = rng.uniform(-4, 1, 60)
    sds = np.full(60, 12.0)
    epsilon = accept.average_epsilon(error, deltas, sds, size=size, batch_size=m)
    assert error < epsilon < 0.4  # decisions err less often than looks
    wrong = 0
    for i in range(3000):
        rows = rng.normal(size=size)
        rows = (rows - rows.mean()) / rows.std()
        delta = deltas[i % 60]
        rows = (delta + 12.0 * rows) / size
        mu0 = np.log(rng.random()) / size
        taken, *_ = austerity_by_the_paper(rows, mu0, epsilon, m)
        wrong += taken != (delta > mu0 * size)
    # both the search and this count use some thousand decisions and steps of 10%
    se = np.sqrt(error * (1 / 4000 + 1 / 3000))
    assert abs(wrong / 3000 - error) < 5 * se + 0.1 * error


def test_logistic_bound():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(500, 3)) * [1.0, 5.0, 0.1]
    y = rng.integers(0, 2, 500)
    bound = accept.logistic_bound(x, lambda z: z["scale"] * z["raw"])

    def rows(z):
        logits = jnp.asarray(x) @ (z["scale"] * z["raw"])
        return np.asarray(dist.Bernoulli(logits=logits).log_prob(y))

    nearest = 0.0
    for _ in range(200):
        z, z_new = (
            {"raw": rng.normal(size=3), "scale": np.exp(rng.normal())} for _ in "ab"
        )
        change = np.abs(rows(z_new) - rows(z)).max()
        assert change <= bound(z, z_new) * (1 + 1e-5)
        nearest = max(nearest, change / float(bound(z, z_new)))
    assert nearest > 0.9  # it is a tight bound
    # by value, so that kernels are equal and a compiled step is found again
    assert accept.logistic_bound(x) == accept.logistic_bound(x.copy())
    assert hash(accept.logistic_bound(x)) == hash(accept.logistic_bound(x.copy()))


# distributions ------------------------------------------------------------------------

N, D, M, SIGMA, PRIOR_SD = 1003, 3, 100, 1.5, 2.0
_rng = np.random.default_rng(5)
X = _rng.normal(size=(N, D)) @ np.array([[1.0, 0.6, 0.0], [0, 1, 0.3], [0, 0, 0.5]])
Y = X @ np.array([1.0, -0.5, 2.0]) + SIGMA * _rng.normal(size=N)
DATA = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
FIXED = dict(adapt_step_size=False, adapt_mass_matrix=False)


def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, PRIOR_SD).expand([D]).to_event(1))
    with numpyro.plate("data", N, subsample_size=M) as idx:
        numpyro.sample("obs", dist.Normal(x[idx] @ beta, SIGMA), obs=y[idx])


def split_model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, PRIOR_SD).expand([D]).to_event(1))
    with numpyro.plate("first", 600, subsample_size=70) as i:
        numpyro.sample("a", dist.Normal(x[i] @ beta, SIGMA), obs=y[i])
    with numpyro.plate("second", 403, subsample_size=41) as j:
        numpyro.sample("b", dist.Normal(x[600 + j] @ beta, SIGMA), obs=y[600 + j])


def largest_change(z, z_new):
    """The bound for any row, computed from all rows, as in the papers' experiments."""
    x, y = DATA
    step = x @ (z_new["beta"] - z["beta"])
    both = x @ (z_new["beta"] + z["beta"])
    return jnp.abs(step * (2 * y - both)).max() / (2 * SIGMA**2)


def mode():
    """The centre of the control variates' expansion of a quadratic log density."""
    precision = X.T @ X / SIGMA**2 + np.eye(D) / PRIOR_SD**2
    return jnp.asarray(np.linalg.solve(precision, X.T @ Y / SIGMA**2))


def largest_change_of_residuals(z, z_new):
    """The bound for a row minus its tangent at the mode."""
    x, center = DATA[0], mode()
    size = [jnp.square(x @ (at["beta"] - center)) for at in (z, z_new)]
    return jnp.abs(size[1] - size[0]).max() / (2 * SIGMA**2)


def by_plate(z, z_new):
    return dict.fromkeys(("first", "second"), largest_change(z, z_new))


def z_scores(kernel, temperature, num_samples=200, num_chains=128):
    """Standardised errors of means and second moments; chains start in the target."""
    precision = X.T @ X / SIGMA**2 / temperature + np.eye(D) / PRIOR_SD**2
    cov = np.linalg.inv(precision)
    mean = cov @ (X.T @ Y) / SIGMA**2 / temperature
    start = np.random.default_rng(11).multivariate_normal(mean, cov, num_chains)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    init = {"beta": jnp.asarray(start, jnp.result_type(float))}
    mcmc.run(random.key(12), *DATA, init_params=init)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], np.float64)
    white = (draws - mean) @ np.linalg.inv(np.linalg.cholesky(cov)).T
    i, j = np.triu_indices(D)
    second = white[..., i] * white[..., j] - (i == j)
    moments = np.concatenate([white, second], axis=-1).mean(1)
    z = moments.mean(0) / (moments.std(0, ddof=1) / np.sqrt(num_chains))
    return z, mcmc.get_extra_fields()


RIGHT = {
    "austerity": AusterityMH(
        model, epsilon=1e-4, temperature=20.0, step_size=0.15, **FIXED
    ),
    "austerity, T=1": AusterityMH(
        model, epsilon=1e-4, step_size=0.035, batch_size=200, **FIXED
    ),
    "austerity, two plates": AusterityMH(
        split_model, epsilon=1e-4, temperature=20.0, step_size=0.15, **FIXED
    ),
    # rows are residuals, here quadratic ones: some decisions need few, some need all
    "austerity, control variate": AusterityMH(
        model,
        control_variate="taylor1",
        proposal=proposal.random_walk(),
        epsilon=1e-4,
        step_size=0.8,
        **FIXED,
    ),
    "austerity that grows geometrically": MinibatchMH(
        model,
        batch=batch.growing(M, factor=1.7),
        acceptance=accept.austerity(1e-4),
        temperature=20.0,
        step_size=0.15,
        **FIXED,
    ),
    "confidence": ConfidenceMH(
        model, bound=largest_change, temperature=20.0, step_size=0.15, **FIXED
    ),
    "confidence, control variate": ConfidenceMH(
        model,
        control_variate="taylor1",
        proposal=proposal.random_walk(),
        bound=largest_change_of_residuals,
        step_size=0.8,
        **FIXED,
    ),
    "confidence, two plates": ConfidenceMH(
        split_model,
        bound=by_plate,
        temperature=20.0,
        step_size=0.15,
        delta=0.1,
        inequality="serfling",
        num_steps=2,
        **FIXED,
    ),
}


QUICK = ("austerity", "confidence")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=slow) for n in RIGHT]
)
def test_distribution(name):
    """With few errors allowed, the distribution is exact up to Monte Carlo error."""
    kernel = RIGHT[name]
    z, extra = z_scores(kernel, kernel.temperature)
    assert np.abs(z).max() < 5.0, z
    assert (extra["reliable"] == 1).all() and not extra["diverging"].any()
    rows = np.asarray(extra["num_rows"]) / kernel.num_steps
    assert rows.max() <= N and rows.min() >= M
    all_read = np.asarray(extra["num_rows"]) == N * kernel.num_steps
    assert all_read.any()
    if "austerity" in name:
        assert not all_read.all()  # it does stop before the end
    variance = np.asarray(extra["log_ratio_variance"])
    if kernel.num_steps == 1:
        assert ((variance == 0) == all_read).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature, step_size", [(1.0, 0.035), pytest.param(20.0, 0.15, marks=slow)]
)
def test_too_many_errors_are_noticed(temperature, step_size):
    """At a p-value of 0.3, hasty decisions flatten the target, and the check detects
    it."""
    kernel = AusterityMH(
        model,
        epsilon=0.3,
        batch_size=20,
        temperature=temperature,
        step_size=step_size,
        **FIXED,
    )
    z, extra = z_scores(kernel, temperature)
    assert z.max() > 8
    # the chain does not show it, because the test made these decisions as designed
    assert (extra["reliable"] == 1).all()


def test_rows_of_unknown_plates_are_refused():
    kernel = ConfidenceMH(split_model, bound=lambda z, z_new: {"first": 1.0})
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(
        ValueError, match=r"bounds for \['first'\], but the data plates"
    ):
        mcmc.run(random.key(0), *DATA)


def test_a_bound_for_each_row_is_refused():
    kernel = ConfidenceMH(model, bound=lambda z, z_new: jnp.zeros(N))
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match=r"must return one number.*\(1003,\)"):
        mcmc.run(random.key(0), *DATA)


def test_a_batch_of_all_rows_is_exact():
    kernel = AusterityMH(model, batch_size=N, temperature=20.0)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=10, progress_bar=False)
    mcmc.run(random.key(0), *DATA)
    extra = mcmc.get_extra_fields()
    assert (extra["num_rows"] == N).all() and (extra["reliable"] == 1).all()
    assert (extra["log_ratio_variance"] == 0).all()
