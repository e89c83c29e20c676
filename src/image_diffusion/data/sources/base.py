"""Contents of a source, before any image is opened."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Protocol, runtime_checkable

from image_diffusion.core.config.base import Config
from image_diffusion.core.files.atomic import Stamp
from image_diffusion.core.texts import decoded

_GROUPS_A_SHARD = 32  # of images that are read together; their numbers in a shard then vary by a sixth

LARGEST_TEXT = 1 << 20
"""Bytes that a file with a class or a caption may have."""
LARGEST_IMAGE = 1 << 30
"""Bytes that an image file may have: more than 90 million pixels of four 16-bit channels take."""
_TEXTS = {".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".html", ".htm", ".pdf"}
_NOT_DATA = {"__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir", "#recycle", "$RECYCLE.BIN"}

LONGEST_CLASS = 255
"""Characters that the name of a class may have, as many as that of a folder."""


@dataclass(frozen=True)
class Item:
    """One image of a source.

    name: unique and stable within the source, in plain text; it decides the shard and the order. label: the number
    of its class, None without classes. address: where the source finds its bytes. together: what it has in common with
    images that are best read one after another, where there are such. turn: of a tar of images, which one it is.
    """

    name: str
    label: int | None
    address: tuple[str | int, ...]
    together: str = ""
    turn: int | None = None


@dataclass(frozen=True)
class Listing:
    """Every image of a source, sorted by name.

    classes: their names by number; empty for unconditional data. rejected: (name, reason) of what can be no image.
    passed_over: names of files that are neither images nor quarantined: hidden ones, texts beside images, files of
    other kinds. unit: what an item is, in the singular. notices: lines about the layout for the terminal.
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
    """Files of a source that lie together, held in little memory: a million may.

    folder: they lie in, from the source on, in plain text and with a "/" at its end; empty for the source itself.
    names: of the files, in the order in which they were found. stamps: four numbers a file, as in `Stamp`. at: the
    path of a file by its name.
    """

    folder: str
    names: list[str]
    stamps: array[int]
    at: Callable[[str], str]

    def stamp(self, number: int) -> Stamp:
        """Return the stamp of the file that is named at this place."""
        size, modified, changed, inode = self.stamps[4 * number : 4 * number + 4]
        return size, modified, changed, inode

    def digest(self) -> str:
        """The sha256 of all this: two that have one are the same. Another order gives another one."""
        names = "\0".join(self.names).encode("utf-8", "surrogatepass")
        return hashlib.sha256(b"%d\0%b\0%b" % (len(self.names), names, self.stamps.tobytes())).hexdigest()


def is_hidden(name: str) -> bool:
    """True if programs keep files or folders of this name for themselves, so that it holds no data."""
    return name.startswith(".") or name in _NOT_DATA


def is_text(name: str) -> bool:
    """True if a file of this name describes data and is not an image, by its extension."""
    return PurePosixPath(name).suffix.lower() in _TEXTS


def _kind(name: str) -> str:
    parts = PurePosixPath(name).parts
    hidden = next((part for part in parts if is_hidden(part) or part.startswith("__")), None)
    return hidden or PurePosixPath(name).suffix.lower() or "no extension"


def add_stamp(stamps: array[int], stamp: Stamp) -> None:
    """Add a stamp to those of `Found`, of which a number has 64 bits and a sign: what has more (inodes of some file
    systems) is taken modulo that."""
    try:
        stamps.fromlist(list(stamp))
    except OverflowError:
        stamps.fromlist([(number + 2**63) % 2**64 - 2**63 for number in stamp])


