"""Masks of images, whose pixels are labels: their folder next to that of the images, and the numbers or colours in a
file -> 0, 1, 2 and so on."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage
from image_diffusion.data.crop.image import quiet_pillow
from image_diffusion.data.crop.stored import WIDE
from image_diffusion.data.sources.folder import files_in, stem_of

Value = int | tuple[int, int, int]
"""Number in a file that stands for a label, or a colour (red, green, blue)."""

FOLDERS = ("masks", "mask", "labels", "annotations", "segmentations")
"""Usual names of a folder of masks."""
_READ, _TRIED = 2000, 16
"""Number of masks that are read, and of those that decide whether a folder holds masks."""
MOST_LABELS = 32
"""Maximum number of labels; images with more values are pictures, or masks with soft edges."""
_NUMBERED = ("1", "L", "P", *WIDE)
_SHOWN = 5


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


@dataclass(frozen=True)
class LabelDecoder:
    """Decoder of images whose pixels are labels (`crop.image.Decode`). values: of each label, at most 256."""

    values: Sequence[Value]

    def __call__(self, image: Image.Image, data: bytes, config: DataConfig) -> tuple[Image.Image, set[str], list[int]]:
        """Return the label numbers as an upright image of mode P. Raises BadImage for other values."""
        image.load()
        image = ImageOps.exif_transpose(image)
        are_colours = isinstance(self.values[0], tuple)
        present, place = np.unique(_codes(image, are_colours), return_inverse=True)
        codes = np.array([code_of(value) for value in self.values], dtype=np.int64)
        if unknown := sorted({*present.tolist()} - {*codes.tolist()}):
            named = [str(_colour(code)) if are_colours else str(code) for code in unknown[:_SHOWN]]
            others = f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
            raise BadImage(f"label values {', '.join(named)}{others}, which pairs.labels does not name")
        order = np.argsort(codes)
        numbers = order[np.searchsorted(codes[order], present)].astype(np.uint8)[place]
        return Image.frombytes("P", image.size, numbers.tobytes()), set(), []


def label_values(image: Image.Image) -> list[Value]:
    """Return the values of the pixels of an image, sorted: grey values, numbers of a palette, or else colours. Raises
    BadImage for numbers that are not whole."""
    are_colours = image.mode not in _NUMBERED
    codes = np.unique(_codes(image, are_colours)).tolist()
    return [_colour(code) for code in codes] if are_colours else codes


def _codes(image: Image.Image, are_colours: bool) -> NDArray[np.int64]:
    """Return a number for each pixel: of an index, of a grey value, or of a colour. Raises BadImage."""
    if are_colours:
        red, green, blue = np.asarray(image.convert("RGB"), dtype=np.int64).transpose(2, 0, 1)
        codes: NDArray[np.int64] = red << 16 | green << 8 | blue
        return codes
    if image.mode not in _NUMBERED or image.mode == "F":
        raise BadImage(
            f"pixels of mode {image.mode}, where pairs.labels expects grey values or the numbers of a palette"
        )
    return np.asarray(image).astype(np.int64)


def code_of(value: Value) -> int:
    """Return the number of a value: itself, or that of a colour, by red, green and blue in turn."""
    return value if isinstance(value, int) else value[0] << 16 | value[1] << 8 | value[2]


def _colour(code: int) -> tuple[int, int, int]:
    return code >> 16, code >> 8 & 255, code & 255
