"""Messages on stderr, and the exception that ends a process without an error."""

from __future__ import annotations

import sys
from functools import cache


class Stopped(Exception):  # noqa: N818 - not an error: the run ended early on request and can be continued
    """Raised after a stage has saved on a request to stop. Running it again resumes it."""


def log_line(line: str) -> None:
    """Write a line to stderr in one call, so that lines of concurrent processes are not mixed."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def package(name: str, extra: str) -> str:
    """Return the end of a message on a package that is not installed. extra: this package's extra that installs it."""
    return f"the package {name}. Install it: pip install 'image-diffusion[{extra}]'."


@cache
def log_line_once(line: str) -> None:
    """Write a line to stderr once in a process, however often it is called."""
    log_line(line)
