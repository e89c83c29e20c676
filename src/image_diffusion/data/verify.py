"""Whether files still hold what was written: hashed once, and believed from then on as long as their stamps stay."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from image_diffusion.core.files import read_json, sha256_file, stamp_of, write_json

AT_ONCE_BYTES = 2 << 30
"""What is hashed before training begins, a second or two; more than that while it goes on."""

_THREADS = 4
_SETTLED_S = 2.0  # a file that was written just now could be written again within the resolution of its times
_EVERY_S = 10.0  # what was found is noted at least so often, for those who are killed


def damaged(folder: Path, files: Mapping[str, str]) -> list[str]:
    """The names of the files in a folder whose sha256 is not the given one; a missing one counts.

    What was found good is noted in the folder, with the stamp the file has. Processes that ask for much at once ask one
    after another, so that each file is hashed once. Raises OSError when a file cannot be read.
    """
    with _alone(folder) if unverified_bytes(folder, files) > AT_ONCE_BYTES else nullcontext():
        known = _known(folder)
        open_questions = {name: sha256 for name, sha256 in files.items() if not _is_known(folder, name, sha256, known)}
        if not open_questions:
            return []
        wrong, noted_at = [], time.monotonic()
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(lambda name: _stamp_and_hash(folder / name), open_questions)
            for (name, sha256), (stamp, actual) in zip(open_questions.items(), found, strict=True):
                if actual != sha256:
                    wrong.append(name)
                elif abs(time.time_ns() - max(stamp[1], stamp[2])) > _SETTLED_S * 1e9:
                    known[name] = [*stamp, sha256]
                if time.monotonic() - noted_at > _EVERY_S:
                    _note(folder, known)
                    noted_at = time.monotonic()
        _note(folder, known)
        return wrong


def check_files(folder: Path, files: Mapping[str, str], advice: str) -> None:
    """Raise ValueError naming a file in a folder whose sha256 is not the given one, with the advice at the end."""
    if wrong := damaged(folder, files):
        others = f", like {len(wrong) - 1:,} others" if wrong[1:] else ""
        raise ValueError(f"{folder / wrong[0]} is damaged{others}: its sha256 is not the manifest's. {advice}")


def unverified_bytes(folder: Path, files: Mapping[str, str]) -> int:
    """How much `damaged` would have to read."""
    known = _known(folder)
    return sum(
        (folder / name).stat().st_size
        for name, sha256 in files.items()
        if (folder / name).is_file() and not _is_known(folder, name, sha256, known)
    )


class Inspection:
    """`damaged`, of so many bytes that it goes on while the files are read already. advice: what to do about it.

    Raises ValueError naming a damaged file: at once where that takes a second or two, else in `check` or `wait`.
    """

    def __init__(self, folder: Path, files: Mapping[str, str], advice: str) -> None:
        self._folder, self._files, self._advice = folder, files, advice
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if unverified_bytes(folder, files) > AT_ONCE_BYTES:
            self._thread = threading.Thread(target=self._inspect, daemon=True, name="verify")
            self._thread.start()
        else:
            self._inspect()
            self.check()

    def check(self) -> None:
        """Raise what has been found so far."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when every file was looked at. Raises what was found."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _inspect(self) -> None:
        try:
            check_files(self._folder, self._files, self._advice)
        except (ValueError, OSError) as error:  # raised where the files are read
            self._error = error


def _is_known(folder: Path, name: str, sha256: str, known: Mapping[str, Any]) -> bool:
    try:
        return bool(known.get(name) == [*stamp_of(folder / name), sha256])
    except OSError:
        return False


def _stamp_and_hash(path: Path) -> tuple[tuple[int, int, int, int], str]:
    """Of one moment: the stamp from before the file is read."""
    try:
        return stamp_of(path), sha256_file(path)
    except FileNotFoundError:
        return (0, 0, 0, 0), ""


def _known(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_json(folder / ".verified.json"))
    except (ValueError, OSError, TypeError):
        return {}


def _note(folder: Path, known: Mapping[str, Any]) -> None:
    with suppress(OSError):  # a folder that is not ours: it is hashed again
        write_json(folder / ".verified.json", dict(sorted(known.items())))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
