"""Sources that keep many images in one file: a zip, which is read without unpacking, and the LMDB databases of LSUN."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from image_diffusion.core.files.atomic import ZIP_FAULTS, Stamp, stamp_of
from image_diffusion.core.process.errors import package
from image_diffusion.core.texts import class_name
from image_diffusion.data.sources.base import (
    LARGEST_IMAGE,
    FewFiles,
    Item,
    Listing,
    check_size,
    is_hidden,
    number_classes,
    plain_text,
)
from image_diffusion.data.sources.layouts import (
    LABELS_FILE,
    LARGEST_LABELS,
    Level,
    by_folder,
    labelled,
    labels_in,
    level_of,
)


class ZipArchive(FewFiles):
    """A zip file of images, which is never unpacked to disk.

    A `dataset.json` at its root gives the classes by the key "labels", a list of pairs of a member's name and its
    class, as dataset_tool.py of StyleGAN3 and EDM2 writes it. Without it, the first-level folders are the classes.
    """

    type: Literal["zip"] = "zip"
    """A zip file of images."""
    path: str = Field(min_length=1)
    """The zip file."""
    classes: Literal["labels", "none"] | Level = "labels"
    """labels: the classes in dataset.json, or else the first-level folders, or the folders in a single folder around
    all others; folders named like splits (train, val, test) are an error. {level: 2}: the second-level folders,
    whatever their names. none: unconditional data."""

    no_captions: ClassVar[str] = "data.source.type is zip, which holds no captions. Set pairs.captions.type to table."

    def listing(self) -> Listing:
        """Return every member as an image, sorted by name. Raises ValueError for a zip that is missing, damaged or
        empty."""
        names, passed_over = self._members()
        if not names:
            raise ValueError(f"data.source.path: {self.path} holds no files. Put images into the zip.")
        members = [(plain_text(name), name) for name in names]
        labels = self._labels() if self.classes == "labels" else None
        if labels is not None:
            return replace(labelled(members, labels, self.path, "zip"), passed_over=passed_over)
        if self.classes == "none" or not any("/" in name for name in names):
            return Listing([Item(shown, None, (name,)) for shown, name in members], [], [], passed_over)
        folders = _folders(names)
        level = level_of(self.classes, self.path, lambda folder: folders.get(folder, set()), is_archive=True)
        listing = by_folder(members, level)
        # Zips made by file managers often have a folder around all others: it is not the class; print a notice.
        looked_through = level > 1 and not isinstance(self.classes, Level)
        around = next(iter(folders[""]))
        notices = (f"{self.path}: the classes are the folders in {around}, which holds all others",)
        return replace(listing, passed_over=passed_over, notices=notices if looked_through else ())

    def known_classes(self) -> list[str] | None:
        return [] if self.classes == "none" else None

    def read(self, item: Item) -> bytes:
        """Return the bytes of one member, verified by its checksum. Raises OSError."""
        try:
            archive = _open_zip(self.path, stamp_of(Path(self.path)))
            member = archive.getinfo(str(item.address[0]))
            check_size(member.file_size)
            with archive.open(member) as file:
                return file.read(LARGEST_IMAGE)
        except ZIP_FAULTS as error:
            raise OSError(f"damaged in the zip: {error}") from None

    def files(self) -> dict[str, tuple[str, Stamp]]:
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"data.source.path: {self.path} does not exist, or is no file. Give a zip file.")
        return {plain_text(path.name): (str(path), stamp_of(path))}

    def _archive(self) -> zipfile.ZipFile:
        _, stamp = next(iter(self.files().values()))
        try:
            return _open_zip(self.path, stamp)
        except (*ZIP_FAULTS, OSError) as error:
            raise ValueError(
                f"{self.path} cannot be read as a zip file: {error}. Download or write it again."
            ) from None

    def _members(self) -> tuple[list[str], list[str]]:
        """Return the names of the members that are files: those to read, and the hidden ones; both sorted."""
        names = [
            member.filename
            for member in self._archive().infolist()
            if not member.is_dir() and member.filename != LABELS_FILE
        ]
        hidden = sorted(name for name in set(names) if any(map(is_hidden, name.split("/"))))
        return sorted(set(names) - set(hidden)), list(map(plain_text, hidden))

    def _labels(self) -> dict[str, str] | None:
        """Return the class of each member in dataset.json; None if the zip has no dataset.json, or it has no labels."""
        archive = self._archive()
        if LABELS_FILE not in archive.namelist():
            return None
        try:
            if (size := archive.getinfo(LABELS_FILE).file_size) > LARGEST_LABELS:
                raise ValueError(f"it has {size:,} bytes")
            data = archive.read(LABELS_FILE)
        except ZIP_FAULTS as error:
            raise ValueError(f"{self.path}: {LABELS_FILE} cannot be read: {error}.") from None
        return labels_in(data, self.path)


def _folders(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the folders in each folder of members, by its path; "" is the zip itself."""
    inside: dict[str, set[str]] = {}
    for name in names:
        *folders, _ = name.split("/")
        for depth, folder in enumerate(folders):
            inside.setdefault("/".join(folders[:depth]), set()).add(folder)
    return inside


