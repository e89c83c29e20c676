"""Durations in words."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Format a duration in words: 42 s, 3.1 min, 2.4 h, 12.5 days."""
    for unit, size, next_size in (("s", 1.0, 60.0), ("min", 60.0, 3600.0), ("h", 3600.0, 86400.0)):
        if seconds < next_size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.1f} days"
