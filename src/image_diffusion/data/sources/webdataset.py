"""Tars of images as webdataset writes them: 000001.jpg and 000001.cls, .txt or .json side by side."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field

from image_diffusion.core.config import Config
from image_diffusion.data.sources.listing import (
    Item,
    Listing,
    Stamp,
    caption_in,
    number_labels,
    plain_text,
    stamp_of,
)

_LABELS = ("cls", "txt", "json")
_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2")


class Webdataset(Config):
    """Tar files of samples. Members whose names are equal up to the first dot are one sample: an image, and a class
    in `.cls`, `.txt` or the key "label" of `.json`.

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
            images, labels, _, hidden = _read_members(Path(path), self.labels)
            ignored += hidden
            found += [(f"{name}/{key}", labels.get(key), (path, *place)) for key, place in images.items()]
            rejected += [(f"{name}/{key}", "a class without an image") for key in labels.keys() - images.keys()]
        if not found:
            raise ValueError(f"data.source.path: {self.path} holds no images. Its tars must hold files like 0001.jpg.")
        numbers = number_labels(label for _, label, _ in found if label is not None)
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
        with Path(str(path)).open("rb") as file:
            file.seek(int(start))
            return file.read(int(size))

    def captions(self) -> dict[str, str]:
        """The captions beside the images, by the name of the image: in `.txt`, or the key "caption" of `.json`."""
        found: dict[str, str] = {}
        for name, (path, _) in self.files().items():
            _, _, captions, _ = _read_members(Path(path), labelled=False)
            found |= {f"{name}/{key}": caption for key, caption in captions.items()}
        return found

    def files(self) -> dict[str, tuple[str, Stamp]]:
        """The tars. Raises ValueError when there are none."""
        path = Path(self.path)
        if not path.exists():
            raise ValueError(f"data.source.path: {self.path} does not exist. Give a tar file or a folder of them.")
        tars = sorted(path.glob("*.tar")) if path.is_dir() else [path]
        if not tars:
            raise ValueError(f"data.source.path: {self.path} holds no .tar file. Give a tar file or a folder of them.")
        return {plain_text(tar.name): (str(tar), stamp_of(tar)) for tar in tars}


def _read_members(path: Path, labelled: bool) -> tuple[dict[str, tuple[int, int]], dict[str, str], dict[str, str], int]:
    """Of one tar, by key: the place (offset, size) of each image, the classes of a labelled set or else the captions;
    hidden files."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, str] = {}
    captions: dict[str, str] = {}
    hidden, end = 0, 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE * member.isreg()
                parts = PurePosixPath(member.name).parts
                if member.name.startswith("/") or ".." in parts:
                    raise ValueError(f"{path} is refused: its member '{plain_text(member.name)}' leads out of it.")
                if member.isdir():
                    continue
                if any(part.startswith((".", "__")) for part in parts if part != "."):
                    hidden += 1
                    continue
                if not member.isreg():
                    raise ValueError(
                        f"{path} is refused: its member '{plain_text(member.name)}' is a link or a device, not a file."
                    )
                folder, _, file_name = plain_text(member.name).rpartition("/")
                stem, _, extension = file_name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if extension.lower() in _IMAGES:
                    if key in images:
                        raise ValueError(f"{path} has two images under the key '{key}'. Give every sample its own key.")
                    images[key] = (member.offset_data, member.size)
                elif extension.lower() in _LABELS:
                    file = tar.extractfile(member)
                    data = file.read() if file else b""
                    if labelled and (label := _label(data, extension.lower())) is not None:
                        labels[key] = label
                    elif not labelled and (caption := caption_in(data, extension.lower())) is not None:
                        captions[key] = caption
    except (tarfile.TarError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a tar file: {error}. Download or write it again.") from None
    with path.open("rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"{path} is cut short: the empty block that ends a tar is missing. Download it again.")
    return images, labels, captions, hidden


def _label(data: bytes, extension: str) -> str | None:
    """The class in a member: the text itself, or the key "label" of JSON; None when there is no such key."""
    if extension != "json":
        return data.decode("utf-8").strip()
    content = json.loads(data)
    return str(content["label"]).strip() if isinstance(content, dict) and "label" in content else None
