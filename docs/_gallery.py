"""What sphinx-gallery calls while it runs the examples."""

import gc
import os
import tempfile

ORDER = (
    "covertype",
    "hierarchical_poisson",
    "random_intercepts",
    "random_slopes",
    "gaussian_mixture",
    "annotators",
    "item_response",
    "species_counts",
    "capture_recapture",
    "robust_regression",
    "tied_means",
    "batch_sizes",
    "double_well",
    "several_modes",
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


def figures(block, block_vars, gallery_conf):
    """Take the figures of a block, and refuse one that is blank or has no labels."""
    import matplotlib.pyplot as plt
    from sphinx_gallery.scrapers import matplotlib_scraper

    for number in plt.get_fignums():
        wrong = list(unlabelled(plt.figure(number)))
        if wrong:
            where = f"{block_vars['src_file']}, line {block[2]}"
            raise ValueError(f"{where}: {'; '.join(wrong)}.")
    return matplotlib_scraper(block, block_vars, gallery_conf)


def unlabelled(figure):
    """What is wrong with a figure: axes without data, or numbers without a label."""
    figure.canvas.draw()  # which makes the tick labels
    for place, axes in enumerate(figure.axes):
        if not (axes.get_visible() and axes.axison):
            continue
        if not axes.has_data() and not axes.texts:
            yield f"axes {place} are blank"
        around = {figure, axes.figure}  # the latter may be a part of it
        outer = {
            "x": any(part.get_supxlabel() for part in around),
            "y": any(part.get_supylabel() for part in around),
        }
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            ticks = [t.get_text() for t in axis.get_ticklabels() if t.get_visible()]
            # names say themselves what they are, numbers do not
            numbers = any(any(c.isdigit() for c in text) for text in ticks)
            if numbers and not (axis.get_label_text() or outer[name]):
                yield f"the {name} axis of axes {place} has no label"
