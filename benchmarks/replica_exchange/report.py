"""Write the page of the recorded results.

python -m benchmarks.replica_exchange.report
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import five_modes, rivals
from .record import DOCS, RESULTS, load, table

PAGE = "benchmarks-replica-exchange.md"
FIGURES = {
    "five_modes": "_static/replica_exchange_five_modes.png",
    "fashion_mnist_lstm": "_static/fashion_mnist_lstm.png",
}


def network(results: dict[str, Any]) -> str:
    """Accuracies of the recurrent network."""
    rows = []
    for name, found in results["methods"].items():
        accuracy = found["accuracy"]
        each = ", ".join(f"{value:.2f}" for value in accuracy)
        rows.append(
            [
                name,
                f"{found['gradients']:,}",
                f"{sum(accuracy) / len(accuracy):.2f} ({each})",
                f"{sum(found['nll']) / len(found['nll']):.3f}",
                ", ".join(f"{rate:.2f}" for rate in found["swap_rates"]),
                f"{found['million_rows']:.2f}",
            ]
        )
    head = ["method", "gradients a chain", "accuracy, % (chains)", "NLL"]
    return table([*head, "swap rates", "rows read, 1e6"], rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "five_modes": five_modes.text,
    "rivals": rivals.text,
    "fashion_mnist_lstm": network,
}
TEXTS: dict[str, str] = {}


def _machine(machine: dict[str, Any]) -> str:
    names = ("python", "jax", "numpyro")
    versions = ", ".join(f"{n} {machine[n]}" for n in names if n in machine)
    load_average = machine["load_average"]
    return f"{machine['cores']} cores, {versions}; load {load_average:.0f} at the end."


def main() -> None:
    parts = [HEAD]
    for name, made in TABLES.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        results = load(name, RESULTS)
        parts.append(TEXTS[name])
        if name in FIGURES and (DOCS / FIGURES[name]).exists():
            parts.append(f"```{{image}} {FIGURES[name]}\n:alt: {name}\n```")
        parts += [made(results), _machine(results["machine"])]
    parts.append(REFERENCES)
    (DOCS / PAGE).write_text("\n\n".join(parts) + "\n")


HEAD = """# Replica exchange: five modes, rivals, a recurrent network

Written by `python -m benchmarks.replica_exchange.report` from the results that the
commands below write. Everything is in single precision, on a virtual machine with two
x86-64 cores that were shared with other work: no times are compared."""
REFERENCES = """## References

1. Luo, R., Zhang, Q., Yang, Y. and Wang, J. (2020). Replica-exchange Nosé-Hoover
   dynamics for Bayesian learning on large datasets. NeurIPS."""
TEXTS |= {
    "five_modes": """## Five modes

`python -m benchmarks.replica_exchange.five_modes --noise 0.25`, and for the second
noise the same with `--resume --noise 25 --methods RENHD "RENHD, rows of gradients" RELD
"SGNHT alone"`.

The mixture of section 4.1 of [1]: five isolated modes in the plane, noise of variance
0.25 in each coordinate of the gradients, seven rungs, each 1.5 times as hot as the one
before. [1] gives neither the modes' places nor their weights; here they are at the
middle and the corners of a square, 5.7 apart, with standard deviation 0.5 and weights
from 0.30 to 0.10. Between two of them is a barrier of 16 nats. The noise is that of
batches of 20 of 200 rows, which carry linear terms that add up to nothing, so that it
is in the swaps too. Draws of 20 steps of length 0.1, friction 1; 32 chains of 3125
draws after 300, all begun in the middle mode. One rung alone makes draws of 140 steps,
so that gradients are as many.

- First table: *total variation* is that between the shares of the modes and their
  weights. *Expected of right draws* is its mean if nothing were wrong but the number of
  draws, from the scatter of the chains. *Variance ratio* is the mean squared distance
  to the nearest mode, over the true one by quadrature.
- Second table: *ESS* is per 1e5 draws, the smaller of the two coordinates. [1] states
  4.16e3 and not how it was found. *Alone* is the sum over chains, each taken by itself,
  with autocorrelations summed until a pair of them is negative, which is what can be
  done with one long chain as in [1]; it calls a chain that never leaves its mode
  excellent.
  *ArviZ* is `az.ess(method="mean")` over all chains and *bulk* the default one; *of
  modes* is that of the indicator of the mode where it is smallest. *Swap rates* are
  those of the coldest and the hottest pair; *round trips* are per 1e5 draws, too.
- Swaps read rows until their noise is inside the test's domain, which is the default;
  *rows of gradients* is `swap_batch=batch.without_replacement(20)`. *Random pairs* are
  one by chance of the two sets of pairs, *euler* is the printed integrator.
