"""Values in an image file: their depth, and the values of black and white."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
"""Pillow's modes of more than 8 bits, all of them grey."""
DARK = 2**13
"""If all values of 16-bit images are below this, they are nearly black in the 16-bit range."""
QUANTILE = 0.999
"""Quantile that measures the used range of an image, robust to a few hot pixels."""
_BITS, _PHOTOMETRIC, _SUBFILE, _MAX_SAMPLE, _SMAX_SAMPLE = 258, 262, 254, 281, 341
"""Tags of TIFF (revision 6.0)."""
_COPY_OR_MASK = 0b101
"""Bits of NewSubfileType: a page that is a smaller copy of another one, or its mask."""


@dataclass(frozen=True)
class StoredPixels:
    """Description of the pixels of a file, from its header.

    bits: of a channel, at least 8. white: the number in the file that is white where 0 is black; None where no number
    is agreed on, as for floating-point pixels. decoded_white: what Pillow makes of it. is_stated: whether
    the file states `white`; otherwise it is the largest number of its type. is_inverted: whether 0 is white instead.
    is_exact: whether Pillow keeps all bits: of colour it keeps the high byte.
    """

    bits: int
    white: int | None
    decoded_white: int
    is_stated: bool
    is_inverted: bool
    is_exact: bool

    def values(self, image: Image.Image) -> list[int]:
        """Return the least of the numbers of a decoded image, their 99.9 % quantile, and the greatest; for colour by
        the high byte. Empty where the depth is 8 bits or the file states the range."""
        if self.bits == 8 or self.is_stated or self.white is None:
            return []
        if self.is_exact:
            numbers = np.asarray(image)
            usual = np.quantile(numbers, QUANTILE, method="higher")
            return [int(numbers.min()), int(usual), int(numbers.max())]
        colours = [band for band in image.getbands() if band not in "Aa"]
        counts = np.sum([image.getchannel(band).histogram() for band in colours], axis=0)
        used = np.flatnonzero(counts)
        usual = np.searchsorted(counts.cumsum(), QUANTILE * counts.sum())
        return [int(used[0]) * 256, int(usual) * 256 + 255, int(used[-1]) * 256 + 255]

    def scaled(self, image: Image.Image, limits: tuple[float, float] | None) -> Image.Image:
        """Scale a decoded image of one of the modes `WIDE` to 8 bits, rounded to nearest; what lies outside is clipped.

        limits: the values of black and white in place of the file's. Raises ValueError if neither is known, and for
        numbers outside the file's range.
        """
        numbers = np.asarray(image)
        if limits is None:
            if self.white is None:
                kind = "floating-point" if image.mode == "F" else "integer"
                raise ValueError(f"32-bit {kind} pixels, which have no agreed range: data.range would say it")
            if numbers.min(initial=0) < 0 or numbers.max(initial=0) > 65535:
                raise ValueError("pixels of more than 16 bits, which have no agreed range: data.range would say it")
        low, high = (0, self.decoded_white) if limits is None else limits
        if limits is not None and self.white is not None:
            low, high = (number * self.decoded_white / self.white for number in limits)
        if image.mode == "F" and not np.isfinite(numbers).all():
            raise ValueError("pixels that are not finite numbers")
        if image.mode != "F" and low == int(low) and high == int(high):
            low, span = int(low), int(high) - int(low)
            levels = ((numbers.astype(np.int64) - low) * 255 + span // 2) // span
        else:
            levels = np.rint((numbers.astype(np.float64) - low) * (255 / (high - low)))
        grey: NDArray[np.uint8] = levels.clip(0, 255).astype(np.uint8)
        return Image.fromarray(255 - grey if self.is_inverted else grey)


def describe(image: Image.Image, data: bytes) -> StoredPixels:
    """Return the description of the pixels of an opened image, by its header. Nothing is decoded. data: the file."""
    is_exact, is_inverted = image.mode in WIDE, False
    bits, white = (16, 65535) if is_exact or _is_16bit(image) else (8, 255)
    decoded = 65535 if is_exact else 255
    match image.format:
        case "PPM" if is_exact or image.mode == "RGB":
            most = _maxval(image)
            bits, white = (16, most) if most > 255 else (bits, white)
        case "JPEG2000":
            at = data.find(b"\xff\x4f\xff\x51")  # start of the codestream and of its segment SIZ
            bits = max(8, (data[at + 42] & 0x7F) + 1)
            white = 2**bits - 1
            decoded = white << (16 - bits) if is_exact else decoded
        case "TIFF" if bits == 16:
            tags = image.tag_v2  # type: ignore[attr-defined]
            bits = tags.get(_BITS, (16,))[0]
            white = _limit(tags, bits)
            decoded = white if is_exact else white >> 8
            is_inverted = is_exact and tags.get(_PHOTOMETRIC) == 0
    is_agreed = image.mode != "F" and not (image.mode == "I" and image.format not in ("PNG", "PPM"))
    return StoredPixels(bits, white if is_agreed else None, decoded, white < 2**16 - 1, is_inverted, is_exact)


def _is_16bit(image: Image.Image) -> bool:
    """True if the channels in a file have 16 bits each, by Pillow's name of their layout."""
    layout = image.tile[0][3] if isinstance(image, ImageFile.ImageFile) and image.tile else ""
    raw = layout[0] if isinstance(layout, tuple) else layout
    return isinstance(raw, str) and ";16" in raw and raw != "BGR;16"  # BGR;16 has 16 bits for a whole pixel


def _maxval(image: Image.Image) -> int:
    """Return the number that a header of PNM declares white; 255 where Pillow does not keep it."""
    decoder, _, _, layout = image.tile[0]  # type: ignore[attr-defined]
    if decoder == "raw":
        return 65535 if image.mode == "I" else 255
    return int(layout[1])


def pages(data: bytes) -> int:
    """Return the pages of a TIFF, without smaller copies of a page and masks."""
    with Image.open(io.BytesIO(data), formats=("TIFF",)) as image:
        count = 0
        for number in range(getattr(image, "n_frames", 1)):
            with suppress(SyntaxError, OSError, ValueError):  # a layout that Pillow does not read: a page, by its tags
                image.seek(number)
            count += not image.tag_v2.get(_SUBFILE, 0) & _COPY_OR_MASK  # type: ignore[attr-defined]
        return max(1, count)


def _limit(tags: Mapping[int, Any], bits: int) -> int:
    """Return the number that is white in a TIFF: MaxSampleValue or SMaxSampleValue, which by the standard may also be
    the greatest one that occurs and so counts where it is all ones; else the largest of so many bits."""
    for tag in (_SMAX_SAMPLE, _MAX_SAMPLE):
        value = tags.get(tag)
        limits = {*value} if isinstance(value, tuple) else {value}
        for fewer in range(9, bits):
            if limits == {2**fewer - 1}:
                return int(2**fewer - 1)
    return int(2**bits - 1)
