"""Interface of a source: its list of images and its files, which are found without opening an image."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Protocol, runtime_checkable

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import Stamp, stamp_in
from image_diffusion.core.texts import decoded, lines_in

_GROUPS_A_SHARD = 32  # groups of images that are read together; the number of groups in a shard then varies by a sixth

LARGEST_TEXT = 1 << 20
"""Maximum size of a file with a class or a caption, in bytes."""
LARGEST_IMAGE = 1 << 30
"""Maximum size of an image file in bytes: more than 90 million pixels of four 16-bit channels take."""
_TEXTS = {".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".html", ".htm", ".pdf"}
_NOT_DATA = {"__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir", "#recycle", "$RECYCLE.BIN"}

LONGEST_CLASS = 255
"""Maximum length of a class name in characters, that of a folder name."""


@dataclass(frozen=True)
class Item:
    """One image of a source.

    name: unique and stable within the source, in plain text; it decides the shard and the order. label: the number of
    its class, None without classes. address: location of its bytes in the source. group_key: key shared by images that
    are best read one after another; empty if there are none. tar_number: number of the tar, for an item that is a tar
    of images."""

    name: str
    label: int | None
    address: tuple[str | int, ...]
    group_key: str = ""
    tar_number: int | None = None


@dataclass(frozen=True)
class Listing:
    """Every image of a source, sorted by name.

    classes: class names by number; empty for unconditional data. rejected: (name, reason) of each quarantined file.
    passed_over: names of ignored files: hidden files, texts next to images, files of other kinds. unit: kind of an
    item, in the singular. notices: lines about the layout for the terminal.
    """

    items: list[Item]
    classes: list[str]
    rejected: list[tuple[str, str]]
    passed_over: Sequence[str] = ()
    unit: str = "image"
    notices: tuple[str, ...] = ()

    def kinds_passed_over(self) -> dict[str, int]:
        """Return how many files of each kind are ignored, most first: by the hidden part of the name, or else by the
        extension."""
        return dict(Counter(map(_kind, self.passed_over)).most_common())


@dataclass(frozen=True)
class FileGroup:
    """Files of one folder of a source, or all files of a `FewFiles`, stored compactly: a folder may hold a million.

    folder: path relative to the source, in plain text and ending in "/"; empty for the source itself. names: of the
    files, in the order in which they were found. stamps: four numbers per file, as in `Stamp`. at: the path of a file
    by its name.
    """

    folder: str
    names: list[str]
    stamps: array[int]
    at: Callable[[str], str]

    def stamp(self, number: int) -> Stamp:
        """Return the stamp of a file by its index in `names`."""
        size, modified, changed, inode = self.stamps[4 * number : 4 * number + 4]
        return size, modified, changed, inode

    def digest(self) -> str:
        """Return the sha256 of the names and stamps in their order: groups with equal digests are equal."""
        names = "\0".join(self.names).encode("utf-8", "surrogatepass")
        return hashlib.sha256(b"%d\0%b\0%b" % (len(self.names), names, self.stamps.tobytes())).hexdigest()


def is_hidden(name: str) -> bool:
    """True if a file or folder of this name belongs to a program and holds no data."""
    return name.startswith(".") or name in _NOT_DATA


def is_text(name: str) -> bool:
    """True if the extension of this name is that of a text file, which describes data and is not an image."""
    return PurePosixPath(name).suffix.lower() in _TEXTS


def _kind(name: str) -> str:
    parts = PurePosixPath(name).parts
    hidden = next((part for part in parts if is_hidden(part) or part.startswith("__")), None)
    return hidden or PurePosixPath(name).suffix.lower() or "no extension"


def add_stamp(stamps: array[int], stamp: Stamp) -> None:
    """Append a stamp to `FileGroup.stamps`, which holds signed 64-bit integers; larger numbers, such as the inodes of
    some file systems, are reduced modulo 2^64."""
    try:
        stamps.fromlist(list(stamp))
    except OverflowError:
        stamps.fromlist([(number + 2**63) % 2**64 - 2**63 for number in stamp])


class ImageSource(Config):
    """Base of every source. If the items are tars, `images_of` yields the images of a tar after fetching it."""

    no_captions: ClassVar[str]
    """Message of a source that has no captions."""

    @abstractmethod
    def listing(self) -> Listing:
        """Return every image of the source. Raises ValueError when the source has none."""

    @abstractmethod
    def file_groups(self) -> Iterator[FileGroup]:
        """Yield the files of the images in groups, such as by folder. Raises ValueError when the source has none."""

    def read(self, item: Item) -> bytes:
        """Return the bytes of one image file. Raises OSError."""
        raise OSError(f"{item.name} is not an image")

    def images_of(self, item: Item) -> Iterator[tuple[Item, Callable[[], bytes]]]:
        """Yield the images of an item, which is one image or a tar, each with the function that reads it or raises
        OSError. Read each image before the next is yielded. Raises ValueError for a tar that cannot be fetched."""
        yield item, partial(self.read, item)

    def state_of(self, item: Item) -> str:
        """Return a text that changes when the images of an item change: the sha256 of an image, empty if it cannot be
        read; for a tar, a digest of what is known before it is fetched."""
        try:
            return hashlib.sha256(self.read(item)).hexdigest()
        except OSError:
            return ""

    def known_classes(self) -> list[str] | None:
        """Return the classes by number if they can be found without opening an image; None: `listing` gives them."""
        return None

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the captions that come with the images, by the image's name, with or without its extension. columns:
        names of the caption columns, for a source with columns. Raises ValueError if there are no captions or one
        cannot be read."""
        raise ValueError(self.no_captions)


