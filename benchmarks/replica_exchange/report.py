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
                f"{found['seconds']:.0f}",
            ]
        )
    head = ["method", "gradients a chain", "accuracy, % (chains)", "NLL"]
    return table([*head, "swap rates", "seconds"], rows)


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
    (DOCS / PAGE).write_text("\n\n".join(parts) + "\n")


HEAD = """# Replica exchange: five modes, rivals, a recurrent network

Written by `python -m benchmarks.replica_exchange.report` from the results that the
commands below write. Everything is in single precision, on a virtual machine with two
x86-64 cores that were shared with other work: no times are compared."""
TEXTS |= {
    "five_modes": "",
    "rivals": "",
    "fashion_mnist_lstm": "",
}


if __name__ == "__main__":
    main()