- All rows but *RENHD* were recorded when the first half kick after a swap still had the
  force of the temperature that the position came from.

What there is to see:

- RENHD as it comes is right, with more effective samples than [1] states; one rung
  alone never leaves its mode.
- Barker's test accepts less than half of the swaps, and makes 0.4 of the round trips
  and 0.6 of the effective samples of the penalty. With all rows in the swaps there are
  twice as many samples as with the gradients' batch: swaps are where noise costs here.
  Pairs by chance instead of by turns cost half of the samples.
- The printed integrator is 6% too narrow, at the same price.
- **At a hundred times the noise the swaps need rows of their own.** On the gradients'
  20 rows a swap between two modes has a noise that the penalty can only refuse, and
  chains stay where they began, however right their width is. `swap_reliable` says so:
  85% of the swaps are outside the domain of the test. The batch that grows, which is
  the default, mends it.
- There the thermostat shows what it is for: RENHD's modes have the right width, RELD's
  have 2.2 times their variance.""",
    "rivals": """## Beside other parallel tempering

`python -m benchmarks.replica_exchange.rivals --tfp PYTHON --blackjax PYTHON`, with
interpreters of environments that have them.

The same modes without noise, same ladder, swaps of even and odd pairs by turns after
every draw, Hamiltonian Monte Carlo with three steps of 0.27 at each rung (of momenta
with the variance of the rung's temperature), 32 chains of 3000 draws from the middle
mode. In the second table everything but total variation and variance is per 1000
gradients, of all rungs together; *ESS* is that of the coordinate where it is smaller.
*Round trips* are counted of where replicas are, by one rule for all. *Of modes, by
error* is sum p (1 - p) over the mean square of the errors of a chain's shares of the
modes: how many independent draws would have done as well. It needs no autocorrelations,
is known to about 15%, and is the only one for sequential Monte Carlo, whose "draws" are
the particles of one run. *Densities* are what a draw evaluates without a gradient.

The three that are the same algorithm, ours over AMAGOLD without friction, TensorFlow
Probability's and the ten lines, agree: in round trips to 2% once the ten lines' fourth
gradient of a path, which the others keep from the draw before, is allowed for. Ours
reads the density once more at the end of a path, and at both ends of a swap, which on
all rows TFP does not need. Langevin steps have shorter moves and more swaps: more round
trips and fewer effective samples for as many gradients.

TensorFlow Probability 0.25 imports no longer with the JAX of the rest (0.10.2:
`jax.interpreters.xla` has no `pytype_aval_mappings`), so it has an environment with JAX
0.4.35. blackjax 1.7 has no parallel tempering; its tempering is sequential Monte Carlo,
which needs a proper law to begin with, here a normal one with standard deviation 6, and
keeps nothing of its earlier temperatures. NumPyro's HMC as a rung has steps that adapt
to the rung, and one gradient more a draw, at the position that a swap may have brought;
its row was added by `--keep --methods "ReplicaExchange(HMC) of NumPyro"`.""",
    "fashion_mnist_lstm": """## A recurrent network

`python examples/fashion_mnist_lstm.py --out docs/_static --record
benchmarks/replica_exchange/results/fashion_mnist_lstm.json`.

The LSTM of section 4.2 of [1] on Fashion-MNIST, at a size for two cores: 32 outputs of
the LSTM and 32 of the layer after it (the paper's: 128 and 64), 9,194 weights, 10,000
images of 60,000, 2000 test images, four rungs of ratio 1.2 (twelve), batches of 128,
draws of 50 gradients (200), 24 draws (1000 epochs; here 15 of each replica, 61 of a
sampler alone). `h = 0.1` is the step per mean loss, a third of the paper's, and `c` the
paper's 0.1. Both chains of all samplers begin at the same two draws from the prior; the
ensemble is the later half of a chain's draws. `--full` has the paper's settings and has
not been run.

**RENHD is not above SGNHT and SGHMC at equal cost here**, unlike in table 1 of [1],
which does not say that cost was equal. A draw of RENHD costs as many gradients as there
are rungs, and what it knows after 4800 is about what SGNHT knows after a fourth of
them: the figure shows its curve to be theirs, drawn out. Swaps are accepted in 4 to
16 of 100 tries, after all rows have been read for nearly every one (rows that the
count of gradients leaves out), since on fewer the noise of the energies of 10,000 rows
is far too large for the test; no replica has been from one end of the ladder to the
other and back. RENHD's curves still rise, chains of one sampler differ by about one
point, R-hat of single weights is above 2, and two chains are few: this compares how
fast samplers find good weights, not posteriors. Where modes
are many and each is quickly explored, as above, the ladder earns its cost; where a
single mode has not been explored yet, it multiplies the cost.""",
}


if __name__ == "__main__":
    main()
