"""List the members of an untrusted tar of samples."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any, cast

from image_diffusion.core.texts import class_in, decoded
from image_diffusion.data.sources.base import LARGEST_TEXT, captions_in, is_hidden, plain_text, values_in

LABELS = ("cls", "json", "txt")
"""Extensions of files with the class of a sample, by priority: the first that a sample has is used."""

_IMAGES = (
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "dib", "tif", "tiff", "ppm", "pgm", "pbm", "pnm", "avif",
    "jp2", "j2k", "ico", "tga",
)  # fmt: skip
_FIELD = re.compile(r"[A-Za-z_][\w-]*")
"""Pattern of a field name between the dots of a member's name, as in 0001.image.jpg; any other text there belongs to
the sample's key."""

_MOST_PADDING = 16 << 20  # maximum number of zero bytes after the end of a tar; tars are padded to a few KiB


@dataclass
class Members:
    """The members of one tar, by the key that `_keys_of` gives.

    images: (offset, size) of each image. labels: classes by extension. captions: of each image. values: requested keys
    of each `.json`. passed_over: names of ignored files: hidden files, and files that are neither an image nor a text
    of one.
    """

    images: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)

    def label(self, key: str) -> str | None:
        """Return the class of a sample; None if it has none."""
        labels = self.labels.get(key, {})
        return next((labels[extension] for extension in LABELS if extension in labels), None)


def members_of(file: IO[bytes], name: str, labelled: bool, names: tuple[str, ...] = ()) -> Members:
    """List an open tar without unpacking it, and read the keys `names` of its `.json`; without `names`, its classes if
    it is labelled, otherwise its captions.

    Raises ValueError, in one line that names the tar, if the tar is damaged, truncated or followed by another one, or
    if its members lead outside of it, are not plain files, hold texts that are too large or invalid, or give a sample
    two images or two classes of one extension.
    """
    members, end = Members(), 0
    images: list[_Member] = []
    texts: list[_Member] = []
    file.seek(0)
    with _naming_tar(name), tarfile.open(fileobj=cast("IO[bytes]", _BoundedReader(file)), mode="r:") as tar:
        for member in tar:
            shown = plain_text(member.name)
            if member.size < 0:  # a pax header can state a negative size, on which tarfile would loop forever
                raise _Refused(f"is refused: its member '{shown}' has {member.size:,} bytes.")
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE * member.isreg()
            parts = PurePosixPath(member.name).parts
            if member.name.startswith("/") or ".." in parts:
                raise _Refused(f"is refused: its member '{shown}' leads out of it.")
            if member.isdir():
                continue
            if any(is_hidden(part) or part.startswith("__") for part in parts if part != "."):
                members.passed_over.append(shown)
                continue
            if not member.isreg() or member.issparse():
                raise _Refused(f"is refused: its member '{shown}' is a link, a device or has holes, not a plain file.")
            sample = _Member.from_info(member, shown)
            if sample.extension in _IMAGES:
                images.append(sample)
            elif sample.extension not in LABELS:
                members.passed_over.append(shown)
            elif member.size > LARGEST_TEXT:
                raise _Refused(
                    f"is refused: its member '{shown}' has {member.size:,} bytes; a class or a caption has at most "
                    f"{LARGEST_TEXT:,}."
                )
            else:
                texts.append(sample)
        _check_end(file, end)
        for sample, key in zip(images, _keys_of(images, texts), strict=True):
            if key is None:
                members.passed_over.append(sample.shown)
            elif key in members.images:
                raise _Refused(f"has two images under the key '{key}'. Give every sample its own key.")
            else:
                members.images[key] = (sample.info.offset_data, sample.info.size)
        for sample in texts:
            if sample.part and sample.name not in members.images:
                members.passed_over.append(sample.shown)
            else:
                _read_text(tar, sample, members, labelled, names)
    return members


