"""Download the newest snapshot of a mirror: small files immediately, large files when they are needed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from image_diffusion.core.files.atomic import Stamp, read_json, sha256_file, stamp_of
from image_diffusion.core.files.mirrored import LostError, MirroredFile, download, read_chunk, write_absent
from image_diffusion.core.files.store import Store
from image_diffusion.workflow.mirror.lease import Lease
from image_diffusion.workflow.mirror.snapshot import DESCRIPTIONS, Files, Project, Sender, descriptions, take

SMALL = 16 << 20
"""Maximum size in bytes of a small file, such as pages and pictures, which people open."""
_AT_ONCE = 8


class ConflictError(Exception):
    """This disk has results that the mirror lacks, and another machine has since updated the mirror."""


@dataclass(frozen=True)
class DiskState:
    """State of a disk: the token of the last process here that held the mirror, the chunks and the files of its
    snapshot, and the stamps of the files that were on the disk."""

    token: str = ""
    snapshot: tuple[str, ...] = ()
    files: Files = field(default_factory=dict)
    stamps: dict[str, Stamp] = field(default_factory=dict)

    @staticmethod
    def read(project: Project, url: str) -> DiskState:
        """Return the recorded state of this disk for a mirror; an empty state without a record of this mirror."""
        try:
            plain = read_json(project.state / "sent.json")
            if plain["url"] != url:
                return DiskState()
            files = {name: MirroredFile.parse(file) for name, file in plain["files"].items()}
            stamps = {name: tuple(stamp) for name, stamp in plain["stamps"].items()}
            return DiskState(plain["token"], tuple(plain["snapshot"]), files, stamps)
        except (ValueError, OSError, KeyError, TypeError, AttributeError):
            return DiskState()


def read_list(store: Store, chunks: tuple[str, ...]) -> Files:
    """Return the files of a snapshot. Raises ValueError."""
    data = b"".join(read_chunk(store, chunk) for chunk in chunks)
    try:
        plain = json.loads(gzip.decompress(data)) if chunks else {}
        return {str(name): MirroredFile.parse(file) for name, file in plain.items()}
    except (OSError, EOFError, ValueError, AttributeError) as error:
        raise LostError(f"the list of files in {store.url} is damaged: {error}.") from None


def newest_list(lease: Lease, tell: Callable[[str], None]) -> Files:
    """Return the files of the newest snapshot that can be read. Raises LostError if none can, ValueError."""
    for snapshot in dict.fromkeys([lease.snapshot, *filter(None, lease.older())]):
        try:
            return read_list(lease.store, snapshot)
        except LostError as error:
            tell(f"warning: the newest snapshot cannot be read, and one before it is used: {error}")
    raise LostError(f"No snapshot of {lease.store.url} can be read. Set another mirror.")


def restore(
    project: Project,
    lease: Lease,
    known: DiskState,
    is_own: bool,
    folders: Callable[[], list[str]],
    tell: Callable[[str], None],
) -> Sender:
    """Download the files of the mirror, and return a sender for all others.

    A disk that held the mirror last, or has the newest snapshot, is at least as new as the mirror: only files that it
    never had are downloaded. is_own: True if it held the mirror last. folders: called once small files are on the disk;
    returns the folders of results whose large files are needed. tell: prints a line. Raises ConflictError, ValueError.
    """
    is_ahead = is_own or bool(known.files and known.snapshot == lease.snapshot)
    files = known.files if is_ahead else newest_list(lease, tell)
    wanted = {name: file for name, file in files.items() if name not in known.stamps} if is_ahead else files
    restoring = Restoring(project, lease.store, wanted, known, tell)
    if not is_ahead:
        restoring.small()
    restoring.large(folders())
    if is_ahead:
        restoring.files, restoring.stamps = {**files, **restoring.files}, {**known.stamps, **restoring.stamps}
    sender = Sender(project, lease, restoring.files, restoring.stamps)
    sender.note()
    return sender


class Restoring:
    """Download of the files of a snapshot to this disk.

    files: of the snapshot, except those that could not be downloaded. stamps: of the files on this disk. known:
    recorded state of the disk. tell: prints a line.
    """

    def __init__(
        self, project: Project, store: Store, files: Files, known: DiskState, tell: Callable[[str], None]
    ) -> None:
        self._project, self._store, self._tell = project, store, tell
        self.files, self.stamps = dict(files), dict[str, Stamp]()
        self._known = known
        here = take(project, known.stamps)
        here.close()
        self._here = here.stamps

    def small(self) -> None:
        """Download all small files, and remove unchanged files of the last snapshot on this disk that this one lacks.

        Raises ConflictError if this disk has finished results that the mirror never had.
        """
        done_here = {name for name in self._here if name.startswith("metadata/")}
        unknown = sorted(self._project.declared(done_here - self.files.keys() - self._known.files.keys()))
        if self.files and unknown:
            raise ConflictError(
                f"{len(unknown):,} results of this folder, {unknown[0]} for instance, are not in {self._store.url}, "
                f"where another machine has gone on since. Move {self._project.results} and .snakemake away, or set "
                f"another mirror."
            )
        for name in self._known.files.keys() - self.files.keys():
            if self._here.get(name) == self._known.stamps.get(name):
                self._project.path(name).unlink(missing_ok=True)
        # Without this folder, Snakemake assumes that its records are from an old version.
        self._project.folders["incomplete"].mkdir(parents=True, exist_ok=True)
        self._bring({name: file for name, file in self.files.items() if not _is_large(name, file)})

    def large(self, folders: list[str]) -> None:
        """Download the large files of these folders of results, except files that a stage can fetch when it reads them,
        which are listed for `fetch_missing`. Files of other folders remain in the mirror only."""
        prefixes = tuple(f"results/{folder}/" for folder in folders)
        large = {name: file for name, file in self.files.items() if _is_large(name, file)}
        for name in large:
            self._project.path(name).parent.mkdir(parents=True, exist_ok=True)
        declared, said = self._project.declared(self.files), descriptions(self._project, large)
        later = {name for name in large.keys() - declared if large[name].sha256 in (said[name] or "")}
        self._bring({name: file for name, file in large.items() if name.startswith(prefixes) and name not in later})
        absent = {name: large[name] for name in later if not self._is_here(name, large[name])}
        paths = {str(self._project.path(name).resolve()): file for name, file in absent.items()}
        write_absent(self._project.state / "absent.json", self._store.url, paths)

    def _bring(self, files: Mapping[str, MirroredFile]) -> None:
        missing = [name for name, file in files.items() if not self._is_here(name, file)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(self._fetch, missing))

    def _fetch(self, name: str) -> None:
        file = self.files[name]
        try:
            path = self._project.path(name)
            download(self._store, file, path)
            self.stamps[name] = stamp_of(path)
        except ValueError as error:
            self._tell(f"warning: {name} cannot be fetched, and is made again: {error}")
            del self.files[name]

    def _is_here(self, name: str, file: MirroredFile) -> bool:
        """Return True if the file on this disk is equal to the file in the snapshot."""
        stamp = self._here.get(name)
        if stamp is None or stamp[:2] != (file.size, file.mtime_ns):
            return name in self.stamps
        same_note = self._known.stamps.get(name) == stamp and self._known.files.get(name) == file
        if same_note or sha256_file(self._project.path(name)) == file.sha256:
            self.stamps[name] = stamp
            return True
        return False


def _is_large(name: str, file: MirroredFile) -> bool:
    return file.size > SMALL and not name.endswith(DESCRIPTIONS)
