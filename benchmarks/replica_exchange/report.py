"""Write the page from the recorded results.

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
    head = ["method", "gradients per chain", "accuracy, % (chains)", "NLL"]
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


HEAD = """# Replica exchange: five modes, other packages, a recurrent network

Written by `python -m benchmarks.replica_exchange.report` from the results of the
commands below. Everything is in single precision, on a virtual machine with two x86-64
cores that were shared with other work, so no times are compared."""
REFERENCES = """## References

1. Luo, R., Zhang, Q., Yang, Y. and Wang, J. (2020). Replica-exchange Nosé-Hoover
   dynamics for Bayesian learning on large datasets. NeurIPS."""
TEXTS |= {
    "five_modes": """## Five modes

`python -m benchmarks.replica_exchange.five_modes --noise 0.25`, and for the second
noise level the same with
`--resume --noise 25 --methods RENHD "RENHD, rows of gradients" RELD "SGNHT alone"`.

The target is the mixture of section 4.1 of [1]: five isolated modes in the plane, with
noise of variance 0.25 in each coordinate of the gradients, and seven rungs, each 1.5
times as hot as the one before. [1] gives neither the positions nor the weights of the
modes. Here they are at the centre and the corners of a square, 5.7 apart, with standard
deviation 0.5 and weights from 0.30 to 0.10. The barrier between two modes is 16 nats.
The noise is that of batches of 20 of 200 rows with linear terms that sum to zero, so it
affects swaps too. A draw has 20 steps of length 0.1, with friction 1; 32 chains make
3125 draws after 300 of warmup, all starting in the middle mode. Samplers on one rung
make draws of 140 steps, so that the number of gradients is the same.

- First table: *total variation* is the distance between the fractions of draws in the
  modes and their weights. *Expected if exact* is its mean for a sampler without bias,
  from the scatter of the chains. *Variance ratio* is the mean squared distance to the
  nearest mode, divided by the true value by quadrature.
- Second table: *ESS* is per 1e5 draws, for the coordinate with the smaller value. [1]
  states 4.16e3 but not how it was computed. *Alone* is the sum over chains, each
  analysed separately, with autocorrelations summed until a pair of them is negative.
  This is all that can be done with one long chain as in [1]; a chain that never leaves
  its mode gets an excellent value. *ArviZ* is `az.ess(method="mean")` over all chains
  and *bulk* the default one; *of modes* is the smallest ESS of the indicators of the
  modes. *Swap rates* are those of the coldest and the hottest pair; *round trips* are
  also per 1e5 draws.
- By default, swaps read rows until their noise is within the test's domain; *rows of
  gradients* is `swap_batch=batch.without_replacement(20)`. *Random pairs* chooses one
  of the two sets of pairs at random, and *euler* is the integrator printed in [1].
- All rows except *RENHD* were recorded with an older version, in which the first half
  kick after a swap still used the force at the temperature from which the position
  came.

Results:

- RENHD with default settings is correct, with more effective samples than [1] states; a
  sampler on one rung never leaves its mode.
- Barker's test accepts less than half of the swaps, and makes 0.4 of the round trips
  and 0.6 of the effective samples of the penalty test. Swaps on all rows give twice as
  many effective samples as swaps on the gradients' batch, so noise is costly mainly in
  swaps. Choosing pairs at random instead of alternating them halves the effective
  sample size.
- With the printed integrator the variance is 6% too small, at the same cost.
- **At a hundred times the noise, swaps need rows of their own.** On the gradients' 20
  rows the log ratio of a swap between two modes is so noisy that the penalty test
  rejects it, and chains stay where they started, although their variance within a mode
  is right. `swap_reliable` shows it: 85% of the swaps are outside the test's domain.
  The growing batch, which is the default, solves the problem.
- At this noise level the thermostat makes a difference: the modes of RENHD have the
  right variance, those of RELD 2.2 times the right one.""",
    "rivals": """## Other implementations of parallel tempering

