"""The page of messages holds every text that the package raises or writes to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import messages


def test_texts_of_errors_and_lines_are_collected_with_their_values() -> None:
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


def test_the_page_names_the_module_and_the_line_of_a_message() -> None:
    page = messages.page()
    assert "## core/process/command.py" in page and "is not a part. Write 2/8 for part 2" in page
