"""What a source holds, before any image is opened."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import unicodedata
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from image_diffusion.core.config import Config
from image_diffusion.core.files import Stamp

_GROUPS_A_SHARD = 32  # of images that are read together; their numbers in a shard then vary by a sixth

LARGEST_TEXT = 1 << 20
"""Bytes that a file with a class or a caption may have."""
LARGEST_IMAGE = 1 << 30
"""Bytes that an image file may have: more than 90 million pixels of four 16-bit channels take."""
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
    ignored: number of hidden files. unit: what an item is, in the singular.
    """

    items: list[Item]
    classes: list[str]
    rejected: list[tuple[str, str]]
    ignored: int
    unit: str = "image"


@dataclass(frozen=True)
class Found:
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
        """Of the file that is named at this place."""
        size, modified, changed, inode = self.stamps[4 * number : 4 * number + 4]
        return size, modified, changed, inode

    def digest(self) -> str:
        """The sha256 of all this: two that have one are the same. Another order gives another one."""
        names = "\0".join(self.names).encode("utf-8", "surrogatepass")
        return hashlib.sha256(b"%d\0%b\0%b" % (len(self.names), names, self.stamps.tobytes())).hexdigest()


def add_stamp(stamps: array[int], stamp: Stamp) -> None:
    """Add a stamp to those of `Found`, of which a number has 64 bits and a sign: what has more (inodes of some file
    systems) is taken modulo that."""
    try:
        stamps.fromlist(list(stamp))
    except OverflowError:
        stamps.fromlist([(number + 2**63) % 2**64 - 2**63 for number in stamp])


class FewFiles(Config):
    """A source of so few files that all of them can be named at once."""

    @abstractmethod
    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The files the images come from: by name, path and stamp. Raises ValueError when there are none."""

    def found(self) -> Iterator[Found]:
        """The same as one group."""
        if files := self.files():
            stamps = array("q")
            for _, stamp in files.values():
                add_stamp(stamps, stamp)
            yield Found("", list(files), stamps, lambda name: files[name][0])


class ImageSource(Protocol):
    """What every source offers; one whose items are tars has the methods of `reading.InTars` in place of `read`."""

    def listing(self) -> Listing:
        """Every image there is. Raises ValueError when there is none."""
        ...

    def known_classes(self) -> list[str] | None:
        """The classes by number, where they can be told without opening an image; None: `listing` will tell."""
        ...

    def read(self, item: Item) -> bytes:
        """The bytes of one image file. Raises OSError."""
        ...

    def found(self) -> Iterator[Found]:
        """The files the images come from, group by group. Raises ValueError when there are none."""
        ...

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """The captions that come with the images, by the name of the image or by that without its extension. columns:
        where the source has columns, those of captions. Raises ValueError where it has none, or one cannot be read."""
        ...


def captions_in(data: bytes, extension: str) -> list[str]:
    """The captions in a file beside an image: the lines of a `txt`; the key "caption" of a `json`, a text or a list of
    them. Raises UnicodeDecodeError or json.JSONDecodeError."""
    if extension == "txt":
        return texts_of(data.decode("utf-8").splitlines())
    content = json.loads(data) if extension == "json" else None
    return texts_of(content.get("caption")) if isinstance(content, dict) else []


def values_in(data: bytes, names: Iterable[str]) -> dict[str, Any]:
    """What a JSON file beside an image says under some keys; nothing of those that it lacks. Raises ValueError."""
    content = json.loads(data)
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else {}


def texts_of(cell: Any) -> list[str]:
    """A text, a list of texts or nothing -> the texts that say something, without space around them."""
    found = cell if isinstance(cell, list | tuple) else [cell]
    return [text for each in found if each is not None and (text := str(each).strip())]


def plain_text(name: str) -> str:
    """A file name as text that any file can hold: bytes that are not UTF-8 are written as backslash escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def class_name(text: str) -> str:
    """A class's name in one spelling: file systems differ in how they compose accents (Unicode form NFC)."""
    return unicodedata.normalize("NFC", text)


def number_classes(names: Iterable[str]) -> dict[str, int]:
    """Class names sorted as text, as torchvision's ImageFolder does, and numbered from 0."""
    return {name: number for number, name in enumerate(sorted(set(names)))}


def number_labels(labels: Iterable[str], where: str | Path) -> dict[str, int]:
    """Classes written as labels, numbered from 0: by value when all of them are numbers, as text otherwise.

    where: they were found. Raises ValueError for one that is too long to be a name.
    """
    found = set(labels)
    if long := next((label for label in sorted(found) if len(label) > LONGEST_CLASS), None):
        raise ValueError(
            f"{where} has a class of {len(long):,} characters, {long[:20]}...; a class has at most {LONGEST_CLASS}. "
            f"Is that a caption? Leave classes out of the source, or repair it."
        )
    if all(label.isdecimal() for label in found):
        return {label: number for number, label in enumerate(sorted(found, key=int))}
    return number_classes(found)


def check_size(size: int) -> None:
    """Raise OSError when an image file is too large to be one."""
    if size > LARGEST_IMAGE:
        raise OSError(errno.EFBIG, f"{size:,} bytes, more than {LARGEST_IMAGE:,}")


def read_image(path: Path) -> bytes:
    """The bytes of an image file. Raises OSError."""
    check_size(path.stat().st_size)
    return path.read_bytes()


def by_shard(items: Sequence[Item], num_shards: int) -> list[list[Item]]:
    """The items of each shard, in the order they came: by a hash of the name, so that one image moves no other. What is
    best read together stays so where there are enough such groups to fill the shards evenly. Tars take turns."""
    shards: list[list[Item]] = [[] for _ in range(num_shards)]
    in_groups = len({item.together for item in items}) >= _GROUPS_A_SHARD * num_shards
    for item in items:
        key = item.together if in_groups and item.together else item.name
        hashed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        number = hashed if item.turn is None else item.turn
        shards[number % num_shards].append(item)
    return shards
