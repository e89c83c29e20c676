"""Snapshots of a project's results while stages write them, their files as chunks, and their sending to the mirror.

Stages write a file under another name, rename it, and only then write the files that refer to it. A snapshot of all
files at one moment is therefore a state that a killed machine could have left, from which the same command resumes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from image_diffusion.core.files.atomic import Stamp, stamp_in, write_json
from image_diffusion.core.files.mirrored import CHUNK, MirroredFile, chunk_of, lost, place_of
from image_diffusion.workflow.mirror.lease import Lease

_RECORDS = "metadata"
_NOT_SENT = frozenset({".verified.json", ".owner", ".lock"})
"""Records and locks of one machine, whose stamps and processes mean nothing on another."""
_JOURNALS = frozenset({"journal", ".journal"})
_TRIES = 5
_OPEN_FROM = 1 << 20
_MOST_OPEN = 400
"""Maximum number of large files that are kept open from the snapshot until they are sent, so that a checkpoint removed
meanwhile is sent completely; below the usual limit of 1,024 open files."""


@dataclass(frozen=True)
class Project:
    """Folders of a project in a mirror, each under its own name. results: as in the configuration."""

    results: Path
    root: Path = Path()

    @property
    def state(self) -> Path:
        """Folder of this machine's records about the mirror."""
        return self.root / ".snakemake" / "mirror"

    @property
    def folders(self) -> Mapping[str, Path]:
        """Return the folders by name: the results, and Snakemake's records and benchmarks of them."""
        snakemake = self.root / ".snakemake"
        return {
            "results": self.root / self.results,
            _RECORDS: snakemake / "metadata",
            "incomplete": snakemake / "incomplete",
            "benchmarks": self.root / "benchmarks",
        }

    def path(self, name: str) -> Path:
        """Return the path of a file by its name in the mirror. Raises ValueError for a name outside of the project."""
        folder, _, inside = name.partition("/")
        parts = PurePosixPath(inside).parts
        if folder not in self.folders or not parts or inside.startswith("/") or ".." in parts or "\0" in inside:
            raise ValueError(f"the mirror names {name!r}, which is no file of a project.")
        return self.folders[folder] / inside

    def declared(self, names: Iterable[str]) -> set[str]:
        """Return the results that Snakemake has records of, according to the names of all files."""
        names_of_results = set()
        for name in names:
            folder, _, inside = name.partition("/")
            if folder == _RECORDS:
                # Snakemake encodes paths in base64, split into folders that begin with "@" if too long for a file name.
                text = "".join(part.removeprefix("@") for part in inside.split("/"))
                try:
                    path = Path(base64.urlsafe_b64decode(text).decode())
                except ValueError:
                    continue
                if path.is_relative_to(self.results):
                    names_of_results.add(f"results/{path.relative_to(self.results).as_posix()}")
        return names_of_results


@dataclass
class Snapshot:
    """Files at one moment. stamps: by name. opened: large ones, to be closed by `close`."""

    stamps: dict[str, Stamp]
    opened: dict[str, BinaryIO]

    def close(self) -> None:
        """Close the open files."""
        for file in self.opened.values():
            file.close()
        self.opened.clear()


def take(project: Project, known: Mapping[str, Stamp]) -> Snapshot:
    """Take a snapshot of the project. known: stamps of files that need not be opened.

    If two consecutive walks find the same files, these existed between the walks. If files change all the time, only
    those that both walks found are used. Journals only grow, and a checkpoint states how much of them belongs to it:
    they are read after all other files, and their pictures last.
    """
    before = _walk(project, _is_settled)
    for _ in range(_TRIES):
        stamps = _walk(project, _is_settled)
        if stamps == before:
            break
        before, stamps = stamps, {name: stamp for name, stamp in stamps.items() if before.get(name) == stamp}
    for kind in (_is_receipt, _is_journal, _is_picture):
        stamps |= _walk(project, kind)
    opened: dict[str, BinaryIO] = {}
    for name, stamp in list(stamps.items()):
        if stamp[0] > _OPEN_FROM and known.get(name) != stamp and len(opened) < _MOST_OPEN:
            try:
                file = project.path(name).open("rb")
            except OSError:
                del stamps[name]
                continue
            opened[name] = file
    return Snapshot(stamps, opened)


