"""The page of messages contains every text that the package raises or prints."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import messages


def test_messages_are_collected_with_their_placeholders() -> None:
    source = """
def f(x):
    if x:
        raise ValueError(f"x is {x!r}, not " + "a size. Use 1.")
    log_line("two\\nlines" if x else f"warning: {x.name}")
    raise KeyError(x)
"""
    assert list(messages.messages(source)) == [
        (4, "x is {x}, not a size. Use 1."),
        (5, "two lines | warning: {x.name}"),
    ]


def test_messages_page_lists_modules_and_messages() -> None:
    page = messages.page()
    assert "## core/process/command.py" in page and "is not a part. Write 2/8 for part 2" in page