class FewFiles(ImageSource):
    """A source with few enough files to list them all in one dictionary."""

    @abstractmethod
    def files(self) -> dict[str, tuple[str, Stamp]]:
        """Return the files of the images: by name, path and stamp. Raises ValueError when the source has none."""

    def file_groups(self) -> Iterator[FileGroup]:
        if files := self.files():
            stamps = array("q")
            for _, stamp in files.values():
                add_stamp(stamps, stamp)
            yield FileGroup("", list(files), stamps, lambda name: files[name][0])


class WithoutFiles(ImageSource):
    """A source without files on this machine, such as one that draws its images in code."""

    def file_groups(self) -> Iterator[FileGroup]:
        return iter(())


class RowSource(ImageSource):
    """A source with a row for each image, which may have further columns."""

    @abstractmethod
    def rows(self, columns: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the image name of each row and its cells in these columns. Raises ValueError."""

    def read_captions(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the captions in these columns, whose cells are texts or lists of texts, by the name of the image."""
        return captions_of(self.rows(columns))

    def read_values(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Return the values in these columns by the name of the image, from its first row, which also gives the
        class."""
        values: dict[str, dict[str, Any]] = {}
        for name, row in self.rows(names):
            values.setdefault(name, dict(zip(names, row, strict=True)))
        return values


@runtime_checkable
class HasValues(Protocol):
    """Source with metadata of its images besides their classes."""

    def read_values(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Return the metadata of each image under these names, by the image's name, with or without its extension.
        Raises ValueError if the source has no values under one of the names, or they cannot be read."""
        ...


def captions_in(data: bytes, extension: str) -> list[str]:
    """Return the captions in a file next to an image: the lines of a `txt`, or the key "caption" of a `json`, a text or
    a list of texts. Raises ValueError."""
    if extension == "txt":
        return texts_of(lines_in(data))
    content = json.loads(decoded(data)) if extension == "json" else None
    return texts_of(content.get("caption")) if isinstance(content, dict) else []


def values_in(data: bytes, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these keys in a JSON file next to an image, except missing ones. Raises ValueError."""
    content = json.loads(decoded(data))
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else {}


def texts_of(cell: Any) -> list[str]:
    """Return the non-blank texts in a cell, stripped. The cell is a text, a list of texts, or None."""
    cells = cell if isinstance(cell, list | tuple) else [cell]
    return [text for value in cells if value is not None and (text := str(value).strip())]


def captions_of(rows: Iterable[tuple[str, Iterable[Any]]]) -> dict[str, list[str]]:
    """Return the captions of each image from rows of its name and its caption cells; rows of one image are joined."""
    captions: dict[str, list[str]] = {}
    for name, cells in rows:
        captions.setdefault(name, []).extend(text for cell in cells for text in texts_of(cell))
    return captions


def plain_text(name: str) -> str:
    """Return a file name as valid UTF-8 text: bytes that are not UTF-8 become backslash escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def number_classes(names: Iterable[str]) -> dict[str, int]:
    """Return the class names, sorted as text as in torchvision's ImageFolder, with their numbers from 0."""
    return {name: number for number, name in enumerate(sorted(set(names)))}


def number_labels(labels: Iterable[str], where: str | Path) -> dict[str, int]:
    """Return the labels with their class numbers from 0, sorted by value if all are numbers, otherwise as text.

    where: origin of the labels, for the error. Raises ValueError for a label that is too long to be a name.
    """
    names = set(labels)
    if long := next((label for label in sorted(names) if len(label) > LONGEST_CLASS), None):
        raise ValueError(
            f"{where} has a class of {len(long):,} characters, {long[:20]}...; a class has at most {LONGEST_CLASS}. "
            f"Is that a caption? Leave classes out of the source, or repair it."
        )
    if all(label.isdecimal() for label in names):
        return {label: number for number, label in enumerate(sorted(names, key=int))}
    return number_classes(names)


def check_size(size: int) -> None:
    """Raise OSError for an image file above the maximum size."""
    if size > LARGEST_IMAGE:
        raise OSError(errno.EFBIG, f"{size:,} bytes, more than {LARGEST_IMAGE:,}")


def stamp_if_file(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if a path, which may be any text, names no file."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # no file; a text too long for a path, or with a null character
        return None
    return stamp_in(status) if stat.S_ISREG(status.st_mode) else None


def read_image(path: Path) -> bytes:
    """Return the bytes of an image file. Raises OSError."""
    check_size(path.stat().st_size)
    return path.read_bytes()


def by_shard(items: Sequence[Item], num_shards: int) -> list[list[Item]]:
    """Return the items of each shard, in their given order. A hash of the name decides the shard, so that adding an
    image moves no other. Images with equal `group_key` share a shard if there are enough such groups to fill the shards
    evenly. Tars are assigned in turn."""
    shards: list[list[Item]] = [[] for _ in range(num_shards)]
    in_groups = len({item.group_key for item in items}) >= _GROUPS_A_SHARD * num_shards
    for item in items:
        key = item.group_key if in_groups and item.group_key else item.name
        hashed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        number = hashed if item.tar_number is None else item.tar_number
        shards[number % num_shards].append(item)
    return shards
