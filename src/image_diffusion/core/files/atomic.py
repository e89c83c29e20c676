"""Atomic writes of files and folders, and digests of their content."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from image_diffusion.core.process.errors import writing

ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError, ValueError)
"""Exceptions that zipfile raises for an archive or a member that is damaged, encrypted, or missing."""

_SETTING_UMASK = threading.Lock()  # two threads at once could restore 0


@contextmanager
def atomic_write(path: Path, check_owner: Callable[[], None] | None = None) -> Iterator[BinaryIO]:
    """Write a binary file atomically: `path` is complete and on disk, or unchanged.

    The file is written under a hidden name in the same folder, flushed to disk and renamed; the folder entry is flushed
    too. Unfinished files of killed processes under the same name are removed first. check_owner: called just before the
    renaming; raises an exception if the file must not be written.
    """
    with writing(path):
        make_folder(path.parent)
        remove_unfinished(path.parent, glob.escape(path.name))
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.dup(descriptor)  # and with it the lock, until the file is renamed
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield cast("BinaryIO", file)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o666 & ~_umask())
            if check_owner is not None:
                check_owner()
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(held)
        sync_folder(path.parent)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove unfinished files of killed processes from a folder, but no file that is being written. name: pattern of
    the files' names.
    """
    for leftover in folder.glob(f".{name}.*.tmp"):
        with suppress(OSError), leftover.open("rb") as file:  # it may have been renamed meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder in this context. On a file system without locks, this has no effect."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which then becomes `folder`, complete and on disk, in place of an existing one.
    If the context raises, `folder` is unchanged.

    Its files get the permissions of the umask. Unfinished folders of the same name are removed first, so that only one
    process may write it at a time.
    """
    make_folder(folder.parent)
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as temporary,
        writing(folder, Path(temporary)),
    ):
        written = Path(temporary) / folder.name
        written.mkdir()
        yield written
        for path in written.rglob("*"):
            if path.is_dir():
                sync_folder(path)
            else:
                finish_file(path)
        sync_folder(written)
        if folder.exists():
            shutil.rmtree(folder)
        written.rename(folder)
        sync_folder(folder.parent)


def finish_file(path: Path) -> None:
    """Flush a file that a library wrote to disk, and set the permissions of the umask, since some libraries restrict
    them to the owner. Raises OSError.
    """
    path.chmod(0o666 & ~_umask())
    _sync(path)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, where they are missing, each with its entry on disk."""
    missing = list(itertools.takewhile(lambda ancestor: not ancestor.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for ancestor in reversed(missing):
        sync_folder(ancestor.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_write(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode("utf-8"))


_AHEAD_S = 10.0


def is_in_future(path: Path) -> bool:
    """Return True if the modification time of a file is in the future, because a clock was wrong. A few seconds, by
    which a file server may be ahead, are ignored."""
    return path.stat().st_mtime > time.time() + _AHEAD_S


def write_if_changed(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, unless the file already contains it and is not from the future."""
    if not path.is_file() or is_in_future(path) or path.read_bytes() != text.encode("utf-8"):
        write_text(path, text)


def to_json(data: Any) -> str:
    """Return plain data as JSON. Equal data give equal text; NaN and infinity are errors."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data as JSON, atomically, with a "seal": the digest of the other data, which `read_json` verifies."""
    plain = json.loads(json.dumps(data, allow_nan=False))
    plain.pop("seal", None)
    write_text(path, to_json({**plain, "seal": digest(plain)}))


def read_json(path: Path) -> Any:
    """Return the plain data in a JSON file, without its seal. Raises ValueError if it is missing or damaged."""
    try:
        return parse_json(path.read_bytes(), str(path), "Delete it and run the stage again.")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None


def parse_json(text: bytes, where: str, advice: str) -> Any:
    """Return the plain data in the bytes of a JSON file, without the seal of this package's files. Raises ValueError
    that begins with `where` and ends with the advice if the bytes are not JSON or do not match the seal.
    """
    try:
        data = json.loads(text.decode("utf-8"))
        if not isinstance(data, dict):
            return data
        sealed = data.pop("seal", None)
        if sealed is not None and sealed != digest(data):
            raise ValueError("its content differs from its seal")
        if sealed is None and _ends_with_a_seal(data):
            raise ValueError("the name of its seal is damaged")
        return data
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}. {advice}") from None


def _ends_with_a_seal(data: dict[str, Any]) -> bool:
    """Return True if the last value is the digest of the others, under a key as long as that of a seal."""
    *rest, (name, last) = data.items() or [("", None)]
    if len(name) != len("seal") or not isinstance(last, str):
        return False
    with suppress(ValueError):  # NaN, which only other programs write
        return last == digest(dict(rest))
    return False


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power failure."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Stamp = tuple[int, int, int, int]
"""Size in bytes, time of the last modification and of the last change of any kind in nanoseconds, inode number."""


def stamp_of(path: Path) -> Stamp:
    """Return a stamp that changes if a file is replaced or modified: modification times can be set, but not the change
    time. Raises OSError.
    """
    return stamp_in(path.stat())


def stamp_in(status: os.stat_result) -> Stamp:
    """Return the stamp from a file's `os.stat_result`."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """Return the sha256 of a file, which this process hashes once for each stamp."""
    return _sha256_of(path, stamp_of(path))


@lru_cache(maxsize=4096)
def _sha256_of(path: Path, stamp: Stamp) -> str:
    return sha256_file(path)


def code_below(folder: Path) -> str:
    """Return a digest of the bytes of all code files below a folder: Python, C, and the tables that modules read.
    Compiled files, which differ by compiler, are excluded.
    """
    files = sorted(path for path in folder.rglob("*") if is_code(path))
    return digest([[str(path.relative_to(folder)), sha256_file(path)] for path in files])


def is_code(path: Path) -> bool:
    """Return True if a file of the package is code or a table that code reads, and neither compiled nor hidden."""
    is_generated = path.suffix in {".compiled", ".pyc"} or "__pycache__" in path.parts
    return not is_generated and not path.name.startswith(".") and path.is_file()


def write_page(path: Path, text: str) -> None:
    """Write a page of HTML atomically, with the sha256 of the preceding text in its last line."""
    write_text(path, f"{text.rstrip()}\n{_page_seal(text)}\n")


def is_whole_page(path: Path) -> bool:
    """Return True if a page is unchanged since `write_page` wrote it. Raises OSError."""
    above, _, seal = path.read_bytes().decode("utf-8", "replace").rstrip("\n").rpartition("\n")
    return seal == _page_seal(above)


def _page_seal(text: str) -> str:
    return f"<!-- sha256 of the above: {hashlib.sha256(text.rstrip().encode('utf-8')).hexdigest()} -->"


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file in SHA256SUMS by its path from the folder. Raises OSError if there is no
    SHA256SUMS, ValueError if it cannot be read.
    """
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").split("\n")  # names may have other line separators
    return {name: sha256 for sha256, name in (line.split("  ", 1) for line in lines if line)}


def digest(data: Any) -> str:
    """Return the sha256 of plain data in canonical JSON, independent of key order and spacing."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _umask() -> int:
    """Return the umask of this process. It is briefly changed only if the system does not report it."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_bytes()
        if match := re.search(rb"^Umask:\s*([0-7]+)$", status, re.MULTILINE):
            return int(match[1], 8)
    with _SETTING_UMASK:
        mask = os.umask(0)
        os.umask(mask)
    return mask
