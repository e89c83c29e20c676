"""What lies where in a tar of samples, read with a suspicion of the tar: it may come from anywhere."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from image_diffusion.data.sources.listing import LARGEST_TEXT, captions_in, plain_text, values_in

LABELS = ("cls", "json", "txt")
"""Extensions of what tells the class of a sample; of several beside one image the first counts."""

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2")
_MOST_PADDING = 16 << 20  # bytes behind the end of a tar that are looked at; tars are padded to a few KiB


@dataclass
class Members:
    """The members of one tar, by key: their names up to the first dot.

    images: their places, (offset, size). labels: classes by extension. captions. values: what `.json` says under keys
    that were asked for. hidden: number of hidden files.
    """

    images: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    hidden: int = 0

    def label(self, key: str) -> str | None:
        """The class of a sample; None where nothing tells it."""
        told = self.labels.get(key, {})
        return next((told[extension] for extension in LABELS if extension in told), None)


def read_members(path: Path, labelled: bool, names: tuple[str, ...] = ()) -> Members:
    """List a tar. See `members_of`."""
    with path.open("rb") as file:
        return members_of(file, str(path), labelled, names)


def members_of(file: IO[bytes], name: str, labelled: bool, names: tuple[str, ...] = ()) -> Members:
    """List an open tar, and read its classes, or where it is not labelled its captions, or what `.json` says under
    `names`. Nothing is unpacked.

    Raises ValueError in one line that names the tar: for one that is damaged or cut short, that another one was added
    to, whose members lead out of it, are no plain files, or say more of a sample than is possible.
    """
    found, end = Members(), 0
    file.seek(0)
    with _told(name), tarfile.open(fileobj=cast("IO[bytes]", _Sober(file)), mode="r:") as tar:
        for member in tar:
            shown = plain_text(member.name)
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE * member.isreg()
            parts = PurePosixPath(member.name).parts
            if member.name.startswith("/") or ".." in parts:
                raise _Refused(f"is refused: its member '{shown}' leads out of it.")
            if member.isdir():
                continue
            if any(part.startswith((".", "__")) for part in parts if part != "."):
                found.hidden += 1
                continue
            if not member.isreg() or member.issparse():
                raise _Refused(f"is refused: its member '{shown}' is a link, a device or has holes, not a plain file.")
            folder, _, file_name = shown.rpartition("/")
            stem, _, extension = file_name.partition(".")
            key, extension = f"{folder}/{stem}" if folder else stem, extension.lower()
            if extension in _IMAGES:
                if key in found.images:
                    raise _Refused(f"has two images under the key '{key}'. Give every sample its own key.")
                found.images[key] = (member.offset_data, member.size)
            elif extension in LABELS:
                _read_text(tar, member, found, key, extension, labelled, names)
        _check_end(file, end)
    return found


def _read_text(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    found: Members,
    key: str,
    extension: str,
    labelled: bool,
    names: tuple[str, ...],
) -> None:
    shown = plain_text(member.name)
    if member.size > LARGEST_TEXT:
        raise _Refused(
            f"is refused: its member '{shown}' has {member.size:,} bytes; a class or a caption has at most "
            f"{LARGEST_TEXT:,}."
        )
    content = tar.extractfile(member)
    data = content.read() if content else b""
    try:
        if names:
            if extension == "json":
                found.values[key] = values_in(data, names)
            return
        if not labelled:
            if captions := captions_in(data, extension):
                found.captions[key] = captions
            return
        label = _label(data, extension)
    except (ValueError, RecursionError) as error:
        raise _Refused(f"has a member '{shown}' that cannot be read: {error}. Write it again.") from None
    if label is None:
        return
    told = found.labels.setdefault(key, {})
    if extension in told:
        raise _Refused(f"has two .{extension} under the key '{key}'. Give every sample its own key.")
    told[extension] = label


def _label(data: bytes, extension: str) -> str | None:
    """The class in a member: the text itself, or the key "label" of JSON; None when there is no such key."""
    if extension != "json":
        return data.decode("utf-8").strip()
    content = json.loads(data)
    return str(content["label"]).strip() if isinstance(content, dict) and "label" in content else None


def _check_end(file: IO[bytes], end: int) -> None:
    """Raise ValueError unless the members are followed by the empty block that ends a tar, and by nothing else."""
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise _Refused("is cut short: the empty block that ends a tar is missing. Download it again.")
    behind = file.read(_MOST_PADDING)
    if any(behind) or file.read(1):
        raise _Refused(
            "goes on behind its end, as tars do that were put together with `cat`. Give them as files of their own, or "
            "join them with `tar --concatenate`."
        )


class _Refused(Exception):  # noqa: N818 - told as a ValueError, with the name of the tar in front
    """What is wrong with a tar."""


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Errors are told in one line that names the tar."""
    try:
        yield
    except _Refused as refused:
        raise ValueError(f"{name} {refused}") from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} cannot be read as a tar file: {error}. Download or write it again.") from None


class _Sober:
    """A file that is never asked for more than a header and a text may have: `tarfile` reads long names, and what pax
    headers say, whole, however long they say they are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= 2 * LARGEST_TEXT:
            raise tarfile.ReadError(f"it has a header of {size:,} bytes")
        return self._file.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        return self._file.seek(position, whence)

    def tell(self) -> int:
        return self._file.tell()
