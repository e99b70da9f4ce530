"""Sphinx configuration."""

from numpyro_minibatch._version import __version__

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
]
myst_enable_extensions = ["amsmath", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"numpyro-minibatch {release}"
