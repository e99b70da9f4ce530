"""The reference posterior: moments with their own Monte Carlo error.

Everything here is in double precision and reads all rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC, NUTS
from scipy.stats import genpareto

from .flat import Flat
from .laplace import summed

Arrays = tuple[np.ndarray, ...]


class Reference(NamedTuple):
    """Moments of the reported quantities.

    :param how: a description of the method.
    :param mean: posterior means.
    :param sd: posterior standard deviations.
    :param mcse: Monte Carlo standard errors of the means, in the same units.
    :param mcse_sd: Monte Carlo standard errors of the standard deviations.
    :param ess: the smallest effective sample size.
    """

    how: str
    mean: np.ndarray
    sd: np.ndarray
    mcse: np.ndarray
    mcse_sd: np.ndarray
    ess: float

    def errors(self) -> tuple[float, float]:
        """The largest errors, in standard deviations: of means, and of those."""
        return float((self.mcse / self.sd).max()), float((self.mcse_sd / self.sd).max())


def importance(
    flat: Flat,
    args: Arrays,
    center: np.ndarray,
    root: np.ndarray,
    report: Callable[[Array], Array],
    num_draws: int,
) -> Reference | None:
    """Importance sampling from the normal approximation; None if it is too coarse.

    Only the difference from the approximation is estimated, because its own moments are
    known nearly exactly: the error is that of ``(weight - 1) * quantity``.
    """
    rng, prior_rows = np.random.default_rng(1), tuple(arg[:1] for arg in args)
    half = rng.standard_normal((num_draws // 2, flat.size))
    w = np.concatenate([half, -half])
    block = max(2, min(256, num_draws))
    prior = jax.jit(jax.vmap(lambda z: flat.terms(z, *prior_rows)[0]))
    rows = jax.jit(lambda z, *a: jax.vmap(lambda z: flat.terms(z, *a)[1].sum())(z))
    log_weights = []
    for start in range(0, num_draws, block):
        z = center + w[start : start + block] @ root.T
        total = prior(z) + summed(lambda *a, z=z: rows(z, *a), args)
        log_weights.append(np.asarray(total))
    log_weight = np.concatenate(log_weights) + 0.5 * (w**2).sum(1)
    log_weight -= log_weight.max()
    weight = np.exp(log_weight) / np.exp(log_weight).mean()
    khat, ess = pareto_shape(weight), num_draws / (weight**2).mean()
    print(f"importance sampling: k-hat {khat:.2f}, ESS {ess:.0f} of {num_draws}")
    if khat > 0.5 or ess < 0.3 * num_draws:
        return None
    many = rng.standard_normal((200_000, flat.size))
    fn = jax.jit(jax.vmap(report))
    exact = np.concatenate([fn(center + s * many @ root.T) for s in (1, -1)])
    mean, variance = exact.mean(0), exact.var(0)
    off = np.asarray(fn(center + w @ root.T)) - mean
    excess = (weight - 1)[:, None]
    shift = (excess * off).mean(0)
    squares = excess * (off**2 - variance)
    sd = (variance + squares.mean(0) - shift**2) ** 0.5
    mcse = (excess * off).std(0) / num_draws**0.5
    mcse_sd = squares.std(0) / num_draws**0.5 / (2 * sd)
    how = f"importance sampling from the Laplace approximation, k-hat {khat:.2f}"
    return Reference(how, mean + shift, sd, mcse, mcse_sd, float(ess))


def pareto_shape(weight: np.ndarray) -> float:
    """The shape of the generalised Pareto distribution of the largest weights."""
    count = int(min(0.2 * len(weight), 3 * len(weight) ** 0.5))
    top = np.sort(weight)[-count - 1 :]
    return float(genpareto.fit(top[1:] - top[0], floc=0)[0])


def hmc(
    flat: Flat,
    args: Arrays,
    center: np.ndarray,
    root: np.ndarray,
    report: Callable[[Array], Array],
    seconds: float,
    num_chains: int = 64,
) -> Reference:
    """Hamiltonian Monte Carlo in whitened coordinates, many chains at once."""
    data = tuple(jnp.asarray(arg) for arg in args)
    step_size = 0.6 / flat.size**0.25

    def density(w: Array, data: Any) -> tuple[Array, Array]:
        each = jax.vmap(lambda w: flat.log_density(center + root @ w, *data))(w)
        return each.sum(), each

    slope = jax.value_and_grad(density, has_aux=True)

    @jax.jit
    def step(carry: Any, key: Array, data: Any) -> Any:
        w, value, gradient = carry
        momentum_key, step_key, count_key, accept_key = random.split(key, 4)
        momentum = random.normal(momentum_key, w.shape)
        eps = step_size * random.uniform(step_key, minval=0.8, maxval=1.2)
        low, high = int(1.0 / step_size), int(2.0 / step_size) + 1
        count = random.randint(count_key, (), low, high)

        def leap(_: int, s: Any) -> Any:
            x, p, _, g = s
            p = p + 0.5 * eps * g
            x = x + eps * p
            (_, v), g = slope(x, data)
            return x, p + 0.5 * eps * g, v, g

        moved = jax.lax.fori_loop(0, count, leap, (w, momentum, value, gradient))
        kinetic = 0.5 * (moved[1] ** 2 - momentum**2).sum(1)
        accept = jnp.log(random.uniform(accept_key, value.shape)) < (
            moved[2] - value - kinetic
        )
        new = (moved[0], moved[2], moved[3])
        pick = jax.vmap(jnp.where)
        return tuple(pick(accept, a, b) for a, b in zip(new, carry, strict=True))

    w = random.normal(random.PRNGKey(3), (num_chains, flat.size))
    (_, value), gradient = jax.jit(slope)(w, data)
    carry, draws, start = (w, value, gradient), [], time.perf_counter()
    for i in range(2000):
        carry = step(carry, random.fold_in(random.PRNGKey(4), i), data)
        if i >= 20:
            draws.append(np.asarray(carry[0]))
        if i > 100 and time.perf_counter() - start > seconds:
            break
    z = center + np.stack(draws, 1) @ root.T
    quantities = np.asarray(jax.jit(jax.vmap(jax.vmap(report)))(z))
    return _moments(f"HMC, {num_chains} chains", quantities)


def nuts(
    model: Callable[..., Any], args: Arrays, num_draws: int = 20_000
) -> dict[str, np.ndarray]:
    """Four chains of a long NUTS run: the sites' values, ``(4, draws, ...)``."""
    kernel = NUTS(model, dense_mass=True, target_accept_prob=0.9)
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=num_draws,
        num_chains=4,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.PRNGKey(5), *args)
    return {k: np.asarray(v) for k, v in mcmc.get_samples(True).items()}


def _moments(how: str, draws: np.ndarray) -> Reference:
    """The moments of ``draws``, shape ``(chains, draws, quantities)``."""
    ess = [float(az.ess(draws[..., j], method="mean")) for j in range(draws.shape[2])]
    spread = [float(az.mcse(draws[..., j], method="sd")) for j in range(len(ess))]
    mean, sd = draws.mean((0, 1)), draws.std((0, 1))
    return Reference(how, mean, sd, sd / np.sqrt(ess), np.array(spread), min(ess))


def from_draws(sites: dict[str, np.ndarray], names: tuple[str, ...]) -> Reference:
    """The reference from a long NUTS run."""
    parts = [sites[n].reshape(*sites[n].shape[:2], -1) for n in names]
    return _moments("NUTS, 4 chains", np.concatenate(parts, 2))
