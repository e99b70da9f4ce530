"""Observations outside of the support of their distribution are named early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_minibatch import AMAGOLD, MINT, MinibatchMH, batch, marginalize
from numpyro_minibatch._model.support import check_support
from numpyro_minibatch.target import ModelTarget

N = 40


def shifted(shift: Any, y: Any) -> None:
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + shift[idx])), obs=y[idx])


def counts(shift: Any, y: Any) -> None:
    rate = numpyro.sample("rate", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y), subsample_size=10) as idx:
        numpyro.sample("y", dist.Poisson(jnp.exp(rate + shift[idx])), obs=y[idx])


def without_plate(shift: Any, y: Any) -> None:
    rate = numpyro.sample("rate", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Poisson(jnp.exp(rate + shift)), obs=y)


def real(shift: Any, y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean + shift, 1.0), obs=y)


_compiled: list[str] = []


def _listen(event: str, duration: float, **details: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(str(details.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_listen)

SETTINGS: dict[str, Callable] = {
    "control variate": lambda model: MinibatchMH(
        model, control_variate="taylor2", batch=batch.full()
    ),
    "none": lambda model: MinibatchMH(model, batch_size=20, temperature=5.0),
    "gradients": lambda model: AMAGOLD(model),
}


@pytest.mark.parametrize("kernel", SETTINGS)
@pytest.mark.parametrize(
    "model", [counts, without_plate, marginalize(shifted)], ids=lambda m: str(m)[:20]
)
def test_observations_outside_of_a_support_are_named_first(
    model: Callable, kernel: str
) -> None:
    """Before the programs of the kernel are compiled, one of these sites is."""
    y = np.ones(N, np.float32)
    y[[9, 30]] = -1
    mcmc = MCMC(
        SETTINGS[kernel](model), num_warmup=1, num_samples=1, progress_bar=False
    )
    _compiled.clear()
    message = r"rows \[9, 30\]\) is not finite .*'y' are outside of the support"
    with pytest.raises(ValueError, match=message):
        mcmc.run(jax.random.key(0), np.zeros(N, np.float32), y)
    assert sum("everywhere" in name for name in _compiled) <= 1
    assert not any("start" in name or "deriv" in name for name in _compiled)


def test_nan_among_the_observations_is_called_nan() -> None:
    y = np.ones(N, np.float32)
    y[[9, 30]] = np.nan
    mcmc = MCMC(MINT(real, batch_size=20, temperature=5.0), num_warmup=1, num_samples=1)
    message = r"rows \[9, 30\]\) .*'y' are NaN \(args\[1\]: 2 of 40 values\)"
    with pytest.raises(ValueError, match=message):
        mcmc.run(jax.random.key(0), np.zeros(N, np.float32), y)


def bounded(y: Any, mask: Any = True, half: float = 1.0, fixed: bool = True) -> None:
    """A support that depends on the latent variable, or on none."""
    s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", len(y)) as idx, handlers.mask(mask=mask):
        a = numpyro.sample("a", dist.Normal(0.0, s))
        if fixed:
            of_y = dist.Gamma(jnp.exp(a), 1.0)
        else:
            of_y = dist.Uniform(a - half, a + half)
        numpyro.sample("y", of_y, obs=y[idx])


class Everywhere(dist.Poisson):
    """A distribution that is finite outside of its support."""

    def log_prob(self, value: Any) -> Any:
        return -0.5 * (value - self.rate) ** 2


def finite(y: Any) -> None:
    with numpyro.plate("data", len(y)) as idx:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", Everywhere(jnp.exp(a)), obs=y[idx])


@pytest.mark.parametrize("prepare", [marginalize, lambda model: model])
def test_only_observations_that_are_finite_nowhere_are_refused(
    prepare: Callable,
) -> None:
    def check(model: Callable, *args: Any, **kwargs: Any) -> None:
        sizes = {"data": len(args[-1])}
        check_support(
            "MINT",
            ModelTarget(model=prepare(model), args=args, kwargs=kwargs, sizes=sizes),
        )

    zeros, y = np.zeros(4, np.float32), np.array([1.0, 2.0, -1.0, 3.0])
    for value in (y, jnp.asarray(y)):
        with pytest.raises(ValueError, match=r"rows \[2\]\) is not finite"):
            check(shifted, zeros, value)
        with pytest.raises(ValueError, match=r"rows \[2\]\) is not finite"):
            check(bounded, value)
    check(finite, y)
    check(bounded, y, mask=np.array([True, True, False, True]))
    check(bounded, y + 40.0, fixed=False)  # infinite at the start, not elsewhere
    check(bounded, np.abs(y))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_with_covariates_that_are_not_numbers_are_named_first(
    value: float,
) -> None:
    """Before a program with the integrals of the rows is compiled."""
    y, shift = np.ones(N, np.float32), np.zeros(N, np.float32)
    shift[[3, 17]] = value
    kernel = MinibatchMH(marginalize(shifted), control_variate="taylor2", batch_size=20)
    before = len(_compiled)
    with pytest.raises(ValueError, match=r"rows \[3, 17\].*args\[0\]: 2 of 40 values"):
        kernel.init(jax.random.key(0), 10, None, (shift, y), {})
    assert not {"_every", "_derivatives"} & set(map(str, _compiled[before:]))
    assert len(_compiled) - before < 5


def test_covariates_that_are_not_numbers_are_accepted_where_they_do_not_matter() -> (
    None
):
    def masked(shift: Any, y: Any, mask: Any) -> None:
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", len(y)) as idx, handlers.mask(mask=mask[idx]):
            a = numpyro.sample("a", dist.Normal(0.0, s))
            numpyro.sample("y", dist.Poisson(jnp.exp(a + shift[idx])), obs=y[idx])

    y, shift = np.ones(4, np.float32), np.array([0.0, np.nan, 0.0, 0.0], np.float32)

    def check(mask: Any) -> None:
        args = shift, y, np.array(mask)
        target = ModelTarget(model=marginalize(masked), args=args, sizes={"data": 4})
        check_support("MINT", target)

    check([True, False, True, True])
    with pytest.raises(ValueError, match=r"rows \[1\]\) is not finite"):
        check([True, True, True, True])
