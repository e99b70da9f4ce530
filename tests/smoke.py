"""Runs an installed package once from end to end, with nothing but its dependencies.

Not a pytest file: ``make wheel`` runs it outside the checkout, in an environment that
holds only the wheel and its dependencies.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_minibatch
from numpyro_minibatch import MINT, to_inference_data

N, DIM = 10_000, 3


def model(X: jax.Array, y: jax.Array) -> None:
    """A logistic regression that reads 50 rows at a time."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([DIM]).to_event(1))
    with numpyro.plate("data", N, subsample_size=50) as idx:
        numpyro.sample("obs", dist.Bernoulli(logits=X[idx] @ beta), obs=y[idx])


def main() -> None:
    """Simulate, sample, convert; fail if the package or the result is not right."""
    folder = Path(numpyro_minibatch.__file__).parent
    assert Path(sys.prefix) in folder.parents, f"{folder} is not the installed package"
    assert (folder / "py.typed").is_file(), "the wheel lacks py.typed"
    assert numpyro_minibatch.__version__ == version("numpyro-minibatch")

    key_x, key_y = jax.random.split(jax.random.key(1))
    X = jax.random.normal(key_x, (N, DIM))
    logits = X @ jnp.array([1.0, -1.0, 0.5])
    y = jax.random.bernoulli(key_y, jax.nn.sigmoid(logits)).astype(int)

    kernel = MINT(model, temperature=10.0)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y)
    idata = to_inference_data(mcmc)
    beta = idata["posterior"]["beta"]
    assert beta.shape == (1, 200, DIM), beta.shape
    assert np.isfinite(beta.values).all() and (beta.values.std(axis=1) > 0).all()
    print(
        f"numpyro-minibatch {version('numpyro-minibatch')} on jax {jax.__version__}, "
        f"arviz {version('arviz')}: beta {dict(beta.sizes)}"
    )


if __name__ == "__main__":
    main()
