"""What people are told: one clear line, never a traceback for a mistake of theirs."""

from __future__ import annotations


class Stopped(Exception):  # noqa: N818 - not an error: the run ended early on request and can be continued
    """The stage was asked to stop, saved what it had, and continues where it left off when it is run again."""
