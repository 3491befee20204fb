"""Sphinx builds these pages: ``make docs``, where a warning is an error."""

from importlib import metadata

project = "pytest-fxbucket"
release = metadata.version("pytest-fxbucket")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
# A link such as page.md#heading leads to that heading, as on GitHub.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100

html_theme = "alabaster"
html_theme_options = {
    "description": "A bucket plan is a test",
    "page_width": "76rem",
    "sidebar_width": "17rem",
    "fixed_sidebar": True,
}
html_show_sourcelink = False