class ImageSource(Config):
    """Base of every source. Of one whose items are tars, the images of a tar are known when it has been fetched:
    `images_of` yields them."""

    no_captions: ClassVar[str]
    """Message of a source that has no captions."""

    @abstractmethod
    def listing(self) -> Listing:
        """Return every image of the source. Raises ValueError when the source has none."""

    @abstractmethod
    def file_groups(self) -> Iterator[FileGroup]:
        """Yield the files of the images, group by group. Raises ValueError when the source has none."""

    def read(self, item: Item) -> bytes:
        """Return the bytes of one image file. Raises OSError."""
        raise OSError(f"{item.name} is not an image")

    def images_of(self, item: Item) -> Iterator[tuple[Item, Callable[[], bytes]]]:
        """Yield the images of an item, itself or those of a tar, and the function that reads each, or raises OSError.
        They are to be read one after another. Raises ValueError for a tar that cannot be fetched."""
        yield item, partial(self.read, item)

    def state_of(self, item: Item) -> str:
        """Return a text that changes with the images of an item: the sha256 of one, empty where it cannot be read; of
        a tar, what is known before it is fetched."""
        try:
            return hashlib.sha256(self.read(item)).hexdigest()
        except OSError:
            return ""

    def known_classes(self) -> list[str] | None:
        """Return the classes by number, where they can be known without opening an image; None: `listing` gives
        them."""
        return None

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the captions that come with the images, by the name of the image or by that without its extension.
        columns: where the source has columns, those of captions. Raises ValueError where it has none, or one cannot be
        read."""
        raise ValueError(self.no_captions)


class FewFiles(ImageSource):
    """A source of so few files that all of them can be named at once."""

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
    """A source that has no files on this machine, such as one whose images are drawn by code."""

    def file_groups(self) -> Iterator[FileGroup]:
        return iter(())


class RowSource(ImageSource):
    """A source with a row for each image, which may have further columns."""

    @abstractmethod
    def rows(self, columns: tuple[str, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the name of the image of each row, and its cells in some columns. Raises ValueError."""

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the captions in some columns, each a text or a list of texts, by the name of the image."""
        return captions_of(self.rows(columns))

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Return some columns, by the name of the image; of several rows the first, which gives the class, too."""
        values: dict[str, dict[str, Any]] = {}
        for name, row in self.rows(names):
            values.setdefault(name, dict(zip(names, row, strict=True)))
        return values


@runtime_checkable
class HasValues(Protocol):
    """Source that has further values of its images besides their classes."""

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Return the values of each image under some names, by its name or by that without its extension. Raises
        ValueError where one of the names has no values, or they cannot be read."""
        ...


def captions_in(data: bytes, extension: str) -> list[str]:
    """Return the captions in a file beside an image: the lines of a `txt`; the key "caption" of a `json`, a text or a
    list of them. Raises ValueError."""
    text = decoded(data)
    if extension == "txt":
        return texts_of(text.splitlines())
    content = json.loads(text) if extension == "json" else None
    return texts_of(content.get("caption")) if isinstance(content, dict) else []


def values_in(data: bytes, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of a JSON file beside an image under some keys, without the keys that it lacks. Raises
    ValueError."""
    content = json.loads(decoded(data))
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else {}


def texts_of(cell: Any) -> list[str]:
    """Return the texts of a text, a list of texts or nothing, without blank ones and without space around them."""
    cells = cell if isinstance(cell, list | tuple) else [cell]
    return [text for value in cells if value is not None and (text := str(value).strip())]


def captions_of(rows: Iterable[tuple[str, Iterable[Any]]]) -> dict[str, list[str]]:
    """Return the captions of each image, from its name and the cells that hold them; of several rows those of all."""
    captions: dict[str, list[str]] = {}
    for name, cells in rows:
        captions.setdefault(name, []).extend(text for cell in cells for text in texts_of(cell))
    return captions


def plain_text(name: str) -> str:
    """Return a file name as text that any file can hold: bytes that are not UTF-8 are written as backslash escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def number_classes(names: Iterable[str]) -> dict[str, int]:
    """Class names sorted as text, as torchvision's ImageFolder does, and numbered from 0."""
    return {name: number for number, name in enumerate(sorted(set(names)))}


def number_labels(labels: Iterable[str], where: str | Path) -> dict[str, int]:
    """Classes written as labels, numbered from 0: by value when all of them are numbers, as text otherwise.

    where: they were found. Raises ValueError for one that is too long to be a name.
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
    """Raise OSError when an image file is too large to be one."""
    if size > LARGEST_IMAGE:
        raise OSError(errno.EFBIG, f"{size:,} bytes, more than {LARGEST_IMAGE:,}")


def is_file(path: Path) -> bool:
    """True if a path, which may be any text, is that of a file."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text too long for a path, or with a null character
        return False


def read_image(path: Path) -> bytes:
    """Return the bytes of an image file. Raises OSError."""
    check_size(path.stat().st_size)
    return path.read_bytes()


def by_shard(items: Sequence[Item], num_shards: int) -> list[list[Item]]:
    """Return the items of each shard, in the order they came: by a hash of the name, so that one image moves no other.
    What is best read together stays so where there are enough such groups to fill the shards evenly. Tars take
    turns."""
    shards: list[list[Item]] = [[] for _ in range(num_shards)]
    in_groups = len({item.together for item in items}) >= _GROUPS_A_SHARD * num_shards
    for item in items:
        key = item.together if in_groups and item.together else item.name
        hashed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        number = hashed if item.turn is None else item.turn
        shards[number % num_shards].append(item)
    return shards
