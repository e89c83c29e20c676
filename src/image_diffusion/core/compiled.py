"""What installing the package compiles, where there is a C compiler: plain C, called by ctypes."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def beside(module: str, name: str) -> Path | None:
    """Where what was compiled for a module lies; None where the module is no file, as in an exported model."""
    path = getattr(sys.modules[module], "__file__", None)
    return Path(path).with_name(name) if path else None


def load(path: Path | None) -> ctypes.CDLL | None:
    """The library at a path; None where it was not compiled, or for another kind of machine."""
    if path is None or not path.is_file():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
