"""A page of HTML that needs no script and no network."""

from __future__ import annotations

import html

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } img { max-width: 100% } summary { cursor: pointer }
.wrong { color: #b00020 }
"""


def plain_page(title: str, body: str) -> str:
    """Return a page. title: text, also its heading. body: HTML."""
    name = html.escape(title)
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{name}</title>\n<style>{_STYLE}</style>'
    return f"{head}\n<h1>{name}</h1>\n{body}\n</html>\n"
