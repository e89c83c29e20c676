"""Whether files still hold what was written: hashed once, and believed from then on as long as their stamps stay.

A disk that changes bytes behind the system's back changes no stamp: what it did is found where a file is read anew.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from image_diffusion.core.files import Stamp, digest, read_json, sha256_file, stamp_of, write_json, write_text

AT_ONCE_BYTES = 2 << 30
"""What is hashed before training begins, a second or two; more than that while it goes on."""

_LISTING = "listing.json"
_THREADS = 4
_SETTLED_S = 2.0  # a file that was written just now could be written again within the resolution of its times
_LARGE_BYTES = 64 << 20  # above that it is worth a note, and waiting until the file has settled
_EVERY_S = 10.0  # what was found is noted at least so often, for those who are killed


def damaged(folder: Path, files: Mapping[str, str]) -> list[str]:
    """The names of the files in a folder whose sha256 is not the given one; a missing one counts.

    What was found is noted in the folder, with the stamp the file has. Processes that ask for much at once ask one
    after another, so that each file is hashed once. Raises OSError when a file cannot be read.
    """
    with _alone(folder) if sum(unread(folder, files).values()) > AT_ONCE_BYTES else nullcontext():
        found = _looked_up(folder, files)
        return [name for name, sha256 in files.items() if found[name] != sha256]


def describe(folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """The sha256 of files that were just written, by their path from a folder: the key "files" of a JSON file in there.

    That of large ones is noted like what `damaged` finds: nobody has to read them again to know it.
    """
    found = {os.path.relpath(path, folder): sha256_file(path) for path in paths if not _is_large(path)}
    if large := [path for path in paths if _is_large(path)]:
        settles_in_s = _SETTLED_S + 0.1 - min(_age_s(stamp_of(path)) for path in large)
        time.sleep(min(max(0.0, settles_in_s), _SETTLED_S + 0.1))
        found |= _looked_up(folder, [os.path.relpath(path, folder) for path in large])
    return {name: found[name] for name in (os.path.relpath(path, folder) for path in paths)}


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS over all files in a folder and below it, as `sha256sum --check` reads it.

    What was found is noted beside the folder, which others take as it is.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    found = describe(folder.parent, files)
    lines = (f"{found[os.path.relpath(path, folder.parent)]}  {path.relative_to(folder)}\n" for path in files)
    write_text(folder / "SHA256SUMS", "".join(lines))


def write_listing(folder: Path, pattern: str) -> None:
    """Note the sha256 of the files in a folder whose names fit a pattern, where there are any, in its listing.json.

    One that was damaged stays so, whatever is added: what it listed before is not known.
    """
    if files := sorted(folder.glob(pattern)):
        try:
            listed, is_whole = read_listing(folder), True
        except ValueError:
            listed, is_whole = {}, False
        listed = dict(sorted({**listed, **describe(folder, files)}.items()))
        write_json(folder / _LISTING, {"files": listed, "digest": digest(listed) if is_whole else None})


def read_listing(folder: Path) -> dict[str, str]:
    """What `write_listing` wrote; empty where it did not. Raises ValueError when it is, or was, damaged."""
    path = folder / _LISTING
    if not path.is_file():
        return {}
    found = read_json(path)
    listed = found.get("files") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or found.get("digest", digest(listed)) != digest(listed):  # older ones have none
        raise ValueError(f"{path} is damaged.")
    return listed


def tell_of_previews(folder: Path, fault_of: Callable[[Path, Mapping[str, str]], str | None] | None = None) -> None:
    """Say what is wrong with the previews of a training that are listed in a folder. Only the training could draw them
    again, and that takes as long as it took.

    fault_of: tells of files that should have these sha256 what is wrong with them; left out: all are read that changed.
    """
    try:
        fault = (fault_of or _fault_of)(folder, read_listing(folder))
    except ValueError as error:
        fault = str(error).rstrip(".")
    if fault is not None:
        print(
            f"note: the previews in {folder} are not as they were drawn: {fault}. The curve leaves out what is "
            f"damaged; begin the training anew to have it again.",
            file=sys.stderr,
            flush=True,
        )


def _fault_of(folder: Path, files: Mapping[str, str]) -> str | None:
    wrong = damaged(folder, files)
    return f"{wrong[0]} is not what was written" if wrong else None


def _looked_up(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The sha256 of each file: what is known of its stamp, or else hashed; empty for one that is missing."""
    known = _known(folder)
    found = {name: _known_hash(folder, name, known) for name in names}
    if open_questions := [name for name, sha256 in found.items() if sha256 is None]:
        noted_at = time.monotonic()
        with ThreadPoolExecutor(_THREADS) as pool:
            hashed = pool.map(lambda name: _stamp_and_hash(folder / name), open_questions)
            for name, (stamp, sha256) in zip(open_questions, hashed, strict=True):
                found[name] = sha256
                if sha256 and abs(_age_s(stamp)) > _SETTLED_S:
                    known[name] = [*stamp, sha256]
                if time.monotonic() - noted_at > _EVERY_S:
                    _note(folder, known)
                    noted_at = time.monotonic()
        _note(folder, known)
    return {name: sha256 or "" for name, sha256 in found.items()}


def check_files(folder: Path, files: Mapping[str, str], advice: str) -> None:
    """Raise ValueError naming a file in a folder whose sha256 is not the given one, with the advice at the end."""
    if wrong := damaged(folder, files):
        others = f", like {len(wrong) - 1:,} others" if wrong[1:] else ""
        raise ValueError(f"{folder / wrong[0]} is damaged{others}: its sha256 is not the manifest's. {advice}")


def unread(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Which of these files `damaged` would have to read, and the bytes of each; missing ones are left out."""
    known = _known(folder)
    asked = [name for name in names if (folder / name).is_file() and _known_hash(folder, name, known) is None]
    return {name: (folder / name).stat().st_size for name in asked}


class Inspection:
    """`damaged`, of so many bytes that it goes on while the files are read already. advice: what to do about it.

    Raises ValueError naming a damaged file: at once where that takes a second or two, else in `check` or `wait`.
    """

    def __init__(self, folder: Path, files: Mapping[str, str], advice: str) -> None:
        self._folder, self._files, self._advice = folder, files, advice
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if sum(unread(folder, files).values()) > AT_ONCE_BYTES:
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


def _is_large(path: Path) -> bool:
    return path.stat().st_size > _LARGE_BYTES


def _known_hash(folder: Path, name: str, known: Mapping[str, Any]) -> str | None:
    """What the file was found to be; None when nobody has looked at it since it got its stamp."""
    try:
        *stamp, sha256 = known[name]
        return str(sha256) if stamp == [*stamp_of(folder / name)] else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _stamp_and_hash(path: Path) -> tuple[Stamp, str]:
    """Of one moment: the stamp from before the file is read."""
    try:
        return stamp_of(path), sha256_file(path)
    except FileNotFoundError:
        return (0, 0, 0, 0), ""


def _age_s(stamp: Stamp) -> float:
    """Seconds since a file was changed."""
    return (time.time_ns() - max(stamp[1], stamp[2])) / 1e9


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
