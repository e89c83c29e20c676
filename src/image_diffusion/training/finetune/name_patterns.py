"""Select parts of a network by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any


def matching(named: Mapping[str, Any], patterns: Iterable[str], key: str, what: str) -> list[str]:
    """Return the names that match a pattern, in order. key, what: configuration key and kind of part, for messages.
    Raises ValueError for a pattern without a match.
    """
    names: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            begin = ", ".join(dict.fromkeys(name.split(".")[0] for name in named)) or "nothing"
            raise ValueError(f"{key} has {pattern}, which names no {what}. They begin with: {begin}.")
        names.update(fitting)
    return [name for name in named if name in names]
