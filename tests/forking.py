"""A process that imports everything once and is then forked for each program that needs these imports: cheap copies."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import multiprocessing.util
import weakref
from pathlib import Path

HUGE_PAGE = 2 << 20
"""Bytes of a huge page, on x86-64 and on most ARM64 systems."""
MADV_COLLAPSE = 25


def prepare_to_fork() -> None:
    """Make forks of this process cheap: call it when everything has been imported.

    Python's collector ignores shared objects. Memory is in huge pages if Linux (6.1 or later) has some: a fork then
    copies hundreds of entries of the page table instead of 170,000, which takes longer than most commands. Exit
    handlers of imported libraries (PyTorch takes 208 libraries apart one by one) are skipped, except for those that a
    command may need: messages are flushed, processes of multiprocessing end.
    """
    atexit._clear()
    for function in (weakref.finalize._exitfunc, multiprocessing.util._exit_function, logging.shutdown):  # type: ignore[attr-defined]
        atexit.register(function)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # else the first collection in each copy would copy the memory of all imported objects
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Move the memory of this process into huge pages, as far as they are available."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, _, *name = line.split()
        if mode != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for address in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)
