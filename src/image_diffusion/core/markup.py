"""Tables of Markdown with escaped cells, and pages of HTML that need no script and no network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_OPENS_LINK = re.compile(r"\[(?![-+.,\d ]*\](?![(\[]))")
"""An opening bracket, except that of an interval such as [-0.5, +2.1]."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } img { max-width: 100% } summary { cursor: pointer }
.wrong { color: #b00020 }
"""


def table(head: Sequence[object], rows: Iterable[Iterable[object]], align: Sequence[str] = ()) -> str:
    """Return a table. align: the delimiter under each header, `:--` or `--:`; by default `---`."""
    lines = [_line(map(text, head)), _line(align or ["---"] * len(head)), *(_line(map(text, row)) for row in rows)]
    return "\n".join(lines)


def text(value: object) -> str:
    """Return a value as escaped text, since names from the data must not become HTML, links or rows."""
    escaped = html.escape(" ".join(str(value).splitlines()), quote=False)
    return _OPENS_LINK.sub(r"\\[", escaped.replace("\\", "\\\\").replace("|", "\\|"))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plain_page(title: str, body: str) -> str:
    """Return a page. title: text, also its heading. body: HTML."""
    name = html.escape(title)
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{name}</title>\n<style>{_STYLE}</style>'
    return f"{head}\n<h1>{name}</h1>\n{body}\n</html>\n"
