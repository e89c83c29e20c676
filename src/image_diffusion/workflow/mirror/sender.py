"""Send the results of a project to its mirror while stages write them."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from image_diffusion.core.files.atomic import Stamp, write_json
from image_diffusion.core.files.mirrored import CHUNK, MirroredFile, chunk_of, lost, place_of
from image_diffusion.workflow.mirror.lease import Lease
from image_diffusion.workflow.mirror.snapshot import Project, Snapshot, send_file, take

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
