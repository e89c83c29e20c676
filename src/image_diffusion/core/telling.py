"""What a command says on the terminal."""

from __future__ import annotations

import sys


def tell(line: str) -> None:
    """Write a line to stderr, its end with it: lines of processes that end together do not run into each other."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
