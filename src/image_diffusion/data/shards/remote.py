"""Shards behind a URL: each file is fetched when it is first needed, checked, and kept.

Any address that fsspec reads: http and https; s3, gs and others with the package that fsspec asks for. Files are kept
under the sha256 of their content, which the manifest states: what is fetched is what was written, a set that changes
in one shard is fetched anew in one shard, and processes of a machine share what any of them has fetched.
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
from image_diffusion.core.files.store import blocks_of, patiently
from image_diffusion.core.names import inside
from image_diffusion.core.process.secrets import shown


def place(text: str) -> Path | str:
    """Return the argument for a command that reads it: a path, or a URL unchanged."""
    return text if "://" in text else Path(text)


def folder_of(manifest: Path | str) -> Path | str:
    """Return the folder that a manifest lies in, a path or a URL."""
    return manifest.parent if isinstance(manifest, Path) else manifest.rpartition("/")[0]


def cache_folder() -> Path:
    """Return the folder of fetched files: IMAGE_DIFFUSION_CACHE, or ~/.cache/image-diffusion. Nothing deletes them."""
    return Path(os.environ.get("IMAGE_DIFFUSION_CACHE") or "~/.cache/image-diffusion").expanduser()


@dataclass(frozen=True)
class Remote:
    """A set of shards. url: the folder of its manifest. cache: where its files are kept."""

    url: str
    cache: Path

    def manifest(self) -> Any:
        """Return the plain data of its manifest, fetched each time. Raises ValueError."""
        url = f"{self.url}/manifest.json"
        return parse_json(patiently(url, lambda: b"".join(blocks_of(url))), shown(url), "Write it again.")

    def inspect(self, hashes: Iterable[str]) -> Inspection | None:
        """Compare the cached copies of these files with their hashes; None when none is cached."""
        kept = {sha256: sha256 for sha256 in hashes if (self.cache / sha256).is_file()}
        return Inspection(self.cache, kept, "Run the same command again: it is fetched anew.") if kept else None

    def discard_damaged(self, hashes: Iterable[str]) -> None:
        """Remove damaged copies of these files from the cache, so that they are fetched anew."""
        kept = {sha256: sha256 for sha256 in hashes if (self.cache / sha256).is_file()}
        for sha256 in damaged(self.cache, kept) if kept else []:
            (self.cache / sha256).unlink(missing_ok=True)

    def fetch(self, file: str, sha256: str, size: int | None = None) -> Path:
        """Return the path of a file of the set on this machine, fetched unless it is present.

        sha256: of its content. size: its bytes, where they are known. Raises ValueError when it cannot be fetched, or
        is not what the manifest says it is.
        """
        path = inside(self.cache, sha256)
        lock = self.cache / f".{sha256}.lock"
        if not self._is_there(path, size):
            self.cache.mkdir(parents=True, exist_ok=True)
            with lock.open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if not self._is_there(path, size):  # another process may have fetched it meanwhile
                    url = f"{self.url}/{inside(Path(), file, follow=True)}"
                    patiently(url, lambda: _download(url, path, sha256))
                lock.unlink(missing_ok=True)
        return path

    def _is_there(self, path: Path, size: int | None) -> bool:
        return path.is_file() and (size is None or path.stat().st_size == size)


def _download(url: str, path: Path, sha256: str) -> None:
    """Fetch a file to a path, whole and intact, or not at all."""
    hasher = hashlib.sha256()
    with atomic_write(path) as file:
        for block in blocks_of(url):
            file.write(block)
            hasher.update(block)
        if hasher.hexdigest() != sha256:
            raise ConnectionError("the download is damaged: its sha256 differs from the manifest's")
