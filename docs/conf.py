"""The documentation's site: `make docs` builds it into site/ without a network, and fails where a link leads nowhere.

Pages are Markdown; notebooks are shown as they were executed. Fonts, scripts and pictures are the site's own.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

import image_diffusion

sys.path.insert(0, str(Path(__file__).parent))
import messages
import options

project = "image-diffusion"
author = "the image-diffusion authors"
version = release = image_diffusion.__version__.partition("+")[0]
html_title = f"{project} {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_copyright = False

SHOWN_AS = {"../tests/bench/RESULTS.md": "measurements.md"}
"""Files of the repository that are pages of the site as well: links to them lead there."""

GENERATED = {"messages": messages, "options": options}
"""Pages whose text ends with what a module of this folder collects from the code."""


class Notebook(MystParser):
    """A notebook: its Markdown, its code, and under that what it printed and drew."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Read it as Markdown."""
        super().parse("\n\n".join(_cell(each) for each in json.loads(inputstring)["cells"]), document)


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *(_output(each) for each in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    shown = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in shown:
        return f"![What the cell above draws](data:image/png;base64,{''.join(shown['image/png']).strip()})"
    return f"```text\n{''.join(shown['text/plain']).rstrip()}\n```"


def to_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Lead links to files that are pages of the site to the pages, and append what is generated from the code."""
    for path, shown_as in SHOWN_AS.items():
        source[0] = source[0].replace(f"]({path}", f"]({shown_as}")
    if name in GENERATED:
        source[0] += f"\n{GENERATED[name].page()}"


def as_code(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings mark code with one backtick, as Markdown does, and a star means a star."""
    for i, line in enumerate(lines):
        parts = re.split(r"(?<!`)`([^`]+)`(?!`)", line)
        lines[i] = "".join(f"``{each}``" if j % 2 else each.replace("*", r"\*") for j, each in enumerate(parts))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions of this file to Sphinx."""
    app.add_source_parser(Notebook)
    app.add_source_suffix(".ipynb", "ipynb")
    app.connect("source-read", to_pages)
    app.connect("autodoc-process-docstring", as_code)
    return {"parallel_read_safe": True}
