"""What people are told: one clear line, never a traceback for a mistake of theirs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from functools import cache


class Stopped(Exception):  # noqa: N818 - not an error: the run ended early on request and can be continued
    """The stage was asked to stop, saved what it had, and continues where it left off when it is run again."""


def unknown_choice(kind: str, value: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a list: `Unknown schedule 'cosin'. Known: cosine, linear.`"""
    names = sorted(known)
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ValueError(f"Unknown {kind} '{value}'. Known: {', '.join(names)}.{hint}")


@cache
def tell_once(sentence: str) -> None:
    """Print a sentence for people, once in a process, however often it comes up."""
    print(sentence, file=sys.stderr, flush=True)