@dataclass(frozen=True)
class _Member:
    """A member and the parts of its name, key.part.extension; the part may be empty or contain dots."""

    info: tarfile.TarInfo
    shown: str
    key: str
    part: str
    extension: str

    @classmethod
    def from_info(cls, info: tarfile.TarInfo, shown: str) -> _Member:
        folder, slash, file_name = shown.rpartition("/")
        stem, _, rest = file_name.partition(".")
        part, _, extension = rest.rpartition(".")
        return cls(info, shown, folder + slash + stem, part, extension.lower())

    @property
    def name(self) -> str:
        """Return the name without its extension."""
        return f"{self.key}.{self.part}" if self.part else self.key


def _keys_of(images: list[_Member], texts: list[_Member]) -> list[str | None]:
    """Return the key of the sample of each image; None for a further image of a sample, which is ignored.

    The key ends at the first dot, as in webdataset, so that 0001.image.jpg is the image of 0001. It ends at the last
    dot if the text between the dots is no field name (photo 1.0.jpg), a text file has the same full name, or samples
    have different fields (john.doe.jpg, john.smith.jpg). Raises _Refused if every sample has the same several fields.
    """
    plain = {image.key for image in images if not image.part}
    named = {text.name for text in texts if text.part}
    parts: dict[str, set[str]] = {}
    for image in images:
        if _FIELD.fullmatch(image.part) and image.name not in named:
            parts.setdefault(image.key, set()).add(image.part)
    several = [key for key in parts if len(parts[key]) > 1 and key not in plain]
    if several and all(names == parts[several[0]] for names in parts.values()):
        key = several[0]
        raise _Refused(
            f"has several images under the key '{key}': {', '.join(sorted(parts[key]))}. Leave one image in each "
            f"sample, or rename the files where these are samples of their own."
        )

    def key_of(image: _Member) -> str | None:
        if image.part not in parts.get(image.key, set()) or image.key in several:
            return image.name
        return None if image.key in plain else image.key

    return list(map(key_of, images))


def _read_text(tar: tarfile.TarFile, member: _Member, members: Members, labelled: bool, names: tuple[str, ...]) -> None:
    shown, key, extension = member.shown, member.name, member.extension
    content = tar.extractfile(member.info)
    data = content.read() if content else b""
    try:
        if names:
            if extension == "json":
                members.values[key] = values_in(data, names)
            return
        if not labelled:
            if captions := captions_in(data, extension):
                members.captions[key] = captions
            return
        label = _label(data, extension)
    except (ValueError, RecursionError) as error:
        raise _Refused(f"has a member '{shown}' that cannot be read: {error}. Write it again.") from None
    if label is None:
        return
    labels = members.labels.setdefault(key, {})
    if extension in labels:
        raise _Refused(f"has two .{extension} under the key '{key}'. Give every sample its own key.")
    labels[extension] = label


def _label(data: bytes, extension: str) -> str | None:
    """Return the class in a member: the text itself, or the key "label" of JSON; None if there is none."""
    text = decoded(data)
    if extension != "json":
        return class_in(text)
    content = json.loads(text)
    return class_in(content.get("label")) if isinstance(content, dict) else None


def _check_end(file: IO[bytes], end: int) -> None:
    """Raise _Refused unless the members are followed by the empty block that ends a tar, and then only by zeros."""
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise _Refused("is cut short: the empty block that ends a tar is missing. Download it again.")
    behind = file.read(_MOST_PADDING)
    if any(behind) or file.read(1):
        raise _Refused(
            "has data after its end, like tars joined by `cat`. Give them as files of their own, or "
            "join them with `tar --concatenate`."
        )


class _Refused(Exception):  # noqa: N818 - reported as a ValueError that begins with the name of the tar
    """Raised for an invalid tar."""


@contextmanager
def _naming_tar(name: str) -> Iterator[None]:
    """Report errors in one line that names the tar."""
    try:
        yield
    except _Refused as refused:
        raise ValueError(f"{name} {refused}") from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} cannot be read as a tar file: {error}. Download or write it again.") from None


class _BoundedReader:
    """File that refuses reads longer than a header and a text, since `tarfile` reads long names and the values of pax
    headers at once, whatever size the header states."""

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
