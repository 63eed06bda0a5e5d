"""The Sphinx configuration of `make docs`: Markdown pages, and API pages from docstrings."""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.inspect import stringify_signature

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
jaxnorm = importlib.import_module("jaxnorm")

project = "jaxnorm"
author = "the jaxnorm authors"
release = jaxnorm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Leave out the API pages of modules that cannot be imported because a package is not installed.
_MODULES = {"equinox": ("equinox", "jaxnorm.equinox"), "linen": ("flax",), "nnx": ("flax",)}
exclude_patterns = [
    f"api/{page}.md"
    for page, needed in _MODULES.items()
    if not all(importlib.util.find_spec(name) for name in needed)
]

html_theme = "furo"
html_title = f"jaxnorm {release}"
html_show_copyright = False
# Sphinx's default renderer loads MathJax from the network when a page is opened.
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_preserve_defaults = True
# Do not show annotations: docstrings already describe types and shapes.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def link_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Link Markdown files outside `docs` as files, because Sphinx builds no pages from them."""
    source[0] = re.sub(r"\]\((\.\./[^)]*\.md)\)", r"](path:\1)", source[0])


def show_arguments(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, Any] | None:
    """Show the arguments of `__init__` if a class's metaclass hides them (nnx)."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    shown = inspect.Signature(parameters)
    return stringify_signature(shown, show_annotation=False), returns


def inline_equation(translator: Any, node: nodes.math) -> None:
    """Write an equation as MathML, which browsers display without scripts."""
    translator.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def displayed_equation(translator: Any, node: nodes.math_block) -> None:
    """Write a displayed equation as MathML."""
    translator.body.append(latex2mathml.tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def check_offline(app: Sphinx, exception: Exception | None) -> None:
    """Raise if a page loads something from the network."""
    if exception is not None:
        return
    remote = re.compile(
        r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]*)"""
    )
    for page in Path(app.outdir).rglob("*.html"):
        for address in remote.findall(page.read_text(encoding="utf-8")):
            raise ExtensionError(f"{page.name} loads {address}; expected nothing from the network")


def setup(app: Sphinx) -> None:
    """Register the extensions above with Sphinx, which calls this function first."""
    app.add_html_math_renderer("mathml", (inline_equation, None), (displayed_equation, None))
    app.connect("source-read", link_files)
    app.connect("build-finished", check_offline)
    app.connect("autodoc-process-signature", show_arguments)
