"""Objects behind a URL, by any protocol of fsspec: a bucket, a file server, or a folder."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from image_diffusion.core.files.atomic import make_folder, sync_folder, write_bytes
from image_diffusion.core.process.errors import sentence_on
from image_diffusion.core.process.secrets import without_credentials

T = TypeVar("T")

_WAITS_S = (1.0, 5.0)
"""Seconds to wait before another attempt, for each attempt after the first."""
_BLOCK = 1 << 20


class Store:
    """Objects below a URL, by name. Calls are retried if a connection fails, and finally raise ValueError with the
    reason. The library of the protocol finds the credentials. url: `file://` is a folder of this machine.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs: Any = None
        self._folder: Path | None = None
        if url.startswith("file://"):
            self._folder = Path(self.url.removeprefix("file://"))
            return
        import fsspec  # not for those whose files lie on this machine

        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise ValueError(f"{self.url} cannot be opened: {error}. Install that package.") from None
        except Exception as error:  # each of fsspec's protocols raises its own
            raise ValueError(without_credentials(f"{self.url} cannot be opened: {_reason(error)}.")) from None

    def get(self, name: str) -> bytes | None:
        """Return the content of an object; None if there is none."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):
                if self._folder is not None:
                    return (self._folder / name).read_bytes()
                return bytes(self._fs.cat_file(self._at(name)))
            return None

        return self._patiently(name, read)

    def put(self, name: str, data: bytes) -> None:
        """Write or replace an object atomically."""
        if self._folder is not None:
            write_bytes(self._folder / name, data)
        else:
            self._patiently(name, lambda: self._fs.pipe_file(self._at(name), data, **self._checked(data)))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object atomically unless it exists: of several callers, one succeeds. Return True if it contains
        this data now, also if an earlier attempt wrote it but its answer was lost."""
        try:
            self._patiently(name, lambda: self._create(name, data))
        except FileExistsError:
            return self.get(name) == data
        return True

    def names(self, folder: str) -> dict[str, int]:
        """Return the names of all objects directly below a name, with their sizes in bytes."""

        def listed() -> dict[str, int]:
            if self._folder is not None:
                paths = list((self._folder / folder).glob("*"))
                return {path.name: path.stat().st_size for path in paths if not path.name.startswith(".")}
            with suppress(FileNotFoundError):
                entries = self._fs.ls(self._at(folder), detail=True, refresh=True)
                files = [entry for entry in entries if entry["type"] == "file"]
                return {entry["name"].rstrip("/").rpartition("/")[2]: int(entry["size"] or 0) for entry in files}
            return {}

        return self._patiently(folder, listed)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; missing objects are ignored."""
        for name in names:
            if self._folder is not None:
                (self._folder / name).unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):
                    self._patiently(name, lambda name=name: self._fs.rm_file(self._at(name)))  # type: ignore[misc]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _patiently(self, name: str, action: Callable[[], T]) -> T:
        advice = "Check the address, the credentials and the connection."
        return with_retries(f"{self.url}/{name}", action, advice, "reached")

    def _checked(self, data: bytes) -> dict[str, str]:
        """Return the options by which S3 rejects corrupted uploads; other protocols have their own checks. (RFC 1864;
        "Checking object integrity" in the manual of Amazon S3.)"""
        if "s3" not in self._fs.protocol:
            return {}
        return {"ContentMD5": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}

    def _create(self, name: str, data: bytes) -> None:
        if self._folder is None:
            try:
                self._fs.pipe_file(self._at(name), data, mode="create", **self._checked(data))
            except OSError as error:
                # 412 and 409 of S3 in botocore: the object exists, or another caller is writing it.
                response: Mapping[str, Any] = getattr(error.__cause__, "response", {})
                if response.get("Error", {}).get("Code") in ("PreconditionFailed", "ConditionalRequestConflict"):
                    raise FileExistsError(name) from None
                raise
            return
        path = self._folder / name
        make_folder(path.parent)
        temporary = path.parent / f".{path.name}.{uuid4().hex}.tmp"
        try:
            temporary.write_bytes(data)
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def blocks_of(url: str) -> Iterator[bytes]:
    """Yield the content of a URL in blocks of 1 MiB."""
    import fsspec  # not for those whose files lie on this machine

    with fsspec.open(url, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def with_retries(
    url: str, action: Callable[[], T], advice: str = "Check the address and the set there.", done: str = "fetched"
) -> T:
    """Return the result of an action on a URL, with retries if a connection fails. Raises ValueError with the reason
    and the advice; FileExistsError, and an error that names a file on a full disk, are raised unchanged. done:
    participle of the action, for the message.
    """
    for wait in (*_WAITS_S, None):
        try:
            return action()
        except FileExistsError:
            raise
        except Exception as error:  # each of fsspec's protocols raises its own
            if isinstance(error, OSError) and error.filename and sentence_on(error):  # of this machine's disk
                raise
            if wait is None or isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError):
                raise ValueError(without_credentials(f"{url} cannot be {done}: {_reason(error)}. {advice}")) from None
            time.sleep(wait)
    raise AssertionError("unreachable")


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
