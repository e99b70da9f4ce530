"""The costs of a minibatch kernel and of NUTS, estimated before a run."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro.infer.mcmc import MCMCKernel

from numpyro_minibatch._internal.checks import check_count, check_flag, describe
from numpyro_minibatch._internal.progress import shown
from numpyro_minibatch.control_variate._expand import Expansions
from numpyro_minibatch.host_rows import find_rows
from numpyro_minibatch.kernels import MinibatchMH
from numpyro_minibatch.recommendation import _gradient
from numpyro_minibatch.recommendation._gradient import (
    Gradient,
    discrete_latents,
    measure_gradient,
)
from numpyro_minibatch.recommendation._nuts import of_run
from numpyro_minibatch.recommendation._result import Cost, Recommendation

__all__ = ["recommend"]

_NUTS_WARMUP = 1000  # draws, NumPyro's usual number
# A minibatch kernel is recommended if it needs less than this share of NUTS's time. A
# smaller difference is within the error of the estimates.
_CLEARLY = 0.5

# Calibrated by benchmarks/recommend.py on a CPU. The compilation of a sampler is in
# units of the compilation of a line of the gradient's program, which measures the
# machine.
_LINES_OF_OURS = 1000, 6.0  # of the driver's loop, and per line of the gradient
_LINES_OF_NUTS = 3900, 6.0
_OVERHEAD = 5e-6  # seconds of a gradient of NUTS in addition to the rows
_STEP = 20e-6  # seconds of a step of vectorised chains without rows
_ROW = 4.0  # gradients of a row in a long pass that a row of a batch costs
_LEAPFROG = 2e-6  # seconds of a step on the surrogate, and per number of its matrix
_NUMBER = 1e-9
# Effective draws, relative to independent proposals: over-relaxed moves on a normal
# surrogate give more of a mean, and trajectories on another one fewer.
_OVER_RELAXED, _NOT_NORMAL = 1.5, 0.3


def recommend(
    model: Callable | MinibatchMH,
    *args: Any,
    draws: int = 1000,
    num_chains: int = 4,
    num_warmup: int = 200,
    seed: int | Array = 0,
    model_kwargs: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Recommendation:
    """Recommend a minibatch kernel or NUTS, by the estimated time of a run.

    The set-up of ``MinibatchMH(model, control_variate="taylor2")`` reads all rows. From
    its measurements follow the acceptance rate and the rows of a step; the covariance
    of its surrogate gives the number of gradients of NUTS, whose algorithm is simulated
    on a normal distribution. One gradient on all rows is compiled and timed. A run of
    an equal kernel on the same data reuses the set-up.

    A minibatch kernel is recommended if it needs less than half of the time of NUTS.
    Otherwise the difference is within the error of the estimates, and NUTS, which makes
    no approximation, is recommended. The time of NUTS is that of one chain with 1,000
    draws of warmup, which is the fastest way to a number of effective draws if all
    chains share a processor.

    The estimates were compared with runs of eleven models with 200 to a million rows,
    in processor seconds on one core of one machine. Those of the minibatch kernel were
    0.72 to 1.22 of the measured time, and those of NUTS 0.74 to 1.86 (see the page
    on performance). Most constants were calibrated on eight of these models. Programs
    that JAX finds in a cache on disk, and posteriors that are far from normal, make the
    estimates less accurate.

    :param model: a NumPyro model, or a kernel to compare with NUTS, such as
        ``MinibatchMH(model, control_variate="taylor2")``.
    :param args: the positional arguments of the model, with the data.
    :param draws: effective draws of every parameter that the run is to make.
    :param num_chains: chains of the minibatch kernel, which are vectorised.
    :param num_warmup: its warmup draws.
    :param seed: a number, or a PRNG key.
    :param model_kwargs: keyword arguments of the model.
    :param progress: whether to show the progress of the set-up.
    :return: the costs of both samplers, the recommended one with the reason, and the
        code to write. If the set-up refuses the model, NUTS is recommended with the
        text of the refusal.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or the kernel has a temperature or
        no control variate. Errors of the model that NUTS would raise as well are
        raised unchanged.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_minibatch import recommend

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y)) as i:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[i])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (2_000,))
        >>> advice = recommend(model, y, progress=False)
        >>> advice.sampler in ("MinibatchMH", "NUTS")
        True
        >>> advice.minibatch.rows_per_draw, advice.minibatch.num_warmup
        (16.0, 200)
        >>> advice.nuts.setup, advice.nuts.num_warmup
        (0.0, 1000)
    """
    kernel, name = _kernel(model)
    for argument, value in (("draws", draws), ("num_chains", num_chains)):
        check_count("recommend", argument, value)
    if num_warmup != 0:
        check_count("recommend", "num_warmup", num_warmup)
    check_flag("recommend", "progress", progress)
    kwargs = dict(model_kwargs or {})
    key = jax.random.key(seed) if isinstance(seed, int | np.integer) else seed
    keys = jax.random.split(key, num_chains) if num_chains > 1 else key
    found = _set_up(kernel, keys, num_warmup, args, kwargs, bool(progress))
    notes = list(found.notes)
    gradient = _nuts_gradient(found, args, kwargs, notes)
    nuts = None
    if gradient is not None and found.refusal is None:
        nuts = _cost_of_nuts(found, gradient, draws, notes)
    ours = None
    if found.refusal is None:
        ours = _cost_of_ours(found, gradient, draws, num_chains, num_warmup)
    if jax.default_backend() != "cpu":
        notes.append(
            "The times of a step and of compilation rest on constants that were "
            "measured on CPUs."
        )
    sampler, reason = _choice(found, ours, nuts)
    return Recommendation(
        sampler=sampler,
        reason=reason,
        code=_code(sampler, name, ours, nuts),
        draws=int(draws),
        minibatch=ours,
        nuts=nuts,
        gradient=math.nan if gradient is None else gradient.seconds,
        refusal=found.refusal,
        notes=tuple(notes),
    )


class _Name(NamedTuple):
    """The names for the code to write: that of the kernel, and that of the model."""

    kernel: str
    model: str


def _kernel(model: Any) -> tuple[Any, _Name]:
    """The kernel to compare with NUTS."""
    if isinstance(model, MCMCKernel):
        if not isinstance(model, MinibatchMH) or model.control_variate is None:
            raise ValueError(
                "recommend compares MinibatchMH with a control variate with NUTS. Pass "
                'the model, or MinibatchMH(model, control_variate="taylor2"), got '
                f"{describe(model)}."
            )
        if model.temperature != 1.0:
            raise ValueError(
                "recommend compares kernels at temperature 1, because NUTS has no "
                f"temperature, got {model.temperature:g}."
            )
        if model.written_model is None:
            raise ValueError(
                "recommend needs a NumPyro model, which NUTS can sample as well, not a "
                "target written by hand."
            )
        return copy.copy(model), _Name("kernel", _named(model.written_model))
    if not callable(model):
        raise TypeError(
            "recommend(model, ...) needs a NumPyro model or a kernel such as "
            f'MinibatchMH(model, control_variate="taylor2"), got {describe(model)}.'
        )
    name = _named(model)
    return (
        MinibatchMH(model, control_variate="taylor2"),
        _Name(f'MinibatchMH({name}, control_variate="taylor2")', name),
    )


def _named(model: Any) -> str:
    name = getattr(model, "__name__", "model")
    return name if name.isidentifier() else "model"


class _SetUp(NamedTuple):
    """The result of a set-up, or why there is none.

    :param kernel: the kernel, after its ``init``.
    :param seconds: that it took.
    :param prepared: what it found; ``None`` if it refused the model.
    :param refusal: why it refused the model.
    :param notes: its warnings.
    """

    kernel: Any
    seconds: float
    prepared: Any
    refusal: str | None
    notes: tuple[str, ...]


def _set_up(
    kernel: Any,
    keys: Any,
    num_warmup: int,
    args: tuple,
    kwargs: dict[str, Any],
    progress: bool,
) -> _SetUp:
    """Run the set-up of a kernel as a run would, and measure its time."""
    begin, refusal = _gradient.now(), None
    with warnings.catch_warnings(record=True) as caught, shown(progress):
        warnings.simplefilter("always")
        try:
            state = kernel.init(keys, num_warmup, None, args, kwargs)
            jax.block_until_ready(jax.tree.leaves(state))
        except Exception as error:  # raised below if NUTS fails, too
            refusal = error
    seconds = _gradient.now() - begin
    own = [str(each.message) for each in caught if each.category is UserWarning]
    notes = tuple(dict.fromkeys(own))
    if refusal is not None:
        expected = isinstance(refusal, TypeError | ValueError)
        kind = "" if expected else f"{type(refusal).__name__}: "
        return _SetUp(kernel, seconds, None, f"{kind}{refusal}", notes)
    return _SetUp(kernel, seconds, kernel._run.prepared[2], None, notes)


def _nuts_gradient(
    found: _SetUp, args: tuple, kwargs: dict[str, Any], notes: list[str]
) -> Gradient | None:
    """The time of a gradient as NUTS computes it; ``None`` if it cannot be measured.

    :raises Exception: of a model that neither sampler can evaluate.
    """
    if find_rows((args, kwargs)):
        notes.append(
            "NUTS cannot read HostRows. Its time is not known, because it needs all "
            "rows as arrays in memory."
        )
        return None
    if found.refusal is None:
        # all rows of every plate, with discrete sites marginalized as NUTS does
        position = jax.tree.map(lambda x: x[0], found.prepared.starts)
        try:
            return measure_gradient(found.kernel.model, args, kwargs, position)
        except Exception as error:
            notes.append(
                "The gradient of NUTS could not be measured: "
                f"{type(error).__name__}: {error}"
            )
            return None
    model = found.kernel.written_model
    # raises what NUTS would raise
    discrete = discrete_latents(model, args, kwargs)
    if discrete:
        notes.append(
            f"NUTS sums over the discrete sites {', '.join(discrete)} and needs the "
            "package funsor for them; its time was not measured."
        )
        return None
    return measure_gradient(model, args, kwargs)


def _cost_of_nuts(
    found: _SetUp, gradient: Gradient, draws: int, notes: list[str]
) -> Cost | None:
    """The cost of one chain of NUTS on the posterior of the surrogate."""
    prepared = found.prepared
    if isinstance(prepared.surrogate.expansion, Expansions):
        notes.append(
            "The posterior has several modes, between which NUTS hardly moves, so that "
            "its effective draws cannot be estimated."
        )
        return None
    warmup, scaled = of_run(prepared.covariance, _NUTS_WARMUP)
    if found.kernel.layout.subsampled:
        notes.append(
            "A plate of the model has a subsample_size, which NUTS does not support. "
            "Leave it out for NUTS."
        )
    if not prepared.report["gaussian"]:
        notes.append(
            "The posterior is not normal. The gradients of NUTS are those for a normal "
            "distribution with the same covariance, and may be more."
        )
    each = gradient.seconds + _OVERHEAD
    number = _rounded(draws / scaled.ess)
    return Cost(
        sampler="NUTS",
        setup=0.0,
        compilation=_compilation(gradient, _LINES_OF_NUTS),
        warmup=warmup * each,
        sampling=number * scaled.gradients * each,
        num_chains=1,
        num_warmup=_NUTS_WARMUP,
        num_samples=number,
        ess_per_draw=scaled.ess,
        rows_per_draw=scaled.gradients * sum(found.kernel.plates.values()),
    )


def _cost_of_ours(
    found: _SetUp,
    gradient: Gradient | None,
    draws: int,
    num_chains: int,
    num_warmup: int,
) -> Cost:
    """The cost of vectorised chains of the kernel, from the report of its set-up."""
    kernel, report = found.kernel, found.prepared.report
    ess = _effective(report)
    number = _rounded(draws / (ess * num_chains))
    rows = float(sum(kernel.batch_sizes.values()))
    all_rows = sum(kernel.plates.values())
    # without a measured gradient, a row of a few hundred operations
    of_row = 1e-8 if gradient is None else gradient.seconds / all_rows
    steps = max(report["surrogate_num_steps"], 1)
    numbers = found.prepared.covariance.size
    on_surrogate = steps * (
        _LEAPFROG + _NUMBER * numbers + report["exact_rows"] * of_row
    )
    step = kernel.num_steps * (
        _STEP + num_chains * (rows * _ROW * of_row + on_surrogate)
    )
    return Cost(
        sampler=type(kernel).__name__,
        setup=found.seconds,
        # the set-up compiles the model about as often as a run
        compilation=(
            _compilation(gradient, _LINES_OF_OURS) if gradient else found.seconds
        ),
        warmup=num_warmup * step,
        sampling=number * step,
        num_chains=num_chains,
        num_warmup=num_warmup,
        num_samples=number,
        ess_per_draw=ess,
        rows_per_draw=kernel.num_steps * rows,
    )


def _effective(report: Mapping[str, Any]) -> float:
    """Effective draws per draw, for moves that are independent on the surrogate.

    The log ratio of a move has the difference of two residuals, and the noise of a
    batch, for which the penalty test is stricter.
    """
    variance = 2 * report["residual_sd"] ** 2 + report["batch_sd"] ** 2
    accepted = math.erfc(math.sqrt(variance / 8))
    tails = max(report.get("tail_inefficiency", 1.0), 1.0)
    share = accepted / (2 - accepted) / (tails if math.isfinite(tails) else 1.0)
    if not report["gaussian"]:
        return share * _NOT_NORMAL
    return share * (_OVER_RELAXED if report["over_relaxed"] else 1.0)


def _compilation(gradient: Gradient, lines: tuple[float, float]) -> float:
    constant, each = lines
    return gradient.compilation * (constant / gradient.lines + each)


def _rounded(number: float) -> int:
    """A number of draws, rounded up to two digits."""
    unit = 10 ** max(math.floor(math.log10(max(number, 1))) - 1, 1)
    return int(math.ceil(number / unit - 1e-9) * unit)


def _choice(found: _SetUp, ours: Cost | None, nuts: Cost | None) -> tuple[str, str]:
    """The recommended sampler, and the reason."""
    if ours is None:
        who = type(found.kernel).__name__
        return "NUTS", f"{who} cannot sample the model as it is, for the reason below."
    if nuts is None:
        return ours.sampler, "the time of NUTS is not known, and the set-up succeeded."
    ratio = nuts.total / ours.total
    if ratio > 1 / _CLEARLY:
        return ours.sampler, f"NUTS would take {ratio:.2g} times as long."
    if ratio > 0.95:
        return "NUTS", (
            f"{ours.sampler} would take {1 / ratio:.0%} of its time. The difference is "
            "within the error of the estimates, and NUTS makes no approximation."
        )
    return "NUTS", f"{ours.sampler} would take {1 / ratio:.2g} times as long."


def _code(sampler: str, name: _Name, ours: Cost | None, nuts: Cost | None) -> str:
    """The line to write."""
    if sampler == "NUTS":
        number = 1000 if nuts is None else nuts.num_samples
        return (
            f"MCMC(NUTS({name.model}), num_warmup={_NUTS_WARMUP}, num_samples={number})"
        )
    assert ours is not None
    vectorized = ', chain_method="vectorized"' if ours.num_chains > 1 else ""
    return (
        f"MCMC({name.kernel}, num_warmup={ours.num_warmup}, "
        f"num_samples={ours.num_samples}, num_chains={ours.num_chains}{vectorized})"
    )
