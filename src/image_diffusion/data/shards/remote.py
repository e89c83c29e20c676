"""Shards at a URL: each file is fetched when it is first needed, verified, and cached.

Any address that fsspec reads is accepted: http and https; s3, gs and others with the package that fsspec requires.
Cached files are named by their sha256, which the manifest states: downloads are verified, only changed shards are
fetched again, and all processes of a machine share the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_diffusion.core.files.atomic import atomic_write, parse_json
from image_diffusion.core.files.checksums import Inspection, damaged
from image_diffusion.core.files.store import blocks_of, with_retries
from image_diffusion.core.names import inside
from image_diffusion.core.process.secrets import without_credentials


def place(text: str) -> Path | str:
    """Return a command's location argument: a path, or a URL unchanged."""
    return text if "://" in text else Path(text)


def folder_of(manifest: Path | str) -> Path | str:
    """Return the folder of a manifest, a path or a URL."""
    return manifest.parent if isinstance(manifest, Path) else manifest.rpartition("/")[0]


def cache_folder() -> Path:
    """Return the folder of fetched files: IMAGE_DIFFUSION_CACHE, or ~/.cache/image-diffusion. It is never cleaned."""
    return Path(os.environ.get("IMAGE_DIFFUSION_CACHE") or "~/.cache/image-diffusion").expanduser()


@dataclass(frozen=True)
class Remote:
    """A remote set of shards. url: the folder of its manifest. cache: folder of its fetched files."""

    url: str
    cache: Path

    def manifest(self) -> Any:
        """Fetch the manifest and return it as plain data. Raises ValueError."""
        url = f"{self.url}/manifest.json"
        return parse_json(
            with_retries(url, lambda: b"".join(blocks_of(url))), without_credentials(url), "Write it again."
        )

    def inspect(self, hashes: Iterable[str]) -> Inspection | None:
        """Start to verify the cached copies of these files by their hashes; None when none is cached."""
        kept = {sha256: sha256 for sha256 in hashes if (self.cache / sha256).is_file()}
        return Inspection(self.cache, kept, "Run the same command again: it is fetched anew.") if kept else None

    def discard_damaged(self, hashes: Iterable[str]) -> None:
        """Remove damaged copies of these files from the cache, so that they are fetched again."""
        kept = {sha256: sha256 for sha256 in hashes if (self.cache / sha256).is_file()}
        for sha256 in damaged(self.cache, kept) if kept else []:
            (self.cache / sha256).unlink(missing_ok=True)

    def fetch(self, file: str, sha256: str, size: int | None = None) -> Path:
        """Return the local path of a file of the set, which is fetched unless it is cached.

        sha256: of its content. size: its bytes, where they are known. Raises ValueError when it cannot be fetched, or
        is not what the manifest says it is, OSError when the disk is full.
        """
        path = inside(self.cache, sha256)
        lock = self.cache / f".{sha256}.lock"
        if not self._is_there(path, size):
            self.cache.mkdir(parents=True, exist_ok=True)
            with lock.open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if not self._is_there(path, size):  # another process may have fetched it meanwhile
                    url = f"{self.url}/{inside(Path(), file, follow=True)}"
                    with_retries(url, lambda: _download(url, path, sha256))
                lock.unlink(missing_ok=True)
        return path

    def _is_there(self, path: Path, size: int | None) -> bool:
        return path.is_file() and (size is None or path.stat().st_size == size)


def _download(url: str, path: Path, sha256: str) -> None:
    """Fetch a file to a path, verified and written atomically."""
    hasher = hashlib.sha256()
    with atomic_write(path) as file:
        for block in blocks_of(url):
            file.write(block)
            hasher.update(block)
        if hasher.hexdigest() != sha256:
            raise ConnectionError("the download is damaged: its sha256 differs from the manifest's")