@lru_cache(maxsize=2)
def _open_zip(path: str, stamp: Stamp) -> zipfile.ZipFile:
    """Open the zip. stamp: of the file, so that a replaced file is reopened."""
    return zipfile.ZipFile(path)


_DATA = "data.mdb"
_ENDING = re.compile(r"(_(train|val|test))?_lmdb$")


class Lmdb(FewFiles):
    """Databases of image files, each a folder with a `data.mdb`. Needs the package lmdb.

    In a folder of several databases, each is a class, named by its folder without LSUN's `_train_lmdb` or `_val_lmdb`.
    An image is named by its database and its key.
    """

    type: Literal["lmdb"] = "lmdb"
    """LMDB databases of image files, such as LSUN's."""
    path: str = Field(min_length=1)
    """Folder of a database, or a folder of such folders."""
    classes: Literal["databases", "none"] = "databases"
    """databases: each database of a folder is a class; a single database has no classes. none: unconditional data."""

    no_captions: ClassVar[str] = "data.source.type is lmdb, which holds no captions. Set pairs.captions.type to table."

    def listing(self) -> Listing:
        """Return every key as an image, by database and key. Raises ValueError for a database that is missing or
        damaged."""
        databases = {name: Path(path).parent for name, (path, _) in self.files().items()}
        keys = {name: _keys(folder, self.path) for name, folder in databases.items()}
        if not any(keys.values()):
            raise ValueError(f"data.source.path: {self.path} holds no images. Put one under each key.")
        numbers = number_classes(self.known_classes())
        items = [
            Item(f"{name}/{_text_of(key)}", numbers.get(_class_of(name)), (str(folder), key.hex()), name)
            for name, folder in databases.items()
            for key in keys[name]
        ]
        return Listing(sorted(items, key=lambda item: item.name), list(numbers), [])

    def known_classes(self) -> list[str]:
        is_one = (Path(self.path) / _DATA).is_file()
        return [] if is_one or self.classes == "none" else sorted({_class_of(name) for name in self.files()})

    def read(self, item: Item) -> bytes:
        import lmdb

        folder, key = str(item.address[0]), bytes.fromhex(str(item.address[1]))
        try:
            with _open_database(Path(folder)) as database, database.begin(buffers=True) as transaction:
                data = transaction.get(key)
                if data is None:
                    raise OSError("its key is no longer there")
                check_size(len(data))
                return bytes(data)
        except lmdb.Error as error:
            raise OSError(f"damaged in the database: {str(error).replace(folder, Path(folder).name)}") from None

    def files(self) -> dict[str, tuple[str, Stamp]]:
        path = Path(self.path)
        paths = [path / _DATA] if (path / _DATA).is_file() else sorted(path.glob(f"*/{_DATA}"))
        if not paths:
            raise ValueError(f"data.source.path: {self.path} holds no {_DATA}. Give a database, or a folder of them.")
        return {plain_text(path.parent.resolve().name): (str(path), stamp_of(path)) for path in paths}


def _text_of(key: bytes) -> str:
    """Return a key unchanged if it is a line of text, else in hexadecimal."""
    text = key.decode("ascii", errors="replace")
    return text if text.isascii() and text.isprintable() else key.hex()


def _class_of(name: str) -> str:
    return class_name(_ENDING.sub("", name))


def _keys(folder: Path, source: str) -> list[bytes]:
    """Return every key of a database. Raises ValueError."""
    try:
        import lmdb  # imported here: planning does not need it
    except ImportError:
        raise ValueError(f"{source}: reading LMDB needs {package('lmdb', 'lsun')}") from None
    try:
        with _open_database(folder) as database, database.begin() as transaction:
            return [bytes(key) for key in transaction.cursor().iternext(keys=True, values=False)]
    except lmdb.Error as error:
        raise ValueError(f"{folder} cannot be read as an LMDB database: {error}. Write it again.") from None


def _open_database(folder: Path) -> Any:
    """Open the database for reading. Close it at once, since a process may have it open only once."""
    import lmdb

    return lmdb.open(str(folder), readonly=True, lock=False, readahead=False)
