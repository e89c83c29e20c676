"""Verification of files by sha256. Each file is hashed once, and is trusted until its stamp changes.

Silent corruption by a disk changes no stamp, and is only detected when a file is hashed again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import (
    Stamp,
    digest,
    folder_lock,
    read_json,
    sha256_file,
    stamp_of,
    write_json,
    write_text,
)
from image_diffusion.core.files.mirrored import fetch_missing
from image_diffusion.core.names import inside
from image_diffusion.core.process.errors import log_line

AT_ONCE_BYTES = 2 << 30
"""Bytes that are hashed before training begins, a second or two; larger amounts are hashed during training."""

_LISTING = "listing.json"
_THREADS = 4  # hashlib releases Python's lock
_SETTLED_S = 2.0  # a new file could be modified again within the resolution of its timestamps
_LARGE_BYTES = 64 << 20  # `describe` waits until larger files have settled, and records their hashes
_EVERY_S = 10.0  # hashes are recorded at this interval, in case the process is killed


def damaged(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Return the names of the files in a folder that are missing or have another sha256.

    Files that are only in the project's mirror are fetched first. Hashes are recorded in the folder, with the stamp of
    the file. Processes that have much to hash take turns, so that each file is hashed once. Raises OSError if a file
    cannot be read, ValueError for a name that leads out of the folder.
    """
    for name in files:
        inside(folder, name, follow=True)
    fetch_missing(folder, files)
    with folder_lock(folder) if sum(unread(folder, files).values()) > AT_ONCE_BYTES else nullcontext():
        hashes = _hashes_of(folder, files)
        return [name for name, sha256 in files.items() if hashes[name] != sha256]