`python -m benchmarks.replica_exchange.rivals --tfp PYTHON --blackjax PYTHON`, with
interpreters of environments in which these packages are installed.

The target has the same modes without noise, and the ladder is the same. Even and odd
pairs swap alternately after every draw. Each rung runs Hamiltonian Monte Carlo with
three steps of 0.27 (momenta have the variance of the rung's temperature); 32 chains
make 3000 draws from the middle mode. In the second table everything except total
variation and variance is per 1000 gradients, of all rungs together; *ESS* is that of
the coordinate with the smaller value. *Round trips* are counted from the positions of
the replicas, by one rule for all methods. *Of modes, by error* is sum p (1 - p) divided
by the mean squared error of a chain's fractions of draws in the modes: the number of
independent draws with the same error. It needs no autocorrelations, has an error of
about 15%, and is the only measure that applies to sequential Monte Carlo, whose "draws"
are the particles of one run. *Densities* is the number of log densities that a draw
evaluates without a gradient.

Three methods are the same algorithm: ours over AMAGOLD without friction, TensorFlow
Probability's, and the ten lines of JAX. Their round trips agree to 2%, if one allows
for the fourth gradient of each path in the ten lines, which the others keep from the
previous draw. Ours evaluates the density once more at the end of a path, and at both
ends of a swap, which TFP does not need on all rows. Langevin steps make shorter moves
and more swaps: more round trips and fewer effective samples per gradient.

TensorFlow Probability 0.25 cannot be imported with the JAX version used elsewhere
(0.10.2: `jax.interpreters.xla` has no `pytype_aval_mappings`), so its environment has
JAX 0.4.35. blackjax 1.7 has no parallel tempering. Its tempering is sequential Monte
Carlo, which needs a proper initial distribution, here a normal one with standard
deviation 6, and keeps no draws of the earlier temperatures. NumPyro's HMC as a rung
adapts its step size to the rung and evaluates one more gradient per draw, at a position
that a swap may have changed; its row was added with
`--keep --methods "ReplicaExchange(HMC) of NumPyro"`.""",
    "fashion_mnist_lstm": """## A recurrent network

`python examples/fashion_mnist_lstm.py --out docs/_static --record
benchmarks/replica_exchange/results/fashion_mnist_lstm.json`.

The model is the LSTM of section 4.2 of [1] on Fashion-MNIST, at a size for two cores.
The LSTM has 32 outputs and the next layer 32 (paper: 128 and 64), with 9,194 weights;
there are 10,000 of the 60,000 images, 2000 test images, four rungs of ratio 1.2 (paper:
twelve), batches of 128, draws of 50 gradients (paper: 200), and 24 draws (paper: 1000
epochs; here 15 of each replica and 61 of a single sampler). `h = 0.1` is the step per
mean loss, a third of the paper's, and `c` is the paper's 0.1. Both chains of all
samplers start at the same two draws from the prior; the ensemble is the second half of
a chain's draws. `--full` uses the paper's settings and has not been run.

**RENHD is not better than SGNHT and SGHMC at equal cost here**, unlike in table 1 of
[1], which does not say that the cost was equal. A draw of RENHD costs as many gradients
as there are rungs, and its accuracy after 4800 gradients is about that of SGNHT after a
quarter of them: in the figure its curve is that of SGNHT, stretched. Between 4 and 16
of 100 swaps are accepted, and nearly every one reads all rows (which the count of
gradients leaves out), since on fewer rows the noise of the energies of 10,000 rows is
far too large for the test. No replica has made a round trip between the ends of the
ladder. RENHD's curves are still rising, chains of one sampler differ by about one
point, R-hat of single weights is above 2, and there are only two chains: this
comparison shows how fast samplers find good weights, not how well they sample the
posterior. If there are many modes and each is explored quickly, as above, the ladder is
worth its cost; if not even one mode has been explored, it only multiplies the cost.""",
}


if __name__ == "__main__":
    main()
