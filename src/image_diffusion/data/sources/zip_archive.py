"""A zip of images, read in place: as StyleGAN3's and EDM2's dataset_tool.py writes it, or any other."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from image_diffusion.core.files import ZIP_FAULTS, Stamp, stamp_of
from image_diffusion.data.sources.labels_file import LABELS_FILE, LARGEST_LABELS, labelled, labels_in
from image_diffusion.data.sources.listing import (
    LARGEST_IMAGE,
    FewFiles,
    Item,
    Listing,
    check_size,
    class_name,
    number_classes,
    plain_text,
)


class ZipArchive(FewFiles):
    """A zip file of images. Nothing is ever unpacked to disk.

    A `dataset.json` at its root, with the key "labels", pairs of a member's name and its class, tells the classes, as
    dataset_tool.py of StyleGAN3 and EDM2 writes it. Without one, the folders at the first level do, as in a folder.
    """

    type: Literal["zip"] = "zip"
    """A zip file of images."""
    path: str = Field(min_length=1)
    """The zip file."""
    classes: Literal["labels", "none"] = "labels"
    """labels: dataset.json tells them, or else the folders at the first level. none: unconditional data."""

    def listing(self) -> Listing:
        """Every member as an image, sorted by name. Raises ValueError for a zip that is missing, damaged or empty."""
        names, ignored = self._members()
        if not names:
            raise ValueError(f"data.source.path: {self.path} holds no files. Put images into the zip.")
        if self.classes == "none":
            return Listing([Item(plain_text(name), None, (name,)) for name in names], [], [], ignored)
        labels = self._labels()
        if labels is not None:
            found = labelled([(plain_text(name), name) for name in names], labels, self.path, "zip")
            return replace(found, ignored=ignored)
        if not any("/" in name for name in names):
            return Listing([Item(plain_text(name), None, (name,)) for name in names], [], [], ignored)
        folders = {name: class_name(plain_text(name.split("/", 1)[0])) for name in names if "/" in name}
        numbers = number_classes(folders.values())
        items = [Item(plain_text(name), numbers[folders[name]], (name,)) for name in names if name in folders]
        outside = [(plain_text(name), "lies outside every class folder") for name in names if name not in folders]
        return Listing(items, list(numbers), outside, ignored)

    def known_classes(self) -> list[str] | None:
        """None: they are known when the zip has been read."""
        return [] if self.classes == "none" else None

    def read(self, item: Item) -> bytes:
        """The bytes of one member, its checksum compared. Raises OSError."""
        try:
            archive = _open(self.path, stamp_of(Path(self.path)))
            member = archive.getinfo(str(item.address[0]))
            check_size(member.file_size)
            with archive.open(member) as file:
                return file.read(LARGEST_IMAGE)
        except ZIP_FAULTS as error:
            raise OSError(f"damaged in the zip: {error}") from None

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """There are none. Raises ValueError."""
        raise ValueError("data.source.type is zip, which holds no captions. Set pairs.captions.type to table.")

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The zip. Raises ValueError when it is missing."""
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"data.source.path: {self.path} does not exist, or is no file. Give a zip file.")
        return {plain_text(path.name): (str(path), stamp_of(path))}

    def _archive(self) -> zipfile.ZipFile:
        _, stamp = next(iter(self.files().values()))
        try:
            return _open(self.path, stamp)
        except (*ZIP_FAULTS, OSError) as error:
            raise ValueError(
                f"{self.path} cannot be read as a zip file: {error}. Download or write it again."
            ) from None

    def _members(self) -> tuple[list[str], int]:
        """The names of the members that are no folders, sorted, and how many are hidden."""
        names = [
            each.filename for each in self._archive().infolist() if not each.is_dir() and each.filename != LABELS_FILE
        ]
        shown = sorted(name for name in set(names) if not _is_hidden(name))
        return shown, len(set(names)) - len(shown)

    def _labels(self) -> dict[str, str] | None:
        """The class of each member that dataset.json names; None where there is none, or it names none."""
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


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


@lru_cache(maxsize=2)
def _open(path: str, stamp: Stamp) -> zipfile.ZipFile:
    """The zip, open. stamp: of the file, so that another file of that name is opened anew."""
    return zipfile.ZipFile(path)
