"""Tables of Markdown, whose cells are text whatever they contain."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_OPENS_LINK = re.compile(r"\[(?![-+.,\d ]*\](?![(\[]))")
"""A bracket, but for that of an interval such as [-0.5, +2.1]."""


def table(head: Sequence[object], rows: Iterable[Iterable[object]], align: Sequence[str] = ()) -> str:
    """Return a table. align: what stands under each head, `:--` or `--:`; by default `---`."""
    lines = [_line(map(text, head)), _line(align or ["---"] * len(head)), *(_line(map(text, row)) for row in rows)]
    return "\n".join(lines)


def text(value: object) -> str:
    """Return a value as text: names come from the data, and are no HTML, links or rows of their own."""
    escaped = html.escape(" ".join(str(value).splitlines()), quote=False)
    return _OPENS_LINK.sub(r"\\[", escaped.replace("\\", "\\\\").replace("|", "\\|"))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
