"""Messages for people, and the exception that ends a process without an error."""

from __future__ import annotations

import sys
from functools import cache


class Stopped(Exception):  # noqa: N818 - not an error: the run ended early on request and can be continued
    """Raised when a stage was asked to stop and has saved: it resumes when it is run again."""


def log_line(line: str) -> None:
    """Write a line to stderr in one piece, so that lines of processes that write at once do not mix."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def package(name: str, extra: str) -> str:
    """Return the end of a message on a package that is not installed. extra: of this package, that brings it."""
    return f"the package {name}. Install it: pip install 'image-diffusion[{extra}]'."


@cache
def log_line_once(line: str) -> None:
    """Write a line to stderr once in a process, however often it is called."""
    log_line(line)