def describe(folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """Return the sha256 of new files by their path from a folder, for the key "files" of a JSON file in that folder.

    Hashes of large files are recorded like those of `damaged`, so that they need not be computed again.
    """
    hashes = {os.path.relpath(path, folder): sha256_file(path) for path in paths if not _is_large(path)}
    if large := [path for path in paths if _is_large(path)]:
        settles_in_s = _SETTLED_S + 0.1 - min(_age_s(stamp_of(path)) for path in large)
        time.sleep(min(max(0.0, settles_in_s), _SETTLED_S + 0.1))
        hashes |= _hashes_of(folder, [os.path.relpath(path, folder) for path in large])
    return {name: hashes[name] for name in (os.path.relpath(path, folder) for path in paths)}


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return a digest of the samples of a set of shards, their order and the shares of the splits. It does not change
    when files are saved again with equal pixels, although other images may then be held out."""
    names = ("format", "kind", "crop", "codec", "pairs", "classes", "validation_fraction", "test_fraction", "shards")
    # Absent keys are omitted, so that manifests of versions without these keys keep their digest.
    chosen = {name: manifest[name] for name in ("not_held_out", "held_out", "levels") if manifest.get(name)}
    return digest({name: manifest[name] for name in names if name in manifest} | chosen)


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS over all files in a folder and below it, as `sha256sum --check` reads it.

    Hashes are recorded in the parent folder, where other processes reuse them.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    hashes = describe(folder.parent, files)
    lines = (f"{hashes[os.path.relpath(path, folder.parent)]}  {path.relative_to(folder)}\n" for path in files)
    write_text(folder / "SHA256SUMS", "".join(lines))


def write_listing(folder: Path, pattern: str) -> None:
    """Add the sha256 of the files in a folder that match a pattern, if any, to its listing.json.

    A damaged listing remains marked as damaged, since its earlier entries are unknown.
    """
    if files := sorted(folder.glob(pattern)):
        try:
            listed, is_whole = read_listing(folder), True
        except ValueError:
            listed, is_whole = {}, False
        listed = dict(sorted({**listed, **describe(folder, files)}.items()))
        write_json(folder / _LISTING, {"files": listed, "digest": digest(listed) if is_whole else None})


def read_listing(folder: Path) -> dict[str, str]:
    """Return the listing of `write_listing`; empty without one. Raises ValueError if it is, or was, damaged."""
    path = folder / _LISTING
    if not path.is_file():
        return {}
    listing = read_json(path)
    listed = listing.get("files") if isinstance(listing, dict) else None
    if not isinstance(listed, dict) or listing.get("digest", digest(listed)) != digest(listed):  # old ones lack it
        raise ValueError(f"{path} is damaged.")
    return listed


def warn_about_previews(folder: Path, fault_of: Callable[[Path, Mapping[str, str]], str | None] | None = None) -> None:
    """Warn of damaged previews of a training that are listed in a folder. Only training again could restore them.

    fault_of: returns the fault of files with given sha256; unset: all changed files are hashed.
    """
    try:
        fault = (fault_of or _fault_of)(folder, read_listing(folder))
    except ValueError as error:
        fault = str(error).rstrip(".")
    if fault is not None:
        log_line(
            f"warning: the previews in {folder} have changed since they were drawn: {fault}. The curve leaves out "
            f"damaged ones; only a new training draws them again."
        )


def _fault_of(folder: Path, files: Mapping[str, str]) -> str | None:
    wrong = damaged(folder, files)
    return f"{wrong[0]} is damaged" if wrong else None


def _hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each file, as recorded for its stamp or newly computed; empty for a missing file."""
    recorded = _recorded_checksums(folder)
    hashes = {name: _known_hash(folder, name, recorded) for name in names}
    if unknown := [name for name, sha256 in hashes.items() if sha256 is None]:
        noted_at = time.monotonic()
        with ThreadPoolExecutor(_THREADS) as pool:
            hashed = pool.map(lambda name: _stamp_and_hash(folder / name), unknown)
            for name, (stamp, sha256) in zip(unknown, hashed, strict=True):
                hashes[name] = sha256
                if sha256 and abs(_age_s(stamp)) > _SETTLED_S:
                    recorded[name] = [*stamp, sha256]
                if time.monotonic() - noted_at > _EVERY_S:
                    _note(folder, recorded)
                    noted_at = time.monotonic()
        _note(folder, recorded)
    return {name: sha256 or "" for name, sha256 in hashes.items()}


def check_files(folder: Path, files: Mapping[str, str], advice: str) -> None:
    """Raise ValueError that names a file in a folder with another sha256, and ends with the advice."""
    if wrong := damaged(folder, files):
        others = f", and so are {len(wrong) - 1:,} others" if wrong[1:] else ""
        raise ValueError(f"{folder / wrong[0]} is damaged{others}: its sha256 differs from the manifest's. {advice}")


def unread(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the files that `damaged` would have to hash, with their sizes in bytes, without missing files."""
    recorded = _recorded_checksums(folder)
    pending = [name for name in names if (folder / name).is_file() and _known_hash(folder, name, recorded) is None]
    return {name: (folder / name).stat().st_size for name in pending}


class Inspection:
    """Verification of files, in the background if it takes long, while they are already in use. advice: the end of the
    error message.

    Raises ValueError that names a damaged file: at once if it takes a second or two, otherwise in `check` or `wait`.
    """

    def __init__(self, folder: Path, files: Mapping[str, str], advice: str) -> None:
        self._folder, self._files, self._advice = folder, files, advice
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        fetch_missing(folder, files)
        if sum(unread(folder, files).values()) > AT_ONCE_BYTES:
            self._thread = threading.Thread(target=self._inspect, daemon=True, name="verify")
            self._thread.start()
        else:
            self._inspect()
            self.check()

    def check(self) -> None:
        """Raise the error found so far, if any."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until every file has been hashed. Raises the error found, if any."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _inspect(self) -> None:
        try:
            check_files(self._folder, self._files, self._advice)
        except (ValueError, OSError) as error:  # raised by `check`
            self._error = error


def _is_large(path: Path) -> bool:
    return path.stat().st_size > _LARGE_BYTES


def _known_hash(folder: Path, name: str, recorded: Mapping[str, Any]) -> str | None:
    """Return the recorded hash of the file; None if there is none for its current stamp."""
    try:
        *stamp, sha256 = recorded[name]
        return str(sha256) if stamp == [*stamp_of(folder / name)] else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _stamp_and_hash(path: Path) -> tuple[Stamp, str]:
    """Return the stamp and the hash of a file. The stamp is taken before the file is read."""
    try:
        return stamp_of(path), sha256_file(path)
    except FileNotFoundError:
        return (0, 0, 0, 0), ""


def _age_s(stamp: Stamp) -> float:
    """Return the seconds since a file was changed."""
    return (time.time_ns() - max(stamp[1], stamp[2])) / 1e9


def _recorded_checksums(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_json(folder / ".verified.json"))
    except (ValueError, OSError, TypeError):
        return {}


def _note(folder: Path, recorded: Mapping[str, Any]) -> None:
    with suppress(OSError):  # a read-only folder: its files are hashed again
        write_json(folder / ".verified.json", dict(sorted(recorded.items())))
