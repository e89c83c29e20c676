"""What ran out, in one sentence: the disk, with the file and the room there is; memory, with the setting that helps."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_DISK = {
    errno.ENOSPC: "The disk is full",
    errno.EDQUOT: "The quota of the disk is used up",
    errno.EFBIG: "The file is larger than may be written here (ulimit -f)",
}
# Libraries that write files themselves say it in their own ways: safetensors, NumPy.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_CUT_OFF = re.compile(r"\d+ requested and \d+ written")
_MEMORY_WORDS = re.compile(r"out of memory|(can't|cannot|unable to) allocate|bad_alloc|ALLOC_FAILED", re.IGNORECASE)
_ASKED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")


@contextmanager
def writing(path: Path, hidden: Path | None = None) -> Iterator[None]:
    """Where somebody writes a file or a folder: an error of a disk that is full names it, whoever raised it.

    hidden: a folder that it is written in before it has its name, which an error does not name.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (found := _OS_ERROR.search(str(error))):
            number = int(found[1])
        elif number is None and _CUT_OFF.search(str(error)):
            number = errno.ENOSPC
        named = Path(os.fsdecode(error.filename)) if isinstance(error, OSError) and error.filename else None
        if number not in _DISK or (named is not None and (hidden is None or not named.is_relative_to(hidden))):
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def sentence_on(error: BaseException, settings: Sequence[str] = ()) -> str | None:
    """What ran out, where that is what an error is about; None for any other.

    settings: keys of an experiment that need less memory when they are smaller.
    """
    if isinstance(error, OSError) and error.errno in _DISK:
        place = Path(os.fsdecode(error.filename)) if error.filename else None
        where = f"{place} could not be written. {room_at(place)} " if place else ""
        return f"{_DISK[error.errno]}: {where}Make room and run the same command again: it goes on from what is there."
    if _is_of_memory(error):
        return _on_memory(error, settings)
    return None


def is_of_host_memory(error: BaseException) -> bool:
    """Whether the machine's own memory ran out, rather than a GPU's."""
    return _is_of_memory(error) and not _is_on_gpu(error)


def room_at(path: Path) -> str:
    """How much is free where a path lies: a sentence."""
    folder = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    found = os.statvfs(folder)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if found.f_files and not found.f_favail:
        return f"The disk of {folder} has no place for another file, with {free / 1e9:,.1f} GB free."
    return f"{free / 1e9:,.1f} GB of {total / 1e9:,.1f} GB are free on the disk of {folder}."


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and _MEMORY_WORDS.search(str(error)) is not None  # PyTorch's are among them


def _is_on_gpu(error: BaseException) -> bool:
    return "CUDA" in str(error) or "HIP" in str(error)


def _on_memory(error: BaseException, settings: Sequence[str]) -> str:
    asked, on_gpu = "", _is_on_gpu(error)
    if found := _ASKED.search(str(error)):
        number, unit = (float(found[1]) / 2**30, "GiB") if found[2] == "bytes" else (float(found[1]), found[2])
        asked = f": {number:,.4g} {unit} more were asked for"
    smaller = (
        f"Set {' or '.join(settings)} to a smaller number: results change by rounding at most. " if settings else ""
    )
    more = "Use a GPU with more" if on_gpu else "Give it more: resources.memory_mb, on a machine that has as much"
    return f"Out of {'GPU ' if on_gpu else ''}memory{asked}. {smaller}{more}."