def send_file(project: Project, snapshot: Snapshot, name: str, send: Callable[[bytes], str]) -> MirroredFile | None:
    """Send a file of a snapshot in chunks, and return its description; None if it changed since.

    send: stores the bytes of a chunk, one at a time, and returns its name.
    """
    stamp = snapshot.stamps[name]
    grows = name.endswith(".jsonl") and _is_journal(PurePosixPath(name))
    try:
        with snapshot.opened.pop(name, None) or project.path(name).open("rb") as file:
            if not grows and _differs(file, stamp):
                return None
            whole, chunks, left = hashlib.sha256(), list[str](), stamp[0]
            while left or not chunks:
                data = file.read(min(CHUNK, left))
                if len(data) < min(CHUNK, left):
                    return None
                whole.update(data)
                chunks.append(send(data))
                left -= len(data)
            if not grows and _differs(file, stamp):
                return None
    except FileNotFoundError:
        return None
    return MirroredFile(stamp[0], stamp[1], whole.hexdigest(), tuple(chunks))


def _walk(project: Project, is_wanted: Callable[[PurePosixPath], bool]) -> dict[str, Stamp]:
    """Return the stamps of the wanted files, by name. Symbolic links are not followed."""
    stamps: dict[str, Stamp] = {}
    pending = list(project.folders.items())
    while pending:
        prefix, folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            name = f"{prefix}/{entry.name}"
            try:
                if entry.name in _NOT_SENT or _is_unfinished(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append((name, Path(entry.path)))
                elif entry.is_file(follow_symlinks=False) and is_wanted(PurePosixPath(name)):
                    stamps[name] = stamp_in(entry.stat(follow_symlinks=False))
            except OSError:  # removed meanwhile
                continue
    return stamps


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _is_settled(name: PurePosixPath) -> bool:
    return not _JOURNALS & {*name.parts}


def _is_receipt(name: PurePosixPath) -> bool:
    return ".journal" in name.parts


def _is_journal(name: PurePosixPath) -> bool:
    return "journal" in name.parts and name.suffix == ".jsonl"


def _is_picture(name: PurePosixPath) -> bool:
    return "journal" in name.parts and name.suffix != ".jsonl"


def _differs(file: BinaryIO, stamp: Stamp) -> bool:
    """Return True if an open file does not match a stamp. (The ctime is ignored, since it also changes on removal.)"""
    size, mtime, _, inode = stamp_in(os.fstat(file.fileno()))
    return (size, mtime, inode) != (stamp[0], stamp[1], stamp[3])


_AT_ONCE = 8
"""Number of chunks that are sent concurrently."""

DESCRIPTIONS = ("manifest.json", "checkpoint.json")
"""Names of files that list the files of their folder, with their sha256."""

Files = dict[str, MirroredFile]


class Sender:
    """Sender of a project's files, with the known state of the mirror.

    files: of the newest snapshot by name, including files that are not on this disk. stamps: of the files on this disk
    that equal those of the snapshot.
    """

    def __init__(self, project: Project, lease: Lease, files: Files, stamps: dict[str, Stamp]) -> None:
        self._project, self._lease, self._store = project, lease, lease.store
        self.files, self.stamps = files, stamps
        self._sent = {chunk.partition(".")[0]: chunk for file in files.values() for chunk in file.chunks}
        self._obsolete = set[str]()
        self._sending: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def round(self) -> bool:
        """Send changed files and make them the newest snapshot. Return True if there are any.

        Raises TakenError, and ValueError if the store cannot be reached; chunks that were sent are not sent again.
        """
        snapshot = take(self._project, self.stamps)
        try:
            files = self._send(snapshot)
        finally:
            snapshot.close()
        files |= self._elsewhere(files)
        if files == self.files:
            if self._obsolete:
                self._lease.renew()
                self._remove()
            return False
        plain = {name: file.plain() for name, file in sorted(files.items())}
        listed = gzip.compress(json.dumps(plain, separators=(",", ":")).encode(), mtime=0)
        chunks = [self._put(listed[begin : begin + CHUNK]) for begin in range(0, len(listed), CHUNK)]
        before = {*self._lease.snapshot, *(chunk for file in self.files.values() for chunk in file.chunks)}
        self._lease.renew(tuple(chunks))
        self._remove()
        kept = {*chunks, *(chunk for file in files.values() for chunk in file.chunks)}
        self._obsolete = before - kept
        self._sent = {sha256: chunk for sha256, chunk in self._sent.items() if chunk not in self._obsolete}
        self.files = files
        self.stamps = {name: stamp for name, stamp in snapshot.stamps.items() if name in files}
        self.note()
        return True

    def release(self) -> None:
        """Release the mirror. Raises TakenError, ValueError."""
        self._lease.renew(is_released=True)
        self._remove()

    def _remove(self) -> None:
        """Remove the chunks that only the previous snapshot has, once two heads name the newest: if one head is damaged
        in the store, the other still has a complete snapshot."""
        with suppress(ValueError):  # left for `mirror --prune`
            self._store.delete(map(place_of, sorted(self._obsolete)))
        self._obsolete = set()

    def note(self) -> None:
        """Record on this disk the state of the newest snapshot."""
        write_json(
            self._project.state / "sent.json",
            {
                "token": self._lease.token,
                "url": self._store.url,
                "snapshot": list(self._lease.snapshot),
                "files": {name: file.plain() for name, file in sorted(self.files.items())},
                "stamps": {name: list(stamp) for name, stamp in sorted(self.stamps.items())},
            },
        )

    def _send(self, snapshot: Snapshot) -> Files:
        """Send the new files of a snapshot, and return all its files that did not change meanwhile."""
        same = {name for name, stamp in snapshot.stamps.items() if self.stamps.get(name) == stamp}
        files = {name: self.files[name] for name in same}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            names = [name for name in snapshot.stamps if name not in same]
            sent = pool.map(lambda name: send_file(self._project, snapshot, name, self._put), names)
            files |= {name: file for name, file in zip(names, sent, strict=True) if file is not None}
        return files

    def _put(self, data: bytes) -> str:
        """Store a chunk unless it is stored already, and return its name."""
        sha256 = hashlib.sha256(data).hexdigest()
        with self._guard:
            lock = self._sending.setdefault(sha256, threading.Lock())
        with lock:
            if sha256 not in self._sent:
                chunk = chunk_of(sha256, self._lease.token)
                self._store.put(place_of(chunk), data)
                self._sent[sha256] = chunk
        with self._guard:
            self._sending.pop(sha256, None)
        return self._sent[sha256]

    def _elsewhere(self, files: Files) -> Files:
        """Return the files that are only in the mirror and still belong to the project: their folder is on this disk,
        and its manifest or checkpoint.json, if any, lists them."""
        absent = {name: file for name, file in self.files.items() if name not in files and name not in self.stamps}
        said = descriptions(self._project, absent)
        named = {name for name, file in absent.items() if said[name] is None or file.sha256 in str(said[name])}
        return {name: absent[name] for name in named if not lost(self._project.state, absent[name].sha256).exists()}


def descriptions(project: Project, names: Iterable[str]) -> dict[str, str | None]:
    """Return by file name the text of the manifest or checkpoint.json in its folder; None if the folder has neither,
    empty without the folder. A stage that reads a listed file checks its sha256, and can fetch it first."""
    texts: dict[Path, str | None] = {}
    by_name = {}
    for name in names:
        folder = project.path(name).parent
        if folder not in texts:
            paths = [folder / file for file in DESCRIPTIONS if (folder / file).is_file()]
            texts[folder] = "".join(path.read_text(errors="replace") for path in paths) if paths else None
            texts[folder] = texts[folder] if folder.is_dir() else ""
        by_name[name] = texts[folder]
    return by_name
