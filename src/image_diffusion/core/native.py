"""Optional compiled code in plain C, called by ctypes, which installation builds if there is a C compiler.

A compiled file ends with a seal: the sha256 of its source, and the sha256 of everything before it. It differs by
compiler, but computes the same bytes as PyTorch and Pillow, so that only its source is part of a stage's code. A file
that is damaged, or compiled from another source than the present one, is not loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from pathlib import Path

_MARK = b"image_diffusion"
_SEAL_BYTES = len(_MARK) + 2 * hashlib.sha256().digest_size


def library_path(module: str, name: str) -> Path | None:
    """Return the path of the library of a module; None if the module is not a file, as in an exported model."""
    path = getattr(sys.modules[module], "__file__", None)
    return Path(path).with_name(name) if path else None


def load(path: Path | None) -> ctypes.CDLL | None:
    """Load the library at a path; None if it was not compiled, is damaged, or is for another kind of machine."""
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
    """Append the seal to a compiled file, unless it has one."""
    built = path.read_bytes()
    if built[-_SEAL_BYTES:].startswith(_MARK):
        return
    built += _MARK + hashlib.sha256(source.read_bytes()).digest()
    path.write_bytes(built + hashlib.sha256(built).digest())


def fault_of(path: Path) -> str | None:
    """Return a sentence on the fault of a compiled file; None if it is undamaged and of the present source."""
    built, size = path.read_bytes(), hashlib.sha256().digest_size
    source = path.with_suffix(".c")
    if hashlib.sha256(built[:-size]).digest() != built[-size:]:
        fault = "is damaged"
    elif source.is_file() and built[-2 * size : -size] != hashlib.sha256(source.read_bytes()).digest():
        fault = f"was compiled from another {source.name}"
    else:
        return None
    return f"{path} {fault} and is not used; slower code gives the same bytes. Install the package again to compile it."
