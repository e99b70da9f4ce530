"""What ``numpyro.infer.MCMC`` and its users expect of a kernel, for every kernel."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, init_to_median, init_to_uniform

from numpyro_minibatch import (
    MINT,
    MHMinibatch,
    MinibatchMH,
    Target,
    accept,
    batch,
    estimate,
    proposal,
)

ROOT = Path(__file__).resolve().parent.parent
N, WARMUP, DRAWS = 60, 6, 12
FIELDS = ("i", "adapt_state.step_size")

_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 2)).astype(np.float32)
Y = (X @ np.array([1.0, -0.5]) + 0.3 * _rng.normal(size=N)).astype(np.float32)


def model(X: Any, y: Any) -> None:
    """A regression with a constrained parameter and a deterministic site."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.deterministic("norm", jnp.sqrt(jnp.sum(beta**2)))
    with numpyro.plate("data", N, subsample_size=20) as idx:
        numpyro.sample("obs", dist.Normal(X[idx] @ beta, scale), obs=y[idx])


KERNELS: dict[str, Callable[[], MinibatchMH]] = {
    "MINT": lambda: MINT(model, temperature=3.0),
    "MINT-augmented": lambda: MINT(model, temperature=30.0, estimate="augmented"),
    "MINT-langevin": lambda: MINT(
        model,
        temperature=3.0,
        proposal=proposal.langevin(),
        num_steps=3,
        step_size=0.1,
        dense_mass=True,
    ),
    "MHMinibatch": lambda: MHMinibatch(model, temperature=3.0),
    "MHMinibatch-sequential": lambda: MHMinibatch(
        model, temperature=3.0, sequential=True
    ),
    "exact": lambda: MinibatchMH(model, estimate="exact"),
}
