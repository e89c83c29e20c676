"""Snapshots of a project's results while stages write them, and their files as chunks.

Stages write a file under another name, rename it, and only then write the files that refer to it. A snapshot of all
files at one moment is therefore a state that a killed machine could have left, from which the same command resumes.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from image_diffusion.core.files.atomic import Stamp, stamp_in
from image_diffusion.core.files.mirrored import CHUNK, MirroredFile

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
