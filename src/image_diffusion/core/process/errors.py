"""Messages on stderr; those on exhausted resources: the disk, with the file and the free space, and memory, with the
setting that helps; and the exception that ends a process without an error."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path


class Stopped(Exception):  # noqa: N818 - not an error: the run ended early on request and can be continued
    """Raised after a stage has saved on a request to stop. Running it again resumes it."""


def log_line(line: str) -> None:
    """Write a line to stderr in one call, so that lines of concurrent processes are not mixed."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def package(name: str, extra: str) -> str:
    """Return the end of a message on a package that is not installed. extra: this package's extra that installs it."""
    return f"the package {name}. Install it: pip install 'image-diffusion[{extra}]'."


@cache
def log_line_once(line: str) -> None:
    """Write a line to stderr once in a process, however often it is called."""
    log_line(line)


_DISK = {
    errno.ENOSPC: "The disk is full",
    errno.EDQUOT: "The quota of the disk is used up",
    errno.EFBIG: "The file exceeds the limit of its size (ulimit -f)",
}
# Messages of libraries that write files themselves: safetensors, NumPy.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_CUT_OFF = re.compile(r"\d+ requested and \d+ written")
_MEMORY_WORDS = re.compile(r"out of memory|(can't|cannot|unable to) allocate|bad_alloc|ALLOC_FAILED", re.IGNORECASE)
_OF_OTHERS = re.compile(
    r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free\.(?s:.*)this process has ([\d.]+ \w+) memory in use"
)
_REQUESTED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")


@contextmanager
def writing(path: Path, hidden: Path | None = None) -> Iterator[None]:
    """Name the file or folder being written in any error of a full disk in this context. hidden: temporary folder in
    which it is written, which the error should not name.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (match := _OS_ERROR.search(str(error))):
            number = int(match[1])
        elif number is None and _CUT_OFF.search(str(error)):
            number = errno.ENOSPC
        named = Path(os.fsdecode(error.filename)) if isinstance(error, OSError) and error.filename else None
        if number not in _DISK or (named is not None and (hidden is None or not named.is_relative_to(hidden))):
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def sentence_on(error: BaseException, settings: Sequence[str] = ()) -> str | None:
    """Return a sentence on the exhausted resource, if that caused an error; None for other errors. settings: keys of an
    experiment whose reduction saves memory.
    """
    if isinstance(error, OSError) and error.errno in _DISK:
        place = Path(os.fsdecode(error.filename)) if error.filename else None
        where = f"{place} could not be written. {room_at(place)} " if place else ""
        return f"{_DISK[error.errno]}: {where}Free some space and run the same command again: it resumes."
    if _is_of_memory(error):
        return _on_memory(error, settings)
    return None


def is_of_host_memory(error: BaseException) -> bool:
    """Return True if the machine's memory ran out, rather than a GPU's."""
    return _is_of_memory(error) and not _is_on_gpu(error)


def room_at(path: Path) -> str:
    """Return a sentence on the free space on the file system of a path."""
    folder = next((ancestor for ancestor in (path, *path.absolute().parents) if ancestor.exists()), Path("/"))
    status = os.statvfs(folder)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if status.f_files and not status.f_favail:
        return f"The disk of {folder} has no inode left, with {free / 1e9:,.1f} GB free."
    return f"{free / 1e9:,.1f} GB of {total / 1e9:,.1f} GB are free on the disk of {folder}."


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and _MEMORY_WORDS.search(str(error)) is not None  # PyTorch's are among them


def _is_on_gpu(error: BaseException) -> bool:
    return "CUDA" in str(error) or "HIP" in str(error)


def _on_memory(error: BaseException, settings: Sequence[str]) -> str:
    request, on_gpu = "", _is_on_gpu(error)
    if match := _REQUESTED.search(str(error)):
        number, unit = (float(match[1]) / 2**30, "GiB") if match[2] == "bytes" else (float(match[1]), match[2])
        request = f": {number:,.4g} {unit} more were requested"
    smaller = (
        f"Set {' or '.join(settings)} to a smaller number: results change by rounding at most. " if settings else ""
    )
    more = "Use a GPU with more memory" if on_gpu else "Raise resources.memory_mb, on a machine that has as much"
    return f"Out of {'GPU ' if on_gpu else ''}memory{request}. {smaller}{more}.{_on_others(str(error))}"


def _on_others(message: str) -> str:
    """Return a sentence on the memory of a GPU that other programs use, if it is at least one GiB."""
    if (match := _OF_OTHERS.search(message)) is None:
        return ""
    total, free, own = (_gib(size) for size in match.groups())
    used = total - free - own
    return f" Other programs use {used:.1f} of its {total:.1f} GiB: choose another GPU." if used >= 1 else ""


def _gib(size: str) -> float:
    number, unit = size.split()
    return float(number) / {"bytes": 2**30, "KiB": 2**20, "MiB": 2**10, "GiB": 1}[unit]
