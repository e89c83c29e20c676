"""Tars of images as webdataset writes them: 000001.jpg and 000001.cls, .txt or .json side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from image_diffusion.core.files import Stamp, stamp_of
from image_diffusion.data.sources.listing import FewFiles, Item, Listing, check_size, number_labels, plain_text
from image_diffusion.data.sources.tar_members import read_members


class Webdataset(FewFiles):
    """Tar files of samples. Members whose names are equal up to the first dot are one sample: an image, and a class
    in `.cls`, the key "label" of `.json`, or `.txt`; where there are several of these, in the first.

    Nothing is ever unpacked, and a tar with a member whose name leads out of it is refused.
    """

    type: Literal["webdataset"] = "webdataset"
    """Tar files of images and their classes."""
    path: str = Field(min_length=1)
    """A tar file, or a folder: every `.tar` in it is read."""
    labels: bool = True
    """Whether `.cls`, `.txt` and `.json` tell classes; false: unconditional data, whose `.txt` may be captions."""

    def listing(self) -> Listing:
        """Every sample of every tar, sorted by tar and key. Raises ValueError for a tar that cannot be read."""
        found: list[tuple[str, str | None, tuple[str | int, ...]]] = []
        rejected: list[tuple[str, str]] = []
        ignored = 0
        for name, (path, _) in self.files().items():
            members = read_members(Path(path), self.labels)
            ignored += members.hidden
            found += [(f"{name}/{key}", members.label(key), (path, *at)) for key, at in members.images.items()]
            alone = members.labels.keys() - members.images.keys()
            rejected += [(f"{name}/{key}", "a class without an image") for key in alone]
        if not found:
            raise ValueError(f"data.source.path: {self.path} holds no images. Its tars must hold files like 0001.jpg.")
        numbers = number_labels((label for _, label, _ in found if label is not None), self.path)
        items = []
        for name, label, address in sorted(found):
            if numbers and label is None:
                rejected.append((name, "an image without a class, while others have one"))
            else:
                items.append(Item(name, None if label is None else numbers[label], address))
        return Listing(items, list(numbers), sorted(rejected), ignored)

    def known_classes(self) -> list[str] | None:
        """None: they are known when the files have been read."""
        return None

    def read(self, item: Item) -> bytes:
        """The bytes of one image, straight from its place in the tar. Raises OSError."""
        path, start, size = item.address
        check_size(int(size))
        with Path(str(path)).open("rb") as file:
            file.seek(int(start))
            return file.read(int(size))

    def captions_beside(self, columns: tuple[str, ...]) -> dict[str, list[str]]:
        """The captions in the tars, by the name of the image: the lines of `.txt`, or the key "caption" of `.json`."""
        found: dict[str, list[str]] = {}
        for name, (path, _) in self.files().items():
            members = read_members(Path(path), labelled=False)
            found |= {f"{name}/{key}": captions for key, captions in members.captions.items()}
        return found

    def values_beside(self, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Keys of the `.json` in the tars, by the name of the image."""
        found: dict[str, dict[str, Any]] = {}
        for name, (path, _) in self.files().items():
            members = read_members(Path(path), labelled=False, names=names)
            found |= {f"{name}/{key}": values for key, values in members.values.items()}
        return found

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The tars. Raises ValueError when there are none."""
        path = Path(self.path)
        if not path.exists():
            raise ValueError(f"data.source.path: {self.path} does not exist. Give a tar file or a folder of them.")
        tars = sorted(path.glob("*.tar")) if path.is_dir() else [path]
        if not tars:
            raise ValueError(f"data.source.path: {self.path} holds no .tar file. Give a tar file or a folder of them.")
        for tar in tars:
            if not tar.is_file():
                raise ValueError(f"{tar} is a folder, a pipe or a device, not a file. Give tar files.")
        return {plain_text(tar.name): (str(tar), stamp_of(tar)) for tar in tars}
