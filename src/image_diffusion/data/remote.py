"""Shards behind a URL: each file is fetched when it is first needed, checked, and kept.

Any address that fsspec reads: http and https; s3, gs and others with the package that fsspec asks for. Files are kept
under the sha256 of their content, which the manifest states: what is fetched is what was written, a set that changes
in one shard is fetched anew in one shard, and processes of a machine share what any of them has fetched.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from image_diffusion.core.files import atomic_write, sha256_file

T = TypeVar("T")

_WAITS_S = (1.0, 5.0)
"""How long to wait before another attempt, for each attempt after the first."""
_BLOCK = 1 << 20


def place(text: str) -> Path | str:
    """What a command is told to read: a path, or a URL as it is."""
    return text if "://" in text else Path(text)


def folder_of(manifest: Path | str) -> Path | str:
    """The folder that a manifest lies in, a path or a URL."""
    return manifest.parent if isinstance(manifest, Path) else manifest.rpartition("/")[0]


def cache_folder() -> Path:
    """Where fetched files are kept: IMAGE_DIFFUSION_CACHE, or ~/.cache/image-diffusion. Nothing deletes them."""
    return Path(os.environ.get("IMAGE_DIFFUSION_CACHE") or "~/.cache/image-diffusion").expanduser()


@dataclass(frozen=True)
class Remote:
    """A set of shards. url: the folder of its manifest. cache: where its files are kept. verify: hash those again."""

    url: str
    cache: Path
    verify: bool = False

    def manifest(self) -> Any:
        """The plain data of its manifest, fetched each time. Raises ValueError."""
        url = f"{self.url}/manifest.json"
        try:
            return json.loads(_patiently(url, lambda: b"".join(_blocks(url))))
        except UnicodeDecodeError as error:
            raise ValueError(f"{url} is damaged: {error}. Run the stage that writes it again.") from None

    def fetch(self, file: str, sha256: str, size: int | None = None) -> Path:
        """Where a file of the set lies on this machine, fetched unless it is there.

        sha256: of its content. size: its bytes, where they are known. Raises ValueError when it cannot be had, or is
        not what the manifest says it is.
        """
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"{self.url}/manifest.json is damaged: {sha256!r} is no sha256. Write it again.")
        path = self.cache / sha256
        lock = self.cache / f".{sha256}.lock"
        if not self._is_there(path, sha256, size):
            self.cache.mkdir(parents=True, exist_ok=True)
            with lock.open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if not self._is_there(path, sha256, size):  # another process may have fetched it meanwhile
                    url = f"{self.url}/{file}"
                    _patiently(url, lambda: _download(url, path, sha256))
                lock.unlink(missing_ok=True)
        return path

    def _is_there(self, path: Path, sha256: str, size: int | None) -> bool:
        if not path.is_file() or (size is not None and path.stat().st_size != size):
            return False
        return not self.verify or sha256_file(path) == sha256


def _download(url: str, path: Path, sha256: str) -> None:
    """Fetch a file to a path, whole and as it should be, or not at all."""
    hasher = hashlib.sha256()
    with atomic_write(path) as file:
        for block in _blocks(url):
            file.write(block)
            hasher.update(block)
        if hasher.hexdigest() != sha256:
            raise ConnectionError("what came is damaged, its sha256 is not the manifest's")


def _blocks(url: str) -> Iterator[bytes]:
    import fsspec  # not for those whose shards lie on this machine

    with fsspec.open(url, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _patiently(url: str, action: Callable[[], T]) -> T:
    """The result of an action; it is tried again when a connection fails. Raises ValueError with the reason."""
    for wait in (*_WAITS_S, None):
        try:
            return action()
        except Exception as error:  # each of fsspec's protocols raises its own
            if wait is None or isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError):
                reason = " ".join(str(error).split()) or type(error).__name__
                reason = "there is no such file" if isinstance(error, FileNotFoundError) else reason
                raise ValueError(f"{url} cannot be fetched: {reason}. Check the address and the set there.") from None
            time.sleep(wait)
    raise AssertionError("unreachable")
