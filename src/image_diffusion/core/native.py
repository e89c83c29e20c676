"""Compiled code that installing the package builds where it finds a C compiler: plain C, called by ctypes.

A compiled file ends with a seal: the sha256 of its source and the sha256 of all before. It differs by compiler and
gives the bytes that PyTorch and Pillow give, so that its source is a part of a stage's code, and it is not. One that is
damaged, or was compiled from another source than the one beside it, is not loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from pathlib import Path

_MARK = b"image_diffusion"
_SEAL_BYTES = len(_MARK) + 2 * hashlib.sha256().digest_size


def library_path(module: str, name: str) -> Path | None:
    """Return the path of the library compiled for a module; None where the module is not a file, as in an exported
    model."""
    path = getattr(sys.modules[module], "__file__", None)
    return Path(path).with_name(name) if path else None


def load(path: Path | None) -> ctypes.CDLL | None:
    """Load the library at a path; None where it was not compiled, is damaged, or is for another kind of machine."""
    if path is None or not path.is_file():
        return None
    if fault := fault_of(path):
        from image_diffusion.core.process.errors import log_line_once  # setup.py loads this module alone

        log_line_once(f"note: {fault}")
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def seal(path: Path, source: Path) -> None:
    """End a compiled file with the seal of itself and of its source, unless it has one."""
    built = path.read_bytes()
    if built[-_SEAL_BYTES:].startswith(_MARK):
        return
    built += _MARK + hashlib.sha256(source.read_bytes()).digest()
    path.write_bytes(built + hashlib.sha256(built).digest())


def fault_of(path: Path) -> str | None:
    """Return a sentence on the fault of a compiled file; None for one that is whole and of the source beside it."""
    built, size = path.read_bytes(), hashlib.sha256().digest_size
    source = path.with_suffix(".c")
    if hashlib.sha256(built[:-size]).digest() != built[-size:]:
        fault = "is damaged"
    elif source.is_file() and built[-2 * size : -size] != hashlib.sha256(source.read_bytes()).digest():
        fault = f"was compiled from another {source.name}"
    else:
        return None
    return f"{path} {fault} and is not used; slower code gives the same bytes. Install the package again to compile it."
