"""What sphinx-gallery calls while it runs the examples."""

import gc
import os
import tempfile

ORDER = (
    "covertype",
    "hierarchical_poisson",
    "robust_regression",
    "tied_means",
    "batch_sizes",
    "double_well",
    "gaussian_modes",
    "fifty_modes",
    "regression_network",
    "bayesian_network",
    "cifar_ensemble",
    "fashion_mnist_lstm",
)


def arguments(gallery_conf, script_vars):
    """The command line of each example: its small size, or that of the environment."""
    given = [os.environ.get("GALLERY_SIZE", "--small"), "--out", tempfile.mkdtemp()]
    if script_vars["src_file"].endswith("covertype.py"):
        given.append("--no-progress")
    return given


def order(path):
    """Where in the gallery an example stands."""
    name = os.path.splitext(os.path.basename(path))[0]
    return ORDER.index(name) if name in ORDER else len(ORDER)


def forget(gallery_conf, path):
    """Leave nothing of one example to the next, and print summaries whole."""
    import jax
    import pandas as pd

    jax.clear_caches()
    gc.collect()
    pd.set_option("display.width", 100, "display.max_columns", 20)
