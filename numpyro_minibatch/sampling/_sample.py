"""A driver for long runs, which can be streamed to disk, stopped and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xarray as xr
from jax import Array
from jax.sharding import Mesh
from numpyro.infer.mcmc import MCMCKernel

from numpyro_minibatch._internal.checks import check_count, check_flag, describe
from numpyro_minibatch.host_rows import given_back
from numpyro_minibatch.sampling._devices import Share
from numpyro_minibatch.sampling._program import Program
from numpyro_minibatch.sampling._run import Run
from numpyro_minibatch.sampling._store import Store

if TYPE_CHECKING:
    import arviz as az

    InferenceData = az.InferenceData | xr.DataTree

__all__ = ["sample"]


def sample(
    kernel: MCMCKernel,
    *args: Any,
    num_warmup: int,
    num_samples: int,
    num_chains: int = 1,
    seed: int | Array = 0,
    thinning: int = 1,
    init_params: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    extra_fields: Sequence[str] = (),
    keep_warmup: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    mesh: Mesh | None = None,
) -> InferenceData:
    """Run a kernel, and return its draws for ArviZ.

    It is meant for runs that are long, or whose draws are large. With ``out`` the draws
    are written to disk as they are made, memory never holds more than two chunks, and a
    run that was stopped or killed can be resumed. The draws do not depend on any of
    this.

    An interrupt (Ctrl-C) ends the run after the current chunk and returns the draws
    made so far; a second one raises at once.

    :param kernel: a kernel of this package or one of NumPyro's, such as ``NUTS``.
    :param args: the positional arguments of the model. Arrays are passed to the
        compiled program as arguments and are not constants of it.
    :param num_warmup: number of warmup steps, in which the kernel adapts.
    :param num_samples: number of draws of each chain.
    :param num_chains: number of chains, which are vectorised in one program.
    :param seed: a number, or a PRNG key.
    :param thinning: number of steps per draw.
    :param init_params: unconstrained start, by site, with a leading axis of chains.
    :param model_kwargs: keyword arguments of the model.
    :param extra_fields: fields of the kernel's state to collect in addition to the
        kernel's default fields.
    :param keep_warmup: whether to return the draws of the warmup, too.
    :param out: a folder for the run; ``None`` keeps the draws in memory.
    :param resume: resume the run in ``out``, if there is one. A larger ``num_samples``
        extends it. Everything else must be the same.
    :param progress: whether to show a progress bar.
    :param mesh: devices among which the chains are divided evenly, as a
        ``jax.sharding.Mesh`` with one axis; by default all chains run on the first
        device. The devices of an axis called ``"rows"``, alone or in addition to that
        of the chains, make the steps of a chain together: each processes its part of
        every pass over all rows. The passes before a run are always divided among all
        devices. With the devices of several processes, each process draws its own
        chains, returns them, and writes them to its own folder in ``out``.
    :return: an ``arviz.InferenceData`` or, on ArviZ 1.x, an ``xarray.DataTree``, as
        from :func:`to_inference_data`; with ``out`` its draws are read from disk when
        they are accessed.

    :raises TypeError: an argument is of the wrong kind.
    :raises ValueError: an argument is out of range, or the folder already holds a run,
        or a different one.
    :raises KeyboardInterrupt: at an interrupt before there is a draw.

    **Example**

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_minibatch import MINT, sample

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("obs", dist.Normal(mu, 1), obs=y[idx])

        >>> y = 3 + jax.random.normal(jax.random.key(0), (10_000,))
        >>> idata = sample(MINT(model, temperature=500.0), y, num_warmup=500,
        ...                num_samples=1000, num_chains=2, progress=False)
        >>> idata.posterior.sizes["chain"], idata.posterior.sizes["draw"]
        (2, 1000)
    """
    numbers = {
        "num_samples": num_samples,
        "num_chains": num_chains,
        "thinning": thinning,
    }
    flags = {"keep_warmup": keep_warmup, "resume": resume, "progress": progress}
    _check_arguments(kernel, num_warmup, numbers, flags, out)
    share = _share_of(kernel, num_chains, mesh)
    key = jax.random.key(seed) if isinstance(seed, int | np.integer) else seed
    kwargs = dict(model_kwargs or {})
    program = Program(
        kernel,
        num_warmup,
        share.count,
        args,
        kwargs,
        tuple(extra_fields),
        share.mesh,
        share.setup,
    )
    run = Run(
        program,
        share,
        num_warmup,
        num_samples,
        thinning,
        bool(keep_warmup),
        bool(progress) and share.process == 0,
    )
    keys = share.slice(jax.random.split(key, num_chains))
    start = share.slice(init_params)
    with given_back((program.args, program.kwargs)):
        if out is None:
            return run.finish(keys, start)
        path = Path(out)
        if share.processes > 1:
            path = path / f"process-{share.process:04d}"
        store = Store(path)
        try:
            run.begin_in(store, key, init_params, resume)
            return run.finish(keys, start)
        finally:
            store.unlock()


def _check_arguments(
    kernel: Any,
    num_warmup: int,
    numbers: Mapping[str, int],
    flags: Mapping[str, bool],
    out: str | Path | None,
) -> None:
    """Raise if an argument of :func:`sample` is of the wrong kind or out of range."""
    if not isinstance(kernel, MCMCKernel):
        raise TypeError(
            "sample(kernel, ...) needs a kernel such as MINT(model, temperature=100.0) "
            f"or NUTS(model), got {describe(kernel)}."
        )
    for name, value in numbers.items():
        check_count("sample", name, value)
    if num_warmup != 0:
        check_count("sample", "num_warmup", num_warmup)
    for name, flag in flags.items():
        check_flag("sample", name, flag)
    if flags["resume"] and out is None:
        raise ValueError(
            "sample(resume=True) needs the folder of the run: pass out=..., too."
        )
    if hasattr(kernel, "check_draws"):
        kernel.check_draws(num_warmup, numbers["num_samples"] * numbers["thinning"])


def _share_of(kernel: Any, num_chains: int, mesh: Mesh | None) -> Share:
    """This process's part of the chains, on devices that the kernel can use."""
    if mesh is not None and getattr(kernel, "_mesh", None) is not None:
        raise ValueError(
            "sample(mesh=...) divides the chains among devices, and "
            f"{type(kernel).__name__}(mesh=...) its rungs. Pass only one mesh: that of "
            "the chains, if there are as many as devices."
        )
    share = Share.of(num_chains, mesh)
    if share.devices["rows"] > 1 and not hasattr(type(kernel), "plates"):
        raise ValueError(
            'sample(mesh=...): devices of an axis "rows" divide the passes over all '
            f"rows that kernels of this package make, but {type(kernel).__name__} "
            'makes none that can be divided. Use an axis "chains".'
        )
    return share
