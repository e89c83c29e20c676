"""What installing the package compiles, where there is a C compiler: plain C, called by ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path


def load(path: Path) -> ctypes.CDLL | None:
    """The library at a path; None where it was not compiled, or for another kind of machine."""
    if not path.is_file():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
