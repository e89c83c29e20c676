"""Pixel labels of an image, such as a mask: the numbers or colours in a file -> 0, 1, 2 and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from image_diffusion.data.config import DataConfig
from image_diffusion.data.crop.array_files import BadImage
from image_diffusion.data.crop.stored import WIDE

Value = int | tuple[int, int, int]
"""Number in a file that stands for a label, or a colour (red, green, blue)."""

_NUMBERED = ("1", "L", "P", *WIDE)
_SHOWN = 5


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
