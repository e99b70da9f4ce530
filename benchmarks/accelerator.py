"""Seconds of a run by the number of chains, on whatever device JAX uses.

A GPU takes about as long for a step of a thousand chains as for a step of four, because
a step of few chains is mostly the launch of its kernels: ``python -m
benchmarks.accelerator --chains 4 64 1024``. The first run of each size compiles; the
second compiles the driver's loop again.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_minibatch import MinibatchMH, datasets


def model(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ b - 2), obs=y[i])


def main(args: argparse.Namespace) -> None:
    X, y, _ = jax.device_put(datasets.simulate_logistic(0, args.rows))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {args.rows} rows")
    cases = [("MinibatchMH", n, d) for n in args.chains for d in args.draws]
    if args.nuts:
        cases.append(("NUTS", 4, args.draws[0]))
    print(f"{'kernel':<12} {'chains':>6} {'draws':>6} {'first':>8} {'second':>8}")
    for name, chains, draws in cases:
        nuts = name == "NUTS"
        mcmc = MCMC(
            NUTS(model) if nuts else MinibatchMH(model, control_variate="taylor2"),
            num_warmup=500 if nuts else 200,
            num_samples=draws,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        seconds = []
        for seed in (0, 1):
            begin = time.perf_counter()
            mcmc.run(jax.random.key(seed), X, y)
            jax.block_until_ready(mcmc.get_samples())
            seconds.append(time.perf_counter() - begin)
        print(
            f"{name:<12} {chains:>6} {draws:>6} {seconds[0]:>7.1f}s {seconds[1]:>7.1f}s"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--chains", type=int, nargs="+", default=[4, 64, 1024])
    parser.add_argument("--draws", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--nuts", action="store_true", help="NUTS as well")
    main(parser.parse_args())
