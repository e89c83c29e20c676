"""Text of other programs: decoding, lines, classes and cells. Text for readers: durations in words, tables of Markdown
with escaped cells, and pages of HTML that need no script and no network."""

from __future__ import annotations

import codecs
import html
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(data: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark, or UTF-16 with one.

    Raises ValueError that names the line and the byte if the text is in another encoding.
    """
    encoding = "utf-16" if data.startswith(_UTF16) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        expected = "UTF-16" if encoding == "utf-16" else "UTF-8"
        raise ValueError(
            f"line {line:,}: the byte 0x{error.object[error.start]:02x} is not {expected} (it may be Latin-1). Save "
            f"the file as UTF-8"
        ) from None


def lines_in(data: bytes) -> list[str]:
    """Return the lines of a text without their ends: LF, CR LF or CR. Raises ValueError as `decoded` does."""
    return decoded(data).replace("\r\n", "\n").replace("\r", "\n").split("\n")


def class_name(text: str) -> str:
    """Return the name of a class in Unicode's form NFC, since file systems compose accents differently."""
    return unicodedata.normalize("NFC", text)


def class_in(cell: Any) -> str | None:
    """Return the class that a cell of a table or a value of JSON names; None for a null, NaN or blank text.

    A whole float is an integer: pandas stores integers as floats in a column with gaps.
    """
    return class_name(cell_text(cell)) or None


def cell_text(cell: Any) -> str:
    """Return a cell as stripped text: empty for a null or NaN, and without decimals for a whole float."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).strip()


def duration(seconds: float) -> str:
    """Format a duration in words: 42 s, 3.1 min, 2.4 h, 12.5 days."""
    for unit, size, next_size in (("s", 1.0, 60.0), ("min", 60.0, 3600.0), ("h", 3600.0, 86400.0)):
        if seconds < next_size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.1f} days"


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
