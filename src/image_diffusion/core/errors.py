"""What is told to people, and the end that is no error."""

from __future__ import annotations

import sys
from functools import cache


class Stopped(Exception):  # noqa: N818 - not an error: the run ended early on request and can be continued
    """The stage was asked to stop, saved what it had, and continues where it left off when it is run again."""


@cache
def tell_once(sentence: str) -> None:
    """Print a sentence for people, once in a process, however often it comes up."""
    print(sentence, file=sys.stderr, flush=True)
