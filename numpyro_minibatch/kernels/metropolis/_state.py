"""The state of a chain."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from numpyro_minibatch.kernels._shared.adaptation import AdaptState
from numpyro_minibatch.kernels._shared.fields import with_named_items
from numpyro_minibatch.kernels.metropolis._step import Checks

__all__ = ["MinibatchMHState"]


@with_named_items
class MinibatchMHState(NamedTuple):
    """The state of a chain of :class:`MinibatchMH`.

    - **i** - draws made so far, warmup included.
    - **z** - unconstrained values of the latent sites.
    - **rng_key** - key of the proposals and decisions to come.
    - **index_key** - key of the rows; step ``t`` reads the rows of
      ``fold_in(index_key, t)``. Runs that continue from one state read the same rows,
      whatever their ``rng_key``.
    - **surrogate** - with a control variate, the expansion, the surrogate's posterior
      and the tables that rows are drawn from; one for all vectorised chains.
    - **memory** - what the estimator keeps with the position; empty for a shared batch.
    - **adapt_state** - step size and mass matrix with their adaptation.
    - **accept_prob** - mean acceptance probability of the draw's inner steps.
    - **mean_accept_prob** - the same averaged over warmup, or since its end.
    - **step_size** - step size with which the draw was made.
    - **diverging** - whether the log density at ``z`` is not finite, according to the
      rows that the draw read.
    - **lp_estimate** - minibatch estimate of the target's log density at ``z``.
    - **log_ratio** - estimated log acceptance ratio of the last inner step.
    - **log_ratio_variance** - its estimated variance.
    - **reliable** - share of the inner steps whose noise was inside the test's domain.
    - **check_rms_error** - with a control variate: root mean square, over the
      decisions that were checked on all rows so far, of the error of their log ratio;
      NaN before the first.
    - **check_rms_z** - the same in units of the noise's estimated standard deviation;
      about 1 if that is right.
    - **check_change** - the change of the acceptance probability of a move between
      equally likely positions that these errors make, a mean over the decisions; about
      0 if the noise is right.
    - **num_rows** - rows of data read to make the draw; a row of a shared batch is
      evaluated at both positions and counts once.
    - **mode** - with ``taylor2(modes=...)``, the mode that ``z`` belongs to, in the
      order of ``kernel.pilot["mode_masses"]``; else empty.
    - **mode_moves_tried**, **mode_moves_made** - with ``taylor2(modes=...)``, the inner
      steps of the draw that tried another mode, and those that reached it; else empty.
    """

    i: Array
    z: Any
    rng_key: Array
    index_key: Array
    surrogate: Any
    memory: Any
    adapt_state: AdaptState
    accept_prob: Array
    mean_accept_prob: Array
    step_size: Array
    diverging: Array
    lp_estimate: Array
    log_ratio: Array
    log_ratio_variance: Array
    reliable: Array
    num_rows: Array
    check_rms_error: Array
    check_rms_z: Array
    check_change: Array
    checks: Checks
    mode: Any = ()
    mode_moves_tried: Any = ()
    mode_moves_made: Any = ()
