"""Tables of Markdown with escaped cells."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_OPENS_LINK = re.compile(r"\[(?![-+.,\d ]*\](?![(\[]))")
"""An opening bracket, except that of an interval such as [-0.5, +2.1]."""


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
