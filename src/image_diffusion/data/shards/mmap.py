"""Map many files into one region of memory, of which the operating system reads the pages that are accessed."""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

_MAP_FIXED = 0x10  # Linux and macOS; Python's mmap lacks this constant


class Region:
    """Region of memory for consecutive files, each aligned to a page.

    sizes: bytes of each file. starts: int64 [n], offset of each file. bytes: the whole region, uint8, read-only; zeros
    until a file is put there. Keeps no file open, since a set may have thousands of shards.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        page = mmap.ALLOCATIONGRANULARITY
        room = np.array([-(-size // page) * page for size in sizes], dtype=np.int64)
        self._sizes = list(sizes)
        self.starts = np.cumsum(room) - room
        # Read-only anonymous memory costs only address space.
        memory = mmap.mmap(-1, int(room.sum()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive

    def put(self, number: int, path: Path) -> None:
        """Map a file, of the size that was stated, at its offset. Raises OSError."""
        address = self.bytes.data_ptr() + int(self.starts[number])
        descriptor = os.open(path, os.O_RDONLY)
        try:
            flags = mmap.MAP_PRIVATE | _MAP_FIXED
            mapped = _mmap()(address, self._sizes[number], mmap.PROT_READ, flags, descriptor, 0)
        finally:
            os.close(descriptor)
        if mapped != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))


def _mmap() -> Any:
    """Return the C library's mmap, which can map a file at a given address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function
