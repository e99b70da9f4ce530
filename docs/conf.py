"""Sphinx configuration."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

from sphinx.util.nodes import make_refnode

# No bars among what examples print: tqdm reads this once, when it is imported.
os.environ.setdefault("TQDM_DISABLE", "1")

import numpyro_minibatch  # noqa: E402
from numpyro_minibatch._version import __version__  # noqa: E402
from numpyro_minibatch.diagnostics import advice_table  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # for _gallery

# ArviZ 0.23 announces ArviZ 1 at its first import on each day.
warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)

project = "numpyro-minibatch"
author = "The numpyro-minibatch developers"
project_copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",  # for the directive; `make doctest` runs the examples
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["amsmath", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# Every script in examples/ is run at its small size; an error is one of the build. What
# did not change since the last build is not run again.
sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"__init__\.py$",
    "reset_argv": "_gallery.arguments",
    "reset_modules": ("matplotlib", "_gallery.forget"),
    "image_scrapers": ("_gallery.figures",),
    "within_subsection_order": "_gallery.order",
    "abort_on_example_error": False,
    "parallel": 2,
    "min_reported_time": 1e9,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "write_computation_times": False,
}

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # a function as a default by its name
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 88

# the empty line that doctest wants before the end of a block is not shown
highlight_options = {"pycon": {"stripnl": True}}

html_theme = "furo"
html_title = f"numpyro-minibatch {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

# Mathematics is to be read without the net, too. This package is a copy of MathJax,
# of which one file is enough: it draws, and needs no fonts. Without the package
# pages ask the net for MathJax.
if found := importlib.util.find_spec("sphinx-mathjax-offline"):
    mathjax = Path(str(found.origin)).parent / "static" / "mathjax" / "tex-svg.js"
    html_static_path.append(str(mathjax))
    mathjax_path = mathjax.name


def find_short_name(app, env, node, contnode):
    """Where a name without its module is documented, if there is one such place.

    Docstrings and pages say `MINT` or `numpyro_minibatch.MINT`, as users do, and the
    reference has `numpyro_minibatch.kernels.mint.MINT`.
    """
    name = node.get("reftarget", "").removeprefix("numpyro_minibatch.")
    public = hasattr(numpyro_minibatch, name.split(".")[0])
    if node.get("refdomain") != "py" or not public:
        return None
    objects, last = env.get_domain("py").objects, f".{name}"
    found = sorted((n for n in objects if n.endswith(last)), key=lambda n: n.count("."))
    if not found or [n.count(".") for n in found].count(found[0].count(".")) > 1:
        return None
    entry = objects[found[0]]
    place = node.get("refdoc", env.docname), entry.docname, entry.node_id
    return make_refnode(app.builder, *place, contnode, found[0])


def skip_field(app, what, name, obj, skip, options):
    """Fields of a NamedTuple: its docstring says what they are, not their number."""
    alias = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if alias else None


def write_tables(app, page, source):
    """Put tables that the package knows into the pages that ask for them."""
    mark = "<!-- the table of all advice -->"
    if mark in source[0]:
        source[0] = source[0].replace(mark, advice_table())


def setup(app):
    app.connect("source-read", write_tables)
    app.connect("missing-reference", find_short_name)
    app.connect("autodoc-skip-member", skip_field)
