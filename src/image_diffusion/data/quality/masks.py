"""Masks in a folder next to the folder of images: the number of images with a mask, and the values of the labels."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from image_diffusion.data.crop.image import quiet_pillow
from image_diffusion.data.labels import Value, code_of, label_values
from image_diffusion.data.sources.folder import files_in, stem_of

FOLDERS = ("masks", "mask", "labels", "annotations", "segmentations")
"""Usual names of a folder of masks."""
_READ, _TRIED = 2000, 16
"""Number of masks that are read, and of those that decide whether a folder holds masks."""
MOST_LABELS = 32
"""Maximum number of labels; images with more values are pictures, or masks with soft edges."""


@dataclass(frozen=True)
class MaskFacts:
    """Facts about the masks of a set of images.

    path: their folder. count: number of images that have one. values: of all labels that were read, sorted: grey
    values, numbers of a palette, or colours.
    """

    path: str
    count: int
    values: tuple[Value, ...]


def images_beside_masks(folder: Path) -> Path | None:
    """Return the folder of images in a folder that holds just that one and one with masks of them; else None."""
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    others = [path for path in folders if path.name.lower() not in FOLDERS]
    if len(folders) != 2 or len(others) != 1:
        return None
    names = [path.relative_to(others[0]).as_posix() for path in _files(others[0]).values()]
    masks = masks_beside(others[0], names, _TRIED)
    return others[0] if masks is not None and 2 * masks.count > len(names) else None


def masks_beside(images: Path, names: Sequence[str], most: int = _READ) -> MaskFacts | None:
    """Describe the masks in the folder of a usual name next to a folder of images.

    names: of the images. most: number of masks that are read.

    None without such a folder, and where its images have one value, or more than labels usually are.
    """
    try:
        folders = sorted(path for path in images.parent.iterdir() if path.name.lower() in FOLDERS and path != images)
    except OSError:  # it cannot be listed
        return None
    for folder in folders:
        files = _files(folder)
        masks = [files[stem_of(name)] for name in names if stem_of(name) in files]
        values = _values(masks[:: 1 + len(masks) // most])
        if 2 <= len(values) <= MOST_LABELS:
            return MaskFacts(str(folder), len(masks), tuple(values))
    return None


def _files(folder: Path) -> dict[str, Path]:
    try:
        return files_in(str(folder), "masks")
    except (ValueError, OSError):  # it is empty, or two files have one name
        return {}


def _values(paths: Iterable[Path]) -> list[Value]:
    """Return the values in some masks, in one form; those of damaged files are left out."""
    values = set[Value]()
    with quiet_pillow():
        for path in paths:
            try:
                with Image.open(io.BytesIO(path.read_bytes())) as image:
                    values.update(label_values(image))
            except Exception:  # decoders raise nearly any exception for damaged files
                continue
            if len(values) > MOST_LABELS:
                break
    return sorted(values, key=code_of) if len({type(value) for value in values}) == 1 else []
