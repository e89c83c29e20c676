"""Files of a mirror, which are stored as chunks under the sha256 of their content, and fetched when a stage needs them.

A project that was restored on an empty disk initially lacks its large files, which are listed in the file of
IMAGE_DIFFUSION_MIRROR. Verification of such a file fetches it first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import Stamp, atomic_write, folder_lock, stamp_of, write_bytes, write_text
from image_diffusion.core.files.store import Store
from image_diffusion.core.process.errors import log_line

VARIABLE = "IMAGE_DIFFUSION_MIRROR"
"""Environment variable with the path of the list of files that are only in the mirror."""
_LOOKS = 3
CHUNK = 8 << 20
"""Bytes of a chunk, and the most that a process has in memory of a file."""

_SHA256 = re.compile("[0-9a-f]{64}")
_CHUNK = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}")


@dataclass(frozen=True)
class MirroredFile:
    """A file of a mirror. mtime_ns: modification time. chunks: names of the chunks, in order."""

    size: int
    mtime_ns: int
    sha256: str
    chunks: tuple[str, ...]

    def plain(self) -> list[Any]:
        """Return the description as plain data for JSON."""
        return [self.size, self.mtime_ns, self.sha256, list(self.chunks)]

    @staticmethod
    def parse(plain: Any) -> MirroredFile:
        """Return the file described by plain data. Raises ValueError for other data."""
        try:
            size, mtime_ns, sha256, names = plain
            chunks = tuple(names)
            if not (_SHA256.fullmatch(sha256) and all(map(_CHUNK.fullmatch, chunks))):
                raise ValueError("a name is no sha256")
            return MirroredFile(int(size), int(mtime_ns), sha256, chunks)
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(f"an entry of the mirror is damaged: {error}") from None


def chunk_of(sha256: str, token: str) -> str:
    """Return the name of a chunk stored by the process with a token. Names differ between processes, so that a process
    that resumes an interrupted removal cannot remove chunks that others have stored since."""
    return f"{sha256}.{token[:8]}"


def place_of(chunk: str) -> str:
    """Return the name of the object that holds a chunk."""
    return f"blobs/{chunk}"


class LostError(ValueError):
    """A chunk is missing from the store, or damaged."""


def download(store: Store, file: MirroredFile, path: Path) -> None:
    """Fetch a file atomically, verified and with its modification time. Raises LostError; ValueError if the store
    cannot be reached."""
    whole = hashlib.sha256()
    with atomic_write(path) as written:
        for chunk in file.chunks:
            data = read_chunk(store, chunk)
            written.write(data)
            whole.update(data)
        if whole.hexdigest() != file.sha256:
            raise LostError(f"{store.url} holds other chunks of {path} than it says.")
        written.flush()
        os.utime(written.fileno(), ns=(file.mtime_ns, file.mtime_ns))


def read_chunk(store: Store, chunk: str) -> bytes:
    """Return a verified chunk. Raises LostError; ValueError if the store cannot be reached."""
    for _ in range(_LOOKS):
        data = store.get(place_of(chunk))
        if data is None:
            raise LostError(f"{store.url}/{place_of(chunk)} is missing.")
        if hashlib.sha256(data).hexdigest() == chunk.partition(".")[0]:
            return data
    raise LostError(f"{store.url}/{place_of(chunk)} is damaged.")


def write_absent(path: Path, url: str, files: Mapping[str, MirroredFile]) -> None:
    """Write the list of files that are only in the mirror, by their absolute paths."""
    text = json.dumps({"url": url, "files": {name: file.plain() for name, file in sorted(files.items())}})
    write_text(path, text)


def is_mirrored(path: Path, sha256: str) -> bool:
    """Return True if a missing file of this content can be fetched from the mirror."""
    _, files = _absent()
    file = files.get(str(path.resolve()))
    return file is not None and file.sha256 == sha256 and not lost(Path(os.environ[VARIABLE]).parent, sha256).exists()


def lost(state: Path, sha256: str) -> Path:
    """Return the path of the note that the mirror has lost the file with this content."""
    return state / "lost" / sha256


def fetch_missing(folder: Path, files: Mapping[str, str]) -> None:
    """Fetch missing files of a folder from the mirror. files: their sha256 by name. A file that cannot be fetched is
    reported and stays missing. If the mirror has lost it, this is recorded, so that the next start makes it again.
    """
    if not os.environ.get(VARIABLE):
        return
    for name, sha256 in files.items():
        path = folder / name
        if not path.exists() and is_mirrored(path, sha256):
            path.parent.mkdir(parents=True, exist_ok=True)
            with folder_lock(path.parent):
                if not path.exists():  # another process may have fetched it meanwhile
                    _fetch(path)


def _fetch(path: Path) -> None:
    url, absent = _absent()
    file = absent[str(path.resolve())]
    try:
        download(Store(url), file, path)
    except LostError as error:
        log_line(f"warning: {path} cannot be fetched; run the same command again, which makes it again: {error}")
        write_bytes(lost(Path(os.environ[VARIABLE]).parent, file.sha256), b"")
    except ValueError as error:
        log_line(f"warning: {path} cannot be fetched: {error}")


def _absent() -> tuple[str, Mapping[str, MirroredFile]]:
    """Return the URL of the mirror, and the files that were only in it when the workflow started, by absolute path."""
    listing = os.environ.get(VARIABLE)
    try:
        return _read(listing, stamp_of(Path(listing))) if listing else ("", {})
    except OSError:
        return "", {}


@lru_cache(1)
def _read(listing: str, stamp: Stamp) -> tuple[str, Mapping[str, MirroredFile]]:
    data = json.loads(Path(listing).read_bytes())
    return data["url"], {name: MirroredFile.parse(plain) for name, plain in data["files"].items()}
