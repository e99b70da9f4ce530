"""The compiler's error that the package avoids."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats

SUMS = """
import jax, jax.numpy as jnp, numpy as np
rng = np.random.default_rng(0)
c, v = rng.uniform(size=(400, 600, 2)), rng.uniform(size=(600, 2))
found = jax.jit(lambda c, v: jnp.sum(v * c, -1) - jnp.sum(c * c, -1))(c, v)
print(np.abs(found - ((v * c).sum(-1) - (c * c).sum(-1))).max() < 1e-5)
"""
affected = pytest.mark.skipif(
    version("jaxlib") != "0.10.2", reason="this jaxlib computes right sums"
)


def in_new_process(code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the flags that a user has: none."""
    env = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**env, "JAX_PLATFORMS": "cpu"},
    )


def test_sums_are_right_once_the_package_is_imported() -> None:
    """With jaxlib 0.10.2 they are wrong by up to 1 without its flag."""
    assert in_new_process(f"import numpyro_minibatch\n{SUMS}").stdout == "True\n"


@affected
def test_an_import_that_comes_too_late_warns() -> None:
    """XLA has read its flags when JAX makes an array."""
    late = in_new_process(f"{SUMS}\nimport numpyro_minibatch")
    assert late.stdout == "False\n"
    assert "jaxlib 0.10.2 computes some sums of large arrays wrongly" in late.stderr


def test_densities_of_many_rows_and_several_chains() -> None:
    """The density of a beta distribution, in the process of the tests."""
    rng = np.random.default_rng(1)
    a, b = rng.uniform(0.1, 0.8, (2, 100, 600)).astype(np.float32)
    y = rng.uniform(0.01, 0.99, 600).astype(np.float32)
    found = jax.jit(lambda a, b, y: dist.Beta(a, b).log_prob(y))(a, b, jnp.asarray(y))
    right = scipy.stats.beta(a.astype(float), b.astype(float)).logpdf(y.astype(float))
    np.testing.assert_allclose(found, right, atol=1e-4)
