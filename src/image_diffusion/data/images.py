"""One image file -> its crop or crops, or a reason why not.

What is done with images that are not plain RGB, each recorded as a flag of the sample:

  exif          stored turned or mirrored: put upright, as every viewer shows it
  gray          grey or black and white: the grey value in each channel
  palette       looked up before any resizing
  alpha         transparent: composed over the configured background, unless the crop keeps alpha
  cmyk          converted by Pillow without a colour profile, as the original does
  colour_space  YCbCr, HSV, LAB: converted
  16bit         scaled to 8 bits, 65535 becoming 255; 16-bit RGB PNGs are truncated to their high byte by Pillow
  first_frame   animated or of several pages: the first one
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from image_diffusion.data.config import WHITE, DataConfig
from image_diffusion.data.jpeg import plain_header

FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA",
)  # fmt: skip
"""Formats that are read, by Pillow's names: all of them decode without running another program. JPEG includes MPO."""

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_ORIENTATION = 0x0112
_CORE: Any = Image.core  # type: ignore[attr-defined]
_BLOCK = 2**31 - 4096
"""The most bytes that Pillow takes for a block of memory."""


class BadImage(Exception):  # noqa: N818 - a verdict on a file, not a failure of the program
    """A file that gives no crop, and why, in a few words."""


@dataclass(frozen=True)
class Crop:
    """squares: uint8 [C, resolution, resolution] each, one or more. size: (width, height) of the upright image. flags:
    sorted. format, mode: of the file, by Pillow's names."""

    squares: list[NDArray[np.uint8]]
    size: tuple[int, int]
    flags: list[str]
    format: str
    mode: str


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Inside, Pillow neither warns nor keeps its own limit of pixels: `crop_image` holds a stricter one. An image lies
    in one block of memory, however large, so that its pixels can be shared with the compiled crop."""
    limit, block = Image.MAX_IMAGE_PIXELS, _CORE.get_block_size()
    Image.MAX_IMAGE_PIXELS = None
    _CORE.set_block_size(_BLOCK)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit
        _CORE.set_block_size(block)


def crop_image(data: bytes, config: DataConfig) -> Crop:
    """The bytes of an image file -> its crop or crops.

    Raises BadImage. Call it inside `quiet_pillow()`.
    """
    if not data:
        raise BadImage("an empty file")
    try:
        header = plain_header(data) if config.resize == "fast" and config.channels == 3 else None
        if header is not None and (not header.exif or _is_upright(data)):
            _check_size(header.size, config)
            pixels = _fast_crop(data, config.resolution)
            is_grey = header.components == 1
            return Crop([pixels], header.size, ["gray"] if is_grey else [], "JPEG", "L" if is_grey else "RGB")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image.size, config)
            stored = str(image.format), image.mode
            upright, flags = _decode(image, config)
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"not an image: it starts with {data[:8]!r}") from None
    except Exception as error:  # decoders raise nearly anything when they are fed damaged files
        raise BadImage(f"damaged: {' '.join(str(error).split()) or type(error).__name__}") from None
    if config.resize == "fast":
        return Crop([_fast_crop(upright, config.resolution)], upright.size, sorted(flags), *stored)
    found = config.crop.squares(upright, config.resolution, config.background or WHITE, data)
    channels_last = [square[:, :, None] if square.ndim == 2 else square for square in found]
    squares = [np.ascontiguousarray(square.transpose(2, 0, 1)) for square in channels_last]
    return Crop(squares, upright.size, sorted(flags), *stored)


def _check_size(size: tuple[int, int], config: DataConfig) -> None:
    """Judge an image by its header, before anything is decoded."""
    width, height = size
    if width * height > config.max_pixels:
        raise BadImage(f"too large: {width} x {height} pixels, more than max_pixels = {config.max_pixels}")
    if min(size) < config.min_side:
        raise BadImage(f"too small: {width} x {height} pixels, less than min_side = {config.min_side}")
    scaled = config.crop.scaled_size(width, height, config.resolution)
    if scaled[0] * scaled[1] > max(config.max_pixels, config.resolution**2):
        raise BadImage(f"too thin: {width} x {height} pixels would be scaled to {scaled[0]} x {scaled[1]}")


def _decode(image: Image.Image, config: DataConfig) -> tuple[Image.Image, set[str]]:
    """The image upright and in the mode of the crops, with its flags."""
    flags = set()
    if getattr(image, "is_animated", False):
        flags.add("first_frame")
    tiles = image.tile if isinstance(image, ImageFile.ImageFile) else []
    if any("16" in str(tile[3]) for tile in tiles) or image.mode.startswith("I;16"):
        flags.add("16bit")
    if ("exif" in image.info or image.format in ("TIFF", "MPO")) and _is_turned(image):
        flags.add("exif")
        image = ImageOps.exif_transpose(image)
    image.load()
    match image.mode:
        case "F":
            raise BadImage("32-bit floating-point pixels, which have no agreed range")
        case "I" if image.format not in ("PNG", "PPM"):
            raise BadImage("32-bit integer pixels, which have no agreed range")
        case "I" | "I;16" | "I;16L" | "I;16B" | "I;16N":
            flags |= {"16bit", "gray"}
            image = _scale_16bit(image)
        case "L" | "1":
            flags.add("gray")
        case "LA" | "La":
            flags |= {"gray", "alpha"}
        case "P" | "PA":
            flags.add("palette")
        case "CMYK":
            flags.add("cmyk")
        case "YCbCr" | "HSV" | "LAB":
            flags.add("colour_space")
    if image.mode in ("RGBA", "RGBa", "PA") or "transparency" in image.info:
        flags.add("alpha")
    mode = _MODES[config.channels]
    if "alpha" in flags and config.channels in (1, 3):
        image = image.convert("RGBA")
        behind = Image.new("RGBA", image.size, (*(config.background or WHITE), 255))
        image = Image.alpha_composite(behind, image).convert("RGB")
    return image if image.mode == mode else image.convert(mode), flags


def _scale_16bit(image: Image.Image) -> Image.Image:
    """Grey of 16 bits -> grey of 8 bits, rounded to nearest. A transparent grey value is dropped with its range."""
    values = np.asarray(image).astype(np.int64)
    if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
        raise BadImage("pixels of more than 16 bits, which have no agreed range")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _is_upright(data: bytes) -> bool:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return not _is_turned(image)


def _is_turned(image: Image.Image) -> bool:
    """Whether Exif data say that an image is to be turned or mirrored."""
    return image.getexif().get(_ORIENTATION, 1) in range(2, 9)


def _fast_crop(source: bytes | Image.Image, resolution: int) -> NDArray[np.uint8]:
    from image_diffusion.data.fast_crop import crop_jpeg, crop_pillow

    return crop_jpeg(source, resolution) if isinstance(source, bytes) else crop_pillow(source, resolution)
